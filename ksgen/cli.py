"""The command `ksgen`. Exit code 0: success; 1: a check failed; 2: a user's mistake, reported in one line.

The subcommands are in modules of `ksgen/commands/`, imported when one is called.
"""

import io
import os
import sys
import warnings
from importlib import import_module
from typing import Any

import click

from ksgen import __version__
from ksgen.errors import KsgenDeprecationWarning, KsgenError, KsgenWarning
from ksgen.values import excerpt

COMMANDS = {
    "emit": "Write the kernels and launchers of a spec.",
    "build": "Compile the kernels of a spec into the cache. Needs no GPU.",
    "bundle": "Pack sources, binaries and wisdom into one file.",
    "run": "Check and time one kernel.",
    "calibrate": "Determine which kernels are correct and fastest on this device.",
    "tune": "Find the fastest constants for a device.",
    "demo": "Emit, build, check and time a whole spec.",
    "bench": "Compare with other libraries, and report the results.",
    "show": "Describe a pattern, with a picture.",
    "spec": "Print the JSON schema of specs, for editors.",
    "doctor": "List what is installed and what is missing, with the command that installs it.",
    "wisdom": "Show, merge and exchange the results of searches.",
    "cache": "Manage the cache of compiled kernels.",
}
_PLACES = {"bundle": "build.bundle", "spec": "emit.spec_command"}  # others: `command` in the module of that name


class _Lazy(click.Group):
    """Lists the commands without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, name = _PLACES.get(cmd_name, f"{cmd_name}.command").split(".")
        command: click.Command = getattr(import_module(f"ksgen.commands.{module}"), name)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        import difflib

        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"commands: {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {excerpt(args[0])}; {hint}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:  # `ksgen ... | head`; click would exit with 1, as after a failed check
            # what is still buffered goes nowhere, or Python's last flush would fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(141)


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="ksgen")
def cli() -> None:
    """Generate, build, check and time kernels for Kronecker-sparse matrices: Y = X K^T, support I_a ⊗ 1_{b x c} ⊗ I_d.

    \b
    Examples:
      ksgen emit specs/vit.yaml
      ksgen run 1,192,48,2 --batch 25088 --precision float32 --layout bsl
      ksgen doctor

    \b
    Shell completion:
      eval "$(_KSGEN_COMPLETE=bash_source ksgen)"      (or zsh_source, fish_source)
    """


def main() -> None:
    """Run the command, and exit with its code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # for terminals without ⊗, and file names that are not text
    _print_own_warnings()
    os.environ["KSGEN_COMPILE"] = "wait"  # otherwise PyTorch's products run, and are timed, until kernels are compiled
    try:
        cli.main(prog_name="ksgen", standalone_mode=False)
    except click.exceptions.Abort:
        _complain("ksgen: interrupted")
        sys.exit(130)
    except click.exceptions.Exit as finished:
        sys.exit(finished.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.ClickException as error:
        where = ""
        if isinstance(error, click.UsageError) and error.ctx and error.ctx.parent:
            where = f" ({error.ctx.command_path} --help)"
        _complain(f"ksgen: {' '.join(error.format_message().split())}{where}")
        sys.exit(2)
    # an OSError: a full disk, a folder that may not be entered, a name that is too long
    except (KsgenError, OSError) as error:
        _complain(f"ksgen: {error}")
        sys.exit(2)
    except MemoryError as error:
        _complain(f"ksgen: this machine has not enough memory for this command ({error})")
        sys.exit(2)


def _print_own_warnings() -> None:
    """Print ksgen's own warnings in one line each, without their place in the code. Other libraries' warnings are
    unchanged."""
    others = warnings.showwarning
    if not sys.warnoptions:  # else Python ignores a DeprecationWarning outside of scripts
        warnings.simplefilter("default", KsgenDeprecationWarning)

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if issubclass(category, KsgenWarning):
            _complain(f"ksgen: {' '.join(str(message).split())}")
        else:
            others(message, category, filename, lineno, file, line)

    warnings.showwarning = show


def _complain(message: str) -> None:
    """Print to stderr. Characters that a terminal cannot show are escaped; line breaks stay."""
    shown = "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in message)
    print(shown, file=sys.stderr)
