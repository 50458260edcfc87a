"""Orders of features in memory: one reshape and one order of axes, their runs, places and texts."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksgen.order import Order
from ksgen.pattern import Pattern
from tests.support.exchange import exchanged_patterns, stored_order


@given(pattern=exchanged_patterns(), features=st.sampled_from(["inputs", "outputs"]))
def test_an_order_is_one_reshape_and_one_order_of_axes(pattern: Pattern, features: str) -> None:
    order = pattern.inputs if features == "inputs" else pattern.outputs
    shape, axes = order.exchange()
    found = np.arange(order.count).reshape(shape).transpose(axes).ravel().tolist()
    assert found == stored_order(order)
    assert order.is_exchanged == (found != list(range(order.count)))
    places = np.argsort(found)
    runs = places.reshape(-1, order.run)
    np.testing.assert_array_equal(runs, runs[:, :1] + np.arange(order.run))
    np.testing.assert_array_equal(places, [order.place_of(*each) for each in np.ndindex(*order.sizes)])


@given(pattern=exchanged_patterns(), count=st.integers(1, 3))
def test_matrices_on_one_diagonal_keep_their_orders(pattern: Pattern, count: int) -> None:
    several = pattern.repeated(count)
    assert several.shape == (count * pattern.a, *pattern.shape[1:])
    for order, repeated in ((pattern.inputs, several.inputs), (pattern.outputs, several.outputs)):
        one = stored_order(order)
        assert stored_order(repeated) == [number * order.count + each for number in range(count) for each in one]


def test_a_factor_can_store_what_the_next_one_reads() -> None:
    outputs = Pattern(4, 8, 3, 1).outputs
    assert outputs.before(Pattern(8, 2, 4, 1, load="l.i").inputs) == "k.i"
    assert outputs.before(Pattern(4, 2, 8, 1, load="l.i").inputs) == "k2:4.i.k1:2"
    assert Pattern(4, 8, 3, 1, "k.i").outputs.before(Pattern(4, 2, 8, 1, load="l.i").inputs) == ""
    assert Pattern(3, 4, 3, 1).outputs.undivided(Order("inputs", (6, 2, 1), "l.i")) == (4, 6)


def test_a_transposed_order_has_other_names() -> None:
    inputs = Pattern(4, 8, 6, 1, load="l1:2.i.l2").inputs
    assert (inputs.natural, inputs.renamed("outputs"), inputs.renamed("inputs")) == (
        "i.l.j", "k1:2.i.k2:3", "l1:2.i.l2:3"
    )  # fmt: skip
    with pytest.raises(ValueError, match="argument 2 is longer"):
        inputs.place_of(1, 2, 3, 4)
