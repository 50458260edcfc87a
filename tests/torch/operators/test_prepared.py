"""Prepared calls of frozen layers: the same outputs as the usual way, and the usual way wherever something is not as
it was.
"""

import gc
import re
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ksgen.errors import KsgenError, LaunchError, ToolchainError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators import frozen, prepared  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402
from tests.support.torch_cases import BIAS_CHANGES, change_bias, wrong_in_threads  # noqa: E402

pytestmark = pytest.mark.skipif(
    not has_kernels(torch.device("cpu")), reason="prepared calls are for kernels on the processor"
)
CHAINS = ([(2, 24, 16, 1)], [(1, 24, 16, 3)], [(2, 8, 16, 2), (1, 24, 32, 1)])
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What prepared calls gave, None where the usual way was taken."""
    given = []
    multiply = prepared.multiply
    monkeypatch.setattr(prepared, "_calls", {})
    monkeypatch.setattr(prepared, "multiply", lambda *args: given.append(multiply(*args)) or given[-1])
    return given


def layer_of(patterns: Any = CHAINS[0], **options: Any) -> KSLinear:
    torch.manual_seed(0)
    return KSLinear(patterns, **options).eval().freeze()


def x_of(layer: KSLinear, *shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(
        *((*shape, layer.in_features) if layer.layout == "bsf" else (layer.in_features, *shape)), dtype=dtype
    )


def both_paths(layer: KSLinear, usual: KSLinear, x: Any, served: list[Any]) -> list[tuple[Any, Any]]:
    """What a prepared call gives and the usual way: without a residual and with one."""
    found, residual = [], torch.randn_like(usual(x))
    for more in ((), (residual,)):
        warmed(layer, x, *more)
        with torch.no_grad():
            y, wanted = layer(x, *more), usual(x, *more)
        assert served[-2] is y
        found.append((y, wanted))
    return found


def warmed(layer: KSLinear, x: Any, *more: Any) -> Any:
    with torch.no_grad():
        for _ in range(2):
            y = layer(x, *more)
    return y


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
@pytest.mark.parametrize(
    ("patterns", "dtype", "backend"),
    [
        *((patterns, torch.float32, "auto") for patterns in CHAINS),
        (CHAINS[2], torch.float32, "ksgen"),
        (CHAINS[2], torch.bfloat16, "auto"),
        (CHAINS[0], torch.float64, "ksgen"),
    ],
)
def test_the_same_as_the_usual_path(patterns: Any, layout: str, dtype: Any, backend: str, served: list[Any]) -> None:
    for activation, bias, batch in (
        ("none", False, (1,)),
        ("gelu", True, (3,)),
        ("relu", True, (2, 40)),
        ("none", True, (1, 1)),
    ):
        layer = layer_of(patterns, layout=layout, dtype=dtype, backend=backend, activation=activation, bias=bias)
        usual = layer_of(patterns, layout=layout, dtype=dtype, backend="einsum", activation=activation, bias=bias)
        for y, wanted in both_paths(layer, usual, x_of(layer, *batch, dtype=dtype), served):
            assert y.shape == wanted.shape
            assert y.dtype == wanted.dtype
            assert y.is_contiguous()
            assert torch.allclose(y, wanted, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["ksgen", "in turn", "each", "strided", "bmm", "dense"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_every_variant_is_right(layout: str, way: str, monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """Whichever the clock would have chosen."""
    monkeypatch.setattr(prepared, "faster", lambda job, ways: way if way in ways else next(iter(ways)))
    for patterns, batch in ((CHAINS[1], (1,)), (CHAINS[1], (2, 3)), (CHAINS[2], (1,)), (CHAINS[2], (64,))):
        layer = layer_of(patterns, layout=layout, activation="silu")
        x = x_of(layer, *batch)
        residual = torch.randn_like(warmed(layer, x))
        with torch.no_grad():
            y = warmed(layer, x, residual)
            wanted = layer_of(patterns, layout=layout, activation="silu", backend="einsum")(x, residual)
        assert served[-1] is None  # the last layer's first call
        assert torch.allclose(y, wanted, atol=1e-5)


def test_one_launch_is_timed_in_batch_size_last_where_batches_are_large(
    monkeypatch: pytest.MonkeyPatch, served: list[Any]
) -> None:
    """Though launchers take none there by rule."""
    met: list[list[str]] = []
    monkeypatch.setattr(prepared, "faster", lambda job, ways: met.append(list(ways)) or next(iter(ways)))
    many = prepared.TRIED_COLUMNS * torch.get_num_threads()
    for fuse, batch, is_tried in (("auto", many, True), ("auto", many - 1, False), ("no", many, False)):
        layer, usual = layer_of(CHAINS[2], layout="bsl", fuse=fuse), layer_of(CHAINS[2], layout="bsl", backend="einsum")
        x = x_of(layer, batch)
        with torch.no_grad():
            assert torch.allclose(warmed(layer, x), usual(x), atol=1e-5)
        assert ("ksgen" in met[-1]) == is_tried
        assert "in turn" in met[-1]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "other"), [("bsf", "bsl"), ("bsl", "bsf")])
@pytest.mark.parametrize("fuse", ["auto", "yes", "no"])
@pytest.mark.parametrize("patterns", CHAINS)
def test_y_in_another_layout_than_x(patterns: Any, fuse: str, layout: str, other: str, served: list[Any]) -> None:
    """The result takes one launch or one per factor, and holds for a single factor too."""
    options: dict[str, Any] = {"layout": layout, "activation": "gelu", "bias": True, "out_layout": other}
    for batch in ((1,), (2, 40)):
        layer, usual = layer_of(patterns, fuse=fuse, **options), layer_of(patterns, backend="einsum", **options)
        for y, wanted in both_paths(layer, usual, x_of(layer, *batch), served):
            assert (y.shape, y.is_contiguous()) == (wanted.shape, True)
            assert torch.allclose(y, wanted, atol=1e-5, rtol=1e-5)


def test_the_first_call_at_a_shape_takes_the_usual_path(served: list[Any]) -> None:
    layer = layer_of()
    for batch in (2, 3):
        warmed(layer, x_of(layer, batch))
    assert [each is None for each in served] == [True, False, True, False]


def test_what_is_not_plain_inference_takes_the_usual_path(served: list[Any]) -> None:
    layer, ones = layer_of(), layer_of(CHAINS[0], bias=False)
    x = x_of(layer, 4)
    wanted = warmed(layer, x)
    warmed(ones, x)
    assert served[-1] is not None
    y = layer(x)  # recorded
    assert y.requires_grad
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        assert torch.allclose(torch.vmap(ones)(x[None])[0], ones(x), atol=1e-6)
        del served[-1]
        assert torch.allclose(layer(x[:, :]), wanted)
        assert layer(torch.randn(0, layer.in_features)).shape == (0, layer.out_features)
    layer.thaw()
    with torch.no_grad():
        layer(x)
    assert served[-1] is None  # its first call at this shape
    layer.freeze()
    with torch.inference_mode():
        assert all(torch.allclose(layer(x), wanted) for _ in range(3))
    assert served[-1] is not None


def test_forward_mode_is_not_lost(served: list[Any]) -> None:
    """The mode stays active under `no_grad`."""
    layer = layer_of(bias=False)
    x = x_of(layer, 4)
    wanted = warmed(layer, x)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        y = layer(torch.autograd.forward_ad.make_dual(torch.zeros_like(x), x))
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    assert served[-1] is None
    assert torch.allclose(tangent, wanted, atol=1e-5)


def test_x_may_be_a_view_of_any_kind(served: list[Any]) -> None:
    layer, usual = layer_of(), layer_of(backend="einsum")
    wide = torch.randn(5, 2 * layer.in_features)
    for x in (wide[:, ::2], wide[:, : layer.in_features], torch.randn(layer.in_features, 5).t(), wide[0, ::2]):
        y = warmed(layer, x)
        assert served[-1] is y
        with torch.no_grad():
            assert torch.allclose(y, usual(x), atol=1e-5)


def test_a_write_to_the_weights_ends_it(served: list[Any]) -> None:
    layer = layer_of()
    x = x_of(layer, 4)
    before = warmed(layer, x)
    with torch.no_grad():
        layer.weights[0].mul_(2)
        with pytest.warns(UserWarning, match="frozen no more"):
            after = layer(x)
    assert torch.allclose(after - layer.bias, 2 * (before - layer.bias), atol=1e-5)
    layer.freeze()
    warmed(layer, x)
    layer.weights[0] = nn.Parameter(torch.zeros_like(layer.weights[0]))
    with torch.no_grad(), pytest.warns(UserWarning, match="was replaced by another tensor"):
        assert torch.allclose(layer(x), layer.bias.expand(4, -1))


def test_layers_that_differ_in_an_exchange_share_no_call(served: list[Any]) -> None:
    torch.manual_seed(0)
    plain, exchanged, by_inputs = (KSLinear(each, bias=False) for each in ("4,6,6,1", "4,6,6,1@k.i", "l.i@4,6,6,1"))
    x = torch.randn(3, 24)
    for layer in (plain, exchanged, by_inputs):
        layer.weights[0].data.copy_(plain.weights[0].data)
        assert torch.allclose(warmed(layer.build(batch=3), x), x @ layer.to_dense().T, atol=1e-5)
        assert served[-1] is not None


def test_the_bias_is_read_at_each_call(served: list[Any]) -> None:
    layer, usual = layer_of(), layer_of(backend="einsum")
    x = x_of(layer, 4)
    warmed(layer, x)
    with torch.no_grad():
        for change in BIAS_CHANGES:
            for each in (layer, usual):
                change_bias(each, change)
            assert torch.allclose(layer(x), usual(x), atol=1e-5), change


def test_a_bias_that_was_replaced_is_read(served: list[Any]) -> None:
    layer, usual = layer_of(), layer_of(backend="einsum")
    x = x_of(layer, 4)
    warmed(layer, x)
    for each in (layer, usual):
        each.bias = nn.Parameter(torch.full((layer.out_features,), 5.0))
    with torch.no_grad():
        found = [layer(x) for _ in range(3)]
        assert all(torch.allclose(y, usual(x), atol=1e-5) for y in found)
    assert all(each is not None for each in served[2:5])


def test_a_bias_of_another_shape_is_refused_after_prepared_calls(served: list[Any]) -> None:
    layer = layer_of()
    x = x_of(layer, 4)
    warmed(layer, x)
    layer.bias.data = torch.zeros(1)
    with torch.no_grad():
        for _ in range(3):
            with pytest.raises(KsgenError, match="got bias of shape"):
                layer(x)


def test_options_that_change_are_seen(served: list[Any]) -> None:
    layer, usual = layer_of(), layer_of(backend="einsum")
    x = x_of(layer, 4)
    warmed(layer, x)
    for each in (layer, usual):
        each.activation = "relu"
    assert torch.allclose(warmed(layer, x), warmed(usual, x), atol=1e-5)
    layer.backend = "bmm"
    warmed(layer, x)
    assert served[-1] is None


def test_mistakes_are_refused_as_before(served: list[Any]) -> None:
    layer = layer_of()
    x = x_of(layer, 4)
    warmed(layer, x, torch.zeros(4, layer.out_features))
    with torch.no_grad():
        for residual in (torch.zeros(4, 1), torch.zeros(4, layer.out_features, dtype=torch.float64)):
            with pytest.raises(LaunchError, match="residual"):
                layer(x, residual)
        with pytest.raises(LaunchError, match="got x of shape"):
            layer(x[:, 1:])


def test_several_threads_at_once() -> None:
    layer = layer_of(CHAINS[2])
    xs = [x_of(layer, 64) for _ in range(4)]
    wanted = [warmed(layer, x).clone() for x in xs]
    assert not wrong_in_threads(layer, xs, wanted, 200)


def test_nothing_is_kept_once_thawed() -> None:
    layer = layer_of()
    warmed(layer, x_of(layer, 4))
    calls = frozen.calls_of(layer)
    assert calls
    layer.thaw()
    assert frozen.calls_of(layer) is None
    assert np.isfinite(warmed(layer, x_of(layer, 4)).numpy()).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_weights_with_gaps_and_conjugated_ones_are_copied_to_be_packed(dtype: Any, served: list[Any]) -> None:
    layer, usual = (layer_of(CHAINS[2], dtype=dtype, backend=name).thaw() for name in ("ksgen", "einsum"))
    for each in (layer, usual):
        weights = each.weights[0].detach().transpose(1, 2).contiguous().transpose(1, 2).conj()
        each.weights[0] = nn.Parameter(weights)
        each.freeze()
    assert not layer.weights[0].is_contiguous()
    x = x_of(layer, 4, dtype=dtype)
    y = warmed(layer, x)
    assert served[-1] is y
    assert torch.allclose(y, warmed(usual, x), atol=1e-5)


def test_compiled_layers_do_not_see_it(served: list[Any]) -> None:
    layer = layer_of()
    x = x_of(layer, 4)
    wanted = warmed(layer, x)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(x), wanted, atol=1e-5)


def test_a_layer_tells_what_was_timed() -> None:
    for patterns, wanted in (
        (CHAINS[0], r"frozen: \w+ \d+ us, \w+ \d+ us"),
        (
            CHAINS[2],
            r"frozen: (one launch|one launch per factor by one call|each factor by its fastest method) \d+ us, ",
        ),
    ):
        layer = layer_of(patterns, activation="silu")
        warmed(layer, x_of(layer, 64))
        assert re.search(f"^{wanted}", layer.explain(batch=64), re.MULTILINE), layer.explain(batch=64)


def test_only_plain_tensors_are_read_by_their_addresses(served: list[Any]) -> None:
    layer, usual = layer_of(backend="ksgen"), layer_of(backend="einsum")
    x = x_of(layer, 4)
    residual = warmed(layer, x)
    warmed(layer, x, residual)
    with torch.no_grad():
        for given in ((torch._neg_view(x),), (x, torch._neg_view(residual))):
            assert torch.allclose(layer(*given), usual(*given), atol=1e-5)
        gone = x.clone()
        gone.untyped_storage().resize_(0)
        with pytest.raises(LaunchError):
            layer(gone)
        for other in (x.to_sparse(), x.double(), x.int()):
            for _ in range(3):
                with pytest.raises(LaunchError):
                    layer(other)
        assert torch.allclose(layer(x), usual(x), atol=1e-5)


def test_no_array_of_a_call_is_kept() -> None:
    for backend in prepared.BACKENDS:
        for patterns in CHAINS:
            layer = layer_of(patterns, backend=backend)
            x, residual = x_of(layer, 64), None
            residual = torch.zeros_like(warmed(layer, x))
            y = warmed(layer, x, residual)
            found = [weakref.ref(each) for each in (x, residual, y)]
            del x, residual, y
            gc.collect()
            assert [each() for each in found] == [None] * 3


def test_calls_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepared, "MOST_CALLS", 3)
    layer, usual = layer_of(), layer_of(backend="einsum")
    for batch in range(1, 9):
        x = x_of(layer, batch)
        assert torch.allclose(warmed(layer, x), warmed(usual, x), atol=1e-5)
        assert len(frozen.calls_of(layer)) <= 3


def test_a_layer_that_thaws_while_a_call_is_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, usual = layer_of(backend="ksgen"), layer_of(backend="einsum")
    x, packed = x_of(layer, 4), prepared._packed
    monkeypatch.setattr(prepared, "_packed", lambda its, job: its.thaw() and packed(its, job))
    assert torch.allclose(warmed(layer, x), warmed(usual, x), atol=1e-5)


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_a_residual_that_is_refused_spoils_nothing(layout: str) -> None:
    for bad in ((4, 1), (1, 48), (48,), ()):
        layer, usual = layer_of(layout=layout), layer_of(layout=layout, backend="einsum")
        x = x_of(layer, 4)
        good = torch.ones_like(usual(x))
        with torch.no_grad():
            layer(x, good)
            for _ in range(2):
                with pytest.raises(LaunchError, match="residual"):
                    layer(x, torch.ones(bad))
        assert torch.allclose(warmed(layer, x, good), warmed(usual, x, good), atol=1e-5)


def test_what_the_usual_path_refuses_is_refused_at_every_call(served: list[Any]) -> None:
    def double(layer: KSLinear) -> None:
        layer.bias.data = layer.bias.data.double()

    def short(layer: KSLinear) -> None:
        layer.bias.data = torch.zeros(1)

    for spoil in (double, short):
        layer = layer_of()
        x = x_of(layer, layer.in_features)
        spoil(layer)
        with torch.no_grad():
            for _ in range(4):
                with pytest.raises((LaunchError, KsgenError)):
                    layer(x)


def test_a_backend_that_was_asked_for_is_not_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    layer = layer_of([(3, 16, 17, 5)], backend="ksgen")
    with torch.no_grad():
        for _ in range(4):
            with pytest.raises(ToolchainError, match="KSGEN_NO_COMPILE"):
                layer(x_of(layer, 7))


def test_infinity_stays_in_its_own_outputs() -> None:
    layer = layer_of([(8, 16, 16, 1)], bias=False)
    x = x_of(layer, 3)
    x[0, 5] = float("inf")
    assert torch.isfinite(warmed(layer, x)[0, 16:]).all()


@pytest.mark.parametrize("has_record", [True, False])
def test_factors_in_turn_on_other_arrays(has_record: bool, monkeypatch: pytest.MonkeyPatch, served: list[Any]) -> None:
    """One call runs all launches, or one per factor if a device records none. A write to a bias counts at once."""
    monkeypatch.setattr(prepared, "faster", lambda job, ways: "in turn" if "in turn" in ways else next(iter(ways)))
    if not has_record:
        monkeypatch.delattr("ksgen.devices.native.NativeDevice.record")
    layer, usual = (layer_of(CHAINS[2], bias=True, backend=backend) for backend in ("auto", "einsum"))
    warmed(layer, x_of(layer, 3), torch.randn(3, layer.out_features))
    with torch.no_grad():
        for each in (layer, usual):
            each.bias.copy_(torch.arange(each.out_features))
        for _ in range(2):
            x, residual = x_of(layer, 3), torch.randn(3, layer.out_features)
            y = layer(x, residual)
            assert served[-1] is y
            assert torch.allclose(y, usual(x, residual), atol=1e-5)


def test_a_trace_before_dispatch_records_the_product(served: list[Any]) -> None:
    layer = layer_of(CHAINS[2])
    x = x_of(layer, 4)
    wanted = warmed(layer, x)
    with torch.no_grad():
        traced = make_fx(layer, pre_dispatch=True)(x)
        assert served[-1] is None
        torch.testing.assert_close(traced(x), wanted, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(traced(2 * x), layer(2 * x), atol=1e-5, rtol=1e-5)
