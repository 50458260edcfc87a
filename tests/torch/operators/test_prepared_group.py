"""Prepared calls of groups of frozen layers: the same outputs as of each layer, and the usual way wherever something
is not as it was.
"""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils import prune  # noqa: E402

from ksgen.errors import LaunchError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.layer.group import KSLinears  # noqa: E402
from ksgen.torch.operators import frozen, prepared  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402
from tests.support.torch_cases import BIAS_CHANGES, change_bias, wrong_in_threads  # noqa: E402

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.device("cpu")), reason="prepared calls are for kernels on the processor"
)
CHAINS = ([(3, 5, 4, 2), (1, 7, 10, 3)], [(2, 9, 4, 3)], [(1, 4, 8, 3), (3, 6, 4, 1), (1, 5, 9, 2)])  # 24 -> 21, 54, 10
WAYS = ("ksgen", "in turn", "each")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was prepared for each call of a group, None where the usual way was taken."""
    given: list[Any] = []
    find = KSLinears._prepared
    monkeypatch.setattr(KSLinears, "_prepared", lambda *args: given.append(find(*args)) or given[-1])
    return given


def choose(monkeypatch: pytest.MonkeyPatch, way: str) -> list[set[str]]:
    """Have a group take this way, whatever the clock says. The ways that each group had."""
    met: list[set[str]] = []

    def chosen(job: Any, ways: Any) -> str:
        if job[0][0] != "prepared group":
            return next(iter(ways))
        met.append(set(ways))
        return way

    monkeypatch.setattr(prepared, "faster", chosen)
    return met


def group_of(chains: Any = CHAINS, **options: Any) -> Any:
    torch.manual_seed(0)
    return KSLinear.group([KSLinear(chain, **options).eval() for chain in chains]).freeze()


def x_of(group: Any, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(*((*shape, 24) if group[0].layout == "bsf" else (24, *shape)), dtype=dtype)


def alone(group: Any, x: Any) -> list[Any]:
    """Multiply with PyTorch's own products, in layers that are not frozen."""
    found = []
    with torch.no_grad():
        for each in group:
            options = {name: getattr(each, name) for name in ("layout", "activation", "between")}
            if len(each.weights) == 1:
                options.pop("between")
            found.append(KSLinear.from_weights(list(each.weights), each.bias, backend="einsum", **options)(x))
    return found


def warmed(group: Any, x: Any) -> Any:
    with torch.no_grad():
        for _ in range(2):
            y = group(x)
    return y


