"""Tests of call arguments: options that do not change, and arrays read once, for the stream that uses them."""

from typing import Any

import pytest

from ksgen.errors import LaunchError
from ksgen.launch import arrays
from ksgen.launch.arrays import CallOptions, views_of


def test_options_are_frozen_and_plain_by_default() -> None:
    options = CallOptions()
    assert options == ("bsf", "none", None, None, False, None)
    with pytest.raises(AttributeError):
        options.layout = "bsl"  # type: ignore[misc]


class Shown:
    """An array that tells which stream it was asked to be ready for."""


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []

    def read(array: Shown, name: str, stream: Any) -> arrays.ArrayView:
        found.append((name, stream))
        return arrays.ArrayView("dlpack", 64, (1,), "float32", None, ("cuda", 0), stream, array, False)

    monkeypatch.setitem(arrays._readers, Shown, read)
    return found


def test_each_array_is_read_once_for_the_stream_of_the_call(asked: list[Any]) -> None:
    given = {"x": Shown(), "out": Shown()}
    assert list(views_of(given, 5)) == ["x", "out"]
    views_of(given, None)
    assert asked == [("x", 5), ("out", 5), ("x", None), ("out", None)]


def test_a_queue_is_no_stream_that_arrays_are_made_ready_for(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksgen.launch.arrays.stream_handle", lambda stream: object())
    views_of({"x": Shown()}, "a queue")
    assert asked == [("x", None)]


def test_what_is_no_array_is_refused_by_its_name() -> None:
    with pytest.raises(LaunchError, match="bias is a list"):
        views_of({"bias": [1.0]}, None)
