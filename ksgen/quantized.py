"""Quantizes weights and X to eight bits with scales.

Scales are chosen so that no value saturates. If inputs are given, scales are chosen so that the products with them
change least.

bfloat16 has no scales: each weight is rounded. Takes arrays of NumPy and tensors of PyTorch, and returns the same kind.
Never launches a kernel.
"""

import sys
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np

from ksgen.errors import LaunchError
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, STORAGES, ByteStorage, Layout, Storage, WeightStorage
from ksgen.spec.kernel import check_word
from ksgen.spec.storage import SAME, SCALE_BYTES, STORED, scales_begin
from ksgen.values import counted, excerpt, is_masked, misfit, misfit_of_x, real_number

Array = np.ndarray[Any, Any]

Per = Literal["factor", "i", "output"]  # the keys of PER
PER = {"factor": (), "i": (0,), "output": (0, 1, 3)}  # axes of (a, b, c, d) along which scales differ
# shares of the largest weight that calibration maps to the largest value, in the order in which it tries them
CLIPPED = np.linspace(0.3, 1.0, 36)[::-1]
ROUNDED = 1 + 2.0**-20  # numbers up to this multiple of the largest value exceed it only by rounding errors
LARGEST = float(np.finfo(np.float32).max)
ELEMENTS_AT_ONCE = 2**22  # elements of X that are summed at a time


@dataclass(frozen=True, eq=False)
class Quantized:
    """Weights (a, b, c, d) in eight bits or in bfloat16, which `quantize` returns.

    Launchers pack them and multiply by them directly. Two objects are equal only if they are the same object.

    Attributes:
        pattern: Pattern of the weights.
        storage: "int8", "e4m3", "e5m2" or "bfloat16".
        per: What has a scale of its own: "factor" (all weights), "i" (a diagonal block) or "output" (i, k, j).
        values: Stored values (a, b, c, d): an array of NumPy or a tensor of PyTorch.
        scale: float32 scales (1, 1, 1, 1), (a, 1, 1, 1) or (a, b, 1, d). In bfloat16 there is one, which is 1.
        saturated: Number of weights that exceeded the largest value of `storage` times their scale, and were clipped.
        x_scale: Scale of x, if x is stored in `storage` too. None: x is stored like y.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> ksgen.quantize(np.ones((1, 3, 2, 2), np.float32), "int8")
        Quantized(1,3,2,2, int8, a scale per output, 0 of 12 weights saturated)
    """

    pattern: Pattern
    storage: str  # "int8", "e4m3" or "e5m2"; or "bfloat16", with one scale, which is 1
    per: str  # unit with its own scale: "factor", "i" or "output"
    values: Any  # (a, b, c, d), in this storage
    scale: Any  # float32: (1, 1, 1, 1), (a, 1, 1, 1) or (a, b, 1, d)
    saturated: int = 0  # weights that were clipped to the largest stored value
    x_scale: float | None = None  # scale of x, if x is stored in `storage` too; None: x is stored like y

    def __repr__(self) -> str:
        of_x = "" if self.x_scale is None else f", for x in {self.storage} times {self.x_scale:.6g}"
        return (
            f"Quantized({self.pattern}, {self.storage}, {describe_scales(self.storage, self.per)}, "
            f"{self.description}{of_x})"
        )

    @property
    def inputs(self) -> str:
        """Storage of the x that these weights multiply."""
        return SAME if self.x_scale is None else self.storage

    @property
    def description(self) -> str:
        """How many weights saturated, in words, such as "0 of 12 weights saturated"."""
        return f"{self.saturated} of {counted(self.pattern.weight_count, 'weight')} saturated"

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return STORED[self.storage].item_bytes * self.pattern.weight_count + SCALE_BYTES * int(prod(self.scale.shape))

    def dequantized(self) -> Any:
        """Compute the weights that values and scales represent.

        Returns:
            float32 weights (a, b, c, d): an array, or a tensor on the device of the values.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> weights = np.array([2.0, -1.0], np.float32).reshape(1, 1, 2, 1)
            >>> ksgen.quantize(weights, "int8").dequantized().ravel().round(2)
            array([ 2.  , -1.01], dtype=float32)
        """
        if _is_tensor(self.values):
            return self.values.to(self.scale.dtype) * self.scale
        return self.values.astype(np.float32) * self.scale

    def error(self, weights: Any, x: Any = None, layout: Layout = "bsf") -> float:
        """Compute the error relative to given weights, by the Frobenius norm.

        Args:
            weights: Weights (a, b, c, d) in floating point.
            x: Inputs. If given, the error is that of Y = X K^T.
            layout: Layout of x: "bsf" or "bsl".

        Returns:
            The norm of the difference over that of the weights or Y. It is the norm of the difference if those are 0.

        Raises:
            LaunchError: `weights` or `x` has another shape.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> weights = np.arange(12, dtype=np.float32).reshape(1, 3, 2, 2)
            >>> ksgen.quantize(weights, "int8").error(weights) < 0.01
            True
        """
        wide = _checked_weights(weights, STORED[self.storage])
        if wrong := misfit("weights", wide.shape, self.pattern.shape):
            raise LaunchError(f"{self!r}: {wrong}")
        moments = None if x is None else _moments(self.pattern, x, layout)
        difference = _squares(self._exact() - wide, moments).sum()
        reference = _squares(wide, moments).sum()
        return float(np.sqrt(difference / reference)) if reference else float(np.sqrt(difference))

    def _exact(self) -> Array:
        """The dequantized weights in float64."""
        return _as_array(self.values) * _as_array(self.scale)

    @property
    def whole(self) -> Any:
        """Bytes that kernels pack: values, padding, and one scale per output.

        Each scale is multiplied by `x_scale`, if there is one. NumPy values give an array. PyTorch values give a tensor
        on their device.
        """
        a, b, _, d = self.pattern.shape
        size, count = STORED[self.storage].item_bytes, self.pattern.weight_count
        gap = scales_begin(count, size) - count * size
        if _is_tensor(self.values):
            torch = sys.modules["torch"]
            with torch.inference_mode(False), torch.no_grad():
                scale = self.scale if self.x_scale is None else self.scale * self.x_scale
                scales = scale.expand(a, b, 1, d).contiguous().view(torch.uint8).reshape(-1)
                values = self.values.contiguous().view(torch.uint8).reshape(-1)
                return torch.cat([values, values.new_zeros(gap), scales])
        scale = self.scale if self.x_scale is None else self.scale * np.float32(self.x_scale)
        scales = np.ascontiguousarray(np.broadcast_to(scale, (a, b, 1, d))).view(np.uint8).ravel()
        return np.concatenate([self.values.view(np.uint8).ravel(), np.zeros(gap, np.uint8), scales])


