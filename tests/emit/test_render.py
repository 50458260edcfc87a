"""Emission: the same input gives the same bytes, every field counts, and the manifest lists every file."""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from ksgen.build.request import Request
from ksgen.emit.render import emit, render, template_digest
from ksgen.errors import ConstantsError, KsgenError, LaunchError, SpecError
from ksgen.families.simt.shape import SimtConstants
from ksgen.pattern import Pattern
from ksgen.reference import to_dense
from ksgen.spec import PRECISIONS, STORAGES, Epilogue, KernelSpec, load, parse
from ksgen.spec.kernel import TIES, activations_of
from tests.support.native import chosen_native

ROOT = Path(__file__).parents[2]
KERNEL = KernelSpec(Pattern(2, 64, 48, 4), "float32", "bsf")
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")
SPEC = """
kernels: ["2,8,8,2"]
layers: {square: [[2,8,8,2], [1,4,8,4]]}
"""


def test_the_committed_folder_is_what_emit_writes(tmp_path: Path) -> None:
    emit(load(ROOT / "specs" / "vit.yaml"), tmp_path / "vit")
    written = {path.name: path.read_bytes() for path in (tmp_path / "vit").iterdir()}
    committed = {
        path.name: path.read_bytes() for path in (ROOT / "generated" / "vit").iterdir() if path.name != "__pycache__"
    }
    assert committed == written


def test_the_spec_of_llama_is_emitted(tmp_path: Path) -> None:
    spec = load(ROOT / "specs" / "llama.yaml")
    emit(spec, tmp_path / "llama")
    sources = list((tmp_path / "llama").glob("*.cu"))
    assert len(sources) == len(spec.kernels) == 64


