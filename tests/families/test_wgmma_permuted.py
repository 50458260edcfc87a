"""X between two permutations: what is permuted, by which launches, and back."""

from dataclasses import replace

import pytest

from ksgen.families import FAMILIES, cuda_limits, family_named
from ksgen.families.wgmma.permuted import PermutedConstants, with_blocks_apart
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.measure.verify import compare, make_problem
from ksgen.spec import Epilogue
from tests.support.kernels import check_exact, in_emulator, multiply, source_of
from tests.support.wgmma_kernels import GPU, kernel

SHARED, REGISTERS, PERMUTED = map(family_named, ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))
PLAIN = SharedConstants(256, 64, 64, 2, 3)


def test_what_is_permuted() -> None:
    def served(
        pattern: tuple[int, ...], precision: str = "float16", layout: str = "bsf", target: str = "sm_90a"
    ) -> bool:
        return PERMUTED.supports(kernel(precision, layout, pattern), cuda_limits(target))

    assert served((2, 40, 24, 5))
    assert served((1, 256, 256, 64), "bfloat16")
    assert not served((2, 40, 24, 1))  # nothing to permute
    assert not served((2, 44, 24, 5))  # chunks of 8 outputs
    assert not served((2, 40, 20, 5))  # and of 8 inputs
    assert not served((2, 40, 24, 13))  # too many j for a thread, and no whole chunks of them
    assert not served((2, 40, 24, 20))
    assert not served((2, 40, 24, 5), "tf32")
    assert not served((2, 40, 24, 5), layout="bsl")
    assert not served((2, 40, 24, 5), target="sm_80")
    assert not PERMUTED.supports(replace(kernel(pattern=(2, 40, 24, 5)), job="gradient"), GPU)


def test_permuting_takes_launches_before_and_after_and_memory_for_x_and_y() -> None:
    each = kernel(pattern=(2, 48, 64, 24))
    constants = PermutedConstants(*list(vars(PLAIN).values())[:-1])
    own, alone = PERMUTED.geometry(each, constants, 100), SHARED.geometry(with_blocks_apart(each), PLAIN, 100)
    assert own._replace(workspace_bytes=0, before=(), after=()) == alone
    assert own.workspace_bytes == 2 * 100 * 2 * (64 + 48) * 24
    (before,), (after,) = own.before, own.after
    assert (before.name, before.geometry.grid) == ("permute_x", 100 * 2 * 8 * 3 // 256 + 1)  # 8 inputs x 8 j a thread
    assert (after.name, after.geometry.grid) == ("permute_y", 100 * 2 * 6 * 3 // 256 + 1)
    small = kernel(pattern=(1, 8, 8, 3))
    # Y begins with a line of its own
    assert PERMUTED.geometry(small, PERMUTED.default(small, GPU), 1).workspace_bytes == 128 + 48
    (x,) = PERMUTED.maps(each, constants, 100)
    assert (x.operand, x.sizes, x.strides) == ("workspace", (64, 48, 100), (128, 64 * 48 * 2))


def test_constants_tell_what_is_permuted_from_what_is_not() -> None:
    values = {name: value for name, value in vars(PLAIN).items() if name != "x_from"}
    assert FAMILIES["wgmma"].constants(vars(PLAIN)) == SHARED.constants(values) == PLAIN
    assert (
        FAMILIES["wgmma"].constants(values | {"x_from": "permuted"})
        == PERMUTED.constants(values)
        == PermutedConstants(**values)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("d", [2, 3, 7, 8, 12, 16, 24, 40, 64, 88, 128])
def test_every_order_of_parts_is_permuted_and_permuted_back(d: int) -> None:
    """d in one part or in several, of which one to eight are neighbours; several i; rows of outputs and inputs that
    differ.
    """
    each = kernel(pattern=(2, 24, 40, d))
    check_exact(source_of("wgmma_permuted", each), 5, in_emulator())


def test_what_follows_a_product_that_is_permuted_costs_one_more_rounding() -> None:
    """The sums are rounded before bias, activation and residual, and the result is."""
    each = replace(kernel(pattern=(2, 24, 40, 8)), epilogue=Epilogue(True, "none", True))
    problem = make_problem(each, 300)
    once, twice = (
        compare(problem, multiply(problem, source_of(name, each), in_emulator()))[0]
        for name in ("wgmma_registers", "wgmma_permuted")
    )
    assert once < twice < 1.5 * once
