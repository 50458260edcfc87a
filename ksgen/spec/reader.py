"""Reads kernels and layers from the nodes of a YAML text. Never opens a file."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from ksgen.errors import SpecError
from ksgen.pattern import NAMED_CHAINS, Chain, Pattern
from ksgen.spec.forms import (
    About,
    Batch,
    ChainForm,
    Flag,
    Form,
    Group,
    Keys,
    KeysOrValue,
    ListOf,
    Named,
    OneOrMore,
    PatternForm,
    Schema,
    SpecEntry,
    Sum,
    Word,
    blaming,
    chain_of,
)
from ksgen.spec.kernel import (
    ACTIVATIONS,
    FUSES,
    LAYOUTS,
    STRIDES,
    TIES,
    Epilogue,
    KernelSpec,
    LayerOptions,
    StatedOptions,
    activations_of,
    is_layer,
    sum_steps,
)
from ksgen.spec.nodes import SourcePlace, read_nodes
from ksgen.spec.paper import paper_patterns
from ksgen.spec.precision import PRECISIONS, gradient_of
from ksgen.spec.spec import Spec, parts_of
from ksgen.spec.storage import INPUTS, SAME, WEIGHTS
from ksgen.structures import ONE_CHAIN, SUMS, Structure, of_chain
from ksgen.values import counted

MOST_KERNELS = 100_000
TIED = {each or "none": each for each in TIES}  # ties by their words
RESIDUAL_FIRST = "residual_first: true, because each chain adds the sum of the earlier ones as its residual"

_PATTERN_SETS = {"paper": paper_patterns}


@dataclass(frozen=True)
class KernelOptions:
    """Lists of options' values. Each combination of values is one kernel."""

    precision: tuple[str, ...] = ("float32",)
    layout: tuple[str, ...] = ("bsf",)
    batch: tuple[int | None, ...] = (None,)
    bias: tuple[bool, ...] = (False,)
    activation: tuple[str, ...] = ("none",)
    residual: tuple[bool, ...] = (False,)
    residual_first: tuple[bool, ...] = (False,)
    gradients: tuple[bool, ...] = (False,)
    stride: tuple[str, ...] = ("dense",)
    weights: tuple[str, ...] = (SAME,)
    inputs: tuple[str, ...] = (SAME,)
    tie: str = ""  # axes along which the weights of the pattern are equal
    batch_place: SourcePlace | None = None  # place of the batch sizes in the text, if there are any
    names_precision: bool = False  # whether the text names a precision; if not, the dtype of arrays decides

    def kernels(self, pattern: Pattern) -> Iterator[KernelSpec]:
        if idle := [axis for axis in self.tie if getattr(pattern, axis) == 1]:
            rest = self.tie.strip("".join(idle)) or "none"
            raise SpecError(f"tied={self.tie} of {pattern}, whose {' and '.join(idle)} is 1; accepted: tied={rest}")
        axes = (
            self.precision, self._stored, self.layout, self.batch, self.bias, self.activation, self.residual,
            self.residual_first, self.stride,
        )  # fmt: skip
        every: Any = product(*axes)
        for precision, (weights, inputs), layout, batch, *steps, stride in every:
            more: dict[str, Any] = {"stride": stride, "weights": weights, "inputs": inputs, "tied": (self.tie,)}
            yield KernelSpec(pattern, precision, layout, Epilogue(*steps), batch, **more)

    @property
    def _stored(self) -> list[tuple[str, str]]:
        """Combinations of the storage of weights and of X: X is stored like Y, or in eight bits like the weights."""
        pairs = [(weights, inputs) for weights in self.weights for inputs in self.inputs if inputs in (SAME, weights)]
        for number, name, other in ((1, "inputs", "weights"), (0, "weights", "inputs")):
            used = [pair[number] for pair in pairs]
            if lone := [each for each in getattr(self, name) if each not in used]:
                given = f"{name}={lone[0]} with {other}={', '.join(getattr(self, other))}"
                raise SpecError(f"{given}; accepted: inputs=same, or the weights' storage")
        return pairs

    def backward(self, pattern: Pattern) -> Iterator[KernelSpec]:
        """Yield kernels that only training needs: the weights' gradient, and the transposed product for that of X.

        Layers train in the precision of `gradient_of`, and `Launcher.gradient` multiplies in the one that it is given.
        """
        if True in self.gradients:
            if quantized := [each for each in self.weights if each != SAME]:
                raise SpecError(
                    f"gradients=true with weights={quantized[0]}; accepted: weights: same, since others are not trained"
                )
            if self.tie:
                raise SpecError(
                    f"gradients=true with tied={self.tie}; accepted: tied: none, since all weights get gradients"
                )
            for precision, layout, batch in product(self.precision, self.layout, self.batch):
                trained = gradient_of(precision)
                for each in dict.fromkeys((precision, trained)):
                    yield KernelSpec(pattern, each, layout, batch=batch, job="gradient")
                yield KernelSpec(pattern.transpose, trained, layout, batch=batch)

    def without_epilogue(self) -> "KernelOptions":
        return replace(self, bias=(False,), activation=("none",), residual=(False,), residual_first=(False,))

    def transposed(self) -> "KernelOptions":
        """Options of the transposed products of `backward`."""
        return replace(self.without_epilogue(), precision=tuple(map(gradient_of, self.precision)))


