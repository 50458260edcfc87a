"""Replays: the same results as calls in Python, bit by bit, and no replay where anything is not as it was."""

import copy
import gc
import itertools
import os
import pickle
import sysconfig
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch._dynamo import compiled_autograd  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from ksgen import structures  # noqa: E402
from ksgen.build import background  # noqa: E402
from ksgen.build.background import PendingError  # noqa: E402
from ksgen.devices.threads import AGAIN, MOST_LATE, ThreadsByTime  # noqa: E402
from ksgen.errors import LaunchError, ToolchainError  # noqa: E402
from ksgen.pattern import Chain  # noqa: E402
from ksgen.torch import KSLinear, KSSum  # noqa: E402
from ksgen.torch.layer.tied import Tied  # noqa: E402
from ksgen.torch.operators import launches, prepared, replay, trained  # noqa: E402
from ksgen.torch.operators.choice import has_kernels, launcher_of  # noqa: E402
from ksgen.torch.operators.factors import factors_of, swapped  # noqa: E402
from ksgen.torch.operators.meanwhile import building  # noqa: E402
from tests.support.huge_pages import asks_for_huge_pages, needs_huge_pages  # noqa: E402

pytestmark = [
    pytest.mark.skipif(not has_kernels(torch.device("cpu")), reason="replays are for kernels on the processor"),
    pytest.mark.skipif(
        not Path(sysconfig.get_paths()["include"], "Python.h").exists(), reason="the extension needs Python's headers"
    ),
]
IS_DUE, LONG_NS = replay.is_due, replay.LONG_NS
CHAIN, ONE = [(2, 8, 16, 2), (1, 24, 32, 1)], [(1, 24, 16, 3)]


class Counted:
    """A replay that counts the calls that it took."""

    def __init__(self, made: Any) -> None:
        self.made, self.taken = made, 0

    def run(self, *given: Any) -> Any:
        y = self.made.run(*given)
        self.taken += y is not None
        return y

    def add(self, *given: Any) -> None:
        self.made.add(*given)


@cache
def extension() -> Any:
    return replay._load(replay._build())


@pytest.fixture(autouse=True)
def loaded(monkeypatch: pytest.MonkeyPatch, without_replays: None) -> Iterator[None]:
    """The extension, compiled once and cached; each call in Python attempts to add an entry."""
    monkeypatch.setattr(replay, "_loaded", [extension()])
    monkeypatch.setattr(replay, "_is_early", True)
    monkeypatch.setattr(replay, "_refused", [])
    monkeypatch.setattr(replay, "is_due", lambda calls: True)
    monkeypatch.setattr(replay, "LONG_NS", 10**12)  # a busy machine may interrupt a call for milliseconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # otherwise the first calls time two numbers of threads
    yield
    torch.set_num_threads(threads)


def layer_of(patterns: Any = CHAIN, **options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(patterns, **({"backend": "ksgen"} | options))


def x_of(layer: KSLinear, *shape: int, **options: Any) -> Any:
    features = (*shape, layer.in_features) if layer.layout == "bsf" else (layer.in_features, *shape)
    return torch.randn(*features, **options)


def step(layer: Any, x: Any, *residual: Any) -> tuple[Any, ...]:
    """Output, and the gradients of x, of the residual and of all parameters that have one."""
    y = layer(x, *residual)
    sources = [each for each in (x, *residual, *layer.parameters()) if each.requires_grad]
    gradient = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y.detach(), *torch.autograd.grad(y, sources, gradient)


def warmed(layer: KSLinear, call: Callable[[], Any]) -> Any:
    """Repeat a call until a replay takes it; the last result in Python."""
    for _ in range(3):
        in_python = call()
    replayed = vars(layer).get("_replay")
    assert replayed is not None, "no entry was added"
    if not isinstance(replayed, Counted):
        vars(layer)["_replay"] = Counted(replayed)
    return in_python


def taken(layer: KSLinear) -> int:
    return int(vars(layer)["_replay"].taken) if "_replay" in vars(layer) else 0


def replayed(layer: KSLinear, call: Callable[[], Any]) -> Any:
    """Result of a call that the replay has to take."""
    before = taken(layer)
    found = call()
    assert taken(layer) == before + 1
    return found


def same(found: Any, wanted: Any) -> bool:
    pairs = zip(found, wanted, strict=True)
    return all(a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "bias"), [((1,), False), ((3,), True), ((2, 5), True)])
def test_calls_and_steps_are_those_in_python(layout: str, dtype: Any, shape: tuple[int, ...], bias: bool) -> None:
    layer = layer_of(layout=layout, dtype=dtype, bias=bias)
    for x in (x_of(layer, *shape, dtype=dtype), x_of(layer, *shape, dtype=dtype, requires_grad=True)):
        wanted = warmed(layer, lambda x=x: step(layer, x))
        assert same(replayed(layer, lambda x=x: step(layer, x)), wanted)
    with torch.no_grad():
        residual = torch.randn_like(layer(x))
        for more in ((), (residual,)):
            wanted = warmed(layer, lambda more=more: layer(x, *more))
            assert same([replayed(layer, lambda more=more: layer(x, *more))], [wanted])
    layer.eval().freeze()
    with torch.inference_mode():
        wanted = warmed(layer, lambda: layer(x.detach()))
        assert same([replayed(layer, lambda: layer(x.detach()))], [wanted])


