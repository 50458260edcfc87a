"""The table of named chains in docs/specs.md, and its pictures. `python -m tests.chain_pictures` draws them again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ksgen.figures.chain import chain_svg
from ksgen.pattern import NAMED_CHAINS, Chain

DOCS = Path(__file__).parents[1] / "docs"
_ROW = re.compile(
    r"^\| `(?P<call>(?P<name>\w+)\(.+\))`<br>.* \| !\[.+\]\((?P<file>.+\.svg)\)<br>(?P<chain>.+) \|$", re.MULTILINE
)


class Row(NamedTuple):
    name: str
    chain: Chain  # that its example makes
    written: str  # the chain as the table shows it
    picture: Path


def rows() -> Iterator[Row]:
    """The rows of the table."""
    for found in _ROW.finditer((DOCS / "specs.md").read_text(encoding="utf-8")):
        chain = eval(found["call"], dict(NAMED_CHAINS))  # the text is of this repository
        yield Row(found["name"], chain, found["chain"], DOCS / found["file"])


if __name__ == "__main__":
    for row in rows():
        row.picture.parent.mkdir(exist_ok=True)
        row.picture.write_text(chain_svg(row.chain), encoding="utf-8")