def test_the_same_input_gives_the_same_bytes_in_another_process(tmp_path: Path) -> None:
    program = (
        "from ksgen.emit.render import *; from tests.emit.test_render import *; print(render(KERNEL, CONSTANTS).digest)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert outputs == {render(KERNEL, CONSTANTS).digest}


def variants() -> list[tuple[str, KernelSpec, Any]]:
    """A kernel per field of a specification, and per constant, that differs in it alone."""
    found = [("itself", KERNEL, CONSTANTS)]
    for letter in "abcd":
        found.append(
            (
                letter,
                replace(KERNEL, chains=replace(KERNEL.pattern, **{letter: getattr(KERNEL.pattern, letter) + 1})),
                CONSTANTS,
            )
        )
    found.append(("precision", replace(KERNEL, precision="float64"), CONSTANTS))
    found.append(("layout", replace(KERNEL, layout="bsl"), replace(CONSTANTS, tile_d=1)))
    found.append(("layout too", KERNEL, replace(CONSTANTS, tile_d=1)))
    for change in ({"bias": True}, {"activation": "relu"}, {"residual": True}):
        found.append((str(change), replace(KERNEL, epilogue=Epilogue(**change)), CONSTANTS))
    found.append(("batch", replace(KERNEL, batch=7), CONSTANTS))
    found.append(("stride", replace(KERNEL, stride="any"), CONSTANTS))
    found += [(f"tied {each}", replace(KERNEL, tied=(each,)), CONSTANTS) for each in TIES if each]
    first = Epilogue(activation="relu", residual=True, residual_first=True)
    found += [(str(each), replace(KERNEL, epilogue=each), CONSTANTS) for each in (first, Epilogue(False, "relu", True))]
    found += [(f"weights {each}", replace(KERNEL, weights=each), CONSTANTS) for each in STORAGES]
    in_registers = replace(CONSTANTS, copy="registers", stages=2)
    found += [(f"inputs {each}", replace(KERNEL, weights=each, inputs=each), in_registers) for each in STORAGES]
    other = SimtConstants(128, 64, 16, 4, 4, 4, 4, 2, "registers")
    for name in (field.name for field in fields(SimtConstants) if field.name not in ("copy", "tile_d")):
        found.append((name, KERNEL, replace(CONSTANTS, **{name: getattr(other, name)})))
    found.append(("copy", KERNEL, in_registers))
    found.append(("job", replace(KERNEL, job="gradient"), None))
    return found


def test_every_field_changes_the_text_the_entry_or_both_and_so_the_key() -> None:
    known = {
        "chains",
        "precision",
        "layout",
        "epilogue",
        "batch",
        "job",
        "stride",
        "between",
        "out_layout",
        "weights",
        "inputs",
        "tied",
    }
    assert {field.name for field in fields(KernelSpec)} == known
    digests = {}
    for name, kernel, constants in variants():
        source = render(kernel, constants)
        digest = Request(source.text, source.entry, "sm_90a").digest
        assert digest not in digests, (name, digests[digest])
        digests[digest] = name
        assert kernel == KERNEL or kernel.digest != KERNEL.digest
        assert render(kernel, constants, dialect="opencl").digest != source.digest


def test_a_chains_factors_change_the_text_the_name_and_the_digest() -> None:
    chains = [KernelSpec((first, Pattern(2, 8, 8, 2))) for first in (Pattern(2, 16, 6, 1), Pattern(1, 32, 6, 1))]
    chains += [replace(chains[0], between="relu"), replace(chains[0], out_layout="bsl")]
    sources = [render(each, family="vector", dialect="opencl") for each in chains]
    assert (
        len({source.text for source in sources})
        == len({source.entry for source in sources})
        == len({each.digest for each in chains})
        == 4
    )
    alone = KernelSpec(Pattern(2, 8, 8, 2))
    assert alone.digest not in {each.digest for each in chains}


def test_the_chains_of_a_group_change_source_name_and_digest() -> None:
    one, other = (Pattern(2, 8, 8, 2),), (Pattern(1, 5, 32, 1), Pattern(1, 3, 5, 1))
    groups = [KernelSpec((one, *others)) for others in ((one,), (other,), (one, other))]
    sources = [render(each, family="vector", dialect="opencl") for each in groups]
    assert [source.kernel.name for source in sources] == [
        "ks_2x8x8x2_and_2x8x8x2_float32_bsf",
        "ks_2x8x8x2_and_1x5x32x1_1x3x5x1_float32_bsf",
        "ks_2x8x8x2_and_2x8x8x2_and_1x5x32x1_1x3x5x1_float32_bsf",
    ]
    assert len({source.text for source in sources}) == len({each.digest for each in groups}) == 3
    with pytest.raises(SpecError, match="of a group; accepted: equal numbers of input features"):
        KernelSpec((one, (Pattern(1, 5, 31, 1),)))


def test_all_precisions_and_epilogues_render_in_both_dialects() -> None:
    for dialect in ("cuda", "opencl"):
        for precision in PRECISIONS:
            for activation in activations_of(precision):
                source = render(
                    replace(KERNEL, precision=precision, epilogue=Epilogue(True, activation, True)), dialect=dialect
                )
                assert "{{" not in source.text
                assert "{%" not in source.text
                assert source.text.endswith("}\n")


@pytest.mark.parametrize(("activation", "function"), [("gelu", "erf("), ("gelu_tanh", "tanh(")])
def test_gelu_is_short_in_cuda_sources_with_results_in_16_bits(activation: Any, function: str) -> None:
    """Each is the last activation, and the one between two factors."""
    for precision in ("float16", "bfloat16", "float32", "tf32x3"):
        plain = KernelSpec(KERNEL.chains, precision, epilogue=Epilogue(activation=activation))
        chain = KernelSpec((Pattern(2, 64, 64, 1), Pattern(1, 96, 64, 2)), precision, between=activation)
        for kernel, family in ((plain, "simt"), (chain, "mma")):
            is_short = precision in ("float16", "bfloat16")
            if family == "simt" or precision != "float32":
                text = render(kernel, family=family).text
                assert ("share_of_tail(value, power)" in text, function in text) == (is_short, not is_short)
    text = render(replace(KERNEL, precision="float16", epilogue=Epilogue(activation=activation)), dialect="opencl").text
    assert function in text


def test_a_text_says_what_it_is_and_nothing_of_where_it_was_made() -> None:
    source = render(KERNEL)
    first, second, *_ = source.text.splitlines()
    assert (
        first
        == f"// ks_2x64x48x4_float32_bsf   ksgen 0.1.0, simt.cu.j2 {template_digest('simt')}, spec {KERNEL.digest}"
    )
    assert second == "// Y = X K^T, support I_2 ⊗ 1_{64x48} ⊗ I_4, float32, batch-size-first."
    for private in (str(ROOT), str(Path.home()), "202"):
        assert private not in source.text


@pytest.mark.parametrize(
    ("kernel", "arrays"),
    [
        (KERNEL, ""),
        (replace(KERNEL, layout="bsl"), "X and Y are"),
        (replace(KERNEL, layout="bsl", job="gradient"), "X and dY are"),
        (KernelSpec((Pattern(2, 16, 6, 1), Pattern(2, 8, 8, 2)), out_layout="bsl"), "Y is"),
    ],
)
def test_a_source_says_which_arrays_are_in_batch_size_last(kernel: KernelSpec, arrays: str) -> None:
    """Formulas have X[s, ...], whatever the order in memory is."""
    line = re.compile(r"^// These are logical indices\. In memory, (.*) \(features, batch\)\.$", re.MULTILINE)
    assert line.findall(render(kernel).text) == ([arrays] if arrays else [])


def test_the_entry_carries_a_hash_where_the_constants_are_not_the_default() -> None:
    assert render(KERNEL).entry == "ks_2x64x48x4_float32_bsf"
    tuned = render(KERNEL, CONSTANTS).entry
    assert tuned.startswith("ks_2x64x48x4_float32_bsf_")
    assert len(tuned) == len("ks_2x64x48x4_float32_bsf_") + 8


def test_bad_constants_and_dialects_are_refused() -> None:
    with pytest.raises(ConstantsError, match="ks_2x64x48x4_float32_bsf: tile_d=8 must be at most d=4; try 4"):
        render(KERNEL, replace(CONSTANTS, tile_d=8))
    with pytest.raises(KsgenError, match="vector has no CUDA source; accepted: dialect=opencl"):
        render(KernelSpec((Pattern(2, 16, 6, 1), Pattern(2, 8, 8, 2))), family="vector")
    for family in ("mma", "simt"):
        chain = KernelSpec((Pattern(2, 32, 16, 1), Pattern(2, 16, 16, 2)))
        with pytest.raises(KsgenError, match=f"{family} has no OpenCL source; accepted: dialect=cuda"):
            render(chain if family == "simt" else replace(KERNEL, precision="float16"), family=family, dialect="opencl")
    with pytest.raises(
        ConstantsError,
        match="ks_2x32x16x1_2x16x16x2_float32_bsf: no family can run all factors in one launch on this device",
    ):
        render(chain, dialect="opencl")
    with pytest.raises(KsgenError, match="unknown dialect 'metal'; accepted: cuda, opencl"):
        render(KERNEL, dialect="metal")
    with pytest.raises(ConstantsError, match="unknown kernel family 'fast'"):
        render(KERNEL, family="fast")


def test_emitted_launchers_can_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse(SPEC, "small.yaml")
    emit(spec, tmp_path / "made" / spec.name)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"made.{spec.name}")
    assert module.__all__ == ["ks_2_8_8_2", "ks_1_4_8_4", "layer_square"]
    assert repr(module.ks_2_8_8_2) == "Launcher(2, 8, 8, 2)"
    assert repr(module.layer_square) == "ChainLauncher(Launcher(2, 8, 8, 2), Launcher(1, 4, 8, 4))"


