"""Patterns, chains and the named families: sizes, shuffles, what is refused and how."""

import pickle
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksgen import reference, structures
from ksgen.errors import KsgenWarning, PatternError
from ksgen.pattern import (
    NAMED_CHAINS,
    Chain,
    Gain,
    Pattern,
    are_chainable,
    blast,
    block_butterfly,
    deformable_butterfly,
    dense,
    kaleidoscope,
    low_rank,
    monarch,
    square_dyadic,
)
from tests.support.exchange import exchanged_patterns, orders, stored_order

patterns = st.builds(Pattern, *[st.integers(1, 9)] * 4)


def shapes(chain: Chain) -> list[tuple[int, int, int, int]]:
    return [pattern.shape for pattern in chain]


def test_sizes_and_names_of_a_pattern() -> None:
    pattern = Pattern(1, 192, 48, 2)
    assert (pattern.in_features, pattern.out_features, pattern.weight_count) == (96, 384, 18432)
    assert (str(pattern), pattern.name, pattern.identifier) == ("1,192,48,2", "1x192x48x2", "1_192_48_2")
    assert pattern.shape == (1, 192, 48, 2)
    assert pattern.transpose == Pattern(1, 48, 192, 2)
    assert pattern.density == 0.5
    assert pattern.rewrite_ratio == 240 / 9216


@given(patterns)
def test_density_is_the_share_of_free_entries(pattern: Pattern) -> None:
    assert pattern.density == float(Fraction(pattern.weight_count, pattern.in_features * pattern.out_features))


@given(patterns)
def test_transposing_swaps_the_sides_and_twice_is_nothing(pattern: Pattern) -> None:
    assert pattern.transpose.in_features == pattern.out_features
    assert pattern.transpose.transpose == pattern


@given(patterns, st.sampled_from(["{}", " {} ", "({})", "[{}]"]), st.sampled_from([",", ", ", " , "]))
def test_parsing_reads_what_is_written(pattern: Pattern, frame: str, comma: str) -> None:
    assert Pattern.parse(frame.format(comma.join(map(str, pattern.shape)))) == pattern


@given(patterns)
def test_the_shuffles_are_permutations_and_the_transpose_swaps_their_roles(pattern: Pattern) -> None:
    assert sorted(pattern.column_order()) == list(range(pattern.in_features))
    assert sorted(pattern.row_order()) == list(range(pattern.out_features))
    there, back = pattern.column_order(), pattern.transpose.row_order()
    assert [there[n] for n in back] == list(range(pattern.in_features))


@given(patterns)
def test_the_column_order_gathers_each_block_of_inputs(pattern: Pattern) -> None:
    a, _, c, d = pattern.shape
    expected = [(i * c + l) * d + j for i in range(a) for j in range(d) for l in range(c)]  # noqa: E741  the formula's l
    assert list(pattern.column_order()) == expected


@pytest.mark.parametrize("value", [0, -1, 2**31, 1.0, "6", True, None, pytest.param(10**5000, id="huge")])
def test_a_pattern_refuses_what_is_not_a_count(value: object) -> None:
    with pytest.raises(PatternError, match=r"c=.{1,40}; accepted: a whole number from 1 to 2147483647"):
        Pattern(6, 64, value, 1)  # type: ignore[arg-type]


def test_a_pattern_refuses_more_features_than_32_bits_count() -> None:
    assert Pattern(2**15, 1, 2**16 - 1, 1).in_features < 2**31
    with pytest.raises(PatternError, match=r"pattern 32768,1,65536,1 has 2147483648 features .* at most 2147483647"):
        Pattern(2**15, 1, 2**16, 1)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "6,64,64",
        "6,64,64,1,1",
        "6.0,64,64,1",
        "6x64x64x1",
        "a,b,c,d",
        "٦,64,64,1",
        "(6,64,64,1]",
        "[6,64,64,1",
        "6,64,64,1)",
    ],
)
def test_parsing_refuses_what_is_not_four_numbers(text: str) -> None:
    accepted = "whole numbers a,b,c,d such as 1,192,48,2, and perhaps orders of inputs and outputs: i.j.l@1"
    with pytest.raises(PatternError, match=f"is not a pattern; accepted: {accepted}"):
        Pattern.parse(text)


def test_parsing_names_the_number_that_is_out_of_range() -> None:
    with pytest.raises(PatternError, match=r"b=-64; accepted: a whole number from 1"):
        Pattern.parse("6,-64,64,1")


