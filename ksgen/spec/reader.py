"""A YAML text's nodes -> kernels and layers. Never opens a file."""

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from inspect import signature
from itertools import product
from typing import Any

from ksgen.errors import PatternError, SpecError
from ksgen.pattern import NAMED_CHAINS, Chain, Pattern
from ksgen.spec.kernel import (
    ACTIVATIONS,
    FUSES,
    LAYOUTS,
    STRIDES,
    Epilogue,
    KernelSpec,
    LayerOptions,
    StatedOptions,
    activations_of,
    hint,
    is_layer,
)
from ksgen.spec.nodes import Items, Node, Pairs, Place, Scalar, read_nodes
from ksgen.spec.paper import paper_patterns
from ksgen.spec.precision import PRECISIONS
from ksgen.spec.spec import Spec
from ksgen.spec.storage import INPUTS, SAME, WEIGHTS

MOST_KERNELS = 100_000

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]{0,18})", re.ASCII)
_LAYER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)
_SECTIONS = ("defaults", "kernels", "layers", "patterns")
_PATTERN_SETS = {"paper": paper_patterns}


@dataclass(frozen=True)
class Options:
    """Options of an entry; there is one kernel per combination of their values."""

    precision: tuple[str, ...] = ("float32",)
    layout: tuple[str, ...] = ("bsf",)
    batch: tuple[int | None, ...] = (None,)
    bias: tuple[bool, ...] = (False,)
    activation: tuple[str, ...] = ("none",)
    residual: tuple[bool, ...] = (False,)
    gradients: tuple[bool, ...] = (False,)
    stride: tuple[str, ...] = ("dense",)
    weights: tuple[str, ...] = (SAME,)
    inputs: tuple[str, ...] = (SAME,)
    batch_place: Place | None = None  # where the batches stand, if anywhere
    names_precision: bool = False  # in the text: without, arrays decide

    def kernels(self, pattern: Pattern) -> Iterator[KernelSpec]:
        axes = (self.precision, self._stored, self.layout, self.batch, self.bias, self.activation, self.residual, self.stride)
        for precision, (weights, inputs), layout, batch, bias, activation, residual, stride in product(*axes):
            epilogue = Epilogue(bias, activation, residual)
            yield KernelSpec(pattern, precision, layout, epilogue, batch, stride=stride, weights=weights, inputs=inputs)

    def values(self, name: str) -> tuple[Any, ...]:
        """Values of one option."""
        if name in ("weights", "inputs"):
            return tuple(zip(*self._stored, strict=True))[name == "inputs"]
        found: tuple[Any, ...] = getattr(self, name)
        return found

    @property
    def _stored(self) -> list[tuple[str, str]]:
        """Pairs of storages for weights and X. X in eight bits is stored as its weights are."""
        if lone := [each for each in self.inputs if each not in (SAME, *self.weights)]:
            raise SpecError(f"inputs={lone[0]} with weights={', '.join(self.weights)}; accepted: inputs as weights are stored, or same")
        return [(weights, inputs) for weights in self.weights for inputs in self.inputs if inputs in (SAME, weights)]

    def backward(self, pattern: Pattern) -> Iterator[KernelSpec]:
        """Kernels that training adds: the weights' gradient, and the transposed pattern for X's gradient."""
        if True in self.gradients:
            if quantized := [each for each in self.weights if each != SAME]:
                raise SpecError(f"gradients=true with weights={quantized[0]}; accepted: weights: same, which alone are trained")
            for precision, layout, batch in product(self.precision, self.layout, self.batch):
                yield KernelSpec(pattern, precision, layout, batch=batch, job="gradient")
                yield KernelSpec(pattern.transpose, precision, layout, batch=batch)

    def without_epilogue(self) -> "Options":
        return replace(self, bias=(False,), activation=("none",), residual=(False,))

    def between_factors(self) -> "Options":
        """Options for factors that read or write an intermediate: dense, with X not in eight bits."""
        return replace(self.without_epilogue(), stride=("dense",), inputs=(SAME,))


@dataclass(frozen=True)
class Request:
    """One kernel entry of a spec: a pattern with options."""

    place: Place
    pattern: Pattern
    options: Options
    is_listed: bool = False  # under `kernels`, where nothing may be asked for twice


