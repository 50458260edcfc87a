"""Counts of a family's launches in the emulator: the kernel's own, and those before and after it.

Packing is left out.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from ksgen.emit.render import Source
from ksgen.families import Geometry, family_named
from ksgen.families.banks import CYCLE_BYTES
from ksgen.measure.verify import make_problem
from tests.emulator import Counts, count_cuda
from tests.support.kernels import batch_for, result

ENOUGH = 1 << 20  # multiprocessors: each tile has a block of its own


@dataclass
class Counting:
    """A `Run` of `tests/support/kernels.py` that keeps what each entry's launches counted."""

    timeout_s: int
    by_entry: dict[str, Counts] = field(default_factory=lambda: defaultdict(Counts))

    def __call__(self, source: Source, entry: str, geometry: Geometry, args: list[Any]) -> None:
        launched = (geometry.launched(ENOUGH), geometry.block, geometry.shared_bytes)
        self.by_entry[entry] += count_cuda(
            source.text, entry, *launched, args, early=geometry.starts_early, timeout_s=self.timeout_s
        )


def count_kernel(source: Source, batch: int, timeout_s: int = 300) -> tuple[Counts, Counts]:
    """Count the kernel's launch, and all launches around it, at the given batch or the next that its family takes."""
    run = Counting(timeout_s)
    result(make_problem(source.kernel, batch_for(source, batch)), source, run)
    if source.kernel.job == "multiply":
        del run.by_entry[source.second_entry]
    return run.by_entry.pop(source.entry), sum(run.by_entry.values(), Counts())


def compared(source: Source, batch: int, own: Counts, around: Counts) -> dict[str, tuple[float, float]]:
    """{what: (by the family's `work`, counted)}, for what both know."""
    kernel = source.kernel
    work = family_named(source.family).work(kernel, source.constants, batch)
    # The sums that a gradient's parts leave in a workspace pass the cache, and need not reach memory.
    memory = (
        own.memory_read_bytes + (around if kernel.job == "gradient" and around.blocks else own).memory_written_bytes
    )
    rows = {
        "blocks": (work.blocks, own.blocks),
        "bytes of memory": (work.memory_bytes, memory),
        "bytes of the cache": (work.cache_bytes + work.passed_bytes, own.cache_bytes + around.cache_bytes),
        "bytes of shared memory": (work.shared_bytes, own.shared_bytes),
        "cycles of shared memory": ((work.shared_bytes + work.returned_bytes) / CYCLE_BYTES, own.shared_cycles),
    }
    return rows | (
        {"multiply-adds": (work.multiply_adds * source.kernel.arithmetic.multiply_adds, own.multiply_adds)}
        if own.multiply_adds
        else {}
    )
