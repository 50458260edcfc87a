"""Base classes of kernel families: constants with rules, a resource model, defaults, a search space, launches.

The base classes derive resources and launches from a kernel's tiling, and a family overrides what differs. A family
decides; it never compiles, runs or renders.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Generic, TypeVar

from ksgen.errors import ConstantsError
from ksgen.families.base import Constexpr, Geometry, Limits, TensorMap, Work
from ksgen.families.gpus import LEAST, gpu_of
from ksgen.families.rules import BrokenRuleError, Rule, first_broken
from ksgen.families.signature import PRODUCT, operands_of
from ksgen.families.tiles import PACK_THREADS, divide_up, read_constants
from ksgen.spec import KernelSpec

ConstantsT = TypeVar("ConstantsT")
PITCH_REGISTERS = 8  # per thread, if the call gives the pitch between rows of the batch: up to 7 were seen


def more_registers(kernel: KernelSpec, target: str) -> int:
    """Registers per thread of plain multiply-adds, in addition to those that the kernel's tiling counts."""
    # in bsl, the kernel has a pitch in any case: the batch
    pitches = PITCH_REGISTERS if kernel.is_strided and kernel.layout == "bsf" else 0
    return pitches + (gpu_of(target).more_registers if kernel.real_bytes == 4 else 0)


