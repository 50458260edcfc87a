"""Defines the types in which weights may be stored if not in Y's, one record each: eight bits with scales, or bfloat16.

A new storage is one record here, and its blocks in the snippet libraries of templates (`widen_value`, `widen_values`,
`load_weights`, each for its `variant`).
"""

from dataclasses import dataclass
from typing import Literal

from ksgen.spec.precision import PRECISIONS

BITS = "uint8"
Same = Literal["same"]
SAME: Same = "same"  # weights, or X, are stored in Y's type
SCALE_BYTES = 4  # bytes of a scale: float32
ALIGNMENT = 16  # scales follow the values, and begin at a multiple of this number of bytes


@dataclass(frozen=True)
class Storage:
    """Storage of weights as values times scales. Kernels scale the sums, not the weights.

    With weights in eight bits, X may be stored in the same type. The scales of weights then include the only scale of
    X. In bfloat16, every scale is 1.
    """

    name: str
    dtype: str  # dtype of arrays that hold values: NumPy's name, or ml_dtypes'
    largest: float  # largest value
    mantissa: int | None  # bits after the leading one; None: values are whole numbers
    least_exponent: int = 0  # exponent of the smallest normal values; subnormal values have the same spacing
    item_bytes: int = 1

    @property
    def is_scaled(self) -> bool:
        """Whether values are multiplied by scales."""
        return self.item_bytes == 1

    @property
    def variant(self) -> str:
        """Variant of template blocks for this storage."""
        return f"{self.name}_weights" if self.name in PRECISIONS else self.name

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Array dtypes accepted for x: the storage type, or uint8 holding its bits."""
        return self.dtype, BITS


ByteStorage = Literal["int8", "e4m3", "e5m2"]  # the keys of STORAGES
WeightStorage = Literal["int8", "e4m3", "e5m2", "bfloat16"]  # the keys of STORED

STORAGES = {
    each.name: each
    for each in (
        Storage("int8", "int8", 127, None),  # -128 is not used, so that the range is symmetric
        Storage("e4m3", "float8_e4m3fn", 448, 3, -6),
        Storage("e5m2", "float8_e5m2", 57344, 2, -14),
    )
}
# for X in float32; values are rounded weights
BFLOAT16 = Storage("bfloat16", "bfloat16", 2.0**127 * (2 - 2.0**-7), 7, -126, 2)
STORED = STORAGES | {BFLOAT16.name: BFLOAT16}  # storages in eight bits, and bfloat16
WEIGHTS = (SAME, *STORED)
INPUTS = (SAME, *STORAGES)


BYTE_TYPES = (*(each.dtype for each in STORAGES.values()), BITS)


def element_bytes(dtype: str) -> int:
    """Bytes per element of an array of a precision, or of eight bits."""
    return 1 if dtype in BYTE_TYPES else PRECISIONS[dtype].item_bytes


_X_OF_BYTES = tuple(
    name for name, each in PRECISIONS.items() if name == each.dtype and each.sums == "float32" and not each.is_complex
)


def x_precisions(storage: str | None = None) -> tuple[str, ...]:
    """Precisions of X for weights in this storage. None stands for any storage in eight bits.

    Weights in eight bits support every precision that is summed in float32. Weights in bfloat16 support float32 alone.
    """
    return _X_OF_BYTES if storage is None or STORED[storage].is_scaled else ("float32",)


def refused_x_precision(storage: str, precision: str) -> str | None:
    """Text that lists the accepted precisions of X for weights in this storage; None if the given one is accepted."""
    if precision in (accepted := x_precisions(storage)):
        return None
    unconverted = f", or weights in {precision} that are not converted (weights=same)"
    return f"{', '.join(accepted)}{unconverted if storage == precision else ''}"


def scales_begin(weight_count: int, item_bytes: int = 1) -> int:
    """Offset in bytes of the scales, which follow the values in the same array."""
    return -(-weight_count * item_bytes // ALIGNMENT) * ALIGNMENT
