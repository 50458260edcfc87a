"""What kernels by matrix tiles move and multiply, and the cycles that the model gives them."""

from dataclasses import replace
from typing import Any

from ksgen.families.amx.chain import DOT_MULTIPLY_ADDS
from ksgen.families.amx.shape import AmxConstants
from tests.families.test_vector import kernel_of
from tests.support.amx_kernels import FAMILY


def test_work_counts_products_of_tiles_and_their_padding() -> None:
    kernel, constants = kernel_of((2, 48, 64, 3), "bfloat16"), AmxConstants(64, 32, 2, 1, 1, 2)
    assert 2 * FAMILY.work(kernel, constants, 128).multiply_adds == kernel.flops(128)
    assert FAMILY.work(kernel, constants, 129).multiply_adds == FAMILY.work(kernel, constants, 144).multiply_adds
    assert FAMILY.work(kernel, constants, 16).multiply_adds == 2 * 3 * 3 * 2 * DOT_MULTIPLY_ADDS
    assert (
        FAMILY.work(replace(kernel, precision="bf16x6"), constants, 128).multiply_adds
        == 6 * FAMILY.work(kernel, constants, 128).multiply_adds
    )
    ragged = kernel_of((2, 33, 33, 3), "bfloat16")
    assert (
        FAMILY.work(ragged, constants, 128).multiply_adds == FAMILY.work(kernel, constants, 128).multiply_adds
    )  # of three tiles and two steps
    assert FAMILY.work(kernel, constants, 128).memory_bytes == kernel.bytes(128)  # weights as many as tiles hold
    assert FAMILY.work(kernel, replace(constants, streaming=0), 128).memory_bytes > kernel.bytes(128)


def test_more_products_take_more_cycles() -> None:
    def cycles(precision: str, shape: tuple[int, int, int, int] = (1, 768, 192, 2), **changes: Any) -> float:
        kernel = kernel_of(shape, precision)
        return FAMILY.work(kernel, replace(AmxConstants(64, 64, 1, 1, 1, 2), **changes), 6144).cycles

    large = (1, 4096, 4096, 1)  # where products outweigh copies and stores, which are as many in both
    assert cycles("bf16x6", large) > 3 * cycles("bfloat16", large)
    assert cycles("bfloat16", block=32) >= cycles("bfloat16")  # weights are read twice as often
    assert cycles("bfloat16", parts=64) > cycles("bfloat16")  # a plane is copied by each
