"""Improves factors step by step, by L-BFGS: for chains that SVDs cannot serve, or not as well."""

from collections.abc import Callable, Sequence
from math import sqrt

import torch
from torch import Tensor

from ksgen.pattern import Chain

_REMEMBERED = 20  # steps that make up the model of the curvature


def product_of(weights: Sequence[Tensor]) -> Tensor:
    """K as a dense matrix: the factors' product, the first one rightmost."""
    a, _, c, d = weights[0].shape
    dense = torch.eye(a * c * d, dtype=weights[0].dtype, device=weights[0].device)
    for each in weights:
        a, _, c, d = each.shape
        dense = torch.einsum("iklj,iljn->ikjn", each, dense.reshape(a, c, d, -1)).flatten(0, 2)
    return dense


def relative_error(matrix: Tensor, weights: Sequence[Tensor]) -> float:
    """Frobenius norm of the difference over that of the matrix; 0 if both are 0."""
    difference, whole = (each.double().norm() for each in (matrix - product_of(weights), matrix))
    return float(difference / whole) if difference else 0.0


def start(matrix: Tensor, chain: Chain) -> list[Tensor]:
    """Random weights that preserve the size of what passes through, scaled so that their product has the matrix's norm."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.rand(pattern.shape, generator=generator, dtype=matrix.dtype) for pattern in chain]
    weights = [((2 * each - 1) * sqrt(3 / each.shape[2])).to(matrix.device) for each in drawn]
    scale = (matrix.norm() / product_of(weights).norm()) ** (1 / len(weights))
    return [each * scale for each in weights]


def refined(matrix: Tensor, weights: list[Tensor], steps: int, advance: Callable[[], None]) -> list[Tensor]:
    """The weights after that many steps, or unchanged if the steps gain nothing. `advance` is called after each."""
    energy = matrix.square().sum()
    if not steps or not energy:
        return weights
    moving = [each.detach().clone().requires_grad_() for each in weights]
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
