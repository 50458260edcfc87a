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