@needs_huge_pages
def test_large_arrays_lie_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """y, and the gradient of x, of launchers, of calls in Python and of replays."""
    monkeypatch.setattr(replay, "_is_replay_faster", lambda *_: True)
    layer = layer_of([(1, 16, 16, 256)])
    x = torch.randn(2100, layer.in_features, requires_grad=True)
    assert x.nbytes > 2**25  # the C library maps such arrays one by one, and unmaps them
    with torch.no_grad():
        found = [launcher_of(layer.chain[0])(x.detach(), layer.weights[0].detach())]
        found += [*(layer(x) for _ in range(3)), warmed(layer, lambda: layer(x)), replayed(layer, lambda: layer(x))]
    before = taken(layer)
    found += step(layer, x)[:2]  # in Python: the replay has entries, but none of a step
    for _ in range(20):
        if taken(layer) == before:
            step(layer, x)
    found += replayed(layer, lambda: step(layer, x))[:2]
    assert all(asks_for_huge_pages(each.data_ptr() + each.nbytes // 2) for each in found)


def test_further_backends_and_chains() -> None:
    """Exchanged features, one factor, another layout of y, and an activation."""
    cases: list[tuple[Any, dict[str, Any]]] = [
        ("4,8,16,1@k.i", {}),
        ([(1, 24, 16, 3)], {"out_layout": "bsl"}),
        (CHAIN, {"activation": "gelu", "between": "relu"}),
        (CHAIN, {"backend": "auto"}),
    ]
    for patterns, options in cases:
        layer = layer_of(patterns, **options)
        x = x_of(layer, 4)
        with torch.no_grad():
            wanted = warmed(layer, lambda layer=layer, x=x: layer(x))
            assert same([replayed(layer, lambda layer=layer, x=x: layer(x))], [wanted])


CHANGES: dict[str, Callable[[Any], Any]] = {
    "weights written": lambda layer: layer.weights[0].data.mul_(2),
    "weights replaced": lambda layer: layer.weights.__setitem__(1, nn.Parameter(torch.randn(1, 24, 32, 1))),
    "data replaced": lambda layer: setattr(layer.weights[0], "data", torch.randn(2, 8, 16, 2)),
    "bias written": lambda layer: layer.bias.data.add_(1),
    "bias removed": lambda layer: setattr(layer, "bias", None),
    "bias replaced": lambda layer: setattr(layer, "bias", nn.Parameter(torch.randn(24))),
    "activation": lambda layer: setattr(layer, "activation", "gelu"),
    "between": lambda layer: setattr(layer, "between", "relu"),
    "backend": lambda layer: setattr(layer, "backend", "einsum"),
    "pruned": lambda layer: prune.l1_unstructured(layer.weights, "0", 0.5),
    "computed": lambda layer: parametrize.register_parametrization(layer.weights, "0", Doubled()),
    "moved": lambda layer: layer.double().float(),
}


class Doubled(nn.Module):
    def forward(self, weights: Any) -> Any:
        return 2 * weights


@pytest.mark.parametrize(
    ("change", "training"),
    [(each, training) for each in CHANGES for training in (False, True) if (each, training) != ("pruned", True)],
)
def test_changes_take_effect(change: str, training: bool) -> None:
    layer = layer_of(bias=True)
    x = x_of(layer, 3, requires_grad=training)
    with torch.set_grad_enabled(training):
        call = (lambda: step(layer, x)) if training else (lambda: [layer(x)])
        warmed(layer, call)
        replayed(layer, call)
        CHANGES[change](layer)
        found = call()
        dense = layer(torch.eye(layer.in_features)).detach() if layer.bias is None else None
        usual = copy.deepcopy(layer) if change not in ("pruned", "computed") else layer
        vars(usual).pop("_replay", None)
        usual.backend = "einsum"
        wanted = (lambda: step(usual, x))() if training else [usual(x)]
    assert dense is None or dense.shape[0] == layer.in_features
    for got, expected in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "change", [name for name in CHANGES if name not in ("weights written", "data replaced", "bias written")]
)
def test_frozen_layers_notice_what_they_noticed(change: str) -> None:
    layer = layer_of(bias=True).eval().freeze()
    x = x_of(layer, 3)
    with torch.no_grad():
        warmed(layer, lambda: layer(x))
        replayed(layer, lambda: layer(x))
        try:
            CHANGES[change](layer)
        except LaunchError:
            return  # refused while frozen
        found = layer(x)
        usual = layer_of(bias=layer.bias is not None, activation=layer.activation, between=layer.between)
        usual.backend = "einsum"
        with torch.no_grad():
            for mine, its in zip(usual.weights, layer.weights, strict=True):
                mine.copy_(its)
            if layer.bias is not None:
                usual.bias.copy_(layer.bias)
        torch.testing.assert_close(found, usual(x), atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:KSLinear")
def test_a_counted_write_thaws_a_frozen_layer() -> None:
    layer = layer_of().eval().freeze()
    x = x_of(layer, 3)
    with torch.no_grad():
        before = warmed(layer, lambda: layer(x))
        layer.weights[1].mul_(2)
        after = layer(x)
    torch.testing.assert_close(after - layer.bias, 2 * (before - layer.bias))
    assert not layer.is_frozen
    assert "_replay" not in vars(layer), "its packed weights are released"


def test_a_further_weight_is_refused() -> None:
    layer = layer_of()
    x = x_of(layer, 4)
    with torch.no_grad():
        warmed(layer, lambda: layer(x))
        layer.weights.append(torch.randn(1, 2, 24, 1))
        with pytest.raises(LaunchError):
            layer(x)


def test_modes_and_transforms_take_the_usual_path() -> None:
    layer = layer_of(backend="auto")
    layer.backend = "ksgen"
    x = x_of(layer, 4)
    with torch.no_grad():
        wanted = warmed(layer, lambda: layer(x))
        count = taken(layer)
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        rows = torch.vmap(layer)(x)
        torch.testing.assert_close(rows, wanted, atol=1e-5, rtol=1e-5)
        other = {name: 2 * each for name, each in layer.named_parameters()}
        torch.testing.assert_close(
            torch.func.functional_call(layer, {**other, "bias": layer.bias}, (x,)) - layer.bias,
            4 * (wanted - layer.bias), atol=1e-4, rtol=1e-4,
        )  # fmt: skip
        _, tangent = torch.func.jvp(layer, (x,), (x,))
        torch.testing.assert_close(tangent, wanted - layer.bias, atol=1e-5, rtol=1e-5)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, x))).tangent
        torch.testing.assert_close(tangent, wanted - layer.bias, atol=1e-5, rtol=1e-5)
        from torch._subclasses.fake_tensor import FakeTensorMode

        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(x)).shape == wanted.shape
        traced = torch.jit.trace(layer, x, check_trace=False)
        assert taken(layer) == count + 1, "only functional_call, whose parameters have the same form"
    torch.testing.assert_close(traced(2 * x), layer(2 * x), atol=1e-5, rtol=1e-5)


def test_a_step_with_saved_tensor_hooks_and_other_threads() -> None:
    layer = layer_of()
    x = x_of(layer, 4, requires_grad=True)
    wanted, seen = warmed(layer, lambda: step(layer, x)), []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: seen.append(each) or each, lambda each: each):
        found = step(layer, x)
    assert seen
    assert taken(layer) == 0, "the second pass of a checkpoint must equal the first"
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    y = replayed(layer, lambda: layer(x))
    operators: list[Any] = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(function)
            return function(*args, **(kwargs or {}))

    gradient = torch.linspace(-1, 1, y.numel()).view(y.shape)
    with Watched():
        found = torch.autograd.grad(y, [x, *layer.parameters()], gradient)
    torch.testing.assert_close(found, wanted[1:], atol=1e-4, rtol=1e-4)
    assert any("mm" in str(each) for each in operators), "a mode sees the operators of a backward pass"
    before = taken(layer)
    torch.set_num_threads(2)
    step(layer, x)
    assert taken(layer) == before


