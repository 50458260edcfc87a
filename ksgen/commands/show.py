"""`ksgen show`."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ksgen.commands.common import (
    LAYOUT,
    PRECISION,
    REPLACED,
    SPEC,
    console,
    find_spec,
    json_option,
    print_json,
    takes_patterns,
    weights_option,
)
from ksgen.commands.figures import choice_figures, kernel_figures
from ksgen.errors import PatternError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import KernelSpec

if TYPE_CHECKING:
    from ksgen.launch.choice import Choice


@click.command("show", short_help="Describe a pattern, with a picture.")
@takes_patterns
@click.option("--spec", type=SPEC, help="Describe all patterns and layers of this spec.")
@click.option("--batch", type=click.IntRange(min=1), default=25088, show_default=True, help="Batch size, to count bytes and operations.")
@click.option("--precision", type=PRECISION, default="float32", show_default=True, help="Precision of the product.")
@click.option("--layout", type=LAYOUT, default="bsf", show_default=True, help="bsf: X is (batch, features); bsl: (features, batch).")
@weights_option
@click.option("--device", help="Show the kernel chosen on this device, wisdom included. As in KSGEN_DEVICE, such as opencl or cuda.")
@click.option("--png", type=click.Path(path_type=Path), help=f"Draw the pattern (only one) to this file; {REPLACED}.")
@json_option
def command(
    patterns: tuple[Pattern, ...], spec: Path | None, batch: int, precision: str, layout: str, weights: str,
    device: str | None, png: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Describe a pattern, a chain of patterns or a spec: sizes, costs, the kernel that is chosen, and a picture. In a chain, the pattern
    applied to X first comes first.

    \b
    Examples:
      ksgen show 2,3,4,5 --png pattern.png
      ksgen show 2,48,192,1 1,192,48,2 --precision float16
      ksgen show --spec specs/vit.yaml
      ksgen show 1,192,48,2 --device cuda
    """
    if bool(patterns) == bool(spec):
        raise PatternError("give patterns such as 1,192,48,2, or --spec FILE: one of the two")
    layers = {}
    if spec:
        from ksgen.spec import load

        loaded = load(find_spec(spec))
        patterns, layers = tuple(dict.fromkeys(kernel.pattern for kernel in loaded.kernels)), dict(loaded.layers)
        for name, chains in loaded.groups.items():
            layers |= {f"{name}[{number}]": chain for number, chain in enumerate(chains)}
    elif len(patterns) > 1:
        layers = {"chain": Chain(patterns)}
    described = [_describe(KernelSpec(pattern, precision, layout, weights=weights), batch, device) for pattern in patterns]
    if png:
        _draw(patterns, png)
    if as_json:
        print_json({"patterns": described, "layers": {name: _describe_chain(chain) for name, chain in layers.items()}})
        return
    for pattern, facts in zip(patterns, described, strict=True):
        _print(pattern, facts, with_picture=not spec)
    for name, chain in layers.items():
        click.echo(
            "{name}: {chain}, {in_features} -> {out_features}, {share:.1%} of dense".format(
                name=name, chain=chain, **_describe_chain(chain)
            )
        )


def _describe(kernel: KernelSpec, batch: int, device: str | None) -> dict[str, Any]:
    from ksgen.families import family_for, family_named

    choice = _choice(kernel, batch, device)
    pattern, family, constants = kernel.pattern, family_named(choice.family), choice.constants
    geometry, work = family.geometry(kernel, constants, batch), family.work(kernel, constants, batch)
    return {
        **kernel_figures(kernel, batch),
        "rows": pattern.out_features,
        "columns": pattern.in_features,
        "weights": pattern.weight_count,
        "density": pattern.density,
        "blocks": pattern.a * pattern.d,
        "rewrite_ratio": pattern.rewrite_ratio,
        "predicts": str(pattern.predicts()),
        "gflop": kernel.flops(batch) / 1e9,
        "dense_gflop": 2e-9 * batch * pattern.out_features * pattern.in_features,
        "mbyte": kernel.bytes(batch) / 1e6,
        "flop_per_byte": kernel.flops(batch) / kernel.bytes(batch),
        **choice_figures(family.name, constants),
        "why": family.why,
        "by_device": {name: family_for(kernel, limits, batch).name for name, limits in _device_limits().items()},
        "chosen_by": choice.why,
        "blocks_of_threads": geometry.grid,
        "threads": geometry.block,
        "shared_bytes": geometry.shared_bytes,
        "registers": family.registers(kernel, constants),
        "cache_mbyte": work.cache_bytes / 1e6,
        "shared_mbyte": work.shared_bytes / 1e6,
        "multiply_adds_ratio": 2 * work.multiply_adds / kernel.flops(batch),
    }


