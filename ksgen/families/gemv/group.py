"""Several layers on one X for small batches.

Each layer has the constants and sizes of a launch of its own. The fastest combination is chosen before any search.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar

from ksgen.families.base import Limits
from ksgen.families.chains import layer_kernels, listed, numbers_of, spelled, tiles_of
from ksgen.families.expected import SMALL
from ksgen.families.gemv import defaults
from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.tiles import Constants
from ksgen.spec import KernelSpec
from ksgen.values import cached_property

REMEMBERED = 1024  # cached layers, and groups
RANKS = 4  # constants of a layer that a search tries, per tile of the batch and number of threads
# constants of a layer's last factor in `tiles`
_NAMES = ("tile_out", "tile_d", "thread_out", "lanes_in", "warps_in", "steps")
_FIRST_NAMES = ("thread_out", "lanes_in", "steps")  # constants of the first factor of two
OfLayer = GemvConstants | GemvChainConstants
ChainOptions = Callable[[KernelSpec, int, int], Iterable[GemvChainConstants]]


@dataclass(frozen=True)
class GemvGroupConstants(Constants):
    """Constants of several layers that a search may change.

    `tiles` has `_NAMES` of each layer's last factor, and `_FIRST_NAMES` of the factor before it.
    """

    entry_family: ClassVar[str] = "few_group"
    template: ClassVar[str] = "gemv_group"

    tile_batch: int  # rows of the batch per block
    tiles: str  # constants of each factor, as text
    # 1: the launch begins before the previous grid ends, and the kernel waits for that grid; sm_90 and later
    early: int = 0

    @classmethod
    def of(cls, kernel: KernelSpec, layers: Sequence[OfLayer]) -> "GemvGroupConstants":
        """Constants of a group, from those of its layers, which share one tile of the batch."""
        words: list[str] = []
        for each in layers:
            *before, last = each.parsed
            words += [*(spelled(factor, _FIRST_NAMES) for factor in before), spelled(last, _NAMES)]
        return cls(layers[0].tile_batch, tiles_of(kernel, words))

    @property
    def layers(self) -> list[OfLayer]:
        """Constants of each layer in a launch of its own."""
        found: list[OfLayer] = []
        before: list[dict[str, int]] = []
        for words, is_last in listed(self.tiles):
            if not is_last:
                before.append(numbers_of(self.tiles, words, _FIRST_NAMES))
                continue
            last = GemvConstants(self.tile_batch, **numbers_of(self.tiles, words, _NAMES))
            found.append(GemvChainConstants.of(last, **before[-1]) if before else last)
            before = []
        return found

    @property
    def parsed(self) -> list[GemvConstants]:
        """Constants of each factor by itself."""
        return [factor for each in self.layers for factor in each.parsed]


@dataclass(frozen=True)
class GemvGroupTiling:
    """Sizes derived from several layers and their constants: a block computes a tile of one layer."""

    kernel: KernelSpec
    constants: GemvGroupConstants

    @cached_property
    def layers(self) -> list[GemvTiling | GemvChainTiling]:
        """Sizes of each layer in a launch of its own."""
        each = zip(layer_kernels(self.kernel), self.constants.layers, strict=True)
        return [
            GemvChainTiling(layer, own) if isinstance(own, GemvChainConstants) else GemvTiling(layer, own)
            for layer, own in each
        ]

    @property
    def threads(self) -> int:
        return self.layers[0].threads

    def grid(self, batch: int) -> int:
        return sum(each.grid(batch) for each in self.layers)

    @property
    def registers(self) -> int:
        return max(each.registers for each in self.layers)

    @property
    def shared_bytes(self) -> int:
        return max(each.shared_bytes for each in self.layers)

    @property
    def packed_bytes(self) -> int:
        return sum(each.packed_bytes for each in self.layers)


def options(kernel: KernelSpec, limits: Limits) -> Iterator[GemvGroupConstants]:
    """Yield, for each tile of the batch and number of threads, all layers' best constants, their second best, ..."""
    layers = _with_shares(kernel, limits)
    for size in SMALL:
        ranked = [_by_threads(layer, share, size, size) for layer, share in layers]
        for threads in _common(ranked):
            for rank in range(RANKS):
                each = [of_layer[threads] for of_layer in ranked]
                yield GemvGroupConstants.of(kernel, [found[min(rank, len(found) - 1)][1] for found in each])


