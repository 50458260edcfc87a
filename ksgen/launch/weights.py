"""Packed weights, and buffers into which other weights are packed before each launch.

Arrays do not reveal reliably that they are unchanged. PyTorch does not count writes of fused optimizers, through
`.data`, by other libraries, by collectives, or in a CUDA graph's replay. So only results of `Launcher.pack` are cached:
its caller promises not to change the array. Every use checks this promise, as far as PyTorch's count allows.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, NoReturn

from ksgen.devices.base import Buffer, Device, Stream, refuse_capture, uploaded
from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView, stream_handle, view
from ksgen.launch.memory import host_array, new_array, new_host_array, repetition, tie_of
from ksgen.launch.plan import Packing, Plan
from ksgen.pattern import Pattern
from ksgen.quantized import Quantized
from ksgen.spec import PRECISIONS
from ksgen.spec.kernel import SLICES
from ksgen.spec.storage import SAME

_Place = tuple[Any, Device, str]  # address of an array, device, and a plan's packing


class WeightForm(NamedTuple):
    """Properties that decide whether weights fit a call: storage, and shape and dtype if they are packed."""

    stored: str = SAME
    inputs: str = SAME  # storage of the X that they multiply
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    tie: str = ""  # axes along which packed weights are equal


PLAIN = WeightForm()  # form of an array that is not packed


class Seen:
    """Snapshot of a PyTorch tensor, which keeps its memory from being reused."""

    __slots__ = ("_address", "_dtype", "_memory", "_shape", "_strides", "_writes", "tensor")

    def __init__(self, tensor: Any) -> None:
        self.tensor, self._memory, self._writes = tensor, tensor.untyped_storage(), writes_to(tensor)
        self._address, self._dtype = tensor.data_ptr(), tensor.dtype
        self._shape, self._strides = tensor.shape, tensor.stride()

    @property
    def pinned(self) -> tuple[Any, int, int]:
        """The tensor, its address, and PyTorch's count of writes; -1 if it has none."""
        return self.tensor, self._address, -1 if self._writes is None else self._writes

    def what_happened(self) -> str:
        """Describe the change of the tensor since the snapshot; empty if none is detected.

        Every call of a frozen layer checks its weights here, so no tuple is made.
        """
        tensor = self.tensor
        is_where = tensor.data_ptr() == self._address and tensor.dtype is self._dtype
        if not (is_where and tensor.shape == self._shape and tensor.stride() == self._strides):
            return "got other memory"
        return "" if self._writes is None or tensor._version == self._writes else "was written to"


def writes_to(tensor: Any) -> int | None:
    """PyTorch's count of writes, which misses many; None for inference tensors, which have no count."""
    return None if tensor.is_inference() else tensor._version


class Packed(NamedTuple):
    """Weights in the form that launches take."""

    at: Buffer
    # runs before each launch: copies repeated weights, or checks that the source of packed ones is unchanged
    before: Callable[[], object] | None = None
    keep: Any = None  # owner of their memory, needed until the last launch is enqueued
    packing: Packing | None = None  # packs the weights again before each launch


class WrittenError(LaunchError):
    """The tensor of packed weights was written to, or got other memory, after they were packed."""


