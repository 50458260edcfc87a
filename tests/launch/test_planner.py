"""Plans: compiled and loaded once, found again, and another family's where arrays ask for it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.errors import LaunchError, ToolchainError
from ksgen.families import FAMILIES
from ksgen.launch.planner import Planner
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.fake_gpu import FakeArray, FakeGpu, TextCompiler
from tests.support.launching import BATCH, PATTERN, SHAPE, check, draw, inputs, plan_anew, zeros


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
    plan_anew(monkeypatch)  # another process
    Launcher(*SHAPE)(FakeArray(gpu, x), FakeArray(gpu, weights), out=zeros(gpu))
    assert len(compiler.compiled) == 1


def test_a_batch_that_is_new_to_a_loaded_kernel_can_be_captured(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    kept = ks.pack(FakeArray(gpu, weights))
    ks.prepare(FakeArray(gpu, x), kept, out=zeros(gpu))
    ready, out = FakeArray(gpu, x[:35]), FakeArray(gpu, np.zeros((35, PATTERN.out_features), np.float32))
    gpu.begin_capture()
    ks(ready, kept, out=out)
    gpu.end_capture()()
    check(out.content, x[:35], weights)


def test_few_entries_have_kernels_of_their_own_and_one_copy_of_the_weights(gpu: FakeGpu, ks: Launcher, compiler: TextCompiler) -> None:
    """One for up to 1, 2, 4 entries and so on; once one is there, it is recorded in a CUDA graph as any other."""
    x, weights = inputs()
    planner, kernel = Planner(), KernelSpec(PATTERN, "float32")
    plans = {batch: planner.plan(gpu, kernel, batch) for batch in (1, 2, 3, 4, 17, 32, 33)}
    assert [plans[batch].choice.family for batch in plans] == ["few"] * 6 + ["simt"]
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


def test_arrays_that_tensor_maps_cannot_describe_are_served_by_another_family(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("wgmma_shared", "wgmma_registers"):
        monkeypatch.setattr(FAMILIES[name], "measured", True)
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
    for extras in ({"bias": 1, "residual": 0}, {"bias": 0, "residual": 4}):  # which their kernels read 16 bytes at a time
        launch(40, **extras)
    assert len(gpu.encoded) == 6


def test_constants_are_chosen_once_at_the_first_use(gpu: FakeGpu, ks: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
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
