"""Prepared calls of sums of frozen layers: one call of the library, the sum in float64, and the usual path wherever
something is not as it was.
"""

import copy
import gc
import weakref
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from ksgen import structures  # noqa: E402
from ksgen.devices import find_device, native  # noqa: E402
from ksgen.errors import LaunchError, SpecError  # noqa: E402
from ksgen.torch import KSLinear, KSSum  # noqa: E402
from ksgen.torch.operators import frozen, prepared, replay, trained  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402
from tests.support.torch_cases import BIAS_CHANGES, change_bias, wrong_in_threads  # noqa: E402

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.device("cpu")), reason="prepared calls are for kernels on the processor"
)
CHAINS = ("4,5,4,1", ["1,6,4,4", "2,10,12,1"], "1,5,4,4@j.k")  # 16 -> 20
WAYS = ("in turn", "each")
ACTIVATED = {"none": lambda y: y, "gelu": nn.functional.gelu, "relu": nn.functional.relu}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was prepared for each call of a sum, None where the usual path was taken."""
    given: list[Any] = []
    find = prepared.of_group
    monkeypatch.setattr(prepared, "of_group", lambda *args: given.append(find(*args)) or given[-1])
    return given


def choose(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Have sums take this way, whatever the clock says."""
    monkeypatch.setattr(prepared, "faster", lambda job, ways: way if job[0][0] == "prepared sum" else next(iter(ways)))


def sum_of(*biases: bool, chains: Any = CHAINS, activation: Any = "none", **options: Any) -> KSSum:
    torch.manual_seed(0)
    biases = biases or (True, False, True)
    layers = [KSLinear(each, bias=bias, **options) for each, bias in zip(chains, biases, strict=True)]
    return KSSum(layers, activation).eval().freeze()


def matrix(model: KSSum, batch: int, features: int, layout: Any = None) -> Any:
    is_bsf = (layout or model[0].layout) == "bsf"
    return torch.randn(*((batch, features) if is_bsf else (features, batch))).to(model[0].weights[0].dtype)


def check(model: KSSum, x: Any, residual: Any = None, tolerance: float = 1e-5) -> Any:
    """Compare with the dense sum in float64."""
    with torch.no_grad():
        y, rows = model(x, residual), x.double() if model[0].layout == "bsf" else x.double().t()
        wanted = rows @ sum(each.to_dense().double() for each in model).t()  # type: ignore[attr-defined]
        wanted = wanted + sum(each.bias.double() for each in model if each.bias is not None)
        wanted = wanted if model[0].y_layout == "bsf" else wanted.t()
        wanted = ACTIVATED[model.activation](wanted if residual is None else wanted + residual.double())
        torch.testing.assert_close(y.double(), wanted, atol=tolerance, rtol=tolerance)
    return y


