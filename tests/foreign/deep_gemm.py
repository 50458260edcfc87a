"""DeepGEMM's kernels: scales transposed, and Y = A B^T in bfloat16 by a persistent block.

The product needs parts of CUTLASS, which are taken from its own repository.
"""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from tests.emulator import TensorMap
from tests.foreign import NO_MEMORY, UNKNOWN, Case, Change, Operands, Piece, tensor_map
from tests.foreign.arrays import normal, wide

_DEEP = "deep_gemm/include/deep_gemm"


# ---- DeepGEMM: scales transposed by a grid that begins before the one that wrote them has ended


def _scales() -> Operands:
    rows, columns = 101, 7
    x, y = normal(1, rows, columns).astype(np.float32), np.full((columns, 104), np.nan, np.float32)
    return Operands([x, y, np.uint32(rows)], lambda: y[:, :rows], x.T.astype(np.float64))


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
        Change(r"template <uint32_t kNumThreads[^>]*>", "constexpr uint32_t kNumThreads = 64, BLOCK_MN = 64, SF_K = "
                                                        "7, PADDED_SF_K = 7;"),
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


# ---- one thread loads boxes, a warpgroup multiplies and stores boxes


def _bf16_operands() -> Operands:
    m, n, k = 128, 64, 256
    a, b = (normal(seed, *shape).astype(ml_dtypes.bfloat16) for seed, shape in ((1, (m, k)), (2, (n, k))))
    y = np.full((m, n), np.nan, ml_dtypes.bfloat16)
    wide_a, wide_b = wide(a, b)
    maps = [tensor_map(each, (64, 64)) for each in (a, b, y)]
    return Operands([*map(np.uint32, (m, n, k)), *maps], lambda: y, wide_a @ wide_b.T)


