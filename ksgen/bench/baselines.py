"""What our kernels are compared with: each baseline takes weights of shape (a, b, c, d), puts them into its own format, and
gives a function of X. Never timed here.

`bmm`, `bsr`, `einsum`, `dense` and `sparse` are the paper's (appendix D.1); `strided`, `three_passes` and `densified` are what an expert
would write with the same library; `compiled` is torch.compile's einsum. `rewriting` is the part of `bmm` that only moves memory.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ksgen.errors import KsgenError
from ksgen.pattern import Pattern

Product = Callable[[Tensor], Tensor]

MOST_DENSIFIED = 4  # d up to which zeros in between are worth their multiplications


class UnsupportedError(KsgenError):
    """A baseline that has no form for this pattern, layout or precision."""


@dataclass(frozen=True)
class Baseline:
    """One way: its name, what it is in a few words, how it is made ready, and what it costs."""

    name: str
    says: str
    prepare: Callable[[Pattern, str, Tensor], Product]
    elements: Callable[[Pattern], int] = lambda pattern: pattern.weight_count  # of its own weight format
    multiplications: Callable[[Pattern], int] = lambda pattern: pattern.weight_count  # for each batch entry


def by_matrix(weights: Tensor) -> Tensor:
    """(a, d, b, c): one contiguous matrix for each (i, j)."""
    return weights.permute(0, 3, 1, 2).contiguous()


def to_blocks(pattern: Pattern, layout: str, x: Tensor) -> Tensor:
    """X permuted to (a*d, batch, c), in bsl to (a*d, c, batch)."""
    a, _, c, d = pattern.shape
    if layout == "bsf":
        return x.view(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
    return x.view(a, c, d, -1).permute(0, 2, 1, 3).reshape(a * d, c, -1)


def from_blocks(pattern: Pattern, layout: str, y: Tensor) -> Tensor:
    """The way back, of (a*d, batch, b) or (a*d, b, batch)."""
    a, b, _, d = pattern.shape
    if layout == "bsf":
        return y.view(a, d, -1, b).permute(2, 0, 3, 1).reshape(-1, a * b * d)
    return y.view(a, d, b, -1).permute(0, 2, 1, 3).reshape(a * b * d, -1)


def bmm(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    a, b, c, d = pattern.shape
    matrices = by_matrix(weights).view(a * d, b, c)
    if layout == "bsf":
        transposed = matrices.transpose(1, 2)
        return lambda x: from_blocks(pattern, layout, torch.bmm(to_blocks(pattern, layout, x), transposed))
    return lambda x: from_blocks(pattern, layout, torch.bmm(matrices, to_blocks(pattern, layout, x)))


def rewriting(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Both permutations of `bmm`; what they permute back is as large as Y and holds nothing."""
    result: dict[torch.Size, Tensor] = {}

    def product(x: Tensor) -> Tensor:
        moved = to_blocks(pattern, layout, x)
        if moved.shape not in result:
            batch = moved.shape[1 if layout == "bsf" else 2]
            shape = (batch, pattern.b) if layout == "bsf" else (pattern.b, batch)
            result[moved.shape] = x.new_zeros((pattern.a * pattern.d, *shape))
        return from_blocks(pattern, layout, result[moved.shape])

    return product


