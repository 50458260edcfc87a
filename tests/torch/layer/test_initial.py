"""Initial weights: products that are orthogonal, the identity or a Fourier transform; and what a chain cannot be."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)

from ksgen import transforms  # noqa: E402
from ksgen.errors import LaunchError, SpecError  # noqa: E402
from ksgen.pattern import deformable_butterfly, low_rank, monarch, square_dyadic  # noqa: E402
from ksgen.torch import KSLinear, convert  # noqa: E402

GROWING, SHRINKING = [(6, 4, 4, 1), (1, 24, 12, 2)], [(2, 6, 12, 2), (4, 4, 6, 1)]  # 24 -> 24 -> 48, and 48 -> 24 -> 16
WIDER = [(2, 8, 4, 3), (4, 6, 12, 1)]  # 24 -> 48 -> 24


def dense_of(layer: KSLinear) -> Any:
    """K in the type of the weights, one factor after the other, without ksgen's products."""
    matrix = np.eye(layer.in_features)
    for weights in layer.weights:
        a, b, c, d = weights.shape
        values = weights.detach().to(torch.complex128 if weights.is_complex() else torch.float64).numpy()
        whole = np.einsum("iklj,in,jm->ikjnlm", values, np.eye(a), np.eye(d)).reshape(a * b * d, a * c * d)
        matrix = whole @ matrix
    return matrix


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "chain", [GROWING, SHRINKING, square_dyadic(16), monarch(24, 12, 4, 4), [(1, 5, 3, 2)]], ids=str
)
def test_an_orthogonal_product(chain: Any, dtype: Any) -> None:
    torch.manual_seed(0)
    layer = KSLinear(chain, init="orthogonal", dtype=dtype, bias=False)
    matrix = dense_of(layer)
    gram = matrix.conj().T @ matrix if matrix.shape[0] >= matrix.shape[1] else matrix @ matrix.conj().T
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05}.get(dtype, 1e-13)
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=tolerance)
    before = [each.clone() for each in layer.weights]
    layer.reset_parameters()
    assert not any(each.equal(old) for each, old in zip(layer.weights, before, strict=True))


def test_draws_of_orthogonal_blocks_have_no_preferred_sign() -> None:
    torch.manual_seed(0)
    layer = KSLinear([(100, 2, 2, 10)], init="orthogonal")
    assert abs(float(layer.weights[0].detach()[:, 0, 0].sign().mean())) < 0.1


@pytest.mark.parametrize(
    "chain",
    [
        square_dyadic(16),
        GROWING,
        WIDER,
        [(1, 12, 24, 2), (6, 4, 4, 1)],
        deformable_butterfly(24, [(2, 2), (3, 3), (8, 4)]),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex64], ids=str)
def test_a_product_that_is_the_identity(chain: Any, dtype: Any) -> None:
    layer = KSLinear(chain, init="identity", dtype=dtype)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6
    np.testing.assert_allclose(dense_of(layer), np.eye(layer.out_features, layer.in_features), atol=tolerance)
    for each in layer.weights:  # no block is zero, so that gradients reach its neighbours
        assert each.detach().abs().sum((1, 2)).all()


@pytest.mark.parametrize("n", [8, 30, 64])
def test_a_fourier_transform_and_its_mirror(n: int) -> None:
    """Unitary, with reversed digits of y, or of x where the first factor has d = 1."""
    dft = transforms.dft(n, radix=8)
    expected = np.fft.fft(np.eye(n), norm="ortho")
    layer = KSLinear(dft.chain, init="fourier", dtype=torch.complex128, bias=False)
    np.testing.assert_allclose(dense_of(layer)[dft.order], expected, atol=1e-14)
    mirrored = KSLinear(
        [each.transpose for each in reversed(dft.chain.factors)], init="fourier", dtype=torch.complex128
    )
    np.testing.assert_allclose(dense_of(mirrored)[:, dft.order], expected, atol=1e-14)
    again = KSLinear(monarch(n, n, 2, 2), init="fourier", dtype=torch.complex128)
    even_then_odd = [*range(0, n, 2), *range(1, n, 2)]
    np.testing.assert_allclose(dense_of(again), expected[:, even_then_odd], atol=1e-14)


def test_it_is_drawn_again_after_the_meta_device_and_in_converted_models() -> None:
    for init in ("orthogonal", "identity"):
        layer = KSLinear(WIDER if init == "identity" else GROWING, init=init, device="meta").to_empty(device="cpu")
        layer.reset_parameters()
        columns = dense_of(layer)
        np.testing.assert_allclose(columns.T @ columns, np.eye(24), atol=1e-5)
    model = nn.Sequential(nn.Linear(24, 48))
    convert(model, {"0": GROWING}, from_weights=False, init="identity")
    np.testing.assert_allclose(dense_of(model[0]), np.eye(48, 24), atol=1e-6)


@pytest.mark.parametrize(
    ("chain", "init", "message"),
    [
        (
            low_rank(24, 16, 4),
            "orthogonal",
            "of 24 -> 4 -> 16 features, whose products have rank 4 at most; accepted: at least 16 features",
        ),
        (
            low_rank(24, 16, 4),
            "identity",
            "of 24 -> 4 -> 16 features, whose products have rank 4 at most; accepted: at least 16 features",
        ),
        (
            WIDER,
            "orthogonal",
            "of 24 -> 48 -> 24 features, which grow and shrink, so that .*; accepted: chains whose features only grow "
            "or",
        ),
        (
            "2,3,2,1",
            "identity",
            r"products of these factors have a relative error of at least [0-9.]+; accepted: chains that connect",
        ),
        (
            ["6,4,4,1", "1,8,8,3", "4,12,6,1"],
            "identity",
            "for a chain that is not chainable; accepted: a `Chain` that is_chainable, or two factors",
        ),
        (square_dyadic(16), "fourier", r"with torch.float32; accepted: dtype=torch.complex64 or torch.complex128$"),
    ],
    ids=str,
)
def test_what_a_chain_cannot_be(chain: Any, init: Any, message: str) -> None:
    with pytest.raises(LaunchError, match=rf"^KSLinear\(.*\): init='{init}':? {message}"):
        KSLinear(chain, init=init)


def test_other_mistakes() -> None:
    with pytest.raises(
        LaunchError,
        match=r"init='fourier' for .*; accepted: the chain of ksgen.transforms.dft, or ksgen.monarch\(n, n",
    ):
        KSLinear([(4, 4, 4, 1), (4, 4, 4, 1)], init="fourier", dtype=torch.complex64)
    with pytest.raises(SpecError, match="init='orthogonl'; did you mean orthogonal"):
        KSLinear(GROWING, init="orthogonl")  # type: ignore[arg-type]
    layer = KSLinear(GROWING)
    layer.init = "sparse"  # type: ignore[assignment]
    with pytest.raises(SpecError, match="init='sparse'; accepted: uniform, orthogonal, identity, fourier"):
        layer.reset_parameters()
    with pytest.raises(LaunchError, match=r"accepted: .* zeros, KSLinear\(init=...\), or KSLinear.from_linear"):
        nn.init.eye_(layer.weight)
