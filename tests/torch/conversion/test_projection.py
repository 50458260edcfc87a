"""The nearest product by SVDs: what is one comes back, splits add up, supports are those of products."""

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.pattern import Chain, Pattern, square_dyadic  # noqa: E402  (after the skip)
from ksgen.torch.conversion.projection import (  # noqa: E402  # noqa: E402
    covering,
    drawn,
    eigen,
    least_squared_error,
    nearest_of_rank,
    on_support,
    product,
    product_of,
    project,
    squared_errors,
)

CHAIN = square_dyadic(16)


def test_a_product_of_the_chain_comes_back_with_no_error() -> None:
    matrix = product_of(drawn(torch.ones(16, 16, dtype=torch.float64), CHAIN, 0))
    steps: list[None] = []
    weights, errors = project(matrix, CHAIN, lambda: steps.append(None))
    assert [tuple(each.shape) for each in weights] == [pattern.shape for pattern in CHAIN]
    torch.testing.assert_close(product_of(weights), matrix)
    assert max(errors) < 1e-20
    assert len(steps) == len(errors) == len(CHAIN.factors) - 1


def test_squared_errors_of_the_splits_add_up() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(16, 16, dtype=torch.float64)
    weights, errors = project(matrix, CHAIN, lambda: None)
    assert float((matrix - product_of(weights)).square().sum()) == pytest.approx(sum(errors))


@pytest.mark.parametrize("noise", [4.0, 1e-3])
def test_the_squared_error_of_large_blocks(noise: float) -> None:
    """They are those of float64, whether most squares are lost or few."""
    torch.manual_seed(0)
    chain = Chain((Pattern(1, 8, 128, 1), Pattern(1, 96, 8, 1)))
    matrix = torch.randn(96, 8) @ torch.randn(8, 128) + noise * torch.randn(96, 128)
    wanted = sum(squared_errors(matrix.double(), chain))
    assert sum(squared_errors(matrix, chain)) == pytest.approx(wanted, rel=1e-5)


def test_the_support_of_a_product_is_where_it_is_not_zero() -> None:
    left, right = Chain((Pattern(2, 3, 4, 2), Pattern(1, 5, 3, 4))).factors[::-1]
    whole = product_of([torch.ones(right.shape), torch.ones(left.shape)])
    found = product(left, right)
    assert torch.equal(product_of([torch.ones(found.shape)]) != 0, whole != 0)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 4, 3, 3), (6, 3, 2, 1)),
        ((6, 5, 2, 2), (4, 2, 3, 3)),
        ((1, 2, 2, 3), (6, 1, 4, 1)),
        ((4, 2, 3, 6), (6, 3, 2, 4)),
    ],
)
def test_of_any_pair_the_support_holds_the_products(left: tuple[int, ...], right: tuple[int, ...]) -> None:
    whole = product_of([torch.ones(right), torch.ones(left)]) != 0
    found = product(Pattern(*left), Pattern(*right))
    support = product_of([torch.ones(found.shape)]) != 0
    assert found.density < 1 or left[0] == 1
    assert not (whole & ~support).any()
    assert covering((Pattern(*right), Pattern(*left))) == found


def test_no_product_has_an_error_below_the_least() -> None:
    torch.manual_seed(0)
    chain = Chain((Pattern(6, 1, 4, 1), Pattern(1, 2, 2, 3), Pattern(2, 12, 3, 1)))
    product = product_of([torch.randn(pattern.shape, dtype=torch.float64) for pattern in chain])
    noise = torch.randn(24, 24, dtype=torch.float64)
    least = least_squared_error(product + noise, chain)
    assert 0 < least < float(noise.square().sum())
    assert least_squared_error(product, chain) < 1e-20
    # nothing is lost before the second
    narrow_late = Chain((Pattern(6, 4, 4, 1), Pattern(6, 1, 4, 1), Pattern(2, 12, 3, 1)))
    ways = Chain((Pattern(6, 4, 4, 1), Pattern(2, 12, 12, 1))), Chain((Pattern(6, 1, 4, 1), Pattern(2, 12, 3, 1)))
    least = [project(noise, way, lambda: None)[1][0] for way in ways]
    assert least_squared_error(noise, narrow_late) == pytest.approx(least[1])
    assert least[0] < least[1]
    pair = Chain((Pattern(3, 5, 4, 2), Pattern(5, 4, 3, 2)))  # of two, the nearest
    matrix = torch.randn(40, 24, dtype=torch.float64)
    assert least_squared_error(matrix, pair) == pytest.approx(project(matrix, pair, lambda: None)[1][0])


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_eigenvectors_of_two_by_two(scale: float) -> None:
    torch.manual_seed(0)
    wide = scale * torch.randn(50, 2, 3, dtype=torch.float64)
    wide[0], wide[1, 0] = 0, wide[1, 1]
    symmetric = wide @ wide.mT
    values, vectors = eigen(symmetric)
    torch.testing.assert_close(values, torch.linalg.eigvalsh(symmetric).flip(-1), rtol=1e-12, atol=1e-14 * scale**2)
    torch.testing.assert_close(vectors @ vectors.mT, torch.eye(2, dtype=torch.float64).expand(50, 2, 2))
    torch.testing.assert_close(symmetric @ vectors, vectors * values[:, None], rtol=1e-10, atol=1e-14 * scale**2)


def test_entries_on_the_support_are_the_weights() -> None:
    weights = torch.randn(2, 3, 4, 5)
    torch.testing.assert_close(on_support(product_of([weights]), Pattern(2, 3, 4, 5)), weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [1, 3, 9])
def test_nothing_of_a_rank_is_nearer_than_the_svd(rank: int, dtype: object) -> None:
    torch.manual_seed(0)
    blocks = torch.randn(4, 6, 5, dtype=dtype)
    columns, rows, squares = nearest_of_rank(blocks, rank)
    values = torch.linalg.svdvals(blocks)
    torch.testing.assert_close(squares[:, :5], values.double().square(), rtol=1e-4, atol=1e-5)
    assert (columns.shape, rows.shape) == ((4, 6, rank), (4, rank, 5))
    lost = (blocks - columns @ rows).square().sum((1, 2))
    torch.testing.assert_close(lost, values[:, rank:].square().sum(1), rtol=1e-3, atol=1e-5)
