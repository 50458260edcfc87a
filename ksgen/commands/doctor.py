"""`ksgen doctor`."""

import os
import platform
import re
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import click

import ksgen
from ksgen import devices
from ksgen.commands.common import console, json_option, print_json
from ksgen.devices.base import Device, cuda_driver_version
from ksgen.errors import ConstantsError, DeviceError, KsgenError, ToolchainError
from ksgen.install import cuda_extra, install_line, supported_cuda
from ksgen.ownership import distrust
from ksgen.paths import cache_dir, wisdom_dir
from ksgen.values import counted

if TYPE_CHECKING:
    from ksgen.build.host import HostCompiler
    from ksgen.build.toolchain import CudaCompiler

_OLDEST_CUDA = 12  # kernels are written for compilers of this version or later
_BUILDER = "kernels are built by"
_UNSET_NVCC = "unset KSGEN_NVCC, or set it to another nvcc"


@dataclass(frozen=True)
class Finding:
    """One line of the list: the thing, its state, and the command to type if it is missing."""

    what: str
    found: str  # empty if missing
    why: str = ""
    remedy: str = ""


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """List what is installed and what is missing, with the command that installs it. Exit code 1 if no kernel can be
    built and run here.

    \b
    Examples:
      ksgen doctor
      KSGEN_DEVICE=opencl ksgen doctor --json
    """
    from ksgen.build.build import compiling_is_forbidden

    device = _chosen_device()
    findings = [
        Finding("ksgen", f"{ksgen.__version__} in {Path(ksgen.__file__).parent}"),
        Finding("Python", f"{platform.python_version()} on {platform.platform()}"),
        *_driver(),
        *_devices(),
        device,
        *_compilers(_target()),
        _host_compiler(),
        *_folders(),
        *_passport(),
        *_settled(),
        *_array_libraries(),
    ]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    lacks_builder = any(each.what == _BUILDER and not each.found for each in findings)
    is_stuck = lacks_builder and not compiling_is_forbidden() and (taken := _taken()) and taken.kind == "cuda"
    if not device.found or is_stuck:
        sys.exit(1)


def _devices() -> list[Finding]:
    names = {"pycuda": "GPU by PyCUDA", "driver": "GPU by cuda-bindings"}
    names |= {"native": "processor", "opencl": "OpenCL device"}
    return [
        Finding(names[line.runtime], f"{line.name} ({line.selector}), {line.target}")
        if isinstance(line, devices.Found)
        else Finding(names[line.runtime], "", line.why, line.remedy)
        for line in devices.list_devices()
    ]


def _chosen_device() -> Finding:
    from ksgen.devices.threads import wanted_threads

    asked = os.environ.get("KSGEN_DEVICE")
    usual = "the first available of PyCUDA, cuda-bindings, the processor and OpenCL"
    reason = f"KSGEN_DEVICE={asked}" if asked else usual
    try:
        device = devices.find_device()
    except DeviceError as error:
        remedy = f"without a GPU: {install_line('cpu')}; with one: {install_line(cuda_extra())}"
        return Finding("launchers take", "", str(error), remedy)
    limits = device.limits
    count = limits.multiprocessors
    if limits.is_cpu:
        threads = min(wanted_threads() or count, count)
        has = f"{counted(threads, 'thread')} on {counted(count, 'core')}, vectors of {limits.vector_bytes} bytes"
        has += "".join(f", pairs of {each}" for each in limits.dots)
        has += "".join(f", matrix tiles of {each}" for each in limits.tiles)
    else:
        has = f"{count} multiprocessors, {limits.shared_bytes_per_block // 1024} KiB of shared memory per block"
    tool = "compiler" if device.runtime == "native" else "driver"
    return Finding(
        "launchers take",
        f"{device.name} by {device.runtime} ({reason}); {tool} {device.driver_version or 'none'}, {has}",
    )


def _host_compiler() -> Finding:
    """Compiler of kernels for this machine's processor, with the reason for it and the processor's instruction sets."""
    from ksgen.build.processors import instruction_sets_here, machine
    from ksgen.devices.native import working_compiler

    what = "processors' kernels are built by"
    sets = ", ".join(each.name for each in instruction_sets_here()) or "--arch host only"
    try:
        compiler = working_compiler()
        version = compiler.version.rpartition(",")[0]  # without the digest of ksgen's own snippets
    except ToolchainError as error:
        why, _, remedy = str(error).splitlines()[0].rpartition("; ")
        return Finding(what, "", f"{why}; this {machine()} runs bundles for {sets}", remedy)
    return Finding(
        what, f"{compiler}, {version} ({_why_taken(compiler)}), for this processor, which also runs bundles for {sets}"
    )


