"""Types by which families describe kernels and devices: limits, constants of a source, launches, and demands on a
device."""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

from ksgen.families.gpus import LEAST, REGISTERS, gpu_of
from ksgen.spec import KernelSpec
from ksgen.spec.precision import Operand

ConstantsT_contra = TypeVar("ConstantsT_contra", contravariant=True)


class Bar(NamedTuple):
    """A family that launchers may not choose on a device, and the reason."""

    family: str
    reason: str
    is_disabled: bool = False  # its results were wrong on the device, so it is refused even by name


@dataclass(frozen=True)
class Limits:
    """Resources and instructions of a device, and the families that are barred on it."""

    shared_bytes: int  # per block, at most
    threads: int = 1024  # per block, at most
    registers: int = REGISTERS  # 32-bit registers per multiprocessor; 0: not applicable
    is_cpu: bool = False
    vector_bytes: int = 16  # width of a processor's vector registers
    tiles: tuple[str, ...] = ()  # operands that a processor's matrix tiles multiply, by `Operand.name`
    dots: tuple[str, ...] = ()  # operands that a processor's vectors multiply in pairs, by `Operand.name`
    has_arm_vectors: bool = False  # whether a processor's vectors are ARM's, which has 32 vector registers
    multiprocessors: int = 1  # on a processor, its cores; for a CUDA target without a device, those of its usual card
    async_copies: bool = True  # cp.async
    tensor_cores: bool = False  # for 16-bit and tf32 operands with float32 sums
    warpgroups: bool = False  # wgmma, tensor maps, setmaxnreg
    target: str = ""  # name of a CUDA target, the key of its rates
    bars: tuple[Bar, ...] = ()  # families that launchers may not choose on this device

    def bar_of(self, family: str) -> Bar | None:
        """The bar of a family; None if launchers may choose it."""
        return next((bar for bar in self.bars if bar.family == family), None)

    @property
    def has_fine_sums(self) -> bool:
        """Whether tensor cores add 16 products of 16 bits (8 of tf32) at a time.

        They then keep two bits below float32's last, and otherwise one.
        """
        return gpu_of(self.target).fine_sums

    @property
    def vector_registers(self) -> int:
        """Vector registers of a processor: ARM has 32, x86 has 32 if they are 64 bytes wide, else 16."""
        return 32 if self.has_arm_vectors or self.vector_bytes >= 64 else 16

    @property
    def vector_sums(self) -> int:
        """Vectors of sums that fit the vector registers, in addition to operands."""
        return 24 if self.vector_registers == 32 else 12

    def multiplies_pairs(self, operand: Operand | None) -> bool:
        """Whether a processor's vectors multiply this operand in pairs; False for None."""
        return operand is not None and operand.name in self.dots

    def shared_bytes_for(self, blocks: int) -> int:
        """Bytes of shared memory that each block may use if `blocks` blocks share a multiprocessor."""
        return (self.shared_bytes + RESERVED_SHARED_BYTES) // blocks - RESERVED_SHARED_BYTES


LEAST_GPC_MULTIPROCESSORS = 16  # of an H100's smallest GPC; a cluster lies within one GPC
MAP_ALIGNMENT = 16  # bytes: alignment of an array that a tensor map describes
RESERVED_SHARED_BYTES = 1024  # per resident block, in addition to those that the block uses


def cuda_limits(target: str) -> Limits:
    """Limits of a CUDA target.

    An unknown target gets the limits that all GPUs since sm_80 have in common; an older one, those of all older GPUs.
    """
    gpu = gpu_of(target)
    return Limits(
        gpu.shared_bytes, multiprocessors=gpu.rates.multiprocessors if gpu.rates else 1, async_copies=gpu.async_copies,
        tensor_cores=gpu.tensor_cores, warpgroups=gpu.warpgroups, target=target,
    )  # fmt: skip


@dataclass(frozen=True)
class Constexpr:
    """One compile-time constant of the emitted source."""

    name: str
    value: int
    comment: str
    type: str = "int"


def named(source: object, name: str, comment: str, type_: str = "int") -> Constexpr:
    """Constant `name`, whose value is the attribute of `source` with this name in lower case."""
    return Constexpr(name, getattr(source, name.lower()), comment, type_)


