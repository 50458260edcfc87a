"""Registry for the stand-in driver: one file per cubin, named by its SHA-256, that names the emulator build to run."""

import hashlib
import os
import tempfile
from pathlib import Path

from tests.driver.cubin import Kernel, read_kernels, read_target
from tests.emulator.build import build, cache_folder, tools_digest


def registry_folder() -> Path:
    folder = cache_folder() / f"registry-{tools_digest()[:32]}"  # another emulator runs no binary of this one
    folder.mkdir(exist_ok=True)
    return folder


def register(cubin: bytes, source: str) -> None:
    """Let the stand-in driver play this binary by the text that it was compiled from."""
    kernels = read_kernels(cubin)
    built = [build(source, kernel.name, "none") for kernel in kernels]
    lines = [
        str(built[0][0]),
        str(read_target(cubin)),
        *(_line(*each) for each in zip(kernels, (number for _, number in built), strict=True)),
    ]
    with tempfile.NamedTemporaryFile("w", dir=registry_folder(), delete=False) as aside:
        aside.write("\n".join(lines) + "\n")
    os.rename(aside.name, registry_folder() / hashlib.sha256(cubin).hexdigest())


def _line(kernel: Kernel, number: int) -> str:
    """Format a kernel as `library/modules.cpp` reads it. `number` is its number in the emulator's executable."""
    counts = (
        number,
        kernel.registers,
        kernel.shared_bytes,
        kernel.most_threads,
        kernel.cluster,
        len(kernel.parameters),
    )
    return " ".join([kernel.name, *map(str, counts), *(f"{offset} {size}" for offset, size in kernel.parameters)])
