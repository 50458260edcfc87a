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


def of_butterfly(state: State) -> Array:
    """Factor t maps each pair of features, or of blocks of features, at distance 2^t by its own 2 x 2 entries."""
    levels = state["twiddle"][0, 0]
    levels = levels.reshape(*levels.shape, *(() if levels.ndim > 4 else (1, 1)))
    pairs, block = levels.shape[1], levels.shape[-1]
    whole = np.eye(2 * pairs * block)
    for level, entries in enumerate(levels):
        factor = np.zeros((2 * pairs, block, 2 * pairs, block))
        for number, pair in enumerate(entries):
            first = number // 2**level * 2 ** (level + 1) + number % 2**level
            for row, column in np.ndindex(2, 2):
                factor[first + row * 2**level, :, first + column * 2**level] = pair[row, column]
        whole = factor.reshape(whole.shape) @ whole
    return whole


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


def of_boft(state: State) -> Array:
    """Each level is P D P^T, where P moves odd half blocks behind even ones; y = x M_m ... M_0."""
    whole = np.eye(state["R0"].shape[0] * state["R0"].shape[1])
    for level in range(len(state)):
        blocks = state[f"R{level}"]
        half = blocks.shape[1] // 2
        order = np.arange(len(whole)).reshape(-1, 2**level, 2, half).transpose(0, 2, 1, 3).ravel()
        whole = diagonal(blocks)[np.ix_(order, order)] @ whole
    return whole.T


