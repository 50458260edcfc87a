"""Forms of PTX that ksgen does not emit, but kernels of others do, give what the manual says; and nvcc takes them."""

from typing import Any

import numpy as np
import pytest

from ksgen.build.build import build
from tests.emulator import SimtError, TensorMap, is_installed, run_cuda
from tests.support.program import needs_compiler

LANES = 32
Array = np.ndarray[Any, Any]

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="no g++ to run CUDA text with")

ADDRESS = "__device__ inline unsigned at(const void* shared) { return (unsigned)__cvta_generic_to_shared(shared); }\n"

COPIES = """
extern "C" __global__ void copies(const unsigned* x, unsigned* y, const unsigned* given) {
    __shared__ __align__(16) unsigned s[32 * 12];
    const int i = threadIdx.x;
    asm volatile("cp.async.ca.shared.global.L2::64B [%0], [%1], %2;" ::"r"(at(s + 12 * i)), "l"(x + 12 * i),
        "n"(16) : "memory");
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;"
                 ::"r"(at(s + 12 * i + 4)), "l"(x + 12 * i + 4), "r"(given[i]) : "memory");
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at(s + 12 * i + 8)), "l"(x + 12 * i + 8) : "memory");
    asm volatile("cp.async.ca.shared.global.L2::128B [%0], [%1], %2, %3;"
                 ::"r"(at(s + 12 * i + 10)), "l"(x + 12 * i + 10), "n"(8), "r"(given[i] / 2) : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    for (int j = 0; j < 12; ++j) y[12 * i + j] = s[12 * i + j];
}
"""

MATRICES = """
extern "C" __global__ void matrices(const unsigned* x, unsigned* y) {
    __shared__ __align__(16) unsigned s[4 * 32];
    const int i = threadIdx.x;
    for (int j = 0; j < 4; ++j) s[32 * j + i] = x[32 * j + i];
    __syncwarp();
    // later lanes: no address of a row
    const unsigned one = at(s + (i < 8 ? 4 * i : 1)), two = at(s + (i < 16 ? 4 * i + 64 : 3));
    unsigned w[7];
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(w[0]) : "r"(one) : "memory");
    asm volatile("ldmatrix.sync.aligned.x1.m8n8.trans.shared.b16 {%0}, [%1];" : "=r"(w[1]) : "r"(one) : "memory");
    asm volatile("ldmatrix.sync.aligned.x2.m8n8.shared.b16 {%0, %1}, [%2];" : "=r"(w[2]),
        "=r"(w[3]) : "r"(two) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];" : "=r"(w[4]),
        "=r"(w[5]) : "r"(two) : "memory");
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.b16 {%0}, [%1];" : "=r"(w[6]) : "l"(s + 4 * (i % 8)) : "memory");
    for (int j = 0; j < 7; ++j) y[32 * j + i] = w[j];
}
"""

STORES = """
extern "C" __global__ void stores(const unsigned* x, unsigned* y) {
    __shared__ __align__(16) unsigned s[3 * 32];
    unsigned i;
    asm("mov.u32 %0, %%laneid;" : "=r"(i));
    const unsigned* const two = s + 32 + 4 * (i % 16);
    asm volatile("stmatrix.sync.aligned.x1.m8n8.shared.b16 [%0], {%1};" ::"r"(at(s + 4 * (i % 8))),
        "r"(x[i]) : "memory");
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
                 ::"l"(__cvta_generic_to_shared(two)), "r"(x[32 + i]), "r"(x[64 + i]) : "memory");
    __syncwarp();
    for (int j = 0; j < 3; ++j) y[32 * j + i] = s[32 * j + i];
}
"""

BOXES = """
struct alignas(64) Map { unsigned char bytes[128]; };
extern "C" __global__ void boxes(const __grid_constant__ Map x, const __grid_constant__ Map y) {
    extern __shared__ __align__(128) unsigned s[];
    unsigned* const barrier = s + 8 * 16;
    if (threadIdx.x != 0) return;
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(at(barrier)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 512;" ::"r"(at(barrier)) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                 " [%0], [%1, {%3, %4}], [%2], %5;"
                 ::"r"(at(s)), "l"(&x), "r"(at(barrier)), "r"(16), "r"(8), "l"(0x1000000000000000ull) : "memory");
    asm volatile("{.reg .pred p;\\nAGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0, 9;\\n@!p bra AGAIN;}"
                 ::"r"(at(barrier)) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];"
                 ::"l"(&y), "r"(at(s)), "r"(0), "r"(0) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
"""

