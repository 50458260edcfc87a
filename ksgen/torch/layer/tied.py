"""`Tied`: weights of a factor that are equal along one of its axes, as a parametrization of their one slice.

The gradient of the slice is the sum over the axis, by autograd. A call repeats the slice in memory, because kernels
read whole weights. Launchers and kernels know nothing of ties.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ksgen.errors import LaunchError
from ksgen.values import excerpt, whole_number


class Tied(nn.Module):
    """Parametrization of a factor's weights (a, b, c, d) that are equal along an axis: the parameter is one slice.

    Register it by `torch.nn.utils.parametrize.register_parametrization(layer.weights, "0", Tied(axis, count))`, with
    the number of the factor. The parameter keeps the first slice, and its gradient is the sum over the axis.
    `KSLinear.from_structure` registers it for structures such as `ksgen.structures.kronecker`.

    Args:
        axis: Axis along which the weights are equal: 0 for a, or 3 for d.
        count: Number of equal slices: a or d of the factor.

    Raises:
        LaunchError: The axis or the count is not accepted.

    Examples:
        >>> import torch
        >>> from torch.nn.utils import parametrize
        >>> from ksgen.torch import KSLinear, Tied
        >>> layer = KSLinear("4,3,2,1", bias=False)
        >>> module = parametrize.register_parametrization(layer.weights, "0", Tied(axis=0, count=4))
        >>> [tuple(each.shape) for each in layer.parameters()], tuple(layer.weights[0].shape)
        ([(1, 3, 2, 1)], (4, 3, 2, 1))
    """

    repeats = True  # prepared calls read these weights, too

    def __init__(self, axis: int, count: int) -> None:
        super().__init__()
        if whole_number(axis) not in (0, 3):
            raise LaunchError(f"Tied: axis={excerpt(axis)}; accepted: 0 for a, or 3 for d")
        if (whole_number(count) or 0) < 1:
            raise LaunchError(f"Tied: count={excerpt(count)}; accepted: a whole number from 1")
        self.axis, self.count = axis, count

    def forward(self, part: Tensor) -> Tensor:
        """Repeat the slice.

        Args:
            part: Weights of one slice, with extent 1 along the axis.

        Returns:
            The weights of all slices, in memory of their own.

        Examples:
            >>> import torch
            >>> from ksgen.torch import Tied
            >>> Tied(axis=3, count=2)(torch.ones(1, 3, 2, 1)).shape
            torch.Size([1, 3, 2, 2])
        """
        shape = list(part.shape)
        shape[self.axis] = self.count
        return part.expand(shape).contiguous()

    def right_inverse(self, weights: Tensor) -> Tensor:
        """Take the first slice, as PyTorch does when it registers the parametrization, or sets the weights.

        Args:
            weights: Weights of all slices.

        Returns:
            A copy of the first slice.

        Examples:
            >>> import torch
            >>> from ksgen.torch import Tied
            >>> Tied(axis=0, count=4).right_inverse(torch.ones(4, 3, 2, 1)).shape
            torch.Size([1, 3, 2, 1])
        """
        return weights.narrow(self.axis, 0, 1).clone(memory_format=torch.contiguous_format)

    def __repr__(self) -> str:
        return f"Tied(axis={self.axis}, count={self.count})"


def tie(weights: nn.ParameterList, number: int, axis: int) -> None:
    """Tie a factor's weights along an axis, from now on."""
    if (count := weights[number].shape[axis]) > 1:
        parametrize.register_parametrization(weights, str(number), Tied(axis, count))


def initialized(weights: nn.ParameterList) -> list[Tensor]:
    """Tensors that initializers of the factors write to: the slice that tied weights repeat, else the weights."""
    found: list[Tensor] = list(weights)
    parametrizations: Any = getattr(weights, "parametrizations", {})
    for name, each in parametrizations.items():
        if len(each) == 1 and isinstance(each[0], Tied):
            found[int(name)] = each.original
    return found
