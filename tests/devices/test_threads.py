"""How many cores kernels take."""

import sys
from functools import cache
from types import SimpleNamespace

import pytest

from ksgen.devices import threads
from ksgen.devices.threads import (
    AGAIN,
    HOPELESS,
    MOST_LATE,
    SAMPLES,
    SHORT_NS,
    SOON,
    TOGETHER,
    WARM_UP,
    ThreadsByTime,
    groups_for,
    threads_of_environment,
    wanted_threads,
)
from ksgen.errors import DeviceError


@pytest.mark.parametrize(("given", "groups"), [(1, 1), (3, 3), (4, 32), (9, 32)])
def test_fewer_threads_than_cores_are_as_many_groups(given: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", lambda: given)
    assert groups_for(32, cores=4) == groups
    assert groups_for(2, cores=4) == min(2, groups)


def test_pytorch_s_number_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 1))
    assert wanted_threads() == 1
    assert groups_for(32, cores=2) == 1
    monkeypatch.delitem(sys.modules, "torch")
    assert wanted_threads() is None
    assert groups_for(32, cores=2) == 32


@pytest.mark.parametrize(("given", "number"), [("3", 3), ("", None)])
def test_the_environment_is_asked_once(given: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", cache(threads_of_environment.__wrapped__))
    monkeypatch.setattr(threads.os.environ, "get", {"KSGEN_THREADS": given}.pop)  # which is not there a second time
    assert [threads.threads_of_environment(), threads.threads_of_environment()] == [number, number]


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "²", "65536", "9" * 40, "9" * 5000])
def test_what_is_no_number_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", threads_of_environment.__wrapped__)
    monkeypatch.setenv("KSGEN_THREADS", given)
    with pytest.raises(DeviceError, match=r"KSGEN_THREADS=.*; accepted: a whole number from 1 up to 65535"):
        wanted_threads()


class Machine:
    """A clock, and launches that take as long as a test says, by their number of threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, takes: dict[int, int]) -> None:
        self.now, self.takes, self.asked, self.by_time = 0, takes, list[int](), ThreadsByTime()
        self.change_ns = 0  # more for a launch on fewer threads than the one before
        monkeypatch.setattr(threads, "perf_counter_ns", lambda: self.now)

    def launch(self, number: int, given: str) -> None:
        assert given == "given"
        self.now += self.takes[number] + self.change_ns * (bool(self.asked) and number < self.asked[-1])
        self.asked.append(number)

    def run(self, calls: int, wanted: int = 2) -> list[int]:
        self.asked = []
        for _ in range(calls):
            self.by_time.run(self.launch, wanted, "given")
        return self.asked


TIMED = WARM_UP + 2 * SAMPLES


@pytest.mark.parametrize(("on_one", "on_two", "taken"), [(8_000, 90_000, 1), (30_000, 18_000, 2)])
def test_times_decide_between_one_thread_and_all(
    on_one: int, on_two: int, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, {1: on_one, 2: on_two})
    first = machine.run(TIMED)
    assert first[:WARM_UP] == [2] * WARM_UP
    assert first.count(1) == SAMPLES
    assert machine.run(20) == [taken] * 20


def test_stalls_count_and_a_single_one_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    for stalls, taken in ((1, 2), (4, 1)):
        machine = Machine(monkeypatch, {1: 30_000, 2: 18_000})
        machine.run(TIMED - 2 * stalls)
        machine.takes[2] = 10_000_000
        machine.run(2 * stalls)
        assert machine.run(1) == [taken]


def test_what_a_change_of_threads_costs_decides_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for change_ns in (0, 50_000):
        machine = Machine(monkeypatch, {1: 20_000, 2: 29_000})
        machine.change_ns = change_ns
        first = machine.run(TIMED)
        assert first[WARM_UP:] == ([2] * TOGETHER + [1] * TOGETHER) * (SAMPLES // TOGETHER)
        assert machine.run(20) == [1] * 20


def test_long_launches_take_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Machine(monkeypatch, {1: 1, 2: SHORT_NS}).run(2 * TIMED) == [2] * 2 * TIMED
    assert Machine(monkeypatch, {1: 5}).run(5, wanted=1) == [1] * 5


def test_all_threads_need_a_gain(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_two, taken in ((29_500, 1), (25_000, 2)):
        machine = Machine(monkeypatch, {1: 30_000, 2: on_two})
        machine.run(TIMED)
        assert machine.run(5) == [taken] * 5


def test_a_long_launch_on_one_thread_ends_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {1: 1 + HOPELESS * 100_000, 2: 100_000})
    assert machine.run(TIMED + 20).count(1) == 1
    assert machine.by_time.settled(2) == (2, AGAIN, 0)


def test_launches_that_become_slow_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {1: 30_000, 2: 18_000})
    machine.run(TIMED)
    assert machine.by_time.settled(2) == (2, AGAIN, 30_000)
    machine.takes[2] = 40_000
    assert machine.run(MOST_LATE) == [2] * MOST_LATE
    assert machine.run(TIMED).count(1) == SAMPLES
    assert machine.run(5) == [1] * 5


def test_single_stalls_start_no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {1: 30_000, 2: 18_000})
    machine.run(TIMED)
    for number in range(4 * MOST_LATE):
        machine.takes[2] = 18_000 if number % 2 else 400_000
        assert machine.run(1) == [2]


def test_launches_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, {1: 8_000, 2: 90_000})
    assert machine.run(AGAIN)[-1] == 1
    machine.takes[2] = 5_000
    assert machine.run(AGAIN)[-1] == 2


def test_long_launches_on_one_thread_are_timed_again_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of PyTorch's products spin on the other cores while both are timed."""
    machine = Machine(monkeypatch, {1: 400_000, 2: 700_000})
    for calls in (SOON, 2 * SOON):
        machine.run(TIMED)
        assert machine.by_time.settled(2) == (1, calls, 0)
        assert machine.run(calls - TIMED) == [1] * (calls - TIMED)
    machine.takes[2] = 220_000
    machine.run(TIMED)
    assert machine.by_time.settled(2) == (2, AGAIN, 400_000)
