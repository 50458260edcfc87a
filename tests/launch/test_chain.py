"""Chain launchers: their factors one after another, and what they refuse before the first of them is launched."""

import base64
import pickle
import re
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.errors import LaunchError, PatternError
from ksgen.launch import explain, fused, streams
from ksgen.launch.arrays import view
from ksgen.launch.weights import storage_of
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.pattern import Chain
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import PATTERN, SHAPE, check, draw, inputs, needs_opencl


@needs_opencl
def test_a_chain_equals_its_factors_in_sequence() -> None:
    first, then = Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3)
    x, weights = inputs()
    more, bias = draw(1, 4, 18, 3), draw(12)
    y = ChainLauncher(first, then)(x, [weights, more], bias=bias, activation="relu")
    middle = reference.multiply(PATTERN, x, weights, "bsf")
    check(y, middle, more, bias=bias, activation="relu")
    with pytest.raises(LaunchError, match="got 1 weight array; 2 are needed, one per factor"):
        ChainLauncher(first, then)(x, [weights])
    with pytest.raises(
        LaunchError, match=r"weights of factor 2 is a list; give np.asarray\(weights, np.float32\), or a NumPy array"
    ):
        ChainLauncher(first, then)(x, [weights, more.tolist()])
    with pytest.raises(PatternError, match=r"gives 12 features, but the next pattern \(2,9,5,3\) takes 30"):
        ChainLauncher(then, first)
    with pytest.raises(LaunchError, match=r"factors=\(\); accepted: Launchers or patterns, one per argument"):
        ChainLauncher()


def test_a_chain_refuses_before_its_first_factor_is_launched(gpu: FakeGpu) -> None:
    layer = ChainLauncher(Launcher(*SHAPE), Launcher(1, 4, 18, 3))
    x, weights = inputs()
    ready, own, more = FakeTensor(gpu, x), FakeTensor(gpu, weights), FakeTensor(gpu, draw(1, 4, 18, 3))
    with pytest.raises(LaunchError, match=r"got weights of shape \(1, 4, 18, 2\); \(1, 4, 18, 3\) is needed"):
        layer(ready, [own, FakeTensor(gpu, draw(1, 4, 18, 2))])
    with pytest.raises(LaunchError, match=r"got bias of shape \(54,\); \(12,\) is needed"):
        layer(ready, [own, more], bias=FakeTensor(gpu, draw(54)))
    with pytest.raises(LaunchError, match="activation='tanh'; did you mean gelu_tanh"):
        layer(ready, [own, more], activation="tanh")
    assert gpu.launches == []
    y = layer(ready, [own, more])
    gpu.synchronize()
    check(y.data.content, reference.multiply(PATTERN, x, weights, "bsf"), more.data.content)


@needs_opencl
def test_one_launcher_may_be_several_factors() -> None:
    square = Launcher(2, 3, 3, 1)
    x, first, then, bias = draw(4, 6), draw(2, 3, 3, 1), draw(2, 3, 3, 1), draw(6)
    y = ChainLauncher(square, square)(x, [first, then], bias=bias)
    check(y, reference.multiply(square.pattern, x, first, "bsf"), then, bias=bias)


LAYER = ((2, 48, 64, 1), (1, 64, 48, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "asked", "batch"),
    [("float16", None, 40), ("float32", "tf32x3", 40), ("float32", None, 3000), ("float64", None, 3000)],
)
def test_a_layer_is_one_launch_on_a_gpu(gpu: FakeGpu, precision: str, asked: str | None, batch: int) -> None:
    """The weights of each factor are packed before the launch, or once."""
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    x, bias, residual = (
        draw(batch, 128, precision=precision),
        draw(128, precision=precision),
        draw(batch, 128, precision=precision),
    )
    weights = [draw(*shape, precision=precision) for shape in LAYER]
    given = {name: FakeTensor(gpu, array) for name, array in (("bias", bias), ("residual", residual))}
    y = layer(
        FakeTensor(gpu, x), [FakeTensor(gpu, each) for each in weights], activation="relu", precision=asked, **given
    )
    gpu.synchronize()
    middle = reference.multiply(layer.factors[0].pattern, x, weights[0], "bsf")
    check(y.data.content, middle, weights[1], precision=precision, bias=bias, activation="relu", residual=residual)
    name = "ks_2x48x64x1_1x64x48x2"
    assert [entry.endswith("_pack") for entry, _ in gpu.launches] == [True, True, False]
    assert gpu.launches[-1][0].startswith(name)
    kept = [factor.pack(FakeTensor(gpu, each)) for factor, each in zip(layer.factors, weights, strict=True)]
    call = layer.prepare(FakeTensor(gpu, x), kept, precision=asked)
    assert call is not None
    gpu.launches.clear()
    for _ in range(2):
        call()
    gpu.synchronize()
    assert [entry.startswith(name) for entry, _ in gpu.launches] == [True, True]
    check(call.out.data.content, middle, weights[1], precision=precision)


