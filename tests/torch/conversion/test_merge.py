"""Neighbouring factors merged into denser ones: the same matrix, chosen by time; what cannot be merged."""

from itertools import product
from typing import Any

import pytest

from ksgen.errors import LaunchError, PatternError, SpecError
from ksgen.pattern import Chain, block_butterfly, monarch, square_dyadic
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

from ksgen.torch import KSLinear, optimize  # noqa: E402
from ksgen.torch.conversion import merge  # noqa: E402
from ksgen.torch.conversion.times import Clock  # noqa: E402


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


def test_the_merges_that_are_timed_have_the_least_expected_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all partitions."""
    chain = block_butterfly(128, 4)

    def us(kernel: Any, batch: int) -> float:
        return float(hash((kernel.pattern.shape, batch)) % 1000 + 1)

    found = merge._partitions(chain, Clock(None, "a test", us, us), "float32", 7)
    assert len(found) == merge.TIMED
    monkeypatch.setattr(merge, "TIMED", len(chain))
    longer = merge._partitions(chain, Clock(None, "a test", us, us), "float32", 7)
    assert longer[: len(found)] == found
    assert sorted(map(len, longer)) == list(range(1, len(chain)))
    totals = []
    for sizes in longer:
        count = len(sizes)
        every = [each for each in product(range(1, len(chain) + 1), repeat=count) if sum(each) == len(chain)]

        def total(each: Any) -> float:
            ends = [sum(each[: at + 1]) for at in range(len(each))]
            parts = [chain.factors[end - size : end] for end, size in zip(ends, each, strict=True)]
            return sum(us(merge.KernelSpec(merge.covering(part)), 7) for part in parts)

        assert total(sizes) == min(map(total, every))
        totals.append(total(sizes))
    assert totals == sorted(totals)


def test_what_cannot_be_merged() -> None:
    with pytest.raises(LaunchError, match="cannot be merged; accepted: a KSLinear that is not split, without"):
        optimize(KSLinear(square_dyadic(8), between="relu"))
    with pytest.raises(LaunchError, match="cannot be merged"):
        optimize(KSLinear(square_dyadic(8)).quantize("int8"))
    with pytest.raises(PatternError, match=r"1,8,8,8@j.k exchanges outputs; accepted for a chain to merge"):
        optimize(["8,8,8,1", "1,8,8,8@j.k"])
    with pytest.raises(SpecError, match="batch=0; accepted"):
        optimize(square_dyadic(8), batch=0)
    with pytest.raises(SpecError, match="precision='half'; did you mean float16"):
        optimize(square_dyadic(8), precision="half")
