"""Tests of `ksgen doctor`: what is installed, what installs the rest, and why a machine cannot build or run kernels."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ksgen import devices, install, passport
from ksgen.build import toolchain
from ksgen.build.processors import INSTRUCTION_SETS
from ksgen.commands import doctor
from ksgen.commands.doctor import Finding
from ksgen.devices import libcuda, threads
from ksgen.devices.native import open_device
from ksgen.emit.templates import template_digest
from ksgen.passport import Proof, record
from tests.support.commands import run
from tests.support.compilers import MAKE, NEW_HOST, fake_nvcc, says
from tests.support.fake_gpu import FakeGpu

WORKS = MAKE.replace("scale", "trial")
NVRTC = r"pip install -e '.[cuda]' in ksgen's checkout brings NVRTC"
NVRTC_12 = NVRTC.replace("cuda]", "cuda12]")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[pytest.MonkeyPatch, Path]:
    """Provide a machine with gcc on PATH and without NVRTC."""
    (tmp_path / "gcc").symlink_to("/bin/true")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", os.pathsep.join([str(tmp_path), "/usr/bin", "/bin"]))
    for variable in ("KSGEN_NVCC", "KSGEN_NO_COMPILE", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(toolchain, "USUAL_TOOLKITS", (str(tmp_path / "cuda-*"),))
    monkeypatch.setattr(toolchain, "_packaged_toolkits", list)
    monkeypatch.setattr(toolchain, "_has_nvrtc", lambda: False)
    toolchain._find.cache_clear()
    return monkeypatch, tmp_path


def with_driver(monkeypatch: pytest.MonkeyPatch, served: int) -> None:
    for module in (install, doctor):
        monkeypatch.setattr(module, "supported_cuda", lambda: served)


def found(target: str = "sm_90a") -> dict[str, Finding]:
    return {each.what: each for each in doctor._compilers(target)}


def test_a_machine_as_it_should_be(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    monkeypatch, folder = machine
    with_driver(monkeypatch, 13000)
    nvcc = fake_nvcc(folder / "cuda-13" / "bin", WORKS)
    told = found()
    assert told["nvcc"] == Finding("nvcc", f"13.0.88 {nvcc}")
    assert told["kernels are built by"] == Finding("kernels are built by", f"{nvcc}, 13.0.88, for sm_90a")
    assert told["nvrtc"].remedy == f"{NVRTC}; pip install -e '.[nvcc]' in ksgen's checkout brings nvcc, which needs g++"


def test_a_compiler_that_does_not_know_the_gpu(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    monkeypatch, folder = machine
    with_driver(monkeypatch, 13000)
    nvcc = fake_nvcc(folder / "cuda-11" / "bin", WORKS, "11.5", "sm_75\\nsm_86\\n")
    told = found()
    why = f"{nvcc} 'sm_90a' is not a target of nvcc 11.5.88; it offers sm_75, sm_86"
    assert told["nvcc"] == Finding("nvcc", "", why, f"{NVRTC}, or install a newer toolkit")
    assert told["kernels are built by"].why == "no compiler builds binaries that this GPU and its driver can load"
    assert told["kernels are built by"].remedy == "pip install -e '.[cuda]' in ksgen's checkout"


def test_a_compiler_at_odds_with_its_host_compiler(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    _, folder = machine
    nvcc = fake_nvcc(folder / "cuda-11" / "bin", says(NEW_HOST), "11.5")
    told = found()["nvcc"]
    assert told.why.startswith(f"{nvcc} trial: nvcc 11.5.88 refused it for sm_90a: ")
    assert "unsupported GNU version" in told.why
    assert (
        told.remedy
        == f"NVCC_CCBIN=g++-12 names a host compiler that it accepts, or: {NVRTC}, which needs no host compiler"
    )


def test_a_compiler_newer_than_the_driver(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    monkeypatch, folder = machine
    with_driver(monkeypatch, 12020)
    new = fake_nvcc(folder / "cuda-13" / "bin", WORKS)
    told = found()
    assert told["nvcc"].why.startswith(f"{new} 13.0.88 is newer than the driver (")
    assert told["nvcc"].why.endswith("CUDA 12.2), which cannot load its binaries")
    assert told["nvcc"].remedy == f"update the driver, or: {NVRTC_12}"
    assert told["kernels are built by"].remedy == "pip install -e '.[cuda12]' in ksgen's checkout"
    old = fake_nvcc(folder / "cuda-12" / "bin", WORKS, "12.8")
    both = [each for each in doctor._compilers("sm_90a") if each.what == "nvcc"]
    assert [bool(each.found) for each in both] == [True, False]
    assert found()["kernels are built by"].found == f"{old}, 12.8.88, for sm_90a"


def test_a_compiler_that_is_named_and_does_not_serve(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    """Another that would serve is not taken in its place, so nothing is to be installed."""
    monkeypatch, folder = machine
    with_driver(monkeypatch, 13000)
    fake_nvcc(folder / "cuda-13" / "bin", WORKS)
    named = fake_nvcc(folder / "named", WORKS, "11.5", "sm_75\\nsm_86\\n")
    monkeypatch.setenv("KSGEN_NVCC", str(named))
    told = found()
    assert told["nvcc"].why == f"{named} 'sm_90a' is not a target of nvcc 11.5.88; it offers sm_75, sm_86"
    assert told["nvcc"].remedy == "unset KSGEN_NVCC, or set it to another nvcc"
    why = "the compiler that KSGEN_NVCC names does not work here, and no other is tried"
    assert told["kernels are built by"] == Finding("kernels are built by", "", why, told["nvcc"].remedy)
    monkeypatch.setenv("KSGEN_NVCC", str(folder / "nowhere"))
    told = found()
    assert told["nvcc"] == Finding(
        "nvcc", "", f"KSGEN_NVCC={folder / 'nowhere'} is not an executable", "give the path of nvcc, or unset it"
    )
    assert told["kernels are built by"].remedy == "unset KSGEN_NVCC, or set it to another nvcc"


def test_no_compiler_at_all(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    monkeypatch, _ = machine
    with_driver(monkeypatch, 12040)
    told = found()
    assert told["nvcc"].why == "no nvcc found (KSGEN_NVCC, PATH, CUDA_HOME, /usr/local/cuda, Python packages)"
    assert told["nvcc"].remedy == NVRTC_12  # and not the packaged nvcc, which is of CUDA 13
    assert told["nvrtc"].why == "no nvrtc found (Python packages)"


def test_compiling_is_forbidden(machine: tuple[pytest.MonkeyPatch, Path]) -> None:
    monkeypatch, folder = machine
    with_driver(monkeypatch, 13000)
    fake_nvcc(folder / "cuda-13" / "bin", WORKS)
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    why = "KSGEN_NO_COMPILE forbids compiling: launchers use only binaries of caches and bundles"
    assert found()["kernels are built by"] == Finding("kernels are built by", "", why, "unset KSGEN_NO_COMPILE")


@pytest.mark.parametrize(
    ("kind", "variable", "status"), [("cuda", "", 1), ("native", "", 0), ("cuda", "KSGEN_NO_COMPILE", 0)]
)
def test_a_gpu_without_a_compiler_runs_no_kernels(
    kind: str, variable: str, status: int, machine: tuple[pytest.MonkeyPatch, Path]
) -> None:
    monkeypatch, _ = machine
    with_driver(monkeypatch, 13000)
    if variable:
        monkeypatch.setenv(variable, "1")
    limits = devices.DeviceLimits(49152, 1024, 1, is_cpu=kind == "native")
    taken = SimpleNamespace(kind=kind, name="it", runtime="driver", driver_version="1", limits=limits, target="sm_80")
    monkeypatch.setattr(devices, "find_device", lambda: taken)
    done = run("doctor", "--json")
    assert done.exit_code == status
    row = next(row for row in json.loads(done.stdout) if row["what"] == "kernels are built by")
    assert row["found"] == ""


def test_compilers_are_tried_for_the_gpu_that_launchers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        devices.Found(f"driver:{index}", "driver", "GPU", target) for index, target in enumerate(("sm_89", "sm_80"))
    ]
    monkeypatch.setattr(devices, "list_devices", lambda: found)
    for kind, target in (("cuda", "sm_80"), ("native", "sm_89")):
        monkeypatch.setattr(devices, "find_device", lambda kind=kind: SimpleNamespace(kind=kind, target="sm_80"))
        assert doctor._target() == target


@pytest.mark.parametrize(("served", "said"), [(0, []), (13000, [True]), (12020, [True]), (11040, [False])])
def test_the_driver(served: int, said: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    with_driver(monkeypatch, served)
    told = doctor._driver()
    assert [bool(each.found) for each in told] == said
    if said == [False]:
        assert "CUDA 11.4: it loads no binary of CUDA 12 or later" in told[0].why
        assert told[0].remedy == "update the driver to 525 or later"


@pytest.mark.parametrize(
    ("version", "served", "why", "remedy"),
    [
        ("2.9.0+cu128", 13000, "", ""),
        ("2.9.0+cu128", 12040, "", ""),
        ("2.9.0", 12040, "", ""),
        ("2.9.0+cpu", 0, "", ""),
        (
            "2.9.0+cpu",
            12040,
            "built without CUDA, so its tensors cannot lie on the GPU",
            "install torch's build for CUDA",
        ),
        (
            "2.9.0+cu130",
            12040,
            "built for CUDA 13, and the driver supports 12.4",
            "update the driver, or install torch's build for CUDA 12",
        ),
    ],
)
def test_pytorchs_build_compared_with_the_driver(
    version: str, served: int, why: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_driver(monkeypatch, served)
    expected = Finding("torch", "", f"{version}: {why}", remedy) if why else Finding("torch", version)
    assert doctor._with_its_cuda("torch", version) == expected


# ---- this machine


def test_what_a_failed_removal_of_a_package_leaves_is_no_library(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = doctor._array_libraries()
    (tmp_path / "torch-2.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor._array_libraries() == known


def test_a_package_whose_metadata_raise_an_error_is_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package importlib_metadata raises it; once imported, it finds packages for the standard library, too."""

    class Damaged:
        @property
        def name(self) -> str:
            raise FileNotFoundError("No package metadata was found.")

    known, found = doctor._array_libraries(), list(doctor.metadata.distributions())
    monkeypatch.setattr(doctor.metadata, "distributions", lambda: [Damaged(), *found])
    assert doctor._array_libraries() == known


