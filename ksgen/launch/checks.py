"""Checks that the arrays and options of a call fit its pattern and each other, and refuses others before any launch.

`ArgumentChecks` caches the result for each combination of shapes, precisions and devices. It opens no device and reads
no stream.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from weakref import ReferenceType

from ksgen.devices.base import Device
from ksgen.devices.threads import of_torch
from ksgen.errors import LaunchError
from ksgen.families import MAP_ALIGNMENT
from ksgen.families.signature import numbered
from ksgen.launch.arrays import ArrayView, CallOptions, Place, Views, common_device, form_of
from ksgen.launch.memory import is_repeated, rows_are_whole, size_of, tie_of
from ksgen.launch.plan import Plan
from ksgen.launch.weights import WeightForm, Weights
from ksgen.pattern import Chain, Pattern
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS, STORAGES, Activation, Epilogue, Fuse, KernelSpec, PrecisionName
from ksgen.spec.kernel import StatedOptions, activations_of, check_word, hint, is_layer, is_transposed, is_word
from ksgen.spec.precision import stored_types
from ksgen.spec.storage import BYTE_TYPES, SAME, element_bytes, refused_x_precision
from ksgen.values import cached_property, excerpt, misfit, misfit_of_x, unlike

T = TypeVar("T")
MOST_CHECKED = 4096  # cached results of checks: one per batch size, and cheap to repeat
BETWEEN_DIFFERS = "the activations between their factors differ"
SOME_ADDED = "only some layers have a bias, or a residual"
STORED_OTHERWISE = "weights of the factors differ in storage"


class ArrayNames(NamedTuple):
    """Names of a call's arrays in messages: weights per factor, all others per chain."""

    weights: tuple[str, ...] = ("weights",)
    bias: tuple[str, ...] = ("bias",)
    residual: tuple[str, ...] = ("residual",)
    out: tuple[str, ...] = ("out",)
    operands: tuple[tuple[str, str], ...] = ()  # of a group's kernel: each operand with the name of its array

    @property
    def plain(self) -> dict[str, tuple[str, ...]]:
        """Names per chain, by the name of the same array in a call of that chain alone."""
        every = len(self.out)
        return {
            "x": ("x",) * every,
            "bias": self.bias,
            "residual": self.residual,
            "grad_y": ("grad_y",) * every,
            "out": self.out,
        }


ONE = ArrayNames()  # names for one factor


def names_of(chains: Sequence[Chain]) -> ArrayNames:
    """Names of the arrays of a call of these chains."""
    if len(chains) > 1:
        layers = [f"of layer {number}" for number in range(1, len(chains) + 1)]
        weights = (f"{each} {layer}" for chain, layer in zip(chains, layers, strict=True) for each in _weights(chain))
        bias, residual, out = (tuple(f"{name} {layer}" for layer in layers) for name in ("bias", "residual", "out"))
        arrays = {"bias": bias, "residual": residual, "y": out}
        operands = ((numbered(operand, len(chains)), names) for operand, names in arrays.items())
        pairs = (pair for each in operands for pair in zip(*each, strict=True))
        return ArrayNames(tuple(weights), bias, residual, out, tuple(pairs))
    return ArrayNames(_weights(chains[0]))


def _weights(chain: Chain) -> tuple[str, ...]:
    """Names of the weights of each factor."""
    if len(chain) == 1:
        return ONE.weights
    return tuple(f"weights of factor {number}" for number in range(1, len(chain) + 1))


def per_chain(chains: Sequence[Chain], values: Sequence[T]) -> list[Sequence[T]]:
    """Divide values, one per factor, into one sequence per chain."""
    ends = accumulate(map(len, chains), initial=0)
    return [values[begin:end] for begin, end in pairwise(ends)]


def y_shape(product: Pattern | Chain, layout: str, batch: int) -> tuple[int, int]:
    return (batch, product.out_features) if layout == "bsf" else (product.out_features, batch)


def check_layouts(caller: object, chains: Sequence[Chain], layout: str, out_layout: str | None) -> None:
    """Raise `LaunchError` on a group whose outputs have another layout than x."""
    if len(chains) > 1 and is_transposed(layout, out_layout):
        raise LaunchError(
            f"{caller!r}: out_layout={out_layout!r} with layout={layout!r}; accepted: one layout for x and all outputs"
        )


