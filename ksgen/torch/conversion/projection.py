"""The nearest product of Kronecker-sparse factors, by SVDs: exact for two factors, within a known bound for more.

In K = L R, every inner feature adds a column of L times a row of R: a rank-1 matrix on certain rows and columns. For
all patterns that fit in size, two inner features reach either the same entries or none in common. So K decomposes into
blocks of L's b x R's c. A block's rank is the number of inner features that reach it, and its nearest approximation is
its SVD truncated to that many terms. If the pair is chainable, all ranks are equal. R may store the inner features in
another order than the natural one: that decides which block they reach.

A longer chain is split into its last factor and the product of the others, repeatedly. If it is chainable, that product
is itself Kronecker-sparse. Columns split off are orthonormal within a block, so the squared errors of the splits add
up. No split has a larger squared error than the nearest product, so the error is at most sqrt(splits) times the least
one. If it is not chainable, the product only lies on a Kronecker-sparse support, and nothing bounds the error from
above.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial, reduce
from itertools import accumulate, islice, pairwise
from math import gcd, sqrt
from typing import TypeVar

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import pad

from ksgen.order import Order
from ksgen.pattern import Chain, Pattern, are_chainable
from ksgen.torch.operators.products import chain_to_dense, to_dense

# Squared singular values below this share of the largest are rounding noise, and below float32's resolution.
_NOISE = 1e-14
# Least length of a column in balanced factors, relative to the longest; its row shrinks accordingly. So inner features
# that the matrix does not need remain trainable, because the gradient of a row scales with its column.
_LEAST_LENGTH = 1e-3
# Float32 computes lost squares of blocks with at least as many rows and columns, if they are this share of all squares.
_LARGE, _LARGE_SHARE = 64, 0.1
_REMEMBERED = 64  # cached pairs of patterns: the layers of a model share a few
Given = TypeVar("Given")
Made = TypeVar("Made")


def project(matrix: Tensor, chain: Chain, advance: Callable[[], None]) -> tuple[list[Tensor], list[float]]:
    """Compute the weights of each factor, and the squared error of each split.

    `advance` is called after each split.
    """
    _, values, weights, errors = _without_last(matrix, chain, len(chain) - 1, advance)
    return [each.contiguous() for each in (values, *weights)], errors


def squared_errors(matrix: Tensor, chain: Chain) -> list[float]:
    """Compute the squared error of each split like `project`, but not the weights of the last split.

    A chain of one factor has one error: the squares outside its support.
    """
    if len(chain) == 1:
        return [float((matrix - to_dense(on_support(matrix, chain[0]))).double().square().sum())]
    whole, values, _, errors = _without_last(matrix, chain, len(chain) - 2, lambda: None)
    blocks, ranks, *_, outside = _blocks_of(values, whole, chain[1], chain[0])
    return [*errors, outside + _least_lost(blocks, ranks)]


def _without_last(
    matrix: Tensor, chain: Chain, count: int, advance: Callable[[], None]
) -> tuple[Pattern, Tensor, list[Tensor], list[float]]:
    """Split off the last `count` factors one by one.

    Returns the support and the values of what is left, the weights of these factors, and the squared error of each
    split.
    """
    whole, values = _dense(matrix)
    rests = list(accumulate(chain.factors, lambda rest, last: product(last, rest)))
    weights: list[Tensor] = []
    errors: list[float] = []
    for number in reversed(range(len(chain) - count, len(chain))):
        last, rest = chain[number], rests[number - 1]
        if last.is_exchanged:  # `whole` is dense, with rows as they lie in memory
            values = values[:, stored_features(last.outputs, values.device).argsort()]
        split_off, values, error = _split(values, whole, last, rest)
        weights.insert(0, split_off)
        errors.append(error)
        whole = rest
        advance()
    return whole, values, weights, errors


def on_support(matrix: Tensor, pattern: Pattern) -> Tensor:
    """Extract the entries on a pattern's support, as weights."""
    a, b, c, d = pattern.shape
    return torch.einsum("ikjilj->iklj", matrix.reshape(a, b, d, a, c, d)).contiguous()


