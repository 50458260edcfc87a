"""python -m tests.counts: what a kernel's launches ask of the memories and the matrix units, counted in the emulator
(tests/emulator).

A kernel of ksgen, by its pattern, is compared with its family's `work`. Any other CUDA source is counted by a launch
written down in YAML:

    text: peer.cu               # next to the YAML
    entry: multiply
    grid: [64, 2]
    block: 256
    shared_bytes: 49152         # dynamic; may be left out, and so may the next two
    cluster: 2
    early: true
    arguments:
      - bytes: 4194304          # an array of zeros
      - npy: indices.npy        # an array, next to the YAML
      - int32: 256              # a number, of any type that NumPy has
      - null                    # no array
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml

from ksgen.commands.common import LAYOUT, PATTERN, OneOf
from ksgen.emit.render import Source, render
from ksgen.errors import KsgenError
from ksgen.families import check, cuda_limits, family_for, family_named
from ksgen.pattern import Pattern
from ksgen.spec import PRECISIONS, KernelSpec
from tests.emulator import Counts, SimtError, count_cuda
from tests.support.counting import compared, count_kernel
from tests.support.kernels import JOB_OF, batch_for

KEYS = ("text", "entry", "grid", "block", "shared_bytes", "cluster", "early", "arguments")
NEEDED = ("text", "entry", "grid", "block", "arguments")


class LaunchError(KsgenError):
    """A launch that cannot be read."""


def read_launch(path: Path) -> dict[str, Any]:
    """What `count_cuda` takes, from a YAML file."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise LaunchError(f"{path}: {error}") from None
    if (
        not isinstance(found, dict)
        or not set(NEEDED) <= set(found) <= set(KEYS)
        or not isinstance(found["arguments"], list)
    ):
        raise LaunchError(
            f"{path}: a launch has {', '.join(NEEDED)}, and may have "
            f"{', '.join(key for key in KEYS if key not in NEEDED)}"
        )
    text = path.parent / str(found["text"])
    try:
        source = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"{path}: text: {error}") from None
    arguments = [_argument(path, index, each) for index, each in enumerate(found["arguments"])]
    grid, block = (tuple(size) if isinstance(size, list) else size for size in (found["grid"], found["block"]))
    shared = found.get("shared_bytes", 0)
    options = {name: found[name] for name in ("cluster", "early") if name in found}
    return {
        "source": source,
        "entry": found["entry"],
        "grid": grid,
        "block": block,
        "shared_bytes": shared,
        "args": arguments,
    } | options


def _argument(path: Path, index: int, given: Any) -> Any:
    if given is None:
        return None
    if isinstance(given, dict) and len(given) == 1:
        [(kind, value)] = given.items()
        try:
            if kind == "bytes":
                return np.zeros(value, np.uint8)
            if kind == "npy":
                return np.load(path.parent / value)
            return np.dtype(kind).type(value)
        except (OSError, TypeError, ValueError) as error:
            raise LaunchError(f"{path}: arguments[{index}]: {given}: {error}") from None
    raise LaunchError(
        f"{path}: arguments[{index}]: {given!r}; accepted are bytes, npy, a NumPy type with its value, and null"
    )


def find_source(
    pattern: Pattern, precision: str, layout: str, batch: int, target: str, family: str | None, named: Mapping[str, str]
) -> Source:
    """A kernel with its default constants, but for those that are named."""
    limits = cuda_limits(target)
    job = JOB_OF[family] if family else "multiply"
    kernel = KernelSpec(pattern, precision, layout, job=job)
    chosen = family_named(family) if family else family_for(kernel, limits, batch)
    if not chosen.supports(kernel, limits):
        raise LaunchError(f"{chosen.name} does not support {kernel.name} on {target}")
    default = asdict(chosen.default(kernel, limits, batch))
    values = {name: int(value) if value.isdecimal() else value for name, value in named.items()}
    constants = chosen.constants(default | values)
    check(chosen, kernel, constants, limits)
    return render(kernel, constants, family=chosen.name)


