"""FSDP2: factors with a = 1 spread over processes; training and evaluation are as in one process."""

import os
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
fsdp = pytest.importorskip("torch.distributed.fsdp", reason="PyTorch has no distributed part here")
if not hasattr(fsdp, "fully_shard"):
    pytest.skip("PyTorch 2.6 or later has FSDP2", allow_module_level=True)

from torch import distributed, nn  # noqa: E402  (after the skip)
from torch.distributed.tensor import Shard  # noqa: E402

from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.sharding import shard_placement  # noqa: E402

PROCESSES = 2


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


def train_and_evaluate(rank: int, folder: str) -> None:
    """One process of `PROCESSES`, which leaves its figures in a file."""
    os.environ["KSGEN_THREADS"] = "1"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    model, alone, x = make(), make(), torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(1))
    for layer in (model[0], model[2], model):
        fsdp.fully_shard(layer, shard_placement_fn=shard_placement)
    found: dict[str, Any] = {"local": [tuple(each.to_local().shape) for each in model.parameters() if each.dim() == 4], "pairs": []}
    for _ in range(2):
        outputs = [each(x) for each in (model, alone)]
        found["pairs"].append(tuple(y.detach() for y in outputs))
        for each, y in zip((model, alone), outputs, strict=True):
            y.square().mean().backward()
            torch.optim.SGD(each.parameters(), lr=0.5).step()
        found["pairs"] += [(a.grad.full_tensor(), b.grad) for a, b in zip(model.parameters(), alone.parameters(), strict=True)]
        model.zero_grad()
        alone.zero_grad()
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                found["pairs"].append(tuple(each.eval()(x).clone() for each in (model, alone)))
        model.train()
    distributed.destroy_process_group()
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.skipif(not distributed.is_available() or not distributed.is_gloo_available(), reason="PyTorch has no gloo here")
def test_training_and_evaluation_are_as_in_one_process(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_and_evaluate, (str(tmp_path),), PROCESSES)
    for rank in range(PROCESSES):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert found["local"] == [(1, 4, 6, 4), (1, 3, 4, 8), (1, 3, 12, 4)]
        for one, other in found["pairs"]:
            torch.testing.assert_close(one, other)