@dataclass(frozen=True, eq=False)
class QuantizedInputs:
    """X in eight bits, which `quantize_inputs` returns.

    Launchers take `values` as x, with weights from `quantize(..., x_scale=scale)`.

    Attributes:
        storage: "int8", "e4m3" or "e5m2".
        values: Stored values, of the shape of x.
        scale: Scale of all values.
        saturated: Number of elements that exceeded the largest value of `storage` times `scale`, and were clipped.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> ksgen.quantize_inputs(np.array([[0.5, 127.0]], np.float32), "int8")
        QuantizedInputs((1, 2), int8 times 1, 0 of 2 elements saturated)
    """

    storage: str
    values: Any  # shaped as x
    scale: float  # one scale for all elements
    saturated: int = 0  # elements that were clipped to the largest stored value

    def __repr__(self) -> str:
        count = counted(int(prod(self.values.shape)), "element")
        return (
            f"QuantizedInputs({tuple(self.values.shape)}, {self.storage} times {self.scale:.6g}, {self.saturated} "
            f"of {count} saturated)"
        )

    def dequantized(self) -> Any:
        """Compute the x that values and scale represent.

        Returns:
            float32 array, or tensor on the device of the values.

        Examples:
            >>> import numpy as np
            >>> import ksgen
            >>> x = np.array([[1.0, 127.0]], np.float32)
            >>> ksgen.quantize_inputs(x, "int8").dequantized()
            array([[  1., 127.]], dtype=float32)
        """
        if _is_tensor(self.values):
            return self.values.to(sys.modules["torch"].float32) * self.scale
        return self.values.astype(np.float32) * np.float32(self.scale)


def describe_scales(storage: str, per: str) -> str:
    """Words for the scales of weights in this storage."""
    return f"a scale per {per}" if STORED[storage].is_scaled else "no scales"


