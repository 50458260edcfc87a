"""Products for small batches on a GPU: one launch for a factor, for two factors of a layer, or for layers on one X.

Weights are read once, straight to registers, and several lanes share a row of weights. With two factors, each block
computes the elements of the intermediate that it needs. Other blocks may compute the same elements, so there is no
barrier between blocks. With several layers, each layer has its own blocks. Weights are packed as for each factor alone.
Decides the tiles of `gemv.cu.j2`, `gemv_chain.cu.j2` and `gemv_group.cu.j2`; its design is docs/kernels/gemv.md. Never
renders, compiles or runs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import factors_hold, layer_kernels, own_of_factors, refused_factor, rule_of_tiles
from ksgen.families.expected import SMALL
from ksgen.families.family import PackingFamily, unsupported
from ksgen.families.gemv import counts, defaults, group
from ksgen.families.gemv.chain_shape import GemvChainConstants, GemvChainTiling, is_narrow, most_alike
from ksgen.families.gemv.group import GemvGroupConstants, GemvGroupTiling
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.gemv.source import constexprs_of, variables_of
from ksgen.families.gpus import begins_early
from ksgen.families.rules import Rule, at_most, first_broken, multiple, positive, refusal
from ksgen.families.tiles import MOST_THREADS, WARP
from ksgen.spec import KernelSpec

RULES: tuple[Rule[GemvConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    positive("every constant is at least 1", "early"),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    Rule("tile_batch is at most 32", lambda k, c: c.tile_batch <= SMALL[-1]),
    Rule("thread_out is at most 8", lambda k, c: c.thread_out <= 8),
    Rule("steps is at most 8", lambda k, c: c.steps <= 8),
    Rule("lanes_in is a power of two up to 32", lambda k, c: WARP % c.lanes_in == 0),
    multiple("tile_out", "thread_out", lambda k, c: c.thread_out),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: GemvTiling(k, c).threads),
)

CHAIN_RULES: tuple[Rule[GemvChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.is_chain),
    Rule("a chain of two factors is one layer's", lambda k, c: len(k.factors) == 2 and not k.is_group),
    Rule(
        "the second factor's a divides the first one's a, and the first one's d the second one's; or outputs are "
        "exchanged between them, and digits divide each other",
        lambda k, c: is_narrow(k),
    ),
    positive("every constant is at least 1", "early"),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: c.threads),
    Rule(
        "each factor's constants are as its own rules allow",
        lambda k, c: factors_hold(RULES, own_of_factors(k, c)),
        lambda k, c: refused_factor(RULES, own_of_factors(k, c)),
    ),
    Rule(
        "first_thread_out is 1 or a divisor of the number of rows that read the same X",
        lambda k, c: (
            c.first_thread_out == 1 or most_alike(k) % c.first_thread_out == 0 or most_alike(k) == float("inf")
        ),
        lambda k, c: most_alike(k),
    ),
)


def is_group(kernel: KernelSpec) -> bool:
    """Whether layers of one or two factors multiply one X, and none of them changes the layout."""
    has_one_layout = kernel.is_chain and kernel.is_group and kernel.out_layout is None
    return has_one_layout and all(len(each) <= 2 for each in kernel.chains)


def _refused_layer(kernel: KernelSpec, constants: GemvGroupConstants) -> str:
    """Refusal by the rules of two factors, for the first layer that breaks one; empty if none does."""
    for number, (layer, own) in enumerate(zip(layer_kernels(kernel), constants.layers, strict=True), 1):
        if isinstance(own, GemvChainConstants) and (broken := first_broken(CHAIN_RULES, layer, own)):
            return f"of layer {number}, {refusal(CHAIN_RULES, broken, layer, own)}"
    return ""


def _threads(kernel: KernelSpec, constants: GemvGroupConstants) -> list[int]:
    return [each.threads for each in GemvGroupTiling(kernel, constants).layers]


GROUP_RULES: tuple[Rule[GemvGroupConstants], ...] = (
    Rule("layers on one X have one factor or two, and one layout", lambda k, c: is_group(k)),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    rule_of_tiles(RULES),
    Rule("tiles holds what the rules of two factors allow", lambda k, c: not _refused_layer(k, c), _refused_layer),
    Rule(
        "tiles has the same number of threads for all layers",
        lambda k, c: len(set(_threads(k, c))) == 1,
        lambda k, c: " and ".join(map(str, dict.fromkeys(_threads(k, c)))),
    ),
)


AnyGemvConstants = GemvConstants | GemvChainConstants | GemvGroupConstants


class Gemv(PackingFamily[AnyGemvConstants]):
    """Products at the bandwidth of memory for batches of 1 to 32 rows; correct for any batch."""

    name = "gemv"
    tilings: ClassVar[dict[Any, Any]] = {
        GemvConstants: GemvTiling, GemvChainConstants: GemvChainTiling, GemvGroupConstants: GemvGroupTiling
    }  # fmt: skip
    rules: Mapping[Any, Any] = {GemvConstants: RULES, GemvChainConstants: CHAIN_RULES, GemvGroupConstants: GROUP_RULES}
    for_small_batches = True
    why = (
        "small batches, as in decoding: each weight is read once, to registers, for plain multiply-adds; one factor, "
        "two of a layer, or several layers on one X in one launch; from sm_80 on"
    )

    def supports(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.job == "gradient" or kernel.arithmetic.is_complex or not limits.async_copies or limits.is_cpu:
            return False
        if not kernel.is_chain:
            return True
        if not all(is_narrow(each) for each in layer_kernels(kernel) if len(each.factors) == 2):
            return False
        if kernel.is_group:
            return is_group(kernel) and group.has_any(kernel, limits)
        return len(kernel.factors) == 2 and defaults.has_chain(kernel, limits)

    def packed_for(self, kernel: KernelSpec, constants: AnyGemvConstants) -> object:
        # rows are padded to whole pieces, whatever the tile: kernels for all batches share a copy of a factor's weights
        return constants if kernel.is_chain else None

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> AnyGemvConstants:
        if not self.supports(kernel, limits):
            raise unsupported(self, kernel)
        best: Any = group.best if kernel.is_group else defaults.best_chain if kernel.is_chain else defaults.best
        found: AnyGemvConstants = best(kernel, limits, defaults.rows_for(batch or kernel.batch))
        return found.changed(early=int(begins_early(limits.target)))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyGemvConstants]:
        for found in self._options(kernel, limits):
            constants = found.changed(early=int(begins_early(limits.target)))
            if self.keeps_rules(kernel, constants) and (kernel.is_chain or self.fits(kernel, constants, limits)):
                yield constants

    def _options(self, kernel: KernelSpec, limits: Limits) -> Iterator[AnyGemvConstants]:
        if kernel.is_group:
            yield from dict.fromkeys(group.options(kernel, limits))
            return
        for tile_batch in SMALL:
            if kernel.is_chain:
                yield from defaults.chain_options(kernel, limits.shared_bytes, tile_batch)
            else:
                yield from defaults.factor_options(kernel, tile_batch)

    # ---- costs

    def geometry(self, kernel: KernelSpec, constants: AnyGemvConstants, batch: int) -> Geometry:
        return super().geometry(kernel, constants, batch)._replace(starts_early=bool(constants.early))

    def work(self, kernel: KernelSpec, constants: AnyGemvConstants, batch: int) -> Work:
        if isinstance(constants, GemvGroupConstants):  # X is read from memory once
            layers = zip(layer_kernels(kernel), constants.layers, strict=True)
            works = [self.work(layer, layer_constants, batch) for layer, layer_constants in layers]
            x_bytes = kernel.x_item_bytes * batch * kernel.in_features
            total = Work(*map(sum, zip(*works, strict=True)))
            return total._replace(memory_bytes=total.memory_bytes - (len(works) - 1) * x_bytes)
        memory_bytes = self.memory_bytes(kernel, constants, batch)
        if isinstance(constants, GemvChainConstants):
            return counts.chain_work(kernel, constants, batch, memory_bytes)
        return counts.work_of(kernel, constants, batch, memory_bytes)

    # ---- the source

    def variables(self, kernel: KernelSpec, constants: AnyGemvConstants) -> dict[str, Any]:
        return variables_of(self.shape(kernel, constants))

    def constexprs(self, kernel: KernelSpec, constants: AnyGemvConstants) -> list[Constexpr]:
        return constexprs_of(self.shape(kernel, constants))
