"""The gradient family for GPUs: the weights' gradient, by plain multiply-adds or on tensor cores.

Decides the tiles of `gradient.cu.j2` and `gradient_mma.cu.j2`; its design is docs/kernels/gradient.md. Never renders,
compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any, ClassVar

from ksgen.errors import ConstantsError
from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Constexpr, Geometry, Limits, Pass, Work, named
from ksgen.families.gpus import PORTABLE
from ksgen.families.gradient import mma, plain
from ksgen.families.gradient.mma import GradientMmaConstants, GradientMmaTiling
from ksgen.families.gradient.parts import SUM_COLUMNS, blocks_that_fit, fits, sides_of
from ksgen.families.gradient.plain import GradientConstants, GradientTiling
from ksgen.families.kinds import OfKinds
from ksgen.families.signature import GRADIENT
from ksgen.families.tiles import divide_up, pattern_constexprs
from ksgen.spec import KernelSpec

MOST_BLOCKS = 6  # per multiprocessor, that a search tries
LONE = 1.25  # factor by which the cost of a block may be worse if it shares its multiprocessor with another


class Gradient(OfKinds):
    """Weights' gradients, summed over the batch by multiply-adds on any device, or by warp-wide matrix instructions."""

    name = "gradient"
    signature = GRADIENT
    tilings: ClassVar[dict[Any, Any]] = {GradientMmaConstants: GradientMmaTiling, GradientConstants: GradientTiling}
    rules: Mapping[Any, Any] = {GradientConstants: plain.RULES, GradientMmaConstants: mma.RULES}

    def suits(self, tiling: Any, kernel: KernelSpec, limits: Limits) -> bool:
        return kernel.job == "gradient" and not kernel.epilogue.bias and bool(tiling.is_for(kernel, limits))

    # ---- constants

    def default_of(self, tiling: Any, kernel: KernelSpec, limits: Limits, batch: int | None) -> Any:
        """Tile with the least padding, operand reads and copies, and as many parts of the batch as fill the device.

        Two blocks share a multiprocessor, so that one multiplies while the other waits, unless a lone block is much
        better.
        """
        budget = replace(limits, shared_bytes=min(limits.shared_bytes, PORTABLE.shared_bytes))
        for tile_d in dict.fromkeys(tiling.planes(kernel)):
            choices = [tiling(kernel, constants) for constants in tiling.choices(kernel, tile_d, limits)]
            choices.sort(key=lambda choice: choice.cost())
            lone = next((choice for choice in choices if fits(choice, budget, 1)), None)
            if lone is None:
                continue
            pair = next((choice for choice in choices if fits(choice, budget, 2)), lone)
            chosen = pair if pair.cost() <= LONE * lone.cost() else lone
            most = 1 if limits.is_cpu else chosen.most_blocks  # processors have no launch bounds
            blocks = max(1, blocks_that_fit(chosen, budget, most))
            return replace(chosen.constants, parts=chosen.parts_for(limits), min_blocks=blocks)
        raise ConstantsError(
            f"{kernel.name}: no tile fits {budget.shared_bytes} bytes of shared memory and {limits.threads} threads"
        )

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[Any]:
        """Yield every combination that the rules, the shared memory and the registers allow.

        Each tile is tried with one block per multiprocessor, as many as fit, and half of these. It is tried with as
        many parts as fill the device, half and twice as many.
        """
        for tile in (each for tiling in self.able(kernel, limits) for each in tiling.tiles_of_search(kernel, limits)):
            if not self.keeps_rules(kernel, tile):
                continue
            tiling = self.shape(kernel, tile)
            most = blocks_that_fit(tiling, limits, MOST_BLOCKS)
            parts = tiling.parts_for(limits)
            counts = sorted({divide_up(parts, 2), parts, 2 * parts})
            for blocks, count in product(sorted({1, divide_up(most, 2), most} if most else ()), counts):
                constants = replace(tile, parts=count, min_blocks=blocks)
                if self.keeps_rules(kernel, constants):
                    yield constants

    # ---- launches

    def packed_bytes(self, kernel: KernelSpec, constants: Any) -> int:
        return self.shape(kernel, constants).part_bytes * constants.parts if constants.parts > 1 else 0

    def geometry(self, kernel: KernelSpec, constants: Any, batch: int) -> Geometry:
        tiling = self.shape(kernel, constants)
        parts = tiling.parts(batch)
        if parts == 1:
            return Geometry(tiling.tiles, tiling.threads, tiling.shared_bytes)
        after = (Pass("sum", self.pack_geometry(kernel, constants)),)
        return Geometry(
            tiling.tiles * parts, tiling.threads, tiling.shared_bytes, parts * tiling.part_bytes, after=after
        )

    def pack_geometry(self, kernel: KernelSpec, constants: Any) -> Geometry:
        tiling = self.shape(kernel, constants)
        return Geometry(
            tiling.tiles * tiling.tile_weights // SUM_COLUMNS,
            tiling.sum_threads,
            tiling.sum_threads * tiling.real_bytes,
        )

    def work(self, kernel: KernelSpec, constants: Any, batch: int) -> Work:
        tiling = self.shape(kernel, constants)
        geometry = self.geometry(kernel, constants, batch)
        steps = tiling.tiles * divide_up(batch, constants.tile_batch)
        shared = steps * tiling.step_shared_bytes
        return Work(
            geometry.grid,
            kernel.bytes(batch),
            round(tiling.read_bytes_moved(batch) + tiling.sum_bytes_moved(batch)),
            shared,
            steps * constants.tile_batch * tiling.tile_weights * tiling.products,
            steps / (1 if tiling.copy == "registers" else int(tiling.constants.stages) - 1),
            returned_bytes=steps * tiling.step_shared_cycles * CYCLE_BYTES - shared,
            stages=steps,
            synchronous=steps if tiling.copy == "registers" else 0,
        )

    # ---- the source

    def variables(self, kernel: KernelSpec, constants: Any) -> dict[str, Any]:
        tiling = self.shape(kernel, constants)
        return {**tiling.own_variables(), "sides": sides_of(kernel), "picture": tiling.picture}

    def constexprs(self, kernel: KernelSpec, constants: Any) -> list[Constexpr]:
        tiling = self.shape(kernel, constants)
        return [
            *pattern_constexprs(kernel),
            named(constants, "TILE_OUT", "outputs k per thread block, for each of its j"),
            named(constants, "TILE_IN", "inputs l per thread block"),
            named(constants, "TILE_D", "neighbouring j per thread block: one plane of shared memory each"),
            named(constants, "TILE_BATCH", "rows of the batch per stage"),
            named(constants, "STAGES", "stages of X and dY in shared memory"),
            named(constants, "PARTS", "parts of the batch, at most"),
            named(constants, "MIN_BLOCKS", "thread blocks that must fit on a multiprocessor: bounds the registers"),
            *tiling.own_constexprs(),
            named(tiling, "THREADS", "threads per block"),
            named(tiling.x, "TOGETHER", "neighbouring lines that a thread copies at once"),
            named(tiling, "DY_BASE", "offset of a stage's dY, in elements"),
            named(tiling, "STAGE", "elements per stage"),
            *tiling.tile_constexprs(),
            *tiling.x.constexprs(tiling.copy),
            *tiling.dy.constexprs(tiling.copy),
        ]
