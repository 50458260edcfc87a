"""`ksgen calibrate`: what it tries, prints and leaves, what a second run does, and what a mistake says."""

import getpass
import json
import pwd
import shlex
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from ksgen.calibration import trials
from ksgen.cli import cli
from ksgen.commands import calibrate as command
from ksgen.commands.calibrate import without_paths
from ksgen.emit.render import render
from ksgen.errors import DeviceError, KsgenError
from ksgen.launch.choice import settling_command
from ksgen.launch.planner import PLANNER
from ksgen.passport import Passport, Proof
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning import tuner
from ksgen.tuning.engine import Entries
from ksgen.tuning.job import Job, Outcome, Runs
from ksgen.tuning.trials import Trial
from ksgen.wisdom import load_wisdom
from tests.support.fake_gpu import FakeGpu
from tests.support.libraries import library
from tests.support.tuning_search import TimedEngine, own_cache, some_of_space, time_shortly


class Machine(TimedEngine):
    """A GPU on which everything but simt is fast, and one batch has no right kernel."""

    wrong_at = 13

    def __init__(self) -> None:
        super().__init__(FakeGpu(), lambda kernel, candidate: 30.0 if candidate.family == "simt" else 10.0)

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        if job.batch == self.wrong_at:
            return [Outcome("wrong", f"relative error 1e+00; see {Path.home()}/kernel.cu")] * len(entries)
        return super()._measure(job, entries, runs)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user with folders of their own, and a GPU that is none."""
    for name, value in own_cache(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    monkeypatch.setattr(command, "make_passport", lambda *_: None)  # as of a processor
    monkeypatch.setattr(trials, "open_engine", lambda device: Machine())
    monkeypatch.setattr(tuner, "list_space", some_of_space)
    PLANNER.forget()
    yield tmp_path
    PLANNER.forget()


def calibrate(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["calibrate", *arguments], catch_exceptions=True)


HALF = ("1,24,16,2", "--precision", "float16", "--batch", "70")


def test_a_pattern_is_tried_and_a_second_run_finds_nothing_to_do(home: Path) -> None:
    done = calibrate(*HALF)
    assert done.exit_code == 0, done.output
    assert "1 kernel, 0 known; 1 to try" in done.stderr
    assert "[1/1] 1,24,16,2 float16 bsf: 10.0 us" in done.stderr
    assert "1 of 1 kernel settled on Fake GPU: 1 tried now." in done.stdout
    assert "3.00 times as fast as the defaults (geometric mean of 1 kernel)." in done.stdout
    (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("1,24,16,2")]
    assert row[-5:-2] == ["mma", "10.0", "3.00x"]
    assert row[-1] == "trial"
    again = calibrate(*HALF, "--json")
    assert "1 kernel, 1 known; 0 to try" in again.stderr
    (kernel,) = json.loads(again.stdout)["kernels"]
    assert (kernel["tried_now"], kernel["family"], kernel["over_default"]) == (False, "mma", 3.0)
    assert kernel["measured"]["trial"] is True


def test_fresh_replaces_what_trials_found_and_makes_the_passport_again(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(command, "make_passport", lambda device, fresh: asked.append(fresh))
    calibrate(*HALF)
    monkeypatch.setattr(
        trials,
        "open_engine",
        lambda device: TimedEngine(FakeGpu(), lambda _, each: 9.0 if each.family == "simt" else 40.0),
    )
    done = calibrate(*HALF, "--fresh", "--json")
    assert "1 kernel, 0 known; 1 to try" in done.stderr
    (kernel,) = json.loads(done.stdout)["kernels"]
    assert (kernel["tried_now"], kernel["family"], kernel["median_us"]) == (True, "simt", 9.0)
    assert asked == [False, True]


def test_open_and_given_up_kernels_are_counted_apart_and_the_default_is_shown(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noisy(Machine):
        def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
            found = super()._measure(job, entries, runs)
            return [Outcome(each.state, "", each.microseconds, "noisy") for each in found]

    monkeypatch.setattr(trials, "open_engine", lambda device: Noisy())
    again = "not settled, launchers keep the defaults: run the same command again on a quiet machine."
    settled = "settled after 3 unreliable attempts: on a quiet machine, --fresh retries."
    for _ in range(tuner.MOST_ATTEMPTS - 1):
        done = calibrate(*HALF)
        assert "0 of 1 kernel settled on Fake GPU: 1 tried now.\n? 1 of 1 time unreliable" in done.stdout
        assert f"\n1 kernel {again}\n" in done.stdout
        assert settled not in done.stdout
        (row,) = [line.split() for line in done.stdout.splitlines() if line.startswith("1,24,16,2")]
        assert row[-4:] == ["simt", "30.0?", "default", "kept"]
    both = ("1,24,16,2", "2,8,16,1", "--precision", "float16", "--batch", "70")
    done = calibrate(*both)
    assert "1 of 2 kernels settled on Fake GPU: 2 tried now.\n? 2 of 2 times unreliable" in done.stdout
    assert f"\n1 kernel {again}\n1 kernel {settled}\n" in done.stdout
    first, second = json.loads(calibrate(*both, "--json").stdout)["kernels"]
    assert (first["family"], first["tried_now"]) == ("mma", False)
    assert (second["family"], second["tried_now"], second["measured"]["attempts"]) == ("simt", True, 2)


def test_a_spec_is_tried_at_each_batch_with_its_layers_and_gradients(home: Path) -> None:
    (home / "own.yaml").write_text(
        "defaults: {gradients: true, precision: float16}\nlayers:\n  up: {chain: [[1,32,32,1], [1,32,32,1]]}\n"
    )
    done = calibrate(str(home / "own.yaml"), "--batch", "16,70", "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)["kernels"]
    assert {each["batch"] for each in found} == {16, 70}
    assert {each["job"] for each in found} == {"multiply", "gradient", "chain"}
    only = calibrate(str(home / "own.yaml"), "--batch", "16", "--job", "gradient", "--json")
    assert {each["job"] for each in json.loads(only.stdout)["kernels"]} == {"gradient"}


def test_what_cannot_be_measured_is_reported_and_the_rest_is_kept(home: Path) -> None:
    done = calibrate("1,24,16,2", "--precision", "float16", "--batch", "13,70")
    assert done.exit_code == 1
    assert "1 of 2 kernels settled on Fake GPU" in done.stdout
    assert "\nksgen: ks_1x24x16x2_float16_bsf, batch 13: no candidate could be measured; wrong:" in done.stderr
    assert [entry.batch for entry in load_wisdom("Fake GPU").entries()] == [70]


def test_the_report_has_the_device_and_all_trials_and_nothing_personal(home: Path) -> None:
    report = home / "report.json"
    calibrate("1,24,16,2", "--precision", "float16", "--batch", "13,70", "--report", str(report))
    text = report.read_text()
    content = json.loads(text)
    assert content["device"]["name"] == "Fake GPU"
    assert content["device"]["target"] == "sm_90a"
    assert {(each["batch"], each["state"]) for each in content["trials"]} == {(13, "wrong"), (70, "measured")}
    for each in content["trials"]:
        assert each["predicted_us"] > 0
        assert (each["median_us"] is None) == (each["state"] == "wrong")
    assert "relative error 1e+00; see ..." in text
    for personal in (str(Path.home()), str(home), socket.gethostname(), f"/{getpass.getuser()}"):
        assert personal not in text


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("see /home/ann/k.cu: error", "see ...: error"),
        ("No such file: '/home/ann lee/k.cu'", "No such file: ..."),
        ("in ~ann/k.cu, ann/k.cu and ../ann/k.cu", "in ..., ... and ..."),
        (f"see {Path.home()}/k.cu", "see ..."),
        ("relative error 1e+00 (wgmma: tile_batch=128)", "relative error 1e+00 (wgmma: tile_batch=128)"),
    ],
)
def test_reasons_lose_the_names_of_files(text: str, kept: str) -> None:
    assert without_paths(text) == kept


def test_compilers_of_the_report_lose_the_names_of_files() -> None:
    made_by, kernel = "g++ (GCC) 13.2.0 -B/home/ann/tools -O2, 1a2b", KernelSpec(Pattern(1, 24, 16, 2))
    constants = render(kernel).constants
    trial = Trial(kernel, 70, "EPYC", "simt", constants, "", "measured", driver=made_by, compiler=made_by)
    content = command.report_of(replace(Machine().facts, driver_version=made_by), None, [trial])
    kept = "g++ (GCC) 13.2.0 ... -O2, 1a2b"
    assert [content["device"]["driver"], *(content["trials"][0][name] for name in ("driver", "compiler"))] == [kept] * 3


def test_a_home_with_a_space_in_its_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann lee")
    assert without_paths("see /home/ann lee/k.cu") == "see ..."


def test_a_user_without_a_home_has_reasons_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers run as users whom the system does not know."""

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert without_paths("see /app/k.cu") == "see ..."


