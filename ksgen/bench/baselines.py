"""Baselines: each converts weights (a, b, c, d) to its own format, ahead of time, and returns a function of X.

The conversion is never timed. All return a contiguous Y, in the layout of X. The paper's five (appendix D.1) and
`strided` are backends of `ksgen.torch`. Three more are an expert's code with the same library if `strided` has no views
to work on. Others are torch.compile, a frozen `KSLinear`, and the memory traffic of `bmm` alone. On processors, two
other libraries follow if they are installed.
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

PIECES = (64, 128, 256)  # rows of a piece whose permuted copies a processor's cache holds
PREPARING = 3  # calls of a frozen layer until its call is prepared, see `ksgen.torch.operators.prepared`
MOST_DENSIFIED = 4  # largest d at which multiplications by zeros in between may pay
NEEDED = {"lazylinop": ("pandas", "pyopencl")}  # packages that a library needs without declaring them


class UnsupportedError(KsgenError):
    """Signals that a baseline does not support this pattern and layout."""


@dataclass(frozen=True)
class Baseline:
    """A baseline: its name, a short description, its preparation, and its costs."""

    name: str
    says: str
    prepare: Prepare
    elements: Callable[[Pattern], int] = lambda pattern: pattern.weight_count  # stored in its own weight format
    multiplications: Callable[[Pattern], int] = lambda pattern: pattern.weight_count  # per row of the batch
    library: str = "torch"


def backend(name: str) -> Prepare:
    """Preparation by a backend of `ksgen.torch`, whose weights are prepared once."""

    def prepare(pattern: Pattern, layout: str, weights: Tensor) -> Product:
        chosen = BACKENDS[name]
        ready = weights if chosen.prepare is None else chosen.prepare(weights)
        return lambda x: chosen.multiply(x, ready, layout, pattern)

    return prepare


def strided(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    if layout == "bsf" and pattern.d > 1:
        raise UnsupportedError(
            f"{pattern} in bsf: no view of X has a stride of 1 where d > 1, and permuting is what bmm does"
        )
    return backend("strided")(pattern, layout, weights)


def three_passes(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply like `bmm`, with preallocated memory."""
    by_pieces = _by_pieces(pattern, layout, weights)
    return lambda x: by_pieces(x, len(x))


