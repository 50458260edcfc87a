"""The least time a kernel could take, and how a device's ceilings are measured."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.build.build import build
from ksgen.build.toolchain import find_compiler
from ksgen.devices import Found, find_device, list_devices
from ksgen.devices.base import Device, DeviceLimits, uploaded
from ksgen.emit.render import render_cache_probe, render_processor_probe, render_tiles_probe, render_wait
from ksgen.errors import ToolchainError
from ksgen.families.gpus import TYPICAL
from ksgen.launch.choice import limits_of
from ksgen.measure import roofline
from ksgen.measure.roofline import (
    GROUPS_PER_CORE,
    PROCESSOR_COPIED_BYTES,
    Ceilings,
    load_probe,
    measure_ceilings,
    share_of_floor,
)
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.emulator import is_installed, run_cuda
from tests.support.emulated_tiles import needs_emulation

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")


def test_the_floor_is_the_larger_of_moving_and_computing() -> None:
    kernel = KernelSpec(Pattern(1, 10, 20, 1))
    moved, computed = 4 * (100 * 30 + 200), 2 * 100 * 200
    assert Ceilings(1e3, 1e30).floor_s(kernel, 100) == pytest.approx(moved / 1e3)
    assert Ceilings(1e30, 1e3).floor_s(kernel, 100) == pytest.approx(computed / 1e3)


# Bytes and operations: 4 * 30 and 400 per row of the batch, 800 of weights.
@pytest.mark.parametrize(
    ("ceilings", "batch", "sets", "floor_us"),
    [
        (Ceilings(1e9, 1e30), 1, 8, None),  # weights, and X and Y, may stay in a cache: how fast it is, is unknown
        (Ceilings(1e9, 1e30), 10**6, 8, 120e6 / 1e3),  # X and Y move; weights stay
        (Ceilings(1e9, 1e30), 10**6, 1, None),  # one set of X and Y, which a cache may keep
        (Ceilings(1e9, 4e8), 1, 8, 1.0),  # multiply-adds take longer than memory would
        (Ceilings(1e9, 4.5e8), 1, 8, None),  # and here not: 0.92 us of cached data, 0.89 us of multiply-adds
        (Ceilings(1e9, 1e30, cache_bytes_per_s=4e9), 1, 256, 0.23),  # a GPU's L2 cache
        (Ceilings(1e9, 1e30, cache_bytes_per_s=4e9), 10**7, 256, 1200e6 / 1e3),
    ],
)
def test_the_floor_of_a_time_counts_what_a_cache_may_keep_at_its_rate(
    ceilings: Ceilings, batch: int, sets: int, floor_us: float | None
) -> None:
    assert ceilings.floor_us(KernelSpec(Pattern(1, 10, 20, 1), "float32"), batch, sets) == (
        floor_us and pytest.approx(floor_us)
    )


def test_weights_that_no_cache_holds_are_moved_in_every_run() -> None:
    kernel = KernelSpec(Pattern(1, 8192, 8192, 1), "float32")
    assert kernel.weight_bytes == roofline.CACHE_BYTES
    assert Ceilings(1e9, 1e30).floor_us(kernel, 1, 8) == pytest.approx(kernel.weight_bytes / 1e3)


def test_no_share_of_the_floor_is_above_one() -> None:
    cases = ((1.0, 2.0), (2.0, 2.0), (2.1, 2.0), (None, 2.0), (1.0, None), (0.0, 2.0))
    assert [share_of_floor(*each) for each in cases] == [0.5, 1.0, None, None, None, None]


def test_a_probe_that_may_not_be_compiled_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bundle holds it, and `ksgen build` does not make it."""
    device = find_device("native")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    with pytest.raises(ToolchainError) as refused:
        measure_ceilings(device, "float32")
    lacks = f"no cache holds ks_probe_float32, which measures the rates of {device.name}"
    assert str(refused.value) == f"{lacks}, and KSGEN_NO_COMPILE forbids compiling it; unset it for one run"


