"""Tests of reports: duels, tables next to the paper's numbers, rules that predict the gain, the page and Markdown."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from click.testing import CliRunner

from ksgen.bench import report, tables
from ksgen.bench.roster import LAYER, ONE_LAUNCH, OTHERS, OURS, TRAINING, WHOLE
from ksgen.bench.rows import ResultRow, write_csv
from ksgen.commands import bench
from ksgen.errors import KsgenError
from ksgen.measure.roofline import NO_FLOOR
from ksgen.spec import stratified
from tests.support.bench_report import FOUR, processor_rows
from tests.support.bench_rows import row, rows_of

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


@pytest.fixture(scope="module")
def page(rows: list[ResultRow]) -> str:
    return report.page(rows)


class _Page(HTMLParser):
    """What a page holds, and whether every element is closed."""

    VOID = frozenset({"meta", "br", "link", "img", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("src", "href", "xlink:href") and value and not value.startswith("#"):
                self.outside.append(value)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}>"


@pytest.mark.slow
def test_the_page_stands_on_its_own(page: str) -> None:
    parsed = _Page()
    parsed.feed(page)
    assert parsed.open == []
    assert parsed.outside == []
    assert len(parsed.ids) == len(set(parsed.ids))  # figures of one page share no names
    assert "script" not in parsed.tags
    for url in re.findall(r"url\((.*?)\)", page):
        assert url.startswith("#")


def test_the_page_holds_what_the_issue_asks_for(page: str) -> None:
    titles = re.findall(r'aria-label="(.*?)"', page)
    for start in (
        "Figure 4",
        "Figure 6",
        "Figure 7",
        "Figures 9 to 17",
        "float16, batch 25088: over PyTorch",
        "float16, batch 25088: of the floor",
    ):
        assert any(title.startswith(start) for title in titles), start
    for name in OTHERS:
        assert f"Figures 9 to 17: ksgen compared with {name}, float16, batch 25088, batch-size-last" in titles
    for title in (
        "Table 3, float16",
        "Table 5, float16",
        "Table 8, float16",
        "Share of the floor in per cent",
        "Errors against float64",
        "Layouts",
    ):
        assert title in page
    assert "87 %, Figure 13" in page
    assert '<td style="--share: ' in page
    assert "prefers-color-scheme: dark" in page
    assert "@media print" in page


def parts_of(rows: list[ResultRow]) -> dict[str, str]:
    """All tables and figures of a report that hold one batch size, by section of the page and title of the table."""
    page, text = report.page(rows), report.markdown(rows)
    sections = re.findall(r'<section id="([^"]*-batch-[^"]*)">(.*?)</section>', page, re.DOTALL)
    tables = re.findall(r"^### ([^\n]*, batch [^\n]*)\n(.*?)(?=^##|\Z)", text, re.DOTALL | re.MULTILINE)
    shown = re.findall(r'<h3>([^<]*)</h3>\n(<div class="charts">.*?</div>)', page, re.DOTALL)
    return {**dict(sections), **dict(tables), **{f"charts: {title}": drawn for title, drawn in shown}}


def lines_with_batch(rows: list[ResultRow]) -> set[str]:
    """Lines of all other tables that begin with a batch size, but those of layers."""
    batches = {str(each.batch) for each in rows}
    return {line for line in report.markdown(rows).splitlines() if line.split(" | ")[0].strip("| ") in batches}


def test_no_figure_compares_times_of_different_batch_sizes() -> None:
    """Tables and figures of one batch size are the same, whatever else the file holds."""
    ways = ("one_launch", "each_factor", "dense")
    first = [*rows_of(stratified(6), ("float32",)), *(row("2,4,8,1", way, layer="up", median_us=9.0) for way in ways)]
    fast = [replace(each, batch=977, median_us=each.median_us and each.median_us / 1000) for each in first]
    fast = [
        replace(each, joule=each.joule and each.joule / 50, runtime="native")
        for each in fast
        if each.implementation != "strided"
    ]
    apart, mixed = {**parts_of(fast), **parts_of(first)}, parts_of([*first, *fast])
    assert set(mixed) == set(apart)
    for name, text in apart.items():
        assert mixed[name] == text, name
    assert lines_with_batch([*first, *fast]) == lines_with_batch(first) | lines_with_batch(fast)
    assert sum("<svg" in text for text in mixed.values()) == 4  # of two batch sizes, charts of products and of layers
    assert {line.split(" | ")[0] for line in lines_with_batch([*first, *fast])} == {"| 977", "| 25088"}


def test_the_first_picture_stands_above_all_tables(page: str) -> None:
    for text in (page, report.page(FOUR), report.page(processor_rows())):
        body = text[text.index("<h1>") :]
        assert 0 < body.index("<svg") < body.index("<table")


def test_few_patterns_have_bars_and_no_boxes() -> None:
    few = report.page(FOUR)
    assert few.count('class="bar"') == 7
    assert "Figure" not in "".join(re.findall(r'aria-label="(.*?)"', few))


def test_the_same_rows_give_the_same_bytes() -> None:
    page = report.page(FOUR)
    assert report.page(FOUR) == page
    assert report.page(FOUR[:-3]) != page


def test_what_a_file_says_is_shown_as_text() -> None:
    evil = row(
        "1,48,48,2",
        "bmm",
        status="failed",
        reason="<script>alert('x')</script> | ",
        error=None,
        median_us=None,
        device="<b>GPU</b>",
    )
    page = report.page([evil, row()])
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "<b>GPU" not in page
    assert "&#39;x&#39;)&lt;/script&gt; | " in page
    assert "</script> \\| " in report.markdown([evil, row()])


def test_few_rows_are_a_page_too() -> None:
    assert "<svg" in report.page(FOUR)
    alone = report.page([row(implementation="bmm", status="failed", median_us=None, error=None, reason="no luck")])
    assert "no luck" in alone
    assert report.NO_CHARTS in alone
    assert report.NO_CHARTS not in report.page(FOUR)


def test_a_file_of_models_and_training_has_no_charts_however_reliable_it_is() -> None:
    rows = [row(WHOLE, LAYER, layer="vit-s16: forward"), row(implementation=LAYER, step=TRAINING)]
    assert all(each.counts for each in rows)
    with pytest.raises(KsgenError) as caught:
        report.picture(rows)
    for said in (report.page(rows), str(caught.value)):
        assert report.LACKS_TIMES in said


def test_layers_without_a_reliable_time_have_no_table_of_dashes() -> None:
    layer = row("2,4,8,1 then 1,8,8,1", ONE_LAUNCH, layer="up")
    assert len(list(tables.each_layer([layer]))) == 1
    assert not list(tables.each_layer([replace(layer, doubt="other processes took 50% of the CPU time")]))
    page = report.page([replace(layer, doubt="other processes took 50% of the CPU time")])
    assert report.NO_CHARTS in page
    assert "geometric mean" not in page


@pytest.mark.slow
def test_a_processors_results_are_compared_with_the_best_of_pytorch() -> None:
    # SciPy is none of PyTorch's methods
    times = {OURS: 50.0, LAYER: 64.0, "bmm": 100.0, "strided": 80.0, "scipy": 10.0}
    first = [row("1,48,48,2", name, median_us=us, runtime="opencl", share_of_floor=0.5) for name, us in times.items()]
    second = [
        row("1,64,64,4", name, median_us=us, runtime="opencl", share_of_floor=0.7)
        for name, us in ((OURS, 100.0), ("bmm", 90.0))
    ]
    wrong = [row("1,64,64,4", "strided", median_us=1.0, error=0.5, runtime="opencl")]
    table = tables.processors([*first, *second, *wrong, *FOUR])
    assert table.rows == (("25088", "float32", "bsl", "2", "x1.20", "x0.90", "x1.60", "50 %", "x1.25", "60 %", "50 %"),)
    assert tables.processors(FOUR).rows == ()
    assert NO_FLOOR not in table.note
    without = [replace(each, share_of_floor=None) for each in (*first, *second)]
    for table in (tables.processors(without), tables.overview(without)):
        assert table.rows[0][-1] == "-"
        assert table.note.endswith(f" {NO_FLOOR}")
    whole = processor_rows()
    assert tables.processors(whole).title in report.markdown(whole)
    assert tables.processors(whole).title in report.page(whole)


@pytest.mark.slow
def test_a_machine_is_named_by_a_line_next_to_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, titles = tmp_path / "paper.csv", []
    write_csv([each for each in processor_rows() if each.precision == "float32"], file)
    monkeypatch.setattr(report, "drawn_picture", lambda title, panels: titles.append(title) or "")
    for line, device in ((None, "Abacus"), ("An abacus with ten rods\n", "An abacus with ten rods")):
        if line:
            file.with_name("machine.txt").write_text(line)
        wanted = ["--svg", str(tmp_path / "a.svg"), "--markdown", "-", "-o", str(tmp_path / "a.html")]
        done = CliRunner().invoke(bench.command, ["report", str(file), *wanted])
        assert done.exit_code == 0, done.exception
        assert titles.pop() == f"Kronecker-sparse products: {device}"
        assert f"# Kronecker-sparse products: {device}\n" in done.stdout
        assert f"Kronecker-sparse products: {device}</h1>" in (tmp_path / "a.html").read_text()
    file.with_name("machine.txt").write_bytes(b"\xff")
    caught = CliRunner().invoke(bench.command, ["report", str(file)]).exception
    assert isinstance(caught, KsgenError)
    assert str(caught).startswith(f"{file.with_name('machine.txt')}: cannot be read (")
    assert str(caught).endswith("; accepted: a line of text")
