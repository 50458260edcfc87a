"""The report's page: it is whole and alone, everything is in it, it trusts no text, and the same trials give the
same bytes.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from importlib.util import find_spec
from math import inf
from pathlib import Path

import pytest
from click.testing import CliRunner

from ksgen.cli import cli
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.report import sections_of
from tests.support.tuning_trials import GPU, some_trials, trial

HOSTILE = "</td><script>alert('x')</script><img src=http://example.org/x> & \"quoted\" $\\frac{1}{2}$"
VOID = {"meta", "wbr", "link", "img", "br", "hr", "input"}


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
    asked = {
        attributes[name] for _, attributes in page.elements for name in ("href", "xlink:href") if name in attributes
    }
    assert asked <= {f"#{name}" for name in names}


@needs_matplotlib
def test_every_job_its_winner_and_every_constant_are_in_it(text: str) -> None:
    page = Page(text)
    drawn = Counter(attributes["aria-label"] for tag, attributes in page.elements if tag == "svg")
    wanted: Counter[str] = Counter()
    for section in sections_of(some_trials()):
        assert section.winner
        # among all jobs, and with its own
        assert page.text.count(f"{section.winner.family}: {section.winner.constants}") == 2
        assert section.title in page.text
        assert section.kernel.name in page.text
        wanted.update(["best so far", "cost model", "roofline, TFLOP/s"])
        wanted.update(name for trials in section.by_family.values() for name in vars(trials[0].constants))
    assert drawn == wanted
    assert text.count('<tr class="measured winner">') == 2
    assert "1,64,48,2 float16 bsl bias gelu, batch 70" in page.text
    assert "6,64,64,1 float32 bsf, batch 70 only" in page.text


@needs_matplotlib
def test_kinds_of_constants_of_one_family_have_figures_and_tables_of_their_own() -> None:
    from ksgen.tuning.report import page, table_of

    kernel = KernelSpec(Pattern(1, 192, 48, 2), "float16")
    kinds = FAMILIES["wgmma"].defaults(kernel, GPU)
    assert len({type(each) for each in kinds}) == len(kinds) > 1
    trials = [trial(kernel, "wgmma", each, 20.0 + number) for number, each in enumerate(kinds)]
    (section,) = sections_of(trials)
    assert list(section.by_family) == [each.entry_family for each in kinds]
    text = page(trials)
    for each, (name, of_kind) in zip(kinds, section.by_family.items(), strict=True):
        values = ", ".join(f"{word}={value}" for word, value in vars(each).items())
        assert table_of(of_kind, section.winner).throughout == values
        assert f"<h3>{name} " in text


@needs_matplotlib
def test_text_of_others_stays_text(text: str) -> None:
    page = Page(text)
    assert [tag for tag, _ in page.elements].count("script") == 1
    assert (
        "failed: </td><script>alert('x')</script><img src=http://example.org/x> & \"quoted\" $\\frac{1}{2}$; </td>"
        in page.text
    )
    assert "alert('x')" not in text


@pytest.mark.slow
@needs_matplotlib
def test_the_same_trials_give_the_same_bytes_whatever_the_user_prefers(text: str) -> None:
    import matplotlib

    from ksgen.tuning.report import page

    with matplotlib.rc_context({"lines.linewidth": 9, "svg.fonttype": "path", "font.size": 20}):
        again = page(some_trials())
        assert matplotlib.rcParams["font.size"] == 20
    program = "import hashlib; from tests.tuning.test_report import some_trials; from ksgen.tuning.report import page; "
    program += "print(hashlib.sha256(page(some_trials()).encode()).hexdigest())"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ, "PYTHONHASHSEED": "7"}
    )
    assert done.stdout.strip() == hashlib.sha256(again.encode()).hexdigest(), done.stderr


@needs_matplotlib
def test_a_page_of_many_candidates_stays_small() -> None:
    from ksgen.tuning.report import page

    trials = some_trials(100)
    assert len(page(trials)) < 1500 * len(trials)


@needs_matplotlib
def test_missing_measurements_and_predictions_are_reported(tmp_path: Path) -> None:
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

    with pytest.raises(KsgenError, match=r"r\.html: there is nothing to report, as no candidate was tried"):
        write_report([], tmp_path / "r.html")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(
        KsgenError, match=r"pictures need matplotlib, which cannot be imported \(.*\); pip install .*\[tune\]"
    ):
        write_report(some_trials(4), tmp_path / "r.html")
    with pytest.raises(KsgenError, match="pictures need matplotlib"):
        check_report(tmp_path / "r.html")
    assert list(tmp_path.iterdir()) == []


@needs_matplotlib
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    from ksgen.tuning.report import check_report, write_report

    check_report(tmp_path / "r.html")
    for path in (tmp_path, tmp_path / "no" / "r.html"):
        with pytest.raises(
            KsgenError,
            match=": no file can be written there; choose an existing folder that you can write to",
        ):
            check_report(path)
    with pytest.raises(KsgenError, match=r"no/r\.html: cannot be written \(No such file or directory\)"):
        write_report(some_trials(4)[:1], tmp_path / "no" / "r.html")


@needs_matplotlib
def test_ksgen_tune_refuses_a_place_before_it_searches() -> None:
    caught = (
        CliRunner()
        .invoke(cli, ["tune", "--pattern", "1,2,3,1", "--device", "abacus", "--report", "/no/such/r.html"])
        .exception
    )
    assert isinstance(caught, KsgenError)
    assert (
        str(caught) == "/no/such/r.html: no file can be written there; choose an existing folder that you can write to"
    )
