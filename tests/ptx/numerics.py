"""Y = X W^T in float32 through tf32 tensor cores: how its error depends on the split, the promotion and the cores'
sums.

    python -m tests.ptx.numerics        the table of errors

A mode says how a float32 becomes operands: one (`tf32`), or a big and a small one whose products but small * small are
added (`tf32x3`). Every `promote` of k the tensor cores' sums are added to plain float32 ones and start again at zero.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np

from tests.ptx.cases import Case

Array = np.ndarray[Any, Any]

ROWS, COLUMNS = 64, 48  # of Y: enough outputs for the norm of an error, a warp for each 16 x 8 of them
WIDTHS = (48, 192, 1024)  # of c
AMPERE, HOPPER, ROUNDED = SUMS = ("sm_80", "sm_90a", "rounded")  # whose sums tensor cores make

# A of the fragment lies by (g, t), its rows g and g + 8; B by (t, g); the sums by (g, 2t).
PRODUCT = """
extern "C" __global__ void product(const float* x, const float* w, float* y) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    const int row = blockIdx.x / (N / 8) * 16 + g, column = blockIdx.x % (N / 8) * 8;
    const float *const upper = x + row * C + t, *const lower = upper + 8 * C, *const right = w + (column + g) * C + t;
    float total[4] = {0, 0, 0, 0}, sums[4] = {0, 0, 0, 0}, corrections[4] = {0, 0, 0, 0};
    for (int first = 0; first < C; first += BLOCK) {
        const int end = min(first + BLOCK, C);
        for (int k = first; k < end; k += 8) {
            const float a[4] = {upper[k], lower[k], upper[k + 4], lower[k + 4]}, b[2] = {right[k], right[k + 4]};
            correct(APART ? corrections : sums, a, b);
        }
        for (int k = first; k < end; k += 8) {
            const float a[4] = {upper[k], lower[k], upper[k + 4], lower[k + 4]}, b[2] = {right[k], right[k + 4]};
            multiply(sums, a, b);
        }
        if (end % PROMOTE != 0 && end != C) continue;
        for (int i = 0; i < 4; ++i) {
            total[i] += sums[i] + corrections[i];
            sums[i] = corrections[i] = 0;
        }
    }
    float* const to = y + row * N + column + 2 * t;
    to[0] = total[0];
    to[1] = total[1];
    to[8 * N] = total[2];
    to[8 * N + 1] = total[3];
}
"""

ONE_PRODUCT = """
DEVICE void correct(float (&)[4], const float (&)[4], const float (&)[2]) {}
DEVICE void multiply(float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
    const unsigned own_a[4] = {OPERAND(a[0]), OPERAND(a[1]), OPERAND(a[2]), OPERAND(a[3])};
    mma_tf32(sums, own_a, OPERAND(b[0]), OPERAND(b[1]));
}
"""

# x = big + small, exactly; the tensor core cuts small off.
THREE_PRODUCTS = """
constexpr unsigned HALF = 0x1000, CUT_OFF = 0xffffe000;  // of the last bit that counts, and the bits that count
DEVICE unsigned big(float x) { return BIG; }
DEVICE unsigned small(float x) { return SMALL; }
DEVICE void correct(float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
    const unsigned big_a[4] = {big(a[0]), big(a[1]), big(a[2]), big(a[3])};
    const unsigned small_a[4] = {small(a[0]), small(a[1]), small(a[2]), small(a[3])};
    mma_tf32(sums, small_a, big(b[0]), big(b[1]));
    mma_tf32(sums, big_a, small(b[0]), small(b[1]));
}
DEVICE void multiply(float (&sums)[4], const float (&a)[4], const float (&b)[2]) {
    const unsigned big_a[4] = {big(a[0]), big(a[1]), big(a[2]), big(a[3])};
    mma_tf32(sums, big_a, big(b[0]), big(b[1]));
}
"""

DIFFERENCE = "x - __uint_as_float(big(x))"


def _three_products(big: str, small: str) -> str:
    return THREE_PRODUCTS.replace("BIG", big).replace("SMALL", small)


MODES = {
    "tf32": ONE_PRODUCT.replace("OPERAND", "float_to_tf32"),
    "tf32, cut off": ONE_PRODUCT.replace("OPERAND", "__float_as_uint"),
    # three operations a split each: a logical one, a difference, and a sum of integers that rounds half up
    "tf32x3": _three_products("__float_as_uint(x) & CUT_OFF", f"__float_as_uint({DIFFERENCE}) + HALF"),
    "tf32x3, big rounded": _three_products("(__float_as_uint(x) + HALF) & CUT_OFF", f"__float_as_uint({DIFFERENCE})"),
}


@dataclass(frozen=True)
class Product:
    """One such product, on reproducible X ~ N(0, 1) and W uniform in +-1/sqrt(c)."""

    mode: str
    c: int  # a multiple of 8
    promote: int = 0  # 0: never; else a multiple of `block`
    block: int = 8  # of k: its corrections are added before its big products
    apart: bool = False  # corrections have sums of their own until they are promoted

    @property
    def name(self) -> str:
        words = [self.mode]
        if self.block > 8:
            words.append(f"corrections of {self.block} first")
        if self.apart:
            words.append("corrections apart")
        if self.promote:
            words.append(f"promoted every {self.promote}")
        return ", ".join(words)

    @property
    def kernel(self) -> str:
        head = (
            f"\nconstexpr int C = {self.c}, N = {COLUMNS}, PROMOTE = {self.promote or self.c}, BLOCK = {self.block};\n"
            f"constexpr bool APART = {str(self.apart).lower()};\n"
        )
        multiply = MODES[self.mode]
        return head + multiply + PRODUCT

    @property
    def operands(self) -> tuple[Array, Array]:
        rng = np.random.default_rng([self.c, 7])
        return rng.standard_normal((ROWS, self.c), np.float32), (
            rng.uniform(-1, 1, (COLUMNS, self.c)) / sqrt(self.c)
        ).astype(np.float32)

    def case(self) -> Case:
        """Return the launch for the emulator or a GPU. Its check accepts the mode's error, however the cores add."""
        x, w = self.operands
        y = np.full((ROWS, COLUMNS), np.nan, np.float32)
        most = 2e-5 if self.mode.startswith("tf32x3") else 1e-3

        def check() -> None:
            error = error_of(y, x, w)
            assert error <= most, f"{self.name}, c={self.c}: error {error:.2e}; at most {most} accepted"

        return Case(
            f"{self.name}, c={self.c}",
            self.kernel,
            "product",
            "sm_80",
            32,
            0,
            [x, w, y],
            check,
            grid=ROWS // 16 * COLUMNS // 8,
        )

    def error(self, sums: str = HOPPER) -> float:
        """Emulate the product with the sums of a target's tensor cores, or with exact sums that are rounded."""
        case = self.case()
        case.emulate(**({"accumulation": ROUNDED} if sums == ROUNDED else {"target": sums}))
        return self.error_of(case)

    def error_of(self, launched: Case) -> float:
        return error_of(launched.args[-1], *self.operands)


