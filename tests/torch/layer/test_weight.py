"""The weight of a KSLinear: known without its values, dense where they are asked for, drawn, and refused to be
written.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)

from ksgen.errors import LaunchError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402

CHAIN = [(2, 16, 8, 3), (4, 12, 24, 1)]  # 48 -> 96 -> 48


def make(**options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(CHAIN, **options)


def test_what_is_known_without_the_values(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(dtype=torch.float64)
    monkeypatch.setattr(KSLinear, "to_dense", lambda _: pytest.fail("the values were asked for"))
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
        (48, 48),
        torch.float64,
        "cpu",
        True,
    )
    assert (weight.dim(), weight.size(1), weight.numel(), len(weight), weight.is_floating_point()) == (
        2,
        48,
        48 * 48,
        48,
        True,
    )
    assert weight.data.dtype == torch.float64
    assert (
        repr(weight)
        == "weight of KSLinear(2,16,8,3 then 4,12,24,1), as (48, 48) of torch.float64 on cpu; its values: to_dense()"
    )
    weight.requires_grad_(False)
    assert not any(each.requires_grad for each in layer.weights)
    weight.requires_grad = True
    assert all(each.requires_grad for each in layer.weights)


def test_its_values_are_the_factors_product() -> None:
    layer, x = make(dtype=torch.float64), torch.randn(5, 48, dtype=torch.float64)
    expected = layer(x)
    for y in (nn.functional.linear(x, layer.weight, layer.bias), x @ layer.weight.T + layer.bias):
        torch.testing.assert_close(y, expected)
    gradients = torch.autograd.grad((x @ layer.weight.T).square().sum(), list(layer.weights))
    for one, other in zip(
        gradients, torch.autograd.grad((layer(x) - layer.bias).square().sum(), list(layer.weights)), strict=True
    ):
        torch.testing.assert_close(one, other)
    for apart in (copy.deepcopy(layer.weight), pickle.loads(pickle.dumps(layer.weight)), layer.weight.detach().clone()):
        assert type(apart) is torch.Tensor
        torch.testing.assert_close(apart, layer.to_dense())
    assert layer.weight.to(torch.float16).dtype == torch.float16
    assert torch.empty(48, 48, dtype=torch.float64).copy_(layer.weight).equal(layer.to_dense())


@pytest.mark.parametrize(
    ("draw", "deviation"),
    [
        (lambda weight: nn.init.normal_(weight, 0, 0.05), 0.05),
        (lambda weight: nn.init.uniform_(weight, -0.3, 0.3), 0.3 / 3**0.5),
        (lambda weight: nn.init.trunc_normal_(weight, std=0.02), 0.02),
        (nn.init.xavier_uniform_, (2 / 96) ** 0.5),
        (nn.init.xavier_normal_, (2 / 96) ** 0.5),
        (lambda weight: nn.init.kaiming_uniform_(weight, a=5**0.5), (1 / 3 / 48) ** 0.5),
        (nn.init.kaiming_normal_, (2 / 48) ** 0.5),
        (lambda weight: weight.data.normal_(std=0.1), 0.1),
        (lambda weight: weight.data.uniform_(-1, 1), 1 / 3**0.5),
    ],
    ids=range(9),
)
def test_a_draw_reaches_the_factors(draw: Callable[[Any], Any], deviation: float) -> None:
    """Outputs vary as with a dense weight of that deviation: the mean square of a row of K says how much."""
    layer = make()
    before = [each.clone() for each in layer.weights]
    found = []
    for _ in range(20):
        draw(layer.weight)
        found.append(layer.to_dense().detach().square().sum() / 48 / 48)
    assert float(torch.stack(found).mean().sqrt()) == pytest.approx(deviation, rel=0.05)
    assert not any(each.equal(old) for each, old in zip(layer.weights, before, strict=True))


def erfinv(weight: Any) -> None:
    """Truncate a normal draw as timm does, and PyTorch before 2.13."""
    weight.uniform_(-0.95, 0.95).erfinv_().mul_(0.02)


def scaled(weight: Any) -> None:
    weight.normal_(0, 1)
    weight.zero_()
    weight.mul_(0.02)


@pytest.mark.parametrize(
    "initialize",
    [
        lambda weight: nn.init.trunc_normal_(weight),
        lambda weight: nn.init.trunc_normal_(weight, std=0.02, a=-0.02, b=0.02),
        lambda weight: nn.init.trunc_normal_(weight, a=-0.1, b=0.1),
        lambda weight: nn.init.trunc_normal_(weight, a=0, b=2),
        lambda weight: nn.init.trunc_normal_(weight, 1.0),
        lambda weight: nn.init.sparse_(weight, 0.1),
        nn.init.orthogonal_,
        nn.init.eye_,
        nn.init.ones_,
        erfinv,
        scaled,
        *(
            lambda weight, name=name: getattr(weight, name)()
            for name in ("bernoulli_", "exponential_", "cauchy_", "log_normal_", "random_")
        ),
        lambda weight: weight.geometric_(0.5),
        lambda weight: torch.rand(48, 48, out=weight),
        lambda weight: nn.init.xavier_uniform_(weight.t()),
        lambda weight: [nn.init.xavier_normal_(each) for each in weight.chunk(3)],
        lambda weight: nn.init.kaiming_normal_(weight[:16]),
        lambda weight: weight.detach().view(-1).normal_(),
        lambda weight: weight.normal_()[0].fill_(1),
        lambda weight: torch._foreach_zero_([weight]),
        lambda weight: nn.functional.relu(weight, inplace=True),
        lambda weight: setattr(weight.detach(), "data", torch.zeros(48, 48)),
    ],
)
def test_an_initializer_that_is_refused_changes_nothing(initialize: Callable[[Any], Any]) -> None:
    """The initializers write at once, after drawing the factors, or through a view of the values."""
    layer = make()
    before = [each.clone() for each in layer.weights]
    with pytest.raises(
        LaunchError, match=r"would write to weight, which is the product of the factors in `weights`; accepted: "
    ):
        initialize(layer.weight)
    assert all(each.equal(old) for each, old in zip(layer.weights, before, strict=True))


def test_a_refusal_takes_back_no_other_writes() -> None:
    layer = make()
    weight = layer.weight.normal_()
    with torch.no_grad():
        layer.weights[0].mul_(2)
    before = [each.clone() for each in layer.weights]
    with pytest.raises(LaunchError, match="erfinv_ would write"):
        weight.erfinv_()
    assert all(each.equal(old) for each, old in zip(layer.weights, before, strict=True))


def test_views_of_the_values_are_read_as_tensors() -> None:
    layer, x = make(dtype=torch.float64), torch.randn(5, 48, dtype=torch.float64)
    values, dense = layer.weight.detach(), layer.to_dense().detach()
    assert (
        type(values + 1)
        is type(values.clone())
        is type(copy.deepcopy(values))
        is type(pickle.loads(pickle.dumps(values)))
        is torch.Tensor
    )
    assert values.numpy().tolist() == values.tolist() == dense.tolist()
    torch.testing.assert_close(nn.functional.linear(x, layer.weight[:16]), nn.functional.linear(x, dense[:16]))
    torch.testing.assert_close(torch.func.vmap(lambda row: row @ values.T)(x), x @ dense.T)
    leaf = layer.weight.detach().requires_grad_()
    (x @ leaf.T).sum().backward()
    torch.testing.assert_close(leaf.grad, x.sum(0).expand(48, 48))
    with pytest.raises(ValueError, match="Mode other not supported"):
        nn.init.kaiming_uniform_(layer.weight, mode="other")
    assert layer.to_dense().detach().equal(dense)


@pytest.mark.parametrize("name", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_are_refused(name: str) -> None:
    message = "a hook on weight would be lost, because each use computes it; accepted: hooks on the factors in "
    with pytest.raises(LaunchError, match=message):
        getattr(make().weight, name)(print)


def test_gradients_do_not_flow_from_its_data() -> None:
    layer = make()
    data, dense = layer.weight.data, layer.to_dense().detach()
    assert (data.requires_grad, layer.weight.requires_grad) == (False, True)
    assert not any(each.requires_grad for each in (data.clone(), 2 * data, torch.stack([data])))
    assert data.cpu().numpy().tolist() == dense.tolist()
    data.normal_()
    assert not layer.to_dense().equal(dense)
    with pytest.raises(LaunchError, match="add_ would write to weight"):
        data.add_(1)
    assert layer.to_dense().equal(dense)


@pytest.mark.parametrize("read", [torch.Tensor.numpy, np.asarray])
def test_arrays_of_the_values_are_read_only(read: Callable[[Any], Any]) -> None:
    """A write to them would be lost."""
    layer = make()
    values = read(layer.weight.detach().t())
    np.testing.assert_array_equal(values, layer.to_dense().detach().t().numpy())
    with pytest.raises(ValueError, match="read-only"):
        values[0, 0] = 1


@pytest.mark.parametrize(
    "initialize", [nn.init.zeros_, partial(nn.init.normal_, std=0.0), partial(nn.init.xavier_uniform_, gain=0.0)]
)
def test_zeros_leave_gradients(initialize: Callable[[Any], object]) -> None:
    layer = make(bias=False)
    initialize(layer.weight)
    assert not layer.to_dense().any()
    layer(torch.randn(5, 48)).sum().backward()
    assert layer.weights[-1].grad.any()


def add_to_data(layer: KSLinear) -> None:
    layer.weight.data += 1


def set_parameter(layer: KSLinear) -> None:
    layer.weight = nn.Parameter(torch.zeros(48, 48))


def set_data(layer: KSLinear) -> None:
    layer.weight.data = torch.zeros(48, 48)


def set_an_entry(layer: KSLinear) -> None:
    layer.weight[0, 0] = 1


@pytest.mark.parametrize(
    ("write", "what"),
    [
        (lambda layer: layer.weight.add_(1), "add_"),
        (lambda layer: layer.weight.copy_(torch.zeros(48, 48)), "copy_"),
        (lambda layer: torch.add(layer.weight, 1, out=layer.weight), r"add\(out=...\)"),
        (lambda layer: nn.init.ones_(layer.weight), "a fill with other values than zero"),
        (lambda layer: nn.init.normal_(layer.weight, 1), "a draw around 1"),
        (lambda layer: nn.init.uniform_(layer.weight), "a draw from 0.0 to 1.0"),
        (lambda layer: nn.init.orthogonal_(layer.weight), ""),
        (add_to_data, "add_"),
        (set_data, "__set__"),
        (set_an_entry, "__setitem__"),
    ],
    ids=range(10),
)
def test_other_writes_are_refused_and_change_nothing(write: Callable[[KSLinear], Any], what: str) -> None:
    layer = make()
    before = layer.to_dense()
    with pytest.raises(
        LaunchError, match=rf"KSLinear\(.*\): {what}.* would write to weight, which is the product of the factors"
    ):
        write(layer)
    assert layer.to_dense().equal(before)


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("broadcast", lambda weight: torch.distributed.broadcast(weight, 0)),
        ("broadcast", lambda weight: torch.distributed.broadcast(weight.detach(), 0)),
        ("all_reduce", lambda weight: torch.distributed.all_reduce(weight)),
        ("scatter", lambda weight: torch.distributed.scatter(weight, [torch.zeros(48, 48)])),
        (r"all_?to_?all\w*_", lambda weight: torch.distributed.all_to_all_single(weight, torch.zeros(48, 48))),
    ],
    ids=range(5),
)
@pytest.mark.usefixtures("one_process")
def test_collectives_that_write_are_refused(name: str, write: Callable[[Any], Any]) -> None:
    """The last one is refused below PyTorch's Python functions. In some processes, the values would be lost."""
    layer = make()
    with pytest.raises(LaunchError, match=f"{name} would write to weight, which is the product of the factors"):
        write(layer.weight.data)


