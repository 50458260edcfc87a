"""Template variables and constants of sources for small batches: of one factor, of two factors of a layer, and of
several layers on one X."""

from itertools import accumulate
from typing import Any

from ksgen.families.base import Constexpr, named
from ksgen.families.chains import factor_kernels
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.gemv.chain_shape import GemvChainTiling
from ksgen.families.gemv.group import GemvGroupTiling
from ksgen.families.gemv.shape import GemvTiling
from ksgen.families.gpu_chain import layers_of
from ksgen.families.signature import weights_of
from ksgen.families.tiles import batch_constexpr, epilogue_constexprs, packing_constexprs, product_constexprs
from ksgen.spec import KernelSpec
from ksgen.values import counted

AnyGemvTiling = GemvTiling | GemvChainTiling | GemvGroupTiling

_OF_BOTH = (  # constants of a single factor's source that a chain's source repeats for each factor
    "THREAD_OUT", "LANES_IN", "STEPS", "VECTOR", "PIECES", "ROW_STEP", "SHARERS", "TILE_IN", "STAGES", "SUMS",
    "SHUFFLES", "HALVINGS", "HELD", "SAME", "SCALES",
)  # fmt: skip
_OF_LAST = (  # the same for the last factor only
    "A", "B", "C", "D", "TILE_OUT", "TILE_D", "WARPS_IN", "GROUPS", "TILES_OUT", "TILES_D", "PART", "X_PLANE",
    "X_ROW",
)  # fmt: skip


def variables_of(tiling: AnyGemvTiling) -> dict[str, Any]:
    """Template variables: types of X and of packed and read weights, variables of an early start, and those of each
    factor.

    A kernel that starts early waits, and reads nothing through restricted pointers, because nvcc would move those reads
    before the wait.
    """
    kernel = tiling.kernel
    found: dict[str, Any] = {
        "weight": "given" if kernel.is_quantized else "stored",  # type of a packed weight
        "piece": "Values" if kernel.is_quantized else "Piece",  # type of one load of weights
        "of_pieces": "X" if kernel.is_quantized else "W, or of X",
        "of_storage": "quantized" if kernel.is_quantized else "same",
        "unwritten": "" if tiling.constants.early else "RESTRICT ",  # qualifier of arrays that no other launch writes
    }
    if isinstance(tiling, GemvTiling):
        return {**found, "picture": picture(tiling), "variants": ("bsf",)}  # tiles of several j, in both layouts
    found |= {
        "x_given": "given" if kernel.has_bytes_in else "stored",
        "x_stored": "Input" if kernel.has_bytes_in else "stored",  # type of a factor's input: X or the intermediate
    }
    if isinstance(tiling, GemvChainTiling):
        return {**found, "picture": picture(tiling.last), "factors": _factors(tiling)}
    return found | _variables_of_layers(tiling)


def constexprs_of(tiling: AnyGemvTiling) -> list[Constexpr]:
    """Constants of a factor alone, or of all factors."""
    if isinstance(tiling, GemvTiling):
        return constexprs_of_factor(tiling)
    found = [
        batch_constexpr(tiling.kernel),
        *epilogue_constexprs(tiling.kernel),
        named(tiling.constants, "TILE_BATCH", "rows of the batch per thread block"),
        named(tiling, "THREADS", "threads per block"),
    ]
    if isinstance(tiling, GemvChainTiling):
        return found
    tiles = enumerate(accumulate(each.grid(1) for each in tiling.layers), 2)
    return found + [
        Constexpr(f"BEFORE_{number}", each, f"tiles of the layers before layer {number}") for number, each in tiles
    ]


def picture(tiling: GemvTiling) -> str:
    """Drawing of a tile's rows of weights, and of the warps that share them."""
    constants = tiling.constants
    tiles = f"{tiling.tiles_out} along k, {tiling.tiles_d} along j, {tiling.kernel.pattern.a} along i"
    return draw(
        f"The weights of a tile of Y, in {counted(tiling.stages, 'stage')}. Tiles: {tiles}; along s, as many as "
        "the batch needs.",
        DrawnSide(constants.tile_out * constants.tile_d, "rows (k, j)", tiling.warps_out),
        DrawnSide(tiling.tile_in, "inputs l of a stage", constants.warps_in),
        lambda row, column: f"warp {row * constants.warps_in + column}",
        f"A warp: {counted(tiling.groups, 'group')} of {counted(constants.lanes_in, 'lane')}, each with "
        f"{counted(constants.thread_out, 'row')} of one j.",
    )


