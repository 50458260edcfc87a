"""Products by other libraries: what each library needs, where it is measured, and how it multiplies.

A library is refused with one line if it is not installed, not for this device or type, or cannot multiply by the
pattern. Weights are converted ahead of time, to the library's own format. ksgen depends on none of these libraries, and
imports them only here.
"""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from hashlib import sha256
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ksgen import __version__
from ksgen.bench.problem import LayerArrays
from ksgen.bench.timing import BusyCudaClock
from ksgen.emit.templates import digest_of_all
from ksgen.errors import KsgenError
from ksgen.pattern import Chain, Pattern, square_dyadic
from ksgen.structures import Structure
from ksgen.torch.operators.backends import BACKENDS

Product = Callable[[Tensor], Tensor]
LayerProduct = Callable[[Tensor], Sequence[Tensor]]  # outputs per chain
State = dict[str, Tensor]  # the authors' parameters, by name
Given = ParamSpec("Given")
Result = TypeVar("Result")

_WIDE, _HALF = (torch.float32, torch.float64), (torch.float16, torch.bfloat16)
ONEDNN = "oneDNN"  # PyTorch contains it
MOST_OF_ERROR = 200  # characters of a library's error; a compiler's has pages
_MODULES = {"nvmath-python": "nvmath", "mem-efficient-blr": "triton_funcs", "pyyaml": "yaml"}  # named otherwise


class UnsupportedError(KsgenError):
    """Signals that a baseline cannot be measured here.

    It does not support the pattern, layout, type or device, or its library is missing or fails.
    """


@dataclass(frozen=True)
class ComparedLibrary:
    """A library that multiplies: where it is measured, and how to install it."""

    name: str  # of its distribution, whose version identifies the measurements
    dtypes: tuple[torch.dtype, ...]
    on_gpus: bool | None  # None: on processors and GPUs
    needs: tuple[str, ...] = ()  # distributions that it needs without declaring them
    install: str = ""  # if it is not a distribution

    def check(self, weights: Tensor) -> None:
        """Raise `UnsupportedError` if the library is not for these weights, or is not installed."""
        if self.on_gpus is not None and weights.is_cuda != self.on_gpus:
            raise UnsupportedError(f"{self.name} is measured on {'GPUs' if self.on_gpus else 'processors'} alone")
        if weights.dtype not in self.dtypes:
            raise UnsupportedError(f"{self.name} has no {str(weights.dtype).removeprefix('torch.')}")
        for package in (self.name, *self.needs):
            is_own = package == self.name
            if find_spec(_module_of(package)) is None:
                subject = package if is_own else f"{self.name} needs {package}, which"
                remedy = self.install if is_own and self.install else f"pip install {package}"
                raise UnsupportedError(f"{subject} is not installed: {remedy}")

    def load(self, name: str = "") -> Any:
        """Import the library, or its module of this name."""
        try:
            return import_module(".".join(filter(None, (_module_of(self.name), name))))
        except ImportError as error:
            raise UnsupportedError(f"{self.name} cannot be imported: {error}") from error

    def guarded(self, call: Callable[Given, Result]) -> Callable[Given, Result]:
        """Call that raises `UnsupportedError`, in one line, for any error of the library but exhausted memory."""

        @wraps(call)
        def guarded(*given: Given.args, **options: Given.kwargs) -> Result:
            try:
                return call(*given, **options)
            except (torch.OutOfMemoryError, MemoryError, KsgenError):
                raise
            except Exception as error:  # libraries raise any, such as AssertionError, and those of compilers
                line = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_OF_ERROR]
                raise UnsupportedError(f"{self.name} fails: {line}") from error

        return guarded

    def prepares(
        self, prepare: Callable[Given, Callable[[Tensor], Result]]
    ) -> Callable[Given, Callable[[Tensor], Result]]:
        """Guard the preparation of a product by this library, and the product."""
        guarded = self.guarded(prepare)

        @wraps(prepare)
        def prepares(*given: Given.args, **options: Given.kwargs) -> Callable[[Tensor], Result]:
            return self.guarded(guarded(*given, **options))

        return prepares


