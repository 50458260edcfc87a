"""Reliable and unreliable figures, by recorded and invented series and loads. Nothing is timed."""

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median, quantiles

import pytest

from ksgen.bench import report, tables
from ksgen.bench.comparison import Results
from ksgen.bench.roster import OURS
from ksgen.bench.rows import OK, LoggedContender, row_of
from ksgen.measure import trust
from ksgen.measure.trust import (
    Blocks,
    Counts,
    block_of,
    describe_unreliable,
    interval,
    load_warning,
    marked,
    others_between,
    take_blocks,
    why_unreliable,
    with_reason,
)

QUIET = [100.0, 101, 102, 101, 103, 102, 103, 104, 104, 130]

# Recorded: 24 blocks of 60 runs of 1,192,48,2 at batch 1568, in microseconds, on two hardware threads of one core.
# Another process kept one of them busy all the time: undisturbed runs took 335 us.
SLOW = [
    713.5, 721.7, 734.0, 718.1, 730.3, 732.6, 729.3, 727.1, 728.1, 729.2, 731.6, 721.9, 731.6, 733.4, 715.3, 721.5,
    716.5, 723.1, 719.6,
    719.8, 717.4, 714.5, 712.6, 731.9,
]  # fmt: skip
SLOW_OTHERS = [0.66, 0.68, 0.68, 0.68, 0.65, 0.66, 0.69, 0.68, 0.63, 0.66, 0.66, 0.66]
# The same, where a third process worked for 3 ms in 60: single runs took up to 8,382 us.
SPIKY = [
    707.5, 712.2, 715.9, 704.8, 693.1, 687.7, 695.9, 694.2, 666.4, 681.7, 686.7, 692.6, 701.4, 702.0, 698.6, 698.5,
    688.9, 699.0, 693.9,
    698.5, 677.9, 661.8, 681.7, 674.3,
]  # fmt: skip
SPIKY_SINGLES = [707, 741, 662, 6759, 739, 733, 647, 695, 8382, 893, 732, 2303, 693, 714, 658, 719]
# Invented, between the two times that were recorded.
BIMODAL = [335.0, 716.0, 338.0, 721.0] * 6
DRIFTING = [335.0 * (1 + 0.02 * block) for block in range(24)]


def idle_machine(seed: int, blocks: int = 12, runs: int = 91) -> tuple[list[float], list[float]]:
    """Single runs and the medians of blocks, where three runs in ten find the processor's other thread waking up."""
    random = Random(seed)
    singles = [random.gauss(217, 4) if random.random() < 0.7 else random.gauss(290, 15) for _ in range(blocks * runs)]
    return singles, [median(singles[first : first + runs]) for first in range(0, len(singles), runs)]


@pytest.mark.parametrize(
    ("blocks", "others", "says"),
    [
        (SPIKY, (), ""),
        (SLOW, (), ""),  # nothing in the series itself tells
        (SLOW, SLOW_OTHERS, "other processes took 66% of the CPU time"),
        (SLOW, [*[0.66] * 6, *[0.05] * 6], ""),  # not in most looks
        (SLOW, [*[0.66] * 7, *[0.05] * 6], "other processes took 66% of the CPU time"),
        (SLOW, [0.1, 0.1], ""),
        (SLOW, [None, 0.11, None], "other processes took 11% of the CPU time"),
        (SLOW, [None], ""),
        (BIMODAL, (), "the median is uncertain by 72%"),
        ([335.0] * 20 + [716.0] * 4, (), ""),  # a sixth of the blocks does not move the median
        (DRIFTING, (), "the median is uncertain by 18%"),
        ([335.0 * (1 + 0.002 * block) for block in range(24)], (), ""),
        (QUIET, (), ""),
        ([100.0, 101, 107], (), "the median is uncertain by 7%"),
        ([123.0], (), ""),
        ([123.0], [0.5], "other processes took 50% of the CPU time"),
        ([0.95, 1.0, 1.04, 1.05, 1.0, 1.0], (), "the median is uncertain by 10%"),
        ([], [0.9], ""),
    ],
)  # fmt: skip
def test_a_median_is_unreliable_by_its_interval_and_by_the_load(
    blocks: list[float], others: Sequence[float | None], says: str
) -> None:  # fmt: skip
    assert why_unreliable(blocks, others) == says


@pytest.mark.parametrize("seed", range(20))
def test_single_runs_may_spread_as_they_like(seed: int) -> None:
    singles, blocks = idle_machine(seed)
    low, _, high = quantiles(singles, n=4)
    assert high - low > 0.2 * median(singles)
    assert why_unreliable(blocks) == ""
    low, high = interval(blocks)
    assert low <= median(blocks) <= high
    assert max(SPIKY_SINGLES) > 10 * median(SPIKY_SINGLES)


