"""Shared parts of products on processors: one launch of one factor or several, its private buffers and its geometry."""

from collections.abc import Sequence
from typing import Any, TypeVar

from ksgen.families.base import Geometry
from ksgen.families.family import Family
from ksgen.families.signature import PRODUCT_WITH_WORKSPACE
from ksgen.families.tiles import divide_up
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

GROUPS_AT_ONCE = 8  # per core, so that a late one leaves its neighbours' work to others

ConstantsT = TypeVar("ConstantsT")


class LaunchTiling:
    """Sizes derived from the factors of one launch and their constants, in elements of the sums' type."""

    kernel: KernelSpec
    constants: Any

    @property
    def factors(self) -> Sequence[Any]:
        """Sizes of each factor."""
        raise NotImplementedError

    @property
    def between(self) -> int:
        """Elements of the buffer for one intermediate."""
        raise NotImplementedError

    @property
    def is_chain(self) -> bool:
        return self.kernel.job == CHAIN

    @property
    def parts(self) -> int:
        """Parts of a block's columns, one per work group; the factors of a chain have one."""
        return int(self.factors[0].constants.parts)

    @property
    def places(self) -> int:
        """Number of buffers for intermediates: one, or two of which a factor reads one and writes the other."""
        return min(2, max(map(len, self.kernel.chains)) - 1)

    @property
    def panels(self) -> int:
        """Elements of the private buffer of the largest factor."""
        return int(max(factor.slot for factor in self.factors))

    @property
    def slot(self) -> int:
        """Elements of a work group's private buffer."""
        return self.panels + self.places * self.between

    @property
    def registers(self) -> int:
        return int(max(factor.registers for factor in self.factors))

    @property
    def shared_bytes(self) -> int:
        return 0

    @property
    def packed_bytes(self) -> int:
        return int(sum(factor.packed_bytes for factor in self.factors))


class ProcessorProduct(Family[ConstantsT]):
    """A family of products on processors, whose work groups each take one block of the batch after another."""

    signature = PRODUCT_WITH_WORKSPACE

    def packed_bytes(self, kernel: KernelSpec, constants: ConstantsT) -> int:
        return 0 if kernel.job == CHAIN else int(self.shape(kernel, constants).packed_bytes)

    def geometry(self, kernel: KernelSpec, constants: ConstantsT, batch: int) -> Geometry:
        shape = self.shape(kernel, constants)
        grid = divide_up(batch, shape.constants.block) * shape.parts
        return Geometry(grid, 1, 0, at_once=GROUPS_AT_ONCE, group_bytes=shape.slot * kernel.real_bytes)


def output_reads(kernel: KernelSpec, streaming: int, batch: int) -> int:
    """Bytes that stores into the caches read first: the lines that they replace."""
    return 0 if streaming else batch * sum(chain.out_features for chain in kernel.chains) * kernel.item_bytes
