"""Tensor parallelism: split over processes, layers compute what they compute alone, and send what `explain` says."""

import re
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
parallel = pytest.importorskip("torch.distributed.tensor.parallel", reason="PyTorch has no DTensor here")
fsdp = pytest.importorskip("torch.distributed.fsdp", reason="PyTorch has no FSDP here")
if not torch.distributed.is_gloo_available() or not hasattr(fsdp, "fully_shard"):
    pytest.skip("PyTorch has no gloo or no FSDP2 here", allow_module_level=True)

from torch import nn  # noqa: E402  (after the skip)
from torch.distributed import checkpoint  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.debug import CommDebugMode  # noqa: E402
from torch.nn import functional  # noqa: E402

from ksgen import structures  # noqa: E402
from ksgen.errors import LaunchError, PatternError  # noqa: E402
from ksgen.torch import KSLinear, build  # noqa: E402
from ksgen.torch.parallel import (  # noqa: E402
    KSBlockwise,
    KSColwise,
    KSRowwise,
    shard_placement,
)
from tests.support.processes import Processes  # noqa: E402

BLOCKS, LAST, FIRST = [(4, 3, 2, 5), (12, 4, 5, 1)], [(3, 4, 2, 2), (1, 8, 6, 4)], [(1, 6, 8, 3), (3, 2, 6, 1)]
COLUMNS, LINES = [(6, 4, 4, 1), (1, 8, 6, 4), (4, 3, 2, 4)], [(4, 3, 2, 2), (1, 5, 8, 3), (3, 4, 5, 1)]
EPS = 1e-3  # of AdamW: with its own 1e-8, its first steps magnify the rounding of small gradients
COLLECTIVES = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather_into_tensor",
    "reduce-scatter": "reduce_scatter_tensor",
    "all-to-all": "all_gather_into_tensor",  # which gloo lacks: DTensors gather instead on a processor
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    found = Processes(4, tmp_path_factory.mktemp("four"))
    yield found
    found.end()


def compare(
    style: Any, patterns: Any, layout: str, options: dict[str, Any], activation: str = "gelu", bias: bool = True
) -> None:
    """Compare a layer that is split over all processes with the whole layer: values, gradients, and what is sent."""
    torch.manual_seed(0)
    mesh, alone = init_device_mesh("cpu", (4,)), KSLinear(patterns, layout=layout, activation=activation, bias=bias)
    split = parallel.parallelize_module(deepcopy(alone), mesh, style(**options))
    assert all(isinstance(each, DTensor) for each in split.parameters())
    features = Shard(-1 if layout == "bsf" else 0)
    x = torch.randn((8, 4, alone.in_features) if layout == "bsf" else (alone.in_features, 8, 4), requires_grad=True)
    residual = torch.randn_like(alone(x)).requires_grad_()
    y = alone(x, residual)
    dy = torch.randn_like(y)
    y.backward(dy)
    given = options.get("input_layouts", Replicate() if style is KSColwise else features)
    asked = options.get("output_layouts", Replicate() if style is KSRowwise else features)

    def part(whole: Any, placement: Any) -> Any:
        return distribute_tensor(whole.detach(), mesh, [placement]).to_local().clone()

    def local(tensor: Any) -> Any:
        if options.get("use_local_output", True):
            return tensor
        assert (tensor.shape, tensor.placements) == (y.shape, (Shard(asked.dim % 3) if asked.is_shard() else asked,))
        return tensor.to_local()

    own_x, own_residual, own_dy = (
        part(x, given).requires_grad_(),
        part(residual, asked).requires_grad_(),
        part(dy, asked),
    )
    *_, forward, backward = split.explain(32).splitlines()[0].split("; ")
    with CommDebugMode() as sent:
        own_y = local(split(own_x))
    assert counts(sent) == expected_of(forward), (forward, counts(sent))
    with CommDebugMode() as sent:
        own_y.backward(own_dy)
    assert counts(sent) == expected_of(backward), (backward, counts(sent))
    split.zero_grad()
    own_x.grad = None
    own_y = local(split(own_x, own_residual))
    own_y.backward(own_dy)
    torch.testing.assert_close(own_y, part(y, asked))
    torch.testing.assert_close(own_x.grad, part(x.grad, given))
    torch.testing.assert_close(own_residual.grad, part(residual.grad, asked))
    for own, whole in zip(split.parameters(), alone.parameters(), strict=True):
        assert own.grad.placements == own.placements
        torch.testing.assert_close(own.grad.full_tensor(), whole.grad)
    with torch.no_grad():  # from where it lies, x is brought to where the split wants it
        torch.testing.assert_close(local(split(distribute_tensor(x.detach(), mesh, [Shard(1)]))), part(alone(x), asked))
    torch.testing.assert_close(split.to_dense(), alone.to_dense())
    split.activation = alone.activation = "none"
    torch.testing.assert_close(dict(split.to_linear().named_parameters()), dict(alone.to_linear().named_parameters()))


