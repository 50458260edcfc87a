"""Prose and names use the field's words, and a docstring stands without the name of its function.

Prose is that of pages, docstrings, comments and messages, in Python files, templates and specs.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prose import long_sentences, without_examples

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
NAMES = {  # words of functions' names, beyond the phrases
    "way": "variant, method, path",
    "ways": "variants, methods, paths",
    "told": "reported, described",
    "room": "space, memory, package",
    "rooms": "packages",
    "doubt": "unreliable, uncertain",
    "doubts": "reasons",
    "doubted": "unreliable",
}
ALLOWED = (
    ("ksgen/bench/rows.py", "'beside'"),  # stored results of earlier versions have it in names of layers and patterns
    ("tests/torch/test_short_names.py", "'beside'"),  # an earlier name, in its warning
)
FOLDERS = ("ksgen", "benchmarks", "examples", "docs/tutorials", "release", "tests")
MOST_COLUMNS = 120
LONGER = (  # files whose lines are not written by hand
    "benchmarks/results/",  # results as tools wrote them
    "tests/families/recorded_vector_times.json",  # recorded too
    "tests/second_opinion/clustersim.patch",  # lines of the program that it changes
)
PRAGMA = re.compile(r"\s*# (noqa|type: ignore)\b.*")  # ruff does not count it either
PHRASE = re.compile(rf"(?<![-\w])({'|'.join(PHRASES)})(?!\w)")


def files() -> Iterator[tuple[str, str]]:
    """Yield name and source of every Python file that is written by hand."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(SKIPPED):
                yield name, path.read_text(encoding="utf-8")


def commented() -> Iterator[tuple[str, str]]:
    """Yield name and comments of every template and of every spec."""
    for path in sorted((ROOT / "templates").rglob("*.j2")):
        source = path.read_text(encoding="utf-8")
        found = re.findall(r"\{#(.*?)#\}|/\*(.*?)\*/|//([^\n]*)", source, re.DOTALL)
        yield path.relative_to(ROOT).as_posix(), "\n".join(part.strip() for parts in found for part in parts if part)
    for path in sorted((ROOT / "specs").rglob("*.yaml")):
        found = re.findall(r"#([^\n]*)", path.read_text(encoding="utf-8"))
        yield path.relative_to(ROOT).as_posix(), "\n".join(map(str.strip, found))


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


def messages(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of each string of several words; docstrings are left out."""
    tree = ast.parse(source)
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in statements
        if is_text and " " in node.value.strip():
            yield node.lineno, node.value


def names(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each function whose name has a word that the field does not use."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.match(r"\s*(?:async )?def (\w+)", line):
            words = found[1].lower().replace("_", " ")
            for phrase in PHRASE.findall(words):
                yield number, f"{phrase!r} in {found[1]}; the field writes: {PHRASES[phrase]}"
            for word in set(words.split()) & set(NAMES):
                yield number, f"{word!r} in {found[1]}; the field writes: {NAMES[word]}"


def orphans(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each docstring whose first words need the function's name before them."""
    if re.search(rf'"""\s*{ORPHAN.pattern}', source):  # most files need no parser
        for line, text in docstrings(source):
            if ORPHAN.match(text):
                yield line, f"{text.splitlines()[0]!r} leans on a name; write a statement or an imperative"


def unusual(text: str) -> Iterator[str]:
    """Yield a complaint for each phrase of a text that the field does not use. Code does not count."""
    for phrase in PHRASE.findall(" ".join(re.sub("`[^`]*`", "", text).lower().split())):
        yield f"{phrase!r}; the field writes: {PHRASES[phrase]}"


def phrases(source: str) -> Iterator[tuple[int, str]]:
    """Yield line and complaint of each docstring, comment or message with a phrase that the field does not use."""
    flat = " ".join(source.lower().split())
    if not any(re.search(rf"\b{phrase}\b", flat) for phrase in PHRASES if phrase in flat):  # most files need no parser
        return
    has_comments = any(PHRASE.search(line.partition("#")[2].lower()) for line in source.splitlines())
    for line, text in (*docstrings(source), *messages(source), *(comments(source) if has_comments else ())):
        yield from ((line, what) for what in unusual(text))


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


def test_prose_and_names_are_the_fields() -> None:
    found = {name: [*orphans(source), *phrases(source), *names(source)] for name, source in files()}
    found |= {name: [(0, what) for what in unusual(text)] for name, text in commented()}
    assert len(found) > 700
    left = [
        f"{name}:{line}: {what}"
        for name, places in found.items()
        for line, what in places
        if not any(name == allowed and what.startswith(phrase) for allowed, phrase in ALLOWED)
    ]
    assert not left, "\n".join(left)
    for allowed, phrase in ALLOWED:
        assert any(what.startswith(phrase) for _, what in found[allowed]), f"{allowed} has no {phrase} any more"


def test_sentences_of_docstrings_have_at_most_25_words() -> None:
    found = [
        f"{name}:{line}: {each}"
        for name, source in files()
        if not name.startswith("tests/")
        for line, text in docstrings(source)
        for each in long_sentences(without_examples(text))
    ]
    assert not found, "\n".join(found)


def test_pages_use_the_fields_words() -> None:
    pages = {
        page: page.read_text(encoding="utf-8").lower()
        for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "templates").glob("*.md"))
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
        ('"""Rows of the batch."""\nname = "nobody"\n', []),
        ('raise ValueError(f"{name} is told")\n', ["'is told'; the field writes: receives"]),
        ("def test_x_is_made_anew() -> None: ...\n", ["'anew' in test_x_is_made_anew; the field writes: again"]),
        ("class A:\n    async def both_ways(self): ...\n", ["'ways' in both_ways; the field writes: variants"]),
        ("def always_untold() -> None: ...\n", []),
    ],
)
def test_dialect_is_found_in_prose_and_names_alone(source: str, says: list[str]) -> None:
    found = [*orphans(source), *phrases(source), *names(source)]
    assert len(found) == len(says)
    assert all(what.startswith(wanted) for (_, what), wanted in zip(found, says, strict=True)), found


WORDS = " ".join(["word"] * 26)


@pytest.mark.parametrize(
    ("docstring", "is_long"),
    [
        (f"{WORDS}.", True),
        (f"{WORDS[:-5]}.", False),
        (f"Short.\n\n    {WORDS}", False),  # code
        (f"Short.\n\nArgs:\n    x: {WORDS}.\n", True),
        (f"Short.\n\nArgs:\n    x: {WORDS[:-5]}\n    y: Another.\n", False),
        (f"Short.\n\nReturns:\n    {WORDS[:49]}\n    {WORDS[50:]}\n", True),
        (f"Short.\n\nExamples:\n    >>> {WORDS}\n", False),
        (f"Short.\n\n\b\nExamples:\n  {WORDS}\n", False),
        (f"Short: `{WORDS}`.", False),
    ],
)
def test_long_sentences_of_docstrings_are_found(docstring: str, is_long: bool) -> None:
    assert bool(long_sentences(without_examples(docstring))) == is_long
