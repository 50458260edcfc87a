"""What is said of results: duels, tables beside the paper's numbers, rules that predict the gain, the page and the Markdown."""

import builtins
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench import published, report, tables
from ksgen.bench.comparison import BEST, UNTUNED, Duel, Results, group_by
from ksgen.bench.heuristic import judge
from ksgen.bench.roster import OTHERS, OURS
from ksgen.bench.rows import Row, write_csv
from ksgen.commands import bench
from ksgen.errors import KsgenError
from ksgen.install import install_line
from ksgen.pattern import Pattern
from ksgen.spec import paper_patterns, stratified
from tests.support.bench_rows import row, rows_of

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return rows_of(stratified(40), ("float16",))


@pytest.fixture(scope="module")
def page(rows: list[Row]) -> str:
    return report.page(rows)


def lines(table: tables.Table) -> dict[str, tuple[str, ...]]:
    return {line[0]: line[1:] for line in table.rows}


FOUR = [
    row("1,48,48,2", OURS, median_us=50.0, variant="tuned"),
    row("1,48,48,2", OURS, median_us=120.0, variant="default"),
    row("1,48,48,2", "bmm", median_us=100.0),
    row("1,48,48,2", "einsum", median_us=400.0),
    row("1,48,48,2", "bmm", layout="bsf", median_us=80.0),
    row("1,48,48,2", OURS, layout="bsf", median_us=160.0, variant="default"),
    row("1,64,64,4", OURS, median_us=100.0, variant="default"),
    row("1,64,64,4", "bmm", median_us=60.0),
    row("1,64,64,4", "dense", median_us=1.0, error=0.5),  # fast and wrong
    row("1,64,64,4", "sparse", median_us=None, status="failed", reason="no luck", error=None),
]


def test_a_duel_by_hand() -> None:
    results = Results(FOUR, "float32")
    assert results.duel(OURS, ["bmm", "einsum"], "bsl") == Duel((2.0, 0.6))
    assert results.duel(OURS, ["dense", "sparse"], "bsl") == Duel(())  # nothing that counts
    assert results.duel(UNTUNED, ["bmm"], "bsl") == Duel((100 / 120, 0.6))
    assert results.duel(OURS, ["bmm"], BEST) == Duel((80 / 50, 0.6))  # each in the better of its layouts
    assert results.layouts_ratio("bmm") == [(Pattern(1, 48, 48, 2), 0.8)]
    assert results.layouts_ratio(OURS) == [(Pattern(1, 48, 48, 2), 3.2)]
    assert results.best_rows(OURS, "bsl")["1,48,48,2"].variant == "tuned"
    assert results.names == [OURS, "bmm", "einsum"]
    duel = Duel((2.0, 0.6, 4.0, 1.0))
    assert (duel.patterns, duel.wins, duel.share, duel.factor_where_faster, duel.factor) == (4, 2, 0.5, 3.0, 1.5)
    assert (Duel(()).share, Duel(()).factor_where_faster, Duel((0.5,)).factor_where_faster) == (None, None, None)
    assert Results(FOUR, "float16").patterns == []


def test_rewriting_and_energy_by_hand() -> None:
    part: dict[str, Any] = {"error": None, "tolerance": None}
    some = [
        row("1,48,48,2", "bmm", median_us=100.0, joule=3.0),
        row("1,48,48,2", "rewriting", median_us=40.0, **part),
        row("1,48,48,2", OURS, joule=2.5),
        row("1,48,48,2", OURS, layout="bsf", joule=1.5),
        row("1,48,48,2", "einsum", joule=1.0, error=0.1),  # wrong
    ]
    results = Results(some, "float32")
    assert results.rewriting_share("bsl") == [(Pattern(1, 48, 48, 2), 0.4)]
    assert results.energy_ratios(OURS, ["bmm", "einsum"]) == [(Pattern(1, 48, 48, 2), 0.5)]
    assert group_by(results.rewriting_share("bsl"), lambda each: each.d) == {2: [0.4]}
    assert lines(tables.rewriting(some, "float32")) == {"bsl": ("0.0417", "1", "40 %", "40 %")}
    assert "up to 45 % (Figure 4)" in tables.rewriting(some, "float32").note
    assert tables.energy(some).rows[0] == ("float32", "bmm and einsum", "1", "x0.50", "100 %", "x0.84, 72 %")


