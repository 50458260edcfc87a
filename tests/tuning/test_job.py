"""The words of a search: they travel between processes, and an outcome knows its median and spread."""

import pickle

import pytest

from ksgen.errors import KsgenError
from ksgen.families import FAMILIES, cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec, parse
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs, kernels_of_spec

KERNEL = KernelSpec(Pattern(2, 9, 5, 3))


@pytest.mark.parametrize("batch", [0, -1, True, 1.5, "7"])
def test_a_batch_is_a_whole_number_from_1_up(batch: object) -> None:
    with pytest.raises(KsgenError, match="a whole number from 1 up"):
        Job(KERNEL, batch)  # type: ignore[arg-type]


def test_words_travel_between_processes_and_compare_there() -> None:
    limits = cuda_limits("sm_80")
    for each in (
        Job(KERNEL, 7),
        Candidate("simt", FAMILIES["simt"].default(KERNEL, limits)),
        Facts("GPU", "sm_80", "cuda", "cuda", "1", limits, "0.1.0", ("a",)),
        Runs(1.0, 2.0, 3.0),
        Outcome("ok", microseconds=(1.0, 2.0)),
    ):
        assert pickle.loads(pickle.dumps(each)) == each
        assert hash(pickle.loads(pickle.dumps(each))) == hash(each)


def test_a_search_of_a_spec_is_of_whole_weights() -> None:
    """Launchers look up wisdom as if no weights were tied."""
    layer = "layers: {k: {chain: [[8,8,8,1], [1,8,8,8]], tied: [a, d]}}"
    found = list(kernels_of_spec(parse(layer)))
    assert found == list(kernels_of_spec(parse(layer.replace(", tied: [a, d]", ""))))
    assert len(found) == 3


def test_they_read_as_what_they_are() -> None:
    assert str(Job(KERNEL, 7)) == "ks_2x9x5x3_float32_bsf, batch 7"
    assert str(Candidate("simt", "tile_in=8")) == "simt: tile_in=8"


def test_an_outcomes_spread_is_the_uncertainty_of_its_median() -> None:
    outcome = Outcome("ok", microseconds=(1000.0, *(float(each) for each in range(10, 19)), 0.001))
    assert outcome.median_us == 14.0
    assert outcome.spread == pytest.approx(8 / 14)  # eleven blocks, of which one is left out at each end
    assert Outcome("ok", microseconds=(5.0,)).spread == 0.0