def _factors(tiling: GemvChainTiling) -> list[dict[str, Any]]:
    """Template variables of each factor of two."""
    (first, last), shape = factor_kernels(tiling.kernel), tiling.first
    own = {"shape": shape, "is_exchanged": shape.is_exchanged}
    return [
        {"kernel": first, "constexprs": _first(tiling), "variants": (), **own},
        {"kernel": last, "constexprs": _last(tiling), "variants": ("bsf",)},  # tiles of several j, in both layouts
    ]


def _known(tiling: GemvTiling) -> dict[str, Constexpr]:
    return {each.name: each for each in constexprs_of_factor(tiling)}


def _first(tiling: GemvChainTiling) -> list[Constexpr]:
    first, last = tiling.first, tiling.last
    known = _known(first)
    return [
        named(first.kernel.pattern, "B", "outputs that a thread block needs per j: factor 2's inputs l, index k"),
        named(first.own_pattern, "C", "inputs of each small dense block, index l"),
        named(first.kernel.pattern, "D", "factor 2's interleaved matrices, index j"),
        Constexpr("OWN_B", first.own_pattern.b, "outputs of each small dense block of this factor"),
        Constexpr("OWN_D", first.own_pattern.d, "this factor's own interleaved matrices"),
        named(first, "RATIO", "j of factor 2 per j of this factor"),
        *(known[name] for name in _OF_BOTH),
        named(tiling.constants, "TILE_D", "neighbouring j per thread block"),
        named(tiling, "PASSES", "passes of the block's threads until all its rows are multiplied"),
        named(first, "PLANES_I", "blocks on the diagonal whose inputs a thread block needs"),
        named(first, "PLANES_D", "j of these blocks whose inputs a thread block needs"),
        named(first, "X_WIDTH", "inputs per (i, j) in shared memory, trailing zeros included"),
        named(first, "X_VECTOR", "neighbouring l of X that a thread copies at a time"),
        named(first, "X_COPIES", "copies of X per block, by all its threads"),
        named(first, "AT_ONCE", "copies that a thread has in flight at a time"),
        known["X_PLANE"],
        known["X_ROW"],
        Constexpr("NEXT_INPUTS", last.x_width, "inputs of factor 2 in shared memory, trailing zeros included"),
        Constexpr("NEXT_PLANE", last.x_plane, "elements of the intermediate from one j to the next"),
        Constexpr("NEXT_ROW", last.x_row, "elements of the intermediate from one row of the batch to the next"),
    ]


def _last(tiling: GemvChainTiling) -> list[Constexpr]:
    known = _known(tiling.last)
    between = named(tiling, "BETWEEN", "byte offset of the intermediate in shared memory")
    return [*(known[name] for name in (*_OF_LAST, *_OF_BOTH)), between]


def _variables_of_layers(tiling: GemvGroupTiling) -> dict[str, Any]:
    """Template variables of several layers; equal ones share one source."""
    kernel, kinds = tiling.kernel, list(dict.fromkeys(tiling.layers))
    numbers = [kinds.index(each) + 1 for each in tiling.layers]
    most = max(len(each.kernel.factors) for each in kinds)
    drawn = [each.last if isinstance(each, GemvChainTiling) else each for each in kinds]
    pictures = zip(kinds, map(picture, drawn), strict=True)
    return {
        "picture": "//\n".join(
            f"// Kind {number}, {each.kernel.factors}:\n{text}" for number, (each, text) in enumerate(pictures, 1)
        ),
        "extra_arguments": ", bias, residual",  # named as in the source of a single layer
        "extra_pitches": ", residual_pitch",
        "has_pairs": most > 1,
        "own_weights": weights_of(kernel)[:most],
        "layers": _layer_variables(kernel, numbers, most),
        "kinds": [_kind(tiling, number, numbers, kind) for number, kind in enumerate(kinds, 1)],
    }


