"""What the commands that compile share."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksgen.build.build import AbsentCompiler
from ksgen.build.request import Binary
from ksgen.calibration.proof import cases_of
from ksgen.commands import build
from ksgen.commands.build import Compiled, _processor_setup, _Setup, _sources, _sources_for, compile_proofs
from ksgen.devices import find_device
from ksgen.emit.render import render
from ksgen.emit.templates import template_digest
from ksgen.errors import ToolchainError
from ksgen.families import FAMILIES, cuda_limits, family_for
from ksgen.launch import fused, planner
from ksgen.launch.choice import limits_of
from ksgen.launch.plan import Loaded
from ksgen.launch.planner import Planner
from ksgen.passport import unproven
from ksgen.spec import STRIDES, Epilogue, KernelSpec, parse
from ksgen.wisdom import Entry, Wisdom, save
from tests.support.commands import run
from tests.support.fake_gpu import FakeGpu
from tests.support.launching import plan_afresh
from tests.support.native import chosen_native
from tests.support.program import ksgen, needs_compiler

ONE = 'kernels: [{pattern: "2,9,5,3", batch: 64}]\n'  # one binary per target


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize("command", ["build", "bundle"])
def test_an_unknown_device_is_named(command: str, spec: Path, tmp_path: Path) -> None:
    spec.write_text(ONE)
    wisdom = tmp_path / "wisdom"
    wisdom.mkdir()
    (wisdom / "abacus.json").write_text('{"device": "Abacus", "entries": []}')
    arguments = (command, spec.name, "--arch", "sm_80", "--device-name")
    done = ksgen(*arguments, "Abakus", cwd=spec.parent, KSGEN_WISDOM_DIR=str(wisdom))
    assert done.returncode == 0
    told = "--device-name 'Abakus': no wisdom of that name, so constants are the defaults; known: Abacus"
    first, second = done.stderr.splitlines()
    assert first == told
    assert second == "compiling 1 source of small for sm_80"  # there is no bar in a pipe


@pytest.mark.slow
@needs_compiler
def test_a_target_that_no_launcher_asks_for_is_reported(spec: Path) -> None:
    spec.write_text(ONE)
    done = ksgen("build", spec.name, "--arch", "sm_90", cwd=spec.parent)
    assert (
        done.stderr.splitlines()[0] == "--arch sm_90: launchers on such a GPU ask for sm_90a, and take no other binary"
    )


def test_this_processor_gets_its_tuned_constants_and_the_defaults(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    device = chosen_native(monkeypatch)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    spec = parse("kernels: [[2,9,5,3]]")
    (kernel,), setup = spec.kernels, _processor_setup("host")
    usual = {source.text for source in _sources(spec, setup.limits, setup.dialect, Wisdom())}
    assert {source.text for source in _sources_for(spec, setup, {None: Wisdom()})} == usual
    family = family_for(kernel, setup.limits, 1568)
    found = replace(
        family.default(kernel, setup.limits, 1568), streaming=1 - family.default(kernel, setup.limits, 1568).streaming
    )
    measured = {"median_us": 1.0, "template": template_digest(family.name), "date": "2026-11-25"}
    save(device.name, [Entry(kernel, 1568, family.name, found, measured)])
    tuned = render(kernel, found, family=family.name, dialect=setup.dialect).text
    assert {source.text for source in _sources_for(spec, setup, {None: Wisdom()})} == {tuned, *usual}
    # another device was named
    assert {source.text for source in _sources_for(spec, setup, {"another": Wisdom()})} == usual


def test_a_bundle_for_a_device_also_has_the_defaults(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Devices of another name take the defaults, even for the kernels that are tuned for the named one."""
    limits, packed = cuda_limits("sm_80"), list[str]()
    (kernel,) = parse(ONE).kernels
    usual = FAMILIES["simt"].default(kernel, limits, 64)
    other = replace(usual, stages=2)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    save("Abacus", [Entry(kernel, 64, "simt", other, {"median_us": 1.0})])
    monkeypatch.setattr(build, "_setups", lambda _: [_Setup("sm_80", AbsentCompiler("none"), "cuda", limits)])
    binary = Binary(b"", "", "sm_80")
    monkeypatch.setattr(build, "build_many", lambda requests, *_, **__: [binary for _ in requests])
    monkeypatch.setattr(build, "write_bundle", lambda _, pairs, *__: packed.extend(each.text for each, _ in pairs))
    (tmp_path / "one.yaml").write_text(ONE)
    (tmp_path / "one.ksb").touch()
    run(
        "bundle",
        str(tmp_path / "one.yaml"),
        "--arch",
        "sm_80",
        "--device-name",
        "Abacus",
        "-o",
        str(tmp_path / "one.ksb"),
    )
    assert set(packed) == {render(kernel, each, family="simt", dialect="cuda").text for each in (usual, other)}


LAYERS = """
defaults: {precision: float16}
layers:
  heads: {group: [[[2,16,32,1], [1,16,32,1]], [[2,24,32,1]]], bias: true}
  up: {chain: [[2,16,32,1], [1,16,32,1]], between: relu, out_layout: bsl, fuse: yes}
"""


