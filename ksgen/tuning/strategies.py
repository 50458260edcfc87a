"""Strategies of a search: they order its candidates, and decide when it ends. They never compile or measure.

A strategy proposes candidates of a pool (`ask`), and receives their times in any order (`tell`).
"""

import random
from math import erf, exp, log2, pi, sqrt
from typing import Literal, Protocol

import numpy as np

from ksgen.tuning.pool import Array, Pool, expect

WINDOW = 1500  # the next candidate is one of so many that the cost model ranks first, or a neighbour of the best one
LEAST = 12  # candidates that are measured before a search may end by itself
MOST = 96  # candidates after which a search without a budget ends
MIN_GAIN = 0.005  # in log2 of the time, about 0.35 %: a search ends if no candidate is expected to gain so much
MOST_TRIED = 4  # candidates of a trial
NEAR = 1.3  # a trial omits candidates whose predicted time exceeds the best predicted time by more than this factor
BOLDNESS = 0.5  # standard deviations subtracted from the expected time, so that uncertain candidates are tried


class Strategy(Protocol):
    """Order in which the candidates of a pool are tried. Candidates are indices into the pool."""

    def ask(self) -> int | None:
        """Index of the next candidate to try.

        None if there is none at present. Ask again after the next `tell`; without candidates in progress, the search
        is over.
        """

    def tell(self, index: int, us: float | None) -> None:
        """Record a candidate's time in microseconds; None if it could not be measured.

        The candidate need not come from `ask`: earlier searches may have measured it.
        """

    def left(self) -> int:
        """Estimated number of candidates that `ask` will still return."""


class Listed:
    """Every candidate of a list, in its order."""

    def __init__(self, order: list[int]) -> None:
        self._left = dict.fromkeys(order)

    def ask(self) -> int | None:
        index = next(iter(self._left), None)
        if index is not None:
            del self._left[index]
        return index

    def tell(self, index: int, us: float | None) -> None:
        self._left.pop(index, None)

    def left(self) -> int:
        return len(self._left)


def exhaustive(pool: Pool, has_budget: bool = False) -> Strategy:
    """Every candidate of the pool, in its order: guesses, then the cost model's order."""
    return Listed(list(range(len(pool))))


def shuffled(pool: Pool, has_budget: bool = False) -> Strategy:
    """Guesses, then every other candidate in a random order, which is the same for equal jobs."""
    order = list(range(pool.guesses, len(pool)))
    random.Random(f"{pool.job}").shuffle(order)
    return Listed([*range(pool.guesses), *order])


def shortlist(pool: Pool, has_budget: bool = False) -> Strategy:
    """Guesses, then candidates whose predicted time is within `NEAR` of the best: at most `MOST_TRIED` in all.

    Candidates near a listed one (`Pool.are_near`) are omitted, because they take about as long.
    """
    order = list(range(min(pool.guesses, MOST_TRIED)))
    most_us = NEAR * min(pool.predicted_us, default=0.0)
    for index in range(pool.guesses, len(pool)):
        if len(order) == MOST_TRIED or pool.predicted_us[index] > most_us:
            break
        if not any(pool.are_near(index, each) for each in order):
            order.append(index)
    return Listed(order)


class Model:
    """Candidates by expected time: the cost model's prediction, corrected by measurements.

    The next candidate is the one with the shortest optimistic time (`BOLDNESS`). It is chosen alternately among all
    candidates, and among neighbours of the best one. The strategy ends when no candidate promises a gain. If the search
    has a budget, the remaining candidates follow in the pool's order.
    """

    def __init__(self, pool: Pool, has_budget: bool = False) -> None:
        self._pool = pool
        self._rest = exhaustive(pool) if has_budget else Listed([])  # candidates to try when none promises a gain
        self._times: dict[int, float] = {}  # log2 of microseconds, by candidate that was measured
        self._asked: dict[int, None] = {}  # candidates that were returned, or known before
        self._done: set[int] = set()  # those whose outcome is known
        self._near: tuple[int, list[int]] = (-1, [])  # the best candidate, and its neighbours
        self._is_over = False

    def ask(self) -> int | None:
        guess = next((index for index in range(self._pool.guesses) if index not in self._asked), None)
        if guess is not None:
            return self._take(guess)
        if self._is_over or len(self._asked) >= min(MOST, len(self._pool)):
            return self._next_of_rest()
        return self._promising()

    def tell(self, index: int, us: float | None) -> None:
        self._take(index)
        self._done.add(index)
        if us is not None:
            self._times[index] = log2(us)

    def left(self) -> int:
        promising = 0 if self._is_over else max(0, min(MOST, len(self._pool)) - len(self._asked))
        return max(promising, self._rest.left())

    def _next_of_rest(self) -> int | None:
        index = self._rest.ask()
        return None if index is None else self._take(index)

    def _take(self, index: int) -> int:
        self._asked[index] = None
        self._rest.tell(index, None)
        return index

    def _promising(self) -> int | None:
        near = self._neighbours()
        untried = np.array(
            [index for index in sorted({*range(min(WINDOW, len(self._pool))), *near}) if index not in self._asked], int
        )
        if not len(untried):
            return None
        mean, spread = self._expected(untried)
        if self._times:
            best = min(self._times.values())
            if len(self._done) >= LEAST and _gain(best, mean, spread).max() < MIN_GAIN:
                self._is_over = len(self._done) == len(self._asked)  # candidates in progress may still promise a gain
                return self._next_of_rest() if self._is_over else None
        value = mean - BOLDNESS * spread
        is_near = np.isin(untried, near)
        if len(self._asked) % 2 and is_near.any():
            value = np.where(is_near, value, np.inf)
        return self._take(int(untried[value.argmin()]))

    def _neighbours(self) -> list[int]:
        if not self._times:
            return []
        best = min(self._times, key=lambda index: self._times[index])
        if best != self._near[0]:
            self._near = (best, self._pool.neighbours(best))
        return self._near[1]

    def _expected(self, asked: Array) -> tuple[Array, Array]:
        """Mean and standard deviation of candidates' expected times, in log2.

        A candidate in progress counts as if it took its expected time, so that similar ones are not proposed.
        """
        pool = self._pool
        others = np.arange(len(pool), len(pool.points.jobs))
        # A candidate without a time counts as the slowest measured one, because similar ones probably fail as well.
        useless = [index for index in self._done if self._times and index not in self._times]
        tried = np.array([*self._times, *useless], int)
        worst = max(self._times.values(), default=0.0)
        known = np.concatenate([tried, others])
        times = np.concatenate([list(self._times.values()), [worst] * len(useless), pool.others])
        under_way = np.array([index for index in self._asked if index not in self._done], int)
        if len(under_way):
            believed, _ = expect(pool.points.at(known), times, pool.points.at(under_way))
            known, times = np.concatenate([known, under_way]), np.concatenate([times, believed])
        return expect(pool.points.at(known), times, pool.points.at(asked))


def _gain(best: float, mean: Array, spread: Array) -> Array:
    """Expected improvement of each candidate over the best time, in log2."""
    z = (best - mean) / spread
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in z])
    density = np.array([exp(-value * value / 2) / sqrt(2 * pi) for value in z])
    gain: Array = (best - mean) * below + spread * density
    return gain


TRIAL = "trial"  # strategy of `ksgen calibrate`
StrategyName = Literal["model", "random", "exhaustive"]  # strategies of `ksgen tune --strategy`
STRATEGIES = {"model": Model, "random": shuffled, "exhaustive": exhaustive, TRIAL: shortlist}
