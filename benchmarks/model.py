"""Printed results of the cost model: `python -m benchmarks.model NAME`. Measures nothing, and needs no GPU.

| name | prints |
| --- | --- |
| `defaults` | shares of the floor that launchers' untuned choices should reach, on each target's usual card |
| `hopper-shares` | the same for Hopper's families: defaults, the best without clusters and resident X, and the best |
| `fused` | layers: all factors in one launch compared with one launch per factor, or several layers on one X |
| `ksmm` | the model replayed on the times that the paper's authors published for their kernel |
| `predictions` | predicted times of our kernels on an A100, compared with those times |
| `traffic` | shares of the bytes that blocks request from which caches and memory serve them |
| `measured` | ratios of measured to predicted times of our kernels, and of launchers' choices to the fastest |
| `sources` | sources that layers need at all batches on a processor |

`ksmm_times.csv.gz` holds the best times that the authors found, with their constants. They are from the public
repository PascalCarrivain/ksmm at d02b9cc (`kernel_bs_first_float.best` and its three neighbours): each figure for
batch 25088 once. The repository does not name the GPU. The rates fit an A100: one float32 time is 1.6 % below the limit
of its peak, and none is further below.
"""

import csv
import gzip
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from io import StringIO
from itertools import product
from math import inf
from pathlib import Path
from statistics import geometric_mean, mean, median, quantiles
from typing import Any

import click

from ksgen import __version__
from ksgen.bench.chains import transformers
from ksgen.bench.rows import read_rows
from ksgen.commands.common import PATTERN
from ksgen.errors import ConstantsError
from ksgen.families import Limits, cuda_limits, families_for, family_for, family_named
from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Geometry, Modelled, Work
from ksgen.families.chains import factor_kernels
from ksgen.families.expected import LARGE, LAUNCH_US, Prediction, Speed, default_us, gpu_us, prediction, speed_of
from ksgen.families.gpus import gpu_of
from ksgen.families.tiles import WARP, Constants
from ksgen.families.traffic import SECTOR
from ksgen.launch.fused import apart_us, dense_us, family_of_chain, shared_out, verdict_for
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Chain, Pattern, monarch
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec, stratified
from ksgen.spec.kernel import layer_launch
from ksgen.tuning.model import Machine, rank_correlation

BATCH = LARGE  # batch size of the published times
_PATTERNS = click.option(
    "--patterns", type=click.IntRange(min=1), default=60, show_default=True, help="Number of stratified patterns."
)


@click.group()
def main() -> None:
    """Print results of the cost model. Nothing is measured."""


def _speed(family: Modelled[Any], kernel: KernelSpec, limits: Limits, constants: Any = None) -> Speed:
    found = speed_of(family, kernel, limits, constants)
    assert found is not None, "a target whose usual card is known"
    return found


# ---- defaults

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


@dataclass(frozen=True)
class Expected:
    """Expectation of one kernel's default."""

    family: str
    share: float  # ratio of the floor, for the fastest instructions of any family, to the default's time
    launched: float  # the same, if the cost of one launch is part of the floor
    over_best: float  # ratio to the fastest of the families' defaults


def expected(kernel: KernelSpec, limits: Limits, batch: int, all_families: bool) -> Expected:
    """Compare the default that a launcher takes with the floor, and with the other families' defaults."""
    able = [family for family in families_for(kernel, limits, batch) if all_families or family.by_default]
    us = {family.name: default_us(family, kernel, limits, batch) for family in able}
    floors = []
    for family, constants in ((each, some) for each in able for some in each.defaults(kernel, limits, batch)):
        speed = _speed(family, kernel, limits, constants)
        products = kernel.arithmetic.products if constants.on_tensor_cores else 1
        floors.append(max(kernel.bytes(batch) / speed.bytes_per_s, products * kernel.flops(batch) / speed.flops_per_s))
    chosen = family_for(kernel, limits, batch, all_families=all_families).name
    floor_us = 1e6 * min(floors)
    return Expected(chosen, floor_us / us[chosen], (floor_us + LAUNCH_US) / us[chosen], us[chosen] / min(us.values()))


