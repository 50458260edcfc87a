"""y = launcher(x, weights): a pattern's kernels, called on the arrays of NumPy, PyTorch, CuPy, PyCUDA, JAX or pyopencl.

Reads precision, batch and device off the arguments and launches on the caller's stream. Never searches, and records
no gradients: `ksgen.torch` does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from ksgen.devices import find_device
from ksgen.devices.base import Stream
from ksgen.devices.capture import refuse_capture
from ksgen.errors import LaunchError
from ksgen.families import family_named, operand_of
from ksgen.families.signature import weights_of
from ksgen.launch.arrays import ArrayView, common_device, stream_handle, view
from ksgen.launch.checks import check_arrays, check_memory, check_precision, check_weights, check_words, y_shape
from ksgen.launch.fits import Fits, are_aligned
from ksgen.launch.fused import fused_plan
from ksgen.launch.gradient import weight_gradient
from ksgen.launch.memory import host_array, is_whole, new_array
from ksgen.launch.plan import Arguments, Plan
from ksgen.launch.planner import PLANNER
from ksgen.launch.streams import check_context, device_and_stream, stream_on, where_to_work
from ksgen.launch.views import views_of
from ksgen.launch.weights import Rooms, Weights, check_packed, pack_host, pack_in_place, storage_of
from ksgen.launch.workspace import new_workspace
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import checked_batch
from ksgen.values import excerpt, listed
from ksgen.words import counted

__all__ = ["Call", "ChainLauncher", "Launcher", "Weights", "use_bundle"]


@dataclass(eq=False, slots=True)
class Call:
    """A call with all its arguments: `call()` launches once more, on the memory that it was prepared with.

    What the arrays hold by then is what counts, the weights included. One thread at a time.
    """

    plan: Plan
    arguments: Arguments
    stream: Stream
    out: Any
    before: Callable[[], object] | None  # host arrays are uploaded, weights are packed, or packed ones checked
    after: Callable[[], None] | None  # the output comes back to the host
    keep: tuple[Any, ...]  # owners of the memory behind the arguments, and of the stream

    def __repr__(self) -> str:
        return f"Call(Launcher{self.plan.kernel.pattern.shape}: {self.plan})"

    def __reduce__(self) -> NoReturn:
        raise LaunchError(f"{self!r} belongs to this process, where its memory is: copy or send the launcher and the arrays")

    def __call__(self) -> Any:
        if self.before:
            self.before()
        self.plan.launch(self.arguments, self.stream)
        if self.after:
            self.after()
        return self.out


class Launcher:
    """All kernels of one pattern. Precision, batch and device are read off the arguments of a call.

    Weights are packed before every launch, since no array tells for certain that it did not change; what `pack` gave is not.
    A CUDA graph holds where a call's arrays and packed weights are: keep the launcher and the weights as long as the graph.
    One that recorded a call with weights packs them at each replay.
    """

    def __init__(self, a: int, b: int, c: int, d: int, batches: Sequence[int] = ()) -> None:
        self.pattern = Pattern(a, b, c, d)
        if (wanted := listed(batches)) is None:
            raise LaunchError(f"batches={excerpt(batches)}; accepted: a list of batches that get kernels of their own")
        self.batches = frozenset(KernelSpec(self.pattern, batch=batch).batch for batch in wanted)  # with kernels of their own
        self._rooms = Rooms()
        self._fits = Fits(self.pattern, self.batches)
        self._gradient_fits = Fits(self.pattern, self.batches, job="gradient")

    def __repr__(self) -> str:
        return f"Launcher{self.pattern.shape}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and other processes start with nothing kept: plans and packed weights belong to this one."""
        return Launcher, (*self.pattern.shape, tuple(self.batches))

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
        precision: str | None = None,
    ) -> Any:
        """Y = X K^T, then bias, activation and residual. Host arrays return when it is done; others in stream order.

        `x` is (batch, a*c*d) in layout "bsf" and (a*c*d, batch) in "bsl"; `weights` is (a, b, c, d), or what `pack` gave.
        Without a `stream` it is the one that the arrays work on: PyTorch's and CuPy's current one. The precision is the
        arrays' own; float32 arrays may ask for "tf32x3", "tf32" or "fp16x3", which multiply on tensor cores; what
        overflows float16 in the last is NaN, and an error for host arrays.
        """
        return self._call(x, weights, layout, bias, activation, residual, out, stream, precision)()

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
        precision: str | None = None,
    ) -> Call:
        """Everything but the launch: checks, builds, loads, packs. The `Call` that it returns does the rest, and keeps the
        memory that its launches work in: keep it as long as a graph that recorded it."""
        call = self._call(x, weights, layout, bias, activation, residual, out, stream, precision)
        given = (x, weights, bias, residual, call.out)
        found = [view(array) for array in given if array is not None and not isinstance(array, Weights)]
        # A tensor may be given other memory before the launch, and a stream ends with its object.
        call.keep += (stream, *map(storage_of, found))
        return call

    def gradient(
        self, x: Any, grad_y: Any, *, layout: str = "bsf", out: Any = None, stream: Any = None, precision: str | None = None
    ) -> Any:
        """The gradient of the weights, an array (a, b, c, d) like x, from x and the gradient of y = launcher(x, weights).

        Sums are float32 at least, and added in one order: the same arrays give the same bits. Arrays, streams and precisions
        are as in a call.
        """
        return weight_gradient(self, self._gradient_fits, x, grad_y, layout, out, stream, precision)

    def pack(self, weights: Any, *, device: str | None = None, stream: Any = None) -> Weights:
        """Put weights on their device once and for all. Host arrays go to `device`, else to `KSGEN_DEVICE`, else the best.

        They must not change while what this gives is used; a write that PyTorch counted is refused at each use, but it counts
        few of them. `stream` is where the weights were written, where that is not the stream that the array works on.
        """
        handle = stream_handle(stream)
        found = view(weights, "weights", handle)
        check_weights(self, self.pattern, found)
        if found.device == "host":
            return pack_host(found, self.pattern, find_device(device))
        if device is not None:
            raise LaunchError(f"{self!r}: device={device!r} says where host arrays go; these weights lie on a device already")
        check_memory(self, {"x": found})
        where, on = device_and_stream(self, found.device, found.stream if stream is None else stream)
        check_context(self, where, {"weights": found})
        return pack_in_place(found, self.pattern, where, on)

    def explain(
        self, batch: int, *, precision: str = "float32", layout: str = "bsf", epilogue: Epilogue | None = None, device: str | None = None,
        job: str = "multiply",
    ) -> str:  # fmt: skip
        """Which family and constants serve a call, or with `job="gradient"` one of `gradient`, on which device, and why."""
        batch = checked_batch(batch)
        epilogue = Epilogue() if epilogue is None else epilogue
        KernelSpec(self.pattern, precision, layout, epilogue, batch, job)  # refuses what cannot be before a device is opened
        where, fits = find_device(device), self._gradient_fits if job == "gradient" else self._fits
        kernel = fits.kernel(precision, layout, epilogue, batch)
        choice = PLANNER.choice(where, kernel, batch)
        family = f"{choice.family} ({family_named(choice.family).why})"
        return f"{kernel.name} at batch {batch} on {where.name}: {family}, {choice.constants}; {choice.why}"

    def _call(
        self, x: Any, weights: Any, layout: str, bias: Any, activation: str, residual: Any, out: Any, stream: Any,
        precision: str | None,
    ) -> Call:  # fmt: skip
        packed = weights if isinstance(weights, Weights) else None
        arrays = {"x": x} if packed else {"x": x, "weights": weights}
        for name, array in (("bias", bias), ("residual", residual), ("out", out)):
            if array is not None:
                arrays[name] = array
        views = views_of(arrays, stream)
        fit = self._fits.find(self, layout, activation, views, precision)
        check_memory(self, views)
        if fit.place == "host" and packed and (stream is None or packed.device.kind == "cuda"):
            device, on = stream_on(self, packed.device, stream)
        else:
            device, on, views = where_to_work(self, fit.place, arrays, views, stream)
        check_context(self, device, views)
        if packed:
            check_packed(self, packed, self.pattern, device, views["x"].dtype)
        plan = self._fits.plan(fit, device, on, fit.place == "host" or are_aligned(views))
        if fit.place == "host" and device.shares_host and all(is_whole(found) for found in views.values()):
            return self._shared_call(plan, views, weights, out, on)
        if fit.place == "host":
            return self._host_call(plan, views, packed, out, on)
        return self._device_call(plan, views, weights, out, on)

    def _device_call(self, plan: Plan, views: dict[str, ArrayView], weights: Any, out: Any, stream: Stream) -> Call:
        before: Callable[[], object]
        if isinstance(weights, Weights):
            packed, room, before = weights.packed_for(plan, stream), None, weights.check
        else:
            packed, room = self._rooms.find(weights, views["weights"], plan, stream)
            before = partial(plan.pack, views["weights"].pointer, stream, packed)
        if out is None:
            if views["x"].kind != "torch":  # which keeps memory for graphs
                refuse_capture(plan.device, stream, "allocates its output", "give out=")
            handle = None if plan.device.kind == "opencl" else stream_handle(stream)
            out = new_array(views["x"], y_shape(self.pattern, plan.kernel.layout, plan.batch), handle)
            views["out"] = view(out, "out")
        workspace = new_workspace(plan, views["x"], stream, "record the call that launcher.prepare(...) gave before the capture")
        operands = {name: found.pointer for name, found in views.items()}
        operands |= {"weights": packed, plan.result: operands["out"], "workspace": workspace.pointer}
        return Call(plan, plan.arguments(operands), stream, out, before, None, (views, weights, room, workspace))

    def _shared_call(self, plan: Plan, views: dict[str, ArrayView], weights: Any, out: Any, stream: Stream) -> Call:
        """On arrays of the host, where they lie: on a device that shares its memory."""
        device = plan.device
        before: Callable[[], object]
        if isinstance(weights, Weights):
            packed, room, before = weights.packed_for(plan, stream), None, weights.check
        else:
            packed, room = self._rooms.find(weights, views["weights"], plan, stream)
            before = partial(plan.pack, device.shared(views["weights"].pointer), stream, packed)
        if out is None:
            out = new_array(views["x"], y_shape(self.pattern, plan.kernel.layout, plan.batch))
            views["out"] = view(out, "out")
        operands = {name: device.shared(found.pointer) for name, found in views.items()}
        operands |= {"weights": packed, plan.result: operands["out"], "workspace": plan.workspace(stream)}
        return Call(plan, plan.arguments(operands), stream, out, before, partial(device.synchronize, stream), (views, weights, room))

    def _host_call(self, plan: Plan, views: dict[str, ArrayView], packed: Weights | None, out: Any, stream: Stream) -> Call:
        device = plan.device
        refuse_capture(device, stream, "copies arrays from the host", "give arrays that lie on the device")
        if out is None:
            out = new_array(views["x"], y_shape(self.pattern, plan.kernel.layout, plan.batch))
            views["out"] = view(out, "out")
        hosts = {name: host_array(found) for name, found in views.items()}
        buffers = {name: device.allocate(host.nbytes) for name, host in hosts.items()}
        result = hosts.pop("out")
        at = packed.packed_for(plan, stream) if packed else device.allocate(plan.packed_bytes)

        def send() -> None:
            for name, host in hosts.items():
                device.upload(buffers[name], host, stream)
            if packed:
                packed.check()
            else:
                plan.pack(buffers["weights"], stream, into=at)

        operands = buffers | {"weights": at, plan.result: buffers["out"], "workspace": plan.workspace(stream)}

        def receive() -> None:
            device.download(result, buffers["out"], stream)
            check_range(self, plan, hosts, result)

        return Call(plan, plan.arguments(operands), stream, out, send, receive, (packed, views))


