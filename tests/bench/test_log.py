"""The log: one process and device, any batch sizes; what was cut off costs one line."""

from pathlib import Path
from typing import Any

import pytest

from ksgen.bench.rows import Log, read_log
from ksgen.errors import KsgenError
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench.problem import product_job  # noqa: E402
from tests.support.bench_runs import FACTS, JOB, measure  # noqa: E402


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
