"""Cycles of shared memory, as numbers alone. That the emulator counts alike is test_counts.py's."""

from dataclasses import replace

import pytest

from ksgen.families.banks import Image, copy_cycles, image_cycles, line_cycles, read_cycles, write_cycles

LANES = range(32)


@pytest.mark.parametrize(
    ("addresses", "size", "reads", "writes"),
    [
        ([4 * lane for lane in LANES], 4, 1, 1),
        ([2 * lane for lane in LANES], 2, 1, 1),
        ([128 * lane for lane in LANES], 4, 32, 32),
        ([8 * lane for lane in LANES], 8, 2, 2),
        ([8 * (lane // 2) for lane in LANES], 8, 1, 2),
        ([16 * lane for lane in LANES], 16, 4, 4),
        ([16 * (lane // 2) for lane in LANES], 16, 2, 4),
        ([16 * (lane % 2 + lane // 4 * 2) for lane in LANES], 16, 2, 4),
        ([16 * (lane % 8) for lane in LANES], 16, 4, 4),
        ([128 * (lane % 8) for lane in LANES], 16, 32, 32),
    ],
)
def test_cycles(addresses: list[int], size: int, reads: int, writes: int) -> None:
    assert (read_cycles(addresses, size), write_cycles(addresses, size)) == (reads, writes)


def test_lanes_over_an_image() -> None:
    planes = Image(planes=2, plane=100, next_line=1, next_run=32, element_bytes=4)
    assert (
        image_cycles(write_cycles, planes, 8, 1, 4)
        == write_cycles([4 * (n % 2 * 100 + n // 8 + n % 8 // 2 * 32) for n in LANES], 4)
        == 4
    )
    rows = Image(planes=1, plane=0, next_line=64, next_run=1, element_bytes=4)
    assert image_cycles(write_cycles, rows, 16, 4, 16) == 4


def test_chunks_that_change_places_by_feature_keep_lanes_apart() -> None:
    rows = Image(planes=1, plane=0, next_line=1, next_run=16, element_bytes=4)
    assert image_cycles(write_cycles, rows, 8, 1, 4) == 4  # eight features, of which each second one has the same banks
    spread = replace(rows, chunk=4)
    assert [image_cycles(write_cycles, spread, 8, 1, 4, first) for first in range(0, 16, 2)] == [1] * 8
    assert line_cycles(write_cycles, spread, 8, 1, 4, 64, 1) == 8
    planes = Image(planes=5, plane=1032, next_line=1, next_run=16, element_bytes=4, chunk=4)
    by_start = [image_cycles(write_cycles, planes, 8, 1, 4, first) for first in range(0, 40, 8)]
    assert by_start == [3, 2, 1, 2, 3]
    assert line_cycles(write_cycles, planes, 8, 1, 4, 80, 1) == 2 * sum(by_start)
    by_line = [line_cycles(write_cycles, replace(planes, plane=1036), 8, 1, 4, 40, 1, line) for line in range(0, 16, 4)]
    assert by_line == [12, 9, 12, 10]


def test_lanes_go_along_a_line_that_begins_at_any_plane() -> None:
    planes = Image(planes=6, plane=34, next_line=1, next_run=33, element_bytes=4)
    by_plane = [image_cycles(write_cycles, planes, 8, 4, 4, first) for first in range(6)]
    assert by_plane == [3, 3, 4, 4, 4, 4]
    assert line_cycles(write_cycles, planes, 8, 4, 4, 192, 1) == sum(by_plane) * 4  # 24 starts, each plane's four times


def test_copies_are_writes_of_whole_warps_and_one_of_the_rest() -> None:
    assert [copy_cycles(lambda n: 4 * n, count, 4) for count in (32, 33, 96)] == [1, 2, 3]
    assert copy_cycles(lambda n: 16 * n, 32, 16) == 4
    assert copy_cycles(lambda n: 128 * n, 40, 4) == 40  # all in one bank

    def place(n: int) -> int:
        return 128 * n if n < 32 else 4 * n

    assert [copy_cycles(place, 128, 4, most) for most in (None, 1, 2)] == [35, 128, 66]
