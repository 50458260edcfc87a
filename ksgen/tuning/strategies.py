"""Orders candidates, and decides when a search ends. Only numbers go in and out: nothing runs here.

A strategy is asked for candidates of a pool and receives their outcomes, in any order.
"""

import random
from math import erf, exp, log2, pi, sqrt
from typing import Literal, Protocol

import numpy as np

from ksgen.tuning.pool import Array, Pool, expect

WINDOW = 1500  # first candidates in the cost model's order, among which the next one is chosen
LEAST = 12  # candidates that are measured before a search may end by itself
MOST = 96  # candidates after which a search without a budget ends
MIN_GAIN = 0.005  # relative to the best time: a smaller expected gain is not worth another candidate
MOST_TRIED = 4  # candidates of a trial
NEAR = 1.3  # a trial leaves out candidates that are predicted to take more than this multiple of the best
BOLDNESS = 0.5  # standard deviations subtracted from the expected time, so that uncertain candidates are tried


class Strategy(Protocol):
    """An order of candidates."""

    def ask(self) -> int | None:
        """Index of the next candidate to try; None if no candidate is worth it now, or ever."""
        ...

    def tell(self, index: int, us: float | None) -> None:
        """Record the time of a candidate; None if it has no time. The candidate may be a known one that `ask` never
        returned."""
        ...

    def left(self) -> int:
        """Estimated number of further candidates."""
        ...


class Listed:
    """Candidates in a fixed order, all of them."""

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
    """Every candidate, the most promising first."""
    return Listed(list(range(len(pool))))


def shuffled(pool: Pool, has_budget: bool = False) -> Strategy:
    """Guesses, then every other candidate in an order that is random, but equal for equal jobs."""
    order = list(range(pool.guesses, len(pool)))
    random.Random(f"{pool.job}").shuffle(order)
    return Listed([*range(pool.guesses), *order])


def shortlist(pool: Pool, has_budget: bool = False) -> Strategy:
    """Guesses, then the cost model's candidates within `NEAR` of the best predicted time: `MOST_TRIED` in all.

    Candidates that differ from a listed one in a single constant are left out, because they take about as long.
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
    """Candidates in the cost model's order, corrected by measurements.

    The next candidate is the one that may be the fastest. It is chosen alternately among all candidates, and among
    those that differ from the best one in one constant. The strategy ends when no candidate promises a gain. If the
    search has a budget, it continues with the rest in the cost model's order.
    """

    def __init__(self, pool: Pool, has_budget: bool = False) -> None:
        self._pool = pool
        self._rest = exhaustive(pool) if has_budget else Listed([])  # candidates to try when none promises a gain
        self._times: dict[int, float] = {}  # log2
        self._asked: dict[int, None] = {}
        self._done: set[int] = set()
        self._near: tuple[int, list[int]] = (-1, [])  # the best one and its neighbours
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
                self._is_over = len(self._done) == len(self._asked)  # candidates in progress may still change it
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
        """Mean and deviation of the expected times of candidates, in log2.

        A candidate under way counts as if it took its expected time, so that its near copies are not proposed.
        """
        pool = self._pool
        others = np.arange(len(pool), len(pool.points.jobs))
        # A candidate that cannot run counts as the slowest measured one, because similar ones can hardly run either.
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
    """The expected gain of each candidate over the best time, in log2."""
    z = (best - mean) / spread
    below = np.array([0.5 * (1 + erf(value / sqrt(2))) for value in z])
    density = np.array([exp(-value * value / 2) / sqrt(2 * pi) for value in z])
    gain: Array = (best - mean) * below + spread * density
    return gain


TRIAL = "trial"  # strategy of `ksgen calibrate`
StrategyName = Literal["model", "random", "exhaustive"]  # that users choose from
STRATEGIES = {"model": Model, "random": shuffled, "exhaustive": exhaustive, TRIAL: shortlist}
