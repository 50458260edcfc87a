"""From what was counted to cycles, by what is published of a processor with matrix tiles, and by what was measured on one.

A text's pieces belong to phases: inputs are copied, tiles multiplied, outputs stored. A phase takes as long as the busiest of what it keeps
busy. Phases follow each other, but for those that take turns with products within what a processor looks ahead.
"""

import json
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.tiles.counted import Counted

DOT, TILE_LOAD, TILE_STORE = 16.0, 8.0, 16.0  # cycles each, one after the other: Intel's optimisation manual
SECOND_LEVEL = 2.2  # cycles a line from the second-level cache, that products wait for: calibrated by `amx_ks.cpp`, see docs/kernels/amx.md
THIRD_LEVEL = 6.0  # the same, of weights and what a group keeps, where the second level has no room for them
FETCHED = 1.33  # of lines from the second level that nobody waits for: 48 bytes a cycle
GHZ = 3.08  # of the machine on which `amx.cpp` found 6.3 TFLOP/s: two cores, 1024 operations a cycle each
CORES = 2
BYTES_PER_S = 31.7e9  # what that machine copies, read and written
LINE_BYTES = 64
MEMORY = LINE_BYTES / (BYTES_PER_S / CORES / GHZ / 1e9)  # cycles a line
AHEAD = 512  # instructions that a core has under way
SCHEDULER = "llvm-mca-19"  # the first that knows this processor
PHASES = ("copy", "multiply", "store", "else")
BOUNDS = ("dots", "waits", "ports", "vectors", "caches", "memory")


@dataclass
class Phase:
    """What one phase does, of a task."""

    dots: float = 0.0
    tile_loads: float = 0.0
    tile_stores: float = 0.0
    loads: float = 0.0  # of vectors or numbers, that go to memory other than the stack
    stores: float = 0.0
    vector_cycles: float = 0.0  # of all that is not tiles: llvm-mca
    near_lines: float = 0.0  # from the second-level cache
    far_lines: float = 0.0  # of a group's own and of weights, from behind it
    fetched_near_lines: float = 0.0  # from the second level, that are fetched into the first before they are wanted, or stored to
    fetched_far_lines: float = 0.0  # and from behind it
    memory_lines: float = 0.0  # of X and Y: read, fetched, stored past the caches, driven out

    @property
    def bounds(self) -> dict[str, float]:
        """Cycles of each thing that may be the busiest: products; products and the lines that they wait for; ports to the first-level
        cache; vectors; and what lies between caches and memory."""
        dots = DOT * self.dots
        waits = SECOND_LEVEL * self.near_lines + THIRD_LEVEL * self.far_lines
        ports = max(TILE_LOAD * self.tile_loads + self.loads / 2, TILE_STORE * self.tile_stores + self.stores)
        caches = FETCHED * (self.near_lines + self.fetched_near_lines) + THIRD_LEVEL * (self.far_lines + self.fetched_far_lines)
        found = (dots, dots + waits if self.dots else 0.0, ports, self.vector_cycles, caches, MEMORY * self.memory_lines)
        return dict(zip(BOUNDS, found, strict=True))

    @property
    def cycles(self) -> float:
        return max(self.bounds.values())

    @property
    def bound_by(self) -> str:
        """Products themselves, where they wait for less than an eighth of their time."""
        bounds = self.bounds
        found = max(bounds, key=bounds.__getitem__)
        return "dots" if found == "waits" and bounds["waits"] < bounds["dots"] * 9 / 8 else found


@dataclass
class Counts:
    """What a task does. `beside`: phases that take turns with products. `taken`: lines from each level, by phase, array and kind."""

    phases: dict[str, Phase] = field(default_factory=lambda: {name: Phase() for name in PHASES})
    beside: tuple[str, ...] = ()
    taken: dict[tuple[str, str, str], tuple[float, ...]] = field(default_factory=dict)

    @property
    def woven(self) -> Phase:
        """Products, with what takes turns with them: its lines from the caches are not waited for."""
        found = replace(self.phases["multiply"])
        for name in self.beside:
            other = self.phases[name]
            found.tile_loads += other.tile_loads
            found.loads += other.loads
            found.stores += other.stores
            found.vector_cycles += other.vector_cycles
            found.memory_lines += other.memory_lines
            found.fetched_near_lines += other.near_lines + other.fetched_near_lines
            found.fetched_far_lines += other.far_lines + other.fetched_far_lines
        return found

    @property
    def after(self) -> dict[str, Phase]:
        """What follows each other."""
        return {name: self.woven if name == "multiply" else phase for name, phase in self.phases.items() if name not in self.beside}

    @property
    def cycles(self) -> float:
        return sum(phase.cycles for phase in self.after.values())

    def total(self, name: str) -> float:
        return sum(float(getattr(phase, name)) for phase in self.phases.values())


def counts_of(counted: Counted, run: Callable[[int], object], tasks: float) -> Counts:
    """Of a task, where the third run is so many: the two before it warm the caches, and tell the phases."""
    run(0)
    run(1)
    phases = _phases(counted)
    counted.divide([PHASES.index(phases[access.piece]) for access in counted.code.accesses])
    counted.forget()
    run(2)
    found = Counts(beside=_beside(counted, phases), taken=_taken(counted, phases, tasks))
    _add_instructions(found, counted, phases, tasks)
    _add_lines(found, counted, phases, tasks)
    return found


