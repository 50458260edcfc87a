"""Tests of the amx family: kernels that it serves, alone and in chains, constants that it accepts, and defaults of
chains.
"""

from dataclasses import replace
from itertools import product

import pytest

from ksgen.emit.render import render
from ksgen.errors import ConstantsError, KsgenError
from ksgen.families import FAMILIES, check, families_for, family_for
from ksgen.families.amx.chain import (
    DOT_MULTIPLY_ADDS,
    SECOND_LEVEL_BYTES,
    THIRD_LEVEL,
    AmxChainConstants,
    AmxChainTiling,
    dots,
    multiply_cycles,
)
from ksgen.families.amx.shape import AmxConstants
from ksgen.families.chains import factor_kernels
from ksgen.launch.choice import choice_by_name
from ksgen.launch.fused import packing_choices
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.families.test_vector import kernel_of
from tests.support.amx_kernels import CHAINS, CPU, FAMILY, PRECISIONS
from tests.support.products import chain_of

TWO = CHAINS["d 2 and 3"]
VIT = (Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))


@pytest.mark.parametrize(
    "kernel", [kernel_of((2, 9, 5, 3), "bf16x6"), chain_of(TWO, "bf16x6")], ids=["factor", "chain"]
)
def test_which_kernels_it_serves(kernel: KernelSpec) -> None:
    assert family_for(kernel, CPU).name == family_for(replace(kernel, precision="tf32x3"), CPU).name == "amx"
    assert family_for(kernel, replace(CPU, tiles=())).name == "vector"
    assert family_for(kernel, CPU, 1).name == "amx"
    assert family_for(replace(kernel, precision="float32"), CPU).name == "vector"
    for precision, tiles in (("bfloat16", "bf16"), ("float16", "f16")):
        each = replace(kernel, precision=precision)
        assert [family.name for family in families_for(each, CPU)][:2] == ["amx", "vector"]
        large = chain_of(VIT, precision) if kernel.is_chain else kernel_of((2, 64, 64, 3), precision)
        names = [family_for(large, CPU, batch).name for batch in (None, 4096, 5, 4, 1)]
        assert names == (["amx"] * 3 if precision == "bfloat16" else ["vector"] * 3) + ["vector"] * 2
        assert not FAMILY.supports(each, replace(CPU, tiles=tuple({"bf16", "f16"} - {tiles})))
    others = (
        replace(kernel, precision="float32"),
        replace(kernel, stride="any"),
        replace(kernel, precision="bfloat16", weights="int8"),
    )
    assert not any(FAMILY.supports(each, CPU) for each in others)
    assert not FAMILY.supports(kernel, replace(CPU, is_cpu=False))


def test_tiles_need_multiply_adds_for_each_element() -> None:
    """Copies and stores dominate otherwise, and vectors are faster at these."""
    both = (Pattern(32, 12, 12, 1), Pattern(1, 32, 32, 12))  # 11 multiply-adds per element of all factors together
    batches = (5, 256, 257, None)
    for kernel, by_tiles in (
        (kernel_of((1, 24, 24, 4), "bfloat16"), [False] * 4),  # 12
        (kernel_of((1, 48, 48, 4), "bfloat16"), [False, False, True, True]),  # 24
        (kernel_of((1, 64, 64, 4), "bfloat16"), [True] * 4),  # 32
        (chain_of(both, "bfloat16"), [False] * 4),
        (kernel_of((1, 24, 24, 4), "bf16x6"), [True] * 4),  # which asks for tiles
    ):
        assert [family_for(kernel, CPU, batch).name == "amx" for batch in batches] == by_tiles
    gradients = [replace(kernel_of((1, size, size, 4), "bfloat16"), job="gradient") for size in (12, 16)]
    names = [type(family_for(each, CPU).default(each, CPU, 64)).__name__ for each in gradients]
    assert names == ["VectorGradientConstants", "AmxGradientConstants"]


def test_neither_gradients_nor_groups_nor_other_layouts_of_y() -> None:
    kernel = chain_of(TWO, "bf16x6")
    assert not FAMILY.supports(replace(kernel_of((2, 9, 5, 3), "bf16x6"), job="gradient"), CPU)
    assert not FAMILY.supports(replace(kernel, out_layout="bsl"), CPU)
    assert not FAMILY.supports(replace(kernel, chains=(*kernel.chains, TWO)), CPU)


