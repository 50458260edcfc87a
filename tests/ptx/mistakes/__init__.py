"""The cases with one mistake each, by subject, and how the emulator tells."""

from tests.ptx.mistakes.barriers import BARRIERS
from tests.ptx.mistakes.clusters import CLUSTERS
from tests.ptx.mistakes.collectives import COLLECTIVES
from tests.ptx.mistakes.fences import FENCES
from tests.ptx.mistakes.grids import GRIDS
from tests.ptx.mistakes.memory import MEMORY
from tests.ptx.mistakes.mistake import WRONG, Mistake
from tests.ptx.mistakes.registers import REGISTERS
from tests.ptx.mistakes.waits import WAITS

MISTAKES = [*WAITS, *FENCES, *REGISTERS, *BARRIERS, *COLLECTIVES, *MEMORY, *CLUSTERS, *GRIDS]

__all__ = ["MISTAKES", "WRONG", "Mistake"]
