"""ksgen in JAX: `product` makes a function that `jax.jit`, `jax.grad` and `jax.vmap` transform.

XLA calls launchers through JAX's foreign-function interface. They read and write its buffers on its stream, and copy
nothing. The same launchers compute gradients: that of x by transposed factors, and those of the weights.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ksgen.devices import device_for
from ksgen.errors import LaunchError
from ksgen.install import install_line
from ksgen.launch.arrays import ArrayView, CallOptions, dtype_of
from ksgen.launch.checks import y_shape
from ksgen.launch.explain import LaunchOptions
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.pattern import Chain, Pattern, Patterns
from ksgen.spec import Activation, Epilogue, Fuse, Layout, PrecisionName
from ksgen.spec.precision import gradient_of
from ksgen.values import excerpt, misfit

try:
    import jax
    import jax.numpy as jnp
    from jax.experimental.buffer_callback import buffer_callback
except ImportError as error:
    raise ModuleNotFoundError(f"ksgen.jax needs JAX 0.6 or later: {install_line('jax')}", name=error.name) from error

HOST_MEMORY = 1  # DLPack's device type
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "none": lambda x: x,
    "relu": jax.nn.relu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "silu": jax.nn.silu,
}
REMEMBERED = 1024  # entries of each cache: of launchers, and of functions that call them
NOWHERE = 16  # an aligned address for arrays of a trace, which have no memory yet


class LayerCall(NamedTuple):
    """Chain of a product and its options; equal layers share traces."""

    patterns: tuple[str, ...]
    layout: Layout
    between: Activation
    activation: Activation
    residual_first: bool
    precision: PrecisionName | None
    fuse: Fuse


__all__ = ["product"]


def product(
    chain: Patterns,
    *,
    layout: Layout = "bsf",
    between: Activation = "none",
    activation: Activation = "none",
    residual_first: bool = False,
    precision: PrecisionName | None = None,
    fuse: Fuse = "auto",
) -> Callable[..., jax.Array]:
    """Make a function that multiplies by a chain of Kronecker-sparse factors in JAX.

    The function is `multiply(x, weights, bias=None, residual=None)`. Its arguments are those of a launcher's call. In
    layout "bsf", x may have more than two dimensions, the features last. All transformations of JAX but forward-mode
    differentiation apply. Host arrays are multiplied on the same device as NumPy's arrays (`KSGEN_DEVICE`).

    Args:
        chain: Pattern, `Chain`, or list of patterns, in the order in which the factors multiply x.
        layout: Layout of x and y: "bsf" or "bsl".
        between: Activation between the factors: "none", "relu", "gelu", "gelu_tanh" or "silu".
        activation: Activation after the last factor and the bias.
        residual_first: Whether the residual is added before the activation. By default, it is added afterwards.
        precision: Arithmetic of the products. None: that of the arrays.
        fuse: Launches: "auto" runs one launch if that is faster, "no" one per factor. "yes" always runs one launch.

    Returns:
        The function. It raises `LaunchError` while it is traced if arguments do not fit, or if `fuse="yes"` asks for a
        launch that is not available.

    Raises:
        PatternError: The factors do not fit each other.
        SpecError: An option is unknown, or two options exclude each other.
        LaunchError: `between` or `fuse` is unknown, or an activation has no function in JAX.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from ksgen.jax import product
        >>> multiply = jax.jit(product(["1,2,2,2", "2,2,2,1"], between="relu"))
        >>> x, weights = jnp.array([[1., -2., 3., -4.]]), [jnp.ones((1, 2, 2, 2)), jnp.ones((2, 2, 2, 1))]
        >>> multiply(x, weights)
        Array([[4., 4., 4., 4.]], dtype=float32)
        >>> jax.grad(lambda weights: multiply(x, weights).sum())(weights)[1][0, 0, :, 0]
        Array([4., 0.], dtype=float32)
    """
    patterns = tuple(map(str, Chain.read(chain)))
    layer = LayerCall(patterns, layout, between, activation, residual_first, precision, fuse)
    launcher = _launcher(layer)
    for name, given in (("between", between), ("activation", activation)):
        if given not in ACTIVATIONS:  # gradients and separate launches would need it
            raise LaunchError(f"ksgen.jax: {name}={given!r} has no function here; accepted: {', '.join(ACTIVATIONS)}")

    def multiply(x: jax.Array, weights: Any, bias: Any = None, residual: Any = None) -> jax.Array:
        given = weights if isinstance(weights, list | tuple) else (weights,)
        if len(given) != len(launcher.factors):
            raise LaunchError(f"{launcher!r}: weights={excerpt(weights)}; accepted: a list of arrays, one per factor")
        names = "x", *launcher.names.weights, "bias", "residual"
        arrays = {
            name: _array(launcher, name, each) for name, each in zip(names, (x, *given, bias, residual), strict=True)
        }
        x, *each, bias, residual = arrays.values()
        _check(launcher, layout, arrays)
        features = launcher.chain.out_features
        shape = (*x.shape[:-1], features) if layout == "bsf" else (features, x.shape[1])
        if residual is not None and (wrong := misfit("residual", residual.shape, shape)):
            raise LaunchError(f"{launcher!r}: {wrong}")
        if 0 in shape:  # no rows
            return jnp.zeros(shape, x.dtype)
        if layout == "bsf" and x.ndim > 2:
            x, residual = (None if rows is None else rows.reshape(-1, rows.shape[-1]) for rows in (x, residual))
        return _product(layer, x, tuple(each), bias, residual).reshape(shape)

    return multiply


@lru_cache(REMEMBERED)
def _launcher(layer: LayerCall) -> ChainLauncher:
    options = layer._asdict()
    return ChainLauncher(*options.pop("patterns"), **options)


def _array(launcher: ChainLauncher, name: str, value: Any) -> jax.Array | None:
    try:
        return None if value is None and name in ("bias", "residual") else jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise LaunchError(f"{launcher!r}: {name}={excerpt(value)}; accepted: an array") from error


def _check(launcher: ChainLauncher, layout: Layout, arrays: dict[str, Any]) -> None:
    """Raise `LaunchError` on shapes and dtypes that a launcher would refuse, while the function is traced."""

    def shape_of(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of a matrix with at least one row of the batch."""
        if name not in ("x", "residual") or len(shape) < 2:
            return shape
        if layout == "bsf":
            return max(1, prod(shape[:-1])), shape[-1]
        return (shape[0], max(1, shape[1])) if len(shape) == 2 else shape

    views = {
        name: ArrayView(
            "jax", NOWHERE, shape_of(name, each.shape), dtype_of(each.dtype, name), None, "host", None, None, True
        )
        for name, each in arrays.items()
        if each is not None
    }
    stated = launcher.stated
    options = CallOptions(stated.layout, stated.activation, stated.precision, residual_first=stated.residual_first)
    launcher._checks.find(launcher, options, views, ())


