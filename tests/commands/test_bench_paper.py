"""`ksgen bench paper` end to end: what it measures, how it goes on after a kill, what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ksgen.bench.roster import LAYER, OTHERS, OURS, PARTS
from ksgen.bench.rows import COLUMNS, OK, read_rows
from ksgen.errors import KsgenError
from ksgen.install import install_line
from tests.support import program
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from tests.support.bench_runs import has_opencl, lines_of  # noqa: E402

needs_opencl = pytest.mark.skipif(not has_opencl, reason="no OpenCL device: pip install -e '.[cpu]'")
SMALL = (
    "--patterns",
    "1,8,8,2 2,4,8,1",
    "--batch",
    "40",
    "--precision",
    "float32",
    "--measurements",
    "3",
    "--runs",
    "2",
)


def ksgen(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ksgen", "bench", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=240)


@needs_opencl
def test_the_command_end_to_end(tmp_path: Path) -> None:
    done = ksgen("paper", *SMALL, "--without", "compiled", "--json", cwd=tmp_path, KSGEN_DEVICE="opencl")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["jobs"], told["complete"], told["files"][:2]) == (4, 4, ["paper.jsonl", "paper.csv"])
    rows = read_rows(tmp_path / "paper.csv")
    assert rows == read_rows(tmp_path / "paper.jsonl")
    assert {each.implementation for each in rows} == {OURS, LAYER, *OTHERS, *PARTS} - {"compiled"}
    assert all(each.is_accurate for each in rows if each.status == OK and each.implementation not in PARTS)
    assert {each.status for each in rows} == {OK, "unsupported"}
    assert all(
        getattr(rows[0], name) for name in ("device", "driver", "compiler", "torch", "baselines_on", "ksgen", "date")
    )
    assert tuple((tmp_path / "paper.csv").read_text().splitlines()[0].split(",")) == COLUMNS


@pytest.mark.slow
@needs_opencl
def test_a_kill_loses_at_most_one_measurement(tmp_path: Path) -> None:
    """A real SIGKILL while it measures; then the same command."""
    path = tmp_path / "paper.jsonl"
    command = ["paper", *SMALL[:6], "--contenders", "ksgen,bmm", "--layout", "bsf", "--runs", "20", "--measurements"]
    begun = subprocess.Popen(
        [sys.executable, "-m", "ksgen", "bench", *command, "2000"], cwd=tmp_path,
        env=os.environ | {"KSGEN_DEVICE": "opencl"}
    )  # fmt: skip
    end = time.monotonic() + 120
    while time.monotonic() < end and not (path.exists() and path.read_bytes().count(b'"measurement"') >= 25):
        assert begun.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    os.kill(begun.pid, signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL
    left = path.read_bytes()
    kept = lines_of(path, "measurement")  # every whole line can be read: at most the one being written is lost
    assert len(kept) >= 25
    counts = [sum(each["key"] == key for each in kept) for key in {each["key"] for each in kept}]
    assert max(counts) - min(counts) <= 1  # they take turns
    wanted = max(counts) + 2
    done = ksgen(*command, str(wanted), cwd=tmp_path, KSGEN_DEVICE="opencl")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(left.rpartition(b"\n")[0])
    taken = [each.measurements for each in read_rows(path)]
    assert all(wanted <= each <= 3 * wanted for each in taken), taken  # more while a median is uncertain


MISTAKES = [
    (["paper", "--tune", "soon"], "ksgen: budget 'soon': accepted: a time such as 60s, 5m or 1h, or"),
    (["paper", "--precision", "float31"], "ksgen: precision 'float31'; did you mean float32? accepted: float32, tf32"),
    (["paper", "--precision", "fp16"], "ksgen: precision 'fp16'; did you mean float16?"),
    (["paper", "--layout", "bsm"], "ksgen: layout 'bsm'; did you mean bsl? accepted: bsf, bsl"),
    (["paper", "--contenders", "ksgen,bmn"], "ksgen: contender 'bmn'; did you mean bmm? accepted: ksgen, layer, bmm"),
    (["paper", "--contenders", "bmm", "--without", "bmm"], "ksgen: no contender is left: --without excludes all of"),
    (["paper", "--patterns", "1,2,3"], "ksgen: '1,2,3' is not a pattern"),
    (["paper", "--patterns", " "], "ksgen: --patterns ' '; accepted: paper, published, a spec, or patterns such as"),
    (["paper", "--patterns", "none.yaml"], "ksgen: none.yaml: cannot be read"),
    (["paper", "--time-limit", "8x"], "ksgen: time '8x'; accepted: 90s, 8m, 1h30m"),
    (["paper", "--time-limit", "0.001s"], "ksgen: --time-limit ended before the first measurement; give more time"),
    (["paper", "--batch", "0"], "ksgen: Invalid value for '--batch'"),
    (["paper", "--most-gflop", "nan"], "ksgen: Invalid value for '--most-gflop': NaN is not in any range"),
    (["paper", "-o", "rows.csv"], "ksgen: -o rows.csv: the log is a .jsonl file; its rows go to the .csv next to it"),
    (["paper", "-o", "file/rows.jsonl"], "ksgen: file/rows.jsonl: cannot be written ("),
    (["paper", "-o", "damaged.jsonl"], "ksgen: damaged.jsonl:1: not a line of `ksgen bench`"),
    (["paper", "--device", "abacus"], "ksgen: device 'abacus': none is called that"),
    (["report", "none.csv"], "ksgen: none.csv: cannot be read (No such file or directory)"),
    (["report", "file"], "ksgen: file: not a results file; accepted: .jsonl, .csv, .parquet"),
    (["report", "damaged.jsonl"], "ksgen: damaged.jsonl:1: not a line of `ksgen bench`"),
    (["energy", "--device", "opencl"], "ksgen: energy is measured on NVIDIA GPUs, by NVML; "),
    (["papr"], "ksgen: no command 'papr'; did you mean paper? accepted: paper, layers, "),
]  # fmt: skip


@needs_opencl
@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "damaged.jsonl").write_text("{]\n")
    small = (
        ["--patterns", "1,4,4,1", "--batch", "8"]
        if arguments[0] in ("paper", "energy") and "--patterns" not in arguments
        else []
    )
    given = [*arguments, *([] if "--batch" in arguments else small)]
    done = program.ksgen("bench", *given, cwd=tmp_path, KSGEN_DEVICE="opencl")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(message), done.stderr


@pytest.mark.parametrize("command", ["paper", "energy"])
def test_no_pytorch_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from ksgen.commands import bench

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(bench.command, [command])
    assert isinstance(done.exception, KsgenError)
    assert str(done.exception) == f"`ksgen bench {command}` needs torch: {install_line('bench')}"
