"""ClusterSim, a public simulator of NVIDIA GPUs: built from a checkout, and launches on it. It executes PTX; its timing
is not used.

`clustersim.patch` gives it entry points for PTX text, and mends what it got wrong: the high half of 64-bit products,
immediates of 64 bits, carries beyond 32 bits, registers that nvcc leaves half undefined, ties to even in float16, prmt
of negative words, bfi of 64 bits, shuffles in other warps than the first. `emulated.h` has instructions that it lacks.
A launch has a process of its own (`launch.py`).
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ksgen.build.toolchain import Nvcc, find_compiler
from ksgen.emit.render import Source
from ksgen.families import Geometry
from tests.emulator.ptx import translate

COMMIT = "6691574843fc4dc2bf819f8c46859db59f42c28e"  # which the patch was made for
NEEDED = ("git", "cmake", "make", "g++", "flex", "bison", "nvcc", "ptxas")
# Instructions that it lacks. Sources also have some for newer GPUs, in functions that nvcc leaves out.
UNKNOWN = ("cp.async", "mma.sync", "ldmatrix", "cvt.rn.bf16", "cvt.rn.f16x2", "cvt.rn.tf32", "cvt.rna.tf32", "lop3")
OF_NEWER_GPUS = re.compile("e4m3|e5m2")
LAUNCH_SECONDS = 600
_HERE = Path(__file__).parent

Array = np.ndarray[Any, Any]


class SimulatorError(Exception):
    """The simulator cannot be built here, or a launch on it failed."""


def is_lacking(opcodes: set[str]) -> bool:
    """Whether the simulator lacks one of these."""
    return any(opcode.startswith(UNKNOWN) and not OF_NEWER_GPUS.search(opcode) for opcode in opcodes)


def build(source: str, folder: Path) -> "Simulator":
    """The simulator of a checkout, or of what `git clone` takes; a quarter of an hour at the first time, on one
    core.
    """
    patch = _HERE / "clustersim.patch"
    checkout = folder / f"clustersim-{hashlib.sha256(patch.read_bytes()).hexdigest()[:8]}"
    library = checkout / "build" / "lib" / "libcudart.so"
    if not library.exists():
        if missing := [name for name in NEEDED if not shutil.which(name)]:
            raise SimulatorError(
                f"not on PATH: {', '.join(missing)}; the simulator's build needs {', '.join(NEEDED)}, and zlib's "
                "headers"
            )
        shutil.rmtree(checkout, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        _run(["git", "clone", "--quiet", source, str(checkout)], folder)
        _run(["git", "checkout", "--quiet", COMMIT], checkout)
        _run(["git", "apply", str(patch)], checkout)
        _run(["cmake", "-S", ".", "-B", "build", "-DCMAKE_BUILD_TYPE=Release"], checkout)
        _run(["make", "-C", "build", "cudart"], checkout)
    return Simulator(library, checkout / "configs" / "tested-cfgs" / "SM90_H100" / "gpgpusim.config", folder)


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", check=False
    )
    if done.returncode:
        raise SimulatorError(f"{' '.join(command)}\n{done.stdout[-3000:]}")


@dataclass(frozen=True)
class Simulator:
    library: Path
    config: Path
    folder: Path  # where PTX and launches are kept

    def run(self, source: Source, entry: str, geometry: Geometry, args: list[Any]) -> None:
        """One launch of an emitted text, as `tests/support/kernels.py` asks for them; it writes arrays in place."""
        self.launch(self.ptx(source), entry, geometry.grid, geometry.block, geometry.shared_bytes, args)

    def ptx(self, source: Source) -> Path:
        """PTX by nvcc.

        Statements of inline PTX that the simulator lacks become calls of `emulated.h`; the others stay.
        """
        text = translate(source.text, only=is_lacking)
        uses_emulation = text != source.text
        if uses_emulation:
            text = f'#include "{_HERE / "emulated.h"}"\n{text}'
        target = "compute_80" if uses_emulation else "compute_75"
        place = self.folder / "ptx" / f"{hashlib.sha256((target + text).encode()).hexdigest()[:16]}.ptx"
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.with_suffix(".cu").write_text(text, encoding="utf-8")
            nvcc = find_compiler("nvcc")
            assert isinstance(nvcc, Nvcc)
            options = ["-ptx", "-std=c++17", "-O3", f"-arch={target}"]
            _run(
                [nvcc.path, *options, str(place.with_suffix(".cu")), "-o", str(place.with_suffix(".new"))], place.parent
            )
            place.with_suffix(".new").rename(place)
        return place

    def launch(self, ptx: Path, entry: str, grid: int, block: int, shared_bytes: int, args: Sequence[Any]) -> None:
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="launch-") as work:
            self._launch(Path(work), ptx, entry, (grid, block, shared_bytes), args)

    def _launch(self, work: Path, ptx: Path, entry: str, launched: tuple[int, int, int], args: Sequence[Any]) -> None:
        grid, block, shared_bytes = launched
        arrays = {id(arg): arg for arg in args if isinstance(arg, np.ndarray)}
        numbers = {key: number for number, key in enumerate(arrays)}
        for key, array in arrays.items():
            array.reshape(-1).view(np.uint8).tofile(work / f"{numbers[key]}.bin")
        job = {
            "library": str(self.library), "ptx": str(ptx), "entry": entry, "grid": grid, "block": block,
            "shared_bytes": shared_bytes,
            "arrays": [[array.nbytes, array.ctypes.data % 16] for array in arrays.values()],
            "arguments": [["array", numbers[id(arg)]] if isinstance(arg, np.ndarray) else _value(arg) for arg in args],
        }  # fmt: skip
        (work / "job.json").write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, str(_HERE / "launch.py"), str(work)]
        # what is computed, without timing
        surroundings = os.environ | {"GPUSIM_CONFIG": str(self.config), "PTX_SIM_MODE_FUNC": "1"}
        with (work / "log.txt").open("wb") as log:
            done = subprocess.run(
                command, cwd=work, env=surroundings, stdout=log, stderr=log, timeout=LAUNCH_SECONDS, check=False
            )
        if done.returncode:
            words = (work / "log.txt").read_text(errors="replace")[-1500:]
            raise SimulatorError(f"{entry}: the simulator ended with {done.returncode}\n{words}")
        for key, array in arrays.items():
            if array.flags.writeable:
                array.reshape(-1).view(np.uint8)[:] = np.fromfile(work / f"{numbers[key]}.bin", np.uint8)


def _value(arg: Any) -> list[Any]:
    """A scalar as the kernel takes it: a Python int in 64 bits."""
    scalar = np.int64(arg) if isinstance(arg, int) else arg
    return ["bytes", scalar.tobytes().hex()]
