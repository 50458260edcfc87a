"""Hopper's kernels whose blocks work in clusters and share what they bring of X and W: in the emulator, and as
machine code.
"""

from dataclasses import replace

import numpy as np
import pytest

from ksgen.spec import Epilogue
from tests.compile_matrix import SERIALISED
from tests.emulator import SimtError
from tests.support import kernels, sass
from tests.support.kernels import in_emulator
from tests.support.wgmma_clusters import KINDS, source_of

pytestmark = pytest.mark.slow
every_kind = pytest.mark.parametrize("kind", KINDS)
CLUSTERS = [(2, 1), (4, 1), (1, 2), (2, 2), (4, 2)]  # blocks along the batch, and along the outputs


@pytest.mark.exhaustive
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


@pytest.mark.exhaustive
@every_kind
@pytest.mark.parametrize("sanitize", ["address", "race"])
def test_no_race_and_no_access_outside(kind: str, sanitize: str) -> None:
    source = source_of(kind, (2, 2), Epilogue(True, "gelu", True))
    kernels.check(source, 2 * source.constants.tile_batch + 1, in_emulator(sanitize=sanitize))


@pytest.mark.exhaustive
@every_kind
def test_runs_are_bit_identical_in_any_order_of_blocks_and_threads(kind: str) -> None:
    source = source_of(kind, (2, 2))
    first, *others = (kernels.check(source, 290, in_emulator(order=order)) for order in ("forward", "reverse", 5))
    for y in others:
        np.testing.assert_array_equal(y, first)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("was", "becomes", "sanitize", "says"),
    [
        ("    leave(ring);\n", "", "none", "whose threads have all exited"),
        ("    leave(ring);\n", "    cluster_sync_relaxed();\n", "race", "the block may end before"),
        ("    cluster_sync_relaxed();", "    __syncthreads();", "race", "which thread 0 wrote"),
        ("    cluster_sync_relaxed();", "", "none", "nothing was initialised"),
        ("        fence_mbarrier_init();\n", "", "none", "that no fence_mbarrier_init has shown"),
        (
            "4 * GROUPS * (CLUSTER_BATCH + CLUSTER_OUT - 1));",
            "4 * GROUPS);",
            "none",
            "more arrivals than the barrier's 1",
        ),
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


def test_a_block_that_does_not_meet_uses_barriers_before_they_are_there() -> None:
    """Plain builds show it too, because waiting for the previous grid is no barrier."""
    source = source_of("registers flat", (1, 1))
    assert source.text.count("    wait_for_block();  // makes them visible to all threads") == 1
    wrong = replace(source, text=source.text.replace("    wait_for_block();  // makes them visible to all threads", ""))
    with pytest.raises(SimtError, match="nothing was initialised"):
        kernels.check(wrong, 300, in_emulator(order="reverse"))


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


@pytest.mark.exhaustive
@every_kind
@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (4, 2)])
def test_what_is_shared_leaves_for_all_blocks_at_once_with_no_spills(kind: str, cluster: tuple[int, int]) -> None:
    sass.needed_disassembler()
    source = source_of(kind, cluster)
    built = sass.compiled(source.text, source.entry, "sm_90a")
    counts = sass.instructions(built.data)[source.entry]
    along_batch, along_out = cluster
    assert sass.count(counts, "UBLKCP") == 1
    assert sass.count(counts, "UBLKCP.MULTICAST") == (along_batch > 1)
    assert sass.count(counts, "UTMALDG.MULTICAST") == (sass.count(counts, "UTMALDG") if along_out > 1 else 0)
    assert sass.wide_fences(counts) == []
    assert sass.local_accesses(counts) == built.resources.spill_bytes == 0
    assert not any(code in built.provenance.get("notes", "") for code in SERIALISED)
