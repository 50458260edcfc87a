"""Default constants of the vector family before any search, chosen by rule."""

from dataclasses import replace
from functools import lru_cache
from math import lcm

from ksgen.families.base import Limits
from ksgen.families.chains import factor_kernels, own_of_factors, places, transposes
from ksgen.families.tiles import divide_up
from ksgen.families.vector.chain import AnyVectorConstants, VectorChainConstants
from ksgen.families.vector.cycles import FIRST_LEVEL_BYTES, WAYS
from ksgen.families.vector.planes import AVX2_BYTES, lanes_of, period_of, round_up
from ksgen.families.vector.shape import (
    CONFLICTING_BYTES,
    LARGE_BYTES,
    LINE_BYTES,
    PLANE_BYTES,
    VectorConstants,
    VectorTiling,
    lie_in_pairs,
    needs_panel,
)
from ksgen.spec import KernelSpec

BLOCK_BYTES = 128 * 1024  # bytes of a block's inputs that stay in an L2 cache
TRANSPOSED_VECTORS = 2  # vectors per row of a tile of transposed outputs, at most: a chunk stays in a near cache
LEAST_TRANSPOSED_INTENSITY = 36  # least multiply-adds per input or output, b * c / (b + c), to transpose
TRANSPOSED_BYTES = 1536 * 1024  # bytes of a chunk's inputs and outputs that stay in an L2 cache
MISSED = 0.15  # additional cost of a tile whose inputs exceed an L1 cache
# rows per block, if lanes are along the outputs: enough to reuse each tile of weights, few enough to stay cached
LEAST_ROWS, MOST_ROWS = 24, 48
# with vectors of AVX2, bytes of weights up to which a block of copied rows is one tile, if there are many blocks: the
# weights of all planes, which each block reads, stay in an L3 cache
CACHED_BYTES = 4 * 1024 * 1024
BSL_ROWS = 128  # rows per block in batch-size-last, approximately; the next block's rows are prefetched meanwhile
FULL, LEAN = (4, 3), (6, 2)  # tiles of 12 sums: with their operands, they take 16 and 15 vector registers
MOST_MORE = 1.1  # largest cost of LEAN tiles, relative to that of FULL ones, at which they are faster
FEW, MANY = 16, 1 << 15  # up to FEW rows each batch is a class; from MANY on all are one
# on processors with matrix tiles, weights per row of the batch from which on at most PAIRED_ROWS rows multiply pairs
PAIRED_WEIGHTS, PAIRED_ROWS = 1 << 18, 4
STREAMING_BYTES = 1 << 20  # outputs of at least this size use streaming stores: an L2 cache cannot hold them
# weights from which on planes are split if they are fewer than cores: less work ends before another core begins
SPLIT_WEIGHTS = 1 << 16
FAR_ROWS = 12  # least rows per block, if rows share few sets of a cache and are read in place
MOST_SPREAD_INTENSITY = 96  # inputs are spread over lanes below this number of multiply-adds per input or output
# bytes of the inputs of one i in a row, up to which spreading pays: for inputs read in place, and for copied ones
SPREAD_ROW_BYTES, COPIED_ROW_BYTES = 24 * 1024, 12 * 1024
SPREAD_RUN = 6  # least d for which spreading pays if inputs are copied as pairs
CHAIN_BYTES = 512 * 1024  # bytes of a block's inputs and outputs of its widest factor
ALONG = ("outputs", "batch")
REMEMBERED = 4096  # cached defaults: chains have factors in common
FEW_LANES = 0.8  # least share of lanes that must hold outputs, for lanes along the outputs


