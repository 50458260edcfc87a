"""Tables 4, 6 and 7: from the files of `ksgen bench model` and `ksgen bench share`, and on the page."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench import report
from ksgen.bench.rows import write_csv
from ksgen.bench.tables import markdown, tables_of
from ksgen.commands import bench
from ksgen.errors import KsgenError
from tests.support.bench_report import FOUR


def spread(middle: float) -> dict[str, float]:
    return {"low": 0.9 * middle, "median": middle, "high": 1.1 * middle}


def model_row(module: str, backend: str, ratio: float, **changes: Any) -> dict[str, Any]:
    row = {
        "module": module,
        "step": "forward",
        "precision": "float32",
        "backend": backend,
        "paper_ratio": 0.78,
        "doubt": "",
    }
    return row | {"dense_us": spread(2000.0), "sparse_us": spread(2000 * ratio), "ratio": spread(ratio)} | changes


MODEL = {
    "model": "vit-s16", "device": "an abacus", "batch": 8, "repeats": 7, "layers": ["qkv", "projection", "up", "down"],
    "rows": [
        model_row("block", "auto", 0.5),
        model_row("block", "bmm", 0.9, doubt="other processes took 80% of the CPU time"),
        model_row("whole", "auto", 0.6), model_row("whole", "bmm", 0.8), model_row("whole", "auto", 0.7,
            step="training", paper_ratio=None),
    ],
}  # fmt: skip
SHARE = {
    "device": "an abacus", "batch": 2, "repeats": 5,
    "shares": [{"model": "ViT-S/16", "doubt": "", "precision": "float32", "whole_us": 1234.0, "share": 0.405,
        "paper": 0.46}],
}  # fmt: skip


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / "model.json", tmp_path / "share.json"]
    for path, content in zip(paths, (MODEL, SHARE), strict=True):
        path.write_text(json.dumps(content))
    return paths


def test_a_table_for_each_precision_and_step(files: list[Path]) -> None:
    forward, training = tables_of(files[0])
    assert forward.title == "vit-s16 on an abacus, batch 8, float32, forward"
    assert forward.columns == ("module", "dense, ms", "auto", "bmm", "the paper")
    assert forward.rows[0] == ("block", "2.000", "0.50 (0.45-0.55)", "0.90? (0.81-0.99)", "0.78")
    assert "?: unreliable (other processes took 80% of the CPU time)." in forward.note
    assert "the median of 7 rounds" in forward.note
    assert (training.rows, "?" in training.note) == ((("whole", "2.000", "0.70 (0.63-0.77)", ""),), False)
    assert "with sparse down alone" in tables_of_content(files[0], MODEL | {"layers": ["down"]})[0].title
    (share,) = tables_of(files[1])
    assert share.rows == (("ViT-S/16", "float32", "1.23", "40 %", "46 %"),)


def tables_of_content(path: Path, content: Any) -> Any:
    path.write_text(json.dumps(content))
    return tables_of(path)


def test_a_module_of_a_killed_run_has_no_figures_of_other_backends(tmp_path: Path) -> None:
    rows = [model_row("block", "auto", 0.5), model_row("block", "bmm", 0.9), model_row("whole", "auto", 0.6)]
    (table,) = tables_of_content(tmp_path / "killed.json", MODEL | {"rows": rows})
    assert table.columns == ("module", "dense, ms", "auto", "bmm", "the paper")
    assert table.rows[1] == ("whole", "2.000", "0.60 (0.54-0.66)", "-", "0.78")


def test_they_stand_on_the_page(files: list[Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")
    rows = tmp_path / "rows.csv"
    write_csv(FOUR, rows)
    asked = [word for path in files for word in ("--with", str(path))]
    done = CliRunner().invoke(bench.command, ["report", str(rows), *asked])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "rows.html").read_text()
    for title in (
        "Whole models",
        "vit-s16 on an abacus, batch 8, float32, training",
        "Table 6: the share of a forward pass",
    ):
        assert title in page
    told = CliRunner().invoke(bench.command, ["report", str(rows), *asked, "--markdown", "-"]).output
    assert markdown(tables_of(files[0])[0]) in told
    assert "Whole models" not in report.page(FOUR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "{}",
            "not a file of this kind (KeyError: 'rows'); accepted: the JSON of `ksgen bench model`",
        ),
        ("[", "not a file of this kind (JSONDecodeError"),
        ('{"rows": [1]}', "not a file of this kind (TypeError"),
        ("[]", "not a file of this kind (TypeError"),
        ("[" * 10**5, "not a file of this kind (RecursionError"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(KsgenError) as caught:
        tables_of(tmp_path / "a.json")
    assert str(caught.value).startswith(f"{tmp_path / 'a.json'}: {message}")
    with pytest.raises(KsgenError, match=r"none\.json"):
        tables_of(tmp_path / "none.json")
