"""When sparse products pay: by density, and by the number of products after the weights' conversion."""

from dataclasses import replace
from typing import Any

import pytest

from ksgen.bench import report
from ksgen.bench.comparison import Results
from ksgen.bench.payoff import by_density, conversions, crossing
from ksgen.bench.roster import OURS
from ksgen.bench.rows import ResultRow
from ksgen.bench.tables import NONE
from ksgen.pattern import Pattern
from ksgen.spec import stratified
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def against_dense(dense_us: Any, count: int = 60, **values: Any) -> list[ResultRow]:
    """Rows of ours, which take 100 us, and of a dense product."""
    found = []
    for pattern in stratified(count):
        found += [row(str(pattern), OURS, **values)]
        found += [row(str(pattern), "dense", median_us=dense_us(pattern), **values)]
    return found


# ---- density


def test_the_density_at_which_ours_stops_paying_is_found() -> None:
    rows = against_dense(lambda pattern: 100 * (0.25 / pattern.density) ** 0.8)
    (line,) = by_density(rows).rows
    assert line[:4] == ("25088", "float32", "bsl", "time")
    assert line[-1] == "25 %"
    above = [(0.25 / each.density) ** 0.8 for each in stratified(60) if each.density > 1 / 4]
    assert line[4].startswith("x")
    assert line[4].endswith(f"x{min(above):.2f} ({len(above)})")
    assert sum(int(cell.partition("(")[2].rstrip(")")) for cell in line[4:8]) == 60


def test_each_density_is_in_its_class_and_a_bound_in_the_lower_one() -> None:
    rows = []
    for pattern, us in (("1,8,8,3", 150.0), ("2,8,8,2", 400.0), ("4,8,8,4", 800.0), ("1,8,8,64", 900.0)):
        rows += [row(pattern), row(pattern, "dense", median_us=us)]
    (line,) = by_density(rows).rows
    assert line[4:8] == ("x1.50, x1.50 (1)", "x4.00, x4.00 (1)", "x8.00, x8.00 (1)", "x9.00, x9.00 (1)")


def test_a_few_wrong_times_do_not_move_the_crossing() -> None:
    pairs = [(Pattern(1, 8, 8, d), d / 8) for d in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)]
    assert crossing(pairs) == pytest.approx(1 / 8)
    pairs[0], pairs[-1] = (pairs[0][0], 1000.0), (pairs[-1][0], 0.001)
    assert crossing(pairs) == pytest.approx(1 / 8, rel=0.3)


def test_without_a_slope_there_is_no_crossing() -> None:
    assert crossing([(Pattern(1, 8, 8, 2), 3.0), (Pattern(2, 4, 8, 1), 2.0)]) is None  # equal densities
    assert crossing([(Pattern(1, 8, 8, d), 1 / d) for d in (1, 2, 4)]) is None  # the ratio grows with the density
    (line,) = by_density(against_dense(lambda pattern: 300 / pattern.density)).rows
    assert line[-1] == "any density"


def test_without_a_dense_product_its_floor_counts() -> None:
    values = {"ceiling_flop_per_s": 1e12, "ceiling_byte_per_s": 1e11, "batch": 1000}
    rows = [row("1,100,100,4", **values), row("1,100,100,4", "bmm", median_us=500.0, **values)]
    rows += [row("1,100,100,4", arithmetic="tf32x3", median_us=80.0, **values | {"ceiling_flop_per_s": 9e12})]
    (line,) = by_density(rows).rows
    assert line[3] == "floor"
    assert line[5] == "x4.00, x4.00 (1)"  # 2 * 1000 * 400 * 400 operations take 320 us
    (line,) = by_density([replace(each, ceiling_byte_per_s=2.4e9) for each in rows]).rows
    assert line[5] == "x20.00, x20.00 (1)"  # 4 * (1000 * 800 + 400 * 400) bytes take 1600 us
    assert by_density([replace(each, ceiling_flop_per_s=None) for each in rows]).rows == ()
    assert by_density([replace(each, precision="float8") for each in rows]).rows == ()  # of another version


# ---- conversion


def converted() -> list[ResultRow]:
    times = {OURS: (10.0, 40.0), "bmm": (40.0, 20.0), "sparse": (90.0, 1000.0), "einsum": (50.0, 0.0)}
    rows = [row("1,8,8,2", name, median_us=us, conversion_us=own) for name, (us, own) in times.items()]
    return [*rows, row("1,8,8,2", "layer", median_us=12.0)]


def test_a_conversion_stands_next_to_the_time_and_is_paid_after_some_products() -> None:
    table = conversions(Results(converted(), "float32", 25088))
    assert {line[1]: line[2:] for line in table.rows} == {
        OURS: ("1", "0.01", "0.04", "4", "1"),
        "bmm": ("1", "0.04", "0.02", "0.5", "2"),
        "sparse": ("1", "0.09", "1", "11.1", "never"),
        "einsum": ("1", "0.05", "0", "0", NONE),
        "layer": ("1", "0.012", NONE, NONE, NONE),
    }


def test_rows_of_older_files_have_no_conversions() -> None:
    old = [replace(each, conversion_us=None) for each in converted()]
    assert conversions(Results(old, "float32", 25088)).rows == ()
    assert "Conversion of weights" not in report.markdown(old)


def test_the_report_shows_both_for_products_and_layers() -> None:
    layers = [replace(each, layer="up") for each in converted()]
    rows = [*converted(), *layers, row("1,8,8,2", "dense", median_us=80.0)]
    text, page = report.markdown(rows), report.page(rows)
    for title, count in (("Speed against density", 1), ("Conversion of weights, float32, batch 25088", 2)):
        assert (text.count(f"### {title}"), page.count(title)) == (count, count)
    assert text.count("### Conversion of weights, float32, batch 25088, batch-size-last\n") == 1


def test_a_table_of_conversions_names_one_layout_and_groups() -> None:
    results = Results(converted(), "float32", 25088)
    assert conversions(results).title == "Conversion of weights, float32, batch 25088"
    title = "Conversion of weights, float32, batch 25088, batch-size-last, groups"
    assert conversions(results, "bsl", is_group=True).title == title
