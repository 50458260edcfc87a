"""bfloat16 on GPUs: rounding without an instruction, as the emitted sources do it before sm_80 and in OpenCL C, by
the host's compiler.
"""

import ctypes
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from ksgen.build.host import find_host_compiler
from ksgen.emit.render import LIBRARIES, render
from ksgen.emit.templates import environment, fill
from ksgen.errors import ToolchainError
from ksgen.families import cuda_limits, family_named
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support import sass

# what is rounded away: nothing, little, near a tie, a tie, much
LOW = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
SHIM = """
#include <cstring>
typedef unsigned short ushort;
typedef unsigned int uint;
#define __forceinline__ inline
#define __device__ static
static uint as_uint(float value) { uint bits; std::memcpy(&bits, &value, 4); return bits; }
static uint __float_as_uint(float value) { return as_uint(value); }
"""
ENTRY = """
extern "C" void round_all(const float* x, unsigned short* y, long n) { for (long i = 0; i < n; ++i) y[i] =
    float_to_bfloat16(x[i]); }
"""


def rounded(dialect: str, x: np.ndarray, folder: Path) -> np.ndarray:
    """Round by the dialect's snippet, in a C++ program."""
    try:
        compiler = find_host_compiler().command
    except ToolchainError as error:
        pytest.skip(str(error))
    source = fill(
        environment().from_string("{{ snippet_lines }}\n{{ kernel }}"),
        {"kernel": ENTRY, "boxes": []},
        LIBRARIES[dialect],
        ("float32",),
    )
    file, library = folder / "round.cpp", folder / "round.so"
    file.write_text(SHIM + source)
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", "-o", library, file], check=True, capture_output=True)
    y = np.zeros(len(x), np.uint16)
    pointers = (ctypes.c_void_p(each.ctypes.data) for each in (x, y))
    ctypes.CDLL(str(library)).round_all(*pointers, ctypes.c_long(len(x)))
    return y


@pytest.mark.parametrize("dialect", ["cuda", "opencl"])
def test_the_snippet_rounds_as_the_instruction_does(dialect: str, tmp_path: Path) -> None:
    """Values round to nearest, ties to even, with subnormals and overflow to Inf. Every NaN becomes 0x7fff."""
    x = (np.arange(65536, dtype=np.uint32)[:, None] << 16 | LOW).ravel().view(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        expected = np.where(np.isnan(x), 0x7FFF, x.astype(ml_dtypes.bfloat16).view(np.uint16))
    np.testing.assert_array_equal(rounded(dialect, x, tmp_path), expected)


# families that store results in bfloat16, with weights in the same or in another type
STORES = [
    ("simt", "bsf", None),
    ("simt", "bsl", None),
    ("mma", "bsf", None),
    ("wgmma_registers", "bsf", None),
    ("gemv", "bsf", 8),
]


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("family", "layout", "batch"), STORES)
def test_an_instruction_rounds_results(family: str, layout: str, batch: int | None) -> None:
    sass.needed_disassembler()
    limits = cuda_limits("sm_90a")
    kernel = KernelSpec(Pattern(1, 768, 192, 2), "bfloat16", layout)
    source = render(kernel, family_named(family).default(kernel, limits, batch), family=family)
    entries = sass.instructions(sass.compiled(source.text, source.entry, "sm_90a").data)
    assert sass.count(entries[source.entry], "F2FP.BF16") > 0, entries
