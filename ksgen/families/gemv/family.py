"""Products for small batches on a GPU: one launch for a factor, for two factors of a layer, or for layers on one X.

Weights are read once, straight to registers, and lanes share their rows. Of two factors, each block computes the
elements of the intermediate that it needs. Other blocks may compute them again, so there is no barrier between blocks.
Several layers share the blocks. Weights are packed as for each factor alone. Decides the tiles of `gemv.cu.j2`,
`gemv_chain.cu.j2` and `gemv_group.cu.j2`; its design is docs/kernels/gemv.md. Never renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from typing import Any, ClassVar

from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import by_kind, layer_kernels
from ksgen.families.family import Packing, not_served
from ksgen.families.gemv import counts, defaults, group
from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling, is_narrow
from ksgen.families.gemv.group import GemvGroupConstants, GemvGroupTiling
from ksgen.families.gemv.rules import CHAIN_RULES, GROUP_RULES, RULES, is_group
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.gemv.source import constexprs_of, words_of
from ksgen.families.gpus import begins_early
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

AnyGemvConstants = GemvConstants | GemvChainConstants | GemvGroupConstants


class Gemv(Packing[AnyGemvConstants]):
    """Products at the bandwidth of memory for batches of 1 to 32 rows; correct for any batch."""

    name = "gemv"
    tilings: ClassVar[dict[Any, Any]] = {
        GemvConstants: GemvTiling, GemvChainConstants: GemvChainTiling, GemvGroupConstants: GemvGroupTiling
    }  # fmt: skip
    kinds = tuple(tilings)
    listed = by_kind({GemvConstants: RULES, GemvChainConstants: CHAIN_RULES, GemvGroupConstants: GROUP_RULES})
    for_small_batches = True
    why = (
        "small batches, as in decoding: each weight is read once, to registers, for plain multiply-adds; one factor, "
        "two of a layer, or several layers on one X in one launch; from sm_80 on"
    )

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.job == "gradient" or kernel.arithmetic.is_complex or not limits.async_copies or limits.is_cpu:
            return False
        if kernel.job != CHAIN:
            return True
        if not all(is_narrow(each) for each in layer_kernels(kernel) if len(each.factors) == 2):
            return False
        if kernel.is_group:
            return is_group(kernel) and group.best(kernel, limits, 1) is not None
        return len(kernel.factors) == 2 and defaults.has_chain(kernel, limits)

    def packed_for(self, kernel: KernelSpec, constants: AnyGemvConstants) -> object:
        # rows are padded to whole pieces for every tile: one copy of a factor's weights serves every batch
        return constants if kernel.job == CHAIN else None

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AnyGemvConstants:
        if not self.serves(kernel, limits):
            raise not_served(self, kernel)
        best: Any = group.best if kernel.is_group else defaults.best_chain if kernel.job == CHAIN else defaults.best
        found: AnyGemvConstants = best(kernel, limits, defaults.entries_for(batch or kernel.batch))
        return replace(found, early=int(begins_early(limits.target)))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyGemvConstants]:
        for found in self._options(kernel, limits):
            constants = replace(found, early=int(begins_early(limits.target)))
            if self.keeps_rules(kernel, constants) and (kernel.job == CHAIN or self.fits(kernel, constants, limits)):
                yield constants

    def _options(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyGemvConstants]:
        if kernel.is_group:
            yield from dict.fromkeys(group.options(kernel, limits))
            return
        for tile_batch in group.SIZES[::-1]:
            if kernel.job == CHAIN:
                yield from defaults.chain_options(kernel, limits, tile_batch)
            else:
                yield from defaults.shapes(kernel, tile_batch)

    # ---- costs

    def geometry(self, kernel: KernelSpec, constants: AnyGemvConstants, batch: int) -> Geometry:
        return replace(super().geometry(kernel, constants, batch), starts_early=bool(constants.early))

    def work(self, kernel: KernelSpec, constants: AnyGemvConstants, batch: int) -> Work:
        if isinstance(constants, GemvGroupConstants):  # X is read from memory once
            each = [
                self.work(layer, own, batch) for layer, own in zip(layer_kernels(kernel), constants.layers, strict=True)
            ]
            again = (len(each) - 1) * kernel.x_item_bytes * batch * kernel.in_features
            found = Work(*map(sum, zip(*map(astuple, each), strict=True)))
            return replace(found, memory_bytes=found.memory_bytes - again)
        memory_bytes = self.memory_bytes(kernel, constants, batch)
        if isinstance(constants, GemvChainConstants):
            return counts.chain_work(kernel, constants, batch, memory_bytes)
        return counts.work_of(kernel, constants, batch, memory_bytes)

    # ---- the source

    def words(self, kernel: KernelSpec, constants: AnyGemvConstants) -> Mapping[str, Any]:
        return words_of(self.shape(kernel, constants))

    def constexprs(self, kernel: KernelSpec, constants: AnyGemvConstants) -> list[Constexpr]:
        return constexprs_of(self.shape(kernel, constants))
