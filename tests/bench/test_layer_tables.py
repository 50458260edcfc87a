"""Tests of reports on layers: tables of each method's time relative to one launch."""

import pytest

from ksgen.bench.roster import LIBRARY_METHODS, OTHER_METHODS, WHOLE
from ksgen.bench.rows import ResultRow, kinds_of
from ksgen.bench.tables import each_layer, headlines, layers_summary, standings, unreliable, wholes
from tests.support.bench_rows import row


def layer_row(
    name: str, us: float | None, layer: str = "up", pattern: str = "2,4,8,1 then 1,8,8,1", **more: object
) -> ResultRow:
    return row(pattern, name, layer=layer, median_us=us, batch=16, **more)


ROWS = [
    layer_row("one_launch", 10.0, family="vector", share_of_floor=0.5),
    layer_row("one_launch", 8.0, family="amx", arithmetic="bf16x6", share_of_floor=0.4),
    layer_row("bmm", 16.0),
    layer_row("dense", 4.0),
    layer_row("one_launch", 10.0, "down"),
    layer_row("bmm", 90.0, "down"),
    layer_row("dense", 1.0, "down", doubt="other processes took 90% of the CPU time"),
    layer_row("each_factor", None, "down", status="failed", reason="why"),
    layer_row("layer", 12.0, "up, 2 side by side", "2,4,8,1 then 1,8,8,1 and 2,4,8,1 then 1,8,8,1"),
    layer_row("einsum", 36.0, "up, 2 side by side", "2,4,8,1 then 1,8,8,1 and 2,4,8,1 then 1,8,8,1"),
    layer_row("pieces", 18.0, "up, 2 side by side", "2,4,8,1 then 1,8,8,1 and 2,4,8,1 then 1,8,8,1"),
    layer_row("one_launch", 10.0, "up, 2 side by side", "2,4,8,1 then 1,8,8,1 and 2,4,8,1 then 1,8,8,1"),
    layer_row("each_layer", 15.0, "up, 2 side by side", "2,4,8,1 then 1,8,8,1 and 2,4,8,1 then 1,8,8,1"),
]
TRAINING = [
    layer_row("one_launch", None, step="training", status="unsupported", reason="no gradients"),
    layer_row("layer", 20.0, step="training"),
    layer_row("bmm", 50.0, step="training"),
    layer_row("dense", 40.0, step="training"),
    layer_row("layer", 20.0, "down", step="training"),
    layer_row("authors", 10.0, "down", step="training"),
    layer_row("layer", 1.0, step="training", doubt="noise"),
]


def test_layers_in_short() -> None:
    assert layers_summary(ROWS).rows == (
        ("float32 bsl 16", "bmm", "2 of 2", "x4.24", "x2.00", "x9.00"),
        ("", "dense", "1 of 2", "x0.50", "x0.50", "x0.50"),
        ("float32 bsl 16 groups", "each_layer", "1 of 1", "x1.50", "x1.50", "x1.50"),
        ("", "layer", "1 of 1", "x1.20", "x1.20", "x1.20"),
        ("", "einsum", "1 of 1", "x3.60", "x3.60", "x3.60"),
        ("", "pieces", "1 of 1", "x1.80", "x1.80", "x1.80"),
    )


def test_headlines_are_of_a_layer_over_the_best_of_all_others() -> None:
    group = (
        "forward, groups",
        "float32",
        "bsl",
        "16",
        "1 of 1",
        "x1.50",
        "x1.50",
        "x1.50",
        "100 %",
        "up, 2 side by side",
        *3 * ("x1.80",),
    )
    assert headlines(ROWS).rows == (group,)
    steps = (
        "training steps", "float32", "bsl", "16", "2 of 2", "x1.00", "x0.50", "x2.00", "50 %", "down", *3 * ("-",),
    )  # fmt: skip
    assert headlines([*TRAINING, *ROWS]).rows == (group, steps)  # forward first


def test_headlines_of_products_have_all_contenders_and_the_kernel() -> None:
    times = (("ksgen", 8.0), ("layer", 10.0), ("bmm", 50.0), ("scipy", 20.0))
    (line,) = headlines([row("1,8,8,2", name, median_us=us, batch=16) for name, us in times]).rows
    assert line[:6] == ("forward, patterns", "float32", "bsl", "16", "1 of 1", "x2.00")
    assert line[9:] == ("1,8,8,2", "x2.50", "x2.50", "x2.50")