def quantize_inputs(
    x: Any, storage: ByteStorage, *, scale: float | None = None, saturate: bool = False
) -> QuantizedInputs:
    """Quantize x to eight bits with one scale.

    Args:
        x: Array of NumPy or tensor of PyTorch, of real finite numbers.
        storage: "int8", "e4m3" or "e5m2".
        scale: Scale that was found on other data. None: the smallest scale without saturation.
        saturate: True clips elements beyond the largest value at the scale. False refuses a scale that needs clipping.

    Returns:
        `QuantizedInputs`. `quantize(weights, storage, x_scale=result.scale)` gives weights for it.

    Raises:
        LaunchError: x is not finite, an option is unknown, or the scale would saturate values.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> x, weights = np.ones((1, 4), np.float32), np.ones((1, 3, 2, 2), np.float32)
        >>> stored = ksgen.quantize_inputs(x, "int8")
        >>> stored.values
        array([[127, 127, 127, 127]], dtype=int8)
        >>> quantized = ksgen.quantize(weights, "int8", x_scale=stored.scale)
        >>> ksgen.Launcher(1, 3, 2, 2)(stored.values, quantized)
        array([[2., 2., 2., 2., 2., 2.]], dtype=float32)
    """
    check_word("storage", storage, STORAGES, LaunchError)
    if type(saturate) is not bool:
        raise LaunchError(f"saturate={excerpt(saturate)}; accepted: True or False")
    wide, how = _as_array(x), STORAGES[storage]
    _check_finite(wide, f"{counted(wide.size, 'element')} of x")
    largest = float(np.abs(wide).max(initial=0.0))
    chosen = max(largest / how.largest, float(np.finfo(np.float32).tiny)) if largest else 1.0
    if scale is None and chosen > LARGEST:
        raise LaunchError(
            f"x up to {largest:.3g}, whose scale in {storage} would exceed float32; accepted: smaller values"
        )
    x_scale = float(np.float32(chosen)) if scale is None else checked_x_scale(scale)
    values, saturated = _values(wide, np.asarray(x_scale, np.float32), how)
    if saturated and not saturate:
        what, most = counted(saturated, "element"), x_scale * how.largest
        raise LaunchError(
            f"scale={x_scale:.6g}: {what} of x beyond {most:.6g}, the largest that {storage} has at this scale; "
            "accepted: a larger scale, or saturate=True"
        )
    return QuantizedInputs(storage, _like(x, values, how), x_scale, saturated)


def checked_x_scale(scale: Any) -> float:
    """A scale of x as a float32 number; `LaunchError` on anything else."""
    given = real_number(scale)
    with np.errstate(over="ignore"):
        found = 0.0 if given is None else float(np.float32(given))
    if not (np.finfo(np.float32).tiny <= found <= LARGEST):
        raise LaunchError(f"scale={excerpt(scale)}; accepted: a positive normal float32")
    return found


def quantize(
    weights: Any,
    storage: WeightStorage,
    per: Per = "output",
    *,
    x: Any = None,
    layout: Layout = "bsf",
    scale: Any = None,
    x_scale: Any = None,
) -> Quantized:
    """Quantize weights to eight bits with scales, or to bfloat16.

    A scale is the largest absolute weight divided by the largest value of `storage`, so that no weight saturates. With
    `x`, each scale is chosen so that X K^T changes least; then the largest weights may saturate. bfloat16 has no
    scales: each weight is rounded to the nearest value, ties to even, and infinities and NaN stay.

    Args:
        weights: Weights (a, b, c, d): an array of NumPy or a tensor of PyTorch.
        storage: "int8", "e4m3", "e5m2", or "bfloat16" for x of float32.
        per: What has a scale of its own: "factor" (all weights), "i" (a diagonal block) or "output" (i, k, j).
        x: Inputs that these weights multiply, for calibration. None: no calibration.
        layout: Layout of x: "bsf" or "bsl".
        scale: Scales (1, 1, 1, 1), (a, 1, 1, 1) or (a, b, 1, d), at which no weight saturates. None: computed.
        x_scale: Scale of x, if x is stored in eight bits like the weights. `quantize_inputs` finds it.

    Returns:
        `Quantized`, which launchers accept as weights. Its `saturated` counts saturated weights.

    Raises:
        LaunchError: Weights are not four-dimensional, are not finite (eight bits only), or options are unknown or
            exclude each other.

    Examples:
        >>> import numpy as np
        >>> import ksgen
        >>> weights = np.ones((1, 3, 2, 2), np.float32)
        >>> quantized = ksgen.quantize(weights, "int8")
        >>> quantized.nbytes, weights.nbytes
        (36, 48)
        >>> ksgen.Launcher(1, 3, 2, 2)(np.ones((1, 4), np.float32), quantized)
        array([[2., 2., 2., 2., 2., 2.]], dtype=float32)
        >>> ksgen.quantize(weights, "int7")
        Traceback (most recent call last):
        ...
        ksgen.errors.LaunchError: storage='int7'; did you mean int8? accepted: int8, e4m3, e5m2, bfloat16
    """
    if isinstance(weights, Quantized):
        stored = "in eight bits" if STORED[weights.storage].is_scaled else f"in {weights.storage}"
        raise LaunchError(f"got {weights!r}, which is {stored} already; accepted: the weights in floating point")
    check_word("storage", storage, STORED, LaunchError)
    check_word("per", per, PER, LaunchError)
    if x is not None and scale is not None:
        raise LaunchError("both x and scale were given; accepted: x to choose scales from, or scale")
    how = STORED[storage]
    given = [name for name, each in (("x", x), ("scale", scale), ("x_scale", x_scale)) if each is not None]
    if not how.is_scaled and given:
        raise LaunchError(f"{given[0]} was given with storage={storage}, which has no scales; accepted: weights alone")
    wide = _checked_weights(weights, how)
    pattern = Pattern(*wide.shape)
    if not how.is_scaled:
        one = np.ones((1, 1, 1, 1), np.float32)
        return Quantized(pattern, storage, "factor", _like(weights, rounded(wide, how), how), _like(weights, one))
    if scale is not None:
        scales = _checked_scale(scale, pattern, per, how)
    else:
        scales = _scales(wide, how, per, None if x is None else _moments(pattern, x, layout))
    values, saturated = _values(wide, scales, how)
    if scale is not None and saturated:
        count = counted(saturated, "weight")
        raise LaunchError(
            f"scale={excerpt(scale)}: {count} would be beyond {how.largest:g} of {storage}; accepted: a larger scale"
        )
    scale_of_x = None if x_scale is None else checked_x_scale(x_scale)
    if scale_of_x is not None:
        with np.errstate(over="ignore", under="ignore"):
            both = scales * np.float32(scale_of_x)
        if not ((both >= np.finfo(np.float32).tiny).all() and (both <= LARGEST / how.largest**2).all()):
            raise LaunchError(
                f"x_scale={excerpt(x_scale)}, times a scale of the weights, is not a normal float32, or its products "
                f"with values of {storage} exceed float32; accepted: another x_scale"
            )
    return Quantized(pattern, storage, per, _like(weights, values, how), _like(weights, scales), saturated, scale_of_x)


