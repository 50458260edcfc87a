"""Describes one kernel: pattern, precision, layout, epilogue, batch and job. Families decide how it is computed."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from math import prod
from typing import Any, Literal, TypedDict, get_args

from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Chain, Pattern
from ksgen.spec.precision import PRECISIONS, Precision, PrecisionName, gradient_of, named_otherwise
from ksgen.spec.storage import (
    INPUTS,
    SAME,
    SCALE_BYTES,
    STORAGES,
    STORED,
    WEIGHTS,
    ByteStorage,
    Same,
    WeightStorage,
    refused_x_precision,
    scales_begin,
)
from ksgen.values import cached_property, excerpt, shown, whole_number

Layout = Literal["bsf", "bsl"]  # batch-size-first: (batch, features); batch-size-last: (features, batch)
Activation = Literal["none", "relu", "gelu", "gelu_tanh", "silu"]
# dense: rows of X, Y and the residual are contiguous; any: calls pass the distance between rows, so that arrays may be
# slices
Stride = Literal["dense", "any"]
Job = Literal["multiply", "gradient"]  # Y = X K^T; the gradient of the weights, from X and dY
# one launch for all factors. auto: if it is faster; yes: always, or an error; no: never
Fuse = Literal["auto", "yes", "no"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
STRIDES: tuple[Stride, ...] = get_args(Stride)
JOBS: tuple[Job, ...] = get_args(Job)
FUSES: tuple[Fuse, ...] = get_args(Fuse)
TIES = ("", "a", "d", "ad")
SLICES = {tie: tuple(slice(1) if axis in tie else slice(None) for axis in "abcd") for tie in TIES}  # of tied weights
CHAIN = "chain"  # job of a kernel for several factors, or for one factor that changes the layout; no spec names it
LONGEST_PATTERNS = 150  # characters of the patterns in a kernel's name, which names a file; longer ones are hashed
# characters of a kernel's name; the end of a longer one is hashed, because compilers add to it in names of files
LONGEST_NAME = 200
MOST_BYTES = 2**63 - 1  # bytes of X, Y or the weights: offsets are signed and 64 bits wide


def activations_of(precision: str) -> tuple[str, ...]:
    """Activations that are defined for the numbers of a precision."""
    return ("none",) if PRECISIONS[precision].is_complex else ACTIVATIONS


def hint(value: object, accepted: Collection[str]) -> str:
    """End of a message about a word that is not accepted."""
    word = value if isinstance(value, str) else excerpt(value)
    known = named_otherwise(word.lower())
    close = [known] if known in accepted else get_close_matches(word[:100], accepted, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}accepted: {', '.join(accepted)}"


def is_word(value: object, accepted: Collection[str]) -> bool:
    return isinstance(value, str) and value in accepted


def check_word(name: str, value: object, accepted: Collection[str], error: type[KsgenError] = SpecError) -> None:
    """Raise an error unless the value is one of the accepted words."""
    if not is_word(value, accepted):
        raise error(f"{name}={excerpt(value)}; {hint(value, accepted)}")


def checked_count(name: str, value: object, or_else: str = "") -> int:
    """Return a whole number of at least 1 that fits in 64 bits. Raises `SpecError` for any other value."""
    count = whole_number(value)
    if count is None or not 1 <= count <= MOST_BYTES:
        raise SpecError(f"{name}={excerpt(value)}; accepted: a whole number from 1 up{or_else}")
    return count


@dataclass(frozen=True, order=True)
class Epilogue:
    """Steps applied to a sum before it is stored: + bias, activation, + residual; or + bias, + residual, activation."""

    bias: bool = False
    activation: str = "none"
    residual: bool = False
    residual_first: bool = False  # whether the residual precedes the activation; False unless the epilogue has both

    def __post_init__(self) -> None:
        for name in ("bias", "residual", "residual_first"):
            if type(value := getattr(self, name)) is not bool:
                raise SpecError(f"{name}={excerpt(value)}; accepted: True or False")
        check_word("activation", self.activation, ACTIVATIONS)
        object.__setattr__(self, "residual_first", self.residual_first and self.residual and self.activation != "none")

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the steps in order, such as `("bias", "gelu")`."""
        last = ((self.activation, self.activation != "none"), ("residual", self.residual))
        steps = (("bias", self.bias), *(reversed(last) if self.residual_first else last))
        return tuple(word for word, is_wanted in steps if is_wanted)

    @property
    def as_json(self) -> dict[str, Any]:
        """Fields as plain values. `residual_first` is included only if it is true."""
        return {name: value for name, value in asdict(self).items() if name != "residual_first" or value}


