"""Hopper's kernels with X from registers, whose warpgroups along j join their chunks of Y into whole sectors."""

from dataclasses import replace

import numpy as np
import pytest

from ksgen.emit.render import Source
from ksgen.errors import ConstantsError
from ksgen.families import check, family_named
from ksgen.families.wgmma.registers import RegistersConstants
from ksgen.spec import Epilogue, KernelSpec
from tests.compile_matrix import SERIALISED
from tests.emulator import SimtError
from tests.support import sass
from tests.support.counting import compared, count_kernel
from tests.support.kernels import PLAIN, check_exact, check_leaks, in_emulator, kernel_of, source_of
from tests.support.kernels import check as check_result
from tests.support.wgmma_kernels import GPU

REGISTERS = family_named("wgmma_registers")
SLAB = RegistersConstants(64, 24, 16, 16, 1, 2, 3, 0, join_d=2)
FULL = Epilogue(True, "gelu", True)
CASES = {  # ragged outputs and inputs, several tiles along j
    "slab": ("bfloat16", (1, 20, 40, 64), SLAB),
    "flat": ("float16", (2, 20, 24, 16), replace(SLAB, tile_out=8)),
    "two instructions along the batch": (
        "bfloat16",
        (1, 20, 24, 16),
        replace(SLAB, tile_batch=128, tile_out=8, stages=2),
    ),
    "three warpgroups": ("bfloat16", (1, 20, 24, 24), replace(SLAB, tile_out=16, tile_d=24, groups_d=3, join_d=3)),
    "32 bits": ("tf32", (1, 20, 24, 16), replace(SLAB, tile_out=16, tile_in=8, tile_d=8)),
    "promoted": ("tf32x3", (1, 20, 40, 16), replace(SLAB, tile_out=16, tile_d=8, promote=32)),
    "two parts of 16 bits": ("fp16x3", (1, 20, 40, 16), replace(SLAB, tile_out=16, tile_d=8, promote=64)),
    "resident": ("float16", (1, 60, 24, 32), replace(SLAB, resident=1)),
    "in a cluster": ("bfloat16", (1, 48, 24, 32), replace(SLAB, cluster_batch=2, cluster_out=2)),
}


def source(case: str, epilogue: Epilogue = PLAIN) -> Source:
    precision, pattern, constants = CASES[case]
    each = kernel_of(pattern, precision, "bsf", epilogue)
    check(REGISTERS, each, constants, GPU)
    return source_of("wgmma_registers", each, constants)


def slab(d: int = 64, b: int = 20, layout: str = "bsf") -> KernelSpec:
    return kernel_of((1, b, 40, d), "bfloat16", layout)


@pytest.mark.parametrize(
    ("d", "changes"),
    [
        (64, {"join_d": 3}),
        (64, {"groups_d": 1, "tile_d": 8}),  # one warpgroup has nothing to join with
        (64, {"tile_d": 32, "tile_out": 8}),  # two chunks per lane and output
        (40, {}),  # j 16 to 31 begin in the middle of a sector
    ],
)
def test_warpgroups_join_chunks_that_fill_sectors(d: int, changes: dict[str, int]) -> None:
    check(REGISTERS, slab(), SLAB, GPU)
    check(REGISTERS, slab(d), replace(SLAB, **changes | {"join_d": 1}), GPU)
    with pytest.raises(ConstantsError, match=r"join_d=[23] must be 1, or groups_d=[12] if its .* sectors; try [12]"):
        check(REGISTERS, slab(d), replace(SLAB, **changes), GPU)


def test_runs_of_three_chunks_share_a_sector_with_another_run() -> None:
    _, pattern, constants = CASES["three warpgroups"]
    assert REGISTERS.shape(kernel_of(pattern, "bfloat16", "bsf"), constants).in_pieces == pytest.approx(64 / 48)


def test_chunks_are_joined_next_to_stages_and_cost_no_pieces() -> None:
    joined, apart = (REGISTERS.shape(slab(), each) for each in (SLAB, replace(SLAB, join_d=1)))
    assert (joined.in_pieces, apart.in_pieces) == (1, 2 * 128 * 2 / 32)
    # four warps of two warpgroups, each lane with one output in two rows
    assert joined.y_bytes == joined.shared_bytes - apart.shared_bytes == 4 * 2 * 32 * 2 * 16
    work, before = (REGISTERS.work(slab(), each.constants, 250) for each in (joined, apart))
    y = 4 * 4 * 64 * 24 * 16 * 2  # tiles, rows of the batch, outputs, j, bytes
    assert work.shared_bytes - before.shared_bytes == 2 * y
    assert before.scattered_bytes - work.scattered_bytes == 15 * 250 * 20 * 64 * 2
    assert work._replace(shared_bytes=0, scattered_bytes=0) == before._replace(shared_bytes=0, scattered_bytes=0)


