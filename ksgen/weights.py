"""Weights on a device, packed for the plans that use them: once for those that are kept, anew for those that are not."""

import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ksgen.arrays import ArrayView
from ksgen.devices.base import Buffer, Device, Stream
from ksgen.errors import LaunchError
from ksgen.memory import host_array
from ksgen.pattern import Pattern
from ksgen.plan import Plan


@dataclass(eq=False)
class Weights:
    """What `Launcher.pack` returns: canonical weights on a device, and their packed forms as they become needed.

    The array they came from must not change while they are used.
    """

    pattern: Pattern
    dtype: str
    device: Device
    canonical: Buffer
    owner: Any  # keeps the canonical memory alive
    _packed: dict[Hashable, Buffer] = field(default_factory=dict)

    def packed_for(self, plan: Plan, stream: Stream) -> Buffer:
        """The packed weights of a plan. Packing is waited for, once, so that they are complete for every stream."""
        packing = plan.packing
        if packing not in self._packed:
            refuse_capture(plan.device, stream, "packs its weights")
            packed = plan.pack(self.canonical, stream)
            plan.device.synchronize(stream)
            self._packed[packing] = packed
        return self._packed[packing]


class KeptWeights:
    """The weights of tensors that count their writes: packed again when the count has changed, gone with the tensor."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[weakref.ref[Any], int, Weights]] = {}

    def of(self, tensor: Any, found: ArrayView, pattern: Pattern, device: Device) -> Weights:
        assert found.version is not None
        reference, version, weights = self._kept.get(id(tensor), (None, 0, None))
        known = reference is not None and reference() is tensor and version == found.version
        if known and weights is not None and weights.device is device and weights.canonical == found.pointer:
            return weights
        weights = Weights(pattern, found.dtype, device, found.pointer, None)
        key = id(tensor)
        self._kept[key] = (weakref.ref(tensor, lambda _: self._kept.pop(key, None)), found.version, weights)
        return weights


def upload(found: ArrayView, pattern: Pattern, device: Device) -> Weights:
    """Host weights, copied to the device."""
    host = host_array(found)
    buffer = device.allocate(host.nbytes)
    device.upload(buffer, host)
    return Weights(pattern, found.dtype, device, buffer, None)


def check_kept(caller: object, weights: Weights, pattern: Pattern, device: Device, precision: str) -> None:
    """Raise `LaunchError` where packed weights are another pattern's, precision's or device's."""
    if weights.pattern != pattern:
        raise LaunchError(f"{caller!r}: these weights were packed for pattern {weights.pattern}")
    if weights.dtype != precision:
        raise LaunchError(f"{caller!r}: packed weights are {weights.dtype} and x is {precision}; give both in one precision")
    own = weights.device
    same = own is device if device.kind == "opencl" else (own.kind, own.index) == (device.kind, device.index)
    if not same:
        raise LaunchError(f"{caller!r}: packed weights lie on {own.name} and x on {device.name}; pack them on that device")


def refuse_capture(device: Device, stream: Stream, what: str) -> None:
    """Raise `LaunchError` while a CUDA graph records the stream."""
    if device.kind == "cuda" and device.is_capturing(stream):
        raise LaunchError(
            f"the first use of a kernel {what}, which a CUDA graph cannot record; before the capture, "
            "call launcher.prepare(...) with the same arguments, the weights being a PyTorch tensor or from launcher.pack"
        )
