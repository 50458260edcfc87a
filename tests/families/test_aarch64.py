"""The processors' families on ARM: compiled for it here and run under an emulator, right and without spills."""

import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.build.host import ENTRY, HostCompiler, compiler_for, source_of
from ksgen.build.processors import INSTRUCTION_SETS
from ksgen.devices.native import limits_for
from ksgen.emit.render import render
from ksgen.errors import ToolchainError
from ksgen.families import family_named
from ksgen.launch.choice import limits_from
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.processor_cases import CHAIN, Case, passes, tiles
from tests.support.program_device import ProgramCompiler, ProgramDevice

ARM = INSTRUCTION_SETS["aarch64"]
LIBRARIES = "/usr/aarch64-linux-gnu"  # where Debian keeps what programs for ARM are linked with
ALL = (True, "gelu", True)
CASES = [
    Case((2, 24, 7, 2), batches=(14,), family="vector", epilogue=ALL),
    Case((1, 5, 6, 3), batches=(33,), family="vector"),  # transposed
    Case((2, 5, 9, 3), layout="bsl", batches=(33,), family="vector", epilogue=(True, "silu", False)),
    Case((1, 16, 5, 4), "float64", batches=(9,), family="vector", epilogue=(False, "gelu_tanh", True)),
    Case((1, 8, 5, 1), "float16", batches=(9,), family="vector"),
    Case((1, 6, 5, 2), "bfloat16", "bsl", batches=(17,), family="vector"),
    Case((1, 16, 5, 8), "bfloat16", batches=(13,), family="vector", constants=tiles("outputs", 4, 6, 4, 12, 2, 1)),
    CHAIN[1],
    Case((2, 9, 10, 2), batches=(21,), family="cpu_gradient"),
    Case((1, 7, 5, 3), "float16", "bsl", batches=(21,), family="cpu_gradient"),
]


pytestmark = pytest.mark.libraries


@pytest.fixture(scope="module")
def compiler() -> HostCompiler:
    try:
        return compiler_for(ARM.target)
    except ToolchainError as absent:
        pytest.skip(str(absent))


@pytest.fixture(scope="module")
def arm(compiler: HostCompiler, tmp_path_factory: pytest.TempPathFactory) -> ProgramDevice:
    emulator = shutil.which("qemu-aarch64")
    if not emulator or not Path(LIBRARIES).exists():
        pytest.skip(f"no qemu-aarch64 (Debian: qemu-user), or nothing in {LIBRARIES} to run with it")
    flags = tuple(flag for flag in compiler.options(ARM.target) if flag not in ("-shared", "-fPIC"))
    made = ProgramCompiler(compiler.command, flags)
    return ProgramDevice(
        made, tmp_path_factory.mktemp("arm"), limits_for(ARM), (emulator, "-L", LIBRARIES), environment=dict(os.environ)
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_agrees_with_float64(case: Case, arm: ProgramDevice) -> None:
    before = arm.launched
    assert all(passes(arm, case))
    assert arm.launched >= before + 2


LIMITS = limits_from("native", ARM.target, limits_for(ARM))


@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("pattern", "layout", "family", "size"),
    [
        ((1, 256, 256, 2), "bsf", "vector", (6, 4)),
        ((1, 48, 48, 3), "bsf", "vector", (12, 2)),
        ((1, 96, 384, 6), "bsl", "vector", (6, 4)),
        ((1, 48, 96, 3), "bsl", "cpu_gradient", (6, 4)),
    ],
)
def test_sums_fill_the_registers_and_none_is_spilled(
    pattern: tuple[int, int, int, int],
    layout: str,
    family: str,
    size: tuple[int, int],
    precision: str,
    compiler: HostCompiler,
    tmp_path: Path,
) -> None:
    """32 registers of four floats."""
    kernel = KernelSpec(
        Pattern(*pattern), precision, layout, job="gradient" if family == "cpu_gradient" else "multiply"
    )
    constants = family_named(family).default(kernel, LIMITS)
    if precision == "float32":
        assert (constants.height, constants.width, constants.lanes) == (*size, 4)
    source = render(kernel, constants, family=family, dialect="opencl")
    (tmp_path / "k.cpp").write_text(source_of(source.text, ENTRY.findall(source.text)))
    subprocess.run(
        [*compiler.command, *compiler.options(ARM.target), "-S", "k.cpp", "-o", "k.s"], cwd=tmp_path, check=True
    )
    loop = shortest_loop((tmp_path / "k.s").read_text(), 24)
    assert sum("fmla" in line for line in loop) >= constants.height * constants.width
    assert not [line for line in loop if re.search(r"\b[qdv]\d+.*\[sp", line)]


def shortest_loop(assembly: str, products: int) -> list[str]:
    """Return the shortest loop with at least that many multiply-adds."""
    lines, places, loops = assembly.splitlines(), {}, []
    for at, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            places[label[1]] = at
        elif (jump := re.match(r"\s+(?:b\.?\w*|cbn?z|tbn?z)\s+.*?(\.L\w+)$", line)) and jump[1] in places:
            loops.append(lines[places[jump[1]] : at])
    return min((loop for loop in loops if sum("fmla" in line for line in loop) >= products), key=len)


def test_arm_has_more_registers_than_x86_of_that_width() -> None:
    kernel = KernelSpec(Pattern(1, 256, 256, 2))
    other = replace(LIMITS, has_arm_vectors=False)
    assert (LIMITS.vector_registers, other.vector_registers) == (32, 16)
    default = family_named("vector").default
    assert [default(kernel, limits).height * default(kernel, limits).width for limits in (LIMITS, other)] == [24, 12]
