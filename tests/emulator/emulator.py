"""Launches a kernel's text on the CPU: arguments in, arrays written back, errors as SimtError. It compiles nothing."""

import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.emulator.build import COUNTS, build, find_lines
from tests.emulator.counts import Counts, read_counts
from tests.emulator.errors import SimtError, describe_lines
from tests.emulator.tensor_map import TensorMap
from tests.support.booked import EMULATION, booked

Array = npt.NDArray[Any]
Argument = Array | TensorMap | np.generic | int | None

MAX_SHARED_BYTES = 227 << 10  # what a block may have on compute capability 9.0
MAX_THREADS = 1024
MOST_BLOCKS = 8  # of a cluster, on every GPU that has them
_VALUE, _BUFFER, _NULL, _TENSOR_MAP = range(4)  # a fifth kind is tests/driver's: bytes with the device's own addresses
ACCUMULATION = ("cut off", "rounded")
DEFAULT_ARCHITECTURE, FIRST_WITH_TENSOR_CORES = 90, 70
_EXIT_CAUGHT = 3
# Where the system scatters mappings widely, an older ThreadSanitizer refuses to start.
_FIXED_ADDRESSES = ("setarch", "-R")


def run_cuda(
    source: str,
    entry: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    shared_bytes: int,
    args: Sequence[Argument],
    sanitize: str = "none",
    *,
    cluster: int | None = None,
    early: bool = False,
    target: str = "",
    accumulation: str = "cut off",
    order: str | int = "forward",
    timeout_s: int = 60,
) -> None:
    """Run one launch of `entry`, a kernel of `source`, and write what it wrote back into the arrays of `args`.

    A Python int is a 64-bit argument; other values are NumPy scalars of the kernel's own type. A read-only array is
    read-only to the kernel too. The same array given twice is one buffer. An array keeps its address modulo 16.
    `cluster` blocks, neighbours along x, run together; None: as many as the kernel's `__cluster_dims__` say, else each
    alone. An `early` launch begins while the one before it ends: no thread may touch an array before it has waited for
    that. Tensor cores add as those of `target` do, such as `sm_80`. If it is empty, it is what the text defines as
    `__CUDA_ARCH__`, else sm_90a. `accumulation` says what they do with the bits below a sum's last: cut off, as that
    target's rule says, or rounded.
    """
    executable, entry_number = build(source, entry, sanitize)
    architecture = _architecture(target, source)
    launch = Launch(
        entry_number, grid, block, shared_bytes, args, order, timeout_s, cluster, early, architecture, accumulation
    )
    _run_launch(executable, launch)


def count_cuda(
    source: str,
    entry: str,
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    shared_bytes: int,
    args: Sequence[Argument],
    *,
    cluster: int | None = None,
    early: bool = False,
    timeout_s: int = 60,
) -> Counts:
    """The same launch, and what it asked of the memories and the matrix units."""
    executable, entry_number = build(source, entry, COUNTS)
    launch = Launch(
        entry_number, grid, block, shared_bytes, args, "forward", timeout_s, cluster, early, _architecture("", source)
    )
    counts = _run_launch(executable, launch)
    assert counts is not None
    return counts


def _run_launch(executable: Path, launch: "Launch") -> Counts | None:
    """Writes the arrays' new contents back. What was counted, by the build that counts."""
    counts = None
    arrays, job = _describe_launch(launch)
    with tempfile.TemporaryDirectory(prefix="ksgen-simt-") as scratch:
        job_path, result_path = Path(scratch, "job"), Path(scratch, "result")
        job_path.write_bytes(job)
        with booked(EMULATION):
            done = _run([executable, job_path, result_path], launch.timeout_s)
        sys.stdout.write(done.stdout)  # the kernel's own printf
        result = result_path.read_bytes() if done.returncode in (0, _EXIT_CAUGHT) else b""
    if not result and done.returncode != 0:
        raise SimtError("crash", f"exit code {done.returncode}\n{done.stderr.strip()}")
    finished = done.returncode == 0
    for line in result[sum(array.nbytes for array in arrays) if finished else 0 :].splitlines():
        report = json.loads(line)
        if "kind" in report:
            _judge(executable, report, suspect=finished)
        else:
            counts = read_counts(report)
    _write_back(arrays, result)
    return counts


def _run(command: Sequence[str | Path], timeout_s: int) -> subprocess.CompletedProcess[str]:
    try:
        # The process ends itself in time, and says at which line; ThreadSanitizer may hold that signal back.
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=timeout_s + 1)
    except subprocess.TimeoutExpired:
        raise SimtError("timeout", f"still running after {timeout_s} s") from None
    if "unexpected memory mapping" in done.stderr and command[0] != _FIXED_ADDRESSES[0]:
        return _run([*_FIXED_ADDRESSES, *command], timeout_s)
    return done


