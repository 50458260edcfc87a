"""Layers with weights in eight bits: the product, gradients of x, what moves and is saved, and what is refused."""

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import ksgen
from ksgen.errors import LaunchError, SpecError, ToolchainError
from ksgen.launch.fused import Verdict
from ksgen.launch.planner import PLANNER
from ksgen.launch.weights import Weights
from ksgen.spec import Epilogue
from ksgen.torch import KSLinear, freeze, quantize, thaw
from ksgen.torch.conversion.rule import described
from ksgen.torch.layer import stored
from ksgen.torch.layer.base import ChainLayer
from ksgen.torch.layer.linear import QuantizedKSLinear
from ksgen.torch.operators import prepared
from ksgen.torch.parallel import KSBlockwise
from tests.support.native import chosen_native

CHAIN = [(3, 8, 16, 1), (2, 6, 4, 3)]  # 48 -> 24 -> 36
DTYPES = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _native(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    torch.manual_seed(0)


def layer_of(storage: str = "int8", **options: Any) -> tuple[KSLinear, QuantizedKSLinear]:
    layer = KSLinear(CHAIN, **options)
    made = layer.quantize(storage)
    assert isinstance(made, QuantizedKSLinear)
    return layer, made


def wide_of(made: QuantizedKSLinear) -> KSLinear:
    """A layer with the weights that the values stand for, and nothing else of the quantized one's, in float64."""
    bias = None if made.bias is None else made.bias.double()
    weights = made.dequantized(torch.float64)
    return KSLinear.from_weights(
        weights, bias, layout=made.layout, activation=made.activation, between=made.between, backend="bmm"
    )


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_jagged_tensors() -> None:
    layer, rows = KSLinear(CHAIN).quantize("int8"), [torch.randn(count, 48) for count in (3, 1, 5)]
    y = layer(torch.nested.nested_tensor(rows, layout=torch.jagged))
    for found, each in zip(y.unbind(), rows, strict=True):
        torch.testing.assert_close(found, layer(each))


def test_a_prepared_call_serves_no_other_option() -> None:
    """Options may be set again after a call, as in `KSLinear`."""
    _, made = layer_of()
    x = torch.randn(4, 48)
    with torch.no_grad():
        made(x)
        for name, word in (("activation", "relu"), ("between", "silu"), ("fuse", "no")):
            setattr(made, name, word)
            assert relative(made(x), wide_of(made)(x.double())) < 2e-6
        assert made.bias is not None
        made.bias.data = torch.zeros(35)
        with pytest.raises(LaunchError, match="bias"):
            made(x)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "dtype"), list(product(("bsf", "bsl"), DTYPES)))
def test_multiplies_by_what_its_values_stand_for(layout: str, dtype: torch.dtype) -> None:
    """The layer agrees with bias, activation and residual, in prepared calls, on views and in three dimensions."""
    storage = {torch.float32: "int8", torch.float16: "e4m3", torch.bfloat16: "e5m2"}[dtype]
    _, made = layer_of(storage, layout=layout, activation="gelu", dtype=dtype)
    wide = wide_of(made)

    def of(*shape: int, features: int) -> Tensor:
        return torch.randn((*shape, features) if layout == "bsf" else (features, *shape), dtype=dtype)

    with torch.no_grad():
        for shape in ((1,), (5,), (2, 3)):
            x, residual = of(*shape, features=48), of(*shape, features=36)
            for given in ((x,), (x, residual), (x, residual)):
                wanted = wide(*(each.double() for each in given))
                assert relative(made(*given), wanted) < DTYPES[dtype]
        x = of(7, features=96)
        part = x[:, ::2] if layout == "bsf" else x[::2]
        assert relative(made(part), wide(part.double())) < DTYPES[dtype]
        assert made(of(0, features=48)).numel() == 0


def test_gradients_of_x_and_bias_flow_and_the_weights_have_none() -> None:
    _, made = layer_of("e4m3", activation="silu")
    wide = wide_of(made).float()
    x, residual = torch.randn(5, 48, requires_grad=True), torch.randn(5, 36, requires_grad=True)
    assert made.bias is not None
    made.bias.requires_grad_()
    wanted = torch.autograd.grad(wide(x, residual).square().sum(), (x, residual, wide.bias))
    found = torch.autograd.grad(made(x, residual).square().sum(), (x, residual, made.bias))
    for own, other in zip(found, wanted, strict=True):
        assert relative(own, other) < 1e-5
    assert [name for name, _ in made.named_parameters()] == ["bias"]
    with pytest.raises(LaunchError, match="weights in e4m3 are not trained; train the KSLinear, and quantize it then"):
        made.requires_grad_()
    made.requires_grad_(False)


