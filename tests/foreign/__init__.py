"""Public CUDA kernels, from a folder that the caller names, run in the emulator: what is right on GPUs has to be right
there.

A `Case` states which pieces of which files make a source, what changes in them, and how the result is launched. It
holds no line of theirs: a change is a pattern and its replacement. A change with `refused` follows a rule that the
kernel breaks: without the change, the emulator has to refuse the kernel in these words. A damage is a mistake planted
in the kernel. The emulator has to refuse it, or the result has to be wrong.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator import SimtError, TensorMap, run_cuda

Array = np.ndarray[Any, Any]

NO_MEMORY, UNKNOWN = 'does not list "memory"', "no instruction that is known here"  # refusals
STAND_INS = Path(__file__).parent / "stand_ins.h"
_FLAGS = re.DOTALL | re.MULTILINE
_INCLUDES = re.compile(r"^[ \t]*#[ \t]*(?:include|pragma once)\b.*$", re.MULTILINE)


class ForeignError(Exception):
    """A repository is not what a case expects."""


@dataclass(frozen=True)
class Piece:
    """Every match of `keep` in a file, and the namespace that they stand in."""

    path: str  # in the repository
    keep: str = ".*"
    namespace: str = ""
    repository: str = ""  # if it is not the case's

    def read(self, repository: Path) -> str:
        text = (repository / self.path).read_text(encoding="utf-8")
        found = [match[0] for match in re.finditer(self.keep, text, _FLAGS) if match[0]]
        if not found:
            raise ForeignError(f"{self.path} has no {self.keep!r}; another version of the repository?")
        joined = _INCLUDES.sub("", "\n".join(found))
        return f"namespace {self.namespace} {{\n{joined}\n}}" if self.namespace else joined


@dataclass(frozen=True)
class Change:
    """A pattern that has to be there, and what takes its place.

    `refused`: what the emulator says without the change.
    """

    pattern: str
    replacement: str
    refused: str = ""

    def apply(self, text: str) -> str:
        changed, count = re.subn(self.pattern, self.replacement, text, flags=_FLAGS)
        if count == 0:
            raise ForeignError(f"nothing matches {self.pattern!r}; another version of the repository?")
        return changed


@dataclass(frozen=True)
class Operands:
    """Arguments of a launch, and what has to come out: `result` reads it from the arrays that the kernel wrote."""

    args: Sequence[Any]
    result: Callable[[], Array]
    exact: Array  # in float64

    def error(self) -> float:
        """The largest error over the root mean square of the exact result."""
        found = self.result().astype(np.float64)
        largest = np.abs(found - self.exact).max() / np.sqrt(np.square(self.exact).mean())
        return float(largest) if np.isfinite(largest) else np.inf


@dataclass(frozen=True)
class Case:
    """A foreign kernel, its changes, one launch, and mistakes that have to be seen.

    `before` and `after` are source of our own.
    """

    name: str
    repository: str
    pieces: Sequence[Piece]
    entry: str
    grid: int | tuple[int, ...]
    block: int | tuple[int, ...]
    operands: Callable[[], Operands]
    tolerance: float
    damages: Sequence[tuple[str, str]]
    changes: Sequence[Change] = ()
    before: str = ""
    after: str = ""
    shared_bytes: int = 0
    early: bool = False
    target: str = "sm_90a"

    @property
    def repositories(self) -> set[str]:
        return {self.repository, *(piece.repository for piece in self.pieces if piece.repository)}

    def source(self, folder: Path, without: Change | None = None, damage: tuple[str, str] | None = None) -> str:
        """The source of a launch, without one of the changes, or damaged."""
        text = "\n".join(
            [
                self.before,
                *(piece.read(folder / (piece.repository or self.repository)) for piece in self.pieces),
                self.after,
            ]
        )
        for change in self.changes:
            if change is not without:
                text = change.apply(text)
        if damage is not None:
            text = Change(*damage).apply(text)
        return f"{STAND_INS.read_text(encoding='utf-8')}\n{text}"

    def launch(self, source: str, sanitize: str) -> float:
        """The error of one launch."""
        operands = self.operands()
        launched = (source, self.entry, self.grid, self.block, self.shared_bytes, operands.args, sanitize)
        run_cuda(*launched, early=self.early, target=self.target)
        return operands.error()


@dataclass(frozen=True)
class Verdict:
    """How a case came out. `complaints` is empty if it is as the case says."""

    case: Case
    error: float = np.nan
    refusals: int = 0
    damages: int = 0
    complaints: list[str] = field(default_factory=list)


def judge(case: Case, folder: Path, builds: Sequence[str] = ("none", "race")) -> Verdict:
    """Run a case in each build, then without each change for a rule, then with each damage."""
    complaints: list[str] = []

    def shown(outcome: float | SimtError) -> str:
        return str(outcome).partition("\n")[0] if isinstance(outcome, SimtError) else f"error {outcome:.1e}"

    def attempt(source: str, sanitize: str) -> float | SimtError:
        try:
            return case.launch(source, sanitize)
        except SimtError as caught:
            return caught

    error = 0.0
    for sanitize in builds:
        found = attempt(case.source(folder), sanitize)
        if isinstance(found, SimtError) or found > case.tolerance:
            complaints.append(f"{sanitize} build: {shown(found)}")
        else:
            error = max(error, found)
    rules = [change for change in case.changes if change.refused]
    for change in rules:
        outcomes = [attempt(case.source(folder, without=change), sanitize) for sanitize in builds]
        if not any(isinstance(each, SimtError) and re.search(change.refused, str(each)) for each in outcomes):
            complaints.append(
                f"without {change.pattern!r}: {', '.join(map(shown, outcomes))}; expected {change.refused!r}"
            )
    for damage in case.damages:
        outcomes = [attempt(case.source(folder, damage=damage), sanitize) for sanitize in builds]
        if any(isinstance(each, SimtError) and each.kind == "compile" for each in outcomes):
            complaints.append(f"with {damage}: does not compile: {shown(outcomes[0])}")
        elif not any(isinstance(each, SimtError) or each > case.tolerance for each in outcomes):
            complaints.append(f"with {damage}: not seen, {', '.join(map(shown, outcomes))}")
    return Verdict(case, error, len(rules), len(case.damages), complaints)


def tensor_map(array: Array, box: tuple[int, int]) -> TensorMap:
    """The map of a row-major matrix, of which boxes are loaded in swizzles of 128 bytes."""
    rows, columns = array.shape
    return TensorMap(array, (columns, rows), (columns * array.itemsize,), box, swizzle=128)
