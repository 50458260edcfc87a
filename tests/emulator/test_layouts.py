"""Layouts of fragments, matrices and wgmma's operands against a second statement: CuTe's, as shapes and strides.

A mode is (extent, stride), and a layout is a sequence of modes whose first is the fastest. It maps 0, 1, 2, ... to
places. The numbers come from CuTe's definitions. The emulator, its kernel side and `tests/ptx/layouts.py` state the
same places by other formulas.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest

from ksgen.families.ptx import WgmmaInstruction
from tests.emulator import is_installed, run_cuda
from tests.ptx import render
from tests.ptx.cases import BYTES, TYPES
from tests.ptx.layouts import Layout

needs_emulator = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")

Array = np.ndarray[Any, Any]
Modes = Sequence[tuple[int, int]]
DTYPES = TYPES | BYTES
DRAWS = 3  # of whole numbers from -8 to 8, whose sums are exact in every type

# Of a warp's m16n8 product. Lanes, then a lane's values: element m + 16 k of A, n + 8 k of B, m + 16 n of the sums.
HALVES = ([(4, 32), (8, 1)], [(2, 16), (2, 8), (2, 128)]), ([(4, 16), (8, 1)], [(2, 8), (2, 64)])
EIGHTHS = ([(4, 64), (8, 1)], [(4, 16), (2, 8), (2, 256)]), ([(4, 32), (8, 1)], [(4, 8), (2, 128)])
FRAGMENTS: dict[str, tuple[tuple[Modes, Modes], tuple[Modes, Modes]]] = {
    "f16": HALVES, "bf16": HALVES, "e4m3": EIGHTHS, "e5m2": EIGHTHS,
    "tf32": (([(4, 16), (8, 1)], [(2, 8), (2, 64)]), ([(4, 8), (8, 1)], [(2, 32)])),
}  # fmt: skip
SUMS: tuple[Modes, Modes] = ([(4, 32), (8, 1)], [(2, 16), (2, 8)])

# Of four 8 x 8 matrices: lanes, then bits of a lane's four registers, into the bits of 32 rows of 128.
MATRICES: dict[bool, tuple[Modes, Modes]] = {
    False: ([(32, 32)], [(32, 1), (4, 1024)]),
    True: ([(4, 256), (8, 16)], [(16, 1), (2, 128), (4, 1024)]),  # transposed
}

# Of a warpgroup's m64 product: threads, then a thread's values, into m + 64 n of the sums, or m + 64 k of A.
GROUP_A: dict[str, tuple[Modes, Modes]] = {
    "f16": ([(4, 128), (8, 1), (4, 16)], [(2, 64), (2, 8), (2, 512)]),
    "bf16": ([(4, 128), (8, 1), (4, 16)], [(2, 64), (2, 8), (2, 512)]),
    "tf32": ([(4, 64), (8, 1), (4, 16)], [(2, 8), (2, 256)]),
}


def group_sums(columns: int) -> tuple[Modes, Modes]:
    return [(4, 128), (8, 1), (4, 16)], [(2, 64), (2, 8), (columns // 8, 512)]


def places(modes: Modes) -> Array:
    found = np.zeros(1, np.int64)
    for extent, stride in modes:
        found = (np.arange(extent)[:, None] * stride + found).reshape(-1)
    return found


def owned(layout: tuple[Modes, Modes]) -> Array:
    """Places by thread and value."""
    threads, values = layout
    return places(threads)[:, None] + places(values)


def whole(shape: tuple[int, ...], draw: int, dtype: Any) -> Array:
    return np.random.default_rng([draw, *shape]).integers(-8, 9, shape).astype(dtype)


def by_columns(matrix: Array) -> Array:
    """Element (m, k) at m + rows * k."""
    return matrix.T.reshape(-1)


def words(values: Array) -> Array:
    """Registers of each thread."""
    return np.ascontiguousarray(values).view(np.uint32)


def product_of(a: Array, b: Array) -> Array:
    return a.astype(np.float32) @ b.astype(np.float32).T


# ---- fragments of a warp

MMA = """
extern "C" __global__ void product(const unsigned* a, const unsigned* b, float* sums) {
    const int lane = threadIdx.x;
    const unsigned own[4] = {a[4 * lane], a[4 * lane + 1], a[4 * lane + 2], a[4 * lane + 3]};
    float own_sums[4] = {sums[4 * lane], sums[4 * lane + 1], sums[4 * lane + 2], sums[4 * lane + 3]};
    mma_OPERAND(own_sums, own, b[2 * lane], b[2 * lane + 1]);
    for (int i = 0; i < 4; ++i) sums[4 * lane + i] = own_sums[i];
}
"""


@needs_emulator
@pytest.mark.parametrize("operand", FRAGMENTS)
def test_fragments(operand: str) -> None:
    dtype = np.dtype(DTYPES[operand])
    of_a, of_b = map(owned, FRAGMENTS[operand])
    for draw in range(DRAWS):
        a, b, c = (
            whole((16, 32 // dtype.itemsize), draw, dtype),
            whole((8, 32 // dtype.itemsize), draw, dtype),
            whole((16, 8), draw, np.float32),
        )
        sums = np.ascontiguousarray(by_columns(c)[owned(SUMS)])
        run_cuda(
            render(MMA.replace("OPERAND", operand)),
            "product",
            1,
            32,
            0,
            [words(by_columns(a)[of_a]), words(by_columns(b)[of_b]), sums],
        )
        np.testing.assert_array_equal(sums, by_columns(c + product_of(a, b))[owned(SUMS)])


# ---- matrices in shared memory

MOVES = """
extern "C" __global__ void move(const unsigned* x, const int* rows, unsigned* loaded, const unsigned* stored,
    unsigned* y) {
    unsigned* const s = reinterpret_cast<unsigned*>(shared_memory);
    const int lane = threadIdx.x;
    for (int i = lane; i < 256; i += 32) s[i] = x[i];
    __syncwarp();
    const unsigned row = shared_address(s) + rows[lane];
    unsigned words[4];
    ldmatrix_x4<TRANSPOSED>(words, row);
    for (int i = 0; i < 4; ++i) loaded[4 * lane + i] = words[i];
    for (int i = 0; i < 4; ++i) words[i] = stored[4 * lane + i];
    __syncwarp();
    stmatrix_x4<TRANSPOSED>(row, words);
    __syncwarp();
    for (int i = lane; i < 256; i += 32) y[i] = s[i];
}
"""


@needs_emulator
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_in_shared_memory(transposed: bool) -> None:
    """Rows lie anywhere: half of the memory's rows, in any order. The other half stays as it was."""
    random = np.random.default_rng(5)
    x = random.integers(0, 2**32, (64, 4), np.uint32)
    rows, stored = random.permutation(64)[:32], random.integers(0, 2**32, (32, 4), np.uint32)
    bits = owned(MATRICES[transposed])
    halves = bits.reshape(32, 8, 16)[:, :, 0] // 16  # all elements have 16 bits: their first says where they lie
    assert (bits.reshape(32, 8, 16) == halves[:, :, None] * 16 + np.arange(16)).all()
    loaded, y = np.zeros((32, 4), np.uint32), np.zeros((64, 4), np.uint32)
    text = render(f"constexpr bool TRANSPOSED = {str(transposed).lower()};\n{MOVES}")
    run_cuda(text, "move", 1, 32, 1024, [x, (16 * rows).astype(np.int32), loaded, stored, y])
    np.testing.assert_array_equal(loaded.view(np.uint16), x[rows].view(np.uint16).reshape(-1)[halves])
    expected, written = x.copy(), np.zeros(256, np.uint16)
    written[halves] = stored.view(np.uint16)
    expected[rows] = written.view(np.uint32).reshape(32, 4)
    np.testing.assert_array_equal(y, expected)