@dataclass(frozen=True)
class SpecRequest:
    """One pattern that an entry of the text requests, with its options."""

    place: SourcePlace
    pattern: Pattern
    options: KernelOptions
    is_listed: bool = False  # whether it is under `kernels`, where a kernel may be listed only once


@dataclass(frozen=True)
class _Layer:
    """An entry of `layers`."""

    place: SourcePlace
    chains: tuple[Chain, ...]
    kind: str  # a key of `_LAYERS`
    options: KernelOptions  # options of its kernels
    layer_options: LayerOptions
    tied: tuple[str, ...] = ()  # ties of the factors of a chain, if any
    structures: tuple[Structure, ...] = ()  # one per chain

    def options_of(self, number: int) -> KernelOptions:
        """Options of the kernels of a factor."""
        return replace(self.options, tie=self.tied[number]) if self.tied else self.options


def read_spec(text: str, file: str, name: str) -> Spec:
    """Read a spec from the text of a file. It has the given name, and every kernel once, in the order of the text."""
    sections = _SPEC.read(read_nodes(text, file))
    defaults = (
        _options(sections.values["defaults"], KernelOptions()) if "defaults" in sections.values else KernelOptions()
    )
    named = {title: _layer(title, entry, defaults) for title, entry in sections.values.get("layers", {}).items()}
    layers = {part: layer for title, each in named.items() for part, layer in _parts(title, each).items()}
    requests: list[SpecRequest] = []
    for section, value in sections.values.items():
        if section == "kernels":
            requests += [_kernel(entry, defaults) for entry in value]
        elif section == "layers":
            requests += [each for layer in layers.values() for chain in layer.chains for each in _factors(layer, chain)]
        elif section == "patterns":
            requests += [SpecRequest(sections.places[section], pattern, defaults) for pattern in _PATTERN_SETS[value]()]
    kernels, places = _collect(requests)
    launches = {title: _launches(each) for title, each in layers.items()}
    for title, each in layers.items():
        for fused in launches[title]:
            places.setdefault(fused, each.options.batch_place)
    chains = {kind: {title: each.chains for title, each in named.items() if each.kind == kind} for kind in _LAYERS}
    every = named | layers
    return Spec(
        name,
        kernels,
        {title: chain for title, (chain,) in chains["chain"].items()},
        chains["group"],
        {title: each.layer_options for title, each in every.items()},
        launches,
        {title: tuple(each.options_of(-1).kernels(each.chains[0][-1])) for title, each in layers.items()},
        {**{title: _stated([each.options]) for title, each in every.items()}, **_stated_of_patterns(requests)},
        {kernel: place for kernel, place in places.items() if place and kernel.batch},
        chains["sum"],
        ties={title: each.tied for title, each in named.items() if each.tied},
        structures={title: each.structures for title, each in named.items()},
    )


def _collect(requests: list[SpecRequest]) -> tuple[tuple[KernelSpec, ...], dict[KernelSpec, SourcePlace | None]]:
    """All kernels, each once, and the place of each one's batch size in the text."""
    kernels: dict[KernelSpec, SourcePlace | None] = {}
    listed: dict[KernelSpec, SourcePlace] = {}
    for count, (request, kernel) in enumerate(_multiply_out(requests)):
        if count == MOST_KERNELS:
            raise request.place.error(
                f"its lists of values ask for too many kernels; accepted: {MOST_KERNELS} in one spec"
            )
        if request.is_listed and (before := listed.setdefault(kernel, request.place)) is not request.place:
            raise request.place.error(f"asks for {kernel.name} again, after line {before.line}; accepted: once")
        kernels.setdefault(kernel, request.options.batch_place)
    return tuple(kernels), kernels


def _multiply_out(requests: list[SpecRequest]) -> Iterator[tuple[SpecRequest, KernelSpec]]:
    for request in requests:
        with blaming(request.place):
            for kernel in request.options.kernels(request.pattern):
                yield request, kernel
            for kernel in request.options.backward(request.pattern):
                yield replace(request, is_listed=False), kernel


def _kernel(entry: SpecEntry, defaults: KernelOptions) -> SpecRequest:
    options = replace(_options(entry, defaults), tie=TIED[entry.values.get("tied", "none")])
    return SpecRequest(entry.place, entry.values["pattern"], options, is_listed=True)


