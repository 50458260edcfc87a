"""The kernels of other people that the emulator runs: which, how they are changed, launched and damaged."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from tests.foreign import Array, Case, Change, Operands, Piece, tensor_map

NO_MEMORY = 'does not list "memory"'


def _normal(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).normal(size=shape)


def _to_tf32(values: Array) -> Array:
    return (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32)


def _wide(*arrays: Array) -> list[Array]:
    return [each.astype(np.float64) for each in arrays]


# ---- SGEMM_CUDA: float32 without tensor cores, C = alpha A B + beta C


def _sgemm() -> Operands:
    (m, n, k), alpha, beta = (128, 64, 40), np.float32(1.5), np.float32(-0.5)
    a, b, c = (_normal(seed, *shape).astype(np.float32) for seed, shape in ((1, (m, k)), (2, (k, n)), (3, (m, n))))
    wide_a, wide_b, wide_c = _wide(a, b, c)
    sizes = [np.int32(m), np.int32(n), np.int32(k)]
    return Operands([*sizes, alpha, a, b, beta, c], lambda: c, 1.5 * (wide_a @ wide_b) - 0.5 * wide_c)


SGEMM_TILE = Change(
    r"template <[^>]*NUM_THREADS>",
    "constexpr int BM = 64, BN = 64, BK = 8, WM = 32, WN = 32, WNITER = 2, TM = 4, TN = 4, NUM_THREADS = 128;",
)


BARRIER_OF_PARTS = Change(r"__syncthreads\(\);", "__barrier_sync_count(1, 128);", "__syncthreads reached while other threads wait")
WARPSIZE = "constexpr int WARPSIZE = 32;"


def _sgemm_case(name: str, path: str, entry: str, before: str, changes: list[Change], *damages: tuple[str, str]) -> Case:
    return Case(
        name, "SGEMM_CUDA", [Piece(f"src/kernels/{path}")], entry, (1, 2), 128, _sgemm, 1e-5, damages, [SGEMM_TILE, *changes],
        before, target="sm_80",
    )  # fmt: skip


SGEMMS = [
    _sgemm_case(
        "10: warp tiles", "10_kernel_warptiling.cuh", "sgemmWarptiling", "", [],
        (r"B \+= BK \* N;", "B += BK * N + 1;"),
        (r"__syncthreads\(\);", ""),
    ),
    _sgemm_case(
        "11: halves of the block in turn", "11_kernel_double_buffering.cuh", "sgemmDoubleBuffering", WARPSIZE, [BARRIER_OF_PARTS],
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
        a, b = (_normal(seed, *shape).astype(dtype) for seed, shape in ((1, (m, k)), (2, (n, k))))
        c = np.full((m, n), np.nan, dtype)
        wide_a, wide_b = _wide(a, b)
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
        Change(r'("cp\.async\.c.\.shared\.global\.L2[^"]*" ::"r"\(dst\), "l"\(src\), "n"\(Bytes\))\)', r'\1 : "memory")', NO_MEMORY),
        Change(r'("cp\.async\.(?:commit_group|wait_all);\\n" ::)\)', r'\1 : "memory")', NO_MEMORY),
        Change(r'("cp\.async\.wait_group %0;\\n" ::"n"\(N\))\)', r'\1 : "memory")', NO_MEMORY),
        Change(r'("ldmatrix.*?)("r"\(addr\))\)', r'\1\2 : "memory")', NO_MEMORY),
    ],
    shared_bytes=65536, target="sm_80",
)  # fmt: skip


# ---- llama.cpp: Y = X W^T by the tiles of mma.cuh; two warps of a block share k


def _tiles(narrow: Callable[[Array], Array]) -> Callable[[], Operands]:
    def operands() -> Operands:
        w, x = narrow(_normal(1, 64, 256)), _normal(2, 16, 256).astype(np.float32)
        y = np.full((16, 64), np.nan, np.float32)
        (wide_x, wide_w) = _wide(narrow(x), w)
        return Operands([w.view(np.uint32), x, y, np.int32(64 * w.itemsize)], lambda: y, wide_x @ wide_w.T)

    return operands


_GGML = "ggml/src/ggml-cuda"
LLAMA = """
#define TURING_MMA_AVAILABLE
#define AMPERE_MMA_AVAILABLE
#define __CUDA_ARCH__ 800
#define GGML_CUDA_CC_VOLTA 700
#define GGML_CUDA_CC_AMPERE 800
#define WARP_SIZE 32
#define NO_DEVICE_CODE __trap()
#define GGML_UNUSED_VARS(...)
#define GGML_UNUSED(x)
#define GGML_PAD(x, n) (((x) + (n) - 1) / (n) * (n))
#define MMF_ROWS_PER_BLOCK 32
enum ggml_type {};
extern __shared__ __align__(16) char data_mmv[];
inline int __syncthreads_or(int) { return 0; }  // of products by experts, which are not launched
"""
LLAMA_KERNEL = """
extern "C" __global__ void product(const TYPE* w, const float* x, float* y, int words) {
  mul_mat_f<TYPE, 32, 16, 2, false>(w, x, nullptr, y, words, 0, 0, words, words, 64, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0);
}
"""


def _llama(kind: str, of_c: str, narrow: Callable[[Array], Array], tolerance: float) -> Case:
    pieces = [
        Piece(f"{_GGML}/common.cuh", r"^static constexpr __device__ int ggml_cuda_get_(?:physical_warp_size|max_cpy_bytes)\(.*?^\}"),
        Piece(f"{_GGML}/common.cuh", r"^template <int nbytes, int alignment = 0>.*?^\}"),
        Piece(f"{_GGML}/convert.cuh", r"^template<typename dst_t.*?^\}"),
        Piece(f"{_GGML}/mma.cuh"),
        Piece(
            f"{_GGML}/mmf.cuh",
            r"^using namespace.*?;|^static constexpr __device__ int mmf_get_padding.*?^\}|^template[^;{}]*? mul_mat_f\(.*?^\}",
        ),
    ]
    changes = [
        Change(r"extern __shared__ char data_mmv\[\];", ""),  # the emulator cannot place those of templates
        Change(r"__launch_bounds__[^\n]*\nstatic __global__", "static __device__"),
        Change(
            r"static __device__ __forceinline__ void mma\(\s*tile<16, 8, int> .*?^    \}\n", "",
            "s32.s8.s8.s32: no instruction that is known here",
        ),
        Change(r'asm\("mma', 'asm volatile("mma', "mma.sync.*: the statement is not volatile"),
        Change(r'("l"\(xs\))\);', r'\1 : "memory");', NO_MEMORY),
        Change(r"(load_ldmatrix\([AB][^;]* tile_xy [^;]*;)", r"__syncwarp(); \1 __syncwarp();", "race: .* with no barrier between"),
    ]  # fmt: skip
    damages = [
        (r"\{%8, %9\}", "{%9, %8}"),
        (r"\{%0, %1, %2, %3\}, \[%4\]", "{%0, %2, %1, %3}, [%4]"),
        (r"(const int kiw|constexpr int kiw)(.*?)__syncthreads\(\);", r"\1\2"),
        (r"sum\[i1\] \+= buf_iw", "sum[i1] = buf_iw"),
    ]
    return Case(
        f"mul_mat_f in {kind}", "llama.cpp", pieces, "product", 2, (32, 2), _tiles(narrow), tolerance, damages, changes,
        LLAMA, LLAMA_KERNEL.replace("TYPE", of_c), 4608, target="sm_80",
    )  # fmt: skip


LLAMAS = [
    _llama("float16", "half2", lambda x: x.astype(np.float16), 1e-5),
    _llama("bfloat16", "nv_bfloat162", lambda x: x.astype(ml_dtypes.bfloat16), 1e-5),
    _llama("tf32", "float", _to_tf32, 1e-5),
]


# ---- fast.cu: TMA, wgmma; C of columns behind each other


def _fast() -> Operands:
    m, n, k = 128, 128, 256
    a, b = (_normal(seed, *shape).astype(ml_dtypes.bfloat16) for seed, shape in ((1, (m, k)), (2, (n, k))))
    c = np.full((n, m), np.nan, ml_dtypes.bfloat16)
    wide_a, wide_b = _wide(a, b)
    sizes = [np.int32(m), np.int32(n), np.int32(k)]
    return Operands([*sizes, c, tensor_map(a, (64, 128)), tensor_map(b, (64, 128))], lambda: c, wide_b @ wide_a.T)


FAST = Case(
    "matmul 4: TMA, wgmma", "fast.cu",
    [
        Piece(
            "examples/matmul/matmul_4.cuh",
            r"using barrier.*?;$|namespace cde.*?;$|__device__ static inline uint64_t matrix_descriptor_encode.*?\}$"
            r"|__device__ uint64_t make_smem_desc.*?^    \}|__device__ void warpgroup_arrive.*?(?=^template <int BlockMajor)"
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
            "barrier* const full = (barrier*)(smem + sizeof(SMem<BM, BN, BK, QSIZE>)); barrier* const empty = full + QSIZE;",
            "has to be a multiple of 1024",  # static arrays come first, and move the swizzled boxes
        ),
    ],
    shared_bytes=3 * 32768 + 48,
)  # fmt: skip


# ---- ThunderKittens: tiles of 64 by 64 in swizzles of 128 bytes, products by a warpgroup; Y = A B, real or complex


def _kittens_operands(parts: int) -> Callable[[], Operands]:
    def operands() -> Operands:
        a, b = (_normal(seed, parts, 64, 64).astype(ml_dtypes.bfloat16) for seed in (1, 2))
        y = np.full((parts, 64, 64), np.nan, np.float32)
        of_a, of_b = (wide[0] + 1j * wide[1] if parts == 2 else wide[0] for wide in _wide(a, b))
        exact = of_a @ of_b
        return Operands([a, b, y], lambda: y, np.stack([exact.real, exact.imag][:parts]))

    return operands


KITTENS = """
#define KITTENS_HOPPER
#define KITTENS_DEFAULT_ALIGN __align__(128)
#define KITTENS_CHECK_WARP
#define KITTENS_CHECK_WARPGROUP
namespace kittens {
using bf16 = __nv_bfloat16;
using bf16_2 = __nv_bfloat162;
using half_2 = __half2;
struct fp8e4m3;
struct fp8e5m2;
struct fp8e4m3_4;
struct fp8e5m2_4;
constexpr int GROUP_WARPS = 4;
template <typename T, int ROWS, int COLUMNS> struct base_tile;
template <typename T, int LENGTH> struct sv;
template <typename T, int LENGTH> struct csv;
template <typename T, int LENGTH, typename LAYOUT> struct rv;
template <typename T, int LENGTH, typename LAYOUT> struct crv;
template <typename T> struct move;
namespace ducks {
struct default_type;
namespace st { struct identifier; }
namespace cst { struct identifier; }
namespace rt { struct identifier; }
namespace crt { struct identifier; }
namespace rt_base { struct identifier; }
namespace st_descriptor { struct identifier; }
namespace rt_layout { struct row; struct col; }
namespace rv_layout { struct align; struct ortho; }
namespace st_descriptor::detail {
template <typename T, typename = void> struct component { using type = T; };
template <typename T> struct component<T, decltype(void(sizeof(typename T::component)))> { using type = typename T::component; };
template <typename T> using get_st = typename component<T>::type;
}
}
namespace detail::wgmma { template <typename D, typename AB, int COLUMNS, int TRANSPOSES_A, int TRANSPOSES_B> struct base; }
}
"""
KITTENS_KERNEL = """
namespace kittens {
using Shared = st<bf16, 64, 64>;
using Sums = rt<float, 16, 64, ducks::rt_layout::row>;
inline void fill(Shared& tile, const bf16* from) {
  for (int i = threadIdx.x; i < 64 * 64; i += 128) tile[int2{i / 64, i % 64}] = from[i];
}
inline void keep(const Sums& sums, float* y) {
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
  for (int j = 0; j < 4; ++j)
    for (int k = 0; k < 4; ++k)
      *(float2*)(y + (row + k % 2 * 8) * 64 + 16 * j + k / 2 * 8 + column) = sums.tiles[0][j].data[k];
}
}
extern "C" __global__ void product(const __nv_bfloat16* a, const __nv_bfloat16* b, float* y) {
  using namespace kittens;
  extern __shared__ __align__(1024) unsigned char s[];
  auto& of_a = *reinterpret_cast<TILE*>(s);
  auto& of_b = *reinterpret_cast<TILE*>(s + sizeof(TILE));
  for (int part = 0; part < PARTS; ++part) {
    fill(reinterpret_cast<Shared*>(&of_a)[part], a + part * 64 * 64);
    fill(reinterpret_cast<Shared*>(&of_b)[part], b + part * 64 * 64);
  }
  __syncthreads();
  SUMS sums;
  for (int part = 0; part < PARTS; ++part) reinterpret_cast<Sums*>(&sums)[part] = 0.0f;
  MULTIPLY
  mma_async_wait();
  for (int part = 0; part < PARTS; ++part) keep(reinterpret_cast<Sums*>(&sums)[part], y + part * 64 * 64);
}
"""


def _kittens(name: str, parts: int, a: str, multiply: str, *damages: tuple[str, str], more: Sequence[Piece] = (), also: Sequence[Change] = ()) -> Case:
    def piece(path: str, keep: str) -> Piece:
        return Piece(f"include/{path}", keep, "kittens")

    mma, kind = "ops/group/mma", "ducks::crt" if parts == 2 else "ducks::rt"
    pieces = [
        piece("common/util.cuh", r"^(?:template<typename T> )?constexpr int (?:BASE_TILE_DIM|TILE_\w+_DIM)[^;]*;|^__device__[^\n]*(?:warpid|laneid)\(\)[^\n]*"),
        Piece("include/common/base_types.cuh", r"^template<typename T> struct packing .*?^\};|^template<> struct packing<(?:bf16|float)(?:_?2)?>.*?^\};", "kittens::base_types"),
        Piece("include/common/base_types.cuh", r"^template<typename T, typename U> struct convertor .*?^\};", "kittens::base_types"),
        piece("types/shared/st.cuh", r"^template<\s+typename ST[^;{]*?struct st_subtile;|^template<[^>]*>\s+struct KITTENS_DEFAULT_ALIGN st \{.*?^\};"),
        Piece("include/types/shared/descriptor.cuh", r"^__device__ static inline uint64_t matrix_descriptor_encode[^\n]*|^template <typename T>\s+__device__ static inline uint64_t matrix_descriptor_raw.*?^\}", "kittens::detail"),
        piece("types/shared/descriptor.cuh", r"^template<[^>]*>\s+struct st_descriptor \{.*?^\};"),
        piece("types/register/rt_base.cuh", r"^template<[^>]*> struct rt_base \{.*?^\};"),
        piece("types/register/rt.cuh", r"^template<[^>]*>\s+struct rt \{.*?^\};"),
        *more,
        Piece(f"include/{mma}/base/64x64.impl", ".*", "kittens::detail::wgmma"),
        piece("ops/group/register/tile/conversions.cuh", r"^template<[^\n]*\n__device__ static inline rt<[^\n]* &subtile_inplace\(RT .*?^\}"),
        piece(f"{mma}/warpgroup.cuh", rf"^template<{kind}::row_layout D>\n[^\n]* mma_fence\(.*?^\}}|^template<[^\n]*\n[^\n]* mma_(?:commit_group|async_wait)\(.*?^\}}|^template<{kind}::row_layout D, {a}[^\n]*\n[^\n]* mma_AB\(.*?^\}}"),
    ]
    concept = r"(?:kittens::)?ducks::(?:c?rt::row_layout|c?rt::all|rt_layout::all|st::all|st_descriptor::(?:complex_)?input)"
    changes = [
        Change(rf"{concept} (\w+)", r"typename \1"),  # concepts are C++20, as is leaving out typename
        Change(r"static_assert\(kittens::ducks::base_types::T1<_T>\);", ""),
        Change(r"(using \w+\s*= )((?:kittens::)?(?:base_types::packing<\w+>|[A-Z]\w*|component)::\w+;)", r"\1typename \2"),
        *also,
        Change(
            r" else if constexpr \(std::is_same_v<T_D, (?:float|half)> +&& std::is_same_v<T_AB, (?:half|fp8\w+)>\) \{\s*asm.*?\);\s*\}", "",
            "no instruction that is known here",
        ),
        # The low bits of a generic address are taken for a shared one: here, they are any.
        Change(r"reinterpret_cast<uint64_t>\(addr\)", "__cvta_generic_to_shared(addr)"),
    ]  # fmt: skip
    sums, tile = ("crt<float, 16, 64>", "cst<bf16, 64, 64>") if parts == 2 else ("Sums", "Shared")
    after = KITTENS_KERNEL.replace("MULTIPLY", multiply).replace("PARTS", str(parts)).replace("SUMS", sums).replace("TILE", tile)
    return Case(
        name, "ThunderKittens", pieces, "product", 1, 128, _kittens_operands(parts), 1e-5, damages, changes, KITTENS, after,
        parts * 2 * 8192,
    )  # fmt: skip


_DESCRIBED = r"ducks::st_descriptor::(?:complex_)?input"
KITTENS_DAMAGES = [
    (r"asm volatile \(\"fence\.proxy\.async\.shared::cta;\\n\" ::: \"memory\"\);", ""),
    (r"mma_commit_group\(\); // commit", "// commit"),
    (r"chunk_idx\*2048", "chunk_idx*1024"),
    (r"2048\*ST::rows/TILE_ROW_DIM<T>, 1024, 1", "2048*ST::rows/TILE_ROW_DIM<T>, 2048, 1"),
]
KITTENSES = [
    _kittens(
        "mma_AB: A in shared memory", 1, _DESCRIBED, "mma_AB(sums, of_a, of_b);",
        *KITTENS_DAMAGES, (r"\(chunk_idx%4\)\*32", "(chunk_idx%4)*64"),
    ),
    _kittens(
        "mma_AB: A in registers", 1, "ducks::rt::row_layout A", """
  rt<bf16, 16, 64, ducks::rt_layout::row> rows;
  load(rows, of_a);
  mma_AB(sums, rows, of_b);
