"""The emulator runs right kernels right, and catches each kind of wrong one at its line."""

import os
import shutil
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.emulator import SimtError, is_installed, run_cuda
from tests.emulator.broken import BROKEN, FAULT, Broken
from tests.emulator.build import _digest, build_runtime
from tests.ptx import with_snippets

pytestmark = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "g++")), reason="no g++ to run CUDA text with")

BUILDS = [
    pytest.param(name, marks=pytest.mark.skipif(not is_installed(name), reason=f"g++ cannot link sanitize={name!r}"))
    for name in ("none", "address", "race")
]
THREADS = 64

# Y = X W^T in tiles of 16 x 16, with two stages in flight, as emitted kernels do it.
TILED = """
constexpr int TILE = 16;
constexpr int PITCH = TILE + 4;  // keeps 16-byte copies aligned

DEVICE void load_stage(float* x_tile, float* w_tile, const float* x, const float* w, int rows_left, int depth) {
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 4;
  copy_async_16(x_tile + row * PITCH + column, x + row * depth + column, row < rows_left);
  copy_async_16(w_tile + row * PITCH + column, w + row * depth + column, true);
}

extern "C" __global__ __launch_bounds__(64, 2)
void multiply(const float* __restrict__ x, const float* __restrict__ w, float* __restrict__ y, long long rows,
              int depth) {
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* const tiles = reinterpret_cast<float*>(shared_memory);
  const int left = static_cast<int>(min(rows - static_cast<long long>(blockIdx.x) * TILE, 16ll));
  x += static_cast<long long>(blockIdx.x) * TILE * depth;
  w += blockIdx.y * TILE * depth;
  load_stage(tiles, tiles + TILE * PITCH, x, w, left, depth);
  copy_async_commit();
  float4 sum = make_float4(0, 0, 0, 0);
  const int row = threadIdx.x / 4, column = threadIdx.x % 4 * 4;
  for (int k = 0; k < depth; k += TILE) {
    const float* stage = tiles + k / TILE % 2 * 2 * TILE * PITCH;
    float* next = tiles + (k / TILE + 1) % 2 * 2 * TILE * PITCH;
    if (k + TILE < depth) load_stage(next, next + TILE * PITCH, x + k + TILE, w + k + TILE, left, depth);
    copy_async_commit();
    copy_async_wait<1>();
    __syncthreads();
    #pragma unroll
    for (int l = 0; l < TILE; ++l) {
      const float* weights = stage + TILE * PITCH + column * PITCH + l;
      const float value = stage[row * PITCH + l];
      sum.x = fmaf(value, weights[0], sum.x);
      sum.y = fmaf(value, weights[PITCH], sum.y);
      sum.z = fmaf(value, weights[2 * PITCH], sum.z);
      sum.w = fmaf(value, weights[3 * PITCH], sum.w);
    }
    __syncthreads();  // before the next round overwrites the tiles
  }
  if (row >= left) return;
  y += (static_cast<long long>(blockIdx.x) * TILE + row) * gridDim.y * TILE;
  *reinterpret_cast<float4*>(y + blockIdx.y * TILE + column) = sum;
}
"""
TILED_SHARED_BYTES = 2 * 2 * 16 * 20 * 4


def floats(count: int) -> np.ndarray[Any, Any]:
    return np.full(count, np.nan, np.float32)


def kernel_text(body: str, before: str = "") -> str:
    """A kernel with `body`, for which there are x, y, the shared floats s, and i = threadIdx.x. It begins at line 6."""
    return f"""{before}
extern "C" __global__ void kernel(const float* __restrict__ x, float* __restrict__ y) {{
  extern __shared__ __align__(16) unsigned char shared_memory[];
  float* const s = reinterpret_cast<float*>(shared_memory);
  const int i = threadIdx.x;
{body}
}}
"""


