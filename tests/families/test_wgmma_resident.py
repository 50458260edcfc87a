"""Hopper's kernels with X from registers, where X stays in shared memory for several tiles of outputs."""

from dataclasses import replace

import numpy as np
import pytest

from ksgen.emit.render import Source
from ksgen.errors import ConstantsError
from ksgen.families import check, cuda_limits, family_named
from ksgen.families.wgmma.registers import RegistersConstants
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from tests.compile_matrix import SERIALISED
from tests.support import sass
from tests.support.kernels import EMULATED, check_exact, check_leaks, in_emulator, source_of
from tests.support.kernels import check as check_result

pytestmark = pytest.mark.slow

GPU = cuda_limits("sm_90a")
REGISTERS = family_named("wgmma_registers")
FLAT = RegistersConstants(64, 16, 32, 4, 1, 1, 2, 0, resident=1)
SLAB = RegistersConstants(64, 24, 16, 16, 1, 2, 3, 0, resident=2)


def kernel(
    precision: str = "float16", pattern: tuple[int, ...] = (2, 48, 64, 4), epilogue: Epilogue | None = None
) -> KernelSpec:
    return KernelSpec(Pattern(*pattern), precision, "bsf", epilogue or Epilogue())


def source(
    precision: str, pattern: tuple[int, ...], constants: RegistersConstants, epilogue: Epilogue | None = None
) -> Source:
    each = kernel(precision, pattern, epilogue)
    check(REGISTERS, each, constants, GPU)
    return source_of("wgmma_registers", each, constants)


# ---- rules, resources and the space


def test_resident_x_is_shared_with_no_other_block() -> None:
    check(REGISTERS, kernel(), replace(FLAT, cluster_batch=2), GPU)
    with pytest.raises(ConstantsError, match="cluster_out=2 must be 1 where X is resident=1; try 1"):
        check(REGISTERS, kernel(), replace(FLAT, tile_out=24, cluster_out=2), GPU)


@pytest.mark.parametrize("changes", [{"resident": -1}, {"resident": 3}, {"tile_out": 48}])
def test_x_is_resident_where_outputs_take_several_tiles(changes: dict[str, int]) -> None:
    for resident in (0, 1, 2):
        check(REGISTERS, kernel(), replace(FLAT, resident=resident), GPU)
    with pytest.raises(
        ConstantsError,
        match=r"resident=(-1|1|3) must be 0, or in bsf 1 or 2 where outputs take several tiles; try [02]",
    ):
        check(REGISTERS, kernel(), replace(FLAT, **changes), GPU)


def test_x_is_resident_in_batch_size_first_alone() -> None:
    each, constants = KernelSpec(Pattern(2, 48, 64, 4), "tf32", "bsl"), RegistersConstants(128, 16, 32, 1, 1, 1, 2, 0)
    check(REGISTERS, each, constants, GPU)
    with pytest.raises(ConstantsError, match=r"resident=1 must be 0, or in bsf 1 or 2 .*; try 0$"):
        check(REGISTERS, each, replace(constants, resident=1), GPU)


def test_resident_tiles_fit_shared_memory() -> None:
    each, wide = kernel(pattern=(1, 48, 192, 64)), replace(SLAB, tile_d=8, groups_d=1)
    check(REGISTERS, each, replace(wide, resident=1), GPU)
    with pytest.raises(ConstantsError, match=r"needs .* bytes of shared memory, the device has"):
        check(REGISTERS, each, wide, GPU)


@pytest.mark.parametrize("resident", [1, 2])
def test_shared_memory_holds_whole_tiles_of_x_and_stages_of_weights(resident: int) -> None:
    block = REGISTERS.shape(kernel(pattern=(1, 48, 70, 16)), replace(SLAB, resident=resident))  # five stages of inputs
    assert block.stage_bytes == block.w_bytes == 16 * 24 * 32  # already a multiple of 1024
    assert block.x_start == 3 * block.stage_bytes + 1024  # the stages' barriers lie between
    assert block.x_barriers == block.x_start + resident * 64 * (5 * 16) * 16 * 2
    assert block.shared_bytes == block.x_barriers + 8 * resident * (5 + 1)


def test_a_block_computes_all_outputs_of_its_x() -> None:
    each, streaming = kernel(pattern=(2, 40, 64, 64)), replace(SLAB, resident=0)
    for constants, blocks, times in ((SLAB, 2 * 4 * 4, 1), (streaming, 2 * 4 * 4 * 2, 2)):
        assert REGISTERS.geometry(each, constants, 250).grid == blocks
        x, w, y = (
            250 * each.pattern.in_features * 2,
            4 * each.pattern.in_features * 48 * 2,
            250 * each.pattern.out_features * 2,
        )
        work, block = REGISTERS.work(each, constants, 250), REGISTERS.shape(each, constants)
        assert (block.in_rows, block.in_pieces) == (88 / 32, 2 * 128 * 2 / 32)
        assert (work.blocks, work.cache_bytes) == (blocks, times * x + w + y)
        assert work.scattered_bytes == times * x * (88 / 32 - 1) + y * 15
        staged = 4 * 64 * each.pattern.in_features * 2  # whole tiles
        assert work.shared_bytes == times * staged + 2 * staged + 2 * w  # written, and read for each tile of outputs
        assert work.multiply_adds == 4 * 64 * each.pattern.in_features * 48


