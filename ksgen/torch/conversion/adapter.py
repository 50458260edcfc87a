"""Kronecker-sparse adapters: trained in parallel with frozen dense layers, and merged into them after training."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from ksgen.errors import SpecError
from ksgen.torch.conversion.convert import Rule, dense_weight, find_layers, move_hooks, put, put_all, read_rule
from ksgen.torch.conversion.rule import RuleEntry
from ksgen.torch.layer.group import KSLinears
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.layer.sum import KSSum, of_structures, summands
from ksgen.torch.layer.tied import initialized
from ksgen.values import excerpt

_ADDED, _LIKE_BASE = "because `merge` adds matrices", "the layout of x and y of the base"
_ACCEPTED = {  # values of options that other layers may have, and why
    "activation": ("none", _ADDED), "between": ("none", _ADDED), "layout": ("bsf", _LIKE_BASE),
    "out_layout": ("bsf", _LIKE_BASE),
}  # fmt: skip


class KSAdapter(nn.Module):
    """Layer that computes y = base(x) + x K^T with a base that `adapt` freezes.

    K is a product of Kronecker-sparse factors and is initially zero. The base is an `nn.Linear` or transformers'
    `Conv1D`.
    """

    def __init__(self, base: nn.Module, rule: RuleEntry, **options: Any) -> None:
        super().__init__()
        options = {"device": base.weight.device, "dtype": base.weight.dtype, **rule.options} | options
        for name, (accepted, why) in _ACCEPTED.items():
            if (value := options.get(name) or accepted) != accepted:
                raise SpecError(f"{name}={excerpt(value)} of an adapter; accepted: {accepted!r}, {why}")
        self.base = base
        parts = [of_structures(rule.structures, bias=False, **options) for _ in range(rule.count)]
        for layer in (layer for part in parts for layer in summands(part)):
            nn.init.zeros_(initialized(layer.weights)[-1])
        self.adapter: KSLinear | KSSum | KSLinears = parts[0] if rule.count == 1 else KSLinears(parts)
        self.train(base.training)

    @property
    def in_features(self) -> int:
        return int(dense_weight(self.base).shape[1])

    @property
    def out_features(self) -> int:
        return int(dense_weight(self.base).shape[0])

    @property
    def weight(self) -> Tensor:
        """The base's matrix plus the adapter's, computed at each access as a dense tensor."""
        return dense_weight(self.base) + self.adapter.to_dense()

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x)
        return y + self.adapter(x) if isinstance(self.adapter, KSLinears) else self.adapter(x, y)

    def to_linear(self) -> nn.Module:
        """Return a copy of the base with the adapter merged into its weight."""
        merged = deepcopy(self.base).requires_grad_(True).train(self.training)
        with torch.no_grad():
            dense_weight(merged).copy_(self.weight)
        return merged


def adapt(model: nn.Module, rule: Rule, **options: Any) -> list[str]:
    """Freeze a model and add a trainable adapter to every dense layer that a rule names.

    `rule` has the forms that `convert` accepts. `options` are options of the adapters' `KSLinear`, except an
    activation. Hooks of calls move to the adapted layers. Returns the names of the layers. If anything is wrong, the
    model stays unchanged.
    """
    wanted = read_rule(rule)
    found = find_layers(model, wanted)
    for name in (name for names, _ in found.values() for name in names):
        if isinstance(model.get_submodule(name.rpartition(".")[0]), KSAdapter):
            raise SpecError(f"{name} is the base of an adapter; `merge` the model first, or leave it out of the rule")
    new = {layer: KSAdapter(layer, wanted[key], **options) for layer, (_, key) in found.items()}
    model.requires_grad_(False)
    for layer, (names, _) in found.items():
        new[layer].adapter.requires_grad_(True)
        for name in names:
            put(model, name, new[layer])
        move_hooks(layer, new[layer])
    return [names[0] for names, _ in found.values()]


def merge(model: nn.Module) -> list[str]:
    """Replace a model's adapters by dense layers that include them. Returns the names of these layers."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, KSAdapter) and name]
    merged: dict[nn.Module, nn.Module] = {module: module.to_linear() for _, module in found}
    put_all(model, merged)
    return [name for name, _ in found]
