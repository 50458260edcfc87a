"""`ksgen show`: sizes and costs of patterns, chains and specs, at any width."""

import json
import re
from functools import cache
from pathlib import Path

import pytest

from ksgen.commands import doctor
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES
from tests.support.commands import run
from tests.support.program import needs_device

compilers_found = cache(doctor._compilers)  # each is tried, which takes seconds


def test_show_gives_sizes_and_costs() -> None:
    (facts,) = json.loads(run("show", "2,48,192,1", "--batch", "1000", "--json").stdout)["patterns"]
    assert (facts["rows"], facts["columns"], facts["weights"], facts["density"]) == (96, 384, 18432, 0.5)
    assert facts["gflop"] == pytest.approx(2 * 1000 * 18432 / 1e9)
    assert facts["mbyte"] == pytest.approx(4 * (1000 * 480 + 18432) / 1e6, rel=1e-5)
    assert facts["threads"] % 32 == 0


@pytest.mark.parametrize(("precision", "least"), [("float32", 1), ("complex64", 1), ("c64_tf32x3", 3)])
def test_show_counts_real_operations_of_complex_numbers(precision: str, least: int) -> None:
    (facts,) = json.loads(run("show", "1,192,48,2", "--precision", precision, "--json").stdout)["patterns"]
    assert facts["dense_gflop"] == pytest.approx(facts["gflop"] / 0.5, rel=1e-5)
    assert facts["multiply_adds_ratio"] >= least


def test_json_has_the_order_of_outputs() -> None:
    facts = json.loads(run("show", "4,32,16,1@k1:4.i.k2", "1,16,8,16@j.k", "--json").stdout)
    orders = [[4, 32, 16, 1, "k1:4.i.k2:8"], [1, 16, 8, 16, "j.k"]]
    assert [each["pattern"] for each in facts["patterns"]] == orders
    assert facts["layers"]["chain"]["patterns"] == orders


def test_show_of_a_chain_and_of_a_spec() -> None:
    chain = run("show", "2,48,192,1", "1,192,48,2")
    assert "chain: 2,48,192,1 then 1,192,48,2, 384 -> 384, 25.0% of dense" in chain.stdout
    spec = run("show", "--spec", "specs/vit.yaml")
    assert "attention: 2,48,192,1 then 1,192,48,2" in spec.stdout
    assert spec.stdout.count(" weights, ") == 6


