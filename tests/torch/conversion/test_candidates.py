"""Candidates: of every family that fits, within the budget, and using most of it."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import structures  # noqa: E402  (after the skip)
from ksgen.pattern import Chain, Pattern, btt, dense  # noqa: E402
from ksgen.torch.conversion.propose import FAMILIES, candidates, divisors  # noqa: E402


def chains_of(form: Any) -> list[Chain]:
    return [each.chain for each in form]


def only_chains(forms: Any) -> list[Chain]:
    """The chain of each form, none of which is a sum."""
    return [chain for form in forms for (chain,) in [chains_of(form)]]


SIZES = [(384, 384), (384, 1536), (1536, 384), (1024, 1024), (50, 7), (7, 11), (96, 80)]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("in_features", "out_features"), SIZES, ids=str)
@pytest.mark.parametrize("budget", [0.05, 0.3, 0.9])
def test_all_fit_the_layer_and_the_budget(in_features: int, out_features: int, budget: float) -> None:
    found = candidates(in_features, out_features, budget)
    for family, forms in found.items():
        assert forms, family
        for chains in map(chains_of, forms):
            assert {(chain.in_features, chain.out_features) for chain in chains} == {(in_features, out_features)}
            weights = sum(chain.weight_count for chain in chains)
            assert weights <= budget * dense(in_features, out_features).weight_count


def test_which_families_there_are() -> None:
    every = {"low_rank", "monarch", "two_factors", "btt", "deformable_butterfly", "block_dense", "kronecker", "blast"}
    every.add("dyad")
    assert set(candidates(384, 1536, 0.3)) == every
    assert set(candidates(384, 384, 0.3)) == every | {"block_butterfly"}
    square = candidates(1024, 1024, 0.3)
    assert {"block_butterfly", "square_dyadic", "kaleidoscope"} < set(square)
    assert [len(*only_chains(square[name])) for name in ("square_dyadic", "kaleidoscope")] == [10, 20]
    assert every | set(square) == set(FAMILIES)
    assert list(candidates(1024, 1024, 0.3, ["dyad", "kaleidoscope"])) == ["dyad", "kaleidoscope"]
    assert set(candidates(7, 11, 0.5)) == {"low_rank"}  # primes: nothing divides them
    assert candidates(7, 11, 0.1) == {}


def test_the_papers_layer_is_among_them() -> None:
    papers = Chain((Pattern(2, 48, 192, 1), Pattern(1, 192, 48, 2)))
    assert papers in only_chains(candidates(384, 384, 0.3)["two_factors"])


@pytest.mark.exhaustive
@pytest.mark.parametrize(("in_features", "out_features"), SIZES[:4], ids=str)
def test_most_of_the_budget_is_used(in_features: int, out_features: int) -> None:
    listed = candidates(in_features, out_features, 0.3)
    found = {family: only_chains(forms) for family, forms in listed.items() if family != "dyad"}
    shares = {"low_rank": 0.75, "two_factors": 0.75, "btt": 0.75, "monarch": 0.5, "deformable_butterfly": 0.5}
    for family, least in shares.items():
        assert min(chain.weight_count for chain in found[family]) >= least * 0.3 * in_features * out_features, family
        assert {min(pattern.b, pattern.c) >= 4 for chain in found[family] for pattern in chain} == {True}
    assert {min(pattern.b, pattern.c) >= 16 for chain in found["two_factors"] for pattern in chain} == {True}


def test_block_tensor_trains_have_the_largest_rank_of_the_budget() -> None:
    for chain in only_chains(candidates(384, 1536, 0.3)["btt"]):
        down, up = chain
        rank = down.b // up.a
        assert str(chain) == str(btt(384, 1536, down.a, up.a, rank))
        larger = btt(384, 1536, down.a, up.a, rank + 1)
        assert larger.weight_count > 0.3 * 384 * 1536 or rank == min(down.c, up.b)


@pytest.mark.parametrize(("in_features", "out_features"), [(384, 1536), (96, 80)], ids=str)
def test_candidates_are_the_structures_of_their_names(in_features: int, out_features: int) -> None:
    found = candidates(in_features, out_features, 0.3)
    for chain in only_chains(found["block_dense"]):
        first, last = chain
        assert chain == structures.block_dense(in_features, out_features, first.a, last.c).chain
    for (product,) in found["kronecker"]:
        rows, columns = product.shapes["A"]
        assert product == structures.kronecker(in_features, out_features, (rows, columns))
        assert min(rows, columns, in_features // columns, out_features // rows) > 1
    for chain in only_chains(found["blast"]):
        down, mix, _ = chain
        assert chain == structures.blast(in_features, out_features, (mix.b, mix.c), down.b).chain
    for pair in found["dyad"]:
        assert pair == structures.dyad(in_features, out_features, pair[0].chain[0].a)
    assert [pair[0].chain[0].a for pair in found["dyad"]] == [8]


def test_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
