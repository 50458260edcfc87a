"""Libraries that `make test` does not install.

Tests that need one carry the marker `libraries`, and `make test-torch` runs them.
"""

import sys
from importlib.util import find_spec
from typing import Any

import pytest

REASON = "`make test-torch` installs it"
# Inductor links against PyTorch's libraries without quoting their path.
needs_inductor = pytest.mark.skipif(" " in sys.prefix, reason="inductor links nothing where PyTorch's path has a space")


def library(name: str) -> Any:
    """Import a library, or skip the test or the module."""
    return pytest.importorskip(name, reason=f"{name} is missing; {REASON}")


def needs(*names: str) -> pytest.MarkDecorator:
    """Skip the test where one of the libraries is missing. Nothing is imported."""
    missing = ", ".join(name for name in names if find_spec(name) is None)
    return pytest.mark.skipif(bool(missing), reason=f"{missing} is missing; {REASON}")
