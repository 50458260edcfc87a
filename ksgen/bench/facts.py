"""Facts of a run that every row carries: device, software versions, commit and date. Measures nothing."""

import subprocess
from datetime import UTC, datetime
from pathlib import Path

import torch

import ksgen
from ksgen.bench.contenders import torch_device
from ksgen.build.processors import processor_name
from ksgen.build.toolchain import find_compiler
from ksgen.devices.base import Device
from ksgen.errors import ToolchainError


def run_facts(device: Device) -> dict[str, str]:
    """Facts about a process that measures on a device."""
    where = torch_device(device)
    on_cuda = where.type == "cuda"
    return {
        "device": device.name,
        "target": device.target,
        "runtime": device.runtime,
        "driver": device.driver_version,
        "compiler": _compiler(device),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}" if on_cuda else torch.__version__,
        "baselines_on": torch.cuda.get_device_name(where)
        if on_cuda
        else f"{processor_name()}, {torch.get_num_threads()} threads",
        "ksgen": ksgen.__version__,
        "commit": commit(Path(ksgen.__file__).parent),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _compiler(device: Device) -> str:
    """Name and version of the compiler; empty if there is none, because binaries then come from a cache."""
    try:
        compiler = device.compiler() or find_compiler()
    except ToolchainError:
        return ""
    return f"{compiler.name} {compiler.version}"


def commit(folder: Path) -> str:
    """Commit of the checkout that contains a folder, with a + if its files were changed; empty outside a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        is_ours = git("ls-files", "--error-unmatch", "__init__.py")
        return (git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")) if is_ours else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""
