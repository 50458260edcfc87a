"""`ksgen bench report`."""
import click


@click.command("report")
def command() -> None:
    """To come."""