@dataclass(frozen=True)
class _Layer:
    """An entry of `layers`."""

    place: Place
    chains: tuple[Chain, ...]
    is_group: bool
    options: Options  # of its kernels
    layer: LayerOptions


def read_spec(text: str, file: str, name: str) -> Spec:
    """Build the spec of that name from YAML text: every kernel once, in the order of the text."""
    root = read_nodes(text, file)
    sections = _pairs(root, f"a mapping with {', '.join(_SECTIONS)}")
    sections.check_keys(_SECTIONS)
    defaults = Options()
    if "defaults" in sections.pairs:
        options = _pairs(sections.pairs["defaults"], f"a mapping with {', '.join(_OPTIONS)}")
        options.check_keys(_OPTIONS)
        defaults = _options(options, defaults)
    layers: dict[str, _Layer] = {}
    requests: list[Request] = []
    for section, node in sections.pairs.items():
        if section == "kernels":
            requests += [_kernel(entry, defaults) for entry in _items(node, "a list of patterns")]
        elif section == "layers":
            for title, entry in _pairs(node, "a mapping of layer names to chains").pairs.items():
                layers[title] = own = _layer(title, entry, defaults)
                requests += [each for chain in own.chains for each in _factors(own.place, chain, own.options, own.layer)]
        elif section == "patterns":
            patterns = _PATTERN_SETS[_word(node, _PATTERN_SETS)]()
            requests += [Request(node.place, pattern, defaults) for pattern in patterns]
    if not requests:
        raise root.place.error("asks for no kernel; accepted: kernels, layers or patterns")
    kernels, places = _collect(requests)
    launches = {title: _launches(each) for title, each in layers.items()}
    for title, each in layers.items():
        for whole in launches[title]:
            places.setdefault(whole, each.options.batch_place)
    return Spec(
        name,
        kernels,
        {title: each.chains[0] for title, each in layers.items() if not each.is_group},
        {title: each.chains for title, each in layers.items() if each.is_group},
        {title: each.layer for title, each in layers.items()},
        launches,
        {title: tuple(each.options.kernels(each.chains[0][-1])) for title, each in layers.items()},
        {**{title: _stated([each.options]) for title, each in layers.items()}, **_stated_of_patterns(requests)},
        {kernel: place for kernel, place in places.items() if place and kernel.batch},
    )


def _collect(requests: list[Request]) -> tuple[tuple[KernelSpec, ...], dict[KernelSpec, Place | None]]:
    """Map every distinct kernel to the place of its batch."""
    kernels: dict[KernelSpec, Place | None] = {}
    listed: dict[KernelSpec, Place] = {}
    for count, (request, kernel) in enumerate(_multiply_out(requests)):
        if count == MOST_KERNELS:
            raise request.place.error(f"multiplies out to too many kernels; accepted: {MOST_KERNELS} in one spec")
        if request.is_listed and (before := listed.setdefault(kernel, request.place)) is not request.place:
            raise request.place.error(f"asks for {kernel.name} again, after line {before.line}; accepted: once")
        kernels.setdefault(kernel, request.options.batch_place)
    return tuple(kernels), kernels


def _multiply_out(requests: list[Request]) -> Iterator[tuple[Request, KernelSpec]]:
    for request in requests:
        with _blaming(request.place):
            for kernel in request.options.kernels(request.pattern):
                yield request, kernel
            for kernel in request.options.backward(request.pattern):
                yield replace(request, is_listed=False), kernel


def _kernel(node: Node, defaults: Options) -> Request:
    """An entry of `kernels`: a pattern, or a mapping with a pattern and options."""
    if not isinstance(node, Pairs):
        return Request(node.place, _pattern(node), defaults, is_listed=True)
    node.check_keys(("pattern", *_OPTIONS), required=("pattern",))
    return Request(node.place, _pattern(node.pairs["pattern"]), _options(node, defaults), is_listed=True)


