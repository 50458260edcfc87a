"""Faster forward passes of PEFT's OFT, BOFT and GraLoRA layers.

`accelerate` replaces the classes of PEFT's modules by subclasses. Parameters, configurations, checkpoints, merging and
PEFT's other functions remain unchanged.
"""

from functools import lru_cache, partial
from math import gcd, prod
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.errors import SpecError
from ksgen.install import install_line
from ksgen.pattern import Pattern
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.operators import trained
from ksgen.torch.operators.ops import multiply
from ksgen.torch.operators.prepared import is_direct

try:
    from peft.tuners.boft import layer as boft
    from peft.tuners.gralora import layer as gralora
    from peft.tuners.oft import layer as oft
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ImportError(f"ksgen.torch.peft needs PEFT 0.19 or later: {install_line('peft')}", name=error.name) from error

__all__ = ["accelerate", "replace_extension"]
# BOFT factors are combined up to blocks of the largest size; blocks below the smallest size are joined to larger ones
LARGEST_BLOCK, SMALLEST_BLOCK = 64, 16


def accelerate(model: nn.Module) -> list[str]:
    """Replace the forward passes of PEFT's OFT, BOFT and GraLoRA layers, in place.

    Call it again after an adapter was added.

    Args:
        model: Model of PEFT, or a module that contains PEFT's layers.

    Returns:
        Names of all layers with faster forward passes, including those of earlier calls.

    Raises:
        SpecError: The model has no such layer.

    Examples:
        >>> from peft import OFTConfig, get_peft_model
        >>> from torch import nn
        >>> from ksgen.torch.peft import accelerate
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> adapted = get_peft_model(model, OFTConfig(oft_block_size=8, target_modules=["0", "2"]))
        >>> accelerate(adapted.base_model.model)
        ['0', '2']
    """
    layers = {name: _accelerated(module) for name, module in model.named_modules() if isinstance(module, _LAYERS)}
    if not any(layers.values()):
        others = {type(each) for each in model.modules() if isinstance(each, BaseTunerLayer)}
        kinds = ", ".join(sorted(f"{each.__module__}.{each.__qualname__}" for each in others)) or "none"
        raise SpecError(
            f"no layer to accelerate; PEFT's layers in this model: {kinds}; accepted: linear layers with adapters of "
            "OFT, BOFT or GraLoRA, and embeddings with those of OFT"
        )
    return [name for name, is_accelerated in layers.items() if is_accelerated]


def _accelerated(layer: nn.Module) -> bool:
    """Replace the forward passes of a layer and of its rotations. Return whether any of them is a faster one now.

    Subclasses from elsewhere, such as those of FSDP2, are left unchanged.
    """
    for module in layer.modules():
        if type(module) in _FASTER:
            module.__class__ = _FASTER[type(module)]
            if isinstance(module, BOFTLinear):
                module.boft_P = None
    return any(type(module) in _FASTER.values() for module in layer.modules())


def replace_extension() -> None:
    """Let PEFT build several factors of BOFT without its CUDA extension.

    If the extension cannot be compiled, PEFT builds only one factor and warns. Call this function before PEFT builds or
    loads a model. It replaces the extension by PyTorch's operations in the whole process.

    Examples:
        >>> from ksgen.torch.peft import replace_extension
        >>> replace_extension()
    """
    boft._FBD_CUDA = _BlockDiagonal()


class _BlockDiagonal:
    """Replacement of PEFT's CUDA extension: puts blocks (factors, count, size, size) on the diagonals of matrices."""

    def forward(self, blocks: Tensor) -> list[Tensor]:
        return [torch.stack([torch.block_diag(*each) for each in blocks])]

    def backward(self, gradient: Tensor, blocks: Tensor) -> list[Tensor]:
        count, size = blocks.shape[1:3]
        split = gradient.reshape(-1, count, size, count, size)
        return [split.diagonal(dim1=1, dim2=3).movedim(-1, 1)]


def _multiply_blocks(x: Tensor, transposed: Tensor) -> Tensor:
    """Multiply x by a block-diagonal matrix, given by its transposed blocks (count, size, size)."""
    count, size, _ = transposed.shape
    rows, weights = x.reshape(-1, count * size), transposed.contiguous().unsqueeze(3)
    y = trained.multiply_by(partial(_layer, count, size), rows, weights) if weights.dtype == rows.dtype else None
    return (multiply(rows, weights) if y is None else y).view(x.shape)


@lru_cache(maxsize=64)
def _layer(count: int, size: int) -> KSLinear:
    """Layer of `count` blocks on the meta device; prepared steps are looked up by its options."""
    return KSLinear(Pattern(count, size, size, 1), bias=False, device="meta")