def test_by_name_it_takes_any_batch() -> None:
    kernel = chain_of(TWO, "bfloat16")
    for batch in (3, 500):
        assert choice_by_name("amx", kernel, batch, CPU).constants == FAMILY.default(kernel, CPU, batch)
    with pytest.raises(
        ConstantsError, match=r"not supported by amx on this device; amx is for: matrix tiles, of one layer of dense"
    ):
        choice_by_name("amx", replace(kernel, stride="any"), 500, CPU)
    with pytest.raises(KsgenError, match="amx has no CUDA source; accepted: dialect=opencl"):
        render(kernel, family="amx", dialect="cuda")


def test_each_factor_is_packed_as_for_a_product_alone() -> None:
    kernel = chain_of(TWO, "bfloat16", epilogue=Epilogue(True))
    constants = AmxChainConstants(64, "32 1 1, 64 1 2", 1)
    packed = packing_choices(kernel, "amx", constants)
    assert [(each.pattern, each.epilogue, choice.family) for each, choice in packed] == [
        (each, Epilogue(), "amx") for each in TWO
    ]
    assert [choice.constants for _, choice in packed] == [
        AmxConstants(64, 32, 1, 1, 0, 1),
        AmxConstants(64, 64, 1, 1, 1, 2),
    ]


# ---- constants

GOOD = AmxConstants(64, 32, 2, 1, 0, 2)
BAD = {
    "every constant but panel and streaming is at least 1; got parts=0; try parts=1": replace(GOOD, parts=0),
    "panel=3 must be 0, 1 or 2": replace(GOOD, panel=3),
    "streaming=-1 must be 0 or 1; try 0": replace(GOOD, streaming=-1),
    "block=40 must be a multiple of 32; try 32 or 64": replace(GOOD, block=40),
    "outputs=16 must be a multiple of 32; try 32": replace(GOOD, outputs=16),
    "panel=0 must be 1 or 2, except in bsf for 16-bit types, one interleaved matrix, and 32 inputs or more; "
    "try 1": replace(GOOD, panel=0),
    "depth=3 must be at most the tiles along the inputs = 2; try 2": replace(GOOD, depth=3),
    "parts=5 must be at most the groups of outputs = 4; try 4": replace(GOOD, parts=5),
}


@pytest.mark.parametrize("says", BAD)
def test_rules(says: str) -> None:
    kernel = kernel_of((2, 40, 40, 2), "bfloat16")
    check(FAMILY, kernel, GOOD)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, BAD[says])


def test_rules_of_the_job_of_precisions_and_of_rows_in_place() -> None:
    with pytest.raises(ConstantsError, match="job=gradient must be multiply"):
        check(FAMILY, replace(kernel_of((2, 40, 40, 2), "bfloat16"), job="gradient"), GOOD)
    with pytest.raises(
        ConstantsError,
        match="precision=float32 must be one that matrix tiles multiply: float16, bfloat16, tf32x3, bf16x6",
    ):
        check(FAMILY, kernel_of((2, 40, 40, 2)), GOOD)
    check(FAMILY, kernel_of((2, 40, 40, 1), "bfloat16"), replace(GOOD, panel=0))
    for kernel in (
        kernel_of((2, 40, 31, 1), "bfloat16"),
        kernel_of((2, 40, 40, 1), "bf16x6"),
        kernel_of((2, 40, 40, 1), "bfloat16", "bsl"),
    ):
        with pytest.raises(ConstantsError, match="panel=0 must be 1 or 2, except in bsf"):
            check(FAMILY, kernel, replace(GOOD, panel=0, depth=1))


GOOD_CHAIN = AmxChainConstants(64, "32 1 1, 64 1 2", 0)
BAD_CHAINS = {
    "tiles holds what each factor's own rules allow: of factor 1, block=40 must be a multiple of 32; try 32 or 64": {
        "block": 40
    },
    "tiles holds what each factor's own rules allow: of factor 2, depth=3 must be at most the tiles along the inputs "
    "= 2; try 2": {"tiles": "32 1 1, 64 1 3"},
    "tiles holds what each factor's own rules allow: of factor 1, panel=0 must be 1 or 2, except in bsf "
    "for 16-bit types": {"tiles": "32 0 1, 64 1 1"},
    "tiles holds what each factor's own rules allow: factors per chain are 1 in tiles, and 2 in the kernel": {
        "tiles": "32 1 1"
    },
    "tiles='32 1, 64 1 2': '32 1' must be 3 integers: outputs, panel, depth": {"tiles": "32 1, 64 1 2"},
    "tiles='32 1 1, 64 1 two': '64 1 two' must be 3 integers: outputs, panel, depth": {"tiles": "32 1 1, 64 1 two"},
    "streaming=2 must be 0 or 1": {"streaming": 2},
}


