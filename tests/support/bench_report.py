"""Rows of many patterns, as a report takes them."""

from dataclasses import replace

from ksgen.bench import tables
from ksgen.bench.roster import OURS
from ksgen.bench.rows import ResultRow
from ksgen.spec import stratified
from tests.support.bench_rows import row, rows_of


def lines(table: tables.ResultTable) -> dict[str, tuple[str, ...]]:
    return {line[0]: line[1:] for line in table.rows}


FOUR = [
    row("1,48,48,2", OURS, median_us=50.0, variant="tuned"),
    row("1,48,48,2", OURS, median_us=120.0, variant="default"),
    row("1,48,48,2", "bmm", median_us=100.0),
    row("1,48,48,2", "einsum", median_us=400.0),
    row("1,48,48,2", "bmm", layout="bsf", median_us=80.0),
    row("1,48,48,2", OURS, layout="bsf", median_us=160.0, variant="default"),
    row("1,64,64,4", OURS, median_us=100.0, variant="default"),
    row("1,64,64,4", "bmm", median_us=60.0),
    row("1,64,64,4", "dense", median_us=1.0, error=0.5),  # fast and wrong
    row("1,64,64,4", "sparse", median_us=None, status="failed", reason="no luck", error=None),
]


def processor_rows() -> list[ResultRow]:
    found = rows_of(stratified(4), ("float32", "bfloat16"))
    return [replace(each, runtime="opencl", batch=6272) for each in found]
