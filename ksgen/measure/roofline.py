"""The floor: the least time that a kernel could take on a device.

It is the kernel's bytes or its operations, divided by the device's measured rates (ceilings), whichever takes longer. A
copy measures the rate of memory. Reads of a small array measure the rate of a CUDA GPU's L2 cache. The fastest
multiply-adds for the kernel's operands measure the rate of arithmetic. On a GPU these are plain multiply-adds, or those
of tensor cores: by warpgroups if the device has them, else by warps. On a processor they are vector instructions on all
cores, or matrix tiles if these multiply the stored type.
"""

from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ksgen.build.build import build, compiling_is_forbidden
from ksgen.build.request import Binary
from ksgen.devices.base import Buffer, Device, KernelHandle
from ksgen.emit.render import (
    PROBE_AT_ONCE,
    Probe,
    render_cache_probe,
    render_probe,
    render_processor_probe,
    render_tiles_probe,
)
from ksgen.errors import ToolchainError
from ksgen.families import cuda_limits
from ksgen.families.ptx import WgmmaInstruction
from ksgen.families.tiles import WARP
from ksgen.launch.choice import limits_of
from ksgen.measure.queued import time_launches
from ksgen.measure.verify import CACHE_BYTES
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.spec.precision import K_BYTES, OPERANDS

THREADS = 256
# work per round of a probe: multiply-adds of a thread; tensor-core products of a warp, with 16 x 8 sums each
PLAIN_PER_ROUND, TENSOR_CHAINS = 128, 16
WARPGROUP_COLUMNS = 128  # columns of a warpgroup's product
CACHED_BYTES = 2**19  # bytes that the probe of the L2 cache reads: they fit that cache on every GPU
# resident blocks per multiprocessor, and rounds of the probe of the L2 cache, which take about a millisecond
CACHE_BLOCKS, CACHE_ROUNDS = 4, 2400
COPIED_BYTES, PROCESSOR_COPIED_BYTES = 512 * 2**20, 256 * 2**20  # copied bytes: more than a last-level cache holds
GROUPS_PER_CORE, PROCESSOR_ROUNDS = 8, 1 << 15  # work groups per core, and rounds of each: a few milliseconds
TILE_ROUNDS = 1 << 13  # rounds of the probe of matrix tiles
NO_FLOOR = "No share is shown if the floor depends on arrays that a cache of unknown rate may keep between runs."


@dataclass(frozen=True)
class Ceilings:
    """The highest rates of a device in one precision."""

    bytes_per_s: float  # rate of a copy: bytes read plus bytes written
    flops_per_s: float  # a multiply-add is two
    products: int = 1  # products that the device computes per product of the kernel, such as 3 for tf32x3
    cache_bytes_per_s: float = 0.0  # read from a GPU's L2 cache; 0: not measured

    def floor_s(self, kernel: KernelSpec, batch: int) -> float:
        """Floor in seconds, without caches: the time to move X, weights and Y once, or that of all multiply-adds."""
        return max(kernel.bytes(batch) / self.bytes_per_s, kernel.flops(batch) / self.flops_per_s)

    def floor_us(self, kernel: KernelSpec, batch: int, sets: int) -> float | None:
        """Floor, in microseconds, of runs that share the weights and alternate between at most `sets` sets of X and Y.

        Between runs, a cache may keep the weights if they fit in it. It may also keep all sets of X and Y if those fit
        in it by themselves. The floor is the longest of three times: moving the other arrays from memory, all
        multiply-adds, and moving all arrays at the cache's rate. If that rate is unknown, its term is omitted. The
        result is then None if moving the cached arrays from memory would take longest.
        """
        weights, moved = kernel.weight_bytes, kernel.bytes(batch)
        cached = sum(each for each, number in ((weights, 1), (moved - weights, sets)) if each * number < CACHE_BYTES)
        floor_s = max((moved - cached) / self.bytes_per_s, kernel.flops(batch) / self.flops_per_s)
        if self.cache_bytes_per_s:
            floor_s = max(floor_s, moved / self.cache_bytes_per_s)
        elif cached / self.bytes_per_s > floor_s:
            return None
        return 1e6 * floor_s


def share_of_floor(floor_us: float | None, time_us: float | None) -> float | None:
    """The floor divided by a time, at most 1.

    None if either is unknown, or if the time is below the floor, which is then wrong.
    """
    return floor_us / time_us if floor_us and time_us and floor_us <= time_us else None


def best_of(one: Ceilings, other: Ceilings) -> Ceilings:
    """Ceilings with the higher rates of two measurements."""
    return Ceilings(
        max(one.bytes_per_s, other.bytes_per_s), max(one.flops_per_s, other.flops_per_s), one.products,
        max(one.cache_bytes_per_s, other.cache_bytes_per_s),
    )  # fmt: skip


