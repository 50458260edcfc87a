"""Models that are small."""

from typing import Any

from click.testing import CliRunner

from ksgen.cli import cli
from tests.support.libraries import library

torch = library("torch")


def run(*arguments: str) -> Any:
    return CliRunner().invoke(cli, ["bench", "share", *arguments])
