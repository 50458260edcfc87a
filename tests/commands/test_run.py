"""`ksgen run` checks and times one kernel."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.commands import run
from ksgen.commands.layers import Wanted, epilogue_of, launch_of_spec
from ksgen.errors import SpecError
from ksgen.families import FAMILIES, faster_family
from ksgen.launch.choice import choose, limits_of
from ksgen.measure.roofline import NO_FLOOR, Ceilings, share_of_floor
from ksgen.measure.trust import Blocks
from ksgen.measure.verify import Measured
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import Wisdom
from tests.support.fake_gpu import FakeGpu
from tests.support.program import ksgen, needs_device


@pytest.mark.slow
@needs_device
def test_run_checks_and_times_one_kernel() -> None:
    done = ksgen(
        "run", "2,9,5,3", "--batch", "70", "--layout", "bsl", "--bias", "--activation", "silu", "--runs", "2", "--json"
    )
    figures = json.loads(done.stdout)
    assert figures["passed"]
    assert figures["checked_rows"] == 70
    assert 0 < figures["error"] <= figures["tolerance"]
    assert figures["median_us"] > 0
    share = None if figures["doubt"] else share_of_floor(figures["floor_us"], figures["median_us"])
    assert figures["share_of_floor"] == (share and pytest.approx(share, rel=1e-2))
    table = ksgen("run", "--pattern", "2,9,5,3", "--batch", "70", "--runs", "2")
    assert "the floor" in table.stdout or "is unreliable" in table.stdout
    assert "passed" in table.stdout


@pytest.mark.slow
@needs_device
def test_several_patterns_are_the_factors_of_a_layer() -> None:
    layer = ("2,9,5,3", "1,4,18,3", "--batch", "70", "--bias", "--activation", "gelu", "--runs", "2")
    figures = json.loads(ksgen("run", *layer, "--json").stdout)
    assert figures["passed"]
    assert (figures["job"], figures["pattern"]) == ("chain", [[2, 9, 5, 3], [1, 4, 18, 3]])
    assert 0 < figures["error"] <= figures["tolerance"]
    assert len(figures["each_factor_us"]) == 2
    assert all(us > 0 for us in figures["each_factor_us"])
    assert "us for one launch per factor" in ksgen("run", *layer).stdout


@needs_device
def test_weights_in_eight_bits() -> None:
    figures = json.loads(ksgen("run", "2,9,5,3", "--batch", "1", "--weights", "e4m3", "--runs", "2", "--json").stdout)
    assert figures["passed"]
    assert (figures["kernel"], figures["stored_weights"]) == ("ks_2x9x5x3_float32_e4m3_bsf", "e4m3")
    assert 0 < figures["error"] <= figures["tolerance"]


@pytest.mark.slow
@needs_device
def test_a_group_a_transposed_layer_and_slices() -> None:
    shared = ("--batch", "70", "--runs", "2")
    group = ("2,9,5,3", "--group-with", "2,9,5,3 1,4,18,3", "--between", "relu", "--residual", *shared)
    figures = json.loads(ksgen("run", *group, "--json").stdout)
    assert figures["passed"]
    assert figures["pattern"] == [[2, 9, 5, 3]]
    assert (
        figures["chains"] == [figures["pattern"], *figures["beside"]] == [[[2, 9, 5, 3]], [[2, 9, 5, 3], [1, 4, 18, 3]]]
    )
    assert len(figures["each_factor_us"]) == 3
    layer = ("2,9,5,3", "1,4,18,3", "--out-layout", "bsl", "--stride", "any", *shared)
    figures = json.loads(ksgen("run", *layer, "--json").stdout)
    assert figures["passed"]
    assert figures["kernel"] == "ks_2x9x5x3_1x4x18x3_float32_bsf_to_bsl_strided"
    assert figures["transpose_us"] == figures["turn_us"] > 0  # its deprecated name
    assert "at least for the copy that transposes an intermediate" in " ".join(ksgen("run", *layer).stdout.split())


@pytest.mark.slow
@needs_device
def test_x_in_eight_bits() -> None:
    stored = ("--weights", "e4m3", "--inputs", "e4m3")
    figures = json.loads(
        ksgen("run", "2,9,5,3", "--batch", "9", "--precision", "bfloat16", *stored, "--runs", "2", "--json").stdout
    )
    assert figures["passed"]
    assert (figures["kernel"], figures["stored_inputs"]) == ("ks_2x9x5x3_bfloat16_e4m3_inputs_bsf", "e4m3")
    layer = ksgen("run", "2,9,5,3", "1,4,54,1", "--batch", "9", *stored, "--runs", "2", "--json")
    figures = json.loads(layer.stdout)
    assert figures["passed"]
    assert figures["kernel"] == "ks_2x9x5x3_1x4x54x1_float32_e4m3_inputs_bsf"


@pytest.mark.parametrize(
    "reasons",
    [("other processes took 50% of the CPU time", "", ""), ("", "", "other processes took 50% of the CPU time")],
)
def test_nothing_is_concluded_from_unreliable_times(
    reasons: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    why, *of_each = reasons
    figures = {
        "entry": "ks", "batch": 70, "device": "a device", "runtime": "native", "family": "vector", "why": "a test",
        "passed": True, "error": 1e-8, "tolerance": 1e-6, "checked_rows": 70,
        "median_us": 40.0, "low_us": 39.0, "high_us": 41.0, "blocks": 8, "gflop_per_s": 3.0, "gbyte_per_s": 4.0,
        "floor_us": 20.0, "share_of_floor": None if why else 0.5, "doubt": why,
        "each_factor_us": [30.0, 50.0], "each_factor_doubt": of_each,
        "measured_gbyte_per_s": 9.0, "measured_gflop_per_s": 90.0, "multiply_adds": "plain multiply-adds",
    }  # fmt: skip
    run._print(figures, "tile=1")
    lines = {
        line.split()[0]: " ".join(line.split()[1:])
        for line in capsys.readouterr().out.replace("\n  ", " ").splitlines()
        if line
    }
    assert lines["time"] == f"40.0{'?' if why else ''} us median of 8 blocks, interval of the median 39.0 to 41.0"
    assert lines["rate"] == ("3.0? GFLOP/s, 4.0? GB/s" if why else "3.0 GFLOP/s, 4.0 GB/s")
    untrusted = "omitted, because the time is unreliable: other processes took 50% of the CPU time"
    assert lines["share"] == (untrusted if why else "50% of the floor")
    assert lines["unfused"] == f"80.0{'' if why else '?'} us for one launch per factor: {untrusted}"
    run._print(
        {**figures, "doubt": "", "floor_us": None, "share_of_floor": None, "each_factor_doubt": ["", ""]}, "tile=1"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "80.0 us for one launch per factor: 2.00 times the time of one launch" in said
    assert "none: this device just copied 9 GB/s" in said
    assert f"share {NO_FLOOR}" in said
    run._print(
        {**figures, "doubt": "", "floor_us": 41.0, "share_of_floor": None, "each_factor_doubt": ["", ""]}, "tile=1"
    )
    said = " ".join(capsys.readouterr().out.split())
    assert "floor 41.0 us: this device" in said
    assert "share none, because the time is below the floor" in said


@pytest.mark.parametrize(("precision", "is_slower"), [("bfloat16", True), ("float32", False)])
def test_a_family_that_is_expected_to_be_faster_is_named(
    precision: str, is_slower: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu: Any = FakeGpu()
    monkeypatch.setattr(FAMILIES["wgmma"], "by_default", False)
    kernel, batch = KernelSpec(Pattern(2, 192, 768, 16), precision), 25088
    choice = choose(kernel, batch, limits_of(gpu), Wisdom())
    plan: Any = SimpleNamespace(choice=choice, source=SimpleNamespace(entry=kernel.name))
    monkeypatch.setattr("ksgen.devices.find_device", lambda _: gpu)
    monkeypatch.setattr("ksgen.measure.verify.measure", lambda *_: Measured(plan, 1e-4, 1e-2, 48, Blocks((1e-3,) * 8)))
    monkeypatch.setattr("ksgen.measure.roofline.measure_ceilings", lambda *_: Ceilings(3e12, 6e14))
    asked = ["2,192,768,16", "--precision", precision]
    figures = json.loads(CliRunner().invoke(run.command, [*asked, "--json"]).stdout)
    found = faster_family(choice.family, kernel, limits_of(gpu), batch)
    assert bool(found) is is_slower
    options = "" if precision == "float32" else f"--precision {precision} "
    told = re.fullmatch(
        r"(.*?)(?:; the cost model expects (\w+), which launchers .*?, to be (\d\.\d\d) times as fast)?"
        rf"; to find the fastest: ksgen calibrate 2,192,768,16 {options}--batch 25088",
        figures["why"],
    )
    assert told
    assert told.groups() == (choice.why, *((found[0].name, f"{found[1]:.2f}") if found else (None, None)))
    table = " ".join(CliRunner(env={"COLUMNS": "300"}).invoke(run.command, asked).stdout.split())
    assert f"chosen by {figures['why']} error" in table


@pytest.mark.parametrize("wrong", [None, "layer", "factor"])
def test_a_wrong_result_of_a_layer_or_of_a_factor_fails(wrong: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu: Any = FakeGpu()

    def measured(device: Any, kernel: KernelSpec, batch: int, *_: Any) -> Measured:
        source = SimpleNamespace(entry=kernel.name)
        plan: Any = SimpleNamespace(choice=choose(kernel, batch, limits_of(gpu), Wisdom()), source=source)
        is_wrong = wrong == ("layer" if kernel.is_chain else "factor")
        return Measured(plan, 1.0 if is_wrong else 1e-7, 1e-6, 48, Blocks((1e-3,) * 8))

    monkeypatch.setattr("ksgen.devices.find_device", lambda _: gpu)
    monkeypatch.setattr("ksgen.measure.verify.measure", measured)
    monkeypatch.setattr("ksgen.measure.roofline.measure_ceilings", lambda *_: Ceilings(3e12, 6e14))
    done = CliRunner().invoke(run.command, ["2,9,5,3", "1,4,18,3", "--batch", "70", "--json"])
    assert (done.exit_code, json.loads(done.stdout)["passed"]) == (0 if wrong is None else 1, wrong is None)


SPEC = """
layers:
  up: {chain: [[2,9,5,3], [1,4,18,3]], between: relu, activation: gelu, bias: true, batch: 40}
  lone: {chain: [[2,9,5,3]], layout: [bsl, bsf], precision: float64}
  apart: {chain: [[2,9,5,3], [1,4,54,1]], fuse: no}
  qkv: {group: [[[2,9,5,3]], [[2,9,5,3], [1,4,18,3]]], precision: [float64, float32]}
