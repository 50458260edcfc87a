"""A store and wisdom of a test's own, a small space to search, and a machine that nobody disturbs."""

from dataclasses import replace

import pytest

from ksgen.families.simt import Simt, SimtConstants
from ksgen.launch.planner import PLANNER
from ksgen.tuning.job import Candidate
from ksgen.tuning.trials import TrialStore
from ksgen.wisdom.store import load_wisdom, save


def space_of(monkeypatch: pytest.MonkeyPatch, *constants: SimtConstants) -> list[Candidate]:
    monkeypatch.setattr(Simt, "space", lambda self, kernel, limits: iter(constants))
    return [Candidate("simt", each) for each in constants]


def without_doubts(device: str, store: TrialStore | None = None) -> None:
    """What searches left becomes what they leave where nothing disturbs them, whoever else uses this machine."""
    own = store or TrialStore()
    for trial in own.trials():
        own.add(replace(trial, note=""))
    if store is None:
        own.close()
    found = load_wisdom(device).entries()
    save(device, [replace(each, measured={name: value for name, value in each.measured.items() if name != "note"}) for each in found])
    PLANNER.forget()