@pytest.mark.slow
def test_show_says_how_layers_and_groups_are_launched(tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(
        """
        defaults: {precision: [float32, float16]}
        layers:
          heads: {group: [[[2,48,64,1], [1,64,48,2]], [[2,48,64,1]]], between: silu}
          transposed: {chain: [[2,48,64,1], [1,64,48,2]], out_layout: bsl, fuse: yes, stride: any}
          apart: {chain: [[2,48,64,1], [1,64,48,2]], fuse: no, bias: true, activation: [gelu, relu]}
          added: {sum: [[[2,48,64,1], [1,64,48,2]], [[2,64,64,1]]], bias: true}
        """
    )
    spec = ("show", "--spec", str(tmp_path / "layers.yaml"), "--precision", "float16")
    found = json.loads(run(*spec, "--json").stdout)["layers"]
    heads = found["heads"]
    assert [each["out_features"] for each in heads["chains"]] == [128, 96]
    assert (heads["launch"]["between"], heads["launch"]["by_device"]["sm_75"]) == ("silu", None)
    assert found["transposed"]["launch"]["by_device"] == {
        "sm_75": None, "sm_80": "mma", "sm_86": "mma", "sm_90a": "mma", "processor": "vector"
    }  # fmt: skip
    assert set(found["apart"]["launch"]["by_device"].values()) == {None}
    assert found["apart"]["launch"]["kernel"] == "ks_2x48x64x1_1x64x48x2_float16_bsf_bias_gelu"
    told = run(*spec).stdout
    assert "heads[1]: 2,48,64,1, 128 -> 96, 50.0% of dense" in told
    assert "transposed: " in told
    assert found["added[0]"]["launch"]["kernel"] == "ks_2x48x64x1_1x64x48x2_float16_bsf_bias"
    assert "added[1]: 2,64,64,1, 128 -> 128, 50.0% of dense" in told
    on_gpus = "one launch per factor on sm_75; one launch, mma on sm_80, sm_86, sm_90a"
    assert f"batch 25088: {on_gpus}; one launch, vector on a processor of 16 cores" in told
    for size, on_processors in ((64, "vector"), (256, None)):  # where large weights are shared out factor by factor
        group = json.loads(
            run("show", f"6,{size},{size},1", "--group-with", f"6,32,{size},1", "--batch", "1", "--json").stdout
        )
        assert [each["kernel"] for each in group["patterns"]] == [f"ks_6x{b}x{size}x1_float32_bsf" for b in (size, 32)]
        by_device = group["layers"]["group"]["launch"]["by_device"]
        assert by_device["processor"] == on_processors


@needs_device
def test_show_of_a_layer_on_a_device_says_why() -> None:
    told = run("show", "2,9,5,3", "1,4,18,3", "--device", "native", "--batch", "7000").stdout
    assert "ks_2x9x5x3_1x4x18x3_float32_bsf: one launch, vector: block=" in told
    assert "intermediates stay in the cache" in told


def test_without_a_device_the_kernel_is_one_for_the_batch_and_processors_are_mentioned() -> None:
    for batch, family in ((1, "gemv"), (25088, "simt")):
        (facts,) = json.loads(run("show", "1,192,48,2", "--batch", str(batch), "--json").stdout)["patterns"]
        assert (facts["family"], facts["by_device"]["sm_80"], facts["by_device"]["processor"]) == (
            family,
            family,
            "vector",
        )
        assert facts["chosen_by"] == "the family's default for sm_80"
    assert (
        "Kernels are those for sm_80. For a device of this machine, give --device" in run("show", "1,192,48,2").stdout
    )


def test_a_group_is_answered_first_and_in_short() -> None:
    lines = run(
        "show", "6,64,64,1", "--group-with", "6,64,64,1", "--group-with", "6,64,64,1", COLUMNS="200"
    ).stdout.splitlines()
    assert lines[3].startswith(
        "  ks_6x64x64x1_and_6x64x64x1_and_6x64x64x1_float32_bsf_strided, batch 25088: layer by layer on sm_75"
    )
    assert len(lines) == 9
    assert [line.split()[0] for line in lines[4:8]] == ["pattern", "batch", "by", "kernel"]


@needs_device
def test_a_processors_kernel_is_described_in_its_own_words() -> None:
    gpu, processor = (run("show", "6,64,64,1", *more, COLUMNS="200").stdout for more in ((), ("--device", "native")))
    for words in ("threads", "shared memory", "registers per thread"):
        assert (words in gpu, words in processor) == (True, False)
    assert "parts, which the cores share, and about " in processor
    assert "MB that cores read and write" in processor


@needs_device
def test_a_processor_has_the_gain_that_results_of_processors_suggest() -> None:
    asked = ("show", "1,64,64,16", "--device", "native")
    words = "a d / (bc) 0.0039: the fastest other contender took 4.3 times as long at batch 6272, on average over such"
    told = {layout: run(*asked, "--layout", layout, COLUMNS="200").stdout for layout in ("bsf", "bsl")}
    assert {layout: words in " ".join(each.split()) for layout, each in told.items()} == {
        "bsf": True, "bsl": False
    }  # fmt: skip
    (facts,) = json.loads(run(*asked, "--json").stdout)["patterns"]
    assert facts["on_processors"] == {"rule": "a d / (bc)", "value": 0.00390625, "gain": 4.3, "batch": 6272}
    assert "on_processors" not in json.loads(run(*asked[:2], "--json").stdout)["patterns"][0]
    for other in ((*asked, "--weights", "int8"), ("show", "1,64,64,16@j.k", *asked[2:])):  # no plain products
        assert "on_processors" not in json.loads(run(*other, "--json").stdout)["patterns"][0]


def test_show_of_weights_in_eight_bits() -> None:
    plain, stored = (
        json.loads(run("show", "1,768,192,2", "--batch", "1", "--weights", each, "--json").stdout)["patterns"][0]
        for each in ("same", "int8")
    )
    assert "stored_weights" not in plain
    assert (stored["kernel"], stored["stored_weights"]) == ("ks_1x768x192x2_float32_int8_bsf", "int8")
    assert stored["mbyte"] == pytest.approx(plain["mbyte"] - 1e-6 * (3 * 768 * 192 * 2 - 4 * 1536), rel=1e-5)


def test_patterns_are_arguments_or_options() -> None:
    once, again = "2,48,192,1", "1,192,48,2"
    usual = run("show", once, again).stdout
    assert run("show", once, "--pattern", again).stdout == usual
    assert run("show", "--pattern", once, "--pattern", again).stdout == usual


@pytest.mark.exhaustive
@pytest.mark.parametrize("columns", ["0", "-1", "", "3", "39", "80", "9" * 5000, "²", "x"])
@pytest.mark.parametrize("command", [("show", "1,192,48,2"), ("doctor",)])
def test_any_width_shows_all_that_there_is(
    command: tuple[str, ...], columns: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))  # not the one that grows while other tests run
    monkeypatch.setattr(doctor, "_compilers", compilers_found)
    usual, done = (run(*command, COLUMNS=width, LINES=width) for width in ("80", columns))
    assert done.exit_code == usual.exit_code, done.exception
    if columns in ("3", "39"):
        assert max(map(len, done.stdout.splitlines())) <= 40
        assert re.sub(r"\W", "", done.stdout)[:40] == re.sub(r"\W", "", run(*command, COLUMNS="40").stdout)[:40]
    else:
        assert done.stdout == usual.stdout


