"""Turns an emitted CUDA text into an executable that runs it on the CPU, once per content. It never runs one."""

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.emulator.errors import SimtError
from tests.emulator.ptx import translate
from tests.support.booked import booked

KERNEL_FILE = "kernel.cu"  # what the compiler calls the text in its messages and debug information

_HERE = Path(__file__).parent

_COMMON_FLAGS = ("-std=c++17", "-w", "-fno-pie", "-ffp-contract=off", "-fno-omit-frame-pointer")
# These checks call handlers of the runtime's own, in every build.
_CHECKS = ("-fsanitize=alignment,bounds", "-fno-sanitize-recover=all", "-fstack-clash-protection")
# Unset variables hold 0xfe bytes (NaN as 16-bit floats, -1.7e38 as float); arrays in flight stay where they are.
_UNSET = ("-ftrivial-auto-var-init=pattern", "-fstack-reuse=none")
_KERNEL_FLAGS = (*_COMMON_FLAGS, "-g1", "-fno-exceptions", "-fno-rtti", *_CHECKS, *_UNSET)
# The runtime tells the sanitizers itself what it does; calls to memcpy or memset would tell them twice.
_RUNTIME_FLAGS = (*_COMMON_FLAGS, "-O1", "-fno-tree-loop-distribute-patterns")
_OWN_LIBRARIES = ("-static-libstdc++", "-static-libgcc")
# ThreadSanitizer's pass reports each access to functions of the runtime, which count it. An access of a
# struct is one only as long as nothing takes the struct apart.
_WHOLE_STRUCTS = ("-fno-tree-sra", "-fno-tree-fre", "-fno-tree-pre", "-fno-thread-jumps")
COUNTS = "counts"
_SANITIZERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "address": ("-fsanitize=address", "-fsanitize-sections=simt_shared"),
    "race": ("-fsanitize=thread",),
    COUNTS: ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0", *_WHOLE_STRUCTS),
}

_CALLED = re.compile(r"\b(\w+)\s*\(|\bSIMT_KERNEL\b")
_BOUNDS, _CLUSTER = "__launch_bounds__", "__cluster_dims__"
_DYNAMIC_SHARED = re.compile(r"\bextern\s+SIMT_SHARED\b([^;{]*?)(\w+)\s*\[\s*\]\s*;")
# Replacement for a dynamic shared array's declaration: a section passes its alignment to the runtime.
_DECLARED = (
    "struct simt_declared_{name} {{ {declared} first; }}; using {element} = decltype(simt_declared_{name}::first);"
    ' static __attribute__((section("simt_alignment"), used)) const unsigned simt_alignment_of_{name} = '
    "alignof(simt_declared_{name});"
)
# Blocks run sequentially, so one static copy serves; its section lets the runtime fill it with NaN.
_STATIC_SHARED = 'static __attribute__((section("simt_shared")))'


def is_installed(sanitize: str) -> bool:
    """Whether the compiler can link this build: the sanitizers' run-time libraries are packages of their own."""
    return _links(*_linked(sanitize))


def _linked(sanitize: str) -> tuple[str, ...]:
    """What links a build: a sanitizer's library, else C++'s own into the executable, which then starts sooner. Gold
    takes half as long as the default linker. Both where they are there."""
    fast = ("-fuse-ld=gold",) if shutil.which("ld.gold") else ()
    if sanitize not in (COUNTS, "none"):
        return *fast, *_SANITIZERS[sanitize][:1]
    return (*fast, *_OWN_LIBRARIES) if _links(*_OWN_LIBRARIES) else fast


@functools.cache
def _links(*flags: str) -> bool:
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "empty.cpp").write_text("int main() {}\n", encoding="utf-8")
        try:
            return (
                subprocess.run(
                    [compiler(), *flags, "empty.cpp"], cwd=scratch, capture_output=True, check=False
                ).returncode
                == 0
            )
        except FileNotFoundError:
            return False


def build(source: str, entry: str, sanitize: str) -> tuple[Path, int]:
    """The executable for a text, from the cache or compiled now, and the number under which it knows the entry."""
    if sanitize not in _SANITIZERS:
        raise ValueError(f"sanitize={sanitize!r}; accepted are {', '.join(map(repr, _SANITIZERS))}")
    folder = cache_folder() / _digest(source, sanitize)
    if not folder.exists():
        runtime = build_runtime(sanitize)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            with booked(f"g++ of emulated sources, {sanitize}"):
                _build_kernels(source, sanitize, runtime, Path(scratch))
            put(Path(scratch, "entry"), folder)
    entries = (folder / "entries").read_text(encoding="utf-8").split()
    if entry not in entries:
        raise ValueError(f"entry={entry!r}; the text has {', '.join(entries) or 'no kernel'}")
    return folder / "kernel", entries.index(entry)