def tile_sizes(kernel: KernelSpec, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) of tiles that fill the vector registers.

    For complex numbers, registers hold each vector of a tile's width a second time, multiplied by i.
    """
    if kernel.arithmetic.is_complex:
        sizes = [(8, 3), (12, 2), (24, 1), (4, 4), (2, 6), (1, 8), (12, 1), (4, 2), (2, 3), (1, 4)]
        return [size for size in sizes if complex_registers(*size, kept=size[1]) <= limits.vector_registers]
    if limits.vector_registers == 32:
        return [(6, 4), (8, 3), (12, 2), (4, 6), (14, 2), (24, 1), (3, 8), (2, 12), (1, 16), (1, 24), (4, 4), (2, 8)]
    return [(6, 2), (4, 3), (3, 4), (12, 1), (2, 6), (1, 12), (4, 2), (2, 4), (1, 8)]


def complex_registers(height: int, width: int, kept: int) -> int:
    """Vector registers of a tile of complex numbers: sums, `kept` vectors twice, two for spread values."""
    return height * width + 2 * kept + 2


def alike(batch: int) -> int:
    """Batch that stands for the class of `batch`: a small batch itself, else the next power of two, at most MANY."""
    return batch if batch <= FEW else min(MANY, 1 << (batch - 1).bit_length())


def default_by_rule(kernel: KernelSpec, limits: Limits, batch: int) -> AnyVectorConstants:
    """The fastest constants by rule at a batch; `sources.py` decides which batches share them."""
    return (_default_of_chain if kernel.is_chain else _default_of_factor)(kernel, limits, batch)


def _default_of_chain(kernel: KernelSpec, limits: Limits, batch: int) -> AnyVectorConstants:
    factors = factor_kernels(kernel)
    alone = [_default_of_factor(each, limits, batch) for each in factors]
    pairs, chosen = max(each.pairs for each in alone), []
    for place, factor, own in zip(places(kernel), factors, alone, strict=True):
        is_turned = transposes(kernel, place) and own.along == "outputs"
        tiles = along_batch(factor, limits, own.lanes, batch) if is_turned else own
        is_copied = factor.layout == "bsl" or (pairs and place.at == 0 and kernel.stride != "dense")
        chosen.append(tiles.changed(pairs=pairs, panel=1 if is_copied else tiles.panel))
    return fitted(kernel, limits, VectorChainConstants.of(kernel, MOST_ROWS, chosen), batch)


def common_block(kernel: KernelSpec, shapes: list[VectorTiling], most: int) -> int:
    """Rows of the batch per block, at most `most`: whole tiles of every factor, because a partial tile costs as much as
    a whole one.

    A factor's inputs and outputs of one block stay in the cache. Batch-size-last is the exception, because shorter
    pieces of rows cost more.
    """
    features = max(each.pattern.in_features + each.pattern.out_features for each in places(kernel))
    held = MOST_ROWS if "bsf" not in (kernel.layout, kernel.y_layout) else min(MOST_ROWS, CHAIN_BYTES // (4 * features))
    whole, unit = lcm(*(shape.tile_rows for shape in shapes)), lcm(*(shape.unit for shape in shapes))
    if whole <= min(2 * MOST_ROWS, most):
        return max(1, min(held, most) // whole) * whole
    return max(unit, min(held, most) // unit * unit)


@lru_cache(REMEMBERED)
def _default_of_factor(kernel: KernelSpec, limits: Limits, batch: int) -> VectorConstants:
    if multiplies_pairs(kernel, limits) and not pairs_pay(kernel, limits, batch):
        limits = replace(limits, dots=())
    lanes = lanes_of(kernel, limits)
    # exchanged outputs along the lanes are stored one by one
    is_transposed = kernel.pattern.outputs.is_exchanged or transposes_exchanged(kernel, limits, lanes)
    along_outputs = (batch < lanes // 2 or not is_transposed) and (
        is_small_batch(kernel, limits, lanes, batch)
        or spread_is_faster(kernel, limits, lanes)
        or (prefers_outputs(kernel, lanes, batch) and not transposing_is_faster(kernel, limits, lanes, batch))
    )
    found = (_along_outputs if along_outputs else along_batch)(kernel, limits, lanes, batch)
    if multiplies_pairs(kernel, limits):
        in_place = kernel.layout == "bsf" and found.along == "outputs" and _are_read_in_place(kernel, found)
        found = found.changed(pairs=1, panel=int(not in_place))
    return _fitted_factor(kernel, limits, found, batch)


def transposes_exchanged(kernel: KernelSpec, limits: Limits, lanes: int) -> bool:
    """Whether exchanged inputs in batch-size-first would be copied one by one along the outputs, from digits of l.

    Squares along the batch are faster then, if planes are whole vectors in X. Measured on AVX-512, with d = 1.
    """
    inputs, pairs = kernel.pattern.inputs, int(multiplies_pairs(kernel, limits))
    if kernel.layout == "bsl" or kernel.pattern.d > 1 or not inputs.is_exchanged or inputs.run == 1:
        return False
    rows, columns = (VectorTiling(kernel, VectorConstants(along, lanes, 1, 1, 1, 1, 1, 0, pairs)) for along in ALONG)
    return rows.piece == 1 and columns.run_in % lanes == 0


def _are_read_in_place(kernel: KernelSpec, constants: VectorConstants) -> bool:
    """Whether pairs are contiguous in X, and a tile's rows fit the sets of the cache that they share."""
    meet = constants.height > WAYS and kernel.in_features * kernel.x_item_bytes % CONFLICTING_BYTES == 0
    return lie_in_pairs(kernel) and not meet


