"""Figures of README and of two pages of docs are those of the result files."""

import importlib.util
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ksgen.bench.rows import ResultRow, write_csv
from tests.support.bench_rows import row

ROOT = Path(__file__).parents[2]


def script() -> Any:
    described = importlib.util.spec_from_file_location("readme_figures", ROOT / "benchmarks" / "readme_figures.py")
    assert described
    assert described.loader
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def test_pages_say_what_the_files_say() -> None:
    done = CliRunner().invoke(script().main, ["--check"])
    assert done.exit_code == 0, done.output


def machine(folder: Path, runtime: str, *rows: ResultRow) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "paper.csv"
    write_csv([row(runtime=runtime, median_us=50.0), row(implementation="bmm", runtime=runtime), *rows], path)
    return path


def test_the_page_of_benchmarks_has_a_part_per_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script()
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    page = tmp_path / "docs" / "benchmarks.md"
    for name, runtime in (("processor", "opencl"), ("abacus", "driver")):
        machine(tmp_path / name, runtime)
    shown, pictures = figures.benchmarks_figures(tmp_path, page)
    for name in ("abacus", "processor"):
        command = f"ksgen bench report {name}/paper.csv"
        assert shown.count(f"Abacus, 2026-01-02, commit c0ffee. All results: `{command}`.") == 1
        assert f"](../{name}/paper.svg)" in shown
        assert pictures[tmp_path / name / "paper.svg"].count('class="bar"') == 2
    assert "| 25088 | float32 | bsl | 1 | 100 % | x2.00 |" in shown
    assert figures.NOTHING not in shown
    machine(tmp_path / "abacus", "driver", row(precision="bfloat16", commit="facade" * 4))
    when = (
        "Abacus, float32 at batch 25088: 2026-01-02, commit c0ffee. bfloat16 at batch 25088: 2026-01-02, commit "
        "facadefacade. All"
    )
    assert when in figures.benchmarks_figures(tmp_path, page)[0]
    (tmp_path / "processor" / "machine.txt").write_text("An abacus with ten rods\n")
    assert figures.benchmarks_figures(tmp_path, page)[0].count("### An abacus with ten rods\n") == 1
    shutil.rmtree(tmp_path / "abacus")
    assert figures.benchmarks_figures(tmp_path, page)[0].startswith(figures.NOTHING)
    shutil.rmtree(tmp_path / "processor")
    assert figures.benchmarks_figures(tmp_path, page) == (figures.NOTHING, {})


def test_the_page_of_benchmarks_has_losses_of_processors_and_conversions(tmp_path: Path) -> None:
    figures, page = script(), tmp_path / "docs" / "benchmarks.md"
    machine(tmp_path / "abacus", "native", row("1,4,4,2", median_us=9.0), row("1,4,4,2", "einsum", median_us=8.0))
    machine(tmp_path / "gpu", "driver", row("1,8,8,2", median_us=9.0), row("1,8,8,2", "einsum", median_us=8.0))
    common = {"layer": "vit up", "layout": "bsf", "batch": 1568, "runtime": "native", "step": "forward"}
    both = (("layer", 10.0, None), ("grouped", 5.0, 2.5))
    rows = [row("1,4,4,2", way, median_us=us, conversion_us=taken, **common) for way, us, taken in both]
    write_csv(rows, tmp_path / "abacus" / "layers.csv")
    figures.ROOT = tmp_path
    shown, _ = figures.benchmarks_figures(tmp_path, page)
    losses = shown.partition("### Where ksgen loses on processors")[2]
    assert "| 1,4,4,2 | float32 | bsl | 25088 | einsum | x0.89 | 9 |" in losses
    assert "| vit up, forward | float32 | bsf | 1568 | grouped | x0.50 | 10 |" in losses
    assert "1,8,8,2" not in losses  # a GPU's
    assert "The others that were measured are bmm and einsum." in shown
    assert "whole layers, conversion of weights" in shown
    assert "| bsf | grouped | 1 | 0.005 | 0.0025 | 0.5 | - |" in shown


