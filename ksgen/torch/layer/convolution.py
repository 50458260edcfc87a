"""`KSConv1x1`: a 1x1 convolution whose matrix is a product of Kronecker-sparse factors. `KSLinear` multiplies."""

from typing import Any

import torch
from torch import Tensor, fx, nn

from ksgen.errors import LaunchError
from ksgen.pattern import Pattern, Patterns
from ksgen.spec import Layout
from ksgen.structures import Structure
from ksgen.torch.layer.base import as_leaf
from ksgen.torch.layer.linear import KSLinear, dense_layer, unreadable
from ksgen.torch.operators.checks import check_tensors
from ksgen.values import misfit

# Permutation of (N, C, H, W) to a layout's order of batch and features, and the inverse permutation.
_AXES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "bsf": ((0, 2, 3, 1), (0, 3, 1, 2)),
    "bsl": ((1, 0, 2, 3), (1, 0, 2, 3)),
}


class KSConv1x1(nn.Module):
    """Convolution with a kernel of 1x1, in which K, a product of Kronecker-sparse factors, multiplies the channels.

    `linear` is the `KSLinear` that multiplies and has the parameters. So `freeze`, `build`, `calibrate` and others find
    it in a model.

    In layout "bsl", images are read as PyTorch stores them by default. One image is multiplied without a copy. Several
    are copied, so that one launch multiplies all of them, and y is copied back. In layout "bsf", images are read in
    `torch.channels_last`, and any number is multiplied without a copy. x in the other format is copied.

    Args:
        patterns: Factors of K, in any form that `KSLinear` accepts.
        bias: Whether the layer has a bias (out_channels,).
        layout: "bsl" for images in PyTorch's default format, or "bsf" for `torch.channels_last`. y has the same.
        **options: Options of `KSLinear` except `out_layout`, such as `activation`.

    Raises:
        PatternError: The patterns are invalid or do not fit each other.
        SpecError: An option is unknown.
        LaunchError: Options exclude each other.

    Examples:
        >>> import torch
        >>> from ksgen.torch import KSConv1x1
        >>> layer = KSConv1x1("2,3,4,1", activation="relu")
        >>> layer(torch.randn(5, 8, 7, 7)).shape
        torch.Size([5, 6, 7, 7])
        >>> KSConv1x1("2,3,4,1", layout="bsf")(torch.randn(8, 7, 7)).shape
        torch.Size([6, 7, 7])
    """

    def __init__(self, patterns: Patterns, bias: bool = True, *, layout: Layout = "bsl", **options: Any) -> None:
        super().__init__()
        self.linear = KSLinear(patterns, bias, layout=layout, **options)
        self.linear._refuse_out_layout("a KSConv1x1")

    @property
    def in_channels(self) -> int:
        """Channels of x."""
        return self.linear.in_features

    @property
    def out_channels(self) -> int:
        """Channels of y."""
        return self.linear.out_features

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Compute y = activation(K x + bias) + residual at each pixel.

        Args:
            x: Images (N, in_channels, H, W), or one image (in_channels, H, W).
            residual: Tensor like y that is added after the activation, or None.

        Returns:
            y, (N, out_channels, H, W) or (out_channels, H, W), of the dtype of x.

        Raises:
            LaunchError: x or the residual does not fit.

        Examples:
            >>> import torch
            >>> from ksgen.torch import KSConv1x1
            >>> layer = KSConv1x1("1,2,2,1", bias=False).requires_grad_(False)
            >>> layer(torch.zeros(1, 2, 1, 1), torch.ones(1, 2, 1, 1)).flatten()
            tensor([1., 1.])
        """
        if isinstance(x, fx.Proxy):
            return as_leaf(self, "KSConv1x1", x, residual)
        self.linear._refuse_out_layout("a KSConv1x1")
        check_tensors("KSConv1x1", x=x, residual=residual)
        chain, is_batch = self.linear.chain, x.dim() == 4
        if x.dim() not in (3, 4) or x.shape[-3] != self.in_channels:
            wanted = f"(N, {self.in_channels}, H, W) or ({self.in_channels}, H, W)"
            raise LaunchError(f"KSConv1x1({chain}): got x of shape {tuple(x.shape)}; {wanted} is needed")
        y_shape = (*x.shape[:-3], self.out_channels, *x.shape[-2:])
        if residual is not None and (wrong := misfit("residual", residual.shape, y_shape)):
            raise LaunchError(f"KSConv1x1({chain}): {wrong}")
        permutation, inverse = _AXES[self.linear.layout]

        def rows(images: Tensor) -> Tensor:
            return (images if is_batch else images[None]).permute(permutation).contiguous()

        y: Tensor = self.linear(rows(x), None if residual is None else rows(residual)).permute(inverse)
        y = y if self.linear.layout == "bsf" else y.contiguous()  # features last are channels_last already
        return y if is_batch else y[0]

    @classmethod
    def from_conv(
        cls,
        conv: nn.Module,
        patterns: Patterns | Structure | None = None,
        *,
        shuffle: bool = False,
        refine: int = 0,
        **options: Any,
    ) -> "KSConv1x1":
        """Create a layer that replaces an `nn.Conv2d` with a kernel of 1x1, by `KSLinear.from_linear`.

        A convolution with groups is Kronecker-sparse itself. Without `patterns`, its weights are copied exactly.

        Args:
            conv: The convolution. Its stride is 1, and there is no padding.
            patterns: Factors of K, or a structure. None: the groups' pattern, (groups, outputs, inputs of a group, 1).
            shuffle: True includes the channel shuffle that follows the groups in ShuffleNet. It needs `patterns=None`.
            refine: Steps of L-BFGS that follow hierarchical SVDs, as in `factorize`.
            **options: Options of `KSConv1x1`. Device and dtype are those of the convolution by default.

        Returns:
            The layer.

        Raises:
            LaunchError: The module is not such a convolution, or the patterns do not fit it.

        Examples:
            >>> from torch import nn
            >>> from ksgen.torch import KSConv1x1
            >>> conv = nn.Conv2d(8, 6, 1, groups=2)
            >>> KSConv1x1.from_conv(conv).linear.chain[0]
            Pattern(a=2, b=3, c=4, d=1)
            >>> KSConv1x1.from_conv(conv, shuffle=True).linear.chain[0]
            Pattern(a=2, b=3, c=4, d=1, store='k.i')
            >>> KSConv1x1.from_conv(nn.Conv2d(8, 6, 3))
            Traceback (most recent call last):
            ...
            ksgen.errors.LaunchError: KSConv1x1.from_conv: kernel_size=(3, 3); accepted: (1, 1)
        """
        _check_conv(conv)
        if shuffle and patterns is not None:
            raise LaunchError("KSConv1x1.from_conv: shuffle=True with patterns; accepted: patterns=None")
        groups, weight, bias = conv.groups, conv.weight.detach()[:, :, 0, 0], conv.bias
        options = {"device": weight.device, "dtype": weight.dtype, "layout": "bsl"} | options
        blocks = weight.unflatten(0, (groups, -1))
        if patterns is not None:
            dense = dense_layer(torch.block_diag(*blocks), bias)
            return cls._of(KSLinear.from_linear(dense, patterns, refine=refine, **options), conv.training)
        a, b, c = blocks.shape
        pattern = Pattern(a, b, c, 1, "k.i" if shuffle else "")
        if bias is not None and shuffle:
            bias = bias.unflatten(0, (groups, -1)).t().flatten()
        linear = KSLinear.from_weights([blocks[..., None]], bias, patterns=pattern, **options)
        return cls._of(linear, conv.training)

    @classmethod
    def _of(cls, linear: KSLinear, training: bool) -> "KSConv1x1":
        """Create a layer that multiplies by this `KSLinear`."""
        linear._refuse_out_layout("a KSConv1x1")
        layer = cls(linear.chain, device="meta")
        layer.linear = linear
        layer.train(training)
        return layer

    def to_conv(self) -> nn.Conv2d:
        """Convert to an `nn.Conv2d` with the same matrix and bias.

        Returns:
            The dense convolution, with copies of the values.

        Raises:
            LaunchError: The layer has an activation, which an `nn.Conv2d` lacks.

        Examples:
            >>> from ksgen.torch import KSConv1x1
            >>> KSConv1x1("2,3,4,1").to_conv()
            Conv2d(8, 6, kernel_size=(1, 1), stride=(1, 1))
        """
        dense = self.linear.to_linear()
        device, dtype = dense.weight.device, dense.weight.dtype
        conv = nn.Conv2d(
            self.in_channels, self.out_channels, 1, bias=dense.bias is not None, device=device, dtype=dtype
        )
        with torch.no_grad():
            conv.weight.copy_(dense.weight[:, :, None, None])
            if dense.bias is not None:
                conv.bias.copy_(dense.bias)
        return conv.train(self.training)


def _check_conv(conv: nn.Module) -> None:
    """Raise `LaunchError` if the module is not a convolution that multiplies each pixel by one matrix."""
    if not isinstance(conv, nn.Conv2d):
        raise LaunchError(f"KSConv1x1.from_conv: got {type(conv).__name__}; accepted: an nn.Conv2d")
    if wrong := unreadable(conv):
        raise LaunchError(f"KSConv1x1.from_conv: {wrong}")
    wanted: dict[str, list[Any]] = {"kernel_size": [(1, 1)], "stride": [(1, 1)], "padding": [(0, 0), "valid", "same"]}
    for name, accepted in wanted.items():
        if (found := getattr(conv, name)) not in accepted:
            raise LaunchError(f"KSConv1x1.from_conv: {name}={found}; accepted: {accepted[0]}")
