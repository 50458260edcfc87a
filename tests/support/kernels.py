"""What must hold of every family's kernels: the matrix of them, and the checks, each for the emulator or for a device.

A check takes `run`, which makes one launch: `in_emulator()` or `on_device(device)`.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import count, product
from typing import Any

import numpy as np
import pytest

from ksgen import families
from ksgen.build.build import build, default_caches
from ksgen.devices import Device
from ksgen.emit.render import Source, render
from ksgen.families import ALIASES, FAMILIES, Family, Geometry, Limits, cuda_limits, family_named
from ksgen.families.gradient.family import Gradient
from ksgen.families.gradient.plain import GradientConstants
from ksgen.families.signature import pitches_of
from ksgen.launch.memory import numpy_dtype
from ksgen.measure.verify import Problem, compare, exact_problem, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.reference import wide_type
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.kernel import activations_of
from tests.emulator import TensorMap, is_installed, run_cuda

Array = np.ndarray[Any, Any]
Run = Callable[[Source, str, Geometry, list[Any]], None]

LIMITS = cuda_limits("sm_90a")
PLAIN = Epilogue()
# every branch: d = 1, all of d in a block, d in several blocks, d with a rest; b and c smaller and ragged; a > 1
PATTERNS = {
    "dense": (1, 70, 50, 1),
    "tiny": (1, 1, 1, 1),
    "flat": (2, 37, 13, 5),
    "slab": (1, 33, 9, 16),
    "rest": (3, 5, 7, 11),
    "blocks": (4, 64, 48, 1),
    "aligned": (2, 48, 16, 4),
    "wide": (1, 130, 18, 2),
}
# kinds of them that a GPU's passport proves of families that need one (`ksgen.calibration.proof`)
PROVEN = ("blocks", "aligned")
ALIGNED = {  # the same for families whose tensor maps want rows of whole 16-byte chunks
    "dense": (1, 70, 56, 1),
    "flat": (2, 37, 24, 5),
    "slab": (1, 33, 9, 16),
    "rest": (1, 5, 6, 24),
    "blocks": (4, 64, 48, 1),
    "aligned": (2, 48, 16, 4),
    "wide": (1, 130, 20, 2),
}
IN_EIGHTS = {  # and for the one whose b and c are multiples of 8
    "flat": (2, 40, 24, 5),
    "slab": (1, 24, 72, 16),
    "rest": (3, 8, 104, 24),
    "blocks": (2, 72, 64, 8),
    "aligned": (2, 48, 16, 4),
    "wide": (1, 136, 24, 2),
}
BATCHES = {"multiply": (1, 7, 8, 63, 64, 65, 129), "gradient": (1, 7, 64, 129, 300)}  # 300 has several parts
EMULATED = 3  # multiprocessors: few, so that persistent blocks have several tiles each
BEHIND = 4096  # elements of a buffer behind its array
DENSE: dict[str, int] = {}  # by array, elements from a row's end to the next row: none
MOST_EXACT = 256  # up to which integers are exact in every precision


def _variants() -> Iterator[tuple[str, Family[Any]]]:
    """Families by name. If earlier names mean parts of a family's constants, those parts by these names."""
    for name, family in FAMILIES.items():
        parts = [(alias, own) for alias, own in ALIASES.items() if own.name == name and own is not family]
        yield from parts or [(name, family)]
    yield "gradient", Gradient(GradientConstants)


VARIANTS = dict(_variants())


def _job(family: str) -> str | None:
    """A family's job. None if it emits no CUDA: the emulator runs none of those."""
    every = (
        KernelSpec(Pattern(2, 64, 48, 4), precision, layout, job=job)
        for job, precision, layout in product(("multiply", "gradient"), PRECISIONS, LAYOUTS)
    )
    return next((kernel.job for kernel in every if VARIANTS[family].supports(kernel, LIMITS)), None)


JOB_OF = {family: job for family in VARIANTS if (job := _job(family))}


def kernel_of(
    pattern: tuple[int, ...], precision: str, layout: str, epilogue: Epilogue = PLAIN, batch: int | None = None
) -> KernelSpec:
    """Without an activation where none is defined for its numbers."""
    if epilogue.activation not in activations_of(precision):
        epilogue = replace(epilogue, activation="none")
    return KernelSpec(Pattern(*pattern), precision, layout, epilogue, batch)


def job_of(family: str, kernel: KernelSpec) -> KernelSpec:
    """The kernel with the family's job instead of its own. A gradient has no epilogue."""
    job = JOB_OF.get(family, "multiply")
    return replace(kernel, job=job, epilogue=PLAIN if job == "gradient" else kernel.epilogue)


