"""Layout of wgmma operands in shared memory: the place of element (mn, k), and the descriptor that encodes it.

Written from the canonical layouts in the PTX manual, apart from the emulator's own reading of descriptors.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SWIZZLE_CODES = {0: 0, 128: 1, 64: 2, 32: 3}


def swizzled(offset: Any, swizzle: int) -> Any:
    """16-byte chunks are permuted within a span, by the number of the 128-byte line."""
    return offset ^ (offset >> 7) % (swizzle // 16) * 16 if swizzle else offset


@dataclass(frozen=True)
class Layout:
    """An operand of `mn` rows (A) or columns (B) and `k` elements along the sum."""

    mn: int
    k: int
    item_bytes: int
    swizzle: int = 0  # bytes
    along_mn: bool = False  # neighbours lie along mn, not along k

    @property
    def leading(self) -> int:
        if not self.along_mn:
            return 128 if self.swizzle == 0 else 16
        return self.mn // 8 * 128 if self.swizzle == 0 else self.k * self.swizzle

    @property
    def stride(self) -> int:
        if not self.along_mn:
            return 256 if self.swizzle == 0 else 8 * self.swizzle
        return 128 if self.swizzle == 0 else 8 * self.swizzle

    @property
    def step(self) -> int:
        """Bytes from one instruction's 32 bytes of k to the next one's."""
        if self.along_mn:
            return 32 // self.item_bytes // 8 * (self.leading if self.swizzle == 0 else self.stride)
        return self.mn * 32 if self.swizzle in (0, 32) else 32

    @property
    def bytes(self) -> int:
        return self.mn * self.k * self.item_bytes

    def offset(self, mn: int | Array, k: int | Array) -> int | Array:
        size, span = self.item_bytes, self.swizzle
        if self.along_mn and span == 0:  # cores of 8 k, each with 8 neighbours along mn
            return k // 8 * self.leading + mn // 8 * 128 + k % 8 * 16 + mn % 8 * size
        if self.along_mn:  # lines of a span along mn
            per_line = span // size
            return swizzled(mn // per_line * self.leading + k * span + mn % per_line * size, span)
        if span in (0, 32):  # a block of 32 bytes of k after the other
            per_block = 32 // size
            block, inside = divmod(k, per_block)
            if span == 32:
                return swizzled(block * self.mn * 32 + mn * 32 + inside * size, 32)
            core = 16 // size
            return block * self.mn * 32 + mn // 8 * 256 + inside // core * 128 + mn % 8 * 16 + inside % core * size
        return swizzled(mn * span + k * size, span)

    def image(self, matrix: Array) -> Array:
        """The bytes of a (mn, k) matrix."""
        content = np.zeros(self.bytes, np.uint8)
        starts = self.offset(*np.ogrid[: self.mn, : self.k])
        content[starts[..., None] + np.arange(self.item_bytes)] = matrix.view(np.uint8).reshape(
            self.mn, self.k, self.item_bytes
        )
        return content

    def descriptor(self, start: int) -> int:
        """Return the descriptor for a start in bytes from the base of shared memory, which the kernel adds."""
        return start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | SWIZZLE_CODES[self.swizzle] << 62
