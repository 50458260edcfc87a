"""Two factors of a layer for small batches on a GPU, in one launch without a barrier between blocks. Each block
computes the elements of the intermediate that it needs, which other blocks may compute again.

Decides the tiles of `few_chain.cu.j2`; its design is docs/kernels/few.md. Never renders, compiles or runs. Weights are
packed as for each factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import factor_kernels, factors_hold, own_of_factors, refused_factor
from ksgen.families.few import family
from ksgen.families.few.chain_counts import work_of
from ksgen.families.few.chain_defaults import best, is_possible, options
from ksgen.families.few.chain_shape import FewChainConstants, FewChainTiling, is_narrow, most_alike
from ksgen.families.few.defaults import entries_for
from ksgen.families.few.shape import FewTiling
from ksgen.families.gpus import begins_early
from ksgen.families.rules import Rule
from ksgen.families.shaped import PackedElsewhere
from ksgen.families.tiles import MOST_THREADS, epilogue_constexprs
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

_OF_BOTH = (  # constants of `few` that the source has for either factor, unchanged
    "THREAD_OUT", "LANES_IN", "STEPS", "VECTOR", "PIECES", "SHARERS", "TILE_IN", "STAGES", "SUMS", "SHUFFLES", "HALVINGS", "HELD", "SAME",
    "SCALES",
)  # fmt: skip
INPUT = "Input"  # name of the type of a factor's inputs, if the two factors read different types
_OF_LAST = ("A", "B", "C", "D", "TILE_OUT", "TILE_D", "WARPS_IN", "GROUPS", "TILES_OUT", "TILES_D", "PART", "X_PLANE", "X_ENTRY")


RULES: tuple[Rule[FewChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.job == CHAIN),
    Rule("a chain of two factors is one layer's", lambda k, c: len(k.factors) == 2 and not k.is_group),
    Rule("the second factor's a divides the first one's a, and the first one's d the second one's", lambda k, c: is_narrow(k)),
    Rule("every constant is at least 1", lambda k, c: all(value >= 1 for name, value in vars(c).items() if name != "early")),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    Rule("a block has at most 1024 threads", lambda k, c: c.threads <= MOST_THREADS, lambda k, c: c.threads),
    Rule(
        "each factor's constants are as its own rules allow",
        lambda k, c: factors_hold(family.RULES, own_of_factors(k, c)),
        lambda k, c: refused_factor(family.RULES, own_of_factors(k, c)),
    ),
    Rule(
        "first_thread_out is 1, or divides how many rows read the same X",
        lambda k, c: c.first_thread_out == 1 or most_alike(k) % c.first_thread_out == 0 or most_alike(k) == float("inf"),
        lambda k, c: most_alike(k),
    ),
)


def words_of_factors(kernel: KernelSpec) -> dict[str, Any]:
    """Variables of a template with several factors in one source: the types of weights, of X, and of each factor's
    input. A factor's input is X or the intermediate."""
    return {
        **family.words_of_storage(kernel),
        "of_scales": ("scales",) * kernel.is_quantized,
        "x_given": "given" if kernel.has_bytes_in else "stored",
        "x_stored": INPUT if kernel.has_bytes_in else "stored",
        "of_inputs_apart": (INPUT,) * kernel.has_bytes_in,
    }


