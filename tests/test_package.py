"""The package as a whole: what importing it costs and offers, and which packages may import which."""

import ast
import os
import rlcompleter
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import ksgen

ROOT = Path(__file__).parents[1]
HEAVY = ("numpy", "jinja2", "rich", "yaml", "pyopencl", "pycuda", "cuda", "torch", "click")
TORCH_PACKAGES = {
    path.relative_to(ROOT).as_posix()
    # a model is calibrated, and a GPU's demo compares with cuBLAS, where PyTorch is installed
    for pattern in ("torch/**/*.py", "bench/*.py", "commands/bench*.py", "commands/calibrate.py", "commands/demo.py")
    for path in (ROOT / "ksgen").glob(pattern)
}
ALONE = {  # what only one module, or one folder, may import
    "pycuda": {"ksgen/devices/cuda_pycuda.py", "ksgen/devices/pycuda_source.py"},
    "cuda": {"ksgen/devices/cuda_driver.py", "ksgen/build/toolchain.py"},
    "pyopencl": {"ksgen/devices/opencl.py"},
    "torch": TORCH_PACKAGES,
}


def imported_by(path: Path) -> set[str]:
    """The modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_no_two_public_classes_share_a_name() -> None:
    places: dict[str, set[str]] = {}
    for path in sorted((ROOT / "ksgen").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(path.relative_to(ROOT).as_posix())
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_importing_ksgen_imports_nothing_heavy() -> None:
    program = f"import sys, ksgen; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_there() -> None:
    for name in ksgen.__all__:
        assert getattr(ksgen, name)
    with pytest.raises(AttributeError, match="module 'ksgen' has no attribute 'nothing'"):
        ksgen.nothing  # noqa: B018  (the access is the test)


def test_dir_lists_what_users_are_offered_and_imports_none_of_it() -> None:
    program = f"import sys, ksgen; print(*dir(ksgen)); print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names, heavy = done.stdout.splitlines()
    # packages for PyTorch and JAX are there if these are
    assert {*names.split()} - {"torch", "jax"} == {*ksgen.__all__, "structures", "transforms"}
    assert heavy == "[]"
    assert ksgen.transforms.dft(8).chain


def test_completion_offers_the_public_names() -> None:
    completer = rlcompleter.Completer({"ksgen": ksgen})
    offered = [completer.complete("ksgen.mon", state) for state in range(2)]
    assert offered == ["ksgen.monarch(", None]


def test_help_shows_every_public_name_without_pytorch() -> None:
    """`pydoc` reads `dir`, and the value of each name in it."""
    blocked = (
        "import sys; sys.modules['torch'] = None; import pydoc, ksgen; print(pydoc.plain(pydoc.render_doc(ksgen)))"
    )
    shown = subprocess.run([sys.executable, "-c", blocked], capture_output=True, text=True, check=True).stdout
    assert [name for name in {*ksgen.__all__} - {"__version__"} if name not in shown] == []
    assert f"VERSION\n    {ksgen.__version__}" in shown
    assert "Create a chain of two dense factors" in shown


def test_without_pytorch_its_package_is_an_attribute_that_is_missing() -> None:
    program = "import sys; sys.modules['torch'] = None; import ksgen; print(hasattr(ksgen, 'torch')); ksgen.torch"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"
    assert (
        "AttributeError: module 'ksgen' has no attribute 'torch': ksgen.torch needs PyTorch 2.4 or later: "
        in done.stderr
    )


@pytest.mark.libraries
def test_the_package_for_pytorch_comes_when_it_is_first_used() -> None:
    pytest.importorskip("torch")
    program = "import sys, ksgen; assert 'torch' in dir(ksgen) and 'torch' not in sys.modules; print(*dir(ksgen.torch))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == sorted(ksgen.torch.__all__)


@pytest.mark.exhaustive
@pytest.mark.parametrize("library", ALONE)
def test_a_runtime_is_imported_in_its_own_module_alone(library: str) -> None:
    importers = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ksgen").rglob("*.py")
        if any(name.split(".")[0] == library for name in imported_by(path))
    }
    assert importers <= ALONE[library]


def test_packages_on_pytorch_are_imported_by_none_above() -> None:
    for path in (ROOT / "ksgen").rglob("*.py"):
        if path.relative_to(ROOT).as_posix() not in TORCH_PACKAGES:
            assert not any(name.startswith(("ksgen.torch", "ksgen.bench")) for name in imported_by(path)), path
    for path in (ROOT / "ksgen" / "torch").rglob("*.py"):
        assert not any(name.startswith("ksgen.bench") for name in imported_by(path)), path


def test_families_emit_and_build_know_no_device() -> None:
    patterns = ("pattern.py", "reference.py", "families/**/*.py", "emit/*.py", "build/*.py")
    paths = [path for pattern in patterns for path in (ROOT / "ksgen").glob(pattern)]
    assert len(paths) > 30
    for path in paths:
        names = imported_by(path)
        assert not any(module.startswith(("ksgen.devices", "ksgen.launch")) for module in names), path


def test_extras_are_those_that_are_documented() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]) == {
        "pycuda",
        "cuda",
        "cuda12",
        "nvcc",
        "zig",
        "cpu",
        "torch",
        "jax",
        "peft",
        "interop",
        "tune",
        "bench",
        "docs",
        "dev",
        "all",
    }
    assert project["requires-python"] == ">=3.11"


def test_no_machine_is_named() -> None:
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if files.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, files.stdout.split("\0")):
        path = ROOT / name
        if (
            path.is_file()
            and path.suffix in (".py", ".md", ".toml", ".yaml", ".j2", ".cu", ".json")
            and path != Path(__file__)
        ):
            assert os.fspath(ROOT) + "/" not in path.read_text(encoding="utf-8"), name


def test_a_wheel_holds_ksgen_alone() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["ksgen"]
