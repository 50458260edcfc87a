"""Tests of all factors of a layer in one launch with matrix tiles, which are emulated if the processor has none.

The launch is correct, has the bits of one launch per factor, and stays within its arrays. Its rules and its callers
are tested too.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ksgen.devices.base import Device
from ksgen.families.amx.chain import AmxChainConstants, AmxChainTiling
from ksgen.families.amx.defaults import reads_in_place
from ksgen.families.amx.shape import AmxConstants, AmxTiling
from ksgen.families.chains import factor_kernels
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.families.test_vector import EPILOGUES
from tests.support.amx_kernels import CHAINS, PRECISIONS
from tests.support.emulated_tiles import needs_emulation
from tests.support.hasty import compiles_unoptimized
from tests.support.host_launches import agrees, agrees_between_fences, is_right, launch, one_by_one, plans_of
from tests.support.host_memory import stay_within_their_arrays
from tests.support.native import chosen_native
from tests.support.products import ALL, arrays_of, chain_of, truth_of

__all__ = ["compiles_unoptimized"]  # which pytest finds by its name

BATCHES = (1, 33, 97)
BETWEEN = ("none", "relu", "gelu", "silu", "gelu_tanh")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    needs_emulation()
    return chosen_native(monkeypatch)


def tiles_of(kernel: KernelSpec, outputs: int, copied: bool = False) -> str:
    """Rows where they lie if they can be read there; as many tiles along the inputs as half of them need."""
    each = []
    for factor in factor_kernels(kernel):
        steps = AmxTiling(factor, AmxConstants(32, 32, 1, 1, 0, 1)).steps
        panels = 1 + outputs // 32 % 2 if copied or not reads_in_place(factor) else 0
        each.append(f"{outputs} {panels} {(steps + 1) // 2}")
    return ", ".join(each)


def constants_of(kernel: KernelSpec, block: int = 32, outputs: int = 32, streaming: int = 0) -> AmxChainConstants:
    return AmxChainConstants(block, tiles_of(kernel, outputs), streaming)


def roundings_of(kernel: KernelSpec) -> int:
    """Count the roundings: one per factor for 16-bit outputs, else one, because float32 sums err more."""
    return len(kernel.factors) if kernel.arithmetic.rounds_once else 1


# ---- what is right


def matrix() -> Iterator[Any]:
    """Every chain and layout; precisions, epilogues, activations between and constants in turn."""
    for number, ((name, patterns), layout) in enumerate(product(CHAINS.items(), LAYOUTS)):
        precision, between = PRECISIONS[number * 3 // 2 % 4], BETWEEN[number % len(BETWEEN)]
        kernel = chain_of(patterns, precision, layout, EPILOGUES[number % len(EPILOGUES)], between=between)
        constants = constants_of(kernel, (32, 64, 96)[number % 3], (32, 64)[number // 2 % 2], number // 2 % 2)
        yield pytest.param(kernel, constants, id=f"{name} {precision} {layout}")


@pytest.mark.parametrize(("layout", "precision"), [("bsf", "bfloat16"), ("bsl", "bfloat16"), ("bsf", "bf16x6")])
def test_a_chain_that_reads_exchanged_inputs(layout: str, precision: str) -> None:
    patterns = Pattern(4, 24, 16, 1, "k1:6.i.k2", "l.i"), Pattern(6, 16, 16, 1)
    kernel = chain_of(patterns, precision, layout, Epilogue(True), between="relu")
    for batch in BATCHES:
        agrees(kernel, constants_of(kernel, 32, 32), batch, roundings_of(kernel))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("kernel", "constants"), list(matrix()))
def test_agrees_with_float64(kernel: KernelSpec, constants: AmxChainConstants) -> None:
    for batch in BATCHES:
        agrees(kernel, constants, batch, roundings_of(kernel))


def test_the_matrix_holds_all_there_is() -> None:
    rows = [row.values for row in matrix()]
    assert {(kernel.precision, kernel.layout) for kernel, _ in rows} == set(product(PRECISIONS, LAYOUTS))
    assert {kernel.between for kernel, _ in rows} == set(BETWEEN)
    assert {kernel.epilogue.activation for kernel, _ in rows} == {"none", "relu", "gelu", "gelu_tanh", "silu"}
    assert {constants.streaming for _, constants in rows} == {0, 1}
    shapes = [(at > 0, factor) for row in rows for at, factor in enumerate(AmxChainTiling(*row).factors)]
    assert {(later, factor.constants.panel) for later, factor in shapes} == set(product((False, True), (0, 1, 2)))
    assert {factor.is_interleaved for _, factor in shapes} == {True, False}
    assert {factor.planes_j > 1 for _, factor in shapes} == {True, False}
    assert {factor.chunks > 1 for _, factor in shapes} == {True, False}


SAME_BITS = [
    ("in place, ragged", "bfloat16", "bsf", "none"),
    ("d 2 and 3", "bfloat16", "bsf", "relu"),
    ("d 2 and 3", "bfloat16", "bsl", "silu"),
    ("d 20 and 1", "float16", "bsf", "none"),
    ("four of one size", "bf16x6", "bsl", "none"),
    ("wide, then narrow", "bf16x6", "bsf", "gelu"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "precision", "layout", "between"), SAME_BITS)
def test_it_gives_the_bits_of_one_launch_per_factor(
    name: str, precision: str, layout: str, between: str, device: Device
) -> None:
    """The intermediate is stored in X's type and rounded as in separate launches, whatever the constants."""
    kernel = chain_of(CHAINS[name], precision, layout, ALL, between=between)
    every = constants_of(kernel), AmxChainConstants(64, tiles_of(kernel, 64, copied=True), 1)
    for batch in (1, 64, 97):
        arrays = arrays_of(kernel, batch)
        truth = one_by_one(device, kernel, every[0].parsed, batch, arrays)
        for constants in every:
            arrays["y"][:] = np.nan
            launch(device, plans_of(device, kernel, constants, batch), arrays)
            np.testing.assert_array_equal(arrays["y"].view(np.uint8), truth.view(np.uint8))


