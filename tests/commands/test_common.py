"""What commands share: specs by name, from any folder."""

from pathlib import Path

from tests.support.program import ksgen


def test_shipped_specs_are_found_from_any_folder(tmp_path: Path) -> None:
    done = ksgen("emit", "specs/gpt2.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
