"""How a time is taken: threads at rest, hopeless contenders left out, slow ones measured less often."""

from dataclasses import replace
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import pytest

from ksgen.bench.roster import OURS
from ksgen.bench.rows import OK, Log, read_rows
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import contenders as contenders_module  # noqa: E402
from ksgen.bench import model, runner, timing  # noqa: E402
from ksgen.bench.baselines import BASELINES, Baseline  # noqa: E402
from ksgen.bench.contenders import contenders  # noqa: E402
from ksgen.bench.model import WARMUP_RUNS, Spread, seconds_in_turn  # noqa: E402
from ksgen.bench.runner import Runner  # noqa: E402
from ksgen.bench.timing import Protocol, ReadyContender, Timed, Times  # noqa: E402
from tests.support.bench_runs import FACTS, JOB, measure  # noqa: E402


def test_before_a_time_is_taken_the_threads_of_others_come_to_rest() -> None:
    order: list[str] = []
    ready = ReadyContender(
        lambda number: order.append("run"), lambda y: y, lambda call: (order.append("clock"), call(), 1.0)[2],
        lambda: None, lambda: order.append("rest"),
    )  # fmt: skip
    Timed(ready, repeat(0), Protocol(())).seconds()
    assert order[:3] == ["rest", "clock", "run"]
    assert order.count("rest") == order.count("clock")


@pytest.mark.parametrize(("seconds", "conversions"), [(0.01, 7), (0.1, 4), (0.3, 1)])
def test_a_conversion_is_timed_alone_warm_if_short_and_once_if_slow(seconds: float, conversions: int) -> None:
    calls: list[str] = []

    def clock(call: Any) -> float:
        before = len(calls)
        call()
        return seconds * (1 if calls[before:] == ["convert"] else 5)

    ready = ReadyContender(
        lambda number: calls.append("run"), lambda y: y, clock, lambda: None, convert=lambda: calls.append("convert")
    )
    protocol = Protocol((), most_seconds=2.0)
    assert Timed(ready, repeat(0), protocol).conversion_us(protocol) == pytest.approx(1e6 * seconds)
    assert calls.count("convert") == conversions
    assert Timed(replace(ready, convert=None), repeat(0), protocol).conversion_us(protocol) is None


def test_before_a_short_conversion_is_timed_threads_come_to_rest_and_wake() -> None:
    order: list[str] = []
    ready = ReadyContender(
        lambda number: None, lambda y: y, lambda call: (order.append("clock"), call(), 0.001)[2],
        lambda: None, lambda: order.append("rest"), convert=lambda: order.append("convert"),
    )  # fmt: skip
    timed = Timed(ready, repeat(0), Protocol(()))
    order.clear()
    timed.conversion_us(Protocol(()))
    assert order == ["rest", "clock", "convert", *["rest", "convert", "clock", "convert"] * 3]


