"""FSDP2 and DDP: factors with a = 1 spread over processes; training and evaluation are as in one process."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
fsdp = pytest.importorskip("torch.distributed.fsdp", reason="PyTorch has no distributed part here")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("PyTorch 2.6 or later has FSDP2", allow_module_level=True)

from torch import distributed, nn  # noqa: E402  (after the skip)
from torch.distributed.tensor import Shard  # noqa: E402

from ksgen.errors import LaunchError  # noqa: E402
from ksgen.torch import KSLinear, build, freeze  # noqa: E402
from ksgen.torch.parallel import shard_placement  # noqa: E402
from tests.support.processes import Processes  # noqa: E402

needs_gloo = pytest.mark.skipif(
    not distributed.is_available() or not distributed.is_gloo_available(), reason="PyTorch has no gloo here"
)


@pytest.mark.parametrize(
    ("shape", "count", "dimension"),
    [
        ((1, 8, 6, 4), 2, 1),
        ((1, 7, 6, 4), 2, 2),
        ((1, 7, 5, 4), 4, 3),
        ((4, 8, 6, 4), 2, None),
        ((3, 8, 6, 4), 2, None),
        ((3, 8, 6, 4), 4, 1),
        ((1, 7, 5, 3), 2, None),
        ((24,), 2, None),
        ((), 2, None),
    ],
)
def test_the_dimension_that_spreads(shape: tuple[int, ...], count: int, dimension: int | None) -> None:
    found = shard_placement(nn.Parameter(torch.zeros(shape)), count)
    assert found == (None if dimension is None else Shard(dimension))


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(KSLinear([(1, 8, 6, 4), (1, 6, 4, 8)]), nn.ReLU(inplace=True), KSLinear([(1, 6, 12, 4)]))


def shard(model: nn.Sequential) -> nn.Sequential:
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, shard_placement_fn=shard_placement)
    return model


def train_and_evaluate() -> list[tuple[int, ...]]:
    """Train and evaluate as one of two processes, compared with an unsharded model. Returns its shards' shapes."""
    model, alone, x = shard(make()), make(), torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    local = [tuple(each.to_local().shape) for each in model.parameters() if each.dim() == 4]
    for _ in range(2):
        outputs = [each(x) for each in (model, alone)]
        torch.testing.assert_close(*outputs)
        for each, y in zip((model, alone), outputs, strict=True):
            y.square().mean().backward()
            torch.optim.SGD(each.parameters(), lr=0.5).step()
        for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(own.grad.full_tensor(), whole.grad)
        model.zero_grad()
        alone.zero_grad()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                torch.testing.assert_close(*(each.eval()(x) for each in (model, alone)))
        model.train()
    return local


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    found = Processes(2, tmp_path_factory.mktemp("two"))
    yield found
    found.end()


@needs_gloo
def test_training_and_evaluation_are_as_in_one_process(two: Processes) -> None:
    assert two.run(train_and_evaluate) == [[(1, 4, 6, 4), (1, 3, 4, 8), (1, 3, 12, 4)]] * 2


def initialize_shards() -> float:
    """Draw orthogonal factors after sharding, in each process. Returns the largest error of the full K."""
    torch.manual_seed(distributed.get_rank())  # the first process's draw counts
    layer = KSLinear([(1, 8, 6, 4), (1, 6, 4, 8)], init="orthogonal", dtype=torch.float64, bias=False)
    fsdp.fully_shard(layer, shard_placement_fn=shard_placement)
    layer.reset_parameters()
    matrix = layer.to_dense().detach()
    return float((matrix.mT @ matrix - torch.eye(24, dtype=torch.float64)).abs().max())


@needs_gloo
def test_shards_are_initialized_as_a_whole(two: Processes) -> None:
    assert max(two.run(initialize_shards)) < 1e-13


def freeze_and_train() -> list[str]:
    """Step and load between evaluations of a model that was frozen, or should be. Returns its warnings."""
    x, told = torch.randn(3, 24, generator=torch.Generator().manual_seed(1)), []
    alone, model = make().eval(), make().eval()
    freeze(model)
    for _ in range(3):
        with torch.no_grad():
            model(x)  # by calls that are prepared
    shard(model)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        torch.testing.assert_close(model(x), alone(x))
    told += [str(each.message) for each in caught if "frozen" in str(each.message)]
    for _ in range(2):
        for each in (lambda: freeze(model), lambda: (model.unshard(), model[0].unshard(), freeze(model))):
            try:
                each()
            except LaunchError as error:
                told.append(str(error))
            else:
                told.append("not refused")
            model[0].reshard()
        for each in (model, alone):  # still in `eval()`, which would not thaw
            each(x).square().mean().backward()
            optimizer = torch.optim.AdamW(each.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(x), alone(x))
        told.append(f"frozen: {model[0].is_frozen}")
    return told


