"""Shared by the subcommands: parameter types, options, JSON, the console and its progress bar.

The JSON fields of kernels and their times follow the schema of docs/json.md.
"""

import json
import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from math import isfinite, isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ksgen.devices.base import CPU_BATCH, GPU_BATCH
from ksgen.errors import KsgenError, SpecError
from ksgen.pattern import Pattern
from ksgen.spec import ACTIVATIONS, JOBS, LAYOUTS, STRIDES, KernelSpec, Spec
from ksgen.spec.kernel import MOST_BYTES, hint, pattern_as_list
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from ksgen.families import Limits
    from ksgen.spec.nodes import SourcePlace
    from ksgen.wisdom import Entry

TIME_DIGITS = 3  # decimals of times, which are in microseconds: a nanosecond
DIGITS = 6  # significant digits of every other number


def kernel_figures(kernel: KernelSpec, batch: int | None) -> dict[str, Any]:
    """Facts that identify a kernel, and its batch. A batch of None means any batch."""
    chains = [list(map(pattern_as_list, chain)) for chain in kernel.chains]
    return {
        "kernel": kernel.name,
        "job": kernel.job,
        "pattern": chains[0] if kernel.is_chain else chains[0][0],
        # a deprecated field has all chains but the first
        **({"chains": chains, "beside": chains[1:]} if kernel.is_group else {}),
        "precision": kernel.precision,
        **({"stored_weights": kernel.weights} if kernel.is_quantized else {}),
        **({"stored_inputs": kernel.inputs} if kernel.has_bytes_in else {}),
        "layout": kernel.layout,
        "epilogue": kernel.epilogue.as_json,
        "batch": batch,
    } | {
        name: value
        for name, value in (("between", kernel.between), ("out_layout", kernel.out_layout))
        if value not in (None, "none")
    }


def choice_figures(family: str, constants: Any) -> dict[str, Any]:
    """Facts about the family and constants of the kernel."""
    return {"family": family, "constants": asdict(constants)}


def entry_figures(entry: "Entry") -> dict[str, Any]:
    """Facts of the kernel's wisdom entry."""
    measured = dict(entry.measured)
    times = {name: measured.pop(name, None) for name in ("median_us", "floor_us")}
    which = kernel_figures(entry.kernel, entry.batch) | {"specialised": entry.kernel.batch is not None}
    which |= choice_figures(entry.family, entry.constants)
    return {**which, **times, "doubt": entry.why_unreliable, "measured": measured}


def tidy(content: Any, name: str = "") -> Any:
    """Return a copy of the data with rounded numbers.

    Times, whose names or parents' names end in `_us`, are rounded to a nanosecond, others to six significant digits.
    NaN and infinite numbers become None.
    """
    if isinstance(content, dict):
        return {each: tidy(value, name if name.endswith("_us") else each) for each, value in content.items()}
    if isinstance(content, list | tuple):
        return [tidy(value, name) for value in content]
    if isinstance(content, float):
        if not isfinite(content):
            return None
        return round(content, TIME_DIGITS) if name.endswith("_us") else float(f"{content:.{DIGITS}g}")
    return content


OptionT = TypeVar("OptionT")


class ReadBy(click.types.FuncParamType):  # type: ignore[type-arg]  # older versions of click take none
    """Click type that parses with a function and shows its error messages; click's own type replaces them."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self.func(value)


class OneOf(click.Choice[str]):
    """Click type that accepts one of several words. Its message suggests a similar word, such as float16 for fp16."""

    def __init__(self, accepted: Collection[str]) -> None:
        super().__init__(list(accepted))

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        return f"{excerpt(value)}; {hint(value, self.choices)}"


class NamedPath(click.Path):
    """Click type of a file or folder. It refuses an empty name, which Python takes for the current folder, and `-`,
    which users may expect to mean standard output or input.
    """

    def __init__(self, allow_dash: bool = False) -> None:
        super().__init__(path_type=Path, allow_dash=allow_dash)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value == "" or (value == "-" and not self.allow_dash):
            self.fail(f"{excerpt(value)}; accepted: the name of a file or folder, and ./- for one called -", param, ctx)
        return super().convert(value, param, ctx)


class _Word(click.types.StringParamType):
    """Click type of a name. It refuses an empty one, which comes from an unset variable of a shell."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(value, param, ctx) or self.fail("''; accepted: a name, or no such option", param, ctx)


