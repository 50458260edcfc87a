"""The line that installs an extra, by what ksgen's metadata says of how it was installed."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen import install

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


def test_without_an_installation_it_is_the_checkouts_or_an_indexs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    assert install.install_line("cpu") == CHECKOUT
    monkeypatch.setattr(install, "__file__", str(tmp_path / "ksgen" / "install.py"))
    assert install.install_line("cpu") == "pip install 'ksgen[cpu]'"


def test_every_hint_goes_through_it() -> None:
    with_names = [path for path in (ROOT / "ksgen").rglob("*.py") if "pip install 'ksgen[" in path.read_text(encoding="utf-8")]
    assert with_names == [ROOT / "ksgen" / "install.py"]


def test_metadata_is_read_for_a_hint_alone() -> None:
    program = "import sys, ksgen, ksgen.build.toolchain; print('ksgen.install' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout == "False\n"