def _why_taken(compiler: "HostCompiler") -> str:
    """Reason why this compiler of processors' kernels was chosen among those found."""
    from ksgen.build.host import CANDIDATES, host_compilers
    from ksgen.devices.native import why_not_working

    if os.environ.get("KSGEN_CXX"):
        return "KSGEN_CXX names it"
    found = host_compilers()
    if index := found.index(compiler):
        return f"in place of {'; '.join(f'{each}, because {why_not_working(each)}' for each in found[:index])}"
    after = f"; after it come {', '.join(map(str, found[1:]))}" if found[1:] else ""
    return f"the first of {', '.join(CANDIDATES)} on PATH, GCC before Clang, and ziglang{after}"


def _driver() -> list[Finding]:
    """Version of NVIDIA's driver, with a remedy if it is too old; empty without a driver."""
    if not (supported := supported_cuda()):
        return []
    version = cuda_driver_version(supported)
    if supported < _OLDEST_CUDA * 1000:
        why = f"{version}: it loads no binary of CUDA {_OLDEST_CUDA} or later"
        return [Finding("CUDA driver", "", why, "update the driver to 525 or later")]
    return [Finding("CUDA driver", version)]


def _compilers(target: str) -> list[Finding]:
    """Try each kind of compiler on a one-line kernel; with a CUDA driver, also report the one that launchers take."""
    from ksgen.build.toolchain import CudaCompiler, compilers, find_compiler

    findings, taken = [], list[CudaCompiler]()
    for name in ("nvcc", "nvrtc"):
        try:
            tried = [(each, *_verdict(each, target)) for each in compilers(name) or [find_compiler(name)]]
        except KsgenError as error:
            why, _, remedy = str(error).splitlines()[0].partition("; ")
            findings.append(Finding(name, "", why, remedy))
            continue
        taken += [compiler for compiler, why, _ in tried if not why]
        findings += [
            Finding(name, f"{compiler.version} {getattr(compiler, 'path', '')}".strip())
            if not why
            else Finding(name, "", f"{getattr(compiler, 'path', '')} {why}".strip(), remedy)
            for compiler, why, remedy in tried
        ]
    if supported_cuda():
        findings.append(_builder(next((each for each in compilers() if each in taken), None), target))
    return findings


def _builder(chosen: "CudaCompiler | None", target: str) -> Finding:
    from ksgen.build.build import compiling_is_forbidden

    if compiling_is_forbidden():
        why = "KSGEN_NO_COMPILE forbids compiling: launchers use only binaries of caches and bundles"
        return Finding(_BUILDER, "", why, "unset KSGEN_NO_COMPILE")
    if chosen:
        return Finding(_BUILDER, f"{chosen}, {chosen.version}, for {target}")
    if os.environ.get("KSGEN_NVCC"):
        return Finding(
            _BUILDER, "", "the compiler that KSGEN_NVCC names does not work here, and no other is tried", _UNSET_NVCC
        )
    return Finding(
        _BUILDER, "", "no compiler builds binaries that this GPU and its driver can load", install_line(cuda_extra())
    )


def _verdict(compiler: "CudaCompiler", target: str) -> tuple[str, str]:
    """Reason why a compiler does not work here, and the remedy; both empty if it works."""
    from ksgen.build.toolchain import UnfitError, check_target, is_newer_than_driver, trial

    is_named = compiler.name == "nvcc" and os.environ.get("KSGEN_NVCC")  # then no other is tried
    instead = _UNSET_NVCC if is_named else f"{install_line(cuda_extra())} brings NVRTC"
    try:
        check_target(target, compiler)
        version = compiler.version
    except UnfitError as error:
        return str(error).splitlines()[0], instead if is_named else f"{instead}, or install a newer toolkit"
    except ToolchainError as error:
        return str(error).splitlines()[0], instead
    if is_newer_than_driver(version):
        driver = f"the driver ({cuda_driver_version(supported_cuda())})"
        return f"{version} is newer than {driver}, which cannot load its binaries", f"update the driver, or: {instead}"
    if why := trial(compiler, target):
        host = "NVCC_CCBIN=g++-12 names a host compiler that it accepts"
        return why, f"{host}, or: {instead}" if is_named else f"{host}, or: {instead}, which needs no host compiler"
    return "", ""


def _taken() -> Device | None:
    """The device that launchers take, if there is one."""
    with suppress(DeviceError):
        return devices.find_device()
    return None