def _layer(name: str, node: Node, defaults: Options) -> _Layer:
    """An entry of `layers`: a chain, or a mapping with a chain, or with a group of chains on one x, and options."""
    if not _LAYER_NAME.fullmatch(name):
        raise node.place.error("is no layer name; accepted: letters, digits and _, a letter first")
    if not isinstance(node, Pairs):
        return _Layer(node.place, (_chain(name, node),), False, defaults, LayerOptions())
    what = "group" if "group" in node.pairs else "chain"
    node.check_keys((what, *_LAYER_OPTIONS, *_OPTIONS), required=(what,))
    chains = _group(name, node.pairs[what]) if what == "group" else (_chain(name, node.pairs[what]),)
    options = LayerOptions(**{key: read(node.pairs[key]) for key, read in _LAYER_OPTIONS.items() if key in node.pairs})
    if options.between != "none" and all(len(chain) == 1 for chain in chains):
        raise node.pairs["between"].place.error(f"got {options.between} where there is one factor; accepted: none")
    if options.out_layout and what == "group":
        raise node.pairs["out_layout"].place.error(f"got {options.out_layout} of a group; accepted: of a chain")
    own = _options(node, defaults)
    if lone := [each for each in own.precision if options.between not in activations_of(each)]:
        raise node.pairs["between"].place.error(f"got {options.between} of complex numbers, {lone[0]}; accepted: none")
    return _Layer(node.place, chains, what == "group", own, options)


def _group(name: str, node: Node) -> tuple[Chain, ...]:
    """Chains that take the same x."""
    items = _items(node, "a list of chains")
    chains = tuple(_chain(name, item) for item in items)
    for item, chain in zip(items, chains, strict=True):
        if chain.in_features != chains[0].in_features:
            taken = f"takes {chain.in_features} features, and the first chain {chains[0].in_features}"
            raise item.place.error(f"{taken}; accepted: chains that take the same x")
    return chains


def _factors(place: Place, chain: Chain, options: Options, of_layer: LayerOptions) -> Iterator[Request]:
    """Requests of a chain's factors. Only the last factor has the epilogue; the first reads and the last writes
    slices."""
    *before, last = chain
    turn = chain.turn  # looks at all factors
    for number, pattern in enumerate(before):
        own = options.between_factors() if number else options.without_epilogue()
        turned = of_layer.out_layout if number >= turn else None
        yield Request(place, pattern, replace(own, activation=(of_layer.between,), layout=(turned,) if turned else own.layout))
    own = replace(options, inputs=(SAME,)) if before else options
    yield Request(place, last, replace(own, layout=(of_layer.out_layout,)) if of_layer.out_layout else own)


def _launches(layer: _Layer) -> tuple[KernelSpec, ...]:
    """Kernels of all factors in one launch, with the last factor's options. Empty for `fuse: no` or a single factor."""
    found: list[KernelSpec] = []
    chains, of_layer = layer.chains, layer.layer
    with _blaming(layer.place):
        for last in layer.options.kernels(chains[0][-1]) if of_layer.fuse != "no" else ():
            if is_layer(chains, last.layout, of_layer.out_layout):
                own: dict[str, Any] = {"between": of_layer.between, "out_layout": of_layer.out_layout}
                own |= {"weights": last.weights, "inputs": last.inputs}
                whole = KernelSpec(tuple(chains), last.precision, last.layout, last.epilogue, stride=last.stride, **own)
                found.append(replace(whole, batch=last.batch))
    return tuple(found)


def _stated_of_patterns(requests: list[Request]) -> dict[str | Pattern, StatedOptions]:
    """Options that all entries with a pattern agree on. A pattern used only for gradients has no epilogue."""
    asked: dict[Pattern, list[Options]] = {}
    backward: dict[Pattern, list[Options]] = {}
    for request in requests:
        asked.setdefault(request.pattern, []).append(request.options)
        if True in request.options.gradients:
            backward.setdefault(request.pattern.transpose, []).append(request.options.without_epilogue())
    return {pattern: _stated(options) for pattern, options in (backward | asked).items()}


def _stated(entries: list[Options]) -> StatedOptions:
    """Options for which all entries have the same single value; otherwise the call chooses."""
    found = {each.name: {value for entry in entries for value in entry.values(each.name)} for each in fields(StatedOptions)}
    if not all(entry.names_precision for entry in entries):
        del found["precision"]
    return StatedOptions(**{name: values.pop() for name, values in found.items() if len(values) == 1})


def _chain(name: str, node: Node) -> Chain:
    """A list of patterns, or a named family with its arguments."""
    if not isinstance(node, Pairs):
        patterns = tuple(_pattern(item) for item in _items(node, "a list of patterns, or a mapping with a family"))
        with _blaming(node.place):
            return Chain(patterns, name)
    if "family" not in node.pairs:
        raise node.place.error(f"needs family; accepted: {', '.join(NAMED_CHAINS)}")
    family = NAMED_CHAINS[_word(node.pairs["family"], NAMED_CHAINS)]
    arguments = tuple(signature(family).parameters)
    node.check_keys(("family", *arguments), required=arguments)
    values = {argument: _numbers(node.pairs[argument]) for argument in arguments}
    with _blaming(node.place):
        return replace(family(**values), name=name)