@main.command("defaults")
@_PATTERNS
@click.option(
    "--target", "targets", type=click.Choice(TARGETS), multiple=True, help="Only this target; may be given again."
)
@click.option("--batch", type=click.IntRange(min=1), default=LARGE, show_default=True)
def defaults(patterns: int, targets: tuple[str, ...], batch: int) -> None:
    """Print medians and minima of the defaults' shares of the floor, and of the floor with the cost of one launch.

    Another column is the largest ratio of the chosen default's time to that of the fastest family's default. The last
    one counts the chosen families. On Hopper, all families are printed too.
    """
    click.echo(f"{'target':<18} {'precision':<9} layout  median  min  with launch  min  over best  families")
    for target in targets or TARGETS:
        limits = cuda_limits(target)
        precisions = ("float32", "float16", "tf32", "tf32x3", "fp16x3")
        for all_families, precision, layout in product((False, True)[: 1 + limits.warpgroups], precisions, LAYOUTS):
            kernels = [KernelSpec(pattern, precision, layout) for pattern in stratified(patterns)]
            found = [expected(kernel, limits, batch, all_families) for kernel in kernels]
            shares, over = [each.share for each in found], max(each.over_best for each in found)
            launched = [each.launched for each in found]
            families = Counter(each.family for each in found).most_common()
            named = f"{target}{' with wgmma' if all_families else ''}"
            click.echo(
                f"{named:<18} {precision:<9} {layout:<6} {median(shares):7.2f} {min(shares):5.2f} "
                f"{median(launched):11.2f} {min(launched):5.2f} {over:9.2f}  "
                + ", ".join(f"{family} {count}" for family, count in families)
            )


# ---- Hopper

HOPPER = cuda_limits("sm_90a")


def hopper_shares(kernel: KernelSpec, ceilings: Ceilings) -> dict[str, float]:
    """Return the largest share of each sort of constants, over Hopper's families that support the kernel."""
    found: dict[str, float] = {}
    for name in ("wgmma_shared", "wgmma_registers", "wgmma_permuted"):
        family: Any = family_named(name)
        if not family.supports(kernel, HOPPER):
            continue
        speed = Machine("sm_90a", HOPPER, 132, {family.name: ceilings}).speed(ceilings)
        sorts = [("default", family.default(kernel, HOPPER))]
        for constants in family.space(kernel, HOPPER):
            sorts.append(("best", constants))
            if constants.cluster_batch == constants.cluster_out == 1 and not getattr(constants, "resident", 0):
                sorts.append(("alone", constants))
        for sort, constants in sorts:
            share = ceilings.floor_s(kernel, BATCH) * 1e6 / gpu_us(speed, family, kernel, constants, BATCH)
            found[sort] = max(found.get(sort, 0.0), share)
    return found


@main.command("hopper-shares")
@_PATTERNS
@click.option("--copy", default=4.0, show_default=True, help="TB/s, read plus written.")
@click.option("--multiply", default=790.0, show_default=True, help="TFLOP/s of 16-bit products; tf32 has half of it.")
def hopper(patterns: int, copy: float, multiply: float) -> None:
    """Print medians and minima of the shares of the floor.

    The columns are the defaults, the best without clusters and resident X, and the best of all constants. 60 patterns
    take a minute or more.
    """
    click.echo("precision layout   default: median min   alone: median min   best: median min")
    for layout, precision in product(("bsl", "bsf"), ("float16", "tf32x3")):
        products = PRECISIONS[precision].products
        ceilings = Ceilings(copy * 1e12, multiply * 1e12 / (1 if precision == "float16" else 2 * products), products)
        found = [hopper_shares(KernelSpec(pattern, precision, layout), ceilings) for pattern in stratified(patterns)]
        columns = [[each[sort] for each in found] for sort in ("default", "alone", "best")]
        figures = "".join(f"{median(column):16.2f} {min(column):.2f}" for column in columns)
        click.echo(f"{precision:<9} {layout:<8}{figures}")


# ---- layers

_ROW = "{:30} {:>9} {:>9} {:>6}   {:>9} {:>9} {:>6}   {:>9} {:>8}  {}"
SPLITS = (8, 16, 32, 64, 128)  # of both sides of the Monarch pairs that --square compares