def test_what_is_hopeless_by_its_pace_is_not_run(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is, whatever its pace; and what is not much slower than another."""
    monkeypatch.setattr(Runner, "_note_pace", lambda self, contender, once_s: None)
    with Log(tmp_path / "a.jsonl") as log:
        protocol = Protocol((OURS, "bmm"), measurements=1, runs=1, most_seconds=1.0)
        measuring = Runner(
            log, cpu, protocol, Times(), FACTS | {"device": cpu.name}, float("inf"), lambda done, total, now: None
        )
        ours, bmm = contenders(JOB, cpu, (OURS, "bmm"))
        work = JOB.pattern.weight_count * JOB.batch
        for pace, fastest_s, verdict in ((10.1, 0.1, True), (9.9, 0.1, False), (10.1, 0.4, False), (12.1, 0.4, True)):
            measuring._paces = {(each.implementation, "float32", "bsf"): pace / work for each in (ours, bmm)}
            assert bool(measuring._hopeless(bmm, fastest_s)) == verdict
            assert measuring._hopeless(ours, fastest_s) == ""
        assert (
            measuring._hopeless(bmm, 0.1)
            == "1.2 s per run at 10 times its pace in other patterns, and the fastest takes 0.10 s"
        )
        measuring.run([JOB])
        assert {each.implementation: each.status for each in read_rows(log.path)} == {OURS: OK, "bmm": "too slow"}


@pytest.mark.parametrize(
    ("once_s", "runs", "most_measurements"),
    [(0.001, 10, 200), (0.04, 5, 10), (0.15, 1, 13), (0.9, 1, 2), (7.0, 1, 1)],
)
def test_a_slow_contender_is_measured_less_often(once_s: float, runs: int, most_measurements: int) -> None:
    ran: list[int] = []

    def clock(call: Any) -> float:
        before = len(ran)
        call()
        return (len(ran) - before) * once_s

    turns = cycle(range(3))
    timed = Timed(ReadyContender(ran.append, lambda y: y, clock, lambda: None), turns, Protocol((), most_seconds=2.0))
    assert (timed.runs, timed.most_measurements) == (runs, most_measurements)
    assert timed.seconds() == pytest.approx(once_s)
    assert ran == [number % 3 for number in range(len(ran))]  # sets of arrays take turns


def test_a_measurement_of_short_runs_has_more_of_them() -> None:
    turns, ready = repeat(0), ReadyContender(lambda number: None, lambda y: y, lambda call: 0.0004, lambda: None)
    assert Timed(ready, turns, Protocol(()), least_s=0.02).runs == 50
    assert Timed(ready, turns, Protocol((), runs=60), least_s=0.02).runs == 60
    assert Timed(ready, turns, Protocol((), most_seconds=0.1), least_s=0.02).runs == 25


def test_contenders_share_the_order_of_the_sets() -> None:
    ran: dict[str, list[int]] = {"a": [], "b": []}
    turns = cycle(range(4))
    both = [
        Timed(
            ReadyContender(numbers.append, lambda y: y, lambda call: (call(), 1.0)[1], lambda: None),
            turns,
            Protocol((), measurements=1, runs=3, most_seconds=9.0),
        )
        for numbers in ran.values()
    ]
    for numbers in ran.values():
        numbers.clear()
    for timed in both * 2:
        timed.seconds()
    first, *_ = ran["a"]
    assert [*ran["a"][:3], *ran["b"][:3], *ran["a"][3:], *ran["b"][3:]] == [(first + each) % 4 for each in range(12)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "first_s", "then_s", "runs", "reason"),
    [
        ("bmm", 11.0, 11.0, 1, "a run takes 11.0 s, and a contender may take 2 s in all"),
        ("bmm", 9.0, 3.0, 2, "a run takes 3.0 s, and a contender may take 2 s in all"),
        ("bmm", 9.0, 0.5, 4, ""),
        ("compiled", 60.0, 0.5, 4, ""),
    ],
)
def test_a_contender_that_takes_too_long_is_not_measured(
    name: str,
    first_s: float,
    then_s: float,
    runs: int,
    reason: str,
    cpu: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, ran = [0.0], []

    def prepare(arrays: Any) -> Any:
        def product(x: Any) -> Any:
            now[0] += then_s if ran else first_s
            ran.append(1)
            return [x]

        return product

    def clock(call: Any) -> float:
        begin = now[0]
        call()
        return now[0] - begin

    monkeypatch.setattr(contenders_module, "host_clock", clock)
    monkeypatch.setattr(runner, "monotonic", lambda: now[0])
    monkeypatch.setitem(BASELINES, name, Baseline(name, "", prepare))
    _, (row,) = measure(cpu, tmp_path / "a.jsonl", [JOB], names=(name,), runs=1, measurements=2)
    assert (row.status, row.reason) == (("too slow", reason) if reason else (OK, ""))
    assert len(ran) == runs


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
    ("enqueuing_s", "busy_s"), [(1e-3, 1.5e-3), (1e-6, timing._LEAST_BUSY_S), (1.0, timing._MOST_BUSY_S)]
)
def test_a_gpu_is_kept_busy_as_long_as_enqueuing_took_and_half_as_long_again(
    enqueuing_s: float, busy_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycles: list[int] = []
    monkeypatch.setattr(torch.cuda, "_sleep", cycles.append, raising=False)
    monkeypatch.setattr(timing, "host_clock", lambda call: enqueuing_s)
    monkeypatch.setattr(timing, "cuda_clock", lambda call: call() or 7.0)
    busy = timing.BusyCudaClock()
    assert [busy(lambda: None), busy(lambda: None)] == [7.0, 7.0]
    assert cycles == [int(seconds * timing._CYCLES_PER_S) for seconds in (timing._MOST_BUSY_S, busy_s)]