def test_doctor_names_what_is_there_and_what_installs_the_rest() -> None:
    rows = {row["what"]: row for row in json.loads(run("doctor", "--json").stdout)}
    assert {"ksgen", "Python", "launchers take", "nvcc", "nvrtc", "cache", "wisdom"} <= set(rows)
    for row in rows.values():
        assert bool(row["found"]) != bool(row["why"])
    assert "launchers take" in run("doctor").stdout


def test_a_cache_folder_that_cannot_be_is_no_traceback() -> None:
    for command in (["cache", "ls"], ["doctor", "--json"]):
        done = run(*command, KSGEN_CACHE_DIR="x" * 300)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "0 entries, 0.0 MB in " in done.stdout


def test_folders_that_others_can_write_are_reported(tmp_path: Path) -> None:
    folders = {"cache": tmp_path / "cache", "wisdom": tmp_path / "wisdom"}
    for folder in folders.values():
        folder.mkdir()
        folder.chmod(0o777)
    named = {"KSGEN_CACHE_DIR": str(folders["cache"]), "KSGEN_WISDOM_DIR": str(folders["wisdom"])}
    rows = {row["what"]: row for row in json.loads(run("doctor", "--json", **named).stdout)}
    for name, folder in folders.items():
        told = (
            f"{folder}: every user can write to it; take that right away (chmod o-w), or accept it with KSGEN_TRUST=all"
        )
        assert (rows[name]["found"], rows[name]["why"]) == ("", told)