@pytest.mark.parametrize(
    ("blocks", "cut"), [(1, 0), (5, 0), (6, 0), (8, 0), (9, 1), (11, 1), (12, 2), (24, 6), (100, 39), (1500, 711)]
)
def test_an_interval_leaves_out_as_many_as_its_confidence_allows(blocks: int, cut: int) -> None:
    """The numbers are those of tables of the sign test for 95 %."""
    assert interval(list(map(float, reversed(range(blocks))))) == (cut, blocks - 1 - cut)


def test_the_interval_holds_the_median_in_nineteen_of_twenty_series() -> None:
    random = Random(1)
    series = [sorted(random.expovariate(1) for _ in range(12)) for _ in range(2000)]
    held = sum(interval(each)[0] <= 0.6931 <= interval(each)[1] for each in series)
    assert 0.95 <= held / 2000 <= 0.97


class Clock:
    """A machine whose time is a number: blocks take a second, and others take what they take."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, others: float = 0.0) -> None:
        self.now, self.rests = 0.0, 0
        monkeypatch.setattr(trust, "monotonic", lambda: self.now)
        monkeypatch.setattr(trust, "rest", self.rest)
        monkeypatch.setattr(trust.os, "cpu_count", lambda: 2)
        monkeypatch.setattr(trust, "counts", lambda: Counts(self.now, self.now * 2 * others, 0.0))

    def rest(self) -> None:
        self.rests += 1

    def timer(self, values: Iterator[float]) -> Callable[[], float]:
        def take() -> float:
            self.now += 1.0
            return next(values)

        return take


def test_blocks_are_taken_until_the_median_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    (found,) = take_blocks([clock.timer(iter(QUIET))], on_processor=True, most_seconds=100)
    assert (found.values, found.others, clock.rests) == (tuple(QUIET[:6]), (0.0,) * 6, 1)
    assert (found.why_unreliable, found.interval, found.median, found.others_share) == ("", (100, 103), 101.5, 0.0)
    noisy = [100.0, 140.0, *[100.0] * 30]
    (found,) = take_blocks([clock.timer(iter(noisy))], on_processor=False, most_seconds=100)
    assert (len(found.values), found.interval, found.others) == (9, (100.0, 100.0), ())
    assert clock.rests == 1  # a device with a clock of its own does not wait


def test_blocks_end_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    first, second = take_blocks(
        [clock.timer(iter(BIMODAL)), clock.timer(iter(SLOW))], on_processor=True, most_seconds=10
    )
    assert (len(first.values), len(second.values)) == (10, 10)
    assert (first.why_unreliable, second.why_unreliable) == ("the median is uncertain by 73%", "")
    clock = Clock(monkeypatch, others=0.5)
    (found,) = take_blocks([clock.timer(iter(SLOW))], on_processor=True, most_seconds=10)
    assert (len(found.values), found.why_unreliable) == (10, "other processes took 50% of the CPU time")


def test_timers_take_turns_and_none_always_follows_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = Clock(monkeypatch), list[str]()

    def timer(name: str) -> Callable[[], float]:
        block = clock.timer(iter(SLOW))
        return lambda: (order.append(name), block())[1]

    take_blocks([timer(name) for name in "abc"], on_processor=True, most_seconds=100)
    assert "".join(order) == "abcbcacab" * 2
    assert clock.rests == len(order)
    order.clear()
    take_blocks([timer(name) for name in "ab"], on_processor=True, most_seconds=100)
    assert "".join(order) == "abba" * 3
    assert clock.rests == 18 + 7  # none before a block that goes on where the last one ended


def test_hopeless_series_end_early_unless_a_block_is_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    for values, blocks in (([151.0, 152.0], 2), ([152.0, *[149.0] * 9], 6)):
        (found,) = take_blocks([clock.timer(iter(values))], on_processor=True, most_seconds=100, give_up=150.0)
        assert len(found.values) == blocks


def test_hopeless_series_end_while_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timers = [clock.timer(iter([151.0, 152.0])), clock.timer(each / 5 for each in BIMODAL)]
    hopeless, uncertain = take_blocks(timers, on_processor=True, most_seconds=10, give_up=150.0)
    assert (len(hopeless.values), len(uncertain.values)) == (2, 18)


def test_hopeless_series_last_until_the_load_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that others keep busy makes any candidate slow."""
    clock = Clock(monkeypatch, others=0.5)
    short = trust.LEAST_SECONDS / 4

    def take() -> float:
        clock.now += short
        return 151.0

    (found,) = take_blocks([take], on_processor=True, most_seconds=100, give_up=150.0)
    assert (len(found.values), found.why_unreliable) == (4, "other processes took 50% of the CPU time")
    (found,) = take_blocks([take], on_processor=False, most_seconds=100, give_up=150.0)
    assert (len(found.values), found.why_unreliable) == (2, "")
    monkeypatch.setattr(trust, "counts", lambda: None)
    (found,) = take_blocks([take], on_processor=True, most_seconds=100, give_up=150.0)
    assert (len(found.values), found.why_unreliable) == (2, "")


