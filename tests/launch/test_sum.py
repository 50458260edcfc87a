"""Sums of chains: correct by float64 on every kind of device, accumulated in one array, and what is refused."""

import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ksgen import (
    Chain,
    ChainLauncher,
    GroupLauncher,
    Launcher,
    SumLauncher,
    quantize,
    quantize_inputs,
    reference,
    structures,
)
from ksgen.devices import native
from ksgen.devices.base import Device
from ksgen.errors import LaunchError, SpecError
from ksgen.launch import explain
from ksgen.launch.fused import Verdict
from ksgen.launch.memory import numpy_dtype
from ksgen.launch.plan import Plan
from ksgen.launch.weights import Weights
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.host_memory import processor
from tests.support.libraries import library
from tests.support.native import chosen_native

CHAINS = (  # 24 to 30 features; two factors, one, and one with exchanged outputs
    Chain((Pattern(3, 5, 4, 2), Pattern(1, 10, 10, 3))),
    Chain((Pattern(2, 5, 4, 3),)),
    Chain((Pattern(1, 5, 4, 6, "j.k"),)),
)
Array = np.ndarray[Any, Any]


def draw(*shape: int, precision: str = "float32", seed: int = 0) -> Array:
    values = np.random.default_rng([seed, *shape]).standard_normal((2, *shape))
    return (values[0] + 1j * values[1] if precision == "complex64" else values[0]).astype(numpy_dtype(precision))


def rows(features: int, layout: str, batch: int = 33, precision: str = "float32", seed: int = 0) -> Array:
    return draw(*((batch, features) if layout == "bsf" else (features, batch)), precision=precision, seed=seed)


def weights_of(precision: str = "float32") -> list[list[Array]]:
    return [
        [draw(*each.shape, precision=precision, seed=10 * number + at) for at, each in enumerate(chain)]
        for number, chain in enumerate(CHAINS)
    ]


def activated(y: Array, activation: str) -> Array:
    """The activation in float64."""
    one = np.ones((1, 1, 1, 1))
    return reference.multiply(Pattern(1, 1, 1, 1), y.reshape(-1, 1), one, "bsf", activation=activation).reshape(y.shape)


def truth_of(
    x: Array,
    weights: list[list[Array]],
    layout: str,
    bias: Any = 0.0,
    residual: Any = 0.0,
    chains: Sequence[Chain] = CHAINS,
) -> Array:
    """The sum in float64, or in complex128."""
    total = np.asarray(residual, np.float64) + (bias if layout == "bsf" else np.reshape(bias, (-1, 1)))
    for chain, each in zip(chains, weights, strict=True):
        y: Array = x.astype(np.complex128 if np.iscomplexobj(x) else np.float64)
        for pattern, factor in zip(chain, each, strict=True):
            y = reference.multiply(pattern, y, factor, layout)
        total = total + y
    return total


def is_right(y: Array, truth: Array, precision: str = "float32") -> bool:
    error = np.linalg.norm(np.asarray(y).astype(truth.dtype) - truth)
    return bool(error <= 3 * tolerance(precision, 40) * np.linalg.norm(truth))


