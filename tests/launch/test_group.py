"""Layers on one x: correct, in one launch if a device has one, with each output in its place; what is refused."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices.base import Device
from ksgen.errors import LaunchError, PatternError, SpecError
from ksgen.families import FAMILIES
from ksgen.families.chains import layer_kernels
from ksgen.families.gemv.group import GemvGroupConstants
from ksgen.launch import explain
from ksgen.launch.arrays import view
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import Plan
from ksgen.launch.weights import storage_of
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from ksgen.tuning import tuner
from ksgen.tuning.job import Candidate, Job
from ksgen.tuning.search import Tuned
from ksgen.tuning.trials import TrialStore
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.host_memory import processor
from tests.support.libraries import library
from tests.support.native import chosen_native
from tests.support.tuning_search import TimedEngine

CHAINS = (  # 24 features in; one, two and three factors
    (Pattern(3, 5, 4, 2), Pattern(1, 7, 10, 3)),
    (Pattern(2, 9, 4, 3),),
    (Pattern(1, 4, 8, 3), Pattern(3, 6, 4, 1), Pattern(1, 5, 9, 2)),
)
OUT = [chain[-1].out_features for chain in CHAINS]  # 21, 54 and 10
MANY = 100  # rows of the batch: enough for one launch on two cores
Array = np.ndarray[Any, Any]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The family and job of each launch."""
    found: list[str] = []
    launch = Plan.launch
    monkeypatch.setattr(
        Plan,
        "launch",
        lambda plan, *given: (found.append(f"{plan.choice.family} {plan.kernel.job}"), launch(plan, *given))[1],
    )
    return found


def group(fuse: str = "auto") -> GroupLauncher:
    return GroupLauncher(*(ChainLauncher(*(Launcher(*each.shape) for each in chain), fuse=fuse) for chain in CHAINS))


