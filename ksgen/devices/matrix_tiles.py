"""Determines which products of 16-bit numbers this process may use: pairs in vector registers, and matrix tiles.

The processor must have the instructions, the compiler must emit them, and the system must permit tiles. If one is
missing, kernels with vector registers are used. Never runs a product.
"""

from functools import cache

from ksgen.build.host import HostCompiler, host_target
from ksgen.build.processors import processor_features, tiles_are_permitted

# macros that compilers define if they have instructions for products of these operands
_MACROS = {"bf16": "__AMX_BF16__", "f16": "__AMX_FP16__"}
_FLAGS = {"bf16": "amx_bf16", "f16": "amx_fp16"}  # Linux's names of the processor's features


@cache
def usable_tiles(compiler: HostCompiler | None) -> tuple[str, ...]:
    """Operands that matrix tiles multiply, by `Operand.name`. `compiler` is None if binaries come from elsewhere."""
    features = processor_features()
    named = [name for name, flag in _FLAGS.items() if flag in features and "amx_tile" in features]
    found = tuple(name for name in named if _makes(compiler, "__AMX_TILE__", _MACROS[name]))
    return found if found and tiles_are_permitted() else ()


@cache
def pair_products(compiler: HostCompiler | None) -> tuple[str, ...]:
    """Operands that processor and compiler can multiply in pairs in vector registers, by `Operand.name`."""
    is_there = "avx512_bf16" in processor_features() and _makes(compiler, "__AVX512BF16__")
    return ("bf16",) if is_there else ()


def _makes(compiler: HostCompiler | None, *macros: str) -> bool:
    return compiler is None or set(macros) <= _made_by(compiler)


@cache
def _made_by(compiler: HostCompiler) -> frozenset[str]:
    """Macros that the compiler defines for this processor, cached."""
    return compiler.macros(host_target())