def pieces(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply like `three_passes`, some rows at a time: the fastest number of `PIECES`, timed at the first product."""
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
    """Function of X and a number of rows: permute, multiply, permute back, as many rows at a time, in memory that it
    keeps.
    """
    if layout == "bsl" or pattern.d == 1:
        raise UnsupportedError(f"{pattern} in {layout}: strided needs no passes over memory")
    a, b, c, d = pattern.shape
    matrices = by_matrix(weights).flatten(0, 1).transpose(1, 2)
    kept: dict[int, tuple[Tensor, Tensor]] = {}

    def product(x: Tensor, rows: int) -> Tensor:
        y = x.new_empty(len(x), pattern.out_features)
        for own, to in zip(x.split(rows), y.split(rows), strict=True):
            batch = len(own)
            if batch not in kept:
                kept[batch] = x.new_empty(a, d, batch, c), x.new_empty(a * d, batch, b)
            moved, result = kept[batch]
            moved.copy_(own.view(batch, a, c, d).permute(1, 3, 0, 2))
            torch.bmm(moved.view(a * d, batch, c), matrices, out=result)
            to.view(batch, a, b, d).copy_(result.view(a, d, batch, b).permute(2, 0, 3, 1))
        return y

    return product


def densified(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply like `strided` for the pattern (a, b d, c d, 1), with zeros."""
    if layout == "bsl" or not 1 < pattern.d <= MOST_DENSIFIED:
        raise UnsupportedError(
            f"{pattern} in {layout}: zeros in between may pay for d of 2 to {MOST_DENSIFIED} in bsf alone"
        )
    a, b, c, d = pattern.shape
    wide = weights.new_zeros(a, b, d, c, d)
    wide.diagonal(dim1=2, dim2=4).copy_(weights)
    return strided(Pattern(a, b * d, c * d, 1), layout, wide.view(a, b * d, c * d, 1))


def compiled(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    torch.compiler.reset()  # code compiled for other shapes would make this one dynamic
    made: Product = torch.compile(backend("einsum")(pattern, layout, weights), dynamic=False)
    return made


def layer(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with a frozen `KSLinear`, which chooses its backend at its first calls."""
    made = KSLinear.from_weights([weights], None, layout=layout).eval().requires_grad_(False).freeze()
    calls = 0

    def product(x: Tensor) -> Tensor:
        nonlocal calls
        while calls < PREPARING:
            calls += 1
            made(x)
        y: Tensor = made(x)
        return y

    return product


def rewriting(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Memory traffic of `bmm` around its product; the product is replaced by zeros."""
    count, first = pattern.a * pattern.d, layout == "bsf"
    results: dict[int, Tensor] = {}

    def product(x: Tensor) -> Tensor:
        blocks = permuted(x, layout, pattern.a, pattern.d)
        batch = blocks.shape[2]
        if 1 not in blocks.stride()[1:]:
            (blocks.transpose(1, 2) if first else blocks).contiguous()  # torch.bmm does the same
        if batch not in results:
            shape = (count, batch, pattern.b) if first else (count, pattern.b, batch)
            results[batch] = x.new_zeros(shape)
        result = results[batch]
        return permuted_back(result.transpose(1, 2) if first else result, layout, pattern.a, pattern.d)

    return product


def scipy_sparse(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    _check_library("scipy", weights, (torch.float32, torch.float64))
    from scipy.sparse import csr_array

    rows = BACKENDS["sparse"].prepare
    assert rows is not None
    made = rows(weights)
    parts = (made.values().numpy(), made.col_indices().int().numpy(), made.crow_indices().int().numpy())
    matrix = csr_array(parts, (pattern.out_features, pattern.in_features))
    if layout == "bsl":
        return lambda x: torch.from_numpy(matrix @ x.numpy())
    return lambda x: torch.from_numpy((matrix @ x.numpy().T).T)


def lazylinop_kernels(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with lazylinop's own OpenCL kernels on the processor, which copy arrays there and back."""
    _check_library("lazylinop", weights, (torch.float32, torch.float64))
    if layout != "bsl":
        raise UnsupportedError("lazylinop multiplies columns: batch-size-last alone")
    try:
        from lazylinop.butterfly import ksm

        operator = ksm(weights.numpy(), {"backend": (None, "cpu"), "params": None})
    except Exception as error:  # lazylinop has no error types
        raise UnsupportedError(f"lazylinop cannot make it: {type(error).__name__}: {error}") from error

    def product(x: Tensor) -> Tensor:
        try:
            return torch.from_numpy(operator @ x.numpy())
        except Exception as error:
            raise UnsupportedError(f"lazylinop cannot multiply it: {type(error).__name__}: {error}") from error

    return product


def _check_library(name: str, weights: Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
    if weights.is_cuda:
        raise UnsupportedError(f"{name} is measured on processors alone")
    if weights.dtype not in dtypes:
        raise UnsupportedError(f"{name} has no {str(weights.dtype).removeprefix('torch.')}")
    for each in (name, *NEEDED.get(name, ())):
        if find_spec(each) is None:
            lacking = name if each == name else f"{name} needs {each}, which"
            raise UnsupportedError(f"{lacking} is not installed: pip install {each}")


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
    """Elements of the dense matrix and of the temporaries that build it: blocks with their zeros along j."""
    return 2 * _dense_count(pattern) + _dense_count(pattern) // pattern.a


BASELINES = {
    each.name: each
    for each in (
        *(Baseline(name, BACKENDS[name].why, backend(name)) for name in ("bmm", "einsum", "bsr")),
        Baseline("dense", BACKENDS["dense"].why, backend("dense"), _dense_extra, _dense_count),
        # A 64-bit column index per value, and the same again during construction.
        Baseline("sparse", BACKENDS["sparse"].why, backend("sparse"), lambda pattern: 12 * pattern.weight_count),
        Baseline("strided", BACKENDS["strided"].why, strided),
        Baseline(
            "three_passes",
            "permute, one batched product, permute back, into memory that is there already",
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