class Geometry(NamedTuple):
    """Sizes of one launch."""

    grid: int
    block: int
    shared_bytes: int
    workspace_bytes: int = 0  # global memory in addition to the arrays, for results that later launches read
    at_once: int = 0  # persistent blocks per multiprocessor; 0: one block per tile
    group_bytes: int = 0  # global memory in addition to the arrays, per launched block
    # blocks per cluster: they run at the same time and access each other's shared memory; the grid is whole clusters
    cluster: int = 1
    # whether the kernel supports programmatic dependent launch: it may begin before the previous grid ends, and waits
    starts_early: bool = False
    before: tuple["Pass", ...] = ()  # launches of the source's other entries, with the same arguments
    after: tuple["Pass", ...] = ()

    def launched(self, multiprocessors: int, clusters: int | None = None) -> int:
        """Number of blocks to launch, in whole clusters; at most as many persistent blocks as run at the same time.

        `clusters` is the number of clusters that the driver runs at the same time, if it is known.
        """
        if not self.at_once:
            return self.grid
        blocks = self.at_once * blocks_at_once(multiprocessors, self.cluster)
        return min(self.grid, blocks, blocks if clusters is None else clusters * self.cluster)


def blocks_at_once(multiprocessors: int, cluster: int) -> int:
    """Number of blocks that run at the same time in clusters, one per multiprocessor; at least one cluster.

    A cluster lies within one GPC, so clusters of more than two blocks are counted per GPC. One cluster too many
    would run after all others.
    """
    if cluster <= 2:
        return max(1, multiprocessors // cluster) * cluster
    return max(1, multiprocessors // LEAST_GPC_MULTIPROCESSORS * (LEAST_GPC_MULTIPROCESSORS // cluster)) * cluster


@dataclass(frozen=True)
class Pass:
    """A launch before or after another one."""

    name: str  # suffix of the launched entry's name, such as `sum`
    geometry: Geometry


@dataclass(frozen=True)
class TensorMap:
    """An array as a tensor map describes it, innermost dimension first.

    Elements outside read as zeros and are not written.
    """

    operand: Literal["x", "y", "workspace"]
    item_bytes: int
    sizes: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, from dimension 1 on
    box: tuple[int, ...]  # elements
    swizzle: int  # bytes over which 16-byte chunks are permuted: 0, 32, 64 or 128


class Work(NamedTuple):
    """Demands of one launch on a device, from which the cost model estimates its time."""

    blocks: int
    memory_bytes: int  # X, weights in the type in which they are stored, and Y, each once
    cache_bytes: int  # bytes that all blocks read and write themselves; on a GPU, whole sectors
    shared_bytes: int  # written to and read from shared memory; a value that a warp's lanes share counts once
    multiply_adds: int  # padding and the parts of split operands included
    waits: float = 0  # for stages, summed over all blocks; stages in flight together count as one wait
    cycles: float = 0  # cycles of a processor's cores over all work groups: instructions, and waits for their caches
    # shared-memory bandwidth of a GPU that bank conflicts and partial accesses waste, in bytes
    returned_bytes: int = 0
    passed_bytes: int = 0  # read and written by the launches before and after, which multiply nothing
    # bytes that a GPU's L2 cache could have moved in the time lost to partial sectors
    scattered_bytes: int = 0
    # stages that all blocks copy and multiply; 0: not counted, and all copies are assumed to be asynchronous
    stages: int = 0
    synchronous: int = 0  # stages whose copies pass through registers
    products: int = 0  # multiply instructions of warps; 0: not counted
    reads: int = 0  # by warps, of 16 bytes of operands per lane; 0: not counted


class Modelled(Protocol[ConstantsT_contra]):
    """What the cost model reads of a family, or of another project's kernel that is compared with ours."""

    name: str
    by_warpgroups: bool  # whether the kernel uses wgmma, and not mma.sync

    @property
    def kinds(self) -> tuple[type[Any], ...]:
        """Classes of constants: of one factor, and of chains or of other methods.

        Each says by `on_tensor_cores` whether tensor cores multiply.
        """

    def registers(self, kernel: KernelSpec, constants: ConstantsT_contra, target: str = LEAST) -> int:
        """Estimated registers per thread, when ptxas compiles the kernel for `target`."""

    def geometry(self, kernel: KernelSpec, constants: ConstantsT_contra, batch: int) -> Geometry: ...

    def work(self, kernel: KernelSpec, constants: ConstantsT_contra, batch: int) -> Work: ...