@pytest.mark.parametrize(
    "kernel",
    [
        KernelSpec(Pattern(1, 24, 16, 2), "float16", "bsl", Epilogue(True, "gelu", True)),
        KernelSpec(Pattern(1, 24, 16, 2), "float32", "bsf", Epilogue(False, "relu", True, True)),
        KernelSpec(Pattern(1, 24, 16, 2), "float32", "bsf", job="gradient"),
        KernelSpec(Pattern(1, 24, 16, 2), weights="int8", inputs="int8"),
        KernelSpec(Chain.read(["6,64,64,1", "1,768,192,2"]), between="relu", out_layout="bsl"),
        KernelSpec((Chain.read("2,24,16,1"), Chain.read(["2,9,16,1", "1,4,18,1"])), "float16", stride="any"),
    ],
)
@pytest.mark.parametrize("device", [None, "native", "an H200"])
def test_the_command_that_explain_names_tries_that_kernel_on_that_device(
    home: Path, kernel: KernelSpec, device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Job] = []
    named: list[str | None] = []
    monkeypatch.setattr(trials, "open_engine", lambda device: named.append(device) or Machine())
    monkeypatch.setattr(trials.Calibration, "run", lambda self, jobs, say: asked.extend(jobs) or [])
    program, *arguments = shlex.split(settling_command(kernel, 70, device))
    done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
    assert program == "ksgen"
    assert done.exit_code == 0, done.output
    assert Job(kernel, 70) in asked
    assert named == [device]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("6,64,64,1", "--chain"), "--chain of 1 pattern; accepted: a layer's patterns"),
        (("1,24,16,2", "--batch", "0"), "--batch '0'; accepted: whole numbers from 1 up"),
        (("1,24,16,2", "--model", "vit-s16"), "with other kernels; accepted: a model alone, or patterns and specs"),
        (("--model", "vit"), "did you mean vit-s16"),
        (("--model", "vit-s16", "--bias"), "with options of patterns; accepted: --precision, --batch, --device"),
        (("--model", "vit-s16", "--layout", "bsl"), "with options of patterns; accepted: --precision"),
        (("specs/vit.yaml", "--bias"), "--residual are for patterns; a spec has its own"),
        (("missing.yaml",), "missing.yaml"),
        (("spec.json",), "i.j.l@1,192,48,2@i.j.k; or a spec, a file whose name ends in .yaml or .yml"),
        (("1,0,16,2",), "b=0; accepted: a whole number from 1 to 2147483647"),
        (("--precision", "float16"), "options of kernels without a kernel; name a spec such as specs/vit.yaml"),
        (("--batch", "16"), "options of kernels without a kernel; name a spec"),
        (("specs/vit.yaml", "--precision", "tf32"), "no kernel in it is tf32"),
    ],
)
def test_mistakes(home: Path, arguments: tuple[str, ...], message: str) -> None:
    done = calibrate(*arguments)
    assert done.exit_code != 0
    assert isinstance(done.exception, KsgenError)
    assert message in str(done.exception)