def lines(counts: Counts) -> Iterator[str]:
    if counts.global_:
        yield f"{'global memory':<16} {'requests':>12} {'sectors':>12} {'bytes':>14}"
    for name, tally in counts.global_.items():
        yield f"  {name:<14} {tally.requests:>12,} {tally.sectors:>12,} {tally.bytes:>14,}"
    if counts.shared:
        yield f"{'shared memory':<16} {'requests':>12} {'bytes':>14} {'cycles':>12} {'by banks':>12} {'by return':>12}"
    for name, kept in counts.shared.items():
        cycles = f"{kept.cycles:>12,} {kept.bank_cycles:>12,} {kept.return_cycles:>12,}"
        yield f"  {name:<14} {kept.requests:>12,} {kept.bytes:>14,} {cycles}"
    yield (
        f"L2 cache, once for each block: {counts.cache_read_bytes:,} bytes read, {counts.cache_written_bytes:,} written"
    )
    yield f"memory, once: {counts.memory_read_bytes:,} bytes read, {counts.memory_written_bytes:,} written"
    for name, count in counts.instructions.items():
        yield f"{name}: {count:,}"
    yield (
        f"barriers: {counts.barriers:,}, of clusters {counts.cluster_barriers:,}, phases of mbarriers "
        f"{counts.mbarrier_phases:,}"
    )
    yield f"bytes in flight, at most, of one of {counts.blocks:,} blocks: {counts.bytes_in_flight:,}"


def print_counts(named: Mapping[str, Counts], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({name: asdict(counts) for name, counts in named.items()}, indent=2))
        return
    for name, counts in named.items():
        click.echo(f"{name}\n" + "\n".join(f"  {line}" for line in lines(counts)))


@click.command(help=(__doc__ or "").split("\n\n")[0])
@click.argument("pattern", type=PATTERN, required=False, metavar="[A,B,C,D]")
@click.option("--precision", type=OneOf(PRECISIONS), default="float32", show_default=True)
@click.option("--layout", type=LAYOUT, default="bsf", show_default=True)
@click.option("--batch", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--target", default="sm_90a", show_default=True, help="GPU whose defaults and limits are taken.")
@click.option(
    "--family", type=click.Choice(list(JOB_OF)), help="Else the one that launchers choose there for a product."
)
@click.option(
    "--constant", "constants", multiple=True, metavar="NAME=VALUE", help="Instead of the default. May be repeated."
)
@click.option(
    "--launch",
    type=click.Path(path_type=Path),
    help="YAML with the launch of any other CUDA text, instead of a pattern.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.IntRange(min=1),
    default=300,
    show_default=True,
    help="Seconds that a launch may take.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def main(
    pattern: Pattern | None,
    launch: Path | None,
    constants: tuple[str, ...],
    timeout_s: int,
    as_json: bool,
    **options: Any,
) -> None:
    if (pattern is None) == (launch is None):
        raise click.UsageError("give either a pattern or --launch")
    if bad := [each for each in constants if not all(each.partition("="))]:
        raise click.UsageError(f"--constant {bad[0]}: NAME=VALUE is accepted")
    try:
        if launch is not None:
            given = read_launch(launch)
            print_counts({given["entry"]: count_cuda(**given, timeout_s=timeout_s)}, as_json)
            return
        assert pattern is not None
        source = find_source(pattern, named=dict(each.split("=", 1) for each in constants), **options)
        batch = batch_for(source, options["batch"])
        own, around = count_kernel(source, batch, timeout_s)
        if not as_json:
            click.echo(f"{source.family}, batch {batch}: {source.constants}")
        print_counts({source.entry: own} | ({"before and after": around} if around.blocks else {}), as_json)
        if not as_json:
            click.echo(f"{'all launches':<25} {'by the model':>14} {'counted':>14}")
            for name, (expected, counted) in compared(source, batch, own, around).items():
                click.echo(f"  {name:<23} {expected:>14,.0f} {counted:>14,}")
    except (KsgenError, SimtError, ValueError) as error:
        raise click.ClickException(str(error)) from None


if __name__ == "__main__":
    main()
