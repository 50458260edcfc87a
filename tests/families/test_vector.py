"""The family for processors, run through OpenCL on host memory as it lies: right, within its arrays, nothing else
written.
"""

import ctypes
import math
import mmap
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.build.build import build, default_caches
from ksgen.emit.render import render
from ksgen.errors import ConstantsError, DeviceError, ToolchainError
from ksgen.families import Limits, check, cuda_limits, family_for
from ksgen.families.tiles import divide_up
from ksgen.families.vector.defaults import fitted
from ksgen.families.vector.family import Vector
from ksgen.families.vector.planes import period_of
from ksgen.families.vector.shape import VectorConstants, VectorTiling
from ksgen.launch.choice import Choice
from ksgen.launch.plan import load, make_plan
from ksgen.launch.planner import PLANNER
from ksgen.launcher import Launcher
from ksgen.measure.verify import Problem, compare, exact_problem, fault_of, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from ksgen.wisdom import Entry, save
from tests.measure.test_verify import needs_opencl
from tests.support.host_launches import agrees_between_fences, launch, planned
from tests.support.host_memory import (
    NOTHING,
    Array,
    nothing,
    placed,
    processor,
    stay_within_their_arrays,
)
from tests.support.native import chosen_native

FAMILY = Vector()
CPU = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False)
WAYS = ("outputs", "batch")
PATTERNS = {
    "one": (1, 1, 1, 1),
    "pairs": (64, 2, 2, 1),
    "many little": (300, 1, 3, 2),
    "b 33": (1, 33, 5, 1),
    "c 33": (2, 3, 33, 2),
    "d 3": (2, 5, 7, 3),
    "d 6": (1, 20, 16, 6),
    "d 7": (1, 6, 12, 7),
    "d 16": (2, 7, 2, 16),
    "d 20": (1, 12, 6, 20),
    "d 24": (2, 3, 5, 24),
    "d 32": (1, 5, 6, 32),
    "d 33": (1, 2, 3, 33),
    "no edges": (2, 24, 32, 4),
}
BATCHES = (1, 2, 7, 16, 17, 33, 100)
SIZES = ((1, 1), (6, 2), (3, 4), (2, 3), (8, 1), (5, 2), (1, 6))  # of tiles
EPILOGUES = (
    Epilogue(), Epilogue(bias=True), Epilogue(residual=True), Epilogue(True, "relu", True), Epilogue(True, "gelu"),
    Epilogue(activation="gelu_tanh", residual=True), Epilogue(activation="silu"),
)  # fmt: skip


def kernel_of(
    shape: tuple[int, ...],
    precision: str = "float32",
    layout: str = "bsf",
    epilogue: Epilogue | None = None,
    batch: int | None = None,
) -> KernelSpec:
    return KernelSpec(Pattern(*shape), precision, layout, epilogue or Epilogue(), batch)


def constants_of(
    kernel: KernelSpec,
    along: str,
    lanes: int,
    size: tuple[int, int] = (3, 2),
    parts: int = 3,
    units: int = 2,
    pairs: int = 0,
) -> VectorConstants:
    """Tiles that leave ragged edges, short blocks, and parts where they may be; inputs in place where they may be read
    there. Tiles are as wide as they must be where j do not divide the lanes."""
    if along == "outputs" and kernel.pattern.d < 2 * lanes:
        size = (size[0], divide_up(size[1], period_of(kernel.pattern.d, lanes)) * period_of(kernel.pattern.d, lanes))
    found = VectorConstants(
        along, lanes, *size, units * (size[0] if along == "outputs" else lanes), 1, 0, units % 2, pairs
    )
    if not FAMILY.keeps_rules(kernel, found):
        found = replace(found, panel=1)
    shape = VectorTiling(kernel, found)
    return replace(found, parts=min(parts, shape.columns))


def arrays_of(problem: Problem) -> dict[str, Array]:
    weights = problem.given[-1].view(problem.x.dtype)  # bytes, where they are stored in eight bits
    empty = np.zeros(problem.y_shape, problem.x.dtype)
    found = {"x": problem.x, "weights 0": weights, "y": empty, "bias": problem.bias, "residual": problem.residual}
    return {name: each for name, each in found.items() if each is not None}


