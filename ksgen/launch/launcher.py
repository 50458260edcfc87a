"""Launcher of a pattern's kernels, or of a chain's: y = launcher(x, weights)."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Unpack
from weakref import WeakKeyDictionary

from ksgen.devices import find_device
from ksgen.devices.base import Device, Stream
from ksgen.errors import LaunchError, PatternError
from ksgen.launch.arrays import ArrayView, CallOptions, stream_handle, view
from ksgen.launch.base import BaseLauncher, Given
from ksgen.launch.checks import ArgumentChecks, check_memory, check_weights
from ksgen.launch.explain import checked, layer_options
from ksgen.launch.plan import Call
from ksgen.launch.streams import device_and_stream, in_their_context
from ksgen.launch.weights import PackBuffers, Weights, pack_host, pack_in_place, pack_quantized
from ksgen.pattern import Chain, Pattern
from ksgen.quantized import Quantized
from ksgen.spec import Activation, Fuse, Layout, PrecisionName
from ksgen.spec.kernel import Stated, StatedOptions, checked_count
from ksgen.values import excerpt, listed


class Launcher(BaseLauncher):
    """Multiply by Kronecker-sparse matrices K of one pattern, or of a chain: y = launcher(x, weights) computes Y = X
    K^T.

    A launcher holds all kernels of its pattern. The arguments of a call decide precision, batch size and device. A
    kernel is generated, compiled and cached at its first use. Later calls reuse it.

    Weights are packed before every launch, because no array reveals reliably that it is unchanged. Results of `pack`
    and of `ksgen.quantize` are packed only once. A CUDA graph stores the addresses of a call's arrays and packed
    weights: keep the launcher and the weights as long as the graph. A recorded call with unpacked weights packs them at
    each replay.

    Args:
        a: First number of the pattern (a, b, c, d). Or the full pattern: a `Pattern`, four numbers, or text such as
            "1,192,48,2". Or a `Chain`, whose calls take a list of weights, one array per factor.
        b: Second number. Omit b, c and d if `a` is a full pattern, or a chain.
        c: Third number.
        d: Fourth number.
        batches: Batch sizes with kernels of their own. Other sizes share kernels.
        between: Activation after each factor but the last, as in `ChainLauncher`.
        fuse: Launches of a chain: "auto", "yes" or "no", as in `ChainLauncher`.
        out_layout: Layout of y for calls that name none: "bsf" or "bsl". None: that of x.
        **stated: Default options of calls, and operands for which each call must pass an array or False.

            - `layout`: "bsf" (default): x is (batch, in_features). "bsl": x is (in_features, batch).
            - `precision`: such as "float16" or "tf32x3". None (default): that of the arrays.
            - `activation`: "none" (default), "relu", "gelu", "gelu_tanh" or "silu".
            - `bias`, `residual`: True requires each call to pass an array, or False in its place. By default (False), a
              call may omit this operand or pass it.
            - `residual_first`: True adds the residual before the activation. Default: False.
            - `weights`: storage "int8", "e4m3", "e5m2" or "bfloat16" of `ksgen.quantize`. Default: "same", the dtype of
              y.
            - `inputs`: storage "int8", "e4m3" or "e5m2" of x. Default: "same", the dtype of y.

    Raises:
        PatternError: The pattern is not four whole numbers of at least 1, or is too large.
        SpecError: The value of a stated option is not accepted, or two options exclude each other.
        LaunchError: `batches` is not a list, or `between`, `fuse` or `out_layout` is unknown.

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
        Multiply x by 1,3,2,2 (4 to 6 features).
        <BLANKLINE>
        A call takes x, weights (1, 3, 2, 2), bias (or bias=False).
        Unless it names others, its options are: layout bsf, activation relu, precision that of the arrays.

        A chain takes one array per factor:

        >>> chain = ksgen.Launcher(ksgen.Chain(("1,2,2,2", "2,2,2,1")))
        >>> chain(x, [np.ones((1, 2, 2, 2), np.float32), np.ones((2, 2, 2, 1), np.float32)])
        array([[4., 4., 4., 4.]], dtype=float32)
    """

    def __init__(
        self,
        a: Any,
        b: int | None = None,
        c: int | None = None,
        d: int | None = None,
        batches: Sequence[int] = (),
        between: Activation = "none",
        fuse: Fuse = "auto",
        out_layout: Layout | None = None,
        **stated: Unpack[Stated],
    ) -> None:
        if (wanted := listed(batches)) is None:
            raise LaunchError(f"batches={excerpt(batches)}; accepted: a list of batches that get kernels of their own")
        self.batches = frozenset(checked_count("batch", each) for each in wanted)
        self.takes_lists = isinstance(a, Chain) and b is c is d is None
        chain = a if self.takes_lists else Chain((_pattern(a) if b is c is d is None else Pattern(a, b, c, d),))  # type: ignore[arg-type]
        factors = [Launcher(each, batches=wanted) for each in chain] if len(chain) > 1 else ()
        self._set_up(
            (chain,), factors, checked(chain, StatedOptions(**stated)), layer_options(chain, between, fuse, out_layout)
        )
        self.chain = chain
        if not factors:
            self.pattern = chain[0]
        self.buffers = PackBuffers()
        self._quantized: WeakKeyDictionary[Quantized, Weights] = WeakKeyDictionary()  # packed once, for all calls
        self._gradient_checks = ArgumentChecks("gradient")

    @property
    def _arguments(self) -> tuple[Sequence[Any], dict[str, Any]]:
        pattern = self.chain[0]
        factor = (str(pattern),) if pattern.is_exchanged else pattern.shape
        return (self.chain,) if self.takes_lists else factor, self.options.non_defaults | self.stated.non_defaults

    def __reduce__(self) -> tuple[Any, ...]:
        given, named = self._arguments
        return partial(type(self), *given, **{"batches": sorted(self.batches), **named}), ()

    def _check_is_factor(self, what: str) -> None:
        if self._factors:
            raise LaunchError(
                f"{self!r}: {what} belong to one factor, and this launcher has {len(self._factors)}; accepted: "
                "one of launcher.factors"
            )

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
        conjugated, as in PyTorch.

        Args:
            x: Input of the product, (batch, a*c*d) in layout "bsf", or (a*c*d, batch) in "bsl".
            grad_y: Gradient of y, (batch, a*b*d) or (a*b*d, batch), of the dtype of x.
            layout: Layout of x and grad_y: "bsf" or "bsl". None: the launcher's.
            out: Array (a, b, c, d) for the result. None: a new one.
            stream: Stream to launch on. None: the stream of the arrays.
            precision: Arithmetic of the products, as in a call.

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
        return self._gradient_call(x, grad_y, layout, out, stream, precision)()

    def _gradient_call(
        self, x: Any, grad_y: Any, layout: Any, out: Any, stream: Any, precision: Any, bias: Any = None
    ) -> Call:
        """Do everything for a gradient but the launch.

        On processors, `bias` may be an array for the gradient of a bias: the sum of `grad_y` over the batch. The
        features of both have the same order.
        """
        self._check_is_factor("gradients of weights")
        outputs = {"out": out, "bias": bias}
        arrays = {"x": x, "grad_y": grad_y} | {name: each for name, each in outputs.items() if each is not None}
        layout = self.stated.layout if layout is None else layout
        options = CallOptions(
            layout, precision=self.stated.precision if precision is None else precision, stream=stream
        )
        call = self._prepared(Given(arrays, (), (), (), out, options), self._gradient_checks)
        assert isinstance(call, Call)
        return call

    def pack(self, weights: Any, *, device: str | None = None, stream: Any = None) -> Weights:
        """Pack weights on their device once, for many calls.

        Kernels read weights in an order of their own. The given array must not change while the result is used. After
        an in-place write that increments a tensor's version counter, each use is an error. Other writes are not
        detected. Quantized weights keep their storage type.

        Args:
            weights: Array (a, b, c, d), or a result of `ksgen.quantize`.
            device: Device for host arrays, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
            stream: Stream that wrote the weights, if it is not the stream that their library uses.

        Returns:
            `Weights`, which calls accept in place of the array.

        Raises:
            LaunchError: The weights have another shape, `device` is given for weights on a device, or the launcher has
                several factors.
            DeviceError: The device does not exist.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> multiply = ksgen.Launcher(1, 3, 2, 2)
            >>> packed = multiply.pack(np.ones((1, 3, 2, 2), np.float32))
            >>> multiply(np.ones((1, 4), np.float32), packed)
            array([[2., 2., 2., 2., 2., 2.]], dtype=float32)
        """
        self._check_is_factor("packed weights")
        handle = stream_handle(stream)
        if isinstance(weights, Quantized):
            return self._pack_quantized(weights, device, stream)
        found = view(weights, "weights", handle)
        check_weights(self, self.pattern, found)
        if found.device == "host":
            return pack_host(found, self.pattern, find_device(device))
        where, launch_stream = self._device_of_weights(found, device, stream)
        return pack_in_place(found, self.pattern, where, launch_stream)

    def _pack_quantized(self, weights: Quantized, device: str | None, stream: Any) -> Weights:
        if weights.pattern.natural != self.pattern.natural:
            raise LaunchError(f"{self!r}: got {weights!r}; weights of {self.pattern} are needed")
        weights = replace(weights, pattern=self.pattern)  # quantized weights do not store an order of features
        found = view(weights.scale, "weights.scale", stream_handle(stream))
        if found.device == "host":
            return pack_quantized(weights, find_device(device))
        where, launch_stream = self._device_of_weights(found, device, stream)
        return pack_quantized(weights, where, found, launch_stream)

    def _device_of_weights(self, found: ArrayView, device: str | None, stream: Any) -> tuple[Device, Stream]:
        """Device of weights that are not host arrays, and a stream on which they are complete."""
        if device is not None:
            raise LaunchError(
                f"{self!r}: device={device!r} says where host arrays go; these weights lie on a device already"
            )
        check_memory(self, {"weights": found})
        where, launch_stream = device_and_stream(self, found.device, found.stream if stream is None else stream)
        return in_their_context(self, where, launch_stream, {"weights": found}), launch_stream

    def _taken(self, weights: Quantized) -> Weights:
        """Quantized weights, packed at their first call."""
        packed = self._quantized.get(weights)
        if packed is None or not packed.device.is_open:
            packed = self._quantized[weights] = self.pack(weights)
        return packed


def _pattern(given: Any) -> Pattern:
    """Pattern that a user gave in any form; `PatternError` with the remedy if several were given."""
    try:
        return Pattern.read(given)
    except PatternError as error:
        if isinstance(given, list | tuple) and not all(isinstance(each, int) for each in given):
            raise PatternError(
                f"{error}; several factors are a Chain, and several chains on one x a GroupLauncher"
            ) from None
        raise