def run_body(
    body: str, sanitize: str = "none", *, before: str = "", shared_bytes: int = 4 * THREADS, **options: Any
) -> Any:
    """One block of 64 threads running `body` with x = 0, 1, 2, ... and 64 shared floats; gives y, which starts as
    NaN.
    """
    y = floats(THREADS)
    args: list[Any] = [np.arange(THREADS, dtype=np.float32), y]
    run_cuda(with_snippets(kernel_text(body, before)), "kernel", 1, THREADS, shared_bytes, args, sanitize, **options)
    return y


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", BUILDS)
@pytest.mark.parametrize("order", ["forward", "reverse", 7])
def test_tiled_kernel_is_right(sanitize: str, order: str | int) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal((41, 64), np.float32), rng.standard_normal((32, 64), np.float32)
    y = np.full((41, 32), np.nan, np.float32)
    args: list[Any] = [x, w, y, 41, np.int32(64)]
    run_cuda(with_snippets(TILED), "multiply", (3, 2), 64, TILED_SHARED_BYTES, args, sanitize, order=order)
    np.testing.assert_allclose(y, x.astype(np.float64) @ w.T.astype(np.float64), atol=1e-5)


@pytest.mark.parametrize("sanitize", BUILDS)
def test_tiled_kernel_with_too_little_shared_memory_is_caught(sanitize: str) -> None:
    x, w, y = np.ones((16, 32), np.float32), np.ones((16, 32), np.float32), np.ones((16, 16), np.float32)
    args = [x, w, y, 16, np.int32(32)]
    with pytest.raises(
        SimtError, match="copy_async_16 to byte 5088 of the dynamic shared memory, which has 5088"
    ) as caught:
        run_cuda(with_snippets(TILED), "multiply", 1, 64, TILED_SHARED_BYTES - 32, args, sanitize)
    assert caught.value.kind == "out-of-bounds"
    called_from = [TILED.splitlines()[line - 1] for line in caught.value.callers]
    assert any("copy_async_16(w_tile" in line for line in called_from)
    assert any("if (k + TILE < depth) load_stage" in line for line in called_from)


def test_tiled_kernel_without_its_wait_gives_nan() -> None:
    x, y = np.ones((16, 16), np.float32), np.ones((16, 16), np.float32)
    run_cuda(
        with_snippets(TILED.replace("copy_async_wait<1>();", "")),
        "multiply",
        1,
        64,
        TILED_SHARED_BYTES,
        [x, x, y, 16, np.int32(16)],
    )
    assert np.isnan(y).all()


@pytest.mark.skipif(not is_installed("race"), reason="g++ cannot link sanitize='race'")
@pytest.mark.parametrize("comment", ["", "  // before the next round overwrites the tiles"])
def test_tiled_kernel_without_either_barrier_is_a_race(comment: str) -> None:
    x, y = np.ones((16, 64), np.float32), np.ones((16, 16), np.float32)
    broken = TILED.replace(f"    __syncthreads();{comment}\n", f"    {comment}\n", 1)
    assert broken != TILED
    with pytest.raises(SimtError, match=r"which thread .* with no barrier between") as caught:
        run_cuda(with_snippets(broken), "multiply", 1, 64, TILED_SHARED_BYTES, [x, x, y, 16, np.int32(64)], "race")
    assert caught.value.kind == "race"


def in_rings(builds: list[Any]) -> Iterator[tuple[Any, list[Any]]]:
    """A mistake is looked for by its first build in the quick ring, and by the others later."""
    for number, build in enumerate(builds):
        yield build, [pytest.mark.slow] if number else []


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("broken", "sanitize"),
    [
        pytest.param(broken, *build.values, marks=[*build.marks, *later], id=f"{broken.name}-{build.values[0]}")
        for broken in BROKEN
        for build, later in in_rings([build for build in BUILDS if build.values[0] in broken.builds])
    ],
)
def test_broken_kernel_is_caught(broken: Broken, sanitize: str) -> None:
    with pytest.raises(SimtError, match=broken.message) as caught:
        run_body(broken.body, sanitize, before=broken.before, **broken.options)
    assert caught.value.kind == broken.kind
    lines = kernel_text(broken.body, broken.before).splitlines()
    marked = [number for number, line in enumerate(lines, 1) if FAULT in line]
    if marked:
        assert {caught.value.line, *caught.value.callers} & set(marked)


