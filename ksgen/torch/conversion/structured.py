"""Structures with a nearest matrix in closed form: tied weights, Kronecker products, and block-diagonal rotations.

Once its entries are rearranged, a Kronecker product A ⊗ B is a matrix of rank 1. Each row is B times one entry of A. So
its nearest approximation is the largest term of one SVD (Van Loan and Pitsianis, 1993). The nearest rotation to a block
U S V^T is U V^T, with the last column of U negated if that is a reflection.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ksgen.errors import LaunchError
from ksgen.pattern import Chain
from ksgen.structures import Structure
from ksgen.torch.conversion.projection import nearest_of_rank, on_support
from ksgen.torch.operators.products import blocks_of


@dataclass(frozen=True)
class ClosedForm:
    """How the nearest matrix of a structure is computed: weights (a, b, c, d) per factor from a matrix."""

    method: str
    guarantee: str
    weights: Callable[[Tensor], list[Tensor]]
    is_linear: bool = True  # whether the weights of a multiple of the matrix are multiples of these weights


def closed_form(structure: Structure, chain: Chain) -> ClosedForm | None:
    """Find the closed form for a structure. None if its chain is factorized like any other.

    `chain` is that of the structure, for a matrix with features of x and y in their natural order. Raises `LaunchError`
    if the chain's factors would lose what the structure asks of them.
    """
    if structure.are_rotations:
        free = "the structure itself, not its published form" if structure.has_rotations else "orthogonal=False"
        raise LaunchError(f"factorize: parameters of {chain.name} stand for rotations; accepted: {free}")
    if structure.has_rotations and len(chain) == 1:
        return ClosedForm(
            "polar", "the nearest rotation of each block", lambda matrix: _rotations(matrix, chain), False
        )
    if not any(structure.ties):
        return None
    if len(chain) == 1:
        axes = [*map("abcd".index, structure.ties[0])]
        return ClosedForm("mean", "the nearest tied weights", lambda matrix: [_mean(matrix, chain, axes)])
    if (first_is_b := _applies_b_first(chain, structure.ties)) is None:
        ties = ", ".join(each or "none" for each in structure.ties)
        raise LaunchError(
            f"factorize: {chain} with weights tied along {ties}; accepted: one tied factor, or a Kronecker product as "
            "of structures.kronecker"
        )
    return ClosedForm(
        "rearrangement", "the nearest Kronecker product", lambda matrix: _kronecker(matrix, chain, first_is_b)
    )


def _applies_b_first(chain: Chain, ties: tuple[str, ...]) -> bool | None:
    """Whether the first factor of a Kronecker product A ⊗ B repeats B; None if the chain is no Kronecker product."""
    if len(chain) != 2 or chain.is_exchanged:
        return None
    first, last = chain
    for is_b, (b, a), axes in ((True, (first, last), "ad"), (False, (last, first), "da")):
        inner = (b.a, b.b) if is_b else (b.a, b.c)
        fits = b.d == 1 and a.a == 1 and inner == ((a.c, a.d) if is_b else (a.b, a.d))
        expected = tuple(axis if getattr(factor, axis) > 1 else "" for axis, factor in zip(axes, chain, strict=True))
        if fits and ties == expected:
            return is_b
    return None


def _kronecker(matrix: Tensor, chain: Chain, first_is_b: bool) -> list[Tensor]:
    b, a = chain if first_is_b else reversed(chain.factors)
    cells = matrix.reshape(a.b, b.b, a.c, b.c).permute(0, 2, 1, 3).reshape(1, a.b * a.c, b.b * b.c)
    columns, rows, _ = nearest_of_rank(cells, 1)
    length = vector_norm(rows).clamp_min(torch.finfo(rows.dtype).tiny).sqrt()
    of_a = (columns * length).reshape(1, a.b, a.c, 1).expand(a.shape)
    of_b = (rows / length).reshape(1, b.b, b.c, 1).expand(b.shape)
    return [each.contiguous() for each in ((of_b, of_a) if first_is_b else (of_a, of_b))]


def _mean(matrix: Tensor, chain: Chain, axes: list[int]) -> Tensor:
    weights = on_support(matrix, chain[0])
    return weights.mean(axes, keepdim=True).expand(weights.shape).contiguous()


def _rotations(matrix: Tensor, chain: Chain) -> list[Tensor]:
    blocks = blocks_of(on_support(matrix, chain[0])).double()
    left, _, right = torch.linalg.svd(blocks)
    left[..., -1] *= torch.linalg.det(left @ right).sign()[:, None]
    return [(left @ right).to(matrix.dtype).reshape(chain[0].shape)]
