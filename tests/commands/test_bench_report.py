"""`ksgen bench report`: which file it reads, what it needs, what it refuses."""

import builtins
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench import report
from ksgen.bench.rows import ResultRow, write_csv
from ksgen.commands import bench
from ksgen.errors import KsgenError
from ksgen.install import install_line
from ksgen.spec import stratified
from tests.support.bench_report import FOUR
from tests.support.bench_rows import rows_of

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


@pytest.fixture(scope="module")
def rows() -> list[ResultRow]:
    return rows_of(stratified(40), ("float16",))


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(bench.command, ["report", *arguments])


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_csv(FOUR, Path("h200.csv"))
    done = invoke("h200.csv")
    assert done.exit_code == 0
    assert done.output.startswith("h200.html: ")
    assert Path("h200.html").read_text() == report.page(FOUR)
    done = invoke("h200.csv", "--markdown", "-")
    assert done.output.startswith("# Kronecker-sparse products: Abacus")
    printed = done.stdout
    done = invoke("h200.csv", "--markdown", "-", "-o", "page.html")
    assert (done.stdout, done.stderr.partition(": ")[0]) == (printed, "page.html")
    assert invoke("h200.csv", "--markdown", "tables.md", "-o", "page.html").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == {"h200.csv", "h200.html", "tables.md", "page.html"}
    done = invoke("h200.csv", "-o", "none/page.html")
    assert str(done.exception) == "none/page.html: cannot be written (No such file or directory)"


def test_no_matplotlib_is_one_line_and_markdown_needs_none(
    rows: list[ResultRow], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError("No module named 'matplotlib'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    path = tmp_path / "rows.csv"
    write_csv(rows, path)
    done = invoke(str(path))
    assert isinstance(done.exception, KsgenError)
    assert (
        str(done.exception)
        == f"pictures need matplotlib, which cannot be imported (No module named 'matplotlib'); {install_line('bench')}"
    )
    assert invoke(str(path), "--markdown", "-").exit_code == 0


def test_a_report_needs_no_pytorch(rows: list[ResultRow], tmp_path: Path) -> None:
    import subprocess

    write_csv(rows[:40], tmp_path / "rows.csv")
    program = "import sys; sys.modules['torch'] = None; from ksgen.cli import main; main()"
    command = [sys.executable, "-c", program, "bench", "report", "rows.csv", "--markdown", "-"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_page_is_of_the_file_that_bench_paper_writes_unless_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke()
    assert str(done.exception) == "paper.jsonl: cannot be read (No such file or directory)"


@pytest.mark.parametrize("option", ["-o", "--markdown", "--svg"])
def test_a_report_does_not_replace_its_results(option: str, tmp_path: Path, rows: list[ResultRow]) -> None:
    file = tmp_path / "h200.csv"
    write_csv(rows, file)
    before = file.read_bytes()
    done = invoke(str(file), option, str(file))
    assert str(done.exception) == f"{file}: it is an input of this command; choose another file to write"
    assert file.read_bytes() == before
