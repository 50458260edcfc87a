"""Kernels of slices in the emulator: X, Y and the residual each lie in rows as far apart as the call says."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ksgen.families import cuda_limits
from ksgen.measure.verify import compare, make_problem, tolerance
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from tests.emulator import SimtError
from tests.families.test_mma import RESIDENT, SPREAD
from tests.support import kernels
from tests.support.kernels import (
    JOB_OF,
    SERVED,
    VARIANTS,
    in_emulator,
    kernel_of,
    patterns_of,
    ragged_of,
    source_of,
    supports,
)

CHUNK_BYTES = 16  # what a wide access moves at most
ADDED = Epilogue(True, "relu", True)
WHOLE = {"x": "whole", "y": "whole", "residual": "whole"}
# whether rows begin at whole chunks: all of them, none, all but those of one array, and those of one array alone
ROWS = [
    WHOLE,
    dict.fromkeys(WHOLE, "odd"),
    *({**WHOLE, name: "odd"} for name in WHOLE),
    *({**dict.fromkeys(WHOLE, "odd"), name: "whole"} for name in WHOLE),
]


def sliced(
    pattern: tuple[int, ...], precision: str, layout: str, epilogue: Epilogue = ADDED, batch: int | None = None
) -> KernelSpec:
    return replace(kernel_of(pattern, precision, layout, epilogue, batch), stride="any")


def _served() -> Iterator[tuple[str, str, str]]:
    for family, precision, layout in SERVED:
        found = patterns_of(family, precision).values()
        if JOB_OF[family] == "multiply" and any(
            supports(family, sliced(pattern, precision, layout)) for pattern in found
        ):
            yield family, precision, layout


SLICED = list(_served())


def one_of_each_size(*sizes: int) -> list[tuple[str, str, str]]:
    """Return a precision per size in bytes, for tests that depend on the size of elements and not on their format."""
    found = {(family, layout, PRECISIONS[name].item_bytes): (family, name, layout) for family, name, layout in SLICED}
    return [each for (*_, size), each in found.items() if size in sizes]


def gaps_of(kernel: KernelSpec, batch: int, rows: dict[str, str] = WHOLE) -> dict[str, int]:
    """Elements between rows, of each array another number: rows begin at whole chunks, or the second of them one
    element behind one.
    """
    chunk, outputs = CHUNK_BYTES // kernel.item_bytes, kernel.pattern.out_features
    columns = (
        {"x": kernel.in_features, "y": outputs, "residual": outputs}
        if kernel.layout == "bsf"
        else dict.fromkeys(WHOLE, batch)
    )
    chunks = {"residual": 1, "x": 2, "y": 3}
    return {name: chunk * number + ((rows[name] == "odd") - columns[name]) % chunk for name, number in chunks.items()}


def check(source: Any, batch: int, run: kernels.Run, rows: dict[str, str] = WHOLE, **options: Any) -> Any:
    return kernels.check(source, batch, run, gaps=gaps_of(source.kernel, batch, rows), **options)


def test_families_of_slices() -> None:
    assert {family for family, *_ in SLICED} == {"simt", "gemv", "mma"}
    for family in ("simt", "mma"):
        assert {each for each in SLICED if each[0] == family} == {each for each in SERVED if each[0] == family}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["dense", "flat", "slab", "rest", "blocks", "aligned", "wide"])
@pytest.mark.parametrize(("family", "precision", "layout"), SLICED)
def test_agrees_with_float64(family: str, precision: str, layout: str, name: str) -> None:
    """All kinds of rows at a batch of whole chunks, and two kinds by turns at others."""
    source, run = source_of(family, sliced(patterns_of(family, precision)[name], precision, layout)), in_emulator()
    for rows in ROWS:
        check(source, 72, run, rows)
    for batch, rows in zip((1, 7, 65, 129), cycle(ROWS[:2]), strict=False):
        check(source, batch, run, rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision", "layout"), SLICED)
def test_of_nothing_added_and_of_one_batch(family: str, precision: str, layout: str) -> None:
    """A kernel without a residual takes no pitch of one."""
    plain = sliced(patterns_of(family, precision)["aligned"], precision, layout, Epilogue(True, "none", False), 72)
    for rows in ROWS[:2]:
        check(source_of(family, plain), 72, in_emulator(), rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("sanitize", ["address", "race"])
@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(2, 4))
def test_no_race_and_no_access_outside(family: str, precision: str, layout: str, sanitize: str) -> None:
    """The batch of whole chunks takes wide accesses, the other ends within one."""
    run = in_emulator(sanitize=sanitize)
    for pattern, batch in ((ragged_of(family, precision, layout), 65), (patterns_of(family, precision)["aligned"], 40)):
        check(source_of(family, sliced(pattern, precision, layout)), batch, run)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(2, 4, 8))
def test_arrays_that_begin_anywhere(family: str, precision: str, layout: str) -> None:
    """Off the boundaries that wide accesses keep to, though rows are whole chunks apart; and added in Y's own place."""
    source = source_of(family, sliced(patterns_of(family, precision)["aligned"], precision, layout))
    for shifts in ({"shift": 1}, {"shift": 2}, {"bias": 1}, {"residual": 1}, {"shift": 1, "residual": 2}):
        check(source, 72, in_emulator(), **shifts)
    for rows in ROWS[:2]:
        check(source, 72, in_emulator(), rows, in_place=True)


