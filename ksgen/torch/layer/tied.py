"""`Tied`: weights of a factor that are equal along a, d or both, as a parametrization of their one slice.

The gradient of the slice is the sum over the axis, by autograd. A call repeats the slice in memory, because PyTorch's
operators read whole weights; the calls of a frozen layer share one repetition. Prepared calls of a frozen layer pack
the slice. Other prepared calls and training steps multiply by it where they can.
"""

from collections.abc import Iterator, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ksgen.errors import LaunchError
from ksgen.launch.weights import Seen
from ksgen.spec.kernel import SLICES
from ksgen.torch.operators.choice import launcher
from ksgen.torch.operators.factors import Tie
from ksgen.torch.operators.frozen import derived, is_cached, operand, row_major
from ksgen.values import excerpt, listed, whole_number


class Tied(nn.Module):
    """Parametrization of a factor's weights (a, b, c, d) that are equal along a, d or both: the parameter is one slice.

    Register it by `torch.nn.utils.parametrize.register_parametrization(layer.weights, "0", Tied(axis, count))`, where
    "0" is the index of the factor. The parameter keeps the first slice, and its gradient is the sum over the axis.
    `KSLinear.from_structure` registers it for structures such as `ksgen.structures.kronecker`.

    Args:
        axis: Axis along which the weights are equal: 0 for a, 3 for d, or (0, 3) for both.
        count: Number of equal slices: a or d of the factor, or (a, d).

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
    # the slice of a frozen layer, and its repetition, which lives as long as the layer is frozen
    _kept: tuple[Seen, ref[Tensor], int] | None = None

    def __init__(self, axis: int | tuple[int, int], count: int | tuple[int, int]) -> None:
        super().__init__()
        given = [(each,) if (many := listed(each)) is None else many for each in (axis, count)]
        axes, counts = ([*map(whole_number, each)] for each in given)
        if axes not in ([0], [3], [0, 3]):
            raise LaunchError(f"Tied: axis={excerpt(axis)}; accepted: 0 for a, 3 for d, or (0, 3) for both")
        if len(counts) != len(axes) or any((each or 0) < 1 for each in counts):
            raise LaunchError(f"Tied: count={excerpt(count)}; accepted: a whole number from 1 for each axis")
        self.axis: Any = (0, 3) if len(axes) > 1 else axes[0]
        self.count: Any = tuple(counts) if len(axes) > 1 else counts[0]

    def forward(self, part: Tensor) -> Tensor:
        """Repeat the slice.

        Args:
            part: Weights of one slice, with extent 1 along the axis.

        Returns:
            The weights of all slices, in memory of their own. If the layer is frozen and no gradient is recorded, all
            calls return the same tensor.

        Examples:
            >>> import torch
            >>> from ksgen.torch import Tied
            >>> Tied(axis=3, count=2)(torch.ones(1, 3, 2, 1)).shape
            torch.Size([1, 3, 2, 2])
        """
        kept = self._found(part)
        return self.view(part).contiguous() if kept is None else kept

    def view(self, part: Tensor) -> Tensor:
        """Repeat the slice by a stride of zero.

        Args:
            part: Weights of one slice, with extent 1 along the axis.

        Returns:
            The weights of all slices, in the memory of the slice.

        Examples:
            >>> import torch
            >>> from ksgen.torch import Tied
            >>> Tied(axis=3, count=2).view(torch.ones(1, 3, 2, 1)).stride()
            (6, 2, 1, 0)
        """
        counts = Tie(self.axis, self.count).counts
        return part.expand([counts.get(axis, size) for axis, size in enumerate(part.shape)])

    def _keep(self, part: Tensor) -> Tensor:
        """Repeat the slice once: `forward` returns the result as long as it lives and the slice is unchanged."""
        with torch.inference_mode(False), torch.no_grad():
            if (kept := self._found(part)) is None:
                kept = self.view(part).contiguous()
                self._kept = Seen(part), ref(kept), kept._version
            return kept

    def _pack(self, kept: Tensor) -> Any:
        """Pack the slice of a frozen layer, whose repetition is `kept`."""
        assert self._kept is not None
        return launcher(*kept.shape).pack(self.view(row_major(self._kept[0].tensor.detach())))

    def _found(self, part: Tensor) -> Tensor | None:
        """Repetition of this slice that a frozen layer keeps; None if there is none, or a gradient is recorded."""
        if torch.compiler.is_compiling() or self._kept is None or torch.jit.is_tracing():
            return None
        if torch.is_grad_enabled() and part.requires_grad:
            return None
        seen, kept, version = self._kept
        repeated = kept()
        if repeated is None or part is not seen.tensor or seen.what_happened():
            return None
        # if another write changed the repetition, the layer uses it until it thaws, and the thaw reports the write
        return repeated if repeated._version == version or is_cached(repeated) else None

    def __getstate__(self) -> dict[str, Any]:
        """State of copies and pickles, which are not frozen."""
        return {name: each for name, each in vars(self).items() if name != "_kept"}

    def right_inverse(self, weights: Tensor) -> Tensor:
        """Take the first slice. PyTorch calls this when it registers the parametrization or sets the weights.

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
        return weights[SLICES[Tie(self.axis, self.count).name]].clone(memory_format=torch.contiguous_format)

    def __repr__(self) -> str:
        return f"Tied(axis={self.axis}, count={self.count})"