@needs_opencl
@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize(
    ("precision", "dots"), [("float32", ("bf16",)), ("float64", ()), ("bfloat16", ()), ("bfloat16", ("bf16",))]
)
def test_a_processors_probes_do_what_is_counted(precision: str, dots: tuple[str, ...], vector_bytes: int) -> None:
    device = find_device("opencl")
    probe = render_processor_probe(
        precision, replace(limits_of(device), vector_bytes=vector_bytes, has_arm_vectors=False, dots=dots)
    )
    item_bytes, inputs = 8 if precision == "float64" else 4, 2 if precision == "bfloat16" and dots else 1
    assert probe.multiply_adds == vector_bytes // item_bytes * (24 if vector_bytes == 64 else 12) * inputs
    copy, multiply = load_probe(device, probe)
    real = np.dtype(f"f{item_bytes}")
    x = np.arange(37 * vector_bytes // item_bytes, dtype=real)
    sent, taken = uploaded(device, x), uploaded(device, np.full_like(x, np.nan))
    device.launch(copy, 5, 1, 0, (sent, taken, 36), None)  # 36 vectors, and no more
    device.launch(multiply, 5, 1, 0, (sent, 3), None)
    for buffer, expected in (
        (taken, np.append(x[: -vector_bytes // item_bytes], [np.nan] * (vector_bytes // item_bytes))),
        (sent, x),
    ):
        found = np.empty_like(x)
        device.download(found, buffer)
        np.testing.assert_array_equal(found, expected)


@pytest.fixture
def with_tiles(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Provide a native device that reports tiles, which are emulated if the processor has none."""
    needs_emulation()
    found = find_device("native")
    monkeypatch.setattr(found, "limits", replace(found.limits, tiles=("bf16", "f16")))
    return found


@pytest.mark.parametrize(("operand", "one"), [("bf16", 0x3F80), ("f16", 0x3C00)])
def test_a_probe_of_tiles_does_what_is_counted(operand: str, one: int, with_tiles: Device) -> None:
    device, probe, groups, rounds = with_tiles, render_tiles_probe(operand), 3, 5
    assert probe.multiply_adds == 4 * 16 * 16 * 32
    kernel = device.load(build(probe.text, probe.entry, device.target, device.compiler()), probe.entry, 0)
    items = np.full((groups + 1, 512), one, np.uint16)
    memory = uploaded(device, items)
    device.launch(kernel, groups, 1, 0, (memory, rounds), None)
    device.download(items, memory)
    np.testing.assert_array_equal(items[:groups].view(np.float32), 32 * rounds)
    np.testing.assert_array_equal(items[groups], one)


def test_the_ceiling_is_that_of_tiles_where_they_multiply_what_is_stored(
    with_tiles: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Emulated tiles are slower than vectors; here they take no time."""
    monkeypatch.setattr(roofline, "TILE_ROUNDS", 1)
    monkeypatch.setattr(roofline, "PROCESSOR_COPIED_BYTES", 2**20)
    monkeypatch.setattr(roofline, "PROCESSOR_ROUNDS", 64)
    seconds = iter([1.0, 1.0, 1e-9] * 3)
    monkeypatch.setattr(type(with_tiles), "time", lambda *_, **__: [next(seconds)])
    per_product = 2.0 * with_tiles.limits.multiprocessors * GROUPS_PER_CORE * 4 * 16 * 16 * 32 / 1e-9
    bfloat16, six = measure_ceilings(with_tiles, "bfloat16"), measure_ceilings(with_tiles, "bf16x6")
    assert (bfloat16.flops_per_s, bfloat16.products) == (pytest.approx(per_product), 1)
    assert (six.flops_per_s, six.products) == (pytest.approx(per_product / 6), 6)
    assert measure_ceilings(with_tiles, "float32").flops_per_s < 1e9


def test_a_processors_probe_copies_more_than_a_cache_holds() -> None:
    assert PROCESSOR_COPIED_BYTES >= 256 * 2**20


@pytest.mark.parametrize(("groups", "rounds", "marked"), [(64, 3, True), (64, 2, False), (32, 2, True), (16, 1, True)])
def test_the_caches_probe_reads_another_part_in_each_round(groups: int, rounds: int, marked: bool) -> None:
    """Two blocks of 16 threads, which go on by 48 groups: group 40 is read in the third round of 64 groups, 8 in the
    second of 32.
    """
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    probe, x, y = render_cache_probe(16, 1), np.zeros(4 * groups, np.uint32), np.zeros(1, np.uint32)
    x[4 * (40 if groups == 64 else 8) + 2] = 1
    run_cuda(probe.text, probe.entry, 2, 16, 0, [x, y, groups, rounds])
    assert y[0] == marked


class Probed:
    """A GPU whose every launch takes what `TAKES_S` says of its entry."""

    kind, dialect, target, limits = "cuda", "cuda", "sm_80", DeviceLimits(163 * 1024, 1024, 108)
    launched = ""

    def compiler(self) -> None:
        """What `build` finds."""

    def load(self, binary: str, entry: str, shared_bytes: int) -> str:
        return entry

    def allocate(self, nbytes: int) -> str:
        return f"{nbytes} bytes"

    def launch(
        self, kernel: str, grid: int, block: int, shared_bytes: int, args: tuple[object, ...], stream: None
    ) -> None:
        self.launched, self.threads, self.args = kernel, grid * block, args


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA compiler")
@pytest.mark.parametrize("target", TYPICAL)
def test_the_caches_probe_and_what_keeps_a_gpu_busy_compile_for_every_gpu(target: str) -> None:
    """Without warnings or spills, and the blocks of the probe fit a multiprocessor together."""
    compiler = find_compiler("nvcc")
    for text in (render_cache_probe(roofline.THREADS, roofline.CACHE_BLOCKS), render_wait()):
        binary = compiler.compile(text.text, text.entry, target)
        assert binary.resources.spill_bytes == 0
        assert not binary.provenance.get("notes")
        registers = binary.resources.registers
        assert registers is not None
        assert registers * roofline.THREADS * roofline.CACHE_BLOCKS <= 65536


TAKES_S = {"ks_probe_float32": 0.5e-3, "ks_probe_float32_multiply_add": 4e-3, "ks_probe_cache": 1e-3}


def test_a_gpus_ceilings_are_its_probes_counts_over_their_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(device: Probed, launch: Callable[[], None], runs: int) -> list[float]:
        launch()
        return [TAKES_S[device.launched]] * runs

    monkeypatch.setattr(roofline, "time_launches", take)
    monkeypatch.setattr("ksgen.build.build.build", lambda *_: "a binary")
    device: Any = Probed()
    found = roofline.measure_ceilings(device, "float32")
    assert found.bytes_per_s == 2 * 512 * 2**20 / 0.5e-3
    assert found.flops_per_s == 2 * 108 * 64 * 256 * 2048 * 128 / 4e-3
    assert (device.launched, device.threads) == ("ks_probe_cache", 108 * 4 * 256)
    _, _, groups, rounds = device.args
    assert 16 * groups <= 4 * 2**20  # a T4's cache
    assert found.cache_bytes_per_s == device.threads * rounds * 16 / 1e-3
    assert roofline.best_of(found, Ceilings(1e15, 1.0, 1, 2.0)) == replace(found, bytes_per_s=1e15)
