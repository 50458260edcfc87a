"""The second opinion, short of the simulator: which texts it asks for, what it hands over, and what it says where it
cannot be built.
"""

import re
import shutil
from pathlib import Path

import pytest

from ksgen.errors import ToolchainError
from ksgen.spec import KernelSpec
from tests.emulator.ptx import translate
from tests.second_opinion.__main__ import OF_TENSOR_CORES, PRECISIONS, cases, in_bytes
from tests.second_opinion.simulator import UNKNOWN, Simulator, SimulatorError, build, is_lacking
from tests.support.kernels import kernel_of, source_of
from tests.support.program import needs_compiler


def test_it_asks_for_each_family_precision_and_layout_once() -> None:
    found = list(cases())
    texts = {case.source.text for case in found}
    assert len(texts) == len(found) > 200
    assert {case.source.constants.entry_family or case.source.family for case in found} == {
        "simt",
        "gradient",
        "mma",
        "gradient_mma",
    }
    assert {case.source.kernel.precision for case in found} == {*PRECISIONS, *OF_TENSOR_CORES}
    assert {case.source.kernel.layout for case in found} == {"bsf", "bsl"}
    assert any("cp.async" in text for text in texts)
    assert all("wgmma" not in text for text in texts)


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SimulatorError, match=r"^not on PATH: git, cmake, make, g\+\+, flex, bison, nvcc, ptxas; .* zlib's headers$"
    ):
        build("nowhere", tmp_path / "folder")


def test_a_repository_that_cannot_be_cloned_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not shutil.which("git"):
        pytest.skip("no git on PATH")
    monkeypatch.setattr("tests.second_opinion.simulator.NEEDED", ("git",))
    with pytest.raises(SimulatorError, match=r"git clone --quiet .*nowhere"):
        build(str(tmp_path / "nowhere"), tmp_path / "folder")


def test_strings_that_the_simulator_executes_stay() -> None:
    text = source_of("mma", kernel_of((2, 37, 13, 5), "float16", "bsf")).text
    kept = translate(text, only=is_lacking)
    asked, left = (set(re.findall(r'asm(?: volatile)?\("([\w.:]+)', each)) for each in (text, kept))
    assert left == {"cvt.f32.f16", "cvt.rn.f16.f32", "st.global.v4.u32", "st.global.v2.u32"}
    assert {opcode for opcode in asked - left if not opcode.startswith(UNKNOWN)} == set()


@pytest.mark.exhaustive
@needs_compiler
@pytest.mark.parametrize(
    ("family", "kernel", "word"),
    [
        ("simt", kernel_of((2, 37, 13, 5), "float32", "bsf"), "cp.async"),
        ("mma", kernel_of((2, 37, 13, 5), "float16", "bsf"), "mma.sync"),
        ("mma", in_bytes((2, 37, 13, 5), "bsf", "e4m3"), "e4m3.e4m3"),
    ],
)
def test_instructions_that_the_simulator_lacks_are_emulated(
    family: str, kernel: KernelSpec, word: str, tmp_path: Path
) -> None:
    source = source_of(family, kernel)
    assert word in source.text
    try:
        text = Simulator(tmp_path, tmp_path, tmp_path).ptx(source).read_text()
    except ToolchainError as error:
        pytest.skip(str(error))  # NVRTC makes no PTX here
    assert f".entry {source.entry}(" in text
    code = re.sub(r"//[^\n]*", "", text)
    assert not any(unknown in code for unknown in UNKNOWN)
