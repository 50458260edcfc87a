"""Launcher of a pattern's kernels: y = launcher(x, weights).

Arrays come from NumPy, PyTorch, CuPy, PyCUDA, JAX or pyopencl. Precision, batch and device follow from the arguments;
launches go to the caller's stream. Never searches, and records no gradients: `ksgen.torch` does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from ksgen.devices import find_device
from ksgen.devices.base import Device, Stream
from ksgen.errors import LaunchError
from ksgen.families import family_named
from ksgen.launch.arrays import ArrayView, CallOptions, stream_handle, view, views_of
from ksgen.launch.call import Call
from ksgen.launch.checks import ArgumentChecks, are_aligned, check_memory, check_weights
from ksgen.launch.choice import expectation, limits_of
from ksgen.launch.memory import is_whole
from ksgen.launch.places import on_device, on_host, on_shared
from ksgen.launch.planner import PLANNER, plan_for
from ksgen.launch.stated import ADDED, check_storage, checked, docstring, explained, operand, options_of_call
from ksgen.launch.streams import device_and_stream, in_their_context, where_to_work
from ksgen.launch.weights import (
    PackBuffers,
    Weights,
    check_packed,
    check_stored,
    pack_host,
    pack_in_place,
    pack_quantized,
    packed_in,
    storage_of,
)
from ksgen.pattern import Chain, Pattern
from ksgen.quantized import Quantized
from ksgen.spec import Activation, ByteStorage, Epilogue, Job, KernelSpec, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import Stated, StatedOptions, checked_batch, is_transposed, is_word
from ksgen.spec.storage import BYTE_TYPES, SAME, Same
from ksgen.values import excerpt, listed


class Launcher:
    """Multiply by Kronecker-sparse matrices K of one pattern: y = launcher(x, weights) computes Y = X K^T.

    A launcher holds all kernels of its pattern. The arguments of a call decide precision, batch size and device. A
    kernel is generated, compiled and cached at its first use. Later calls reuse it.

    Weights are packed before every launch, because no array reveals reliably that it is unchanged. Results of `pack`
    are not packed again. A CUDA graph stores the addresses of a call's arrays and packed weights: keep the launcher and
    the weights as long as the graph. A recorded call with unpacked weights packs them at each replay.

    Args:
        a: First number of the pattern (a, b, c, d), or the full pattern: a `Pattern`, four numbers, or text such as
            "1,192,48,2".
        b: Second number. Omit b, c and d if `a` is a full pattern.
        c: Third number.
        d: Fourth number.
        batches: Batch sizes with kernels of their own. Other sizes share one kernel.
        **stated: Options of calls that name no others, and required operands.

            - `layout`: "bsf" (default): x is (batch, in_features). "bsl": x is (in_features, batch).
            - `precision`: such as "float16" or "tf32x3". None (default): that of the arrays.
            - `activation`: "none" (default), "relu", "gelu", "gelu_tanh" or "silu".
            - `bias`, `residual`: True requires this operand in each call. Default: False.
            - `weights`: storage "int8", "e4m3", "e5m2" or "bfloat16" of `ksgen.quantize`. Default: "same" as y.
            - `inputs`: storage "int8", "e4m3" or "e5m2" of x. Default: "same" as y.

    Raises:
        PatternError: The pattern is not four whole numbers of at least 1, or is too large.
        SpecError: An option is unknown, or two options exclude each other.
        LaunchError: `batches` is not a list.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> multiply = ksgen.Launcher(1, 3, 2, 2)
        >>> x = np.ones((1, 4), np.float32)
        >>> weights = np.ones((1, 3, 2, 2), np.float32)
        >>> multiply(x, weights)
        array([[2., 2., 2., 2., 2., 2.]], dtype=float32)

        Options that all calls share are stated once. The launcher's docstring then lists them:

        >>> print(ksgen.Launcher("1,3,2,2", activation="relu", bias=True).__doc__)
        Multiply x by 1,3,2,2, 4 to 6 features.
        <BLANKLINE>
        A call takes x, weights (1, 3, 2, 2), bias (or bias=False).
        Unless it names others, its options are: layout bsf, activation relu, precision that of the arrays.
    """

    def __init__(
        self,
        a: Any,
        b: int | None = None,
        c: int | None = None,
        d: int | None = None,
        batches: Sequence[int] = (),
        **stated: Unpack[Stated],
    ) -> None:
        self.pattern = Pattern.read(a) if b is c is d is None else Pattern(a, b, c, d)  # type: ignore[arg-type]
        self.stated = checked(Chain((self.pattern,)), StatedOptions(**stated))
        if (wanted := listed(batches)) is None:
            raise LaunchError(f"batches={excerpt(batches)}; accepted: a list of batches that get kernels of their own")
        self.batches = frozenset(map(checked_batch, wanted))  # batch sizes with their own kernels
        self.buffers = PackBuffers()
        self._quantized: WeakKeyDictionary[Quantized, Weights] = WeakKeyDictionary()  # packed once, for all calls
        self._checks = ArgumentChecks(self.pattern, self.batches)
        self._gradient_checks = ArgumentChecks(self.pattern, self.batches, job="gradient")
        self.__doc__ = docstring((Chain((self.pattern,)),), self.stated)

    def __repr__(self) -> str:
        more = "".join(f", {name}={value!r}" for name, value in self.stated.non_defaults.items())
        return f"Launcher({', '.join(map(str, self.pattern.shape))}{more})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without caches: plans and packed weights belong to this process."""
        return partial(Launcher, *self.pattern.shape, sorted(self.batches), **self.stated.non_defaults), ()

    def _stating(self, stated: StatedOptions) -> "Launcher":
        """Launcher of the same kernels that states these options."""
        return self if stated == self.stated else Launcher(self.pattern, batches=sorted(self.batches), **stated.non_defaults)

    def __call__(
        self,
        x: Any,
        weights: Any,
        *,
        layout: Layout | None = None,
        bias: Any = None,
        activation: Activation | None = None,
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
        precision: PrecisionName | None = None,
        out_layout: Layout | None = None,
    ) -> Any:
        """Compute Y = X K^T, then add the bias, apply the activation and add the residual.

        The arrays' dtype decides the precision. Arrays are those of NumPy, PyTorch, CuPy, PyCUDA, JAX or pyopencl, all
        in one place and of one dtype.

        Args:
            x: Input, (batch, a*c*d) in layout "bsf", or (a*c*d, batch) in "bsl".
            weights: Free values of K, an array (a, b, c, d); or a result of `pack` or `ksgen.quantize`. Quantized
                weights are packed once. Weights with an `x_scale` take x in eight bits: a result of
                `ksgen.quantize_inputs`, or its bits as uint8. The dtype of y is then the `precision`, or that of out,
                bias or residual, or float32.
            layout: Layout of x and y: "bsf" or "bsl". None: the stated one, "bsf" by default.
            bias: Array (a*b*d,) that is added before the activation. False omits a stated bias.
            activation: "none", "relu", "gelu", "gelu_tanh" or "silu". None: the stated one, "none" by default.
            residual: Array like y that is added after the activation. False omits a stated residual.
            out: Array for y. None: a new one.
            stream: CUDA stream or pyopencl queue to launch on. None: the stream of the arrays, which is the current one
                for PyTorch and CuPy.
            precision: Arithmetic of the products. None: the stated one, else that of the arrays. float32 arrays accept
                "tf32x3", "tf32" and "fp16x3" for tensor cores, and "bf16x6" for a processor's matrix tiles. complex64
                arrays accept "c64_tf32x3" for tensor cores. In "fp16x3", an overflow of float16 is NaN, and an error
                for host arrays.
            out_layout: Layout of y. Only `layout` is accepted here; `ChainLauncher` transposes.

        Returns:
            y of shape (batch, a*b*d) in "bsf", or (a*b*d, batch) in "bsl", an array of the same library as x. Host
            arrays are complete; other arrays are complete in stream order.

        Raises:
            LaunchError: Arguments do not fit the pattern or each other, or a stated operand is missing.
            DeviceError: No device can run the call.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> multiply = ksgen.Launcher(1, 3, 2, 2)
            >>> x = np.array([[1, 2, 3, 4]], np.float32)
            >>> weights = np.ones((1, 3, 2, 2), np.float32)
            >>> multiply(x, weights)
            array([[4., 6., 4., 6., 4., 6.]], dtype=float32)
            >>> multiply(x[:, :3], weights)
            Traceback (most recent call last):
            ...
            ksgen.errors.LaunchError: Launcher(1, 3, 2, 2): got x of shape (1, 3); ...
        """
        options = options_of_call(self.stated, layout, activation, stream, precision)
        self._check_layouts(options.layout, out_layout)
        return self._prepared(x, weights, bias, residual, out, options)()

    def prepare(
        self,
        x: Any,
        weights: Any,
        *,
        layout: Layout | None = None,
        bias: Any = None,
        activation: Activation | None = None,
        residual: Any = None,
        out: Any = None,
        stream: Any = None,
        precision: PrecisionName | None = None,
        out_layout: Layout | None = None,
    ) -> Call:
        """Do everything but the launch: check, build, load and pack.

        Use it for repeated calls on the same arrays, and before a CUDA graph records the call. The returned `Call` owns
        the memory that its launches use. Keep it as long as a graph that recorded it.

        Args:
            x: Input, like in a call. Launches read its contents at that time.
            weights: Weights, like in a call.
            layout: Layout of x and y, like in a call.
            bias: Array (a*b*d,), or None.
            activation: Activation, like in a call.
            residual: Array like y, or None.
            out: Array for y. None: a new one, which every launch writes again.
            stream: Stream of the launches. None: the stream of the arrays.
            precision: Arithmetic, like in a call.
            out_layout: Layout of y. Only `layout` is accepted.

        Returns:
            A `Call`: `call()` launches and returns y. It is not thread-safe.

        Raises:
            LaunchError: Arguments do not fit the pattern or each other.
            DeviceError: No device can run the call.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> x, weights = np.ones((1, 4), np.float32), np.ones((1, 3, 2, 2), np.float32)
            >>> call = ksgen.Launcher(1, 3, 2, 2).prepare(x, weights)
            >>> call()
            array([[2., 2., 2., 2., 2., 2.]], dtype=float32)
            >>> x *= 3
            >>> call()
            array([[6., 6., 6., 6., 6., 6.]], dtype=float32)
        """
        options = options_of_call(self.stated, layout, activation, stream, precision)
        self._check_layouts(options.layout, out_layout)
        call = self._prepared(x, weights, bias, residual, out, options)
        given = [each for each in (weights, bias, residual, call.out) if each is not None and each is not False]
        found = [view(x, "x"), *[view(array) for array in given if not isinstance(array, Weights | Quantized)]]
        # A tensor may get other memory before the launch, and a stream dies with its object.
        call.keep += (stream, *map(storage_of, found))
        return call

    def _check_layouts(self, layout: str, out_layout: str | None) -> None:
        if is_transposed(layout, out_layout):
            other = f"ChainLauncher({self!r}), which gives y in another layout than x"
            raise LaunchError(f"{self!r}: out_layout={excerpt(out_layout)} with layout={excerpt(layout)}; accepted: {other}")

    def gradient(
        self,
        x: Any,
        grad_y: Any,
        *,
        layout: Layout | None = None,
        out: Any = None,
        stream: Any = None,
        precision: PrecisionName | None = None,
    ) -> Any:
        """Compute the gradient of the weights of y = launcher(x, weights).

        Sums are in float32 at least and in a fixed order: the same arrays give the same bits. For complex numbers, x is
        conjugated, like in PyTorch.

        Args:
            x: Input of the product, (batch, a*c*d) in layout "bsf", or (a*c*d, batch) in "bsl".
            grad_y: Gradient of y, (batch, a*b*d) or (a*b*d, batch), of the dtype of x.
            layout: Layout of x and grad_y: "bsf" or "bsl". None: the stated one.
            out: Array (a, b, c, d) for the result. None: a new one.
            stream: Stream to launch on. None: the stream of the arrays.
            precision: Arithmetic of the products, like in a call.

        Returns:
            The gradient, an array (a, b, c, d) of the same library and dtype as x.

        Raises:
            LaunchError: Arguments do not fit the pattern or each other.
            DeviceError: No device can run the call.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> x, grad_y = np.ones((5, 4), np.float32), np.ones((5, 6), np.float32)
            >>> gradient = ksgen.Launcher(1, 3, 2, 2).gradient(x, grad_y)
            >>> gradient.shape, float(gradient[0, 0, 0, 0])
            ((1, 3, 2, 2), 5.0)
        """
        arrays = {"x": x, "grad_y": grad_y} | ({} if out is None else {"out": out})
        return prepared(
            self, self._gradient_checks, self.buffers, arrays, options_of_call(self.stated, layout, "none", stream, precision)
        )()

    def pack(self, weights: Any, *, device: str | None = None, stream: Any = None) -> Weights:
        """Pack weights on their device once, for many calls.

        Kernels read weights in an order of their own. The given array must not change while the result is used. A write
        that PyTorch counted is refused at each use, but it counts few of them. Quantized weights stay in eight bits.

        Args:
            weights: Array (a, b, c, d), or a result of `ksgen.quantize`.
            device: Device for host arrays, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            stream: Stream that wrote the weights, if the array works on another one.

        Returns:
            `Weights`, which calls accept in place of the array.

        Raises:
            LaunchError: The weights have another shape, or `device` is given for weights on a device.
            DeviceError: The device does not exist.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> multiply = ksgen.Launcher(1, 3, 2, 2)
            >>> packed = multiply.pack(np.ones((1, 3, 2, 2), np.float32))
            >>> multiply(np.ones((1, 4), np.float32), packed)
            array([[2., 2., 2., 2., 2., 2.]], dtype=float32)
        """
        handle = stream_handle(stream)
        if isinstance(weights, Quantized):
            return self._pack_quantized(weights, device, stream)
        found = view(weights, "weights", handle)
        check_weights(self, self.pattern, found)
        if found.device == "host":
            return pack_host(found, self.pattern, find_device(device))
        where, on = self._where_they_lie(found, device, stream)
        return pack_in_place(found, self.pattern, where, on)

    def _pack_quantized(self, weights: Quantized, device: str | None, stream: Any) -> Weights:
        if weights.pattern != self.pattern:
            raise LaunchError(f"{self!r}: got {weights!r}; weights of {self.pattern} are needed")
        found = view(weights.scale, "weights.scale", stream_handle(stream))
        if found.device == "host":
            return pack_quantized(weights, find_device(device))
        where, on = self._where_they_lie(found, device, stream)
        return pack_quantized(weights, where, found, on)

    def _where_they_lie(self, found: ArrayView, device: str | None, stream: Any) -> tuple[Device, Stream]:
        """Device of weights on a device, and a stream on which they are complete."""
        if device is not None:
            raise LaunchError(f"{self!r}: device={device!r} says where host arrays go; these weights lie on a device already")
        check_memory(self, {"x": found})
        where, on = device_and_stream(self, found.device, found.stream if stream is None else stream)
        return in_their_context(self, where, on, {"weights": found}), on

    def _taken(self, weights: Any) -> Any:
        """Weights in the form that a call accepts.

        Quantized ones are packed at their first call; others are unchanged.
        """
        if not isinstance(weights, Quantized):
            return weights
        packed = self._quantized.get(weights)
        if packed is None or not packed.device.is_open:
            packed = self._quantized[weights] = self.pack(weights)
        return packed

    def explain(
        self,
        batch: int,
        *,
        precision: PrecisionName | None = None,
        layout: Layout | None = None,
        epilogue: Epilogue | None = None,
        device: str | None = None,
        job: Job = "multiply",
        weights: WeightStorage | Same | None = None,
        inputs: ByteStorage | Same | None = None,
    ) -> str:
        """Describe which family and constants serve a call on a device, and why.

        None stands for the stated option. Without a stated option it stands for float32, "bsf" and unquantized arrays.

        Args:
            batch: Batch size of the call.
            precision: Arithmetic, such as "float16".
            layout: "bsf" or "bsl".
            epilogue: `ksgen.spec.Epilogue` with bias, activation and residual.
            device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            job: "multiply" for calls, or "gradient" for calls of `gradient`.
            weights: Storage of the weights: "same", "int8", "e4m3", "e5m2" or "bfloat16".
            inputs: Storage of x: "same", "int8", "e4m3" or "e5m2".

        Returns:
            One line: kernel, batch size, device, family, constants and reason.

        Raises:
            SpecError: An option is unknown, or two options exclude each other.
            DeviceError: The device does not exist.

        Examples:
            >>> import ksgen
            >>> print(ksgen.Launcher(1, 3, 2, 2).explain(batch=4))
            ks_1x3x2x2_float32_bsf at batch 4 on ...: vector ...
        """
        batch = checked_batch(batch)
        own = self.stated if is_word(job, ("multiply",)) else StatedOptions(self.stated.layout, self.stated.precision)
        precision, layout, epilogue, weights, inputs = explained(own, precision, layout, epilogue, weights, inputs)
        # Invalid combinations are refused before a device is opened.
        KernelSpec(self.pattern, precision, layout, epilogue, batch, job, weights=weights, inputs=inputs)
        where, checks = find_device(device), self._gradient_checks if job == "gradient" else self._checks
        kernel = checks.kernel(precision, layout, epilogue, batch, weights, inputs)
        choice = PLANNER.choice(where, kernel, batch)
        family = f"{choice.family} ({family_named(choice.family).why})"
        why = f"{choice.why}{expectation(choice, kernel, batch, limits_of(where))}{bytes_saved(kernel, batch)}"
        return f"{kernel.name} at batch {batch} on {where.name}: {family}, {choice.constants}; {why}"

    def _prepared(self, x: Any, weights: Any, bias: Any, residual: Any, out: Any, options: CallOptions) -> Call:
        weights, stated = self._taken(weights), self.stated
        check_storage(self, stated, (weights,))
        packed = weights if isinstance(weights, Weights) else None
        arrays = {"x": x} if packed else {"x": x, "weights": weights}
        added = operand(self, "bias", bias, stated.bias), operand(self, "residual", residual, stated.residual), out
        arrays |= {name: array for name, array in zip((*ADDED, "out"), added, strict=True) if array is not None}
        return prepared(self, self._checks, self.buffers, arrays, options, packed)


