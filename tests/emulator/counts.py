"""What the emulator counts in launches: data, and how they add up. It launches nothing.

Global memory is counted in sectors of 32 bytes, and arrays begin at a multiple of 256, plus what their address has
beyond a multiple of 16. A request is what one instruction of a warp asks for. An access of the text is one instruction:
what nvcc leaves out, takes twice or puts together (neighbouring accesses that are no struct) is not known here.

Shared memory's cycles: 128 bytes go in or out each, and each of 32 banks gives one word of four bytes. So 8 lanes are
served at a time where each wants 16 bytes, and 16 where each wants 8; twice as many in reads where all lanes n and n ^
1, or all lanes n and n ^ 2, have one address. Loads and stores of one lane that follow each other in a loop, side by
side and aligned, are one wide access.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class GlobalTally:
    """Counts for one kind of access to global memory."""

    requests: int = 0
    sectors: int = 0  # of each request by itself
    bytes: int = 0  # that lanes asked for


@dataclass(frozen=True)
class SharedTally:
    """Counts for one kind of access to shared memory."""

    requests: int = 0
    bytes: int = 0  # what lanes share, once
    bank_cycles: int = 0  # if all lanes were served together, each bank one word a cycle
    return_cycles: int = 0  # if no two lanes wanted different words of a bank
    cycles: int = 0  # both


@dataclass(frozen=True)
class Counts:
    """Counts for one launch or several. `runtime/counts.h` names the kinds, such as load, store or bulk_load."""

    global_: Mapping[str, GlobalTally] = field(default_factory=dict)
    shared: Mapping[str, SharedTally] = field(default_factory=dict)
    instructions: Mapping[str, int] = field(default_factory=dict)  # of matrix units, by name
    multiply_adds: int = 0  # of these
    cache_read_bytes: int = 0  # sectors that blocks read, once for each block: what passes the L2 cache
    cache_written_bytes: int = 0
    memory_read_bytes: int = 0  # sectors that the launch reads, once
    memory_written_bytes: int = 0
    barriers: int = 0  # that opened, of whole blocks or named
    cluster_barriers: int = 0
    mbarrier_phases: int = 0
    bytes_in_flight: int = 0  # the most of a block that were asked for asynchronously, and not waited for yet
    blocks: int = 0

    @property
    def cache_bytes(self) -> int:
        return self.cache_read_bytes + self.cache_written_bytes

    @property
    def memory_bytes(self) -> int:
        return self.memory_read_bytes + self.memory_written_bytes

    @property
    def shared_cycles(self) -> int:
        return sum(tally.cycles for tally in self.shared.values())

    @property
    def shared_bytes(self) -> int:
        return sum(tally.bytes for tally in self.shared.values())

    def __add__(self, other: "Counts") -> "Counts":
        """Add the counts of two launches that run sequentially."""
        return Counts(
            global_=_added(GlobalTally, self.global_, other.global_),
            shared=_added(SharedTally, self.shared, other.shared),
            instructions=dict(Counter(self.instructions) + Counter(other.instructions)),
            bytes_in_flight=max(self.bytes_in_flight, other.bytes_in_flight),
            **{name: getattr(self, name) + getattr(other, name) for name in _SUMS},
        )


_SUMS = [each.name for each in fields(Counts) if each.default == 0 and each.name != "bytes_in_flight"]


def _added(kind: Any, one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    names = sorted({*one, *other})
    pairs = {name: (one.get(name, kind()), other.get(name, kind())) for name in names}
    return {name: kind(*(a + b for a, b in zip(_values(x), _values(y), strict=True))) for name, (x, y) in pairs.items()}


def _values(tally: Any) -> list[int]:
    return [getattr(tally, each.name) for each in fields(tally)]


def read_counts(report: Mapping[str, Any]) -> Counts:
    """Read the counts that `runtime/counts.h` writes."""
    rest = {name: value for name, value in report.items() if name not in ("global", "shared")}
    return Counts(
        global_={name: GlobalTally(**tally) for name, tally in report["global"].items()},
        shared={name: SharedTally(**tally) for name, tally in report["shared"].items()},
        **rest,
    )