def supports(family: str, kernel: KernelSpec, limits: Limits = LIMITS) -> bool:
    return VARIANTS[family].supports(job_of(family, kernel), limits)


def is_proven(family: str, name: str) -> bool:
    """Whether a passport proves such a pattern by the family, in each precision and layout."""
    return VARIANTS[family].by_warpgroups and name in PROVEN


def patterns_of(family: str, precision: str) -> dict[str, tuple[int, ...]]:
    """The patterns of a family, with 16 more inputs if split operands need them."""
    if family == "wgmma_permuted":
        return IN_EIGHTS
    takes_anything = VARIANTS[family].takes(kernel_of((1, 1, 1, 1), "float32", "bsf"), 1, aligned=False)
    least = PRECISIONS[precision].fine.least_in if JOB_OF[family] == "multiply" else 1
    found = PATTERNS if takes_anything else ALIGNED
    return {name: (a, b, c if c >= least else c + 16, d) for name, (a, b, c, d) in found.items()}


def ragged_of(family: str, precision: str, layout: str) -> tuple[int, ...]:
    """A pattern none of whose sizes its tile divides."""
    found = (patterns_of(family, precision)[name] for name in ("flat", "dense"))
    return next(pattern for pattern in found if supports(family, kernel_of(pattern, precision, layout)))


def batch_for(source: Source, batch: int) -> int:
    """Return the batch, or the next one that the family takes."""
    family = family_named(source.family)
    return next(each for each in count(batch) if family.takes(source.kernel, each, True))


def batches_for(source: Source) -> list[int]:
    return list(dict.fromkeys(batch_for(source, batch) for batch in BATCHES[source.kernel.job]))


def source_of(family: str, kernel: KernelSpec, constants: Any = None, limits: Limits = LIMITS) -> Source:
    """A family's text for its job, with its default constants unless others are given."""
    kernel = job_of(family, kernel)
    if not supports(family, kernel, limits):
        pytest.skip(f"{family} does not support {kernel.name} here")
    return render(kernel, constants or VARIANTS[family].default(kernel, limits), family=family)


def _body(source: Source) -> str:
    """The text without its name and the comments of its first lines. Precisions that are computed alike share it."""
    return "\n".join(line for line in source.text.splitlines() if not line.startswith("//")).replace(source.entry, "")


def _served() -> list[tuple[str, str, str]]:
    """Every (family, precision, layout), once per text."""
    found: dict[str, tuple[str, str, str]] = {}
    for family, precision, layout in product(JOB_OF, PRECISIONS, LAYOUTS):
        kernels = (kernel_of(pattern, precision, layout) for pattern in patterns_of(family, precision).values())
        if kernel := next((each for each in kernels if supports(family, each)), None):
            # any, and at once: a default is searched for
            constants = next(iter(VARIANTS[family].space(job_of(family, kernel), LIMITS)))
            found.setdefault(_body(source_of(family, kernel, constants)), (family, precision, layout))
    return list(found.values())


SERVED = _served()
MATRIX = [
    (*each, name)
    for each in SERVED
    for name, pattern in patterns_of(*each[:2]).items()
    if supports(each[0], kernel_of(pattern, *each[1:]))
]


# ---- one launch


def in_emulator(**options: Any) -> Run:
    """Options of `run_cuda`. Of a source, the code for a given target runs."""
    target = re.sub("[^0-9]", "", options.get("target", ""))
    if not is_installed(options.get("sanitize", "none")):
        pytest.skip("the emulator needs g++, with its sanitizers' libraries")

    def run(source: Source, entry: str, geometry: Geometry, args: list[Any]) -> None:
        launched = (geometry.launched(EMULATED), geometry.block, geometry.shared_bytes)
        is_chosen = not target or "#define __CUDA_ARCH__ " in source.text
        text = source.text if is_chosen else f"#define __CUDA_ARCH__ {target}0\n{source.text}"
        run_cuda(text, entry, *launched, args, early=geometry.starts_early, **options)

    return run


def on_device(device: Device) -> Run:
    def run(source: Source, entry: str, geometry: Geometry, args: list[Any]) -> None:
        launch(device, source.text, source.entry, entry, geometry, args)

    return run


