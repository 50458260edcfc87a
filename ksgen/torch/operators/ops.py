"""The product and the gradient of its weights as PyTorch operators, and `multiply`, which calls them.

`ksgen::multiply` and `ksgen::weight_gradient` are each other's derivatives, to any order:

    y = multiply(x, W)                   the gradient of x is multiply(dy, W, transposed), of W weight_gradient(x, dy)
    W = weight_gradient(x, y)            the gradient of x is multiply(y, dW, transposed), of y multiply(x, dW)

For complex numbers, "transposed" means the adjoint, with conjugated weights, and `weight_gradient` conjugates x, as
PyTorch defines gradients. Both operators run in ksgen's kernels, or in `ksgen.torch.operators.products` if
`ksgen.torch.operators.choice` selects it. Operands are matrices: (batch, features) in layout "bsf", (features, batch)
in "bsl". Forward-mode derivatives are products too, by the product rule. If a factor exchanges features, the last
arguments of both operators are the orders of its outputs and inputs, as `Pattern` takes them.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter, functional
from torch.utils.flop_counter import register_flop_formula

from ksgen.errors import LaunchError
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Activation, Layout, PrecisionName
from ksgen.spec.kernel import is_transposed, pattern_as_list
from ksgen.spec.precision import gradient_of
from ksgen.torch.operators import choice, products
from ksgen.torch.operators.checks import (
    check,
    check_activation,
    check_backend,
    check_tensors,
    check_words,
    dtype_name,
    has_modes,
    is_eager,
)
from ksgen.torch.operators.frozen import as_trained, derived, derived_for, despite_writes, is_cached, operand
from ksgen.torch.operators.meanwhile import waiting
from ksgen.torch.operators.products import ACTIVATIONS, Exchange, exchange_of, exchanged, finish, natural

Product = Callable[..., Tensor]
SMALL_BATCH = 256  # largest batch at which PyTorch's own operators may be faster in training, because they start sooner
ProductBackend = Literal["auto", "ksgen", "strided"]  # backends of `multiply`; "auto" chooses between the other two
BACKENDS: tuple[str, ...] = get_args(ProductBackend)


def multiply(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    layout: Layout = "bsf",
    precision: PrecisionName | None = None,
    activation: Activation = "none",
    backend: ProductBackend = "auto",
) -> Tensor:
    """Compute activation(X K^T + bias) + residual, differentiably.

    While gradients are recorded, the activation is a separate operation, whose input is stored for the backward pass,
    as in `torch.nn`. Otherwise it runs inside the kernel. Under autocast, all tensors are cast to its dtype.

    Args:
        x: Input, (batch, a*c*d) in layout "bsf", or (a*c*d, batch) in "bsl".
        weights: Values of K on its support, (a, b, c, d).
        bias: Tensor (a*b*d,), or None.
        residual: Tensor like y that is added after the activation, or None.
        layout: Layout of x, y and the residual: "bsf" or "bsl".
        precision: Arithmetic of the products, such as "tf32x3" for float32 tensors. None: that of the tensors.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu".
        backend: "ksgen" (kernels of ksgen), "strided" (PyTorch's batched products), or "auto", which chooses.

    Returns:
        y, (batch, a*b*d) in "bsf" or (a*b*d, batch) in "bsl", of the dtype of x.

    Raises:
        SpecError: An option is unknown, or options exclude each other.
        LaunchError: Tensors do not fit each other in shape, dtype or device.

    Examples:
        >>> import torch
        >>> from ksgen.torch import multiply
        >>> weights = torch.ones(1, 3, 2, 2, requires_grad=True)
        >>> y = multiply(torch.ones(5, 4), weights)
        >>> y.shape
        torch.Size([5, 6])
        >>> y.sum().backward()
        >>> weights.grad.unique()
        tensor([5.])
    """
    check_words(backend=(backend, BACKENDS), layout=(layout, LAYOUTS), activation=(activation, ACTIVATIONS))
    check_tensors("multiply", x=x, weights=weights, bias=bias, residual=residual)
    x, weights, bias, residual, precision = autocast(x, weights, bias, residual, precision)
    check(x, [weights], bias, residual, [layout, layout], precision)
    check_activation(activation, x.dtype)
    check_backend(backend, precision, x.dtype)
    return multiply_factor(x, weights, bias, activation, residual, layout, precision=precision, backend=backend)


def multiply_factor(
    x: Tensor, weights: Tensor, bias: Tensor | None, activation: str, residual: Tensor | None, layout: str,
    exchange: Exchange | None = None, *, precision: str | None, backend: str,
) -> Tensor:  # fmt: skip
    """Multiply like `multiply`, with tensors that were cast and checked. A product for `multiply_each`."""
    operands, orders = (x, weights, bias, residual), exchange.text if exchange else ()

    def by_functions(x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if activation != "none" and (needs_gradient(x, weights, bias) or _is_forward_mode()):
            before = _product(x, weights, bias, None, layout, precision, "none", False, backend, *orders)
            return finish(before, None, activation, residual, layout)
        return _product(x, weights, bias, residual, layout, precision, activation, False, backend, *orders)

    by_pytorch = partial(multiply_by_pytorch, layout=layout, activation=activation, exchange=exchange)
    # not watched, because then the batch size may be symbolic; nor in a checkpoint, whose passes must take one path
    may_be_plain = backend != "strided" and not _is_watched(*operands) and not is_saved_otherwise()
    if _is_traced() or (may_be_plain and _lacks_kernels(x, precision, backend)):
        return by_pytorch(*operands)
    if backend == "auto" and may_be_plain and _is_small_step(x, weights, layout, precision):
        methods: dict[str, Product] = {"ksgen": by_functions, "bmm": by_pytorch}
        added = bias is not None, residual is not None
        kind = "trained" if x.requires_grad else "trained first"  # whether the gradient of x is computed, too
        job = choice.job_of(kind, [(*weights.shape, *orders)], x.dtype, layout, activation, *added)
        timed = {name: partial(_step, method, operands) for name, method in methods.items()}
        ready = {name: partial(method, *operands) for name, method in methods.items()}
        batch = choice.size_of(x.shape[0 if layout == "bsf" else 1])
        return choice.run_fastest((job, batch, *methods), ready, "bmm", timed)
    return by_functions(*operands)


def _lacks_kernels(x: Tensor, precision: str | None, backend: str) -> bool:
    """Whether no kernels can multiply x; False while the device is still being opened.

    So the answer may differ in a checkpoint's second pass, which must save what the first one saved.
    """
    defers = backend == "auto" and precision in (None, dtype_name(x.dtype))
    return not (defers and not choice.is_ready(x.device)) and not choice.has_kernels(x.device)


def multiply_by_pytorch(
    x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor | None, layout: str, activation: str,
    exchange: Exchange | None = None,
) -> Tensor:  # fmt: skip
    """Multiply with plain PyTorch operators, so that autograd can differentiate."""
    rows, blocks = natural(x, exchange, layout), derived_for(x, weights, products.blocks_of)
    y = products.permuted_multiply(rows, blocks, layout, weights.shape[0], weights.shape[3])
    return finish(exchanged(y, exchange, layout), bias, activation, residual, layout)


def layouts_of(count: int, layout: Layout, out_layout: Layout | None, transposing_factor: int) -> list[Layout]:
    """Layouts of x, and of the X and Y of each of `count` factors.

    The factor with the index `transposing_factor` transposes its X, if y has another layout than x.
    """
    first = transposing_factor if is_transposed(layout, out_layout) else count
    return [layout] * (1 + first) + [out_layout or layout] * (count - first)


def multiply_each(
    product: Product, x: Tensor, weights: Sequence[Any], layouts: Sequence[Layout],
    exchanges: Sequence[Exchange | None], between: str, last: tuple[Tensor | None, str, Tensor | None],
) -> Tensor:  # fmt: skip
    """Multiply by factors sequentially; `layouts` are those that `layouts_of` returns.

    `product` takes X, the weights, bias, activation, residual, layout and exchange. `last` is the epilogue of the last
    factor; `between` is the activation of the others.
    """
    for number, (each, layout) in enumerate(zip(weights, layouts[1:], strict=True)):
        exchange = exchanges[number] if exchanges else None
        epilogue = last if number + 1 == len(weights) else (None, between, None)
        x = x if layout == layouts[number] else x.t().contiguous()
        x = product(x, each, *epilogue, layout, exchange)
    return x


def copying(product: Product) -> Product:
    """Product for `multiply_each`: copies exchanged features to and from the natural order, for `product`."""

    def multiply(
        x: Tensor, weights: Any, bias: Tensor | None, activation: str, residual: Tensor | None, layout: str,
        exchange: Exchange | None,
    ) -> Tensor:  # fmt: skip
        x = natural(x, exchange, layout)
        if exchange is None or exchange.outputs is None:
            return product(x, weights, bias, activation, residual, layout)
        y = exchanged(product(x, weights, None, "none", None, layout), exchange, layout)
        return finish(y, bias, activation, residual, layout)

    return multiply


def _is_small_step(x: Tensor, weights: Tensor, layout: str, precision: str | None) -> bool:
    """Whether this is a training step with so few rows that the host overhead of custom functions matters."""
    if x.device.type != "cpu" or not needs_gradient(weights) or is_transformed():
        return False
    is_small = x.shape[0 if layout == "bsf" else 1] <= SMALL_BATCH and x.numel()
    return bool(is_small) and precision in (None, dtype_name(x.dtype))


def is_saved_otherwise() -> bool:
    """Whether tensors saved for a backward pass go through hooks, such as a checkpoint's."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def shaped(y: Tensor, shape: Sequence[int], activation: str) -> Tensor:
    """Reshape the matrix y, to a tensor that is not a view for autograd: FSDP2 does not accept views.

    After relu, the result is a view, so that PyTorch detects writes to y: the gradient reads y.
    """
    y = y.contiguous()
    if activation == "relu" and y.requires_grad:
        return y.reshape(shape)
    return torch.ops.aten._unsafe_view(y, shape)


def _step(method: Product, given: Sequence[Tensor | None]) -> Tensor:
    """Run a product and its gradients on detached tensors, outside the recorded graph."""
    detached = [None if each is None else each.detach().requires_grad_(each.requires_grad) for each in given]
    y = method(*detached)
    trained = [each for each in detached if each is not None and each.requires_grad]
    for each in torch.autograd.grad(_OwnGradient.apply(y), trained):
        each.contiguous()  # as stored gradients are, though some methods return another layout
    return y


class _OwnGradient(torch.autograd.Function):
    """A scalar whose gradient with respect to y is y. If `torch.autograd.grad` were given that gradient, PyTorch would
    import a package for half a second.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return y.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y.detach()


def autocast(*given: Any) -> Any:
    """Cast tensors to autocast's dtype, like `torch.nn.functional.linear`.

    The last argument is the precision; the precision to use after the cast is returned too.
    """
    *tensors, precision = given
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return given
    dtype = torch.get_autocast_dtype(kind)
    takes_part = [
        tensor is not None and tensor.is_floating_point() and tensor.dtype != torch.float64 for tensor in tensors
    ]
    cast = [_cast(tensor, dtype) if takes else tensor for tensor, takes in zip(tensors, takes_part, strict=True)]
    return *cast, None if takes_part[0] else precision


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast the tensor to that type.

    A weight in training is cast once per autocast region, like the weights of PyTorch's own layers. Only PyTorch's
    operators can use its cache of cast weights. So a convolution of an empty input casts the weight, which has four
    dimensions like the weight of a convolution.
    """
    may_cache = (
        type(tensor) is Parameter and tensor.dim() == 4 and needs_gradient(tensor) and torch.is_autocast_cache_enabled()
    )
    if tensor.dtype == dtype or not may_cache or _is_watched(tensor) or is_transformed() or _is_traced():
        return tensor.to(dtype)
    if is_saved_otherwise():  # reading the saved weight would trigger a checkpoint's recomputation
        return tensor.to(dtype)
    convolved = functional.conv2d(tensor.new_empty(0, *tensor.shape[1:], dtype=dtype), tensor)
    return convolved.grad_fn._saved_weight


@lru_cache(choice.REMEMBERED)
def _factor_of(shape: tuple[int, ...], transposed: bool, *orders: str) -> tuple[Launcher, Exchange | None]:
    """Launcher of a factor or its adjoint, and its exchange of features; `orders` are those of the factor."""
    a, b, c, d = shape
    pattern = Pattern(a, b, c, d, *orders)
    pattern = pattern.transpose if transposed else pattern
    return choice.launcher_of(pattern), exchange_of(pattern)


def _repeated(count: int, shape: Sequence[int], orders: Sequence[str]) -> Sequence[str]:
    """Orders of a factor with `count` times the blocks, from those of a factor of this shape."""
    a, b, c, d = shape
    return pattern_as_list(Pattern(a, b, c, d, *orders).repeated(count))[4:] if any(orders) else ()


# ---- Y = X K^T, or X K if transposed, with the conjugate of K


def _compute(
    x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor | None, layout: str, precision: str | None,
    activation: str, transposed: bool, backend: str, *orders: str,
) -> Tensor:  # fmt: skip
    x, weights = rows_of(x), contiguous(weights)
    if not x.numel():
        return empty_y(x, weights, layout, transposed)
    factor, exchange = _factor_of(weights.shape, transposed, *orders)
    epilogue = (bias is not None, activation, residual is not None)

    def by_kernels() -> Tensor:
        options: dict[str, Any] = {"layout": layout, "activation": activation, "precision": precision}
        options |= {"bias": contiguous(bias), "residual": rows_of(residual)}
        return despite_writes(lambda: factor(x, operand(weights, transposed), **options))

    def on_views() -> Tensor:
        matrices = derived_for(x, weights, products.by_matrix)
        y = products.multiply(natural(x, exchange, layout), matrices.mH if transposed else matrices, layout)
        return finish(exchanged(y, exchange, layout), bias, activation, residual, layout)

    def by_whole_matrix() -> Tensor:
        y = products.by_whole_matrix(natural(x, exchange, layout), derived(weights, products.to_dense), layout)
        return finish(exchanged(y, exchange, layout), bias, activation, residual, layout)

    methods = {"ksgen": by_kernels, "strided": on_views}
    if not transposed and is_cached(weights) and products.may_be_dense(x, factor.pattern):
        methods["dense"] = by_whole_matrix
    return choice.run_chosen(factor, x, layout, precision, backend, methods, epilogue=epilogue)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weights, bias, _, ctx.layout, ctx.precision, ctx.activation, ctx.transposed, ctx.backend, *ctx.orders = inputs
    ctx.blocks = weights.shape[0], weights.shape[3]
    if _is_forward_mode():
        ctx.x, ctx.weights, ctx.y_shape = x, weights, output.shape
    if ctx.activation == "none":  # like `nn.Linear`: the others are freed, and may be written to
        needs_x, needs_weights = ctx.needs_input_grad[:2]
        x, weights, bias = x if needs_weights else None, weights if needs_x else None, None
    ctx.save_for_backward(x, weights, bias)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weights, bias = ctx.saved_tensors
    needs_x, needs_weights, needs_bias, needs_residual = ctx.needs_input_grad[:4]
    layout, transposed, backend = ctx.layout, ctx.transposed, (ctx.backend, *ctx.orders)
    precision = ctx.precision and gradient_of(ctx.precision)
    inner = gradient
    if ctx.activation != "none":
        before = _product(x, weights, bias, None, layout, ctx.precision, "none", transposed, *backend)
        inner = ACTIVATIONS[ctx.activation].backward(gradient, before)
    x_gradient = weights_gradient = bias_gradient = None
    if needs_x:
        weights = weights if torch.is_grad_enabled() else as_trained(weights)
        x_gradient = _product(inner, weights, None, None, layout, precision, "none", not transposed, *backend)
    if needs_weights:
        operands = (inner, x) if transposed else (x, inner)
        weights_gradient = _outer_product(*operands, *ctx.blocks, layout, precision, *backend)
    if needs_bias:
        bias_gradient = inner.sum(0 if layout == "bsf" else 1)
    of_options = [None] * (4 + len(backend))
    return x_gradient, weights_gradient, bias_gradient, gradient if needs_residual else None, *of_options


def _forward(ctx: Any, x_tangent: Tensor | None, weights_tangent: Tensor | None, bias_tangent: Tensor | None,
             residual_tangent: Tensor | None, *_: Any) -> Tensor:  # fmt: skip
    """Forward-mode derivative of a product whose activation is a separate step."""
    options = (ctx.layout, ctx.precision, "none", ctx.transposed, ctx.backend, *ctx.orders)
    of_x = None if x_tangent is None else _product(x_tangent, ctx.weights, None, None, *options)
    of_weights = None if weights_tangent is None else _product(ctx.x, weights_tangent, None, None, *options)
    of_bias = None if bias_tangent is None else (bias_tangent if ctx.layout == "bsf" else bias_tangent[:, None])
    return _sum([of_x, of_weights, residual_tangent, of_bias]).expand(ctx.y_shape)


def _sum(terms: Sequence[Tensor | None]) -> Tensor:
    """Sum of the terms that are not None; at least one is present."""
    first, *others = (each for each in terms if each is not None)
    return sum(others, first)


def _multiply_batched(call: Product, info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
    """Rule for `vmap`: fold the mapped dimension into the batch.

    If weights or biases are mapped, the dimension is folded into a instead, as more blocks.
    """
    x, weights, bias, residual, *options = given
    layout, count = options[0], info.batch_size
    of_x, of_weights, of_bias, of_residual = in_dims[:4]
    if not count:  # nothing to compute, and `unflatten` cannot infer a length from no elements
        each_x, each_weights = _empty_slice(x, of_x), _empty_slice(weights, of_weights)
        return empty_y(each_x, each_weights, layout, options[3]).expand(0, -1, -1), 0
    axis = 0 if layout == "bsf" else 1
    if of_weights is not None or of_bias is not None:
        axis = 1 - axis
        weights, bias = _folded(weights, of_weights, count, 0), _folded(bias, of_bias, count, 0)
        shape = weights.shape[0] // count, *weights.shape[1:]
        options[5:] = _repeated(count, shape, options[5:])
    x, residual = _folded(x, of_x, count, axis), _folded(residual, of_residual, count, axis)
    return call(x, weights, bias, residual, *options).unflatten(axis, (count, -1)), axis


# ---- the gradient of the weights


def _compute_weight_gradient(
    x: Tensor, y_gradient: Tensor, a: int, d: int, layout: str, precision: str | None, backend: str, *orders: str
) -> Tensor:
    x, y_gradient = contiguous(x), contiguous(y_gradient)
    shape = _weight_shape(x, y_gradient, a, d, layout)
    if not x.numel():
        return x.new_zeros(shape)
    factor, _ = _factor_of(shape, False, *orders)
    options: dict[str, Any] = {"layout": layout, "precision": precision}

    def on_views() -> Tensor:
        return products.weight_gradient(*_natural_operands(x, y_gradient, shape, layout, *orders), layout, a, d)

    methods: dict[str, Product] = {"ksgen": partial(factor.gradient, x, y_gradient, **options), "strided": on_views}
    return choice.run_chosen(factor, x, layout, precision, backend, methods, job="gradient")


def _natural_operands(
    x: Tensor, y_gradient: Tensor, shape: tuple[int, ...], layout: str, *orders: str
) -> tuple[Tensor, Tensor]:
    """Copies of x and of the gradient of y in the natural order, if their features are exchanged."""
    of_x, of_y = (_factor_of(shape, transposed, *orders)[1] for transposed in (False, True))
    return natural(x, of_x, layout), natural(y_gradient, of_y, layout)


def _keep_for_weights(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, y_gradient, a, d, ctx.layout, ctx.precision, ctx.backend, *ctx.orders = inputs
    ctx.save_for_backward(x, y_gradient)
    if _is_forward_mode():
        ctx.x, ctx.y_gradient, ctx.shape = x, y_gradient, (a, d)


def _backward_of_weights(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, y_gradient = ctx.saved_tensors
    needs_x, needs_y_gradient = ctx.needs_input_grad[:2]
    options, backend = (ctx.layout, ctx.precision, "none"), (ctx.backend, *ctx.orders)
    of_x = _product(y_gradient, gradient, None, None, *options, True, *backend) if needs_x else None
    of_y_gradient = _product(x, gradient, None, None, *options, False, *backend) if needs_y_gradient else None
    return of_x, of_y_gradient, *[None] * (4 + len(backend))


def _forward_of_weights(ctx: Any, x_tangent: Tensor | None, y_tangent: Tensor | None, *_: Any) -> Tensor:
    """Forward-mode derivative of the weight gradient."""
    options = (*ctx.shape, ctx.layout, ctx.precision, ctx.backend, *ctx.orders)
    of_x = None if x_tangent is None else _outer_product(x_tangent, ctx.y_gradient, *options)
    return _sum([of_x, None if y_tangent is None else _outer_product(ctx.x, y_tangent, *options)])


def _weight_gradient_batched(call: Product, info: Any, in_dims: tuple[Any, ...], *given: Any) -> tuple[Tensor, int]:
    """Rule for `vmap`: fold the mapped dimension, such as samples of per-sample gradients, into that of size `a`."""
    x, y_gradient, a, d, layout, precision, backend, *orders = given
    (of_x, of_y), count, axis = in_dims[:2], info.batch_size, 1 if layout == "bsf" else 0
    if not count:
        shape = _weight_shape(_empty_slice(x, of_x), _empty_slice(y_gradient, of_y), a, d, layout)
        return x.new_empty((0, *shape)), 0
    x, y_gradient = _folded(x, of_x, count, axis), _folded(y_gradient, of_y, count, axis)
    shape = _weight_shape(x, y_gradient, count * a, d, layout)
    options = layout, precision, backend, *_repeated(count, (a, *shape[1:]), orders)
    return call(x, y_gradient, count * a, d, *options).unflatten(0, (count, a)), 0


# ---- calls: of operators if a compiler or a mode is watching, else of autograd functions, which have less overhead


def _registered(
    schema: str, *, tensors: int, compute: Product, compute_trained: Product, empty: Product, by_pytorch: Product,
    keep: Callable[..., None], backward: Callable[..., Any], tangent: Product, batched: Callable[..., Any],
) -> Product:  # fmt: skip
    """Register an operator of `ksgen::`, and return the function that calls it, or computes the same without it.

    The first arguments are the `tensors`. `compute_trained` computes if a derivative may follow. `by_pytorch` computes
    under transforms that PyTorch does not apply to operators. `batched` is the rule for `vmap`.
    """

    def of_operator(*given: Any) -> Tensor:
        if _is_forward_mode():  # PyTorch would take such a derivative of the operator as zero
            raise LaunchError(
                "ksgen's operators in an exported program have no forward-mode derivatives; accepted: torch.func.jvp "
                "of the module itself, also inside torch.compile"
            )
        with waiting():  # results of compiled programs must not change between calls
            return compute(*given)

    name, parameters = schema.split("(", 1)
    operator = torch.library.custom_op(f"ksgen::{name}", of_operator, mutates_args=(), schema=f"({parameters}")
    operator.register_fake(empty)
    operator.register_autograd(backward, setup_context=keep)
    if hasattr(operator, "register_vmap"):  # from PyTorch 2.5 on
        operator.register_vmap(partial(batched, operator))

    def call(*given: Any) -> Tensor:
        arrays = given[:tensors]
        if _is_watched(*arrays):
            return by_pytorch(*given) if is_transformed() else operator(*given)
        if is_transformed():
            return by_pytorch(*given) if _is_functionalized() else Transformed.apply(*given)
        return Plain.apply(*given) if needs_gradient(*arrays) else compute(*given)

    differentiate = staticmethod(backward)

    class Transformed(torch.autograd.Function):
        forward, setup_context, backward = staticmethod(compute_trained), staticmethod(keep), differentiate
        jvp, vmap = staticmethod(tangent), staticmethod(partial(batched, call))

    class Plain(torch.autograd.Function):
        """Only a backward pass may follow: with `setup_context`, PyTorch would look up a signature at each call."""

        backward = differentiate

        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            output = compute_trained(*inputs)
            keep(ctx, inputs, output)
            return output

    return call


def _product_of_pytorch(
    x: Tensor, weights: Tensor, bias: Tensor | None, residual: Tensor | None, layout: str, precision: str | None,
    activation: str, transposed: bool, backend: str, *orders: str,
) -> Tensor:  # fmt: skip
    """Multiply with PyTorch's operators, for a transform within a compiled program or a dispatch mode."""
    exchange = _factor_of(weights.shape, transposed, *orders)[1] if any(orders) else None
    weights = weights.transpose(1, 2).conj() if transposed else weights
    return multiply_by_pytorch(x, weights, bias, residual, layout, activation, exchange)


def _gradient_of_pytorch(
    x: Tensor, y_gradient: Tensor, a: int, d: int, layout: str, precision: str | None, backend: str, *orders: str
) -> Tensor:
    """Gradient of the weights with PyTorch's operators, where `_product_of_pytorch` multiplies."""
    if any(orders):
        shape = _weight_shape(x, y_gradient, a, d, layout)
        x, y_gradient = _natural_operands(x, y_gradient, shape, layout, *orders)
    return products.permuted_weight_gradient(x, y_gradient, layout, a, d)


_product = _registered(
    "multiply(Tensor x, Tensor weights, Tensor? bias, Tensor? residual, str layout, str? precision, str activation, "
    "bool transposed, str backend, str store='', str load='') -> Tensor",
    tensors=4,
    compute=_compute,
    compute_trained=lambda x, weights, *others: _compute(x, as_trained(weights), *others),
    empty=lambda x, weights, bias, residual, layout, *options: empty_y(x, weights, layout, options[2]),
    by_pytorch=_product_of_pytorch,
    keep=_keep,
    backward=_backward,
    tangent=_forward,
    batched=_multiply_batched,
)
_outer_product = _registered(
    "weight_gradient(Tensor x, Tensor y_gradient, int a, int d, str layout, str? precision, str backend, "
    "str store='', str load='') -> Tensor",
    tensors=2,
    compute=_compute_weight_gradient,
    compute_trained=_compute_weight_gradient,
    empty=lambda x, y_gradient, a, d, layout, *_: x.new_empty(_weight_shape(x, y_gradient, a, d, layout)),
    by_pytorch=_gradient_of_pytorch,
    keep=_keep_for_weights,
    backward=_backward_of_weights,
    tangent=_forward_of_weights,
    batched=_weight_gradient_batched,
)


def _is_watched(*tensors: Tensor | None) -> bool:
    """Whether a compiler, a dispatch mode or a tensor without memory has to see the operators."""
    if torch.compiler.is_compiling() or has_modes():
        return True
    return not all(each is None or (type(each) in (Tensor, Parameter) and _has_address(each)) for each in tensors)


def _has_address(tensor: Tensor) -> bool:
    """Whether the tensor has memory, unlike a batch of gradients (`is_grads_batched`).

    Tensors of torch.func transforms count as having memory, because transforms are handled separately.
    """
    try:
        tensor.data_ptr()
    except RuntimeError:
        return bool(torch._C._are_functorch_transforms_active())
    return True


def is_transformed() -> bool:
    """Whether a torch.func transform is active, or forward-mode derivatives are computed."""
    return bool(torch._C._are_functorch_transforms_active()) or _is_forward_mode()


def _is_functionalized() -> bool:
    """Whether `torch.func.functionalize` is the innermost transform: PyTorch applies it to no autograd function."""
    functorch = torch._C._functorch
    if not torch._C._are_functorch_transforms_active():
        return False
    return bool(functorch.peek_interpreter_stack().key() == functorch.TransformType.Functionalize)


def _is_forward_mode() -> bool:
    return bool(forward_ad._current_level >= 0)


def _is_traced() -> bool:
    """Whether calls become a program of PyTorch's own operators: `torch.jit.trace`, or an export to ONNX."""
    return bool(torch.jit.is_tracing()) or (torch.compiler.is_compiling() and bool(torch.onnx.is_in_onnx_export()))


def is_plain(*tensors: Tensor | None) -> bool:
    """Whether only the values are needed."""
    return is_eager() and not (_is_forward_mode() or needs_gradient(*tensors) or _is_watched(*tensors))


def needs_gradient(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _empty_slice(tensor: Tensor, dim: int | None) -> Tensor:
    """Uninitialised slice of a tensor that `vmap` maps over."""
    return tensor if dim is None else tensor.new_empty(tensor.movedim(dim, 0).shape[1:])


def _folded(tensor: Any, dim: int | None, count: int, axis: int) -> Any:
    """Merge the mapped dimension into an axis, as its outer part. None stays None."""
    if tensor is None:
        return None
    if dim is None:
        tensor, dim = tensor.expand(count, *tensor.shape), 0
    return tensor.movedim(dim, axis).flatten(axis, axis + 1)


# ---- operations for `FlopCounterMode`: a multiplication and an addition per weight and row


def flops_of_product(x_shape: Sequence[int], weights_shape: Sequence[int], *given: Any, **_: Any) -> int:
    return 2 * x_shape[0 if "bsf" in given else 1] * prod(weights_shape)


register_flop_formula([torch.ops.ksgen.multiply])(flops_of_product)


@register_flop_formula([torch.ops.ksgen.weight_gradient])
def _flops_of_weight_gradient(x_shape: Sequence[int], *given: Any, out_shape: Sequence[int], **_: Any) -> int:
    return flops_of_product(x_shape, out_shape, *given)


# ---- helpers of both operators


def rows_of(tensor: Any) -> Any:
    """Copy a matrix, unless its only gaps are between rows, which kernels accept.

    Slices of columns are thus read in place. None stays None.
    """
    if tensor is not None and tensor.stride(1) == 1 and tensor.stride(0) >= tensor.shape[1]:
        return _resolved(tensor)
    return contiguous(tensor)


def contiguous(tensor: Any) -> Any:
    """Copy a tensor if it is not contiguous, or lazily conjugated or negated. None stays None."""
    return None if tensor is None else _resolved(tensor).contiguous()


def _resolved(tensor: Tensor) -> Tensor:
    """Compute the values of a tensor that PyTorch only marks as conjugated or negated."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def empty_y(
    x: Tensor, weights: Tensor, layout: str, transposed: bool = False, dtype: torch.dtype | None = None
) -> Tensor:
    """Allocate an uninitialised Y, by default of the dtype of X."""
    a, b, c, d = weights.shape
    features = a * (c if transposed else b) * d
    return x.new_empty((x.shape[0], features) if layout == "bsf" else (features, x.shape[1]), dtype=dtype)


def _weight_shape(x: Tensor, y_gradient: Tensor, a: int, d: int, layout: str) -> tuple[int, int, int, int]:
    features = 1 if layout == "bsf" else 0
    return a, y_gradient.shape[features] // (a * d), x.shape[features] // (a * d), d
