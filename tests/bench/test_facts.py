"""The facts that every row carries: the device, the compiler, and the commit with a + if files differ from it."""

import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

import ksgen  # noqa: E402  (after the skip)
from ksgen.bench import runner as facts  # noqa: E402
from ksgen.build.processors import processor_name  # noqa: E402
from ksgen.errors import ToolchainError  # noqa: E402


def git(folder: Path, *words: str) -> None:
    own = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


def test_a_commit_is_the_checkouts_own_and_says_if_files_differ(tmp_path: Path) -> None:
    assert facts.commit(tmp_path) == ""
    git(tmp_path, "init")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert facts.commit(package) == ""  # lies in a checkout, and is none of its files
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = facts.commit(package)
    assert len(clean) == 40
    (package / "__init__.py").write_text("more = 1\n")
    assert facts.commit(package) == f"{clean}+"


def test_a_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert facts.commit(Path(ksgen.__file__).parent) == ""


def refuse() -> Any:
    raise ToolchainError("no compiler")


@pytest.mark.parametrize(
    ("compiler", "told"),
    [(lambda: SimpleNamespace(name="nvcc", version="13.0"), "nvcc 13.0"), (refuse, "")],
    ids=["nvcc", "none"],
)
def test_every_row_says_what_measured_it(compiler: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "torch_device", lambda device: torch.device("cpu"))
    device = SimpleNamespace(name="Here", target="cpu", runtime="opencl", driver_version="1.2", compiler=compiler)
    found = facts.run_facts(device)
    assert (found["device"], found["driver"], found["compiler"]) == ("Here", "1.2", told)
    assert (found["torch"], found["ksgen"]) == (torch.__version__, ksgen.__version__)
    assert found["baselines_on"] == f"{processor_name()}, {torch.get_num_threads()} threads"
    assert all(isinstance(each, str) for each in found.values())
