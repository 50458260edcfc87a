"""What measurements teach about candidates that were not measured."""

import numpy as np
import pytest

from ksgen.tuning.pool import Points, expect, features


def test_features_are_logarithms_and_words() -> None:
    rows = [{"copy": "async", "tile": 7}, {"copy": "registers", "tile": 15}, {"tile": 0}]
    assert features(rows).tolist() == [[1, 0, 3], [0, 1, 4], [0, 0, 0]]


def test_what_was_measured_teaches_about_what_is_near() -> None:
    tiles = np.arange(12.0)[:, None]
    points = Points(tiles, np.zeros((12, 1)), np.zeros(12, int), np.full(12, 5.0))
    mean, spread = expect(points.at(np.array([], int)), np.array([]), points)
    assert mean.tolist() == [5.0] * 12
    mean, measured_spread = expect(points.at(np.array([2, 9])), np.array([4.0, 7.0]), points)
    assert mean[[2, 9]] == pytest.approx([4, 7], abs=0.05)
    assert mean[1] < mean[5] < mean[8]
    assert measured_spread[2] < 0.1 < measured_spread[5] < spread[5]