class ChainLauncher:
    """One layer: the launchers of its factors, from the one that meets X first to the last one."""

    def __init__(self, *factors: Launcher) -> None:
        if not factors or not all(isinstance(factor, Launcher) for factor in factors):
            raise LaunchError(f"factors={excerpt(factors)}; accepted: Launchers, one an argument, from the one that meets X first")
        self.chain = Chain(tuple(factor.pattern for factor in factors))  # refuses factors that do not fit each other
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
        precision: str | None = None,
    ) -> Any:
        """Apply every factor; bias, activation and residual belong to the last one. `weights`: one array a factor."""
        if (own := listed(weights)) is None:
            raise LaunchError(f"{self!r}: weights={excerpt(weights)}; accepted: a list of arrays, one a factor")
        if len(own) != len(self.factors):
            raise LaunchError(f"{self!r}: got {counted(len(own), 'weight array')}; {len(self.factors)} are needed, one a factor")
        last_only = {"bias": bias, "residual": residual, "out": out}
        self._check(x, own, layout, activation, precision, {name: array for name, array in last_only.items() if array is not None})
        if fused := self._fused(x, own, layout, activation, last_only, stream, precision):
            return fused()
        for factor, weights_of_it in zip(self.factors[:-1], own[:-1], strict=True):
            x = factor(x, weights_of_it, layout=layout, stream=stream, precision=precision)
        last_only |= {"stream": stream, "precision": precision}
        return self.factors[-1](x, own[-1], layout=layout, activation=activation, **last_only)

    def _fused(
        self, x: Any, weights: Sequence[Any], layout: str, activation: str, last_only: dict[str, Any], stream: Any, precision: str | None
    ) -> Call | None:
        """All factors in one launch, on arrays of the host where they lie; None where that is not to be had."""
        views = views_of({"x": x} | {name: array for name, array in last_only.items() if array is not None}, stream)
        own_weights = [None if isinstance(own, Weights) else view(own, "weights") for own in weights]
        given = [*views.values(), *filter(None, own_weights)]
        if any(found.device != "host" or not is_whole(found) for found in given):
            return None
        device, on = device_and_stream(self, "host", stream)
        batch = views["x"].shape[0 if layout == "bsf" else 1]
        epilogue = ("bias" in views, activation, "residual" in views)
        fused = fused_plan(device, self.chain, precision or views["x"].dtype, layout, epilogue, batch)
        if fused is None:
            return None
        check_memory(self, views | {f"weights of factor {number}": found for number, found in enumerate(own_weights, start=1) if found})
        packed, rooms, packs = [], [], []
        for factor, plan, own, found in zip(self.factors, fused.factors, weights, own_weights, strict=True):
            if found is None:
                check_packed(self, own, factor.pattern, device, views["x"].dtype)
                packed.append(own.packed_for(plan, on))
                packs.append(own.check)
            else:
                at, room = factor._rooms.find(own, found, plan, on)
                packed.append(at)
                rooms.append(room)
                packs.append(partial(plan.pack, device.shared(found.pointer), on, at))
        out = last_only["out"]
        if out is None:
            out = new_array(views["x"], y_shape(self.chain[-1], layout, batch))
            views["out"] = view(out, "out")
        operands = {name: device.shared(found.pointer) for name, found in views.items()}
        operands |= dict(zip(weights_of(fused.whole.kernel), packed, strict=True))
        operands |= {fused.whole.result: operands["out"], "workspace": fused.whole.workspace(on)}

        def pack_all() -> None:
            for pack in packs:
                pack()

        return Call(
            fused.whole,
            fused.whole.arguments(operands),
            on,
            out,
            pack_all,
            partial(device.synchronize, on),
            (views, weights, own_weights, rooms),
        )

    def _check(
        self, x: Any, weights: Sequence[Any], layout: str, activation: str, precision: str | None, last_only: dict[str, Any]
    ) -> None:
        """Refuse what any factor would refuse before the first one is launched."""
        between = view(x, "x")
        check_precision(self, precision, between.dtype)
        check_words(self, layout, activation)
        for number, (factor, own) in enumerate(zip(self.factors, weights, strict=True), start=1):
            views = {"x": between}
            if not isinstance(own, Weights):
                views["weights"] = view(own, "weights")
            if number == len(self.factors):
                views |= {name: view(array, name) for name, array in last_only.items()}
            batch = check_arrays(factor, factor.pattern, layout, views)
            common_device(views)
            between = between._replace(shape=y_shape(factor.pattern, layout, batch))


def check_range(caller: object, plan: Plan, given: Mapping[str, Any], result: Any) -> None:
    """Raise `LaunchError` where float16 products overflowed: an output of finite host arrays is not finite."""
    if plan.kernel.precision != "fp16x3":
        return
    import numpy as np

    is_split = operand_of(plan.kernel, plan.choice.constants) is not None
    if is_split and not np.isfinite(result).all() and all(np.isfinite(array).all() for array in given.values()):
        largest = ", ".join(f"{name} up to {np.abs(array).max():.3g}" for name, array in given.items() if name in ("x", "weights"))
        raise LaunchError(f"{caller!r}: fp16x3 takes |x| up to 65504 and |weights| up to 63.9; got {largest}; take tf32x3")


def use_bundle(path: str) -> None:
    """Serve every launcher of this process from a bundle first: `ksgen.use_bundle("vit.ksb")`."""
    PLANNER.use_bundle(path)
