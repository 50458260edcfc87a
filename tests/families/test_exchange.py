"""Outputs that are stored, and inputs that are read, in another order of their digits: every family that supports them,
alone and in chains."""

import copy
import pickle
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksgen import quantize, reference
from ksgen.emit.render import render
from ksgen.errors import ConstantsError, LaunchError
from ksgen.families import FAMILIES, Limits, check, cuda_limits, family_for, family_named
from ksgen.families.gemv.chain_shape import GemvChainConstants
from ksgen.families.gemv.shape import GemvConstants
from ksgen.families.vector.planes import digits_of_plane, run_of_plane, scopes_of
from ksgen.families.vector.shape import VectorConstants, VectorTiling
from ksgen.families.wgmma.block import extents_of, places_of
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import compare, make_problem, measure, tolerance
from ksgen.pattern import Chain, Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from ksgen.spec.precision import BF16
from tests.families import test_cpu_gradient_vectors as gradients
from tests.families import test_vector as vectors
from tests.support.exchange import exchanged_patterns
from tests.support.gpu_chains import check_against_factors, group_of, is_right, run_group
from tests.support.hasty import compiles_hastily
from tests.support.kernels import batch_for, in_emulator, multiply, source_of
from tests.support.kernels import check as check_result
from tests.support.native import chosen_native
from tests.support.products import arrays_of, chain_of, truth_of

__all__ = ["compiles_hastily"]

GPU_FAMILIES = ("wgmma", "mma", "simt", "gemv")
EVERY = Epilogue(bias=True, activation="relu", residual=True)
# a divided k, whose blocks on the diagonal have whole vectors of neighbours together, or have not; whole vectors of
# neighbours; sizes that are multiples of nothing; a divided j
PATTERNS = ("4,32,16,1@k1:4.i.k2", "8,16,4,1@k1:4.i.k2", "4,16,8,16@i.j.k", "2,20,7,3@j.i.k", "3,8,5,4@j1:2.i.k.j2")
# inputs with no neighbours in x; with whole vectors of them; with whole vectors of j; with divided indices
LOADS = (
    "l.i@4,32,70,1",
    "l1:4.i.l2@8,16,64,1@k1:4.i.k2",
    "l.i.j@3,9,7,16",
    "l.j.i@3,9,7,2@j.i.k",
    "i1:2.j.l.i2@4,8,5,6",
)
# no neighbours and an odd number of inputs; runs that begin within a pair, or whose pairs are in the other order; runs
# of j; divided indices; planes of several blocks, which are whole vectors in x
PAIRED = (
    "l.i@4,20,33,1", "l1:5.i.l2@2,9,15,1", "l2:3.i.l1@2,9,15,1", "l.i.j@3,9,7,16", "i1:2.j.l.i2@4,8,5,6",
    "i1:4.l1:2.i2:2.l2@8,8,8,1@i1:4.k1:2.i2:2.k2",
)  # fmt: skip
LOADED_CHAINS = (
    ("l.i@4,24,16,1@k1:6.i.k2", "6,16,16,1"),
    ("j1:2.l.i.j2@2,8,16,4@i.j.k", "l.i@8,12,8,1@k.i"),
)
NARROW_CHAINS = (  # blocks for small batches compute all that they need of the first factor
    ("l1:2.i.l2@4,24,16,1", "2,16,48,1"),
    ("j.l1:4.i.l2@2,8,16,3", "1,12,8,6"),
)
SMALL_CHAINS = (  # all blocks of the first factor in each tile; digits of i, k and j; j of the second factor in tiles
    ("4,24,16,1@k1:6.i.k2", "6,16,16,1"),
    ("2,8,16,2@i.j.k", "8,12,4,1@k.i"),
    ("4,16,20,2@k1:4.j.k2.i", "2,20,32,2@k.j.i"),
    ("l.j.i@3,12,10,2@j.k.i", "1,8,12,6@j.k"),
)
CHAINS = (
    ("4,24,16,1@k1:6.i.k2", "6,16,16,1"),
    ("2,8,16,2@i.j.k", "8,12,4,1@k.i"),
    ("4,32,16,1@k1:8.i.k2", "1,16,8,16@j.k", "16,8,16,1"),
)


