"""The roster: everyone that is measured, and under which comparison."""

import pytest

from ksgen.bench.roster import METHODS, NAMES, OUR_METHODS, OURS
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import runner  # noqa: E402  (PyTorch may be missing)
from ksgen.bench.baselines import BASELINES  # noqa: E402
from ksgen.bench.problem import product_job  # noqa: E402
from tests.support.bench_runs import JOB  # noqa: E402


def test_everyone_is_in_the_roster() -> None:
    assert {*NAMES, *METHODS} == {OURS, *OUR_METHODS, *BASELINES}


def test_tf32_is_allowed_where_the_comparison_allows_it() -> None:
    seen = []
    for precision in ("float32", "tf32", "float16"):
        with runner._allowing(product_job(JOB.pattern, precision, "bsf", 1).comparison):
            matmul = torch.backends.cuda.matmul
            seen.append((matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction))
    assert seen == [(False, False), (True, False), (False, False)]
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction  # PyTorch's own default is back
