"""The report's figures as the paper draws them: boxes by a number of the patterns, whiskers at 5 and 95 %; and scatter plots."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ksgen import svg
from ksgen.pattern import Pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 7.2, 2.6  # inches
EXTRA = "bench"
WIDE_RATIO = 4  # from the smallest to the largest; beyond, ratios get a logarithmic scale
MOST_BOXES = 24  # beyond, neighbouring numbers share one

Pairs = Sequence[tuple[Pattern, float]]


def boxes(title: str, label: str, unit: str, groups: Mapping[float, Sequence[float]], reference: float | None = 1.0) -> str:
    """A box for each group: median in orange, quartiles, whiskers at 5 and 95 %, no outliers."""
    merged = _merged(groups)
    with svg.figure(title, svg.Size(WIDTH, HEIGHT), EXTRA) as drawn:
        axes = drawn.axes
        line = {"color": svg.LINE, "linewidth": 0.9}
        axes.boxplot(
            [values for _, values in merged], whis=(5, 95), showfliers=False, widths=0.6,
            boxprops=line, whiskerprops=line, capprops=line, medianprops={"color": svg.ACCENT, "linewidth": 1.6},
        )  # fmt: skip
        axes.set_xticks(range(1, len(merged) + 1), [name for name, _ in merged], rotation=45, ha="right", fontsize=7)
        axes.set_xlabel(label)
        axes.grid(axis="x", visible=False)
        _value_axis(axes, unit, [value for _, values in merged for value in values], reference)
    return drawn.svg


def points(title: str, label: str, unit: str, pairs: Pairs, key: Callable[[Pattern], float]) -> str:
    """A point for each pattern."""
    with svg.figure(title, svg.Size(WIDTH / 2, HEIGHT), EXTRA) as drawn:
        axes = drawn.axes
        axes.plot([key(pattern) for pattern, _ in pairs], [value for _, value in pairs], "o", color=svg.LINE, markersize=2.6, alpha=0.6)
        _logarithmic(axes, "x", subs=(1,))
        axes.set_xlabel(label)
        _value_axis(axes, unit, [value for _, value in pairs], 1.0)
    return drawn.svg


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
    """Named groups, at most `MOST_BOXES`: as many neighbours in each as that takes."""
    numbers = sorted(groups)
    at_once = -(-len(numbers) // MOST_BOXES)
    merged = []
    for start in range(0, len(numbers), at_once):
        some = numbers[start : start + at_once]
        name = f"{some[0]:.3g}" if len(some) == 1 else f"{some[0]:.3g} to {some[-1]:.3g}"
        merged.append((name, _all(groups[each] for each in some)))
    return merged


def _all(lists: Iterable[Sequence[float]]) -> list[float]:
    return [value for values in lists for value in values]
