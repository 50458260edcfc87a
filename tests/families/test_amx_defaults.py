"""The amx family's constants before any search."""

from dataclasses import replace
from itertools import product

import pytest

from ksgen.families import check
from ksgen.families.amx.chain import SECOND_LEVEL_BYTES, AmxChainTiling
from ksgen.families.amx.defaults import reads_in_place
from ksgen.families.amx.shape import AmxTiling
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec
from tests.families.test_vector import kernel_of
from tests.support.amx_kernels import CPU, FAMILY, PATTERNS, PRECISIONS


@pytest.mark.exhaustive
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
        found = AmxTiling(kernel, constants)
        assert found.slot * 4 <= SECOND_LEVEL_BYTES or constants.block == 32
        assert constants.panel or reads_in_place(kernel)
        if batch == 25088 and kernel.pattern.weight_count > 10**4:
            assert FAMILY.geometry(kernel, constants, batch).grid >= cores
        if layout == "bsl":
            assert constants.parts >= found.planes


def test_rows_that_meet_in_a_cache_are_copied() -> None:
    """Rows of 2 KiB alternate between two sets of an L1 cache. Rows of 96 numbers use all sets."""
    assert [FAMILY.default(kernel_of((1, 256, c, 1), "bfloat16"), CPU, 6272).panel for c in (96, 1024)] == [0, 2]


def test_rows_of_intermediates_meet_nowhere_and_are_read_in_place() -> None:
    """Rows of X have 2 KiB and are copied. Rows of intermediates are 17 and 33 cache lines apart."""
    chain = Pattern(1, 512, 1024, 1), Pattern(1, 1024, 512, 1), Pattern(1, 64, 1024, 1)
    kernel = KernelSpec((chain,), "bfloat16")
    first, second, third = AmxChainTiling(kernel, FAMILY.default(kernel, CPU, 6272)).factors
    assert (first.x_row, first.y_row, third.x_row, third.y_row) == (1024, 17 * 32, 33 * 32, 64)
    assert (second.x_row, second.y_row) == (first.y_row, third.x_row)
    assert [each.constants.panel for each in (first, second, third)] == [1, 0, 0]


@pytest.mark.parametrize("shape", [(2, 192, 768, 16), (1, 1024, 1024, 6), (2, 384, 384, 64)])
def test_private_buffers_stay_in_the_second_level_cache(shape: tuple[int, ...]) -> None:
    """Weights exceed that cache. With longer blocks, each would be read less often."""
    found = AmxTiling(kernel := kernel_of(shape, "bfloat16"), FAMILY.default(kernel, CPU, 1568))
    assert found.slot * 4 <= SECOND_LEVEL_BYTES < found.packed_bytes
    assert AmxTiling(kernel, replace(found.constants, block=96)).slot * 4 > SECOND_LEVEL_BYTES


def test_planes_are_parts_where_their_weights_are_worth_keeping() -> None:
    """Batch-size-first excludes planes with few inputs and outputs, and planes that share a cache line."""
    for shape, parts in (
        ((32, 384, 384, 4), 32),
        ((48, 192, 48, 4), 1),
        ((2, 384, 384, 64), 4),
        ((2, 384, 384, 100), 1),
    ):
        assert FAMILY.default(kernel_of(shape, "bfloat16"), CPU, 6272).parts == parts
    assert FAMILY.default(kernel_of((2, 384, 384, 64), "bfloat16", "bsl"), CPU, 6272).parts == 128


def test_more_outputs_share_inputs_where_there_are_more() -> None:
    for b, outputs in ((48, 64), (192, 192), (512, 256)):
        assert FAMILY.default(kernel_of((1, b, 192, 1), "bfloat16"), CPU, 6272).outputs == outputs


def test_batches_between_two_powers_of_two_share_a_text() -> None:
    for shape, layout in product(PATTERNS.values(), LAYOUTS):
        kernel = kernel_of(shape, "bfloat16", layout)
        assert len({FAMILY.default(kernel, CPU, batch) for batch in range(513, 1025, 37)}) == 1
