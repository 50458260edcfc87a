"""The benchmark of a launch's cost on the host runs over every runtime there is, and measures every part."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.launch_cost import main


@pytest.mark.slow
def test_every_part_is_measured() -> None:
    done = CliRunner().invoke(main, ["--json", "--rounds", "1"])
    assert done.exit_code == 0, done.output
    times = json.loads(done.output)
    for runtime in ("native", "opencl"):
        if isinstance(processor := times.pop(runtime), dict):
            assert len(processor) == 10
            assert all(microseconds > 0 for microseconds in processor.values())
    measured = {runtime: parts for runtime, parts in times.items() if isinstance(parts, dict)}
    if not measured:
        pytest.skip(f"no CUDA runtime here, nor the stand-in: {done.output}")
    for parts in measured.values():
        assert len(parts) in (11, 13)  # two are Hopper's alone
        assert all(microseconds > 0 for microseconds in parts.values())