def _target() -> str:
    """Target of the GPU that launchers take, else of the first GPU, else sm_80."""
    taken = _taken()
    targets = [taken.target] if taken and taken.kind == "cuda" else []
    targets += [line.target for line in devices.list_devices() if isinstance(line, devices.Found)]
    return next((target for target in targets if target.startswith("sm_")), "sm_80")


def _folders() -> list[Finding]:
    from ksgen.build.cache import Cache
    from ksgen.wisdom import files_in, folders

    folder = cache_dir()
    entries = list(Cache(folder).entries())
    size = sum(entry.bytes for entry in entries) / 1e6
    cached = f"{counted(len(entries), 'entry', 'entries')}, {size:.1f} MB in {folder}"
    known = ", ".join(f"{counted(len(files_in(place)), 'device')} in {place}" for place in folders())
    return [_folder("cache", folder, cached), _folder("wisdom", wisdom_dir(), known)]


def _folder(what: str, folder: Path, found: str) -> Finding:
    why = distrust(folder)
    return Finding(what, "" if why else f"{found}{_access(folder)}", why)


def _passport() -> list[Finding]:
    """Families that are proven on the GPU that launchers take; empty if they take another device."""
    from ksgen.passport import FORCE, MAKE, load, read_bars, unproven, why_not

    device = _taken()
    if device is None or device.kind != "cuda":
        return []
    try:
        waiting = [bar for bar in read_bars(device) if not bar.is_disabled]
    except ConstantsError as error:
        return [Finding("passport", "", str(error), f"unset {FORCE}")]
    if waiting:
        families = ", ".join(bar.family for bar in waiting)
        why = why_not(device) or f"launchers take no {families} yet: {waiting[0].reason.partition(' (')[0]}"
        return [Finding("passport", "", why, MAKE)]
    if os.environ.get(FORCE):
        return [Finding("passport", f"{FORCE}={os.environ[FORCE]} permits families without a proof")]
    needs = "" if unproven(device.target) else f"; no family of {device.target} needs a proof"
    return [Finding("passport", f"{load(device) or 'none'}{needs}")]


def _settled() -> list[Finding]:
    """Kernels that searches and trials settled on the device that launchers take."""
    from ksgen.wisdom import load_wisdom

    if (device := _taken()) is None:
        return []
    entries = load_wisdom(device.name, target=device.target).entries()
    trials = sum(entry.is_trial for entry in entries)
    settles = "`ksgen calibrate SPEC` settles them"
    known = f"{len(entries) - trials} by searches, {trials} by trials; others use defaults: {settles}"
    found = known if entries else f"none on {device.name}, so that all use defaults: {settles}"
    return [Finding("fastest kernels", found)]


def _access(folder: Path) -> str:
    """Words for a folder that cannot be written, else empty. If it does not exist, its nearest parent is checked."""
    existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))
    return "" if os.access(existing, os.W_OK) else ", read-only"


def _array_libraries() -> list[Finding]:
    """Libraries whose arrays launchers accept, found without importing them."""
    installed = list[tuple[str, str]]()
    for each in metadata.distributions():
        # what a failed removal leaves has no name, or raises an error in the package importlib_metadata
        with suppress(OSError):
            if name := each.name:
                installed.append((name.split("-cuda")[0].lower(), each.version))
    versions = dict(reversed(installed))  # Python imports the first distribution of a name, so the first wins
    return [_with_its_cuda(name, versions[name]) for name in ("torch", "cupy", "jax") if name in versions]


def _with_its_cuda(name: str, version: str) -> Finding:
    """Report a library's version, and whether the driver supports the CUDA that PyTorch names in it: 2.9.0+cu128."""
    supported, build = supported_cuda(), re.search(r"\+(?:cu(\d+)\d|cpu)$", version)
    if not (supported and build):
        return Finding(name, version)
    if build[1] is None:
        why = f"{version}: built without CUDA, so its tensors cannot lie on the GPU"
        return Finding(name, "", why, f"install {name}'s build for CUDA")
    if int(build[1]) > supported // 1000:
        of_driver = f"{supported // 1000}.{supported % 1000 // 10}"
        why = f"{version}: built for CUDA {build[1]}, and the driver supports {of_driver}"
        return Finding(name, "", why, f"update the driver, or install {name}'s build for CUDA {supported // 1000}")
    return Finding(name, version)


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Column, Table

    table = Table(Column(), Column(), Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
    for finding in findings:
        mark = "[green]yes[/]" if finding.found else "[yellow]no[/]"
        text = escape(finding.found or finding.why)
        table.add_row(
            mark,
            f"[bold]{escape(finding.what)}[/]",
            text + (f"\n[cyan]{escape(finding.remedy)}[/]" if finding.remedy else ""),
        )
    console().print(table)
