"""What a search is made of, as numbers alone: the cost model, occupancy, what pools hold, and how strategies choose."""

import sys
from dataclasses import replace
from math import inf

import numpy as np
import pytest

from ksgen.build.request import Resources
from ksgen.families import FAMILIES, Limits, cuda_limits
from ksgen.families.mma import MmaConstants
from ksgen.families.simt import Simt, SimtConstants
from ksgen.families.wgmma.permuted import with_blocks_apart
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import clocks, strategies
from ksgen.tuning.clocks import Clocks
from ksgen.tuning.job import Candidate, Job, Outcome
from ksgen.tuning.model import LAUNCH_US, Machine, misfit, predict_us, resident_blocks
from ksgen.tuning.pool import Pool, list_space, make_pool, served_families
from ksgen.tuning.strategies import STRATEGIES, Strategy
from ksgen.tuning.surrogate import Points, expect, features
from ksgen.tuning.trials import Trial
from tests.support.fake_gpu import FakeGpu

H200 = cuda_limits("sm_90a")
GPU = Machine("sm_90a", H200, 132, {"simt": Ceilings(4.3e12, 60e12), "mma": Ceilings(4.3e12, 790e12)})
CPU = Machine("a processor", Limits(256 * 1024, 8192, 0, is_cpu=True, async_copies=False), 2, {"simt": Ceilings(1e10, 9e10)})
KERNEL = KernelSpec(Pattern(1, 192, 48, 2))
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")
SIMT = FAMILIES["simt"]
SIMT_ONLY = replace(GPU, ceilings={"simt": GPU.ceilings["simt"]})


def pool_of(kernel: KernelSpec, batch: int, machine: Machine, *rest: object) -> Pool:
    job = Job(kernel, batch)
    return make_pool(job, machine, list_space(job, machine), *rest)


# ---- the cost model


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("sm_90a", 256, 0, 0, 8),  # 2048 threads
        ("sm_86", 256, 0, 0, 6),  # 1536
        ("sm_90a", 32, 0, 0, 32),  # never more blocks
        ("sm_86", 32, 0, 0, 16),
        ("sm_90a", 256, 128, 0, 2),
        ("sm_90a", 256, 129, 0, 1),  # registers are given out in units of eight a thread
        ("sm_90a", 1024, 65, 0, 0),
        ("sm_90a", 128, 32, 113 * 1024, 2),
        ("sm_90a", 128, 32, 114 * 1024, 1),
        ("sm_90a", 128, 32, 228 * 1024, 0),
    ],
)
def test_blocks_that_share_a_multiprocessor(target: str, threads: int, registers: int, shared_bytes: int, blocks: int) -> None:
    assert resident_blocks(target, cuda_limits(target) if target == "sm_86" else H200, threads, registers, shared_bytes) == blocks


def test_a_prediction_is_never_below_the_floor_and_grows_with_the_batch() -> None:
    for machine, name in ((GPU, "simt"), (CPU, "simt")):
        family, constants = FAMILIES[name], FAMILIES[name].default(KERNEL, machine.limits)
        times = [predict_us(machine, family, KERNEL, constants, batch) for batch in (1000, 25088, 100_000)]
        assert times == sorted(times)
        assert times[1] >= machine.ceilings[name].floor_s(KERNEL, 25088) * 1e6


def test_plain_multiply_adds_are_no_faster_for_a_precision_of_tensor_cores() -> None:
    plain, split = (replace(KERNEL, precision=name) for name in ("float32", "tf32x3"))
    assert predict_us(GPU, SIMT, split, CONSTANTS, 25088) == predict_us(GPU, SIMT, plain, CONSTANTS, 25088)
    mma, constants = FAMILIES["mma"], FAMILIES["mma"].default(split, H200)
    once, thrice = (replace(GPU, ceilings={"mma": Ceilings(1e15, 1e12, products)}) for products in (1, 3))
    assert predict_us(once, mma, split, constants, 25088) > 2.9 * predict_us(thrice, mma, split, constants, 25088)


def test_what_is_permuted_takes_as_long_as_its_product_and_the_copies_around_it() -> None:
    permuted, shared = FAMILIES["wgmma_permuted"], FAMILIES["wgmma_shared"]
    machine = replace(GPU, ceilings=dict.fromkeys((permuted.name, shared.name), Ceilings(4e12, 790e12)))
    kernel = KernelSpec(Pattern(1, 256, 256, 16), "float16")
    constants = permuted.default(kernel, H200)
    whole, product = (
        predict_us(machine, family, each, constants, 25088) for family, each in ((permuted, kernel), (shared, with_blocks_apart(kernel)))
    )
    copied = 2 * 2 * 25088 * (kernel.pattern.in_features + kernel.pattern.out_features)  # read and written
    assert whole == pytest.approx(product + copied / 4e6 + 2 * LAUNCH_US)


