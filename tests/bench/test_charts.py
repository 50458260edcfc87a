"""Tests of which charts a file of results has: bars for up to ten jobs, sorted values for more, only of reliable
times.
"""

from dataclasses import replace

from ksgen.bench.report import MOST_BARS, charts
from ksgen.bench.roster import OURS
from ksgen.figures.charts import Bars, Sorted
from ksgen.spec import stratified
from tests.support.bench_report import FOUR
from tests.support.bench_rows import row, rows_of


def test_up_to_ten_patterns_have_a_bar_chart_each() -> None:
    (found,) = charts(FOUR)
    assert found.title == "float32, batch 25088"
    assert {panel.title: panel.times for panel in found.panels if isinstance(panel, Bars)} == {
        "1,48,48,2, bsf": (("bmm", 80.0), ("ksgen", 160.0)),
        "1,48,48,2, bsl": (("ksgen", 50.0), ("bmm", 100.0), ("einsum", 400.0)),
        "1,64,64,4, bsl": (("bmm", 60.0), ("ksgen", 100.0)),  # `dense` is wrong there, and `sparse` failed
    }
    ten = charts(rows_of(stratified(MOST_BARS), ("float32",)))[0]
    assert len(ten.panels) == 2 * MOST_BARS
    assert all(isinstance(panel, Bars) and panel.floor for panel in ten.panels)


def test_more_patterns_have_sorted_speed_ups_and_shares() -> None:
    rows = rows_of(stratified(MOST_BARS + 1), ("float32",))
    (found,) = charts(rows)
    speeds, shares = found.panels
    assert isinstance(speeds, Sorted)
    assert isinstance(shares, Sorted)
    assert (speeds.unit, shares.unit) == ("x", "%")
    assert [len(each.values) for each in (*speeds.series, *shares.series)] == 4 * [MOST_BARS + 1]
    assert all(0 < share <= 100 for each in shares.series for _, share in each.values)


def test_there_is_no_empty_chart() -> None:
    measured = rows_of(stratified(11), ("float32",))
    without_floor = [replace(each, floor_us=None, share_of_floor=None) for each in measured]
    (found,) = charts(without_floor)
    assert [panel.title for panel in found.panels] == ["float32, batch 25088: over PyTorch"]
    assert charts([row(implementation="bmm")]) == []
    assert charts([row(doubt="noise", median_us=1.0)]) == []
    assert charts([]) == []


def layer(name: str, way: str, us: float) -> object:
    return row("2,4,8,1 then 1,8,8,1", way, layer=name, median_us=us, floor_us=5.0)


def test_layers_are_compared_with_pytorchs_and_the_dense_one() -> None:
    times = {"layer": 10.0, "one_launch": 9.0, "torch_structured": 15.0, "bmm": 20.0, "dense": 40.0}
    few = [layer("up", way, us) for way, us in times.items()]
    (found,) = charts(few)
    (panel,) = found.panels
    assert found.title == "layers, float32, batch 25088, batch-size-last"
    assert isinstance(panel, Bars)
    assert (panel.title, panel.floor, [name for name, _ in panel.times]) == (
        "up",
        5.0,
        ["one_launch", "layer", "torch_structured", "bmm", "dense"],
    )
    assert {name for name, _ in panel.times} & panel.own == {"one_launch", "layer"}
    assert OURS not in panel.own
    many = [
        layer(f"layer {number}", way, us + number)
        for number in range(11)
        for way, us in (("layer", 10.0), ("bmm", 20.0), ("torch_structured", 15.0))
    ]
    speeds = charts(many)[0].panels[0]
    assert isinstance(speeds, Sorted)
    assert dict(speeds.series[0].values)["layer 0"] == 1.5
