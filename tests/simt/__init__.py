"""Runs emitted CUDA source text on the CPU, strictly, with g++ and no GPU.

`run_cuda(source, entry, grid, block, shared_bytes, args)` compiles the text against the headers of this folder and
runs one launch in a process of its own, each CUDA thread a fiber. NumPy arrays are written back in place; what is
caught comes as `SimtError(kind, message, line, block, thread)`:

- any build: accesses past exact-size buffers and past the shared memory, misaligned accesses, barriers and warp
  collectives that only some threads reach, deadlocks, asynchronous copies that are never waited for (their
  destination stays NaN, as shared memory is at the start of a block), wrong arguments;
- `sanitize="address"`: reads and writes between those buffers' exact ends and the next page, local and static
  `__shared__` arrays included;
- `sanitize="race"`: memory that another thread of the block wrote with no barrier between.

`order="reverse"` or a seed permutes blocks and threads, so that a result which depends on their order shows.

`kernel/` is what the text sees, `runtime/` what plays the GPU; they meet in `runtime/interface.h`.
"""

from tests.simt.build import is_installed
from tests.simt.emulator import run_cuda
from tests.simt.errors import SimtError
from tests.simt.tensor_map import TensorMap

__all__ = ["SimtError", "TensorMap", "is_installed", "run_cuda"]
