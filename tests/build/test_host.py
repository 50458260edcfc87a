"""The host's C++ compiler: which one is taken, what it makes, and what it says."""

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.build import host
from ksgen.build.build import AbsentCompiler, CacheLayers, build
from ksgen.build.host import HostCompiler, find_host_compiler, host_target, source_of
from ksgen.build.processors import INSTRUCTION_SETS
from ksgen.build.request import Request
from ksgen.emit.render import render
from ksgen.errors import ToolchainError
from ksgen.families import family_named
from ksgen.families.base import Limits
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.compilers import hasty, program, write_program

CPU = Limits(2**18, registers=0, is_cpu=True, vector_bytes=16, multiprocessors=2, async_copies=False)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> HostCompiler:
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    try:
        return find_host_compiler()
    except ToolchainError as absent:
        pytest.skip(str(absent))


def text() -> tuple[str, str]:
    kernel = KernelSpec(Pattern(1, 3, 2, 2))
    source = render(kernel, family_named("vector").default(kernel, CPU, 8), family="vector", dialect="opencl")
    return source.text, source.entry


def test_which_compiler_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `KSGEN_CXX` names, with its options; else the first on PATH."""
    own, usual = program(tmp_path, "own", "own 1.0"), program(tmp_path, "clang++", "clang version 15")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KSGEN_CXX", f"{own} -m64")
    assert find_host_compiler().command == (str(own), "-m64")
    assert find_host_compiler().version.startswith("own 1.0 -m64, prelude ")
    monkeypatch.delenv("KSGEN_CXX")
    assert find_host_compiler().command == (str(usual),)
    assert "-mprefer-vector-width=512" not in find_host_compiler().options(host_target())
    (first := tmp_path / "first").mkdir()
    usual = program(first, "c++", "c++ 12.2")
    monkeypatch.setenv("PATH", f"{tmp_path}:{first}")
    assert find_host_compiler().command == (str(usual),)


def test_gcc_comes_before_clang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program with two names is tried once."""
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    clang, gcc = (
        program(tmp_path, "clang++", "Apple clang version 16.0.0"),
        program(tmp_path, "g++", "g++ (GCC) 14.1.0"),
    )
    (tmp_path / "c++").symlink_to(clang)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert [each.command for each in host.host_compilers()] == [(str(gcc),), (str(tmp_path / "c++"),)]


@pytest.mark.parametrize(
    ("said", "is_proven"),
    [
        ("g++ (Debian 12.2.0-14+deb12u1) 12.2.0", True),
        ("c++ (GCC) 14.1.1 20240522", True),
        ("g++ (Ubuntu 11.4.0-1ubuntu1~22.04) 11.4.0", False),
        ("Debian clang version 14.0.6", False),
        ("own 13.0", False),
    ],
)
def test_which_compilers_need_no_trial(said: str, is_proven: bool, tmp_path: Path) -> None:
    assert HostCompiler((str(program(tmp_path, "own", said)),)).is_proven is is_proven


def test_the_trial_is_a_kernel(compiler: HostCompiler) -> None:
    assert b"ks_trial__walk" in compiler.compile(host.TRIAL, "ks_trial", host_target()).data


def test_tests_of_what_calls_kernels_have_a_hasty_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives the real one its arguments, with -O1, and has a version of its own: caches tell their binaries apart."""
    text = """#!/bin/sh\ncase "$*" in *--version) echo real 1.0; exit;; esac\nfor each; do echo "$each"; done\n"""
    real = write_program(tmp_path / "real c++", text)
    monkeypatch.setenv("KSGEN_CXX", f"'{real}' -m64")
    made = hasty(tmp_path)
    given = ["-O3", "-fPIC", "a kernel.cpp", "-O2", "-march=native"]
    said = subprocess.run([made, *given], capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == ["-m64", "-O1", "-fPIC", "a kernel.cpp", "-O1", "-march=native"]
    assert HostCompiler((str(made),)).version.startswith("real 1.0 by -O1, prelude ")


def test_ziglang_serves_where_nothing_else_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: name == "ziglang")
    assert find_host_compiler().command == (sys.executable, "-m", "ziglang", "c++")