@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(4))
def test_rows_that_are_one(family: str, precision: str, layout: str) -> None:
    """A pitch of nothing, as of what PyTorch expands: all rows of X, or of the residual, lie at one place."""
    kernel = sliced(patterns_of(family, precision)["aligned"], precision, layout)
    problem = make_problem(kernel, 72)
    assert problem.residual is not None
    x, residual = (np.repeat(array[:1], len(array), axis=0) for array in (problem.x, problem.residual))
    one = replace(problem, x=x, residual=residual)
    gaps = gaps_of(kernel, 72) | {"x": -x.shape[1], "residual": -residual.shape[1]}
    y = kernels.multiply(one, source_of(family, kernel), in_emulator(), gaps=gaps)
    assert compare(one, y)[0] <= tolerance(precision, one.terms)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(4))
def test_to_the_last_bit_what_dense_arrays_give(family: str, precision: str, layout: str) -> None:
    kernel = sliced(ragged_of(family, precision, layout), precision, layout)
    own = VARIANTS[family].default(kernel, kernels.LIMITS)
    dense = kernels.check(source_of(family, replace(kernel, stride="dense"), own), 65, in_emulator())
    np.testing.assert_array_equal(check(source_of(family, kernel, own), 65, in_emulator()), dense)


@pytest.mark.parametrize(("precision", "pattern", "constants"), [SPREAD[0], SPREAD[4], RESIDENT[0], RESIDENT[4]])
def test_of_warps_along_j_and_of_resident_x(precision: str, pattern: tuple[int, ...], constants: Any) -> None:
    for rows in ROWS[:2]:
        check(source_of("mma", sliced(pattern, precision, "bsf"), constants), 37, in_emulator(), rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_single_precision_through_registers(layout: str) -> None:
    """Kernels for GPUs without cp.async read X in wide accesses, in batch-size-first too."""
    source = source_of(
        "simt", sliced(patterns_of("simt", "float32")["aligned"], "float32", layout), limits=cuda_limits("sm_75")
    )
    assert source.constants.copy == "registers"
    for rows in ROWS:
        check(source, 72, in_emulator(), rows)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "precision"), [("simt", "float32"), ("simt", "float16"), ("mma", "float16"), ("mma", "tf32")]
)
@settings(max_examples=20, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_pitches_and_batch(family: str, precision: str, layout: str, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["flat", "aligned"]))
    source = source_of(family, sliced(patterns_of(family, precision)[name], precision, layout))
    gaps = {each: data.draw(st.integers(0, 40)) for each in WHOLE}
    kernels.check(source, data.draw(st.integers(1, 140)), in_emulator(), gaps=gaps)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize(("family", "precision", "layout"), one_of_each_size(4))
def test_pitches_count_in_64_bits(family: str, precision: str, layout: str, name: str) -> None:
    """2^32 elements more would be no more in 32 bits, and are far outside."""
    source, right = (
        source_of(family, sliced(patterns_of(family, precision)["aligned"], precision, layout)),
        in_emulator(),
    )
    from_end = {"x": -4, "y": -3, "residual": -2}[name]
    # of all parameters: one of less may hide behind another
    assert set(re.findall(r"(\w+) \w+_pitch[,)]", source.text)) == {"extent"}

    def far(source: Any, entry: str, geometry: Any, args: list[Any]) -> None:
        if entry == source.entry:
            args[from_end] += 2**32
        right(source, entry, geometry, args)

    with pytest.raises(SimtError, match="outside every buffer"):
        check(source, 72, far)


# ---- the checks themselves


def test_writes_between_rows_are_reported() -> None:
    source, right = source_of("simt", sliced((2, 6, 5, 3), "float32", "bsf")), in_emulator()

    def broken(change: Any) -> kernels.Run:
        def run(source: Any, entry: str, geometry: Any, args: list[Any]) -> None:
            right(source, entry, geometry, args)
            if not entry.endswith("_pack"):
                change(args)

        return run

    def write_behind(args: list[Any]) -> None:
        args[2][36] = 0  # of Y, behind the first row's 36 elements

    def leak(args: list[Any]) -> None:
        args[2][0] = args[0][30]  # behind the first row of X

    check(source, 9, right)
    with pytest.raises(AssertionError, match="wrote behind Y, or between its rows"):
        check(source, 9, broken(write_behind))
    with pytest.raises(AssertionError, match="nan"):
        check(source, 9, broken(leak))
