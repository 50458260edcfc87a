"""Small steps of training that PyTorch's products serve at once: the same bits and gradients, and nothing but what
was timed so.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ksgen.errors import KsgenError  # noqa: E402
from ksgen.spec import LAYOUTS  # noqa: E402
from ksgen.torch import KSLinear, freeze, multiply  # noqa: E402
from ksgen.torch.operators import choice, ops, prepared  # noqa: E402
from tests.support.torch_cases import use_kernels  # noqa: E402

FACTORS = [(1, 8, 6, 2), (2, 6, 8, 1)]
BATCH = 5


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """What every way of every step took when it was met: PyTorch's products were the fastest, unless a test says
    otherwise.
    """
    use_kernels(monkeypatch)
    monkeypatch.setattr(ops, "FEW_ENTRIES", 16)
    monkeypatch.setattr(prepared, "_served", {})
    seconds = {"ksgen": 2.0, "bmm": 1.0}
    monkeypatch.setattr(choice, "_measured", {})

    def met(job: Any, ways: Any) -> str:
        found = choice._measured.setdefault(
            (job, torch.get_num_threads()), {way: seconds.get(way, 3.0) for way in ways}
        )
        return min(found, key=found.__getitem__)

    monkeypatch.setattr(choice, "faster", met)
    return seconds


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each call that goes the usual way."""
    calls: list[str] = []
    own = KSLinear._multiply

    def counted(*given: Any) -> Tensor:
        calls.append("usual")
        return own(*given)

    monkeypatch.setattr(KSLinear, "_multiply", counted)
    return calls


def x_of(layer: Any, *more: int) -> Any:
    shape = (*more, BATCH, layer.in_features) if layer.layout == "bsf" else (layer.in_features, *more, BATCH)
    return torch.randn(shape)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("options", "wants_x", "more"),
    [({}, True, ()), ({"between": "relu", "activation": "gelu"}, False, (2,)), ({"bias": False}, True, (1, 2))],
)
def test_the_same_bits_and_gradients(
    layout: str, options: dict[str, Any], wants_x: bool, more: tuple[int, ...], usual: list[str]
) -> None:
    layer = KSLinear(FACTORS, layout=layout, **options)
    x = x_of(layer, *more).requires_grad_(wants_x)
    wanted = [*layer.parameters(), *([x] if wants_x else [])]
    first, second = layer(x), layer(x)
    assert usual == ["usual"]
    assert second.shape == first.shape
    assert second.is_contiguous()
    assert torch.equal(first, second)
    upstream = torch.randn_like(first)
    for one, other in zip(
        torch.autograd.grad(first, wanted, upstream), torch.autograd.grad(second, wanted, upstream), strict=True
    ):
        assert torch.equal(one, other)


def _checkpointed(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=False)
    return y


def _in_sixteen_bits(layer: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        layer(x)


def _valued(layer: Any, x: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def _with_weights_kept(layer: Any, x: Tensor) -> None:
    layer.weights[1].requires_grad_(False)
    layer(x)


def _frozen(layer: Any, x: Tensor) -> None:
    freeze(layer)
    layer(x)


def _recomputed(layer: Any, x: Tensor) -> None:
    layer.intermediates = "recompute"
    layer(x)


def _of_float64(layer: Any, x: Tensor) -> None:
    layer.double()(x.double())


def _given(name: str, value: Any) -> Callable[[Any, Tensor], None]:
    def call(layer: Any, x: Tensor) -> None:
        setattr(layer, name, value)
        layer(x)

    return call


def _pruned(layer: Any, x: Tensor) -> None:
    """Pruning recomputes the weights at each access. The layer multiplies without nine tenths of them."""
    prune.random_unstructured(layer.weights, "0", 0.9)
    wanted = multiply(multiply(x, layer.weights[0]), layer.weights[1], layer.bias)
    assert torch.equal(layer(x), wanted)


class _Doubled(torch.nn.Module):
    def forward(self, bias: Tensor) -> Tensor:
        return 2 * bias


def _with_a_bias_that_is_made(layer: Any, x: Tensor) -> None:
    parametrize.register_parametrization(layer, "bias", _Doubled())
    assert torch.equal(layer(x), multiply(multiply(x, layer.weights[0]), layer.weights[1], layer.bias))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "another batch": lambda layer, x: layer(x[1:]),
    "a residual": lambda layer, x: layer(x, torch.ones(BATCH, layer.out_features)),
    "a checkpoint": _checkpointed,
    "autocast": _in_sixteen_bits,
    "no gradients": _valued,
    "weights that are not trained": _with_weights_kept,
    "frozen": _frozen,
    "computed again": _recomputed,
    "a mapped call": lambda layer, x: torch.func.vmap(layer)(x[None]),
    "pruned": _pruned,
    "a bias that is made": _with_a_bias_that_is_made,
    "another type": _of_float64,
    "another activation": _given("activation", "relu"),
    "another backend": _given("backend", "bmm"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_not_plain_goes_the_usual_way(name: str, usual: list[str]) -> None:
    layer = KSLinear(FACTORS)
    x = x_of(layer)
    layer(x), layer(x)
    assert usual == ["usual"]
    CALLS[name](layer, x)
    assert len(usual) > 1


def test_where_kernels_were_faster_they_serve(timed: dict[str, float], usual: list[str]) -> None:
    timed |= {"ksgen": 1.0, "bmm": 2.0}
    layer = KSLinear(FACTORS)
    for _ in range(3):
        layer(x_of(layer))
    assert len(usual) == 3


def _of_other_features(layer: Any) -> None:
    layer(torch.randn(BATCH, 13))


def _with_other_weights(layer: Any) -> None:
    layer.weights[0] = torch.nn.Parameter(torch.randn(1, 8, 5, 2))
    layer(x_of(layer))


def _with_a_short_bias(layer: Any) -> None:
    layer.bias = torch.nn.Parameter(torch.ones(1))
    layer(x_of(layer))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (_of_other_features, r"got x of shape \(5, 13\)"),
        (_with_other_weights, "multiply by 1,8,5,2: got x of shape"),
        (_with_a_short_bias, r"got bias of shape \(1,\); \(12,\) is needed"),
    ],
)
def test_mistakes_are_reported_as_usual(call: Callable[[Any], None], message: str) -> None:
    layer = KSLinear(FACTORS)
    layer(x_of(layer)), layer(x_of(layer))
    with pytest.raises(KsgenError, match=message):
        call(layer)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_explain_reports_the_times_after_they_were_measured(layout: str, timed: dict[str, float]) -> None:
    layer, said = (
        KSLinear(FACTORS, layout=layout),
        f"training steps at batch {BATCH}: bmm for every factor, the fastest when they were timed",
    )
    assert said not in layer.explain(BATCH)
    layer(x_of(layer))
    assert layer.explain(BATCH).splitlines().count(said) == 1
    assert "training steps" not in layer.explain(17)  # more than a small step
    timed["ksgen"], other = 0.5, KSLinear([(1, 7, 5, 2)], layout=layout)
    other(x_of(other))
    assert "training steps" not in other.explain(BATCH)
