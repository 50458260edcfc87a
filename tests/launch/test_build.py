"""`build` of launchers: kernels are compiled and loaded before their first call, in parallel."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.build import background
from ksgen.build.background import PendingError
from ksgen.build.build import usable_cores
from ksgen.build.host import find_host_compiler
from ksgen.devices.native import NativeDevice
from ksgen.errors import DeviceError, KsgenError, LaunchError, SpecError, ToolchainError
from ksgen.launch import base, explain, fused, planner, streams
from ksgen.launch.checks import CheckedArguments
from ksgen.launch.fused import plan_for
from ksgen.launch.planner import Planner
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import BATCH, SHAPE, check, draw, inputs, plan_afresh, zeros
from tests.support.native import chosen_native

LAYER = ((2, 48, 64, 1), (1, 64, 48, 2))
PRODUCT = "Launcher(2, 9, 5, 3)"
CHAIN = "ChainLauncher((2, 6, 4, 1), (1, 4, 6, 2))"


def test_a_graph_records_a_call_after_its_build(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_device", lambda name: gpu)
    assert ks.build([BATCH, 300]) is ks
    ks.build(BATCH, job="gradient")
    x, weights = inputs()
    on_gpu, own, out = FakeArray(gpu, x), FakeTensor(gpu, weights), zeros(gpu)
    grad = FakeArray(gpu, np.zeros_like(weights))
    gpu.begin_capture()
    ks(on_gpu, own, out=out)
    ks.gradient(on_gpu, zeros(gpu), out=grad)
    gpu.end_capture()()
    check(out.content, x, weights)


@pytest.mark.parametrize("fuse", ["yes", "no"])
def test_a_graph_records_a_layer_after_its_build(fuse: Any, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_device", lambda name: gpu)
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER), fuse=fuse).build(40, precision="float16")
    x = FakeTensor(gpu, draw(40, 128, precision="float16"))
    weights = [FakeTensor(gpu, draw(*each, precision="float16")) for each in LAYER]
    gpu.begin_capture()
    layer(x, weights)
    gpu.end_capture()


def test_a_graph_records_the_factors_of_a_layer_without_a_fused_kernel_after_its_build(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch would be faster, but no bundle holds its kernel, and there is no compiler."""
    factors = tuple(f"ks_{'x'.join(map(str, each))}_float16" for each in LAYER)
    compile_text = gpu.compiles.compile

    def find(text: str, entry: str, target: str) -> Any:
        if not entry.startswith(factors):
            raise ToolchainError(f"{entry}: no bundle holds it")
        return compile_text(text, entry, target)

    monkeypatch.setattr(base, "find_device", lambda name: gpu)
    monkeypatch.setattr(gpu.compiles, "compile", find)
    monkeypatch.setattr(fused, "_compiles", lambda device: False)
    for module in (explain, fused):
        monkeypatch.setattr(module, "verdict", lambda *_: fused.Verdict(True, "it is faster"))
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER)).build(40, precision="float16")
    x = FakeTensor(gpu, draw(40, 128, precision="float16"))
    weights = [FakeTensor(gpu, draw(*each, precision="float16")) for each in LAYER]
    gpu.begin_capture()
    layer(x, weights)
    gpu.end_capture()
    assert [entry.startswith(factors) for entry, _ in gpu.launches] == [True] * 4  # each packs, and multiplies


