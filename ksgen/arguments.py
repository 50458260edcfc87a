"""Whether the arrays of a call fit its pattern and each other: everything is refused here, before anything is launched."""

import sys
from collections.abc import Mapping

from ksgen.arrays import ArrayView
from ksgen.errors import LaunchError
from ksgen.memory import size_of
from ksgen.pattern import Pattern
from ksgen.spec import ACTIVATIONS, LAYOUTS

Views = Mapping[str, ArrayView]


def y_shape(pattern: Pattern, layout: str, batch: int) -> tuple[int, int]:
    return (batch, pattern.out_features) if layout == "bsf" else (pattern.out_features, batch)


def check_words(caller: object, layout: str, activation: str) -> None:
    if layout not in LAYOUTS:
        raise LaunchError(f"{caller!r}: layout {layout!r} is unknown; accepted: {', '.join(LAYOUTS)}")
    if activation not in ACTIVATIONS:
        raise LaunchError(f"{caller!r}: activation {activation!r} is unknown; accepted: {', '.join(ACTIVATIONS)}")


def check_arrays(caller: object, pattern: Pattern, layout: str, views: Views) -> int:
    """Raise `LaunchError` on the first array that does not fit; the batch. `views` holds x, and any of weights, bias,
    residual and out."""
    x = views["x"]
    batch_axis, feature_axis = (0, 1) if layout == "bsf" else (1, 0)
    if len(x.shape) != 2 or x.shape[feature_axis] != pattern.in_features or x.shape[batch_axis] < 1:
        wanted = f"(batch, {pattern.in_features})" if layout == "bsf" else f"({pattern.in_features}, batch)"
        raise LaunchError(f"{caller!r}: got x of shape {tuple(x.shape)}; layout {layout} wants {wanted}, with a batch of at least 1")
    batch = int(x.shape[batch_axis])
    y = y_shape(pattern, layout, batch)
    shapes = {"x": tuple(x.shape), "weights": pattern.shape, "bias": (pattern.out_features,), "residual": y, "out": y}
    for name, given in views.items():
        if tuple(given.shape) != shapes[name]:
            raise LaunchError(f"{caller!r}: got {name} of shape {tuple(given.shape)}; {shapes[name]} is needed")
        if given.dtype != x.dtype:
            raise LaunchError(f"{caller!r}: got {given.dtype} for {name} and {x.dtype} for x; give both in one precision")
        if not given.contiguous:
            raise LaunchError(f"{caller!r}: {name} is not row-major without gaps; give a contiguous copy of it")
    _check_gradients(caller, views)
    if "out" in views:
        _check_out(caller, views)
    return batch


def check_weights(caller: object, pattern: Pattern, weights: ArrayView) -> None:
    if tuple(weights.shape) != pattern.shape:
        raise LaunchError(f"{caller!r}: got weights of shape {tuple(weights.shape)}; {pattern.shape} is needed")
    if not weights.contiguous:
        raise LaunchError(f"{caller!r}: weights is not row-major without gaps; give a contiguous copy of it")


def _check_gradients(caller: object, views: Views) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, given in views.items():
        if given.kind == "torch" and given.owner.requires_grad:
            raise LaunchError(f"{caller!r}: {name} requires gradients, which launchers do not record; call under torch.no_grad()")


def _check_out(caller: object, views: Views) -> None:
    """`out` may be the residual itself; any other overlap would be read after it was written."""
    out = views["out"]
    if not out.writeable:
        raise LaunchError(f"{caller!r}: out is read-only; give an array that can be written to")
    for name, given in views.items():
        if name == "out" or (name == "residual" and given.pointer == out.pointer):
            continue
        if _overlap(given, out):
            raise LaunchError(f"{caller!r}: out shares memory with {name}; give memory of its own")


def _overlap(one: ArrayView, other: ArrayView) -> bool:
    if not isinstance(one.pointer, int) or not isinstance(other.pointer, int):
        return bool(one.pointer == other.pointer)
    return one.pointer < other.pointer + size_of(other) and other.pointer < one.pointer + size_of(one)