def test_an_option_that_is_set_later_is_checked_at_once() -> None:
    _, made = layer_of(bias=False)
    wrong = {"layout": "foo", "activation": "geluu", "between": "x", "fuse": "never"}
    for name, value in wrong.items():
        with pytest.raises(SpecError, match=f"{name}='{value}'; .*accepted"):
            setattr(made, name, value)
    for name in ("chain", "storage", "per"):
        with pytest.raises(LaunchError, match=f"{name} cannot be set; accepted: a new layer by KSLinear.quantize"):
            setattr(made, name, "e4m3")
    assert "=" not in repr(made).replace("_features=", "").replace("bias=", "").replace("weights=", "")


def test_an_option_of_the_layer_that_it_was_derived_from_is_refused() -> None:
    """No code would read the attribute."""
    _, made = layer_of()
    for name, value in {
        "out_layout": "bsl",
        "backend": "strided",
        "precision": "float16",
        "intermediates": "recompute",
    }.items():
        with pytest.raises(
            LaunchError, match=f"{name} is not an option of this layer; accepted: layout, activation, between, fuse"
        ):
            setattr(made, name, value)
        assert getattr(made, name, None) != value


def test_a_model_thaws_its_quantized_layers_too() -> None:
    _, made = layer_of(bias=False)
    with torch.no_grad():
        assert made(torch.ones(4, 48)).any()
        made.values_1.data.zero_()  # not detected
        assert thaw(nn.Sequential(made)) == [], "it was not declared frozen"
        assert not made(torch.ones(4, 48)).any()


def test_a_thread_prepares_nothing_for_weights_that_another_one_wrote_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a call is prepared, another thread writes unseen, thaws and calls: what that call leaves behind is never
    used.
    """
    _, made = layer_of(bias=False)
    x, prepare = torch.randn(4, 48), prepared._prepared

    def write() -> None:
        with torch.no_grad():
            made.values_1.data.zero_()
            made.thaw()(x[:1])

    def prepared_during_a_write(*given: Any) -> Any:
        monkeypatch.setattr(prepared, "_prepared", prepare)
        found = prepare(*given)
        with ThreadPoolExecutor(1) as other:
            other.submit(write).result()
        return found

    monkeypatch.setattr(prepared, "_prepared", prepared_during_a_write)
    with torch.no_grad():
        made(x)
        assert made(x).any()  # by the weights as they were when it began
        assert not made(x).any()


@pytest.mark.parametrize("way", ["by a prepared call", "the usual way", "by operators"])
def test_a_write_of_another_thread_before_a_launch_is_no_error(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The write happens between the first check of the weights and the check of their launch."""
    x, is_apart = torch.randn(4, 48), way == "by operators"
    layer = KSLinear(CHAIN, bias=False)
    made = layer.quantize("int8", **({"x": x, "x_too": True} if way == "the usual way" else {}))
    use, writes = Weights.use, list[int]()

    def write() -> None:
        with torch.no_grad():
            made.scale_2.mul_(2)

    def used_during_a_write(own: Weights, *given: Any) -> Any:
        if len(writes) < 2:
            writes.append(len(writes))
            with ThreadPoolExecutor(1) as other:
                other.submit(write).result()
        return use(own, *given)

    with torch.set_grad_enabled(is_apart):
        given = x.requires_grad_(is_apart)
        first = made(given)
        monkeypatch.setattr(Weights, "use", used_during_a_write)
        PLANNER.forget()  # else a call that was prepared would be launched, which looks no more
        torch.testing.assert_close(made(given), 4 * first)
    assert writes == [0, 1]


def test_a_thread_that_calls_while_another_one_reads_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = layer_of()
    x, make, ys = torch.randn(4, 48), stored.quantized_of, list[Tensor]()
    wanted = wide_of(made)(x.double()).detach()

    def write() -> None:
        with torch.no_grad():
            ys.append(made(x))

    def made_during_a_call(*given: Any) -> Any:
        monkeypatch.setattr(stored, "quantized_of", make)
        with ThreadPoolExecutor(1) as other:
            other.submit(write).result()
        return make(*given)

    monkeypatch.setattr(stored, "quantized_of", made_during_a_call)
    with torch.no_grad():
        ys.append(made(x))
    assert [relative(y, wanted) < 2e-6 for y in ys] == [True] * 2