def write_table(folder: Path, layers: int, us: float = 10.0) -> None:
    """Write a table's file: two patterns, as many layers as named, and a model; some are trained."""
    common = {"runtime": "native", "layout": "bsf", "batch": 1568, "floor_us": 5.0}
    rows = []
    for name, layer_us, other, other_us in (("1,4,4,2", 4.0, "scipy", 2.0), ("1,8,8,2", 4.0, "bmm", 8.0)):
        each_us = (("ksgen", 4.0), ("layer", layer_us), (other, other_us))
        rows += [row(name, way, median_us=each, **common) for way, each in each_us]
    for way, each in (("layer", 4.0), ("bmm", 8.0)):
        rows.append(row("1,4,4,2", way, median_us=each, step="training", **common))
    named = [f"ViT-S up, monarch {number}" for number in range(layers)]
    for layer, step in product(named, ("forward", "training")):
        times = (("layer", us), ("authors", 20.0), ("dense", 30.0))
        chain = "6,64,64,1 then 1,768,192,2"
        rows += [row(chain, way, median_us=each, layer=layer, step=step, **common) for way, each in times]
    model = {**common, "layer": "vit-s16", "batch": 8, "floor_us": None, "step": "training"}
    rows += [row("whole model", way, median_us=each, **model) for way, each in (("layer", 2e6), ("dense", 1e6))]
    rows.append(row("1,8,8,2", "lazylinop", status="unsupported", reason="no bsf", median_us=None, **common))
    folder.mkdir(exist_ok=True)
    write_csv(rows, folder / "table.csv")


def test_a_table_takes_the_place_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures, page, folder = script(), tmp_path / "docs" / "benchmarks.md", tmp_path / "abacus"
    machine(folder, "native", row("1,16,16,2", median_us=9.0), row("1,16,16,2", "einsum", median_us=8.0))
    shutil.copy(folder / "paper.csv", folder / "layers.csv")
    write_table(folder, 2, us=25.0)
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    shown, pictures = figures.benchmarks_figures(tmp_path, page)
    assert list(pictures) == [folder / "table.svg"]
    assert "All results: `ksgen bench report abacus/table.csv`." in shown
    assert "paper.csv" not in shown
    assert "whole layers" not in shown
    for line in (
        "| forward, patterns | float32 | bsf | 1568 | 2 of 2 | x1.00 | x0.50 | x2.00 | 50 % | 1,4,4,2 | x1.00 |",
        "| training steps | float32 | bsf | 1568 | 2 of 2 | x0.80 | x0.80 | x0.80 | 0 % | ViT-S up, monarch 0 | - |",
        "### Abacus: each contender compared with a KSLinear",
        "| scipy | x0.50 (1 of 1) | - | - |",
        "| authors | - | x0.80 (2 of 2) | x0.80 (2 of 2) |",
        "### Abacus: whole models",
        "| vit-s16 | training steps | float32 | 8 | 2000 | - | - | x0.50 |",
        "### Abacus: contenders and their versions",
        "| lazylinop | - | 0 of 1 row | 1 unsupported: no bsf |",
    ):
        assert line in shown
    losses = shown.partition("### Where ksgen loses on processors")[2].partition("###")[0]
    for line in (
        "| Abacus | vit-s16, training steps | float32 | bsf | 8 | dense | x0.50 | 2000000 |",
        "| Abacus | 1,4,4,2, forward | float32 | bsf | 1568 | scipy | x0.50 | 4 |",
        "| Abacus | ViT-S up, monarch 1, training steps | float32 | bsf | 1568 | authors | x0.80 | 25 |",
    ):
        assert line in losses
    assert losses.count("| Abacus |") == 6
    monkeypatch.setattr(figures, "MOST_LOSSES", 2)  # the worst ones
    losses = figures.benchmarks_figures(tmp_path, page)[0].partition("### Where ksgen loses on processors")[2]
    assert losses.count("| Abacus |") == losses.partition("###")[0].count("| x0.50 |") == 2


