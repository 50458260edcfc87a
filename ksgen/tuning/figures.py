"""The report's figures: SVG by matplotlib, with text as text; the same numbers give the same bytes. Knows no trials.

Colours are those of a light page; `PALETTE` says what a dark page shows in their place.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ksgen.errors import KsgenError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, RULE, POINT, BEST, WINNER, FLOOR = "#23282e", "#c4cad1", "#7d8a97", "#1769aa", "#c2410c", "#1f7a45"
PALETTE = {INK: "#d9dee4", RULE: "#444c55", POINT: "#8f9ba8", BEST: "#69b1ec", WINNER: "#f59a5f", FLOOR: "#62c48a"}  # light: dark
HEIGHT = 1.9  # inches
WIDE_RATIO = 4  # from the smallest to the largest; beyond, an axis is logarithmic
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib: it measures with what it has
    "font.size": 8,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.titlesize": 8.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.4,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "path.simplify": False,  # points are lines of no length
}


def check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise KsgenError(f"a report needs matplotlib, which cannot be imported ({error}); pip install 'ksgen[tune]'") from None


def best_so_far(times_us: Sequence[float], winner: int, floor_us: float | None) -> str:
    """The time of each candidate in measuring order, the best until then, and the floor. `winner`: its place among them."""
    best = list(accumulate(times_us, min))
    numbers = list(range(1, len(times_us) + 1))
    with _figure(4.2, "best so far", (times_us, winner, floor_us)) as (axes, svg):
        _points(axes, numbers, times_us)
        axes.step([*numbers, len(numbers) + 0.5], [*best, best[-1]], where="post", color=BEST, linewidth=1.6)
        _winner(axes, numbers[winner], times_us[winner])
        if floor_us:
            axes.axhline(floor_us, color=FLOOR, linewidth=1, linestyle="--")
        axes.set_xlim(0.5, len(numbers) + 0.5)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("candidates measured")
        _name_y(axes, _time_scale(axes, "y", [*times_us, *([floor_us] if floor_us else [])]))
    return svg[0]


def constant(name: str, values: Sequence[Any], times_us: Sequence[float], winner: int | None) -> str:
    """What one constant does: every candidate's time by its value, with the best and the median of each value."""
    known = sorted(set(values))
    at = {value: place for place, value in enumerate(known)}  # evenly: most constants are powers of two
    groups = [[time for value, time in zip(values, times_us, strict=True) if value == each] for each in known]
    with _figure(2.3, name, (values, times_us, winner)) as (axes, svg):
        _points(axes, [at[value] for value in values], times_us)
        axes.plot(range(len(known)), [median(group) for group in groups], color=POINT, linewidth=1, linestyle="--")
        axes.plot(range(len(known)), [min(group) for group in groups], color=BEST, linewidth=1.6)
        if winner is not None:
            _winner(axes, at[values[winner]], times_us[winner])
        axes.set_xticks(range(len(known)), [str(value) for value in known])
        axes.set_xlim(-0.5, len(known) - 0.5)
        _name_y(axes, _time_scale(axes, "y", times_us))
    return svg[0]


def predictions(predicted_us: Sequence[float], measured_us: Sequence[float], winner: int | None) -> str:
    """The cost model's time of each candidate and the measured one; on the line they agree."""
    with _figure(2.6, "cost model", (predicted_us, measured_us, winner)) as (axes, svg):
        _points(axes, predicted_us, measured_us)
        if winner is not None:
            _winner(axes, predicted_us[winner], measured_us[winner])
        axes.set_xlabel(f"predicted, {_time_scale(axes, 'x', predicted_us)}")
        _name_y(axes, _time_scale(axes, "y", measured_us))
        axes.autoscale(False)
        ends = [min(*predicted_us, *measured_us), max(*predicted_us, *measured_us)]
        axes.plot(ends, ends, color=RULE, linewidth=1)
    return svg[0]


