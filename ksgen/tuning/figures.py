"""Draws the report's figures: the course of a search, constants' effects, the cost model's quality. Takes numbers."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from statistics import median
from typing import TYPE_CHECKING, Any

from ksgen.figures import svg
from ksgen.figures.svg import POINT, RULE

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEST, WINNER, FLOOR = svg.LINE, svg.ACCENT, svg.GUIDE
EXTRA = "tune"
HEIGHT = 1.9  # inches


def best_so_far(times_us: Sequence[float], winner: int, floor_us: float | None) -> str:
    """Draw the time of each candidate in measuring order, the best so far, and the floor. `winner` is an index of
    `times_us`."""
    best = list(accumulate(times_us, min))
    numbers = list(range(1, len(times_us) + 1))
    with _figure(4.2, "best so far", (times_us, winner, floor_us)) as drawn:
        axes = drawn.axes
        _points(axes, numbers, times_us)
        axes.step([*numbers, len(numbers) + 0.5], [*best, best[-1]], where="post", color=BEST, linewidth=1.6)
        _winner(axes, numbers[winner], times_us[winner])
        if floor_us:
            axes.axhline(floor_us, color=FLOOR, linewidth=1, linestyle="--")
        axes.set_xlim(0.5, len(numbers) + 0.5)
        axes.locator_params(axis="x", integer=True)
        axes.set_xlabel("candidates measured")
        _name_y(axes, _time_scale(axes, "y", [*times_us, *([floor_us] if floor_us else [])]))
    return drawn.svg


def constant(name: str, values: Sequence[Any], times_us: Sequence[float], winner: int | None) -> str:
    """Draw the effect of one constant: each candidate's time by its value, and the best and median time per value."""
    known = sorted(set(values))
    place_of = {value: place for place, value in enumerate(known)}  # evenly spaced: most constants are powers of two
    groups = [[time for value, time in zip(values, times_us, strict=True) if value == each] for each in known]
    with _figure(2.3, name, (values, times_us, winner)) as drawn:
        axes = drawn.axes
        _points(axes, [place_of[value] for value in values], times_us)
        axes.plot(range(len(known)), [median(group) for group in groups], color=POINT, linewidth=1, linestyle="--")
        axes.plot(range(len(known)), [min(group) for group in groups], color=BEST, linewidth=1.6)
        if winner is not None:
            _winner(axes, place_of[values[winner]], times_us[winner])
        axes.set_xticks(range(len(known)), [str(value) for value in known])
        axes.set_xlim(-0.5, len(known) - 0.5)
        _name_y(axes, _time_scale(axes, "y", times_us))
    return drawn.svg


def predictions(predicted_us: Sequence[float], measured_us: Sequence[float], winner: int | None) -> str:
    """Draw the cost model's time against the measured one for each candidate. Both are equal on the line."""
    with _figure(2.6, "cost model", (predicted_us, measured_us, winner)) as drawn:
        axes = drawn.axes
        _points(axes, predicted_us, measured_us)
        if winner is not None:
            _winner(axes, predicted_us[winner], measured_us[winner])
        axes.set_xlabel(f"predicted, {_time_scale(axes, 'x', predicted_us)}")
        _name_y(axes, _time_scale(axes, "y", measured_us))
        axes.autoscale(False)
        ends = [min(*predicted_us, *measured_us), max(*predicted_us, *measured_us)]
        axes.plot(ends, ends, color=RULE, linewidth=1)
    return drawn.svg


def roofline(flop_per_byte: float, flops_per_s: float, most_bytes_per_s: float, most_flops_per_s: float) -> str:
    """Draw the device's limit by operations per byte, and the rate of the winner."""
    ridge = most_flops_per_s / most_bytes_per_s
    ends = [min(ridge, flop_per_byte) / 4, max(ridge, flop_per_byte) * 4]
    unit, scale = ("TFLOP/s", 1e12) if most_flops_per_s > 2e12 else ("GFLOP/s", 1e9)
    with _figure(2.6, f"roofline, {unit}", (flop_per_byte, flops_per_s, most_bytes_per_s, most_flops_per_s)) as drawn:
        axes = drawn.axes
        roof = [
            min(most_flops_per_s, each * most_bytes_per_s) / scale for each in (ends[0], ridge, ends[1], flop_per_byte)
        ]
        axes.plot([ends[0], ridge, ends[1]], roof[:3], color=FLOOR, linewidth=1.6)
        axes.plot([flop_per_byte] * 2, [flops_per_s / scale, roof[3]], color=RULE, linewidth=1)
        _winner(axes, flop_per_byte, flops_per_s / scale)
        axes.set_xlabel("FLOP per byte")
        _scale(axes, "x", ends)
        _scale(axes, "y", [*roof, flops_per_s / scale])
    return drawn.svg


def _figure(width: float, title: str, content: object) -> AbstractContextManager[svg.DrawnFigure]:
    size = svg.Size(width, HEIGHT, left=0.48, right=0.12, bottom=0.36, top=0.24)
    return svg.figure(title, size, EXTRA, content)


def _points(axes: "Axes", x: Sequence[float], y: Sequence[float]) -> None:
    """Draw all points as one path with a dot each, which takes a third of the bytes of markers."""
    gap = float("nan")
    places = [[each for value in along for each in (value, value, gap)] for along in (x, y)]
    axes.plot(*places, color=POINT, alpha=0.55, linewidth=3.2, solid_capstyle="round")


def _winner(axes: "Axes", x: float, y: float) -> None:
    axes.plot(x, y, "o", color=WINNER, markersize=5)


def _time_scale(axes: "Axes", which: str, times_us: Sequence[float]) -> str:
    """Scale an axis of times, and return its unit: milliseconds if all times exceed 2 ms, else microseconds."""
    from matplotlib.ticker import FuncFormatter

    _scale(axes, which, times_us)
    unit, scale = ("ms", 1000) if min(times_us) > 2000 else ("µs", 1)
    getattr(axes, f"{which}axis").set_major_formatter(FuncFormatter(lambda time, _: f"{time / scale:g}"))
    return unit


def _name_y(axes: "Axes", unit: str) -> None:
    """Write the name of the y axis above its numbers, which keeps the width for the figure."""
    axes.text(-0.02, 1.03, unit, transform=axes.transAxes, horizontalalignment="right", verticalalignment="bottom")


def _scale(axes: "Axes", which: str, values: Sequence[float]) -> None:
    from matplotlib.ticker import MaxNLocator

    ratio = max(values) / min(values)
    if ratio > svg.WIDE_RATIO:
        svg.make_logarithmic(axes, which, (1, 2, 5) if ratio < 100 else (1,), ticks=6)
    else:
        getattr(axes, f"{which}axis").set_major_locator(MaxNLocator(4))
