"""README: it is short, and each of its code blocks runs as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ksgen.spec import load
from tests.support.libraries import library
from tests.support.program import ksgen_program, needs_device

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
MOST_WORDS, MOST_KERNELS = 1300, 20


def block(language: str, holds: str = "") -> str:
    (found,) = [text for name, text in BLOCKS if name == language and holds in text]
    return str(found)


def run(program: str, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_it_is_short_and_has_no_block_that_no_test_runs() -> None:
    assert len(README.split()) <= MOST_WORDS
    assert [name for name, _ in BLOCKS] == ["python", "yaml", "sh", "python"]
    assert README.count("```") == 2 * len(BLOCKS)
    assert not re.findall(r"\n\n {4}", README)  # an indented block


@needs_device
def test_the_spec_is_emitted_and_its_launchers_run(tmp_path: Path) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text(block("yaml"))
    assert f"`{spec.name}`" in README
    assert len(load(spec).kernels) <= MOST_KERNELS
    for line in block("sh").splitlines():
        program, *arguments = line.split()
        done = ksgen_program(*arguments, cwd=tmp_path)
        assert (program, done.returncode) == ("ksgen", 0), done.stderr
    assert len(list((tmp_path / "generated" / "mine").glob("*.cu"))) <= MOST_KERNELS
    run(block("python", "layer_up"), tmp_path)


@pytest.mark.libraries
def test_the_lines_of_pytorch_run(tmp_path: Path) -> None:
    library("torch")
    run(block("python", "import torch"), tmp_path)
