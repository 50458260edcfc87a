"""The SIMT gradient's constants before any search: by rule, for a GPU and for a processor."""

from dataclasses import replace

from ksgen.errors import ConstantsError
from ksgen.families.base import Limits
from ksgen.families.gradient.shape import LANES_IN, LANES_OUT, GradientConstants, Shape
from ksgen.families.simt.defaults import neighbours
from ksgen.families.simt.shape import is_sixteen_bit
from ksgen.families.tiles import divide_up
from ksgen.spec import KernelSpec

GPU_BLOCKS, CPU_BLOCKS = 528, 16  # that keep a device busy: four on each of 132 multiprocessors
MOST_PART_BYTES = 64 * 2**20  # of all partial sums


def tile(size: int, lanes: int, most: int, threads: tuple[int, ...]) -> tuple[int, int]:
    """(tile, thread) along one side: the least padding and loads of operands counted; then the widest tile."""
    choices = [(lanes * thread * warps, thread) for thread in threads for warps in (1, 2, 3, 4)]

    def work(choice: tuple[int, int]) -> tuple[float, ...]:
        wide, thread = choice
        return (divide_up(size, wide) * wide * (1 + 2 / thread), -wide, -thread)

    return min((choice for choice in choices if choice[0] <= most), key=work)


def default(kernel: KernelSpec, limits: Limits) -> GradientConstants:
    """Square threads; tiles as wide as the registers of a block allow, since both operands are read once for each tile of the
    other; and as many parts of the batch as fill the device."""
    pattern = kernel.pattern
    copy = "registers" if is_sixteen_bit(kernel) or not limits.async_copies else "async"
    lean = limits.is_cpu or kernel.precision == "float64"  # fewer sums a thread
    tile_d = 1 if kernel.layout == "bsl" else neighbours(pattern.d)
    warps = 4 if tile_d == 1 else max(1, 8 // tile_d)  # of a plane
    tile_out, thread_out = tile(pattern.b, LANES_OUT, 128 if warps >= 4 else 64 if warps >= 2 else 32, (1, 2, 4, 8))
    left = max(1, warps // (tile_out // (LANES_OUT * thread_out)))
    tile_in, thread_in = tile(pattern.c, LANES_IN, 64 * left, (1, 2, 4) if lean else (1, 2, 4, 8))
    stages = 3 if copy == "async" else 2
    chosen = GradientConstants(tile_out, tile_in, tile_d, 8 if tile_d > 4 else 16, thread_out, thread_in, stages, 1, 1, copy)
    return replace(chosen, parts=parts(kernel, chosen, limits), min_blocks=blocks(kernel, chosen, limits))


def parts(kernel: KernelSpec, constants: GradientConstants, limits: Limits) -> int:
    """Parts of the batch that fill the device, as long as their sums stay small."""
    shape = Shape(kernel, constants)
    wanted = divide_up(CPU_BLOCKS if limits.is_cpu else GPU_BLOCKS, shape.tiles)
    return max(1, min(wanted, MOST_PART_BYTES // shape.part_bytes))


def blocks(kernel: KernelSpec, constants: GradientConstants, limits: Limits) -> int:
    """Blocks a multiprocessor, as many as the registers allow, so that one multiplies while another waits."""
    shape = Shape(kernel, constants)
    return max(1, min(4, limits.registers // (shape.registers * shape.threads)))


def smaller(kernel: KernelSpec, constants: GradientConstants, budget: int) -> GradientConstants:
    """The same with one thing less of what takes shared memory and threads; the smallest tile there is fits every device."""
    shape = Shape(kernel, constants)
    if constants.stages > 2:
        return replace(constants, stages=2)
    if constants.tile_batch > 8:
        return replace(constants, tile_batch=8)
    if shape.warps_in > 1:
        return replace(constants, tile_in=constants.tile_in // shape.warps_in)
    if shape.warps_out > 1:
        return replace(constants, tile_out=constants.tile_out // shape.warps_out)
    if constants.tile_d > 1:
        return replace(constants, tile_d=constants.tile_d // 2)
    raise ConstantsError(f"{kernel.name}: no tile fits {budget} bytes of shared memory")
