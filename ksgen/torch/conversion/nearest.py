"""How one chain approximates a matrix: the checked matrix, the order of its features, the method and its start."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import frexp, inf, sqrt

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ksgen.errors import LaunchError
from ksgen.pattern import Chain
from ksgen.torch.conversion import projection
from ksgen.torch.conversion.relabelling import Relabelled, relabelled
from ksgen.torch.operators.checks import check_tensors
from ksgen.values import excerpt, whole_number

LEAST_STEPS = 100  # least steps of refinement, if SVDs give no bound
_REMEMBERED = 64  # cached chains: the layers of a model, and the rounds of a sum, share a few
STARTS = 3  # starting points of that refinement: the factors from SVDs, and random ones


def checked(weight: Tensor, chain: Chain, refine: int) -> Tensor:
    """Validate the arguments and return the matrix in the dtype of the computation."""
    check_tensors("factorize", weight=weight)
    if not weight.is_floating_point():
        raise LaunchError(
            f"factorize: weight is {weight.dtype}; accepted: a torch.Tensor of real floating-point numbers"
        )
    wanted = (chain.out_features, chain.in_features)
    if tuple(weight.shape) != wanted:
        raise LaunchError(
            f"weight has shape {tuple(weight.shape)}; {chain} wants (out_features, in_features) = {wanted}"
        )
    if (steps := whole_number(refine)) is None or steps < 0:
        raise LaunchError(f"refine={excerpt(refine)}; accepted: a number of steps, from 0 up")
    check_values(weight)
    return weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)


def check_values(weight: Tensor) -> None:
    """Raise `LaunchError` if a matrix has no values, or one that is not finite."""
    if weight.is_meta:
        raise LaunchError(
            "factorize: weight is on the meta device, so that it has no values; accepted: a torch.Tensor with values"
        )
    if not (finite := weight.isfinite()).all():
        row, column = (~finite).nonzero()[0].tolist()
        raise LaunchError(f"weight[{row}, {column}]={weight[row, column].item()}; accepted: finite numbers")


def in_natural_order(
    matrix: Tensor, chain: Chain
) -> tuple[Tensor, Chain, Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Permute a matrix as if the chain exchanged no features of x and y.

    Also returns that chain, and the function from its weights to those of the given chain. Features between factors
    are still exchanged if there are only two factors, or if `relabelled` finds no chain without exchanges.
    """
    if not chain.is_exchanged:
        return matrix, chain, list
    orders = chain.factors[-1].outputs, chain[0].inputs
    rows, columns = (projection.stored_features(order, matrix.device).argsort() for order in orders)
    matrix, (inner, found) = matrix[rows][:, columns], _without_exchanges(chain)
    return (found.of_matrix(matrix), found.chain, found.to_given) if found else (matrix, inner, list)


def in_natural_form(chain: Chain) -> Chain:
    """The chain that `in_natural_order` returns."""
    if not chain.is_exchanged:
        return chain
    inner, found = _without_exchanges(chain)
    return found.chain if found else inner


@lru_cache(_REMEMBERED)
def _without_exchanges(chain: Chain) -> tuple[Chain, Relabelled | None]:
    """The chain without exchanges of features of x and y, and its relabelled form; None if none exists or is needed."""
    *others, last = chain
    inner = Chain((*(replace(each, load="") for each in others), replace(last, store="", load="")), chain.name)
    return inner, relabelled(inner) if inner.is_exchanged and len(inner) > 2 else None


def scaled_by_power(matrix: Tensor) -> tuple[Tensor, int]:
    """Scale a matrix by 2^-exponent, so that no square overflows. Also returns the exponent."""
    exponent = frexp(float(vector_norm(matrix, inf)))[1]
    return times_power(matrix, -exponent), exponent


def starting_points(
    matrix: Tensor, chain: Chain, method: str, advance: Callable[[], None]
) -> tuple[list[list[Tensor]], list[float]]:
    """Compute the weights of each starting point, and lower bounds on the squared error of any product.

    If SVDs give a guarantee, there is one starting point, which needs no refinement.
    """
    if method == "support":
        return [[projection.on_support(matrix, chain[0])]], []
    weights, squares = projection.project(matrix, chain, advance)
    begun = [projection.balanced(weights, chain)]
    if method != "refinement":
        return begun, squares
    squares = [projection.least_squared_error(matrix, chain)]
    return begun + [projection.drawn(matrix, chain, seed) for seed in range(STARTS - 1)], squares


def times_power(values: Tensor, exponent: float) -> Tensor:
    """Multiply the values by 2^exponent, in two steps because 2^exponent itself may overflow."""
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def method_of(chain: Chain) -> tuple[str, str, float]:
    """The method, its guarantee in words, and its error bound."""
    if len(chain) == 1:
        return "support", "the nearest product", 1.0
    if len(chain) == 2:
        ranks = " and ".join(map(str, projection.block_ranks(chain[1], chain[0])))
        why = "exchanges features" if chain.is_exchanged else "is not chainable"
        note = "" if chain.is_chainable else f", though the chain {why}: its blocks have ranks {ranks}"
        return "projection", f"the nearest product{note}", 1.0
    if chain.is_chainable:
        bound = sqrt(len(chain) - 1)
        return "hierarchical", f"at most {bound:.2f} times the error of the nearest", bound
    return "refinement", "no guarantee, as the chain is not chainable", inf
