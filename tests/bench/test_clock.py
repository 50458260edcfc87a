"""Clocks: calls take turns, each round begins with another one, and a spread is the quartiles around the median."""

import pytest

from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

from ksgen.bench import model  # noqa: E402  (after the skip)
from ksgen.bench import timing as clock  # noqa: E402
from ksgen.bench.model import WARMUP_RUNS, Spread, seconds_in_turn  # noqa: E402


def test_calls_take_turns_after_a_warm_up_and_the_threads_of_others_rest_before_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    now = [0.0]

    def call(name: str, seconds: float) -> None:
        done.append(name)
        now[0] += seconds

    monkeypatch.setattr("ksgen.measure.trust.perf_counter", lambda: now[0])
    monkeypatch.setattr(model, "rest", lambda: done.append("rest"))
    found = seconds_in_turn({"a": lambda: call("a", 1.0), "b": lambda: call("b", 2.0)}, 3, torch.device("cpu"))
    assert found == {"a": [1.0] * 3, "b": [2.0] * 3}
    warm_up = ["a", "b"] * WARMUP_RUNS
    assert done == [*warm_up, *("rest", "a", "rest", "b", "rest", "b", "rest", "a", "rest", "a", "rest", "b")]


def test_a_spread_is_the_quartiles() -> None:
    assert Spread.of([3.0]) == Spread(3.0, 3.0, 3.0)
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)


@pytest.mark.parametrize(
    ("enqueuing_s", "busy_s"), [(1e-3, 1.5e-3), (1e-6, clock._LEAST_BUSY_S), (1.0, clock._MOST_BUSY_S)]
)
def test_a_gpu_is_kept_busy_as_long_as_enqueuing_took_and_half_as_long_again(
    enqueuing_s: float, busy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    monkeypatch.setattr(clock, "host_clock", lambda call: enqueuing_s)
    monkeypatch.setattr(clock, "cuda_clock", lambda call: call() or 7.0)
    busy = clock.BusyCudaClock()
    assert [busy(lambda: None), busy(lambda: None)] == [7.0, 7.0]
    assert cycles == [int(seconds * clock._CYCLES_PER_S) for seconds in (clock._MOST_BUSY_S, busy_s)]