def check(group: Any, x: Any, tolerance: float = 1e-5) -> None:
    """Both ways to ask, after the shape was met."""
    wanted, axis = alone(group, x), -1 if group[0].layout == "bsf" else 0
    with torch.no_grad():
        y, parts = group(x), group.parts(x)
    assert y.is_contiguous()
    torch.testing.assert_close(y, torch.cat(wanted, axis), atol=tolerance, rtol=tolerance)
    assert len(parts) == len(wanted)
    for part, other in zip(parts, wanted, strict=True):
        torch.testing.assert_close(part, other, atol=tolerance, rtol=tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_every_variant_is_right(layout: str, way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """Whichever the clock would have chosen."""
    met = choose(monkeypatch, way)
    for bias, activation, shape in (
        (True, "none", (1,)),
        (False, "gelu", (3,)),
        (True, "relu", (2, 40)),
        (True, "silu", (1, 1)),
    ):
        group = group_of(layout=layout, bias=bias, activation=activation)
        x = x_of(group, *shape)
        warmed(group, x)
        check(group, x)
        assert all(served[-2:])
    assert all(ways >= {"in turn", "each"} for ways in met)
    assert met[0] == met[-1] == set(WAYS)  # of one entry, of small weights


@pytest.mark.exhaustive
@pytest.mark.parametrize("fuse", ["yes", "no", "auto"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_and_words_for_fuse(dtype: Any, fuse: str, served: list[Any]) -> None:
    group = group_of(fuse=fuse, backend="ksgen", dtype=dtype)
    x = x_of(group, 20, dtype=dtype)
    warmed(group, x)
    check(group, x, 4e-2 if dtype == torch.bfloat16 else 1e-12)
    assert all(served[-2:])


def test_an_activation_between(served: list[Any]) -> None:
    group = group_of([CHAINS[0], CHAINS[2]], between="relu")
    x = x_of(group, 20)
    warmed(group, x)
    check(group, x)
    assert all(served[-2:])


def test_the_first_call_at_a_shape_takes_the_usual_path(served: list[Any]) -> None:
    group = group_of()
    for batch in (2, 3):
        warmed(group, x_of(group, batch))
    assert [each is None for each in served] == [True, False, True, False]


def test_x_may_be_a_view_of_any_kind(served: list[Any]) -> None:
    group, wide = group_of(), torch.randn(5, 48)
    for x in (wide[:, ::2], wide[:, :24], torch.randn(24, 5).t(), wide[0, ::2]):
        warmed(group, x)
        check(group, x)
        assert served[-1]


def write(group: Any) -> None:
    with torch.no_grad():
        group[1].weights[0].mul_(2)


def replace(group: Any) -> None:
    group[2].weights[1] = nn.Parameter(group[2].weights[1] * 3)


@pytest.mark.parametrize(("change", "told"), [(write, "was written to"), (replace, "was replaced by another tensor")])
def test_a_write_to_the_weights_ends_it(change: Callable[[Any], None], told: str, served: list[Any]) -> None:
    group = group_of()
    x = x_of(group, 20)
    warmed(group, x)
    assert group.is_frozen
    change(group)
    assert not group.is_frozen
    with torch.no_grad(), pytest.warns(UserWarning, match=rf"a KSLinear\(.*\), is frozen no more: weights.\d {told}"):
        group(x)
    check(group, x)
    assert not any(served[-3:])
    group.freeze()
    warmed(group, x)
    check(group, x)
    assert served[-1]


def test_a_layer_that_thaws_takes_the_groups_calls_along(served: list[Any]) -> None:
    """Writes after a thaw are not tracked."""
    group = group_of()
    x = x_of(group, 20)
    warmed(group, x)
    kept = weakref.ref(served[-1][0])
    served.clear()
    group[1].thaw()
    gc.collect()
    assert kept() is None
    group[1].weights[0].data.mul_(2)
    check(group, x)
    assert not any(served)
    group[1].freeze()
    warmed(group, x)
    check(group, x)
    assert served[-1]


def test_freeze_and_thaw_are_of_all_layers() -> None:
    group = group_of()
    assert group.is_frozen
    assert all(layer.is_frozen for layer in group)
    group[0].thaw()
    assert not group.is_frozen
    assert group.freeze() is group
    assert group.thaw() is group
    assert not any(layer.is_frozen for layer in group)
    group.freeze().train()
    assert not group.is_frozen
    nn.utils.parametrize.register_parametrization(group[1].weights, "0", nn.Tanh())
    with pytest.raises(
        LaunchError, match=r"1, a KSLinear\(2,9,4,3\),: its weights are computed at each use.* cannot be frozen"
    ):
        group.freeze()


@pytest.mark.parametrize("way", WAYS)
def test_the_bias_is_read_at_each_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, way)
    group = group_of()
    x = x_of(group, 20)
    warmed(group, x)
    layer = group[1]
    for change in BIAS_CHANGES:
        with torch.no_grad():
            change_bias(layer, change)
        check(group, x)


def test_what_changes_of_a_layer_is_seen(served: list[Any]) -> None:
    group = group_of()
    x = x_of(group, 20)
    warmed(group, x)
    seen: list[Any] = []
    hook = group[1].register_forward_hook(lambda *given: seen.append(given))
    with torch.no_grad():
        group(x)
    assert seen
    assert served[-1] is None
    hook.remove()
    group[1].activation = "relu"
    warmed(group, x)
    check(group, x)
    assert served[-1] is None  # one of its own
    for each in group:
        each.activation = "relu"
    warmed(group, x)
    check(group, x)
    assert served[-1]
    for each in group:
        each.out_layout = "bsl"  # which no group of layers has
    with torch.no_grad(), pytest.raises(LaunchError, match="out_layout='bsl' of a layer of a group"):
        warmed(group, x)
    assert served[-1] is None
    for each in group:
        each.out_layout = None
    group[1] = KSLinear(CHAINS[1], activation="relu").eval().freeze()
    warmed(group, x)
    check(group, x)
    assert served[-1]


def test_layers_that_answer_otherwise_are_asked(served: list[Any]) -> None:
    class Tripled(KSLinear):
        def forward(self, x: Any, residual: Any = None) -> Any:
            return 3 * super().forward(x, residual)

    group = KSLinear.group([Tripled(CHAINS[1]), KSLinear(CHAINS[1])]).eval().freeze()
    x = x_of(group, 20)
    with torch.no_grad():
        first = group(x)
        for _ in range(3):
            torch.testing.assert_close(group(x), first)
        group[0] = KSLinear(CHAINS[1]).eval().freeze()
        warmed(group, x)
        assert served[-1]
        usual, alone = group[1].forward, group(x)
        group[1].forward = lambda x, residual=None: 2 * usual(x, residual)
        torch.testing.assert_close(group(x)[:, 54:], 2 * alone[:, 54:])
        group[0] = nn.Linear(24, 7)  # as adapters stand in a layer's place
        assert group(x).shape == (20, 61)
        assert not group.is_frozen
        assert group.thaw() is group


@pytest.mark.parametrize("grouped", [True, False])
def test_a_mask_on_weights_that_were_frozen_counts(grouped: bool) -> None:
    layers = [KSLinear(CHAINS[1]).eval() for _ in range(2)]
    model: Any = KSLinear.group(layers).freeze() if grouped else layers[0].freeze()
    x = torch.randn(20, 24)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        prune.custom_from_mask(layers[0].weights, "0", torch.zeros_like(layers[0].weights[0]))
        with pytest.warns(UserWarning, match="weights.0 was replaced by another tensor"):
            masked = model(x)
        torch.testing.assert_close(masked[:, :54], layers[0].bias.expand(20, -1))


@pytest.mark.parametrize("way", WAYS)
def test_a_bias_may_repeat_one_number(way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """Other numbers follow it in memory."""
    choose(monkeypatch, way)
    group = group_of(bias=True)
    for layer in group:
        layer.bias = nn.Parameter(torch.arange(1.0, 99)[:1].expand(layer.out_features))
    x = x_of(group, 20)
    warmed(group, x)
    check(group, x)
    assert all(served[-2:])


def test_what_is_not_plain_inference_takes_the_usual_path(served: list[Any]) -> None:
    group = group_of()
    x = x_of(group, 4)
    wanted = warmed(group, x)
    served.clear()
    assert group(x).requires_grad
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert group(x).dtype == torch.bfloat16
    with torch.no_grad():
        compiled = torch.compile(group, backend="eager", fullgraph=True)
        assert torch.allclose(compiled(x), wanted, atol=1e-5)
        for given in (x.double(), x[:, 1:], x.numpy()):
            for _ in range(3):
                with pytest.raises(LaunchError):
                    group(given)
    assert not any(served)
    with torch.inference_mode():
        assert all(torch.allclose(group(x), wanted) for _ in range(3))
    assert served[-1]


@pytest.mark.parametrize("way", WAYS)
def test_several_threads_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, way)
    group = group_of()
    xs = [x_of(group, 64) for _ in range(4)]
    wanted = [warmed(group, x).clone() for x in xs]
    assert not wrong_in_threads(group, xs, wanted, 100)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_call_is_kept(way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """A deleted group and its layers are freed too."""
    choose(monkeypatch, way)
    group = group_of()
    x = x_of(group, 64)
    y = warmed(group, x)
    served.clear()
    found = [weakref.ref(each) for each in (x, y)]
    del x, y
    gc.collect()
    assert [each() for each in found] == [None] * 2
    found = [weakref.ref(each) for each in (group, *group)]
    del group
    gc.collect()
    assert [each() for each in found] == [None] * 4
    assert not frozen._groups


def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_CALLS", 3)
    group = group_of()
    for batch in range(1, 9):
        x = x_of(group, batch)
        warmed(group, x)
        check(group, x)
        assert len(frozen.calls_of_group(group, list(group)) or ()) <= 3


def test_a_group_tells_what_was_timed() -> None:
    group = group_of()
    warmed(group, x_of(group, 64))
    (told,) = [line for line in group.explain(64).splitlines() if line.startswith("all layers, frozen: ")]
    for way in ("one launch", "the launches of each layer by one call", "each layer by its fastest method"):
        assert f"{way} " in told
    other = KSLinear.group([KSLinear([(1, 24, 24, 1)]), KSLinear([(1, 24, 24, 1)])])
    warmed(other.eval().freeze(), x_of(other, 64))
    assert "all layers, frozen: " in other.explain(64)
    assert "all layers" not in KSLinear([(1, 24, 24, 1), (1, 24, 24, 1)]).explain(64)


def test_a_model_of_both_kinds_of_layers() -> None:
    """Code that freezes all layers need not distinguish them. An unseen write counts after `thaw`."""
    group, x = group_of([CHAINS[1]]), torch.randn(4, 24)
    quantized = group[0].quantize("int8")
    model = nn.Sequential(group, quantized)
    for each in model.modules():
        if hasattr(each, "freeze"):
            each.freeze()
    assert all(each.is_frozen for each in model)
    with torch.no_grad():
        quantized(x)
        quantized.values[0].data.zero_()
        assert quantized.thaw() is quantized
        torch.testing.assert_close(quantized(x), quantized.bias.expand(4, -1))
        both = type(group)([group[0], group[0].quantize("int8")]).freeze()
        both(x)
        both[1].values[0].data.zero_()
        torch.testing.assert_close(both.thaw()(x)[:, group[0].out_features :], group[0].bias.expand(4, -1))
