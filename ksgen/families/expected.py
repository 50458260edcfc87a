"""Expected time of a kernel under given constants: its family's work divided by the GPU's rates. Chooses the constants
with the least expected time.

`gpu_us` ranks constants to choose from. `prediction` gives a time with the band in which known times lie, and breaks
ties. A table (`slots.py`) has counts of compiled instructions. There are no terms for barriers. Measures nothing.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Any, NamedTuple, TypeVar

from ksgen.families.base import Geometry, Limits, Modelled, blocks_at_once
from ksgen.families.family import Family
from ksgen.families.gpus import Rates, gpu_of
from ksgen.families.operands import multiplied_by
from ksgen.families.slots import instructions, issued_by
from ksgen.families.tiles import WARP
from ksgen.spec import KernelSpec
from ksgen.spec.precision import F16

SHARE_OF_PEAK = 0.9  # share of the peak multiply-adds that a kernel reaches, because it also loads and stores
CACHE_RATE = 2.0  # rate of a GPU's L2 cache relative to its memory's, if unknown
GHZ = 1.7  # clock of multiprocessors, if unknown
SHARED_BYTES = 128  # bytes per cycle of one multiprocessor's shared memory
ENOUGH_WARPS = 8  # per multiprocessor, so that one multiplies while another waits
MANY_WAVES = 8  # with more waves, blocks that end late hardly count
WAIT_S = 1e-6  # from the request for a stage until it arrives, on a busy GPU
LAUNCH_US = 1.2
MOST_GRID = 2**31 - 1  # blocks per launch
# share of the shorter of moving and multiplying that the longer one does not hide if copies pass through registers
SYNCHRONOUS = 0.4
# measured times over the sum of the terms: 5th percentile, median, 95th percentile
TAKEN = (0.93, 1.18, 1.78)
FITTED = "sm_90a"  # target of the GPU whose measured times SLOWER follows
# measured times over the terms' sum, for kernels whose median is not near 1; float16 is assumed to be like bfloat16
SLOWER = {("mma", "tf32x3", "bsf"): 1.5, ("mma", "bfloat16", "bsf"): 1.1, ("mma", "float16", "bsf"): 1.1}
PARTITIONS = 4  # partitions of a multiprocessor, each with its own registers and scheduler
COPYING_WARPS = 4  # warps of a block that copy while the others multiply by wgmma
LARGE = 25088  # a batch that fills every GPU
# largest batches of the smallest classes, and rows of the batch per block of a family for small batches
SMALL = (1, 2, 4, 8, 16, 32)
CLASSES = (256, 2048)  # largest batches of the next classes; larger and unknown batches are in the last one
MIN_SAVING = 0.02  # share of the time that constants must save to replace the heuristic default
# the same for constants of a class of smaller batches, which have their own source, binary and packed weights
MIN_CLASS_SAVING = 0.1
LEAST_US = 1.0  # microseconds that these constants must save, too
REMEMBERED = 4096  # cached choices

ConstantsT = TypeVar("ConstantsT")


@dataclass(frozen=True)
class Speed:
    """Rates of a GPU at peak, in a family's instructions."""

    target: str
    limits: Limits
    multiprocessors: int
    bytes_per_s: float  # copied: read plus written
    cache_bytes_per_s: float  # rate of the L2 cache
    shared_bytes_per_s: float  # rate of one multiprocessor's shared memory
    flops_per_s: float  # a multiply-add is two; all products of a split operand count

    @property
    def instructions_per_s(self) -> float:
        """Instructions that the warps of one multiprocessor issue per second: one per partition and cycle."""
        return self.shared_bytes_per_s / SHARED_BYTES * PARTITIONS


