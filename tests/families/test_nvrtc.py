"""Each CUDA family compiles with the oldest and the newest NVRTC that ksgen supports. `make nvrtc` downloads them."""

import pytest

from ksgen.build.build import Compiler
from ksgen.build.toolchain import find_compiler
from ksgen.errors import ToolchainError
from tests.compile_matrix import MAIN_TARGETS, PROMISES, sources
from tests.support.nvrtc import FOLDER, PackagedNvrtc

TARGETS = {"11.8": MAIN_TARGETS[:1]}  # it knows no sm_90a; later ones know both


pytestmark = [pytest.mark.libraries, pytest.mark.slow]


@pytest.fixture(params=["cu11", "cu12", "installed"])
def nvrtc(request: pytest.FixtureRequest) -> Compiler:
    if request.param == "installed":
        try:
            return find_compiler("nvrtc")
        except ToolchainError as absent:
            pytest.skip(str(absent))
    if not (folder := FOLDER / request.param).exists():
        pytest.skip(f"no NVRTC in {folder}: make nvrtc")
    return PackagedNvrtc(folder)


@pytest.mark.exhaustive
@pytest.mark.parametrize("family", PROMISES)
def test_sources_compile(family: str, nvrtc: Compiler) -> None:
    """The kernels differ in job, stride or storage, for each precision and layout."""
    targets = [each for each in TARGETS.get(nvrtc.version, MAIN_TARGETS) if each in PROMISES[family].targets]
    if not targets:
        pytest.skip(f"NVRTC {nvrtc.version} knows no target of {family}")
    for source in sources(family, targets[-1], is_sample=True):
        assert nvrtc.compile(source.text, source.entry, targets[-1]).data
