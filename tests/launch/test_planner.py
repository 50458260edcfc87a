"""Plans: compiled and loaded once, found again, and another family's where arrays ask for it."""

import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.build import background
from ksgen.build.background import PendingError, deferred
from ksgen.errors import LaunchError, ToolchainError
from ksgen.families import Limits, family_named
from ksgen.launch import planner as planner_module
from ksgen.launch.choice import Choice
from ksgen.launch.planner import Planner
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.fake_gpu import FakeArray, FakeGpu, TextCompiler
from tests.support.launching import BATCH, PATTERN, SHAPE, check, draw, inputs, plan_afresh, zeros


def test_compiled_on_first_use_and_from_the_cache_after_that(
    gpu: FakeGpu, ks: Launcher, compiler: TextCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights = inputs()
    for batch in (33, 35, BATCH):
        out = FakeArray(gpu, np.zeros((batch, PATTERN.out_features), np.float32))
        ks(FakeArray(gpu, x[:batch]), FakeArray(gpu, weights), out=out)
        gpu.synchronize()
        check(out.content, x[:batch], weights)
    assert compiler.compiled == ["ks_2x9x5x3_float32_bsf"]
    plan_afresh(monkeypatch)  # another process
    Launcher(*SHAPE)(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    assert len(compiler.compiled) == 1


def deferred_plan(planner: Planner, gpu: FakeGpu, batch: int) -> Any:
    """The plan, or None while the background makes it."""
    with suppress(PendingError), deferred(lambda: True):
        return planner.plan(gpu, KernelSpec(PATTERN, "float32"), batch)
    return None


def finish_background() -> None:
    for job in background.unfinished():
        assert job.done.wait(60)


def test_plans_of_the_background_are_not_kept_twice(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch has a job; the kernel that they share is loaded when they are asked for again."""
    monkeypatch.setattr(background, "_background", background._Background())
    planner = Planner()
    assert [deferred_plan(planner, gpu, batch) for batch in (33, 35)] == [None, None]
    finish_background()
    assert all(deferred_plan(planner, gpu, batch) for batch in (33, 35))
    assert not background._background.jobs


def test_the_background_hands_out_no_plan_of_outdated_wisdom(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    planner, made = Planner(), []
    monkeypatch.setattr(planner, "plan_or_fallback", lambda *_: made.append(len(made)) or f"plan {len(made)}")
    assert deferred_plan(planner, gpu, BATCH) is None
    finish_background()
    planner.forget()
    assert deferred_plan(planner, gpu, BATCH) is None
    finish_background()
    assert deferred_plan(planner, gpu, BATCH) == "plan 2"


def test_a_plan_during_which_wisdom_changed_serves_its_own_call_alone(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, made = Planner(), []

    def make(*_: Any) -> str:
        made.append(len(made))
        if len(made) == 1:
            planner.forget()
        return f"plan {len(made)}"

    monkeypatch.setattr(planner, "plan_or_fallback", make)
    found: list[Any] = [planner.plan(gpu, KernelSpec(PATTERN, "float32"), BATCH) for _ in range(3)]
    assert found == ["plan 1", "plan 2", "plan 2"]


def test_a_prebuilt_kernel_has_a_job_of_its_own(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The background failed to build the same source for the device's own target before."""
    planner, kernel = Planner(), KernelSpec(PATTERN, "float32")
    choice, binary_of = planner.choice(gpu, kernel, BATCH), planner._binary  # type: ignore[arg-type]

    def find(device: Any, source: Any, target: str) -> Any:
        if target == gpu.target:
            raise ToolchainError("no compiler")
        return binary_of(device, source, gpu.target)

    monkeypatch.setattr(planner, "_binary", find)
    with deferred(lambda: True):
        for target in (None, "prebuilt"):
            with pytest.raises(PendingError):
                planner.plan_of(gpu, kernel, BATCH, choice, target)  # type: ignore[arg-type]
            finish_background()
        assert planner.plan_of(gpu, kernel, BATCH, choice, "prebuilt").batch == BATCH  # type: ignore[arg-type]


@pytest.mark.parametrize(("target", "times"), [("", 1), ("another", 2)])
def test_a_source_that_failed_to_compile_is_not_tried_again(
    target: str, times: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Constants that only a launch has make no other source; another target does."""
    planner, kernel, tried = Planner(), KernelSpec(Pattern(4, 32, 32, 1)), []
    vector = family_named("vector")
    limits = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False)
    one, other = (vector.default(kernel, limits, 64).changed(block=block) for block in (1, 2))
    assert vector.source_constants(kernel, one) == vector.source_constants(kernel, other)

    def fail(*given: Any) -> None:
        tried.append(given)
        raise ToolchainError("no compiler")

    monkeypatch.setattr(planner, "plan_of", fail)
    monkeypatch.setattr(planner_module, "built_beforehand", lambda device: [(target or device.target, limits)])
    monkeypatch.setattr(planner_module, "choose_for_many", lambda *_: Choice("vector", other, "usual"))
    with pytest.raises(ToolchainError):
        planner.plan_or_fallback(gpu, kernel, 64, True, Choice("vector", one, "own"))
    assert len(tried) == times


@pytest.mark.parametrize("has_tied", [True, False])
def test_what_was_built_of_tied_weights_precedes_whole_weights(
    has_tied: bool, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    planner, kernel, tried = Planner(), KernelSpec(Pattern(4, 32, 32, 1), tied=("a",)), list[Any]()

    def find(device: Any, wanted: KernelSpec, batch: int, choice: Choice, target: str | None = None) -> Any:
        tried.append((wanted, target))
        if target is None or (wanted.tied and not has_tied):
            raise ToolchainError("no compiler")
        return wanted

    choice = planner.choice(gpu, kernel, 64)
    monkeypatch.setattr(planner, "plan_of", find)
    monkeypatch.setattr(planner_module, "built_beforehand", lambda device: [("another", planner_module.limits_of(gpu))])
    wanted = kernel if has_tied else kernel.untied
    assert planner.plan_or_fallback(gpu, kernel, 64, True, choice) == wanted
    others = [] if has_tied else [(kernel.untied, None), (kernel.untied, "another")]
    assert tried == [(kernel, None), (kernel, "another"), *others]


def test_a_batch_that_is_new_to_a_loaded_kernel_can_be_captured(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    kept = ks.pack(FakeArray(gpu, weights))
    ks.prepare(FakeArray(gpu, x), kept, out=zeros(gpu))
    ready, out = FakeArray(gpu, x[:35]), FakeArray(gpu, np.zeros((35, PATTERN.out_features), np.float32))
    gpu.begin_capture()
    ks(ready, kept, out=out)
    gpu.end_capture()()
    check(out.content, x[:35], weights)


def test_small_batches_have_kernels_of_their_own_and_one_copy_of_the_weights(
    gpu: FakeGpu, ks: Launcher, compiler: TextCompiler
) -> None:
    """One for up to 1, 2, 4 entries and so on; once one is there, it is recorded in a CUDA graph as any other."""
    x, weights = inputs()
    planner, kernel = Planner(), KernelSpec(PATTERN, "float32")
    plans = {batch: planner.plan(gpu, kernel, batch) for batch in (1, 2, 3, 4, 17, 32, 33)}
    assert [plans[batch].choice.family for batch in plans] == ["gemv"] * 6 + ["simt"]
    assert [plans[batch].choice.constants.tile_batch for batch in (1, 2, 3, 4, 17, 32)] == [1, 2, 4, 4, 32, 32]
    assert len({plans[batch].packing for batch in (1, 2, 3, 4, 17, 32)}) == 1 != plans[33].packing
    assert len(compiler.compiled) == 5
    kept = ks.pack(FakeArray(gpu, weights))
    ks.prepare(FakeArray(gpu, x[:4]), kept, out=FakeArray(gpu, np.zeros((4, PATTERN.out_features), np.float32)))
    ready, out = FakeArray(gpu, x[:3]), FakeArray(gpu, np.zeros((3, PATTERN.out_features), np.float32))
    gpu.begin_capture()
    ks(ready, kept, out=out)
    gpu.end_capture()()
    check(out.content, x[:3], weights)


def moved(array: Any, elements: int) -> Any:
    """A copy that begins so many elements past a 16-byte boundary."""
    memory = np.empty(array.size + 16, array.dtype)
    first = -memory.ctypes.data % 16 // array.itemsize + elements
    copy = memory[first : first + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def test_arrays_that_tensor_maps_cannot_describe_are_served_by_another_family(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ksgen.families.default_us", lambda *asked: 0.0)  # so that the first family takes what it can
    ks = Launcher(2, 24, 16, 3)
    weights = draw(2, 24, 16, 3, precision="float16")
    given = FakeArray(gpu, weights)

    def launch(batch: int, shift: int = 0, shift_out: int = 0, **extras: int) -> str:
        """The entry that served the call; `extras` are added, each so many elements past a boundary."""
        x = draw(96, batch, precision="float16")
        out, array = FakeArray(gpu, x), FakeArray(gpu, x)
        out.show(gpu, moved(np.full((144, batch), np.nan, np.float16), shift_out))
        array.show(gpu, moved(x, shift))
        added = {name: draw(144, *[batch] * (name == "residual"), precision="float16") for name in extras}
        shown = {name: FakeArray(gpu, x) for name in extras}
        for name, given_shift in extras.items():
            shown[name].show(gpu, moved(added[name], given_shift))
        for _ in range(2):
            ks(array, given, layout="bsl", out=out, **shown)
        gpu.synchronize()
        check(out.content, x, weights, "bsl", "float16", **added)
        return gpu.launches[-1][0]

    by_map = launch(40)
    assert len(gpu.encoded) == 2  # x and y, once
    assert launch(40) == by_map
    assert len(gpu.encoded) == 4  # another x and y
    assert len({launch(41), launch(40, shift=1), launch(40, shift_out=2)} - {by_map}) == 1
    assert len(gpu.encoded) == 4
    launch(40, bias=0, residual=0)
    assert len(gpu.encoded) == 6
    # which their kernels read 16 bytes at a time
    for extras in ({"bias": 1, "residual": 0}, {"bias": 0, "residual": 4}):
        launch(40, **extras)
    assert len(gpu.encoded) == 6


def test_constants_are_chosen_once_at_the_first_use(
    gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, choose = [], Planner.choice

    def counted(*given: Any) -> Any:
        chosen.append(given[2].name)
        return choose(*given)

    monkeypatch.setattr(Planner, "choice", counted)
    x, weights = inputs()
    for _ in range(3):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    assert chosen == ["ks_2x9x5x3_float32_bsf"]


def test_where_nothing_can_be_built_a_card_takes_what_was_built_for_the_usual_one(
    gpu: FakeGpu, compiler: TextCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, batch = KernelSpec(Pattern(1, 768, 192, 2), "float16"), 196
    usual = Planner().plan(gpu, kernel, batch)  # type: ignore[arg-type]
    gpu.limits = replace(gpu.limits, multiprocessors=20)
    small = Planner()
    chosen = small.choice(gpu, kernel, batch)  # type: ignore[arg-type]
    assert chosen.constants != usual.choice.constants
    with monkeypatch.context() as patched:
        patched.setenv("KSGEN_NO_COMPILE", "1")
        assert small.plan(gpu, kernel, batch).choice.constants == usual.choice.constants  # type: ignore[arg-type]
        with pytest.raises(ToolchainError, match="KSGEN_NO_COMPILE forbids compiling it"):
            small.plan(gpu, replace(kernel, layout="bsl"), batch)  # type: ignore[arg-type]
    assert len(compiler.compiled) == 1
    assert Planner().plan(gpu, kernel, batch).choice.constants == chosen.constants  # type: ignore[arg-type]
    assert len(compiler.compiled) == 2


def test_what_is_asked_before_loading_may_refuse_and_is_asked_once(gpu: FakeGpu) -> None:
    own, kernel, asked = Planner(), KernelSpec(PATTERN), []

    def refuse() -> None:
        asked.append("refused")
        raise LaunchError("not now")

    for _ in range(2):
        with pytest.raises(LaunchError, match="not now"):
            own.plan(gpu, kernel, 5, True, refuse)  # type: ignore[arg-type]
    plan = own.plan(gpu, kernel, 5, True, lambda: asked.append("allowed"))  # type: ignore[arg-type]
    assert own.plan(gpu, kernel, 5, True, refuse) is plan  # type: ignore[arg-type]
    assert own.plan(gpu, kernel, 6, True, refuse).multiply is plan.multiply  # type: ignore[arg-type]
    assert asked == ["refused", "refused", "allowed"]


# ---- several threads, and children

KERNELS = [KernelSpec(Pattern(number, 4, 4, 1)) for number in range(2, 8)]
PATIENCE_S = 60  # for what takes milliseconds


@contextmanager
def compiling(gpu: FakeGpu, own: Planner, kernel: KernelSpec, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While another thread compiles that kernel, which ends with this."""
    begun, end, compile_text = threading.Event(), threading.Event(), gpu.compiles.compile

    def slowly(text: str, entry: str, target: str) -> Any:
        if entry.startswith(kernel.name):
            begun.set()
            assert end.wait(PATIENCE_S)
        return compile_text(text, entry, target)

    monkeypatch.setattr(gpu.compiles, "compile", slowly)
    worker = threading.Thread(target=own.plan, args=(gpu, kernel, 64))
    worker.start()
    try:
        assert begun.wait(PATIENCE_S)
        yield
    finally:
        end.set()
        worker.join()


def test_other_kernels_do_not_wait_for_a_compiler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new batch of a loaded kernel, a new kernel, and what searches found."""
    own = Planner()
    own.plan(gpu, KERNELS[0], 64)
    others: list[Callable[[], object]] = [
        lambda: own.plan(gpu, KERNELS[0], 65), lambda: own.plan(gpu, KERNELS[1], 64), lambda: own.choice(gpu,
            KERNELS[2], 64), own.forget,
    ]  # fmt: skip
    with compiling(gpu, own, KERNELS[3], monkeypatch):
        for other in others:
            worker = threading.Thread(target=other, daemon=True)
            worker.start()
            worker.join(PATIENCE_S)
            assert not worker.is_alive()


def test_a_child_does_not_wait_for_its_parents_compiler(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Planner()
    with compiling(gpu, own, KERNELS[0], monkeypatch):
        child = os.fork()
        if not child:
            signal.alarm(PATIENCE_S)
            try:
                own.plan(gpu, KERNELS[1], 64)
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitpid(child, 0)[1] == 0


def test_threads_that_want_the_same_kernel_load_it_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    own, at_once, plans, loaded = Planner(), threading.Barrier(4), list[Any](), list[str]()
    choice, load = Planner.choice, FakeGpu.load

    def chosen(*given: Any) -> Any:
        found = choice(*given)
        at_once.wait(PATIENCE_S)  # none has asked for the kernel before all of them do
        return found

    monkeypatch.setattr(Planner, "choice", chosen)
    monkeypatch.setattr(
        FakeGpu,
        "load",
        lambda device, binary, entry, *more: (loaded.append(entry), load(device, binary, entry, *more))[1],
    )
    crew = [threading.Thread(target=lambda: plans.append(own.plan(gpu, KERNELS[0], 64))) for _ in range(4)]
    for each in crew:
        each.start()
    for each in crew:
        each.join()
    assert len(plans) == 4
    assert {id(plan) for plan in plans} == {id(plans[0])}
    assert len(loaded) == len(set(loaded))


# ---- how many stay loaded


def test_the_least_recently_used_kernels_are_let_go(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three hundred patterns in one process, of which eight stay loaded; one that is used all along is loaded once."""
    monkeypatch.setattr(planner_module, "MOST_LOADED", 8)
    own: Planner = planner_module.PLANNER
    x, weights = inputs()
    ks, out = Launcher(*SHAPE), zeros(gpu)
    given, packed = FakeArray(gpu, x), Launcher(*SHAPE).pack(FakeArray(gpu, weights))
    found = list[Any]()
    for number in range(300):
        found.append(weakref.ref(own.plan(gpu, KernelSpec(Pattern(1, 1, number + 2, 1)), BATCH).loaded))
        ks(given, packed, out=out)
    assert len(own._loaded) == 8
    assert sum(each() is not None for each in found) == 7
    assert [each for each in gpu.compiles.compiled if each.startswith("ks_2x9x5x3")] == ["ks_2x9x5x3_float32_bsf"]
    gpu.synchronize()
    check(out.content, x, weights)


def test_a_launcher_whose_kernel_was_let_go_loads_it_again(
    gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner_module, "MOST_LOADED", 2)
    own: Planner = planner_module.PLANNER
    x, weights = inputs()
    out = zeros(gpu)
    ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=out)
    (first,) = map(weakref.ref, own._loaded.values())
    for kernel in KERNELS:
        own.plan(gpu, kernel, BATCH)
    gpu.synchronize()
    assert first() is None
    again = zeros(gpu)
    ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=again)
    gpu.synchronize()
    check(again.content, x, weights)


def test_no_plan_survives_that_wisdom_is_read_again(gpu: FakeGpu, ks: Launcher) -> None:
    """A launcher was called, and a layer is one launch."""
    x, weights = inputs()
    ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    own: Planner = planner_module.PLANNER
    plans = [weakref.ref(plan) for plan in own._plans.values()]
    own.derived["a layer"] = own.plan(gpu, KERNELS[0], 64)
    plans.append(weakref.ref(own.derived["a layer"]))
    gpu.synchronize()
    own.forget()
    assert plans
    assert [each() for each in plans] == [None] * len(plans)