def test_writes_in_inference_mode_are_seen() -> None:
    """The layer's tensors are made outside inference mode. Tensors set later are checked again at each call."""
    layer, x = KSLinear(CHAIN, bias=False), torch.randn(4, 48)
    with torch.inference_mode():
        made = layer.quantize("int8")
        assert isinstance(made, QuantizedKSLinear)
        assert not any(each.is_inference() for each in made.buffers())
        for put in (lambda values: values, torch.clone):
            made._buffers["values_1"] = kept = put(made.values[0])
            before = kept.clone()
            assert made(x).any()
            kept.zero_()
            assert not made(x).any()
            kept.copy_(before)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fuse", ["auto", "yes", "no"])
def test_an_activation_between_factors_stays_there(fuse: str) -> None:
    """Gradients, batch size, compilers and the number of launches do not change the result."""
    _, made = layer_of(between="gelu", fuse=fuse)
    wide = wide_of(made)
    for batch in (3, 64 * 16):
        x = torch.randn(batch, 48)
        wanted = wide(x.double())
        with torch.no_grad():
            assert relative(made(x), wanted) < 2e-6
            assert relative(made(x), wanted) < 2e-6  # prepared
            assert relative(stored.by_operators(made, x, made.bias, None, False, "float32"), wanted) < 2e-6
    x.requires_grad_()
    of_x, other = (
        torch.autograd.grad(layer(x.to(kind)).square().sum(), x)[0]
        for layer, kind in ((made, x.dtype), (wide, torch.float64))
    )
    assert relative(of_x, other) < 1e-5
    assert "between=gelu" in repr(made)
    assert ("with gelu between factors at batch 1" if fuse != "no" else "_gelu at batch 1") in made.explain(1)
    with pytest.raises(LaunchError, match="with between='gelu' the layer has no matrix"):
        made.to_dense()


def test_chosen_for_x_the_output_is_nearer() -> None:
    layer = KSLinear(CHAIN)
    with torch.no_grad():
        layer.weights[0].mul_(torch.randn_like(layer.weights[0]).exp())
        x = torch.randn(200, 48) * (2 * torch.randn(48)).exp()
        for storage in ("e4m3", "e5m2"):
            plain, fitted = layer.quantize(storage, "i"), layer.quantize(storage, "i", x=x)
            assert relative(fitted(x), layer(x)) < relative(plain(x), layer(x))
            assert sum(fitted.saturated) > sum(plain.saturated) == 0
            assert f"{sum(fitted.saturated)} of 528 saturated" in repr(fitted)


def test_a_write_a_load_and_a_move_are_seen() -> None:
    (layer, made), (_, other) = layer_of(), layer_of()
    x = torch.randn(2, 48)
    with torch.no_grad():
        before = [made(x) for _ in range(3)][-1]
        assert relative(other(x), before) > 0.1
        other.load_state_dict(made.state_dict())
        torch.testing.assert_close(other(x), before, rtol=0, atol=0)
        other_storage = (
            "values_1 is int8, and this layer's float8_e4m3fn; quantize the layer to the storage of the saved"
        )
        with pytest.raises(RuntimeError, match=f"{other_storage} one"):
            layer.quantize("e4m3").load_state_dict(made.state_dict())
        made.scale_2.mul_(2)
        bias = made.bias
        assert bias is not None
        torch.testing.assert_close(made(x) - bias, 2 * (before - bias))
        saved = io.BytesIO()
        torch.save(other, saved)
        saved.seek(0)
        for copied in (copy.deepcopy(other), torch.load(saved, weights_only=False)):
            torch.testing.assert_close(copied(x), before, rtol=0, atol=0)
        assert relative(layer(x), before) < 0.01


