"""Contenders work on the host's memory, and give Y without gaps."""

from typing import Any

import pytest

from ksgen.bench.roster import OURS
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench.contenders import contenders  # noqa: E402
from ksgen.bench.libraries import UnsupportedError  # noqa: E402
from ksgen.bench.problem import LayerArrays, product_job  # noqa: E402
from tests.support.bench_runs import JOB  # noqa: E402


def test_everyone_works_on_the_hosts_memory_and_gives_y_without_gaps(cpu: Any) -> None:
    """Ours where the arrays lie: no copy, and the same call again takes what x holds by then."""
    if not cpu.shares_host:
        pytest.skip(f"{cpu.name} does not share the host's memory")
    for precision, layout in (("float32", "bsf"), ("bfloat16", "bsl")):
        job = product_job(JOB.pattern, precision, layout, 40)
        problem = LayerArrays(job, torch.device("cpu"), 0)
        del problem.sets[2:]
        for each in contenders(job, cpu, (OURS, "bmm", "dense", "sparse", "strided")):
            try:
                ready = each.prepare(problem)
                (y,) = ready.y(ready.run(1))
            except (UnsupportedError, NotImplementedError):
                continue
            assert y.is_contiguous()
            assert problem.error([y]) <= (1e-6 if precision == "float32" else 4e-3)
            if each.implementation == OURS:
                problem.sets[1].mul_(2)
                (again,) = ready.run(1)
                assert again.data_ptr() == y.data_ptr()
                assert problem.error([again / 2]) <= (1e-6 if precision == "float32" else 4e-3)
                problem.sets[1].mul_(0.5)
