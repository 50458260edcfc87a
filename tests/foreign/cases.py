"""The kernels of other people that the emulator runs: which, how they are changed, launched and damaged."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.foreign import NO_MEMORY, Array, Case, Change, Operands, Piece, tensor_map
from tests.foreign.arrays import normal, to_tf32, wide
from tests.foreign.deep_gemm import DEEP_GEMMS
from tests.foreign.kittens import KITTENSES
from tests.foreign.llama import LLAMAS

# ---- SGEMM_CUDA: float32 without tensor cores, C = alpha A B + beta C


def _sgemm() -> Operands:
    (m, n, k), alpha, beta = (128, 64, 40), np.float32(1.5), np.float32(-0.5)
    a, b, c = (normal(seed, *shape).astype(np.float32) for seed, shape in ((1, (m, k)), (2, (k, n)), (3, (m, n))))
    wide_a, wide_b, wide_c = wide(a, b, c)
    sizes = [np.int32(m), np.int32(n), np.int32(k)]
    return Operands([*sizes, alpha, a, b, beta, c], lambda: c, 1.5 * (wide_a @ wide_b) - 0.5 * wide_c)


SGEMM_TILE = Change(
    r"template <[^>]*NUM_THREADS>",
    "constexpr int BM = 64, BN = 64, BK = 8, WM = 32, WN = 32, WNITER = 2, TM = 4, TN = 4, NUM_THREADS = 128;",
)


BARRIER_OF_PARTS = Change(
    r"__syncthreads\(\);", "__barrier_sync_count(1, 128);", "__syncthreads reached while other threads wait"
)
WARPSIZE = "constexpr int WARPSIZE = 32;"


def _sgemm_case(
    name: str, path: str, entry: str, before: str, changes: list[Change], *damages: tuple[str, str]
) -> Case:
    return Case(
        name, "SGEMM_CUDA", [Piece(f"src/kernels/{path}")], entry, (1, 2), 128, _sgemm, 1e-5, damages, [SGEMM_TILE,
            *changes],
        before, target="sm_80",
    )  # fmt: skip


SGEMMS = [
    _sgemm_case(
        "10: warp tiles", "10_kernel_warptiling.cuh", "sgemmWarptiling", "", [],
        (r"B \+= BK \* N;", "B += BK * N + 1;"),
        (r"__syncthreads\(\);", ""),
    ),
    _sgemm_case(
        "11: halves of the block in turn", "11_kernel_double_buffering.cuh", "sgemmDoubleBuffering", WARPSIZE,
        [BARRIER_OF_PARTS],
        (r"A \+= 2 \* BK;", "A += BK;"),
    ),
    _sgemm_case(
        "12: cp.async and barriers", "12_kernel_double_buffering.cuh", "runSgemmDoubleBuffering2", WARPSIZE, [],
        (r"\(\*frontBarrierPtr\)\.arrive_and_wait\(\);", ""),
        (r"A \+ BK, B \+ BK \* N", "A + BK, B + BK"),
        (r"(Bs_offset = 1 - Bs_offset;.*?)__syncthreads\(\);", r"\1"),
    ),
]  # fmt: skip


# ---- 16 bits: C = A B^T


def _by_rows(m: int, n: int, k: int, dtype: type, integer: type) -> Callable[[], Operands]:
    def operands() -> Operands:
        a, b = (normal(seed, *shape).astype(dtype) for seed, shape in ((1, (m, k)), (2, (n, k))))
        c = np.full((m, n), np.nan, dtype)
        wide_a, wide_b = wide(a, b)
        return Operands([a, b, c, integer(m), integer(n), integer(k)], lambda: c, wide_a @ wide_b.T)

    return operands


# Statements that touch memory and do not say so: the last operand, and the statement's end.
def _says_memory(what: str, last: str) -> Change:
    return Change(rf'("{what}[^"]*"[^;]*?{last})\);', r'\1 : "memory");', NO_MEMORY)


LEARN_MEMORY = [
    _says_memory(r"cp\.async\.cg\.shared\.global \[%0\]", r'"l"\(src\)'),
    _says_memory(r"ldmatrix\.sync\.aligned\.m8n8\.x[24]", r'"r"\(addr\)'),
    Change(r'("cp\.async\.(?:commit_group|wait_all);")\)', r'\1 ::: "memory")', NO_MEMORY),
    Change(r'("cp\.async\.wait_group %0;" ::"n"\(N\))\)', r'\1 : "memory")', NO_MEMORY),
]


_HELPERS = r"^constexpr int WARP_SIZE.*?(?=template <typename T, typename)"
_DIVISION = r"^__host__ __device__ inline\s+constexpr int cdiv[^}]*\}"


def _learn(version: int, more: str, *damages: tuple[str, str], shared_bytes: int) -> Case:
    folder = "02b_matmul_sm80"
    helpers = Piece(f"{folder}/common.h", f"{_HELPERS}|{_DIVISION}")
    kernel = Piece(f"{folder}/matmul_v{version}.cu", rf".*?(?=^void matmul_v{version}\()")
    tile = Change(
        r"template <int BLOCK_M[^>]*>",
        f"constexpr int BLOCK_M = 64, BLOCK_N = 64, BLOCK_K = 64, NUM_WARP_M = 2, NUM_WARP_N = 2{more};",
    )
    return Case(
        f"sm80 v{version}: ldmatrix, mma", "learn-cuda", [helpers, kernel], f"matmul_v{version}_kernel", 4, 128,
        _by_rows(128, 128, 256, ml_dtypes.bfloat16, np.int32), 2e-2, damages, [tile, *LEARN_MEMORY],
        shared_bytes=shared_bytes, target="sm_80",
    )  # fmt: skip


LEARNS = [
    _learn(
        5, "",
        (r"cp_async_wait_all\(\);\s+__syncthreads\(\);", "__syncthreads();"),
        (r"\(lane_id / 16\) \* 8;", "0;"),
        (r"\{%8, %9\}, ", "{%9, %8}, "),
        shared_bytes=16384,
    ),
    _learn(
        6, ", NUM_STAGES = 2, GROUP_M = 0",
        (r"cp_async_wait_group<NUM_STAGES - 1>\(\);", "cp_async_wait_group<NUM_STAGES>();"),
        (r"k_iter % NUM_STAGES\) \* AB_size", "0) * AB_size"),
        shared_bytes=32768,
    ),
]  # fmt: skip

HGEMM = Case(
    "mma: sums in 16 bits, 2 stages", "cuda_hgemm",
    [
        Piece("src/common/util.h", r"^inline __device__ __host__ size_t div_ceil.*?^\}"),
        Piece("src/common/ptx.h"),
        Piece("src/mma/mma_async_stage2.cu", r".*?(?=^size_t init)"),
    ],
    "mmaAsyncStage2Kernel", 1, 256, _by_rows(256, 128, 96, np.float16, np.uint64), 1e-2,
    [
        (r"CP_ASYNC_WAIT_GROUP\(0\);", ""),
        (r"\{%6, %7\}", "{%7, %6}"),
        (r"reg_load_idx \^= 1;", ""),
    ],
    [
        Change(r"(extern __shared__ half smem)\[\]\[(\w+)\];", r"\1_[]; half(*const smem)[\2] = (half(*)[\2])smem_;"),
        Change(r'("cp\.async\.c.\.shared\.global\.L2[^"]*" ::"r"\(dst\), "l"\(src\), "n"\(Bytes\))\)', r'\1 : '
                                                                                                       r'"memory")',
                                                                                                           NO_MEMORY),
        Change(r'("cp\.async\.(?:commit_group|wait_all);\\n" ::)\)', r'\1 : "memory")', NO_MEMORY),
        Change(r'("cp\.async\.wait_group %0;\\n" ::"n"\(N\))\)', r'\1 : "memory")', NO_MEMORY),
        Change(r'("ldmatrix.*?)("r"\(addr\))\)', r'\1\2 : "memory")', NO_MEMORY),
    ],
    shared_bytes=65536, target="sm_80",
)  # fmt: skip


# ---- fast.cu: TMA, wgmma; C of columns behind each other


def _fast() -> Operands:
    m, n, k = 128, 128, 256
    a, b = (normal(seed, *shape).astype(ml_dtypes.bfloat16) for seed, shape in ((1, (m, k)), (2, (n, k))))
    c = np.full((n, m), np.nan, ml_dtypes.bfloat16)
    wide_a, wide_b = wide(a, b)
    sizes = [np.int32(m), np.int32(n), np.int32(k)]
    return Operands([*sizes, c, tensor_map(a, (64, 128)), tensor_map(b, (64, 128))], lambda: c, wide_b @ wide_a.T)


FAST = Case(
    "matmul 4: TMA, wgmma", "fast.cu",
    [
        Piece(
            "examples/matmul/matmul_4.cuh",
            r"using barrier.*?;$|namespace cde.*?;$|__device__ static inline uint64_t matrix_descriptor_encode.*?\}$"
            r"|__device__ uint64_t make_smem_desc.*?^    \}|__device__ void warpgroup_arrive.*?(?=^template <int "
            r"BlockMajor)"
            r"|^template<int ScaleD.*?(?=^void runKernel4)",
        )
    ],
    "matmulKernel4", 1, 256, _fast, 2e-2,
    [
        (r"warpgroup_wait<0>\(\);", ""),
        (r"full\[qidx\]\.wait\(full\[qidx\]\.arrive\(\)\);", ""),
        (r"1llu << 62", "2llu << 62"),
        (r"k_it\*WGMMA_K\], &sB", "0], &sB"),
    ],
    [
        Change(
            r"template<[^>]*NUM_THREADS, int QSIZE>\s+(?=__global__)",
            "constexpr int BM = 128, BN = 128, BK = 64, NUM_THREADS = 256, QSIZE = 3;\n",
        ),
        Change(r"const CUtensorMap\* (tensorMap[AB])", r"const __grid_constant__ CUtensorMap \1"),
        Change(r", (tensorMap[AB]),", r", &\1,"),
        Change(
            r"__shared__ barrier full\[QSIZE\], empty\[QSIZE\];",
            "barrier* const full = (barrier*)(smem + sizeof(SMem<BM, BN, BK, QSIZE>)); barrier* const empty = full + "
            "QSIZE;",
            "has to be a multiple of 1024",  # static arrays come first, and move the swizzled boxes
        ),
    ],
    shared_bytes=3 * 32768 + 48,
)  # fmt: skip


# ---- CUTLASS: its products, in a kernel of ours. Core matrices of 8 rows by 16 bytes lie behind each other, first
# along the rows.

PRODUCT = """
__device__ inline int place(int row, int byte, int rows) { return byte / 16 * rows * 16 + row * 16 + byte % 16; }
__device__ inline uint64_t described(const unsigned char* at, int rows) {
  return (uint64_t)(__cvta_generic_to_shared(at) >> 4) | (uint64_t)rows << 16 | 8ull << 32;
}
extern "C" __global__ void product(const unsigned char* a, const unsigned char* b, float* y) {
  extern __shared__ __align__(1024) unsigned char s[];
  unsigned char* const of_b = s + 64 * 128;
  wait_on_dependent_grids();
  for (int i = threadIdx.x; i < 64 * 128; i += 128) s[place(i / 128, i % 128, 64)] = a[i];
  for (int i = threadIdx.x; i < 16 * 128; i += 128) of_b[place(i / 128, i % 128, 16)] = b[i];
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  launch_dependent_grids();
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  uint32_t words[4][4];
  for (int k = 0; k < 4; ++k)
    for (int j = 0; j < 4; ++j)
      words[k][j] = *reinterpret_cast<const uint32_t*>(s + place(row + j % 2 * 8, 32 * k + 4 * t + j / 2 * 16, 64));
  float d[8];
  warpgroup_arrive();
  for (int k = 0; k < 4; ++k) {
    const uint64_t b_here = described(of_b + 2 * 16 * 16 * k, 16);
    MULTIPLY(words[k], described(s + 2 * 64 * 16 * k, 64), b_here, d, k ==
        0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
  }
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  for (int i = 0; i < 8; ++i) y[(row + i / 2 % 2 * 8) * 16 + i / 4 * 8 + 2 * t + i % 2] = d[i];
}
"""
_SUMS = ", ".join(f"d[{i}]" for i in range(8))
FROM_SHARED = f"#define MULTIPLY(words, a, b, d, adds) ATOM<>::fma(a, b, {_SUMS}, adds)\n"
FROM_REGISTERS = (
    f"#define MULTIPLY(words, a, b, d, adds) ATOM<>::fma({', '.join(f'words[{i}]' for i in range(4))}, "
    f"b, {_SUMS}, adds)\n"
)
CUTLASS = """
#define CUTE_ARCH_MMA_SM90A_ENABLED
#define CUTLASS_GDC_ENABLED
#define CUTE_HOST_DEVICE __forceinline__
#define CUTLASS_DEVICE __forceinline__
"""


def _product(narrow: Callable[[Array], Array]) -> Callable[[], Operands]:
    def operands() -> Operands:
        a, b = narrow(normal(1, 64, 128)), narrow(normal(2, 16, 128))
        a, b = (each[:, : 128 // each.itemsize].copy() for each in (a, b))
        y = np.full((64, 16), np.nan, np.float32)
        wide_a, wide_b = wide(a, b)
        return Operands([a.view(np.uint8), b.view(np.uint8), y], lambda: y, wide_a @ wide_b.T)

    return operands


def _cutlass(atom: str, narrow: Callable[[Array], Array], tolerance: float) -> Case:
    in_registers = "_RS_" in atom
    wgmma, grids = "include/cute/arch/mma_sm90_gmma.hpp", "include/cutlass/arch/grid_dependency_control.h"
    primitive = r"(?:template <int N>\s+)?CUTE_HOST_DEVICE\s+void\s+warpgroup_(?:arrive|wait|commit_batch)\(\).*?^\}"
    pieces = [
        Piece(wgmma, primitive),
        Piece(wgmma, r"enum class Scale(?:Out|In) \{.*?\};", "GMMA"),
        Piece(wgmma, rf"template <[^>]*>\s+struct {atom}\s.*?^\}};"),
        Piece(grids, r"CUTLASS_DEVICE\s+void \w+_dependent_grids.*?^\}"),
    ]
    changes = [
        Change(r"cutlass::arch::synclog_emit\w+\(.*?\);", ""),
        Change(r'("griddepcontrol\.launch_dependents;")\)', r'\1 ::: "memory")', NO_MEMORY),
    ]
    operand = (
        (r"\{%8,  %9,  %10, %11\}", "{%9,  %8,  %10, %11}") if in_registers else (r" %8,(.{,20}) %9,", r" %9,\1 %8,")
    )
    damages = [
        operand,
        (r"warpgroup_commit_batch\(\);(?!\s*\{)(?=\s+warpgroup_wait)", ""),
        (r"wait_on_dependent_grids\(\);", ""),
        (r"setp\.ne\.b32 p, %\d+, 0;", "setp.ne.b32 p, 1, 0;"),
    ]
    after = (FROM_REGISTERS if in_registers else FROM_SHARED).replace("ATOM", atom) + PRODUCT
    return Case(
        f"wgmma {atom[4:]}", "cutlass", pieces, "product", 1, 128, _product(narrow), tolerance, damages, changes,
        CUTLASS, after, 64 * 128 + 16 * 128, early=True,
    )  # fmt: skip


PRODUCTS = [
    _cutlass("MMA_64x16x8_F32TF32TF32_SS_TN", to_tf32, 1e-5),
    _cutlass("MMA_64x16x8_F32TF32TF32_RS_TN", to_tf32, 1e-5),
    _cutlass("MMA_64x16x32_F32E4M3E4M3_SS_TN", lambda x: x.astype(ml_dtypes.float8_e4m3fn), 2e-3),
    _cutlass("MMA_64x16x32_F32E4M3E4M3_RS_TN", lambda x: x.astype(ml_dtypes.float8_e4m3fn), 2e-3),
    _cutlass("MMA_64x16x32_F32E5M2E5M2_SS_TN", lambda x: x.astype(ml_dtypes.float8_e5m2), 2e-3),
]

CASES = [*SGEMMS, *LEARNS, HGEMM, *LLAMAS, FAST, *KITTENSES, *PRODUCTS, *DEEP_GEMMS]
