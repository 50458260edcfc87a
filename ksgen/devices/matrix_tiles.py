"""Which products of 16-bit numbers a process may use here: of pairs by vectors, and by matrix tiles. The processor has them, the compiler
makes their instructions, and the system permits tiles.

Never runs one. Where any of that is missing, kernels by vectors serve.
"""

from functools import cache

from ksgen.build.host import HostCompiler, host_target
from ksgen.build.processors import processor_features, tiles_are_permitted

_MACROS = {"bf16": "__AMX_BF16__", "f16": "__AMX_FP16__"}  # what compilers define where they make products of such operands
_FLAGS = {"bf16": "amx_bf16", "f16": "amx_fp16"}  # what Linux calls them


@cache
def usable_tiles(compiler: HostCompiler | None) -> tuple[str, ...]:
    """What they multiply, by `Operand.name`; nothing where there are none to use. `compiler`: none, where another built beforehand."""
    features = processor_features()
    named = [name for name, flag in _FLAGS.items() if flag in features and "amx_tile" in features]
    found = tuple(name for name in named if _makes(compiler, "__AMX_TILE__", _MACROS[name]))
    return found if found and tiles_are_permitted() else ()


@cache
def pair_products(compiler: HostCompiler | None) -> tuple[str, ...]:
    """What its vectors multiply in pairs, by `Operand.name`: dot products that compilers make where the processor has them."""
    is_there = "avx512_bf16" in processor_features() and _makes(compiler, "__AVX512BF16__")
    return ("bf16",) if is_there else ()


def _makes(compiler: HostCompiler | None, *macros: str) -> bool:
    return compiler is None or set(macros) <= _made_by(compiler)


@cache
def _made_by(compiler: HostCompiler) -> frozenset[str]:
    """What it defines for this processor: it is asked once."""
    return compiler.macros(host_target())
