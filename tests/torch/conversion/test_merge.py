"""Neighbouring factors merged into denser ones: the same matrix, chosen by time; what cannot be merged."""

from itertools import pairwise, product
from typing import Any

import pytest

from ksgen import structures
from ksgen.errors import LaunchError, PatternError, SpecError
from ksgen.pattern import Chain, block_butterfly, monarch, square_dyadic
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from ksgen.torch import KSLinear, optimize  # noqa: E402
from ksgen.torch.conversion import merge  # noqa: E402
from ksgen.torch.conversion.times import Clock  # noqa: E402
from ksgen.torch.layer.tied import tie  # noqa: E402


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Times by number of factors in place of measured ones; an unlisted number takes 1000 us."""
    us: dict[Any, float] = {}

    def measured(layers: list[KSLinear], x: Any) -> list[tuple[float, str]]:
        us["x"] = tuple(x.shape)
        us["layers"] = [layer.chain for layer in layers]
        assert all(layer.is_frozen for layer in layers)
        return [(us.get(len(layer.chain), 1000.0), "") for layer in layers]

    monkeypatch.setattr(merge, "measured_us", measured)
    return us


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_the_fastest_candidate_has_the_same_matrix(
    timed: dict[Any, Any], layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge, "TIMED", 5)
    timed[3] = 10.0
    layer = KSLinear(square_dyadic(64), layout=layout, activation="relu").eval()
    found = optimize(layer, batch=5)
    assert len(found.chain) == 3
    assert timed["x"] == ((5, 64) if layout == "bsf" else (64, 5))
    assert timed["layers"][0] == layer.chain
    assert len({len(chain) for chain in timed["layers"]}) == 1 + merge.TIMED
    assert (found.activation, found.layout, found.training) == ("relu", layout, False)
    assert found.bias is not layer.bias
    torch.testing.assert_close(found.to_dense(), layer.to_dense())
    assert all(each.requires_grad for each in found.parameters())
    assert not any(each.requires_grad for each in optimize(layer.requires_grad_(False), batch=5).parameters())


def test_a_small_gain_is_no_reason(timed: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "TIMED", 5)
    timed |= {6: 100.0, 2: 96.0}
    layer = KSLinear(square_dyadic(64))
    assert optimize(layer, batch=5) is layer
    timed[2] = 94.0
    assert len(optimize(layer, batch=5).chain) == 2


def test_a_chain_gives_a_chain(timed: dict[Any, Any]) -> None:
    timed[1] = 1.0
    assert optimize(monarch(64, 64, 8, 8), batch=3) == Chain(("1,64,64,1",))
    timed[1] = 2000.0
    assert optimize(["8,8,8,1", "1,8,8,8"], batch=3) == monarch(64, 64, 8, 8)


EXCHANGED = {
    "boft": structures.boft(96, block=4, factors=4).chain,
    "boft of large blocks": structures.boft(64, block=8, factors=3).chain,
    "btt": structures.btt(24, 20, blocks=(5, 3), rank=2).chain,
    "gralora": structures.gralora(24, 15, blocks=3, rank=6).chain,
    "outputs": Chain(("8,8,8,1", "1,8,8,8@j.k")),
    "inputs and outputs": Chain(("l.i@4,2,2,1", "2,2,2,2", "1,3,2,4@j.k")),
    "both in one": Chain(("j.l.i@8,2,2,4", "8,3,4,2", "4,2,3,4@k.i.j", "16,3,2,1")),
    "butterfly of exchanged outputs": Chain((*square_dyadic(16).factors[:-1], "1,2,2,8@j.k")),
    "a train of three tensors": Chain(("1,6,2,12@j2:4.k2:2.j1:3.k1:3", "4,4,6,3@j.k1:2.i.k2:2", "6,4,8,1@k.i")),
}


@pytest.mark.parametrize("chain", EXCHANGED.values(), ids=list(EXCHANGED))
def test_merged_exchanges_have_the_same_matrix(chain: Chain) -> None:
    """All partitions: each is a chain whose product is that of the given one."""
    torch.manual_seed(0)
    layer = KSLinear(chain, dtype=torch.float64).requires_grad_(False)
    for cuts in product((False, True), repeat=len(chain) - 1):
        ends = [number + 1 for number, is_cut in enumerate(cuts) if is_cut] + [len(chain)]
        sizes = [end - begin for begin, end in pairwise([0, *ends])]
        if merge._merged_chain(chain, sizes) is not None:
            torch.testing.assert_close(merge._merged(layer, sizes).to_dense(), layer.to_dense())
        else:
            assert 1 < len(sizes) < len(chain)


class Largest(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator returns."""

    most = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        found = function(*given, **(named or {}))
        sizes = [each.numel() for each in tree_leaves(found) if isinstance(each, torch.Tensor)]
        self.most = max([self.most, *sizes])
        return found