@functools.cache  # a kernel's launches ask for the same ones
def find_lines(executable: Path, addresses: tuple[int, ...]) -> dict[int, list[int]]:
    """For each address of code, its line of the emitted text and those it was inlined into, innermost first."""
    if not addresses:
        return {}
    command = ["addr2line", "-a", "-i", "-e", str(executable), *map(hex, addresses)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines: dict[int, list[int]] = {}
    for answer in output.splitlines():
        if answer.startswith("0x"):
            lines[int(answer, 16)] = here = []
        elif found := re.search(rf"{re.escape(KERNEL_FILE)}:(\d+)", answer):
            here.append(int(found[1]))
    return lines


def _build_kernels(source: str, sanitize: str, runtime: Path, scratch: Path) -> None:
    """Write scratch/entry/kernel, and next to it the names of its kernels, in the executable's order."""
    preprocessed, entry = scratch / "kernel.ii", scratch / "entry"
    entry.mkdir()
    # GCC takes a fifth less time with -Og; what ThreadSanitizer's pass sees depends on the level
    level = "-O1" if "-fsanitize=thread" in _SANITIZERS[sanitize] else "-Og"
    flags = (*_KERNEL_FLAGS, level, *_machine_flags(), *_SANITIZERS[sanitize])

    (scratch / KERNEL_FILE).write_text(source, encoding="utf-8")
    header = str(_HERE / "simt.h")
    _compile(
        scratch,
        *flags,
        "-E",
        "-I",
        str(_HERE / "include"),
        "-include",
        header,
        "-x",
        "c++",
        KERNEL_FILE,
        "-o",
        preprocessed.name,
    )
    expanded = preprocessed.read_text(encoding="utf-8")  # the text's own macros may hide the words looked for
    expanded, kernels = _take_kernels(translate(expanded, KERNEL_FILE))
    expanded = _place_dynamic_shared(expanded)
    expanded = re.sub(r"\bSIMT_SHARED\b", _STATIC_SHARED, expanded)
    table = " ".join(kernel.entry for kernel in kernels)
    preprocessed.write_text(
        f'{expanded}\n# 1 "entries"\nconst simt::Entry simt::entries[] = {{{table}}};\n', encoding="utf-8"
    )
    _compile(scratch, *flags, "-c", preprocessed.name, "-o", "kernel.o")

    _refuse_shared_in_templates(scratch)

    _compile(scratch, "-no-pie", *_linked(sanitize), "kernel.o", str(runtime), "-o", "entry/kernel")
    (entry / "entries").write_text("\n".join(kernel.name for kernel in kernels), encoding="utf-8")


@dataclass(frozen=True)
class _Kernel:
    """A kernel's name, and what its attributes say in words of the text."""

    name: str
    bounds: str
    cluster: str

    @property
    def entry(self) -> str:
        """Its line of the table. The compiler evaluates the words, which have to be constants."""
        call = f"[] {{ simt::call({self.name}); }}, simt::count_parameters({self.name})"
        return f"{{{call}, {{{self.bounds}}}, {{{self.cluster}}}}},"


def _take_kernels(text: str) -> tuple[str, list[_Kernel]]:
    """The text without the words that only CUDA knows, and its kernels: each is what is called next after its mark."""
    kept, kernels, attributes = [], [], {_BOUNDS: "", _CLUSTER: ""}
    is_marked, position = False, 0
    while found := _CALLED.search(text, position):
        kept.append(text[position : found.start()])
        position = found.end()
        if found[1] is None:
            is_marked = True
        elif found[1] in attributes:
            position = _closing(text, found.end())
            attributes[found[1]] = text[found.end() : position - 1]
        elif is_marked and found[1] == "__attribute__":
            position = _closing(text, found.end())
            kept.append(text[found.start() : position])
        else:
            kept.append(found[0])
            if is_marked:
                kernels.append(_Kernel(found[1], attributes[_BOUNDS], attributes[_CLUSTER]))
                is_marked, attributes = False, {_BOUNDS: "", _CLUSTER: ""}
    return "".join([*kept, text[position:]]), kernels


def _closing(text: str, position: int) -> int:
    """Return the position behind the parenthesis that closes the one opened before `position`."""
    depth = 1
    while depth > 0:
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        position += 1
    return position


def _place_dynamic_shared(text: str) -> str:
    """Each use of a dynamic shared array asks the runtime for it, which knows the alignment that it was declared
    with.
    """
    for name in {declared[2] for declared in _DYNAMIC_SHARED.finditer(text)}:
        element = f"simt_element_of_{name}"
        uses = re.split(_DYNAMIC_SHARED.pattern.replace(r"(\w+)", rf"\b{name}\b"), text)
        pieces = [
            re.sub(rf"\b{name}\b", f"static_cast<{element}*>(simt::dynamic_shared())", piece) for piece in uses[::2]
        ]
        declarations = [_DECLARED.format(declared=declared, name=name, element=element) for declared in uses[1::2]]
        text = "".join(piece for pair in zip(pieces, [*declarations, ""], strict=True) for piece in pair)
    return text


def _refuse_shared_in_templates(scratch: Path) -> None:
    """g++ forgets the section of a template's static variable, so that the runtime would not find it."""
    # `nm` takes as long as the assembler: it loads the plugins of compilers. readelf does not.
    symbols = subprocess.run(
        ["readelf", "-Ws", "kernel.o"], cwd=scratch, capture_output=True, text=True, check=True
    ).stdout
    if unique := re.findall(r" UNIQUE .* (\S+)", symbols):
        names = subprocess.run(["c++filt", *unique], capture_output=True, text=True, check=True).stdout.split("\n")
        raise SimtError(
            "compile", f"__shared__ in a template, which the emulator cannot do: {', '.join(filter(None, names))}"
        )


def build_runtime(sanitize: str) -> Path:
    """Its object file. It takes seconds: others that want the same wait for it."""
    folder = cache_folder() / f"runtime-{_digest('', sanitize)}"
    if not folder.exists():
        import fcntl

        with open(f"{folder}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                _compile_runtime(sanitize, folder)
    return folder / "runtime.o"


def _compile_runtime(sanitize: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        entry = Path(scratch, "entry")
        entry.mkdir()
        words = {"SIMT_ADDRESS": "address", "SIMT_RACE": "race", "SIMT_COUNTS": COUNTS}
        defines = [f"-D{word}={int(sanitize == name)}" for word, name in words.items()]
        with booked("g++ of the emulator"):
            _compile(entry, *_RUNTIME_FLAGS, *defines, "-c", str(_HERE / "runtime" / "main.cpp"), "-o", "runtime.o")
        put(entry, folder)


def put(entry: Path, folder: Path) -> None:
    """Renames a finished entry into its place; another process may have been first, with the same content."""
    try:
        entry.rename(folder)
    except OSError:
        if not folder.exists():
            raise


def _compile(folder: Path, *arguments: str) -> None:
    result = subprocess.run([compiler(), *arguments], cwd=folder, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        found = re.search(rf"{re.escape(KERNEL_FILE)}:(\d+):\d+: (?:fatal )?error: ", result.stderr)
        raise SimtError("compile", result.stderr.strip(), int(found[1]) if found else None)


def compiler() -> str:
    return os.environ.get("CXX", "g++")


def cache_folder() -> Path:
    named = os.environ.get("KSGEN_SIMT_CACHE")
    folder = Path(named) if named else Path(tempfile.gettempdir(), f"ksgen-simt-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def _digest(source: str, sanitize: str) -> str:
    """A text's title, which names digests of its template and spec, is no part of what is built."""
    source = re.sub(r"\A//[^\n]*", "//", source)
    parts = (tools_digest(), *_machine_flags(), sanitize, source)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@functools.cache
def tools_digest() -> str:
    """Stands for the compiler, its flags (all in this module), what becomes of PTX, and every header."""
    version = subprocess.run([compiler(), "--version"], capture_output=True, text=True, check=True).stdout
    digest = hashlib.sha256(version.encode())
    for path in sorted(p for p in _HERE.rglob("*") if p.suffix in (".h", ".cpp") or p.name in ("build.py", "ptx.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _machine_flags() -> Sequence[str]:
    """A fused multiply-add as one instruction where the CPU has it: as a call it is the slowest part of a kernel."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text(encoding="utf-8").split() if cpuinfo.exists() else []
    return ("-mfma",) if platform.machine() == "x86_64" and "fma" in flags else ()
