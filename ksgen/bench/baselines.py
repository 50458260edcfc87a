"""Baselines: each converts a job's weights to its own format, ahead of time, and returns a function of X.

The conversion is never timed. Outputs are contiguous, or slices of one array in a group. A copy that makes them so is
timed.

The paper's five (appendix D.1) and `strided` are backends of `ksgen.torch`, except `dense`. `three_passes`,
`densified` and `pieces` are what an expert writes in PyTorch for products without views for `strided`. `views` is
`strided` where views exist, else `bmm`. `compiled` is torch.compile, `layer` a frozen `KSLinear`, `authors` the form in
which a structure's authors published it, and `rewriting` the memory traffic of `bmm` alone. `scipy` and `lazylinop` run
on processors, if they are installed.

A baseline for one pattern (`Prepare`) multiplies a layer factor by factor, and PyTorch computes the layer's other
operations.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ksgen.bench.authors import FORMS
from ksgen.bench.problem import LayerArrays
from ksgen.bench.roster import LAYER
from ksgen.errors import KsgenError
from ksgen.pattern import Chain, Pattern
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.operators.backends import BACKENDS
from ksgen.torch.operators.products import (
    ACTIVATIONS,
    by_matrix,
    chain_to_dense,
    exchange_of,
    exchanged,
    finish,
    natural,
    permuted,
    permuted_back,
)

Product = Callable[[Tensor], Tensor]
Prepare = Callable[[Pattern, str, Tensor], Product]
LayerProduct = Callable[[Tensor], Sequence[Tensor]]  # outputs per chain
PrepareLayer = Callable[[LayerArrays], LayerProduct]

PIECES = (64, 128, 256)  # rows of the batch per piece; a processor's cache holds a piece's permuted copies
DENSE = "the dense layer of the same shape: torch.nn.functional.linear"
PREPARING = 3  # calls after which a frozen layer's calls are prepared, see `ksgen.torch.operators.prepared`
MOST_DENSIFIED = 4  # largest d at which multiplying by the zeros between weights may be faster than permuting
NEEDED = {"lazylinop": ("pandas", "pyopencl")}  # packages that a library needs without declaring them


class UnsupportedError(KsgenError):
    """Signals that a baseline does not support this pattern and layout."""


@dataclass(frozen=True)
class Baseline:
    """A baseline: its name, a short description, its preparation, and its costs."""

    name: str
    says: str
    prepare: PrepareLayer
    elements: Callable[[Chain], int] = lambda chain: chain.weight_count  # stored in the baseline's weight format
    multiplications: Callable[[Chain], int] = lambda chain: chain.weight_count  # per row of the batch
    library: str = "torch"


def by_factors(prepare: Prepare) -> PrepareLayer:
    """Return a preparation that multiplies by every factor, and then applies the layer's other operations.

    Passes over x and the intermediates change the layout and exchange features.
    """

    def prepare_layer(arrays: LayerArrays) -> LayerProduct:
        layer, transposes = arrays.layer, arrays.y_layout != arrays.layout
        chains = [
            [
                (exchange_of(pattern), layout, prepare(pattern.natural, layout, factor))
                for pattern, layout, factor in zip(chain, arrays.layouts_of(chain), weights, strict=True)
            ]
            for chain, weights in zip(layer.chains, arrays.weights, strict=True)
        ]
        if len(chains) == len(chains[0]) == 1 and not (layer.epilogue.words or transposes or chains[0][0][0]):
            product = chains[0][0][2]
            return lambda x: [product(x).contiguous()]
        between = ACTIVATIONS[layer.between].apply

        def of_chain(place: int, x: Tensor) -> Tensor:
            for number, (exchange, layout, product) in enumerate(chains[place]):
                x = between(x) if number else x
                changes = transposes and number == layer.chains[place].transposing_factor
                rows = natural(x.t().contiguous() if changes else x, exchange, layout)
                x = exchanged(product(rows), exchange, layout)
            y = finish(x, arrays.biases[place], layer.epilogue.activation, arrays.residuals[place], arrays.y_layout)
            return y.contiguous()

        return lambda x: [of_chain(place, x) for place in range(len(chains))]

    return prepare_layer


def backend(name: str) -> Prepare:
    """Return a preparation that converts the weights once, to the format of a backend of `ksgen.torch`."""

    def prepare(pattern: Pattern, layout: str, weights: Tensor) -> Product:
        chosen = BACKENDS[name]
        ready = weights if chosen.prepare is None else chosen.prepare(weights)
        return lambda x: chosen.multiply(x, ready, layout, pattern)

    return prepare


def strided(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    if layout == "bsf" and pattern.d > 1:
        raise UnsupportedError(f"{pattern} in bsf: no view of X has a stride of 1 if d > 1; bmm permutes X instead")
    return backend("strided")(pattern, layout, weights)


def views(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with `strided`, or with `bmm` if X has no view with a stride of 1."""
    return backend("bmm" if layout == "bsf" and pattern.d > 1 else "strided")(pattern, layout, weights)