@pytest.mark.parametrize(
    ("chain", "sizes"),
    [
        (square_dyadic(256), (2, 1, 1, 1, 1, 1, 1)),
        (Chain(("1,4,256,1", "1,4,4,1")), (2,)),
        (Chain(("1,4,4,1", "1,256,4,1")), (2,)),
    ],
)
def test_no_array_of_a_merge_is_larger_than_its_weights(chain: Chain, sizes: tuple[int, ...]) -> None:
    """The first chain is 256 x 256, and so would be an identity matrix for one of the others."""
    layer = KSLinear(chain, bias=False)
    with Largest() as seen:
        merged = merge._merged(layer, sizes)
    assert seen.most == max(each.numel() for each in merged.weights) == 1024
    torch.testing.assert_close(merged.to_dense(), layer.to_dense())


def test_a_merge_that_is_expected_to_be_far_slower_is_not_built() -> None:
    def us(kernel: Any) -> float:
        return float(kernel.pattern.weight_count)

    clock = Clock(None, "float32", 7, "a test", us, us)
    assert merge._partitions(monarch(1024, 1024, 32, 32), clock) == [[2]]  # 16 times as many weights
    assert merge._partitions(monarch(4096, 4096, 64, 64), clock) == []


def test_merged_levels_of_boft_stay_sparse(timed: dict[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Two neighbouring levels mix the digit u and two bits: blocks of twice the size, and twice the weights of one."""
    monkeypatch.setattr(merge, "TIMED", 3)
    timed[2] = 1.0
    layer = KSLinear(structures.boft(96, block=4, factors=4).chain).eval()
    for sizes, shapes in (((2, 2), [(12, 8, 8, 1)] * 2), ((3, 1), [(6, 16, 16, 1), (24, 4, 4, 1)])):
        assert [factor.shape for factor in merge._merged_chain(layer.chain, sizes)] == shapes
    found = optimize(layer, batch=5)
    assert len(found.chain) == 2
    torch.testing.assert_close(found.to_dense(), layer.to_dense())
    timed[1] = 0.5
    assert len(optimize(structures.btt(24, 20, blocks=(5, 3), rank=2).chain, batch=5)) == 1


def test_tied_factors_stay_tied(timed: dict[Any, Any]) -> None:
    layer = KSLinear.from_structure(structures.kronecker(64, 64, blocks=8), bias=False).eval()
    timed[1] = 1.0
    assert optimize(layer, batch=5) is layer
    layer = KSLinear([*square_dyadic(16), "4,3,4,1"], bias=False).eval()
    tie(layer.weights, ("", "", "", "", "a"))
    timed |= {2: 1.0}
    found = optimize(layer, batch=5)
    assert [tuple(each.shape) for each in found.weights.parameters()] == [(1, 16, 16, 1), (1, 3, 4, 1)]
    torch.testing.assert_close(found.to_dense(), layer.to_dense())
    assert all(each.requires_grad for each in found.parameters())
    assert len(timed["layers"]) == 1 + merge.TIMED
    assert all(chain[-1] == layer.chain[-1] for chain in timed["layers"])


def test_the_merges_that_are_timed_have_the_least_expected_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all partitions."""
    chain = block_butterfly(128, 4)

    def us(kernel: Any) -> float:
        return float(hash((kernel.pattern.shape, 7)) % 1000 + 1)

    found = merge._partitions(chain, Clock(None, "float32", 7, "a test", us, us))
    assert len(found) == merge.TIMED
    monkeypatch.setattr(merge, "TIMED", len(chain))
    longer = merge._partitions(chain, Clock(None, "float32", 7, "a test", us, us))
    assert longer[: len(found)] == found
    assert sorted(map(len, longer)) == list(range(1, len(chain)))
    totals = []
    for sizes in longer:
        count = len(sizes)
        every = [each for each in product(range(1, len(chain) + 1), repeat=count) if sum(each) == len(chain)]

        def total(each: Any) -> float:
            ends = [sum(each[: at + 1]) for at in range(len(each))]
            parts = [chain.factors[end - size : end] for end, size in zip(ends, each, strict=True)]
            return sum(us(merge.KernelSpec(merge.covering(part))) for part in parts)

        assert total(sizes) == min(map(total, every))
        totals.append(total(sizes))
    assert totals == sorted(totals)


def test_what_cannot_be_merged() -> None:
    with pytest.raises(LaunchError, match=r"optimize: got Sequential; accepted: a KSLinear or a chain, such as each"):
        optimize(torch.nn.Sequential(torch.nn.Linear(8, 8)))
    with pytest.raises(LaunchError, match="cannot be merged; accepted: a KSLinear that is not split, without"):
        optimize(KSLinear(square_dyadic(8), between="relu"))
    with pytest.raises(LaunchError, match="cannot be merged"):
        optimize(KSLinear(square_dyadic(8)).quantize("int8"))
    with pytest.raises(PatternError, match=r"8,8,8,1 gives 64 features, but the next pattern \(1,8,4,8\) takes 32"):
        optimize(["8,8,8,1", "1,8,4,8"])
    with pytest.raises(SpecError, match="batch=0; accepted"):
        optimize(square_dyadic(8), batch=0)
    with pytest.raises(SpecError, match="precision='half'; did you mean float16"):
        optimize(square_dyadic(8), precision="half")
