"""Bytes of whole sectors, against a count of the sectors themselves."""

from itertools import product

import pytest

from ksgen.families.traffic import SECTOR, array_bytes, bytes_of_exchanged_row, bytes_of_row, line_bytes, run_bytes
from ksgen.order import Order
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.kernels import kernel_of


def sectors(starts: range, size: int) -> float:
    return SECTOR * sum(len({byte // SECTOR for byte in range(start, start + size)}) for start in starts) / len(starts)


@pytest.mark.parametrize(("size", "step"), list(product((2, 16, 31, 32, 33, 96, 100), (2, 4, 8, 16, 32, 48, 64))))
def test_runs_take_whole_sectors(size: int, step: int) -> None:
    assert run_bytes(size, step) == sectors(range(0, 32 * step, step), size)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((64, 32, 64, 32), 64 * 32 * 2),  # features, j, tile, tile_d: all neighbours
        ((64, 32, 64, 8), 2 * 64 * 32 * 2),  # 16 bytes of each sector at a time
        ((64, 32, 64, 16), 64 * 32 * 2),
        ((64, 4, 16, 4), 64 * 4 * 2),
        ((48, 4, 32, 4), 48 * 4 * 2),  # the last tile is half a one
        ((64, 4, 64, 2), 2 * 64 * 4 * 2),  # all of each row, for either half of the j
    ],
)
def test_a_row_by_tiles(shape: tuple[int, int, int, int], expected: int) -> None:
    assert bytes_of_row(*shape, 2) == expected


def test_a_line_of_the_batch_by_tiles() -> None:
    assert line_bytes(256, 64, 2) == 512
    assert line_bytes(200, 64, 2) == 3 * (128 + 160) / 2 + 32  # every other line begins in the middle of a sector


def test_an_array_is_all_of_them() -> None:
    bsf, bsl = (kernel_of((3, 48, 64, 4), "float16", layout) for layout in ("bsf", "bsl"))
    assert array_bytes(bsf, 64, 64, 4, 100, 32, 2) == 3 * 100 * bytes_of_row(64, 4, 64, 4, 2)
    assert array_bytes(bsl, 64, 64, 1, 256, 64, 2) == 3 * 64 * 4 * 256 * 2


def sectors_of_tiles(order: Order, tile: tuple[int, int, int], item_bytes: int, unit: int, rows: int) -> int:
    """Units that tiles touch in a few rows, feature by feature."""
    touched = set()
    for row, i, inner, j in product(range(rows), *map(range, order.sizes)):
        at = (row * order.count + order.place_of(i, inner, j)) * item_bytes
        units = range(at // unit, (at + item_bytes - 1) // unit + 1)
        touched |= {(row, i // tile[0], inner // tile[1], j // tile[2], each) for each in units}
    return len(touched)


@pytest.mark.parametrize(
    ("text", "tile", "item_bytes", "unit"),
    [
        ("l.i@16,8,24,1", (1, 24, 1), 4, SECTOR),  # every sixteenth element: a sector each
        ("l.i@4,8,24,1", (1, 24, 1), 4, SECTOR),  # two of a sector
        ("l1:3.i.l2@6,8,24,1", (1, 24, 1), 4, SECTOR),  # whole sectors
        ("l.i.j@3,8,10,7", (1, 4, 3), 4, SECTOR),  # rows begin in the middle of a sector, and tiles are ragged
        ("l.i@4,8,24,1", (2, 24, 1), 2, 64),  # two i of a plane share cache lines
        ("l.i@4,8,24,1", (1, 24, 1), 24, SECTOR),  # features of twelve rows of a small batch, over the ends of sectors
        ("l.i@4,8,24,1", (1, 24, 1), 128, SECTOR),  # whole sectors each
    ],
)
def test_a_row_of_exchanged_features_by_tiles(
    text: str, tile: tuple[int, int, int], item_bytes: int, unit: int
) -> None:
    order, rows = Pattern.parse(text).inputs, 64
    counted = unit * sectors_of_tiles(order, tile, item_bytes, unit, rows)
    assert rows * bytes_of_exchanged_row(order, tile, item_bytes, unit) == counted


def test_exchanged_features_have_lines_of_their_own_in_batch_size_last() -> None:
    pattern = Pattern.parse("l.i@16,64,64,1")
    for layout, times in (("bsf", 8), ("bsl", 1)):
        kernel, natural = (KernelSpec(each, "float32", layout) for each in (pattern, pattern.natural))
        plain = array_bytes(natural, 64, 64, 1, 256, 64, 4, natural.pattern.inputs)
        assert array_bytes(kernel, 64, 64, 1, 256, 64, 4, pattern.inputs) == times * plain
