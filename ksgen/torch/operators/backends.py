"""Backends to compare ksgen with: the paper's five, and an expert's. Each has its own weight format.

A backend prepares weights (a, b, c, d), once if they are frozen, and multiplies by the result. All are
differentiable except `bsr`: PyTorch has no gradient of a product with block-sparse rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from ksgen.errors import LaunchError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import KernelSpec, Layout
from ksgen.spec.kernel import pattern_as_list
from ksgen.torch.operators import products
from ksgen.torch.operators.checks import check, check_activation, check_backend, check_fuse, dtype_name
from ksgen.torch.operators.choice import BackendChoice, choose, has_kernels, launcher
from ksgen.torch.operators.frozen import derived, is_cached
from ksgen.torch.operators.ops import autocast, is_plain, is_transformed, multiply, multiply_chain, transposed_at
from ksgen.torch.operators.products import (
    Exchange,
    exchanged,
    finish,
    natural,
    permuted,
    permuted_back,
    permuted_multiply,
    to_dense,
)


@dataclass(frozen=True)
class Backend:
    """Product by PyTorch operators.

    `multiply` takes X, the prepared weights, the layout and the pattern.
    """

    multiply: Callable[[Tensor, Tensor, str, Pattern], Tensor]
    why: str
    prepare: Callable[[Tensor], Tensor] | None = None  # None: weights (a, b, c, d) unchanged
    is_sparse: bool = False  # whether the prepared weights are a sparse tensor

    def __call__(self, x: Tensor, weights: Tensor, layout: str) -> Tensor:
        """Compute Y = X K^T from weights (a, b, c, d).

        The weights are prepared at each call, or once if they are frozen.
        """
        if self.is_sparse and is_transformed():  # PyTorch's transforms take no sparse tensors
            return BACKENDS["bmm"](x, weights, layout)
        ready = weights if self.prepare is None else derived(weights, self.prepare)
        try:
            return self.multiply(x, ready, layout, Pattern(*weights.shape))
        except RuntimeError as error:
            if not self.is_sparse or isinstance(error, LaunchError):
                raise
            kind = (
                ", for frozen weights in inference mode"
                if torch.is_inference_mode_enabled() and is_cached(weights)
                else ""
            )
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
    """The permuted K in square blocks, the format of block-sparse row products."""
    blocks = _blocks(weights)
    count, b, c = blocks.shape
    side = gcd(b, c)
    down, across = b // side, c // side
    values = blocks.view(count, down, side, across, side).transpose(2, 3).reshape(-1, side, side)
    first = torch.arange(count, device=weights.device).view(-1, 1, 1) * across
    columns = (first + torch.arange(across, device=weights.device)).expand(count, down, across).reshape(-1)
    rows = torch.arange(count * down + 1, device=weights.device) * across
    return torch.sparse_bsr_tensor(rows, columns, values, (count * b, count * c), check_invariants=False)


def _multiply_bsr(x: Tensor, blocks: Tensor, layout: str, pattern: Pattern) -> Tensor:
    if torch.is_grad_enabled() and (x.requires_grad or blocks.requires_grad):
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
    return torch.sparse_csr_tensor(
        rows, columns, weights.permute(0, 1, 3, 2).flatten(), (a * b * d, a * c * d), check_invariants=False
    )


def _multiply_matrix(x: Tensor, matrix: Tensor, layout: str, pattern: Pattern) -> Tensor:
    return products.by_whole_matrix(x, matrix, layout)


def _multiply_strided(x: Tensor, matrices: Tensor, layout: str, pattern: Pattern) -> Tensor:
    if not is_plain(x, matrices):
        options: dict[str, Any] = {"layout": layout, "backend": "strided"}
        return multiply(x, matrices.permute(0, 2, 3, 1), **options)
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
    activation: str,
    precision: str | None, between: str = "none", fuse: str = "auto", layout: Layout = "bsf",
    out_layout: Layout | None = None,
    transposing_factor: int = 0, exchanges: Sequence[Exchange | None] = (),
) -> Tensor:  # fmt: skip
    """Multiply by factors sequentially.

    Bias, activation and residual belong to the last factor, `between` to the others. All tensors are cast and checked
    here, once.
    """
    check_fuse(fuse, backend)
    x, bias, residual, *weights, precision = autocast(x, bias, residual, *weights, precision)
    every = transposed_at(transposing_factor, weights, layout, out_layout)
    layouts = [] if out_layout is None else [layout_of_factor for *_, layout_of_factor in every]
    check(x, weights, bias, residual, layout, precision, layouts)
    check_backend(backend, precision, x.dtype)
    for each in (between, activation):
        check_activation(each, x.dtype)
    if backend in ("auto", "ksgen", "strided"):
        options: dict[str, Any] = {
            "activation": activation,
            "between": between,
            "fuse": fuse,
            "backend": backend,
            "precision": precision,
        }
        return multiply_chain(
            x,
            weights,
            bias,
            residual,
            layout=layout,
            out_layout=out_layout,
            transposing_factor=transposing_factor,
            exchanges=exchanges,
            **options,
        )
    orders = exchanges or (None,) * len(weights)
    for number, ((prepare, each, layout_of_factor), exchange) in enumerate(zip(every, orders, strict=True), 1):
        last_bias, function, last_residual = (
            (bias, activation, residual) if number == len(every) else (None, between, None)
        )
        rows = natural(prepare(x), exchange, layout_of_factor)
        y = exchanged(BACKENDS[backend](rows, each, layout_of_factor), exchange, layout_of_factor)
        x = finish(y, last_bias, function, last_residual, layout_of_factor)
    return x


def explain(backend: str, kernel: KernelSpec, batch: int, device: Any) -> str:
    """Explain which backend multiplies by a kernel's pattern on a tensor's device, and why."""
    if backend in BACKENDS:
        return f"{backend}, as asked for: {BACKENDS[backend].why}"
    if not has_kernels(device):
        return f"bmm, as there are no kernels for tensors on {device.type}: {BACKENDS['bmm'].why}"
    choice = choose(kernel, batch, device) if backend == "auto" else BackendChoice("ksgen", "as asked for")
    if choice.backend != "ksgen":
        return f"{choice.backend}: {choice.why}; {BACKENDS[choice.backend].why}"
    what: dict[str, Any] = {"precision": kernel.precision, "layout": kernel.layout, "epilogue": kernel.epilogue}
    description = launcher(*pattern_as_list(kernel.pattern)).explain(batch, **what)
    return f"ksgen: {choice.why}; {description}"


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
    """Whether intermediates are recomputed.

    "auto" recomputes if they take more memory than x, which is stored anyway.
    """
    values = between(chain, activations)
    return values > 0 and (intermediates == "recompute" or (intermediates == "auto" and values > chain.in_features))


def multiply_between(
    recompute: bool,
    backend: str,
    x: Tensor,
    weights: Sequence[Tensor],
    bias: Tensor | None,
    residual: Tensor | None,
    **options: Any,
) -> Tensor:
    """Multiply like `multiply_all_by`; with `recompute`, store only the arguments for the backward pass."""

    def whole(x: Tensor, bias: Tensor | None, residual: Tensor | None, *weights: Tensor) -> Tensor:
        return multiply_all_by(backend, x, weights, bias, residual, **options)

    if not recompute or not _is_recorded(x, bias, residual, *weights):
        return multiply_all_by(backend, x, weights, bias, residual, **options)
    y: Tensor = checkpoint(whole, x, bias, residual, *weights, use_reentrant=False, preserve_rng_state=False)
    return y


def _is_recorded(*tensors: Tensor | None) -> bool:
    """Whether a backward pass that supports checkpoints may follow."""
    if not torch.is_grad_enabled() or not any(each is not None and each.requires_grad for each in tensors):
        return False
    is_exported = torch.jit.is_tracing() or getattr(torch.compiler, "is_exporting", lambda: False)()
    return not is_exported and not is_transformed()


def describe_intermediates(
    intermediates: str, chain: Chain, activations: Activations, batch: int, item_bytes: int
) -> str:
    """Line of `explain` about intermediates in training."""
    size = f"{between(chain, activations) * batch * item_bytes / 1e6:.3g} MB at batch {batch}"
    treatment = (
        "computed again in the backward pass"
        if is_recomputed(intermediates, chain, activations)
        else "kept for the backward pass"
    )
    return f"in training, intermediates ({size}) are {treatment}: intermediates={intermediates}"
