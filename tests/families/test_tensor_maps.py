"""Tensor maps of emitted kernels against what `cuda.h` documents of cuTensorMapEncodeTiled, as data."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice, product
from typing import Any

import numpy as np
import pytest

from ksgen.families import Family, TensorMap
from ksgen.families.base import MAP_ALIGNMENT
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from tests import emulator
from tests.emulator import SimtError, is_installed, run_cuda
from tests.ptx import render
from tests.support.kernels import LIMITS, VARIANTS, kernel_of, patterns_of, supports

# Interleaving is none, element strides are one and types have whole bytes, so the rules of the other kinds are left
# out.
RULES: dict[str, Callable[[TensorMap], bool]] = {
    "a type of 1, 2, 4 or 8 bytes": lambda each: each.item_bytes in (1, 2, 4, 8),
    "1 to 5 dimensions": lambda each: 1 <= len(each.sizes) <= 5,
    "a size and a box of each dimension, a stride of each but the first": lambda each: (
        len(each.sizes) == len(each.box) == len(each.strides) + 1
    ),
    "sizes of 1 to 2^32": lambda each: all(1 <= size <= 1 << 32 for size in each.sizes),
    "strides are multiples of 16": lambda each: all(stride % 16 == 0 for stride in each.strides),
    "strides are less than 2^40": lambda each: all(stride < 1 << 40 for stride in each.strides),
    "each stride includes the dimension before": lambda each: all(
        stride >= size * before
        for size, before, stride in zip(
            each.sizes[:-1], (each.item_bytes, *each.strides[:-1]), each.strides, strict=True
        )
    ),
    "boxes of 1 to 256": lambda each: all(1 <= box <= 256 for box in each.box),
    "rows of boxes are multiples of 16 bytes": lambda each: each.box[0] * each.item_bytes % 16 == 0,
    "a swizzle over 0, 32, 64 or 128 bytes": lambda each: each.swizzle in (0, 32, 64, 128),
    "rows of boxes are no longer than the swizzle": lambda each: (
        not each.swizzle or each.box[0] * each.item_bytes <= each.swizzle
    ),
}
ADDRESS_BYTES = 16  # the array's address is a multiple of these
RIGHT = TensorMap("x", 2, (64, 3, 5), (128, 384), (32, 3, 1), 64)
BROKEN: dict[str, dict[str, Any]] = {
    "a type of 1, 2, 4 or 8 bytes": {"item_bytes": 3, "box": (16, 3, 1), "strides": (192, 576), "swizzle": 0},
    "1 to 5 dimensions": {"sizes": (64, 1, 1, 1, 1, 1), "strides": (128,) * 5, "box": (32, 1, 1, 1, 1, 1)},
    "a size and a box of each dimension, a stride of each but the first": {"box": (32, 3)},
    "sizes of 1 to 2^32": {"sizes": (64, 3, (1 << 32) + 1)},
    "strides are multiples of 16": {"strides": (136, 408)},
    "strides are less than 2^40": {"strides": (128, 1 << 40)},
    "each stride includes the dimension before": {"strides": (112, 384)},
    "boxes of 1 to 256": {"box": (32, 257, 1)},
    "rows of boxes are multiples of 16 bytes": {"box": (28, 3, 1)},
    "a swizzle over 0, 32, 64 or 128 bytes": {"swizzle": 96},
    "rows of boxes are no longer than the swizzle": {"swizzle": 32},
}
DOCUMENTED_ALONE = "each stride includes the dimension before"  # which drivers do not check


def broken_rules(given: TensorMap) -> list[str]:
    return [name for name, holds in RULES.items() if not holds(given)]


@pytest.mark.parametrize("name", RULES)
def test_each_rule_has_two_sides(name: str) -> None:
    assert broken_rules(RIGHT) == []
    assert broken_rules(replace(RIGHT, **BROKEN[name])) == [name]


def encode(given: TensorMap) -> None:
    """Encode a map in the emulator, as an argument of a kernel that does nothing with it."""
    array = np.zeros(1 << 12, np.uint8)
    own = emulator.TensorMap(array, given.sizes, given.strides, given.box, given.swizzle, given.item_bytes)
    run_cuda(render('extern "C" __global__ void nothing(const TensorMap x) {}'), "nothing", 1, 32, 0, [own])


@pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")
def test_the_emulator_refuses_what_breaks_a_rule() -> None:
    encode(RIGHT)
    for name in RULES:
        if name == DOCUMENTED_ALONE:
            continue
        with pytest.raises((SimtError, ValueError)) as caught:
            encode(replace(RIGHT, **BROKEN[name]))
        assert getattr(caught.value, "kind", "tensor-map") == "tensor-map", name


def kernels_of(family: str, layout: str) -> Iterator[KernelSpec]:
    for precision in PRECISIONS:
        for pattern in patterns_of(family, precision).values():
            each = kernel_of(pattern, precision, layout, Epilogue(residual=True))
            yield from (kernel for kernel in (each, replace(each, stride="any")) if supports(family, kernel))
    for storage in ("e4m3", "e5m2"):
        each = KernelSpec(
            kernel_of((2, 40, 272, 1), "float16", layout).pattern, "float16", layout, weights=storage, inputs=storage
        )
        yield from [each] if supports(family, each) else []


def check_maps(family: str, kernel: KernelSpec, some_constants: Iterator[Any]) -> int:
    own: Family[Any] = VARIANTS[family]
    checked = 0
    for constants, batch in product(some_constants, (1, 8, 24, 64, 65, 129, 25088)):
        if not own.takes(kernel, batch, True):
            continue
        for given in own.maps(kernel, constants, batch):
            assert broken_rules(given) == [], (kernel.name, constants, batch, given)
            checked += 1
    return checked


HOPPER = [family for family in VARIANTS if family.startswith("wgmma")]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", HOPPER)
def test_maps_of_emitted_kernels_keep_the_rules(family: str, layout: str) -> None:
    checked = sum(
        check_maps(family, kernel, islice(VARIANTS[family].space(kernel, LIMITS), 3))
        for kernel in kernels_of(family, layout)
    )
    assert checked > 50 or not any(kernels_of(family, layout))


@pytest.mark.second
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", HOPPER)
def test_maps_of_all_constants_keep_the_rules(family: str, layout: str) -> None:
    for kernel in kernels_of(family, layout):
        check_maps(family, kernel, islice(VARIANTS[family].space(kernel, LIMITS), 0, None, 7))


def test_arrays_that_begin_off_the_rule_are_not_taken() -> None:
    assert MAP_ALIGNMENT == ADDRESS_BYTES
    for family, layout in product(HOPPER, LAYOUTS):
        for kernel in kernels_of(family, layout):
            constants = next(iter(VARIANTS[family].space(kernel, LIMITS)))
            of_arrays = [
                given for given in VARIANTS[family].maps(kernel, constants, 64) if given.operand != "workspace"
            ]
            assert not of_arrays or not VARIANTS[family].takes(kernel, 64, False), kernel.name
