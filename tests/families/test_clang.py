"""The processors' families compiled by Clang (the oldest and the newest on PATH): right in each precision and layout,
without spills.

Debian has it: apt-get install clang.
"""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from ksgen.build.host import ENTRY, PRELUDE, HostCompiler, host_target, source_of
from ksgen.build.processors import INSTRUCTION_SETS, machine, processor_features
from ksgen.devices.native import NativeDevice, limits_for
from ksgen.emit.render import render
from ksgen.families import FAMILIES, family_named
from ksgen.launch.choice import limits_from, limits_of
from ksgen.measure.verify import measure
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from ksgen.spec.storage import STORAGES, x_precisions
from tests.build.test_host import innermost_loop

PATTERN, CHAIN = Pattern(2, 9, 5, 2), (Pattern(2, 20, 10, 1), Pattern(1, 9, 20, 2))
BATCH = 21
ON_PROCESSORS = {
    "multiply": ("vector", "amx"),
    "chain": ("vector", "amx"),
    "gradient": ("vector_gradient", "amx_gradient"),
}

pytestmark = pytest.mark.libraries


def clangs() -> list[str]:
    """List the programs on PATH, the oldest first."""
    folders = [Path(each) for each in os.environ.get("PATH", "").split(os.pathsep) if each]
    names = {
        name.name
        for folder in folders
        for name in folder.glob("clang++*")
        if re.fullmatch(r"clang\+\+(-\d+)?", name.name)
    }
    programs = {os.path.realpath(found): found for name in sorted(names) if (found := shutil.which(name))}
    return sorted(
        programs.values(), key=lambda path: int(re.findall(r"version (\d+)", HostCompiler((path,)).version)[0])
    )


FOUND = clangs() or [""]


@pytest.fixture(scope="module", params=sorted({FOUND[0], FOUND[-1]}), ids=lambda path: Path(path).name)
def clang(request: pytest.FixtureRequest) -> HostCompiler:
    if not request.param:
        pytest.skip("no clang++ on PATH: apt-get install clang")
    return HostCompiler((request.param,))


def matrix() -> Iterator[object]:
    """Each family, precision, storage and layout that a processor with matrix tiles serves."""
    limits = replace(limits_for(INSTRUCTION_SETS["x86-64-v4-amx-fp16"]), multiprocessors=2)
    limits = limits_from("native", INSTRUCTION_SETS["x86-64-v4-amx-fp16"].target, limits)
    for job, precision, layout, weights in product(ON_PROCESSORS, PRECISIONS, LAYOUTS, ("same", *STORAGES)):
        if weights != "same" and (job == "gradient" or precision not in x_precisions(weights)):
            continue
        if job == "chain":
            kernel = KernelSpec([CHAIN], precision, layout, Epilogue(bias=True), weights=weights)
        else:
            kernel = KernelSpec(PATTERN, precision, layout, job=job, weights=weights)
        for family in (name for name in ON_PROCESSORS[job] if family_named(name).supports(kernel, limits)):
            yield pytest.param(family, kernel, id=f"{family} {job} {precision} {layout} {weights}")


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "kernel"), list(matrix()))
def test_agrees_with_float64(family: str, kernel: KernelSpec, clang: HostCompiler) -> None:
    device = NativeDevice(clang)
    if family.startswith("amx"):
        if "fma" not in processor_features():
            pytest.skip("emulated tiles need an x86 processor with FMA")
        device.limits = replace(device.limits, tiles=("bf16", "f16"))
    if not family_named(family).supports(kernel, limits_of(device)):
        pytest.skip(f"{family} does not support it here")
    assert measure(device, kernel, BATCH, runs=0, family=family).passed


def test_all_that_processors_have_is_compiled() -> None:
    rows = [row.values for row in matrix()]  # type: ignore[attr-defined]
    assert {(kernel.job, family) for family, kernel in rows} == {
        (job, family) for job, names in ON_PROCESSORS.items() for family in names
    }
    assert {kernel.precision for _, kernel in rows} >= {
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "complex64",
        "complex128",
        "bf16x6",
    }
    assert {kernel.weights for _, kernel in rows} == {"same", *STORAGES}


@pytest.mark.exhaustive
@pytest.mark.skipif(machine() != "x86_64", reason="instructions of x86")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sums_stay_in_registers(layout: str, clang: HostCompiler, tmp_path: Path) -> None:
    """Clang 14 to 16 stored up to 40 vectors in this loop where it reordered instructions before it chose registers."""
    named = INSTRUCTION_SETS["x86-64-v4"]
    kernel = KernelSpec(Pattern(1, 768, 192, 2), "float32", layout)
    constants = FAMILIES["vector"].default(kernel, limits_from("native", named.target, limits_for(named)), 1568)
    text = render(kernel, constants, family="vector", dialect="opencl").text
    (tmp_path / "k.cpp").write_text(source_of(text, ENTRY.findall(text)))
    subprocess.run([*clang.command, *clang.options(named.target), "-S", "k.cpp", "-o", "k.s"], cwd=tmp_path, check=True)
    loop = innermost_loop((tmp_path / "k.s").read_text())
    assert sum("vfmadd" in line for line in loop) >= constants.height * constants.width
    assert sum(bool(re.match(r"\s+vmov\w+\s+%zmm\d+, .*\(", line)) for line in loop) <= 1


CALLS = """
extern "C" void widen(const unsigned short* x, float* y, long count) { for (long at = 0; at < count; ++at) y[at] =
    host::of_half(x[at]); }
extern "C" void narrow(const float* x, unsigned short* y, long count) { for (long at = 0; at < count; ++at) y[at] =
    host::to_half(x[at]); }
"""


@pytest.mark.parametrize(
    "undefined", ["", "-U__F16C__ -U__FLT16_MAX__ -U__ARM_FP16_FORMAT_IEEE"], ids=["its own type", "by conversion"]
)
def test_float16_is_converted_as_numpy_does(undefined: str, clang: HostCompiler, tmp_path: Path) -> None:
    """Each float16, and floats at and next to the middle between two of them."""
    (tmp_path / "k.cpp").write_text(PRELUDE.read_text() + CALLS)
    command = [*clang.command, *clang.options(host_target()), *undefined.split(), "k.cpp", "-o", "k.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    library = ctypes.CDLL(str(tmp_path / "k.so"))
    halves = np.arange(2**16, dtype=np.uint16)
    wide = np.empty(halves.size, np.float32)
    library.widen(
        halves.ctypes.data_as(ctypes.c_void_p), wide.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(halves.size)
    )
    np.testing.assert_array_equal(wide, halves.view(np.float16).astype(np.float32))
    with np.errstate(invalid="ignore"):
        middle = (wide[:-1].astype(np.float64) + wide[1:]) / 2
    given = [
        wide,
        *(np.nextafter(middle.astype(np.float32), np.float32(to)) for to in (-np.inf, np.inf)),
        middle.astype(np.float32),
    ]
    floats = np.concatenate([*given, np.float32([65519.996, 65520, 1e30, 1e-30, -1e-8, 2.0**-25, 2.0**-24 * 1.5])])
    narrow = np.empty(floats.size, np.uint16)
    library.narrow(
        floats.ctypes.data_as(ctypes.c_void_p), narrow.ctypes.data_as(ctypes.c_void_p), ctypes.c_long(floats.size)
    )
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(narrow.view(np.float16), floats.astype(np.float16))
