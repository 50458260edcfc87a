"""The table of a search: its winner, its order, its reasons and its digits."""

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.commands import tune
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning import report
from ksgen.tuning.job import Job
from ksgen.tuning.report import MOST_ROWS, by_state, microseconds, reasons, sections_of, table_of
from ksgen.tuning.search import Budget, Progress, Tuned
from ksgen.values import counted
from tests.support.tuning_trials import some_trials


def test_a_search_decides_who_won() -> None:
    trials = some_trials()
    decided = trials[3]
    first, second = sections_of(trials, [decided])
    assert first.winner == decided
    assert second.winner == sections_of(trials)[1].winner
    assert (
        first.sentences[2]
        == "Shorter times were seen, but not in the finals, where candidates are measured alternately."
    )
    assert first.summary[4] == f"{decided.family}: {decided.constants}"


@pytest.mark.parametrize("noted", [0, 1])
def test_a_report_computes_no_ratio_from_an_unreliable_time(noted: int) -> None:
    trials = [
        replace(each, median_us=us, floor_us=50.0) for each, us in zip(some_trials(), (200.0, 100.0), strict=False)
    ]
    (sound,) = sections_of(trials)
    assert sound.summary[:3] == ("100", "50%", "2.00")
    assert sound.sentences[0].startswith("2.00 times as fast as the first candidate; the median of 20 blocks")
    trials[noted] = replace(trials[noted], note="clocks moved")
    (section,) = sections_of(trials)
    assert section.summary[:3] == ("100", "" if noted else "50%", "")
    assert section.sentences[0].startswith("The median of 20 blocks")
    assert ("Its time is unreliable: clocks moved." in section.sentences) == bool(noted)
    assert len(report._overview(section)) == len(report._overview(sound)) - noted  # the roofline is a ratio
    cells = [row.cells for row in table_of(section.trials, section.winner).rows]
    assert sum("50%" in row or "25%" in row for row in cells) == 1


