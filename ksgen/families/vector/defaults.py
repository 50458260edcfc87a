"""The vector family's constants before any search: by rule."""

from dataclasses import replace

from ksgen.families.base import Limits
from ksgen.families.tiles import divide_up
from ksgen.families.vector.planes import lanes_of, round_up
from ksgen.families.vector.shape import CONFLICTING_BYTES, LINE_BYTES, Shape, VectorConstants, lie_in_pairs, needs_panel
from ksgen.families.vector.spread import period_of
from ksgen.spec import KernelSpec

BLOCK_BYTES = 128 * 1024  # of a block's inputs: they stay in a second-level cache
TURNED_VECTORS = 2  # of a tile of outputs that are turned, at most: what a chunk of the batch holds stays near
TURNED_VECTOR_BYTES = 32  # of a processor on which turning may be faster although lanes are full without it
TURNED_WORTH = 36  # multiply-adds for each input or output from which turning pays: b * c / (b + c)
TURNED_BYTES = 800 * 1024  # of a chunk's inputs and outputs: they stay in a second-level cache
FIRST_LEVEL_BYTES, MISSED = 32 * 1024, 0.15  # of a cache; what a tile costs more whose inputs it does not hold
LEAST_ROWS, MOST_ROWS = 24, 48  # a block, where lanes lie along the outputs: enough for each tile of weights, few enough to stay
BSL_ROWS = 128  # a block in batch-size-last, about: the next one's rows are prefetched meanwhile
WAYS = 8  # of a first-level cache
FEW, MANY = 16, 1 << 20  # batch entries
PAST_BYTES = 1 << 20  # of outputs, from which on they are stored past the caches: more than a second-level one holds
SPLIT_WEIGHTS = 1 << 16  # from which on planes are split where they are fewer than cores: less is over before another core has begun
FAR_ROWS = 12  # a block whose rows meet in few sets of a cache, where they are read as they lie
SPREAD_WORTH = 96  # multiply-adds for each input or output up to which spreading pays
SPREAD_ROW_BYTES, COPIED_ROW_BYTES = 24 * 1024, 12 * 1024  # a row's inputs up to which it does, where they lie and where they are copied
SPREAD_RUN = 6  # j from which on it does where inputs are copied as pairs
FEW_LANES = 0.8  # of a tile's lanes that must be outputs, for lanes along the outputs


def tile_sizes(kernel: KernelSpec, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) that fill the vector registers. Of complex numbers, each vector of a tile's width is kept a second time, turned."""
    if kernel.arithmetic.is_complex:
        sizes = [(8, 3), (12, 2), (24, 1), (4, 4), (2, 6), (1, 8), (12, 1), (4, 2), (2, 3), (1, 4)]
        return [size for size in sizes if complex_registers(*size, kept=size[1]) <= limits.vector_registers]
    if limits.vector_registers == 32:
        return [(6, 4), (8, 3), (12, 2), (4, 6), (14, 2), (24, 1), (3, 8), (2, 12), (1, 16), (1, 24), (4, 4), (2, 8)]
    return [(6, 2), (4, 3), (3, 4), (12, 1), (2, 6), (1, 12), (4, 2), (2, 4), (1, 8)]


def complex_registers(height: int, width: int, kept: int) -> int:
    """Of a tile whose `kept` vectors lie there twice, beside what is spread over the lanes."""
    return height * width + 2 * kept + 2


def alike(batch: int) -> int:
    """Small batches each by themselves; others as the power of two from there on: one text serves all of them."""
    return batch if batch <= FEW else 1 << (batch - 1).bit_length()


def default(kernel: KernelSpec, limits: Limits, batch: int | None) -> VectorConstants:
    batch = kernel.batch or alike(batch or MANY)
    lanes = lanes_of(kernel, limits)
    along_outputs = (
        are_few(kernel, limits, lanes, batch)
        or spread_is_faster(kernel, limits, lanes)
        or (prefers_outputs(kernel, lanes, batch) and not turned_is_faster(kernel, limits, lanes, batch))
    )
    found = (_along_outputs if along_outputs else along_batch)(kernel, limits, lanes, batch)
    if not multiplies_pairs(kernel, limits):
        return found
    in_place = kernel.layout == "bsf" and found.along == "outputs" and _are_read_in_place(kernel, found)
    return replace(found, pairs=1, panel=int(not in_place))


def _are_read_in_place(kernel: KernelSpec, constants: VectorConstants) -> bool:
    """Whether pairs lie beside each other where they are, and not so that a tile's rows meet in few sets of the cache."""
    meet = constants.height > WAYS and kernel.in_features * kernel.x_item_bytes % CONFLICTING_BYTES == 0
    return lie_in_pairs(kernel) and not meet