def test_show_takes_precisions_layouts_and_storage_from_a_spec(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        """
        defaults: {precision: [bfloat16, float32], layout: [bsl, bsf]}
        kernels: [[1,192,48,2], {pattern: [1,64,64,1], precision: float64, bias: true, batch: 7}]
        layers: {up: {chain: [[6,64,64,1], [1,768,384,1]], weights: int8}}
        """
    )

    def shown(*more: str) -> tuple[list[str], list[str]]:
        found = json.loads(run("show", "--spec", str(tmp_path / "own.yaml"), *more, "--json").stdout)
        return [each["kernel"] for each in found["patterns"]], [
            each["launch"]["kernel"] for each in found["layers"].values()
        ]

    kernels, launches = shown()
    assert kernels == [
        "ks_1x192x48x2_bfloat16_bsl", "ks_1x64x64x1_float64_bsl", "ks_6x64x64x1_bfloat16_int8_bsl",
        "ks_1x768x384x1_bfloat16_int8_bsl"
    ]  # fmt: skip
    assert launches == ["ks_6x64x64x1_1x768x384x1_bfloat16_int8_bsl"]
    assert shown("--precision", "float64") == (["ks_1x64x64x1_float64_bsl"], [])
    kernels, launches = shown("--weights", "int8", "--precision", "float32", "--layout", "bsf")
    assert kernels == ["ks_6x64x64x1_float32_int8_bsf", "ks_1x768x384x1_float32_int8_bsf"]
    assert launches == ["ks_6x64x64x1_1x768x384x1_float32_int8_bsf"]
    caught = run("show", "--spec", str(tmp_path / "own.yaml"), "--precision", "float64", "--weights", "int8").exception
    own = tmp_path / "own.yaml"
    says = "no kernel in it has precision float64 and weights int8"
    assert str(caught) == f"{own}: {says}; `ksgen show --spec {own}` lists them"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give patterns such as 1,192,48,2, or --spec FILE: one of the two"),
        (["1,2,3,1", "9,9,9,1"], "1,2,3,1 gives 2 features, but the next pattern (9,9,9,1) takes 81; accepted: "),
        (["1,2,3,1", "1,2,2,1", "--png", "x.png"], "--png draws one pattern; got 2"),
        (["1,2,3,1", "--png", "/nowhere/x.png"], "/nowhere/x.png: cannot be written (No such file or directory)"),
        (["1,2"], "'1,2' is not a pattern"),
        (["--spec", "specs/vit.yaml", "--between", "relu"], "--between with --spec; accepted: the spec's own layers"),
    ],
)
def test_mistakes_of_show(arguments: list[str], message: str) -> None:
    caught = run("show", *arguments).exception
    assert isinstance(caught, KsgenError)
    assert str(caught).startswith(message)


def test_a_family_that_is_expected_to_be_faster_is_shown_of_a_pattern_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES["wgmma"], "by_default", False)
    asked = ("show", "2,192,768,16", "--precision", "bfloat16")
    facts = json.loads(run(*asked, "--json").stdout)["patterns"][0]
    ((target, found),) = facts["expected_faster"].items()
    assert (facts["by_device"][target], target, found["family"]) == ("mma", "sm_90a", "wgmma")
    assert f"wgmma expected {found['factor']:.2f} times as fast" in run(*asked, COLUMNS="200").stdout
    assert "expected_faster" not in json.loads(run(*asked, "6144,2,1,1", "--json").stdout)["patterns"][0]


def test_a_picture_does_not_replace_the_spec(tmp_path: Path) -> None:
    spec = tmp_path / "one.yaml"
    spec.write_text("kernels: [[2, 3, 4, 5]]\n")
    caught = run("show", "--spec", str(spec), "--png", str(spec)).exception
    assert str(caught) == f"{spec}: it is an input of this command; choose another file to write"
    assert spec.read_text() == "kernels: [[2, 3, 4, 5]]\n"