HALVES = """
extern "C" __global__ void halves(const unsigned* a, const unsigned* b, unsigned* y) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    int low = y[4 * g + t], high = y[4 * (g + 8) + t];
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0, %1}, {%2, %3, %4, %5}, {%6, %7}, {%0, %1};"
                 : "+r"(low), "+r"(high)
                 : "r"(a[8 * g + t]), "r"(a[8 * (g + 8) + t]), "r"(a[8 * g + t + 4]), "r"(a[8 * (g + 8) + t + 4]),
                   "r"(b[8 * g + t]), "r"(b[8 * g + t + 4]));
    y[4 * g + t] = low;
    y[4 * (g + 8) + t] = high;
}
"""

WORDS = """
extern "C" __global__ void words(const int* a, const int* b, int* y) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4;
    int d[4];
    for (int i = 0; i < 4; ++i) d[i] = y[8 * (g + i / 2 * 8) + 2 * t + i % 2];
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
                 : "r"(a[8 * g + t]), "r"(a[8 * (g + 8) + t]), "r"(a[8 * g + t + 4]), "r"(a[8 * (g + 8) + t + 4]),
                   "r"(b[8 * g + t]), "r"(b[8 * g + t + 4]));
    for (int i = 0; i < 4; ++i) y[8 * (g + i / 2 * 8) + 2 * t + i % 2] = d[i];
}
"""

# Core matrices of 8 rows by 4 columns lie one behind the other: along m, 64 rows of them before the next along k.
PRODUCT = """
extern "C" __global__ void product(const float* a, const float* b, float* y) {
    extern __shared__ __align__(128) float s[];
    for (int i = threadIdx.x; i < 512; i += 128) s[i % 8 / 4 * 256 + i / 8 * 4 + i % 4] = a[i];
    if (threadIdx.x < 64) s[512 + threadIdx.x % 8 / 4 * 32 + threadIdx.x / 8 * 4 + threadIdx.x % 4] = b[threadIdx.x];
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const unsigned long long of_a = at(s) >> 4 | 64ull << 16 | 8ull << 32, of_b = at(s + 512) >> 4 | 8ull << 16 |
        8ull << 32;
    float d[4] = {1, 1, 1, 1};
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k8.f32.tf32.tf32 {%0, %1, %2, %3}, %4, %5, %6, %7, SCALE_B;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "l"(of_a), "l"(of_b), "n"(ADDS), "n"(SCALE_A));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    for (int i = 0; i < 4; ++i) y[(row + i / 2 * 8) * 8 + column + i % 2] = d[i];
}
"""

LOADS = """
extern "C" __global__ void loads(const float* x, float* y) {
    __shared__ float s[32];
    const float own = x[threadIdx.x];
    if (threadIdx.x % 2) asm volatile("st.shared.f32 [%0], %1;" ::"r"(at(s + threadIdx.x)), "f"(own) : "memory");
    else asm volatile("st.shared.f32 [%0], %1;" ::"l"(__cvta_generic_to_shared(s + threadIdx.x)), "f"(own) : "memory");
    __syncwarp();
    const size_t wide = __cvta_generic_to_shared(s + 31 - threadIdx.x);
    float first, second;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(first) : "l"(wide) : "memory");
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(second) : "r"(at(s + threadIdx.x)) : "memory");
    y[threadIdx.x] = first - second;
}
"""

REGISTERS = """
extern "C" __global__ void __launch_bounds__(256, 1) registers(unsigned* y) {
    if (threadIdx.x < 128) asm volatile("setmaxnreg.FIRST.sync.aligned.u32 %0;" ::"n"(COUNT));
    else asm volatile("setmaxnreg.inc.sync.aligned.u32 248;");
    y[threadIdx.x] = 1;
}
"""

TOKENS = """
extern "C" __global__ void tokens(const unsigned* x, unsigned* y) {
    __shared__ unsigned s[64];
    __shared__ __align__(8) unsigned long long barrier;
    const int i = threadIdx.x;
    if (i == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at(&barrier)), "r"(64) : "memory");
    __syncthreads();
    for (int round = 0; round < 3; ++round) {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at(s + i)), "l"(x + 64 * round + i) : "memory");
        asm volatile("cp.async.mbarrier.arrive.shared::cta.b64 [%0];" ::"r"(at(&barrier)) : "memory");
        unsigned long long phase;
        asm volatile("mbarrier.arrive.shared::cta.b64 %0, [%1];" : "=l"(phase) : "r"(at(&barrier)) : "memory");
        asm volatile("{.reg .pred p;\\nAGAIN: mbarrier.try_wait.shared::cta.b64 p, [%0], %1;\\n@!p bra AGAIN;}"
                     ::"r"(at(&barrier)), "l"(phase) : "memory");
        y[64 * round + i] = s[63 - i];
        __syncthreads();
    }
}
"""


