"""Each family's `work`, which the cost model divides by a GPU's rates, against what its kernels do in the emulator,
counted.
"""

from collections.abc import Sequence
from typing import Any

import pytest

from ksgen.emit.render import Source
from ksgen.families import cuda_limits, family_named
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec, stratified
from tests.emulator import Counts, is_installed
from tests.support.counting import compared, count_kernel
from tests.support.exchange import EXCHANGING, RUNS, SINGLE_INPUTS, SINGLE_OUTPUTS, TEXTS
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


def check_source(source: Source, batch: int, names: Sequence[str] = ()) -> Counts:
    """Compare what the model predicts with the kernel's counts, by these names or all; return the counts."""
    batch = batch_for(source, batch)
    own, around = count_kernel(source, batch)
    found = compared(source, batch, own, around)
    for name in names or found:
        expected, counted = found[name]
        assert expected == pytest.approx(counted, rel=TOLERANCE), (name, source.constants)
    return own


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


READS = ("load", "copy_async", "bulk_load")
MOVED = ("blocks", "bytes of memory", "bytes of the cache")
# sectors of y that a launch stores in batch-size-first if outputs have no neighbours: one per value, or per two of them
SINGLE_STORES = {"simt": 32768, "mma": 32768, "gemv": 1024, "wgmma_shared": 32768, "wgmma_registers": 32768}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", EXCHANGING)
def test_what_an_exchange_costs(family: str, text: str, layout: str) -> None:
    """Rows of their own, and runs of neighbours, are moved as in the natural order. Of 8 blocks whose features lie
    next to each other, each reads the sectors of all.
    """
    pattern = Pattern.parse(text)
    batch = {"bsf": 4, "bsl": 16}[layout] if family == "gemv" else 64
    exchanged = source_of(family, KernelSpec(pattern, EXCHANGING[family], layout))
    natural = source_of(family, KernelSpec(pattern.natural, EXCHANGING[family], layout), exchanged.constants)
    own, usual = (check_source(each, batch, MOVED) for each in (exchanged, natural))
    (reads, stores), (usual_reads, usual_stores) = map(_sectors, (own, usual))
    if layout == "bsl" or text in RUNS:
        assert (reads, stores) == (usual_reads, usual_stores)
        assert own.global_ == usual.global_ or family == "wgmma_registers"  # which asks for boxes of other sizes
    elif text == SINGLE_INPUTS or exchanged.kernel.job == "gradient":
        tiles = 8 if family == "gemv" else 1  # that read the same inputs
        of_input = tiles * batch * 8 * 64 * exchanged.kernel.item_bytes // 32
        assert (reads - usual_reads, stores) == (7 * of_input, usual_stores)
    else:
        assert text == SINGLE_OUTPUTS
        assert (reads, stores) == (usual_reads, SINGLE_STORES[family])


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", TEXTS)
def test_so_it_is_of_few_rows_in_batch_size_last(text: str) -> None:
    """Features of 4 rows share sectors, which blocks of several i read each."""
    kernel = KernelSpec(Pattern.parse(text), "float16", "bsl")
    check_source(source_of("gemv", kernel, family_named("gemv").default(kernel, cuda_limits("sm_90a"), 4)), 4, MOVED)


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", TEXTS)
def test_copies_of_single_elements_take_their_cycles(text: str) -> None:
    check_source(source_of("mma", KernelSpec(Pattern.parse(text), "bfloat16")), BATCH)


def _sectors(counts: Counts) -> tuple[int, int]:
    """Sectors of global memory that are read, and stored."""
    reads = sum(each.sectors for name, each in counts.global_.items() if name in READS)
    return reads, sum(each.sectors for name, each in counts.global_.items()) - reads


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("tie", "layout", "repeated"),
    [("a", "bsf", 8), ("a", "bsl", 8), ("d", "bsf", 0), ("d", "bsl", 9), ("ad", "bsf", 8), ("ad", "bsl", 11)],
)
def test_tied_weights_are_read_from_memory_once(tie: str, layout: str, repeated: int) -> None:
    """Memory gives `repeated` of 12 slices of 64 x 48 weights no more. In batch-size-first, a tile repeats all j."""
    tied, free = (
        check_source(source_of("simt", KernelSpec(Pattern(3, 64, 48, 4), layout=layout, tied=ties)), 64)
        for ties in ((tie,), ())
    )
    assert _sectors(tied) == _sectors(free)
    assert free.memory_read_bytes - tied.memory_read_bytes == repeated * 64 * 48 * 4
