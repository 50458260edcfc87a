"""Default constants of the amx family before any search, chosen by its cost model."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from ksgen.families.amx.chain import (
    SECOND_LEVEL_BYTES,
    AmxChainConstants,
    AmxChainTiling,
    Resident,
    factor_cycles,
    multiply_cycles,
    passing_bytes,
)
from ksgen.families.amx.shape import INPUTS, LINE_BYTES, PAIR, AmxConstants, AmxTiling, products_of
from ksgen.families.base import Limits
from ksgen.families.chains import factor_kernels
from ksgen.families.tiles import divide_up, power_of_two_in
from ksgen.families.vector.defaults import STREAMING_BYTES
from ksgen.families.vector.planes import round_up
from ksgen.spec import KernelSpec

# rows of the batch per block; a weight that is loaded from the L2 cache is multiplied by all of them
BLOCKS = (256, 192, 128, 96, 64, 32)
MOST_ROWS = 128  # rows per block of a single factor in batch-size-first: 256 were slower in all four measured kernels
MOST_OUTPUTS = 256  # largest `outputs`
DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24)  # candidates for `depth`
# cache lines SETS_BYTES apart share a set of the L1 cache; at most WAYS rows that are read in place may share one
SETS_BYTES, WAYS = 4096, 4
# multiply-adds per input or output, b * c / (b + c), below which memory bounds a kernel in batch-size-first; counted,
# not measured
LEAST_REUSE = 64
TASKS = 4  # work groups per core, if there are enough groups of outputs


def reads_in_place(kernel: KernelSpec) -> bool:
    """Whether rows of X can be operands without a copy: 16-bit elements, contiguous along the inputs."""
    is_contiguous = kernel.layout == "bsf" and not kernel.reads_exchanged and kernel.pattern.d == 1
    return is_contiguous and products_of(kernel).parts == 1 and kernel.pattern.c >= INPUTS


def least_of(kernel: KernelSpec) -> AmxTiling:
    """Tiling with the smallest constants, to read sizes that do not depend on the constants."""
    return AmxTiling(kernel, AmxConstants(PAIR, PAIR, 1, 1, 0, 1))


def default(kernel: KernelSpec, limits: Limits, batch: int) -> AmxConstants | AmxChainConstants:
    """Constants with the fewest expected cycles, summed over all cores."""

    def cycles(constants: AmxConstants | AmxChainConstants) -> float:
        return multiply_cycles(AmxChainTiling(kernel, constants), batch)

    if not kernel.is_chain:
        tilings = [AmxTiling(kernel, each) for each in _options(kernel, batch)]
        # Private buffers fit the L2 cache; if none does, they are the smallest. The model does not include the cost of
        # larger buffers. With them, eleven kernels took 1.06 to 1.98 times as long.
        most = max(SECOND_LEVEL_BYTES // 4, min(each.slot for each in tilings))
        return min((_with_parts(each, limits, batch) for each in tilings if each.slot <= most), key=cycles)
    # The data of a large block exceed the L2 cache; with small blocks, all weights are read more often.
    most = round_up(divide_up(batch, limits.multiprocessors), PAIR)  # so that every core has a block
    return min(
        (of_block(kernel, block, batch) for block in dict.fromkeys(min(each, most) for each in BLOCKS)), key=cycles
    )


def of_block(kernel: KernelSpec, block: int, batch: int) -> AmxChainConstants:
    """Constants of a chain with blocks of `block` rows, and for each factor the tiles with the fewest expected
    cycles."""
    factors = factor_kernels(kernel)
    least = [AmxConstants(block, PAIR, 1, 1, 0, 1) for _ in factors]
    shape = AmxChainTiling(kernel, AmxChainConstants.of(kernel, block, least, 0))
    streaming, weights = streams_outputs(factors[-1], batch), shape.packed_bytes
    kept = shape.intermediate_buffers * shape.between * 4 + passing_bytes(kernel, block, streaming)
    best: list[AmxConstants] = []
    for factor in factors:
        panels = (2, 1) if least_of(factor).planes > 1 else (1,)
        every = product(outputs_and_depths(factor), panels)
        candidates = [AmxConstants(block, outputs, 1, panel, 0, depth) for (outputs, depth), panel in every]
        tilings = [AmxTiling(factor, each, len(best)) for each in candidates]
        chosen = min(tilings, key=lambda each: factor_cycles(each, Resident(kept + each.slot * 4, weights), batch))
        is_in_place = _are_read_in_place(chosen, block)
        best.append(replace(chosen.constants, panel=0) if is_in_place else chosen.constants)
    return AmxChainConstants.of(kernel, block, best, streaming)


def _options(kernel: KernelSpec, batch: int) -> Iterator[AmxConstants]:
    """Yield constants with every block. `_are_read_in_place` decides whether rows are copied.

    In batch-size-last, one panel was as fast as two or faster in all eight measured kernels.
    """
    streaming, parts, least = streams_outputs(kernel, batch), _parts_of_planes(kernel), least_of(kernel)
    most = min(MOST_ROWS if kernel.layout == "bsf" else max(BLOCKS), round_up(batch, PAIR))
    for block in dict.fromkeys(min(block, most) for block in BLOCKS):
        panels = (0,) if _are_read_in_place(least, block) else (2, 1) if kernel.layout == "bsf" else (1,)
        for (outputs, depth), panel in product(outputs_and_depths(kernel), panels):
            yield AmxConstants(block, outputs, parts, panel, streaming, depth)


def outputs_and_depths(kernel: KernelSpec) -> Iterator[tuple[int, int]]:
    """Yield pairs of `outputs` and `depth`.

    `outputs` divides the b outputs as equally as possible, and `depth` the tiles along the inputs.
    """
    b, steps = kernel.pattern.b, divide_up(kernel.pattern.c, INPUTS)
    depths = dict.fromkeys(divide_up(steps, divide_up(steps, depth)) for depth in DEPTHS)
    outputs = dict.fromkeys(
        round_up(divide_up(b, groups), PAIR) for groups in range(divide_up(b, MOST_OUTPUTS), divide_up(b, PAIR) + 1)
    )
    return product(outputs, depths)


def _are_read_in_place(shape: AmxTiling, block: int) -> bool:
    """Whether a block's rows of inputs can be read in place, and do not evict each other from the L1 cache."""
    row_bytes = shape.x_row * shape.kernel.item_bytes
    sets = SETS_BYTES // power_of_two_in(row_bytes, SETS_BYTES)  # sets over which rows spread
    return reads_in_place(shape.kernel) and block <= WAYS * sets


