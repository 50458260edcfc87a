"""`make gpu-check` without a GPU: its checks on a device that is the emulator, its reading of reports, its page."""

import json
import random
import re
import subprocess
import sys
from pathlib import Path
from time import sleep, time
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from ksgen.calibration.proof import cases_of
from ksgen.errors import DeviceError
from ksgen.families import FAMILIES, family_named
from ksgen.passport import needs_proof, record
from tests import gpu_benchmarks, gpu_check, gpu_children, gpu_report
from tests.driver import NotHereError, environment
from tests.emulator import is_installed
from tests.gpu_benchmarks import Stage
from tests.gpu_check import (
    CLEAN,
    Outcomes,
    Sanitized,
    faults_of_passport,
    find_sanitizer,
    is_good,
    judge,
    kernel_for,
    page,
    read_report,
    run_tests,
    sanitize,
)
from tests.passport.test_store import proof
from tests.ptx import on_gpu as ptx
from tests.support import kernels
from tests.support.fake_gpu import FakeGpu
from tests.support.kernels import (
    JOB_OF,
    LIMITS,
    MATRIX,
    PROVEN,
    SERVED,
    VARIANTS,
    is_proven,
    kernel_of,
    on_device,
    patterns_of,
    source_of,
)
from tests.support.libraries import library
from tests.support.process_state import has_ended

ROOT = Path(__file__).parents[1]
needs_emulator = pytest.mark.skipif(not is_installed("none"), reason="the fake GPU is the emulator, which needs g++")

VERDICTS: list[dict[str, Any]] = [
    {"tests": ["tests/test_gpu.py::never_begun", "tests/test_gpu.py::test_runs_are_bit_identical[simt-float32-bsf]"]},
    {"began": "tests/test_gpu.py::was_running"},
    {"test": "t.py::test_the_emulators_matrix[simt-float32-bsf-dense]", "verdict": "passed", "properties": {"ulps": 0}},
    {"test": "t.py::test_the_emulators_matrix[simt-float16-bsl-dense]", "verdict": "passed", "properties": {"ulps": 1}},
    {"test": "t.py::test_the_emulators_matrix[simt-float16-bsl-rest]", "verdict": "passed", "properties": {"ulps": 3}},
    {"test": "t.py::test_ptx_does_what_the_emulator_says[mma f16]", "verdict": "passed", "properties": {"ulps": 12}},
    {
        "test": "t.py::test_ptx_does_what_the_emulator_says[tf32x3, c=192]", "verdict": "passed",
        "properties": {"ulps": 0, "error": "1.49e-06"},
    },
    {"test": "t.py::test_ptx_does_what_the_emulator_says[cluster]", "verdict": "skipped", "why": "clusters",
        "properties": {}},
    {"test": "tests/test_gpu.py::test_runs_are_bit_identical[simt-float32-bsf]", "verdict": "passed", "properties": {}},
]  # fmt: skip
FAILED = {
    "test": "tests/test_gpu.py::test_runs_are_bit_identical[simt-float32-bsf]",
    "verdict": "failed",
    "why": "differs",
}
UNFINISHED = 2  # of these, lines at the beginning that tell of tests without a verdict
NO_TESTS = Outcomes(passed=1)


@pytest.mark.exhaustive
@needs_emulator
@pytest.mark.parametrize(("family", "precision", "layout"), SERVED)
def test_checks_of_kernels_on_a_device(family: str, precision: str, layout: str) -> None:
    gpu = FakeGpu()
    source, run = source_of(family, kernel_of((2, 37, 13, 5), precision, layout)), on_device(gpu)
    batch = kernels.BATCHES[source.kernel.job][-1]
    y = kernels.check(source, batch, run)
    assert kernels.ulps(y, kernels.check(source, batch, kernels.in_emulator())) == 0
    kernels.check_exact(source, 7, run)
    kernels.check_leaks(source, 33, run)
    assert {entry for entry, _ in gpu.launches} == set(source.entries)


