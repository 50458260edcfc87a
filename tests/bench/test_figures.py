"""Pictures of a report."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench import report
from ksgen.bench.rows import ResultRow, write_csv
from ksgen.commands import bench
from ksgen.errors import KsgenError
from tests.support.bench_report import processor_rows
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def test_boxes_say_how_many_patterns_they_stand_for() -> None:
    drawn = report.boxes("a", "b", "times as fast", {0.5: [1.0, 2.0, 3.0, 4.0, 5.0], 2.0: 6 * [4.0]})
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"0.5 (5)", "2 (6)", "b (patterns)"} <= set(texts)


def test_no_box_stands_for_a_single_pattern() -> None:
    """Neighbouring numbers with few patterns share a box; so do more numbers than there is room for."""
    drawn = report.boxes("a", "b", "times as fast", {0.5: [1.0], 0.6: 4 * [2.0], 1.0: 5 * [1.0], 2.0: [4.0]})
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"0.5 to 0.6 (5)", "1 to 2 (6)"} <= set(texts)
    counts = [len(values) for _, values in report._merged({float(number): [1.0] for number in range(627)})]
    assert sum(counts) == 627
    assert min(counts) >= report.LEAST_IN_BOX
    assert len(counts) <= report.MOST_BOXES


def test_figure_6_has_one_scale_and_the_better_of_both_layouts(
    rows: list[ResultRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, list[float]]] = {}

    def boxes(
        title: str, label: str, unit: str, groups: dict[float, list[float]], scale: list[float] | None = None, **_: Any
    ) -> str:
        if scale:
            which, _, layout = title.rpartition(", ")
            asked.setdefault(which, {})[layout] = scale
            assert {value for values in groups.values() for value in values} <= set(scale)
        return ""

    monkeypatch.setattr(report, "boxes", boxes)
    report.page(rows)
    start = "Figure 6: ksgen compared with the fastest of"
    assert list(asked) == [f"{start} the paper's five, float16, batch 25088", f"{start} everyone, float16, batch 25088"]
    for scales in asked.values():
        assert list(scales) == ["batch-size-first", "batch-size-last", "best layout of each"]
        assert all(scale == scales["batch-size-first"] for scale in scales.values())


def test_boxes_of_one_scale_have_the_same_numbers() -> None:
    drawn = [report.boxes("a", "b", "c", {1.0: values}, scale=[0.5, 2.0, 20.0]) for values in ([0.5, 2.0], [2.0, 20.0])]
    ticks = [re.findall(r">(0\.5|1|2|5|10|20)</text>", each) for each in drawn]
    assert ticks[0] == ticks[1] == ["0.5", "1", "2", "5", "10", "20"]


def test_the_picture_holds_the_charts_of_the_page(tmp_path: Path) -> None:
    written = tmp_path / "rows.csv"
    write_csv(processor_rows(), written)
    done = CliRunner().invoke(bench.command, ["report", str(written), "--svg", str(tmp_path / "a.svg")])
    assert done.exit_code == 0, done.output
    drawn = (tmp_path / "a.svg").read_text()
    assert drawn == report.picture(processor_rows())
    assert drawn.count('class="floor"') == 2 * 2 * 4  # precisions, layouts, patterns
    assert not (tmp_path / "rows.html").exists()
    with pytest.raises(KsgenError, match=report.LACKS_TIMES):
        report.picture([row(implementation="bmm")])
