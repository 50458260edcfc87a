"""What a launcher takes of canonical weights: packed once where they are frozen, else as they are, to be packed before each launch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ksgen.launcher import Weights
from ksgen.torch.choice import launcher
from ksgen.torch.frozen import made_of


def operand(weights: Tensor, transposed: bool) -> Any:
    """Of (a, b, c, d); transposed, which is what gradients of x are multiplied by, of (a, c, b, d)."""
    return made_of(weights, *_WAYS[transposed])


def as_trained(weights: Tensor) -> Tensor:
    """Weights that take gradients are about to change: nothing that was kept of them is used, frozen or not."""
    return weights.detach() if weights.requires_grad else weights


def _pack(weights: Tensor) -> Weights:
    return launcher(*weights.shape).pack(weights)


def _transpose(weights: Tensor) -> Tensor:
    return weights.transpose(1, 2).contiguous()


def _pack_transposed(weights: Tensor) -> Weights:
    return _pack(_transpose(weights))


def _as_they_are(weights: Tensor) -> Tensor:
    return weights


_WAYS: dict[bool, tuple[Callable[[Tensor], Weights], Callable[[Tensor], Tensor]]] = {  # for many calls, and for one
    False: (_pack, _as_they_are),
    True: (_pack_transposed, _transpose),
}