class OFTRotation(oft.OFTRotationModule):
    """PEFT's rotation by diagonal blocks, as a product of pattern (r, block size, block size, 1)."""

    def forward(self, x: Tensor) -> Tensor:
        if self.coft:
            with torch.no_grad():
                self.weight.copy_(self._project_batch(self.weight, eps=self.eps))
        size, cayley = self.block_size, (self.use_cayley_neumann, self.num_cayley_neumann_terms)
        rows = x.to(self.weight.dtype)
        if cayley == (True, 5) and is_direct(rows):
            transposed = _Rotations.apply(self.weight, self.cols * size + self.rows, size)
        else:
            transposed = self._cayley_batch(self.weight, size, *cayley).mT
        return _multiply_blocks(rows, transposed).to(x.dtype)


class _Rotations(torch.autograd.Function):
    """Transposes of PEFT's default rotations I + 2Q + 2Q^2 + 2Q^3 + Q^4 = (I + Q^2)(I + Q)^2.

    Q is skew-symmetric, so the transpose is the same polynomial of -Q.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, below: Tensor, size: int) -> Tensor:
        ctx.size, (skew, square, factor) = size, _terms(values, below, size)
        ctx.save_for_backward(values, below, skew, square, factor)
        return torch.baddbmm(factor, square, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        values, below, *terms = ctx.saved_tensors
        # a second derivative follows: the terms depend on the values
        skew, square, factor = _terms(values, below, ctx.size) if torch.is_grad_enabled() else terms
        of_factor = torch.baddbmm(gradient, square, gradient)
        of_square = torch.baddbmm(of_factor, gradient, factor.mT)
        of_skew = torch.baddbmm(of_factor, of_square + of_square.mT, skew, beta=2, alpha=-1)
        return (of_skew - of_skew.mT).reshape(len(values), -1).index_select(1, below), None, None


def _terms(values: Tensor, below: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute -Q, Q^2 and (I - Q)^2. `values` are those of -Q at the flat indices `below`, under its diagonals."""
    lower = values.new_zeros(len(values), size * size).index_copy(1, below, values).view(-1, size, size)
    skew = lower - lower.mT
    square = torch.bmm(skew, skew)
    factor = torch.add(square, skew, alpha=2)
    factor.diagonal(dim1=1, dim2=2).add_(1)
    return skew, square, factor


class BOFTLinear(boft.Linear):
    """PEFT's layer of BOFT, whose factors are multiplied block by block: memory is linear in the features."""

    def update_layer(self, *given: Any, **options: Any) -> None:
        super().update_layer(*given, **options)
        self.boft_P = None

    def cayley_batch(self, data: Tensor) -> Tensor:
        """Compute (I - S)(I + S)^-1 = 2 (I + S)^-1 - I."""
        skew = 0.5 * (data - data.mT)
        identity = torch.eye(data.shape[-1], device=data.device)
        return (2 * torch.linalg.inv(identity + skew) - identity).to(data.dtype)

    def get_delta_weight(self, adapter: str) -> tuple[Tensor, Tensor]:
        parameter = self.boft_R[adapter]
        identity = torch.eye(self.in_features, device=parameter.device, dtype=parameter.dtype)
        return rotate(identity, self._rotations(adapter)), self.boft_s[adapter]

    def _rotations(self, adapter: str) -> Tensor:
        parameter = self.boft_R[adapter]
        return self.cayley_batch(parameter.flatten(0, 1)).view(parameter.shape)

    def forward(self, x: Tensor, *given: Any, **options: Any) -> Tensor:
        active = [each for each in self.active_adapters if each in self.boft_R]
        if self.disable_adapters or self.merged:
            return super().forward(x, *given, **options)
        if not active:
            return self.base_layer(x, *given, **options).to(x.dtype)
        rotated = x
        for rotations in reversed([self.boft_dropout[each](self._rotations(each)) for each in active]):
            rotated = rotate(rotated, rotations.to(x.dtype))
        y = self.base_layer(rotated, *given, **options)
        scale = self.boft_s[active[0]]
        for each in active[1:]:
            scale = scale * self.boft_s[each]
        scale, bias = scale.squeeze(-1), self.base_layer.bias
        y = y * scale if bias is None else torch.addcmul(bias - bias * scale, y, scale)
        return y.to(x.dtype)