def patterns_of(chain: tuple[str, ...]) -> tuple[Pattern, ...]:
    return tuple(map(Pattern.parse, chain))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(("precision", "dtype"), [("float32", np.float64), ("bfloat16", np.float32)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", [pytest.param(PATTERNS[0], marks=pytest.mark.optimized), *PATTERNS[1:], *LOADS])
def test_vectors_of_a_processor(text: str, layout: str, precision: str, dtype: type) -> None:
    """One row, few rows, and whole blocks with a rest take different paths."""
    pattern = Pattern.parse(text)
    for batch in (1, 3, 37, 2048):  # the last outputs are streamed
        kernel = KernelSpec(pattern, precision, layout, EVERY)
        arrays = arrays_of(kernel, batch)
        y = Launcher(pattern)(
            arrays["x"], arrays["weights 0"], layout=layout, bias=arrays["bias"], activation="relu",
            residual=arrays["residual"],
        )  # fmt: skip
        difference = y.astype(dtype) - truth_of(kernel, arrays)
        assert np.linalg.norm(difference) <= tolerance(precision, pattern.c) * np.linalg.norm(y.astype(dtype))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize("fuse", ["yes", "no"])
@pytest.mark.parametrize(("layout", "out_layout"), [("bsf", None), ("bsl", None), ("bsf", "bsl"), ("bsl", "bsf")])
@pytest.mark.parametrize("chain", [*CHAINS[:2], pytest.param(CHAINS[2], marks=pytest.mark.optimized), *LOADED_CHAINS])
def test_chains_on_a_processor(chain: tuple[str, ...], layout: str, out_layout: str | None, fuse: Any) -> None:
    patterns = Chain(chain).factors
    launcher = ChainLauncher(*chain, between="relu", fuse=fuse)
    for batch in (1, 40):
        kernel = KernelSpec(patterns, "float32", layout, Epilogue(True), between="relu", out_layout=out_layout)
        arrays = arrays_of(kernel, batch)
        weights = [arrays[f"weights {number}"] for number in range(len(patterns))]
        y = launcher(arrays["x"], weights, layout=layout, out_layout=out_layout, bias=arrays["bias"])
        truth = truth_of(kernel, arrays)
        assert np.linalg.norm(y - truth) <= 1e-5 * np.linalg.norm(truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("simt", "float32"), ("mma", "bfloat16"), ("gemv", "float16"), ("wgmma_shared", "bfloat16"),
        ("wgmma_registers", "tf32"),
    ],
)  # fmt: skip
def test_kernels_of_gpus_in_the_emulator(family: str, precision: str, text: str, layout: str) -> None:
    source = source_of(family, KernelSpec(Pattern.parse(text), precision, layout, EVERY))
    for batch in (1, 37) if family != "gemv" else (3,):
        check_result(source, batch_for(source, batch), in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layouts", [("bsf", None), ("bsl", None), ("bsf", "bsl")])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(("family", "precision"), [("simt", "float32"), ("mma", "bfloat16")])
def test_chains_of_gpus_in_the_emulator(
    family: str, precision: str, chain: tuple[str, ...], layouts: tuple[str, str | None]
) -> None:
    """One launch gives the bits of one launch per factor."""
    kernel = chain_of(patterns_of(chain), precision, layouts[0], Epilogue(True), out_layout=layouts[1])
    own, limits = family_named(family), cuda_limits("sm_80")
    constants = own.default(kernel, limits)
    check(own, kernel, constants, limits)
    arrays = arrays_of(kernel, 37)
    check_against_factors(render(kernel, constants, family=family), arrays, in_emulator())


@pytest.mark.exhaustive
@vectors.needs_opencl
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "complex64"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", vectors.WAYS)
@pytest.mark.parametrize("text", [*LOADS, PATTERNS[0], *PATTERNS[3:]])
def test_exchanged_features_of_any_lanes(text: str, along: str, layout: str, precision: str) -> None:
    """Products and gradients, with lanes along the outputs and along the batch."""
    kernel, job = (KernelSpec(Pattern.parse(text), precision, layout, job=each) for each in ("multiply", "gradient"))
    for batch in (1, 7, 37):
        if text in LOADS:
            vectors.agrees(kernel, vectors.constants_of(kernel, along, 4), batch)
        if gradients.allows(job, along, 4) and precision != "complex64":
            gradients.agrees(job, gradients.constants_of(job, along, 4), batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", LOADS)
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("simt", "float32"), ("simt", "float16"), ("gradient", "float32"), ("gradient", "float16"),
        ("mma", "bfloat16"), ("mma", "tf32"), ("gemv", "float16"), ("gradient_mma", "bfloat16"),
        ("gradient_mma", "tf32"),
    ],
)  # fmt: skip
def test_exchanged_inputs_in_the_emulator(family: str, precision: str, text: str, layout: str) -> None:
    source = source_of(family, KernelSpec(Pattern.parse(text), precision, layout, EVERY))
    for batch in (1, 37):
        check_result(source, batch, in_emulator())


@vectors.needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", vectors.WAYS)
def test_gradients_of_exchanged_outputs_on_a_processor(along: str, layout: str) -> None:
    kernel = KernelSpec(Pattern.parse(PATTERNS[4]), layout=layout, job="gradient")
    gradients.agrees(kernel, gradients.constants_of(kernel, along, 4), 7)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", [*PATTERNS, "2,24,16,1@k.i"])
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("gradient", "float32"), ("gradient", "float16"), ("gradient_mma", "bfloat16"), ("gradient_mma", "tf32"),
        ("gradient_mma", "c64_tf32x3"),
    ],
)  # fmt: skip
def test_gradients_of_exchanged_outputs_in_the_emulator(family: str, precision: str, text: str, layout: str) -> None:
    source = source_of(family, KernelSpec(Pattern.parse(text), precision, layout))
    for batch in (1, 37):
        check_result(source, batch, in_emulator())