@pytest.mark.parametrize(("precision", "batch"), [("float16", 40), ("float16", 2)])
def test_an_activation_between_factors_in_one_launch_and_in_several(gpu: FakeGpu, precision: str, batch: int) -> None:
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER), between="relu")
    x, weights = draw(batch, 128, precision=precision), [draw(*shape, precision=precision) for shape in LAYER]
    y = layer(FakeTensor(gpu, x), [FakeTensor(gpu, each) for each in weights], activation="relu")
    gpu.synchronize()
    middle = reference.multiply(layer.factors[0].pattern, x, weights[0], "bsf", activation="relu")
    check(y.data.content, middle, weights[1], precision=precision, activation="relu")
    assert "relu" in gpu.launches[-1][0]


@needs_opencl
def test_an_activation_between_factors_of_host_arrays() -> None:
    layer = ChainLauncher(Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3), between="silu")
    x, weights = inputs()
    more = draw(1, 4, 18, 3)
    check(layer(x, [weights, more]), reference.multiply(PATTERN, x, weights, "bsf", activation="silu"), more)
    assert repr(layer) == "ChainLauncher(Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3), between='silu')"
    assert layer.explain(3).startswith("2,9,5,3 then 1,4,18,3 with silu between factors at batch 3 on ")
    told = layer.explain(3, layout="bsl")
    assert told.startswith("2,9,5,3 then 1,4,18,3 with silu between factors: one launch per factor; below ")
    assert "_silu at batch 3" in told
    copied = pickle.loads(pickle.dumps(layer))
    assert copied.between == "silu"


def test_what_is_no_activation_between_factors() -> None:
    with pytest.raises(
        LaunchError, match="2,9,5,3 then 1,4,18,3: between='tanh'; accepted: none, relu, gelu, gelu_tanh, silu"
    ):
        ChainLauncher(Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3), between="tanh")
    with pytest.raises(LaunchError, match="2,9,5,3: between='relu'; accepted: none, with one factor"):
        ChainLauncher(Launcher(2, 9, 5, 3), between="relu")


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("batch", [3, 300])
@pytest.mark.parametrize("layouts", [("bsf", "bsl"), ("bsl", "bsf")])
def test_x_in_one_layout_and_y_in_the_other(batch: int, layouts: tuple[str, str]) -> None:
    """Host arrays take one launch or several, for one factor and for three."""
    for shapes in (((2, 9, 5, 3),), ((2, 9, 5, 3), (1, 4, 18, 3), (1, 7, 12, 1))):
        layer = ChainLauncher(*(Launcher(*shape) for shape in shapes))
        x, weights, residual = (
            draw(batch, 30),
            [draw(*shape) for shape in shapes],
            draw(batch, layer.chain.out_features),
        )
        rows = x.astype(np.float64)
        for factor, each in zip(layer.factors, weights, strict=True):
            rows = reference.multiply(factor.pattern, rows, each, "bsf")
        rows = rows + residual
        given = [
            np.ascontiguousarray(array if layout == "bsf" else array.T)
            for array, layout in zip((x, residual), layouts, strict=True)
        ]
        y = layer(given[0], weights, layout=layouts[0], out_layout=layouts[1], residual=given[1])
        np.testing.assert_allclose(y if layouts[1] == "bsf" else y.T, rows, rtol=1e-4, atol=1e-4)
        call = layer.prepare(given[0], weights, layout=layouts[0], out_layout=layouts[1], residual=given[1])
        assert call is None or (call() == y).all()
        told = layer.explain(batch, layout=layouts[0], out_layout=layouts[1]).splitlines()[0]
        assert told.startswith(f"{layer.chain} from {layouts[0]} to {layouts[1]}")
        once = f"one launch per factor, and the input of factor {len(shapes)} is transposed by a copy"
        assert ("one launch, by vector" in told) if call else (once in told)


