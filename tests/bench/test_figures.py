"""Pictures of a report."""

import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench import figures, report
from ksgen.bench.rows import Row, write_csv
from ksgen.commands import bench
from ksgen.errors import KsgenError
from tests.support.bench_report import FOUR, processor_rows

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def test_boxes_say_how_many_patterns_they_stand_for() -> None:
    drawn = figures.boxes("a", "b", "times as fast", {0.5: [1.0, 2.0, 3.0], 2.0: [4.0]})
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
    assert {"0.5 (3)", "2 (1)", "b (patterns)"} <= set(texts)


def test_figure_6_has_one_scale_and_the_better_of_both_layouts(rows: list[Row], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, dict[str, list[float]]] = {}

    def boxes(title: str, label: str, unit: str, groups: dict[float, list[float]], scale: list[float] | None = None, **_: Any) -> str:
        if scale:
            which, _, layout = title.rpartition(", ")
            asked.setdefault(which, {})[layout] = scale
            assert {value for values in groups.values() for value in values} <= set(scale)
        return ""

    monkeypatch.setattr(figures, "boxes", boxes)
    report.page(rows)
    start = "Figure 6: ksgen beside the fastest of"
    assert list(asked) == [f"{start} the paper's five, float16, batch 25088", f"{start} everyone, float16, batch 25088"]
    for scales in asked.values():
        assert list(scales) == ["batch-size-first", "batch-size-last", "best layout of each"]
        assert all(scale == scales["batch-size-first"] for scale in scales.values())


def test_boxes_of_one_scale_have_the_same_numbers() -> None:
    drawn = [figures.boxes("a", "b", "c", {1.0: values}, scale=[0.5, 2.0, 20.0]) for values in ([0.5, 2.0], [2.0, 20.0])]
    ticks = [re.findall(r">(0\.5|1|2|5|10|20)</text>", each) for each in drawn]
    assert ticks[0] == ticks[1] == ["0.5", "1", "2", "5", "10", "20"]


def test_a_processors_picture(tmp_path: Path) -> None:
    written = tmp_path / "rows.csv"
    write_csv(processor_rows(), written)
    done = CliRunner().invoke(bench.command, ["report", str(written), "--png", str(tmp_path / "a.png")])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "rows.html").exists()
    assert report.picture(processor_rows()) == report.picture(processor_rows())
    with pytest.raises(KsgenError, match="no speed-up on a processor that can be trusted: there is nothing to draw"):
        report.picture(FOUR)
