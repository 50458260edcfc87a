"""Launches of the kernels, each with what must come out: for the emulator, for nvcc and for a GPU."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import ml_dtypes
import numpy as np

from ksgen import reference
from ksgen.families.ptx import WgmmaInstruction
from ksgen.spec import STORAGES
from ksgen.spec.precision import OPERANDS
from tests.emulator import TensorMap, run_cuda
from tests.ptx import cluster_kernels, kernels, render
from tests.ptx.layouts import Layout, swizzled

TYPES = {"f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype(np.float32)}
BYTES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}

NAMED = """
extern "C" __global__ void named(float* y) {
    float* const s = reinterpret_cast<float*>(shared_memory);
    if (threadIdx.x < 32) {
        s[threadIdx.x] = threadIdx.x;
        barrier_arrive(1, 64);
    } else {
        barrier_sync(1, 64);
        y[threadIdx.x - 32] = s[63 - threadIdx.x];
    }
}
"""


@dataclass(frozen=True, eq=False)
class Case:
    """One launch. `check` looks at the arguments after it."""

    name: str
    kernel: str  # without the functions that it uses
    entry: str
    target: str  # the first that has its instructions
    block: int
    shared_bytes: int
    args: list[Any]
    check: Callable[[], None]
    grid: int = 1
    early: bool = False
    words: dict[str, Any] = field(default_factory=dict)  # of `render`
    misspelled: tuple[str, str] | None = None  # one place of the functions, and what stands there instead
    before: list[Any] = field(default_factory=list)  # what the arrays hold before a launch

    def __post_init__(self) -> None:
        self.before.extend(array.copy() for array in self.arrays[len(self.before) :])

    @property
    def arrays(self) -> list[Any]:
        given = (arg.array if isinstance(arg, TensorMap) else arg for arg in self.args)
        return [each for each in given if isinstance(each, np.ndarray)]

    @cached_property
    def text(self) -> str:
        text = render(self.kernel, **self.words)
        if self.misspelled is None:
            return text
        assert text.count(self.misspelled[0]) == 1, f"{text.count(self.misspelled[0])} times {self.misspelled[0]}"
        return text.replace(*self.misspelled)

    def emulate(self, sanitize: str = "none", **options: Any) -> None:
        """Run the source that the case's target compiles, on arrays with their first values."""
        for array, before in zip(self.arrays, self.before, strict=True):
            array[...] = before
        text = f"#define __CUDA_ARCH__ {re.sub('[^0-9]', '', self.target)}0\n{self.text}"
        launched = (text, self.entry, self.grid, self.block, self.shared_bytes, self.args, sanitize)
        run_cuda(*launched, early=self.early, **{"target": self.target} | options)
        self.check()

    def changed(self, was: str, becomes: str, **launch: Any) -> "Case":
        """Return the case with one place of the kernel changed, and with these facts of the launch."""
        assert self.kernel.count(was) == 1, self.kernel.count(was)
        return replace(self, kernel=self.kernel.replace(was, becomes), **launch)


def normal(shape: tuple[int, ...], operand: str = "tf32", seed: int = 0) -> Any:
    """Random operands that the instruction takes exactly."""
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    if operand == "tf32":
        return (values.view(np.uint32) & 0xFFFFE000).view(np.float32)
    return values.astype(TYPES[operand])


def words(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint32)


def exact(x: Any, w: Any) -> Any:
    return x.astype(np.float64) @ w.astype(np.float64).T


def _close(y: Any, expected: Any, tolerance: float = 1e-5) -> Callable[[], None]:
    return lambda: np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance)


def _equal(y: Any, expected: Any) -> Callable[[], None]:
    return lambda: np.testing.assert_array_equal(y, expected)


def matrices(load: bool, store: bool) -> Case:
    """8 x 8 matrices through registers, transposed by the load or the store."""
    text = f"constexpr bool TRANSPOSES_LOAD = {int(load)}, TRANSPOSES_STORE = {int(store)};\n" + kernels.MATRICES
    x, y = np.arange(256, dtype=np.uint16), np.zeros(256, np.uint16)
    expected = x.reshape(4, 8, 8) if load == store else x.reshape(4, 8, 8).transpose(0, 2, 1)
    return Case(
        f"matrices {load=} {store=}", text, "matrices", "sm_90", 32, 512, [x, y], _equal(y.reshape(4, 8, 8), expected)
    )


def mma_kernel(operand: str) -> str:
    return kernels.MMA.replace("OPERAND", operand)


def mma_text(operand: str) -> str:
    return render(mma_kernel(operand))