def resident_blocks(target: str, limits: Limits, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that fit one multiprocessor at the same time; 0: not even one fits."""
    warps = -(-threads // WARP)
    gpu = gpu_of(target)
    blocks = min(gpu.blocks, gpu.threads // threads)
    if registers:
        per_warp = -(-registers * WARP // 256) * 256  # allocated in units of 256
        blocks = min(blocks, limits.registers // PARTITIONS // per_warp * PARTITIONS // warps)
    while blocks > 0 and shared_bytes > limits.shared_bytes_for(blocks):
        blocks -= 1
    return blocks


def unevenness(waves: float) -> float:
    """Work of the busiest multiprocessor divided by that of the average one."""
    return 1 + 0.5 / waves if waves > MANY_WAVES else ceil(waves) / waves


def cache_rate(rates: Rates | None) -> float:
    """Rate of a GPU's L2 cache relative to its memory's."""
    return rates.cache_gb_s / rates.memory_gb_s if rates else CACHE_RATE


def shared_rate(rates: Rates | None) -> float:
    """Bytes per second of one multiprocessor's shared memory."""
    return SHARED_BYTES * (rates.ghz if rates else GHZ) * 1e9


def memory_rate(rates: Rates, limits: Limits) -> float:
    """Bytes per second of the usual card's memory, in proportion to the multiprocessors."""
    return rates.memory_gb_s * 1e9 * limits.multiprocessors / rates.multiprocessors


def speed_of(family: Modelled[Any], kernel: KernelSpec, limits: Limits, constants: Any = None) -> Speed | None:
    """Rates of the target's usual card, in proportion to its multiprocessors; None if they are unknown.

    Without constants, the rate of multiply-adds is that of the family's first class of constants.
    """
    rates = gpu_of(limits.target).rates
    if rates is None:
        return None
    per_cycle: float = rates.double if kernel.arithmetic.sums == "float64" else rates.plain
    if (constants or family.kinds[0]).on_tensor_cores and (operand := multiplied_by(kernel, family.by_warpgroups)):
        of_operand = {1: 2 * rates.half, 2: rates.half}.get(operand.item_bytes, rates.tf32)
        per_cycle = of_operand * (rates.warpgroup_gain if family.by_warpgroups else 1)
    flops = 2 * per_cycle * rates.ghz * 1e9 * limits.multiprocessors
    memory = memory_rate(rates, limits)
    return Speed(
        limits.target, limits, limits.multiprocessors, memory, memory * cache_rate(rates), shared_rate(rates), flops
    )


class Terms(NamedTuple):
    """Seconds that each part of a GPU needs for a kernel, if it never waits for another part."""

    moving: float  # memory, or the L2 cache if that takes longer
    inside: float  # the multiprocessors, all equally busy: multiply-adds, issue slots, reads of shared memory, waits
    passed: float  # memory, in the launches before and after, which multiply nothing
    launches: int
    exposed: float  # share of the shorter of moving and inside that the longer one does not hide
    slower: float  # factor by which known times exceed the sum of these terms
    blocks_each: float  # per multiprocessor
    waves: float  # rounds of the blocks that fit at a time, at least one
    ends: float  # waits of each wave for its first stage; a persistent block loads its next tile's first stage ahead

    @property
    def apart(self) -> float:
        """Seconds outside the kernel: the launches before and after it, and the cost of every launch."""
        return self.passed + self.launches * LAUNCH_US * 1e-6


def multiplying_warps(family: Modelled[Any], geometry: Geometry) -> int:
    """Warps of a block that multiply: all but those that copy for wgmma."""
    return -(-geometry.block // WARP) - COPYING_WARPS * family.by_warpgroups


def terms_of(speed: Speed, family: Modelled[Any], kernel: KernelSpec, constants: Any, batch: int) -> Terms | None:
    """Terms of a kernel under given constants; None if it cannot be launched."""
    geometry = family.geometry(kernel, constants, batch)
    if geometry.grid > MOST_GRID:
        return None
    registers = min(255, family.registers(kernel, constants, speed.target))
    resident = resident_blocks(speed.target, speed.limits, geometry.block, registers, geometry.shared_bytes)
    if not resident or not speed.flops_per_s:  # a block does not fit, or the GPU has no such instructions
        return None
    work = family.work(kernel, constants, batch)
    multiply_s = 2 * kernel.arithmetic.multiply_adds * work.multiply_adds / (speed.flops_per_s * SHARE_OF_PEAK)
    warps = -(-geometry.block // WARP)
    issued = instructions(
        constants.entry_family or family.name, kernel, speed.target, work, multiplying_warps(family, geometry), batch
    )
    shared_s = (work.shared_bytes + work.returned_bytes) / (speed.multiprocessors * speed.shared_bytes_per_s)
    inside_s = max(multiply_s, shared_s, issued / (speed.multiprocessors * speed.instructions_per_s))
    idle = sqrt(max(1.0, ENOUGH_WARPS / (resident * warps)))
    waiting_s = work.waits * WAIT_S / resident
    # clusters leave some multiprocessors idle; every rate is assumed to fall by their share
    working = blocks_at_once(speed.multiprocessors, geometry.cluster)
    slowdown = speed.multiprocessors / working
    blocks_each = work.blocks / working
    waves = max(1.0, blocks_each / resident)
    through_cache = work.cache_bytes + work.scattered_bytes
    return Terms(
        moving=max(work.memory_bytes / speed.bytes_per_s, through_cache / speed.cache_bytes_per_s) * slowdown,
        inside=max(inside_s * idle, waiting_s / speed.multiprocessors) * slowdown,
        passed=work.passed_bytes / speed.bytes_per_s,
        launches=1 + len(geometry.before) + len(geometry.after),
        exposed=SYNCHRONOUS * work.synchronous / max(1, work.stages),
        slower=_slower(speed, family, kernel),
        blocks_each=blocks_each,
        waves=waves,
        ends=WAIT_S * (1 if geometry.at_once else waves),
    )


def gpu_us(speed: Speed, family: Modelled[Any], kernel: KernelSpec, constants: Any, batch: int) -> float:
    """Longest time of memory, cache or multiprocessors, plus that of other passes and launches, in us.

    Constants are ranked by it. It is infinite if the kernel cannot be launched. Hardly any kernel is faster.
    """
    return _longest_us(terms_of(speed, family, kernel, constants, batch))


def _longest_us(terms: Terms | None) -> float:
    if terms is None:
        return inf
    taken = max(terms.moving, terms.inside * unevenness(terms.blocks_each)) * terms.slower
    return (taken + terms.passed) * 1e6 + terms.launches * LAUNCH_US


def _slower(speed: Speed, family: Modelled[Any], kernel: KernelSpec) -> float:
    """Factor by which an H100's times exceed the terms' sum; 1 if the median of this factor is near 1 or unknown."""
    if speed.target != FITTED or kernel.is_chain:
        return 1.0
    return SLOWER.get((family.name, kernel.precision, kernel.layout), 1.0)


@dataclass(frozen=True)
class Prediction:
    """Microseconds that a kernel is expected to take.

    Of 2579 known times, nine in ten lie from `low` to `high`, and half below `us`. These are times of one kernel of
    another project, on one kind of GPU, without tensor cores.
    """

    low: float
    us: float
    high: float

    def __str__(self) -> str:
        low, middle, high = (
            f"{us:.{2 if us < 10 else 1 if us < 100 else 0}f}" for us in (self.low, self.us, self.high)
        )
        return f"{middle} us ({low} to {high})"


def prediction(
    speed: Speed, family: Modelled[Any], kernel: KernelSpec, constants: Any, batch: int
) -> Prediction | None:
    """Time above the bound of `gpu_us`, fitted to published times (`benchmarks/model.py`); None if the kernel cannot be
    launched.

    Copies that pass through registers expose a part of the shorter of moving and multiplying. Each wave of blocks waits
    for its first stage, and the last wave leaves multiprocessors idle.
    """
    return _predicted(terms_of(speed, family, kernel, constants, batch))


def _predicted(terms: Terms | None) -> Prediction | None:
    if terms is None:
        return None
    inside = terms.inside * max(1.0, unevenness(terms.blocks_each) / unevenness(terms.waves))
    even = max(terms.moving, inside) + terms.exposed * min(terms.moving, inside) + terms.ends
    taken = even * unevenness(terms.waves) * terms.slower
    low, middle, high = ((share * taken + terms.apart) * 1e6 for share in TAKEN)
    return Prediction(low, middle, high)


def _predicted_us(terms: Terms | None) -> float:
    found = _predicted(terms)
    return found.us if found else inf


def batch_like(kernel: KernelSpec, batch: int | None) -> int:
    """Largest batch of the class that a batch belongs to; `LARGE` for the last class, which has no largest one.

    Classes are few, because each may have constants of its own.
    """
    known = batch or kernel.batch or LARGE
    return next((most for most in (*SMALL, *CLASSES) if known <= most), LARGE)


def default_us(family: Family[Any], kernel: KernelSpec, limits: Limits, batch: int | None) -> float:
    """Microseconds that the family's default is expected to take for such a batch; 0 if unknown."""
    if speed_of(family, kernel, limits) is None:
        return 0.0
    return expected_us(family, kernel, limits, batch, family.default(kernel, limits, batch))


def expected_us(
    family: Family[ConstantsT], kernel: KernelSpec, limits: Limits, batch: int | None, constants: ConstantsT
) -> float:
    """Microseconds that a kernel is expected to take under given constants; 0 if unknown."""
    speed = speed_of(family, kernel, limits, constants)
    return gpu_us(speed, family, kernel, constants, batch_like(kernel, batch)) if speed else 0.0


def plain_pays(family: Family[Any], kernel: KernelSpec, limits: Limits, constants: Any = None) -> bool:
    """Whether plain multiply-adds are at least as fast as tensor cores, which multiply all parts of split operands.

    Without constants, the family's first class of constants says how tensor cores are used. The result is False if it
    uses none.
    """
    speed, rates = speed_of(family, kernel, limits, constants), gpu_of(limits.target).rates
    if speed is None or rates is None or not (constants or family.kinds[0]).on_tensor_cores:
        return False
    return speed.flops_per_s <= 2 * rates.plain * kernel.arithmetic.products * rates.ghz * 1e9 * limits.multiprocessors


def is_outpaced(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether the target multiplies float16 on tensor cores that no family here uses: those before sm_80."""
    rates, is_float16 = gpu_of(limits.target).rates, kernel.arithmetic.operand == F16 and kernel.item_bytes == 2
    return bool(rates and rates.half > rates.plain and is_float16 and not limits.tensor_cores)


def library_us(kernel: KernelSpec, limits: Limits, batch: int) -> float:
    """Least microseconds of a library's product on tensor cores that no family here uses; infinite for other
    targets and precisions.

    In bsf, interleaved j need two permutations. Each step of an epilogue needs a pass over Y.
    """
    rates = gpu_of(limits.target).rates
    if rates is None or not is_outpaced(kernel, limits):
        return inf
    pattern, like = kernel.pattern, batch_like(kernel, batch)
    x_bytes, y_bytes = (like * features * kernel.item_bytes for features in (pattern.in_features, pattern.out_features))
    permuted = 2 * (x_bytes + y_bytes) if kernel.layout == "bsf" and pattern.d > 1 else 0
    passed_bytes = permuted + 2 * len(kernel.epilogue.words) * y_bytes
    launches = 1 + (2 if permuted else 0) + len(kernel.epilogue.words)
    bytes_per_s = memory_rate(rates, limits)
    flops_per_s = 2 * rates.half * rates.ghz * 1e9 * limits.multiprocessors * SHARE_OF_PEAK
    taken = max(kernel.bytes(like) / bytes_per_s, kernel.flops(like) / flops_per_s) + passed_bytes / bytes_per_s
    return taken * 1e6 + launches * LAUNCH_US


def fastest(
    family: Family[ConstantsT],
    kernel: KernelSpec,
    limits: Limits,
    batch: int | None,
    options: Callable[[], Iterator[ConstantsT]],
    min_saving: float = MIN_SAVING,
    row: str = "",
) -> ConstantsT:
    """Choose the fastest of the options by `gpu_us`; `prediction` decides among those within MIN_SAVING of it, if the
    kernel's instructions were counted.

    The first option is the heuristic default. It is chosen if no other option saves the share `min_saving`, or if the
    target's rates are unknown. For a class of smaller batches, an option must save `MIN_CLASS_SAVING` and `LEAST_US`
    over the choice for large batches. Options are compared once per class of batches. `row` is the name under which
    instructions were counted, if it is not the family's.
    """
    speed = speed_of(family, kernel, limits)
    if speed is None:
        return next(options())
    like, row = max(CLASSES[0], batch_like(kernel, batch)), row or family.name
    key, large = (row, kernel, limits, like), (row, kernel, limits, LARGE)
    found: ConstantsT | None = _found.get(key)
    if found is None:
        if len(_found) >= REMEMBERED:
            _found.clear()
        of_large: ConstantsT | None = _found.get(large)  # another thread may clear the cache from here on
        batches = tuple(dict.fromkeys((LARGE, like))) if of_large is None else (like,)
        listed: dict[ConstantsT, list[Terms | None]] = {}
        for option in options():  # one option at all batches, then the next, because a few options' sizes are cached
            if option not in listed:
                listed[option] = [terms_of(speed, family, kernel, option, size) for size in batches]
        is_counted = issued_by(row, kernel, speed.target) is not None
        every, terms_at = list(listed), dict(zip(batches, zip(*listed.values(), strict=True), strict=True))

        def best(batch: int, first: int, min_saving: float, least_us: float) -> int:
            terms = terms_at[batch]
            us = [_longest_us(each) for each in terms]
            least = min(us)
            near = [number for number, its_us in enumerate(us) if its_us <= (1 + MIN_SAVING) * least]
            tied = near if is_counted else [us.index(least)]
            predicted = {number: _predicted_us(terms[number]) for number in (*tied, first)} if is_counted else us
            winner = min(tied, key=predicted.__getitem__)

            def is_better(times: Mapping[int, float] | Sequence[float]) -> bool:
                return times[winner] < min((1 - min_saving) * times[first], times[first] - least_us)

            return winner if is_better(us) or is_better(predicted) else first

        chosen = best(LARGE, 0, min_saving, 0.0) if of_large is None else every.index(of_large)
        _found[large] = every[chosen]
        found = _found[key] = every[chosen if like == LARGE else best(like, chosen, MIN_CLASS_SAVING, LEAST_US)]
    return found


_found: dict[tuple[str, KernelSpec, Limits, int], Any] = {}
