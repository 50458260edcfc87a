"""Users' values: which are numbers and lists, and how messages quote them; numbers in words."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.values import (
    MOST_SHOWN,
    cached_property,
    counted,
    excerpt,
    grouped,
    listed,
    misfit_of_x,
    shown,
    spanned,
    whole_number,
)

ROOT = Path(__file__).parents[1]


class Mute:
    def __repr__(self) -> str:
        raise ValueError("says nothing")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (3, 3),
        (np.int64(-2), -2),
        (True, None),
        (np.bool_(True), None),
        (3.0, None),
        ("3", None),
        (np.array([1, 2]), None),
        (None, None),
    ],
)
def test_integers_of_any_library_are_numbers_and_truth_values_are_not(value: Any, number: int | None) -> None:
    assert whole_number(value) == number
    assert type(whole_number(value)) in (int, type(None))


def test_what_can_be_gone_through_is_a_tuple() -> None:
    assert listed([1, 2]) == listed(iter((1, 2))) == (1, 2)
    assert listed(3) is None


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("a\nb", r"'a\nb'"),
        (np.eye(2), "array([[1., 0.], [0., 1.]])"),
        (2**64, "a number of 65 bits"),
        (2**64 - 1, "18446744073709551615"),
        ("x" * 58, f"'{'x' * 58}'"),
        ("x" * 59, f"'{'x' * 56}..."),
        (Mute(), "<Mute>"),
    ],
)
def test_a_value_is_quoted_in_one_short_line(value: Any, text: str) -> None:
    assert excerpt(value) == text


def test_a_path_is_shown_whole_unless_it_leads_beyond_any_folder() -> None:
    assert shown(Path("a b/ü")) == "a b/ü"
    assert shown("a\nb") == r"a\nb"
    assert shown("x" * MOST_SHOWN) == "x" * MOST_SHOWN
    assert shown("a" + "x" * MOST_SHOWN + "z") == f"a{'x' * 56}...{'x' * 56}z"


@pytest.mark.parametrize(
    ("shape", "layout", "batch", "least", "other"),
    [
        ((8, 5), "bsf", "batch", 0, "bsl"),
        ((8, 5), "bsf", "batch", 1, "bsl"),
        ((5, 8), "bsl", "batch", 1, "bsf"),
        ((8, 0), "bsf", "batch", 0, "bsl"),
        ((8, 0), "bsf", "batch", 1, ""),  # the other layout would refuse an empty batch, too
        ((8, 0), "bsl", "batch", 1, ""),
        ((8, 3, 5), "bsf", "batch", 0, ""),  # no matrix in either layout
        ((5, 3, 8), "bsl", "batch", 0, ""),
        ((8, 3, 8), "bsl", "batch", 0, ""),
        ((8, 3, 5), "bsf", "...", 0, "bsl"),
        ((5, 3, 8), "bsl", "...", 0, "bsf"),
        ((), "bsf", "...", 0, ""),
        ((5,), "bsf", "...", 0, ""),
    ],
)
def test_the_other_layout_is_named_if_x_fits_it(
    shape: tuple[int, ...], layout: str, batch: str, least: int, other: str
) -> None:
    hint = f"; that fits layout {other}" if other else ""
    remedy = ", with a batch of at least 1" if least else ""
    wanted = f"({batch}, 8)" if layout == "bsf" else f"(8, {batch})"
    expected = f"got x of shape {shape}; layout {layout} wants {wanted}{remedy}{hint}"
    assert misfit_of_x(shape, 8, layout, batch, least) == expected
    assert not other or not misfit_of_x(shape, 8, other, batch, least)


def test_a_cached_property_is_computed_once_per_object_even_in_a_frozen_dataclass() -> None:
    computed = []

    @dataclass(frozen=True)
    class Square:
        side: int

        @cached_property
        def area(self) -> int:
            """The area."""
            computed.append(self.side)
            return self.side**2

    one, other = Square(3), Square(4)
    assert (one.area, one.area, other.area) == (9, 9, 16)
    assert computed == [3, 4]
    assert one == Square(3)
    assert Square.area.__doc__ == "The area."


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


def test_groups_keep_the_order_of_their_items() -> None:
    found = grouped(["bc", "a", "d", "ef"], len)
    assert list(found.items()) == [(2, ["bc", "ef"]), (1, ["a", "d"])]
    assert grouped([], len) == {}
