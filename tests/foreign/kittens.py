"""ThunderKittens' products by a warpgroup: Y = A B of tiles of 64 by 64 in swizzles of 128 bytes, real or complex."""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np

from tests.foreign import NO_MEMORY, UNKNOWN, Case, Change, Operands, Piece
from tests.foreign.arrays import normal, wide


def _operands(parts: int) -> Callable[[], Operands]:
    def operands() -> Operands:
        a, b = (normal(seed, parts, 64, 64).astype(ml_dtypes.bfloat16) for seed in (1, 2))
        y = np.full((parts, 64, 64), np.nan, np.float32)
        of_a, of_b = (each[0] + 1j * each[1] if parts == 2 else each[0] for each in wide(a, b))
        exact = of_a @ of_b
        return Operands([a, b, y], lambda: y, np.stack([exact.real, exact.imag][:parts]))

    return operands


BEFORE = """
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
template <typename T> struct component<T, decltype(void(sizeof(typename T::component)))> { using type =
    typename T::component; };
template <typename T> using get_st = typename component<T>::type;
}
}
namespace detail::wgmma { template <typename D, typename AB, int COLUMNS, int TRANSPOSES_A,
    int TRANSPOSES_B> struct base; }
}
"""
KERNEL = """
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


def _piece(path: str, keep: str, namespace: str = "") -> Piece:
    return Piece(f"include/{path}", keep, f"kittens{namespace}")


_FUNCTION = r"^template<[^\n]*\n[^\n]*"
_UTIL, _TYPES, _DESCRIPTOR = "common/util.cuh", "common/base_types.cuh", "types/shared/descriptor.cuh"
_WARPGROUP = "ops/group/mma/warpgroup.cuh"
PIECES = [
    _piece(_UTIL, r"^(?:template<typename T> )?constexpr int (?:BASE_TILE_DIM|TILE_\w+_DIM)[^;]*;"),
    _piece(_UTIL, r"^__device__[^\n]*(?:warpid|laneid)\(\)[^\n]*"),
    _piece(_TYPES, r"^template<typename T> struct packing .*?^\};", "::base_types"),
    _piece(_TYPES, r"^template<> struct packing<(?:bf16|float)(?:_?2)?>.*?^\};", "::base_types"),
    _piece(_TYPES, r"^template<typename T, typename U> struct convertor .*?^\};", "::base_types"),
    _piece("types/shared/st.cuh", r"^template<\s+typename ST[^;{]*?struct st_subtile;"),
    _piece("types/shared/st.cuh", r"^template<[^>]*>\s+struct KITTENS_DEFAULT_ALIGN st \{.*?^\};"),
    _piece(_DESCRIPTOR, r"^__device__ static inline uint64_t matrix_descriptor_encode[^\n]*", "::detail"),
    _piece(
        _DESCRIPTOR,
        r"^template <typename T>\s+__device__ static inline uint64_t matrix_descriptor_raw.*?^\}",
        "::detail",
    ),
    _piece(_DESCRIPTOR, r"^template<[^>]*>\s+struct st_descriptor \{.*?^\};"),
    _piece("types/register/rt_base.cuh", r"^template<[^>]*> struct rt_base \{.*?^\};"),
    _piece("types/register/rt.cuh", r"^template<[^>]*>\s+struct rt \{.*?^\};"),
    _piece("ops/group/mma/base/64x64.impl", ".*", "::detail::wgmma"),
    _piece(_WARPGROUP, _FUNCTION + r" mma_(?:commit_group|async_wait)\(.*?^\}"),
]


def _mma_ab(tiles: str, of_a: str) -> list[Piece]:
    """The product whose A is such an operand, and the fence before it."""
    head = rf"^template<ducks::{tiles}::row_layout D"
    return [
        _piece(_WARPGROUP, head + r">\n[^\n]* mma_fence\(.*?^\}"),
        _piece(_WARPGROUP, rf"{head}, {of_a}[^\n]*\n[^\n]* mma_AB\(.*?^\}}"),
    ]


def _kittens(
    name: str,
    parts: int,
    multiply: str,
    damages: Sequence[tuple[str, str]],
    more: Sequence[Piece],
    also: Sequence[Change] = (),
) -> Case:
    concept = (
        r"(?:kittens::)?ducks::(?:c?rt::row_layout|c?rt::all|rt_layout::all|st::all|st_descriptor::(?:complex_)?input)"
    )
    changes = [
        Change(rf"{concept} (\w+)", r"typename \1"),  # concepts are C++20, as is leaving out typename
        Change(r"static_assert\(kittens::ducks::base_types::T1<_T>\);", ""),
        Change(r"(using \w+\s*= )((?:kittens::)?(?:base_types::packing<\w+>|[A-Z]\w*|component)::\w+;)", r"\1typename "
                                                                                                         r"\2"),
        *also,
        Change(
            r" else if constexpr \(std::is_same_v<T_D, (?:float|half)> +&& std::is_same_v<T_AB, (?:half|fp8\w+)>\) "
            r"\{\s*asm.*?\);\s*\}", "",
            UNKNOWN,
        ),
        # The low bits of a generic address are taken for a shared one: here, they are any.
        Change(r"reinterpret_cast<uint64_t>\(addr\)", "__cvta_generic_to_shared(addr)"),
    ]  # fmt: skip
    sums, tile = ("crt<float, 16, 64>", "cst<bf16, 64, 64>") if parts == 2 else ("Sums", "Shared")
    after = (
        KERNEL.replace("MULTIPLY", multiply).replace("PARTS", str(parts)).replace("SUMS", sums).replace("TILE", tile)
    )
    return Case(
        name, "ThunderKittens", [*PIECES, *more], "product", 1, 128, _operands(parts), 1e-5, damages, changes, BEFORE,
        after,
        parts * 2 * 8192,
    )  # fmt: skip


_DESCRIBED = r"ducks::st_descriptor::(?:complex_)?input"
DAMAGES = [
    (r"asm volatile \(\"fence\.proxy\.async\.shared::cta;\\n\" ::: \"memory\"\);", ""),
    (r"mma_commit_group\(\); // commit", "// commit"),
    (r"chunk_idx\*2048", "chunk_idx*1024"),
    (r"2048\*ST::rows/TILE_ROW_DIM<T>, 1024, 1", "2048*ST::rows/TILE_ROW_DIM<T>, 2048, 1"),
]
KITTENSES = [
    _kittens(
        "mma_AB: A in shared memory", 1, "mma_AB(sums, of_a, of_b);",
        [*DAMAGES, (r"\(chunk_idx%4\)\*32", "(chunk_idx%4)*64")],
        _mma_ab("rt", _DESCRIBED),
    ),
    _kittens(
        "mma_AB: A in registers", 1, "rt<bf16, 16, 64> rows; load(rows, of_a); mma_AB(sums, rows, of_b);",
        [*DAMAGES, (r"warp_laneid / 16\) \* 8", "warp_laneid / 16) * 0")],
        [
            _piece("ops/thread/util/util.cuh", r"^template<> struct move<bf16_2> \{.*?^\};"),
            _piece("ops/group/memory/tile/shared_to_register.cuh", r"^template<[^\n]*\n__device__ inline static void "
                                                                   r"load\(.*?^\}"),
            _piece("ops/group/register/tile/conversions.cuh", _FUNCTION + r" &subtile_inplace\(RT .*?^\}"),
            *_mma_ab("rt", "ducks::rt::row_layout A"),
        ],
        [
            Change(r"group<1>::", ""),
            Change(r"    __device__ static inline void (?:lds|sts|ldg|stg|ldsm4t|stsm4t?)\(.*?\n    \}", "", UNKNOWN),
            Change(r'("ldmatrix[^;]*;\\n" :[^;]*"r"\(src\))\);', r'\1 : "memory");', NO_MEMORY),
        ],
    ),
    _kittens(
        "mma_AB, complex: signs of -1", 2, "mma_AB(sums, of_a, of_b);",
        [*DAMAGES, (r"st_st<-1>", "st_st<1>")],
        [
            _piece("types/shared/cst.cuh", r"^template<[^>]*>\s+struct cst \{.*?^\};"),
            _piece("types/register/crt.cuh", r"^template<[^>]*>\s+struct crt \{.*?^\};"),
            *_mma_ab("crt", _DESCRIBED),
        ],
        [Change(r"base::st_st<", "base::template st_st<")],
    ),
]  # fmt: skip
