"""Products by PyTorch: many small ones are copies, large ones are views."""

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import Pattern  # noqa: E402
from ksgen.spec import LAYOUTS  # noqa: E402
from ksgen.torch import multiply  # noqa: E402
from ksgen.torch.operators import products  # noqa: E402
from ksgen.torch.operators.backends import BACKENDS  # noqa: E402
from tests.support.torch_cases import matrix, operands_of_products, truth  # noqa: E402


def test_many_small_products_are_one_of_copies_and_large_ones_are_views() -> None:
    shape, layout = (4, 5, 3, 6), "bsl"
    for batch, has_views in ((2, False), (4 * products.LEAST_ELEMENTS // 72 + 1, True)):
        x, weights = matrix(batch, 72, layout, torch.float64), torch.randn(shape, dtype=torch.float64)
        assert products._has_views(x, layout, 4, 6) is has_views
        y = multiply(x, weights, layout=layout, backend="strided")
        torch.testing.assert_close(y, truth(x, weights, layout))
        found = products.weight_gradient(x, y, layout, 4, 6)
        expected = torch.einsum("ikjs,icjs->ikcj", y.view(4, 5, 6, -1), x.view(4, 3, 6, -1))
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 5, 3, 1), (4, 5, 3, 1), (1, 5, 3, 6), (4, 5, 3, 6)])
def test_permuted_products_and_their_gradients(shape: tuple[int, ...], layout: str) -> None:
    """A dense factor and d = 1 spare operators."""
    a, _, c, d = shape
    x, weights = matrix(7, a * c * d, layout, torch.float64).requires_grad_(), torch.randn(shape, dtype=torch.float64)
    weights.requires_grad_()
    y = products.permuted_multiply(x, products.blocks_of(weights), layout, a, d)
    assert y.is_contiguous()
    torch.testing.assert_close(y, truth(x, weights, layout))
    assert torch.autograd.gradcheck(
        lambda x, weights: products.permuted_multiply(x, products.blocks_of(weights), layout, a, d), (x, weights)
    )


@pytest.mark.parametrize("count", [1, 3])
def test_a_single_row_has_a_contiguous_gradient_of_its_blocks(count: int) -> None:
    """A trace with one row takes any number of rows."""
    a, b, c = 4, 5, 3
    x, weights = torch.randn(count, a * c, dtype=torch.float64), torch.randn(a, b, c, 1, dtype=torch.float64)
    weights.requires_grad_()
    blocks = products.blocks_of(weights)
    y = products.permuted_multiply(x, blocks, "bsf", a, 1)
    torch.testing.assert_close(y, x @ products.to_dense(weights).t())
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, blocks, upstream)
    expected = torch.einsum("nik,nil->ikl", upstream.view(count, a, b), x.view(count, a, c))
    torch.testing.assert_close(gradient, expected)
    assert count > 1 or gradient.is_contiguous()

    def multiply_rows(rows: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
        return products.permuted_multiply(rows, blocks, "bsf", a, 1)

    traced = torch.jit.trace(multiply_rows, (x[:1], blocks), check_trace=False)
    torch.testing.assert_close(traced(x, blocks), y)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 5, 3, 1), (4, 5, 3, 1), (4, 5, 3, 6)])
def test_types_without_products_are_multiplied_in_float32(
    shape: tuple[int, ...], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _, c, d = shape
    x, weights = matrix(7, a * c * d, layout, torch.bfloat16), torch.randn(shape, dtype=torch.bfloat16)
    x.requires_grad_()
    blocks = products.blocks_of(weights)

    def results(x: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        y = products.permuted_multiply(x, blocks.to(x.dtype), layout, a, d)
        views = products.multiply(x.detach(), products.by_matrix(weights), layout)
        by_einsum = BACKENDS["einsum"](x.detach(), weights, layout)
        of_weights = products.weight_gradient(x.detach(), y.detach(), layout, a, d)
        with torch.autocast("cpu", enabled=False):  # as PyTorch recommends
            of_x = torch.autograd.grad(y.square().sum(), x)
        return [y, *of_x, views, by_einsum, of_weights]

    wide = results(x.detach().float().requires_grad_(), weights.float())
    for without, expected in (((), torch.bfloat16), ((torch.bfloat16,), torch.float32)):
        monkeypatch.setattr(products, "_WITHOUT_PRODUCTS", without)
        for is_cast in (False, True):
            with operands_of_products() as operands, torch.autocast("cpu", torch.bfloat16, enabled=is_cast):
                found = results(x, weights)
            assert operands == {expected}
        assert {each.dtype for each in found} == {torch.bfloat16}
        for one, other in zip(found, wide, strict=True):
            torch.testing.assert_close(one.float(), other, atol=0.2, rtol=0.02)
    assert torch.equal(found[0], wide[0].bfloat16())


def test_the_dense_matrix_competes_in_16_bits_on_processors_that_multiply_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x, pattern = torch.empty(1, 24, dtype=torch.bfloat16), Pattern(2, 5, 3, 4)
    monkeypatch.setattr(products, "_WITHOUT_PRODUCTS", ())
    assert products.may_be_dense(x, pattern)
    assert not products.may_be_dense(x.float(), pattern)
    assert not products.may_be_dense(x.to("meta"), pattern)
    # the matrix of a large pattern would take seconds, and hundreds of megabytes
    assert not products.may_be_dense(x, Pattern(2, 192, 768, 16))
    monkeypatch.setattr(products, "_WITHOUT_PRODUCTS", (torch.bfloat16,))
    assert not products.may_be_dense(x, pattern)