def test_a_block_has_as_many_runs_as_fit_and_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    now, asked, slow = [0.0], list[int](), iter([9.0, 4.0])  # times as long: the first run, and a disturbed one
    monkeypatch.setattr(trust, "perf_counter", lambda: now[0])

    def times(runs: int) -> list[float]:
        asked.append(runs)
        now[0] += runs / 1024 * next(slow, 1.0)
        return [1.0, *[3.0] * (runs - 1)]

    block = block_of(times)
    assert [block(), block()] == [3.0, 3.0]
    assert asked == [1, 1, 1, 20, 1, 20]
    asked.clear()
    block_of(times, least_runs=30)()
    assert asked == [1, 1, 1, 30]
    asked.clear()
    short = block_of(times, seconds=0.0005)
    assert [short(), short()] == [1.0, 1.0]
    assert asked == [1, 1, 1, 1, 1, 1]
    asked.clear()
    long = block_of(lambda runs: times(30 * runs))
    assert [long(), long()] == [3.0, 3.0]  # a single long run needs no other before it
    assert asked == [30, 30, 30, 30, 30]


def test_what_a_series_says_of_itself() -> None:
    found = Blocks(tuple(SLOW), (0.05, 0.2, 0.06))
    assert (found.median, found.interval, found.others_share, found.why_unreliable) == (722.5, (718.1, 730.3), 0.06, "")
    assert (found.is_known, Blocks(tuple(SLOW[:5])).is_known, Blocks(tuple(BIMODAL)).is_known) == (True, False, False)
    assert Blocks((1.0,)).others_share is None


def test_what_others_took_is_all_that_is_not_our_own() -> None:
    before = Counts(10.0, 100.0, 5.0)
    assert others_between(before, Counts(12.0, 104.0, 6.0), 2) == 0.75
    assert others_between(before, Counts(12.0, 101.0, 6.5), 2) == 0.0  # counts go on by ticks
    assert others_between(before, Counts(12.0, 110.0, 5.0), 2) == 1.0


def test_looks_are_apart_and_what_came_before_a_watch_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([Counts(1, 2, 0), Counts(1.05, 2.1, 0), Counts(2, 3, 0), Counts(2.05, 3.1, 0)])
    monkeypatch.setattr(trust, "counts", lambda: next(told))
    monkeypatch.setattr(trust.os, "cpu_count", lambda: 2)
    watch = trust.Watch()
    assert [watch.others_share() for _ in range(3)] == [None, 0.5, 0.5]
    assert watch.shares == [0.5]  # both processors were busy before, as compilers keep them


def test_counts_are_of_what_is_not_idle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stat").write_text("cpu  100 0 0 700 100 0 0 50 0 0\ncpu0 1 2\n")
    monkeypatch.setattr(trust, "_PROC", tmp_path)
    monkeypatch.setattr(trust, "monotonic", lambda: 10.0)
    monkeypatch.setattr(trust.os, "cpu_count", lambda: 2)
    monkeypatch.setattr(trust.os, "sysconf", lambda name: 100)
    found = trust.counts()
    assert found
    assert (found.clock, found.busy) == (10.0, 12.0)


