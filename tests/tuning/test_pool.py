"""Pools: the order in which candidates are looked at."""

from dataclasses import replace

from ksgen.families import FAMILIES, cuda_limits
from ksgen.families.simt.shape import SimtConstants
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Candidate
from ksgen.tuning.model import Machine
from tests.support.tuning_pools import pool_of

H200 = cuda_limits("sm_90a")
GPU = Machine("sm_90a", H200, 132, {"simt": Ceilings(4.3e12, 60e12), "mma": Ceilings(4.3e12, 790e12)})
KERNEL = KernelSpec(Pattern(1, 192, 48, 2))
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")
SIMT = FAMILIES["simt"]


def test_a_pool_begins_with_the_guesses_and_goes_on_by_predicted_time() -> None:
    kernel = replace(KERNEL, precision="float16")
    guess, misguided = (
        Candidate("simt", SIMT.default(kernel, H200)),
        Candidate("simt", replace(CONSTANTS, thread_batch=3)),
    )
    pool = pool_of(kernel, 25088, GPU, [guess, misguided, guess])
    assert pool.candidates[0] == guess
    assert pool.guesses == 1
    assert len(set(pool.candidates)) == len(pool)
    assert list(pool.predicted_us[1:]) == sorted(pool.predicted_us[1:])
    assert {candidate.family for candidate in pool.candidates} == {"mma", "simt"}
