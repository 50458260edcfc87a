"""What layers of a chain have in common: x as a matrix, and y's shape."""

import pytest
import torch

from ksgen.errors import LaunchError
from ksgen.torch import KSLinear


@pytest.mark.parametrize("make", [lambda layer: layer, lambda layer: layer.quantize("int8")])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_x_becomes_a_matrix_and_y_has_its_other_dimensions(layout: str, make: object) -> None:
    layer = make(KSLinear([(2, 3, 4, 1)], layout=layout))  # type: ignore[operator]
    assert (layer.in_features, layer.out_features) == (8, 6)
    x = torch.empty(5, 7, 8) if layout == "bsf" else torch.empty(8, 5, 7)
    assert layer._y_shape(x) == ((5, 7, 6) if layout == "bsf" else (6, 5, 7))
    assert layer._as_matrix(x).shape == ((35, 8) if layout == "bsf" else (8, 35))
    other = torch.empty(8, 9) if layout == "bsf" else torch.empty(9, 8)
    with pytest.raises(LaunchError, match=f"that fits layout {'bsl' if layout == 'bsf' else 'bsf'}"):
        layer._y_shape(other)
    with pytest.raises(LaunchError, match="got residual of shape"):
        layer._checked_y_shape(x, x)
