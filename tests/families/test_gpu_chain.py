"""What both kinds of chains of GPUs share: all factors of a layer in one launch are right, the same as one by one, and
within their arrays. Constants of each factor in one word, halves of shared memory in turns, a ring, rules.
"""

from dataclasses import dataclass, replace
from itertools import pairwise, product
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES
from ksgen.families.chains import factor_kernels, own_of_factors
from ksgen.families.gpu_chain import BLOCKS, GpuChainShape, GpuProduct
from ksgen.families.mma.chain import MmaChainConstants
from ksgen.families.rules import first_broken
from ksgen.families.simt.chain import SimtChainConstants
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue
from tests.support.gpu_chains import (
    EVEN,
    LIMITS,
    NARROW,
    PLANES,
    RAGGED,
    check_against_factors,
    check_within_arrays,
    group_of,
    is_right,
    run_chain,
    source_of,
)
from tests.support.kernels import in_emulator
from tests.support.products import ALL, arrays_of, chain_of, truth_of

CHAINS = [("mma", "bfloat16"), ("simt", "float32")]
GOOD: dict[str, Any] = {
    "mma": MmaChainConstants(32, "48 64 1 2 1 1 0, 64 16 2 1 2 1 0", 3, 1),
    "simt": SimtChainConstants(32, "48 8 1 4 3, 64 8 1 4 4", 3, 2),
}
LONG = (*EVEN, *EVEN, Pattern(1, 65, 64, 2))
CASES = [
    ("mma", EVEN, "float16", "bsf", Epilogue()),
    ("mma", EVEN, "bfloat16", "bsl", ALL),
    ("mma", EVEN, "tf32x3", "bsf", Epilogue(bias=True)),
    ("mma", RAGGED, "float16", "bsf", ALL),
    ("mma", RAGGED, "bfloat16", "bsl", Epilogue(residual=True)),
    ("mma", RAGGED, "tf32", "bsl", ALL),
    ("mma", RAGGED, "fp16x3", "bsf", Epilogue(activation="relu")),
    ("mma", PLANES, "bfloat16", "bsf", ALL),
    ("mma", PLANES[1:], "tf32x3", "bsf", Epilogue()),
    ("mma", EVEN, "c64_tf32x3", "bsf", Epilogue(residual=True)),
    ("mma", RAGGED, "c64_tf32x3", "bsl", Epilogue(bias=True)),
    ("mma", PLANES[1:], "float16", "bsl", Epilogue(bias=True)),
    ("mma", LONG, "float16", "bsf", Epilogue(activation="gelu")),
    ("simt", EVEN, "float32", "bsf", Epilogue()),
    ("simt", EVEN, "float32", "bsl", ALL),
    ("simt", EVEN, "float64", "bsf", Epilogue(bias=True)),
    ("simt", RAGGED, "float32", "bsf", ALL),
    ("simt", RAGGED, "float32", "bsl", Epilogue(residual=True)),
    ("simt", RAGGED, "float64", "bsl", ALL),
    ("simt", RAGGED, "float64", "bsf", Epilogue(activation="relu")),
    ("simt", PLANES, "float32", "bsf", ALL),
    ("simt", PLANES[1:], "float32", "bsl", Epilogue(bias=True)),
    ("simt", LONG, "float32", "bsf", Epilogue(activation="gelu")),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "patterns", "precision", "layout", "epilogue"), CASES)
def test_agrees_with_float64_and_with_one_launch_per_factor(
    name: str, patterns: tuple[Pattern, ...], precision: str, layout: str, epilogue: Epilogue
) -> None:
    """Sums of plain multiply-adds are added up in one order, whatever the tiles of a launch per factor."""
    kernel, run, family = chain_of(patterns, precision, layout, epilogue), in_emulator(), FAMILIES[name]
    source = source_of(name, kernel)
    rows, alone = source.constants.tile_batch, None
    if name == "simt":
        alone = [family.default(factor, LIMITS) for factor in factor_kernels(kernel)]
    for batch in (1, 7, rows, 100) if name == "simt" else (1, rows + 3):
        check_against_factors(source, arrays_of(kernel, batch), run, alone)


