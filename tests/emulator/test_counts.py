"""Tests of the emulator's counts, in small kernels whose numbers follow by hand."""

from typing import Any

import numpy as np
import pytest

from tests.emulator import Counts, SimtError, count_cuda, is_installed
from tests.emulator.counts import GlobalTally, SharedTally
from tests.ptx import with_snippets

pytestmark = pytest.mark.skipif(not is_installed("counts"), reason="the emulator needs g++")

WIDE = "struct __align__(16) Wide { float at[4]; };\n"


def count(
    body: str, *args: Any, grid: int = 1, block: int = 32, shared_bytes: int = 0, parameters: str = "float* x, float* y"
) -> Counts:
    text = f'{WIDE}extern "C" __global__ void kernel({parameters}) {{ const int at = threadIdx.x; {body} }}\n'
    given = args or (np.arange(4096, dtype=np.float32), np.zeros(4096, np.float32))
    return count_cuda(with_snippets(text), "kernel", grid, block, shared_bytes, list(given))


def shared_reads(address: str, kind: str = "float") -> SharedTally:
    """Count one read per lane, at this element of the array that the lanes have written."""
    declared = (
        "extern __shared__ __align__(16) float s[]; for (int i = 0; i < 64; ++i) s[i * 32 + at] = x[i * 32 + "
        "at]; __syncthreads();"
    )
    use = "for (int e = 0; e < 4; ++e) y[at * 4 + e] = found.at[e];" if kind == "Wide" else "y[at] = found;"
    counts = count(
        f"{declared} const {kind} found = *(const {kind}*)(s + ({address})); {use}", shared_bytes=64 * 32 * 4
    )
    return counts.shared["load"]


# ---- global memory


@pytest.mark.parametrize(
    ("index", "sectors"),
    [
        ("at", 4),
        ("at + 1", 5),
        ("at * 2", 8),
        ("at * 8", 32),
        ("0", 1),
        ("at / 8 * 64", 4),
        ("31 - at", 4),
    ],
)
def test_a_request_takes_the_sectors_in_which_its_lanes_read(index: str, sectors: int) -> None:
    counts = count(f"y[at] = x[{index}];")
    assert counts.global_ == {"load": GlobalTally(1, sectors, 128), "store": GlobalTally(1, 4, 128)}


def test_a_struct_is_one_wide_access() -> None:
    counts = count("Wide w = ((const Wide*)x)[at]; for (int e = 0; e < 4; ++e) w.at[e] += 1; ((Wide*)y)[at] = w;")
    assert counts.global_ == {"load": GlobalTally(1, 16, 512), "store": GlobalTally(1, 16, 512)}
    fields = count("const float4 f = ((const float4*)x)[at]; y[at] = f.x + f.y + f.z + f.w;")
    assert fields.global_["load"] == GlobalTally(1, 16, 512)


def test_each_turn_of_a_loop_is_a_request_of_the_lanes_that_take_it() -> None:
    counts = count(
        "float sum = 0; for (int i = 0; i < 5; ++i) if (i < 3 || at < 8) sum += x[i * 32 + at]; y[at] = sum;"
    )
    assert counts.global_["load"] == GlobalTally(5, 3 * 4 + 2 * 1, 3 * 128 + 2 * 32)


def test_a_barrier_separates_iterations_that_some_lanes_skip() -> None:
    body = (
        "float sum = 0; for (int i = 0; i < blockDim.x / 16; ++i) { if (i == at / 16) sum += x[at]; "
        "__syncthreads(); } y[at] = sum;"
    )
    counts = count(body)
    assert (counts.global_["load"].requests, counts.barriers) == (2, 2)
    # taken for one: requests.h says so
    assert count(body.replace("__syncthreads();", "")).global_["load"].requests == 1


def test_a_warp_that_is_not_whole_counts() -> None:
    counts = count("y[at] = x[at]; __syncthreads();", block=40)
    assert counts.global_["load"] == GlobalTally(2, 5, 160)


def test_atomics_are_a_kind_of_their_own() -> None:
    assert count("atomicAdd(y, 1.0f); x[at] = 0;").global_["atomic"] == GlobalTally(1, 1, 128)


def test_the_cache_gives_each_block_what_it_reads_once_and_memory_gives_it_once() -> None:
    body = "y[blockIdx.x * 32 + at] = x[at] + x[at] + x[at ^ 1] + x[32 * blockIdx.x + 64 + at];"
    counts = count(body, grid=3)
    assert (counts.cache_read_bytes, counts.memory_read_bytes) == (3 * 256, 128 + 3 * 128)
    assert (counts.cache_written_bytes, counts.memory_written_bytes, counts.blocks) == (384, 384, 3)