@pytest.mark.skipif(not is_installed("race"), reason="g++ cannot link sanitize='race'")
def test_endless_loop_is_ended_from_outside_where_signals_are_held_back() -> None:
    with pytest.raises(SimtError, match="timeout: still running after 1 s"):
        run_body("while (*(volatile float*)s != 1) continue;", "race", timeout_s=1)


def test_error_names_block_and_thread() -> None:
    source = 'extern "C" __global__ void kernel(float* y) {\n  y[blockIdx.x * 32 + threadIdx.x] = 1;\n}\n'
    with pytest.raises(SimtError) as caught:
        run_cuda(source, "kernel", 4, 32, 0, [floats(3 * 32)])
    assert (caught.value.line, caught.value.block, caught.value.thread) == (2, 3, 0)
    assert str(caught.value).endswith("(line 2, block 3, thread 0)")


def test_shared_memory_starts_as_nan_in_every_block() -> None:
    source = """
extern "C" __global__ void kernel(float* y) {
  extern __shared__ float s[];
  __shared__ float t[1];
  y[2 * blockIdx.x] = s[0];
  y[2 * blockIdx.x + 1] = t[0];
  s[0] = t[0] = 1;
}
"""
    y = np.zeros(6, np.float32)
    run_cuda(source, "kernel", 3, 1, 4, [y])
    assert np.isnan(y).all()


@pytest.mark.parametrize("sanitize", BUILDS)
def test_copies_land_at_the_wait_for_their_group(sanitize: str) -> None:
    body = """
s[i] = 5;
copy_async_4(s + i, x + i, true);
copy_async_commit();
const float before = s[i];
copy_async_4(s + 64 + i, x + 1000000, false);
copy_async_commit();
copy_async_wait<1>();
const float first = s[i], second = s[64 + i];
copy_async_wait<0>();
y[i] = before == before ? -1 : second == second ? -2 : first + s[64 + i];
"""
    np.testing.assert_array_equal(run_body(body, sanitize, shared_bytes=512), np.arange(THREADS))


def test_static_shared_memory_of_a_template_is_refused() -> None:
    template = "template <int N> __device__ float f(int i) { __shared__ float t[N]; t[i] = i; return t[i]; }"
    with pytest.raises(SimtError, match=r"__shared__ in a template, .*: f<64>\(int\)::t"):
        run_body("y[i] = f<64>(i);", before=template)


def test_copy_that_is_not_committed_never_lands() -> None:
    assert np.isnan(run_body("copy_async_4(s + i, x + i, true);\ncopy_async_wait<0>();\ny[i] = s[i];")).all()


def test_order_dependent_result_shows() -> None:
    body = "s[i] = i;\ny[i] = s[63 - i];"
    results = {order: run_body(body, order=order).tobytes() for order in ("forward", "reverse", 1, 2)}
    assert len(set(results.values())) == 4
    assert run_body(body, order=1).tobytes() == results[1]