def bytes_saved(kernel: KernelSpec, batch: int) -> str:
    """Remark on memory traffic with X in eight bits, and without; empty if X is not in eight bits."""
    if not kernel.has_bytes_in:
        return ""
    return f"; {kernel.bytes(batch):,} bytes, with x in {kernel.dtype} {replace(kernel, inputs=SAME).bytes(batch):,}"


def prepared(
    caller: object,
    checks: ArgumentChecks,
    buffers: PackBuffers,
    arrays: Mapping[str, Any],
    options: CallOptions,
    packed: Weights | None = None,
) -> Call:
    """Do everything but the launch.

    `arrays` holds x and all other given arrays by name, and `packed` replaces the weights.
    """
    views = views_of(arrays, options.stream)
    if packed:
        dtype = views["x"].dtype
        check_stored(caller, packed, options.precision or ("float32" if dtype in BYTE_TYPES else dtype))
    fit = checks.find(caller, options, views, packed.stored, packed.inputs) if packed else checks.find(caller, options, views)
    check_memory(caller, views)
    device, stream, views = where_to_work(caller, fit.place, arrays, views, options.stream, packed.device if packed else None)
    if packed:
        check_packed(caller, packed, checks.pattern, device, views["x"].dtype)
    is_host, out = fit.place == "host", arrays.get("out")
    if is_host and not (device.shares_host and all(is_whole(found) for found in views.values())):
        return on_host(caller, plan_for(fit.of_copies, device, stream, True), views, packed, out, stream)
    plan = plan_for(fit, device, stream, is_host or are_aligned(views))
    own = packed or arrays.get("weights")  # a gradient has none
    weights = {} if own is None else {"weights": packed_in(plan, own, views.get("weights"), buffers, stream)}
    return (on_shared if is_host else on_device)(plan, views, weights, out, stream)
