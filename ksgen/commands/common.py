"""What several subcommands share: parameter types, JSON, the console and its progress bar."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Pattern
from ksgen.spec import JOBS, LAYOUTS, PRECISIONS, KernelSpec, Spec

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from ksgen.families import Limits

PATTERN = Pattern.parse  # a type for click: its errors say more than click's
PRECISION = click.Choice(list(PRECISIONS))
LAYOUT = click.Choice(list(LAYOUTS))
JOB = click.Choice(list(JOBS))
SPEC = click.Path(path_type=Path)
REPLACED = "an older one is replaced"  # by whatever writes a file: ksgen.files
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
arch_option = click.option("--arch", default="sm_80,sm_90a", show_default=True, help="Targets, separated by commas.")


def find_spec(path: Path) -> Path:
    """The spec at a path; `specs/vit.yaml` also names the one that ksgen ships."""
    from ksgen.paths import resource

    shipped = resource("specs") / path.name
    # os.path, which takes a name that is too long for one that is not there.
    is_meant = not os.path.exists(path) and path.parent in (Path("specs"), Path()) and os.path.isfile(shipped)
    return shipped if is_meant else path


def output_folder(named: Path | None, spec: Spec) -> Path:
    """The folder that `emit` writes its files to: `-o`, or `generated/<spec name>`."""
    return named or Path("generated") / spec.name


def check_memory(kernel: KernelSpec, batch: int, limits: "Limits") -> None:
    """Raise `SpecError` where checking a kernel takes more than this machine's memory, before any of it is taken."""
    from ksgen.footprint import footprint

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    need = footprint(kernel, batch, limits)
    if need.total > memory:
        parts = (
            f"arrays {need.arrays / 1e9:.1f}, the float64 reference {need.reference / 1e9:.1f}, the device's own {need.device / 1e9:.1f}"
        )
        has = f"this machine has {memory / 1e9:.1f} GB"
        advice = "take a smaller batch" if batch > 1 else "take a smaller pattern"
        raise SpecError(f"--batch {batch}: checking {kernel.name} takes {need.total / 1e9:.1f} GB ({parts}), and {has}; {advice}")


def print_json(content: Any) -> None:
    click.echo(json.dumps(content, indent=1))


def console(stderr: bool = False) -> "Console":
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def progress() -> "Progress":
    """A bar on the error stream, so that what is printed can be piped; none where nobody watches."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    screen = console(stderr=True)
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.fields[now]}"),
        console=screen, transient=True,
        disable=not screen.is_terminal,
    )  # fmt: skip


def first_failure(results: Sequence[Any]) -> None:
    """Raise the first error among the results of `build_many`, with how many others there are."""
    failures = [result for result in results if isinstance(result, KsgenError)]
    if failures:
        more = f" (and {len(failures) - 1} other kernels failed)" if len(failures) > 1 else ""
        raise type(failures[0])(f"{failures[0]}{more}")