def test_the_time_of_children_is_our_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers that this process started are no others."""
    if trust.counts() is None:
        pytest.skip("the system says nothing")
    subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
    monkeypatch.setattr(trust, "process_time", lambda: 0.0)
    ended, found = trust.os.times(), trust.counts()
    assert found
    assert found.own == ended.children_user + ended.children_system > 0


def test_an_unreliable_figure_is_marked_and_the_first_reason_is_reported() -> None:
    assert (marked("12 us", ""), marked("12 us", "other processes took 50% of the CPU time")) == ("12 us", "12 us?")
    assert (with_reason("12 us", ""), with_reason("12 us", "others took half")) == (
        "12 us",
        "12 us? (others took half)",
    )
    assert describe_unreliable(["", ""]) == ""
    reasons = ["", "other processes took 50% of the CPU time", "the median is uncertain by 8%"]
    said = "? 2 of 3 times unreliable; the first: other processes took 50% of the CPU time."
    assert describe_unreliable(reasons) == said
    assert (
        describe_unreliable(reasons[1:2], "ratio")
        == "? 1 of 1 ratio unreliable; the first: other processes took 50% of the CPU time."
    )


def test_nothing_is_unreliable_where_the_system_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_PROC", trust.Path("/nowhere"))
    assert trust.counts() is None
    assert trust.Watch().others_share() is None
    assert trust.look() == ""


def test_a_busy_machine_is_reported_once_with_its_busiest_processes() -> None:
    assert load_warning(0.1, 2, [("cc1plus", 0.4)]) == ""
    said = "other processes keep 1.4 of 2 processors busy (cc1plus 0.9, python 0.5): unreliable times are marked"
    assert load_warning(0.7, 2, [("cc1plus", 0.9), ("python", 0.5), ("sh", 0.01)]) == said
    assert load_warning(None, 2, []) == ""


# ---- what follows from it


def _contender(times: list[float], others_share: float | None, runtime: str, **facts: object) -> LoggedContender:
    usual = {
        "pattern": "1,8,8,2",
        "precision": "float32",
        "layout": "bsf",
        "batch": 40,
        "implementation": OURS,
        "status": OK,
    }
    usual |= {"error": 1e-7, "tolerance": 1e-6, "floor_us": 50.0}
    measurements = [{"us": us, "runs": 10, "others_share": others_share} for us in times]
    return LoggedContender({**usual, **facts}, {"runtime": runtime, "device": "Abacus"}, {}, measurements)


def test_an_unreliable_row_is_listed_and_counts_nowhere() -> None:
    wild = [*[266.0] * 4, *[34159.0] * 6]
    rows = [
        row_of(_contender(QUIET, 0.1, "opencl")),
        row_of(_contender(wild, 0.1, "opencl", implementation="bmm", variant="whole")),
        row_of(_contender([8.0] * 9, 0.1, "opencl", implementation="rewriting", error=None)),
    ]
    assert [(each.median_us, each.doubt) for each in rows[1:]] == [
        (34159.0, "the median is uncertain by 99%"),
        (8.0, ""),
    ]
    assert [each.counts for each in rows] == [True, False, False]
    assert Results(rows, "float32", 40).duel(OURS, ["bmm"], "bsf").patterns == 0
    assert Results(rows, "float32", 40).rewriting_share("bsf") == []
    assert tables.overview(rows).rows == ()
    assert "1 of 3 times are unreliable and count in no table." in tables.overview(rows).note
    assert tables.unreliable(rows).rows == (("1,8,8,2", "40", "float32", "bsf", "bmm", "34159?", "266", rows[1].doubt),)
    for text in (report.markdown(rows), report.page(rows)):
        assert rows[1].doubt in text
        assert "Unreliable times" in text


@pytest.mark.parametrize(
    ("times", "others", "counts"),
    [
        ([100.0, 110.0, 120.0], 0.0, True),  # uncertain by 18 %
        ([100.0, 110.0, 128.0], 0.0, False),  # by 25.5 %
        ([100.0, 110.0, 120.0], 0.5, False),
        ([100.0, 101.0, 102.0], 0.5, False),
    ],
)
def test_rough_times_count_unless_others_disturbed_them(times: list[float], others: float, counts: bool) -> None:
    rows = [
        row_of(_contender(QUIET, 0.0, "opencl")),
        row_of(_contender(times, others, "opencl", implementation="bmm")),
    ]
    assert (bool(rows[1].doubt), rows[1].counts) == (True, counts)
    assert Results(rows, "float32", 40).duel(OURS, ["bmm"], "bsf").patterns == counts
    assert bool(tables.unreliable(rows).rows) == (not counts)
    kind = "are rough: their medians are uncertain by 5 to 25 %" if counts else "are unreliable and count in no table"
    assert f"1 of 2 times {kind}" in tables.unreliable_note(rows)


def test_the_hosts_load_is_no_matter_to_a_gpus_clock() -> None:
    busy = [row_of(_contender(QUIET, 0.6, runtime)) for runtime in ("opencl", "driver", "pycuda")]
    assert [(each.others_share, each.doubt) for each in busy] == [
        (0.6, "other processes took 60% of the CPU time"),
        (0.6, ""),
        (0.6, ""),
    ]


def test_rows_of_older_logs_have_no_load() -> None:
    contender = _contender(QUIET, None, "opencl")
    for each in contender.measurements:
        del each["others_share"]
    assert (row_of(contender).others_share, row_of(contender).doubt) == (None, "")
