"""What both kinds of chains of GPUs share: constants of each factor in one word, halves of shared memory in turns, a
ring, rules.
"""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, cuda_limits
from ksgen.families.chains import factor_kernels, own_of_factors
from ksgen.families.gpu_chain import GpuChainShape, GpuProduct
from ksgen.families.rules import first_broken
from tests.support.gpu_chains import EVEN, chain_of, group_of

LIMITS = cuda_limits("sm_80")
CHAINS = [("mma", "bfloat16"), ("simt", "float32")]


@dataclass(frozen=True)
class Holding(GpuChainShape[Any]):
    """A chain with buffers of these sizes, or several chains."""

    sizes: tuple[tuple[int, ...], ...] = ()
    first: int = 0

    @property
    def factors(self) -> list[Any]:
        return []

    @property
    def buffer_sizes(self) -> list[list[int]]:
        return list(map(list, self.sizes))

    @property
    def resident_size(self) -> int:
        return self.first

    @property
    def shared_bytes(self) -> int:
        return self.ring


@pytest.mark.parametrize(
    ("sizes", "halves"), [((5,), (5, 0)), ((5, 7), (5, 7)), ((5, 7, 9), (9, 7)), ((9, 2, 3, 8), (9, 8))]
)
def test_buffers_alternate_between_two_halves(sizes: tuple[int, ...], halves: tuple[int, int]) -> None:
    """Each half is as large as its largest buffer; no buffer is overwritten while it is read."""
    shape = Holding(chain_of(EVEN, "float32", "bsf"), None, (sizes,))
    assert shape.ping_pong_sizes == halves
    assert shape.ring == sum(halves)
    places = [(shape.place(at), shape.place(at) + size) for at, size in enumerate(sizes)]
    assert all(end <= shape.ring for _, end in places)
    for one, other in pairwise(places):
        assert one[1] <= other[0] or other[1] <= one[0]


def test_chains_of_a_group_share_the_halves() -> None:
    """Each chain begins in the first half, behind the part that all chains share."""
    shape = Holding(group_of((EVEN, EVEN[:1]), "float32", "bsf"), None, ((5, 7, 9), (), (11, 2)), 100)
    assert (shape.ping_pong_sizes, shape.ring) == ((11, 7), 118)
    assert [shape.place(at) for at in range(3)] == [100, 111, 100]


@pytest.mark.parametrize(("name", "precision"), CHAINS)
def test_a_chain_is_its_factors_with_constants_of_their_own(name: str, precision: str) -> None:
    family, kernel = FAMILIES[name], chain_of((*EVEN, *EVEN), precision, "bsf")
    assert isinstance(family, GpuProduct)
    constants = family.default(kernel, LIMITS)
    shape = family.shape(kernel, constants)
    assert [factor for factor, _ in own_of_factors(kernel, constants)] == factor_kernels(kernel)
    counts = [factor.block_stages for factor in shape.factors]
    assert shape.first_stages == [sum(counts[:at]) for at in range(len(counts))]
    assert family.work(kernel, constants, constants.tile_batch).stages == sum(counts)
    # packed for each alone
    assert (family.packed_bytes(kernel, constants), family.pack_geometry(kernel, constants).grid) == (0, 0)
    assert family.geometry(kernel, constants, 3 * constants.tile_batch + 1).grid == 4
    with pytest.raises(ConstantsError, match=r"tiles='16 x': '16 x' is not tile_out, tile_in"):
        _ = replace(constants, tiles="16 x").parsed


@pytest.mark.parametrize(("name", "precision"), CHAINS)
def test_registers_are_bounded(name: str, precision: str) -> None:
    """The number of blocks that must fit on one SM bounds the registers."""
    family, kernel = FAMILIES[name], chain_of(EVEN, precision, "bsf")
    constants = family.default(kernel, LIMITS)
    assert first_broken(family.rules(), kernel, constants) is None
    registers = min(255, family.registers(kernel, constants)) * family.geometry(kernel, constants, 1).block
    crowded = replace(constants, min_blocks=65536 // registers + 1)
    broken = first_broken(family.rules(), kernel, crowded)
    assert broken is not None
    assert broken.says in (
        "the registers of min_blocks blocks are at most 65536",
        "min_blocks blocks have at most 1536 threads",
    )
