"""A problem's arrays, and how far a result is from float64."""

import numpy as np
import pytest

from ksgen.pattern import Pattern
from ksgen.reference import multiply
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench.problem import LayerArrays, product_job  # noqa: E402
from tests.support.bench_runs import JOB  # noqa: E402


def test_a_problem_is_the_same_for_the_same_seed() -> None:
    one, same, other = (LayerArrays(JOB, torch.device("cpu"), seed) for seed in (0, 0, 1))
    assert torch.equal(one.sets[0], same.sets[0])
    assert torch.equal(one.weights[0][0], same.weights[0][0])
    assert not torch.equal(one.weights[0][0], other.weights[0][0])
    assert float(one.weights[0][0].abs().max()) <= 8**-0.5
    assert len(one.sets) == 64  # small arrays are taken in turn, so that a cache does not hold them


def test_an_error_is_against_float64_and_nan_where_anything_is_not_finite() -> None:
    job = product_job(Pattern(2, 4, 8, 1), "float32", "bsl", 200)
    problem = LayerArrays(job, torch.device("cpu"), 0)
    y = torch.from_numpy(multiply(job.pattern, problem.sets[0].numpy(), problem.weights[0][0].numpy(), "bsl"))
    assert problem.error([y]) < 1e-15
    assert problem.error([1.01 * y]) == pytest.approx(0.01)
    y[3, 101] = float("nan")  # an entry that is not among those compared
    assert problem.checked == 44
    assert np.isnan(problem.error([y]))
    assert np.isnan(problem.error([y.T.contiguous()]))
