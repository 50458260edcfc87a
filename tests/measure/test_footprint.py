"""What a check of a kernel holds of memory: as much as is traced, and refused in words where there is less."""

import os
import tracemalloc

import pytest
from click.testing import CliRunner

from ksgen.cli import cli
from ksgen.devices import find_device
from ksgen.errors import DeviceError, SpecError
from ksgen.families import family_for
from ksgen.launch.choice import limits_of
from ksgen.measure.verify import footprint, measure
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec


def has_opencl() -> bool:
    try:
        return find_device("opencl").limits.is_cpu
    except DeviceError:
        return False


pytestmark = pytest.mark.skipif(not has_opencl(), reason="no OpenCL on the processor: pip install -e '.[cpu]'")


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "batch"),
    [
        (KernelSpec(Pattern(1, 2**20, 1, 1)), 1),
        (KernelSpec(Pattern(1, 1, 2**20, 1)), 1),
        (KernelSpec(Pattern(1, 64, 64, 1)), 2**15),
        (KernelSpec(Pattern(1, 1024, 1024, 1)), 16),
        (KernelSpec(Pattern(1, 64, 64, 1), "float16", "bsl", Epilogue(True, "gelu", True)), 2**14),
        (KernelSpec(Pattern(1, 64, 64, 1), "bfloat16", weights="e4m3", inputs="e4m3"), 2**15),
        (KernelSpec(Pattern(1, 64, 64, 1), job="gradient"), 2**15),
        (KernelSpec(Pattern(1, 1024, 1024, 1), "float64", job="gradient"), 16),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_it_is_what_a_check_holds(kernel: KernelSpec, batch: int) -> None:
    device = find_device("opencl")
    measure(device, kernel, batch, runs=1)  # imports and builds
    tracemalloc.start()
    measure(device, kernel, batch, runs=1)
    held = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    found = footprint(kernel, batch, limits_of(device))
    assert 0.97 * held <= found.total  # the sets of arrays that timing takes in turn are the host's too
    assert found.arrays + found.reference <= 1.7 * held
    limits = limits_of(device)
    family = family_for(kernel, limits, batch)
    if kernel.job == "multiply":
        assert found.device > family.packed_bytes(kernel, family.default(kernel, limits))


@pytest.mark.parametrize("command", [["run"], ["tune"]])
def test_more_than_there_is_is_refused_in_words(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate includes the sets of arrays that timing alternates between, and packed weights."""
    told = os.sysconf
    # whatever this machine has
    monkeypatch.setattr(os, "sysconf", lambda name: 2**22 if name == "SC_PHYS_PAGES" else told(name))
    arguments = [*command, "--device", "opencl", "--pattern", "1,2147483647,1,1", "--batch", "1"]
    refused = CliRunner().invoke(cli, arguments)
    assert isinstance(refused.exception, SpecError)
    assert str(refused.exception).startswith("--batch 1: checking ks_1x2147483647x1x1_float32_bsf takes 1")
    assert "the float64 reference 68.7, the device's buffers 26.0)" in str(refused.exception)
    assert str(refused.exception).endswith("GB; take a smaller pattern")
