"""Random damage to users' inputs, for the fuzzing tests. `KSGEN_FUZZ=long` runs a hundred times as many examples."""

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

OFTEN = 100 if os.environ.get("KSGEN_FUZZ") == "long" else 1
MARKS = [
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"9" * 400,
    b"-1",
    b"1e999",
    b"[" * 40,
    b'"',
    b"\\",
    b"\n",
    b"\t",
    b"&a ",
    b"*a",
]
# Values of other types than what a JSON file holds in their place.
JUNK: list[Any] = [
    None,
    True,
    -1,
    0,
    10**400,
    0.5,
    float("nan"),
    float("inf"),
    "",
    "a\nb",
    "\ud800",
    [],
    {},
    [[]],
    {"a\nb": 1},
]


def fuzzing(examples: int) -> settings:
    return settings(
        max_examples=examples * OFTEN, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
    )


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The same bytes after one to three accidents: cut short, lost, doubled, swapped, overwritten, inserted,
    flipped.
    """
    data = whole
    for _ in range(draw(st.integers(1, 3))):
        first, last = sorted((draw(st.integers(0, len(data))), draw(st.integers(0, len(data)))))
        new = draw(st.sampled_from(MARKS) | st.binary(max_size=8))
        flipped = bytes(byte ^ 1 << draw(st.integers(0, 7)) for byte in data[first : first + 1])
        ways = (
            data[:first],
            data[:first] + data[last:],
            data[:last] + data[first:],
            data[last:] + data[first:last] + data[:first],
            data[:first] + new + data[last:],
            data[:first] + new + data[first:],
            data[:first] + flipped + data[first + 1 :],
        )
        data = draw(st.sampled_from(ways))
    return data


@st.composite
def with_junk(draw: st.DrawFn, content: Any) -> Any:
    """JSON content with one value, at any depth, of another type, missing, or under another key."""
    if isinstance(content, dict) and content and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(content)))
        rest = {name: value for name, value in content.items() if name != key}
        way = draw(st.sampled_from(["deeper", "deeper", "gone", "renamed"]))
        return (
            rest
            if way == "gone"
            else rest | ({f"{key}\n": 1} if way == "renamed" else {key: draw(with_junk(content[key]))})
        )
    if isinstance(content, list) and content and draw(st.integers(0, 9)):
        place = draw(st.integers(0, len(content) - 1))
        return [*content[:place], draw(with_junk(content[place])), *content[place + 1 :]]
    return draw(st.sampled_from(JUNK))
