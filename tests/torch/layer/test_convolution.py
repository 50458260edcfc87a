"""`KSConv1x1` computes what `nn.Conv2d` computes with the same matrix."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.libraries import library

torch = library("torch")

from torch import Tensor, nn  # noqa: E402  (after the skip)
from torch.nn.utils import prune  # noqa: E402

from ksgen.errors import LaunchError  # noqa: E402
from ksgen.torch import KSConv1x1, KSLinear, freeze  # noqa: E402

CHAINS = ["2,3,4,1", "1,3,2,4", "2,3,4,1@k.i.j", ["1,4,4,2", "2,6,4,1"]]
FORMATS = {"bsl": torch.contiguous_format, "bsf": torch.channels_last}


def images(count: int, layout: str = "bsl", dtype: Any = torch.float64) -> Tensor:
    torch.manual_seed(count)
    found: Tensor = torch.randn(count, 8, 3, 5, dtype=dtype).contiguous(memory_format=FORMATS[layout])
    return found


def gradients(layer: Callable[[Tensor], Tensor], x: Tensor, others: Any) -> list[Tensor]:
    x = x.detach().clone().requires_grad_()
    found: list[Tensor] = torch.autograd.grad((layer(x) ** 2).sum(), [x, *others])
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("layout", ["bsl", "bsf"])
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_results_and_gradients_are_those_of_a_dense_convolution(chain: Any, layout: Any, count: int) -> None:
    layer = KSConv1x1(chain, layout=layout, dtype=torch.float64)
    conv, x = layer.to_conv(), images(count, layout)
    expected = conv(x)
    for each in (layer(x), layer.eval()(x), freeze(layer) and layer(x)):
        torch.testing.assert_close(each, expected)
        assert each.is_contiguous(memory_format=FORMATS[layout])
    with torch.no_grad():
        for _ in range(3):  # the usual path, and prepared calls
            torch.testing.assert_close(layer(x), expected)
    layer.train()
    for _ in range(3):
        found = gradients(layer, x, layer.parameters())
        of_x, of_weight, of_bias = gradients(conv, x, (conv.weight, conv.bias))
        torch.testing.assert_close(found[0], of_x)
        by_name = dict(zip((name for name, _ in layer.named_parameters()), found[1:], strict=True))
        torch.testing.assert_close(by_name["linear.bias"], of_bias)
        factors = [each for name, each in layer.named_parameters() if "weights" in name]
        dense = torch.autograd.grad(layer.linear.to_dense(), factors, of_weight[:, :, 0, 0])
        torch.testing.assert_close([each for name, each in by_name.items() if "weights" in name], list(dense))


def test_one_image_is_multiplied_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[int]()
    monkeypatch.setattr(KSLinear, "forward", lambda self, rows, _: given.append(rows.data_ptr()) or rows)
    for layout, count in (("bsl", 1), ("bsf", 1), ("bsf", 3)):
        x = images(count, layout)
        assert KSConv1x1("2,4,4,1", layout=layout)(x).data_ptr() == given[-1] == x.data_ptr()


@pytest.mark.parametrize("layout", ["bsl", "bsf"])
def test_single_images_residuals_and_activations(layout: Any) -> None:
    layer = KSConv1x1("1,3,2,4", layout=layout, activation="relu", dtype=torch.float64).requires_grad_(False)
    x = images(2)
    residual = torch.randn(2, 12, 3, 5, dtype=torch.float64)
    assert layer(x).min() == 0
    torch.testing.assert_close(layer(x, residual), layer(x) + residual)
    torch.testing.assert_close(layer(x[0], residual[0]), layer(x, residual)[0])
    assert layer(x[:0]).shape == (0, 12, 3, 5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shuffle", [False, True])
def test_groups_and_their_shuffle_are_copied_exactly(shuffle: bool, bias: bool) -> None:
    conv = nn.Conv2d(8, 12, 1, groups=2, bias=bias, dtype=torch.float64)
    steps = nn.Sequential(conv, nn.ChannelShuffle(2)) if shuffle else conv
    layer, x = KSConv1x1.from_conv(conv, shuffle=shuffle), images(3)
    assert sum(map(Tensor.numel, layer.parameters())) == sum(map(Tensor.numel, conv.parameters()))
    torch.testing.assert_close(layer(x), steps(x))


def test_from_conv_is_the_projection_of_the_matrix() -> None:
    conv, chain = nn.Conv2d(8, 8, 1, groups=2), ["1,4,4,2", "2,4,4,1"]
    layer = KSConv1x1.from_conv(conv, chain, layout="bsf", activation="silu")
    linear = nn.Linear(8, 8)
    linear.weight.data = torch.block_diag(*conv.weight[:, :, 0, 0].detach().view(2, 4, 4))
    linear.bias = conv.bias
    expected = KSLinear.from_linear(linear, chain)
    torch.testing.assert_close(layer.linear.to_dense(), expected.to_dense())
    assert (layer.linear.layout, layer.linear.activation, layer.linear.bias is conv.bias) == ("bsf", "silu", False)


def test_from_conv_keeps_the_mode_of_training() -> None:
    for is_training in (True, False):
        conv = nn.Conv2d(8, 6, 1, groups=2).train(is_training)
        assert KSConv1x1.from_conv(conv).training == KSConv1x1.from_conv(conv).linear.training == is_training
        assert KSConv1x1.from_conv(nn.Conv2d(8, 6, 1).train(is_training), "2,3,4,1").linear.training == is_training


def test_state_and_copies() -> None:
    layer, other = KSConv1x1("2,3,4,1"), KSConv1x1("2,3,4,1", layout="bsf")
    assert list(layer.state_dict()) == ["linear.bias", "linear.weights.0"]
    other.load_state_dict(layer.state_dict())
    x = images(2, dtype=torch.float32)
    torch.testing.assert_close(other(x), layer(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), layer(x))
    assert (layer.in_channels, layer.out_channels) == (8, 6)


@pytest.mark.parametrize("layout", ["bsl", "bsf"])
def test_images_under_vmap(layout: Any) -> None:
    layer, x = KSConv1x1("2,3,4,1", layout=layout, dtype=torch.float64), images(6, layout)
    several = x.view(3, 2, *x.shape[1:])
    torch.testing.assert_close(torch.func.vmap(layer)(several).flatten(0, 1), layer(x))


def test_weights_stay_row_major_where_a_model_takes_channels_last() -> None:
    layer = KSConv1x1("1,3,2,4", layout="bsf")
    model = nn.Sequential(nn.Conv2d(3, 8, 3), layer, layer.linear.quantize("int8"))
    model.to(memory_format=torch.channels_last)
    assert not model[0].weight.is_contiguous()
    assert all(each.is_contiguous() for part in model[1:] for each in (*part.parameters(), *part.buffers()))


def test_compiled() -> None:
    layer, x = KSConv1x1("1,3,2,4"), images(3, dtype=torch.float32)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))
    torch.testing.assert_close(compiled(x[:2]), layer(x[:2]))


def test_torch_fx_records_it_as_a_leaf() -> None:
    model, x = nn.Sequential(KSConv1x1("2,3,4,1"), nn.ReLU()), images(3, dtype=torch.float32)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_module", "output"]
    torch.testing.assert_close(traced(x), model(x))


def _set_later() -> object:
    layer = KSConv1x1("2,3,4,1")
    layer.linear.out_layout = "bsf"
    return layer(torch.zeros(1, 8, 2, 2))


LAYER = KSConv1x1("2,3,4,1")
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "channels": (
        lambda: LAYER(torch.zeros(1, 6, 2, 2)),
        "KSConv1x1(2,3,4,1): got x of shape (1, 6, 2, 2); (N, 8, H, W) or (8, H, W) is needed",
    ),
    "residual": (
        lambda: LAYER(torch.zeros(1, 8, 2, 2), torch.zeros(1, 6, 2, 1)),
        "KSConv1x1(2,3,4,1): got residual of shape (1, 6, 2, 1); (1, 6, 2, 2) is needed",
    ),
    "out_layout": (
        lambda: KSConv1x1("2,3,4,1", out_layout="bsf"),
        "KSLinear(2,3,4,1): out_layout='bsf' of a KSConv1x1; accepted: layers without it",
    ),
    "out_layout, later": (
        _set_later,
        "KSLinear(2,3,4,1): out_layout='bsf' of a KSConv1x1; accepted: layers without it",
    ),
    "leaf": (
        lambda: torch.fx.symbolic_trace(LAYER),
        "KSConv1x1 is a leaf for torch.fx; accepted: a model that holds it, such as nn.Sequential(layer)",
    ),
    "no convolution": (
        lambda: KSConv1x1.from_conv(nn.Linear(8, 6)),
        "KSConv1x1.from_conv: got Linear; accepted: an nn.Conv2d",
    ),
    "pruned": (
        lambda: KSConv1x1.from_conv(prune.l1_unstructured(nn.Conv2d(8, 6, 1), "weight", 0.5)),
        "KSConv1x1.from_conv: weight is computed by a hook at each call, such as that of weight_norm or prune; "
        "accepted: a parameter, as after torch.nn.utils.remove_weight_norm or prune.remove",
    ),
    "lazy": (
        lambda: KSConv1x1.from_conv(nn.LazyConv2d(8, 1)),
        "KSConv1x1.from_conv: weight has no values before the first call of its lazy layer; accepted: a model that was "
        "called once",
    ),
    "kernel": (
        lambda: KSConv1x1.from_conv(nn.Conv2d(8, 6, (1, 3))),
        "KSConv1x1.from_conv: kernel_size=(1, 3); accepted: (1, 1)",
    ),
    "stride": (
        lambda: KSConv1x1.from_conv(nn.Conv2d(8, 6, 1, stride=2)),
        "KSConv1x1.from_conv: stride=(2, 2); accepted: (1, 1)",
    ),
    "padding": (
        lambda: KSConv1x1.from_conv(nn.Conv2d(8, 6, 1, padding=1)),
        "KSConv1x1.from_conv: padding=(1, 1); accepted: (0, 0)",
    ),
    "shuffle": (
        lambda: KSConv1x1.from_conv(nn.Conv2d(8, 6, 1), "2,3,4,1", shuffle=True),
        "KSConv1x1.from_conv: shuffle=True with patterns; accepted: patterns=None",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_reported_in_one_line(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(LaunchError, match=f"^{re.escape(message)}$"):
        call()
