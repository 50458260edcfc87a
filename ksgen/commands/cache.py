"""`ksgen cache`."""

import os
import re
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ksgen.commands.common import PATH, json_option, print_columns, print_json
from ksgen.errors import KsgenError
from ksgen.ownership import distrust
from ksgen.paths import cache_dir
from ksgen.values import counted, excerpt

if TYPE_CHECKING:
    from ksgen.build.cache import Cache

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
folder_option = click.option(
    "--folder",
    type=PATH,
    help="Cache folder.  [default: KSGEN_CACHE_DIR, else the user's cache folder]",
)


@click.group("cache")
def command() -> None:
    """Manage the cache of compiled kernels.

    \b
    Examples:
      ksgen cache ls
      ksgen cache gc --max-bytes 500M
      KSGEN_CACHE_DIR=./cache ksgen cache verify
    """


@command.command("path")
@folder_option
def path(folder: Path | None) -> None:
    """Print the cache's folder.

    \b
    Examples:
      ksgen cache path
    """
    click.echo(str(folder or cache_dir()))


@command.command("ls")
@folder_option
@json_option
def ls(folder: Path | None, as_json: bool) -> None:
    """List the entries, most recently used first.

    \b
    Examples:
      ksgen cache ls --json
    """
    cache = _cache(folder)
    entries = sorted(cache.entries(), key=lambda entry: (-entry.last_used, entry.entry, entry.target))
    if as_json:
        fields = ("key", "entry", "target", "compiler", "bytes")
        # the time as an int, because `tidy` would round a float to six digits
        print_json(
            [{name: getattr(entry, name) for name in fields} | {"last_used": int(entry.last_used)} for entry in entries]
        )
        return
    if entries:
        rows = []
        for entry in entries:
            used = datetime.fromtimestamp(entry.last_used).strftime("%Y-%m-%d %H:%M")
            rows.append((entry.entry, entry.target, entry.compiler, used, f"{entry.bytes / 1e3:.1f}"))
        print_columns(("kernel", "target", "compiler", "last used", "kB"), rows, left=4)
    click.echo(
        f"{counted(len(entries), 'entry', 'entries')}, {sum(entry.bytes for entry in entries) / 1e6:.1f} MB in "
        f"{cache.path}"
    )


@command.command("verify")
@folder_option
@json_option
def verify(folder: Path | None, as_json: bool) -> None:
    """Check the hash of every entry. Exit code 1 if one is damaged; a damaged entry is rebuilt when next used.

    \b
    Examples:
      ksgen cache verify
    """
    cache = _cache(folder)
    bad = cache.verify()
    if as_json:
        print_json([{"path": str(entry.path), "reason": entry.reason} for entry in bad])
    else:
        for entry in bad:
            click.echo(f"{entry.path}: {entry.reason}")
        click.echo(
            f"{cache.path}: {counted(sum(1 for _ in cache.entries()), 'good entry', 'good entries')}, {len(bad)} "
            "damaged"
        )
    if bad:
        sys.exit(1)


@command.command("gc", short_help="Remove leftovers and the least recently used entries.")
@folder_option
@click.option("--max-bytes", help="Size to shrink to, such as 500M.  [default: KSGEN_CACHE_MAX_BYTES]")
def gc(folder: Path | None, max_bytes: str | None) -> None:
    """Remove leftovers of killed processes. If the cache is still too large, remove the least recently used entries.

    \b
    Examples:
      ksgen cache gc --max-bytes 500M
    """
    cache = _cache(folder)
    freed = cache.gc(None if max_bytes is None else _parse_bytes(max_bytes))
    click.echo(f"{freed / 1e6:.1f} MB freed in {cache.path}")


@command.command("clear")
@folder_option
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
def clear(folder: Path | None, yes: bool) -> None:
    """Remove all entries.

    \b
    Examples:
      ksgen cache clear --yes
    """
    cache = _cache(folder)
    if not yes and not _confirmed(f"Remove every binary in {cache.path}?"):
        raise KsgenError(f"{cache.path}: nothing was removed; answer y, or give --yes")
    click.echo(f"{cache.clear() / 1e6:.1f} MB freed in {cache.path}")


def _cache(folder: Path | None) -> "Cache":
    from ksgen.build.cache import Cache

    place = folder or cache_dir()
    if os.path.exists(place) and not os.path.isdir(place):  # os.path: False for a name that is too long
        raise KsgenError(f"{place} is not a folder; name the cache's folder with --folder or KSGEN_CACHE_DIR")
    if why := distrust(place):
        raise KsgenError(why)
    return Cache(place)


def _confirmed(question: str) -> bool:
    try:
        return click.confirm(question)
    except click.Abort:  # no terminal, or Ctrl-C
        click.echo()
        return False


def _parse_bytes(text: str) -> int:
    """Parse `500M` into 500000000."""
    number = re.fullmatch(r"(\d{1,20}(?:\.\d{1,20})?)\s*([kmgt]?)b?", text.strip().lower())
    if not number:
        raise KsgenError(f"--max-bytes {excerpt(text)}: give a number of bytes, such as 500000000, 500M or 2G")
    return int(float(number[1]) * UNITS[number[2]])