def test_a_graph_records_repeated_weights_after_a_build(
    gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel that reads the slice alone is taken once it is loaded."""
    monkeypatch.setattr(base, "find_device", lambda name: gpu)
    ks.build(300)
    kernel = KernelSpec(ks.pattern, tied=("d",))
    fit = CheckedArguments(300, ("cuda", 0), "float32", kernel)
    found = []
    for is_recorded in (True, False, True):
        if is_recorded:
            gpu.begin_capture()
        plan = plan_for(fit, gpu, None, aligned=True)
        gpu.graph = None
        assert plan is not None
        found.append(plan.kernel)
    assert found == [kernel.untied, kernel, kernel]


@pytest.mark.parametrize(("precision", "reads_ties"), [("float16", False), ("float32", True)])
def test_a_graph_records_a_layer_of_repeated_weights_after_its_build(
    precision: Any, reads_ties: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain that reads the slices alone is taken after the capture."""
    monkeypatch.setattr(base, "find_device", lambda name: gpu)
    ChainLauncher(*(Launcher(*shape) for shape in LAYER), fuse="yes").build(40, precision=precision)
    ((key, known),) = base.PLANNER.derived.items()
    tied = replace(key[1], tied=("a", "d"))
    gpu.begin_capture()
    fit = CheckedArguments(40, ("cuda", 0), precision, tied)
    assert plan_for(fit, gpu, None, aligned=True, fuse="yes") is known
    gpu.end_capture()
    later = plan_for(fit, gpu, None, aligned=True, fuse="yes")
    assert later is not None
    assert (later is known, later.kernel.tied) == ((False, ("a", "d")) if reads_ties else (True, ()))
    assert [each.kernel.tied for each in later.packers] == ([("a",), ("d",)] if reads_ties else [(), ()])


def calls() -> list[Any]:
    """Each form of a launcher, what it builds, and a call of it."""

    def ones(*shape: int) -> Any:
        return np.ones(shape, np.float32)

    chain = [ones(2, 6, 4, 1), ones(1, 4, 6, 2)]
    factors = (Launcher(2, 6, 4, 1), Launcher(1, 4, 6, 2))
    relu = Epilogue(bias=True, activation="relu")
    return [
        (Launcher(*SHAPE), {}, lambda ks: ks(ones(64, 30), ones(*SHAPE))),
        (Launcher(*SHAPE, batches=[64]), {}, lambda ks: ks(ones(64, 30), ones(*SHAPE))),
        (Launcher(*SHAPE, layout="bsl"), {}, lambda ks: ks(ones(30, 64), ones(*SHAPE))),
        (
            Launcher(*SHAPE),
            {"epilogue": relu},
            lambda ks: ks(ones(64, 30), ones(*SHAPE), bias=ones(54), activation="relu"),
        ),
        (Launcher(*SHAPE), {"job": "gradient"}, lambda ks: ks.gradient(ones(64, 30), ones(64, 54))),
        (Launcher(1, 3, 2, 2), {"out_layout": "bsl"}, lambda ks: ks(ones(64, 4), ones(1, 3, 2, 2), out_layout="bsl")),
        (
            Launcher(1, 3, 2, 2, out_layout="bsl", fuse="no"),
            {},
            lambda ks: ks(ones(64, 4), ones(1, 3, 2, 2)),
        ),
        *(
            (
                ChainLauncher(*factors, fuse=fuse, out_layout=to, between="relu"),
                {"epilogue": relu},
                lambda ks: ks(ones(64, 8), chain, bias=ones(8), activation="relu"),
            )
            for fuse, to in (("yes", None), ("no", None), ("no", "bsl"), ("auto", "bsl"))
        ),
        *(
            (
                GroupLauncher(ChainLauncher(*factors, fuse=fuse), Launcher(1, 3, 4, 2)),
                {},
                lambda ks: ks(ones(64, 8), [chain, ones(1, 3, 4, 2)]),
            )
            for fuse in ("yes", "no")
        ),
    ]


@pytest.mark.parametrize("number", range(len(calls())))
def test_a_call_makes_no_plan_after_its_build(
    number: int, without_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ks, options, call = calls()[number]
    plan_afresh(monkeypatch)
    chosen_native(monkeypatch)
    ks.build([64], **options)

    def refuse(*given: Any, **named: Any) -> Any:
        raise AssertionError("a plan was made")

    monkeypatch.setattr(Planner, "plan_or_fallback", refuse)
    call(ks)
    with pytest.raises(AssertionError, match="a plan was made"):  # nothing else was built
        ks.build([1], **options)


def test_a_call_compiles_nothing_after_its_build(
    without_tiles: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The function that distributes work over cores is compiled before, too. The background keeps no job of it."""
    plan_afresh(monkeypatch)
    monkeypatch.setattr(background, "_background", background._Background())
    chosen_native(monkeypatch)
    device = NativeDevice(find_host_compiler())
    monkeypatch.setattr(base, "find_device", lambda name: device)
    monkeypatch.setattr(streams, "device_for", lambda place: device)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    ks = Launcher(1, 3, 2, 2).build(4)
    assert not background._background.jobs
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    x, weights = np.ones((4, 4), np.float32), np.ones((1, 3, 2, 2), np.float32)
    assert np.array_equal(ks(x, weights), np.full((4, 6), 2, np.float32))


@pytest.mark.parametrize("compiles", [True, False])
def test_all_kernels_of_a_chain_are_requested_at_once(
    compiles: bool, without_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels that pack its weights do not wait for its own, unless only its binary tells which ones are there."""
    plan_afresh(monkeypatch)
    device, requested = chosen_native(monkeypatch), []

    def request(key: Any, what: str, *given: Any, **named: Any) -> Any:
        requested.append(what)
        raise PendingError(what)

    monkeypatch.setattr(planner, "outcome", request)
    monkeypatch.setenv("KSGEN_NO_COMPILE", "" if compiles else "1")
    kernel = KernelSpec(((Pattern(2, 6, 4, 1), Pattern(1, 4, 6, 2)),), epilogue=Epilogue(activation="relu"))
    with pytest.raises(PendingError):
        fused.fused_plan(device, kernel, 64, "yes")
    factors = ["ks_2x6x4x1_float32_bsf", "ks_1x4x6x2_float32_bsf"]
    assert requested == [kernel.name, *(factors if compiles else [])]


@pytest.mark.skipif(usable_cores() < 2, reason="one core compiles one kernel at a time")
def test_kernels_are_compiled_side_by_side(without_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of each factor begins before another one ends."""
    plan_afresh(monkeypatch)
    together, make, met = threading.Barrier(2), Planner.plan_or_fallback, []

    def both(self: Planner, *given: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            met.append(together.wait(timeout=60))
        return make(self, *given)

    monkeypatch.setattr(Planner, "plan_or_fallback", both)
    ChainLauncher((2, 6, 4, 1), (1, 4, 6, 2), fuse="no").build(64)
    assert sorted(met) == [0, 1]


@pytest.mark.parametrize(
    ("launcher", "batch", "options", "kind", "message"),
    [
        (PRODUCT, 0, {}, SpecError, "batch=0; accepted: a whole number from 1 up"),
        (PRODUCT, [4, "x"], {}, SpecError, "batch='x'; accepted: a whole number from 1 up"),
        (PRODUCT, 4, {"precision": "half"}, SpecError, "precision='half'"),
        (PRODUCT, 4, {"device": "gpu9"}, DeviceError, "gpu9"),
        (CHAIN, 4, {"job": "gradient"}, SpecError, "gradient"),
        (f"GroupLauncher({CHAIN}, {CHAIN})", 4, {"out_layout": "bsl"}, LaunchError, "accepted: one layout for x and"),
        (
            f"GroupLauncher({CHAIN[:-1]}, fuse='yes'), {CHAIN[:-1]}, between='relu'))",
            4,
            {},
            LaunchError,
            "the activations between their factors differ; accepted: layers with fuse='auto' or 'no'",
        ),
    ],
)
def test_what_build_refuses(
    launcher: str, batch: Any, options: Any, kind: type[KsgenError], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_native(monkeypatch)
    names = {"Launcher": Launcher, "ChainLauncher": ChainLauncher, "GroupLauncher": GroupLauncher}
    with pytest.raises(kind, match=message):
        eval(launcher, names).build(batch, **options)


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    plan_afresh(monkeypatch)
    chosen_native(monkeypatch)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    with pytest.raises(ToolchainError, match="KSGEN_NO_COMPILE"):
        Launcher(1, 3, 2, 2).build(4)