def test_other_results_are_those_of_any_build() -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    count("y[at] = 2 * x[at];", x, y, block=64)
    np.testing.assert_array_equal(y, 2 * x)


def test_mistakes_are_found_as_in_any_build() -> None:
    with pytest.raises(SimtError, match="out-of-bounds"):
        count("y[at] = x[at * 4096];")


# ---- shared memory


@pytest.mark.parametrize(
    ("address", "banks"),
    [("at", 1), ("0", 1), ("at * 2", 2), ("at * 33", 1), ("at * 32", 32), ("at / 2 * 32 % 2048", 16)],
)
def test_lanes_that_want_different_words_of_a_bank_take_turns(address: str, banks: int) -> None:
    tally = shared_reads(address)
    assert (tally.requests, tally.bank_cycles, tally.return_cycles, tally.cycles) == (1, banks, 1, banks)


@pytest.mark.parametrize(
    ("address", "tally"),
    [
        ("4 * at", SharedTally(1, 512, 4, 4, 4)),
        ("4 * (at / 2)", SharedTally(1, 256, 2, 2, 2)),  # n and n ^ 1
        ("4 * (at % 2 + at / 4 * 2)", SharedTally(1, 256, 2, 2, 2)),  # n and n ^ 2
        # others: 128 bytes return per cycle, whichever lanes share them
        ("4 * (at % 8)", SharedTally(1, 128, 1, 4, 4)),
        ("0", SharedTally(1, 16, 1, 2, 2)),
        ("4 * (at % 8 * 8)", SharedTally(1, 128, 8, 4, 32)),
    ],
)
def test_wide_reads_return_128_bytes_a_cycle(address: str, tally: SharedTally) -> None:
    assert shared_reads(address, "Wide") == tally


def test_neighbours_that_an_unrolled_loop_writes_are_one_wide_access() -> None:
    declared = "extern __shared__ __align__(16) float s[]; "
    written = declared + "for (int e = 0; e < 4; ++e) s[at * {} + e] = x[e * 32 + at]; __syncthreads(); y[at] = s[at];"
    assert count(written.format(4), shared_bytes=1024).shared["store"] == SharedTally(1, 512, 4, 4, 4)
    assert count(written.format(5), shared_bytes=1024).shared["store"].requests == 4  # not aligned
    apart = written.replace("+ e]", "+ 128 * e]", 1)
    assert count(apart.format(4), shared_bytes=2048).shared["store"].requests == 4
    # the alignment of x is unknown
    assert count("for (int e = 0; e < 4; ++e) y[at * 4 + e] = x[e * 32 + at];").global_["store"].requests == 4


# ---- asynchronous copies


COPIES = """extern __shared__ __align__(16) float s[];
    for (int i = 0; i < 3; ++i) { copy_async_16(s + i * 128 + at * 4, x + i * 128 + at * 4, i < 2 || at < 8);
        copy_async_commit(); }
    copy_async_wait<1>(); copy_async_16(s + 384 + at * 4, x + at * 4, true); copy_async_commit();
    copy_async_wait<0>(); __syncthreads(); y[at] = s[at];"""


def test_asynchronous_copies_read_write_and_are_in_flight() -> None:
    counts = count(COPIES, shared_bytes=2048)
    assert counts.global_["copy_async"] == GlobalTally(4, 3 * 16 + 4, 3 * 512 + 128)  # zeros are not read
    assert counts.shared["copy_async"] == SharedTally(4, 2048, 16, 16, 16)  # but written
    assert counts.bytes_in_flight == 2 * 512 + 128  # then two of the copies have landed


# ---- sums


def test_counts_of_several_launches_add_up() -> None:
    one, other = count("y[at] = x[at];"), count(COPIES, shared_bytes=2048)
    both = one + other
    assert both.global_["load"] == one.global_["load"]
    assert both.global_["store"] == GlobalTally(2, 8, 256)
    assert (both.blocks, both.barriers, both.bytes_in_flight) == (2, 1, other.bytes_in_flight)
    assert both.shared == other.shared
    assert (both.cache_bytes, both.memory_bytes) == (
        one.cache_bytes + other.cache_bytes,
        one.memory_bytes + other.memory_bytes,
    )
    assert both.shared_cycles == sum(tally.cycles for tally in other.shared.values())
