"""A device whose launches are programs: kernels for another processor under its emulator, or under a sanitizer of the
compiler's.

Fulfils `Device`, so that whatever checks kernels on devices checks them here. Arrays pass through files.
"""

import hashlib
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ksgen.build.build import build
from ksgen.build.children import current_children, refusal
from ksgen.build.host import ENTRY, WALKS, source_of
from ksgen.build.request import Binary
from ksgen.devices.base import DeviceLimits, Stream, as_bytes
from ksgen.devices.native import THREADS

HostArray = np.ndarray[Any, Any]
PROGRAM = Path(__file__).with_name("kernel_program.cpp")
SECONDS = 120  # after which a program hangs
LAUNCHES = 3  # of a kernel in one program: the first starts the threads, the others find them


class ProgramError(Exception):
    """What a program said that did not end well: a sanitizer's report, or the signal that ended it."""


@dataclass(frozen=True)
class ProgramCompiler:
    """Makes programs, not libraries. What all programs share is compiled once."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    name: str = "c++ program"

    @property
    def version(self) -> str:
        return hash_of(PROGRAM.read_bytes() + THREADS.read_bytes() + source_of("", []).encode())

    def options(self, target: str) -> tuple[str, ...]:
        return (*self.command, *("-std=gnu++17", "-w", "-fno-strict-aliasing", "-pthread"), *self.flags)

    def compile(self, text: str, entry: str, target: str) -> Binary:
        return self.made(source_of(text, ENTRY.findall(text)), entry, target, ("shared.o", "-rdynamic", "-ldl"))

    def made(self, source: str, entry: str, target: str, more: tuple[str, ...]) -> Binary:
        with tempfile.TemporaryDirectory(prefix="ksgen-program-") as folder:
            Path(folder, "kernel.cpp").write_text(source)
            if "shared.o" in more:
                Path(folder, "shared.o").write_bytes(self._shared(target))
            command = (*self.options(target), "kernel.cpp", "-o", "made", *more)
            finished = current_children.get().run(command, folder)
            if finished.returncode == 0:
                return Binary(Path(folder, "made").read_bytes(), entry, target)
        raise refusal(
            f"{entry}: refused", "kernel.cpp", source, finished.log, lambda kept: (*self.options(target), kept)
        )

    def _shared(self, target: str) -> bytes:
        return build(
            THREADS.read_text() + PROGRAM.read_text(), "shared", target, ObjectCompiler(self.command, self.flags)
        ).data


class ObjectCompiler(ProgramCompiler):
    """Makes an object file of C++."""

    def compile(self, text: str, entry: str, target: str) -> Binary:
        return self.made(text, entry, target, ("-c",))


def hash_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Memory:
    """Some of a file's bytes, from an offset on."""

    path: Path
    offset: int = 0


@dataclass(eq=False)
class ProgramDevice:
    """Runs programs by a `starter`, such as an emulator."""

    compiled_by: ProgramCompiler
    folder: Path
    limits: DeviceLimits
    starter: tuple[str, ...] = ()
    threads: int = 3
    environment: dict[str, str] = field(default_factory=dict)
    kind: Literal["native"] = "native"
    runtime: Literal["native"] = "native"
    dialect: Literal["opencl"] = "opencl"
    index: int = 0
    name: str = "a program"
    driver_version: str = ""
    shares_host: bool = False
    context: int = 0
    supports_foreign_streams: bool = False
    host_stream: None = None
    is_open: bool = True
    launched: int = 0

    @property
    def target(self) -> str:
        return f"a program of {' '.join(self.compiled_by.command)}"

    def compiler(self) -> ProgramCompiler:
        return self.compiled_by

    def prepare_launches(self) -> None:
        """Launches need only their programs."""

    def load(self, binary: Binary, entry: str, shared_bytes: int, starts_early: bool = False) -> tuple[Path, str]:
        assert not shared_bytes
        program = self.folder / hash_of(binary.data)
        if not program.exists():
            program.write_bytes(binary.data)
            program.chmod(0o700)
        return program, entry + WALKS

    def launch(
        self, kernel: tuple[Path, str], grid: int, block: int, shared_bytes: int, args: tuple[Any, ...], stream: Stream
    ) -> None:
        assert (block, shared_bytes, stream) == (1, 0, None)
        program, walk = kernel
        given = [
            f"i:{arg or 0}" if arg is None or isinstance(arg, int) else f"b:{arg.path}:{arg.offset}" for arg in args
        ]
        command = [*self.starter, str(program), walk, str(grid), str(self.threads), str(LAUNCHES), *given]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.environment or None, timeout=SECONDS
        )
        if done.returncode or done.stderr:
            raise ProgramError(f"{walk} ends with {done.returncode}: {done.stderr}")
        self.launched += 1

    def allocate(self, nbytes: int) -> Memory:
        with tempfile.NamedTemporaryFile(dir=self.folder, delete=False) as file:
            file.write(b"\xff" * nbytes)
        return Memory(Path(file.name))

    def workspace(self, nbytes: int, stream: Stream) -> Memory:
        return self.allocate(nbytes)

    def upload(self, buffer: Memory, array: HostArray, stream: Stream = None) -> None:
        with buffer.path.open("r+b") as file:
            file.seek(buffer.offset)
            file.write(as_bytes(array).tobytes())

    def download(self, array: HostArray, buffer: Memory, stream: Stream = None) -> None:
        flat = as_bytes(array)
        flat[:] = np.frombuffer(buffer.path.read_bytes(), np.uint8, flat.nbytes, buffer.offset)

    def synchronize(self, stream: Stream = None) -> None:
        """A program has ended by then."""
