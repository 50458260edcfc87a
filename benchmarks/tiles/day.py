"""What a machine with matrix tiles is to show, by one command: `python -m benchmarks.tiles.day -o FOLDER`. Run again, it goes on.

Bfloat16 and float32 in the precision of its users beside PyTorch's ways, for the stratified patterns, with errors and shares of the floor
(the copy, or the tiles' peak by a loop of their products); whole layers, all factors in one launch beside a launch for each, by vectors and
by tiles; ViT-S/16 and GPT-2 medium in bfloat16 by vectors and by tiles. Then a table of what was wanted and what was found. `--played`
tries all of it on a processor without tiles: what it times says nothing.
"""

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean, median

import click

from ksgen.bench import roster
from ksgen.bench.roster import EACH_FACTOR, ONE_LAUNCH, OUR_WAYS, OURS, PYTORCH
from ksgen.bench.rows import Row, read_rows
from ksgen.families import FAMILIES
from ksgen.spec import LAYOUTS, KernelSpec

ROOT = Path(__file__).parents[2]
TILES, SIX = ("amx", "amx_chain", "amx_gradient"), "bf16x6"
WAYS = ("vectors", "tiles")
LAYER = "layer"  # which chooses by itself: not asked here
PYTORCH_LAYERS = tuple(name for name in roster.WAYS if name not in (*OUR_WAYS, LAYER))
COMPUTE_BOUND = "where compute bounds"
MODELS = {"vit-s16": ("whole", 0.55), "gpt2-medium": ("block", 0.35)}  # what counts of each, and its time over dense at most


@dataclass(frozen=True)
class Line:
    """Of what was wanted. `found`: none where nothing was measured."""

    what: str
    wanted: str
    found: float | None
    is_met: bool | None

    def __str__(self) -> str:
        if self.found is None:
            return f"| {self.what} | {self.wanted} | not measured | |"
        return f"| {self.what} | {self.wanted} | {self.found:.2f} | {'yes' if self.is_met else 'no'} |"


def at_least(what: str, least: float, found: Sequence[float], summed_up: Callable[[Sequence[float]], float]) -> Line:
    value = summed_up(found) if found else None
    return Line(what, f"{least:.2f} or more", value, None if value is None else value >= least)


# ---- what was found


Key = tuple[str, str, int]


def fastest(rows: Sequence[Row], wanted: Callable[[Row], bool]) -> dict[Key, Row]:
    """The fastest row that counts, by pattern, layout and batch size."""
    found: dict[Key, Row] = {}
    for row in rows:
        key = (row.pattern, row.layout, row.batch)
        if row.counts and wanted(row) and (key not in found or (row.median_us or 0) < (found[key].median_us or 0)):
            found[key] = row
    return found


def ratios(rows: Sequence[Row], ours: Callable[[Row], bool], others: Callable[[Row], bool], layout: str) -> dict[Key, float]:
    """The best other's time over our best, by pattern and batch size."""
    one, other = fastest(rows, ours), fastest(rows, others)
    both = [key for key in one if key in other and key[1] == layout]
    return {key: (other[key].median_us or 0) / (one[key].median_us or 1) for key in both}


def is_compute_bound(row: Row) -> bool:
    kernel = KernelSpec(row.shape, row.arithmetic, row.layout)
    flops, rate = row.ceiling_flop_per_s, row.ceiling_byte_per_s
    return bool(flops and rate and kernel.flops(row.batch) / flops > kernel.bytes(row.batch) / rate)


def by_tiles(row: Row) -> bool:
    return row.implementation == OURS and row.family in TILES


def lines_of_products(rows: Sequence[Row]) -> Iterator[Line]:
    small = [row for row in rows if row.precision == "bfloat16"]
    whole = [row for row in rows if row.precision == "float32"]
    for layout in LAYOUTS:
        found = [*ratios(small, by_tiles, lambda row: row.implementation in PYTORCH, layout).values()]
        yield at_least(f"bfloat16, {layout}: tiles over the best of PyTorch, geometric mean", 2.0, found, geometric_mean)
        yield at_least(f"bfloat16, {layout}: the same, least", 1.0, found, min)
        found = [*ratios(small, by_tiles, lambda row: row.implementation == OURS and not by_tiles(row), layout).values()]
        yield at_least(f"bfloat16, {layout}: tiles over our vectors, geometric mean", 1.0, found, geometric_mean)
        own, times = (
            fastest(whole, by_tiles),
            ratios(whole, by_tiles, lambda row: not by_tiles(row) and row.implementation in (OURS, *PYTORCH), layout),
        )
        bound = [ratio for key, ratio in times.items() if is_compute_bound(own[key])]
        yield at_least(f"{SIX}, {layout}: over the best float32 way, {COMPUTE_BOUND}, geometric mean", 1.6, bound, geometric_mean)
        yield at_least(f"{SIX}, {layout}: the same, of all, least", 1.0, [*times.values()], min)
        for name, some in (("bfloat16", small), (SIX, whole)):
            shares = [row.share_of_floor for key, row in fastest(some, by_tiles).items() if key[1] == layout and row.share_of_floor]
            yield at_least(f"{name}, {layout}: share of the floor, median", 0.6, shares, median)


