"""Tests of clusters: which ones a search tries, and that a launch has whole clusters."""

from dataclasses import replace
from typing import Any

import pytest

from ksgen.families import FAMILIES, check, family_named
from ksgen.families.expected import LARGE, expected_us, speed_of, terms_of
from ksgen.families.wgmma.shared import SharedConstants
from tests.support.kernels import kernel_of
from tests.support.wgmma_clusters import GPU, source_of

pytestmark = pytest.mark.slow
CLUSTERS = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]  # blocks along the batch, and along the outputs


def test_a_launch_is_whole_clusters_that_fit_the_device() -> None:
    alone, source = source_of("registers flat", (1, 1)), source_of("registers flat", (4, 1))
    family = FAMILIES[source.family]
    grids = [
        [family.geometry(each.kernel, each.constants, batch).grid for batch in (1, 256, 257)]
        for each in (alone, source)
    ]
    assert grids == [[4, 16, 20], [16, 16, 32]]  # two i, two tiles along the outputs, tiles of 64 rows of the batch
    many = family.geometry(source.kernel, source.constants, 25088)
    assert [many.launched(multiprocessors) for multiprocessors in (132, 131, 5, 3)] == [128, 128, 4, 4]
    assert [many.launched(132, clusters) for clusters in (None, 15, 40)] == [128, 60, 128]
    assert family.geometry(source.kernel, source.constants, 1).launched(132) == 16


def test_what_is_shared_is_read_once_a_cluster() -> None:
    family = family_named("wgmma_registers")
    alone = source_of("registers flat", (1, 1))
    before = family.work(alone.kernel, alone.constants, 256)
    of_w = 16 * 5 * 64 * 16 * 2  # tiles, j, inputs, outputs, bytes
    of_x = 16 * 64 * 8 * 32  # tiles, rows of the batch, sectors in which 24 inputs of 5 j lie, bytes
    for along_batch, along_out in CLUSTERS:
        source = source_of("registers flat", (along_batch, along_out))
        work = family.work(source.kernel, source.constants, 256)
        assert before.cache_bytes - work.cache_bytes == of_w - of_w // along_batch + of_x - of_x // along_out
        assert work._replace(cache_bytes=0) == before._replace(cache_bytes=0)


def test_a_search_tries_clusters_where_what_they_share_is_much_of_a_stage() -> None:
    family, kernel = family_named("wgmma_shared"), kernel_of((1, 192, 64, 2), "float16", "bsl")
    found: dict[Any, set[tuple[int, int]]] = {}
    for each in family.space(kernel, GPU):
        found.setdefault(replace(each, cluster_batch=1, cluster_out=1), set()).add(
            (each.cluster_batch, each.cluster_out)
        )
    along_out = {(1, 1), (1, 2), (1, 4)}
    assert found[SharedConstants(256, 48, 64, 2, 3)] == along_out  # four tiles along the outputs, weights are little
    # three; weights are a fifth
    assert found[SharedConstants(256, 64, 64, 2, 3)] == {(batch, 1) for batch in (1, 2, 4, 8)}
    assert found[SharedConstants(256, 48, 16, 2, 3)] == {(1, 1), (1, 2)}  # boxes of 16 rows
    default = family.default(kernel, GPU)
    assert (default.cluster_batch, default.cluster_out) == (1, 1)


def test_multiprocessors_that_clusters_leave_idle_slow_a_kernel_down() -> None:
    source = source_of("registers flat", (1, 1))
    family = family_named("wgmma_registers")
    speed = speed_of(family, source.kernel, GPU)
    assert speed is not None
    found = [
        terms_of(speed, family, source.kernel, replace(source.constants, cluster_batch=blocks), LARGE)
        for blocks in (1, 2, 4)
    ]
    alone, pairs, fours = (each for each in found if each is not None)
    assert pairs.inside == alone.inside
    assert fours.inside == pytest.approx(alone.inside * 132 / 128)
    assert fours.moving == pytest.approx(alone.moving * 132 / 128)  # memory is the longest
    assert fours.blocks_each == pytest.approx(alone.blocks_each * 132 / 128)


@pytest.mark.parametrize(
    ("pattern", "layout", "blocks"),
    [
        ((1, 1024, 256, 8), "bsf", 4),  # the L2 cache bounds pairs
        ((1, 128, 512, 8), "bsf", 2),  # memory bounds pairs
        ((3, 512, 512, 16), "bsl", 2),
    ],
)
def test_a_default_has_more_than_two_blocks_only_where_these_are_faster(
    pattern: tuple[int, ...], layout: str, blocks: int
) -> None:
    default: Any = FAMILIES["wgmma"].default(kernel_of(pattern, "bfloat16", layout), GPU)
    assert default.cluster_batch * default.cluster_out == blocks


def test_a_default_has_narrower_tiles_if_a_cluster_divides_their_number() -> None:
    family, kernel = family_named("wgmma_registers"), kernel_of((8, 96, 384, 16), "bfloat16", "bsf")
    default = family.default(kernel, GPU)
    assert (default.tile_out, default.cluster_out) == (24, 4)
    wide = default.changed(tile_out=32, cluster_out=1)  # three tiles
    check(family, kernel, wide, GPU)
    assert expected_us(family, kernel, GPU, LARGE, default) < expected_us(family, kernel, GPU, LARGE, wide)
