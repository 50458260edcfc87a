"""The cost model against times that others measured: `python -m benchmarks.ksmm`. Measures nothing.

`ksmm_times.csv.gz` holds the best times that the paper's authors found for their own kernel, and the constants that gave them: figures of
the public repository PascalCarrivain/ksmm at d02b9cc (`kernel_bs_first_float.best` and its three neighbours), those for batch 25088, each
once. The GPU is not named there. Its rates are an A100's: of the float32 times one is 1.6 % below what that peak allows, and none further.
Here stand what that kernel asks of a GPU under these constants, counted in its text, and what the model makes of it.
"""

import csv
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from io import StringIO
from pathlib import Path
from statistics import median, quantiles

import click

from ksgen.families import cuda_limits
from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Geometry, Work
from ksgen.families.expected import Prediction, Speed, prediction, speed_of
from ksgen.families.tiles import WARP
from ksgen.families.traffic import SECTOR
from ksgen.measure.ranks import rank_correlation
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

TIMES = Path(__file__).with_name("ksmm_times.csv.gz")
BATCH, LIMITS = 25088, cuda_limits("sm_80")
BOOKKEEPING = 30  # registers of a thread besides sums and operands, about: nvcc gave it 48 to 91 in all


@dataclass(frozen=True)
class Tiles:
    """The kernel's constants, by our names."""

    tile_out: int
    tile_in: int
    tile_batch: int
    thread_out: int
    thread_batch: int
    vector: int  # elements that are read or written at once


@dataclass(frozen=True)
class Published:
    """One kernel's best time."""

    kernel: KernelSpec
    tiles: Tiles
    us: float