@needs_gloo
def test_what_fsdp_gathers_is_never_kept(two: Processes) -> None:
    for told in two.run(freeze_and_train):
        thawed, others = (
            [each for each in told if "is frozen no more" in each],
            [each for each in told if "is frozen no more" not in each],
        )
        assert len(thawed) == 2
        assert all("weights.0 was replaced by another tensor" in each for each in thawed)
        sharded, gathered, state = others[:3]
        assert "weights.0 is a " in sharded
        assert "only layers of plain tensors can be frozen" in sharded
        assert (
            "FSDP2 gathers weights.0 again after each step or load, which no counter shows; such a layer cannot be "
            "frozen" in gathered
        )
        assert state == "frozen: False"
        assert others[3:] == others[:3]


def train_in_ddp(options: dict[str, bool]) -> None:
    """Half of each batch in each process, and evaluations by frozen layers between: as alone with the whole batch."""
    rank = distributed.get_rank()
    torch.manual_seed(rank)
    own = nn.Sequential(KSLinear([(1, 8, 6, 4), (1, 6, 4, 8)], activation="gelu"), KSLinear([(1, 6, 12, 4)]))
    freeze(own.eval())
    with torch.no_grad():
        for _ in range(3):
            own(torch.ones(8, 24))
    # which overwrites the weights by those of the first process
    model = nn.parallel.DistributedDataParallel(own, **options)
    assert not own[0].is_frozen
    torch.manual_seed(0)
    alone = nn.Sequential(KSLinear([(1, 8, 6, 4), (1, 6, 4, 8)], activation="gelu"), KSLinear([(1, 6, 12, 4)]))
    with torch.no_grad(), pytest.warns(UserWarning, match="weights.0 was written to"):
        torch.testing.assert_close(model(torch.ones(8, 24)), alone(torch.ones(8, 24)))
    own.train()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.2, momentum=0.9) for each in (model, alone)]
    for number in range(3):
        whole = torch.randn(8, 24, generator=torch.Generator().manual_seed(number))
        half = slice(4 * rank, 4 * rank + 4)
        for each, optimizer, x in ((model, optimizers[0], whole[half]), (alone, optimizers[1], whole)):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        freeze(model.eval())
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(whole), alone(whole))
        assert own[0].is_frozen
        model.train()
    for mine, one in zip(own.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(mine, one)


@pytest.mark.exhaustive
@needs_gloo
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True, "static_graph": True}], ids=["usual", "static"]
)
def test_ddp_trains_as_one_process_with_the_whole_batch(two: Processes, options: dict[str, bool]) -> None:
    two.run(train_in_ddp, options)


def build_in_ddp() -> bool:
    """DDP sends the buffers of a batch norm at each call. One process needs fewer calls, as it was built before."""
    own = nn.Sequential(KSLinear([(1, 8, 6, 4)]), nn.BatchNorm1d(32))
    model = nn.parallel.DistributedDataParallel(own)
    if distributed.get_rank():
        build(own, torch.ones(9, 24))
    before = int(own[1].num_batches_tracked)
    build(model, torch.ones(9, 24))
    calls: list[Any] = [None, None]
    distributed.all_gather_object(calls, int(own[1].num_batches_tracked) - before)
    return bool(calls[0] > calls[1])


@needs_gloo
def test_processes_of_ddp_build_with_different_numbers_of_calls(two: Processes) -> None:
    assert two.run(build_in_ddp) == [True, True]


def train_in_16_bits() -> None:
    """FSDP2 gathers bfloat16 and sums gradients in float32."""
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model, alone, x = make(), make(), torch.randn(3, 24, generator=torch.Generator().manual_seed(1))
    fsdp.fully_shard(model, shard_placement_fn=shard_placement, mp_policy=policy)
    y = model(x)
    assert y.dtype == torch.bfloat16
    y.square().mean().backward()
    alone(x).square().mean().backward()
    for own, whole in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            own.grad.full_tensor(), whole.grad, rtol=0.05, atol=0.02 * float(whole.grad.abs().max())
        )


@needs_gloo
def test_fsdp_gathers_in_16_bits(two: Processes) -> None:
    two.run(train_in_16_bits)
