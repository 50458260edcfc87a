"""Layers to measure: chains of transformers, structures, layers of models, random chains, and a spec's layers.

Imports no PyTorch.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import cycle, islice, product
from operator import attrgetter
from pathlib import Path
from typing import Any

from ksgen import structures
from ksgen.bench.roster import COMPARISONS
from ksgen.errors import SpecError
from ksgen.paths import resource
from ksgen.pattern import Chain, block_butterfly, low_rank, monarch
from ksgen.spec import Epilogue, load, paper_patterns
from ksgen.spec.spec import parts_of
from ksgen.structures import Structure
from ksgen.values import grouped

OF_TRANSFORMERS = (
    (384, 384), (384, 1536), (1536, 384), (768, 768), (768, 3072), (3072, 768), (1024, 1024), (1024, 4096),
    (4096, 1024),
)  # fmt: skip
COUNT = 24  # random chains by default
MOST_FEATURES = 8192  # of a random chain; with more, the dense layer would take most of the measurement's time
_BANDS = (512, 2048, MOST_FEATURES)  # upper bounds of the size classes, by the larger of a layer's inputs and outputs


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer to measure: its chains, several for a group or a sum, and its other operations.

    The command's options replace `precisions`, `layouts` and `batches`. None: the command's default applies.
    """

    name: str
    chains: tuple[Chain, ...]
    between: str = "none"
    out_layout: str | None = None
    epilogue: Epilogue = field(default_factory=Epilogue)
    precisions: tuple[str, ...] | None = None
    layouts: tuple[str, ...] | None = None
    batches: tuple[int, ...] | None = None
    fuse: str = "auto"  # option of its `KSLinear`
    # with which its authors' form multiplies; one per chain of a sum
    structure: Structure | tuple[Structure, ...] | None = field(default=None, compare=False)
    is_sum: bool = False  # whether the chains' outputs are added, before the other operations
    tied: tuple[str, ...] = ()  # ties without a structure, of the factors of the only chain

    @property
    def structures(self) -> tuple[Structure | None, ...]:
        """Structure of each chain."""
        return self.structure if isinstance(self.structure, tuple) else (self.structure,) * len(self.chains)

    @property
    def ties(self) -> list[tuple[str, ...]]:
        """Axes along which the weights of each factor are tied, per chain: "a", "d", "ad" or ""."""
        pairs = zip(self.structures, self.chains, strict=True)
        return [each.ties if each else self.tied or ("",) * len(chain) for each, chain in pairs]

    def group_of(self, count: int) -> "MeasuredLayer":
        """Group of `count` equal layers on one x, such as q, k and v."""
        return replace(self, name=f"{self.name}, {count} side by side", chains=self.chains * count)


