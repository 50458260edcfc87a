"""Weights that repeat a slice by strides of zero: the same results as from whole arrays, at every call and packing."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ksgen import ChainLauncher, Launcher
from ksgen.devices.base import Device
from ksgen.errors import LaunchError, ToolchainError
from ksgen.families import FAMILIES
from ksgen.launch import weights as packing
from ksgen.launch.arrays import ArrayView, view
from ksgen.launch.memory import repetition, size_of
from ksgen.launch.planner import Planner
from ksgen.pattern import Pattern
from tests.support.fake_gpu import FakeGpu
from tests.support.host_memory import processor
from tests.support.launching import plan_afresh
from tests.support.libraries import library

SHAPE = (3, 5, 4, 2)
SLICES = {"a": (1, 5, 4, 2), "d": (3, 5, 4, 1), "a and d": (1, 5, 4, 1), "c": (3, 5, 1, 2), "all": (1, 1, 1, 1)}
Array = np.ndarray[Any, Any]


def draw(*shape: int) -> Array:
    return np.random.default_rng([7, *shape]).standard_normal(shape).astype(np.float32)


def refilled(part: Array) -> Array:
    """Fill a slice with other values."""
    part[...] = draw(*part.shape, 2)[..., 0]
    return part


@pytest.mark.exhaustive
@pytest.mark.parametrize("along", SLICES)
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_a_call_multiplies_by_repeated_weights(either: Device, along: str, layout: Any) -> None:
    own, part = Launcher(*SHAPE), draw(*SLICES[along])
    weights = np.broadcast_to(part, SHAPE)
    assert size_of(view(weights)) == part.nbytes
    x = draw(9, 24) if layout == "bsf" else draw(24, 9)
    np.testing.assert_array_equal(own(x, weights, layout=layout), own(x, weights.copy(), layout=layout))
    call = own.prepare(x, weights, layout=layout)
    assert not call.plan.kernel.is_strided
    ties = {"a": "a", "d": "d", "a and d": "ad"} if either.shares_host else {}  # host arrays are copied whole
    assert call.plan.kernel.tie == ties.get(along, "")
    assert own.pack(weights).tie == {"a": "a", "d": "d", "a and d": "ad"}.get(along, "")
    before = own(x, own.pack(weights), layout=layout)
    refilled(part)
    np.testing.assert_array_equal(call(), own(x, weights.copy(), layout=layout))  # each launch reads the slice
    assert not np.array_equal(before, call())


def test_a_chain_of_repeated_factors(either: Device) -> None:
    own, parts = ChainLauncher("3,5,4,2", "1,4,15,2"), [draw(1, 5, 4, 2), draw(1, 4, 15, 1)]
    weights = [np.broadcast_to(each, shape) for each, shape in zip(parts, (SHAPE, (1, 4, 15, 2)), strict=True)]
    x = draw(100, 24)
    for given in (weights, [factor.pack(each) for factor, each in zip(own.factors, weights, strict=True)]):
        np.testing.assert_array_equal(own(x, given), own(x, [each.copy() for each in weights]))
    (call,) = [own.prepare(x, weights)] if either.shares_host else [None]
    if call is not None:
        parts[1][...] *= 2
        np.testing.assert_allclose(call(), own(x, [each.copy() for each in weights]), rtol=1e-6)


def test_kernels_that_read_all_weights_get_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are copied for families that read no ties, and if the kernel of tied weights cannot be built."""
    processor()
    own, weights, x = Launcher(*SHAPE), np.broadcast_to(draw(1, 5, 4, 2), SHAPE), draw(9, 24)
    expected = own(x, weights.copy())
    packed, load = own.pack(weights), Planner._load

    def refuses(planner: Any, device: Any, kernel: Any, *given: Any) -> Any:
        if kernel.tied:
            raise ToolchainError("no compiler")
        return load(planner, device, kernel, *given)

    for owner, name, value in (
        (type(FAMILIES["vector"]), "reads_ties", lambda *_: False),
        (Planner, "_load", refuses),
    ):
        with monkeypatch.context() as patch:
            plan_afresh(patch)
            patch.setattr(owner, name, value)
            call = Launcher(*SHAPE).prepare(x, weights)
            assert call.plan.kernel.tie == ""
            np.testing.assert_array_equal(call(), expected)
            np.testing.assert_array_equal(Launcher(*SHAPE)(x, packed), expected)