def refused_precision(precision: str | None, dtype: str) -> str:
    """Message about a precision in which x of this dtype cannot be multiplied; empty if it can."""
    accepted = [name for name, known in PRECISIONS.items() if known.dtype == dtype]
    if precision is None or is_word(precision, accepted):
        return ""
    wanted = f"accepted: {', '.join(accepted)}" if is_word(precision, PRECISIONS) else hint(precision, accepted)
    return f"precision={excerpt(precision)} for x of {dtype}; {wanted}"


def type_of_call(caller: object, x: str, others: Iterable[ArrayView], precision: str | None, inputs: str) -> str:
    """Dtype of the arrays of a call.

    It is the dtype of x, unless `inputs` says that x is in eight bits. Then the precision decides, else the first other
    array, else it is float32.
    """
    if inputs == SAME:
        if x in BYTE_TYPES:
            made = "weights that ksgen.quantize made with x_scale, which take x in eight bits"
            raise LaunchError(f"{caller!r}: x is of {x}; give {', '.join(stored_types())}, or {made}")
        return x
    if x not in (accepted := STORAGES[inputs].dtypes):
        makes = f"ksgen.quantize_inputs(x, {inputs!r}, scale=the weights' x_scale).values"
        raise LaunchError(
            f"{caller!r}: got x of {x} for weights that multiply x in {inputs}; give {' or '.join(accepted)}: {makes}"
        )
    given = next((each.dtype for each in others), "float32")
    asked = PRECISIONS.get(precision) if isinstance(precision, str) else None
    return given if asked is None else asked.dtype


def check_arrays(
    caller: object, pattern: Pattern, layout: str, views: Views, job: str = "multiply", dtype: str | None = None
) -> int:  # fmt: skip
    """Return the batch size; `LaunchError` on the first array whose shape, precision or strides do not fit.

    `views` holds x, and any of weights, bias, residual, grad_y and out. If x is in eight bits, `dtype` is that of all
    other arrays, else None.
    """
    x = views["x"]
    if wrong := misfit_of_x(x.shape, pattern.in_features, layout, least=1):
        raise LaunchError(f"{caller!r}: {wrong}")
    batch = int(x.shape[0 if layout == "bsf" else 1])
    y = y_shape(pattern, layout, batch)
    shapes = {
        "x": tuple(x.shape),
        "weights": pattern.shape,
        "bias": (pattern.out_features,),
        "residual": y,
        "grad_y": y,
    }
    shapes["out"] = pattern.shape if job == "gradient" else y
    typed = (x.dtype, "x") if dtype is None else (dtype, "y")
    for name, given in views.items():
        wrong = misfit(name, given.shape, shapes[name]) or ("" if name == "x" else unlike(name, given.dtype, *typed))
        if wrong:
            raise LaunchError(f"{caller!r}: {wrong}")
        slices = job == "multiply" and name in ("x", "out", "residual")
        _check_strides(caller, name, given, slices)
    return batch


def _check_strides(caller: object, name: str, given: ArrayView, slices: bool = False) -> None:
    """Raise `LaunchError` on gaps, except between rows if `slices`. Weights may repeat a slice."""
    if given.strides is None or (slices and rows_are_whole(given)) or (name == "weights" and is_repeated(given)):
        return
    gaps = "with gaps only between rows" if slices else "without gaps"
    raise LaunchError(f"{caller!r}: {name} must be row-major, {gaps}; give a contiguous copy of it")


def are_aligned(views: Views) -> bool:
    """Whether x, bias, residual and out, where given, are aligned for tensor maps and wide loads."""
    pointers = (views[name].pointer for name in ("x", "bias", "residual", "out") if name in views)
    return all(not isinstance(pointer, int) or pointer % MAP_ALIGNMENT == 0 for pointer in pointers)


def check_weights(caller: object, pattern: Pattern, weights: ArrayView) -> None:
    if wrong := misfit("weights", weights.shape, pattern.shape):
        raise LaunchError(f"{caller!r}: {wrong}")
    _check_strides(caller, "weights", weights)