@given(st.text())
def test_text_that_is_no_pattern_is_reported_in_one_line(text: str) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern.parse(f"{text}!")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("shape", "gain"),
    [
        ((6, 64, 64, 1), Gain.NONE),
        ((1, 64, 64, 4), Gain.MOST),
        ((1, 48, 96, 4), Gain.MOST),
        ((1, 64, 65, 4), Gain.SOME),
        ((1, 256, 256, 4), Gain.SOME),
        ((1, 256, 257, 4), Gain.LITTLE),
        ((1, 1024, 1024, 4), Gain.LITTLE),
    ],
)
def test_the_heuristic_in_words(shape: tuple[int, int, int, int], gain: Gain) -> None:
    assert Pattern(*shape).predicts() is gain


def test_a_chain_is_listed_from_the_factor_that_meets_x_first() -> None:
    chain = Chain((Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2)), "up")
    assert (chain.in_features, chain.out_features, chain.weight_count) == (384, 1536, 24576 + 294912)
    assert shapes(chain.transpose) == [(1, 192, 768, 2), (6, 64, 64, 1)]
    assert (str(chain), len(chain), chain[1]) == ("6,64,64,1 then 1,768,192,2", 2, Pattern(1, 768, 192, 2))
    assert chain == Chain(chain.factors)  # the name is for people


def test_a_chain_refuses_factors_that_do_not_meet() -> None:
    with pytest.raises(PatternError, match=r"1,768,192,2 gives 1536 .* next pattern \(6,64,64,1\) takes 384; "):
        Chain((Pattern(1, 768, 192, 2), Pattern(6, 64, 64, 1)))


PAIR = (Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))


@pytest.mark.parametrize("one", [PAIR[0], PAIR[0].shape, [*PAIR[0].shape], "6,64,64,1", "(6, 64, 64, 1)"])
def test_a_pattern_is_read_in_any_form(one: Any) -> None:
    assert Pattern.read(one) == PAIR[0]
    assert Chain.read(one) == Chain([one]) == Chain((PAIR[0],))  # type: ignore[arg-type]
    assert Chain.read([one, "1,768,192,2"]) == Chain.read((one, (1, 768, 192, 2))) == Chain(PAIR)


def test_a_chain_of_four_is_no_pattern() -> None:
    assert Chain.read(["2,3,3,1"] * 4) == Chain((Pattern(2, 3, 3, 1),) * 4)
    assert Chain.read(Chain(PAIR, "own")).name == "own"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), r"factors=\(\); accepted: one Pattern or more"),
        (None, "factors=None; accepted: one Pattern or more$"),
        (
            structures.low_rank(8, 6, 2),
            "factors=Structure.*; accepted: one Pattern or more, such as a structure's chain$",
        ),
        (
            [(2, 8, 4)],
            r"factors\[0\]=\(2, 8, 4\); accepted: a Pattern, four numbers \(a, b, c, d\), or text such as 1,192,48,2",
        ),
        ((2, 8, 4), r"factors\[0\]=2; accepted: a Pattern, four numbers"),
        ((2, 0, 4, 3), "b=0; accepted: a whole number from 1"),
        (b"2843", r"factors\[0\]=50; accepted: a Pattern"),
        ("2,8,4", "'2,8,4' is not a pattern; accepted: whole numbers a,b,c,d"),
    ],
)
def test_a_chain_refuses_what_are_not_patterns(given: Any, message: str) -> None:
    for error in (PatternError, ValueError):
        with pytest.raises(error, match=message):
            Chain.read(given)


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ("1,192,48,2", "2,48,192,1", True),
        ("1,768,192,2", "6,64,64,1", True),
        ("1,128,128,3", "6,64,256,1", False),  # fits in size, but 128 is no multiple of 6
        ("1,64,256,16", "64,64,64,1", True),
        ("1,64,64,16", "16,64,256,1", True),
        ("2,4,4,1", "1,4,4,2", False),  # 2 does not divide 1
        ("1,4,6,1", "1,3,5,2", False),  # 2 does not divide 1, on the side of d
    ],
)
def test_chainable_in_the_sense_of_the_factorisation_papers(left: str, right: str, expected: bool) -> None:
    outer, inner = Pattern.parse(left), Pattern.parse(right)
    assert are_chainable(outer, inner) is expected
    assert Chain((inner, outer)).is_chainable is expected


@given(patterns, patterns)
def test_chainable_factors_fit_in_size(left: Pattern, right: Pattern) -> None:
    if are_chainable(left, right):
        assert left.in_features == right.out_features