""",
        *KITTENS_DAMAGES, (r"warp_laneid / 16\) \* 8", "warp_laneid / 16) * 0"),
        more=[
            Piece("include/ops/thread/util/util.cuh", r"^template<> struct move<bf16_2> \{.*?^\};", "kittens"),
            Piece("include/ops/group/memory/tile/shared_to_register.cuh", r"^template<[^\n]*\n__device__ inline static void load\(.*?^\}", "kittens"),
        ],
        also=[
            Change(r"group<1>::", ""),
            Change(
                r"    __device__ static inline void (?:lds|sts|ldg|stg|ldsm4t|stsm4t?)\(.*?\n    \}", "",
                "no instruction that is known here",
            ),
            Change(r'("ldmatrix[^;]*;\\n" :[^;]*"r"\(src\))\);', r'\1 : "memory");', NO_MEMORY),
        ],
    ),
    _kittens(
        "mma_AB, complex: signs of -1", 2, _DESCRIBED, "mma_AB(sums, of_a, of_b);",
        *KITTENS_DAMAGES, (r"st_st<-1>", "st_st<1>"), also=[Change(r"base::st_st<", "base::template st_st<")],
        more=[
            Piece("include/types/shared/cst.cuh", r"^template<[^>]*>\s+struct cst \{.*?^\};", "kittens"),
            Piece("include/types/register/crt.cuh", r"^template<[^>]*>\s+struct crt \{.*?^\};", "kittens"),
        ],
    ),
]  # fmt: skip


# ---- CUTLASS: its products, in a kernel of ours. Core matrices of 8 rows by 16 bytes lie behind each other, first along the rows.

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
    MULTIPLY(words[k], described(s + 2 * 64 * 16 * k, 64), b_here, d, k == 0 ? GMMA::ScaleOut::Zero : GMMA::ScaleOut::One);
  }
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  for (int i = 0; i < 8; ++i) y[(row + i / 2 % 2 * 8) * 16 + i / 4 * 8 + 2 * t + i % 2] = d[i];
}
"""
_SUMS = ", ".join(f"d[{i}]" for i in range(8))
FROM_SHARED = f"#define MULTIPLY(words, a, b, d, adds) ATOM<>::fma(a, b, {_SUMS}, adds)\n"
FROM_REGISTERS = f"#define MULTIPLY(words, a, b, d, adds) ATOM<>::fma({', '.join(f'words[{i}]' for i in range(4))}, b, {_SUMS}, adds)\n"
CUTLASS = """
#define CUTE_ARCH_MMA_SM90A_ENABLED
#define CUTLASS_GDC_ENABLED
#define CUTE_HOST_DEVICE __forceinline__
#define CUTLASS_DEVICE __forceinline__
"""


