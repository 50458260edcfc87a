"""Weights in eight bits: how far values and scales are from them, what calibration gains, that nothing saturates
unsaid.
"""

from itertools import product

import ml_dtypes
import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.errors import LaunchError, SpecError
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.quantized import CLIPPED, PER, Quantized, QuantizedInputs, numpy_type, quantize, quantize_inputs, rounded
from ksgen.spec import STORAGES
from ksgen.spec.storage import STORED
from tests.support.hasty import compiles_hastily
from tests.support.libraries import library
from tests.support.native import chosen_native

__all__ = ["compiles_hastily"]  # which pytest finds by its name

RANDOM = np.random.default_rng(0)
WEIGHTS = RANDOM.standard_normal((2, 6, 8, 3)).astype(np.float32) * np.exp(RANDOM.standard_normal((2, 6, 1, 3))).astype(
    np.float32
)
X = RANDOM.standard_normal((50, 48)) * np.exp(2 * RANDOM.standard_normal(48))  # features of unlike sizes
SCALES = {"factor": (1, 1, 1, 1), "i": (2, 1, 1, 1), "output": (2, 6, 1, 3)}


@pytest.mark.parametrize(("storage", "per"), list(product(STORAGES, PER)))
def test_no_weight_saturates_and_rounding_is_all_that_is_lost(storage: str, per: str) -> None:
    made, how = quantize(WEIGHTS, storage, per), STORAGES[storage]
    assert (made.storage, made.per, made.scale.shape, made.saturated) == (storage, per, SCALES[per], 0)
    assert made.values.dtype == numpy_type(how)
    wide = reference.dequantized(made.values, made.scale)
    np.testing.assert_allclose(made.dequantized(), wide, rtol=1e-6)
    values = np.abs(made.values.astype(np.float64))
    assert values.max() == how.largest
    # Half a step: of whole numbers, or of numbers with so many bits.
    step = (
        1
        if how.mantissa is None
        else 2.0 ** (np.floor(np.log2(np.maximum(values, 2.0**how.least_exponent))) - how.mantissa)
    )
    assert (np.abs(wide - WEIGHTS) <= 0.5001 * step * made.scale).all()
    error = np.linalg.norm(wide - WEIGHTS) / np.linalg.norm(WEIGHTS)
    assert made.error(WEIGHTS) == pytest.approx(error, rel=1e-6)  # the norm of float32 weights
    assert made.nbytes == WEIGHTS.size + 4 * made.scale.size


def test_more_scales_are_nearer_and_int8_is_the_nearest() -> None:
    errors = {storage: [quantize(WEIGHTS, storage, per).error(WEIGHTS) for per in PER] for storage in STORAGES}
    # of the others, whose steps grow with values, little changes
    assert errors["int8"][0] > errors["int8"][1] > errors["int8"][2]
    assert errors["int8"][2] < errors["e4m3"][2] < errors["e5m2"][2]
    assert errors["int8"][2] < 0.006


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_the_error_of_the_product_is_that_of_x(layout: str) -> None:
    made = quantize(WEIGHTS, "e4m3", "i")
    given = X if layout == "bsf" else X.T
    wanted, found = (reference.multiply(made.pattern, given, each, layout) for each in (WEIGHTS, made._exact()))
    assert made.error(WEIGHTS, given, layout) == pytest.approx(
        np.linalg.norm(found - wanted) / np.linalg.norm(wanted), rel=1e-6
    )


@pytest.mark.parametrize(("storage", "per"), list(product(STORAGES, PER)))
def test_calibrated_scales_are_never_worse_and_say_what_saturates(storage: str, per: str) -> None:
    plain, fitted = quantize(WEIGHTS, storage, per), quantize(WEIGHTS, storage, per, x=X)
    assert fitted.error(WEIGHTS, X) <= plain.error(WEIGHTS, X)
    beyond = np.abs(WEIGHTS / fitted.scale) > STORAGES[storage].largest * (1 + 1e-6)
    assert fitted.saturated == np.count_nonzero(beyond)
    assert f"{fitted.saturated} of 288 weights saturated" in repr(fitted)
    assert np.isfinite(fitted.values.astype(np.float64)).all()
    if per == "output" and storage != "int8":
        assert fitted.error(WEIGHTS, X) < 0.9 * plain.error(WEIGHTS, X)
        assert fitted.saturated > 0
    assert (fitted.scale >= 0.999 * CLIPPED.min() * plain.scale).all()