def streams_outputs(kernel: KernelSpec, batch: int) -> int:
    """1 if outputs take enough bytes for streaming stores, else 0.

    Only whole cache lines are stored in this way, because memory would have to merge partial lines.
    """
    return int(batch * kernel.pattern.out_features * kernel.item_bytes >= STREAMING_BYTES)


def _with_parts(shape: AmxTiling, limits: Limits, batch: int) -> AmxConstants:
    """Divide groups of outputs into more parts, one per work group, if there are fewer than TASKS blocks per core.

    The number of parts is never reduced.
    """
    blocks = divide_up(batch, shape.constants.block)
    parts = min(divide_up(limits.multiprocessors * TASKS, blocks), shape.columns)
    return replace(shape.constants, parts=max(parts, shape.constants.parts))


def _parts_of_planes(kernel: KernelSpec) -> int:
    """Number of parts: usually one per plane, so that a plane's weights stay in the cache for the whole batch.

    In batch-size-first it is 1 if memory bounds the kernel, so that a work group reads whole rows. It is also 1 there
    if planes share cache lines.
    """
    shape, pattern = least_of(kernel), kernel.pattern
    is_bound = pattern.b * pattern.c < LEAST_REUSE * (pattern.b + pattern.c)
    shares_lines = shape.planes_j > 1 and pattern.d * kernel.item_bytes % LINE_BYTES > 0
    return 1 if shape.is_bsf and (is_bound or shares_lines) else shape.planes
