"""Parses YAML text into nodes that know their place, so that every error names file, line and key. Never interprets
keys.

Scalars stay text: neither `1,192,48,2` nor `no` is converted. YAML features that specs do not need are refused: anchors
and aliases (a few lines can expand to gigabytes), tags, further documents, and deep nesting.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

import yaml

from ksgen.errors import SpecError
from ksgen.spec.kernel import hint
from ksgen.values import excerpt

MOST_CHARACTERS = 2**20
MOST_EVENTS = 2**15  # events of the parser, which takes up to 40 us per event; a list or a mapping takes two
MOST_DEPTH = 8
ROOT = "spec"  # the key that messages name for nodes outside of all keys

_PLAIN_KEY = re.compile(r"\w{1,60}", re.ASCII)


@dataclass(frozen=True)
class SourcePlace:
    """Position of a node: file, line, and the key path from the root, such as `layers.up.chain[1]`."""

    file: str
    line: int
    key: str = ROOT

    def error(self, problem: str) -> SpecError:
        return SpecError(f"{self.file}:{self.line}: {self.key}: {problem}")

    def of_key(self, key: str, line: int) -> "SourcePlace":
        shown = key if _PLAIN_KEY.fullmatch(key) else excerpt(key)
        return SourcePlace(self.file, line, shown if self.key == ROOT else f"{self.key}.{shown}")


@dataclass(frozen=True)
class Scalar:
    place: SourcePlace
    text: str
    is_plain: bool  # not quoted

    def __str__(self) -> str:
        return excerpt(self.text) if self.text or not self.is_plain else "nothing"


@dataclass(frozen=True)
class Items:
    place: SourcePlace
    items: tuple["Node", ...]

    def __str__(self) -> str:
        return "a list" if self.items else "an empty list"


@dataclass(frozen=True)
class Pairs:
    place: SourcePlace  # place of the mapping; a value's place is that of its key
    pairs: Mapping[str, "Node"]

    def __str__(self) -> str:
        return "a mapping" if self.pairs else "an empty mapping"

    def check_keys(self, accepted: Collection[str], required: Collection[str] = ()) -> None:
        for key, node in self.pairs.items():
            if key not in accepted:
                place = replace(self.place, line=node.place.line)
                raise place.error(f"unknown key {excerpt(key)}; {hint(key, accepted)}")
        if missing := [key for key in required if key not in self.pairs]:
            raise self.place.error(f"needs {' and '.join(missing)}; accepted: {', '.join(accepted)}")


Node = Scalar | Items | Pairs


def read_nodes(text: str, file: str) -> Node:
    """Parse YAML text and return its root node; an empty text is an empty scalar."""
    start = SourcePlace(file, 1)
    if len(text) > MOST_CHARACTERS:
        raise start.error(f"{len(text)} characters; accepted: at most {MOST_CHARACTERS}")
    events = _events(text, file)
    next(events)  # the stream's start
    if isinstance(next(events), yaml.StreamEndEvent):
        return Scalar(start, "", is_plain=True)
    first = next(events)
    root = _node(first, events, SourcePlace(file, _line(first)), depth=1)
    next(events)  # the document's end
    if not isinstance(after := next(events), yaml.StreamEndEvent):
        raise SourcePlace(file, _line(after)).error("another YAML document starts; accepted: one")
    return root


def _events(text: str, file: str) -> Iterator[yaml.Event]:
    for count, event in enumerate(_parsed(text, file)):
        if count == MOST_EVENTS:
            place = SourcePlace(file, _line(event))
            raise place.error(
                f"more than {MOST_EVENTS} YAML values; accepted: fewer; a list of values replaces many entries"
            )
        yield event


def _parsed(text: str, file: str) -> Iterator[yaml.Event]:
    try:
        yield from yaml.parse(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SourcePlace(file, line, "YAML").error(f"{error.problem}; accepted: well-formed YAML") from error
    except yaml.reader.ReaderError as error:
        place = SourcePlace(file, text.count("\n", 0, error.position) + 1, "YAML")
        raise place.error(f"character {text[error.position]!a}; accepted: printable ones") from error
    except (ValueError, OverflowError) as error:  # an escape such as "\UFFFFFFFF", or a directive with endless digits
        raise SourcePlace(file, 1, "YAML").error("an escape or a directive out of range; accepted: Unicode") from error


def _node(event: yaml.Event, events: Iterator[yaml.Event], place: SourcePlace, depth: int) -> Node:
    if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
        raise place.error("YAML anchors and aliases are not read; accepted: shared options under defaults")
    if (tag := getattr(event, "tag", None)) is not None:
        raise place.error(f"the YAML tag {excerpt(tag)}; accepted: values without a tag")
    if depth > MOST_DEPTH:
        raise place.error(f"nested more than {MOST_DEPTH} deep; accepted: the keys of a spec")
    if isinstance(event, yaml.ScalarEvent):
        return Scalar(place, event.value, is_plain=event.style is None)
    if isinstance(event, yaml.SequenceStartEvent):
        items: list[Node] = []
        while not isinstance(event := next(events), yaml.SequenceEndEvent):
            of_item = SourcePlace(place.file, _line(event), f"{place.key}[{len(items)}]")
            items.append(_node(event, events, of_item, depth + 1))
        return Items(place, tuple(items))
    pairs: dict[str, Node] = {}
    while not isinstance(event := next(events), yaml.MappingEndEvent):
        key = _key(_node(event, events, SourcePlace(place.file, _line(event), place.key), depth + 1), pairs)
        pairs[key] = _node(next(events), events, place.of_key(key, _line(event)), depth + 1)
    return Pairs(place, pairs)


def _key(node: Node, before: Mapping[str, Node]) -> str:
    if not isinstance(node, Scalar):
        raise node.place.error(f"{node} as a key; accepted: a word")
    if node.text.isdecimal():  # YAML reads {pattern: 6,64,64,1} with the keys 64, 64 and 1
        raise node.place.error(
            f"the number {node} as a key; accepted: a word, and patterns inside braces as [a,b,c,d] or in quotes"
        )
    if node.text in before:
        raise node.place.error(f"key {node} again, after line {before[node.text].place.line}; accepted: each key once")
    return node.text


def _line(event: yaml.Event) -> int:
    return event.start_mark.line + 1 if event.start_mark else 1