@pytest.mark.exhaustive
@needs_emulator
@pytest.mark.parametrize(
    "name", ["mma tf32", "narrow", "ring", "wgmma tf32 A 128 B 128 48", "wgmma bf16, A in registers", "tf32x3, c=192"]
)
def test_ptx_cases_on_a_device(name: str) -> None:
    gpu, case = FakeGpu(), ptx.case_named(name)
    assert ptx.why_not(case, gpu.target) == ""
    ptx.launch(gpu, case)
    case.check()
    assert ptx.compare_with_emulator(case, gpu.target) == 0
    y = [arg for arg in case.args if isinstance(arg, np.ndarray)][-1]
    y.reshape(-1).view(np.uint8)[0] ^= 1  # the lowest bit
    if "mma_" in case.text:
        assert ptx.compare_with_emulator(case, gpu.target) == 1
    else:
        with pytest.raises(AssertionError):
            ptx.compare_with_emulator(case, gpu.target)


@needs_emulator
@pytest.mark.parametrize("name", ["batched", "box swizzle=32", "panels"])
def test_ptx_cases_with_maps_on_a_device(name: str) -> None:
    gpu, case = FakeGpu(), ptx.case_named(name)
    ptx.launch(gpu, case)
    case.check()
    assert len(gpu.encoded) == 2
    assert ptx.compare_with_emulator(case, gpu.target) == 0


def test_cases_that_a_device_cannot_launch_say_why() -> None:
    def why(name: str, target: str) -> str:
        return ptx.why_not(ptx.case_named(name), target)

    assert why("cluster", "sm_90a") == why("batched", "sm_90a") == ""
    assert why("mma f16", "sm_75") == "sm_80 instructions; the device is sm_75"
    assert why("ring", "sm_89") == "sm_90 instructions; the device is sm_89"
    assert why("wgmma tf32, A in registers", "sm_100") == "sm_90a instructions; the device is sm_100"
    assert why("mma f16", "sm_120") == why("named barriers", "sm_75") == ""
    assert len(set(ptx.NAMES)) == len(ptx.NAMES)


def read(tmp_path: Path, *more: dict[str, Any], lines: list[dict[str, Any]] = VERDICTS[UNFINISHED:]) -> Outcomes:
    report = tmp_path / "tests.jsonl"
    report.write_text("".join(json.dumps(line) + "\n" for line in (*lines, *more)))
    return read_report(report)


def test_a_report_that_was_cut_short_tells_what_is_missing(tmp_path: Path) -> None:
    found = read(tmp_path, lines=VERDICTS)
    assert (found.passed, found.missing, is_good(found, [])) == (6, 2, False)
    assert "tests: 6 passed, 0 failed, 1 skipped, 2 without a verdict" in page(FakeGpu(), found, [], [], tmp_path)


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    tests, sanitized = read(tmp_path), [Sanitized("memcheck", "simt", CLEAN)]
    assert list(page(FakeGpu(), tests, sanitized, [], tmp_path)) == [
        "Fake GPU (sm_90a), driver, driver 0, text 1",
        "tests: 6 passed, 0 failed, 1 skipped, 0 without a verdict",
        "  skipped 1: clusters",
        "compared with the emulator: 2 of 4 the same to the last bit; of the others, the most floats between",
        "         3  simt float16 bsl",
        "        12  mma f16",
        "relative errors of tf32 products, c = 192",
        "  1.49e-06  tf32x3, c=192",
        "compute-sanitizer",
        "  memcheck   simt     clean",
        "gpu-check passed",
    ]
    assert "compared with the emulator: not asked for; KSGEN_GPU_COMPARE_EMULATOR=1 make gpu-check" in page(
        FakeGpu(), NO_TESTS, [], [], tmp_path
    )
    assert "compute-sanitizer: not on PATH, nor in CUDA_HOME/bin" in page(FakeGpu(), tests, [], [], tmp_path)


