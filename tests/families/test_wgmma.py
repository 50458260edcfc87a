"""What is special to Hopper's families. What holds of every family's kernels is in test_families.py."""

import re
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, TensorMap, check, cuda_limits, family_of
from ksgen.families.wgmma import PermutedConstants, RegistersConstants, SharedConstants
from ksgen.families.wgmma import block as blocks
from ksgen.families.wgmma.permuted import with_blocks_apart
from ksgen.measure.verify import compare, make_problem
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec, paper_patterns
from tests.support.kernels import check as check_result
from tests.support.kernels import check_exact, in_emulator, multiply, source_of

GPU = cuda_limits("sm_90a")
SHARED, REGISTERS, PERMUTED = (FAMILIES[name] for name in ("wgmma_shared", "wgmma_registers", "wgmma_permuted"))
PLAIN = SharedConstants(256, 64, 64, 2, 3)
FLAT = RegistersConstants(128, 48, 32, 4, 2, 1, 3, 0)
SLAB = RegistersConstants(64, 32, 16, 16, 1, 2, 3, 0)


def kernel(precision: str = "float16", layout: str = "bsf", pattern: tuple[int, ...] = (2, 48, 64, 4)) -> KernelSpec:
    return KernelSpec(Pattern(*pattern), precision, layout)


# ---- rules


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_d": 2}, "tile_d=2 must be 1 in bsl, and in bsf d=4, or less and a run of 16, 32, 64 or 128 bytes; try 4$"),
        ({"tile_batch": 192}, r"tile_batch=192 must be a multiple of 64 \* groups_batch = 128; try 128$"),
        ({"tile_batch": 320, "groups_batch": 1, "tile_out": 8}, "tile_batch=320 must be at most 256 in bsf; try 256$"),
        ({"tile_out": 44}, "tile_out=44 must be a multiple of 8, up to 256; try 40 or 48$"),
        ({"tile_out": 264}, "tile_out=264 must be a multiple of 8, up to 256; try 96$"),
        ({"tile_in": 24}, "tile_in=24 must be a multiple of the inputs .* image start again = 16; try 16 or 32$"),
        ({"tile_in": 272}, "tile_in=272 must be at most 256; try 256$"),
        ({"stages": 1}, "stages=1 must be 2 to 16; try 2$"),
        ({"stages": 0}, "every constant but promote and resident is at least 1; got stages=0; try stages=2$"),
        ({"cluster_batch": 3}, "of them 1, 2, 4 or 8 along the batch; got cluster_batch=3; try cluster_batch=2 or 4$"),
        ({"cluster_batch": 8, "cluster_out": 2, "tile_out": 24}, "a cluster is at most 8 blocks.*; try cluster_batch=4$"),
        ({"cluster_out": 2}, "cluster_out=2 must be a divisor of the tiles along the outputs = 1; try 1$"),
        ({"cluster_out": 4, "tile_out": 16, "tile_batch": 64, "groups_batch": 1}, "cluster_out=4 must be a divisor of .* = 3; try 1$"),
        ({"groups_batch": 4, "tile_batch": 256}, "one to three warpgroups multiply: 4; got groups_batch=4; try groups_batch=3$"),
        (
            {"groups_d": 2, "groups_batch": 1, "tile_batch": 64},
            "warpgroups along j have whole 16-byte chunks of their own; got groups_d=2; try groups_d=1$",
        ),
        ({"tile_out": 104}, r"sums and fragments fit a thread's registers: \d+; got tile_out=104; try tile_out=96$"),
        ({"promote": 48}, "promote=48 must be 0, or a multiple of tile_in=32; try 32 or 64$"),
    ],
)
def test_each_rule_of_registers_has_two_sides(changes: dict[str, int], says: str) -> None:
    check(REGISTERS, kernel(), FLAT, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(REGISTERS, kernel(), replace(FLAT, **changes), GPU)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tile_out": 40}, "tile_out=40 must be a multiple of 16 in bsl; try 32 or 48$"),
        ({"tile_in": 24}, "tile_in=24 must be a multiple of 16 in bsl, of 64 in bsf; try 16 or 32$"),
        ({"tile_out": 256}, r"sums fit a thread's registers: 256; got tile_batch=256; try tile_batch=128$"),
        ({"groups_batch": 3}, r"tile_batch=256 must be a multiple of 64 \* groups_batch = 192; try 192 or 384$"),
        ({"cluster_batch": 16}, "a cluster is at most 8 blocks.*; got cluster_batch=16; try cluster_batch=8$"),
    ],
)
def test_each_rule_of_shared_has_two_sides(changes: dict[str, int], says: str) -> None:
    check(SHARED, kernel(layout="bsl"), PLAIN, GPU)
    with pytest.raises(ConstantsError, match=says):
        check(SHARED, kernel(layout="bsl"), replace(PLAIN, **changes), GPU)


