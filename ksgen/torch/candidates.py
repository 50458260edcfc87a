"""Which chains of each named family could take a dense layer's place within a budget of weights. Knows no times, devices or errors."""

from collections.abc import Iterator
from itertools import product
from math import lcm

from ksgen.pattern import Chain, Pattern, block_butterfly, deformable_butterfly, kaleidoscope, low_rank, monarch, square_dyadic

SIDES = (64, 32, 16, 8, 4, 1)  # of blocks, as far as the budget lets them: kernels move whole vectors
LEAST_KEPT = 0.8  # of the features between factors that the budget lets, for a better side
WANTED = (  # of a family with many members, the first of these that any of them keeps: share of the budget used, least side of a block
    (0.75, 16), (0.75, 8), (0.5, 16), (0.5, 8), (0.75, 4), (0.5, 4), (0.0, 1),
)  # fmt: skip
MOST_OF_A_FAMILY = 48  # those with the fewest features between factors, which are written and read again


def candidates(in_features: int, out_features: int, budget: float) -> dict[str, list[Chain]]:
    """By family, chains of at most that share of the dense weights."""
    most = int(budget * in_features * out_features)
    found = {
        "low_rank": list(_low_ranks(in_features, out_features, most)),
        "monarch": _few(_monarchs(in_features, out_features), most),
        "two_factors": _few(_pairs(in_features, out_features, most), most),
        "deformable_butterfly": _few(_deformed(in_features, out_features, most), most),
        "block_butterfly": [],
        "square_dyadic": [],
        "kaleidoscope": [],
    }
    if in_features == out_features:
        blocks = (block_butterfly(in_features, block) for block in divisors(in_features) if block > 1 and _is_power(in_features // block))
        found["block_butterfly"] = [chain for chain in blocks if chain.weight_count <= most]
        if _is_power(in_features):
            for name, make in (("square_dyadic", square_dyadic), ("kaleidoscope", kaleidoscope)):
                found[name] = [chain] if (chain := make(in_features)).weight_count <= most else []
    return {name: chains for name, chains in found.items() if chains}


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _is_power(count: int) -> bool:
    """Of two, from two up."""
    return count > 1 and count & (count - 1) == 0


def _low_ranks(in_features: int, out_features: int, most: int) -> Iterator[Chain]:
    rank = _even(min(most // (in_features + out_features), in_features, out_features), 1, 1)
    if rank:
        yield low_rank(in_features, out_features, rank)


def _even(most: int, a: int, d: int) -> int:
    """The largest number up to `most`, or nearly, of which a-th and d-th parts are multiples of a good side; 0 if there is none."""
    found = 0
    for side in SIDES:
        found = most // lcm(side * a, side * d) * lcm(side * a, side * d)
        if found >= LEAST_KEPT * most:
            return found
    return found


def _monarchs(in_features: int, out_features: int) -> Iterator[Chain]:
    for split_in, split_out in product(divisors(in_features)[1:], divisors(out_features)[1:]):
        yield monarch(in_features, out_features, split_in, split_out)


def _pairs(in_features: int, out_features: int, most: int) -> Iterator[Chain]:
    """(a, b, c, 1) then (1, b, c, d), as the paper's layers: of every a and d the pair with as many inner features as the budget lets.

    The least a and d are two: with one of them 1, a factor is dense, as in low rank.
    """
    for a, d in product(divisors(in_features)[1:], divisors(out_features)[1:]):
        if inner := _even(most // (in_features // a + out_features // d), a, d):
            yield Chain((Pattern(a, inner // a, in_features // a, 1), Pattern(1, out_features // d, inner // d, d)), "two_factors")


def _deformed(in_features: int, out_features: int, most: int) -> Iterator[Chain]:
    """Three factors through which every input reaches every output."""
    for (c1, c2, c3), (b1, b2, b3) in product(_triples(in_features), _triples(out_features)):
        if b1 * in_features + b1 * b2 * c2 * c3 + out_features * c3 <= most:
            yield deformable_butterfly(in_features, [(b1, c1), (b2, c2), (b3, c3)])


def _triples(number: int) -> list[tuple[int, int, int]]:
    """Its products of three, of sides that are worth a kernel."""
    sides = [each for each in divisors(number) if each > 1]
    return [
        (one, two, number // one // two)
        for one, two in product(sides, sides)
        if number % (one * two) == 0 and number // (one * two) in sides
    ]


def _few(chains: Iterator[Chain], most: int) -> list[Chain]:
    able = [chain for chain in chains if chain.weight_count <= most]
    for used, side in WANTED:
        some = [chain for chain in able if chain.weight_count >= used * most and _least_side(chain) >= side]
        if some:
            return sorted(some, key=lambda chain: sum(pattern.out_features for pattern in chain))[:MOST_OF_A_FAMILY]
    return []


def _least_side(chain: Chain) -> int:
    return min(min(pattern.b, pattern.c) for pattern in chain)
