"""Models that are small."""

from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.cli import cli

torch = pytest.importorskip("torch", reason="the models are PyTorch's")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "share", *arguments])
