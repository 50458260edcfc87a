"""factorize with a structure: its authors' parameters, exact for a matrix of that structure, else the nearest."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ksgen import structures
from ksgen.errors import LaunchError, PatternError
from ksgen.pattern import Chain
from ksgen.structures import Structure, of_chain, renamed
from tests.support.libraries import library
from tests.test_structures import STRUCTURES, drawn, of_dyad

pytestmark = pytest.mark.libraries
torch = library("torch")

from ksgen.torch import KSLinear, KSSum, factorize  # noqa: E402  (PyTorch may be missing)
from ksgen.torch.conversion.factorize import SumFactorization  # noqa: E402
from ksgen.torch.operators.products import chain_to_dense  # noqa: E402

EXACT = {name: each for name, each in STRUCTURES.items() if "blast" not in name and "oft" not in name}
each_exact = pytest.mark.parametrize(("structure", "matrix_of"), list(EXACT.values()), ids=list(EXACT))


def rotations(count: int, size: int) -> np.ndarray:
    """Random orthogonal matrices with determinant 1."""
    found = np.linalg.qr(np.random.default_rng(3).standard_normal((count, size, size)))[0]
    found[..., 0] *= np.sign(np.linalg.det(found))[:, None]
    return found


def matrix_from(matrix_of: Callable[[Any], Any], state: Any) -> Any:
    return matrix_of({name: np.asarray(each) for name, each in state.items()})


@each_exact
def test_a_matrix_of_the_structure_gives_parameters_of_it(structure: Structure, matrix_of: Callable[..., Any]) -> None:
    truth = matrix_of(drawn(structure))
    found = factorize(torch.from_numpy(truth), structure)
    assert {name: tuple(each.shape) for name, each in found.state.items()} == dict(structure.shapes)
    np.testing.assert_allclose(matrix_from(matrix_of, found.state), truth, rtol=1e-11, atol=1e-11)
    assert found.relative_error < 1e-13
    layer = KSLinear.from_structure(structure, found.state)
    np.testing.assert_allclose(layer.to_dense().detach().numpy(), truth, rtol=1e-11, atol=1e-11)
    assert factorize(torch.from_numpy(truth), structure.chain).state == {}


@pytest.mark.parametrize("factors", [2, 4])
def test_a_product_of_rotations_gives_orthogonal_blocks_of_boft(factors: int) -> None:
    structure, matrix_of = STRUCTURES[f"boft of {'two' if factors == 2 else 'four'} factors"]
    state = {name: rotations(*shape[:2]) for name, shape in structure.shapes.items()}
    truth = matrix_of(state)
    found = factorize(torch.from_numpy(truth), structure)
    np.testing.assert_allclose(matrix_from(matrix_of, found.state), truth, atol=1e-12)
    for blocks in found.state.values():
        torch.testing.assert_close(blocks @ blocks.mT, torch.eye(blocks.shape[1]).expand(blocks.shape).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("blocks", [(5, 3), (2, 4), (5, 1), (1, 4), (20, 24), 1], ids=str)
def test_the_nearest_kronecker_product(blocks: Any, dtype: "torch.dtype") -> None:
    """Its squared error is all but the largest squared singular value of the rearranged matrix."""
    structure = structures.kronecker(24, 20, blocks)
    torch.manual_seed(0)
    matrix = torch.randn(20, 24, dtype=dtype)
    found = factorize(matrix, structure)
    (p, q), (o, n) = structure.shapes["A"], structure.shapes["B"]
    rearranged = [matrix[i * o : (i + 1) * o, j * n : (j + 1) * n].flatten() for i in range(p) for j in range(q)]
    lengths = torch.linalg.svdvals(torch.stack(rearranged).double())
    wanted = float(lengths[1:].norm() / lengths.norm())
    product = np.kron(*(found.state[name].double().numpy() for name in "AB"))
    assert np.linalg.norm(product - matrix.numpy()) / matrix.norm() == pytest.approx(wanted, abs=1e-6)
    assert found.relative_error == pytest.approx(wanted, abs=1e-6)
    assert found.bound == 1
    large = factorize(matrix * 2.0**100, structure)
    assert large.relative_error == pytest.approx(wanted, abs=1e-6)
    torch.testing.assert_close(large.state["A"], found.state["A"] * 2.0**50)
    assert factorize(torch.zeros(20, 24), structure).relative_error == 0


def test_a_layer_of_the_nearest_kronecker_product_is_tied() -> None:
    linear = torch.nn.Linear(24, 20)
    structure = structures.kronecker(24, 20, (5, 3))
    layer = KSLinear.from_linear(linear, structure)
    assert sum(each.numel() for each in layer.weights.parameters()) == 5 * 3 + 4 * 8
    found = factorize(linear.weight, structure)
    torch.testing.assert_close(layer.to_dense(), torch.kron(found.state["A"], found.state["B"]))
    assert torch.equal(layer.bias, linear.bias)


def test_the_nearest_tied_weights_of_one_factor() -> None:
    torch.manual_seed(0)
    structure = of_chain(structures.oft(12, block=3).chain, ("a",))
    matrix = torch.randn(12, 12).double()
    found = factorize(matrix, structure)
    blocks = torch.stack([matrix[i : i + 3, i : i + 3] for i in range(0, 12, 3)])
    torch.testing.assert_close(found.state["0"], blocks.mean(0).reshape(1, 3, 3, 1))
    matrix = torch.randn(12, 8).double()
    found = factorize(matrix, of_chain(Chain(["2,3,2,2"]), ("ad",)))
    part = torch.einsum("ikjilj->kl", matrix.reshape(2, 3, 2, 2, 2, 2)).reshape(1, 3, 2, 1) / 4
    torch.testing.assert_close(found.state["0"], part)
    repeated = part.expand(2, 3, 2, 2).clone()
    repeated[1, 0, 0, 1] += 1
    with pytest.raises(LaunchError, match="weights of 0 differ along a or d of 2,3,2,2, where they are tied; equal"):
        of_chain(Chain(["2,3,2,2"]), ("ad",)).to_state([repeated])


@pytest.mark.parametrize("structure", [structures.oft(12, block=3), structures.boft(12, block=4, factors=1)], ids=str)
def test_the_nearest_rotations(structure: Structure) -> None:
    name, (count, size, _) = next(iter(structure.shapes.items()))
    truth = rotations(count, size)
    dense = torch.block_diag(*torch.from_numpy(truth).mT)
    torch.testing.assert_close(factorize(dense, structure).state[name], torch.from_numpy(truth))
    torch.testing.assert_close(factorize(1000 * dense, structure).state[name], torch.from_numpy(truth))
    mirrored = torch.eye(12).double()
    mirrored[0, 0] = -2.0  # a reflection, whose nearest rotation negates the direction of the least length
    torch.manual_seed(0)
    matrix = mirrored + 0.1 * torch.randn(12, 12)
    found = factorize(matrix, structure).state[name]
    torch.testing.assert_close(torch.linalg.det(found), torch.ones(count).double())
    blocks = torch.stack([matrix[i : i + size, i : i + size].mT for i in range(0, 12, size)])
    nearest = (blocks - found).square().sum((1, 2))
    for _ in range(200):  # no rotation nearby is nearer
        skew = 0.1 * torch.randn(count, size, size).double()
        other = found @ torch.matrix_exp(skew - skew.mT)
        assert ((blocks - other).square().sum((1, 2)) >= nearest).all()


@pytest.mark.parametrize("variant", ["it", "ot", "dt"])
def test_the_nearest_sum_of_dyad(variant: Any) -> None:
    pair = structures.dyad(24, 20, blocks=4, variant=variant)
    state = {name: each for structure in pair for name, each in drawn(structure).items()}
    truth = torch.from_numpy(of_dyad(state, variant))
    found = factorize(truth, pair)
    assert isinstance(found, SumFactorization)
    assert found.relative_error < 1e-15
    np.testing.assert_allclose(of_dyad({name: each.numpy() for name, each in found.state.items()}, variant), truth)
    torch.testing.assert_close(KSSum.from_structures(pair, found.state).to_dense(), truth)
    torch.manual_seed(0)
    matrix = torch.randn(20, 24).double()
    nearest = factorize(matrix, pair)
    outside = torch.from_numpy(of_dyad({name: np.ones_like(each) for name, each in state.items()}, variant)) == 0
    error = float(matrix[outside].norm() / matrix.norm())
    assert nearest.relative_error == pytest.approx(error)


SUMS = {
    "monarch and low rank": (structures.monarch(32, 24, blocks=4), structures.low_rank(32, 24, rank=2)),
    "low rank and butterfly": (structures.low_rank(32, 32, rank=2), structures.butterfly(32)),
    "boft of four factors and low rank": (
        of_chain(structures.boft(32, block=4, factors=4).chain),
        structures.low_rank(32, 32, rank=1),
    ),
    "monarch and gralora": (structures.monarch(32, 24, blocks=4), structures.gralora(32, 24, blocks=2, rank=2)),
    "kronecker and low rank": (
        structures.kronecker(32, 24, blocks=(3, 4)),
        renamed(structures.low_rank(32, 24, rank=2), {"A": "down", "B": "up"}),
    ),
    "dyad and low rank": (*structures.dyad(32, 24, blocks=8), structures.low_rank(32, 24, rank=1)),
    "rotations and low rank": (structures.oft(32, block=4), structures.low_rank(32, 32, rank=1)),
}


def sum_of(parts: tuple[Structure, ...]) -> "torch.Tensor":
    """A matrix that is a sum of these structures, which have norms of 1, in float64."""
    matrices = [
        chain_to_dense(each.chain, [torch.from_numpy(weights) for weights in each.from_state(state_of(each))])
        for each in parts
    ]
    return sum(each / each.norm() * (each.shape[0] ** 0.5 if parts[0].has_rotations else 1) for each in matrices)


def state_of(structure: Structure) -> dict[str, Any]:
    if structure.has_rotations:
        return {name: rotations(*shape[:2]) for name, shape in structure.shapes.items()}
    return drawn(structure)


@pytest.mark.parametrize("parts", list(SUMS.values()), ids=list(SUMS))
def test_a_sum_of_products_is_recovered(parts: tuple[Structure, ...]) -> None:
    truth = sum_of(parts)
    found = factorize(truth, parts)
    assert found.relative_error < 1e-8
    assert found.chains == tuple(each.chain for each in parts)
    assert {name: tuple(each.shape) for name, each in found.state.items()} == {
        name: shape for each in parts for name, shape in each.shapes.items()
    }
    layers = KSSum.from_structures(parts, found.state)
    torch.testing.assert_close(layers.to_dense().detach(), truth, rtol=1e-6, atol=1e-8)
    assert (found.method, "no guarantee" in found.guarantee) == ("alternation", True)
    assert "plus" in str(found)
    torch.manual_seed(0)
    noise = torch.randn(truth.shape).double()
    noisy = factorize(truth + 0.05 * truth.norm() * noise / noise.norm(), parts)
    assert noisy.relative_error < 0.05  # that of the truth, and the noise on the support is fitted, too


def test_a_sum_in_float32_is_scaled() -> None:
    parts = SUMS["monarch and low rank"]
    truth = sum_of(parts).float()
    found, large = factorize(truth, parts), factorize(truth * 2.0**100, parts)
    assert found.relative_error < 1e-6
    assert large.relative_error == pytest.approx(found.relative_error)
    torch.testing.assert_close(large.state["A"], found.state["A"] * 2.0**50)
    assert factorize(torch.zeros(24, 32), parts).relative_error == 0
    assert factorize(truth, (parts[0],)).relative_error == pytest.approx(factorize(truth, parts[0]).relative_error)


@pytest.mark.parametrize(
    ("dtype", "exponent"),
    [(torch.float32, -140), (torch.float32, 100), (torch.float64, 40), (torch.float64, 700), (torch.float64, 1000)],
    ids=str,
)
def test_rotations_are_found_for_any_size_of_values(dtype: "torch.dtype", exponent: int) -> None:
    """They are small compared with large values, so that the other chain of a sum is as near as alone."""
    oft, low_rank = parts = SUMS["rotations and low rank"]
    torch.manual_seed(0)
    matrix = torch.randn(32, 32).double()
    scaled, (name,) = (matrix * 2.0**exponent).to(dtype), oft.shapes
    found, alone = factorize(scaled, parts), factorize(scaled, oft)
    for blocks in (found.state[name], alone.state[name]):
        torch.testing.assert_close(blocks @ blocks.mT, torch.eye(4, dtype=dtype).expand_as(blocks))
    if exponent > 0:
        torch.testing.assert_close(alone.state[name], factorize(matrix, oft).state[name].to(dtype))
        assert alone.relative_error == pytest.approx(1, rel=1e-9)
        assert found.relative_error == pytest.approx(factorize(matrix, low_rank).relative_error, rel=1e-6)


def test_a_sum_is_nearer_than_each_of_its_chains() -> None:
    torch.manual_seed(0)
    matrix = torch.randn(24, 32)
    for name in ("monarch and low rank", "dyad and low rank", "kronecker and low rank"):
        parts = SUMS[name]
        alone = min(factorize(matrix, each).relative_error for each in parts)
        assert factorize(matrix, parts).relative_error < 0.95 * alone


def test_steps_move_all_chains_of_a_sum_together() -> None:
    """BLAST has no projection but that of its support's cuts; a Kronecker product stays one."""
    torch.manual_seed(0)
    matrix = torch.randn(24, 32).double()
    pair = SUMS["monarch and gralora"]
    assert factorize(matrix, pair, refine=20).relative_error < factorize(matrix, pair).relative_error
    blast = renamed(structures.blast(32, 24, 4, 3), {"C": "c", "D": "d", "B": "b"})
    with_blast = blast, structures.kronecker(32, 24, blocks=(3, 4))
    found = factorize(matrix, with_blast)
    assert found.relative_error < factorize(matrix, blast).relative_error
    product = KSSum.from_structures(with_blast, found.state).to_dense().detach()
    assert float((product - matrix).norm() / matrix.norm()) == pytest.approx(found.relative_error)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: structures.gs(24, 24, blocks=4), "parameters of gs stand for rotations; accepted: orthogonal=False"),
        (
            lambda: of_chain(structures.monarch(24, 24, blocks=4).chain, ("da", "")),
            "tied='da, none' of 4,6,6,1 then 1,6,6,4; accepted: one of none, a, d or ad per factor",
        ),
        (
            lambda: of_chain(structures.monarch(24, 24, blocks=4).chain, ("a", "")),
            "weights tied along a, none; accepted: one tied factor, or a Kronecker product",
        ),
        (
            lambda: (structures.gs(24, 24, blocks=4), structures.low_rank(24, 24, rank=2)),
            "parameters of gs stand for rotations; accepted: orthogonal=False",
        ),
        (
            lambda: (of_chain(structures.monarch(24, 24, blocks=4).chain, ("a", "")), *structures.dyad(24, 24, 4)),
            "weights tied along a, none; accepted: one tied factor, or a Kronecker product",
        ),
        (
            lambda: structures.boft(24, block=4, factors=2).published,
            "parameters of boft stand for rotations; accepted: the structure itself, not its published form",
        ),
        (
            lambda: (of_chain(Chain(("4,6,6,1",))), of_chain(Chain(("1,6,6,4",)))),
            "several structures of a sum have the parameters 0; accepted: structures with different names, as in dyad",
        ),
        (lambda: (*structures.dyad(24, 24, blocks=4), "1,24,24,1"), "'1,24,24,1' in a sum; accepted: structures"),
    ],
)
def test_structures_without_a_method_are_refused_in_one_line(make: Callable[[], Any], message: str) -> None:
    with pytest.raises((LaunchError, PatternError)) as caught:
        factorize(torch.ones(24, 24), make())
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