BETWEEN = [
    ("mma", RAGGED, "bfloat16", "bsf", Epilogue(activation="relu"), "gelu"),
    ("mma", EVEN, "tf32x3", "bsl", Epilogue(), "relu"),
    ("mma", PLANES[1:], "float16", "bsl", ALL, "silu"),
    ("simt", RAGGED, "float32", "bsf", Epilogue(activation="relu"), "gelu"),
    ("simt", EVEN, "float64", "bsl", ALL, "silu"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "patterns", "precision", "layout", "epilogue", "between"), BETWEEN)
def test_an_activation_between_factors(
    name: str, patterns: tuple[Pattern, ...], precision: str, layout: str, epilogue: Epilogue, between: str
) -> None:
    """It is that of one launch per factor, to the bit."""
    kernel = chain_of(patterns, precision, layout, epilogue, between=between)
    check_against_factors(source_of(name, kernel), arrays_of(kernel, 37), in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layouts", [("bsf", "bsl"), ("bsl", "bsf")])
@pytest.mark.parametrize(
    ("name", "patterns", "precision"),
    [
        ("mma", EVEN, "float16"),
        ("mma", RAGGED[:2], "tf32x3"),
        ("simt", NARROW, "float32"),
        ("simt", RAGGED, "float64"),
    ],
)
def test_x_in_one_layout_and_y_in_the_other(
    name: str, patterns: tuple[Pattern, ...], precision: str, layouts: tuple[str, str]
) -> None:
    """The bits are those of separate launches that transpose the intermediate. Slices agree too, within the arrays."""
    kernel = chain_of(patterns, precision, layouts[0], ALL, out_layout=layouts[1], between="relu", stride="any")
    source = source_of(name, kernel)
    for batch in (1, source.constants.tile_batch + 3):
        check_against_factors(source, arrays_of(kernel, batch), in_emulator())
    if patterns in (EVEN, NARROW):
        run, arrays = in_emulator(sanitize={"bsf": "address", "bsl": "race"}[layouts[0]]), arrays_of(kernel, 5)
        assert is_right(kernel, run_chain(source, arrays, run, behind=0), truth_of(kernel, arrays))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("mma", "bfloat16"),
        ("mma", "tf32x3"),
        *(pytest.param("simt", each, marks=pytest.mark.exhaustive) for each in ("float32", "float64")),
    ],
)
def test_slices(name: str, precision: str, layout: str) -> None:
    kernel, run = chain_of(EVEN, precision, layout, ALL, stride="any"), in_emulator()
    source = source_of(name, kernel)
    for batch in (3, source.constants.tile_batch):
        arrays = arrays_of(kernel, batch)
        assert is_right(kernel, run_chain(source, arrays, run), truth_of(kernel, arrays))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("patterns", "layout"), [(RAGGED, "bsf"), (RAGGED, "bsl"), (PLANES, "bsf")])
@pytest.mark.parametrize(("name", "precision", "batch"), [("mma", "float16", 5), ("simt", "float32", 37)])
def test_there_are_no_reads_outside_the_arrays_and_no_races(
    name: str, precision: str, batch: int, patterns: tuple[Pattern, ...], layout: str
) -> None:
    check_within_arrays(source_of(name, chain_of(patterns, precision, layout, ALL)), batch)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("name", "precision"), [("mma", "float16"), ("simt", "float32")])
def test_inf_and_nan_stay_in_their_blocks(name: str, precision: str, layout: str) -> None:
    """Inf and NaN in X reach only the outputs of the reference. Padding between the factors does not spread them."""
    kernel = chain_of(RAGGED[:2], precision, layout)
    arrays = arrays_of(kernel, 9)
    x = arrays["x"] if layout == "bsf" else arrays["x"].T
    x[2, 1], x[4, 60], x[7, 209] = np.nan, np.inf, -np.inf
    got, truth = run_chain(source_of(name, kernel), arrays, in_emulator()), truth_of(kernel, arrays)
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(truth))
    assert not np.isfinite(got).all()


