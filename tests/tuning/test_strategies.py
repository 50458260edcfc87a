"""Strategies on a landscape that the cost model gets wrong."""

from itertools import combinations

import pytest

from ksgen.families import FAMILIES, Limits
from ksgen.families.simt.family import Simt
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning import strategies
from ksgen.tuning.job import Candidate
from ksgen.tuning.model import Machine
from ksgen.tuning.pool import Pool
from ksgen.tuning.strategies import STRATEGIES, Strategy
from tests.support.tuning_pools import pool_of

CPU = Machine(
    "a processor", Limits(256 * 1024, 8192, 0, is_cpu=True, async_copies=False), 2, {"simt": Ceilings(1e10, 9e10)}
)
KERNEL = KernelSpec(Pattern(1, 192, 48, 2))
SIMT = FAMILIES["simt"]


def landscape(pool: Pool) -> dict[int, float]:
    """Half as long as predicted with stages of 16 inputs, twice as long with wide threads; every 7th cannot run."""
    times = {}
    for index, candidate in enumerate(pool.candidates):
        constants = candidate.constants
        wrong_by = (0.5 if constants.tile_in == 16 else 1.0) * (2.0 if constants.thread_batch == 16 else 1.0)
        times[index] = pool.predicted_us[index] * wrong_by
    return times


def replay(strategy: Strategy, times: dict[int, float], under_way: int = 4) -> list[int]:
    """Return the order in which candidates are requested, with that many requested before the first result."""
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


def test_with_a_budget_the_model_goes_on_with_the_rest(pool: Pool) -> None:
    times = landscape(pool)
    alone = replay(STRATEGIES["model"](pool), times)
    strategy = STRATEGIES["model"](pool, has_budget=True)
    assert strategy.left() == len(pool)
    order = replay(strategy, times)
    assert order[: len(alone)] == alone
    assert sorted(order) == list(range(len(pool)))
    assert order[len(alone) :] == sorted(order[len(alone) :])
    assert strategy.left() == 0


def test_a_strategy_without_candidates_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Simt, "space", lambda self, kernel, limits: iter(()))
    empty = pool_of(KERNEL, 392, CPU)
    for made in STRATEGIES.values():
        assert made(empty).ask() is None
        assert made(empty).left() == 0


def test_a_trial_looks_at_the_guesses_and_the_best_that_differ_from_them(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = landscape(pool)
    order = replay(STRATEGIES["trial"](pool), times)
    assert order[0] == 0  # the guess
    assert len(order) == strategies.MOST_TRIED
    most_us = strategies.NEAR * min(pool.predicted_us)
    assert all(pool.predicted_us[index] <= most_us for index in order[1:])
    assert not any(pool.are_near(one, other) for one, other in combinations(order, 2))
    left_out = range(1, order[-1])
    assert any(index not in order and pool.predicted_us[index] <= most_us for index in left_out)
    monkeypatch.setattr(strategies, "NEAR", 0.99)  # so that no candidate of the model is near enough
    assert replay(STRATEGIES["trial"](pool), times) == [0]
    monkeypatch.setattr(strategies, "MOST_TRIED", 0)
    assert replay(STRATEGIES["trial"](pool), times) == []
