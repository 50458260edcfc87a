"""Runs a kernel's emitted CUDA text in the emulator, on arrays of a `Problem`, and compares with the float64 reference."""

from typing import Any

import numpy as np
import pytest

from ksgen.emit import Source, render
from ksgen.families import family_named
from ksgen.spec import KernelSpec
from ksgen.verify import Problem, compare, make_problem, tolerance
from tests.simt import is_installed, run_cuda

Array = np.ndarray[Any, Any]


def as_bits(array: Array) -> Array:
    """The same memory as the kernel's own type: 16-bit floats are unsigned shorts there."""
    return array.view(np.uint16) if array.itemsize == 2 else array


def shifted(array: Array, elements: int) -> Array:
    """A copy whose first element lies `elements` past a 16-byte boundary."""
    padded = np.empty(array.size + 32, array.dtype)
    start = (-(padded.ctypes.data // array.itemsize)) % (16 // array.itemsize) + elements
    copy = padded[start : start + array.size].reshape(array.shape)
    copy[...] = array
    return copy


def emulate(problem: Problem, source: Source, *, shift: int = 0, **options: Any) -> Array:
    """Y of one launch: the weights are packed by the source's own packing kernel, the output starts as NaN."""
    if not is_installed(options.get("sanitize", "none")):
        pytest.skip("the emulator needs g++, with its sanitizers' libraries")
    family = family_named(source.family)
    kernel, constants = problem.kernel, source.constants
    packing = family.pack_geometry(kernel, constants)
    real = np.float64 if kernel.precision == "float64" else np.float32
    packed = np.full(family.packed_bytes(kernel, constants) // np.dtype(real).itemsize, np.nan, real)
    run_cuda(source.text, source.pack_entry, packing.grid, packing.block, 0, [as_bits(problem.weights), packed], **options)
    assert np.isfinite(packed).all(), "packing left elements unwritten"
    geometry = family.geometry(kernel, constants, problem.batch)
    y = shifted(np.full(problem.y_shape, np.nan, np.float32).astype(problem.x.dtype), shift)
    extras = [as_bits(extra) for extra in (problem.bias, problem.residual) if extra is not None]
    arguments = [as_bits(shifted(problem.x, shift)), packed, as_bits(y), *extras, problem.batch]
    run_cuda(source.text, source.entry, geometry.grid, geometry.block, geometry.shared_bytes, arguments, **options)
    return y


def check(kernel: KernelSpec, batch: int, constants: Any = None, **options: Any) -> Array:
    """Emulate a kernel and assert that it agrees with the reference; Y."""
    problem = make_problem(kernel, batch)
    source = render(kernel, constants)
    y = emulate(problem, source, **options)
    error, _ = compare(problem, y)
    assert error <= tolerance(kernel.precision, kernel.pattern.c), (error, source.constants)
    return y