@pytest.mark.usefixtures("one_process")
def test_collectives_that_read_get_the_values() -> None:
    layer, found = make(), torch.zeros(48, 48)
    torch.distributed.all_gather([found], layer.weight.data)
    assert found.equal(layer.to_dense())
    found.zero_()
    torch.distributed.gather(layer.weight.data, [found])
    assert found.equal(layer.to_dense())


@pytest.mark.parametrize("write", [set_parameter, lambda layer: setattr(layer, "weight", torch.zeros(48, 48))])
def test_it_cannot_be_set(write: Callable[[KSLinear], Any]) -> None:
    with pytest.raises(
        LaunchError, match=r"weight is the product of the factors in `weights`, and cannot be set; accepted: KSL"
    ):
        write(make())


def test_compilers_see_a_plain_tensor_and_leave_it_out_where_only_its_type_is_read() -> None:
    layer, x = make(), torch.randn(5, 48, dtype=torch.float64)
    graphs: list[Any] = []

    def noted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def product(x: Any) -> Any:
        return layer(x.to(layer.weight.dtype))

    torch._dynamo.reset()
    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), product(x))
    torch._dynamo.reset()
    torch.compile(product, fullgraph=True, backend=noted)(x)
    graphs[0].graph.eliminate_dead_code()
    assert not [node for node in graphs[0].graph.nodes if "diag_embed" in str(node.target)]