@pytest.mark.parametrize(
    ("name", "precision", "layouts", "varied", "step"),
    [
        ("mma", "float16", ("bsf",), ("tiles",), 4),
        pytest.param("mma", "float16", ("bsf",), ("tiles",), 1, marks=pytest.mark.second),
        pytest.param("simt", "float32", LAYOUTS, ("tile_batch", "tiles"), 6, marks=pytest.mark.slow),
        pytest.param(
            "simt", "float32", LAYOUTS, ("tile_batch", "tiles"), 1, marks=[pytest.mark.slow, pytest.mark.second]
        ),
    ],
)
def test_tiles_of_the_search_space_agree(
    name: str, precision: str, layouts: tuple[str, ...], varied: tuple[str, ...], step: int
) -> None:
    """A small chain agrees with float64, whatever its tiles."""
    patterns = (Pattern(1, 24, 40, 16), Pattern(8, 16, 48, 1))
    for first, layout in enumerate(layouts):
        kernel = chain_of(patterns, precision, layout)
        arrays = arrays_of(kernel, 37)
        each = {attrgetter(*varied)(own): own for own in FAMILIES[name].space(kernel, LIMITS)}
        assert len(each) > 4 * len(varied)
        for constants in list(each.values())[first::step]:
            got = run_chain(source_of(name, kernel, constants), arrays, in_emulator())
            assert is_right(kernel, got, truth_of(kernel, arrays)), constants


@pytest.mark.parametrize(
    ("name", "precision", "patterns"),
    [("mma", "bfloat16", (Pattern(1, 16, 64, 16), Pattern(1, 64, 16, 16))), ("simt", "float32", PLANES)],
)
def test_each_factor_alone_fits_too(name: str, precision: str, patterns: tuple[Pattern, ...]) -> None:
    """A factor's source packs its weights, and has stages for the product."""
    family, kernel = FAMILIES[name], chain_of(patterns, precision, "bsf")
    found = list(family.space(kernel, LIMITS))
    assert found
    for constants in found:
        for factor, own in zip(factor_kernels(kernel), constants.parsed, strict=True):
            assert family.geometry(factor, own, 64).shared_bytes <= LIMITS.shared_bytes


@pytest.mark.parametrize(("name", "precision"), [("mma", "float16"), ("simt", "float32")])
def test_the_model_counts_intermediates_as_shared_memory(name: str, precision: str) -> None:
    """What a launch moves of global memory is X, Y and the weights."""
    family, kernel, batch = FAMILIES[name], chain_of(EVEN, precision, "bsf"), 6400
    assert isinstance(family, GpuProduct)
    work, shape = family.work(kernel, GOOD[name], batch), family.shape(kernel, GOOD[name])
    item = {"float16": 2, "float32": 4}[precision]
    assert work.memory_bytes == item * batch * (128 + 128) + sum(each.packed_bytes for each in shape.factors)
    assert work.multiply_adds == batch * sum(pattern.weight_count for pattern in EVEN)
    assert work.blocks == 200


# ---- constants and shared memory


@dataclass(frozen=True)
class Holding(GpuChainShape[Any]):
    """A chain with buffers of these sizes, or several chains."""

    sizes: tuple[tuple[int, ...], ...] = ()
    first: int = 0

    @property
    def factors(self) -> list[Any]:
        return []

    @property
    def buffer_sizes(self) -> list[list[int]]:
        return list(map(list, self.sizes))

    @property
    def resident_size(self) -> int:
        return self.first

    @property
    def shared_bytes(self) -> int:
        return self.ring


