"""Cycles that a GPU's shared memory takes to serve the lanes of a warp.

128 bytes go in or out per cycle: each of 32 banks moves one word of four bytes. So eight lanes are served at a time if
each accesses 16 bytes, and 16 lanes if each accesses eight. Reads serve twice as many lanes if every lane n has the
address of lane n ^ 1, or every lane that of lane n ^ 2.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from ksgen.families.tiles import WARP, divide_up

CYCLE_BYTES = 128
WORD = 4  # bytes of a bank


def read_cycles(addresses: Sequence[int], size: int) -> int:
    """Cycles of a warp's read of shared memory: `size` bytes per lane, at addresses that are multiples of `size`."""
    unit = max(size, WORD)
    lanes = CYCLE_BYTES // unit
    is_shared = any(all(addresses[lane] == addresses[lane ^ distance] for lane in range(WARP)) for distance in (1, 2))
    return _cycles(addresses, unit, min(WARP, 2 * lanes) if is_shared else lanes)


def write_cycles(addresses: Sequence[int], size: int) -> int:
    unit = max(size, WORD)
    return _cycles(addresses, unit, CYCLE_BYTES // unit)


def copy_cycles(place: Callable[[int], int], count: int, size: int, most: int | None = None) -> int:
    """Cycles in which warps write `count` pieces of `size` bytes, piece n at address `place(n)`.

    With `most`, only that many writes of warps are simulated, and further ones are assumed to take as long.
    """
    writes = range(0, count, WARP)
    simulated = writes[:most]
    cycles = sum(write_cycles(list(map(place, range(at, min(at + WARP, count)))), size) for at in simulated)
    return divide_up(cycles * len(writes), len(simulated))


@dataclass(frozen=True)
class Image:
    """Layout of a tile in shared memory, in elements. A line has all j of one feature, then those of the next one."""

    planes: int  # neighbouring j, each with its own plane
    plane: int  # from one plane to the next
    next_line: int  # from one line to the next
    next_run: int  # along a line, from one feature, or row of the batch, to the next
    element_bytes: int
    chunk: int = 0  # elements per chunk, if feature f has its chunk n at n ^ (f / 2 % 4); 0: chunks are in order


@cache
def image_cycles(
    access: Callable[[Sequence[int], int], int],
    image: Image,
    lane_run: int,
    vector: int,
    size: int,
    first: int = 0,
    first_line: int = 0,
) -> int:
    """Cycles of one access by a warp.

    `lane_run` lanes share a line, on which they are `vector` elements apart; further lanes are on the next lines. The
    first lane is at element `first` of line `first_line`.
    """

    def address(line: int, run: int) -> int:
        feature = run // image.planes
        along = (line * image.next_line) ^ (feature // 2 % 4 * image.chunk)
        return (run % image.planes * image.plane + along + feature * image.next_run) * image.element_bytes

    lanes = [(first_line + lane // lane_run, first + lane % lane_run * vector) for lane in range(WARP)]
    return access([address(line, run) for line, run in lanes], size)


@cache
def line_cycles(
    access: Callable[[Sequence[int], int], int],
    image: Image,
    lane_run: int,
    vector: int,
    size: int,
    run: int,
    at_once: int,
    line: int = 0,
) -> int:
    """Cycles of all accesses of a warp along whole lines of `run` elements, `at_once` elements each.

    The first line is `line`.
    """
    starts = [first + each for first in range(0, run, lane_run * vector) for each in range(0, vector, at_once)]
    period = image.planes * (8 if image.chunk else 1)  # starts at this distance have the same conflicts
    return sum(image_cycles(access, image, lane_run, vector, size, start % period, line) for start in starts)


def _cycles(addresses: Sequence[int], unit: int, lanes: int) -> int:
    return sum(
        _busiest({address // unit for address in addresses[first : first + lanes]}, unit)
        for first in range(0, WARP, lanes)
    )


def _busiest(units: Iterable[int], unit: int) -> int:
    """Largest number of these units that lie in the same banks."""
    places = CYCLE_BYTES // unit
    wanted = [0] * places
    for each in units:
        wanted[each % places] += 1
    return max(wanted)