def test_second_derivatives_batches_of_gradients_and_expanded_ones() -> None:
    layer = layer_of(bias=True)
    for shape in ((4,), (2, 3)):
        x = x_of(layer, *shape, requires_grad=True)
        warmed(layer, lambda x=x: step(layer, x))
        before = taken(layer)
        y = layer(x)
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        found = torch.autograd.grad(first.square().sum(), [x, *layer.weights])
        dense = layer.to_dense()
        usual = x @ dense.t() + layer.bias
        (wanted,) = torch.autograd.grad(usual.square().sum(), x, create_graph=True)
        torch.testing.assert_close(first, wanted, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(
            found, torch.autograd.grad(wanted.square().sum(), [x, *layer.weights]), atol=1e-2, rtol=1e-3
        )
        y = layer(x)
        several = torch.randn(3, *y.shape)
        (found,) = torch.autograd.grad(y, x, several, is_grads_batched=True)
        torch.testing.assert_close(found, several @ dense.detach(), atol=1e-4, rtol=1e-4)
        layer.zero_grad()
        layer(x).sum().backward()
        torch.testing.assert_close(layer.bias.grad, torch.full_like(layer.bias, float(torch.tensor(shape).prod())))
        assert taken(layer) == before + 3, "each of them began with a replay"


def test_autograd_reports_what_it_reports_in_python() -> None:
    layer = layer_of()
    x = x_of(layer, 4, requires_grad=True)
    warmed(layer, lambda: step(layer, x))
    y = replayed(layer, lambda: layer(x))
    with torch.no_grad():
        layer.weights[1].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    y = layer(x)
    with torch.no_grad():
        layer.bias.add_(1)  # accepted, as by a dense layer
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        y.sum().backward()
    assert type(replayed(layer, lambda: layer(x))) is torch.Tensor


def test_memory_that_is_replaced_before_the_backward_pass() -> None:
    """Other strides are read in PyTorch's operators, other types are refused there."""
    layer = layer_of(bias=True)
    x = x_of(layer, 4, requires_grad=True)
    wanted = warmed(layer, lambda: step(layer, x))
    sources, gradient = [x, *layer.parameters()], torch.linspace(-1, 1, 4 * 24).view(4, 24)
    y, again = (replayed(layer, lambda: layer(x)) for _ in range(2))
    layer.weights[1].data = layer.weights[1].data.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(torch.autograd.grad(y, sources, gradient), wanted[1:], atol=1e-4, rtol=1e-4)
    layer.double()
    with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
        torch.autograd.grad(again, sources, gradient)


def test_compiled_backward_passes_and_programs() -> None:
    layer = layer_of()
    x = x_of(layer, 4, requires_grad=True)
    wanted = warmed(layer, lambda: step(layer, x))
    y = replayed(layer, lambda: layer(x))
    gradient = torch.linspace(-1, 1, y.numel()).view(y.shape)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        y.backward(gradient)
    found = [x.grad, *(each.grad for each in layer.parameters())]
    torch.testing.assert_close(found, list(wanted[1:]), atol=1e-4, rtol=1e-4)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), wanted[0], atol=1e-4, rtol=1e-4)


def test_gradients_that_are_not_wanted() -> None:
    """Each set of parameters that learn is a case of its own."""
    layer = layer_of(bias=True)
    x, learned = x_of(layer, 4), x_of(layer, 4, requires_grad=True)
    layer.bias.requires_grad_(False)
    warmed(layer, lambda: step(layer, x))
    assert len(replayed(layer, lambda: step(layer, x))) == 3
    layer.bias.requires_grad_(True)
    of_bias = step(layer, learned)[2]
    torch.testing.assert_close(of_bias, torch.linspace(-1, 1, 4 * 24).view(4, 24).sum(0), atol=1e-5, rtol=1e-5)
    of_bias = step(layer, x)[1]
    torch.testing.assert_close(of_bias, torch.linspace(-1, 1, 4 * 24).view(4, 24).sum(0), atol=1e-5, rtol=1e-5)
    warmed(layer, lambda: step(layer, learned))
    layer.weights[0].requires_grad_(False)
    y, of_x, _, of_last = step(layer, learned)
    torch.testing.assert_close(
        of_x, torch.linspace(-1, 1, y.numel()).view(y.shape) @ layer.to_dense(), atol=1e-4, rtol=1e-4
    )
    assert of_last.shape == layer.weights[1].shape


def test_copies_have_no_replay_and_a_freed_layer_is_freed() -> None:
    layer = layer_of()
    x = x_of(layer, 4)
    with torch.no_grad():
        wanted = warmed(layer, lambda: layer(x))
        for each in (copy.deepcopy(layer), copy.copy(layer), pickle.loads(pickle.dumps(layer))):
            assert not {"_replay", "_python_calls"} & set(vars(each))
            assert same([each(x)], [wanted])
        replica = layer_of()
        vars(replica).update(vars(layer))  # as `DataParallel` copies modules
        vars(replica)["_modules"] = {"weights": nn.ParameterList([2 * each for each in layer.weights])}
        torch.testing.assert_close(replica(x) - layer.bias, 4 * (wanted - layer.bias), atol=1e-4, rtol=1e-4)
        vars(layer)["_replay"] = vars(layer)["_replay"].made
        assert copy.copy(vars(layer)["_replay"]) is pickle.loads(pickle.dumps(vars(layer)["_replay"])) is None
    own = layer_of()
    with torch.no_grad():
        for _ in range(3):
            own(x)
    assert "_replay" in vars(own)
    freed = weakref.ref(own.weights[0])
    gc.disable()
    del own
    assert freed() is None, "weights are freed with the layer, without the collector of cycles"
    gc.enable()
    hooked = layer_of()
    hooked.register_forward_hook(lambda *_, hooked=hooked: None)  # a cycle
    x.requires_grad_()
    for _ in range(3):
        step(hooked, x)
    left = hooked(x)
    gone = weakref.ref(hooked)
    assert "_replay" in vars(hooked)
    del hooked
    gc.collect()
    assert gone() is None
    left.sum().backward()  # a graph needs no layer


