"""Builds shared libraries for processors from OpenCL C sources by the host's C++ compiler. Calls no library.

The search order is `KSGEN_CXX`, then c++, g++, clang++ on PATH, GCC before Clang, then the `ziglang` package. The
compiler's input begins with `host_prelude.hpp`, which defines OpenCL C in C++, and with `host_tiles.hpp` if the source
uses matrix tiles. The source follows, and then one function per entry, which loops over the entry's work groups.
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
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ksgen.build.children import current_children, made_from, refusal
from ksgen.build.processors import InstructionSet, digest_of_processor, machine, processor_features, set_of
from ksgen.build.request import Binary
from ksgen.errors import ToolchainError
from ksgen.paths import program, variable

PRELUDE = Path(__file__).with_name("host_prelude.hpp")
KEEPS_REGISTERS = (
    # for sums that `asm` instructions accumulate: otherwise GCC moves half of them to the stack and back
    '#pragma GCC optimize("no-tree-coalesce-vars")\n'
)
TILES = Path(__file__).with_name("host_tiles.hpp")
# Trial kernel, which shows whether a compiler has the features that the prelude needs. It shuffles, widens and narrows
# vectors.
TRIAL = """#define ENTRY(...) __kernel __attribute__((reqd_work_group_size(__VA_ARGS__, 1)))
ENTRY(1, 1)
void ks_trial(__global const half* x, __global half* y) {
    typedef float8 lanes;
    const lanes both = shuffle2(vload_half8(0, x), vload_half8(1, x), (uint8)(0, 8, 1, 9, 2, 10, 3, 11));
    vstore_half8_rte(fma(both, (lanes)2.0f, vload2(0, (__global const float*)x).s01010101), 0, y);
}
"""
# suffix of the function that loops over an entry's work groups; `HOST_WALK` in the prelude adds it
WALKS = "__walk"
ENTRY = re.compile(r"^ENTRY\(1, 1\)\s+void (\w+)\(", re.MULTILINE)
CANDIDATES = ("c++", "g++", "clang++")
REMEDY = "install g++ (12 and up) or clang (14 and up), or pip install ziglang, or let KSGEN_CXX name another"


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: `command` is its program with fixed options, `builds_for` the architecture of its binaries."""

    command: tuple[str, ...]
    builds_for: str = field(default_factory=machine)
    name: ClassVar[str] = "c++"

    @property
    def version(self) -> str:
        """First line of the compiler's version, its fixed options, and a digest of the prelude."""
        fixed = f" {shlex.join(self.command[1:])}" if self.command[1:] else ""
        return f"{_first_line(self.command)}{fixed}, {_digest_of_snippets()}"

    def __str__(self) -> str:
        return shlex.join(self.command)

    @property
    def is_proven(self) -> bool:
        """Whether this is GCC 12 or later, which compiles all sources. Others may be too old, or lack a C++ library."""
        release = re.search(r"^\S+ \(.*\) (\d+)\.", _first_line(self.command))
        return release is not None and int(release[1]) >= 12

    def options(self, target: str) -> tuple[str, ...]:
        return options_of(self, set_of(target))

    def macros(self, target: str) -> frozenset[str]:
        """Macros that the compiler defines for a target, such as `__AVX2__`."""
        answer = current_children.get().run(
            (*self.command, *self.options(target), "-dM", "-E", "-x", "c++", os.devnull)
        )
        return frozenset(re.findall(r"^#define (\w+)", answer.log, re.MULTILINE))

    def compile(self, text: str, entry: str, target: str) -> Binary:
        self.check_target(target, entry)
        entries = ENTRY.findall(text)
        if entry not in entries:
            raise ToolchainError(
                f"{entry}: its groups have several work items; only an OpenCL driver runs such kernels"
            )
        return Binary(self.compile_whole(source_of(text, entries), entry, target), entry, target)

    def check_target(self, target: str, entry: str) -> None:
        isa = set_of(target)
        if (isa.machine != self.builds_for) if isa else target != host_target():
            raise ToolchainError(f"{entry}: the compiler of {host_target()} cannot build for {target}")
        if isa and isa.added and not _makes(self, isa):
            who = f"{self} ({_first_line(self.command)})"
            raise ToolchainError(
                f"{entry}: {who} cannot compile for {isa.name}, which needs {isa.built_by}; KSGEN_CXX names another"
            )

    def compile_whole(self, source: str, name: str, target: str, more: tuple[str, ...] = ()) -> bytes:
        """Compile a C++ source into a shared library and return its bytes. `more` are further options."""
        output = *more, "-o", f"{name}.so"
        command = *self.command, *self.options(target)
        made, finished = made_from(f"{name}.cpp", source, f"{name}.so", (*command, f"{name}.cpp", *output))
        if made:
            return made
        raise refusal(
            f"{name}: {self} refused it", f"{name}.cpp", source, finished.log, lambda kept: (*command, kept, *output)
        )  # fmt: skip


