"""Prepared calls of layers that are not frozen: they read their weights at each call, and remember nothing of them."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402
from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.func import functional_call, vmap  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from ksgen.torch import KSLinear, multiply  # noqa: E402
from ksgen.torch.operators import launches, prepared  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402
from tests.support.torch_cases import BIAS_CHANGES, change_bias, wrong_in_threads  # noqa: E402

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.device("cpu")), reason="prepared calls are for kernels on the processor"
)
CHAINS = ([(2, 24, 16, 1)], [(1, 24, 16, 3)], [(2, 8, 16, 2), (1, 24, 32, 1)])
BATCH = 5


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What prepared calls gave, None where the usual way was taken."""
    given: list[Any] = []
    multiply = prepared.multiply

    def noted(*args: Any) -> Any:
        given.append(multiply(*args))
        return given[-1]

    monkeypatch.setattr(prepared, "multiply", noted)
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setenv("KSGEN_COMPILE", "wait")
    return given


def layer_of(patterns: Any = CHAINS[2], **options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(patterns, **options).eval()


def wanted(layer: KSLinear, x: Tensor, residual: Tensor | None = None) -> Tensor:
    """Output by PyTorch's own products, from the current weights."""
    options: dict[str, Any] = {"layout": layer.layout, "backend": "strided"}
    *first, last = list(layer.weights)
    for each in first:
        x = multiply(x, each, **options, activation=layer.between)
    return multiply(x, last, layer.bias, residual, **options, activation=layer.activation)


def x_of(layer: KSLinear) -> Tensor:
    return torch.randn((BATCH, layer.in_features) if layer.layout == "bsf" else (layer.in_features, BATCH))


def check(layer: KSLinear, x: Tensor, *more: Tensor) -> None:
    with torch.no_grad():
        assert torch.allclose(layer(x, *more), wanted(layer, x, *more), atol=1e-5)


def warmed(layer: KSLinear, served: list[Any]) -> Tensor:
    x = x_of(layer)
    for _ in range(2):
        check(layer, x)
    assert served[-1] is not None
    return x


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ksgen", "in turn", "each", "strided", "bmm", "einsum"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("patterns", CHAINS)
def test_every_method_is_right(
    patterns: Any, layout: str, way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    """Whichever the clock would have chosen, also after a write."""
    monkeypatch.setattr(prepared, "faster", lambda job, ways: way if way in ways else next(iter(ways)))
    layer = layer_of(patterns, layout=layout, activation="silu")
    x = warmed(layer, served)
    residual = torch.randn_like(wanted(layer, x))
    for _ in range(2):
        check(layer, x, residual)
    assert served[-1] is not None
    with torch.no_grad():
        for each in layer.parameters():
            each.add_(0.5)
    check(layer, x, residual)
    check(layer, x)
    assert served[-1] is not None


class Doubled(nn.Module):
    repeats = True  # as `Tied` says

    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


def _loaded(layer: KSLinear) -> None:
    layer.load_state_dict({name: each * 2 for name, each in layer.state_dict().items()})


def _assigned(layer: KSLinear) -> None:
    layer.load_state_dict({name: each * 2 for name, each in layer.state_dict().items()}, assign=True)


def _by_numpy(layer: KSLinear) -> None:
    layer.weights[0].data.numpy()[...] *= 2


def _stepped(kind: Callable[..., Any], **options: Any) -> Callable[[KSLinear], None]:
    def step(layer: KSLinear) -> None:
        for each in layer.parameters():
            each.grad = torch.ones_like(each)
        kind(layer.parameters(), lr=0.5, **options).step()

    return step


def _replaced(layer: KSLinear) -> None:
    layer.weights[1] = nn.Parameter(layer.weights[1] * 2)


def _restrided(layer: KSLinear) -> None:
    """The same memory and count of writes, with other strides."""
    layer.weights[0].data = layer.weights[0].data.transpose(1, 2).contiguous().transpose(1, 2)


def _to_and_back(layer: KSLinear) -> None:
    layer.double().float()


def _pruned(layer: KSLinear) -> None:
    prune.random_unstructured(layer.weights, "0", 0.5)


def _pruned_for_good(layer: KSLinear) -> None:
    """The first factor's parameter is registered again, and comes last from then on."""
    _pruned(layer)
    prune.remove(layer.weights, "0")


def _computed_bias(layer: KSLinear) -> None:
    parametrize.register_parametrization(layer, "bias", Doubled())


def _computed_weights(layer: KSLinear) -> None:
    parametrize.register_parametrization(layer.weights, "0", Doubled())


CHANGES: dict[str, Callable[[KSLinear], Any]] = {
    "in place": lambda layer: layer.weights[0].mul_(2),
    "through data": lambda layer: layer.weights[0].data.mul_(2),
    "other memory": lambda layer: setattr(layer.weights[0], "data", layer.weights[0].data * 2),
    "NumPy": _by_numpy,
    "a load": _loaded,
    "a load that assigns": _assigned,
    "SGD": _stepped(torch.optim.SGD),
    "a fused optimizer": _stepped(torch.optim.Adam, fused=True),
    "another parameter": _replaced,
    "other strides": _restrided,
    "to and back": _to_and_back,
    "pruning": _pruned,
    "pruning for good": _pruned_for_good,
    "a parametrization of the bias": _computed_bias,
    "a parametrization of the weights": _computed_weights,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_weights_counts(change: str, served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    with torch.no_grad():
        before = layer(x)
        CHANGES[change](layer)
        again = layer(x)
    if change not in ("to and back", "other strides", "pruning for good"):
        assert not torch.allclose(before, again, atol=1e-3)
    check(layer, x)


def test_weights_that_a_parametrization_repeats_are_read_at_each_call(served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    _computed_weights(layer)
    for _ in range(2):
        check(layer, x)
        assert served[-1] is not None
        with torch.no_grad():
            layer.weights.parametrizations["0"].original.mul_(2)


@pytest.mark.parametrize("change", BIAS_CHANGES)
def test_every_change_of_the_bias_counts(change: str, served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    with torch.no_grad():
        change_bias(layer, change)
    for _ in range(3):
        check(layer, x)


def test_copies_have_weights_of_their_own(served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.weights[0].mul_(2)
        check(other, x)
        assert served[-1] is not None  # equal layers share calls
    check(layer, x)


def test_other_parameters_for_one_call(served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    other = {name: torch.randn_like(each) for name, each in layer.named_parameters()}
    with torch.no_grad():
        found = functional_call(layer, other, (x,))
        assert served[-1] is not None
        many = {name: torch.stack([each, each]) for name, each in other.items()}
        mapped = vmap(lambda own: functional_call(layer, own, (x,)))(many)
        assert served[-1] is None
        layer.load_state_dict(other)
        assert torch.allclose(found, wanted(layer, x), atol=1e-5)
        assert torch.allclose(mapped, torch.stack([found, found]), atol=1e-5)
    check(layer, x)


class Named(Tensor):
    """A subclass of tensors."""


def test_what_is_not_plain_takes_the_usual_path(served: list[Any]) -> None:
    layer = layer_of(bias=False)
    x = warmed(layer, served)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert layer(x.as_subclass(Named)).shape == (BATCH, layer.out_features)
        assert torch.allclose(torch.jit.trace(layer, (x,), check_trace=False)(x), wanted(layer, x), atol=1e-5)
        assert torch.allclose(torch.compile(layer, backend="eager", fullgraph=True)(x), wanted(layer, x), atol=1e-5)
        with torch.autograd.forward_ad.dual_level():
            y = layer(torch.autograd.forward_ad.make_dual(torch.zeros_like(x), x))
            assert torch.allclose(torch.autograd.forward_ad.unpack_dual(y).tangent, wanted(layer, x), atol=1e-5)
        assert all(each is None for each in served[2:])
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert layer(mode.from_tensor(x)).shape == (BATCH, layer.out_features)
        assert served[-1] is None
        layer.weights[0] = nn.Parameter(layer.weights[0].data.as_subclass(Named))
        check(layer, x)
        assert served[-1] is None
    assert layer(x).requires_grad
    assert served[-1] is None


def test_hooks_run(served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    layer.register_forward_pre_hook(lambda _, given: (2 * given[0],))
    layer.register_forward_hook(lambda _, __, y: y + 1)
    with torch.no_grad():
        assert torch.allclose(layer(x), wanted(layer, 2 * x) + 1, atol=1e-5)
    assert served[-1] is not None


def test_weights_that_do_not_fit_are_refused_at_each_call(served: list[Any]) -> None:
    """Though a layer with such weights has a prepared call for this x."""
    layer, other = layer_of([(2, 8, 16, 1)], bias=False), layer_of([(1, 8, 32, 1)], bias=False)
    x = warmed(layer, served)
    warmed(other, served)
    for wrong in (torch.randn(1, 8, 32, 1), torch.randn(2, 8, 16, 1, dtype=torch.float64)):
        layer.weights[0].data = wrong
        with torch.no_grad():
            for _ in range(3):
                with pytest.raises(RuntimeError):  # the base of errors of launches
                    layer(x)


def test_factors_of_equal_shapes_keep_their_order(served: list[Any]) -> None:
    """Pruning for good registers the first factor's parameter again, behind the others."""
    layer = layer_of([(1, 16, 16, 1)] * 2)
    x = warmed(layer, served)
    _pruned_for_good(layer)
    check(layer, x)
    assert served[-1] is not None


def test_a_frozen_layer_reports_a_write(served: list[Any]) -> None:
    """Though an equal layer that is not frozen has a prepared call for this x."""
    layer, other = layer_of().freeze(), layer_of()
    x = warmed(other, served)
    for _ in range(2):
        check(layer, x)
    with torch.no_grad():
        layer.weights[0].mul_(2)
        with pytest.warns(UserWarning, match="frozen no more"):
            layer(x)
    check(layer, x)


class Thrice(nn.Module):
    def __init__(self, layer: KSLinear) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.layer(x) + self.layer(x)


def test_what_watches_operators_sees_them(served: list[Any]) -> None:
    """Traces, modes and transforms, also where x and the weights are plain."""
    layer = layer_of(bias=False)
    x = warmed(layer, served)
    with torch.no_grad():
        traced = torch.jit.trace(Thrice(layer), (x,), check_trace=False)
        other = x_of(layer)
        assert torch.allclose(traced(other), 3 * wanted(layer, other), atol=1e-4)
        with FlopCounterMode(display=False) as counter:
            layer(x)
        assert counter.get_total_flops() == 2 * BATCH * sum(each.numel() for each in layer.weights)
        assert vmap(lambda each: layer(x) + each)(torch.zeros(2, BATCH, layer.out_features)).shape[0] == 2
    assert all(each is None for each in served[2:])


def test_several_threads_at_once(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """Each thread packs into memory of its own."""
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "in turn" if "in turn" in ways else "ksgen")
    layer = layer_of()
    warmed(layer, served)
    xs = [x_of(layer) for _ in range(4)]
    with torch.no_grad():
        expected = [layer(x).clone() for x in xs]
    assert not wrong_in_threads(layer, xs, expected, 200)


def test_memory_that_a_thread_keeps_is_bounded(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "in turn" if "in turn" in ways else "ksgen")
    monkeypatch.setattr(launches, "KEPT_BYTES", 1)
    monkeypatch.setattr(launches._scratch, "memory", None, raising=False)
    layer = layer_of()
    warmed(layer, served)
    assert launches._scratch.memory is None


def test_no_tensor_is_kept(served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    del served[:]
    addresses = {each.data_ptr() for each in (x, *layer.parameters())}
    del x, layer
    gc.collect()
    tensors = [
        each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and torch._C._has_storage(each)
    ]
    assert not addresses & {each.data_ptr() for each in tensors}


def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    monkeypatch.setattr(prepared.choice, "REMEMBERED", 3)
    layer = layer_of()
    for batch in range(1, 8):
        x = torch.randn(batch, layer.in_features)
        for _ in range(2):
            check(layer, x)
        assert len(prepared._calls) <= 3


def test_the_layer_tells_what_was_timed(served: list[Any]) -> None:
    layer = layer_of(activation="silu")
    warmed(layer, served)
    assert "without gradients: " in layer.explain(batch=BATCH)


def test_bits_do_not_depend_on_what_was_called_before(served: list[Any]) -> None:
    layer = layer_of()
    x = warmed(layer, served)
    with torch.no_grad():
        first = layer(x).clone()
        layer(x * np.nan)
        assert torch.equal(layer(x), first)