def _fp8_operands() -> Operands:
    """A scale for each row of A and 128 of k, and for 128 by 128 of B."""
    m, n, k = 128, 64, 512
    a, b = (normal(seed, *shape).astype(ml_dtypes.float8_e4m3fn) for seed, shape in ((1, (m, k)), (2, (n, k))))
    of_a, of_b = (
        np.exp(normal(seed, *shape) / 4).astype(np.float32) for seed, shape in ((3, (k // 128, m)), (4, (1, k // 128)))
    )
    y = np.full((m, n), np.nan, ml_dtypes.bfloat16)
    wide_a, wide_b, scales_a, scales_b = wide(a, b, of_a, of_b)
    exact = (wide_a * scales_a.T.repeat(128, axis=1)) @ (wide_b * scales_b.repeat(128, axis=1)).T
    maps = [tensor_map(a.view(np.uint8), (128, 64)), tensor_map(b.view(np.uint8), (128, 64)), tensor_map(y, (64, 64))]
    return Operands(
        [of_b, *map(np.uint32, (m, n, k)), *maps, TensorMap(of_a, (m, k // 128), (4 * m,), (64, 1))], lambda: y, exact
    )


BEFORE = """
#include <initializer_list>
#define __CUDA_ARCH__ 900
#define CUTE_ARCH_MMA_SM90A_ENABLED
#define CUTE_ARCH_TMA_SM90_ENABLED
#define CUDA_BARRIER_ENABLED 1
#define CUDA_CTA_RECONFIG_ACTIVATED 1
#define CUTE_DEVICE __forceinline__
#define CUTE_HOST_DEVICE __forceinline__
#define CUTLASS_DEVICE __forceinline__
#define CUTLASS_HOST_DEVICE __forceinline__
#define CUTLASS_ASSERT(condition)
#define CUTE_INVALID_CONTROL_PATH(text) __trap()
#define DG_STATIC_ASSERT(...) static_assert(__VA_ARGS__)
#define DG_TRAP_ONLY_DEVICE_ASSERT(condition) if (!(condition)) __trap()
#define DG_DEVICE_ASSERT(condition) if (!(condition)) __trap()
using uint16_t = unsigned short;
extern __shared__ __align__(1024) uint8_t smem_buffer[];
namespace std {
template <typename T> constexpr T&& forward(T& value) { return static_cast<T&&>(value); }
}
namespace cutlass { using bfloat16_t = __nv_bfloat16; }
namespace cute {
using std::is_same_v;
using std::conditional_t;
using TmaDescriptor = CUtensorMap;
template <size_t... I> struct index_sequence {};
template <size_t N> using make_index_sequence = index_sequence<__integer_pack(N)...>;
template <typename T> struct numeric_limits { static constexpr T max() { return T(~T(0)); } };
template <int N> struct Int {};
template <typename T> constexpr T max(T x, T y) { return std::max(x, y); }
inline uint32_t cast_smem_ptr_to_uint(const void* at) { return (uint32_t)__cvta_generic_to_shared(at); }
struct SM90_TMA_REDUCE_ADD_2D;
struct SM90_TMA_REDUCE_ADD_3D;
}
struct __nv_fp8_e4m3 { unsigned char bits; };
namespace deep_gemm::ptx { void st_shared(const float2*, float2); }  // of results in float32
namespace deep_gemm::comm { inline void cluster_sync_with_relaxed_arrive() { __trap(); } }
"""
BF16_KERNEL = """
extern "C" __global__ void __launch_bounds__(256, 1)
gemm(uint32_t m, uint32_t n, uint32_t k, const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
     const __grid_constant__ CUtensorMap y) {
  constexpr auto K_MAJOR = cute::UMMA::Major::K;
  deep_gemm::sm90_bf16_gemm_impl<K_MAJOR, K_MAJOR, 0, 0, 0, 1, 64, 64, 64, 128, 128, 128, 3, 128, 128, 1, false, 1,
                                 deep_gemm::GemmType::Normal, false, cutlass::bfloat16_t>(nullptr, m, n, k, a, b, y);
}
"""
FP8_KERNEL = """
extern "C" __global__ void __launch_bounds__(256, 1)
gemm(float* of_b, uint32_t m, uint32_t n, uint32_t k, const __grid_constant__ CUtensorMap a,
    const __grid_constant__ CUtensorMap b,
     const __grid_constant__ CUtensorMap y, const __grid_constant__ CUtensorMap of_a) {
  deep_gemm::sm90_fp8_gemm_1d2d_impl<cute::UMMA::Major::K, 0, 0, 0, 1, 64, 64, 128, 128, 128, 128, 3, 128, 128, 1,
      false, 1,
                                     deep_gemm::GemmType::Normal, cutlass::bfloat16_t,
                                     deep_gemm::epilogue::transform::EpilogueIdentity>(of_b, nullptr, m, n, k, a, b, y,
                                         of_a);
}
"""


def _cutlass(path: str, keep: str, namespace: str = "") -> Piece:
    return Piece(f"include/{path}", keep, namespace, "cutlass")


_SM90 = "cute/arch/mma_sm90"
_BOXES = r"SM90_TMA_(?:LOAD|LOAD_MULTICAST|STORE)_[23]D"
_MMA, _OF_HEADS = r"^template <int N_, typename MMA>\s+struct ", r"^// ReSharper[^\n]*\ntemplate <uint32_t kHeadDim>"
_UNUSED = r"test_wait|try_wait|invalidate|expect_transaction|complete_transaction"
PIECES = [
    _cutlass("cute/arch/mma_sm100_desc.hpp", r"^enum class Major .*?^\};", "cute::UMMA"),
    _cutlass(f"{_SM90}_desc.hpp", r"^enum class LayoutType .*?^\};", "cute::SM90::GMMA"),
    _cutlass(f"{_SM90}_gmma.hpp", r"^enum class (?:Major|ScaleOut|ScaleIn) \{.*?^\};", "cute::SM90::GMMA"),
    _cutlass(f"{_SM90}_desc.hpp", r"^union GmmaDescriptor.*?^\};", "cute"),
    _cutlass("cute/arch/copy_sm90_desc.hpp", r"^enum class CacheHintSm\d+ .*?^\};", "cute::TMA"),
    _cutlass("cute/arch/copy_sm90_desc.hpp", r"^CUTE_HOST_DEVICE\s+void\s+prefetch_tma_descriptor\(.*?^\}", "cute"),
    _cutlass("cute/arch/copy_sm90_tma.hpp", rf"^struct {_BOXES}\s.*?^\}};", "cute"),
    _cutlass(
        "cute/arch/copy_sm90_tma.hpp",
        r"^(?:template <int Count>\s+)?CUTE_HOST_DEVICE static void\s+tma_store_\w+\(\).*?^\}",
        "cute",
    ),
    _cutlass(
        "cute/arch/cluster_sm90.hpp", r"^CUTE_\w+ uint32_t (?:block_rank_in_cluster|elect_one_sync)\(\).*?^\}", "cute"
    ),
    _cutlass(
        "cutlass/arch/barrier.h",
        r"^enum class ReservedNamedBarriers.*?^\};|^class NamedBarrier.*?^\};",
        "cutlass::arch",
    ),
    _cutlass("cutlass/arch/barrier.h", r"^struct Cluster(?:Transaction)?Barrier .*?^\};", "cutlass::arch"),
    _cutlass("cutlass/arch/barrier.h", r"^CUTLASS_DEVICE\s+void fence_barrier_init\(\).*?^\}", "cutlass::arch"),
    _cutlass("cutlass/arch/reg_reconfig.h", r"^template<uint32_t RegCount>.*?^\}", "cutlass::arch"),
    Piece(f"{_DEEP}/common/math.cuh"),
    Piece(f"{_DEEP}/common/types.cuh"),
    Piece(
        f"{_DEEP}/common/utils.cuh", r"^template <typename FuncT>\s+struct PatternVisitor.*?^\};", "deep_gemm::utils"
    ),
    Piece(f"{_DEEP}/common/tma_copy.cuh"),
    Piece(f"{_DEEP}/ptx/utils.cuh", r"^CUTLASS_DEVICE uint32_t get_lane_idx\(.*?^\}", "deep_gemm::ptx"),
    Piece(
        f"{_DEEP}/ptx/ld_st.cuh", r"^template <typename dtype_t>\s+struct SM90_U32x2_STSM_N .*?^\};", "deep_gemm::ptx"
    ),
    Piece(f"{_DEEP}/ptx/wgmma.cuh"),
    Piece(f"{_DEEP}/mma/sm90.cuh", rf"^/// Shared memory descriptor.*?(?={_OF_HEADS})", "deep_gemm::mma::sm90"),
    Piece(f"{_DEEP}/scheduler/gemm.cuh"),
]
DAMAGES = [
    (r"full_barriers\[stage_idx\]->wait\(phase\);", ""),
    (r"(// Wait consumer release\s+)empty_barriers\[stage_idx\]->wait\(phase \^ 1\);", r"\1"),
    (r"ptx::warpgroup_wait<0>\(\);", ""),
    (r"cute::tma_store_fence\(\);", ""),
    (r"cudaGridDependencySynchronize\(\);", ""),
    (r"col \^= row % \(kSwizzleDMode / 16\);", ""),
    (r"phase \^= stage_idx == 0;", ""),
]
_DEVICE = r"  CUTLASS_(?:HOST_)?DEVICE\s+(?:static )?"
CHANGES = [
    Change(r"  //\s+// DEPRECATED APIs.*?(?=^\};)", ""),
    Change(r"cutlass::arch::synclog_emit\w+\(.*?\);", ""),
    Change(r"(?<=CUTLASS_GLOBAL )__launch_bounds__\([^\n]*\) void", "void"),  # a template, called by a kernel of ours
    Change(r"CUTLASS_GLOBAL", "inline"),
    Change(r"const __grid_constant__ cute::TmaDescriptor", "const cute::TmaDescriptor&"),
    Change(r"extern __shared__ __align__\(1024\) uint8_t smem_buffer\[\];(?=\s+DG)", ""),
    Change(r"\n  struct PREFETCH\s.*?\n  \};", "", f"bulk.prefetch.tensor.*{UNKNOWN}"),
    Change(rf"{_DEVICE}(?:bool|void) (?:{_UNUSED})\(.*?^  \}}\n", "", UNKNOWN),
    Change(rf"{_DEVICE}void arrive_and_expect_tx\([^{{]*cta_id[^{{]*\{{.*?^  \}}\n", "", UNKNOWN),
    Change(rf"{_DEVICE}void arrive(?:_and_wait)?(?:_internal)?_unaligned\(.*?^  \}}\n", "", UNKNOWN),
    Change(r'("fence\.proxy\.async\.shared::cta;"|"cp\.async\.bulk\.commit_group;")\)', r'\1 ::: "memory")', NO_MEMORY),
    Change(r'("stmatrix[^;]*;\\n"[^;]*)\);', r'\1 : "memory");', NO_MEMORY),
    Change(
        r"(__syncwarp\(\);\s+\})(\s+\}\s+#else)", r"\1 cute::tma_store_wait<0>();\2",
        "exits while store_box may still read shared memory",
    ),
]  # fmt: skip


def _gemm(
    name: str,
    atoms: str,
    more: Sequence[Piece],
    operands: Callable[[], Operands],
    kernel: str,
    shared_bytes: int,
    damages: Sequence[tuple[str, str]],
    changes: Sequence[Change] = (),
) -> Case:
    """A product by atoms of CUTLASS."""
    struct = rf"^template <[^>]*>\s+struct {atoms}\s.*?^\}};"
    products = [_cutlass(f"{_SM90}_gmma{extended}.hpp", struct, "cute::SM90::GMMA") for extended in ("", "_ext")]
    impl = Piece(f"{_DEEP}/impls/{name}.cuh")
    return Case(
        f"{name}: TMA, wgmma", "DeepGEMM", [*PIECES[:4], *products, *PIECES[4:], *more, impl], "gemm", 1, 256, operands,
        2e-2,
        [*DAMAGES, *damages], [*CHANGES, *changes], BEFORE, kernel, shared_bytes, early=True,
    )  # fmt: skip


_OF_SM90, _PTX = "deep_gemm::mma::sm90", "deep_gemm::ptx"
DEEP_GEMMS = [
    TRANSPOSE,
    _gemm(
        "sm90_bf16_gemm", r"MMA_64x\d+x16_F32BF16BF16_SS",
        [Piece(f"{_DEEP}/mma/sm90.cuh", rf"{_MMA}BF16MMA .*?(?={_MMA}TF32MMARS)", _OF_SM90)],
        _bf16_operands, BF16_KERNEL, 8192 + 3 * 2 * 8192 + 48,
        [(r"b_desc_base_lo, 0, \(k \* WGMMA::K\)", "b_desc_base_lo, 0, (k * WGMMA::K ^ 16)")],
    ),
    _gemm(
        "sm90_fp8_gemm_1d2d", r"MMA_64x\d+x32_F32E4M3E4M3_SS_TN",
        [
            Piece(f"{_DEEP}/mma/sm90.cuh", rf"{_MMA}FP8MMA .*?(?={_MMA}BF16MMA)", _OF_SM90),
            Piece(f"{_DEEP}/ptx/ld_st.cuh", r"^CUTLASS_DEVICE (?:float ld|void st)_shared\(const float\* .*?^\}", _PTX),
            Piece(f"{_DEEP}/epilogue/transform.cuh"),
        ],
        _fp8_operands, FP8_KERNEL, 8192 + 3 * 2 * 8192 + 3 * 256 + 16 + 48,
        [
            (r"b_desc_base_lo \+ k \* WGMMA::K", "b_desc_base_lo + (k ^ 1) * WGMMA::K"),
            (r"scale_a_1 \* scale_b_0", "scale_a_0 * scale_b_0"),
            (r"accum, k\);", "accum, 1);"),
        ],
        [
            Change(r"scheduler\.get_global_idx<", "scheduler.template get_global_idx<"),
            Change(r"epilogue_type_t::apply_index_n<", "epilogue_type_t::template apply_index_n<"),
            Change(r'("(?:ld|st)\.shared\.f32[^;]*; *"[^;]*)\);', r'\1 : "memory");', NO_MEMORY),
        ],
    ),
]  # fmt: skip
