"""`quantize`: replace every `KSLinear` of a model by one with stored weights, such as int8, and report the change."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.errors import LaunchError, SpecError
from ksgen.pattern import Chain
from ksgen.quantized import Per, describe_scales
from ksgen.spec import WeightStorage
from ksgen.spec.kernel import is_word
from ksgen.spec.storage import STORED
from ksgen.torch.conversion.convert import put_all
from ksgen.torch.conversion.propose import table_of
from ksgen.torch.conversion.rule import write_stored
from ksgen.torch.layer.linear import KSLinear, QuantizedKSLinear
from ksgen.values import counted, excerpt, listed


@dataclass(frozen=True)
class QuantizedLayer:
    """One layer of a model, before and after."""

    name: str
    chain: Chain
    bytes: tuple[int, int]  # bytes of the weights, before and after
    # relative error in the Frobenius norm: of y if x was given, else of K, or of all weights if there is a `between`
    error: float
    saturated: int  # weights that exceeded the largest value and were clipped to it


@dataclass(frozen=True)
class QuantizedReport:
    """Result of `quantize`. `print(report)` shows a table."""

    storage: str
    per: str  # granularity of scales, if the storage has any
    is_calibrated: bool
    layers: tuple[QuantizedLayer, ...]

    @property
    def bytes(self) -> tuple[int, int]:
        return sum(each.bytes[0] for each in self.layers), sum(each.bytes[1] for each in self.layers)

    def __repr__(self) -> str:
        before, after = self.bytes
        return (
            f"QuantizedReport({counted(len(self.layers), 'layer')} in {self.storage}, {before:,} bytes before and "
            f"{after:,} after)"
        )

    def __str__(self) -> str:
        rows = []
        for each in self.layers:
            before, after = each.bytes
            share, saturated = f"{after / before:.1%}", f"{each.saturated} of {each.chain.weight_count}"
            rows.append([each.name, str(each.chain), f"{after:,}", share, f"{each.error:.4f}", saturated])
        titles = ("layer", "chain", "bytes", "share", "error of y" if self.is_calibrated else "error of K", "saturated")
        before, after = self.bytes
        what = f"{counted(len(self.layers), 'layer')} in {self.storage}, {describe_scales(self.storage, self.per)}"
        return f"{table_of(titles, rows)}{what}: {before:,} bytes became {after:,}."


def quantize_model(
    model: nn.Module,
    storage: WeightStorage,
    per: Per = "output",
    *,
    names: Iterable[str] | None = None,
    inputs: Any = None,
    x_too: bool = False,
) -> QuantizedReport:
    """Replace every `KSLinear` of a model by one with weights in eight bits or bfloat16, for inference, in place.

    If anything is wrong, the model stays unchanged.

    Args:
        model: Module whose layers are replaced. A single layer has its own method, `KSLinear.quantize`.
        storage: "int8", "e4m3", "e5m2", or "bfloat16" for x of float32.
        per: Unit with a scale of its own: "factor", "i" (a diagonal block) or "output". bfloat16 has no scales.
        names: Names of layers, or shell patterns of names. None: all.
        inputs: Arguments of a call of the model for calibration: a tensor, or a list of arguments. Each layer's scales
            then fit the first 4096 rows of the x that it receives first.
        x_too: True also quantizes the x of each layer to eight bits, before its first factor. `inputs` calibrate the
            scale.

    Returns:
        A `QuantizedReport`. `print` shows a table with bytes and errors.

    Raises:
        SpecError: No layer fits, or an option is not accepted.
        LaunchError: A layer cannot be quantized.

    Examples:
        >>> from torch import nn
        >>> from ksgen.torch import KSLinear, quantize
        >>> model = nn.Sequential(KSLinear("2,4,4,1"), nn.ReLU())
        >>> quantize(model, "int8")
        QuantizedReport(1 layer in int8, 128 bytes before and 64 after)
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={excerpt(model)}; accepted: a torch.nn.Module")
    if (keys := ("*",) if names is None else listed(names)) is None or isinstance(names, str):
        raise SpecError(f"names={excerpt(names)}; accepted: a list of layers' names, or of patterns of names")
    every = {name: layer for name, layer in model.named_modules() if isinstance(layer, KSLinear)}
    unquantized = {name: layer for name, layer in every.items() if not layer.has_stored_type}
    found = {name: layer for name, layer in unquantized.items() if any(fnmatchcase(name, str(key)) for key in keys)}
    if every and not unquantized:
        raise SpecError("every KSLinear of the model is quantized already; accepted: the model before it was quantized")
    missing = [key for key in keys if not any(fnmatchcase(name, str(key)) for name in every)]
    if missing or not found:
        raise SpecError(
            f"names={excerpt(missing or names)} name no KSLinear of the model; its layers: {excerpt(list(unquantized))}"
        )
    if "" in found:
        raise SpecError("the model is a single layer, which cannot be replaced in place; use KSLinear.quantize")
    if x_too and inputs is None:
        raise SpecError(
            "x_too=True without inputs; accepted: typical inputs of the model, which determine the scales of x"
        )
    if inputs is not None and is_word(storage, STORED) and not STORED[storage].is_scaled:
        raise SpecError(
            f"inputs were given with storage={storage}, which has no scales; accepted: a model without inputs"
        )
    received = {} if inputs is None else _received(model, found, inputs)
    new: dict[str, QuantizedKSLinear] = {}
    for name, layer in found.items():
        try:
            new[name] = layer.quantize(storage, per, x=received.get(name), x_too=x_too)
        except LaunchError as error:
            raise LaunchError(f"layer {name}: {error}") from error
    layers = tuple(_layer_report(name, layer, new[name], received.get(name)) for name, layer in found.items())
    put_all(model, {layer: new[name] for name, layer in found.items()})
    write_stored(model, found, storage)
    return QuantizedReport(storage, per, bool(received), layers)