def tie(weights: nn.ParameterList, ties: Sequence[str]) -> None:
    """Tie each factor's weights along "a", "d" or "ad", from now on. Weights of a factor with "" stay free."""
    for number, name in enumerate(ties):
        axes: Any = tuple(map("abcd".index, name))
        counts: Any = tuple(weights[number].shape[axis] for axis in axes)
        if axes:
            parametrize.register_parametrization(weights, str(number), Tied(axes, counts))


def _ties(weights: nn.ParameterList) -> Iterator[tuple[str, Any, Tied]]:
    """Tied weights: the factor's number as PyTorch names it, the list with the parameter, and the parametrization."""
    parametrizations: Any = weights._modules.get("parametrizations") or {}
    for name, each in parametrizations.items():
        if len(each) == 1 and isinstance(each[0], Tied):
            yield name, each, each[0]


def ties_of(weights: nn.ParameterList) -> tuple[str, ...]:
    """Axes along which each factor's weights are tied: "a", "d", "ad", or "" if they are not."""
    ties = {int(name): Tie(tie.axis, tie.count).name for name, _, tie in _ties(weights)}
    return tuple(ties.get(number, "") for number in range(len(weights)))


def initialized(weights: nn.ParameterList) -> list[Tensor]:
    """Tensors that initializers of the factors write to: the slice that tied weights repeat, else the weights."""
    found: list[Tensor] = list(weights)
    for name, each, _ in _ties(weights):
        found[int(name)] = each.original
    return found


def keep(weights: nn.ParameterList) -> list[Tensor]:
    """Repeat the slices of tied weights once, for a layer that freezes. The results must live until it thaws.

    Another parametrization computes its weights at each use.
    """
    return [tie._keep(each.original) for _, each, tie in _ties(weights)]


def packed(weights: nn.ParameterList) -> list[Any]:
    """Weights of each factor as launchers accept them. If the layer is frozen, they are packed once, ties as slices."""
    ties = {int(name): tie for name, _, tie in _ties(weights)}
    return [
        derived(each, ties[number]._pack, lambda raw: raw) if number in ties else operand(each, False)
        for number, each in enumerate(weights)
    ]


def stored(weights: nn.ParameterList) -> dict[str, Tensor]:
    """Parameters of tied weights, followed by the weights of all factors, by name.

    While the layer is frozen, these are the same tensors at each call.
    """
    slices = {f"parametrizations.{name}.original": each.original for name, each, _ in _ties(weights)}
    with torch.no_grad():
        return {**slices, **{str(number): each for number, each in enumerate(weights)}}


def untied(weights: nn.ParameterList) -> tuple[nn.ParameterList, dict[int, tuple[Any, Any]]] | None:
    """The parameters as a plain list, which PyTorch can pickle, and the axis and count of each tie by factor number.

    None if nothing is tied, or if there are other parametrizations.
    """
    ties = {int(name): (tie.axis, tie.count) for name, _, tie in _ties(weights)}
    if not ties or len(ties) < len(weights._modules["parametrizations"]):
        return None
    return nn.ParameterList(initialized(weights)).train(weights.training), ties


def retie(parameters: nn.ParameterList, ties: dict[int, tuple[Any, Any]]) -> None:
    """Restore ties: the inverse of `untied`. Each tied weight's parameter is its slice."""
    for number, tie in ties.items():
        part = parameters[number]
        parameters[number] = nn.Parameter(part.data, part.requires_grad)  # PyTorch writes to what it registers
        # unchecked, because PyTorch would refuse a parametrization that changes a shape
        parametrize.register_parametrization(parameters, str(number), Tied(*tie), unsafe=True)
        parameters.get_submodule(f"parametrizations.{number}").original = part
