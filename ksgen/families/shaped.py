"""Answers that families have in common, derived from the shape of a kernel. A family overrides what differs."""

from collections.abc import Mapping
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ksgen.families.base import Geometry, Limits, TensorMap, not_served
from ksgen.families.expected import WORTH, expected_us, plain_pays
from ksgen.families.gpus import LEAST, gpu_of
from ksgen.families.rules import Rule, first_broken
from ksgen.families.signature import PRODUCT, operands_of
from ksgen.families.tiles import PACK_THREADS, divide_up, read_constants
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

ConstantsT = TypeVar("ConstantsT")


class Tiling(Protocol):
    """Resources of one block, which every family's shape states."""

    @property
    def registers(self) -> int:
        """Registers per thread."""
        ...

    @property
    def shared_bytes(self) -> int: ...


PITCH_REGISTERS = 8  # per thread, if the call gives the pitch between rows of features: up to 7 were seen


def more_registers(kernel: KernelSpec, target: str) -> int:
    """Registers per thread of plain multiply-adds, in addition to those that its shape counts."""
    # in bsl, the batch is such a pitch anyway
    pitches = PITCH_REGISTERS if kernel.is_strided and kernel.layout == "bsf" else 0
    return pitches + (gpu_of(target).more_registers if kernel.real_bytes == 4 else 0)


class Shaped(Generic[ConstantsT]):
    """A family whose kernels compute each address themselves, so that they take any batch and any alignment."""

    name: str
    kinds: tuple[type[ConstantsT], ...]
    why: str
    listed: tuple[Rule[ConstantsT], ...]
    signature: tuple[str, ...] = PRODUCT
    by_default = True
    for_small_batches = False
    by_warpgroups = False

    def shape(self, kernel: KernelSpec, constants: ConstantsT) -> Tiling:
        raise NotImplementedError

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        raise NotImplementedError

    def runs(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        return self.serves(kernel, limits)

    def takes(self, kernel: KernelSpec, batch: int, aligned: bool) -> bool:
        return True

    def operands(self, kernel: KernelSpec, constants: ConstantsT) -> tuple[str, ...]:
        return operands_of(self.signature, kernel)

    def maps(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> tuple[TensorMap, ...]:
        return ()

    def packed_for(self, kernel: KernelSpec, constants: ConstantsT) -> object:
        return constants

    # ---- constants

    def rules(self) -> tuple[Rule[ConstantsT], ...]:
        return self.listed

    def keeps_rules(self, kernel: KernelSpec, constants: ConstantsT) -> bool:
        return first_broken(self.rules(), kernel, constants) is None

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> ConstantsT:
        raise NotImplementedError

    def defaults(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> list[ConstantsT]:
        return [self.default(kernel, limits, batch)]

    def constants(self, values: Mapping[str, Any]) -> ConstantsT:
        return read_constants(self.name, self.kinds, values)

    # ---- resources

    def registers(self, kernel: KernelSpec, constants: Any, target: str = LEAST) -> int:
        return self.shape(kernel, constants).registers + (
            0 if constants.on_tensor_cores else more_registers(kernel, target)
        )

    def shared_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        return self.shape(kernel, constants).shared_bytes


class OfKinds(Shaped[Any]):
    """A family with a tiling for each kind of constants, several of which may serve a kernel.

    `only` restricts kernels, defaults and search to one kind.
    """

    tilings: ClassVar[dict[Any, Any]]  # by kind; the first one that serves is the default if times are unknown

    def __init__(self, only: type[Any] | None = None) -> None:
        self.asked = [self.tilings[only]] if only else list(self.tilings.values())
        self.why = "; or ".join(each.why for each in self.asked)

    def suits(self, tiling: Any, kernel: KernelSpec, limits: Limits) -> bool:
        """Whether a tiling serves a kernel on such a device."""
        raise NotImplementedError

    def able(self, kernel: KernelSpec, limits: Limits) -> list[Any]:
        """Tilings that serve a kernel on such a device."""
        return [each for each in self.asked if self.suits(each, kernel, limits)]

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        return bool(self.able(kernel, limits))

    def runs(self, kernel: KernelSpec, constants: Any, limits: Limits) -> bool:
        return self.serves(kernel, limits) and self.tilings[type(constants)] in self.able(kernel, limits)

    def shape(self, kernel: KernelSpec, constants: Any) -> Any:
        return self.tilings[type(constants)](kernel, constants)

    def default_of(self, tiling: Any, kernel: KernelSpec, limits: Limits, batch: int | None) -> Any:
        """Default of one tiling."""
        raise NotImplementedError

    def defaults(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> list[Any]:
        return [self.default_of(each, kernel, limits, batch) for each in self.able(kernel, limits)]

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> Any:
        """Default of the tiling that is expected to be the fastest."""
        own: Any = self  # a whole family
        if not (found := self.defaults(kernel, limits, batch)):
            raise not_served(own, kernel)

        def cost(constants: Any) -> float:
            us = expected_us(own, kernel, limits, batch, constants)
            return us * (1 + WORTH) if plain_pays(own, kernel, limits, constants) else us

        return found[0] if len(found) == 1 else min(found, key=cost)


class PackedShape(Tiling, Protocol):
    """Shape of a kernel that reads packed weights, by blocks of threads."""

    @property
    def threads(self) -> int: ...
    @property
    def packed_bytes(self) -> int: ...
    @property
    def word_bytes(self) -> int:
        """Bytes that a thread of the packing kernel writes."""
        ...

    def grid(self, batch: int) -> int: ...


class Packing(Shaped[ConstantsT]):
    """A family that multiplies by packed weights, a block per tile; gradients have none to pack.

    A chain's source packs nothing: its weights are packed as for each factor alone.
    """

    def shape(self, kernel: KernelSpec, constants: ConstantsT) -> PackedShape:
        raise NotImplementedError

    def fits(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        """Whether `min_blocks` blocks fit a multiprocessor; one block, if the constants have no such number."""
        shape, blocks = self.shape(kernel, constants), getattr(constants, "min_blocks", 1)
        if shape.threads > limits.threads or shape.shared_bytes > limits.shared_bytes_for(blocks):
            return False
        return (
            not limits.registers
            or self.registers(kernel, constants, limits.target) * shape.threads * blocks <= limits.registers
        )

    def is_able(self, kernel: KernelSpec, constants: ConstantsT, limits: Limits) -> bool:
        """Whether the constants keep the rules and fit the device."""
        return self.keeps_rules(kernel, constants) and self.fits(kernel, constants, limits)

    def packed_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        return 0 if kernel.job == CHAIN else self.shape(kernel, constants).packed_bytes

    def memory_bytes(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> int:
        """X, packed weights and Y, each once."""
        return kernel.bytes(batch) - kernel.weight_bytes + self.shape(kernel, constants).packed_bytes

    def pack_geometry(self, kernel: KernelSpec, constants: ConstantsT) -> Geometry:
        if kernel.job == CHAIN:
            return Geometry(0, 1, 0)
        shape = self.shape(kernel, constants)
        return Geometry(divide_up(shape.packed_bytes // shape.word_bytes, PACK_THREADS), PACK_THREADS, 0)

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        shape = self.shape(kernel, constants)
        return Geometry(shape.grid(batch), shape.threads, shape.shared_bytes)