def test_what_fails_the_check(tmp_path: Path) -> None:
    failed = read(tmp_path, FAILED)
    assert failed.failed == ["test_runs_are_bit_identical[simt-float32-bsf]"]
    assert not is_good(failed, [])
    assert not is_good(Outcomes(skipped=failed.skipped), [])  # nothing ran
    assert not is_good(NO_TESTS, [Sanitized("memcheck", "simt", "1 found", is_failure=True)])
    assert is_good(NO_TESTS, [Sanitized("memcheck", "simt", "does not work here: no permission")])
    assert list(page(FakeGpu(), failed, [], [], tmp_path))[-1] == "gpu-check FAILED"


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("output", "code", "verdict", "is_failure"),
    [
        ("x\n========= ERROR SUMMARY: 0 errors\n", 0, CLEAN, False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, CLEAN, False),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 2 errors\n", 9, "2 found; see {log}", True),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 9, "1 found; see {log}", True),
        ("Check failed\n========= ERROR SUMMARY: 0 errors\n", 1, "nothing found, but the run failed; see {log}", True),
        (
            "========= Error: device not supported\n=========\n",
            1,
            "does not work here: ========= Error: device not supported",
            False,
        ),
        ("", 1, "does not work here: no output", False),
    ],
)
def test_verdicts_of_the_sanitizer(output: str, code: int, verdict: str, is_failure: bool, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", f"print({output!r}, end=''); raise SystemExit({code})"]
    assert judge("memcheck", "simt", command, log) == Sanitized("memcheck", "simt", verdict.format(log=log), is_failure)
    assert log.read_text() == output


def test_a_passport_that_lacks_or_disables_a_family_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    assert faults_of_passport(FakeGpu()) == ["passport: there is none; ksgen calibrate makes it"]
    record(FakeGpu(), {"mma": proof("mma", "it hung")})
    assert faults_of_passport(FakeGpu()) == [
        "passport: mma is disabled: it hung",
        "passport: wgmma is not proven; ksgen calibrate proves it",
    ]
    record(FakeGpu(), {"mma": proof("mma"), "wgmma": proof()})
    assert faults_of_passport(FakeGpu()) == []


def kind_of(a: int, b: int, c: int, d: int) -> tuple[bool, ...]:
    """What decides the branches that a pattern takes: several blocks, j in several, and whole eights."""
    return a > 1, d > 1, not b % 8, not c % 8, d & (d - 1) == 0


@pytest.mark.slow
def test_a_passport_has_each_kind_of_pattern_that_the_matrix_omits() -> None:
    """It has it by the same constants' class, in each precision and layout, and gpu-check fails without it."""
    omitted = [each for each in MATRIX if is_proven(each[0], each[-1])]
    assert {name for *_, name in omitted} == set(PROVEN)
    families = {family_named(family).name for family, *_ in omitted}
    assert {name for name in families if needs_proof(name, "sm_90a")} == families
    proven = {
        (type(case.candidate.constants), case.kernel.precision, case.kernel.layout, kind_of(*case.kernel.pattern.shape))
        for name in families
        for case in cases_of(FAMILIES[name], "sm_90a")
        if case.kernel.job == "multiply" and not case.kernel.is_quantized
    }
    for family, precision, layout, name in omitted:
        shape = patterns_of(family, precision)[name]
        constants = VARIANTS[family].default(kernel_of(shape, precision, layout), LIMITS)
        assert (type(constants), precision, layout, kind_of(*shape)) in proven


def test_a_run_for_each_family_and_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []

    def judged(tool: str, family: str, command: list[str], log: Path, seconds: float) -> Sanitized:
        commands.append(command)
        return Sanitized(tool, family, CLEAN)

    monkeypatch.setattr(gpu_check, "judge", judged)
    done = list(sanitize("/opt/compute-sanitizer", FakeGpu(), tmp_path))
    assert {(each.tool, each.family) for each in done} == {
        (tool, family) for tool in gpu_check.TOOLS for family in VARIANTS
    }
    assert len(commands) == sum(each.verdict == CLEAN for each in done)
    assert all(
        command[:3] == ["/opt/compute-sanitizer", "--tool", tool]
        for command, tool in zip(commands, gpu_check.TOOLS, strict=False)
    )
    ran = [command[command.index("run") :] for command in commands]
    words = ["run", "--pattern", "2,37,13,5", "--batch", "129", "--runs", "1", "--device", "cuda"]
    words += ["--precision", "float16", "--layout", "bsf", "--job", "multiply"]
    assert [*words, "--family", "mma"] in ran
    assert {each[-1] for each in ran} == set(JOB_OF)  # those for processors serve nothing on a GPU
    assert {
        each.verdict for each in sanitize("", FakeGpu(target="sm_80"), tmp_path) if each.family == "wgmma_shared"
    } == {"not run: it serves nothing on Fake GPU"}
    kernel, batch = kernel_for(FakeGpu(), "wgmma_shared")
    assert family_named("wgmma_shared").takes(kernel, batch, aligned=True)
    late = list(sanitize("/opt/compute-sanitizer", FakeGpu(), tmp_path, end=0.0))
    assert {each.verdict for each in late if not each.verdict.startswith("not run: it serves nothing")} == {
        "not run: the time was up"
    }


def test_the_sanitizer_is_found_on_path_or_next_to_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "bin" / "compute-sanitizer"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert find_sanitizer() == str(tool)


def test_no_gpu_is_a_clear_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def none(name: str) -> None:
        raise DeviceError(f"no device: {name} has none")

    monkeypatch.setattr(gpu_check, "find_device", none)
    done = CliRunner().invoke(gpu_check.main, [str(tmp_path / "results")])
    assert (done.exit_code, done.output) == (1, "Error: gpu-check needs an NVIDIA GPU. no device: cuda has none\n")
    assert not (tmp_path / "results").exists()


def test_the_whole_command_writes_its_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    results = tmp_path / "results"

    def pytest_run(command: list[str], seconds: float, output: Path, variables: dict[str, str]) -> int:
        assert seconds == 170
        assert command[1:6] == ["-m", "pytest", "-m", "gpu", "tests/test_gpu.py"]
        assert "unfinished" in (results / "summary.txt").read_text()
        Path(variables[gpu_report.FILE]).write_text("".join(json.dumps(line) + "\n" for line in VERDICTS[UNFINISHED:]))
        return 0

    def measure(folder: Path, end: float) -> Any:
        assert (results / "summary.txt").read_text().endswith("unfinished: more was to follow\n")
        yield gpu_benchmarks.Outcome(Stage("late", (), 0), "not run")
        assert "late: not run" in (results / "summary.txt").read_text()

    monkeypatch.setattr(gpu_check, "find_device", lambda name: FakeGpu())
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    record(FakeGpu(), {"wgmma": proof()})
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    monkeypatch.setattr(gpu_children, "run", pytest_run)
    monkeypatch.setattr(gpu_check.gpu_benchmarks, "run", measure)
    done = CliRunner().invoke(gpu_check.main, [str(results)], catch_exceptions=False)
    assert done.exit_code == 0
    assert (results / "summary.txt").read_text() == done.output[1:]
    monkeypatch.setattr(gpu_children, "run", lambda *given: 1)
    done = CliRunner().invoke(gpu_check.main, [str(results), "--tests-alone"])
    assert done.exit_code == 1
    assert "FAILED pytest wrote no report; see" in done.output

    def never_ends(command: list[str], seconds: float, output: Path, variables: dict[str, str]) -> None:
        Path(variables[gpu_report.FILE]).write_text(json.dumps(VERDICTS[-1]) + "\n")

    monkeypatch.setattr(gpu_children, "run", never_ends)
    found = run_tests(tmp_path)
    assert (found.passed, found.failed) == (1, ["the tests did not end in 170 s"])


SOME_TESTS = """
import time
import pytest

def test_passes(record_property):
    record_property("ulps", 3)

@pytest.mark.parametrize("number", range(6))
def test_takes_a_while(number):
    time.sleep(0.3)

def test_fails():
    assert 1 == 2

def test_skips():
    pytest.skip("for a reason")

@pytest.fixture
def broken():
    raise ValueError("broken")

def test_never_begins(broken): ...

def test_dies():
    import os
    os._exit(3)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [0, 2])
def test_each_test_has_its_verdict(workers: int, tmp_path: Path) -> None:
    found, _ = reported(tmp_path, workers, "not dies" if not workers else "")
    assert found.passed == 7
    assert sorted(found.failed) == ["test_dies", "test_fails", "test_never_begins"][not workers :]
    assert found.skipped == {"for a reason": 1}
    assert found.missing == 0


def test_what_has_not_begun_in_time_is_skipped(tmp_path: Path) -> None:
    found, _ = reported(tmp_path, 0, "while or passes or begins", seconds=-1)
    assert found.skipped == {gpu_report.TIME_IS_UP: 8}


def reported(folder: Path, workers: int, only: str, seconds: float = 60) -> tuple[Outcomes, int | None]:
    """What a run of some tests leaves in its report."""
    (folder / "test_some.py").write_text(SOME_TESTS)
    (folder / "conftest.py").write_text("import pytest\n\n@pytest.fixture(scope='session')\ndef _own_folders(): ...\n")
    report = folder / "tests.jsonl"
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(folder / "test_some.py"),
        "-p",
        "tests.gpu_report",
        "-p",
        "no:cacheprovider",
        f"-n{workers}",
    ]
    variables = {gpu_report.FILE: str(report), gpu_report.END: str(time() + seconds)}
    status = gpu_children.run([*command, f"--rootdir={folder}", "-k", only], 60, folder / "tests.txt", variables)
    assert report.exists(), (folder / "tests.txt").read_text()
    return read_report(report), status


def test_a_command_past_its_time_ends_with_what_it_started(tmp_path: Path) -> None:
    script = (
        "import subprocess, sys; print(subprocess.Popen(['sleep', '600']).pid, flush=True); import time; "
        "time.sleep(600)"
    )
    assert gpu_children.run([sys.executable, "-c", script], 2, tmp_path / "log") is None
    assert is_gone(int((tmp_path / "log").read_text()))
    assert gpu_children.run([sys.executable, "-c", "raise SystemExit(7)"], 20, tmp_path / "log") == 7


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a child outlives its parent")
def test_a_command_ends_where_gpu_check_is_killed(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from tests import gpu_children
gpu_children.run(["sh", "-c", "echo $$; exec sleep 600"], 600, Path({str(tmp_path / "log")!r}))
"""
    with subprocess.Popen([sys.executable, "-c", script], cwd=ROOT) as checked:
        while not has_begun(tmp_path / "log"):
            sleep(0.02)
        checked.kill()
    assert is_gone(int((tmp_path / "log").read_text()))


def is_gone(process: int) -> bool:
    """Return whether the process ends within a second."""
    for _ in range(50):
        if has_ended(process):
            return True
        sleep(0.02)
    return False


def has_begun(report: Path) -> bool:
    return report.exists() and report.stat().st_size > 0


def has_verdict(report: Path) -> bool:
    return report.exists() and '"verdict"' in report.read_text(encoding="utf-8")


OF_ONE_FILE = 'from tests import gpu_check; gpu_check.TESTS = ("tests/launch/test_driver.py",); gpu_check.main()'


@pytest.mark.timeout(900)
@pytest.mark.parametrize("numbers", [range(3), pytest.param(range(3, 6), marks=pytest.mark.second)])
def test_killed_at_any_moment_it_leaves_every_verdict(numbers: range, tmp_path: Path) -> None:
    """Over the stand-in driver: what pytest printed of a test is in the report, and nothing goes on
    running.
    """
    try:
        machine = environment()
    except NotHereError as error:
        pytest.skip(str(error))
    draw, verdicts = random.Random(numbers.start), 0
    for number in numbers:
        folder = tmp_path / str(number)
        report = folder / "tests.jsonl"
        command = [sys.executable, "-c", OF_ONE_FILE, str(folder), "--tests-alone", "--only", "not cluster"]
        with subprocess.Popen(
            command, cwd=ROOT, env=machine, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as checked:
            is_late = has_verdict if number == numbers[-1] else has_begun  # one kill at least comes after a verdict
            while number and not is_late(report) and checked.poll() is None:
                sleep(0.05)
            sleep(draw.uniform(0, 1.2))  # the tests themselves take about a second
            children = [
                int(each) for each in Path(f"/proc/{checked.pid}/task/{checked.pid}/children").read_text().split()
            ]
            checked.kill()
        assert all(is_gone(child) for child in children)
        if report.exists():
            printed = re.findall(r"\] (?:PASSED|FAILED|SKIPPED) tests/", (folder / "tests.txt").read_text())
            found = read_report(report)
            assert len(printed) <= found.passed
            assert not found.failed
            assert number == 0 or "unfinished" in (folder / "summary.txt").read_text() or not found.missing
            verdicts += found.passed
    assert verdicts


# The benchmarks of gpu-check.


def test_each_benchmark_is_a_command_that_exists_and_all_fit() -> None:
    from ksgen.cli import cli

    stages = gpu_benchmarks.stages(Path("results"))
    for stage in stages:
        arguments = [*stage.arguments, *(["--time-limit", "5s"] if stage.takes_limit else [])]
        done = CliRunner().invoke(cli, [*arguments, "--help"])
        assert done.exit_code == 0, (stage, done.output)
        command, names = done.output, [each for each in arguments if each.startswith("--")]
        assert all(name in command for name in names), stage
    assert sum(stage.seconds for stage in stages) + gpu_check._TEST_SECONDS < gpu_check._ALL_SECONDS
    assert gpu_check._ALL_SECONDS + gpu_benchmarks._GRACE_SECONDS < 8 * 60
    assert "--subset" in stages[1].arguments
    assert "60" in stages[1].arguments


@pytest.mark.libraries
def test_a_benchmark_that_fails_or_hangs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("torch")
    failing, hanging, told, late = (
        Stage(name, ("x",), 6, name == "told") for name in ("failing", "hanging", "told", "late")
    )
    commands = []

    def run(command: list[str], seconds: float, output: Path) -> int | None:
        commands.append(command)
        return None if len(commands) == 2 else len(commands) == 1

    clock = iter([0, 0, 0, 1000])
    monkeypatch.setattr(gpu_benchmarks, "monotonic", lambda: next(clock))
    monkeypatch.setattr(gpu_children, "run", run)
    monkeypatch.setattr(gpu_benchmarks, "stages", lambda folder: (failing, hanging, told, late))
    outcomes = list(gpu_benchmarks.run(tmp_path, 500))
    assert commands[2][-3:] == ["x", "--time-limit", "6s"]
    assert list(gpu_benchmarks.page(tmp_path, outcomes)) == [
        f"failing: failed; see {tmp_path / 'failing.txt'}",
        f"hanging: stopped after 21 s; see {tmp_path / 'hanging.txt'}",
        "late: not run: the time was up",
    ]
    assert [each.is_failure for each in outcomes] == [True, False, False, False]
    assert not is_good(NO_TESTS, [], outcomes)


def test_the_page_of_what_was_measured(tmp_path: Path) -> None:
    results = tmp_path / "paper.jsonl"
    job = {
        "pattern": "1,48,48,2",
        "precision": "float32",
        "layout": "bsl",
        "batch": 9,
        "arithmetic": "float32",
        "identity": "",
    }
    found = {"status": "ok", "error": 1e-7, "tolerance": 1e-6, "commit": "c0ffee", "date": "2026-01-02"}
    lines: list[dict[str, Any]] = []
    for name, us in (("ksgen", 50.0), ("bmm", 100.0)):
        lines.append({"kind": "contender", "key": name, "implementation": name, **job, **found})
        lines.append({"kind": "measurement", "key": name, "us": us, "runs": 10})
    results.write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = {
        "model": "vit-s16",
        "rows": [{"module": "whole", "precision": "float32", "backend": "ksgen", "ratio": {"median": 0.777}}],
    }
    (tmp_path / "vit-s16.json").write_text(json.dumps(model))
    (tmp_path / "wrong.json").write_text("[]")
    told = "\n".join(gpu_benchmarks.page(tmp_path, []))
    assert "benchmark: 1 patterns, 2 rows, 2026-01-02, commit c0ffee\n" in told
    assert "  9      float32    bsl     1         100 %" in told
    assert "vit-s16, whole, time over the dense model's\n  float32   ksgen    0.78" in told
    assert "wrong.json: cannot be read (" in told
    results.write_text("{\n")
    assert "paper.jsonl:1: not a line of `ksgen bench`" in "\n".join(gpu_benchmarks.page(tmp_path, []))
