"""The factors that prepared calls launch in place of those with tied weights."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.pattern import Chain
from ksgen.torch.operators.factors import Tie, factors_of

BOTH = Tie((0, 3), (3, 2))


@pytest.mark.parametrize(
    ("tie", "layout", "batch", "shape", "rows", "whole"),
    [
        (Tie(0, 3), "bsf", 7, (1, 5, 4, 2), 21, ()),
        (Tie(0, 3), "bsl", 7, (3, 5, 4, 2), 7, (3, 5, 4, 2)),
        (Tie(3, 2), "bsl", 7, (3, 5, 4, 1), 14, ()),
        (BOTH, "bsf", 7, (1, 5, 4, 2), 21, (1, 5, 4, 2)),
        (BOTH, "bsl", 7, (3, 5, 4, 1), 14, (3, 5, 4, 1)),
        (BOTH, "bsl", 1, (1, 5, 4, 2), 3, (1, 5, 4, 2)),
        (Tie((0, 3), (3, 4)), "bsf", 1, (3, 5, 4, 1), 4, (3, 5, 4, 1)),
    ],
    ids=str,
)
def test_ties_are_folded_into_the_batch_along_one_axis(
    tie: Tie, layout: Any, batch: int, shape: tuple[int, ...], rows: int, whole: tuple[int, ...]
) -> None:
    """A single row is folded along the axis with the most slices."""
    a, d = tie.counts.get(0, 3), tie.counts.get(3, 2)
    (found,) = factors_of(Chain([(a, 5, 4, d)]), (tie,), layout, batch, (False, False))
    assert (found.pattern.shape, found.batch, found.whole) == (shape, rows, whole)
    assert found.is_folded is (rows != batch)