class FewChain(PackedElsewhere[FewChainConstants]):
    """Two factors for batches of 1 to 32 rows; correct for any batch."""

    name = "few_chain"
    constants_type = FewChainConstants
    listed = RULES
    for_few = True
    packed_by = "few"
    why = "two factors for small batches, in one launch: each block computes its part of the intermediate; from sm_80 on"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if kernel.job != CHAIN or kernel.is_group or len(kernel.factors) != 2 or not is_narrow(kernel):
            return False
        if kernel.arithmetic.is_complex or not limits.async_copies or limits.is_cpu:
            return False
        return is_possible(kernel, limits)

    def shape(self, kernel: KernelSpec, constants: FewChainConstants) -> FewChainTiling:
        return FewChainTiling(kernel, constants)

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> FewChainConstants:
        found = best(kernel, limits, entries_for(batch or kernel.batch))
        assert found is not None, "asked for where it does not serve"
        return replace(found, early=int(begins_early(limits.target)))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[FewChainConstants]:
        for tile_batch in (1, 2, 4, 8, 16, 32):
            for found in options(kernel, limits, tile_batch):
                constants = replace(found, early=int(begins_early(limits.target)))
                if self.keeps_rules(kernel, constants):
                    yield constants

    # ---- costs

    def geometry(self, kernel: KernelSpec, constants: FewChainConstants, batch: int) -> Geometry:
        shape = FewChainTiling(kernel, constants)
        return Geometry(shape.last.grid(batch), shape.threads, shape.shared_bytes, starts_early=bool(constants.early))

    def work(self, kernel: KernelSpec, constants: FewChainConstants, batch: int) -> Work:
        packed = FewChainTiling(kernel, constants).packed_bytes
        return work_of(kernel, constants, batch, kernel.bytes(batch) - kernel.weight_bytes + packed)

    # ---- the source

    def words(self, kernel: KernelSpec, constants: FewChainConstants) -> Mapping[str, Any]:
        own = {"picture": family.picture(factor_kernels(kernel)[1], constants.last), **family.words_of_start(constants.early)}
        return {**own, **words_of_factors(kernel), "factors": self.factors(kernel, constants)}

    def factors(self, kernel: KernelSpec, constants: FewChainConstants) -> list[dict[str, Any]]:
        """Template variables of each factor."""
        shape, alone = FewChainTiling(kernel, constants), factor_kernels(kernel)
        listed = [(alone[0], self._first(shape), ()), (alone[1], self._last(shape), ("bsf",))]  # tiles of several j, in both layouts
        return [{"kernel": own, "constexprs": constexprs, "variants": variants} for own, constexprs, variants in listed]

    def _known(self, kernel: KernelSpec, shape: FewTiling) -> dict[str, Constexpr]:
        return {each.name: each for each in family.constexprs_of(kernel, shape)}

    def _first(self, shape: FewChainTiling) -> list[Constexpr]:
        own, last = shape.first, shape.last
        known = self._known(own.kernel, own)
        return [
            Constexpr("B", own.kernel.pattern.b, "outputs that a block needs per j: factor 2's inputs l, index k"),
            Constexpr("C", own.own.c, "inputs of one block on the diagonal, index l"),
            Constexpr("D", own.kernel.pattern.d, "factor 2's interleaved matrices, index j"),
            Constexpr("OWN_B", own.own.b, "outputs of one block on this factor's diagonal"),
            Constexpr("OWN_D", own.own.d, "this factor's own interleaved matrices"),
            Constexpr("RATIO", own.ratio, "j of factor 2 per j of this factor"),
            *(known[name] for name in _OF_BOTH),
            Constexpr("TILE_D", shape.constants.tile_d, "neighbouring j per thread block"),
            Constexpr("PASSES", shape.passes, "passes of the block's threads until all its rows are multiplied"),
            Constexpr("PLANES_I", own.planes_i, "blocks on the diagonal whose inputs a thread block needs"),
            Constexpr("PLANES_D", own.planes_d, "j of these blocks whose inputs a thread block needs"),
            Constexpr("X_WIDTH", own.x_width, "inputs per (i, j) in shared memory, trailing zeros included"),
            Constexpr("X_VECTOR", own.x_vector, "neighbouring l of X that a thread copies at a time"),
            Constexpr("X_COPIES", own.x_copies, "copies of X per block, by all its threads"),
            Constexpr("AT_ONCE", own.at_once, "copies that a thread has in flight at a time"),
            known["X_PLANE"],
            known["X_ENTRY"],
            Constexpr("NEXT_INPUTS", last.x_width, "inputs of factor 2 in shared memory, trailing zeros included"),
            Constexpr("NEXT_PLANE", last.x_plane, "elements of the intermediate from one j to the next"),
            Constexpr("NEXT_ENTRY", last.x_entry, "elements of the intermediate from one row of the batch to the next"),
        ]

    def _last(self, shape: FewChainTiling) -> list[Constexpr]:
        known = self._known(shape.last.kernel, shape.last)
        between = Constexpr("BETWEEN", shape.between, "byte offset of the intermediate in shared memory")
        return [*(known[name] for name in (*_OF_LAST, *_OF_BOTH)), between]

    def constexprs(self, kernel: KernelSpec, constants: FewChainConstants) -> list[Constexpr]:
        return [
            Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long"),
            *epilogue_constexprs(kernel),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per thread block"),
            Constexpr("THREADS", FewChainTiling(kernel, constants).threads, "threads per block"),
        ]