def test_the_papers_tables_with_the_papers_numbers() -> None:
    three = lines(tables.table3(FOUR, "float32"))
    assert three["ksgen faster than the paper's five"] == ("2", "50 %", "x1.60", "x1.10", "88 % (x1.39), Table 3")
    assert "ksgen faster than the expert's" not in three  # nobody measured them
    five = lines(tables.table5(FOUR, "float32"))
    assert five["bsl: ksgen faster than min(bmm, einsum, bsr, dense, sparse)"][-1] == "88 % (x1.39), Table 5"
    assert five["bsf: ksgen faster than min(bmm, einsum, bsr, dense, sparse)"] == ("1", "0 %", "-", "x0.50", "20 % (x1.28), Table 5")
    eight = tables.table8(FOUR, "float32", "bsl")
    assert eight.columns == ("", OURS, "bmm", "einsum")
    assert lines(eight)[OURS] == ("", "50 % (x2.00)", "100 % (x8.00)")
    assert lines(tables.layouts(FOUR, "float32"))["all"] == ("3.2", "0.8", "2")
    errors = {line[1]: line[2:] for line in tables.errors(FOUR).rows}
    assert errors["dense"] == ("float32", "1", "5.0e-01", "1")
    assert tables.absent(FOUR).rows == (("sparse", "failed", "1", "no luck"),)


def test_the_authors_own_times_stand_beside_ours() -> None:
    some = [row("6,64,64,1", OURS, median_us=61.5, share_of_floor=0.5), row("6,64,64,1", "bmm", median_us=123.0)]
    assert tables.authors(some).rows == (("6,64,64,1", "float32", "bsl", "61.5", "123", "123", "x2.00", "50 %"),)
    assert "another GPU" in tables.authors(some).note


def test_what_is_published_is_what_the_shared_page_says() -> None:
    assert len(published.published_patterns()) == 12
    of_the_chains = {Pattern.parse(text) for text in ("6,64,64,1", "1,768,192,2", "2,48,192,1", "1,192,48,2")}
    assert set(published.published_patterns()) <= {*paper_patterns(), *of_the_chains}
    assert published.published_us("1,1024,1024,4", "float16", "bsl") == pytest.approx(7170)
    assert published.published_us("1,1024,1024,4", "float16", "bsf") is None
    assert published.published_us("1,2,3,4", "float32", "bsl") is None
    claim = published.claim("kernel_beats_all_bsf")
    assert (claim.share, claim.factor, claim.where, claim.precision) == (0.2, 1.28, "Table 5", "float32")
    for name in published.published()["claims"]:
        assert published.claim(name).where


# The heuristic.


def ratios_by(score: Any, count: int = 60) -> list[tuple[Pattern, float]]:
    return [(pattern, score(pattern)) for pattern in stratified(count)]


def test_the_rule_that_made_the_results_is_found() -> None:
    verdict = judge(ratios_by(lambda pattern: 0.5 + 30 * pattern.d * pattern.rewrite_ratio), is_gpu=True)
    assert verdict.judged[0].rule.says == "d (b+c)/(bc)"
    assert verdict.judged[0].correlation == pytest.approx(1.0)
    assert verdict.judged[0].accuracy > 0.95
    assert verdict.says.startswith("d (b+c)/(bc) predicts better than (b+c)/(bc): rank correlation 1.00 against 0.")
    same = judge(ratios_by(lambda pattern: 0.5 + 30 * pattern.rewrite_ratio), is_gpu=True)
    assert same.says == "(b+c)/(bc) predicts as well as any rule here: rank correlation 1.00."


def test_no_claim_without_a_gpu_or_with_few_patterns() -> None:
    results = ratios_by(lambda pattern: pattern.d)
    assert judge(results, is_gpu=False).says == "No claim: these are not a GPU's results."
    assert judge(results[:29], is_gpu=True).says == "No claim: 29 patterns, and at least 30 are needed."


def test_a_rule_is_judged_on_patterns_that_its_threshold_did_not_see() -> None:
    """One pattern wins and its score is the largest: without it nothing tells the threshold."""
    results = [(Pattern(1, 48, 48, 128), 2.0), *((Pattern(1, 48, 48, d), 0.5) for d in (1, 2, 3))]
    judged = next(each for each in judge(results, is_gpu=True).judged if each.rule.says == "d")
    assert judged.accuracy == 0.75
    assert 3 < judged.threshold < 128


