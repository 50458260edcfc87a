"""Layers to measure: named sets of chains, those of a spec, and groups of several. Imports no PyTorch."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path

from ksgen.bench.roster import COMPARISONS
from ksgen.errors import SpecError
from ksgen.paths import resource
from ksgen.pattern import Chain, Pattern, block_butterfly, low_rank, monarch
from ksgen.spec import Epilogue, load, paper_patterns

OF_TRANSFORMERS = (
    (384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096),
    (4096, 1024),
)  # fmt: skip
COUNT = 24
MOST_FEATURES = 8192  # features of a random chain; beyond, its dense layer would dominate the measurement
_BANDS = (512, 2048, MOST_FEATURES)  # upper ends of the bands of a layer's larger side


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer to measure: its chains, several for a group, and its other operations.

    None stands for the command's option.
    """

    name: str
    chains: tuple[Chain, ...]
    between: str = "none"
    out_layout: str | None = None
    epilogue: Epilogue = field(default_factory=Epilogue)
    precisions: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    batches: tuple[int, ...] | None = None
    fuse: str = "auto"  # fusion of the layer in normal use

    def group_of(self, count: int) -> "MeasuredLayer":
        """Group of so many equal layers on one x, such as q, k and v."""
        return replace(self, name=f"{self.name}, {count} side by side", chains=self.chains * count)


def transformers() -> dict[str, Chain]:
    """Chains of transformers by name: ViT-S/16 and GPT-2 medium from the specs, and other families in their sizes.

    The other families are monarch, low-rank and butterfly chains.
    """
    found = {
        f"{name} {layer}": chain
        for name in ("vit", "gpt2")
        for layer, chain in load(resource("specs") / f"{name}.yaml").layers.items()
    }
    found |= {f"monarch {inputs} to {outputs}": monarch(inputs, outputs, 32, 32) for inputs, outputs in OF_TRANSFORMERS}
    found |= {
        f"low rank {inputs} to {outputs}": low_rank(inputs, outputs, min(inputs, outputs) // 8)
        for inputs, outputs in OF_TRANSFORMERS[:6]
    }
    return found | {f"butterfly {features}, blocks of 64": block_butterfly(features, 64) for features in (512, 1024)}


def drawn(seed: int = 0, count: int = COUNT) -> dict[str, Chain]:
    """Random pairs of the paper's patterns that fit each other, by name.

    They alternate between classes of size, and between layers that widen, narrow or do neither. Equal seeds give equal
    pairs.
    """
    pick = random.Random(seed)
    strata: dict[tuple[int, int], list[Chain]] = {}
    for chain in _pairs():
        inputs, outputs = chain.in_features, chain.out_features
        band = next(number for number, end in enumerate(_BANDS) if max(inputs, outputs) <= end)
        strata.setdefault((band, (inputs < outputs) - (inputs > outputs)), []).append(chain)
    for chains in strata.values():
        pick.shuffle(chains)
    turns = cycle([strata[each] for each in sorted(strata)])
    found = (chains.pop() for chains in turns if chains)
    return {f"random {number}": chain for number, chain in enumerate(islice(found, count), 1)}


def _pairs() -> Iterator[Chain]:
    patterns = [each for each in paper_patterns() if max(each.in_features, each.out_features) <= MOST_FEATURES]
    taking: dict[int, list[Pattern]] = {}
    for each in patterns:
        taking.setdefault(each.in_features, []).append(each)
    for first in patterns:
        for last in taking.get(first.out_features, ()):
            if first.d != last.d:  # otherwise the product is a single pattern
                yield Chain((first, last))


def of_spec(path: Path) -> list[MeasuredLayer]:
    """Layers and groups of a spec, once per epilogue."""
    found, spec = [], load(path)
    for name, chains in spec.chains_of.items():
        own, wanted = spec.options_of(name), spec.wanted[name]
        if stored := next((each.weights for each in wanted if each.is_quantized), ""):
            raise SpecError(
                f"{path}: layer {name} has weights={stored}; accepted: weights: same, as those of PyTorch's products "
                "are"
            )
        if other := next((each.precision for each in wanted if each.precision not in COMPARISONS), ""):
            raise SpecError(f"{path}: layer {name} has precision={other}; accepted: {', '.join(COMPARISONS)}")
        for epilogue in dict.fromkeys(each.epilogue for each in wanted):
            words = (
                "".join(f" {word}" for word in epilogue.words) if len({each.epilogue for each in wanted}) > 1 else ""
            )
            precisions = tuple(dict.fromkeys(each.precision for each in wanted))
            layouts = tuple(dict.fromkeys(each.layout for each in wanted))
            batches = tuple(dict.fromkeys(each.batch for each in wanted if each.batch)) or None
            options = own.between, own.out_layout, epilogue, precisions, layouts, batches, own.fuse
            found.append(MeasuredLayer(f"{spec.name} {name}{words}", chains, *options))
    return found
