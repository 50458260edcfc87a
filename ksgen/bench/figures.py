"""Figures of the report in the paper's style: boxes by a number of the patterns, and scatter plots.

Whiskers are at 5 and 95 %.
"""

import io
from collections.abc import Callable, Mapping, Sequence
from statistics import geometric_mean, median
from textwrap import wrap
from typing import TYPE_CHECKING

from ksgen.bench.comparison import Gains, Pairs
from ksgen.figures import svg
from ksgen.measure.roofline import NO_FLOOR
from ksgen.pattern import Pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 7.2, 2.6  # inches
EXTRA = "bench"
WIDE_RATIO = 4  # from the smallest to the largest; beyond, ratios get a logarithmic scale
MOST_BOXES = 24  # beyond, neighbouring numbers share one


def boxes(
    title: str, label: str, unit: str, groups: Mapping[float, Sequence[float]], reference: float | None = 1.0, scale: Sequence[float] = ()
) -> str:
    """Draw a box per group, labelled with its number of patterns.

    A box shows median and quartiles, with whiskers at 5 and 95 % and no outliers. `scale` holds values that the axis
    covers, so that several figures share it; by default those of the figure.
    """
    merged = _merged(groups)
    with svg.figure(title, svg.Size(WIDTH, HEIGHT), EXTRA) as drawn:
        axes = drawn.axes
        line = {"color": svg.LINE, "linewidth": 0.9}
        axes.boxplot(
            [values for _, values in merged], whis=(5, 95), showfliers=False, widths=0.6,
            boxprops=line, whiskerprops=line, capprops=line, medianprops={"color": svg.ACCENT, "linewidth": 1.6},
        )  # fmt: skip
        names = [f"{name} ({len(values)})" for name, values in merged]
        axes.set_xticks(range(1, len(merged) + 1), names, rotation=45, ha="right", fontsize=7)
        axes.set_xlabel(f"{label} (patterns)")
        axes.grid(axis="x", visible=False)
        _value_axis(axes, unit, scale or [value for _, values in merged for value in values], reference)
        if scale:
            room = (max(scale) / min(scale)) ** 0.05
            axes.set_ylim(min(scale) / room, max(scale) * room)
    return drawn.svg


def points(title: str, label: str, unit: str, pairs: Pairs, key: Callable[[Pattern], float]) -> str:
    """Draw a point per pattern."""
    with svg.figure(title, svg.Size(WIDTH / 2, HEIGHT), EXTRA) as drawn:
        axes = drawn.axes
        axes.plot([key(pattern) for pattern, _ in pairs], [value for _, value in pairs], "o", color=svg.LINE, markersize=2.6, alpha=0.6)
        _logarithmic(axes, "x", subs=(1,))
        axes.set_xlabel(label)
        _value_axis(axes, unit, [value for _, value in pairs], 1.0)
    return drawn.svg


def sorted_gains(found: Sequence[Gains], device: str) -> bytes:
    """Draw a processor's results as a PNG: speed-ups and shares of the floor, sorted, a row per batch and precision."""
    svg.check_matplotlib(EXTRA)
    import matplotlib
    from matplotlib.figure import Figure

    kinds = list(dict.fromkeys((each.batch, each.precision) for each in found))
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(svg.LOOK)
        drawing = Figure(figsize=(9, 0.9 + 2.6 * len(kinds)), layout="constrained", dpi=130)
        drawing.suptitle(f"Kronecker-sparse products: {device}", fontsize=10)
        for (batch, precision), (speeds, shares) in zip(kinds, drawing.subplots(len(kinds), 2, squeeze=False), strict=True):
            some = [each for each in found if (each.batch, each.precision) == (batch, precision)]
            for each, colour in zip(some, (svg.LINE, svg.ACCENT), strict=False):
                label = f"{each.layout}: mean x{geometric_mean(each.ratios):.2f}, least x{min(each.ratios):.2f}"
                _sorted_line(speeds, each.ratios, colour, label)
                if reached := [100 * share for share in each.shares]:
                    _sorted_line(shares, reached, colour, f"{each.layout}: median {median(reached):.0f} %, least {min(reached):.0f} %")
            _value_axis(speeds, "times as fast", [ratio for each in some for ratio in each.ratios], 1.0)
            speeds.set_title(f"{precision}, batch {batch}: beside the best of PyTorch")
            shares.set_title(f"{precision}, batch {batch}: % of the floor reached")
            shares.set_ylim(0, 105)
            for axes in (speeds, shares):
                axes.set_xlabel("patterns, sorted")
                if axes.lines:
                    axes.legend(frameon=False, loc="best")  # position that covers the fewest points
            if not shares.lines:
                shares.set_axis_off()
                shares.text(0.5, 0.5, "\n".join(wrap(NO_FLOOR, 44)), transform=shares.transAxes, ha="center", va="center")
        written = io.BytesIO()
        drawing.savefig(written, format="png", metadata={"Software": None})
    return written.getvalue()


def _sorted_line(axes: "Axes", values: Sequence[float], colour: str, label: str) -> None:
    axes.plot(range(1, len(values) + 1), sorted(values), "o-", color=colour, markersize=2.6, linewidth=1.2, label=label)


def _value_axis(axes: "Axes", unit: str, values: Sequence[float], reference: float | None) -> None:
    axes.set_ylabel(unit)
    if reference is None:
        axes.set_ylim(bottom=0)
        return
    axes.axhline(reference, color=svg.GUIDE, linewidth=1, linestyle="--")
    if max(values) > WIDE_RATIO * min(values):
        _logarithmic(axes, "y", subs=(1, 2, 5) if max(values) < 300 * min(values) else (1,))


def _logarithmic(axes: "Axes", which: str, subs: Sequence[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _merged(groups: Mapping[float, Sequence[float]]) -> list[tuple[str, list[float]]]:
    """Merge neighbouring groups of equal counts into at most `MOST_BOXES` named groups."""
    numbers = sorted(groups)
    at_once = -(-len(numbers) // MOST_BOXES)
    merged = []
    for start in range(0, len(numbers), at_once):
        some = numbers[start : start + at_once]
        name = f"{some[0]:.3g}" if len(some) == 1 else f"{some[0]:.3g} to {some[-1]:.3g}"
        merged.append((name, [value for each in some for value in groups[each]]))
    return merged
