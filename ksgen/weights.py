"""Weights on a device, packed for the plans that use them: once where writes are counted, else anew before each launch.

Packed copies of an array stay in the same memory for as long as the array lives, so that a CUDA graph which recorded a
call stays valid, and finds new weights there once they were packed again. That needs no lock, on any stream: whoever
writes to weights lets the calls that read them finish first, and where nobody wrote, packing again writes the same bytes.

For what a launcher keeps by itself the host does not wait: streams wait for a packing, and only a graph is recorded when
it is done. Where `Launcher.pack` was called it does wait, there for what the stream holds and at the first use of a packed
form for its packing: every stream may use what is there then. A graph that records a use of weights which were written to
records their packing as well. Its replays may write to them, and nobody counts that: from then on they are packed anew
before each launch.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ksgen.arrays import ArrayView
from ksgen.devices.base import Buffer, Device, Mark, Stream, uploaded
from ksgen.errors import LaunchError
from ksgen.memory import host_array
from ksgen.pattern import Pattern
from ksgen.plan import Plan

Refresh = Callable[[], None]
_Key = tuple[Any, Device, str]  # where an array's memory is, the device, and a plan's packing


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
    version: int | None = None  # of the tensor, as it was given
    _packed: dict[str, Buffer] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"Weights({self.pattern}, {self.dtype}, packed on {self.device.name})"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(f"{self!r} belongs to this process, where its memory is: copy or send the array, and pack it there")

    def packed_for(self, plan: Plan, stream: Stream) -> Buffer:
        """The packed weights of a plan, complete for every stream: packing is waited for, once."""
        packed = self._packed.get(plan.packing)
        return self._pack(plan, stream) if packed is None else packed

    def _pack(self, plan: Plan, stream: Stream) -> Buffer:
        refuse_capture(plan.device, stream, "packs its weights for the first time")
        if self.version is not None and self.owner[0]._version != self.version:
            raise LaunchError("the tensor behind these weights was written to after launcher.pack; pack it again")
        packed = plan.pack(self.canonical, stream)
        plan.device.synchronize(stream)
        return self._packed.setdefault(plan.packing, packed)


def pack_host(found: ArrayView, pattern: Pattern, device: Device) -> Weights:
    """Host weights, copied to the device."""
    return Weights(pattern, found.dtype, device, uploaded(device, host_array(found)), None)


def pack_in_place(found: ArrayView, pattern: Pattern, device: Device, stream: Stream) -> Weights:
    """Weights that lie on the device, complete for every stream once what the stream holds is done."""
    refuse_capture(device, stream, "waits for weights")
    device.synchronize(stream)
    return Weights(pattern, found.dtype, device, found.pointer, (found.owner, storage_of(found)), found.version)


def check_packed(caller: object, weights: Weights, pattern: Pattern, device: Device, precision: str) -> None:
    """Raise `LaunchError` where packed weights are another pattern's, precision's or device's."""
    if weights.pattern != pattern:
        raise LaunchError(f"{caller!r}: these weights were packed for pattern {weights.pattern}")
    if weights.dtype != precision:
        raise LaunchError(f"{caller!r}: packed weights are {weights.dtype} and x is {precision}; give both in one precision")
    own = weights.device
    if own is device or (own.kind == device.kind == "cuda" and own.index == device.index):
        return
    raise LaunchError(f"{caller!r}: packed weights lie on {own.name} and x on {device.name}; pack them on that device")


@dataclass(eq=False, slots=True)
class _Packing:
    """A tensor's packing that a stream was given."""

    version: int  # of the tensor
    mark: Mark  # behind it; None once it is known to be done


@dataclass(eq=False, slots=True)
class _Form:
    """An array's packed weights for one device and packing."""

    buffer: Buffer
    storage: Any  # a weak reference to the memory under a tensor: another one may get the same address later
    packing: _Packing | None = None  # the last one; None where it is no longer to be relied on
    is_in_graph: bool = False  # whether a graph recorded its packing


@dataclass(eq=False, slots=True)
class _Kept:
    """The packed forms of one array."""

    array: weakref.ref[Any]
    forms: dict[_Key, _Form] = field(default_factory=dict)


