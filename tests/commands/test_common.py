"""What commands share: specs by name, from any folder."""

from pathlib import Path

import pytest

from tests.support.program import ksgen


def test_shipped_specs_are_found_from_any_folder(tmp_path: Path) -> None:
    done = ksgen("emit", "specs/gpt2.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("bundle", "specs/gpt2.yaml", "-o"),
        ("wisdom", "export", "-o"),
        ("bench", "share", "-o"),
        ("bench", "model", "-o"),
        ("show", "1,4,6,4", "--png"),
    ],
)
def test_no_file_is_called_minus(command: tuple[str, ...], tmp_path: Path) -> None:
    done = ksgen(*command, "-", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.splitlines()[-1] == "ksgen: file -: accepted: the name of a file, such as ./- for one that is called so"
