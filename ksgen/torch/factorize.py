"""`factorize`: a dense matrix as a product of Kronecker-sparse factors. Chooses the method, and reports error and time."""

from dataclasses import dataclass, field
from math import frexp, inf, sqrt
from time import perf_counter

import torch
from torch import Tensor

from ksgen.errors import LaunchError
from ksgen.pattern import Chain
from ksgen.torch.checks import check_flags, check_tensors
from ksgen.torch.layer import Patterns, as_chain
from ksgen.torch.progress import progress_bar
from ksgen.torch.projection import balance, block_ranks, on_support, project
from ksgen.torch.refinement import refined, relative_error, start
from ksgen.values import excerpt, whole_number

LEAST_STEPS = 100  # of refinement, if it is the only method


@dataclass(frozen=True)
class Factorization:
    """The weights (a, b, c, d) of each factor, from the one that meets x first, and the error of their product."""

    chain: Chain
    weights: tuple[Tensor, ...] = field(repr=False)
    relative_error: float  # Frobenius norm of the difference, over that of the matrix
    least_error: float  # no product of these factors has a smaller one; 0 where that is all that is known
    bound: float  # relative_error is proven to be at most this many times the smallest one; inf where nothing is proven
    method: str  # support, projection, hierarchical or refinement
    guarantee: str  # in words
    seconds: float

    def __str__(self) -> str:
        return f"{self.chain}: relative error {self.relative_error:.3g} by {self.method} in {self.seconds:.3g} s; {self.guarantee}"


def factorize(weight: Tensor, chain: Patterns, *, refine: int = 0, progress: bool = False) -> Factorization:
    """A matrix (out_features, in_features), such as the weight of an `nn.Linear`, as a product of Kronecker-sparse factors.

    One or two factors: the nearest product there is. A longer chainable chain: hierarchical SVDs, at most `bound` times as far
    as the nearest, then `refine` steps of L-BFGS. A longer chain that is not chainable: L-BFGS alone, at least 100 steps,
    with no guarantee. Computes on the tensor's device, in float64 for float64 and in float32 otherwise; the weights have
    that type.
    """
    chain = as_chain(chain)
    matrix = _checked(weight, chain, refine)
    check_flags(progress=progress)
    method, guarantee, bound = _method(chain)
    steps = {"hierarchical": refine, "refinement": max(refine, LEAST_STEPS)}.get(method, 0)
    errors: list[float] = []
    with torch.no_grad(), progress_bar(progress, str(chain), len(chain) - 1 + steps) as advance:
        begin = perf_counter()
        scale = 2.0 ** frexp(float(matrix.abs().max()))[1]
        matrix = matrix / scale  # so that no square is beyond float32
        if method == "support":
            weights = [on_support(matrix, chain[0])]
        elif method == "refinement":
            weights = start(matrix, chain)
        else:
            weights, errors = project(matrix, chain, advance)
            balance(weights)
        weights = refined(matrix, weights, steps, advance)
        seconds = perf_counter() - begin
        error = relative_error(matrix, weights)
        weights = [each * scale ** (1 / len(chain)) for each in weights]
    least = error if len(chain) <= 2 else min(error, sqrt(max(errors, default=0)) / (float(matrix.double().norm()) or 1))
    return Factorization(chain, tuple(weights), error, least, bound, method, guarantee, seconds)


def _method(chain: Chain) -> tuple[str, str, float]:
    """The method, its guarantee in words, and the bound."""
    if len(chain) == 1:
        return "support", "the nearest there is", 1.0
    if len(chain) == 2:
        ranks = " and ".join(map(str, block_ranks(chain[1], chain[0])))
        note = "" if chain.is_chainable else f", though the chain is not chainable: its blocks have ranks {ranks}"
        return "projection", f"the nearest there is{note}", 1.0
    if chain.is_chainable:
        bound = sqrt(len(chain) - 1)
        return "hierarchical", f"at most {bound:.2f} times the error of the nearest", bound
    return "refinement", "no guarantee, as the chain is not chainable", inf


def _checked(weight: Tensor, chain: Chain, refine: int) -> Tensor:
    """The matrix in the dtype of the computation."""
    check_tensors("factorize", weight=weight)
    if not weight.is_floating_point():
        raise LaunchError(f"factorize: weight is {weight.dtype}; accepted: a torch.Tensor of real floating-point numbers")
    wanted = (chain.out_features, chain.in_features)
    if tuple(weight.shape) != wanted:
        raise LaunchError(f"weight has shape {tuple(weight.shape)}; {chain} wants (out_features, in_features) = {wanted}")
    if (steps := whole_number(refine)) is None or steps < 0:
        raise LaunchError(f"refine={excerpt(refine)}; accepted: a number of steps, from 0 up")
    matrix = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not (finite := matrix.isfinite()).all():
        row, column = (~finite).nonzero()[0].tolist()
        raise LaunchError(f"weight[{row}, {column}]={float(matrix[row, column])}; accepted: finite numbers")
    return matrix