@pytest.mark.parametrize("layouts", [("bsf", "bsl"), ("bsl", "bsf")])
def test_x_in_one_layout_and_y_in_the_other_on_a_gpu(gpu: FakeGpu, layouts: tuple[str, str]) -> None:
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    x, weights = draw(40, 128, precision="float16"), [draw(*shape, precision="float16") for shape in LAYER]
    given = FakeTensor(gpu, np.ascontiguousarray(x if layouts[0] == "bsf" else x.T))
    y = layer(given, [FakeTensor(gpu, each) for each in weights], layout=layouts[0], out_layout=layouts[1])
    gpu.synchronize()
    assert f"float16_{layouts[0]}_to_{layouts[1]}" in gpu.launches[-1][0]
    got = y.data.content if layouts[1] == "bsf" else y.data.content.T
    check(got, reference.multiply(layer.factors[0].pattern, x, weights[0], "bsf"), weights[1], precision="float16")


def test_what_is_no_layout_of_y(gpu: FakeGpu) -> None:
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    weights = [FakeTensor(gpu, draw(*shape)) for shape in LAYER]
    with pytest.raises(LaunchError, match=r"out_layout='nhwc'; accepted: bsf, bsl"):
        layer(FakeTensor(gpu, draw(4, 128)), weights, out_layout="nhwc")
    with pytest.raises(LaunchError, match=r"got residual of shape \(4, 128\); \(128, 4\) is needed"):
        layer(FakeTensor(gpu, draw(4, 128)), weights, out_layout="bsl", residual=FakeTensor(gpu, draw(4, 128)))
    alone = ChainLauncher(layer.factors[0])
    with pytest.raises(LaunchError, match=r"got x of shape \(128, 4\); layout bsf wants \(batch, 128\)"):
        alone(FakeTensor(gpu, draw(128, 4)), weights[:1], out_layout="bsl")
    with pytest.raises(
        LaunchError,
        match=r"nothing transposes a FakeArray from one layout into the other; accepted: arrays of NumPy, PyTorch or",
    ):
        alone(FakeArray(gpu, draw(4, 128)), weights[:1], out_layout="bsl")
    assert gpu.launches == []


