"""What bounds the kernels by matrix tiles, counted: `python -m benchmarks.tiles`. Times nothing, and needs no tiles.

Needs g++ 11, llvm-mca 19 and a processor with AVX-512 BF16, on which the text runs but for its tiles.
"""

import csv
import ctypes
import mmap
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click

from benchmarks.tiles.counted import Counted
from benchmarks.tiles.cycles import BYTES_PER_S, CORES, GHZ, PHASES, Counts, counts_of
from ksgen.bench.chains import transformers
from ksgen.build.host import find_host_compiler, options_of, source_of
from ksgen.emit.render import render
from ksgen.families import Limits, family_of
from ksgen.families.amx import Amx, AmxChain, AmxConstants, ChainConstants, Shape
from ksgen.families.amx.chain import ChainShape
from ksgen.families.chains import factor_kernels
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec, stratified

CPU = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, tiles=("bf16",), multiprocessors=CORES, async_copies=False)
MARCH = ("-march=sapphirerapids", "-mno-avx512fp16", "-mno-avxvnni")  # without what the machine that counts may lack
FAMILY, CHAIN_FAMILY = Amx(), AmxChain()
PEAK = CORES * GHZ * 1e9 * 1024 / 2  # multiply-adds a second
TASKS = 3  # that are counted
WHERE = 0.414  # of a launch: where no piece of the batch begins


