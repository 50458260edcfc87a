"""Finds the compiler of CUDA binaries on this machine, and runs it. Needs no GPU, and never reads a cache.

nvcc is searched in `KSGEN_NVCC`, on PATH, in `CUDA_HOME`, in the usual folders of toolkits, and in the
`nvidia-cuda-nvcc` package. NVRTC through `cuda-bindings`, which needs no host compiler, follows. Compilers whose
binaries this machine's driver can load precede newer ones. If a compiler does not know the target or does not work with
its host compiler, the next one is tried. A compiler that the user named is not replaced.

Register spills are not an error. `Resources` has their number, because only a measurement shows whether they cost more
than they save.
"""

import ctypes
import functools
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from glob import glob
from pathlib import Path
from typing import Any, ClassVar

from ksgen.build.children import current_children, first_error, made_from, refusal, working_folder
from ksgen.build.request import Binary, read_notes, read_resources
from ksgen.errors import ToolchainError, warn
from ksgen.paths import variable
from ksgen.spec.kernel import is_word
from ksgen.values import excerpt

# where installers put toolkits; of several versions, the newest comes first
USUAL_TOOLKITS = ("/usr/local/cuda", "/usr/local/cuda-*", "/opt/cuda")
WARNINGS = "KSGEN_WARNINGS"  # "error", as ksgen's own tests set it, makes a compiler's warnings errors
_LANGUAGE = ("-std=c++17", "-O3")  # options of nvcc that change the generated code
_SURROUNDINGS = ("KSGEN_NVCC", "PATH", "CUDA_HOME", "CUDA_PATH", "NVCC_CCBIN")  # variables on which the search depends


class UnfitError(ToolchainError):
    """A compiler does not work on this machine, or not for this target. The error is not in the source."""

    def __init__(self, compiler: "CudaCompiler", target: str, message: str) -> None:
        super().__init__(message)
        self.compiler, self.target = compiler, target


@dataclass(frozen=True)
class Nvcc:
    """The compiler driver of the CUDA toolkit, one process per binary."""

    path: str
    # whether the search found it, and may go on to the next; False: the user named it
    is_found: bool = field(default=False, compare=False)
    # command that starts nvcc, such as PyCUDA's; empty: nvcc is started directly
    starter: tuple[str, ...] = field(default=(), compare=False)
    name: ClassVar[str] = "nvcc"

    def __str__(self) -> str:
        return self.path

    @property
    def version(self) -> str:
        return _ask(self, "--version", r"release [\d.]+, V([\d.]+)")[0]

    def targets(self) -> tuple[str, ...]:
        return _with_variants(map(int, _ask(self, "--list-gpu-code", r"\bsm_(\d+)\b")))

    def options(self, target: str) -> tuple[str, ...]:
        number = target.removeprefix("sm_")
        return (*_LANGUAGE, "-cubin", f"-gencode=arch=compute_{number},code=sm_{number}", *_report_options())

    def command(self, source: str, entry: str, target: str) -> tuple[str, ...]:
        """The command that makes `name.cubin` from `name.cu`."""
        return (self.path, *self.options(target), source, "-o", source + "bin")

    def compile(self, text: str, entry: str, target: str) -> Binary:
        check_target(target, self)
        source = f"{entry}.cu"
        data, finished = made_from(source, text, f"{entry}.cubin", self._started(source, entry, target))
        if not data:
            log = finished.log or f"exit status {finished.returncode}, and no output"
            refused = _refusal(self, text, entry, target, log)
            raise UnfitError(self, target, str(refused)) if is_of_the_machine(log, source) else refused
        return _binary(data, entry, target, finished.log)

    def _started(self, source: str, entry: str, target: str) -> tuple[str, ...]:
        """Command that starts nvcc. A starter adds the options for a cubin and its target by itself."""
        if self.starter:
            return (*self.starter, self.path, target, source, *_LANGUAGE, *_report_options())
        return self.command(source, entry, target)


