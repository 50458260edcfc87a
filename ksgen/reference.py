"""Reference results that every kernel is checked against: products in float64 or complex128 with NumPy. Not fast.

Weights have shape (a, b, c, d). Arrays may have any real or complex dtype, `ml_dtypes.bfloat16` included.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ksgen.errors import LaunchError, PatternError
from ksgen.order import Order
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Activation, Layout, Storage
from ksgen.spec.kernel import is_word
from ksgen.values import excerpt

__all__ = ["dequantized", "from_dense", "gradient", "multiply", "to_dense", "values_of"]

Float64 = NDArray[Any]  # complex128 for complex numbers
Size = TypeVar("Size", int, int | None)

ELEMENTS_AT_ONCE = 2**22  # elements of X and Y: 32 MiB of float64


def to_dense(pattern: Pattern, weights: ArrayLike) -> Float64:
    """Compute K as a dense matrix.

    Args:
        pattern: Pattern of K.
        weights: Values on the support, (a, b, c, d).

    Returns:
        K, (out_features, in_features), in float64 or complex128.

    Raises:
        LaunchError: The weights have another shape.

    Examples:
        >>> import numpy as np
        >>> from ksgen import Pattern, reference
        >>> reference.to_dense(Pattern(1, 2, 1, 2), np.array([1, 2, 3, 4]).reshape(1, 2, 1, 2))
        array([[1., 0.],
               [0., 2.],
               [3., 0.],
               [0., 4.]])
    """
    free = _checked("weights", weights, pattern.shape)
    dense = np.zeros((pattern.out_features, pattern.in_features), wide_type(free))
    _free_entries(pattern, dense)[...] = free
    return exchanged(pattern.outputs, exchanged(pattern.inputs, dense).T).T


def from_dense(pattern: Pattern, dense: ArrayLike) -> Float64:
    """Extract the weights of a matrix that is 0 off the pattern's support.

    Args:
        pattern: Pattern of K.
        dense: K, (out_features, in_features).

    Returns:
        Weights (a, b, c, d) in float64 or complex128.

    Raises:
        LaunchError: K has another shape.
        PatternError: An entry off the support is not 0; the message shows it.

    Examples:
        >>> import numpy as np
        >>> from ksgen import Pattern, reference
        >>> pattern, weights = Pattern(1, 2, 1, 2), np.array([1, 2, 3, 4]).reshape(1, 2, 1, 2)
        >>> reference.from_dense(pattern, reference.to_dense(pattern, weights)).ravel()
        array([1., 2., 3., 4.])
    """
    given = _checked("K", dense, (pattern.out_features, pattern.in_features))
    rows = natural(pattern.outputs, natural(pattern.inputs, given).T).T
    rest = np.array(rows, dtype=wide_type(given), order="C")
    free = _free_entries(pattern, rest)
    weights = free.copy(order="C")
    free[...] = 0
    if rest.any():
        rest = exchanged(pattern.outputs, exchanged(pattern.inputs, rest).T).T
        row, column = np.argwhere(rest)[0]
        raise PatternError(f"K[{row}, {column}]={rest[row, column]} is off the support of {pattern}; accepted: 0")
    return weights


def multiply(
    pattern: Pattern,
    x: ArrayLike,
    weights: ArrayLike,
    layout: Layout,
    *,
    bias: ArrayLike | None = None,
    activation: Activation = "none",
    residual: ArrayLike | None = None,
    residual_first: bool = False,
) -> Float64:
    """Compute activation(X K^T + bias) + residual in float64 or complex128: one matrix product per block.

    Args:
        pattern: Pattern of K.
        x: Input, (batch, a*c*d) in layout "bsf", or (a*c*d, batch) in "bsl".
        weights: Values on the support, (a, b, c, d).
        layout: Layout of x and y: "bsf" or "bsl".
        bias: Array (a*b*d,), or None.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu". Complex numbers accept "none" only.
        residual: Array like y, or None.
        residual_first: Whether the activation follows the residual: activation(X K^T + bias + residual).

    Returns:
        y in the layout of x.

    Raises:
        LaunchError: A shape does not fit, or an option is unknown.

    Examples:
        >>> import numpy as np
        >>> from ksgen import Pattern, reference
        >>> reference.multiply(Pattern(1, 3, 2, 2), np.ones((1, 4)), np.ones((1, 3, 2, 2)), "bsf", bias=np.arange(6))
        array([[2., 3., 4., 5., 6., 7.]])
    """
    if not is_word(layout, LAYOUTS):
        raise LaunchError(f"layout={excerpt(layout)}; accepted: {', '.join(LAYOUTS)}")
    if not is_word(activation, _ACTIVATIONS):
        raise LaunchError(f"activation={excerpt(activation)}; accepted: {', '.join(_ACTIVATIONS)}")
    free = _checked("weights", weights, pattern.shape)
    if wide_type(free) == np.complex128 and activation != "none":
        raise LaunchError(f"activation={activation} of complex numbers; accepted: none")
    blocks = _wide(free.transpose(0, 3, 2, 1))
    rows_in = _batch_first(_checked("x", x, _in_layout(layout, None, pattern.in_features)), layout)
    batch = len(rows_in)
    y = np.empty(_in_layout(layout, batch, pattern.out_features), np.result_type(wide_type(rows_in), blocks))
    rows_out = _batch_first(y, layout)
    added = None if bias is None else _checked("bias", bias, (pattern.out_features,))
    rows_residual = None if residual is None else _batch_first(_checked("residual", residual, y.shape), layout)
    at_once = max(1, ELEMENTS_AT_ONCE // (pattern.in_features + pattern.out_features))
    with np.errstate(over="ignore", invalid="ignore"):  # infinities and NaN follow the rules of float64, silently
        for start in range(0, batch, at_once):
            part = slice(start, start + at_once)
            inputs = natural(pattern.inputs, rows_in[part])
            rows = exchanged(pattern.outputs, _multiply_rows(pattern, inputs, blocks))
            if added is not None:
                rows += _wide(added)
            if rows_residual is not None and residual_first:
                rows += _wide(rows_residual[part])
            rows = _ACTIVATIONS[activation](rows)
            if rows_residual is not None and not residual_first:
                rows += _wide(rows_residual[part])
            rows_out[part] = rows
    return y


def dequantized(values: ArrayLike, scale: ArrayLike) -> Float64:
    """Compute the weights that values in eight bits and their scales represent.

    Args:
        values: Stored values.
        scale: Scales, which broadcast to the values.

    Returns:
        float64 array of the values' shape.

    Examples:
        >>> from ksgen import reference
        >>> reference.dequantized([2, -4], 0.5)
        array([ 1., -2.])
    """
    return np.asarray(values).astype(np.float64) * np.asarray(scale).astype(np.float64)


def values_of(storage: Storage) -> Float64:
    """Compute the number that each of the 256 bit patterns represents, by the format's definition.

    Args:
        storage: Record of `ksgen.spec.STORAGES`.

    Returns:
        float64 array of 256 numbers; NaN marks bit patterns of infinities and NaN.

    Examples:
        >>> from ksgen import reference
        >>> from ksgen.spec import STORAGES
        >>> reference.values_of(STORAGES["int8"])[[1, 127, 255]]
        array([  1., 127.,  -1.])
    """
    bits = np.arange(256)
    if storage.mantissa is None:
        return np.where(bits < 128, bits, bits - 256).astype(np.float64)
    steps = 2**storage.mantissa
    exponents, fractions = bits % 128 // steps, bits % steps
    powers = 2.0 ** (np.maximum(exponents, 1) - 1 + storage.least_exponent)
    sizes = (np.minimum(exponents, 1) + fractions / steps) * powers  # without a leading one where the exponent is 0
    return np.where(sizes > storage.largest, np.nan, sizes) * np.where(bits < 128, 1, -1)


def gradient(pattern: Pattern, x: ArrayLike, grad_y: ArrayLike, layout: Layout) -> Float64:
    """Compute the gradient of the weights from x and the gradient of y: dY^T conj(X) per block.

    Args:
        pattern: Pattern of K.
        x: Input, (batch, a*c*d) in layout "bsf", or (a*c*d, batch) in "bsl".
        grad_y: Gradient of y, (batch, a*b*d) or (a*b*d, batch).
        layout: Layout of x and grad_y: "bsf" or "bsl".

    Returns:
        The gradient (a, b, c, d) in float64 or complex128.

    Raises:
        LaunchError: A shape does not fit, or the layout is unknown.

    Examples:
        >>> import numpy as np
        >>> from ksgen import Pattern, reference
        >>> reference.gradient(Pattern(1, 1, 2, 1), np.array([[1, 2], [3, 4]]), np.array([[1], [1]]), "bsf").ravel()
        array([4., 6.])
    """
    if not is_word(layout, LAYOUTS):
        raise LaunchError(f"layout={excerpt(layout)}; accepted: {', '.join(LAYOUTS)}")
    a, b, c, d = pattern.shape
    rows_x = _batch_first(_checked("x", x, _in_layout(layout, None, pattern.in_features)), layout)
    batch = len(rows_x)
    rows_y = _batch_first(_checked("grad_y", grad_y, _in_layout(layout, batch, pattern.out_features)), layout)
    total = np.zeros((a, d, b, c), np.result_type(wide_type(rows_x), wide_type(rows_y)))
    at_once = max(1, ELEMENTS_AT_ONCE // (pattern.in_features + pattern.out_features))
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, batch, at_once):
            part = slice(start, start + at_once)
            inputs = _wide(natural(pattern.inputs, rows_x[part]).reshape(-1, a, c, d).transpose(1, 3, 0, 2)).conj()
            outputs = _wide(natural(pattern.outputs, rows_y[part]).reshape(-1, a, b, d).transpose(1, 3, 2, 0))
            total += np.matmul(outputs, inputs)
    return np.ascontiguousarray(total.transpose(0, 2, 3, 1))


def exchanged(order: Order, rows: NDArray[Any]) -> NDArray[Any]:
    """Bring features from the natural order into the order in which they lie in memory; a copy if these differ."""
    return _copied(rows, *order.exchange()) if order.is_exchanged else rows


def natural(order: Order, rows: NDArray[Any]) -> NDArray[Any]:
    """Bring features from memory into the natural order: the inverse of `exchanged`."""
    return _copied(rows, *order.to_natural()) if order.is_exchanged else rows


def _copied(rows: NDArray[Any], shape: Sequence[int], axes: Sequence[int]) -> NDArray[Any]:
    """Copy the features of each row into another order.

    They have this `shape`, whose axes are permuted to the order `axes`.
    """
    return rows.reshape(-1, *shape).transpose(0, *(axis + 1 for axis in axes)).reshape(len(rows), -1)


def wide_type(array: NDArray[Any]) -> Any:
    """Dtype of reference results: complex128 for complex numbers, float64 for others."""
    return np.complex128 if array.dtype.kind == "c" else np.float64


def _wide(array: NDArray[Any]) -> Float64:
    return np.ascontiguousarray(array, wide_type(array))


def _multiply_rows(pattern: Pattern, rows: NDArray[Any], blocks: Float64) -> Float64:
    """X K^T for a few rows of X, given the weights as a stack (a, d) of matrices c x b."""
    a, _, c, d = pattern.shape
    stack = _wide(rows.reshape(-1, a, c, d).transpose(1, 3, 0, 2))
    products: Float64 = np.matmul(stack, blocks)
    return products.transpose(2, 0, 3, 1).reshape(-1, pattern.out_features)


def _free_entries(pattern: Pattern, dense: Float64) -> Float64:
    """A view of shape (a, b, c, d) on the support of a contiguous K."""
    a, b, c, d = pattern.shape
    view: Float64 = np.einsum("ikjilj->iklj", dense.reshape(a, b, d, a, c, d))
    return view


def _in_layout(layout: Layout, batch: Size, features: Size) -> tuple[Size, Size]:
    return (batch, features) if layout == "bsf" else (features, batch)


def _batch_first(array: NDArray[Any], layout: Layout) -> NDArray[Any]:
    return array if layout == "bsf" else array.T


def _checked(name: str, values: ArrayLike, shape: Sequence[int | None]) -> NDArray[Any]:
    """`values` as an array; `LaunchError` if its shape differs. A size of None accepts any size."""
    array = np.asarray(values)
    if array.ndim != len(shape) or any(want not in (None, have) for want, have in zip(shape, array.shape, strict=True)):
        wanted = str(tuple(shape)).replace("None", "batch")
        raise LaunchError(f"{name} has shape {array.shape}; accepted: {wanted}")
    return array


def _gelu(values: Float64) -> Float64:
    """x (1 + erf(x / sqrt 2)) / 2, computed by erfc: the sum would cancel for x far below zero."""
    complement: Float64 = np.vectorize(math.erfc, otypes=[np.float64])(values * -math.sqrt(0.5))
    return 0.5 * values * complement


def _gelu_tanh(values: Float64) -> Float64:
    """x (1 + tanh u) / 2, which is x sigmoid(2 u)."""
    return _silu(values, 2 * math.sqrt(2 / math.pi) * (values + 0.044715 * values**3))


def _silu(values: Float64, gate: Float64 | None = None) -> Float64:
    result: Float64 = values / (1 + np.exp(-(values if gate is None else gate)))
    return result


_ACTIVATIONS: dict[str, Callable[[Float64], Float64]] = {
    "none": lambda values: values,
    "relu": lambda values: np.maximum(values, 0),
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
}