def multiplies_pairs(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether there are at least two inputs, and the processor multiplies two at a time."""
    return limits.multiplies_pairs(kernel.arithmetic.operand) and kernel.pattern.c > 1 and not kernel.is_quantized


def pairs_pay(kernel: KernelSpec, limits: Limits, batch: int) -> bool:
    """Whether products of pairs are faster than multiply-adds, on a processor that has both.

    On Intel's, which have matrix tiles, a product of a pair takes as long as two multiply-adds. So pairs are faster
    only where reading the weights dominates. Measured on a Xeon.
    """
    rows = batch if kernel.layout == "bsl" else PAIRED_ROWS
    return not limits.tiles or (batch <= PAIRED_ROWS and kernel.pattern.weight_count >= PAIRED_WEIGHTS * rows)


def is_small_batch(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> bool:
    """Whether the batch is too small to transpose its inputs, and its vectors have a period (`small_batch_sizes`)."""
    d = kernel.pattern.d
    if not small_batch_sizes(kernel, limits):
        return False
    if kernel.layout == "bsl":
        return batch < lanes // 2
    return batch <= (2 * lanes if 2 * d > lanes else lanes // 2)


def small_batch_sizes(kernel: KernelSpec, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) of tiles for small batches whose vectors of outputs have a period (`period_of`).

    Tiles are wide, because each vector of inputs takes a shuffle.
    """
    d, lanes = kernel.pattern.d, lanes_of(kernel, limits)
    period, most = period_of(d, lanes), limits.vector_sums
    if lanes % d == 0 or d % lanes == 0 or 2 * period > most:
        return []
    sizes = [(height, vectors) for height in (2, 1) for vectors in range(most // height // period * period, 0, -period)]
    if kernel.arithmetic.is_complex:
        sizes = [size for size in sizes if complex_registers(*size, kept=size[1] + period) <= limits.vector_registers]
    return sizes if {height for height, _ in sizes} == {1, 2} else []


def spread_is_faster(kernel: KernelSpec, limits: Limits, lanes: int) -> bool:
    """Whether vectors of outputs with a period (`period_of`) are faster than transposed inputs in batch-size-first, for
    any batch.

    Measured on AVX-512, where a shuffle need not take a multiply-add's place. Each column reads a tile's rows again,
    from the L2 cache if they are long. Transposing costs a copy, which many multiply-adds make up for.
    """
    _, b, c, d = kernel.pattern.shape
    is_unfit = kernel.layout == "bsl" or limits.vector_bytes < LINE_BYTES or kernel.is_quantized
    if is_unfit or not spread_sizes(kernel, limits):
        return False
    is_short = d < lanes or kernel.real_bytes == 4
    is_long_enough = d >= SPREAD_RUN or not multiplies_pairs(kernel, limits)
    most_bytes = SPREAD_ROW_BYTES if kernel.x_item_bytes == kernel.real_bytes else COPIED_ROW_BYTES
    is_small = b * c < MOST_SPREAD_INTENSITY * (b + c) and c * d * kernel.real_bytes <= most_bytes
    return is_short and is_long_enough and is_small


def spread_sizes(kernel: KernelSpec, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) of tiles for large batches whose vectors of outputs have a period (`period_of`).

    A vector of inputs is made once for width / period vectors.
    """
    d, lanes = kernel.pattern.d, lanes_of(kernel, limits)
    period = period_of(d, lanes)
    if lanes % d == 0 or d % lanes == 0 or kernel.arithmetic.is_complex or period > 5:
        return []
    return [(20 // width, width) for width in (2 * period, 3 * period, period)] + (
        [(3, 3 * period)] if period == 3 else []
    )


def prefers_outputs(kernel: KernelSpec, lanes: int, batch: int) -> bool:
    _, b, _, d = kernel.pattern.shape
    if d <= lanes and lanes % d:
        return False
    if kernel.layout == "bsl":
        return batch < lanes // 2
    used = b * d / round_up(b * d, lanes) if d <= lanes else d / round_up(d, lanes)
    return used >= FEW_LANES


def transposing_is_faster(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> bool:
    """Whether to transpose inputs, with lanes along the batch, although outputs would fill the lanes too
    (batch-size-first).

    Measured on AVX2, where d fills a vector; with vectors of 16 bytes it never was faster. Transposing costs a copy, so
    it needs enough multiply-adds, and a chunk that stays in the L2 cache.
    """
    _, b, c, d = kernel.pattern.shape
    if kernel.layout == "bsl" or limits.vector_bytes != AVX2_BYTES or d < lanes or batch <= FEW:
        return False
    if VectorTiling(kernel, _along_outputs(kernel, limits, lanes, batch)).is_by_rows:
        return False
    chunk_bytes = (b + c) * d * TRANSPOSED_VECTORS * lanes * kernel.real_bytes
    return b * c >= LEAST_TRANSPOSED_INTENSITY * (b + c) and chunk_bytes <= TRANSPOSED_BYTES


def _along_outputs(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> VectorConstants:
    _, b, _, d = kernel.pattern.shape
    is_small = is_small_batch(kernel, limits, lanes, batch)
    is_spread = is_small or spread_is_faster(kernel, limits, lanes)
    vectors = divide_up(b * d if is_spread or d <= lanes else b * lanes, lanes)
    if is_small:  # the fewest vectors for the core with the most columns; narrow tiles shuffle more often
        cores = limits.multiprocessors
        sizes = [(height, width) for height, width in small_batch_sizes(kernel, limits) if height == min(2, batch)]
        height, width = min(sizes, key=lambda size: (divide_up(divide_up(vectors, size[1]), cores) * size[1], -size[1]))
    elif is_spread:
        height, width = min(spread_sizes(kernel, limits), key=lambda size: _spread_cost(kernel, limits, size, vectors))
    else:
        most, far = limits.vector_sums, 1.5 if limits.vector_registers == 32 else 2.5
        costs = {size: cost(size, vectors, batch, most, far) for size in tile_sizes(kernel, limits)}
        height, width = min(costs, key=costs.__getitem__)
        if (height, width) == FULL and costs[LEAN][0] <= MOST_MORE * costs[FULL][0] and prefers_lean(kernel, lanes):
            height, width = LEAN
    found = VectorConstants("outputs", lanes, height, width, height, 1, 0, 0)
    shape = VectorTiling(kernel, found)
    # rows straddle cache lines; or all rows are the last ones, which are copied anyway
    straddles = shape.reaches and (is_small or not shape.is_short)
    is_copied = needs_panel(kernel, 0) or straddles or (are_far(shape) and not reads_far_rows(limits))
    return found.changed(panel=int(is_copied))


def prefers_lean(kernel: KernelSpec, lanes: int) -> bool:
    """Whether `LEAN` tiles are faster than `FULL` ones, with float32 sums in vectors of AVX2, in batch-size-first.

    FULL tiles leave no register free, so that GCC loads vectors again for each product. But their columns are fewer and
    read rows less often. That counts if rows come from an L2 cache, and an input l is a whole vector of j.
    """
    shape = VectorTiling(kernel, VectorConstants("outputs", lanes, *LEAN, 1, 1, 0, 0))
    is_measured = shape.has_avx2_vectors and kernel.real_bytes == 4 and kernel.layout == "bsf"
    return is_measured and (kernel.pattern.d < lanes or shape.is_by_rows)


def are_far(shape: VectorTiling) -> bool:
    """Whether rows with many j share few sets of a cache; with vectors of AVX2, also because they fill half lines."""
    kernel = shape.kernel
    meet = kernel.in_features * kernel.x_item_bytes % CONFLICTING_BYTES == 0 or shape.has_avx2_vectors
    return shape.is_along_outputs and kernel.pattern.d > shape.constants.lanes and meet


def reads_far_rows(limits: Limits) -> bool:
    """Whether rows that share few sets of a cache are read in place.

    Measured on an EPYC (Zen 4), where copying them costs more. Processors with AVX-512 BF16 and without matrix tiles
    read in place, like this one; others copy.
    """
    return bool(limits.dots) and not limits.tiles


def _spread_cost(kernel: KernelSpec, limits: Limits, size: tuple[int, int], vectors: int) -> float:
    """Relative cost of a tile's size, like `cost`: padding, shuffles, and weights that exceed the L1 cache."""
    height, width = size
    period = period_of(kernel.pattern.d, lanes_of(kernel, limits))
    padded = divide_up(vectors, width) * width / vectors
    missed = kernel.pattern.c * width * limits.vector_bytes > FIRST_LEVEL_BYTES
    return padded * max(1.0, 0.7 + 0.6 * period / width) * (1 + MISSED * (missed and height < 3))


def streams_outputs(kernel: KernelSpec, constants: VectorConstants, batch: int) -> int:
    """Whether outputs leave by streaming stores: many outputs in whole cache lines.

    Memory would have to merge partial lines.
    """
    if batch * kernel.pattern.out_features * kernel.item_bytes < STREAMING_BYTES:
        return 0
    # transposed outputs, and those of planes with some j, are stored vector by vector, others by a tile's width
    is_transposed = constants.along == "batch" and kernel.layout == "bsf"
    is_apart = is_transposed or (constants.along == "outputs" and VectorTiling(kernel, constants).planes_j > 1)
    run = constants.lanes * kernel.item_bytes * (1 if is_apart else constants.width)
    return int(run % LINE_BYTES == 0)


def cost(size: tuple[int, int], vectors: int, batch: int, most: int, far: float = 1.5) -> tuple[float, ...]:
    """Relative cost of a tile's size: padding together with the loads per multiply-add, then the loads alone.

    `far` is the cost of loading a vector, relative to that of a value that is repeated for all lanes. The vector comes
    from farther away.
    """
    height, width = size
    padded = divide_up(vectors, width) * width / vectors * (divide_up(batch, height) * height / batch)
    loads = (height + far * width) / (height * width)
    return (padded * max(1.0, 0.75 + loads, most / (height * width) / 2), loads)


def along_batch(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> VectorConstants:
    _, b, c, _ = kernel.pattern.shape
    vectors = divide_up(batch, lanes)
    widest = min(vectors, TRANSPOSED_VECTORS if kernel.layout == "bsf" else vectors)

    def cost_of(size: tuple[int, int]) -> tuple[float, ...]:
        first, loads = cost(size, min(vectors, 12), b, limits.vector_sums)
        return first + MISSED * (c * size[1] * limits.vector_bytes > FIRST_LEVEL_BYTES), loads

    height, width = min((size for size in tile_sizes(kernel, limits) if size[1] <= widest), key=cost_of)
    return VectorConstants("batch", lanes, height, width, lanes * width, 1, 1, 0)


# ---- constants of a launch


def fitted(kernel: KernelSpec, limits: Limits, constants: AnyVectorConstants, batch: int) -> AnyVectorConstants:
    """The same tiles, with constants of a launch by rule for a batch: blocks, parts and streaming stores."""
    if isinstance(constants, VectorConstants):
        return _fitted_factor(kernel, limits, constants, batch)
    block = common_block(kernel, shapes_of(kernel, constants), divide_up(batch, 2 * limits.multiprocessors))
    return constants.changed(block=block, streaming=streams_outputs(*own_of_factors(kernel, constants)[-1], batch))


def shapes_of(kernel: KernelSpec, constants: AnyVectorConstants) -> list[VectorTiling]:
    return [VectorTiling(*each) for each in own_of_factors(kernel, constants)]


def _fitted_factor(kernel: KernelSpec, limits: Limits, constants: VectorConstants, batch: int) -> VectorConstants:
    constants = constants.changed(parts=1)
    shape = VectorTiling(kernel, constants)
    reads_far = are_far(shape) and reads_far_rows(limits) and not needs_panel(kernel, 0) and shape.period == 1
    block = min(largest_block(shape, FAR_ROWS if reads_far else LEAST_ROWS), round_up(batch, shape.tile_rows))
    are_many = divide_up(batch, block) > 4 * limits.multiprocessors
    is_copied = shape.has_avx2_vectors and shape.is_by_rows and constants.panel
    if are_many and is_copied and shape.packed_bytes <= CACHED_BYTES:
        block = shape.tile_rows
    streaming = streams_outputs(kernel, constants, batch)
    return constants.changed(block=block, parts=_parts(shape, limits, divide_up(batch, block)), streaming=streaming)


def largest_block(shape: VectorTiling, least: int = LEAST_ROWS) -> int:
    """Rows per block of a large batch, by rule; at least `least` if lanes are along the outputs."""
    pattern, tile_rows = shape.kernel.pattern, shape.tile_rows
    if shape.is_along_outputs and shares_lines(shape):
        rows = FIRST_LEVEL_BYTES // (pattern.in_features * shape.kernel.x_item_bytes)
        return max(1, min(MOST_ROWS, rows) // tile_rows) * tile_rows
    if shape.is_along_outputs:
        return round_up(max(least, min(MOST_ROWS, BLOCK_BYTES // (pattern.in_features * 4))), tile_rows)
    return tile_rows * (1 if shape.kernel.layout == "bsf" else max(1, round(BSL_ROWS / tile_rows)))


def shares_lines(shape: VectorTiling) -> bool:
    """Whether planes read exchanged inputs from the same lines of X, which an L1 cache should hold for all of them.

    The weights of all planes, which each block reads, stay in an L2 cache meanwhile.
    """
    kernel = shape.kernel
    is_apart = kernel.reads_exchanged and kernel.layout == "bsf" and shape.piece == 1
    return is_apart and shape.packed_bytes <= PLANE_BYTES


def _parts(shape: VectorTiling, limits: Limits, blocks: int) -> int:
    """Parts of the columns: several if the batch has too few blocks for the cores, or if planes are far apart."""
    kernel, constants = shape.kernel, shape.constants
    # each part copies a plane's inputs
    copies = constants.panel or constants.pairs
    shares = not shape.transposes and copies and shape.planes < limits.multiprocessors * 4
    wanted = limits.multiprocessors * (1 if shares else 4)
    is_heavy = kernel.pattern.weight_count >= SPLIT_WEIGHTS
    is_split = shape.transposes and shape.planes * blocks < limits.multiprocessors and is_heavy
    units = shape.columns if is_split else shape.columns // shape.column_unit
    parts = min(divide_up(wanted, blocks), units)
    if kernel.layout == "bsl" and not shape.is_along_outputs:  # planes are far apart: each is read from end to end
        parts = max(parts, shape.planes)
    if blocks > limits.multiprocessors:
        parts = max(parts, min(_parts_of_weights(shape), units))
    return parts


def _parts_of_weights(shape: VectorTiling) -> int:
    """Parts whose weights stay in an L2 cache for all blocks, in batch-size-first; one if they would not be faster.

    Weights that are larger than the cache would be read whole for each block of a single part. Parts of one plane read
    the same inputs again, which must be fewer bytes.
    """
    kernel, weights = shape.kernel, shape.packed_bytes
    if weights <= LARGE_BYTES or kernel.layout == "bsl" or not shape.is_along_outputs or shape.constants.panel:
        return 1
    parts = divide_up(weights, PLANE_BYTES)
    again = (divide_up(parts, shape.planes) - 1) * kernel.in_features * kernel.x_item_bytes
    return parts if again * LEAST_ROWS < weights else 1