@pytest.mark.parametrize(
    ("named", "says"),
    [
        ("gone++", r"KSGEN_CXX=gone\+\+ is not an executable; give a C\+\+ compiler's path, or unset it"),
        (" ", r"KSGEN_CXX=  is not an executable"),
        ("g++ '-O2", r"KSGEN_CXX=g\+\+ '-O2 cannot be split into words \(No closing quotation\); quote it"),
        (
            None,
            r"no C\+\+ compiler found \(c\+\+, g\+\+, clang\+\+ on PATH, ziglang\); "
            r"install g\+\+ \(12 and up\) or clang \(14 and up\), or pip install ziglang",
        ),
    ],
)
def test_why_there_is_none(named: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(host.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    if named:
        monkeypatch.setenv("KSGEN_CXX", named)
    with pytest.raises(ToolchainError, match=says):
        find_host_compiler()


def test_a_program_that_is_no_compiler_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failing = write_program(tmp_path / "failing", "#!/bin/sh\nexit 3\n")
    monkeypatch.setenv("KSGEN_CXX", str(failing))
    with pytest.raises(ToolchainError, match=r"failing --version ends with 3 and says nothing"):
        _ = find_host_compiler().version


def test_a_text_becomes_a_library(compiler: HostCompiler) -> None:
    source, entry = text()
    binary = compiler.compile(source, entry, host_target())
    assert binary.data[:4] in (b"\x7fELF", b"\xcf\xfa\xed\xfe")
    assert f"{entry}{host.WALKS}".encode() in binary.data
    assert f"{entry}_pack{host.WALKS}".encode() in binary.data


def test_every_loop_that_a_text_unrolls_is_unrolled_by_gcc_too() -> None:
    source, entry = text()
    assert '_Pragma("unroll")' in source
    assert '_Pragma("unroll")' not in source_of(source, [entry])


@pytest.mark.parametrize(("features", "level"), [("sse2 avx2", "-O2"), ("sse2 avx2 avx512f", "-O3")])
def test_sums_stay_in_sixteen_registers_by_a_lower_level(
    features: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "processor_features", lambda: frozenset(features.split()))
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    assert [each for each in HostCompiler((sys.executable,)).options("any") if each.startswith("-O")] == [level]


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instructions of x86")
def test_inputs_are_repeated_for_all_lanes_from_where_they_lie(compiler: HostCompiler, tmp_path: Path) -> None:
    kernel = KernelSpec(Pattern(1, 512, 512, 4))
    source = render(
        kernel, family_named("vector").default(kernel, replace(CPU, vector_bytes=32)), family="vector", dialect="opencl"
    )
    (tmp_path / "k.cpp").write_text(source_of(source.text, [source.entry]))
    options = [each for each in compiler.options(host_target()) if not each.startswith("-march")]
    subprocess.run(
        [*compiler.command, *options, "-O3", "-march=haswell", "-S", "k.cpp", "-o", "k.s"], cwd=tmp_path, check=True
    )
    made = (tmp_path / "k.s").read_text()
    repeated, kept = made.count("vbroadcastf128"), len(re.findall(r"vmov\w+\s+%xmm\d+,\s*-?\d*\(%r[sb]p", made))
    assert repeated > 20
    assert kept < repeated // 4  # on the stack


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="instructions of x86")
@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize(
    ("pattern", "layout"), [((1, 256, 256, 2), "bsf"), ((1, 48, 48, 3), "bsf"), ((1, 96, 384, 6), "bsl")]
)
def test_sums_and_their_operands_stay_in_registers(
    pattern: tuple[int, int, int, int],
    layout: str,
    precision: str,
    compiler: HostCompiler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if "clang" in compiler.version:
        pytest.skip("what GCC does")
    monkeypatch.setattr(host, "processor_features", lambda: frozenset({"avx2", "fma"}))
    kernel = KernelSpec(Pattern(*pattern), precision, layout)
    source = render(
        kernel, family_named("vector").default(kernel, replace(CPU, vector_bytes=32)), family="vector", dialect="opencl"
    )
    (tmp_path / "k.cpp").write_text(source_of(source.text, [source.entry]))
    options = [each for each in compiler.options(host_target()) if not each.startswith("-march")]
    subprocess.run(
        [*compiler.command, *options, "-march=haswell", "-S", "k.cpp", "-o", "k.s"], cwd=tmp_path, check=True
    )
    loop = innermost_loop((tmp_path / "k.s").read_text())
    products = sum("vfmadd" in line for line in loop)
    loads = sum(bool(re.search(r"\(%r\w+\).*,", line)) for line in loop)
    assert not [line for line in loop if re.search(r"vmov\w+\s+%ymm\d+, .*\(", line)]
    assert loads <= 0.75 * products  # a core has two loads for two products


def innermost_loop(assembly: str) -> list[str]:
    """Return the shortest loop that multiplies and adds."""
    lines, places, loops = assembly.splitlines(), {}, []
    for at, line in enumerate(lines):
        if label := re.match(r"(\.L\w+):", line):
            places[label[1]] = at
        elif (jump := re.match(r"\s+j\w+\s+(\.L\w+)", line)) and jump[1] in places:
            loops.append(lines[places[jump[1]] : at])
    return min((loop for loop in loops if sum("vfmadd" in line for line in loop) >= 12), key=len)


def test_a_text_that_is_refused_is_kept_with_the_command(
    compiler: HostCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    source, entry = text()
    with pytest.raises(ToolchainError) as refused:
        compiler.compile(source.replace("fma(", "fna("), entry, host_target())
    told = str(refused.value)
    assert "fna" in told
    assert "repeat: " in told
    kept = told.split("source: ")[1].splitlines()[0]
    assert "fna(" in Path(kept).read_text()


def test_a_text_without_such_a_kernel_is_refused(compiler: HostCompiler) -> None:
    source, _ = text()
    with pytest.raises(
        ToolchainError,
        match=r"ks_gone: its groups have several work items; only an OpenCL driver runs such kernels",
    ):
        compiler.compile(source, "ks_gone", host_target())
    with pytest.raises(ToolchainError, match=r"cannot build for host Linux m68k"):
        compiler.compile(source, "ks_gone", "host Linux m68k")


def test_it_is_compiled_once_and_then_found(
    compiler: HostCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    source, entry = text()
    made = build(source, entry, host_target(), compiler)
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    assert build(source, entry, host_target(), compiler).data == made.data
    with pytest.raises(ToolchainError, match=r"KSGEN_NO_COMPILE forbids compiling it"):
        build(source + " ", entry, host_target(), compiler)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (
            host_target(),
            rf"ksgen build SPEC --arch host(, or on another machine: ksgen bundle SPEC --arch "
            rf"({'|'.join(INSTRUCTION_SETS)}))?",
        ),
        (INSTRUCTION_SETS["x86-64-v3"].target, "ksgen build SPEC --arch x86-64-v3"),
        ("pocl on a processor", "ksgen build SPEC, on this device"),
    ],
)
def test_a_missing_binary_is_reported_with_the_command_that_builds_it(target: str, says: str) -> None:
    why = "no C++ compiler found; install g++"
    told = rf"ks: no cache holds it for {target}, and {re.escape(why)}; prepare it with: {says}$"
    with pytest.raises(ToolchainError, match=told):
        build("text", "ks", target, AbsentCompiler(why), CacheLayers(()))


def test_other_words_are_another_key(compiler: HostCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(*text(), host_target())
    before = request.key(compiler)
    monkeypatch.setattr(host, "_digest_of_snippets", lambda: "words of tomorrow")
    assert request.key(compiler) != before


@pytest.mark.parametrize("name", ["clang++", "g++"])
def test_both_kinds_of_compilers_take_texts(name: str) -> None:
    if not (found := shutil.which(name)):
        pytest.skip(f"no {name}")
    source, entry = text()
    assert HostCompiler((os.path.abspath(found),)).compile(source, entry, host_target()).data
