"""The constants of several layers on one X for few batch entries: those of each layer in a launch of its own, and which are the fastest
together before any search.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ksgen.families.base import Limits
from ksgen.families.chains import layer_kernels, listed, numbers_of, tiles_of
from ksgen.families.few import chain_defaults, defaults
from ksgen.families.few.chain_shape import ChainShape, FewChainConstants
from ksgen.families.few.shape import FewConstants, Shape
from ksgen.families.tiles import Constants
from ksgen.spec import KernelSpec

SIZES = (32, 16, 8, 4, 2, 1)  # batch entries a block
REMEMBERED = 1024  # layers, and groups
RANKS = 4  # of a layer's constants that a search looks at, for as many batch entries and threads
_WORDS = ("tile_out", "tile_d", "thread_out", "lanes_in", "warps_in", "steps")  # of a layer's last factor, in `tiles`
_FIRST_WORDS = ("thread_out", "lanes_in", "steps")  # of the first of two
OfLayer = FewConstants | FewChainConstants


@dataclass(frozen=True)
class FewGroupConstants(Constants):
    """The constants that a search may change; `tiles` has `_WORDS` of each layer's last factor, and `_FIRST_WORDS` of the one before it."""

    tile_batch: int  # batch entries a block
    tiles: str  # of each factor
    early: int = 0  # 1: the launch begins while the grid before it ends, and waits for it by itself: sm_90 and later

    @classmethod
    def of(cls, kernel: KernelSpec, layers: Sequence[OfLayer]) -> "FewGroupConstants":
        """Those of each layer, of as many batch entries a block."""
        words = (_spelled(factor) for each in layers for factor in _factors_of(each))
        return cls(layers[0].tile_batch, tiles_of(kernel, words))

    @property
    def layers(self) -> list[OfLayer]:
        """Those of each layer in a launch of its own."""
        found: list[OfLayer] = []
        before: list[dict[str, int]] = []
        for words, is_last in listed(self.tiles):
            if not is_last:
                before.append(numbers_of(self.tiles, words, _FIRST_WORDS))
                continue
            last = FewConstants(self.tile_batch, **numbers_of(self.tiles, words, _WORDS))
            found.append(FewChainConstants.of(last, **before[-1]) if before else last)
            before = []
        return found

    @property
    def parsed(self) -> list[FewConstants]:
        """Those of each factor by itself."""
        return [factor for each in self.layers for factor, _ in _factors_of(each)]


def options(kernel: KernelSpec, limits: Limits) -> Iterator[FewGroupConstants]:
    """For all numbers of batch entries and threads of a block, the best constants of each layer, the second best ones, and so on."""
    layers = _with_shares(kernel, limits)
    for size in SIZES[::-1]:
        ranked = [_by_threads(layer, share, size, size) for layer, share in layers]
        for threads in _common(ranked):
            for rank in range(RANKS):
                each = [of_layer[threads] for of_layer in ranked]
                yield FewGroupConstants.of(kernel, [found[min(rank, len(found) - 1)][1] for found in each])


@lru_cache(REMEMBERED)
def best(kernel: KernelSpec, limits: Limits, entries: int) -> FewGroupConstants | None:
    """Of blocks of so many entries, or of fewer, those whose slowest layer takes the fewest cycles on its share of the GPU; None where
    layers have no constants of as many threads."""
    found: tuple[tuple[float, int], FewGroupConstants] | None = None
    layers = _with_shares(kernel, limits)
    for size in (each for each in SIZES if each <= entries):
        ranked = [_by_threads(layer, share, size, entries) for layer, share in layers]
        for threads in _common(ranked):
            each = [of_layer[threads][0] for of_layer in ranked]
            key = max(cycles for cycles, _ in each), threads
            if found is None or key < found[0]:
                found = key, FewGroupConstants.of(kernel, [constants for _, constants in each])
    return found and found[1]


def _with_shares(kernel: KernelSpec, limits: Limits) -> list[tuple[KernelSpec, Limits]]:
    """Each layer, and its share of the multiprocessors: as that of the weights."""
    layers = layer_kernels(kernel)
    shares = [layer.weight_bytes * limits.multiprocessors // kernel.weight_bytes for layer in layers]
    return [(layer, replace(limits, multiprocessors=max(1, share))) for layer, share in zip(layers, shares, strict=True)]


def _common(ranked: Sequence[dict[int, tuple[tuple[float, OfLayer], ...]]]) -> list[int]:
    """Threads of a block that all layers may have."""
    return sorted(set.intersection(*(set(each) for each in ranked)))


@lru_cache(REMEMBERED)
def _by_threads(layer: KernelSpec, limits: Limits, size: int, entries: int) -> dict[int, tuple[tuple[float, OfLayer], ...]]:
    """By threads of a block, the best constants of a layer for blocks of so many entries, and their cycles for a batch."""
    found: dict[int, list[tuple[float, OfLayer]]] = {}
    if len(layer.factors) > 1:
        for chain in chain_defaults.options(layer, limits, size):
            cycles = chain_defaults.expected_cycles(layer, chain, limits, entries)
            found.setdefault(ChainShape(layer, chain).threads, []).append((cycles, chain))
    else:
        for own in defaults.shapes(layer, size):
            shape = Shape(layer, own)
            if shape.shared_bytes <= limits.shared_bytes:
                found.setdefault(shape.threads, []).append((defaults.expected_cycles(layer, own, limits, entries), own))
    return {threads: tuple(sorted(each, key=lambda one: one[0])[:RANKS]) for threads, each in found.items()}


def _factors_of(own: OfLayer) -> list[tuple[FewConstants, tuple[str, ...]]]:
    """Constants of each factor, and which of them `tiles` has."""
    if isinstance(own, FewChainConstants):
        return [(own.first, _FIRST_WORDS), (own.last, _WORDS)]
    return [(own, _WORDS)]


def _spelled(factor: tuple[FewConstants, tuple[str, ...]]) -> str:
    constants, names = factor
    return " ".join(str(getattr(constants, name)) for name in names)
