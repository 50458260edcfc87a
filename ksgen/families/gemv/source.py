"""Template variables and constants of sources for small batches: of one factor, of two factors of a layer, and of
several layers on one X."""

from itertools import accumulate
from typing import TypedDict

from ksgen.families.base import Constexpr, Variables, named
from ksgen.families.chains import factor_kernels
from ksgen.families.drawing import DrawnSide, draw
from ksgen.families.gemv.chain_shape import GemvChainTiling
from ksgen.families.gemv.group import GemvGroupTiling
from ksgen.families.gemv.shape import GemvTiling
from ksgen.families.gpu_chain import LayerVariables, layers_of
from ksgen.families.signature import each_chains, weights_of
from ksgen.families.tiles import PACK_THREADS, batch_constexpr, epilogue_constexprs, given_scales, pattern_constexprs
from ksgen.spec import KernelSpec
from ksgen.values import counted

AnyGemvTiling = GemvTiling | GemvChainTiling | GemvGroupTiling

_OF_BOTH = (  # constants of a factor alone that the source has for either of two, unchanged
    "THREAD_OUT", "LANES_IN", "STEPS", "VECTOR", "PIECES", "SHARERS", "TILE_IN", "STAGES", "SUMS", "SHUFFLES",
    "HALVINGS", "HELD", "SAME", "SCALES",
)  # fmt: skip
_OF_LAST = (
    "A", "B", "C", "D", "TILE_OUT", "TILE_D", "WARPS_IN", "GROUPS", "TILES_OUT", "TILES_D", "PART", "X_PLANE",
    "X_ROW",
)  # fmt: skip


class GemvFactor(TypedDict):
    """Variables of one factor's part of a source."""

    kernel: KernelSpec
    constexprs: list[Constexpr]
    variants: tuple[str, ...]


class GemvLayer(LayerVariables):
    """Variables of one layer of a group."""

    kind: int
    first_block: str
    weights: str


class GemvKind(TypedDict):
    """Variables of equal layers of a group: their source, and the arguments of its call."""

    number: int
    layers: str
    is_pair: bool
    alone: list[GemvFactor]  # the factor of such a layer, or none
    pair: list[list[GemvFactor]]  # its two factors, or none
    within: str
    weights: str


class GemvVariables(Variables, total=False):
    weight: str  # type of a packed weight
    piece: str  # type of one load of weights
    of_pieces: str
    of_storage: str
    input_storage: str
    starts_early: bool
    unwritten: str  # qualifier of arrays that no other launch writes
    # of several factors
    has_scales: bool
    has_bytes_in: bool
    x_given: str
    x_stored: str  # type of a factor's input: X or the intermediate
    factors: list[GemvFactor]
    # of several layers
    extra_arguments: str
    extra_pitches: str
    has_pairs: bool
    own_weights: tuple[str, ...]  # of one layer
    weights_of_all: tuple[str, ...]
    results: tuple[str, ...]
    layers: list[GemvLayer]
    kinds: list[GemvKind]


def variables_of(shape: AnyGemvTiling) -> GemvVariables:
    """Template variables: the types of X and of weights, packed and read, those of an early start, and those of each
    factor.

    A kernel that starts early waits, and reads nothing through restricted pointers, because nvcc would move those reads
    before the wait.
    """
    kernel, early = shape.kernel, shape.constants.early
    found: GemvVariables = {
        "weight": "given" if kernel.is_quantized else "stored",
        "piece": "Values" if kernel.is_quantized else "Piece",
        "of_pieces": "X" if kernel.is_quantized else "W, or of X",
        "of_storage": "quantized" if kernel.is_quantized else "same",
        "input_storage": "bytes" if kernel.has_bytes_in else "same",
        "starts_early": bool(early),
        "unwritten": "" if early else "RESTRICT ",
    }
    if isinstance(shape, GemvTiling):
        return {**found, "picture": picture(shape), "variants": ("bsf",)}  # tiles of several j, in both layouts
    found |= {
        "has_scales": kernel.is_quantized,
        "x_given": "given" if kernel.has_bytes_in else "stored",
        "x_stored": "Input" if kernel.has_bytes_in else "stored",
        "has_bytes_in": kernel.has_bytes_in,
    }
    if isinstance(shape, GemvChainTiling):
        return {**found, "picture": picture(shape.last), "factors": _factors(shape)}
    return found | _variables_of_layers(shape)


