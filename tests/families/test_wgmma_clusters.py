"""Hopper's kernels whose blocks work in clusters and share what they bring of X and W: in the emulator, and as machine code."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.emit.render import Source, render
from ksgen.families import FAMILIES, check, cuda_limits
from ksgen.families.wgmma import RegistersConstants, SharedConstants
from ksgen.spec import Epilogue
from tests.compile_matrix import SERIALISED
from tests.emulator import SimtError
from tests.support import kernels, sass
from tests.support.kernels import PLAIN, in_emulator, kernel_of

pytestmark = pytest.mark.slow

GPU = cuda_limits("sm_90a")
KINDS = {  # every image of X and every store of Y
    "shared bsl": ("wgmma_shared", "float16", "bsl", (2, 20, 24, 2), SharedConstants(128, 16, 16, 2, 2)),
    "shared bsf": ("wgmma_shared", "bfloat16", "bsf", (2, 40, 72, 1), SharedConstants(128, 24, 64, 2, 2)),
    "registers flat": ("wgmma_registers", "float16", "bsf", (2, 20, 24, 5), RegistersConstants(64, 16, 64, 5, 1, 1, 2, 0)),
    "registers slab": ("wgmma_registers", "tf32x3", "bsf", (1, 20, 24, 16), RegistersConstants(64, 16, 8, 8, 1, 2, 2, 32)),
    "registers bsl": ("wgmma_registers", "tf32", "bsl", (1, 20, 24, 2), RegistersConstants(256, 16, 16, 1, 2, 1, 3, 0)),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


CLUSTERS = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]  # blocks along the batch, and along the outputs


def source_of(kind: str, cluster: tuple[int, int], epilogue: Epilogue = PLAIN) -> Source:
    family, precision, layout, pattern, constants = KINDS[kind]
    along_batch, along_out = cluster
    kernel, own = kernel_of(pattern, precision, layout, epilogue), replace(constants, cluster_batch=along_batch, cluster_out=along_out)
    check(FAMILIES[family], kernel, own, GPU)
    return render(kernel, own, family=family)


@every_kind
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_any_number_of_batch_tiles(kind: str, cluster: tuple[int, int]) -> None:
    """Fewer than a cluster has blocks, as many, and one more: the other blocks' tiles lie beyond the batch."""
    source = source_of(kind, cluster)
    whole = source.constants.tile_batch * cluster[0]
    for batch in (7, whole, whole + 1):
        kernels.check_exact(source, batch, in_emulator())


@pytest.mark.slow
@every_kind
def test_inf_and_nan_do_not_leak(kind: str) -> None:
    source = source_of(kind, (2, 2))
    kernels.check_leaks(source, source.constants.tile_batch + 1, in_emulator())


@every_kind
@pytest.mark.parametrize("sanitize", ["address", "race"])
def test_no_race_and_no_access_outside(kind: str, sanitize: str) -> None:
    source = source_of(kind, (2, 2), Epilogue(True, "gelu", True))
    kernels.check(source, 2 * source.constants.tile_batch + 1, in_emulator(sanitize=sanitize))


@every_kind
def test_runs_are_bit_identical_in_any_order_of_blocks_and_threads(kind: str) -> None:
    source = source_of(kind, (2, 2))
    first, *others = (kernels.check(source, 290, in_emulator(order=order)) for order in ("forward", "reverse", 5))
    for y in others:
        np.testing.assert_array_equal(y, first)


@pytest.mark.parametrize(
    ("was", "becomes", "sanitize", "says"),
    [
        ("    cluster_sync();  // other", "    //", "none", "reaches cluster block 0, whose threads have all exited"),
        ("    cluster_sync();  // everybody", "    __syncthreads();  //", "race", "which thread 0 wrote"),
        ("4 * GROUPS * (CLUSTER_BATCH + CLUSTER_OUT - 1));", "4 * GROUPS);", "none", "more arrivals than the barrier's 1"),
        ("if (rank < CLUSTER && shares)", "if (rank < 1)", "none", "arrivals and 0 bytes are missing"),
        ("tile.batch_left = batch_left", "batch_left", "none", "access to byte"),
    ],
)
def test_what_a_cluster_needs_is_missed(was: str, becomes: str, sanitize: str, says: str) -> None:
    source = source_of("registers flat", (2, 1))
    assert source.text.count(was) == 1
    wrong = replace(source, text=source.text.replace(was, becomes))
    with pytest.raises(SimtError, match=says):
        kernels.check(wrong, 300, in_emulator(sanitize=sanitize))


