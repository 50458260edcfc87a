"""What one kernel is: pattern, precision, layout, epilogue, batch and job. Never how it is computed: families decide."""

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from ksgen.errors import SpecError
from ksgen.pattern import Chain, Pattern
from ksgen.spec.precision import PRECISIONS, Precision, gradient_of, named_otherwise
from ksgen.spec.storage import INPUTS, SAME, SCALE_BYTES, STORAGES, STORED, WEIGHTS, refused_beside, scales_begin
from ksgen.values import excerpt, whole_number

LAYOUTS = ("bsf", "bsl")  # batch-size-first: (batch, features); batch-size-last: (features, batch)
ACTIVATIONS = ("none", "relu", "gelu", "gelu_tanh", "silu")
STRIDES = ("dense", "any")  # rows of X, Y and the residual follow each other; or lie so far apart as the call says: they are slices
JOBS = ("multiply", "gradient")  # Y = X K^T; the gradient of its weights, from X and that of Y
FUSES = ("auto", "yes", "no")  # whether the factors of a layer are one launch: where that is faster; always, or it is an error; never
CHAIN = "chain"  # the job of one launch of several factors, or of one that changes the layout; no spec names it
MOST_BYTES = 2**63 - 1  # of X, Y or the weights: offsets are signed and 64 bits wide


def activations_of(precision: str) -> tuple[str, ...]:
    """Those that are defined for its numbers."""
    return ("none",) if PRECISIONS[precision].is_complex else ACTIVATIONS


def hint(value: object, accepted: Collection[str]) -> str:
    """The end of a message about a word that is none of the accepted ones."""
    word = value if isinstance(value, str) else excerpt(value)
    known = named_otherwise(word.lower())
    close = [known] if known in accepted else get_close_matches(word[:100], accepted, n=1)
    return f"{f'did you mean {close[0]}? ' if close else ''}accepted: {', '.join(accepted)}"


def is_word(value: object, accepted: Collection[str]) -> bool:
    return isinstance(value, str) and value in accepted


def check_word(name: str, value: object, accepted: Collection[str]) -> None:
    """Raise `SpecError` on what is none of the accepted words."""
    if not is_word(value, accepted):
        raise SpecError(f"{name}={excerpt(value)}; {hint(value, accepted)}")


def checked_batch(batch: object, or_else: str = "") -> int:
    """A number of batch entries; `SpecError` on anything else."""
    count = whole_number(batch)
    if count is None or not 1 <= count <= MOST_BYTES:
        raise SpecError(f"batch={excerpt(batch)}; accepted: a whole number from 1 up{or_else}")
    return count


@dataclass(frozen=True, order=True)
class Epilogue:
    """What happens to a sum before it is stored: + bias, activation, + residual."""

    bias: bool = False
    activation: str = "none"
    residual: bool = False

    def __post_init__(self) -> None:
        for name, value in (("bias", self.bias), ("residual", self.residual)):
            if type(value) is not bool:
                raise SpecError(f"{name}={excerpt(value)}; accepted: True or False")
        check_word("activation", self.activation, ACTIVATIONS)

    @property
    def words(self) -> tuple[str, ...]:
        """What it does, in order, such as `("bias", "gelu")`."""
        steps = (("bias", self.bias), (self.activation, self.activation != "none"), ("residual", self.residual))
        return tuple(word for word, is_wanted in steps if is_wanted)


class _Told:
    """Options that go without saying where they are as usual."""

    @property
    def told(self) -> dict[str, Any]:
        """The options that are not as usual, by name."""
        return {name: value for name, value in vars(self).items() if value != getattr(type(self), name)}


@dataclass(frozen=True)
class LayerOptions(_Told):
    """What a layer is besides its factors and the options of its kernels."""

    between: str = "none"  # the activation of each factor but the last
    out_layout: str | None = None  # of what it gives, where it is not that of X
    fuse: str = "auto"


@dataclass(frozen=True)
class StatedOptions(_Told):
    """What a spec states of a launcher's calls: options unless a call names others, and the operands that it must have."""

    layout: str = "bsf"
    precision: str | None = None  # None: that of the arrays
    activation: str = "none"
    bias: bool = False
    residual: bool = False
    weights: str = SAME
    inputs: str = SAME

    @property
    def epilogue(self) -> Epilogue:
        return Epilogue(self.bias, self.activation, self.residual)


class _Chains:
    """The field `chains`, which accepts a pattern, a chain, or several chains, and holds chains."""

    def __get__(self, spec: "KernelSpec | None", _: type) -> tuple[Chain, ...]:
        if spec is None:  # without a default
            raise AttributeError("chains")
        found: tuple[Chain, ...] = spec.__dict__["chains"]
        return found

    def __set__(self, spec: "KernelSpec", given: Pattern | Chain | Sequence[Pattern] | Sequence[Chain | Sequence[Pattern]]) -> None:
        listed = given if isinstance(given, tuple | list) else (given,)
        if listed and all(isinstance(each, Pattern) for each in listed):
            listed = (listed,)
        if not listed or not all(isinstance(each, Chain | tuple | list) for each in listed):
            raise SpecError(f"chains={excerpt(given)}; accepted: a Pattern, or chains of Patterns")
        spec.__dict__["chains"] = tuple(each if isinstance(each, Chain) else Chain(each) for each in listed)


