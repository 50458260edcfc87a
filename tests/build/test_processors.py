"""What systems say of a processor, on Linux and macOS, x86 and ARM; which instruction sets it has."""

import subprocess
import sys
from pathlib import Path

import pytest

from ksgen.build import processors
from ksgen.build.host import HostCompiler, compiler_for, host_target, options_of
from ksgen.build.processors import INSTRUCTION_SETS, instruction_sets_here, set_of, why_not_here
from ksgen.devices import native
from ksgen.errors import ToolchainError
from tests.support.compilers import program

V2 = "fpu sse sse2 pni ssse3 cx16 sse4_1 sse4_2 popcnt lahf_lm"
V3 = f"{V2} fma movbe avx f16c abm bmi1 avx2 bmi2"
V4 = f"{V3} avx512f avx512dq avx512cd avx512bw avx512vl"
BF16, AMX, AMX_FP16 = (
    f"{V4} avx512_bf16",
    f"{V4} avx512_bf16 amx_bf16 amx_tile",
    f"{V4} avx512_bf16 amx_bf16 amx_tile amx_fp16",
)
CACHED = (
    processors.digest_of_processor,
    processors.processor_features,
    processors.processor_name,
    processors.tiles_are_permitted,
)
MACOS = {
    "machdep.cpu.features": "FPU SSE SSE2 SSE3 SSSE3 FMA CX16 SSE4.1 SSE4.2 MOVBE POPCNT AVX1.0 F16C",
    "machdep.cpu.extfeatures": "SYSCALL XD LAHF LZCNT",
    "machdep.cpu.leaf7_features": "BMI1 AVX2 BMI2",
    "machdep.cpu.brand_string": "Intel(R) Core(TM) i7",
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Stands in for a machine: its system, kind, and what it says of its processor."""

    def play(system: str, kind: str, told: str | dict[str, str]) -> None:
        monkeypatch.setattr("platform.system", lambda: system)
        monkeypatch.setattr("platform.machine", lambda: kind)
        monkeypatch.setattr(processors, "CPUINFO", tmp_path / "cpuinfo")
        if isinstance(told, str):
            (tmp_path / "cpuinfo").write_text(told)

        def sysctl(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
            assert command[:2] == ["sysctl", "-n"]
            assert isinstance(told, dict)
            if command[2] not in told:
                raise subprocess.CalledProcessError(1, command)
            return subprocess.CompletedProcess(command, 0, told[command[2]] + "\n")

        monkeypatch.setattr(processors.subprocess, "run", sysctl)
        for each in CACHED:
            each.cache_clear()

    yield play
    monkeypatch.undo()
    for each in CACHED:
        each.cache_clear()


def names() -> list[str]:
    return [each.name for each in instruction_sets_here()]


@pytest.mark.parametrize(
    ("flags", "sets", "vector_bytes"),
    [
        (
            AMX_FP16,
            ["x86-64-v4-amx-fp16", "x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "x86-64-v2"],
            64,
        ),
        (AMX, ["x86-64-v4-amx", "x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "x86-64-v2"], 64),
        (BF16, ["x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "x86-64-v2"], 64),
        (V4, ["x86-64-v4", "x86-64-v3", "x86-64-v2"], 64),
        (V3, ["x86-64-v3", "x86-64-v2"], 32),
        (V3.replace(" bmi2", ""), ["x86-64-v2"], 32),
        (V2, ["x86-64-v2"], 16),
        ("fpu sse sse2", [], 16),
    ],
)
def test_x86_on_linux(flags: str, sets: list[str], vector_bytes: int, machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processors, "tiles_are_permitted", lambda: True)
    machine("Linux", "x86_64", f"processor\t: 0\nmodel name\t: Xeon 7\nflags\t\t: {flags}\nbugs\t:\n")
    assert names() == sets
    assert native._vector_bytes() == vector_bytes
    assert processors.processor_name() == "Xeon 7"


def test_arm_on_linux(machine) -> None:
    machine("Linux", "aarch64", "processor\t: 0\nFeatures\t: fp asimd evtstrm sve\nCPU part\t: 0xd40\n")
    assert names() == ["aarch64"]
    assert native.limits_for(INSTRUCTION_SETS["aarch64"]).has_arm_vectors
    assert (native._vector_bytes(), processors.machine()) == (16, "aarch64")
    assert why_not_here(INSTRUCTION_SETS["x86-64-v2"]) == "this processor is aarch64"


def test_macos_says_it_by_other_names(machine) -> None:
    machine("Darwin", "x86_64", MACOS)
    assert names() == ["x86-64-v3", "x86-64-v2"]
    assert processors.processor_name() == "Intel(R) Core(TM) i7"
    assert host_target().startswith("host Darwin x86_64 ")
    machine("Darwin", "arm64", {"machdep.cpu.brand_string": "Apple M2"})
    assert names() == ["aarch64"]
    assert processors.processor_name() == "Apple M2"
    first = host_target()
    machine("Darwin", "arm64", {"machdep.cpu.brand_string": "Apple M4"})
    assert host_target() != first  # whose instructions differ


def test_what_a_processor_lacks_is_named(machine) -> None:
    machine("Linux", "x86_64", f"flags : {V3.replace(' fma', '')}\n")
    assert why_not_here(INSTRUCTION_SETS["x86-64-v3"]) == "this processor lacks fma"
    assert why_not_here(INSTRUCTION_SETS["aarch64"]) == "this processor is x86_64"


def test_tiles_need_the_systems_permission(machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("Linux", "x86_64", f"flags : {AMX}\n")
    monkeypatch.setattr(processors, "tiles_are_permitted", lambda: False)
    assert why_not_here(INSTRUCTION_SETS["x86-64-v4-amx"]) == "the system does not permit matrix tiles"
    assert names()[0] == "x86-64-v4-bf16"
    assert "amx_fp16" in why_not_here(INSTRUCTION_SETS["x86-64-v4-amx-fp16"])  # what it lacks comes first


def test_a_target_is_of_one_system(machine) -> None:
    machine("Darwin", "arm64", {})
    assert set_of("aarch64 Darwin") is INSTRUCTION_SETS["aarch64"]
    assert set_of("aarch64 Linux") is None


# ---- how compilers are asked

GCC, CLANG = "c++ (GCC) 12.2.0", "Apple clang version 16.0.0"


@pytest.mark.parametrize(
    ("system", "kind", "said", "named", "wanted", "unwanted"),
    [
        (
            "Linux",
            "x86_64",
            GCC,
            "x86-64-v3",
            "-O2 -fno-tree-coalesce-vars -march=x86-64-v3 -static-libstdc++",
            "-march=native -O3",
        ),
        (
            "Linux",
            "x86_64",
            GCC,
            "x86-64-v4",
            "-O3 -march=x86-64-v4 -mprefer-vector-width=512",
            "-O2 -fno-schedule-insns",
        ),
        (
            "Linux",
            "x86_64",
            GCC,
            "x86-64-v4-amx",
            "-O3 -march=x86-64-v4 -mavx512bf16 -mamx-tile -mamx-bf16",
            "-mamx-fp16",
        ),
        ("Linux", "x86_64", GCC, None, "-march=native", "-static-libstdc++"),
        ("Linux", "aarch64", GCC, "aarch64", "-O3 -fno-schedule-insns -march=armv8-a", "-mprefer-vector-width=512"),
        ("Linux", "aarch64", GCC, None, "-O3 -fno-schedule-insns -mcpu=native", "-march=native"),
        ("Darwin", "arm64", CLANG, None, "-O3 -mcpu=native -shared", "-fopenmp -fno-schedule-insns -static-libstdc++"),
        ("Darwin", "arm64", CLANG, "aarch64", "-march=armv8-a", "-static-libstdc++"),
        (
            "Darwin",
            "x86_64",
            CLANG,
            "x86-64-v3",
            "-O3 -mllvm -march=x86-64-v3",
            "-fno-tree-coalesce-vars -mprefer-vector-width=512",
        ),
    ],
)
def test_options(
    system: str, kind: str, said: str, named: str | None, wanted: str, unwanted: str, machine, tmp_path: Path
) -> None:
    compiler = program(tmp_path, "cxx", said)
    machine(system, kind, f"flags : {V3}\n" if system == "Linux" else MACOS)
    options = options_of(HostCompiler((str(compiler),)), INSTRUCTION_SETS[named] if named else None)
    assert set(wanted.split()) <= set(options)
    assert not set(unwanted.split()) & set(options)


@pytest.fixture
def no_ziglang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksgen.build.host.importlib.util.find_spec", lambda name: None)


@pytest.mark.usefixtures("no_ziglang")
def test_which_compiler_builds_for_another_processor(machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("Linux", "x86_64", f"flags : {V3}\n")
    target = INSTRUCTION_SETS["aarch64"].target
    program(tmp_path, "c++", GCC)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    says = (
        r"no compiler here builds for aarch64, and this machine is x86_64; install aarch64-linux-gnu-g\+\+ "
        r"\(Debian: g\+\+-aarch64-linux-gnu\), or pip install ziglang; KSGEN_CXX names another"
    )
    with pytest.raises(ToolchainError, match=says):
        compiler_for(target)
    usual = program(tmp_path, "aarch64-linux-gnu-g++", GCC)
    assert compiler_for(target) == HostCompiler((str(usual),), "aarch64")
    monkeypatch.setenv("KSGEN_CXX", str(own := program(tmp_path, "own", "aarch64-unknown-linux")))
    assert compiler_for(target) == HostCompiler((str(own),), "aarch64")
    with pytest.raises(
        ToolchainError, match=r"ks: the compiler of host Linux x86_64 \w+ cannot build for aarch64 Linux"
    ):
        HostCompiler((str(own),)).check_target(target, "ks")
    assert compiler_for(INSTRUCTION_SETS["x86-64-v4"].target).builds_for == "x86_64"


def test_ziglang_builds_for_another_processor(machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine("Linux", "x86_64", f"flags : {V3}\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    monkeypatch.setattr("ksgen.build.host.importlib.util.find_spec", lambda name: name == "ziglang")
    found = compiler_for(INSTRUCTION_SETS["aarch64"].target)
    assert found.command[1:] == ("-m", "ziglang", "c++", "-target", "aarch64-linux-gnu")
    own = HostCompiler((sys.executable, "-m", "ziglang", "c++"))
    monkeypatch.setattr("ksgen.build.host._first_line", lambda command: "clang version 19")
    assert "-mcpu=x86_64_v4+avx512bf16+amx_tile+amx_bf16" in options_of(own, INSTRUCTION_SETS["x86-64-v4-amx"])