def _choice(kernel: KernelSpec, batch: int, device: str | None) -> "Choice":
    """The choice on a device, by its wisdom; without a device, constants that run on every GPU since sm_80."""
    from ksgen.emit.render import PORTABLE
    from ksgen.launch.choice import choose
    from ksgen.launch.planner import PLANNER
    from ksgen.wisdom.store import Wisdom

    if device is None:
        return replace(choose(kernel, batch, PORTABLE["cuda"], Wisdom()), why="the family's default for every GPU since sm_80")
    from ksgen.devices import find_device

    return PLANNER.choice(find_device(device), kernel, batch)


def _device_limits() -> dict[str, Any]:
    from ksgen.emit.render import PORTABLE
    from ksgen.families import cuda_limits
    from ksgen.families.gpus import TYPICAL

    return {target: cuda_limits(target) for target in TYPICAL} | {"opencl": PORTABLE["opencl"]}


def _describe_chain(chain: Chain) -> dict[str, Any]:
    return {
        "patterns": [list(pattern.shape) for pattern in chain],
        "in_features": chain.in_features,
        "out_features": chain.out_features,
        "weights": chain.weight_count,
        "share": chain.weight_count / (chain.in_features * chain.out_features),
        "chainable": chain.is_chainable,
    }


def _print(pattern: Pattern, facts: dict[str, Any], with_picture: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, pad_edge=False)
    chosen = ", ".join(f"{name}={value}" for name, value in facts["constants"].items())
    facts = facts | {
        "pattern": pattern,
        "constants": chosen,
        "devices": ", ".join(f"{device}: {family}" for device, family in facts["by_device"].items()),
    }
    rows = [
        ("pattern", "{pattern}: {rows} x {columns}, {weights} weights in {blocks} blocks once permuted, {density:.2%} of dense"),
        ("(b+c)/(bc)", "{rewrite_ratio:.4f}: {predicts}"),
        ("batch {batch}", "{gflop:.2f} GFLOP (dense {dense_gflop:.2f}), {mbyte:.1f} MB, {flop_per_byte:.1f} FLOP per byte"),
        ("kernel", "{kernel}, {family}: {constants}"),
        ("chosen by", "{chosen_by}"),
        ("family", "{why}; {devices}"),
        ("traffic", "{cache_mbyte:.0f} MB between cache and blocks, {shared_mbyte:.0f} MB of shared memory"),
        ("products", "{multiply_adds_ratio:.2f} times the least, with padding and the parts of split operands"),
        ("resources", "{threads} threads and {shared_bytes} bytes of shared memory per block, about {registers} registers per thread"),
    ]
    for name, text in rows:
        table.add_row(f"[bold]{name.format(**facts)}[/]", text.format(**facts))
    console().print(table)
    if with_picture:
        from ksgen.figures.picture import can_show
        from ksgen.figures.picture import text as draw

        screen = console()
        screen.print()
        screen.print(Text(draw(pattern, screen.width, plain=not can_show(screen.encoding)), style="cyan"))


def _draw(chosen: tuple[Pattern, ...], path: Path) -> None:
    from ksgen.figures.picture import png
    from ksgen.files import write

    if len(chosen) != 1:
        raise PatternError(f"--png draws one pattern; got {len(chosen)}")
    write(path, png(chosen[0]))