def multiplied(
    problem: Problem, constants: Any, groups: int | None = None, boundary: int = 1, behind: int = 0
) -> Array:
    """The kernel's result; nothing else was written to. `groups`: how many are launched; `boundary`: where arrays
    begin, or how many elements behind it.
    """
    kernel, device = problem.kernel, processor()
    plan = planned(device, kernel, constants, problem.batch)
    if groups:
        plan = replace(plan, grid=groups, workspace_bytes=plan.workspace_bytes // plan.grid * groups)
    memory, places = placed(arrays_of(problem), kernel.dtype, boundary, behind)
    places["y"].view(np.uint8)[:] = NOTHING
    before = memory.copy()
    launch(device, (plan, [plan]), places)
    result = places["y"].reshape(problem.y_shape).copy()
    places["y"].view(np.uint8)[:] = NOTHING
    np.testing.assert_array_equal(memory, before)
    return result


def agrees(kernel: KernelSpec, constants: Any, batch: int, boundary: int = 1) -> None:
    problem = make_problem(kernel, batch)
    error, _ = compare(problem, multiplied(problem, constants, boundary=boundary))
    assert error <= tolerance(kernel.precision, kernel.pattern.c), (kernel, constants, batch, error)


# ---- what is right


def matrix() -> Iterator[object]:
    """Every pattern and layout; ways, lanes, precisions, epilogues and tiles in turn."""
    for number, ((name, shape), layout) in enumerate(product(PATTERNS.items(), LAYOUTS)):
        precision = ("float32", "bfloat16", "float32", "float64", "float16")[number % 5]
        lanes = (16, 4, 8)[number // 2 % 3] // (2 if precision == "float64" else 1)
        kernel = kernel_of(shape, precision, layout, EPILOGUES[number % len(EPILOGUES)])
        along = "outputs" if number % 4 in (0, 3) else "batch"
        constants = constants_of(kernel, along, lanes, SIZES[number % 6], 1 + number % 4, 1 + number % 3)
        yield pytest.param(kernel, constants, id=f"{name} {precision} {layout} along {along} by {lanes}")


@pytest.mark.optimized
@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("kernel", "constants"), list(matrix()))
def test_agrees_with_float64(kernel: KernelSpec, constants: VectorConstants) -> None:
    for batch in BATCHES:
        agrees(kernel, constants, batch)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(
    ("shape", "square"), [((2, 21, 32, 1), 8), ((2, 13, 11, 2), 4), ((2, 13, 22, 2), 4), ((1, 9, 10, 4), 2)]
)
@pytest.mark.parametrize(("along", "size"), [("outputs", (3, 2)), ("batch", (3, 2)), ("batch", (11, 1))])
def test_whole_squares_of_weights_are_transposed(
    along: str, size: tuple[int, int], shape: tuple[int, ...], square: int
) -> None:
    """Tiles are lower or taller than a square."""
    for precision in ("float32", "bfloat16"):
        kernel = kernel_of(shape, precision)
        constants = constants_of(kernel, along, 8, size)
        assert VectorTiling(kernel, constants).square == (square if along == "outputs" or square == 8 else 0)
        agrees(kernel, constants, 5)
    pairs = replace(constants, pairs=1)
    has_squares = shape[2] % 2 == 0 and (along == "outputs" or square == 8)
    assert VectorTiling(kernel, pairs).square == (square if has_squares else 0)
    agrees(kernel, pairs, 5)


def test_packing_again_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls on one array share its packed weights, so another thread may multiply by them meanwhile."""
    device = chosen_native(monkeypatch)
    monkeypatch.setenv("KSGEN_THREADS", "1")
    kernel = kernel_of((1, 192, 512, 1), layout="bsl")
    plan = planned(device, kernel, constants_of(kernel, "batch", 16, (2, 2)), 32)  # tiles are lower than a square
    weights, packed = make_problem(kernel, 1).weights, nothing(plan.packed_bytes)
    given, into = (device.shared(each.ctypes.data) for each in (weights, packed))
    plan.pack(given, None, into=into)
    kept, is_done, seen = packed.copy(), threading.Event(), 0

    def pack_again() -> None:
        for _ in range(2000):
            plan.pack(given, None, into=into)
        is_done.set()

    thread = threading.Thread(target=pack_again)
    thread.start()
    while not is_done.is_set():
        seen += not np.array_equal(packed.view(np.uint64), kept.view(np.uint64))
    thread.join()
    assert seen == 0


def test_adjoint_weights_beyond_32_bits_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block's weights begin after more elements than 32 bits count. Hardly any memory is touched."""
    device, size = chosen_native(monkeypatch), 46_341
    kernel = kernel_of((2, size, size, 1), "bfloat16", "bsl")
    plan = planned(device, kernel, VectorConstants("batch", 16, 1, 1, 16, 1, 1, 0), 1)
    reserved = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: pages take memory once they are written to
    memory = mmap.mmap(-1, 6 * size**2, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | reserved)
    weights, packed = np.frombuffer(memory, np.uint16), np.full(size, np.nan, np.float32)
    first = size**2  # so that an address before the weights is mapped, too
    weights[first + size**2 + 7 * size] = 0x4040  # 3, of the first output of the second block and its input 7
    column = size  # of that output
    given = weights[first:].ctypes.data, packed.ctypes.data - column * packed.nbytes
    arguments = (ctypes.c_int64 * 2)(*given)
    walk = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_long] * 3)(plan.adjoint_handle.walk)
    walk(ctypes.addressof(arguments), column, column + 1, 2 * size)
    assert (np.flatnonzero(packed).tolist(), packed[7]) == ([7], 3)


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("tie", ["a", "d", "ad"])
@pytest.mark.parametrize(("along", "layout"), list(product(("outputs", "batch"), LAYOUTS)))
def test_tied_weights_are_packed_once(along: str, layout: str, tie: str) -> None:
    """Vectors hold some j, all j or several k; several tiles share the weights."""
    for shape in ((3, 7, 6, 20), (2, 9, 5, 3), (3, 18, 4, 1)):
        kernel = kernel_of(shape, "float32", layout, Epilogue(bias=True))
        constants = constants_of(kernel, along, 8)
        tied, whole = (VectorTiling(each, constants).packed_bytes for each in (replace(kernel, tied=(tie,)), kernel))
        shared = (shape[0] if "a" in tie else 1) * (shape[3] if "d" in tie and along == "batch" else 1)
        assert shared * tied <= whole
        agrees(replace(kernel, tied=(tie,)), constants, 17)
        works = (FAMILY.work(each, constants, 17).multiply_adds for each in (replace(kernel, tied=(tie,)), kernel))
        assert len(set(works)) == 1
        exact = exact_problem(replace(kernel, tied=(tie,)), 9)
        assert fault_of(exact, multiplied(exact, constants)) == ""


def in_pairs() -> Iterator[object]:
    """Every pattern of the matrix in both layouts and ways, two inputs at a time: even and odd c, and c = 1."""
    # even inputs of one j are read where they lie
    shapes = PATTERNS | {"one j": (2, 9, 6, 1), "one j, odd": (2, 9, 7, 1)}
    cases = product(shapes.items(), product(LAYOUTS, ("outputs", "batch")))
    for number, ((name, shape), (layout, along)) in enumerate(cases):
        lanes = (16, 4, 8)[number % 3]
        kernel = kernel_of(shape, "bfloat16", layout, EPILOGUES[number % len(EPILOGUES)])
        constants = constants_of(kernel, along, lanes, SIZES[number % 6], 1 + number % 4, 1 + number % 3, pairs=1)
        yield pytest.param(kernel, constants, id=f"{name} {layout} along {along} by {lanes}")


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("kernel", "constants"), list(in_pairs()))
def test_two_inputs_at_a_time_agree_with_float64(kernel: KernelSpec, constants: VectorConstants) -> None:
    for batch in BATCHES:
        agrees(kernel, constants, batch)


