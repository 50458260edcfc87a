"""Default constants of the SIMT family before any search, chosen by rule for a GPU and for a processor."""

from collections.abc import Iterator
from itertools import product

from ksgen.errors import ConstantsError
from ksgen.families.base import Limits
from ksgen.families.family import more_registers
from ksgen.families.simt.shape import LANES_BATCH, LANES_OUT, SimtConstants, SimtTiling, is_narrow
from ksgen.families.tiles import divide_up, least_padded
from ksgen.spec import KernelSpec

MOST_WARPS, FEWER_WARPS = 16, 12  # of a block; fewer if its threads need more than 128 registers
SHORT_STAGE = 8  # inputs per stage of the rule's widest tiles
# inputs per stage of other lengths, so that exchanged inputs have constant distances, and c with their padding over c
OTHER_STAGES, MOST_PADDED = range(12, 5, -1), 1.15
THREADS = {4: (1, 2, 4, 8, 12), 16: (1, 2, 4)}  # sums per thread along the outputs, by bytes of a sum


def neighbours(d: int) -> int:
    """Neighbouring j per block: the largest number up to 8 that pads d least."""
    return least_padded(d, range(1, min(d, 8) + 1))


def planes_of_search(kernel: KernelSpec) -> list[int]:
    """Numbers of j per tile that a search tries."""
    return [1] if kernel.layout == "bsl" else sorted({1, 2, 3, 4, 6, 8, 12, 16, neighbours(kernel.pattern.d)})


def _outputs(b: int, most: int, threads: tuple[int, ...]) -> tuple[int, int]:
    """(tile_out, thread_out) with the least work, including padding and loads of operands; then the widest tile."""
    choices = [(LANES_OUT * thread_out * warps, thread_out) for thread_out in threads for warps in (1, 2, 3, 4)]

    def work(choice: tuple[int, int]) -> tuple[float, ...]:
        tile_out, thread_out = choice
        loads = 1 + 2 / min(thread_out, 8)
        return (divide_up(b, tile_out) * tile_out * loads, -tile_out, abs(thread_out - 8), -thread_out)

    return min((choice for choice in choices if choice[0] <= most), key=work)


def gpu_default(kernel: KernelSpec, limits: Limits) -> SimtConstants:
    """Default for a GPU: wide tiles, with square tiles per thread.

    Several blocks share a multiprocessor, so that one multiplies while another waits. `min_blocks` is the number that
    the registers allow: at most 2 for sums of 8 bytes or more, else at most 3 or 6.
    """
    chosen = _gpu_rule(kernel, limits)
    if chosen.copy == "registers" or SimtTiling(kernel, chosen).x_has_constant_steps:
        return chosen
    regular = (SimtTiling(kernel, _gpu_rule(kernel, limits, short_stage=each)) for each in OTHER_STAGES)
    padded = {each.constants: each.steps * each.constants.tile_in for each in regular if each.x_has_constant_steps}
    best = min(padded, key=padded.__getitem__, default=chosen)
    if best != chosen and padded[best] <= MOST_PADDED * kernel.pattern.c:
        return best
    return _gpu_rule(kernel, limits, most_warps=FEWER_WARPS)