def source_of(text: str, entries: Sequence[str]) -> str:
    """Input of the compiler: the prelude, the source, and a loop over work groups per entry."""
    unrolled = text.replace('_Pragma("unroll")', '_Pragma("GCC unroll 64")')
    walks = [f"HOST_WALK({entry})\n" for entry in entries]
    tiles = TILES.read_text(encoding="utf-8") if "tile_begin(" in text else ""
    pragma = KEEPS_REGISTERS if "MULTIPLY_PAIRS" in text else ""
    return "".join((pragma, PRELUDE.read_text(encoding="utf-8"), tiles, '\nextern "C" {\n', unrolled, *walks, "}\n"))


def find_host_compiler() -> HostCompiler:
    """First compiler found. Raises `ToolchainError` if there is none."""
    return host_compilers()[0]


def host_compilers() -> tuple[HostCompiler, ...]:
    """Compilers of this machine, in search order. Raises `ToolchainError` if there is none."""
    found = _find(os.environ.get("KSGEN_CXX"), variable("PATH"))
    if isinstance(found, str):
        raise ToolchainError(found)
    return found


def host_target() -> str:
    """Target of libraries that use all of this processor's instructions, and may not run on other processors."""
    return f"host {platform.system()} {instruction_set()}"


def instruction_set() -> str:
    """Name of this processor's architecture and a digest of its instructions."""
    return f"{platform.machine()} {digest_of_processor()}"


@functools.cache
def _makes(compiler: HostCompiler, isa: InstructionSet) -> bool:
    """Whether the compiler supports the set's added instructions, for each of which it then defines a macro."""
    wanted = {f"__{each.replace('-', '_').upper()}__" for each in isa.added}
    return wanted <= compiler.macros(isa.target)


@functools.cache
def _digest_of_snippets() -> str:
    """Digest of all text that may precede a source."""
    prelude = PRELUDE.read_bytes() + TILES.read_bytes() + KEEPS_REGISTERS.encode()
    return f"prelude {hashlib.sha256(prelude).hexdigest()[:8]}"