def _layer(name: str, entry: SpecEntry, defaults: KernelOptions) -> _Layer:
    """A chain, or a group or a sum of chains on one x, with its options."""
    values, places = entry.values, entry.places
    kind = next(each for each in _LAYERS if each in values)
    chains = tuple(replace(chain_of(given), name=name) for given in values[kind])
    structures = tuple(given if isinstance(given, Structure) else of_chain(given) for given in values[kind])
    kind = "sum" if kind == "chain" and len(chains) > 1 else kind
    layer_options = LayerOptions(**{key: values[key] for key in _LAYER_OPTIONS if key in values})
    if layer_options.between != "none" and all(len(chain) == 1 for chain in chains):
        raise places["between"].error(f"got {layer_options.between} with one factor; accepted: none")
    if layer_options.out_layout and kind != "chain":
        asked = layer_options.out_layout
        raise places["out_layout"].error(f"got {asked} for a {kind}; accepted: out_layout for a chain")
    ties = values.get("tied", ())
    if ties and (kind != "chain" or len(ties) != len(chains[0])):
        given = f"a {kind}" if kind != "chain" else counted(len(chains[0]), "factor")
        accepted = f"one of {', '.join(TIED)} per factor of a chain"
        raise places["tied"].error(f"got {', '.join(ties)} of {given}; accepted: {accepted}")
    options = _options(entry, defaults)
    is_last = kind == "sum" and True in options.residual and options.residual_first != (True,)
    if is_last and (activations := [each for each in options.activation if each != "none"]):
        place = places.get("residual", places.get("activation", entry.place))
        raise place.error(f"got a residual after activation {activations[0]} of a sum; accepted: {RESIDUAL_FIRST}")
    if lone := [each for each in options.precision if layer_options.between not in activations_of(each)]:
        raise places["between"].error(f"got {layer_options.between} of complex numbers, {lone[0]}; accepted: none")
    tied = tuple(TIED[each] for each in ties)
    return _Layer(entry.place, chains, kind, options, layer_options, tied, structures)


def _parts(name: str, layer: _Layer) -> dict[str, _Layer]:
    """Layers of an entry: the layer or group itself, or one layer per chain of a sum."""
    if layer.kind != "sum":
        return {name: layer}
    found = dict[str, _Layer]()
    for (part, chain), steps in zip(parts_of(name, layer.chains), sum_steps(len(layer.chains)), strict=True):
        values: Any = {step: (value,) for step, value in steps.items()}
        options = replace(layer.options, **values)
        between = layer.layer_options.between if len(chain) > 1 else "none"
        own = replace(layer.layer_options, between=between)
        found[part] = _Layer(layer.place, (chain,), "chain", options, own)
    return found


def _factors(layer: _Layer, chain: Chain) -> Iterator[SpecRequest]:
    """Requests for the factors of a chain. Only the last factor has the layer's epilogue.

    The first factor keeps the storage of X and the stride, because it reads X. The last factor keeps the stride,
    because it writes Y.
    """
    *before, last = chain
    place, out_layout = layer.place, layer.layer_options.out_layout
    transposing = chain.transposing_factor  # computed once, because it reads all factors
    for number, pattern in enumerate(before):
        factor_options = layer.options_of(number).without_epilogue()
        if number:  # X is an intermediate
            factor_options = replace(factor_options, stride=("dense",), inputs=(SAME,))
        layout = (out_layout,) if out_layout and number >= transposing else factor_options.layout
        yield SpecRequest(
            place, pattern, replace(factor_options, activation=(layer.layer_options.between,), layout=layout)
        )
    factor_options = layer.options_of(-1)
    factor_options = replace(factor_options, inputs=(SAME,)) if before else factor_options
    yield SpecRequest(place, last, replace(factor_options, layout=(out_layout,)) if out_layout else factor_options)


def _launches(layer: _Layer) -> tuple[KernelSpec, ...]:
    """Kernels for the whole layer in one launch, with the options of its last factor.

    Empty if `fuse` is "no", or if the layer is one factor that keeps the layout.
    """
    chains, given = layer.chains, layer.layer_options
    if given.fuse == "no":
        return ()
    with blaming(layer.place):
        return tuple(
            replace(last, chains=chains, between=given.between, out_layout=given.out_layout, tied=layer.tied)
            for last in layer.options.kernels(chains[0][-1])
            if is_layer(chains, last.layout, given.out_layout)
        )


