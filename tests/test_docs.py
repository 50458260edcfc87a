"""The pages: every relative link leads somewhere, and every file that CONTRIBUTING.md names is there."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

from ksgen import structures
from ksgen.cli import cli
from ksgen.pattern import NAMED_CHAINS
from ksgen.spec import parse, schema
from release.tutorial import tutorial_page
from tests import chain_pictures
from tests.support.libraries import library
from tests.support.program import needs_device
from tests.support.prose import long_sentences, sentences, words_in

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
# no <placeholder>, no glob
NAMED = re.compile(r"`((?:ksgen|templates|tests|docs|benchmarks|specs|generated)/[\w./-]+)`")


def headings(page: Path) -> set[str]:
    """Anchors of a page, as GitHub makes them."""
    lines = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", line.lower()).replace(" ", "-") for line in lines}


def dead_links(page: Path, text: str) -> Iterator[str]:
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    assert list(dead_links(page, page.read_text(encoding="utf-8"))) == []


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/none.md) [b](README.md) [c](https://example.org/none) [d](README.md#no-such-heading)"
    assert list(dead_links(ROOT / "README.md", text)) == ["docs/none.md", "README.md#no-such-heading"]


def test_every_page_of_docs_can_be_reached_from_readme() -> None:
    reached, open_pages = set(), [ROOT / "README.md"]
    while open_pages:
        page = open_pages.pop()
        reached.add(page)
        targets = {
            (page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(page.read_text(encoding="utf-8"))
        }
        open_pages += [
            target for target in targets if target.suffix == ".md" and target.exists() and target not in reached
        ]
    assert [page for page in PAGES if page.is_relative_to(ROOT / "docs") and page not in reached] == []


def test_pages_say_that_what_is_not_installed_runs_in_a_checkout() -> None:
    pages = {
        page: page.read_text(encoding="utf-8")
        for page in PAGES
        if page.is_relative_to(ROOT / "docs") and page.name != "setup.md"
    }
    named = {
        page: text for page, text in pages.items() if re.search(r"`python (-m (benchmarks|tests)\b|benchmarks/)", text)
    }
    assert len(named) > 10
    assert [page.name for page, text in named.items() if not re.search(r"in a\s+\[checkout\]\(", text)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_have_at_most_25_words(page: Path) -> None:
    assert long_sentences(page.read_text(encoding="utf-8")) == []


def test_words_of_sentences_are_counted() -> None:
    text = (
        "# Of no count\n\nA b c. (D `e f`!) [G h](i j).\n\n- k: l - m\n  n\n- o\n\n    int p;\n\n| q |\n\n```\nr "
        "s\n```\n"
    )
    assert [words_in(each) for each in sentences(text) if words_in(each)] == [3, 2, 2, 4, 1]


@pytest.mark.parametrize("page", sorted((ROOT / "docs/kernels").glob("*.md")), ids=lambda page: str(page.name))
def test_pages_of_kernels_answer_questions_on_at_most_250_lines(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match("##+ ", line) and not line.endswith("?")] == []
    assert len(lines) <= 250


def test_the_changelog_is_short_and_has_no_measurements() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 61
    assert re.findall(r"\d+(?:\.\d+)? ?(?:[KMGT]i?B|us|ms|s|%|x|times)\b|\btimed all\b", text) == []


def test_make_help_says_one_line_of_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = " ".join(re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)).split()
    said = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert sorted(line.split()[1] for line in said.splitlines()) == sorted(targets)
    assert all(len(line) < 120 and line.endswith(".") for line in said.splitlines())


def unknown_options(text: str) -> Iterator[str]:
    """Options that code of a page gives to a command of ksgen, and that the command does not have."""
    for code in re.finditer(r"```[\s\S]*?```|`([^`]+)`|^ {4}(ksgen .+)$", text, re.MULTILINE):
        words = (code[1] or code[2] or "").partition(" #")[0].removeprefix("ksgen ").split()
        command = cli.get_command(click.Context(cli), words[0]) if words else None
        for word in words[1:] if command else ():
            if isinstance(command, click.Group):  # `ksgen bench mine.yaml` is `ksgen bench layers`
                command = command.commands.get("layers" if word.endswith(".yaml") else word, command)
            elif command and word.startswith("--") and not any(word in option.opts for option in command.params):
                yield f"{words[0]} {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_have_the_options_that_they_are_given(page: Path) -> None:
    assert list(unknown_options(page.read_text(encoding="utf-8"))) == []


def test_options_that_no_command_has_are_found() -> None:
    text = "```\n`\n```\n`show --target`, `--target`\n\n    ksgen bench a.yaml --page --jobs 2  # --no\n"
    text += "    ksgen demo --batch 2\n"
    assert list(unknown_options(text)) == ["show --target", "bench --jobs"]


def test_every_file_named_for_contributors_is_there() -> None:
    named = NAMED.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_hooks_before_a_commit_reach_no_host() -> None:
    repositories = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))["repos"]
    assert [each["repo"] for each in repositories] == ["local"]
    assert {hook["language"] for each in repositories for hook in each["hooks"]} == {"system"}


def without_comments(line: str) -> str:
    """A line of a kernel without comment, white space and the words for address spaces."""
    return re.sub(r"\b(GLOBAL|SHARED|RESTRICT)\b|\s", "", line.partition("//")[0])


def test_the_annotated_kernel_is_the_emitted_one() -> None:
    page = (ROOT / "docs" / "how-it-works.md").read_text(encoding="utf-8")
    emitted = {
        without_comments(line)
        for line in (ROOT / "generated/vit/ks_6x64x64x1_float32_bsf.cu").read_text(encoding="utf-8").splitlines()
    }
    shown = [line for block in re.findall(r"```cuda\n(.*?)```", page, re.DOTALL) for line in block.splitlines()]
    assert 50 < len(shown) < 75
    assert [line for line in shown if without_comments(line) not in emitted] == []


def test_the_page_of_specs_describes_every_key_as_editors_do() -> None:
    """Keys of sections, options and layers, each with the description in the schema."""
    page = (ROOT / "docs" / "specs.md").read_text(encoding="utf-8")
    described: dict[str, str] = {}

    def collect(part: object) -> None:
        for key, value in part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ():
            if key == "properties":
                described.update({name: each["description"] for name, each in value.items() if "description" in each})
            collect(value)

    collect(schema())
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", page, re.MULTILINE)) == described
    assert parse(re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)[0]).kernels


def test_the_table_of_named_chains_is_what_they_are() -> None:
    rows = list(chain_pictures.rows())
    assert {row.name for row in rows} == set(NAMED_CHAINS)
    assert [row.name for row in rows if str(row.chain) != row.written] == []


def test_pictures_of_chains_and_structures_are_what_they_are() -> None:
    drawn = chain_pictures.pictures()
    outdated = [path.name for path, picture in drawn.items() if path.read_text(encoding="utf-8") != picture]
    assert outdated == [], "draw them again: python -m tests.chain_pictures"
    assert set((ROOT / "docs" / "chains").rglob("*.svg")) == set(drawn)
    shown = {path.stem.rstrip("0123456789") for path in drawn if path.parent.name == "structures"}
    assert shown == set(structures.__all__) - {"Structure"}


TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.py"))
NEEDS_TORCH = [path for path in TUTORIALS if "import torch" in path.read_text(encoding="utf-8")]


@needs_device
@pytest.mark.parametrize(
    "script",
    [pytest.param(path, marks=[pytest.mark.libraries] if path in NEEDS_TORCH else []) for path in TUTORIALS],
    ids=lambda path: path.name,
)
def test_a_tutorial_runs_and_shows_what_it_prints(script: Path) -> None:
    """A statement that a tutorial prints about its results is true. It leaves the environment unchanged."""
    if script in NEEDS_TORCH:
        library("torch")
    before = dict(os.environ)
    shown = tutorial_page(script)
    assert dict(os.environ) == before
    assert shown.startswith("# Tutorial: ")
    assert shown.count("```text\n") > 2
    assert "False" not in "".join(re.findall(r"```text\n(.*?)```", shown, re.DOTALL))


def test_a_tutorial_becomes_text_code_output_and_pictures(tmp_path: Path) -> None:
    script = tmp_path / "tutorial.py"
    script.write_text(
        "# # Title\n#\n# Text.\n\nx = 2  # two\n\nprint(x)\nprint('<svg>a</svg>')\n\n# More.\n\nprint(x + 1)\n"
    )
    code = (
        "```python\nx = 2  # two\n\nprint(x)\nprint('<svg>a</svg>')\n```\n\n```text\n2\n```\n\n<div><svg>a</svg></div>"
    )
    assert (
        tutorial_page(script)
        == f"# Title\n\nText.\n\n{code}\n\nMore.\n\n```python\nprint(x + 1)\n```\n\n```text\n3\n```\n"
    )


def test_a_tutorial_is_a_page_without_pytorch_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for script in NEEDS_TORCH:
        monkeypatch.setitem(sys.modules, "torch", None)
        shown = tutorial_page(script)
        assert shown.count("*This page was built without torch, and so without what the code prints.*") == 1
        assert "```text" not in shown
        assert shown.count("```python") > 3


def test_another_missing_module_of_a_tutorial_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "tutorial.py").write_text("import no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        tutorial_page(tmp_path / "tutorial.py")


def test_the_site_has_every_page() -> None:
    """`make docs` needs mkdocs, and fails at a page that is left out; this is known without it."""
    listed = re.findall(r"([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    own = [path.relative_to(ROOT / "docs").as_posix() for path in PAGES if path.is_relative_to(ROOT / "docs")]
    own += [f"tutorials/{path.stem}.md" for path in (ROOT / "docs" / "tutorials").glob("*.py")]
    assert sorted(listed) == sorted([*own, "index.md", "reference.md", "CONTRIBUTING.md", "CHANGELOG.md"])
