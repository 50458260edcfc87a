"""Baselines: each converts a job's weights to its own format, ahead of time, and returns a function of X.

The conversion is timed apart from the products. Outputs are contiguous, or slices of one array in a group. A copy that
makes them so is timed.

The paper's five (appendix D.1) and `strided` are backends of `ksgen.torch`, except `dense`. `three_passes`,
`densified` and `pieces` are what an expert writes in PyTorch for products without views for `strided`. `views` is
`strided` where views exist, else `bmm`. `grouped` and `semi_structured` are PyTorch's products of the same names.
`onednn` is oneDNN's product with a dense matrix that is reordered ahead. `compiled` is torch.compile, `layer` a frozen
`KSLinear`, `authors` the form in which a structure's authors published it, and `rewriting` the memory traffic of `bmm`
alone. Other libraries are in `ksgen.bench.libraries`.

A baseline for one pattern (`Prepare`) multiplies a layer factor by factor, and PyTorch computes the layer's other
operations.

A training step computes outputs, and then gradients of x, of all weights and of the biases, without an optimizer. Each
contender trains the parameters by which it multiplies, in its own format. Their conversion from weights (a, b, c, d)
happens once, as at the creation of a layer, and is not timed.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain
from operator import add
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ksgen.bench import libraries
from ksgen.bench.authors import FORMS, PUBLISHED, frozen
from ksgen.bench.libraries import LayerProduct, Product, UnsupportedError
from ksgen.bench.problem import Gradients, LayerArrays
from ksgen.bench.roster import LAYER
from ksgen.measure.trust import host_clock
from ksgen.pattern import Chain, Pattern
from ksgen.spec.kernel import SLICES
from ksgen.torch.layer.building import build_runs
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.layer.sum import KSSum
from ksgen.torch.layer.tied import initialized
from ksgen.torch.operators import products, replay
from ksgen.torch.operators.backends import BACKENDS

Prepare = Callable[[Pattern, str, Tensor], Product]
PrepareLayer = Callable[[LayerArrays], LayerProduct]

PIECES = (64, 128, 256)  # rows of the batch per piece; a processor's cache holds a piece's permuted copies
DENSE = "the dense layer of the same shape: torch.nn.functional.linear"
# calls after which a layer's calls are prepared, and after which a replay repeats them, if they take that many seconds
PREPARING, REPLAYING, REPLAYING_S = 3, 64, 0.1
_GROUPED_BYTES = 16  # alignment of rows that PyTorch's grouped product accepts
_BY_PYTORCH = ("torch", "torch-structured")  # libraries whose products are PyTorch's
MOST_DENSIFIED = 4  # largest d at which multiplying by the zeros between weights may be faster than permuting


@dataclass(frozen=True)
class Baseline:
    """A baseline: its name, a short description, its preparation, and its costs."""

    name: str
    says: str
    prepare: PrepareLayer
    multiplications: Callable[[Chain], int] = lambda chain: chain.weight_count  # per row of the batch
    stored: int = 1  # elements of the baseline's weight format per multiplication
    library: str = "torch"
    only_converts: bool = True  # whether `prepare` only converts weights: it compiles and multiplies nothing


def by_factors(prepare: Prepare) -> PrepareLayer:
    """Return a preparation that multiplies by every factor, and then applies the layer's other operations.

    Passes over x and the intermediates change the layout and exchange features.
    """

    def prepare_layer(arrays: LayerArrays) -> LayerProduct:
        layer, transposes = arrays.layer, arrays.y_layout != arrays.layout
        chains = [
            [
                (products.exchange_of(pattern), layout, prepare(pattern.natural, layout, factor))
                for pattern, layout, factor in zip(chain, arrays.layouts_of(chain), weights, strict=True)
            ]
            for chain, weights in zip(layer.chains, arrays.weights, strict=True)
        ]
        if len(chains) == len(chains[0]) == 1 and not (layer.epilogue.words or transposes or chains[0][0][0]):
            product = chains[0][0][2]
            return lambda x: [product(x).contiguous()]
        between = products.ACTIVATIONS[layer.between].apply

        def of_chain(place: int, x: Tensor) -> Tensor:
            for number, (exchange, layout, product) in enumerate(chains[place]):
                x = between(x) if number else x
                changes = transposes and number == layer.chains[place].transposing_factor
                rows = products.natural(x.t().contiguous() if changes else x, exchange, layout)
                x = products.exchanged(product(rows), exchange, layout)
            return x

        return lambda x: arrays.finished(of_chain(place, x) for place in range(len(chains)))

    return prepare_layer


def computes_in_float32(baseline: Baseline, x: Tensor) -> bool:
    """Whether a baseline computes in float32, because PyTorch has no products of x's 16-bit type on this processor."""
    return baseline.library in _BY_PYTORCH and products.is_cast(x)


