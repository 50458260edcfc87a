"""Initial weights that make a chain's product orthogonal, the identity or a Fourier transform. Never draws a bias."""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Literal, get_args

import torch
from torch import Tensor

from ksgen.errors import LaunchError
from ksgen.pattern import Chain, Pattern
from ksgen.torch.conversion.factorize import factorize
from ksgen.torch.operators.products import exchange_of, exchanged, natural
from ksgen.transforms.factors import butterfly, fourier

Init = Literal["uniform", "orthogonal", "identity", "fourier"]
INITS: tuple[Init, ...] = get_args(Init)
_EXACT = 1e-9  # a product in float64 with at most this relative error counts as exact


def initialize(name: str, init: str, chain: Chain, weights: Sequence[Tensor]) -> None:
    """Initialize the weights by `init`, which is not "uniform"; `LaunchError` if the chain cannot represent the matrix.

    `name` names the layer in messages. Tied weights are given as one slice, with extent 1 along each tied axis.
    """
    with torch.no_grad():
        values = _VALUES[init](f"{name}: init={init!r}", chain, weights[0])
        for number, (each, given) in enumerate(zip(weights, values, strict=True), start=1):
            value = given[tuple(map(slice, each.shape))]  # the first slice where weights are tied
            is_tied = each.shape != given.shape and not each.is_meta
            if is_tied and init != "orthogonal" and not torch.equal(value.expand_as(given), given):
                raise LaunchError(
                    f"{name}: init={init!r} has different weights where those of factor {number} are tied; accepted: "
                    "'uniform' or 'orthogonal'"
                )
            if hasattr(each, "full_tensor"):  # sharded
                from torch.distributed.tensor import distribute_tensor

                value = distribute_tensor(value.to(each.device, each.dtype), each.device_mesh, each.placements)
            each.copy_(value)


def _orthogonal(what: str, chain: Chain, like: Tensor) -> list[Tensor]:
    """Draw blocks with orthonormal columns or rows, so that the product's columns or rows are orthonormal, too."""
    _check_rank(what, chain)
    widths = _widths(chain)
    if widths not in (sorted(widths), sorted(widths, reverse=True)):
        raise LaunchError(
            f"{what} of {_listed(widths)} features, which grow and shrink, so that a product of orthogonal factors is "
            "not orthogonal; accepted: chains whose features only grow or only shrink"
        )
    return [_orthogonal_blocks(pattern, like) for pattern in chain]


def _orthogonal_blocks(pattern: Pattern, like: Tensor) -> Tensor:
    """Draw blocks with orthonormal columns, or rows if b < c, uniformly (from the Haar measure)."""
    a, b, c, d = pattern.shape
    dtype = torch.complex128 if like.is_complex() else torch.float64
    columns, triangles = torch.linalg.qr(torch.randn(a, d, max(b, c), min(b, c), dtype=dtype, device=like.device))
    columns = columns * triangles.diagonal(dim1=-2, dim2=-1).sgn()[..., None, :]
    return (columns if b >= c else columns.mT).permute(0, 2, 3, 1)


def _identity(what: str, chain: Chain, like: Tensor) -> Sequence[Tensor]:
    if (order := chain.exchanged) and not _keeps_order(chain):
        which = f"{chain}, whose {order.features} are exchanged"
        raise LaunchError(f"{what} for {which}; accepted: {order.features} in the order {order.natural}")
    _check_rank(what, chain)
    if all(pattern.b == pattern.c for pattern in chain):
        return [torch.eye(pattern.b, device=like.device)[None, :, :, None].expand(pattern.shape) for pattern in chain]
    if len(chain) > 2 and not chain.is_chainable:
        raise LaunchError(
            f"{what} for a chain that is not chainable; accepted: a `Chain` that is_chainable, or two factors"
        )
    if like.is_meta:
        return [like.new_empty(pattern.shape) for pattern in chain]
    found = factorize(torch.eye(chain.out_features, chain.in_features, dtype=torch.float64, device=like.device), chain)
    if found.relative_error > _EXACT:
        nearest = f"products of these factors have a relative error of at least {found.least_error:.2g}"
        raise LaunchError(
            f"{what}: {nearest}; accepted: chains that connect each input with the output of the same index"
        )
    return found.weights


def _keeps_order(chain: Chain) -> bool:
    """Whether exchanges of features cancel, so that identity blocks make the identity."""
    if any(pattern.b != pattern.c for pattern in chain):
        return False
    features = x = torch.arange(chain.in_features, device="cpu")[None]
    for pattern in chain:
        exchange = exchange_of(pattern)
        x = exchanged(natural(x, exchange, "bsf"), exchange, "bsf")
    return bool(torch.equal(x, features))


def _fourier(what: str, chain: Chain, like: Tensor) -> list[Tensor]:
    """Compute unitary weights of a Fourier transform.

    A chain whose first factor has d = 1 takes x with reversed digits. Any other chain returns y with reversed digits.
    """
    if not like.is_complex():
        raise LaunchError(f"{what} with {like.dtype}; accepted: dtype=torch.complex64 or torch.complex128")
    radices = tuple(pattern.b for pattern in chain)
    patterns = butterfly(radices, "dft").factors
    mirrored = tuple(pattern.transpose for pattern in reversed(butterfly(radices[::-1], "dft").factors))
    if chain.factors == patterns:
        found = list(fourier(radices, False))
    elif chain.factors == mirrored:  # the transposed product, since a Fourier matrix is symmetric
        found = [each.swapaxes(1, 2) for each in reversed(fourier(radices[::-1], False))]
    else:
        raise LaunchError(
            f"{what} for {chain}; accepted: the chain of ksgen.transforms.dft, or ksgen.monarch(n, n, s, s)"
        )
    return [torch.from_numpy(each / sqrt(each.shape[1])) for each in found]


_VALUES: dict[str, Callable[[str, Chain, Tensor], Sequence[Tensor]]] = {
    "orthogonal": _orthogonal,
    "identity": _identity,
    "fourier": _fourier,
}


def _check_rank(what: str, chain: Chain) -> None:
    """Raise `LaunchError` if intermediates are too narrow for a product of full rank."""
    widths = _widths(chain)
    if (rank := min(widths)) < (least := min(widths[0], widths[-1])):
        raise LaunchError(
            f"{what} of {_listed(widths)} features, whose products have rank {rank} at most; "
            f"accepted: at least {least} features between factors"
        )


def _widths(chain: Chain) -> list[int]:
    return [chain.in_features, *(pattern.out_features for pattern in chain)]


def _listed(widths: Sequence[int]) -> str:
    return " -> ".join(map(str, widths))
