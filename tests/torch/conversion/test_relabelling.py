"""Relabelling: the chain without exchanges has the same products, up to the order of rows and columns."""

from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import pattern as patterns  # noqa: E402  (after the skip)
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.torch.conversion.projection import product_of  # noqa: E402
from ksgen.torch.conversion.relabelling import relabelled  # noqa: E402

COUNT = 3  # factors


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Chains of which each digit is an input or an output, or is summed by the next factor. Factors read their inputs
    in any order.
    """
    memory = [(draw(st.sampled_from([2, 3])), draw(st.integers(1, COUNT + 1))) for _ in range(3)]
    factors = []
    for number in range(1, COUNT + 1):  # a digit is its size, and the factor that sums it
        kept = draw(st.permutations([digit for digit in memory if digit[1] > number]))
        at = draw(st.integers(0, len(kept)))
        indices = {"i": kept[:at], "l": [digit for digit in memory if digit[1] == number], "j": kept[at:]}
        left, names = {name: list(range(len(each))) for name, each in indices.items()}, []
        for digit in memory:
            name, place = next((name, at) for name, each in left.items() for at in each if indices[name][at] == digit)
            left[name].remove(place)
            names.append(f"{name}{place + 1}:{digit[0]}")
        made = [(2, number + 1), (draw(st.sampled_from([2, 3])), COUNT + 1)] if number < COUNT else [(5, COUNT + 1)]
        i, inner, j = (prod(size for size, _ in each) for each in indices.values())
        factors.append(Pattern(i, prod(size for size, _ in made), inner, j, load=".".join(names)))
        memory = [*indices["i"], *draw(st.permutations(made)), *indices["j"]]
    return Chain(tuple(factors))


@settings(max_examples=30, deadline=None)
@given(chain=chains())
def test_products_of_both_chains_are_the_same_matrix(chain: Chain) -> None:
    found = relabelled(chain)
    assert found is not None
    assert found.chain.is_chainable
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(each.shape, dtype=torch.float64, generator=generator) for each in found.chain]
    back = found.to_given(weights)
    assert [each.shape for each in back] == [torch.Size(each.shape) for each in chain]
    torch.testing.assert_close(found.of_matrix(product_of(back, chain)), product_of(weights))


def test_a_chainable_chain_stays_the_same() -> None:
    chain = patterns.square_dyadic(16)
    found = relabelled(chain)
    assert found is not None
    assert found.chain == chain
    matrix = torch.arange(256).reshape(16, 16)
    assert torch.equal(found.of_matrix(matrix), matrix)


@pytest.mark.parametrize(
    "chain",
    [
        patterns.kaleidoscope(8),  # features that the first half makes are summed by factors of the second half
        Chain(("2,4,4,2@k.j.i", "4,4,4,1@k.i", "4,4,4,1")),
        Chain(("3,8,8,1@k.i", "12,2,2,1", "1,8,8,3")),  # the next factor sums two values of the digit of three
    ],
    ids=str,
)
def test_what_no_order_makes_chainable(chain: Chain) -> None:
    assert relabelled(chain) is None
