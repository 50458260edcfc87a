"""`ksgen demo` checks every kernel of a spec."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.build import build
from ksgen.calibration import trials
from ksgen.cli import cli
from ksgen.commands import calibrate, demo
from ksgen.errors import DeviceError
from ksgen.launch.planner import PLANNER
from ksgen.measure import verify
from ksgen.measure.roofline import NO_FLOOR
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec, load
from ksgen.wisdom import load_wisdom
from tests.support.fake_gpu import FakeGpu
from tests.support.libraries import library
from tests.support.program import ksgen_program, needs_device
from tests.support.tuning_search import TimedEngine


@needs_device
def test_demo_checks_every_kernel_of_a_spec(spec: Path) -> None:
    done = ksgen_program("demo", spec.name, "--batch", "33", cwd=spec.parent)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 kernels agree with float64" in done.stdout
    assert (spec.parent / "generated" / "small" / "manifest.json").is_file()


@needs_device
def test_all_kernels_are_built_before_the_first_is_timed(spec: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at a time, and each once: what checks a kernel finds it in the cache."""
    monkeypatch.chdir(spec.parent)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(spec.parent / "cache"))
    order: list[str] = []
    many, once, measure = build.build_many, build._compile_once, verify.measure
    monkeypatch.setattr(
        build,
        "build_many",
        lambda requests, *given, **named: [order.append("many"), many(requests, *given, **named)][1],
    )
    monkeypatch.setattr(
        build, "_compile_once", lambda request, *given: [order.append(request.entry), once(request, *given)][1]
    )
    monkeypatch.setattr(
        verify, "measure", lambda *given, **named: [order.append("measure"), measure(*given, **named)][1]
    )
    PLANNER.forget()
    PLANNER._loaded.clear()
    monkeypatch.delenv("OPENBLAS_THREAD_TIMEOUT", raising=False)
    done = CliRunner().invoke(cli, ["demo", spec.name, "--batch", "33", "--json"])
    assert done.exit_code == 0, done.output
    assert os.environ["OPENBLAS_THREAD_TIMEOUT"] == f"{demo.NUMPY_WAITS}"
    kernels = json.loads(done.stdout)["kernels"]
    first = order.index("measure")
    assert order.count("measure") == len(kernels) == 2
    assert [
        sum(each.startswith(kernel["kernel"]) for each in order[order.index("many") : first]) for kernel in kernels
    ] == [1, 1]
    assert not [each for each in order[first:] if any(each.startswith(kernel["kernel"]) for kernel in kernels)]
    for row in kernels:
        assert row["ratio"] > 0
        assert row["share_of_floor"] is None or 0 < row["share_of_floor"] <= 1


def test_how_long_numpys_threads_wait_is_set_before_numpy_is_loaded() -> None:
    program = "import sys, ksgen.cli, ksgen.commands.demo; print('numpy' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "False\n"
    )


ROW = {
    "pattern": (2, 9, 5, 3), "job": "multiply", "precision": "float32", "layout": "bsf", "error": 1e-7,
    "tolerance": 1e-6,
    "passed": True, "median_us": 12.0, "doubt": "", "numpy_us": 34.0, "numpy_doubt": "", "ratio": 2.0,
    "ratio_doubt": "",
    "floor_us": 6.0, "share_of_floor": 0.5,
}  # fmt: skip


def printed(capsys: pytest.CaptureFixture[str], *rows: dict[str, Any]) -> str:
    demo._print([{**ROW, **row} for row in rows])
    return capsys.readouterr().out


def test_unreliable_times_are_marked_numpys_too(capsys: pytest.CaptureFixture[str]) -> None:
    load = "other processes took 50% of the CPU time"
    said = printed(capsys, {"numpy_doubt": load}, {"doubt": "the median is uncertain by 9%", "ratio_doubt": load})
    first, second = [line for line in said.splitlines() if "2,9,5,3" in line]
    assert [word in first for word in ("12 ", "34?", "2.00x ", "50%")] == [True] * 4
    assert [word in second for word in ("12?", "34 ", "2.00x")] == [True, True, False]
    assert f"? 2 of 4 times unreliable; the first: {load}." in said


def test_a_pattern_has_its_order_of_outputs_as_commands_take_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "1,8,16,4@j.k  " in printed(capsys, {"pattern": [1, 8, 16, 4, "j.k"]})