"""


def spec_in(folder: Path, text: str = SPEC) -> Path:
    found = folder / "small.yaml"
    found.write_text(text)
    return found


@pytest.mark.slow
@needs_device
def test_a_layer_of_a_spec_is_run_as_the_spec_says(tmp_path: Path) -> None:
    spec = spec_in(tmp_path)

    def figures(*words: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(ksgen("run", "--spec", str(spec), *words, "--runs", "2", "--json").stdout)
        assert found["passed"]
        return found

    layer = figures("--layer", "up")
    assert (layer["pattern"], layer["batch"], layer["between"]) == ([[2, 9, 5, 3], [1, 4, 18, 3]], 40, "relu")
    # launchers specialise no launch of several factors
    assert layer["kernel"] == "ks_2x9x5x3_1x4x18x3_float32_bsf_relu_between_bias_gelu"
    assert (layer["epilogue"], len(layer["each_factor_us"])) == (
        {"bias": True, "activation": "gelu", "residual": False},
        2,
    )
    assert figures("--layer", "up", "--batch", "7")["checked_rows"] == 7
    lone = figures("--layer", "lone", "--batch", "9")
    assert (lone["job"], lone["layout"], lone["precision"]) == ("multiply", "bsl", "float64")
    assert figures("--layer", "lone", "--batch", "9", "--layout", "bsf")["layout"] == "bsf"
    group = figures("--layer", "qkv", "--batch", "9", "--precision", "float32")
    assert (group["precision"], group["chains"]) == ("float32", [[[2, 9, 5, 3]], [[2, 9, 5, 3], [1, 4, 18, 3]]])
    assert len(group["each_factor_us"]) == 3
    spec_in(tmp_path, "layers: {total: {sum: [[[2,9,5,3]], [[2,9,5,3]]], bias: true}}")
    further = figures("--layer", "total[1]", "--batch", "9")
    assert further["epilogue"] == {"bias": False, "activation": "none", "residual": True}
    spec_in(tmp_path, "layers: {lone: {chain: [[2,9,5,3]], batch: [8, 9, any]}}")
    names = [figures(*words)["kernel"] for words in ((), ("--batch", "9"), ("--batch", "7"))]
    assert names == [f"ks_2x9x5x3_float32_bsf{end}" for end in ("_batch8", "_batch9", "")]


def test_only_a_residual_and_an_activation_have_an_order() -> None:
    assert epilogue_of(False, "relu", True, True).words == ("residual", "relu")
    for given in ((True, "none", True), (True, "gelu", False)):
        assert not epilogue_of(*given, False).residual_first
        with pytest.raises(SpecError, match=r"--residual-first without .*; accepted: with --residual and --activation"):
            epilogue_of(*given, True)


def test_a_sum_is_several_launches_each_with_a_name(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, "layers: {total: {sum: [[[2,9,5,3]], [[2,9,5,3]]]}}")
    with pytest.raises(SpecError, match=r"--layer total: .* has a sum .* name one: total\[0\], total\[1\]$"):
        launch_of_spec(spec, "total", Wanted(None, None, None, None))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--spec", "SPEC"), "SPEC has several layers; name one with --layer: up, lone, apart, qkv"),
        (
            ("--spec", "SPEC", "--layer", "lon"),
            "--layer 'lon': SPEC has no layer of that name; did you mean lone? accepted: up, lone, apart, qkv",
        ),
        (
            ("--spec", "SPEC", "--layer", "apart"),
            "SPEC: layer apart has fuse: no, which forbids one launch of all factors; accepted: a layer without it",
        ),
        (
            ("--spec", "SPEC", "--layer", "up", "--precision", "bfloat16"),
            "SPEC: no kernel of layer up is bfloat16; `ksgen show --spec SPEC` lists them",
        ),
        (("--layer", "up"), "--layer 'up' names a layer of a spec; accepted: with --spec FILE"),
        (
            ("2,9,5,3", "--spec", "SPEC", "--layer", "up", "--bias", "--between", "relu", "--job", "gradient"),
            "--bias, --job, --between, patterns with --spec; accepted: the spec's own layers, or patterns without "
            "--spec",
        ),
        (
            ("--spec", "SPEC", "--layer", "up", "--group-with", "2,9,5,3", "--out-layout", "bsl"),
            "--group-with, --out-layout with --spec; accepted: the spec's own layers, or patterns without --spec",
        ),
        ((), "got 0 patterns; accepted: one, such as ksgen run 1,192,48,2; one per factor of a layer; or --spec FILE"),
    ],
)
def test_what_is_no_layer_of_a_spec(words: tuple[str, ...], told: str, tmp_path: Path) -> None:
    spec = str(spec_in(tmp_path))
    done = ksgen("run", *(spec if word == "SPEC" else word for word in words))
    assert (done.returncode, done.stderr) == (2, f"ksgen: {told.replace('SPEC', spec)}\n")


@pytest.mark.slow
@needs_device
def test_a_batch_beyond_memory_is_reported_with_its_place(tmp_path: Path) -> None:
    """The batch is given in the spec, for one layer or for all, or on the command line."""
    layer = "  up: {chain: [[2,9,5,3], [1,4,18,3]], batch: 9000000000}\n"
    own = spec_in(tmp_path, f"layers:\n{layer}")
    done = ksgen("run", "--spec", str(own))
    assert done.returncode == 2
    assert done.stderr.startswith(
        f"ksgen: {own}:2: layers.up.batch: 9000000000: checking ks_2x9x5x3_1x4x18x3_float32_bsf_batch9000000000 takes "
    )
    assert ksgen("run", "--spec", str(own), "--batch", "8000000000").stderr.startswith(
        "ksgen: --batch 8000000000: checking "
    )
    common = spec_in(tmp_path, "defaults:\n  layout: bsl\n  batch: [9000000000]\nlayers:\n  lone: [[2,9,5,3]]\n")
    assert ksgen("run", "--spec", str(common)).stderr.startswith(
        f"ksgen: {common}:3: defaults.batch: 9000000000: checking "
    )
    told = ksgen("demo", str(common), "-o", str(tmp_path / "none")).stderr
    assert told.startswith(f"ksgen: {common}:3: defaults.batch: 9000000000: checking ")
    told = ksgen("tune", "--spec", str(common)).stderr
    assert told.startswith(f"ksgen: {common}:3: defaults.batch: 9000000000: checking ")


def test_a_spec_without_layers(tmp_path: Path) -> None:
    spec = spec_in(tmp_path, "kernels: [{pattern: [2,9,5,3]}]\n")
    done = ksgen("run", "--spec", str(spec))
    assert (done.returncode, done.stderr) == (
        2,
        f"ksgen: {spec} has no layers; accepted: a spec with `layers:`, or patterns\n",
    )
