"""A search on a GPU whose candidates hang, lie and fault: the stand-in machine's driver makes them do so, through both runtimes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.emit.render import render
from ksgen.families.simt import SimtConstants
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.driver import NotHereError, run

KERNEL = KernelSpec(Pattern(1, 24, 9, 2))
RIGHT = SimtConstants(32, 16, 8, 1, 4, 4, 2, 1, "registers")
FATES = {  # of candidates, by what tells them apart
    "right": RIGHT,
    "hangs": replace(RIGHT, tile_in=4),
    "lies": replace(RIGHT, tile_in=2),
    "faults": replace(RIGHT, min_blocks=2),
    "refused": replace(RIGHT, min_blocks=3),
}
STATES = {"right": "measured", "hangs": "hung", "lies": "wrong", "faults": "failed", "refused": "failed"}
FAULTS = {"hangs": "hang", "lies": "wrong", "faults": "700", "refused": "701"}  # CUDA_ERROR_ILLEGAL_ADDRESS, _LAUNCH_OUT_OF_RESOURCES

SEARCH = """
import json
from pathlib import Path
from ksgen.families.simt import Simt
from ksgen.measure.roofline import Ceilings
from ksgen.tuning import search
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Job, Runs
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import Options, Tuner
from tests.tuning.test_driver import FATES, KERNEL

search.FIRST, search.FINAL_SECONDS = Runs(least=3, most=3, seconds=0), 0  # its clock is no clock
LocalEngine._ceilings = lambda self, precision, operand: Ceilings(4e12, 6e13)  # the probes would take it minutes
Simt.space = lambda self, kernel, limits: iter(FATES.values())
engine, store = LocalEngine(preload=["tests.support.few_arrays"], limit_s=5), TrialStore(Path("trials.sqlite"))
try:
    (found,) = Tuner(engine, store, Options(strategy="exhaustive")).run([Job(KERNEL, 70)], lambda each: None)
finally:
    engine.close()
fates = {name: [(trial.state, trial.reason) for trial in store.trials() if trial.constants == own] for name, own in FATES.items()}
print(json.dumps({"fates": fates, "best": repr(found.best.constants), "state": found.best.state}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
def test_a_search_outlives_its_candidates(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    faults = ",".join(f"{render(KERNEL, FATES[name]).entry}:{fault}" for name, fault in FAULTS.items())
    try:
        done = run(SEARCH, runtime, KSGEN_DRIVER_FAULTS=faults, KSGEN_WISDOM_DIR=str(tmp_path))
    except NotHereError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert {name: [state for state, _ in trials] for name, trials in told["fates"].items()} == {
        name: [state] for name, state in STATES.items()
    }
    reasons = {name: trials[0][1] for name, trials in told["fates"].items()}
    assert reasons["right"] == ""
    assert "not done after 5 s" in reasons["hangs"]
    assert "relative error" in reasons["lies"]
    assert "illegal memory access" in reasons["faults"].lower()
    assert told["state"] == "measured"
    assert told["best"] not in {repr(own) for name, own in FATES.items() if name != "right"}