def test_a_candidate_of_which_no_block_fits_is_never_proposed() -> None:
    greedy = replace(CONSTANTS, tile_batch=256, tile_out=128, tile_in=32, stages=4)
    assert predict_us(GPU, SIMT, KERNEL, greedy, 1000) == inf
    pool = pool_of(KERNEL, 1000, SIMT_ONLY, [Candidate("simt", greedy)])
    assert Candidate("simt", greedy) not in pool.candidates


def test_padding_and_half_empty_waves_cost() -> None:
    full, ragged = KernelSpec(Pattern(1, 64, 512, 1), layout="bsl"), KernelSpec(Pattern(1, 65, 512, 1), layout="bsl")
    constants = SimtConstants(128, 64, 8, 1, 8, 8, 3, 1, "async")
    whole = 4 * 132 * 128
    assert predict_us(GPU, SIMT, ragged, constants, whole) > 1.8 * predict_us(GPU, SIMT, full, constants, whole)
    one_wave, one_block_more = (predict_us(GPU, SIMT, full, constants, 128 * blocks) for blocks in (132, 133))
    assert one_block_more > 1.5 * one_wave


def test_more_stages_on_their_way_cost_less_waiting() -> None:
    mma, kernel = FAMILIES["mma"], KernelSpec(Pattern(1, 48, 1024, 4), "float16")
    machine = replace(GPU, ceilings={"mma": Ceilings(4e15, 8e17)})  # nothing else takes time
    two, three = (MmaConstants(64, 48, 16, 4, 2, 1, stages, 0, 1) for stages in (2, 3))
    times = [predict_us(machine, mma, kernel, constants, 25088) - LAUNCH_US for constants in (two, three)]
    assert times[0] > 1.5 * times[1]


def test_what_spills_or_fits_nowhere_is_not_measured() -> None:
    assert misfit(GPU, SIMT, KERNEL, CONSTANTS, Resources(96, 0, 0, 0)) == ""
    assert misfit(GPU, SIMT, KERNEL, CONSTANTS, Resources(255, 0, 64, 64)) == "spills 64 bytes per thread"
    wide = replace(CONSTANTS, tile_batch=256, tile_out=128, tile_in=4, tile_d=1, stages=2, thread_out=4)
    assert misfit(GPU, SIMT, KERNEL, wide, Resources(128, 0, 0, 0)).startswith("no block fits a multiprocessor: 1024 threads of 128")
    assert misfit(CPU, SIMT, KERNEL, CONSTANTS, Resources(shared_bytes=18464)) == ""


# ---- pools


def test_a_pool_begins_with_the_guesses_and_goes_on_by_predicted_time() -> None:
    kernel = replace(KERNEL, precision="float16")
    guess, misguided = Candidate("simt", SIMT.default(kernel, H200)), Candidate("simt", replace(CONSTANTS, thread_batch=3))
    pool = pool_of(kernel, 25088, GPU, [guess, misguided, guess])
    assert pool.candidates[0] == guess
    assert pool.guesses == 1
    assert len(set(pool.candidates)) == len(pool)
    assert list(pool.predicted_us[1:]) == sorted(pool.predicted_us[1:])
    assert {candidate.family for candidate in pool.candidates} == {"mma", "simt"}


def test_families_are_those_of_the_job_that_take_its_batch() -> None:
    kernel = KernelSpec(Pattern(1, 192, 48, 2), "float16", "bsl")
    assert served_families(Job(kernel, 25088), H200) == ["wgmma_shared", "mma", "simt"]
    assert served_families(Job(kernel, 25087), H200) == ["mma", "simt"]  # rows that no tensor map describes
    assert served_families(Job(replace(kernel, job="gradient"), 25088), H200) == ["gradient_mma", "gradient"]


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
    useless = [replace(trial, kernel=KERNEL), replace(trial, median_us=None, state="wrong"), replace(trial, family="mma")]
    pool = pool_of(KERNEL, 392, CPU, (), [*useless, trial])
    assert pool.others.tolist() == [3.0]
    assert len(pool.points.jobs) == len(pool) + 1
    assert pool.points.jobs[-1] != pool.points.jobs[0]


# ---- what is expected


def test_features_are_logarithms_and_words() -> None:
    rows = [{"copy": "async", "tile": 7}, {"copy": "registers", "tile": 15}, {"tile": 0}]
    assert features(rows).tolist() == [[1, 0, 3], [0, 1, 4], [0, 0, 0]]


def test_what_was_measured_teaches_about_what_is_near() -> None:
    tiles = np.arange(12.0)[:, None]
    points = Points(tiles, np.zeros((12, 1)), np.zeros(12, int), np.full(12, 5.0))
    mean, spread = expect(points.at(np.array([], int)), np.array([]), points)
    assert mean.tolist() == [5.0] * 12
    mean, told_spread = expect(points.at(np.array([2, 9])), np.array([4.0, 7.0]), points)
    assert mean[[2, 9]] == pytest.approx([4, 7], abs=0.05)
    assert mean[1] < mean[5] < mean[8]
    assert told_spread[2] < 0.1 < told_spread[5] < spread[5]


# ---- strategies, on a landscape that the cost model gets wrong