def _kind(
    tiling: GemvGroupTiling, number: int, numbers: list[int], layer: GemvTiling | GemvChainTiling
) -> dict[str, Any]:
    """Template variables of equal layers: their source, and the arguments of its call."""
    of = [str(at) for at, each in enumerate(numbers, 1) if each == number]
    found = {
        "number": number,
        "layers": f"{layer.kernel.factors}, of {'layers' if len(of) > 1 else 'layer'} {', '.join(of)}",
        "is_pair": False,
        "alone": [],  # the factor of such a layer
        "pair": [],  # its two factors
        "within": "",
        "weights": "layer.weights_1",
    }
    if isinstance(layer, GemvChainTiling):
        weights = "layer.weights_1, layer.weights_2"
        return found | {"is_pair": True, "pair": [_factors(layer)], "within": "factor_2::", "weights": weights}
    known = {each.name for each in constexprs_of(tiling)}
    constexprs = [each for each in constexprs_of_factor(layer) if each.name not in known]
    # tiles of several j, in both layouts
    return found | {"alone": [{"kernel": layer.kernel, "constexprs": constexprs, "variants": ("bsf",)}]}


def _layer_variables(kernel: KernelSpec, kinds: list[int], most: int) -> list[dict[str, Any]]:
    """Template variables of each layer: its kind, its first block, and its arrays."""
    names = iter(weights_of(kernel))
    found = []
    for at, (layer, chain, kind) in enumerate(zip(layers_of(kernel), kernel.chains, kinds, strict=True), 1):
        weights = [*(next(names) for _ in chain), *["0"] * (most - len(chain))]
        first = f"BEFORE_{at} * tiles" if at > 1 else "0"
        found.append({**layer, "kind": kind, "first_block": first, "weights": ", ".join(weights)})
    return found


def constexprs_of_factor(tiling: GemvTiling) -> list[Constexpr]:
    """Constants in the source of one factor."""
    kernel, constants = tiling.kernel, tiling.constants
    return [
        *product_constexprs(kernel),
        named(constants, "TILE_BATCH", "rows of the batch per thread block"),
        named(constants, "TILE_OUT", "outputs k per thread block, for each of its j"),
        named(constants, "TILE_D", "neighbouring j per thread block"),
        named(constants, "THREAD_OUT", "rows of weights, with neighbouring k, that a lane reads at a time"),
        named(constants, "LANES_IN", "lanes of a warp that share a row"),
        named(constants, "WARPS_IN", "warps that share a row"),
        named(constants, "STEPS", "pieces that a lane loads at a time, of each of its rows"),
        named(tiling, "VECTOR", "neighbouring l of one piece"),
        named(tiling, "PIECES", "pieces per row"),
        named(tiling, "ROW_STEP", "rows from one output k to the next"),
        named(tiling, "SHARERS", "lanes that share a row, in all its warps"),
        named(tiling, "GROUPS", "groups of lanes in a warp, each with its own rows"),
        named(tiling, "THREADS", "threads per block"),
        named(tiling, "TILE_IN", "inputs l per stage"),
        named(tiling, "STAGES", "stages until all pieces are read"),
        named(tiling, "TILES_OUT", "tiles along the outputs"),
        named(tiling, "TILES_D", "tiles along j"),
        named(tiling, "X_VECTOR", "neighbouring l of X that a thread copies at a time"),
        named(tiling, "X_ROUNDS", "rounds of the block's threads until a stage of X is copied"),
        named(tiling, "X_PLANE", "elements of shared memory from one j to the next"),
        named(tiling, "X_ROW", "elements of shared memory from one row of the batch to the next"),
        named(tiling, "PANEL", "elements of X per stage"),
        named(tiling, "SUMS", "sums per thread: its rows of weights times the block's rows of the batch"),
        named(tiling, "SHUFFLES", "rounds of shuffles in which the lanes of a row add up their sums"),
        named(tiling, "HALVINGS", "number of first rounds in which each lane keeps half of its sums"),
        named(tiling, "HELD", "sums per lane at the end"),
        named(tiling, "SAME", "lanes that have the same sums"),
        named(tiling, "PART", "sums per tile"),
        *packing_constexprs(kernel),
        Constexpr(
            "SCALES", tiling.scales_offset // tiling.weight_bytes, "packed weights before their scales", "long long"
        ),
    ]
