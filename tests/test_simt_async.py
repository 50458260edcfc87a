"""What is wrong with asynchronous kernels is caught: each case of `tests/ptx` with one mistake."""

import re

import pytest

from tests.ptx.cases import Case, all_cases
from tests.ptx.mistakes import MISTAKES, WRONG, Mistake
from tests.simt import SimtError, is_installed

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")

CASES = {case.name: case for case in all_cases()}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.name)
def test_mistake_is_caught(mistake: Mistake) -> None:
    if not is_installed(mistake.build):
        pytest.skip(f"g++ cannot link sanitize={mistake.build!r}")
    case = CASES[mistake.case].broken(mistake.right, mistake.wrong)
    kind, message = emulate(case, mistake)
    assert kind == mistake.kind, message
    assert re.search(mistake.message, message) or kind == WRONG, message


def emulate(case: Case, mistake: Mistake) -> tuple[str, str]:
    """What was caught, in two words."""
    try:
        case.emulate(mistake.build, order=mistake.order)
    except SimtError as error:
        return error.kind, str(error)
    except AssertionError as error:
        return WRONG, str(error)
    return "nothing", ""
