"""Emitted texts in PyCUDA's own terms: what `pycuda.compiler` makes of them, and the `SourceModule` that holds it."""

import shutil
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.build import toolchain
from ksgen.build.build import build
from ksgen.build.children import Children, current_children
from ksgen.build.request import Binary
from ksgen.build.toolchain import Nvcc, Nvrtc, find_compiler
from ksgen.devices import find_device
from ksgen.errors import DeviceError, ToolchainError
from tests.driver.cubin import read_code
from tests.support.compilers import NEW_HOST, fake_nvcc, says, write_program

pytestmark = [pytest.mark.stand_in, pytest.mark.parametrize("runtime", ["pycuda"])]
TEXT = """
template <typename Real> __device__ Real scaled(Real value) { return value * 2;
    }  // which cannot stand in an extern "C"
extern "C" __global__ void scale(float* y) { y[threadIdx.x] = scaled(y[threadIdx.x]); }
"""


@pytest.fixture
def device(runtime: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Provide PyCUDA's device on a machine that has compiled nothing yet."""
    if not shutil.which("nvcc"):
        pytest.skip("no nvcc on PATH")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    try:
        return find_device(runtime)
    except DeviceError as absent:
        pytest.skip(str(absent))


@pytest.fixture
def journal(device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """nvcc writes down how it was called, one line a call, and makes what it makes."""
    named = find_compiler("nvcc")
    assert isinstance(named, Nvcc)
    written = tmp_path / "journal"
    text = f'#!/bin/sh\necho "$TMPDIR|$LC_ALL|$NVCC_APPEND_FLAGS|$*" >> {written}\nexec {named.path} "$@"\n'
    program = write_program(tmp_path / "nvcc", text)
    monkeypatch.setenv("KSGEN_NVCC", str(program))
    return written


def by_pycuda(path: Path | str, **others: Any) -> Nvcc:
    from ksgen.devices.pycuda_source import by_pycuda as started

    return started(Nvcc(str(path), **others))


def test_pycuda_starts_nvcc_once_for_a_text_with_ksgens_options_alone(
    device: Any, journal: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("NVCC_APPEND_FLAGS", "PYCUDA_DEFAULT_NVCC_FLAGS"):
        monkeypatch.setenv(name, "--use_fast_math")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        binary = build(TEXT, "scale", "sm_90a", device.compiler())
    assert build(TEXT, "scale", "sm_90a", device.compiler()) == binary
    assert (binary.provenance["compiler"], binary.resources.spill_bytes) == ("nvcc", 0)
    assert binary.resources.registers is not None
    (call,) = [line for line in journal.read_text().splitlines() if "cubin" in line]
    folder, language, appended, arguments = call.split("|")
    assert (language, appended) == ("C", "")
    assert not Path(folder).exists()
    options = arguments.split()
    assert options[0] == "--cubin"  # PyCUDA's word for it
    assert options[options.index("-arch") + 1] == "sm_90a"
    assert [each for each in options if each.startswith("-I")] == [
        f"-I{Path(sys.modules['pycuda'].__file__ or '').parent / 'cuda'}"
    ]
    assert "-O3" in options
    assert "--use_fast_math" not in options
    (entry,) = (tmp_path / "cache").rglob("meta.json")
    assert '"scale"' in entry.read_text()


def test_its_machine_code_is_that_of_nvcc_so_each_may_serve_the_others_requests(device: Any) -> None:
    other, nvcc = device.compiler(), find_compiler()
    assert isinstance(nvcc, Nvcc)
    assert not nvcc.starter
    assert other.starter
    assert (
        read_code(other.compile(TEXT, "scale", "sm_90a").data)
        == read_code(nvcc.compile(TEXT, "scale", "sm_90a").data)
        != {}
    )
    made = build(TEXT, "scale", "sm_90a", other)
    assert build(TEXT, "scale", "sm_90a") == made


def test_a_module_is_pycudas_own(device: Any) -> None:
    from pycuda.compiler import SourceModule

    from ksgen.devices.pycuda_source import KernelModule

    kernel = device.load(build(TEXT, "scale", device.target, device.compiler()), "scale", 0)
    _, module = kernel.parts
    assert type(module) is KernelModule
    assert isinstance(module, SourceModule)
    assert module.get_global == module.module.get_global
    with device._inside("asking"):
        assert module.get_function("scale").num_regs > 0
    y = np.arange(32, dtype=np.float32)
    memory = device.allocate(y.nbytes)
    device.upload(memory, y)
    device.launch(kernel, 1, 32, 0, (memory,), None)
    got = np.empty_like(y)
    device.download(got, memory)
    assert (got == y * 2).all()


def test_a_driver_that_writes_no_log_hides_no_error(device: Any) -> None:
    """PyCUDA's error then ends in whatever was in memory."""
    with pytest.raises(DeviceError, match=r"loading scale: .*image"):
        device.load(Binary(b"no cubin", "scale", device.target), "scale", 0)


def test_a_refused_source_is_reported_as_by_nvcc(device: Any) -> None:
    told = []
    for compiler in (device.compiler(), find_compiler()):
        with pytest.raises(ToolchainError) as refused:
            compiler.compile(TEXT.replace("* 2;", "* unknown;"), "scale", "sm_90a")
        told.append(str(refused.value))
    assert told[0] == told[1]
    head, source, repeat = told[0].splitlines()
    assert 'refused it for sm_90a: scale.cu(2): error: identifier "unknown" is undefined' in head
    assert "* unknown;" in Path(source.removeprefix("  source: ")).read_text()
    assert "pycuda" not in repeat


def test_nvcc_that_does_not_work_here_falls_back_to_the_next_which_pycuda_starts_too(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    good = find_compiler("nvcc")
    assert isinstance(good, Nvcc)
    bad = fake_nvcc(tmp_path / "bad", says(NEW_HOST))
    found = [Nvcc(str(bad), is_found=True), Nvcc(good.path, is_found=True), Nvrtc(is_found=True)]
    monkeypatch.setattr(toolchain, "compilers", lambda name=None: found)
    monkeypatch.setattr(toolchain, "_unfit", {})
    with pytest.warns(UserWarning, match=rf"bad/nvcc: .* is no|refused it .*; {good.path} is used instead"):
        build(TEXT, "scale", "sm_90", by_pycuda(bad, is_found=True))
    assert "-arch sm_90" in (bad.parent / "journal").read_text()
    taken = toolchain.fit_for(by_pycuda(bad, is_found=True), "sm_90")
    assert taken == good
    assert isinstance(taken, Nvcc)
    assert taken.starter


def test_one_that_takes_too_long_or_is_interrupted_ends_with_what_it_started(
    device: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow = fake_nvcc(tmp_path / "slow", f"sleep 3 && touch {tmp_path / 'woke'}")
    assert Nvcc(str(slow)).version  # asked for once
    monkeypatch.setenv("KSGEN_COMPILE_SECONDS", "1.5")
    with pytest.raises(ToolchainError, match=r"was stopped: it had not finished after 1\.5 s"):
        by_pycuda(slow).compile(TEXT, "scale", "sm_90")
    monkeypatch.delenv("KSGEN_COMPILE_SECONDS")
    children = Children()
    token = current_children.set(children)
    stopping = threading.Timer(1.5, children.stop)
    stopping.start()
    with pytest.raises(ToolchainError, match="killed by signal 9"):
        by_pycuda(slow).compile(TEXT, "scale", "sm_90")
    current_children.reset(token)
    stopping.join()
    assert (slow.parent / "journal").read_text().count("--cubin") >= 1
    time.sleep(3)  # what was left would write by then
    assert not (tmp_path / "woke").exists()


def test_where_nothing_is_to_be_compiled_by_nvcc_pycuda_starts_nothing(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    assert device.compiler() is None
    monkeypatch.delenv("KSGEN_NO_COMPILE")
    assert device.compiler() is not None
    monkeypatch.setenv("KSGEN_NVCC", "/nowhere/nvcc")
    assert device.compiler() is None
