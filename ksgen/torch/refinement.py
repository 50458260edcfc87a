"""Improves factors step by step, by L-BFGS: for chains that SVDs cannot serve, or not as well."""

from collections.abc import Callable, Sequence
from functools import reduce
from math import sqrt

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ksgen.pattern import Chain, Pattern, are_chainable
from ksgen.torch.products import to_dense

_REMEMBERED = 20  # steps that make up the model of the curvature


def product_of(weights: Sequence[Tensor]) -> Tensor:
    """K as a dense matrix: the factors' product, the first one rightmost."""
    return to_dense(reduce(lambda rest, last: _joined(last, rest), weights))


def _joined(left: Tensor, right: Tensor) -> Tensor:
    """left @ right as weights: of the product's own support if the pair is chainable, else of the whole matrix."""
    (a, b, c, d), (right_a, right_b, right_c, right_d) = left.shape, right.shape
    if not are_chainable(Pattern(a, b, c, d), Pattern(right_a, right_b, right_c, right_d)):
        dense = torch.einsum("iklj,iljn->ikjn", left, to_dense(right).reshape(a, c, d, -1))
        return dense.flatten(0, 2)[None, :, :, None]
    wide, tall = right_a // a, d // right_d  # an inner feature is i, one of wide, term, one of tall, j
    lefts = left.reshape(a, b, wide, -1, tall, right_d)
    rights = right.reshape(a, wide, -1, tall, right_c, right_d)
    return torch.einsum("ikwrtj,iwrtlj->iktwlj", lefts, rights).reshape(a, b * tall, wide * right_c, right_d)


def relative_error(matrix: Tensor, weights: Sequence[Tensor]) -> float:
    """Frobenius norm of the difference over that of the matrix, in float64; 0 if both are 0."""
    difference = product_of([each.double() for each in weights]) - matrix
    distance, whole = vector_norm(difference), vector_norm(matrix, dtype=torch.float64)
    return float(distance / whole) if distance else 0.0


def drawn(matrix: Tensor, chain: Chain, seed: int) -> list[Tensor]:
    """Random weights that preserve the size of what passes through, scaled so that their product has the matrix's norm."""
    generator = torch.Generator().manual_seed(seed)
    uniform = [torch.rand(pattern.shape, generator=generator, dtype=matrix.dtype) for pattern in chain]
    weights = [((2 * each - 1) * sqrt(3 / each.shape[2])).to(matrix.device) for each in uniform]
    scale = (matrix.norm() / product_of(weights).norm()) ** (1 / len(weights))
    return [each * scale for each in weights]


def refined(matrix: Tensor, weights: list[Tensor], steps: int, advance: Callable[[], None]) -> list[Tensor]:
    """The weights after that many steps in the matrix's type, or unchanged if the steps gain nothing. `advance` is called after each."""
    energy = matrix.square().sum()
    if not steps or not energy:
        return weights
    moving = [each.detach().to(matrix.dtype, copy=True).requires_grad_() for each in weights]
    optimizer = torch.optim.LBFGS(
        moving, max_iter=1, history_size=_REMEMBERED, line_search_fn="strong_wolfe", tolerance_grad=0, tolerance_change=0,
    )  # fmt: skip

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (matrix - product_of(moving)).square().sum() / energy
        value.backward()
        return value

    with torch.enable_grad():
        for _ in range(steps):
            optimizer.step(loss)
            advance()
    found = [each.detach() for each in moving]
    return found if relative_error(matrix, found) < relative_error(matrix, weights) else weights