class KeptWeights:
    """The packed forms of the arrays that a launcher was called with. They go with their array."""

    def __init__(self) -> None:
        self._kept: dict[int, _Kept] = {}  # by the array's id, which its reference confirms

    def packed_for(self, array: Any, found: ArrayView, plan: Plan, stream: Stream) -> tuple[Buffer, Refresh]:
        """Where the packed weights are, and what brings them up to date before a launch on that stream."""
        form = self._form(array, found, plan, stream)
        device, canonical = plan.device, found.pointer

        def pack_anew() -> None:
            plan.pack(canonical, stream, into=form.buffer)

        def was_written() -> bool:
            return form.packing is None or form.packing.version != array._version

        def pack_if_written() -> None:
            version, packing = array._version, form.packing
            if packing is None or packing.version != version:
                pack_anew()
                if is_capturing(device, stream):
                    form.is_in_graph = True
                form.packing = None if form.is_in_graph else _Packing(version, device.mark(stream))
            elif packing.mark is not None:
                _come_after(packing, packing.mark, device, stream)

        if found.version is None:
            return form.buffer, pack_anew
        if was_written() and not form.is_in_graph and not is_capturing(device, stream):
            pack_if_written()  # here, so that a prepared call finds it done
        return form.buffer, pack_if_written

    def _form(self, array: Any, found: ArrayView, plan: Plan, stream: Stream) -> _Form:
        storage = storage_of(found)
        # Views share their base's count of writes, and outlive no call that makes them anew.
        base = array._base if found.kind == "torch" else None
        owner = array if base is None else base
        key = (found.pointer, plan.device, plan.packing)
        kept = self._kept.get(id(owner))
        if kept is not None and kept.array() is owner:
            form = kept.forms.get(key)
            if form is not None and (storage is None or form.storage() is storage):
                return form
        refuse_capture(plan.device, stream, "packs its weights for the first time")
        form = _Form(plan.device.allocate(plan.packed_bytes), None if storage is None else weakref.ref(storage))
        return self._keep(owner, key, form)

    def _keep(self, owner: Any, key: _Key, form: _Form) -> _Form:
        kept = self._kept.get(id(owner))
        if kept is None or kept.array() is not owner:
            try:
                kept = self._kept[id(owner)] = _Kept(weakref.ref(owner, self._forgetter(id(owner))))
            except TypeError:  # it takes no weak references: packed for this call alone
                return form
        for other, old in list(kept.forms.items()):  # memory that the array has left
            if other == key or (other[0] != key[0] if old.storage is None else old.storage() is None):
                kept.forms.pop(other, None)
        return kept.forms.setdefault(key, form)

    def _forgetter(self, number: int) -> Callable[[weakref.ref[Any]], None]:
        everything = self._kept

        def forget(reference: weakref.ref[Any]) -> None:
            kept = everything.get(number)
            if kept is not None and kept.array is reference:
                del everything[number]

        return forget


def _come_after(packing: _Packing, mark: Mark, device: Device, stream: Stream) -> None:
    """What the stream is given from here on finds the packed weights. So does a graph, which may be launched on any stream.

    Which streams wait already is not remembered: a handle may stand for another stream in another thread, or by now.
    """
    if device.is_reached(mark):
        packing.mark = None
    elif is_capturing(device, stream):
        device.finish(mark)
        packing.mark = None
    else:
        device.wait(stream, mark)


def storage_of(found: ArrayView) -> Any:
    """The memory under a PyTorch tensor, as an object of its own; None for other arrays, which do not change theirs."""
    return found.owner.untyped_storage() if found.kind == "torch" else None


def is_capturing(device: Device, stream: Stream) -> bool:
    return device.kind == "cuda" and device.is_capturing(stream)


def refuse_capture(device: Device, stream: Stream, what: str, instead: str = "") -> None:
    """Raise `LaunchError` while a CUDA graph records the stream."""
    if is_capturing(device, stream):
        remedy = instead or "before the capture, call launcher.prepare(...) with the same arguments"
        raise LaunchError(f"this call {what}, which a CUDA graph cannot record; {remedy}")