# ---- the product of all factors


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(layer: LayerCall, x: Any, weights: tuple[Any, ...], bias: Any, residual: Any) -> Any:
    launcher = _launcher(layer)
    if len(weights) > 1 and not _is_one_launch(launcher, layer, x, bias, residual):
        return _composed(layer, x, weights, bias, residual)
    added = {name: each for name, each in (("bias", bias), ("residual", residual)) if each is not None}
    return _called(_launch_of_layer(layer), _y_shape(launcher.chain, layer.layout, x), x.dtype)(x, weights, added)


@lru_cache(REMEMBERED)
def _launch_of_layer(layer: LayerCall) -> Callable[..., None]:
    launcher = _launcher(layer)
    return _launching(lambda x, weights, added, **options: launcher(x, weights, **added, **options))


def _forward(function: Callable[..., Any], constants: int, *given: Any) -> tuple[Any, Any]:
    """Result of a differentiable function, and its arguments without the constants, which come first."""
    return function(*given), given[constants:]


def _product_backward(layer: LayerCall, given: Any, grad_y: Any) -> Any:
    """Compute all gradients factor by factor; intermediates are computed again."""
    return jax.vjp(partial(_composed, layer), *given)[1](grad_y)


_product.defvjp(partial(_forward, _product, 1), _product_backward)


def _composed(layer: LayerCall, x: Any, weights: Sequence[Any], bias: Any, residual: Any) -> Any:
    """Compute the product factor by factor; JAX adds the bias and the residual, and applies activations."""
    patterns = map(Pattern.read, layer.patterns)
    for number, (pattern, values) in enumerate(zip(patterns, weights, strict=True), 1):
        x = _factor(pattern, layer.layout, layer.precision, x, values)
        if number < len(weights):
            x = _activated(layer.between, x)
    if bias is not None:
        x = x + (bias if layer.layout == "bsf" else bias[:, None])
    if residual is not None and layer.residual_first:
        return _activated(layer.activation, x + residual)
    x = _activated(layer.activation, x)
    return x if residual is None else x + residual