def test_gradients_count_the_sectors_of_exchanged_outputs() -> None:
    """Each sector has outputs of all eight blocks, so each block reads all sectors that a tile of it reaches."""
    own, limits, batch = family_named("gradient"), cuda_limits("sm_80"), 64

    constants = own.default(KernelSpec(Pattern(8, 64, 64, 1), job="gradient"), limits)

    def moved(text: str, layout: str) -> int:
        kernel = KernelSpec(Pattern.parse(text), "bfloat16", layout, job="gradient")
        return own.work(kernel, constants, batch).cache_bytes

    y_bytes = batch * 8 * 64 * 2
    assert moved("8,64,64,1@k.i", "bsl") == moved("8,64,64,1", "bsl")
    assert (moved("8,64,64,1@k.i", "bsf") - moved("8,64,64,1", "bsf")) % y_bytes == 0
    assert moved("8,64,64,1@k.i", "bsf") - moved("8,64,64,1", "bsf") >= (8 - 1) * y_bytes


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize(
    ("family", "precision"),
    [
        ("simt", "float32"), ("gradient", "float32"), ("mma", "bfloat16"), ("gemv", "float32"),
        ("gradient_mma", "bfloat16"),
    ],
)  # fmt: skip
def test_exchanged_inputs_have_no_races(family: str, precision: str, sanitize: str) -> None:
    for layout in LAYOUTS:
        source = source_of(family, KernelSpec(Pattern.parse("l1:2.j.i.l2@2,5,6,3@k.j.i"), precision, layout))
        check_result(source, 9, in_emulator(sanitize=sanitize))


# the dimensions of a tensor map are those of the digits; in bsf, runs of 128, 64, 32 and 16 bytes are its rows
BOXES = [
    *(
        (*kind, "bsl", text)
        for kind in (("shared", "bfloat16"), ("registers", "tf32"))
        for text in ("l.i@4,32,70,1", "l.i.j@3,9,7,16", "l1:4.i.l2@4,24,64,1", "l1:3.j.i.l2@2,24,48,3",
                     "i1:2.l1:2.i2.l2@4,24,48,1")
    ),
    ("shared", "bfloat16", "bsf", "l1:2.i.l2@4,32,128,1"), ("shared", "bfloat16", "bsf", "i1:2.l1:3.i2.l2@4,24,192,1"),
    ("registers", "bfloat16", "bsf", "l1:2.i.l2@4,32,128,1"), ("registers", "bfloat16", "bsf", "l1:2.i.l2@4,40,64,1"),
    ("registers", "bfloat16", "bsf", "l1:4.i.l2@4,32,64,1"), ("registers", "float16", "bsf", "l1:7.i.l2@3,32,56,1"),
    ("registers", "bfloat16", "bsf", "l.i.j@3,24,20,8"), ("registers", "bfloat16", "bsf", "j1:2.l.i.j2@3,24,12,32"),
    ("registers", "tf32", "bsf", "l1:4.i.l2@4,24,64,1"), ("registers", "tf32x3", "bsf", "i1:2.l1:16.i2.l2@4,24,64,1"),
    ("registers", "tf32", "bsf", "l1:2.i.l2.j@3,24,16,8"),
]  # fmt: skip


@pytest.mark.exhaustive
@pytest.mark.parametrize(("x_from", "precision", "layout", "text"), BOXES)
def test_boxes_of_exchanged_inputs_in_the_emulator(x_from: str, precision: str, layout: str, text: str) -> None:
    check_boxes(x_from, precision, layout, text)


@pytest.mark.parametrize(
    ("precision", "text"),
    [("bfloat16", "l1:4.i.l2@4,32,64,1"), ("tf32", "l1:16.i.l2@2,24,64,1"), ("bfloat16", "l.i.j@3,24,20,8")],
)
def test_boxes_of_short_runs_in_the_emulator(precision: str, text: str) -> None:
    """Runs of 32 and 16 bytes."""
    check_boxes("registers", precision, "bsf", text)


