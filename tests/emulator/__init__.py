"""Runs emitted CUDA source text on the CPU, strictly, with g++ and no GPU.

`run_cuda(source, entry, grid, block, shared_bytes, args)` compiles the text against the headers of this folder and
runs one launch in a process of its own, each CUDA thread a fiber. NumPy arrays are written back in place; what is
caught comes as `SimtError(kind, message, line, block, thread)`:

- any build: accesses past exact-size buffers and past the shared memory, misaligned accesses, barriers and warp
  collectives that only some threads reach, deadlocks, asynchronous copies that are never waited for (their
  destination stays NaN, as shared memory is at the start of a block), wrong arguments, launches that the kernel's
  `__launch_bounds__` and `__cluster_dims__` do not allow, tensor-core products that the target lacks;
- `sanitize="address"`: reads and writes between those buffers' exact ends and the next page, local and static
  `__shared__` arrays included;
- `sanitize="race"`: memory that another thread of the block wrote with no barrier between, or that the asynchronous
  proxy reads with no fence between.

Of what is asynchronous, any build catches:

- bulk copies, boxes, products and arrivals that are under way when their thread or block ends; mbarriers that get
  too many arrivals, were never initialised or never shown to the engine;
- writes of threads that no `fence_proxy_async` followed, when a store or a product of them is issued or done, or a
  load goes over them; anybody's fence will do here, only the race build knows whose writes are behind which fence;
- sums and A's registers that were written after the last `wgmma_fence`, or while a product works on them;
- warps of a warpgroup that differ in their products, or in what they do about their registers (`setmaxnreg`), whose
  pool is that of the `__launch_bounds__`;
- descriptors with bits that mean nothing, or off their swizzle's pattern; tensor maps that the driver would refuse,
  and boxes whose rows are shorter than their swizzle's span, whose behaviour is unknown;
- addresses of another block where an instruction takes its own block's alone, and anything that reaches a block
  whose threads have all exited (the race build: which may have).

`cluster=` blocks run together, else as many as the kernel's `__cluster_dims__` say. An `early=` launch begins while the
one before it ends: a thread that touches an array before its own `wait_for_previous_grid`, or a block in which none
waits, is an error. Tensor cores add as those of `target=`; `accumulation="rounded"` rounds their exact sums instead.
`order="reverse"` or a seed permutes blocks, threads and asynchronous work, so that a result which depends on their
order shows: some mistakes are caught in one order alone.
Dynamic shared memory follows static arrays at its declared alignment, as on a GPU: where there are none, it begins at a
multiple of 1024. ThreadSanitizer remembers four accesses to each 8 bytes: where more threads than that write single
bytes of them, it may forget the one that matters.

`count_cuda` makes the same launch in a build of its own, and returns what it asked of the memories and the matrix units
(`counts.py`). The other builds know nothing of that.

`kernel/` is what the source sees, `runtime/` emulates the GPU; they meet in `runtime/interface.h`. `ptx.py` turns
inline PTX into calls of `kernel/ptx.h`.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tests.emulator.build import is_installed
from tests.emulator.errors import SimtError

if TYPE_CHECKING:
    from tests.emulator.counts import Counts
    from tests.emulator.emulator import count_cuda, run_cuda
    from tests.emulator.tensor_map import TensorMap

__all__ = ["Counts", "SimtError", "TensorMap", "count_cuda", "is_installed", "run_cuda"]
_MODULES = {"Counts": "counts", "TensorMap": "tensor_map"}


def __getattr__(name: str) -> Any:
    """The functions that run kernels need NumPy. The stand-in for nvcc starts in half the time without it."""
    if name not in __all__:
        raise AttributeError(name)
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'emulator')}"), name)
