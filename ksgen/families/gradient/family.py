"""Answers that gradient families have in common, derived from their shapes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Protocol, TypeVar

from ksgen.families.banks import CYCLE_BYTES
from ksgen.families.base import Geometry, Limits, Pass, Work
from ksgen.families.gradient.parts import SUM_COLUMNS
from ksgen.families.shaped import Shaped
from ksgen.families.signature import GRADIENT
from ksgen.families.tiles import WARP, divide_up
from ksgen.spec import KernelSpec

MOST_BLOCKS = 6  # a multiprocessor, that a search tries

ConstantsT = TypeVar("ConstantsT")


class GradientShape(Protocol):
    """Sizes of a gradient's shape that this module reads."""

    @property
    def threads(self) -> int: ...
    @property
    def registers(self) -> int: ...
    @property
    def shared_bytes(self) -> int: ...
    @property
    def tiles(self) -> int: ...
    @property
    def tile_weights(self) -> int: ...
    @property
    def part_bytes(self) -> int: ...
    @property
    def real_bytes(self) -> int: ...
    @property
    def sum_threads(self) -> int: ...
    @property
    def products(self) -> int: ...
    @property
    def step_shared_bytes(self) -> int: ...
    @property
    def step_shared_cycles(self) -> int: ...
    @property
    def stages_ahead(self) -> int: ...
    @property
    def copy(self) -> str: ...
    def read_bytes_moved(self, batch: int) -> float: ...
    def sum_bytes_moved(self, batch: int) -> float: ...
    def parts(self, batch: int) -> int: ...


class GradientFamily(Shaped[ConstantsT]):
    """Base of gradient families: launches and costs. Subclasses choose constants and rules."""

    signature = GRADIENT

    def shape(self, kernel: KernelSpec, constants: ConstantsT) -> GradientShape:
        raise NotImplementedError

    def packed_bytes(self, kernel: KernelSpec, constants: Any) -> int:
        return self.shape(kernel, constants).part_bytes * constants.parts if constants.parts > 1 else 0

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        shape = self.shape(kernel, constants)
        parts = shape.parts(batch)
        if parts == 1:
            return Geometry(shape.tiles, shape.threads, shape.shared_bytes)
        after = (Pass("sum", self.pack_geometry(kernel, constants)),)
        return Geometry(shape.tiles * parts, shape.threads, shape.shared_bytes, parts * shape.part_bytes, after=after)

    def pack_geometry(self, kernel: KernelSpec, constants: ConstantsT) -> Geometry:
        shape = self.shape(kernel, constants)
        return Geometry(shape.tiles * shape.tile_weights // SUM_COLUMNS, shape.sum_threads, shape.sum_threads * shape.real_bytes)

    def work(self, kernel: KernelSpec, constants: Any, batch: int) -> Work:
        shape = self.shape(kernel, constants)
        geometry = self.geometry(kernel, constants, batch)
        steps = shape.tiles * divide_up(batch, constants.tile_batch)
        shared = steps * shape.step_shared_bytes
        return Work(
            geometry.grid,
            kernel.bytes(batch),
            round(shape.read_bytes_moved(batch) + shape.sum_bytes_moved(batch)),
            shared,
            steps * constants.tile_batch * shape.tile_weights * shape.products,
            steps / shape.stages_ahead,
            returned_bytes=steps * shape.step_shared_cycles * CYCLE_BYTES - shared,
            stages=steps,
            synchronous=steps if shape.copy == "registers" else 0,
        )


def registers_taken(registers: int, threads: int, blocks: int) -> int:
    """Registers of a multiprocessor that so many blocks take; it allocates them to four warps at a time."""
    return registers * WARP * 4 * divide_up(divide_up(threads, WARP) * blocks, 4)


def fits(shape: GradientShape, limits: Limits, blocks: int) -> bool:
    """Whether so many blocks fit a multiprocessor."""
    if shape.threads > limits.threads or shape.shared_bytes > limits.shared_bytes_for(blocks):
        return False
    return not limits.registers or registers_taken(shape.registers, shape.threads, blocks) <= limits.registers


def choices(constants: Any, shape: GradientShape, limits: Limits, parts: int) -> Iterator[Any]:
    """Yield the constants with one block per multiprocessor, as many as fit, and half of them.

    Each comes with as many parts as fill the device, half and twice as many.
    """
    most = max((blocks for blocks in range(1, MOST_BLOCKS + 1) if fits(shape, limits, blocks)), default=0)
    counts = sorted({divide_up(parts, 2), parts, 2 * parts})
    for blocks, count in product(sorted({1, divide_up(most, 2), most} if most else ()), counts):
        yield replace(constants, parts=count, min_blocks=blocks)
