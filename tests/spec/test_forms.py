"""The JSON schema of specs: it accepts what the reader accepts, and refuses what one value or key alone makes wrong."""

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from ksgen import spec
from ksgen.errors import SpecError
from ksgen.pattern import NAMED_CHAINS
from ksgen.spec import parse, schema
from ksgen.spec import reader as reading
from ksgen.spec.nodes import Items, Node, Scalar, read_nodes
from ksgen.spec.precision import PRECISIONS
from tests.spec.test_reader import WRONG, WRONG_OPTIONS

ROOT = Path(__file__).parents[2]
BEYOND = (  # messages on specs that no schema refuses: they are no YAML, or several values contradict each other
    "YAML",
    "nested more than",
    "again, after line",
    "as a key",
    "is too large",
    "features, but the next pattern (",
    "and the first chain",
    "with one factor",
    "of complex numbers",
    "out_layout: got bsl for a",
    "of a sum; accepted: residual_first",
    "features=12; accepted: a power of two",
    "accepted: a divisor of ",
    "per factor of a chain",
    "with tied=d",
    "with weights=int8",
    "is 1; accepted: tied",
)


def as_json(node: Node) -> Any:
    """A node as editors read it, by YAML 1.2: plain scalars may be numbers, true, false and null."""
    if isinstance(node, Items):
        return [as_json(item) for item in node.items]
    if not isinstance(node, Scalar):
        return {key: as_json(value) for key, value in node.pairs.items()}
    if node.is_plain and node.text in ("true", "false", "null", ""):
        return json.loads(node.text or "null")
    if not node.is_plain or not node.text.lstrip("-").isdecimal():
        return node.text
    return int(node.text) if len(node.text) < 400 else float(node.text)  # editors read 1e400 and more as infinity


def is_accepted(text: str) -> bool:
    return Draft202012Validator(schema()).is_valid(as_json(read_nodes(text, "spec.yaml")))


def test_it_is_a_json_schema() -> None:
    Draft202012Validator.check_schema(schema())
    assert json.loads(json.dumps(schema())) == schema()


@pytest.mark.parametrize("path", sorted((ROOT / "specs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_spec_that_ksgen_ships_is_accepted(path: Path) -> None:
    assert is_accepted(path.read_text(encoding="utf-8"))


def test_the_spec_of_the_docstring_which_has_every_key_is_accepted() -> None:
    text = textwrap.dedent(f"    defaults:{spec.__doc__.split('    defaults:')[1].split('A list of values')[0]}")
    assert parse(text).kernels
    assert is_accepted(text)


@pytest.mark.parametrize(("text", "message"), WRONG, ids=range(len(WRONG)))
def test_a_spec_that_one_value_makes_wrong_is_refused(text: str, message: str) -> None:
    try:
        refused = not is_accepted(text)
    except SpecError:  # it cannot be read as YAML
        refused = False
    assert refused != any(reason in message for reason in BEYOND)


@pytest.mark.parametrize("option", [option for option, _ in WRONG_OPTIONS])
def test_a_wrong_option_is_refused(option: str) -> None:
    assert not is_accepted(f"kernels:\n- pattern: 1,2,3,4\n  {option}")
    assert not is_accepted(f"kernels: ['1,2,3,4']\ndefaults:\n  {option}")
    assert not is_accepted(f"layers:\n  up:\n    chain: [[1,2,3,4]]\n    {option}")


def test_it_lists_the_words_that_the_reader_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "kernels: [{pattern: [1,2,3,4], precision: mine}]"
    assert not is_accepted(text)
    monkeypatch.setitem(PRECISIONS, "mine", PRECISIONS["float32"])
    assert is_accepted(text)
    monkeypatch.setitem(NAMED_CHAINS, "mine", NAMED_CHAINS["dense"])
    assert not is_accepted("layers: {up: {family: mine, in_features: 4, out_features: 8}}")  # not under `chain`
    assert is_accepted("layers: {up: {chain: {family: mine, in_features: 4, out_features: 8}}}")


def test_arguments_of_structures_may_be_left_out_or_be_one_number_or_two() -> None:
    text = "layers: {up: {chain: {structure: gs, in_features: 8, out_features: 8, blocks: 2}}}"
    assert is_accepted(text)
    assert is_accepted(text.replace("2", "[2, 4], inner: 8, orthogonal: false"))
    assert not is_accepted(text.replace("2", "2, orthogonal: 1"))


def test_every_option_has_a_description_for_editors() -> None:
    properties = schema()["properties"]
    assert all(each["description"] for each in properties.values())
    assert all(each["description"] for each in properties["defaults"]["properties"].values())
    assert set(properties["defaults"]["properties"]) <= {each.name for each in reading.fields(reading.KernelOptions)}
