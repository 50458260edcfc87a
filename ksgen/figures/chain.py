"""Draws a small chain as an SVG for light and dark pages: the support of each factor, in order of multiplication."""

from collections.abc import Iterator
from itertools import product

from ksgen.figures.svg import ACCENT, GUIDE, INK, LINE, POINT, RULE, file_style
from ksgen.pattern import Chain, Pattern

SIDE = 48  # pixels along the longest side of a factor
_GAP = 26  # pixels between two factors, which hold an arrow
_COLOURS = (LINE, ACCENT, GUIDE, POINT)  # colours of a factor's a*d independent blocks, in turn


def chain_svg(chain: Chain) -> str:
    """Picture of a chain, small enough for a table in the documentation."""
    cell = SIDE / max(feature for pattern in chain for feature in (pattern.in_features, pattern.out_features))
    height = max(cell * pattern.out_features for pattern in chain)
    x, parts = 8.0, [_word("x", 8, height)]
    for pattern in chain:
        x += _GAP
        y = (height - cell * pattern.out_features) / 2
        parts += [_word("→", x - _GAP / 2, height), *_factor(pattern, cell, x, y)]
        x += cell * pattern.in_features
    parts += [_word("→", x + _GAP / 2, height), _word("y", x + _GAP, height)]
    width = x + _GAP + 8
    size = f'width="{width:g}" height="{height + 2:g}" viewBox="0 -1 {width:g} {height + 2:g}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="13" text-anchor="middle"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{chain}" {font}>',
            file_style(),
            *parts,
            "</svg>\n",
        ]
    )


def _word(word: str, x: float, height: float) -> str:
    return f'<text x="{x:g}" y="{height / 2 + 4:g}" fill="{INK}">{word}</text>'


def _factor(pattern: Pattern, cell: float, x: float, y: float) -> Iterator[str]:
    """A frame, and a path per colour of the blocks' free entries."""
    yield f'<g transform="translate({x:g} {y:g}) scale({cell:g})">'
    for number, colour in enumerate(_COLOURS[: pattern.a * pattern.d]):
        path = "".join(f"M{column} {row}h{run}v1h-{run}z" for row, column, run in _runs(pattern, number))
        yield f'<path fill="{colour}" d="{path}"/>'
    size = f'width="{pattern.in_features}" height="{pattern.out_features}"'
    yield f'<rect {size} fill="none" stroke="{RULE}" stroke-width="{1 / cell:g}"/></g>'


def _runs(pattern: Pattern, number: int) -> Iterator[tuple[int, int, int]]:
    """Row, first column and length of the runs of free entries in the blocks (i, j) that have colour `number`."""
    a, b, c, d = pattern.shape
    for i, k, j in product(range(a), range(b), range(d)):
        if (i * d + j) % len(_COLOURS) == number:
            columns = [pattern.inputs.place_of(i, column, j) for column in range(c)]
            row, is_run = pattern.outputs.place_of(i, k, j), d == 1 and not pattern.load
            yield from [(row, columns[0], c)] if is_run else ((row, column, 1) for column in columns)
