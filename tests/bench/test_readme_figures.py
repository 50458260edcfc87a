"""README's figures are those of the result files."""

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from ksgen.bench.rows import write_csv
from tests.support.bench_rows import row

ROOT = Path(__file__).parents[2]


def script() -> Any:
    described = importlib.util.spec_from_file_location("readme_figures", ROOT / "benchmarks" / "readme_figures.py")
    assert described
    assert described.loader
    module = importlib.util.module_from_spec(described)
    described.loader.exec_module(module)
    return module


def test_readme_says_what_the_files_say() -> None:
    done = CliRunner().invoke(script().main, ["--check"])
    assert done.exit_code == 0, "python benchmarks/readme_figures.py"


def test_figures_come_from_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script()
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    for name, runtime in (("processor", "opencl"), ("abacus", "driver")):
        (tmp_path / name).mkdir()
        write_csv([row(runtime=runtime, median_us=50.0), row(implementation="bmm", runtime=runtime)], tmp_path / name / "paper.csv")
    shown = figures.figures(tmp_path)
    for name in ("abacus", "processor"):
        assert shown.count(f"Abacus, 2026-01-02, commit c0ffee; all of it: `ksgen bench report {name}/paper.csv`.") == 1
    assert "| 25088 | float32 | bsl | 1 | 100 % | x2.00 |" in shown
    assert "ours beside the best of PyTorch" in shown
    write_csv([row(), row(precision="bfloat16", commit="facade" * 4)], tmp_path / "abacus" / "paper.csv")
    when = "Abacus, float32 at batch 25088: 2026-01-02, commit c0ffee; bfloat16 at batch 25088: 2026-01-02, commit facadefacade; all"
    assert when in figures.figures(tmp_path)
    assert figures.NOTHING not in shown
    assert "paper.png" not in shown
    (tmp_path / "processor" / "paper.png").touch()
    assert "](processor/paper.png)" in figures.figures(tmp_path)
    (tmp_path / "processor" / "machine.txt").write_text("An abacus with ten rods\n")
    assert figures.figures(tmp_path).count("### An abacus with ten rods\n") == 1
    shutil.rmtree(tmp_path / "abacus")
    assert figures.figures(tmp_path).startswith(figures.NOTHING)
    shutil.rmtree(tmp_path / "processor")
    assert figures.figures(tmp_path) == figures.NOTHING
    readme = f"a\n{figures.BEGIN}old\n{figures.END}b\n"
    assert figures.updated(readme, shown) == f"a\n{figures.BEGIN}{shown}{figures.END}b\n"
    assert figures.updated(figures.updated(readme, shown), "old\n") == readme
    assert figures.figures(tmp_path / "none") == figures.NOTHING
    with pytest.raises(click.ClickException, match=r"README.md has no lines"):
        figures.updated("a", shown)
