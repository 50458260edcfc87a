"""`ksgen tune`: what it prints, where it leaves what it found, and what a mistake says."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.progress import Progress

from ksgen.cli import cli
from ksgen.commands import tune as tune_command
from ksgen.devices import find_device
from ksgen.errors import KsgenError, SpecError
from ksgen.launch.planner import PLANNER
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning.job import Job
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import NotBegunError, SearchOptions
from tests.support.tuning_search import own_cache, time_shortly, without_notes
from tests.tuning.test_worker import HAS_OPENCL

needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
MEASURED = re.compile(r"wisdom, measured at batch 70(; \d+\.\d\d times as fast as the default)?")
SMALL = ("--pattern", "2,24,9,3", "--batch", "70", "--device", "opencl:0")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user with folders of their own."""
    for name, value in own_cache(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    time_shortly(monkeypatch)
    PLANNER.forget()
    yield tmp_path
    PLANNER.forget()


def tune(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["tune", *arguments], catch_exceptions=True)


def test_a_terminal_shows_the_wait_for_a_scheduler(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    def open_engine(device: str | None, scheduler: str) -> None:
        raise KsgenError(f"{scheduler} after {shown}")

    def add_task(bar: Progress, description: str, **_: object) -> None:
        shown.append(description)

    monkeypatch.setattr("ksgen.tuning.tuner.open_engine", open_engine)
    monkeypatch.setattr(Progress, "add_task", add_task)
    done = tune(*SMALL, "--scheduler", "tcp://10.0.0.1:8786")
    assert str(done.exception) == f"tcp://10.0.0.1:8786 after {['connecting to ' + repr('tcp://10.0.0.1:8786')]}"


@pytest.mark.parametrize(("is_stopped", "code"), [(True, 130), (False, 1)])
def test_a_report_of_no_trial_changes_no_exit_code(
    is_stopped: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SimpleNamespace(facts=SimpleNamespace(name="Abacus"), jobs_at_once=1)
    result = NotBegunError("it was stopped") if is_stopped else KsgenError("no candidate could be measured")
    tuner: Any = SimpleNamespace(
        engine=engine, options=SearchOptions(), stop=Event(), run=lambda jobs, say: [result], trials=lambda jobs: []
    )
    if is_stopped:
        tuner.stop.set()
    job = Job(KernelSpec(Pattern(1, 8, 8, 2)), 70)
    with pytest.raises(SystemExit) as left:
        tune_command._tune(tuner, [job], tmp_path / "out.html", as_json=True)
    said = capsys.readouterr()
    assert left.value.code == code
    assert json.loads(said.out) == {"device": "Abacus", "stopped": is_stopped, "kernels": []}
    assert f"0 trials to report: {tmp_path / 'out.html'} is not written" in said.err
    assert not (tmp_path / "out.html").exists()


@pytest.mark.slow
@needs_opencl
def test_a_pattern_is_tuned_reported_and_taken_by_launchers(home: Path) -> None:
    done = tune(*SMALL, "--budget", "4", "--report", str(home / "out.html"))
    assert done.exit_code == 0, done.output
    assert "2,24,9,3 float32 bsf" in done.stdout
    outcome = (
        "faster than the default: launchers take the new constants from now on|the default won: launchers keep it|"
        "no winner, because times are unreliable: launchers take the fastest constants until a search on a "
        "quiet machine"
    )
    assert re.search(rf"1 of 1 kernel tuned on .*, batch 70\.\n1 kernel: ({outcome})\.\n", done.stdout)
    assert re.search(r"Saved in \S+/wisdom/\S+\.json", done.stdout)
    assert "[1/1] 2,24,9,3 float32 bsf: " in done.stderr
    assert "4 candidates" in done.stderr
    assert (home / "out.html").read_text().startswith("<!")
    run = CliRunner().invoke(cli, ["run", *SMALL, "--json"])
    assert json.loads(run.stdout)["why"].startswith("wisdom, measured at batch 70")


@pytest.mark.slow
@needs_opencl
def test_a_spec_is_tuned_as_json_and_known_trials_are_not_repeated(home: Path) -> None:
    (home / "two.yaml").write_text(
        "kernels:\n  - {pattern: [1,8,8,2], layout: [bsf, bsl]}\n  - {pattern: [1,8,8,1], precision: float64}\n"
    )
    arguments = ("--spec", str(home / "two.yaml"), "--precision", "float32", "--batch", "50")
    arguments += ("--device", "opencl:0", "--budget", "2", "--json")
    first = json.loads(tune(*arguments).stdout)
    assert [(each["layout"], each["candidates"], each["measured_now"]) for each in first["kernels"]] == [
        ("bsf", 2, 2),
        ("bsl", 2, 2),
    ]
    assert not first["stopped"]
    for each in first["kernels"]:
        assert each["median_us"] > 0
        assert each["complete"]
        assert each["share_of_floor"] is None or 0 < each["share_of_floor"] <= 1  # none where a cache keeps all data
        assert each["default_us"] > 0
    without_notes(find_device("opencl:0").name)
    again = json.loads(tune(*arguments).stdout)
    assert [each["measured_now"] for each in again["kernels"]] == [0, 0]
    assert [each["measured_now"] for each in json.loads(tune(*arguments, "--fresh").stdout)["kernels"]] == [2, 2]


@pytest.mark.slow
@needs_opencl
def test_weights_in_eight_bits_are_tuned_and_taken_by_launchers(home: Path) -> None:
    done = tune(*SMALL, "--budget", "2", "--weights", "int8")
    assert done.exit_code == 0, done.output
    assert "[1/1] 2,24,9,3 float32 int8 bsf: " in done.stderr
    found = CliRunner().invoke(cli, ["run", *SMALL, "--weights", "int8", "--json"])
    assert json.loads(found.stdout)["why"].startswith("wisdom, measured at batch 70")
    assert "no search" in json.loads(CliRunner().invoke(cli, ["run", *SMALL, "--json"]).stdout)["why"]


@pytest.mark.slow
@needs_opencl
def test_gradients_are_tuned_named_and_taken_by_launchers(home: Path) -> None:
    (home / "training.yaml").write_text("defaults: {gradients: true}\nkernels:\n  - {pattern: [2,24,9,3]}\n")
    shared = ("--batch", "70", "--device", "opencl:0", "--budget", "2")
    trained = tune("--spec", str(home / "training.yaml"), *shared, "--report", str(home / "out.html"))
    assert trained.exit_code == 0, trained.output
    for name in ("2,24,9,3 float32 bsf:", "2,24,9,3 float32 bsf gradient: ", "2,9,24,3 float32 bsf: "):
        assert f"/3] {name}" in trained.stderr
    assert "2,24,9,3 float32 bsf gradient, batch 70" in (home / "out.html").read_text()
    without_notes(find_device("opencl:0").name)
    (again,) = json.loads(tune("--spec", str(home / "training.yaml"), "--job", "gradient", *shared, "--json").stdout)[
        "kernels"
    ]
    without_notes(find_device("opencl:0").name)
    (alone,) = json.loads(tune(*SMALL, "--job", "gradient", "--budget", "2", "--json").stdout)["kernels"]
    for each in (again, alone):
        assert (each["job"], each["family"], each["measured_now"]) == ("gradient", "cpu_gradient", 0)
    run = CliRunner().invoke(cli, ["run", *SMALL, "--job", "gradient", "--json"])
    assert json.loads(run.stdout)["why"].startswith("wisdom, measured at batch 70")


@pytest.mark.slow
@needs_opencl
def test_a_layer_is_tuned_as_one_launch_and_factor_by_factor(home: Path) -> None:
    layer = ("2,9,5,3", "1,4,18,3", "--batch", "70", "--device", "opencl:0")
    done = tune(*layer, "--chain", "--budget", "2")
    assert done.exit_code == 0, done.output
    assert "2,9,5,3 then 1,4,18,3 float32 bsf: " in done.stderr
    assert "3 of 3 kernels tuned on " in done.stdout
    without_notes(find_device("opencl:0").name)
    launcher = ChainLauncher(Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3))
    said = launcher.explain(70, device="opencl:0")
    assert "searches measured" in said
    one, apart = map(float, re.findall(r"([\d.e+]+) us", said)[:2])
    assert one == apart or ("one launch, by vector" in said) == (one < apart)  # equal once rounded: either
    assert "searches measured" not in launcher.explain(7000, device="opencl:0")  # far from what was measured
    with_bias = Epilogue(bias=True)
    assert "searches measured" in launcher.explain(70, device="opencl:0", epilogue=with_bias)
    kernel = KernelSpec((launcher.chain.factors,), "float32", "bsf", with_bias)
    assert MEASURED.fullmatch(PLANNER.choice(find_device("opencl:0"), kernel, 70).why)


@pytest.mark.slow
@needs_opencl
def test_a_specs_layers_and_groups_are_tuned_and_taken_by_launchers(home: Path) -> None:
    (home / "layers.yaml").write_text(
        """
        layers:
          heads: {group: [[[2,9,5,3]], [[2,9,5,3], [1,4,18,3]]], between: relu}
          transposed: {chain: [[2,9,5,3], [1,4,18,3]], out_layout: bsl, stride: any}
        """
    )
    done = tune("--spec", str(home / "layers.yaml"), "--batch", "70", "--device", "opencl:0", "--budget", "2")
    assert done.exit_code == 0, done.output
    for name in (
        "2,9,5,3, and 2,9,5,3 then 1,4,18,3 float32 bsf relu_between strided: ",
        "2,9,5,3 then 1,4,18,3 float32 bsf relu_between: ",
        "2,9,5,3 then 1,4,18,3 float32 bsf_to_bsl: ",
    ):
        assert name in done.stderr
    without_notes(find_device("opencl:0").name)
    factor, pair = Launcher(2, 9, 5, 3), (Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3))
    group, transposed = GroupLauncher(factor, ChainLauncher(*pair, between="relu")), ChainLauncher(*pair)
    assert "us for the layers one by one" in group.explain(70, device="opencl:0")
    assert "with the copy that transposes an intermediate" in transposed.explain(
        70, device="opencl:0", out_layout="bsl"
    )
    assert "searches" not in transposed.explain(70, device="opencl:0")  # which was not tuned in one layout
    entries = {
        each["kernel"]: each for each in json.loads(CliRunner().invoke(cli, ["wisdom", "show", "--json"]).stdout)
    }
    assert entries["ks_2x9x5x3_1x4x18x3_float32_bsf_to_bsl"]["measured"]["transpose_us"] > 0
    group_kernel = KernelSpec(group.chains, "float32", "bsf", stride="any", between="relu")
    assert MEASURED.fullmatch(PLANNER.choice(find_device("opencl:0"), group_kernel, 70).why)


@pytest.mark.slow
@needs_opencl
def test_a_group_is_tuned_in_addition_to_its_layers(home: Path) -> None:
    done = tune("2,9,5,3", "--group-with", "2,9,5,3 1,4,18,3", "--batch", "70", "--device", "opencl:0", "--budget", "1")
    assert done.exit_code == 0, done.output
    assert "4 of 4 kernels tuned on " in done.stdout  # all, the second layer, and two factors


@pytest.mark.slow
@needs_opencl
def test_of_a_spec_what_the_family_serves_is_tuned(home: Path) -> None:
    (home / "training.yaml").write_text("defaults: {gradients: true}\nkernels:\n  - {pattern: [2,24,9,3]}\n")
    spec = ("--spec", str(home / "training.yaml"), "--batch", "70", "--device", "opencl:0", "--budget", "1")
    tuned = tune(*spec, "--family", "vector_gradient", "--json")
    assert [each["job"] for each in json.loads(tuned.stdout)["kernels"]] == ["gradient"]
    assert "left out, as vector_gradient does not support them here: 2 of 3 kernels" in tuned.stderr
    for arguments in ((*spec, "--family", "mma"), (*SMALL, "--family", "gradient")):
        refused = tune(*arguments)
        assert isinstance(refused.exception, KsgenError)
        assert f"not supported by {arguments[-1]} on" in str(refused.exception)


@pytest.mark.slow
@needs_opencl
def test_noise_is_how_far_measurements_of_the_same_lie_apart(home: Path) -> None:
    told = json.loads(tune(*SMALL, "--noise", "--json").stdout)
    (kernel,) = told["kernels"]
    assert kernel["median_us"] > 0
    assert kernel["within"] >= 0
    assert kernel["between"] >= 0
    assert "measurement to measurement: range of ten medians" in tune(*SMALL, "--noise").stdout
    assert TrialStore().trials() == []


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "COLUMNS": "150", "LINES": "40"}


