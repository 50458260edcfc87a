"""Kernels with one mistake each, for the emulator to catch. What a body finds around it is in test_simt_emulator.py."""

from dataclasses import dataclass, field
from typing import Any

FAULT = "// the fault"  # marks the lines at one of which a broken kernel has to be caught


@dataclass
class Broken:
    """A kernel with one mistake: what it is caught as, and in which builds."""

    name: str
    kind: str
    message: str
    body: str
    before: str = ""
    builds: tuple[str, ...] = ("none", "address", "race")
    options: dict[str, Any] = field(default_factory=dict)


WAIT_FOR_BLOCK = f"__device__ __forceinline__ void wait_for_others() {{ __syncthreads(); }} {FAULT}"
BROKEN = [
    Broken(
        "read past the end",
        "out-of-bounds",
        "byte 256 of argument 0, which has 256 bytes",
        f"y[i] = x[i + 1]; {FAULT}",
    ),
    Broken("write past the end", "out-of-bounds", "byte 256 of argument 1, which has 256", f"y[i + 1] = x[i]; {FAULT}"),
    Broken(
        "read before the start",
        "out-of-bounds",
        "byte -4 of argument 0",
        f"y[i] = x[i - 1]; {FAULT}",
        builds=("address",),
    ),
    Broken("write before the start", "out-of-bounds", "write next to argument 1", "y[i - 1] = x[i];", builds=("none",)),
    Broken("null pointer", "out-of-bounds", "address 0x10", f"y[i] = *reinterpret_cast<int*>(16); {FAULT}"),
    Broken(
        "shared write past the end",
        "out-of-bounds",
        "write next to the dynamic shared memory, which has 256 bytes",
        "s[i + 1] = 0;",
        builds=("none",),
    ),
    Broken(
        "shared read past the end",
        "out-of-bounds",
        "read of 4 bytes at byte 256 of the dynamic shared memory, which has 256 bytes",
        f"y[i] = s[i + 1]; {FAULT}",
        builds=("address",),
    ),
    Broken(
        "shared access far past the end", "out-of-bounds", "byte 8000 of the dynamic", f"y[i] = s[i + 2000]; {FAULT}"
    ),
    Broken(
        "static shared read past the end",
        "out-of-bounds",
        "byte 256 of the static shared memory",
        f"__shared__ float t[64];\nfloat* p = t + i;\ny[i] = p[1]; {FAULT}",
        builds=("address",),
    ),
    Broken(
        "local array past its end",
        "out-of-bounds",
        r"index 4 of an array 'float \[4\]'",
        f"float sums[4];\nfor (int q = 0; q < 5; ++q) sums[q] = x[q]; {FAULT}\ny[i] = sums[i % 4];",
    ),
    Broken(
        "misaligned vector load",
        "misaligned",
        "struct float4' at byte 4 of argument 0, .* has to be a multiple of 16",
        f"y[i] = reinterpret_cast<const float4*>(x + i % 32)->x; {FAULT}",
    ),
    Broken(
        "misaligned copy", "misaligned", "copy_async_16 to byte 4 of", f"copy_async_16(s + i % 32, x, true); {FAULT}"
    ),
    Broken(
        "misaligned copy source",
        "misaligned",
        "copy_async_8 from byte 4",
        f"copy_async_8(s + i / 2 * 2, x + i, true); {FAULT}",
    ),
    Broken(
        "copy from past the end", "out-of-bounds", "copy_async_4 from", f"copy_async_4(s + i, x + i + 1, true); {FAULT}"
    ),
    Broken("copy to past the end", "out-of-bounds", "copy_async_4 to", f"copy_async_4(s + i + 1, x, true); {FAULT}"),
    Broken(
        "copy into registers",
        "out-of-bounds",
        "is not this block's shared memory",
        f"float r;\ncopy_async_4(&r, x, true); {FAULT}\ny[i] = r;",
    ),
    Broken(
        "barrier that some threads skip",
        "barrier",
        "threads 0-39 wait for __syncthreads at line 6; threads 40-63 exited",
        f"if (i < 40) __syncthreads(); {FAULT}\ny[i] = 1;",
    ),
    Broken(
        "barrier in two branches",
        "barrier",
        "__syncthreads reached while other threads wait at line 6",
        f"if (i < 32) __syncthreads();\nelse __syncthreads(); {FAULT}\ny[i] = 1;",
    ),
    Broken(
        "barrier in two branches, through a function",
        "barrier",
        "__syncthreads reached while other threads wait at line 1 called from 6",
        "if (i < 32) wait_for_others();\nelse wait_for_others();",
        before=WAIT_FOR_BLOCK,
    ),
    Broken(
        "barrier against warp collective",
        "barrier",
        "threads 0-31 wait for __syncwarp at line 6; threads 32-63 wait for __syncthreads at line 7|"
        "threads 0 wait for __syncwarp at line 6; threads 1-63 wait for __syncthreads at line 7",
        f"if (i == 0) __syncwarp();\nelse __syncthreads(); {FAULT}",
    ),
    Broken(
        "shuffle that a lane skips",
        "collective",
        "threads 0-2, 4-31 wait for __shfl_xor_sync at line 7; threads 3, 32-63 exited",
        f"if (i == 3) return;\ny[i] = __shfl_xor_sync(0xffffffff, i, 1); {FAULT}",
    ),
    Broken(
        "different warp collectives",
        "collective",
        "__any_sync reached while other lanes wait for __syncwarp at line 6",
        f"if (i % 2 == 0) __syncwarp();\nelse __any_sync(0xffffffff, 1); {FAULT}",
        options={"order": "forward"},
    ),
    Broken(
        "vote outside its mask",
        "collective",
        "mask 0x0000ffff leaves out the calling lane 16",
        f"y[i] = __ballot_sync(0xffff, 1); {FAULT}",
    ),
    Broken(
        "shuffle from outside its mask",
        "collective",
        "reads lane 20, which mask 0x0000ffff leaves out",
        f"if (i < 16)\ny[i] = __shfl_sync(0xffff, i, 20); {FAULT}",
    ),
    Broken(
        "named barriers crosswise",
        "deadlock",
        r"threads 0-31 wait for barrier_sync at line \d+ called from 6; threads 32-63 wait for barrier_sync at line "
        r"\d+ called from 7",
        f"if (i < 32) barrier_sync(1, 64); {FAULT}\nelse barrier_sync(2, 64);",
    ),
    Broken(
        "named barrier of odd size", "barrier", "40 threads; whole warps", f"if (i < 40) barrier_sync(1, 40); {FAULT}"
    ),
    Broken(
        "named barrier of two sizes",
        "barrier",
        "64 threads at barrier 1, which has 32",
        f"barrier_sync(1, i == 0 ? 32 : 64); {FAULT}",
    ),
    Broken(
        "neighbour's value without a barrier",
        "race",
        "write at byte .* of the dynamic shared memory, which has 256 bytes, which thread .* read at line 8 with no",
        f"s[i] = i; {FAULT}\n__syncwarp();\ny[i] = s[63 - i]; {FAULT}",
        builds=("race",),
    ),
    Broken(
        "neighbour's copy without a barrier",
        "race",
        "which thread .* at line (6|8|10) with no barrier between",
        f"copy_async_4(s + i, x + i, true); {FAULT}\ncopy_async_commit();\n"
        f"copy_async_wait<0>(); {FAULT}\n__syncwarp();\ny[i] = s[63 - i]; {FAULT}",
        builds=("race",),
    ),
    Broken(
        "overwrite without a barrier",
        "race",
        "read at byte .* which thread .* wrote at line 9",
        f"s[i] = i;\n__syncthreads();\ny[i] = s[63 - i]; {FAULT}\ns[i] = 0; {FAULT}",
        builds=("race",),
    ),
    Broken(
        "shuffle taken for a barrier",
        "race",
        "of the static shared memory",
        f"__shared__ float t[64];\nt[i] = i; {FAULT}\n__shfl_sync(0xffffffff, i, 0);\ny[i] = t[i ^ 1]; {FAULT}",
        builds=("race",),
    ),
    Broken(
        "two writers of one output", "race", "write at byte 0 of argument 1", f"y[0] = i; {FAULT}", builds=("race",)
    ),
    Broken(
        "endless loop",
        "timeout",
        "still running",
        f"while (*(volatile float*)s != 1) continue; {FAULT}",
        builds=("none", "address"),
        options={"timeout_s": 1},
    ),
    Broken(
        "too many local variables",
        "stack-overflow",
        "64 KiB",
        "volatile float big[99999];\nbig[i] = 1;\ny[i] = big[i];",
    ),
    Broken("division by zero", "crash", "Floating point exception", f"y[i] = 7 / (i - 5); {FAULT}"),
    Broken("trap", "trap", "__trap", f"if (i == 5) __trap(); {FAULT}"),
    Broken("unknown name", "compile", "unknown. was not declared", f"y[i] = unknown; {FAULT}", builds=("none",)),
]
