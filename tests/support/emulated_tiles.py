"""The instructions of matrix tiles as Intel's manual states them, in exact arithmetic; and as texts play them, in a
library.
"""

import ctypes
import math
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.build.host import PRELUDE, TILES, find_host_compiler, host_target, processor_features
from ksgen.errors import ToolchainError

Array = np.ndarray[Any, Any]
# of float32: its least normal exponent, digits, and the first number beyond
LEAST, DIGITS, BEYOND = -126, 24, Fraction(2) ** 128
CALLS = """
extern "C" {
void read_state(TileState* to) { host::tiles_bf16::read_state(to); }
void configure(const TileState* from) { host::tiles_bf16::configure(from); }
void begin(TileState* before) { *before = tile_begin(bf16); }
void end(const TileState* before) { tile_end(bf16, *before); }
void multiply_bf16(const void* a, const void* b, void* c) {
    tile_load(bf16, 0, c, 64), tile_load(bf16, 4, a, 64), tile_load(bf16, 6, b, 64);
    tile_dot(bf16, 0, 4, 6);
    tile_store(bf16, 0, c, 64);
}
void multiply_f16(const void* a, const void* b, void* c) {
    tile_load(f16, 1, c, 64), tile_load(f16, 5, a, 64), tile_load(f16, 7, b, 64);
    tile_dot(f16, 1, 5, 7);
    tile_store(f16, 1, c, 64);
}
void load_and_store(const void* from, long from_stride, void* to, long to_stride, int is_zero) {
    tile_load(bf16, 2, from, from_stride);
    if (is_zero) tile_zero(bf16, 2);
    tile_store(bf16, 2, to, to_stride);
}
unsigned modes() { return __builtin_ia32_stmxcsr(); }
void set_modes(unsigned wanted) { __builtin_ia32_ldmxcsr(wanted); }
}
"""


def needs_emulation() -> None:
    """Skips a test where neither the processor has tiles nor its FMA units can play them."""
    if "fma" not in processor_features():
        pytest.skip("tiles are emulated by an x86 processor with FMA")
    try:
        find_host_compiler()
    except ToolchainError as absent:
        pytest.skip(str(absent))


@cache
def _built(define: str) -> bytes:
    source = f"{define}\n{PRELUDE.read_text()}{TILES.read_text()}{CALLS}"
    return find_host_compiler().compile_whole(source, "tiles", host_target())


def library(folder: Path, define: str = "#define EMULATED_TILES") -> ctypes.CDLL:
    """The words as functions; `define` in front of them."""
    needs_emulation()
    (folder / "tiles.so").write_bytes(_built(define))
    return ctypes.CDLL(str(folder / "tiles.so"))


def rounded(value: Fraction) -> float:
    """Round to the nearest float32, ties to even. Results that are subnormal become zero."""
    if value == 0:
        return 0.0
    exponent = math.frexp(float(value))[1] - 1
    quantum = Fraction(2) ** (exponent - DIGITS + 1)
    found = round(value / quantum) * quantum  # Python's ties go to even
    if abs(found) >= BEYOND:
        return math.copysign(math.inf, value)
    return 0.0 if abs(found) < Fraction(2) ** LEAST else float(found)


def _taken(value: float) -> float:
    """Return a float32 as an instruction reads it: subnormals are zeros."""
    return 0.0 if abs(value) < 2.0**LEAST else value


def multiply_add(a: float, b: float, c: float) -> float:
    a, b, c = _taken(a), _taken(b), _taken(c)
    if not (math.isfinite(a) and math.isfinite(b) and math.isfinite(c)):
        return a * b + c  # no rounding matters
    return rounded(Fraction(a) * Fraction(b) + Fraction(c))


def product(a: Array, b: Array, c: Array) -> Array:
    """The instruction on operands as float32: (16, 32) by pairs in rows (16 pairs, 16 columns, 2), added to (16,
    16).
    """
    found = c.copy()
    for m in range(16):
        for n in range(16):
            first = second = 0.0
            for k in range(16):
                first = multiply_add(float(a[m, 2 * k]), float(b[k, n, 0]), first)
                second = multiply_add(float(a[m, 2 * k + 1]), float(b[k, n, 1]), second)
            found[m, n] = multiply_add(multiply_add(first, 1.0, second), 1.0, float(c[m, n]))
    return found