def test_explain_says_how_many_launches_and_why(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    monkeypatch.setattr(explain, "find_device", lambda _: gpu)
    for precision, family in (("float16", "mma"), ("float32", "simt")):
        told = layer.explain(25088, precision=precision)
        one = (
            rf"2,48,64,1 then 1,64,48,2 at batch 25088 on .*: one launch, by {family}, tile_batch=\d+, .*; the cost "
            rf"model expects"
        )
        assert re.match(one, told)
    assert "one launch, by gemv, tile_batch=1, " in layer.explain(1, precision="bfloat16")
    wide = ChainLauncher(Launcher(1, 4096, 16, 1), Launcher(1, 16, 4096, 1))
    first, *each, compared = wide.explain(25088, precision="float32").splitlines()
    assert first.endswith("one launch per factor; no family has room for all factors in one launch, in this precision")
    assert [line.partition(" at ")[0] for line in each] == ["ks_1x4096x16x1_float32_bsf", "ks_1x16x4096x1_float32_bsf"]
    assert compared.startswith("dense product of 16 to 16 features at batch 25088: the cost model expects ")
    assert "there is one" in ChainLauncher(layer.factors[0]).explain(8, precision="float16")


@pytest.mark.parametrize("features", [64, 4096])
def test_explain_decides_once_whether_there_is_one_launch(
    features: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explain, "find_device", lambda _: gpu)
    found: list[fused.Verdict] = []

    def noted(*given: Any) -> fused.Verdict:
        found.append(fused.verdict(*given))
        return found[-1]

    monkeypatch.setattr(explain, "verdict", noted)
    told = ChainLauncher((1, features, 16, 1), (1, 16, features, 1)).explain(25088, precision="float32")
    assert told.splitlines()[-1].startswith("dense product of 16 to 16 features at batch 25088: ")
    assert [each.is_one for each in found] == [features == 64]


@needs_opencl
def test_fuse_says_how_many_launches_of_host_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The option overrides the rule: one launch for small batches, several for large ones."""
    monkeypatch.setattr("ksgen.launch.fused.SMALL_BYTES", 0)
    factors, weights = [Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3)], [draw(2, 9, 5, 3), draw(1, 4, 18, 3)]
    for fuse, batch, is_one in (
        ("yes", 3, True),
        ("auto", 3, False),
        ("no", 3000, False),
        ("auto", 3000, True),
        ("yes", 3000, True),
    ):
        layer, x = ChainLauncher(*factors, fuse=fuse), draw(batch, 30)
        assert (layer.prepare(x, weights) is not None) == is_one
        check(layer(x, weights), reference.multiply(PATTERN, x, weights[0], "bsf"), weights[1])
        first = layer.explain(batch).splitlines()[0]
        assert (": one launch, by" in first) == is_one
        assert fuse == "auto" or first.partition("; the family's default: ")[0].endswith(f"fuse='{fuse}'")
    assert repr(pickle.loads(pickle.dumps(layer))) == repr(layer)
    assert repr(layer).endswith(", fuse='yes')")
    # of one factor there is one launch anyway
    assert ChainLauncher(factors[0], fuse="yes")(draw(3, 30), weights[:1]).shape == (3, 54)
    shifted = np.frombuffer(bytes(1) + draw(3, 30).tobytes(), np.uint8)[1:].view(np.float32).reshape(3, 30)
    with pytest.raises(
        LaunchError,
        match=r"fuse='yes'\): an array's address is not a multiple of its element size; accepted: fuse='auto' or 'no'",
    ):
        layer(shifted, weights)
    with pytest.raises(LaunchError, match="2,9,5,3 then 1,4,18,3: fuse='maybe'; accepted: auto, yes, no"):
        ChainLauncher(*factors, fuse="maybe")
    # before the first launch of several
    with pytest.raises(LaunchError, match=r"got bias of shape \(54,\); \(12,\) is needed"):
        ChainLauncher(*factors, fuse="no")(draw(3000, 30), weights, bias=draw(54))


def test_fuse_says_how_many_launches_on_a_gpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here one is expected to be slower for 40 float32 entries."""
    x, weights = draw(40, 128), [draw(*shape) for shape in LAYER]
    for fuse, is_one in (("auto", False), ("yes", True), ("no", False)):
        layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER), fuse=fuse)
        gpu.launches.clear()
        y = layer(FakeTensor(gpu, x), [FakeTensor(gpu, each) for each in weights])
        gpu.synchronize()
        check(y.data.content, reference.multiply(layer.factors[0].pattern, x, weights[0], "bsf"), weights[1])
        assert sum(not entry.endswith("_pack") for entry, _ in gpu.launches) == (1 if is_one else 2)
    wide = [(1, 4096, 16, 1), (1, 16, 4096, 1)]
    layer = ChainLauncher(*(Launcher(*shape) for shape in wide), fuse="yes")
    gpu.launches.clear()
    with pytest.raises(
        LaunchError,
        match=r"fuse='yes'\): no family has room for all factors in one launch, in this precision; accepted: fuse=",
    ):
        layer(FakeTensor(gpu, draw(40, 16)), [FakeTensor(gpu, draw(*shape)) for shape in wide])
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    with pytest.raises(LaunchError, match="arrays of the host are copied to Fake GPU for each factor"):
        layer(draw(4, 16), [draw(*shape) for shape in wide])
    assert gpu.launches == []


