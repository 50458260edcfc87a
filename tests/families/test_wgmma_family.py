"""What each kind of warpgroup kernels serves and takes."""

from dataclasses import replace
from itertools import product

import pytest

from ksgen.families import FAMILIES, check, cuda_limits, family_named
from ksgen.spec import LAYOUTS, PRECISIONS
from tests.support.wgmma_kernels import GPU, kernel

SHARED, REGISTERS, PERMUTED = map(family_named, ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))


def test_what_each_kind_serves() -> None:
    def served(precision: str, layout: str, pattern: tuple[int, ...]) -> list[str]:
        own = kernel(precision, layout, pattern)
        found = [
            x_from for x_from, family in (("shared", SHARED), ("registers", REGISTERS)) if family.supports(own, GPU)
        ]
        assert FAMILIES["wgmma"].supports(own, GPU) == bool(found)
        assert {each.x_from for each in FAMILIES["wgmma"].defaults(own, GPU)} >= set(found)
        return found

    assert served("float16", "bsl", (2, 5, 3, 7)) == ["shared"]
    assert served("float16", "bsf", (2, 5, 8, 1)) == ["shared", "registers"]
    assert served("float16", "bsf", (2, 5, 8, 3)) == ["registers"]
    assert served("float16", "bsf", (2, 5, 7, 3)) == []  # rows of 42 bytes
    assert served("float16", "bsf", (2, 5, 8, 13)) == []  # too many j to sum side by side, and no whole chunks of them
    assert served("tf32", "bsf", (2, 5, 8, 11)) == ["registers"]  # by one warpgroup
    assert served("tf32x3", "bsf", (2, 5, 48, 11)) == []  # two parts of 11 j exceed even its registers
    assert served("tf32x3", "bsl", (2, 5, 17, 7)) == ["registers"]
    assert served("tf32x3", "bsl", (2, 5, 16, 7)) == []  # too few inputs for operands in parts
    assert served("tf32x3", "bsf", (2, 5, 40, 1)) == []  # a stage is longer than sums may go without promotion
    assert served("fp16x3", "bsl", (2, 5, 3, 7)) == served("float32", "bsf", (2, 8, 8, 4)) == []
    assert not any(
        family.supports(kernel(), cuda_limits(target))
        for family in (SHARED, REGISTERS)
        for target in ("sm_80", "sm_100a")
    )
    gradients = [replace(kernel(layout=layout), job="gradient") for layout in LAYOUTS]
    assert not any(family.supports(each, GPU) for family in (SHARED, REGISTERS) for each in gradients)


@pytest.mark.slow
def test_a_kernel_that_is_served_has_a_default_and_something_to_search() -> None:
    kinds = [(p, layout) for p in PRECISIONS for layout in LAYOUTS]
    for (precision, layout), d, b, c in product(kinds, (1, 2, 3, 4, 5, 7, 8, 12, 16, 17), (1, 40), (8, 1000)):
        each = kernel(precision, layout, (2, b, c, d))
        for family in (SHARED, REGISTERS, PERMUTED):
            if family.supports(each, GPU):
                check(family, each, family.default(each, GPU), GPU)
                assert next(iter(family.space(each, GPU)), None), each


def test_batches_and_places_that_maps_cannot_describe_are_not_taken() -> None:
    for precision, whole in (("float16", 8), ("tf32", 4)):
        each, family = kernel(precision, "bsl"), SHARED if precision == "float16" else REGISTERS
        assert [batch for batch in range(1, 17) if family.takes(each, batch, True)] == list(range(whole, 17, whole))
        assert not family.takes(each, 16, aligned=False)
        assert not family.takes(each, 2**31, aligned=True)
    narrow = kernel(layout="bsl", pattern=(1, 8, 8, 1))
    assert SHARED.takes(narrow, 2**31 - 2**16, aligned=True)
    # the last tiles' coordinates may be no numbers of 32 bits
    assert not SHARED.takes(narrow, 2**31 - 2**15, aligned=True)
    assert REGISTERS.takes(kernel(), 7, aligned=True)
    assert not REGISTERS.takes(kernel(), 7, aligned=False)
    permuted = kernel(pattern=(2, 48, 64, 3))
    assert PERMUTED.takes(permuted, 7, aligned=True)
    assert not PERMUTED.takes(permuted, 7, aligned=False)  # X and Y are moved in chunks
    wide = kernel("tf32", "bsl", (1, 2**9, 2**9, 2**9))
    assert REGISTERS.takes(wide, 2**19, True)
    assert not REGISTERS.takes(wide, 2**20, True)  # from one i to the next are 2^40 bytes
