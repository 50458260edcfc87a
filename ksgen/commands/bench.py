"""`ksgen bench`: each of its subcommands is one module beside this one."""

import click

from ksgen.commands import bench_energy, bench_paper, bench_report


@click.group("bench", short_help="Measure beside other libraries, and report what was found.")
def command() -> None:
    """Measure our kernels beside other libraries, their energy, and whole models; report what was found."""


for subcommand in (bench_paper.command, bench_energy.command, bench_report.command):
    command.add_command(subcommand)