@pytest.mark.parametrize(
    ("sizes", "halves"), [((5,), (5, 0)), ((5, 7), (5, 7)), ((5, 7, 9), (9, 7)), ((9, 2, 3, 8), (9, 8))]
)
def test_buffers_alternate_between_two_halves(sizes: tuple[int, ...], halves: tuple[int, int]) -> None:
    """Each half is as large as its largest buffer; no buffer is overwritten while it is read."""
    shape = Holding(chain_of(EVEN, "float32", "bsf"), None, (sizes,))
    assert shape.ping_pong_sizes == halves
    assert shape.ring == sum(halves)
    places = [(shape.place(at), shape.place(at) + size) for at, size in enumerate(sizes)]
    assert all(end <= shape.ring for _, end in places)
    for one, other in pairwise(places):
        assert one[1] <= other[0] or other[1] <= one[0]


def test_chains_of_a_group_share_the_halves() -> None:
    """Each chain begins in the first half, behind the part that all chains share."""
    shape = Holding(group_of((EVEN, EVEN[:1]), "float32", "bsf"), None, ((5, 7, 9), (), (11, 2)), 100)
    assert (shape.ping_pong_sizes, shape.ring) == ((11, 7), 118)
    assert [shape.place(at) for at in range(3)] == [100, 111, 100]


@pytest.mark.parametrize(("name", "precision"), CHAINS)
def test_a_chain_is_its_factors_with_constants_of_their_own(name: str, precision: str) -> None:
    family, kernel = FAMILIES[name], chain_of((*EVEN, *EVEN), precision, "bsf")
    assert isinstance(family, GpuProduct)
    constants = family.default(kernel, LIMITS)
    shape = family.shape(kernel, constants)
    assert [factor for factor, _ in own_of_factors(kernel, constants)] == list(factor_kernels(kernel))
    counts = [factor.block_stages for factor in shape.factors]
    assert shape.first_stages == [sum(counts[:at]) for at in range(len(counts))]
    assert family.work(kernel, constants, constants.tile_batch).stages == sum(counts)
    # packed for each alone
    assert (family.packed_bytes(kernel, constants), family.pack_geometry(kernel, constants).grid) == (0, 0)
    assert family.geometry(kernel, constants, 3 * constants.tile_batch + 1).grid == 4
    with pytest.raises(ConstantsError, match=r"tiles='16 x': '16 x' must be \d integers: tile_out, tile_in"):
        _ = replace(constants, tiles="16 x").parsed


@pytest.mark.parametrize(("name", "precision"), CHAINS)
def test_registers_are_bounded(name: str, precision: str) -> None:
    """The number of blocks that must fit on one SM bounds the registers."""
    family, kernel = FAMILIES[name], chain_of(EVEN, precision, "bsf")
    constants = family.default(kernel, LIMITS)
    assert family.keeps_rules(kernel, constants)
    registers = min(255, family.registers(kernel, constants)) * family.geometry(kernel, constants, 1).block
    crowded = replace(constants, min_blocks=65536 // registers + 1)
    broken = first_broken(family.rules[type(crowded)], kernel, crowded)
    assert broken is not None
    assert broken.says in (
        "the registers of min_blocks blocks are at most 65536",
        "min_blocks blocks have at most 1536 threads",
    )


@pytest.mark.parametrize(("name", "precision"), CHAINS)
def test_the_space_has_every_combination_that_fits_and_a_default_compares_those_that_differ(
    name: str, precision: str
) -> None:
    family: Any = FAMILIES[name]
    kernel = chain_of(RAGGED, precision, "bsf", ALL)
    tiles = list(family.options_of_chain(kernel, LIMITS))
    every = [
        each.changed(stages=stages, min_blocks=blocks)
        for least in tiles
        for stages, blocks, each in product(type(least[0]).searched, BLOCKS, least)
    ]
    able = [each for each in every if family.fits(kernel, each, LIMITS)]
    assert list(family.space(kernel, LIMITS)) == able
    assert 0 < len(able) < len(every) == len(set(every))
    first: dict[Any, Any] = {}
    for each in able:
        first.setdefault(each.changed(min_blocks=1), each)
    assert list(family.space_of_chain(kernel, LIMITS, is_distinct=True)) == list(first.values())
    assert len(first) < len(able)