def test_the_space_holds_both_schedules() -> None:
    found = list(REGISTERS.space(kernel(pattern=(1, 96, 64, 16)), GPU))
    assert {constants.resident for constants in found} == {0, 1, 2}
    assert all(constants.tile_out < 96 for constants in found if constants.resident)
    assert {(each.cluster_batch, each.cluster_out) for each in found if each.resident} == {
        (1, 1),
        (2, 1),
        (4, 1),
        (8, 1),
    }
    assert REGISTERS.default(kernel(pattern=(1, 96, 64, 16)), GPU) in found


# ---- texts


CASES = {  # ragged outputs, inputs and batch; an odd and an even number of X tiles for each block
    "flat": ("float16", (2, 40, 40, 4), FLAT),
    "flat, two tiles": ("bfloat16", (1, 40, 72, 3), replace(FLAT, tile_d=3, tile_in=64, resident=2)),
    "flat, rows swapped": ("float16", (1, 24, 72, 1), replace(FLAT, tile_batch=128, tile_d=1, tile_in=64, resident=2)),
    "flat, three warpgroups": ("tf32", (1, 40, 40, 3), replace(FLAT, tile_batch=192, tile_d=3, groups_batch=3)),
    "slab": ("float16", (1, 60, 40, 40), replace(SLAB, resident=1)),
    "slab, two tiles": ("bfloat16", (1, 60, 24, 32), SLAB),
    "slab, one stage of inputs": ("float16", (2, 60, 14, 16), SLAB),
    "slab of 32 bits": ("tf32", (1, 60, 40, 12), replace(SLAB, tile_d=4, groups_d=1, tile_in=8)),
    "promoted": ("tf32x3", (1, 40, 72, 4), replace(FLAT, promote=32, resident=2)),
    "promoted slab": ("tf32x3", (1, 40, 72, 16), RegistersConstants(64, 16, 16, 8, 1, 2, 2, 32, resident=1)),
    "flat in a cluster": ("float16", (2, 40, 40, 4), replace(FLAT, cluster_batch=2)),
    "slab in a cluster": ("bfloat16", (1, 60, 24, 32), replace(SLAB, cluster_batch=4)),
    "two parts of 16 bits": ("fp16x3", (1, 40, 40, 8), RegistersConstants(64, 16, 16, 8, 1, 2, 2, 64, resident=2)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_results_with_resident_x(case: str) -> None:
    text = source(*CASES[case])
    constants, pattern = text.constants, text.kernel.pattern
    batch = (
        6 * EMULATED * constants.cluster_batch * constants.tile_batch * constants.tile_d // (pattern.a * pattern.d) - 10
    )
    blocks = max(EMULATED, constants.cluster_batch)
    # each slot is filled again
    assert REGISTERS.geometry(text.kernel, constants, batch).grid > 2 * blocks * constants.resident
    for each in (batch, 33):
        check_exact(text, each, in_emulator())
    check_result(text, 33, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["flat", "slab, two tiles", "promoted", "flat in a cluster"])
def test_resident_x_with_no_race_in_any_order_and_without_leaks(case: str) -> None:
    precision, pattern, constants = CASES[case]
    text = source(precision, pattern, constants, Epilogue(True, "gelu", True))
    batch = 5 * constants.tile_batch + 1
    first, *others = (check_result(text, batch, in_emulator(order=order)) for order in ("forward", "reverse", 5))
    for y in others:
        np.testing.assert_array_equal(y, first)
    check_result(text, batch, in_emulator(sanitize="race"))
    check_result(text, batch, in_emulator(sanitize="address"))
    check_leaks(source(precision, pattern, constants), batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "pattern", "constants"),
    [  # the widest tiles of outputs that the rules allow
        ("float16", (1, 192, 48, 64), RegistersConstants(64, 40, 16, 16, 1, 2, 4, 0, resident=1)),
        ("bfloat16", (1, 192, 32, 64), RegistersConstants(128, 40, 16, 8, 2, 1, 3, 0, resident=2)),
        ("float16", (1, 384, 96, 4), RegistersConstants(128, 96, 16, 4, 2, 1, 8, 0, resident=1)),
        ("tf32x3", (1, 192, 64, 3), RegistersConstants(128, 48, 32, 3, 2, 1, 3, 32, resident=1)),
        ("bfloat16", (1, 192, 32, 64), RegistersConstants(128, 40, 16, 8, 2, 1, 3, 0, resident=2, cluster_batch=4)),
        ("float16", (1, 384, 96, 4), RegistersConstants(128, 96, 16, 4, 2, 1, 8, 0, resident=1, cluster_batch=2)),
        ("tf32x3", (1, 192, 64, 3), RegistersConstants(128, 48, 32, 3, 2, 1, 3, 32, resident=1, cluster_batch=2)),
    ],
)
def test_resident_x_leaves_registers_for_the_sums(
    precision: str, pattern: tuple[int, ...], constants: RegistersConstants
) -> None:
    text = source(precision, pattern, constants)
    binary = sass.compiled(text.text, text.entry, "sm_90a")
    assert binary.resources.spill_bytes == 0
    assert not any(code in binary.provenance.get("notes", "") for code in SERIALISED)
