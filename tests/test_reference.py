"""The float64 truth, against the definition of the product and against plain matrices."""

import math
from itertools import product

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ksgen import reference
from ksgen.errors import LaunchError, PatternError
from ksgen.pattern import Chain, Pattern, kaleidoscope, monarch
from ksgen.reference import from_dense, gradient, multiply, to_dense
from ksgen.spec import ACTIVATIONS, LAYOUTS

patterns = st.builds(Pattern, *[st.integers(1, 5)] * 4)
seeds = st.integers(0, 2**32 - 1)
layouts = st.sampled_from(LAYOUTS)


def draw(seed: int, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(shape) for shape in shapes]


def in_layout(rows: np.ndarray, layout: str) -> np.ndarray:
    return rows if layout == "bsf" else np.ascontiguousarray(rows.T)


@given(patterns, seeds)
def test_to_dense_puts_each_weight_where_the_pattern_says(pattern: Pattern, seed: int) -> None:
    a, b, c, d = pattern.shape
    (weights,) = draw(seed, pattern.shape)
    expected = np.zeros((a * b * d, a * c * d))
    for i, k, l, j in product(range(a), range(b), range(c), range(d)):  # noqa: E741  the formula's l
        expected[(i * b + k) * d + j, (i * c + l) * d + j] = weights[i, k, l, j]
    assert np.array_equal(to_dense(pattern, weights), expected)


def test_the_support_is_a_kronecker_product() -> None:
    support = np.kron(np.kron(np.eye(3), np.ones((2, 5))), np.eye(4))
    assert np.array_equal(to_dense(Pattern(3, 2, 5, 4), np.ones((3, 2, 5, 4))), support)


@given(patterns, seeds)
def test_from_dense_undoes_to_dense(pattern: Pattern, seed: int) -> None:
    (weights,) = draw(seed, pattern.shape)
    dense = to_dense(pattern, weights)
    assert np.array_equal(from_dense(pattern, dense), weights)
    assert np.array_equal(from_dense(pattern, np.asfortranarray(dense)), weights)
    assert np.array_equal(dense, to_dense(pattern, weights))  # the argument is left as it was


@given(patterns, seeds)
def test_the_transpose_swaps_the_middle_axes_of_the_weights(pattern: Pattern, seed: int) -> None:
    (weights,) = draw(seed, pattern.shape)
    assert np.array_equal(to_dense(pattern.transpose, weights.swapaxes(1, 2)), to_dense(pattern, weights).T)


@given(patterns, seeds)
def test_perfect_shuffles_make_the_matrix_block_diagonal(pattern: Pattern, seed: int) -> None:
    a, b, c, d = pattern.shape
    (weights,) = draw(seed, pattern.shape)
    blocks = np.zeros((a * d * b, a * d * c))
    for block, (i, j) in enumerate(product(range(a), range(d))):
        blocks[block * b : (block + 1) * b, block * c : (block + 1) * c] = weights[i, :, :, j]
    p, q = np.eye(a * b * d)[list(pattern.row_order())], np.eye(a * c * d)[list(pattern.column_order())]
    assert np.array_equal(p @ blocks @ q, to_dense(pattern, weights))


@given(patterns, seeds, layouts, st.integers(0, 7))
def test_multiply_is_the_dense_product(pattern: Pattern, seed: int, layout: str, batch: int) -> None:
    x, weights = draw(seed, (batch, pattern.in_features), pattern.shape)
    y = multiply(pattern, in_layout(x, layout), weights, layout)
    assert y.dtype == np.float64
    assert y.flags.c_contiguous
    np.testing.assert_allclose(y, in_layout(x @ to_dense(pattern, weights).T, layout), rtol=1e-12, atol=1e-12)


@given(patterns, seeds, layouts, st.sampled_from(ACTIVATIONS), st.booleans(), st.booleans())
def test_the_epilogue_is_bias_then_activation_then_residual(
    pattern: Pattern, seed: int, layout: str, activation: str, with_bias: bool, with_residual: bool
) -> None:
    out = pattern.out_features
    x, weights, bias, residual = draw(seed, (3, pattern.in_features), pattern.shape, (out,), (3, out))
    y = multiply(
        pattern,
        in_layout(x, layout),
        weights,
        layout,
        bias=bias if with_bias else None,
        activation=activation,
        residual=in_layout(residual, layout) if with_residual else None,
    )
    sums = x @ to_dense(pattern, weights).T + with_bias * bias
    expected = np.vectorize(SCALAR_ACTIVATIONS[activation])(sums) + with_residual * residual
    np.testing.assert_allclose(y, in_layout(expected, layout), rtol=1e-11, atol=1e-11)