def layer_row(
    chain: Chain, precision: str, layout: str, target: str, batch: int, side_by_side: int = 1
) -> dict[str, Any]:
    """Return megabytes and microseconds of one launch per factor, summed, and of a single launch, if one is possible.

    For layers side by side, a single launch is compared with one launch per layer. The figures are the fewest bytes
    possible, and the expected time of each layer's fastest form. The dense product has the layers' inputs and outputs.
    """
    alone, limits = KernelSpec((chain.factors,), precision, layout, Epilogue()), cuda_limits(target)
    kernel = KernelSpec((chain.factors,) * side_by_side, precision, layout, Epilogue())
    each = [alone] * side_by_side if side_by_side > 1 else factor_kernels(kernel)
    found: dict[str, Any] = {
        "each_mb": sum(launch.bytes(batch) for launch in each) / 1e6,
        "one_mb": kernel.bytes(batch) / 1e6,
        "each_us": apart_us(kernel, limits, batch),
        "dense_us": dense_us(kernel, limits, batch),
    }
    fused = family_of_chain(kernel, limits, batch)
    if fused is None:
        return found
    by = f"{fused.name}, {fused.default(kernel, limits, batch)}"
    return found | {"one_us": default_us(fused, kernel, limits, batch), "by": by}


def of_dense(found: dict[str, Any]) -> float:
    """Expected time of the layer's faster form as a share of that of the dense product."""
    share: float = min(found["each_us"], found.get("one_us", inf)) / found["dense_us"]
    return share


def square_row(features: int, *options: Any) -> tuple[str, dict[str, Any]]:
    """Name and row of the Monarch pair of so many features that is expected to be the fastest."""
    splits = [split for split in SPLITS if features % split == 0]
    if not splits:
        raise click.BadParameter(f"--square {features}; accepted: multiples of {SPLITS[0]}")
    rows = {
        f"monarch {features}, splits {split}": layer_row(monarch(features, features, split, split), *options)
        for split in splits
    }
    return min(rows.items(), key=lambda row: of_dense(row[1]))