def test_rules_of_a_layout() -> None:
    in_bsl = replace(FLAT, tile_d=1, tile_batch=256)
    check(REGISTERS, kernel("tf32", "bsl"), in_bsl, GPU)
    for changes, says in (
        ({"tile_d": 4}, "tile_d=4 must be 1 in bsl.*; try 1$"),
        ({"tile_batch": 128}, r"tile_batch=128 must be 128 \* groups_batch in bsl = 256; try 256$"),
    ):
        with pytest.raises(ConstantsError, match=says):
            check(REGISTERS, kernel("tf32", "bsl"), replace(in_bsl, **changes), GPU)
    with pytest.raises(ConstantsError, match="of 64 in bsf"):
        check(SHARED, kernel(pattern=(2, 48, 64, 1)), replace(PLAIN, tile_in=48), GPU)
    with pytest.raises(ConstantsError, match=r"needs .* bytes of shared memory"):
        check(SHARED, kernel(layout="bsl"), replace(PLAIN, stages=8), GPU)


def test_registers_that_warpgroups_take_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An infeasible sum compiles, and then waits for ever."""
    for groups, (copying, multiplying) in blocks.REGISTERS.items():
        assert 128 * (copying + groups * multiplying) <= blocks.LAUNCHED[groups] * 128 * (groups + 1) <= 65536
    monkeypatch.setitem(blocks.REGISTERS, 2, (40, 240))
    with pytest.raises(ConstantsError, match="the registers that warpgroups take are there"):
        check(REGISTERS, kernel(), FLAT, GPU)


def test_conflicts_are_counted_and_refused() -> None:
    """16 j of 32 bits in one run hit the same banks; as runs of 32 bytes they do not."""
    each = kernel("tf32", pattern=(1, 48, 64, 16))
    check(REGISTERS, each, replace(SLAB, tile_d=8), GPU)
    with pytest.raises(ConstantsError, match="X is read from shared memory with no bank conflicts"):
        check(REGISTERS, each, replace(SLAB, tile_d=16, tile_out=8, groups_d=2), GPU)


@pytest.mark.parametrize(
    ("precision", "j", "tile_out", "promote", "fits"),
    [  # what ptxas was seen to take without spills, and what it was not
        ("float16", 2, 96, 0, True),
        ("float16", 4, 96, 0, True),
        ("float16", 6, 48, 0, True),
        ("float16", 8, 40, 0, True),
        ("float16", 6, 64, 0, False),
        ("float16", 8, 48, 0, False),
        ("float16", 12, 24, 0, False),
        ("tf32x3", 4, 40, 32, True),
        ("tf32x3", 4, 48, 32, False),
    ],
)
def test_what_fits_registers_is_what_compiles(precision: str, j: int, tile_out: int, promote: int, fits: bool) -> None:
    each = kernel(precision, pattern=(1, 96, 64, j))
    constants = RegistersConstants(128, tile_out, 32, j, 2, 1, 2, promote)
    rule = next(rule for rule in REGISTERS.rules() if "fit a thread" in rule.says)
    assert rule.holds(each, constants) == fits


# ---- which kernels and arrays


def test_what_each_kind_serves() -> None:
    def served(precision: str, layout: str, pattern: tuple[int, ...]) -> list[str]:
        return [family.name for family in (SHARED, REGISTERS) if family.serves(kernel(precision, layout, pattern), GPU)]

    assert served("float16", "bsl", (2, 5, 3, 7)) == ["wgmma_shared"]
    assert served("float16", "bsf", (2, 5, 8, 1)) == ["wgmma_shared", "wgmma_registers"]
    assert served("float16", "bsf", (2, 5, 8, 3)) == ["wgmma_registers"]
    assert served("float16", "bsf", (2, 5, 7, 3)) == []  # rows of 42 bytes
    assert served("float16", "bsf", (2, 5, 8, 13)) == []  # too many j to sum side by side, and no whole chunks of them
    assert served("tf32", "bsf", (2, 5, 8, 11)) == ["wgmma_registers"]  # by one warpgroup
    assert served("tf32x3", "bsf", (2, 5, 48, 11)) == []  # two parts of 11 j exceed even its registers
    assert served("tf32x3", "bsl", (2, 5, 17, 7)) == ["wgmma_registers"]
    assert served("tf32x3", "bsl", (2, 5, 16, 7)) == []  # too few inputs for operands in parts
    assert served("tf32x3", "bsf", (2, 5, 40, 1)) == []  # a stage is longer than sums may go without promotion
    assert served("fp16x3", "bsl", (2, 5, 3, 7)) == served("float32", "bsf", (2, 8, 8, 4)) == []
    assert not any(family.serves(kernel(), cuda_limits(target)) for family in (SHARED, REGISTERS) for target in ("sm_80", "sm_100a"))
    gradients = [replace(kernel(layout=layout), job="gradient") for layout in LAYOUTS]
    assert not any(family.serves(each, GPU) for family in (SHARED, REGISTERS) for each in gradients)


def test_what_is_permuted() -> None:
    def served(pattern: tuple[int, ...], precision: str = "float16", layout: str = "bsf", target: str = "sm_90a") -> bool:
        return PERMUTED.serves(kernel(precision, layout, pattern), cuda_limits(target))

    assert served((2, 40, 24, 5))
    assert served((1, 256, 256, 64), "bfloat16")
    assert not served((2, 40, 24, 1))  # nothing to permute
    assert not served((2, 44, 24, 5))  # chunks of 8 outputs
    assert not served((2, 40, 20, 5))  # and of 8 inputs
    assert not served((2, 40, 24, 13))  # too many j for a thread, and no whole chunks of them
    assert not served((2, 40, 24, 20))
    assert not served((2, 40, 24, 5), "tf32")
    assert not served((2, 40, 24, 5), layout="bsl")
    assert not served((2, 40, 24, 5), target="sm_80")
    assert not PERMUTED.serves(replace(kernel(pattern=(2, 40, 24, 5)), job="gradient"), GPU)


def test_permuting_takes_launches_before_and_after_and_room_for_x_and_y() -> None:
    each = kernel(pattern=(2, 48, 64, 24))
    constants = PERMUTED.default(each, GPU)
    own, alone = PERMUTED.geometry(each, constants, 100), SHARED.geometry(with_blocks_apart(each), constants, 100)
    assert replace(own, workspace_bytes=0, before=(), after=()) == alone
    assert own.workspace_bytes == 2 * 100 * 2 * (64 + 48) * 24
    (before,), (after,) = own.before, own.after
    assert (before.name, before.geometry.grid) == ("permute_x", 100 * 2 * 8 * 3 // 256 + 1)  # 8 inputs x 8 j a thread
    assert (after.name, after.geometry.grid) == ("permute_y", 100 * 2 * 6 * 3 // 256 + 1)
    small = kernel(pattern=(1, 8, 8, 3))
    assert PERMUTED.geometry(small, PERMUTED.default(small, GPU), 1).workspace_bytes == 128 + 48  # Y begins with a line of its own
    (x,) = PERMUTED.maps(each, constants, 100)
    assert (x.operand, x.sizes, x.strides) == ("workspace", (64, 48, 100), (128, 64 * 48 * 2))


def test_constants_tell_what_is_permuted_from_what_is_not() -> None:
    assert family_of(PLAIN) is SHARED
    assert family_of(PermutedConstants(**vars(PLAIN))) is PERMUTED


def test_a_kernel_that_is_served_has_a_default_and_something_to_search() -> None:
    kinds = [(p, layout) for p in PRECISIONS for layout in LAYOUTS]
    for (precision, layout), d, b, c in product(kinds, range(1, 18), (1, 40), (8, 1000)):
        each = kernel(precision, layout, (2, b, c, d))
        for family in (SHARED, REGISTERS, PERMUTED):
            if family.serves(each, GPU):
                check(family, each, family.default(each, GPU), GPU)
                assert next(iter(family.space(each, GPU)), None), each


def test_batches_and_places_that_maps_cannot_describe_are_not_taken() -> None:
    for precision, whole in (("float16", 8), ("tf32", 4)):
        each, family = kernel(precision, "bsl"), SHARED if precision == "float16" else REGISTERS
        assert [batch for batch in range(1, 17) if family.takes(each, batch, True)] == list(range(whole, 17, whole))
        assert not family.takes(each, 16, aligned=False)
        assert not family.takes(each, 2**31, aligned=True)
    narrow = kernel(layout="bsl", pattern=(1, 8, 8, 1))
    assert SHARED.takes(narrow, 2**31 - 2**16, aligned=True)
    assert not SHARED.takes(narrow, 2**31 - 2**15, aligned=True)  # the last tiles' coordinates may be no numbers of 32 bits
    assert REGISTERS.takes(kernel(), 7, aligned=True)
    assert not REGISTERS.takes(kernel(), 7, aligned=False)
    permuted = kernel(pattern=(2, 48, 64, 3))
    assert PERMUTED.takes(permuted, 7, aligned=True)
    assert not PERMUTED.takes(permuted, 7, aligned=False)  # X and Y are moved in chunks
    wide = kernel("tf32", "bsl", (1, 2**9, 2**9, 2**9))
    assert REGISTERS.takes(wide, 2**19, True)
    assert not REGISTERS.takes(wide, 2**20, True)  # from one i to the next are 2^40 bytes


def conditions(described: TensorMap) -> bool:
    """What the driver asks of a map, with rows of boxes exactly as long as their swizzle's span."""
    row = described.box[0] * described.item_bytes
    return (
        all(1 <= size <= 2**32 for size in described.sizes)
        and all(stride % 16 == 0 and stride < 2**40 for stride in described.strides)
        and all(1 <= box <= 256 for box in described.box)
        and row % 16 == 0
        and described.swizzle in (0, row)
        and (described.swizzle or row == 16)
    )


