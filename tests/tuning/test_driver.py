"""A search on a GPU whose candidates hang, lie and fault, are very short, or launch several layers: the stand-in
machine's driver makes them so, through both runtimes."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksgen.emit.render import render
from ksgen.families import FAMILIES, cuda_limits
from ksgen.families.simt.shape import SimtConstants
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from tests.driver import completed

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
# CUDA_ERROR_ILLEGAL_ADDRESS, _LAUNCH_OUT_OF_RESOURCES
FAULTS = {"hangs": "hang", "lies": "wrong", "faults": "700", "refused": "701"}

SEARCH = """
import json
from pathlib import Path
from ksgen.families.simt.family import Simt
from ksgen.measure.roofline import Ceilings
from ksgen.tuning import search
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Job, Runs
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from tests.tuning.test_driver import FATES, KERNEL

search.FIRST = search.FINAL = Runs(0, 0)  # its clock is no clock
LocalEngine._ceilings = lambda self, precision, operand: Ceilings(4e12, 6e13)  # the probes would take it minutes
Simt.space = lambda self, kernel, limits: iter(FATES.values())
engine, store = LocalEngine(preload=["tests.support.few_arrays"], limit_s=8), TrialStore(Path("trials.sqlite"))
try:
    (found,) = Tuner(engine, store, SearchOptions(strategy="exhaustive")).run([Job(KERNEL, 70)], lambda each: None)
finally:
    engine.close()
fates = {name: [(trial.state, trial.reason) for trial in store.trials() if trial.constants == own] for name,
    own in FATES.items()}
print(json.dumps({"fates": fates, "best": repr(found.best.constants), "state": found.best.state}))
"""


def last_of(program: str, runtime: str, **environment: str) -> Any:
    """The last line that a program over the stand-in driver prints."""
    return json.loads(completed(program, runtime, **environment).stdout.splitlines()[-1])


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
def test_a_search_outlives_its_candidates(runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    faults = ",".join(f"{render(KERNEL, FATES[name]).entry}:{fault}" for name, fault in FAULTS.items())
    told = last_of(SEARCH, runtime, KSGEN_DRIVER_FAULTS=faults, KSGEN_WISDOM_DIR=str(tmp_path))
    assert {name: [state for state, _ in trials] for name, trials in told["fates"].items()} == {
        name: [state] for name, state in STATES.items()
    }
    reasons = {name: trials[0][1] for name, trials in told["fates"].items()}
    assert reasons["right"] == ""
    assert "not done after 8 s" in reasons["hangs"]
    assert "relative error" in reasons["lies"]
    assert "illegal memory access" in reasons["faults"].lower()
    assert told["state"] == "measured"
    assert told["best"] not in {repr(own) for name, own in FATES.items() if name != "right"}


SHORT = [replace(RIGHT, min_blocks=blocks) for blocks in range(1, 7)]
SHORT_US = dict(zip(SHORT, (2.12, 2.18, 2.06, 2.24, 2.0, 2.3), strict=True))

SHORT_SEARCH = """
import json
from pathlib import Path
from ksgen.families.simt.family import Simt
from ksgen.measure.roofline import Ceilings
from ksgen.tuning import search
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Job, Runs
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from tests.tuning.test_driver import KERNEL, SHORT

search.FIRST = search.FINAL = Runs(0, 0)
LocalEngine._ceilings = lambda self, precision, operand: Ceilings(4e12, 6e13)
Simt.space = lambda self, kernel, limits: iter(SHORT)
engine, store = LocalEngine(preload=["tests.support.few_arrays"]), TrialStore(Path("trials.sqlite"))
try:
    (found,) = Tuner(engine, store, SearchOptions(strategy="exhaustive", family="simt")).run([Job(KERNEL, 70)],
        lambda each: None)
finally:
    engine.close()
us = [next(trial.median_us for trial in store.trials() if trial.constants == own) for own in SHORT]
print(json.dumps({"us": us, "best": SHORT.index(found.best.constants)}))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
def test_a_search_tells_kernels_of_two_microseconds_apart_by_three_hundredths(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host takes 6 to 8 us for each launch there, and events tell half a microsecond."""
    monkeypatch.chdir(tmp_path)
    durations = ",".join(f"{render(KERNEL, constants).entry}:{us}" for constants, us in SHORT_US.items())
    durations += ",ks_1x24x9x2_*:2.5"  # the default, which each search looks at
    told = last_of(SHORT_SEARCH, runtime, KSGEN_DRIVER_DURATIONS=durations, KSGEN_WISDOM_DIR=str(tmp_path))
    assert told["us"] == pytest.approx(list(SHORT_US.values()), rel=0.01)
    assert SHORT[told["best"]] == min(SHORT_US, key=SHORT_US.__getitem__)


GROUP = KernelSpec(
    ((Pattern(2, 24, 16, 1),), (Pattern(2, 9, 16, 1), Pattern(1, 4, 18, 1))), "float16", "bsf", Epilogue()
)
OF_GROUP = [each for each in FAMILIES["gemv"].space(GROUP, cuda_limits("sm_90a")) if each.tile_batch == 2][-3:]
GROUP_US = (1.0, 2.0, 3.0)  # the first of them lies

GROUP_SEARCH = """
import json
from pathlib import Path
from ksgen.devices import find_device
from ksgen.families.gemv.family import Gemv
from ksgen.launch.planner import PLANNER
from ksgen.measure.roofline import Ceilings
from ksgen.tuning import search
from ksgen.tuning.engine import LocalEngine
from ksgen.tuning.job import Job, Runs
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner
from tests.tuning.test_driver import GROUP, OF_GROUP

search.FIRST = search.FINAL = Runs(0, 0)
LocalEngine._ceilings = lambda self, precision, operand: Ceilings(4e12, 6e13)
Gemv.space = lambda self, kernel, limits: iter(OF_GROUP)
engine, store = LocalEngine(preload=["tests.support.few_arrays"]), TrialStore(Path("trials.sqlite"))
try:
    (found,) = Tuner(engine, store, SearchOptions(strategy="exhaustive", family="gemv")).run([Job(GROUP, 2)],
        lambda each: None)
finally:
    engine.close()
states = {OF_GROUP.index(each.constants): each.state for each in store.trials() if each.constants in OF_GROUP}
chosen = PLANNER.choice(find_device(), GROUP, 2)
print(json.dumps({"states": states, "us": found.best.median_us, "chosen": [chosen.family,
    OF_GROUP.index(chosen.constants), chosen.why]}))
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
def test_a_launch_of_several_layers_is_searched_and_what_wins_is_planned(
    runtime: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    entries = [render(GROUP, constants, family="gemv").entry for constants in OF_GROUP]
    # the default
    durations = ",".join([*(f"{entry}:{us}" for entry, us in zip(entries, GROUP_US, strict=True)), "ks_2x24x16x1_*:4"])
    variables = {"KSGEN_DRIVER_FAULTS": f"{entries[0]}:wrong", "KSGEN_DRIVER_DURATIONS": durations}
    told = last_of(GROUP_SEARCH, runtime, **variables, KSGEN_WISDOM_DIR=str(tmp_path))
    assert told["states"] == {"0": "wrong", "1": "measured", "2": "measured"}
    assert told["us"] == pytest.approx(2.0, rel=0.01)
    assert told["chosen"][:2] == ["gemv", 1]
    assert re.fullmatch(r"wisdom, measured at batch 2(; \d+\.\d\d times as fast as the default)?", told["chosen"][2])
