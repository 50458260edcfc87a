"""`ksgen spec`."""

import json

import click


@click.group("spec")
def command() -> None:
    """Describe the format of specs, the YAML files that list kernels and layers.

    \b
    Examples:
      ksgen spec schema > spec.schema.json
    """


@command.command("schema", short_help="Print the JSON schema of specs.")
def schema_command() -> None:
    """Print the JSON schema of specs. Editors that know it complete keys and values, and mark mistakes.

    \b
    Examples:
      ksgen spec schema > spec.schema.json

    With VS Code's YAML extension, a spec then starts with:

    \b
      # yaml-language-server: $schema=spec.schema.json
    """
    from ksgen.spec import schema

    click.echo(json.dumps(schema(), indent=2, ensure_ascii=False))