@st.composite
def chains(draw: st.DrawFn) -> tuple[Pattern, ...]:
    """Two or three factors, each of which takes what the one before gives."""
    number = st.integers
    first = Pattern(
        draw(number(1, 3)), draw(number(1, 40)), draw(number(1, 40)), draw(st.sampled_from([1, 1, 2, 3, 5, 8, 16, 17]))
    )
    found = [first]
    for _ in range(draw(number(1, 2))):
        features = found[-1].out_features
        d = draw(st.sampled_from([each for each in (1, 2, 3, 4, 6, 8, 16, 20) if features % each == 0]))
        a = draw(st.sampled_from([each for each in (1, 2, 3, 5, 7) if features // d % each == 0]))
        found.append(Pattern(a, draw(number(1, 40)), features // d // a, d))
    assume(all(each.in_features <= 700 and each.out_features <= 700 for each in found))
    return tuple(found)


@pytest.mark.slow
@pytest.mark.optimized
@settings(
    max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture], deadline=None
)
@given(st.data())
def test_any_chain_batch_and_constants(data: st.DataObject) -> None:
    number = st.integers
    patterns, precision = data.draw(chains()), data.draw(st.sampled_from(PRECISIONS))
    more = {"between": data.draw(st.sampled_from(BETWEEN))}
    kernel = chain_of(
        patterns, precision, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(EPILOGUES)), **more
    )
    each = []
    for factor in factor_kernels(kernel):
        panel = data.draw(number(0 if reads_in_place(factor) else 1, 2))
        each.append(f"{32 * data.draw(number(1, 3))} {panel} {data.draw(number(1, -(-factor.pattern.c // 32)))}")
    constants = AmxChainConstants(32 * data.draw(number(1, 3)), ", ".join(each), data.draw(number(0, 1)))
    for batch in data.draw(st.lists(number(1, 130), min_size=2, max_size=3)):
        agrees(kernel, constants, batch, roundings_of(kernel))


@pytest.mark.slow
@pytest.mark.second
@pytest.mark.optimized
@settings(
    parent=settings.default,
    max_examples=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    deadline=None,
)
@given(st.data())
def test_many_chains_batches_and_constants(data: st.DataObject) -> None:
    test_any_chain_batch_and_constants.hypothesis.inner_test(data)  # type: ignore[attr-defined]


# ---- nothing outside the arrays is touched


def run_fenced() -> None:
    for name, precision, layout, between in SAME_BITS:  # on the same texts
        kernel = chain_of(CHAINS[name], precision, layout, ALL, between=between)
        agrees_between_fences(kernel, constants_of(kernel), (1, 37, 64), roundings_of(kernel))
    print("all within their arrays")


@pytest.mark.second
@pytest.mark.slow
def test_no_access_beyond_the_ends_of_arrays() -> None:
    stay_within_their_arrays(__name__, timeout=600)


# ---- who takes it


LAYER = (Pattern(2, 33, 40, 1), Pattern(1, 20, 33, 2))  # 80 -> 66 -> 40


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["bf16x6", "tf32x3"])
def test_launchers_take_it_where_it_is_asked_for(precision: str, with_tiles: Device) -> None:
    """One launch on request gives the bits of one launch per factor."""
    kernel = chain_of(LAYER, "float32", epilogue=ALL, between="gelu")
    arrays = arrays_of(kernel, 200)
    weights, added = [arrays["weights 0"], arrays["weights 1"]], {name: arrays[name] for name in ("bias", "residual")}
    what = {"activation": "gelu", "precision": precision, **added}
    launchers = [Launcher(*each.shape) for each in LAYER]
    one, each = (ChainLauncher(*launchers, between="gelu", fuse=fuse) for fuse in ("yes", "no"))
    call = one.prepare(arrays["x"], weights, **what)
    assert call is not None
    assert "by amx" in str(call.plan)
    found = one(arrays["x"], weights, **what)
    np.testing.assert_array_equal(found, each(arrays["x"], weights, **what))
    assert is_right(kernel, np.asarray(found), truth_of(kernel, arrays))
    told = one.explain(200, precision=precision)
    assert ": one launch, by amx, block=" in told
    assert ChainLauncher(*launchers).prepare(arrays["x"], weights).plan.choice.family == "vector"


@pytest.mark.parametrize("precision", ["bf16x6", "bfloat16"])
def test_one_launch_is_by_tiles_for_more_than_a_few_rows(precision: str, with_tiles: Device) -> None:
    layer = ChainLauncher(Launcher(2, 64, 64, 1), Launcher(1, 64, 64, 2))
    assert ": one launch, by amx, " in layer.explain(5000, precision=precision)
    family = "amx" if precision == "bf16x6" else "vector"
    assert f": one launch, by {family}, " in layer.explain(4, precision=precision)


@pytest.mark.slow
def test_what_it_does_not_serve_goes_one_by_one(with_tiles: Device) -> None:
    """Slices and groups, by launches of tiles or of vectors."""
    kernel = chain_of(LAYER)
    arrays = arrays_of(kernel, 200)
    weights = [arrays["weights 0"], arrays["weights 1"]]
    layer = ChainLauncher(*(Launcher(*each.shape) for each in LAYER))
    wide = np.zeros((200, 100), np.float32)
    wide[:, :80] = arrays["x"]
    assert layer.prepare(wide[:, :80], weights, precision="bf16x6") is None
    assert is_right(kernel, np.asarray(layer(wide[:, :80], weights, precision="bf16x6")), truth_of(kernel, arrays))
    group = GroupLauncher(layer, layer)
    assert (
        "layer by layer; amx supports each factor, but not all in one launch; it is for: matrix tiles"
        in group.explain(200, precision="bf16x6")
    )
    for y in group(arrays["x"], [weights, weights], precision="bf16x6"):
        assert is_right(kernel, np.asarray(y), truth_of(kernel, arrays))
