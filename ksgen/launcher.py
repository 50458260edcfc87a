"""y = launcher(x, weights): a pattern's kernels, called on the arrays of NumPy, PyTorch, CuPy, PyCUDA, JAX or pyopencl.

Reads precision, batch and device off the arguments, refuses what does not fit before anything is launched, and launches
on the caller's stream. Never searches, and leaves gradients to `ksgen.torch`.
"""

import ctypes
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any

from ksgen.arrays import ArrayView, common_device, stream_handle, view
from ksgen.devices import device_for, find_device
from ksgen.devices.base import Buffer, Device, Stream
from ksgen.errors import DeviceError, LaunchError
from ksgen.pattern import Pattern
from ksgen.plan import PLANNER, Plan
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS, Epilogue, KernelSpec

if TYPE_CHECKING:
    import numpy as np

    HostArray = np.ndarray[Any, Any]


@dataclass(eq=False)
class Weights:
    """Weights on a device, packed once for every plan that uses them. What `Launcher.pack` returns.

    The array they came from must not change while they are used.
    """

    pattern: Pattern
    dtype: str
    device: Device
    canonical: Buffer
    owner: Any
    _packed: dict[Hashable, Buffer] = field(default_factory=dict)

    def packed_for(self, plan: Plan, stream: Stream) -> Buffer:
        """The packed weights of a plan: complete for every stream, as packing is waited for once."""
        packing = plan.packing
        if packing not in self._packed:
            _refuse_capture(plan.device, stream, "packs its weights")
            packed = plan.pack(self.canonical, stream)
            self.device.synchronize(stream)
            self._packed[packing] = packed
        return self._packed[packing]


@dataclass(frozen=True)
class Call:
    """A call with all its arguments: `call()` launches once more, on the memory that it was prepared with."""

    plan: Plan
    arguments: tuple[Any, ...]
    stream: Stream
    out: Any
    before: Callable[[], None] | None
    after: Callable[[], None] | None
    keep: tuple[Any, ...]  # owners of the memory behind the arguments

    def __call__(self) -> Any:
        if self.before:
            self.before()
        self.plan.launch(self.arguments, self.stream)
        if self.after:
            self.after()
        return self.out