@dataclass(frozen=True)
class KernelSpec:
    """One kernel; equal ones are the same kernel. Without a batch it serves every batch."""

    chains: _Chains = _Chains()  # all that multiply X, each with an output of its own; given as a pattern, a chain, or several chains
    precision: str = "float32"
    layout: str = "bsf"
    epilogue: Epilogue = Epilogue()
    batch: int | None = None
    job: str = "multiply"
    stride: str = "dense"
    between: str = "none"  # the activation of every factor of a chain but the last
    out_layout: str | None = None  # of what a chain gives, where it is another one than X has
    weights: str = SAME  # how they are stored: as Y is, in eight bits and with a scale for each output, or in bfloat16
    inputs: str = SAME  # how X is stored: as Y is, or in eight bits as the weights that meet it are, whose scales take in that of X

    def __post_init__(self) -> None:
        check_word("precision", self.precision, PRECISIONS)
        check_word("layout", self.layout, LAYOUTS)
        if not isinstance(self.epilogue, Epilogue):
            raise SpecError(f"epilogue={excerpt(self.epilogue)}; accepted: an Epilogue")
        if self.batch is not None:
            object.__setattr__(self, "batch", checked_batch(self.batch, ", or None for any"))
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
            raise SpecError(f"between={self.between} where there is one factor; accepted: none, or two factors or more")
        check_word("weights", self.weights, WEIGHTS)
        check_word("inputs", self.inputs, INPUTS)
        self._check_weights()
        if any(chain.in_features != self.in_features for chain in self.chains):
            raise SpecError(f"chains {', '.join(map(str, self.chains))} beside each other; accepted: those that take as many features")
        if self.job == "gradient" and self.epilogue.words:
            raise SpecError(f"job=gradient with {', '.join(self.epilogue.words)}; accepted: no epilogue, which is not the weights'")
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

    def _check_weights(self) -> None:
        if self.job == "gradient" and self.has_bytes_in:
            raise SpecError(f"job=gradient with inputs={self.inputs}; accepted: inputs=same, as weights are trained on x as it is")
        if self.inputs not in (SAME, self.weights):
            raise SpecError(f"inputs={self.inputs} with weights={self.weights}; accepted: inputs=same, or as weights are stored")
        if not self.is_quantized:
            return
        if self.job == "gradient":
            raise SpecError(f"job=gradient with weights={self.weights}; accepted: weights=same, which alone are trained")
        if accepted := refused_beside(self.weights, self.precision):
            raise SpecError(f"precision={self.precision} with weights={self.weights}; accepted: precision={accepted}")

    @cached_property
    def is_quantized(self) -> bool:
        """Whether weights are stored otherwise than Y: in eight bits, or in bfloat16."""
        return self.weights != SAME

    @cached_property
    def has_bytes_in(self) -> bool:
        """Whether X is stored in eight bits too."""
        return self.inputs != SAME

    @property
    def stored(self) -> tuple[str, ...]:
        """What is stored otherwise than Y, in words of its name: nothing, weights, or X too."""
        return (*((self.weights,) if self.is_quantized else ()), *(("inputs",) if self.has_bytes_in else ()))

    @property
    def y_layout(self) -> str:
        return self.out_layout or self.layout

    @property
    def layout_word(self) -> str:
        return layout_word(self.layout, self.out_layout)

    @property
    def told_short(self) -> str:
        """`1,192,48,2 float32 bsf`, of a layer `6,64,64,1 then 1,768,192,2 ...`, of a group `..., beside ...`; with the epilogue or another
        job, but without a batch."""
        return " ".join((", beside ".join(map(str, self.chains)), self.precision, *self.stored, self.layout_word, *self.words))

    @property
    def is_strided(self) -> bool:
        return self.stride != "dense"

    @cached_property
    def factors(self) -> Chain:
        """The factors of the first chain, from the one that X meets first."""
        return self.chains[0]

    @cached_property
    def pattern(self) -> Pattern:
        """The last factor of the first chain: the only one, unless it is a layer's kernel."""
        return self.chains[0][-1]

    @property
    def is_group(self) -> bool:
        """Whether several chains multiply X."""
        return len(self.chains) > 1

    @property
    def in_features(self) -> int:
        return self.factors.in_features

    @cached_property
    def item_bytes(self) -> int:
        return PRECISIONS[self.precision].item_bytes

    @cached_property
    def x_item_bytes(self) -> int:
        """Of an element of X: `item_bytes` are those of Y, the bias and the residual."""
        return STORAGES[self.inputs].item_bytes if self.has_bytes_in else self.item_bytes

    @property
    def weight_item_bytes(self) -> int:
        """Of a weight, as it is given."""
        return STORED[self.weights].item_bytes if self.is_quantized else self.item_bytes

    @property
    def dtype(self) -> str:
        """Of Y, the bias and the residual; and of X, unless that is in eight bits."""
        return PRECISIONS[self.precision].dtype

    @cached_property
    def real_bytes(self) -> int:
        """Of a sum."""
        return PRECISIONS[self.precision].real_bytes

    @cached_property
    def arithmetic(self) -> Precision:
        """The precision of its products: a gradient may need another than the product it belongs to."""
        return PRECISIONS[gradient_of(self.precision) if self.job == "gradient" else self.precision]

    @property
    def words(self) -> tuple[str, ...]:
        """What it does besides a plain product: an activation between factors, the steps of its epilogue, on slices, or another job."""
        return (self.job,) if self.job == "gradient" else (*self._activated, *self.epilogue.words, *self._sliced)

    @property
    def _activated(self) -> tuple[str, ...]:
        return () if self.between == "none" else (f"{self.between}_between",)

    @property
    def _sliced(self) -> tuple[str, ...]:
        return ("strided",) if self.is_strided else ()

    @property
    def name(self) -> str:
        """What names its file, its entry point and its log lines, such as `ks_6x64x64x1_float32_bsf`."""
        batch = () if self.batch is None else (f"batch{self.batch}",)
        job = (self.job,) if self.job == "gradient" else ()
        patterns = "_and_".join("_".join(pattern.name for pattern in chain) for chain in self.chains)
        steps = (*self._activated, *self.epilogue.words, *self._sliced)
        return "_".join(("ks", patterns, self.precision, *self.stored, self.layout_word, *steps, *batch, *job))

    @property
    def told(self) -> dict[str, Any]:
        """Its fields as plain values; what was added since the first specs goes without saying where it is usual."""
        usual = {"stride": "dense", "between": "none", "out_layout": None, "weights": SAME, "inputs": SAME}
        options = {name: value for name, value in asdict(self).items() if name != "chains" and (name not in usual or value != usual[name])}
        return chains_as_json(self.chains, asdict) | options

    @property
    def digest(self) -> str:
        """Eight hex digits over every field; the usual job goes without saying."""
        told = {name: value for name, value in self.told.items() if (name, value) != ("job", "multiply")}
        canonical = json.dumps(told, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:8]

    def flops(self, batch: int) -> int:
        """Additions and multiplications of the product; a gradient takes as many."""
        return 2 * PRECISIONS[self.precision].multiply_adds * batch * sum(chain.weight_count for chain in self.chains)

    def bytes(self, batch: int) -> int:
        """What must cross memory: X, Y (or its gradient), the weights and the residual, each once."""
        outputs = (2 if self.epilogue.residual else 1) * sum(chain.out_features for chain in self.chains)
        return batch * (self.x_item_bytes * self.in_features + self.item_bytes * outputs) + self.weight_bytes

    @property
    def weight_bytes(self) -> int:
        """Of the weights of all factors, and of their scales."""
        count = sum(chain.weight_count for chain in self.chains)
        if not self.is_quantized:
            return self.item_bytes * count
        return self.weight_item_bytes * count + SCALE_BYTES * sum(each.out_features for chain in self.chains for each in chain)

    @property
    def scales_begin(self) -> int:
        """Bytes from the first of a factor's values to its scales, as they are given to a kernel that packs them."""
        return scales_begin(self.pattern.weight_count, self.weight_item_bytes)