@pytest.mark.parametrize("sanitize", BUILDS)
def test_warp_functions(sanitize: str) -> None:
    body = """
float sum = x[i];
for (int bits = 16; bits > 0; bits /= 2) sum += __shfl_xor_sync(0xffffffff, sum, bits);
const int up = __shfl_up_sync(0xffffffff, i, 1), down = __shfl_down_sync(0xffffffff, i, 1, 8);
const double first = __shfl_sync(0xffffffff, i + 0.5, 0);
const bool votes = __ballot_sync(0xffffffff, i % 32 < 3) == 7 && __any_sync(0xffffffff, i % 32 == 9) &&
                   !__all_sync(0xffffffff, i % 32 == 9) && __all_sync(0xffffffff, i >= 0);
const bool moves = up == (i % 32 ? i - 1 : i) && down == (i % 8 == 7 ? i : i + 1) && first == i / 32 * 32 + 0.5;
if (i % 32 < 8) sum += __shfl_xor_sync(0xff, 0.0f, 3);
s[i] = votes && moves ? sum : -1;
__syncwarp();
y[i] = s[i ^ 1];
"""
    expected = np.repeat(np.arange(64).reshape(2, 32).sum(axis=1), 32)
    np.testing.assert_array_equal(run_body(body, sanitize), expected)


@pytest.mark.parametrize("sanitize", BUILDS)
def test_named_barriers_join_producers_and_consumers(sanitize: str) -> None:
    body = """
for (int round = 0; round < 3; ++round) {
  if (i < 32) {
    barrier_sync(1, 64);
    s[i] = i + round;
    barrier_arrive(2, 64);
  } else {
    barrier_arrive(1, 64);
    barrier_sync(2, 64);
    y[i] = s[63 - i];
  }
}
"""
    np.testing.assert_array_equal(run_body(body, sanitize)[32:], np.arange(31, -1, -1) + 2)


@pytest.mark.parametrize("sanitize", BUILDS)
def test_atomic_add(sanitize: str) -> None:
    y = run_body("if (i == 0) y[0] = 0;\n__syncthreads();\natomicAdd(y, x[i]);", sanitize)
    assert y[0] == np.arange(THREADS).sum()


CONVERSIONS = """
extern "C" __global__ void widen(const unsigned short* bits, float* half, float* bfloat16) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  half[i] = half_to_float(bits[i]);
  bfloat16[i] = simt::bfloat16_to_float(bits[i]);
}
extern "C" __global__ void narrow(const float* x, unsigned short* half, unsigned short* bfloat16) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  half[i] = float_to_half(x[i]);
  bfloat16[i] = float_to_bfloat16(x[i]);
}
"""


def test_every_16_bit_value_widens_exactly() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    half, bfloat16 = floats(65536), floats(65536)
    run_cuda(with_snippets(CONVERSIONS), "widen", 64, 1024, 0, [bits, half, bfloat16])
    np.testing.assert_array_equal(half, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bfloat16, bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_narrowing_rounds_to_nearest_even() -> None:
    rng = np.random.default_rng(1)
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    ties = (halves[1:] + halves[:-1]) / 2
    near = np.concatenate([np.nextafter(ties, np.float32(0)), ties, np.nextafter(ties, np.float32(np.inf))])
    special = np.array([65504, 65519.996, 65520, 1e6, np.inf, np.nan, 0, 2.0**-25, 1e-45, 3.4e38], np.float32)
    x = np.concatenate([halves, near, special, rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)])
    x = np.concatenate([x, -x])
    x = np.pad(x, (0, -len(x) % 1024))
    half, bfloat16 = np.zeros(len(x), np.uint16), np.zeros(len(x), np.uint16)
    run_cuda(with_snippets(CONVERSIONS), "narrow", len(x) // 1024, 1024, 0, [x, half, bfloat16])
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(half, np.where(np.isnan(x), 0x7FFF, x.astype(np.float16).view(np.uint16)))
        expected = x.astype(ml_dtypes.bfloat16).view(np.uint16)
    np.testing.assert_array_equal(bfloat16, np.where(np.isnan(x), 0x7FFF, expected))


TYPES = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T>
__device__ void all(const T* x, const T* y, const T* z, T* results) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, n = gridDim.x * blockDim.x;
  results[i] = x[i] + y[i];
  results[n + i] = __hsub(x[i], y[i]);
  results[2 * n + i] = x[i] * y[i];
  results[3 * n + i] = x[i] / y[i];
  results[4 * n + i] = __hfma(x[i], y[i], z[i]);
}
extern "C" __global__ void halves(const __half* x, const __half* y, const __half* z, __half* results) { all(x, y, z,
    results); }