LIBRARY = {
    each.name: each
    for each in (
        ComparedLibrary("scipy", _WIDE, on_gpus=False),
        ComparedLibrary("lazylinop", _WIDE, on_gpus=False, needs=("pandas", "pyopencl")),
        ComparedLibrary("torch-structured", (*_WIDE, *_HALF), on_gpus=None, needs=("triton",)),
        ComparedLibrary("nvmath-python", (*_WIDE, *_HALF), on_gpus=True),
        ComparedLibrary(
            "mem-efficient-blr",
            (torch.bfloat16,),
            on_gpus=True,
            needs=("triton", "transformers", "pyyaml"),
            install="put a checkout of github.com/pabillam/mem-efficient-blr on PYTHONPATH",
        ),
    )
}


@cache
def library_version(name: str) -> str:
    """Name and version of a library and of what it needs, as part of a measurement's identity."""
    if name == "ksgen":  # its layers choose among all kernels and PyTorch's products
        return f"ksgen {__version__} {digest_of_all()}, {library_version('torch')}"
    if name == ONEDNN:
        found = re.search(r"MKL-DNN v([0-9.]+)", torch.__config__.show())
        return f"{library_version('torch')}, {ONEDNN} {found[1] if found else 'is missing'}"
    needs = LIBRARY[name].needs if name in LIBRARY else ()
    return ", ".join(f"{each} {_version_of(each)}" for each in (name, *needs))


def _version_of(name: str) -> str:
    """Version of a distribution, or the digest of its files if it is none; "is missing" if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        found = find_spec(_module_of(name))
    if found is None or found.origin is None:
        return "is missing"
    files = sorted(Path(found.origin).parent.glob("*.py"))
    return sha256(b"".join(each.read_bytes() for each in files)).hexdigest()[:8]


def _module_of(name: str) -> str:
    return _MODULES.get(name, name.replace("-", "_"))


# ---- products with sparse matrices


@LIBRARY["scipy"].prepares
def scipy_sparse(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    LIBRARY["scipy"].check(weights)
    from scipy.sparse import csr_array

    parts = tuple(each.numpy() for each in _compressed_rows(weights))
    matrix = csr_array(parts, (pattern.out_features, pattern.in_features))
    if layout == "bsl":
        return lambda x: torch.from_numpy(matrix @ x.numpy())
    return lambda x: torch.from_numpy((matrix @ x.numpy().T).T)


@LIBRARY["nvmath-python"].prepares
def nvmath_sparse(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with a universal sparse tensor in compressed sparse rows.

    The product is planned once per batch size. X and Y are views in both layouts.
    """
    library = LIBRARY["nvmath-python"]
    library.check(weights)
    sparse = library.load("sparse")
    view = sparse.ust.Tensor.from_package
    values, columns, rows = _compressed_rows(weights)
    matrix = view(torch.sparse_csr_tensor(rows, columns, values, (pattern.out_features, pattern.in_features)))
    plans: dict[int, Any] = {}  # by batch size

    def product(x: Tensor) -> Tensor:
        columns = x.t() if layout == "bsf" else x
        batch = columns.shape[1]
        y = x.new_empty((batch, pattern.out_features) if layout == "bsf" else (pattern.out_features, batch))
        operands = view(columns), view(y.t() if layout == "bsf" else y)
        if batch in plans:
            plans[batch].reset_operands_unchecked(b=operands[0], c=operands[1])
        else:
            plans[batch] = sparse.Matmul(matrix, *operands, beta=0.0)
            plans[batch].plan()
        plans[batch].execute()
        return y

    return product


