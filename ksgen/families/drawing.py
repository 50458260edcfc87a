"""A tile as a small drawing in the comments of a source, with the part that each warp or vector computes.

Never decides a size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from textwrap import wrap

MOST_CHARACTERS = 117  # of a line, after "// "
MOST_ROWS, MOST_COLUMNS = 4, 6  # limits of a drawing; parts between the last two drawn ones are left out


@dataclass(frozen=True)
class DrawnSide:
    """One side of a tile: its length, the unit, and the number of parts in which it is drawn."""

    size: int
    what: str
    parts: int


def draw(heading: str, down: DrawnSide, across: DrawnSide, cell: Callable[[int, int], str], below: str = "") -> str:
    """Draw a tile as lines of comments; `cell` returns the text of a row and a column."""
    rows, columns = _shown(down.parts, MOST_ROWS), _shown(across.parts, MOST_COLUMNS)
    cells = [["..." if None in (row, column) else cell(row or 0, column or 0) for column in columns] for row in rows]
    width = max(len(text) for line in cells for text in line)
    margin = f"{down.size} {down.what}"
    indent = " " * (len(margin) + 2)
    rule = f"{indent}+{'+'.join(['-' * (width + 2)] * len(columns))}+"
    lines = [*wrap(heading, MOST_CHARACTERS), "", f"{indent}{across.size} {across.what}", rule]
    for number, line in enumerate(cells):
        drawn = "|".join(f" {text:^{width}} " for text in line)
        lines += [f"{margin if number == 0 else indent[:-2]}  |{drawn}|", rule]
    lines += ["", *(part for line in below.splitlines() for part in wrap(line, MOST_CHARACTERS))] if below else []
    return "".join(f"// {line}".rstrip() + "\n" for line in lines)


def _shown(parts: int, most: int) -> list[int | None]:
    """Numbers of the parts that are drawn; None for those left out."""
    return list(range(parts)) if parts <= most else [*range(most - 2), None, parts - 1]
