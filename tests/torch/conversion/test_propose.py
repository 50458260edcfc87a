"""propose: what is listed, in which order, what the table shows, and what is refused."""

from collections import Counter
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.errors import KsgenError, SpecError  # noqa: E402  (after the skip)
from ksgen.pattern import Chain, Pattern, btt  # noqa: E402
from ksgen.structures import block_dense, dyad  # noqa: E402
from ksgen.torch import KSLinear, KSSum, factorize, propose  # noqa: E402
from ksgen.torch.conversion.projection import product_of  # noqa: E402
from ksgen.torch.conversion.propose import FAMILIES, offers  # noqa: E402
from ksgen.torch.conversion.times import clock_of  # noqa: E402

TARGET = "sm_80"  # so that nothing is measured


def test_the_fastest_of_each_family_come_first() -> None:
    found = propose(96, 80, budget=0.4, device=TARGET, most=2)
    assert max(Counter(each.family for each in found).values()) == 2
    assert {"low_rank", "monarch", "two_factors"} <= {each.family for each in found}
    assert [each.us for each in found] == sorted(each.us for each in found)
    for each in found:
        count = sum(chain.weight_count for chain in each.chains)
        weights = sum(f.b * f.c for f in each.chain) if each.family == "kronecker" else count
        assert (each.parameters, each.flops) == (weights, 2 * count)
        assert count <= 0.4 * 96 * 80
        assert (each.relative_error, each.measured_us) == (None, None)
        assert each.step_us is not None
        assert each.step_us > each.us
    more = propose(96, 80, budget=0.4, device=TARGET, most=9)
    for family in {each.family for each in found}:
        assert found_of(found, family) == found_of(more, family)[:2]
    assert (found.dense.parameters, found.batch) == (96 * 80, 25088)


def found_of(proposals: Any, family: str) -> list[Any]:
    found = [each.chains for each in proposals if each.family == family]
    return found if family == "dyad" else [chain for (chain,) in found]


def test_with_a_weight_the_nearest_come_first() -> None:
    exact = Chain((Pattern(4, 8, 24, 1), Pattern(1, 40, 16, 2)))
    torch.manual_seed(0)
    weight = product_of([torch.randn(pattern.shape) for pattern in exact])
    found = propose(96, 80, budget=0.5, device=TARGET, weight=weight, most=2)
    errors = [each.relative_error for each in found]
    assert errors == sorted(errors)
    for each in found:
        form = each.structures if each.family == "dyad" else each.structure
        assert each.relative_error == pytest.approx(factorize(weight, form).relative_error)
    assert max(Counter(each.family for each in found).values()) == 2
    assert {id(each) for each in found} < {id(each) for each in found.looked_at}
    assert all(each.relative_error is not None for each in found.looked_at)


def test_offers_of_a_conversion_are_those_of_few_fused_launches() -> None:
    """Fused launches reorder the structures that are fastest without them."""
    options = {"budget": 0.5, "device": "sm_90a", "precision": "float32", "merge": False, "most": 3}
    named = propose(64, 64, structures=FAMILIES, **options)
    offered = offers(64, 64, structures=FAMILIES, **options)
    assert offered == (named.dense, *named.looked_at)
    assert len({each.family for each in offered}) == 1 + len(FAMILIES)


def test_a_block_tensor_train_is_found() -> None:
    exact = btt(64, 48, 4, 6, 2)
    torch.manual_seed(0)
    weight = product_of([torch.randn(pattern.shape) for pattern in exact], exact)
    budget = exact.weight_count / (64 * 48)
    for merge in (False, True):
        nearest = propose(64, 48, budget=budget, device=TARGET, weight=weight, merge=merge, most=20)[0]
        assert (nearest.family, nearest.chain) == ("btt", exact)
        assert nearest.relative_error < 1e-6
        assert nearest.step_us > nearest.us


def test_a_kronecker_product_is_found_with_its_ties() -> None:
    torch.manual_seed(0)
    weight = torch.kron(torch.randn(8, 4), torch.randn(6, 16))
    found = propose(64, 48, budget=0.5, device=TARGET, weight=weight, most=20)
    exact = [each for each in found if each.family == "kronecker" and each.relative_error < 1e-6]
    assert [each.parameters for each in exact] == [8 * 4 + 6 * 16]
    assert exact[0].flops == 2 * exact[0].chain.weight_count
    layer = KSLinear.from_structure(exact[0].structure, exact[0].factorization.state)
    torch.testing.assert_close(layer.to_dense().detach(), weight)
    assert f"{8 * 4 + 6 * 16:,}" in str(found)


