"""`ksgen wisdom`."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen.commands.common import (
    PATH,
    PATTERN,
    WORD,
    entry_figures,
    file_option,
    json_option,
    kernel_figures,
    print_json,
)
from ksgen.errors import KsgenError
from ksgen.files import write
from ksgen.measure.trust import MARK, marked
from ksgen.pattern import Pattern
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.wisdom import Difference, Entry, Wisdom

device_option = click.option(
    "--device", type=WORD, metavar="NAME", help="Only devices with this in their name, such as H200."
)
output_option = file_option("-o", "--output", help_text="Write to this file instead of printing")


@click.group("wisdom")
def command() -> None:
    """Show, merge and exchange wisdom: the fastest constants that searches found, per device and kernel.

    An entry is stale if the kernel's template has changed since. It is still used, until a search runs again. An entry
    of `ksgen calibrate` is marked as a trial, because only a few candidates were timed. Any search replaces it.

    \b
    Examples:
      ksgen wisdom show --device H200
      ksgen wisdom export -o all.json
      ksgen wisdom import all.json
    """


@command.command("show", short_help="List the wisdom that launchers on this machine use.")
@device_option
@click.option("--pattern", type=PATTERN, metavar="A,B,C,D", help="Only kernels of this pattern.")
@json_option
def show(device: str | None, pattern: Pattern | None, as_json: bool) -> None:
    """List the wisdom that launchers on this machine use: the user's own first, then what ksgen ships.

    \b
    Examples:
      ksgen wisdom show
      ksgen wisdom show --device H200 --pattern 1,192,48,2 --json
    """
    known = _known(device)
    wanted = {
        name: [entry for entry in wisdom.entries() if pattern in (None, entry.kernel.pattern)]
        for name, wisdom in known.items()
    }
    if as_json:
        print_json([_facts(name, entry) for name, entries in wanted.items() for entry in entries])
        return
    for name, entries in wanted.items():
        _print_entries(name, entries)
    if not any(wanted.values()):
        from ksgen.wisdom import folders

        of = f" of {pattern}" if pattern else ""
        click.echo(f"no wisdom{of} yet in {' or '.join(map(str, folders()))}")


@command.command("merge", short_help="Merge two wisdom files or exports into one.")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@output_option
def merge(first: Path, second: Path, output: Path | None) -> None:
    """Merge two wisdom files or exports into one. For each kernel and batch size, the better entry wins. Fresh entries
    precede stale ones, then searches precede trials, reliable times unreliable ones, and faster entries slower ones.

    \b
    Examples:
      ksgen wisdom merge wisdom/nvidia-h200.json theirs.json -o wisdom/nvidia-h200.json
      git config merge.ksgen.driver "ksgen wisdom merge %A %B -o %A"
    """
    from ksgen.wisdom import merge_devices, read_wisdom

    _write(merge_devices(read_wisdom(first), read_wisdom(second)), output)


@command.command("diff", short_help="List the differences of two wisdom files or exports.")
@click.argument("first", type=PATH)
@click.argument("second", type=PATH)
@json_option
def diff(first: Path, second: Path, as_json: bool) -> None:
    """List the kernels and batch sizes for which two wisdom files or exports differ. The ratio is the time in the
    second file divided by the time in the first.

    \b
    Examples:
      ksgen wisdom diff before.json after.json
      ksgen wisdom diff wisdom/nvidia-h200.json theirs.json --json
    """
    from ksgen.wisdom import differences, read_wisdom

    ours, theirs = read_wisdom(first), read_wisdom(second)
    found = differences(ours, theirs)
    if as_json:
        print_json([_difference_facts(each) for each in found])
        return
    for each in found:
        _print_difference(each)
    shared = sum(len(wisdom.entries()) for wisdom in ours.values()) - sum(each.first is not None for each in found)
    click.echo(f"the same: {counted(shared, 'entry', 'entries')}; different: {len(found)}")


@command.command("export", short_help="Write all wisdom of this machine to one file.")
@device_option
@output_option
def export(device: str | None, output: Path | None) -> None:
    """Write all wisdom of this machine to one file, for `ksgen wisdom import` on another.

    \b
    Examples:
      ksgen wisdom export --device H200 -o h200.json
      ssh gpu ksgen wisdom export | ksgen wisdom import /dev/stdin
    """
    if not (known := _known(device)):
        raise KsgenError("nothing to export: this machine has no wisdom yet; `ksgen tune` makes some")
    _write(known, output)


@command.command("import", short_help="Add the new and the better entries of a file.")
@click.argument("file", type=PATH)
@device_option
def import_(file: Path, device: str | None) -> None:
    """Add the entries of a wisdom file or export that are new, or better than this machine's. This machine's other
    entries stay unchanged.

    \b
    Examples:
      ksgen wisdom import all.json --device H200
    """
    from ksgen.wisdom import improvements, load_wisdom, only_device, read_wisdom, save

    offered = only_device(read_wisdom(file), device, str(file))
    found = {name: improvements(load_wisdom(name, strict=True), wisdom) for name, wisdom in offered.items()}
    for name, (new, improved) in found.items():
        if new or improved:
            save(name, [*new, *improved])
        kept = len(offered[name].entries()) - len(new) - len(improved)
        click.echo(f"{name}: {len(new)} new, {len(improved)} better, {kept} not better than what is known here")


def _known(device: str | None) -> "dict[str, Wisdom]":
    from ksgen.wisdom import known_devices, only_device

    return only_device(known_devices(), device, "this machine's wisdom")


def _write(devices: "dict[str, Wisdom]", output: Path | None) -> None:
    from ksgen.wisdom import dump_export

    if output is None:
        click.echo(dump_export(devices), nl=False)
        return
    write(output, dump_export(devices))
    count = sum(len(wisdom.entries()) for wisdom in devices.values())
    click.echo(f"{counted(count, 'entry', 'entries')} of {', '.join(devices)} in {output}")


def _facts(device: str, entry: "Entry") -> dict[str, Any]:
    return {"device": device, "stale": entry.is_stale, **entry_figures(entry)}


def _difference_facts(each: "Difference") -> dict[str, Any]:
    which = {"device": each.device, **kernel_figures(each.kernel, each.batch)}
    sides = {"first": each.first, "second": each.second}
    found = {name: entry and _facts(each.device, entry) for name, entry in sides.items()}
    return {**which, "what": each.what, "ratio": each.ratio, **found}


def _print_entries(device: str, entries: "list[Entry]") -> None:
    by_version: dict[str, list[Entry]] = {}
    for entry in entries:
        version = str(entry.measured.get("ksgen", "of unknown version"))
        by_version.setdefault(version if version.isprintable() else excerpt(version), []).append(entry)
    for version, found in sorted(by_version.items()):
        stale = sum(entry.is_stale for entry in found)
        known = counted(len(found), "entry", "entries")
        click.echo(f"{device}, by ksgen {version}: {known}, {f'{stale} stale: tune again' if stale else 'none stale'}")
        width = max(len(entry.kernel.name) for entry in found)
        for entry in found:
            click.echo(
                f"  {entry.kernel.name:<{width}} batch {entry.batch:<9} "
                f"{_time(entry)}{'  stale' if entry.is_stale else ''}{'  trial' if entry.is_trial else ''}"
                f"{_on(entry.target)}"
            )
            if entry.why_unreliable:
                click.echo(f"    {MARK} its time is unreliable: {entry.why_unreliable}")
            click.echo(f"    {entry.family}: {entry.constants}")


def _on(target: str) -> str:
    """Target of a processor for a line: kinds of processors may share a name."""
    return f" on {target}" if target else ""


def _time(entry: "Entry") -> str:
    from ksgen.measure.roofline import share_of_floor

    time, floor = entry.median_us, entry.measured.get("floor_us")
    part = None if entry.why_unreliable else share_of_floor(floor, time)
    share = "" if part is None else f", {part:4.0%} of the floor"
    return marked(f"{time:9.1f} us", entry.why_unreliable) + share if time else "of unknown time"


def _print_difference(each: "Difference") -> None:
    times = [
        marked(f"{entry.median_us:.1f} us", entry.why_unreliable) if entry.median_us else "unknown"
        for entry in (each.first, each.second)
        if entry
    ]
    ratio = f", {each.ratio:.3f} times" if each.ratio else ""
    what = {"measured": "same constants", "constants": "different constants"}.get(each.what, each.what)
    which = f"{each.kernel.name} batch {each.batch}{_on(each.target)}"
    click.echo(f"{each.device}, {which}: {what}, {' and '.join(times)}{ratio}")
    for name, entry in (("first", each.first), ("second", each.second)):
        if entry and each.what != "measured":
            click.echo(f"  {name}: {entry.family}: {entry.constants}{' (stale)' if entry.is_stale else ''}")