def source(kernel: str, **words: int) -> str:
    for word, value in words.items():
        kernel = kernel.replace(word, str(value))
    return ADDRESS + kernel


def product(adds: int, scale_a: int, scale_b: int) -> str:
    return source(PRODUCT, ADDS=adds, SCALE_A=scale_a, SCALE_B=scale_b)


def integers(seed: int, *shape: int, dtype: Any = np.float32) -> Array:
    return np.random.default_rng(seed).integers(-4, 5, shape).astype(dtype)


def test_copies_take_a_size_of_the_source_and_fill_with_zeros() -> None:
    x = np.arange(1, 12 * LANES + 1, dtype=np.uint32).reshape(LANES, 12) * 0x01010101
    y, given = np.zeros_like(x), np.arange(LANES, dtype=np.uint32) % 17
    run_cuda(source(COPIES), "copies", 1, LANES, 0, [x, y, given])
    wanted = x.copy().view(np.uint8)
    wanted[:, 36:40] = y.view(np.uint8)[:, 36:40]  # never copied
    for row, count in zip(wanted, given, strict=True):
        row[16 + count : 32] = 0
        row[40 + count // 2 : 48] = 0
    np.testing.assert_array_equal(y.view(np.uint8), wanted)


@pytest.mark.parametrize(
    ("right", "wrong", "says"),
    [
        (
            "cg.shared.global.L2::256B [%0], [%1], 16",
            "cg.shared.global.L2::256B [%0], [%1], 8",
            "cp.async.cg of 8 bytes; accepted are 16",
        ),
        ('"n"(16)', '"n"(12)', "cp.async.ca of 12 bytes; accepted are 4, 8 and 16"),
        ("given[i] / 2", "given[i] + 8", r"copy_async_8 of \d+ bytes: up to 8 are accepted"),
    ],
)
def test_copies_that_no_gpu_makes_are_refused(right: str, wrong: str, says: str) -> None:
    x, y = np.ones((LANES, 12), np.uint32), np.zeros((LANES, 12), np.uint32)
    assert COPIES.count(right) == 1
    with pytest.raises(SimtError, match=says):
        run_cuda(source(COPIES.replace(right, wrong)), "copies", 1, LANES, 0, [x, y, np.full(LANES, 16, np.uint32)])


def test_waiting_for_all_copies_needs_no_group() -> None:
    x, y = np.ones((LANES, 12), np.uint32), np.zeros((LANES, 12), np.uint32)
    text = source(COPIES.replace("cp.async.wait_all;", "cp.async.wait_group 0;"))
    run_cuda(text, "copies", 1, LANES, 0, [x, y, np.full(LANES, 16, np.uint32)])
    assert (y != 1).all()  # nothing was committed


def test_one_and_two_matrices_are_loaded() -> None:
    x = np.arange(256, dtype=np.uint16).reshape(4, 8, 8)
    y = np.zeros((7, LANES), np.uint32)
    run_cuda(source(MATRICES), "matrices", 1, LANES, 0, [x.view(np.uint32), y])
    wanted = [x[0], x[0].T, x[2], x[3], x[2].T, x[3].T, x[0]]
    np.testing.assert_array_equal(y.view(np.uint16).reshape(7, 8, 8), np.stack(wanted))


def test_one_and_two_matrices_are_stored() -> None:
    x = np.arange(192, dtype=np.uint16).reshape(3, 8, 8)
    y = np.zeros((3, LANES), np.uint32)
    run_cuda(source(STORES), "stores", 1, LANES, 0, [x.view(np.uint32), y])
    np.testing.assert_array_equal(y.view(np.uint16).reshape(3, 8, 8), np.stack([x[0], x[1].T, x[2].T]))


def test_boxes_take_a_hint_for_caches_and_need_not_name_tiles() -> None:
    x, y = np.arange(16 * 32, dtype=np.uint32).reshape(16, 32), np.zeros((8, 16), np.uint32)
    maps = [TensorMap(each, each.shape[::-1], each.strides[:1], (16, 8)) for each in (x, y)]
    run_cuda(source(BOXES), "boxes", 1, LANES, 520, maps)
    np.testing.assert_array_equal(y, x[8:, 16:])


def test_sums_of_16_bits_are_rounded_once() -> None:
    a, b, y = (
        np.random.default_rng(seed).normal(size=shape).astype(np.float16)
        for seed, shape in ((1, (16, 16)), (2, (8, 16)), (3, (16, 8)))
    )
    exact = y.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64).T
    run_cuda(source(HALVES), "halves", 1, LANES, 0, [a.view(np.uint32), b.view(np.uint32), y.view(np.uint32)])
    np.testing.assert_allclose(y.astype(np.float64), exact, rtol=2**-11, atol=1e-5)


