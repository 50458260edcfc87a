"""Options that describe kernels and layers.

They are the patterns of a chain, other chains on the same X, the activation between factors, and filters of a spec's
kernels.

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
from ksgen.spec.spec import parts_of
from ksgen.spec.storage import INPUTS, SAME
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.spec.nodes import SourcePlace


@ReadBy
def chain_in(text: str) -> Chain:
    """Parse a chain such as `6,64,64,1 1,768,192,2`. A click type."""
    if not (words := text.split()):
        raise PatternError(f"--group-with {excerpt(text)}; accepted: patterns such as '6,64,64,1 1,768,192,2'")
    return Chain(tuple(map(Pattern.parse, words)))


@dataclass(frozen=True)
class Wanted:
    """Options of a command that describe kernels: those made from patterns, or those of a spec that match.

    None means the default for kernels made from patterns, and any value for a spec's kernels.
    """

    precision: str | None
    layout: str | None
    weights: str | None
    inputs: str | None
    job: str | None = None

    @property
    def precision_and_layout(self) -> tuple[str, str]:
        """Precision and layout of kernels made from patterns."""
        return self.precision or "float32", self.layout or "bsf"

    @property
    def stored(self) -> tuple[str, str]:
        """Storages of weights and X of kernels made from patterns."""
        return self.weights or SAME, self.inputs or SAME

    def matches(self, kernel: KernelSpec) -> bool:
        job = "multiply" if kernel.is_chain else kernel.job
        values = (kernel.precision, kernel.layout, kernel.weights, kernel.inputs, job)
        return all(asked in (None, value) for asked, value in zip(astuple(self), values, strict=True))

    def kernels(self, patterns: Iterable[Pattern], epilogue: Epilogue) -> list[KernelSpec]:
        """Make one kernel per pattern."""
        (precision, layout), (weights, inputs), job = self.precision_and_layout, self.stored, self.job or "multiply"
        return [
            KernelSpec(pattern, precision, layout, epilogue, job=job, weights=weights, inputs=inputs)
            for pattern in patterns
        ]

    def kernels_of_spec(self, spec: Path) -> "dict[KernelSpec, SourcePlace | None]":
        """Matching kernels of a spec, as launchers request them, each with the place of its batch in the spec."""
        from ksgen.tuning.job import kernels_of_spec

        found = {each: place for each, place in kernels_of_spec(load(find_spec(spec))).items() if self.matches(each)}
        if not found:
            asked = " and ".join(filter(None, astuple(self)))
            raise SpecError(f"{spec}: no kernel in it is {asked}; `ksgen show --spec {spec}` lists them")
        return found


def epilogue_of(bias: bool, activation: str, residual: bool, residual_first: bool) -> Epilogue:
    """Epilogue that the options of a command ask for.

    Raises `SpecError` if `residual_first` is given without both a residual and an activation.
    """
    epilogue = Epilogue(bias, activation, residual, residual_first)
    if residual_first and not epilogue.residual_first:
        raise SpecError(
            "--residual-first without a residual or an activation; accepted: with --residual and --activation"
        )
    return epilogue


@dataclass(frozen=True)
class Layer:
    """Layer described by the patterns and options of a command line."""

    patterns: tuple[Pattern, ...]
    others: tuple[Chain, ...] = ()  # chains of a group on the same x
    between: str = "none"
    out_layout: str | None = None

    @property
    def options(self) -> list[str]:
        """Names of the given options that ask for a layer."""
        given = {
            "--group-with": bool(self.others),
            "--between": self.between != "none",
            "--out-layout": self.out_layout is not None,
        }
        return [name for name, is_given in given.items() if is_given]

    @property
    def is_asked_for(self) -> bool:
        """Whether an option asks for a layer."""
        return bool(self.options)

    @property
    def description(self) -> str:
        """The layer in the words of the command line, such as "2 patterns with --between"."""
        return " with ".join(
            [counted(len(self.patterns), "pattern"), *([", ".join(self.options)] if self.options else [])]
        )

    @property
    def chains(self) -> tuple[Chain, ...]:
        """One chain, or the chains of a group; `PatternError` if patterns do not fit each other."""
        return Chain(self.patterns), *self.others

    def launch(
        self, precision: str, layout: str, epilogue: Epilogue, weights: str, inputs: str = SAME
    ) -> KernelSpec | None:
        """Kernel of the whole layer in one launch; None for a single product."""
        if self.between != "none" and all(len(chain) < 2 for chain in self.chains):
            raise SpecError(f"--between {self.between} with one factor; accepted: a layer of two or more patterns")
        if self.others and self.out_layout:
            raise SpecError(f"--out-layout {self.out_layout} of a group of chains; accepted: --out-layout of one chain")
        if not is_layer(self.chains, layout, self.out_layout):
            return None
        return layer_launch(
            self.chains, precision, layout, epilogue, between=self.between, out_layout=self.out_layout, weights=weights,
            inputs=inputs,
        )  # fmt: skip

    def kernels(self, wanted: Wanted, epilogue: Epilogue, refusal: str) -> list[KernelSpec]:
        """Kernel of a layer or group in one launch, then the kernels of the separate launches to compare with it.

        Raise `SpecError` with the text `refusal` if the patterns form no layer, or if gradients are wanted.
        """
        from ksgen.tuning.job import kernels_of_layer

        whole = self.launch(*wanted.precision_and_layout, epilogue, *wanted.stored) if self.patterns else None
        if whole is None or wanted.job == "gradient":
            raise SpecError(refusal)
        return kernels_of_layer(whole)


def launch_of_spec(
    spec: Path, name: str | None, wanted: Wanted, batch: int | None = None
) -> "tuple[KernelSpec, SourcePlace | None]":
    """First matching launch of a spec's layer or group, and the place where the spec states its batch.

    A launch for that batch size comes first. Without a name, the spec must have only one layer.
    """
    loaded = load(find_spec(spec))
    if not (named := list(loaded.chains_of)):
        raise SpecError(f"{spec} has no layers; accepted: a spec with `layers:`, or patterns")
    if name is None and len(named) > 1:
        raise SpecError(f"{spec} has several layers; name one with --layer: {', '.join(named)}")
    name = named[0] if name is None else name
    if name in loaded.sums:
        parts = ", ".join(part for part, _ in parts_of(name, loaded.sums[name]))
        raise SpecError(
            f"--layer {name}: {spec} has a sum of that name, which takes several launches; name one: {parts}"
        )
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
    kernels = sorted(filter(wanted.matches, kernels), key=lambda each: batch is None or each.batch != batch)
    if not kernels:
        asked = " and ".join(filter(None, astuple(wanted)))
        raise SpecError(f"{spec}: no kernel of layer {name} is {asked}; `ksgen show --spec {spec}` lists them")
    return kernels[0], loaded.batch_places.get(kernels[0])


_OPTIONS = (  # name, values, help
    ("precision", PRECISIONS, "Precision (default float32)."),
    ("layout", LAYOUTS, "bsf (default): X is (batch, features); bsl: (features, batch)."),
    (
        "weights",
        WEIGHTS,
        "Storage of weights. same (default): that of Y; int8, e4m3, e5m2: eight bits; bfloat16: for X in float32.",
    ),
    (
        "inputs",
        INPUTS,
        "Storage of X. same (default): that of Y; int8, e4m3, e5m2: eight bits, if --weights is the same.",
    ),
    ("job", JOBS, "The product (default) or the weights' gradient."),
)


def takes_wanted(has_job: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options that describe kernels to a command; it receives them as its argument `wanted`."""
    chosen = _OPTIONS if has_job else _OPTIONS[:-1]

    def decorated(function: Callable[..., None]) -> Callable[..., None]:
        @wraps(function)
        def taking(*given: Any, **options: Any) -> None:
            function(*given, wanted=Wanted(**{name: options.pop(name) for name, _, _ in chosen}), **options)

        for name, words, help_text in reversed(chosen):
            of_spec = f"With a spec: only its kernels of this {'storage' if words in (WEIGHTS, INPUTS) else name}."
            taking = click.option(f"--{name}", type=OneOf(words), help=f"{help_text} {of_spec}")(taking)
        return taking

    return decorated


def takes_layers(function: Callable[..., None]) -> Callable[..., None]:
    """Add options for layers to a command that takes patterns; it receives them as its argument `layer`."""

    @click.option(
        "--group-with",
        type=chain_in,
        multiple=True,
        metavar="'A,B,C,D ...'",
        help="Another chain on the same X. May be repeated.",
    )
    @click.option("--beside", "with_before", type=chain_in, multiple=True, hidden=True)
    @click.option("--between", type=ACTIVATION, default="none", show_default=True, help="Activation between factors.")
    @click.option("--out-layout", type=LAYOUT, help="Layout of a layer's Y, if it differs from that of X.")
    @wraps(function)
    def taking(
        patterns: tuple[Pattern, ...], group_with: tuple[Chain, ...], with_before: tuple[Chain, ...], between: str,
        out_layout: str | None,
        **options: Any,
    ) -> None:  # fmt: skip
        others = group_with + renamed_option("--beside", "--group-with", with_before)
        function(patterns, layer=Layer(patterns, others, between, out_layout), **options)

    return taking
