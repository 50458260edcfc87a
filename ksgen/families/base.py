"""What every kernel family has: constants with rules, a resource model, defaults, a search space, a launch geometry.

A family decides; it never compiles, runs or renders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from ksgen.errors import ConstantsError
from ksgen.families.gpus import LEAST, REGISTERS, gpu_of
from ksgen.families.rules import BrokenRuleError, Rule, first_broken
from ksgen.spec import KernelSpec
from ksgen.spec.precision import Operand

ConstantsT = TypeVar("ConstantsT")
ConstantsT_contra = TypeVar("ConstantsT_contra", contravariant=True)


@dataclass(frozen=True)
class Limits:
    """What one block may use on a device."""

    shared_bytes: int
    threads: int = 1024
    registers: int = REGISTERS  # a multiprocessor's 32-bit registers; 0 where the notion does not exist
    is_cpu: bool = False
    vector_bytes: int = 16  # a processor's vector registers
    tiles: tuple[str, ...] = ()  # what a processor's matrix tiles multiply, by `Operand.name`
    dots: tuple[str, ...] = ()  # what its vectors multiply in pairs, by `Operand.name`
    has_arm_vectors: bool = False  # ARM's, of which there are 32
    multiprocessors: int = 1  # a processor's cores; of a CUDA target that nobody asks on a device, those of its usual card
    async_copies: bool = True  # cp.async
    tensor_cores: bool = False  # for 16-bit and tf32 operands with float32 sums
    warpgroups: bool = False  # wgmma, tensor maps, registers that warps hand over
    target: str = ""  # a CUDA target's name: what is known of its rates

    @property
    def has_fine_sums(self) -> bool:
        """Whether the target's tensor cores add 32 bytes of products at a time and keep two bits below float32's last."""
        return gpu_of(self.target).fine_sums

    @property
    def vector_registers(self) -> int:
        """Of a processor: x86 has 32 where they are 64 bytes wide, else 16."""
        return 32 if self.has_arm_vectors or self.vector_bytes >= 64 else 16

    def multiplies_pairs(self, operand: Operand | None) -> bool:
        """Whether a processor has an instruction that multiplies two of such operands at a time."""
        return operand is not None and operand.name in self.dots

    def shared_bytes_for(self, blocks: int) -> int:
        """What each of so many blocks may use that share a multiprocessor."""
        return (self.shared_bytes + RESERVED_SHARED_BYTES) // blocks - RESERVED_SHARED_BYTES


MAP_ALIGNMENT = 16  # bytes, of an array that a tensor map describes
RESERVED_SHARED_BYTES = 1024  # that each resident block takes beside its own


def cuda_limits(target: str) -> Limits:
    """Limits of a CUDA target; one that is not in the table gets what every GPU since sm_80 has, or every one before."""
    gpu = gpu_of(target)
    return Limits(
        gpu.shared_bytes, multiprocessors=gpu.rates.multiprocessors if gpu.rates else 1, async_copies=gpu.async_copies,
        tensor_cores=gpu.tensor_cores, warpgroups=gpu.warpgroups, target=target,
    )  # fmt: skip


@dataclass(frozen=True)
class Constexpr:
    """One compile-time constant of the emitted text."""

    name: str
    value: int
    comment: str
    type: str = "int"


@dataclass(frozen=True)
class Geometry:
    """How one launch looks."""

    grid: int
    block: int
    shared_bytes: int
    workspace_bytes: int = 0  # of memory besides the arrays, in which it and the launches around it leave what others read
    at_once: int = 0  # blocks a multiprocessor that walk over the grid; 0: a block for each of it
    group_bytes: int = 0  # of memory besides the arrays that each launched block keeps for itself
    cluster: int = 1  # blocks that run side by side and reach into each other's shared memory: the grid is whole clusters
    starts_early: bool = False  # the text waits for the grid before it by itself, so a launch may begin while that one ends
    before: tuple["Pass", ...] = ()  # launches that belong to it, of the text's other entries on the same arguments
    after: tuple["Pass", ...] = ()

    def launched(self, multiprocessors: int) -> int:
        """Blocks of a launch: whole clusters, and no more than have a multiprocessor each."""
        if not self.at_once:
            return self.grid
        return min(self.grid, max(1, self.at_once * multiprocessors // self.cluster) * self.cluster)


@dataclass(frozen=True)
class Pass:
    """A launch before or after another one."""

    name: str  # behind the kernel's own in the entry's name
    geometry: Geometry


@dataclass(frozen=True)
class TensorMap:
    """An array as copies of boxes see it, innermost dimension first; elements beyond it read as zeros and are not written."""

    operand: Literal["x", "y", "workspace"]
    item_bytes: int
    sizes: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, from dimension 1 on
    box: tuple[int, ...]  # elements
    swizzle: int  # bytes over which 16-byte chunks are permuted: 0, 32, 64 or 128


@dataclass(frozen=True)
class Work:
    """What one launch asks of a device: the terms of a cost model, which says what each takes, and all of them together."""

    blocks: int
    memory_bytes: int  # X, weights as they are read, and Y, each once
    cache_bytes: int  # what all blocks read, and write, themselves: of a GPU, whole sectors
    shared_bytes: int  # written to and read from shared memory; what a warp's lanes share, once
    multiply_adds: int  # padding and the parts of split operands included
    waits: float = 0  # for stages, by all blocks one after the other: as many as are on their way at a time are one wait
    cycles: float = 0  # of a processor's cores, by all work groups: their instructions, and what they wait for their caches
    returned_bytes: int = 0  # that a GPU's shared memory could have moved besides `shared_bytes` in the cycles that those take
    passed_bytes: int = 0  # read and written by the launches before and after, while nothing is multiplied
    stages: int = 0  # that blocks copy and multiply, by all blocks; 0: not counted, and all copies are taken as asynchronous
    synchronous: int = 0  # of them, those whose copies pass through registers
    products: int = 0  # instructions of warps that multiply; 0: not counted


class Modelled(Protocol[ConstantsT_contra]):
    """What the cost model reads: of a family, or of another project's kernel that is compared with ours."""

    name: str
    on_tensor_cores: bool  # whether tensor cores multiply, and not plain instructions
    by_warpgroups: bool  # whether they are asked by wgmma, and not by mma.sync

    def registers(self, kernel: KernelSpec, constants: ConstantsT_contra, target: str = LEAST) -> int:
        """An estimate for one thread, as ptxas makes the kernel for that target."""
        ...

    def geometry(self, kernel: KernelSpec, constants: ConstantsT_contra, batch: int) -> Geometry: ...

    def work(self, kernel: KernelSpec, constants: ConstantsT_contra, batch: int) -> Work: ...