def _product(narrow: Callable[[Array], Array]) -> Callable[[], Operands]:
    def operands() -> Operands:
        a, b = narrow(_normal(1, 64, 128)), narrow(_normal(2, 16, 128))
        a, b = (each[:, : 128 // each.itemsize].copy() for each in (a, b))
        y = np.full((64, 16), np.nan, np.float32)
        wide_a, wide_b = _wide(a, b)
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
    operand = (r"\{%8,  %9,  %10, %11\}", "{%9,  %8,  %10, %11}") if in_registers else (r" %8,(.{,20}) %9,", r" %9,\1 %8,")
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
    _cutlass("MMA_64x16x8_F32TF32TF32_SS_TN", _to_tf32, 1e-5),
    _cutlass("MMA_64x16x8_F32TF32TF32_RS_TN", _to_tf32, 1e-5),
    _cutlass("MMA_64x16x32_F32E4M3E4M3_SS_TN", lambda x: x.astype(ml_dtypes.float8_e4m3fn), 2e-3),
    _cutlass("MMA_64x16x32_F32E4M3E4M3_RS_TN", lambda x: x.astype(ml_dtypes.float8_e4m3fn), 2e-3),
    _cutlass("MMA_64x16x32_F32E5M2E5M2_SS_TN", lambda x: x.astype(ml_dtypes.float8_e5m2), 2e-3),
]


# ---- DeepGEMM: scales transposed by a grid that begins before the one that wrote them has ended


def _scales() -> Operands:
    rows, columns = 101, 7
    x, y = _normal(1, rows, columns).astype(np.float32), np.full((columns, 104), np.nan, np.float32)
    return Operands([x, y, np.uint32(rows)], lambda: y[:, :rows], x.T.astype(np.float64))


_DEEP = "deep_gemm/include/deep_gemm"
_DIVIDES = r"^template <typename T>\s+CUTLASS_HOST_DEVICE T ceil_div.*?^\}|^template <typename T, bool kDoCeil.*?^\}"
TRANSPOSE = Case(
    "transpose_fp32: griddepcontrol", "DeepGEMM",
    [
        Piece(f"{_DEEP}/common/math.cuh", _DIVIDES, "math"),
        Piece(f"{_DEEP}/common/utils.cuh", r"^template <uint32_t kNumBytes>.*?^\};", "utils"),
        Piece(f"{_DEEP}/ptx/ld_st.cuh", r"^CUTLASS_DEVICE float ld_shared\(.*?^\}", "ptx"),
        Piece(f"{_DEEP}/impls/smxx_layout.cuh", r"^template <[^>]*SF_K,\s+uint32_t PADDED_SF_K.*?^\}"),
    ],
    "transpose_fp32", 2, 64, _scales, 0.0,
    [
        (r"cudaGridDependencySynchronize\(\);", ""),
        (r"__syncthreads\(\);", ""),
        (r"i % in_block_mn", "i / SF_K"),
    ],
    [
        Change(r"template <uint32_t kNumThreads[^>]*>", "constexpr uint32_t kNumThreads = 64, BLOCK_MN = 64, SF_K = 7, PADDED_SF_K = 7;"),
        Change(r'("ld\.shared\.f32[^;]*; *"[^;]*)\);', r'\1 : "memory");', NO_MEMORY),
    ],
    before="""
#define CUTLASS_DEVICE __forceinline__
#define CUTLASS_HOST_DEVICE __forceinline__
#define CUTLASS_GLOBAL __global__
#define DG_STATIC_ASSERT(condition, ...) static_assert(condition, "")
""",
    shared_bytes=64 * 7 * 4, early=True,
)  # fmt: skip

CASES = [*SGEMMS, *LEARNS, HGEMM, *LLAMAS, FAST, *KITTENSES, *PRODUCTS, TRANSPOSE]