def test_all_outputs_round_subnormals_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instructions for pairs round them to zero: in whole vectors, at ragged edges, and in outputs that are stored one
    by one.
    """
    chosen_native(monkeypatch)
    found = set[int]()
    for along, layout in product(WAYS, LAYOUTS):
        kernel = kernel_of((2, 21, 4, 1), "bfloat16", layout, Epilogue(bias=True))
        problem = make_problem(kernel, 13)
        bias = np.full(kernel.pattern.out_features, 1e-39, problem.x.dtype)
        problem = replace(problem, x=np.zeros_like(problem.x), bias=bias)
        y = multiplied(problem, constants_of(kernel, along, 8, pairs=1))
        found.update(np.unique(y.view(np.uint16)).tolist())
    assert len(found) == 1


def test_two_inputs_at_a_time_only_where_the_processor_multiplies_pairs() -> None:
    able = replace(CPU, dots=("bf16",))
    for layout, batch in product(LAYOUTS, (1, 16, 6272)):
        kernel = kernel_of((1, 192, 48, 2), "bfloat16", layout)
        assert FAMILY.default(kernel, able, batch).pairs == 1
        assert FAMILY.default(kernel, CPU, batch).pairs == 0
        assert FAMILY.default(kernel_of((6, 64, 64, 1), "bfloat16", layout), able, batch).panel == (layout == "bsl")
        assert FAMILY.default(kernel_of((6, 64, 63, 1), "bfloat16", layout), able, batch).panel == 1
        for other in ("float32", "float16", "float64"):
            assert FAMILY.default(replace(kernel, precision=other), able, batch).pairs == 0
        assert FAMILY.default(kernel_of((4, 8, 1, 2), "bfloat16", layout), able, batch).pairs == 0  # there is one input
        assert {each.pairs for each in FAMILY.space(kernel, able)} == {0, 1}
        assert {each.pairs for each in FAMILY.space(kernel, CPU)} == {0}
    tiled = replace(able, tiles=("bf16",))  # Intel's, where pairs are faster only to read many weights for a few rows
    for shape, of_bsf, of_bsl in (((1, 1024, 1024, 1), [1, 1, 0], [1, 1, 0]), ((1, 256, 256, 4), [0] * 3, [1, 0, 0])):
        for layout, wanted in (("bsf", of_bsf), ("bsl", of_bsl)):
            kernel = kernel_of(shape, "bfloat16", layout)
            assert [FAMILY.default(kernel, tiled, batch).pairs for batch in (1, 4, 5)] == wanted
            assert {each.pairs for each in FAMILY.space(kernel, tiled)} == {0, 1}
    strided = replace(kernel_of((6, 64, 64, 1), "bfloat16"), stride="any")  # whose rows may begin within a pair
    assert FAMILY.default(strided, able, 6272).panel == 1
    with pytest.raises(ConstantsError, match="panel=0 must be 1"):
        check(FAMILY, strided, replace(FAMILY.default(strided, able, 6272), panel=0))
    refused = replace(constants_of(kernel_of((1, 4, 4, 1), "bfloat16"), "outputs", 8, pairs=1), panel=1)
    able_kernel = kernel_of((1, 4, 4, 1), "bfloat16")
    for kernel, constants in (
        (kernel_of((1, 4, 4, 1), "float16"), refused),
        (able_kernel, replace(refused, lanes=2)),  # which no instruction has
    ):
        with pytest.raises(ConstantsError, match="pairs=1 must be 0 but in bfloat16"):
            check(FAMILY, kernel, constants)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_along_the_batch_are_whole_tiles(layout: str) -> None:
    """The last block may be shorter. A tile that ends within a block is computed whole, then stored by elements."""
    kernel = kernel_of((1, 64, 64, 3), layout=layout)
    whole = VectorConstants("batch", 16, 8, 3, 336, 1, 1, 0)
    assert VectorTiling(kernel, whole).step == 48
    assert VectorTiling(kernel, replace(whole, block=320)).step == 16  # it cannot be
    assert {each.name: each.value for each in FAMILY.constexprs(kernel, whole)}["UNIT"] == 48


def test_parts_keep_large_weights_in_a_cache() -> None:
    """Each part has at most 512 KB of weights, unless it would read too many inputs again."""

    def parts(shape: tuple[int, ...], batch: int = 6272, layout: str = "bsf", **limits: int) -> int:
        found: int = FAMILY.default(kernel_of(shape, layout=layout), replace(CPU, **limits), batch).parts
        return found

    assert [parts(shape) for shape in ((4, 256, 1024, 1), (1, 256, 2048, 1), (6, 768, 192, 4))] == [8, 4, 27]
    assert parts((1, 512, 768, 1)) == 1  # 1.5 MB in all
    assert parts((1, 512, 784, 1)) == 4
    assert parts((2, 192, 768, 16)) == 1  # a row of the batch has 96 KB, which 18 parts of each plane would read
    assert parts((4, 256, 1024, 1), layout="bsl") == 4  # a part per plane
    assert [parts((4, 256, 1024, 1), batch) for batch in (32, 33)] == [4, 8]
    assert parts((4, 256, 1024, 1), 32, multiprocessors=1) == 8


def test_small_batches_keep_all_cores_busy() -> None:
    """Parts of a plane store its transposed outputs one by one, unless weights are few or planes suffice. Smaller
    batches are not transposed.
    """

    def parts(shape: tuple[int, ...], batch: int) -> tuple[int, bool]:
        kernel = kernel_of(shape)
        found = FAMILY.default(kernel, CPU, batch)
        assert found.along == "batch"
        return found.parts, VectorTiling(kernel, found).is_split

    assert parts((1, 384, 384, 3), 9) == parts((1, 384, 384, 3), 16) == (8, True)
    assert parts((1, 48, 48, 7), 16) == (1, False)
    assert parts((4, 384, 384, 3), 16) == (4, False)
    assert parts((1, 384, 384, 3), 6272) == (1, False)
    for shape, batch, layout, blocks in (
        ((1, 384, 384, 3), 8, "bsf", 1),
        ((1, 384, 384, 3), 7, "bsl", 1),
        ((1, 256, 256, 24), 32, "bsf", 2),
    ):
        found = FAMILY.default(kernel_of(shape, layout=layout), CPU, batch)
        # each part copies inputs: one task a core
        assert (found.along, divide_up(batch, found.block), found.parts) == ("outputs", blocks, 2 // blocks)
        assert VectorTiling(kernel_of(shape), found).period == 3
    assert FAMILY.default(kernel_of((1, 384, 384, 3), layout="bsl"), CPU, 8).along == "batch"
    assert FAMILY.default(kernel_of((1, 256, 256, 24)), CPU, 33).along == "batch"


@pytest.mark.parametrize(
    ("shape", "precision", "tile"),
    [
        ((1, 64, 64, 6), "float32", (3, 6)),
        ((1, 48, 48, 24), "float32", (3, 6)),
        ((1, 48, 48, 12), "bfloat16", (3, 6)),
        ((1, 64, 64, 6), "float64", (3, 6)),
        ((1, 48, 48, 3), "float32", (2, 9)),  # nine vectors in all
        ((1, 48, 192, 3), "float32", (3, 9)),  # whose weights leave the L1 cache
        ((1, 64, 64, 5), "float32", (2, 10)),
        ((1, 64, 64, 7), "float32", None),  # a shuffle for nearly each multiply-add
        ((1, 384, 384, 3), "float32", None),  # so many multiply-adds that turning costs less
        ((1, 48, 192, 24), "float32", (3, 6)),
        ((1, 48, 192, 24), "bfloat16", None),  # rows that leave the L1 cache, and are copied
        ((1, 64, 512, 12), "float32", (3, 6)),
        ((1, 64, 544, 12), "float32", None),  # longer rows, where they lie
        ((1, 48, 48, 12), "float64", None),
        ((1, 64, 64, 6), "complex64", None),
    ],
)
def test_vectors_that_take_other_inputs_until_they_repeat(
    shape: tuple[int, ...], precision: str, tile: tuple[int, int] | None
) -> None:
    """A shuffle per two or three vectors makes the inputs of large batches if it beats a transpose: with AVX-512."""
    found = FAMILY.default(kernel_of(shape, precision), CPU, 6272)
    assert (found.along, tile and (found.height, found.width)) == ("outputs" if tile else "batch", tile)
    narrow = FAMILY.default(kernel_of(shape, precision), replace(CPU, vector_bytes=32), 6272)
    assert narrow.along == "batch" or VectorTiling(kernel_of(shape, precision), narrow).period == 1
    assert FAMILY.default(kernel_of(shape, precision, layout="bsl"), CPU, 6272).along == "batch"


def test_which_inputs_are_read_where_they_lie() -> None:
    able = replace(CPU, dots=("bf16",))  # of AMD's: those with tiles are not

    def copied(
        shape: tuple[int, ...], limits: Limits = CPU, batch: int = 6272, precision: str = "float32"
    ) -> tuple[int, int]:
        found = FAMILY.default(kernel_of(shape, precision), limits, batch)
        return found.panel, found.block

    # 6 KB rows meet; 33 j straddle lines
    assert [copied((1, 64, 64, d))[0] for d in (1, 3, 6, 12, 16, 24, 33)] == [0, 0, 0, 0, 0, 1, 1]
    # a vector holds no more than there are
    assert [copied((1, 64, 60, 24), batch=batch)[0] for batch in (1, 16, 6272)] == [0, 0, 0]
    # few: their only block is the last
    assert [copied((1, 64, 64, 6), batch=batch)[0] for batch in (1, 8, 6272)] == [1, 1, 0]
    assert [copied((1, 64, 64, 48), limits) for limits in (CPU, able, replace(able, tiles=("bf16",)))] == [
        (1, 24),
        (0, 12),
        (1, 24),
    ]
    assert copied((1, 64, 64, 48), able, precision="bfloat16") == (1, 24)


def test_columns_share_a_copy_while_their_weights_stay_near() -> None:
    def at_once(shape: tuple[int, ...], precision: str) -> tuple[int, int]:
        kernel = kernel_of(shape, precision)
        found = VectorTiling(kernel, FAMILY.default(kernel, replace(CPU, dots=("bf16",)), 6272))
        return found.columns_at_once, found.tiles

    assert at_once((1, 64, 64, 48), "bfloat16") == (16, 16)
    assert at_once((1, 1024, 1024, 48), "bfloat16") == (1, 342)  # 4 MB a plane
    assert at_once((1, 64, 64, 8), "float16") == (1, 8)  # no pairs


@pytest.mark.parametrize(
    ("shape", "layout", "vector_bytes", "is_by_rows"),
    [
        ((1, 128, 128, 16), "bsf", 32, True),
        ((1, 128, 128, 8), "bsf", 32, True),  # read in place
        ((1, 128, 256, 4), "bsf", 32, True),
        ((1, 128, 128, 2), "bsf", 32, False),  # a tile's weights are more bytes than its rows
        ((1, 64, 129, 16), "bsf", 32, False),  # 6 rows of 4,128 bytes exceed the L1 cache
        ((1, 129, 128, 16), "bsf", 32, False),  # a plane's weights exceed the L2 cache
        ((1, 128, 128, 16), "bsl", 32, False),
        ((1, 128, 128, 16), "bsf", 64, False),  # not measured
        ((1, 64, 64, 16), "bsf", 16, False),
    ],
)
def test_rows_are_multiplied_with_all_columns_where_both_stay_near(
    shape: tuple[int, ...], layout: str, vector_bytes: int, is_by_rows: bool
) -> None:
    lanes = vector_bytes // 4
    tiling = VectorTiling(kernel_of(shape, layout=layout), VectorConstants("outputs", lanes, 6, 2, 24, 1, 1, 0))
    assert tiling.is_by_rows == is_by_rows
    assert tiling.columns_at_once == (tiling.tiles if is_by_rows else 1)


@pytest.mark.parametrize(
    ("shape", "batch", "vector_bytes", "block"),
    [
        ((1, 64, 64, 64), 1568, 32, 6),
        ((1, 64, 64, 64), 32, 32, 24),  # too few blocks to share among the cores
        ((8, 64, 64, 64), 1568, 32, 24),  # the weights of all planes exceed the cache
        ((1, 64, 64, 8), 1568, 32, 48),  # read in place
        ((1, 64, 64, 64), 1568, 64, 24),
    ],
)
def test_blocks_of_copied_rows_are_one_tile_where_all_weights_stay_near(
    shape: tuple[int, ...], batch: int, vector_bytes: int, block: int
) -> None:
    found = FAMILY.default(kernel_of(shape), replace(CPU, vector_bytes=vector_bytes, multiprocessors=2), batch)
    assert (found.along, found.block) == ("outputs", block)


@pytest.mark.parametrize(("d", "lanes", "step"), [(16, 8, 25), (8, 8, 25), (12, 8, 1), (8, 16, 1)])
def test_transposed_inputs_of_a_j_are_neighbours_if_vectors_hold_j_alone(d: int, lanes: int, step: int) -> None:
    tiling = VectorTiling(kernel_of((2, 16, 24, d)), VectorConstants("batch", lanes, 6, 2, 2 * lanes, 1, 1, 0))
    assert (tiling.j_step, tiling.x_step) == (step, 2 * lanes * (d if step == 1 else 1))


def test_inputs_that_are_copied_as_pairs_are_spread_where_runs_are_longer() -> None:
    able = replace(CPU, dots=("bf16",))
    assert [FAMILY.default(kernel_of((1, 48, 48, d), "bfloat16"), able, 6272).along for d in (3, 6)] == [
        "batch",
        "outputs",
    ]
    assert [FAMILY.default(kernel_of((1, 48, 48, d), "bfloat16"), CPU, 6272).along for d in (3, 6)] == [
        "outputs",
        "outputs",
    ]


@needs_opencl
def test_gelu_is_right_everywhere() -> None:
    """The erf is a quotient of polynomials that ends at 1 and -1. Values lie beyond them, at zeros, and at NaN."""
    values = np.linspace(-8, 8, 100001, dtype=np.float32)
    launcher, one = Launcher(1, 1, 1, 1), np.ones((1, 1, 1, 1), np.float32)

    def gelu(x: Array) -> Array:
        return np.asarray(launcher(x[:, None], one, activation="gelu"))[:, 0]

    wanted = (
        0.5 * values.astype(np.float64) * np.array([math.erfc(-value * math.sqrt(0.5)) for value in values.tolist()])
    )
    assert np.abs(gelu(values) - wanted).max() < 1.5e-6
    assert np.linalg.norm(gelu(values) - wanted) < 1e-7 * np.linalg.norm(wanted)
    far = np.array([np.nan, np.inf, 1e30, 50, 0, -50, -1e30], np.float32)
    np.testing.assert_array_equal(gelu(far), np.array([np.nan, np.inf, 1e30, 50, 0, 0, 0], np.float32))


@needs_opencl
def test_relu_keeps_nan() -> None:
    x = np.array([[np.nan], [np.inf], [2], [0], [-3], [-np.inf]], np.float32)
    y = Launcher(1, 1, 1, 1)(x, np.ones((1, 1, 1, 1), np.float32), activation="relu")
    np.testing.assert_array_equal(np.asarray(y)[:, 0], np.array([np.nan, np.inf, 2, 0, 0, 0], np.float32))


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "precision",
    ["float32", "float16", *(pytest.param(each, marks=pytest.mark.slow) for each in ("float64", "bfloat16"))],
)
def test_streaming_stores_write_the_same_bits(precision: str, layout: str, along: str) -> None:
    """Vectors of outputs are aligned everywhere, at some places, or at none."""
    for shape, epilogue in (
        ((2, 32, 9, 4), Epilogue()),
        ((1, 24, 5, 32), Epilogue(True, "relu", True)),
        ((3, 7, 6, 4), Epilogue()),
    ):
        kernel = kernel_of(shape, precision, layout, epilogue)
        constants = replace(constants_of(kernel, along, 8 if precision == "float64" else 16), streaming=0)
        for batch in (64, 51):
            problem = make_problem(kernel, batch)
            wanted = multiplied(problem, constants, boundary=64)
            error, _ = compare(problem, wanted)
            assert error <= tolerance(kernel.precision, kernel.pattern.c)
            for boundary in (64, 1):
                found = multiplied(problem, replace(constants, streaming=1), boundary=boundary)
                np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize(
    ("d", "precision", "streaming"),
    [(8, "bfloat16", 1), (16, "bfloat16", 1), (32, "bfloat16", 0), (48, "bfloat16", 0), (32, "float32", 1)],
)
def test_streaming_stores_fill_lines_at_once(d: int, precision: str, streaming: int) -> None:
    """A plane with some of the j has 16 of them, which are half a line in bfloat16."""
    kernel = kernel_of((1, 12, 12, d), precision)
    constants = constants_of(kernel, "outputs", 16, (6, 4))
    found = fitted(kernel, CPU, constants, 25088)
    assert isinstance(found, VectorConstants)
    assert found.streaming == streaming


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(("precision", "line"), [("float64", 8), ("float32", 16), ("bfloat16", 32)])
def test_where_outputs_begin_within_a_line_makes_no_difference(precision: str, line: int) -> None:
    """The first block is then shorter in batch-size-last, possibly empty, if all rows begin at the same offset."""
    kernel = kernel_of((2, 5, 7, 3), precision, "bsl", Epilogue(True, residual=True))
    for batch, units in ((2 * line, 1), (5 * line, 2), (5 * line + 1, 2)):
        problem = make_problem(kernel, batch)
        constants = replace(
            constants_of(kernel, "batch", line if precision != "bfloat16" else 16, parts=1, units=units), streaming=1
        )
        wanted = multiplied(problem, constants, boundary=64)
        error, _ = compare(problem, wanted)
        assert error <= tolerance(kernel.precision, kernel.pattern.c)
        for behind in (1, line // 4, line - 1):
            found = multiplied(problem, constants, boundary=64, behind=behind)
            np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", WAYS)
def test_the_shares_of_a_planes_tiles_are_all_of_its_inputs(layout: str, along: str) -> None:
    """Each tile fetches some lines of what comes next; together they fetch all, and little else."""
    for shape in ((1, 192, 48, 2), (6, 64, 64, 1), (1, 48, 192, 24), (1, 64, 64, 64), (1, 33, 5, 1), (300, 1, 3, 2)):
        kernel = kernel_of(shape, layout=layout)
        if (layout, along) == ("bsl", "outputs"):
            continue
        chunks = 3 if layout == "bsl" else 1  # of a block, whose tiles together fetch the next block
        made = VectorTiling(kernel, constants_of(kernel, along, 16, (6, 4), parts=1, units=4 * chunks))
        ahead, (_, _, c, d) = made.ahead, shape
        tiles = made.tiles * chunks if along == "outputs" or layout == "bsl" else made.column_unit
        rows = 6 if along == "outputs" else 64
        lines = (
            -(-c * d * made.scope // 16)
            if layout == "bsf" and along == "batch"
            else -(-c * d // 16)
            if made.is_short
            else c
        )
        wanted = c * 4 * chunks if layout == "bsl" else rows * lines  # a row of a chunk is four lines
        assert wanted <= tiles * ahead.lines < wanted + tiles * (4 * chunks if layout == "bsl" else rows)
        assert ahead.lines <= ahead.each * (c // ahead.step)


def without_streaming(kernel: KernelSpec, constants: VectorConstants, batch: int) -> Array:
    """Whether each output is there although the kernel has no streaming stores."""
    device = processor()
    whole = render(kernel, constants, dialect="opencl")
    without = replace(whole, text=whole.text.replace("__builtin_nontemporal_store(", "(void)("))
    assert without.text.count("(void)(") == 2
    problem = make_problem(kernel, batch)
    wanted = multiplied(problem, constants, boundary=64)
    loaded = load(
        device, without, build(without.text, without.entry, device.target, device.compiler(), default_caches())
    )
    _, places = placed(arrays_of(problem), kernel.dtype, 64)
    plan = make_plan(device, kernel, batch, Choice("vector", constants, "a test's"), loaded)
    launch(device, (plan, [plan]), places)
    found: Array = places["y"].reshape(problem.y_shape) == wanted
    return found


@needs_opencl
@pytest.mark.parametrize(
    ("batch", "width", "are_streamed"),
    [(96, 2, True), (96, 3, False), (112, 2, False), (104, 2, False), (101, 2, False)],
)
def test_pieces_of_lines_stay_in_the_caches_in_bsl(batch: int, width: int, are_streamed: bool) -> None:
    """Rows of 16-bit outputs that begin or end within a line would leave by pieces of lines, each of which memory
    would merge.
    """
    kernel = kernel_of((2, 8, 6, 1), "bfloat16", "bsl")
    constants = replace(constants_of(kernel, "batch", 16, (4, width), parts=2), block=32 * width, streaming=1)
    left = without_streaming(kernel, constants, batch)
    assert left.all() != are_streamed
    assert not are_streamed or not left[:, :64].any()  # of whole tiles


@needs_opencl
def test_exchanged_outputs_leave_by_streaming_stores_in_bsl() -> None:
    kernel = KernelSpec(Pattern(2, 8, 6, 4, store="i.j.k"), "float32", "bsl")
    constants = replace(constants_of(kernel, "batch", 16, (4, 2), parts=2), streaming=1)
    assert not VectorTiling(kernel, constants).waits
    assert not without_streaming(kernel, constants, 64).any()


@needs_opencl
@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_binary_serves_launches_with_other_blocks_parts_and_stores(layout: str, along: str) -> None:
    """They are arguments of a launch. All launches give the same bits, and take the same packed weights."""
    device, kernel = processor(), kernel_of((4, 32, 9, 4), "float32", layout, Epilogue(True, "relu", True))
    usual = replace(constants_of(kernel, along, 16, (6, 4)), parts=1)
    problem, planes = make_problem(kernel, 100), VectorTiling(kernel, usual).planes
    wanted = multiplied(problem, usual, boundary=64)
    error, _ = compare(problem, wanted)
    assert error <= tolerance(kernel.precision, kernel.pattern.c)
    loaded, packing = (getattr(planned(device, kernel, usual, 100), name) for name in ("loaded", "packing"))
    for units, parts, streaming in product((1, 2), (1, planes), (0, 1)):
        constants = replace(usual, block=units * VectorTiling(kernel, usual).unit, parts=parts, streaming=streaming)
        plan = planned(device, kernel, constants, 100)
        assert plan.loaded is loaded
        assert plan.packing == packing
        assert plan.at_launch == (constants.block, parts, streaming)
        found = multiplied(problem, constants, boundary=64)
        np.testing.assert_array_equal(found.view(np.uint8), wanted.view(np.uint8))


@needs_opencl
@pytest.mark.optimized
def test_streaming_stores_have_their_own_instructions(tmp_path: Path) -> None:
    if not shutil.which("objdump"):
        pytest.skip("no objdump: apt-get install binutils")
    device, kernel = processor(), kernel_of((1, 32, 8, 4), batch=64)  # too small a batch for streaming stores by rule
    for streaming in (0, 1):
        data = planned(
            device, kernel, replace(constants_of(kernel, "outputs", 16), streaming=streaming), 64
        ).binary.data
        begin = data.find(b"\x7fELF", 4)  # the object within the driver's own container
        if begin < 0:
            pytest.skip(f"{device.name}: its driver's binaries hold no object file")
        (tmp_path / "kernel.o").write_bytes(data[begin:])
        listed = subprocess.run(
            ["objdump", "-d", tmp_path / "kernel.o"], capture_output=True, text=True, check=True
        ).stdout
        assert ("vmovnt" in listed or "movnt" in listed) == bool(streaming)


def test_the_matrix_holds_all_there_is() -> None:
    rows = [row.values for row in matrix()]  # type: ignore[attr-defined]
    for along in WAYS:
        found = [(kernel, constants) for kernel, constants in rows if constants.along == along]
        assert {kernel.precision for kernel, _ in found} == {"float32", "float64", "float16", "bfloat16"}
        assert {constants.lanes for _, constants in found} >= {4, 8, 16}
        assert {constants.parts > 1 for _, constants in found} == {True, False}
        assert {kernel.layout for kernel, _ in found} == set(LAYOUTS)
        assert {kernel.epilogue.activation for kernel, _ in found} == {"none", "relu", "gelu", "gelu_tanh", "silu"}
    assert {constants.panel for _, constants in rows} == {0, 1}


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize("along", WAYS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_defaults_agree_at_any_batch(layout: str, along: str) -> None:
    """Launchers take arrays at odd addresses, with bias, and with the residual's own array as output."""
    processor()
    shape = (2, 16, 5, 4) if along == "outputs" else (2, 5, 7, 3)
    ks = Launcher(*shape)
    for batch in (3, 100):
        problem = make_problem(kernel_of(shape, layout=layout, epilogue=Epilogue(True, "gelu", True)), batch)
        _, places = placed(arrays_of(problem), "float32")
        x, weights, y, bias, residual = (places[name].reshape(each.shape) for name, each in arrays_of(problem).items())
        added = {"bias": bias, "activation": "gelu", "residual": residual}
        assert compare(problem, ks(x, weights, layout=layout, out=y, **added))[0] <= tolerance("float32", 7)
        assert compare(problem, ks(x, ks.pack(weights), layout=layout, **added))[0] <= tolerance("float32", 7)
        assert ks(x, weights, layout=layout, out=residual, **added) is residual
        np.testing.assert_array_equal(residual, y)