def test_many_shapes_and_threads() -> None:
    layer = layer_of()
    inputs = [x_of(layer, rows) for rows in range(1, 13)]
    with torch.no_grad():
        wanted = [warmed(layer, lambda x=x: layer(x)) for x in inputs]
    wrong: list[Any] = []

    @torch.no_grad()
    def work() -> None:
        torch.set_num_threads(1)
        for _ in range(20):
            for x, y in zip(inputs, wanted, strict=True):
                if not torch.equal(layer(x), y):
                    wrong.append(x.shape)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert not wrong


def test_two_threads_of_a_kernel_are_timed_before_a_replay_takes_over() -> None:
    torch.set_num_threads(2)
    layer = layer_of([(1, 384, 384, 1)])
    x = x_of(layer, 16)
    with torch.no_grad():
        wanted = layer(x)
        for _ in range(60):
            torch.testing.assert_close(layer(x), wanted, atol=1e-4, rtol=1e-4)
        warmed(layer, lambda: layer(x))
        replayed(layer, lambda: layer(x))


def test_without_a_compiler_calls_run_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise ToolchainError("no compiler")

    monkeypatch.setattr(replay, "_loaded", [])
    monkeypatch.setattr(replay, "_refused", [])
    monkeypatch.setattr(replay, "_attempts", 0)  # of other tests
    monkeypatch.setattr(replay, "_compiler", refuse)
    layer = layer_of()
    x = x_of(layer, 4)
    with torch.no_grad():
        assert same([layer(x) for _ in range(4)][3:], [layer(x)])
    assert replay._refused == ["no compiler"]
    assert "_replay" not in vars(layer)


