"""Products and weight gradients by PyTorch's batched products, as an expert writes them: on views where possible.

K has a*d blocks, each a matrix of b x c: `by_matrix` returns them as (a, d, b, c). A batched product reads and writes
blocks of X and Y in place if they are views. Blocks are views in batch-size-last, and in batch-size-first with d = 1.
In batch-size-first with d > 1 the elements of a block are not contiguous, so X and Y are permuted. `multiply` and
`weight_gradient` write into preallocated memory and are not differentiable; `permuted_multiply` and
`permuted_weight_gradient` are.

oneDNN computes PyTorch's products of 16-bit operands on processors. It has none for processors with AVX2 alone. There,
loops of PyTorch's own take up to 170 times as long as products of float32. So operands are cast to float32 on such
processors, and results are cast back (`in_float32`).
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVarTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ksgen.pattern import Chain, Pattern
from ksgen.spec.kernel import pattern_as_list

# least elements of X per product on views; with fewer, one product of permuted copies costs less than several calls
LEAST_ELEMENTS = 2**14
DENSE_ELEMENTS = 2**22  # most elements of K, zeros included, for which its dense matrix competes
Rest = TypeVarTuple("Rest")


def _types_without_products() -> tuple[torch.dtype, ...]:
    """16-bit types of which oneDNN has no products on this processor."""
    operators: Any = torch.ops.mkldnn
    try:
        has_bfloat16, has_float16 = operators._is_mkldnn_bf16_supported(), operators._is_mkldnn_fp16_supported()
    except (AttributeError, RuntimeError):  # PyTorch without oneDNN, or an earlier one
        return ()
    products = {torch.bfloat16: has_bfloat16, torch.float16: has_float16}
    return tuple(dtype for dtype, has_products in products.items() if not has_products)


_WITHOUT_PRODUCTS = _types_without_products()


def is_cast(x: Tensor) -> bool:
    """Whether a processor multiplies x in float32, because it has no products of its 16-bit type."""
    return x.dtype in _WITHOUT_PRODUCTS and x.device.type == "cpu"


def in_float32(
    product: Callable[[Tensor, Tensor, *Rest], Tensor],
) -> Callable[[Tensor, Tensor, *Rest], Tensor]:
    """Let a function of two operands compute in float32 if the processor has no products of their type.

    Sparse matrices, some of which are wrappers, are never cast.
    """

    @wraps(product)
    def computed(x: Tensor, other: Tensor, *rest: *Rest) -> Tensor:
        if is_cast(x) and other.layout == torch.strided and not is_traceable_wrapper_subclass(other):
            with _without_autocast("cpu"):
                return product(x.float(), other.float(), *rest).to(x.dtype)
        return product(x, other, *rest)

    return computed


def _without_autocast(kind: str) -> Any:
    """Context in which autocast does not apply to a type of devices."""
    is_enabled = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if is_enabled else nullcontext()


def may_be_dense(x: Tensor, pattern: Pattern) -> bool:
    """Whether the product of x with the dense K competes.

    Matrix tiles of processors may multiply 16-bit operands by zeros faster than kernels skip them.
    """
    return x.device.type == "cpu" and x.element_size() == 2 and not is_cast(x) and is_small(pattern)


def is_small(pattern: Pattern) -> bool:
    """Whether the dense K has few enough elements to compete."""
    return pattern.out_features * pattern.in_features <= DENSE_ELEMENTS


def by_matrix(weights: Tensor) -> Tensor:
    """Permute weights (a, b, c, d) to (a, d, b, c)."""
    return weights.permute(0, 3, 1, 2).contiguous()


def blocks_of(weights: Tensor) -> Tensor:
    """Reshape weights (a, b, c, d) to (a*d, b, c), without a copy if possible."""
    return weights.squeeze(3) if weights.shape[3] == 1 else weights.permute(0, 3, 1, 2).flatten(0, 1)


def to_dense(weights: Tensor) -> Tensor:
    """K as a dense matrix (out_features, in_features)."""
    a, b, c, d = weights.shape
    along_j = torch.diag_embed(weights)  # (a, b, c, d, d)
    whole = torch.diag_embed(along_j.permute(1, 2, 3, 4, 0))  # (b, c, d, d, a, a)
    return whole.permute(4, 0, 2, 5, 1, 3).reshape(a * b * d, a * c * d)


def chain_to_dense(chain: Chain, weights: Sequence[Tensor]) -> Tensor:
    """K of a chain, whose factors are in the order in which they multiply x. Autocast does not apply."""
    first, *others = weights
    columns = exchanged(to_dense(first).t(), exchange_of(chain[0]), "bsf")
    columns = multiply_rows(columns, chain.factors[1:], others)
    inputs = chain[0].inputs
    return _copied(columns, inputs.exchange() if inputs.is_exchanged else None, "bsl").t()


def multiply_rows(x: Tensor, factors: Sequence[Pattern], weights: Sequence[Tensor]) -> Tensor:
    """Multiply the rows of x by each factor in turn. Autocast does not apply."""
    with _without_autocast(x.device.type):
        for pattern, each in zip(factors, weights, strict=True):
            exchange = exchange_of(pattern)
            y = permuted_multiply(natural(x, exchange, "bsf"), blocks_of(each), "bsf", pattern.a, pattern.d)
            x = exchanged(y, exchange, "bsf")
    return x


Copy = tuple[tuple[int, ...], tuple[int, ...]] | None  # shape of features, and the order of its axes in the copy


class Exchange(NamedTuple):
    """Orders of a factor's features in memory, as `Pattern` takes them, and the copies that PyTorch makes."""

    text: tuple[str, ...]
    outputs: Copy  # from the natural order; None if they stay in it
    inputs: Copy  # to the natural order