def check_memory(caller: object, views: Views, names: ArrayNames = ONE, unread: Views = MappingProxyType({})) -> bool:
    """Check at every call: no array requires gradients, has a bad address, overlaps an output or is a read-only output.

    `unread` holds views of packed weights that a launch may read after another has written an output. Returns whether
    all arrays begin at multiples of `MAP_ALIGNMENT`.
    """
    is_grad_enabled = of_torch("is_grad_enabled")
    if is_grad_enabled is not None and is_grad_enabled():
        for name, given in views.items():
            if given.kind == "torch" and given.owner.requires_grad:
                raise LaunchError(
                    f"{caller!r}: {name} requires gradients, which launchers do not record; call under torch.no_grad()"
                )
    bits = 0
    for name, given in views.items():
        pointer = given.pointer
        if isinstance(pointer, int):
            if not pointer:  # arrays of fitting shapes are never empty
                raise LaunchError(
                    f"{caller!r}: {name} is of shape {tuple(given.shape)} and lies at address 0; give an array with "
                    "memory"
                )
            if pointer % MAP_ALIGNMENT and given.device != "host" and pointer % element_bytes(given.dtype):
                raise LaunchError(
                    f"{caller!r}: {name} starts inside a {given.dtype}, at {pointer:#x}; give a copy of it"
                )
            bits |= pointer
    for out in names.out:
        if out in views:
            _check_out(caller, out, names.residual[names.out.index(out)], {**views, **unread} if unread else views)
    if "grad_y" in views and "bias" in views:
        _check_out(caller, "bias", "", views)
    return bits % MAP_ALIGNMENT == 0


def _check_out(caller: object, name: str, residual: str, views: Views) -> None:
    """Raise `LaunchError` if an output is read-only or overlaps an operand or another output.

    An output may be its own residual. In any other overlap, a launch may read what it has already overwritten.
    """
    out = views[name]
    if not out.writeable:
        raise LaunchError(f"{caller!r}: {name} is read-only; give an array that can be written to")
    for other, given in views.items():
        if other == name or (other == residual and (given.pointer, given.strides) == (out.pointer, out.strides)):
            continue
        if _overlap(given, out):
            raise LaunchError(f"{caller!r}: {name} shares memory with {other}; give memory of its own")


def _overlap(one: ArrayView, other: ArrayView) -> bool:
    """Whether two arrays share memory.

    Column slices of one array interleave row by row without sharing memory.
    """
    if not isinstance(one.pointer, int) or not isinstance(other.pointer, int):
        return bool(one.pointer == other.pointer)
    first, second = (one, other) if one.pointer <= other.pointer else (other, one)
    if second.pointer >= first.pointer + size_of(first):
        return False
    if first.strides is None or second.strides is None or first.strides[0] != second.strides[0]:
        return True
    if len(first.shape) != 2 or len(second.shape) != 2:  # weights that repeat a slice
        return True
    begin = (second.pointer - first.pointer) % first.strides[0]  # offset of the second's rows from the first's
    lengths = [each.shape[1] * element_bytes(each.dtype) for each in (first, second)]
    return bool(begin < lengths[0] or begin + lengths[1] > first.strides[0])


class Multiplier:
    """Base of all launchers. Its attributes are what checks read: the chains, all on one x, and options of a kernel."""

    chains: tuple[Chain, ...]
    names: ArrayNames
    batches: frozenset[int] = frozenset()  # batch sizes with their own kernels
    between: Activation | None  # the activation between the factors of each chain; None if they differ
    fuse: Fuse
    _factors: tuple[Any, ...]  # empty for a launcher that is its only factor

    @property
    def layers(self) -> tuple[Any, ...]:
        """Launchers, one per chain."""
        return (self,)

    @property
    def factors(self) -> tuple[Any, ...]:
        """Launchers, one per factor, concatenated for all chains."""
        return self._factors or (self,)


def check_storage(caller: object, stated: StatedOptions, weights: Sequence[Any]) -> None:
    """Raise `LaunchError` on weights, one array per factor, whose storage differs from the stated one.

    Only the first factor multiplies X, so only its weights may take X in eight bits.
    """
    for number, each in enumerate(weights, 1):
        inputs = stated.inputs if number == 1 else SAME
        found = (each.stored, each.inputs) if isinstance(each, Weights) else (SAME, SAME)
        if found != (stated.weights, inputs):
            which = "weights" if len(weights) == 1 else f"weights of factor {number}"
            remedy = (
                f"results of ksgen.quantize(weights, {stated.weights!r}{'' if inputs == SAME else ', x_scale=...'})"
            )
            stored_as = " and ".join(
                f"{name}={value}" for name, value in zip(("weights", "inputs"), found, strict=True)
            )
            raise LaunchError(
                f"{caller!r}: {which} are stored as {stored_as}, unlike the launcher's options; accepted: {remedy}"
            )


