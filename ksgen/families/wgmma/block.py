"""Sizes of a warpgroup kernel, derived from its constants, for all sources of X (`x_from`).

A block is one warpgroup that copies and one to three that multiply. Tensor maps bring X as boxes into stages of shared
memory. One bulk copy brings a stage of packed weights. Mbarriers signal that a stage is full, or free again. X is
operand A (64 rows of the batch per instruction), packed weights are operand B (`tile_out` outputs).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import gcd, lcm
from typing import Any, ClassVar, TypeVar

from ksgen.families.base import MAP_ALIGNMENT, Geometry, Limits, TensorMap
from ksgen.families.gpus import REGISTERS as MULTIPROCESSOR_REGISTERS
from ksgen.families.operands import CHUNK, FREE_OF_CONFLICTS, TensorTile, wavefronts
from ksgen.families.signature import PRODUCT
from ksgen.families.tiles import WARP, Constants, divide_up
from ksgen.order import Digit, Order, Place
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

WARPGROUP = 128  # threads
ROWS = 64  # rows of the batch per instruction
LINE = 128  # bytes of a box's row, if rows are as long as the swizzle's span
SPANS = (16, 32, 64, LINE)  # bytes of a box's row: the span of its swizzle, or 16 without a swizzle
SWIZZLE_PERIOD = 1024  # bytes after which the widest swizzle repeats; boxes are aligned to it
MOST_COLUMNS = 256  # outputs of one instruction
MOST_BOX = 256  # elements of a box in one dimension
MOST_DIMENSIONS = 5  # of a tensor map
# a coordinate is a signed number of 32 bits, and a cluster's tiles reach over an array's end
MOST_EXTENT = 2**31 - 2**16
MOST_STRIDE = 2**40 - 1  # bytes, of a tensor map
REGISTERS = {  # per thread of the copying warpgroup and of the multiplying ones, by the number of the latter
    1: (0, 0),  # unchanged since the launch: 255
    2: (24, 240),
    3: (32, 160),
}
# registers per thread that ptxas gives a block which may have the whole multiprocessor
LAUNCHED = {1: 255, 2: 168, 3: 128}
MOST_STAGES = 6  # by default
ADDRESSES = 40  # registers per thread for addresses, approximately


ConstantsT = TypeVar("ConstantsT", bound=Constants)


@dataclass(frozen=True)
class Reads:
    """Access of a warp's lanes to a tile of X."""

    is_bsf: bool
    tile_batch: int
    panel_bytes: int
    span: int
    chunks: int  # neighbouring chunks per lane
    rounds: int  # rounds of four lanes' groups of chunks, until a row of the tile is read
    swaps_rows: bool

    def chunk_at(self, row: int, chunk: int) -> int:
        """Byte offset of a row's 16-byte chunk in a tile of batch-size-first."""
        panel, inside = divmod(chunk * CHUNK, self.panel_bytes)
        at = (panel * self.tile_batch + row) * self.panel_bytes + inside
        return at ^ (at >> 3 & (self.span - CHUNK))

    def row_of(self, g: int) -> int:
        return g % 2 * 4 + g // 2 if self.swaps_rows else g

    def offsets(self) -> Iterator[list[int]]:
        """Yield the byte offsets of the chunks of X that the lanes of a warp read at a time."""
        lanes = [(lane // 4, lane % 4) for lane in range(WARP)]
        if not self.is_bsf:  # two neighbouring inputs of four rows of the batch
            yield from ([(2 * t + e) * LINE + (g ^ (2 * t + e) % 8) * CHUNK for g, t in lanes] for e in range(2))
            return
        for group, q in product(range(self.rounds), range(self.chunks)):
            yield [self.chunk_at(self.row_of(g), (4 * group + t) * self.chunks + q) for g, t in lanes]


@cache  # many constants share few different `Reads`
def are_free_of_conflicts(reads: Reads) -> bool:
    return all(wavefronts(offsets) == FREE_OF_CONFLICTS for offsets in reads.offsets())


class Block(TensorTile):
    """Sizes of a block that all values of `x_from` share.

    Constants have tile_batch, tile_out, tile_in, tile_d, groups_batch, groups_d, stages, cluster_batch, cluster_out and
    x_from. Each value of x_from has a subclass. It defines the kernels that it supports (`is_for`), the instruction,
    the rules, the candidate constants (`options`, `tiles`) and the template variables.
    """

    signature: ClassVar[tuple[str, ...]] = PRODUCT

    @classmethod
    def fits_device(cls, family: Any, kernel: KernelSpec, limits: Limits) -> bool:
        """Whether some tile of such a kernel fits the device."""
        return True

    def with_passes(self, geometry: Geometry, batch: int) -> Geometry:
        """Geometry of the launch, with the launches before and after it."""
        return geometry

    def passed_bytes(self, batch: int) -> int:
        """Bytes that the launches before and after read and write."""
        return 0

    @property
    def groups(self) -> int:
        """Warpgroups that multiply."""
        return int(self.constants.groups_batch * self.constants.groups_d)

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.groups + 1)

    @property
    def passes(self) -> int:
        """Tiles along the outputs for which X is loaded once."""
        return 1

    @property
    def row_tiles(self) -> int:
        """Instructions of a warpgroup along the batch."""
        return int(self.constants.tile_batch // (ROWS * self.constants.groups_batch))

    @property
    def planes(self) -> int:
        """Neighbouring j per warpgroup."""
        return int(self.constants.tile_d // self.constants.groups_d)

    @property
    def sums(self) -> int:
        """Accumulators per thread."""
        return self.planes * self.row_tiles * int(self.constants.tile_out) // 2

    @property
    def held(self) -> int:
        """Registers per thread that stay allocated while a warpgroup multiplies."""
        return self.sums

    @property
    def registers(self) -> int:
        """Registers per thread at launch. With two or more multiplying warpgroups, threads share all registers."""
        return LAUNCHED[self.groups] if self.groups > 1 else min(LAUNCHED[1], self.held + ADDRESSES)

    @property
    def y_chunk(self) -> int:
        """Elements of Y per chunk."""
        return CHUNK // self.kernel.item_bytes

    @property
    def run_out(self) -> int:
        """Neighbouring outputs per lane: enough for whole chunks of Y in batch-size-first if it has them, else 2."""
        of_chunks = lcm(self.warp_d, self.y_chunk) // self.warp_d
        return gcd(of_chunks, self.constants.tile_out // 4) if self.is_bsf else 2

    @property
    def y_vector(self) -> int:
        """Neighbours that one store of Y moves: never over the end of a row, a diagonal block or a ragged edge."""
        if not self.is_bsf:
            return self.y_chunk
        _, b, _, d = self.kernel.pattern.shape
        whole = gcd(b * d, self.run_out * self.planes) if self.constants.tile_d == d else gcd(d, self.planes)
        return gcd(self.y_chunk, whole, self.kernel.pattern.outputs.run)

    # ---- X as boxes

    @cached_property
    def is_flat(self) -> bool:
        """Whether a row's run of inputs holds all j, so that it is contiguous for a line at least."""
        d = self.kernel.pattern.d
        has_lines = not self.kernel.pattern.inputs.is_exchanged or (d == 1 and self.run_bytes % LINE == 0)
        return self.is_bsf and bool(self.constants.tile_d == d) and has_lines

    @property
    def run_bytes(self) -> int:
        """Bytes of a run of inputs that are contiguous in X."""
        return self.kernel.pattern.inputs.run * self.kernel.x_item_bytes

    @property
    def has_short_runs(self) -> bool:
        """Whether d = 1 and an exchange leaves runs shorter than a line, which are then loaded like a tile's j."""
        return self.is_bsf and self.kernel.pattern.d == 1 and self.run_bytes in SPANS and not self.is_flat

    @cached_property
    def span(self) -> int:
        """Bytes over which the swizzle of X permutes 16-byte chunks; 16: no swizzle."""
        if not self.is_bsf or self.is_flat:
            return LINE
        return self.run_bytes if self.has_short_runs else int(self.constants.tile_d) * self.kernel.x_item_bytes

    @cached_property
    def panel_bytes(self) -> int:
        """Bytes per row of X in shared memory: 128 of a flat run, else four inputs with the tile's j, or four runs."""
        return LINE if not self.is_bsf or self.is_flat else 4 * self.span

    @cached_property
    def group_chunks(self) -> int:
        return self.span // CHUNK if self.has_short_runs else super().group_chunks

    @cached_property
    def group_inputs(self) -> int:
        return self.span // self.kernel.x_item_bytes if self.has_short_runs else super().group_inputs

    @property
    def cluster(self) -> int:
        """Blocks of a cluster."""
        return int(self.constants.cluster_batch * self.constants.cluster_out)

    @property
    def box_rows(self) -> int:
        """Rows of the boxes of X that a block, or its cluster, loads at a time."""
        return int(self.constants.tile_batch if self.is_bsf else self.constants.tile_in)

    @property
    def box_batch(self) -> int:
        """Rows of the batch per box."""
        return int(self.constants.tile_batch) if self.is_bsf else LINE // self.kernel.x_item_bytes

    @property
    def x_map(self) -> tuple[tuple[int, ...], int]:
        """The box of X, and its swizzle in bytes. Rules exclude boxes that are not whole digits of the inputs."""
        rows = self.box_rows // int(self.constants.cluster_out)
        features = self.x_features or ()
        if not self.is_bsf:
            return (self.box_batch, *features), LINE
        return (*features, rows), self.span if self.span > CHUNK else 0

    @property
    def x_places(self) -> list[Place]:
        """Digits of the inputs that are dimensions of the map of X. A flat run is one, with all its j."""
        return [each for each in places_of(self.kernel.pattern.inputs) if not (self.is_flat and each.name == "j")]

    @property
    def x_features(self) -> tuple[int, ...] | None:
        """Features of the box of X, as its extents along `x_places`; None if they are not whole digits."""
        item_bytes, tile_d = self.kernel.x_item_bytes, int(self.constants.tile_d)
        if not self.is_bsf:
            counts = {"j": 1, "l": self.box_rows // int(self.constants.cluster_out), "i": 1}
        elif self.is_flat:
            counts = {"l": LINE // item_bytes, "i": 1}
        else:
            counts = {"j": tile_d, "l": self.panel_bytes // (item_bytes * tile_d), "i": 1}
        return extents_of(self.x_places, counts)

    # ---- shared memory, in bytes

    @property
    def x_bytes(self) -> int:
        constants = self.constants
        return int(constants.tile_batch * constants.tile_in * constants.tile_d) * self.kernel.x_item_bytes

    @property
    def step_bytes(self) -> int:
        """Bytes of operand B of one instruction."""
        return int(self.constants.tile_out) * 2 * CHUNK

    @property
    def w_bytes(self) -> int:
        """Bytes of one stage of packed weights: one operand for each j, step and component."""
        return int(self.constants.tile_d * (self.constants.tile_in // self.k_step)) * self.components * self.step_bytes

    @property
    def stage_bytes(self) -> int:
        return whole_periods(self.x_bytes + self.w_bytes)

    @property
    def y_bytes(self) -> int:
        """Bytes of shared memory in which Y waits for its store."""
        return 0

    @property
    def y_passed_bytes(self) -> int:
        """Bytes of a tile of Y that pass through shared memory."""
        return self.y_bytes

    @property
    def shared_bytes(self) -> int:
        barriers = 2 * 8 * int(self.constants.stages)
        return int(self.constants.stages) * self.stage_bytes + self.y_bytes + barriers

    @property
    def fits_registers(self) -> bool:
        """Whether the multiprocessor has all warpgroups' registers; otherwise setmaxnreg would wait forever."""
        copying, multiplying = REGISTERS[self.groups]
        most = min(MULTIPROCESSOR_REGISTERS, LAUNCHED[self.groups] * self.threads)
        return WARPGROUP * (copying + self.groups * multiplying) <= most

    # ---- costs measured on an H100

    @property
    def waits(self) -> float:
        """Least number of waits per stage in the cost model, even if many stages are in flight."""
        return 0.0

    @property
    def in_pieces(self) -> float:
        """Time that a store of Y takes in the L2 cache, relative to a store of whole sectors."""
        return 1

    @property
    def in_rows(self) -> float:
        """Time that a box of X takes in the L2 cache, relative to a box with rows of whole sectors."""
        return 1

    # ---- tensor maps

    def maps(self, batch: int) -> tuple[TensorMap, ...]:
        """Tensor maps of X, and of Y if boxes store it."""
        (a, _, c, d), inputs = self.kernel.pattern.shape, self.kernel.pattern.inputs
        item_bytes = self.kernel.x_item_bytes
        if inputs.is_exchanged or not self.is_flat:
            sizes, strides = feature_sizes(inputs, batch, self.is_bsf, item_bytes)
        else:  # the features of an i are one run
            sizes, strides = (c * d, a, batch), (c * d * item_bytes, a * c * d * item_bytes)
        return (TensorMap("x", item_bytes, sizes, strides, *self.x_map),)


def takes_rows(kernel: KernelSpec) -> bool:
    """Whether the rows of X begin at multiples of 16 bytes for every i, as tensor maps require in batch-size-first."""
    _, _, c, d = kernel.pattern.shape
    return c * d * kernel.x_item_bytes % MAP_ALIGNMENT == 0


def has_boxes(order: Order, is_bsf: bool, item_bytes: int) -> bool:
    """Whether a tensor map describes features in this order.

    Their digits are dimensions of an array. In batch-size-first, its rows are runs of features, of whole 16 bytes. In
    batch-size-last, they are rows of the batch.
    """
    if not order.is_exchanged:
        return True
    has_rows = not is_bsf or order.run * item_bytes % MAP_ALIGNMENT == 0
    return has_rows and len(places_of(order)) < MOST_DIMENSIONS


@cache
def places_of(order: Order) -> tuple[Place, ...]:
    """Digits of j, of l or k, and of i, each from the least significant one.

    If the order divides no index, an index of one value has a digit, too.
    """
    _, rows, d = order.sizes
    found: list[Place] = []
    for name, apart in zip(reversed(order.names), (1, d, rows * d), strict=True):
        usual = [] if order.is_divided else [order.term(Digit(name, 1, 1), apart)]
        found += sorted((each for each in order.places if each.name == name), key=lambda each: each.unit) or usual
    return tuple(found)


def extents_of(places: Sequence[Place], counts: Mapping[str, int]) -> tuple[int, ...] | None:
    """Extents of a box with so many neighbours of each index, along its digits; None if it has no whole digits."""
    left, found = dict(counts), list[int]()
    for place in places:
        count = left[place.name]
        found.append(extent := min(count, place.size) if place.is_part else count)
        if not extent or count % extent or (place.is_part and place.size % extent):
            return None
        left[place.name] = count // extent
    return tuple(found)


def deepest(family: Any, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> ConstantsT:
    """The same constants with as many stages as fit, for a default."""
    deeper = (constants.changed(stages=stages) for stages in range(MOST_STAGES, 1, -1))
    return next((each for each in deeper if family.fits(kernel, each, limits)), constants)


def whole_periods(size: int) -> int:
    return divide_up(size, SWIZZLE_PERIOD) * SWIZZLE_PERIOD


def feature_sizes(order: Order, batch: int, is_bsf: bool, item_bytes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes, and strides in bytes from dimension 1 on, of an array with the digits of j, l or k, and i as dimensions.

    A box over the end of any index reads zeros.
    """
    places = places_of(order)
    sizes, strides = [each.size for each in places], [each.features * item_bytes for each in places]
    if is_bsf:
        return (*sizes, batch), (*strides[1:], order.count * item_bytes)
    return (batch, *sizes), tuple(each * batch for each in strides)
