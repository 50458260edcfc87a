"""The line that installs an extra, by what ksgen's metadata says of how it was installed."""

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen import install
from tests.driver import NotHereError, environment
from tests.support.compilers import write_program

ROOT = Path(__file__).parents[1]
WHEEL = "ksgen-0.1.0-py3-none-any.whl"
CHECKOUT = "pip install -e '.[cpu]' in ksgen's checkout"


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        ({"dir_info": {"editable": True}, "url": "file:///work/ksgen"}, CHECKOUT),
        ({"dir_info": {}, "url": "file:///work/ksgen"}, "pip install '.[cpu]' in ksgen's checkout"),
        ({"archive_info": {}, "url": f"file:///dist/{WHEEL}"}, f"pip install '/dist/{WHEEL}[cpu]'"),
        ({"archive_info": {}, "url": f"file:///a%20b/{WHEEL}"}, f"pip install '/a b/{WHEEL}[cpu]'"),
        ({"archive_info": {}, "url": f"https://host/{WHEEL}"}, f"pip install 'ksgen[cpu] @ https://host/{WHEEL}'"),
        (
            {"vcs_info": {"vcs": "git", "commit_id": "5a11c0ff"}, "url": "https://host/ksgen.git"},
            "pip install 'ksgen[cpu] @ git+https://host/ksgen.git@5a11c0ff'",
        ),
        (None, "pip install 'ksgen[cpu]'"),  # from an index: no such file
    ],
)
def test_the_line_is_that_of_the_installation(origin: Any, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(read_text=lambda name: origin and json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: told)
    assert install.install_line("cpu") == line


def test_without_an_installation_it_is_the_checkouts_or_an_indexs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install.install_line("cpu") == CHECKOUT
    monkeypatch.setattr(install, "__file__", str(tmp_path / "ksgen" / "install.py"))
    assert install.install_line("cpu") == "pip install 'ksgen[cpu]'"


def test_every_hint_goes_through_it() -> None:
    with_names = [
        path for path in (ROOT / "ksgen").rglob("*.py") if "pip install 'ksgen[" in path.read_text(encoding="utf-8")
    ]
    assert with_names == [ROOT / "ksgen" / "install.py"]


def test_metadata_is_read_for_a_hint_alone() -> None:
    program = "import sys, ksgen, ksgen.build.toolchain; print('ksgen.install' in sys.modules)\n"
    program += "import ksgen.devices, ksgen.commands.run; print('importlib.metadata' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        == "False\nFalse\n"
    )


# The extras for this machine


@pytest.mark.parametrize(
    ("served", "extra"), [(0, "cuda"), (12020, "cuda12"), (12080, "cuda12"), (13000, "cuda"), (14010, "cuda")]
)
def test_the_extra_is_of_the_drivers_cuda(served: int, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "supported_cuda", lambda: served)
    assert install.cuda_extra() == extra
    for nvcc, wanted in ((None, extra), ("/usr/bin/nvcc", f"pycuda,{extra}")):
        monkeypatch.setattr(install, "capabilities", lambda: [90, 75])
        monkeypatch.setattr(install.shutil, "which", lambda name, nvcc=nvcc: nvcc)
        assert install.extras() == wanted
    monkeypatch.setattr(install, "capabilities", list)
    for is_there, wanted in ((True, ""), (False, "cpu")):
        monkeypatch.setattr(install, "has_compiler", lambda is_there=is_there: is_there)
        assert install.extras() == wanted
    monkeypatch.setattr(install, "capabilities", lambda: [90, 70])  # CUDA 13 knows no GPU before 7.5
    assert install.cuda_extra() == "cuda12"


@pytest.mark.parametrize(("script", "works"), [("exit 0", True), ("exit 1", False), (None, False)])
def test_a_compiler_counts_that_takes_what_kernels_need(
    script: str | None, works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}")
    monkeypatch.delenv("KSGEN_CXX", raising=False)
    if script:
        write_program(tmp_path / "clang++", f"#!/bin/sh\n{script}\n")
    assert install.has_compiler() == works
    monkeypatch.setenv("KSGEN_CXX", f"{write_program(tmp_path / 'own', '#!/bin/sh')} --quick")
    assert install.has_compiler()
    for unusable in ("nothing-of-that-name", '"'):
        monkeypatch.setenv("KSGEN_CXX", unusable)
        assert not install.has_compiler()