def _pattern(node: Node) -> Pattern:
    """`a,b,c,d`, or a list of the four."""
    if isinstance(node, Pairs) or (isinstance(node, Items) and len(node.items) != 4):
        raise node.place.error(f"got {node}; accepted: a pattern a,b,c,d or [a,b,c,d]")
    if isinstance(node, Items):
        numbers = [_number(item, "a whole number") for item in node.items]
    with _blaming(node.place):
        return Pattern.parse(node.text) if isinstance(node, Scalar) else Pattern(*numbers)


def _options(node: Pairs, defaults: Options) -> Options:
    given: dict[str, Any] = {key: _one_or_more(node.pairs[key], read) for key, read in _OPTIONS.items() if key in node.pairs}
    if "batch" in given:
        given["batch_place"] = node.pairs["batch"].place
    if "precision" in given:
        given["names_precision"] = True
    return replace(defaults, **given)


def _one_or_more(node: Node, read: Callable[[Node], Any]) -> tuple[Any, ...]:
    if not isinstance(node, Items):
        return (read(node),)
    values: dict[Any, None] = {}
    for item in _items(node, "a value, or a list of them"):
        if (value := read(item)) in values:
            raise item.place.error(f"lists {item} again; accepted: each value once")
        values[value] = None
    return tuple(values)


def _word(node: Node, accepted: Collection[str]) -> str:
    if not isinstance(node, Scalar) or node.text not in accepted:
        raise node.place.error(f"got {node}; {hint(node.text if isinstance(node, Scalar) else '', accepted)}")
    return node.text


def _flag(node: Node) -> bool:
    if not isinstance(node, Scalar) or not node.is_plain or node.text not in ("true", "false"):
        raise node.place.error(f"got {node}; accepted: true, false")
    return node.text == "true"


def _batch(node: Node) -> int | None:
    if isinstance(node, Scalar) and node.text == "any":
        return None
    if (batch := _number(node, "any, or a whole number from 1 up")) < 1:
        raise node.place.error(f"got {batch}; accepted: any, or a whole number from 1 up")
    return batch


def _numbers(node: Node) -> Any:
    """A whole number, or a list of such, as deep as it goes."""
    return [_numbers(item) for item in node.items] if isinstance(node, Items) else _number(node, "a whole number")


def _number(node: Node, accepted: str) -> int:
    if not isinstance(node, Scalar) or not node.is_plain or not _WHOLE_NUMBER.fullmatch(node.text):
        raise node.place.error(f"got {node}; accepted: {accepted}")
    return int(node.text)


def _items(node: Node, accepted: str) -> tuple[Node, ...]:
    if not isinstance(node, Items) or not node.items:
        raise node.place.error(f"got {node}; accepted: {accepted}")
    return node.items


def _pairs(node: Node, accepted: str) -> Pairs:
    if not isinstance(node, Pairs) or not node.pairs:
        raise node.place.error(f"got {node}; accepted: {accepted}")
    return node


@contextmanager
def _blaming(place: Place) -> Iterator[None]:
    """Report errors of a pattern, chain or kernel with its place in the text."""
    try:
        yield
    except (PatternError, SpecError) as error:
        raise place.error(str(error)) from error


_OPTIONS: dict[str, Callable[[Node], Any]] = {
    "precision": partial(_word, accepted=PRECISIONS),
    "layout": partial(_word, accepted=LAYOUTS),
    "batch": _batch,
    "bias": _flag,
    "activation": partial(_word, accepted=ACTIVATIONS),
    "residual": _flag,
    "gradients": _flag,
    "stride": partial(_word, accepted=STRIDES),
    "weights": partial(_word, accepted=WEIGHTS),
    "inputs": partial(_word, accepted=INPUTS),
}
_LAYER_OPTIONS: dict[str, Callable[[Node], str]] = {  # of a layer as a whole
    "between": partial(_word, accepted=ACTIVATIONS),
    "out_layout": partial(_word, accepted=LAYOUTS),
    "fuse": partial(_word, accepted=FUSES),
}
