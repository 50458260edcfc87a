"""Pages, docstrings and comments use the field's words, and a docstring stands without the name of its function."""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SKIPPED = ("tests/ptx/mistakes/", "tests/test_language.py")  # planted mistakes, and the examples here

ORPHAN = re.compile(r"(After|And|As|Before|Behind|Beside|By|From|In|Of|Or|That|Their|Those|Where|Which|Whose|With)\b")
PHRASES = {
    "what lies between": "intermediate",
    "batch entries": "rows of the batch",
    "few entries": "small batches",
    "turned": "transposed",
    "past the cache": "streaming store",
    "past the caches": "streaming store",
    "is told": "receives, reads",
    "are told": "receive, read",
    "is said": "is reported",
    "said once": "warns once",
    "nobody": "unknown, or the thing that does not act",
    "whoever": "the thing that acts",
    "what is made of": "what is derived from",
    "what was made of": "what is derived from",
    "beside": "next to, compared with",
    "besides": "in addition, also",
    "anew": "again",
    "one after the other": "sequentially",
    "in doubt": "unreliable",
    "doubtful": "unreliable",
    "is played": "is emulated",
    "are played": "are emulated",
    "a launch for each": "one launch per",
    "as it is": "unchanged, directly",
    "as they are": "unchanged, directly",
}
MOST_COLUMNS = 120
LONGER = (  # files whose lines are not written by hand
    "benchmarks/results/",  # results as tools wrote them
    "tests/families/recorded_vector_times.json",  # recorded too
    "tests/second_opinion/clustersim.patch",  # lines of the program that it changes
)
PRAGMA = re.compile(r"\s*# (noqa|type: ignore)\b.*")  # ruff does not count it either
PHRASE = re.compile(rf"(?<![-\w])({'|'.join(PHRASES)})(?!\w)")


def files() -> Iterator[tuple[str, str]]:
    """Yield name and source of every Python file of the package and its tests."""
    for folder in ("ksgen", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(SKIPPED):
                yield name, path.read_text(encoding="utf-8")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each comment."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def orphans(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each docstring whose first words need the function's name before them."""
    if re.search(rf'"""\s*{ORPHAN.pattern}', source):  # most files need no parser
        for line, text in docstrings(source):
            if ORPHAN.match(text):
                yield line, f"{text.splitlines()[0]!r} leans on a name; write a statement or an imperative"


def phrases(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each docstring or comment with a phrase that the field does not use."""
    flat = " ".join(source.lower().split())
    if not any(re.search(rf"\b{phrase}\b", flat) for phrase in PHRASES if phrase in flat):  # most files need no parser
        return
    has_comments = any(PHRASE.search(line.partition("#")[2].lower()) for line in source.splitlines())
    for line, text in (*docstrings(source), *(comments(source) if has_comments else ())):
        prose = " ".join(re.sub("`[^`]*`", "", text).lower().split())  # without code
        for phrase in PHRASE.findall(prose):
            yield line, f"{phrase!r}; the field writes: {PHRASES[phrase]}"


def long_lines(name: str, source: str) -> list[int]:
    """Numbers of the lines with more than 120 columns, except rows of tables, which Markdown cannot wrap."""
    found = [number for number, line in enumerate(source.split("\n"), 1) if len(line) > MOST_COLUMNS]
    lines = source.split("\n") if found else []
    if name.endswith(".md"):
        return [number for number in found if not lines[number - 1].startswith("| ")]
    if name.endswith(".py"):
        return [number for number in found if len(PRAGMA.sub("", lines[number - 1])) > MOST_COLUMNS]
    return found


def test_lines_have_at_most_120_columns() -> None:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    found, read = [], 0
    for name in filter(None, tracked.stdout.split("\0")):
        if name.startswith(LONGER) or name.endswith(".svg") or not (ROOT / name).is_file():
            continue
        try:
            source = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # no text
        read += 1
        found += [f"{name}:{number}" for number in long_lines(name, source)]
    assert read > 1000
    assert not found, f"{len(found)} lines of more than 120 columns, such as " + ", ".join(found[:10])


@pytest.mark.parametrize(
    ("name", "line", "is_long"),
    [
        ("simt.cu.j2", "x" * 121, True),
        ("simt.cu.j2", "x" * 120, False),
        ("simt.cu.j2", "⊗" * 120, False),
        ("page.md", "| " + "x" * 119, False),
        ("page.md", "word " * 25, True),
        ("module.py", "x = 1" + " " * 108 + "  # noqa: E741  the formula's l", False),
        ("module.py", "x = 1" + " " * 108 + "  # a comment on x", True),
        ("Makefile", "| " + "x" * 119, True),
    ],
)
def test_long_lines_are_found(name: str, line: str, is_long: bool) -> None:
    assert long_lines(name, f"first\n{line}\n") == ([2] if is_long else [])


def test_prose_is_the_fields() -> None:
    found = {name: places for name, source in files() if (places := [*orphans(source), *phrases(source)])}
    assert not found, "\n".join(f"{name}:{line}: {what}" for name, places in found.items() for line, what in places)


def test_pages_use_the_fields_words() -> None:
    pages = {
        page: page.read_text(encoding="utf-8").lower() for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    }
    without_code = {
        page.name: " ".join(re.sub("```.*?```|`[^`]*`", "", text, flags=re.DOTALL).split())
        for page, text in pages.items()
    }
    assert len(pages) > 20
    assert {name: found for name, prose in without_code.items() if (found := PHRASE.findall(prose))} == {}


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ('def f():\n    """Of a block: its tiles."""\n', ["'Of a block: its tiles.' leans on a name"]),
        ('class A:\n    """\n    With a panel.\n    """\n', ["'With a panel.' leans on a name"]),
        ('def f():\n    """Return the tiles of a block."""\n', []),
        ('"""Offsets stay."""\nx = "Of a string"\n', []),
        ("x = 1  # made anew\n", ["'anew'; the field writes: again"]),
        ('"""Outputs lie\nbeside each other."""\n', ["'beside'; the field writes: next to"]),
        ('"""Option `--beside`."""\nname = "beside"  # of `beside`\n', []),
        ('"""Rows of the batch."""\nmessage = "nobody"\n', []),
    ],
)
def test_dialect_is_found_in_prose_alone(source: str, says: list[str]) -> None:
    found = [*orphans(source), *phrases(source)]
    assert len(found) == len(says)
    assert all(what.startswith(wanted) for (_, what), wanted in zip(found, says, strict=True)), found