PATH = NamedPath()
WORD = _Word()
PATTERN = ReadBy(Pattern.parse)
LEAST_COLUMNS = 40  # tables and pictures need this many
LAYOUT, JOB, ACTIVATION, STRIDE = OneOf(LAYOUTS), OneOf(JOBS), OneOf(ACTIVATIONS), OneOf(STRIDES)


BATCHES = "1,16,1568"  # example in a message, and default of `ksgen bench layers`


@ReadBy
def batches_in(text: str) -> tuple[int, ...]:
    """Click type of batch sizes, separated by commas. Repeated sizes count once."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) < 10 and int(word) for word in words):
        raise SpecError(
            f"--batch {excerpt(text)}; accepted: whole numbers from 1 up, separated by commas, such as {BATCHES}"
        )
    return tuple(dict.fromkeys(map(int, words)))


MOST_REAL = 1e9  # largest value of options for real numbers, which are times in seconds
REPLACED = "an older one is replaced"  # in the help of every option that names a file to write
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")
device_option = click.option(
    "--device",
    type=WORD,
    help="Device, as in KSGEN_DEVICE: cuda, pycuda, driver, native, opencl, opencl:1, or part of a name.",
)


class RealRange(click.FloatRange):
    """Range of numbers without NaN, which click accepts as a number of any range."""

    name = "number"  # in messages and help

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        return self.fail("NaN is not in any range", param, ctx) if isnan(number) else number


class _WholeRange(click.IntRange):
    """Range of whole numbers that fit in 64 bits. Larger ones exceed what floats hold."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number > MOST_BYTES:
            self.fail(f"{excerpt(number)}; accepted: whole numbers below 2^63", param, ctx)
        return number


def number_option(*names: str, help_text: str, usual: float | None = None, least: float = 1) -> Callable[[Any], Any]:
    """Option for a number of at least `least`. It is a whole number, unless the default `usual` is a float."""
    kind: Any = RealRange(least, MOST_REAL) if isinstance(usual, float) else _WholeRange(min=int(least))
    return click.option(*names, type=kind, default=usual, show_default=usual is not None, help=help_text)


def sized_option(flag: str, help_text: str, on_gpu: int, on_processor: int) -> Callable[[Any], Any]:
    """Option for a whole number from 1 up, whose default depends on the kind of the device."""
    return number_option(flag, help_text=f"{help_text}  [default: {on_gpu} on a GPU, {on_processor} on a processor]")


def file_option(*names: str, help_text: str, metavar: str = "FILE", usual: str = "") -> Callable[[Any], Any]:
    """Option for a file to write. `usual` describes its default."""
    default = f"  [default: {usual}]" if usual else ""
    return click.option(*names, type=PATH, metavar=metavar, help=f"{help_text}; {REPLACED}.{default}")


batch_option = sized_option("--batch", "Batch size.", GPU_BATCH, CPU_BATCH)
pattern_option = click.option(
    "--pattern",
    "named",
    type=PATTERN,
    metavar="A,B,C,D",
    multiple=True,
    help="A pattern, the same as an argument A,B,C,D. May be repeated.",
)
folder_option = click.option("-o", "--output", type=PATH, help="Folder to write.  [default: generated/<spec name>]")
arch_option = click.option(
    "--arch",
    default="sm_80,sm_90a",
    show_default=True,
    help="Targets, separated by commas: sm_90a and others for GPUs; x86-64-v3, aarch64 and others for processors; host "
    "for this processor.",
)


def takes_patterns(function: Callable[..., None]) -> Callable[..., None]:
    """Add patterns to a command: as arguments, as --pattern, or both."""

    @click.argument("patterns", type=PATTERN, nargs=-1, metavar="[A,B,C,D]...")
    @pattern_option
    @wraps(function)
    def taking(patterns: tuple[Pattern, ...], named: tuple[Pattern, ...], **options: Any) -> None:
        function((*patterns, *named), **options)

    return taking


def find_spec(path: Path) -> Path:
    """Return the path of a spec. If there is no such file, `specs/vit.yaml` and `vit.yaml` name the shipped spec."""
    from ksgen.paths import resource

    shipped = resource("specs") / path.name
    # os.path.exists is False for a name that is too long; Path.exists raises.
    is_shipped = not os.path.exists(path) and path.parent in (Path("specs"), Path()) and os.path.isfile(shipped)
    return shipped if is_shipped else path


def output_folder(named: Path | None, spec: Spec) -> Path:
    """The folder that `emit` writes its files to: `-o`, or `generated/<spec name>`."""
    return named or Path("generated") / spec.name


