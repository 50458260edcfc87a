"""The benchmark over several processes measures every case; what it finds is not tested."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from benchmarks import processes  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.skipif(not has_kernels(torch.device("cpu")), reason="needs kernels on the processor"),
]


def run(*arguments: str) -> str:
    return CliRunner().invoke(processes.main, arguments, catch_exceptions=False).stdout


def table(folder: Path, what: str, rows: list[dict[str, Any]]) -> list[list[str]]:
    """Cells of the rows of a table."""
    path = folder / "rows.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return [line.strip("| ").split(" | ") for line in run(what, "--read", str(path)).splitlines()[2:]]


def test_threads_of_every_pattern_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(processes, "keep_freed_memory", lambda: None)
    monkeypatch.setattr(processes.replay, "load_now", lambda: False)
    used: dict[str, list[int]] = {name: [] for name in processes.WAYS}
    own = processes.layer_with

    def layer_with(count: int, *given: Any) -> Any:
        layer = own(count, *given)
        (call,) = [each for each in layer._prepared_calls().values() if isinstance(each, processes.Prepared)]
        used[next(name for name, each in processes.WAYS.items() if each == count)].append(
            call.kernels.launch.settled().threads
        )
        return layer

    monkeypatch.setattr(processes, "layer_with", layer_with)
    try:
        printed = run("threads", "--alone", "threads", "--batch", "1", "--batch", "3", "--most-seconds", "0.01")
    finally:
        torch.set_num_threads(threads)
    rows = [json.loads(line) for line in printed.splitlines()]
    wanted = [(",".join(map(str, each)), batch) for each in processes.PATTERNS for batch in (1, 3)]
    assert [(row["pattern"], row["batch"]) for row in rows] == wanted
    assert all(row["us"].keys() == processes.WAYS.keys() and min(row["us"].values()) > 0 for row in rows)
    assert used["one"] == [1] * len(rows)
    assert used["two"] == [2] * len(rows)
    assert set(used["own"]) <= {1, 2}


def test_a_table_compares_with_the_better_number_of_threads(tmp_path: Path) -> None:
    rows = [{"pattern": "1,2,3,4", "batch": 5, "us": {"own": us, "one": 20, "two": 2 * us}} for us in range(1, 12)]
    assert table(tmp_path, "threads", rows) == [
        ["1,2,3,4", "5", "11", "median", "6.0", "20.0", "12.0", "0.50"],
        ["1,2,3,4", "5", "11", "90 %", "10.0", "20.0", "20.0", "0.50"],
    ]


def test_first_calls_of_a_layer_in_another_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run("first-calls", "--processes", "1", "--only", "layer")
    row = json.loads(capfd.readouterr().out)
    assert (row["model"], row["is_served"]) == ("one layer", True)
    assert row["calls"] >= row["at_call"] >= 1
    assert row["seconds"] > 0, "an empty cache has no kernels"
    found = [row, row | {"longest_extra_ms": 30.0, "seconds": 2.5}, row | {"is_served": False}]
    ((model, count, _, *others),) = table(tmp_path, "first-calls", found)
    assert (model, count, others[1], others[3]) == ("one layer", "3", "inf", "inf")
