"""Text of `KSLinear.explain`: backends of the factors, their measured times, and the traffic of a split."""

from typing import Any

from ksgen.errors import LaunchError
from ksgen.launch.explain import LaunchOptions
from ksgen.launch.fused import Verdict
from ksgen.quantized import describe_scales
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import layout_word
from ksgen.torch.layer.splits import explain as explain_splits
from ksgen.torch.operators.backends import describe_intermediates, explain
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.choice import describe_times, has_kernels, is_one_launch, launcher_of, versus_dense
from ksgen.torch.operators.prepared import BACKENDS, launcher_of_layers, shapes_of


def explained(layer: Any, batch: int, processes: int) -> str:
    """Explain how a layer multiplies: one line per factor on this process, and lines about the whole layer."""
    if layer.has_stored_type:
        if processes > 1:
            raise LaunchError(
                f"{layer._name()}: processes={processes}; accepted for weights in {layer.storage}: 1, because no "
                "style splits them"
            )
        return _explained_stored(layer, batch)
    chain, lines, split, first, has_bias = layer.own_chain, [], layer.split, layer.weights[0], layer.bias is not None
    last = Epilogue() if split is not None and split.is_finished_later else Epilogue(has_bias, layer.activation)
    precision = layer.precision or dtype_name(first.dtype)
    for number, (pattern, weights) in enumerate(zip(chain, layer.weights, strict=True), start=1):
        epilogue = last if number == len(chain) else Epilogue(activation=layer.between)
        layout = layer.layout if number <= chain.transposing_factor else layer.y_layout
        kernel = KernelSpec(pattern, layer.precision or dtype_name(weights.dtype), layout, epilogue)
        lines.append(f"{pattern}: {explain(layer.backend, kernel, batch, weights.device)}")
    patterns = shapes_of(layer)
    is_stated = first.device.type == "cuda" or layer.fuse != "auto"  # on processors, times of "auto" follow below
    if (len(chain) > 1 or layer.out_layout) and is_stated and layer.backend in BACKENDS:
        verdict = Verdict(layer.fuse == "yes", f"fuse={layer.fuse!r}")
        if first.device.type == "cuda":
            form = launcher_of_layers([layer]), first.device, precision, layer.layout, last, batch
            verdict = is_one_launch(*form, out_layout=layer.out_layout)
            lines = [*versus_dense(*form, verdict.is_one, out_layout=layer.out_layout), *lines]
        lines.insert(0, f"{'one launch' if verdict.is_one else 'one launch per factor'}: {verdict.why}")
    if layer.backend in BACKENDS and layer.precision is None:
        layout = layout_word(layer.layout, layer.out_layout)
        lines += describe_times(patterns, first.dtype, layout, last.activation, last.bias, batch, layer.between)
    if layer.intermediates != "keep":
        activations = (layer.between, last.activation)
        lines.append(describe_intermediates(layer.intermediates, chain, activations, batch, first.element_size()))
    if split is not None:
        lines.insert(0, split.explain(batch, first.element_size(), has_bias))
    elif processes > 1:
        lines += explain_splits(layer, processes, batch)
    return "\n".join(lines)


def _explained_stored(layer: Any, batch: int) -> str:
    """Explain a layer with stored weights, for x of the bias's dtype, or of float32 without a bias."""
    device = layer.values[0].device
    precision: Any = "float32" if layer.bias is None else dtype_name(layer.bias.dtype)
    last = Epilogue(layer.bias is not None, layer.activation)
    # `apart` describes the launch of each factor; it is empty if one launch runs several factors
    lines, apart = list[str](), [""] * (len(layer.chain) == 1)
    if has_kernels(device) and len(layer.chain) > 1:
        form = LaunchOptions(precision, layer.layout, last, layer.storage, layer._inputs)
        first, *apart = launcher_of_layers([layer])._explained(batch, form)
        lines.append(first)
    scales = describe_scales(layer.storage, layer.per)
    for number, (each, count) in enumerate(zip(layer.chain, layer.saturated, strict=True), 1):
        stored = f"{each}: {layer.storage} weights with {scales}, {count} of {each.weight_count} saturated"
        if number == 1 and layer._x_scale is not None:
            stored += (
                f"; x in {layer.storage} times {layer._x_scale:.6g}, {layer.saturated_inputs} of its elements "
                "saturated so far"
            )
        if not has_kernels(device):
            stored += f"; PyTorch multiplies by the dequantized weights, because ksgen has no kernels on {device}"
        elif apart:
            epilogue = last if number == len(layer.chain) else Epilogue(activation=layer.between)
            options: dict[str, Any] = {"layout": layer.layout, "epilogue": epilogue, "weights": layer.storage}
            options |= {"inputs": layer._inputs} if number == 1 else {}
            stored += f"; {launcher_of(each).explain(batch, precision=precision, **options)}"
        lines.append(stored)
    return "\n".join(lines)
