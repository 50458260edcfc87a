"""Several layers on one X for small batches on a GPU, in one launch whose blocks are divided among the layers.

Decides the tiles of `few_group.cu.j2`; its design is docs/kernels/few.md. Never renders, compiles or runs. A block
computes as in `few` for a layer of one factor, and as in `few_chain` for a layer of two. Weights are packed as for each
factor alone.
"""

from collections.abc import Iterator, Mapping
from dataclasses import astuple, replace
from itertools import accumulate
from typing import Any

from ksgen.families.base import Constexpr, Geometry, Limits, Work
from ksgen.families.chains import factor_kernels, layer_kernels, rule_of_tiles
from ksgen.families.few import chain, family
from ksgen.families.few.chain import FewChain, words_of_factors
from ksgen.families.few.chain_shape import FewChainConstants, is_narrow
from ksgen.families.few.defaults import entries_for
from ksgen.families.few.family import Few
from ksgen.families.few.group_constants import FewGroupConstants, OfLayer, best, options
from ksgen.families.few.shape import FewTiling
from ksgen.families.gpu_chain import layers_of
from ksgen.families.gpus import LEAST, begins_early
from ksgen.families.rules import Rule, first_broken, refusal
from ksgen.families.shaped import PackedElsewhere
from ksgen.families.signature import each_chains, weights_of
from ksgen.families.tiles import epilogue_constexprs
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

FEW, CHAINED = Few(), FewChain()


def alone(own: OfLayer) -> Few | FewChain:
    """The family that serves a layer in a launch of its own."""
    return CHAINED if isinstance(own, FewChainConstants) else FEW


def own_of(kernel: KernelSpec, constants: FewGroupConstants) -> list[tuple[KernelSpec, Any]]:
    """Kernels of the layers, each with its constants."""
    return list(zip(layer_kernels(kernel), constants.layers, strict=True))


def _refused_layer(kernel: KernelSpec, constants: FewGroupConstants) -> str:
    """Refusal by the rules of two factors, for the first layer that breaks one; empty if none does."""
    for number, own in enumerate(own_of(kernel, constants), 1):
        if len(own[0].factors) > 1 and (broken := first_broken(chain.RULES, *own)):
            return f"of layer {number}, {refusal(chain.RULES, broken, *own)}"
    return ""


def _threads(kernel: KernelSpec, constants: FewGroupConstants) -> list[int]:
    return [alone(own).shape(layer, own).threads for layer, own in own_of(kernel, constants)]


def is_group(kernel: KernelSpec) -> bool:
    """Whether layers of one or two factors multiply one X, and none of them changes the layout."""
    return kernel.job == CHAIN and kernel.is_group and kernel.out_layout is None and all(len(each) <= 2 for each in kernel.chains)


RULES: tuple[Rule[FewGroupConstants], ...] = (
    Rule("layers on one X have one factor or two, and one layout", lambda k, c: is_group(k)),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    rule_of_tiles(family.RULES),
    Rule("tiles holds what the rules of two factors allow", lambda k, c: not _refused_layer(k, c), _refused_layer),
    Rule(
        "tiles has as many threads for all layers",
        lambda k, c: len(set(_threads(k, c))) == 1,
        lambda k, c: " and ".join(map(str, dict.fromkeys(_threads(k, c)))),
    ),
)


