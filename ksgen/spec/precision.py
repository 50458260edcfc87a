"""Defines every precision in one record. A new compute precision is one record here, its template and its tests."""

from dataclasses import dataclass
from typing import Literal

K_BYTES = 32  # bytes of one row of A or column of B in one matrix instruction
SUMS_ROUNDOFF = 2.0**-24  # roundoff of float32, the accumulator of all precisions but float64 and complex128


@dataclass(frozen=True)
class Operand:
    """Operand type of a matrix instruction."""

    name: str  # PTX's name of the type
    item_bytes: int

    @property
    def k_step(self) -> int:
        """Inputs per output that one instruction multiplies."""
        return K_BYTES // self.item_bytes


F16, BF16, TF32 = Operand("f16", 2), Operand("bf16", 2), Operand("tf32", 4)
E4M3, E5M2 = Operand("e4m3", 1), Operand("e5m2", 1)  # named like the storages
TF32_PAIR = Operand("tf32", 8)  # a complex number
OPERANDS = {each.name: each for each in (F16, BF16, TF32, E4M3, E5M2)}


@dataclass(frozen=True)
class TileProducts:
    """Products of a processor's matrix tiles for a stored type."""

    operand: Operand
    parts: int = 1  # parts into which each operand is split
    products: int = 1  # products of these parts that replace one product


@dataclass(frozen=True)
class Promotion:
    """Intervals at which tensor-core accumulators, which truncate, are added to float32 registers.

    With operands that are split into parts, the error is then at most twice that of a sequential float32 sum.
    """

    least_in: int = 1  # fewest inputs for which this bound holds; with fewer, sums that end in one step exceed it
    few: int = 0  # inputs between two promotions if a sum has at most `few_in` inputs; 0: no promotion
    many: int = 0  # inputs between two promotions if a sum has more inputs; 0: no promotion
    few_in: int = 0
    batch: int = 1024  # rows of the batch between two promotions of gradients

    def after(self, inputs: int) -> int:
        """Number of inputs between two promotions of sums over `inputs` inputs; 0: never."""
        most = self.few if inputs <= self.few_in else self.many
        return most if inputs > most else 0


@dataclass(frozen=True)
class Precision:
    """Storage and arithmetic of X, Y and the weights."""

    name: str
    dtype: str  # NumPy's name of the stored type of X, Y and the weights; bfloat16 is from ml_dtypes
    item_bytes: int
    unit_roundoff: float  # roundoff of the stored type, or of the operands if they are rounded to fewer bits
    operand: Operand | None = None  # type that tensor cores multiply; None: they do not support this precision
    parts: int = 1  # parts into which each operand is split
    products: int = 1  # tensor-core products of these parts that replace one product
    # promotion on tensor cores that add 8 products (4 of tf32) at a time, and keep one bit below float32's last one
    coarse: Promotion = Promotion()
    fine: Promotion = Promotion()  # on tensor cores that add twice as many, and keep two such bits
    gradient: str = ""  # the precision of gradients; empty: the same
    tiles: TileProducts | None = None  # products of a processor's matrix tiles; None: not supported
    families: tuple[str, ...] = ()  # families that are candidates although launchers do not choose them by default
    is_complex: bool = False  # whether a number is a pair of real ones
    of_parts: str = ""  # precision in which tensor cores multiply real and imaginary parts
    range_note: str = ""  # accepted numbers, if they are fewer than the stored type can hold
    aliases: tuple[str, ...] = ()  # names in other libraries

    @property
    def real_bytes(self) -> int:
        """Bytes per accumulator element; a complex one has two parts."""
        return max(4, self.item_bytes)

    @property
    def sums(self) -> str:
        """Type of the accumulator, or of either half of a complex one."""
        return "float64" if self.item_bytes // self.reals_per_number == 8 else "float32"

    @property
    def reals_per_number(self) -> int:
        """Real numbers per number: 2 if complex."""
        return 2 if self.is_complex else 1

    @property
    def multiply_adds(self) -> int:
        """Real multiply-adds per product."""
        return self.reals_per_number**2

    @property
    def rounds_once(self) -> bool:
        """Whether the rounding of operands or outputs outweighs the rounding of the sums."""
        return self.unit_roundoff > SUMS_ROUNDOFF

    def promotion(self, has_fine_sums: bool) -> Promotion:
        return self.fine if has_fine_sums else self.coarse


