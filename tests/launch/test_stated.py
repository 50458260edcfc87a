"""What a spec states is what its launchers do: options without a word, operands that must be there, and both in
their docstrings.
"""

import copy
import importlib
import pickle
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.emit.render import emit
from ksgen.errors import LaunchError, SpecError
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher, SumLauncher
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, parse
from ksgen.spec.kernel import StatedOptions
from tests.support.host_memory import processor

FIRST, THEN, OTHER = Pattern(2, 6, 4, 1), Pattern(1, 5, 12, 1), Pattern(1, 3, 8, 1)
SPEC = """
defaults: {layout: bsl}
layers:
  up: {chain: [[2,6,4,1], [1,5,12,1]], bias: true, activation: gelu, precision: float32}
  heads: {group: [[[1,3,8,1]], [[1,7,8,1]]], residual: true, activation: relu}
kernels:
  - {pattern: [1,9,3,1], precision: [float32, float16], layout: [bsf, bsl], bias: [true, false]}
  - {pattern: [1,9,4,1], weights: int8, inputs: int8}
  - {pattern: [1,9,5,1], gradients: true, bias: true}
  - {pattern: [2,9,9,2], gradients: true, bias: true, activation: silu}
"""
RANDOM = np.random.default_rng(50)


def draw(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


@pytest.fixture
def emitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    emit(parse(SPEC, "stated.yaml"), tmp_path / "from_spec" / "stated")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("from_spec", "from_spec.stated", "from_spec.stated.launchers"):
        monkeypatch.delitem(importlib.sys.modules, name, raising=False)  # type: ignore[attr-defined]
    return importlib.import_module("from_spec.stated")


def close(got: Any, expected: Any) -> None:
    np.testing.assert_allclose(got, expected, rtol=2e-5, atol=2e-5)


def test_a_layer_does_what_its_spec_states(emitted: ModuleType) -> None:
    x, weights, bias = draw(8, 11), [draw(*FIRST.shape), draw(*THEN.shape)], draw(5)
    between = reference.multiply(FIRST, x, weights[0], "bsl")
    expected = reference.multiply(THEN, between, weights[1], "bsl", bias=bias, activation="gelu")
    close(emitted.layer_up(x, weights, bias=bias), expected)
    call = emitted.layer_up.prepare(x, weights, bias=bias)
    close(expected if call is None else call(), expected)
    with pytest.raises(
        LaunchError,
        match=r"bias is missing, but the launcher requires it; accepted: bias=an array, or bias=False to leave it out",
    ):
        emitted.layer_up(x, weights)
    with pytest.raises(LaunchError, match="bias is missing"):
        emitted.layer_up.prepare(x, weights)
    with pytest.raises(LaunchError, match=r"precision='float32' for x of float64; accepted: float64"):
        emitted.layer_up(x.astype("f8"), [each.astype("f8") for each in weights], bias=bias.astype("f8"))
    assert "bsl_bias_gelu at batch 11" in emitted.ks_1_5_12_1.explain(11)
    assert "6,4,1 then" in emitted.layer_up.explain(11) or "ks_" in emitted.layer_up.explain(11)


def test_a_call_overrides_by_name(emitted: ModuleType) -> None:
    x, weights = draw(11, 8), [draw(*FIRST.shape), draw(*THEN.shape)]
    between = reference.multiply(FIRST, x, weights[0], "bsf")
    plain = {"layout": "bsf", "bias": False, "activation": "none"}
    close(emitted.layer_up(x, weights, **plain), reference.multiply(THEN, between, weights[1], "bsf"))
    wide = [each.astype("f8") for each in weights]
    found = emitted.layer_up(x.astype("f8"), wide, **plain, precision="float64")
    assert found.dtype == np.float64
    close(found, reference.multiply(THEN, between, weights[1], "bsf"))
    close(emitted.ks_1_5_12_1(x := draw(9, 12), weights[1], **plain), reference.multiply(THEN, x, weights[1], "bsf"))


def test_a_factor_does_what_all_entries_state(emitted: ModuleType) -> None:
    """The first factor of a layer has no epilogue; the last one has the layer's."""
    x, weights, bias = draw(12, 7), draw(*THEN.shape), draw(5)
    close(
        emitted.ks_1_5_12_1(x, weights, bias=bias),
        reference.multiply(THEN, x, weights, "bsl", bias=bias, activation="gelu"),
    )
    with pytest.raises(LaunchError, match=r"Launcher\(1, 5, 12, .*\): bias is missing, but the launcher requires it"):
        emitted.ks_1_5_12_1(x, weights)
    assert repr(emitted.ks_2_6_4_1) == "Launcher(2, 6, 4, 1, layout='bsl', precision='float32')"


def test_a_group_does_what_its_spec_states(emitted: ModuleType) -> None:
    x, weights, residuals = draw(8, 11), [draw(1, 3, 8, 1), draw(1, 7, 8, 1)], [draw(3, 11), draw(7, 11)]
    found = emitted.layer_heads(x, weights, residual=residuals)
    for y, pattern, own, residual in zip(found, (OTHER, Pattern(1, 7, 8, 1)), weights, residuals, strict=True):
        close(y, reference.multiply(pattern, x, own, "bsl", activation="relu", residual=residual))
    remedy = "accepted: residual=an array per layer, in a list, or residual=False to leave it out"
    for given in ({}, {"residual": [residuals[0], None]}):
        with pytest.raises(LaunchError, match=f"residual is missing, but the launcher requires it; {remedy}"):
            emitted.layer_heads(x, weights, **given)
    for residual in (False, [False, False]):
        ys = emitted.layer_heads(x, weights, residual=residual, activation="none")
        close(ys[0], reference.multiply(OTHER, x, weights[0], "bsl"))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize("fuse", ["yes", "no"])
def test_an_activation_may_follow_the_residual(layout: Any, fuse: Any) -> None:
    processor()
    x, weights = draw(8, 11), [draw(*FIRST.shape), draw(*THEN.shape)]
    given, residual = (x if layout == "bsl" else x.T.copy()), draw(*((5, 11) if layout == "bsl" else (11, 5)))
    between = reference.multiply(FIRST, given, weights[0], layout)
    options: dict[str, Any] = {"activation": "gelu", "residual": residual, "residual_first": True}
    expected = reference.multiply(THEN, between, weights[1], layout, **options)
    last = reference.multiply(THEN, between, weights[1], layout, activation="gelu", residual=residual)
    assert np.abs(expected - last).max() > 0.1
    chain = ChainLauncher(FIRST, THEN, fuse=fuse, layout=layout, activation="gelu", residual_first=True)
    close(chain(given, weights, residual=residual), expected)
    close(chain(given, weights, residual=residual, residual_first=False), last)
    close(GroupLauncher(chain, chain)(given, [weights] * 2, residual=[residual] * 2)[1], expected)
    close(Launcher(THEN, layout=layout).prepare(between.astype("f4"), weights[1], **options)(), expected)
    assert "residual_first True" in str(chain.__doc__)
    with pytest.raises(SpecError, match="residual_first='no'; accepted: True or False"):
        chain(given, weights, residual=residual, residual_first="no")


def test_of_several_values_a_call_chooses(emitted: ModuleType) -> None:
    launcher, weights = emitted.ks_1_9_3_1, draw(1, 9, 3, 1)
    assert repr(launcher) == "Launcher(1, 9, 3, 1)"
    for dtype in ("f2", "f4"):
        assert launcher(draw(4, 3).astype(dtype), weights.astype(dtype)).dtype == np.dtype(dtype)


def test_stored_weights_are_demanded(emitted: ModuleType) -> None:
    launcher, x, weights = emitted.ks_1_9_4_1, draw(4, 6), draw(1, 9, 4, 1)
    bytes_in = ksgen.quantize_inputs(x, "int8")
    stored = ksgen.quantize(weights, "int8", x_scale=bytes_in.scale)
    close(launcher(bytes_in.values, stored), launcher(bytes_in.values, launcher.pack(stored)))
    remedy = r"unlike the launcher's options; accepted: results of ksgen.quantize\(weights, 'int8', x_scale=...\)"
    with pytest.raises(LaunchError, match=f"weights are stored as weights=same and inputs=same, {remedy}"):
        launcher(x, weights)
    with pytest.raises(LaunchError, match=f"weights are stored as weights=int8 and inputs=same, {remedy}"):
        launcher(x, ksgen.quantize(weights, "int8"))
    layer = ChainLauncher(FIRST, THEN, weights="int8")
    with pytest.raises(
        LaunchError, match=r"weights of factor 2 are stored as weights=same .*quantize\(weights, 'int8'\)"
    ):
        layer(draw(4, 8), [ksgen.quantize(draw(*FIRST.shape), "int8"), draw(*THEN.shape)])
    first = ksgen.quantize(draw(*FIRST.shape), "int8")
    for group in (GroupLauncher, SumLauncher):
        layers = group(*[ChainLauncher(FIRST, weights="int8")] * 2)
        layers(draw(4, 8), [[first], [first]])
        with pytest.raises(LaunchError, match=r"weights are stored as weights=same .*quantize\(weights, 'int8'\)"):
            layers(draw(4, 8), [[first], [draw(*FIRST.shape)]])


def test_what_only_gradients_ask_for_has_no_epilogue(emitted: ModuleType) -> None:
    stated = parse(SPEC).stated
    assert stated[Pattern(1, 5, 9, 1)] == StatedOptions(layout="bsl")
    assert stated[Pattern(2, 9, 9, 2)] == StatedOptions(layout="bsl", bias=True, activation="silu")  # its own transpose
    x, grad_y = draw(5, 6), draw(9, 6)
    close(emitted.ks_1_9_5_1.gradient(x, grad_y), reference.gradient(Pattern(1, 9, 5, 1), x, grad_y, "bsl"))
    assert "gradient" in emitted.ks_2_9_9_2.explain(6, job="gradient")


def test_docstrings_say_what_is_taken(emitted: ModuleType) -> None:
    up, heads, stored = emitted.layer_up.__doc__, emitted.layer_heads.__doc__, emitted.ks_1_9_4_1.__doc__
    assert "Multiply x by 2,6,4,1 then 1,5,12,1 (8 to 5 features)." in up
    assert "A call takes x, weights (2, 6, 4, 1), (1, 5, 12, 1), bias (or bias=False)." in up
    assert "Unless it names others, its options are: layout bsl, activation gelu, precision float32." in up
    assert "(8 to 3, 7 features)." in heads
    assert "weights (1, 3, 8, 1); (1, 7, 8, 1), residual (or residual=False)." in heads
    assert "x in int8, weights (1, 9, 4, 1), stored in int8 as ksgen.quantize gives them." in stored
    assert "precision that of the arrays" in emitted.ks_1_9_3_1.__doc__
    deep = ChainLauncher(FIRST, THEN, between="relu", fuse="no", out_layout="bsl").__doc__ or ""
    assert "options are: layout bsf, activation none, precision that of the arrays, out_layout bsl." in deep
    assert "The layer's own options are: between relu, fuse no." in deep


def test_only_what_every_entry_states_alike_counts() -> None:
    both = "kernels: [{pattern: [1,2,3,1], precision: tf32, activation: relu}, {pattern: [1,2,3,1]%s}]"
    assert parse(both % ", activation: relu, bias: true").stated == {
        Pattern(1, 2, 3, 1): StatedOptions(activation="relu")
    }
    assert parse(both % ", precision: tf32, layout: bsl").stated == {
        Pattern(1, 2, 3, 1): StatedOptions(precision="tf32")
    }
    mixed = parse("kernels: [{pattern: [1,2,3,1], weights: [same, int8], inputs: [int8, same]}]")
    assert mixed.stated == {Pattern(1, 2, 3, 1): StatedOptions()}


def test_layers_state_their_own() -> None:
    """Options of the factors do not apply to the layer."""
    factor = Launcher("1,5,12,1", bias=True, activation="gelu")
    layer, x, weights = ChainLauncher(FIRST, factor), draw(3, 8), [draw(*FIRST.shape), draw(*THEN.shape)]
    close(
        layer(x, weights), reference.multiply(THEN, reference.multiply(FIRST, x, weights[0], "bsf"), weights[1], "bsf")
    )
    assert repr(layer) == "ChainLauncher(Launcher(2, 6, 4, 1), Launcher(1, 5, 12, 1))"
    group = GroupLauncher(factor, ChainLauncher(THEN, bias=True, activation="gelu"))
    one = "ChainLauncher(Launcher(1, 5, 12, 1), activation='gelu', bias=True)"
    assert repr(group) == f"GroupLauncher({one}, {one})"
    with pytest.raises(LaunchError, match="of a group have different options; accepted: layers with equal options"):
        GroupLauncher(factor, THEN)


def test_what_cannot_be_stated_is_refused() -> None:
    for given, message in (
        ({"layout": "bfs"}, "layout='bfs'; did you mean bsl"),
        ({"activation": "tanh"}, r"activation='tanh'; did you mean gelu_tanh\? accepted: none, relu"),
        ({"precision": "float8"}, "precision='float8'; did you mean"),
        ({"bias": 1}, "bias=1; accepted: True or False"),
        ({"inputs": "int8"}, "inputs=int8 with weights=same; accepted: inputs=same"),
        (
            {"precision": "complex64", "activation": "relu"},
            "activation=relu of complex numbers, complex64; accepted: none",
        ),
    ):
        for make in (lambda **own: Launcher("1,2,3,1", **own), lambda **own: ChainLauncher("1,2,3,1", **own)):
            with pytest.raises(SpecError, match=message):
                make(**given)  # type: ignore[no-untyped-call]


def test_copies_state_the_same() -> None:
    launcher = Launcher((1, 2, 3, 1), batches=[7, 5], layout="bsl", residual=True)
    for twin in (copy.deepcopy(launcher), pickle.loads(pickle.dumps(launcher))):
        assert (repr(twin), twin.batches, twin.__doc__) == (repr(launcher), launcher.batches, launcher.__doc__)


@pytest.mark.parametrize("form", ["2,6,4,1", (2, 6, 4, 1), [2, 6, 4, 1], FIRST])
def test_launchers_take_a_pattern_in_any_form(form: Any) -> None:
    assert Launcher(form).pattern == ChainLauncher(form).chain[0] == GroupLauncher(form).chains[0][0] == FIRST
    pair = Chain((FIRST, THEN))
    assert ChainLauncher(form, THEN).chain == ChainLauncher([form, THEN]).chain == ChainLauncher(pair).chain == pair
    assert GroupLauncher(pair, form).chains == (pair, Chain((FIRST,)))


def test_explain_asks_about_what_is_stated() -> None:
    launcher = Launcher("1,5,12,1", layout="bsl", activation="relu", bias=True, precision="float64")
    assert launcher.explain(9).startswith("ks_1x5x12x1_float64_bsl_bias_relu at batch 9")
    assert launcher.explain(9, precision="float32", layout="bsf", epilogue=Epilogue()).startswith(
        "ks_1x5x12x1_float32_bsf at"
    )
    assert launcher.explain(9, job="gradient").startswith("ks_1x5x12x1_float64_bsl_gradient at")