def rounded(wide: Array, how: Storage) -> Array:
    """Round numbers to the nearest stored values; in storage with scales, they must not exceed the largest value."""
    return np.rint(wide).astype(np.int8) if how.mantissa is None else _to_odd(wide).astype(numpy_type(how))


def _to_odd(wide: Array) -> Array:
    """Numbers rounded to odd in float32: the last bit is set if digits were cut off.

    Rounding these numbers to fewer bits, as ml_dtypes does, gives the same values as rounding the given numbers once.
    """
    with np.errstate(over="ignore", under="ignore"):
        near = wide.astype(np.float32)
        cut = np.where(np.abs(near.astype(np.float64)) > np.abs(wide), np.nextafter(near, np.float32(0)), near)
    is_cut = np.isfinite(wide) & (cut.astype(np.float64) != wide)
    odd = (cut.view(np.uint32) | is_cut.astype(np.uint32)).view(np.float32)
    return np.where(is_cut, odd, near)


def numpy_type(how: Storage) -> Any:
    """NumPy's dtype for a storage, or that of ml_dtypes."""
    if how.mantissa is None:
        return np.dtype(how.dtype)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, how.dtype))


def _values(wide: Array, scales: Array, how: Storage) -> tuple[Array, int]:
    """Values for these scales, and how many exceeded the largest value by more than a rounding error."""
    quotients = wide / scales.astype(np.float64)
    clipped = np.clip(quotients, -how.largest, how.largest)
    return rounded(clipped, how), int(np.count_nonzero(np.abs(quotients) > how.largest * ROUNDED))


def _scales(wide: Array, how: Storage, per: str, moments: Array | None) -> Array:
    """Scales in float32, which broadcast to (a, b, c, d).

    They are the smallest without saturation; with moments of X, the best of those that `CLIPPED` gives.
    """
    reduced = tuple(axis for axis in range(4) if axis not in PER[per])
    largest = np.abs(wide).max(axis=reduced, keepdims=True) / how.largest
    unclipped = np.where(largest > 0, np.maximum(largest, np.finfo(np.float32).tiny), 1.0).astype(np.float32)
    if moments is None:
        return unclipped
    best, least = unclipped, np.full(unclipped.shape, np.inf)
    for share in CLIPPED:
        tried = np.maximum(unclipped * np.float32(share), np.finfo(np.float32).tiny)
        values, _ = _values(wide, tried, how)
        error = _squares(values.astype(np.float64) * tried - wide, moments).sum(axis=reduced, keepdims=True)
        is_better = error < least
        best, least = np.where(is_better, tried, best), np.where(is_better, error, least)
    return best