class Memory:
    """Zeros that nobody has touched, on a page's boundary."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size + 8192)
        self.size, self.begin = size, ctypes.addressof(ctypes.c_char.from_buffer(self.map)) + 4096


def counted(kernel: KernelSpec, constants: AmxConstants | ChainConstants, batch: int, tasks: int = TASKS) -> Counts:
    """Of one task, in the middle of a launch: a work group's, after another that warmed the caches. Of a chain: one block."""
    family = family_of(constants)
    shape = ChainShape(kernel, constants) if isinstance(constants, ChainConstants) else Shape(kernel, constants)
    with tempfile.TemporaryDirectory(prefix="ksgen-tiles-") as name:
        source = render(kernel, constants, dialect="opencl")
        path = Path(name, "kernel.cpp")
        path.write_text(source_of(source.text, source.entries))
        compiler = find_host_compiler()
        options = [each for each in options_of(compiler, None) if not each.startswith("-march")]
        library = Counted(compiler.command, (*options, *MARCH), path)
    geometry = family.geometry(kernel, constants, batch)
    groups = max(3, geometry.grid // tasks)
    packed = [each.packed_bytes for each in (shape.factors if isinstance(shape, ChainShape) else [shape])]
    sizes = {
        "x": batch * kernel.in_features * kernel.item_bytes,
        "weights": sum(packed),
        "y": batch * kernel.pattern.out_features * kernel.item_bytes,
        "own": geometry.group_bytes,
    }
    arrays = {name: Memory(size) for name, size in sizes.items()}
    own, middle = arrays["own"].begin, max(int(groups * WHERE), 2)
    ends = {name: (each.begin, each.begin + each.size) for name, each in arrays.items()}
    work_space, panels = (shape.work_space, shape.factors[0].panels) if isinstance(shape, ChainShape) else (shape.slot, shape.panels)
    split, between = own + panels * 4, own + work_space * 4  # in a chain, panels and sums of other factors lie otherwise
    library.watch(
        {
            **{name: ends[name] for name in ("x", "weights", "y")},
            "panel": (own, split),
            "sums": (split, between),
            "between": (between, ends["own"][1]),
        }
    )
    walk = getattr(library.library, f"{source.entry}__walk")

    def run(group: int) -> None:
        at = own - group * geometry.group_bytes  # each runs in the same memory
        weights = [arrays["weights"].begin + sum(packed[:number]) for number in range(len(packed))]
        given = (ctypes.c_int64 * (6 + len(packed)))(arrays["x"].begin, *weights, arrays["y"].begin, at, batch)
        walk(given, ctypes.c_long(group), ctypes.c_long(group + 1), ctypes.c_long(groups))

    tasks_run = geometry.grid * (middle + 1) // groups - geometry.grid * middle // groups
    return counts_of(library, lambda number: run(middle - 2 + number), tasks_run)


def floor_cycles(kernel: KernelSpec, batch: int) -> float:
    """Of one core, all told: by the tiles' peak, and by what memory copies."""
    products = kernel.arithmetic.tiles.products if kernel.arithmetic.tiles else 1
    multiply = kernel.flops(batch) / 2 * products / PEAK
    return max(multiply, kernel.bytes(batch) / BYTES_PER_S) * GHZ * 1e9


def row(kernel: KernelSpec, constants: AmxConstants, batch: int, found: Counts) -> dict[str, Any]:
    grid = FAMILY.geometry(kernel, constants, batch).grid
    taken = found.cycles * grid / CORES
    dots = found.total("dots")
    phases = found.after
    longest = max(phases, key=lambda name: phases[name].cycles)
    return {
        "pattern": ",".join(map(str, kernel.pattern.shape)),
        "precision": kernel.precision,
        "layout": kernel.layout,
        "constants": " ".join(map(str, vars(constants).values())),
        "share": round(floor_cycles(kernel, batch) / taken, 3),
        "bound": f"{longest}: {phases[longest].bound_by}",
        **{name: round(phases[name].cycles / found.cycles, 3) if name in phases else "" for name in PHASES},
        "tile loads": round(found.total("tile_loads") / dots, 3),
        "tile stores": round(found.total("tile_stores") / dots, 3),
        "loads": round(found.total("loads") / dots, 3),
        "stores": round(found.total("stores") / dots, 3),
        "bytes near": round(64 * found.total("near_lines") / dots),
        "bytes behind": round(64 * found.total("far_lines") / dots),
        "bytes far": round(64 * found.total("memory_lines") / dots),
        "cycles": round(found.cycles / dots, 1),
        "ms": round(taken / GHZ / 1e6, 3),
        **{f"{name} by": phases[name].bound_by if name in phases else "" for name in PHASES[:3]},
    }


@click.command()
@click.argument("given", nargs=-1)
@click.option("--patterns", type=click.IntRange(min=1), default=60, show_default=True, help="How many of the stratified ones.")
@click.option("--skip", default=0, show_default=True, help="How many of them to leave out, the first.")
@click.option("--most", type=int, help="The last of them to take.")
@click.option("--precision", default="bfloat16,bf16x6", show_default=True)
@click.option("--layout", default="bsf,bsl", show_default=True)
@click.option("--batch", default=6272, show_default=True)
@click.option("--set", "sets", multiple=True, help="A constant, such as block=64.")
@click.option("--layers", type=click.IntRange(min=1), help="So many layers instead: one launch of all factors beside a launch for each.")
@click.option("--lines", is_flag=True, help="Print where lines came from, by phase, array and kind of access.")
@click.option("--output", type=click.Path(dir_okay=False), help="A CSV file.")
def main(given: tuple[str, ...], sets: tuple[str, ...], **options: Any) -> None:
    """Print, of each kernel's default, what it counts for a product of tiles, and the share of the floor that follows. GIVEN: patterns,
    such as 1,768,192,2; else the stratified ones."""
    if options["layers"]:
        _print_layers(options)
        return
    chosen = [Pattern(*map(int, each.split(","))) for each in given] or stratified(options["patterns"])[options["skip"] : options["most"]]
    changes = {name: int(value) for name, _, value in (each.partition("=") for each in sets)}
    found: list[dict[str, Any]] = []
    for each in _rows(chosen, changes, options):
        found.append(each)
        click.echo(" ".join(f"{value}" for value in each.values()))
        if options["output"]:
            _write(Path(options["output"]), found)
    shares = [each["share"] for each in found]
    told = f"median {median(shares):.2f}, geometric mean {geometric_mean(shares):.2f}, least {min(shares):.2f}"
    click.echo(f"{len(found)} kernels: share of the floor, {told}")


def _rows(patterns: Sequence[Pattern], changes: dict[str, int], options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    batch = options["batch"]
    for pattern, precision, layout in product(patterns, options["precision"].split(","), options["layout"].split(",")):
        kernel = KernelSpec(pattern, precision, layout)
        constants = replace(FAMILY.default(kernel, CPU, batch), **changes)
        found = counted(kernel, constants, batch)
        for key, taken in sorted(found.taken.items()) if options["lines"] else ():
            lines = "".join(f"{each / found.total('dots'):9.3f}" for each in taken)
            click.echo("  " + " ".join(f"{word:<11}" for word in key) + lines)
        yield row(kernel, constants, batch, found)


def _print_layers(options: dict[str, Any]) -> None:
    """Of each layer: cycles of separate launches over those of one, and of both their cycles, products, and bytes from the second-level
    cache, from behind it, and of memory, for a product of tiles."""
    batch = options["batch"]
    layers = list(transformers().items())[: options["layers"]]
    for (name, chain), precision, layout in product(layers, options["precision"].split(","), options["layout"].split(",")):
        kernel = KernelSpec((chain.factors,), precision, layout, Epilogue())
        one = _of_launch(kernel, CHAIN_FAMILY.default(kernel, CPU, batch), batch)
        each = [_of_launch(factor, FAMILY.default(factor, CPU, batch), batch) for factor in factor_kernels(kernel)]
        apart = {key: sum(own[key] for own in each) for key in one}
        told = " | ".join(
            f"{own['cycles'] / 1e6:.2f} M cycles, "
            + ", ".join(f"{key} {64 * own[key] / own['dots']:.0f}" for key in ("near_lines", "far_lines", "memory_lines"))
            for own in (one, apart)
        )
        click.echo(f"{name} {precision} {layout}: {apart['cycles'] / one['cycles']:.2f}; {told}")


def _of_launch(kernel: KernelSpec, constants: AmxConstants | ChainConstants, batch: int) -> dict[str, float]:
    """All that its tasks do."""
    found, grid = counted(kernel, constants, batch), family_of(constants).geometry(kernel, constants, batch).grid
    lines = {
        "near_lines": ("near_lines", "fetched_near_lines"),
        "far_lines": ("far_lines", "fetched_far_lines"),
        "memory_lines": ("memory_lines",),
    }
    counts = {key: grid * sum(found.total(name) for name in names) for key, names in lines.items()}
    return {"cycles": grid * found.cycles, "dots": grid * found.total("dots"), **counts}


def _write(path: Path, found: Sequence[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as to:
        writer = csv.DictWriter(to, list(found[0]))
        writer.writeheader()
        writer.writerows(found)


if __name__ == "__main__":
    main()
