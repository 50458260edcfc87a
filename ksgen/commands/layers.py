"""Kernels and layers in commands: patterns of a chain, other chains on the same x, the activation between factors, and
matching kernels.

Shared by `run`, `tune`, `calibrate` and `show`. Measures nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen.commands.common import ACTIVATION, LAYOUT, OneOf, ReadBy, find_spec, renamed_option
from ksgen.errors import PatternError, SpecError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import JOBS, LAYOUTS, PRECISIONS, WEIGHTS, Epilogue, KernelSpec, load
from ksgen.spec.kernel import hint, is_layer, layer_launch
from ksgen.spec.storage import INPUTS, SAME
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.spec.nodes import SourcePlace


@ReadBy
def chain_in(text: str) -> Chain:
    """A chain from text such as `6,64,64,1 1,768,192,2`."""
    if not (words := text.split()):
        raise PatternError(f"--group-with {excerpt(text)}; accepted: patterns such as '6,64,64,1 1,768,192,2'")
    return Chain(tuple(map(Pattern.parse, words)))


@dataclass(frozen=True)
class Wanted:
    """Options of a command that describe kernels: what patterns become, or which of a spec's kernels count.

    None stands for the default, or for any.
    """

    precision: str | None
    layout: str | None
    weights: str | None
    inputs: str | None
    job: str | None = None

    @property
    def usual(self) -> tuple[str, str]:
        """Precision and layout of patterns, with defaults."""
        return self.precision or "float32", self.layout or "bsf"

    @property
    def stored(self) -> tuple[str, str]:
        """Storages of weights and X of patterns."""
        return self.weights or SAME, self.inputs or SAME

    def counts(self, kernel: KernelSpec) -> bool:
        job = "multiply" if kernel.is_chain else kernel.job
        own = (kernel.precision, kernel.layout, kernel.weights, kernel.inputs, job)
        return all(asked in (None, each) for asked, each in zip(astuple(self), own, strict=True))

    def kernels(self, patterns: Iterable[Pattern], epilogue: Epilogue) -> list[KernelSpec]:
        """Kernels of single patterns."""
        weights, inputs = self.stored
        options: dict[str, Any] = {"job": self.job or "multiply", "weights": weights, "inputs": inputs}
        return [KernelSpec(pattern, *self.usual, epilogue, **options) for pattern in patterns]

    def kernels_of_spec(self, spec: Path) -> "dict[KernelSpec, SourcePlace | None]":
        """Matching kernels of a spec, as launchers ask for them, each with the place of its batch."""
        from ksgen.tuning.kernels import kernels_of_spec

        found = {each: place for each, place in kernels_of_spec(load(find_spec(spec))).items() if self.counts(each)}
        if not found:
            raise SpecError(f"{spec}: no kernel in it is {' and '.join(filter(None, astuple(self)))}")
        return found


@dataclass(frozen=True)
class Layer:
    """Layer described by the patterns and options of a command line."""

    patterns: tuple[Pattern, ...]
    others: tuple[Chain, ...] = ()  # chains of a group on the same x
    between: str = "none"
    out_layout: str | None = None

    @property
    def given(self) -> list[str]:
        """The options that ask for a layer."""
        options = {
            "--group-with": bool(self.others),
            "--between": self.between != "none",
            "--out-layout": self.out_layout is not None,
        }
        return [name for name, is_given in options.items() if is_given]

    @property
    def is_asked_for(self) -> bool:
        """Whether an option asks for a layer."""
        return bool(self.given)

    @property
    def description(self) -> str:
        """Options or arguments that describe a layer, in the words of the command line."""
        return " with ".join([counted(len(self.patterns), "pattern"), *([", ".join(self.given)] if self.given else [])])

    @property
    def chains(self) -> tuple[Chain, ...]:
        """One chain, or the chains of a group; `PatternError` on patterns that do not fit each other."""
        return Chain(self.patterns), *self.others

    def launch(
        self, precision: str, layout: str, epilogue: Epilogue, weights: str, inputs: str = SAME
    ) -> KernelSpec | None:
        """Kernel of all of the layer in one launch; None for a single product."""
        if self.between != "none" and all(len(chain) < 2 for chain in self.chains):
            raise SpecError(f"--between {self.between} with one factor; accepted: a layer's patterns, two or more")
        if self.others and self.out_layout:
            raise SpecError(f"--out-layout {self.out_layout} of a group of chains; accepted: of one chain")
        if not is_layer(self.chains, layout, self.out_layout):
            return None
        more: dict[str, Any] = {
            "between": self.between,
            "out_layout": self.out_layout,
            "weights": weights,
            "inputs": inputs,
        }
        return layer_launch(self.chains, precision, layout, epilogue, **more)

    def kernels(self, wanted: Wanted, epilogue: Epilogue, refusal: str) -> list[KernelSpec]:
        """Launch of a layer or a group, and the launches that it is compared with; `SpecError` on anything else."""
        from ksgen.tuning.kernels import kernels_of_layer

        whole = self.launch(*wanted.usual, epilogue, *wanted.stored) if self.patterns else None
        if whole is None or wanted.job == "gradient":
            raise SpecError(refusal)
        return kernels_of_layer(whole)


def launch_of_spec(spec: Path, name: str | None, wanted: Wanted) -> "tuple[KernelSpec, SourcePlace | None]":
    """First matching launch of a spec's layer or group, or of the only one if none is named, and its batch's place."""

    loaded = load(find_spec(spec))
    if not (named := list(loaded.chains_of)):
        raise SpecError(f"{spec} has no layers; accepted: a spec with `layers:`, or patterns")
    if name is None and len(named) > 1:
        raise SpecError(f"{spec} has several layers; name one by --layer: {', '.join(named)}")
    name = named[0] if name is None else name
    if name not in named:
        raise SpecError(f"--layer {excerpt(name)}: {spec} has no layer of that name; {hint(name, named)}")
    chains = loaded.chains_of[name]
    launches: Sequence[KernelSpec] = loaded.launches.get(name, ())
    is_product = len(chains) == len(chains[0]) == 1
    if not launches and not is_product:
        raise SpecError(
            f"{spec}: layer {name} has fuse: no, which forbids one launch of all factors; accepted: a layer without it"
        )
    kernels: list[KernelSpec] = [*launches, *(loaded.wanted[name] if is_product else ())]
    if not (found := next(filter(wanted.counts, kernels), None)):
        raise SpecError(f"{spec}: no kernel of layer {name} is {' and '.join(filter(None, astuple(wanted)))}")
    return found, loaded.batch_places.get(found)


_OPTIONS = (  # name, values, help
    ("precision", PRECISIONS, "Precision (default float32)."),
    ("layout", LAYOUTS, "bsf (default): X is (batch, features); bsl: (features, batch)."),
    ("weights", WEIGHTS, "Storage of weights: that of Y (default: same), eight bits, or bfloat16."),
    ("inputs", INPUTS, "Storage of X: that of Y (default: same), or the eight bits of the weights."),
    ("job", JOBS, "The product (default) or the weights' gradient."),
)


def takes_wanted(has_job: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options that describe kernels to a command; it receives them as its `wanted`."""
    chosen = _OPTIONS if has_job else _OPTIONS[:-1]

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def taking(*given: Any, **options: Any) -> None:
            function(*given, wanted=Wanted(**{name: options.pop(name) for name, _, _ in chosen}), **options)

        for name, words, says in reversed(chosen):
            of_spec = f"With a spec: only its kernels of this {'storage' if words in (WEIGHTS, INPUTS) else name}."
            taking = click.option(f"--{name}", type=OneOf(words), help=f"{says} {of_spec}")(taking)
        return taking

    return decorated


def takes_layers(function: Callable[..., None]) -> Callable[..., None]:
    """Add options for layers to a command that takes patterns; it receives them as its `layer`."""

    @click.option(
        "--group-with",
        type=chain_in,
        multiple=True,
        metavar="'A,B,C,D ...'",
        help="Another chain on the same x. May be repeated.",
    )
    @click.option("--beside", type=chain_in, multiple=True, hidden=True)
    @click.option("--between", type=ACTIVATION, default="none", show_default=True, help="Activation between factors.")
    @click.option("--out-layout", type=LAYOUT, help="Layout of a layer's Y, if it differs from that of X.")
    @wraps(function)
    def taking(
        patterns: tuple[Pattern, ...], group_with: tuple[Chain, ...], beside: tuple[Chain, ...], between: str,
        out_layout: str | None,
        **options: Any,
    ) -> None:  # fmt: skip
        others = group_with + renamed_option("--beside", "--group-with", beside)
        function(patterns, layer=Layer(patterns, others, between, out_layout), **options)

    return taking
