"""Tests of factorize: the nearest product if there is one, the proven bound if there is one, else a report."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf, nan, sqrt

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import pattern as patterns  # noqa: E402  (after the skip)
from ksgen import structures  # noqa: E402
from ksgen.errors import KsgenError, LaunchError  # noqa: E402
from ksgen.pattern import Chain, Pattern  # noqa: E402
from ksgen.reference import to_dense  # noqa: E402
from ksgen.torch.conversion.factorize import (  # noqa: E402
    LEAST_STEPS,
    STARTS,
    Factorization,
    errors_of,
    factorize,
    factorized,
)
from ksgen.torch.conversion.projection import drawn, product_of, refined, relative_error  # noqa: E402
from tests.support.exchange import stored_order  # noqa: E402


def chain_of(shapes: list[tuple[int, int, int, int]]) -> Chain:
    return Chain(tuple(Pattern(*shape) for shape in shapes))


PAIRS = [
    [(6, 64, 64, 1), (1, 768, 192, 2)],  # the paper's chains, up
    [(6, 64, 256, 1), (1, 128, 128, 3)],  # and down, which is not chainable
    [(4, 6, 5, 3), (2, 9, 12, 3)],  # blocks that no inner feature reaches
    [(3, 5, 4, 2), (5, 4, 3, 2)],  # not chainable; ranks 1, 2 and 3
    [(1, 20, 4, 1), (1, 4, 20, 1)],  # more terms than rows and columns
    [(1, 7, 11, 1), (1, 13, 7, 1)],  # low rank
]
LONGER = [
    patterns.square_dyadic(32),
    patterns.block_butterfly(32, 4),
    patterns.deformable_butterfly(48, [(4, 4), (5, 3), (4, 4)]),
    Chain((Pattern(8, 3, 2, 5), Pattern(4, 4, 6, 5), Pattern(2, 7, 8, 5))),
]
EXCHANGED = [  # between two factors, and around them
    Chain(("4,6,16,1@k1:2.i.k2", "2,16,12,1")),
    Chain(("l.i@4,6,16,1@k1:2.i.k2", "2,8,12,1@k.i")),
    Chain(("j.l.i@3,5,4,2@j.k.i", "5,4,6,1@k1:2.i.k2")),
    Chain(("j.l@1,6,4,3@k1:3.j.k2",)),
    Chain(("l.i@4,2,2,1", "2,2,2,2", "1,3,2,4@j.k")),
    structures.boft(32, block=4, factors=3).chain,
    Chain(("1,6,2,12@j2:4.k2:2.j1:3.k1:3", "4,4,6,3@j.k1:2.i.k2:2", "6,4,8,1@k.i")),  # a train of three tensors
]
NARROW = [  # not chainable either: 24 features to 6, and back
    chain_of([(6, 1, 4, 1), (1, 2, 2, 3), (2, 12, 3, 1)]),
    Chain(("3,2,8,1@k.i", "1,3,3,2", "2,12,3,1")),
]
NOT_CHAINABLE = [
    chain_of([(6, 4, 4, 1), (1, 8, 8, 3), (4, 6, 6, 1)]),
    Chain(("2,4,4,2@k.j.i", "4,4,4,1@k.i", "4,4,4,1")),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of several tests at once only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def random_matrix(chain: Chain, dtype: "torch.dtype" = torch.float64) -> "torch.Tensor":
    return torch.randn(chain.out_features, chain.in_features, dtype=dtype, generator=torch.Generator().manual_seed(1))


def random_product(chain: Chain, dtype: "torch.dtype") -> "torch.Tensor":
    generator = torch.Generator().manual_seed(2)
    return product_of([torch.randn(pattern.shape, dtype=dtype, generator=generator) for pattern in chain], chain)


def dense_product(found: Factorization) -> np.ndarray:
    """The product of a factorization, by the float64 reference."""
    product = np.eye(found.chain.in_features)
    for pattern, weights in zip(found.chain, found.weights, strict=True):
        product = to_dense(pattern, weights.double().numpy()) @ product
    return product


def least_error(matrix: np.ndarray, right: Pattern, left: Pattern) -> float:
    """The error of the nearest left @ right, from the rows and columns that each inner feature reaches."""
    columns_of_left = to_dense(left, np.ones(left.shape)).T != 0
    rows_of_right = to_dense(right, np.ones(right.shape)) != 0
    terms: dict[tuple[bytes, bytes], int] = {}
    for rows, columns in zip(columns_of_left, rows_of_right, strict=True):
        terms[rows.tobytes(), columns.tobytes()] = terms.get((rows.tobytes(), columns.tobytes()), 0) + 1
    rest, reached = matrix.copy(), np.zeros(matrix.shape, int)
    squared = 0.0
    for (rows, columns), rank in terms.items():
        block = np.ix_(np.frombuffer(rows, bool), np.frombuffer(columns, bool))
        squared += (np.linalg.svd(matrix[block], compute_uv=False)[rank:] ** 2).sum()
        rest[block] = 0
        reached[block] += 1
    assert reached.max() == 1  # the blocks share no entry
    return sqrt(squared + (rest**2).sum()) / float(np.linalg.norm(matrix))


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", [*map(chain_of, PAIRS), *EXCHANGED[:3]], ids=str)
def test_two_factors_are_the_nearest(chain: Chain) -> None:
    matrix = random_matrix(chain)
    found = factorize(matrix, chain)
    assert found.relative_error == pytest.approx(least_error(matrix.numpy(), *chain), abs=1e-12)
    assert found.relative_error == pytest.approx(
        float(np.linalg.norm(matrix.numpy() - dense_product(found)) / matrix.norm()), abs=1e-12
    )
    assert (found.method, found.bound, found.least_error) == ("projection", 1.0, found.relative_error)
    assert factorize(matrix.float(), list(chain)).relative_error == pytest.approx(found.relative_error, abs=1e-6)
    assert errors_of(matrix, [(structures.of_chain(chain),)]) == [pytest.approx(found.relative_error, abs=1e-12)]


@pytest.mark.parametrize("chain", [*map(chain_of, PAIRS), *LONGER, *EXCHANGED], ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-6), (torch.float64, 1e-14)], ids=str)
def test_a_product_comes_back(chain: Chain, dtype: "torch.dtype", most: float) -> None:
    matrix = random_product(chain, dtype)
    found = factorize(matrix, chain)
    assert found.relative_error < most
    assert found.least_error < most
    assert [each.shape for each in found.weights] == [torch.Size(pattern.shape) for pattern in chain]
    assert {each.dtype for each in found.weights} == {dtype}
    np.testing.assert_allclose(dense_product(found), matrix, rtol=0, atol=max(1e-12, 10 * most) * float(matrix.norm()))


def test_factors_that_exchange_are_balanced() -> None:
    """The column and the row of each inner feature are equally long, up to one factor for all."""
    chain = EXCHANGED[0]
    right, left = factorize(random_matrix(chain), chain).weights
    rows, columns = right.norm(dim=2).flatten(), left.norm(dim=1).flatten()
    ratios = columns / rows[stored_order(chain[0].outputs)]
    torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios))


@pytest.mark.parametrize("chain", [*LONGER, *EXCHANGED[4:]], ids=str)
def test_the_bound_of_longer_chains_holds(chain: Chain) -> None:
    """Against the nearest that is known: the product under the noise, and what refinement finds."""
    product, noise = random_product(chain, torch.float64), random_matrix(chain)
    for part in (0.01, 0.3, 3.0):
        matrix = product + part * noise * product.norm() / noise.norm()
        found = factorize(matrix, chain)
        assert (found.method, found.bound) == ("hierarchical", sqrt(len(chain) - 1))
        assert found.relative_error <= found.bound * float(part * product.norm() / matrix.norm())
    found, nearer = factorize(noise, chain), factorize(noise, chain, refine=20)
    assert found.least_error <= nearer.relative_error <= found.relative_error <= found.bound * nearer.relative_error


def test_refinement_brings_a_longer_chain_nearer() -> None:
    matrix = random_matrix(LONGER[0])
    assert factorize(matrix, LONGER[0], refine=20).relative_error < factorize(matrix, LONGER[0]).relative_error - 0.005


@pytest.mark.parametrize("chain", NOT_CHAINABLE, ids=str)
def test_a_chain_without_guarantee_is_named_and_refined(chain: Chain) -> None:
    matrix = random_product(chain, torch.float64)
    found = factorize(matrix, chain)
    assert (found.method, found.bound, found.least_error) == ("refinement", inf, 0.0)
    assert found.guarantee == "no guarantee, as the chain is not chainable"
    alone = [
        refined(matrix, drawn(matrix, chain, seed), LEAST_STEPS, lambda: None, chain) for seed in range(STARTS - 1)
    ]
    assert found.relative_error <= min(relative_error(matrix, each, chain) for each in alone)
    assert found.relative_error < 0.3 * relative_error(matrix, drawn(matrix, chain, 0), chain)
    assert factorize(matrix, chain, refine=2 * LEAST_STEPS).relative_error <= found.relative_error


@pytest.mark.parametrize("chain", NARROW, ids=str)
def test_the_least_possible_error_of_a_chain_is_reported(chain: Chain) -> None:
    """All pass six features: at best the error of rank 6, here to the digit, as the matrix is a product but for what
    has other ranks.
    """
    matrix = random_product(chain, torch.float64)
    columns, lengths, rows = torch.linalg.svd(matrix)
    lengths[6:] = 0.1 * lengths[5]
    found = factorize(noisy := columns @ lengths.diag() @ rows, chain)
    assert not chain.is_chainable
    assert found.least_error == pytest.approx(float(lengths[6:].norm() / noisy.norm()), rel=1e-9)
    assert found.bound == found.relative_error / found.least_error
    assert found.guarantee.startswith(
        "no guarantee, as the chain is not chainable; no product of its factors has an error below 0."
    )


@pytest.mark.parametrize("features", [64, 256, pytest.param(1024, marks=pytest.mark.slow)])
def test_products_of_long_chains_come_back_in_float32(features: int) -> None:
    chain = patterns.square_dyadic(features)
    matrix = random_product(chain, torch.float32)
    found = factorize(matrix, chain)
    assert found.relative_error < 5e-7
    wide = product_of([each.double() for each in found.weights])
    assert found.relative_error == pytest.approx(float((matrix - wide).norm() / matrix.norm()), rel=1e-3)


@pytest.mark.parametrize("chain", [Chain((Pattern(2, 4, 4, 2),)), chain_of(PAIRS[2]), LONGER[0]], ids=str)
@pytest.mark.parametrize(("dtype", "ends"), [(torch.float32, (-120, 128)), (torch.float64, (-1000, 1024))], ids=str)
def test_values_at_both_ends_of_their_type(chain: Chain, dtype: "torch.dtype", ends: tuple[int, int]) -> None:
    usual = random_product(chain, dtype)
    usual /= 2 * usual.abs().max()
    for power in ends:
        matrix = usual * 2.0 ** (power // 2) * 2.0 ** (power - power // 2)
        found = factorize(matrix, chain)
        assert found.relative_error < 5e-7
        assert all(each.isfinite().all() for each in found.weights)
        assert (
            relative_error(
                usual,
                [each * 2.0 ** (-power / len(chain) / 2) * 2.0 ** (-power / len(chain) / 2) for each in found.weights],
            )
            < 5e-7
        )


def test_the_papers_down_projection_is_named_and_the_nearest() -> None:
    found = factorize(random_matrix(chain_of(PAIRS[1])), PAIRS[1])
    assert found.guarantee == "the nearest product, though the chain is not chainable: its blocks have ranks 21 and 22"
    assert str(found).startswith("6,64,256,1 then 1,128,128,3: relative error 0.79")
    assert factorize(random_matrix(chain_of(PAIRS[0])), PAIRS[0]).guarantee == "the nearest product"


def test_one_factor_takes_the_entries_on_its_support() -> None:
    pattern = Pattern(3, 4, 5, 2)
    matrix = random_matrix(Chain((pattern,)))
    found = factorize(matrix, pattern)
    support = to_dense(pattern, np.ones(pattern.shape))
    np.testing.assert_array_equal(dense_product(found), matrix.numpy() * support)
    assert (found.method, found.bound) == ("support", 1.0)


@pytest.mark.parametrize("chain", [chain_of(PAIRS[1]), LONGER[0], NOT_CHAINABLE[0]], ids=str)
def test_zeros_and_blocks_of_zeros_and_of_small_rank(chain: Chain) -> None:
    zeros = factorize(torch.zeros(chain.out_features, chain.in_features), chain)
    assert zeros.relative_error == 0
    assert all(each.isfinite().all() for each in zeros.weights)
    matrix = torch.ones(chain.out_features, chain.in_features)
    matrix[: chain.out_features // 2] = 0
    found = factorize(matrix * 1e-30, chain)
    assert all(each.isfinite().all() for each in found.weights)
    assert found.relative_error < (1e-6 if found.method != "refinement" else 1)


@pytest.mark.parametrize("shapes", [PAIRS[0], [(1, 24, 96, 1), (1, 96, 24, 1)]], ids=str)  # blocks tall and wide
def test_weights_are_balanced_and_none_is_dead(shapes: list[tuple[int, int, int, int]]) -> None:
    chain = chain_of(shapes)
    matrix = torch.ones(chain.out_features, chain.in_features)  # of rank 1
    matrix[: chain.out_features // 2] = 0
    right, left = factorize(matrix, chain).weights
    assert float(right.norm()) == pytest.approx(float(left.norm()), rel=1e-4)
    lengths = torch.maximum(left.norm(dim=1).flatten(), right.norm(dim=2).flatten())
    assert lengths.min() > 1e-4 * lengths.max()
    assert (product_of([right, left]) - matrix).norm() < 1e-5 * matrix.norm()


ERRORS = [  # chains from 24 to 48 features, one per method and kind of pair
    ["2,24,12,1"],
    ["1,5,24,1", "1,48,5,1"],
    ["6,4,4,1", "1,24,12,2"],
    ["2,8,4,3", "4,12,12,1"],
    ["12,2,2,1", "6,4,2,2", "1,6,6,8"],
    ["2,8,4,3", "4,12,12,1", "1,6,6,8"],
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "threads"), [(torch.float32, 2), (torch.float64, 2), (torch.bfloat16, 1)], ids=str)
def test_errors_of_several_chains_without_their_weights(dtype: "torch.dtype", threads: int) -> None:
    """They are those of the factorizations, also for values near overflow, and in any number of threads."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    weight, chains, steps = (1e30 * torch.randn(48, 24)).to(dtype), list(map(Chain.read, ERRORS)), list[int]()
    forms = [(structures.of_chain(chain),) for chain in chains]
    found = errors_of(weight, forms, lambda: steps.append(1))
    expected = [factorize(weight, chain) for chain in chains]
    assert {each.method for each in expected} == {"support", "projection", "hierarchical", "refinement"}
    assert found == pytest.approx([each.relative_error for each in expected], rel=1e-6)
    assert (len(steps), torch.get_num_threads()) == (len(chains), threads)
    assert errors_of(torch.zeros(48, 24), forms[:3]) == [0, 0, 0]
    with pytest.raises(LaunchError, match=r"weight\[0, 0\]=nan; accepted: finite numbers"):
        errors_of(torch.full((48, 24), nan), forms)


