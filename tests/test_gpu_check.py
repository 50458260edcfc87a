"""`make gpu-check` without a GPU: its checks on a device that is the emulator, its reading of reports, its page."""

import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ksgen.errors import DeviceError
from ksgen.families import FAMILIES
from tests import gpu_check, kernels
from tests.fake_gpu import FakeGpu
from tests.gpu_check import CLEAN, Outcomes, Sanitized, find_sanitizer, is_good, judge, kernel_for, page, read_report, sanitize
from tests.kernels import SERVED, kernel_of, on_device, source_of
from tests.ptx import on_gpu as ptx
from tests.simt import is_installed

needs_emulator = pytest.mark.skipif(not is_installed("none"), reason="the fake GPU is the emulator, which needs g++")

REPORT = """<testsuites><testsuite>
<testcase name="test_the_emulators_matrix[simt-float32-bsf-dense]"><properties><property name="ulps" value="0"/></properties></testcase>
<testcase name="test_the_emulators_matrix[simt-float16-bsl-dense]"><properties><property name="ulps" value="1"/></properties></testcase>
<testcase name="test_the_emulators_matrix[simt-float16-bsl-rest]"><properties><property name="ulps" value="3"/></properties></testcase>
<testcase name="test_ptx_does_what_the_emulator_says[mma f16]"><properties><property name="ulps" value="12"/></properties></testcase>
<testcase name="test_ptx_does_what_the_emulator_says[tf32x3, c=192]"><properties>
<property name="ulps" value="0"/><property name="error" value="1.49e-06"/></properties></testcase>
<testcase name="test_ptx_does_what_the_emulator_says[cluster]"><skipped message="clusters"/></testcase>
<testcase name="test_runs_are_bit_identical[simt-float32-bsf]">{failure}</testcase>
</testsuite></testsuites>"""
NO_TESTS = Outcomes(passed=1)


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
    assert {entry for entry, _ in gpu.launches} == {source.entry, source.pack_entry}


@needs_emulator
@pytest.mark.parametrize("name", ["mma tf32", "narrow", "ring", "wgmma tf32 A 128 B 128 48", "wgmma bf16, A in registers", "tf32x3, c=192"])
def test_ptx_cases_on_a_device(name: str) -> None:
    gpu, case = FakeGpu(), ptx.case_named(name)
    assert ptx.why_not(case, gpu.target) == ""
    ptx.launch(gpu, case)
    case.check()
    assert ptx.compare_with_emulator(case) == 0
    y = [arg for arg in case.args if isinstance(arg, np.ndarray)][-1]
    y.reshape(-1).view(np.uint8)[0] ^= 1  # the lowest bit
    if "mma_" in case.text:
        assert ptx.compare_with_emulator(case) == 1
    else:
        with pytest.raises(AssertionError):
            ptx.compare_with_emulator(case)


def test_cases_that_a_device_cannot_launch_say_why() -> None:
    def why(name: str, target: str) -> str:
        return ptx.why_not(ptx.case_named(name), target)

    assert why("cluster", "sm_90a") == "a launch with clusters, which Device does not offer"
    assert why("batched", "sm_90a") == "a launch with tensor maps, which Device does not offer"
    assert why("mma f16", "sm_75") == "sm_80 instructions; the device is sm_75"
    assert why("ring", "sm_89") == "sm_90 instructions; the device is sm_89"
    assert why("wgmma tf32, A in registers", "sm_100") == "sm_90a instructions; the device is sm_100"
    assert why("mma f16", "sm_120") == why("named barriers", "sm_75") == ""
    assert len(set(ptx.NAMES)) == len(ptx.NAMES)


def read(tmp_path: Path, failure: str = "") -> Outcomes:
    report = tmp_path / "tests.xml"
    report.write_text(REPORT.format(failure=failure))
    return read_report(report)


