"""Tools for tests of searches: a private cache, store and wisdom, a small space, an idle machine, one with invented
times.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from ksgen import __version__
from ksgen.build.request import Binary, Resources
from ksgen.emit.render import render, template_digest
from ksgen.emit.templates import FOLDER
from ksgen.families import FAMILIES, family_named
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants
from ksgen.launch.planner import PLANNER
from ksgen.measure.roofline import Ceilings
from ksgen.measure.trust import LEAST_BLOCKS
from ksgen.paths import cache_dir
from ksgen.spec import KernelSpec
from ksgen.tuning import search
from ksgen.tuning.engine import Engine, Entries
from ksgen.tuning.job import Candidate, Facts, Job, Outcome, Runs
from ksgen.tuning.model import Machine
from ksgen.tuning.trials import TrialStore
from ksgen.wisdom import load_wisdom, save
from tests.support.fake_gpu import FakeGpu


def space_of(monkeypatch: pytest.MonkeyPatch, *constants: SimtConstants) -> list[Candidate]:
    monkeypatch.setattr(Simt, "space", lambda self, kernel, limits: iter(constants))
    return [Candidate("simt", each) for each in constants]


def some_of_space(job: Job, machine: Machine, only: str | None = None) -> list[Candidate]:
    """Candidates in place of `list_space`: predicting the times of all takes a second."""
    return [
        Candidate(name, constants)
        for name in ([family_named(only).name] if only else machine.ceilings)
        for constants in islice(FAMILIES[name].space(job.kernel, machine.limits), 20)
    ]


def time_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    """One short block per candidate and round: what is tested is no time."""
    monkeypatch.setattr(search, "FIRST", Runs(0.0, 0.001))
    monkeypatch.setattr(search, "FINAL", Runs(0.0, 0.002))  # told from the first by its length


def own_cache(folder: Path) -> dict[str, str]:
    """Variables of a user with a cache in the folder, for whom nothing is compiled that tests compiled before: own
    are its trials.
    """
    cache = folder / "cache"
    (compiled := cache_dir() / FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    cache.mkdir(mode=0o700)
    (cache / FOLDER).symlink_to(compiled)
    return {"KSGEN_CACHE_DIR": str(cache), "KSGEN_CACHE_PATH": str(cache_dir())}


def without_notes(device: str, store: TrialStore | None = None) -> None:
    """Remove notes of disturbance from trials and wisdom, as if this machine had been idle."""
    own = store or TrialStore()
    for trial in own.trials():
        own.add(replace(trial, note=""))
    if store is None:
        own.close()
    found = load_wisdom(device).entries()
    save(
        device,
        [
            replace(each, measured={name: value for name, value in each.measured.items() if name != "note"})
            for each in found
        ],
    )
    PLANNER.forget()


class TimedEngine(Engine):
    """A GPU's: candidates are rendered, and take as long as `time_of` says, in microseconds."""

    def __init__(self, gpu: FakeGpu, time_of: Callable[[KernelSpec, Candidate], float], compilers: int = 1) -> None:
        digests = tuple(map(template_digest, FAMILIES))
        self.facts = Facts(
            gpu.name, gpu.target, gpu.dialect, gpu.kind, gpu.driver_version, gpu.limits, __version__, digests
        )
        self.time_of = time_of
        super().__init__(compilers, devices=1)

    def _compile(self, kernel: KernelSpec, candidate: Candidate) -> Binary:
        source = render(kernel, candidate.constants, family=candidate.family)
        return Binary(source.text.encode(), source.entry, self.facts.target, Resources())

    def _measure(self, job: Job, entries: Entries, runs: Runs) -> list[Outcome]:
        return [
            Outcome("measured", "", (self.time_of(job.kernel, candidate),) * LEAST_BLOCKS) for candidate, _ in entries
        ]

    def _ceilings(self, *_: Any) -> Ceilings:
        return Ceilings(4e12, 6e13)