def roofline(flop_per_byte: float, flops_per_s: float, most_bytes_per_s: float, most_flops_per_s: float) -> str:
    """What the device does at most for so many operations a byte, and what the winner does."""
    ridge = most_flops_per_s / most_bytes_per_s
    ends = [min(ridge, flop_per_byte) / 4, max(ridge, flop_per_byte) * 4]
    unit, scale = ("TFLOP/s", 1e12) if most_flops_per_s > 2e12 else ("GFLOP/s", 1e9)
    with _figure(2.6, f"roofline, {unit}", (flop_per_byte, flops_per_s, most_bytes_per_s, most_flops_per_s)) as (axes, svg):
        roof = [min(most_flops_per_s, each * most_bytes_per_s) / scale for each in (ends[0], ridge, ends[1], flop_per_byte)]
        axes.plot([ends[0], ridge, ends[1]], roof[:3], color=FLOOR, linewidth=1.6)
        axes.plot([flop_per_byte] * 2, [flops_per_s / scale, roof[3]], color=RULE, linewidth=1)
        _winner(axes, flop_per_byte, flops_per_s / scale)
        axes.set_xlabel("FLOP a byte")
        _scale(axes, "x", ends)
        _scale(axes, "y", [*roof, flops_per_s / scale])
    return svg[0]


@contextmanager
def _figure(width: float, title: str, drawn: object) -> Iterator[tuple["Axes", list[str]]]:
    """Axes to draw on, and a list that has the SVG afterwards. `drawn` is what names inside it are made from."""
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    svg: list[str] = []
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own say
        matplotlib.rcParams.update(_STYLE | {"svg.hashsalt": f"{title} {drawn!r}"})
        figure = Figure(figsize=(width, HEIGHT))
        figure.subplots_adjust(left=0.48 / width, right=1 - 0.12 / width, bottom=0.36 / HEIGHT, top=1 - 0.24 / HEIGHT)
        axes = figure.subplots()
        axes.set_title(title)
        axes.tick_params(length=2)
        yield axes, svg
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    svg.append(_inline(written.getvalue(), title))


def _points(axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
    """One path with a dot for each: a third of what markers take in a file."""
    gap = float("nan")
    places = [[each for value in along for each in (value, value, gap)] for along in (x, y)]
    axes.plot(*places, color=POINT, alpha=0.55, linewidth=3.2, solid_capstyle="round")


def _winner(axes: "Axes", x: float, y: float) -> None:
    axes.plot(x, y, "o", color=WINNER, markersize=5)


def _time_scale(axes: "Axes", which: str, times_us: Sequence[float]) -> str:
    """A scale, and its unit: microseconds, or milliseconds where all times are that long."""
    from matplotlib.ticker import FuncFormatter

    _scale(axes, which, times_us)
    unit, scale = ("ms", 1000) if min(times_us) > 2000 else ("µs", 1)
    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda time, _: f"{time / scale:g}"))
    return unit


def _name_y(axes: "Axes", unit: str) -> None:
    """Above the numbers, where it takes no room beside them."""
    axes.text(-0.02, 1.03, unit, transform=axes.transAxes, horizontalalignment="right", verticalalignment="bottom")


def _scale(axes: "Axes", which: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    axis, ratio = getattr(axes, f"{which}axis"), max(values) / min(values)
    if ratio > WIDE_RATIO:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_major_locator(MaxNLocator(4) if ratio <= WIDE_RATIO else LogLocator(subs=(1, 2, 5) if ratio < 100 else (1,), numticks=6))


def _inline(text: str, title: str) -> str:
    """The SVG as a part of a page: without what a page says once, names that figures would share, and digits that nobody sees."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(text)
    root.attrib |= {"role": "img", "aria-label": title}
    for parent in root.iter():
        for style in parent.findall(f"{{{_SVG}}}style"):
            parent.remove(style)
        if parent.tag == f"{{{_SVG}}}g":
            parent.attrib.pop("id", None)
        if "d" in parent.attrib:
            parent.attrib["d"] = " ".join(map(_rounded, parent.attrib["d"].split()))
        parent.tail = None
        if not (parent.text or "").strip():
            parent.text = None
    return ElementTree.tostring(root, encoding="unicode")


def _rounded(word: str) -> str:
    """A letter of a path as it is, a coordinate to a hundredth of a point."""
    return word if word.isalpha() else f"{round(float(word), 2):g}"