def test_readme_prefers_a_table_with_enough_layers(tmp_path: Path) -> None:
    figures = script()
    common = {"layer": "vit up", "layout": "bsf", "batch": 1568, "floor_us": 5.0, "runtime": "native"}
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = [row("6,64,64,1 then 1,768,192,2", way, **common) for way in ("layer", "dense")]
        write_csv(rows, tmp_path / name / "layers.csv")
    write_table(tmp_path / "b", figures.LEAST_LAYERS - 1)
    assert "| all of them | 1 | x1.00 |" in figures.readme_figures(tmp_path)[0]
    write_table(tmp_path / "b", figures.LEAST_LAYERS)
    shown, _ = figures.readme_figures(tmp_path)
    assert "| Monarch | 8 | x3.00 | x2.00 | x2.00 | x2.00 | 50 % |" in shown
    assert "These are dense and authors." in shown  # not those of patterns
    work = "On that machine, all batches and precisions, forward and in training, make"
    assert f"{work} 19 comparisons with the best other method." in shown
    assert "in 95 % of them. The mean speed-up is x1.86, the range x0.50 to x2.00" in shown


def test_readme_names_what_float32_is_multiplied_in(tmp_path: Path) -> None:
    figures, folder = script(), tmp_path / "abacus"
    machine(folder, "driver")
    before, after = "(docs/benchmarks.md#what-is-measured).", "In layout bsf, X is (batch, features)"
    assert f"{before} {after}" in figures._on_gpus(tmp_path)
    machine(folder, "driver", row(arithmetic="tf32x3", runtime="driver"))
    said = "In float32, ksgen may multiply in `tf32x3`, which launchers use only if asked."
    assert f"{before} {said} {after}" in figures._on_gpus(tmp_path)


def test_losses_without_a_reason_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script()
    page = ROOT / "docs" / "benchmarks.md"
    text = page.read_text(encoding="utf-8")
    assert figures.unexplained(text) == []
    before, title, rest = text.partition(f"## {figures.WHY}\n")
    reasons, *others = rest.partition("\n## ")
    assert "`dense`" in "".join(others)  # another section does not count
    assert figures.unexplained("".join((before, title, reasons.replace("`dense`", ""), *others))) == ["dense"]
    monkeypatch.setattr(figures, "written", lambda root: {page: text})
    monkeypatch.setattr(figures, "unexplained", lambda text: ["dense", "bmm"])
    done = CliRunner().invoke(figures.main, ["--check"])
    message = "docs/benchmarks.md: 'Why does ksgen lose there?' names no reason for dense, bmm; add it"
    assert (done.exit_code, message in done.output) == (1, True)


def test_readme_shows_layers_of_one_machine_a_gpus_first(tmp_path: Path) -> None:
    figures = script()
    assert figures.readme_figures(tmp_path) == (figures.NOTHING, "")
    common = {"layer": "vit up", "layout": "bsf", "batch": 1568, "floor_us": 5.0}
    for name, runtime, ours in (("a", "native", 10.0), ("b", "driver", 5.0)):
        times = (("layer", ours), ("one_launch", 1.0), ("bmm", 20.0), ("views", 15.0), ("dense", 40.0))
        (tmp_path / name).mkdir()
        rows = [row("6,64,64,1 then 1,768,192,2", way, median_us=us, runtime=runtime, **common) for way, us in times]
        write_csv(rows, tmp_path / name / "layers.csv")
    shown, picture = figures.readme_figures(tmp_path)
    assert "| ViT-S/16 | 1 | x8.00 | x3.00 | x3.00 | x3.00 | 100 % |" in shown
    assert "These are bmm, dense and views." in shown.replace("\n", " ")
    work = "On that machine, all batches and precisions, forward and in training, make"
    assert f"{work} 1 comparison with the best other method. A `KSLinear`" in shown
    assert figures.NOTHING.strip() not in shown
    for words in (
        "ViT-S/16 up, 384 to 1536",
        "dense",
        "40 us, x8.00",
        "best other",
        "15 us, x3.00",
        "5 us",
        "floor 5 us",
    ):
        assert f">{words}</text>" in picture
    shutil.rmtree(tmp_path / "b")
    shown, _ = figures.readme_figures(tmp_path)
    assert "| ViT-S/16 | 1 | x4.00 | x1.50 | x1.50 | x1.50 | 50 % |" in shown
    assert f"**{figures.NOTHING.strip()}**" in shown