def in_float32(prepare: PrepareLayer) -> PrepareLayer:
    """Return a preparation that computes in float32 from X and Y of 16 bits, whose casts are timed."""
    return lambda arrays: _with_casts(prepare(arrays.in_float32()), arrays.sets[0].dtype)


def _with_casts(product: LayerProduct, dtype: torch.dtype) -> LayerProduct:
    """Cast X to float32 for a product, and its outputs to `dtype`."""
    return lambda x: [y.to(dtype) for y in product(x.float())]


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
        return host_clock(lambda: by_pieces(x, rows))

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
    matrices = products.by_matrix(weights).flatten(0, 1).transpose(1, 2)
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


def grouped(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with PyTorch's grouped product, one group per (i, j).

    In batch-size-last with a = 1, groups of columns are views of X and Y. Otherwise, X and Y are permuted as for `bmm`.
    Of X, that is a view if d = 1.
    """
    multiply = getattr(functional, "grouped_mm", None)
    if multiply is None:
        raise UnsupportedError(f"PyTorch {torch.__version__} has no torch.nn.functional.grouped_mm")
    a, b, c, d = pattern.shape
    matrices, item_bytes = products.by_matrix(weights).flatten(0, 1), weights.element_size()
    ends: dict[int, Tensor] = {}  # of the groups of columns, by batch size

    def check(count: int) -> None:
        if count * item_bytes % _GROUPED_BYTES:
            raise UnsupportedError(
                f"{pattern} in {layout}: grouped_mm accepts rows of a multiple of {_GROUPED_BYTES} bytes, not of "
                f"{count * item_bytes}"
            )

    def by_rows(x: Tensor) -> Tensor:
        rows = products.permuted(x, layout, a, d).mT
        return products.permuted_back(multiply(rows.contiguous() if d > 1 else rows, matrices.mT).mT, layout, a, d)

    def by_columns(x: Tensor) -> Tensor:
        batch = x.shape[1]
        check(batch)  # also of views, although their rows have d times as many columns
        if a > 1:
            return products.permuted_back(multiply(matrices, products.permuted(x, layout, a, d)), layout, a, d)
        if batch not in ends:
            ends[batch] = torch.arange(1, d + 1, device=x.device, dtype=torch.int32) * batch
        return multiply(matrices, x.view(c, d * batch), offs=ends[batch]).view(b * d, batch)

    check(c)
    return by_rows if layout == "bsf" else by_columns


def semi_structured(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with the dense matrix of the pattern in PyTorch's format for two nonzeros in four (2:4)."""
    if not weights.is_cuda:
        raise UnsupportedError("semi-structured products are measured on GPUs alone")
    if weights.element_size() != 2:
        raise UnsupportedError("PyTorch's products with two nonzeros in four have types of 16 bits")
    if pattern.d == 1 and pattern.c > 2:
        raise UnsupportedError(
            f"{pattern} has {pattern.c} nonzeros next to each other in each row; accepted: two in four, which is d > 1"
        )
    try:
        matrix = torch.sparse.to_sparse_semi_structured(products.to_dense(weights).contiguous())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # of a number of rows or columns
        raise UnsupportedError(f"PyTorch cannot convert {pattern}: {error}") from error
    return lambda x: products.by_whole_matrix(x, matrix, layout)


def compiled(arrays: LayerArrays) -> LayerProduct:
    """Multiply with torch.compile of the einsums of all factors."""
    torch.compiler.reset()  # code compiled for other shapes would make this one dynamic
    whole: LayerProduct = torch.compile(by_factors(backend("einsum"))(arrays), dynamic=False)
    return whole


def dense(arrays: LayerArrays) -> LayerProduct:
    """Multiply with `torch.nn.functional.linear` by the chains' stacked dense matrices."""
    return by_dense(arrays, *stacked(arrays))


def onednn(arrays: LayerArrays) -> LayerProduct:
    """Multiply with oneDNN's product by the chains' stacked dense matrices, reordered ahead for the job's batch size.

    The operators are those that `torch.compile` uses for frozen weights.
    """
    if arrays.sets[0].is_cuda:
        raise UnsupportedError("oneDNN is measured on processors alone")
    if "bsl" in (arrays.layout, arrays.y_layout):
        raise UnsupportedError("oneDNN's product takes features last: batch-size-first alone")
    if not torch.backends.mkldnn.is_available():
        raise UnsupportedError(f"PyTorch {torch.__version__} was built without oneDNN")
    operators, (matrix, bias) = torch.ops.mkldnn, stacked(arrays)
    try:
        ready = operators._reorder_linear_weight(matrix, arrays.job.batch)
        operators._linear_pointwise(arrays.sets[0][:1], ready, bias, "none", [], "")
    except (AttributeError, RuntimeError) as error:  # another version of the operators, or no such type here
        raise UnsupportedError(f"oneDNN fails: {' '.join(str(error).split())[: libraries.MOST_OF_ERROR]}") from error
    return by_linear(arrays, lambda x: operators._linear_pointwise(x, ready, bias, "none", [], ""))


def stacked(arrays: LayerArrays) -> tuple[Tensor, Tensor | None]:
    """Dense matrices of all chains, stacked or added, and their biases."""
    layer, dtype = arrays.layer, arrays.sets[0].dtype
    if layer.between != "none":
        raise UnsupportedError(f"a layer with {layer.between} between its factors has no dense matrix")
    pairs = zip(layer.chains, arrays.weights, strict=True)
    matrices = [products.chain_to_dense(chain, [each.double() for each in weights]) for chain, weights in pairs]
    biases = [each for each in arrays.biases if each is not None]
    matrix = reduce(add, matrices) if layer.is_sum else torch.cat(matrices)
    return matrix.to(dtype), torch.cat(biases) if biases else None


def by_dense(arrays: LayerArrays, matrix: Tensor, bias: Tensor | None) -> LayerProduct:
    """Multiply by a dense matrix of all chains, and apply the layer's other operations."""
    x_is_bsf, column = arrays.layout == "bsf", None if bias is None else bias[:, None]

    def linear(x: Tensor) -> Tensor:
        if arrays.y_layout == "bsf":
            return functional.linear(x if x_is_bsf else x.t(), matrix, bias)
        columns = x.t() if x_is_bsf else x
        return matrix @ columns if column is None else torch.addmm(column, matrix, columns)

    return by_linear(arrays, linear)


def by_linear(arrays: LayerArrays, linear: Product) -> LayerProduct:
    """Multiply by one product for all chains, which adds the biases, and apply the layer's other operations."""
    residuals = [each for each in arrays.residuals if each is not None]
    residual = torch.cat(residuals, 1 if arrays.y_layout == "bsf" else 0) if residuals else None
    steps = arrays.layer.epilogue

    def product(x: Tensor) -> list[Tensor]:
        y = linear(x)
        return arrays.apart(products.finish(y, None, steps.activation, residual, arrays.y_layout, steps.residual_first))

    return product


def layer(arrays: LayerArrays) -> LayerProduct:
    """Multiply with a frozen `KSLinear`, which chooses its backend as in normal use."""
    product = by_linears(arrays, [each.eval().requires_grad_(False).freeze() for each in arrays.tied_linears()])
    warm_up(lambda: product(arrays.sets[0]))
    return product


def warm_up(call: Callable[[], object]) -> None:
    """Call a layer until its calls are prepared, and short ones are replayed."""
    replay.load_now()
    build_runs([call])
    begin = perf_counter()
    for number in range(REPLAYING):
        call()
        if number >= PREPARING and perf_counter() - begin > REPLAYING_S:
            return


def by_linears(arrays: LayerArrays, layers: Sequence[KSLinear]) -> LayerProduct:
    """Multiply with `KSLinear` layers: several are a group or a sum."""
    residual = arrays.residuals[0]
    if arrays.layer.is_sum:
        activation: Any = arrays.layer.epilogue.activation
        total = KSSum(layers, activation)
        return lambda x: [total(x, residual)]
    if arrays.layer.epilogue.residual_first:
        raise UnsupportedError("KSLinear adds a residual after its activation")
    if len(layers) == 1:
        return lambda x: [layers[0](x, residual)]
    if arrays.layer.epilogue.residual:
        raise UnsupportedError("KSLinear.group adds no residual")
    group = KSLinear.group(layers)
    return lambda x: group.parts(x) if torch.is_grad_enabled() else arrays.apart(group(x))


def authors(arrays: LayerArrays) -> LayerProduct:
    """Multiply in the form in which the structure's authors published it."""
    return libraries.of_structure(arrays, PUBLISHED, {name: partial(frozen, name) for name in FORMS})


def rewriting(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Memory traffic of `bmm` around its product; the product is replaced by zeros."""
    count, is_bsf = pattern.a * pattern.d, layout == "bsf"
    results: dict[int, Tensor] = {}

    def product(x: Tensor) -> Tensor:
        blocks = products.permuted(x, layout, pattern.a, pattern.d)
        batch = blocks.shape[2]
        if 1 not in blocks.stride()[1:]:
            (blocks.transpose(1, 2) if is_bsf else blocks).contiguous()  # torch.bmm makes this copy, too
        if batch not in results:
            shape = (count, batch, pattern.b) if is_bsf else (count, pattern.b, batch)
            results[batch] = x.new_zeros(shape)
        result = results[batch]
        return products.permuted_back(result.transpose(1, 2) if is_bsf else result, layout, pattern.a, pattern.d)

    return product


def _densified_count(chain: Chain) -> int:
    return sum(pattern.d * pattern.weight_count for pattern in chain)


def _dense_count(chain: Chain) -> int:
    return chain.in_features * chain.out_features


BASELINES = {
    each.name: each
    for each in (
        *(Baseline(name, BACKENDS[name].why, by_factors(backend(name))) for name in ("bmm", "einsum", "bsr")),
        # The dense matrix in float64, twice while matrices are stacked, and in the job's type of at least two bytes.
        Baseline("dense", DENSE, dense, _dense_count, stored=9),
        # The same, and oneDNN's copy.
        Baseline(
            "onednn", "oneDNN's product with the dense matrix, reordered ahead", onednn, _dense_count, stored=10,
            library=libraries.ONEDNN,
        ),
        # A value and its 64-bit column index per weight, and the same again during construction.
        Baseline("sparse", BACKENDS["sparse"].why, by_factors(backend("sparse")), stored=12),
        Baseline("strided", BACKENDS["strided"].why, by_factors(strided)),
        Baseline("views", "batched products on views of X, or as bmm where X has none", by_factors(views)),
        Baseline(
            "three_passes", "permute, one batched product, permute back, into preallocated memory",
            by_factors(three_passes),
        ),
        Baseline(
            "densified", "one batched product on views, with zeros in between", by_factors(densified), _densified_count
        ),
        Baseline("pieces", "all factors for some rows at a time, which stay in a processor's cache", pieces),
        Baseline(
            "grouped", "torch.nn.functional.grouped_mm, one group per block, on views of X or after permuting it",
            by_factors(grouped),
        ),
        # The dense matrix, and half of it with two bits per value.
        Baseline(
            "semi_structured", "torch.sparse.to_sparse_semi_structured: the dense matrix with two nonzeros in four",
            by_factors(semi_structured), lambda chain: _dense_count(chain) // 2, stored=4,
        ),
        Baseline("compiled", "torch.compile of the einsums", compiled, only_converts=False),
        Baseline(  # BOFT's form multiplies by a dense rotation
            "authors", "the form in PyTorch that the structure's authors published", authors,
            lambda chain: _dense_count(chain) if chain.name == "boft" else chain.weight_count,
        ),
        Baseline(
            LAYER, "KSLinear, frozen, which chooses by itself among ksgen's kernels and PyTorch's products", layer,
            library="ksgen", only_converts=False,
        ),
        # Derived from PyTorch's matrix, with 32-bit column indices.
        Baseline(
            "scipy", "SciPy's product with compressed sparse rows", by_factors(libraries.scipy_sparse), stored=14,
            library="scipy",
        ),
        Baseline(
            "lazylinop", "lazylinop's own kernels, by OpenCL", by_factors(libraries.lazylinop_kernels),
            library="lazylinop", only_converts=False,
        ),
        Baseline(
            "torch_structured", "torch-structured's diagonal blocks, Monarch products and butterflies",
            libraries.torch_structured, library="torch-structured",
        ),
        Baseline(
            "nvmath", "nvmath-python's universal sparse tensor, in compressed sparse rows",
            by_factors(libraries.nvmath_sparse), stored=14, library="nvmath-python",
        ),
        Baseline(
            "blr", "the Triton kernels of mem-efficient-blr, the fastest of them",
            libraries.blr, library="mem-efficient-blr", only_converts=False,
        ),
        Baseline("rewriting", "the permutations of bmm alone, no product", by_factors(rewriting), lambda chain: 0),
    )
}  # fmt: skip


# ---- training steps

Weights = Sequence[Sequence[Tensor]]  # (a, b, c, d), per chain


class StepResult(NamedTuple):
    """Outputs per chain, and the gradients of x, of the parameters and of the biases."""

    ys: Sequence[Tensor]
    gradients: Sequence[Tensor]


@dataclass(frozen=True)
class TrainedContender:
    """A contender in training: its product, and the tensors that it trains."""

    product: LayerProduct
    parameters: Sequence[Tensor]
    biases: Sequence[Tensor]
    convert: Callable[[Weights], Sequence[Tensor]] | None = None  # weights to parameters, differentiably


Train = Callable[[LayerArrays], TrainedContender]


def training_step(
    name: str, arrays: LayerArrays
) -> tuple[Callable[[int], StepResult], Callable[[StepResult], Gradients]]:
    """Training step of the contender with this name, on the set of arrays with a number, and its result's gradients.

    `UnsupportedError` if there is none.
    """
    if name not in TRAINED:
        raise UnsupportedError(f"{name} has no training step")
    is_cast = computes_in_float32(BASELINES[name], arrays.sets[0])
    own = arrays.in_float32() if is_cast else arrays
    trained = TRAINED[name](own)
    product = _with_casts(trained.product, arrays.sets[0].dtype) if is_cast else trained.product
    xs = [each.detach().requires_grad_() for each in arrays.sets]
    learned = [*trained.parameters, *trained.biases]

    def run(number: int) -> StepResult:
        x = xs[number]
        ys = product(x)
        found = torch.autograd.grad(ys, [x, *learned], arrays.y_gradients)
        return StepResult(ys, [each.contiguous() for each in found])  # as PyTorch stores gradients

    if name == LAYER:
        warm_up(lambda: run(0))
    return run, partial(_gradients, own, trained)


def _gradients(arrays: LayerArrays, trained: TrainedContender, result: StepResult) -> Gradients:
    """Gradients of a step, those of weights by the chain rule through their conversion, in float64.

    Those of weights are left out if they are not compared.
    """
    of_x, *others = result.gradients
    count = len(trained.parameters)
    weights: Sequence[Tensor] = ()
    if trained.convert and arrays.compares_all:
        wide = [[each.double().requires_grad_() for each in some] for some in arrays.weights]
        given = [each.double() for each in others[:count]]
        weights = torch.autograd.grad(trained.convert(wide), [*chain.from_iterable(wide)], given)
    return Gradients(of_x, weights, others[count:])


def _learned(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Contiguous copies that take gradients."""
    return [each.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for each in tensors]


def _with_own_biases(arrays: LayerArrays) -> tuple[LayerArrays, list[Tensor]]:
    """The same arrays with copies of the biases that take gradients, and these copies."""
    own = copy(arrays)
    learned = _learned([each for each in arrays.biases if each is not None])
    own.biases = [*learned] or arrays.biases
    return own, learned


def by_backends(choose: Callable[[Pattern, str], str]) -> Train:
    """Train with the backend of `ksgen.torch` that is chosen for a factor's pattern and layout, factor by factor."""

    def train(arrays: LayerArrays) -> TrainedContender:
        pairs = [pair for each in arrays.layer.chains for pair in zip(each, arrays.layouts_of(each), strict=True)]
        chosen = [BACKENDS[choose(*pair)] for pair in pairs]

        def convert(weights: Weights) -> list[Tensor]:
            pairs = zip(chosen, chain.from_iterable(weights), strict=True)
            return [each if backend.prepare is None else backend.prepare(each) for backend, each in pairs]

        own, biases = _with_own_biases(arrays)
        parameters = _learned(convert(arrays.weights))
        remaining = zip(chosen, parameters, strict=True)

        def prepare(pattern: Pattern, layout: str, weights: Tensor) -> Product:
            backend, parameter = next(remaining)
            return lambda x: backend.multiply(x, parameter, layout, pattern)

        return TrainedContender(by_factors(prepare)(own), parameters, biases, convert)

    return train


def train_compiled(arrays: LayerArrays) -> TrainedContender:
    """Train with torch.compile of the einsums, which compiles the backward pass too."""
    torch.compiler.reset()  # code compiled for other shapes would make this one dynamic
    trained = by_backends(lambda *_: "einsum")(arrays)
    return replace(trained, product=torch.compile(trained.product, dynamic=False))


def train_dense(arrays: LayerArrays) -> TrainedContender:
    """Train the chains' stacked dense matrices. No weights of factors have gradients."""
    matrix, *biases = _learned([each for each in stacked(arrays) if each is not None])
    return TrainedContender(by_dense(arrays, matrix, biases[0] if biases else None), [matrix], biases)


def train_authors(arrays: LayerArrays) -> TrainedContender:
    """Train the parameters of the structure's authors in the form that they published."""
    structures = libraries.structures_of(arrays, PUBLISHED, FORMS)
    form = FORMS[structures[0].chain.name]

    def convert(weights: Weights) -> list[Tensor]:
        pairs = zip(structures, weights, strict=True)
        return [each for structure, some in pairs for each in structure.to_state(some).values()]

    own, biases = _with_own_biases(arrays)
    parameters = _learned(convert(arrays.weights))
    remaining = iter(parameters)
    states = libraries.states_of(arrays, [{name: next(remaining) for name in each.shapes} for each in structures])

    def product(state: dict[str, Tensor]) -> Product:
        return lambda x: form(x, state)

    return TrainedContender(libraries.in_forms(own, PUBLISHED, map(product, states)), parameters, biases, convert)


def train_layer(arrays: LayerArrays) -> TrainedContender:
    """Train a `KSLinear`, which chooses its kernels as in normal use; weights are tied as the layer's are."""
    layers = arrays.tied_linears()

    def convert(weights: Weights) -> list[Tensor]:
        pairs = zip(chain.from_iterable(weights), chain.from_iterable(arrays.layer.ties), strict=True)
        return [each[SLICES[tie]] for each, tie in pairs]

    parameters = [each for one in layers for each in initialized(one.weights)]
    biases = [one.bias for one in layers if one.bias is not None]
    return TrainedContender(by_linears(arrays, layers), parameters, biases, convert)


TRAINED: dict[str, Train] = {
    "bmm": by_backends(lambda *_: "bmm"),
    # With d > 1, the operator of `strided` would convert the trained matrices in each step.
    "views": by_backends(lambda pattern, _: "strided" if pattern.d == 1 else "bmm"),
    "einsum": by_backends(lambda *_: "einsum"),
    "compiled": train_compiled,
    "authors": train_authors,
    "dense": train_dense,
    LAYER: train_layer,
}