def test_sums_may_stand_in_registers_of_integers() -> None:
    a, b, y = integers(1, 16, 8), integers(2, 8, 8), integers(3, 16, 8)
    exact = y + a @ b.T
    run_cuda(source(WORDS), "words", 1, LANES, 0, [a.view(np.int32), b.view(np.int32), y.view(np.int32)])
    np.testing.assert_array_equal(y, exact)


@pytest.mark.parametrize(("adds", "scale_a", "scale_b"), [(0, 1, 1), (1, 1, 1), (1, -1, 1), (0, 1, -1), (1, -1, -1)])
def test_products_take_constants_for_whether_they_add_and_for_signs(adds: int, scale_a: int, scale_b: int) -> None:
    a, b, y = integers(1, 64, 8), integers(2, 8, 8), np.zeros((64, 8), np.float32)
    run_cuda(product(adds, scale_a, scale_b), "product", 1, 128, 2304, [a, b, y])
    np.testing.assert_array_equal(y, scale_a * scale_b * (a @ b.T) + adds)


def test_other_scales_than_signs_are_refused() -> None:
    a, b, y = integers(1, 64, 8), integers(2, 8, 8), np.zeros((64, 8), np.float32)
    with pytest.raises(SimtError, match="A times 2 and B times -1; accepted are 1 and -1"):
        run_cuda(product(1, 2, -1), "product", 1, 128, 2304, [a, b, y])


def test_shared_memory_is_read_by_addresses_of_either_width() -> None:
    x, y = integers(1, LANES), np.full(LANES, np.nan, np.float32)
    run_cuda(source(LOADS), "loads", 1, LANES, 0, [x, y])
    np.testing.assert_array_equal(y, x[::-1] - x)


def registers(first: str, count: int) -> str:
    return source(REGISTERS.replace("FIRST", first), COUNT=count)


@pytest.mark.parametrize(("first", "count"), [("dec", 40), ("inc", 248)])
def test_kernels_begin_with_no_more_registers_than_their_largest_increase(first: str, count: int) -> None:
    y = np.zeros(256, np.uint32)
    run_cuda(registers(first, count), "registers", 1, 256, 0, [y])  # 65536 / 256 are more than 248
    assert (y == 1).all()


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_increases_to_fewer_registers_than_at_the_launch_are_refused(order: str) -> None:
    with pytest.raises(SimtError, match="registers_increase<232>: the warp has 248"):
        run_cuda(registers("inc", 232), "registers", 1, 256, 0, [np.zeros(256, np.uint32)], order=order)


@pytest.mark.parametrize("order", ["forward", "reverse", 1])
def test_phases_are_waited_for_by_their_tokens(order: str | int) -> None:
    x, y = np.arange(192, dtype=np.uint32).reshape(3, 64), np.zeros((3, 64), np.uint32)
    run_cuda(source(TOKENS), "tokens", 1, 64, 0, [x, y], order=order)
    np.testing.assert_array_equal(y, x[:, ::-1])


def test_copies_that_arrive_are_needed_before_a_phase_ends() -> None:
    x, y = np.arange(192, dtype=np.uint32), np.zeros(192, np.uint32)
    text = source(TOKENS).replace("cp.async.mbarrier.arrive.shared::cta.b64 [%0];", "")
    run_cuda(text, "tokens", 1, 64, 0, [x, y])
    assert (y != x).all()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    ("kernel", "entry", "target"),
    [
        (source(COPIES), "copies", "sm_80"),
        (source(MATRICES), "matrices", "sm_80"),
        (source(STORES), "stores", "sm_90a"),
        (source(BOXES), "boxes", "sm_90a"),
        (source(HALVES), "halves", "sm_80"),
        (source(WORDS), "words", "sm_80"),
        (product(1, -1, -1), "product", "sm_90a"),
        (source(LOADS), "loads", "sm_80"),
        (registers("dec", 40), "registers", "sm_90a"),
        (source(TOKENS), "tokens", "sm_90a"),
    ],
    ids=["copies", "matrices", "stores", "boxes", "halves", "words", "product", "loads", "registers", "tokens"],
)
def test_nvcc_takes_the_text(kernel: str, entry: str, target: str) -> None:
    assert build(kernel, entry, target).data
