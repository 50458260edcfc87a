"""Tests of paths: where ksgen finds what it ships, and where it stores what it makes."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ksgen
from ksgen import paths
from ksgen.build.bundle import write_bundle


def test_a_checkout_ships_what_lies_at_its_top_and_a_wheel_what_lies_inside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert paths.resource("templates") == Path(__file__).parents[1] / "templates"
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "ksgen")
    assert paths.resource("specs") == tmp_path / "specs"
    (tmp_path / "ksgen" / "_resources" / "specs").mkdir(parents=True)
    assert paths.resource("specs") == tmp_path / "ksgen" / "_resources" / "specs"


@pytest.mark.parametrize(
    ("find", "variable"), [(paths.cache_dir, "KSGEN_CACHE_DIR"), (paths.wisdom_dir, "KSGEN_WISDOM_DIR")]
)
def test_a_users_own_folder_comes_first_and_none_is_made(
    find: object, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(find)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, str(tmp_path / "own"))
    assert find() == tmp_path / "own"
    monkeypatch.setenv(variable, "~/own")
    assert find() == tmp_path / "own"
    monkeypatch.setenv(variable, "~no-such-user/own")
    assert find() == Path(ksgen.STARTED_IN, "~no-such-user/own")
    monkeypatch.setenv(variable, "")
    assert find().name == "ksgen"
    assert list(tmp_path.iterdir()) == []


def test_cache_and_wisdom_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KSGEN_CACHE_DIR", "KSGEN_WISDOM_DIR"):
        monkeypatch.delenv(variable)
    assert paths.cache_dir() != paths.wisdom_dir()


ELSEWHERE = """
import json, os
import ksgen
os.chdir("elsewhere")
from ksgen import paths
from ksgen.build.build import default_caches
from ksgen.build.bundle import Bundle
from ksgen.build.host import find_host_compiler
from ksgen.build.toolchain import find_compiler
named = find_host_compiler()
made = named.compile_whole("int ks_one = 1;", "ks_one", "host")
del os.environ["KSGEN_CXX"]
on_path = find_host_compiler()
os.chdir("..")
bundle = Bundle("own.ksb")
os.chdir("elsewhere")
if not (child := os.fork()):
    os._exit(bundle.wisdom() != {"a.json": b"{}"})
print(json.dumps({
    "folders": [str(paths.cache_dir()), str(paths.wisdom_dir())],
    "layers": [str(layer.path) for layer in default_caches().layers],
    "named": named.command, "made": made[:4].decode("latin-1"), "on path": on_path.command,
        "nvcc": str(find_compiler("nvcc")),
    "child": os.waitpid(child, 0)[1],
}))
"""


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_relative_paths_of_the_environment_survive_a_change_of_directory(tmp_path: Path) -> None:
    """They are meant from the folder in which ksgen was imported, also where a compiler runs in a folder of its own."""
    real = shutil.which("g++")
    if real is None:
        pytest.skip("no g++")
    program(tmp_path / "tools" / "own++", f'exec {real} "$@"')
    program(tmp_path / "bin" / "c++", "echo other 1.0")
    program(tmp_path / "tools" / "nvcc", "echo Cuda compilation tools, release 12.4, V12.4.131")
    (tmp_path / "elsewhere").mkdir()
    write_bundle(tmp_path / "own.ksb", [], {"a.json": b"{}"})
    relative = {
        "KSGEN_CXX": "tools/own++ -m64", "PATH": f"bin{os.pathsep}{os.environ['PATH']}", "KSGEN_NVCC": "./tools/nvcc",
        "KSGEN_CACHE_DIR": "cache", "KSGEN_WISDOM_DIR": "wisdom", "KSGEN_CACHE_PATH": "own.ksb",
        "PYTHONPATH": str(Path(__file__).parents[1]),
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], cwd=tmp_path, env={**os.environ, **relative}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    here = str(tmp_path)
    assert json.loads(done.stdout) == {
        "folders": [f"{here}/cache", f"{here}/wisdom"], "layers": [f"{here}/own.ksb", f"{here}/cache"],
        "named": [f"{here}/tools/own++", "-m64"], "made": "\x7fELF", "on path": [f"{here}/bin/c++"],
        "nvcc": f"{here}/tools/nvcc",
        "child": 0,
    }  # fmt: skip


def test_a_program_is_named_or_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (paths.program("g++-13"), paths.program("./own")) == ("g++-13", os.path.join(ksgen.STARTED_IN, "./own"))
    monkeypatch.setenv("CUDA_HOME", "cuda")
    monkeypatch.setenv("NVCC_CCBIN", "g++-13")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    found = paths.variables_for_compilers()
    assert (found["CUDA_HOME"], found["NVCC_CCBIN"]) == (os.path.join(ksgen.STARTED_IN, "cuda"), "g++-13")
    assert "CUDA_PATH" not in found


def test_a_user_without_a_home_has_folders_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("HOME", "KSGEN_CACHE_DIR", "KSGEN_WISDOM_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)

    def unknown(user: int) -> None:
        raise KeyError(user)

    monkeypatch.setattr("pwd.getpwuid", unknown)
    monkeypatch.setattr("os.geteuid", lambda: 54321)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert (paths.cache_dir(), paths.wisdom_dir()) == (tmp_path / "ksgen-cache-54321", tmp_path / "ksgen-data-54321")
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    assert paths.cache_dir() == Path("/tmp/ksgen-cache-54321")
