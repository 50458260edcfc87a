"""A pause lasts until this process's threads sleep, and never for long."""

import hashlib
import time
from collections.abc import Callable, Iterator
from itertools import accumulate, chain, repeat
from pathlib import Path
from threading import Event, Thread

import pytest

from ksgen.measure import trust


def naps(
    monkeypatch: pytest.MonkeyPatch, shares: Iterator[float], states: Iterator[list[str]] | None = None
) -> list[float]:
    """What is slept, if the threads of this process work so much of each nap, and the scheduler says this of them."""
    slept: list[float] = []
    spent = accumulate(chain([0.0], (share * trust.NAP_S for share in shares)))
    times = (each for pair in _pairs(spent) for each in pair)
    monkeypatch.setattr(trust, "process_time", lambda: next(times))
    monkeypatch.setattr(trust, "sleep", slept.append)
    monkeypatch.setattr(trust, "_states", lambda: next(states) if states else [])
    trust.rest()
    return slept


def _pairs(values: Iterator[float]) -> Iterator[tuple[float, float]]:
    before = next(values)
    for value in values:
        yield before, value
        before = value


def test_threads_that_sleep_already_cost_one_nap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert naps(monkeypatch, repeat(0.0)) == [trust.NAP_S]


def test_threads_that_spin_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert naps(monkeypatch, chain([2.0, 1.0, 0.5], repeat(trust.AWAKE_SHARE / 2))) == [trust.NAP_S] * 4


def test_threads_that_never_sleep_end_the_wait_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    assert naps(monkeypatch, repeat(1.0)) == [trust.NAP_S] * trust.MOST_NAPS


def test_the_schedulers_word_counts_where_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    spinning, asleep = ["S", "R", "S"], ["S", "S", "D"]
    # Other threads' time is added at ticks: a nap between two ticks shows none.
    assert naps(monkeypatch, repeat(0.0), iter([spinning, spinning, asleep])) == [trust.NAP_S] * 3
    assert naps(monkeypatch, repeat(1.0), iter([asleep])) == [trust.NAP_S]


@pytest.mark.skipif(not trust._TASKS.exists(), reason="the system does not say which threads run")
def test_a_thread_that_computes_is_awake_and_one_that_waits_is_not() -> None:
    asked, end = Event(), Event()

    def work() -> None:
        asked.wait()
        digest = bytes(1 << 22)
        while not end.is_set():
            hashlib.sha256(digest).digest()  # without Python's lock

    thread = Thread(target=work)
    thread.start()
    try:
        assert _soon(lambda: "R" not in list(trust._states()))
        asked.set()
        assert _soon(lambda: "R" in list(trust._states()))
    finally:
        asked.set()
        end.set()
        thread.join()


def _soon(holds: Callable[[], bool]) -> bool:
    return any(holds() or time.sleep(1e-3) for _ in range(5000))


def test_no_states_where_the_system_says_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_TASKS", Path("/nowhere"))
    assert list(trust._states()) == []