# ---- launches and what they cost


def test_a_launch_is_whole_clusters_that_fit_the_device() -> None:
    alone, source = source_of("registers flat", (1, 1)), source_of("registers flat", (4, 1))
    family = FAMILIES[source.family]
    grids = [[family.geometry(each.kernel, each.constants, batch).grid for batch in (1, 256, 257)] for each in (alone, source)]
    assert grids == [[4, 16, 20], [16, 16, 32]]  # two i, two tiles along the outputs, tiles of 64 batch entries
    many = family.geometry(source.kernel, source.constants, 25088)
    assert [many.launched(multiprocessors) for multiprocessors in (132, 131, 5, 3)] == [132, 128, 4, 4]
    assert family.geometry(source.kernel, source.constants, 1).launched(132) == 16


def test_what_is_shared_is_read_once_a_cluster() -> None:
    family = FAMILIES["wgmma_registers"]
    alone = source_of("registers flat", (1, 1))
    before = family.work(alone.kernel, alone.constants, 256)
    of_w, of_x = 16 * 5 * 64 * 16 * 2, 16 * 5 * 64 * 64 * 2  # tiles, j, inputs, outputs or batch entries, bytes
    for along_batch, along_out in CLUSTERS:
        source = source_of("registers flat", (along_batch, along_out))
        work = family.work(source.kernel, source.constants, 256)
        assert before.cache_bytes - work.cache_bytes == of_w - of_w // along_batch + of_x - of_x // along_out
        assert replace(work, cache_bytes=0) == replace(before, cache_bytes=0)


def test_a_search_tries_clusters_where_what_they_share_is_much_of_a_stage() -> None:
    family, kernel = FAMILIES["wgmma_shared"], kernel_of((1, 192, 64, 2), "float16", "bsl")
    found: dict[Any, set[tuple[int, int]]] = {}
    for each in family.space(kernel, GPU):
        found.setdefault(replace(each, cluster_batch=1, cluster_out=1), set()).add((each.cluster_batch, each.cluster_out))
    along_out = {(1, 1), (1, 2), (1, 4)}
    assert found[SharedConstants(256, 48, 64, 2, 3)] == along_out  # four tiles along the outputs, weights are little
    assert found[SharedConstants(256, 64, 64, 2, 3)] == {(batch, 1) for batch in (1, 2, 4, 8)}  # three; weights are a fifth
    assert found[SharedConstants(256, 48, 16, 2, 3)] == {(1, 1), (1, 2)}  # boxes of 16 rows
    default = family.default(kernel, GPU)
    assert (default.cluster_batch, default.cluster_out) == (1, 1)


# ---- texts


@every_kind
def test_a_text_says_no_more_than_it_needs(kind: str) -> None:
    alone, both, of_w, of_x = (source_of(kind, cluster) for cluster in ((1, 1), (2, 2), (2, 1), (1, 2)))
    assert "cluster_" not in alone.text.replace("shared::cluster", "")
    assert "CLUSTER" not in alone.text
    for source in (both, of_w, of_x):
        assert source.text.count("__cluster_dims__(CLUSTER, 1, 1)") == 1
        assert ("copy_bulk(" in source.text) == (source is of_x)
        assert ("load_box_multicast(" in source.text) == (source is not of_w)


@every_kind
@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (4, 2)])
def test_what_is_shared_leaves_for_all_blocks_at_once_with_no_spills(kind: str, cluster: tuple[int, int]) -> None:
    sass.needed_disassembler()
    source = source_of(kind, cluster)
    built = sass.needed_compiler().compile(source.text, source.entry, "sm_90a")
    counts = sass.instructions(built.data)[source.entry]
    along_batch, along_out = cluster
    assert sass.count(counts, "UBLKCP") == 1
    assert sass.count(counts, "UBLKCP.MULTICAST") == (along_batch > 1)
    assert sass.count(counts, "UTMALDG.MULTICAST") == (sass.count(counts, "UTMALDG") if along_out > 1 else 0)
    assert sass.local_accesses(counts) == built.resources.spill_bytes == 0
    assert not any(code in built.provenance.get("notes", "") for code in SERIALISED)
