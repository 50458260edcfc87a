"""Sums of chains near a matrix: the nearest sum of chains of one factor, and alternating projections for others.

A round takes the chains in turn. It replaces each one by the product that `factorize` finds for the rest, which is the
matrix minus the other products. If that product is the nearest, no round increases the error. The chain with the fewest
weights comes first, because a large chain would represent parts of the others, and often keep them.

Rounds converge linearly, so products are first extrapolated along their last change, as in Nesterov's method. If a
round comes no nearer or gains little, the next one begins without that.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from math import inf

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ksgen.pattern import Chain
from ksgen.structures import Structure
from ksgen.torch.conversion.nearest import LEAST_STEPS, in_natural_form, in_natural_order, method_of, times_power
from ksgen.torch.conversion.projection import balanced, on_support, project, refined
from ksgen.torch.conversion.structured import ClosedForm
from ksgen.torch.operators.products import chain_to_dense

ROUNDS = 200  # maximum number; a sum of chains that can be recovered from its matrix takes 20 to 100 rounds
LEAST_GAIN = 1e-3  # relative decrease of the error below which a round without extrapolation is the last one
LEAST_SQUARES = "least squares", "the nearest sum"
ALTERNATION = "alternation", "no guarantee; each product is near what the others leave of the matrix"


def text_of(chains: Iterable[Chain]) -> str:
    """A chain, or the chains of a sum, in words."""
    return " plus ".join(map(str, chains))


def is_nearest(structures: Sequence[Structure]) -> bool:
    """Whether least squares give the nearest sum: all chains have one factor, whose weights are free."""
    return all(len(each.chain) == 1 and not (any(each.ties) or each.has_rotations) for each in structures)


def most_steps(chains: Sequence[Chain], closed: Sequence[ClosedForm | None], refine: int) -> int:
    """Number of final steps of L-BFGS.

    It is 0 if all chains have closed forms. It is at least `LEAST_STEPS` if `factorize` would refine one of the chains
    by L-BFGS without the others.
    """
    if all(closed):
        return 0
    are_refined = (
        not form and method_of(in_natural_form(chain))[0] == "refinement"
        for chain, form in zip(chains, closed, strict=True)
    )
    return max(refine, LEAST_STEPS * any(are_refined))


def least_squares(matrix: Tensor, chains: Sequence[Chain]) -> list[list[Tensor]]:
    """Weights of the nearest sum of chains of one factor. Chains that share an entry have equal parts of it."""
    supports = [chain_to_dense(chain, [matrix.new_ones(chain[0].shape)]) for chain in chains]
    share = matrix / sum(supports).clamp_min(1)
    return [_projected(share, chain, None) for chain in chains]


def alternated(
    matrix: Tensor, chains: Sequence[Chain], closed: Sequence[ClosedForm | None], steps: int,
    advance: Callable[[], None], exponent: int,
) -> list[list[Tensor]]:  # fmt: skip
    """Weights of a sum near a matrix that was scaled by 2^-exponent, and thus scaled alike.

    `advance` is called after each round and each step of L-BFGS. L-BFGS finally moves all chains without a closed form
    together, by `steps` steps.
    """
    order = sorted(range(len(chains)), key=lambda at: chains[at].weight_count)
    resolution = torch.finfo(matrix.dtype).eps * float(vector_norm(matrix, dtype=torch.float64))
    products = before = [torch.zeros_like(matrix) for _ in chains]
    weights: list[list[Tensor]] = []
    least, streak = inf, 0
    for _ in range(ROUNDS):
        speed = streak / (streak + 3)
        trial = [now + speed * (now - last) for now, last in zip(products, before, strict=True)]
        found: list[list[Tensor]] = [[] for _ in chains]
        for at in order:
            rest = matrix - sum(each for other, each in enumerate(trial) if other != at)
            found[at] = _projected(rest, chains[at], closed[at], exponent)
            trial[at] = chain_to_dense(chains[at], found[at])
        error = float(vector_norm(matrix - sum(trial), dtype=torch.float64))
        advance()
        gain = 1 - error / least if least else 0.0
        if error < least:
            products, before, weights, least = trial, products, found, error
        if gain > LEAST_GAIN:
            streak += 1
        elif not streak or least <= resolution:
            break
        else:
            streak = 0
    if not steps:
        return weights
    free = [at for at, form in enumerate(closed) if form is None]
    rest = matrix - sum(each for at, each in enumerate(products) if at not in free)
    flat = [each for at in free for each in weights[at]]
    moved = iter(refined(rest, flat, steps, advance, tuple(chains[at] for at in free)))
    return [list(islice(moved, len(own))) if at in free else own for at, own in enumerate(weights)]


def _projected(matrix: Tensor, chain: Chain, form: ClosedForm | None, exponent: int = 0) -> list[Tensor]:
    """Weights of a chain near a matrix scaled by 2^-exponent: the nearest ones, or those of hierarchical SVDs."""
    natural, inner, to_given = in_natural_order(matrix, chain)
    if form is not None:
        power = 0 if form.is_linear else -exponent
        weights = [times_power(each, power) for each in form.weights(natural)]
    elif len(inner) == 1:
        weights = [on_support(natural, inner[0])]
    else:
        weights = balanced(project(natural, inner, lambda: None)[0], inner)
    return [each.to(matrix.dtype) for each in to_given(weights)]
