"""What the commands that compile share."""

from pathlib import Path

import pytest

from tests.support.program import ksgen, needs_compiler


@needs_compiler
@pytest.mark.parametrize("command", ["build", "bundle"])
def test_a_device_that_nobody_knows_is_named(command: str, spec: Path, tmp_path: Path) -> None:
    wisdom = tmp_path / "wisdom"
    wisdom.mkdir()
    (wisdom / "abacus.json").write_text('{"device": "Abacus", "entries": []}')
    arguments = (command, spec.name, "--arch", "sm_80", "--device-name")
    done = ksgen(*arguments, "Abakus", cwd=spec.parent, KSGEN_WISDOM_DIR=str(wisdom))
    assert done.returncode == 0
    assert done.stderr == "--device-name 'Abakus': no wisdom of that name, so constants are the defaults; known: Abacus\n"


@needs_compiler
def test_a_target_that_no_launcher_asks_for_is_told(spec: Path) -> None:
    done = ksgen("build", spec.name, "--arch", "sm_90", cwd=spec.parent)
    assert done.stderr == "--arch sm_90: launchers on such a GPU ask for sm_90a, and take no other binary\n"
