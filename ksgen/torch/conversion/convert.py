"""`convert`: replace a model's dense layers by Kronecker-sparse ones, in place, and report the changes."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import groupby
from math import hypot, inf
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.linalg import vector_norm

from ksgen.build.background import progress_bar
from ksgen.errors import LaunchError, SpecError
from ksgen.pattern import Chain, Patterns
from ksgen.spec import Spec, load
from ksgen.structures import Structure, of_chain
from ksgen.torch.conversion.factorize import errors_of, factorized
from ksgen.torch.conversion.nearest import check_values
from ksgen.torch.conversion.propose import (
    BUDGET,
    FAMILIES,
    FOR_WEIGHTS,
    Proposal,
    checked_families,
    offers,
    table_of,
)
from ksgen.torch.conversion.rule import RuleEntry, check_config, described, exactly, load_rule, write_config
from ksgen.torch.conversion.sums import text_of
from ksgen.torch.layer.group import group
from ksgen.torch.layer.linear import COMPUTED, KSLinear, is_computed, uninitialized
from ksgen.torch.layer.sum import KSSum, of_structures, summands
from ksgen.torch.layer.tied import initialized
from ksgen.torch.operators.checks import check_flags, dtype_name
from ksgen.values import counted, excerpt, grouped, listed

CHAINS_PER_FAMILY = 9  # candidates per family: the chains with the least expected time
NEAR = 1.03  # among chains within this factor of the least error, the fastest training step decides
FEW_OUTPUTS = 16  # layers with at most this many outputs stay dense unless a rule names them
# full names of heads and embeddings, which stay dense likewise
HEAD_OR_EMBEDDING = re.compile(
    r"(.*[._])?embed(ding)?s?([._].*)?|(.*\.)?((lm|mlm|cls|classification)_)?head(\..*)?"
    r"|(.*\.)?(classifier|score)(\..*)?|fc"
)
# state of the hooks that see a module's calls; hooks of state dicts know the names of its parameters, and stay behind
_HOOKS = [name for name in vars(nn.Module()) if "hook" in name and "state_dict" not in name]
Rule = Mapping[str, Patterns | Structure | tuple[Structure, ...] | RuleEntry] | Spec | str | Path


def convert(
    model: nn.Module, rule: Rule | Iterable[str] | None = None, *, budget: float | None = None,
    structures: Iterable[str] | None = None, merge: bool = False, from_weights: bool = True, refine: int = 0,
    progress: bool = False, **options: Any,
) -> "Report":  # fmt: skip
    """Replace every dense layer that a rule names by a `KSLinear` of its chain or structure, or by a sum, in place.

    Dense layers are `nn.Linear` and transformers' `Conv1D`. New weights approximate the old ones (`factorize`). Bias,
    dtype, device, requires_grad and training mode stay, and hooks of calls move to the new layers. If anything is
    wrong, the model stays unchanged. The config of a transformers model gets the rule, so that `save_pretrained` saves
    it.

    Args:
        model: Module whose layers are replaced.
        rule: Mapping of names to chains or structures of `ksgen.structures`, a spec or its path, or the path of a .json
            file of `save_rule`. A tuple of structures becomes a `KSSum` of them. A name with a dot
            or one of *?[ is a shell pattern for the full name, such as `blocks.*.up`. Any other name is one component,
            such as `up`. The first match counts. A spec gives its `layers`, with their `between`, `fuse`, `out_layout`
            and ties. With a `budget`: a list of such names, or None for all layers except tied ones, heads, embeddings,
            and layers with at most 16 outputs.
        budget: Largest share of the dense weights. `propose` then gives candidates per layer: the chains expected to
            train faster than the dense layer, or all if there are none. Of those whose errors are at most 1.03 times
            the smallest error, the one with the fastest training step is taken. SVDs give the errors of most
            candidates. The other candidates have three or more factors, and `factorize` fits them.
        structures: Families that `propose` gives, such as ["dyad"]. The `budget` is then 0.3 by default. None: all of
            them if `from_weights` is false, else all but Kronecker products and BLAST.
        merge: With a `budget`, whether `propose` also merges neighbouring factors.
        from_weights: False draws the new weights at random. This includes parameters that a structure initialises with
            zeros, such as `gralora_B` of `structures.gralora`.
        refine: Steps of L-BFGS of `factorize`.
        progress: True shows a progress bar on a terminal.
        **options: Options of `KSLinear`, such as `backend`.

    Returns:
        A `Report`. `print` shows a table with parameters and errors.

    Raises:
        SpecError: The rule or an option is not accepted, a layer cannot be replaced, or a chain does not fit it.
        PatternError: A chain is invalid.

    Examples:
        >>> from torch import nn
        >>> from ksgen.torch import convert
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> convert(model, {"0": "2,4,4,1"})
        Report(1 layer replaced, 90 parameters before and 58 after; print it for a table)
        >>> model[0].chain[0]
        Pattern(a=2, b=4, c=4, d=1)
    """
    if not isinstance(model, nn.Module):
        raise SpecError(f"model={excerpt(model)}; accepted: a torch.nn.Module")
    check_flags(from_weights=from_weights, merge=merge, progress=progress)
    if merge and budget is None:
        raise SpecError(
            "merge=True without a budget; accepted: merge=True with a budget, or a rule and `optimize` later"
        )
    if structures is not None and budget is None:
        budget = BUDGET
    if budget is None:
        wanted = read_rule(rule)
    else:
        families = checked_families(structures) if structures is not None else FOR_WEIGHTS if from_weights else FAMILIES
        # cached, because layers share a few shapes
        offered = cache(partial(offers, budget=budget, merge=merge, structures=families, most=CHAINS_PER_FAMILY))
        wanted = _proposed(model, rule, budget, offered, from_weights, progress)
    found = find_layers(model, wanted)
    _check_not_tied(model, found)
    check_config(model)
    before = _parameter_count(model)
    new: dict[nn.Module, nn.Module] = {}
    replaced: list[Replaced] = []
    with progress_bar(progress, "factorizing" if from_weights else "drawing", len(found)) as advance:
        for layer, (names, key) in found.items():
            new[layer], errors = _sparse(names[0], layer, wanted[key], from_weights, refine, options)
            counts = _parameter_count(layer), _parameter_count(new[layer])
            chain, *added = wanted[key].chains
            replaced.append(Replaced(names[0], chain, wanted[key].count, counts, errors, tuple(added)))
            advance()
    put_all(model, new)
    write_config(model)
    return Report(tuple(replaced), (before, _parameter_count(model)))


def put(model: nn.Module, name: str, module: nn.Module) -> None:
    """Replace the module of that name in the model."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module)


def put_all(model: nn.Module, new: Mapping[nn.Module, nn.Module]) -> None:
    """Replace modules of the model under all their names, so that a module with several names stays shared."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if module in new:
            put(model, name, new[module])
    for old, module in new.items():
        move_hooks(old, module)


def move_hooks(old: nn.Module, new: nn.Module) -> None:
    """Move the hooks of a module's calls to a new module. Their handles still remove them."""
    for name in _HOOKS:
        vars(old)[name], vars(new)[name] = vars(new)[name], vars(old)[name]


def read_rule(rule: Any) -> dict[str, RuleEntry]:
    """Convert a rule in any accepted form to a `RuleEntry` per name."""
    if isinstance(rule, str | Path):
        rule = load_rule(rule) if str(rule).endswith(".json") else load(rule)
    chains: Any = _layers_of(rule) if isinstance(rule, Spec) else rule
    if not isinstance(chains, Mapping) or not chains:
        raise SpecError(f"rule={excerpt(rule)}; accepted: a mapping of names to chains, or a spec with layers")
    for name in chains:
        if not isinstance(name, str):
            raise SpecError(f"rule: the name {excerpt(name)}; accepted: a layer's name, or a pattern of names, as text")
    return {name: _entry_of(each) for name, each in chains.items()}


def _entry_of(given: Any) -> RuleEntry:
    structures = given if isinstance(given, tuple) else (given,)
    if structures and all(isinstance(each, Structure) for each in structures):
        return RuleEntry.of(*structures)
    return given if isinstance(given, RuleEntry) else RuleEntry(Chain.read(given))


def _layers_of(spec: Spec) -> dict[str, RuleEntry]:
    """Rule entries of a spec's layers, groups and sums; `SpecError` on groups whose chains differ."""
    found = {}
    for name in spec.names:
        is_sum, ties = name in spec.sums, spec.ties.get(name, ())
        chains = spec.sums[name] if is_sum else spec.chains_of[name]
        given = spec.structures.get(name) or tuple(map(of_chain, chains))
        structures = [of_chain(each.chain, ties) if ties and not any(each.ties) else each for each in given]
        if not is_sum and len({(each.chain.factors, each.ties) for each in structures}) > 1:
            raise SpecError(f"layer {name}: the chains of its group differ; accepted: equal ones")
        if spec.options_of(name).out_layout and any(kernel.layout != "bsf" for kernel in spec.launches[name]):
            raise SpecError(
                f"layer {name}: layout=bsl with out_layout; accepted: layout=bsf, in which the layers of a model take x"
            )
        count, added = (1, chains[1:]) if is_sum else (len(chains), ())
        parts, options = structures[: 1 + len(added)], spec.options_of(name).non_defaults
        found[name] = RuleEntry(chains[0], count, options, given=tuple(parts), added=added)
    return found


def _proposed(
    model: nn.Module, names: Any, budget: float, offered: Callable[..., tuple[Proposal, ...]], from_weights: bool,
    progress: bool,
) -> dict[str, RuleEntry]:  # fmt: skip
    """Select a chain per layer: the one with the fastest training step whose error is within `NEAR` of the least."""
    if isinstance(names, str | Path | Mapping | Spec):
        raise SpecError(
            f"rule={excerpt(names)} with budget={excerpt(budget)}; accepted: a list of layers' names, or none for all"
        )
    keys = ("*",) if names is None else listed(names) or ()
    head = getattr(model, "get_output_embeddings", lambda: None)()  # transformers' models have this method
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    choices: dict[str, tuple[Tensor, list[tuple[float, RuleEntry]]]] = {}
    layers = _layers(model)
    for key in () if names is None else keys:
        _check_named(model, key, layers)
    for name, layer in layers:
        if not name or not any(_fits(key, name) for key in keys):
            continue
        weight = dense_weight(layer).detach()
        if names is None and (owners[id(layer.weight)] > 1 or not _is_plain(layer) or is_computed(layer)):
            continue
        if names is None and (len(weight) <= FEW_OUTPUTS or layer is head or HEAD_OR_EMBEDDING.fullmatch(name)):
            continue
        choices[name] = weight, _choices(weight, offered)
        if not choices[name][1]:
            raise SpecError(
                f"budget={excerpt(budget)}: no chain from {weight.shape[1]} to {weight.shape[0]} features fits it, "
                f"for {name}"
            )
    if not choices and names is None:
        few = f"those with at most {FEW_OUTPUTS} outputs"
        raise SpecError(
            f"the model has no linear layers except tied ones, heads, embeddings and {few}; accepted: a list of names"
        )
    if not choices:
        raise SpecError(
            f"rule={excerpt(names)} names no layer of the model; its layers: {excerpt([name for name, _ in layers])}"
        )
    found: dict[str, RuleEntry] = {}
    steps = sum(entry.count for _, candidates in choices.values() for _, entry in candidates) if from_weights else 0
    with progress_bar(progress and from_weights, "choosing chains", steps) as advance:
        for name, (weight, candidates) in choices.items():
            errors = [0.0] * len(candidates)
            if from_weights:
                with _factorizing(name, weight):
                    errors = _errors(weight, [entry for _, entry in candidates], advance)
            near = [
                (us, error, entry)
                for (us, entry), error in zip(candidates, errors, strict=True)
                if error <= NEAR * min(errors)
            ]
            *_, found[name] = min(near, key=lambda each: each[:2])
    return exactly(found)


def _choices(weight: Tensor, offered: Callable[..., tuple[Proposal, ...]]) -> list[tuple[float, RuleEntry]]:
    """Time of a training step and rule entry of every candidate for a layer.

    Candidates are the chains whose expected training step is faster than the lower bound on the dense layer's. If there
    are none, or times are unknown, all chains are candidates. A layer with three times as many outputs as inputs may
    also become three chains or sums side by side. Such are fused q, k and v. One chain is nearer if the parts use the
    same components of x, three chains if they do not.
    """
    rows, columns = weight.shape
    found: list[tuple[float, RuleEntry]] = []
    dense_us = inf
    for count in (1, 3) if rows == 3 * columns else (1,):
        whole, *others = offered(columns, rows // count, device=weight.device, precision=dtype_name(weight.dtype))
        found += [(_step_us(count, each), RuleEntry.of(*each.structures, count=count)) for each in others]
        dense_us = min(dense_us, _step_us(count, whole))
    return [each for each in found if each[0] < dense_us] or found


def _errors(weight: Tensor, entries: Sequence[RuleEntry], advance: Callable[[], None]) -> list[float]:
    """Distance of each rule entry's product from a layer's weight."""
    found: list[float] = []
    for count, alike in groupby(entries, key=lambda entry: entry.count):
        forms = [entry.structures for entry in alike]
        of_parts = [
            [float(vector_norm(part.double())) * error for error in errors_of(part, forms, advance)]
            for part in weight.chunk(count)
        ]
        found += [hypot(*errors) for errors in zip(*of_parts, strict=True)]
    return found


def _step_us(count: int, proposal: Proposal) -> float:
    return inf if proposal.step_us is None else count * proposal.step_us


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Dense layers of a model, once per name."""
    if wrong := uninitialized(model):
        raise SpecError(wrong)
    return [(name, module) for name, module in model.named_modules(remove_duplicate=False) if _is_dense(module)]


def _fits(key: str, name: str) -> bool:
    return fnmatchcase(name, key) if set(key) & set("*?[.") else key in name.split(".")


def find_layers(model: nn.Module, wanted: Mapping[str, RuleEntry]) -> dict[nn.Module, tuple[list[str], str]]:
    """Find the layers of a rule. Each comes with its names that the rule matches, and with the key that matches."""
    layers = _layers(model)
    for key, entry in wanted.items():
        _check_named(model, key, layers, entry)
    found: dict[nn.Module, tuple[list[str], str]] = {}
    for name, layer in layers:
        if key := next((key for key in wanted if _fits(key, name)), ""):
            names, first_key = found.setdefault(layer, ([], key))
            names.append(name)
            _check_layer(name, layer, wanted[first_key])
    return found


def _check_named(
    model: nn.Module, key: str, layers: list[tuple[str, nn.Module]], wanted: RuleEntry | None = None
) -> None:
    """Raise `SpecError` if a key names no dense layer, and none that already has the chains of `wanted`, or any."""
    if not any(_fits(key, name) for name, _ in layers) and not _is_replaced(model, key, wanted):
        raise SpecError(
            f"rule {excerpt(key)} names no layer of the model; its layers: {excerpt([name for name, _ in layers])}"
        )


def _is_replaced(model: nn.Module, key: str, wanted: RuleEntry | None) -> bool:
    """Whether a layer that the key names already has the chains of the rule, or any chains if `wanted` is None."""
    for name, module in model.named_modules(remove_duplicate=False):
        with suppress(SpecError):  # a layer that no rule describes has others
            if _fits(key, name) and (entry := described(module)) and (not wanted or entry.chains == wanted.chains):
                return True
    return False


def _check_layer(name: str, layer: nn.Module, wanted: RuleEntry) -> None:
    if not name:
        raise SpecError("the model is a single layer, which cannot be replaced in place; use KSLinear and factorize")
    if not _is_plain(layer):
        raise SpecError(
            f"{name} is a {type(layer).__name__}, which its owner may not call as a layer; accepted: nn.Linear, Conv1D"
        )
    if is_computed(layer):
        raise SpecError(f"{name}.{COMPUTED}")
    chain, (rows, columns) = wanted.chain, dense_weight(layer).shape
    if (rows, columns) != (wanted.count * chain.out_features, chain.in_features):
        several = f"{wanted.count} side by side of " if wanted.count > 1 else ""
        raise SpecError(
            f"{name} takes {columns} features and gives {rows}; {several}{wanted.text} would take "
            f"{chain.in_features} and give {wanted.count * chain.out_features}"
        )


def _check_not_tied(model: nn.Module, found: Mapping[nn.Module, tuple[list[str], str]]) -> None:
    """Refuse a weight that other modules share: the replacement would break the tie."""
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    for layer, (names, _) in found.items():
        for kind, parameter in layer.named_parameters():  # kind: weight or bias
            if others := sorted(set(owners[id(parameter)]) - {f"{name}.{kind}" for name in names}):
                raise SpecError(
                    f"{names[0]}.{kind} is tied to {', '.join(others)}; untie it, or leave {names[0]} out of the rule"
                )


def _is_dense(module: nn.Module) -> bool:
    return (isinstance(module, nn.Linear) and not isinstance(module, KSLinear)) or _is_conv1d(module)


def _is_plain(module: nn.Module) -> bool:
    """Whether a dense layer is no subclass, which its owner may not call."""
    return type(module) is nn.Linear or _is_conv1d(module)


def _is_conv1d(module: nn.Module) -> bool:
    """Whether a module is transformers' `Conv1D`, which stores its weight transposed; works without transformers."""
    return type(module).__name__ == "Conv1D" and isinstance(getattr(module, "nf", None), int)


def dense_weight(layer: nn.Module) -> Tensor:
    """Weight (out_features, in_features) of a dense layer."""
    weight: Tensor = layer.weight
    return weight.T if _is_conv1d(layer) else weight


@contextmanager
def _factorizing(name: str, weight: Tensor) -> Iterator[None]:
    """Check the values of a layer's whole weight, and name the layer in errors of its factorization.

    The parts of the weight, which are factorized one by one, have other rows.
    """
    try:
        check_values(weight)
        yield
    except LaunchError as error:
        raise LaunchError(f"{name}: {error}") from None


def _sparse(
    name: str, layer: nn.Module, wanted: RuleEntry, from_weights: bool, refine: int, options: dict[str, Any]
) -> tuple[nn.Module, tuple[float, ...]]:
    """Build the layer or group that replaces a dense layer. Also returns the relative errors of the factorizations."""
    weight, bias = dense_weight(layer), layer.bias
    if weight.is_meta and from_weights:
        raise SpecError(f"{name} is on the meta device, so that it has no weights; accepted: from_weights=False")
    options = {"device": weight.device, "dtype": weight.dtype, **wanted.options} | options
    if from_weights and (between := options.get("between", "none")) != "none":
        raise SpecError(
            f"{name}: between={excerpt(between)} makes the layer nonlinear, so it cannot approximate the weights; "
            "accepted: from_weights=False"
        )
    biases = [None] * wanted.count if bias is None else bias.chunk(wanted.count)
    parts: list[KSLinear | KSSum] = []
    errors: list[float] = []
    drawn = list(map(_never_zero, wanted.structures))
    for rows, added in zip(weight.detach().chunk(wanted.count), biases, strict=True):
        part = of_structures(drawn, bias=added is not None, **options)
        if from_weights:
            with _factorizing(name, weight):
                factorization = factorized(rows, wanted.structures, refine)
            errors.append(factorization.relative_error)
            slices = [each for layer in summands(part) for each in initialized(layer.weights)]
            with torch.no_grad():
                for parameter, value in zip(slices, factorization.weights, strict=True):
                    parameter.copy_(value[tuple(map(slice, parameter.shape))])
        part.requires_grad_(weight.requires_grad)
        first = summands(part)[0]  # which has the bias of a sum
        if first.bias is not None and added is not None:
            with torch.no_grad():
                first.bias.copy_(added)
            first.bias.requires_grad_(added.requires_grad)
        parts.append(part)
    new = parts[0] if wanted.count == 1 else group(parts)
    return new.train(layer.training), tuple(errors)


def _never_zero(structure: Structure) -> Structure:
    """The structure without initial values of zero, which would replace the layer by its bias."""
    return replace(structure, scales={name: scale for name, scale in structure.scales.items() if scale})


def _parameter_count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# ---- the report


@dataclass(frozen=True)
class Replaced:
    """One layer before and after its replacement.

    `flops` counts multiplications and additions per row of x.
    """

    name: str
    chain: Chain
    count: int  # number of chains side by side
    parameters: tuple[int, int]  # before and after
    relative_errors: tuple[float, ...]  # of the factorizations; empty if the new weights are drawn
    added: tuple[Chain, ...] = ()  # further chains of a sum

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chain, or those of a sum."""
        return self.chain, *self.added

    @property
    def flops(self) -> tuple[int, int]:
        dense = self.chain.in_features * self.chain.out_features
        sparse = sum(each.weight_count for each in self.chains)
        return 2 * dense * self.count, 2 * sparse * self.count

    @property
    def text(self) -> str:
        """The chains in words."""
        return text_of(self.chains) + (f" x {self.count}" if self.count > 1 else "")


@dataclass(frozen=True)
class Report:
    """Result of `convert`. `print` shows a table, with equal layers of several blocks in one row."""

    layers: tuple[Replaced, ...]
    parameters: tuple[int, int]  # parameters of the full model, before and after

    def __repr__(self) -> str:
        before, after = self.parameters
        replaced = counted(len(self.layers), "layer")
        return f"Report({replaced} replaced, {before:,} parameters before and {after:,} after; print it for a table)"

    @property
    def flops(self) -> tuple[int, int]:
        """Operations of the replaced layers per row of x, before and after."""
        return sum(layer.flops[0] for layer in self.layers), sum(layer.flops[1] for layer in self.layers)

    def __str__(self) -> str:
        rows = []
        for name, alike in _alike(self.layers):
            before, after = (sum(layer.parameters[side] for layer in alike) for side in (0, 1))
            errors = [error for layer in alike for error in layer.relative_errors]
            shown = (f"{median(errors):.3f}", f"{max(errors):.3f}") if errors else ("drawn", "")
            rows.append([name, f"x {len(alike)}", alike[0].text, f"{after:,}", f"{after / before:.1%}", *shown])
        table = table_of(("layers", "", "chain", "parameters", "share", "error, median", "worst"), rows)
        (before, after), (flops_before, flops_after) = self.parameters, self.flops
        replaced = counted(len(self.layers), "layer")
        return (
            f"{table}{replaced} replaced: {before:,} parameters became {after:,} in the whole model; in these layers, "
            f"{flops_before:,} operations per row became {flops_after:,}."
        )


def _alike(layers: tuple[Replaced, ...]) -> list[tuple[str, list[Replaced]]]:
    """Group layers of equal chains whose names differ only in numbers; the group's name has * for each number."""
    groups = grouped(layers, lambda each: (re.sub(r"(?<![^.])\d+(?![^.])", "*", each.name), each.text))
    return [(name if len(alike) > 1 else alike[0].name, alike) for (name, _), alike in groups.items()]