def _activated(name: str, x: Any) -> Any:
    """Apply an activation, computed in float32 at least."""
    if name == "none":
        return x
    return ACTIVATIONS[name](x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)


def _is_one_launch(launcher: ChainLauncher, layer: LayerCall, x: Any, bias: Any, residual: Any) -> bool:
    device = device_for("host" if jax.default_backend() == "cpu" else ("cuda", None))
    epilogue = Epilogue(bias is not None, layer.activation, residual is not None, layer.residual_first)
    precision: Any = layer.precision or str(x.dtype)
    options = LaunchOptions(precision, layer.layout, epilogue)
    found = launcher._verdict(device, options, _batch(layer.layout, x))
    if layer.fuse == "yes" and not found.is_one:
        raise LaunchError(f"{launcher!r}: {found.why}; accepted: {launcher.accepted}")
    return found.is_one


# ---- one factor, and the gradient of its weights: both are linear in x and in the other operand


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _factor(pattern: Pattern, layout: Layout, precision: PrecisionName | None, x: Any, weights: Any) -> Any:
    launch, _ = _launches_of_factor(pattern, layout, precision)
    return _called(launch, _y_shape(pattern, layout, x), x.dtype)(x, weights)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _gradient(pattern: Pattern, layout: Layout, precision: PrecisionName | None, x: Any, grad_y: Any) -> Any:
    _, launch = _launches_of_factor(pattern, layout, precision)
    # launchers conjugate x, as PyTorch does, and JAX does not
    return _called(launch, pattern.shape, x.dtype)(x.conj(), grad_y)


def _transposed(pattern: Pattern, layout: Layout, precision: PrecisionName | None, y: Any, weights: Any) -> Any:
    return _factor(pattern.transpose, layout, precision, y, weights.transpose(0, 2, 1, 3))


def _factor_backward(pattern: Pattern, layout: Layout, precision: PrecisionName | None, kept: Any, grad_y: Any) -> Any:
    backward: Any = precision and gradient_of(precision)  # gradients may exceed the range of the forward precision
    x, weights = kept
    return _transposed(pattern, layout, backward, grad_y, weights), _gradient(pattern, layout, backward, x, grad_y)


def _gradient_backward(pattern: Pattern, layout: Layout, precision: PrecisionName | None, kept: Any, grad: Any) -> Any:
    x, grad_y = kept
    return _transposed(pattern, layout, precision, grad_y, grad), _factor(pattern, layout, precision, x, grad)


_factor.defvjp(partial(_forward, _factor, 3), _factor_backward)
_gradient.defvjp(partial(_forward, _gradient, 3), _gradient_backward)


@lru_cache(REMEMBERED)
def _launches_of_factor(
    pattern: Pattern, layout: Layout, precision: PrecisionName | None
) -> tuple[Callable[..., None], Callable[..., None]]:
    """Functions that launch the product, and the gradient of the weights."""
    launcher = Launcher(pattern)
    multiply, gradient = (partial(each, layout=layout, precision=precision) for each in (launcher, launcher.gradient))
    return _launching(multiply), _launching(gradient)


# ---- calls from XLA


def _launching(call: Callable[..., Any]) -> Callable[..., None]:
    """Function that calls a launcher with XLA's buffers, on the stream on which XLA uses them."""

    def launch(ctx: Any, out: Any, *operands: Any) -> None:
        on_host = out.__dlpack_device__()[0] == HOST_MEMORY
        if on_host:
            out, operands = jax.tree.map(np.asarray, (out, operands))
        call(*operands, out=out, stream=None if on_host else ctx.stream)

    return launch


def _called(launch: Callable[..., None], shape: tuple[int, ...], dtype: Any) -> Callable[..., Any]:
    """Function of arrays that calls `launch` with their buffers when XLA runs it.

    JAX compiles a call again if `launch` is another object.
    """
    called: Callable[..., Any] = buffer_callback(launch, jax.ShapeDtypeStruct(shape, dtype), vmap_method="sequential")
    return called


def _batch(layout: Layout, x: Any) -> int:
    return int(x.shape[0 if layout == "bsf" else 1])


def _y_shape(product: Pattern | Chain, layout: Layout, x: Any) -> tuple[int, int]:
    return y_shape(product, layout, _batch(layout, x))
