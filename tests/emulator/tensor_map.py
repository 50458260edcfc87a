"""What the host tells of an array of which kernels load and store boxes: cuTensorMapEncodeTiled's arguments."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

SWIZZLES = (0, 32, 64, 128)  # bytes


@dataclass(frozen=True, eq=False)
class TensorMap:
    """An argument of `run_cuda`.

    Innermost first: `sizes` and `box` in elements, `strides` in bytes from dimension 1 on.
    """

    array: np.ndarray[Any, Any]
    sizes: Sequence[int]
    strides: Sequence[int]
    box: Sequence[int]
    swizzle: int = 0
    item_bytes: int = 0  # of an element; 0: the array's own

    def __post_init__(self) -> None:
        if not len(self.sizes) == len(self.box) == len(self.strides) + 1:
            raise ValueError(
                f"{len(self.sizes)} sizes, {len(self.box)} box sizes and {len(self.strides)} strides; one stride less"
            )
        if self.swizzle not in SWIZZLES:
            raise ValueError(f"swizzle={self.swizzle}; accepted are {', '.join(map(str, SWIZZLES))}")

    @property
    def element_bytes(self) -> int:
        return self.item_bytes or self.array.itemsize

    @property
    def numbers(self) -> list[int]:
        return [
            len(self.sizes),
            self.element_bytes,
            SWIZZLES.index(self.swizzle),
            *self.sizes,
            *self.strides,
            *self.box,
        ]
