"""Numbers in words, and that commands use them."""

import re
from pathlib import Path

import pytest

from ksgen.words import counted, spanned

ROOT = Path(__file__).parents[1]


def test_one_is_one() -> None:
    assert [counted(count, "kernel") for count in (0, 1, 2)] == ["0 kernels", "1 kernel", "2 kernels"]
    assert [counted(count, "entry", "entries") for count in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]


def test_a_range_of_one_value_is_that_value() -> None:
    assert spanned([3, 3]) == "3"
    assert spanned([10, 2, 3]) == "2 to 10"
    assert spanned([]) == ""
    assert spanned([1.001, 1.002], lambda value: f"{value:.1f}") == "1.0"


@pytest.mark.parametrize("path", sorted((ROOT / "ksgen").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_no_message_counts_by_hand(path: Path) -> None:
    """A number in braces before a plural: `{len(kernels)} kernels` says "1 kernels" some day."""
    things = "kernels|entries|binaries|jobs|patterns|trials|candidates|layers|devices|GPUs|images|measurements"
    assert not re.findall(rf"\{{[^{{}}]+\}} (?:(?:other|of) )?(?:{things})\b", path.read_text(encoding="utf-8")), path
