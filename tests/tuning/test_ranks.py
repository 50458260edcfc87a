"""Tests of Spearman's rank correlation against numbers worked out by hand."""

from math import isnan

import pytest

from ksgen.tuning.model import rank_correlation


def test_rank_correlation() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [9, 8, 7, 1]) == pytest.approx(-1)
    assert rank_correlation([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(0.8)
    assert rank_correlation([1, 1, 2, 2], [1, 1, 2, 2]) == pytest.approx(1)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 3, 4]) == pytest.approx(0.9486832980505138)
    assert isnan(rank_correlation([1, 1, 1], [1, 2, 3]))
    assert isnan(rank_correlation([1], [1]))
