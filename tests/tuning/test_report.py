"""The report's page: it is whole and alone, everything is in it, it trusts no text, and the same trials give the same bytes."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from importlib.util import find_spec
from math import inf
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from ksgen.cli import cli
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES, cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.tuning.candidates import MOST_ROWS, by_state, microseconds, reasons, table_of
from ksgen.tuning.sections import sections_of
from ksgen.tuning.trials import Trial

GPU = cuda_limits("sm_90a")
KERNELS = [KernelSpec(Pattern(1, 64, 48, 2), "float16", "bsl", Epilogue(True, "gelu", False)), KernelSpec(Pattern(6, 64, 64, 1), batch=70)]
HOSTILE = "</td><script>alert('x')</script><img src=http://example.org/x> & \"quoted\" $\\frac{1}{2}$"
VOID = {"meta", "wbr", "link", "img", "br", "hr", "input"}


def trial(kernel: KernelSpec, family: str, constants: object, time_us: float | None, **more: object) -> Trial:
    known = {"median_us": time_us, "spread": 0.0213, "runs": 20} if time_us else {}
    facts = {"floor_us": 9.0, "predicted_us": 11.0, "bytes_per_s": 3.9e12, "flops_per_s": 5e13, "registers": 80, "shared_bytes": 4096}
    state = "measured" if time_us else "pruned"
    return Trial(kernel, 70, "NVIDIA H200", family, constants, "0a0b0c0d", **{"state": state, **known, **facts, **more})  # type: ignore[arg-type]


@cache
def space_of(kernel: KernelSpec, family: str) -> tuple[Any, ...]:
    """All constants of a family: tens of thousands, for every test to take a few of."""
    return tuple(FAMILIES[family].space(kernel, GPU))


def some_trials(of_each: int = 12) -> list[Trial]:
    """Of both kernels and all families; times fall, then rise, and every fifth candidate is pruned."""
    found = []
    for kernel in KERNELS:
        for name, family in FAMILIES.items():
            if not family.serves(kernel, GPU):
                continue
            space = space_of(kernel, name)
            for number, constants in enumerate(space[:: len(space) // of_each][:of_each]):
                time_us = None if number % 5 == 4 else 20.0 + 3 * abs(number - 6) + len(name) + kernel.pattern.a / 10
                found.append(
                    trial(kernel, name, constants, time_us, reason="" if time_us else "spills 24 bytes", predicted_us=12.0 + number)
                )
    return found


class Page(HTMLParser):
    """Fails where elements are not closed in turn; keeps what a test asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join("".join(self.words).split())


needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="a report needs matplotlib: ksgen[tune]")


@pytest.fixture(scope="module")
def text() -> str:
    from ksgen.tuning.report import page

    first, *others = some_trials()
    return page([first, replace(others[0], state="failed", median_us=None, reason=HOSTILE, note=HOSTILE), *others[1:]])


@needs_matplotlib
def test_the_page_is_whole_and_needs_nothing_else(text: str) -> None:
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    for tag, attributes in page.elements:
        assert tag not in {"link", "img", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "xlink:href", "data", "action"):
            assert (attributes.get(name) or "#").startswith("#"), (tag, attributes)
    assert "@import" not in text
    assert "url(" not in text.replace("url(#", "")
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    asked = {attributes[name] for _, attributes in page.elements for name in ("href", "xlink:href") if name in attributes}
    assert asked <= {f"#{name}" for name in names}


@needs_matplotlib
def test_every_job_its_winner_and_every_constant_are_in_it(text: str) -> None:
    page = Page(text)
    drawn = Counter(attributes["aria-label"] for tag, attributes in page.elements if tag == "svg")
    wanted: Counter[str] = Counter()
    for section in sections_of(some_trials()):
        assert section.winner
        assert page.text.count(f"{section.winner.family}: {section.winner.constants}") == 2  # among all jobs, and with its own
        assert section.title in page.text
        assert section.kernel.name in page.text
        wanted.update(["best so far", "cost model", "roofline, TFLOP/s"])
        wanted.update(name for trials in section.by_family.values() for name in vars(trials[0].constants))
    assert drawn == wanted
    assert text.count('<tr class="measured winner">') == 2
    assert "1,64,48,2 float16 bsl bias gelu, batch 70" in page.text
    assert "6,64,64,1 float32 bsf, batch 70 only" in page.text


@needs_matplotlib
def test_text_of_others_stays_text(text: str) -> None:
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert "failed: </td><script>alert('x')</script><img src=http://example.org/x> & \"quoted\" $\\frac{1}{2}$; </td>" in page.text
    assert "alert('x')" not in text


@needs_matplotlib
def test_the_same_trials_give_the_same_bytes_whatever_the_user_prefers(text: str) -> None:
    import matplotlib

    from ksgen.tuning.report import page

    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "font.size": 20}):
        again = page(some_trials())
        assert matplotlib.rcParams["font.size"] == 20
    program = "import hashlib; from tests.tuning.test_report import some_trials; from ksgen.tuning.report import page; "
    program += "print(hashlib.sha256(page(some_trials()).encode()).hexdigest())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"})
    assert done.stdout.strip() == hashlib.sha256(again.encode()).hexdigest(), done.stderr


@needs_matplotlib
def test_a_page_of_many_candidates_stays_small() -> None:
    from ksgen.tuning.report import page

    trials = some_trials(100)
    assert len(page(trials)) < 1500 * len(trials)