@lru_cache(REMEMBERED)
def has_any(kernel: KernelSpec, limits: Limits) -> bool:
    """Whether all layers have constants with the same number of threads. The first such number ends the search."""
    *others, last = sorted(_with_shares(kernel, limits), key=lambda each: len(each[0].factors))
    common = [{tiling.threads for tiling, _ in _tilings(*each, 1)} for each in others]
    tilings = _tilings(*last, 1, defaults.each_chain_option)
    return any(all(tiling.threads in threads for threads in common) for tiling, _ in tilings)


@lru_cache(REMEMBERED)
def best(kernel: KernelSpec, limits: Limits, rows: int) -> GemvGroupConstants | None:
    """Fastest constants for blocks of at most `rows` rows of the batch; None if the layers have no number of threads in
    common.

    The slowest layer on its share of the GPU decides.
    """
    found: tuple[tuple[float, int], GemvGroupConstants] | None = None
    layers = _with_shares(kernel, limits)
    for size in (each for each in reversed(SMALL) if each <= rows):
        ranked = [_by_threads(layer, share, size, rows) for layer, share in layers]
        for threads in _common(ranked):
            each = [of_layer[threads][0] for of_layer in ranked]
            key = max(cycles for cycles, _ in each), threads
            if found is None or key < found[0]:
                found = key, GemvGroupConstants.of(kernel, [constants for _, constants in each])
    return found and found[1]


def _with_shares(kernel: KernelSpec, limits: Limits) -> list[tuple[KernelSpec, Limits]]:
    """Each layer with its share of the multiprocessors, in proportion to its weights."""
    layers = layer_kernels(kernel)
    shares = [layer.weight_bytes * limits.multiprocessors // kernel.weight_bytes for layer in layers]
    return [
        (layer, replace(limits, multiprocessors=max(1, share))) for layer, share in zip(layers, shares, strict=True)
    ]


def _common(ranked: Sequence[dict[int, tuple[tuple[float, OfLayer], ...]]]) -> list[int]:
    """Numbers of threads per block that all layers allow."""
    return sorted(set.intersection(*(set(each) for each in ranked)))


@lru_cache(REMEMBERED)
def _by_threads(
    layer: KernelSpec, limits: Limits, size: int, rows: int
) -> dict[int, tuple[tuple[float, OfLayer], ...]]:
    """Best constants of a layer with their estimated cycles for a batch of `rows` rows, by threads per block."""
    cycles_of: Any = defaults.chain_cycles if len(layer.factors) > 1 else defaults.expected_cycles
    found: dict[int, list[tuple[float, OfLayer]]] = {}
    for tiling, own in _tilings(layer, limits, size):
        found.setdefault(tiling.threads, []).append((cycles_of(layer, own, limits, rows), own))
    return {threads: tuple(sorted(each, key=lambda one: one[0])[:RANKS]) for threads, each in found.items()}


def _tilings(
    layer: KernelSpec, limits: Limits, size: int, chains: ChainOptions = defaults.chain_options
) -> Iterator[tuple[GemvTiling | GemvChainTiling, OfLayer]]:
    """Yield the tilings of a layer that fit the GPU, with their constants."""
    if len(layer.factors) > 1:
        yield from ((GemvChainTiling(layer, own), own) for own in chains(layer, limits.shared_bytes, size))
    else:
        tilings = ((GemvTiling(layer, own), own) for own in defaults.factor_options(layer, size))
        yield from (each for each in tilings if each[0].shared_bytes <= limits.shared_bytes)
