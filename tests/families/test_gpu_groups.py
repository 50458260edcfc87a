"""Layers on one X in one launch on a GPU: right, the same as each layer by itself, within their arrays; how often X
is read.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.emit.render import Source, render
from ksgen.families import FAMILIES, check
from ksgen.families.gpu_chain import GpuProduct
from ksgen.families.mma.family import Mma
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue
from tests.emulator import Counts, is_installed
from tests.support.counting import Counting, compared
from tests.support.gpu_chains import (
    EVEN,
    LIMITS,
    PLANES,
    group_of,
    is_right,
    read_again,
    run_chain,
    run_group,
    source_of,
)
from tests.support.kernels import in_emulator
from tests.support.products import ALL, arrays_of, truth_of

ALONE = Pattern(2, 24, 64, 1), Pattern(2, 40, 64, 1)  # of one factor, on the X of EVEN
PAIR, QKV = (EVEN, ALONE[:1]), (EVEN, EVEN[:1], EVEN)
SMALL = (Pattern(2, 16, 17, 1), Pattern(1, 17, 16, 2), Pattern(1, 9, 34, 1))  # 34 -> 32 -> 34 -> 9: rests everywhere
APART = (SMALL, (Pattern(1, 3, 2, 17),), SMALL[:1])  # whose first factors take X in two ways
LONG = (SMALL, SMALL[:1])  # the second chain needs X after the first one's third factor


def alone(source: Source, number: int) -> tuple[Source, list[str]]:
    """The launch of one of the chains, under its own constants of the group; and the numbers of its weights there."""
    kernel, constants = source.kernel, source.constants
    chain, tiles = kernel.chains[number].factors, constants.tiles.split("; ")[number]
    first = sum(map(len, kernel.chains[:number]))
    one = replace(kernel, chains=chain)
    return render(one, replace(constants, tiles=tiles), family=source.family), [
        f"weights {first + at}" for at in range(len(chain))
    ]


CASES = [
    ("mma", QKV, "float16", "bsf", ALL),
    ("mma", PAIR, "bfloat16", "bsl", Epilogue(bias=True)),
    ("mma", (ALONE[:1], ALONE[1:], EVEN[:1]), "tf32x3", "bsf", ALL),
    ("mma", APART, "float16", "bsl", ALL),
    ("mma", LONG, "bfloat16", "bsf", Epilogue(residual=True)),
    ("mma", (PLANES[1:], PLANES[1:2]), "float16", "bsf", ALL),
    ("simt", PAIR, "float32", "bsf", ALL),
    ("simt", (ALONE[:1], ALONE[1:], EVEN[:1]), "float32", "bsl", ALL),
    ("simt", APART, "float64", "bsf", Epilogue(residual=True)),
    ("simt", LONG, "float32", "bsl", Epilogue(activation="gelu")),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "chains", "precision", "layout", "epilogue"), CASES)
def test_agrees_with_float64_and_with_one_launch_per_layer(
    family: str, chains: tuple[tuple[Pattern, ...], ...], precision: str, layout: str, epilogue: Epilogue
) -> None:
    kernel, run = group_of(chains, precision, layout, epilogue), in_emulator()
    source = source_of(family, kernel)
    for batch in (1, source.constants.tile_batch + 3):
        arrays = arrays_of(kernel, batch)
        for number, got in enumerate(run_group(source, arrays, run)):
            assert is_right(kernel, got, truth_of(kernel, arrays, number), number), (number, source.constants, batch)
            if len(chains[number]) > 1:
                one, weights = alone(source, number)
                own = {
                    name: arrays[f"{name}_{number + 1}"]
                    for name in ("y", "bias", "residual")
                    if f"{name}_{number + 1}" in arrays
                }
                own |= {"x": arrays["x"]} | {f"weights {at}": arrays[name] for at, name in enumerate(weights)}
                np.testing.assert_array_equal(got, run_chain(one, own, run))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "precision"), [("mma", "bfloat16"), ("simt", "float32")])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_slices(family: str, precision: str, layout: str) -> None:
    """Outputs that share one array have gaps between their rows."""
    kernel = group_of(PAIR, precision, layout, ALL, stride="any")
    source, arrays = source_of(family, kernel), arrays_of(kernel, 5)
    for number, got in enumerate(run_group(source, arrays, in_emulator())):
        assert is_right(kernel, got, truth_of(kernel, arrays, number), number)


def test_a_group_reads_x_in_stages() -> None:
    """Slices of X are read again per chain, because the first factors read them differently."""
    kernel, family = group_of(APART, "float16", "bsf", ALL, stride="any"), Mma()
    constants = next(each for each in family.space(kernel, LIMITS) if each.stream and each.stages == 3)
    check(family, kernel, constants, LIMITS)
    source, shape = render(kernel, constants, family="mma"), family.shape(kernel, constants)
    assert shape.resident_size == 3 * shape.x_slot
    for batch, sanitize in ((constants.tile_batch + 3, ""), (5, "race")):
        arrays = arrays_of(kernel, batch)
        run = in_emulator(sanitize=sanitize) if sanitize else in_emulator()
        for number, got in enumerate(run_group(source, arrays, run)):
            assert is_right(kernel, got, truth_of(kernel, arrays, number), number), (number, constants, batch)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "precision", "chains", "layout"),
    [("mma", "float16", LONG, "bsf"), ("mma", "float16", APART, "bsl"), ("simt", "float32", APART, "bsf")],
)
def test_there_are_no_reads_outside_the_arrays_and_no_races(
    family: str, precision: str, chains: tuple[tuple[Pattern, ...], ...], layout: str
) -> None:
    source = source_of(family, group_of(chains, precision, layout, ALL))
    arrays = arrays_of(source.kernel, 5)
    expected = run_group(source, arrays, in_emulator())
    for sanitize in ("address", "race"):
        for got, y in zip(run_group(source, arrays, in_emulator(sanitize=sanitize), behind=0), expected, strict=True):
            np.testing.assert_array_equal(got, y)


def test_x_is_copied_once_for_all_chains_that_read_it_in_one_order() -> None:
    def copying(chains: tuple[tuple[Pattern, ...], ...], layout: str) -> int:
        kernel = group_of(chains, "float16", layout)
        whole = next(each for each in Mma().space(kernel, LIMITS) if not each.stream)
        source = render(kernel, whole, family="mma")
        shape = Mma().shape(kernel, whole)
        assert shape.resident_size == sum(shape.factors[at].input_bytes for _, at in shape.orders.values())
        assert source.text.count("::load_whole_x(x, x_pitch") == len(shape.orders)
        return len(shape.orders)

    assert [copying(QKV, layout) for layout in ("bsf", "bsl")] == [1, 1]
    assert copying((ALONE[:1], ALONE[1:], EVEN[:1]), "bsf") == 1
    assert [copying(APART, layout) for layout in ("bsf", "bsl")] == [2, 2]


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")
@pytest.mark.parametrize(("family", "precision"), [("mma", "float16"), ("simt", "float32")])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_what_the_cost_model_says_moved_is_what_moves(family: str, precision: str, layout: str) -> None:
    """Bytes agree exactly, unless two i of an output share a sector. `simt` reads X again for the second chain.
    The emulator counts only a block's first reading.
    """
    kernel = group_of(PAIR, precision, layout)
    source, run, batch = source_of(family, kernel), Counting(timeout_s=300), 256
    run_group(source, arrays_of(kernel, batch), run, behind=0)
    rows = compared(source, batch, run.by_entry[source.entry], Counts())
    again = 4 * batch * kernel.in_features if family == "simt" else read_again(source, batch)
    for name, (expected, counted) in rows.items():
        within = {"cycles of shared memory": 0.15, "bytes of the cache": 0.02}.get(name, 0)
        found = counted + (again if name == "bytes of the cache" else 0)
        assert expected == pytest.approx(found, rel=within), (name, source.constants, rows)


def test_the_model_counts_x_once_and_every_output() -> None:
    for name, precision, item in (("mma", "float16", 2), ("simt", "float32", 4)):
        family: Any = FAMILIES[name]
        assert isinstance(family, GpuProduct)
        kernel = group_of(QKV, precision, "bsf")
        work = family.work(kernel, family.default(kernel, LIMITS), 6400)
        packed = sum(each.packed_bytes for each in family.shape(kernel, family.default(kernel, LIMITS)).factors)
        assert work.memory_bytes == item * 6400 * (128 + 128 + 96 + 128) + packed
