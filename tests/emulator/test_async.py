"""What is wrong with asynchronous kernels is caught: each case of `tests/ptx` with one mistake.

What is right passes.
"""

import re
from dataclasses import replace

import numpy as np
import pytest

from tests.emulator import SimtError, TensorMap, is_installed, run_cuda
from tests.ptx.cases import Case, all_cases, render
from tests.ptx.mistakes import MISTAKES, WRONG, Mistake
from tests.ptx.mistakes.strings import STRINGS
from tests.ptx.variants import VARIANTS, Variant

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")

CASES = {case.name: case for case in all_cases()}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("mistake", "order"),
    [
        pytest.param(
            mistake, order, id=f"{mistake.name}-{order}", marks=[] if order == mistake.orders[0] else [pytest.mark.slow]
        )
        for mistake in MISTAKES
        for order in mistake.orders
    ],
)
def test_mistake_is_caught(mistake: Mistake, order: str | int) -> None:
    if not is_installed(mistake.build):
        pytest.skip(f"g++ cannot link sanitize={mistake.build!r}")
    case = CASES[mistake.case].changed(mistake.right, mistake.wrong)
    if mistake.early:
        case = replace(case, early=True)
    if mistake.also is not None:
        case = case.changed(*mistake.also)
    kind, message = emulate(case, mistake.build, order)
    assert re.fullmatch(mistake.kind, kind), message
    assert re.search(mistake.message, message) or kind == WRONG, message


@pytest.mark.parametrize("mistake", STRINGS, ids=lambda mistake: mistake.name)
def test_mistake_in_ptx_is_caught_or_harmless(mistake: Mistake) -> None:
    case = replace(CASES[mistake.case], misspelled=(mistake.right, mistake.wrong))
    for order in mistake.orders:
        kind, message = emulate(case, mistake.build, order)
        assert re.fullmatch(mistake.kind, kind), message
        assert re.search(mistake.message, message) or kind == WRONG, message


@pytest.mark.exhaustive
@pytest.mark.parametrize("order", ["forward", pytest.param("reverse", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("variant", "build"),
    [pytest.param(variant, build, id=f"{variant.name}-{build}") for variant in VARIANTS for build in variant.builds],
)
def test_right_variant_passes(variant: Variant, build: str, order: str) -> None:
    if not is_installed(build):
        pytest.skip(f"g++ cannot link sanitize={build!r}")
    assert emulate(CASES[variant.case].changed(variant.was, variant.becomes, **variant.launch), build, order) == (
        "nothing",
        "",
    )


def emulate(case: Case, build: str, order: str | int) -> tuple[str, str]:
    """What was caught, in two words."""
    try:
        case.emulate(build, order=order)
    except SimtError as error:
        return error.kind, str(error)
    except AssertionError as error:
        return WRONG, str(error)
    return "nothing", ""


LOAD = """
extern "C" __global__ void load(const __grid_constant__ TensorMap map) {
    const unsigned full = shared_address(shared_memory + 1024);
    mbarrier_init(full, 1);
    fence_mbarrier_init();
    mbarrier_arrive_expect(full, 1024);
    load_box(shared_address(shared_memory), map, full, 0, 0, 0);
    mbarrier_wait(full, 0);
}
"""
BYTES = np.zeros(4096 + 8, np.uint8)
FLOATS = BYTES[-BYTES.ctypes.data % 16 :][:4096].view(np.float32)
SIZES, STRIDES, SQUARE = (32, 4, 8), (128, 512), (32, 4, 2)


def load(
    array: np.ndarray, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int
) -> None:
    text = render(LOAD)
    run_cuda(text, "load", 1, 1, 1024 + 8, [TensorMap(array, sizes, strides, box, swizzle)])


@pytest.mark.parametrize(
    ("array", "sizes", "strides", "box", "swizzle", "says"),
    [
        (
            FLOATS,
            (4,) * 6,
            (16, 64, 256, 1024, 4096),
            (4,) * 6,
            0,
            "the number of dimensions is 6; 1 to 5 are accepted",
        ),
        (FLOATS[1:-3], (32, 4, 4), STRIDES, SQUARE, 0, "the array's address is not a multiple of 16"),
        (FLOATS, (32, 4, 0), STRIDES, SQUARE, 0, "size 2 is 0; 1 to 2^32 are accepted"),
        (FLOATS, (2**33, 4, 8), STRIDES, SQUARE, 0, "size 0 is 8589934592; 1 to 2^32"),
        (FLOATS, (-1, 4, 8), STRIDES, SQUARE, 0, "a size is -1; 0 to"),
        (FLOATS, SIZES, STRIDES, (257, 1, 1), 0, "box 0 is 257; 1 to 256 are accepted"),
        (FLOATS, SIZES, STRIDES, (32, 4, 65538), 0, "box 2 is 65538; 1 to 256 are accepted"),
        (FLOATS, SIZES, STRIDES, (32, 0, 4), 0, "box 1 is 0; 1 to 256 are accepted"),
        (FLOATS, SIZES, (128, 520), SQUARE, 0, "stride 2 is 520; multiples of 16 below 2^40 are accepted"),
        (FLOATS, SIZES, (128, 2**40), SQUARE, 0, "stride 2 is 1099511627776; multiples of 16 below"),
        (FLOATS, SIZES, STRIDES, (30, 4, 2), 0, "a row of the box is 120 bytes; a multiple of 16 is needed"),
        (FLOATS, SIZES, STRIDES, SQUARE, 64, "a row of the box is 128 bytes; its swizzle wants 64"),
        (FLOATS, SIZES, STRIDES, (8, 4, 8), 128, "a row of the box is 32 bytes; its swizzle wants 128"),
        (FLOATS, (32, 4, 9), STRIDES, SQUARE, 0, "the map takes in 4608 bytes of argument 0, which has 4096"),
        (
            FLOATS,
            (32, 4, 2**28 + 1),
            (128, 2**36),
            SQUARE,
            0,
            "the map takes in 9223372036854775808 bytes of argument 0",
        ),
    ],
)
def test_map_that_no_driver_encodes_is_refused(
    array: np.ndarray, sizes: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], swizzle: int, says: str
) -> None:
    with pytest.raises(SimtError, match=re.escape(says)) as caught:
        load(array, sizes, strides, box, swizzle)
    assert caught.value.kind == "tensor-map"


def test_map_that_anybody_may_encode_is_taken() -> None:
    load(FLOATS, SIZES, STRIDES, SQUARE, 128)
