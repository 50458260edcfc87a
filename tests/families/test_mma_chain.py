"""All factors of a layer in one launch on tensor cores: right, the same as one by one, within its arrays; what it
does not serve.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from ksgen.emit.render import Source
from ksgen.errors import ConstantsError
from ksgen.families import check, cuda_limits, family_for, meant_for
from ksgen.families.expected import expected_us
from ksgen.families.mma.chain import MmaChainConstants, MmaChainTiling, _able_tiles, _alike
from ksgen.families.mma.family import Mma
from ksgen.pattern import Pattern, low_rank
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from tests.emulator import Counts, is_installed
from tests.families.test_gpu_chain import GOOD
from tests.support.counting import Counting, compared
from tests.support.gpu_chains import (
    EVEN,
    LIMITS,
    RAGGED,
    check_against_factors,
    check_within_arrays,
    is_right,
    read_again,
    run_chain,
    source_of,
)
from tests.support.kernels import in_emulator
from tests.support.products import ALL, arrays_of, chain_of, truth_of

FAMILY = Mma()
TALL = (Pattern(1, 272, 64, 1), Pattern(1, 16, 272, 1))  # 64 -> 272 -> 16: several tiles of the first factor's outputs


# ---- X in stages


STREAMS = [
    (RAGGED, "float16", "bsf", ALL),
    (RAGGED, "bfloat16", "bsl", Epilogue(residual=True)),
    (TALL, "tf32x3", "bsf", Epilogue()),
]


def streaming(kernel: KernelSpec, stages: int = 3) -> Source:
    """X is read again for each tile of the first factor's outputs; as many stages as differ from a power of two."""
    found = next(each for each in FAMILY.space(kernel, LIMITS) if each.stream and each.stages == stages)
    return source_of("mma", kernel, found)


@pytest.mark.parametrize(("patterns", "precision", "layout", "epilogue"), STREAMS)
def test_x_in_stages_gives_the_bits_of_one_launch_per_factor(
    patterns: tuple[Pattern, ...], precision: str, layout: str, epilogue: Epilogue
) -> None:
    kernel, run = chain_of(patterns, precision, layout, epilogue), in_emulator()
    source = streaming(kernel)
    for batch in (1, source.constants.tile_batch + 3):
        arrays = arrays_of(kernel, batch)
        check_against_factors(source, arrays, run)


# ---- large tiles


def test_a_block_of_192_rows_saves_reads_of_weights() -> None:
    """Three low-rank layers on one X on an H100: all weights pass through the L2 cache once per block."""
    limits = cuda_limits("sm_90a")
    kernel = KernelSpec((low_rank(3072, 768, 96),) * 3, "bfloat16")
    chosen = FAMILY.default(kernel, limits)
    smaller = [each for each in FAMILY.space(kernel, limits) if each.tile_batch < 192]
    least = min(expected_us(FAMILY, kernel, limits, None, each) for each in smaller)
    assert chosen.tile_batch == 192
    assert expected_us(FAMILY, kernel, limits, None, chosen) < 0.8 * least


@pytest.mark.parametrize(("layout", "precision"), [("bsf", "bfloat16"), ("bsl", "float16")])
def test_blocks_of_192_rows_give_the_bits_of_one_launch_per_factor(layout: str, precision: str) -> None:
    kernel = chain_of(RAGGED, precision, layout, ALL)
    constants = next(each for each in FAMILY.space(kernel, LIMITS) if each.tile_batch == 192)
    check_against_factors(source_of("mma", kernel, constants), arrays_of(kernel, 197), in_emulator())


