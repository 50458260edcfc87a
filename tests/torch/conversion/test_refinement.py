"""Refinement: it begins with a product of the right size, only ever comes nearer, and leaves what it cannot better."""

from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.pattern import Chain, Pattern, square_dyadic  # noqa: E402  (after the skip)
from ksgen.reference import to_dense  # noqa: E402
from ksgen.torch import factorize  # noqa: E402
from ksgen.torch.conversion.projection import drawn, product_of, refined, relative_error  # noqa: E402

CHAIN = Chain((Pattern(2, 3, 4, 1), Pattern(1, 4, 3, 2)))
UNCHAINABLE = Chain(("1,8,8,1", "2,4,4,1", "1,8,8,1"))
EXCHANGED = Chain(("2,3,4,1@k.i", "1,4,3,2"))


def test_a_product_is_the_dense_matrix_of_its_factors() -> None:
    for chain in (CHAIN, Chain((Pattern(6, 1, 4, 1), Pattern(1, 2, 2, 3), Pattern(2, 12, 3, 1))), square_dyadic(8)):
        weights = [torch.randn(pattern.shape, dtype=torch.float64) for pattern in chain]
        dense = [
            torch.from_numpy(to_dense(pattern, each.numpy())) for pattern, each in zip(chain, weights, strict=True)
        ]
        torch.testing.assert_close(product_of(weights), torch.linalg.multi_dot(dense[::-1]))


def test_the_first_weights_have_the_matrixs_norm_and_are_the_same_each_time() -> None:
    matrix = torch.full((8, 8), 3.0, dtype=torch.float64)
    first, second = drawn(matrix, CHAIN, 0), drawn(matrix, CHAIN, 0)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.testing.assert_close(product_of(first).norm(), matrix.norm())


def test_an_error_is_relative_and_none_for_zeros() -> None:
    weights = [torch.ones(1, 2, 2, 1)]
    assert relative_error(torch.full((2, 2), 2.0), weights) == pytest.approx(0.5)
    assert relative_error(torch.zeros(2, 2), [torch.zeros(1, 2, 2, 1)]) == 0.0


@pytest.mark.parametrize("chain", [CHAIN, EXCHANGED], ids=str)
def test_steps_bring_the_product_nearer_and_each_is_counted(chain: Chain) -> None:
    torch.manual_seed(0)
    matrix = product_of([torch.randn(pattern.shape, dtype=torch.float64) for pattern in chain], chain)
    first, steps = drawn(matrix, chain, 0), []
    found = refined(matrix, first, 20, lambda: steps.append(None), chain)
    assert relative_error(matrix, found, chain) < 0.5 * relative_error(matrix, first, chain)
    assert len(steps) == 20
    assert not any(each.requires_grad for each in found)


@pytest.mark.parametrize("context", [torch.inference_mode, partial(torch.device, "meta")], ids=["mode", "device"])
def test_no_context_of_pytorch_changes_the_weights(context: Any) -> None:
    """Tensors of inference mode record no gradients, and a default device has other generators."""
    matrix = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    wanted = factorize(matrix, UNCHAINABLE, refine=2)
    with context():
        found = factorize(matrix.clone(), UNCHAINABLE, refine=2)
    assert found.method == "refinement"
    assert all(torch.equal(one, other) for one, other in zip(found.weights, wanted.weights, strict=True))


def test_what_cannot_be_bettered_stays() -> None:
    weights = [torch.randn(pattern.shape, dtype=torch.float64) for pattern in CHAIN]
    assert refined(product_of(weights), weights, 3, lambda: None) is weights
    assert refined(product_of(weights), weights, 0, pytest.fail) is weights
    assert refined(torch.zeros(8, 8, dtype=torch.float64), weights, 3, pytest.fail) is weights