class Family(Modelled[ConstantsT], Protocol[ConstantsT]):
    """One way to compute a kernel. `name` is its template's stem and its word in wisdom."""

    constants_type: type[ConstantsT]
    why: str  # what it is for, in a few words
    packs: bool  # whether its text has a second entry
    packed_by: str  # the family that packs the weights of each factor of a chain; empty: itself
    signature: tuple[str, ...]  # the operands that its kernels may take, in order: `signature.py`
    by_default: bool  # whether launchers may choose it without wisdom; says nothing of what was measured

    for_few: bool  # whether it is meant for few batch entries: larger batches have it by wisdom, or by name, alone

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool: ...

    def takes(self, kernel: KernelSpec, batch: int, aligned: bool) -> bool:
        """Whether it serves that batch, of arrays that begin at a multiple of 16 bytes or do not."""
        ...

    def rules(self) -> tuple[Rule[ConstantsT], ...]: ...

    def constants(self, values: Mapping[str, Any]) -> ConstantsT: ...

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> ConstantsT:
        """The constants before any search; `batch` is what they are wanted for, where that is known."""
        ...

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[ConstantsT]: ...

    def constexprs(self, kernel: KernelSpec, constants: ConstantsT) -> list[Constexpr]: ...

    def words(self, kernel: KernelSpec, constants: ConstantsT) -> Mapping[str, Any]:
        """What its template asks for besides."""
        ...

    def shared_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int: ...

    def maps(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> tuple[TensorMap, ...]:
        """What a launch is given before its other arguments."""
        ...

    def pack_geometry(self, kernel: KernelSpec, constants: ConstantsT) -> Geometry:
        """Of the text's second entry: `_pack`, or a gradient's `_sum`."""
        ...

    def packed_for(self, kernel: KernelSpec, constants: ConstantsT) -> object:
        """What packed weights depend on besides the kernel: equal where they are the same bytes."""
        ...

    def packed_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        """Of what the second entry writes, packed weights; or reads, the partial sums of the longest batch."""
        ...


def check(family: Family[ConstantsT], kernel: KernelSpec, constants: ConstantsT, limits: Limits | None = None) -> None:
    """Raise `ConstantsError` on the first rule of the family, or limit of the device, that does not hold."""
    rules = family.rules()
    if broken := first_broken(rules, kernel, constants):
        raise BrokenRuleError(rules, broken, kernel, constants)
    if limits is None:
        return
    if (need := family.shared_bytes(kernel, constants)) > limits.shared_bytes:
        raise ConstantsError(f"{kernel.name}: needs {need} bytes of shared memory, the device has {limits.shared_bytes}: {constants}")
    if (threads := family.geometry(kernel, constants, 1).block) > limits.threads:
        raise ConstantsError(f"{kernel.name}: needs {threads} threads a block, the device allows {limits.threads}: {constants}")
