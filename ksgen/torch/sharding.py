"""How FSDP2 shards the factors of a `KSLinear`: along a dimension that spreads over the processes."""

import torch.distributed
from torch import nn
from torch.distributed.tensor import Shard


def shard_placement(parameter: nn.Parameter, count: int | None = None) -> Shard | None:
    """For `fully_shard(model, shard_placement_fn=shard_placement)`: the first dimension that `count` processes share equally.

    FSDP2's own choice is the first dimension, which is a: often 1, so that one process would hold the whole factor. It stays the
    choice (None) if it has an entry for each process, or if no other dimension divides. `count` is that of all processes, unless
    the mesh shards over fewer.
    """
    count = torch.distributed.get_world_size() if count is None else count
    if parameter.dim() == 0 or parameter.shape[0] >= count:
        return None
    return next((Shard(place) for place, size in enumerate(parameter.shape) if size >= count and size % count == 0), None)
