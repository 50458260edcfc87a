"""Figures of a report: the best of each value."""

from importlib.util import find_spec
from xml.etree import ElementTree

import pytest

needs_matplotlib = pytest.mark.skipif(find_spec("matplotlib") is None, reason="a report needs matplotlib: ksgen[tune]")


@needs_matplotlib
def test_a_figure_shows_the_best_of_each_value() -> None:
    from ksgen.tuning import figures

    svg = ElementTree.fromstring(figures.constant("stages", [2, 3, 2, 3, 4], [10.0, 12.0, 20.0, 6.0, 30.0], 3))
    lines = [
        path
        for path in svg.iter("{http://www.w3.org/2000/svg}path")
        if f"stroke: {figures.BEST}" in path.get("style", "")
    ]
    heights = [float(word) for word in lines[0].get("d", "").split()[2::3]]
    assert len(heights) == 3
    assert heights[1] > heights[0] > heights[2]  # downwards is faster
    words = [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert {"stages", "2", "3", "4", "µs"} <= set(words)
    slow = figures.constant("stages", [2, 3], [5000.0, 40000.0], 0)
    assert ">ms</text>" in slow
    assert slow == figures.constant("stages", [2, 3], [5000.0, 40000.0], 0)
