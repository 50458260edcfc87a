"""What a launcher takes for canonical weights: a packed form if they are frozen, else the weights, packed before each launch."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ksgen.launcher import Weights
from ksgen.torch.choice import launcher
from ksgen.torch.frozen import made_of


def operand(weights: Tensor, transposed: bool) -> Any:
    """The operand for (a, b, c, d), or the conjugates transposed for (a, c, b, d), as gradients of x need it."""
    return made_of(weights, *_WAYS[transposed])


def as_trained(weights: Tensor) -> Tensor:
    """Detached if they take gradients: they are about to change, so nothing kept of them is used, frozen or not."""
    return weights.detach() if weights.requires_grad else weights


def _pack(weights: Tensor) -> Weights:
    return launcher(*weights.shape).pack(weights)


def _transpose(weights: Tensor) -> Tensor:
    return weights.transpose(1, 2).conj().contiguous().resolve_conj()


def _pack_transposed(weights: Tensor) -> Weights:
    return _pack(_transpose(weights))


def _as_they_are(weights: Tensor) -> Tensor:
    return weights


_WAYS: dict[bool, tuple[Callable[[Tensor], Weights], Callable[[Tensor], Tensor]]] = {  # for many calls, and for one
    False: (_pack, _as_they_are),
    True: (_pack_transposed, _transpose),
}
