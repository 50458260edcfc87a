"""Prepared training steps: the outputs and gradients of the usual way, and the usual way wherever something is not as
it was.
"""

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from ksgen.errors import KsgenError  # noqa: E402
from ksgen.pattern import Pattern  # noqa: E402
from ksgen.spec import LAYOUTS  # noqa: E402
from ksgen.torch import KSLinear, freeze, multiply  # noqa: E402
from ksgen.torch.operators import choice, trained  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402
from tests.support.torch_cases import wrong_in_threads  # noqa: E402

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.device("cpu")), reason="prepared steps are for kernels on the processor"
)
FACTORS = [(1, 8, 6, 2), (2, 6, 8, 1)]
BATCH = 5


class _Doubled(torch.nn.Module):
    repeats = True  # as `Tied` says

    def forward(self, values: Tensor) -> Tensor:
        return 2 * values


class Clock:
    """What a clock would have found: the fastest way, and the ways that were asked for."""

    fastest = "bmm"
    asked: list[str]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()

    def faster(job: Any, ways: Any) -> str:
        found.asked = list(ways)
        for run in ways.values():
            run()
        return found.fastest if found.fastest in ways else "each"

    monkeypatch.setenv("KSGEN_COMPILE", "wait")
    monkeypatch.setattr(trained, "faster", faster)
    monkeypatch.setattr(trained, "_steps", {})
    return found


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A word for each call that goes the usual way, but of a `copy_of` a layer."""
    calls: list[str] = []
    own = trained.multiply

    def noted(layer: Any, *given: Any) -> Tensor | None:
        y = own(layer, *given)
        if y is None and layer.backend != "einsum":
            calls.append("usual")
        return y

    monkeypatch.setattr(trained, "multiply", noted)
    return calls


def x_of(layer: Any, *more: int) -> Any:
    shape = (*more, BATCH, layer.in_features) if layer.layout == "bsf" else (layer.in_features, *more, BATCH)
    return torch.randn(shape)


def copy_of(layer: Any) -> Any:
    """The same layer by PyTorch's products."""
    options = {name: getattr(layer, name) for name in ("layout", "activation", "between")}
    return KSLinear.from_weights(list(layer.weights), layer.bias, patterns=layer.chain, backend="einsum", **options)


def gradients(layer: Any, x: Tensor, upstream: Tensor, **options: Any) -> list[Tensor]:
    wanted = [*layer.parameters(), *([x] if x.requires_grad else [])]
    return list(torch.autograd.grad(layer(x), wanted, upstream, **options))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"between": "silu", "activation": "gelu"}])
