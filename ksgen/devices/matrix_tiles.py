"""Which products of 16-bit numbers a process may use here: of pairs by vectors, and by matrix tiles. The processor has them, the compiler
makes their instructions, and the system permits tiles.

Never runs one. Where any of that is missing, kernels by vectors serve.
"""

import ctypes
import platform
from functools import cache

from ksgen.build.host import HostCompiler, host_target
from ksgen.build.processors import processor_features

_MACROS = {"bf16": "__AMX_BF16__", "f16": "__AMX_FP16__"}  # what compilers define where they make products of such operands
_FLAGS = {"bf16": "amx_bf16", "f16": "amx_fp16"}  # what Linux calls them
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # a system call of x86-64, what it is to do, and for which state


@cache
def usable_tiles(compiler: HostCompiler) -> tuple[str, ...]:
    """What they multiply, by `Operand.name`; nothing where there are none to use."""
    features = processor_features()
    named = [name for name, flag in _FLAGS.items() if flag in features and "amx_tile" in features]
    made = _made_by(compiler) if named else frozenset()
    found = tuple(name for name in named if {"__AMX_TILE__", _MACROS[name]} <= made)
    return found if found and is_permitted() else ()


@cache
def pair_products(compiler: HostCompiler) -> tuple[str, ...]:
    """What its vectors multiply in pairs, by `Operand.name`: dot products that compilers make where the processor has them."""
    is_there = "avx512_bf16" in processor_features() and "__AVX512BF16__" in _made_by(compiler)
    return ("bf16",) if is_there else ()


@cache
def _made_by(compiler: HostCompiler) -> frozenset[str]:
    """What it defines for this processor: it is asked once."""
    return compiler.macros(host_target())


@cache
def is_permitted() -> bool:
    """Asks Linux once for the process: its threads' state grows by eight kilobytes with their first tile."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    said: int = ctypes.CDLL(None, use_errno=True).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return said == 0
