"""A pause lasts until this process's threads sleep, and never for long."""

from collections.abc import Iterator
from itertools import accumulate, chain, repeat

import pytest

from ksgen.measure import pause


def naps(monkeypatch: pytest.MonkeyPatch, shares: Iterator[float]) -> list[float]:
    """What is slept, if the threads of this process work so much of each nap."""
    slept: list[float] = []
    spent = accumulate(chain([0.0], (share * pause.NAP_S for share in shares)))
    times = (each for pair in _pairs(spent) for each in pair)
    monkeypatch.setattr(pause, "process_time", lambda: next(times))
    monkeypatch.setattr(pause, "sleep", slept.append)
    pause.rest()
    return slept


def _pairs(values: Iterator[float]) -> Iterator[tuple[float, float]]:
    before = next(values)
    for value in values:
        yield before, value
        before = value


def test_threads_that_sleep_already_cost_one_nap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert naps(monkeypatch, repeat(0.0)) == [pause.NAP_S]


def test_threads_that_spin_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert naps(monkeypatch, chain([2.0, 1.0, 0.5], repeat(pause.AWAKE_SHARE / 2))) == [pause.NAP_S] * 4


def test_threads_that_never_sleep_end_the_wait_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert naps(monkeypatch, repeat(1.0)) == [pause.NAP_S] * pause.MOST_NAPS