def options_of(compiler: HostCompiler, isa: InstructionSet | None) -> tuple[str, ...]:
    """Compiler options for an instruction set; None means all instructions of this processor."""
    is_x86, is_zig = compiler.builds_for == "x86_64", "ziglang" in compiler.command
    is_clang = is_zig or _is_clang(compiler)
    features = isa.features if isa else processor_features()
    has_few_registers = is_x86 and "avx512f" not in features
    vectors = ("-mprefer-vector-width=512",) if is_x86 and not is_clang else ()
    quiet = ("-w", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-fno-strict-aliasing")
    level, processor = _level(is_clang, has_few_registers, is_x86), _of_processor(isa, is_x86, is_zig)
    return ("-std=gnu++17", *level, "-fPIC", "-shared", "-pthread", *quiet, *vectors, *processor, *_links(isa, is_zig))


def _level(is_clang: bool, has_few_registers: bool, is_x86: bool) -> tuple[str, ...]:
    """Optimization level, with options that keep sums in vector registers.

    With -O3, GCC moves sums out of the 16 vector registers of an x86 without AVX-512. With -O2, it does so too if it
    coalesces a sum with its copies. GCC for ARM and Clang for any processor do the same if they schedule instructions
    before register allocation. Loads then come so early that no registers are left for sums.
    """
    if is_clang:
        return ("-O3", "-mllvm", "-enable-misched=false")
    if has_few_registers:
        return ("-O2", "-fno-tree-coalesce-vars")
    return ("-O3",) if is_x86 else ("-O3", "-fno-schedule-insns")


def _of_processor(isa: InstructionSet | None, is_x86: bool, is_zig: bool) -> tuple[str, ...]:
    if not isa:
        return ("-march=native",) if is_x86 else ("-mcpu=native",)
    if is_zig:  # zig has its own names
        cpu = "+".join((isa.march, *isa.added)).replace("-", "_") if is_x86 else "generic"
        return (f"-mcpu={cpu}",)
    return (f"-march={isa.march}", *(f"-m{each}" for each in isa.added))


def _links(isa: InstructionSet | None, is_zig: bool) -> tuple[str, ...]:
    """Link options with which a binary for other machines needs only their C library. zig does this by default."""
    if not isa or is_zig or platform.system() != "Linux":
        return ()
    return ("-static-libstdc++", "-static-libgcc", "-Wl,--as-needed,--exclude-libs,ALL")


def compiler_for(target: str) -> HostCompiler:
    """The host's compiler, or a cross compiler if the target has another architecture."""
    isa = set_of(target)
    if isa is None or isa.machine == machine():
        return find_host_compiler()
    return _cross_compiler(isa.machine)


def _cross_compiler(wanted: str) -> HostCompiler:
    named, usual = os.environ.get("KSGEN_CXX"), f"{wanted}-linux-gnu-g++"
    if named:
        command = find_host_compiler().command
        if current_children.get().run((*command, "-dumpmachine")).log.partition("-")[0] == wanted:
            return HostCompiler(command, wanted)
    if found := shutil.which(usual, path=variable("PATH")):
        return HostCompiler((found,), wanted)
    if importlib.util.find_spec("ziglang"):
        return HostCompiler((sys.executable, "-m", "ziglang", "c++", "-target", f"{wanted}-linux-gnu"), wanted)
    remedy = (
        f"install {usual} (Debian: g++-{wanted.replace('_', '-')}-linux-gnu), or pip install ziglang; KSGEN_CXX "
        "names another"
    )
    raise ToolchainError(f"no compiler here builds for {wanted}, and this machine is {machine()}; {remedy}")


@functools.lru_cache
def _find(named: str | None, path: str | None) -> tuple[HostCompiler, ...] | str:
    """Compilers found, or the reason why there is none."""
    if named:
        try:
            command = tuple(map(_absolute, shlex.split(named)))
        except ValueError as error:
            return f"KSGEN_CXX={named} cannot be split into words ({error}); quote it as a shell does, or unset it"
        if command and shutil.which(command[0], path=path):
            return (HostCompiler(command),)
        return f"KSGEN_CXX={named} is not an executable; give a C++ compiler's path, or unset it"
    programs: dict[str, HostCompiler] = {}  # by real path, so that each program is listed once, even with several names
    for candidate in CANDIDATES:
        if found := shutil.which(candidate, path=path):
            programs.setdefault(os.path.realpath(found), HostCompiler((found,)))
    compilers = list(programs.values())
    if len(compilers) > 1 and _is_clang(compilers[0]):
        compilers.sort(key=_is_clang)  # GCC's kernels are as fast or faster
    if importlib.util.find_spec("ziglang"):
        compilers.append(HostCompiler((sys.executable, "-m", "ziglang", "c++")))
    return tuple(compilers) or f"no C++ compiler found ({', '.join(CANDIDATES)} on PATH, ziglang); {REMEDY}"


def _is_clang(compiler: HostCompiler) -> bool:
    return "clang" in _first_line(compiler.command).lower()


def _absolute(word: str) -> str:
    """Return a program in a command, such as the compiler after `ccache`, as a full path; other words unchanged."""
    found = program(word)
    return found if os.path.isfile(found) else word


@functools.cache
def _first_line(command: tuple[str, ...]) -> str:
    answer = current_children.get().run((*command, "--version"))
    line = next(iter(answer.log.splitlines()), "").strip()
    if answer.returncode or not line:
        raise ToolchainError(
            f"{shlex.join(command)} --version ends with {answer.returncode} and says {line or 'nothing'}; {REMEDY}"
        )
    return line
