"""Figures of the report in the paper's style: box plots of values, grouped by a number derived from the patterns.

Whiskers are at 5 and 95 %.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ksgen.figures import svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 7.2, 2.6  # inches
EXTRA = "bench"  # extra of the package that installs matplotlib
MOST_BOXES = 24  # if there are more numbers, neighbouring ones share a box
LEAST_IN_BOX = 5  # patterns; neighbouring numbers with fewer share a box


def boxes(
    title: str,
    label: str,
    unit: str,
    groups: Mapping[float, Sequence[float]],
    reference: float | None = 1.0,
    scale: Sequence[float] = (),
) -> str:
    """Draw a box per group, labelled with its number of patterns.

    A box shows median and quartiles, with whiskers at 5 and 95 % and no outliers. The axis covers the values in
    `scale`, so that several figures can share an axis; by default, it covers the figure's own values.
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
            margin = (max(scale) / min(scale)) ** 0.05
            axes.set_ylim(min(scale) / margin, max(scale) * margin)
    return drawn.svg


def _value_axis(axes: "Axes", unit: str, values: Sequence[float], reference: float | None) -> None:
    axes.set_ylabel(unit)
    if reference is None:
        axes.set_ylim(bottom=0)
        return
    axes.axhline(reference, color=svg.GUIDE, linewidth=1, linestyle="--")
    if max(values) > svg.WIDE_RATIO * min(values):
        svg.make_logarithmic(axes, "y", (1, 2, 5) if max(values) < 300 * min(values) else (1,), ticks=8)


def _merged(groups: Mapping[float, Sequence[float]]) -> list[tuple[str, list[float]]]:
    """Merge neighbouring groups into at most `MOST_BOXES` named groups of at least `LEAST_IN_BOX` values."""
    least = max(LEAST_IN_BOX, -(-sum(map(len, groups.values())) // MOST_BOXES))
    merged: list[tuple[list[float], list[float]]] = []
    for number in sorted(groups):
        if not merged or len(merged[-1][1]) >= least:
            merged.append(([], []))
        merged[-1][0].append(number)
        merged[-1][1].extend(groups[number])
    if len(merged) > 1 and len(merged[-1][1]) < least:
        numbers, values = merged.pop()
        merged[-1][0].extend(numbers)
        merged[-1][1].extend(values)
    return [
        (f"{numbers[0]:.3g}" if len(numbers) == 1 else f"{numbers[0]:.3g} to {numbers[-1]:.3g}", values)
        for numbers, values in merged
    ]