def launch(device: Device, text: str, built_as: str, entry: str, geometry: Geometry, args: list[Any]) -> None:
    """Upload, launch, and bring back every array that may have been written. An array given twice is one buffer."""
    handle = _load(device, text, built_as, entry, geometry.shared_bytes, geometry.starts_early)
    named = (arg.array if isinstance(arg, TensorMap) else arg for arg in args)
    arrays = {id(array): array for array in named if isinstance(array, np.ndarray)}
    buffers = {key: device.allocate(array.nbytes) for key, array in arrays.items()}
    for key, array in arrays.items():
        device.upload(buffers[key], array)
    given = tuple(_given(device, buffers, arg) for arg in args)
    device.launch(
        handle, geometry.launched(device.limits.multiprocessors), geometry.block, geometry.shared_bytes, given, None
    )
    for key, array in arrays.items():
        if array.flags.writeable:
            device.download(array, buffers[key])


@lru_cache(maxsize=32)
def _load(device: Device, text: str, built_as: str, entry: str, shared_bytes: int, starts_early: bool) -> Any:
    binary = build(text, built_as, device.target, device.compiler(), default_caches())
    return device.load(binary, entry, shared_bytes, starts_early)


def _given(device: Device, buffers: dict[int, Any], arg: Any) -> Any:
    """An argument as a device takes it: signed, at most 64 bits."""
    if isinstance(arg, TensorMap):
        described = families.TensorMap(
            "x", arg.element_bytes, tuple(arg.sizes), tuple(arg.strides), tuple(arg.box), arg.swizzle
        )
        return device.encode_map(described, int(buffers[id(arg.array)]))
    return buffers.get(id(arg), arg.view(np.int64) if isinstance(arg, np.uint64) else arg)


# ---- one product


def as_bits(array: Array) -> Array:
    """The same memory in the kernel's own type: 16-bit floats are unsigned shorts there."""
    return array.view(np.uint16) if array.itemsize == 2 else array