def exchange_of(pattern: Pattern) -> Exchange | None:
    """Exchange of a factor's features; None if inputs and outputs are in the natural order."""
    if not pattern.is_exchanged:
        return None
    outputs = pattern.outputs.exchange() if pattern.outputs.is_exchanged else None
    inputs = pattern.inputs.to_natural() if pattern.inputs.is_exchanged else None
    return Exchange(tuple(pattern_as_list(pattern)[4:]), outputs, inputs)


def exchanged(y: Tensor, exchange: Exchange | None, layout: str) -> Tensor:
    """Copy outputs into the order in which the pattern stores them. Plain PyTorch, differentiable."""
    return y if exchange is None else _copied(y, exchange.outputs, layout)


def natural(x: Tensor, exchange: Exchange | None, layout: str) -> Tensor:
    """Copy inputs into the order (i, l, j). Plain PyTorch, differentiable."""
    return x if exchange is None else _copied(x, exchange.inputs, layout)


def _copied(array: Tensor, copy: Copy, layout: str) -> Tensor:
    if copy is None:
        return array
    shape, axes = copy
    if layout == "bsf":
        return array.unflatten(1, shape).permute(0, *[axis + 1 for axis in axes]).flatten(1)
    return array.unflatten(0, shape).permute(*axes, len(shape)).flatten(0, -2)


