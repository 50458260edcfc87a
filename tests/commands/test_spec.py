"""`ksgen spec`: it prints the schema that the reader's forms give."""

import json

from click.testing import CliRunner

from ksgen.cli import cli
from ksgen.spec import schema


def test_the_schema_is_printed_as_json() -> None:
    done = CliRunner().invoke(cli, ["spec", "schema"])
    assert done.exit_code == 0
    assert json.loads(done.stdout) == schema()