def shifted(array: Array, elements: int = 0) -> Array:
    """A copy whose first element lies `elements` past a 16-byte boundary."""
    padded = np.empty(array.size + 32, array.dtype)
    start = (-(padded.ctypes.data // array.itemsize)) % (16 // array.itemsize) + elements
    copy = padded[start : start + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def in_rows(flat: Array, shape: tuple[int, ...], pitch: int) -> Array:
    """A view of the rows in an array, each `pitch` elements behind the one before."""
    return np.lib.stride_tricks.as_strided(flat, shape, (pitch * flat.itemsize, flat.itemsize))


def spaced(array: Array, gap: int, fill: Array) -> Array:
    """The rows of an array in memory that ends with the last of them, with `gap` elements between two, which `fill`
    is repeated in.
    """
    rows, columns = array.shape
    flat = np.resize(fill.astype(array.dtype), (rows - 1) * (columns + gap) + columns)
    in_rows(flat, array.shape, columns + gap)[...] = array
    return flat


_whole: set[str] = set()  # sources whose packing was seen to write every word


def pack(problem: Problem, source: Source, run: Run) -> Array:
    """The weights as the source's own packing kernel leaves them. It must write every word, whatever the weights are:
    it is asked once.
    """
    family, kernel = family_named(source.family), problem.kernel
    packed = shifted(np.full(family.packed_bytes(kernel, source.constants), 0xFF, np.uint8))
    geometry = family.pack_geometry(kernel, source.constants)
    run(source, source.second_entry, geometry, [as_bits(problem.given[-1]), packed])
    if source.text not in _whole:  # what nothing wrote differs where other memory was there before
        again = shifted(np.zeros(packed.size, np.uint8))
        run(source, source.second_entry, geometry, [as_bits(problem.given[-1]), again])
        assert (again == packed).all(), "packing left bytes unwritten"
        _whole.add(source.text)
    return packed


def _run_all(source: Source, geometry: Geometry, maps: list[TensorMap], arguments: list[Any], run: Run) -> None:
    for each in geometry.before:
        run(source, source.entry_of(each.name), each.geometry, arguments)
    run(source, source.entry, geometry, [*maps, *arguments])
    for each in geometry.after:
        run(source, source.entry_of(each.name), each.geometry, arguments)


def multiply(
    problem: Problem, source: Source, run: Run, *, shift: int = 0, behind: int = 0, in_place: bool = False,
    gaps: Mapping[str, int] = DENSE, **shifts: int,
) -> Array:  # fmt: skip
    """Compute Y in one launch, over NaN or, `in_place`, over the residual. `behind` elements of Inf and NaN follow X.
    Elements that must not change follow Y. X and Y begin `shift` elements past a 16-byte boundary. `shifts` states the
    same of `bias` and `residual`. Kernels of slices have `gaps` elements between rows: Inf and NaN in X and the
    residual, elements that must not change in Y.
    """
    family, x, kind = family_named(source.family), problem.given_x, numpy_dtype(problem.kernel.dtype)
    bad = np.array([np.nan, np.inf, -np.inf])
    columns = {"x": x.shape[1], "y": problem.y_shape[1], "residual": problem.y_shape[1]}
    gap_of = dict.fromkeys(columns, 0) | dict(gaps) | ({"residual": gaps.get("y", 0)} if in_place else {})
    pitches = {name: columns[name] + gap_of[name] for name in columns}
    y = np.full(problem.y_shape, 0xFF, np.uint8).repeat(kind.itemsize, 1).view(kind)
    y = shifted(np.concatenate([spaced(y, gap_of["y"], y[0]), np.resize(y[0], behind)]), shift)
    rows_of_y = in_rows(y, problem.y_shape, pitches["y"])
    residual = None if problem.residual is None else spaced(problem.residual, gap_of["residual"], bad)
    added = {"bias": problem.bias, "residual": residual}
    extras = [as_bits(shifted(extra, shifts.get(name, 0))) for name, extra in added.items() if extra is not None]
    if in_place and problem.residual is not None:
        rows_of_y[...] = problem.residual
    bad_x = bad if problem.inputs is None else np.array([0x7F, 0xFF], np.uint8)  # NaN of either float
    x = shifted(np.concatenate([spaced(x, gap_of["x"], bad_x), np.resize(bad_x, behind).astype(x.dtype)]), shift)
    geometry = family.geometry(problem.kernel, source.constants, problem.batch)
    workspace = shifted(np.full(geometry.workspace_bytes, 0xFF, np.uint8))
    arrays = {"x": as_bits(x), "y": as_bits(y), "workspace": workspace}
    extras = [*extras[:-1], arrays["y"]] if in_place else extras
    maps = [
        TensorMap(arrays[each.operand], each.sizes, each.strides, each.box, each.swizzle, each.item_bytes)
        for each in family.maps(problem.kernel, source.constants, problem.batch)
    ]
    given = [workspace] if geometry.workspace_bytes else []
    told = [pitches[name] for name in pitches_of(problem.kernel)]
    _run_all(
        source,
        geometry,
        maps,
        [arrays["x"], pack(problem, source, run), arrays["y"], *given, *extras, *told, problem.batch],
        run,
    )
    is_beside = np.ones(y.shape, bool)
    in_rows(is_beside, problem.y_shape, pitches["y"])[...] = False
    assert (y[is_beside].view(np.uint8) == 0xFF).all(), "the kernel wrote behind Y, or between its rows"
    return rows_of_y.copy()


def differentiate(problem: Problem, source: Source, run: Run, *, shift: int = 0, behind: int = 0) -> Array:
    """Compute the weights' gradient in one launch, or in two if the batch has parts. Gradient and parts are NaN before.

    `behind` elements of Inf and NaN follow X and dY. Elements that must not change follow the gradient.
    """
    assert problem.grad_y is not None
    family, kernel, dtype = family_named(source.family), problem.kernel, problem.x.dtype
    bad = np.resize([np.nan, np.inf, -np.inf], behind).astype(dtype)
    x, grad_y = (shifted(np.concatenate([array.reshape(-1), bad]), shift) for array in (problem.x, problem.grad_y))
    size = kernel.pattern.weight_count
    grad = shifted(np.full((size + behind) * dtype.itemsize, 0xFF, np.uint8).view(dtype), shift)
    geometry = family.geometry(kernel, source.constants, problem.batch)
    parts = shifted(np.full(geometry.workspace_bytes or 16, 0xFF, np.uint8))
    _run_all(source, geometry, [], [as_bits(x), as_bits(grad_y), as_bits(grad), parts, problem.batch], run)
    assert (grad[size:].view(np.uint8) == 0xFF).all(), "the kernel wrote behind the gradient"
    return grad[:size].reshape(kernel.pattern.shape)


def result(problem: Problem, source: Source, run: Run, **options: Any) -> Array:
    return (differentiate if problem.kernel.job == "gradient" else multiply)(problem, source, run, **options)


# ---- checks


def check(source: Source, batch: int, run: Run, **options: Any) -> Array:
    """The kernel agrees with the float64 reference on random arrays, at the batch or the next that its family takes;
    what it gave.
    """
    problem = make_problem(source.kernel, batch_for(source, batch))
    y = result(problem, source, run, **options)
    error, _ = compare(problem, y)
    assert error <= tolerance(source.kernel.precision, problem.terms), (error, source.constants)
    return y


def check_exact(source: Source, batch: int, run: Run) -> None:
    """The result is right to the last bit if nothing but the result itself is rounded."""
    kernel = source.kernel
    assert kernel.job == "gradient" or 2 * kernel.pattern.c + 4 <= MOST_EXACT, f"c={kernel.pattern.c} is too large"
    problem = exact_problem(kernel, batch_for(source, batch))
    got = result(problem, source, run)
    np.testing.assert_array_equal(got.astype(wide_type(got)), problem.truth.astype(got.dtype).astype(wide_type(got)))


def check_leaks(source: Source, batch: int, run: Run) -> None:
    """Inf and NaN stay where they belong, and all else is the same to the last bit."""
    (_check_leaks_of_gradient if source.kernel.job == "gradient" else _check_leaks_of_product)(source, batch, run)


def _by_entry(array: Array, layout: str) -> Array:
    return array if layout == "bsf" else array.T


def _check_leaks_of_product(source: Source, batch: int, run: Run) -> None:
    """Inf and NaN in X stay in their batch entry and (i, j) block, those in the weights in their output. They are
    planted in half of the blocks and a tenth of the outputs, so next to everything, and behind X, where padding would
    be read from."""
    kernel, batch = source.kernel, batch_for(source, batch)
    random = np.random.default_rng(batch)
    a, b, c, d = kernel.pattern.shape
    clean = make_problem(kernel, batch)
    bad = [np.inf, np.nan, -np.inf]

    def by_entry(array: Array) -> Array:
        return _by_entry(array, kernel.layout)

    blocks, outputs = random.random((batch, a, d)) < 0.5, random.random((a, b, d)) < 0.1
    x, weights = by_entry(clean.x).reshape(batch, a, c, d).copy(), clean.weights.copy()
    (s, i, j), (wi, k, wj) = np.nonzero(blocks), np.nonzero(outputs)
    x[s, i, random.integers(0, c, s.size), j] = random.choice(bad, s.size)
    weights[wi, k, random.integers(0, c, k.size), wj] = random.choice(bad, k.size)
    planted = replace(clean, x=np.ascontiguousarray(by_entry(x.reshape(batch, a * c * d))), weights=weights)

    touched = by_entry((blocks[:, :, None, :] | outputs[None]).reshape(batch, a * b * d))
    expected, got = multiply(clean, source, run), multiply(planted, source, run, behind=BEHIND)
    assert np.isfinite(expected).all()
    assert not np.isfinite(got[touched]).any()
    np.testing.assert_array_equal(got[~touched], expected[~touched])


def _check_leaks_of_gradient(source: Source, batch: int, run: Run) -> None:
    """Inf and NaN in X stay in their input and (i, j) block, those in dY in their output. They are planted in a third
    of both, so next to everything, and behind both, where padding would be read from."""
    kernel, random = source.kernel, np.random.default_rng(batch)
    a, b, c, d = kernel.pattern.shape
    clean = make_problem(kernel, batch)
    assert clean.grad_y is not None

    def planted(array: Array, rows: int) -> tuple[Array, Array]:
        where = random.random((a, rows, d)) < 0.3
        i, row, j = np.nonzero(where)
        values = _by_entry(array, kernel.layout).reshape(batch, a, rows, d).copy()
        values[random.integers(0, batch, i.size), i, row, j] = random.choice([np.inf, np.nan, -np.inf], i.size)
        return np.ascontiguousarray(_by_entry(values.reshape(batch, a * rows * d), kernel.layout)), where

    (x, inputs), (grad_y, outputs) = planted(clean.x, c), planted(clean.grad_y, b)
    touched = outputs[:, :, None, :] | inputs[:, None, :, :]
    expected = differentiate(clean, source, run)
    got = differentiate(replace(clean, x=x, grad_y=grad_y), source, run, behind=BEHIND)
    assert np.isfinite(expected).all()
    assert not np.isfinite(got[touched]).any()
    np.testing.assert_array_equal(got[~touched], expected[~touched])


def ulps(y: Array, other: Array) -> int:
    """The most floats between two arrays' finite entries."""
    steps = []
    for each in (y, other):
        elements = each.reshape(-1).view(each.real.dtype)  # of complex numbers both parts
        bits = elements.view(f"i{elements.itemsize}").astype(np.int64)
        steps.append(np.where(bits < 0, np.iinfo(f"i{elements.itemsize}").min - bits, bits))
    return int(np.abs(steps[0] - steps[1]).max(initial=0))