# The page.


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
    for start in ("Figure 4", "Figure 6", "Figure 7", "Figures 9 to 17", "by sparsity", "by size"):
        assert any(title.startswith(start) for title in titles), start
    for name in OTHERS:
        assert f"Figures 9 to 17: ksgen beside {name}, float16, batch-size-last" in titles
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


def test_the_same_rows_give_the_same_bytes() -> None:
    page = report.page(FOUR)
    assert report.page(FOUR) == page
    assert report.page(FOUR[:-3]) != page


def test_what_a_file_says_is_shown_as_text() -> None:
    evil = row(
        "1,48,48,2", "bmm", status="failed", reason="<script>alert('x')</script> | ", error=None, median_us=None, device="<b>GPU</b>"
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


def test_markdown_tables(rows: list[Row]) -> None:
    text = report.markdown(rows)
    assert text.startswith("# Kronecker-sparse products on Abacus\n")
    for title in (
        "### Table 3, float16",
        "### Table 5, float16",
        "### Table 8, float16, batch-size-last",
        "## Energy",
        "### What predicts the gain",
    ):
        assert title in text
    widths = [[line.count(" | ") for line in block.splitlines() if line.startswith("|")] for block in text.split("\n\n")]
    assert all(len(set(counts)) <= 1 for counts in widths)


# The command.


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(bench.command, ["report", *arguments])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(FOUR, Path("h200.csv"))
    done = invoke("h200.csv")
    assert done.exit_code == 0
    assert done.output.startswith("h200.html: ")
    assert Path("h200.html").read_text() == report.page(FOUR)
    done = invoke("h200.csv", "--markdown", "-")
    assert done.output.startswith("# Kronecker-sparse products on Abacus")
    assert invoke("h200.csv", "--markdown", "tables.md", "-o", "page.html").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"h200.csv", "h200.html", "tables.md", "page.html"}
    done = invoke("h200.csv", "-o", "none/page.html")
    assert str(done.exception) == "none/page.html: cannot be written (No such file or directory)"


def test_no_matplotlib_is_one_line_and_markdown_needs_none(rows: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    path = tmp_path / "rows.csv"
    write_csv(rows, path)
    done = invoke(str(path))
    assert isinstance(done.exception, KsgenError)
    assert (
        str(done.exception) == f"pictures need matplotlib, which cannot be imported (No module named 'matplotlib'); {install_line('bench')}"
    )
    assert invoke(str(path), "--markdown", "-").exit_code == 0


def test_a_report_needs_no_pytorch(rows: list[Row], tmp_path: Path) -> None:
    import subprocess

    write_csv(rows[:40], tmp_path / "rows.csv")
    program = "import sys; sys.modules['torch'] = None; from ksgen.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "report", "rows.csv", "--markdown", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_is_of_the_file_that_bench_paper_writes_unless_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke()
    assert str(done.exception) == "paper.jsonl: cannot be read (No such file or directory)"


# A processor's results.


def processor_rows() -> list[Row]:
    found = rows_of(stratified(12), ("float32", "bfloat16"))
    return [replace(each, runtime="opencl", batch=6272) for each in found]


def test_a_processors_results_are_beside_the_best_of_pytorch() -> None:
    times = {OURS: 50.0, "bmm": 100.0, "strided": 80.0, "scipy": 10.0}  # SciPy is none of PyTorch's ways
    first = [row("1,48,48,2", name, median_us=us, runtime="opencl", share_of_floor=0.5) for name, us in times.items()]
    second = [row("1,64,64,4", name, median_us=us, runtime="opencl", share_of_floor=0.7) for name, us in ((OURS, 100.0), ("bmm", 90.0))]
    wrong = [row("1,64,64,4", "strided", median_us=1.0, error=0.5, runtime="opencl")]
    table = tables.processors([*first, *second, *wrong, *FOUR])
    assert table.rows == (("25088", "float32", "bsl", "2", "x1.20", "x0.90", "x1.60", "50 %", "60 %", "50 %"),)
    assert tables.processors(FOUR).rows == ()
    whole = processor_rows()
    assert tables.processors(whole).title in report.markdown(whole)
    assert tables.processors(whole).title in report.page(whole)


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