def draw(*shape: int, precision: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(numpy_dtype(precision))


def weights_of(precision: str = "float32") -> list[list[Array]]:
    return [
        [
            (draw(*each.shape, seed=10 * number + at) / np.sqrt(each.c)).astype(numpy_dtype(precision))
            for at, each in enumerate(chain)
        ]
        for number, chain in enumerate(CHAINS)
    ]


def rows(features: int, layout: str, batch: int = MANY, precision: str = "float32", seed: int = 0) -> Array:
    return draw(*((batch, features) if layout == "bsf" else (features, batch)), precision=precision, seed=seed)


def truth_of(x: Array, number: int, weights: list[Array], layout: str, **added: Any) -> Array:
    between: Array = x.astype(np.float64)
    for pattern, each in zip(CHAINS[number][:-1], weights, strict=False):
        between = reference.multiply(pattern, between, each, layout)
    return reference.multiply(CHAINS[number][-1], between, weights[-1], layout, **added)


def is_right(y: Array, truth: Array, precision: str = "float32") -> bool:
    error = np.linalg.norm(np.asarray(y).astype(np.float64) - truth)
    return bool(error <= 2 * tolerance(precision, 40) * np.linalg.norm(truth))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fuse", ["yes", "no"])
def test_a_group_of_one_layer_gives_what_the_layer_gives(
    layout: str, fuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_native(monkeypatch)
    layer, own = ChainLauncher(*CHAINS[0], fuse=fuse), weights_of()[0]
    x, added = rows(24, layout), {"bias": draw(OUT[0]), "residual": rows(OUT[0], layout, seed=1)}
    (y,) = GroupLauncher(layer)(x, [own], layout=layout, **{name: [array] for name, array in added.items()})
    np.testing.assert_array_equal(y, layer(x, own, layout=layout, **added))
    out = np.empty_like(y)
    assert GroupLauncher(layer)(x, [own], layout=layout, out=[out])[0] is out
    np.testing.assert_array_equal(out, layer(x, own, layout=layout))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [7, MANY])
@pytest.mark.parametrize("added", [(), ("bias", "residual")])
def test_outputs_are_neighbours_in_memory(
    either: Device, launched: list[str], layout: str, batch: int, added: tuple[str, ...]
) -> None:
    x, weights = rows(24, layout, batch), weights_of()
    given = {
        "bias": [draw(count, seed=1) for count in OUT],
        "residual": [rows(count, layout, batch, seed=2) for count in OUT],
    }
    chosen: dict[str, Any] = {name: given[name] for name in added}
    is_one = batch == MANY or layout == "bsf"  # whose weights are small
    fuse = "yes" if either.shares_host and batch == MANY and layout == "bsl" else "auto"  # which takes none there
    ys = group(fuse)(x, weights, layout=layout, activation="relu", **chosen)
    for number, y in enumerate(ys):
        own = {name: each[number] for name, each in chosen.items()}
        assert is_right(y, truth_of(x, number, weights[number], layout, activation="relu", **own))
    if either.shares_host and is_one:  # one launch writes them into one array
        assert len({id(y.base) for y in ys}) == 1
        assert ys[0].base.shape == ((batch, sum(OUT)) if layout == "bsf" else (sum(OUT), batch))
    if either.shares_host:
        assert launched == (["vector chain"] if is_one else ["vector multiply"] * 6)


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float64", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_other_precisions_and_a_slice_of_x(either: Device, precision: str, layout: str) -> None:
    whole, weights = (
        rows(30, layout, precision=precision) if layout == "bsf" else draw(24, 130, precision=precision),
        weights_of(precision),
    )
    x = whole[:, 3:27] if layout == "bsf" else whole[:, 7:107]
    for number, y in enumerate(group()(x, weights, layout=layout)):
        assert is_right(y, truth_of(x, number, weights[number], layout), precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_go_where_they_are_wanted(either: Device, layout: str) -> None:
    """Into one array, a slice of a larger one, or arrays apart, of which one is the residual itself."""
    x, weights, own = rows(24, layout), weights_of(), group()
    truths = [truth_of(x, number, weights[number], layout) for number in range(3)]
    larger = np.full((MANY, sum(OUT) + 9) if layout == "bsf" else (sum(OUT) + 9, MANY), 7, np.float32)
    wanted = larger[:, 4 : 4 + sum(OUT)] if layout == "bsf" else larger[4 : 4 + sum(OUT)]
    packed = [
        [factor.pack(each) for factor, each in zip(layer.factors, listed, strict=True)]
        for layer, listed in zip(own.layers, weights, strict=True)
    ]
    for given in (weights, packed):
        wanted[:] = np.nan
        ys = own(x, given, layout=layout, out=wanted)
        assert all(is_right(y, truth) and np.shares_memory(y, larger) for y, truth in zip(ys, truths, strict=True))
    assert (larger == 7).sum() == 9 * MANY
    apart = [rows(count, layout, seed=3) for count in OUT]
    before = [each.copy() for each in apart]
    ys = own(x, weights, layout=layout, out=apart, residual=apart)
    assert all(y is each for y, each in zip(ys, apart, strict=True))
    assert all(is_right(y, truth + each) for y, truth, each in zip(ys, truths, before, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prepared_call_reads_what_the_arrays_hold_by_then(either: Device, layout: str) -> None:
    own, x, weights = group("yes" if either.shares_host else "auto"), rows(24, layout), weights_of()
    call = own.prepare(x, weights, layout=layout, activation="relu")
    assert (call is not None) == either.shares_host
    if call is None:
        return
    x[:] = rows(24, layout, seed=5)
    weights[1][0] *= 2
    for number, y in enumerate(call()):
        assert is_right(y, truth_of(x, number, weights[number], layout, activation="relu"))
    assert group().prepare(rows(24, "bsl"), weights, layout="bsl") is None  # each factor is launched
    with pytest.raises(LaunchError, match="got x of shape"):
        own.prepare(x[1:, 1:], weights, layout=layout)


@pytest.mark.libraries
def test_a_prepared_call_keeps_the_memory_of_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, _ = library("torch"), chosen_native(monkeypatch)
    x, weights = torch.randn(MANY, 24), [[torch.from_numpy(each) for each in listed] for listed in weights_of()]
    call = group().prepare(x, weights)
    assert call is not None
    kept = [id(each) for each in call.keep]
    given = [x, *(each for listed in weights for each in listed), *call.out]
    assert all(id(storage_of(view(each))) in kept for each in given)


def test_layers_of_one_factor_take_their_weights_alone(either: Device, launched: list[str]) -> None:
    pattern = CHAINS[1][0]
    own, x, weights = (
        GroupLauncher(Launcher(*pattern.shape), Launcher(*pattern.shape)),
        rows(24, "bsf"),
        [draw(*pattern.shape, seed=at) for at in (1, 2)],
    )
    for given in (weights, [[each] for each in weights]):
        for y, each in zip(own(x, given), weights, strict=True):
            assert is_right(y, reference.multiply(pattern, x, each, "bsf"))
    if either.shares_host:
        assert launched == ["vector chain"] * 2


@pytest.mark.libraries
def test_tensors() -> None:
    torch, _ = library("torch"), processor()
    x, weights = rows(24, "bsf"), weights_of()
    ys = group()(torch.from_numpy(x), [[torch.from_numpy(each) for each in listed] for listed in weights])
    assert all(is_right(y.numpy(), truth_of(x, number, weights[number], "bsf")) for number, y in enumerate(ys))
    assert ys[1].stride() == (sum(OUT), 1)


def test_what_is_not_finite_stays_in_its_batch_entry() -> None:
    processor()
    x = rows(24, "bsf")
    x[-1, 3], x[40, 9] = np.inf, np.nan
    for y in group()(x, weights_of()):
        assert not np.isfinite(y[[40, -1]]).all(1).any()
        assert np.isfinite(np.delete(y, (40, MANY - 1), 0)).all()


def refused(message: str, *layers: Any, **given: Any) -> None:
    x = rows(24, "bsf")
    with pytest.raises(LaunchError, match=message):
        (GroupLauncher(*layers) if layers else group())(given.pop("x", x), given.pop("weights", weights_of()), **given)


def test_what_a_user_gives_wrong() -> None:
    one = Launcher(2, 9, 4, 3)
    with pytest.raises(PatternError, match="factors=3; accepted: one Pattern or more"):
        GroupLauncher(3)
    with pytest.raises(
        LaunchError, match=r"layers=\(\); accepted: ChainLaunchers, Launchers or chains, one per argument"
    ):
        GroupLauncher()
    refused("takes 24, .* takes 30 features; accepted: layers that take the same x", one, Launcher(1, 3, 30, 1))
    refused("weights: got 2 entries; 3 are needed, one per layer, in a list", weights=weights_of()[:2])
    refused("got 1 weight array; 2 are needed", weights=[each[:1] for each in weights_of()])
    refused("bias: got 2 entries; 3 are needed", bias=[draw(21), draw(54)])
    refused(r"got bias of shape \(54,\); \(21,\) is needed", bias=[draw(54), draw(54), draw(10)])
    refused(r"got out of shape \(100, 84\); one with 85 features is needed", out=rows(84, "bsf"))
    refused(r"got out of shape \(99, 21\)", out=rows(85, "bsf", 99))
    refused("out: got 2 entries; 3 are needed", out=[rows(21, "bsf"), rows(54, "bsf")])
    refused("out is of type SimpleNamespace, which has no slices", out=SimpleNamespace(shape=(100, 85)))
    refused(r"got x of shape \(100, 23\)", x=rows(23, "bsf"))
    refused("layout='nchw'; accepted", layout="nchw")
    refused("precision='tf33'", precision="tf33")
    refused("out_layout='bsl' with layout='bsf'; accepted: one layout for x and all outputs", out_layout="bsl")
    with pytest.raises(
        LaunchError, match="out_layout='bsl' with layout='bsf'; accepted: one layout for x and all outputs"
    ):
        group().explain(3, out_layout="bsl")
    with pytest.raises(SpecError, match="job='gradient'; accepted: chain"):
        group().explain(3, job="gradient")
    refused("got x of float64 and weights of float32", x=rows(24, "bsf", precision="float64"))


def fused_group(*fuses: str, between: str = "none") -> GroupLauncher:
    each = [[Launcher(*pattern.shape) for pattern in chain] for chain in CHAINS]
    made = [
        ChainLauncher(*one, fuse=fuse, between=between if len(one) == 2 else "none")
        for one, fuse in zip(each, fuses, strict=True)
    ]
    return GroupLauncher(*made)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("fuses", "is_one"), [(("yes", "auto", "yes"), True), (("yes", "no", "auto"), False), (("auto",) * 3, False)]
)
def test_a_group_is_one_launch_where_a_layer_asks_for_it(
    launched: list[str], fuses: tuple[str, ...], is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small batches, which are divided differently, follow the option too. `explain` reports it."""
    chosen_native(monkeypatch)
    monkeypatch.setattr("ksgen.launch.fused.SMALL_BYTES", 0)
    own, x, weights = fused_group(*fuses), rows(24, "bsf", 1), weights_of()
    ys = own(x, weights)
    assert (own._title + " at batch 1" in own.explain(1)) == is_one
    for number, y in enumerate(ys):
        assert is_right(y, truth_of(x, number, weights[number], "bsf"))
    assert (launched.count("vector chain") == len(launched) == 1) == is_one


def test_where_one_launch_of_a_group_cannot_be_had_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    x, weights, accepted = rows(24, "bsf"), weights_of(), "; accepted: layers with fuse='auto' or 'no'"
    with pytest.raises(LaunchError, match=f"the activations between their factors differ{accepted}"):
        fused_group("yes", "auto", "auto", between="relu")(x, weights)
    with pytest.raises(LaunchError, match=f"only some layers have a bias, or a residual{accepted}"):
        fused_group("auto", "auto", "yes")(x, weights, bias=[draw(21), None, None])


def test_outputs_that_meet_are_refused() -> None:
    whole = rows(200, "bsf")
    parts = [whole[:, :21], whole[:, 20:74], whole[:, 100:110]]
    refused("out of layer 1 shares memory with out of layer 2", out=parts)
    refused(
        "out of layer 3 shares memory with x",
        x=whole[:, 90:114],
        out=[whole[:, :21], whole[:, 21:75], whole[:, 100:110]],
    )
    residuals = [rows(21, "bsf"), whole[:, 100:154], rows(10, "bsf")]
    refused(
        "out of layer 3 shares memory with residual of layer 2",
        out=[whole[:, :21], whole[:, 21:75], whole[:, 100:110]],
        residual=residuals,
    )


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("prepares", [False, True])
def test_an_output_over_any_layer_s_weights_is_refused(number: int, prepares: bool) -> None:
    """The weights of a later layer count too, because they are read after the first output was written."""
    shared, weights = rows(21, "bsf"), weights_of()
    count = weights[number][-1].size
    weights[number][-1] = shared.reshape(-1)[-count:].reshape(weights[number][-1].shape)
    outs, own = [shared, rows(54, "bsf"), rows(10, "bsf")], group("no")
    factor = f" of factor {len(weights[number])}" if len(weights[number]) > 1 else ""
    at = f"weights{factor} of layer {number + 1}"
    with pytest.raises(LaunchError, match=f"out of layer 1 shares memory with {at}; give memory of its own"):
        (own.prepare if prepares else own)(rows(24, "bsf"), weights, out=outs)


# ---- on a GPU

LAYERS = (((2, 48, 64, 1), (1, 64, 48, 2)), ((2, 24, 64, 1),), ((2, 48, 64, 1), (1, 64, 48, 2)))  # 128 -> 128, 48, 128


def of_gpu() -> GroupLauncher:
    return GroupLauncher(*(ChainLauncher(*(Launcher(*shape) for shape in layer)) for layer in LAYERS))


def are_right(own: dict[str, Any], given: dict[str, Any], layout: str, precision: str) -> None:
    """Each layer's output, with its bias and a relu behind it."""
    for at, layer in enumerate(LAYERS):
        y: Array = own["x"].astype(np.float64)
        for shape, each in zip(layer[:-1], own["weights"][at], strict=False):
            y = reference.multiply(Pattern(*shape), y, each, layout)
        last = {"bias": own["bias"][at], "activation": "relu"}
        truth = reference.multiply(Pattern(*layer[-1]), y, own["weights"][at][-1], layout, **last)
        assert is_right(given["out"][at].data.content, truth, precision), at


def on_gpu(gpu: FakeGpu, layout: str, precision: str, batch: int) -> tuple[dict[str, Array], dict[str, Any], list[Any]]:
    """x, and a bias and an output for each layer: NumPy's, and on the GPU; and the weights there."""
    own: dict[str, Any] = {"x": rows(128, layout, batch, precision), "weights": [], "bias": [], "out": []}
    for at, layer in enumerate(LAYERS):
        features = Pattern(*layer[-1]).out_features
        own["weights"].append(
            [draw(*shape, precision=precision, seed=at) / np.sqrt(shape[2]).astype(precision) for shape in layer]
        )
        own["bias"].append(draw(features, precision=precision, seed=at))
        own["out"].append(rows(features, layout, batch, precision, seed=5))
    there = {name: [FakeTensor(gpu, each) for each in own[name]] for name in ("bias", "out")}
    return (
        own,
        there | {"x": FakeTensor(gpu, own["x"])},
        [[FakeTensor(gpu, each) for each in layer] for layer in own["weights"]],
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "layout", "batch", "family"),
    [
        ("float16", "bsf", 40, "mma"),
        ("float32", "bsl", 3000, "simt"),
        ("float16", "bsf", 1, "gemv"),
        ("float32", "bsl", 16, "gemv"),
    ],
)
def test_layers_are_one_launch_on_a_gpu(
    gpu: FakeGpu, launched: list[str], precision: str, layout: str, batch: int, family: str
) -> None:
    """Packed before it, or once; a graph that records it replays it; each output where it is wanted."""
    own, given, weights = on_gpu(gpu, layout, precision, batch)
    group_of_layers = of_gpu()
    options: dict[str, Any] = {"layout": layout, "bias": given["bias"], "activation": "relu", "out": given["out"]}
    ys = group_of_layers(given["x"], weights, **options)
    gpu.synchronize()
    assert all(y is wanted for y, wanted in zip(ys, given["out"], strict=True))
    assert [entry.endswith("_pack") for entry, _ in gpu.launches] == [True] * 5 + [False]
    assert gpu.launches[-1][0].startswith("ks_2x48x64x1_1x64x48x2_and_2x24x64x1_and_2x48x64x1_1x64x48x2")
    assert launched == [f"{family} chain"]
    are_right(own, given, layout, precision)
    packed = [
        [factor.pack(each) for factor, each in zip(layer.factors, listed, strict=True)]
        for layer, listed in zip(group_of_layers.layers, weights, strict=True)
    ]
    for _ in range(2):
        group_of_layers(given["x"], packed, **options)
    gpu.synchronize()
    gpu.launches.clear()
    gpu.begin_capture()
    group_of_layers(given["x"], packed, **options)
    replay = gpu.end_capture()
    assert len(gpu.launches) == 1
    for out in given["out"]:
        out.write(np.nan)
    replay()
    are_right(own, given, layout, precision)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("group_us", "is_one"), [(4.0, True), (5.0, False)])
def test_what_a_search_found_for_small_batches_is_launched(
    gpu: FakeGpu, group_us: float, is_one: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One launch is chosen if it took less than the 4.5 us of separate layers."""
    gpu.name = f"GPU of {group_us} us"  # planners keep wisdom by names
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setattr(explain, "find_device", lambda _: gpu)
    chains = [tuple(Pattern(*shape) for shape in layer) for layer in LAYERS]
    kernel, family, limits = KernelSpec(chains, "float16", "bsf", Epilogue()), FAMILIES["gemv"], limits_of(gpu)
    default = family.default(kernel, limits, 3)
    fastest = [each for each in family.space(kernel, limits) if each.tile_batch == 4 and each != default][-1]

    def time_of(own: KernelSpec, candidate: Candidate) -> float:
        return 1.5 if not own.is_group else group_us if candidate.constants == fastest else 8.0

    monkeypatch.setattr(
        tuner, "list_space", lambda job, *_: [Candidate("gemv", fastest)] if job.kernel.is_group else []
    )
    engine, store = TimedEngine(gpu, time_of), TrialStore(tmp_path / "trials.sqlite")
    try:
        found = tuner.Tuner(engine, store).run(
            [Job(each, 3) for each in dict.fromkeys([kernel, *layer_kernels(kernel)])]
        )
    finally:
        engine.close()
    assert isinstance(found[0], Tuned)
    assert (found[0].best.family, found[0].best.constants, found[0].is_kept) == ("gemv", fastest, True)
    assert {each.family for each in store.trials(kernel, 3, gpu.name)} > {"gemv"}

    chosen: list[Choice] = []
    launch = Plan.launch
    monkeypatch.setattr(Plan, "launch", lambda plan, *given: (chosen.append(plan.choice), launch(plan, *given))[1])
    own, given, weights = on_gpu(gpu, "bsf", "float16", 3)
    of_gpu()(given["x"], weights, bias=given["bias"], activation="relu", out=given["out"])
    gpu.synchronize()
    are_right(own, given, "bsf", "float16")
    told = of_gpu().explain(3, precision="float16")
    says = f"searches measured {group_us:.3g} us for one launch at batch 3, and 4.5 us for the layers one by one"
    if is_one:
        assert [(each.family, each.constants, each.why) for each in chosen] == [
            ("gemv", fastest, "wisdom, measured at batch 3; 2.00 times as fast as the default")
        ]
        first, compared = told.splitlines()
        assert first.endswith(f": one launch, by gemv, {fastest}; {says}; {chosen[0].why}")
        assert compared.startswith("dense product of 128 to 304 features at batch 4: the cost model expects ")
    else:
        assert GemvGroupConstants not in {type(each.constants) for each in chosen}  # the layers may each be gemv's
        assert told.splitlines()[0].endswith(f": layer by layer; {says}")


def test_inside_a_capture_no_group_is_built(gpu: FakeGpu) -> None:
    _, given, weights = on_gpu(gpu, "bsf", "float16", 40)
    gpu.begin_capture()
    with pytest.raises(
        LaunchError, match=r"builds and loads its kernel.*cannot record; call it once before the capture"
    ):
        of_gpu()(given["x"], weights, out=given["out"])


def test_explain_says_whether_layers_are_one_launch_and_why(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(explain, "find_device", lambda _: gpu)
    told = of_gpu().explain(25088, precision="float16")
    assert re.match(
        r"2,48,64,1 then 1,64,48,2, and 2,24,64,1, and 2,48,64,1 then .* on Fake GPU: one launch, by mma, ", told
    )
    assert re.search(
        r"the cost model expects [\d.]+ us for one launch at batch 25088, and [\d.]+ us for the layers one by one; "
        r"the family's default: no search has been run for this kernel on this device; to find the fastest: ksgen "
        r'calibrate 2,48,64,1 1,64,48,2 --precision float16 --group-with "2,24,64,1" '
        r'--group-with "2,48,64,1 1,64,48,2" --batch 25088$',
        told,
        re.MULTILINE,
    )
    told = of_gpu().explain(3, precision="bfloat16", layout="bsl")
    assert ": one launch, by gemv, tile_batch=" in told
    assert re.search(
        r"the cost model expects [\d.]+ us for one launch at batch 4, and [\d.]+ us for the layers one by one; "
        r"the family's default: no search has been run for this kernel on this device; to find the fastest: ksgen "
        r'calibrate 2,48,64,1 1,64,48,2 --precision bfloat16 --layout bsl --group-with "2,24,64,1" '
        r'--group-with "2,48,64,1 1,64,48,2" --batch 3$',
        told,
        re.MULTILINE,
    )
    long = GroupLauncher(
        *(ChainLauncher(Launcher(1, 64, 64, 1), Launcher(1, 64, 64, 1), Launcher(1, 64, 64, 1)) for _ in range(2))
    )
    first, *_ = long.explain(3, precision="float32", weights="int8", inputs="int8").splitlines()
    assert first.endswith("layer by layer; no family for such a batch takes x in int8 through all factors")
    wide = GroupLauncher(*(ChainLauncher(Launcher(1, 8192, 16, 1), Launcher(1, 16, 8192, 1)) for _ in range(2)))
    first, *each, compared = wide.explain(25088, precision="float16").splitlines()
    assert first.endswith("layer by layer; no family has room for all factors in one launch, in this precision")
    assert [line.partition(";")[0] for line in each[::3]] == ["1,8192,16,1 then 1,16,8192,1: one launch per factor"] * 2
    assert compared.startswith("dense product of 16 to 32 features at batch 25088: the cost model expects ")
    alone = GroupLauncher(Launcher(1, 16, 64, 1)).explain(8).splitlines()[0]
    assert alone == "1,16,64,1: layer by layer; there is one factor"


def test_an_output_over_weights_that_were_packed_where_they_lie_is_refused(gpu: FakeGpu) -> None:
    """They are packed for a kernel at their first use, which for a second layer is after the first output was
    written.
    """

    def shown(content: Array) -> FakeArray:
        found = FakeArray(gpu, draw(1))
        found.show(gpu, content)
        return found

    own, shared = of_gpu(), rows(128, "bsf", 40)
    second = own.layers[1].factors[0].pack(shown(shared.reshape(-1)[-2 * 24 * 64 :].reshape(2, 24, 64, 1)))
    first, third = ([FakeArray(gpu, draw(*shape)) for shape in LAYERS[at]] for at in (0, 2))
    outs = [shown(shared), *(FakeArray(gpu, rows(features, "bsf", 40)) for features in (48, 128))]
    with pytest.raises(
        LaunchError, match="out of layer 1 shares memory with weights of layer 2; give memory of its own"
    ):
        own(FakeArray(gpu, rows(128, "bsf", 40)), [first, [second], third], out=outs)
