"""Base of modules that hold layers with the same x: freezes, thaws and explains all of them. Computes no outputs."""

from typing import Any, Self

from torch import Tensor, nn

from ksgen.errors import LaunchError
from ksgen.torch.layer.base import freeze


class Layers(nn.ModuleList):
    """Layers that take the same x. Other modules may replace one of them later."""

    def freeze(self) -> Self:
        """Freeze every layer, like `KSLinear.freeze`.

        Returns:
            The module itself.

        Examples:
            >>> from ksgen.torch import KSLinear, KSSum
            >>> KSSum([KSLinear("1,4,4,2"), KSLinear("2,4,4,1")]).eval().freeze().is_frozen
            True
        """
        freeze(self)
        return self

    def thaw(self) -> Self:
        """Thaw every layer.

        Returns:
            The module itself.

        Examples:
            >>> from ksgen.torch import KSLinear, KSSum
            >>> KSSum([KSLinear("1,4,4,2"), KSLinear("2,4,4,1")]).eval().freeze().thaw().is_frozen
            False
        """
        for layer in self:
            if hasattr(layer, "thaw"):
                layer.thaw()
        return self

    @property
    def is_frozen(self) -> bool:
        """Whether all layers are frozen."""
        return all(getattr(layer, "is_frozen", False) for layer in self)

    def _explained(self, batch: int) -> list[str]:
        """Lines that explain each layer, with its number."""
        return [
            f"{number}. {line}" for number, each in enumerate(self, 1) for line in _explained(each, batch).splitlines()
        ]

    def _matrices(self) -> list[Tensor]:
        """Dense matrix of each layer."""
        return [_dense(layer, number) for number, layer in enumerate(self, 1)]


def _explained(layer: Any, batch: int) -> str:
    return (
        str(layer.explain(batch))
        if hasattr(layer, "explain")
        else f"{type(layer).__name__}: no layer of ksgen, called directly"
    )


def _dense(layer: Any, number: int) -> Tensor:
    if hasattr(layer, "to_dense"):
        matrix: Tensor = layer.to_dense()
        return matrix
    if isinstance(layer, nn.Linear) and type(layer).forward is nn.Linear.forward:
        return layer.weight
    raise LaunchError(
        f"layer {number} of the group is a {type(layer).__name__}, whose matrix is not known; accepted: layers of "
        "ksgen, and nn.Linear"
    )