@dataclass(eq=False)
class CheckedArguments:
    """Arguments whose shapes, precisions and devices were checked, with the kernel of one launch and its plans."""

    batch: int
    place: Place
    precision: PrecisionName
    kernel: KernelSpec | None  # None if options or arrays rule out one launch
    why: str = ""  # reason for several launches
    # By device, the planner's generation and alignment; None: several launches. Only the planner keeps the plans alive.
    plans: dict[tuple[Device, int, bool], ReferenceType[Plan] | None] = field(default_factory=dict)

    @cached_property
    def of_copies(self) -> "CheckedArguments":
        """Arguments of copies on a device, where rows are contiguous and weights are whole."""
        if self.kernel is None or not (self.kernel.is_strided or self.kernel.tied):
            return self
        return replace(self, kernel=replace(self.kernel.untied, stride="dense"), plans={})


class ArgumentChecks:
    """Validated argument signatures of one launcher and job."""

    def __init__(self, job: str = "multiply") -> None:
        self._job = job
        self._found: dict[Hashable, CheckedArguments] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(
        self, caller: Multiplier, options: CallOptions, views: Views, forms: Sequence[WeightForm]
    ) -> CheckedArguments:
        """Checked arguments with these shapes, precisions, strides and devices; checked at the first call.

        `forms` has the form of each factor's weights.
        """
        key = (options[:-1], *forms, *views, *map(form_of, views.values()))
        try:
            return self._found[key]
        except (KeyError, TypeError):  # unhashable or new arguments are checked below
            found = _checked(caller, self._job, options, views, forms)
        if len(self._found) >= MOST_CHECKED:
            self._found.clear()
        self._found[key] = found
        return found


def _checked(
    caller: Multiplier, job: str, options: CallOptions, views: Views, forms: Sequence[WeightForm]
) -> CheckedArguments:  # fmt: skip
    """Check a call once; `LaunchError` on arguments that any factor would refuse."""
    layout, activation, asked, out_layout, residual_first, _ = options
    check_word(f"{caller!r}: layout", layout, LAYOUTS, LaunchError)
    check_word(f"{caller!r}: activation", activation, ACTIVATIONS, LaunchError)
    if out_layout is not None:
        check_word(f"{caller!r}: out_layout", out_layout, LAYOUTS, LaunchError)
    check_layouts(caller, caller.chains, layout, out_layout)
    names, inputs = caller.names, _inputs(caller, forms)
    others = (views[name] for name in (*names.out, *names.bias, *names.residual) if name in views)
    dtype = type_of_call(caller, views["x"].dtype, others, asked, inputs)
    if wrong := refused_precision(asked, dtype):
        raise LaunchError(f"{caller!r}: {wrong}")
    precision: Any = asked or dtype
    for form, pattern in zip(forms, (pattern for chain in caller.chains for pattern in chain), strict=bool(forms)):
        if form.stored != SAME and (accepted := refused_x_precision(form.stored, precision)):
            raise LaunchError(
                f"{caller!r}: weights in {form.stored} with precision={precision}; accepted: x of {accepted}"
            )
        if form.shape not in (None, pattern.shape):
            packed = Pattern.read(form.shape)
            raise LaunchError(f"{caller!r}: these weights were packed for pattern {packed}; pack them again")
        if form.dtype not in (None, dtype) and form.stored == SAME:
            raise LaunchError(
                f"{caller!r}: packed weights are {form.dtype} and x is {dtype}; give both in one precision"
            )
    batch = 0
    for number, (layer, layer_weights) in enumerate(
        zip(caller.layers, per_chain(caller.chains, names.weights), strict=True)
    ):
        given = {name: views[each[number]] for name, each in names.plain.items() if each[number] in views}
        batch = _check_layer(
            layer, job, options, given, [views.get(name) for name in layer_weights], (dtype, precision, inputs)
        )
    place = common_device(views)
    added = [{name in views for name in each} for each in (names.bias, names.residual)]
    epilogue = Epilogue(True in added[0], activation, True in added[1], residual_first)
    is_of_layer = is_layer(caller.chains, layout, out_layout)
    storages = {form.stored for form in forms} or {SAME}
    why = ""
    if is_of_layer:
        why = SOME_ADDED if any(len(each) > 1 for each in added) else BETWEEN_DIFFERS if caller.between is None else ""
        why = why or (STORED_OTHERWISE if len(storages) > 1 else "")
        if why or caller.fuse == "no":
            KernelSpec(caller.chains[-1][-1], precision, layout, epilogue)  # refuses what only the last launch would
            return CheckedArguments(batch, place, precision, None, why)
    # outputs of a group that are slices of one array
    are_slices = len(caller.chains) > 1 and (place == "host" or (names.out[0] not in views and layout == "bsf"))
    has_gaps = any(views[each].strides is not None for each in views if each not in names.weights)
    stride = "any" if are_slices or has_gaps else "dense"
    (weights,) = storages
    own_batch = batch if batch in caller.batches and not is_of_layer else None
    between = caller.between if is_of_layer and caller.between else "none"
    ties = [form.tie or tie_of(views.get(name)) for name, form in zip(names.weights, forms, strict=bool(forms))]
    tied = tuple(ties) if weights == SAME else ()
    kernel = KernelSpec(
        caller.chains, precision, layout, epilogue, own_batch, job, stride, between, out_layout, weights, inputs, tied
    )
    return CheckedArguments(batch, place, precision, kernel)


