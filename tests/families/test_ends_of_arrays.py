"""Launchers on a processor touch nothing beyond their arrays: each begins behind, or ends in front of, a page that
nothing may touch.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.devices import find_device
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.planner import PLANNER
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, KernelSpec
from tests.support.hasty import compiles_unoptimized
from tests.support.host_memory import Fenced, stay_within_their_arrays

__all__ = ["compiles_unoptimized"]  # which pytest finds by its name

Array = np.ndarray[Any, Any]
RAGGED = ((59, 1, 1, 1), (59, 1, 7, 1), (1, 59, 1, 3), (3, 1, 2, 17))
BATCHES = (1, 40)  # one vector of the batch in a tile, and two: kernels of other constants
PRECISIONS = ("float32", "bfloat16")
PAIRS = (1, 2, 4, 7)  # of their combinations: any two values meet in one
CHAIN = (Pattern(59, 1, 1, 1), Pattern(1, 13, 59, 1))


def fenced(array: Array, at_end: bool) -> Array:
    return Fenced.of(array.nbytes).place(array, at_end).reshape(array.shape)


def drawn(*shape: int, precision: str = "float32") -> Array:
    return np.random.default_rng(shape).standard_normal(shape).astype(numpy_dtype(precision))


def rows(features: int, batch: int, layout: str, precision: str = "float32") -> Array:
    return drawn(*((batch, features) if layout == "bsf" else (features, batch)), precision=precision)


def check(out: Array, truth: Array, precision: str, terms: int) -> None:
    assert np.linalg.norm(out.astype(np.float64) - truth) <= tolerance(precision, terms) * np.linalg.norm(truth)


def placements(*arrays: Array) -> Iterator[list[Array]]:
    """The arrays at both ends of their memory."""
    for at_end in (False, True):
        yield [fenced(each, at_end) for each in arrays]


def run_fenced(only_pairs: bool) -> None:
    """Run every shape, in all combinations of layout, batch and precision or in every pair of two of these."""
    cases = list(product(LAYOUTS, BATCHES, PRECISIONS))
    cases = [cases[number] for number in PAIRS] if only_pairs else cases
    for shape, (layout, batch, precision) in product(RAGGED, cases):
        pattern, ks = Pattern(*shape), Launcher(*shape)
        x, dy = (rows(features, batch, layout, precision) for features in (pattern.in_features, pattern.out_features))
        weights, bias, empty = (
            drawn(*shape, precision=precision),
            drawn(pattern.out_features, precision=precision),
            np.zeros_like(dy),
        )
        truth = reference.multiply(pattern, x, weights, layout, bias=bias, residual=dy)
        for own_x, own_weights, own_bias, residual, out in placements(x, weights, bias, dy, empty):
            check(
                ks(own_x, own_weights, layout=layout, bias=own_bias, residual=residual, out=out),
                truth,
                precision,
                pattern.c,
            )
        truth = reference.gradient(pattern, x, dy, layout)
        for own_x, own_dy, out in placements(x, dy, np.zeros_like(weights)):
            check(ks.gradient(own_x, own_dy, layout=layout, out=out), truth, precision, batch)
    device = find_device()
    for shape, layout, batch in product(RAGGED, LAYOUTS, BATCHES):
        plan = PLANNER.plan(device, KernelSpec(Pattern(*shape), layout=layout, weights="int8"), batch)
        for (whole,) in placements(ksgen.quantize(drawn(*shape), "int8").whole):
            plan.pack(device.shared(whole.ctypes.data), None)
    chain = ChainLauncher(*(Launcher(*each.shape) for each in CHAIN), fuse="yes")
    for layout, batch in product(LAYOUTS, BATCHES):
        x, first, second = rows(59, batch, layout), drawn(*CHAIN[0].shape), drawn(*CHAIN[1].shape)
        truth = reference.multiply(CHAIN[1], reference.multiply(CHAIN[0], x, first, layout), second, layout)
        for own_x, own_first, own_second, out in placements(x, first, second, rows(13, batch, layout)):
            check(chain(own_x, [own_first, own_second], layout=layout, out=out), truth, "float32", 59)
    print("all within their arrays")


@pytest.mark.parametrize("only_pairs", [True, pytest.param(False, marks=[pytest.mark.second, pytest.mark.optimized])])
def test_no_access_beyond_the_ends_of_arrays(only_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    stay_within_their_arrays(__name__, call=f"run_fenced({only_pairs=})")