# ---- operands of a warpgroup

CODES = {0: 0, 128: 1, 64: 2, 32: 3}  # of a swizzle over so many bytes, in a descriptor's last two bits


def swizzled(byte: Array, span: int) -> Array:
    """CuTe's Swizzle<B, 4, 3>: bits 4 to 4 + B - 1 take in those three above."""
    return byte ^ (byte >> 3 & (span - 16)) if span else byte


@dataclass(frozen=True)
class Canonical:
    """An operand of one instruction: `mn` rows or columns, 32 bytes along k. Strides between its parts are in bytes."""

    mn: int
    item_bytes: int
    span: int  # of the swizzle, in bytes; 0: none
    along_mn: bool
    leading: int
    stride: int

    @property
    def modes(self) -> tuple[Modes, Modes]:
        """Return the modes along mn and along k, in units of 16 bytes."""
        leading, stride, units = self.leading // 16, self.stride // 16, self.span // 16
        if not self.along_mn:  # ((8, n), 2)
            return [(8, units or 1), (self.mn // 8, stride)], [(2, 1 if units else leading)]
        depth, along = 32 // self.item_bytes, self.mn * self.item_bytes // 16
        if not units:  # ((1, n), (8, k))
            return [(along, stride)], [(8, 1), (depth // 8, leading)]
        return [(units, 1), (along // units, leading)], [(8, units), (depth // 8, stride)]

    @property
    def bytes(self) -> Array:
        """Return the first byte of each element (mn, k)."""
        along_mn, along_k = map(places, self.modes)
        inside = np.arange(16 // self.item_bytes) * self.item_bytes
        if self.along_mn:
            found = (16 * along_mn[:, None] + inside).reshape(-1)[:, None] + 16 * along_k
        else:
            found = 16 * along_mn[:, None] + (16 * along_k[:, None] + inside).reshape(-1)
        return swizzled(found, self.span)

    def image(self, matrix: Array) -> Array:
        """The bytes of a matrix (mn, k), and what no element lies in: all ones, which is a NaN."""
        at = self.bytes
        content = np.full(-(-(int(at.max()) + self.item_bytes) // 1024) * 1024, 0xFF, np.uint8)
        content[at[:, :, None] + np.arange(self.item_bytes)] = matrix.view(np.uint8).reshape(
            *matrix.shape, self.item_bytes
        )
        return content

    def descriptor(self, start: int) -> int:
        return start >> 4 | self.leading >> 4 << 16 | self.stride >> 4 << 32 | CODES[self.span] << 62


def canonicals(mn: int, item_bytes: int, along_mn: bool) -> list[Canonical]:
    """List the operand with each swizzle that fits: with adjacent parts, and with gaps between them."""
    found = []
    for span, gap in product((0, 32, 64, 128), (0, 1024)):
        if along_mn and span and mn * item_bytes % span:
            continue
        part = 8 * (span or 16)  # bytes of eight rows
        many = mn // 8 if not along_mn else 32 // item_bytes // 8
        found.append(
            Canonical(mn, item_bytes, span, along_mn, (part + gap) * (1 if along_mn and not span else many), part + gap)
        )
        if along_mn and not span:
            found[-1] = Canonical(mn, item_bytes, span, along_mn, part + gap, (part + gap) * many)
    return found


WGMMA = """
extern "C" __global__ __launch_bounds__(128) void product(const uint4* images, int chunks, const unsigned* a_words,
    unsigned long long a,
                                                          unsigned long long b, float* y) {
    uint4* const s = reinterpret_cast<uint4*>(shared_memory);
    for (int i = threadIdx.x; i < chunks; i += 128) s[i] = images[i];
    fence_proxy_async();
    __syncthreads();
    const unsigned long long base = shared_address(shared_memory) >> 4;
    unsigned own[4];
    for (int i = 0; i < 4; ++i) own[i] = a_words[4 * threadIdx.x + i];
    float sums[SUMS];
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
    wgmma_hold(own);
    wgmma_hold(sums);
    wgmma_fence();
    CALL(sums, A, b + base, true);
    wgmma_commit();
    wgmma_wait<0>();
    wgmma_hold(sums);
    for (int i = 0; i < SUMS; ++i) y[threadIdx.x * SUMS + i] = sums[i];
}
"""


def wgmma_text(operand: str, columns: int, registers: bool, *flags: bool) -> str:
    wgmma = WgmmaInstruction(operand, columns, a_in_registers=registers)
    call = wgmma.name + (f"<{', '.join(str(int(flag)) for flag in flags)}>" if wgmma.transposed else "")
    kernel = WGMMA.replace("CALL", call).replace(" A,", " own," if registers else " a + base,")
    return render(f"constexpr int SUMS = {wgmma.sums};\n{kernel}", wgmma=wgmma)


def run_wgmma(text: str, images: Array, a_words: Array, a: int, b: int, columns: int) -> Array:
    y = np.zeros((128, columns // 2), np.float32)
    args = [images, np.int32(images.size // 16), a_words, np.uint64(a), np.uint64(b), y]
    run_cuda(text, "product", 1, 128, images.size, args, target="sm_90a")
    return y


OPERANDS = [
    *((operand, False, False, 48) for operand in ("f16", "tf32", "e4m3")),
    *(("bf16", along_a, along_b, 64) for along_a, along_b in ((True, False), (False, True), (True, True))),
    *(("e5m2", False, False, columns) for columns in (8, 48)),
    *((operand, False, False, columns) for operand in ("f16", "tf32", "e4m3") for columns in (8, 136, 256)),
    *(("f16", along_a, along_b, 256) for along_a, along_b in ((True, False), (False, True), (True, True))),
]


@needs_emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize(("operand", "along_m", "along_n", "columns"), OPERANDS)
def test_operands_of_a_warpgroup_in_shared_memory(operand: str, along_m: bool, along_n: bool, columns: int) -> None:
    dtype = np.dtype(DTYPES[operand])
    text, of_sums = wgmma_text(operand, columns, False, along_m, along_n), owned(group_sums(columns))
    a, b = whole((64, 32 // dtype.itemsize), 0, dtype), whole((columns, 32 // dtype.itemsize), 1, dtype)
    of_a, of_b = canonicals(64, dtype.itemsize, along_m), canonicals(columns, dtype.itemsize, along_n)
    for own_a, own_b in [*((each, of_b[0]) for each in of_a), *((of_a[-1], each) for each in of_b[1:])]:
        images = np.concatenate([own_a.image(a), own_b.image(b)])
        start = own_a.image(a).size
        got = run_wgmma(
            text, images, np.zeros((128, 4), np.uint32), own_a.descriptor(0), own_b.descriptor(start), columns
        )
        np.testing.assert_array_equal(got, by_columns(product_of(a, b))[of_sums], err_msg=f"{own_a} {own_b}")


@needs_emulator
@pytest.mark.exhaustive
@pytest.mark.parametrize("operand", GROUP_A)
def test_operands_of_a_warpgroup_in_registers(operand: str) -> None:
    dtype, columns = np.dtype(DTYPES[operand]), 24
    text = wgmma_text(operand, columns, True, False)
    own_b = canonicals(columns, dtype.itemsize, False)[0]
    for draw in range(DRAWS):
        a, b = whole((64, 32 // dtype.itemsize), draw, dtype), whole((columns, 32 // dtype.itemsize), draw, dtype)
        got = run_wgmma(
            text, own_b.image(b), words(by_columns(a)[owned(GROUP_A[operand])]), 0, own_b.descriptor(0), columns
        )
        np.testing.assert_array_equal(got, by_columns(product_of(a, b))[owned(group_sums(columns))])


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
def test_the_layouts_of_the_ptx_tests_are_these(item_bytes: int) -> None:
    """The first instruction's operand of each of them."""
    depth, compared = 32 // item_bytes, 0
    for mn, span, along_mn in product((8, 64, 256), (0, 32, 64, 128), (False, True) if item_bytes == 2 else (False,)):
        if along_mn and span and mn * item_bytes % span:
            continue
        k = max(depth, 0 if along_mn else span // item_bytes)
        stated = Layout(mn, k, item_bytes, span, along_mn)
        own = Canonical(mn, item_bytes, span, along_mn, stated.leading, stated.stride)
        offsets = [[stated.offset(row, column) for column in range(depth)] for row in range(mn)]
        np.testing.assert_array_equal(own.bytes, offsets, err_msg=str(stated))
        assert stated.descriptor(2048) == own.descriptor(2048)
        compared += mn * depth
    assert compared >= 328 * 4 * depth