@pytest.mark.parametrize("says", BAD_CHAINS)
def test_rules_of_chains(says: str) -> None:
    kernel = chain_of(TWO, "bfloat16")
    check(FAMILY, kernel, GOOD_CHAIN)
    with pytest.raises(ConstantsError) as caught:
        check(FAMILY, kernel, replace(GOOD_CHAIN, **BAD_CHAINS[says]))  # type: ignore[arg-type]
    assert says in str(caught.value)


def test_rules_of_the_job_of_chains() -> None:
    kernel = chain_of(TWO, "bfloat16")
    with pytest.raises(ConstantsError, match="job=multiply must be chain"):
        check(FAMILY, factor_kernels(kernel)[0], GOOD_CHAIN)
    for other in (
        replace(kernel, stride="any"),
        replace(kernel, out_layout="bsl"),
        replace(kernel, chains=(*kernel.chains, TWO)),
    ):
        with pytest.raises(ConstantsError, match="job=chain must be that of one layer, of dense arrays in one layout"):
            check(FAMILY, other, GOOD_CHAIN)
    with pytest.raises(ConstantsError, match="of factor 1, precision=float32 must be one that matrix tiles multiply"):
        check(FAMILY, chain_of(TWO), GOOD_CHAIN)


def test_the_space_keeps_the_rules() -> None:
    for shape, layout in product(((2, 40, 40, 1), (1, 1, 1, 1), (2, 4, 5, 3)), LAYOUTS):
        kernel = kernel_of(shape, "bfloat16", layout)
        found = list(FAMILY.space(kernel, CPU))
        assert len(set(found)) == len(found) > 3
        for constants in found:
            check(FAMILY, kernel, constants, CPU)
    assert {each.panel for each in FAMILY.space(kernel_of((2, 40, 40, 1), "bfloat16"), CPU)} == {0, 1, 2}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CHAINS)
def test_defaults_and_the_space_of_chains_keep_the_rules(name: str, layout: str) -> None:
    for precision, cores, batch in product(PRECISIONS, (1, 64), (None, 1, 100, 25088)):
        kernel = chain_of(CHAINS[name], precision, layout)
        limits = replace(CPU, multiprocessors=cores)
        check(FAMILY, kernel, FAMILY.default(kernel, limits, batch), limits)
    kernel = chain_of(CHAINS[name], "bfloat16", layout)
    found = list(FAMILY.space(kernel, CPU))
    assert len(set(found)) == len(found) > 5
    assert {each.streaming for each in found} == {0, 1}
    for constants in found:
        check(FAMILY, kernel, constants, CPU)


def test_candidates_read_rows_where_they_lie_and_copy_them() -> None:
    found = list(FAMILY.space(chain_of(CHAINS["in place, ragged"], "bfloat16"), CPU))
    assert {each.panel for constants in found for each in constants.parsed} == {0, 1}


@pytest.mark.parametrize(("precision", "layout"), list(product(("bfloat16", "bf16x6"), LAYOUTS)))
def test_a_block_stays_in_the_second_level_cache_where_that_can_be(precision: str, layout: str) -> None:
    """The cache holds a block's weights, panel, sums and intermediate, or the cheapest block is chosen."""
    for patterns in (VIT, (Pattern(16, 64, 64, 1), Pattern(1, 16, 16, 64))):
        kernel = chain_of(patterns, precision, layout)
        shape = AmxChainTiling(kernel, FAMILY.default(kernel, CPU, 6272))
        if shape.packed_bytes < SECOND_LEVEL_BYTES * 3 // 4:
            assert shape.held.kept + shape.held.weights <= SECOND_LEVEL_BYTES
    square = chain_of((Pattern(32, 32, 32, 1), Pattern(1, 32, 32, 32)), precision, layout)
    found = FAMILY.default(square, CPU, 6272)
    shape, of_block = AmxChainTiling(square, found), found.block * 1024 * square.item_bytes
    # a block's inputs, the next one's, and outputs that go through the cache
    passing = 2 * of_block + (0 if found.streaming else of_block)
    assert shape.slot * 4 + passing + shape.packed_bytes <= SECOND_LEVEL_BYTES
    large = chain_of((Pattern(16, 256, 64, 1), Pattern(1, 64, 64, 64)), precision, layout)
    best = FAMILY.default(large, CPU, 6272)
    others = [replace(best, block=block) for block in (32, 64, 128)]
    assert all(
        multiply_cycles(AmxChainTiling(large, best), 8192) <= multiply_cycles(AmxChainTiling(large, each), 8192)
        for each in others
    )


