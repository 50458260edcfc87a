"""Weights with their middle axes swapped, which the gradient of x is multiplied by: a copy that stays where it is.

Launchers pack such a copy once and again when it was written to, as they do with weights.
"""

from dataclasses import dataclass

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


@dataclass
class _Transpose:
    copy: Tensor
    address: int  # of the weights, and their count of writes, when it was made
    version: int


class KeptTransposes:
    """The transposed weights of a backward pass. They go with the weights."""

    def __init__(self) -> None:
        self._kept = WeakTensorKeyDictionary()

    def of(self, weights: Tensor) -> Tensor:
        """(a, b, c, d) as (a, c, b, d), contiguous."""
        swapped = weights.transpose(1, 2)
        if weights.is_inference():  # its writes are not counted
            return swapped.contiguous()
        found: _Transpose | None = self._kept.get(weights)
        if found is None or found.address != weights.data_ptr() or found.copy.shape != swapped.shape:
            self._kept[weights] = found = _Transpose(swapped.contiguous(), weights.data_ptr(), weights._version)
        elif found.version != weights._version:
            found.copy.copy_(swapped)
            found.version = weights._version
        return found.copy
