"""Errors that users see: all have one root, and a mistake of the user's ends a command in one line."""

import inspect
import subprocess
import sys

import pytest

from ksgen import errors
from ksgen.errors import KsgenError

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if not issubclass(kind, Warning)]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_error_is_ksgens_and_says_when_it_is_raised(kind: type[Exception]) -> None:
    assert issubclass(kind, KsgenError)
    assert kind.__doc__
    assert str(kind("what is wrong; what is accepted")) == "what is wrong; what is accepted"


def test_arguments_that_do_not_fit_are_caught_as_pytorchs_are() -> None:
    with pytest.raises(RuntimeError, match="x of shape"):
        raise errors.LaunchError("got x of shape (5, 23)")


def test_no_error_hides_another() -> None:
    """Each is caught by its own name, or by the root's."""
    assert all(kind.__base__ is KsgenError for kind in KINDS if kind is not KsgenError)


def test_the_errors_import_nothing_of_ksgens() -> None:
    program = (
        "import sys; from ksgen import errors; print(sorted(name for name in sys.modules if name.startswith('ksgen.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "['ksgen.errors']\n"