def _squares(weights: Array, moments: Array | None) -> Array:
    """(a, b, 1, d): squared norm of each output's weights; with moments of X, of the output over the batch."""
    if moments is None:
        squares: Array = np.square(weights).sum(axis=2, keepdims=True)
        return squares
    rows = weights.transpose(0, 3, 1, 2)
    norms: Array = np.maximum((np.matmul(rows, moments) * rows).sum(axis=-1), 0.0)
    return norms.transpose(0, 2, 1)[:, :, None, :]


def _moments(pattern: Pattern, x: Any, layout: str) -> Array:
    """(a, d, c, c): products of all pairs of inputs of each (i, j), summed over the batch."""
    check_word("layout", layout, LAYOUTS, LaunchError)
    given = _as_array(x)
    if wrong := misfit_of_x(given.shape, pattern.in_features, layout, least=1):
        raise LaunchError(wrong)
    rows = given if layout == "bsf" else given.T
    if not np.isfinite(rows).all():
        raise LaunchError("x holds numbers that are not finite; accepted: finite inputs")
    a, _, c, d = pattern.shape
    total = np.zeros((a, d, c, c))
    at_once = max(1, ELEMENTS_AT_ONCE // pattern.in_features)
    for start in range(0, len(rows), at_once):
        inputs = rows[start : start + at_once].reshape(-1, a, c, d).transpose(1, 3, 0, 2)
        total += np.matmul(inputs.transpose(0, 1, 3, 2), inputs)
    return total


def _checked_weights(weights: Any, how: Storage) -> Array:
    wide = _as_array(weights)
    if wide.ndim != 4:
        raise LaunchError(f"got weights of shape {wide.shape}; accepted: (a, b, c, d)")
    if not how.is_scaled:
        return wide
    _check_finite(wide, counted(wide.size, "weight"))
    if count := int(np.count_nonzero(np.abs(wide) > LARGEST)):
        raise LaunchError(
            f"{count} of {counted(wide.size, 'weight')} beyond {LARGEST:.3g}, the largest float32; accepted: less"
        )
    return wide


def _check_finite(wide: Array, what: str) -> None:
    if count := int(np.count_nonzero(~np.isfinite(wide))):
        raise LaunchError(f"{count} of {what} not finite; accepted: finite numbers")


def _checked_scale(scale: Any, pattern: Pattern, per: str, how: Storage) -> Array:
    wanted = tuple(size if axis in PER[per] else 1 for axis, size in enumerate(pattern.shape))
    given = _as_array(scale)
    if given.squeeze().shape not in (tuple(size for size in wanted if size > 1), (prod(wanted),)):
        raise LaunchError(f"scale has shape {given.shape}; accepted for per={per}: {wanted}")
    with np.errstate(over="ignore"):
        scales = given.reshape(wanted).astype(np.float32)
    if not (np.isfinite(scales).all() and (scales > 0).all()):
        raise LaunchError(f"scale={excerpt(scale)}; accepted: finite numbers above 0")
    if (scales > LARGEST * ROUNDED / how.largest).any():
        raise LaunchError(
            f"scale={excerpt(scale)}, times {how.largest:g} of {how.name}, exceeds float32; accepted: a smaller scale"
        )
    return scales


def _is_tensor(array: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _as_array(given: Any) -> Array:
    """The given values as a float64 array on the host."""
    if is_masked(given):
        raise LaunchError(f"got a masked array, {excerpt(given)}; accepted: an array without a mask")
    try:
        if _is_tensor(given):
            host = given.detach().cpu()
            found = (host if host.is_complex() else host.double()).numpy()
        else:
            found = np.asarray(given)
        wide: Array = found if found.dtype.kind == "c" else found.astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:  # such as of a sparse tensor, or one on "meta"
        raise LaunchError(
            f"got {excerpt(given)}; accepted: an array of NumPy, or a dense tensor of PyTorch with values"
        ) from error
    if wide.dtype.kind == "c":
        raise LaunchError("got complex numbers; accepted: real ones")
    return wide


def _like(given: Any, made: Array, how: Storage | None = None) -> Any:
    """Contiguous values or scales in the given array's form: a tensor on its device, or a read-only NumPy array."""
    made = np.asarray(made, order="C")
    if _is_tensor(given):
        torch = sys.modules["torch"]
        if how is None:
            return torch.from_numpy(made).to(given.device)
        return torch.from_numpy(made.view(np.uint8)).to(given.device).view(getattr(torch, how.dtype))
    made.flags.writeable = False
    return made
