"""The cost model replayed on times that others published: what their kernel asks for is counted, and the model keeps
its band.
"""

import json
from itertools import product

import pytest
from click.testing import CliRunner

from benchmarks.model import (
    BATCH,
    KSMM,
    Published,
    Replay,
    Tiles,
    band,
    layer_lines,
    layer_row,
    main,
    of_dense,
    published,
    replay,
    requested_and_read,
)
from ksgen.bench.tables import published_patterns, published_us
from ksgen.families import cuda_limits, family_for, family_named
from ksgen.families.expected import TAKEN, default_us
from ksgen.pattern import Pattern, monarch
from ksgen.spec import LAYOUTS, KernelSpec


def known(pattern: Pattern, precision: str, layout: str) -> Published:
    wanted = KernelSpec(pattern, precision, layout)
    return next(each for each in published() if each.kernel == wanted)


# ---- the data


def test_each_published_time_is_there_once() -> None:
    kinds = [(precision, layout) for precision in ("float32", "float16") for layout in LAYOUTS]
    counts = {(precision, layout): len(replay(layout, precision).rows) for precision, layout in kinds}
    assert counts == {
        ("float32", "bsf"): 652,
        ("float32", "bsl"): 630,
        ("float16", "bsf"): 622,
        ("float16", "bsl"): 675,
    }
    assert len({each.kernel for each in published()}) == len(published()) == sum(counts.values())


def test_the_times_are_those_that_the_benchmarks_pages_quote() -> None:
    quoted = 0
    for pattern in published_patterns():
        for precision, layout in (("float32", "bsf"), ("float32", "bsl"), ("float16", "bsl")):
            us = published_us(str(pattern), precision, layout)
            assert us is not None
            assert known(pattern, precision, layout).us == pytest.approx(us, rel=0.01)
            quoted += 1
    assert quoted >= 33


# ---- their kernel


@pytest.mark.parametrize(
    ("pattern", "layout", "bytes_an_output"),
    [  # X per tile's outputs, W per tile's batch, Y as stored; computed by hand
        (Pattern(1, 192, 48, 2), "bsf", 2 * 48 * 4 / 64 + 48 * 4 / 16 + 32),
        (Pattern(6, 64, 64, 1), "bsf", 64 * 4 / 64 + 64 * 4 / 32 + 16),
        (Pattern(1, 768, 192, 2), "bsf", 2 * 192 * 4 / 64 + 192 * 4 / 32 + 32),
        (Pattern(1, 192, 48, 2), "bsl", 48 * 4 / 32 + 48 * 4 / 64 + 4),
        (Pattern(1, 768, 192, 2), "bsl", 192 * 4 / 64 + 192 * 4 / 32 + 4),
        (Pattern(1, 1024, 1024, 4), "bsl", 1024 * 4 / 64 + 1024 * 4 / 32 + 8),  # two stores of half a sector
    ],
)
def test_bytes_of_the_second_level_cache(pattern: Pattern, layout: str, bytes_an_output: float) -> None:
    each = known(pattern, "float32", layout)
    work = KSMM.work(each.kernel, each.tiles, BATCH)
    assert work.cache_bytes == pytest.approx(BATCH * pattern.out_features * bytes_an_output)
    assert work.memory_bytes == each.kernel.bytes(BATCH)
    assert work.multiply_adds == BATCH * pattern.weight_count


def test_cycles_of_shared_memory() -> None:
    """Two warps share a tile of 64 x 64 with 8 x 8 sums per thread. Each reads for 2 * 2 and 2 * 4 cycles per input."""
    kernel, tiles = KernelSpec(Pattern(1, 64, 64, 1), layout="bsl"), Tiles(64, 16, 64, 8, 8, 4)
    work = KSMM.work(kernel, tiles, 64)
    staged, passed = 64 * (64 + 64) * 4, 2 * 64 * 64 * 4
    assert work.blocks == 1
    assert work.shared_bytes == 128 * 64 * 2 * (2 * 2 + 2 * 4) + staged + passed
    geometry = KSMM.geometry(kernel, tiles, 65)
    assert (geometry.grid, geometry.block, geometry.shared_bytes) == (2, 64, 4 * (2 * 16 * 128 + 64 * 64))


# ---- the replay


@pytest.mark.parametrize(
    ("precision", "layout", "bounded", "ranks"),
    [
        ("float32", "bsf", 648, 0.88),
        ("float32", "bsl", 630, 0.78),
        ("float16", "bsf", 600, 0.91),
        ("float16", "bsl", 650, 0.7),
    ],
)
def test_the_model_orders_their_kernels_and_bounds_their_times(
    precision: str, layout: str, bounded: int, ranks: float
) -> None:
    found = replay(layout, precision)
    assert found.bounded >= bounded
    assert found.ranks() >= ranks
    assert found.ranks() >= found.ranks("longest") - 0.02
    assert 0.9 <= found.over_predicted[1] <= 1.12
    assert found.within >= 0.84


def test_what_is_half_hidden_tells_kernels_apart_that_the_longest_term_does_not() -> None:
    """Batch-size-last is bounded by multiply-adds nearly everywhere: only the shorter term differs."""
    for precision in ("float32", "float16"):
        found = replay("bsl", precision)
        assert found.ranks("longest") < 0.2 < 0.7 <= found.ranks()


def test_the_band_of_predictions_is_that_of_all_known_times() -> None:
    low, middle, high = Replay(published()).over_predicted
    assert (low * TAKEN[1], middle * TAKEN[1], high * TAKEN[1]) == pytest.approx(TAKEN, rel=0.02)


