"""Tests of the families and constants that a search may try, and of what it learns from other jobs."""

from dataclasses import replace

from ksgen.families import Limits, cuda_limits
from ksgen.families.simt.shape import SimtConstants
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Job
from ksgen.tuning.model import Machine
from ksgen.tuning.pool import supported_families
from ksgen.tuning.report import table_of
from ksgen.tuning.trials import Trial
from tests.support.tuning_pools import pool_of

H200 = cuda_limits("sm_90a")
PROCESSOR = Limits(
    2**16, registers=0, is_cpu=True, vector_bytes=64, tiles=("bf16",), multiprocessors=2, async_copies=False
)
CPU = Machine(
    "a processor", Limits(256 * 1024, 8192, 0, is_cpu=True, async_copies=False), 2, {"simt": Ceilings(1e10, 9e10)}
)
KERNEL = KernelSpec(Pattern(1, 192, 48, 2))
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")


def test_families_are_those_of_the_job_that_take_its_batch() -> None:
    kernel = KernelSpec(Pattern(1, 192, 48, 2), "float16", "bsl")
    assert supported_families(Job(kernel, 25088), H200) == ["wgmma", "mma", "simt"]
    assert supported_families(Job(kernel, 25087), H200) == ["mma", "simt"]  # rows that no tensor map describes
    assert supported_families(Job(replace(kernel, job="gradient"), 25088), H200) == ["gradient"]


def test_a_processors_families_are_those_made_for_it() -> None:
    kernel = KernelSpec(Pattern(1, 192, 48, 2), "bfloat16")
    for batch in (1, 512):
        assert supported_families(Job(kernel, batch), PROCESSOR) == ["amx", "vector"]
    assert supported_families(Job(replace(kernel, precision="float32"), 512), PROCESSOR) == ["vector"]
    assert supported_families(Job(replace(kernel, job="gradient"), 512), PROCESSOR) == ["cpu_gradient"]


def test_neighbours_differ_in_one_constant() -> None:
    pool = pool_of(KERNEL, 392, CPU)
    mine = vars(pool.candidates[5].constants)
    near = pool.neighbours(5)
    assert near
    for index, other in enumerate(pool.candidates):
        assert (sum(vars(other.constants)[name] != value for name, value in mine.items()) == 1) == (index in near)


def test_only_trials_of_other_jobs_that_were_timed_are_learned_from() -> None:
    other = replace(KERNEL, layout="bsl")
    constants = replace(CONSTANTS, tile_d=1)
    trial = Trial(other, 392, "d", "simt", constants, "t", "measured", median_us=8.0, predicted_us=4.0)
    useless = [
        replace(trial, kernel=KERNEL),
        replace(trial, median_us=None, state="wrong"),
        replace(trial, family="mma"),
    ]
    pool = pool_of(KERNEL, 392, CPU, (), [*useless, trial])
    assert pool.others.tolist() == [3.0]
    assert len(pool.points.jobs) == len(pool) + 1
    assert pool.points.jobs[-1] != pool.points.jobs[0]


def test_a_row_has_what_was_measured_of_a_candidate_and_nothing_where_nothing_was() -> None:
    measured = Trial(
        KERNEL, 392, "d", "simt", CONSTANTS, "t", "measured",
        median_us=8.0, spread=0.021, runs=20, floor_us=4.0, predicted_us=7.5, registers=64, shared_bytes=2048,
    )  # fmt: skip
    pruned = Trial(KERNEL, 392, "d", "simt", replace(CONSTANTS, stages=2), "t", "pruned", "it spills registers")
    table = table_of([pruned, measured], measured)
    assert table.titles == (
        "#",
        "µs",
        "spread",
        "blocks",
        "of floor",
        "predicted µs",
        "registers",
        "shared bytes",
        "stages",
        "fate",
    )
    assert [(row.is_winner, row.cells[:-1]) for row in table.rows] == [
        (True, ("2", "8", "2.1%", "20", "50%", "7.5", "64", "2048", "3")),
        (False, ("1", "", "", "", "", "", "", "", "2")),
    ]
    assert table.rows[1].cells[-1] == "pruned: it spills registers"