def test_errors_of_sums_and_of_tied_weights_are_those_of_their_factorizations() -> None:
    weight = torch.randn(48, 24)
    forms = [structures.dyad(24, 48, blocks=4), (structures.kronecker(24, 48, blocks=4),)]
    expected = [factorized(weight, form).relative_error for form in forms]
    assert errors_of(weight, forms) == pytest.approx(expected, rel=1e-6)


def test_sixteen_bits_are_computed_in_float32() -> None:
    matrix = random_matrix(chain_of(PAIRS[0]), torch.float32).bfloat16()
    found = factorize(matrix, PAIRS[0])
    assert found.weights[0].dtype == torch.float32
    assert found.relative_error == factorize(matrix.float(), PAIRS[0]).relative_error


def test_threads_are_as_before() -> None:
    torch.set_num_threads(threads := 2)
    factorize(random_matrix(chain_of(PAIRS[0])), PAIRS[0], progress=True)
    assert torch.get_num_threads() == threads


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU")
@pytest.mark.parametrize("chain", [*map(chain_of, PAIRS), *LONGER], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gpu_finds_what_the_processor_does(chain: Chain, dtype: "torch.dtype") -> None:
    matrix = random_matrix(chain, dtype)
    there, here = factorize(matrix.cuda(), chain), factorize(matrix, chain)
    assert there.weights[0].is_cuda
    assert there.relative_error == pytest.approx(here.relative_error, abs=1e-5)
    assert there.least_error == pytest.approx(here.least_error, abs=1e-5)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (np.ones((384, 1536)), {}, "factorize: weight is ndarray; accepted: a torch.Tensor"),
        (torch.ones(384, 1536, dtype=torch.int32), {}, "factorize: weight is torch.int32; accepted: a torch.Tensor of "
                                                       "real"),
        (torch.ones(1536, 384), {}, "weight has shape (1536, 384); 6,64,256,1 then 1,128,128,3 wants (out_features, "
                                    "in_features) = (384"),
        (torch.ones(384, 1536), {"refine": -1}, "refine=-1; accepted: a number of steps, from 0 up"),
        (torch.ones(384, 1536).to_sparse(), {},
            "factorize: weight is a torch.sparse_coo tensor; accepted: a dense one"),
        (torch.ones(384, 1536, device="meta"), {}, "factorize: weight is on the meta device, so that it has no "
                                                   "values; accepted:"),
        (torch.full((384, 1536), torch.nan), {}, "weight[0, 0]=nan; accepted: finite numbers"),
    ],
)  # fmt: skip
def test_mistakes(weight: object, options: dict[str, int], message: str) -> None:
    with pytest.raises(KsgenError) as caught:
        factorize(weight, PAIRS[1], **options)
    assert str(caught.value).startswith(message)


def test_seconds_that_others_took_are_marked() -> None:
    found = Factorization(chain_of([(1, 4, 4, 1)]), (), 0.25, 0.25, 1.0, "projection", "none", 0.5)
    assert str(found) == "1,4,4,1: relative error 0.25 by projection in 0.5 s; none"
    assert " in 0.5 s? (other processes took 60% of the CPU time); " in str(
        replace(found, doubt="other processes took 60% of the CPU time")
    )
