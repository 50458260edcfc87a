"""`ksgen emit` and `ksgen spec`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ksgen.commands.common import PATH, WORD, OneOf, find_spec, folder_option, json_option, output_folder, print_json
from ksgen.spec import load, schema
from ksgen.values import counted

if TYPE_CHECKING:
    from ksgen.emit.templates import Dialect


@click.command("emit")
@click.argument("spec", type=PATH)
@folder_option
@click.option(
    "--dialect", type=OneOf(("cuda", "opencl")), default="cuda", show_default=True, help="Language of the kernels."
)
@click.option(
    "--family",
    type=WORD,
    help="Emit this family's sources for inspection. Launchers still choose a family themselves.",
)
@json_option
def command(spec: Path, output: Path | None, dialect: "Dialect", family: str | None, as_json: bool) -> None:
    """Write the kernels and launchers of a spec into a folder: one commented source per kernel, a manifest, and a
    Python module to import.

    Files of an earlier emit are replaced, and all others stay. If an emitted file was edited since, nothing is written.

    \b
    Examples:
      ksgen emit specs/vit.yaml
      ksgen emit specs/vit.yaml --dialect opencl -o /tmp/vit-opencl
      ksgen emit specs/vit.yaml --family wgmma -o /tmp/vit-hopper
    """
    from ksgen.emit.render import emit

    loaded = load(find_spec(spec))
    folder = output_folder(output, loaded)
    sources = emit(loaded, folder, dialect, family)
    emitted = {source.kernel.untied for source in sources}
    left_out = [kernel.name for kernel in loaded.kernels if kernel.untied not in emitted]
    if left_out:
        kernels = counted(len(loaded.kernels), "kernel")
        click.echo(
            f"left out, as {family} does not support them: {len(left_out)} of {kernels} ({', '.join(left_out)})",
            err=True,
        )
    if as_json:
        entries = [source.entry for source in sources]
        print_json({"spec": loaded.name, "folder": str(folder), "kernels": entries, "left_out": left_out})
    else:
        click.echo(f"{counted(len(sources), 'kernel')} of {loaded.name} in {folder}")


@click.group("spec")
def spec_command() -> None:
    """Describe the format of specs, the YAML files that list kernels and layers.

    \b
    Examples:
      ksgen spec schema > spec.schema.json
    """


@spec_command.command("schema", short_help="Print the JSON schema of specs.")
def schema_command() -> None:
    """Print the JSON schema of specs. Editors that know it complete keys and values, and mark mistakes.

    \b
    Examples:
      ksgen spec schema > spec.schema.json

    With VS Code's YAML extension, a spec then starts with:

    \b
      # yaml-language-server: $schema=spec.schema.json
    """
    click.echo(json.dumps(schema(), indent=2, ensure_ascii=False))
