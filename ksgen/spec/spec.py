"""Defines the content of a spec: kernels, and the layers that share them. Never reads a text."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ksgen.pattern import Chain, Pattern
from ksgen.spec.kernel import KernelSpec, LayerOptions, StatedOptions

if TYPE_CHECKING:
    from ksgen.spec.nodes import SourcePlace
    from ksgen.structures import Structure


@dataclass(frozen=True)
class Spec:
    """Content of one YAML file: each kernel once, and the layers that share them."""

    name: str  # a Python identifier, derived from `title`
    kernels: tuple[KernelSpec, ...]
    layers: Mapping[str, Chain]
    groups: Mapping[str, tuple[Chain, ...]] = field(default_factory=dict)  # layers of several chains on one x
    options: Mapping[str, LayerOptions] = field(default_factory=dict)  # by layer or group
    # by layer or group: kernels that compute it in one launch
    launches: Mapping[str, tuple[KernelSpec, ...]] = field(default_factory=dict)
    # by layer or group: kernels of its last factor, in the layout of x
    wanted: Mapping[str, tuple[KernelSpec, ...]] = field(default_factory=dict)
    # options of calls, by name of a layer or group, or by pattern
    stated: Mapping[str | Pattern, StatedOptions] = field(default_factory=dict)
    # by kernel or launch with a batch: where the text names the batch
    batch_places: "Mapping[KernelSpec, SourcePlace]" = field(default_factory=dict)  # for messages
    sums: Mapping[str, tuple[Chain, ...]] = field(default_factory=dict)  # chains on one x whose outputs are added
    title: str = ""  # stem of the spec's file; empty without a file
    ties: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # by layer with `tied`: one per factor
    # by layer, group or sum: the structure of each chain; not compared, because equal chains have equal kernels
    structures: "Mapping[str, tuple[Structure, ...]]" = field(default_factory=dict, compare=False)

    @property
    def chains_of(self) -> dict[str, tuple[Chain, ...]]:
        """Chains by name: one per layer, several per group. Each chain of a sum is a layer of its own."""
        parts = {name: (chain,) for title, chains in self.sums.items() for name, chain in parts_of(title, chains)}
        return {name: (chain,) for name, chain in self.layers.items()} | dict(self.groups) | parts

    @property
    def names(self) -> tuple[str, ...]:
        """Names of layers, groups and sums."""
        return *self.layers, *self.groups, *self.sums

    def options_of(self, layer: str) -> LayerOptions:
        return self.options.get(layer, LayerOptions())

    def stated_of(self, launcher: str | Pattern) -> StatedOptions:
        """Options that the spec states for a layer or group, by name, or for a pattern."""
        return self.stated.get(launcher, StatedOptions())


def parts_of(name: str, chains: Iterable[Chain]) -> list[tuple[str, Chain]]:
    """Chains of a sum, each with the name of its layer."""
    return [(f"{name}[{number}]", chain) for number, chain in enumerate(chains)]
