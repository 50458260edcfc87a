"""Compiles emitted sources with `pycuda.compiler`, and loads the binaries, which ksgen's cache stores, as modules."""

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from pycuda.compiler import SourceModule, compile

from ksgen.build.children import python_program
from ksgen.build.request import Binary
from ksgen.build.toolchain import Nvcc


class KernelModule(SourceModule):  # type: ignore[misc]  # PyCUDA has no annotations
    """A `SourceModule` whose binary ksgen found in its verified cache, or compiled and put there.

    Create it inside a CUDA context. `get_function`, `get_global` and `get_texref` are PyCUDA's.
    """

    def __init__(self, binary: Binary) -> None:
        from pycuda.driver import LogicError, module_from_buffer

        try:
            self.module = module_from_buffer(binary.data)
        # PyCUDA decodes the driver's log for its error, but the log is not text if the driver wrote none
        except UnicodeDecodeError as error:
            raise LogicError(error.object[: error.start].decode().rstrip(" -")) from None
        self._bind_module()


def by_pycuda(nvcc: Nvcc) -> Nvcc:
    """Return the compiler, started by `pycuda.compiler` in a separate Python process.

    So the time limit, interrupts and the temporary folder work as without PyCUDA. nvcc's messages become a log instead
    of warnings, and a process with a CUDA context does not fork.
    """
    places = [os.path.abspath(each) for each in sys.path]
    program = f"import sys; sys.path[:] = {places!r}; from {__name__} import main; sys.exit(main(*sys.argv[1:]))"
    return replace(nvcc, starter=(python_program(), "-c", program))


def main(nvcc: str, target: str, source: str, *options: str) -> int:
    """Compile a file as `SourceModule` does, to a cubin next to it, and print nvcc's messages."""
    from pycuda.driver import CompileError

    def say(message: object, *_: object, **__: object) -> None:
        print(str(message).replace("kernel.cu", source))  # PyCUDA calls every source kernel.cu

    warnings.showwarning = say  # PyCUDA turns all messages of nvcc into warnings, here the report of resources
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        try:
            text = Path(source).read_text(encoding="utf-8")
            made = compile(text, nvcc=nvcc, options=list(options), no_extern_c=True, arch=target, cache_dir=False)
        except CompileError as refused:
            say(f"{refused.stdout}{refused.stderr}")
            return 1
    Path(source + "bin").write_bytes(made)
    return 0