@dataclass(eq=False)
class Weights:
    """Result of `Launcher.pack`: weights (a, b, c, d) on a device, with packed forms created on demand.

    The source array must not change while they are used.
    """

    pattern: Pattern
    dtype: str
    device: Device
    canonical: Buffer  # the weights (a, b, c, d)
    owner: Any = None  # keeps the memory of `canonical` alive
    lies_in: ArrayView | None = None  # view of the caller's array that owns the memory; None: ksgen owns it
    seen: tuple[Seen, ...] = ()  # snapshots of the source tensors
    stored: str = SAME  # "same" (the type of Y), or quantized storage: `canonical` is then `Quantized.whole`
    inputs: str = SAME  # storage of the X that they multiply
    tie: str = ""  # axes along which the weights are equal: `canonical` is then their slice
    # whole weights of such a slice, written on a stream, and their owner
    repeat: Callable[[Stream], tuple[Buffer, Any]] | None = None
    form: WeightForm = field(init=False)
    _packed: dict[str, Buffer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.form = WeightForm(self.stored, self.inputs, self.pattern.shape, self.dtype, self.tie)

    def __repr__(self) -> str:
        return f"Weights({self.pattern}, {self.words}, packed on {self.device.name})"

    @property
    def words(self) -> str:
        """Name of the storage."""
        return self.dtype if self.stored == SAME else self.stored

    def __reduce__(self) -> NoReturn:
        raise LaunchError(
            f"{self!r} belongs to this process, where its memory is: copy or send the array, and pack it there"
        )

    def use(self, plan: Plan, stream: Stream) -> Packed:
        """Packed form for a plan's launches, complete for every stream: the first use waits for packing."""
        assert (plan.kernel.weights, plan.kernel.inputs) == (self.stored, self.inputs)
        if self.seen:
            self.check()
        packed = self._packed.get(plan.packing)
        return Packed(self._pack(plan, stream) if packed is None else packed, self.check if self.seen else None, self)

    def check(self) -> None:
        """Raise `WrittenError` if a change of the source tensor is detected."""
        if what := self.what_happened():
            raise WrittenError(f"the tensor behind these weights {what} after launcher.pack; pack it again")

    def what_happened(self) -> str:
        """Describe the change of a source tensor; empty if none is detected."""
        for each in self.seen:
            if what := each.what_happened():
                return what
        return ""

    def _pack(self, plan: Plan, stream: Stream) -> Buffer:
        refuse_capture(plan.device, stream, "packs its weights for the first time")
        whole = self.repeat(stream) if self.repeat and not plan.kernel.tied else (self.canonical, None)
        packed = plan.pack(whole[0], stream)
        plan.device.synchronize(stream)
        return self._packed.setdefault(plan.packing, packed)


def pack_host(found: ArrayView, pattern: Pattern, device: Device) -> Weights:
    """Copy host weights to the device; of tied weights, copy only one slice."""
    if tie := tie_of(found):
        part = host_array(found)[SLICES[tie]].copy()

        def repeat(_: Stream) -> tuple[Buffer, Any]:
            whole = new_host_array(found.shape, part.dtype)
            whole[...] = part
            return uploaded(device, whole), None

        return Weights(pattern, found.dtype, device, uploaded(device, part), seen=_seen(found), tie=tie, repeat=repeat)
    whole = _whole(found, None)  # owns its memory, which must live until it is copied
    return Weights(pattern, found.dtype, device, uploaded(device, host_array(whole)), seen=_seen(found))


def pack_in_place(found: ArrayView, pattern: Pattern, device: Device, stream: Stream) -> Weights:
    """Wrap weights on the device. Synchronises the stream, so that they are complete for every other stream."""
    refuse_capture(device, stream, "waits for weights")
    given, seen, tie = found, _seen(found), tie_of(found)
    found = found if tie else _whole(found, stream)
    device.synchronize(stream)
    place = found._replace(kind="packed", owner=None)  # no tensor: later checks compare addresses only

    def repeat(later: Stream) -> tuple[Buffer, Any]:
        whole = _whole(given, later)
        device.synchronize(later)
        return whole.pointer, whole.owner

    return Weights(
        pattern, found.dtype, device, found.pointer, found.owner, place, seen, tie=tie, repeat=repeat if tie else None
    )


def pack_quantized(
    weights: Quantized, device: Device, found: ArrayView | None = None, stream: Stream = None
) -> Weights:
    """Pack quantized weights: their values and scales become one array on the device.

    `found` views the scales of weights on the device, and `stream` wrote them.
    """
    seen = tuple(Seen(each) for each in (weights.values, weights.scale) if hasattr(each, "untyped_storage"))
    options: dict[str, Any] = {"seen": seen, "stored": weights.storage, "inputs": weights.inputs}
    if found is None:
        whole = weights.whole.numpy() if seen else weights.whole
        return Weights(weights.pattern, "float32", device, uploaded(device, whole), **options)
    refuse_capture(device, stream, "waits for weights")
    whole = weights.whole
    device.synchronize(stream)
    return Weights(weights.pattern, "float32", device, whole.data_ptr(), whole, **options)


def _whole(found: ArrayView, stream: Stream) -> ArrayView:
    """The same weights without gaps: a copy if they repeat a slice by strides of zero."""
    if found.strides is None:
        return found
    whole, copy = repetition(found, stream)
    copy()
    return view(whole)


def _seen(found: ArrayView) -> tuple[Seen, ...]:
    return (Seen(found.owner),) if found.kind == "torch" else ()


def check_device(caller: object, weights: Weights, device: Device) -> None:
    """Raise `LaunchError` if packed weights are on another device."""
    packed_on = weights.device
    if not packed_on.is_open:
        raise LaunchError(
            f"{caller!r}: packed weights lie in a CUDA context that is gone, detached by its user; pack them again"
        )
    if packed_on is device or (packed_on.kind == device.kind == "cuda" and packed_on.index == device.index):
        if packed_on.context != device.context:
            raise LaunchError(
                f"{caller!r}: packed weights lie in another CUDA context than x; pack an array of x's library"
            )
        return
    raise LaunchError(
        f"{caller!r}: packed weights lie on {packed_on.name} and x on {device.name}; pack them on that device"
    )


@dataclass(eq=False, slots=True)
class _PackedForms:
    """Buffers that hold the packed forms of one array."""

    array: weakref.ref[Any]
    buffers: dict[_Place, Buffer] = field(default_factory=dict)


class PackBuffers:
    """Buffers into which a launcher packs the arrays of its calls.

    For tensors, PyTorch allocates them in stream order, and keeps their memory for a graph's lifetime. An array of
    another library gets buffers of the device, at fixed addresses for the array's lifetime. So a CUDA graph that
    recorded a call remains valid. Calls on several streams share these buffers without locks. Callers must
    order writes to the weights after the launches that read them. Without a write, packing again writes the same bytes.
    """

    def __init__(self) -> None:
        self._forms: dict[int, _PackedForms] = {}  # by the array's id, confirmed by its weak reference

    def find(self, array: Any, found: ArrayView, plan: Plan, stream: Stream) -> tuple[Buffer, Any]:
        """Memory for a plan's packed weights, and its owner, needed until the last launch is enqueued."""
        if found.kind == "torch":
            elements = -(-plan.packed_bytes // PRECISIONS[found.dtype].item_bytes)
            buffer = new_array(found, (elements,), stream_handle(stream))
            pointer = view(buffer).pointer
            return plan.device.shared(pointer) if found.device == "host" else pointer, buffer
        place = found.pointer, plan.device, plan.packing
        kept = self._forms.get(id(array))
        if kept is not None and kept.array() is array and place in kept.buffers:
            return kept.buffers[place], None
        refuse_capture(plan.device, stream, "packs its weights for the first time")
        return self._keep(array, place, buffer := plan.device.allocate(plan.packed_bytes)), buffer

    def _keep(self, array: Any, place: _Place, buffer: Buffer) -> Buffer:
        kept = self._forms.get(id(array))
        if kept is None or kept.array() is not array:
            try:
                reference = weakref.ref(array, partial(_forget, self._forms, id(array)))
                kept = self._forms[id(array)] = _PackedForms(reference)
            except TypeError:  # no weak references: memory for this call alone
                return buffer
        # packed forms of the array's former memory are dropped
        for other in [each for each in list(kept.buffers) if each[0] != place[0]]:
            kept.buffers.pop(other, None)
        return kept.buffers.setdefault(place, buffer)


def _forget(forms: dict[int, _PackedForms], number: int, reference: weakref.ref[Any]) -> None:
    kept = forms.get(number)
    if kept is not None and kept.array is reference:
        del forms[number]


def packed_in(plan: Plan, weights: Any, found: ArrayView | None, buffers: PackBuffers, stream: Stream) -> Packed:
    """Weights for a plan's launches: packed once, or an array that is packed before each launch."""
    if isinstance(weights, Weights):
        return weights.use(plan, stream)
    assert found is not None
    buffer, owner = buffers.find(weights, found, plan, stream)
    if found.strides is not None and not plan.kernel.tied:
        whole, copy = repetition(found, stream)
        return Packed(buffer, copy, (owner, whole), _packing(plan, view(whole), buffer))
    return Packed(buffer, None, owner, _packing(plan, found, buffer))


def _packing(plan: Plan, found: ArrayView, into: Buffer) -> Packing:
    source = plan.device.shared(found.pointer) if found.device == "host" else found.pointer
    return Packing(plan, source, into)


def storage_of(found: ArrayView) -> Any:
    """Storage of a PyTorch tensor; None for other arrays, whose memory is fixed."""
    return found.owner.untyped_storage() if found.kind == "torch" else None
