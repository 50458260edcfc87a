"""Rows: the same from a log, from CSV and from Parquet."""

import errno
import fcntl
import re
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ksgen.bench.rows import Log, read_log, read_rows, write_csv, write_parquet
from ksgen.errors import KsgenError
from tests.support.bench_rows import row
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench.problem import product_job  # noqa: E402
from tests.support.bench_runs import FACTS, JOB, measure  # noqa: E402


def test_rows_are_the_same_from_a_log_and_from_csv(log_text: str, tmp_path: Path) -> None:
    (tmp_path / "whole.jsonl").write_text(log_text)
    rows = read_rows(tmp_path / "whole.jsonl")
    write_csv(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


def test_older_files_lack_conversions(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv([row(conversion_us=12.5)], path)
    assert read_rows(path) == [row(conversion_us=12.5)]
    text = path.read_text().replace(",conversion_us,uncertainty\n", "\n").replace(",12.5,\n", "\n")
    assert "12.5" not in text
    path.write_text(text)
    assert read_rows(path) == [row()]


def test_a_table_from_a_spreadsheet_begins_with_a_mark(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv([row()], path)
    path.write_text(path.read_text(), encoding="utf-8-sig")
    assert read_rows(path) == [row()]


def test_rows_have_the_identity_of_the_log(log_text: str, tmp_path: Path) -> None:
    (tmp_path / "whole.jsonl").write_text(log_text)
    assert all(each.identity for each in read_rows(tmp_path / "whole.jsonl"))
    assert {each.identity for each in read_rows(tmp_path / "whole.jsonl") if each.implementation == "bmm"} == {
        f"torch {version('torch')}"
    }


def test_parquet_where_pyarrow_is_there(tmp_path: Path) -> None:
    rows = [row(), row("2,48,192,1", "bmm", median_us=None, status="failed")]
    if write_parquet(rows, tmp_path / "rows.parquet"):
        assert read_rows(tmp_path / "rows.parquet") == rows
    else:
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        with pytest.raises(
            KsgenError, match=r"reading Parquet needs pyarrow: pip install pyarrow; or take the CSV next to it"
        ):
            read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("median_us", "median", 1), r"rows\.csv: the column median_us is missing; a table "
                                                              r"of .* has pattern"),
        (lambda text: text.replace("100.0", "fast", 1), r"rows\.csv:2: median_us='fast'; accepted: a number"),
        (lambda text: text.replace("100.0", "0", 1), r"rows\.csv: median_us=0.0 of ksgen, 1,48,48,2; accepted: micro"),
        (lambda text: text.replace("100.0", "nan", 1), r"rows\.csv: median_us=nan of ksgen, 1,48,48,2; accepted"),
        (lambda text: text.replace("1,48,48,2", "1,48,48", 1), r"rows\.csv:2: '1,48,48' is not a pattern"),
        (lambda text: text.replace(",forward,", ",backward,", 1), r"rows\.csv: step='backward'; accepted: forward, tr"),
        (lambda text: text.replace(",25088,", ",,", 1), r"rows\.csv:2: batch is empty; accepted: a number"),
        (lambda text: text.splitlines(keepends=True)[0], r"rows\.csv: holds no results yet; .* or `layers` with -o .* "
                                                         r"adds some"),
        (lambda text: "", r"rows\.csv: the column pattern is missing"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_named(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv([row()], path)
    path.write_text(change(path.read_text()))
    with pytest.raises(KsgenError, match=message):
        read_rows(path)


def test_rows_of_older_files_are_of_the_forward_product(tmp_path: Path) -> None:
    rows = [row(), row(layer="up", step="training")]
    write_csv(rows, tmp_path / "rows.csv")
    assert [each.step for each in read_rows(tmp_path / "rows.csv")] == ["forward", "training"]
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    (tmp_path / "rows.csv").write_text("".join(f"{line.rsplit(',', 3)[0]}\n" for line in lines))
    assert [each.step for each in read_rows(tmp_path / "rows.csv")] == ["forward", "forward"]


def test_a_file_s_share_above_one_is_dropped(tmp_path: Path) -> None:
    """Older files have them: their floors counted weights in a cache at memory's rate."""
    write_csv(
        [row(floor_us=139.0, share_of_floor=1.39), row(layout="bsf", floor_us=50.0, share_of_floor=0.5)],
        tmp_path / "rows.csv",
    )
    assert [each.share_of_floor for each in read_rows(tmp_path / "rows.csv")] == [None, 0.5]


def test_a_log_takes_another_batch_size(cpu: Any, tmp_path: Path) -> None:
    measure(cpu, tmp_path / "a.jsonl", [JOB], names=("bmm",))
    _, rows = measure(cpu, tmp_path / "a.jsonl", [product_job(JOB.pattern, "float32", "bsf", 41)], names=("bmm",))
    assert [(each.batch, each.measurements) for each in rows] == [(40, 2), (41, 2)]


def test_a_log_that_was_cut_off_anywhere_loses_one_line(log_text: str, tmp_path: Path) -> None:
    path = tmp_path / "cut.jsonl"
    for end in range(0, len(log_text), 97):
        path.write_text(log_text[:end])
        whole = log_text[:end].rpartition("\n")[0].count("\n") + ("\n" in log_text[:end])
        assert read_log(path).whole_bytes == log_text[:end].rfind("\n") + 1
        with Log(path) as log:
            log.append("run", FACTS)
        assert len(path.read_text().splitlines()) == whole + 1


@pytest.mark.parametrize(
    "damage",
    [
        "{",
        "[]",
        "null",
        '{"kind": "measurement", "key": "unknown"}',
        '{"kind": "song"}',
        "\xff",
        '{"kind": "contender"}',
    ],
)
def test_a_damaged_line_is_named(damage: str, log_text: str, tmp_path: Path) -> None:
    path = tmp_path / "damaged.jsonl"
    lines = log_text.splitlines(keepends=True)
    path.write_bytes("".join([*lines[:3], damage + "\n", *lines[3:]]).encode("latin-1"))
    with pytest.raises(KsgenError, match=r"damaged\.jsonl:4: not a line of `ksgen bench` \(.*\); delete that line"):
        read_log(path)


@pytest.mark.parametrize("text", ['{"my": "data"}', "notes", '{"kind":"song"}\nnotes'])
def test_a_file_that_is_no_log_keeps_its_content(text: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text(text)
    with pytest.raises(KsgenError, match=r"notes\.jsonl:1: not a line of `ksgen bench` \(.*\); .*name another file"):
        Log(path)
    assert path.read_text() == text


def test_a_log_with_a_time_of_zero_is_refused(log_text: str, tmp_path: Path) -> None:
    path = tmp_path / "zero.jsonl"
    path.write_text(re.sub(r'"us":[0-9.e-]+', '"us":0.0', log_text))
    with pytest.raises(KsgenError, match=r"zero\.jsonl: a line is incomplete or malformed \(.*division by zero"):
        read_rows(path)


def test_a_log_that_cannot_be_locked_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(KsgenError, match=r"a\.jsonl: it cannot be continued \(No locks available\), or name another"):
        Log(tmp_path / "a.jsonl")


def test_a_log_is_one_process_s_and_one_device_s(cpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    with Log(path) as log:
        with pytest.raises(
            KsgenError, match=r"another `ksgen bench` writes to it; wait for it, or name another file with -o"
        ):
            Log(path)
        log.append("run", {"device": "Abacus"})
    with pytest.raises(KsgenError, match=r"holds measurements of Abacus, and this is .*; name another file with -o"):
        measure(cpu, path, [JOB])