@pytest.mark.skipif(not install.has_compiler(), reason="no C++ compiler for kernels on the processor")
def test_the_compiler_of_this_machine_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "_TRIAL", b"std::unheard_of x;")
    assert not install.has_compiler()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("gpus", "served", "compiler", "extras"),
    [
        ("H200,A100", "12040", "true", "[cuda12]"),
        ("A100", "13000", "true", "[cuda]"),
        ("", "13000", "true", ""),
        ("", "13000", "false", "[cpu]"),
    ],
)
def test_make_asks_the_driver(gpus: str, served: str, compiler: str, extras: str, tmp_path: Path) -> None:
    try:
        machine = environment() | {
            "KSGEN_DRIVER_GPUS": gpus,
            "KSGEN_DRIVER_CUDA": served,
            "PATH": "/usr/bin:/bin",
            "KSGEN_CXX": compiler,
        }
    except NotHereError as error:
        pytest.skip(str(error))
    python = tmp_path / "a folder" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    told = subprocess.run(
        ["make", "-n", "-B", "-C", str(ROOT), f"PYTHON={python}", ".venv/.ready"],
        env=machine,
        capture_output=True,
        text=True,
    )
    assert f"installing ksgen{extras} into" in told.stdout, told.stdout + told.stderr


FAKE_PYTHON = """#!/bin/sh
echo "$*" >> journal
case "$*" in *{refused}*) echo "error: no"; exit 1 ;; esac
"""


def made(folder: Path, target: str, device: str, refused: str) -> tuple[int, str, list[str]]:
    """The exit status of make, what it printed, and the extras that pip was asked for, where pip refuses some."""
    for name in ("Makefile", "pyproject.toml"):
        (folder / name).write_text((ROOT / name).read_text())
    (folder / ".venv").mkdir(exist_ok=True)
    (folder / ".venv" / ".python").touch()
    write_program(folder / "python", FAKE_PYTHON.format(refused=refused))
    os.utime(folder / "pyproject.toml", (0, 0))
    command = ["make", "--no-print-directory", "BIN=./python", f"DEVICE={device}", target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    journal = (folder / "journal").read_text().splitlines()
    return (
        done.returncode,
        done.stdout + done.stderr,
        [line.rpartition(" ")[2] for line in journal if "install" in line],
    )


def test_make_goes_on_without_pycuda_and_reports_it(tmp_path: Path) -> None:
    code, told, asked = made(tmp_path, ".venv/.ready-dev", "pycuda,cuda12", refused="pycuda")
    assert code == 0
    words = "ksgen: PyCUDA cannot be installed here, as pip says above; installing ksgen[cuda12,tune,dev] without it"
    assert words in told
    assert asked == [".[pycuda,cuda12,tune,dev]", ".[cuda12,tune,dev]"]
    assert (tmp_path / ".venv" / ".ready").read_text() == "cuda12\n"


def test_tests_keep_the_extras_that_the_demo_installed(tmp_path: Path) -> None:
    code, _, asked = made(tmp_path, ".venv/.ready", "pycuda,cuda12", refused="pycuda")
    assert (code, asked) == (0, [".[pycuda,cuda12]", ".[cuda12]"])
    code, _, asked = made(tmp_path, ".venv/.ready-dev", "pycuda,cuda12", refused="nothing")
    assert (code, asked[2:]) == (0, [".[cuda12,tune,dev]"])


@pytest.mark.parametrize(
    ("device", "refused", "asked"), [("pycuda", "pycuda", 1), ("cuda", "cuda", 1), ("pycuda,cuda", "install", 2)]
)
def test_what_cannot_be_installed_at_all_ends_make(device: str, refused: str, asked: int, tmp_path: Path) -> None:
    code, _, extras = made(tmp_path, ".venv/.ready", device, refused)
    assert code
    assert len(extras) == asked
    assert not (tmp_path / ".venv" / ".ready").exists()


@pytest.mark.parametrize(
    ("device", "wanted"),
    [
        ("", ".[cpu,cuda,tune,dev]"),
        ("cpu", ".[cpu,cuda,tune,dev]"),
        ("pycuda,cuda", ".[pycuda,cuda,tune,dev]"),
        ("cuda12", ".[cuda12,tune,dev]"),
    ],
)
def test_tests_get_the_bindings_that_are_there_already(device: str, wanted: str, tmp_path: Path) -> None:
    code, _, asked = made(tmp_path, ".venv/.ready-dev", device, refused="nothing")
    assert (code, asked) == (0, [wanted])