@st.composite
def cases(draw: st.DrawFn, stream: int) -> tuple[KernelSpec, MmaChainConstants, int]:
    """Two or three factors of few features, so that the emulator is quick, with rests anywhere; any constants of the
    search space that read X so; and a batch of up to three blocks. g++ takes seconds for each: few are drawn, and one
    that fails is not made smaller."""
    precision, layout = draw(st.sampled_from(("float16", "bfloat16", "tf32x3"))), draw(st.sampled_from(LAYOUTS))
    least = PRECISIONS[precision].fine.least_in
    a, b, c, d = (draw(st.integers(low, high)) for low, high in ((1, 3), (1, 24), (least, least + 40), (1, 5)))
    patterns, features = [Pattern(a, b, c, d)], a * b * d
    for _ in range(draw(st.integers(1, 2))):
        found = [
            (i, j)
            for i in range(1, 5)
            for j in range(1, 17)
            if features % (i * j) == 0 and features // (i * j) >= least
        ]
        assume(found)
        a, d = draw(st.sampled_from(found))
        patterns.append(Pattern(a, draw(st.integers(1, max(1, 100 // (a * d)))), features // (a * d), d))
        features = patterns[-1].out_features
    kernel = chain_of(
        tuple(patterns),
        precision,
        layout,
        Epilogue(bias=draw(st.booleans())),
        between=draw(st.sampled_from(("none", "relu"))),
    )
    space = [each for each in FAMILY.space(kernel, LIMITS) if each.stream == stream]
    assume(space)
    constants = draw(st.sampled_from(space))
    return kernel, constants, draw(st.integers(1, 3 * constants.tile_batch))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("stream", [0, 1], ids=["whole", "in_stages"])
@settings(max_examples=3, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_layer_constants_and_batch(stream: int, data: st.DataObject) -> None:
    kernel, constants, batch = data.draw(cases(stream))
    assume(batch * kernel.pattern.out_features >= 32)  # a lone sum may cancel, and then be off by anything
    arrays = arrays_of(kernel, batch)
    assert is_right(
        kernel, run_chain(source_of("mma", kernel, constants), arrays, in_emulator()), truth_of(kernel, arrays)
    ), (
        constants,
        batch,
    )


@pytest.mark.second
@pytest.mark.parametrize("stream", [0, 1], ids=["whole", "in_stages"])
@settings(max_examples=8, derandomize=True, phases=[Phase.generate], suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_many_layers_constants_and_batches(stream: int, data: st.DataObject) -> None:
    test_any_layer_constants_and_batch.hypothesis.inner_test(stream, data)  # type: ignore[attr-defined]


def test_x_in_stages_has_no_reads_outside_the_arrays_and_no_races() -> None:
    check_within_arrays(streaming(chain_of(RAGGED, "float16", "bsf", ALL, stride="any")), 5)


def test_x_in_stages_needs_less_shared_memory_and_is_read_for_each_tile() -> None:
    kernel = chain_of(TALL, "float16", "bsf")
    one = streaming(kernel).constants
    first, other = MmaChainTiling(kernel, one).factors[0], MmaChainTiling(kernel, replace(one, stream=0)).factors[0]
    assert first.tiles_out > 1
    assert (first.readings, other.readings) == (first.tiles_out, 1)
    assert first.input_bytes == one.stages * first.x_bytes
    moved = [FAMILY.work(kernel, replace(one, stream=each), 6400) for each in (0, 1)]
    assert moved[1].memory_bytes == moved[0].memory_bytes
    assert moved[1].cache_bytes - moved[0].cache_bytes == (first.tiles_out - 1) * round(first.x_bytes_moved(6400))
    assert moved[0].waits - moved[1].waits == moved[0].blocks  # whole, it is waited for by itself


@pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")
def test_what_x_in_stages_moves_is_what_the_cost_model_says() -> None:
    source, run, batch = streaming(chain_of(TALL, "float16", "bsf")), Counting(timeout_s=300), 256
    run_chain(source, arrays_of(source.kernel, batch), run, behind=0)
    rows = compared(source, batch, run.by_entry[source.entry], Counts())
    for name, (expected, counted) in rows.items():
        within = 0.15 if name == "cycles of shared memory" else 0
        found = counted + (read_again(source, batch) if name == "bytes of the cache" else 0)
        assert expected == pytest.approx(found, rel=within), (name, source.constants, rows)


def test_a_factor_of_few_inputs_is_not_promoted_after_one_that_is() -> None:
    kernel = chain_of((Pattern(1, 12, 64, 1), Pattern(1, 40, 12, 1)), "fp16x3", "bsf")
    source = source_of("mma", kernel)
    assert [each.promote for each in source.constants.parsed] == [32, 0]
    check_against_factors(source, arrays_of(kernel, 37), in_emulator())


# ---- rules, and what is served


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"tiles": "48 64 1 2 1 1 0"},
            "tiles holds what each factor's own rules allow: factors per chain are 1 in tiles, and 2 in the kernel",
        ),
        (
            {"tiles": "48 64 1 2 1 1 0, 64 16 2 1 2 1"},
            "'64 16 2 1 2 1' must be 7 integers: tile_out, tile_in, tile_d, warps_batch",
        ),
        (
            {"tiles": "48 64 1 2 1 1 0, 40 16 2 1 2 1 0"},
            r"of factor 2, tile_out=40 must be a multiple of 16 \* warps_out = 32",
        ),
        ({"tiles": "48 64 1 2 1 1 0, 64 16 2 1 4 1 0"}, "tiles has the same number of warps for all factors"),
        ({"stages": 1}, "stages=1 must be at least 2; try 2"),
        ({"min_blocks": 0}, "min_blocks=0 must be at least 1; try 1"),
        ({"min_blocks": 30}, "min_blocks blocks have at most 1536 threads: 1920"),
        ({"stream": 2}, "stream=2 must be 0 or 1; try 1"),
    ],
)
def test_each_rule_has_two_sides(changes: dict[str, Any], says: str) -> None:
    kernel = chain_of(EVEN, "float16", "bsf")
    check(FAMILY, kernel, GOOD["mma"], LIMITS)
    check(FAMILY, kernel, replace(GOOD["mma"], stream=1), LIMITS)
    with pytest.raises(ConstantsError, match=says):
        check(FAMILY, kernel, replace(GOOD["mma"], **changes), LIMITS)


def test_what_it_serves() -> None:
    def supports(precision: str, patterns: tuple[Pattern, ...] = EVEN, target: str = "sm_80", **changes: Any) -> bool:
        return FAMILY.supports(replace(chain_of(patterns, precision, "bsf"), **changes), cuda_limits(target))

    assert all(map(supports, ("float16", "bfloat16", "tf32", "tf32x3", "fp16x3", "c64_tf32x3")))
    assert not supports("float32")
    assert not supports("float16", target="sm_75")
    assert supports("float16", chains=(EVEN, EVEN))
    assert not FAMILY.supports(chain_of(EVEN[:1], "float16", "bsf", out_layout="bsl"), LIMITS)
    # a tile of 8192 features has no room
    assert not supports("float16", (Pattern(1, 8192, 8192, 1), Pattern(1, 8192, 8192, 1)))
    kernel = chain_of(EVEN, "bfloat16", "bsf")
    assert [each.name for each in meant_for(kernel, LIMITS)] == ["mma"]
    assert family_for(kernel, LIMITS) is not None


@pytest.mark.parametrize("patterns", [RAGGED, (Pattern(2, 32, 16, 1), Pattern(1, 96, 32, 2), Pattern(1, 64, 192, 1))])
def test_shared_memory_is_two_halves_and_a_ring(patterns: tuple[Pattern, ...]) -> None:
    """Each as large as the larger of those it holds, first or last."""
    kernel = chain_of(patterns, "float16", "bsf")
    shape = MmaChainTiling(kernel, FAMILY.default(kernel, LIMITS))
    first, second, third = shape.factors
    assert (first.input_bytes > third.input_bytes) == (patterns is RAGGED)
    assert shape.ping_pong_sizes == (max(first.input_bytes, third.input_bytes), second.input_bytes)
    assert [shape.place(at) for at in range(3)] == [0, shape.ping_pong_sizes[0], 0]
    assert shape.shared_bytes == sum(shape.ping_pong_sizes) + shape.constants.stages * max(
        each.w_bytes for each in shape.factors
    )
    assert shape.first_stages == [0, first.block_stages, first.block_stages + second.block_stages]


@pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")
@pytest.mark.parametrize(("precision", "layout"), [("float16", "bsf"), ("bfloat16", "bsl"), ("tf32x3", "bsf")])
def test_what_the_cost_model_says_moved_is_what_moves(precision: str, layout: str) -> None:
    """Bytes exactly; cycles of shared memory, whose bank conflicts between factors it does not know, within more."""
    source, run, batch = source_of("mma", chain_of(EVEN, precision, layout)), Counting(timeout_s=300), 256
    run_chain(source, arrays_of(source.kernel, batch), run, behind=0)
    rows = compared(source, batch, run.by_entry[source.entry], Counts())
    for name, (expected, counted) in rows.items():
        within = 0.15 if name == "cycles of shared memory" else 0
        found = counted + (read_again(source, batch) if name == "bytes of the cache" else 0)
        assert expected == pytest.approx(found, rel=within), (name, source.constants, rows)


@pytest.mark.parametrize("precision", ["bfloat16", "tf32x3", "tf32"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_factors_with_equal_d_share_their_tiles(layout: str, precision: str) -> None:
    found = []
    for d in (1, 4, 16):
        natural = [Pattern(2, 33, 40, d), Pattern(1, 7, 3, d), Pattern(1, 48, 48, d)]
        exchanged = Pattern(2, 32, 4, d, load="l.i.j")
        kernels = [KernelSpec(each, precision, layout) for each in (*natural, exchanged)]
        kernels += [KernelSpec(each, precision, layout, Epilogue(residual=True)) for each in natural]
        for kernel, warps, tile_batch in product(kernels, (4, 8), (32, 64)):
            own = _able_tiles(kernel, 0, tile_batch, warps)
            assert _able_tiles(_alike(kernel), 0, tile_batch, warps) == own
            found += own
    assert found
