"""How tests run `ksgen` as a command."""

from click.testing import CliRunner, Result

from ksgen.cli import cli


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), env=environment)