def bsr(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    a, b, c, d = pattern.shape
    count = a * d
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch calls its BSR a beta at first use
        matrix = torch.sparse_bsr_tensor(
            torch.arange(count + 1, device=weights.device), torch.arange(count, device=weights.device),
            by_matrix(weights).view(count, b, c), (count * b, count * c),
        )  # fmt: skip

    def first(x: Tensor) -> Tensor:
        columns = x.view(-1, a, c, d).permute(1, 3, 2, 0).reshape(count * c, -1)
        return (matrix @ columns).unflatten(0, (a, d, b)).permute(3, 0, 2, 1).reshape(-1, a * b * d)

    def last(x: Tensor) -> Tensor:
        columns = to_blocks(pattern, layout, x).reshape(count * c, -1)
        return (matrix @ columns).unflatten(0, (a, d, b)).permute(0, 2, 1, 3).reshape(a * b * d, -1)

    return first if layout == "bsf" else last


def einsum(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    a, b, c, d = pattern.shape
    if layout == "bsf":
        return lambda x: torch.einsum("sicj,ikcj->sikj", x.view(-1, a, c, d), weights).reshape(-1, a * b * d)
    return lambda x: torch.einsum("icjs,ikcj->ikjs", x.view(a, c, d, -1), weights).reshape(a * b * d, -1)


def dense(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    matrix = dense_matrix(pattern, weights)
    if layout == "bsf":
        return lambda x: torch.nn.functional.linear(x, matrix)
    return lambda x: matrix @ x


def dense_matrix(pattern: Pattern, weights: Tensor) -> Tensor:
    a, b, c, d = pattern.shape
    matrix = weights.new_zeros(a, b, d, a, c, d)
    matrix.diagonal(dim1=0, dim2=3).diagonal(dim1=1, dim2=3).copy_(weights.permute(1, 2, 0, 3))
    return matrix.view(pattern.out_features, pattern.in_features)


def sparse(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    a, b, c, d = pattern.shape
    device = weights.device
    i, k, j, m = torch.meshgrid(*(torch.arange(size, device=device) for size in (a, b, d, c)), indexing="ij")
    del k
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch calls its CSR a beta at first use
        matrix = torch.sparse_csr_tensor(
            torch.arange(0, pattern.weight_count + 1, c, device=device), ((i * c + m) * d + j).reshape(-1),
            weights.permute(0, 1, 3, 2).reshape(-1), (pattern.out_features, pattern.in_features),
        )  # fmt: skip
    if layout == "bsf":
        return lambda x: (matrix @ x.T).T.contiguous()
    return lambda x: matrix @ x


def compiled(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    torch.compiler.reset()  # what it made for other shapes would make this one dynamic
    made: Product = torch.compile(einsum(pattern, layout, weights), dynamic=False)
    return made


def strided(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Batched products on views of X and Y: nothing is copied."""
    a, b, c, d = pattern.shape
    if layout == "bsf":
        if d > 1:
            raise UnsupportedError(f"{pattern} in bsf: no view of X has a stride of 1 for d={d}, which cuBLAS wants")
        transposed = weights[..., 0].transpose(1, 2).contiguous()

        def first(x: Tensor) -> Tensor:
            y = x.new_empty(len(x), a * b)
            torch.bmm(x.view(-1, a, c).permute(1, 0, 2), transposed, out=y.view(-1, a, b).permute(1, 0, 2))
            return y

        return first
    matrices = by_matrix(weights)

    def last(x: Tensor) -> Tensor:
        y = x.new_empty(pattern.out_features, x.shape[1])
        x4, y4 = x.view(a, c, d, -1), y.view(a, b, d, -1)
        if a <= d:
            for i in range(a):
                torch.bmm(matrices[i], x4[i].permute(1, 0, 2), out=y4[i].permute(1, 0, 2))
        else:
            for j in range(d):
                torch.bmm(matrices[:, j], x4[:, :, j], out=y4[:, :, j])
        return y

    return last


def three_passes(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """`bmm` into memory that is there already."""
    if layout == "bsl" or pattern.d == 1:
        raise UnsupportedError(f"{pattern} in {layout}: `strided` needs no passes over memory")
    a, b, c, d = pattern.shape
    matrices = by_matrix(weights).view(a * d, b, c).transpose(1, 2)
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def product(x: Tensor) -> Tensor:
        batch = len(x)
        if batch not in kept:
            kept[batch] = x.new_empty(a, d, batch, c), x.new_empty(a * d, batch, b)
        moved, result = kept[batch]
        moved.copy_(x.view(batch, a, c, d).permute(1, 3, 0, 2))
        torch.bmm(moved.view(a * d, batch, c), matrices, out=result)
        y = x.new_empty(batch, a * b * d)
        y.view(batch, a, b, d).copy_(result.view(a, d, batch, b).permute(2, 0, 3, 1))
        return y

    return product


def densified(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """`strided` for the pattern (a, b d, c d, 1), with zeros."""
    a, b, c, d = pattern.shape
    if layout == "bsl" or not 1 < d <= MOST_DENSIFIED:
        raise UnsupportedError(f"{pattern} in {layout}: zeros in between pay for d of 2 to {MOST_DENSIFIED} in bsf alone")
    wide = weights.new_zeros(a, b, d, c, d)
    wide.diagonal(dim1=2, dim2=4).copy_(weights)
    return strided(Pattern(a, b * d, c * d, 1), layout, wide.view(a, b * d, c * d, 1))


def _densified_count(pattern: Pattern) -> int:
    return pattern.d * pattern.weight_count


def _dense_count(pattern: Pattern) -> int:
    return pattern.in_features * pattern.out_features


BASELINES = {
    each.name: each
    for each in (
        Baseline("bmm", "permute, torch.bmm, permute back", bmm),
        Baseline("bsr", "the same with PyTorch's block-sparse rows", bsr),
        Baseline("einsum", "torch.einsum on the 4-D tensors", einsum),
        Baseline("dense", "one product with the whole matrix", dense, _dense_count, _dense_count),
        # A column index of 64 bits beside each value, and as much again while it is made.
        Baseline("sparse", "PyTorch's compressed sparse rows", sparse, lambda pattern: 12 * pattern.weight_count),
        Baseline("strided", "zero-copy batched products on views of X and Y", strided),
        Baseline("three_passes", "permute, torch.bmm, permute back, into memory that is there already", three_passes),
        Baseline("densified", "one zero-copy batched product with zeros in between", densified, _densified_count, _densified_count),
        Baseline("compiled", "torch.compile of the einsum", compiled),
        Baseline("rewriting", "the permutations of bmm alone, no product", rewriting, lambda pattern: 0, lambda pattern: 0),
    )
}
