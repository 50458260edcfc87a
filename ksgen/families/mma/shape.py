"""Constants of a tensor-core kernel, their rules, and the sizes derived from them: pitches, elements of each lane.

Packed weights are operand A (rows: outputs), X is operand B (columns: rows of the batch). Each lane reads X from shared
memory in 16-byte chunks. The orders of inputs and outputs inside a tile make these chunks its fragment, directly or
after one byte permutation. Packed weights take any order at no cost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import gcd
from typing import ClassVar

from ksgen.families.banks import CYCLE_BYTES, copy_cycles
from ksgen.families.gpu_chain import rules_of_blocks
from ksgen.families.operands import (
    CHUNK,
    CHUNKS_AT_ONCE,
    FREE_OF_CONFLICTS,
    TensorTile,
    has_products,
    multiplies_bytes,
    tensor_operand,
    wavefronts,
)
from ksgen.families.rules import Rule, at_most, multiple, positive
from ksgen.families.tiles import MOST_THREADS, WARP, Constants, divide_up
from ksgen.spec import KernelSpec
from ksgen.spec.precision import on_tensor_cores
from ksgen.values import cached_property

ROWS, COLUMNS = 16, 8  # outputs and rows of the batch of one matrix instruction
LEAST_COPIED = 4  # bytes of the smallest asynchronous copy
ELEMENTS_AT_ONCE = 8  # single elements of exchanged inputs that a thread loads before it stores them


@dataclass(frozen=True)
class MmaConstants(Constants):
    """Constants that a search may change."""

    on_tensor_cores: ClassVar[bool] = True

    tile_batch: int  # rows of the batch per block
    tile_out: int  # outputs k per block, for each of its j
    tile_in: int  # inputs l per stage
    tile_d: int  # neighbouring j per block (1 in bsl)
    warps_batch: int  # warps along the batch
    warps_out: int  # warps along the outputs
    stages: int  # stages of X and W in shared memory; of W alone if X is resident
    promote: int  # inputs after which tensor-core sums are added to plain ones; 0: never
    min_blocks: int  # blocks that must fit on a multiprocessor: bounds the registers
    warps_d: int = 1  # warps along j, with 16 bytes of j each; 1: each warp has all j of the tile
    # 1: X stays in shared memory for all outputs of a block; 0: it is read again for each tile of outputs
    resident: int = 0


@cache
def _wavefronts(pitch: int, strides: tuple[int, int, int]) -> int:
    """Passes of shared memory in which a warp reads the lanes' first chunks of X."""
    lines_g, lines_t, step = strides
    lanes = [(lane // 4, lane % 4) for lane in range(WARP)]
    if lines_g:
        return wavefronts([g * lines_g * pitch + t * step for g, t in lanes])
    return wavefronts([t * lines_t * pitch + (g % 2 * 4 + g // 2) * step for g, t in lanes])


@cache
def padded_chunks(chunks: int, strides: tuple[int, int, int]) -> int:
    """Chunks per line, including the least padding with which lanes have the fewest bank conflicts."""
    return min(range(chunks, chunks + CHUNKS_AT_ONCE), key=lambda padded: _wavefronts(CHUNK * padded, strides))


@cache
def copy_slowdown(pitch: int, run_bytes: int, piece: int) -> float:
    """Shared-memory cycles of copies of `piece` bytes along lines of `run_bytes`, relative to 128 bytes per cycle."""

    def place(number: int) -> int:
        line, at = divmod(number * piece, run_bytes)
        return line * pitch + at

    return copy_cycles(place, WARP * run_bytes // piece, piece) * CYCLE_BYTES / (WARP * run_bytes)


@dataclass(frozen=True)
class MmaTiling(TensorTile):
    """Sizes derived from a kernel and its constants."""

    kernel: KernelSpec
    constants: MmaConstants

    # ---- warps

    @cached_property
    def threads(self) -> int:
        return WARP * self.constants.warps_batch * self.constants.warps_out * self.constants.warps_d

    @cached_property
    def warp_d(self) -> int:
        return self.constants.tile_d // self.constants.warps_d

    @property
    def warp_out(self) -> int:
        return self.constants.tile_out // self.constants.warps_out

    @cached_property
    def row_tiles(self) -> int:
        """Instructions of a warp along the outputs."""
        return self.warp_out // ROWS

    @cached_property
    def column_tiles(self) -> int:
        """Instructions of a warp along the batch."""
        return (self.constants.tile_batch // self.constants.warps_batch) // COLUMNS

    @cached_property
    def sums(self) -> int:
        """Accumulators per thread, without the plain ones to which they are promoted."""
        return 4 * self.reals_per_number * self.warp_d * self.row_tiles * self.column_tiles

    @property
    def promoted_sums(self) -> int:
        return self.sums * (2 if self.constants.promote else 1)

    # ---- how a lane reads X

    @property
    def x_lines(self) -> int:
        return self.constants.tile_batch if self.is_bsf else self.constants.tile_in

    @property
    def x_run(self) -> int:
        """Elements per line of the X tile."""
        return self.constants.tile_in * self.constants.tile_d if self.is_bsf else self.constants.tile_batch

    @property
    def x_strides(self) -> tuple[int, int, int]:
        """Distances between the reads of X by lanes 4g + t: lines per g, lines per t, and bytes per g or t."""
        if self.is_bsf:
            return 1, 0, self.group_chunks * self.constants.warps_d * CHUNK
        return 0, 1, CHUNK

    @cached_property
    def x_pitch(self) -> int:
        """Bytes from one line to the next: the least pitch with the fewest bank conflicts."""
        stages = self.steps if self.constants.resident else 1
        return CHUNK * padded_chunks(stages * self.x_run * self.kernel.x_item_bytes // CHUNK, self.x_strides)

    # ---- which output a lane's sums belong to

    @property
    def run_out(self) -> int:
        """Neighbouring outputs per lane: enough for whole chunks of Y, if the lane has that many outputs."""
        return gcd(self.group_inputs, 2 * self.row_tiles)

    # ---- global memory

    @property
    def x_vector(self) -> int:
        """Neighbours that one copy of X moves, if pointers, pitches and, in bsl, the batch allow it."""
        pattern = self.kernel.pattern
        return gcd(self.vector, self.whole_run(pattern.c), pattern.inputs.run) if self.is_bsf else self.vector

    @property
    def wide_bytes(self) -> int:
        """Bytes that one copy of X moves."""
        return self.x_vector * self.kernel.x_item_bytes

    @property
    def has_wide_copies(self) -> bool:
        """Whether asynchronous copies can move that many bytes."""
        return self.wide_bytes >= LEAST_COPIED

    @property
    def copied_bytes(self) -> int:
        """Bytes of a wide copy as its function's name has them. If no copy is wide, a placeholder that compiles."""
        return self.wide_bytes if self.has_wide_copies else CHUNK

    @property
    def are_elements_apart(self) -> bool:
        """Whether exchanged inputs have no neighbours, so that they are copied one by one."""
        return self.kernel.reads_exchanged and not self.has_wide_copies

    @property
    def are_lines_apart(self) -> bool:
        """Whether exchanged inputs put lines of X at no constant distance."""
        return self.kernel.reads_exchanged and not self.is_bsf

    @property
    def elements_at_once(self) -> int:
        """Single elements of X that a thread has in flight: several if they are apart."""
        return ELEMENTS_AT_ONCE if self.are_elements_apart else 1

    @property
    def y_vector(self) -> int:
        """Contiguous elements that one store of Y moves, if pointers, pitches and, in bsl, the batch allow it."""
        chunk, pattern = CHUNK // self.kernel.item_bytes, self.kernel.pattern
        whole = self.whole_run(gcd(pattern.b, self.run_out))
        return gcd(chunk, whole, pattern.outputs.run) if self.is_bsf else chunk

    # ---- shared memory, in bytes

    @cached_property
    def x_bytes(self) -> int:
        """Bytes of one stage of X, or of all its stages if X is resident."""
        return self.x_lines * self.x_pitch

    @property
    def x_stage(self) -> int:
        """Bytes from one stage of X to the next; if X is resident, stages are parts of the same lines."""
        return self.x_run * self.kernel.x_item_bytes if self.constants.resident else self.x_bytes

    @property
    def w_base(self) -> int:
        return self.x_bytes * (1 if self.constants.resident else self.constants.stages)

    @cached_property
    def packed_parts(self) -> int:
        """Parts in which weights are packed; 1 if parts take more bytes than the weights, which lanes then split."""
        bytes_of_parts = self.components * tensor_operand(self.kernel).item_bytes
        return self.components if bytes_of_parts <= self.kernel.item_bytes else 1

    @property
    def widens_bytes(self) -> bool:
        """Whether X in eight bits is widened and multiplied as float16 on every target.

        This is so if Y is float32, because tensor cores keep fewer bits of sums of eight-bit products.
        """
        return self.kernel.has_bytes_in and self.kernel.item_bytes == 4

    @cached_property
    def w_bytes(self) -> int:
        """Bytes of one stage of packed weights: four words per lane for each j, step, part and 16 outputs."""
        per_step = self.packed_parts * (self.constants.tile_out // ROWS) * WARP * CHUNK
        return self.constants.tile_d * (self.constants.tile_in // self.k_step) * per_step

    @cached_property
    def shared_bytes(self) -> int:
        return self.w_base + self.constants.stages * self.w_bytes

    # ---- tiles

    @property
    def passes(self) -> int:
        """Tiles of outputs that one block computes sequentially."""
        return self.tiles_out if self.constants.resident else 1

    @cached_property
    def slots(self) -> int:
        """Inputs of all tiles, including those beyond ragged edges."""
        constants = self.constants
        return self.kernel.pattern.a * self.tiles_d * self.steps * constants.tile_in * constants.tile_d

    @property
    def readings(self) -> int:
        """Number of times that a block copies each of its inputs."""
        return self.tiles_out // self.passes

    @property
    def written_bytes(self) -> int:
        """Bytes of inputs that are written to shared memory for a tile of the batch, without the padding of lines."""
        return self.constants.tile_batch * self.slots * self.kernel.x_item_bytes * self.readings

    @property
    def wasted_bytes(self) -> int:
        """Bandwidth of shared memory, in bytes, that copies of exchanged inputs waste for a tile of the batch."""
        if not self.kernel.reads_exchanged:  # the model was fitted to times of kernels without exchanges
            return 0
        size = self.kernel.x_item_bytes
        piece = self.wide_bytes if self.has_wide_copies else size
        return round(self.written_bytes * (copy_slowdown(self.x_pitch, self.x_run * size, piece) - 1))

    @property
    def read_bytes(self) -> int:
        """Bytes of shared memory that a block's warps read per stage: each its own part of X and of the weights."""
        constants = self.constants
        x_bytes = constants.tile_batch * constants.tile_in * constants.tile_d * self.kernel.x_item_bytes
        return x_bytes * constants.warps_out + self.w_bytes * constants.warps_batch

    @cached_property
    def multiply_adds(self) -> int:
        """Multiply-adds for a tile of the batch, including those of padding."""
        constants = self.constants
        tile = constants.tile_in * constants.tile_batch * constants.tile_out * constants.tile_d
        return self.tiles_of_batch * self.steps * tile

    @property
    def copying(self) -> Sequence["MmaTiling"]:
        """Factors that copy X from memory."""
        return [self]

    @property
    def waits(self) -> float:
        """Waits for the stages of a tile of the batch; stages in flight together count as one wait."""
        return self.tiles_of_batch * self.steps / (self.constants.stages - 1)

    def grid(self, batch: int) -> int:
        return super().grid(batch) // self.passes

    @cached_property
    def registers(self) -> int:
        """Estimated registers per thread: sums, fragments of X and their chunks, addresses, a residual read early."""
        fragments = 2 * self.components * self.warp_d * self.super_steps * self.column_tiles
        chunks = 4 * self.group_chunks * self.super_groups if self.is_bsf else 4 * self.word_inputs
        is_halved = self.components > 1 and tensor_operand(self.kernel).item_bytes < self.kernel.item_bytes
        copies = self.components + is_halved  # float16: upper parts are widened again, to compute the lower ones
        if self.kernel.has_bytes_in:  # widened sequentially before they are multiplied, if no instruction takes them
            fragments += 8
        addresses = (48 if self.is_bsf else 36) + self.elements_at_once - 1
        operands = fragments + chunks * copies + 4 * self.components
        return self.promoted_sums + operands + addresses + self.residual_registers

    @cached_property
    def residual_registers(self) -> int:
        runs = 2 * self.column_tiles // (1 if self.is_bsf else self.y_vector)
        return runs * divide_up(self.y_vector * self.kernel.item_bytes, 4) if self.kernel.epilogue.residual else 0


MOST_SUMS = 192  # accumulators per thread that leave registers for fragments


def _plane_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    tile_d, d = constants.tile_d, kernel.pattern.d
    has_chunks = tile_d < d and tile_d % MmaTiling.of(kernel, constants).vector == 0
    return kernel.layout == "bsl" or tile_d == d or has_chunks


def _batch_unit(kernel: KernelSpec, constants: MmaConstants) -> int:
    """Number of rows of the batch of which `tile_batch` must be a multiple."""
    at_once = 1 if kernel.layout == "bsf" else MmaTiling.of(kernel, constants).vector
    return constants.warps_batch * COLUMNS * at_once


def _resident_rule(kernel: KernelSpec, constants: MmaConstants) -> bool:
    has_passes = kernel.layout == "bsf" and constants.tile_out < kernel.pattern.b
    return constants.resident == 0 or (has_passes and constants.resident == 1)


RULES: tuple[Rule[MmaConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule(
        "precision is one that tensor cores multiply",
        lambda k, c: k.has_bytes_in or has_products(k),
        lambda k, c: ", ".join(on_tensor_cores()),
    ),
    Rule("X is not in eight bits, or is in an eight-bit float", lambda k, c: not k.has_bytes_in or multiplies_bytes(k)),
    positive("every constant but promote and resident is at least 1", "promote", "resident"),
    Rule("tile_d is 1 in bsl", lambda k, c: k.layout == "bsf" or c.tile_d == 1),
    Rule("tile_d is d, or less and a multiple of 16 bytes", _plane_rule),
    Rule("tile_d is at most 16 for each of warps_d", lambda k, c: c.tile_d <= 16 * c.warps_d),
    Rule(
        "warps_d is 1, or each warp has 16 bytes of the tile's j",
        lambda k, c: c.warps_d in (1, c.tile_d / MmaTiling.of(k, c).vector),
    ),
    Rule("resident is 0, or 1 in bsf with tile_out less than b", _resident_rule),
    multiple("tile_out", "16 * warps_out", lambda k, c: ROWS * c.warps_out),
    multiple("tile_batch", "8 * warps_batch (in bsl of as many 16-byte chunks)", _batch_unit),
    multiple("tile_in", "the period of the lanes' order of inputs", lambda k, c: MmaTiling.of(k, c).super_in),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: MmaTiling.of(k, c).threads),
    at_most("a thread has at most 192 sums", MOST_SUMS, lambda k, c: MmaTiling.of(k, c).promoted_sums),
    *rules_of_blocks(MmaTiling.of),
    Rule("promote is 0, or a multiple of tile_in", lambda k, c: c.promote >= 0 and c.promote % c.tile_in == 0),
    Rule(
        "X is read from shared memory with no bank conflicts",
        lambda k, c: _wavefronts((x := MmaTiling.of(k, c)).x_pitch, x.x_strides) == FREE_OF_CONFLICTS,
    ),
)