def total(**options: Any) -> SumLauncher:
    return SumLauncher(*(ChainLauncher(chain, **options) for chain in CHAINS))


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Epilogues of the kernels in the order of their launches."""
    found: list[Any] = []
    launch = Plan.launch
    monkeypatch.setattr(
        Plan,
        "launch",
        lambda plan, arguments, stream: (found.append(plan.kernel.epilogue), launch(plan, arguments, stream))[1],
    )
    return found


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("batch", [1, 33])
def test_chains_add_to_one_array(either: Device, layout: str, batch: int, written: list[Any]) -> None:
    """The bias is added once, and the residual once, also if y lies in its memory."""
    x, weights, bias, residual = rows(24, layout, batch), weights_of(), draw(30), rows(30, layout, batch, seed=1)
    own, truth = total(), truth_of(x, weights, layout, bias, residual)
    y = own(x, weights, layout=layout, bias=bias, residual=residual)
    assert is_right(y, truth)
    ends = [each for each in written if each != Epilogue()]
    assert ends == [Epilogue(True, "none", True), *[Epilogue(residual=True)] * 2]
    for given in ({"out": np.full_like(residual, np.nan), "residual": residual}, {"out": residual.copy()}):
        out = given["out"]
        assert own(x, weights, layout=layout, bias=bias, residual=given.get("residual", out), out=out) is out
        np.testing.assert_array_equal(out, y)
    assert is_right(own(x, weights, layout=layout), truth_of(x, weights, layout))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_activation_follows_the_sum(either: Device, layout: str, written: list[Any]) -> None:
    """The last kernel applies it, after it has added the sum of the others."""
    x, weights, bias, residual = rows(24, layout), weights_of(), draw(30), rows(30, layout, seed=1)
    stated = total(activation="gelu", bias=True, layout=layout)
    assert is_right(stated(x, weights, bias=bias), activated(truth_of(x, weights, layout, bias), "gelu"))
    ends = [each for each in written if each != Epilogue()]
    assert ends == [Epilogue(bias=True), Epilogue(residual=True), Epilogue(False, "gelu", True, True)]
    own = SumLauncher(*(ChainLauncher(chain, fuse="auto") for chain in reversed(CHAINS)))  # ends in two factors
    added = {"residual": residual, "residual_first": True, "layout": layout}
    y = own(x, weights[::-1], activation="relu", **added)
    assert is_right(y, activated(truth_of(x, weights, layout, residual=residual), "relu"))
    if either.shares_host:
        fused = SumLauncher(*(ChainLauncher(chain, fuse="yes") for chain in reversed(CHAINS)))
        for _ in range(2):
            np.testing.assert_allclose(fused(x, weights[::-1], activation="relu", **added), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("precision", ["float64", "float16", "bfloat16", "complex64"])
def test_other_precisions(precision: str) -> None:
    processor()
    x, weights = rows(24, "bsf", precision=precision), weights_of(precision)
    assert is_right(total()(x, weights), truth_of(x, weights, "bsf"), precision)


def test_slices_packed_weights_and_one_launch_per_chain() -> None:
    processor()
    weights, whole, larger = weights_of(), draw(33, 40), np.full((33, 50), 7, np.float32)
    own, x, out = total(fuse="auto"), whole[:, 5:29], larger[:, 9:39]
    packed = [
        [factor.pack(each) for factor, each in zip(layer.factors, listed, strict=True)]
        for layer, listed in zip(own.layers, weights, strict=True)
    ]
    for given in (weights, packed):
        out[:] = np.nan
        assert own(x, given, out=out) is out
        assert is_right(out, truth_of(x, weights, "bsf"))
    assert (larger == 7).sum() == 33 * 20
    assert total(fuse="no").prepare(x, weights) is None
    assert own.build([1, 33]) is own


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_prepared_call_launches_all_chains_again(either: Device, layout: str) -> None:
    own, weights, x = SumLauncher(*CHAINS[1:]), weights_of()[1:], rows(24, layout)
    bias, residual = draw(30), rows(30, layout, seed=1)
    options: dict[str, Any] = {"bias": bias, "activation": "relu", "residual_first": True, "layout": layout}
    call = own.prepare(x, weights, residual=residual, **options)
    assert "Launcher(2, 5, 4, 3)" in repr(call)
    for _ in range(3):
        y = call()
        assert y is call.out
        truth = truth_of(x, weights, layout, bias, residual, CHAINS[1:])
        assert is_right(y, activated(truth, "relu"))
        x *= -2
        weights[1][0] += 1
    with pytest.raises(LaunchError, match="belongs to this process"):
        pickle.dumps(call)
    pair = SumLauncher(CHAINS[0], ChainLauncher(CHAINS[0], fuse="no"))
    assert pair.prepare(x, weights_of()[:1] * 2, layout=layout) is None


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_repeated_prepared_call_is_one_call_of_the_library(is_packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It packs weights too. It reads the current x and weights, and runs on the wanted number of threads."""
    device, bias = chosen_native(monkeypatch), draw(30)
    own, weights, x = total(), weights_of(), rows(24, "bsf")
    given = [
        [factor.pack(each) for factor, each in zip(layer.factors, listed, strict=True)] if is_packed else listed
        for layer, listed in zip(own.layers, weights, strict=True)
    ]
    call = own.prepare(x, given, bias=bias)
    call()
    calls, launch = list[Any](), native._Recording._launch
    monkeypatch.setattr(native._Recording, "_launch", lambda *given: (calls.append(given[1]), launch(*given)))
    monkeypatch.setattr(device, "launch", lambda *_: pytest.fail("a launch apart"))
    for number, threads in enumerate((2, 2, 1, 1, 2), 1):
        monkeypatch.setattr("ksgen.launch.plan.wanted_threads", lambda threads=threads: threads)
        monkeypatch.setattr("ksgen.devices.native.wanted_threads", lambda threads=threads: threads)
        x *= -2
        if not is_packed:
            weights[1][0] += 1
        call.out[:] = np.nan
        assert is_right(call(), truth_of(x, weights, "bsf", bias))
        assert (len(calls), calls[-1]) == (number, threads)


