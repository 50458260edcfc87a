"""The benchmarks of `make gpu-check`: each a command with a time of its own, what is most telling first, results in one
folder.

What does not fit into the time is left out, and the page says so; the same command goes on from there.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from time import monotonic
from typing import Any

from ksgen.bench import tables
from ksgen.bench.rows import read_rows
from ksgen.errors import KsgenError
from tests import gpu_children

PATTERNS = 60
_QUICK = ("--most-seconds", "0.08")
_EXPERTS = ("--contenders", "ksgen,bmm,strided,three_passes,densified,rewriting")
_LEAST_SECONDS = 5  # with less a stage is left out
_GRACE_SECONDS = 15  # that a command may take to stop by itself


@dataclass(frozen=True)
class Stage:
    """One command and the most seconds it may take. A command with its own time limit receives that number."""

    name: str
    arguments: tuple[str, ...]
    seconds: float
    takes_limit: bool = False


@dataclass(frozen=True)
class Outcome:
    stage: Stage
    verdict: str = ""  # empty where it did what it should
    is_failure: bool = False


def stages(folder: Path) -> tuple[Stage, ...]:
    log = ("-o", str(folder / "paper.jsonl"))
    subset = ("bench", "paper", "--subset", str(PATTERNS))
    return (
        Stage("doctor", ("doctor",), 10),
        Stage("the stratified 60", (*subset, *_EXPERTS, *_QUICK, "--precision", "float32,float16", *log), 165,
            takes_limit=True),
        *(
            Stage(model, ("bench", "model", model, "--precision", "float32,float16", "--backend", "ksgen,bmm,strided",
                "--repeats", "10",
                          "-o", str(folder / f"{model}.json")), 25)
            for model in ("vit-s16", "gpt2-medium")
        ),
        Stage("all contenders", ("bench", "paper", "--subset", "4", *_QUICK, "--precision", "float32,float16", *log),
            30, takes_limit=True),
        Stage("more precisions", (*subset, *_EXPERTS, *_QUICK, "--precision", "tf32,bfloat16", *log), 20,
            takes_limit=True),
        Stage("report", ("bench", "report", str(folder / "paper.jsonl"), "--markdown", str(folder / "paper.md")), 20),
    )  # fmt: skip


def run(folder: Path, end: float) -> Iterator[Outcome]:
    """Every stage, each within what is left until `end`."""
    if find_spec("torch") is None:
        yield Outcome(Stage("benchmarks", (), 0), "not run: they need PyTorch: pip install -e '.[bench]'")
        return
    for stage in stages(folder):
        left = min(stage.seconds, end - monotonic())
        yield _run(stage, folder, left) if left > _LEAST_SECONDS else Outcome(stage, "not run: the time was up")


def _run(stage: Stage, folder: Path, seconds: float) -> Outcome:
    command = [sys.executable, "-m", "ksgen", *stage.arguments]
    if stage.takes_limit:
        command += ["--time-limit", f"{seconds:.0f}s"]
    log = folder / f"{stage.name.replace(' ', '-')}.txt"
    status = gpu_children.run(command, seconds + _GRACE_SECONDS, log)
    if status is None:
        return Outcome(stage, f"stopped after {seconds + _GRACE_SECONDS:.0f} s; see {log}")
    return Outcome(stage, f"failed; see {log}", is_failure=True) if status else Outcome(stage)


def page(folder: Path, outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What was measured, in lines; the files hold the rest."""
    yield from (f"{each.stage.name}: {each.verdict}" for each in outcomes if each.verdict)
    if not (folder / "paper.jsonl").exists():
        return
    try:
        rows = read_rows(folder / "paper.jsonl")
    except KsgenError as error:
        yield f"benchmark: {error}"
    else:
        measured = len({row.pattern for row in rows if row.counts})
        yield (
            f"benchmark: {measured} patterns, {len(rows)} rows, {rows[-1].date}, commit "
            f"{rows[-1].commit[:12] or 'unknown'}"
        )
        yield from _lines(tables.overview(rows))
        yield from _lines(tables.errors(rows))
    for path in sorted(folder.glob("*.json")):
        yield from _model(path)


def _model(path: Path) -> Iterator[str]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        found = [
            (row["precision"], row["backend"], row["ratio"]["median"])
            for row in content["rows"]
            if row["module"] == "whole"
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield f"{path}: cannot be read ({error})"
        return
    yield f"{content['model']}, whole, time over the dense model's"
    yield from (f"  {precision:9} {backend:8} {ratio:.2f}" for precision, backend, ratio in found)


def _lines(table: tables.ResultTable) -> Iterator[str]:
    """A table in plain characters."""
    widths = [max(map(len, column)) for column in zip(table.columns, *table.rows, strict=True)]
    yield table.title
    for row in (table.columns, *table.rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
