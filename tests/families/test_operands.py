"""What families of tensor-core kernels share: what an instruction multiplies, and how lanes read X as its fragment."""

from types import SimpleNamespace

import pytest

from ksgen.errors import ConstantsError
from ksgen.families import cuda_limits
from ksgen.families.operands import FREE_OF_CONFLICTS, TensorTile, is_precise, tensor_operand, wavefronts
from ksgen.families.tiles import WARP
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec


def test_bank_conflicts_are_counted_by_eight_lanes() -> None:
    assert wavefronts([16 * lane for lane in range(WARP)]) == FREE_OF_CONFLICTS
    assert wavefronts([0] * WARP) == FREE_OF_CONFLICTS  # the same chunk is read once for all
    assert wavefronts([128 * lane for lane in range(WARP)]) == WARP  # all in one bank
    assert wavefronts([128 * (lane % 2) + 16 * (lane // 2) for lane in range(WARP)]) == 2 * FREE_OF_CONFLICTS


def test_a_precision_without_tensor_cores_is_named_with_those_that_have_them() -> None:
    with pytest.raises(
        ConstantsError, match=r"^ks_1x8x8x1_float64_bsf: tensor cores have no products in float64; accepted: float16, "
    ):
        tensor_operand(KernelSpec(Pattern(1, 8, 8, 1), "float64"))


def test_operands_in_parts_need_enough_inputs() -> None:
    few, some, enough = (KernelSpec(Pattern(1, 8, c, 1), "tf32x3") for c in (1, 27, 64))
    old, new = cuda_limits("sm_80"), cuda_limits("sm_90a")
    assert not is_precise(few, new)
    assert is_precise(some, new)
    assert not is_precise(some, old)  # whose sums keep a bit less
    assert is_precise(enough, old)
    assert is_precise(KernelSpec(Pattern(1, 8, 1, 1), "float16"), old)


@pytest.mark.parametrize("precision", ["float16", "tf32", "tf32x3"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("tile_d", [1, 2, 3, 4, 6, 8])
def test_groups_of_chunks_hold_whole_inputs_and_the_lanes_order_whole_instructions(
    precision: str, layout: str, tile_d: int
) -> None:
    tile = TensorTile()
    tile.kernel = KernelSpec(Pattern(1, 64, 64, 24), precision, layout)
    tile.constants = SimpleNamespace(tile_d=tile_d)
    assert tile.vector * tile.kernel.item_bytes == 16
    assert tile.lane_inputs * 4 == tile.k_step
    assert tile.super_in % tile.k_step == 0
    if layout == "bsf":
        assert tile.group_inputs * tile_d == tile.group_chunks * tile.vector
        assert tile.super_in % (4 * tile.group_inputs) == 0
    else:
        assert (tile.group_chunks, tile.group_inputs, tile.super_steps, tile.super_groups) == (1, 1, 1, 1)