def test_the_named_families_are_those_of_the_literature() -> None:
    assert shapes(dense(3, 5)) == [(1, 5, 3, 1)]
    assert shapes(low_rank(8, 6, 2)) == [(1, 2, 8, 1), (1, 6, 2, 1)]
    assert shapes(square_dyadic(8)) == [(4, 2, 2, 1), (2, 2, 2, 2), (1, 2, 2, 4)]
    assert shapes(kaleidoscope(4)) == [(1, 2, 2, 2), (2, 2, 2, 1), (2, 2, 2, 1), (1, 2, 2, 2)]
    assert shapes(block_butterfly(12, 3)) == [(2, 6, 6, 1), (1, 6, 6, 2)]
    assert shapes(monarch(6, 20, 3, 4)) == [(3, 5, 2, 1), (1, 4, 3, 5)]
    assert shapes(blast(6, 20, 3, 4, 7)) == [(3, 7, 2, 1), (1, 4, 3, 7), (4, 5, 7, 1)]
    assert shapes(deformable_butterfly(12, [(2, 3), (5, 2)])) == [(4, 2, 3, 1), (2, 5, 2, 2)]


def test_a_named_chain_has_the_sizes_that_were_asked_for_and_its_name() -> None:
    arguments = {
        "dense": (3, 5),
        "low_rank": (8, 6, 2),
        "square_dyadic": (8,),
        "kaleidoscope": (8,),
        "block_butterfly": (24, 3),
        "monarch": (6, 20, 3, 4),
        "blast": (6, 20, 3, 4, 7),
        "btt": (6, 20, 3, 4, 7),
        "deformable_butterfly": (12, [(2, 3), (5, 2)]),
    }
    sizes = {
        "dense": (3, 5),
        "low_rank": (8, 6),
        "square_dyadic": (8, 8),
        "kaleidoscope": (8, 8),
        "block_butterfly": (24, 24),
        "monarch": (6, 20),
        "blast": (6, 20),
        "btt": (6, 20),
        "deformable_butterfly": (12, 20),
    }
    assert set(NAMED_CHAINS) == set(arguments)
    for name, family in NAMED_CHAINS.items():
        chain = family(*arguments[name])
        assert (chain.name, chain.in_features, chain.out_features) == (name, *sizes[name])


@given(st.integers(1, 5), st.integers(1, 4))
def test_a_block_butterfly_of_blocks_of_1_is_square_dyadic_and_all_are_chainable(stages: int, block: int) -> None:
    features = 2**stages
    assert block_butterfly(features, 1) == square_dyadic(features)
    assert block_butterfly(features * block, block).is_chainable
    assert len(kaleidoscope(features)) == 2 * stages


@given(*[st.integers(1, 6)] * 4)
def test_every_monarch_is_chainable(split_in: int, split_out: int, block_in: int, block_out: int) -> None:
    assert monarch(split_in * block_in, split_out * block_out, split_in, split_out).is_chainable


@given(st.integers(1, 4), st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=4))
def test_every_deformable_butterfly_is_chainable(a: int, blocks: list[tuple[int, int]]) -> None:
    in_features = a
    for _, c in blocks:
        in_features *= c
    chain = deformable_butterfly(in_features, blocks)
    assert chain.is_chainable
    assert [(pattern.b, pattern.c) for pattern in chain] == blocks


