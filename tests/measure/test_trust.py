"""Which figures are trusted, by invented measurements and loads. Nothing is timed."""

import pytest

from ksgen.bench import report, tables
from ksgen.bench.comparison import Results
from ksgen.bench.log import Contender
from ksgen.bench.roster import OURS
from ksgen.bench.rows import OK, row_of
from ksgen.measure import trust
from ksgen.measure.trust import Counts, doubt, doubt_of_ratio, load_warning, marked, others_between, said, told

QUIET = [100.0, 101, 102, 103, 104, 105, 106, 107, 108, 130]


@pytest.mark.parametrize(
    ("measured", "others", "says"),
    [
        (QUIET, None, ""),
        (QUIET, 0.25, ""),
        (QUIET, 0.26, "others took 26% of the processors"),
        ([266.0, 33000, 34159, 34159, 35000], None, "the median is 128 times the fastest"),
        ([100.0, 100, 149, 149, 149], None, "the quartiles are 33% of the median apart"),
        ([100.0, 151, 151, 151], None, "the median is 1.51 times the fastest"),
        ([100.0, 100, 110, 119, 119], None, ""),
        ([8.0, 9, 10, 12, 13], None, ""),  # a short one, with its jitter
        ([8.0, 9, 13.1, 13.2, 14], None, "the median is 1.64 times the fastest"),
        ([123.0], None, ""),
        ([], 0.9, ""),
    ],
)
def test_a_figure_is_doubted_by_its_spread_and_by_the_load(measured: list[float], others: float | None, says: str) -> None:
    assert doubt(measured, others) == says


def test_ratios_have_no_jitter() -> None:
    assert doubt_of_ratio([0.9, 0.95, 1.0, 1.0]) == ""
    assert doubt_of_ratio([0.04, 0.9, 3.41, 11.62]) == "the median is 53.9 times the fastest"
    assert doubt_of_ratio([1.0, 1.0], 0.5) == "others took 50% of the processors"


def test_what_others_took_is_all_that_is_not_our_own() -> None:
    before = Counts(10.0, 100.0, 5.0)
    assert others_between(before, Counts(12.0, 104.0, 6.0), 2) == 0.75
    assert others_between(before, Counts(12.0, 101.0, 6.5), 2) == 0.0  # counts go on by ticks
    assert others_between(before, Counts(12.0, 110.0, 5.0), 2) == 1.0


def test_a_look_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([Counts(0, 0, 0), Counts(0.1, 0.1, 0), Counts(1, 1, 0), Counts(1.1, 1.1, 0)])
    monkeypatch.setattr(trust, "counts", lambda: next(told))
    monkeypatch.setattr(trust.os, "cpu_count", lambda: 2)
    watch = trust.Watch()
    assert [watch.others_share() for _ in range(3)] == [None, 0.5, 0.5]


def test_a_figure_in_doubt_is_marked_and_the_first_doubt_is_told() -> None:
    assert (marked("12 us", ""), marked("12 us", "others took 50% of the processors")) == ("12 us", "12 us?")
    assert (said("12 us", ""), said("12 us", "others took half")) == ("12 us", "12 us? (others took half)")
    assert told(["", ""]) == ""
    doubts = ["", "others took 50% of the processors", "the median is 2 times the fastest"]
    assert told(doubts) == "? 2 of 3 times cannot be trusted; the first: others took 50% of the processors."
    assert told(doubts[1:2], "ratio") == "? 1 of 1 ratio cannot be trusted; the first: others took 50% of the processors."


def test_nothing_is_doubted_where_the_system_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trust, "_PROC", trust.Path("/nowhere"))
    assert trust.counts() is None
    assert trust.Watch().others_share() is None
    assert trust.look() == ""


def test_a_busy_machine_is_told_once_with_who_keeps_it_busy() -> None:
    assert load_warning(0.2, 2, [("cc1plus", 0.4)]) == ""
    said = "others keep 1.4 of 2 processors busy (cc1plus 0.9, python 0.5): times may say nothing, and those in doubt are marked"
    assert load_warning(0.7, 2, [("cc1plus", 0.9), ("python", 0.5), ("sh", 0.01)]) == said
    assert load_warning(None, 2, []) == ""


# ---- what follows from it


def _contender(times: list[float], others_share: float | None, runtime: str, **facts: object) -> Contender:
    usual = {"pattern": "1,8,8,2", "precision": "float32", "layout": "bsf", "batch": 40, "implementation": OURS, "status": OK}
    usual |= {"error": 1e-7, "tolerance": 1e-6, "floor_us": 50.0}
    measurements = [{"us": us, "runs": 10, "others_share": others_share} for us in times]
    return Contender({**usual, **facts}, {"runtime": runtime, "device": "Abacus"}, {}, measurements)


def test_a_row_in_doubt_stands_there_and_counts_nowhere() -> None:
    wild = [266.0, *[34159.0] * 9]
    rows = [
        row_of(_contender(QUIET, 0.1, "opencl")),
        row_of(_contender(wild, 0.1, "opencl", implementation="bmm", variant="whole")),
        row_of(_contender([8.0] * 9, 0.1, "opencl", implementation="rewriting", error=None)),
    ]
    assert [(each.median_us, each.doubt) for each in rows[1:]] == [(34159.0, "the median is 128 times the fastest"), (8.0, "")]
    assert [each.counts for each in rows] == [True, False, False]
    assert Results(rows, "float32", 40).duel(OURS, ["bmm"], "bsf").patterns == 0
    assert Results(rows, "float32", 40).rewriting_share("bsf") == []
    assert tables.overview(rows).rows == ()
    assert "1 of 3 times cannot be trusted, and count in no table." in tables.overview(rows).note
    assert tables.doubted(rows).rows == (("1,8,8,2", "40", "float32", "bsf", "bmm", "34159?", "266", rows[1].doubt),)
    for text in (report.markdown(rows), report.page(rows)):
        assert rows[1].doubt in text
        assert "Times that cannot be trusted" in text


def test_the_hosts_load_is_no_matter_to_a_gpus_clock() -> None:
    busy = [row_of(_contender(QUIET, 0.6, runtime)) for runtime in ("opencl", "driver", "pycuda")]
    assert [(each.others_share, each.doubt) for each in busy] == [(0.6, "others took 60% of the processors"), (0.6, ""), (0.6, "")]


def test_rows_of_older_logs_have_no_load() -> None:
    contender = _contender(QUIET, None, "opencl")
    for each in contender.measurements:
        del each["others_share"]
    assert (row_of(contender).others_share, row_of(contender).doubt) == (None, "")