def _stated_of_patterns(requests: list[SpecRequest]) -> dict[str | Pattern, StatedOptions]:
    """Options that all entries of a pattern state. A pattern that only gradients use has no epilogue."""
    asked: dict[Pattern, list[KernelOptions]] = {}
    backward: dict[Pattern, list[KernelOptions]] = {}
    for request in requests:
        asked.setdefault(request.pattern, []).append(request.options)
        if True in request.options.gradients:
            backward.setdefault(request.pattern.transpose, []).append(request.options.transposed())
    return {pattern: _stated(options) for pattern, options in (backward | asked).items()}


def _stated(entries: list[KernelOptions]) -> StatedOptions:
    """Options with one value that all entries share. If there are several values, a call chooses."""
    found = {
        each.name: {value for entry in entries for value in getattr(entry, each.name)} for each in fields(StatedOptions)
    }
    if not all(entry.names_precision for entry in entries):
        del found["precision"]
    return StatedOptions(**{name: values.pop() for name, values in found.items() if len(values) == 1})


def _options(entry: SpecEntry, defaults: KernelOptions) -> KernelOptions:
    given = {key: value for key, value in entry.values.items() if key in _OPTIONS}
    if "batch" in given:
        given["batch_place"] = entry.places["batch"]
    if "precision" in given:
        given["names_precision"] = True
    return replace(defaults, **given)


def schema() -> Schema:
    """The JSON schema of specs, from the forms that the reader uses."""
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "A spec of ksgen", **_SPEC.schema}


_CHAIN = ChainForm({"family": NAMED_CHAINS, "structure": ONE_CHAIN})
_SUMMANDS = ChainForm({"family": NAMED_CHAINS, "structure": ONE_CHAIN | SUMS})
_OPTIONS: dict[str, Form] = {
    "precision": About("How values are stored and multiplied.", OneOrMore(Word(PRECISIONS))),
    "layout": About("bsf: x is (batch, features); bsl: (features, batch).", OneOrMore(Word(LAYOUTS))),
    "batch": About("any, or a batch size for which the kernel is specialised.", OneOrMore(Batch())),
    "bias": About("Whether a bias is added to the product.", OneOrMore(Flag())),
    "activation": About("Activation after the bias.", OneOrMore(Word(ACTIVATIONS))),
    "residual": About("Whether a residual is added after the activation.", OneOrMore(Flag())),
    "residual_first": About("Whether the residual is added before the activation instead.", OneOrMore(Flag())),
    "gradients": About("Whether kernels for training are included: gradients of weights and of x.", OneOrMore(Flag())),
    "stride": About("dense, or any: x, y and residual may be slices of larger arrays.", OneOrMore(Word(STRIDES))),
    "weights": About("Storage of weights: the type of y, eight bits, or bfloat16.", OneOrMore(Word(WEIGHTS))),
    "inputs": About("Storage of x: the type of y, or the eight bits of the weights.", OneOrMore(Word(INPUTS))),
}
_LAYER_OPTIONS: dict[str, Form] = {  # options of a layer as a whole
    "between": About("Activation after each factor but the last.", Word(ACTIVATIONS)),
    "out_layout": About("Layout of y, if it differs from that of x.", Word(LAYOUTS)),
    "fuse": About("Whether the factors are one launch. auto: if that is faster; yes: always; no: never.", Word(FUSES)),
}
_LAYERS: dict[str, Form] = {
    "chain": About("Patterns in the order in which they multiply x, or a named family or structure.", _SUMMANDS),
    "group": About("Chains that take the same x.", Group(_CHAIN, "a list of chains")),
    "sum": About("Chains that take the same x, whose outputs are added.", Sum(_SUMMANDS, "a list of chains", SUMS)),
}
_WHAT_IS_TIED = "Axes along which weights are equal: none, a, d or ad. A layer has a list of these, one per factor."
_TIE = About(_WHAT_IS_TIED, Word(TIED))
_TIE_OF_EACH = About(_WHAT_IS_TIED, ListOf(Word(TIED), f"a list with one of {', '.join(TIED)} per factor"))
_KERNEL = KeysOrValue({"pattern": Keys({"pattern": PatternForm(), **_OPTIONS, "tied": _TIE}, required=("pattern",))})
_LAYER = KeysOrValue(
    {
        what: Keys({what: form, **_LAYER_OPTIONS, **_OPTIONS, "tied": _TIE_OF_EACH}, required=(what,))
        for what, form in _LAYERS.items()
    }
)
_SPEC = Keys(
    {
        "defaults": About("Options of all entries. A list of values asks for one kernel per value.", Keys(_OPTIONS)),
        "kernels": About("Patterns a,b,c,d, alone or with options.", ListOf(_KERNEL, "a list of patterns")),
        "layers": About("Chains by name, alone or with options.", Named(_LAYER, "a mapping of layer names to chains")),
        "patterns": About("A named set of patterns, with the defaults.", Word(_PATTERN_SETS)),
    },
    one_of=("kernels", "layers", "patterns"),
)
