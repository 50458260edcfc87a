"""What a call was given: its options, and its arrays, each read once. Checks nothing but that each is an array."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ksgen.launch.arrays import ArrayView, stream_handle, view

Views = Mapping[str, ArrayView]


class CallOptions(NamedTuple):
    """All that a call is given besides its arrays."""

    layout: str = "bsf"
    activation: str = "none"
    stream: Any = None
    precision: str | None = None


def views_of(arrays: Mapping[str, Any], stream: Any) -> dict[str, ArrayView]:
    """The arrays, made ready for work on a CUDA stream by those that can do that."""
    handle = None if stream is None else stream_handle(stream)
    if not isinstance(handle, int):
        handle = None
    return {name: view(array, name, handle) for name, array in arrays.items()}