extern "C" __global__ void bfloats(const __nv_bfloat16* x, const __nv_bfloat16* y, const __nv_bfloat16* z,
                                   __nv_bfloat16* results) {
  all(x, y, z, results);
}
"""


@pytest.mark.parametrize(("entry", "dtype"), [("halves", np.float16), ("bfloats", ml_dtypes.bfloat16)])
def test_16_bit_arithmetic_rounds_once(entry: str, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    count = 16384
    x, y, z = ((rng.standard_normal(count) * 2.0 ** rng.integers(-9, 7, count)).astype(dtype) for _ in range(3))
    # they nearly cancel
    z[: count // 2] = (-x[: count // 2].astype(np.float64) * y[: count // 2].astype(np.float64)).astype(dtype)
    y[:1024] = np.ldexp(y[:1024].astype(np.float32), -8 if dtype == np.float16 else -60).astype(dtype)  # far apart
    results = np.zeros((5, count), np.uint16)
    run_cuda(TYPES, entry, count // 1024, 1024, 0, [*(each.view(np.uint16) for each in (x, y, z)), results])
    wide = [each.astype(np.float32) for each in (x, y)]
    with np.errstate(all="ignore"):
        expected = [wide[0] + wide[1], wide[0] - wide[1], wide[0] * wide[1], wide[0] / wide[1]]
        for found, exact in zip(results, expected, strict=False):
            np.testing.assert_array_equal(found, exact.astype(dtype).view(np.uint16))
        fused = [Fraction(float(a)) * Fraction(float(b)) + Fraction(float(c)) for a, b, c in zip(x, y, z, strict=True)]
        for found, value in zip(results[4].view(dtype)[:4096].astype(np.float64), fused[:4096], strict=True):
            if np.isfinite(found):
                near = np.array([found], dtype)
                gaps = [abs(Fraction(float(np.nextafter(near, dtype(side))[0])) - value) for side in (np.inf, -np.inf)]
                assert abs(Fraction(float(found)) - value) <= min(gaps)


ARGUMENTS = """
extern "C" __global__ void kernel(double* y, const float* nothing, long long wide, int narrow, float real,
                                  unsigned short bits) {
  y[0] = nothing == nullptr;
  y[1] = wide;
  y[2] = narrow;
  y[3] = real;
  y[4] = bits;
}
"""
GOOD_ARGUMENTS = (None, 2**40, np.int32(-3), np.float32(0.5), np.uint16(7))


def test_arguments_keep_their_types() -> None:
    y = np.zeros(5)
    run_cuda(ARGUMENTS, "kernel", 1, 1, 0, [y, *GOOD_ARGUMENTS])
    assert y.tolist() == [1, 2**40, -3, 0.5, 7]


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (2, np.int32(1), "argument 2: the kernel takes a 8-byte value, given is a 4-byte value"),
        (3, 1, "argument 3: the kernel takes a 4-byte value, given is a 8-byte value"),
        (1, 0, "argument 1: the kernel takes a 8-byte pointer, given is a 8-byte value"),
        (2, None, "argument 2: the kernel takes a 8-byte value, given is a 8-byte pointer"),
    ],
)
def test_argument_of_another_type_is_caught(position: int, value: object, message: str) -> None:
    args: list[Any] = [np.zeros(5), *GOOD_ARGUMENTS]
    args[position] = value
    with pytest.raises(SimtError, match=message):
        run_cuda(ARGUMENTS, "kernel", 1, 1, 0, args)


def test_missing_argument_is_caught() -> None:
    with pytest.raises(SimtError, match="the kernel takes 6 arguments, given are 1"):
        run_cuda(ARGUMENTS, "kernel", 1, 1, 0, [np.zeros(5)])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"entry": "other"}, ValueError, "entry='other'; the text has kernel"),
        ({"block": 2000}, ValueError, "block=.*; at most 1024 threads"),
        ({"grid": 0}, ValueError, "grid=0; at least 1"),
        ({"shared_bytes": 1 << 20}, ValueError, "shared_bytes=1048576; from 0 to 232448"),
        ({"args": [np.zeros((4, 4))[:, 1]]}, ValueError, "argument 0: an array of strides .* is not contiguous"),
        ({"args": [1.0]}, TypeError, "argument 0: 1.0; arrays, None, NumPy scalars and ints are accepted"),
        ({"sanitize": "memory"}, ValueError, "sanitize='memory'; accepted are 'none', 'address', 'race'"),
        ({"order": "random"}, ValueError, "order='random'; 'forward', 'reverse' or a seed"),
    ],
)
def test_launch_that_makes_no_sense_is_refused(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    launch: dict[str, Any] = {"entry": "kernel", "grid": 1, "block": 1, "shared_bytes": 0, "args": []}
    with pytest.raises(error, match=message):
        run_cuda(ARGUMENTS, **{**launch, **changed})


COPY = """
extern "C" __global__ void copy(const float* x, float* y, unsigned* alignment) {
  y[threadIdx.x] = x[threadIdx.x];
  alignment[0] = reinterpret_cast<unsigned long long>(x) % 16;
}
extern "C" __global__ void spoil(float* x) { x[threadIdx.x] = 0; }
"""


def test_slice_keeps_its_misalignment() -> None:
    base, y, alignment = np.arange(36, dtype=np.float32), floats(32), np.zeros(1, np.uint32)
    x = base[3:35]
    run_cuda(COPY, "copy", 1, 32, 0, [x, y, alignment], "address" if is_installed("address") else "none")
    np.testing.assert_array_equal(y, x)
    assert alignment[0] == x.ctypes.data % 16


def test_array_given_twice_is_one_buffer_and_overlaps_are_refused() -> None:
    x, alignment = np.arange(32, dtype=np.float32), np.zeros(1, np.uint32)
    run_cuda(COPY, "copy", 1, 32, 0, [x, x, alignment])
    np.testing.assert_array_equal(x, np.arange(32))
    with pytest.raises(ValueError, match="argument 1 overlaps another"):
        run_cuda(COPY, "copy", 1, 32, 0, [x, x[1:], alignment])


def test_read_only_array_is_read_only() -> None:
    x = np.ones(32, np.float32)
    x.flags.writeable = False
    with pytest.raises(SimtError, match="write to byte 0 of argument 0") as caught:
        run_cuda(COPY, "spoil", 1, 32, 0, [x])
    assert caught.value.kind == "read-only"
    assert caught.value.line == 6


BOUNDED = """
constexpr int WARPS = 2;
template <int N> struct Size { static constexpr int THREADS = 32 * N; };
extern "C" __global__ __launch_bounds__(Size<WARPS>::THREADS, (WARPS > 1) ? 2 : 1) void bounded(float* y) {
    y[threadIdx.x] = 1; }
