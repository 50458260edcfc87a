"""Tests of intermediates while gradients are recorded: stored or recomputed, with equal gradients, counted in bytes."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.errors import SpecError  # noqa: E402  (after the skip)
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators.backends import between, is_recomputed  # noqa: E402
from tests.support.torch_cases import use_kernels  # noqa: E402

WIDE = [(2, 12, 4, 3), (1, 5, 24, 3)]  # 24 -> 72 -> 15
NARROW = [(1, 4, 24, 1), (1, 15, 4, 1)]  # 24 -> 4 -> 15
BATCH = 32


def layer_of(chain: list[tuple[int, ...]], intermediates: str, **options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(chain, intermediates=intermediates, **options)


def x_of(dtype: Any = torch.float32) -> Any:
    return (
        torch.randn(BATCH, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        .to(dtype)
        .requires_grad_()
    )


def saved_values(layer: KSLinear, x: Any) -> int:
    """Count the values per row of the batch that a forward pass stores, without parameters."""
    own, found = {each.data_ptr() for each in layer.parameters()}, {}

    def keep(tensor: Any) -> Any:
        if tensor.data_ptr() not in own:
            found[tensor.data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda each: each):
        y = layer(x)
    assert y.requires_grad
    return sum(found.values()) // BATCH


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("chain", "activation", "intermediates", "values"),
    [
        (WIDE, "none", "keep", 24 + 72),
        (WIDE, "none", "recompute", 24),
        (WIDE, "none", "auto", 24),
        (WIDE, "gelu", "keep", 24 + 72 + 15),
        (WIDE, "gelu", "recompute", 24),
        (NARROW, "none", "auto", 24 + 4),
        (NARROW, "none", "recompute", 24),
        (WIDE[:1], "none", "recompute", 24),
    ],
)
def test_what_is_kept_counted(
    monkeypatch: pytest.MonkeyPatch, chain: list[Any], activation: str, intermediates: str, values: int
) -> None:
    use_kernels(monkeypatch)
    layer = layer_of(chain, intermediates, activation=activation, backend="ksgen")
    assert saved_values(layer, x_of()) == values
    if is_recomputed(intermediates, layer.chain, ("none", activation)):  # with any backend
        assert saved_values(layer_of(chain, intermediates, activation=activation, backend="bmm"), x_of()) == values


def test_an_activation_between_factors_keeps_what_it_is_applied_to(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    kept = between(Chain(tuple(Pattern(*each) for each in WIDE)), ("gelu", "none"))
    assert saved_values(layer_of(WIDE, "keep", between="gelu", backend="ksgen"), x_of()) == 24 + kept == 24 + 2 * 72
    assert saved_values(layer_of(WIDE, "auto", between="gelu", backend="ksgen"), x_of()) == 24


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["auto", "ksgen", "einsum"])
def test_gradients_are_the_same_of_any_order(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    use_kernels(monkeypatch)
    found = []
    for intermediates in ("keep", "recompute"):
        layer, x = (
            layer_of(WIDE, intermediates, activation="gelu", backend=backend, dtype=torch.float64),
            x_of(torch.float64),
        )
        given = [x, *layer.parameters()]
        first = torch.autograd.grad(layer(x).square().sum(), given, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(each.square().sum() for each in first), given)])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)


def test_under_autocast_and_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    found = []
    for intermediates in ("keep", "recompute"):
        layer, x = layer_of(WIDE, intermediates, backend="ksgen"), x_of()
        for call in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
            with torch.autocast("cpu", torch.bfloat16):
                y = call(x)
            found.append([y, *torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])])
    for others in found[1:]:
        for one, other in zip(found[0], others, strict=True):
            torch.testing.assert_close(one, other)


def test_transforms_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.func has no checkpoints, nor need values without gradients any."""
    use_kernels(monkeypatch)
    layer, x = layer_of(WIDE, "recompute"), x_of()
    found = torch.func.grad(lambda x: layer(x).square().sum())(x)
    torch.testing.assert_close(found, torch.autograd.grad(layer(x).square().sum(), x)[0])
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_the_choice_is_a_word_that_is_shown_and_saved() -> None:
    with pytest.raises(SpecError, match="intermediates='again'; accepted: keep, recompute, auto"):
        KSLinear(WIDE, intermediates="again")
    assert "intermediates=auto" in repr(layer_of(WIDE, "auto"))
    assert "intermediates" not in repr(layer_of(WIDE, "keep"))
    told = layer_of(WIDE, "auto").explain(1000).splitlines()[-1]
    assert (
        told == "in training, intermediates (0.288 MB at batch 1000) are computed again in the backward pass: "
        "intermediates=auto"
    )
    assert "are kept for the backward pass" in layer_of(NARROW, "auto").explain(8)
    assert between(Chain((Pattern(1, 15, 24, 1),)), ("none", "none")) == 0
