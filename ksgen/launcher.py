"""y = launcher(x, weights): a pattern's kernels, called on the arrays of NumPy, PyTorch, CuPy, PyCUDA, JAX or pyopencl.

Reads precision, batch and device off the arguments and launches on the caller's stream. Never searches, and leaves
gradients to `ksgen.torch`.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from ksgen.arguments import check_arrays, check_weights, check_words, y_shape
from ksgen.arrays import ArrayView, common_device, stream_handle, view
from ksgen.devices import device_for, find_device
from ksgen.devices.base import Device, Stream
from ksgen.errors import DeviceError, LaunchError
from ksgen.memory import host_array, new_array
from ksgen.pattern import Pattern
from ksgen.plan import PLANNER, Plan
from ksgen.spec import Epilogue, KernelSpec
from ksgen.weights import KeptWeights, Weights, check_kept, refuse_capture, upload

__all__ = ["Call", "ChainLauncher", "Launcher", "Weights", "use_bundle"]


@dataclass(frozen=True)
class Call:
    """A call with all its arguments: `call()` launches once more, on the memory that it was prepared with."""

    plan: Plan
    arguments: tuple[Any, ...]
    stream: Stream
    out: Any
    before: Callable[[], None] | None  # host arrays are uploaded
    after: Callable[[], None] | None  # and the output comes back
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
        self._kept = KeptWeights()
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
        """Y = X K^T, then bias, activation and residual. Host arrays return when it is done; others in stream order.

        `x` is (batch, a*c*d) in layout "bsf" and (a*c*d, batch) in "bsl"; `weights` is (a, b, c, d), or what `pack` gave.
        """
        call = self.prepare(
            x, weights, layout=layout, bias=bias, activation=activation, residual=residual, out=out, stream=stream
        )  # fmt: skip
        return call()

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
        packed = isinstance(weights, Weights)
        given = {"x": x, "weights": None if packed else weights, "bias": bias, "residual": residual, "out": out}
        views = {name: view(array, name, handle) for name, array in given.items() if array is not None}
        check_words(self, layout, activation)
        batch = check_arrays(self, self.pattern, layout, views)
        place = common_device(views)
        if stream is None:
            stream = handle = next((found.stream for found in views.values() if found.stream is not None), None)
        device, stream = _device_and_stream(place, stream, handle)
        if packed:
            if place == "host":
                device = weights.device
            check_kept(self, weights, self.pattern, device, views["x"].dtype)
        plan = self._plan(device, views["x"].dtype, layout, (bias is not None, activation, residual is not None), batch, stream)
        if place == "host":
            return self._host_call(plan, views, weights, out, stream)
        return self._device_call(plan, views, weights, out, stream)

    def pack(self, weights: Any, *, device: str | None = None) -> Weights:
        """Put weights on their device once and for all. Host arrays go to `device`, else to `KSGEN_DEVICE`, else the best.

        PyTorch tensors on a GPU need no packing by hand: a launcher keeps theirs, and sees when they were written to.
        """
        found = view(weights, "weights")
        check_weights(self, self.pattern, found)
        if found.device == "host":
            return upload(found, self.pattern, find_device(device))
        return Weights(self.pattern, found.dtype, device_for(found.device), found.pointer, found.owner)

    def explain(
        self, batch: int, *, precision: str = "float32", layout: str = "bsf", epilogue: Epilogue | None = None, device: str | None = None
    ) -> str:
        """Which family and constants serve a call, on which device, and why."""
        where = find_device(device)
        kernel = self._kernel(precision, layout, epilogue or Epilogue(), batch)
        choice = PLANNER.choice(where, kernel, batch)
        return f"{kernel.name} at batch {batch} on {where.name}: {choice.family} ({choice.constants}); {choice.why}"

    def _kernel(self, precision: str, layout: str, epilogue: Epilogue, batch: int) -> KernelSpec:
        return KernelSpec(self.pattern, precision, layout, epilogue, batch if batch in self.batches else None)

    def _plan(self, device: Device, precision: str, layout: str, epilogue: tuple[bool, str, bool], batch: int, stream: Stream) -> Plan:
        key = (id(device), PLANNER.generation, precision, layout, epilogue, batch)
        plan = self._plans.get(key)
        if plan is None:
            kernel = self._kernel(precision, layout, Epilogue(*epilogue), batch)
            if not PLANNER.has(device, kernel, batch):
                refuse_capture(device, stream, "builds and loads it")
            plan = self._plans[key] = PLANNER.plan(device, kernel, batch)
        return plan

    def _weights(self, plan: Plan, found: ArrayView, weights: Any, stream: Stream) -> tuple[Weights, Any]:
        """The weights of a call on a device, and their packed form: kept, or packed for this call alone."""
        if found.version is not None:
            kept = self._kept.of(weights, found, self.pattern, plan.device)
            return kept, kept.packed_for(plan, stream)
        refuse_capture(plan.device, stream, "whose weights cannot tell that they changed packs them at every call")
        passing = Weights(self.pattern, found.dtype, plan.device, found.pointer, found.owner)
        return passing, plan.pack(found.pointer, stream)

    def _device_call(self, plan: Plan, views: dict[str, ArrayView], weights: Any, out: Any, stream: Stream) -> Call:
        if isinstance(weights, Weights):
            held, packed = weights, weights.packed_for(plan, stream)
        else:
            held, packed = self._weights(plan, views["weights"], weights, stream)
        if out is None:
            out = new_array(views["x"], y_shape(self.pattern, plan.kernel.layout, plan.batch), stream)
            views["out"] = view(out, "out")
        extras = [views[name].pointer for name in ("bias", "residual") if name in views]
        arguments = (views["x"].pointer, packed, views["out"].pointer, *extras, plan.batch)
        return Call(plan, arguments, stream, out, None, None, (held, packed, views))

    def _host_call(self, plan: Plan, views: dict[str, ArrayView], weights: Any, out: Any, stream: Stream) -> Call:
        device = plan.device
        held = weights if isinstance(weights, Weights) else upload(views["weights"], self.pattern, device)
        packed = held.packed_for(plan, stream)
        if out is None:
            out = new_array(views["x"], y_shape(self.pattern, plan.kernel.layout, plan.batch))
            views["out"] = view(out, "out")
        result = host_array(views["out"])
        hosts = [host_array(views[name]) for name in ("x", "bias", "residual") if name in views]
        buffers = [device.allocate(host.nbytes) for host in hosts]
        y = device.allocate(result.nbytes)

        def send() -> None:
            for host, buffer in zip(hosts, buffers, strict=True):
                device.upload(buffer, host, stream)

        arguments = (buffers[0], packed, y, *buffers[1:], plan.batch)
        return Call(plan, arguments, stream, out, send, lambda: device.download(result, y, stream), (held, views))


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


def _device_and_stream(place: Any, stream: Any, handle: Stream) -> tuple[Device, Stream]:
    """The device of a place, and the stream as that device takes it.

    PyCUDA launches on the streams that it made itself; another library's goes to the driver runtime, by its handle.
    """
    device = device_for(place)
    if device.kind == "opencl" or device.supports_foreign_streams or not handle:
        return device, handle
    if type(stream).__module__.startswith("pycuda."):
        return device, stream
    try:
        return find_device(f"driver:{device.index}"), handle
    except DeviceError as error:
        raise LaunchError(f"PyCUDA cannot launch on a stream of another library, and the driver runtime is not there: {error}") from None