def counts(sent: Any) -> Counter[str]:
    return Counter({str(operator).split(".")[-1]: count for operator, count in sent.get_comm_counts().items()})


def expected_of(told: str) -> Counter[str]:
    return Counter(COLLECTIVES[word] for word in re.findall("|".join(COLLECTIVES), told))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize(
    ("style", "patterns"),
    [(KSBlockwise, BLOCKS), (KSColwise, LAST), (KSColwise, COLUMNS), (KSRowwise, FIRST), (KSRowwise, LINES)],
)
def test_as_in_one_process(four: Processes, style: Any, patterns: Any, layout: str) -> None:
    four.run(compare, style, patterns, layout, {})


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("style", "patterns", "options"),
    [
        (KSBlockwise, BLOCKS, {"input_layouts": Replicate(), "output_layouts": Replicate()}),
        (KSBlockwise, BLOCKS, {"use_local_output": False}),
        (KSColwise, COLUMNS, {"input_layouts": Shard(0), "output_layouts": Shard(1), "use_local_output": False}),
        (KSColwise, LAST, {"input_layouts": Shard(-1), "output_layouts": Replicate()}),
        (KSRowwise, LINES, {"input_layouts": Replicate(), "use_local_output": False}),
        (KSRowwise, FIRST, {"output_layouts": Shard(0), "use_local_output": False}),
        (KSRowwise, LINES, {"input_layouts": Shard(1), "output_layouts": Shard(-1)}),
    ],
)
def test_x_and_y_have_the_requested_placements(
    four: Processes, style: Any, patterns: Any, options: dict[str, Any]
) -> None:
    four.run(compare, style, patterns, "bsf", options)
    four.run(compare, style, patterns, "bsf", options, "none", False)


def compare_in_autocast() -> None:
    """Layers of both kinds give bfloat16 there, bias and residual included."""
    mesh = init_device_mesh("cpu", (4,))
    for style, patterns, given in ((KSColwise, LAST, Replicate()), (KSRowwise, FIRST, Shard(-1))):
        torch.manual_seed(0)
        alone = KSLinear(patterns)
        split, x = (
            parallel.parallelize_module(deepcopy(alone), mesh, style(output_layouts=Replicate())),
            torch.randn(8, alone.in_features),
        )
        residual = torch.randn(8, alone.out_features)
        with torch.autocast("cpu", torch.bfloat16):
            found, expected = split(distribute_tensor(x, mesh, [given]).to_local(), residual), alone(x, residual)
        assert found.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


def test_autocast(four: Processes) -> None:
    four.run(compare_in_autocast)