def landscape(pool: Pool) -> dict[int, float]:
    """Half as long as predicted with stages of 16 inputs, twice as long with wide threads; every 7th cannot run."""
    times = {}
    for index, candidate in enumerate(pool.candidates):
        constants = candidate.constants
        wrong_by = (0.5 if constants.tile_in == 16 else 1.0) * (2.0 if constants.thread_batch == 16 else 1.0)
        times[index] = pool.predicted_us[index] * wrong_by
    return times


def replay(strategy: Strategy, times: dict[int, float], under_way: int = 4) -> list[int]:
    """The order in which candidates are asked for, so many of them before the first is told."""
    order: list[int] = []
    waiting: list[int] = []
    while True:
        while len(waiting) < under_way and (index := strategy.ask()) is not None:
            waiting.append(index)
            order.append(index)
        if not waiting:
            return order
        done = waiting.pop(0)
        strategy.tell(done, None if done % 7 == 3 else times[done])


@pytest.fixture(scope="module")
def pool() -> Pool:
    return pool_of(KERNEL, 392, CPU, [Candidate("simt", SIMT.default(KERNEL, CPU.limits))])


def test_exhaustive_and_random_look_at_everything_once(pool: Pool) -> None:
    times = landscape(pool)
    assert replay(STRATEGIES["exhaustive"](pool), times) == list(range(len(pool)))
    order = replay(STRATEGIES["random"](pool), times)
    assert order[0] == 0
    assert order[1:] != sorted(order[1:])
    assert sorted(order) == list(range(len(pool)))
    assert order == replay(STRATEGIES["random"](pool), times)


def test_the_model_learns_where_it_is_wrong_and_ends_by_itself(pool: Pool) -> None:
    times = landscape(pool)
    able = {index: us for index, us in times.items() if index % 7 != 3}
    order = replay(STRATEGIES["model"](pool), times)
    assert len(order) == len(set(order)) <= strategies.MOST < len(pool)
    best = min(able[index] for index in order if index in able)
    assert best <= 1.02 * min(able.values())


def test_a_strategy_without_candidates_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simt, "space", lambda self, kernel, limits: iter(()))
    empty = pool_of(KERNEL, 392, CPU)
    for made in STRATEGIES.values():
        assert made(empty).ask() is None
        assert made(empty).left() == 0


# ---- figures


def test_an_outcome_knows_its_median_and_spread() -> None:
    outcome = Outcome("measured", "", tuple(float(us) for us in range(10, 21)))
    assert (outcome.median_us, outcome.spread) == (15.0, pytest.approx(8 / 15))
    assert Outcome("measured", "", (3.0,)).spread == 0


@pytest.mark.parametrize(
    ("before", "after", "marks"),
    [
        (Clocks(), Clocks(), set()),
        (Clocks(1980, 40), Clocks(1950, 43), set()),
        (Clocks(1980, 40), Clocks(1900, 40), {"clocks moved"}),
        (Clocks(1980, 40), Clocks(1980, 46), {"temperature moved"}),
        (Clocks(1980, 40, True), Clocks(1980, 40), {"clocks were held down"}),
    ],
)
def test_a_figure_is_marked_where_clocks_or_temperature_moved(before: Clocks, after: Clocks, marks: set[str]) -> None:
    assert after.moved_since(before) == marks


class FakeNvml:
    """What nvidia-ml-py shows of two GPUs."""

    NVML_CLOCK_SM, NVML_TEMPERATURE_GPU = 1, 0
    nvmlClocksThrottleReasonSwThermalSlowdown = 0x20  # noqa: N815
    nvmlClocksThrottleReasonHwThermalSlowdown = 0x40  # noqa: N815
    nvmlClocksThrottleReasonHwPowerBrakeSlowdown = 0x80  # noqa: N815
    NVMLError = RuntimeError

    def nvmlInit(self) -> None: ...  # noqa: N802 (NVML's names)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        return {"GPU-one": 1}[uuid]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return ("Fake GPU", "Other GPU")[handle]

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return (1980, 1500)[handle]

    def nvmlDeviceGetTemperature(self, handle: int, kind: int) -> int:  # noqa: N802
        return 41

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return (0x1, 0x40)[handle]


@pytest.mark.parametrize(
    ("visible", "name", "index", "expected"),
    [
        ("", "Fake GPU", 0, Clocks(1980, 41, False)),
        ("", "Other GPU", 1, Clocks(1500, 41, True)),
        ("1,0", "Other GPU", 0, Clocks(1500, 41, True)),
        ("GPU-one", "Other GPU", 0, Clocks(1500, 41, True)),
        ("", "Other GPU", 0, Clocks()),  # not the one that CUDA means: nothing is better than another one's clocks
    ],
)
def test_clocks_are_those_of_the_gpu_that_cuda_means(
    visible: str, name: str, index: int, expected: Clocks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    clocks._nvml.cache_clear()
    assert Clocks.of(FakeGpu(name=name, index=index)) == expected
    clocks._nvml.cache_clear()


def test_without_nvml_nothing_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    clocks._nvml.cache_clear()
    assert Clocks.of(FakeGpu()) == Clocks()
    clocks._nvml.cache_clear()
