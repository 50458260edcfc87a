"""Shared parts of the tilings of gradients: tiles of weights, parts of the batch that are summed separately, and
copies of operands."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import Any, ClassVar

from ksgen.families.banks import Image, line_cycles, write_cycles
from ksgen.families.base import Constexpr, Limits, named
from ksgen.families.tiles import WARP, CopyPlan, Tiled, divide_up, power_of_two_in
from ksgen.families.traffic import SECTOR, array_bytes, bytes_of_row
from ksgen.spec import KernelSpec
from ksgen.values import counted

LEAST_BATCH = 64  # fewest rows of the batch per part, except the last one; shorter parts do not pay
SUM_COLUMNS, SUM_ROWS = 32, 8  # weights per block of the second entry, and threads that share the parts of one weight
CPU_BLOCKS = 16  # blocks that keep a processor busy
GPU_WARPS = 16 * 132  # warps that keep a large GPU busy: sixteen per multiprocessor
MOST_TILE = 128  # weights along one side of a tile


def sides_of(kernel: KernelSpec) -> list[dict[str, Any]]:
    """Names of both operands in the source, and the orders of their features."""
    inputs, outputs = kernel.pattern.inputs, kernel.pattern.outputs
    sides = (("x", "C", "TILE_IN", "first_in", inputs), ("dy", "B", "TILE_OUT", "first_out", outputs))
    return [
        {
            "name": name, "NAME": name.upper(), "features": features, "tile": tile, "first": first,
            "order": order, "is_exchanged": order.is_exchanged,
        }
        for name, features, tile, first, order in sides
    ]  # fmt: skip


@dataclass(frozen=True)
class SideImage:
    """Layout of one operand's tile in shared memory: element (j, s, feature) is at j * plane + s * next_row + feature
    * next_feature. `lane_run` lanes copy a line."""

    next_row: int
    next_feature: int
    plane: int
    lane_run: int


def lane_runs(run: int, vector: int, item_bytes: int) -> list[int]:
    """Numbers of lanes that may copy a line together, the largest first.

    They copy at least a memory sector at once. If a line is shorter, only the largest number remains.
    """
    found = sorted({power_of_two_in(run // vector, most) for most in (2, 4, 8, 16, 32)}, reverse=True)
    return [lanes for lanes in found if lanes * vector * item_bytes >= SECTOR] or found[:1]


@dataclass(frozen=True)
class Side:
    """One operand: X, or the gradient of Y."""

    name: str
    image: SideImage
    plan: CopyPlan
    held: int  # elements that a thread holds while they are copied, if copies pass through registers
    together: int = 1  # neighbouring lines that a thread copies at once

    def constexprs(self, copy: str) -> Iterator[Constexpr]:
        name, plan = self.name.upper(), self.plan
        yield Constexpr(f"{name}_NEXT_ROW", self.image.next_row, "elements from one row of the batch to the next")
        yield Constexpr(f"{name}_NEXT_FEATURE", self.image.next_feature, "elements from one feature to the next")
        yield Constexpr(f"{name}_PLANE", self.image.plane, "elements from one plane to the next")
        yield Constexpr(f"{name}_LINES", plan.lines * self.together, "lines of the tile")
        yield Constexpr(f"{name}_VECTOR", plan.vector, "contiguous elements that one copy moves")
        yield from plan.constexprs(name, "; TOGETHER lines count as one")
        if copy == "registers":
            yield Constexpr(f"{name}_HELD", self.held, "elements or words that a thread holds while they are copied")


class Parts(Tiled):
    """Tiles of weights. Each is summed over several parts of the batch, from stages of both operands."""

    kernel: KernelSpec
    most_blocks: ClassVar[int]  # per multiprocessor, in a default

    @property
    def registers(self) -> int:
        """Estimated registers per thread."""
        raise NotImplementedError

    @property
    def shared_bytes(self) -> int:
        raise NotImplementedError

    def side(self, name: str, features: int, tile: int) -> Side:
        raise NotImplementedError

    def run_of(self, name: str) -> int:
        """Length of the runs of an operand's features that are contiguous in memory."""
        pattern = self.kernel.pattern
        return (pattern.inputs if name == "x" else pattern.outputs).run

    @property
    def copy(self) -> str:
        """Path of the copies of stages: "async", or through "registers"."""
        raise NotImplementedError

    @property
    def x(self) -> Side:
        return self.side("x", self.kernel.pattern.c, self.constants.tile_in)

    @property
    def dy(self) -> Side:
        return self.side("dy", self.kernel.pattern.b, self.constants.tile_out)

    @property
    def dy_base(self) -> int:
        """Offset of a stage's dY, which follows X, in elements."""
        return int(self.constants.tile_d * self.x.image.plane)

    @property
    def stage(self) -> int:
        """Elements per stage."""
        return self.dy_base + int(self.constants.tile_d * self.dy.image.plane)

    @property
    def sum_threads(self) -> int:
        """Threads per block of the second entry."""
        return SUM_COLUMNS * SUM_ROWS

    @property
    def tiles_in(self) -> int:
        return divide_up(self.kernel.pattern.c, self.constants.tile_in)

    @property
    def tiles(self) -> int:
        return self.kernel.pattern.a * self.tiles_d * self.tiles_out * self.tiles_in

    @property
    def tile_weights(self) -> int:
        """Sums per tile, including those beyond ragged edges."""
        return int(self.constants.tile_d * self.constants.tile_out * self.constants.tile_in)

    @property
    def part_bytes(self) -> int:
        """Bytes of the sums of one part of the batch."""
        return self.tiles * self.tile_weights * self.real_bytes

    @property
    def least_steps(self) -> int:
        """Fewest steps per part, except the last one, which has the rest."""
        return divide_up(LEAST_BATCH, self.constants.tile_batch)

    def parts_for(self, limits: Limits) -> int:
        """Parts that fill the device.

        On a GPU, several parts have fewer than twice `GPU_WARPS` warps in all, whose sums take under 40 MB.
        """
        return divide_up(CPU_BLOCKS, self.tiles) if limits.is_cpu else divide_up(GPU_WARPS, self.tiles * self.warps)

    def part_steps(self, batch: int) -> int:
        """Steps per part, as `part_steps` in the source counts them."""
        steps = divide_up(batch, self.constants.tile_batch)
        return divide_up(steps, max(1, min(self.constants.parts, steps // self.least_steps)))

    def parts(self, batch: int) -> int:
        return divide_up(divide_up(batch, self.constants.tile_batch), self.part_steps(batch))

    # ---- costs

    @property
    def padding(self) -> float:
        """Sums per weight: more than one if tiles reach beyond the ragged edges."""
        (_, b, c, _), constants = self.kernel.pattern.shape, self.constants
        return float(self.tiles_out * constants.tile_out / b * self.tiles_in * constants.tile_in / c)

    @property
    def kept_bytes(self) -> int:
        """Bytes of one element in shared memory."""
        raise NotImplementedError

    @property
    def chunk(self) -> int:
        """Elements of a chunk of rows of the batch, if the order of chunks depends on the feature; 0 if it does not."""
        return 0

    def write_cycles(self, side: Side) -> int:
        """Shared-memory cycles in which a block writes one operand of a stage.

        Neighbours of a run are written together if they are contiguous in shared memory.
        """
        layout, plan = side.image, side.plan
        if self.is_bsf:
            image = Image(
                self.constants.tile_d, layout.plane, layout.next_row * side.together, layout.next_feature,
                self.kept_bytes, self.chunk,
            )  # fmt: skip
        else:
            image = Image(1, 0, layout.next_feature, layout.next_row, self.kept_bytes)
        wide = plan.vector if image.planes == image.next_run == 1 else 1
        size = wide * side.together * self.kept_bytes
        lines = [step * plan.lane_lines if image.chunk else 0 for step in range(plan.warp_steps)]
        return sum(
            line_cycles(write_cycles, image, plan.lane_run, plan.vector, size, plan.run, wide, line) for line in lines
        )

    def read_bytes_moved(self, batch: int) -> float:
        """Bytes of X and dY that all blocks read, one block per tile and part."""
        constants, (_, b, c, _) = self.constants, self.kernel.pattern.shape
        part_batch = self.part_steps(batch) * constants.tile_batch
        tile = constants.tile_in, constants.tile_d, batch, part_batch
        x = array_bytes(self.kernel, c, *tile, self.kernel.item_bytes, self.kernel.pattern.inputs)
        tile = constants.tile_out, constants.tile_d, batch, part_batch
        dy = array_bytes(self.kernel, b, *tile, self.kernel.item_bytes, self.kernel.pattern.outputs)
        return self.tiles_out * x + self.tiles_in * dy

    def sum_bytes_moved(self, batch: int) -> float:
        """Bytes of the weights' gradient, and of the partial sums, which parts write and the second entry reads."""
        constants, (a, b, c, d) = self.constants, self.kernel.pattern.shape
        parts = self.parts(batch)
        if parts == 1:
            return a * b * bytes_of_row(c, d, constants.tile_in, constants.tile_d, self.kernel.item_bytes)
        return 2 * parts * self.part_bytes + a * b * bytes_of_row(
            c, d, gcd(constants.tile_in, SUM_COLUMNS), 1, self.kernel.item_bytes
        )

    def tile_constexprs(self) -> list[Constexpr]:
        """Constants that the shared parts of the templates use."""
        return [
            named(self, "LEAST_STEPS", "fewest stages per part, except the last one"),
            named(self, "TILES_OUT", "tiles along the outputs"),
            named(self, "TILES_IN", "tiles along the inputs"),
            named(self, "TILES_D", "tiles along j"),
            named(self, "TILE_WEIGHTS", "sums of a tile, those beyond ragged edges included"),
            Constexpr("SUM_COLUMNS", SUM_COLUMNS, "weights per block of the second entry"),
            Constexpr("SUM_ROWS", SUM_ROWS, "threads that share the parts of one weight"),
        ]


def registers_taken(registers: int, threads: int, blocks: int) -> int:
    """Registers of a multiprocessor that `blocks` blocks take; they are allocated to four warps at a time."""
    return registers * WARP * 4 * divide_up(divide_up(threads, WARP) * blocks, 4)


def fits(tiling: Parts, limits: Limits, blocks: int) -> bool:
    """Whether `blocks` blocks fit a multiprocessor."""
    if tiling.threads > limits.threads or tiling.shared_bytes > limits.shared_bytes_for(blocks):
        return False
    return not limits.registers or registers_taken(tiling.registers, tiling.threads, blocks) <= limits.registers


def blocks_that_fit(tiling: Parts, limits: Limits, most: int) -> int:
    """Blocks, at most so many, that fit a multiprocessor."""
    return max((count for count in range(1, most + 1) if fits(tiling, limits, count)), default=0)


def heading(tiling: Parts) -> str:
    """Heading of the drawing of a tile."""
    of_its_j = f", for one of its {tiling.constants.tile_d} j" if tiling.constants.tile_d > 1 else ""
    return f"A tile of dW{of_its_j}; {counted(tiling.tiles, 'tile')} in all. Each part of the batch has its own sums."
