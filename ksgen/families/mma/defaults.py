"""Default constants of the tensor-core family before any search, chosen by rule."""

from collections.abc import Iterator
from itertools import product

from ksgen.errors import ConstantsError
from ksgen.families.base import Limits
from ksgen.families.gpus import PORTABLE
from ksgen.families.mma.shape import COLUMNS, ROWS, MmaConstants, MmaTiling
from ksgen.families.operands import CHUNK
from ksgen.families.tiles import divide_up, least_padded
from ksgen.spec import KernelSpec

MOST_SUMS = 128  # accumulators per thread
MOST_REGISTERS = 236  # estimated, of 255 per thread
# from MANY_PLANES on, the cost model only compares constants of at most MOST_OF_MANY registers: 228 spilled on sm_90a
MANY_PLANES, MOST_OF_MANY = 8, 212
STAGE_BYTES = 64  # bytes of a row's inputs per stage, approximately
BYTES_PROMOTE = 128  # inputs in eight bits after which tensor-core sums are added to plain ones, if there are more
WARP_TILES = 8  # warp tiles that the cost model compares
WARPS = [  # warps of a block: along the batch, along the outputs and along j
    (along_batch, along_out, along_d)
    for along_batch, along_out, along_d in product((1, 2, 4, 8), (1, 2, 3, 4), (1, 2, 3, 4))
    if along_batch * along_out * along_d in (1, 2, 3, 4, 6, 8)
]


def planes(kernel: KernelSpec) -> int:
    """Neighbouring j per warp: all of them if their sums fit, else enough for runs of 16 or 32 bytes."""
    d = kernel.pattern.d
    if kernel.layout == "bsl":
        return 1
    is_promoted = kernel.arithmetic.parts > 1  # sums then take twice the registers
    most_flat = 6 if is_promoted else 8 if kernel.x_item_bytes == 4 else 12
    per_number = kernel.arithmetic.reals_per_number
    if d <= most_flat // per_number:
        return d
    if is_promoted:
        return 4 // per_number
    return least_padded(d, {1: [16], 2: [8]}.get(kernel.x_item_bytes, [8, 4]))


def promotion(kernel: KernelSpec, limits: Limits) -> int:
    """Inputs after which tensor-core sums are added to plain ones; 0: never."""
    if kernel.has_bytes_in:
        return bytes_promotion(kernel)
    return kernel.arithmetic.promotion(limits.has_fine_sums).after(kernel.pattern.c)


def bytes_promotion(kernel: KernelSpec) -> int:
    """Inputs in eight bits after which tensor-core sums are added to plain ones; 0: never.

    Tensor cores keep fewer bits of these sums than of others.
    """
    return BYTES_PROMOTE if kernel.has_bytes_in and kernel.pattern.c > BYTES_PROMOTE else 0


def default(kernel: KernelSpec, limits: Limits) -> MmaConstants:
    """Warp tile with the least padding and the most products per fragment read, in blocks of up to four warps.

    Two blocks share a multiprocessor if shared memory allows, so that one multiplies while the other waits.
    """
    b = kernel.pattern.b
    chosen = _by_cost(kernel, planes(kernel), promotion(kernel, limits))[0]
    warps_out = min((2, 3, 1), key=lambda warps: divide_up(b, warps * chosen.tile_out) * warps)
    warps_batch = 1 if kernel.batch is not None and kernel.batch <= 64 else {1: 4, 2: 2, 3: 1}[warps_out]
    chosen = _of_warps(chosen, warps_batch, warps_out)
    lean = _fewer_stages(kernel, chosen, limits.shared_bytes_for(2))
    if MmaTiling(kernel, lean).shared_bytes <= limits.shared_bytes_for(2):
        return lean.changed(min_blocks=2)
    while MmaTiling(kernel, chosen).shared_bytes > limits.shared_bytes:
        chosen = smaller(kernel, chosen)
    return chosen