def test_the_passport_comes_first_and_is_in_the_report_without_file_names(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proofs = {
        "mma": Proof("proven", "", "0a0b0c0d", 9, 2.0),
        "wgmma": Proof("disabled", f"in {home}/k.cu", "0a", 1, 1.0),
    }
    passport = Passport("Fake GPU", "sm_90a", "0", proofs)
    monkeypatch.setattr(command, "make_passport", lambda *_: passport)
    alone = calibrate()
    assert alone.exit_code == 0
    assert alone.stdout == f"Passport: {passport}\n"
    report = home / "report.json"
    assert calibrate("--report", str(report)).stdout == f"Passport: {passport}\n0 trials in {report}\n"
    assert json.loads(report.read_text())["passport"]["mma"]["state"] == "proven"
    assert calibrate(*HALF, "--report", str(report)).exit_code == 0
    found = json.loads(report.read_text())["passport"]
    assert (found["mma"]["state"], found["mma"]["cases"]) == ("proven", 9)
    assert (found["wgmma"]["state"], found["wgmma"]["reason"]) == ("disabled", "in ...")


def test_a_processor_needs_no_passport_and_reads_what_can_be_tried(home: Path) -> None:
    report = home / "report.json"
    alone = calibrate("--report", str(report))
    assert alone.exit_code == 0
    assert alone.stdout == (
        "Passport: this device needs none. To find its fastest kernels, name a spec such as specs/vit.yaml, patterns, "
        f"or --model vit-s16.\n0 trials in {report}\n"
    )
    assert json.loads(report.read_text())["passport"] is None
    assert json.loads(calibrate("--json").stdout) == {"passport": None}


def test_a_second_calibration_says_that_it_waits(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def prove(device: str | None, on_wait: Callable[[str], object], **_: object) -> Passport:
        on_wait("Fake GPU: waiting for another process")
        return Passport("Fake GPU", "sm_90a", "0", {})

    monkeypatch.undo()
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(home))
    monkeypatch.setattr("ksgen.calibration.proof.prove", prove)
    assert "ksgen: Fake GPU: waiting for another process" in calibrate().stderr.splitlines()


@pytest.mark.libraries
def test_a_gpu_that_this_pytorch_cannot_use_is_reported(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = library("torch")
    monkeypatch.setattr("ksgen.devices.find_device", lambda: FakeGpu())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = calibrate("--model", "vit-s16")
    assert isinstance(done.exception, DeviceError)
    why = f"PyTorch {torch.__version__} cannot use Fake GPU; install PyTorch's build for CUDA, or give --device native"
    assert str(done.exception) == f"--model vit-s16: {why}"


@pytest.mark.libraries
def test_a_model_is_built_on_the_gpu_whose_kernels_are_tried(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = library("torch")
    built_on: list[str] = []

    def build(name: str) -> None:
        built_on.append(str(torch.get_default_device()))
        raise DeviceError("seen")

    monkeypatch.setattr("ksgen.devices.find_device", lambda: FakeGpu(index=1))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("ksgen.bench.models.build", build)
    assert str(calibrate("--model", "vit-s16").exception) == "seen"
    assert built_on == ["cuda:1"]


@pytest.mark.libraries
def test_a_batch_of_a_model_that_does_not_fit_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library("torch")

    def random_inputs(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\nframe #0")

    monkeypatch.setattr("ksgen.bench.models.VisionTransformer.random_inputs", random_inputs)
    done = calibrate("--model", "vit-s16", "--batch", "7,100000000", "--device", "native")
    assert isinstance(done.exception, MemoryError)
    assert str(done.exception).startswith("--batch 7,100000000: [enforce fail]")


@pytest.mark.parametrize("command_line", [("calibrate",), ("tune", "--spec"), ("bundle",)], ids=" ".join)
def test_no_command_replaces_its_spec(command_line: tuple[str, ...], home: Path) -> None:
    spec = home / "one.yaml"
    spec.write_text("kernels: [[1, 24, 16, 2]]\n")
    written = "-o" if command_line == ("bundle",) else "--report"
    done = CliRunner().invoke(cli, [*command_line, str(spec), written, str(spec)])
    assert str(done.exception) == f"{spec}: it is an input of this command; choose another file to write"
    assert spec.read_text() == "kernels: [[1, 24, 16, 2]]\n"


def test_a_passport_alone_tells_nothing_of_times(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command.common, "warn_if_busy", lambda: click.echo("busy", err=True))
    assert calibrate().stderr == ""
    assert calibrate(*HALF).stderr.startswith("busy\n")


def test_an_unknown_model_is_reported_before_a_passport_is_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []
    monkeypatch.setattr(command, "make_passport", lambda device, _: asked.append(device))
    assert "did you mean vit-s16" in str(calibrate("--model", "vit").exception)
    assert asked == []


@pytest.mark.slow
def test_a_processor_is_calibrated_and_launchers_take_what_won(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, value in {"KSGEN_WISDOM_DIR": str(home / "wisdom"), "KSGEN_DEVICE": "native"}.items():
        monkeypatch.setenv(name, value)
    time_shortly(monkeypatch)
    PLANNER.forget()
    done = calibrate("2,24,9,3", "--batch", "70", "--json")
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["kernels"]
    assert found["tried_now"]
    if not found["doubt"]:
        run = CliRunner().invoke(cli, ["run", "2,24,9,3", "--batch", "70", "--json"])
        assert json.loads(run.stdout)["why"].startswith("wisdom of a trial, measured at batch 70")
    assert replace(KernelSpec(Pattern(2, 24, 9, 3)), stride="dense").name == found["kernel"]
