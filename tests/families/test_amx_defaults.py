"""The amx family's constants before any search."""

from dataclasses import replace
from itertools import product

import pytest

from ksgen.families import check
from ksgen.families.amx import Shape
from ksgen.families.amx.defaults import reads_in_place
from ksgen.spec import LAYOUTS
from tests.families.test_vector import kernel_of
from tests.support.amx_kernels import CPU, FAMILY, PATTERNS, PRECISIONS


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [*PATTERNS.values(), (6, 64, 64, 1), (1, 768, 192, 2), (512, 2, 2, 1), (1, 4096, 4096, 1), (1, 64, 64, 64)]
)
def test_defaults_keep_the_rules(shape: tuple[int, ...], layout: str, precision: str) -> None:
    kernel = kernel_of(shape, precision, layout)
    for cores, batch in product((1, 64), (None, 1, 100, 25088)):
        limits = replace(CPU, multiprocessors=cores)
        constants = FAMILY.default(kernel, limits, batch)
        check(FAMILY, kernel, constants, limits)
        found = Shape(kernel, constants)
        assert found.slot * 4 <= 768 * 1024 or (constants.block, constants.outputs) == (32, 32)  # no smaller one
        assert constants.panel == int(not reads_in_place(kernel))
        if batch == 25088 and kernel.pattern.weight_count > 10**4:
            assert FAMILY.geometry(kernel, constants, batch).grid >= cores
        if layout == "bsl":
            assert constants.parts >= found.planes


def test_batches_between_two_powers_of_two_share_a_text() -> None:
    for shape, layout in product(PATTERNS.values(), LAYOUTS):
        kernel = kernel_of(shape, "bfloat16", layout)
        assert len({FAMILY.default(kernel, CPU, batch) for batch in range(513, 1025, 37)}) == 1