def others(kernel: KernelSpec, limits: Limits) -> Iterator[MmaConstants]:
    """Yield alternatives for the cost model: other warp tiles, and blocks of up to eight warps, one or two per
    multiprocessor.

    More warps along the batch read weights less often, and more along the outputs read X less often. More warps along j
    read whole sectors of X and Y. Resident X is read once, and leaves the weights less shared memory.
    """
    b = kernel.pattern.b
    whole, chunk = planes(kernel), CHUNK // kernel.x_item_bytes
    # j per warp: the default's, or one chunk
    planes_of_warp = dict.fromkeys((whole, chunk if whole % chunk == 0 else whole))
    tiles = [
        tile for warp_d in planes_of_warp for tile in _by_cost(kernel, warp_d, promotion(kernel, limits))[:WARP_TILES]
    ]
    for tile, (warps_batch, warps_out, warps_d) in product(tiles, WARPS):
        if warps_out > 1 and (warps_out - 1) * tile.tile_out >= b:
            continue  # a warp would have nothing but padding
        # one chunk of neighbouring j per warp, and no warp with padding alone
        is_spread = kernel.layout == "bsf" and tile.tile_d == chunk and tile.tile_d * warps_d <= kernel.pattern.d
        if warps_d > 1 and not is_spread:
            continue
        reads_again = kernel.layout == "bsf" and tile.tile_out * warps_out < b  # X per tile of outputs, unless resident
        wide = _of_warps(tile, warps_batch, warps_out, warps_d)
        inputs = dict.fromkeys((tile.tile_in, max(tile.tile_in // 2, MmaTiling(kernel, tile).super_in)))
        variants = product((0, 1) if reads_again else (0,), inputs)
        tilings = [
            MmaTiling(kernel, wide.changed(resident=resident, tile_in=tile_in)) for resident, tile_in in variants
        ]
        lean = [each for each in tilings if tile.tile_d < MANY_PLANES or each.registers <= MOST_OF_MANY]
        alone = [_most_stages(each, limits.shared_bytes_for(1)) for each in lean]
        for blocks, (tiling, most) in product((1, 2), zip(lean, alone, strict=True)):
            stages = most if blocks == 1 else _most_stages(tiling, limits.shared_bytes_for(blocks))
            if blocks > 1 and stages == most:
                continue  # the cost model does not know `min_blocks`
            fits_registers = min(255, tiling.registers) * tiling.threads * blocks <= limits.registers
            if stages > 1 and fits_registers and tiling.threads * blocks <= PORTABLE.threads:
                yield tiling.constants.changed(stages=stages, min_blocks=blocks)


def _of_warps(tile: MmaConstants, warps_batch: int, warps_out: int, warps_d: int = 1) -> MmaConstants:
    """Block of several warps, each with a tile of its own."""
    return tile.changed(
        tile_batch=tile.tile_batch * warps_batch, tile_out=tile.tile_out * warps_out, warps_batch=warps_batch,
        warps_out=warps_out, tile_d=tile.tile_d * warps_d, warps_d=warps_d,
    )  # fmt: skip


def _by_cost(kernel: KernelSpec, warp_d: int, promote: int) -> list[MmaConstants]:
    """Tiles of one warp, those with the least padding and the most products per fragment read first."""
    b = kernel.pattern.b

    def cost(constants: MmaConstants) -> tuple[float, ...]:
        tiling = MmaTiling(kernel, constants)
        padding = divide_up(b, tiling.warp_out) * tiling.warp_out / b
        return (padding * (1 / tiling.row_tiles + 1 / tiling.column_tiles), -tiling.sums)

    return sorted(_warp_tiles(kernel, warp_d, promote), key=cost)


def _warp_tiles(kernel: KernelSpec, warp_d: int, promote: int) -> Iterator[MmaConstants]:
    """Yield blocks of one warp whose sums and fragments fit its registers."""
    chunk = CHUNK // kernel.x_item_bytes
    columns = (1, 2, 3, 4, 6, 8) if kernel.layout == "bsf" else (chunk, 2 * chunk)
    for rows, column in product((1, 2, 3, 4), columns):
        constants = MmaConstants(COLUMNS * column, ROWS * rows, 0, warp_d, 1, 1, 4, promote, 1)
        tiling = MmaTiling(kernel, constants)
        is_smallest = (rows, column) == (1, columns[0])
        if is_smallest or (tiling.promoted_sums <= MOST_SUMS and tiling.registers <= MOST_REGISTERS):
            tile_in = _inputs(kernel.pattern.c, tiling.super_in, STAGE_BYTES // kernel.x_item_bytes)
            yield constants.changed(tile_in=tile_in)


def _inputs(c: int, least: int, wanted: int) -> int:
    """Inputs per stage, from `least` up to `wanted`: those with the least padding of c, and the most of these."""
    return least_padded(c, (least << shift for shift in range(4) if least << shift <= max(least, wanted)))


def _most_stages(tiling: MmaTiling, budget: int) -> int:
    """Stages that fit `budget` bytes of shared memory, at most the constants' own; below two, the tile does not fit."""
    stages = tiling.constants.stages
    each = tiling.w_bytes + (0 if tiling.constants.resident else tiling.x_bytes)
    return min(stages, (budget - tiling.shared_bytes) // each + stages)


def _fewer_stages(kernel: KernelSpec, constants: MmaConstants, budget: int) -> MmaConstants:
    """Reduce the number and length of stages until they fit, or cannot be reduced further."""
    tiling = MmaTiling(kernel, constants)
    stages = _most_stages(tiling, budget)
    if stages < 2 and constants.tile_in > tiling.super_in:
        return _fewer_stages(kernel, constants.changed(tile_in=constants.tile_in // 2, stages=4), budget)
    return constants.changed(stages=max(2, stages))


def smaller(kernel: KernelSpec, constants: MmaConstants) -> MmaConstants:
    """Reduce one constant that takes shared memory; the smallest tile fits every device."""
    tiling = MmaTiling(kernel, constants)
    if constants.stages > 2:
        return constants.changed(stages=constants.stages - 1)
    if constants.tile_in > tiling.super_in:
        return constants.changed(tile_in=constants.tile_in // 2)
    if constants.warps_batch > 1:
        return constants.changed(tile_batch=constants.tile_batch // constants.warps_batch, warps_batch=1)
    if constants.warps_out > 1:
        return constants.changed(tile_out=constants.tile_out // constants.warps_out, warps_out=1)
    raise ConstantsError(f"{kernel.name}: no tile fits shared memory; got {constants}")
