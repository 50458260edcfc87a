"""All that is known of how weights are stored in eight bits, one record each. A new way is one record here, and its blocks in the
dictionaries of templates (`widen_weights__<name>`, `scale_of__<name>`, `widened__<name>`).
"""

from dataclasses import dataclass
from functools import cache

from ksgen.spec.precision import PRECISIONS

BITS = "uint8"
SAME = "same"  # weights, or X, are stored as Y is
SCALE_BYTES = 4  # of a scale: float32
ALIGNMENT = 16  # bytes; where the scales begin, behind the values


@dataclass(frozen=True)
class Storage:
    """Weights in eight bits each: values, of which each is multiplied by a scale. Sums are scaled, not weights. X may be stored so too, as
    its weights are: with one scale for all of it, which the weights' scales are multiplied by."""

    name: str
    dtype: str  # of arrays that hold values: NumPy's name, or ml_dtypes'
    largest: float  # value
    mantissa: int | None  # bits behind the leading one; None: values are whole numbers
    least_exponent: int = 0  # of values with a leading one; below, they are as far apart as there

    @property
    def item_bytes(self) -> int:
        return 1

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Of arrays of x that are taken for such values: their own, or the bits of them."""
        return self.dtype, BITS


STORAGES = {
    each.name: each
    for each in (
        Storage("int8", "int8", 127, None),  # -128 is not used: values are as far below zero as above it
        Storage("e4m3", "float8_e4m3fn", 448, 3, -6),
        Storage("e5m2", "float8_e5m2", 57344, 2, -14),
    )
}
WEIGHTS = (SAME, *STORAGES)


BYTE_TYPES = (*(each.dtype for each in STORAGES.values()), BITS)


def element_bytes(dtype: str) -> int:
    """Of an element of such arrays: of a precision, or in eight bits."""
    return 1 if dtype in BYTE_TYPES else PRECISIONS[dtype].item_bytes


@cache
def taken_beside() -> tuple[str, ...]:
    """The precisions of X that weights in eight bits are multiplied in: what is stored as it is multiplied, with sums in float32."""
    return tuple(name for name, each in PRECISIONS.items() if name == each.dtype and each.sums == "float32" and not each.is_complex)


def scales_begin(weight_count: int) -> int:
    """Bytes in front of the scales, where values and scales lie in one piece of memory."""
    return -(-weight_count // ALIGNMENT) * ALIGNMENT