def _inputs(caller: Multiplier, forms: Sequence[WeightForm]) -> str:
    """Storage of the x that all chains take; intermediates are stored like y."""
    storages = []
    for layer, chain_forms in zip(caller.layers, per_chain(caller.chains, forms), strict=True) if forms else ():
        for number, form in enumerate(chain_forms, 1):
            if number > 1 and form.inputs != SAME:
                only = "weights that ksgen.quantize made without x_scale, because intermediates are stored like y"
                raise LaunchError(
                    f"{layer!r}: weights of factor {number} multiply x in {form.inputs}; accepted: {only}"
                )
        storages.append(chain_forms[0].inputs)
    if others := [number for number, each in enumerate(storages, 1) if each != storages[0]]:
        how = f"those of layer 1 as {storages[0]} and those of layer {others[0]} as {storages[others[0] - 1]}"
        raise LaunchError(
            f"{caller!r}: the first factors of the layers take x in different storage, {how}; accepted: one "
            "storage for all of them"
        )
    return storages[0] if storages else SAME


def _check_layer(
    layer: Multiplier, job: str, options: CallOptions, given: Views, unpacked: Sequence[ArrayView | None],
    types: tuple[str, str, str],
) -> int:  # fmt: skip
    """Return the batch size; `LaunchError` on arguments that any factor of a chain would refuse.

    `unpacked` has the weights of each factor, or None if they are packed. `types` has the dtype of `type_of_call`, the
    precision, and the storage of x.
    """
    (chain,), (dtype, precision, inputs), x = layer.chains, types, given["x"]
    if layer.between not in (accepted := activations_of(precision)):
        raise LaunchError(
            f"{layer!r}: between={layer.between!r} of complex numbers, {precision}; accepted: {', '.join(accepted)}"
        )
    batch = 0
    for number, (factor, weights) in enumerate(zip(layer.factors, unpacked, strict=True)):
        pattern = chain[number]
        layout = options.layout if number < chain.transposing_factor else options.out_layout or options.layout
        if number == chain.transposing_factor and layout != options.layout:
            check_arrays(factor, pattern, options.layout, {"x": x})
            x = x._replace(shape=x.shape[::-1], strides=None)
        arrays = {"x": x} if weights is None else {"x": x, "weights": weights}
        if number + 1 == len(chain):
            arrays = {**given, **arrays}
        batch = check_arrays(factor, pattern, layout, arrays, job, None if inputs == SAME else dtype)
        common_device(arrays)
        x = x._replace(shape=y_shape(pattern, layout, batch), strides=None, dtype=dtype)
    return batch
