"""Forms: the kinds of values that a spec accepts. Each form reads YAML nodes, and has a JSON schema.

Reading and schema use the same data, such as the accepted words, so that they cannot disagree. Never derives kernels.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import Parameter, getdoc, signature
from types import NoneType, UnionType
from typing import Any, ClassVar, Literal, Protocol, get_args, get_origin

from ksgen.errors import PatternError, SpecError
from ksgen.pattern import MOST_FEATURES, WRITTEN, Chain, Pattern
from ksgen.spec.kernel import MOST_BYTES, hint
from ksgen.spec.nodes import Items, Node, Pairs, Scalar, SourcePlace
from ksgen.structures import Structure

Schema = dict[str, Any]

_WHOLE_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)", re.ASCII)
_COUNT: Schema = {"type": "integer", "minimum": 1, "maximum": MOST_FEATURES}


class Form(Protocol):
    """Values of one kind: `read` returns the value of a node or raises `SpecError`, and `schema` describes them."""

    @property
    def schema(self) -> Schema: ...

    def read(self, node: Node) -> Any: ...


@dataclass(frozen=True)
class Word:
    """One of the accepted words."""

    accepted: Collection[str]

    @property
    def schema(self) -> Schema:
        return {"enum": list(self.accepted)}

    def read(self, node: Node) -> str:
        if not isinstance(node, Scalar) or node.text not in self.accepted:
            raise node.place.error(f"got {node}; {hint(node.text if isinstance(node, Scalar) else '', self.accepted)}")
        return node.text


@dataclass(frozen=True)
class Flag:
    """`true` or `false`, without quotes."""

    schema: ClassVar[Schema] = {"type": "boolean"}

    def read(self, node: Node) -> bool:
        if not isinstance(node, Scalar) or not node.is_plain or node.text not in ("true", "false"):
            raise node.place.error(f"got {node}; accepted: true, false")
        return node.text == "true"


@dataclass(frozen=True)
class Batch:
    """Batch size: a whole number from 1 up, or `any`, which is read as None."""

    schema: ClassVar[Schema] = {"anyOf": [{"const": "any"}, {"type": "integer", "minimum": 1, "maximum": MOST_BYTES}]}

    def read(self, node: Node) -> int | None:
        if isinstance(node, Scalar) and node.text == "any":
            return None
        if (batch := _number(node, "any, or a whole number from 1 up")) < 1:
            raise node.place.error(f"got {batch}; accepted: any, or a whole number from 1 up")
        return batch


@dataclass(frozen=True)
class OneOrMore:
    """One value, or a list of distinct values. Both are read as a tuple."""

    each: Form

    @property
    def schema(self) -> Schema:
        one = self.each.schema
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "uniqueItems": True}]}

    def read(self, node: Node) -> tuple[Any, ...]:
        if not isinstance(node, Items):
            return (self.each.read(node),)
        values: dict[Any, None] = {}
        for item in items_of(node, "a value, or a list of them"):
            if (value := self.each.read(item)) in values:
                raise item.place.error(f"lists {item} again; accepted: each value once")
            values[value] = None
        return tuple(values)


@dataclass(frozen=True)
class PatternForm:
    """Pattern, written as `a,b,c,d` or as a list of the four numbers."""

    schema: ClassVar[Schema] = {
        "anyOf": [
            {"type": "string", "pattern": f"^(?:{WRITTEN.pattern})$"},
            {"type": "array", "items": _COUNT, "minItems": 4, "maxItems": 4},
        ]
    }

    def read(self, node: Node) -> Pattern:
        if isinstance(node, Scalar):
            if node.text.isdecimal():
                accepted = "within a list, [a,b,c,d] or a,b,c,d in quotes"
                raise node.place.error(f"{node} is not a pattern; accepted: {accepted}")
            with blaming(node.place):
                return Pattern.parse(node.text)
        if isinstance(node, Pairs) or len(node.items) != 4:
            raise node.place.error(f"got {node}; accepted: a pattern a,b,c,d or [a,b,c,d]")
        if "@" in (written := ",".join(item.text for item in node.items if isinstance(item, Scalar))):
            raise node.place.error(f'got {node}; accepted: a pattern with an order in quotes, "{written}"')
        numbers = [_number(item, "a whole number") for item in node.items]
        with blaming(node.place):
            return Pattern.read(numbers)


@dataclass(frozen=True)
class ListOf:
    """List of one or more values."""

    each: Form
    what: str  # description of the list in messages

    @property
    def schema(self) -> Schema:
        return {"type": "array", "items": self.each.schema, "minItems": 1}

    def read(self, node: Node) -> tuple[Any, ...]:
        return tuple(self.each.read(item) for item in items_of(node, self.what))


@dataclass(frozen=True)
class ChainForm:
    """Chain: a list of patterns, or a mapping with the name of a function and its arguments.

    The function returns a chain, a structure, or the structures of a sum. `functions` has the accepted functions by
    name, for each key of the mapping that may hold the name, such as "structure". `read` returns a tuple: one chain or
    structure, or those of a sum.
    """

    functions: Mapping[str, Mapping[str, Callable[..., Any]]]
    patterns: Form = ListOf(PatternForm(), "a list of patterns, or a mapping with a family or a structure")

    @property
    def schema(self) -> Schema:
        pairs = ((key, name, each) for key, named in self.functions.items() for name, each in named.items())
        return {"anyOf": [self.patterns.schema, *(_schema_of_function(*each) for each in pairs)]}

    def read(self, node: Node) -> tuple[Chain | Structure, ...]:
        if not isinstance(node, Pairs):
            patterns = self.patterns.read(node)
            with blaming(node.place):
                return (Chain(patterns),)
        if (key := next((each for each in self.functions if each in node.pairs), None)) is None:
            named = "; ".join(f"{each}: {', '.join(names)}" for each, names in self.functions.items())
            raise node.place.error(f"needs {' or '.join(self.functions)}; accepted: {named}")
        function = self.functions[key][Word(self.functions[key]).read(node.pairs[key])]
        parameters = signature(function).parameters
        node.check_keys((key, *parameters), required=_needed(parameters))
        given = {name: each.annotation for name, each in parameters.items() if name in node.pairs}
        values = {name: _argument_of(annotation, node.pairs[name]) for name, annotation in given.items()}
        with blaming(node.place):
            made = function(**values)
        return made if isinstance(made, tuple) else (made,)


def chain_of(given: Chain | Structure) -> Chain:
    """Chain of a structure, or the chain itself."""
    return given.chain if isinstance(given, Structure) else given


@dataclass(frozen=True)
class Group(ListOf):
    """Chains that take the same x."""

    def read(self, node: Node) -> tuple[Chain | Structure, ...]:
        return tuple(given for _, given in self.each_chain(node))

    def each_chain(self, node: Node) -> list[tuple[Node, Chain | Structure]]:
        """Chains or structures of the list, each with the item that gave it. An item may give several."""
        chains = [(item, given) for item in items_of(node, self.what) for given in self.each.read(item)]
        _check_equal(chains, "in_features", "takes", "chains that take the same x")
        return chains


@dataclass(frozen=True)
class Sum(Group):
    """Two chains or more that take the same x and give the same number of features.

    An item may name a structure in `sums`, which makes several chains.
    """

    sums: Collection[str] = ()

    @property
    def schema(self) -> Schema:
        is_sum = {"type": "object", "properties": {"structure": {"enum": list(self.sums)}}, "required": ["structure"]}
        return super().schema | {"anyOf": [{"minItems": 2}, {"contains": is_sum}]}

    def each_chain(self, node: Node) -> list[tuple[Node, Chain | Structure]]:
        chains = super().each_chain(node)
        if len(chains) == 1:
            raise node.place.error(f"got one chain, {chain_of(chains[0][1])}; accepted: two or more")
        _check_equal(chains, "out_features", "gives", "chains of equal out_features")
        return chains


def _check_equal(chains: Sequence[tuple[Node, Chain | Structure]], features: str, verb: str, accepted: str) -> None:
    """Raise `SpecError` unless all chains have as many of these features as the first one."""
    first, *others = (getattr(chain_of(given), features) for _, given in chains)
    for (item, _), count in zip(chains[1:], others, strict=True):
        if count != first:
            raise item.place.error(f"{verb} {count} features, and the first chain {first}; accepted: {accepted}")


@dataclass(frozen=True)
class SpecEntry:
    """Values of a mapping, the place of each in the file, and the place of the mapping."""

    place: SourcePlace
    values: Mapping[str, Any]
    places: Mapping[str, SourcePlace]


@dataclass(frozen=True)
class Keys:
    """Mapping with keys of `forms`: all of `required`, and at least one of `one_of`."""

    forms: Mapping[str, Form]
    required: Collection[str] = ()
    one_of: Collection[str] = ()

    @property
    def schema(self) -> Schema:
        found: Schema = {"type": "object", "properties": {key: form.schema for key, form in self.forms.items()}}
        found |= {"required": list(self.required)} if self.required else {"minProperties": 1}
        found |= {"anyOf": [{"required": [key]} for key in self.one_of]} if self.one_of else {}
        return found | {"additionalProperties": False}

    def read(self, node: Node) -> SpecEntry:
        if not isinstance(node, Pairs) or not (node.pairs or self.required):
            raise node.place.error(f"got {node}; accepted: a mapping with {', '.join(self.forms)}")
        node.check_keys(self.forms, self.required)
        values = {key: self.forms[key].read(value) for key, value in node.pairs.items()}
        if self.one_of and not values.keys() & set(self.one_of):
            raise node.place.error(f"asks for no kernel; accepted: {', '.join(self.one_of)}")
        return SpecEntry(node.place, values, {key: value.place for key, value in node.pairs.items()})


@dataclass(frozen=True)
class KeysOrValue:
    """One of several kinds of mappings, each identified by its required key.

    In place of the first kind, the value of its required key alone is accepted, too.
    """

    kinds: Mapping[str, Keys]

    @property
    def schema(self) -> Schema:
        key, first = next(iter(self.kinds.items()))
        alone = {"not": {"type": "object"}, **first.forms[key].schema}
        return {"anyOf": [alone, *(kind.schema for kind in self.kinds.values())]}

    def read(self, node: Node) -> SpecEntry:
        usual = next(iter(self.kinds))
        if not isinstance(node, Pairs):
            return SpecEntry(node.place, {usual: self.kinds[usual].forms[usual].read(node)}, {})
        return self.kinds[next((key for key in self.kinds if key in node.pairs and key != usual), usual)].read(node)


@dataclass(frozen=True)
class Named:
    """Mapping from names that users choose to values of one form."""

    each: Form
    what: str  # description of the mapping in messages
    is_name: ClassVar = re.compile(r"[A-Za-z][A-Za-z0-9_]*", re.ASCII)

    @property
    def schema(self) -> Schema:
        names = {"pattern": f"^{self.is_name.pattern}$"}
        return {"type": "object", "propertyNames": names, "additionalProperties": self.each.schema, "minProperties": 1}

    def read(self, node: Node) -> dict[str, Any]:
        if not isinstance(node, Pairs) or not node.pairs:
            raise node.place.error(f"got {node}; accepted: {self.what}")
        for name, value in node.pairs.items():
            if not self.is_name.fullmatch(name):
                raise value.place.error("is not a layer name; accepted: letters, digits and _, a letter first")
        return {name: self.each.read(value) for name, value in node.pairs.items()}


@dataclass(frozen=True)
class About:
    """A form with a description in its schema, which editors show."""

    text: str
    form: Form

    @property
    def schema(self) -> Schema:
        return {"description": self.text, **self.form.schema}

    def read(self, node: Node) -> Any:
        return self.form.read(node)


def items_of(node: Node, accepted: str) -> tuple[Node, ...]:
    """Items of a list that is not empty. Raises `SpecError` for any other node."""
    if not isinstance(node, Items) or not node.items:
        raise node.place.error(f"got {node}; accepted: {accepted}")
    return node.items


@contextmanager
def blaming(place: SourcePlace) -> Iterator[None]:
    """Add the place to errors about an invalid pattern, chain or kernel that the `with` block raises."""
    try:
        yield
    except (PatternError, SpecError) as error:
        raise place.error(str(error)) from error


def _number(node: Node, accepted: str) -> int:
    if not isinstance(node, Scalar) or not node.is_plain or not _WHOLE_NUMBER.fullmatch(node.text):
        raise node.place.error(f"got {node}; accepted: {accepted}")
    if len(node.text) > 20 or int(node.text) > MOST_BYTES:  # Python refuses to convert thousands of digits
        raise node.place.error(f"got {node}; accepted: {accepted}, and below 2^63")
    return int(node.text)


def _numbers(node: Node) -> Any:
    """A whole number, or lists of whole numbers, nested to any depth."""
    return [_numbers(item) for item in node.items] if isinstance(node, Items) else _number(node, "a whole number")


def _argument_of(annotation: Any, node: Node) -> Any:
    """Read an argument of a function, by its annotation: true or false, a word, or whole numbers."""
    if annotation is bool:
        return Flag().read(node)
    return Word(get_args(annotation)).read(node) if get_origin(annotation) is Literal else _numbers(node)


def _needed(parameters: Mapping[str, Parameter]) -> tuple[str, ...]:
    """Names of the parameters without a default."""
    return tuple([name for name, each in parameters.items() if each.default is Parameter.empty])


def _schema_of_function(key: str, name: str, function: Callable[..., Any]) -> Schema:
    parameters = signature(function).parameters
    properties = {key: {"const": name}, **{each: _schema_of(of.annotation) for each, of in parameters.items()}}
    about = {"description": text.partition("\n\nArgs:")[0]} if (text := getdoc(function)) else {}
    required = [key, *_needed(parameters)]
    return about | {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _schema_of(annotation: Any) -> Schema:
    """Schema of a function's argument, by its annotation.

    An argument is a whole number, true or false, a word, or a list of whole numbers, which may be nested. A union is
    described by the schemas of its members.
    """
    if annotation in (int, bool):
        return _COUNT if annotation is int else {"type": "boolean"}
    if get_origin(annotation) is Literal:
        return Word(get_args(annotation)).schema
    if isinstance(annotation, UnionType):
        return {"anyOf": [_schema_of(each) for each in get_args(annotation) if each is not NoneType]}
    return {"type": "array", "items": _schema_of(get_args(annotation)[0]), "minItems": 1}
