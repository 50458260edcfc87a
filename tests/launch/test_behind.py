"""Trials in the background: defaults serve at once, and later calls take the winners, but never inside a capture."""

import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ksgen.build import background
from ksgen.build.children import Children, current_children
from ksgen.devices.base import Device
from ksgen.emit.templates import template_digest
from ksgen.errors import LaunchError, ToolchainError
from ksgen.families import family_named
from ksgen.launch import behind
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import Entry, save
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.launching import draw

SHAPE = (2, 9, 5, 3)
BATCH = 70


class Trials:
    """What the child process would do: it waits until it may end, and saves another choice than the default."""

    def __init__(self) -> None:
        self.may_end, self.asked = threading.Event(), list[behind.Asked]()

    def __call__(self, device: Device, asked: list[behind.Asked]) -> None:
        self.asked += asked
        assert self.may_end.wait(20)
        for kernel, batch in asked:
            family = family_named("simt")
            limits = behind.PLANNER.choice(device, kernel, batch).constants
            other = replace(limits, min_blocks=2 if limits.min_blocks == 1 else 1)
            measured = {"median_us": 1.0, "template": template_digest("simt"), "trial": True}
            save(device.name, [Entry(kernel, batch, family.name, other, measured)])

    def end(self) -> None:
        self.may_end.set()
        for job in background.unfinished():
            assert job.done.wait(20)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[Trials]:
    monkeypatch.setenv("KSGEN_TRIAL", "background")
    monkeypatch.setenv("KSGEN_WISDOM_DIR", f"{tmp_path}/wisdom")
    monkeypatch.setattr(behind, "_seen", set())
    monkeypatch.setattr(behind, "_waiting", {})
    made = Trials()
    monkeypatch.setattr(behind, "_try", made)
    yield made
    made.end()


@pytest.fixture
def call(gpu: FakeGpu) -> Callable[[], str]:
    """A call on the GPU that returns the source that it launched."""
    launcher = Launcher(*SHAPE)
    x = FakeArray(gpu, draw(BATCH, launcher.chains[0].in_features))
    weights = FakeArray(gpu, draw(*SHAPE))
    y = FakeArray(gpu, np.zeros((BATCH, launcher.chains[0].out_features), np.float32))

    def run() -> str:
        launcher(x, weights, out=y)
        return gpu.launches[-1][0]

    return run


def test_the_default_serves_until_the_winner_is_known(trials: Trials, call: Callable[[], str]) -> None:
    default = call()
    assert call() == default
    assert [batch for _, batch in trials.asked] in ([], [BATCH])  # the thread begins when it likes
    trials.end()
    assert [batch for _, batch in trials.asked] == [BATCH]
    winner = call()
    assert winner != default
    assert call() == winner
    assert len(trials.asked) == 1  # never again in this process


@pytest.mark.parametrize("asked", ["", "off", "passport"])
def test_nothing_is_tried_unless_the_environment_asks(
    trials: Trials, call: Callable[[], str], asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_TRIAL", asked)
    call()
    trials.end()
    assert trials.asked == []


def test_no_child_tries_kernels_of_a_context_that_the_user_brought(
    trials: Trials, call: Callable[[], str], gpu: FakeGpu
) -> None:
    """Its device has no number by which the child could open it."""
    gpu.index = -1
    call()
    trials.end()
    assert trials.asked == []


def test_a_capture_keeps_its_kernel_and_takes_the_winner_when_it_is_over(
    trials: Trials, call: Callable[[], str], gpu: FakeGpu
) -> None:
    default = call()
    trials.end()
    for _ in range(2):
        gpu.begin_capture()
        assert call() == default  # which refuses to load another kernel, and to pack weights for it
        gpu.end_capture()
    winner = call()
    assert winner != default
    gpu.begin_capture()
    assert call() == winner
    gpu.end_capture()


def test_a_search_leaves_no_earlier_kernel(trials: Trials, call: Callable[[], str], gpu: FakeGpu) -> None:
    call()
    trials.end()
    behind.PLANNER.forget()
    gpu.begin_capture()
    with pytest.raises(LaunchError, match="builds and loads its kernel, which a CUDA graph cannot record"):
        call()
    gpu.end_capture()


@pytest.mark.parametrize("refusing", ["deterministic", "compiling", "tracing"])
def test_pytorchs_deterministic_algorithms_and_traces_keep_the_default(
    trials: Trials, call: Callable[[], str], refusing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = SimpleNamespace(
        is_grad_enabled=lambda: False,
        are_deterministic_algorithms_enabled=lambda: refusing == "deterministic",
        compiler=SimpleNamespace(is_compiling=lambda: refusing == "compiling"),
        jit=SimpleNamespace(is_tracing=lambda: refusing == "tracing"),
    )
    default = call()
    trials.end()
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
        assert call() == default
    assert call() != default
    monkeypatch.setattr(behind, "_seen", set())
    monkeypatch.setenv("KSGEN_WISDOM_DIR", "/nowhere")
    behind.PLANNER.forget()
    trials.asked.clear()
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    call()
    trials.end()
    assert trials.asked == []  # nothing is begun


def test_a_child_that_ends_with_the_program_is_not_reported(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: Device, asked: list[behind.Asked]) -> None:
        children.stop()
        raise ToolchainError("fatal: killed by signal 9")

    children, told = Children(), list[str]()
    monkeypatch.setattr(behind, "_try", fail)
    monkeypatch.setattr(behind, "warn", told.append)
    monkeypatch.setattr(behind, "_waiting", {gpu: [(KernelSpec(Pattern(*SHAPE)), 7)]})
    token = current_children.set(children)
    try:
        behind._try_all(gpu)
    finally:
        current_children.reset(token)
    assert told == []


def test_a_program_that_embeds_python_is_not_started_again(gpu: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/opt/editor")
    with pytest.raises(ToolchainError, match=r"^/opt/editor is no Python that a child could run$"):
        behind._try(gpu, [])


def test_a_folder_that_is_gone_does_not_end_the_child(
    gpu: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(behind, "STARTED_IN", str(tmp_path / "gone"))
    gpu.runtime = "no-such-runtime"
    with pytest.raises(ToolchainError, match="no-such-runtime"):  # what its child says, after it has begun to work
        behind._try(gpu, [])


def test_a_child_that_fails_is_reported_once_and_the_default_serves_on(
    trials: Trials, call: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: Device, asked: list[behind.Asked]) -> None:
        raise ToolchainError("no room for temporary files")

    monkeypatch.setattr(behind, "_try", fail)
    told = list[str]()
    monkeypatch.setattr(behind, "warn", told.append)
    default = call()
    trials.end()
    assert call() == default
    assert told == [
        "KSGEN_TRIAL=background: Fake GPU: no more trials; defaults stay in use: no room for temporary files"
    ]
