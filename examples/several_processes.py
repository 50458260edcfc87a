"""Train one model on several processes, by replicas, shards or tensor parallelism. The losses are equal.

    torchrun --nproc-per-node 2 examples/several_processes.py

It runs on one machine or several, with a GPU per process if available. The model learns another model's outputs.
"""

import argparse
import time
from tempfile import mkdtemp

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ksgen.torch import KSLinear
from ksgen.torch.parallel import KSColwise, KSRowwise, shard_placement

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--features", type=int, default=256, help="a multiple of 64")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--short", action="store_true", help="few features, a few steps")
if not distributed.is_torchelastic_launched():
    parser.exit(2, "torchrun --nproc-per-node 2 examples/several_processes.py starts it\n")
options, ROWS = parser.parse_args(), 256  # batch size over all processes
features, steps = (64, 8) if options.short else (options.features, options.steps)
UP = [(1, 64, 64, features // 64), (16, features // 4, features // 16, 1)]  # outputs four times the features
DOWN = [(16, features // 16, features // 4, 1), (1, 64, 64, features // 64)]


def drawn(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(KSLinear(UP, device=kind), nn.GELU(), KSLinear(DOWN, device=kind))


def train(model: nn.Module, own: slice) -> list[float]:
    """Train a model on this process's rows; returns the loss over the full batch at each step."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), 3e-3), []
    for step in range(steps):
        x = torch.randn(ROWS, features, generator=torch.Generator().manual_seed(step)).to(kind)[own]
        loss = nn.functional.mse_loss(model(x), teacher(x))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    distributed.all_reduce(total := torch.stack(losses))
    return (total / count).tolist()


kind = "cuda" if torch.cuda.is_available() else "cpu"
distributed.init_process_group("nccl" if kind == "cuda" else "gloo")  # reads torchrun's environment variables
rank, count = distributed.get_rank(), distributed.get_world_size()
if kind == "cuda":
    torch.cuda.set_device(rank % torch.cuda.device_count())
mesh, teacher = distributed.init_device_mesh(kind, (count,)), drawn(1).requires_grad_(False)
rows = slice(rank * ROWS // count, (rank + 1) * ROWS // count)
ways = {
    "DDP": (lambda model: nn.parallel.DistributedDataParallel(model), rows),
    "FSDP2": (lambda model: fully_shard(model, mesh=mesh, shard_placement_fn=shard_placement), rows),
    "tensor parallel": (lambda own: parallelize_module(own, mesh, {"0": KSColwise(), "2": KSRowwise()}), slice(None)),
}
for name, (prepare, own) in ways.items():
    model = prepare(drawn(2))
    held = sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in model.parameters())
    losses = train(model, own)
    if rank == 0:
        print(f"{name}: loss {losses[0]:.5f}, then {losses[-1]:.5f}; {held:,} parameters on each of {count}")
distributed.broadcast_object_list(folder := [None if rank else mkdtemp()])
checkpoint.save({"model": model.state_dict()}, checkpoint_id=folder[0])  # any number of processes may load it
alone, x = drawn(3), torch.ones(ROWS, features, device=kind)
checkpoint.load({"model": alone.state_dict()}, checkpoint_id=folder[0])
apart = float((alone(x) - model(x)).abs().max())
if rank == 0:
    print(*(layer.explain(ROWS).splitlines()[0] for layer in (model[0], model[2])), sep="\n")
    print(f"saved from {count} and loaded whole: outputs differ by {apart:.1e}")
distributed.destroy_process_group()
time.sleep(0.2)  # gloo's threads may still hold tensors; releasing one after interpreter shutdown aborts