def test_a_default_joins_chunks_where_it_may_and_a_search_tries_both() -> None:
    assert REGISTERS.default(slab(b=96), GPU).join_d == 2
    assert REGISTERS.default(slab(4, b=96), GPU).join_d == 1
    assert {each.join_d for each in REGISTERS.space(slab(b=96), GPU) if each.groups_d == 2} == {1, 2}


@pytest.mark.parametrize(("join_d", "sectors"), [(1, 2), (2, 1)])
@pytest.mark.parametrize("epilogue", [PLAIN, Epilogue(residual=True)])
def test_sectors_of_y_are_stored_once(join_d: int, sectors: int, epilogue: Epilogue) -> None:
    """Bytes and cycles of shared memory are those of the cost model: no bank has a conflict."""
    kernel = kernel_of((1, 24, 16, 32), "bfloat16", "bsf", epilogue)
    text = source_of("wgmma_registers", kernel, replace(SLAB, join_d=join_d))
    own, around = count_kernel(text, 64)
    stored = own.global_["store"]
    assert stored.sectors * 32 == sectors * stored.bytes == sectors * 64 * 24 * 32 * 2
    for name, (expected, counted) in compared(text, 64, own, around).items():
        assert expected == pytest.approx(counted, rel=0.02), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES)
def test_results_of_joined_chunks(case: str) -> None:
    text = source(case)
    for batch in (33, 3 * text.constants.tile_batch + 10):
        check_exact(text, batch, in_emulator())
    check_result(source(case, FULL), 2 * text.constants.tile_batch + 1, in_emulator())


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("case", ["slab", "three warpgroups", "promoted", "resident", "in a cluster"])
def test_joined_chunks_have_no_race_in_any_order_and_no_leaks(case: str) -> None:
    text = source(case, FULL)
    batch = 5 * text.constants.tile_batch + 1
    first, *others = (check_result(text, batch, in_emulator(order=order)) for order in ("forward", "reverse", 5))
    for y in others:
        np.testing.assert_array_equal(y, first)
    check_result(text, batch, in_emulator(sanitize="race"))
    check_result(text, batch, in_emulator(sanitize="address"))
    check_leaks(source(case), batch, in_emulator())


@pytest.mark.parametrize(
    ("was", "becomes", "epilogue"),
    [
        ("\n            wait_for_chunks(warps);", "", FULL),  # until chunks are there
        ("\n                wait_for_chunks(warps);", "", FULL),  # until the residual is there
        ("(2 * u + h)", "(2 * u)", PLAIN),  # until chunks are read
    ],
)
def test_what_joins_chunks_is_missed(was: str, becomes: str, epilogue: Epilogue) -> None:
    text = source("flat", epilogue)
    assert text.text.count(was) == 1
    with pytest.raises(SimtError, match="race"):
        check_result(replace(text, text=text.text.replace(was, becomes)), 130, in_emulator(sanitize="race"))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "pattern", "constants"),
    [  # the widest tiles of outputs that the rules allow
        ("bfloat16", (1, 192, 48, 64), replace(SLAB, tile_out=40, stages=4)),
        ("float16", (1, 192, 48, 64), replace(SLAB, tile_out=40, stages=4, resident=1)),
        ("tf32x3", (1, 192, 64, 16), replace(SLAB, tile_out=16, tile_d=8, promote=32)),
    ],
)
@pytest.mark.parametrize("epilogue", [PLAIN, FULL])
def test_joined_chunks_leave_registers_for_the_sums(
    precision: str, pattern: tuple[int, ...], constants: RegistersConstants, epilogue: Epilogue
) -> None:
    """Chunks pass through shared memory 16 bytes at a time."""
    sass.needed_disassembler()
    kernel = kernel_of(pattern, precision, "bsf", epilogue)
    check(REGISTERS, kernel, constants, GPU)
    text = source_of("wgmma_registers", kernel, constants)
    binary = sass.compiled(text.text, text.entry, "sm_90a")
    assert binary.resources.spill_bytes == 0
    assert not any(code in binary.provenance.get("notes", "") for code in SERIALISED)
    counts = sass.instructions(binary.data)[text.entry]
    chunks = constants.tile_out // 4 * 2
    assert sass.count(counts, "STG.128") == chunks
    assert sass.count(counts, "STS.128") == sass.count(counts, "STS") == chunks * (2 if epilogue.residual else 1)
