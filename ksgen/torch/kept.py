"""What was made of weights once, kept as long as they live and brought up to date when PyTorch has counted a write to them.

It stays in the same memory, so that a CUDA graph finds it there, and launchers keep what they packed of it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class _Made:
    tensor: Tensor
    address: int  # of the weights when it was made, and their count of writes
    version: int | None  # None: a graph writes to it at its replays, and maybe to the weights, which nobody counts


class Kept:
    """`make(weights)`, made again only when weights were written to. Never while gradients or a graph are recorded."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self.make = make
        self._kept = WeakTensorKeyDictionary()

    def of(self, weights: Tensor) -> Tensor:
        if torch.compiler.is_compiling() or (torch.is_grad_enabled() and weights.requires_grad) or weights.is_inference():
            return self.make(weights)
        with torch.inference_mode(False), torch.no_grad():
            return self._brought_up_to_date(weights)

    def _brought_up_to_date(self, weights: Tensor) -> Tensor:
        now = weights.data_ptr(), None if _is_recorded(weights) else weights._version
        found: _Made | None = self._kept.get(weights)
        if found is None or found.address != now[0] or found.tensor.dtype != weights.dtype:
            # Cloned: a view would keep the weights alive.
            found = self._kept[weights] = _Made(self.make(weights.detach()).clone(), *now)
        elif found.version is None or found.version != weights._version:
            found.tensor.copy_(self.make(weights.detach()))
            found.version = None if found.version is None else now[1]
        return found.tensor


def _is_recorded(weights: Tensor) -> bool:
    """Whether a CUDA graph records what is done with them."""
    return bool(weights.is_cuda and torch.cuda.is_current_stream_capturing())