def test_a_band_leaves_out_the_extreme_twentieths() -> None:
    assert band([float(each) for each in range(101)]) == (5, 50, 95)


# ---- what is printed


def test_the_replay_is_printed() -> None:
    printed = CliRunner().invoke(main, ["ksmm"]).output.splitlines()
    assert [line.split()[:4] for line in printed[1:3]] == [
        ["float32", "bsf", "652", "648"],
        ["float32", "bsl", "630", "630"],
    ]
    assert printed[-1].startswith("all")


def test_predictions_are_compared_with_published_times() -> None:
    printed = CliRunner().invoke(main, ["predictions", "--pattern", "1,192,48,2"]).output.splitlines()
    assert len(printed) == 1 + 2 * 6  # a time and a median for each of three precisions in two layouts
    assert printed[1].split()[:4] == ["1,192,48,2", "float32", "bsf", "simt"]
    assert " 110.3 " in printed[1]
    assert printed[2].startswith("median of 1 ")
    assert printed[2].endswith(", a prediction")
    family, own, gains = known(Pattern(1, 192, 48, 2), "float16", "bsl").ours("float16")
    assert family == "mma"
    assert own.low < own.us < own.high
    assert gains == tuple(48.005 / us for us in (own.high, own.us, own.low))


def test_a_pattern_without_published_times_has_no_lines() -> None:
    printed = CliRunner().invoke(main, ["predictions", "--pattern", "1,3,5,7", "--brief"])
    assert (printed.exit_code, printed.output) == (0, "")


def test_traffic_is_what_blocks_request_and_what_memory_sees() -> None:
    limits, kernel = cuda_limits("sm_90a"), KernelSpec(Pattern(1, 192, 48, 2), "bfloat16", "bsl")
    family, requested, least = requested_and_read(kernel, limits, BATCH)
    assert least == kernel.bytes(BATCH)
    assert family == family_for(kernel, limits, BATCH).name
    assert requested > least
    printed = CliRunner().invoke(main, ["traffic", "--patterns", "3", "--precision", "float32"]).output.splitlines()
    assert printed[0].startswith("ksgen ")
    assert len(printed) == 1 + 2 * (3 + 1)
    for lines in (printed[1:5], printed[5:9]):
        shares = sorted(int(line.split()[-2].rstrip("%")) for line in lines[:3])
        assert lines[3].endswith(f"caches serve {shares[1]}% at the median, {shares[0]}% at least")
    brief = CliRunner().invoke(main, ["traffic", "--patterns", "3", "--precision", "float32", "--brief"]).output
    assert brief.splitlines() == [printed[0], printed[4], printed[8]]


def test_sources_are_counted_for_every_precision_and_layout() -> None:
    printed = CliRunner().invoke(main, ["sources", "--cores", "4", "--vector-bytes", "32"])
    assert printed.exit_code == 0, printed.output
    rows = [line.split() for line in printed.output.splitlines()]
    assert [tuple(row[:2]) for row in rows] == list(product(("float32", "bfloat16"), LAYOUTS))
    assert all(1 <= float(least) <= float(mean) <= float(most) for _, _, mean, least, most in rows)


# ---- layers


def rows_of_layers(*given: str) -> dict[str, dict[str, float]]:
    common = ("fused", "--precision", "bfloat16", "--layout", "bsf", "--target", "sm_90a", "--json")
    found = CliRunner().invoke(main, [*common, *given], catch_exceptions=False)
    rows: dict[str, dict[str, float]] = json.loads(found.output)["chains"]
    return rows


def test_layers_are_compared_with_dense_products() -> None:
    """On an H100, a square pair wins at 1024 features, not at 256."""
    rows = rows_of_layers("--square", "256", "--square", "1024")
    assert list(rows) == ["monarch 256, splits 16", "monarch 1024, splits 16"]
    shares = [of_dense(row) for row in rows.values()]
    assert shares[0] > 0.95 > 0.6 > shares[1]
    for features, row in zip((256, 1024), rows.values(), strict=True):
        product = KernelSpec(Pattern(1, features, features, 1), "bfloat16")
        assert row["dense_us"] == default_us(family_named("wgmma"), product, cuda_limits("sm_90a"), BATCH)
        others = [monarch(features, features, split, split) for split in (8, 32, 64)]
        least = of_dense(rows[f"monarch {features}, splits 16"])
        assert least <= min(of_dense(layer_row(other, "bfloat16", "bsf", "sm_90a", BATCH)) for other in others)


def test_the_dense_product_of_layers_side_by_side_has_all_outputs() -> None:
    (row,) = rows_of_layers("--square", "512", "--side-by-side", "3").values()
    product = KernelSpec(Pattern(1, 1536, 512, 1), "bfloat16")
    assert row["dense_us"] == default_us(family_named("wgmma"), product, cuda_limits("sm_90a"), BATCH)


def test_a_square_layer_without_a_split_is_refused() -> None:
    found = CliRunner().invoke(main, ["fused", "--square", "250"])
    assert found.exit_code == 2
    assert "--square 250; accepted: multiples of 8" in found.output


def test_the_table_of_layers_has_their_share_of_the_dense_time() -> None:
    row = {"each_mb": 4.0, "one_mb": 2.0, "each_us": 30.0, "one_us": 12.0, "dense_us": 24.0, "by": "mma"}
    head, line, other, *_ = layer_lines({"a layer": row, "another": row | {"one_us": 60.0}})
    assert head.endswith(" dense, us of dense  by")
    assert line.split()[-3:] == ["24.0", "0.50", "mma"]
    assert other.split()[-3:] == ["24.0", "1.25", "mma"]