def lines_of_layers(rows: Sequence[Row]) -> Iterator[Line]:
    """All factors in one launch of tiles, beside a launch of tiles for each, our vectors either way, and PyTorch's ways."""

    def are(implementations: Sequence[str], arithmetic: str, is_by_tiles: bool) -> Callable[[Row], bool]:
        def wanted(row: Row) -> bool:
            known = row.implementation in implementations and row.arithmetic == arithmetic
            return known and is_by_tiles == (row.family in TILES)

        return wanted

    for precision, arithmetic in (("bfloat16", "bfloat16"), ("float32", SIX)):
        own, one = [row for row in rows if row.precision == precision], are((ONE_LAUNCH,), arithmetic, True)
        others = {
            "a launch of tiles for each factor": are((EACH_FACTOR,), arithmetic, True),
            "our vectors, one launch or several": are((ONE_LAUNCH, EACH_FACTOR), precision, False),
            "the best of PyTorch": lambda row: row.implementation in PYTORCH_LAYERS,
        }
        for layout, (name, other) in ((layout, each) for layout in LAYOUTS for each in others.items()):
            found = [*ratios(own, one, other, layout).values()]
            yield at_least(f"layers, {arithmetic}, {layout}: one launch of tiles over {name}, geometric mean", 1.0, found, geometric_mean)
            yield at_least(f"layers, {arithmetic}, {layout}: the same, least", 1.0, found, min)


def lines_of_models(folder: Path) -> Iterator[Line]:
    for (model, (module, most)), way in ((each, way) for each in MODELS.items() for way in WAYS):
        path = folder / f"{model}-{way}.json"
        told = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
        found = next((row["ratio"]["median"] for row in told if row["module"] == module), None)
        yield Line(
            f"{model} in bfloat16 by {way}, {module}: time over dense", f"{most:.2f} or less", found, found is not None and found <= most
        )


def log_of_layers(way: str) -> str:
    return f"layers-{way}.jsonl"


def _rows(log: Path, is_played: bool) -> list[Row]:
    rows = read_rows(log) if log.exists() else []
    return [replace(row, doubt="") for row in rows] if is_played else rows  # nothing that is played is believed anyway


def table(folder: Path, is_played: bool = False) -> str:
    products, *layers = (_rows(folder / name, is_played) for name in ("paper.jsonl", *map(log_of_layers, WAYS)))
    lines = [*lines_of_products(products), *lines_of_layers([row for each in layers for row in each]), *lines_of_models(folder)]
    return "\n".join(("| what | wanted | found | met |", "| --- | --- | --- | --- |", *map(str, lines), ""))


# ---- what is run


def begin(is_played: bool, tiles_first: bool) -> None:
    """In a process of its own: before `ksgen` runs in it."""
    if is_played:
        from ksgen.devices.native import open_device

        device = open_device(0)
        device.limits = replace(device.limits, tiles=("bf16",))
    for name in TILES if tiles_first else ():
        type(FAMILIES[name]).by_default = True


def run(is_played: bool, tiles_first: bool, *words: str) -> None:
    """`ksgen`, as on a processor with tiles, and with tiles wherever they serve."""
    code = f"from benchmarks.tiles.day import begin; begin({is_played}, {tiles_first}); from ksgen.cli import main; main()"
    click.echo(f"ksgen {shlex.join(words)}{' (by tiles)' if tiles_first else ''}", err=True)
    environment = {**os.environ, "KSGEN_DEVICE": "native", "PYTHONPATH": os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))}
    done = subprocess.run([sys.executable, "-c", code, *words], env=environment, check=False)
    if done.returncode:
        raise click.ClickException(f"ksgen {shlex.join(words)} ended with {done.returncode}; run this again to go on")


@click.command()
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), required=True, help="A folder for all that is measured.")
@click.option("--subset", default=60, show_default=True, help="How many patterns.")
@click.option("--patterns", help="These patterns instead, such as '1,192,48,2 2,48,192,1'.")
@click.option("--batch", default=6272, show_default=True)
@click.option("--most-seconds", default=2.0, show_default=True, help="Per contender and pattern.")
@click.option("--layers", type=click.IntRange(min=0), default=24, show_default=True, help="How many layers.")
@click.option("--models", default=",".join(MODELS), show_default=True, help="Or none.")
@click.option("--played", is_flag=True, help="Play tiles, slowly: to try this command.")
def main(output: Path, subset: int, patterns: str | None, batch: int, most_seconds: float, layers: int, models: str, played: bool) -> None:
    """Measure all that is wanted of matrix tiles, and print it."""
    output.mkdir(parents=True, exist_ok=True)
    which = ("--patterns", patterns) if patterns else ("--subset", str(subset), "--most-gflop", "8")
    ways = ("--precision", "bfloat16,float32", "--without", "compiled,scipy,lazylinop,rewriting", "--device", "native")
    run(
        played, False, "bench", "paper", *which, "--batch", str(batch), *ways, "--most-seconds", str(most_seconds),
        "-o", str(output / "paper.jsonl"),
    )  # fmt: skip
    for way in WAYS if layers else ():
        what = ("--subset", str(layers), "--batch", str(batch), "--precision", "bfloat16,float32", "--without", LAYER, "--device", "native")
        run(played, way == "tiles", "bench", "layers", *what, "--most-seconds", str(most_seconds), "-o", str(output / log_of_layers(way)))
    for model in () if models == "none" else models.split(","):
        for way in WAYS:
            path = output / f"{model}-{way}.json"
            if not path.exists():
                how = ("--device", "cpu", "--precision", "bfloat16", "--backend", OURS)
                run(played, way == "tiles", "bench", "model", model, *how, "-o", str(path))
    found = table(output, played)
    (output / "wanted.md").write_text(found, encoding="utf-8")
    click.echo(found)


if __name__ == "__main__":
    main()
