"""`factorize`: approximate a dense matrix by a product of Kronecker-sparse factors.

Chooses the method, and reports error and time.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
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
from ksgen.torch.conversion import sums
from ksgen.torch.conversion.nearest import (
    LEAST_STEPS,
    STARTS,
    checked,
    in_natural_form,
    in_natural_order,
    method_of,
    scaled_by_power,
    starting_points,
    times_power,
)
from ksgen.torch.conversion.projection import each_in_a_thread, refined, relative_error, squared_errors
from ksgen.torch.conversion.structured import closed_form
from ksgen.torch.operators.checks import check_flags
from ksgen.values import excerpt


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
    """Weights (a, b, c, d) of a sum of chains, and the error of the sum."""

    chains: tuple[Chain, ...]
    weights: tuple[Tensor, ...] = field(repr=False)  # of all factors of the first chain, then of the next ones
    relative_error: float  # Frobenius norm of the difference, over that of the matrix
    state: Mapping[str, Tensor] = field(repr=False)  # parameters of all structures, by name
    method: str = sums.LEAST_SQUARES[0]  # or alternation
    guarantee: str = sums.LEAST_SQUARES[1]  # what is proven about the error, in words

    def __str__(self) -> str:
        error = f"relative error {self.relative_error:.3g} by {self.method}"
        return f"{sums.text_of(self.chains)}: {error}; {self.guarantee}"


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

    One or two factors give the nearest product, also if they exchange features (`Pattern.store` and `load`). A longer
    chain uses hierarchical SVDs if it is chainable, which asks for more than fitting sizes (docs/factorize.md). The
    error is then at most `bound` times the least one, and `refine` steps of L-BFGS follow. A longer chain that
    exchanges features is treated alike, if another order of them makes it chainable. Any other longer chain uses L-BFGS
    from three starts, at least 100 steps each. Its only guarantee is `least_error`.

    A structure of `ksgen.structures` also gives its authors' parameters. A Kronecker product is the nearest one, and
    each block of OFT is the nearest rotation. Other structures are factorized as their chain.

    A tuple of structures is a sum. If each has one factor, as in `dyad`, the result is the nearest sum. In other sums,
    the chains are factorized in turn, each for what the others leave of the matrix, until that gains little. `refine`
    steps of L-BFGS then move all chains together. That has no guarantee.

    The computation runs on the tensor's device, in float64 for float64 and in float32 otherwise.

    Args:
        weight: Matrix (out_features, in_features), as in an `nn.Linear`.
        chain: Factors of the product: a `ksgen.Chain`, a list of patterns, one pattern, or a structure. Or the tuple of
            structures of a sum.
        refine: Steps of L-BFGS, from 0 up. Chains of one or two factors ignore them, and so does the nearest sum.
        progress: True shows a progress bar on a terminal.

    Returns:
        A `Factorization`: `weights` per factor in the dtype of the computation, `relative_error` and the guarantee.
        With a structure, `state` has its parameters by name. A sum gives a `SumFactorization`.

    Raises:
        PatternError: The chain is invalid.
        SpecError: `progress` is neither True nor False.
        LaunchError: The weight is not a dense real matrix of finite numbers, or has another shape, or `refine` is not
            accepted. Also if a structure has no method: GSOFT's rotations and most tied weights.

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
        return _sum(weight, chain, refine, progress)
    names_parameters = isinstance(chain, Structure)
    structure = chain if isinstance(chain, Structure) else of_chain(Chain.read(chain))
    given = structure.chain
    matrix, chain, to_given = in_natural_order(checked(weight, given, refine), given)
    check_flags(progress=progress)
    closed = closed_form(structure, chain)
    method, guarantee, bound = (closed.method, closed.guarantee, 1.0) if closed else method_of(chain)
    steps = {"hierarchical": refine, "refinement": max(refine, LEAST_STEPS)}.get(method, 0)
    starts = STARTS if method == "refinement" else 1
    with torch.no_grad(), progress_bar(progress, str(given), len(chain) - 1 + starts * steps) as advance:
        begin, watch = perf_counter(), Watch()
        scaled, exponent = scaled_by_power(matrix)
        begun, squares = ([closed.weights(scaled)], []) if closed else starting_points(scaled, chain, method, advance)
        found = [refined(scaled, each, steps, advance, chain) for each in begun]
        nearest = min(found, key=partial(relative_error, scaled, chain=chain)) if len(found) > 1 else found[0]
        power = 0 if closed and not closed.is_linear else exponent / len(chain)
        weights = [times_power(each.double(), power).to(matrix.dtype) for each in nearest]
        seconds, share = perf_counter() - begin, watch.others_share() if matrix.device.type == "cpu" else None
        error = relative_error(scaled, [times_power(weights[0].double(), -exponent), *weights[1:]], chain)
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


def _sum(weight: Tensor, structures: tuple[Structure, ...], refine: int, progress: bool) -> SumFactorization:
    """A sum of chains near a matrix: the nearest one if least squares give it, else by alternating projections."""
    for each in structures:
        if not isinstance(each, Structure):
            raise LaunchError(f"factorize: {excerpt(each)} in a sum; accepted: structures of `ksgen.structures`")
    if twice := shared_names(structures):
        raise LaunchError(
            f"factorize: several structures of a sum have the parameters {', '.join(twice)}; accepted: structures with "
            "different names, as in dyad"
        )
    chains = tuple(each.chain for each in structures)
    closed = [closed_form(each, in_natural_form(each.chain)) for each in structures]
    matrix, *_ = (checked(weight, each, refine) for each in chains)
    check_flags(progress=progress)
    has_least_squares = sums.is_nearest(structures)
    method, guarantee = sums.LEAST_SQUARES if has_least_squares else sums.ALTERNATION
    steps = sums.most_steps(chains, closed, refine)
    most = 0 if has_least_squares else sums.ROUNDS + steps
    with torch.no_grad(), progress_bar(progress, sums.text_of(chains), most) as advance:
        scaled, exponent = scaled_by_power(matrix)
        if exponent < 0 and any(form and not form.is_linear for form in closed):
            scaled, exponent = matrix, 0  # rotations that were scaled up might overflow
        found = (
            sums.least_squares(scaled, chains)
            if has_least_squares
            else sums.alternated(scaled, chains, closed, steps, advance, exponent)
        )
        parts = [[times_power(each.double(), exponent / len(own)).to(matrix.dtype) for each in own] for own in found]
        again = [[times_power(own[0].double(), -exponent), *own[1:]] for own in parts]
        error = relative_error(scaled, [each for own in again for each in own], chains)
    state: dict[str, Tensor] = {}
    for each, own in zip(structures, parts, strict=True):
        state |= each.to_state(own)
    return SumFactorization(chains, tuple(each for own in parts for each in own), error, state, method, guarantee)


def errors_of(
    weight: Tensor, forms: Sequence[tuple[Structure, ...]], advance: Callable[[], None] = lambda: None
) -> list[float]:
    """Compute the relative errors of `factorized` for several structures or sums of them.

    No weights are computed if SVDs alone give the error. All structures have the features of the weight. On a
    processor, each thread computes one error at a time. `advance` is called after each.
    """
    scaled, _ = scaled_by_power(checked(weight, forms[0][0].chain, 0))
    norm = float(vector_norm(scaled, dtype=torch.float64)) or 1

    def error_of(form: tuple[Structure, ...]) -> float:
        with torch.no_grad():
            matrix, inner, _ = in_natural_order(scaled, form[0].chain)
            if len(form) > 1 or any(form[0].ties) or method_of(inner)[0] == "refinement":
                error = factorized(weight, form).relative_error
            else:
                error = sqrt(sum(squared_errors(matrix, inner))) / norm
        advance()
        return error

    return each_in_a_thread(error_of, forms, torch.get_num_threads() if weight.device.type == "cpu" else 1)
