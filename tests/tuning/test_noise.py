"""Tests of marks on unreliable figures."""

import pytest

from ksgen.tuning.worker import Clocks


@pytest.mark.parametrize(
    ("before", "after", "marks"),
    [
        (Clocks(), Clocks(), set()),
        (Clocks(1980, 40), Clocks(1950, 43), set()),
        (Clocks(1980, 40), Clocks(1900, 40), {"clocks moved"}),
        (Clocks(1980, 40), Clocks(1980, 46), {"temperature moved"}),
        (Clocks(1980, 40, True), Clocks(1980, 40), {"clocks were throttled"}),
    ],
)
def test_a_figure_is_marked_where_clocks_or_temperature_moved(before: Clocks, after: Clocks, marks: set[str]) -> None:
    assert after.moved_since(before) == marks