@pytest.mark.parametrize(
    ("notes", "marks"),
    [(("", ""), (False, False)), (("clocks moved", ""), (True, False)), (("", "hot"), (False, True))],
)
def test_an_unreliable_time_is_marked_and_gets_no_gain_or_share(
    notes: tuple[str, str], marks: tuple[bool, bool], capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = some_trials()[:2]
    best = replace(first, median_us=200.0, floor_us=100.0, note=notes[0])
    default = replace(second, median_us=300.0, note=notes[1])
    found = Tuned(Job(best.kernel, best.batch), best, default, 2, 2, 1.0, True)
    tune.print_results([found])
    said = capsys.readouterr().out
    assert ("200.0?" in said, "300.0?" in said) == marks
    assert ("1.50x" in said) == (not any(notes))
    assert ("50%" in said) == (not notes[0])
    first_note = next(filter(None, notes), "")
    assert (f"? 1 of 2 times unreliable; the first: {first_note}." in said) == any(notes)
    assert tune.figures(found)["doubt"] == first_note
    assert tune.summary(best).startswith(
        "200.0? us, unreliable: clocks moved, " if notes[0] else "200.0 us, 50% of the floor, "
    )


@pytest.mark.parametrize("floor_us", [None, 201.0])
def test_a_time_without_a_floor_or_below_it_has_no_share(
    floor_us: float | None, capsys: pytest.CaptureFixture[str]
) -> None:
    best = replace(some_trials()[0], median_us=200.0, floor_us=floor_us, note="")
    found = Tuned(Job(best.kernel, best.batch), best, None, 1, 1, 1.0, True)
    assert tune.summary(best) == f"200.0 us, {best.family}: {best.constants}"
    assert tune.figures(found)["share_of_floor"] is None
    tune.print_results([found])
    assert "%" not in capsys.readouterr().out.replace(f"{best.spread:.1%}", "")


def test_each_outcome_is_reported_and_counted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ksgen.paths.wisdom_dir", lambda: Path("wisdom"))
    first, second = some_trials()[:2]
    job = Job(first.kernel, first.batch)
    faster = Tuned(job, replace(first, note=""), replace(second, note=""), 2, 2, 1.0, True)
    default, lost = replace(faster, default=faster.best), replace(faster, is_kept=False)
    unreliable, stopped = replace(faster, best=replace(first, note="clocks moved")), replace(faster, is_complete=False)
    facts = SimpleNamespace(name="Abacus")
    options, engine = SimpleNamespace(budget=Budget()), SimpleNamespace(facts=facts, jobs_at_once=2)
    for results, counts in (
        ([faster, faster], (2, 0, 0, 0, 0)), ([default, default], (0, 2, 0, 0, 0)), ([faster, default], (1, 1, 0, 0,
            0)),
        ([default, lost], (0, 1, 1, 0, 0)), ([lost, lost], (0, 0, 2, 0, 0)), ([unreliable, stopped], (0, 0, 0, 1, 1)),
    ):  # fmt: skip
        tuner: Any = SimpleNamespace(
            engine=engine, run=lambda *_, found=results: found, stop=threading.Event(), options=options
        )
        tune._tune(tuner, [job, job], None, as_json=False)
        said = capsys.readouterr().out
        assert f"2 of 2 kernels tuned on Abacus, batch {first.batch}." in said
        outcomes = (
            "faster than the default: launchers take the new constants from now on.",
            "the default won: launchers keep it.",
            "the earlier entry of wisdom stays, because its time is reliable or shorter.",
            "no winner, because times are unreliable: launchers take the fastest constants until a search on a quiet "
            "machine.",
            "the finals were not finished: launchers take the fastest constants so far, until the search is resumed.",
        )
        for count, outcome in zip(counts, outcomes, strict=True):
            assert (f"{counted(count, 'kernel')}: {outcome}" in said) == (outcome in said) == bool(count)
        assert ("Saved in " in said) == any(tuned.is_kept for tuned in results)
        assert [tune.figures(tuned)["kept"] for tuned in results] == [tuned.is_kept for tuned in results]


@pytest.mark.parametrize(
    ("budget_s", "title"),
    [(None, "1 of 6 kernels tuned in 1:15 of about 7:35"), (60, "1 of 6 kernels tuned in 1:15 of about 3:00")],
)
def test_the_live_table_has_one_clock(budget_s: float | None, title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(tune.time, "monotonic", lambda: now[0])
    table = tune.TuneTable(6, budget_s, at_once=2)
    trials = some_trials()
    for phase, trial in (("done", trials[0]), ("finals", trials[-1])):
        table.say(Progress(Job(trial.kernel, trial.batch), phase, 4, 2, trial, trial))
    now[0] += 75.9
    shown = table._table()
    assert shown.title == title
    assert [str(column.header) for column in shown.columns] == ["kernel", "best, us", "of floor", "done", "left"]
    assert [list(column.cells) for column in shown.columns][-1] == ["2", "finals"]


def test_the_table_lists_what_was_measured_first() -> None:
    trials = some_trials()[12:24]
    space = replace(trials[1], state="wrong", median_us=None, reason="off\n by 1")
    table = table_of([trials[0], space, *trials[2:]], trials[5])
    assert [row.state for row in table.rows] == ["measured"] * 9 + ["wrong"] + ["pruned"] * 2
    assert [row.is_winner for row in table.rows].count(True) == 1
    times = [float(row.cells[table.titles.index("µs")]) for row in table.rows[:9]]
    assert times == sorted(times)
    assert table.rows[9].cells[-1] == "wrong: off by 1"
    assert all(len(row.cells) == len(table.titles) for row in table.rows)
    shared = [part.partition("=")[0] for part in table.throughout.split(", ") if part]
    assert sorted([*shared, *table.titles]) == sorted([*table_titles(), *vars(trials[0].constants)])
    many = table_of([trials[0]] * (MOST_ROWS + 5), None)
    assert (len(many.rows), many.left_out) == (MOST_ROWS, 5)


def table_titles() -> list[str]:
    return ["#", "µs", "spread", "blocks", "of floor", "predicted µs", "registers", "shared bytes", "fate"]


def test_columns_without_a_value_are_left_out() -> None:
    bare = [replace(each, registers=None, predicted_us=None) for each in some_trials()[:5]]
    assert not {"registers", "predicted µs"} & set(table_of(bare, None).titles)


def test_reasons_are_counted_and_short() -> None:
    first = some_trials(4)[0]
    pruned = [replace(first, state="pruned", median_us=None, reason=f"reason {number % 10}") for number in range(23)]
    assert reasons(pruned)[0] == "3 pruned: reason 0"
    assert reasons(pruned)[-1] == "4 for other reasons"
    assert len(reasons(pruned)) == 9
    (long,) = reasons([replace(pruned[0], reason="word " * 1000)])
    assert len(long) < 320
    assert by_state(pruned) == "23 pruned"


def test_figures_have_three_digits() -> None:
    assert [microseconds(time) for time in (0.12345, 8.062, 23.0, 99.96, 100.4, 41445.3)] == [
        "0.123",
        "8.06",
        "23",
        "100",
        "100",
        "41445",
    ]


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_results_are_whole_in_eighty_columns_and_a_line_each_where_they_are_piped(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Figures stand whole in their columns; a long name takes several lines of a narrow terminal."""
    factors = (Pattern(16, 64, 64, 1), Pattern(1, 192, 64, 16))
    kernel = KernelSpec((factors,) * 3, "bfloat16", "bsf", Epilogue(True, "gelu", True), between="silu")
    best, default = replace(some_trials()[0], median_us=12345.6), replace(some_trials()[1], median_us=23456.7)
    monkeypatch.setenv("COLUMNS", "80")
    if is_terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "dumb")
    tune.print_results([Tuned(Job(kernel, 1568), best, default, 421, 421, 1.0, True)])
    lines = capsys.readouterr().out.splitlines()
    rows = [line for line in lines if "12345.6" in line]
    assert len(rows) == 1
    assert all(each in rows[0] for each in ("23456.7", "1.90x", "421"))
    name = tune.name_of(Job(kernel, 1568))
    if is_terminal:
        assert max(map(len, lines)) <= 80
        assert "".join(line[: rows[0].index("23456.7")].strip() for line in lines if line.strip()).endswith(
            name.replace(" ", "")[-8:]
        )
    else:
        assert rows[0].strip().startswith(name)