@lru_cache(_REMEMBERED)
def product(left: Pattern, right: Pattern) -> Pattern:
    """The smallest Kronecker-sparse support that contains the support of left @ right.

    For a chainable pair, both supports are equal. If one of the pair exchanges its outputs, the result is dense.
    """
    is_exchanged = left.is_exchanged or right.is_exchanged
    a, d = (1, 1) if is_exchanged else (gcd(left.a, right.a), gcd(left.d, right.d))
    return Pattern(a, left.out_features // (a * d), right.in_features // (a * d), d)


def covering(factors: Sequence[Pattern]) -> Pattern:
    """The smallest Kronecker-sparse support of the product of several factors, the first one rightmost."""
    return reduce(lambda rest, last: product(last, rest), factors)


def least_squared_error(matrix: Tensor, chain: Chain) -> float:
    """Lower bound on the squared error of any product of the chain's factors.

    Every cut of the chain into two products gives a bound, namely the error of the nearest product of two. The result
    is the largest bound.
    """
    whole, values = _dense(matrix)
    cuts = range(1, len(chain))
    return max(_split(values, whole, covering(chain.factors[cut:]), covering(chain.factors[:cut]))[2] for cut in cuts)


def _dense(matrix: Tensor) -> tuple[Pattern, Tensor]:
    rows, columns = matrix.shape
    return Pattern(1, rows, columns, 1), matrix[None, :, :, None]


@lru_cache(_REMEMBERED)
def stored_features(order: Order, device: torch.device) -> Tensor:
    """Feature at each place in memory, counted in the natural order."""
    shape, axes = order.exchange()
    return torch.arange(order.count, device=device).reshape(shape).permute(axes).flatten()


def block_ranks(left: Pattern, right: Pattern) -> list[int]:
    """Return the distinct ranks of the blocks of left @ right, in ascending order."""
    ranks: list[int] = _reached(left, right, torch.device("cpu"))[2].unique().tolist()
    return ranks


def balanced(weights: Sequence[Tensor], chain: Chain) -> list[Tensor]:
    """Rescale factors in float64 without changing their product.

    An inner feature's column and row then have equal lengths, and all factors have equal norms.
    """
    weights = [each.double() for each in weights]
    for (right, left), pattern in zip(pairwise(weights), chain, strict=False):
        stored = stored_features(pattern.outputs, left.device)
        columns, rows = vector_norm(left, dim=1), vector_norm(right, dim=2)
        scale = _scale(columns.flatten(), rows.flatten()[stored])
        left *= scale.reshape(columns.shape).unsqueeze(1)
        right /= torch.empty_like(scale).index_copy(0, stored, scale).reshape(rows.shape).unsqueeze(2)
    norms = torch.stack([vector_norm(each) for each in weights])
    if norms.all():
        for each, scale in zip(weights, norms.log().mean().exp() / norms, strict=True):
            each *= scale
    return weights


def _scale(columns: Tensor, rows: Tensor) -> Tensor:
    """Number that multiplies each column and divides its row.

    Column and row then both have the geometric mean of their lengths. A column has at least `_LEAST_LENGTH` times the
    largest mean, and its row shrinks accordingly.
    """
    lengths = (columns * rows).sqrt()
    if not lengths.any():
        return torch.ones_like(lengths)
    lengths = lengths.clamp_min(_LEAST_LENGTH * float(lengths.max()))
    by_row = torch.where(rows > 0, rows / lengths, 1)
    return torch.where(columns > 0, lengths / columns, by_row)


def _split(values: Tensor, whole: Pattern, left: Pattern, right: Pattern) -> tuple[Tensor, Tensor, float]:
    """Split a matrix on the support `whole` into the nearest left @ right: weights of both, and the squared error.

    Columns of left are orthonormal. The matrix has a*d dense parts. Each is split separately, into parts of left and
    right.
    """
    a, _, _, d = whole.shape
    blocks, ranks, block, term, outside = _blocks_of(values, whole, left, right)
    columns, rows, squares = nearest_of_rank(blocks, int(ranks.max()))
    natural = stored_features(_part(right, a, d).outputs, values.device).argsort()
    of_left = columns.mT[:, block, term].reshape(a, d, left.a // a, left.c, left.d // d, left.b)
    of_right = rows[:, block, term][:, natural].reshape(a, d, right.a // a, right.b, right.d // d, right.c)
    left_weights = of_left.permute(0, 2, 5, 3, 4, 1).reshape(left.shape)
    right_weights = of_right.permute(0, 2, 3, 5, 4, 1).reshape(right.shape)
    return left_weights, right_weights, outside + _lost(squares, ranks)


@lru_cache(_REMEMBERED)
def _part(pattern: Pattern, a: int, d: int) -> Pattern:
    """Pattern of one of a*d equal parts of a pattern. Only a pattern that is not divided keeps its order of outputs."""
    parts = Pattern(pattern.a // a, pattern.b, pattern.c, pattern.d // d)
    return pattern if parts == pattern.natural else parts


def _least_lost(blocks: Tensor, ranks: Tensor) -> float:
    """Least squared error of blocks that are truncated to their ranks.

    Float32 takes half the time for large blocks. Its rounding errors are far below a large squared error.
    """
    if blocks.dtype == torch.float32 and min(blocks.shape[-2:]) >= _LARGE:
        squares = torch.linalg.eigvalsh(_gram(blocks)).flip(-1).clamp_min(0)
        lost = _lost(squares, ranks)
        if lost > _LARGE_SHARE * float(squares.sum()):
            return lost
    return _lost(_squares(blocks), ranks)


def _lost(squares: Tensor, ranks: Tensor) -> float:
    """Squared error of blocks with these squared singular values, each truncated to its rank."""
    is_lost = torch.arange(squares.shape[-1], device=squares.device) >= ranks[:, None]
    return float((squares * is_lost).sum())


def _blocks_of(
    values: Tensor, whole: Pattern, left: Pattern, right: Pattern
) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """Blocks that left @ right reaches in a matrix with these values on the support `whole`.

    The matrix has a*d dense parts, the first dimension of the blocks. Returns the blocks, their ranks, the block and
    the term per inner feature as in `_reached`, and the sum of squares outside the blocks.
    """
    a, _, _, d = whole.shape
    left, right = _part(left, a, d), _part(right, a, d)
    used, block, ranks, term = _reached(left, right, values.device)
    cells = values.permute(0, 3, 1, 2).reshape(a * d, left.a, left.b, left.d, right.a, right.c, right.d)
    blocks = cells.permute(0, 1, 3, 4, 6, 2, 5).reshape(a * d, -1, left.b, right.c)
    outside = 0.0
    if len(used) < blocks.shape[1]:
        is_outside = torch.ones(blocks.shape[1], dtype=torch.bool, device=values.device).index_fill(0, used, False)
        outside = float(blocks[:, is_outside].double().square().sum())
        blocks = blocks[:, used]
    return blocks, ranks, block, term, outside


@lru_cache(_REMEMBERED)
def _reached(left: Pattern, right: Pattern, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Describe how inner features reach blocks, which are pairs of left's (i, j) and right's (i, j).

    Returns the reached blocks, each inner feature's index among these, the rank of each block, and each inner feature's
    term within its block.
    """
    inner, stored = torch.arange(left.in_features, device=device), stored_features(right.outputs, device)
    row_block = inner // (left.c * left.d) * left.d + inner % left.d
    column_block = stored // (right.b * right.d) * right.d + stored % right.d
    pair = row_block * (right.a * right.d) + column_block
    used, block, ranks = torch.unique(pair, return_inverse=True, return_counts=True)
    order = torch.argsort(block, stable=True)
    first = ranks.cumsum(0) - ranks
    term = torch.empty_like(inner).scatter(0, order, inner - first[block[order]])
    return used, block, ranks, term


def nearest_of_rank(blocks: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute orthonormal columns (..., b, rank), and rows (..., rank, c), whose product is nearest to each block.

    Also returns all squared singular values. If the rank is above b or c, the last terms are zero.
    """
    *stacked, b, c = blocks.shape
    kept = min(rank, b, c)
    decompose = partial(_by_svd if blocks.dtype == torch.float64 else _by_gram_matrix, kept=kept)
    stack = blocks.reshape(-1, b, c)
    # LAPACK's threads gain nothing on small blocks, and cost much on busy machines
    workers = torch.get_num_threads() if blocks.device.type == "cpu" and min(b, c) > 2 else 1
    parts = each_in_a_thread(decompose, stack.chunk(workers), workers)
    columns, rows, squares = map(torch.cat, zip(*parts, strict=True))
    if rank > kept:
        columns, rows = pad(columns, (0, rank - kept)), pad(rows, (0, 0, 0, rank - kept))
    return columns.unflatten(0, stacked), rows.unflatten(0, stacked), squares.unflatten(0, stacked)


def _squares(blocks: Tensor) -> Tensor:
    """Squared singular values in descending order, in float64."""
    if blocks.dtype == torch.float64:
        return torch.linalg.svdvals(blocks).square()
    gram = _gram(blocks.double())
    squares = eigen(gram)[0] if gram.shape[-1] == 2 else torch.linalg.eigvalsh(gram).flip(-1)
    return squares.clamp_min(0)


def _gram(blocks: Tensor) -> Tensor:
    """The smaller Gram matrix of each block."""
    return blocks @ blocks.mT if blocks.shape[-2] <= blocks.shape[-1] else blocks.mT @ blocks


def _by_svd(blocks: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    columns, lengths, rows = torch.linalg.svd(blocks, full_matrices=False)
    return columns[..., :kept], (lengths[..., None] * rows)[..., :kept, :], lengths.square()


def _by_gram_matrix(blocks: Tensor, kept: int) -> tuple[Tensor, Tensor, Tensor]:
    """Decompose via the eigenvectors of the smaller Gram matrix in float64.

    The loss of accuracy against an SVD is below float32's resolution.
    """
    wide = blocks.double()
    has_less_rows = blocks.shape[-2] <= blocks.shape[-1]
    squares, vectors = eigen(_gram(wide))
    squares, vectors = squares.clamp_min(0), vectors[..., :kept]
    if has_less_rows:
        columns, rows = vectors, vectors.mT @ wide
    else:
        lengths = (
            squares[..., :kept].clamp_min(max(_NOISE * float(squares.max()), torch.finfo(squares.dtype).tiny)).sqrt()
        )
        columns, rows = wide @ vectors / lengths[..., None, :], lengths[..., None] * vectors.mT
    return columns.to(blocks.dtype), rows.to(blocks.dtype), squares


def eigen(symmetric: Tensor) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues in descending order, and eigenvectors.

    2 x 2 matrices are solved by a rotation, because LAPACK handles one matrix per call.
    """
    if symmetric.shape[-1] != 2:
        values, vectors = torch.linalg.eigh(symmetric)
        return values.flip(-1), vectors.flip(-1)
    first, across, last = symmetric[..., 0, 0], symmetric[..., 0, 1], symmetric[..., 1, 1]
    middle, apart = (first + last) / 2, torch.hypot((first - last) / 2, across)
    angle = torch.atan2(2 * across, first - last) / 2
    cosine, sine = angle.cos(), angle.sin()
    vectors = torch.stack([torch.stack([cosine, -sine], -1), torch.stack([sine, cosine], -1)], -2)
    return torch.stack([middle + apart, middle - apart], -1), vectors


def each_in_a_thread(function: Callable[[Given], Made], given: Sequence[Given], workers: int) -> list[Made]:
    """Results of a function for each of several arguments, in so many threads with one thread per operator."""
    if min(workers, len(given)) < 2:
        return list(map(function, given))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(function, given))
    finally:
        torch.set_num_threads(threads)


# ---- refinement by L-BFGS, for chains that SVDs do not factorize to the nearest product


_STEPS_REMEMBERED = 20  # latest steps from which L-BFGS estimates the curvature


def product_of(weights: Sequence[Tensor], chain: Chain | tuple[Chain, ...] | None = None) -> Tensor:
    """K as a dense matrix: the factors' product, the first one rightmost. `chain` has orders of features, if any.

    Of several chains it is the sum of their products; `weights` then are those of all factors.
    """
    if isinstance(chain, tuple):
        parts = iter(weights)
        return torch.stack([product_of(list(islice(parts, len(each))), each) for each in chain]).sum(0)
    if chain is not None and chain.is_exchanged:
        return chain_to_dense(chain, weights)
    return to_dense(reduce(lambda rest, last: _joined(last, rest), weights))


def _joined(left: Tensor, right: Tensor) -> Tensor:
    """Weights of left @ right: on the product's own support if the pair is chainable, else the full matrix."""
    (a, b, c, d), (right_a, right_b, right_c, right_d) = left.shape, right.shape
    if not are_chainable(Pattern(a, b, c, d), Pattern(right_a, right_b, right_c, right_d)):
        dense = torch.einsum("iklj,iljn->ikjn", left, to_dense(right).reshape(a, c, d, -1))
        return dense.flatten(0, 2)[None, :, :, None]
    wide, tall = right_a // a, d // right_d  # inner features have the index (i, w, r, t, j), w < wide and t < tall
    lefts = left.reshape(a, b, wide, -1, tall, right_d)
    rights = right.reshape(a, wide, -1, tall, right_c, right_d)
    return torch.einsum("ikwrtj,iwrtlj->iktwlj", lefts, rights).reshape(a, b * tall, wide * right_c, right_d)


def relative_error(matrix: Tensor, weights: Sequence[Tensor], chain: Chain | tuple[Chain, ...] | None = None) -> float:
    """Frobenius norm of the difference over that of the matrix, in float64; 0 if both are 0."""
    difference = product_of([each.double() for each in weights], chain) - matrix
    distance, whole = vector_norm(difference), vector_norm(matrix, dtype=torch.float64)
    return float(distance / whole) if distance else 0.0


def drawn(matrix: Tensor, chain: Chain, seed: int) -> list[Tensor]:
    """Random weights that preserve the scale of activations, normalised so that their product has the matrix's norm."""
    generator = torch.Generator().manual_seed(seed)
    uniform = [torch.rand(pattern.shape, generator=generator, dtype=matrix.dtype, device="cpu") for pattern in chain]
    weights = [((2 * each - 1) * sqrt(3 / each.shape[2])).to(matrix.device) for each in uniform]
    scale = (matrix.norm() / product_of(weights, chain).norm()) ** (1 / len(weights))
    return [each * scale for each in weights]


def refined(
    matrix: Tensor, weights: list[Tensor], steps: int, advance: Callable[[], None],
    chain: Chain | tuple[Chain, ...] | None = None,
) -> list[Tensor]:  # fmt: skip
    """Improve the weights by L-BFGS steps in the matrix's dtype.

    Returns the given weights if the steps do not reduce the error. `advance` is called after each step. `chain` has
    orders of features, if any, or is a sum of chains.
    """
    if not steps or not matrix.square().any():
        return weights

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = (matrix - product_of(moving, chain)).square().sum() / energy
        value.backward()
        return value

    with torch.inference_mode(False), torch.enable_grad():  # in inference mode, no gradients would be recorded
        energy = matrix.square().sum()
        moving = [each.detach().to(matrix.dtype, copy=True).requires_grad_() for each in weights]
        optimizer = torch.optim.LBFGS(
            moving, max_iter=1, history_size=_STEPS_REMEMBERED, line_search_fn="strong_wolfe", tolerance_grad=0,
            tolerance_change=0,
        )  # fmt: skip
        for _ in range(steps):
            optimizer.step(loss)
            advance()
    found = [each.detach() for each in moving]
    return found if relative_error(matrix, found, chain) < relative_error(matrix, weights, chain) else weights