def test_doctor_without_any_device_reports_it_and_exits_1() -> None:
    done = run("doctor", "--json", KSGEN_DEVICE="abacus")
    chosen = next(row for row in json.loads(done.stdout) if row["what"] == "launchers take")
    assert done.exit_code == 1
    assert "none is called that" in chosen["why"]


def test_doctor_without_pycuda_is_one_line_and_no_traceback() -> None:
    program = (
        "import sys; sys.modules['pycuda'] = None; from ksgen.cli import cli; cli.main(['doctor', '--json'], "
        "standalone_mode=False)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    row = next(row for row in json.loads(done.stdout) if row["what"] == "GPU by PyCUDA")
    assert row["found"] == ""
    assert "pip install pycuda" in row["remedy"]
    assert "Traceback" not in done.stderr


def test_what_builds_kernels_for_the_processor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("#!/bin/sh\necho 'own (GCC) 12.2, the best'\n")
    own.chmod(0o755)
    monkeypatch.setenv("KSGEN_CXX", str(own))
    monkeypatch.setattr(
        "ksgen.build.processors.instruction_sets_here",
        lambda: (INSTRUCTION_SETS["x86-64-v3"], INSTRUCTION_SETS["x86-64-v2"]),
    )
    told = doctor._host_compiler()
    held = "which also runs bundles for x86-64-v3, x86-64-v2"
    assert told == Finding(
        "processors' kernels are built by",
        f"{own}, own (GCC) 12.2, the best (KSGEN_CXX names it), for this processor, {held}",
    )
    monkeypatch.setenv("KSGEN_CXX", "gone++")
    told = doctor._host_compiler()
    assert (told.found, told.remedy) == ("", "give a C++ compiler's path, or unset it")
    assert told.why.startswith("KSGEN_CXX=gone++ is not an executable; this ")
    assert told.why.endswith(" runs bundles for x86-64-v3, x86-64-v2")


def test_threads_and_vectors_of_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", lambda: 1)
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    told = doctor._chosen_device()
    if not told.found:
        pytest.skip(told.why)
    assert re.search(
        r" by native \(KSGEN_DEVICE=native\); compiler .*, 1 thread on \d+ cores?, vectors of (16|32|64) bytes",
        told.found,
    )


def test_instructions_of_a_processor_for_other_types(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = devices.DeviceLimits(49152, 1024, 2, is_cpu=True, vector_bytes=64, tiles=("bf16", "f16"), dots=("bf16",))
    taken = SimpleNamespace(
        kind="native", name="it", runtime="native", driver_version="1", limits=limits, target="host"
    )
    monkeypatch.setattr(devices, "find_device", lambda: taken)
    wanted = "on 2 cores, vectors of 64 bytes, pairs of bf16, matrix tiles of bf16, matrix tiles of f16"
    assert doctor._chosen_device().found.endswith(wanted)


def test_folders_that_cannot_be_written_are_called_read_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("KSGEN_CACHE_DIR", "KSGEN_WISDOM_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    assert not any(each.found.endswith(", read-only") for each in doctor._folders())
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert all(each.found.endswith(", read-only") for each in doctor._folders())


def test_the_passport_of_the_gpu_that_launchers_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr(devices, "find_device", lambda: gpu)
    monkeypatch.setattr(libcuda, "compute_mode", lambda index: 0)
    monkeypatch.setattr(passport, "_known", {})
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    assert doctor._passport() == [Finding("passport", "KSGEN_PERMIT=all permits families without a proof")]
    monkeypatch.setenv("KSGEN_PERMIT", "all, wgma")
    passport.forget()
    [unknown] = doctor._passport()
    assert (unknown.found, unknown.remedy) == ("", "unset KSGEN_PERMIT")
    assert unknown.why.startswith("KSGEN_PERMIT='all, wgma': unknown kernel family 'all'; ")
    monkeypatch.setenv("KSGEN_PERMIT", "gemv")
    passport.forget()
    why = "launchers take no wgmma yet: not proven yet on Fake GPU"
    assert doctor._passport() == [Finding("passport", "", why, "ksgen calibrate")]
    monkeypatch.delenv("KSGEN_PERMIT")
    passport.forget()
    assert doctor._passport() == [Finding("passport", "", why, "ksgen calibrate")]
    monkeypatch.setattr(libcuda, "compute_mode", lambda index: 3)
    why = "the GPU is in exclusive-process mode, so that no child can use it next to this process"
    assert doctor._passport() == [Finding("passport", "", why, "ksgen calibrate")]
    proofs = {name: Proof("proven", "", template_digest(name), 1, 1.0) for name in ("mma", "wgmma")}
    record(gpu, proofs | {"simt": Proof("disabled", "it lies", template_digest("simt"), 1, 1.0)})
    passport.forget()
    assert doctor._passport() == [Finding("passport", "proven: mma, wgmma; simt is disabled: it lies")]
    gpu.target = "sm_80"
    passport.forget()
    assert doctor._passport() == [Finding("passport", "none; no family of sm_80 needs a proof")]
    monkeypatch.setattr(devices, "find_device", lambda: open_device(0))
    assert doctor._passport() == []
