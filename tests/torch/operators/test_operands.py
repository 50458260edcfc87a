"""What a launcher takes for weights: themselves for one call, a packed form for many, transposed for gradients of x."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.torch.operators import frozen as operands  # noqa: E402  (after the skip)


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], Any]]:
    """What was packed, and by the launcher of which pattern."""
    found: list[tuple[tuple[int, ...], Any]] = []
    monkeypatch.setattr(
        operands,
        "launcher",
        lambda *shape: SimpleNamespace(pack=lambda given: found.append((shape, given)) or "packed"),
    )
    return found


def test_weights_that_are_not_frozen_are_taken_unchanged(packed: list[Any]) -> None:
    weights = torch.randn(2, 9, 5, 3)
    assert operands.operand(weights, transposed=False) is weights
    transposed = operands.operand(weights, transposed=True)
    assert transposed.is_contiguous()
    torch.testing.assert_close(transposed, weights.transpose(1, 2))
    assert packed == []


def test_the_transposed_are_packed_by_the_transposed_patterns_launcher(packed: list[Any]) -> None:
    weights = torch.randn(2, 9, 5, 3)
    for_many = [pack(weights) for pack in (operands._pack, operands._pack_transposed)]
    assert for_many == ["packed", "packed"]
    assert [shape for shape, _ in packed] == [(2, 9, 5, 3), (2, 5, 9, 3)]
    assert packed[0][1] is weights
    torch.testing.assert_close(packed[1][1], weights.transpose(1, 2))


def test_weights_in_training_are_detached() -> None:
    weights = torch.randn(2, 9, 5, 3)
    assert operands.as_trained(weights) is weights
    detached = operands.as_trained(weights.requires_grad_())
    assert detached is not weights
    assert not detached.requires_grad
    assert detached.data_ptr() == weights.data_ptr()