def of_gs(state: State) -> Array:
    """P^T L P R. P moves element i of n to place (i mod k) n/k + floor(i / k), with k blocks in L."""

    def moved(n: int) -> Array:
        i = np.arange(n)
        return np.eye(n)[:, np.argsort(i % blocks * (n // blocks) + i // blocks)].T

    left, right = state["gsoft_L"], state["gsoft_R"]
    blocks, outputs, inputs = left.shape
    return moved(blocks * outputs).T @ diagonal(left) @ moved(blocks * inputs) @ diagonal(right)


STRUCTURES: dict[str, tuple[Structure, Callable[[State], Array]]] = {
    "blast": (structures.blast(24, 20, blocks=(5, 3), rank=7), of_blast),
    "blast of square blocks": (structures.blast(12, 8, blocks=4, rank=1), of_blast),
    "monarch": (structures.monarch(24, 12, blocks=3), of_monarch),
    "monarch that widens": (structures.monarch(12, 30, blocks=6), of_monarch),
    "butterfly": (structures.butterfly(16), of_butterfly),
    "butterfly of one factor": (structures.butterfly(2), of_butterfly),
    "butterfly of blocks": (structures.butterfly(24, block=3), of_butterfly),
    "btt": (structures.btt(24, 20, blocks=(5, 3), rank=2), of_btt),
    "btt of square blocks": (structures.btt(12, 8, blocks=4, rank=1), of_btt),
    "gralora": (structures.gralora(24, 15, blocks=3, rank=6), of_gralora),
    "oft": (structures.oft(12, block=3), lambda state: diagonal(state["R"].transpose(0, 2, 1))),
    "boft of one factor": (structures.boft(12, block=6, factors=1), of_boft),
    "boft of two factors": (structures.boft(24, block=4, factors=2), of_boft),
    "boft of four factors": (structures.boft(96, block=4, factors=4), of_boft),
    "gs": (structures.gs(24, 20, blocks=(4, 3), inner=12, orthogonal=False), of_gs),
    "gs of square blocks": (structures.gs(24, 24, blocks=4, orthogonal=False), of_gs),
    "kronecker by B first": (structures.kronecker(24, 20, (5, 3)), lambda state: np.kron(state["A"], state["B"])),
    "kronecker by A first": (structures.kronecker(24, 20, (2, 4)), lambda state: np.kron(state["A"], state["B"])),
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
def test_weights_lie_in_memory_as_launchers_need_them(
    structure: Structure, matrix_of: Callable[[State], Array]
) -> None:
    weights = structure.from_state(drawn(structure))
    assert [each.flags.c_contiguous and each.flags.writeable for each in weights] == [True] * len(structure.chain)


@each_structure
def test_parameters_come_back(structure: Structure, matrix_of: Callable[[State], Array]) -> None:
    state = drawn(structure)
    back = structure.to_state(structure.from_state(state))
    assert back.keys() == state.keys()
    for name, value in state.items():
        np.testing.assert_array_equal(back[name], value)


def test_parameters_of_gsoft_become_rotations_and_come_back() -> None:
    structure = structures.gs(24, 24, blocks=4)
    state = drawn(structure)
    assert {name: each.shape for name, each in state.items()} == {"gsoft_R": (4, 6, 6), "gsoft_L": (4, 6, 6)}
    skew = {name: (each - each.transpose(0, 2, 1)) / 2 for name, each in state.items()}
    blocks = {name: (np.eye(6) + each) @ np.linalg.inv(np.eye(6) - each) for name, each in skew.items()}
    weights = structure.from_state(state)
    factors = (reference.to_dense(*each) for each in zip(structure.chain, weights, strict=True))
    product = reduce(lambda after, own: own @ after, factors)
    np.testing.assert_allclose(product, of_gs(blocks), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(product @ product.T, np.eye(24), rtol=0, atol=1e-12)
    back = structure.to_state(weights)
    for name, each in skew.items():
        np.testing.assert_allclose(back[name], each, rtol=1e-9, atol=1e-9)
    zeros = structure.from_state({name: 0 * each for name, each in state.items()})
    for number, scale in ((0, 2), (1, -1)):  # not orthogonal; all eigenvalues are -1
        damaged = [scale * each if at == number else each for at, each in enumerate(zeros)]
        with pytest.raises(LaunchError, match=f"gs: gsoft_{'RL'[number]} has blocks that are no rotations; accepted: "):
            structure.to_state(damaged)
    with pytest.raises(LaunchError, match=r"^rotations of complex128; accepted: real numbers$"):
        structure.from_state({name: each + 0j for name, each in state.items()})


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
    with pytest.raises(LaunchError, match=r"blast: D=\[1\]; accepted: an array or a tensor$"):
        structure.from_state({**state, "D": [1]})
    for no_mapping in (list(state.values()), list(state), list(state.items()), state["D"], None):
        with pytest.raises(LaunchError, match=r"^blast: state=.*; accepted: a mapping of names to arrays or tensors$"):
            structure.from_state(no_mapping)  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match=r"blast: got weights of shapes \[\(3, 7, 8, 1\)\]; \[\(3, 7, 8, 1\), "):
        structure.to_state(structure.from_state(state)[:1])


def test_a_kronecker_product_is_applied_in_the_order_with_fewer_multiplications() -> None:
    orders = {blocks: structures.kronecker(24, 20, blocks) for blocks in ((5, 3), (2, 4))}
    assert [str(each.chain) for each in orders.values()] == ["3,4,8,1 then 1,5,3,4", "1,2,4,6 then 2,10,6,1"]
    for (rows, columns), structure in orders.items():
        inputs, outputs = 24 // columns, 20 // rows
        b_first = columns * outputs * inputs + rows * columns * outputs
        a_first = rows * columns * inputs + rows * outputs * inputs
        assert structure.chain.weight_count == min(b_first, a_first) < max(b_first, a_first)


def test_tied_weights_that_differ_are_no_parameter() -> None:
    structure, _ = STRUCTURES["kronecker by B first"]
    first, second = structure.from_state(drawn(structure))
    first[:, 1] = np.nan
    assert np.isnan(structure.to_state([first, second])["B"][1]).all()  # equal, though NaN differs from itself
    first[:, 1] = 0
    for number in (0, 1):  # NaN in the slice, or in a repetition of it
        first[:, 0, 0, 0] = 0
        first[number, 0, 0, 0] = np.nan
        with pytest.raises(
            LaunchError, match="kronecker: weights of B differ along a of 3,4,8,1, where they are tied; equ"
        ):
            structure.to_state([first, second])
    first[:], second[0, 4, 2, 3] = first[:1], 0
    with pytest.raises(
        LaunchError, match="kronecker: weights of A differ along d of 1,5,3,4, where they are tied; equ"
    ):
        structure.to_state([first, second])


def of_dyad(state: State, variant: str) -> Array:
    """A matrix of diagonal blocks, and one of diagonal blocks that reads, or stores, every k-th feature in turn."""
    k, outputs, inputs = state["wl"].shape
    before = shuffle(inputs, k) if variant in ("it", "dt") else np.eye(k * inputs)
    after = shuffle(k, outputs) if variant in ("ot", "dt") else np.eye(k * outputs)
    return diagonal(state["wl"]) + after @ diagonal(state["wu"]) @ before


@pytest.mark.parametrize("variant", ["it", "ot", "dt"])
def test_dyad_is_a_sum_of_two_chains(variant: structures.DyadVariant) -> None:
    pair = structures.dyad(24, 20, blocks=4, variant=variant)
    random = np.random.default_rng(0)
    state = {name: random.standard_normal(shape) for each in pair for name, shape in each.shapes.items()}
    assert {name: each.shape for name, each in state.items()} == {"wl": (4, 5, 6), "wu": (4, 5, 6)}
    own = [each.from_state({name: state[name] for name in each.shapes}) for each in pair]
    found = sum(reference.to_dense(each.chain[0], weights) for each, (weights,) in zip(pair, own, strict=True))
    np.testing.assert_allclose(found, of_dyad(state, variant), rtol=1e-12, atol=1e-12)
    back = [each.to_state(weights) for each, weights in zip(pair, own, strict=True)]
    for name, each in (back[0] | back[1]).items():
        np.testing.assert_array_equal(each, state[name])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: structures.blast(24, 20, blocks=5, rank=7), "blocks=5; accepted: a divisor of in_features=24"),
        (lambda: structures.blast(24, 20, blocks=(3, 4), rank=7), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.blast(24, 20, blocks=4, rank=0), "rank=0; accepted: a whole number from 1"),
        (lambda: structures.blast(24, 20, blocks=(4, 4, 4), rank=1), r"blocks=\(4, 4, 4\); accepted: a whole number"),
        (lambda: structures.monarch(24, 20, blocks=3), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.monarch(24, 20, blocks=0), "blocks=0; accepted: a whole number from 1"),
        (lambda: structures.butterfly(12), "features=12; accepted: a power of two from 2 up"),
        (lambda: structures.butterfly(24, block=5), "features=24; accepted: block=5 times a power of two from 2 up"),
        (lambda: structures.oft(24, block=4, terms=3), "terms=3; accepted: 4 or more, or None"),
        (lambda: structures.btt(24, 20, blocks=(3, 4), rank=1), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.btt(24, 20, blocks=4, rank=0), "rank=0; accepted: a whole number from 1"),
        (lambda: structures.gralora(24, 20, blocks=4, rank=6), "blocks=4; accepted: a divisor of rank=6"),
        (lambda: structures.oft(24, block=5), "block=5; accepted: a divisor of features=24"),
        (lambda: structures.boft(24, block=5, factors=1), "block=5; accepted: a divisor of features=24"),
        (lambda: structures.boft(24, block=4, factors=3), "factors=3; accepted: 1 to 2 for 6 blocks of 4"),
        (lambda: structures.boft(24, block=3, factors=2), "factors=2; accepted: 1 to 1 for 8 blocks of 3"),
        (lambda: structures.boft(24, block=4, factors=0), "factors=0; accepted: a whole number from 1"),
        (lambda: structures.kronecker(24, 20, (3, 4)), "blocks=3; accepted: a divisor of out_features=20"),
        (lambda: structures.kronecker(24, 20, 5), "blocks=5; accepted: a divisor of in_features=24"),
        (lambda: structures.dyad(24, 20, blocks=5), "blocks=5; accepted: a divisor of in_features=24"),
        (lambda: structures.dyad(24, 20, 4, variant="io"), "variant='io'; accepted: it, ot, dt"),  # type: ignore[arg-type]
        (lambda: structures.dyad(24, 20, 4, variant=[]), r"variant=\[\]; accepted: it, ot, dt"),  # type: ignore[arg-type]
        (lambda: structures.gs(24, 24, blocks=5), "blocks=5; accepted: a divisor of in_features=24"),
        (lambda: structures.gs(24, 24, 4, inner=18), "blocks=4; accepted: a divisor of inner=18"),
        (lambda: structures.gs(24, 20, (5, 4)), "orthogonal=True for 24 to 20 to 20 features; accepted: equal numbers"),
        (lambda: structures.gs(24, 24, 4, orthogonal=1), "orthogonal=1; accepted: True or False"),  # type: ignore[arg-type]
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


# by the names in the repositories of BTT and of block-dense layers, and in PEFT
RENAMED: dict[str, dict[str, str]] = {
    "btt": {"op_params.0": "W1", "op_params.1": "W2"},
    "kronecker by B first": {"lokr_w1": "A", "lokr_w2": "B"},
    "kronecker by A first": {"lokr_w1": "A", "lokr_w2": "B"},
    "low rank": {"lora_A.weight": "A", "lora_B.weight": "B"},
    "block dense": {"blkdiag": "blkdiag", "lr": "linear"},
}


@pytest.mark.parametrize("name", RENAMED)
def test_states_come_and_go_by_the_authors_names(name: str) -> None:
    structure, matrix_of = STRUCTURES[name]
    own, names = drawn(structure), RENAMED[name]
    state = {theirs: own[ours] for theirs, ours in names.items()}
    weights = structure.from_state(state)
    product = reduce(lambda after, each: each @ after, map(reference.to_dense, structure.chain, weights))
    np.testing.assert_allclose(product, matrix_of(own), rtol=1e-12, atol=1e-12)
    back = structure.to_state(weights, names=(*state, "bias"))
    assert back.keys() == state.keys()
    for theirs, value in state.items():
        np.testing.assert_array_equal(back[theirs], value)
    *_, last = state
    accepted = f"{', '.join(sorted(own))} are needed, or {', '.join(sorted(state))}"
    rest = {theirs: value for theirs, value in state.items() if theirs != last}
    with pytest.raises(LaunchError, match=f"got {', '.join(rest)}; {accepted}"):
        structure.from_state(rest)
    with pytest.raises(LaunchError, match=f"got bias, {', '.join(sorted(state))}; {accepted}"):
        structure.from_state({**state, "bias": state[last]})
    with pytest.raises(LaunchError, match=rf"got {last} of shape \(1,\); \(\d+.* is needed"):
        structure.from_state({**state, last: np.ones(1)})
    with pytest.raises(LaunchError, match=rf"names=\('bias',\); {accepted}"):
        structure.to_state(weights, names=["bias"])


def skewed(vectors: Array, size: int) -> Array:
    """Matrices S with these entries above the diagonal, row by row."""
    found = np.zeros((len(vectors), size, size))
    places = [(row, column) for row in range(size) for column in range(row + 1, size)]
    for at, (row, column) in enumerate(places):
        found[:, row, column], found[:, column, row] = vectors[:, at], -vectors[:, at]
    return found


@pytest.mark.parametrize("terms", [None, 4, 5, 8])
def test_vectors_of_pefts_oft_become_rotations_and_come_back(terms: int | None) -> None:
    """y = x R, with R = (I - S)(I + S)^-1, or a series in S that PEFT computes in its stead."""
    structure, size = structures.oft(20, block=5, terms=terms), 5
    state = {"oft_R.weight": 0.1 * np.random.default_rng(0).standard_normal((4, 10))}
    skew, identity = skewed(state["oft_R.weight"], size), np.eye(size)
    if terms is None:
        blocks = (identity - skew) @ np.linalg.inv(identity + skew)
    else:
        powers = [identity, *(np.linalg.matrix_power(skew, power) for power in range(1, terms))]
        blocks = powers[0] + 2 * sum(powers[1:-1]) + powers[-1]
    weights = structure.from_state(state)
    np.testing.assert_allclose(weights[0][..., 0], blocks.transpose(0, 2, 1), rtol=1e-12, atol=1e-12)
    back = structure.to_state(weights, names=state)
    np.testing.assert_allclose(back["oft_R.weight"], state["oft_R.weight"], rtol=1e-9, atol=1e-9)
    assert structure.to_state(weights).keys() == {"R"}
    with pytest.raises(LaunchError, match=r"got oft_R.weight of shape \(4, 5, 5\); \(4, 10\) is needed"):
        structure.from_state({"oft_R.weight": skew})
    accepted = f"values of PEFT's series of {terms} terms for an S with small entries"
    accepted = "rotations without" if terms is None else accepted
    with pytest.raises(LaunchError, match=f"oft: oft_R.weight has blocks that are no rotations; accepted: {accepted}"):
        structure.to_state([3 * weights[0]], names=state)


@pytest.mark.parametrize("factors", [1, 3])
def test_the_parameter_of_pefts_boft_becomes_rotations_and_comes_back(factors: int) -> None:
    structure = structures.boft(48, block=4, factors=factors)
    state = {"boft_R": np.random.default_rng(0).standard_normal((factors, 12, 4, 4))}
    skew, identity = (state["boft_R"] - state["boft_R"].swapaxes(2, 3)) / 2, np.eye(4)
    blocks = (identity - skew) @ np.linalg.inv(identity + skew)
    wanted = of_boft({f"R{level}": blocks[level] for level in range(factors)})
    weights = structure.from_state({**state, "boft_s": np.ones((7, 1))})
    factor_matrices = map(reference.to_dense, structure.chain, weights)
    product = reduce(lambda after, each: each @ after, factor_matrices)
    np.testing.assert_allclose(product, wanted, rtol=1e-12, atol=1e-12)
    back = structure.to_state(weights, names=(*state, "boft_s"))
    assert back.keys() == state.keys()
    np.testing.assert_allclose(back["boft_R"], skew, rtol=1e-9, atol=1e-9)
    assert len(structure.from_state(state)) == factors
    with pytest.raises(
        LaunchError, match="boft: got boft_s that is not 1, which scales outputs of the adapted layer; "
    ):
        structure.from_state({**state, "boft_s": np.array([[1.0], [2.0]])})
    with pytest.raises(LaunchError, match=r"boft: boft_s has shape \(3, 5, 7\); \(outputs of the adapted layer, 1\)"):
        structure.from_state({**state, "boft_s": np.ones((3, 5, 7))})
    with pytest.raises(LaunchError, match=r"boft: got boft_s; R0.* needed, or boft_R$"):
        structure.from_state({"boft_s": np.ones((7, 1))})


def test_initial_scales_keep_the_mean_square_of_features_or_are_zero() -> None:
    blast, block_dense = structures.blast(24, 20, blocks=(5, 3), rank=7), structures.block_dense(12, 10, 3, rank=6)
    assert blast.scales == {"C": pytest.approx(8**-0.5), "D": pytest.approx(3**-0.5), "B": pytest.approx(7**-0.5)}
    assert block_dense.scales == {"blkdiag": pytest.approx(4**-0.5), "linear": pytest.approx(6**-0.5)}
    assert structures.butterfly(16).scales == {"twiddle": pytest.approx(2**-0.5)}
    assert structures.butterfly(24, block=3).scales == {"twiddle": pytest.approx(6**-0.5)}
    assert structures.gralora(24, 15, blocks=3, rank=6).scales == {"gralora_B": 0}
    for each in (structures.monarch(24, 12, 3), structures.low_rank(9, 14, 4), structures.kronecker(24, 20, (5, 3))):
        assert (each.scales, each.init) == ({}, "")  # as any `KSLinear`
    assert [each.init for each in (structures.oft(12, 3), structures.boft(24, 4, 2))] == ["identity"] * 2