SIX_PRODUCTS = TileProducts(BF16, parts=3, products=6)  # products of bfloat16, for float32
BY_TILES = ("amx", "cpu_gradient")

PrecisionName = Literal[  # the keys of PRECISIONS
    "float32", "float64", "float16", "bfloat16", "tf32", "tf32x3", "fp16x3", "complex64", "c64_tf32x3", "complex128",
    "bf16x6"
]  # fmt: skip

PRECISIONS = {
    each.name: each
    for each in (
        Precision("float32", "float32", 4, 2.0**-24, aliases=("fp32", "float", "single")),
        Precision("float64", "float64", 8, 2.0**-53, aliases=("fp64", "double")),
        Precision("float16", "float16", 2, 2.0**-11, F16, tiles=TileProducts(F16), aliases=("fp16", "half")),
        Precision("bfloat16", "bfloat16", 2, 2.0**-8, BF16, tiles=TileProducts(BF16), aliases=("bf16",)),
        Precision("tf32", "float32", 4, 2.0**-11, TF32),  # ten bits of mantissa in each product
        Precision(  # three products of tf32: at most twice the error of a float32 sum
            "tf32x3", "float32", 4, 2.0**-24, TF32, parts=2, products=3,
            coarse=Promotion(28, 16, 16, batch=16), fine=Promotion(17, 16, 32, few_in=47, batch=32),
            tiles=SIX_PRODUCTS, families=BY_TILES,
        ),
        Precision(  # the same error by three products of float16; gradients may be too small for float16
            "fp16x3", "float32", 4, 2.0**-24, F16, parts=2, products=3, gradient="tf32x3",
            coarse=Promotion(6, 16, 32, few_in=47), fine=Promotion(6, 32, 64, few_in=64),
            range_note="|x| up to 65504 and |weights| up to 63.9",
        ),
        Precision("complex64", "complex64", 8, 2.0**-24, is_complex=True, aliases=("c64", "cfloat", "csingle")),
        Precision(  # four products of tf32x3 for one of complex64
            "c64_tf32x3", "complex64", 8, 2.0**-24, TF32_PAIR, parts=2, products=3,
            coarse=Promotion(16, 8, 8, batch=8), fine=Promotion(9, 8, 16, few_in=23, batch=16),
            is_complex=True, of_parts="tf32x3",
        ),
        Precision("complex128", "complex128", 16, 2.0**-53, is_complex=True, aliases=("c128", "cdouble", "complex")),
        # six products of a processor's tiles
        Precision("bf16x6", "float32", 4, 2.0**-24, tiles=SIX_PRODUCTS, families=BY_TILES),
    )
}  # fmt: skip


def part_of(precision: Precision) -> str:
    """C type of either half of a complex number."""
    return "double" if precision.sums == "float64" else "float"


def stored_types() -> tuple[str, ...]:
    """Distinct array dtypes of all precisions."""
    return tuple(dict.fromkeys(each.dtype for each in PRECISIONS.values()))


def on_tensor_cores() -> tuple[str, ...]:
    """The precisions that tensor cores have products for."""
    return tuple(name for name, each in PRECISIONS.items() if each.operand)


def on_tiles() -> tuple[str, ...]:
    """The precisions that a processor's matrix tiles have products for."""
    return tuple(name for name, each in PRECISIONS.items() if each.tiles)


def gradient_of(name: str) -> str:
    """Precision in which gradients of the given one are computed."""
    return PRECISIONS[name].gradient or name


def named_otherwise(word: str) -> str | None:
    """Precision that other libraries know by this name."""
    return next((name for name, each in PRECISIONS.items() if word in each.aliases), None)
