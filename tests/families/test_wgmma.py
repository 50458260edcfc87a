"""What is special to Hopper's families. What holds of every family's kernels is in test_families.py."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import TensorMap, check, family_named
from ksgen.families.wgmma.registers import RegistersConstants
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.measure.verify import compare, make_problem
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec, paper_patterns
from tests.support.kernels import check as check_result
from tests.support.kernels import check_exact, in_emulator, multiply, source_of
from tests.support.wgmma_kernels import GPU, kernel, text_of

SHARED, REGISTERS, PERMUTED = map(family_named, ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))
PLAIN = SharedConstants(256, 64, 64, 2, 3)
FLAT = RegistersConstants(128, 48, 32, 4, 2, 1, 3, 0)
SLAB = RegistersConstants(64, 32, 16, 16, 1, 2, 3, 0)


def test_rules_of_a_layout() -> None:
    in_bsl = replace(FLAT, tile_d=1, tile_batch=256)
    check(REGISTERS, kernel("tf32", "bsl"), in_bsl, GPU)
    for changes, says in (
        ({"tile_d": 4}, "tile_d=4 must be 1 in bsl.*; try 1$"),
        ({"tile_batch": 128}, r"tile_batch=128 must be 128 \* groups_batch in bsl = 256; try 256$"),
    ):
        with pytest.raises(ConstantsError, match=says):
            check(REGISTERS, kernel("tf32", "bsl"), replace(in_bsl, **changes), GPU)
    with pytest.raises(ConstantsError, match="of 64 in bsf"):
        check(SHARED, kernel(pattern=(2, 48, 64, 1)), replace(PLAIN, tile_in=48), GPU)
    with pytest.raises(ConstantsError, match=r"needs .* bytes of shared memory"):
        check(SHARED, kernel(layout="bsl"), replace(PLAIN, stages=8), GPU)


def conditions(described: TensorMap) -> bool:
    """What the driver asks of a map, with rows of boxes exactly as long as their swizzle's span."""
    row = described.box[0] * described.item_bytes
    return (
        all(1 <= size <= 2**32 for size in described.sizes)
        and all(stride % 16 == 0 and stride < 2**40 for stride in described.strides)
        and all(1 <= box <= 256 for box in described.box)
        and row % 16 == 0
        and described.swizzle in (0, row)
        and (described.swizzle or row == 16)
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [87, pytest.param(29, marks=pytest.mark.second)])
def test_defaults_and_maps_hold_for_the_paper(step: int) -> None:
    odd = [
        Pattern(3, 40, 8, 24),
        Pattern(1, 17, 32, 5),
        Pattern(2, 5, 1016, 1),
        Pattern(1, 3, 8, 12),
        Pattern(1, 3, 8, 40),
    ]
    for pattern, precision, layout in product([*paper_patterns()[::step], *odd], PRECISIONS, LAYOUTS):
        each = KernelSpec(pattern, precision, layout)
        for family in (SHARED, REGISTERS, PERMUTED):
            if family.supports(each, GPU):
                constants = family.default(each, GPU)
                check(family, each, constants, GPU)
                assert all(map(conditions, family.maps(each, constants, 25088)))


def test_maps_end_with_their_i_so_that_boxes_read_zeros_beyond_its_inputs() -> None:
    (flat,) = REGISTERS.maps(kernel(), FLAT, 100)
    assert (flat.sizes, flat.strides, flat.box) == ((256, 2, 100), (512, 1024), (64, 1, 128))
    (slab,) = REGISTERS.maps(kernel(pattern=(2, 48, 64, 32)), SLAB, 100)
    assert (slab.sizes, slab.strides, slab.box, slab.swizzle) == (
        (32, 64, 2, 100),
        (64, 4096, 8192),
        (16, 4, 1, 64),
        32,
    )
    x, y = SHARED.maps(kernel(layout="bsl"), PLAIN, 128)
    assert (x.operand, x.sizes, x.strides, x.box) == ("x", (128, 4, 64, 2), (256, 1024, 65536), (64, 1, 64, 1))
    assert (y.operand, y.sizes, y.strides, y.box) == ("y", (128, 4, 48, 2), (256, 1024, 49152), (64, 1, 64, 1))


def test_a_family_asked_for_by_name_is_rendered_for_the_gpus_that_it_serves() -> None:
    source = render(kernel(pattern=(1, 128, 128, 3)), family="wgmma_registers")
    assert source.constants == REGISTERS.default(source.kernel, GPU)
    assert source.entry != source.kernel.name


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "pattern", "constants"),
    [
        ("float16", (1, 20, 24, 40), replace(SLAB, tile_out=24)),  # the last j are beyond d
        ("float16", (1, 20, 24, 64), RegistersConstants(64, 8, 16, 32, 1, 2, 2, 0)),  # 64-byte runs
        ("tf32x3", (1, 20, 72, 12), RegistersConstants(64, 16, 8, 12, 1, 3, 2, 32)),  # all j of a row, a third each
        # two instructions along the batch
        ("bfloat16", (1, 20, 72, 1), RegistersConstants(256, 24, 64, 1, 2, 1, 2, 0)),
        ("float16", (1, 20, 72, 2), RegistersConstants(64, 24, 64, 2, 1, 1, 3, 0)),  # registers as launched
    ],
)
def test_constants_that_no_default_has(precision: str, pattern: tuple[int, ...], constants: RegistersConstants) -> None:
    source = text_of(REGISTERS, kernel(precision, pattern=pattern), constants)
    check_result(source, 300, in_emulator())
    check_exact(source, 65, in_emulator())


@pytest.mark.parametrize(("family", "layout"), [(SHARED, "bsl"), (REGISTERS, "bsf")])
def test_every_thread_waits_for_the_grid_before_and_the_next_may_begin_after_the_last_load(
    family: Any, layout: str
) -> None:
    text = render(replace(kernel(layout=layout), epilogue=Epilogue(bias=True, residual=True)), family=family.name).text
    entry, copying = (
        text[text.index("\nENTRY(THREADS, 1)") : text.index("\nENTRY(PACK_THREADS")],
        text[text.index("void copy_tiles") :],
    )
    before, after = entry.split("    wait_for_previous_grid();")  # in no branch
    assert "prepare_barriers();" in before
    assert "prefetch_map(x);" in before
    assert "return;" not in before
    assert all(word in after for word in ("copy_all(x", "store_tile("))
    assert copying.index("copy_bulk(") < copying.index("    allow_next_grid();\n    leave(ring);\n}")
    assert not re.search(r"RESTRICT (bias|residual)|__ldg", text)  # which nvcc would load before the wait
    assert text.count("wait_for_previous_grid();") == text.count("    allow_next_grid();") == 1


@pytest.mark.parametrize("c", [192, 1024])
def test_error_of_float32_grade_sums(c: int) -> None:
    """The error is that of the warp-wide family: at most twice that of a float32 sum, whatever c is."""
    each = kernel("tf32x3", pattern=(1, 16, c, 1))
    problem = make_problem(each, 128)
    error, _ = compare(problem, multiply(problem, source_of("wgmma_registers", each), in_emulator()))
    assert 1e-7 < error < 3.5e-7