def check_boxes(x_from: str, precision: str, layout: str, text: str) -> None:
    kernel, limits = KernelSpec(Pattern.parse(text), precision, layout, EVERY), cuda_limits("sm_90a")
    own = family_named(f"wgmma_{x_from}")
    constants = own.default(kernel, limits)
    check(own, kernel, constants, limits)
    check_result(render(kernel, constants, family=own.name), 40, in_emulator())


def test_boxes_hold_whole_digits() -> None:
    places = places_of(Pattern.parse("i1:2.l1:6.i2.l2@4,8,24,1").inputs)
    assert [(each.name, each.unit, each.size, each.features) for each in places] == [
        ("l", 1, 4, 1), ("l", 4, 6, 8), ("i", 1, 2, 4), ("i", 2, 2, 48)
    ]  # fmt: skip
    found = {count: extents_of(places, {"l": count, "i": 1}) for count in (2, 3, 4, 12, 16, 30)}
    assert found == {
        2: (2, 1, 1, 1), 3: None, 4: (4, 1, 1, 1), 12: (4, 3, 1, 1), 16: (4, 4, 1, 1), 30: None
    }  # fmt: skip
    kernel = KernelSpec(Pattern.parse("l1:4.i.l2@4,64,64,1"), "bfloat16", "bsl")
    own, limits = family_named("wgmma_shared"), cuda_limits("sm_90a")
    chosen = own.default(kernel, limits)
    with pytest.raises(ConstantsError, match="boxes of X hold whole digits of exchanged inputs"):
        check(own, KernelSpec(Pattern.parse("l1:4.i.l2:24@4,64,96,1"), "bfloat16", "bsl"), chosen.changed(tile_in=16))
    with pytest.raises(ConstantsError, match="cluster_out=2 must be 1 where an order divides an index of the inputs"):
        check(own, kernel, chosen.changed(tile_out=32, cluster_out=2))


@pytest.mark.exhaustive
@pytest.mark.parametrize("text", LOADS[:2])
def test_x_stays_in_shared_memory_in_another_order(text: str) -> None:
    """Blocks that walk over all tiles of outputs read exchanged inputs once."""
    pattern = Pattern.parse(text)
    kernel = KernelSpec(Pattern(pattern.a, 40, pattern.c, pattern.d, load=pattern.load), "bfloat16", "bsf")
    mma = family_named("mma")
    constants = mma.default(kernel, cuda_limits("sm_80")).changed(tile_out=16, warps_out=1, resident=1, stages=2)
    check(mma, kernel, constants, cuda_limits("sm_80"))
    check_result(render(kernel, constants, family="mma"), 37, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layouts", [("bsf", None), ("bsl", None), ("bsf", "bsl")])
@pytest.mark.parametrize(
    ("family", "precision", "chain", "batch"),
    [
        *(("simt", "float32", chain, 37) for chain in LOADED_CHAINS),
        *(("mma", "bfloat16", chain, 37) for chain in LOADED_CHAINS),
        *(("gemv", "float16", chain, 3) for chain in (*NARROW_CHAINS, *SMALL_CHAINS)),
    ],
)
def test_chains_that_read_exchanged_features_in_the_emulator(
    family: str, precision: str, chain: tuple[str, ...], batch: int, layouts: tuple[str, str | None]
) -> None:
    kernel = chain_of(Chain(chain).factors, precision, layouts[0], Epilogue(True), out_layout=layouts[1])
    own, limits = family_named(family), cuda_limits("sm_80")
    constants = own.default(kernel, limits)
    check(own, kernel, constants, limits)
    arrays = arrays_of(kernel, batch)
    check_against_factors(render(kernel, constants, family=family), arrays, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "precision", "batch", "changed"),
    [
        *(
            ("mma", "bfloat16", 37, {"tile_batch": 128, "stream": stream, "stages": 2, "min_blocks": 1})
            for stream in (0, 1)
        ),
        ("gemv", "float16", 3, {}),
    ],
)
def test_layers_on_one_x_read_it_in_orders_of_their_own(
    family: str, precision: str, batch: int, changed: dict[str, int], layout: str
) -> None:
    """Layers copy 16, 8 or 4 bytes at a time in batch-size-first, or single elements."""
    texts = ("2,16,48,1", "l1:8.i.l2@6,24,16,1@k.i", "l.i@4,16,24,1", "8,16,12,1@k1:4.i.k2")
    kernel = group_of(tuple((Pattern.parse(text),) for text in texts), precision, layout, Epilogue(True))
    own, limits = family_named(family), cuda_limits("sm_90a")
    constants = own.default(kernel, limits).changed(**changed)
    check(own, kernel, constants, limits)
    arrays = arrays_of(kernel, batch)
    results = run_group(render(kernel, constants, family=family), arrays, in_emulator())
    for number, got in enumerate(results):
        assert is_right(kernel, got, truth_of(kernel, arrays, number), number)