def measure_ceilings(device: Device, precision: str, operand: str | None = None) -> Ceilings:
    """Measure a device's ceilings in about a second, by probes of copies and of multiply-adds.

    `operand` is the type that tensor cores multiply; None: they are not used.
    """
    if device.limits.is_cpu:
        return _of_processor(device, precision)
    wgmma = None
    if operand and cuda_limits(device.target).warpgroups:
        wgmma = WgmmaInstruction(operand, WARPGROUP_COLUMNS, a_in_registers=False)
    copy, multiply = load_probe(device, render_probe(precision, device.dialect, THREADS, operand, wgmma))
    x, y = device.allocate(COPIED_BYTES), device.allocate(COPIED_BYTES)
    groups = COPIED_BYTES // 16
    copy_s = _seconds(device, copy, groups // THREADS, THREADS, 0, x, y, groups)
    blocks, rounds = device.limits.multiprocessors * 64, 2048
    per_round = PLAIN_PER_ROUND
    if operand:
        per_round = (
            wgmma.multiply_adds * PROBE_AT_ONCE if wgmma else TENSOR_CHAINS * 16 * 8 * OPERANDS[operand].k_step // WARP
        )
    shared_bytes = 0 if wgmma is None else K_BYTES * WARPGROUP_COLUMNS
    multiply_s = _seconds(device, multiply, blocks, THREADS, shared_bytes, y, rounds)
    products = PRECISIONS[precision].products if operand else 1
    flops = 2.0 * blocks * THREADS * rounds * per_round / products
    cache_rate = _cache_rate(device, x, y) if device.kind == "cuda" else 0.0
    return Ceilings(2 * COPIED_BYTES / copy_s, flops / multiply_s, products, cache_rate)


def _seconds(
    device: Device, kernel: KernelHandle, grid: int, block: int, shared_bytes: int, *args: Any, runs: int = 7
) -> float:
    """Median time of a probe's launch."""
    return median(time_launches(device, lambda: device.launch(kernel, grid, block, shared_bytes, args, None), runs))


def _cache_rate(device: Device, x: Buffer, y: Buffer) -> float:
    """Bytes per second that all multiprocessors together read from the L2 cache."""
    probe = render_cache_probe(THREADS, CACHE_BLOCKS)
    kernel = device.load(_built(device, probe), probe.entry, 0)
    blocks = CACHE_BLOCKS * device.limits.multiprocessors
    read_s = _seconds(device, kernel, blocks, THREADS, 0, x, y, CACHED_BYTES // 16, CACHE_ROUNDS)
    return blocks * THREADS * 16 * CACHE_ROUNDS / read_s


def _of_processor(device: Device, precision: str) -> Ceilings:
    """Ceilings of a processor on all cores, by vector instructions, or by matrix tiles if these are faster.

    16-bit types are multiplied in float32, or as pairs if the processor has such products.
    """
    probe = render_processor_probe(precision, limits_of(device))
    copy, multiply = load_probe(device, probe)
    x, y = device.allocate(PROCESSOR_COPIED_BYTES), device.allocate(PROCESSOR_COPIED_BYTES)
    groups = device.limits.multiprocessors * GROUPS_PER_CORE
    vectors = PROCESSOR_COPIED_BYTES // device.limits.vector_bytes
    # unwritten memory is a single page of zeros, which a cache would hold
    device.launch(copy, groups, 1, 0, (y, x, vectors), None)
    copy_s = _seconds(device, copy, groups, 1, 0, x, y, vectors)
    multiply_s = _seconds(device, multiply, groups, 1, 0, y, PROCESSOR_ROUNDS, runs=15)
    flops = 2.0 * groups * PROCESSOR_ROUNDS * probe.multiply_adds
    plain = Ceilings(2 * PROCESSOR_COPIED_BYTES / copy_s, flops / multiply_s)
    return max(plain, _by_tiles(device, precision, plain, y), key=lambda each: each.flops_per_s)


def _by_tiles(device: Device, precision: str, plain: Ceilings, y: Buffer) -> Ceilings:
    """Ceilings of the device's matrix tiles, if they multiply the precision's stored type; else `plain`."""
    tiles = PRECISIONS[precision].tiles
    if tiles is None or tiles.operand.name not in device.limits.tiles:
        return plain
    probe, groups = render_tiles_probe(tiles.operand.name), device.limits.multiprocessors * GROUPS_PER_CORE
    kernel = device.load(_built(device, probe), probe.entry, 0)
    seconds = _seconds(device, kernel, groups, 1, 0, y, TILE_ROUNDS, runs=15)
    flops = 2.0 * groups * TILE_ROUNDS * probe.multiply_adds / tiles.products
    return replace(plain, flops_per_s=flops / seconds, products=tiles.products)


def load_probe(device: Device, probe: Probe) -> tuple[KernelHandle, KernelHandle]:
    """Build and load a probe's two kernels: the copy, and the multiply-adds."""
    binary = _built(device, probe)
    return device.load(binary, probe.entry, 0), device.load(binary, f"{probe.entry}_multiply_add", 0)


def _built(device: Device, probe: Probe) -> Binary:
    """Build a probe. Bundles hold no probes, so if compiling is forbidden, the error names another remedy."""
    try:
        return build(probe.text, probe.entry, device.target, device.compiler())
    except ToolchainError as error:
        if not compiling_is_forbidden():
            raise
        lacks = f"no cache holds {probe.entry}, which measures the rates of {device.name}"
        raise ToolchainError(f"{lacks}, and KSGEN_NO_COMPILE forbids compiling it; unset it for one run") from error