def test_a_prepared_call_copies_arrays_that_begin_within_an_element(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    own, weights, x = SumLauncher(*CHAINS[1:]), weights_of()[1:], rows(24, "bsf")
    out = np.empty(33 * 30 * 4 + 1, np.uint8)[1:].view(np.float32).reshape(33, 30)
    call = own.prepare(x, weights, out=out)
    for _ in range(3):
        x *= 2
        assert call() is out
        assert is_right(out, truth_of(x, weights, "bsf", chains=CHAINS[1:]))


def streams(call: Any) -> bool:
    """Whether a prepared call's launch may use streaming stores."""
    names = call.plan.choice.constants.at_launch
    return bool(call.arguments[len(call.plan.operands) + names.index("streaming")])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_that_the_next_launch_reads_stay_in_the_caches(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that a launch adds to. Outputs larger than a cache, and all others, leave by streaming stores."""
    if chosen_native(monkeypatch).limits.vector_bytes == 32 and layout == "bsl":
        pytest.skip("rows of AVX2's tiles are parts of cache lines in batch-size-last, so that outputs do not stream")
    chains = [Chain((pattern,)) for pattern in (Pattern(2, 32, 4, 1), Pattern(1, 32, 4, 2))]
    x, weights = rows(8, layout, 4096), [draw(*chain[0].shape, seed=1) for chain in chains]
    truth = truth_of(x, [[each] for each in weights], layout, chains=chains)
    total, one = SumLauncher(*chains), Launcher(chains[0][0])
    call = total.prepare(x, weights, layout=layout)
    assert [each.plan.choice.constants.streaming for each in call.calls] == [1, 1]
    assert [streams(each) for each in call.calls] == [False, False]
    for _ in range(2):
        assert is_right(call(), truth)
    residual, out = rows(64, layout, 4096, seed=1), np.empty_like(call.out)
    for added, is_streaming in ((out, False), (residual, True)):
        assert streams(one.prepare(x, weights[0], layout=layout, residual=added, out=out)) is is_streaming
    assert streams(one.prepare(x, weights[0], layout=layout))
    monkeypatch.setattr("ksgen.launch.plan.CACHED_BYTES", out.nbytes - 1)
    assert [streams(each) for each in total.prepare(x, weights, layout=layout).calls] == [True, True]


def test_x_in_eight_bits() -> None:
    processor()
    chains = [Chain((pattern,)) for pattern in (Pattern(1, 8, 16, 2), Pattern(2, 8, 16, 1))]
    x, own = draw(9, 32), SumLauncher(*chains)
    stored = quantize_inputs(x, "int8")
    weights = [quantize(draw(*chain[0].shape), "int8", x_scale=stored.scale) for chain in chains]
    apart = [Launcher(chain[0])(stored.values, each) for chain, each in zip(chains, weights, strict=True)]
    np.testing.assert_allclose(own(stored.values, weights), apart[0] + apart[1], rtol=1e-5, atol=1e-5)


def test_dyad_is_the_sum_of_its_structures() -> None:
    processor()
    pair = structures.dyad(32, 16, blocks=4)
    state = {name: draw(*shape) for each in pair for name, shape in each.shapes.items()}
    weights = [each.from_state({name: state[name] for name in each.shapes}) for each in pair]
    own, x = SumLauncher(*(each.chain for each in pair)), draw(5, 32)
    expected = sum(ChainLauncher(each.chain)(x, given) for each, given in zip(pair, weights, strict=True))
    np.testing.assert_allclose(own(x, weights), expected, rtol=1e-5, atol=1e-5)


def test_an_explanation_has_each_chain_with_what_it_adds() -> None:
    processor()
    text = total().explain(batch=33, epilogue=Epilogue(bias=True))
    assert text.startswith(
        f"{' plus '.join(map(str, CHAINS))}: layer by layer; each chain adds the sum of the earlier ones"
    )
    assert "2x5x4x3_float32_bsf_residual at batch 33" in text
    text = str(total(bias=True).__doc__)
    assert text.startswith(f"Multiply x by {' plus '.join(map(str, CHAINS))} (24 to 30 features).")
    assert "bias (or bias=False)" in text


def test_a_sum_is_pickled_with_its_options() -> None:
    own = total(bias=True, layout="bsl", fuse="no")
    again = pickle.loads(pickle.dumps(own))
    assert (type(again), repr(again), again.stated, again.chains) == (SumLauncher, repr(own), own.stated, own.chains)


def test_what_does_not_fit_is_refused_before_any_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    processor()
    x, weights, own = rows(24, "bsf"), weights_of(), total()
    monkeypatch.setattr(Plan, "launch", lambda *_: pytest.fail("launched"))

    def refused(message: str, made: Any = own, **given: Any) -> None:
        with pytest.raises(LaunchError, match=message):
            made(given.pop("x", x), given.pop("weights", weights), **given)

    after = "accepted: residual_first=True, because each chain adds the sum of the earlier ones as its residual"
    refused(f"a residual after activation='relu'; {after}", activation="relu", residual=draw(33, 30))
    with pytest.raises(SpecError, match="residual_first='no'; accepted: True or False"):
        own(x, weights, residual_first="no")
    of_complex = {"x": rows(24, "bsf", precision="complex64"), "weights": weights_of("complex64")}
    with pytest.raises(SpecError, match="activation=relu of complex numbers"):
        own(**of_complex, activation="relu")
    refused("got 2 entries; 3 are needed, one per layer, in a list", weights=weights[:2])
    refused(r"got weights of shape \(2, 5, 4, 1\)", weights=[weights[0], [weights[1][0][..., :1].copy()], weights[2]])
    refused(r"got bias of shape \(29,\); \(30,\) is needed", bias=draw(29))
    refused(r"got out of shape \(33, 60\); \(33, 30\) is needed", out=draw(33, 60))
    refused("out shares memory with x", x=(shared := draw(33, 54))[:, :24], out=shared[:, 20:50])
    refused("bias is missing, but the launcher requires it; accepted: bias=an array, or bias=False", total(bias=True))
    refused("out_layout='bsl' with layout='bsf'", out_layout="bsl")
    with pytest.raises(LaunchError, match=f"a residual after activation='gelu'; {after}"):
        own.build(3, epilogue=Epilogue(activation="gelu", residual=True))


def test_a_launch_that_is_required_is_refused_before_any_other(either: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last chain requires one launch: its weights cannot be packed for one, arrays are copied, no kernel exists."""
    x, (pair, one, _) = rows(24, "bsf"), weights_of()
    monkeypatch.setattr(Plan, "launch", lambda *_: pytest.fail("launched"))

    def refused(why: str, weights: Any = (one, pair)) -> None:
        with pytest.raises(LaunchError, match=f"^ChainLauncher.*{why}; accepted: fuse='auto' or 'no'"):
            SumLauncher(CHAINS[1], ChainLauncher(CHAINS[0], fuse="yes"))(x, list(weights))

    if either.shares_host:
        refused("weights of the factors differ in storage", (one, [quantize(pair[0], "int8"), pair[1]]))
        monkeypatch.setattr(explain, "verdict", lambda *_: Verdict(False, "no family can"))
        refused("no family can")
    else:
        refused("arrays of the host are copied to .* for each factor")


@pytest.mark.parametrize("kind", [SumLauncher, GroupLauncher])
def test_a_gpu_or_stream_of_a_later_layer_alone_is_refused_before_any_launch(
    kind: type[GroupLauncher], gpu: FakeGpu
) -> None:
    """The first layer would otherwise have written its output already."""
    own = kind(*(ChainLauncher(chain, fuse="no") for chain in CHAINS[1:]))
    x, one = FakeArray(gpu, rows(24, "bsf"), stream=9), FakeArray(gpu, draw(*CHAINS[1][0].shape))
    outs = [FakeArray(gpu, np.ones((33, 30), np.float32)) for _ in own.layers]
    far = Weights(CHAINS[2][0], "float32", FakeGpu(name="Other GPU", index=1), 0)  # type: ignore[arg-type]
    late = FakeArray(gpu, draw(*CHAINS[2][0].shape), stream=4)
    for last, message in (
        (far, "packed weights lie on Other GPU and x on Fake GPU; pack them on that device"),
        (late, "x works on stream 9 and weights of layer 2 on 4; give stream="),
    ):
        with pytest.raises(LaunchError, match=message):
            own(x, [one, last], out=outs if own.gives_list else outs[0])
        assert not gpu.launches


def test_layers_that_form_no_sum_are_refused() -> None:
    with pytest.raises(LaunchError, match=r"SumLauncher\(.*\): accepted: two chains or more"):
        SumLauncher("1,3,2,2")
    with pytest.raises(LaunchError, match="1,3,2,2 gives 6, 1,4,4,1 gives 4 features; accepted: chains of equal"):
        SumLauncher("1,3,2,2", "1,4,4,1")
    with pytest.raises(LaunchError, match="features; accepted: layers that take the same x"):
        SumLauncher("1,3,2,2", "1,6,5,1")
    with pytest.raises(LaunchError, match="a residual after activation='relu'; accepted: residual_first=True"):
        total(activation="relu", residual=True)
    with pytest.raises(LaunchError, match="of a sum have different options"):
        SumLauncher(Launcher("1,3,2,2", bias=True), "1,3,2,2")
    with pytest.raises(LaunchError, match="of a sum; accepted: layers without out_layout"):
        SumLauncher(Launcher("1,3,2,2", out_layout="bsl"), "1,3,2,2")
    with pytest.raises(LaunchError, match="of a group have different options"):
        GroupLauncher(Launcher("1,3,2,2", bias=True), "1,3,2,2")


@pytest.mark.libraries
def test_tensors() -> None:
    torch, _ = library("torch"), processor()
    x, weights = rows(24, "bsf"), weights_of()
    y = total()(torch.from_numpy(x), [[torch.from_numpy(each) for each in listed] for listed in weights])
    assert isinstance(y, torch.Tensor)
    assert is_right(y.numpy(), truth_of(x, weights, "bsf"))