@dataclass(frozen=True)
class Launch:
    """What `run_cuda` was asked for, with the kernel by its number in the executable."""

    entry: int
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    shared_bytes: int
    args: Sequence[Argument]
    order: str | int
    timeout_s: int
    cluster: int | None
    early: bool
    architecture: int
    accumulation: str = ACCUMULATION[0]

    def head(self) -> list[int]:
        """The numbers with which the job file begins."""
        grid, block = _three("grid", self.grid), _three("block", self.block)
        if np.prod(block) > MAX_THREADS:
            raise ValueError(f"block={block}; at most {MAX_THREADS} threads")
        if not 0 <= self.shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(f"shared_bytes={self.shared_bytes}; from 0 to {MAX_SHARED_BYTES} are accepted")
        kind, seed = {"forward": (0, 0), "reverse": (1, 0)}.get(str(self.order), (2, self.order))
        if not isinstance(seed, int):
            raise ValueError(f"order={self.order!r}; 'forward', 'reverse' or a seed are accepted")
        if self.cluster is not None and not 1 <= self.cluster <= MOST_BLOCKS:
            raise ValueError(f"cluster={self.cluster}; 1 to {MOST_BLOCKS} blocks")
        if self.accumulation not in ACCUMULATION:
            raise ValueError(f"accumulation={self.accumulation!r}; accepted are {', '.join(map(repr, ACCUMULATION))}")
        accumulation = ACCUMULATION.index(self.accumulation)
        how = (self.cluster or 0, int(self.early), accumulation, self.architecture)
        return [*grid, *block, self.shared_bytes, kind, seed, *how, self.timeout_s, self.entry]


def _architecture(target: str, source: str) -> int:
    """Return the number of the target to emulate, such as 90 for sm_90a."""
    if not target:
        defined = re.search(r"^#define __CUDA_ARCH__ (\d+)$", source, re.MULTILINE)
        return int(defined[1]) // 10 if defined else DEFAULT_ARCHITECTURE
    named = re.fullmatch(r"sm_(\d+)[a-z]?", target)
    if not named or int(named[1]) < FIRST_WITH_TENSOR_CORES:
        raise ValueError(
            f"target={target!r}; sm_{FIRST_WITH_TENSOR_CORES} and later are accepted, such as 'sm_80' or 'sm_90a'"
        )
    return int(named[1])


def _describe_launch(launch: Launch) -> tuple[list[Array], bytes]:
    """The distinct arrays, and the job file: 64-bit numbers, and bytes padded to a multiple of eight."""
    head = launch.head()
    arrays: list[Array] = []
    buffers: list[bytes] = []
    arguments: list[bytes] = []

    def buffer_of(index: int, array: Array) -> int:
        known = [i for i, other in enumerate(arrays) if other is array]
        if known:
            return known[0]
        if not array.flags.c_contiguous:
            raise ValueError(f"argument {index}: an array of strides {array.strides} is not contiguous")
        if any(np.may_share_memory(array, other) for other in arrays):
            raise ValueError(f"argument {index} overlaps another; give one array twice, or two separate ones")
        arrays.append(array)
        facts = (index, array.flags.writeable, array.ctypes.data, array.nbytes)
        buffers.extend([_numbers(*facts), _padded(array.tobytes())])
        return len(arrays) - 1

    for index, argument in enumerate(launch.args):
        if argument is None:
            arguments.append(_numbers(_NULL, 0))
        elif isinstance(argument, np.ndarray):
            arguments.append(_numbers(_BUFFER, buffer_of(index, argument)))
        elif isinstance(argument, TensorMap):
            arguments.append(_numbers(_TENSOR_MAP, buffer_of(index, argument.array), *argument.numbers))
        else:
            value = _value_bytes(index, argument)
            arguments += [_numbers(_VALUE, len(value)), _padded(value)]
    return arrays, b"".join([_numbers(*head, len(arrays)), *buffers, _numbers(len(launch.args)), *arguments])


def _three(name: str, size: int | tuple[int, ...]) -> tuple[int, int, int]:
    x, y, z = (*((size,) if isinstance(size, int) else size), 1, 1)[:3]
    if min(x, y, z) < 1:
        raise ValueError(f"{name}={size}; at least 1 in each direction")
    return x, y, z


def _value_bytes(index: int, value: object) -> bytes:
    if isinstance(value, np.generic):
        return value.tobytes()
    if isinstance(value, int) and not isinstance(value, bool):
        return _numbers(value)
    raise TypeError(f"argument {index}: {value!r}; arrays, None, NumPy scalars and ints are accepted")


def _numbers(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}q", *values)


def _padded(content: bytes) -> bytes:
    return content + bytes(-len(content) % 8)


def _write_back(arrays: Sequence[Array], content: bytes) -> None:
    offset = 0
    for array in arrays:
        if array.flags.writeable:
            array.reshape(-1).view(np.uint8)[:] = np.frombuffer(content, np.uint8, array.nbytes, offset)
        offset += array.nbytes


def _judge(executable: Path, report: dict[str, Any], suspect: bool) -> None:
    """Raises what a report says, with lines of the text in the place of the addresses of code, which it has in braces.

    A suspect report names two addresses, which may be one call of the text that the compiler wrote twice: no error.
    """
    numbers, places = re.compile(r"\{(\d+)\}"), re.compile(r"(?:\{\d+\})+")
    lines = find_lines(executable, tuple(map(int, numbers.findall(report["place"] + report["message"]))))

    def trace(place: str) -> tuple[int, ...]:
        return tuple(line for address in numbers.findall(place) for line in lines[int(address)])

    here = trace(report["place"])
    if suspect and here == trace(report["message"]):
        return
    message = places.sub(lambda match: f"line {describe_lines(trace(match[0]))}", report["message"])
    line = here[0] if here else None
    block, thread = (number if number >= 0 else None for number in (report["block"], report["thread"]))
    raise SimtError(report["kind"], message, line, block, thread, here[1:])