@pytest.mark.slow
@needs_opencl
def test_an_interrupt_keeps_what_was_found_and_reports_it(home: Path) -> None:
    command = [sys.executable, "-m", "tests.support.short_series", "tune", *SMALL, "--strategy", "exhaustive", "--json"]
    child = subprocess.Popen(command, env=environment(home), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    store = TrialStore()
    while len(store.trials()) < 3:
        assert child.poll() is None
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    stdout, stderr = child.communicate(timeout=60)
    assert child.returncode == 130, stderr
    assert "interrupted; results so far are saved, and the same command continues from there" in stderr
    told = json.loads(stdout)
    assert told["stopped"]
    (kernel,) = told["kernels"]
    assert not kernel["complete"]
    (file,) = (home / "wisdom").glob("*.json")
    assert [each["constants"] for each in json.loads(file.read_text())["entries"]] == [kernel["constants"]]


@pytest.mark.slow
@needs_opencl
def test_a_terminal_gets_a_live_table(home: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "tests.support.short_series", "tune", *SMALL, "--budget", "6"]
    child = subprocess.Popen(command, env=environment(home), stdout=theirs, stderr=theirs)
    os.close(theirs)
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the child is gone, and its terminal with it
            break
    assert child.wait() == 0
    text = seen.decode()
    for word in ("0 of 1 kernel tuned in 0:0", "best, us", "of floor", "done", "left", "vector: along="):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((), KsgenError, "name what to tune: patterns such as 1,192,48,2, or --spec FILE"),
        (("--pattern", "1,2,3,4", "--spec", "x.yaml"), KsgenError, "name what to tune: "),
        (("1,2,3,1", "--chain"), KsgenError, "--chain: accepted: a layer of two or more patterns"),
        (
            ("--spec", "specs/vit.yaml", "--out-layout", "bsl"),
            KsgenError,
            "--out-layout: accepted: a layer of two or more patterns",
        ),
        (("1,2,3,1", "1,3,2,1", "--chain", "--job", "gradient"), KsgenError, "--chain: accepted: "),
        (("--spec", "specs/vit.yaml", "--chain"), KsgenError, "--chain: accepted: "),
        (
            ("1,2,3,1", "1,3,4,1", "--chain"),
            KsgenError,
            "1,2,3,1 gives 2 features, but the next pattern (1,3,4,1) takes 4",
        ),
        (("--pattern", "1,2,3,4", "--budget", "soon"), KsgenError, "budget 'soon': accepted: a time such as 60s"),
        (
            ("--pattern", "1,2,3,4", "--report", "/nowhere/out.html"),
            KsgenError,
            "/nowhere/out.html: no file can be written there",
        ),
        (
            ("1,2,3,4", "--noise", "--report", "out.html", "--fresh"),
            SpecError,
            "--report, --fresh with --noise, which searches nothing; accepted: one of the two",
        ),
        (("--spec", "nowhere.yaml"), SpecError, "nowhere.yaml"),
        (
            ("--spec", "specs/vit.yaml", "--precision", "float64", "--layout", "bsl"),
            KsgenError,
            "no kernel in it is float64 and bsl",
        ),
        (("--spec", "specs/vit.yaml", "--job", "gradient"), KsgenError, "no kernel in it is gradient"),
        (
            ("--pattern", "1,2,3,4", "--device", "no such device"),
            KsgenError,
            "device 'no such device': none is called that",
        ),
    ],
)
def test_mistakes(arguments: tuple[str, ...], error: type[KsgenError], message: str, home: Path) -> None:
    caught = tune(*arguments).exception
    assert isinstance(caught, error)
    assert message in str(caught)


@needs_opencl
def test_mistakes_about_the_device(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for arguments, message in (
        (("--family", "magic"), "unknown kernel family 'magic'"),
        (("--family", "mma"), "not supported by mma on "),
        (("--batch", str(10**12)), "checking ks_2x24x9x3_float32_bsf takes 2160031.4 GB"),
    ):
        assert message in str(tune(*SMALL, *arguments).exception)
    (home / "file").write_text("")
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(home / "file" / "wisdom"))
    assert "file/wisdom: wisdom cannot be written there; set KSGEN_WISDOM_DIR to another folder" in str(
        tune(*SMALL).exception
    )
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    assert "KSGEN_NO_COMPILE forbids compiling, which a search needs" in str(tune(*SMALL).exception)
