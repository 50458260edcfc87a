"""show, doctor and cache: what they say, and what a mistake prints."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ksgen.build.cache import Cache
from ksgen.build.request import Binary, Request, Resources
from ksgen.cli import cli
from ksgen.errors import KsgenError


def run(*arguments: str, **environment: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), env=environment)


def test_show_gives_sizes_and_costs() -> None:
    (facts,) = json.loads(run("show", "2,48,192,1", "--batch", "1000", "--json").stdout)["patterns"]
    assert (facts["rows"], facts["columns"], facts["weights"], facts["density"]) == (96, 384, 18432, 0.5)
    assert facts["gflop"] == pytest.approx(2 * 1000 * 18432 / 1e9)
    assert facts["mbyte"] == pytest.approx(4 * (1000 * 480 + 18432) / 1e6, rel=1e-5)
    assert facts["threads"] % 32 == 0


def test_show_of_a_chain_and_of_a_spec() -> None:
    chain = run("show", "2,48,192,1", "1,192,48,2")
    assert "chain: 2,48,192,1 then 1,192,48,2, 384 -> 384, 25.0% of dense" in chain.stdout
    spec = run("show", "--spec", "specs/vit.yaml")
    assert "attention: 2,48,192,1 then 1,192,48,2" in spec.stdout
    assert spec.stdout.count("weights in") == 6


def test_patterns_are_arguments_or_options() -> None:
    once, again = "2,48,192,1", "1,192,48,2"
    usual = run("show", once, again).stdout
    assert run("show", once, "--pattern", again).stdout == usual
    assert run("show", "--pattern", once, "--pattern", again).stdout == usual


@pytest.mark.parametrize("columns", ["0", "-1", "", "3", "39", "80", "9" * 5000, "²", "x"])
@pytest.mark.parametrize("command", [("show", "1,192,48,2"), ("doctor",)])
def test_any_width_shows_all_that_there_is(command: tuple[str, ...], columns: str) -> None:
    usual, done = (run(*command, COLUMNS=width, LINES=width) for width in ("80", columns))
    assert done.exit_code == usual.exit_code, done.exception
    if columns in ("3", "39"):
        assert max(map(len, done.stdout.splitlines())) <= 40
        assert re.sub(r"\W", "", done.stdout)[:40] == re.sub(r"\W", "", run(*command, COLUMNS="40").stdout)[:40]
    else:
        assert done.stdout == usual.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give patterns such as 1,192,48,2, or --spec FILE: one of the two"),
        (["1,2,3,1", "9,9,9,1"], "1,2,3,1 gives 2 features and 9,9,9,1"),
        (["1,2,3,1", "1,2,2,1", "--png", "x.png"], "--png draws one pattern; got 2"),
        (["1,2,3,1", "--png", "/nowhere/x.png"], "/nowhere/x.png: cannot be written (No such file or directory)"),
        (["1,2"], "'1,2' is not a pattern"),
    ],
)
def test_mistakes_of_show(arguments: list[str], message: str) -> None:
    caught = run("show", *arguments).exception
    assert isinstance(caught, KsgenError)
    assert str(caught).startswith(message)


def test_doctor_names_what_is_there_and_what_installs_the_rest() -> None:
    rows = {row["what"]: row for row in json.loads(run("doctor", "--json").stdout)}
    assert {"ksgen", "Python", "launchers take", "nvcc", "nvrtc", "cache", "wisdom"} <= set(rows)
    for row in rows.values():
        assert bool(row["found"]) != bool(row["why"])
    assert "launchers take" in run("doctor").stdout


def test_a_cache_folder_that_cannot_be_is_no_traceback() -> None:
    for command in (["cache", "ls"], ["doctor", "--json"]):
        done = run(*command, KSGEN_CACHE_DIR="x" * 300)
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert "0 entries, 0.0 MB in " in done.stdout


def test_doctor_without_any_device_says_so_and_exits_1() -> None:
    done = run("doctor", "--json", KSGEN_DEVICE="abacus")
    chosen = next(row for row in json.loads(done.stdout) if row["what"] == "launchers take")
    assert done.exit_code == 1
    assert "none is called that" in chosen["why"]


def test_doctor_without_pycuda_is_one_line_and_no_traceback() -> None:
    program = "import sys; sys.modules['pycuda'] = None; from ksgen.cli import cli; cli.main(['doctor', '--json'], standalone_mode=False)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    row = next(row for row in json.loads(done.stdout) if row["what"] == "GPU by PyCUDA")
    assert row["found"] == ""
    assert "pip install pycuda" in row["remedy"]
    assert "Traceback" not in done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    cache = Cache(tmp_path / "cache")
    for name in ("ks_one", "ks_two"):
        provenance = {"compiler": "nvcc", "compiler_version": "13.0", "options": "[]"}
        cache.put(Request(f"text of {name}", name, "sm_90a"), Binary(b"code" * 100, name, "sm_90a", Resources(), provenance))
    return cache.path


def test_cache_ls_lists_what_is_there(folder: Path) -> None:
    rows = json.loads(run("cache", "ls", "--json", "--folder", str(folder)).stdout)
    assert sorted((row["entry"], row["target"], row["compiler"]) for row in rows) == [
        ("ks_one", "sm_90a", "nvcc 13.0"),
        ("ks_two", "sm_90a", "nvcc 13.0"),
    ]
    assert run("cache", "ls", "--folder", str(folder)).stdout.splitlines()[-1].startswith("2 entries, ")
    assert run("cache", "ls", "--folder", str(folder / "none")).stdout == f"0 entries, 0.0 MB in {folder / 'none'}\n"


def test_cache_verify_finds_damage(folder: Path) -> None:
    assert run("cache", "verify", "--folder", str(folder)).exit_code == 0
    binary = next(folder.glob("*/*/binary"))
    binary.write_bytes(b"c0de" * 100)
    done = run("cache", "verify", "--folder", str(folder))
    assert done.exit_code == 1
    assert str(binary.parent) in done.stdout
    assert "1 damaged" in done.stdout


def test_cache_gc_and_clear(folder: Path) -> None:
    assert "freed" in run("cache", "gc", "--max-bytes", "1k", "--folder", str(folder)).stdout
    assert len(list(Cache(folder).entries())) <= 1
    unanswered = run("cache", "clear", "--folder", str(folder))
    assert str(unanswered.exception) == f"{folder}: nothing was removed; answer y, or give --yes"
    assert run("cache", "clear", "--yes", "--folder", str(folder)).exit_code == 0
    assert list(Cache(folder).entries()) == []


def test_mistakes_of_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for arguments, message in (
        (["gc", "--max-bytes", "12x"], "--max-bytes '12x': give a number of bytes, such as 500000000, 500M or 2G"),
        (["gc", "--max-bytes", "9" * 400], "--max-bytes '999"),
        (["ls", "--folder", str(tmp_path / "file")], f"{tmp_path / 'file'} is not a folder; name the cache's folder"),
    ):
        caught = run("cache", *arguments).exception
        assert isinstance(caught, KsgenError)
        assert str(caught).startswith(message)