@pytest.mark.parametrize("fastest", ["bmm", "ksgen"])
@pytest.mark.parametrize(
    "patterns",
    [
        [Pattern(2, 6, 4, 1, "k1:2.i.k2:3", "l.i"), Pattern(2, 5, 6, 1, "k.i")],
        [Pattern(4, 6, 4, 1, "k1:2.i.k2"), Pattern(2, 4, 12, 1, "k1:2.i.k2"), Pattern(1, 5, 4, 2)],
        [Pattern(2, 3, 4, 2, "j.k.i", "j.i.l")],
    ],
)
def test_exchanged_features(
    patterns: list[Pattern], fastest: str, layout: str, options: dict[str, Any], usual: list[str], clock: Clock
) -> None:
    """One call of kernels exchanges them, or PyTorch's products. A layer of equal shapes has steps of its own."""
    clock.fastest, only_last = fastest, {"activation": "gelu"} if options else {}
    options = options if len(patterns) > 1 else only_last
    layer = KSLinear(patterns, layout=layout, **options)
    plain = KSLinear([each.shape for each in patterns], layout=layout)
    x, copy = x_of(layer).requires_grad_(), copy_of(layer)
    for number in range(3):
        y = layer(x)
        assert number != 1 or clock.asked == ["each", "bmm", *([] if options else ["ksgen"])]
        plain(x)
        torch.testing.assert_close(y, copy(x))
        upstream = torch.randn_like(y)
        expected = gradients(copy, x, upstream)
        for again in ({}, {"create_graph": True}):  # the second one takes PyTorch's operators
            torch.testing.assert_close(gradients(layer, x, upstream, **again), expected)
    assert (len(usual) == 2) == (fastest == "bmm" or not options)  # the first call of each layer


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("patterns", "by_launch"), [(FACTORS, True), ([Pattern(2, 6, 4, 1), Pattern(2, 5, 6, 1, "k.i")], False)]
)
def test_the_launches_sum_the_bias_unless_they_read_another_order(
    patterns: Any, by_launch: bool, layout: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.fastest, summed, own = "ksgen", [], Tensor.sum
    layer = KSLinear(patterns, layout=layout)
    x, copy = x_of(layer).requires_grad_(), copy_of(layer)
    for _ in range(2):
        y = layer(x)
    upstream = torch.randn_like(y)
    expected = gradients(copy, x, upstream)
    monkeypatch.setattr(Tensor, "sum", lambda *given: summed.append(1) or own(*given))
    torch.testing.assert_close(gradients(layer, x, upstream), expected)
    assert len(summed) == (0 if by_launch else 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fastest", ["bmm", "ksgen"])
@pytest.mark.parametrize(
    ("options", "wants_x", "more"),
    [
        ({}, True, ()),
        ({}, False, ()),
        ({"between": "relu", "activation": "gelu"}, False, (2,)),
        ({"bias": False}, True, (1, 2)),
    ],
)
def test_the_same_outputs_and_gradients(
    layout: str,
    options: dict[str, Any],
    wants_x: bool,
    more: tuple[int, ...],
    fastest: str,
    usual: list[str],
    clock: Clock,
) -> None:
    clock.fastest = fastest
    layer = KSLinear(FACTORS, layout=layout, **options)
    x, copy = x_of(layer, *more).requires_grad_(wants_x), copy_of(layer)
    for _ in range(2):
        y, wanted = layer(x), copy(x)
        assert y.shape == wanted.shape
        assert y.is_contiguous()
        torch.testing.assert_close(y, wanted)
        upstream = torch.randn_like(y)
        for one, other in zip(gradients(layer, x, upstream), gradients(copy, x, upstream), strict=True):
            torch.testing.assert_close(one, other)
    has_kernels = "between" not in options
    assert ("ksgen" in clock.asked) == has_kernels
    assert len(usual) == (1 if has_kernels or fastest == "bmm" else 4)


def test_a_step_whose_x_takes_no_gradient_serves_no_x_that_does(clock: Clock) -> None:
    clock.fastest = "ksgen"
    layer = KSLinear(FACTORS)
    copy, upstream = copy_of(layer), torch.randn(BATCH, layer.out_features)
    for wants_x in (False, False, True, True):
        x = x_of(layer).requires_grad_(wants_x)
        for one, other in zip(gradients(layer, x, upstream), gradients(copy, x, upstream), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", [[(1, 8, 6, 2)], FACTORS, [(1, 6, 4, 20), (1, 4, 6, 20), (2, 3, 40, 1)]])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_factor_is_packed_as_its_adjoint(chain: Any, layout: str, clock: Clock) -> None:
    """Tiles along the outputs with short and long j, and along the batch."""
    clock.fastest = "ksgen"
    for dtype, batch in ((torch.float32, 1), (torch.float32, 40), (torch.bfloat16, 40)):
        layer = KSLinear(chain, layout=layout, dtype=dtype)
        copy = copy_of(layer)
        x = torch.randn((batch, layer.in_features) if layout == "bsf" else (layer.in_features, batch)).to(dtype)
        x.requires_grad_()
        for _ in range(2):
            upstream = torch.randn_like(layer(x))
            for one, other in zip(gradients(layer, x, upstream), gradients(copy, x, upstream), strict=True):
                scale = float(other.detach().double().norm())
                assert (
                    float((one - other).detach().double().norm()) < (0.03 if dtype == torch.bfloat16 else 1e-5) * scale
                )
        assert "ksgen" in clock.asked


def prepared_step(clock: Clock, **options: Any) -> tuple[Any, Any]:
    """A layer with a prepared step for x, and x."""
    clock.fastest = "ksgen"
    layer = KSLinear(FACTORS, **options)
    x = x_of(layer).requires_grad_()
    for _ in range(2):
        y = layer(x)
    assert "TrainedProduct" in type(y.grad_fn).__name__
    return layer, x


def test_gradients_are_differentiated_again(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    copy, upstream = copy_of(layer), torch.randn(BATCH, layer.out_features, requires_grad=True)
    both = []
    for each in (layer, copy):
        first = gradients(each, x, upstream, create_graph=True)
        total = sum((one**2).sum() for one in first)
        both.append(torch.autograd.grad(total, [upstream, x, *each.weights]))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)


def test_recorded_gradients_count_each_use_once(clock: Clock) -> None:
    """Two factors share a parameter with a hook, and x depends on it."""
    clock.fastest, found = "ksgen", []
    x = torch.randn(BATCH, 16)
    for backend in ("auto", "einsum"):
        torch.manual_seed(0)
        layer: Any = KSLinear([(2, 4, 4, 2)] * 2, backend=backend)
        layer.weights[1] = layer.weights[0]
        layer.weights[0].register_hook(lambda gradient: 2 * gradient)
        for _ in range(2):
            y = layer(layer(x))
        first = torch.autograd.grad(y.square().sum(), list(layer.parameters()), create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), list(layer.parameters()))
        assert backend == "einsum" or "TrainedProduct" in type(y.grad_fn).__name__
        found.append([*first, *second])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_several_gradients_at_once(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    upstream = torch.randn(3, BATCH, layer.out_features)
    found = gradients(layer, x, upstream, is_grads_batched=True)
    for number in range(3):
        for one, other in zip(found, gradients(layer, x, upstream[number]), strict=True):
            torch.testing.assert_close(one[number], other)


def test_upstream_gradients_of_any_kind(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    copy = copy_of(layer)
    for upstream in (torch.ones(1).expand(BATCH, 12), torch.randn(12, BATCH).t(), torch.randn(BATCH, 24)[:, ::2]):
        for one, other in zip(gradients(layer, x, upstream), gradients(copy, x, upstream), strict=True):
            torch.testing.assert_close(one, other)


def test_weights_that_change_before_the_backward_pass_are_refused(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    y = layer(x)
    with torch.no_grad():
        layer.weights[0].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_bias_that_is_written_to_before_the_backward_pass_is_accepted_as_by_a_dense_layer(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    wanted = gradients(layer, x, upstream := torch.randn(BATCH, layer.out_features))
    y = layer(x)
    with torch.no_grad():
        layer.bias.add_(1)
    torch.testing.assert_close(torch.autograd.grad(y, [*layer.parameters(), x], upstream), tuple(wanted))


REPLACED: dict[str, Callable[[Any, Tensor], object]] = {
    "x": lambda layer, x: setattr(x, "data", torch.zeros(1)),
    "weights": lambda layer, x: layer.double(),
}


@pytest.mark.parametrize("name", REPLACED)
def test_memory_that_is_replaced_before_the_backward_pass_is_refused(name: str, clock: Clock) -> None:
    layer, x = prepared_step(clock)
    y = layer(x)
    REPLACED[name](layer, x)
    with pytest.raises(RuntimeError, match=r"shape|dtype|scalar type"):
        y.sum().backward()


def test_memory_with_other_strides_before_the_backward_pass_is_read(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    wanted = gradients(layer, x, upstream := torch.randn(BATCH, layer.out_features))
    y = layer(x)
    for each, axes in ((x, (0, 1)), (layer.weights[0], (1, 2))):
        each.data = each.data.transpose(*axes).contiguous().transpose(*axes)
        assert not each.is_contiguous()
    found = torch.autograd.grad(y, [*layer.parameters(), x], upstream)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fastest", ["bmm", "each"])
@pytest.mark.parametrize("batch", [(), (2, BATCH)])
def test_an_output_that_relu_reads_and_that_changes_is_refused(
    clock: Clock, fastest: str, batch: tuple[int, ...]
) -> None:
    """Otherwise `y += skip` would change the gradient without an error."""
    clock.fastest = fastest
    layer: Any = KSLinear(FACTORS, activation="relu")
    x = torch.randn(*batch, layer.in_features)
    for _ in range(3):
        y = layer(x)
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_weights_are_read_at_each_step(clock: Clock) -> None:
    """Writes through NumPy or `data` are not counted."""
    layer, x = prepared_step(clock)
    for write in (lambda each: each.data.mul_(2), lambda each: each.detach().numpy().__imul__(2)):
        for each in layer.weights:
            write(each)
        upstream = torch.randn(BATCH, layer.out_features)
        for one, other in zip(gradients(layer, x, upstream), gradients(copy_of(layer), x, upstream), strict=True):
            torch.testing.assert_close(one, other)


def test_another_number_of_threads_in_the_backward_pass(clock: Clock) -> None:
    layer, x = prepared_step(clock)
    y, threads = layer(x), torch.get_num_threads()
    wanted = torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y), retain_graph=True)
    torch.set_num_threads(threads + 1)
    try:
        found = torch.autograd.grad(y, list(layer.parameters()), torch.ones_like(y))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_several_threads_at_once(clock: Clock) -> None:
    layer, _ = prepared_step(clock)

    def step(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return gradients(layer, x.detach().requires_grad_(), torch.ones(BATCH, layer.out_features))[0]

    xs = [x_of(layer) for _ in range(4)]
    assert not wrong_in_threads(step, xs, [step(x) for x in xs], 100)


def test_equal_layers_share_a_step_and_no_weights(clock: Clock, usual: list[str]) -> None:
    layer, x = prepared_step(clock)
    other = KSLinear(FACTORS)
    upstream = torch.randn(BATCH, layer.out_features)
    usual.clear()
    for one, wanted in zip(gradients(other, x, upstream), gradients(copy_of(other), x, upstream), strict=True):
        torch.testing.assert_close(one, wanted)
    assert not usual


def _checkpointed(layer: Any, x: Tensor) -> Tensor:
    y: Tensor = checkpoint(layer, x, use_reentrant=False)
    return y


def _in_sixteen_bits(layer: Any, x: Tensor) -> None:
    with torch.autocast("cpu", torch.bfloat16):
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
    torch.testing.assert_close(layer(x), wanted)


def _with_a_bias_that_is_made(layer: Any, x: Tensor) -> None:
    parametrize.register_parametrization(layer, "bias", _Doubled())
    torch.testing.assert_close(layer(x), multiply(multiply(x, layer.weights[0]), layer.weights[1], layer.bias))


CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "another batch": lambda layer, x: layer(x[1:]),
    "a residual": lambda layer, x: layer(x, torch.ones(BATCH, layer.out_features)),
    "a checkpoint": _checkpointed,
    "autocast": _in_sixteen_bits,
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
def test_what_is_not_plain_takes_the_usual_path(name: str, usual: list[str]) -> None:
    layer = KSLinear(FACTORS)
    x = x_of(layer)
    layer(x), layer(x)
    assert usual == ["usual"]
    CALLS[name](layer, x)
    assert len(usual) > 1


@pytest.mark.parametrize("fastest", ["bmm", "ksgen"])
def test_weights_that_a_parametrization_repeats(fastest: str, usual: list[str], clock: Clock) -> None:
    clock.fastest = fastest
    layer = KSLinear(FACTORS)
    parametrize.register_parametrization(layer.weights, "0", _Doubled())
    x, own = x_of(layer), layer.weights.parametrizations["0"].original
    for _ in range(3):
        plain = own.detach().clone().requires_grad_()
        truth = multiply(multiply(x, 2 * plain), layer.weights[1], layer.bias)
        found = torch.autograd.grad(y := layer(x), own, torch.ones_like(truth))
        torch.testing.assert_close(y, truth)
        torch.testing.assert_close(found, torch.autograd.grad(truth, plain, torch.ones_like(truth)))
        with torch.no_grad():
            own.mul_(1.5)
    assert usual == ["usual"]


def test_where_the_usual_path_was_faster_it_serves(clock: Clock, usual: list[str]) -> None:
    clock.fastest = "each"
    layer = KSLinear(FACTORS)
    for _ in range(3):
        layer(x_of(layer))
    assert len(usual) == 3


def test_intermediates_that_are_computed_again_are_not_stored(usual: list[str]) -> None:
    layer = KSLinear(FACTORS, intermediates="recompute")
    for _ in range(3):
        layer(x_of(layer))
    assert len(usual) == 3


def test_steps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "REMEMBERED", 3)
    layer = KSLinear(FACTORS)
    for batch in range(1, 8):
        for _ in range(2):
            layer(torch.randn(batch, layer.in_features))
        assert len(trained._steps) <= 3


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
def test_explain_says_what_was_timed(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trained, "faster", choice.faster)
    layer = KSLinear(FACTORS, layout=layout)
    assert "training step" not in layer.explain(BATCH)
    for _ in range(2):
        layer(x_of(layer))
    line = next(each for each in layer.explain(BATCH).splitlines() if each.startswith("training step, x without"))
    for words in ("one call forward and one backward", "bmm for every factor", "each factor by its fastest method"):
        assert f"{words} " in line