class Ksmm:
    """Their kernel, as far as the model asks. A block stages tiles of X and W in two buffers, through registers and with a barrier a
    stage, has plain multiply-adds in rows of `thread_out` x `thread_batch` sums, and handles one j: in batch-size-first its reads and
    writes are `d` elements apart."""

    name = "ksmm"
    on_tensor_cores = by_warpgroups = False

    def geometry(self, kernel: KernelSpec, tiles: Tiles, batch: int) -> Geometry:
        pattern = kernel.pattern
        threads = (tiles.tile_out // tiles.thread_out) * (tiles.tile_batch // tiles.thread_batch)
        elements = 2 * tiles.tile_in * (tiles.tile_batch + tiles.tile_out)
        if kernel.item_bytes == 4:
            elements += tiles.tile_batch * tiles.tile_out  # through which Y is stored
        grid = pattern.out_features // tiles.tile_out * -(-batch // tiles.tile_batch)
        return Geometry(grid, threads, elements * kernel.item_bytes)

    def registers(self, kernel: KernelSpec, tiles: Tiles, target: str = "sm_80") -> int:
        return tiles.thread_out * tiles.thread_batch + tiles.thread_out + tiles.thread_batch + BOOKKEEPING

    def work(self, kernel: KernelSpec, tiles: Tiles, batch: int) -> Work:
        geometry, item = self.geometry(kernel, tiles, batch), kernel.item_bytes
        outputs = batch * kernel.pattern.out_features
        x = kernel.pattern.c * item / tiles.tile_out * self._spread(kernel)
        w = kernel.pattern.c * item / tiles.tile_batch
        stages = geometry.grid * (kernel.pattern.c // tiles.tile_in)
        return Work(
            geometry.grid,
            kernel.bytes(batch),
            round(outputs * (x + w + self._stored_bytes(kernel, tiles))),
            CYCLE_BYTES * round(geometry.grid * self._shared_cycles(kernel, tiles)),
            kernel.flops(batch) // 2 * item // 4,  # two products of 16 bits at a time
            stages=stages,
            synchronous=stages,
        )

    def _spread(self, kernel: KernelSpec) -> int:
        """Of what is fetched of X, how much for each byte that is used: the other j are other blocks'."""
        return min(kernel.pattern.d, SECTOR // kernel.item_bytes) if kernel.layout == "bsf" else 1

    def _stored_bytes(self, kernel: KernelSpec, tiles: Tiles) -> float:
        """Of Y to the cache, for each output: whole sectors for what one instruction of a warp has of them."""
        item = kernel.item_bytes
        if kernel.layout == "bsf":  # a lane stores one element, the next lane's is `thread_out` outputs away
            return min(SECTOR, item * tiles.thread_out * kernel.pattern.d)
        side_by_side = WARP // (tiles.tile_out // tiles.thread_out) if tiles.thread_batch == tiles.vector else 1
        return max(item, SECTOR / (tiles.vector * max(1, side_by_side)))

    def _shared_cycles(self, kernel: KernelSpec, tiles: Tiles) -> float:
        """Of a block. A read of 16 bytes a lane takes a warp four cycles, two where neighbours read the same; both of X, none of W."""
        item = kernel.item_bytes
        warps = -(-self.geometry(kernel, tiles, BATCH).block // WARP)
        apart = max(1, tiles.vector * item // 4)
        together = max(1, apart // 2)
        reads = warps * kernel.pattern.c * (together * tiles.thread_batch + apart * tiles.thread_out) / tiles.vector
        staged = kernel.pattern.c * (tiles.tile_batch + tiles.tile_out) * item
        passed = 2 * tiles.tile_batch * tiles.tile_out * item if item == 4 else 0
        return reads + (staged + passed) / CYCLE_BYTES


KSMM = Ksmm()


def _speed(kernel: KernelSpec) -> Speed:
    """Of an A100."""
    found = speed_of(KSMM, kernel, LIMITS)
    assert found is not None
    return found


@cache
def published() -> tuple[Published, ...]:
    """All times, in the file's order."""
    text = gzip.decompress(TIMES.read_bytes()).decode()
    return tuple(_read(row) for row in csv.DictReader(StringIO(text)))


def _read(row: dict[str, str]) -> Published:
    pattern = Pattern(*(int(row[name]) for name in "abcd"))
    tiles = Tiles(*(int(row[name]) for name in Tiles.__dataclass_fields__))
    return Published(KernelSpec(pattern, row["precision"], row["layout"]), tiles, float(row["us"]))


@dataclass(frozen=True)
class Replayed:
    """One time, and what the model says of it. Microseconds."""

    known: Published
    floor: float  # X, weights and Y moved once, all multiply-adds done
    longest: float  # of memory, cache, shared memory and multiply-adds, each at its full rate
    together: float  # multiply-adds and cache, one after the other
    predicted: Prediction


def replayed(known: Published) -> Replayed:
    kernel, speed = known.kernel, _speed(known.kernel)
    work = KSMM.work(kernel, known.tiles, BATCH)
    memory, cache_ = work.memory_bytes / speed.bytes_per_s, work.cache_bytes / speed.cache_bytes_per_s
    shared = work.shared_bytes / speed.shared_bytes_per_s / speed.multiprocessors
    multiply = 2 * work.multiply_adds / speed.flops_per_s
    predicted = prediction(speed, KSMM, kernel, known.tiles, BATCH)
    assert predicted is not None
    longest = max(memory, cache_, shared, multiply)
    return Replayed(known, max(memory, multiply) * 1e6, longest * 1e6, (multiply + cache_) * 1e6, predicted)


@dataclass(frozen=True)
class Replay:
    """What the model makes of one layout in one precision."""

    rows: tuple[Replayed, ...]

    @property
    def bounded(self) -> int:
        """Rows that took no less than the longest term."""
        return sum(row.longest <= row.known.us for row in self.rows)

    def share(self, what: str) -> tuple[float, float, float]:
        """Of the measured times, what a term is: all but the extreme twentieths, and the median."""
        return band([getattr(row, what) / row.known.us for row in self.rows])

    @property
    def over_predicted(self) -> tuple[float, float, float]:
        """Measured times over the predicted ones."""
        return band([row.known.us / row.predicted.us for row in self.rows])

    @property
    def correlation(self) -> float:
        """Of the ranks of predicted and measured slowdown over the floor: sizes, which make any prediction look good, are out of it."""
        predicted = [row.predicted.us / row.floor for row in self.rows]
        return rank_correlation(predicted, [row.known.us / row.floor for row in self.rows])

    def correlation_of(self, what: str) -> float:
        """The same for a term alone."""
        return rank_correlation([getattr(row, what) / row.floor for row in self.rows], [row.known.us / row.floor for row in self.rows])

    @property
    def within(self) -> float:
        """The share of rows whose time lies in its prediction's band."""
        return sum(row.predicted.low <= row.known.us <= row.predicted.high for row in self.rows) / len(self.rows)


def band(ratios: list[float]) -> tuple[float, float, float]:
    """The fifth, the fiftieth and the ninety-fifth of a hundred."""
    twentieths = quantiles(ratios, n=20, method="inclusive")
    return twentieths[0], median(ratios), twentieths[-1]


@cache
def replay(layout: str, precision: str) -> Replay:
    return Replay(tuple(replayed(each) for each in published() if (each.kernel.layout, each.kernel.precision) == (layout, precision)))


def replays() -> Iterator[tuple[str, str, Replay]]:
    for precision in ("float32", "float16"):
        for layout in ("bsf", "bsl"):
            yield precision, layout, replay(layout, precision)


def _spelled(figures: tuple[float, float, float]) -> str:
    low, middle, high = figures
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


@click.command()
def main() -> None:
    """Print, for each precision and layout: how many times are known and how many lie above the longest term; what share of the time that
    term is, and multiply-adds and cache one after the other; the measured times over the predicted ones and how many of them lie within
    the predictions' bands; and the rank correlations of the slowdown over the floor, as predicted and by the longest term."""
    click.echo("precision layout  rows bounded  longest             ffma + cache        measured/predicted  within  ranks  by longest")
    for precision, layout, found in replays():
        figures = (found.share("longest"), found.share("together"), found.over_predicted)
        click.echo(
            f"{precision:<9} {layout:<6} {len(found.rows):5d} {found.bounded:7d}  {'  '.join(map(_spelled, figures))}  {found.within:6.2f}"
            f" {found.correlation:6.2f} {found.correlation_of('longest'):11.2f}"
        )
    everything = [row for _, _, found in replays() for row in found.rows]
    ratios = band([row.known.us / row.predicted.us for row in everything])
    click.echo(f"all             {len(everything):7d}  measured/predicted {_spelled(ratios)}")


if __name__ == "__main__":
    main()