@needs_opencl
def test_launchers_take_it_on_a_processor() -> None:
    processor()
    said = Launcher(2, 16, 5, 4).explain(300)
    assert "vector (vector registers full of sums: processors), along=outputs" in said
    assert "along=batch" in Launcher(2, 16, 5, 4).explain(300, layout="bsl")


def any_constants(data: st.DataObject, kernel: KernelSpec) -> VectorConstants:
    number = st.integers
    lanes = data.draw(st.sampled_from([2, 4] if kernel.precision == "float64" else [4, 8]))
    along = data.draw(st.sampled_from(WAYS))
    height, width = data.draw(number(1, 8)), data.draw(number(1, 4))
    if along == "outputs" and kernel.pattern.d < 2 * lanes:
        width *= period_of(kernel.pattern.d, lanes)
        height = min(height, 64 // width)
    block = data.draw(number(1, 6)) * (height if along == "outputs" else lanes)
    panels = [VectorConstants(along, lanes, height, width, block, 1, panel, 0) for panel in (0, 1)]
    panels.append(replace(panels[1], pairs=1))
    constants = data.draw(st.sampled_from([each for each in panels if FAMILY.keeps_rules(kernel, each)]))
    shape = VectorTiling(kernel, constants)
    return replace(constants, parts=data.draw(number(1, min(9, shape.columns))))


@needs_opencl
@settings(max_examples=6, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
@given(st.data())
def test_any_pattern_batch_and_constants(data: st.DataObject) -> None:
    number = st.integers
    shape = data.draw(
        st.tuples(number(1, 4), number(1, 20), number(1, 12), st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 20, 24]))
    )
    precision = data.draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"]))
    kernel = kernel_of(shape, precision, data.draw(st.sampled_from(LAYOUTS)), data.draw(st.sampled_from(EPILOGUES)))
    constants = any_constants(data, kernel)
    for batch in data.draw(st.lists(number(1, 150), min_size=2, max_size=4)):
        agrees(kernel, constants, max(batch, 16 // kernel.pattern.out_features))  # of fewer outputs all may cancel


@pytest.mark.slow
@pytest.mark.second
@needs_opencl
@settings(
    parent=settings.default, max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]
)
@given(st.data())
def test_many_patterns_batches_and_constants(data: st.DataObject) -> None:
    test_any_pattern_batch_and_constants.hypothesis.inner_test(data)  # type: ignore[attr-defined]


# ---- nothing outside the arrays is touched, and no row of the batch affects another


BOTH = Epilogue(True, "none", True)
FENCED = [  # every way to copy, and edges of every kind
    ((2, 20, 7, 2), "float32", "bsf", "outputs"),
    ((1, 5, 7, 16), "float32", "bsf", "outputs"),  # where they lie
    ((2, 9, 7, 3), "float32", "bsf", "outputs"),  # whose vectors take other inputs each
    ((2, 9, 7, 6), "bfloat16", "bsf", "outputs"),
    ((2, 5, 7, 20), "bfloat16", "bsf", "outputs"),
    ((2, 5, 7, 20), "float16", "bsl", "outputs"),
    ((2, 4, 5, 3), "bfloat16", "bsf", "batch"),
    ((9, 2, 2, 1), "float64", "bsf", "batch"),
    ((2, 4, 5, 3), "float16", "bsl", "batch"),
    ((2, 4, 5, 3), "bfloat16", "bsl", "batch"),
    ((2, 4, 5, 3), "float32", "bsl", "batch"),
]


def run_fenced() -> None:
    for shape, precision, layout, along in FENCED:
        kernel = kernel_of(shape, precision, layout, BOTH)
        for pairs in (0, 1) if precision == "bfloat16" else (0,):
            agrees_between_fences(kernel, constants_of(kernel, along, 8, pairs=pairs), (1, 37))
    print("all within their arrays")


@pytest.mark.second
@pytest.mark.slow
@needs_opencl
def test_no_access_beyond_the_ends_of_arrays() -> None:
    processor()
    stay_within_their_arrays(__name__)


# ---- what a user can cause


@pytest.fixture
def uncompiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing cached, loaded or found by a search; calls go to the processor that is tested."""
    monkeypatch.setenv("KSGEN_DEVICE", processor().runtime)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    PLANNER.forget()
    yield monkeypatch
    monkeypatch.undo()
    PLANNER.forget()


SHAPE = (2, 9, 5, 2)  # of launchers that users call


def call() -> tuple[Array, Array]:
    """What a launcher gives, and what is right."""
    problem = make_problem(kernel_of(SHAPE), 40)
    return Launcher(*SHAPE)(problem.x, problem.weights), problem.truth


@needs_opencl
def test_wisdom_that_breaks_a_rule_is_passed_over_and_named(
    uncompiled: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device = processor()
    save(
        device.name,
        [Entry(kernel_of(SHAPE), 40, "vector", VectorConstants("outputs", 8, 3, 2, 25, 1, 0, 0), {"median_us": 1.0})],
    )
    found, truth = call()
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)
    assert "unreadable wisdom is ignored: " in caplog.text
    assert "entry 1: ks_2x9x5x2_float32_bsf: block=25 must be a multiple of" in caplog.text
    assert "delete that line and tune again" in caplog.text


@needs_opencl
def test_blocks_parts_and_stores_of_wisdom_are_those_of_the_launch(uncompiled: pytest.MonkeyPatch) -> None:
    device, known = processor(), VectorConstants("outputs", 8, 6, 2, 6, 2, 0, 1)
    save(device.name, [Entry(kernel_of(SHAPE), 40, "vector", known, {"median_us": 1.0})])
    plan = PLANNER.plan(device, kernel_of(SHAPE), 40)
    assert (plan.choice.constants, plan.at_launch) == (known, (6, 2, 1))
    assert plan.loaded is planned(device, kernel_of(SHAPE), replace(known, block=24, parts=1, streaming=0), 7).loaded
    found, truth = call()
    np.testing.assert_allclose(found, truth, rtol=1e-4, atol=1e-5)


@needs_opencl
def test_nothing_is_compiled_where_that_is_forbidden(uncompiled: pytest.MonkeyPatch) -> None:
    processor()
    uncompiled.setenv("KSGEN_NO_COMPILE", "1")
    kernel = kernel_of((2, 9, 5, 2), batch=41)
    ks, problem = Launcher(*SHAPE, batches=[41]), make_problem(kernel, 41)
    with pytest.raises(
        ToolchainError,
        match=r"ks_2x9x5x2_float32_bsf_batch41\w*: no cache holds it for .*, and KSGEN_NO_COMPILE forbids",
    ):
        ks(problem.x, problem.weights)


@needs_opencl
def test_a_device_that_fails_says_doing_what(uncompiled: pytest.MonkeyPatch) -> None:
    device = processor()
    if device.kind != "opencl":
        pytest.skip(f"{device.kind} has no driver that could fail")
    call()

    def fails(*_: object) -> None:
        raise device._cl.LogicError("enqueue", -5, "out of resources")  # type: ignore[attr-defined]

    uncompiled.setattr(device._cl, "enqueue_nd_range_kernel", fails)  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match=r"OpenCL on .*, launching ks_2x9x5x2_float32_bsf\w*_pack: enqueue"):
        call()
    uncompiled.undo()
    np.testing.assert_allclose(*call(), rtol=1e-4, atol=1e-5)


# ---- constants

GOOD = VectorConstants("outputs", 8, 3, 2, 24, 2, 0, 0)
BAD = {
    "along=inputs must be outputs or batch": replace(GOOD, along="inputs"),
    "lanes=6 must be 2, 4, 8 or 16; try 4 or 8": replace(GOOD, lanes=6),
    "every constant but panel and streaming is at least 1; got parts=0; try parts=1": replace(GOOD, parts=0),
    "panel=2 must be 0 or 1; try 1": replace(GOOD, panel=2),
    "streaming=-1 must be 0 or 1; try 0": replace(GOOD, streaming=-1),
    "a tile has at most 64 vectors: 72; got height=12; try height=8": replace(GOOD, height=12, width=6),
    "block=25 must be a multiple of a tile's rows, or of the lanes along the batch = 3; try 24 or 27": replace(
        GOOD, block=25
    ),
    "panel=0 must be 1 along the batch, in bsl, and for single inputs below 32 bits; try 1": replace(
        GOOD, along="batch", parts=1
    ),
    "parts=7 must be at most the tiles of all outputs = 6; try 6": replace(GOOD, parts=7),
}


@pytest.mark.parametrize("says", BAD)
def test_rules(says: str) -> None:
    kernel = kernel_of((2, 20, 7, 2))
    check(FAMILY, kernel, GOOD)
    check(FAMILY, kernel, replace(GOOD, along="batch", parts=1, panel=1))
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, BAD[says])


def test_rules_of_the_job_of_d_and_of_panels() -> None:
    with pytest.raises(ConstantsError, match="job=gradient must be multiply"):
        check(FAMILY, replace(kernel_of((2, 20, 7, 2)), job="gradient"), GOOD)
    with pytest.raises(ConstantsError, match="along=outputs needs a d that divides a tile"):
        check(FAMILY, kernel_of((2, 20, 7, 3)), replace(GOOD, panel=1))
    check(FAMILY, kernel_of((2, 20, 7, 3)), replace(GOOD, width=3, panel=1))
    check(FAMILY, kernel_of((2, 20, 7, 9)), GOOD)
    for kernel in (kernel_of((2, 20, 7, 2), "float16"), kernel_of((2, 20, 7, 2), layout="bsl")):
        check(FAMILY, kernel, replace(GOOD, panel=1))
        with pytest.raises(ConstantsError, match=r"panel=0 must be 1 .* below 32 bits; try 1"):
            check(FAMILY, kernel, GOOD)


@pytest.mark.parametrize(
    ("c", "d", "constants"),
    [
        (2**27, 1, VectorConstants("outputs", 8, 1, 2, 24, 1, 0, 0)),  # 16 weights per input
        (2**27, 1, VectorConstants("batch", 8, 16, 1, 24, 1, 1, 0)),
        (2**25, 4, VectorConstants("batch", 8, 1, 2, 24, 1, 1, 0)),  # 64 places per input, for each of four j
    ],
)
def test_a_tile_is_counted_in_32_bits(c: int, d: int, constants: VectorConstants) -> None:
    check(FAMILY, kernel_of((1, 16, c - 1, d)), constants)
    with pytest.raises(
        ConstantsError, match=r"a tile's weights or inputs take at most 2147483647 elements: 2147483648"
    ):
        check(FAMILY, kernel_of((1, 16, c, d)), constants)


def test_which_devices_it_serves() -> None:
    kernel = kernel_of((2, 9, 5, 3))
    assert family_for(kernel, CPU).name == "vector"
    assert family_for(replace(kernel, precision="tf32x3"), CPU).name == "vector"
    assert family_for(kernel, replace(CPU, is_cpu=False)).name == "simt"
    assert family_for(kernel, cuda_limits("sm_90a")).name == "simt"


@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [*PATTERNS.values(), (6, 64, 64, 1), (1, 768, 192, 3), (512, 2, 2, 1), (1, 4096, 4096, 1)]
)
def test_defaults_keep_the_rules_on_every_processor(shape: tuple[int, ...], layout: str, precision: str) -> None:
    kernel = kernel_of(shape, precision, layout)
    for vector_bytes, cores, batch in product((16, 32, 64), (1, 2, 64), (None, 1, 100, 25088)):
        limits = replace(CPU, vector_bytes=vector_bytes, multiprocessors=cores)
        constants = FAMILY.default(kernel, limits, batch)
        check(FAMILY, kernel, constants, limits)
        assert FAMILY.registers(kernel, constants) <= (32 if vector_bytes == 64 else 16)
        assert FAMILY.geometry(kernel, constants, batch or 1).group_bytes <= 2**26
        if batch == 25088 and kernel.pattern.weight_count > 10**4:
            assert FAMILY.geometry(kernel, constants, batch).grid >= cores  # every core has work


@pytest.mark.parametrize(
    ("precision", "vector_bytes", "streaming"),
    [("float32", 64, 1), ("float64", 64, 1), ("bfloat16", 64, 0), ("float32", 32, 0)],
)
def test_transposed_outputs_leave_by_streaming_stores_in_whole_lines_alone(
    precision: str, vector_bytes: int, streaming: int
) -> None:
    """Streaming stores of half a line took four times as long."""
    limits = replace(CPU, vector_bytes=vector_bytes)
    transposed = FAMILY.default(kernel_of((1, 192, 192, 3), precision), limits, 6272)
    assert (transposed.along, transposed.streaming) == ("batch", streaming)
    assert FAMILY.default(kernel_of((1, 192, 192, 3), precision), limits, 16).streaming == 0


@pytest.mark.parametrize(
    ("precision", "vector_bytes", "shape", "size", "streaming"),
    [
        ("float32", 64, (1, 48, 48, 12), (6, 4), 1),
        ("bfloat16", 64, (1, 48, 48, 12), (6, 4), 1),
        ("bfloat16", 64, (1, 64, 64, 48), (8, 3), 0),  # 96 bytes, and their neighbours one chunk later
        ("float32", 32, (1, 48, 48, 12), (4, 3), 0),
        ("float32", 32, (1, 96, 384, 8), (6, 2), 1),
    ],
)
def test_so_do_a_tile_s_rows_in_bsl(
    precision: str, vector_bytes: int, shape: tuple[int, ...], size: tuple[int, int], streaming: int
) -> None:
    found = FAMILY.default(kernel_of(shape, precision, "bsl"), replace(CPU, vector_bytes=vector_bytes), 6272)
    assert ((found.height, found.width), found.streaming) == (size, streaming)


@pytest.mark.parametrize(("precision", "streaming"), [("float32", 1), ("bfloat16", 0)])
def test_sixteen_registers_hold_six_by_two_sums_along_the_outputs(precision: str, streaming: int) -> None:
    """Weights come from the L2 cache: the fewer a tile takes, the better."""
    found = FAMILY.default(kernel_of((1, 512, 512, 4), precision), replace(CPU, vector_bytes=32), 6272)
    assert (found.along, found.height, found.width, found.streaming) == ("outputs", 6, 2, streaming)


@pytest.mark.parametrize(
    ("shape", "batch", "size"),
    [
        ((1, 384, 96, 4), 1568, (6, 2)),
        ((1, 384, 96, 4), 64, (6, 2)),
        ((1, 384, 96, 4), 4, (4, 3)),  # two of six rows would be empty
        ((3, 96, 96, 64), 1568, (6, 2)),  # six rows stay in the L1 cache
        ((1, 768, 192, 48), 1568, (4, 3)),  # only four do
        ((1, 384, 96, 96), 1568, (4, 3)),  # the weights of a plane exceed the L2 cache, so each column reads all rows
    ],
)
def test_tiles_leave_a_register_free_unless_rows_are_read_again(
    shape: tuple[int, ...], batch: int, size: tuple[int, int]
) -> None:
    found = FAMILY.default(kernel_of(shape, "bfloat16"), replace(CPU, vector_bytes=32), batch)
    assert (found.along, (found.height, found.width)) == ("outputs", size)


@pytest.mark.parametrize(
    ("vector_bytes", "shape", "batch", "along"),
    [
        (32, (1, 128, 512, 8), 6272, "batch"),
        (32, (1, 48, 193, 24), 32, "batch"),
        (32, (1, 48, 192, 24), 32, "outputs"),  # tiles of four rows, which stay in the L1 cache
        (64, (1, 128, 512, 8), 6272, "outputs"),  # enough registers to hold an input for a whole tile
        (64, (1, 128, 128, 16), 6272, "outputs"),
        (32, (1, 512, 512, 4), 6272, "outputs"),  # an input is repeated for all lanes
        (32, (1, 50, 129, 8), 6272, "batch"),
        (32, (1, 49, 129, 8), 6272, "outputs"),  # too few multiply-adds for the transpose
        (32, (2, 128, 128, 64), 6272, "outputs"),  # a tile's rows stay in the L1 cache for all outputs
        (32, (2, 128, 129, 64), 6272, "batch"),
        (32, (2, 192, 192, 64), 6272, "batch"),
        (32, (2, 192, 193, 64), 6272, "outputs"),  # too many features to stay near
        (32, (1, 128, 512, 8), 17, "batch"),
        (32, (1, 128, 512, 8), 16, "outputs"),
        (16, (1, 128, 512, 8), 6272, "outputs"),  # measured: never worth it
    ],
)
def test_sixteen_registers_take_transposed_inputs_where_j_fill_a_vector(
    vector_bytes: int, shape: tuple[int, ...], batch: int, along: str
) -> None:
    assert FAMILY.default(kernel_of(shape), replace(CPU, vector_bytes=vector_bytes), batch).along == along
