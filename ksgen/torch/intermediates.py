"""What lies between a layer's factors while gradients are recorded: kept for the backward pass, or computed there again from x.

Knows no backend. Where a transform of torch.func is active, or a program is exported, it is kept: there is no checkpoint for them.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ksgen.pattern import Chain
from ksgen.torch.backends import multiply_all_by
from ksgen.torch.ops import is_transformed

INTERMEDIATES = ("keep", "recompute", "auto")


Activations = tuple[str, str]  # behind each factor but the last, and behind that one


def between(chain: Chain, activations: Activations) -> int:
    """Values for each batch entry that are kept, besides x: what all factors but the last give, and what an activation is applied to."""
    *first, last = chain
    within, behind = activations
    return sum(each.out_features for each in first) * (1 + (within != "none")) + last.out_features * (behind != "none")


def is_recomputed(intermediates: str, chain: Chain, activations: Activations) -> bool:
    """By "auto" where it takes more memory than x, which is kept anyway."""
    values = between(chain, activations)
    return values > 0 and (intermediates == "recompute" or (intermediates == "auto" and values > chain.in_features))


def multiply_between(
    recompute: bool, backend: str, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, **options: Any
) -> Tensor:
    """`multiply_all_by`, which keeps no more than its arguments if `recompute` is asked for."""

    def whole(x: Tensor, bias: Tensor | None, residual: Tensor | None, *weights: Tensor) -> Tensor:
        return multiply_all_by(backend, x, weights, bias, residual, **options)

    if not recompute or not _is_recorded(x, bias, residual, *weights):
        return multiply_all_by(backend, x, weights, bias, residual, **options)
    y: Tensor = checkpoint(whole, x, bias, residual, *weights, use_reentrant=False, preserve_rng_state=False)
    return y


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether a backward pass may follow that takes a checkpoint."""
    if not torch.is_grad_enabled() or not any(each is not None and each.requires_grad for each in tensors):
        return False
    is_exported = torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", lambda: False)()
    return not is_exported and not is_transformed()


def told_of_intermediates(intermediates: str, chain: Chain, activations: Activations, batch: int, item_bytes: int) -> str:
    """A line of `explain`."""
    size = f"{between(chain, activations) * batch * item_bytes / 1e6:.3g} MB at batch {batch}"
    way = "computed again in the backward pass" if is_recomputed(intermediates, chain, activations) else "kept for the backward pass"
    return f"in training, what lies between ({size}) is {way}: intermediates={intermediates}"