@pytest.mark.slow
def test_texts_of_layers_are_those_that_launchers_on_a_gpu_ask_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The one launch of each, and what packs its weights: of the target's usual card, for whatever batch."""
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(fused, "refuse_capture", lambda *_: None)
    gpu: Any = FakeGpu()
    gpu.limits = replace(gpu.limits, multiprocessors=cuda_limits(gpu.target).multiprocessors)
    spec = replace(parse(LAYERS), kernels=())  # of single factors
    held = {source.text for source in _sources(spec, limits_of(gpu), gpu.dialect, Wisdom())}
    monkeypatch.setattr(Planner, "_binary", lambda self, device, source, target: Binary(b"", source.entry, target))
    monkeypatch.setattr(
        planner, "load", lambda _device, source, binary: Loaded(source, binary, dict.fromkeys(source.entries))
    )
    groups: Any = [(spec.groups["heads"], Epilogue(True), stride, {}) for stride in STRIDES]
    mixed: Any = ((spec.layers["up"],), Epilogue(), "dense", {"between": "relu", "out_layout": "bsl"})
    found = 0
    for batch in (30, 100000):
        for chains, epilogue, stride, more in (*groups, mixed):
            kernel = KernelSpec(chains, "float16", "bsf", epilogue, stride=stride, **more)
            plan = fused.fused_plan(gpu, kernel, batch, "auto" if len(chains) > 1 else "yes")
            if plan:
                found += 1
                assert {plan.source.text, *(each.source.text for each in plan.packers)} <= held
    assert found > 2


TIES = """
kernels: [{pattern: [3,64,48,4], tied: ad}]
layers:
  k: {chain: [[8,16,16,1], [1,16,16,8]], tied: [a, d], fuse: yes}
  apart: {chain: [[8,16,16,1], [1,16,16,8]], tied: [a, d], precision: float16, fuse: no}
"""


@pytest.mark.parametrize("is_gpu", [True, False])
def test_texts_of_tied_weights_are_those_that_launchers_ask_for(
    is_gpu: bool, without_tiles: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Calls take them if weights repeat their slices: of one factor, of a chain, and where no family reads ties."""
    plan_afresh(monkeypatch)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    monkeypatch.setattr(fused, "refuse_capture", lambda *_: None)
    device: Any = FakeGpu() if is_gpu else find_device("native")
    if is_gpu:
        multiprocessors = cuda_limits(device.target).multiprocessors
        monkeypatch.setattr(device, "limits", replace(device.limits, multiprocessors=multiprocessors))
    spec = parse(TIES)
    held = {source.text for source in _sources(spec, limits_of(device), device.dialect, Wisdom())}
    monkeypatch.setattr(Planner, "_binary", lambda self, device, source, target: Binary(b"", source.entry, target))
    monkeypatch.setattr(
        planner, "load", lambda _device, source, binary: Loaded(source, binary, dict.fromkeys(source.entries))
    )
    found = list[Any]()
    for batch in (64, 32768):
        found += [planner.PLANNER.plan(device, kernel, batch) for kernel in spec.kernels]
        found += [fused.fused_plan(device, kernel, batch, "yes") for kernel in spec.launches["k"]]
    assert {each.source.text for plan in found for each in (plan, *plan.packers)} <= held
    tied = [plan.kernel.tied for plan in found]
    assert {("ad",), ("a",), ("d",), ("a", "d")} <= set(tied)
    assert (() in tied) == is_gpu  # tensor cores read whole weights in 16 bits


def test_a_target_whose_families_need_a_proof_gets_other_kernels_and_the_proofs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine without a compiler has what serves until a family is proven, and what proves it."""
    spec = parse("kernels: [{pattern: [1,1024,1024,1], precision: float16}]")
    target, limits = "sm_90a", cuda_limits("sm_90a")
    setup = _Setup(target, AbsentCompiler("none"), "cuda", limits)
    sources = _sources_for(spec, setup, {"another": Wisdom()})
    by_family = {source.family: source for source in sources}
    assert {"wgmma", "mma"} <= set(by_family)
    waiting = replace(limits, bars=unproven(target))
    assert {source.text for source in _sources(spec, waiting, "cuda", Wisdom())} <= {each.text for each in sources}
    binary = Binary(b"", "", target)
    monkeypatch.setattr(build, "build_many", lambda requests, workers: [binary for _ in requests])
    held = compile_proofs([Compiled(source, target, binary) for source in sources])
    needed = {each.text for case in cases_of(FAMILIES["wgmma"], target) for each in case.sources}
    assert {request.text for request, _ in held} == needed
    assert compile_proofs([Compiled(by_family["mma"], target, binary)]) == []
    failed = ToolchainError("no room")
    monkeypatch.setattr(build, "build_many", lambda requests, workers: [failed for _ in requests])
    with pytest.raises(ToolchainError, match=r"^no room \(and \d+ other kernels failed\)$"):
        compile_proofs([Compiled(by_family["wgmma"], target, binary)])


def test_a_spec_that_fails_names_its_first_error_and_counts_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    spec, limits = parse("kernels: [[1,4,4,2], [2,4,4,2]]"), cuda_limits("sm_80")
    setup, failed = _Setup("sm_80", AbsentCompiler("none"), "cuda", limits), ToolchainError("no room")
    one, other = _sources_for(spec, setup, {"another": Wisdom()})[:2]
    monkeypatch.setattr(build, "compile_spec", lambda *_: [Compiled(each, "sm_80", failed) for each in (one, other)])
    with pytest.raises(ToolchainError, match=r"^no room \(and 1 other kernel failed\)$"):
        build.compile_all(spec, "sm_80", [])
