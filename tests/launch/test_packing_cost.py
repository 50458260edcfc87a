"""The benchmark of packing at each call measures every pattern and batch; what it finds is not tested."""

import json

import pytest
from click.testing import CliRunner

from benchmarks.packing_cost import main, patterns
from ksgen.launch.plan import Plan
from tests.support.torch_cases import HAS_OPENCL


@pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
def test_a_row_for_every_pattern_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "opencl:0")
    packs, pack = [], Plan.pack
    monkeypatch.setattr(Plan, "pack", lambda *given: packs.append(given) or pack(*given))
    done = CliRunner().invoke(main, ["--batch", "1", "--batch", "3", "--runs", "2", "--json"], catch_exceptions=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["pattern"], row["batch"]) for row in rows] == [
        (str(pattern), batch) for pattern in patterns() for batch in (1, 3)
    ]
    assert all(row["alone_us"] > 0 < row["with_packing_us"] for row in rows)
    assert len(packs) == len(rows) * (1 + 2 + 2)  # made ready, warmed up, measured