def test_defaults_and_maps_hold_for_the_paper() -> None:
    odd = [Pattern(3, 40, 8, 24), Pattern(1, 17, 32, 5), Pattern(2, 5, 1016, 1), Pattern(1, 3, 8, 12), Pattern(1, 3, 8, 40)]
    for pattern, precision, layout in product([*paper_patterns()[::29], *odd], PRECISIONS, LAYOUTS):
        each = KernelSpec(pattern, precision, layout)
        for family in (SHARED, REGISTERS, PERMUTED):
            if family.serves(each, GPU):
                constants = family.default(each, GPU)
                check(family, each, constants, GPU)
                assert all(map(conditions, family.maps(each, constants, 25088)))


def test_maps_end_with_their_i_so_that_boxes_read_zeros_beyond_its_inputs() -> None:
    (flat,) = REGISTERS.maps(kernel(), FLAT, 100)
    assert (flat.sizes, flat.strides, flat.box) == ((256, 2, 100), (512, 1024), (64, 1, 128))
    (slab,) = REGISTERS.maps(kernel(pattern=(2, 48, 64, 32)), SLAB, 100)
    assert (slab.sizes, slab.strides, slab.box, slab.swizzle) == ((32, 64, 2, 100), (64, 4096, 8192), (16, 4, 1, 64), 32)
    x, y = SHARED.maps(kernel(layout="bsl"), PLAIN, 128)
    assert (x.operand, x.sizes, x.strides, x.box) == ("x", (128, 4, 64, 2), (256, 1024, 65536), (64, 1, 64, 1))
    assert (y.operand, y.sizes, y.strides, y.box) == ("y", (128, 4, 48, 2), (256, 1024, 49152), (64, 1, 64, 1))


