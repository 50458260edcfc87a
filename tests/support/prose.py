"""Sentences of pages and of docstrings, and how long they are."""

import re
from collections.abc import Iterator

MOST_WORDS = 25
_WITH_ITEMS = ("Args:", "Advanced:", "Attributes:", "Raises:")
_WITH_PROSE = (*_WITH_ITEMS, "Returns:", "Yields:")
_ITEM = re.compile(r"    \*{0,2}[\w.`]+: ")


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of paragraphs and lists.

    Code is one word; headings, tables and links' targets do not count.
    """
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    lines = ("" if line.startswith(("#", "|", "<", "![", "    ")) else line for line in text.splitlines())
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        prose = re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "code", block))
        yield from re.split(r"(?<=[.!?])[)\"*]*\s+", prose)


def words_in(sentence: str) -> int:
    return sum(bool(re.search(r"\w", word)) for word in sentence.split())


def without_examples(docstring: str) -> str:
    """Text of a docstring without examples; each argument or error is a paragraph of its own."""
    section, lines = "", list[str]()
    for line in docstring.splitlines():
        if line.strip("\b") and not line.startswith(" "):
            section = line if re.fullmatch(r"[A-Z]\w+:", line) else ""
        if not section:
            lines.append(line.strip("\b"))  # click does not wrap the paragraph after "\b"
        elif section in _WITH_PROSE:
            item = _ITEM.match(line) if section in _WITH_ITEMS else None
            lines += ["", line[item.end() :]] if item else [line.strip().removeprefix(section)]
    return "\n".join(lines)


def long_sentences(text: str) -> list[str]:
    """Sentences of more than 25 words."""
    return [" ".join(each.split()) for each in sentences(text) if words_in(each) > MOST_WORDS]
