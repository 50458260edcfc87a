"""Tests of a search's parts, as numbers: the cost model, occupancy, the content of pools, strategies' choices."""

from dataclasses import replace
from math import inf

import pytest

from ksgen.build.request import Resources
from ksgen.families import FAMILIES, Limits, cuda_limits, family_named
from ksgen.families.expected import LAUNCH_US, resident_blocks
from ksgen.families.mma.shape import MmaConstants
from ksgen.families.simt.shape import SimtConstants
from ksgen.families.wgmma.permuted import with_blocks_apart
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.job import Candidate
from ksgen.tuning.model import Machine, misfit, predict_us
from tests.support.tuning_pools import pool_of

H200 = cuda_limits("sm_90a")
GPU = Machine("sm_90a", H200, 132, {"simt": Ceilings(4.3e12, 60e12), "mma": Ceilings(4.3e12, 790e12)})
CPU = Machine(
    "a processor", Limits(256 * 1024, 8192, 0, is_cpu=True, async_copies=False), 2, {"simt": Ceilings(1e10, 9e10)}
)
KERNEL = KernelSpec(Pattern(1, 192, 48, 2))
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")
SIMT = FAMILIES["simt"]
SIMT_ONLY = replace(GPU, ceilings={"simt": GPU.ceilings["simt"]})


# ---- the cost model


@pytest.mark.parametrize(
    ("target", "threads", "registers", "shared_bytes", "blocks"),
    [
        ("sm_90a", 256, 0, 0, 8),  # 2048 threads
        ("sm_86", 256, 0, 0, 6),  # 1536
        ("sm_90a", 32, 0, 0, 32),  # never more blocks
        ("sm_86", 32, 0, 0, 16),
        ("sm_90a", 256, 128, 0, 2),
        ("sm_90a", 256, 129, 0, 1),  # registers are given out in units of eight a thread
        ("sm_90a", 1024, 65, 0, 0),
        ("sm_90a", 128, 32, 113 * 1024, 2),
        ("sm_90a", 128, 32, 114 * 1024, 1),
        ("sm_90a", 128, 32, 228 * 1024, 0),
    ],
)
def test_blocks_that_share_a_multiprocessor(
    target: str, threads: int, registers: int, shared_bytes: int, blocks: int
) -> None:
    assert (
        resident_blocks(target, cuda_limits(target) if target == "sm_86" else H200, threads, registers, shared_bytes)
        == blocks
    )


def test_a_prediction_is_never_below_the_floor_and_grows_with_the_batch() -> None:
    for machine, name in ((GPU, "simt"), (CPU, "simt")):
        family, constants = FAMILIES[name], FAMILIES[name].default(KERNEL, machine.limits)
        times = [predict_us(machine, family, KERNEL, constants, batch) for batch in (1000, 25088, 100_000)]
        assert times == sorted(times)
        assert times[1] >= machine.ceilings[name].floor_s(KERNEL, 25088) * 1e6


def test_plain_constants_of_a_family_that_also_uses_tensor_cores_have_plain_ceilings() -> None:
    kernel, family = replace(KERNEL, precision="float16", job="gradient"), FAMILIES["gradient"]
    on_cores, plain = family.defaults(kernel, H200)
    machine = replace(GPU, ceilings={"gradient": GPU.ceilings["mma"]}, plain={"gradient": GPU.ceilings["simt"]})
    assert machine.ceilings_of("gradient", kernel, on_cores) == GPU.ceilings["mma"]
    assert machine.ceilings_of("gradient", kernel, plain) == GPU.ceilings["simt"]
    slow = replace(machine, plain={"gradient": Ceilings(4.3e12, 1e12)})
    times = [[predict_us(each, family, kernel, own, 25088) for own in (on_cores, plain)] for each in (machine, slow)]
    assert times[0][0] == times[1][0]
    assert times[0][1] < times[1][1]


def test_a_measured_rate_of_the_second_level_cache_counts_more_than_the_tables() -> None:
    """4.3 TB/s copied stand for 11.3 TB/s of an H100's cache. This kernel's W is read again by each block."""
    kernel = KernelSpec(Pattern(1, 768, 192, 2), "tf32x3")
    constants = FAMILIES["mma"].default(kernel, H200)
    mma, once = FAMILIES["mma"], GPU.ceilings["mma"]
    slow, fast, table = (
        predict_us(replace(GPU, ceilings={"mma": replace(once, cache_bytes_per_s=rate)}), mma, kernel, constants, 25088)
        for rate in (2e12, 4.3e12 * 7900 / 3000, 0.0)
    )
    assert fast == pytest.approx(table)
    assert slow > 1.9 * fast