def rotate(x: Tensor, factors: Tensor) -> Tensor:
    """Multiply x by BOFT's factors (levels, blocks, size, size), the last one first.

    A feature's index has a low digit u < size / 2, and bits above it. Level i mixes features that differ only in u and
    in bit i. So the product of levels low to high - 1 has blocks over these bits and u. It is one product of diagonal
    blocks, after the bits below `low` are moved to the front.
    """
    levels, _, size, _ = factors.shape
    half, step = size // 2, max(1, (LARGEST_BLOCK // size).bit_length())
    for low in reversed(range(0, levels, step)):
        blocks = combine(factors, low, min(low + step, levels))
        if low == 0:
            x = _multiply_blocks(x, _joined(blocks).mT)
        else:
            split = x.reshape(-1, blocks.shape[1] // half, 2**low, half).transpose(1, 2)
            shape = split.shape
            split = _multiply_blocks(split.reshape(-1, x.shape[-1]), _joined(blocks).mT).view(shape)
            x = split.transpose(1, 2).reshape(x.shape)
    return x


def combine(factors: Tensor, low: int, high: int) -> Tensor:
    """Combine the factors of levels low to high - 1 into one, with blocks (count, size, size)."""
    half, below = factors.shape[-1] // 2, 2**low
    blocks = factors[low]
    for level in range(low + 1, high):
        inner = 2 ** (level - low)
        upper = factors[level].reshape(-1, inner, below, 2, half, 2, half)
        lower = blocks.reshape(-1, 2, below, inner, half, inner * half)
        blocks = torch.einsum("qHthuGv,qGtHvk->qthHuGk", upper, lower).flatten(0, 1).flatten(1, 3).flatten(2)
    return blocks


def _joined(blocks: Tensor) -> Tensor:
    """Join neighbouring blocks smaller than `SMALLEST_BLOCK` to larger ones, with zeros between them."""
    count, size, _ = blocks.shape
    joined = gcd(count, max(1, SMALLEST_BLOCK // size))
    split = blocks.reshape(-1, joined, size, size).permute(0, 2, 3, 1)
    return torch.diag_embed(split, dim1=1, dim2=3).reshape(count // joined, joined * size, joined * size)


class GraLoRALinear(gralora.Linear):
    """PEFT's layer of GraLoRA, whose update is added to y in place, by products on views."""

    def forward(self, x: Tensor, *given: Any, **options: Any) -> Tensor:
        active = [each for each in self.active_adapters if each in self.gralora_A]
        is_slow = x.is_cpu and any(self.gralora_A[each].element_size() < 4 for each in active)
        if self.disable_adapters or self.merged or not active or is_slow or not is_direct(x):
            return super().forward(x, *given, **options)
        y = self.base_layer(x, *given, **options)
        for each in active:
            down, up, scaling = self.gralora_A[each], self.gralora_B[each], self.scaling[each]
            rows = self.gralora_dropout[each](x.to(down.dtype)).contiguous()
            if y.dtype == down.dtype and y.is_contiguous():
                y = _Update.apply(y, rows, down, up, scaling)
            else:
                y = y + _Update.apply(y.new_zeros(y.shape, dtype=down.dtype), rows, down, up, scaling).to(y.dtype)
            if self.hybrid_r[each] > 0:
                inner = self.gralora_A_general[each](self.gralora_dropout[each](x.to(down.dtype)))
                y = y + scaling * self.gralora_B_general[each](inner).to(y.dtype)
        return y.to(x.dtype)


class _Update(torch.autograd.Function):
    """y += scaling * (x A) B, with k diagonal blocks in A and in B, and `_exchanged` between the two products."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, down: Tensor, up: Tensor, scaling: float) -> Tensor:
        inner = _exchanged(torch.bmm(_stacked(x, down), down))
        _stacked(y, up).baddbmm_(inner, up, alpha=scaling)
        ctx.mark_dirty(y)
        ctx.save_for_backward(x, down, up, inner)
        ctx.scaling = scaling
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, down, up, inner = ctx.saved_tensors
        if torch.is_grad_enabled():  # a second derivative follows
            inner = _exchanged(torch.bmm(_stacked(x, down), down))
        of_y = _stacked(gradient.contiguous(), up)
        of_up = torch.bmm(inner.mT, of_y) * ctx.scaling
        of_inner = _exchanged(torch.bmm(of_y, (up * ctx.scaling).mT))
        of_down = torch.bmm(of_inner.mT, _stacked(x, down)).mT
        of_x = None
        if ctx.needs_input_grad[1] and is_direct(gradient) and not torch.is_grad_enabled():
            of_x = torch.empty_like(x)
            torch.bmm(of_inner, down.mT, out=_stacked(of_x, down))
        elif ctx.needs_input_grad[1]:
            of_x = torch.bmm(of_inner, down.mT).transpose(0, 1).reshape(x.shape)
        return gradient, of_x, of_down, of_up, None


def _stacked(rows: Tensor, blocks: Tensor) -> Tensor:
    """View of contiguous rows as (blocks, batch, features of a block)."""
    *batch, features = rows.shape
    return rows.view(prod(batch), len(blocks), features // len(blocks)).transpose(0, 1)


def _exchanged(inner: Tensor) -> Tensor:
    """Swap two digits of each value: the block of A that computed it, and the block of B that reads it.

    The function is its own inverse.
    """
    count, rows, rank = inner.shape
    return inner.view(count, rows, count, rank // count).transpose(0, 2).reshape(count, rows, rank)


_LAYERS = (oft.Linear, oft.Embedding, boft.Linear, gralora.Linear)
_FASTER = {oft.OFTRotationModule: OFTRotation, boft.Linear: BOFTLinear, gralora.Linear: GraLoRALinear}
