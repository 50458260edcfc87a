"""Complex numbers on processors: every way in which lanes lie, in both layouts and precisions, natively and by
OpenCL.
"""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ksgen import reference
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, Limits, check
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import compare, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.measure.test_verify import needs_opencl
from tests.support.hasty import compiles_hastily
from tests.support.program import needs_device

__all__ = ["compiles_hastily"]  # which pytest finds by its name

COMPLEX = ("complex64", "complex128")
PATTERNS = [(6, 16, 16, 1), (1, 24, 12, 2), (3, 4, 4, 4), (2, 3, 5, 3), (1, 5, 7, 37), (2, 2, 2, 64), (9, 2, 2, 1)]
RUNTIMES = [
    pytest.param("native:0", marks=needs_device),
    pytest.param("opencl:0", marks=[needs_opencl, pytest.mark.slow, pytest.mark.optimized]),
]
TURNS = list(product(PATTERNS, LAYOUTS))
CASES = [(pattern, COMPLEX[number // 2 % 2 ^ number % 2], layout) for number, (pattern, layout) in enumerate(TURNS)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("pattern", "precision", "layout"), CASES)
def test_products_agree(
    pattern: tuple[int, ...], precision: str, layout: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products agree plain, and with bias and residual, at a batch of one, of whole tiles, and with a remainder."""
    monkeypatch.setenv("KSGEN_DEVICE", runtime)
    for batch, epilogue in (
        (1, Epilogue(bias=True, residual=True)),
        (67, Epilogue(bias=True, residual=True)),
        (96, Epilogue()),
    ):
        problem = make_problem(KernelSpec(Pattern(*pattern), precision, layout, epilogue), batch)
        y = Launcher(*pattern)(problem.x, problem.weights, layout=layout, bias=problem.bias, residual=problem.residual)
        assert y.dtype == precision
        assert compare(problem, y)[0] <= tolerance(precision, problem.terms)


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize(("pattern", "precision", "layout"), CASES)
def test_gradients_have_the_conjugates_of_x(
    pattern: tuple[int, ...], precision: str, layout: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", runtime)
    for batch in (3, 133):
        problem = make_problem(KernelSpec(Pattern(*pattern), precision, layout, job="gradient"), batch)
        found = Launcher(*pattern).gradient(problem.x, problem.grad_y, layout=layout)
        assert compare(problem, found)[0] <= tolerance(precision, problem.terms)


@needs_device
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_chain_is_its_factors(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor multiplies by both factors in one launch."""
    monkeypatch.setenv("KSGEN_DEVICE", "native:0")
    patterns = [Pattern(1, 6, 6, 10), Pattern(6, 10, 10, 1)]
    problems = [make_problem(KernelSpec(pattern, "complex64", layout), 37) for pattern in patterns]
    weights = [problem.weights for problem in problems]
    y = ChainLauncher(*(Launcher(*pattern.shape) for pattern in patterns))(problems[0].x, weights, layout=layout)
    truth = problems[0].x
    for pattern, own in zip(patterns, weights, strict=True):
        truth = reference.multiply(pattern, truth, own, layout)
    assert np.linalg.norm(y - truth) <= 2 * tolerance("complex64", 10) * np.linalg.norm(truth)


def test_tiles_leave_space_for_what_is_kept_twice() -> None:
    """Searches offer at most half as many lanes as an OpenCL vector has elements."""
    for bytes_of_a_vector, registers in ((64, 32), (32, 16), (16, 16)):
        limits = Limits(1 << 16, registers=0, is_cpu=True, vector_bytes=bytes_of_a_vector, multiprocessors=4)
        for precision, layout, pattern in product(COMPLEX, LAYOUTS, PATTERNS):
            kernel = KernelSpec(Pattern(*pattern), precision, layout)
            for found, family in ((kernel, "vector"), (replace(kernel, job="gradient"), "cpu_gradient")):
                constants = FAMILIES[family].default(found, limits)
                is_kept_down = family == "cpu_gradient" and FAMILIES[family].shape(found, constants).holds_inputs
                kept = constants.height if is_kept_down else constants.width
                assert constants.height * constants.width + 2 * kept + 2 <= registers
                assert constants.lanes == max(2, bytes_of_a_vector // found.real_bytes)
                check(FAMILIES[family], found, constants)


@pytest.mark.parametrize("family", ["vector", "cpu_gradient"])
def test_vectors_of_more_parts_than_opencl_has_are_refused(family: str) -> None:
    """The widest vectors of OpenCL have 16 elements."""
    limits = Limits(1 << 16, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=4)
    kernel = KernelSpec(Pattern(1, 48, 48, 1), "complex64", job="multiply" if family == "vector" else "gradient")
    constants = replace(FAMILIES[family].default(kernel, limits), lanes=16)
    with pytest.raises(ConstantsError, match="lanes=16 must be at most 8 in complex numbers; try 8"):
        check(FAMILIES[family], kernel, constants)