def test_the_page_of_structures_has_sizes_and_times_of_each_machine(tmp_path: Path) -> None:
    figures, folder = script(), tmp_path / "benchmarks" / "results"
    sizes = figures.structures_figures(folder)
    assert "| `kronecker(1024, 4096, blocks=(64, 32))` | 4,096 | 196,608 | 5 % |" in sizes
    assert "| `dyad(1024, 4096, blocks=4)` | 2,097,152 | 2,097,152 | 50 % |" in sizes  # of both summands
    common = {"layer": "oft(1024, block=32)", "layout": "bsf", "runtime": "native"}
    measured = [("layer", 1, "forward", 10.0), ("authors", 1, "forward", 20.0), ("dense", 1, "training", 40.0)]
    rows = [
        row("32,32,32,1", way, batch=batch, step=step, median_us=us, **common)
        for way, batch, step, us in (*measured, ("layer", 16, "forward", 30.0))
    ]
    rows.append(row("32,32,32,1", "dense", batch=1, median_us=9.0, doubt="noisy", **common))
    (folder / "abacus").mkdir(parents=True)
    write_csv(rows, folder / "abacus" / "structures.csv")
    shown = figures.structures_figures(folder)
    assert shown.startswith(sizes)
    assert "### Abacus: 1 row, microseconds" in shown
    assert f"| `oft(1024, block=32)`, {rows[0].precision} | 10 | 20 | - | - | - | 40 |" in shown
    assert f"| `oft(1024, block=32)`, {rows[0].precision} | 30 | - | - | - | - | - |" in shown
    assert "All results: `ksgen bench report benchmarks/results/abacus/structures.csv`." in shown


def test_readme_leaves_an_uncertain_layer_out_of_all_columns(tmp_path: Path) -> None:
    common = {"layout": "bsf", "batch": 1568, "floor_us": 5.0, "runtime": "native"}
    rows = [
        row(chain, way, layer=layer, median_us=us, **common)
        for layer, chain, dense_us in (
            ("vit up", "6,64,64,1 then 1,768,192,2, bias", 40.0),
            ("vit attention", "2,48,192,1 then 1,192,48,2", 80.0),
        )
        for way, us in (("layer", 10.0), ("dense", dense_us))
    ]
    noisy = {"layer": "vit attention", "median_us": 90.0, "quartile1_us": 70.0, "doubt": "noisy"}
    rows.append(row("2,48,192,1 then 1,192,48,2", "bmm", **common, **noisy))
    (tmp_path / "a").mkdir()
    write_csv(rows, tmp_path / "a" / "layers.csv")
    shown, _ = script().readme_figures(tmp_path)
    assert "| ViT-S/16 | 1 | x4.00 | x4.00 | x4.00 | x4.00 | 50 % |" in shown


def test_figures_stand_between_the_marks_of_a_page(tmp_path: Path) -> None:
    figures, page = script(), tmp_path / "README.md"
    page.write_text(f"a\n{figures.BEGIN}old\n{figures.END}b\n")
    assert figures.updated(page, "new\n") == f"a\n{figures.BEGIN}new\n{figures.END}b\n"
    table, prose = f"| {'cell | ' * 40}\n", "word " * 40
    wrapped = f"{('word ' * 24).strip()}\n{('word ' * 16).strip()}\n"
    expected = f"a\n{figures.BEGIN}{table}\n{wrapped}{figures.END}b\n"
    assert figures.updated(page, f"{table}\n{prose}\n") == expected
    page.write_text("a")
    with pytest.raises(click.ClickException, match=r"README.md has no lines"):
        figures.updated(page, "new\n")


def test_a_file_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script()
    own = figures.written(ROOT)
    pages = ("docs/benchmarks.md", "docs/layers.svg", "docs/structures.md", "README.md")
    for changed in (ROOT / each for each in pages):
        monkeypatch.setattr(figures, "written", lambda root, changed=changed: {**own, changed: "other"})
        done = CliRunner().invoke(figures.main, ["--check"])
        assert done.exit_code == 1
        assert (
            f"{changed.relative_to(ROOT)} differs; write it again: python benchmarks/readme_figures.py" in done.output
        )
