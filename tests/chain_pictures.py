"""The table of named chains in docs/specs.md, and its pictures and those of docs/structures.md.

`python -m tests.chain_pictures` draws them again.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ksgen import structures
from ksgen.figures.charts import chain_svg
from ksgen.pattern import NAMED_CHAINS, Chain

DOCS = Path(__file__).parents[1] / "docs"
_ROW = re.compile(
    r"^\| `(?P<call>(?P<name>\w+)\(.+\))`<br>.* \| !\[.+\]\((?P<file>.+\.svg)\)<br>(?P<chain>.+) \|$", re.MULTILINE
)
_STRUCTURE = re.compile(r"!\[(?P<call>\w+\([^)]+\)+(?:\[\d\])?)\]\((?P<file>chains/.+?\.svg)\)")


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


def pictures() -> dict[Path, str]:
    """SVG of each picture: of the table, and of the examples that are the titles of pictures of structures."""
    chains = {row.picture: row.chain for row in rows()}
    for found in _STRUCTURE.finditer((DOCS / "structures.md").read_text(encoding="utf-8")):
        chains[DOCS / found["file"]] = eval(found["call"], vars(structures).copy()).chain
    return {path: chain_svg(chain) for path, chain in chains.items()}


if __name__ == "__main__":
    for path, picture in pictures().items():
        path.write_text(picture, encoding="utf-8")
