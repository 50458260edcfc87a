"""A machine with GPUs for tests: a libcuda.so.1 whose kernels run in the emulator, under PyCUDA and cuda-bindings
unchanged.

`run(script)` runs Python in a process of its own on that machine; `environment()` is what such a process needs. There
nvcc is a script that registers each cubin with the driver (`registry.py`), so that the driver emulates its source.
`library/` is the driver. What a real one leaves open, it does in the worst way that is legal:

- streams run late: when they are waited for, asked whether they are done, or the host copies and waits; legacy default
  stream, blocking and non-blocking streams, events and captures order as CUDA says and no more;
- device memory starts as NaN, is of exact size, and faults where the host touches it; a freed address is never used
  again;
- calls need a context current on their thread; after a kernel that failed, each returns that error for good;
- launches that may begin before the work before them has ended do: arrays are not there until a thread has waited for
  that;
- binaries that are damaged, or for another GPU, are refused; so are launches beyond the device's or the kernel's
  limits.

Its time is a model's, the same at every run: the host takes 6 to 8 us for a launch, a kernel begins when the host has
queued it, and events tell half a microsecond. A launch that was emulated before, on the same memory, is
not emulated again.
The probes of a device's ceilings (`measure_ceilings`) copy half a gigabyte, which takes the emulator longer than the
two minutes that a script has: one that runs or tunes kernels there puts `Ceilings` of its own in their place.

Variables: KSGEN_DRIVER_GPUS lists the GPUs (H200, A100, RTX4090), KSGEN_DRIVER_CUDA is the newest CUDA that it serves
(12040: 12.4), KSGEN_DRIVER_MODE the compute mode (3: exclusive-process), KSGEN_DRIVER_CLUSTER the blocks of the largest
cluster that fits (1: none, as on a part of a GPU), KSGEN_DRIVER_FAULTS the faults (`library/faults.h`), of kernels by
their entries, so that one candidate of a search can hang, fail or be wrong; KSGEN_DRIVER_IDLE drops launches, for
benchmarks; KSGEN_DRIVER_DURATIONS says how long kernels take, by their entries (`library/launch.cpp`).
KSGEN_PYCUDA_FOLDER is where PyCUDA is built.

`python -m tests.driver` builds all of it. Items marked `stand_in` run there (`items.py`); on a GPU's machine they run
on the GPU.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.driver.build import NotHereError
    from tests.driver.machine import completed, environment, run

__all__ = ["NotHereError", "completed", "environment", "run"]


def __getattr__(name: str) -> Any:
    """The stand-in for nvcc starts in half the time without pytest, which the machine needs."""
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{'build' if name == 'NotHereError' else 'machine'}"), name)
