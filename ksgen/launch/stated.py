"""Options that a launcher states for its calls, like a spec: defaults of options, and required operands."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ksgen.errors import LaunchError
from ksgen.launch.arrays import CallOptions
from ksgen.launch.weights import Weights
from ksgen.pattern import Chain
from ksgen.spec import Activation, ByteStorage, Epilogue, KernelSpec, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import LayerOptions, StatedOptions
from ksgen.spec.storage import SAME, Same

ADDED = ("bias", "residual")


def checked(chain: Chain, stated: StatedOptions) -> StatedOptions:
    """Validate stated options; `SpecError` on unknown words, or on words that do not fit together."""
    precision = "float32" if stated.precision is None else stated.precision
    KernelSpec(chain[-1], precision, stated.layout, stated.epilogue, weights=stated.weights, inputs=stated.inputs)
    return stated


def options_of_call(
    stated: StatedOptions, layout: Layout | None, activation: Activation | None, stream: Any, precision: PrecisionName | None
) -> CallOptions:  # fmt: skip
    """Options of a call: its own if it names them, else the stated ones."""
    return CallOptions(
        stated.layout if layout is None else layout,
        stated.activation if activation is None else activation,
        stream,
        stated.precision if precision is None else precision,
    )


class Explained(NamedTuple):
    """Arguments of `explain`, with the stated option for each None."""

    precision: PrecisionName
    layout: Layout
    epilogue: Epilogue
    weights: WeightStorage | Same
    inputs: ByteStorage | Same


def explained(stated: StatedOptions, *asked: Any) -> Explained:
    """Fill in stated options.

    `asked` holds precision, layout, epilogue, weights and inputs, each possibly None.
    """
    known = Explained(stated.precision or "float32", stated.layout, stated.epilogue, stated.weights, stated.inputs)
    return known._replace(**{name: each for name, each in zip(Explained._fields, asked, strict=True) if each is not None})


def operand(caller: object, name: str, given: Any, is_stated: bool, one: str = "an array") -> Any:
    """The array that a call adds, or None.

    `LaunchError` if it is stated and missing: a call without it passes False.
    """
    if given is None and is_stated:
        raise LaunchError(f"{caller!r}: {name} is missing, which is stated; accepted: {name}={one}, or {name}=False to leave it out")
    return None if given is False else given


def check_storage(caller: object, stated: StatedOptions, own: Sequence[Any]) -> None:
    """Raise `LaunchError` on weights, one array per factor, whose storage differs from the stated one.

    Only the first ones multiply X.
    """
    if stated.weights == SAME:
        return
    for number, each in enumerate(own, 1):
        inputs = stated.inputs if number == 1 else SAME
        found = (each.stored, each.inputs) if isinstance(each, Weights) else (SAME, SAME)
        if found != (stated.weights, inputs):
            which = "weights" if len(own) == 1 else f"weights of factor {number}"
            remedy = f"what ksgen.quantize(weights, {stated.weights!r}{'' if inputs == SAME else ', x_scale=...'}) gives"
            stored_as = " and ".join(f"{name}={value}" for name, value in zip(("weights", "inputs"), found, strict=True))
            raise LaunchError(f"{caller!r}: {which} are stored as {stored_as}; accepted, as is stated: {remedy}")


def docstring(chains: Sequence[Chain], stated: StatedOptions, of_layer: LayerOptions | None = None) -> str:
    """Docstring of a launcher: operands of its calls, and their options."""
    weights = "; ".join(", ".join(str(pattern.shape) for pattern in chain) for chain in chains)
    stored = "" if stated.weights == SAME else f", stored in {stated.weights} as ksgen.quantize gives them"
    operands = [f"x{'' if stated.inputs == SAME else f' in {stated.inputs}'}", f"weights {weights}{stored}"]
    operands += [f"{name} (or {name}=False)" for name in ADDED if getattr(stated, name)]
    layer = {} if of_layer is None else dict(of_layer.non_defaults)
    words = {"layout": stated.layout, "activation": stated.activation, "precision": stated.precision or "that of the arrays"}
    words |= {name: layer.pop(name) for name in ("out_layout",) if name in layer}
    features = f"{chains[0].in_features} to {', '.join(str(each.out_features) for each in chains)} features"
    lines = [
        f"Multiply x by {'; '.join(map(str, chains))}, {features}.",
        "",
        f"A call takes {', '.join(operands)}.",
        f"Unless it names others, its options are: {_listed(words)}.",
    ]
    return "\n".join(lines + ([f"The layer has {_listed(layer)}."] if layer else []))


def _listed(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())