def order_of(copy: Copy, layout: str, batch: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape of a matrix, and the order of its axes in a copy of its features; both are empty without a copy."""
    if copy is None:
        return (), ()
    shape, axes = copy
    if layout == "bsf":
        return (batch, *shape), (0, *[axis + 1 for axis in axes])
    return (*shape, batch), (*axes, len(shape))


@in_float32
def by_whole_matrix(x: Tensor, matrix: Tensor, layout: str) -> Tensor:
    """Compute Y = X K^T with the full matrix K, dense or sparse."""
    return functional.linear(x, matrix) if layout == "bsf" else matrix @ x


@in_float32
def multiply(x: Tensor, matrices: Tensor, layout: str) -> Tensor:
    """Compute Y = X K^T. The last two axes of `matrices` may be transposed."""
    a, d, b, _ = matrices.shape
    if not _has_views(x, layout, a, d):
        return permuted_multiply(x, matrices.flatten(0, 1), layout, a, d)
    y = x.new_empty((len(x), a * b * d) if layout == "bsf" else (a * b * d, x.shape[1]))
    stacks = zip(_matrix_stacks(matrices), _stacks(x, layout, a, d), _stacks(y, layout, a, d), strict=True)
    for factors, inputs, outputs in stacks:
        torch.bmm(factors, inputs, out=outputs)
    return y


@in_float32
def weight_gradient(x: Tensor, y_gradient: Tensor, layout: str, a: int, d: int) -> Tensor:
    """Gradient of the weights, (a, b, c, d), summed over the batch."""
    if not _has_views(x, layout, a, d):
        return permuted_weight_gradient(x, y_gradient, layout, a, d)
    features = 1 if layout == "bsf" else 0
    matrices = x.new_empty(a, d, y_gradient.shape[features] // (a * d), x.shape[features] // (a * d))
    stacks = zip(_matrix_stacks(matrices), _stacks(x, layout, a, d), _stacks(y_gradient, layout, a, d), strict=True)
    for factors, inputs, outputs in stacks:
        torch.bmm(outputs, inputs.mH, out=factors)
    return matrices.permute(0, 2, 3, 1).contiguous()


@in_float32
def permuted_multiply(x: Tensor, blocks: Tensor, layout: str, a: int, d: int) -> Tensor:
    """Compute Y = X K^T by permuting X, one batched product with (a*d, b, c), and permuting back.

    Plain PyTorch, differentiable. With a dense factor or d = 1, fewer operators are called; each takes microseconds.
    """
    _, b, c = blocks.shape
    if a == d == 1:
        return by_whole_matrix(x, blocks.squeeze(0), layout)
    # products of columns are slower, but have a contiguous gradient of the blocks
    if layout == "bsf" and d == 1 and blocks.requires_grad and _is_row(x):
        return torch.bmm(blocks, x.reshape(a, c, 1)).reshape(1, a * b)
    if layout == "bsf" and d == 1:
        y = torch.bmm(x.reshape(-1, a, c).transpose(0, 1), blocks.transpose(1, 2))
        return y.transpose(0, 1).reshape(-1, a * b).contiguous()
    if layout == "bsf":  # as (a*d, batch, features of a block), whose product is nearest to the memory layout of Y
        rows = x.reshape(-1, a, c, d).permute(1, 3, 0, 2).reshape(a * d, -1, c)
        y = torch.bmm(rows, blocks.transpose(1, 2)).view(a, d, -1, b).permute(2, 0, 3, 1)
        return y.reshape(-1, a * b * d).contiguous()
    return permuted_back(torch.bmm(blocks, permuted(x, layout, a, d)), layout, a, d)


def _is_row(x: Tensor) -> bool:
    """Whether x has a single row; False if that is symbolic, so that no compiled program or trace depends on it."""
    return not torch.compiler.is_compiling() and type(rows := x.shape[0]) is int and rows == 1


@in_float32
def permuted_weight_gradient(x: Tensor, y_gradient: Tensor, layout: str, a: int, d: int) -> Tensor:
    """Gradient of the weights by permuting both operands and one batched product, differentiably."""
    blocks = torch.bmm(permuted(y_gradient, layout, a, d), permuted(x, layout, a, d).mH)
    return blocks.unflatten(0, (a, d)).permute(0, 2, 3, 1).contiguous()


def permuted(x: Tensor, layout: str, a: int, d: int) -> Tensor:
    """Permute X to (a*d, features of a block, batch): a view if possible, else a copy."""
    if layout == "bsf":
        return x.unflatten(1, (a, -1, d)).permute(1, 3, 0, 2).flatten(0, 1).transpose(1, 2)
    return x.unflatten(0, (a, -1, d)).transpose(1, 2).flatten(0, 1)


def permuted_back(blocks: Tensor, layout: str, a: int, d: int) -> Tensor:
    """Convert (a*d, features of a block, batch) to a matrix in the layout."""
    split = blocks.unflatten(0, (a, d))
    if layout == "bsf":
        return split.permute(3, 0, 2, 1).flatten(1).contiguous()
    return split.transpose(1, 2).flatten(0, 2).contiguous()


def _has_views(x: Tensor, layout: str, a: int, d: int) -> bool:
    """Whether to multiply on views of the blocks, because that is possible and faster than on permuted copies.

    On processors, products of 16-bit views are far slower than those of copies.
    """
    if not x.is_cuda and x.element_size() < 4:
        return False
    if layout == "bsf":
        return d == 1
    calls = min(a, d)
    return calls == 1 or x.numel() >= calls * LEAST_ELEMENTS


def _stacks(x: Tensor, layout: str, a: int, d: int) -> list[Tensor]:
    """Views of the blocks of X: min(a, d) stacks of (blocks, features of a block, batch)."""
    if layout == "bsf":  # d = 1
        return [x.unflatten(1, (a, -1)).permute(1, 2, 0)]
    split = x.unflatten(0, (a, -1, d))
    return [rows.transpose(0, 1) for rows in split] if a <= d else list(split.unbind(2))


def _matrix_stacks(matrices: Tensor) -> list[Tensor]:
    """Stacks of matrices that correspond to `_stacks`."""
    return list(matrices if matrices.shape[0] <= matrices.shape[1] else matrices.unbind(1))


# ---- bias, activation and residual as PyTorch operations, if they are not inside a kernel


_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    apply: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]  # takes the gradient and the input; is differentiable, too


ACTIVATIONS = {
    "none": Activation(lambda values: values, lambda gradient, _: gradient),
    "relu": Activation(functional.relu, lambda gradient, values: _aten.threshold_backward(gradient, values, 0)),
    "gelu": Activation(functional.gelu, _aten.gelu_backward),
    "gelu_tanh": Activation(
        lambda values: functional.gelu(values, approximate="tanh"),
        lambda gradient, values: _aten.gelu_backward(gradient, values, approximate="tanh"),
    ),
    "silu": Activation(functional.silu, _aten.silu_backward),
}


def finish(
    y: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, layout: str, residual_first: bool = False
) -> Tensor:
    """Compute activation(y + bias) + residual; or activation(y + bias + residual), if the residual is first."""
    if bias is not None:
        y = y + (bias if layout == "bsf" else bias[:, None])
    if residual is not None and residual_first:
        return ACTIVATIONS[activation].apply(y + residual)
    y = ACTIVATIONS[activation].apply(y)
    return y if residual is None else y + residual
