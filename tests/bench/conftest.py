"""What tests of the benchmark share: the processor, what a run of it wrote down, rows of many patterns."""

from typing import Any

import pytest

from ksgen.bench.rows import ResultRow
from ksgen.spec import stratified
from tests.support.bench_rows import rows_of


@pytest.fixture(scope="session")
def cpu() -> Any:
    from tests.support.bench_runs import has_opencl  # skips where PyTorch is missing

    if not has_opencl:
        pytest.skip("no OpenCL device: pip install -e '.[cpu]'")
    from ksgen.devices import find_device

    return find_device("opencl")


@pytest.fixture(scope="session")
def log_text(cpu: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    from tests.support.bench_runs import JOB, measure

    path = tmp_path_factory.mktemp("log") / "whole.jsonl"
    measure(cpu, path, [JOB])
    return path.read_text()


@pytest.fixture(scope="module")
def rows() -> list[ResultRow]:
    return rows_of(stratified(40), ("float16",))