def multiplies_pairs(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether there are two inputs, and the processor multiplies two at a time."""
    return limits.multiplies_pairs(kernel.arithmetic.operand) and kernel.pattern.c > 1 and not kernel.is_quantized


def are_few(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> bool:
    """Whether entries are too few to turn inputs for them, though vectors of outputs take other inputs each until they repeat."""
    d = kernel.pattern.d
    if not few_sizes(kernel, limits):
        return False
    if kernel.layout == "bsl":
        return batch < lanes // 2
    return batch <= (2 * lanes if 2 * d > lanes else lanes // 2)


def few_sizes(kernel: KernelSpec, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) of tiles for few entries whose vectors take other inputs each until they repeat: wide, as each takes a shuffle."""
    d, lanes = kernel.pattern.d, lanes_of(kernel, limits)
    period, most = period_of(d, lanes), 24 if limits.vector_registers == 32 else 12
    if lanes % d == 0 or d % lanes == 0 or 2 * period > most:
        return []
    sizes = [(height, vectors) for height in (2, 1) for vectors in range(most // height // period * period, 0, -period)]
    if kernel.arithmetic.is_complex:
        sizes = [size for size in sizes if complex_registers(*size, kept=size[1] + period) <= limits.vector_registers]
    return sizes if {height for height, _ in sizes} == {1, 2} else []


def spread_is_faster(kernel: KernelSpec, limits: Limits, lanes: int) -> bool:
    """Whether vectors of outputs that take other inputs each until they repeat are faster than turned inputs, with many entries too
    (batch-size-first): measured on AVX-512, where a shuffle need not take a multiply-add's place. A tile reads its rows again for all
    columns, from the second-level cache if they are long; turning costs a copy, for which many multiply-adds make up.
    """
    _, b, c, d = kernel.pattern.shape
    if kernel.layout == "bsl" or limits.vector_bytes < LINE_BYTES or kernel.is_quantized or not spread_sizes(kernel, limits):
        return False
    is_short = d < lanes or kernel.real_bytes == 4
    is_long_enough = d >= SPREAD_RUN or not multiplies_pairs(kernel, limits)
    most_bytes = SPREAD_ROW_BYTES if kernel.x_item_bytes == kernel.real_bytes else COPIED_ROW_BYTES
    return is_short and is_long_enough and b * c < SPREAD_WORTH * (b + c) and c * d * kernel.real_bytes <= most_bytes


def spread_sizes(kernel: KernelSpec, limits: Limits) -> list[tuple[int, int]]:
    """(height, width) of tiles for many entries whose vectors take other inputs until they repeat: each is made once for two."""
    d, lanes = kernel.pattern.d, lanes_of(kernel, limits)
    period = period_of(d, lanes)
    if lanes % d == 0 or d % lanes == 0 or kernel.arithmetic.is_complex or period > 5:
        return []
    return [(20 // width, width) for width in (2 * period, 3 * period, period)] + ([(3, 3 * period)] if period == 3 else [])


def prefers_outputs(kernel: KernelSpec, lanes: int, batch: int) -> bool:
    _, b, _, d = kernel.pattern.shape
    if d <= lanes and lanes % d:
        return False
    if kernel.layout == "bsl":
        return batch < lanes // 2
    used = b * d / round_up(b * d, lanes) if d <= lanes else d / round_up(d, lanes)
    return used >= FEW_LANES


def turned_is_faster(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> bool:
    """Whether to turn inputs, with lanes along the batch, although outputs would fill the lanes too (batch-size-first): measured on
    AVX2, where d fills a vector; with vectors of 16 bytes it never was. Turning costs a copy, so it needs enough multiply-adds, and a
    chunk that stays in the second-level cache.
    """
    _, b, c, d = kernel.pattern.shape
    if kernel.layout == "bsl" or limits.vector_bytes != TURNED_VECTOR_BYTES or d < lanes or batch <= FEW:
        return False
    chunk_bytes = (b + c) * d * TURNED_VECTORS * lanes * kernel.real_bytes
    return b * c >= TURNED_WORTH * (b + c) and chunk_bytes <= TURNED_BYTES


def _along_outputs(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> VectorConstants:
    _, b, _, d = kernel.pattern.shape
    few = are_few(kernel, limits, lanes, batch)
    is_spread = few or spread_is_faster(kernel, limits, lanes)
    vectors = divide_up(b * d if is_spread or d <= lanes else b * lanes, lanes)
    if few:  # the fewest vectors for the core with the most columns; narrow tiles shuffle more often
        cores = limits.multiprocessors
        sizes = [(height, width) for height, width in few_sizes(kernel, limits) if height == min(2, batch)]
        height, width = min(sizes, key=lambda size: (divide_up(divide_up(vectors, size[1]), cores) * size[1], -size[1]))
    elif is_spread:
        height, width = min(spread_sizes(kernel, limits), key=lambda size: _spread_cost(kernel, limits, size, vectors))
    else:
        most, far = (24, 1.5) if limits.vector_registers == 32 else (12, 2.5)
        height, width = min(tile_sizes(kernel, limits), key=lambda size: cost(size, vectors, batch, most, far))
    meets = d > lanes and kernel.in_features * kernel.x_item_bytes % CONFLICTING_BYTES == 0
    lie_ready, are_far = not needs_panel(kernel, 0), meets and reads_far_rows(limits)
    least = FAR_ROWS if lie_ready and are_far and not is_spread else LEAST_ROWS
    rows = max(least, min(MOST_ROWS, BLOCK_BYTES // (kernel.pattern.in_features * 4)))
    block = min(round_up(rows, height), round_up(batch, height))
    stores_past = past(kernel, batch, "outputs", lanes, width)
    found = VectorConstants("outputs", lanes, height, width, block, 1, 0, stores_past)
    shape = Shape(kernel, found)
    straddles = shape.reaches and (few or not shape.is_short)  # lines; or all entries are the last ones, and copied anyway
    is_copied = not lie_ready or straddles or (meets and not are_far)
    return _with_parts(kernel, replace(found, panel=int(is_copied)), limits, batch)


def reads_far_rows(limits: Limits) -> bool:
    """Whether rows that meet in few sets of a cache are read where they lie: measured on an EPYC (Zen 4), where copying them costs more. So
    have processors with AVX-512 BF16 and without tiles; others copy them.
    """
    return bool(limits.dots) and not limits.tiles


def _spread_cost(kernel: KernelSpec, limits: Limits, size: tuple[int, int], vectors: int) -> float:
    """As `cost`: the share that is for nothing, what a shuffle for each multiply-add costs, and weights that come from farther away."""
    height, width = size
    period = period_of(kernel.pattern.d, lanes_of(kernel, limits))
    padded = divide_up(vectors, width) * width / vectors
    missed = kernel.pattern.c * width * limits.vector_bytes > FIRST_LEVEL_BYTES
    return padded * max(1.0, 0.7 + 0.6 * period / width) * (1 + MISSED * (missed and height < 3))


def past(kernel: KernelSpec, batch: int, along: str, lanes: int, width: int) -> int:
    """Whether outputs are stored past the caches: many, unless they leave by pieces of lines, each of which memory would merge."""
    is_turned = along == "batch" and kernel.layout == "bsf"  # a vector at a time then, else all of a tile's width
    run = lanes * kernel.item_bytes * (1 if is_turned else width)
    return int(run % LINE_BYTES == 0 and batch * kernel.pattern.out_features * kernel.item_bytes >= PAST_BYTES)


def cost(size: tuple[int, int], vectors: int, batch: int, most: int, far: float = 1.5) -> tuple[float, ...]:
    """The share of a tile's work that is for nothing, and its loads for each multiply-add. `far`: what the load of a vector counts,
    which comes from farther away than what is repeated for all lanes.
    """
    height, width = size
    padded = divide_up(vectors, width) * width / vectors * (divide_up(batch, height) * height / batch)
    loads = (height + far * width) / (height * width)
    return (padded * max(1.0, 0.75 + loads, most / (height * width) / 2), loads)


def along_batch(kernel: KernelSpec, limits: Limits, lanes: int, batch: int) -> VectorConstants:
    _, b, c, _ = kernel.pattern.shape
    most = 24 if limits.vector_registers == 32 else 12
    vectors = divide_up(batch, lanes)
    widest = min(vectors, TURNED_VECTORS if kernel.layout == "bsf" else vectors)

    def cost_of(size: tuple[int, int]) -> tuple[float, ...]:
        first, loads = cost((size[0], size[1]), min(vectors, 12), b, most)
        return first + MISSED * (c * size[1] * limits.vector_bytes > FIRST_LEVEL_BYTES), loads

    height, width = min((size for size in tile_sizes(kernel, limits) if size[1] <= widest), key=cost_of)
    tile = lanes * width
    tiles = 1 if kernel.layout == "bsf" else max(1, round(BSL_ROWS / tile))
    block = min(tiles * tile, round_up(batch, tile))
    stores_past = past(kernel, batch, "batch", lanes, width)
    return _with_parts(kernel, VectorConstants("batch", lanes, height, width, block, 1, 1, stores_past), limits, batch)


def _with_parts(kernel: KernelSpec, constants: VectorConstants, limits: Limits, batch: int) -> VectorConstants:
    """Columns shared out among work groups, where blocks of the batch are too few for all cores or planes lie far apart."""
    blocks = divide_up(batch, constants.block)
    shape = Shape(kernel, constants)
    shares = shape.is_along_outputs and constants.panel and shape.planes < limits.multiprocessors * 4  # each part copies a plane's inputs
    few = limits.multiprocessors * (1 if shares else 4)
    is_split = shape.turns and shape.planes * blocks < limits.multiprocessors and kernel.pattern.weight_count >= SPLIT_WEIGHTS
    units = shape.columns if is_split else shape.columns // shape.column_unit
    parts = min(divide_up(few, blocks), units) if blocks < few else 1
    if kernel.layout == "bsl" and not shape.is_along_outputs:  # its planes lie far apart: each is gone through from end to end
        parts = max(parts, shape.planes)
    return replace(constants, parts=parts)
