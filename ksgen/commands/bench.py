"""`ksgen bench`. Its subcommands are in other modules of this package."""

from pathlib import Path

import click

from ksgen.commands import bench_layers, bench_models, bench_products, bench_report
from ksgen.spec.kernel import hint
from ksgen.values import excerpt


class _OrSpec(click.Group):
    """A spec in the place of a subcommand: its layers are measured, and shown on a page."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0].endswith((".yaml", ".yml")):
            return "layers", bench_layers.command, ["-o", f"{Path(args[0]).stem}.jsonl", "--page", *args]
        if args[0] not in self.commands and not args[0].startswith("-"):
            raise click.UsageError(
                f"no command {excerpt(args[0])}; {hint(args[0], self.commands)}, or a spec such as specs/vit.yaml", ctx
            )
        return super().resolve_command(ctx, args)


@click.group(
    "bench",
    cls=_OrSpec,
    subcommand_metavar="SPEC|COMMAND [ARGS]...",
    short_help="Compare with other libraries, and report the results.",
)
def command() -> None:
    """Measure the layers of a spec on this machine, repeat the paper's experiments (products, energy, whole models),
    and report the results.

    \b
    Examples:
      ksgen bench specs/vit.yaml
      ksgen bench paper --subset 60 --time-limit 8m
      ksgen bench report paper.jsonl
      ksgen bench layers
      ksgen bench model vit-s16
    """


for subcommand in (
    bench_products.paper,
    bench_layers.command,
    bench_products.energy,
    bench_report.command,
    bench_models.share_command,
    bench_models.model_command,
):
    command.add_command(subcommand)
