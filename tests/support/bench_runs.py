"""A run of the benchmark on a processor, and what it wrote down."""

import json
from pathlib import Path
from typing import Any

from ksgen.bench.rows import Log, ResultRow, read_rows
from ksgen.devices import Found, list_devices
from ksgen.pattern import Pattern
from tests.support.libraries import library

torch = library("torch")
from ksgen.bench.problem import LayerJob, product_job  # noqa: E402
from ksgen.bench.runner import Runner  # noqa: E402
from ksgen.bench.timing import Protocol, Times  # noqa: E402

has_opencl = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
FAST = ("ksgen", "bmm", "strided", "rewriting")
JOB = product_job(Pattern(1, 8, 8, 2), "float32", "bsf", 40)
FACTS = {"device": "here", "date": "2026-01-02"}


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == kind]


def measure(
    device: Any, path: Path, jobs: list[LayerJob], deadline: float = float("inf"), **changes: Any
) -> tuple[int, list[ResultRow]]:
    protocol = Protocol(**({"names": FAST, "measurements": 2, "runs": 2} | changes))  # type: ignore[arg-type]
    with Log(path) as log:
        facts = FACTS | {"device": device.name}
        complete = Runner(log, device, protocol, Times(), facts, deadline, lambda done, total, now: None).run(jobs)
    return complete, read_rows(path)