def error_of(y: Array, x: Array, w: Array) -> float:
    """Frobenius norm of the difference over that of the product in float64."""
    truth = x.astype(np.float64) @ w.astype(np.float64).T
    return float(np.linalg.norm(y - truth) / np.linalg.norm(truth))


def sequential_error(c: int) -> float:
    """The error of float32 fused multiply-adds, one k after the other: what CUDA cores do."""
    x, w = (each.astype(np.float64) for each in Product("tf32", c).operands)
    sums = np.zeros((ROWS, COLUMNS), np.float32)
    for k in range(c):
        sums = (sums + np.outer(x[:, k], w[:, k])).astype(np.float32)
    return error_of(sums, x, w)


def products() -> Iterator[dict[str, Any]]:
    """The rows of the table: everything of a product but c."""
    yield from ({"mode": mode} for mode in ("tf32", "tf32, cut off"))
    for mode in ("tf32x3", "tf32x3, big rounded"):
        yield from ({"mode": mode, "promote": promote} for promote in (0, 64, 32, 16))
        yield from ({"mode": mode, "promote": promote, "block": 32} for promote in (64, 32))
        yield from ({"mode": mode, "promote": promote, "apart": True} for promote in (64, 32))


def main() -> None:
    row = "{:64}" + "{:>10}" * len(WIDTHS)
    print(row.format("", *(f"c={c}" for c in WIDTHS)))
    print(row.format("float32 fused multiply-adds", *(f"{sequential_error(c):.2e}" for c in WIDTHS)))
    for sums in SUMS:
        print(f"\ntensor cores' sums: {sums}")
        for options in products():
            found = [Product(c=c, **options) for c in WIDTHS]
            print(row.format(found[0].name, *(f"{each.error(sums):.2e}" for each in found)), flush=True)


if __name__ == "__main__":
    main()
