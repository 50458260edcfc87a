"""Each family's `work`, which the cost model divides by a GPU's rates, against what its kernels do in the emulator,
counted.
"""

from typing import Any

import pytest

from ksgen.emit.render import Source
from ksgen.families import cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec, stratified
from tests.emulator import is_installed
from tests.support.counting import compared, count_kernel
from tests.support.kernels import SERVED, batch_for, kernel_of, source_of, supports

TOLERANCE = 0.02
BATCH, RAGGED = 256, 200  # the second fills no tile, and in batch-size-last with 16 bits no sector
QUICK = ((1, 48, 48, 4), (1, 256, 64, 1))
LATER = ((1, 64, 64, 32), (1, 384, 96, 4), (1, 64, 256, 12), (1, 384, 384, 3))
assert {*QUICK, *LATER} <= {pattern.shape for pattern in stratified(60)}
FIRST = {(family, layout): precision for family, precision, layout in reversed(SERVED)}

pytestmark = pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")


def _cases() -> list[Any]:
    """The first precision of each family and layout in the patterns that take least. Later all others of those, and one
    precision of each in the patterns that take long."""
    cases = []
    for family, precision, layout in SERVED:
        precisions = [each for name, each, own in SERVED if (name, own) == (family, layout)]
        turns = [pattern for at, pattern in enumerate(LATER) if precisions[at % len(precisions)] == precision]
        for pattern in (*QUICK, *turns):
            is_quick = pattern in QUICK and FIRST[family, layout] == precision
            if supports(family, kernel_of(pattern, precision, layout)):
                cases.append(
                    pytest.param(family, pattern, precision, layout, marks=[] if is_quick else [pytest.mark.slow])
                )
    return cases


def check_counts(
    family: str,
    pattern: tuple[int, ...],
    precision: str,
    layout: str,
    batch: int,
    target: str = "sm_90a",
    **options: Any,
) -> None:
    check_source(source_of(family, kernel_of(pattern, precision, layout, **options), limits=cuda_limits(target)), batch)


def check_source(source: Source, batch: int) -> None:
    batch = batch_for(source, batch)
    own, around = count_kernel(source, batch)
    for name, (expected, counted) in compared(source, batch, own, around).items():
        assert expected == pytest.approx(counted, rel=TOLERANCE), (name, source.constants)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "pattern", "precision", "layout"), _cases())
def test_what_the_cost_model_says_moved_is_what_moves(
    family: str, pattern: tuple[int, ...], precision: str, layout: str
) -> None:
    check_counts(family, pattern, precision, layout, BATCH)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "layout"), FIRST)
def test_so_it_is_of_a_batch_that_fills_no_tile(family: str, layout: str) -> None:
    pattern = next(
        each for each in (*QUICK, *LATER) if supports(family, kernel_of(each, FIRST[family, layout], layout))
    )
    check_counts(family, pattern, FIRST[family, layout], layout, RAGGED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["simt", "mma", "gradient", "gradient_mma"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_so_it_is_of_another_target_s_defaults(family: str, layout: str) -> None:
    check_counts(
        family,
        QUICK[0],
        FIRST[family, layout],
        layout,
        BATCH,
        target="sm_75" if family in ("simt", "gradient") else "sm_86",
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "layout"), [("simt", "bsl"), ("mma", "bsf"), ("wgmma_shared", "bsl"), ("wgmma_permuted", "bsf")]
)
def test_a_residual_is_read_once(family: str, layout: str) -> None:
    check_counts(family, QUICK[0], FIRST[family, layout], layout, BATCH, epilogue=Epilogue(residual=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", ["l.i@16,64,48,1", "l1:4.j.i.l2@3,24,20,2@k1:8.i.j.k2"])
def test_exchanged_features_take_the_sectors_in_which_they_lie(text: str) -> None:
    kernel = KernelSpec(Pattern.parse(text))
    check_source(source_of("simt", kernel, limits=cuda_limits("sm_90a")), BATCH)