def _add_instructions(found: Counts, counted: Counted, phases: Sequence[str], tasks: float) -> None:
    executions = counted.executions()
    vector = _vector_cycles(counted, executions)
    for number, (piece, times) in enumerate(zip(counted.code.pieces, executions, strict=True)):
        phase, each = found.phases[phases[number]], times / tasks
        phase.dots += each * sum(name.startswith("tdp") for name in piece.tiles)
        phase.tile_loads += each * sum(name.startswith("tileload") for name in piece.tiles)
        phase.tile_stores += each * sum(name.startswith("tilestore") for name in piece.tiles)
        phase.vector_cycles += each * vector.get(number, 0.0)


def _add_lines(found: Counts, counted: Counted, phases: Sequence[str], tasks: float) -> None:
    executions = counted.executions()
    arrays = [counted.names.index(name) for name in ("x", "y")]
    for access, gone, (_, near, memory, out) in zip(counted.code.accesses, counted.regions(), counted.lines(), strict=True):
        phase = found.phases[phases[access.piece]]
        phase.loads += executions[access.piece] / tasks * (access.kind == "load")
        phase.stores += executions[access.piece] / tasks * (access.kind in ("store", "past", "modify"))
        is_own = 2 * sum(gone[each] for each in arrays) < sum(gone)
        phase.memory_lines += (out + (0 if is_own else memory)) / tasks
        far = memory / tasks if is_own else 0.0
        if access.kind in ("fetch_near", "store", "modify", "tile_store"):  # nobody waits for them
            phase.fetched_near_lines += near / tasks
            phase.fetched_far_lines += far
        elif access.kind != "fetch":
            phase.near_lines += near / tasks
            phase.far_lines += far


def _beside(counted: Counted, phases: Sequence[str]) -> tuple[str, ...]:
    """Phases of which a processor has a whole visit under way at a time."""
    done = dict.fromkeys(PHASES, 0)
    for phase, piece, times in zip(phases, counted.code.pieces, counted.executions(), strict=True):
        done[phase] += times * len(piece.lines)
    visits = dict(zip(PHASES, counted.visits(), strict=False))
    return tuple(name for name in ("copy", "store") if 0 < done[name] <= AHEAD * visits[name])


def _taken(counted: Counted, phases: Sequence[str], tasks: float) -> dict[tuple[str, str, str], tuple[float, ...]]:
    found: dict[tuple[str, str, str], tuple[float, ...]] = {}
    for access, gone, lines in zip(counted.code.accesses, counted.regions(), counted.lines(), strict=True):
        array = max(zip(gone, counted.names, strict=False))[1] if sum(gone) else "other"
        key = (phases[access.piece], array, access.kind)
        found[key] = tuple(a + b / tasks for a, b in zip(found.get(key, (0.0,) * len(lines)), lines, strict=True))
    return found


def _phases(counted: Counted) -> list[str]:
    """Of each piece: by the arrays that it goes to; pieces that go to none belong to the one before."""
    votes = [dict.fromkeys(PHASES, 0) for _ in counted.code.pieces]
    executions = counted.executions()
    for access, gone in zip(counted.code.accesses, counted.regions(), strict=True):
        went, mine = dict(zip(counted.names, gone, strict=False)), votes[access.piece]
        if access.kind in ("tile_load", "tile_store", "fetch", "fetch_near"):
            mine["multiply"] += 1000 * sum(gone) + executions[access.piece]
        elif access.kind == "load":
            mine["copy"] += went.get("x", 0) + went.get("between", 0)
            mine["store"] += went.get("sums", 0) + went.get("y", 0)
        else:
            mine["copy"] += went.get("panel", 0)
            mine["store"] += went.get("y", 0) + went.get("between", 0)
    found, before, function = [], "else", ""
    for piece, mine in zip(counted.code.pieces, votes, strict=True):
        if piece.function != function:
            before, function = "else", piece.function
        if any(name.startswith("tdp") for name in piece.tiles):
            before = "multiply"
        elif any(mine.values()):
            before = max(PHASES, key=mine.__getitem__)
        found.append(before)
    return found


def _vector_cycles(counted: Counted, executions: Sequence[int]) -> dict[int, float]:
    """Of each piece that matters, by llvm-mca: what its busiest unit takes. A processor that looks so far ahead hides the rest."""
    weights = {
        number: times * len(piece.lines)
        for number, (piece, times) in enumerate(zip(counted.code.pieces, executions, strict=True))
        if times and piece.lines
    }
    least = sum(weights.values()) / 2000
    text = "".join(
        f"# LLVM-MCA-BEGIN {number}\n" + "\n".join(counted.code.pieces[number].lines) + f"\n# LLVM-MCA-END {number}\n"
        for number, weight in weights.items()
        if weight >= least
    )
    if not shutil.which(SCHEDULER):
        raise FileNotFoundError(f"{SCHEDULER} is not there; apt-get install llvm-19")
    options = ("-mcpu=sapphirerapids", "-json", "-skip-unsupported-instructions=any")
    said = subprocess.run((SCHEDULER, *options), input=text, capture_output=True, text=True, check=True)
    return {int(region["Name"]): region["SummaryView"]["BlockRThroughput"] for region in json.loads(said.stdout)["CodeRegions"]}