def test_a_scale_of_your_own_may_not_saturate() -> None:
    own = quantize(WEIGHTS, "int8", "factor", scale=1.0)
    assert own.scale.shape == (1, 1, 1, 1)
    np.testing.assert_array_equal(own.values, np.rint(WEIGHTS).astype(np.int8))
    beyond = np.count_nonzero(np.abs(WEIGHTS) > 127 * np.float32(0.01))
    with pytest.raises(
        LaunchError, match=rf"scale=0.01: {beyond} weights would be beyond 127 of int8; accepted: a larger scale"
    ):
        quantize(WEIGHTS, "int8", "factor", scale=0.01)


@pytest.mark.parametrize("storage", STORAGES)
def test_the_largest_scale_of_your_own_gives_finite_products(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    scale = np.finfo(np.float32).max / STORAGES[storage].largest
    weights = np.array([0, scale, -3 * scale]).reshape(1, 3, 1, 1)
    y = Launcher(1, 3, 1, 1)(np.full((1, 1), 1e-30, np.float32), quantize(weights, storage, "factor", scale=scale))
    np.testing.assert_allclose(y, 1e-30 * weights.reshape(1, 3), rtol=1e-6)


def test_zeros_and_tiny_weights() -> None:
    for storage in STORAGES:
        for size in (0.0, 1e-44, 3e38):
            made = quantize(np.full((1, 2, 3, 1), size, np.float32), storage)
            assert np.isfinite(made.scale).all()
            assert (made.scale > 0).all()
            np.testing.assert_allclose(made.dequantized(), size, rtol=0.1, atol=1e-40)
            assert made.saturated == 0


@pytest.mark.libraries
@pytest.mark.parametrize("form", ["sparse", "meta"])
def test_tensors_without_values_of_their_own_are_refused(form: str) -> None:
    weights = library("torch").tensor(WEIGHTS)
    with pytest.raises(LaunchError, match="accepted: an array of NumPy, or a dense tensor of PyTorch with values"):
        quantize(weights.to_sparse() if form == "sparse" else weights.to("meta"), "int8")


@pytest.mark.libraries
def test_tensors_give_tensors_of_the_same_bytes() -> None:
    torch = library("torch")
    for storage, dtype in (("int8", torch.int8), ("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)):
        wanted = quantize(WEIGHTS, storage, x=X)
        made = quantize(torch.nn.Parameter(torch.tensor(WEIGHTS)), storage, x=torch.tensor(X))
        assert (made.values.dtype, made.scale.dtype, made.saturated) == (dtype, torch.float32, wanted.saturated)
        np.testing.assert_array_equal(made.whole.numpy(), wanted.whole)
        np.testing.assert_array_equal(made.dequantized().numpy(), wanted.dequantized())
        assert made.error(WEIGHTS, X) == wanted.error(WEIGHTS, X)


@pytest.mark.parametrize("storage", STORED)
def test_weights_and_x_in_any_order_of_axes_become_contiguous(storage: str) -> None:
    """Kernels read their bytes in the order of the axes."""
    wanted, made = quantize(WEIGHTS, storage), quantize(np.asfortranarray(WEIGHTS), storage)
    np.testing.assert_array_equal(made.whole, wanted.whole)
    assert made.values.flags.c_contiguous
    if storage in STORAGES:
        assert quantize_inputs(np.asfortranarray(X), storage).values.flags.c_contiguous


def test_packed_arrays_are_read_only() -> None:
    made = quantize(WEIGHTS, "int8")
    for array in (made.values, made.scale):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (WEIGHTS, {"storage": "int4"}, r"storage='int4'; did you mean int8\? accepted: int8, e4m3, e5m2"),
        (WEIGHTS, {"per": "row"}, "per='row'; accepted: factor, i, output"),
        (WEIGHTS[0], {}, r"got weights of shape \(6, 8, 3\); accepted: \(a, b, c, d\)"),
        (
            np.where(WEIGHTS.max() == WEIGHTS, np.nan, WEIGHTS),
            {},
            "1 of 288 weights not finite; accepted: finite numbers",
        ),
        (
            np.where(WEIGHTS.max() == WEIGHTS, np.float64(1e39), WEIGHTS),
            {},
            r"1 of 288 weights beyond 3.4e\+38, the largest float32",
        ),
        (WEIGHTS * 1j, {}, "got complex numbers; accepted: real ones"),
        (np.ma.array(WEIGHTS, mask=WEIGHTS > 0), {}, r"got a masked array, masked_array\(.*; accepted: an array"),
        ("weights", {}, "got 'weights'; accepted: an array of NumPy, or a dense tensor of PyTorch with values"),
        (WEIGHTS, {"x": X.T}, r"got x of shape \(48, 50\); layout bsf wants \(batch, 48\)"),
        (WEIGHTS, {"x": X * np.inf}, "x holds numbers that are not finite"),
        (WEIGHTS, {"x": X, "layout": "rows"}, "layout='rows'; accepted: bsf, bsl"),
        (WEIGHTS, {"scale": np.ones(5), "per": "i"}, r"scale has shape \(5,\); accepted for per=i: \(2, 1, 1, 1\)"),
        (
            WEIGHTS,
            {"scale": np.ones((6, 2, 1, 3))},
            r"scale has shape \(6, 2, 1, 3\); accepted for per=output: \(2, 6, 1, 3\)",
        ),
        (WEIGHTS, {"scale": -1.0, "per": "factor"}, "scale=-1.0; accepted: finite numbers above 0"),
        (WEIGHTS, {"scale": 1e39, "per": "factor"}, r"scale=1e\+39; accepted: finite numbers above 0"),
        (
            WEIGHTS,
            {"scale": 1e36, "per": "factor", "storage": "e4m3"},
            r"scale=1e\+36, times 448 of e4m3, exceeds float32; accepted: a smaller scale",
        ),
        (WEIGHTS, {"scale": 1.0, "x": X}, "both x and scale were given"),
    ],
)
def test_what_is_refused(given: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        quantize(given, **{"storage": "int8", **options})  # type: ignore[arg-type]


def test_an_error_of_other_weights_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"got weights of shape \(2, 6, 8, 1\); \(2, 6, 8, 3\) is needed"):
        quantize(WEIGHTS, "int8").error(WEIGHTS[..., :1])


# ---- launched


def test_launchers_take_what_it_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers pack such weights once, or take packed ones, with arrays of any supported precision."""
    chosen_native(monkeypatch)
    own, made = Launcher(2, 6, 8, 3), ksgen.quantize(WEIGHTS, "e4m3")
    packed = own.pack(made)
    assert "e4m3" in repr(packed)
    for dtype, within in ((np.float32, 1e-6), (np.float16, 1e-3)):
        x = X.astype(np.float16).astype(dtype)
        truth = reference.multiply(own.pattern, x, made._exact(), "bsf")
        for weights in (made, packed):
            y = np.asarray(own(x, weights))
            assert y.dtype == dtype
            assert np.linalg.norm(y - truth) <= within * np.linalg.norm(truth)
    assert own._taken(made) is own._taken(made)
    assert "e4m3" in own.explain(1, weights="e4m3")
    call = own.prepare(X.astype(np.float32), made)
    np.testing.assert_array_equal(call(), own(X.astype(np.float32), packed))


def test_launchers_refuse_what_they_cannot_multiply(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    own, made = Launcher(2, 6, 8, 3), quantize(WEIGHTS, "int8")
    x = X.astype(np.float32)
    with pytest.raises(
        LaunchError, match="weights in int8 with precision=float64; accepted: x of float32, float16, bfloat16"
    ):
        own(X, made)
    with pytest.raises(LaunchError, match="weights in int8 with precision=tf32x3; accepted: x of float32"):
        own(x, made, precision="tf32x3")
    with pytest.raises(LaunchError, match=r"got Quantized\(2,6,8,3, int8.*; weights of 2,6,8,1 are needed"):
        Launcher(2, 6, 8, 1).pack(made)


@pytest.mark.libraries
def test_a_write_to_values_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, _ = library("torch"), chosen_native(monkeypatch)
    own, made, x = Launcher(2, 6, 8, 3), quantize(torch.tensor(WEIGHTS), "int8"), X.astype(np.float32)
    own(x, made)
    made.values[0, 0, 0, 0] += 1
    with pytest.raises(
        LaunchError, match=r"the tensor behind these weights was written to after launcher.pack; pack it again"
    ):
        own(x, made)


def test_they_are_named_at_the_top() -> None:
    assert ksgen.Quantized is Quantized
    assert ksgen.quantize is quantize
    assert ksgen.QuantizedInputs is QuantizedInputs
    assert ksgen.quantize_inputs is quantize_inputs


# ---- x in eight bits


@pytest.mark.parametrize("storage", STORAGES)
def test_x_has_one_scale_and_none_of_it_saturates(storage: str) -> None:
    made, how = quantize_inputs(X, storage), STORAGES[storage]
    assert np.abs(made.values.astype(np.float64)).max() == how.largest
    assert (made.values.dtype, made.saturated) == (numpy_type(how), 0)
    assert "0 of 2400 elements saturated" in repr(made)
    np.testing.assert_allclose(made.dequantized(), reference.dequantized(made.values, made.scale), rtol=1e-6)
    smallest = min(2.0**-how.mantissa, 1.0) if how.mantissa else 1.0
    assert np.abs(made.dequantized() - X).max() <= 0.51 * made.scale * how.largest * smallest
    again = quantize_inputs(X / 2, storage, scale=made.scale)
    assert again.scale == made.scale
    assert quantize_inputs(np.zeros((2, 3)), storage).scale == 1


@pytest.mark.libraries
@pytest.mark.parametrize("storage", STORAGES)
def test_x_in_a_tensor_has_the_same_bytes(storage: str) -> None:
    torch, made = library("torch"), quantize_inputs(X, storage)
    tensor = quantize_inputs(torch.tensor(X), storage)
    np.testing.assert_array_equal(tensor.values.view(torch.uint8).numpy(), made.values.view(np.uint8))
    assert tensor.dequantized().dtype == torch.float32


def test_what_saturates_of_x_is_refused_or_counted() -> None:
    scale = float(np.float32(np.abs(X).max() / 2 / 448))
    beyond = np.count_nonzero(np.abs(X) > 448 * scale)
    with pytest.raises(
        LaunchError,
        match=rf"{beyond} elements? of x beyond .*, the largest that e4m3 has at this scale; accepted: a larger",
    ):
        quantize_inputs(X, "e4m3", scale=scale)
    made = quantize_inputs(X, "e4m3", scale=scale, saturate=True)
    assert (made.saturated, np.abs(made.values.astype(np.float64)).max()) == (beyond, 448)
    for options, told in (
        ({"scale": 0}, "scale=0; accepted: a positive normal float32"),
        ({"scale": "1"}, "scale='1'"),
        ({"scale": np.inf}, "scale=inf"),
        ({"scale": 1e-44}, "scale=1e-44"),
        ({"saturate": "no"}, "saturate='no'; accepted: True or False"),
    ):
        with pytest.raises(LaunchError, match=told):
            quantize_inputs(X, "e4m3", **options)
    with pytest.raises(LaunchError, match="storage='e5m3'; did you mean e5m2"):
        quantize_inputs(X, "e5m3")
    with pytest.raises(LaunchError, match="1 of 2 elements of x not finite"):
        quantize_inputs(np.array([1, np.nan]), "int8")
    with pytest.raises(LaunchError, match=r"x up to 1e.300, whose scale in e4m3 would exceed float32"):
        quantize_inputs(np.full(3, 1e300), "e4m3")
    with pytest.raises(
        LaunchError, match=r"got Quantized\(2,6,8,3, int8.*which is in eight bits already; accepted: the weights"
    ):
        quantize(quantize(WEIGHTS, "int8"), "int8")
    with pytest.raises(LaunchError, match="scale=-1; accepted"):
        quantize(WEIGHTS, "int8", x_scale=-1)
    with pytest.raises(LaunchError, match="x_scale=1e-37, times a scale of the weights, is not a normal float32"):
        quantize(WEIGHTS, "int8", x_scale=1e-37)
    with pytest.raises(LaunchError, match=r"x_scale=1e.36, .* or its products with values of e4m3 exceed float32"):
        quantize(WEIGHTS, "e4m3", x_scale=1e36)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("storage", "layout"), list(product(STORAGES, ["bsf", "bsl"])))
def test_launchers_take_x_in_eight_bits(storage: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """X has its own type or is raw bits. The type of y is float32, that of the other arrays, or the requested one."""
    chosen_native(monkeypatch)
    own, given = Launcher(2, 6, 8, 3), quantize_inputs(X if layout == "bsf" else np.ascontiguousarray(X.T), storage)
    made = quantize(WEIGHTS, storage, x_scale=given.scale)
    bias = RANDOM.standard_normal(36).astype(np.float16)
    truth = reference.multiply(own.pattern, reference.dequantized(given.values, given.scale), made._exact(), layout)
    added = reference.multiply(
        own.pattern, reference.dequantized(given.values, given.scale), made._exact(), layout, bias=bias
    )
    for options, wanted, dtype, within in (
        ({}, truth, "float32", 1e-6),
        ({"precision": "bfloat16"}, truth, "bfloat16", 4e-3),
        ({"bias": bias}, added, "float16", 5e-4),
        ({"out": np.empty(truth.shape, np.float16)}, truth, "float16", 5e-4),
    ):
        for x in (given.values, given.values.view(np.uint8)):
            y = np.asarray(own(x, made, layout=layout, **options))
            assert y.dtype.name == dtype
            assert np.linalg.norm(y.astype(np.float64) - wanted) <= within * np.linalg.norm(wanted)
    packed = own.pack(made)
    np.testing.assert_array_equal(
        own.prepare(given.values, packed, layout=layout)(), own(given.values, made, layout=layout)
    )
    wide = np.concatenate([given.values, given.values], 1)  # of which a half is a slice
    half = wide[:, : given.values.shape[1]]
    np.testing.assert_array_equal(own(half, packed, layout=layout), own(given.values, packed, layout=layout))


@pytest.mark.libraries
@pytest.mark.parametrize(("storage", "layout"), list(product(STORAGES, ["bsf", "bsl"])))
def test_launchers_take_tensors_in_eight_bits(storage: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, _ = library("torch"), chosen_native(monkeypatch)
    own, given = Launcher(2, 6, 8, 3), quantize_inputs(X if layout == "bsf" else np.ascontiguousarray(X.T), storage)
    made = quantize(WEIGHTS, storage, x_scale=given.scale)
    truth = reference.multiply(own.pattern, reference.dequantized(given.values, given.scale), made._exact(), layout)
    tensor = quantize_inputs(torch.tensor(given.dequantized()), storage, scale=given.scale).values
    y = own(tensor, quantize(torch.tensor(WEIGHTS), storage, x_scale=given.scale), layout=layout, precision="bfloat16")
    assert (y.dtype, tuple(y.shape)) == (torch.bfloat16, truth.shape)
    assert np.linalg.norm(y.double().numpy() - truth) <= 4e-3 * np.linalg.norm(truth)


def test_x_in_eight_bits_is_refused_where_nothing_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    own, given = Launcher(2, 6, 8, 3), quantize_inputs(X, "e4m3")
    made, x = quantize(WEIGHTS, "e4m3", x_scale=given.scale), given.values
    for weights, options, told in (
        (
            WEIGHTS,
            {},
            "x is of float8_e4m3fn; give float32.*or weights that ksgen.quantize made with x_scale, which take x in "
            "eight bits",
        ),
        (quantize(WEIGHTS, "e4m3"), {}, "x is of float8_e4m3fn; give float32"),
        (
            made,
            {"precision": "float64"},
            "weights in e4m3 with precision=float64; accepted: x of float32, float16, bfloat16",
        ),
        (made, {"precision": "tf32"}, "weights in e4m3 with precision=tf32; accepted: x of float32, float16, bfloat16"),
        (
            made,
            {"precision": "bfloat16", "bias": np.zeros(36, np.float16)},
            "got y of bfloat16 and bias of float16; give both in one",
        ),
        (
            made,
            {"residual": np.zeros((50, 36), np.float16), "bias": np.zeros(36)},
            "got y of float64 and residual of float16|precision=float",
        ),
    ):
        with pytest.raises((LaunchError, SpecError), match=told):
            own(x, weights, **options)
    with pytest.raises(
        LaunchError, match=r"got x of float32 for weights that multiply x in e4m3; give float8_e4m3fn or uint8: ksgen"
    ):
        own(X.astype(np.float32), made)
    with pytest.raises(LaunchError, match="weights is of float8_e4m3fn; give float32"):
        own(X, x)
    chain, second = ChainLauncher(own, Launcher(1, 5, 36, 1)), RANDOM.standard_normal((1, 5, 36, 1)).astype(np.float32)
    y = chain(x, [made, second])
    np.testing.assert_array_equal(y, Launcher(1, 5, 36, 1)(own(x, made), second))
    assert chain(x, [made, quantize(second, "int8")], precision="bfloat16").dtype.name == "bfloat16"
    plain = quantize(WEIGHTS, "e4m3")
    with pytest.raises(
        LaunchError, match=r"weights of factor 2 multiply x in e4m3; accepted: weights that ksgen.quantize made without"
    ):
        chain(X.astype(np.float32), [plain, quantize(second, "e4m3", x_scale=given.scale)])
    with pytest.raises(LaunchError, match="weights of the factors differ in storage; accepted: fuse='auto' or 'no'"):
        ChainLauncher(own, Launcher(1, 5, 36, 1), fuse="yes")(x, [made, second])
    for weights, told in (
        ([made, plain], "those of layer 1 as e4m3 and those of layer 2 as same"),
        ([plain, made], "1 as same .* 2 as e4m3"),
    ):
        with pytest.raises(
            LaunchError,
            match=f"the first factors of the layers take x in different storage, .*{told}; accepted: one storage",
        ):
            GroupLauncher(own, own)(x, weights)
    with pytest.raises(
        LaunchError, match="weights in int8 with precision=float64; accepted: x of float32, float16, bfloat16"
    ):
        GroupLauncher(own, own)(X, [quantize(WEIGHTS, "int8")] * 2)
    told = own.explain(1, precision="bfloat16", weights="e4m3", inputs="e4m3")
    assert told.endswith("; moves 552 bytes; with x in bfloat16, it would move 600")


def test_layers_and_groups_take_x_in_eight_bits_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 intermediate gives the bits of one launch per factor. Types follow the other arrays."""
    chosen_native(monkeypatch)
    monkeypatch.setattr("ksgen.launch.fused.LEAST_ROWS", 1)
    first, given = Launcher(2, 6, 8, 3), quantize_inputs(X, "e4m3")
    made, after = (
        quantize(WEIGHTS, "e4m3", x_scale=given.scale),
        quantize(RANDOM.standard_normal((1, 5, 36, 1)), "e4m3"),
    )
    whole, apart = (ChainLauncher(first, Launcher(1, 5, 36, 1), between="silu", fuse=fuse) for fuse in ("yes", "no"))
    y = apart(given.values, [made, after])
    call = whole.prepare(given.values, [made, after])
    assert call is not None
    assert call.plan.kernel.inputs == "e4m3"
    np.testing.assert_array_equal(call(), y)
    bias = RANDOM.standard_normal(5).astype(np.float16)
    assert whole(given.values, [made, after], bias=bias).dtype == np.float16
    group = GroupLauncher(ChainLauncher(*whole.factors, between="silu"), first)
    told = group.explain(50, weights="e4m3", inputs="e4m3")
    assert ("one launch, by vector" in told, told.endswith("bytes; with x in float32, it would move 18,864")) == (
        True,
        True,
    ), told
    for out in (None, [np.empty((50, 5), np.float32), np.empty((50, 36), np.float32)]):
        ys = group(given.values, [[made, after], [made]], out=out)
        np.testing.assert_array_equal(ys[0], y)
        np.testing.assert_array_equal(ys[1], first(given.values, made))
    ys = group(given.values.view(np.uint8), [[made, after], [made]], bias=[bias, np.zeros(36, np.float16)])
    assert {each.dtype.name for each in ys} == {"float16"}
    for biases in ([bias, None], [None, np.zeros(36, np.float16)]):  # by launches of their own
        ys = group(given.values, [[made, after], [made]], bias=biases)
        assert {each.dtype.name for each in ys} == {"float16"}
    assert apart.explain(50, weights="e4m3", inputs="e4m3").count("e4m3_inputs") == 1


READ_ONLY = np.zeros((50, 5), np.float32)
READ_ONLY.flags.writeable = False


@pytest.mark.parametrize("fuse", ["yes", "no"])
def test_a_layer_refuses_before_its_first_launch(fuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)
    first, given = Launcher(2, 6, 8, 3), quantize_inputs(X, "e4m3")
    made, after = (
        quantize(WEIGHTS, "e4m3", x_scale=given.scale),
        RANDOM.standard_normal((1, 5, 36, 1)).astype(np.float32),
    )
    chain, launched = ChainLauncher(first, Launcher(1, 5, 36, 1), fuse=fuse), []
    monkeypatch.setattr(Launcher, "__call__", lambda *given, **options: launched.append(options))
    for weights, options, told in (
        (after, {"bias": np.zeros(6, np.float32)}, r"got bias of shape \(6,\); \(5,\) is needed"),
        (
            after,
            {"bias": np.zeros(5, np.float16)},
            "got y of float16 and weights of float32; give both in one precision",
        ),
        (
            after,
            {"precision": "bfloat16", "out": np.zeros((50, 5), np.float32)},
            "got y of bfloat16 and out of float32",
        ),
        (quantize(after, "e4m3"), {"residual": np.zeros((50, 6), np.float32)}, "got residual of shape"),
        (quantize(after, "e4m3"), {"precision": "tf32"}, "weights in e4m3 with precision=tf32; accepted: x of"),
        (after, {"out": READ_ONLY}, "out.*read"),
    ):
        with pytest.raises(LaunchError, match=told):
            chain(given.values, [made, weights], **options)
    with pytest.raises(LaunchError, match="between='relu' of complex numbers, complex64; accepted: none"):
        ChainLauncher(*chain.factors, between="relu", fuse=fuse)(
            X.astype(np.complex64), [WEIGHTS.astype(np.complex64), after.astype(np.complex64)]
        )
    assert launched == []


@pytest.mark.libraries
def test_a_write_to_a_scale_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch, _ = library("torch"), chosen_native(monkeypatch)
    own, made = Launcher(2, 6, 8, 3), quantize(torch.tensor(WEIGHTS), "int8")
    x = X.astype(np.float32)
    packed = own.pack(made)
    own(x, made)
    made.scale.mul_(2)
    for weights in (packed, made):
        with pytest.raises(
            LaunchError, match=r"the tensor behind these weights was written to after launcher.pack; pack it again"
        ):
            own(x, weights)


@pytest.mark.parametrize(("storage", "bits"), [("bfloat16", 8), ("e4m3", 4), ("e5m2", 3)])
def test_numbers_of_float64_are_rounded_once(storage: str, bits: int) -> None:
    """A hair above the middle between two values, which float32 does not know of, goes up; the middle goes to the even
    one, and a hair below it down."""
    step, hair = 2.0 ** (1 - bits), 2.0**-40
    wide = np.array([1 + step / 2 + hair, 1 + step / 2, 1 + step / 2 - hair, 1 + 1.5 * step - hair, 1 + 1.5 * step])
    wanted = np.array([1 + step, 1, 1, 1 + step, 1 + 2 * step])
    how = STORED[storage]
    np.testing.assert_array_equal(rounded(wide, how).astype(np.float64), wanted)
    np.testing.assert_array_equal(rounded(-wide, how).astype(np.float64), -wanted)


def test_what_float32_has_not_is_rounded_to_bfloat16_as_ever() -> None:
    wide = np.array([np.inf, -np.inf, np.nan, 1e300, -1e300, 1e-300, 0.0, -0.0, 2.0**-149, 3.0e-45])
    with np.errstate(over="ignore"):
        near = wide.astype(np.float32)
    got, wanted = rounded(wide, STORED["bfloat16"]), near.astype(rounded(wide, STORED["bfloat16"]).dtype)
    np.testing.assert_array_equal(got.view(np.uint16), wanted.view(np.uint16))


@pytest.mark.parametrize(("batch", "layout"), [(1, "bsf"), (3, "bsl"), (70, "bsf"), (70, "bsl")])
def test_weights_in_bfloat16_that_are_not_finite_stay_so_and_reach_their_outputs_alone(batch: int, layout: str) -> None:
    """Finite values beyond bfloat16 become Inf."""
    bad = WEIGHTS.copy()
    bad[0, 1, 2, 0], bad[0, 2, 3, 1], bad[1, 3, 0, 2], bad[1, 4, 5, 0] = np.nan, np.inf, -np.inf, 3.4e38
    made = quantize(bad, "bfloat16")
    with np.errstate(over="ignore"):
        wide = bad.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(made.dequantized(), wide)
    assert (made.saturated, np.isinf(wide).sum(), np.isnan(wide).sum()) == (0, 3, 1)
    x = np.abs(RANDOM.standard_normal((batch, 48) if layout == "bsf" else (48, batch))).astype(np.float32) + 1
    y = Launcher(2, 6, 8, 3)(x, made, layout=layout)
    wanted = reference.multiply(Launcher(2, 6, 8, 3).pattern, x, wide, layout)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(y), np.isinf(wanted))
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
