"""What `python -m benchmarks.layers` keeps of a run that was stopped, and where the next one goes on."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

layers = pytest.importorskip("benchmarks.layers", reason="pip install -e '.[bench]'")
from ksgen.pattern import low_rank, monarch  # noqa: E402  (after the skip)

CHAINS = {"first": monarch(16, 16, 4, 4), "second": low_rank(16, 16, 2)}


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The chains that were timed, in order."""
    found: list[str] = []
    monkeypatch.setattr(layers, "chains", lambda: CHAINS)
    monkeypatch.setattr(layers, "jobs", lambda chain, *_: str(chain))
    monkeypatch.setattr(layers, "timed", lambda chain, *_: found.append(chain) or dict.fromkeys(layers.WAYS, 2.0))
    return found


def run(*options: str) -> Result:
    return CliRunner().invoke(layers.main, ["--batch", "1", "--layout", "bsf", *options])


def test_a_run_that_was_stopped_goes_on(timed: list[str], tmp_path: Path) -> None:
    log = tmp_path / "layers.jsonl"
    stopped = run("--log", str(log), "--minutes", "-1")
    assert (stopped.exit_code, timed) == (layers.STOPPED, [])
    assert "stopped after -1 minutes at first, float32 bsf batch 1" in stopped.output
    assert run("--log", str(log)).exit_code == 0
    rows = log.read_text().splitlines(keepends=True)
    assert [json.loads(row)["chain"] for row in rows] == list(CHAINS)
    log.write_text(rows[0] + rows[1][:20])  # cut off by a kill
    timed.clear()
    again = run("--log", str(log), "--json")
    assert (again.exit_code, timed) == (0, [str(CHAINS["second"])])
    assert log.read_text() == "".join(rows)
    assert json.loads(again.output.splitlines()[0])["us"] == dict.fromkeys(layers.WAYS, 2.0)


def test_rows_of_other_threads_or_another_pytorch_are_measured_anew(timed: list[str], tmp_path: Path) -> None:
    log = tmp_path / "layers.jsonl"
    run("--log", str(log))
    for name, other in (("threads", 77), ("torch", "0.1")):
        log.write_text("".join(json.dumps(json.loads(row) | {name: other}) + "\n" for row in log.read_text().splitlines()))
        timed.clear()
        run("--log", str(log))
        assert len(timed) == len(CHAINS)
