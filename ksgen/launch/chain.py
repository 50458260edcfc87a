"""Chain launcher, y = chain(x, weights): one launch for all factors if a device has a family for that.

Otherwise the factors are launched sequentially. Arguments that any factor would refuse are refused before the first
launch.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack

from ksgen.devices import find_device
from ksgen.devices.capture import refuse_capture
from ksgen.errors import LaunchError
from ksgen.launch.arrays import ArrayView, CallOptions, common_device, view, views_of
from ksgen.launch.call import Call
from ksgen.launch.checks import check_arrays, check_precision, check_words, type_of_call, y_shape
from ksgen.launch.launcher import Launcher
from ksgen.launch.memory import check_transposable, transposed
from ksgen.launch.one_launch import OneLaunch
from ksgen.launch.stated import ADDED, check_storage, checked, docstring, explained, operand, options_of_call
from ksgen.launch.streams import device_and_stream
from ksgen.launch.weights import Weights, inputs_of, storage_of
from ksgen.pattern import Chain
from ksgen.spec import ACTIVATIONS, LAYOUTS, Activation, ByteStorage, Epilogue, Fuse, Layout, PrecisionName, WeightStorage
from ksgen.spec.kernel import FUSES, LayerOptions, Stated, StatedOptions, activations_of, checked_batch, is_layer, is_transposed, is_word
from ksgen.spec.storage import SAME, Same
from ksgen.values import excerpt, listed
from ksgen.words import counted


class ChainLauncher(OneLaunch):
    """Multiply by a product of Kronecker-sparse factors: y = chain(x, weights) computes one layer.

    If the device has a kernel for all factors and that is faster, one launch runs them. Otherwise factors are launched
    sequentially. Arguments that any factor would refuse are refused before the first launch.

    Args:
        *factors: Patterns or `Launcher`s, one per argument, from the factor that meets x first; or one `Chain`, or one
            list of patterns. Options that a factor states are ignored.
        between: Activation after each factor but the last: "none", "relu", "gelu", "gelu_tanh" or "silu".
        fuse: Launches: "auto" runs one launch if that is faster, "no" one per factor. "yes" always runs one launch, and
            is an error if that is unavailable.
        out_layout: Layout of y for calls that name none: "bsf" or "bsl". None: that of x.
        **stated: Options of calls that name no others, and required operands: the same as those of a `Launcher`.

    Raises:
        PatternError: The factors do not fit each other.
        SpecError: A stated option is unknown, or two options exclude each other.
        LaunchError: `between`, `fuse` or `out_layout` is unknown, or no factor is given.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> layer = ksgen.ChainLauncher("1,2,2,2", "2,2,2,1", between="relu")
        >>> x = np.array([[1, -2, 3, -4]], np.float32)
        >>> weights = [np.ones((1, 2, 2, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)]
        >>> layer(x, weights)
        array([[4., 4., 4., 4.]], dtype=float32)
        >>> ksgen.ChainLauncher(ksgen.monarch(4, 4, 2, 2))
        ChainLauncher(Launcher(2, 2, 2, 1), Launcher(1, 2, 2, 2))
    """

    parts = "factor"
    between: Activation

    def __init__(
        self,
        *factors: Any,
        between: Activation = "none",
        fuse: Fuse = "auto",
        out_layout: Layout | None = None,
        **stated: Unpack[Stated],
    ) -> None:
        own = _factors(factors)
        self.chain = Chain(tuple(factor.pattern for factor in own))  # refuses factors that do not fit each other
        if not is_word(between, ACTIVATIONS) or (between != "none" and len(own) < 2):
            accepted = ", ".join(ACTIVATIONS) if len(own) > 1 else "none, where there is one factor"
            raise LaunchError(f"{self.chain}: between={excerpt(between)}; accepted: {accepted}")
        if not is_word(fuse, FUSES):
            raise LaunchError(f"{self.chain}: fuse={excerpt(fuse)}; accepted: {', '.join(FUSES)}")
        if out_layout is not None and not is_word(out_layout, LAYOUTS):
            raise LaunchError(f"{self.chain}: out_layout={excerpt(out_layout)}; accepted: {', '.join(LAYOUTS)}")
        self.chains, self.factors, self.between, self.fuse, self.out_layout = (self.chain,), own, between, fuse, out_layout
        self.stated = checked(self.chain, StatedOptions(**stated))
        self.__doc__ = docstring((self.chain,), self.stated, LayerOptions(between, out_layout, fuse))

    def _stating(self, stated: StatedOptions) -> "ChainLauncher":
        """Launcher of the same layer that states these options."""
        if stated == self.stated:
            return self
        return ChainLauncher(*self.factors, between=self.between, fuse=self.fuse, out_layout=self.out_layout, **stated.non_defaults)

    def __repr__(self) -> str:
        description = LayerOptions(self.between, self.out_layout, self.fuse).non_defaults | self.stated.non_defaults
        more = "".join(f", {name}={value!r}" for name, value in description.items())
        return f"ChainLauncher({', '.join(map(repr, self.factors))}{more})"

    def __call__(
        self,
        x: Any,
        weights: Sequence[Any],
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
        """Multiply x by every factor. Bias, activation and residual follow the last one.

        Args:
            x: Input, (batch, in_features) in layout "bsf", or (in_features, batch) in "bsl".
            weights: List with one array (a, b, c, d) per factor, or results of `Launcher.pack` or `ksgen.quantize`.
            layout: Layout of x: "bsf" or "bsl". None: the stated one, "bsf" by default.
            bias: Array (out_features,). False omits a stated bias.
            activation: Activation after the last factor. None: the stated one, "none" by default.
            residual: Array like y. False omits a stated residual.
            out: Array for y. None: a new one.
            stream: CUDA stream or pyopencl queue to launch on. None: the stream of the arrays.
            precision: Arithmetic of all products, like in a call of a `Launcher`.
            out_layout: Layout of y and the residual. None: that of the launcher, else that of x.

        Returns:
            y, (batch, out_features) in "bsf" or (out_features, batch) in "bsl", an array of the same library as x.

        Raises:
            LaunchError: Arguments do not fit a factor or each other, or fuse="yes" is unavailable.
            DeviceError: No device can run the call.
            ToolchainError: No compiler is available, and no binary is cached.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> layer = ksgen.ChainLauncher("1,2,2,2", "2,2,2,1")
            >>> weights = [np.ones((1, 2, 2, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)]
            >>> x = np.array([[1, 2, 3, 4]], np.float32)
            >>> layer(x, weights)
            array([[10., 10., 10., 10.]], dtype=float32)
            >>> layer(x, weights[:1])
            Traceback (most recent call last):
            ...
            ksgen.errors.LaunchError: ChainLauncher(...): got 1 weight array; 2 are needed, one a factor
        """
        options, out_layout = options_of_call(self.stated, layout, activation, stream, precision), out_layout or self.out_layout
        last_only, layout = self._last_only(bias=bias, residual=residual, out=out), options.layout
        own = self._weights_of_each(weights)
        options = with_precision(self, {"x": x, **last_only}, own, options)
        if fused := self._fused(x, own, last_only, options, out_layout):
            return fused()
        layouts, found = self._layouts(layout, out_layout), view(x, "x")
        if is_transposed(layout, out_layout):
            check_transposable(self, found)
        if len(self.factors) > 1:
            check_intermediates(self, found, stream)
        for number, (factor, weights_of_it) in enumerate(zip(self.factors, own, strict=True)):
            if is_transposed(layout, out_layout) and number == self.chain.turn:
                x = transposed(x, stream)
            is_last = number + 1 == len(self.factors)
            more = {"activation": options.activation, **last_only} if is_last else {"activation": self.between}
            x = factor(x, weights_of_it, layout=layouts[number], stream=stream, precision=options.precision, **more)
        return x

    def prepare(
        self,
        x: Any,
        weights: Sequence[Any],
        *,
        layout: Layout | None = None,
        activation: Activation | None = None,
        precision: PrecisionName | None = None,
        out_layout: Layout | None = None,
        **last_only: Any,
    ) -> Call | None:
        """Prepare a call of all factors as one launch, like `Launcher.prepare`.

        Args:
            x: Input, like in a call.
            weights: List with the weights of each factor.
            layout: Layout of x.
            activation: Activation after the last factor.
            precision: Arithmetic of all products.
            out_layout: Layout of y.
            **last_only: Arrays `bias`, `residual` and `out`, if any.

        Returns:
            A `Call`, or None if the factors are launched sequentially.

        Raises:
            LaunchError: Arguments do not fit a factor or each other, or fuse="yes" is unavailable.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> layer = ksgen.ChainLauncher("1,2,2,2", "2,2,2,1", fuse="yes")
            >>> weights = [np.ones((1, 2, 2, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)]
            >>> call = layer.prepare(np.ones((1, 4), np.float32), weights)
            >>> call()
            array([[4., 4., 4., 4.]], dtype=float32)
        """
        own, last_only = self._weights_of_each(weights), self._last_only(**last_only)
        options = options_of_call(self.stated, layout, activation, None, precision)
        options = with_precision(self, {"x": x, **last_only}, own, options)
        call = self._fused(x, own, last_only, options, out_layout or self.out_layout)
        if call:
            given = [each for each in (*own, *last_only.values(), call.out) if each is not None and not isinstance(each, Weights)]
            call.keep += tuple(map(storage_of, (view(x, "x"), *map(view, given))))
        return call

    def _last_only(self, **given: Any) -> dict[str, Any]:
        """Given arrays of the last factor: bias, residual and out."""
        given |= {name: operand(self, name, given.get(name), getattr(self.stated, name)) for name in ADDED}
        return {name: array for name, array in given.items() if array is not None}

    def _weights_of_each(self, weights: Sequence[Any]) -> Sequence[Any]:
        """Weights as a list with one array per factor; `LaunchError` on anything else."""
        if (own := listed(weights)) is None:
            raise LaunchError(f"{self!r}: weights={excerpt(weights)}; accepted: a list of arrays, one a factor")
        if len(own) != len(self.factors):
            raise LaunchError(f"{self!r}: got {counted(len(own), 'weight array')}; {len(self.factors)} are needed, one a factor")
        taken = [factor._taken(each) for factor, each in zip(self.factors, own, strict=True)]
        for number, each in enumerate(taken[1:], 2):
            if isinstance(each, Weights) and each.inputs != SAME:
                only = "weights that ksgen.quantize made without x_scale, as intermediates are stored like y"
                raise LaunchError(f"{self!r}: weights of factor {number} multiply x in {each.inputs}; accepted: {only}")
        check_storage(self, self.stated, taken)
        return taken

    def _views_of_weights(self, own: Sequence[Any]) -> list[ArrayView | None]:
        """Views of the weights; None for those that are already packed."""
        return [None if isinstance(each, Weights) else view(each, "weights") for each in own]

    def _layouts(self, layout: Layout, out_layout: Layout | None) -> list[Layout]:
        """Layout of each factor's output."""
        turn = self.chain.turn  # reads all factors
        return [layout if number < turn else out_layout or layout for number in range(len(self.factors))]

    def _check(
        self, views: dict[str, ArrayView], own_views: list[ArrayView | None], options: CallOptions, out_layout: Layout | None = None,
        inputs: str = SAME,
    ) -> int:  # fmt: skip
        """Return the batch size; `LaunchError` on arguments that any factor would refuse.

        `inputs` is the storage of the x that the first factor's weights multiply.
        """
        between, batch = views["x"], 0
        dtype = type_of_call(self, views, options.precision, inputs)
        precision = check_precision(self, options.precision, dtype)
        if self.between not in (accepted := activations_of(precision)):
            raise LaunchError(f"{self!r}: between={self.between!r} of complex numbers, {precision}; accepted: {', '.join(accepted)}")
        check_words(self, options.layout, options.activation)
        check_words(self, options.layout if out_layout is None else out_layout, options.activation, "out_layout")
        layouts, turn = self._layouts(options.layout, out_layout), self.chain.turn
        for number, (factor, own) in enumerate(zip(self.factors, own_views, strict=True), start=1):
            layout = layouts[number - 1]
            if layout != options.layout and number - 1 == turn:
                check_arrays(factor, factor.pattern, options.layout, {"x": between})
                between = between._replace(shape=between.shape[::-1], strides=None)
            given = {"x": between} if own is None else {"x": between, "weights": own}
            if number == len(self.factors):
                given = views | given
            batch = check_arrays(factor, factor.pattern, layout, given, dtype=None if inputs == SAME else dtype)
            common_device(given)
            between = between._replace(shape=y_shape(factor.pattern, layout, batch), strides=None, dtype=dtype)
        return batch

    def explain(
        self,
        batch: int,
        *,
        precision: PrecisionName | None = None,
        layout: Layout | None = None,
        epilogue: Epilogue | None = None,
        device: str | None = None,
        out_layout: Layout | None = None,
        weights: WeightStorage | Same | None = None,
        inputs: ByteStorage | Same | None = None,
    ) -> str:
        """Explain whether one launch runs all factors on a device, by which family, and why.

        None stands for the stated option. Without a stated option it stands for float32, "bsf" and unquantized arrays.

        Args:
            batch: Batch size of the call.
            precision: Arithmetic, such as "float16".
            layout: Layout of x: "bsf" or "bsl".
            epilogue: `ksgen.spec.Epilogue` of the last factor: bias, activation and residual.
            device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            out_layout: Layout of y. None: that of the launcher, else that of x.
            weights: Storage of the weights: "same", "int8", "e4m3", "e5m2" or "bfloat16".
            inputs: Storage of x: "same", "int8", "e4m3" or "e5m2". Intermediates and y then have the given precision.

        Returns:
            One line for one launch; otherwise a line with the reason, and one line per factor.

        Raises:
            SpecError: An option is unknown, or two options exclude each other.
            DeviceError: The device does not exist.

        Examples:
            >>> import ksgen
            >>> print(ksgen.ChainLauncher("1,2,2,2", "2,2,2,1", fuse="no").explain(batch=4))
            1,2,2,2 then 2,2,2,1: one launch per factor; fuse='no'
            ks_1x2x2x2_float32_bsf at batch 4 on ...
            ks_2x2x2x1_float32_bsf at batch 4 on ...
        """
        batch, where, out_layout = checked_batch(batch), find_device(device), out_layout or self.out_layout
        precision, layout, last, weights, inputs = explained(self.stated, precision, layout, epilogue, weights, inputs)
        stored = weights, inputs
        found = self._verdict(where, precision, layout, last, batch, out_layout, *stored)
        description = str(self.chain) if self.between == "none" else f"{self.chain} with {self.between} between factors"
        description += f" from {layout} to {out_layout}" if is_transposed(layout, out_layout) else ""
        if found.is_one:
            why = self._explain_one_launch(found, where, batch, precision, layout, last, out_layout, *stored)
            return f"{description} at batch {batch} on {where.name}: {why}"
        epilogues = [*[Epilogue(activation=self.between)] * (len(self.factors) - 1), last]
        what: dict[str, Any] = {"precision": precision, "device": device, "weights": weights}
        each = []
        for number, (factor, own, its) in enumerate(zip(self.factors, epilogues, self._layouts(layout, out_layout), strict=True)):
            each.append(factor.explain(batch, layout=its, epilogue=own, inputs=SAME if number else inputs, **what))
        once = f", and what factor {self.chain.turn + 1} takes is transposed by a copy" if is_transposed(layout, out_layout) else ""
        return "\n".join([f"{description}: one launch per factor{once}; {found.why}", *each])

    def _fused(
        self, x: Any, own: Sequence[Any], last_only: Mapping[str, Any], options: CallOptions, out_layout: Layout | None
    ) -> Call | None:
        """Call of all factors as one launch, on GPU arrays or in place on host arrays; None if unavailable."""
        if not is_layer(self.chains, options.layout, out_layout):
            return None
        arrays: dict[str, Any] = {"x": x, **last_only}
        views, own_views = views_of(arrays, options.stream), self._views_of_weights(own)
        batch = self._check(views, own_views, options, out_layout, inputs_of(own))
        return self._one_launch(arrays, views, [own], own_views, last_only.get("out"), batch, options, out_layout)


def _factors(given: tuple[Any, ...]) -> tuple[Launcher, ...]:
    """Launchers of a layer's factors, given as launchers or patterns, one per argument, or as one chain."""
    if len(given) == 1 and not isinstance(given[0], Launcher):
        given = Chain.read(given[0]).factors
    if not given:
        raise LaunchError("factors=(); accepted: Launchers, one an argument, or patterns, from the one that meets X first; or a Chain")
    return tuple(each._stating(StatedOptions()) if isinstance(each, Launcher) else Launcher(each) for each in given)


def layer_of(given: Any) -> ChainLauncher:
    """Launcher of one layer of a group, given as a launcher, a chain or a pattern in any form."""
    if isinstance(given, ChainLauncher):
        return given
    return ChainLauncher(given, **given.stated.non_defaults) if isinstance(given, Launcher) else ChainLauncher(given)


def check_intermediates(caller: object, x: ArrayView, stream: Any) -> None:
    """Raise `LaunchError` if no intermediates can be allocated for one launch per factor."""
    if x.device == "host" or x.kind == "torch":  # PyTorch keeps memory for graphs
        return
    if x.kind in ("cuda", "dlpack"):
        why = f"nothing makes arrays like x, {type(x.owner).__name__}, for intermediates"
        accepted = "arrays of PyTorch, CuPy, PyCUDA or NumPy, or fuse='yes' where one launch can be had"
        raise LaunchError(f"{caller!r}: factors are launched one by one here, and {why}; accepted: {accepted}")
    device, on = device_and_stream(caller, x.device, x.stream if stream is None else stream)
    refuse_capture(device, on, "launches factors one by one, and allocates their intermediates", "give PyTorch's tensors")


def with_precision(caller: object, arrays: Mapping[str, Any], own: Sequence[Any], options: CallOptions) -> CallOptions:
    """Add the precision to options if x in eight bits does not imply it.

    Intermediates and y have one dtype.
    """
    if (inputs := inputs_of(own)) == SAME or options.precision is not None:
        return options
    dtype: Any = type_of_call(caller, views_of(arrays, None), None, inputs)  # this dtype is a precision too
    return options._replace(precision=dtype)
