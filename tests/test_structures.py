"""Structures of the literature: their chains are the matrices that the papers define, and checkpoints come and go."""

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from ksgen import reference, structures
from ksgen.errors import LaunchError, PatternError
from ksgen.structures import Structure

Array = NDArray[Any]
State = Mapping[str, Array]


def of_blast(state: State) -> Array:
    """Block (i, j) is B_i diag(D_ij) C_j."""
    left, inner, right = state["B"], state["D"], state["C"]
    return np.block([[left[i] @ np.diag(inner[i, j]) @ right[j] for j in range(len(right))] for i in range(len(left))])


def diagonal(blocks: Array) -> Array:
    rows, columns = blocks.shape[1:]
    found = np.zeros((len(blocks) * rows, len(blocks) * columns))
    for at, block in enumerate(blocks):
        found[at * rows : (at + 1) * rows, at * columns : (at + 1) * columns] = block
    return found


def shuffle(rows: int, columns: int) -> Array:
    """Matrix that turns a vector, read as rows x columns, into columns x rows."""
    return np.eye(rows * columns)[np.arange(rows * columns).reshape(rows, columns).T.ravel()]


def of_monarch(state: State) -> Array:
    """Diagonal blocks, a permutation before and after the second ones."""
    first, second = state["blkdiag1"], state["blkdiag2"]
    blocks, outputs, inner = second.shape
    return shuffle(blocks, outputs) @ diagonal(second) @ shuffle(inner, blocks) @ diagonal(first)


def of_btt(state: State) -> Array:
    """y[n, o] = sum over m, r, i of x[m, i] W1[m, i, (n, r)] W2[n, (m, r), o]."""
    first, second = state["W1"], state["W2"]
    columns, inputs, _ = first.shape
    rows, _, outputs = second.shape
    first, second = first.reshape(columns, inputs, rows, -1), second.reshape(rows, columns, -1, outputs)
    return np.einsum("minr,nmro->nomi", first, second).reshape(rows * outputs, columns * inputs)


def of_gralora(state: State) -> Array:
    """Block (n, m) is the product of its own A and B, of rank / k columns."""
    down, up = state["gralora_A"], state["gralora_B"]
    k, _, rank = down.shape
    own = rank // k
    return np.block(
        [[(down[m][:, n * own : (n + 1) * own] @ up[n][m * own : (m + 1) * own]).T for m in range(k)] for n in range(k)]
    )


STRUCTURES: dict[str, tuple[Structure, Callable[[State], Array]]] = {
    "blast": (structures.blast(24, 20, blocks=(5, 3), rank=7), of_blast),
    "blast of square blocks": (structures.blast(12, 8, blocks=4, rank=1), of_blast),
    "monarch": (structures.monarch(24, 12, blocks=3), of_monarch),
    "monarch that widens": (structures.monarch(12, 30, blocks=6), of_monarch),
    "btt": (structures.btt(24, 20, blocks=(5, 3), rank=2), of_btt),
    "btt of square blocks": (structures.btt(12, 8, blocks=4, rank=1), of_btt),
    "gralora": (structures.gralora(24, 15, blocks=3, rank=6), of_gralora),
    "oft": (structures.oft(12, block=3), lambda state: diagonal(state["R"].transpose(0, 2, 1))),
    "low rank": (structures.low_rank(9, 14, rank=4), lambda state: state["B"] @ state["A"]),
    "block dense": (
        structures.block_dense(12, 10, blocks=3, rank=6),
        lambda state: state["linear"] @ diagonal(state["blkdiag"]),
    ),
}
each_structure = pytest.mark.parametrize(("structure", "matrix_of"), list(STRUCTURES.values()), ids=list(STRUCTURES))


def drawn(structure: Structure) -> dict[str, Array]:
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape) for name, shape in structure.shapes.items()}


@each_structure
def test_its_chain_is_the_matrix_of_the_paper(structure: Structure, matrix_of: Callable[[State], Array]) -> None:
    state = drawn(structure)
    factors = zip(structure.chain, structure.from_state(state), strict=True)
    product = reduce(lambda after, own: own @ after, (reference.to_dense(*each) for each in factors))
    assert product.shape == (structure.chain.out_features, structure.chain.in_features)
    np.testing.assert_allclose(product, matrix_of(state), rtol=1e-12, atol=1e-12)


@each_structure
def test_parameters_come_back(structure: Structure, matrix_of: Callable[[State], Array]) -> None:
    state = drawn(structure)
    back = structure.to_state(structure.from_state(state))
    assert back.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(back[name], value)


def test_a_state_is_taken_exactly() -> None:
    structure, _ = STRUCTURES["blast"]
    state = drawn(structure)
    with pytest.raises(LaunchError, match=r"blast: got B, C; B, C, D are needed"):
        structure.from_state({name: value for name, value in state.items() if name != "D"})
    with pytest.raises(LaunchError, match=r"blast: got B, C, D, bias; B, C, D are needed"):
        structure.from_state({**state, "bias": np.zeros(20)})
    with pytest.raises(LaunchError, match=r"blast: got no parameters; B, C, D are needed"):
        structure.from_state({})
    with pytest.raises(LaunchError, match=r"blast: got D of shape \(3, 5, 7\); \(5, 3, 7\) is needed"):
        structure.from_state({**state, "D": np.zeros((3, 5, 7))})
    with pytest.raises(LaunchError, match=r"blast: got weights of shapes \[\(3, 7, 8, 1\)\]; \[\(3, 7, 8, 1\), "):
        structure.to_state(structure.from_state(state)[:1])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: structures.blast(24, 20, blocks=5, rank=7), "blocks=5; accepted: a divisor of in_features=24"),
        (lambda: structures.blast(24, 20, blocks=(3, 4), rank=7), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.blast(24, 20, blocks=4, rank=0), "rank=0; accepted: a whole number from 1"),
        (lambda: structures.blast(24, 20, blocks=(4, 4, 4), rank=1), r"blocks=\(4, 4, 4\); accepted: a whole number"),
        (lambda: structures.monarch(24, 20, blocks=3), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.monarch(24, 20, blocks=0), "blocks=0; accepted: a whole number from 1"),
        (lambda: structures.btt(24, 20, blocks=(3, 4), rank=1), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.btt(24, 20, blocks=4, rank=0), "rank=0; accepted: a whole number from 1"),
        (lambda: structures.gralora(24, 20, blocks=4, rank=6), "blocks=4; accepted: a divisor of rank=6"),
        (lambda: structures.oft(24, block=5), "block=5; accepted: a divisor of features=24"),
        (lambda: structures.low_rank(8, 8, rank=9), "rank=9 for 8 to 8 features; accepted: 1 to 8"),
        (lambda: structures.block_dense(24, 20, blocks=3, rank=8), "blocks=3; accepted: a divisor of rank=8"),
    ],
)
def test_sizes_that_do_not_fit(make: Callable[[], Structure], message: str) -> None:
    with pytest.raises(PatternError, match=message):
        make()


def test_initial_values_of_btt_have_the_authors_scale() -> None:
    """Maximal updates: sqrt(min(inputs, outputs)) / inputs of each core, whose matrices are those of its blocks."""
    structure = structures.btt(64, 32, blocks=(2, 4), rank=3)
    assert structure.shapes == {"W1": (4, 16, 6), "W2": (2, 12, 16)}
    assert structure.scales == {"W1": pytest.approx(6**0.5 / 16), "W2": pytest.approx(12**0.5 / 12)}