def test_a_family_asked_for_by_name_is_rendered_for_the_gpus_that_it_serves() -> None:
    source = render(kernel(pattern=(1, 128, 128, 3)), family="wgmma_registers")
    assert source.constants == REGISTERS.default(source.kernel, GPU)
    assert source.entry != source.kernel.name


# ---- texts


def text_of(family: Any, each: KernelSpec, constants: Any) -> Any:
    check(family, each, constants, GPU)
    return source_of(family.name, each, constants)


@pytest.mark.parametrize(
    ("precision", "pattern", "constants"),
    [
        ("float16", (1, 20, 24, 40), replace(SLAB, tile_out=24)),  # the last j are beyond d
        ("float16", (1, 20, 24, 64), RegistersConstants(64, 8, 16, 32, 1, 2, 2, 0)),  # 64-byte runs
        ("tf32x3", (1, 20, 72, 12), RegistersConstants(64, 16, 8, 12, 1, 3, 2, 32)),  # all j of a row, a third each
        ("bfloat16", (1, 20, 72, 1), RegistersConstants(256, 24, 64, 1, 2, 1, 2, 0)),  # two instructions along the batch
        ("float16", (1, 20, 72, 2), RegistersConstants(64, 24, 64, 2, 1, 1, 3, 0)),  # registers as launched
    ],
)
def test_constants_that_no_default_has(precision: str, pattern: tuple[int, ...], constants: RegistersConstants) -> None:
    source = text_of(REGISTERS, kernel(precision, pattern=pattern), constants)
    check_result(source, 300, in_emulator())
    check_exact(source, 65, in_emulator())