def _received(model: nn.Module, layers: Mapping[str, KSLinear], inputs: Any) -> dict[str, Tensor]:
    """First input x of each layer in one call of the model, as rows for calibration."""
    received: dict[str, Tensor] = {}

    def keep(name: str, layer: KSLinear, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        received.setdefault(name, layer._calibration_rows(given[0] if given else named["x"]).clone())

    handles = [layer.register_forward_pre_hook(partial(keep, name), with_kwargs=True) for name, layer in layers.items()]
    were_training = [(each, each.training) for each in model.modules()]  # submodules may differ from the model
    try:
        with torch.no_grad():
            model.eval()(*(inputs if isinstance(inputs, list | tuple) else (inputs,)))
    finally:
        for each, was_training in were_training:
            each.training = was_training
        for handle in handles:
            handle.remove()
    if missing := sorted(set(layers) - set(received)):
        raise SpecError(
            f"inputs do not reach {', '.join(missing)}; accepted: inputs that reach every layer, or names of the "
            "layers that they reach"
        )
    return received


def _layer_report(name: str, before: KSLinear, after: QuantizedKSLinear, x: Tensor | None) -> QuantizedLayer:
    sizes = sum(each.numel() * each.element_size() for each in before.weights), after.weight_bytes
    with torch.no_grad():
        exact = _compared(x, [each.float() for each in before.weights], before)
        quantized = _compared(after.first_input(x), after.dequantized(), before)
        error = float((quantized - exact).norm() / exact.norm().clamp_min(torch.finfo(torch.float32).tiny))
    return QuantizedLayer(name, before.chain, sizes, error, sum(after.saturated))


def _compared(x: Tensor | None, weights: Sequence[Tensor], like: KSLinear) -> Tensor:
    """Values for the error of a report: the output for x, or without x the matrix K.

    A layer with an activation `between` has no K. Without x, its values are all weights.
    """
    if x is None and like.between != "none":
        return torch.cat([each.flatten() for each in weights])
    options: dict[str, Any] = {"layout": like.layout, "between": like.between, "backend": "strided"}
    layer = KSLinear.from_weights(weights, patterns=like.chain, **options)
    return layer.to_dense() if x is None else layer(x.float())
