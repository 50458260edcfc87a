"""llama.cpp's products by the tiles of mma.cuh: Y = X W^T; two warps of a block share k."""

from collections.abc import Callable

import ml_dtypes
import numpy as np

from tests.foreign import NO_MEMORY, UNKNOWN, Array, Case, Change, Operands, Piece
from tests.foreign.arrays import normal, to_tf32, wide


def _tiles(narrow: Callable[[Array], Array]) -> Callable[[], Operands]:
    def operands() -> Operands:
        w, x = narrow(normal(1, 64, 256)), normal(2, 16, 256).astype(np.float32)
        y = np.full((16, 64), np.nan, np.float32)
        (wide_x, wide_w) = wide(narrow(x), w)
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
        Piece(
            f"{_GGML}/common.cuh",
            r"^static constexpr __device__ int ggml_cuda_get_(?:physical_warp_size|max_cpy_bytes)\(.*?^\}",
        ),
        Piece(f"{_GGML}/common.cuh", r"^template <int nbytes, int alignment = 0>.*?^\}"),
        Piece(f"{_GGML}/convert.cuh", r"^template<typename dst_t.*?^\}"),
        Piece(f"{_GGML}/mma.cuh"),
        Piece(
            f"{_GGML}/mmf.cuh",
            r"^using namespace.*?;|^static constexpr __device__ int mmf_get_padding.*?^\}|^template[^;{}]*? "
            r"mul_mat_f\(.*?^\}",
        ),
    ]
    changes = [
        Change(r"extern __shared__ char data_mmv\[\];", ""),  # the emulator cannot place those of templates
        Change(r"__launch_bounds__[^\n]*\nstatic __global__", "static __device__"),
        Change(
            r"static __device__ __forceinline__ void mma\(\s*tile<16, 8, int> .*?^    \}\n", "",
            f"s32.s8.s8.s32: {UNKNOWN}",
        ),
        Change(r'asm\("mma', 'asm volatile("mma', "mma.sync.*: the statement is not volatile"),
        Change(r'("l"\(xs\))\);', r'\1 : "memory");', NO_MEMORY),
        Change(r"(load_ldmatrix\([AB][^;]* tile_xy [^;]*;)", r"__syncwarp(); \1 __syncwarp();", "race: .* with no "
                                                                                                "barrier between"),
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
    _llama("tf32", "float", to_tf32, 1e-5),
]
