"""Base of all launchers: the path of a call, y = launcher(x, weights), for a factor, a chain, or a group of chains.

A factor is treated as a chain of one factor, and a chain as a group of one chain. A call reads and checks its arrays,
finds device and stream, looks up a plan, packs the weights, and computes everything in one launch. If several launches
are faster, each factor or layer takes this path by itself. This module never searches for constants. It records no
gradients; `ksgen.torch` does.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from ksgen.build.background import all_of, finished
from ksgen.devices import find_device
from ksgen.devices.base import Device, RefusedError, refuse_capture
from ksgen.errors import LaunchError
from ksgen.launch import behind
from ksgen.launch.arrays import ArrayView, CallOptions, stream_handle, type_name, view, views_of
from ksgen.launch.checks import ArgumentChecks, CheckedArguments, are_aligned, check_memory, check_storage, names_of
from ksgen.launch.explain import Explainable, LaunchOptions, docstring
from ksgen.launch.fused import fused_plan, plan_for, verdict
from ksgen.launch.memory import check_transposable, is_whole, transposed
from ksgen.launch.places import on_device, on_host, on_shared
from ksgen.launch.plan import Call, Plan
from ksgen.launch.planner import PLANNER
from ksgen.launch.streams import device_and_stream, keep_for_stream, where_to_work
from ksgen.launch.weights import PLAIN, WeightForm, Weights, check_device, packed_in, storage_of
from ksgen.pattern import Chain
from ksgen.quantized import Quantized
from ksgen.spec import Activation, ByteStorage, Epilogue, Job, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import LayerOptions, StatedOptions, checked_count, is_transposed
from ksgen.spec.storage import SAME, Same
from ksgen.values import counted, excerpt, listed

WITHIN_AN_ELEMENT = "an array's address is not a multiple of its element size"
_NEVER = object()  # marks a plan that was never looked up


class Given(NamedTuple):
    """Arguments of a call: arrays by their names in messages, weights of each factor, output or outputs, and
    options.
    """

    arrays: dict[str, Any]  # without packed weights
    weights: Sequence[Any]  # one per factor
    packed: Sequence[Weights]  # the packed ones among the weights
    forms: Sequence[WeightForm]  # one per factor
    out: Any
    options: CallOptions


class BaseLauncher(Explainable):
    """Multiply x by chains of Kronecker-sparse factors.

    It is the base class of `Launcher`, `ChainLauncher` and `GroupLauncher`.
    """

    accepted = "fuse='auto' or 'no'"  # remedy in messages if one launch is required, but unavailable
    gives_list = False  # whether a call returns a list of outputs, one per layer

    def _set_up(
        self, chains: tuple[Chain, ...], factors: Sequence[Any], stated: StatedOptions, options: LayerOptions
    ) -> None:
        """Set the attributes that all subclasses have. Without `factors`, the launcher itself is the only factor."""
        self.chains, self.stated, self._factors, self.options = chains, stated, tuple(factors), options
        self.between, self.fuse, self.out_layout = options.between, options.fuse, options.out_layout
        self.names, self._checks = names_of(chains), ArgumentChecks()
        self.__doc__ = docstring(chains, stated, options, is_sum=len(chains) > 1 and not self.gives_list)

    @property
    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        """Arguments that create this launcher again, by position and by name."""
        return self._factors, self.options.non_defaults | self.stated.non_defaults

    def __repr__(self) -> str:
        given, named = self._arguments
        shown = [f"Chain({tuple(map(str, each))})" if isinstance(each, Chain) else repr(each) for each in given]
        return f"{type(self).__name__}({', '.join([*shown, *(f'{name}={value!r}' for name, value in named.items())])})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without caches: plans and packed weights belong to this process."""
        given, named = self._arguments
        return partial(type(self), *given, **named), ()

    def __call__(
        self,
        x: Any,
        weights: Any,
        *,
        layout: Layout | None = None,
        bias: Any = None,
        activation: Activation | None = None,
        residual: Any = None,
        residual_first: bool | None = None,
        out: Any = None,
        stream: Any = None,
        precision: PrecisionName | None = None,
        out_layout: Layout | None = None,
    ) -> Any:
        """Compute Y = X K^T, then add the bias, apply the activation and add the residual.

        The arrays' dtype decides the precision. All arrays have one dtype and are on one device; they may come from
        NumPy, PyTorch, CuPy, PyCUDA, JAX or pyopencl. A group takes one x, and the other arrays in lists with one entry
        per layer. It returns a list.

        Args:
            x: Input, (batch, in_features) in layout "bsf", or (in_features, batch) in "bsl".
            weights: Values of K on its support, an array (a, b, c, d); or a result of `pack` or `ksgen.quantize`. A
                chain takes a list with one array per factor. A group takes a list with one entry per layer: a list of
                arrays, or one array if the layer has one factor. Quantized weights are packed once. Quantized
                weights with an `x_scale` take x in eight bits: the `values` of `ksgen.quantize_inputs`, or their bits
                as uint8. The dtype of y is then the `precision`, else that of out, bias or residual, else float32.
            layout: Layout of x and y: "bsf" or "bsl". None: the launcher's, "bsf" by default.
            bias: Array (out_features,) that is added before the activation. False omits a required bias.
            activation: "none", "relu", "gelu", "gelu_tanh" or "silu", after the last factor. None: the launcher's,
                "none" by default.
            residual: Array like y that is added after the activation. False omits a required residual.
            residual_first: Whether the residual is added before the activation instead. None: the launcher's, False by
                default.
            out: Array for y. A group takes a list, or one array for all outputs. None: new arrays.
            stream: CUDA stream or pyopencl queue to launch on. None: the stream of the arrays, which is the current one
                for PyTorch and CuPy.
            precision: Arithmetic of the products. None: the launcher's, else that of the arrays. float32 arrays accept
                "tf32x3", "tf32" and "fp16x3" for tensor cores, and "bf16x6" for a processor's matrix tiles. complex64
                arrays accept "c64_tf32x3" for tensor cores. If float16 overflows in "fp16x3", outputs on a device are
                NaN. For host arrays, an overflow raises `LaunchError`.
            out_layout: Layout of y and the residual. A group accepts only the layout of x. None: the launcher's, else
                that of x.

        Returns:
            y of shape (batch, out_features) in "bsf", or (out_features, batch) in "bsl", an array of the same library
            as x. A group returns a list; its new arrays are slices of one array if one launch wrote them. Host arrays
            are complete; other arrays are complete in stream order.

        Raises:
            LaunchError: Arguments do not fit a factor or each other, a required operand is missing, or fuse="yes" is
                unavailable.
            DeviceError: No device can run the call.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> x, weights = np.array([[1, 2, 3, 4]], np.float32), np.ones((1, 3, 2, 2), np.float32)
            >>> multiply = ksgen.Launcher(1, 3, 2, 2)
            >>> multiply(x, weights)
            array([[4., 6., 4., 6., 4., 6.]], dtype=float32)
            >>> multiply(x[:, :3], weights)
            Traceback (most recent call last):
            ...
            ksgen.errors.LaunchError: Launcher(1, 3, 2, 2): got x of shape (1, 3); ...
            >>> layer = ksgen.ChainLauncher("1,2,2,2", "2,2,2,1")
            >>> factors = [np.ones((1, 2, 2, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)]
            >>> layer(x, factors)
            array([[10., 10., 10., 10.]], dtype=float32)
            >>> [y.shape for y in ksgen.GroupLauncher("1,3,2,2", layer)(x, [weights, factors])]
            [(1, 6), (1, 4)]
        """
        options = layout, activation, precision, out_layout, residual_first, stream
        given = self._read(x, weights, bias, residual, out, options)
        prepared = self._prepared(given, self._checks)
        if isinstance(prepared, Call):
            return prepared()
        for each in given.packed:  # before the first launch writes an output
            each.check()
        return self._one_by_one(given, prepared)

    def prepare(
        self,
        x: Any,
        weights: Any,
        *,
        layout: Layout | None = None,
        bias: Any = None,
        activation: Activation | None = None,
        residual: Any = None,
        residual_first: bool | None = None,
        out: Any = None,
        stream: Any = None,
        precision: PrecisionName | None = None,
        out_layout: Layout | None = None,
    ) -> Call | Any:
        """Prepare a call without launching it: check, build, load and allocate.

        Use it for repeated calls on the same arrays, and before a CUDA graph records the call. The returned `Call` owns
        the memory that its launches use. Keep the `Call` alive as long as any graph that recorded it.

        Args:
            x: Input, as in a call. Each launch reads its contents at that time.
            weights: Weights, as in a call. Arrays of weights are packed before each launch.
            layout: Layout of x and y, as in a call.
            bias: Bias, as in a call.
            activation: Activation, as in a call.
            residual: Residual, as in a call.
            residual_first: Order of residual and activation, as in a call.
            out: Array for y. None: a new one, which every launch overwrites.
            stream: Stream of the launches. None: the stream of the arrays.
            precision: Arithmetic, as in a call.
            out_layout: Layout of y, as in a call.

        Returns:
            A `Call`: `call()` launches and returns y. It is not thread-safe. None if factors, or the layers of a group,
            are launched one by one. A `SumLauncher` returns one call of all its chains, or None if the factors of a
            chain are launched one by one.

        Raises:
            LaunchError: Arguments do not fit a factor or each other, or fuse="yes" is unavailable.
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
        options = layout, activation, precision, out_layout, residual_first, stream
        given = self._read(x, weights, bias, residual, out, options)
        call = self._prepared(given, self._checks)
        if not isinstance(call, Call):
            return self._prepared_in_turn(given, call)
        _keep_memory(call, stream)
        return call

    def build(
        self,
        batch: int | Sequence[int],
        *,
        precision: PrecisionName | None = None,
        layout: Layout | None = None,
        epilogue: Epilogue | None = None,
        device: str | None = None,
        job: Job = "multiply",
        out_layout: Layout | None = None,
        weights: WeightStorage | Same | None = None,
        inputs: ByteStorage | Same | None = None,
    ) -> Self:
        """Compile and load the kernels of calls at some batch sizes now, in parallel.

        Such calls then begin immediately, and a CUDA graph can record them. A terminal shows a progress bar. The
        kernels are those that `explain` names: for arrays without gaps between rows, aligned to 16 bytes.

        Args:
            batch: Batch size, or a list of them.
            precision: Arithmetic, such as "float16". None: the launcher's, else float32.
            layout: Layout of x: "bsf" or "bsl". None: the launcher's.
            epilogue: `ksgen.spec.Epilogue` with bias, activation and residual. None: the launcher's.
            device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            job: "multiply" for calls, or "gradient" for calls of `Launcher.gradient`.
            out_layout: Layout of y. None: that of the launcher, else that of x.
            weights: Storage of the weights: "same", "int8", "e4m3", "e5m2" or "bfloat16". None: the launcher's.
            inputs: Storage of x: "same", "int8", "e4m3" or "e5m2". None: the launcher's.

        Returns:
            The launcher itself.

        Raises:
            SpecError: An option is unknown, two options exclude each other, or a batch size is not at least 1.
            DeviceError: The device does not exist, or no device can run the calls.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import ksgen
            >>> multiply = ksgen.Launcher(1, 3, 2, 2).build(batch=[1, 256])
        """
        sizes = [checked_count("batch", size) for size in listed(batch) or [batch]]
        options, out_layout = self._asked(job, precision, layout, epilogue, weights, inputs, out_layout)
        if self._is_factor(options, job, out_layout):
            self._kernel_of_factor(sizes[0], options, job)  # invalid combinations are refused before a device opens
        where = find_device(device)
        finished([partial(self._plan_all, where, size, options, job, out_layout) for size in sizes])
        return self

    def _plan_all(self, where: Device, batch: int, options: LaunchOptions, job: Job, out_layout: Layout | None) -> None:
        """Make the plans of a call's launches; `PendingError` while a background thread still makes some of them."""
        if self._is_factor(options, job, out_layout):
            PLANNER.plan(where, self._kernel_of_factor(batch, options, job), batch)
            return
        found = self._verdict(where, options, batch, out_layout)
        if found.is_one and fused_plan(where, self._kernel(where, options, out_layout), batch, self.fuse):
            return
        if self.fuse == "yes":
            raise LaunchError(f"{self!r}: {found.why}; accepted: {self.accepted}")
        parts = self._parts_of(options, out_layout)
        all_of(
            partial(part._plan_all, where, batch, part_options, job, part_options.layout)
            for part, part_options in parts
        )

    # ---- arguments

    def _read(self, x: Any, weights: Any, bias: Any, residual: Any, out: Any, asked: tuple[Any, ...]) -> Given:
        """Collect a call's arguments by name; None becomes the stated option. `LaunchError` if a required operand is
        missing.

        `asked` has the options in the order of `CallOptions`.
        """
        stated, names = self.stated, self.names
        layout, activation, precision, out_layout, residual_first, stream = asked
        options = CallOptions(
            stated.layout if layout is None else layout,
            stated.activation if activation is None else activation,
            stated.precision if precision is None else precision,
            self.out_layout if out_layout is None else out_layout,
            stated.residual_first if residual_first is None else residual_first,
            stream,
        )
        factor_weights = self._weights_of_each(weights)
        arrays, packed, forms = {"x": x}, [], []
        for name, each in zip(names.weights, factor_weights, strict=True):
            if isinstance(each, Weights):
                packed.append(each)
                forms.append(each.form)
            else:
                arrays[name] = each
                forms.append(PLAIN)
        if bias is not None or stated.bias:
            self._add("bias", names.bias, bias, stated.bias, arrays)
        if residual is not None or stated.residual:
            self._add("residual", names.residual, residual, stated.residual, arrays)
        if out is not None:
            out = self._add_outputs(out, options.layout, arrays)
        return Given(arrays, factor_weights, packed, forms, out, options)

    def _add(self, operand: str, names: Sequence[str], value: Any, is_stated: bool, arrays: dict[str, Any]) -> None:
        """Add a call's bias or residual, with one array per chain, to its arrays; False adds none."""
        for name, array in zip(names, self._per_chain(operand, value), strict=True) if value is not False else ():
            if array is None and is_stated:
                one = "an array per layer, in a list" if self.gives_list else "an array"
                remedy = f"{operand}={one}, or {operand}=False to leave it out"
                raise LaunchError(f"{self!r}: {operand} is missing, but the launcher requires it; accepted: {remedy}")
            if array is not None and array is not False:
                arrays[name] = array

    def _per_chain(self, name: str, value: Any) -> Sequence[Any]:
        """Arrays of an argument, one per chain."""
        return (value,)

    def _add_outputs(self, out: Any, layout: str, arrays: dict[str, Any]) -> Any:
        """Add the outputs to a call's arrays, and return the value that the call will return."""
        arrays["out"] = out
        return out

    def _weights_of_each(self, weights: Any) -> Sequence[Any]:
        """Weights of each factor; quantized ones are packed at their first call."""
        factor_weights = listed(weights) if self.takes_lists else (weights,)
        # an array of the first factor is iterable too, along its first axis
        if factor_weights is None or (self.takes_lists and getattr(weights, "shape", None) == self.chains[0][0].shape):
            raise LaunchError(f"{self!r}: weights={excerpt(weights)}; accepted: a list of arrays, one per factor")
        if len(factor_weights) != len(self.names.weights):
            raise LaunchError(
                f"{self!r}: got {counted(len(factor_weights), 'weight array')}; {len(self.factors)} are needed, one "
                "per factor"
            )
        taken = list(factor_weights)
        for number, each in enumerate(factor_weights):
            if isinstance(each, Quantized):
                taken[number] = self.factors[number]._taken(each)
        if self.stated.weights != SAME:
            check_storage(self, self.stated, taken)
        return taken

    # ---- from arguments to a launch

    def _prepared(self, given: Given, checks: ArgumentChecks) -> Call | CheckedArguments:
        """Prepare a call as one launch; return the checked arguments instead if it takes several launches."""
        arrays, factor_weights, packed, forms, out, options = given
        views = views_of(arrays, options.stream)
        fit = checks.find(self, options, views, forms)
        is_aligned = check_memory(self, views, self.names, {} if out is None else self._packed_memory(factor_weights))
        # a chain writes its output last, but layers write one by one: all must be refused before the first
        if fit.kernel is None and (fit.place == "host" or len(self.chains) == 1):
            return self._several(fit, fit.why)
        device, stream, views = where_to_work(
            self, fit.place, arrays, views, options.stream, packed[0].device if packed else None
        )
        for each in packed:
            if each.device is not device or not device.is_open:
                check_device(self, each, device)
        if fit.kernel is None:
            return self._several(fit, fit.why)
        is_host = fit.place == "host"
        if is_host and not (device.shares_host and (is_aligned or all(map(is_whole, views.values())))):
            if fit.kernel.is_chain:
                return self._several(fit, WITHIN_AN_ELEMENT if device.shares_host else copied_to(device))
            aligned = True
            plan: Any = self._plan(fit.of_copies, device, stream, aligned)
            call = on_host(self, plan, views, packed, out, stream)
        else:
            aligned = is_host or is_aligned or are_aligned(views)
            plan = self._plan(fit, device, stream, aligned)
            if plan is None:  # finding the reason takes time, which separate launches would pay at each call
                return self._several(
                    fit, verdict(device, fit.kernel, fit.batch, self.fuse).why if self.fuse == "yes" else ""
                )
            packers, factors = plan.packers or (plan,), self._factors or (self,)
            # not strict, because a gradient has no weights
            each_factor = zip(packers, factor_weights, self.names.weights, factors)  # noqa: B905
            weights = [
                packed_in(packer, each, views.get(name), factor.buffers, stream)
                for packer, each, name, factor in each_factor
            ]
            for operand, name in self.names.operands:
                if name in views:
                    views[operand] = views[name]
            call = (on_shared if is_host else on_device)(plan, views, weights, out, stream)
        if self.gives_list and not isinstance(call.out, list):  # a group of one layer
            call.out = [call.out]
        if plan.maps:
            call.fallback = partial(self._fallback, given, checks, call.plan, call.out, aligned)
        return call

    def _fallback(
        self, given: Given, checks: ArgumentChecks, plan: Plan, out: Any, aligned: bool, error: RefusedError
    ) -> Call:
        """Prepare a call with another kernel and the same output, after the device has refused a launch of its plan."""
        PLANNER.refuse(plan, str(error), aligned)
        if given.out is None:
            arrays = dict(given.arrays)
            given = given._replace(arrays=arrays, out=self._add_outputs(out, given.options.layout, arrays))
        call = self._prepared(given, checks)
        assert isinstance(call, Call)  # never several launches: only plans of one factor have tensor maps
        _keep_memory(call, given.options.stream)
        return call

    def _packed_memory(self, weights: Sequence[Any]) -> Mapping[str, ArrayView]:
        """Memory of packed weights that one launch may read after an earlier launch of the call wrote an output."""
        return {}

    def _plan(self, fit: CheckedArguments, device: Device, stream: Any, is_aligned: bool) -> Plan | None:
        """Plan of the launch; None if several launches are faster."""
        cached: Any = fit.plans.get((device, PLANNER.generation, is_aligned), _NEVER)
        if cached is _NEVER and PLANNER.earlier and behind.must_stay(device, stream):
            earlier = (fit.plans.get((device, each, is_aligned), _NEVER) for each in reversed(PLANNER.earlier))
            cached = next((each for each in earlier if each is not _NEVER), _NEVER)
        if cached is None:
            return None
        plan: Plan | None = None if cached is _NEVER else cached()
        if plan is None or plan.loaded.is_refused:
            plan = plan_for(fit, device, stream, is_aligned, self.fuse)
        if plan is not None:
            plan.loaded.is_used = True
            for packer in plan.packers:
                packer.loaded.is_used = True
        return plan

    def _several(self, fit: CheckedArguments, why: str) -> CheckedArguments:
        """Return checked arguments for several launches; `LaunchError` if one launch is required, but unavailable."""
        if why and self.fuse == "yes":
            raise LaunchError(f"{self!r}: {why}; accepted: {self.accepted}")
        return fit

    def _one_by_one(self, given: Given, fit: CheckedArguments) -> Any:
        """Launch the factors sequentially; bias, activation and residual follow the last one."""
        (arrays, factor_weights, _, _, out, options), (chain,) = given, self.chains
        x = arrays["x"]
        transposing = chain.transposing_factor if is_transposed(options.layout, options.out_layout) else len(chain)
        found = view(x, "x")
        if transposing < len(chain):
            check_transposable(self, found)
        if len(chain) > 1:
            self._check_intermediates(found, options.stream)
        for number, (factor, weights) in enumerate(zip(self.factors, factor_weights, strict=True)):
            if number == transposing:
                if options.stream is not None:
                    keep_for_stream(stream_handle(options.stream), {"x": view(x, "x")})
                x = transposed(x, options.stream)
            layout = options.layout if number < transposing else options.out_layout
            more: dict[str, Any] = {"activation": self.between}
            if number + 1 == len(chain):
                added = {name: arrays.get(name, False) for name in ("bias", "residual")}
                last = {"activation": options.activation, "residual_first": options.residual_first}
                more = {**last, "out": out, **added}
            argument = (weights,) if factor.takes_lists else weights
            x = factor(
                x, argument, layout=layout, out_layout=layout, stream=options.stream, precision=fit.precision, **more
            )
        return x

    def _prepared_in_turn(self, given: Given, fit: CheckedArguments) -> Any:
        """Prepared call of several launches; None: they are not prepared."""
        return None

    def _check_intermediates(self, x: ArrayView, stream: Any) -> None:
        """Raise `LaunchError` if the intermediates between launches of single factors cannot be allocated."""
        if x.device == "host" or x.kind == "torch":  # PyTorch can allocate while a graph is recorded
            return
        if x.kind in ("cuda", "dlpack"):
            why = f"ksgen cannot allocate arrays like x, {type_name(x)}, for intermediates"
            accepted = "arrays of PyTorch, CuPy, PyCUDA or NumPy, or fuse='yes' if one launch is available"
            raise LaunchError(f"{self!r}: factors are launched one by one here, and {why}; accepted: {accepted}")
        device, launch_stream = device_and_stream(self, x.device, x.stream if stream is None else stream)
        what = "launches factors one by one, and allocates their intermediates"
        refuse_capture(device, launch_stream, what, "give PyTorch's tensors")


def copied_to(device: Device) -> str:
    """Reason for one launch per factor on a device that does not share the host's memory."""
    return f"arrays of the host are copied to {device.name} for each factor"


def _keep_memory(call: Call, stream: Any) -> None:
    """Keep a call's stream and its tensors' storages alive.

    A tensor may get other memory, and a stream is destroyed with its object.
    """
    call.keep += (stream, *map(storage_of, call.keep[0].values()))
