"""Shared parts of tensor-core families: the operands of an instruction, and the chunks of X that are a lane's fragment.

A lane reads X in 16-byte chunks, in the order in which X is stored. In batch-size-first, a group of chunks holds whole
inputs with all j of the tile. The four lanes of a row of the batch take four consecutive groups, and packed weights
follow that order.
"""

from math import lcm

from ksgen.errors import ConstantsError
from ksgen.families.banks import write_cycles
from ksgen.families.base import Limits
from ksgen.families.tiles import WARP, Tiled
from ksgen.families.traffic import Moved
from ksgen.spec import KernelSpec
from ksgen.spec.precision import F16, Operand, on_tensor_cores
from ksgen.spec.storage import SCALE_BYTES, STORAGES
from ksgen.values import cached_property

CHUNK = 16  # bytes of one access of shared memory
CHUNKS_AT_ONCE = 8  # chunks that shared memory serves at once, to 8 lanes
FREE_OF_CONFLICTS = WARP // CHUNKS_AT_ONCE  # passes of a warp's 16-byte reads


def wavefronts(addresses: list[int]) -> int:
    """Passes of shared memory for one 16-byte read per lane, at these addresses; 4 if there are no bank conflicts."""
    return write_cycles(addresses, CHUNK)


def is_precise(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether the kernel has enough inputs for split operands to be as precise as float32.

    With fewer inputs, plain float32 is as fast, because memory bounds both.
    """
    return kernel.pattern.c >= kernel.arithmetic.promotion(limits.has_fine_sums).least_in


def tensor_operand(kernel: KernelSpec) -> Operand:
    """Operand that tensor cores multiply for a kernel."""
    if kernel.has_bytes_in:
        return Operand(kernel.inputs, kernel.x_item_bytes)
    if kernel.arithmetic.operand is None:
        raise ConstantsError(
            f"{kernel.name}: tensor cores have no products in {kernel.precision}; accepted: "
            f"{', '.join(on_tensor_cores())}"
        )
    return kernel.arithmetic.operand


def multiplies_bytes(kernel: KernelSpec) -> bool:
    """Whether tensor cores multiply X and weights that are floats in eight bits, natively or as float16."""
    return kernel.has_bytes_in and STORAGES[kernel.inputs].mantissa is not None


def has_products(kernel: KernelSpec) -> bool:
    """Whether tensor cores multiply the kernel's operands."""
    return multiplies_bytes(kernel) if kernel.has_bytes_in else kernel.arithmetic.operand is not None


def multiplied_by(kernel: KernelSpec, by_warpgroups: bool) -> Operand | None:
    """Operand that sets the rate of a kernel's products.

    Warpgroups multiply X in eight bits natively; `mma.sync` mostly multiplies it as float16.
    """
    return (tensor_operand(kernel) if by_warpgroups else F16) if kernel.has_bytes_in else kernel.arithmetic.operand


class TensorTile(Moved, Tiled):
    """Sizes derived from a kernel's precision, its layout and the number of j per tile."""

    kernel: KernelSpec

    @cached_property
    def vector(self) -> int:
        """Elements of X per chunk."""
        return CHUNK // self.kernel.x_item_bytes

    @cached_property
    def operand(self) -> str:
        """Name of the operand that the matrix instruction multiplies."""
        return tensor_operand(self.kernel).name

    @cached_property
    def components(self) -> int:
        """Parts into which an operand is split."""
        return self.kernel.arithmetic.parts

    @cached_property
    def reals_per_number(self) -> int:
        """Real numbers per element: 2 if it is complex."""
        return self.kernel.arithmetic.reals_per_number

    @cached_property
    def k_step(self) -> int:
        """Inputs of one instruction."""
        return tensor_operand(self.kernel).k_step

    @property
    def lane_inputs(self) -> int:
        """Inputs of one instruction that a lane holds per column."""
        return self.k_step // 4

    @property
    def word_inputs(self) -> int:
        """Inputs per word of a lane's operand; 1 also for a complex input, which fills two words."""
        return self.lane_inputs * self.reals_per_number // 2

    @property
    def word_bytes(self) -> int:
        """Bytes that a thread of the packing kernel writes."""
        return 4

    # ---- packed weights

    @property
    def w_bytes(self) -> int:
        """Bytes of one stage of packed weights."""
        raise NotImplementedError

    @property
    def scales_offset(self) -> int:
        """Bytes of packed weights before their scales, which operands in eight bits have."""
        return self.tiles_of_batch * self.steps * self.w_bytes

    @property
    def packed_bytes(self) -> int:
        return self.scales_offset + (SCALE_BYTES * self.kernel.pattern.out_features if self.kernel.has_bytes_in else 0)

    # ---- how a lane reads X

    @property
    def warp_d(self) -> int:
        """Neighbouring j per warp."""
        return int(self.constants.tile_d)

    @cached_property
    def group_chunks(self) -> int:
        """Neighbouring chunks that hold whole inputs with all their j."""
        return lcm(self.warp_d, self.vector) // self.vector if self.is_bsf else 1

    @cached_property
    def group_inputs(self) -> int:
        """Inputs per group of chunks; the four lanes of a column take four consecutive groups."""
        return lcm(self.warp_d, self.vector) // self.warp_d if self.is_bsf else 1

    @cached_property
    def super_in(self) -> int:
        """Inputs after which the order in which lanes read repeats: whole instructions and whole groups."""
        return max(self.k_step, 4 * self.group_inputs) if self.is_bsf else self.k_step

    @cached_property
    def super_steps(self) -> int:
        return self.super_in // self.k_step

    @cached_property
    def super_groups(self) -> int:
        return self.super_in // (4 * self.group_inputs) if self.is_bsf else 1