def constexprs_of(shape: AnyGemvTiling) -> list[Constexpr]:
    """Constants of a factor alone, or of all factors."""
    if isinstance(shape, GemvTiling):
        return constexprs_of_factor(shape)
    found = [
        batch_constexpr(shape.kernel),
        *epilogue_constexprs(shape.kernel),
        named(shape.constants, "TILE_BATCH", "rows of the batch per thread block"),
        named(shape, "THREADS", "threads per block"),
    ]
    if isinstance(shape, GemvChainTiling):
        return found
    tiles = enumerate(accumulate(each.grid(1) for each in shape.layers), 2)
    return found + [
        Constexpr(f"BEFORE_{number}", each, f"tiles of the layers before layer {number}") for number, each in tiles
    ]


def picture(shape: GemvTiling) -> str:
    """Drawing of a tile's rows of weights, and of the warps that share them."""
    own = shape.constants
    tiles = f"{shape.tiles_out} along k, {shape.tiles_d} along j, {shape.kernel.pattern.a} along i"
    return draw(
        f"The weights of a tile of Y, in {counted(shape.stages, 'stage')}. Tiles: {tiles}; along s, as many as "
        "the batch needs.",
        DrawnSide(own.tile_out * own.tile_d, "rows (k, j)", shape.warps_out),
        DrawnSide(shape.tile_in, "inputs l of a stage", own.warps_in),
        lambda row, column: f"warp {row * own.warps_in + column}",
        f"A warp: {counted(shape.groups, 'group')} of {counted(own.lanes_in, 'lane')}, each with "
        f"{counted(own.thread_out, 'row')} of one j.",
    )


def _factors(shape: GemvChainTiling) -> list[GemvFactor]:
    """Template variables of each factor of two."""
    alone = factor_kernels(shape.kernel)
    return [
        {"kernel": alone[0], "constexprs": _first(shape), "variants": ()},
        {"kernel": alone[1], "constexprs": _last(shape), "variants": ("bsf",)},  # tiles of several j, in both layouts
    ]


def _known(shape: GemvTiling) -> dict[str, Constexpr]:
    return {each.name: each for each in constexprs_of_factor(shape)}


def _first(shape: GemvChainTiling) -> list[Constexpr]:
    own, last = shape.first, shape.last
    known = _known(own)
    return [
        named(own.kernel.pattern, "B", "outputs that a block needs per j: factor 2's inputs l, index k"),
        named(own.own, "C", "inputs of one block on the diagonal, index l"),
        named(own.kernel.pattern, "D", "factor 2's interleaved matrices, index j"),
        Constexpr("OWN_B", own.own.b, "outputs of one block on this factor's diagonal"),
        Constexpr("OWN_D", own.own.d, "this factor's own interleaved matrices"),
        named(own, "RATIO", "j of factor 2 per j of this factor"),
        *(known[name] for name in _OF_BOTH),
        named(shape.constants, "TILE_D", "neighbouring j per thread block"),
        named(shape, "PASSES", "passes of the block's threads until all its rows are multiplied"),
        named(own, "PLANES_I", "blocks on the diagonal whose inputs a thread block needs"),
        named(own, "PLANES_D", "j of these blocks whose inputs a thread block needs"),
        named(own, "X_WIDTH", "inputs per (i, j) in shared memory, trailing zeros included"),
        named(own, "X_VECTOR", "neighbouring l of X that a thread copies at a time"),
        named(own, "X_COPIES", "copies of X per block, by all its threads"),
        named(own, "AT_ONCE", "copies that a thread has in flight at a time"),
        known["X_PLANE"],
        known["X_ROW"],
        Constexpr("NEXT_INPUTS", last.x_width, "inputs of factor 2 in shared memory, trailing zeros included"),
        Constexpr("NEXT_PLANE", last.x_plane, "elements of the intermediate from one j to the next"),
        Constexpr("NEXT_ROW", last.x_row, "elements of the intermediate from one row of the batch to the next"),
    ]


def _last(shape: GemvChainTiling) -> list[Constexpr]:
    known = _known(shape.last)
    between = named(shape, "BETWEEN", "byte offset of the intermediate in shared memory")
    return [*(known[name] for name in (*_OF_LAST, *_OF_BOTH)), between]


def _variables_of_layers(shape: GemvGroupTiling) -> GemvVariables:
    """Template variables of several layers; equal ones share one source."""
    kernel, kinds = shape.kernel, list(dict.fromkeys(shape.layers))
    numbers = [kinds.index(each) + 1 for each in shape.layers]
    names, most = weights_of(kernel), max(len(each.kernel.factors) for each in kinds)
    drawn = [each.last if isinstance(each, GemvChainTiling) else each for each in kinds]
    pictures = zip(kinds, map(picture, drawn), strict=True)
    return {
        "picture": "//\n".join(
            f"// Kind {number}, {each.kernel.factors}:\n{text}" for number, (each, text) in enumerate(pictures, 1)
        ),
        "extra_arguments": ", bias, residual",  # named like the arguments of a single layer
        "extra_pitches": ", residual_pitch",
        "has_pairs": most > 1,
        "own_weights": names[:most],
        "weights_of_all": names,
        "results": each_chains(kernel, "y"),
        "layers": _layer_variables(kernel, numbers, most),
        "kinds": [_kind(shape, number, numbers, kind) for number, kind in enumerate(kinds, 1)],
    }