def test_speed_ups_are_summed_up_where_they_can_be_trusted(capsys: pytest.CaptureFixture[str]) -> None:
    said = printed(capsys, {}, {"ratio": 8.0}, {"ratio": 100.0, "ratio_doubt": "the median is uncertain by 9%"})
    assert "ksgen is 4.00 times as fast as NumPy (geometric mean of 2 reliable speed-ups; 2.00x to 8.00x)." in said
    said = printed(capsys, {"ratio_doubt": "the median is uncertain by 9%"})
    assert "times as fast" not in said
    assert "No mean, as no speed-up is reliable: repeat the demo on a quiet machine." in said


def test_a_row_without_a_floor_has_no_share_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert NO_FLOOR not in printed(capsys, {})
    said = printed(capsys, {"floor_us": None, "share_of_floor": None, "passed": False})
    assert NO_FLOOR in " ".join(said.split())
    assert [word for word in said.split() if word in ("over", "1.0e-06")] == ["over", "1.0e-06"]
    assert "0 of 1 kernel agrees with float64." in said


def test_the_last_lines_on_a_gpu_are_what_was_proven_and_how_fast_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        {"median_us": 10.0, "bmm_us": 40.0, "share_of_floor": 0.5, "doubt": ""},
        {"median_us": 10.0, "bmm_us": 10.0, "share_of_floor": 0.5, "doubt": ""},
        {"median_us": 10.0, "bmm_us": 90.0, "share_of_floor": None, "doubt": "noisy"},  # which counts nowhere
        {"median_us": 10.0, "bmm_us": None, "share_of_floor": 0.5, "doubt": ""},
    ]
    demo._print_gpu(rows, "Passport: mma proven. 3 of 3 kernels tried now.")
    assert capsys.readouterr().out.splitlines() == [
        "Passport: mma proven. 3 of 3 kernels tried now.",
        "2.00 times as fast as cuBLAS's batched product with its permutations (geometric mean of 2 kernels).",
        "50% of the floor (geometric mean of 3 kernels).",
    ]


@pytest.mark.libraries
def test_a_gpu_that_pytorch_cannot_use_has_no_product_of_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = library("torch")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    gpu: Any = FakeGpu()
    assert demo.bmm_us(gpu, KernelSpec(Pattern(1, 24, 16, 1)), 16) is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert demo.bmm_us(gpu, KernelSpec(Pattern(1, 24, 16, 4, "j.k")), 16) is None, "no product exchanges outputs"
    used: list[int] = []

    def contenders(*_: object) -> None:
        raise DeviceError(f"cuda:{used}")

    monkeypatch.setattr(torch.cuda, "set_device", used.append)
    monkeypatch.setattr("ksgen.bench.contenders.contenders", contenders)
    second: Any = FakeGpu(index=1)
    with pytest.raises(DeviceError, match=r"cuda:\[1\]"):  # events are those of the current GPU
        demo.bmm_us(second, KernelSpec(Pattern(1, 24, 16, 1)), 16)


def test_an_interrupt_of_the_trials_ends_the_demo(spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def stop(calibration: trials.Calibration, jobs: object) -> list[object]:
        calibration.tuner.stop.set()
        return []

    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setattr(calibrate, "make_passport", lambda *given, **named: None)
    monkeypatch.setattr(trials, "open_engine", lambda device: TimedEngine(FakeGpu(), lambda kernel, candidate: 10.0))
    monkeypatch.setattr(calibrate, "try_all", stop)
    with pytest.raises(KeyboardInterrupt):
        demo._settle("cuda:0", load(spec), 33)


def test_a_gpu_decides_before_the_demo_and_the_demo_goes_on_without_it(
    spec: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setattr(calibrate, "make_passport", lambda *given, **named: None)
    gpu = TimedEngine(FakeGpu(), lambda kernel, candidate: 10.0)
    monkeypatch.setattr(trials, "open_engine", lambda device: gpu)
    loaded = load(spec)
    assert demo._settle("cuda:0", loaded, 33) == f"{len(loaded.kernels)} of {len(loaded.kernels)} kernels tried now."
    assert load_wisdom("Fake GPU").entries()

    def refuse(device: str) -> None:
        raise DeviceError("the GPU is in exclusive-process mode")

    monkeypatch.setattr(trials, "open_engine", refuse)
    assert demo._settle("cuda:0", loaded, 33) == "No trials: the GPU is in exclusive-process mode"