@pytest.mark.parametrize(
    ("family", "arguments", "message"),
    [
        ("dense", (0, 5), "in_features=0; accepted: a whole number from 1"),
        ("dense", (5, None), "out_features=None; accepted: a whole number from 1"),
        ("low_rank", (8, 6, 7), "rank=7 for 8 to 6 features; accepted: 1 to 6"),
        ("square_dyadic", (12,), "features=12; accepted: a power of two from 2 up"),
        ("square_dyadic", (1,), "features=1; accepted: a power of two from 2 up"),
        ("kaleidoscope", ("8",), "features='8'; accepted: a whole number"),
        ("block_butterfly", (24, 5), "features=24; accepted: block=5 times a power of two from 2 up"),
        ("block_butterfly", (24, 0), "block=0; accepted: a whole number from 1"),
        ("monarch", (6, 20, 4, 4), "split_in=4; accepted: a divisor of in_features=6"),
        ("monarch", (6, 20, 3, 3), "split_out=3; accepted: a divisor of out_features=20"),
        ("blast", (6, 20, 4, 4, 1), "split_in=4; accepted: a divisor of in_features=6"),
        ("blast", (6, 20, 3, 3, 1), "split_out=3; accepted: a divisor of out_features=20"),
        ("blast", (6, 20, 3, 4, 0), "rank=0; accepted: a whole number from 1"),
        ("btt", (6, 20, 4, 4, 1), "split_in=4; accepted: a divisor of in_features=6"),
        ("btt", (6, 20, 3, 4, 0), "rank=0; accepted: a whole number from 1"),
        ("deformable_butterfly", (12, []), "factors=(); accepted: one Pattern or more"),
        ("deformable_butterfly", (12, 3), "blocks=3; accepted: a list of pairs (b, c)"),
        ("deformable_butterfly", (12, [(2, 3), 5]), "blocks[1]=5; accepted: a pair (b, c)"),
        ("deformable_butterfly", (12, [(0, 3)]), "blocks[0] b=0; accepted: a whole number from 1"),
        (
            "deformable_butterfly",
            (12, [(2, 3), (5, 3)]),
            "blocks[1] c=3 with d=2; accepted: c*d a divisor of this factor's 8 input features",
        ),
    ],
)
def test_a_named_family_says_which_argument_is_wrong(family: str, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(PatternError) as caught:
        NAMED_CHAINS[family](*arguments)
    assert str(caught.value).startswith(message)


def test_the_factor_that_changes_the_layout_has_an_earlier_name_that_warns() -> None:
    chain = Chain(("1,2,2,2", "2,2,2,1", "1,3,4,1"))
    assert chain.transposing_factor == 1
    with pytest.warns(KsgenWarning, match="Chain.turn is deprecated and will be removed; use Chain.transposing_factor"):
        assert chain.turn == 1


# ---- features in another order


@given(pattern=exchanged_patterns(), data=st.data())
def test_the_transpose_of_a_chain_exchanges_back(pattern: Pattern, data: st.DataObject) -> None:
    features = pattern.out_features
    a = data.draw(st.sampled_from([each for each in range(1, features + 1) if features % each == 0]))
    c = data.draw(st.sampled_from([each for each in range(1, features // a + 1) if features // a % each == 0]))
    then = Pattern(a, 2, c, features // a // c)
    try:
        second, first = Chain((pattern, then)).transpose
    except PatternError as error:
        assert "cannot store its outputs in the order in which the next pattern" in str(error)  # noqa: PT017
        return
    assert (second.natural, first.natural) == (then.transpose, pattern.natural.transpose)
    np.testing.assert_array_equal(stored_order(second.outputs), np.argsort(stored_order(pattern.outputs)))
    assert (first.load, stored_order(first.outputs)) == ("", stored_order(pattern.inputs))


@given(pattern=exchanged_patterns())
def test_a_transpose_stores_where_the_pattern_reads(pattern: Pattern) -> None:
    weights = np.arange(1, pattern.weight_count + 1).reshape(pattern.shape)
    transposed = reference.to_dense(pattern.transpose, weights.transpose(0, 2, 1, 3))
    np.testing.assert_array_equal(transposed, reference.to_dense(pattern, weights).T)
    assert pattern.transpose.transpose == pattern
    assert Pattern.parse(str(pattern)) == pattern


@given(first=exchanged_patterns(), data=st.data())
def test_a_chain_stores_what_its_next_factor_reads(first: Pattern, data: st.DataObject) -> None:
    """Dense products of the factors as written equal those of the chain, where only the first factor reads exchanged
    inputs."""
    features = first.out_features
    a = data.draw(st.sampled_from([each for each in range(1, features + 1) if features % each == 0]))
    then = Pattern(a, 2, features // a, 1)
    then = Pattern(*then.shape, load=data.draw(orders(then.inputs)))
    try:
        chain = Chain((first, then))
    except PatternError as error:
        assert "cannot store its outputs in the order in which the next pattern" in str(error)  # noqa: PT017
        return
    assert (chain[0].load, chain[1].load) == (first.load, "")
    random = np.random.default_rng(0)
    weights = [random.integers(1, 9, each.shape) for each in chain]
    written, stored = (
        reference.to_dense(factors[1], weights[1]) @ reference.to_dense(factors[0], weights[0])
        for factors in ((first, then), chain)
    )
    np.testing.assert_array_equal(stored, written)


def test_an_order_has_one_text() -> None:
    assert Pattern(2, 8, 3, 5, "i.k.j") == Pattern(2, 8, 3, 5)
    assert Pattern(1, 8, 3, 5, "i.j.k").store == "j.k"
    assert Pattern(4, 8, 3, 1, "k1:2.k2.i").store == "k.i"
    assert Pattern(4, 8, 3, 1, "k1.i.k2:4.j").store == "k1:2.i.k2:4"
    assert Pattern.parse("4,8,3,1@k1:2.i.k2").name == "4x8x3x1_k1x2ik2x4"
    assert Pattern.parse("(4, 8, 3, 1) @ k.i").support == "I_4 ⊗ 1_{8x3} ⊗ I_1, outputs in the order k.i"
    chain = Chain(("4,8,3,1@k.i", "1,2,32,1"))
    assert (chain.is_exchanged, chain[1].is_exchanged) == (True, False)
    both = Pattern.parse(" l.i @ (4, 8, 3, 1) @ k.i")
    assert both == Pattern(4, 8, 3, 1, "k.i", "l.i.j")
    assert (str(both), both.name) == ("l.i@4,8,3,1@k.i", "4x8x3x1_ki_from_li")
    assert both.support.endswith("I_1, outputs in the order k.i, inputs in the order l.i")
    assert repr(both) == "Pattern(a=4, b=8, c=3, d=1, store='k.i', load='l.i')"
    assert both.natural == Pattern(4, 8, 3, 1)


@pytest.mark.parametrize(
    ("store", "message"),
    [
        ("k.k", "store='k.k'; accepted: digits such as i.j.k, or k1:4.i.k2 with a divided k, each once"),
        ("x", "store='x'; accepted: digits such as"),
        (5, "store=5; accepted: digits such as"),
        (None, "store=None; accepted: digits such as"),
        ("i.j", "store='i.j'; accepted for k, which has 8 values: digits whose sizes have that product"),
        ("k1.k2.i.j", "store='k1.k2.i.j'; accepted for k, which has 8 values"),
        ("k1:3.k2.i.j", "store='k1:3.k2.i.j'; accepted for k, which has 8 values"),
        ("i.k:4.j", "store='i.k:4.j'; accepted for k, which has 8 values"),
        ("i.k1:0.k2.j", "store='i.k1:0.k2.j'; accepted: digits such as"),
        ("i.k1:00.k2.j", "store='i.k1:00.k2.j'; accepted: digits such as"),
    ],
)
def test_what_is_no_order_of_outputs(store: Any, message: str) -> None:
    with pytest.raises(PatternError) as caught:
        Pattern(2, 8, 3, 5, store)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("store", "remedies"),
    [
        ("k1:3.k2.i.j1:7.j2", "try k1:2 or k1:4"),
        ("k.i.j1:7.j2", "try j1:5 or j1:6"),
        ("i.k", "try j"),
        ("k1.i.k2.j", "try k1:2 or k1:4"),
    ],
)
def test_digits_that_do_not_divide_name_others(store: str, remedies: str) -> None:
    with pytest.raises(PatternError, match=f"one size left out at most; {remedies}$"):
        Pattern(2, 8, 3, 30, store)


def test_factors_whose_digits_do_not_divide_name_a_remedy() -> None:
    first, then = "3,4,5,1", "l.i@6,2,2,1"
    message = (
        f"{first} cannot store its outputs in the order in which the next pattern ({then}) reads them: digits begin "
        "every 4 and every 6 features, and 4 does not divide 6; accepted: sizes that divide, or two chains: the second "
        f"begins with {then}"
    )
    with pytest.raises(PatternError, match=re.escape(message)):
        Chain((first, then))
    assert str(Chain((then,))) == then, "a chain begins with any factor"


@pytest.mark.parametrize("load", ["k.i", "l.l", "i.j", 5, ["l.i"], None])
def test_what_is_no_order_of_inputs(load: Any) -> None:
    with pytest.raises(PatternError, match=r"load=.*; accepted( for l, which has 3 values)?: digits"):
        Pattern(2, 8, 3, 1, load=load)


def test_a_chain_that_exchanges_outputs_is_not_chainable() -> None:
    assert Chain(("2,4,4,1", "1,2,8,1")).is_chainable
    assert not Chain(("2,4,4,1@k.i", "1,2,8,1")).is_chainable
    assert not Chain(("l.i@2,4,4,1", "1,2,8,1")).is_chainable


def test_pickles_of_before_patterns_had_an_order() -> None:
    for state in ([1, 2, 3, 4], [1, 2, 3, 4, "j.k"]):
        old = Pattern.__new__(Pattern)
        old.__setstate__(state)
        assert old == Pattern(*state)
    for exchanged in (Pattern(1, 2, 3, 4, "j.k"), Pattern(1, 2, 3, 4, load="j.l")):
        assert pickle.loads(pickle.dumps(exchanged)) == exchanged
