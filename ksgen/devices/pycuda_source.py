"""Compiles emitted sources by `pycuda.compiler`, held by a `SourceModule`. ksgen's cache stores the binaries."""

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path

from pycuda.compiler import SourceModule, compile

from ksgen.build.request import Binary
from ksgen.build.toolchain import Nvcc


class KernelModule(SourceModule):  # type: ignore[misc]  # PyCUDA tells no types
    """A `SourceModule` whose binary ksgen found in its verified cache, or compiled and put there.

    It is made inside a context. `get_function`, `get_global` and `get_texref` are PyCUDA's.
    """

    def __init__(self, binary: Binary) -> None:
        from pycuda.driver import LogicError, module_from_buffer

        try:
            self.module = module_from_buffer(binary.data)
        except (
            UnicodeDecodeError
        ) as error:  # PyCUDA adds the driver's log to its error, which is no text where the driver wrote none
            raise LogicError(error.object[: error.start].decode().rstrip(" -")) from None
        self._bind_module()


def by_pycuda(nvcc: Nvcc) -> Nvcc:
    """Make the compiler start by `pycuda.compiler` in a separate Python process.

    So its time limit, interrupts and temporary folder work as without PyCUDA. Its messages are a log and no warning,
    and a process with a CUDA context does not fork.
    """
    places = [os.path.abspath(each) for each in sys.path]
    program = f"import sys; sys.path[:] = {places!r}; from {__name__} import main; sys.exit(main(*sys.argv[1:]))"
    return replace(nvcc, starter=(sys.executable, "-c", program))


def main(nvcc: str, target: str, source: str, *options: str) -> int:
    """Compile a file as `SourceModule` does, to a cubin next to it, and print nvcc's messages."""
    from pycuda.driver import CompileError

    def say(message: object, *_: object, **__: object) -> None:
        print(str(message).replace("kernel.cu", source))  # PyCUDA calls every source kernel.cu

    warnings.showwarning = say  # PyCUDA warns of whatever nvcc says, which here says how many registers it used
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
