"""Rules that name a model's layers and their chains: derived from a model, saved with its weights, and loaded again.

A rule is a small JSON file or, for a transformers model, a part of its config.json. `convert` applies it to a model.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from glob import escape
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from ksgen import files
from ksgen.errors import KsgenError, SpecError, warn_deprecated
from ksgen.pattern import Chain
from ksgen.structures import Structure, of_chain
from ksgen.torch.conversion.sums import text_of
from ksgen.torch.layer.group import KSLinears
from ksgen.torch.layer.linear import OPTIONS, KSLinear
from ksgen.torch.layer.sum import KSSum, summands
from ksgen.torch.layer.tied import ties_of
from ksgen.values import excerpt, listed, shown, whole_number

METHOD = "ksgen"  # name of the quantization method in config.json
_FORMS = {"chain", "sum"}  # keys of a layer's chain, and of the chains of a sum
_MOST_BYTES = 2**26  # size of the largest rule file that is read


@dataclass(frozen=True)
class RuleEntry:
    """Rule entry for a layer of `count` chains or sums side by side, such as q, k and v.

    Each of them computes its part of the outputs. `options` are options of every chain's `KSLinear`. The options of
    `convert` take precedence. `tied` has the axes along which the weights of each factor of all chains are equal: "a",
    "d", "ad" or "". Structures, one per chain, have ties of their own and also give initial weights.
    """

    chain: Chain
    count: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    tied: tuple[str, ...] = ()
    given: tuple[Structure, ...] = field(default=(), compare=False, repr=False)
    added: tuple[Chain, ...] = ()  # further chains of a sum

    def __post_init__(self) -> None:
        count = whole_number(self.count)
        if count is None or count < 1:
            raise SpecError(f"count={excerpt(self.count)}; accepted: a whole number of at least 1")
        if len({(each.in_features, each.out_features) for each in self.chains}) > 1:
            raise SpecError(f"{self.text} have other features; accepted: a sum of chains with equal features")
        ties = sum((each.ties for each in self.structures), ())
        object.__setattr__(self, "tied", ties if any(ties) else ())

    @classmethod
    def of(cls, *structures: Structure, count: int = 1) -> "RuleEntry":
        """Rule entry for layers of one structure, or for sums of several."""
        first, *added = (each.chain for each in structures)
        return cls(first, count, given=structures, added=tuple(added))

    @property
    def chains(self) -> tuple[Chain, ...]:
        """The chain, or those of a sum."""
        return self.chain, *self.added

    @property
    def text(self) -> str:
        """The chains in words."""
        return text_of(self.chains)

    @property
    def structures(self) -> tuple[Structure, ...]:
        """The given structures, or those of the chains and their ties."""
        ties = iter(self.tied)
        return self.given or tuple(of_chain(each, tuple(islice(ties, len(each)))) for each in self.chains)


def __getattr__(name: str) -> Any:
    if name == "Beside":  # the earlier name, which pickled rules also have
        warn_deprecated("Beside", "RuleEntry")
        return RuleEntry
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def described(module: nn.Module) -> RuleEntry | None:
    """Rule entry that describes a layer, a group or a sum.

    None if it has no chains, or stores its weights in another type.
    """
    if isinstance(module, KSLinears):
        return _side_by_side(list(module))
    parts: list[Any] = list(module) if isinstance(module, KSSum) else [module]
    if not parts or not all(isinstance(part, KSLinear) and not part.has_stored_type for part in parts):
        return None
    first, *others = parts
    options, text = _options_of(first), text_of(part.chain for part in parts)
    if any(_options_of(other) != options for other in others):
        raise SpecError(f"the layers of a sum differ in their options ({text}); only equal ones can be saved")
    if any(other.bias is not None for other in others):
        raise SpecError(f"a later layer of a sum has a bias ({text}); only a bias of the first one can be saved")
    if isinstance(module, KSSum) and module.activation != "none":
        options["activation"] = module.activation
    ties = sum((ties_of(part.weights) for part in parts), ())
    return RuleEntry(first.chain, 1, options, ties, added=tuple(other.chain for other in others))


def _side_by_side(parts: list[nn.Module]) -> RuleEntry | None:
    """Rule entry of a group; None if it is empty, or an entry describes none of its layers."""
    entries = [entry for part in parts if not isinstance(part, KSLinears) and (entry := described(part))]
    if not entries or len(entries) < len(parts):
        return None
    first, *others = entries
    text = ", ".join(each.text for each in entries)
    if any(other != first for other in others):
        raise SpecError(f"the layers side by side differ ({text}); only equal ones can be saved")
    if len({summands(part)[0].bias is None for part in parts}) > 1:
        raise SpecError(f"some layers side by side have no bias ({text}); only a bias of all or none can be saved")
    return replace(first, count=len(parts))


def rule_of(model: nn.Module) -> dict[str, RuleEntry]:
    """Rule entries of all layers of chains in a model, by full name."""
    found: dict[str, RuleEntry] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        parent, _, _ = name.rpartition(".")
        is_part = parent and isinstance(model.get_submodule(parent), KSLinears | KSSum)
        if name and not is_part and (layer := described(module)):
            found[name] = layer
    return found


def as_json(rule: Mapping[str, RuleEntry]) -> dict[str, Any]:
    """Convert a rule to JSON values: the chain or the sum per name, and any count, ties and options not by default."""
    written = {}
    for name, layer in rule.items():
        more: dict[str, Any] = {"count": layer.count} if layer.count > 1 else {}
        more |= {"tied": [tie or "none" for tie in layer.tied]} if layer.tied else {}
        chain, *added = ([str(pattern) for pattern in each] for each in layer.chains)
        form = {"sum": [chain, *added]} if added else {"chain": chain}
        written[name] = {**form, **more, **layer.options}
    return written


def from_json(written: object, where: str) -> dict[str, RuleEntry]:
    """Read a rule from JSON values, which `as_json` wrote; `where` names their source in messages."""
    if not isinstance(written, dict):
        raise SpecError(f"{where}: {excerpt(written)} is not a rule; accepted: what save_rule writes")
    rule = {}
    for name, layer in written.items():
        if isinstance(layer, dict) and "weights" in layer:
            stored = f"{where}: {name} had weights in {excerpt(layer['weights'])}, which are not read back"
            raise SpecError(f"{stored}; save a model before it is quantized, or its state_dict")
        known = isinstance(layer, dict) and not set(layer) - {*_FORMS, "count", "tied", *OPTIONS}
        if not known or len(_FORMS & set(layer)) != 1:
            raise SpecError(
                f"{where}: {name} is {excerpt(layer)}; accepted: chain, and perhaps count, {', '.join(OPTIONS)}, tied; "
                "a sum has sum in place of chain"
            )
        options = {option: layer[option] for option in OPTIONS if option in layer}
        try:
            if not (chains := listed(layer["sum"]) if "sum" in layer else (layer["chain"],)):
                raise SpecError(f"sum={excerpt(layer['sum'])}; accepted: a list of chains")
            first, *added = map(Chain.read, chains)
            if (ties := listed(layer.get("tied", ()))) is None or not all(isinstance(tie, str) for tie in ties):
                raise SpecError(f"tied={excerpt(layer['tied'])}; accepted: a list of none, a, d or ad per factor")
            rule[name] = RuleEntry(
                first, layer.get("count", 1), options, tuple("" if tie == "none" else tie for tie in ties),
                added=tuple(added),
            )  # fmt: skip
        except KsgenError as error:
            raise SpecError(f"{where}: {name}: {error}") from error
    return rule


def exactly(rule: Mapping[str, RuleEntry]) -> dict[str, RuleEntry]:
    """Convert names to shell patterns that match these names and no others."""
    patterns = {escape(name): layer for name, layer in rule.items()}
    return {  # brackets around the first character make a name of one component a pattern of full names
        pattern if set(pattern) & set("[.") else f"[{pattern[0]}]{pattern[1:]}": layer
        for pattern, layer in patterns.items()
        if pattern
    }


def save_rule(model: nn.Module, path: str | PathLike[str]) -> None:
    """Write the rule of a model's layers to a .json file, which `convert` accepts.

    The rule holds the chain and the options of each `KSLinear` by its name, and no weights. A `KSSum` is one entry.
    `convert` with this file and `from_weights=False` prepares a dense model for `load_state_dict`.

    Args:
        model: Module with `KSLinear` layers.
        path: File to write; its name ends in .json.

    Raises:
        SpecError: The name has another ending, the model has no `KSLinear`, or it has a sum or a group that no rule can
            describe.

    Examples:
        >>> from torch import nn
        >>> from ksgen.torch import convert, save_rule
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> report = convert(model, {"0": "2,4,4,1"})
        >>> save_rule(model, "rule.json")
        >>> again = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        >>> convert(again, "rule.json", from_weights=False)
        Report(1 layer replaced, 72 parameters before and 40 after; print it for a table)
        >>> again.load_state_dict(model.state_dict())
        <All keys matched successfully>
    """
    place = Path(path)
    if place.suffix != ".json":
        raise SpecError(f"{shown(place)}; accepted: a name that ends in .json")
    if not (rule := rule_of(model)):
        raise SpecError(
            f"the {type(model).__name__} has no KSLinear in it, so that there is no rule to save; `convert` it first"
        )
    files.write(place, json.dumps({"layers": as_json(rule)}, indent=1) + "\n")


def load_rule(path: str | PathLike[str]) -> dict[str, RuleEntry]:
    """Read a file that `save_rule` wrote, in the form that `convert` accepts."""
    place = Path(path)
    try:
        content = json.loads(files.read(place, _MOST_BYTES))
    except (OSError, ValueError, RecursionError) as error:
        raise SpecError(f"{shown(place)}: cannot be read as a rule ({error}); accepted: a file of save_rule") from error
    return exactly(from_json(content.get("layers") if isinstance(content, dict) else content, shown(place)))


def check_config(model: nn.Module) -> None:
    """Raise `SpecError` if the config of a transformers model has no place for the rule, or a layer has no rule."""
    if (config := _config_of(model)) is None:
        return
    if (other := _method(config)) not in (None, METHOD):
        raise SpecError(
            f"the model is quantized by {other}, and its config.json has no place for the rule; convert it first"
        )
    rule_of(model)


def write_config(model: nn.Module) -> None:
    """Write the rule into the config of a transformers model, so that `save_pretrained` saves it."""
    if (config := _config_of(model)) is not None:
        config.quantization_config = {"quant_method": METHOD, "layers": as_json(rule_of(model))}


def write_stored(model: nn.Module, names: Iterable[str], storage: str) -> None:
    """Record in a transformers config that these layers store their weights in another type.

    Loading such a saved model is then refused, instead of drawing the weights again.
    """
    if (config := _config_of(model)) is not None and _method(config) == METHOD:
        given = config.quantization_config
        layers = dict(given["layers"] if isinstance(given, dict) else given.layers)
        layers |= {name: {**layers.get(name, {}), "weights": storage} for name in names}
        config.quantization_config = {"quant_method": METHOD, "layers": layers}


def _config_of(model: nn.Module) -> Any:
    library = sys.modules.get("transformers")  # a transformers model exists only if the library was imported
    return model.config if library is not None and isinstance(model, library.PreTrainedModel) else None


def _method(config: Any) -> str | None:
    """Quantization method that a config names; None if the model is not quantized."""
    given = getattr(config, "quantization_config", None)
    method = given.get("quant_method") if isinstance(given, dict) else getattr(given, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def _options_of(layer: KSLinear) -> dict[str, Any]:
    return {option: getattr(layer, option) for option, usual in OPTIONS.items() if getattr(layer, option) != usual}