def _kind(shape: GemvGroupTiling, number: int, numbers: list[int], layer: GemvTiling | GemvChainTiling) -> GemvKind:
    of = [str(at) for at, each in enumerate(numbers, 1) if each == number]
    found: GemvKind = {
        "number": number,
        "layers": f"{layer.kernel.factors}, of {'layers' if len(of) > 1 else 'layer'} {', '.join(of)}",
        "is_pair": False,
        "alone": [],
        "pair": [],
        "within": "",
        "weights": "layer.weights_1",
    }
    if isinstance(layer, GemvChainTiling):
        weights = "layer.weights_1, layer.weights_2"
        return found | {"is_pair": True, "pair": [_factors(layer)], "within": "factor_2::", "weights": weights}
    known = {each.name for each in constexprs_of(shape)}
    constexprs = [each for each in constexprs_of_factor(layer) if each.name not in known]
    # tiles of several j, in both layouts
    return found | {"alone": [{"kernel": layer.kernel, "constexprs": constexprs, "variants": ("bsf",)}]}


def _layer_variables(kernel: KernelSpec, kinds: list[int], most: int) -> list[GemvLayer]:
    """Template variables of each layer: its kind, its first block, and its arrays."""
    names = iter(weights_of(kernel))
    found: list[GemvLayer] = []
    for at, (layer, chain, kind) in enumerate(zip(layers_of(kernel), kernel.chains, kinds, strict=True), 1):
        weights = [*(next(names) for _ in chain), *["0"] * (most - len(chain))]
        first = f"BEFORE_{at} * tiles" if at > 1 else "0"
        found.append({**layer, "kind": kind, "first_block": first, "weights": ", ".join(weights)})
    return found


def constexprs_of_factor(shape: GemvTiling) -> list[Constexpr]:
    """Constants in the source of one factor."""
    kernel, constants = shape.kernel, shape.constants
    return [
        *pattern_constexprs(kernel),
        *epilogue_constexprs(kernel),
        named(constants, "TILE_BATCH", "rows of the batch per thread block"),
        named(constants, "TILE_OUT", "outputs k per thread block, for each of its j"),
        named(constants, "TILE_D", "neighbouring j per thread block"),
        named(constants, "THREAD_OUT", "rows of weights, of neighbouring k, that a lane reads at a time"),
        named(constants, "LANES_IN", "lanes of a warp that share a row"),
        named(constants, "WARPS_IN", "warps that share a row"),
        named(constants, "STEPS", "pieces of each of its rows that a lane loads at a time"),
        named(shape, "VECTOR", "neighbouring l of one piece"),
        named(shape, "PIECES", "pieces per row"),
        named(shape, "SHARERS", "lanes that share a row, in all its warps"),
        named(shape, "GROUPS", "groups of lanes in a warp, with rows of their own"),
        named(shape, "THREADS", "threads per block"),
        named(shape, "TILE_IN", "inputs l per stage"),
        named(shape, "STAGES", "stages until all pieces are read"),
        named(shape, "TILES_OUT", "tiles along the outputs"),
        named(shape, "TILES_D", "tiles along j"),
        named(shape, "X_VECTOR", "neighbouring l of X that a thread copies at a time"),
        named(shape, "X_ROUNDS", "rounds of the block's threads until a stage of X is copied"),
        named(shape, "X_PLANE", "elements of shared memory from one j to the next"),
        named(shape, "X_ROW", "elements of shared memory from one row of the batch to the next"),
        named(shape, "PANEL", "elements of X per stage"),
        named(shape, "SUMS", "sums per thread: its rows of weights times the block's rows of the batch"),
        named(shape, "SHUFFLES", "rounds of shuffles in which the lanes of a row add up their sums"),
        named(shape, "HALVINGS", "first rounds, in which each lane keeps half of its sums"),
        named(shape, "HELD", "sums per lane at the end"),
        named(shape, "SAME", "lanes that have the same sums"),
        named(shape, "PART", "sums per tile"),
        Constexpr("PACK_THREADS", PACK_THREADS, "threads per block of the packing kernel"),
        given_scales(kernel),
        Constexpr(
            "SCALES",
            shape.scales_offset // shape.weight_bytes,
            "packed weights in front of their scales",
            "long long",
        ),
    ]