def test_a_contenders_times_are_compared_with_a_layers_and_it_is_counted_where_it_is_the_fastest() -> None:
    products = [
        row(pattern, name, median_us=us, batch=batch, layout=layout)
        for pattern, batch, layout, times in (
            ("1,8,8,2", 16, "bsl", (("ksgen", 8.0), ("layer", 10.0), ("bmm", 40.0), ("scipy", 20.0))),
            ("1,8,8,2", 1, "bsf", (("layer", 10.0), ("bmm", 5.0), ("rewriting", 1.0))),
            ("1,4,4,2", 1, "bsf", (("layer", 10.0), ("bmm", 20.0))),
        )
        for name, us in times
    ]
    products.append(row("1,4,4,2", "scipy", median_us=19.0, quartile1_us=9.0, batch=1, layout="bsf", doubt="noise"))
    table = standings([*products, *TRAINING, *ROWS])
    # the last pattern counts for `bmm` alone: an unreliable time may be the fastest
    assert table.columns == (
        "", "patterns, forward, float32", "layers, forward, float32", "layers, training steps, float32",
    )  # fmt: skip
    assert table.rows == (
        ("ksgen", "x0.80 (1 of 1)", "-", "-"),
        ("one_launch", "-", "x0.83 (1 of 1)", "-"),
        ("each_layer", "-", "x1.25 (0 of 1)", "-"),
        ("layer", "x1.00 (0 of 3)", "x1.00 (0 of 1)", "x1.00 (1 of 2)"),
        ("bmm", "x1.59 (1 of 3)", "-", "x2.50 (0 of 1)"),
        ("einsum", "-", "x3.00 (0 of 1)", "-"),
        ("dense", "-", "-", "x2.00 (0 of 1)"),
        ("pieces", "-", "x1.50 (0 of 1)", "-"),
        ("scipy", "x2.00 (0 of 1)", "-", "-"),
        ("authors", "-", "-", "x0.50 (1 of 1)"),
    )


def test_headlines_leave_out_layers_where_an_unreliable_time_may_be_the_best() -> None:
    rows = [
        layer_row("layer", 10.0),
        layer_row("bmm", 30.0),
        layer_row("views", 32.0, fastest_us=1.0, quartile1_us=30.0, doubt="noise"),
        layer_row("dense", 32.0, quartile1_us=1.0, error=1.0, doubt="noise"),  # a wrong result
        layer_row("each_factor", 32.0, quartile1_us=1.0, doubt="noise"),  # one of ksgen's
        layer_row("layer", 10.0, "down"),
        layer_row("bmm", 20.0, "down"),
        layer_row("views", 25.0, "down", quartile1_us=19.0, doubt="noise"),
    ]
    ((*_, count, mean, least, most, share, name, _, _, _),) = headlines(rows).rows
    assert (count, mean, least, most, share, name) == ("1 of 2", "x3.00", "x3.00", "x3.00", "100 %", "up")
    assert headlines(rows[5:]).rows == ()


def test_training_steps_are_compared_with_a_layers() -> None:
    assert layers_summary(TRAINING).rows == (
        ("float32 bsl 16 training", "bmm", "1 of 2", "x2.50", "x2.50", "x2.50"),
        ("", "authors", "1 of 2", "x0.50", "x0.50", "x0.50"),
        ("", "dense", "1 of 2", "x2.00", "x2.00", "x2.00"),
    )
    assert layers_summary([*ROWS, *TRAINING]).rows == layers_summary(ROWS).rows + layers_summary(TRAINING).rows
    (table,) = each_layer(TRAINING)
    assert table.title == "Layers, float32, batch-size-last, batch 16, training steps"
    assert table.columns == ("layer", "layer, us", "of the floor", "by", "bmm", "authors", "dense")
    assert table.rows[0][:5] == ("up: 2,4,8,1 then 1,8,8,1", "20", "-", "float32", "x2.50")
    assert [each.title for each in each_layer([*TRAINING, *ROWS])][-1] == table.title