class FewGroup(PackedElsewhere[FewGroupConstants]):
    """Layers on one X for batches of 1 to 32 rows; correct for any batch."""

    name = "few_group"
    constants_type = FewGroupConstants
    listed = RULES
    for_few = True
    packed_by = FEW.name
    why = "several layers on one X for small batches, in one launch whose blocks are divided among them; from sm_80 on"

    def serves(self, kernel: KernelSpec, limits: Limits) -> bool:
        if not is_group(kernel) or not all(is_narrow(layer) for layer in layer_kernels(kernel) if len(layer.factors) > 1):
            return False
        if kernel.arithmetic.is_complex or not limits.async_copies or limits.is_cpu:
            return False
        return best(kernel, limits, 1) is not None

    # ---- constants

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> FewGroupConstants:
        found = best(kernel, limits, entries_for(batch or kernel.batch))
        assert found is not None, "asked for where it does not serve"
        return replace(found, early=int(begins_early(limits.target)))

    def space(self, kernel: KernelSpec, limits: Limits) -> Iterator[FewGroupConstants]:
        for found in dict.fromkeys(options(kernel, limits)):
            constants = replace(found, early=int(begins_early(limits.target)))
            if self.keeps_rules(kernel, constants):
                yield constants

    # ---- costs

    def registers(self, kernel: KernelSpec, constants: FewGroupConstants, target: str = LEAST) -> int:
        return max(alone(own).registers(layer, own, target) for layer, own in own_of(kernel, constants))

    def shared_bytes(self, kernel: KernelSpec, constants: FewGroupConstants) -> int:
        return max(alone(own).shared_bytes(layer, own) for layer, own in own_of(kernel, constants))

    def geometry(self, kernel: KernelSpec, constants: FewGroupConstants, batch: int) -> Geometry:
        blocks, threads = sum(self._blocks(kernel, constants, batch)), _threads(kernel, constants)[0]
        return Geometry(blocks, threads, self.shared_bytes(kernel, constants), starts_early=bool(constants.early))

    def _blocks(self, kernel: KernelSpec, constants: FewGroupConstants, batch: int) -> list[int]:
        """Blocks of each layer."""
        return [alone(own).geometry(layer, own, batch).grid for layer, own in own_of(kernel, constants)]

    def work(self, kernel: KernelSpec, constants: FewGroupConstants, batch: int) -> Work:
        """Work of all layers, with X read from memory once."""
        each = [alone(own).work(layer, own, batch) for layer, own in own_of(kernel, constants)]
        again = (len(each) - 1) * kernel.x_item_bytes * batch * kernel.in_features
        found = Work(*map(sum, zip(*map(astuple, each), strict=True)))
        return replace(found, memory_bytes=found.memory_bytes - again)

    # ---- the source

    def words(self, kernel: KernelSpec, constants: FewGroupConstants) -> Mapping[str, Any]:
        own = own_of(kernel, constants)
        kinds = list(dict.fromkeys(own))  # equal layers share one source
        numbers = [kinds.index(each) + 1 for each in own]
        names = weights_of(kernel)
        most = max(len(layer.factors) for layer, _ in own)
        return {
            **words_of_factors(kernel),
            "picture": "//\n".join(_picture(number, *kind) for number, kind in enumerate(kinds, 1)),
            **family.words_of_start(constants.early),
            "extra_arguments": ", bias, residual",  # named like the arguments of a single layer
            "extra_pitches": ", residual_pitch",
            "of_pairs": ("pair",) * (most - 1),
            "own_weights": names[:most],  # of one layer
            "weights_of_all": names,
            "results": each_chains(kernel, "y"),
            "layers": _layer_variables(kernel, numbers, most),
            "kinds": [self._kind(kernel, constants, number, numbers, *kind) for number, kind in enumerate(kinds, 1)],
        }

    def _kind(
        self, kernel: KernelSpec, constants: FewGroupConstants, number: int, numbers: list[int], layer: KernelSpec, own: OfLayer
    ) -> dict[str, Any]:
        """Template variables of equal layers: their source, and the arguments of its call."""
        of = [str(at) for at, each in enumerate(numbers, 1) if each == number]
        found = {"number": number, "layers": f"{layer.factors}, of {'layers' if len(of) > 1 else 'layer'} {', '.join(of)}"}
        if isinstance(own, FewChainConstants):
            weights = "layer.weights_1, layer.weights_2"
            return found | {"alone": (), "pair": [CHAINED.factors(layer, own)], "within": "factor_2::", "weights": weights}
        known = {each.name for each in self.constexprs(kernel, constants)}
        constexprs = [each for each in family.constexprs_of(layer, FewTiling(layer, own)) if each.name not in known]
        factor = {"kernel": layer, "constexprs": constexprs, "variants": ("bsf",)}  # tiles of several j, in both layouts
        return found | {"alone": [factor], "pair": (), "within": "", "weights": "layer.weights_1"}

    def constexprs(self, kernel: KernelSpec, constants: FewGroupConstants) -> list[Constexpr]:
        tiles = accumulate(self._blocks(kernel, constants, 1))
        return [
            Constexpr("BATCH", kernel.batch or 0, "rows of the batch, index s; 0: known at the call", "long long"),
            *epilogue_constexprs(kernel),
            Constexpr("TILE_BATCH", constants.tile_batch, "rows of the batch per thread block"),
            Constexpr("THREADS", _threads(kernel, constants)[0], "threads per block"),
            *(Constexpr(f"BEFORE_{number}", found, f"tiles of the layers before layer {number}") for number, found in enumerate(tiles, 2)),
        ]


def _picture(number: int, layer: KernelSpec, own: OfLayer) -> str:
    last = factor_kernels(layer)[-1] if len(layer.factors) > 1 else layer
    drawn = family.picture(last, own.last if isinstance(own, FewChainConstants) else own)
    return f"// Kind {number}, {layer.factors}:\n{drawn}"


def _layer_variables(kernel: KernelSpec, kinds: list[int], most: int) -> list[dict[str, Any]]:
    """Template variables of each layer: its kind, its first block, and its arrays."""
    names = iter(weights_of(kernel))
    found = []
    for at, (layer, chain_, kind) in enumerate(zip(layers_of(kernel), kernel.chains, kinds, strict=True), 1):
        weights = [*(next(names) for _ in chain_), *["0"] * (most - len(chain_))]
        first = f"BEFORE_{at} * tiles" if at > 1 else "0"
        found.append({**layer, "kind": kind, "first_block": first, "weights": ", ".join(weights)})
    return found