def test_the_extension_is_compiled_in_the_background_after_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    found, asked = replay._loaded[0], list[Any]()

    class Caches:
        def get(self, *_: Any) -> None:
            return None

    def outcome(key: Any, what: str, work: Any, is_needed: bool = True) -> Any:
        assert not is_needed
        asked.append(what)
        if len(asked) < 3:
            raise PendingError(what)
        return work()

    monkeypatch.setattr(replay, "_loaded", [])
    monkeypatch.setattr(replay, "_attempts", 0)
    monkeypatch.setattr(replay, "default_caches", Caches)
    monkeypatch.setattr(replay, "outcome", outcome)
    monkeypatch.setattr(replay, "_load", lambda binary: found)
    attempts = -(-replay.OFTEN // replay.APART)
    token = building.set(True)
    assert [replay._extension() for _ in range(attempts)] == [None] * attempts
    building.reset(token)
    assert not asked, "`build` does not wait for this compiler"
    monkeypatch.setattr(replay, "_attempts", 0)
    assert [replay._extension() for _ in range(attempts + 1)] == [None] * (attempts + 1)
    assert len(asked) == 2
    assert replay._extension() is found
    assert replay._extension() is found
    assert len(asked) == 3
    assert not replay._is_early


def test_first_calls_of_many_layers_do_not_compile_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def outcome(key: Any, what: str, work: Any, is_needed: bool = True) -> Any:
        assert not is_needed
        asked.append(what)
        raise PendingError(what)

    class Caches:
        def get(self, *_: Any) -> None:
            return None

    monkeypatch.setattr(replay, "_loaded", [])
    monkeypatch.setattr(replay, "_attempts", 0)
    monkeypatch.setattr(replay, "default_caches", Caches)
    monkeypatch.setattr(replay, "outcome", outcome)
    monkeypatch.setattr(replay, "is_due", IS_DUE)
    layers = [layer_of() for _ in range(2 + replay.OFTEN // replay.APART)]
    with torch.no_grad():
        for calls, is_asked in ((3, False), (replay.APART, True)):
            for _ in range(calls):
                for each in layers:
                    each(torch.ones(4, 64))
            assert bool(asked) == is_asked


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fastest", ["bmm", "each"])
def test_kernels_are_timed_again_as_a_replay(fastest: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The method of the first calls was chosen by times of Python code."""
    asked: list[bool] = []

    def is_faster(*methods: Any) -> bool:
        for each in methods:
            each()
        return asked.pop()

    for module in (prepared, trained):
        monkeypatch.setattr(module, "faster", lambda job, ways: fastest if fastest in ways else next(iter(ways)))
    monkeypatch.setattr(replay, "_is_faster", is_faster)
    patterns = CHAIN if training or fastest == "each" else ONE
    for may_change, answer in ((True, False), (True, True), (False, True)):
        monkeypatch.setattr(replay, "may_change", lambda may_change=may_change: may_change)
        monkeypatch.setattr(prepared, "_calls", {})
        monkeypatch.setattr(trained, "_steps", {})
        asked[:] = [answer]
        layer = layer_of(patterns, backend="auto")
        x = x_of(layer, 4, requires_grad=training)
        call = partial(step, layer, x) if training else partial(layer, x)
        with torch.set_grad_enabled(training):
            wanted, *_ = [call() for _ in range(4)]
            assert ("_replay" in vars(layer)) == (may_change and answer)
            torch.testing.assert_close(call(), wanted, atol=1e-4, rtol=1e-4)
        assert bool(asked) != may_change, "results of deterministic algorithms must not change"
        every = *prepared._calls.values(), *trained._steps.values()
        found = [each for each in every if not isinstance(each, prepared.Unprepared)]
        in_python = [each.is_by_kernels for each in found]
        assert in_python == [may_change and answer], "an entry may expire: calls in Python run the same launches"


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("case", ["built", "built while threads are timed", "compiled later"])
def test_no_replay_takes_over_after_the_first_calls(case: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bool] = []  # whether during `build`
    for module in (prepared, trained):
        monkeypatch.setattr(module, "faster", lambda job, ways: "bmm")
    monkeypatch.setattr(replay, "_is_faster", lambda *methods: compared.append(building.get()) or True)
    monkeypatch.setattr(replay, "may_change", lambda: True)
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setattr(trained, "_steps", {})
    layer = layer_of(ONE, backend="auto").train(training)
    with monkeypatch.context() as during:
        during.setattr(replay, "is_due", lambda calls: False)
        if case == "built while threads are timed":
            during.setattr(launches.Launches, "settled", lambda self: None)
        if case != "compiled later":
            layer.build(4)
    monkeypatch.setattr(replay, "_is_early", case != "compiled later")
    with torch.set_grad_enabled(training):
        for _ in range(4):
            step(layer, x_of(layer, 4)) if training else layer(x_of(layer, 4))
    # calls without gradients, and in training steps with a gradient of x, and without
    assert compared == [True] * ((case == "built") * (1 + 2 * training))
    assert ("_replay" in vars(layer)) == (case == "built")


@pytest.mark.parametrize("training", [False, True])
def test_a_build_lets_replays_decide_though_calls_wait_for_kernels(
    training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (prepared, trained):
        monkeypatch.setattr(module, "faster", lambda job, ways: "bmm")
    monkeypatch.setattr(replay, "_is_faster", lambda *methods: True)
    monkeypatch.setattr(replay, "_is_early", True)
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setattr(trained, "_steps", {})
    assert os.environ["KSGEN_COMPILE"] == "wait"
    layer = layer_of(ONE, backend="auto").train(training).build(4)
    assert "_replay" in vars(layer)


@pytest.mark.parametrize(("ns", "is_compared"), [(LONG_NS, True), (LONG_NS + 1, False)])
def test_long_calls_are_not_repeated_to_be_compared(
    ns: int, is_compared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared, times = list[Any](), itertools.count(0, ns)
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "bmm")
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setattr(replay, "may_change", lambda: True)
    monkeypatch.setattr(replay, "LONG_NS", LONG_NS)
    monkeypatch.setattr(replay, "perf_counter_ns", lambda: next(times))
    monkeypatch.setattr(replay, "_is_faster", lambda *methods: compared.append(methods) or True)
    layer = layer_of(ONE, backend="auto")
    with torch.no_grad():
        for _ in range(4):
            layer(x_of(layer, 4))
    assert ("_replay" in vars(layer), len(compared)) == (is_compared, is_compared)


def test_the_second_of_two_calls_in_a_row_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, at = [""], [0]
    monkeypatch.setattr(replay, "perf_counter_ns", lambda: at[0])

    def run(name: str, ns: int, after_another_ns: int) -> None:
        at[0] += ns + after_another_ns * (runs[-1] != name)
        runs.append(name)

    assert replay._is_faster(partial(run, "first", 5, 9), partial(run, "second", 7, 0))


def test_attempts_are_rare() -> None:
    """They alternate among equal layers, which share prepared calls."""
    layers = [layer_of() for _ in range(3)]
    due = [[IS_DUE(number) for _ in layers] for number in range(1, 3 * replay.APART)]
    assert sum(map(sum, due)) == 3 * len(layers)
    assert due[1] == [True] * 3


@pytest.mark.parametrize("storage", ["int8", "e4m3", "bfloat16"])
def test_weights_in_eight_bits(storage: str) -> None:
    layer = layer_of().quantize(storage)
    x = x_of(layer, 4)
    with torch.no_grad():
        wanted = warmed(layer, lambda: layer(x))
        assert same([replayed(layer, lambda: layer(x))], [wanted])
        copied = copy.deepcopy(layer)
        assert "_replay" not in vars(copied)
        layer.scale_2.mul_(2)
        torch.testing.assert_close(layer(x) - layer.bias, 2 * (wanted - layer.bias), atol=1e-4, rtol=1e-4)
        assert same([copied(x)], [wanted])


def test_the_extension_is_compiled_at_once_for_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    found, given_way = extension(), list[bool]()

    def outcome(key: Any, what: str, work: Any, is_needed: bool = True) -> Any:
        given_way.append(bool((policy := background._policy.get()) and policy()))
        return work()

    monkeypatch.setattr(replay, "_loaded", [])
    monkeypatch.setattr(replay, "_attempts", 1)
    monkeypatch.setattr(replay, "outcome", outcome)
    monkeypatch.setattr(replay, "_load", lambda binary: found)
    assert replay.load_now()
    assert given_way == [False]
    assert replay.load_now()
    assert len(given_way) == 1
    assert replay._is_early


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are the fastest method of training steps."""
    monkeypatch.setattr(trained, "faster", lambda job, ways: "ksgen" if "ksgen" in ways else "each")
    monkeypatch.setattr(trained, "_steps", {})


def is_as_dense(layer: Any, found: tuple[Any, ...], x: Any, *residual: Any) -> bool:
    """Whether the outputs and gradients of a step are those of the dense matrix in float64."""
    usual = copy.deepcopy(layer).double()
    first = usual[0] if isinstance(usual, KSSum) else usual
    wide, *added = [each.detach().double().requires_grad_(each.requires_grad) for each in (x, *residual)]
    y = torch.tensordot(usual.to_dense(), wide if first.layout == "bsl" else wide.movedim(-1, 0), 1)
    y = y if first.bias is None else y + first.bias.view(-1, *[1] * (y.dim() - 1))
    y = y if first.layout == "bsl" else y.movedim(0, -1)
    y = sum(added, y)
    sources = [each for each in (wide, *added, *usual.parameters()) if each.requires_grad]
    gradient = torch.linspace(-1, 1, y.numel(), dtype=x.dtype).view(y.shape).double()
    wanted = y.detach(), *torch.autograd.grad(y, sources, gradient)
    bound = 0.03 if x.dtype is torch.bfloat16 else 1e-5
    norms = [((one.double() - other).norm(), other.norm()) for one, other in zip(found, wanted, strict=True)]
    return all(float(error) <= bound * float(norm) for error, norm in norms)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "chain",
    [
        ["4,8,16,1@k.i", "1,24,32,1"],
        ["l.i@4,8,16,1"],
        ["4,8,16,1@k.i"],
        ["1,8,16,4@j.k"],
        ["2,8,16,2", "4,6,8,1@k1:2.i.k2"],
    ],
)
def test_steps_with_exchanged_features(chain: list[str], dtype: Any, layout: str, by_kernels: None) -> None:
    """The gradient of an exchanged y is copied into the order that kernels read; the bias has the order of y."""
    for shape, bias in (((1,), True), ((4,), True), ((2, 3), False)):
        layer = layer_of(chain, bias=bias, layout=layout, dtype=dtype)
        x = x_of(layer, *shape, dtype=dtype, requires_grad=True)
        wanted = warmed(layer, lambda layer=layer, x=x: step(layer, x))
        found = replayed(layer, lambda layer=layer, x=x: step(layer, x))
        assert same(found, wanted)
        assert is_as_dense(layer, found, x)


def test_further_derivatives_of_exchanged_features(by_kernels: None) -> None:
    layer = layer_of(["4,8,16,1@k.i"])
    x = x_of(layer, 4, requires_grad=True)
    warmed(layer, lambda: step(layer, x))
    usual = layer_of(["4,8,16,1@k.i"], backend="einsum")
    (first,) = torch.autograd.grad(replayed(layer, lambda: layer(x)).square().sum(), x, create_graph=True)
    (its,) = torch.autograd.grad(usual(x).square().sum(), x, create_graph=True)
    torch.testing.assert_close(first, its, atol=1e-3, rtol=1e-3)
    found = torch.autograd.grad(first.square().sum(), layer.weights[0])
    wanted = torch.autograd.grad(its.square().sum(), usual.weights[0])
    torch.testing.assert_close(found, wanted, atol=1e-1, rtol=1e-3)
    for gradient in (torch.ones(1).expand(4, 32), torch.randn(32, 4).t()):
        found = torch.autograd.grad(replayed(layer, lambda: layer(x)), x, gradient)
        torch.testing.assert_close(found, torch.autograd.grad(usual(x), x, gradient), atol=1e-4, rtol=1e-4)


def tied_layer(**options: Any) -> KSLinear:
    """(3 x 5) times (8 x 4) of a Kronecker product: along a and along d, the weights of a factor are equal."""
    torch.manual_seed(0)
    return KSLinear.from_structure(structures.kronecker(24, 20, (5, 3)), **({"backend": "ksgen"} | options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "bias"), [((1,), False), ((1,), True), ((3,), False), ((3,), True), ((2, 5), False)])
def test_tied_weights(shape: tuple[int, ...], bias: bool, dtype: Any, layout: str, by_kernels: None) -> None:
    """Steps and calls without gradients multiply by the slices, or repeat them."""
    check_tied(tied_layer(layout=layout, dtype=dtype, bias=bias), shape, dtype)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_tied_along_both_axes(dtype: Any, layout: str, by_kernels: None) -> None:
    torch.manual_seed(0)
    structure = structures.of_chain(Chain(["3,5,4,2", "1,8,30,1"]), ("ad", ""))
    layer = KSLinear.from_structure(structure, backend="ksgen", layout=layout, dtype=dtype)
    check_tied(layer, (3,), dtype)


def check_tied(layer: KSLinear, shape: tuple[int, ...], dtype: Any) -> None:
    for x in (x_of(layer, *shape, dtype=dtype), x_of(layer, *shape, dtype=dtype, requires_grad=True)):
        wanted = warmed(layer, lambda x=x: step(layer, x))
        found = replayed(layer, lambda x=x: step(layer, x))
        assert same(found, wanted)
        assert is_as_dense(layer, found, x)
    with torch.no_grad():
        wanted = warmed(layer, lambda: layer(x))
        assert same([replayed(layer, lambda: layer(x))], [wanted])
        torch.testing.assert_close(wanted, found[0], atol=0.05 if dtype is torch.bfloat16 else 1e-5, rtol=0.02)
        layer.eval().freeze()
        wanted = warmed(layer, lambda: layer(x))
        assert same([replayed(layer, lambda: layer(x))], [wanted])


def first_tie(layer: Any) -> Any:
    return layer.weights.parametrizations["0"]


class RepeatedTwice(nn.Module):
    def forward(self, part: Any) -> Any:
        return 2 * part.expand(3, -1, -1, -1)


TIE_CHANGES: dict[str, Callable[[Any], Any]] = {
    "slice written": lambda layer: first_tie(layer).original.data.mul_(2),
    "slice replaced": lambda layer: setattr(first_tie(layer), "original", nn.Parameter(torch.randn(1, 4, 8, 1))),
    "slice kept": lambda layer: first_tie(layer).original.requires_grad_(False),
    "untied": lambda layer: parametrize.remove_parametrizations(layer.weights, "0"),
    "doubled": lambda layer: parametrize.register_parametrization(layer.weights, "0", Doubled()),
    "no tie": lambda layer: first_tie(layer)._modules.__setitem__("0", RepeatedTwice()),
    "loaded": lambda layer: layer.load_state_dict({name: 2 * each for name, each in layer.state_dict().items()}),
    "moved": lambda layer: layer.double().float(),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("change", TIE_CHANGES)
def test_changes_of_tied_weights_take_effect(change: str, training: bool, by_kernels: None) -> None:
    layer = tied_layer()
    x = x_of(layer, 3, requires_grad=training)
    with torch.set_grad_enabled(training):
        call = (lambda: step(layer, x)) if training else (lambda: (layer(x),))
        warmed(layer, call)
        replayed(layer, call)
        TIE_CHANGES[change](layer)
        found = call()
    assert is_as_dense(layer, found, x) if training else torch.allclose(found[0], x @ layer.to_dense().t() + layer.bias)


@pytest.mark.filterwarnings("ignore:KSLinear")
@pytest.mark.parametrize("change", ["slice replaced", "untied", "loaded", "moved"])
def test_frozen_tied_weights_notice_changes(change: str) -> None:
    layer = tied_layer().eval().freeze()
    x = x_of(layer, 3)
    with torch.no_grad():
        warmed(layer, lambda: layer(x))
        replayed(layer, lambda: layer(x))
        TIE_CHANGES[change](layer)
        torch.testing.assert_close(layer(x), x @ layer.to_dense().t() + layer.bias)


def test_a_tie_that_changes_takes_effect(by_kernels: None) -> None:
    """A new tie of the same slice, and another parametrization that reads the same list."""
    layer = layer_of(["4,4,4,4"], bias=False)
    parametrize.register_parametrization(layer.weights, "0", Tied(0, 4))
    x = x_of(layer, 1, requires_grad=True)
    for tie in (Tied(0, 4), Tied(3, 4)):
        warmed(layer, lambda: step(layer, x))
        replayed(layer, lambda: step(layer, x))
        part = torch.randn(*[1 if axis == tie.axis else 4 for axis in range(4)])
        first_tie(layer)._modules["0"] = tie
        first_tie(layer)._parameters["original"] = nn.Parameter(part)
        assert is_as_dense(layer, step(layer, x), x)


def test_equal_slices_with_other_ties_have_steps_of_their_own(by_kernels: None) -> None:
    for pattern, axis in (("4,6,8,1", 0), ("1,6,8,4", 3)):
        layer = layer_of([pattern], bias=False)
        parametrize.register_parametrization(layer.weights, "0", Tied(axis, 4))
        x = x_of(layer, 1, requires_grad=True)
        wanted = warmed(layer, lambda layer=layer, x=x: step(layer, x))
        assert same(replayed(layer, lambda layer=layer, x=x: step(layer, x)), wanted)
        assert is_as_dense(layer, wanted, x)


def test_further_derivatives_of_tied_weights(by_kernels: None) -> None:
    for rows in (1, 3):
        layer = tied_layer()
        x = x_of(layer, rows, requires_grad=True)
        warmed(layer, lambda layer=layer, x=x: step(layer, x))
        y = replayed(layer, lambda layer=layer, x=x: layer(x))
        parts = list(layer.weights.parameters())
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        usual = x @ layer.to_dense().t() + layer.bias
        (wanted,) = torch.autograd.grad(usual.square().sum(), x, create_graph=True)
        torch.testing.assert_close(first, wanted, atol=1e-3, rtol=1e-3)
        found = torch.autograd.grad(first.square().sum(), [x, *parts])
        torch.testing.assert_close(found, torch.autograd.grad(wanted.square().sum(), [x, *parts]), atol=1e-2, rtol=1e-3)
        several = torch.randn(3, *y.shape)
        (found,) = torch.autograd.grad(layer(x), x, several, is_grads_batched=True)
        torch.testing.assert_close(found, several @ layer.to_dense().detach(), atol=1e-4, rtol=1e-4)
        y = replayed(layer, lambda layer=layer, x=x: layer(x))
        with torch.no_grad():
            parts[1].add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("shape", [(1,), (3,), (2, 3)])
def test_steps_with_a_residual(shape: tuple[int, ...], layout: str, by_kernels: None) -> None:
    """Kernels add it, and its gradient is that of y. Each combination of gradients is a case of its own."""
    for layer in (
        layer_of(layout=layout),
        layer_of(["4,8,16,1@k.i"], layout=layout, bias=False),
        tied_layer(layout=layout),
        tied_layer(layout=layout, bias=False),
    ):
        x = x_of(layer, *shape, requires_grad=True)
        residual = torch.randn(layer._y_shape(x))
        for wants in (True, False):
            residual.requires_grad_(wants)
            before = taken(layer)
            first = step(layer, x, residual)
            assert taken(layer) == before
            wanted = warmed(layer, lambda layer=layer, x=x, residual=residual: step(layer, x, residual))
            found = replayed(layer, lambda layer=layer, x=x, residual=residual: step(layer, x, residual))
            assert same(found, wanted)
            assert is_as_dense(layer, first, x, residual)
            assert is_as_dense(layer, found, x, residual)
        assert is_as_dense(layer, step(layer, x), x)


def test_further_derivatives_with_a_residual(by_kernels: None) -> None:
    layer = layer_of()
    x, residual = x_of(layer, 4, requires_grad=True), torch.randn(4, 24, requires_grad=True)
    warmed(layer, lambda: step(layer, x, residual))
    usual = x @ layer.to_dense().t() + layer.bias + residual
    y = replayed(layer, lambda: layer(x, residual))
    firsts = [torch.autograd.grad(each.square().sum(), [x, residual], create_graph=True) for each in (y, usual)]
    torch.testing.assert_close(*firsts, atol=1e-3, rtol=1e-3)
    found, wanted = [torch.autograd.grad((one**2).sum() + (two**2).sum(), [x, residual]) for one, two in firsts]
    torch.testing.assert_close(found, wanted, atol=1e-2, rtol=1e-3)
    y = replayed(layer, lambda: layer(x, residual))
    with torch.no_grad():
        residual.mul_(2)  # no gradient reads it
    y.sum().backward()
    torch.testing.assert_close(residual.grad, torch.ones(4, 24))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("chain", "dtype"),
    [
        (["1,8,16,4@j.k"], torch.float32),
        (["1,24,64,1"], torch.bfloat16),
        (["4,16,16,1", "1,72,64,1"], torch.float32),
    ],
)
def test_steps_whose_x_is_packed(chain: list[str], dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of x multiply the weights of the last factor, so that those are not packed."""
    monkeypatch.setattr(trained, "faster", lambda job, ways: "swapped" if "swapped" in ways else "each")
    monkeypatch.setattr(trained, "_steps", {})
    for layout, shape, wants_x in (("bsf", (5,), True), ("bsf", (2, 4), False), ("bsl", (1,), True)):
        layer = layer_of(chain, bias=False, layout=layout, dtype=dtype)
        x = x_of(layer, *shape, dtype=dtype, requires_grad=wants_x)
        residual = torch.randn(layer._y_shape(x), dtype=dtype, requires_grad=True)
        for more in ((), (residual,)):
            trained._steps.clear()
            wanted = warmed(layer, lambda layer=layer, x=x, more=more: step(layer, x, *more))
            (prepared_step,) = trained._steps.values()
            assert prepared_step.step._launched[-1].is_swapped
            found = replayed(layer, lambda layer=layer, x=x, more=more: step(layer, x, *more))
            assert same(found, wanted)
            assert is_as_dense(layer, found, x, *more)


def test_x_is_packed_only_where_kernels_can_write_y() -> None:
    """Kernels write the rows of such a y in the order (j, k)."""
    for chain, layout, rows, bias in (
        (["1,8,16,4"], "bsf", 5, False),
        (["1,8,16,4@j.k"], "bsl", 5, False),
        (["1,8,16,4@j.k"], "bsf", 5, True),
        (["1,8,16,4@j.k"], "bsf", 9, False),
        (["2,8,16,1"], "bsf", 5, False),
        (["l.i@4,16,4,1", "1,8,64,1"], "bsf", 5, False),
    ):
        last = factors_of(Chain(tuple(chain)), (), layout, rows, (bias, False))[-1]
        assert swapped(Chain(tuple(chain)), last, bias) is None
    (only,) = factors_of(Chain(("1,8,16,4@j.k",)), (), "bsf", 5, (False, False))
    assert swapped(Chain(("1,8,16,4@j.k",)), only, False) is not None


def test_sums_in_training(by_kernels: None) -> None:
    """Each layer adds the earlier ones inside its kernels, and a replay repeats its step."""
    torch.manual_seed(0)
    total = KSSum.from_structures(structures.dyad(64, 32, blocks=4), backend="ksgen")
    x = torch.randn(5, 64, requires_grad=True)
    residual = torch.randn(5, 32, requires_grad=True)
    for more in ((), (residual,)):
        wanted = [step(total, x, *more) for _ in range(4)][-1]
        for each in total:
            vars(each)["_replay"] = Counted(getattr(vars(each)["_replay"], "made", vars(each)["_replay"]))
        found = step(total, x, *more)
        assert [taken(each) for each in total] == [1, 1]
        assert same(found, wanted)
        assert is_as_dense(total, found, x, *more)
        assert "Add" not in total(x, *more).grad_fn.name()


def test_small_sums_are_replayed_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "may_change", lambda: True)

    def total_of(tie: bool = False) -> tuple[Any, list[Any]]:
        layers = [layer_of().eval(), layer_of([(2, 12, 32, 1)], bias=False).eval()]
        if tie:
            parametrize.register_parametrization(layers[1].weights, "0", Tied(0, 2))
        for each in layers:
            each.freeze()
        return KSSum(layers), layers

    def called(total: Any, rows: int = 4) -> Any:
        torch.manual_seed(1)
        x = torch.randn(rows, 64)
        with torch.no_grad():
            return [total(x) for _ in range(4)][-1]

    total, layers = total_of()
    wanted = called(total)
    assert all("_replay" in vars(each) for each in layers)
    large, layers = total_of()
    called(large, rows=20_000)
    assert not any("_replay" in vars(each) for each in layers), "its partial sum would leave the caches"
    tied, layers = total_of(tie=True)
    called(tied)
    assert all("_replay" in vars(each) for each in layers)
    with monkeypatch.context() as patched:
        patched.setattr(replay, "may_repeat", lambda layer: layer.bias is not None)
        partly, layers = total_of()
        called(partly)
    assert not any("_replay" in vars(each) for each in layers), "one of them cannot be replayed"
    monkeypatch.setattr(replay, "may_change", lambda: False)
    fixed, layers = total_of()
    torch.testing.assert_close(called(fixed), wanted, atol=1e-5, rtol=1e-5)
    assert not any("_replay" in vars(each) for each in layers), "results of deterministic algorithms must not change"


def test_calls_of_sums_compile_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    found, tries = extension(), list[bool]()
    monkeypatch.setattr(replay, "_loaded", [])
    monkeypatch.setattr(replay, "_sums", 0)
    monkeypatch.setattr(replay, "is_due", IS_DUE)
    monkeypatch.setattr(replay, "_extension", lambda **_: tries.append(True) or (found if len(tries) > 1 else None))
    total = KSSum([layer_of().eval().freeze(), layer_of([(1, 24, 64, 1)], bias=False).eval().freeze()])
    with torch.no_grad():
        for _ in range(3 * replay.APART):
            total(torch.ones(4, 64))
    assert len(tries) >= 3


@pytest.mark.parametrize("is_training", [False, True])
def test_launches_that_become_slow_return_to_python(is_training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on several threads are timed again there, if they often take longer than on one thread."""
    for most_ns, most in ((0, 10 * MOST_LATE), (1, MOST_LATE), (10**12, 10 * MOST_LATE)):
        monkeypatch.setattr(ThreadsByTime, "settled", lambda self, threads, most_ns=most_ns: (1, AGAIN, most_ns))
        layer = layer_of()
        x = x_of(layer, 3, requires_grad=is_training)
        with torch.set_grad_enabled(is_training):
            call = partial(step, layer, x) if is_training else partial(layer, x)
            warmed(layer, call)
            monkeypatch.setattr(replay, "is_due", lambda calls: False)
            for _ in range(10 * MOST_LATE):
                call()
        assert most - 2 <= taken(layer) <= most  # earlier calls count, too
        monkeypatch.setattr(replay, "is_due", lambda calls: True)


class Mask(nn.Module):
    """A parametrization that names an axis, like `Tied`."""

    axis = 0

    def forward(self, weights: Any) -> Any:
        return 2 * weights


def test_other_parametrizations_are_no_ties() -> None:
    layer, x = layer_of(), torch.randn(4, 64)
    parametrize.register_parametrization(layer.weights, "0", Mask())
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training):
            for _ in range(3):
                torch.testing.assert_close(layer(x), x @ layer.to_dense().T + layer.bias, atol=1e-4, rtol=1e-4)


def test_a_whole_parameter_of_tied_weights_takes_the_usual_path() -> None:
    layer, x = tied_layer(), torch.randn(3, 24)
    first: Any = layer.weights.parametrizations["0"]
    first.original = nn.Parameter(torch.randn(layer.weights[0].shape))
    for is_training in (False, True):
        with torch.set_grad_enabled(is_training):
            for _ in range(4):
                y = layer(x)
                bias = 0 if layer.bias is None else layer.bias
                torch.testing.assert_close(y, x @ layer.to_dense().T + bias, atol=1e-4, rtol=1e-4)


def test_launches_that_one_thread_settles_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads may compare a replay with the method in Python at the same time, with different results."""
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "each" if "each" in ways else next(iter(ways)))
    monkeypatch.setattr(prepared, "_calls", {})
    layer, x = tied_layer(backend="auto"), torch.randn(3, 24)
    monkeypatch.setattr(replay, "is_due", lambda calls: False)
    with torch.no_grad():
        wanted, *_ = [layer(x) for _ in range(3)]
        (call,) = (each for each in prepared._calls.values() if isinstance(each, prepared.Prepared))
        kernels = call.kernels
        assert kernels is not None
        assert not call.is_by_kernels
        call.settle(kernels)
        call.settle(None)
        assert call.is_by_kernels
        torch.testing.assert_close(layer(x), wanted, atol=1e-4, rtol=1e-4)


def test_residuals_that_are_not_contiguous_add_no_entries() -> None:
    layer, x = layer_of(), torch.randn(24, 64)
    residual = torch.randn(24, 24)
    with torch.no_grad():
        for _ in range(4):
            layer(x, residual.t())
        assert "_replay" not in vars(layer)
        warmed(layer, lambda: layer(x, residual))


def test_no_replay_replaces_a_method_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "bmm" if "bmm" in ways else next(iter(ways)))
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setattr(replay, "_is_early", True)
    monkeypatch.setattr(replay, "may_change", lambda: True)
    monkeypatch.setattr(replay, "_is_faster", lambda *_: True)
    layer, x = layer_of(ONE, backend="auto"), torch.randn(48, 4).t()
    with torch.no_grad():
        for _ in range(replay.LAST + 2):
            layer(x)
        wanted = layer(x.contiguous())
        for _ in range(3):
            assert torch.equal(layer(x.contiguous()), wanted)
    assert "_replay" not in vars(layer)