def test_the_page_says_what_was_found(tmp_path: Path) -> None:
    tests, sanitized = read(tmp_path), [Sanitized("memcheck", "simt", CLEAN)]
    assert list(page(FakeGpu(), tests, sanitized)) == [
        "Fake GPU (sm_90a), driver, driver 0, text 1",
        "tests: 6 passed, 0 failed, 1 skipped",
        "  skipped 1: clusters",
        "beside the emulator: 2 of 4 the same to the last bit; of the others, the most floats between",
        "         3  simt float16 bsl",
        "        12  mma f16",
        "relative errors of tf32 products, c = 192",
        "  1.49e-06  tf32x3, c=192",
        "compute-sanitizer",
        "  memcheck   simt     clean",
        "gpu-check passed",
    ]
    assert "compute-sanitizer: not on PATH, nor in CUDA_HOME/bin" in page(FakeGpu(), tests, [])


def test_what_fails_the_check(tmp_path: Path) -> None:
    failed = read(tmp_path, '<failure message="differs"/>')
    assert failed.failed == ["test_runs_are_bit_identical[simt-float32-bsf]"]
    assert not is_good(failed, [])
    assert not is_good(Outcomes(skipped=failed.skipped), [])  # nothing ran
    assert not is_good(NO_TESTS, [Sanitized("memcheck", "simt", "1 found", is_failure=True)])
    assert is_good(NO_TESTS, [Sanitized("memcheck", "simt", "does not work here: no permission")])
    assert list(page(FakeGpu(), failed, []))[-1] == "gpu-check FAILED"


@pytest.mark.parametrize(
    ("output", "code", "verdict", "is_failure"),
    [
        ("x\n========= ERROR SUMMARY: 0 errors\n", 0, CLEAN, False),
        ("========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", 0, CLEAN, False),
        ("========= ERROR SUMMARY: 0 errors\n========= ERROR SUMMARY: 2 errors\n", 9, "2 found; see {log}", True),
        ("========= RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)\n", 9, "1 found; see {log}", True),
        ("Check failed\n========= ERROR SUMMARY: 0 errors\n", 1, "nothing found, but the run failed; see {log}", True),
        ("========= Error: device not supported\n=========\n", 1, "does not work here: ========= Error: device not supported", False),
        ("", 1, "does not work here: no output", False),
    ],
)
def test_verdicts_of_the_sanitizer(output: str, code: int, verdict: str, is_failure: bool, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", f"print({output!r}, end=''); raise SystemExit({code})"]
    assert judge("memcheck", "simt", command, log) == Sanitized("memcheck", "simt", verdict.format(log=log), is_failure)
    assert log.read_text() == output


def test_a_run_for_each_family_and_tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = []
    monkeypatch.setattr(gpu_check, "judge", lambda tool, family, command, log: commands.append(command) or Sanitized(tool, family, CLEAN))
    done = list(sanitize("/opt/compute-sanitizer", FakeGpu(), tmp_path))
    assert {(each.tool, each.family) for each in done} == {(tool, family) for tool in gpu_check.TOOLS for family in FAMILIES}
    assert len(commands) == sum(each.verdict == CLEAN for each in done)
    assert all(command[:3] == ["/opt/compute-sanitizer", "--tool", tool] for command, tool in zip(commands, gpu_check.TOOLS, strict=False))
    assert commands[0][commands[0].index("run") :][:5] == ["run", "--pattern", "2,37,13,5", "--batch", "129"]
    assert kernel_for(FakeGpu(), "simt") is not None


def test_the_sanitizer_is_found_on_path_or_beside_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    def pytest_run(command: list[str], check: bool) -> None:
        assert command[1:6] == ["-m", "pytest", "-m", "gpu", "tests/test_gpu.py"]
        Path(command[-1].partition("=")[2]).write_text(REPORT.format(failure=""))

    monkeypatch.setattr(gpu_check, "find_device", lambda name: FakeGpu())
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    monkeypatch.setattr(gpu_check.subprocess, "run", pytest_run)
    done = CliRunner().invoke(gpu_check.main, [str(tmp_path / "results")])
    assert done.exit_code == 0
    assert (tmp_path / "results" / "summary.txt").read_text() == done.output[1:]
    monkeypatch.setattr(gpu_check.subprocess, "run", lambda command, check: None)
    done = CliRunner().invoke(gpu_check.main, [str(tmp_path / "results")])
    assert done.exit_code == 1
    assert "FAILED pytest wrote no report" in done.output