def warmed(model: KSSum, x: Any, residual: Any = None) -> None:
    with torch.no_grad():
        for _ in range(2):
            model(x, residual)


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("layout", "out_layout"), [("bsf", None), ("bsl", None), ("bsf", "bsl")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_variant_is_right(
    layout: Any, out_layout: Any, dtype: Any, way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    choose(monkeypatch, way)
    for activation, batch in (("none", 1), ("gelu", 3), ("relu", 40)):
        model = sum_of(activation=activation, layout=layout, out_layout=out_layout, dtype=dtype)
        for has_residual in (False, True):
            x, residual = matrix(model, batch, 16), matrix(model, batch, 20, model[0].y_layout)
            given = (x, residual if has_residual else None)
            warmed(model, *given)
            check(model, *given, tolerance=1e-5 if dtype == torch.float32 else 6e-2)
            assert served[-1]
            assert served[-1][0]._each == [] or way == "each" or out_layout


@pytest.mark.parametrize("patterns", [("4,5,4,1", "1,5,4,4"), CHAINS])
def test_a_repeated_call_is_one_call_of_the_library(patterns: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        device = native.open_device(0)
    except native.UnavailableError as absent:
        pytest.skip(str(absent))
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    choose(monkeypatch, "in turn")
    model = sum_of(*[True] * len(patterns), chains=patterns, activation="relu")
    x, residual = matrix(model, 3, 16), matrix(model, 3, 20)
    warmed(model, x, residual)
    calls, launch = list[Any](), native._Recording._launch
    monkeypatch.setattr(native._Recording, "_launch", lambda *given: (calls.append(given), launch(*given)))
    monkeypatch.setattr(type(device), "launch", lambda *_: pytest.fail("a launch apart"))
    for number in range(1, 4):
        check(model, x, residual)
        assert len(calls) == number


def streams(launches: Any) -> list[bool]:
    """Whether each launch of prepared calls may use streaming stores."""
    return [
        bool(arguments[len(plan.operands) + plan.choice.constants.at_launch.index("streaming")])
        for plan, _, arguments, *_ in launches._calls
        if "streaming" in plan.choice.constants.at_launch
    ]


def test_what_the_next_launch_reads_stays_in_the_caches(monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """Sums, and intermediates of inference and of training; the last outputs leave by streaming stores."""
    if find_device("native").limits.vector_bytes == 32:
        pytest.skip("rows of AVX2's tiles are parts of cache lines in batch-size-last, so that outputs do not stream")
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "in turn" if "in turn" in ways else next(iter(ways)))
    monkeypatch.setattr(trained, "faster", lambda job, ways: "ksgen")
    monkeypatch.setattr(trained, "_steps", {})
    torch.manual_seed(0)
    pair, one = ["2,32,32,1", "1,64,64,1"], "1,64,64,1"
    model = KSSum([KSLinear(pair, bias=False, layout="bsl"), KSLinear(one, bias=False, layout="bsl")]).eval().freeze()
    x, layer = torch.randn(64, 4096), KSLinear(pair, bias=False, layout="bsl")
    warmed(model, x)
    check(model, x, tolerance=1e-4)
    assert streams(served[-1][0].step.launch) == [False, False, False]
    model = KSSum([layer.eval().freeze()] * 2)
    del model[1]
    warmed(model, x)
    assert streams(served[-1][0].step.launch) == [False, True]
    layer.train().thaw()
    for _ in range(3):
        y = layer(x.requires_grad_())
    y.sum().backward()
    (step,) = [each.step for each in trained._steps.values() if isinstance(each, replay.Replaceable)]
    forward, backward = step.launches
    assert streams(forward.launch) == [False, True]
    assert streams(backward.launch)[-2:] == [False, True]
    wanted = x.detach().double().t() @ layer.to_dense().double().t()
    torch.testing.assert_close(y.double().t(), wanted, atol=1e-4, rtol=1e-4)


def test_layers_may_differ_in_what_is_theirs_alone(served: list[Any]) -> None:
    """A base whose weights are stored in eight bits, and an adapter; activations between factors; kernels alone."""
    torch.manual_seed(0)
    base = KSLinear("1,20,16,1", bias=False).quantize("int8")
    adapter = KSLinear(["1,3,16,1", "1,20,3,1"], bias=False, between="relu", backend="ksgen", fuse="no").eval()
    model, x = KSSum([base, adapter]).eval(), torch.randn(7, 16)
    with torch.no_grad():
        wanted = base(x) + adapter(x)
        adapter.freeze()
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted)
    assert not any(served)  # a layer in eight bits is no frozen one
    model[0] = KSLinear("1,20,16,1", bias=False).eval().freeze()
    with torch.no_grad():
        wanted = model[0](x) + adapter(x)
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted)
    assert served[-1]
    model[1].fuse = "yes"
    check_equal = model[0](x) + adapter(x)
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), check_equal)


def test_equal_shapes_share_no_weights_and_no_order(served: list[Any]) -> None:
    """Sums that differ in one weight, in the order of outputs of a later layer, or in which layer has the bias."""
    x = torch.randn(5, 16)
    for chains, biases in (
        (("4,5,4,1", "1,5,4,4"), (True, False)),
        (("4,5,4,1", "1,5,4,4@j.k"), (True, False)),
        (("4,5,4,1", "j.l@1,5,4,4"), (True, False)),
        (("4,5,4,1", "1,5,4,4"), (False, True)),
        (("1,5,4,4", "4,5,4,1"), (False, True)),
    ):
        model = sum_of(*biases, chains=chains)
        warmed(model, x)
        check(model, x)
        assert served[-1]
    with torch.no_grad():
        model[0], model[1] = model[1], model[0]
    warmed(model, x)
    check(model, x)
    with torch.no_grad():
        model[1] = copy.deepcopy(model[1])
        model[1].weights[0].neg_()
    model.freeze()
    warmed(model, x)
    check(model, x)
    assert served[-1]


def test_tied_weights(served: list[Any]) -> None:
    torch.manual_seed(0)
    tied = KSLinear.from_structure(structures.kronecker(16, 20, blocks=(4, 4)), bias=False)
    model = KSSum([KSLinear("4,5,4,1"), tied]).eval().freeze()
    x = torch.randn(5, 16)
    warmed(model, x)
    check(model, x)
    assert served[-1]
    with torch.no_grad():
        next(tied.weights.parameters()).mul_(2)
    with pytest.warns(UserWarning, match="is frozen no more"):
        check(model, x)
    assert served[-1] is None