__launch_bounds__(64, 1, 2) __global__ void clustered(float* y) { y[threadIdx.x] = 1; }
extern "C" __global__ void __cluster_dims__(WARPS, 1, 1) pairs(float* y) { y[blockIdx.x] = 1; }
extern "C" __global__ void __cluster_dims__(1, 2) columns(float* y) { y[blockIdx.x] = 1; }
extern "C" __global__ void free_of_bounds(float* y) { y[threadIdx.x] = 1; }
"""


@pytest.mark.parametrize(
    ("entry", "block", "cluster", "says"),
    [
        ("bounded", 64, 1, ""),
        ("bounded", 96, 1, "96 threads a block; the kernel's __launch_bounds__ say 64"),
        ("clustered", 64, 2, ""),
        ("clustered", 64, 4, "clusters of 4 blocks; the kernel's __launch_bounds__ say 2"),
        ("pairs", 1024, 2, ""),
        ("pairs", 1, 1, r"clusters of \(1, 1, 1\) blocks; the kernel's __cluster_dims__ say \(2, 1, 1\)"),
        ("columns", 1, 2, r"the kernel's __cluster_dims__ say \(1, 2, 1\)"),
        ("free_of_bounds", 1024, 4, ""),
    ],
)
def test_launch_keeps_the_bounds_of_its_kernel(entry: str, block: int, cluster: int, says: str) -> None:
    y = floats(1024)
    if not says:
        run_cuda(BOUNDED, entry, 4, block, 0, [y], cluster=cluster)
        assert y[0] == 1
        return
    with pytest.raises(SimtError, match=says) as caught:
        run_cuda(BOUNDED, entry, 4, block, 0, [y], cluster=cluster)
    assert caught.value.kind == "launch"


def test_a_plain_launch_takes_the_clusters_of_its_kernel() -> None:
    y = floats(1024)
    run_cuda(BOUNDED, "pairs", 4, 1, 0, [y])
    assert (y == 1).tolist() == [True] * 4 + [False] * 1020
    with pytest.raises(SimtError, match="3 blocks along x, in clusters of 2") as caught:
        run_cuda(BOUNDED, "pairs", 3, 1, 0, [y])
    assert caught.value.kind == "launch"
    with pytest.raises(ValueError, match="cluster=9; 1 to 8 blocks"):
        run_cuda(BOUNDED, "pairs", 4, 1, 0, [y], cluster=9)


@pytest.mark.parametrize("declared", [16, 128, 1024])
@pytest.mark.parametrize("before", [0, 4])
def test_dynamic_shared_memory_begins_where_its_declaration_lets_it(before: int, declared: int) -> None:
    source = f"""
