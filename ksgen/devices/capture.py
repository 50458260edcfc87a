"""Refuses actions that a CUDA graph cannot record while one records a stream."""

from ksgen.devices.base import Device, Stream
from ksgen.errors import LaunchError


def refuse_capture(device: Device, stream: Stream, what: str, instead: str = "") -> None:
    """Raise `LaunchError` while a CUDA graph records the stream."""
    if device.kind == "cuda" and device.is_capturing(stream):
        remedy = instead or (
            "before the capture, call launcher.prepare(...) with the same arguments, or build(batch) of a KSLinear"
        )
        raise LaunchError(f"this call {what}, which a CUDA graph cannot record; {remedy}")
