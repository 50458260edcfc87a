"""Trials on the stand-in GPU: candidates that hang, lie and fault cost themselves alone, and a right one wins."""

from pathlib import Path

import pytest

from ksgen.emit.render import render
from tests.tuning.test_driver import FATES, FAULTS, KERNEL, STATES, last_of

TRIAL = """
import json
from ksgen.calibration.trials import Calibration
from ksgen.families.simt.family import Simt
from ksgen.measure.roofline import Ceilings
from ksgen.tuning import search, strategies
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Job, Runs
from ksgen.tuning.pool import Pool
from ksgen.tuning.trials import TrialStore
from tests.tuning.test_driver import FATES, KERNEL

search.FIRST = search.FINAL = Runs(0, 0)  # its clock is no clock
LocalEngine._ceilings = lambda self, precision, operand: Ceilings(4e12, 6e13)  # the probes would take it minutes
Simt.space = lambda self, kernel, limits: iter(FATES.values())
Simt.defaults = lambda self, kernel, limits, batch=None: list(FATES.values())
strategies.MOST_TRIED = 6
Pool.are_near = lambda *given: False  # the candidates differ in one constant each
engine, store = LocalEngine(preload=["tests.support.few_arrays"], limit_s=8), TrialStore()
try:
    (found,) = Calibration(engine, store).run([Job(KERNEL, 70)])
finally:
    engine.close()
states = {name: [trial.state for trial in store.trials() if trial.constants == own] for name, own in FATES.items()}
print(json.dumps({"states": states, "entry": found.entry.as_json(), "is_right": found.entry.constants in [
    own for name, own in FATES.items() if name == "right"] or found.entry.constants not in FATES.values()}))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["driver", "pycuda"])
def test_a_trial_outlives_its_candidates_and_takes_a_right_one(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    faults = ",".join(f"{render(KERNEL, FATES[name]).entry}:{fault}" for name, fault in FAULTS.items())
    folders = {name: str(tmp_path) for name in ("KSGEN_WISDOM_DIR", "KSGEN_CACHE_DIR")}
    found = last_of(TRIAL, runtime, KSGEN_DRIVER_FAULTS=faults, **folders)
    assert found["states"] == {name: [state] for name, state in STATES.items()}
    assert found["is_right"]
    assert found["entry"]["measured"]["trial"] is True