def test_plain_multiply_adds_are_no_faster_for_a_precision_of_tensor_cores() -> None:
    plain, split = (replace(KERNEL, precision=name) for name in ("float32", "tf32x3"))
    assert predict_us(GPU, SIMT, split, CONSTANTS, 25088) == predict_us(GPU, SIMT, plain, CONSTANTS, 25088)
    mma, constants = FAMILIES["mma"], FAMILIES["mma"].default(split, H200)
    once, thrice = (replace(GPU, ceilings={"mma": Ceilings(1e15, 1e12, products)}) for products in (1, 3))
    assert predict_us(once, mma, split, constants, 25088) > 2.9 * predict_us(thrice, mma, split, constants, 25088)


def test_what_is_permuted_takes_as_long_as_its_product_and_the_copies_around_it() -> None:
    permuted, shared = family_named("wgmma_permuted"), family_named("wgmma_shared")
    machine = replace(GPU, ceilings=dict.fromkeys((permuted.name, shared.name), Ceilings(4e12, 790e12)))
    kernel = KernelSpec(Pattern(1, 256, 256, 16), "float16")
    constants = permuted.default(kernel, H200)
    between = SharedConstants(**{name: value for name, value in vars(constants).items() if name != "x_from"})
    whole = predict_us(machine, permuted, kernel, constants, 25088)
    product = predict_us(machine, shared, with_blocks_apart(kernel), between, 25088)
    copied = 2 * 2 * 25088 * (kernel.pattern.in_features + kernel.pattern.out_features)  # read and written
    assert whole == pytest.approx(product + copied / 4e6 + 2 * LAUNCH_US)


def test_a_candidate_of_which_no_block_fits_is_never_proposed() -> None:
    greedy = replace(CONSTANTS, tile_batch=256, tile_out=128, tile_in=32, stages=4)
    assert predict_us(GPU, SIMT, KERNEL, greedy, 1000) == inf
    pool = pool_of(KERNEL, 1000, SIMT_ONLY, [Candidate("simt", greedy)])
    assert Candidate("simt", greedy) not in pool.candidates


def test_padding_and_half_empty_waves_cost() -> None:
    full, ragged = KernelSpec(Pattern(1, 64, 512, 1), layout="bsl"), KernelSpec(Pattern(1, 65, 512, 1), layout="bsl")
    constants = SimtConstants(128, 64, 8, 1, 8, 8, 3, 1, "async")
    whole = 4 * 132 * 128
    assert predict_us(GPU, SIMT, ragged, constants, whole) > 1.8 * predict_us(GPU, SIMT, full, constants, whole)
    one_wave, one_block_more = (predict_us(GPU, SIMT, full, constants, 128 * blocks) for blocks in (132, 133))
    assert one_block_more > 1.5 * one_wave


def test_more_stages_in_flight_cost_less_waiting() -> None:
    mma, kernel = FAMILIES["mma"], KernelSpec(Pattern(1, 48, 1024, 4), "float16")
    machine = replace(GPU, ceilings={"mma": Ceilings(4e15, 8e17)})  # nothing else takes time
    two, three = (MmaConstants(64, 48, 16, 4, 2, 1, stages, 0, 1) for stages in (2, 3))
    times = [predict_us(machine, mma, kernel, constants, 25088) - LAUNCH_US for constants in (two, three)]
    assert times[0] > 1.5 * times[1]


def test_what_spills_or_fits_nowhere_is_not_measured() -> None:
    assert misfit(GPU, SIMT, KERNEL, CONSTANTS, Resources(96, 0, 0, 0)) == ""
    assert misfit(GPU, SIMT, KERNEL, CONSTANTS, Resources(255, 0, 64, 64)) == "spills 64 bytes per thread"
    wide = replace(CONSTANTS, tile_batch=256, tile_out=128, tile_in=4, tile_d=1, stages=2, thread_out=4)
    assert misfit(GPU, SIMT, KERNEL, wide, Resources(128, 0, 0, 0)).startswith(
        "no block fits a multiprocessor: 1024 threads of 128"
    )
    assert misfit(CPU, SIMT, KERNEL, CONSTANTS, Resources(shared_bytes=18464)) == ""