def check_memory(kernel: KernelSpec, batch: int, limits: "Limits", place: "SourcePlace | None" = None) -> None:
    """Raise `SpecError` if checking a kernel needs more memory than this machine has.

    `place` is where a spec states the batch size; the message then names it.
    """
    from ksgen.measure.verify import footprint

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    need = footprint(kernel, batch, limits)
    if need.total > memory:
        parts = (
            f"arrays {need.arrays / 1e9:.1f}, the float64 reference {need.reference / 1e9:.1f}, the device's buffers "
            f"{need.device / 1e9:.1f}"
        )
        has = f"this machine has {memory / 1e9:.1f} GB"
        advice = "take a smaller batch" if batch > 1 else "take a smaller pattern"
        problem = f"checking {kernel.name} takes {need.total / 1e9:.1f} GB ({parts}), and {has}; {advice}"
        raise place.error(f"{batch}: {problem}") if place else SpecError(f"--batch {batch}: {problem}")


def renamed_option(earlier: str, present: str, value: OptionT) -> OptionT:
    """Return the value of an option's deprecated name, and warn if it was given. `--help` hides the name."""
    if value:
        click.echo(f"warning: {earlier} is deprecated and will be removed; use {present}", err=True)
    return value


def json_text(content: Any) -> str:
    """JSON by the schema of docs/json.md, with numbers rounded to their meaningful digits.

    NaN and infinite numbers, which JSON lacks, become null.
    """
    return json.dumps(tidy(content), indent=1)


def print_json(content: Any) -> None:
    click.echo(json_text(content))


def warn_if_busy() -> None:
    """Warn in one line if other processes keep the machine busy. Call it after all checks of a user's input."""
    from ksgen.measure.trust import look

    if warning := look():
        click.echo(warning, err=True)


def console(stderr: bool = False) -> "Console":
    """A console as wide as the terminal, or as COLUMNS says if that is a usable width."""
    from rich.console import Console

    for name in ("COLUMNS", "LINES"):  # rich accepts any number, even 0 and huge ones
        if not re.fullmatch(r"[1-9][0-9]{0,3}", os.environ.get(name, "80"), re.ASCII):
            del os.environ[name]

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise  # else rich exits with 1

    screen = Screen(stderr=stderr, highlight=False)
    screen.width = max(screen.width, LEAST_COLUMNS)
    return screen


def print_columns(columns: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> None:
    """Print a table with its first `left` columns aligned to the left.

    In a narrow terminal, lines break between words.
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    screen = console()
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    widths = column_widths([columns, *rows], screen.width - 2 * (len(columns) - 1))
    for place, (title, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(title, justify="left" if place < left else "right", width=width, overflow="fold")
    for row in rows:
        table.add_row(*row)
    screen.print(table)


def print_facts(rows: Mapping[str, str], facts: Mapping[str, Any]) -> None:
    """Print a table of names and texts, whose fields such as `{batch}` are replaced by facts."""
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    for name, text in rows.items():
        table.add_row(f"[bold]{name.format(**facts)}[/]", text.format(**facts))
    console().print(table)


def column_widths(lines: Sequence[Sequence[str]], room: int) -> list[int]:
    """Return the width of each column, at most `room` in total.

    Each column gets at least the width of its longest word, if all words fit. Remaining room widens columns up to their
    longest text, the shortest first.
    """
    columns = list(zip(*lines, strict=True))
    widths = [max([1, *(len(word) for text in column for word in text.split())]) for column in columns]
    while sum(widths) > room and max(widths) > 1:  # not even all words fit
        widths[widths.index(max(widths))] -= 1
    for place, longest in sorted(enumerate(max(map(len, column)) for column in columns), key=lambda each: each[1]):
        widths[place] += max(0, min(longest - widths[place], room - sum(widths)))
    return widths


def progress(shows_left: bool = False) -> "Progress":
    """A progress bar on stderr, so that stdout can be piped. Hidden if stderr is not a terminal.

    With `shows_left` it also estimates the time left.
    """
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    screen, left = console(stderr=True), (TextColumn("left"), TimeRemainingColumn()) if shows_left else ()
    first = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    columns = (*first, *left, TextColumn("{task.fields[now]}"))
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)


def first_failure(results: Sequence[Any]) -> None:
    """Raise the first error among the results of `build_many`, and say how many others failed."""
    failures = [result for result in results if isinstance(result, KsgenError)]
    if failures:
        more = f" (and {counted(len(failures) - 1, 'other kernel')} failed)" if len(failures) > 1 else ""
        raise type(failures[0])(f"{failures[0]}{more}")