def layer_lines(rows: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Yield a table, and a summary of all gains."""
    yield _ROW.format(
        "chain", "each, MB", "one, MB", "gain", "each, us", "one, us", "gain", "dense, us", "of dense", "by"
    )
    fewer, gains = [], []
    for name, found in rows.items():
        each, one = found["each_us"], found.get("one_us")
        fewer.append(found["each_mb"] / found["one_mb"])
        gains += [each / one] if one else []
        mb = (f"{found['each_mb']:.1f}", f"{found['one_mb']:.1f}", f"{fewer[-1]:.2f}")
        us = (f"{one:.1f}", f"{each / one:.2f}") if one else ("-", "-")
        dense = f"{found['dense_us']:.1f}", f"{of_dense(found):.2f}"
        yield _ROW.format(name, *mb, f"{each:.1f}", *us, *dense, found.get("by", "no room"))
    taken = [gain for gain in gains if gain > 1]
    yield (
        f"{len(rows)} chains: {geometric_mean(fewer):.2f} times fewer bytes at the mean; "
        f"one launch has room for {len(gains)}, and gains in {len(taken)}"
    )
    if taken:
        all_of_them = geometric_mean([*taken, *[1.0] * (len(rows) - len(taken))])
        mean = f"{geometric_mean(taken):.2f} at the mean, {min(taken):.2f} to {max(taken):.2f}"
        yield f"gain of those {mean}; of all, as chosen, {all_of_them:.2f}"


@main.command("fused")
@click.option("--batch", default=BATCH, show_default=True)
@click.option("--precision", "precisions", default=("bfloat16", "float32"), multiple=True, show_default=True)
@click.option("--layout", "layouts", default=LAYOUTS, multiple=True, show_default=True)
@click.option("--target", "targets", default=("sm_80", "sm_90a"), multiple=True, show_default=True)
@click.option(
    "--side-by-side", type=click.IntRange(min=1), default=1, show_default=True, help="Number of equal layers on one X."
)
@click.option(
    "--square",
    type=click.IntRange(min=8),
    multiple=True,
    help="Instead of the 24 chains, the fastest Monarch pair of so many inputs and outputs; may be given again.",
)
@click.option("--json", "as_json", is_flag=True)
def fused(
    batch: int, precisions: Sequence[str], layouts: Sequence[str], targets: Sequence[str], side_by_side: int,
    square: Sequence[int], as_json: bool,
) -> None:  # fmt: skip
    """Print bytes and expected times of the 24 chains of `ksgen bench layers`.

    One launch per factor is compared with one launch, and the faster of both with the dense product. With
    --side-by-side 3, three layers on one X, such as q, k and v, are compared: one launch per layer, and one launch.
    Bytes are the least that cross memory.
    """
    for target, precision, layout in product(targets, precisions, layouts):
        options = precision, layout, target, batch, side_by_side
        rows = {name: layer_row(chain, *options) for name, chain in transformers().items()} if not square else {}
        rows |= dict(square_row(features, *options) for features in square)
        if as_json:
            setting = {"target": target, "precision": precision, "layout": layout, "batch": batch}
            click.echo(json.dumps(setting | {"chains": rows}))
            continue
        rates = gpu_of(target).rates
        click.echo(f"\n{rates.card if rates else target} ({target}), {precision}, {layout}, batch {batch}")
        click.echo("\n".join(layer_lines(rows)))


# ---- the authors' kernel

A100 = cuda_limits("sm_80")
# approximate registers per thread in addition to sums and operands; nvcc gives the kernel 48 to 91 in all
BOOKKEEPING = 30
Band = tuple[float, float, float]  # percentiles 5, 50 and 95


@dataclass(frozen=True)
class Tiles(Constants):
    """Constants of the authors' kernel, by our names."""

    tile_out: int
    tile_in: int
    tile_batch: int
    thread_out: int
    thread_batch: int
    vector: int  # elements per read or write


class Ksmm:
    """The authors' kernel, with the properties that the model reads.

    A block stages tiles of X and W in two buffers, through registers and with a barrier per stage. Plain multiply-adds
    fill `thread_out` x `thread_batch` sums. A block handles one j: in batch-size-first its reads and writes are `d`
    elements apart.
    """

    name = "ksmm"
    kinds = (Tiles,)
    by_warpgroups = False

    def geometry(self, kernel: KernelSpec, tiles: Tiles, batch: int) -> Geometry:
        threads = (tiles.tile_out // tiles.thread_out) * (tiles.tile_batch // tiles.thread_batch)
        elements = 2 * tiles.tile_in * (tiles.tile_batch + tiles.tile_out)
        if kernel.item_bytes == 4:
            elements += tiles.tile_batch * tiles.tile_out  # buffer through which Y is stored
        grid = kernel.pattern.out_features // tiles.tile_out * -(-batch // tiles.tile_batch)
        return Geometry(grid, threads, elements * kernel.item_bytes)

    def registers(self, kernel: KernelSpec, tiles: Tiles, target: str = "sm_80") -> int:
        return tiles.thread_out * tiles.thread_batch + tiles.thread_out + tiles.thread_batch + BOOKKEEPING

    def work(self, kernel: KernelSpec, tiles: Tiles, batch: int) -> Work:
        geometry, item, c = self.geometry(kernel, tiles, batch), kernel.item_bytes, kernel.pattern.c
        fetched = min(kernel.pattern.d, SECTOR // item) if kernel.layout == "bsf" else 1  # other blocks read other j
        each = c * item / tiles.tile_out * fetched + c * item / tiles.tile_batch + self._stored_bytes(kernel, tiles)
        stages = geometry.grid * (c // tiles.tile_in)
        return Work(
            geometry.grid,
            kernel.bytes(batch),
            round(batch * kernel.pattern.out_features * each),
            CYCLE_BYTES * round(geometry.grid * self._shared_cycles(kernel, tiles, geometry.block)),
            kernel.flops(batch) // 2 * item // 4,  # two products of 16 bits at a time
            stages=stages,
            synchronous=stages,
        )

    def _stored_bytes(self, kernel: KernelSpec, tiles: Tiles) -> float:
        """Return bytes of Y to the cache per output: full sectors for the outputs of one warp instruction."""
        item = kernel.item_bytes
        if kernel.layout == "bsf":  # a lane stores one element; the next lane's is `thread_out` outputs away
            return min(SECTOR, item * tiles.thread_out * kernel.pattern.d)
        side_by_side = WARP // (tiles.tile_out // tiles.thread_out) if tiles.thread_batch == tiles.vector else 1
        return max(item, SECTOR / (tiles.vector * max(1, side_by_side)))

    def _shared_cycles(self, kernel: KernelSpec, tiles: Tiles, threads: int) -> float:
        """Return cycles of a block.

        A read of 16 bytes per lane takes a warp four cycles, or two if neighbours read the same. Neighbours read the
        same of X always, and of W never.
        """
        item, c = kernel.item_bytes, kernel.pattern.c
        apart = max(1, tiles.vector * item // 4)
        together = max(1, apart // 2)
        reads = -(-threads // WARP) * c * (together * tiles.thread_batch + apart * tiles.thread_out) / tiles.vector
        staged = c * (tiles.tile_batch + tiles.tile_out) * item
        passed = 2 * tiles.tile_batch * tiles.tile_out * item if item == 4 else 0
        return reads + (staged + passed) / CYCLE_BYTES


KSMM = Ksmm()


@dataclass(frozen=True)
class Published:
    """Best time of one published kernel in microseconds, with the model's predictions."""

    kernel: KernelSpec
    tiles: Tiles
    us: float

    @cached_property
    def terms(self) -> dict[str, float]:
        """Terms of the model in microseconds.

        `floor` moves X, weights and Y once, and does all multiply-adds. `longest` is the largest time of memory, cache,
        shared memory and multiply-adds, each at its full rate. `together` adds multiply-adds and cache.
        """
        speed, work = _speed(KSMM, self.kernel, A100), KSMM.work(self.kernel, self.tiles, BATCH)
        memory, from_cache = work.memory_bytes / speed.bytes_per_s, work.cache_bytes / speed.cache_bytes_per_s
        shared = work.shared_bytes / speed.shared_bytes_per_s / speed.multiprocessors
        multiply = 2 * work.multiply_adds / speed.flops_per_s
        longest = max(memory, from_cache, shared, multiply)
        seconds = {"floor": max(memory, multiply), "longest": longest, "together": multiply + from_cache}
        return {name: each * 1e6 for name, each in seconds.items()}

    @cached_property
    def predicted(self) -> Prediction:
        return _predicted(KSMM, self.kernel, self.tiles)

    def ours(self, precision: str) -> tuple[str, Prediction, Band]:
        """Return our family in that precision, its prediction, and ratios of the published time to it.

        A launcher would choose this family, here with default constants. The ratios are those to the slow end of the
        prediction's band, to the prediction, and to the fast end.
        """
        kernel = replace(self.kernel, precision=precision)
        family = family_for(kernel, A100, BATCH)
        own = _predicted(family, kernel, family.default(kernel, A100, BATCH))
        return family.name, own, (self.us / own.high, self.us / own.us, self.us / own.low)


def _predicted(family: Modelled[Any], kernel: KernelSpec, constants: Any) -> Prediction:
    found = prediction(_speed(family, kernel, A100), family, kernel, constants, BATCH)
    assert found is not None
    return found


@cache
def published() -> tuple[Published, ...]:
    """Return all published times, in the file's order."""
    text = gzip.decompress(Path(__file__).with_name("ksmm_times.csv.gz").read_bytes()).decode()
    return tuple(
        Published(
            KernelSpec(Pattern.read([int(row[name]) for name in "abcd"]), row["precision"], row["layout"]),
            Tiles(*(int(row[each.name]) for each in fields(Tiles))),
            float(row["us"]),
        )
        for row in csv.DictReader(StringIO(text))
    )


@dataclass(frozen=True)
class Replay:
    """The model's results for one layout in one precision."""

    rows: tuple[Published, ...]

    @property
    def bounded(self) -> int:
        """Number of rows that took at least the longest term."""
        return sum(row.terms["longest"] <= row.us for row in self.rows)

    def share(self, term: str) -> Band:
        return band([row.terms[term] / row.us for row in self.rows])

    @property
    def over_predicted(self) -> Band:
        """Measured times over the predicted ones."""
        return band([row.us / row.predicted.us for row in self.rows])

    def ranks(self, term: str = "") -> float:
        """Rank correlation of the measured slowdown over the floor with the predicted one, or with that of a term.

        The ratio to the floor removes the size, which makes any prediction look good.
        """
        given = [(row.terms[term] if term else row.predicted.us) / row.terms["floor"] for row in self.rows]
        return rank_correlation(given, [row.us / row.terms["floor"] for row in self.rows])

    @property
    def within(self) -> float:
        """Share of rows whose time lies in its prediction's band."""
        return sum(row.predicted.low <= row.us <= row.predicted.high for row in self.rows) / len(self.rows)


def band(ratios: Sequence[float]) -> Band:
    twentieths = quantiles(ratios, n=20, method="inclusive")
    return twentieths[0], median(ratios), twentieths[-1]


def replay(layout: str, precision: str) -> Replay:
    kinds = layout, precision
    return Replay(tuple(each for each in published() if (each.kernel.layout, each.kernel.precision) == kinds))


@main.command("ksmm")
def ksmm() -> None:
    """Print, per precision and layout, how well the model fits the published times.

    The first columns count the times, and those above the longest term. Two columns give that term, and multiply-adds
    plus cache, as shares of the time. Two more give measured over predicted times, and the share within the
    predictions' bands. The last two are rank correlations of the slowdown over the floor, as predicted and by the
    longest term.
    """

    def spelled(figures: Band) -> str:
        return f"{figures[1]:.2f} ({figures[0]:.2f} to {figures[2]:.2f})"

    click.echo(
        "precision layout  rows bounded  longest             ffma + cache        measured/predicted  within  ranks  "
        "by longest"
    )
    for precision, layout in product(("float32", "float16"), LAYOUTS):
        found = replay(layout, precision)
        figures = "  ".join(map(spelled, (found.share("longest"), found.share("together"), found.over_predicted)))
        click.echo(
            f"{precision:<9} {layout:<6} {len(found.rows):5d} {found.bounded:7d}  {figures}  {found.within:6.2f}"
            f" {found.ranks():6.2f} {found.ranks('longest'):11.2f}"
        )
    everything = Replay(published())
    click.echo(f"all             {len(everything.rows):7d}  measured/predicted {spelled(everything.over_predicted)}")


@main.command("predictions")
@click.option(
    "--pattern", "patterns", type=PATTERN, multiple=True, help="Only this one, such as 1,192,48,2; may be given again."
)
@click.option("--brief", is_flag=True, help="Print the medians alone.")
def predictions(patterns: tuple[Pattern, ...], brief: bool) -> None:
    """Print, for each published time, the predicted time of our untuned default, and their ratio.

    Medians per precision and layout follow. A prediction comes with the band that contains nine of ten published times
    around the same model. All patterns take a minute or two.
    """
    if not brief:
        click.echo(
            f"{'pattern':<18} {'precision':<9} layout {'family':<6} {'predicted us':>30} {'published us':>13}  gain"
        )
    theirs = {"float32": "float32", "tf32x3": "float32", "float16": "float16"}  # by our precision
    for precision, layout in product(theirs, LAYOUTS):
        found = []
        for row in replay(layout, theirs[precision]).rows:
            pattern = row.kernel.pattern
            if patterns and pattern not in patterns:
                continue
            family, own, gains = row.ours(precision)
            found.append(gains)
            if not brief:
                figures = f"{own!s:>30} {row.us:13.4g} {gains[1]:5.2f}"
                click.echo(f"{pattern!s:<18} {precision:<9} {layout:<6} {family:<6} {figures}")
        if found:
            low, middle, high = map(median, zip(*found, strict=True))
            click.echo(
                f"median of {len(found):<8} {precision:<9} {layout:<6} gain {middle:.2f} ({low:.2f} to {high:.2f}), a "
                "prediction"
            )


# ---- traffic


def requested_and_read(kernel: KernelSpec, limits: Limits, batch: int) -> tuple[str, int, int]:
    """Family of a launcher's default, the bytes that its blocks request, and those that reach memory.

    Each byte of X, W and Y reaches memory once; caches serve all other requests.
    """
    family = family_for(kernel, limits, batch)
    work = family.work(kernel, family.default(kernel, limits, batch), batch)
    requested, least = work.cache_bytes + work.passed_bytes, work.memory_bytes + work.passed_bytes
    return family.name, max(requested, least), least


@main.command("traffic")
@_PATTERNS
@click.option("--precision", "precisions", default=("float32", "bfloat16"), multiple=True, show_default=True)
@click.option("--target", default="sm_90a", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=LARGE, show_default=True)
@click.option("--brief", is_flag=True, help="Print the medians alone.")
def traffic(patterns: int, precisions: tuple[str, ...], target: str, batch: int, brief: bool) -> None:
    """Print the shares of requested bytes that caches and memory serve, by the defaults' counted work.

    Requests are whole sectors, once per block that needs them. The shares hold if no cache is too small.
    """
    limits = cuda_limits(target)
    click.echo(f"ksgen {__version__}, {target}, batch {batch}; MB requested, MB of memory, share of caches, of memory")
    for precision, layout in product(precisions, LAYOUTS):
        shares = []
        for pattern in stratified(patterns):
            family, requested, least = requested_and_read(KernelSpec(pattern, precision, layout), limits, batch)
            shares.append(1 - least / requested)
            if not brief:
                sizes = f"{requested / 1e6:9.1f} {least / 1e6:9.1f} {shares[-1]:5.0%} {1 - shares[-1]:5.0%}"
                click.echo(f"{pattern!s:<18} {precision:<9} {layout:<6} {family:<6} {sizes}")
        click.echo(
            f"{precision:<9} {layout}: caches serve {median(shares):.0%} at the median, {min(shares):.0%} at least"
        )


# ---- sources

PROCESSOR = Limits(
    256 * 1024, 8192, 0, is_cpu=True, async_copies=False, vector_bytes=64, dots=("bf16",), multiprocessors=2
)
ALL_BATCHES = tuple(1 << power for power in range(14))


def sources_of(layer: KernelSpec, limits: Limits) -> set[tuple[KernelSpec, str, Any]]:
    """Kernels, families and source constants that a layer needs at `ALL_BATCHES` by default: a source for each."""
    found = set()
    for batch in ALL_BATCHES:
        is_one = not shared_out(layer, limits.multiprocessors, batch)
        is_one = is_one and verdict_for(layer, limits, "processor", batch).is_one
        for kernel in [layer] if is_one else factor_kernels(layer):
            family = family_for(kernel, limits, batch)
            found.add((kernel, family.name, family.source_constants(kernel, family.default(kernel, limits, batch))))
    return found


@main.command("sources")
@click.option("--cores", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--vector-bytes", type=click.Choice(["16", "32", "64"]), default="64", show_default=True)
def sources(cores: int, vector_bytes: str) -> None:
    """Count the sources of the 24 layers at batches 1, 2, 4, ..., 8192 on a processor: mean, least and most."""
    limits = replace(PROCESSOR, multiprocessors=cores, vector_bytes=int(vector_bytes))
    for precision, layout in product(("float32", "bfloat16"), LAYOUTS):
        layers = [layer_launch((chain,), precision, layout, Epilogue()) for chain in transformers().values()]
        counts = [len(sources_of(layer, limits)) for layer in layers]
        click.echo(f"{precision:<9} {layout:<6} {mean(counts):5.1f} {min(counts):3} {max(counts):3}")


# ---- our own kernels


def rows_of(path: Path) -> Iterator[tuple[KernelSpec, Modelled[Any], Any, int, float]]:
    """Kernels of a benchmark, with constants, batch and reliable microseconds; removed constants are left out."""
    for row in read_rows(path):
        if row.implementation == "ksgen" and row.median_us and not row.doubt:
            words = (word.split("=") for word in row.constants.split(", "))
            values = {name: int(value) if value.isdecimal() else value for name, value in words}
            family = family_named(row.family)
            with suppress(ConstantsError):
                kernel = KernelSpec(Pattern.parse(row.pattern), row.arithmetic, row.layout)
                yield kernel, family, family.constants(values), row.batch, row.median_us


@main.command("measured")
@click.argument("path", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--target", default="sm_90a", show_default=True, help="Target of the GPU that was measured.")
def measured(path: Path, target: str) -> None:
    """Compare a GPU's times of `ksgen bench paper` with predictions, and launchers' choices with the fastest."""
    limits, ratios, jobs = cuda_limits(target), defaultdict(list), defaultdict(list)
    for kernel, family, constants, batch, us in rows_of(path):
        speed = _speed(family, kernel, limits, constants)
        if found := prediction(speed, family, kernel, constants, batch):
            ratios[constants.entry_family or family.name, kernel.precision, kernel.layout].append(us / found.us)
            jobs[kernel].append((gpu_us(speed, family, kernel, constants, batch), us))
    click.echo("measured over predicted: times, first twentieth, median, last")
    for key, each in sorted(ratios.items()):
        low, middle, high = band(each) if len(each) > 1 else (each[0],) * 3
        click.echo(f"  {' '.join(key):32} {len(each):4}  {low:.2f}  {middle:.2f}  {high:.2f}")
    click.echo("the choice of launchers over the fastest measured: geometric mean, most")
    for precision, layout in sorted({(kernel.precision, kernel.layout) for kernel in jobs}):
        lost = [
            min(each)[1] / min(us for _, us in each)
            for kernel, each in jobs.items()
            if (kernel.precision, kernel.layout) == (precision, layout)
        ]
        click.echo(f"  {precision + ' ' + layout:32} {geometric_mean(lost):.3f}  {max(lost):.2f}")


if __name__ == "__main__":
    main()