constexpr int ALIGNMENT = {declared};
extern __shared__ __align__(ALIGNMENT) unsigned char shared_memory[];
extern "C" __global__ void kernel(unsigned long long* y) {{
  {"__shared__ float still[1]; still[0] = 1; y[2] = __cvta_generic_to_shared(still);" * (before > 0)}
  y[0] = __cvta_generic_to_shared(shared_memory);
  y[1] = reinterpret_cast<unsigned long long>(shared_memory) % 1024;
}}
"""
    y = np.zeros(3, np.uint64)
    run_cuda(source, "kernel", 1, 1, 64, [y])
    start = 1024 + (declared if before else 0)
    assert y.tolist() == [start, start % 1024, 1024 if before else 0]


def test_a_title_makes_no_other_build() -> None:
    """A change of one template's comment keeps the builds of its sources."""
    texts = (
        "// old 1\nint a;",
        "// new 2\nint a;",
        "// old 1\nint b;",
        "// old 1\n// more\nint a;",
        "// old 1\n// less\nint a;",
    )
    digests = [_digest(text, "none") for text in texts]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert _digest("// old 1\nint a;", "race") != digests[0]


def test_text_is_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = build_runtime("none").parent
    shutil.copytree(runtime, tmp_path / "cache" / runtime.name)
    monkeypatch.setenv("KSGEN_SIMT_CACHE", str(tmp_path / "cache"))
    x = np.ones(32, np.float32)
    run_cuda(COPY, "spoil", 1, 32, 0, [x])
    entries = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    run_cuda(COPY, "copy", 1, 32, 0, [x, floats(32), np.zeros(1, np.uint32)])
    assert len(entries) == 2  # the text's, which has both kernels, and the runtime's, which was there
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == entries


def test_printf_reaches_the_caller(capsys: pytest.CaptureFixture[str]) -> None:
    run_body('if (i == 3) printf("thread %d\\n", i);')
    assert capsys.readouterr().out == "thread 3\n"
