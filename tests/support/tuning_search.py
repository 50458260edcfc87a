"""A store and wisdom of a test's own, and a small space to search."""

import pytest

from ksgen.families.simt import Simt, SimtConstants
from ksgen.tuning.job import Candidate


def space_of(monkeypatch: pytest.MonkeyPatch, *constants: SimtConstants) -> list[Candidate]:
    monkeypatch.setattr(Simt, "space", lambda self, kernel, limits: iter(constants))
    return [Candidate("simt", each) for each in constants]