def test_emitted_groups_can_be_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = "deep: {chain: [[2,8,8,2], [1,4,8,4]], between: relu, fuse: no, out_layout: bsl}"
    spec = parse(
        f"layers: {{heads: {{group: [[[2,8,8,2], [1,4,8,4]], [[1,3,32,1]]]}}, up: [[1,3,32,1]], {deep}}}",
        "several.yaml",
    )
    emit(spec, tmp_path / "made" / spec.name)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"made.{spec.name}")
    assert module.__all__ == ["ks_2_8_8_2", "ks_1_4_8_4", "ks_1_3_32_1", "layer_up", "layer_deep", "layer_heads"]
    square, wide = "ChainLauncher(Launcher(2, 8, 8, 2), Launcher(1, 4, 8, 4))", "ChainLauncher(Launcher(1, 3, 32, 1))"
    assert repr(module.layer_heads) == f"GroupLauncher({square}, {wide})"
    assert repr(module.layer_deep) == f"{square[:-1]}, between='relu', out_layout='bsl', fuse='no')"
    manifest = json.loads((tmp_path / "made" / spec.name / "manifest.json").read_text())
    assert manifest["options"] == {"deep": {"between": "relu", "out_layout": "bsl", "fuse": "no"}}
    assert manifest["groups"] == {"heads": [[[2, 8, 8, 2], [1, 4, 8, 4]], [[1, 3, 32, 1]]]}


