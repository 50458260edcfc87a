"""Which compiler makes CUDA binaries on this machine, and how to run it. Needs no GPU, and never looks into a cache.

Looked for in this order: nvcc in `KSGEN_NVCC`, on PATH, in `CUDA_HOME`, in the `nvidia-cuda-nvcc` package; then NVRTC
through `cuda-bindings`, which needs no host compiler. Every warning is an error. Spills are not: they are a number in
`Resources`, because whether they cost more than they save is for a measurement to say.
"""

import functools
import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from ksgen import paths
from ksgen.build.children import current_children
from ksgen.build.request import Binary, read_notes, read_resources
from ksgen.errors import KsgenError, ToolchainError
from ksgen.files import write
from ksgen.spec.kernel import is_word
from ksgen.values import excerpt


@dataclass(frozen=True)
class Nvcc:
    """The compiler driver of the CUDA toolkit, one process per binary."""

    path: str
    name: ClassVar[str] = "nvcc"

    @property
    def version(self) -> str:
        return _nvcc_version(self.path)

    def targets(self) -> tuple[str, ...]:
        return _nvcc_targets(self.path)

    def options(self, target: str) -> tuple[str, ...]:
        number = target.removeprefix("sm_")
        architecture = f"-gencode=arch=compute_{number},code=sm_{number}"
        return ("-std=c++17", "-O3", "-cubin", architecture, "-Werror", "all-warnings", "-Xptxas", "-v")

    def command(self, source: str, entry: str, target: str) -> tuple[str, ...]:
        """The command that makes `name.cubin` from `name.cu`."""
        return (self.path, *self.options(target), source, "-o", source + "bin")

    def compile(self, text: str, entry: str, target: str) -> Binary:
        check_target(target, self)
        with _temporary_folder(entry) as folder:
            source, binary = Path(folder, f"{entry}.cu"), Path(folder, f"{entry}.cubin")
            source.write_text(text, encoding="utf-8")
            finished = current_children.get().run(self.command(source.name, entry, target), folder)
            data = binary.read_bytes() if finished.returncode == 0 and binary.exists() else b""
        if not data:
            log = finished.log or f"exit status {finished.returncode}, and not a word"
            raise compile_error(self, text, entry, target, log)
        return _binary(data, entry, target, finished.log)


