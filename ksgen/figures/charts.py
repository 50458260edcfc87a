"""Charts of results as SVG for light and dark pages: bars of times, and values in ascending order. Needs no matplotlib.

A chart is a panel of fixed width; a picture is one file with several of them. The same numbers give the same bytes.
A small chain is drawn as the support of each factor, in order of multiplication.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, product
from math import log10

from ksgen.figures.svg import ACCENT, GUIDE, INK, LINE, POINT, RULE, file_style
from ksgen.pattern import Chain, Pattern

WIDTH = 360  # pixels of a panel
MOST_TIMES = 12  # a bar longer than this many times the shortest is cut, and marked
_MARGIN, _LINE, _TITLE = 8, 18, 22  # around a panel; height of a bar or of a line of text; height of the title
_PLOT = 130  # height of a plot of sorted values
_LETTER = 6.4  # width of a letter of 12 pixels, rounded up
_WIDE = 4  # the axis is logarithmic if the largest value exceeds this many times the smallest
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_LETTERS_OF_TITLE, _LETTERS_OF_NAME = 54, 22  # longer ones are cut


@dataclass(frozen=True)
class Bars:
    """Times in microseconds per contender, and the floor, a lower bound.

    Bars of contenders in `own` are highlighted. The other bars show their times relative to the fastest of `own`.
    """

    title: str
    times: tuple[tuple[str, float], ...]
    own: frozenset[str]
    floor: float | None = None

    @property
    def height(self) -> int:
        return _TITLE + _LINE * (len(self.times) + (self.floor is not None)) + _MARGIN

    def parts(self) -> Iterator[str]:
        yield _text(0, 14, _cut(self.title, _LETTERS_OF_TITLE), bold=True)
        shortest, longest = min(us for _, us in self.times), max(us for _, us in self.times)
        reach = min(max(longest, self.floor or 0), MOST_TIMES * shortest)
        left = _LETTER * max(len(name) for name, _ in self.times) + 6
        fastest_own = min((us for name, us in self.times if name in self.own), default=None)
        labels = [
            _time(us) + (f", x{us / fastest_own:.2f}" if fastest_own and name not in self.own else "")
            for name, us in self.times
        ]
        scale = (WIDTH - left - 6 - _LETTER * max(map(len, labels))) / reach
        for number, ((name, us), label) in enumerate(zip(self.times, labels, strict=True)):
            y, length = _TITLE + _LINE * number, scale * min(us, reach)
            colour = ACCENT if name in self.own else POINT
            yield _text(left - 6, y + 13, name, "end")
            yield f'<rect class="bar" x="{left:.1f}" y="{y + 3}" width="{length:.1f}" height="12" fill="{colour}"/>'
            if us > reach:  # a gap in the bar
                yield (
                    f'<path class="cut" d="M{left + length - 14:.1f} {y + 17}l5 -16m4 0l-5 16" stroke="{RULE}" '
                    'stroke-width="2"/>'
                )
            yield _text(left + length + 5, y + 13, label)
        if self.floor is not None:
            x, below = left + scale * min(self.floor, reach), _TITLE + _LINE * len(self.times)
            yield _dashed("floor", f"M{x:.1f} {_TITLE}V{below + 4}")
            yield _text(x, below + 15, f"floor {_time(self.floor)}", "end" if x > WIDTH / 2 else "start", colour=GUIDE)


@dataclass(frozen=True)
class Series:
    """Values by name, and the label that sums them up."""

    label: str
    values: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Sorted:
    """Values of one or two series in ascending order, with the names of the extremes. The dashed line is at `line`.

    `unit` is written after a value; the unit "x" is written before it.
    """

    title: str
    series: tuple[Series, ...]
    unit: str
    line: float

    @property
    def height(self) -> int:
        return _TITLE + 2 * _LINE * len(self.series) + _PLOT + 14 + _MARGIN

    def parts(self) -> Iterator[str]:
        yield _text(0, 14, _cut(self.title, _LETTERS_OF_TITLE), bold=True)
        every = [value for each in self.series for _, value in each.values]
        axis = _Axis(
            _TITLE + 2 * _LINE * len(self.series) + 8, min(*every, self.line), max(*every, self.line), self.unit
        )
        yield from axis.parts(self.line)
        for number, (each, colour) in enumerate(zip(self.series, (LINE, ACCENT), strict=False)):
            y, ordered = _TITLE + 2 * _LINE * number, sorted(each.values, key=lambda pair: pair[1])
            yield f'<circle cx="5" cy="{y + 9}" r="4" fill="{colour}"/>'
            yield _text(14, y + 13, each.label)
            yield _text(14, y + 13 + _LINE, f"{self._extreme(ordered[0])} … {self._extreme(ordered[-1])}")
            step = (WIDTH - axis.left - 8) / max(len(ordered) - 1, 1)
            places = [(axis.left + 4 + step * rank, axis.y(value)) for rank, (_, value) in enumerate(ordered)]
            if len(places) > 1:
                line = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
                yield f'<path class="curve" d="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>'
            yield "".join(
                f'<circle class="value" cx="{x:.1f}" cy="{y:.1f}" r="1.8" fill="{colour}"/>' for x, y in places
            )

    def _extreme(self, pair: tuple[str, float]) -> str:
        name, value = pair
        return f"{f'x{value:.2f}' if self.unit == 'x' else f'{value:.0f} {self.unit}'} {_cut(name, _LETTERS_OF_NAME)}"


@dataclass(frozen=True)
class _Axis:
    """A vertical axis: from 0 to 100 for percentages, else from the least to the largest value.

    The latter is logarithmic if these values are far apart.
    """

    top: float
    low: float
    high: float
    unit: str
    left: float = 34

    @property
    def bottom(self) -> float:
        return self.top + _PLOT

    @property
    def is_logarithmic(self) -> bool:
        return self.unit != "%" and self.high > _WIDE * self.low

    @property
    def ends(self) -> tuple[float, float]:
        if self.unit == "%":
            return 0, 100
        if self.is_logarithmic:
            return self.low / 1.1, self.high * 1.1
        room = 0.05 * self.high
        return self.low - room, self.high + room

    def y(self, value: float) -> float:
        low, high = self.ends
        share = log10(value / low) / log10(high / low) if self.is_logarithmic else (value - low) / (high - low)
        return self.bottom - _PLOT * share

    @property
    def ticks(self) -> list[float]:
        """Numbers of the axis, with room for a line of text between them."""
        low, high = self.ends
        wanted = (0, 25, 50, 75, 100) if self.unit == "%" else _TICKS if self.is_logarithmic else _even(low, high)
        found = [each for each in wanted if low <= each <= high]
        return found[:1] + [after for before, after in pairwise(found) if self.y(before) - self.y(after) >= 12]

    def parts(self, line: float) -> Iterator[str]:
        for tick in self.ticks:
            y = self.y(tick)
            shown = f"x{tick:g}" if self.unit == "x" else f"{tick:g}"
            yield f'<path d="M{self.left} {y:.1f}H{WIDTH}" stroke="{RULE}" stroke-width="0.6"/>' + _text(
                self.left - 4, y + 4, shown, "end"
            )
        yield _dashed("line", f"M{self.left} {self.y(line):.1f}H{WIDTH}")


def _dashed(kind: str, path: str) -> str:
    return f'<path class="{kind}" d="{path}" stroke="{GUIDE}" stroke-width="1.5" stroke-dasharray="4 2"/>'


def _cut(words: str, most: int) -> str:
    return words if len(words) <= most else f"{words[: most - 1]}…"


def _time(us: float) -> str:
    return f"{us:,.0f} us" if us >= 10 else f"{us:.3g} us"


def _even(low: float, high: float) -> list[float]:
    """Round numbers from a low to a high value, in at most eight steps."""
    step = next(each for each in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if (high - low) / each <= 8)
    return [round(step * number, 1) for number in range(int(low / step), int(high / step) + 1)]


def inline(panel: Bars | Sorted) -> str:
    """One panel as part of a page that has `svg.dark_style()`."""
    return _svg(WIDTH, panel.height, panel.title, panel.parts())


def picture(title: str, panels: Sequence[Bars | Sorted], columns: int = 2) -> str:
    """A file of several panels, row by row."""
    parts, y = [file_style()], 0
    for row in (panels[start : start + columns] for start in range(0, len(panels), columns)):
        for column, panel in enumerate(row):
            parts += [f'<g transform="translate({column * (WIDTH + 4 * _MARGIN)} {y})">', *panel.parts(), "</g>"]
        y += max(panel.height for panel in row) + _MARGIN
    columns = min(columns, len(panels))
    return _svg(columns * WIDTH + (columns - 1) * 4 * _MARGIN, y, title, parts) + "\n"


def _svg(width: int, height: int, title: str, parts: Iterator[str] | list[str]) -> str:
    size = f'viewBox="{-_MARGIN} 0 {width + 2 * _MARGIN} {height}" width="{width + 2 * _MARGIN}" height="{height}"'
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="12"'
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{escape(title)}" {font}>'
    return "\n".join([begin, *parts, "</svg>"])


def _text(x: float, y: float, words: str, anchor: str = "start", *, bold: bool = False, colour: str = INK) -> str:
    look = ' font-weight="bold"' * bold + f' text-anchor="{anchor}"' * (anchor != "start")
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}"{look}>{escape(words)}</text>'


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
    begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label="{chain}" {font}>'
    return "\n".join([begin, file_style(), *parts, "</svg>\n"])


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