def test_a_product_of_blocks_and_a_dense_factor_is_found() -> None:
    exact = block_dense(64, 48, blocks=4, rank=16).chain
    torch.manual_seed(0)
    weight = product_of([torch.randn(pattern.shape) for pattern in exact])
    budget = exact.weight_count / (64 * 48)
    found = propose(64, 48, budget=budget, device=TARGET, weight=weight, most=20)
    assert min(each.relative_error for each in found if each.family == "block_dense") < 1e-6


def test_a_sum_of_chains_is_found() -> None:
    exact = dyad(64, 48, blocks=8)
    torch.manual_seed(0)
    weight = KSSum.from_structures(exact).to_dense().detach()
    found = propose(64, 48, device=TARGET, weight=weight, structures=["dyad", "low_rank"], most=20)
    assert {each.family for each in found} == {"dyad", "low_rank"}
    nearest = found[0]
    assert (nearest.structures, nearest.text) == (exact, "8,6,8,1 plus 1,6,8,8@j.k")
    assert nearest.relative_error < 1e-6
    layer = KSSum.from_structures(nearest.structures, nearest.factorization.state)
    torch.testing.assert_close(layer.to_dense().detach(), weight)
    assert "8,6,8,1 plus 1,6,8,8@j.k" in str(found)
    assert nearest.text in repr(found)
    for read in (lambda: nearest.chain, lambda: nearest.structure):
        with pytest.raises(SpecError, match="dyad is a sum of 2 chains; accepted: its `structures`"):
            read()


def test_a_sum_reads_the_partial_sum() -> None:
    (found,) = propose(256, 256, device=TARGET, structures=["dyad"], most=1)
    clock = clock_of(TARGET, "float32")
    times = [clock.chain_us(each) for each in found.chains]
    assert found.us == pytest.approx(times[0] + clock.chain_us(found.chains[1], adds=True))
    assert found.us > 1.1 * sum(times)
    steps = [clock.step_us(each) for each in found.chains]
    assert found.step_us == pytest.approx(steps[0] + clock.step_us(found.chains[1], adds=True))
    assert found.step_us > 1.1 * sum(steps)


def test_blast_is_for_training_from_scratch() -> None:
    torch.manual_seed(0)
    options = {"budget": 0.4, "device": TARGET, "most": 2}
    assert "blast" in {each.family for each in propose(96, 80, **options)}
    assert "blast" not in {each.family for each in propose(96, 80, weight=torch.randn(80, 96), **options)}
    named = propose(96, 80, weight=torch.randn(80, 96), structures=["blast"], **{**options, "most": 1})
    assert {each.factorization.method for each in named} == {"refinement"}


def test_merged_neighbours_are_proposed_within_the_budget() -> None:
    """A butterfly of eight factors: merged ones are expected to be faster, and come no less near."""
    plain, merged = (propose(256, 256, budget=0.3, device=TARGET, merge=merge, most=20) for merge in (False, True))
    assert {len(chain) for chain in found_of(plain, "square_dyadic")} == {8}
    assert {len(chain) for chain in found_of(merged, "square_dyadic")} > {8}
    assert min(map(len, found_of(merged, "square_dyadic"))) < 8
    assert set(found_of(plain, "square_dyadic")) < set(found_of(merged, "square_dyadic"))
    assert all(each.parameters <= 0.3 * 256**2 for each in merged)
    fastest = {each.family: each.us for each in reversed(merged)}
    assert all(fastest[each.family] <= each.us for each in plain)
    torch.manual_seed(0)
    weight = torch.randn(32, 32)
    for each in propose(32, 32, budget=0.6, device=TARGET, weight=weight, merge=True, most=20):
        if each.family == "square_dyadic" and len(each.chain) < 5:
            (whole,) = [
                other
                for other in propose(32, 32, budget=0.6, device=TARGET, weight=weight, most=20)
                if other.family == "square_dyadic"
            ]
            assert each.relative_error < whole.relative_error
            break
    else:
        pytest.fail("no merged chain")


