"""`ksgen doctor`."""

import os
import sys
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

import click

from ksgen.commands.common import console, json_option, print_json
from ksgen.install import install_line
from ksgen.words import counted


@dataclass(frozen=True)
class Finding:
    """One line of the list: what was looked for, what was found, and what to type if it is missing."""

    what: str
    found: str  # empty if missing
    why: str = ""
    remedy: str = ""


@click.command("doctor", short_help="List what is installed and what is missing, with the line that installs it.")
@json_option
def command(as_json: bool) -> None:
    """List what is installed and what is missing, with the line that installs it. Exit code 1 if no kernel can run here.

    \b
    Examples:
      ksgen doctor
      KSGEN_DEVICE=opencl ksgen doctor --json
    """
    device = _chosen_device()
    findings = [*_installation(), *_devices(), device, *_compilers(), *_folders(), *_neighbours()]
    if as_json:
        print_json([asdict(finding) for finding in findings])
    else:
        _print(findings)
    if not device.found:
        sys.exit(1)


def _installation() -> list[Finding]:
    import platform

    from ksgen import __file__ as place
    from ksgen import __version__

    return [
        Finding("ksgen", f"{__version__} in {Path(place).parent}"),
        Finding("Python", f"{platform.python_version()} on {platform.platform()}"),
    ]


def _devices() -> list[Finding]:
    from ksgen.devices import Found, list_devices

    names = {"pycuda": "GPU by PyCUDA", "driver": "GPU by cuda-bindings", "opencl": "OpenCL device"}
    return [
        Finding(names[line.runtime], f"{line.name} ({line.selector}), {line.target}")
        if isinstance(line, Found)
        else Finding(names[line.runtime], "", line.why, line.remedy)
        for line in list_devices()
    ]


def _chosen_device() -> Finding:
    from ksgen.devices import find_device
    from ksgen.errors import DeviceError

    asked = os.environ.get("KSGEN_DEVICE")
    reason = f"KSGEN_DEVICE={asked}" if asked else "the first of PyCUDA, cuda-bindings and OpenCL that is there"
    try:
        device = find_device()
    except DeviceError as error:
        remedy = f"without a GPU: {install_line('cpu')}; with one: {install_line('cuda')}"
        return Finding("launchers take", "", str(error), remedy)
    limits = device.limits
    return Finding(
        "launchers take",
        f"{device.name} by {device.runtime} ({reason}); driver {device.driver_version}, {limits.multiprocessors} multiprocessors, "
        f"{limits.shared_bytes_per_block // 1024} KiB of shared memory per block",
    )


def _compilers() -> list[Finding]:
    from ksgen.build.toolchain import find_compiler
    from ksgen.errors import KsgenError

    findings = []
    for name, remedy in (("nvcc", install_line("nvcc")), ("nvrtc", install_line("cuda"))):
        try:
            compiler = find_compiler(name)
            findings.append(Finding(name, f"{compiler.version} {getattr(compiler, 'path', '')}".strip()))
        except KsgenError as error:
            findings.append(Finding(name, "", str(error).splitlines()[0], remedy))
    return findings


def _folders() -> list[Finding]:
    from ksgen.build.cache import Cache
    from ksgen.paths import cache_dir, resource, wisdom_dir

    folder = cache_dir()
    entries = list(Cache(folder).entries())
    size = sum(entry.bytes for entry in entries) / 1e6
    access = "" if os.access(_existing(folder), os.W_OK) else ", read-only"
    files = {place: sorted(place.glob("*.json")) for place in (resource("wisdom"), wisdom_dir())}
    wisdom = ", ".join(f"{counted(len(found), 'device')} in {place}" for place, found in files.items())
    return [Finding("cache", f"{counted(len(entries), 'entry', 'entries')}, {size:.1f} MB in {folder}{access}"), Finding("wisdom", wisdom)]


def _existing(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if os.path.exists(place))


def _neighbours() -> list[Finding]:
    """Libraries whose arrays launchers accept, found without importing them."""
    findings = []
    for name in ("torch", "cupy", "jax"):
        versions = [found.version for found in metadata.distributions() if found.name.split("-cuda")[0].lower() == name]
        if versions:
            findings.append(Finding(name, versions[0]))
    return findings


def _print(findings: list[Finding]) -> None:
    from rich.markup import escape
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for finding in findings:
        mark = "[green]yes[/]" if finding.found else "[yellow]no[/]"
        text = escape(finding.found or finding.why)
        table.add_row(mark, f"[bold]{escape(finding.what)}[/]", text + (f"\n[cyan]{escape(finding.remedy)}[/]" if finding.remedy else ""))
    console().print(table)