def test_inside_a_capture_no_layer_is_built(gpu: FakeGpu) -> None:
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    x, weights = (
        FakeTensor(gpu, draw(40, 128, precision="float16")),
        [FakeTensor(gpu, draw(*each, precision="float16")) for each in LAYER],
    )
    gpu.begin_capture()
    with pytest.raises(
        LaunchError,
        match=r"builds and loads its kernel.*cannot record; call it once before the capture, or build\(batch\) of",
    ):
        layer(x, weights)
    gpu.end_capture()
    layer(x, weights)
    gpu.begin_capture()
    layer(x, weights)
    gpu.end_capture()


def test_a_prepared_layer_keeps_what_it_reads(gpu: FakeGpu) -> None:
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    given = [
        FakeTensor(gpu, draw(40, 128, precision="float16")),
        *(FakeTensor(gpu, draw(*each, precision="float16")) for each in LAYER),
    ]
    call = layer.prepare(given[0], given[1:])
    assert call is not None
    kept = [id(each) for each in call.keep]
    assert all(id(storage_of(view(each))) in kept for each in (*given, call.out))


def test_a_group_of_one_layer_on_the_hosts_arrays(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU gets copies of the arrays for each factor."""
    monkeypatch.setattr(streams, "device_for", lambda place: gpu)
    layer = ChainLauncher(*(Launcher(*shape) for shape in LAYER))
    x, weights = draw(40, 128, precision="float16"), [draw(*each, precision="float16") for each in LAYER]
    (y,) = GroupLauncher(layer)(x, [weights])
    check(y, reference.multiply(layer.factors[0].pattern, x, weights[0], "bsf"), weights[1], precision="float16")


@needs_opencl
@pytest.mark.parametrize("layouts", [("bsf", "bsl"), ("bsl", "bsf")])
def test_a_lone_factor_gives_y_in_the_other_layout(layouts: tuple[str, str]) -> None:
    x, weights, bias = draw(300, 30), draw(*SHAPE), draw(54)
    truth = reference.multiply(PATTERN, x, weights, "bsf", bias=bias)
    given = np.ascontiguousarray(x if layouts[0] == "bsf" else x.T)
    for factor in (
        Launcher(*SHAPE, out_layout=layouts[1]),
        Launcher(*SHAPE, out_layout=layouts[1], fuse="no", bias=True),
    ):
        y = factor(given, weights, layout=layouts[0], bias=bias)
        np.testing.assert_allclose(y if layouts[1] == "bsf" else y.T, truth, rtol=1e-4, atol=1e-4)
        assert factor.explain(300, layout=layouts[0]).startswith(f"2,9,5,3 from {layouts[0]} to {layouts[1]}")
        same = factor(given, weights, layout=layouts[0], bias=False, out_layout=layouts[0])
        assert same.shape == ((300, 54) if layouts[0] == "bsf" else (54, 300))


# ---- a chain given to a launcher

PAIR = Chain((PATTERN, "1,4,18,3"))


@needs_opencl
@pytest.mark.parametrize("options", [{}, {"fuse": "no"}, {"between": "relu", "layout": "bsl", "bias": True}])
def test_a_launcher_takes_a_chain(options: dict[str, Any]) -> None:
    own, other = Launcher(PAIR, batches=[37], **options), ChainLauncher(PAIR, **options)
    assert own.chain == PAIR
    assert repr(own).startswith("Launcher(Chain(('2,9,5,3', '1,4,18,3'))")
    x, weights = inputs(layout=options.get("layout", "bsf"))
    given, more = [weights, draw(1, 4, 18, 3)], {"bias": draw(12)} if options.get("bias") else {}
    for each in (own, pickle.loads(pickle.dumps(own)), GroupLauncher(own)):
        y = (
            each(x, [given], bias=[more["bias"]])[0]
            if more and each.gives_list
            else each(x, [given])[0]
            if each.gives_list
            else None
        )
        np.testing.assert_array_equal(each(x, given, **more) if y is None else y, other(x, given, **more))
    call, wanted = (each.prepare(x, given, **more) for each in (own, other))
    assert (call is None) == (wanted is None)
    assert call is None or call.plan.kernel.batch is None  # only separate launches have kernels of their own
    assert own.explain(36) == other.explain(36)
    assert own.__doc__ == other.__doc__


@needs_opencl
def test_a_chain_of_one_takes_a_list_and_a_pattern_an_array() -> None:
    x, weights = inputs()
    y = Launcher(PATTERN)(x, weights)
    for own in (Launcher(Chain((PATTERN,))), ChainLauncher(PATTERN), ChainLauncher(Launcher(Chain((PATTERN,))))):
        np.testing.assert_array_equal(own(x, [weights]), y)
        call = own.prepare(x, [weights])
        np.testing.assert_array_equal(call(), y)
        with pytest.raises(LaunchError, match="got 2 weight arrays; 1 are needed, one per factor"):
            own(x, [weights, weights])


@pytest.mark.parametrize("chain", [Chain((PATTERN,)), PAIR])
def test_a_chain_refuses_the_array_of_its_first_factor(chain: Chain) -> None:
    """Its items along a would be taken for arrays of one factor each."""
    x, weights = inputs()
    for own in (Launcher(chain), ChainLauncher(chain)):
        with pytest.raises(LaunchError, match=r"weights=array\(\[.*; accepted: a list of arrays, one per factor"):
            own(x, weights)


def test_a_launcher_of_several_factors_is_flat_in_a_chain_and_a_group() -> None:
    own = Launcher(PAIR, batches=[5], bias=True)
    assert own.factors[0].batches == {5}
    longer = ChainLauncher(own, "1,7,12,1")
    assert repr(longer) == "ChainLauncher(Launcher(2, 9, 5, 3), Launcher(1, 4, 18, 3), Launcher(1, 7, 12, 1))"
    assert GroupLauncher(own, own).chains == (PAIR, PAIR)
    assert GroupLauncher(own).stated.bias


def test_what_belongs_to_one_factor_is_refused_of_several() -> None:
    own = Launcher(PAIR)
    remedy = "and this launcher has 2; accepted: one of launcher.factors"
    with pytest.raises(LaunchError, match=f"gradients of weights belong to one factor, {remedy}"):
        own.gradient(draw(3, 30), draw(3, 12))
    with pytest.raises(LaunchError, match=f"packed weights belong to one factor, {remedy}"):
        own.pack([draw(*SHAPE), draw(1, 4, 18, 3)])
    several = "text such as 1,192,48,2; several factors are a Chain, and several chains on one x a GroupLauncher"
    for given in ([PATTERN, "1,4,18,3"], [PAIR, PAIR], ([2, 9, 5, 3], [1, 4, 18, 3])):
        with pytest.raises(PatternError, match=several):
            Launcher(given)
    with pytest.raises(PatternError, match=r"text such as 1,192,48,2$"):
        Launcher(3)
    with pytest.raises(LaunchError, match="2,9,5,3: between='relu'; accepted: none, with one factor"):
        Launcher(PATTERN, between="relu")


def test_launchers_that_earlier_versions_pickled_load() -> None:
    chain, group = (pickle.loads(base64.b64decode(each)) for each in EARLIER)
    assert repr(chain) == (
        "ChainLauncher(Launcher(1, 2, 2, 2), Launcher(2, 2, 2, 1), between='relu', out_layout='bsl', fuse='no', "
        "layout='bsl', bias=True)"
    )
    layer = "ChainLauncher(Launcher(1, 3, 2, 2)"
    assert repr(group) == f"GroupLauncher({layer}, fuse='no', activation='relu'), {layer}, activation='relu'))"
    assert (group.fuse, group.layers[1].factors[0].batches) == ("no", {3})
    assert (
        chain.__doc__
        == ChainLauncher(
            "1,2,2,2", "2,2,2,1", between="relu", out_layout="bsl", fuse="no", layout="bsl", bias=True
        ).__doc__
    )
    assert all(repr(pickle.loads(pickle.dumps(each))) == repr(each) for each in (chain, group))


EARLIER = (  # a chain's launcher and a group's, as version 0.1 pickled their attributes
    "gAJja3NnZW4ubGF1bmNoLmNoYWluCkNoYWluTGF1bmNoZXIKcQApgXEBfXECKFgFAAAAY2hhaW5xA2Nrc2dlbi5wYXR0ZXJuCkNoYWluCnEEKYFx"
    "BX1xBihYBwAAAGZhY3RvcnNxB2Nrc2dlbi5wYXR0ZXJuClBhdHRlcm4KcQgpgXEJXXEKKEsBSwJLAksCZWJoCCmBcQtdcQwoSwJLAksCSwFlYoZx"
    "DVgEAAAAbmFtZXEOWAAAAABxD3ViWAYAAABjaGFpbnNxEGgFhXERaAdjZnVuY3Rvb2xzCnBhcnRpYWwKcRJja3NnZW4ubGF1bmNoLmxhdW5jaGVy"
    "CkxhdW5jaGVyCnEThXEUUnEVKGgTKEsBSwJLAksCXXEWdHEXfXEYTnRxGWIpUnEaaBJoE4VxG1JxHChoEyhLAksCSwJLAV1xHXRxHn1xH050cSBi"
    "KVJxIYZxIlgHAAAAYmV0d2VlbnEjWAQAAAByZWx1cSRYBAAAAGZ1c2VxJVgCAAAAbm9xJlgKAAAAb3V0X2xheW91dHEnWAMAAABic2xxKFgGAAAA"
    "c3RhdGVkcSlja3NnZW4uc3BlYy5rZXJuZWwKU3RhdGVkT3B0aW9ucwpxKimBcSt9cSwoWAYAAABsYXlvdXRxLWgoWAkAAABwcmVjaXNpb25xLk5Y"
    "CgAAAGFjdGl2YXRpb25xL1gEAAAAbm9uZXEwWAQAAABiaWFzcTGIWAgAAAByZXNpZHVhbHEyiVgHAAAAd2VpZ2h0c3EzWAQAAABzYW1lcTRYBgAA"
    "AGlucHV0c3E1aDR1YlgHAAAAX19kb2NfX3E2WBgBAABNdWx0aXBseSB4IGJ5IDEsMiwyLDIgdGhlbiAyLDIsMiwxLCA0IHRvIDQgZmVhdHVyZXMu"
    "CgpBIGNhbGwgdGFrZXMgeCwgd2VpZ2h0cyAoMSwgMiwgMiwgMiksICgyLCAyLCAyLCAxKSwgYmlhcyAob3IgYmlhcz1GYWxzZSkuClVubGVzcyBp"
    "dCBuYW1lcyBvdGhlcnMsIGl0cyBvcHRpb25zIGFyZTogbGF5b3V0IGJzbCwgYWN0aXZhdGlvbiBub25lLCBwcmVjaXNpb24gdGhhdCBvZiB0aGUg"
    "YXJyYXlzLCBvdXRfbGF5b3V0IGJzbC4KVGhlIGxheWVyIGhhcyBiZXR3ZWVuIHJlbHUsIGZ1c2Ugbm8ucTd1Yi4=",
    "gAJja3NnZW4ubGF1bmNoLmdyb3VwCkdyb3VwTGF1bmNoZXIKcQApgXEBfXECKFgGAAAAbGF5ZXJzcQNja3NnZW4ubGF1bmNoLmNoYWluCkNoYWlu"
    "TGF1bmNoZXIKcQQpgXEFfXEGKFgFAAAAY2hhaW5xB2Nrc2dlbi5wYXR0ZXJuCkNoYWluCnEIKYFxCX1xCihYBwAAAGZhY3RvcnNxC2Nrc2dlbi5w"
    "YXR0ZXJuClBhdHRlcm4KcQwpgXENXXEOKEsBSwNLAksCZWKFcQ9YBAAAAG5hbWVxEFgAAAAAcRF1YlgGAAAAY2hhaW5zcRJoCYVxE2gLY2Z1bmN0"
    "b29scwpwYXJ0aWFsCnEUY2tzZ2VuLmxhdW5jaC5sYXVuY2hlcgpMYXVuY2hlcgpxFYVxFlJxFyhoFShLAUsDSwJLAl1xGHRxGX1xGk50cRtiKVJx"
    "HIVxHVgHAAAAYmV0d2VlbnEeWAQAAABub25lcR9YBAAAAGZ1c2VxIFgCAAAAbm9xIVgKAAAAb3V0X2xheW91dHEiTlgGAAAAc3RhdGVkcSNja3Nn"
    "ZW4uc3BlYy5rZXJuZWwKU3RhdGVkT3B0aW9ucwpxJCmBcSV9cSYoWAYAAABsYXlvdXRxJ1gDAAAAYnNmcShYCQAAAHByZWNpc2lvbnEpTlgKAAAA"
    "YWN0aXZhdGlvbnEqaB9YBAAAAGJpYXNxK4lYCAAAAHJlc2lkdWFscSyJWAcAAAB3ZWlnaHRzcS1YBAAAAHNhbWVxLlgGAAAAaW5wdXRzcS9oLnVi"
    "WAcAAABfX2RvY19fcTBYyQAAAE11bHRpcGx5IHggYnkgMSwzLDIsMiwgNCB0byA2IGZlYXR1cmVzLgoKQSBjYWxsIHRha2VzIHgsIHdlaWdodHMg"
    "KDEsIDMsIDIsIDIpLgpVbmxlc3MgaXQgbmFtZXMgb3RoZXJzLCBpdHMgb3B0aW9ucyBhcmU6IGxheW91dCBic2YsIGFjdGl2YXRpb24gbm9uZSwg"
    "cHJlY2lzaW9uIHRoYXQgb2YgdGhlIGFycmF5cy4KVGhlIGxheWVyIGhhcyBmdXNlIG5vLnExdWJoBCmBcTJ9cTMoaAdoCCmBcTR9cTUoaAtoDCmB"
    "cTZdcTcoSwFLA0sCSwJlYoVxOGgQaBF1YmgSaDSFcTloC2gUaBWFcTpScTsoaBUoSwFLA0sCSwJdcTxLA2F0cT19cT5OdHE/YilScUCFcUFoHmgf"
    "aCBYBAAAAGF1dG9xQmgiTmgjaCQpgXFDfXFEKGgnaChoKU5oKmgfaCuJaCyJaC1oLmgvaC51YmgwWLIAAABNdWx0aXBseSB4IGJ5IDEsMywyLDIs"
    "IDQgdG8gNiBmZWF0dXJlcy4KCkEgY2FsbCB0YWtlcyB4LCB3ZWlnaHRzICgxLCAzLCAyLCAyKS4KVW5sZXNzIGl0IG5hbWVzIG90aGVycywgaXRz"
    "IG9wdGlvbnMgYXJlOiBsYXlvdXQgYnNmLCBhY3RpdmF0aW9uIG5vbmUsIHByZWNpc2lvbiB0aGF0IG9mIHRoZSBhcnJheXMucUV1YoZxRmgSaAgp"
    "gXFHfXFIKGgLaA2FcUloEGgRdWJoCCmBcUp9cUsoaAtoNoVxTGgQaBF1YoZxTWgjaCQpgXFOfXFPKGgnaChoKU5oKlgEAAAAcmVsdXFQaCuJaCyJ"
    "aC1oLmgvaC51YmgLaBxoQIZxUWggaCFoHmgfaDBY4wAAAE11bHRpcGx5IHggYnkgMSwzLDIsMjsgMSwzLDIsMiwgNCB0byA2LCA2IGZlYXR1cmVz"
    "LgoKQSBjYWxsIHRha2VzIHgsIHdlaWdodHMgKDEsIDMsIDIsIDIpOyAoMSwgMywgMiwgMikuClVubGVzcyBpdCBuYW1lcyBvdGhlcnMsIGl0cyBv"
    "cHRpb25zIGFyZTogbGF5b3V0IGJzZiwgYWN0aXZhdGlvbiByZWx1LCBwcmVjaXNpb24gdGhhdCBvZiB0aGUgYXJyYXlzLgpUaGUgbGF5ZXIgaGFz"
    "IGZ1c2Ugbm8ucVJ1Yi4=",
)


def test_only_the_first_launcher_of_a_chain_reads_exchanged_inputs() -> None:
    launcher = ChainLauncher(Launcher("l.i@4,8,16,1"), Launcher("l.i@8,8,4,1", batches=[5]))
    assert [each.pattern for each in launcher.factors] == list(launcher.chain)
    assert [str(each.pattern) for each in launcher.factors] == ["l.i@4,8,16,1@k.i", "8,8,4,1"]
    assert launcher.factors[1].batches == {5}
