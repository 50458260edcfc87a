"""What the table of CUDA targets says; and that a target is one row, by one that only this file knows."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ksgen.build.build import CacheLayers, build
from ksgen.build.cache import Cache
from ksgen.build.toolchain import find_compiler
from ksgen.emit.render import PORTABLE as PORTABLE_LIMITS
from ksgen.emit.render import render
from ksgen.errors import ToolchainError
from ksgen.families import FAMILIES, check, cuda_limits, family_for
from ksgen.families.expected import resident_blocks
from ksgen.families.gpus import FULLEST, GPUS, OLDER, PORTABLE, TYPICAL, Gpu, gpu_of, target_of
from ksgen.launch.choice import limits_of
from ksgen.launch.planner import Planner
from ksgen.measure.verify import Bench, make_problem, tolerance
from ksgen.pattern import Pattern
from ksgen.spec import PRECISIONS, KernelSpec
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeGpu

KERNEL = KernelSpec(Pattern(2, 48, 64, 4))
# asynchronous copies, and little of everything
TOY = Gpu(40 * 1024, threads=768, blocks=5, tensor_cores=False, suffix="x")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> str:
    """The row, and nothing else."""
    monkeypatch.setitem(GPUS, 77, TOY)
    return "sm_77x"


# ---- the table


@pytest.mark.parametrize(
    ("target", "shared_kib", "threads", "blocks"),
    [
        ("sm_75", 64, 1024, 16),
        ("sm_80", 163, 2048, 32),
        ("sm_86", 99, 1536, 16),
        ("sm_89", 99, 1536, 24),
        ("sm_90a", 227, 2048, 32),
        ("sm_100", 227, 2048, 32),
        ("sm_103a", 227, 2048, 32),
        ("sm_110", 227, 1536, 24),
        ("sm_120", 99, 1536, 24),
        ("sm_121a", 99, 1536, 24),
    ],
)
def test_what_is_known(target: str, shared_kib: int, threads: int, blocks: int) -> None:
    gpu = gpu_of(target)
    assert (gpu.shared_bytes, gpu.threads, gpu.blocks) == (shared_kib * 1024, threads, blocks)
    assert cuda_limits(target).shared_bytes == gpu.shared_bytes


@pytest.mark.parametrize("target", ["sm_50", "sm_60", "sm_70", "sm_72", "sm_75"])
def test_targets_before_sm_80_have_neither_asynchronous_copies_nor_these_tensor_cores(target: str) -> None:
    limits = cuda_limits(target)
    assert not any((limits.async_copies, limits.tensor_cores, limits.warpgroups))
    for precision in PRECISIONS:
        kernel = replace(KERNEL, precision=precision)
        family = family_for(kernel, limits)
        constants = family.default(kernel, limits)
        check(family, kernel, constants, limits)
        assert (family.name, constants.copy) == ("simt", "registers")


@pytest.mark.parametrize("target", ["sm_88", "sm_99", "sm_101a", "sm_130", "sm_250f"])
def test_unknown_later_targets_have_what_all_since_sm_80_have(target: str) -> None:
    assert gpu_of(target) == PORTABLE
    assert cuda_limits(target).tensor_cores


@pytest.mark.parametrize("target", ["", "sm_", "sm_x", "80", "Portable Computing Language, cpu, 3.1", "sm_90ab"])
def test_what_is_no_cuda_target_has_none_of_its_features(target: str) -> None:
    assert gpu_of(target) == OLDER


def test_every_gpu_since_sm_80_has_what_is_portable() -> None:
    for number, gpu in GPUS.items():
        if number >= 80:
            assert gpu.shared_bytes >= PORTABLE.shared_bytes
            assert gpu.threads >= PORTABLE.threads
            assert gpu.blocks >= PORTABLE.blocks
            assert gpu.async_copies
            assert gpu.tensor_cores
    assert PORTABLE_LIMITS["cuda"].shared_bytes == PORTABLE.shared_bytes


def test_sums_of_tensor_cores_are_fine_since_hopper() -> None:
    assert {number for number, gpu in GPUS.items() if gpu.fine_sums} == {number for number in GPUS if number >= 90}
    assert not PORTABLE.fine_sums
    assert [cuda_limits(target).has_fine_sums for target in ("sm_80", "sm_89", "sm_90", "sm_90a", "sm_120")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_warpgroups_need_the_suffix() -> None:
    assert cuda_limits("sm_90a").warpgroups
    assert not any(cuda_limits(target).warpgroups for target in ("sm_90", "sm_90f", "sm_100", "sm_100a", "sm_120"))
    assert [target_of(*capability) for capability in ((7, 5), (9, 0), (10, 0), (12, 1))] == [
        "sm_75",
        "sm_90a",
        "sm_100",
        "sm_121",
    ]


def test_targets_that_are_named_are_in_the_table() -> None:
    for target in (*TYPICAL, FULLEST):
        assert gpu_of(target) in GPUS.values()


# ---- one from outside


def test_it_is_found_by_its_compute_capability(toy: str) -> None:
    assert target_of(7, 7) == toy
    # the last is the device's
    own = {"shared_bytes": 40 * 1024, "async_copies": True, "target": toy, "multiprocessors": 132}
    assert limits_of(FakeGpu(target=toy)) == replace(cuda_limits("sm_50"), **own)
    assert resident_blocks(toy, cuda_limits(toy), 32, 32, 0) == 5
    assert resident_blocks(toy, cuda_limits(toy), 256, 32, 0) == 3


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("job", ["multiply", "gradient"])
def test_families_choose_what_fits_it(toy: str, precision: str, job: str) -> None:
    kernel, limits = replace(KERNEL, precision=precision, job=job), cuda_limits(toy)
    family = family_for(kernel, limits)
    constants = family.default(kernel, limits)
    check(family, kernel, constants, limits)
    assert family.name == ("simt" if job == "multiply" else "gradient")
    assert constants.copy == ("registers" if kernel.item_bytes == 2 else "async")


def test_its_kernels_run_and_are_right(toy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    gpu, planner = FakeGpu(target=toy), Planner()
    plan = planner.plan_of(gpu, KERNEL, 40, planner.choice(gpu, KERNEL, 40))
    assert plan.choice.family == "simt"
    bench = Bench(gpu, make_problem(KERNEL, 40))
    error, checked = bench.check(plan, bench.pack(plan))
    assert error <= tolerance("float32", 64)
    assert checked == 40
    assert np.isfinite(error)


def test_a_target_of_the_compiler_that_the_table_lacks_compiles(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The target gets a row of its own, and thus its own constants."""
    try:
        compiler = find_compiler()
    except ToolchainError as error:
        pytest.skip(str(error))
    numbers = [int(target[3:]) for target in compiler.targets() if target[3:].isdecimal()]
    new = next(number for number in reversed(numbers) if number not in GPUS and number > 80)
    monkeypatch.setitem(GPUS, new, Gpu(60 * 1024, threads=1536, blocks=16))
    kernel, limits = replace(KERNEL, precision="float16"), cuda_limits(f"sm_{new}")
    constants = FAMILIES["mma"].default(kernel, limits)
    assert FAMILIES["mma"].shared_bytes(kernel, constants) <= 60 * 1024
    source = render(kernel, constants)
    assert (
        build(source.text, source.entry, f"sm_{new}", compiler, CacheLayers((Cache(tmp_path),))).target == f"sm_{new}"
    )