def test_layer_by_layer() -> None:
    alone, groups = each_layer(ROWS)
    assert alone.title == "Layers, float32, batch-size-last, batch 16"
    assert alone.columns == (
        "layer",
        "one launch, us",
        "of the floor",
        "by",
        "each_factor",
        "each_layer",
        "layer",
        *OTHER_METHODS,
        *LIBRARY_METHODS,
    )
    none = ("-",) * (len(OTHER_METHODS) - 2)  # of all between bmm and dense
    after = ("-",) * len(LIBRARY_METHODS)
    first = ("up: 2,4,8,1 then 1,8,8,1", "8", "40 %", "amx, bf16x6", "-", "-", "-", "x2.00", *none, "x0.50", *after)
    assert alone.rows[0] == first
    assert alone.rows[2] == ("geometric mean", "", "", "", "-", "-", "-", "x4.24", *none, "x0.50", *after)
    assert [line[0] for line in alone.rows[2:]] == ["geometric mean", "median", "least", "most"]
    assert groups.title == "Layers, float32, batch-size-last, batch 16, groups"


def test_a_report_has_products_and_layers_apart() -> None:
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")
    from ksgen.bench import report

    times = (("ksgen", 3.0), ("layer", 4.0), ("bmm", 6.0))
    text = report.markdown([*ROWS, *(row("1,48,48,2", name, median_us=us) for name, us in times)])
    assert "| forward, patterns | float32 | bsl | 25088 | 1 of 1 | x1.50 |" in text
    assert "| bmm | x1.50 (0 of 1) | - |" in text
    assert "## Layers" in text
    assert "| up: 2,4,8,1 then 1,8,8,1 | 8 | 40 % |" in text
    assert "| 25088 | float32 | bsl | 1 | 100 % | x2.00 |" in text  # of the product alone
    assert "other processes took 90%" in text
    page = report.page([*ROWS, *TRAINING])
    assert 'id="layers"' in page
    assert 'id="layers-training-steps"' in page
    assert "layers, float32, batch 16, training steps, batch-size-last" in page  # charts
    assert "Table 8" not in page
    assert "| float32 | layer, training | float32 | 3 |" in report.markdown(TRAINING)  # of errors
    assert "| one_launch, training | unsupported | 1 | such as no gradients |" in report.markdown(TRAINING)


def test_whole_models_are_compared_with_their_layers() -> None:
    def whole(name: str, us: float, **changes: object) -> ResultRow:
        return row(WHOLE, name, layer="vit-s16", layout="bsf", batch=8, median_us=us, **changes)

    rows = [
        whole("layer", 2000.0),
        whole("bmm", 3000.0),
        whole("dense", 1000.0, doubt="noise", quartile1_us=900.0),
        whole("dense", 5000.0, step="training"),  # no time of ours
        whole("layer", 4000.0, precision="bfloat16", step="training"),
        whole("dense", 2000.0, precision="bfloat16", step="training"),
    ]
    table = wholes(rows)
    assert table.columns == ("model", "step", "precision", "sequences", "layer, ms", "bmm", "einsum", "dense")
    assert table.rows == (
        ("vit-s16", "forward", "float32", "8", "2", "x1.50", "-", "-"),
        ("vit-s16", "training steps", "bfloat16", "8", "4", "-", "-", "x0.50"),
    )
    (line,) = unreliable(rows).rows
    assert line[0] == "vit-s16"


def test_training_steps_of_patterns_have_lines_of_their_own() -> None:
    patterns = [
        row("1,8,8,2", name, layout="bsl", batch=16, step="training", median_us=us)
        for name, us in (("layer", 10.0), ("bmm", 30.0))
    ]
    kinds = kinds_of([*patterns, *TRAINING, *ROWS, row(), row(WHOLE, layer="vit-s16")])
    assert [len(each) for each in kinds] == [1, 2, len(TRAINING) + len(ROWS), 1]
    lines = headlines([*kinds.layers, *kinds.trained]).rows
    assert lines[:-1] == headlines([*TRAINING, *ROWS]).rows
    assert lines[-1][:8] == ("training steps, patterns", "float32", "bsl", "16", "1 of 1", "x3.00", "x3.00", "x3.00")
    (table,) = each_layer(kinds.trained)
    assert table.title == "Patterns, float32, batch-size-last, batch 16, training steps"
    assert table.columns == ("pattern", "layer, us", "of the floor", "by", "bmm")
