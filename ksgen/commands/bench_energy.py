"""`ksgen bench energy`."""

import click


@click.command("energy")
def command() -> None:
    """To come."""