@pytest.mark.parametrize("along", ["a", "d", "a and d"])
def test_a_first_result_of_repeated_weights_is_checked_by_its_slice(
    along: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    processor()
    monkeypatch.setenv("KSGEN_CHECK", "first")
    plan_afresh(monkeypatch)
    own, weights, x = Launcher(*SHAPE), np.broadcast_to(draw(*SLICES[along]), SHAPE), draw(9, 24)
    call = own.prepare(x, weights)
    assert call.plan.kernel.tie == {"a": "a", "d": "d", "a and d": "ad"}[along]
    np.testing.assert_array_equal(call(), own(x, weights.copy()))
    assert not [each for each in caplog.messages if "is wrong on" in each]


@pytest.mark.libraries
def test_expanded_tensors() -> None:
    torch, _ = library("torch"), processor()
    for dtype in (torch.float32, torch.bfloat16):
        own, part, x = Launcher(*SHAPE), torch.randn(3, 5, 4, 1, dtype=dtype), torch.randn(9, 24, dtype=dtype)
        weights = part.expand(SHAPE)
        expected = own(x, weights.contiguous())
        assert torch.equal(own(x, weights), expected)
        packed = own.pack(weights)
        assert torch.equal(own(x, packed), expected)
        part.mul_(2)
        assert torch.equal(own(x, weights), 2 * expected)
        with pytest.raises(LaunchError, match=r"was written to after launcher\.pack"):
            own(x, packed)


@pytest.mark.libraries
def test_calls_prepared_in_inference_mode() -> None:
    torch, _ = library("torch"), processor()
    own, x, part = Launcher(*SHAPE), torch.randn(9, 24), torch.randn(3, 5, 4, 1)
    with torch.inference_mode():
        inference = part.clone().expand(SHAPE)
        calls = [own.prepare(x, each) for each in (part.expand(SHAPE), inference)]
    expected = own(x, part.expand(SHAPE))
    for call in (*calls, own.prepare(x, inference)):
        assert torch.equal(call(), expected)


@pytest.mark.parametrize(("kind", "stream", "expected"), [("torch", None, 7), ("torch", 9, 9), ("cupy", None, 7)])
def test_copies_stay_on_the_stream_of_the_launches(
    kind: str, stream: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call may be prepared while a stream is current, and run while another one is."""
    places = [0]

    @contextmanager
    def entered(handle: int, *_: Any) -> Iterator[None]:
        places.append(handle)
        yield
        places.pop()

    class Owner:
        def __setitem__(self, *_: Any) -> None:
            written.append(places[-1])

        def copy_(self, _: Any) -> None:
            written.append(places[-1])

        def detach(self) -> None: ...

    written = list[int]()
    cuda = SimpleNamespace(
        stream=entered,
        ExternalStream=(lambda handle, _: handle) if kind == "torch" else entered,
        Device=lambda _: nullcontext(),
    )
    monkeypatch.setitem(sys.modules, kind, SimpleNamespace(cuda=cuda, inference_mode=lambda _: nullcontext()))
    monkeypatch.setattr("ksgen.launch.memory.new_array", lambda *_: Owner())
    found = ArrayView(kind, 4096, SHAPE, "float32", (80, 16, 4, 0), ("cuda", 0), 7, Owner(), True)
    _, copied = repetition(found, stream)
    copied()
    assert written == [expected]


def test_packed_weights_are_repeated_on_the_stream_of_their_use(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream on which they were packed may be gone."""
    streams: list[Any] = []
    monkeypatch.setattr(packing, "_whole", lambda found, stream: streams.append(stream) or found)
    found = ArrayView("cupy", 4096, SHAPE, "float32", (80, 16, 4, 0), ("cuda", 0), 5, None, True)
    packed = packing.pack_in_place(found, Pattern(*SHAPE), gpu, 5)
    kernel = SimpleNamespace(weights="same", inputs="same", tied=())
    plan: Any = SimpleNamespace(kernel=kernel, packing="whole", device=gpu, pack=lambda at, stream: (at, stream))
    assert packed.tie == "d"
    assert packed.use(plan, 9).at == (4096, 9)
    assert streams == [9]
    assert gpu.waits == [5, 9, 9]


def test_other_gaps_are_refused() -> None:
    processor()
    own, x = Launcher(*SHAPE), draw(9, 24)
    message = "weights must be row-major, without gaps; give a contiguous copy of it"
    for weights in (
        draw(3, 5, 4, 4)[..., ::2],
        draw(2, 4, 5, 3).T,
        np.broadcast_to(draw(3, 4, 5, 1).transpose(0, 2, 1, 3), SHAPE),
    ):
        for use in (lambda given: own(x, given), own.pack):
            with pytest.raises(LaunchError, match=message):
                use(weights)
    shared = draw(9, 30)
    with pytest.raises(LaunchError, match="out shares memory with weights"):
        own(x, np.broadcast_to(shared.reshape(-1)[:60].reshape(3, 5, 4, 1), SHAPE), out=shared)
    pitched = draw(9, 40)  # rows of y between which weights of the same pitch begin
    weights = np.broadcast_to(pitched.reshape(-1)[20:100].reshape(2, 5, 8, 1), (2, 5, 8, 2))
    with pytest.raises(LaunchError, match="out shares memory with weights"):
        Launcher(2, 5, 8, 2)(draw(9, 32), weights, out=pitched[:, :20])