@dataclass(frozen=True)
class Nvrtc:
    """The compiler as a library in this process: faster to start than nvcc, but nothing can stop it halfway."""

    is_found: bool = field(default=False, compare=False)
    name: ClassVar[str] = "nvrtc"

    def __str__(self) -> str:
        return "NVRTC"

    @property
    def version(self) -> str:
        return _nvrtc_version()

    def targets(self) -> tuple[str, ...]:
        _, numbers = _nvrtc().nvrtcGetSupportedArchs()
        return _with_variants(numbers)

    def options(self, target: str) -> tuple[str, ...]:
        return (f"--gpu-architecture={target}", "-std=c++17", "-default-device", "--ptxas-options=-v")

    def command(self, source: str, entry: str, target: str) -> tuple[str, ...]:
        """Command that repeats the compilation in another Python process."""
        call = f"Nvrtc().compile(open({source!r}).read(), {entry!r}, {target!r})"
        return (sys.executable, "-c", f"from ksgen.build.toolchain import Nvrtc; {call}")

    def compile(self, text: str, entry: str, target: str) -> Binary:
        check_target(target, self)
        nvrtc = _nvrtc()
        flags = list(map(os.fsencode, (*self.options(target), *(f"-I{folder}" for folder in _include_folders()))))
        _, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{entry}.cu".encode(), 0, [], [])
        try:
            with locale_restored():
                (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
            log = _nvrtc_read(nvrtc, program, "ProgramLog").decode(errors="replace").strip("\0 \n")
            data = _nvrtc_read(nvrtc, program, "CUBIN") if status == nvrtc.nvrtcResult.NVRTC_SUCCESS else b""
        finally:
            nvrtc.nvrtcDestroyProgram(program)
        # Not every version of NVRTC can treat warnings as errors itself.
        if not data or (warnings_are_errors() and re.search(r"\bwarning\b", log)):
            raise _refusal(self, text, entry, target, log or str(status))
        return _binary(data, entry, target, log)


@contextmanager
def locale_restored() -> Iterator[None]:
    """Restore the thread's locale: NVRTC 11.8 leaves the C locale, in which Python reads text files as ASCII."""
    if sys.platform == "win32":  # Windows has no `uselocale`
        yield
        return
    uselocale = ctypes.CDLL(None).uselocale
    uselocale.argtypes, uselocale.restype = [ctypes.c_void_p], ctypes.c_void_p
    before = uselocale(None)
    try:
        yield
    finally:
        uselocale(before)


CudaCompiler = Nvcc | Nvrtc


def find_compiler(name: str | None = None) -> CudaCompiler:
    """The machine's CUDA compiler, or the one asked for by name (`nvcc`, `nvrtc`)."""
    if name is not None and not is_word(name, ("nvcc", "nvrtc")):
        raise ToolchainError(f"no compiler is called {excerpt(name)}; try nvcc or nvrtc")
    found = _find(name, *map(variable, _SURROUNDINGS))
    if isinstance(found, str):
        raise ToolchainError(found)
    return found


def compilers(name: str | None = None) -> list[CudaCompiler]:
    """Compilers that the search finds, in search order."""
    return list(_in_order(name, *map(variable, _SURROUNDINGS)))


def fit_for(compiler: CudaCompiler, target: str) -> CudaCompiler:
    """Return the compiler, or its substitute if it has failed for this target."""
    while (error := _unfit.get((compiler, target))) and compiler.is_found:
        compiler = next_compiler(error, target)
    return compiler


def next_compiler(unfit: UnfitError, target: str) -> CudaCompiler:
    """The next compiler of the search; warns once. Raises the error if the user named the compiler, or none is left."""
    failed = unfit.compiler
    if not failed.is_found:
        if failed.name == "nvcc" and os.environ.get("KSGEN_NVCC"):
            raise ToolchainError(
                f"{unfit}; KSGEN_NVCC names it, so no other is tried; unset it, or set it to another nvcc"
            ) from None
        raise unfit
    is_new = (failed, target) not in _unfit
    _unfit[failed, target] = unfit
    for other in compilers():
        if (other, target) in _unfit:
            continue
        if is_new:
            warn(f"{_reason(unfit)}; {other} is used instead")
        return replace(other, starter=failed.starter) if isinstance(failed, Nvcc) and isinstance(other, Nvcc) else other
    reasons = "; ".join(_reason(error) for (_, failed_target), error in _unfit.items() if failed_target == target)
    raise ToolchainError(f"no compiler here builds for {target}: {reasons}; {_install_hint()}")


def trial(compiler: CudaCompiler, target: str) -> str:
    """Reason why the compiler does not build for the target here, in one line; empty if it builds a trial."""
    try:
        compiler.compile('extern "C" __global__ void trial(float *y) { y[threadIdx.x] = 1.0f; }\n', "trial", target)
    except ToolchainError as error:
        return str(error).splitlines()[0]
    return ""


def warnings_are_errors() -> bool:
    return os.environ.get(WARNINGS) == "error"


def is_newer_than_driver(version: str) -> bool:
    """Whether the compiler's CUDA is newer than this machine's driver, which then cannot load its binaries."""
    from ksgen import install  # reads the metadata of packages, and asks the driver's library

    return 0 < install.supported_cuda() // 1000 < int(version.partition(".")[0])


def parse_targets(text: str, compiler: CudaCompiler) -> tuple[str, ...]:
    """Parse `sm_80,sm_90a` into distinct targets in that order, of this compiler or a possible substitute."""
    targets = tuple(dict.fromkeys(target for part in text.split(",") if (target := part.strip())))
    if not targets:
        raise ToolchainError(f"no target in {excerpt(text)}; try sm_90a, or sm_80,sm_90a")
    for target in targets:
        if target not in _offered(compiler) and not (
            compiler.is_found and any(target in _offered(other) for other in compilers())
        ):
            check_target(target, compiler)
    return targets


def _offered(compiler: CudaCompiler) -> tuple[str, ...]:
    """Targets of a compiler; empty if it does not work at all."""
    try:
        return compiler.targets()
    except ToolchainError:
        return ()


def _report_options() -> tuple[str, ...]:
    """Options that make nvcc report resources, and in tests treat warnings as errors."""
    return (*(("-Werror", "all-warnings") if warnings_are_errors() else ()), "-Xptxas", "-v")


def check_target(target: str, compiler: CudaCompiler) -> None:
    offered = compiler.targets()
    if target not in offered:
        known = ", ".join(offered)
        message = f"{excerpt(target)} is not a target of {compiler.name} {compiler.version}; it offers {known}"
        raise UnfitError(compiler, target, message)


def _refusal(compiler: CudaCompiler, text: str, entry: str, target: str, log: str) -> ToolchainError:
    message = f"{entry}: {compiler.name} {compiler.version} refused it for {target}"
    return refusal(message, f"{entry}.cu", text, log, lambda kept: compiler.command(kept, entry, target))


def is_of_the_machine(log: str, source: str) -> bool:
    """Whether nvcc's first complaint is about the machine: nvcc itself, its host compiler, or their headers."""
    line = first_error(log)
    place = re.match(r"(\S+?)[(:]\d+", line)
    return bool(
        re.match(r"nvcc (fatal|error)|(sh|gcc|g\+\+|cc|cc1plus|collect2|ld):", line)
        or (place and Path(place[1]).name != source)
    )


def _binary(data: bytes, entry: str, target: str, log: str) -> Binary:
    if f".text.{entry}\0".encode() not in data:
        raise ToolchainError(f"{entry}: the source compiles, but contains no __global__ function of that name")
    notes = "\n".join(read_notes(log))
    return Binary(data, entry, target, read_resources(log, entry), {"notes": notes} if notes else {})


def _install_hint() -> str:
    from ksgen import install  # reads the metadata of packages, and asks the driver's library

    nvrtc = f"{install.install_line(install.cuda_extra())} brings NVRTC"
    if 0 < install.supported_cuda() < install.NEWEST * 1000:  # a driver that loads no binary of the packaged nvcc
        return nvrtc
    return f"{nvrtc}; {install.install_line('nvcc')} brings nvcc, which needs g++"


_unfit: dict[tuple[CudaCompiler, str], UnfitError] = {}  # compilers that failed in this process, by target


def _reason(unfit: UnfitError) -> str:
    """The error in one line, with the compiler's path, because several may have the same version."""
    line = str(unfit).splitlines()[0]
    return line if str(unfit.compiler) in line else f"{unfit.compiler}: {line}"


@functools.lru_cache
def _find(name: str | None, *surroundings: str | None) -> CudaCompiler | str:
    """A compiler, or the reason why there is none. The arguments are all that the result depends on."""
    named, path, _, _, host = surroundings
    if named and name != "nvrtc" and not shutil.which(named, path=path):
        return f"KSGEN_NVCC={named} is not an executable; give the path of nvcc, or unset it"
    if found := next(_in_order(name, *surroundings), None):
        return found
    if name != "nvrtc" and not _has_host(path, host) and (nvcc := next(_find_nvccs(surroundings), None)):
        return f"{nvcc.path} needs a host compiler, and there is no gcc on PATH; install g++, or else {_install_hint()}"
    places = "Python packages" if name == "nvrtc" else "KSGEN_NVCC, PATH, CUDA_HOME, /usr/local/cuda, Python packages"
    return f"no {name or 'CUDA compiler'} found ({places}); {_install_hint()}"


def _in_order(name: str | None, *surroundings: str | None) -> Iterator[CudaCompiler]:
    """The compilers of this machine: first those whose binaries its driver can load."""
    late = []
    for each in _in_order_of_places(name, *surroundings):
        if _fits_driver(each):
            yield each
        else:
            late.append(each)
    yield from late


def _in_order_of_places(name: str | None, *surroundings: str | None) -> Iterator[CudaCompiler]:
    named, path, _, _, host = surroundings
    if named and name != "nvrtc":
        if runnable := shutil.which(named, path=path):
            yield Nvcc(os.path.abspath(runnable))
        return
    if name != "nvrtc" and _has_host(path, host):
        yield from _find_nvccs(surroundings)
    if name != "nvcc" and _has_nvrtc():
        yield Nvrtc(is_found=name is None)


def _fits_driver(compiler: CudaCompiler) -> bool:
    from ksgen import install  # reads the metadata of packages, and asks the driver's library

    if not install.supported_cuda():
        return True
    try:
        return not is_newer_than_driver(compiler.version)
    except ToolchainError:
        return False


def _has_host(path: str | None, host: str | None) -> bool:
    return bool(host or shutil.which("gcc", path=path))


def _find_nvccs(surroundings: tuple[str | None, ...]) -> Iterator[Nvcc]:
    """Yield each nvcc once, even if several paths lead to it."""
    _, path, *homes, _ = surroundings
    usual = [toolkit for pattern in USUAL_TOOLKITS for toolkit in sorted(glob(pattern), key=_numbers, reverse=True)]
    toolkits = [*(home for home in homes if home), *usual, *map(str, _packaged_toolkits())]
    found: dict[str, Nvcc] = {}
    for folder in (*(path or "").split(os.pathsep), *(str(Path(toolkit, "bin")) for toolkit in toolkits)):
        if folder and (runnable := shutil.which("nvcc", path=folder)):
            found.setdefault(os.path.realpath(runnable), Nvcc(os.path.abspath(runnable), is_found=True))
    yield from found.values()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _packaged_toolkits() -> list[Path]:
    """Folders such as `nvidia/cu13` in site-packages, which NVIDIA's packages share; the newest first."""
    spec = importlib.util.find_spec("nvidia")
    places = (spec.submodule_search_locations or ()) if spec else ()
    found = [toolkit for place in places for toolkit in Path(place).glob("cu[0-9]*") if toolkit.is_dir()]
    return sorted(found, key=lambda toolkit: int(re.sub(r"\D", "", toolkit.name)), reverse=True)


def _include_folders() -> list[Path]:
    """Folders of CUDA's headers, which NVRTC does not contain. Only sources that include a header need them."""
    homes = [variable(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    toolkits = [*(Path(home) for home in homes if home), *_packaged_toolkits()]
    folders = [toolkit / "include" / part for toolkit in toolkits for part in (".", "cccl")]
    return [folder for folder in folders if os.path.isdir(folder)]  # False for one that cannot be looked up


@functools.cache
def _ask(nvcc: Nvcc, question: str, answer: str) -> list[str]:
    """Parts of nvcc's answer that match a pattern. Raises `UnfitError` if there are none."""
    with working_folder(nvcc.path) as folder:
        log = current_children.get().run((nvcc.path, question), folder).log
    if not (found := re.findall(answer, log)):
        raise UnfitError(nvcc, "", f"{nvcc.path} {question} says {excerpt(log.strip())}; that is not nvcc")
    return found


def _with_variants(numbers: Iterable[int]) -> tuple[str, ...]:
    """Add the variants `a` (this GPU only, from 9.0) and `f` (this family, from 10.0), which compilers do not list."""
    suffixes = {number: ["", *("a" if number >= 90 else ""), *("f" if number >= 100 else "")] for number in numbers}
    return tuple(f"sm_{number}{suffix}" for number in sorted(suffixes) for suffix in suffixes[number])


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc
    except ImportError as missing:
        raise ToolchainError(f"NVRTC needs cuda-bindings ({missing}); {_install_hint()}") from None
    return nvrtc


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


def _nvrtc_read(nvrtc: Any, program: object, what: str) -> bytes:
    _, size = getattr(nvrtc, f"nvrtcGet{what}Size")(program)
    if size <= 1:  # only the closing zero: Python shares its one-byte objects, so NVRTC must not write into one
        return b""
    text = bytes(size)
    getattr(nvrtc, f"nvrtcGet{what}")(program, text)
    return text