def three_passes(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply like `bmm`, with preallocated memory."""
    into = _into(pattern, layout, weights)

    def product(x: Tensor) -> Tensor:
        y = x.new_empty(len(x), pattern.out_features)
        into(x, y)
        return y

    return product


def pieces(arrays: LayerArrays) -> LayerProduct:
    """Multiply some rows of the batch at a time: a product like `three_passes`, a layer like `views`.

    The first product of each batch size times all `PIECES`; the fastest number of rows is then kept.
    """
    if arrays.sets[0].is_cuda:
        raise UnsupportedError("pieces are measured on processors alone, whose caches hold them")
    if "bsl" in (arrays.layout, arrays.y_layout):
        raise UnsupportedError("only rows of batch-size-first are contiguous pieces of X")
    if arrays.layer.epilogue.residual:
        raise UnsupportedError("pieces add no residual")
    fastest: dict[int, int] = {}  # rows of a piece, by batch size
    if arrays.layer.name:
        by_views = by_factors(views)(arrays)

        def into(x: Tensor, ys: Sequence[Tensor]) -> None:
            for y, piece in zip(ys, by_views(x), strict=True):
                y.copy_(piece)
    else:
        into_one = _into(arrays.job.pattern, "bsf", arrays.weights[0][0])

        def into(x: Tensor, ys: Sequence[Tensor]) -> None:
            into_one(x, ys[0])

    def by_pieces(x: Tensor, rows: int) -> list[Tensor]:
        ys = [x.new_empty(len(x), features) for features in arrays.features]
        for x_piece, *y_pieces in zip(x.split(rows), *(y.split(rows) for y in ys), strict=True):
            into(x_piece, y_pieces)
        return ys

    def seconds(x: Tensor, rows: int) -> float:
        by_pieces(x, rows)  # the first use allocates
        begin = perf_counter()
        by_pieces(x, rows)
        return perf_counter() - begin

    def product(x: Tensor) -> list[Tensor]:
        if len(x) not in fastest:
            fastest[len(x)] = min(PIECES, key=lambda rows: seconds(x, rows))
        return by_pieces(x, fastest[len(x)])

    return product


def _into(pattern: Pattern, layout: str, weights: Tensor) -> Callable[[Tensor, Tensor], None]:
    """Return a function that permutes X, multiplies, and permutes back into Y, in memory that it reuses."""
    if layout == "bsl" or pattern.d == 1:
        raise UnsupportedError(f"{pattern} in {layout}: strided needs no passes over memory")
    a, b, c, d = pattern.shape
    matrices = by_matrix(weights).flatten(0, 1).transpose(1, 2)
    buffers: dict[int, tuple[Tensor, Tensor]] = {}  # permuted X and Y, by batch size

    def product(x: Tensor, y: Tensor) -> None:
        batch = len(x)
        if batch not in buffers:
            buffers[batch] = x.new_empty(a, d, batch, c), x.new_empty(a * d, batch, b)
        permuted_x, permuted_y = buffers[batch]
        permuted_x.copy_(x.view(batch, a, c, d).permute(1, 3, 0, 2))
        torch.bmm(permuted_x.view(a * d, batch, c), matrices, out=permuted_y)
        y.view(batch, a, b, d).copy_(permuted_y.view(a, d, batch, b).permute(2, 0, 3, 1))

    return product


def densified(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with `strided` by the same matrix, stored with zeros as pattern (a, b d, c d, 1)."""
    if layout == "bsl" or not 1 < pattern.d <= MOST_DENSIFIED:
        raise UnsupportedError(
            f"{pattern} in {layout}: multiplying by zeros may be faster only in bsf with d of 2 to {MOST_DENSIFIED}"
        )
    a, b, c, d = pattern.shape
    wide = weights.new_zeros(a, b, d, c, d)
    wide.diagonal(dim1=2, dim2=4).copy_(weights)
    return strided(Pattern(a, b * d, c * d, 1), layout, wide.view(a, b * d, c * d, 1))


def compiled(arrays: LayerArrays) -> LayerProduct:
    """Multiply with torch.compile of the einsums of all factors."""
    torch.compiler.reset()  # code compiled for other shapes would make this one dynamic
    whole: LayerProduct = torch.compile(by_factors(backend("einsum"))(arrays), dynamic=False)
    return whole


def dense(arrays: LayerArrays) -> LayerProduct:
    """Multiply with `torch.nn.functional.linear` by the chains' stacked dense matrices."""
    layer, dtype = arrays.layer, arrays.sets[0].dtype
    if layer.between != "none":
        raise UnsupportedError(f"a layer with {layer.between} between its factors has no dense matrix")
    pairs = zip(layer.chains, arrays.weights, strict=True)
    matrices = [chain_to_dense(chain, [each.double() for each in weights]) for chain, weights in pairs]
    matrix = torch.cat(matrices).to(dtype)
    biases = [each for each in arrays.biases if each is not None]
    bias = torch.cat(biases) if biases else None
    x_is_bsf, y_is_bsf = arrays.layout == "bsf", arrays.y_layout == "bsf"
    residuals = [each for each in arrays.residuals if each is not None]
    residual = torch.cat(residuals, 1 if y_is_bsf else 0) if residuals else None
    activation, column = layer.epilogue.activation, None if bias is None else bias[:, None]

    def product(x: Tensor) -> list[Tensor]:
        if y_is_bsf:
            y = functional.linear(x if x_is_bsf else x.t(), matrix, bias)
        else:
            columns = x.t() if x_is_bsf else x
            y = matrix @ columns if column is None else torch.addmm(column, matrix, columns)
        return arrays.apart(finish(y, None, activation, residual, arrays.y_layout))

    return product


def layer(arrays: LayerArrays) -> LayerProduct:
    """Multiply with a frozen `KSLinear`, which chooses its backend as in normal use."""
    layer = arrays.layer
    options: dict[str, Any] = {"layout": arrays.layout, "out_layout": layer.out_layout, "fuse": layer.fuse}
    options |= {"activation": layer.epilogue.activation}
    layers = [
        KSLinear.from_weights(
            weights, bias, patterns=chain, between=layer.between if len(chain) > 1 else "none", **options
        )
        .eval()
        .requires_grad_(False)
        .freeze()
        for chain, weights, bias in zip(layer.chains, arrays.weights, arrays.biases, strict=True)
    ]
    residual = arrays.residuals[0]
    if len(layers) > 1 and layer.epilogue.residual:
        raise UnsupportedError("KSLinear.group adds no residual")
    group = KSLinear.group(layers) if len(layers) > 1 else None

    def product(x: Tensor) -> Sequence[Tensor]:
        return [layers[0](x, residual)] if group is None else arrays.apart(group(x))

    for _ in range(PREPARING):
        product(arrays.sets[0])
    return product


def authors(arrays: LayerArrays) -> LayerProduct:
    """Multiply in the form in which the structure's authors published it."""
    structure, operations = arrays.layer.structure, arrays.layer
    if structure is None or structure.chain.name not in FORMS:
        raise UnsupportedError(f"{operations.name} is no structure with a published form: {', '.join(FORMS)}")
    if "bsl" in (arrays.layout, arrays.y_layout):
        raise UnsupportedError("the published forms take batch-size-first alone")
    if operations.between != "none":
        raise UnsupportedError("the published forms have no activation between factors")
    form, activation = FORMS[structure.chain.name], operations.epilogue.activation
    states = map(structure.to_state, arrays.weights)
    ready = [{name: each.contiguous() for name, each in state.items()} for state in states]
    given = list(zip(ready, arrays.biases, arrays.residuals, strict=True))
    return lambda x: [
        finish(form(x, state), bias, activation, residual, "bsf").contiguous() for state, bias, residual in given
    ]


def rewriting(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Memory traffic of `bmm` around its product; the product is replaced by zeros."""
    count, is_bsf = pattern.a * pattern.d, layout == "bsf"
    results: dict[int, Tensor] = {}

    def product(x: Tensor) -> Tensor:
        blocks = permuted(x, layout, pattern.a, pattern.d)
        batch = blocks.shape[2]
        if 1 not in blocks.stride()[1:]:
            (blocks.transpose(1, 2) if is_bsf else blocks).contiguous()  # torch.bmm makes this copy, too
        if batch not in results:
            shape = (count, batch, pattern.b) if is_bsf else (count, pattern.b, batch)
            results[batch] = x.new_zeros(shape)
        result = results[batch]
        return permuted_back(result.transpose(1, 2) if is_bsf else result, layout, pattern.a, pattern.d)

    return product


def scipy_sparse(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    _check_library("scipy", weights, (torch.float32, torch.float64))
    from scipy.sparse import csr_array

    to_csr = BACKENDS["sparse"].prepare
    assert to_csr is not None
    csr = to_csr(weights)
    parts = (csr.values().numpy(), csr.col_indices().int().numpy(), csr.crow_indices().int().numpy())
    matrix = csr_array(parts, (pattern.out_features, pattern.in_features))
    if layout == "bsl":
        return lambda x: torch.from_numpy(matrix @ x.numpy())
    return lambda x: torch.from_numpy((matrix @ x.numpy().T).T)


def lazylinop_kernels(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with lazylinop's own OpenCL kernels on the processor, including copies to and from OpenCL buffers."""
    _check_library("lazylinop", weights, (torch.float32, torch.float64))
    if layout != "bsl":
        raise UnsupportedError("lazylinop multiplies columns: batch-size-last alone")
    try:
        from lazylinop.butterfly import ksm

        operator = ksm(weights.numpy(), {"backend": (None, "cpu"), "params": None})
    except Exception as error:  # lazylinop has no error types
        raise UnsupportedError(f"lazylinop cannot create the operator: {type(error).__name__}: {error}") from error

    def product(x: Tensor) -> Tensor:
        try:
            return torch.from_numpy(operator @ x.numpy())
        except Exception as error:
            raise UnsupportedError(f"lazylinop cannot multiply: {type(error).__name__}: {error}") from error

    return product


def _check_library(name: str, weights: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if weights.is_cuda:
        raise UnsupportedError(f"{name} is measured on processors alone")
    if weights.dtype not in dtypes:
        raise UnsupportedError(f"{name} has no {str(weights.dtype).removeprefix('torch.')}")
    for package in (name, *NEEDED.get(name, ())):
        if find_spec(package) is None:
            subject = name if package == name else f"{name} needs {package}, which"
            raise UnsupportedError(f"{subject} is not installed: pip install {package}")


def library_version(name: str) -> str:
    """Name and version of a library, as part of a measurement's identity."""
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} is missing"


def _densified_count(chain: Chain) -> int:
    return sum(pattern.d * pattern.weight_count for pattern in chain)


def _dense_count(chain: Chain) -> int:
    return chain.in_features * chain.out_features


BASELINES = {
    each.name: each
    for each in (
        *(Baseline(name, BACKENDS[name].why, by_factors(backend(name))) for name in ("bmm", "einsum", "bsr")),
        # The dense matrix in float64, twice while matrices are stacked, and in the job's type of at least two bytes.
        Baseline("dense", DENSE, dense, lambda chain: 9 * _dense_count(chain), _dense_count),
        # A value and its 64-bit column index per weight, and the same again during construction.
        Baseline(
            "sparse", BACKENDS["sparse"].why, by_factors(backend("sparse")), lambda chain: 12 * chain.weight_count
        ),
        Baseline("strided", BACKENDS["strided"].why, by_factors(strided)),
        Baseline("views", "batched products on views of X, or as bmm where X has none", by_factors(views)),
        Baseline(
            "three_passes",
            "permute, one batched product, permute back, into preallocated memory",
            by_factors(three_passes),
        ),
        Baseline(
            "densified",
            "one batched product on views, with zeros in between",
            by_factors(densified),
            _densified_count,
            _densified_count,
        ),
        Baseline("pieces", "all factors for some rows at a time, which stay in a processor's cache", pieces),
        Baseline("compiled", "torch.compile of the einsums", compiled),
        Baseline("authors", "the form in PyTorch that the structure's authors published", authors),
        Baseline(
            LAYER,
            "KSLinear, frozen, which chooses by itself among ksgen's kernels and PyTorch's products",
            layer,
            library="ksgen",
        ),
        # Derived from PyTorch's matrix, with 32-bit column indices.
        Baseline(
            "scipy",
            "SciPy's product with compressed sparse rows",
            by_factors(scipy_sparse),
            lambda chain: 14 * chain.weight_count,
            library="scipy",
        ),
        Baseline("lazylinop", "lazylinop's own kernels, by OpenCL", by_factors(lazylinop_kernels), library="lazylinop"),
        Baseline(
            "rewriting",
            "the permutations of bmm alone, no product",
            by_factors(rewriting),
            lambda chain: 0,
            lambda chain: 0,
        ),
    )
}