def sum_steps(chains: int) -> list[dict[str, Any]]:
    """Fields of `Epilogue` that differ per chain of a sum.

    Each chain after the first adds the sum of the earlier chains as its residual. Only the first chain adds the bias,
    and only the last one applies the activation.
    """
    is_early, adds = {"activation": "none"}, {"bias": False, "residual": True, "residual_first": True}
    return [is_early, *[adds | is_early] * (chains - 2), adds]


class _DescribesChanges:
    """Base of options that messages name only if they differ from their defaults."""

    @property
    def non_defaults(self) -> dict[str, Any]:
        """Options that differ from their defaults, by name."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}


@dataclass(frozen=True)
class LayerOptions(_DescribesChanges):
    """Options of a layer as a whole, in addition to its factors and its kernels' options."""

    between: Activation = "none"  # the activation of each factor but the last
    out_layout: Layout | None = None  # layout of the layer's output, if it differs from X's
    fuse: Fuse = "auto"


class Stated(TypedDict, total=False):
    """Keywords of `StatedOptions`, for signatures that pass them on."""

    layout: Layout
    precision: PrecisionName | None
    activation: Activation
    bias: bool
    residual: bool
    residual_first: bool
    weights: WeightStorage | Same
    inputs: ByteStorage | Same


@dataclass(frozen=True)
class StatedOptions(_DescribesChanges):
    """Default options of a launcher's calls, and operands that calls must pass. A call may override all of them."""

    layout: Layout = "bsf"
    precision: PrecisionName | None = None  # None: the arrays' dtype decides
    activation: Activation = "none"
    bias: bool = False
    residual: bool = False
    residual_first: bool = False  # whether the activation follows the residual
    weights: WeightStorage | Same = SAME
    inputs: ByteStorage | Same = SAME

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.bias, self.activation, self.residual, self.residual_first)


class _Chains:
    """Descriptor of the field `chains`: it accepts a pattern, a chain, or several chains, and stores chains."""

    def __get__(self, spec: "KernelSpec | None", _: type) -> tuple[Chain, ...]:
        if spec is None:  # `dataclass` asks for the default, and there is none
            raise AttributeError("chains")
        found: tuple[Chain, ...] = spec.__dict__["chains"]
        return found

    def __set__(
        self, spec: "KernelSpec", given: Pattern | Chain | Sequence[Pattern] | Sequence[Chain | Sequence[Pattern]]
    ) -> None:
        listed = given if isinstance(given, tuple | list) else (given,)
        if listed and all(isinstance(each, Pattern) for each in listed):
            listed = (listed,)
        if not listed or not all(isinstance(each, Chain | tuple | list) for each in listed):
            raise SpecError(f"chains={excerpt(given)}; accepted: a Pattern, or chains of Patterns")
        spec.__dict__["chains"] = tuple(each if isinstance(each, Chain) else Chain(each) for each in listed)


