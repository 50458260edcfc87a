"""Host memory for arrays of a device that uses them in place: poisoned around them, or between pages that nothing
may touch.
"""

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.devices import find_device
from ksgen.devices.base import Device
from ksgen.errors import DeviceError
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import Plan

Array = np.ndarray[Any, Any]
NOTHING = 0xFF  # in every byte: a NaN in every type
GAP = 129  # elements between arrays: odd, so that none begins at a vector's boundary


def processor() -> Device:
    try:
        device = find_device(os.environ.get("KSGEN_TEST_PROCESSOR", "opencl"))
    except DeviceError as absent:
        pytest.skip(str(absent))
    if not device.shares_host:
        pytest.skip(f"{device.name} does not use host memory where it lies")
    return device


def stay_within_their_arrays(module: str, timeout: int = 240, call: str = "run_fenced()") -> None:
    """A module's `run_fenced`, in a process of its own, which one access beyond an array ends."""
    done = subprocess.run(
        [sys.executable, "-c", f"from {module} import run_fenced; {call}"],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip().splitlines()[-1:]) == (0, ["all within their arrays"]), done.stderr


def nothing(nbytes: int) -> Array:
    """Bytes that begin at a multiple of the alignment of device buffers."""
    whole = np.full(nbytes + 256, NOTHING, np.uint8)
    begin = -whole.ctypes.data % 256
    return whole[begin : begin + nbytes]


def placed(
    arrays: Mapping[str, Array], dtype: str, boundary: int = 1, behind: int = 0
) -> tuple[Array, dict[str, Array]]:
    """One memory with copies of the arrays, flat, each from such a boundary on or some elements behind it, with guards
    before, between and behind them.
    """
    kind = numpy_dtype(dtype)
    memory = nothing(
        (sum(each.size for each in arrays.values()) + (GAP + behind) * (len(arrays) + 1)) * kind.itemsize
        + boundary * len(arrays)
    )
    places, begin = dict[str, Array](), GAP * kind.itemsize
    for name, array in arrays.items():
        begin += -begin % boundary + behind * kind.itemsize
        places[name] = place = memory[begin : begin + array.nbytes].view(kind)
        place[:] = array.reshape(-1)
        begin += array.nbytes + GAP * kind.itemsize
    return memory, places


def spread(array: Array, gap: int) -> Array:
    """A matrix's rows with so many NaNs between them, flat: what a slice of a larger matrix reaches from its first
    element to its last.
    """
    rows, length = array.shape
    wide = np.full((rows, length + gap), np.nan, array.dtype)
    wide[:, :length] = array
    return wide.reshape(-1)[: wide.size - gap]


def rows_in(place: Array, shape: tuple[int, ...], gap: int) -> Array:
    """The matrix that lies in such memory."""
    item = place.itemsize
    return np.lib.stride_tricks.as_strided(place, shape, ((shape[1] + gap) * item, item))


def workspace_of(plan: Plan) -> Array:
    """Memory in which nothing was ever written, with guards behind it."""
    return nothing(plan.workspace_bytes + 256)


@dataclass(frozen=True)
class Fenced:
    """Memory whose neighbours on both sides may not be touched: the process would end."""

    memory: mmap.mmap

    @classmethod
    def of(cls, nbytes: int) -> "Fenced":
        memory = mmap.mmap(-1, (-(-nbytes // mmap.PAGESIZE) + 2) * mmap.PAGESIZE)
        begin = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for page in (begin, begin + len(memory) - mmap.PAGESIZE):
            assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(page), mmap.PAGESIZE, 0) == 0
        return cls(memory)

    def place(self, array: Array, at_end: bool) -> Array:
        begin = len(self.memory) - mmap.PAGESIZE - array.nbytes if at_end else mmap.PAGESIZE
        place = np.frombuffer(self.memory, np.uint8, array.nbytes, begin).view(array.dtype)
        place[:] = array.reshape(-1)
        return place


def fenced(arrays: Mapping[str, Array], at_end: bool) -> dict[str, Array]:
    """Copies of the arrays, flat, that end in front of a fence or begin behind one."""
    return {name: Fenced.of(each.nbytes).place(each, at_end) for name, each in arrays.items()}