def test_what_changes_is_seen(served: list[Any]) -> None:
    model = sum_of()
    x, residual = torch.randn(5, 16), torch.randn(5, 20)
    warmed(model, x)
    for activation in ("relu", "gelu", "none"):
        model.activation = activation
        for given in ((x,), (x, residual), (x, residual.t().contiguous().t()), (x[:2],)):
            check(model, *given)
            check(model, *given)
            check(model, *given)
            assert served[-1]
    seen: list[Any] = []
    hook = model[1].register_forward_hook(lambda *given: seen.append(given))
    check(model, x)
    assert len(seen) == 1
    hook.remove()
    with pytest.raises(LaunchError, match="got residual of shape"):
        model(x, residual[:3])
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(LaunchError, match="got residual of shape"):
                model(x, residual[:3])
            with pytest.raises(LaunchError, match="got x of shape"):
                model(x[:, 1:])
        for wrong in ("reul", ["relu"]):
            model.activation = wrong  # type: ignore[assignment]
            for _ in range(3):
                with pytest.raises(SpecError, match="activation="):
                    model(x)
        model.activation, model[2].activation = "none", "relu"
        for _ in range(3):
            with pytest.raises(LaunchError, match="has activation='relu'"):
                model(x)
        model[2].activation, model[1].layout = "none", "bsl"
        for _ in range(3):
            with pytest.raises(LaunchError, match="layers with layout of bsf, bsl, bsf"):
                model(x)
        model[1].layout, model[1].backend = "bsf", "strided"
        warmed(model, x)
        check(model, x)
        assert served[-1] is None  # asked for: PyTorch's product


@pytest.mark.parametrize("way", WAYS)
def test_biases_are_read_at_each_call(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, way)
    model, x = sum_of(True, True, True), torch.randn(20, 16)
    warmed(model, x)
    for change in BIAS_CHANGES:
        with torch.no_grad():
            change_bias(model[1], change)
        check(model, x)


def test_a_write_or_a_thaw_of_one_layer_ends_it(served: list[Any]) -> None:
    model, x = sum_of(), torch.randn(20, 16)
    warmed(model, x)
    kept = weakref.ref((served[-1] or served[-2])[0])
    served.clear()
    with torch.no_grad():
        model[2].weights[0].mul_(2)
    with pytest.warns(UserWarning, match="is frozen no more: weights.0 was written to"):
        check(model, x)
    gc.collect()
    assert kept() is None
    check(model, x)
    assert not any(served)
    model.freeze()
    warmed(model, x)
    model[1].thaw()
    model[1].weights[0].data.mul_(2)  # writes after a thaw are not tracked
    check(model, x)
    assert served[-1] is None


def test_what_is_not_plain_inference_takes_the_usual_path(served: list[Any]) -> None:
    model, x = sum_of(), torch.randn(4, 16)
    warmed(model, x)
    wanted = check(model, x)
    served.clear()
    assert model(x).requires_grad
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(x).dtype == torch.bfloat16
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), wanted)
        traced = torch.jit.trace(model, x, check_trace=False)  # whose check would call the model
        torch.testing.assert_close(traced(x[:2]), wanted[:2])
    assert not any(served)
    with torch.inference_mode():
        for _ in range(3):
            torch.testing.assert_close(model(x), wanted)
    assert served[-1]


@pytest.mark.parametrize("way", WAYS)
def test_several_threads_at_once(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, way)
    model = sum_of()
    xs = [torch.randn(64, 16) for _ in range(4)]
    warmed(model, xs[0])
    with torch.no_grad():
        wanted = [model(x) for x in xs]
    assert not wrong_in_threads(model, xs, wanted, 100)


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_a_call_is_kept(way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    choose(monkeypatch, way)
    model, x, residual = sum_of(), torch.randn(64, 16), torch.randn(64, 20)
    warmed(model, x, residual)
    y = check(model, x, residual)
    served.clear()
    found = [weakref.ref(each) for each in (x, residual, y)]
    del x, y, residual
    gc.collect()
    assert [each() for each in found] == [None] * 3
    found = [weakref.ref(each) for each in (model, *model)]
    del model
    gc.collect()
    assert [each() for each in found] == [None] * 4
    assert not frozen._groups


def test_a_sum_tells_what_was_timed() -> None:
    model, x = sum_of(), torch.randn(64, 16)
    warmed(model, x)
    (told,) = [line for line in model.explain(64).splitlines() if line.startswith("the sum, frozen: ")]
    for way in ("all launches by one call", "each layer by its fastest method"):
        assert f"{way} " in told
    assert "the sum" not in sum_of(False, True, False).explain(64)  # another bias, not timed


def test_a_sum_of_one_layer() -> None:
    model, x = sum_of(False, True, fuse="yes", chains=(CHAINS[0], CHAINS[1])), torch.randn(5, 16)
    del model[0]
    model.activation = "gelu"
    for _ in range(3):
        check(model, x, torch.randn(5, 20))