@pytest.mark.exhaustive
@pytest.mark.parametrize("lanes", [4, 16])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", vectors.WAYS)
@pytest.mark.parametrize("text", PAIRED)
def test_exchanged_inputs_in_pairs(
    text: str, along: str, layout: str, lanes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Products join two inputs, and gradients two rows of the batch."""
    chosen_native(monkeypatch)
    pattern = Pattern.parse(text)
    kernel, loaded = KernelSpec(pattern, "bfloat16", layout), replace(pattern, store="")
    job = KernelSpec(loaded, "bfloat16", layout, job="gradient")
    for batch in (1, 7, 37):
        vectors.agrees(kernel, vectors.constants_of(kernel, along, lanes, pairs=1), batch)
        if gradients.allows(job, along, lanes) and (layout == "bsf" or along == "batch"):
            gradients.agrees(job, replace(gradients.constants_of(job, along, lanes), pairs=1), batch)


@given(pattern=exchanged_patterns(), most=st.integers(1, 9))
def test_planes_are_copied_in_the_order_of_memory(pattern: Pattern, most: int) -> None:
    for order in (pattern.inputs, pattern.outputs):
        a, inner, d = order.sizes
        for scope in scopes_of(order, most):
            count, run, digits = scope * inner * d, run_of_plane(order, scope), digits_of_plane(order, scope)
            natural = [
                sum(at // each["after"] % each["size"] * each["natural"] for each in digits) for at in range(count)
            ]
            assert sorted(natural) == list(range(count))
            for first in (0, a - scope):
                places = [order.place_of(first + each // (inner * d), each // d % inner, each % d) for each in natural]
                assert places == sorted(places)
                assert all(places[at + 1] == places[at] + 1 for at in range(count - 1) if (at + 1) % run)


@given(pattern=exchanged_patterns())
def test_the_first_input_of_a_pair_is_copied_before_the_second(pattern: Pattern) -> None:
    tiling = VectorTiling(KernelSpec(pattern, "bfloat16"), VectorConstants("batch", 4, 1, 1, 4, 1, 1, 0, 1))
    order, (a, _, c, d) = pattern.inputs, pattern.shape
    ordered = all(
        order.place_of(i, first, j) < order.place_of(i, first + 1, j)
        for i, first, j in product(range(a), range(0, c - 1, 2), range(d))
    )
    assert tiling.splits_pairs == (not ordered)
    assert tiling.run_in == 1 or ordered


def test_exchanged_inputs_are_multiplied_in_pairs() -> None:
    limits = Limits(
        2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False,
        dots=(BF16.name,), tiles=(BF16.name,),
    )  # fmt: skip
    loaded, vector = Pattern(4, 32, 16, 1, load="l.i"), family_named("vector")
    for pattern, panel in ((loaded, 1), (loaded.natural, 0)):
        for kernel in (KernelSpec(pattern, "bfloat16"), KernelSpec((pattern, Pattern(4, 8, 32, 1)), "bfloat16")):
            chosen = vector.default(kernel, replace(limits, tiles=()), 64)
            assert (chosen.pairs, chosen.parsed[0].panel) == (1, panel)
            check(vector, kernel, chosen, limits)
        gradient = KernelSpec(pattern, "bfloat16", job="gradient")
        found = family_named("cpu_gradient").defaults(gradient, limits, 64)
        assert [each.pairs for each in found if hasattr(each, "pairs")] == [1]
        assert [hasattr(each, "pairs") for each in found] == ([True, False] if panel else [False, True]), "not timed"
    natural = vector.default(KernelSpec(loaded.natural), limits, 64).changed(along="outputs", panel=0)
    with pytest.raises(ConstantsError, match="panel=0 must be 1 for exchanged inputs; try 1"):
        check(vector, KernelSpec(loaded), natural, limits)


def test_exchanged_inputs_are_copied_as_they_lie() -> None:
    """Defaults copy whole vectors, squares along the batch, or single inputs of rows that stay in an L1 cache."""
    limits, vector = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, dots=(BF16.name,)), family_named("vector")
    for text, batch, along, block in (
        ("l1:2.i.l2@16,64,64,1", 1568, "outputs", 36), ("l1:4.i.l2@16,64,64,1", 1568, "batch", 32),
        ("l1:4.i.l2@16,64,64,1", 4, "outputs", 4), ("l.i@16,64,64,1", 1568, "outputs", 12),
        ("l.i@64,64,64,1", 1568, "outputs", 6), ("l.i@4,1024,1024,1", 1568, "outputs", 24),
    ):  # fmt: skip
        found = vector.default(KernelSpec(Pattern.parse(text), "bfloat16"), limits, batch)
        assert (found.along, found.block) == (along, block), text


def test_small_batches_count_the_sectors_of_exchanged_features() -> None:
    """Each sector has features of all eight blocks, so each block moves all sectors that a tile of it reaches."""
    gemv, constants, batch = family_named("gemv"), GemvConstants(4, 16, 1, 1, 8, 1, 1), 4

    def moved(text: str) -> int:
        return gemv.work(KernelSpec(Pattern.parse(text), "bfloat16", "bsf"), constants, batch).cache_bytes

    natural, x_bytes, y_bytes = moved("8,64,64,1"), batch * 8 * 64 * 2, batch * 8 * 64 * 2
    assert moved("l.i@8,64,64,1") - natural == (8 - 1) * x_bytes * (64 // 16)  # once per tile of outputs
    assert moved("8,64,64,1@k.i") - natural == (8 - 1) * y_bytes


@pytest.mark.parametrize(("last", "times"), [("1,16,128,1", 1), ("8,16,16,1", 8)])
def test_blocks_of_chains_count_the_sectors_of_exchanged_inputs(last: str, times: int) -> None:
    """A block that needs the inputs of all blocks on the diagonal moves each sector once."""
    gemv, constants = family_named("gemv"), GemvChainConstants(4, 16, 1, 1, 8, 1, 1, 1, 8, 1)

    def moved(first: str) -> int:
        kernel = chain_of((Pattern.parse(first), Pattern.parse(last)), "bfloat16", "bsf", Epilogue())
        return gemv.work(kernel, constants, 4).cache_bytes

    assert moved("l.i@8,16,64,1") - moved("8,16,64,1") == (times - 1) * 4 * 8 * 64 * 2


def test_copies_of_launchers_exchange_too() -> None:
    assert repr(Launcher("j.l@1,4,3,2")) == "Launcher('j.l@1,4,3,2')"
    launchers = [
        Launcher("1,4,3,2@j.k", activation="relu"), ChainLauncher("1,4,3,2@j.k", "8,2,1,1@k.i"),
        Launcher("j.l@1,4,3,2"), ChainLauncher("j.l@1,4,3,2", "8,2,1,1"),
    ]  # fmt: skip
    for launcher in launchers:
        for copied in (copy.deepcopy(launcher), pickle.loads(pickle.dumps(launcher))):
            assert copied.chain == launcher.chain
    assert repr(Launcher("1,4,3,2@j.k")) == "Launcher('1,4,3,2@j.k')"


def test_other_families_leave_them_to_these() -> None:
    limits = cuda_limits("sm_90a")
    for text, sources in (
        ("l.i.j@4,64,64,2", {("shared", "bsl")}), ("l1:4.i.l2@4,64,64,1", {("shared", "bsl"), ("registers", "bsf")}),
        ("l1:16.i.l2@4,64,64,1", {("shared", "bsl")}), ("l1:2.i.l2:26@4,64,52,1", set()),
        ("l1:2.i.l2@4,64,128,1", {("shared", "bsl"), ("shared", "bsf"), ("registers", "bsf")}),
        ("i1:2.l1:2.j.i2.l2@4,64,64,2", set()), ("l.i.j@4,64,64,8", {("shared", "bsl"), ("registers", "bsf")}),
        ("4,64,64,1@k.i", {("shared", "bsl"), ("shared", "bsf"), ("registers", "bsf")}),
        ("4,64,64,2@i.k1:4.j.k2", {("registers", "bsf")}),
    ):  # fmt: skip
        kernels = [KernelSpec(Pattern.parse(text), "bfloat16", layout) for layout in LAYOUTS]
        assert {
            (x_from, kernel.layout)
            for x_from, kernel in product(("shared", "registers", "permuted"), kernels)
            if family_named(f"wgmma_{x_from}").supports(kernel, limits)
        } == sources
    single = KernelSpec(Pattern(4, 64, 64, 2, store="i.j.k"), "bfloat16", "bsf")
    assert [name for name, family in FAMILIES.items() if family.supports(single, limits)] == list(GPU_FAMILIES)
    chain = KernelSpec(patterns_of(CHAINS[0]), "bfloat16", "bsf")
    assert {name for name, family in FAMILIES.items() if family.supports(chain, limits)} <= {"simt", "mma", "gemv"}
    for job, families in (("multiply", {"simt", "mma", "gemv"}), ("gradient", {"gradient"})):
        for pattern in (Pattern(4, 64, 64, 2, load="l.i.j"), Pattern(4, 64, 64, 2, store="i.j.k", load="l.i.j")):
            kernel = KernelSpec(pattern, "bfloat16", "bsf", job=job)
            assert {name for name, each in FAMILIES.items() if each.supports(kernel, limits)} == families


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_cores_multiply_exchanged_inputs_by_default(layout: str) -> None:
    limits, loaded = cuda_limits("sm_90a"), Pattern(4, 64, 64, 2, load="l.i.j")
    kernel = KernelSpec(loaded, "bfloat16", layout)
    large = "wgmma" if layout == "bsl" else "mma"
    assert [family_for(kernel, limits, batch).name for batch in (1, 1024)] == ["gemv", large]
    gradient = KernelSpec(loaded, "bfloat16", layout, job="gradient")
    assert family_for(gradient, limits, 1024).default(gradient, limits, 1024).on_tensor_cores


def test_no_copy_crosses_a_run_of_exchanged_inputs() -> None:
    """Runs of 1, 2, 4 and 16 neighbours in 16 bits. Threads load several single elements before they store them."""
    mma, limits = family_named("mma"), cuda_limits("sm_80")
    for text, vector, at_once in (
        ("l.i@8,64,64,1", 1, 8), ("l1:32.i.l2@8,64,64,1", 2, 1), ("l1:16.i.l2@8,64,64,1", 4, 1),
        ("l1:4.i.l2@8,64,64,1", 8, 1), ("8,64,64,1", 8, 1), ("8,64,63,1", 1, 1),
    ):  # fmt: skip
        kernel = KernelSpec(Pattern.parse(text), "bfloat16", "bsf")
        tiling: Any = mma.shape(kernel, mma.default(kernel, limits))  # type: ignore[attr-defined]
        assert (tiling.x_vector, tiling.elements_at_once) == (vector, at_once)


@pytest.mark.parametrize("family", ["mma", "wgmma_shared", "wgmma_registers"])
def test_no_store_crosses_a_run_of_exchanged_outputs(family: str) -> None:
    own, limits = family_named(family), cuda_limits("sm_90a")
    natural = KernelSpec(Pattern(4, 64, 64, 1), "bfloat16", "bsf")
    constants = own.default(natural, limits)
    most = own.shape(natural, constants).y_vector
    assert most > 2
    for text, run in (("4,64,64,1@k1:32.i.k2", 2), ("4,64,64,1@k.i", 1)):
        assert own.shape(KernelSpec(Pattern.parse(text), "bfloat16", "bsf"), constants).y_vector == run


@pytest.mark.exhaustive
@vectors.needs_opencl
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("along", vectors.WAYS)
@pytest.mark.parametrize(("text", "weights"), [(PATTERNS[0], "int8"), (LOADS[3], "e4m3"), (PATTERNS[3], "bfloat16")])
def test_weights_in_eight_bits(text: str, weights: Any, along: str, layout: Any) -> None:
    kernel = KernelSpec(Pattern.parse(text), "float32", layout, EVERY, weights=weights)
    for batch in (1, 37):
        vectors.agrees(kernel, vectors.constants_of(kernel, along, 4), batch, boundary=4)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("text", "storage"), [(LOADS[1], "e4m3"), (LOADS[3], "int8")])
def test_x_in_eight_bits(text: str, storage: Any, layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSpec(Pattern.parse(text), "float32", layout, EVERY, weights=storage, inputs=storage)
    for batch in (1, 37):
        found = measure(chosen_native(monkeypatch), kernel, batch, runs=0)
        assert (found.plan.choice.family, found.passed) == ("vector", True), found.error


@pytest.mark.parametrize(
    ("family", "text", "inputs", "layout"),
    [
        ("simt", LOADS[3], "e4m3", "bsf"), ("simt", PATTERNS[3], "same", "bsf"), ("mma", PATTERNS[0], "same", "bsf"),
        ("mma", LOADS[0], "e4m3", "bsf"), ("mma", PATTERNS[0], "e4m3", "bsf"), ("mma", PATTERNS[2], "e4m3", "bsf"),
        ("mma", PATTERNS[3], "e4m3", "bsl"), ("gemv", LOADS[0], "e4m3", "bsf"), ("gemv", PATTERNS[3], "same", "bsf"),
        ("gemv", PATTERNS[4], "e4m3", "bsl"), ("wgmma_shared", PATTERNS[0], "e4m3", "bsf"),
    ],
)  # fmt: skip
def test_weights_in_eight_bits_in_the_emulator(family: str, text: str, inputs: Any, layout: Any) -> None:
    """The sizes of the weights differ a hundredfold from output to output."""
    kernel = KernelSpec(Pattern.parse(text), "float16", layout, EVERY, weights="e4m3", inputs=inputs)
    problem, (a, b, _, d) = make_problem(kernel, 5), kernel.pattern.shape
    sizes = 10.0 ** np.random.default_rng(1).uniform(-1, 1, (a, b, 1, d))
    given = quantize(problem.weights * sizes, "e4m3", x_scale=problem.inputs.scale if problem.inputs else None)
    problem = replace(problem, weights=reference.dequantized(given.values, given.scale), quantized=(given,))
    found = multiply(problem, source_of(family, kernel), in_emulator())
    assert compare(problem, found)[0] <= tolerance("float16", kernel.pattern.c)


def test_every_family_of_gpus_scales_outputs_in_any_order() -> None:
    limits = cuda_limits("sm_90a")
    for text, inputs, families in (
        ("4,64,64,2@i.j.k", "same", {"simt", "mma", "gemv"}), ("4,64,64,2@i.j.k", "e4m3", {"simt", "mma", "gemv"}),
        ("4,64,64,1@k.i", "same", {"simt", "mma", "gemv"}),
        ("4,64,64,1@k.i", "e4m3", {"simt", "mma", "gemv", "wgmma"}),
        ("l.i@4,64,128,1", "same", {"simt", "mma", "gemv"}), ("l.i@4,64,128,1", "e4m3", {"simt", "mma", "gemv"}),
        ("4,64,128,1", "e4m3", {"simt", "mma", "gemv", "wgmma"}),
    ):  # fmt: skip
        kernel = KernelSpec(Pattern.parse(text), "bfloat16", weights="e4m3", inputs=inputs)
        assert {name for name, family in FAMILIES.items() if family.supports(kernel, limits)} == families
    scaled = KernelSpec(Pattern.parse("l.i@4,64,128,1"), "float16", weights="int8")
    assert family_named("gemv").supports(scaled, limits)


def test_wgmma_refuses_orders_without_boxes_by_its_rules() -> None:
    """Also where no device is known."""
    pattern = Pattern.parse("l.i@4,64,128,1")
    for name in ("wgmma_shared", "wgmma_registers"):
        own = family_named(name)
        natural, exchanged = (KernelSpec(each, "bfloat16", "bsf") for each in (pattern.natural, pattern))
        constants = own.default(natural, cuda_limits("sm_90a"))
        check(own, natural, constants)
        with pytest.raises(ConstantsError, match="the kernel is one that x_from is for"):
            check(own, exchanged, constants)


@pytest.mark.parametrize("text", ["j.l@1,4,3,2@j.k", "l.i@4,8,6,1@k1:2.i.k2"])
def test_quantized_weights_know_no_order(text: str) -> None:
    pattern, random = Pattern.parse(text), np.random.default_rng(0)
    weights = quantize(random.standard_normal(pattern.shape).astype(np.float32), "int8")
    x = random.standard_normal((5, pattern.in_features)).astype(np.float32)
    truth = x @ reference.to_dense(pattern, weights.dequantized()).T
    np.testing.assert_allclose(Launcher(text)(x, weights), truth, rtol=1e-4, atol=1e-4)
    assert text in repr(Launcher(text).pack(weights))
    with pytest.raises(LaunchError, match=r"got Quantized\(1,2,2,1, .*weights of .* are needed"):
        Launcher(text).pack(quantize(np.ones((1, 2, 2, 1), np.float32), "int8"))


def test_a_kernel_says_in_its_name_how_outputs_are_stored() -> None:
    pattern = Pattern.parse("4,32,16,1@k1:4.i.k2")
    natural, exchanged = KernelSpec(pattern.natural), KernelSpec(pattern)
    assert natural.name == "ks_4x32x16x1_float32_bsf"
    assert exchanged.name == "ks_4x32x16x1_k1x4ik2x8_float32_bsf"
    assert natural.digest != exchanged.digest
    assert natural.digest == "57baecb4"
    assert exchanged.digest == "095c1a9c"
    loaded = KernelSpec(Pattern.parse("l.i@4,32,16,1@k1:4.i.k2"))
    assert loaded.name == "ks_4x32x16x1_k1x4ik2x8_from_li_float32_bsf"
    assert loaded.digest not in (natural.digest, exchanged.digest)
    assert KernelSpec(Chain((pattern, Pattern(4, 8, 32, 1)))).name.startswith("ks_4x32x16x1_k1x4ik2x8_4x8x32x1_")


def test_many_factors_have_a_name_that_a_file_can_have() -> None:
    divided = Pattern(8, 8, 8, 8, "k1:2.i1:2.j1:2.k2:2.i2:2.j2:2.k3:2.i3:2.j3:2")
    names = {KernelSpec((divided,) * count + (each,)).name for count in (5, 6) for each in (divided, divided.natural)}
    assert len(names) == 4
    assert max(map(len, names)) < 100
    assert all(name.startswith(("ks_6_factors_", "ks_7_factors_")) for name in names)