def test_every_core_has_a_block() -> None:
    for cores, batch in ((16, 512), (64, 2048)):
        found = FAMILY.default(chain_of(VIT, "bfloat16"), replace(CPU, multiprocessors=cores), batch)
        assert FAMILY.geometry(chain_of(VIT, "bfloat16"), found, batch).grid >= cores


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_a_work_group_keeps(layout: str) -> None:
    """One place between two factors, two between more; rows, or features in batch-size-last, are an odd number of
    lines apart.
    """
    two, three = chain_of(TWO, "bfloat16", layout), chain_of(CHAINS["in place, ragged"], "bfloat16", layout)
    for kernel, places in ((two, 1), (three, 2)):
        tiles = ", ".join("32 1 1" for _ in kernel.factors)
        shape = AmxChainTiling(kernel, AmxChainConstants(64, tiles, 0))
        assert shape.slot == max(factor.slot for factor in shape.factors) + places * shape.between
        widest = max(each.out_features for each in kernel.factors.factors[:-1])
        elements = 64 * (-(-widest // 32) | 1) * 32 if layout == "bsf" else widest * shape.pitch
        assert elements * 2 <= shape.between * 4 < elements * 2 + 512
    assert AmxChainTiling(two, GOOD_CHAIN).pitch * 2 % 128 == 64
    assert FAMILY.geometry(two, GOOD_CHAIN, 100).group_bytes == AmxChainTiling(two, GOOD_CHAIN).slot * 4


def test_its_work_is_that_of_its_factors() -> None:
    """Products of all, but X and Y alone from memory."""
    kernel = chain_of(TWO, "bf16x6", epilogue=Epilogue())
    work = FAMILY.work(kernel, GOOD_CHAIN, 100)
    alone = [
        FAMILIES["amx"].work(each, own, 100)
        for each, own in zip(factor_kernels(kernel), GOOD_CHAIN.parsed, strict=True)
    ]
    assert work.multiply_adds == sum(each.multiply_adds for each in alone)
    assert work.multiply_adds == DOT_MULTIPLY_ADDS * sum(
        dots(each, 100) for each in AmxChainTiling(kernel, GOOD_CHAIN).factors
    )
    between = 3 * 100 * 120 * 4  # written, and its lines read before that, and read again
    assert sum(each.memory_bytes for each in alone) - work.memory_bytes == between
    assert work.blocks == 2


def test_the_model_knows_what_a_cache_does_not_hold() -> None:
    """A block whose weights exceed the L2 cache pays for their lines, and for the intermediate."""
    kernel = chain_of((Pattern(16, 256, 64, 1), Pattern(1, 64, 64, 64)), "bf16x6")
    near, far = AmxChainConstants(32, "64 1 1, 64 1 1", 1), AmxChainConstants(256, "64 1 1, 64 1 1", 1)
    held = AmxChainTiling(kernel, far).held
    assert held.kept + held.weights > SECOND_LEVEL_BYTES
    small = chain_of((Pattern(2, 64, 64, 1), Pattern(1, 64, 64, 2)), "bf16x6")
    per_dot = [
        multiply_cycles(shape, 8192) / sum(dots(factor, 8192) for factor in shape.factors)
        for shape in (AmxChainTiling(small, near), AmxChainTiling(kernel, near))
    ]
    assert per_dot[1] > per_dot[0] + 1
    assert THIRD_LEVEL > 0


def test_behind_the_first_factor_nothing_is_fetched_ahead() -> None:
    first, second = AmxChainTiling(chain_of(TWO, "bfloat16"), GOOD_CHAIN).factors
    assert first.ahead_lines > 0
    assert second.ahead_lines == 0


def test_each_factor_has_constants_and_activations_of_its_own() -> None:
    kernel = chain_of(TWO, "bfloat16", epilogue=Epilogue(True, "gelu", True), between="relu")
    text = render(kernel, GOOD_CHAIN, family="amx", dialect="opencl").text
    one, other = text[text.index("// ==== factor 1") :].split("// ==== factor 2")
    assert [("select(value, (lanes)0" in part, "erf_of" in part) for part in (one, other)] == [
        (True, False),
        (False, True),
    ]
    plain = render(replace(kernel, between="none"), GOOD_CHAIN, family="amx", dialect="opencl").text
    parts = plain[plain.index("// ==== factor 1") :].split("// ==== factor 2")
    assert ["lanes activate(lanes value) { return value; }" in part for part in parts] == [True, False]
    for part, b in ((one, 20), (other, 17)):
        assert part.count(f"#define B  {b:>21}") == part.count("#undef B\n") == 1
    assert [f"HAS_BIAS        {has:>8}" in part for part, has in ((one, 0), (other, 1))] == [True, True]