SCALAR_ACTIVATIONS = {
    "none": lambda v: v,
    "relu": lambda v: max(v, 0.0),
    "gelu": lambda v: v * (1 + math.erf(v / math.sqrt(2))) / 2,
    "gelu_tanh": lambda v: v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2,
    "silu": lambda v: v / (1 + math.exp(-v)),
}


def test_every_activation_of_a_spec_has_its_truth() -> None:
    assert tuple(reference._ACTIVATIONS) == ACTIVATIONS == tuple(SCALAR_ACTIVATIONS)


def activated(value: float, activation: str) -> float:
    one = np.ones((1, 1, 1, 1))
    return float(multiply(Pattern(1, 1, 1, 1), [[value]], one, "bsf", activation=activation)[0, 0])


def test_gelu_keeps_its_digits_far_below_zero() -> None:
    normal_distribution_at_minus_8 = 6.220960574271785e-16
    assert activated(-8, "gelu") == pytest.approx(-8 * normal_distribution_at_minus_8, rel=1e-13)


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_an_activation_far_from_zero_is_its_limit(activation: str) -> None:
    assert activated(-1e4, activation) == 0
    assert activated(1e4, activation) == 1e4
    assert math.isnan(activated(math.nan, activation))


@pytest.mark.parametrize("dtype", [np.float16, np.float32, ml_dtypes.bfloat16, np.int8])
def test_narrow_inputs_are_widened_before_they_are_multiplied(dtype: type) -> None:
    pattern = Pattern(2, 3, 64, 2)
    shapes = ((5, pattern.in_features), pattern.shape, (12,), (5, 12))
    narrow: list[np.ndarray] = [(3 * values).astype(dtype) for values in draw(0, *shapes)]
    y = multiply(pattern, narrow[0], narrow[1], "bsf", bias=narrow[2], residual=narrow[3])
    x, weights, bias, residual = (values.astype(np.float64) for values in narrow)
    np.testing.assert_allclose(y, x @ to_dense(pattern, weights).T + bias + residual, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_that_is_taken_in_parts_gives_the_same(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = Pattern(2, 3, 5, 2)
    x, weights, bias, residual = draw(1, (17, pattern.in_features), pattern.shape, (12,), (17, 12))
    x, residual = in_layout(x, layout), in_layout(residual, layout)
    whole = multiply(pattern, x, weights, layout, bias=bias, activation="gelu", residual=residual)
    monkeypatch.setattr(reference, "ELEMENTS_AT_ONCE", 5 * (pattern.in_features + pattern.out_features))
    parts = multiply(pattern, x, weights, layout, bias=bias, activation="gelu", residual=residual)
    np.testing.assert_allclose(parts, whole, rtol=1e-13)


@settings(max_examples=20)
@given(seeds, layouts, st.sampled_from([monarch(6, 20, 3, 4), kaleidoscope(8), Chain((Pattern(2, 3, 5, 2),))]))
def test_a_chain_is_the_product_of_its_factors(seed: int, layout: str, chain: Chain) -> None:
    x, *weights = draw(seed, (4, chain.in_features), *(pattern.shape for pattern in chain))
    y, dense = in_layout(x, layout), np.eye(chain.in_features)
    for pattern, values in zip(chain, weights, strict=True):
        y, dense = multiply(pattern, y, values, layout), to_dense(pattern, values) @ dense
    np.testing.assert_allclose(y, in_layout(x @ dense.T, layout), rtol=1e-10, atol=1e-10)


def test_from_dense_shows_an_entry_off_the_support() -> None:
    pattern = Pattern(2, 1, 1, 2)
    dense = np.eye(4)
    dense[2, 3] = np.nan
    with pytest.raises(PatternError, match=r"K\[2, 3\]=nan is off the support of 2,1,1,2; accepted: 0"):
        from_dense(pattern, dense)


GOOD = {"x": np.ones((3, 20)), "weights": np.ones((2, 3, 5, 2)), "layout": "bsf"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": np.ones((20, 3))}, "x has shape (20, 3); accepted: (batch, 20)"),
        ({"x": np.ones(20)}, "x has shape (20,); accepted: (batch, 20)"),
        ({"layout": "bsl"}, "x has shape (3, 20); accepted: (20, batch)"),
        ({"weights": np.ones((2, 5, 3, 2))}, "weights has shape (2, 5, 3, 2); accepted: (2, 3, 5, 2)"),
        ({"bias": np.ones(3)}, "bias has shape (3,); accepted: (12,)"),
        ({"residual": np.ones((3, 20))}, "residual has shape (3, 20); accepted: (3, 12)"),
        ({"layout": "nhwc"}, "layout='nhwc'; accepted: bsf, bsl"),
        ({"activation": "tanh"}, "activation='tanh'; accepted: none, relu, gelu, gelu_tanh, silu"),
    ],
)
def test_multiply_names_the_argument_that_does_not_fit(change: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError) as caught:
        multiply(Pattern(2, 3, 5, 2), **(GOOD | change))  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_from_dense_names_the_shape_that_does_not_fit() -> None:
    with pytest.raises(LaunchError, match=r"K has shape \(3, 3\); accepted: \(12, 20\)"):
        from_dense(Pattern(2, 3, 5, 2), np.ones((3, 3)))


@given(patterns, seeds, layouts)
def test_complex_numbers_keep_both_parts(pattern: Pattern, seed: int, layout: str) -> None:
    """Products are linear in each part, and gradients have the conjugate of X."""
    x, w, dy = draw(seed, (2, 3, pattern.in_features), (2, *pattern.shape), (2, 3, pattern.out_features))
    x, w, dy = (each[0] + 1j * each[1] for each in (x, w, dy))
    y = multiply(pattern, in_layout(x, layout), w, layout, bias=dy[0])
    np.testing.assert_allclose(y, in_layout(x @ to_dense(pattern, w).T + dy[0], layout), atol=1e-12)
    assert np.array_equal(from_dense(pattern, to_dense(pattern, w)), w)
    whole = to_dense(pattern, gradient(pattern, in_layout(x, layout), in_layout(dy, layout), layout))
    free = to_dense(pattern, np.ones(pattern.shape))
    np.testing.assert_allclose(whole, dy.T @ x.conj() * free, atol=1e-12)


def test_complex_numbers_have_no_activation() -> None:
    with pytest.raises(LaunchError, match="activation=relu of complex numbers; accepted: none"):
        multiply(Pattern(1, 1, 1, 1), np.ones((1, 1)), np.ones((1, 1, 1, 1), complex), "bsf", activation="relu")


def test_exchanged_outputs_are_rows_of_k_in_another_order() -> None:
    random = np.random.default_rng(0)
    pattern = Pattern(2, 4, 3, 5, store="k1:2.j.i.k2")
    weights, x = random.standard_normal(pattern.shape), random.standard_normal((7, pattern.in_features))
    natural, stored = (reference.to_dense(each, weights) for each in (pattern.natural, pattern))
    order = [
        (i * 4 + k1 * 2 + k2) * 5 + j for k1 in range(2) for j in range(5) for i in range(2) for k2 in range(2)
    ]  # fmt: skip
    np.testing.assert_array_equal(stored, natural[order])
    np.testing.assert_array_equal(reference.from_dense(pattern, stored), weights)
    bias, grad_y = random.standard_normal(pattern.out_features), random.standard_normal((7, pattern.out_features))
    for layout, transposed in (("bsf", lambda rows: rows), ("bsl", np.transpose)):
        y = reference.multiply(pattern, transposed(x), weights, layout, bias=bias)
        np.testing.assert_allclose(y, transposed(x @ stored.T + bias), rtol=1e-12)
        found = reference.gradient(pattern, transposed(x), transposed(grad_y), layout)
        wanted = np.einsum("sf,sl->fl", grad_y, x)
        np.testing.assert_allclose(found, reference.from_dense(pattern, wanted * (stored != 0)), rtol=1e-12)
    stored[0, 1] = 3
    with pytest.raises(PatternError, match=r"K\[0, 1\]=3.0 is off the support of 2,4,3,5@k1:2.j.i.k2:2; accepted: 0"):
        reference.from_dense(pattern, stored)