def _gpu_rule(
    kernel: KernelSpec, limits: Limits, short_stage: int = SHORT_STAGE, most_warps: int = MOST_WARPS
) -> SimtConstants:
    """The default with so many inputs per short stage and at most so many warps per block."""
    pattern = kernel.pattern
    copy = "registers" if is_narrow(kernel) or not limits.async_copies else "async"
    doubles = kernel.real_bytes >= 8
    tile_d = 1 if kernel.layout == "bsl" else neighbours(pattern.d)
    thread_batch = 4 if doubles else 8
    small_batch = kernel.batch is not None and kernel.batch <= 64
    warps_batch = 1 if small_batch or tile_d > 4 else 2
    more = more_registers(kernel, limits.target)
    # most warps of a block: the registers of a multiprocessor allow no more
    warps = 8 if doubles else FEWER_WARPS if copy == "registers" or more else most_warps
    most = min(128, LANES_OUT * 8 * max(1, warps // (tile_d * warps_batch)))
    tile_out, thread_out = _outputs(pattern.b, most, THREADS.get(kernel.real_bytes, (1, 2, 4, 8)))
    has_room = tile_out < 128 and (thread_out < 12 or copy == "registers")
    tile_in = 16 if kernel.layout == "bsl" and pattern.c > 8 and has_room else short_stage
    stages = 3 if copy == "async" else 2
    chosen = SimtConstants(
        LANES_BATCH * thread_batch * warps_batch, tile_out, tile_in, tile_d, thread_batch, thread_out, stages, 1, copy
    )
    shape = SimtTiling(kernel, chosen)
    fit = limits.registers // ((shape.registers + more) * shape.threads)
    # For Hopper ptxas needs the bound of six blocks: without it, it takes 217 registers for two warps. On other
    # targets this bound makes it spill.
    blocks = 2 if doubles else 6 if shape.warps == 2 and copy == "async" and limits.warpgroups else 3
    return chosen.changed(min_blocks=max(1, min(blocks, fit)))


def whole_rounds(kernel: KernelSpec, limits: Limits, chosen: SimtConstants) -> SimtConstants:
    """Take two stages of 16 inputs instead of three of 8 if as many blocks still fit.

    This halves the barriers. An unrolled loop then covers 32 inputs instead of 24. Else take four stages if the loop
    can be unrolled by four and not by three, and as many blocks still fit. In batch-size-first, three stages remain in
    kernels of strided arrays, and on targets on which ptxas takes more registers. For a loop that is unrolled by four,
    it takes all registers there.
    """
    takes_all = kernel.layout == "bsf" and more_registers(kernel, limits.target) > 0
    if chosen.stages != 3 or kernel.real_bytes != 4 or takes_all:
        return chosen
    longer = SimtTiling(kernel, chosen.changed(tile_in=2 * SHORT_STAGE, stages=2))
    # 8 x 12 sums in batch-size-last would spill
    is_short = chosen.tile_in == SHORT_STAGE and (kernel.layout == "bsf" or chosen.thread_out < 12)
    deeper = SimtTiling(kernel, chosen.changed(stages=4))
    wanted = (
        (longer, is_short and kernel.pattern.c % longer.constants.tile_in == 0 and longer.x_has_constant_steps),
        (deeper, deeper.steps % 3 and deeper.steps % 4 == 0 and deeper.steps > 4),
    )
    budget = limits.shared_bytes_for(chosen.min_blocks)
    return next((each.constants for each, is_better in wanted if is_better and each.shared_bytes <= budget), chosen)


def others(kernel: KernelSpec, limits: Limits, chosen: SimtConstants) -> Iterator[SimtConstants]:
    """Yield alternatives to the rule's choice for the cost model: smaller blocks, so that a small batch has more."""
    more = more_registers(kernel, limits.target)
    planes = dict.fromkeys((chosen.tile_d, max(1, chosen.tile_d // 2), 1))
    threads_batch = dict.fromkeys((chosen.thread_batch, 4))
    for thread_batch, warps_batch, thread_out, warps_out, tile_d in product(
        threads_batch, (1, 2), (2, 4, 8), (1, 2, 3, 4), planes
    ):
        tile_batch, tile_out = LANES_BATCH * thread_batch * warps_batch, LANES_OUT * thread_out * warps_out
        found = chosen.changed(
            tile_batch=tile_batch, tile_out=tile_out, tile_d=tile_d, thread_batch=thread_batch,
            thread_out=thread_out,
        )  # fmt: skip
        registers = (SimtTiling(kernel, found).registers + more) * SimtTiling(kernel, found).threads
        if registers <= limits.registers and (warps_out - 1) * LANES_OUT * thread_out < kernel.pattern.b:
            yield found.changed(min_blocks=max(1, min(3, limits.registers // registers)))


def cpu_default(kernel: KernelSpec) -> SimtConstants:
    """Default for a processor: threads of 4 x 8 sums keep its vector registers full; larger ones spill."""
    tile_d = 1 if kernel.layout == "bsl" else neighbours(kernel.pattern.d)
    tile_out, thread_out = _outputs(kernel.pattern.b, 64, (1, 2, 4, 8))
    return SimtConstants(2 * LANES_BATCH * 4, tile_out, 8, tile_d, 4, thread_out, 2, 1, "registers")


def smaller(kernel: KernelSpec, constants: SimtConstants, budget: int) -> SimtConstants:
    """Reduce one constant that takes shared memory; the smallest tile fits every device."""
    shape = SimtTiling(kernel, constants)
    if constants.stages > 2:
        return constants.changed(stages=constants.stages - 1)
    if constants.tile_in > 8:
        return constants.changed(tile_in=constants.tile_in // 2)
    if shape.warps_batch > 1:
        return constants.changed(tile_batch=constants.tile_batch // shape.warps_batch)
    if shape.warps_out > 1:
        return constants.changed(tile_out=constants.tile_out // shape.warps_out)
    if constants.tile_d > 1:
        return constants.changed(tile_d=constants.tile_d // 2)
    if constants.tile_in > 1:
        return constants.changed(tile_in=max(1, constants.tile_in // 2))
    raise ConstantsError(f"{kernel.name}: no tile fits {budget} bytes of shared memory")
