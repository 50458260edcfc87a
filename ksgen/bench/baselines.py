"""Baselines: each converts weights (a, b, c, d) to its own format, ahead of time, and returns a function of X.

The conversion is never timed. Y has the layout of X. Contenders make Y contiguous, and that copy is timed.

The paper's five (appendix D.1) and `strided` are backends of `ksgen.torch`. `three_passes`, `densified` and `pieces`
are what an expert writes in PyTorch for products without views for `strided`. `compiled` is torch.compile, `layer` a
frozen `KSLinear`, and `rewriting` the memory traffic of `bmm` alone. `scipy` and `lazylinop` run on processors, if they
are installed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from time import perf_counter

import torch
from torch import Tensor

from ksgen.bench.roster import LAYER
from ksgen.errors import KsgenError
from ksgen.pattern import Pattern
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.operators.backends import BACKENDS
from ksgen.torch.operators.products import by_matrix, permuted, permuted_back

Product = Callable[[Tensor], Tensor]
Prepare = Callable[[Pattern, str, Tensor], Product]

PIECES = (64, 128, 256)  # rows of the batch per piece; a processor's cache holds a piece's permuted copies
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
    prepare: Prepare
    elements: Callable[[Pattern], int] = lambda pattern: pattern.weight_count  # stored in the baseline's weight format
    multiplications: Callable[[Pattern], int] = lambda pattern: pattern.weight_count  # per row of the batch
    library: str = "torch"


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


def three_passes(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply like `bmm`, with preallocated memory."""
    by_pieces = _by_pieces(pattern, layout, weights)
    return lambda x: by_pieces(x, len(x))


def pieces(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply like `three_passes`, but only some rows of the batch at a time.

    The first product of each batch size times all `PIECES`; the fastest number of rows is then kept.
    """
    if weights.is_cuda:
        raise UnsupportedError("pieces are measured on processors alone, whose caches hold them")
    by_pieces = _by_pieces(pattern, layout, weights)
    fastest: dict[int, int] = {}  # rows of a piece, by batch size

    def seconds(x: Tensor, rows: int) -> float:
        by_pieces(x, rows)  # the first use allocates
        begin = perf_counter()
        by_pieces(x, rows)
        return perf_counter() - begin

    def product(x: Tensor) -> Tensor:
        if len(x) not in fastest:
            fastest[len(x)] = min(PIECES, key=lambda rows: seconds(x, rows))
        return by_pieces(x, fastest[len(x)])

    return product


def _by_pieces(pattern: Pattern, layout: str, weights: Tensor) -> Callable[[Tensor, int], Tensor]:
    """Return a function of X and a number of rows per piece.

    It permutes, multiplies and permutes back piece by piece, in memory that it reuses.
    """
    if layout == "bsl" or pattern.d == 1:
        raise UnsupportedError(f"{pattern} in {layout}: strided needs no passes over memory")
    a, b, c, d = pattern.shape
    matrices = by_matrix(weights).flatten(0, 1).transpose(1, 2)
    buffers: dict[int, tuple[Tensor, Tensor]] = {}  # permuted X and Y, by rows of the piece

    def product(x: Tensor, rows: int) -> Tensor:
        y = x.new_empty(len(x), pattern.out_features)
        for x_piece, y_piece in zip(x.split(rows), y.split(rows), strict=True):
            batch = len(x_piece)
            if batch not in buffers:
                buffers[batch] = x.new_empty(a, d, batch, c), x.new_empty(a * d, batch, b)
            permuted_x, permuted_y = buffers[batch]
            permuted_x.copy_(x_piece.view(batch, a, c, d).permute(1, 3, 0, 2))
            torch.bmm(permuted_x.view(a * d, batch, c), matrices, out=permuted_y)
            y_piece.view(batch, a, b, d).copy_(permuted_y.view(a, d, batch, b).permute(2, 0, 3, 1))
        return y

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


def compiled(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    torch.compiler.reset()  # code compiled for other shapes would make this one dynamic
    compiled_einsum: Product = torch.compile(backend("einsum")(pattern, layout, weights), dynamic=False)
    return compiled_einsum


def layer(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with a frozen `KSLinear`, which chooses its backend at its first calls."""
    frozen = KSLinear.from_weights([weights], None, layout=layout).eval().requires_grad_(False).freeze()
    calls = 0

    def product(x: Tensor) -> Tensor:
        nonlocal calls
        while calls < PREPARING:
            calls += 1
            frozen(x)
        y: Tensor = frozen(x)
        return y

    return product


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


def _densified_count(pattern: Pattern) -> int:
    return pattern.d * pattern.weight_count


def _dense_count(pattern: Pattern) -> int:
    return pattern.in_features * pattern.out_features


def _dense_extra(pattern: Pattern) -> int:
    """Elements of the dense matrix and of two temporaries: a copy of it, and the blocks with their zeros along j."""
    return 2 * _dense_count(pattern) + _dense_count(pattern) // pattern.a


BASELINES = {
    each.name: each
    for each in (
        *(Baseline(name, BACKENDS[name].why, backend(name)) for name in ("bmm", "einsum", "bsr")),
        Baseline("dense", BACKENDS["dense"].why, backend("dense"), _dense_extra, _dense_count),
        # A value and its 64-bit column index per weight, and the same again during construction.
        Baseline("sparse", BACKENDS["sparse"].why, backend("sparse"), lambda pattern: 12 * pattern.weight_count),
        Baseline("strided", BACKENDS["strided"].why, strided),
        Baseline(
            "three_passes",
            "permute, one batched product, permute back, into preallocated memory",
            three_passes,
        ),
        Baseline(
            "densified",
            "one batched product on views, with zeros in between",
            densified,
            _densified_count,
            _densified_count,
        ),
        Baseline(
            "pieces",
            "permute, one batched product, permute back, some rows at a time, which stay in a processor's cache",
            pieces,
        ),
        Baseline("compiled", "torch.compile of the einsum", compiled),
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
            scipy_sparse,
            lambda pattern: 14 * pattern.weight_count,
            library="scipy",
        ),
        Baseline("lazylinop", "lazylinop's own kernels, by OpenCL", lazylinop_kernels, library="lazylinop"),
        Baseline(
            "rewriting", "the permutations of bmm alone, no product", rewriting, lambda pattern: 0, lambda pattern: 0
        ),
    )
}