class Model(nn.Module):
    """Three projections as a group, a dense layer, and two Kronecker-sparse ones around an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = KSLinear.group([KSLinear([(1, 8, 6, 4), (4, 8, 8, 1)]) for _ in range(3)])
        self.mix = nn.Linear(32, 24)
        self.up, self.down = KSLinear(COLUMNS), KSLinear([(4, 2, 12, 1), (1, 6, 4, 2)])

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv.parts(x)
        return self.down(functional.gelu(self.up(self.mix(q * k + v)), approximate="tanh"))


def made() -> Model:
    torch.manual_seed(0)
    return Model()


def split_over(mesh: DeviceMesh) -> Model:
    plan = {"qkv": KSColwise(), "mix": parallel.RowwiseParallel(), "up": KSColwise(), "down": KSRowwise()}
    return parallel.parallelize_module(made(), mesh, plan)


def step(model: nn.Module, optimizer: Any, number: int, rows: slice) -> Any:
    """A step of training with these rows of the batch of that number. Their outputs before it."""
    generator = torch.Generator().manual_seed(number)
    x, wanted = (torch.randn(8, 5, features, generator=generator)[rows] for features in (24, 12))
    y = model(x)
    functional.mse_loss(y, wanted).backward()
    optimizer.step()
    optimizer.zero_grad()
    return y.detach()


def train(is_sharded: bool) -> None:
    """A model that is split over all processes, or over two, and sharded by FSDP2 over the other two: as alone with
    the whole batch.
    """
    mesh, alone, rows = init_device_mesh("cpu", (4,)), made(), slice(None)
    if is_sharded:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        rows = slice(4 * mesh["data"].get_local_rank(), 4 * mesh["data"].get_local_rank() + 4)
        model = split_over(mesh["tensor"])
        for part in (model.up, model.down, model):
            fsdp.fully_shard(part, mesh=mesh["data"])
    else:
        model = split_over(mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), 0.05, eps=EPS) for each in (model, alone)]
    for number in range(3):
        found, expected = (
            step(model, optimizers[0], number, rows),
            step(alone, optimizers[1], number, slice(None))[rows],
        )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for (name, own), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            own.full_tensor(), whole, rtol=1e-4, atol=1e-5, msg=lambda told, name=name: f"{name}: {told}"
        )
    model.eval(), alone.eval()
    x = torch.randn(2, 24, generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        for each in (model, *([] if is_sharded else [deepcopy(model), torch.compile(model, backend="aot_eager")])):
            torch.testing.assert_close(each(x), alone(x), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_model_trains_as_in_one_process(four: Processes, is_sharded: bool) -> None:
    four.run(train, is_sharded)


def save_from_two(folder: str) -> None:
    """The first two processes split a model, train a step, and save it with its optimizer."""
    mesh = DeviceMesh("cpu", [0, 1])
    if mesh.get_coordinate() is not None:
        model = split_over(mesh)
        optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=EPS)
        step(model, optimizer, 0, slice(None))
        checkpoint.save(state_of(model, optimizer), checkpoint_id=folder, process_group=mesh.get_group())
    torch.distributed.barrier()


def over_four(is_sharded: bool) -> tuple[nn.Module, slice]:
    """A model sharded by FSDP2 over all processes, or split among them, and the rows of x that this one takes."""
    if not is_sharded:
        return split_over(init_device_mesh("cpu", (4,))), slice(None)
    model, first = made(), 2 * torch.distributed.get_rank()
    fsdp.fully_shard(model, shard_placement_fn=shard_placement)
    return model, slice(first, first + 2)


def load_into_four(folder: str, is_sharded: bool) -> None:
    """All processes split a model, or shard it by FSDP2, and go on from what one saved."""
    (model, rows), alone = over_four(is_sharded), made()
    optimizer, optimizer_alone = (torch.optim.AdamW(each.parameters(), 0.05, eps=EPS) for each in (model, alone))
    resume(model, optimizer, folder)
    for number in range(2):
        expected = step(alone, optimizer_alone, number, slice(None))[rows]
    found = step(model, optimizer, 1, rows)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own.full_tensor(), whole, rtol=1e-4, atol=1e-5)


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def resume(model: nn.Module, optimizer: Any, folder: str) -> None:
    state = state_of(model, optimizer)
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def test_a_checkpoint_goes_from_two_processes_to_one_to_four(four: Processes, tmp_path: Path) -> None:
    four.run(save_from_two, str(tmp_path / "two"))
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), 0.05, eps=EPS)
    resume(model, optimizer, str(tmp_path / "two"))
    alone = made()
    step(alone, torch.optim.AdamW(alone.parameters(), 0.05, eps=EPS), 0, slice(None))
    for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(own, whole, rtol=1e-4, atol=1e-5)
    checkpoint.save(state_of(model, optimizer), checkpoint_id=str(tmp_path / "one"))
    for is_sharded in (False, True):
        four.run(load_into_four, str(tmp_path / "one"), is_sharded)


def go_on_with_two(folder: str, is_sharded: bool) -> None:
    """Four processes split a model, or shard it by FSDP2, train a step and save it.

    The first two split it among them, and go on.
    """
    (model, rows), alone = over_four(is_sharded), made()
    optimizer, optimizer_alone = (torch.optim.AdamW(each.parameters(), 0.05, eps=EPS) for each in (model, alone))
    step(model, optimizer, 0, rows)
    checkpoint.save(state_of(model, optimizer), checkpoint_id=folder)
    mesh = DeviceMesh("cpu", [0, 1])
    if mesh.get_coordinate() is not None:
        fewer = split_over(mesh)
        optimizer = torch.optim.AdamW(fewer.parameters(), 0.05, eps=EPS)
        state = state_of(fewer, optimizer)
        checkpoint.load(state, checkpoint_id=folder, process_group=mesh.get_group())
        set_state_dict(fewer, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        for number in range(2):
            expected = step(alone, optimizer_alone, number, slice(None))
        torch.testing.assert_close(step(fewer, optimizer, 1, slice(None)), expected, rtol=1e-4, atol=1e-5)
        for own, whole in zip(fewer.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.full_tensor(), whole, rtol=1e-4, atol=1e-5)
    torch.distributed.barrier()


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_checkpoint_goes_from_four_processes_to_two(four: Processes, tmp_path: Path, is_sharded: bool) -> None:
    four.run(go_on_with_two, str(tmp_path / "four"), is_sharded)


def refusals() -> list[str]:
    """Return the message for each mistake."""
    line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    split = parallel.parallelize_module(KSLinear(LAST), line, KSColwise())
    unplain = parallel.parallelize_module(KSLinear(LAST), line, KSColwise())
    unplain.weights[1] = nn.Parameter(torch.zeros(1, 2, 6, 4))
    rows = parallel.parallelize_module(KSLinear(FIRST), line, KSRowwise(output_layouts=Shard(1)))
    sharded = KSLinear(LAST)
    fsdp.fully_shard(sharded, mesh=line)
    tied = KSLinear.from_structure(structures.kronecker(12, 12, 3))
    mistakes = [
        lambda: KSRowwise(output_layouts="whole"),
        lambda: KSRowwise(output_layouts=Partial()),
        lambda: parallel.parallelize_module(nn.Linear(4, 4), line, KSColwise()),
        lambda: parallel.parallelize_module(split, line, KSColwise()),
        lambda: parallel.parallelize_module(sharded, line, KSColwise()),
        lambda: parallel.parallelize_module(KSLinear([(1, 6, 6, 4)]), line, KSColwise()),
        lambda: KSColwise()._apply(KSLinear(LAST), square),
        lambda: split(torch.zeros(3, 13)),
        lambda: parallel.parallelize_module(KSLinear(BLOCKS), line, KSBlockwise())(torch.zeros(3, 40)),
        lambda: split(torch.zeros(())),
        lambda: rows(torch.zeros(4, 6)),
        lambda: parallel.parallelize_module(KSLinear(FIRST), line, KSRowwise())(torch.zeros(4, 6), torch.zeros(4, 3)),
        lambda: unplain(torch.zeros(3, 12)),
        lambda: split.freeze(),
        lambda: parallel.parallelize_module(KSLinear.group([KSLinear(LAST), KSLinear(LAST)]), line, KSColwise())(
            torch.zeros(3, 12)
        ),
        lambda: parallel.parallelize_module(KSLinear(LAST), line, parallel.ColwiseParallel()),
        lambda: parallel.parallelize_module(KSLinear(FIRST, between="relu"), line, KSRowwise()),
        lambda: parallel.parallelize_module(tied, line, KSColwise()),
        lambda: setattr(rows, "between", "relu"),
        lambda: setattr(split, "layout", "bsl"),
        lambda: setattr(split, "out_layout", "bsl"),
        lambda: split.build(4),
        lambda: build(nn.Sequential(sharded), torch.zeros(3, 12)),
    ]
    split.between, split.activation, split.out_layout, rows.layout = "relu", "gelu", "bsf", "bsf"
    told = []
    for mistake in mistakes:
        try:
            mistake()
        except (LaunchError, PatternError) as error:
            told.append(str(error))
        else:
            told.append("not refused")
    return told


def test_mistakes_are_reported(four: Processes) -> None:
    expected = [
        "KSRowwise: output_layouts='whole'; accepted: Replicate() or Shard(dimension)",
        "KSRowwise: output_layouts=Partial(sum); accepted: Replicate() or Shard(dimension)",
        "KSColwise: got Linear; accepted: a KSLinear, or a group of them",
        "KSColwise: KSLinear(3,4,2,2 then 1,8,6,4; on this process 3,4,2,2 then 1,2,6,4) is sharded already",
        "KSColwise: KSLinear(3,4,2,2 then 1,8,6,4) is sharded already; accepted: plain weights, to which fully_shard "
        "comes later",
        "KSColwise over 4 processes splits factor 1, 1,6,6,4, along k, and 4 does not divide b=6; accepted: 2, 3, 6 "
        "processes",
        "KSColwise: a mesh of 2 dimensions; accepted: one dimension, such as mesh['tp']",
        "KSLinear(3,4,2,2 then 1,8,6,4; on this process 3,4,2,2 then 1,2,6,4): got x of shape (3, 13); layout bsf "
        "wants (..., 12)",
        "got x of shape (3, 40); layout bsf wants (..., 10)",
        "got x of shape (); layout bsf wants (..., 12)",
        "S(1) of 2 dimensions shards the features; accepted: S(-1)",
        "got residual of shape (4, 3); (4, 6) is needed",
        "a split KSLinear has a parameter that is a Parameter; accepted: the DTensors that its style created",
        "weights.0 is a DTensor; only layers of plain tensors can be frozen",
        "a group whose outputs are split over processes; accepted: parts(x), or output_layouts=Replicate()",
        "weights.0 cannot be registered; accepted for tensor parallelism: styles of ksgen.torch.parallel",
        "between='relu' comes before the sum over processes; accepted: KSBlockwise or KSColwise, or a layer without it",
        "KSColwise: KSLinear(3,4,4,1 then 1,3,3,4) has parametrized weights, such as tied ones; accepted: plain ones",
        "between='relu' of a layer that is split over processes; accepted: 'none'",
        "layout='bsl' of a layer that is split over processes; accepted: 'bsf'",
        "out_layout='bsl' of a layer that is split over processes; accepted: None",
        "build: bias is distributed over 4 processes, which may need different numbers of calls; accepted: plain",
        "build: 0.bias is distributed over 4 processes",
    ]
    for told in four.run(refusals):
        for words, message in zip(expected, told, strict=True):
            assert words in message