def mma(operand: str) -> Case:
    """One warp's product, added to what is there."""
    depth = 8 if operand == "tf32" else 16
    a, b = normal((16, depth), operand), normal((8, depth), operand, 1)
    y = np.random.default_rng(2).standard_normal((16, 8), np.float32)
    check = _close(y, y + exact(a, b), 2e-6)
    return Case(f"mma {operand}", mma_kernel(operand), "product", "sm_80", 32, 0, [words(a), words(b), y], check)


def whole(shape: tuple[int, ...], operand: str, seed: int = 0) -> Any:
    """Whole numbers in eight bits, of whose products' sums tensor cores cut nothing off."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float32).astype(BYTES[operand])


def mma_bytes(operand: str) -> Case:
    """The same of floats in eight bits."""
    a, b, y = whole((16, 32), operand), whole((8, 32), operand, 1), whole((16, 8), operand, 2).astype(np.float32)
    check = _equal(y, y + exact(a, b))
    return Case(f"mma {operand}", mma_kernel(operand), "product", "sm_89", 32, 0, [words(a), words(b), y], check)


def narrow() -> Case:
    """Rounding to 16-bit pairs, to bfloat16 and to tf32, with ties, subnormals, overflow and NaN of any payload."""
    special = np.array(
        [0, 65519.996, 65520, np.inf, 2.0**-25, 3.4e38, 1 + 2.0**-11, 1 + 2.0**-11 + 2.0**-20], np.float32
    )
    ties = (np.array([1, 2, 0x7F, 0x80, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F], np.uint32) << 16 | 0x8000).view(np.float32)
    nans = np.array(
        [0x7F800001, 0x7FBFFFFF, 0x7FC00000, 0x7FC12345, 0x7FFFFFFF, 0xFF800001, 0xFFC00000, 0xFFFFFFFF], np.uint32
    )
    rng = np.random.default_rng(1)
    many = (rng.standard_normal(1000) * 2.0 ** rng.integers(-30, 17, 1000)).astype(np.float32)
    x = np.concatenate([special, ties, nans.view(np.float32), many])
    f16, bf16, tf32 = (np.zeros(1024, np.uint32) for _ in range(3))
    one = np.zeros(1024, np.uint16)

    def check() -> None:
        def narrowed(values: Any, dtype: Any) -> Any:
            with np.errstate(over="ignore", invalid="ignore"):
                return np.where(np.isnan(values), 0x7FFF, values.astype(dtype).view(np.uint16))

        for packed, dtype in ((f16, TYPES["f16"]), (bf16, TYPES["bf16"])):
            np.testing.assert_array_equal(packed & 0xFFFF, narrowed(x, dtype))
            np.testing.assert_array_equal(packed >> 16, narrowed(-x, dtype))
        np.testing.assert_array_equal(one, narrowed(x, TYPES["bf16"]))
        rounded = np.where(np.isinf(x), words(x), (words(x) + 0x1000) & 0xFFFFE000)
        np.testing.assert_array_equal(tf32[~np.isnan(x)], rounded[~np.isnan(x)])

    text = kernels.NARROW
    return Case("narrow", text, "narrow", "sm_80", 1024, 0, [x, f16, bf16, tf32, one], check)


def parts() -> Case:
    """Rounding to tf32 with ties to even, and the middle of the floats that tf32 cuts off to the same one."""
    ties = np.array([0x3F801000, 0x3F803000, 0xBF801000, 0xBF803000, 0x7F7FF000, 0x00001000, 0x00003000], np.uint32)
    nans = np.array([0x7F800001, 0x7FC00000, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF], np.uint32)
    x = np.concatenate([ties, ties - 1, ties + 1, nans, words(np.array([0, -0.0, np.inf, -np.inf], np.float32))])
    x = np.concatenate([x, np.random.default_rng(1).integers(0, 2**32, 1024 - len(x), np.uint32)])
    upper, middle = np.zeros(1024, np.uint32), np.zeros(1024, np.uint32)

    def check() -> None:
        is_special = x & 0x7F800000 == 0x7F800000
        rounded = (x + 0xFFF + (x >> 13 & 1)) & 0xFFFFE000
        special = np.where(x & 0x7FFFFF, 0x7FFFFFFF, x)
        np.testing.assert_array_equal(upper, np.where(is_special, special, rounded))
        np.testing.assert_array_equal(middle, x & 0xFFFFE000 | 0x1000)

    return Case("parts", kernels.PARTS, "parts", "sm_90", 1024, 0, [x, upper, middle], check)


def eight_bits() -> Case:
    """Convert every e4m3 value to float16, in pairs with the reversed sequence."""
    first = np.arange(256, dtype=np.uint16)
    x, y = first | first[::-1] << 8, np.zeros(256, np.uint32)
    values = reference.values_of(STORAGES["e4m3"]).astype(np.float16)

    def check() -> None:
        np.testing.assert_array_equal(y.view(np.float16).reshape(-1, 2), np.stack([values, values[::-1]], 1))

    return Case("eight bits", kernels.EIGHT_BITS, "eight_bits", "sm_89", 256, 0, [x, y], check)


def halves() -> Case:
    """Convert to float16 and back: ties, subnormals, overflow."""
    x = np.array(
        [1, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 65519.996, 65520, 2.0**-24, 2.0**-25, -(2.0**-14), 0, np.inf] + [0.1] * 22,
        np.float32,
    )
    y = np.zeros(32, np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16).astype(np.float32)
    return Case("halves", kernels.HALVES, "halves", "sm_75", 32, 0, [x, y], _equal(y, expected))


def powers() -> Case:
    """2 to the powers of 0 to -140, of -Inf and of NaN: results below 2^-126 are zeros."""
    x = np.concatenate([-np.linspace(0, 140, 254), [-np.inf, np.nan]]).astype(np.float32)
    y = np.zeros(256, np.float32)

    def check() -> None:
        exact = np.exp2(x.astype(np.float64))
        exact[x < -126] = 0
        np.testing.assert_allclose(y, exact, rtol=2.0**-22)

    return Case("powers", kernels.POWERS, "powers", "sm_75", 256, 0, [x, y], check)


def pairs() -> Case:
    """Two sums at once, each rounded once."""
    x, w, y = normal((32, 2), seed=1), normal((32,), seed=2), normal((32, 2), seed=3)
    # products of tf32 are exact, and so are these sums
    expected = (x.astype(np.float64) * w[:, None] + y).astype(np.float32)
    return Case("pairs", kernels.PAIRS, "pairs", "sm_100", 32, 0, [x, w, y], _equal(y, expected))


def copies() -> Case:
    """Copies of 4, 8 and 16 bytes."""
    x, y = normal((224,)), np.zeros(224, np.float32)
    there = np.where(np.arange(224) < 100, x, 0)
    there[128:] = x[128:]
    blocks = [there[:128].reshape(32, 4), there[128:192].reshape(32, 2), there[192:].reshape(32, 1)]
    expected = np.concatenate([block[np.arange(32) ^ 1].reshape(-1) for block in blocks])
    return Case("copies", kernels.COPIES, "copies", "sm_80", 32, 896, [x, y, np.int32(100)], _equal(y, expected))


def named() -> Case:
    y = np.zeros(32, np.float32)
    text = NAMED
    return Case("named barriers", text, "named", "sm_75", 64, 128, [y], _equal(y, np.arange(31, -1, -1)))


def ring() -> Case:
    """Bulk copies through a ring of stages."""
    x, y = normal((9, 32)), np.zeros(32, np.float32)
    text = kernels.RING
    return Case(
        "ring", text, "ring", "sm_90", 64, 2 * 128 + 4 * 8, [x, y, np.int32(9)], _close(y, x.sum(0, np.float64))
    )


def arrivals() -> Case:
    """Copies of threads that arrive at an mbarrier by themselves."""
    x, y = normal((5, 32)), np.zeros(32, np.float32)
    text = kernels.ARRIVALS
    check = _close(y, x.sum(0, np.float64)[np.arange(32) ^ 1])
    return Case("arrivals", text, "arrivals", "sm_90", 32, 128 + 8, [x, y, np.int32(5)], check)


def grids() -> Case:
    """A launch that may begin while the one before it ends."""
    x, y = normal((3, 32)), np.zeros((3, 32), np.float32)
    text = kernels.GRIDS
    return Case("grids", text, "grids", "sm_90", 32, 128 + 8, [x, y], _equal(y, -x), grid=3, early=True)


def box(swizzle: int, sizes: tuple[int, ...], corner: tuple[int, ...]) -> Case:
    """A box in, its image out, and the box with flipped bits back: clipped, swizzled, zeros outside.

    An H100 loads at negative coordinates, but stores nowhere below 0: the box goes back to 0 there.
    """
    margins = (2, 4, 2, 32)
    x = np.arange(1, 2 * 5 * 3 * 24 + 1, dtype=np.uint32).reshape(2, 5, 3, 24)
    y, image = np.zeros_like(x), np.zeros(4 * int(np.prod(sizes)), np.uint8)
    maps = [TensorMap(array, (24, 3, 5, 2), (96, 288, 1440), sizes, swizzle) for array in (x, y)]
    padded = np.pad(x, [(margin, margin) for margin in margins])
    at, back = (
        tuple(slice(c + m, c + m + n) for c, m, n in zip(place[::-1], margins, sizes[::-1], strict=True))
        for place in (corner, [max(each, 0) for each in corner])
    )
    stored = np.zeros_like(padded)
    stored[back] = padded[at] ^ np.uint32(0x01010101)
    own = tuple(slice(margin, margin + size) for margin, size in zip(margins, x.shape, strict=True))

    def check() -> None:
        places = [swizzled(4 * i, swizzle) // 4 for i in range(image.size // 4)]
        np.testing.assert_array_equal(image.view(np.uint32)[places], padded[at].reshape(-1))
        np.testing.assert_array_equal(y, stored[own])

    args = [*maps, image, np.int32(image.nbytes), *map(np.int32, corner)]
    text = kernels.BOX
    return Case(f"box {swizzle=}", text, "box", "sm_90", 32, image.nbytes + 8, args, check)


def _wgmma_kernel(kernel: str, wgmma: WgmmaInstruction, steps: int, *flags: bool) -> str:
    call = wgmma.name + (f"<{', '.join(str(int(flag)) for flag in flags)}>" if wgmma.transposed else "")
    head = f"\nconstexpr int SUMS = {wgmma.sums}, STEPS = {steps};\n"
    return head + kernel.replace("CALL", call)


def wgmma(
    operand: str, swizzle_a: int, along_a: bool, swizzle_b: int, along_b: bool, columns: int, given: Any = None
) -> Case:
    """Products from images in shared memory: enough of k for a whole line of either image.

    `given`: both operands, else drawn ones.
    """
    item_bytes = OPERANDS[operand].item_bytes
    lines = [swizzle for swizzle, along in ((swizzle_a, along_a), (swizzle_b, along_b)) if not along]
    k = max(64, *lines, 0) // item_bytes
    a, b = Layout(64, k, item_bytes, swizzle_a, along_a), Layout(columns, k, item_bytes, swizzle_b, along_b)
    drawn = whole if operand in BYTES else normal
    x, w = given or (drawn((64, k), operand), drawn((columns, k), operand, 1))
    y = np.zeros((64, columns), np.float32)
    start = -(-a.bytes // 1024) * 1024
    images = np.zeros(start + b.bytes, np.uint8)
    images[: a.bytes], images[start:] = a.image(x), b.image(w)
    steps = k * item_bytes // 32
    args = [images, np.int32(images.nbytes // 16), np.uint64(a.descriptor(0)), np.uint64(b.descriptor(start))]
    args += [np.int32(each) for each in (a.step, b.step)] + [y]
    instruction = WgmmaInstruction(operand, columns, a_in_registers=False)
    text = _wgmma_kernel(kernels.WGMMA, instruction, steps, along_a, along_b)
    check = _equal(y, exact(x, w)) if operand in BYTES else _close(y, exact(x, w), 2e-5)
    name = f"wgmma {operand} A {swizzle_a}{' along m' * along_a} B {swizzle_b}{' along n' * along_b} {columns}"
    return Case(name, text, "product", "sm_90a", 128, images.nbytes, args, check, words={"wgmma": instruction})


def wgmma_registers(operand: str, at_once: int = 1) -> Case:
    """Products with A in registers, which are loaded for the next ones meanwhile."""
    item_bytes, steps, columns = TYPES[operand].itemsize, 4, 24
    b = Layout(columns, 32 // item_bytes * steps, item_bytes)
    x, w = normal((64, b.k), operand), normal((columns, b.k), operand, 1)
    y = np.zeros((64, columns), np.float32)
    args = [words(x), b.image(w), np.int32(b.bytes // 16), np.uint64(b.descriptor(0)), np.int32(b.step), y]
    kernel = f"\nconstexpr int AT_ONCE = {at_once};\n{kernels.WGMMA_REGISTERS}"
    instruction = WgmmaInstruction(operand, columns, a_in_registers=True)
    text = _wgmma_kernel(kernel, instruction, steps, False)
    return Case(
        f"wgmma {operand}, A in registers" + f", {at_once} at once" * (at_once > 1),
        text,
        "product",
        "sm_90a",
        128,
        b.bytes,
        args,
        _close(y, exact(x, w), 2e-5),
        words={"wgmma": instruction},
    )


def cluster() -> Case:
    """Two blocks, each of which brings half of a row for both."""
    x, y = normal((5, 64)), np.zeros((4, 32), np.float32)
    sums = x.sum(0, np.float64)
    text = cluster_kernels.CLUSTER
    check = _close(y, np.tile(sums[:32] + sums[32:], (4, 1)))
    return Case("cluster", text, "halves", "sm_90a", 32, 256 + 16, [x, y, np.int32(5)], check, grid=4)


def panels() -> Case:
    """Boxes of three dimensions in a cluster: both blocks get all of them, and store them in places of their own."""
    x, y = np.arange(2 * 4 * 8, dtype=np.uint32).reshape(4, 2, 8), np.zeros((8, 2, 8), np.uint32)
    maps = [TensorMap(array, (8, 2, len(array)), (32, 64), (8, 1, 4)) for array in (x, y)]
    text = cluster_kernels.PANELS
    check = _equal(y, np.concatenate([x, x]) ^ np.uint32(0x01010101))
    return Case("panels", text, "panels", "sm_90a", 32, 256 + 8, [*maps, np.int32(128)], check, grid=2)


def batched() -> Case:
    """A whole kernel as Hopper wants them: bulk loads, wgmma, bulk stores by warps with roles of their own."""
    a, b, c, d, batch = 2, 48, 80, 2, 200
    x = normal((a, c, d, batch), "bf16")
    w = normal((a, b, c, d), "bf16", 1)
    steps = -(-c // 32)
    y = np.zeros((a, b, d, batch), TYPES["bf16"])
    padded = np.zeros((a, b, steps * 32, d), w.dtype)
    padded[:, :, :c] = w
    blocks = [(i, j, s) for i in range(a) for j in range(d) for s in range(2 * steps)]
    packed = np.concatenate(
        [Layout(b, 16, 2).image(np.ascontiguousarray(padded[i, :, 16 * s : 16 * s + 16, j])) for i, j, s in blocks]
    )
    maps = [
        TensorMap(
            array.view(np.uint16),
            (batch, d, count, a),
            (2 * batch, 2 * d * batch, 2 * count * d * batch),
            (64, 1, rows, 1),
            128,
        )
        for array, count, rows in ((x, c, 32), (y, b, b))
    ]

    def check() -> None:
        expected = np.einsum("icjm,ikcj->ikjm", x.astype(np.float64), w.astype(np.float64))
        np.testing.assert_allclose(y.astype(np.float64), expected, rtol=2**-8, atol=1e-4)

    words = {"wgmma": WgmmaInstruction("bf16", b, a_in_registers=False)}
    args = [*maps, packed, np.int32(batch)]
    shared_bytes = kernels.BATCHED_SHARED_BYTES
    return Case("batched", kernels.BATCHED, "batched", "sm_90a", 384, shared_bytes, args, check, grid=3, words=words)


def all_cases() -> Iterator[Case]:
    yield from (matrices(load, store) for load in (False, True) for store in (False, True))
    yield from (mma(operand) for operand in TYPES)
    yield from (mma_bytes(operand) for operand in BYTES)
    yield from (
        halves(),
        powers(),
        pairs(),
        copies(),
        narrow(),
        parts(),
        eight_bits(),
        named(),
        ring(),
        arrivals(),
        grids(),
        cluster(),
        panels(),
        batched(),
    )
    yield box(0, (4, 3, 2, 2), (0, 0, 0, 0))
    yield box(32, (8, 2, 4, 1), (16, 1, 2, 1))
    yield box(64, (16, 1, 4, 2), (16, 2, -1, 0))
    yield box(128, (32, 1, 8, 1), (-4, 2, 0, 1))
    yield from (
        wgmma(operand, swizzle, False, swizzle, False, 48)
        for operand in (*TYPES, *BYTES)
        for swizzle in (0, 32, 64, 128)
    )
    yield from (wgmma(operand, 128, False, 0, False, 192) for operand in BYTES)  # as X and packed weights lie
    yield from (wgmma("bf16", swizzle, True, 0, False, 48) for swizzle in (0, 32, 64, 128))
    yield from (wgmma("f16", 0, False, swizzle, True, 64) for swizzle in (0, 32, 64, 128))
    yield wgmma("bf16", 128, True, 128, True, 128)
    yield wgmma("f16", 128, False, 0, False, 8)
    yield wgmma("tf32", 0, False, 0, False, 256)
    yield from (wgmma_registers(operand) for operand in TYPES)
    yield wgmma_registers("bf16", at_once=2)