class Family(Generic[ConstantsT]):
    """One method to compute a kernel. `name` is its key in wisdom, and the stem of its first template.

    Unless a family overrides it, its kernels use no tensor maps, and accept any batch and any alignment.
    """

    name: str
    why: str  # its purpose, in a few words
    # rules by class of constants: of one factor, and of chains or of other methods; each class has `on_tensor_cores`:
    # whether tensor cores or plain instructions multiply
    rules: Mapping[Any, tuple[Rule[Any], ...]]
    tilings: ClassVar[dict[Any, Any]]  # classes of derived sizes, by class of constants
    signature: tuple[str, ...] = PRODUCT
    by_default = True  # whether launchers may choose it without wisdom; says nothing about measurements
    for_small_batches = False  # whether it is meant for small batches: larger ones use it only by wisdom or by name
    by_warpgroups = False  # whether the kernel uses wgmma, and not mma.sync

    def shape(self, kernel: KernelSpec, constants: ConstantsT) -> Any:
        """Tiling: sizes derived from the constants, with `registers` per thread and `shared_bytes` per block."""
        tiling = self.tilings[type(constants)]
        return getattr(tiling, "of", tiling)(kernel, constants)  # most tilings cache their last sizes

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        raise NotImplementedError

    def runs(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        """Whether the family supports the kernel with constants of this class."""
        return self.supports(kernel, limits)

    def is_default(self, kernel: KernelSpec, batch: int) -> bool:
        """Whether launchers may choose the family without wisdom, for batches like this one."""
        return self.by_default

    def takes(self, kernel: KernelSpec, batch: int, aligned: bool) -> bool:
        """Whether it accepts that batch, for arrays that begin at a multiple of 16 bytes (`aligned`) or anywhere."""
        return True

    # ---- constants

    @property
    def kinds(self) -> tuple[type[ConstantsT], ...]:
        """Classes of constants."""
        return tuple(self.rules)

    def keeps_rules(self, kernel: KernelSpec, constants: ConstantsT) -> bool:
        return first_broken(self.rules[type(constants)], kernel, constants) is None

    def constants(self, values: Mapping[str, Any]) -> ConstantsT:
        return read_constants(self.name, self.kinds, values)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> ConstantsT:
        """Default constants before any search, for batches of about `batch` rows if given."""
        raise NotImplementedError

    def defaults(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> list[ConstantsT]:
        """The default, and the best guess of each other kind of constants, for searches and benchmarks."""
        return [self.default(kernel, limits, batch)]

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[ConstantsT]:
        raise NotImplementedError

    # ---- the source

    def source_constants(self, kernel: KernelSpec, constants: ConstantsT) -> ConstantsT:
        """Constants of the source of a launch: launches for which they are equal share it.

        Constants in `at_launch` are arguments of a launch, so the source may have other values of them.
        """
        return constants

    def constexprs(self, kernel: KernelSpec, constants: ConstantsT) -> list[Constexpr]:
        raise NotImplementedError

    def variables(self, kernel: KernelSpec, constants: ConstantsT) -> Mapping[str, Any]:
        """Further variables of its template."""
        raise NotImplementedError

    # ---- launches

    def operands(self, kernel: KernelSpec, constants: ConstantsT) -> tuple[str, ...]:
        """Names of a launch's arguments that are arrays or pitches, in order (`signature.py`)."""
        return operands_of(self.signature, kernel)

    def maps(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> tuple[TensorMap, ...]:
        """Tensor maps that a launch passes before its other arguments."""
        return ()

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        raise NotImplementedError

    def pack_geometry(self, kernel: KernelSpec, constants: ConstantsT) -> Geometry:
        """Geometry of the source's second entry: `_pack`, or a gradient's `_sum`."""
        raise NotImplementedError

    def packed_for(self, kernel: KernelSpec, constants: ConstantsT) -> object:
        """Key of the packed weights, in addition to the kernel: equal keys mean equal bytes."""
        return constants

    def reads_ties(self, kernel: KernelSpec, constants: ConstantsT) -> bool:
        """Whether kernels with these constants read tied weights once."""
        return False

    def as_read(self, kernel: KernelSpec, constants: ConstantsT) -> KernelSpec:
        """The kernel with its ties only if kernels with these constants read tied weights once."""
        return kernel if kernel.tied and self.reads_ties(kernel, constants) else kernel.untied

    def packs_adjoint(self, kernel: KernelSpec) -> bool:
        """Whether the source has an entry `_pack_adjoint`, which packs the weights from those of the adjoint factor."""
        return False

    def packed_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        """Bytes of packed weights, which the second entry writes; for a gradient, of partial sums, which it reads.

        A chain's source packs nothing, because its weights are packed as for each factor alone.
        """
        return 0 if kernel.is_chain else int(self.shape(kernel, constants).packed_bytes)

    # ---- resources

    def registers(self, kernel: KernelSpec, constants: Any, target: str = LEAST) -> int:
        """Estimated registers per thread, when ptxas compiles the kernel for `target`."""
        more = 0 if constants.on_tensor_cores else more_registers(kernel, target)
        return int(self.shape(kernel, constants).registers + more)

    def shared_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        return int(self.shape(kernel, constants).shared_bytes)

    def work(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Work:
        raise NotImplementedError


class PackingFamily(Family[ConstantsT]):
    """A family of products by packed weights, with one block per tile.

    Tilings have a `grid`, `threads` per block, `packed_bytes`, and the `word_bytes` that a thread of the packing kernel
    writes.
    """

    def fits(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        """Whether `min_blocks` blocks fit a multiprocessor; without this constant, whether one block does."""
        shape, blocks = self.shape(kernel, constants), getattr(constants, "min_blocks", 1)
        if shape.threads > limits.threads or shape.shared_bytes > limits.shared_bytes_for(blocks):
            return False
        if not limits.registers:
            return True
        registers: int = self.registers(kernel, constants, limits.target) * shape.threads * blocks
        return registers <= limits.registers

    def is_able(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        """Whether the constants keep the rules and fit the device."""
        return self.keeps_rules(kernel, constants) and self.fits(kernel, constants, limits)

    def memory_bytes(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> int:
        """X, packed weights and Y, each once."""
        return kernel.bytes(batch) - kernel.weight_bytes + int(self.shape(kernel, constants).packed_bytes)

    def pack_geometry(self, kernel: KernelSpec, constants: ConstantsT) -> Geometry:
        if kernel.is_chain:
            return Geometry(0, 1, 0)
        shape = self.shape(kernel, constants)
        return Geometry(divide_up(shape.packed_bytes // shape.word_bytes, PACK_THREADS), PACK_THREADS, 0)

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        shape = self.shape(kernel, constants)
        return Geometry(shape.grid(batch), shape.threads, shape.shared_bytes)


def unsupported(family: Family[Any], kernel: KernelSpec) -> ConstantsError:
    """Error for the default of a kernel that the family does not support."""
    return ConstantsError(
        f"{kernel.name}: not supported by {family.name} on this device; {family.name} is for: {family.why}"
    )


def check(family: Family[ConstantsT], kernel: KernelSpec, constants: ConstantsT, limits: Limits | None = None) -> None:
    """Raise `ConstantsError` on the first rule of the family, or limit of the device, that does not hold."""
    rules = family.rules[type(constants)]
    if broken := first_broken(rules, kernel, constants):
        raise BrokenRuleError(rules, broken, kernel, constants)
    if limits is None:
        return
    if (need := family.shared_bytes(kernel, constants)) > limits.shared_bytes:
        raise ConstantsError(
            f"{kernel.name}: needs {need} bytes of shared memory, the device has {limits.shared_bytes}: {constants}"
        )
    if (threads := family.geometry(kernel, constants, 1).block) > limits.threads:
        raise ConstantsError(
            f"{kernel.name}: needs {threads} threads per block, the device allows {limits.threads}: {constants}"
        )
