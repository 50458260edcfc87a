"""Any text is nodes that know their place, or one line that says what is wrong and where."""

import re
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ksgen.errors import SpecError
from ksgen.spec import parse
from ksgen.spec.nodes import MOST_EVENTS, read_nodes


def test_a_text_without_end_is_refused() -> None:
    with pytest.raises(SpecError, match=r"1: spec: 2097152 characters; accepted: at most 1048576"):
        parse("- " * 2**20)


def parse_or_one_line(text: str) -> None:
    message = ""
    try:
        parse(text, "my.yaml")
    except SpecError as error:
        message = str(error)
    assert re.fullmatch(r"(my\.yaml:[0-9]+: [^\n]{1,400})?", message)


@settings(max_examples=300)
@given(st.text(max_size=60) | st.text(alphabet=" \n\t-:,[]{}&*!|>'\"%@`#?~\\x0U1kernels", max_size=60))
def test_any_text_is_a_spec_or_a_spec_error(text: str) -> None:
    parse_or_one_line(text)


RIGHT = """\
defaults: {precision: [float32, float16], layout: [bsf, bsl], batch: any}
kernels:
  - 6,64,64,1
  - {pattern: [2,48,192,1], batch: [any, 25088], bias: true}
layers:
  up:
    chain: [[6,64,64,1], [1,768,192,2]]
    activation: "gelu"
  mix: {chain: {family: monarch, in_features: 6, out_features: 20, split_in: 3, split_out: 4}}
"""
marks = st.sampled_from([*"[]{}:,-\n'\"&*!|>%0", "\n  ", ": ", "- "])


@settings(max_examples=300)
@given(st.integers(0, len(RIGHT)), st.integers(0, 20), st.text(max_size=3) | marks)
def test_a_damaged_spec_is_a_spec_or_a_spec_error(start: int, length: int, put_in: str) -> None:
    parse_or_one_line(RIGHT[:start] + put_in + RIGHT[start + length :])


words = st.sampled_from(["defaults", "kernels", "layers", "patterns", "chain", "family", "monarch", "pattern", "bias"])
values = st.recursive(
    words | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("1,2,3,4"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(words | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(words, values, max_size=4), st.booleans())
def test_any_document_is_a_spec_or_a_spec_error(document: dict[str, Any], flow: bool) -> None:
    parse_or_one_line(yaml.safe_dump(document, default_flow_style=flow, allow_unicode=True))


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[" + "{}," * 300_000 + "]", 1),
        ("kernels:\n" + "- 1,2,3,4\n" * 90_000, 32765),
        ("kernels: [" + "1," * 400_000 + "]", 1),
    ],
)
def test_a_text_of_too_many_values_is_refused_before_all_are_read(text: str, line: int) -> None:
    with pytest.raises(SpecError) as caught:
        read_nodes(text, "spec.yaml")
    assert str(caught.value) == (
        f"spec.yaml:{line}: spec: more than 32768 YAML values; accepted: fewer; a list of values replaces many entries"
    )


def test_a_text_of_as_many_values_as_are_taken_is_read() -> None:
    assert str(read_nodes("[" + "1," * (MOST_EVENTS - 6) + "]", "spec.yaml")) == "a list"