class Launcher:
    """All kernels of one pattern. Precision, batch and device are read off the arguments of a call."""

    def __init__(self, a: int, b: int, c: int, d: int, batches: Sequence[int] = ()) -> None:
        self.pattern = Pattern(a, b, c, d)
        self.batches = frozenset(batches)  # batches with kernels of their own
        self._kept: dict[int, tuple[weakref.ref[Any], int, Weights]] = {}
        self._plans: dict[Hashable, Plan] = {}

    def __repr__(self) -> str:
        return f"Launcher({', '.join(map(str, self.pattern.shape))})"

    def __call__(
        self,
        x: Any,
        weights: Any,
        *,
        layout: str = "bsf",
        bias: Any = None,
        activation: str = "none",
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Y = X K^T, then bias, activation and residual. NumPy arrays return when it is done; others in stream order.

        `x` is (batch, a*c*d) in layout "bsf" and (a*c*d, batch) in "bsl"; `weights` is (a, b, c, d), or what `pack` gave.
        """
        return self.prepare(
            x, weights, layout=layout, bias=bias, activation=activation, residual=residual, out=out, stream=stream
        )()  # fmt: skip

    def prepare(
        self,
        x: Any,
        weights: Any,
        *,
        layout: str = "bsf",
        bias: Any = None,
        activation: str = "none",
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
    ) -> Call:
        """Everything but the launch: checks, builds, loads, packs. The `Call` that it returns does the rest."""
        handle = stream_handle(stream)
        views = {"x": view(x, "x", handle)}
        if not isinstance(weights, Weights):
            views["weights"] = view(weights, "weights", handle)
        for name, given in (("bias", bias), ("residual", residual), ("out", out)):
            if given is not None:
                views[name] = view(given, name, handle)
        batch = self._check(views, layout, activation)
        precision = views["x"].dtype
        place = common_device(views)
        handle = handle if stream is not None else next((v.stream for v in views.values() if v.stream is not None), None)
        device = _device(place, handle)
        if isinstance(weights, Weights):
            self._check_kept(weights, device, precision)
            device = weights.device
        epilogue = (bias is not None, activation, residual is not None)
        plan = self._plan(device, precision, layout, epilogue, batch, handle)
        if place == "host":
            return self._host_call(plan, views, weights, handle)
        return self._device_call(plan, views, weights, handle)

    def pack(self, weights: Any, *, device: str | None = None) -> Weights:
        """Put weights on their device once and for all. Host arrays go to `device`, else to `KSGEN_DEVICE`, else the best.

        PyTorch tensors need no packing by hand: a launcher keeps theirs, and sees when they were written to.
        """
        found = view(weights, "weights")
        self._check_weights(found)
        if found.device != "host":
            return Weights(self.pattern, found.dtype, _device(found.device, found.stream), found.pointer, found.owner)
        return self._uploaded(found, find_device(device))

    def explain(
        self, batch: int, *, precision: str = "float32", layout: str = "bsf", device: str | None = None, epilogue: Epilogue | None = None
    ) -> str:
        """Which family and constants serve a call, on which device, and why."""
        where = find_device(device)
        kernel = self._kernel(precision, layout, epilogue or Epilogue(), batch)
        choice = PLANNER.choice(where, kernel, batch)
        return f"{kernel.name} at batch {batch} on {where.name}: {choice.family} ({choice.constants}); {choice.why}"

    def _kernel(self, precision: str, layout: str, epilogue: Epilogue, batch: int) -> KernelSpec:
        return KernelSpec(self.pattern, precision, layout, epilogue, batch if batch in self.batches else None)

    def _plan(self, device: Device, precision: str, layout: str, epilogue: tuple[bool, str, bool], batch: int, stream: Stream) -> Plan:
        key = (id(device), precision, layout, epilogue, batch)
        plan = self._plans.get(key)
        if plan is None:
            kernel = self._kernel(precision, layout, Epilogue(*epilogue), batch)
            if not PLANNER.known(device, kernel, batch):
                _refuse_capture(device, stream, "builds and loads its kernel")
            plan = self._plans[key] = PLANNER.plan(device, kernel, batch)
        return plan

    def _check(self, views: dict[str, ArrayView], layout: str, activation: str) -> int:
        """Raise `LaunchError` on the first argument that does not fit; the batch."""
        if layout not in LAYOUTS:
            raise LaunchError(f"{self!r}: layout {layout!r} is unknown; accepted: {', '.join(LAYOUTS)}")
        if activation not in ACTIVATIONS:
            raise LaunchError(f"{self!r}: activation {activation!r} is unknown; accepted: {', '.join(ACTIVATIONS)}")
        x = views["x"]
        pattern = self.pattern
        inputs, outputs = pattern.in_features, pattern.out_features
        first = layout == "bsf"
        if len(x.shape) != 2 or x.shape[1 if first else 0] != inputs:
            wanted = f"(batch, {inputs})" if first else f"({inputs}, batch)"
            raise LaunchError(f"{self!r}: got x of shape {tuple(x.shape)}; layout {layout} wants {wanted}")
        batch = int(x.shape[0 if first else 1])
        if batch < 1:
            raise LaunchError(f"{self!r}: got x of shape {tuple(x.shape)}; a batch of at least 1 is needed")
        y_shape = (batch, outputs) if first else (outputs, batch)
        shapes = {"weights": pattern.shape, "bias": (outputs,), "residual": y_shape, "out": y_shape}
        for name, given in views.items():
            if name != "x" and tuple(given.shape) != shapes[name]:
                raise LaunchError(f"{self!r}: got {name} of shape {tuple(given.shape)}; {shapes[name]} is needed")
            if given.dtype != x.dtype:
                raise LaunchError(f"{self!r}: got {given.dtype} for {name} and {x.dtype} for x; give both in one precision")
            if not given.contiguous:
                raise LaunchError(f"{self!r}: {name} is not row-major without gaps; give a contiguous copy of it")
        if x.dtype not in PRECISIONS:
            raise LaunchError(f"{self!r}: x is {x.dtype}; accepted: {', '.join(PRECISIONS)}")
        _check_gradients(self, views)
        if "out" in views:
            _check_out(self, views)
        return batch

    def _check_weights(self, weights: ArrayView) -> None:
        if tuple(weights.shape) != self.pattern.shape:
            raise LaunchError(f"{self!r}: got weights of shape {tuple(weights.shape)}; {self.pattern.shape} is needed")
        if not weights.contiguous:
            raise LaunchError(f"{self!r}: weights are not row-major without gaps; give a contiguous copy of them")

    def _check_kept(self, weights: Weights, device: Device, precision: str) -> None:
        if weights.pattern != self.pattern:
            raise LaunchError(f"{self!r}: these weights were packed for pattern {weights.pattern}")
        if weights.dtype != precision:
            raise LaunchError(f"{self!r}: packed weights are {weights.dtype} and x is {precision}; give both in one precision")
        if (weights.device.kind, weights.device.name) != (device.kind, device.name):
            raise LaunchError(f"{self!r}: packed weights lie on {weights.device.name} and x on {device.name}; pack them for that device")

    def _uploaded(self, found: ArrayView, device: Device) -> Weights:
        host = _host_array(found)
        buffer = device.allocate(host.nbytes)
        device.upload(buffer, host)
        return Weights(self.pattern, found.dtype, device, buffer, None)

    def _weights(self, plan: Plan, views: dict[str, ArrayView], weights: Any) -> Weights:
        """The weights of a call: those given packed, those kept for an unchanged tensor, else anew."""
        if isinstance(weights, Weights):
            return weights
        found = views["weights"]
        if found.version is None or found.device == "host":
            made = Weights(self.pattern, found.dtype, plan.device, found.pointer, found.owner)
            return self._uploaded(found, plan.device) if found.device == "host" else made
        kept = self._kept.get(id(weights))
        if (
            kept
            and kept[0]() is weights
            and kept[1] == found.version
            and kept[2].device is plan.device
            and kept[2].canonical == found.pointer
        ):
            return kept[2]
        made = Weights(self.pattern, found.dtype, plan.device, found.pointer, None)
        key = id(weights)
        self._kept[key] = (weakref.ref(weights, lambda _: self._kept.pop(key, None)), found.version, made)
        return made

    def _device_call(self, plan: Plan, views: dict[str, ArrayView], weights: Any, stream: Stream) -> Call:
        held = self._weights(plan, views, weights)
        packed = held.packed_for(plan, stream)
        x = views["x"]
        if "out" in views:
            out, y = views["out"].owner, views["out"].pointer
        else:
            out = _new_array(x, _y_shape(plan))
            y = view(out, "out").pointer
        extras = tuple(views[name].pointer for name in ("bias", "residual") if name in views)
        arguments = (x.pointer, packed, y, *extras, plan.batch)
        return Call(plan, arguments, stream, out, None, None, (held, packed, *views.values()))

    def _host_call(self, plan: Plan, views: dict[str, ArrayView], weights: Any, stream: Stream) -> Call:
        import numpy as np

        device = plan.device
        packed = self._weights(plan, views, weights).packed_for(plan, stream)
        hosts = {name: _host_array(views[name]) for name in ("x", "bias", "residual") if name in views}
        buffers = {name: device.allocate(host.nbytes) for name, host in hosts.items()}
        if "out" in views:
            out, result = views["out"].owner, _host_array(views["out"])
        else:
            out = result = np.empty(_y_shape(plan), _numpy_dtype(views["x"].dtype))
            if views["x"].kind == "torch":
                out = _new_array(views["x"], _y_shape(plan))
                result = _host_array(view(out, "out"))
        y = device.allocate(result.nbytes)

        def upload() -> None:
            for name, host in hosts.items():
                device.upload(buffers[name], host, stream)

        arguments = (buffers.pop("x"), packed, y, *buffers.values(), plan.batch)
        buffers["x"] = arguments[0]
        return Call(plan, arguments, stream, out, upload, lambda: device.download(result, y, stream), (views,))


class ChainLauncher:
    """One layer: the launchers of its factors, from the one that meets X first to the last one."""

    def __init__(self, *factors: Launcher) -> None:
        self.factors = factors

    def __repr__(self) -> str:
        return f"ChainLauncher({', '.join(map(repr, self.factors))})"

    def __call__(
        self,
        x: Any,
        weights: Sequence[Any],
        *,
        layout: str = "bsf",
        bias: Any = None,
        activation: str = "none",
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Apply every factor; bias, activation and residual belong to the last one. `weights`: one array a factor."""
        if len(weights) != len(self.factors):
            raise LaunchError(f"{self!r}: got {len(weights)} weight arrays; {len(self.factors)} are needed, one a factor")
        for factor, own in zip(self.factors[:-1], weights[:-1], strict=True):
            x = factor(x, own, layout=layout, stream=stream)
        last = self.factors[-1]
        return last(x, weights[-1], layout=layout, bias=bias, activation=activation, residual=residual, out=out, stream=stream)


def use_bundle(path: str) -> None:
    """Serve every launcher of this process from a bundle first: `ksgen.use_bundle("vit.ksb")`."""
    PLANNER.use_bundle(path)


def _y_shape(plan: Plan) -> tuple[int, int]:
    outputs = plan.kernel.pattern.out_features
    return (plan.batch, outputs) if plan.kernel.layout == "bsf" else (outputs, plan.batch)


def _device(place: Any, stream: Stream) -> Device:
    """The device of a place; a CUDA stream that PyCUDA did not make goes to the driver runtime."""
    device = device_for(place)
    if isinstance(stream, int) and stream != 0 and not device.supports_foreign_streams and device.kind == "cuda":
        try:
            return find_device(f"driver:{device.index}")
        except DeviceError as error:
            raise LaunchError(
                f"PyCUDA cannot launch on a stream of another library, and the driver runtime is not there: {error}"
            ) from None
    return device


def _refuse_capture(device: Device, stream: Stream, what: str) -> None:
    if device.kind == "cuda" and device.is_capturing(stream):
        raise LaunchError(
            f"the first use of a kernel {what}, which a CUDA graph cannot record; "
            "before the capture, call launcher.prepare(x, launcher.pack(weights), ...) with the same arguments"
        )


def _check_gradients(launcher: Launcher, views: dict[str, ArrayView]) -> None:
    torch = sys.modules.get("torch")
    if torch is None or not torch.is_grad_enabled():
        return
    for name, given in views.items():
        if given.kind == "torch" and given.owner.requires_grad:
            raise LaunchError(f"{launcher!r}: {name} requires gradients, which launchers do not record; call under torch.no_grad()")


def _check_out(launcher: Launcher, views: dict[str, ArrayView]) -> None:
    """`out` may be the residual itself; any other overlap would be read after it was written."""
    out = views["out"]
    if not out.writeable:
        raise LaunchError(f"{launcher!r}: out is read-only; give an array that can be written to")
    for name, given in views.items():
        if name == "out" or (name == "residual" and given.pointer == out.pointer):
            continue
        if _overlap(given, out):
            raise LaunchError(f"{launcher!r}: out shares memory with {name}; give memory of its own")


def _overlap(one: ArrayView, other: ArrayView) -> bool:
    if not isinstance(one.pointer, int) or not isinstance(other.pointer, int):
        return bool(one.pointer == other.pointer)
    return one.pointer < other.pointer + _bytes(other) and other.pointer < one.pointer + _bytes(one)


def _bytes(array: ArrayView) -> int:
    return prod(array.shape) * PRECISIONS[array.dtype].item_bytes


def _numpy_dtype(name: str) -> Any:
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(name)


def _host_array(found: ArrayView) -> "HostArray":
    """Host memory of any library as a NumPy array, without a copy."""
    import numpy as np

    memory: Any = (ctypes.c_char * _bytes(found)).from_address(found.pointer)
    array: HostArray = np.frombuffer(memory, _numpy_dtype(found.dtype)).reshape(tuple(found.shape))
    return array


def _new_array(like: ArrayView, shape: tuple[int, int]) -> Any:
    """An uninitialised array of the same library, device and precision."""
    if like.kind == "torch":
        return like.owner.new_empty(shape)
    if like.kind == "pycuda":
        return sys.modules["pycuda.gpuarray"].empty(shape, like.owner.dtype)
    if like.kind == "cupy":
        return sys.modules["cupy"].empty(shape, like.owner.dtype)
    if like.kind == "pyopencl":
        return sys.modules["pyopencl.array"].empty(like.owner.queue or like.owner.context, shape, like.owner.dtype)
    raise LaunchError("x tells where its memory is, but not how to make more of it; give out=")