def test_measured_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measured(layers: list[Any], x: torch.Tensor) -> list[tuple[float, str]]:
        chains = [tuple(one.chain for one in (layer if isinstance(layer, KSSum) else [layer])) for layer in layers[1:]]
        asked.append((type(layers[0]).__name__, chains, tuple(x.shape), x.dtype))
        assert all(layer.is_frozen and layer(x).shape == (3, 80) for layer in layers[1:])
        return [
            (float(len(layers) - place), "other processes took 50% of the CPU time" * (place == 1))
            for place in range(len(layers))
        ]

    monkeypatch.setattr(import_module("ksgen.torch.propose"), "measured_us", measured)
    monkeypatch.setenv("KSGEN_DEVICE", "no such device")  # PyTorch's own products
    found = propose(96, 80, device="cpu", batch=3, precision="bfloat16", measure=True, most=1)
    ((dense, chains, shape, dtype),) = asked
    assert (dense, shape, dtype) == ("Linear", (3, 96), torch.bfloat16)
    assert found.dense.measured_us == len(chains) + 1
    assert [each.us for each in found] == sorted(each.us for each in found)
    assert {each.chains for each in found} <= set(chains)
    assert "measured, us" in str(found)
    assert "expected by no model: device 'no such device'" in str(found)
    assert [bool(each.doubt) for each in found].count(True) == 1
    assert str(found).count("?") == 2  # the time, and the sentence
    of = f"1 of {len(found) + 1} measured times"
    assert str(found).endswith(f" ? {of} unreliable; the first: other processes took 50% of the CPU time.")


def test_the_table() -> None:
    shown = str(propose(96, 80, device=TARGET, weight=torch.randn(80, 96), most=1))
    first, *rest = [line for line in shown.splitlines() if line.startswith("│")]
    assert [cell.strip() for cell in first.split("│")[1:5]] == ["nn.Linear", "1,80,96,1", "7,680", "100.0%"]
    assert "at least" in first
    assert len(rest) >= 3
    assert shown.endswith("Times at batch 25088, expected by the cost model, for A100 (sm_80).")
    found = propose(96, 80, device=TARGET, most=1)
    assert "error" not in str(found)
    assert repr(found).startswith(f"Proposals({len(found)} chains, the first of them ")
    none = propose(7, 11, budget=0.1, device=TARGET)
    assert list(none) == []
    assert "No chain fits the budget. Times at batch 25088" in str(none)
    assert "budget" not in shown


@pytest.mark.exhaustive
@pytest.mark.parametrize(("features", "wins"), [(256, False), (1024, True)])
def test_the_table_says_if_no_chain_is_expected_to_be_faster(features: int, wins: bool) -> None:
    found = propose(features, features, device="sm_90a", precision="bfloat16", most=1)
    assert (min(each.us for each in found) < found.dense.us) == wins
    says = "No chain is expected to take less time than the dense layer takes at least. Times at batch 25088"
    assert (says in str(found)) == (not wins)
    unknown = replace(found, dense=replace(found.dense, expected_us=None))
    assert "No chain" not in str(unknown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"in_features": 0}, "in_features=0; accepted: a whole number from 1 to"),
        ({"budget": 30}, "budget=30; accepted: a share of the dense weights, above 0 and up to 1"),
        ({"budget": True}, "budget=True; accepted: a share"),
        ({"structures": ["dyads"]}, "structures='dyads'; did you mean dyad? accepted: low_rank, monarch"),
        ({"structures": []}, "structures=[]; accepted: a list of low_rank, monarch"),
        ({"structures": "dyad"}, "structures='dyad'; accepted: a list of low_rank, monarch"),
        ({"merge": 1}, "merge=1; accepted: True or False"),
        ({"most": 0}, "most=0; accepted: a whole number from 1 up (chains per family)"),
        ({"batch": 0}, "batch=0; accepted: a whole number from 1 up"),
        ({"precision": "fp16"}, "precision='fp16'"),
        (
            {"measure": True},
            "measure=True with device='sm_80', which is a target; accepted: a device of this machine, such as cpu",
        ),
        (
            {"weight": torch.ones(96, 80)},
            "propose: weight has shape (96, 80); (out_features, in_features) = (80, 96) is needed",
        ),
        ({"weight": [1.0]}, "propose: weight is list; accepted: a torch.Tensor"),
    ],
    ids=str,
)
def test_mistakes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KsgenError) as caught:
        propose(**{"in_features": 96, "out_features": 80, "device": TARGET} | options)
    assert str(caught.value).startswith(message)
