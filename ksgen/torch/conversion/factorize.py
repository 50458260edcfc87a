"""`factorize`: approximate a dense matrix by a product of Kronecker-sparse factors.

Chooses the method, and reports error and time.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from math import frexp, inf, sqrt
from time import perf_counter
from typing import overload

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ksgen.build.background import progress_bar
from ksgen.errors import LaunchError
from ksgen.measure.trust import Watch, why_unreliable, with_reason
from ksgen.pattern import Chain, Patterns
from ksgen.structures import Structure, of_chain, renamed, shared_names
from ksgen.torch.conversion.projection import (
    balanced,
    block_ranks,
    drawn,
    least_squared_error,
    on_support,
    one_thread_each,
    project,
    refined,
    relative_error,
    squared_errors,
    stored_features,
)
from ksgen.torch.conversion.relabelling import relabelled
from ksgen.torch.conversion.structured import closed_form
from ksgen.torch.operators.checks import check_flags, check_tensors
from ksgen.torch.operators.products import chain_to_dense
from ksgen.values import excerpt, whole_number

LEAST_STEPS = 100  # least steps of refinement, if SVDs give no bound
STARTS = 3  # starting points of that refinement: the factors from SVDs, and random ones


@dataclass(frozen=True)
class Factorization:
    """Weights (a, b, c, d) of the factors in the order in which they multiply x, and the error of their product."""

    chain: Chain
    weights: tuple[Tensor, ...] = field(repr=False)
    relative_error: float  # Frobenius norm of the difference, over that of the matrix
    least_error: float  # lower bound on the error of any product of these factors; 0 if no larger one is known
    bound: float  # proven: relative_error <= bound * the smallest possible error; inf if nothing is proven
    method: str  # support, projection, hierarchical or refinement; of a structure also mean, rearrangement or polar
    guarantee: str  # what is proven about the error, in words
    seconds: float
    doubt: str = ""  # why the seconds are unreliable; empty if they are reliable
    state: Mapping[str, Tensor] = field(default_factory=dict, repr=False)  # parameters of a given structure, by name

    def __str__(self) -> str:
        took = with_reason(f"{self.seconds:.3g} s", self.doubt)
        return f"{self.chain}: relative error {self.relative_error:.3g} by {self.method} in {took}; {self.guarantee}"


@dataclass(frozen=True)
class SumFactorization:
    """Weights (a, b, c, d) of a sum of chains of one factor each, and the error of the sum, which is the nearest."""

    chains: tuple[Chain, ...]
    weights: tuple[Tensor, ...] = field(repr=False)  # one per chain
    relative_error: float  # Frobenius norm of the difference, over that of the matrix
    state: Mapping[str, Tensor] = field(repr=False)  # parameters of all structures, by name


@overload
def factorize(
    weight: Tensor, chain: Patterns | Structure, *, refine: int = 0, progress: bool = False
) -> Factorization: ...
@overload
def factorize(
    weight: Tensor, chain: tuple[Structure, ...], *, refine: int = 0, progress: bool = False
) -> SumFactorization: ...
def factorize(
    weight: Tensor, chain: Patterns | Structure | tuple[Structure, ...], *, refine: int = 0, progress: bool = False
) -> Factorization | SumFactorization:
    """Approximate a matrix by a product of Kronecker-sparse factors.

    One or two factors give the nearest product, also if they exchange features. A longer chainable chain uses
    hierarchical SVDs: the error is at most `bound` times the least one, and `refine` steps of L-BFGS follow. So does a
    longer chain that exchanges features, if another order makes it chainable. Any other longer chain uses L-BFGS from
    three starts, at least 100 steps each. Its only guarantee is `least_error`.

    A structure of `ksgen.structures` also gives its authors' parameters. Kronecker products and blocks of OFT are the
    nearest ones. Other structures are factorized as their chain. A tuple of structures of one factor each, such as
    `dyad`, gives the nearest sum.

    The computation runs on the tensor's device, in float64 for float64 and in float32 otherwise.

    Args:
        weight: Matrix (out_features, in_features), as in an `nn.Linear`.
        chain: Factors of the product: a `ksgen.Chain`, a list of patterns, one pattern, or a structure. Or the tuple of
            structures of a sum.
        refine: Steps of L-BFGS, from 0 up. Chains of one or two factors ignore them.
        progress: True shows a progress bar on a terminal.

    Returns:
        A `Factorization`: `weights` per factor in the dtype of the computation, `relative_error` and the guarantee.
        With a structure, `state` has its parameters by name. A sum gives a `SumFactorization`.

    Raises:
        PatternError: The chain is invalid.
        SpecError: `progress` is neither True nor False.
        LaunchError: The weight is no dense real matrix of finite numbers, or has another shape, or `refine` is not
            accepted. Also if a structure has no method: GSOFT's rotations, most tied weights, and sums of products.

    Examples:
        >>> import torch
        >>> from ksgen.torch import factorize
        >>> found = factorize(torch.eye(4), ["2,2,2,1", "1,2,2,2"])
        >>> [tuple(each.shape) for each in found.weights], found.method
        ([(2, 2, 2, 1), (1, 2, 2, 2)], 'projection')
        >>> found.relative_error < 1e-6
        True
        >>> from ksgen import structures
        >>> found = factorize(torch.eye(4), structures.kronecker(4, 4, blocks=2))
        >>> {name: tuple(each.shape) for name, each in found.state.items()}
        {'B': (2, 2), 'A': (2, 2)}
    """
    if isinstance(chain, tuple) and any(isinstance(each, Structure) for each in chain):
        return _sum(weight, chain, refine)
    names_parameters = isinstance(chain, Structure)
    structure = chain if isinstance(chain, Structure) else of_chain(Chain.read(chain))
    given = structure.chain
    matrix, chain, to_given = _in_natural_order(_checked(weight, given, refine), given)
    check_flags(progress=progress)
    closed = closed_form(structure, chain)
    method, guarantee, bound = (closed.method, closed.guarantee, 1.0) if closed else _method(chain)
    steps = {"hierarchical": refine, "refinement": max(refine, LEAST_STEPS)}.get(method, 0)
    starts = STARTS if method == "refinement" else 1
    with torch.no_grad(), progress_bar(progress, str(given), len(chain) - 1 + starts * steps) as advance:
        begin, watch = perf_counter(), Watch()
        scaled, exponent = (matrix, 0) if closed and not closed.is_linear else _scaled(matrix)
        begun, squares = ([closed.weights(scaled)], []) if closed else _begin(scaled, chain, method, advance)
        found = [refined(scaled, each, steps, advance, chain) for each in begun]
        nearest = min(found, key=partial(relative_error, scaled, chain=chain)) if len(found) > 1 else found[0]
        weights = [_times_power(each.double(), exponent / len(chain)).to(matrix.dtype) for each in nearest]
        seconds, share = perf_counter() - begin, watch.others_share() if matrix.device.type == "cpu" else None
        error = relative_error(scaled, [_times_power(weights[0].double(), -exponent), *weights[1:]], chain)
        least = error
        if len(chain) > 2:
            least = min(error, sqrt(max(squares)) / (float(vector_norm(scaled, dtype=torch.float64)) or 1))
    if method == "refinement" and least:
        guarantee, bound = f"{guarantee}; no product of its factors has an error below {least:.3g}", error / least
    weights = list(to_given(weights))
    state = structure.to_state(weights) if names_parameters else {}
    return Factorization(
        given, tuple(weights), error, least, bound, method, guarantee, seconds, why_unreliable([seconds], [share]),
        state,
    )  # fmt: skip


def factorized(weight: Tensor, structures: tuple[Structure, ...], refine: int = 0) -> Factorization | SumFactorization:
    """Approximate a matrix by one structure, or by the sum of several, which may have parameters of equal names."""
    if len(structures) == 1:
        return factorize(weight, structures[0], refine=refine)
    if shared_names(structures):
        names = [{name: f"{number}.{name}" for name in each.shapes} for number, each in enumerate(structures)]
        structures = tuple(map(renamed, structures, names))
    return factorize(weight, structures, refine=refine)


def _sum(weight: Tensor, structures: tuple[Structure, ...], refine: int) -> SumFactorization:
    """The nearest sum of chains of one factor each. Chains that share an entry of the matrix have equal parts of it."""
    for each in structures:
        if not isinstance(each, Structure):
            raise LaunchError(f"factorize: {excerpt(each)} in a sum; accepted: structures of `ksgen.structures`")
        if len(each.chain) > 1 or any(each.ties) or each.are_rotations or each.has_rotations:
            raise LaunchError(
                f"factorize: {each.chain} in a sum; accepted: chains of one factor whose weights are free, as in dyad"
            )
    if twice := shared_names(structures):
        raise LaunchError(
            f"factorize: several structures of a sum have the parameters {', '.join(twice)}; accepted: structures with "
            "different names, as in dyad"
        )
    with torch.no_grad():
        matrices = [_checked(weight, each.chain, refine) for each in structures]
        supports = [chain_to_dense(each.chain, [matrices[0].new_ones(each.chain[0].shape)]) for each in structures]
        share = matrices[0] / sum(supports).clamp_min(1)
        weights = []
        for each in structures:
            natural, chain, _ = _in_natural_order(share, each.chain)
            weights.append(on_support(natural, chain[0]))
        total = sum(chain_to_dense(each.chain, [own.double()]) for each, own in zip(structures, weights, strict=True))
        norm = float(vector_norm(matrices[0], dtype=torch.float64))
        error = float(vector_norm(total - matrices[0])) / (norm or 1)
        state: dict[str, Tensor] = {}
        for each, own in zip(structures, weights, strict=True):
            state |= each.to_state([own])
    return SumFactorization(tuple(each.chain for each in structures), tuple(weights), error, state)


def errors_of(weight: Tensor, chains: Sequence[Chain], advance: Callable[[], None] = lambda: None) -> list[float]:
    """Compute the relative errors of `factorize` for several chains, without weights if SVDs alone give the error.

    All chains have the features of the weight. On a processor, each thread computes one chain at a time. `advance` is
    called after each chain.
    """
    scaled, _ = _scaled(_checked(weight, chains[0], 0))
    norm = float(vector_norm(scaled, dtype=torch.float64)) or 1

    def error_of(chain: Chain) -> float:
        with torch.no_grad():
            matrix, inner, _ = _in_natural_order(scaled, chain)
            if _method(inner)[0] == "refinement":
                error = factorize(weight, chain).relative_error
            else:
                error = sqrt(sum(squared_errors(matrix, inner))) / norm
        advance()
        return error

    workers = min(torch.get_num_threads(), len(chains)) if weight.device.type == "cpu" else 1
    if workers < 2:
        return list(map(error_of, chains))
    with one_thread_each(), ThreadPoolExecutor(workers) as pool:
        return list(pool.map(error_of, chains))


def _in_natural_order(
    matrix: Tensor, chain: Chain
) -> tuple[Tensor, Chain, Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    """Permute a matrix as if the chain exchanged no features of x and y.

    Also returns that chain, and the function from its weights to those of the given chain. Features between factors
    are still exchanged if there are only two factors, or if `relabelled` finds no chain without exchanges.
    """
    if not chain.is_exchanged:
        return matrix, chain, list
    *others, last = chain
    rows, columns = (stored_features(order, matrix.device).argsort() for order in (last.outputs, chain[0].inputs))
    patterns = [*(replace(each, load="") for each in others), replace(last, store="", load="")]
    matrix, chain = matrix[rows][:, columns], Chain(tuple(patterns), chain.name)
    found = relabelled(chain) if chain.is_exchanged and len(chain) > 2 else None
    return (found.of_matrix(matrix), found.chain, found.to_given) if found else (matrix, chain, list)


def _scaled(matrix: Tensor) -> tuple[Tensor, int]:
    """Scale a matrix by 2^-exponent, so that no square overflows. Also returns the exponent."""
    exponent = frexp(float(vector_norm(matrix, inf)))[1]
    return _times_power(matrix, -exponent), exponent


def _begin(
    matrix: Tensor, chain: Chain, method: str, advance: Callable[[], None]
) -> tuple[list[list[Tensor]], list[float]]:
    """Compute the weights of each starting point, and lower bounds on the squared error of any product.

    If SVDs give a guarantee, there is one starting point, which needs no refinement.
    """
    if method == "support":
        return [[on_support(matrix, chain[0])]], []
    weights, squares = project(matrix, chain, advance)
    if method != "refinement":
        return [balanced(weights, chain)], squares
    return [balanced(weights, chain), *(drawn(matrix, chain, seed) for seed in range(STARTS - 1))], [
        least_squared_error(matrix, chain)
    ]


def _times_power(values: Tensor, exponent: float) -> Tensor:
    """Multiply the values by 2^exponent, in two steps because 2^exponent itself may overflow."""
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)


def _method(chain: Chain) -> tuple[str, str, float]:
    """The method, its guarantee in words, and its error bound."""
    if len(chain) == 1:
        return "support", "the nearest product", 1.0
    if len(chain) == 2:
        ranks = " and ".join(map(str, block_ranks(chain[1], chain[0])))
        why = "exchanges features" if chain.is_exchanged else "is not chainable"
        note = "" if chain.is_chainable else f", though the chain {why}: its blocks have ranks {ranks}"
        return "projection", f"the nearest product{note}", 1.0
    if chain.is_chainable:
        bound = sqrt(len(chain) - 1)
        return "hierarchical", f"at most {bound:.2f} times the error of the nearest", bound
    return "refinement", "no guarantee, as the chain is not chainable", inf


def _checked(weight: Tensor, chain: Chain, refine: int) -> Tensor:
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
    if weight.is_meta:
        raise LaunchError(
            "factorize: weight is on the meta device, so that it has no values; accepted: a torch.Tensor with values"
        )
    matrix = weight.detach().to(torch.float64 if weight.dtype == torch.float64 else torch.float32)
    if not (finite := matrix.isfinite()).all():
        row, column = (~finite).nonzero()[0].tolist()
        raise LaunchError(f"weight[{row}, {column}]={float(matrix[row, column])}; accepted: finite numbers")
    return matrix
