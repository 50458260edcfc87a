"""Tests of backend="auto": the heuristic, the measurements, and the faster of two methods."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.devices.base import DeviceLimits  # noqa: E402
from ksgen.errors import DeviceError, ToolchainError  # noqa: E402
from ksgen.launch.explain import LaunchOptions  # noqa: E402
from ksgen.launch.fused import Verdict  # noqa: E402
from ksgen.pattern import Pattern  # noqa: E402
from ksgen.spec import Epilogue, KernelSpec  # noqa: E402
from ksgen.torch.operators import choice, meanwhile  # noqa: E402
from tests.support.fake_gpu import FakeGpu  # noqa: E402


@pytest.mark.parametrize(
    ("kernel", "backend", "why"),
    [
        (KernelSpec(Pattern(1, 64, 64, 16)), "ksgen", r"most to win: .*; \(b \+ c\)/\(bc\) = 0.0312"),
        (KernelSpec(Pattern(1, 192, 192, 4)), "ksgen", "something to win"),
        (KernelSpec(Pattern(1, 1024, 1024, 4)), "strided", "little to win"),
        (KernelSpec(Pattern(6, 64, 64, 1)), "strided", "nothing to win: d = 1"),
        (KernelSpec(Pattern(6, 64, 64, 4), layout="bsl"), "strided", "nothing to permute in bsl"),
        (KernelSpec(Pattern(6, 64, 64, 1, "k.i")), "ksgen", "PyTorch would copy outputs, whose digits are exchanged"),
        (KernelSpec(Pattern(6, 64, 64, 1, load="l.i"), layout="bsl", job="gradient"), "ksgen", "would copy inputs"),
        (
            KernelSpec(Pattern(6, 64, 64, 1), epilogue=Epilogue(bias=True, activation="gelu")),
            "ksgen",
            "but bias, gelu inside the kernel",
        ),
        (KernelSpec(Pattern(6, 64, 64, 1), "tf32x3"), "ksgen", "PyTorch has no tf32x3 of its own"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_heuristic(kernel: KernelSpec, backend: str, why: str) -> None:
    found = choice.by_heuristic(kernel)
    assert found.backend == backend
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(found.why)


@pytest.mark.parametrize("is_there", [True, False])
def test_only_a_processor_needs_a_runtime_of_its_own(is_there: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_has_processor", lambda asked: is_there)
    found = {kind: choice.has_kernels(torch.device(kind)) for kind in ("cpu", "cuda", "meta")}
    assert found == {"cpu": is_there, "cuda": True, "meta": False}


def test_what_was_measured_and_what_cannot_run_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, cuda = KernelSpec(Pattern(6, 64, 64, 1)), torch.device("cuda:0")
    device = FakeGpu(name="Tesla T4", target="sm_75", limits=DeviceLimits(64 * 1024, 1024, 40))
    monkeypatch.setattr(choice, "device_for", lambda place: device)
    known = SimpleNamespace(
        choice=lambda *given: SimpleNamespace(is_measured=True, why="wisdom, measured at batch 5"), generation=-1
    )
    monkeypatch.setattr(choice, "PLANNER", known)
    assert choice.choose(kernel, 5, cuda) == choice.BackendChoice("ksgen", "wisdom, measured at batch 5")
    known.choice, known.generation = lambda *given: SimpleNamespace(is_measured=False, family="simt"), -2
    assert choice.choose(kernel, 5, cuda).backend == "strided"
    large = KernelSpec(Pattern(1, 192, 192, 4))
    assert choice.choose(large, 25088, cuda).backend == "ksgen"
    told = choice.choose(replace(large, precision="float16"), 25088, cuda)
    assert told == choice.BackendChoice(
        "strided",
        "no family uses the tensor cores of Tesla T4, and PyTorch's products on them are expected to be faster",
    )
    assert choice.choose(KernelSpec(Pattern(1, 64, 64, 16), "float16"), 25088, cuda).backend == "ksgen"

    def nothing(place: Any) -> Any:
        raise DeviceError("no driver")

    monkeypatch.setattr(choice, "device_for", nothing)
    known.generation = -3
    assert choice.choose(kernel, 5, cuda) == choice.BackendChoice("strided", "no kernel can be launched: no driver")


def test_methods_of_a_processor_are_timed_in_turns_and_the_faster_one_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = [0.0], []

    def timed(name: str, seconds: float) -> Any:
        def call() -> Any:
            calls.append(name)
            now[0] += seconds + (5.0 if len(calls) <= 2 else 0.0)  # the first turn builds

        return call

    monkeypatch.setattr(meanwhile, "perf_counter", lambda: now[0])
    ways = {"ksgen": timed("ksgen", 2.0), "strided": timed("strided", 1.0)}
    assert choice.faster("a job of this test", ways) == "strided"
    assert calls == ["ksgen", "strided"] * meanwhile.ROUNDS
    assert choice.measured("a job of this test") == {"ksgen": 2.0, "strided": 1.0}
    assert choice.faster("a job of this test", ways) == "strided"
    assert len(calls) == 2 * meanwhile.ROUNDS


@pytest.mark.parametrize(("share", "slow"), [(None, 1.0), (0.5, 1.0), (None, 3.0)])
def test_disturbed_times_decide_with_a_report(
    share: float | None, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, now = KernelSpec(Pattern(2, 9, 5, 3)), [0.0]
    monkeypatch.setattr(choice, "_measured", {})
    monkeypatch.setattr(choice, "_unreliable", {})
    monkeypatch.setattr(meanwhile, "perf_counter", lambda: now[0])
    monkeypatch.setattr(meanwhile, "Watch", lambda: SimpleNamespace(others_share=lambda: share))
    calls = []

    def timed(seconds: float) -> Any:
        def call() -> Any:
            calls.append(seconds)
            now[0] += seconds * (9.0 if len(calls) <= 2 else slow if len(calls) > 4 else 1.0)  # the first turn builds

        return call

    assert choice.faster((kernel, 8, "ksgen", "strided"), {"ksgen": timed(2.0), "strided": timed(1.0)}) == "strided"
    said = {
        (None, 1.0): "",
        (0.5, 1.0): "other processes took 50% of the CPU time",
        (None, 3.0): "the median is uncertain by 67%",
    }[share, slow]
    told = f"; these times are unreliable: {said}" if said else ""
    assert choice.choose(kernel, 8, torch.device("cpu")).why == f"1000000 us here, ksgen 2000000 us{told}"
    job = choice.job_of("chain", [(2, 9, 5, 3)], torch.float32, "bsf", "none", False, False)
    key = ((job, 8, "ksgen"), torch.get_num_threads())
    monkeypatch.setattr(choice, "_measured", {key: {"ksgen": 2.0}})
    monkeypatch.setattr(choice, "_unreliable", {key: said})
    assert choice.describe_times([(2, 9, 5, 3)], torch.float32, "bsf", "none", False, 8) == [
        f"all factors: ksgen 2000000 us{told}"
    ]


def test_pytorch_multiplies_with_one_warning_where_no_kernel_builds() -> None:
    def refused() -> Any:
        raise ToolchainError("no compiler, says this test")

    with pytest.warns(
        UserWarning, match="PyTorch multiplies, because no kernel is available: no compiler, says this test"
    ):
        assert choice.faster("a refused job", {"ksgen": refused, "strided": lambda: torch.ones(1)}) == "strided"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choice.faster("another refused job", {"ksgen": refused, "strided": lambda: torch.ones(1)}) == "strided"


def test_a_layer_that_cannot_be_one_launch_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    own: Any = type(
        "Own", (), {"_title": "a chain", "parts": "factor", "_verdict": lambda *_: Verdict(True, "it is faster")}
    )()
    monkeypatch.setattr(choice, "_fusion_errors", {})
    monkeypatch.setattr(choice, "device_for", lambda place: place)
    job: Any = (own, device, "float16", "bsf", Epilogue(), 64)
    assert choice.is_one_launch(*job).is_one
    with pytest.warns(
        UserWarning,
        match="a chain takes one launch per factor, because one launch for all is not available: no compiler",
    ):
        choice.disable_fusion(own, ToolchainError("no compiler"))
    found = choice.is_one_launch(*job)
    assert (found.is_one, found.why) == (False, "one launch for all is not available: no compiler")
    monkeypatch.setattr(choice, "_fusion_errors", {})
    asked: list[Any] = []
    noting: Any = type("Own", (), {"_verdict": lambda *job: asked.append(job[2:]) or Verdict(True, "it is faster")})()
    assert choice.is_one_launch(noting, *job[1:], weights="int8").is_one
    assert asked == [(LaunchOptions("float16", "bsf", Epilogue(), "int8", "same"), 64, None)]

    def gone(place: Any) -> None:
        raise DeviceError("gone")

    monkeypatch.setattr(choice, "device_for", gone)
    found = choice.is_one_launch(*job)
    assert (found.is_one, found.why) == (False, "gone")