def chains_as_json(chains: Sequence[Chain], pattern_as_json: Callable[[Pattern], Any]) -> dict[str, Any]:
    """The fields of files that hold chains: the last `pattern` of the first one, those `before` it, and the chains `beside` it."""
    *before, last = map(pattern_as_json, chains[0])
    beside = [list(map(pattern_as_json, chain)) for chain in chains[1:]]
    return {"pattern": last} | ({"before": before} if before else {}) | ({"beside": beside} if beside else {})


def chains_from_json(fields: Mapping[str, Any], read: Callable[[Any], Pattern]) -> tuple[Chain, ...]:
    """Reads what `chains_as_json` gives."""
    first = (*fields.get("before", ()), fields["pattern"])
    return tuple(Chain(tuple(map(read, chain))) for chain in (first, *fields.get("beside", ())))


def is_turned(layout: str, out_layout: str | None) -> bool:
    """Whether Y has another layout than X."""
    return out_layout not in (None, layout)


def is_layer(chains: Sequence[Chain], layout: str, out_layout: str | None) -> bool:
    """Whether there is more than one factor, or one that gives another layout than it takes."""
    return sum(map(len, chains)) > 1 or is_turned(layout, out_layout)


def layout_word(layout: str, out_layout: str | None) -> str:
    """`bsf`, or `bsf_to_bsl`."""
    return f"{layout}_to_{out_layout}" if is_turned(layout, out_layout) else layout


def layer_launch(chains: Sequence[Chain], precision: str, layout: str, epilogue: Epilogue, **options: Any) -> KernelSpec:
    """One launch of all, as launchers mostly ask for it: a group's outputs lie beside each other in one array, so that they are slices."""
    stride = "any" if len(chains) > 1 else "dense"
    return KernelSpec(tuple(chains), precision, layout, epilogue, stride=stride, **options)