def test_emitted_sums_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np = pytest.importorskip("numpy")
    chosen_native(monkeypatch)
    spec = parse("layers: {total: {sum: [[[2,8,8,2], [1,4,8,4]], [[1,16,32,1]]], bias: true}}", "added.yaml")
    emit(spec, tmp_path / "made" / spec.name)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module(f"made.{spec.name}")
    assert module.__all__ == ["ks_2_8_8_2", "ks_1_4_8_4", "ks_1_16_32_1", "layer_total"]
    manifest = json.loads((tmp_path / "made" / spec.name / "manifest.json").read_text())
    assert manifest["sums"] == {"total": [[[2, 8, 8, 2], [1, 4, 8, 4]], [[1, 16, 32, 1]]]}
    draw = np.random.default_rng(0).standard_normal
    x, bias = draw((5, 32)).astype("f4"), draw(16).astype("f4")
    weights = [[draw(pattern.shape).astype("f4") for pattern in chain] for chain in spec.sums["total"]]
    (first, second), (alone,) = ([to_dense(*each) for each in zip(*both, strict=True)] for both in zip(
        spec.sums["total"], weights, strict=True
    ))  # fmt: skip
    expected = x @ (second @ first + alone).T + bias
    np.testing.assert_allclose(module.layer_total(x, weights, bias=bias), expected, rtol=1e-4, atol=1e-4)
    with pytest.raises(LaunchError, match="bias is missing"):
        module.layer_total(x, weights)


def test_the_manifest_lists_every_kernel_with_its_hash(tmp_path: Path) -> None:
    spec = parse(SPEC, "small.yaml")
    sources = emit(spec, tmp_path / "out")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert [row["sha256"] for row in manifest["kernels"]] == [source.digest for source in sources]
    assert manifest["layers"] == {"square": [[2, 8, 8, 2], [1, 4, 8, 4]]}
    written = {path.name: sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "out").iterdir()}
    del written["manifest.json"]
    assert manifest["files"] == written
    assert {row["file"]: row["sha256"] for row in manifest["kernels"]}.items() <= written.items()


def test_a_second_emit_replaces_the_first_and_leaves_no_stale_file(tmp_path: Path) -> None:
    emit(parse(SPEC), tmp_path / "out")
    emit(parse('kernels: ["1,4,4,1"]'), tmp_path / "out", dialect="opencl")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "__init__.py", "ks_1x4x4x1_float32_bsf.cl", "launchers.py", "manifest.json",
    ]  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
