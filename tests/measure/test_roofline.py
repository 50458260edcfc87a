"""The least time a kernel could take, and how a device's ceilings are measured."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ksgen.build.toolchain import find_compiler
from ksgen.devices import Found, find_device, list_devices
from ksgen.devices.base import Limits, uploaded
from ksgen.emit.render import render_cache_probe, render_processor_probe, render_wait
from ksgen.families.gpus import TYPICAL
from ksgen.measure import roofline
from ksgen.measure.roofline import PROCESSOR_COPIED_BYTES, Ceilings, load_probe
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.emulator import is_installed, run_cuda

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")


def test_the_floor_is_the_larger_of_moving_and_computing() -> None:
    kernel = KernelSpec(Pattern(1, 10, 20, 1))
    moved, computed = 4 * (100 * 30 + 200), 2 * 100 * 200
    assert Ceilings(1e3, 1e30).floor_s(kernel, 100) == pytest.approx(moved / 1e3)
    assert Ceilings(1e30, 1e3).floor_s(kernel, 100) == pytest.approx(computed / 1e3)


@needs_opencl
@pytest.mark.parametrize("vector_bytes", [16, 32, 64])
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
def test_a_processors_probes_do_what_is_counted(precision: str, vector_bytes: int) -> None:
    device, probe = find_device("opencl"), render_processor_probe(precision, vector_bytes)
    item_bytes = 8 if precision == "float64" else 4
    assert probe.multiply_adds == vector_bytes // item_bytes * (24 if vector_bytes == 64 else 12)
    copy, multiply = load_probe(device, probe)
    real = np.dtype(f"f{item_bytes}")
    x = np.arange(37 * vector_bytes // item_bytes, dtype=real)
    sent, taken = uploaded(device, x), uploaded(device, np.full_like(x, np.nan))
    device.launch(copy, 5, 1, 0, (sent, taken, 36), None)  # 36 vectors, and no more
    device.launch(multiply, 5, 1, 0, (sent, 3), None)
    for buffer, expected in ((taken, np.append(x[: -vector_bytes // item_bytes], [np.nan] * (vector_bytes // item_bytes))), (sent, x)):
        found = np.empty_like(x)
        device.download(found, buffer)
        np.testing.assert_array_equal(found, expected)


def test_a_processors_probe_copies_more_than_a_cache_holds() -> None:
    assert PROCESSOR_COPIED_BYTES >= 256 * 2**20


@pytest.mark.parametrize(("groups", "rounds", "marked"), [(64, 3, True), (64, 2, False), (32, 2, True), (16, 1, True)])
def test_the_caches_probe_reads_another_part_in_each_round(groups: int, rounds: int, marked: bool) -> None:
    """Two blocks of 16 threads, which go on by 48 groups: group 40 is read in the third round of 64 groups, 8 in the second of 32."""
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    probe, x, y = render_cache_probe(16, 1), np.zeros(4 * groups, np.uint32), np.zeros(1, np.uint32)
    x[4 * (40 if groups == 64 else 8) + 2] = 1
    run_cuda(probe.text, probe.entry, 2, 16, 0, [x, y, groups, rounds])
    assert y[0] == marked


class Probed:
    """A GPU whose every launch takes what `TAKES_S` says of its entry."""

    kind, dialect, target, limits = "cuda", "cuda", "sm_80", Limits(163 * 1024, 1024, 108)
    launched = ""

    def compiler(self) -> None:
        """What `build` finds."""

    def load(self, binary: str, entry: str, shared_bytes: int) -> str:
        return entry

    def allocate(self, nbytes: int) -> str:
        return f"{nbytes} bytes"

    def launch(self, kernel: str, grid: int, block: int, shared_bytes: int, args: tuple[object, ...], stream: None) -> None:
        self.launched, self.threads, self.args = kernel, grid * block, args


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
