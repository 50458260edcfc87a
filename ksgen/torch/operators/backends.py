"""Backends to compare ksgen with: the paper's five, and an expert's. Each has its own weight format.

A backend prepares weights (a, b, c, d), once if they are frozen, and multiplies by the result. All are
differentiable except `bsr`: PyTorch has no gradient of a product with block-sparse rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ksgen.errors import LaunchError, ToolchainError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec, Layout
from ksgen.spec.kernel import layout_word
from ksgen.torch.operators import choice, ops, products
from ksgen.torch.operators.checks import check, check_activation, check_backend, check_fuse, dtype_name
from ksgen.torch.operators.choice import BackendChoice, chain_launcher, has_kernels, is_one_launch, launcher_of
from ksgen.torch.operators.frozen import derived, derived_for, despite_writes, is_cached, operand
from ksgen.torch.operators.meanwhile import by_kernels
from ksgen.torch.operators.ops import is_transformed, multiply, needs_gradient
from ksgen.torch.operators.products import Exchange, finish, permuted, permuted_back, permuted_multiply, to_dense


@dataclass(frozen=True)
class Backend:
    """Product by PyTorch operators. `multiply` takes X, the prepared weights, the layout and the pattern."""

    multiply: Callable[[Tensor, Tensor, str, Pattern], Tensor]
    why: str
    prepare: Callable[[Tensor], Tensor] = lambda weights: weights
    is_sparse: bool = False  # whether the prepared weights are a sparse tensor

    def __call__(self, x: Tensor, weights: Tensor, layout: str) -> Tensor:
        """Compute Y = X K^T. Weights (a, b, c, d) are prepared at each call, or once if they are frozen."""
        if self.is_sparse and is_transformed():  # PyTorch's transforms take no sparse tensors
            return BACKENDS["bmm"](x, weights, layout)
        ready = derived(weights, self.prepare) if self.is_sparse else derived_for(x, weights, self.prepare)
        try:
            return self.multiply(x, ready, layout, Pattern(*weights.shape))
        except RuntimeError as error:
            if not self.is_sparse or isinstance(error, LaunchError):
                raise
            is_inferred = torch.is_inference_mode_enabled() and is_cached(weights)
            kind = ", for frozen weights in inference mode" if is_inferred else ""
            raise LaunchError(
                f"PyTorch has no product with {ready.layout} of {dtype_name(x.dtype)} on {x.device.type}{kind} "
                f"({str(error).splitlines()[0]}); take another backend, such as backend='bmm'"
            ) from error


def _blocks(weights: Tensor) -> Tensor:
    """Diagonal blocks of the permuted K, (a*d, b, c)."""
    return products.by_matrix(weights).flatten(0, 1)


def _multiply_bmm(x: Tensor, blocks: Tensor, layout: str, pattern: Pattern) -> Tensor:
    return permuted_multiply(x, blocks, layout, pattern.a, pattern.d)


def _as_bsr(weights: Tensor) -> Tensor:
    """The permuted K as a BSR tensor (block sparse row) of square blocks."""
    blocks = _blocks(weights)
    count, b, c = blocks.shape
    side = gcd(b, c)
    down, across = b // side, c // side
    values = blocks.view(count, down, side, across, side).transpose(2, 3).reshape(-1, side, side)
    first = torch.arange(count, device=weights.device).view(-1, 1, 1) * across
    columns = (first + torch.arange(across, device=weights.device)).expand(count, down, across).reshape(-1)
    rows = torch.arange(count * down + 1, device=weights.device) * across
    shape = count * b, count * c
    return torch.sparse_bsr_tensor(rows, columns, values, shape, device=weights.device, check_invariants=False)


def _multiply_bsr(x: Tensor, blocks: Tensor, layout: str, pattern: Pattern) -> Tensor:
    if needs_gradient(x, blocks):
        raise LaunchError(
            "backend='bsr' has no gradients in PyTorch; call under torch.no_grad(), or take another backend"
        )
    a, _, _, d = pattern.shape
    inputs = permuted(x, layout, a, d)
    y = (
        functional.linear(inputs.permute(2, 0, 1).flatten(1), blocks).t()
        if layout == "bsf"
        else blocks @ inputs.flatten(0, 1)
    )
    return permuted_back(y.unflatten(0, (a * d, -1)), layout, a, d)


@products.in_float32
def _multiply_einsum(x: Tensor, weights: Tensor, layout: str, pattern: Pattern) -> Tensor:
    a, _, c, d = pattern.shape
    if layout == "bsf":
        return torch.einsum("sicj,ikcj->sikj", x.unflatten(1, (a, c, d)), weights).flatten(1)
    return torch.einsum("icjs,ikcj->ikjs", x.unflatten(0, (a, c, d)), weights).flatten(0, 2)


def _as_csr(weights: Tensor) -> Tensor:
    """K in compressed sparse rows, with c nonzeros per row."""
    a, b, c, d = weights.shape
    columns = (
        torch.arange(a * c * d, device=weights.device).view(a, 1, c, d).expand(a, b, c, d).permute(0, 1, 3, 2).flatten()
    )
    rows = torch.arange(a * b * d + 1, device=weights.device) * c
    values, shape = weights.permute(0, 1, 3, 2).flatten(), (a * b * d, a * c * d)
    return torch.sparse_csr_tensor(rows, columns, values, shape, device=weights.device, check_invariants=False)


def _multiply_matrix(x: Tensor, matrix: Tensor, layout: str, pattern: Pattern) -> Tensor:
    return products.by_whole_matrix(x, matrix, layout)


def _multiply_strided(x: Tensor, matrices: Tensor, layout: str, pattern: Pattern) -> Tensor:
    if not ops.is_plain(x, matrices):
        options: dict[str, Any] = {"layout": layout, "backend": "strided"}
        return multiply(x, matrices.permute(0, 2, 3, 1).to(x.dtype), **options)
    return products.multiply(x.contiguous(), matrices, layout)


BACKENDS = {
    "bmm": Backend(_multiply_bmm, "permute, one batched product, permute back", _blocks),
    "bsr": Backend(_multiply_bsr, "permute, one product with block-sparse rows, permute back", _as_bsr, is_sparse=True),
    "einsum": Backend(_multiply_einsum, "torch.einsum over the axes of the pattern"),
    "dense": Backend(_multiply_matrix, "a product with the whole matrix, zeros included", to_dense),
    "sparse": Backend(_multiply_matrix, "a product with compressed sparse rows", _as_csr, is_sparse=True),
    "strided": Backend(
        _multiply_strided, "batched products on views of X and Y, or on copies if no view exists", products.by_matrix
    ),
}
BackendName = Literal["auto", "ksgen", "bmm", "bsr", "einsum", "dense", "sparse", "strided"]
NAMES = ("auto", "ksgen", *BACKENDS)


def multiply_all_by(
    backend: str, x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None, *,
    activation: str, precision: str | None, between: str = "none", fuse: str = "auto", layout: Layout = "bsf",
    out_layout: Layout | None = None, transposing_factor: int = 0, exchanges: Sequence[Exchange | None] = (),
) -> Tensor:  # fmt: skip
    """Multiply by several factors. All tensors are cast and checked here, once.

    Bias, activation and residual belong to the last factor, `between` to the others. If only the values are needed, one
    launch runs all factors where it is faster or `fuse` asks for it. `out_layout` is the layout of y, if it differs
    from that of x. `transposing_factor` is the index of the first factor whose X and Y have `out_layout`. `exchanges`
    has one entry per factor; it is empty if no factor exchanges its outputs or inputs.
    """
    check_fuse(fuse, backend)
    x, bias, residual, *weights, precision = ops.autocast(x, bias, residual, *weights, precision)
    layouts = ops.layouts_of(len(weights), layout, out_layout, transposing_factor)
    check(x, weights, bias, residual, layouts, precision)
    check_backend(backend, precision, x.dtype)
    for each in (between, activation):
        check_activation(each, x.dtype)

    def by_backend(x: Tensor, weights: Any, bias: Any, activation: str, residual: Any, layout: Layout) -> Tensor:
        return finish(BACKENDS[backend](x, weights, layout), bias, activation, residual, layout)

    def one_by_one() -> Tensor:
        by_functions = partial(ops.multiply_factor, precision=precision, backend=backend)
        product = by_functions if backend in ops.BACKENDS else ops.copying(by_backend)
        return ops.multiply_each(product, x, weights, layouts, exchanges, between, (bias, activation, residual))

    is_single = len(weights) == 1 and out_layout is None and not exchanges
    if is_single or fuse == "no" or backend not in ("auto", "ksgen") or not ops.is_plain(x, *weights, bias, residual):
        return one_by_one()
    wanted = precision or dtype_name(x.dtype)
    if fuse == backend == "auto" and wanted == dtype_name(x.dtype) and not choice.is_ready(x.device):
        return one_by_one()
    if not has_kernels(x.device):
        if fuse == "yes":
            raise LaunchError(
                f"fuse='yes' of tensors on {x.device.type}, for which there are no kernels; accepted: fuse='auto' or "
                "'no'"
            )
        return one_by_one()
    if not x.numel() or (fuse == "auto" and x.device.type == "cpu" and wanted != dtype_name(x.dtype)):
        return one_by_one()
    texts = [order.text if order else () for order in exchanges] or [()] * len(weights)
    patterns = tuple((*each.shape, *text) for each, text in zip(weights, texts, strict=True))
    chain = chain_launcher(patterns, between, fuse)

    def by_launcher() -> Tensor:
        options: dict[str, Any] = {"layout": layout, "out_layout": out_layout, "activation": activation}
        options |= {"bias": ops.contiguous(bias), "residual": ops.rows_of(residual), "precision": precision}
        raw = [ops.contiguous(each) for each in weights]
        return despite_writes(lambda: chain(ops.rows_of(x), [operand(each, False) for each in raw], **options))

    if fuse == "yes" or (backend == "ksgen" and x.device.type == "cpu"):
        return by_launcher()
    added, batch = (bias is not None, residual is not None), x.shape[0 if layout == "bsf" else 1]
    epilogue: Any = Epilogue(added[0], activation, added[1])
    is_one = is_one_launch(chain, x.device, wanted, layout, epilogue, batch, out_layout=out_layout).is_one
    if x.device.type == "cuda":
        if is_one or (exchanges and not choice.is_fusion_disabled(chain)):
            must_wait = wanted != dtype_name(x.dtype) or backend != "auto"
            try:
                if (y := by_launcher() if must_wait else by_kernels(by_launcher)) is not None:
                    return y
            except ToolchainError as error:
                choice.disable_fusion(chain, error)
        return one_by_one()
    job = choice.job_of("chain", patterns, x.dtype, layout_word(layout, out_layout), activation, *added, between)
    methods = {"ksgen" if is_one else "apart": by_launcher, "each": one_by_one}
    return choice.run_fastest((job, choice.size_of(batch), *methods), methods, "each")


def explain(backend: str, kernel: KernelSpec, batch: int, device: Any) -> str:
    """Explain which backend multiplies by a kernel's pattern on a tensor's device, and why."""
    if backend in BACKENDS:
        return f"{backend}, as asked for: {BACKENDS[backend].why}"
    if not has_kernels(device):
        return f"bmm, as there are no kernels for tensors on {device.type}: {BACKENDS['bmm'].why}"
    chosen = choice.choose(kernel, batch, device) if backend == "auto" else BackendChoice("ksgen", "as asked for")
    if chosen.backend != "ksgen":
        return f"{chosen.backend}: {chosen.why}; {BACKENDS[chosen.backend].why}"
    what: dict[str, Any] = {"precision": kernel.precision, "layout": kernel.layout, "epilogue": kernel.epilogue}
    description = launcher_of(kernel.pattern).explain(batch, **what)
    return f"ksgen: {chosen.why}; {description}"


# ---- intermediates while gradients are recorded: stored for the backward pass, or recomputed there from x


Intermediates = Literal["keep", "recompute", "auto"]
INTERMEDIATES: tuple[str, ...] = get_args(Intermediates)
Activations = tuple[str, str]  # activation after each factor but the last, and activation after the last


def between(chain: Chain, activations: Activations) -> int:
    """Values stored per row of the batch in addition to x: intermediates and inputs of activations."""
    *first, last = chain
    inner, outer = activations
    return sum(each.out_features for each in first) * (1 + (inner != "none")) + last.out_features * (outer != "none")


def is_recomputed(intermediates: str, chain: Chain, activations: Activations) -> bool:
    """Whether to recompute intermediates. "auto" does if they take more memory than x, which is stored anyway."""
    values = between(chain, activations)
    return values > 0 and (intermediates == "recompute" or (intermediates == "auto" and values > chain.in_features))


def recomputed(
    multiply: Callable[..., Tensor], x: Tensor, weights: Sequence[Tensor], bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Multiply, and store only the arguments for the backward pass, if one may follow that supports checkpoints."""

    def whole(x: Tensor, bias: Tensor | None, residual: Tensor | None, *weights: Tensor) -> Tensor:
        return multiply(x, weights, bias, residual)

    is_exported = torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", lambda: False)()
    if is_exported or is_transformed() or not needs_gradient(x, bias, residual, *weights):
        return multiply(x, weights, bias, residual)
    return checkpoint(whole, x, bias, residual, *weights, use_reentrant=False, preserve_rng_state=False)


def describe_intermediates(
    intermediates: str, chain: Chain, activations: Activations, batch: int, item_bytes: int
) -> str:
    """Line of `explain` about intermediates in training."""
    size = f"{between(chain, activations) * batch * item_bytes / 1e6:.3g} MB at batch {batch}"
    is_again = is_recomputed(intermediates, chain, activations)
    treatment = "computed again in the backward pass" if is_again else "kept for the backward pass"
    return f"in training, intermediates ({size}) are {treatment}: intermediates={intermediates}"
