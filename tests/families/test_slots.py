"""Issue slots: the table's rows, and which kernels they bound."""

from dataclasses import replace

import pytest

from ksgen.families import FAMILIES, cuda_limits, slots
from ksgen.families import expected as model
from ksgen.families.mma.shape import MmaConstants, MmaTiling
from ksgen.pattern import Pattern
from ksgen.spec import ACTIVATIONS, Epilogue, KernelSpec


def test_issue_slots_bound_plain_multiply_adds_where_one_takes_a_slot() -> None:
    """An A100 has half as many lanes for them, so that other instructions are issued meanwhile."""
    kernel, batch = KernelSpec(Pattern(1, 768, 192, 2)), model.LARGE
    for target, is_bound in (("sm_80", False), ("sm_90a", True)):
        own, limits = FAMILIES["simt"], cuda_limits(target)
        speed, constants = model.speed_of(own, kernel, limits), own.default(kernel, limits)
        assert speed is not None
        work, warps = own.work(kernel, constants, batch), own.geometry(kernel, constants, batch).block // 32
        issued = slots.instructions("simt", kernel, target, work, warps, batch)
        per_product = 1.07 + 30 * work.stages * warps / work.products + 7.1 * batch * 768 * 2 / 32 / work.products
        assert issued == pytest.approx(per_product * work.products)
        assert 1.1 < per_product < 1.2
        issue_s = issued / speed.multiprocessors / speed.instructions_per_s
        found = model.terms_of(speed, own, kernel, constants, batch)
        assert found is not None
        assert (found.inside == pytest.approx(issue_s)) is is_bound
        assert found.inside >= issue_s


def test_reads_of_operands_issue_more_instructions_if_a_warp_has_fewer_products_for_each() -> None:
    """Twice the columns per warp read and split each weight for twice the products."""
    kernel, family = KernelSpec(Pattern(1, 512, 512, 2), "tf32x3"), FAMILIES["mma"]
    few = MmaConstants(32, 64, 16, 2, 2, 2, 3, 16, 1)
    many = few.changed(tile_batch=64)
    per_product = []
    for constants in (few, many):
        work = family.work(kernel, constants, 64 * 1024)
        issued = slots.issued_by("mma", kernel, "sm_80")
        assert issued is not None
        per_product.append(issued.per_read * work.reads / work.products)
        tiling = MmaTiling.of(kernel, constants)
        # per K step of 8 and product of its three: two words of X per column tile, and four of the weights per row tile
        assert 12 * work.reads == work.products * (2 / tiling.row_tiles + 4 / tiling.column_tiles)
    assert per_product[1] == pytest.approx(2 / 3 * per_product[0])


def test_rows_of_the_table_of_issued_instructions() -> None:
    kernel = KernelSpec(Pattern(1, 768, 192, 2))
    own, pairs = (slots.issued_by("simt", kernel, target) for target in ("sm_90a", "sm_100"))
    assert own is not None
    assert pairs == replace(own, per_product=own.per_product - 0.5)  # one instruction is two products
    added = slots.issued_by("simt", replace(kernel, epilogue=Epilogue(True, "gelu", True)), "sm_90a")
    assert added == replace(own, per_output=pytest.approx(own.per_output + 1.5 + 27 + 2.4))
    assert set(slots.OF_STEP) == {"bias", "residual", *ACTIVATIONS} - {"none"}
    # which it multiplies as float32
    assert slots.issued_by("simt", replace(kernel, precision="tf32x3"), "sm_90a") == own
    half = [slots.issued_by("mma", replace(kernel, precision=each), "sm_80") for each in ("float16", "bfloat16")]
    assert half[0] == half[1]
    uncounted = replace(kernel, precision="tf32")
    assert slots.issued_by("mma", uncounted, "sm_80") is None
    assert (
        slots.instructions(
            "mma",
            uncounted,
            "sm_80",
            FAMILIES["mma"].work(uncounted, FAMILIES["mma"].default(uncounted, cuda_limits("sm_90a")), 1),
            4,
            1,
        )
        == 0
    )