def _compressed_rows(weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, columns and ends of rows of K, with indices of 32 bits."""
    to_csr = BACKENDS["sparse"].prepare
    assert to_csr is not None
    csr = to_csr(weights)
    return csr.values(), csr.col_indices().int(), csr.crow_indices().int()


@LIBRARY["lazylinop"].prepares
def lazylinop_kernels(pattern: Pattern, layout: str, weights: Tensor) -> Product:
    """Multiply with lazylinop's own OpenCL kernels on the processor, including copies to and from OpenCL buffers."""
    LIBRARY["lazylinop"].check(weights)
    if layout != "bsl":
        raise UnsupportedError("lazylinop multiplies columns: batch-size-last alone")
    from lazylinop.butterfly import ksm

    operator = ksm(weights.numpy(), {"backend": (None, "cpu"), "params": None})
    return lambda x: torch.from_numpy(operator @ x.numpy())


# ---- forms of structures, which take rows of x


def in_forms(arrays: LayerArrays, form: str, products: Iterable[Product]) -> LayerProduct:
    """Multiply in a form that takes rows of x, and then apply the layer's other operations.

    A group has a product per chain. A sum has a product per chain, or one of all chains.
    """
    if "bsl" in (arrays.layout, arrays.y_layout):
        raise UnsupportedError(f"the {form}s take batch-size-first alone")
    if arrays.layer.between != "none":
        raise UnsupportedError(f"the {form}s have no activation between factors")
    prepared = list(products)
    return lambda x: arrays.finished(product(x) for product in prepared)


def of_structure(arrays: LayerArrays, form: str, forms: Mapping[str, Callable[[State], Product]]) -> LayerProduct:
    """Multiply in a form of the layer's structure. `forms` prepare its parameters, by the name of its chain."""
    found = structures_of(arrays, form, forms)
    states = states_of(arrays, [each.to_state(weights) for each, weights in zip(found, arrays.weights, strict=True)])
    return in_forms(arrays, form, (forms[found[0].chain.name](state) for state in states))


def structures_of(arrays: LayerArrays, form: str, names: Collection[str]) -> list[Structure]:
    """Structure of each chain of a layer that has such a form; else `UnsupportedError`."""
    found = [each for each in arrays.layer.structures if each and each.chain.name in names]
    if len(found) < len(arrays.layer.chains):
        raise UnsupportedError(f"{arrays.layer.name} is not a structure with a {form}: {', '.join(names)}")
    return found


def states_of(arrays: LayerArrays, states: Sequence[State]) -> Sequence[State]:
    """Parameters that a form takes: of each chain, or of all chains of a sum."""
    return [{name: each for state in states for name, each in state.items()}] if arrays.layer.is_sum else states


@LIBRARY["torch-structured"].prepares
def torch_structured(arrays: LayerArrays) -> LayerProduct:
    """Multiply with torch-structured: by diagonal blocks, a Monarch structure, or a butterfly of 2 x 2 blocks."""
    library, form = LIBRARY["torch-structured"], "torch-structured form"
    library.check(arrays.weights[0][0])
    structure = arrays.layer.structures[0]
    if structure is not None and structure.chain.name == "monarch":
        multiply = library.load("monarch.blockdiag_butterfly_multiply").blockdiag_butterfly_multiply

        def monarch(state: State) -> Product:
            first, second = (each.contiguous() for each in state.values())
            return lambda x: multiply(x, first, second)

        return of_structure(arrays, form, {"monarch": monarch})

    def prepare(chain: Chain, weights: Sequence[Tensor]) -> Product:
        if len(chain) == 1 and chain[0].d == 1 and not chain[0].is_exchanged:
            multiply = library.load("monarch.blockdiag_multiply").blockdiag_multiply
            (blocks,) = (each.squeeze(3) for each in weights)
            return lambda x: multiply(x, blocks)
        return _butterfly(library, chain, weights)

    return in_forms(arrays, form, map(prepare, arrays.layer.chains, arrays.weights))


def _butterfly(library: ComparedLibrary, chain: Chain, weights: Sequence[Tensor]) -> Product:
    count = chain.in_features
    levels = square_dyadic(count).factors if count > 1 and count & (count - 1) == 0 else ()
    if chain.factors not in (levels, levels[::-1]):
        raise UnsupportedError(
            f"{chain}: torch-structured multiplies by diagonal blocks (d = 1), Monarch structures, and butterflies of "
            "2 x 2 blocks over all levels"
        )
    if weights[0].is_cuda and weights[0].dtype != torch.float32:
        raise UnsupportedError("torch-structured's butterflies on GPUs have float32 alone")
    multiply, increases = library.load().butterfly_multiply, chain.factors == levels
    # (stacks, blocks, levels, pairs, 2, 2), where pairs are (i, j)
    twiddle = torch.stack([each.permute(0, 3, 1, 2).flatten(0, 1) for each in weights])[None, None].contiguous()
    return lambda x: multiply(twiddle, x.unsqueeze(1), increases).squeeze(1)


@LIBRARY["mem-efficient-blr"].prepares
def blr(arrays: LayerArrays) -> LayerProduct:
    """Multiply with the Triton kernels of mem-efficient-blr: the fastest that runs here of those that its authors time.

    The time on the GPU decides: the median of three.
    """
    library, x = LIBRARY["mem-efficient-blr"], arrays.sets[0]
    library.check(arrays.weights[0][0])

    def seconds(product: Product) -> float:
        product(x)  # Triton compiles and tunes the kernel
        clock = BusyCudaClock()
        return median(clock(lambda: product(x)) for _ in range(3))

    def fastest(candidates: Callable[[ComparedLibrary, State], Iterator[Product]]) -> Callable[[State], Product]:
        def prepare(state: State) -> Product:
            times: dict[Product, float] = {}
            refused: list[UnsupportedError] = []
            for product in candidates(library, state):
                try:
                    times[product] = library.guarded(seconds)(product)
                except UnsupportedError as error:
                    refused.append(error)
            if not times:
                raise refused[-1]
            return min(times, key=times.__getitem__)

        return prepare

    kernels = {"blast": _blast_kernels, "monarch": _monarch_kernels, "low_rank": _low_rank_kernels}
    return of_structure(arrays, "mem-efficient-blr kernel", {name: fastest(each) for name, each in kernels.items()})


def _blast_kernels(library: ComparedLibrary, state: State) -> Iterator[Product]:
    left, inner, right = state["B"], state["D"], state["C"]
    if len(left) != len(right) or len(left) == 1:
        raise UnsupportedError(
            f"{len(left)} blocks along y and {len(right)} along x: mem-efficient-blr accepts equal numbers from 2 up"
        )
    module, right = library.load("blast_kernels"), right.transpose(1, 2).contiguous()
    given = left.transpose(1, 2).contiguous(), right, inner.transpose(0, 1).contiguous()
    yield _on_sequences(module, "triton_blast_partial_grouped_fp16", *given)
    yield _on_sequences(module, "triton_blast_partial_grouped_persistent_fp16", *given)
    by_rank = left.contiguous(), right, inner.permute(2, 0, 1).contiguous()
    yield _on_sequences(module, "triton_blast_bmm_fp16", *by_rank)


def _monarch_kernels(library: ComparedLibrary, state: State) -> Iterator[Product]:
    first, second = state["blkdiag1"].transpose(1, 2), state["blkdiag2"].contiguous()
    blocks, _, rank = first.shape
    if rank % blocks:
        raise UnsupportedError(f"rank {rank} in {blocks} blocks: mem-efficient-blr accepts multiples of the blocks")
    module = library.load("monarch_kernels")
    first = first.unflatten(2, (-1, blocks)).transpose(2, 3).flatten(2).contiguous()
    yield _on_sequences(module, "triton_monarch_right_fp16", first, second)
    yield _on_sequences(module, "triton_monarch_right_left_fp16", first, second.transpose(1, 2).contiguous())


def _low_rank_kernels(library: ComparedLibrary, state: State) -> Iterator[Product]:
    down, up = (state[name].t().contiguous() for name in ("A", "B"))
    yield _on_sequences(library.load("low_rank_kernels"), "triton_low_rank_fp16", down, up)


def _on_sequences(module: Any, name: str, *parameters: Tensor) -> Product:
    """Product of rows of x by a function that takes (sequences, tokens, features). Another version may lack it."""
    return lambda x: getattr(module, name)(x.unsqueeze(0), *parameters).flatten(0, -2)
