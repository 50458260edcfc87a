"""Rules of constants for small batches: of one factor, of two factors of a layer, and of several layers on one X."""

from ksgen.families.chains import factors_hold, layer_kernels, own_of_factors, refused_factor, rule_of_tiles
from ksgen.families.gemv.chain_shape import GemvChainConstants, is_narrow, most_alike
from ksgen.families.gemv.defaults import MOST_BATCH
from ksgen.families.gemv.group import GemvGroupConstants, GemvGroupTiling
from ksgen.families.gemv.shape import GemvConstants, GemvTiling
from ksgen.families.rules import Rule, at_most, first_broken, multiple, refusal
from ksgen.families.tiles import MOST_THREADS, WARP
from ksgen.spec import KernelSpec
from ksgen.spec.kernel import CHAIN

RULES: tuple[Rule[GemvConstants], ...] = (
    Rule("job is multiply", lambda k, c: k.job == "multiply"),
    Rule(
        "every constant is at least 1",
        lambda k, c: all(value >= 1 for name, value in vars(c).items() if name != "early"),
    ),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    Rule("tile_batch is at most 32", lambda k, c: c.tile_batch <= MOST_BATCH),
    Rule("thread_out is at most 8", lambda k, c: c.thread_out <= 8),
    Rule("steps is at most 8", lambda k, c: c.steps <= 8),
    Rule("lanes_in is a power of two up to 32", lambda k, c: WARP % c.lanes_in == 0),
    multiple("tile_out", "thread_out", lambda k, c: c.thread_out),
    Rule("tile_d is at most d", lambda k, c: c.tile_d <= k.pattern.d),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: GemvTiling(k, c).threads),
)

CHAIN_RULES: tuple[Rule[GemvChainConstants], ...] = (
    Rule("job is chain", lambda k, c: k.job == CHAIN),
    Rule("a chain of two factors is one layer's", lambda k, c: len(k.factors) == 2 and not k.is_group),
    Rule(
        "the second factor's a divides the first one's a, and the first one's d the second one's",
        lambda k, c: is_narrow(k),
    ),
    Rule(
        "every constant is at least 1",
        lambda k, c: all(value >= 1 for name, value in vars(c).items() if name != "early"),
    ),
    Rule("early is 0 or 1", lambda k, c: c.early in (0, 1)),
    at_most("a block has at most 1024 threads", MOST_THREADS, lambda k, c: c.threads),
    Rule(
        "each factor's constants are as its own rules allow",
        lambda k, c: factors_hold(RULES, own_of_factors(k, c)),
        lambda k, c: refused_factor(RULES, own_of_factors(k, c)),
    ),
    Rule(
        "first_thread_out is 1, or divides how many rows read the same X",
        lambda k, c: (
            c.first_thread_out == 1 or most_alike(k) % c.first_thread_out == 0 or most_alike(k) == float("inf")
        ),
        lambda k, c: most_alike(k),
    ),
)


def is_group(kernel: KernelSpec) -> bool:
    """Whether layers of one or two factors multiply one X, and none of them changes the layout."""
    return (
        kernel.job == CHAIN
        and kernel.is_group
        and kernel.out_layout is None
        and all(len(each) <= 2 for each in kernel.chains)
    )


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
        "tiles has as many threads for all layers",
        lambda k, c: len(set(_threads(k, c))) == 1,
        lambda k, c: " and ".join(map(str, dict.fromkeys(_threads(k, c)))),
    ),
)
