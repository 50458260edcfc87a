"""Every command's `--json` keeps to the schema of docs/json.md."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.cli import COMMANDS, cli
from ksgen.commands.common import json_text, tidy
from ksgen.devices import Found, list_devices
from ksgen.wisdom import save
from tests.commands.test_wisdom import entry
from tests.support.program import needs_compiler

has_opencl = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not has_opencl, reason="no OpenCL device: pip install 'ksgen[cpu]'")
FIELDS = ("kernel", "job", "pattern", "precision", "layout", "epilogue", "batch")
SMALL = ("--pattern", "2,8,8,3", "--batch", "40", "--device", "opencl", "--json")
OTHERS = {  # that have --json, and rows of no kernels; their own tests read them
    "emit", "bundle", "doctor", "cache ls", "cache verify", "bench model", "bench paper", "bench layers", "bench table",
    "bench energy", "bench share",
}  # fmt: skip
CHECKED = {"run", "demo", "calibrate", "tune", "show", "build", "wisdom show", "wisdom diff"}


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "small.yaml").write_text("kernels: ['2,8,8,3']\n")


def printed_json(*arguments: str) -> Any:
    done = CliRunner().invoke(cli, arguments)
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def check(row: dict[str, Any]) -> None:
    assert [name for name in FIELDS if name not in row] == []
    assert [type(size) for size in row["pattern"]] == [int] * 4
    assert row["job"] in ("multiply", "gradient")
    assert set(row["epilogue"]) == {"bias", "activation", "residual"}
    assert row["batch"] is None or row["batch"] >= 1
    assert isinstance(row.get("constants", {}), dict)
    assert ("constants" in row) == ("family" in row)


def numbers(content: Any, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(content, dict):
        for each, value in content.items():
            yield from numbers(value, each)
    elif isinstance(content, list):
        for value in content:
            yield from numbers(value, name)
    elif isinstance(content, float):
        yield name, content


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield the names of the commands that have --json."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, (*words, name))
        elif any("--json" in option.opts for option in command.params):
            yield " ".join((*words, name))


def test_every_command_with_json_is_looked_at() -> None:
    from types import SimpleNamespace

    group = SimpleNamespace(commands={name: cli.get_command(None, name) for name in COMMANDS})
    assert set(commands(group)) == OTHERS | CHECKED


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(
    "arguments", [("run", *SMALL, "--runs", "2"), ("run", *SMALL, "--job", "gradient", "--runs", "2")]
)
def test_run(arguments: tuple[str, ...]) -> None:
    row = printed_json(*arguments)
    check(row)
    assert (row["pattern"], row["precision"], row["layout"], row["batch"]) == ([2, 8, 8, 3], "float32", "bsf", 40)
    for name, value in numbers(row):
        assert value == tidy(value, name)
        assert len(f"{value:.12g}".partition(".")[2]) <= 3 or not name.endswith("_us")


@pytest.mark.exhaustive
@needs_opencl
@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (("demo", "small.yaml", "--batch", "40", "--device", "opencl", "--json"), "kernels"),
        (("tune", *SMALL, "--budget", "2"), "kernels"),
        (("calibrate", *SMALL), "kernels"),
        (("tune", *SMALL, "--noise"), "kernels"),
        (("show", "2,8,8,3", "4,6,2,6", "--json"), "patterns"),
    ],
)
def test_rows(arguments: tuple[str, ...], rows: str) -> None:
    content = printed_json(*arguments)
    assert content[rows]
    for row in content[rows]:
        check(row)
    assert content == tidy(content)
    for chain in content.get("layers", {}).values():
        assert chain["patterns"] == [[2, 8, 8, 3], [4, 6, 2, 6]]


@needs_compiler
def test_build() -> None:
    for row in printed_json("build", "small.yaml", "--arch", "sm_80", "--json"):
        check(row)


def test_wisdom(tmp_path: Path) -> None:
    save("Abacus", [entry(5.004000000001)])
    (row,) = printed_json("wisdom", "show", "--json")
    check(row)
    assert row["median_us"] == 5.004
    (file,) = (tmp_path / "wisdom").glob("*.json")
    (tmp_path / "none.json").write_text('{"device": "Abacus", "entries": []}')
    (row,) = printed_json("wisdom", "diff", str(file), str(tmp_path / "none.json"), "--json")
    check(row)
    check(row["first"])


def test_numbers_have_no_more_digits_than_they_are_worth() -> None:
    content = {
        "median_us": 85.00399999999999,
        "dense_us": {"low": 1.23456},
        "error": 1.23456789e-07,
        "batch": 25088,
        "list": [0.1 + 0.2],
    }
    assert tidy(content) == {
        "median_us": 85.004,
        "dense_us": {"low": 1.235},
        "error": 1.23457e-07,
        "batch": 25088,
        "list": [0.3],
    }


def test_numbers_that_are_not_finite_are_null() -> None:
    content = {"error": float("nan"), "floor_us": float("inf"), "list": [-float("inf"), 1.5], "text": "NaN é"}
    found = json.loads(json_text(content), parse_constant=pytest.fail)
    assert found == {"error": None, "floor_us": None, "list": [None, 1.5], "text": "NaN é"}
