"""Tiles, planes and groups, and what a work group keeps of them."""

from dataclasses import replace

import pytest

from ksgen.errors import ConstantsError
from ksgen.families.amx.shape import AmxConstants, AmxTiling, products_of
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.families.test_vector import kernel_of

CONSTANTS = AmxConstants(64, 32, 1, 1, 0, 2)


def shape(pattern: tuple[int, ...], precision: str = "bfloat16", layout: str = "bsf") -> AmxTiling:
    return AmxTiling(kernel_of(pattern, precision, layout), CONSTANTS)


@pytest.mark.parametrize(
    ("d", "run", "planes_j", "square", "is_interleaved"),
    [
        (1, 1, 1, 1, True),
        (3, 3, 1, 16, False),
        (4, 4, 1, 4, True),
        (16, 16, 1, 16, True),
        (40, 40, 1, 16, False),
        (64, 32, 2, 16, False),
        (100, 32, 4, 16, False),
    ],
)
def test_a_plane_holds_all_j_or_a_line_of_them(
    d: int, run: int, planes_j: int, square: int, is_interleaved: bool
) -> None:
    found = shape((2, 40, 40, d))
    assert (found.run, found.planes_j, found.square, found.is_interleaved) == (run, planes_j, square, is_interleaved)
    assert shape((2, 40, 40, d), layout="bsl").planes == 2 * d


def test_operands_are_whole_tiles() -> None:
    found = shape((2, 17, 33, 3))
    assert (found.tiles, found.steps, found.packed_tiles) == (2, 2, 12)
    assert found.packed_bytes == 12 * 2 * 1024
    assert found.panel * 4 == 3 * (64 // 16 * 2 * 1024 + 64)  # a line lies between the j
    assert found.sums * 4 == 3 * (64 * 32 * 4 + 64)
    assert shape((2, 17, 33, 1)).panel * 4 == 64 // 16 * 2 * 1024
    assert shape((2, 17, 33, 3), "bf16x6").packed_bytes == 3 * found.packed_bytes
    assert found.slot >= found.panel + found.sums
    assert found.slot * 4 % 64 == 0


def test_what_comes_next_is_fetched_once() -> None:
    """All two-by-two tiles of a plane together prefetch each line once."""
    for pattern, layout in (((1, 96, 98, 2), "bsf"), ((1, 96, 98, 40), "bsf"), ((2, 96, 98, 3), "bsl")):
        found = shape(pattern, layout=layout)
        rows = 64 if layout == "bsf" else 98
        fetched = found.ahead_lines * found.squares * found.groups
        assert rows * found.ahead_run <= fetched < rows * found.ahead_run + found.squares * found.groups


@pytest.mark.parametrize(
    ("text", "in_run"), [("l1:2.i.l2@2,16,64,1", 16), ("l.i.j@3,9,7,4", 4), ("i2:2.i1:2.i3:4@16,8,1,1", 1)]
)
def test_inputs_that_are_copied_together_are_of_one_i(text: str, in_run: int) -> None:
    assert AmxTiling(KernelSpec(Pattern.parse(text), "bfloat16"), CONSTANTS).in_run == in_run


def test_precisions_without_tiles_are_refused() -> None:
    assert products_of(kernel_of((1, 1, 1, 1), "tf32x3")).products == 6
    with pytest.raises(
        ConstantsError, match="matrix tiles have no products in float64; accepted: float16, bfloat16, tf32x3, bf16x6"
    ):
        products_of(replace(kernel_of((1, 1, 1, 1)), precision="float64"))
