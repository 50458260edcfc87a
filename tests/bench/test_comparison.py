"""Duels between contenders: ratios and their spread, checked by hand."""

from typing import Any

import pytest

from ksgen.bench import tables
from ksgen.bench.comparison import BEST, UNTUNED, Duel, Results, group_by
from ksgen.bench.roster import OURS
from ksgen.pattern import Pattern
from tests.support.bench_report import FOUR, lines
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def test_a_duel_by_hand() -> None:
    results = Results(FOUR, "float32", 25088)
    assert results.duel(OURS, ["bmm", "einsum"], "bsl") == Duel((2.0, 0.6))
    assert results.duel(OURS, ["dense", "sparse"], "bsl") == Duel(())  # nothing that counts
    assert results.duel(UNTUNED, ["bmm"], "bsl") == Duel((100 / 120, 0.6))
    assert results.duel(OURS, ["bmm"], BEST) == Duel((80 / 50, 0.6))  # each in the better of its layouts
    assert results.layouts_ratio("bmm") == [(Pattern(1, 48, 48, 2), 0.8)]
    assert results.layouts_ratio(OURS) == [(Pattern(1, 48, 48, 2), 3.2)]
    assert results.best["bsl"]["1,48,48,2"][OURS].variant == "tuned"
    assert results.names == [OURS, "bmm", "einsum"]
    duel = Duel((2.0, 0.6, 4.0, 1.0))
    assert (duel.patterns, duel.wins, duel.share, duel.factor_where_faster, duel.factor) == (4, 2, 0.5, 3.0, 1.5)
    assert (Duel(()).share, Duel(()).factor_where_faster, Duel((0.5,)).factor_where_faster) == (None, None, None)
    assert Results(FOUR, "float16", 25088).rows == Results(FOUR, "float32", 1).rows == []


def test_an_unreliable_time_decides_nothing() -> None:
    noisy = {"doubt": "other processes took 50% of the CPU time"}
    part: dict[str, Any] = {"error": None, "tolerance": None}
    some = [
        row("1,48,48,2", OURS, median_us=100.0),
        row("1,48,48,2", OURS, median_us=50.0, **noisy),
        row("1,48,48,2", "bmm", median_us=200.0),
        row("1,48,48,2", "rewriting", median_us=40.0, **part, **noisy),
    ]
    results = Results(some, "float32", 25088)
    assert results.duel(OURS, ["bmm"], "bsl") == Duel((2.0,))
    assert results.rewriting_share("bsl") == []


def test_rewriting_and_energy_by_hand() -> None:
    part: dict[str, Any] = {"error": None, "tolerance": None}
    some = [
        row("1,48,48,2", "bmm", median_us=100.0, joule=3.0),
        row("1,48,48,2", "rewriting", median_us=40.0, **part),
        row("1,48,48,2", OURS, joule=2.5),
        row("1,48,48,2", OURS, layout="bsf", joule=1.5),
        row("1,48,48,2", "einsum", joule=1.0, error=0.1),  # wrong
    ]
    results = Results(some, "float32", 25088)
    assert results.rewriting_share("bsl") == [(Pattern(1, 48, 48, 2), 0.4)]
    assert results.energy_ratios(OURS, ["bmm", "einsum"]) == [(Pattern(1, 48, 48, 2), 0.5)]
    assert group_by(results.rewriting_share("bsl"), lambda each: each.d) == {2: [0.4]}
    assert lines(tables.rewriting(results)) == {"bsl": ("0.0417", "1", "40 %", "40 %")}
    assert "up to 45 % (Figure 4)" in tables.rewriting(results).note
    assert tables.energy(some).rows[0] == ("25088", "float32", "bmm and einsum", "1", "x0.50", "100 %", "x0.84, 72 %")