@needs_matplotlib
def test_what_was_never_measured_or_predicted_is_said(tmp_path: Path) -> None:
    from ksgen.tuning.report import page, write_report

    never = [replace(each, state="pruned", median_us=None) for each in some_trials(4)]
    assert "No candidate was measured." in Page(page(never)).text
    bare = [replace(each, predicted_us=inf, floor_us=None, bytes_per_s=None, spread=None) for each in some_trials(4)]
    assert 'aria-label="cost model"' not in page(bare)
    assert 'aria-label="roofline' not in page(bare)
    write_report(bare[:1], tmp_path / "one.html")
    assert Page((tmp_path / "one.html").read_text()).text.count("1 candidate;") == 1
    two = Page(page([*bare[:1], replace(bare[0], device="AMD EPYC")])).text
    assert "batch 70 on AMD EPYC" in two


def test_mistakes_say_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ksgen.tuning.report import check_report, write_report

    with pytest.raises(KsgenError, match=r"r\.html: there is nothing to report, as no candidate was looked at"):
        write_report([], tmp_path / "r.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(KsgenError, match=r"pictures need matplotlib, which cannot be imported \(.*\); pip install .*\[tune\]"):
        write_report(some_trials(4), tmp_path / "r.html")
    with pytest.raises(KsgenError, match="pictures need matplotlib"):
        check_report(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


@needs_matplotlib
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    from ksgen.tuning.report import check_report, write_report

    check_report(tmp_path / "r.html")
    for path in (tmp_path, tmp_path / "no" / "r.html"):
        with pytest.raises(KsgenError, match=": no file can be written there; name one in a folder that exists and is yours to write to"):
            check_report(path)
    with pytest.raises(KsgenError, match=r"no/r\.html: cannot be written \(No such file or directory\)"):
        write_report(some_trials(4)[:1], tmp_path / "no" / "r.html")


@needs_matplotlib
def test_ksgen_tune_refuses_a_place_before_it_searches() -> None:
    caught = CliRunner().invoke(cli, ["tune", "--pattern", "1,2,3,1", "--device", "abacus", "--report", "/no/such/r.html"]).exception
    assert isinstance(caught, KsgenError)
    assert str(caught) == "/no/such/r.html: no file can be written there; name one in a folder that exists and is yours to write to"


@needs_matplotlib
def test_a_figure_shows_the_best_of_each_value() -> None:
    from ksgen.tuning import figures

    svg = ElementTree.fromstring(figures.constant("stages", [2, 3, 2, 3, 4], [10.0, 12.0, 20.0, 6.0, 30.0], 3))
    lines = [path for path in svg.iter("{http://www.w3.org/2000/svg}path") if f"stroke: {figures.BEST}" in path.get("style", "")]
    heights = [float(word) for word in lines[0].get("d", "").split()[2::3]]
    assert len(heights) == 3
    assert heights[1] > heights[0] > heights[2]  # downwards is faster
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"stages", "2", "3", "4", "µs"} <= set(words)
    slow = figures.constant("stages", [2, 3], [5000.0, 40000.0], 0)
    assert ">ms</text>" in slow
    assert slow == figures.constant("stages", [2, 3], [5000.0, 40000.0], 0)


def test_a_section_is_one_job_of_the_last_template_version() -> None:
    trials = some_trials()
    stale = [replace(each, template="ffffffff", median_us=1.0, state="measured", measured_at="2026-11-20") for each in trials[:3]]
    of_old_driver = replace(trials[4], driver="1", median_us=1.0, state="measured", measured_at="2026-11-20")
    present = [replace(each, measured_at="2026-11-21") for each in trials]
    first, second = sections_of([*stale, *present, of_old_driver])
    assert (first.kernel, second.kernel) == tuple(KERNELS)
    assert first.left_out == 4
    assert first.winner == min(
        (each for each in present if each.kernel == KERNELS[0] and each.median_us), key=lambda each: each.median_us or 0
    )
    assert list(first.by_family) == ["mma", "wgmma_shared", "simt"]
    assert first.said == [
        "2.17 times as fast as the first candidate; the median of 20 runs, which spread over 2.1%.",
        "39% of the floor, which is 9 µs.",
        "36 candidates: 30 measured, 6 pruned.",
        "4 of earlier templates or drivers are left out.",
    ]
    assert first.summary == ("23.1", "39%", "2.17", "36", f"mma: {first.winner.constants}")


def test_a_search_decides_who_won() -> None:
    trials = some_trials()
    decided = trials[3]
    first, second = sections_of(trials, [decided])
    assert first.winner == decided
    assert second.winner == sections_of(trials)[1].winner
    assert first.said[2] == "Shorter times were seen, but not in the finals, where candidates are measured side by side."
    assert first.summary[4] == f"{decided.family}: {decided.constants}"


def test_a_note_about_the_winners_time_is_said() -> None:
    noted = [replace(each, note="clocks moved") for each in some_trials()[:3]]
    assert "Of its time: clocks moved." in sections_of(noted)[0].said


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
    return ["#", "µs", "spread", "runs", "of floor", "predicted µs", "registers", "shared bytes", "fate"]


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
    assert [microseconds(time) for time in (0.12345, 8.062, 23.0, 99.96, 100.4, 41445.3)] == ["0.123", "8.06", "23", "100", "100", "41445"]