@dataclass(frozen=True)
class KernelSpec:
    """Description of one kernel. Equal descriptions are of the same kernel. Without `batch`, it supports every batch
    size."""

    # all chains that multiply X, each with its own output; may be given as a pattern, a chain, or several chains
    chains: _Chains = _Chains()
    precision: str = "float32"
    layout: str = "bsf"
    epilogue: Epilogue = Epilogue()
    batch: int | None = None
    job: str = "multiply"
    stride: str = "dense"
    between: str = "none"  # activation of every factor of a chain except the last
    out_layout: str | None = None  # layout of a chain's output, if it differs from X's
    weights: str = SAME  # storage of the weights: that of Y, eight bits with a scale per output, or bfloat16
    # storage of X: that of Y, or that of eight-bit weights, whose scales include the scale of X
    inputs: str = SAME
    # per factor, axes along which its weights are equal and stored once: "", "a", "d" or "ad"; empty if none is tied
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_word("precision", self.precision, PRECISIONS)
        check_word("layout", self.layout, LAYOUTS)
        if not isinstance(self.epilogue, Epilogue):
            raise SpecError(f"epilogue={excerpt(self.epilogue)}; accepted: an Epilogue")
        if self.batch is not None:
            object.__setattr__(self, "batch", checked_count("batch", self.batch, ", or None for any"))
        if self.out_layout is not None:
            check_word("out_layout", self.out_layout, LAYOUTS)
            object.__setattr__(self, "out_layout", None if self.out_layout == self.layout else self.out_layout)
        product = CHAIN if is_layer(self.chains, self.layout, self.out_layout) else "multiply"
        if is_word(self.job, ("multiply", CHAIN)):
            object.__setattr__(self, "job", product)
        check_word("job", self.job, (CHAIN,) if product == CHAIN else JOBS)
        check_word("stride", self.stride, ("dense",) if self.job == "gradient" else STRIDES)
        check_word("between", self.between, ACTIVATIONS)
        if self.between != "none" and not any(len(chain) > 1 for chain in self.chains):
            raise SpecError(f"between={self.between} with one factor; accepted: none, or two factors or more")
        check_word("weights", self.weights, WEIGHTS)
        check_word("inputs", self.inputs, INPUTS)
        self._check_weights()
        if any(chain.in_features != self.in_features for chain in self.chains):
            raise SpecError(
                f"chains {', '.join(map(str, self.chains))} of a group; accepted: equal numbers of input features"
            )
        if self.job == "gradient" and self.epilogue not in (Epilogue(), Epilogue(bias=True)):
            raise SpecError(
                f"job=gradient with {', '.join(self.epilogue.words)}; accepted: no epilogue, or a bias, whose gradient "
                "is summed too"
            )
        self._check_ties()
        for name, word in (("activation", self.epilogue.activation), ("between", self.between)):
            if word not in activations_of(self.precision):
                raise SpecError(f"{name}={word} of complex numbers, {self.precision}; accepted: none")
        batch = self.batch or 1
        sizes = {
            f"x (batch {batch})": batch * self.in_features,
            f"y (batch {batch})": batch * max(chain.out_features for chain in self.chains),
            "weights": max(pattern.weight_count for chain in self.chains for pattern in chain),
        }
        for name, count in sizes.items():
            if count * self.item_bytes > MOST_BYTES:
                raise SpecError(f"{self.precision} {name} of {self.pattern} is too large; accepted: under 2^63 bytes")

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Hash of all fields, cached because the cost model finds most of what it knows by kernel."""
        return hash(tuple(self.__getstate__().values()))

    def __getstate__(self) -> dict[str, Any]:
        """State of pickles: only the fields, because another thread may be caching a property meanwhile."""
        return {name: vars(self)[name] for name in type(self).__dataclass_fields__}

    def _check_ties(self) -> None:
        object.__setattr__(self, "tied", tuple(self.tied) if any(self.tied) else ())
        fits = len(self.tied) in (0, sum(map(len, self.chains))) and set(self.tied) <= set(TIES)
        if not fits or (self.tied and (self.job == "gradient" or self.is_quantized)):
            what = "job=gradient" if self.job == "gradient" else f"weights={self.weights}"
            given, known = (", ".join(each or "none" for each in words) for words in (map(str, self.tied), TIES))
            accepted = f"one of {known} per factor, of a product with weights=same"
            raise SpecError(f"tied={shown(given)} with {what}; accepted: {accepted}")

    def _check_weights(self) -> None:
        if self.job == "gradient" and self.has_bytes_in:
            raise SpecError(
                f"job=gradient with inputs={self.inputs}; accepted: inputs=same, because training needs x unquantized"
            )
        if self.inputs not in (SAME, self.weights):
            raise SpecError(
                f"inputs={self.inputs} with weights={self.weights}; accepted: inputs=same, or the weights' storage"
            )
        if not self.is_quantized:
            return
        if self.job == "gradient":
            raise SpecError(
                f"job=gradient with weights={self.weights}; accepted: weights=same, because others are not trained"
            )
        if accepted := refused_x_precision(self.weights, self.precision):
            raise SpecError(f"precision={self.precision} with weights={self.weights}; accepted: precision={accepted}")

    @cached_property
    def is_quantized(self) -> bool:
        """Whether weights are stored in another type than Y: in eight bits, or in bfloat16."""
        return self.weights != SAME

    @cached_property
    def has_bytes_in(self) -> bool:
        """Whether X is stored in eight bits."""
        return self.inputs != SAME

    @property
    def stored(self) -> tuple[str, ...]:
        """Parts of the kernel's name for operands stored in another type than Y: the weights' type, then "inputs"."""
        return (*((self.weights,) if self.is_quantized else ()), *(("inputs",) if self.has_bytes_in else ()))

    @property
    def y_layout(self) -> str:
        return self.out_layout or self.layout

    @property
    def layout_word(self) -> str:
        return layout_word(self.layout, self.out_layout)

    @property
    def short_description(self) -> str:
        """Chains, precision, layout and epilogue or job, without a batch.

        One factor is `1,192,48,2 float32 bsf`, a layer `6,64,64,1 then 1,768,192,2 ...`, a group `..., and ...`.
        """
        return " ".join(
            (", and ".join(map(str, self.chains)), self.precision, *self.stored, self.layout_word, *self.words)
        )

    @cached_property
    def untied(self) -> "KernelSpec":
        """The same kernel without ties, which reads all weights."""
        return replace(self, tied=()) if self.tied else self

    @property
    def tie(self) -> str:
        """Axes along which the weights of the only factor are equal."""
        return self.tied[0] if self.tied else ""

    @property
    def is_strided(self) -> bool:
        return self.stride != "dense"

    @cached_property
    def factors(self) -> Chain:
        """Factors of the first chain, in the order in which they multiply X."""
        return self.chains[0]

    @cached_property
    def pattern(self) -> Pattern:
        """Last factor of the first chain; the only factor, except in a layer's kernel."""
        return self.chains[0][-1]

    @cached_property
    def is_exchanged(self) -> bool:
        """Whether a factor stores its outputs, or the first one reads X, in another order than the natural one."""
        return any(chain.is_exchanged for chain in self.chains)

    @cached_property
    def reads_exchanged(self) -> bool:
        """Whether a chain reads the features of X in another order than (i, l, j)."""
        return any(chain[0].inputs.is_exchanged for chain in self.chains)

    @property
    def is_chain(self) -> bool:
        """Whether one launch computes several factors, or one factor that changes the layout."""
        return self.job == CHAIN

    @property
    def is_group(self) -> bool:
        """Whether several chains multiply X."""
        return len(self.chains) > 1

    @property
    def in_features(self) -> int:
        return self.factors.in_features

    @property
    def out_features(self) -> int:
        """Outputs of all chains together."""
        return sum(chain.out_features for chain in self.chains)

    @cached_property
    def item_bytes(self) -> int:
        return PRECISIONS[self.precision].item_bytes

    @cached_property
    def x_item_bytes(self) -> int:
        """Bytes per element of X; `item_bytes` holds for Y, the bias and the residual."""
        return STORAGES[self.inputs].item_bytes if self.has_bytes_in else self.item_bytes

    @property
    def weight_item_bytes(self) -> int:
        """Bytes per weight as the caller passes it, before packing."""
        return STORED[self.weights].item_bytes if self.is_quantized else self.item_bytes

    @property
    def dtype(self) -> str:
        """Type of Y, the bias and the residual, and of X unless X is stored in eight bits."""
        return PRECISIONS[self.precision].dtype

    @cached_property
    def real_bytes(self) -> int:
        """Bytes per accumulator element; a complex one has two parts."""
        return PRECISIONS[self.precision].real_bytes

    @cached_property
    def arithmetic(self) -> Precision:
        """Precision of the multiplications. A gradient's may differ from that of its forward kernel."""
        return PRECISIONS[gradient_of(self.precision) if self.job == "gradient" else self.precision]

    @property
    def words(self) -> tuple[str, ...]:
        """Additional parts of the kernel's name: activation between factors, epilogue, slices, ties, gradient."""
        return (*self._steps, self.job) if self.job == "gradient" else self._steps

    @property
    def _steps(self) -> tuple[str, ...]:
        activated = () if self.between == "none" else (f"{self.between}_between",)
        sliced = ("strided",) if self.is_strided else ()
        tied = ("_".join(("tied", *(each or "none" for each in self.tied))),) if self.tied else ()
        return (*activated, *self.epilogue.words, *sliced, *tied)

    @property
    def name(self) -> str:
        """Name of the kernel's file, entry point and log lines, such as `ks_6x64x64x1_float32_bsf`."""
        batch = () if self.batch is None else (f"batch{self.batch}",)
        job = (self.job,) if self.job == "gradient" else ()
        patterns = "_and_".join("_".join(pattern.name for pattern in chain) for chain in self.chains)
        if len(patterns) > LONGEST_PATTERNS:
            factors = sum(map(len, self.chains))
            patterns = f"{factors}_factors_{_hash_of(patterns)}"
        steps = (*self._steps, *batch, *job)
        name = "_".join(("ks", patterns, self.precision, *self.stored, self.layout_word, *steps))
        return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 17]}_{_hash_of(name)}"

    @property
    def as_json(self) -> dict[str, Any]:
        """Fields as plain values. Fields that the first versions lacked are omitted if they have their defaults."""
        later = ("stride", "between", "out_layout", "weights", "inputs", "tied")
        options = {
            name: value
            for name, value in (asdict(self) | {"epilogue": self.epilogue.as_json}).items()
            if name != "chains" and (name not in later or value != getattr(KernelSpec, name))
        }
        return chains_as_json(self.chains, _pattern_as_json) | options

    @property
    def digest(self) -> str:
        """Eight hex digits that identify all fields. The default job is omitted."""
        fields = {name: value for name, value in self.as_json.items() if (name, value) != ("job", "multiply")}
        canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:8]

    def flops(self, batch: int) -> int:
        """Additions and multiplications of the product; a gradient takes the same number."""
        return 2 * PRECISIONS[self.precision].multiply_adds * batch * sum(chain.weight_count for chain in self.chains)

    def bytes(self, batch: int) -> int:
        """Least memory traffic in bytes: X, Y (or its gradient), the weights and the residual, each moved once."""
        outputs = (2 if self.epilogue.residual else 1) * self.out_features
        return batch * (self.x_item_bytes * self.in_features + self.item_bytes * outputs) + self.weight_bytes

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of all factors' weights and their scales; tied weights count once."""
        patterns = [pattern for chain in self.chains for pattern in chain]
        pairs = zip(patterns, self.tied or [""] * len(patterns), strict=True)
        slices = [
            [1 if axis in tie else size for axis, size in zip("abcd", each.shape, strict=True)] for each, tie in pairs
        ]
        count = sum(map(prod, slices))
        if not self.is_quantized:
            return self.item_bytes * count
        return self.weight_item_bytes * count + SCALE_BYTES * sum(each.out_features for each in patterns)

    @property
    def scales_begin(self) -> int:
        """Offset in bytes of a factor's scales, which follow its values in the operand of a packing kernel."""
        return scales_begin(self.pattern.weight_count, self.weight_item_bytes)