@pytest.mark.parametrize("storage", ["int8", "e4m3", "bfloat16"])
def test_transforms_multiply_by_what_the_values_stand_for(storage: str) -> None:
    _, made = layer_of(storage, activation="silu")
    x, tangents = torch.randn(3, 48), torch.randn(3, 48)

    def all_of(layer: KSLinear) -> tuple[Tensor, ...]:
        gradient = torch.func.grad(lambda x: layer(x).square().sum())(x)
        with forward_ad.dual_level():
            dual = forward_ad.unpack_dual(layer(forward_ad.make_dual(x, tangents))).tangent
        return *torch.func.jvp(layer, (x,), (tangents,)), dual, gradient, torch.func.vmap(layer)(x)

    for found, wanted in zip(all_of(made), all_of(wide_of(made).float()), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_x_in_eight_bits_has_no_forward_mode() -> None:
    x = torch.randn(3, 48)
    made = KSLinear(CHAIN).quantize("int8", x=x, x_too=True)
    with forward_ad.dual_level(), pytest.raises(LaunchError, match="has no forward-mode derivatives"):
        made(forward_ad.make_dual(x, x))


def test_x_in_eight_bits_is_not_mapped() -> None:
    """The layer counts saturated elements of all samples in one buffer, which a mapped sample cannot be added to."""
    x = torch.randn(2, 3, 48)
    made = KSLinear(CHAIN).quantize("int8", x=x, x_too=True)
    with torch.no_grad():
        with pytest.raises(LaunchError, match=r"x in eight bits under torch.func.vmap; accepted: all of x in one call"):
            torch.func.vmap(made)(x)
        torch.testing.assert_close(made(x)[1], made(x[1]))


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_operations_are_counted(layout: str) -> None:
    """Two for each weight and row: forward, and for the gradient of x."""
    _, made = layer_of(layout=layout)
    x = torch.randn((4, 48) if layout == "bsf" else (48, 4), requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        made(x).sum().backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * made.chain.weight_count


def test_a_layer_without_values_shows_itself() -> None:
    made = KSLinear(CHAIN).quantize("int8").to("meta")
    assert "weights=int8, a scale per output)" in repr(made)
    assert made(torch.empty(3, 48, device="meta")).shape == (3, 36)


def test_a_state_is_loaded_by_swapping() -> None:
    _, made = layer_of()
    other, x = KSLinear(CHAIN).quantize("int8"), torch.randn(3, 48)
    with torch.no_grad():
        for _ in range(3):
            made(x)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            made.load_state_dict(other.state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        torch.testing.assert_close(made(x), other(x), rtol=0, atol=0)


def test_buffers_are_on_the_device_of_the_weights() -> None:
    layer = KSLinear(CHAIN)
    with torch.device("meta"):  # stands for a GPU as the default device, or for weights on a GPU
        made = layer.quantize("int8")
    assert {each.device for each in made.buffers()} == {torch.device("cpu")}
    assert made.saturated == [0, 0]


def test_a_cast_is_about_x() -> None:
    """Values and scales stay unchanged."""
    for storage in ("int8", "e4m3"):
        _, made = layer_of(storage)
        state = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in made.state_dict().items()}
        assert {name: shape for name, (_, shape) in state.items()} == {
            "bias": (36,), "values_1": (3, 8, 16, 1), "scale_1": (3, 8, 1, 1), "values_2": (2, 6, 4, 3), "scale_2": (2,
                6, 1, 3),
            "saturated_of_each": (2,),
        }  # fmt: skip
        kinds = {name: tensor.dtype for name, tensor in copy.deepcopy(made).bfloat16().state_dict().items()}
        assert kinds == {name: torch.bfloat16 if name == "bias" else kind for name, (kind, _) in state.items()}
        with torch.no_grad():
            assert made.bfloat16()(torch.randn(2, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_compilers_and_autocast_see_an_operator() -> None:
    _, made = layer_of("e5m2", activation="relu")
    x = torch.randn(4, 48)
    with torch.no_grad():
        plain = made(x)
        torch.testing.assert_close(torch.compile(made, fullgraph=True, backend="eager")(x), plain)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert made(x).dtype == torch.bfloat16
    own = KSLinear(CHAIN).quantize("int8")  # opcheck adds up what it is given, which PyTorch cannot with float8
    given = (x.requires_grad_(), own.values_1, own.scale_1, None, None, "bsf", "none", "int8", "output")
    torch.library.opcheck(torch.ops.ksgen.multiply_quantized, given)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_has_weights_in_bfloat16_multiply_as_those_of_an_nn_linear(dtype: torch.dtype) -> None:
    """x of float32 and weights in autocast's type, and so is y; outside of autocast, x in that type is refused."""
    layer = KSLinear(CHAIN, activation="gelu", between="relu")
    made, x = layer.quantize("bfloat16"), torch.randn(4, 48)
    alike = KSLinear.from_weights([each.float() for each in made.values], layer.bias, activation="gelu", between="relu")
    with torch.no_grad(), torch.autocast("cpu", dtype=dtype):
        y = made(x)
        assert y.dtype == dtype
        torch.testing.assert_close(y, alike(x))
    x.requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        made(x).float().sum().backward()
    assert x.grad is not None
    with (
        torch.no_grad(),
        pytest.raises(LaunchError, match=f"got x of {str(dtype)[6:]} for weights in bfloat16; accepted: float32"),
    ):
        made(x.to(dtype))


def test_without_kernels_pytorch_multiplies(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made = layer_of("e4m3", activation="gelu")
    x = torch.randn(3, 48)
    for module in ("layer.stored", "operators.prepared", "layer.explained"):
        monkeypatch.setattr(f"ksgen.torch.{module}.has_kernels", lambda device: False)
    with torch.no_grad():
        assert relative(made(x), wide_of(made)(x.double())) < 2e-6
    assert "PyTorch multiplies by the dequantized weights, because ksgen has no kernels on cpu" in made.explain(1)


def test_it_says_what_it_is() -> None:
    _, made = layer_of(fuse="no")
    whole, first, second = made.explain(1).splitlines()
    assert whole.startswith("3,8,16,1 then 2,6,4,3: one launch per factor; ")
    made.fuse = "yes"
    one, *each = made.explain(1).splitlines()
    assert ": one launch, by vector, " in one
    assert each == [
        f"{pattern}: int8 weights with a scale per output, 0 of {pattern.weight_count} saturated"
        for pattern in made.chain
    ]
    assert first.startswith(
        "3,8,16,1: int8 weights with a scale per output, 0 of 384 saturated; ks_3x8x16x1_float32_int8_bsf at batch 1 on"
    )
    assert "ks_2x6x4x3_float32_int8_bsf_bias at batch 1" in second
    assert "weights=int8, a scale per output, 0 of 528 saturated" in repr(made)
    assert made.weight_bytes == 528 + 4 * (24 + 36)
    torch.testing.assert_close(made.to_dense(), KSLinear.from_weights(made.dequantized()).to_dense())


def test_writes_to_its_weight_are_refused() -> None:
    """They would be lost, as the weight is derived from the stored values.

    Reads of its shape, type and device make no matrix.
    """
    _, made = layer_of(activation="none", between="none")
    writes: list[Any] = [
        lambda: made.weight.data.add_(1), lambda: made.weight.mul_(2), lambda: nn.init.normal_(made.weight),
        lambda: nn.init.zeros_(made.weight), lambda: made.weight.requires_grad_(True), lambda: made.weight[0].zero_(),
    ]  # fmt: skip
    before = made.to_dense()
    for write in writes:
        with (
            torch.no_grad(),
            pytest.raises(
                LaunchError, match="would write to weight, which is derived from weights in int8; accepted: writes to"
            ),
        ):
            write()
    torch.testing.assert_close(made.to_dense(), before, rtol=0, atol=0)
    assert (made.weight.shape, made.weight.dtype, made.weight.requires_grad) == ((36, 48), torch.float32, False)
    _, without_matrix = layer_of(between="relu")
    assert hasattr(without_matrix, "weight")
    for make in (QuantizedKSLinear.from_weights, QuantizedKSLinear.from_linear):
        with pytest.raises(LaunchError, match=r"accepted: KSLinear\.from_\w+\(\.\.\.\)\.quantize\(storage\)"):
            make([])


def test_an_encoder_layer_calls_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's fused path multiplies by the dense weight of an `nn.Linear` itself."""
    encoder = nn.TransformerEncoderLayer(48, 4, 36, batch_first=True).eval()
    encoder.linear1, called = KSLinear(CHAIN).quantize("int8"), list[object]()
    forward = ChainLayer.forward
    monkeypatch.setattr(ChainLayer, "forward", lambda layer, *given: (called.append(layer), forward(layer, *given))[1])
    with torch.no_grad():
        encoder(torch.randn(2, 3, 48))
    assert called == [encoder.linear1]


def test_training_mode_keeps_what_was_packed() -> None:
    _, made = layer_of()
    parts = made._ready_parts()
    nn.Sequential(made).train().eval()
    assert made._ready_parts()[0] is parts[0]


def test_it_is_a_layer_as_others_are() -> None:
    """The layer is one by its class and for `torch.fx`. It has no weights to train, split, save in a rule or freeze."""
    _, made = layer_of(activation="none")
    x = torch.randn(3, 48)
    assert isinstance(made, KSLinear)
    assert isinstance(made, nn.Linear)
    torch.testing.assert_close(made.to_linear()(x), made(x))
    torch.testing.assert_close(made.weight, made.to_dense())
    graph = torch.fx.symbolic_trace(nn.Sequential(made))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
    assert freeze(nn.Sequential(made)) == []
    assert described(made) is None
    refused: list[tuple[Any, str]] = [
        (made.reset_parameters, "weights in int8 are not trained; train the KSLinear, and quantize it then"),
        (
            partial(made.explain, processes=2),
            "processes=2; accepted for weights in int8: 1, because no style splits them",
        ),
        (
            partial(KSBlockwise()._apply, made, None),
            "KSBlockwise: got QuantizedKSLinear; accepted: a KSLinear, or a group of them",
        ),
        (partial(KSLinear.group, [made]), "accepted: a list of KSLinear, one or more"),
    ]
    for call, message in refused:
        with pytest.raises(LaunchError, match=message):
            call()


def test_what_is_refused() -> None:
    layer, made = layer_of()
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (
            made,
            (torch.randn(2, 48, dtype=torch.float64),),
            "got x of float64 for weights in int8; accepted: float32, float16, bfloat16",
        ),
        (made, (torch.randn(2, 48).half(),), "got x of float16 and bias of float32; give both in one precision"),
        (made, (torch.randn(2, 36),), r"QuantizedKSLinear.*got x of shape \(2, 36\); layout bsf wants \(..., 48\)"),
        (made, (torch.randn(2, 48), torch.randn(3, 36)), r"got residual of shape \(3, 36\); \(2, 36\) is needed"),
        (made, ("x",), "x is str; accepted: a torch.Tensor"),
        (layer.quantize, ("int4",), "storage='int4'"),
        (layer.quantize, (["int8"],), r"storage=\['int8'\]"),
        (KSLinear(CHAIN, dtype=torch.complex64).quantize, ("int8",), "got complex numbers; accepted: real ones"),
        (
            KSLinear(CHAIN, precision="tf32x3").quantize,
            ("int8",),
            "precision=tf32x3; accepted for quantization: None or float32",
        ),
    ]
    for call, given, message in cases:
        with pytest.raises(LaunchError, match=message):
            call(*given)


def test_weights_in_bfloat16() -> None:
    """Values for x of float32 are PyTorch's own. They need no scale, and a cast of the model keeps them."""
    layer, made = layer_of("bfloat16", activation="gelu")
    x = torch.randn(5, 48, requires_grad=True)
    for own, given in zip(made.values, layer.weights, strict=True):
        assert own.dtype is torch.bfloat16
        assert torch.equal(own, given.detach().bfloat16())
    made(x).sum().backward()
    with torch.no_grad():
        for _ in range(2):  # the second time as it was prepared
            assert relative(made(x), wide_of(made)(x.double())) < 2e-6
        # its bias was rounded, and nothing else
        assert relative(made.bfloat16().float()(x), wide_of(made)(x.double())) < 2e-2
    assert x.grad is not None
    assert (made.weight_bytes, made.saturated) == (2 * 528 + 4 * 2, [0, 0])
    assert "weights=bfloat16, no scales, 0 of 528 saturated" in repr(made)
    made.fuse = "no"
    assert (
        made.explain(1)
        .splitlines()[1]
        .startswith("3,8,16,1: bfloat16 weights with no scales, 0 of 384 saturated; ks_3x8x16x1_float32")
    )
    again = KSLinear(CHAIN).quantize("bfloat16")
    again.load_state_dict(made.state_dict())
    assert torch.equal(again.to_dense(), made.to_dense())
    cases: list[tuple[Any, tuple[Any, ...], str]] = [
        (
            made,
            (x.bfloat16(),),
            r"got x of bfloat16 for weights in bfloat16; accepted: float32, or weights in bfloat16 that are not "
            r"converted \(weights=same\)",
        ),
        (
            KSLinear(CHAIN).bfloat16().quantize,
            ("bfloat16",),
            r"weights of bfloat16 in bfloat16; accepted: a layer of float32 \(your layer is stored in bfloat16 already",
        ),
        (
            KSLinear(CHAIN).half().quantize,
            ("bfloat16",),
            "weights of float16 in bfloat16; accepted: a layer of float32$",
        ),
        (
            partial(layer.quantize, x=x),
            ("bfloat16",),
            "x was given with storage=bfloat16, which has no scales; accepted: weights alone",
        ),
    ]
    for call, given, message in cases:
        with pytest.raises(LaunchError, match=message):
            call(*given)


# ---- x in eight bits


@pytest.mark.exhaustive
@pytest.mark.parametrize(("storage", "layout"), [("int8", "bsf"), ("e4m3", "bsl"), ("e5m2", "bsf")])
def test_x_becomes_as_the_weights_are(storage: str, layout: str) -> None:
    """X gets the scale of the x that the layer was made for. Saturated values are counted and saved."""
    layer = KSLinear(CHAIN, layout=layout, activation="gelu", between="relu")
    x = torch.randn(40, 48) if layout == "bsf" else torch.randn(48, 40)
    made = layer.quantize(storage, x=x, x_too=True)
    assert isinstance(made, QuantizedKSLinear)
    for dtype, within in DTYPES.items():
        own = made.to(dtype)
        with torch.no_grad():
            met = own.first_input(x.to(dtype))
            assert met is not None
            assert relative(met, x) < {"int8": 0.02, "e4m3": 0.04, "e5m2": 0.08}[storage]
            assert relative(own(x.to(dtype)), wide_of(own)(met.double())) < within
    assert made.saturated_inputs == 0
    with torch.no_grad():
        made.float()(2 * x)
    assert (counted := made.saturated_inputs) > 0
    with torch.no_grad():
        made(torch.full_like(x, torch.nan))  # which whole numbers cannot hold
    assert made.saturated_inputs == counted + x.numel()
    one = x.clone()
    one.view(-1)[:2] = torch.tensor([torch.nan, torch.inf])
    met = made.first_input(one)
    assert met is not None
    nan, largest = met.view(-1)[:2]
    assert nan == 0 if storage == "int8" else nan.isnan()  # in the words of docs/quantized.md
    assert largest == pytest.approx(float(x.abs().max()), rel=1e-6)
    assert made.saturated_inputs == counted + x.numel() + 2
    assert f"{made.saturated_inputs} of its elements saturated so far" in made.explain(4)
    assert f"x in {storage} times" in repr(made)
    beyond = made.first_input(2 * x)
    assert beyond is not None
    assert relative(beyond, (2 * x).clamp(-x.abs().max(), x.abs().max())) < 0.08
    again = layer.quantize(storage, x=3 * x, x_too=True)
    again.load_state_dict(made.state_dict())
    assert f"times {made.get_buffer('x_scale'):.6g}" in repr(again)
    with torch.no_grad():
        torch.testing.assert_close(again(x), made(x), rtol=0, atol=0)
        made.x_scale.mul_(1.3)
        # rounded otherwise, by the scale that the weights are multiplied by too
        assert 1e-3 < relative(made(x), again(x)) < 0.15
        torch.testing.assert_close(copy.deepcopy(made)(x), made(x), rtol=0, atol=0)


def test_scales_of_a_later_factor_fit_what_the_activation_gives() -> None:
    """The second factor's large weight multiplies zeros alone after relu, so that it may saturate."""
    first, second = torch.tensor([1.0, -1.0]).reshape(1, 2, 1, 1), torch.tensor([0.3337, 1.0]).reshape(1, 1, 2, 1)
    layer, x = KSLinear.from_weights([first, second], between="relu"), torch.rand(40, 1)
    made = layer.quantize("int8", x=x)
    wanted = ksgen.quantize(second, "int8", x=torch.cat([x, torch.zeros_like(x)], 1))
    assert made.scales[1].item() == pytest.approx(wanted.scale.item(), rel=1e-6)
    assert made.scales[1].item() < 0.99 / 127


def test_a_layer_whose_x_is_in_eight_bits_is_one_launch_where_that_is_asked_for() -> None:
    """One launch agrees with one launch per factor, because the intermediate is float32."""
    x = torch.randn(40, 48)
    apart = KSLinear(CHAIN, between="relu", fuse="no").quantize("e4m3", x=x, x_too=True)
    whole = KSLinear(CHAIN, between="relu", fuse="yes").quantize("e4m3", x=x, x_too=True)
    whole.load_state_dict(apart.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(whole(x), apart(x), rtol=1e-6, atol=1e-6)
    one, *each = whole.explain(40).splitlines()
    assert ("one launch, by vector" in one, len(each)) == (True, len(CHAIN))
    assert " bytes; with x in float32, it would move " in one
    assert "one launch per factor; fuse='no'" in apart.explain(40)


def test_compilers_see_x_in_eight_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(12, 48)
    made = KSLinear(CHAIN).quantize("e4m3", x=x, x_too=True)
    with torch.no_grad():
        wanted = made(x)
        compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), wanted)
        with torch.autocast("cpu", torch.bfloat16):
            assert made(x).dtype == torch.bfloat16
        monkeypatch.setattr("ksgen.torch.layer.stored.has_kernels", lambda device: False)
        torch.testing.assert_close(made(x), wanted, rtol=1e-5, atol=1e-5)
        assert made(x[:0]).shape == (0, 36)


def test_a_layer_that_quantizes_x_is_built_in_training_mode() -> None:
    made = KSLinear(CHAIN).quantize("int8", x=torch.randn(4, 48), x_too=True)
    assert made.training
    assert made.build(4) is made


def test_a_layer_that_was_in_16_bits_is_built_for_such_x() -> None:
    layer = KSLinear(CHAIN, dtype=torch.bfloat16).eval().quantize("int8").build(4)
    assert layer(torch.randn(4, 48, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_what_is_refused_of_x_in_eight_bits() -> None:
    layer, x = KSLinear(CHAIN), torch.randn(4, 48)
    with pytest.raises(LaunchError, match="x_too=True without x; accepted: typical inputs of the layer as x"):
        layer.quantize("int8", x_too=True)
    with pytest.raises(LaunchError, match="x_too='yes'; accepted: True or False"):
        layer.quantize("int8", x=x, x_too="yes")  # type: ignore[arg-type]
    made = layer.quantize("int8", x=x, x_too=True)
    with pytest.raises(
        LaunchError, match=r"x in eight bits has no gradients; call under torch.no_grad\(\), or quantize without x_too"
    ):
        made(x.requires_grad_())
    with pytest.raises(LaunchError, match="its weights are in int8 already; accepted: the original KSLinear"):
        made.quantize("int8")
    model = nn.Sequential(layer)
    with pytest.raises(SpecError, match="x_too=True without inputs; accepted: typical inputs of the model"):
        quantize(model, "int8", x_too=True)
    report = quantize(model, "e4m3", inputs=x.detach(), x_too=True)
    assert 0.03 < report.layers[0].error < 0.1
    with pytest.raises(SpecError, match="every KSLinear of the model is quantized already"):
        quantize(model, "int8")


def test_a_chain_that_cannot_be_built_goes_factor_by_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU falls back as `KSLinear` does, and from then on."""
    _, made = layer_of(bias=False)
    x, asked, told = torch.randn(4, 48), [], []
    with torch.no_grad():
        wanted = made(x)
    whole = type("Unbuilt", (), {"__call__": lambda *_, **__: unbuilt()})()

    def unbuilt() -> Tensor:
        raise ToolchainError("no compiler")

    def expected(own: Any, device: Any, **job: Any) -> Verdict:
        asked.append(job)
        return Verdict(not told, "this test")

    monkeypatch.setattr(stored, "is_one_launch", expected)
    monkeypatch.setattr(stored, "disable_fusion", lambda own, error: told.append((own, str(error))))
    options = {"layout": "bsf", "activation": "none", "bias": None, "residual": None, "precision": "float32"}
    for _ in range(2):
        torch.testing.assert_close(stored.on_gpu(made, whole, x, made._ready_parts(), options), wanted)
    assert told == [(whole, "no compiler")]
    assert (
        asked
        == [
            {
                "precision": "float32",
                "layout": "bsf",
                "epilogue": Epilogue(),
                "batch": 4,
                "weights": "int8",
                "inputs": "same",
            }
        ]
        * 2
    )