@pytest.mark.parametrize(("family", "layout"), [(SHARED, "bsl"), (REGISTERS, "bsf")])
def test_every_thread_waits_for_the_grid_before_and_the_next_may_begin_after_the_last_load(family: Any, layout: str) -> None:
    text = render(replace(kernel(layout=layout), epilogue=Epilogue(bias=True, residual=True)), family=family.name).text
    entry, copying = text[text.index("\nENTRY(THREADS, 1)") : text.index("\nENTRY(PACK_THREADS")], text[text.index("void copy_tiles") :]
    before, after = entry.split("    wait_for_previous_grid();")  # in no branch
    assert "prepare_barriers();" in before
    assert "prefetch_map(x);" in before
    assert "return;" not in before
    assert all(word in after for word in ("copy_all(x", "store_tile("))
    assert copying.index("copy_bulk(") < copying.index("    allow_next_grid();\n}")
    assert not re.search(r"RESTRICT (bias|residual)|__ldg", text)  # which nvcc would load before the wait
    assert text.count("wait_for_previous_grid();") == text.count("    allow_next_grid();") == 1


@pytest.mark.parametrize("d", [2, 3, 7, 8, 12, 16, 24, 40, 64, 88, 128])
def test_every_order_of_parts_is_permuted_and_permuted_back(d: int) -> None:
    """d in one part or in several, of which one to eight are neighbours; several i; rows of outputs and inputs that differ."""
    each = kernel(pattern=(2, 24, 40, d))
    check_exact(source_of("wgmma_permuted", each), 5, in_emulator())


def test_what_follows_a_product_that_is_permuted_costs_one_more_rounding() -> None:
    """The sums are rounded before bias, activation and residual, and the result is."""
    each = replace(kernel(pattern=(2, 24, 40, 8)), epilogue=Epilogue(True, "none", True))
    problem = make_problem(each, 300)
    once, twice = (
        compare(problem, multiply(problem, source_of(name, each), in_emulator()))[0] for name in ("wgmma_registers", "wgmma_permuted")
    )
    assert once < twice < 1.5 * once


@pytest.mark.parametrize(
    "constants", [SharedConstants(64, 32, 16, 1, 2), SharedConstants(192, 48, 32, 3, 3), SharedConstants(256, 16, 48, 2, 2)]
)
def test_a_residual_comes_to_where_y_leaves_as_boxes(constants: SharedConstants) -> None:
    """For one to three warpgroups, tile after tile in the same place, over ragged outputs and batches."""
    each = replace(kernel(layout="bsl", pattern=(2, 37, 24, 3)), epilogue=Epilogue(True, "relu", True))
    source = text_of(SHARED, each, constants)
    check_result(source, 300, in_emulator(), in_place=True)
    check_result(source, 72, in_emulator(sanitize="race"))
    check_exact(source, 136, in_emulator(sanitize="address"))


@pytest.mark.parametrize("c", [192, 1024])
def test_error_of_float32_grade_sums(c: int) -> None:
    """As far off as the warp-wide family: twice a float32 sum at most, whatever c."""
    each = kernel("tf32x3", pattern=(1, 16, c, 1))
    problem = make_problem(each, 128)
    error, _ = compare(problem, multiply(problem, source_of("wgmma_registers", each), in_emulator()))
    assert 1e-7 < error < 3.5e-7