def _hash_of(text: str) -> str:
    """The 16 hex digits that replace a text in a name."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _pattern_as_json(pattern: Pattern) -> dict[str, Any]:
    """Fields of a pattern. The orders of its outputs and inputs are included only if they are exchanged."""
    return {name: value for name, value in asdict(pattern).items() if name in "abcd" or value}


def pattern_as_list(pattern: Pattern) -> list[Any]:
    """Arguments of `Pattern` in files: its four numbers, then the orders of outputs and inputs that are exchanged."""
    orders = (pattern.store, pattern.load) if pattern.load else (pattern.store,) if pattern.store else ()
    return [*pattern.shape, *orders]


def chains_as_json(chains: Sequence[Chain], pattern_as_json: Callable[[Pattern], Any]) -> dict[str, Any]:
    """Fields of files that hold chains.

    `pattern` is the last one of the first chain, `before` the earlier ones, and `beside` the other chains.
    """
    *before, last = map(pattern_as_json, chains[0])
    others = [list(map(pattern_as_json, chain)) for chain in chains[1:]]
    return {"pattern": last} | ({"before": before} if before else {}) | ({"beside": others} if others else {})


def chains_from_json(fields: Mapping[str, Any], read: Callable[[Any], Pattern]) -> tuple[Chain, ...]:
    """Chains from the fields that `chains_as_json` returns."""
    first = (*fields.get("before", ()), fields["pattern"])
    return tuple(Chain(tuple(map(read, chain))) for chain in (first, *fields.get("beside", ())))


def is_transposed(layout: str, out_layout: str | None) -> bool:
    """Whether Y has another layout than X."""
    return out_layout not in (None, layout)


def is_layer(chains: Sequence[Chain], layout: str, out_layout: str | None) -> bool:
    """Whether there are several factors, or a single one whose Y has another layout than X."""
    return sum(map(len, chains)) > 1 or is_transposed(layout, out_layout)


def layout_word(layout: str, out_layout: str | None) -> str:
    """Layouts in names: `bsf`, or `bsf_to_bsl` if Y has another one than X."""
    return f"{layout}_to_{out_layout}" if is_transposed(layout, out_layout) else layout


def layer_launch(
    chains: Sequence[Chain], precision: str, layout: str, epilogue: Epilogue, **options: Any
) -> KernelSpec:
    """Kernel for all chains in one launch, as launchers usually need it.

    Outputs of a group share one array, so they are slices.
    """
    stride = "any" if len(chains) > 1 else "dense"
    return KernelSpec(tuple(chains), precision, layout, epilogue, stride=stride, **options)