@dataclass(frozen=True)
class Nvrtc:
    """The compiler as a library in this process: faster to start than nvcc, but nothing can stop it halfway."""

    name: ClassVar[str] = "nvrtc"

    @property
    def version(self) -> str:
        return _nvrtc_version()

    def targets(self) -> tuple[str, ...]:
        _, numbers = _nvrtc().nvrtcGetSupportedArchs()
        return _with_variants(numbers)

    def options(self, target: str) -> tuple[str, ...]:
        return (f"--gpu-architecture={target}", "-std=c++17", "-default-device", "--ptxas-options=-v")

    def command(self, source: str, entry: str, target: str) -> tuple[str, ...]:
        """The command by which another Python does what this one did."""
        call = f"Nvrtc().compile(open({source!r}).read(), {entry!r}, {target!r})"
        return (sys.executable, "-c", f"from ksgen.build.toolchain import Nvrtc; {call}")

    def compile(self, text: str, entry: str, target: str) -> Binary:
        check_target(target, self)
        nvrtc = _nvrtc()
        flags = [flag.encode() for flag in (*self.options(target), *(f"-I{folder}" for folder in _include_folders()))]
        _, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{entry}.cu".encode(), 0, [], [])
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            log = _nvrtc_read(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            data = _nvrtc_read(nvrtc, program, "CUBIN") if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else b""
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        # Not every version can make warnings errors itself.
        if not data or re.search(r"\bwarning\b", log):
            raise compile_error(self, text, entry, target, log or str(status))
        return _binary(data, entry, target, log)


CudaCompiler = Nvcc | Nvrtc


def find_compiler(name: str | None = None) -> CudaCompiler:
    """The machine's CUDA compiler, or the one asked for by name (`nvcc`, `nvrtc`)."""
    if name is not None and not is_word(name, ("nvcc", "nvrtc")):
        raise ToolchainError(f"no compiler is called {excerpt(name)}; try nvcc or nvrtc")
    found = _find(name, *(os.environ.get(variable) for variable in ("KSGEN_NVCC", "PATH", "CUDA_HOME", "NVCC_CCBIN")))
    if isinstance(found, str):
        raise ToolchainError(found)
    return found


def parse_targets(text: str, compiler: CudaCompiler) -> tuple[str, ...]:
    """`sm_80,sm_90a` as targets, each once, in that order."""
    targets = tuple(dict.fromkeys(target for part in text.split(",") if (target := part.strip())))
    if not targets:
        raise ToolchainError(f"no target in {excerpt(text)}; try sm_90a, or sm_80,sm_90a")
    for target in targets:
        check_target(target, compiler)
    return targets


def check_target(target: str, compiler: CudaCompiler) -> None:
    offered = compiler.targets()
    if target not in offered:
        known = ", ".join(offered)
        raise ToolchainError(f"{excerpt(target)} is no target of {compiler.name} {compiler.version}; it offers {known}")


def compile_error(compiler: CudaCompiler, text: str, entry: str, target: str, log: str) -> ToolchainError:
    """The error for a source that does not build: the first complaint, the kept source, the command to repeat."""
    message = f"{entry}: {compiler.name} {compiler.version} refused it for {target}: {first_error(log)}"
    if kept := _keep(text, entry, log):
        message += f"\n  source: {kept}\n  repeat: {shlex.join(compiler.command(str(kept), entry, target))}"
    return ToolchainError(message)


def first_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\b(error|fatal)\b", line)]
    warnings = [line for line in lines if re.search(r"\bwarning\b", line)]
    return next(iter(errors or warnings or lines), "no output")


def _binary(data: bytes, entry: str, target: str, log: str) -> Binary:
    if f".text.{entry}\0".encode() not in data:
        raise ToolchainError(f"{entry}: the source compiles, but holds no __global__ function of that name")
    notes = "\n".join(read_notes(log))
    return Binary(data, entry, target, read_resources(log, entry), {"notes": notes} if notes else {})


def _keep(text: str, entry: str, log: str) -> Path | None:
    """Keep a refused source and its log where the user finds them. The same source always goes to the same file."""
    name = f"{entry}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    for folder in (paths.cache_dir() / "failed", None):
        with suppress(OSError, KsgenError):
            folder = folder or Path(tempfile.gettempdir())
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            write(folder / f"{name}.log", log)
            write(kept := folder / f"{name}.cu", text)
            return kept
    return None


def _install_hint() -> str:
    from ksgen.install import install_line  # reads the distribution's metadata

    return f"{install_line('cuda')} brings NVRTC; {install_line('nvcc')} brings nvcc, to use beside g++"


@functools.lru_cache
def _find(name: str | None, *surroundings: str | None) -> CudaCompiler | str:
    """A compiler, or why there is none. The arguments are the whole environment that the answer depends on."""
    named, path, home, host = surroundings
    if named and name != "nvrtc":
        runnable = shutil.which(os.path.expanduser(named))
        hint = f"KSGEN_NVCC={named} names nothing that runs; give the path of nvcc, or unset it"
        return Nvcc(os.path.abspath(runnable)) if runnable else hint
    nvcc = None if name == "nvrtc" else _find_nvcc(path, home)
    if nvcc and (host or shutil.which("gcc", path=path)):
        return nvcc
    if name != "nvcc" and _has_nvrtc():
        return Nvrtc()
    if nvcc:
        return f"{nvcc.path} needs a host compiler, and there is no gcc on PATH; install g++, or else {_install_hint()}"
    return f"no {name or 'CUDA compiler'} found (KSGEN_NVCC, PATH, CUDA_HOME, Python packages); {_install_hint()}"


def _find_nvcc(path: str | None, home: str | None) -> Nvcc | None:
    folders = [path, str(Path(home, "bin")) if home else None]
    folders += [str(toolkit / "bin") for toolkit in _packaged_toolkits()]
    found = (shutil.which("nvcc", path=folder) for folder in folders if folder)
    return next((Nvcc(os.path.abspath(each)) for each in found if each), None)


def _packaged_toolkits() -> list[Path]:
    """`nvidia/cu13` in site-packages, which NVIDIA's packages share; the newest first."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or ()) if spec else ()
    found = [toolkit for place in places for toolkit in Path(place).glob("cu[0-9]*") if toolkit.is_dir()]
    return sorted(found, key=lambda toolkit: int(re.sub(r"\D", "", toolkit.name)), reverse=True)


def _include_folders() -> list[Path]:
    """CUDA's own headers for NVRTC, which brings none. Kernels need them only if their author includes one."""
    home = os.environ.get("CUDA_HOME")
    toolkits = ([Path(home)] if home else []) + _packaged_toolkits()
    folders = [toolkit / "include" / part for toolkit in toolkits for part in (".", "cccl")]
    return [folder for folder in folders if folder.is_dir()]


@functools.cache
def _nvcc_version(path: str) -> str:
    return _ask(path, "--version", r"release [\d.]+, V([\d.]+)")[0]


@functools.cache
def _nvcc_targets(path: str) -> tuple[str, ...]:
    return _with_variants(int(number) for number in _ask(path, "--list-gpu-code", r"\bsm_(\d+)\b"))


def _ask(path: str, question: str, answer: str) -> list[str]:
    with _temporary_folder(path) as folder:
        said = current_children.get().run((path, question), folder).log
    if not (found := re.findall(answer, said)):
        raise ToolchainError(f"{path} {question} says {excerpt(said.strip())}; that is not nvcc")
    return found


@contextmanager
def _temporary_folder(what: str) -> Iterator[str]:
    """A folder for the compiler's own temporary files too: a killed compiler leaves nothing behind."""
    try:
        with tempfile.TemporaryDirectory(prefix="ksgen-nvcc-") as folder:
            yield folder
    except OSError as error:
        named = f"TMPDIR={os.environ['TMPDIR']}" if "TMPDIR" in os.environ else "TMPDIR is not set"
        raise ToolchainError(f"{what}: no room for temporary files ({error}); {named}; accepted: a folder that takes files") from None


def _with_variants(numbers: Iterable[int]) -> tuple[str, ...]:
    """Neither compiler lists its `a` (this GPU only, 9.0 up) and `f` (this family, 10.0 up) variants by itself."""
    suffixes = {number: ["", *("a" if number >= 90 else ""), *("f" if number >= 100 else "")] for number in numbers}
    return tuple(f"sm_{number}{suffix}" for number in sorted(suffixes) for suffix in suffixes[number])


def _nvrtc() -> ModuleType:
    try:
        from cuda.bindings import nvrtc
    except ImportError as missing:
        raise ToolchainError(f"NVRTC needs cuda-bindings ({missing}); {_install_hint()}") from None
    module: ModuleType = nvrtc
    return module


def _has_nvrtc() -> bool:
    try:
        return bool(_nvrtc_version())
    except ToolchainError:
        return False


@functools.cache
def _nvrtc_version() -> str:
    try:
        _, major, minor = _nvrtc().nvrtcVersion()
    except (RuntimeError, OSError) as missing:  # the bindings load the library at the first call
        reason = next(iter(str(missing).splitlines()), "no reason given")
        raise ToolchainError(f"cuda-bindings finds no NVRTC ({reason}); {_install_hint()}") from None
    return f"{major}.{minor}"


def _nvrtc_read(nvrtc: ModuleType, program: object, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    if size <= 1:  # only the closing zero: Python shares its one-byte objects, so NVRTC must not write into one
        return b""
    text = bytes(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text
