"""What a CUDA graph cannot record is refused while one records the stream, and at no other time."""

from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.devices.base import refuse_capture
from ksgen.errors import LaunchError


def device(kind: str, records: int) -> Any:
    return SimpleNamespace(kind=kind, is_capturing=lambda stream: stream == records)


def test_it_is_refused_on_the_stream_that_is_recorded() -> None:
    refuse_capture(device("cuda", 5), 6, "waits")
    with pytest.raises(
        LaunchError,
        match=r"this call waits, which a CUDA graph cannot record; before the capture, call launcher.prepare"
        r"\(...\) with the same arguments, or build\(batch\) of a KSLinear",
    ):
        refuse_capture(device("cuda", 5), 5, "waits")
    with pytest.raises(LaunchError, match="cannot record; give out="):
        refuse_capture(device("cuda", 5), 5, "waits", "give out=")


def test_other_kinds_of_devices_record_no_graphs() -> None:
    refuse_capture(device("opencl", 5), 5, "waits")
