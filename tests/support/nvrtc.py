"""NVRTC of the versions that `make nvrtc` puts into .venv/nvrtc, as compilers for `build`."""

import ctypes
import re
from functools import cached_property
from pathlib import Path

from ksgen.build.request import Binary
from ksgen.build.toolchain import locale_restored
from ksgen.errors import ToolchainError

FOLDER = Path(__file__).parents[2] / ".venv" / "nvrtc"


class PackagedNvrtc:
    """The library of one folder of `make nvrtc`, which is named for its version."""

    name = "nvrtc"

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @cached_property
    def _library(self) -> ctypes.CDLL:
        (found,) = (each for each in self._folder.rglob("libnvrtc.so.*") if ".alt." not in each.name)
        return ctypes.CDLL(str(found))

    @property
    def version(self) -> str:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        return f"{major.value}.{minor.value}"

    def options(self, target: str) -> tuple[str, ...]:
        """What `ksgen.build.toolchain.Nvrtc` gives."""
        return (f"--gpu-architecture={target}", "-std=c++17", "-default-device", "--ptxas-options=-v")

    def compile(self, text: str, entry: str, target: str) -> Binary:
        nvrtc, program = self._library, ctypes.c_void_p()
        flags = [each.encode() for each in self.options(target)]
        nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), f"{entry}.cu".encode(), 0, None, None)
        try:
            with locale_restored():
                status = nvrtc.nvrtcCompileProgram(program, len(flags), (ctypes.c_char_p * len(flags))(*flags))
            log = self._read(program, "ProgramLog").decode(errors="replace")
            data = self._read(program, "CUBIN") if status == 0 else b""
        finally:
            nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
        if not data or re.search(r"\bwarning\b", log):
            raise ToolchainError(f"{entry} for {target}: NVRTC {self.version} says {log.strip() or status}")
        return Binary(data, entry, target)

    def _read(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, text)
        return text.raw