def transformers() -> dict[str, Chain]:
    """Chains of transformers, by name.

    They are the layers of the specs of ViT-S/16 and GPT-2 medium, and monarch, low-rank and butterfly chains in the
    sizes of transformers.
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
    """Random chains of two of the paper's patterns, by name.

    They alternate between size classes, and between layers that widen, narrow or do neither. Equal seeds give equal
    chains.
    """
    pick = random.Random(seed)
    strata: dict[tuple[int, int], list[Chain]] = {}
    for chain in _pairs():
        inputs, outputs = chain.in_features, chain.out_features
        band = next(number for number, end in enumerate(_BANDS) if max(inputs, outputs) <= end)
        strata.setdefault((band, (inputs < outputs) - (inputs > outputs)), []).append(chain)
    for chains in strata.values():
        pick.shuffle(chains)
    in_turn = cycle([strata[key] for key in sorted(strata)])
    found = (chains.pop() for chains in in_turn if chains)
    return {f"random {number}": chain for number, chain in enumerate(islice(found, count), 1)}


# Functions of `ksgen.structures` with sizes of published layers: one layer per structure, then others.
_STRUCTURED: tuple[tuple[str, tuple[int, ...], dict[str, Any]], ...] = (
    ("blast", (1024, 4096), {"blocks": 16, "rank": 128}),
    ("monarch", (1024, 4096), {"blocks": 32}),
    ("butterfly", (1024,), {}),
    ("btt", (1024, 1024), {"blocks": 32, "rank": 4}),
    ("gralora", (1024, 1024), {"blocks": 4, "rank": 64}),
    ("oft", (1024,), {"block": 32}),
    ("boft", (1024,), {"block": 8, "factors": 2}),
    ("gs", (1024, 1024), {"blocks": 32, "orthogonal": False}),
    ("kronecker", (1024, 4096), {"blocks": (64, 32)}),
    ("dyad", (1024, 4096), {"blocks": 4}),
    ("low_rank", (1024, 4096), {"rank": 128}),
    ("block_dense", (1024, 4096), {"blocks": 4, "rank": 512}),
    ("btt", (1024, 4096), {"blocks": 32, "rank": 2}),
    ("oft", (4096,), {"block": 32}),
    # half of the weights of Llama 7B's layers
    ("blast", (4096, 4096), {"blocks": 16, "rank": 1024}),
    ("blast", (4096, 11008), {"blocks": 16, "rank": 1488}),
    ("blast", (11008, 4096), {"blocks": 16, "rank": 1488}),
)


def structured() -> list[MeasuredLayer]:
    """Structures in the sizes of published layers: first one layer per structure, then others.

    The name of a layer is its call. GSOFT's blocks are given as such, so that no rotation is computed.
    """
    found = []
    for name, features, options in _STRUCTURED:
        made = getattr(structures, name)(*features, **options)
        call = ", ".join((*map(str, features), *(f"{key}={value}" for key, value in options.items())))
        is_sum = isinstance(made, tuple)
        chains = tuple(each.chain for each in (made if is_sum else (made,)))
        found.append(MeasuredLayer(f"{name}({call})", chains, structure=made, is_sum=is_sum))
    return found


# Features of ViT-S, ViT-B, and of ViT-L and GPT-2 medium, whose layers are equal but for `qkv`.
_FEATURES = {"ViT-S": 384, "ViT-B": 768, "ViT-L, GPT-2": 1024}
# Blocks of Monarch layers: for ViT and GPT-2 as their authors configure them, for Llama as Abillama et al. (2025) do,
# "Memory-Efficient Acceleration of Block Low-Rank Foundation Models on Resource Constrained GPUs".
_BLOCKS, _LLAMA_BLOCKS = 4, 16
# Configurations of the latter work: layer, inputs, outputs, blocks and rank of BLAST.
_BLAST = (
    ("ViT-B qkv", 768, 2304, 3, 128),
    ("ViT-B up", 768, 3072, 3, 128),
    ("ViT-B down", 3072, 768, 3, 128),
    ("Llama 1B attention", 2048, 2048, 16, 256),
    ("Llama 1B gate", 2048, 8192, 16, 512),
    ("Llama 1B up", 2048, 8192, 16, 768),
    ("Llama 1B down", 8192, 2048, 16, 768),
    ("Llama 7B attention", 4096, 4096, 16, 1024),
    ("Llama 7B up", 4096, 11008, 16, 1488),
    ("Llama 7B down", 11008, 4096, 16, 1488),
)
# The same: Monarch layers whose blocks have a rank, which are block tensor trains, with the rank of a row of blocks.
_RANKED = (
    ("ViT-B up", 768, 3072, 4, 128),
    ("Llama 1B attention", 2048, 2048, 16, 256),
    ("Llama 7B attention", 4096, 4096, 16, 1024),
)
_LOW_RANK = (("ViT-B up", 768, 3072, 128), ("Llama 1B attention", 2048, 2048, 256))


def named_layers() -> list[MeasuredLayer]:
    """Linear layers of ViT, GPT-2 and Llama as structures with published numbers of blocks and ranks.

    They take x with features last. Layers of ViT and GPT-2 have a bias.
    """
    ends = {
        f"{model} {layer}": size
        for model, count in _FEATURES.items()
        for layer, size in (("attention", (count, count)), ("up", (count, 4 * count)), ("down", (4 * count, count)))
    } | {"GPT-2 qkv": (1024, 3072)}
    llama = {"attention": (2048, 2048), "key and value": (2048, 512), "up": (2048, 8192), "down": (8192, 2048)}
    found = {f"{name}, monarch": structures.monarch(*size, _BLOCKS) for name, size in ends.items()}
    found |= {f"Llama 1B {name}, monarch": structures.monarch(*size, _LLAMA_BLOCKS) for name, size in llama.items()}
    found |= {f"{name}, low rank": structures.low_rank(ins, outs, rank) for name, ins, outs, rank in _LOW_RANK}
    found |= {
        f"{name}, btt": structures.btt(ins, outs, blocks, rank // blocks) for name, ins, outs, blocks, rank in _RANKED
    }
    found |= {f"{name}, blast": structures.blast(ins, outs, blocks, rank) for name, ins, outs, blocks, rank in _BLAST}
    options: dict[str, Any] = {"precisions": ("float32", "bfloat16"), "layouts": ("bsf",)}
    return [
        MeasuredLayer(name, (each.chain,), epilogue=Epilogue(bias="Llama" not in name), structure=each, **options)
        for name, each in found.items()
    ]


def _pairs() -> Iterator[Chain]:
    patterns = [each for each in paper_patterns() if max(each.in_features, each.out_features) <= MOST_FEATURES]
    by_inputs = grouped(patterns, attrgetter("in_features"))
    for first in patterns:
        for last in by_inputs.get(first.out_features, ()):
            if first.d != last.d:  # otherwise the product is a single pattern
                yield Chain((first, last))


def of_spec(path: Path) -> list[MeasuredLayer]:
    """Layers, groups and sums of a spec, once per epilogue."""
    found, spec = [], load(path)
    for name in spec.names:
        is_sum = name in spec.sums
        chains = spec.sums[name] if is_sum else spec.chains_of[name]
        parts = [part for part, _ in parts_of(name, chains)] if is_sum else [name]
        kernels, layers = spec.wanted[parts[0]], [spec.options_of(part) for part in parts]
        if stored := next((each.weights for each in kernels if each.is_quantized), ""):
            raise SpecError(
                f"{path}: layer {name} has weights={stored}; accepted: weights: same, which PyTorch's products use"
            )
        if other := next((each.precision for each in kernels if each.precision not in COMPARISONS), ""):
            raise SpecError(f"{path}: layer {name} has precision={other}; accepted: {', '.join(COMPARISONS)}")
        precisions = tuple(dict.fromkeys(each.precision for each in kernels))
        layouts = tuple(dict.fromkeys(each.layout for each in kernels))
        batches = tuple(dict.fromkeys(each.batch for each in kernels if each.batch)) or None
        epilogues = dict.fromkeys(each.epilogue for each in kernels)
        if is_sum:  # its first chain adds the bias and the residual, its last one applies the activation
            last = dict.fromkeys(each.epilogue.activation for each in spec.wanted[parts[-1]])
            epilogues = {
                replace(each, activation=activation, residual_first=True): None
                for each, activation in product(epilogues, last)
            }
        between = next((each.between for each in layers if each.between != "none"), "none")
        tied = spec.ties.get(name, ())
        for epilogue in epilogues:
            words = epilogue.words if len(epilogues) > 1 else ()
            options = between, layers[0].out_layout, epilogue, precisions, layouts, batches, layers[0].fuse
            found.append(MeasuredLayer(" ".join((spec.name, name, *words)), chains, *options, is_sum=is_sum, tied=tied))
    return found
