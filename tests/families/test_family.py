"""What families answer alike from their shapes, by a family that only this file knows; and which families are made
so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, Limits, Rule, check
from ksgen.families.family import Family, PackingFamily
from ksgen.families.gpus import gpu_of
from ksgen.families.tiles import PACK_THREADS, Constants
from ksgen.pattern import Pattern
from ksgen.spec import JOBS, KernelSpec
from tests.support.kernels import LIMITS

KERNEL = KernelSpec(Pattern(2, 48, 64, 4))


@dataclass(frozen=True)
class ToyConstants(Constants):
    warps: int
    min_blocks: int = 1


@dataclass(frozen=True)
class ToyShape:
    kernel: KernelSpec
    constants: ToyConstants
    registers: int = 100
    shared_bytes: int = 3000
    packed_bytes: int = 4 * (PACK_THREADS + 1)
    word_bytes: int = 4

    @property
    def threads(self) -> int:
        return 32 * self.constants.warps

    def grid(self, batch: int) -> int:
        return 7 * batch


class Toy(PackingFamily[ToyConstants]):
    name = "toy"
    rules: Mapping[Any, Any] = {ToyConstants: (Rule("warps is at most 16", lambda k, c: c.warps <= 16),)}

    def shape(self, kernel: KernelSpec, constants: ToyConstants) -> Any:
        return ToyShape(kernel, constants)


TOY, FOUR = Toy(), ToyConstants(4)


def test_what_a_shape_says_is_what_its_family_answers() -> None:
    geometry = TOY.geometry(KERNEL, FOUR, 10)
    assert (geometry.grid, geometry.block, geometry.shared_bytes) == (70, 128, 3000)
    assert (TOY.registers(KERNEL, FOUR), TOY.shared_bytes(KERNEL, FOUR)) == (100, 3000)
    assert TOY.packed_bytes(KERNEL, FOUR) == 4 * (PACK_THREADS + 1)
    assert TOY.pack_geometry(KERNEL, FOUR).grid == 2  # a last block of one thread
    assert TOY.takes(KERNEL, 1, aligned=False)
    assert TOY.maps(KERNEL, FOUR, 10) == ()


def test_constants_and_rules_are_those_of_its_class() -> None:
    assert TOY.constants({"warps": 4}) == FOUR
    with pytest.raises(ConstantsError, match="toy constants are warps, min_blocks; got warp"):
        TOY.constants({"warp": 4})
    assert TOY.keeps_rules(KERNEL, FOUR)
    assert not TOY.keeps_rules(KERNEL, ToyConstants(17))
    with pytest.raises(ConstantsError, match="warps=17 must be at most 16; try 16"):
        check(TOY, KERNEL, ToyConstants(17))


@pytest.mark.parametrize(
    ("blocks", "limits", "fits"),
    [
        (1, Limits(3000), True),
        (1, Limits(2999), False),
        (2, Limits(7024), True),  # each but the last takes 1 KiB in addition
        (2, Limits(7023), False),
        (1, Limits(3000, threads=127), False),
        (5, Limits(10**6, registers=5 * 128 * 100), True),
        (5, Limits(10**6, registers=5 * 128 * 100 - 1), False),
        (5, Limits(10**6, registers=0), True),  # where the notion does not exist
    ],
)
def test_so_many_blocks_fit_as_share_a_multiprocessor(blocks: int, limits: Limits, fits: bool) -> None:
    assert TOY.fits(KERNEL, replace(FOUR, min_blocks=blocks), limits) == fits


def test_plain_kernels_take_more_registers_on_some_targets_and_are_counted_so_where_blocks_are() -> None:
    class OnTensorCores(ToyConstants):
        on_tensor_cores = True

    more = gpu_of("sm_120").more_registers
    assert more > 0 == gpu_of("sm_90a").more_registers
    assert [TOY.registers(KERNEL, FOUR, target) for target in ("sm_90a", "sm_120")] == [100, 100 + more]
    assert TOY.registers(KERNEL, OnTensorCores(4), "sm_120") == 100
    assert TOY.registers(replace(KERNEL, precision="float64"), FOUR, "sm_120") == 100
    limits = Limits(3000, registers=128 * (100 + more), target="sm_120")
    assert TOY.fits(KERNEL, FOUR, limits)
    assert not TOY.fits(KERNEL, FOUR, replace(limits, registers=limits.registers - 1))


def test_every_family_is_over_its_shape_and_gradients_pack_nothing() -> None:
    for family in FAMILIES.values():
        assert isinstance(family, Family)
        kernels = (
            replace(KERNEL, precision=precision, job=job) for precision, job in product(("float32", "float16"), JOBS)
        )
        jobs = {kernel.job for kernel in kernels if family.supports(kernel, LIMITS)}
        if jobs:
            assert isinstance(family, PackingFamily) == (jobs == {"multiply"}), family.name
