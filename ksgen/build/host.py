"""The host's own C++ compiler: makes shared libraries of OpenCL C texts for processors. Calls nothing that it made.

Looked for in this order: `KSGEN_CXX`, then c++, g++, clang++ on PATH, then the `ziglang` package. `host_words.hpp` is put before a text:
the words of OpenCL C in C++, and `host_tiles.hpp`, where it uses matrix tiles. Behind it comes, for each entry, a function that walks
through work groups.
"""

import functools
import hashlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from ksgen.build.children import current_children
from ksgen.build.refused import refusal
from ksgen.build.request import Binary
from ksgen.errors import ToolchainError

WORDS = Path(__file__).with_name("host_words.hpp")
TILES = Path(__file__).with_name("host_tiles.hpp")
WALKS = "__walk"  # as `HOST_WALK` of the words says: behind the name of an entry: the function that walks through its work groups
_ENTRY = re.compile(r"^ENTRY\(1, 1\)\s+void (\w+)\(", re.MULTILINE)
_CANDIDATES = ("c++", "g++", "clang++")
_REMEDY = "install g++ or clang, or pip install ziglang; KSGEN_CXX names another"


@dataclass(frozen=True)
class HostCompiler:
    """`command`: what is run, before options."""

    command: tuple[str, ...]
    name: ClassVar[str] = "c++"

    @property
    def version(self) -> str:
        """Its first line, which tells GCC from Clang, and a digest of the words that it takes texts with."""
        return f"{_first_line(self.command)}, {_digest_of_words()}"

    def options(self, target: str) -> tuple[str, ...]:
        return (*_options(self.command), *_for_this_processor())

    def macros(self, target: str) -> frozenset[str]:
        """What it defines of itself for a target, such as `__AVX2__`."""
        said = current_children.get().run((*self.command, *self.options(target), "-dM", "-E", "-x", "c++", os.devnull))
        return frozenset(re.findall(r"^#define (\w+)", said.log, re.MULTILINE))

    def compile(self, text: str, entry: str, target: str) -> Binary:
        if target != host_target():
            raise ToolchainError(f"{entry}: the compiler of {host_target()} cannot build for {target}")
        entries = _ENTRY.findall(text)
        if entry not in entries:
            raise ToolchainError(f"{entry}: its groups have several work items; only an OpenCL driver runs such kernels")
        return Binary(self.compile_whole(source_of(text, entries), entry, target), entry, target)

    def compile_whole(self, source: str, name: str, target: str) -> bytes:
        """The shared library that a C++ source becomes."""
        with tempfile.TemporaryDirectory(prefix="ksgen-host-") as folder:
            Path(folder, f"{name}.cpp").write_text(source, encoding="utf-8")
            finished = current_children.get().run((*self.command, *self.options(target), f"{name}.cpp", "-o", f"{name}.so"), folder)
            made = Path(folder, f"{name}.so")
            if finished.returncode == 0 and made.exists():
                return made.read_bytes()
        raise refusal(
            f"{name}: {self.command[0]} refused it", f"{name}.cpp", source, finished.log,
            lambda kept: (*self.command, *self.options(target), kept, "-o", f"{name}.so"),
        )  # fmt: skip


def source_of(text: str, entries: Sequence[str]) -> str:
    """What the compiler is given: words, the text, and a walk for each entry."""
    unrolled = text.replace('_Pragma("unroll")', '_Pragma("GCC unroll 64")')
    walks = [f"HOST_WALK({entry})\n" for entry in entries]
    tiles = TILES.read_text(encoding="utf-8") if "tile_begin(" in text else ""
    return "".join((WORDS.read_text(encoding="utf-8"), tiles, '\nextern "C" {\n', unrolled, *walks, "}\n"))


def find_host_compiler() -> HostCompiler:
    """The one that works; `ToolchainError` if there is none."""
    found = _find(os.environ.get("KSGEN_CXX"), os.environ.get("PATH"))
    if isinstance(found, str):
        raise ToolchainError(found)
    return found


def host_target() -> str:
    """What libraries are built for: this machine's instructions. Those of another processor may not run here."""
    return f"host {platform.system()} {instruction_set()}"


@functools.cache
def instruction_set() -> str:
    """Of this processor, in two words. A binary that uses all of it may not run on another."""
    return f"{platform.machine()} {hashlib.sha256((_told_features() or platform.processor()).encode()).hexdigest()[:8]}"


@functools.cache
def processor_features() -> frozenset[str]:
    """As the system names them: avx2, avx512f, asimd."""
    return frozenset(_told_features().split())


def _told_features() -> str:
    with suppress(OSError):
        if found := re.search(r"^(?:flags|Features)\s*:(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1]
    return ""


@functools.cache
def _digest_of_words() -> str:
    return f"words {hashlib.sha256(WORDS.read_bytes() + TILES.read_bytes()).hexdigest()[:8]}"


def _options(command: tuple[str, ...]) -> tuple[str, ...]:
    is_clang = "clang" in _first_line(command).lower() or "ziglang" in command
    vectors = () if is_clang else ("-mprefer-vector-width=512",) if platform.machine() in ("x86_64", "AMD64") else ()
    quiet = ("-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fno-strict-aliasing")
    return ("-std=gnu++17", *_level(is_clang), "-fPIC", "-shared", "-pthread", *quiet, *vectors)


def _level(is_clang: bool) -> tuple[str, ...]:
    """How far to optimise. By -O3, GCC moves sums out of the 16 vector registers that a processor without AVX-512 has; by -O2 too,
    where it shares a register between a sum and its copies."""
    has_few_registers = platform.machine() in ("x86_64", "AMD64") and "avx512f" not in processor_features()
    if not has_few_registers:
        return ("-O3",)
    return ("-O2",) if is_clang else ("-O2", "-fno-tree-coalesce-vars")


def _for_this_processor() -> tuple[str, ...]:
    return ("-march=native",) if platform.machine() in ("x86_64", "AMD64") else ("-mcpu=native",)


@functools.lru_cache
def _find(named: str | None, path: str | None) -> HostCompiler | str:
    """A compiler, or why there is none."""
    if named:
        command = tuple(shlex.split(named))
        if command and shutil.which(os.path.expanduser(command[0]), path=path):
            return HostCompiler((os.path.expanduser(command[0]), *command[1:]))
        return f"KSGEN_CXX={named} names nothing that runs; give a C++ compiler's path, or unset it"
    for candidate in _CANDIDATES:
        if found := shutil.which(candidate, path=path):
            return HostCompiler((found,))
    if importlib.util.find_spec("ziglang"):
        return HostCompiler((sys.executable, "-m", "ziglang", "c++"))
    return f"no C++ compiler found ({', '.join(_CANDIDATES)} on PATH, ziglang); {_REMEDY}"


@functools.cache
def _first_line(command: tuple[str, ...]) -> str:
    said = current_children.get().run((*command, "--version"))
    line = next(iter(said.log.splitlines()), "").strip()
    if said.returncode or not line:
        raise ToolchainError(f"{shlex.join(command)} --version ends with {said.returncode} and says {line or 'nothing'}; {_REMEDY}")
    return line
