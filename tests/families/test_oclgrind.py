"""The emitted OpenCL texts under oclgrind: no data race, no use of what was never written, no access out of bounds.

Oclgrind interprets a kernel, work-item by work-item, as an OpenCL driver that ksgen itself runs on. Debian has it:
apt-get install oclgrind. Without `--check-api`: PyOpenCL asks every driver for every vendor's properties, which it
reports.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.processor_cases import CHAIN, SLICES, VECTOR, VECTOR_GRADIENT, Case, passes

ROOT = Path(__file__).parents[2]
DRIVER = next(
    (
        path
        for place in ("oclgrind", "*/oclgrind", ".")
        for path in Path("/usr/lib").glob(f"{place}/liboclgrind-rt-icd.so")
    ),
    None,
)
RACES = {"OCLGRIND_DATA_RACES": "1", "OCLGRIND_UNIFORM_WRITES": "1"}
# Debian's oclgrind 21.10 looks for uninitialised values only in unoptimised code: it does not know `freeze`, which
# clang 14 emits.
EVERYTHING = {**RACES, "OCLGRIND_UNINITIALIZED": "1", "OCLGRIND_BUILD_OPTIONS": "-cl-opt-disable"}
NO_PREFETCH = "-D__builtin_prefetch(...)="  # nor that; it changes no value and reads none
NO_CHANGE = ("", "")
TOGETHER = 9  # cases of a process

pytestmark = [
    pytest.mark.slow,
    pytest.mark.libraries,
    pytest.mark.skipif(DRIVER is None, reason="oclgrind is not installed: apt-get install oclgrind"),
    pytest.mark.skipif(find_spec("pyopencl") is None, reason="PyOpenCL is not installed: pip install pyopencl"),
]


@dataclass(frozen=True)
class Outcome:
    passed: list[bool]  # of each batch, against the float64 reference
    reports: list[str]  # the first lines of what oclgrind reported


def check(
    folder: Path, cases: Sequence[Case], checks: dict[str, str], change: tuple[str, str] = NO_CHANGE
) -> dict[str, Outcome]:
    """Run cases sequentially in a process without any other driver, which takes a second to start.

    `change` is a part of the source and its replacement.
    """
    (folder / "oclgrind.icd").write_text(f"{DRIVER}\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OCL", "OPENCL", "KSGEN"))}
    environment |= {
        "OCL_ICD_VENDORS": str(folder),
        "OCLGRIND_LOG": str(folder / "log"),
        "KSGEN_CACHE_DIR": str(folder / "cache"),
        **checks,
    }
    environment["OCLGRIND_BUILD_OPTIONS"] = f"{checks.get('OCLGRIND_BUILD_OPTIONS', '')} {NO_PREFETCH}"
    asked = json.dumps({"cases": [asdict(case) for case in cases], "change": change})
    command = [sys.executable, "-m", "tests.families.test_oclgrind", asked]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return {
        str(case): Outcome(**found) for case, found in zip(cases, json.loads(done.stdout.splitlines()[-1]), strict=True)
    }


CASES = [  # c = 9 and 17 take several stages; ragged tiles of b, c and the batch
    *(
        Case((2, 5, 9, 1), precision, layout)
        for precision in ("float32", "float16", "bfloat16", "float64")
        for layout in ("bsf", "bsl")
    ),
    Case((1, 8, 8, 1)),
    Case((1, 8, 8, 1), layout="bsl", batches=(8,)),  # whole groups: the wide accesses
    Case((1, 5, 9, 3), "float64", epilogue=(True, "relu", False)),
    Case((1, 3, 17, 4), epilogue=(True, "gelu", True)),
    Case((1, 5, 9, 3), layout="bsl", epilogue=(True, "gelu_tanh", True)),
    Case((3, 4, 3, 1), "float16", epilogue=(True, "silu", True)),
]
CASES += [
    *(
        Case((2, 5, 9, 1), precision, layout, family="gradient")
        for precision in ("float32", "float64")
        for layout in ("bsf", "bsl")
    ),
    Case((1, 5, 9, 3), "float16", batches=(130,), family="gradient"),  # two parts
    Case((1, 5, 8, 1), "bfloat16", "bsl", batches=(136,), family="gradient"),  # and the wide accesses
]


CASES += [*SLICES, *VECTOR, *CHAIN, *VECTOR_GRADIENT]
LARGER = [Case((1, 40, 24, 1)), Case((1, 12, 9, 16)), Case((2, 40, 24, 2), layout="bsl")]


def by_process(cases: Sequence[Case]) -> list[Sequence[Case]]:
    return [cases[at : at + TOGETHER] for at in range(0, len(cases), TOGETHER)]


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", by_process(CASES), ids=lambda cases: str(cases[0]))
def test_nothing_is_read_that_was_never_written(tmp_path: Path, cases: Sequence[Case]) -> None:
    assert check(tmp_path, cases, EVERYTHING) == {str(case): Outcome([True], []) for case in cases}


@pytest.mark.exhaustive
@pytest.mark.parametrize("cases", by_process([*CASES, *LARGER]), ids=lambda cases: str(cases[0]))
def test_optimised_code_has_no_race_at_any_batch(tmp_path: Path, cases: Sequence[Case]) -> None:
    batches = (1, 7, 33, 70)
    found = check(tmp_path, [replace(case, batches=batches) for case in cases], RACES)
    assert found == {str(case): Outcome([True] * len(batches), []) for case in cases}


BROKEN = {  # which checks must notice that a part of the text is gone, or is another, and what they must say
    "no barrier after a stage": (
        RACES,
        "wait_for_block();  // the next stage is complete",
        "",
        "data race at local memory",
    ),
    "no barrier in the store": (
        RACES,
        "group;\n            }\n        wait_for_block();",
        "group;\n            }",
        "data race at local memory",
    ),
    "a line of Y twice": (
        RACES,
        "const extent s = tile.first_batch + line;",
        "const extent s = 0;",
        "data race at global memory",
    ),
    "weights that are not there": (EVERYTHING, "keep_weights(shared + W_BASE, held_w);", "", "ninitialized"),
    "X that is not there": (EVERYTHING, "keep_x(shared, held_x);", "", "ninitialized"),
    "sums that start anywhere": (EVERYTHING, "sums[n][m] = 0;", ";", "ninitialized"),
    "X beyond the batch": (EVERYTHING, " &&\n        line < tile.batch_left", "", "Invalid read"),
    "Y beyond the batch": (EVERYTHING, "if ((first + p) * Y_LINE_STEP < left)", "", "Invalid write"),
}


BROKEN_GRADIENTS = {
    "no barrier after a stage": BROKEN["no barrier after a stage"],
    "no barrier in the sum": (
        RACES,
        "wait_for_block();\n    if (thread_index() >= SUM_COLUMNS) return;",
        "",
        "data race at local memory",
    ),
    "all parts in one place": (
        RACES,
        "store_part(parts + block_index() *",
        "store_part(parts + 0 *",
        "data race at global memory",
    ),
    "dY that is not there": (EVERYTHING, "keep_dy(shared + DY_BASE, held_dy);", "", "ninitialized"),
    "dY beyond the batch": (EVERYTHING, "< D) && line < left;", "< D);", "Invalid read"),
    "weights beyond the edge": (EVERYTHING, "if (k < B && l < C && j < D) dw", "dw", "Invalid write"),
}


SLOT = "workspace + block_index() * (extent)SLOT"
BROKEN_VECTORS = {  # no check knows that a workspace was never written: it is full of NaN, and the result is "wrong"
    "X beyond the batch": (VECTOR[0], EVERYTHING, "min(row, count - HEIGHT)", "row", "Invalid read"),
    "Y beyond the batch": (
        VECTOR[3], EVERYTHING, "r < LANES && first_row + row + r < count", "r < LANES", "Invalid write"
    ),
    "X that is not there": (VECTOR[4], EVERYTHING, "line[last] = widen(from[last]);", ";", "wrong"),
    "sums that start anywhere": (VECTOR[1], EVERYTHING, "sums[m][n] = (lanes)0;", ";", "ninitialized"),
    "groups that keep one place": (VECTOR[3], RACES, SLOT, "workspace", "data race at global memory"),
    "outputs that never leave": (VECTOR[6], EVERYTHING, "if (WAITS && waiting.to) store_waiting(waiting, 0, HEIGHT * "
                                                        "WIDTH);", "", "wrong"),
    "a chunk that is not copied": (VECTOR[7], EVERYTHING, "if (inputs.from) *kept =", "if (0) *kept =", "wrong"),
    "a pair behind the last": (VECTOR[8], EVERYTHING, "2 * l + 1 < inputs ?", "1 ?", "wrong"),
    "inputs that meet no other": (VECTOR[9], EVERYTHING, "D % C % 2;", "D % C % 1;", "wrong"),
    "a line behind the last": (VECTOR[10], EVERYTHING, "if (2 * l + 1 == inputs)", "if (0)", "Invalid read"),
    "inputs of another j": (VECTOR[11], EVERYTHING, "each[same], own[n]", "each[0], own[n]", "wrong"),
    "a pair of vectors behind the last": (VECTOR[12], EVERYTHING, "(2 * l + 1) * D + LANES <= C * D", "1", "Invalid "
                                                                                                           "read"),
    "a row's end behind the last": (VECTOR[15], EVERYTHING, "!(REACHES && is_last)", "1", "Invalid read"),
    "a chain's row's end behind the last": (CHAIN[3], EVERYTHING, "last == batch", "0", "Invalid read"),
    "a chain's groups that keep one place": (CHAIN[0], RACES, SLOT, "workspace", "data race at global memory"),
    "a chain's X beyond the batch": (CHAIN[1], EVERYTHING, "last < min(end, at + LANES); ++last)", "last <= end; "
                                                                                                   "++last)",
                                                                                                       "Invalid read"),
    "a chain's Y beyond the batch": (CHAIN[1], EVERYTHING, "count - here, bias", "LANES, bias",
        "Invalid write"),
    "a gradient's groups that keep one place": (
        VECTOR_GRADIENT[0], RACES, "parts * PART + block_index() * SLOT", "parts * PART", "data race at global memory"
    ),
    "a gradient's sums that go on from nothing": (
        VECTOR_GRADIENT[1], EVERYTHING, "if (is_new) store_real(value, to);\n    else ", "", "wrong"
    ),
}  # fmt: skip
BREAKS = {
    "simt: Y of an epilogue beyond the batch": (
        Case((1, 9, 17, 1), epilogue=(True, "none", False)),
        EVERYTHING,
        "if ((first + p) * Y_LINE_STEP < left)",
        "",
        "Invalid write",
    ),
    **{f"simt: {name}": (Case((1, 9, 17, 1)), *found) for name, found in BROKEN.items()},
    **{
        f"gradient: {name}": (Case((1, 9, 17, 1), batches=(130,), family="gradient"), *found)
        for name, found in BROKEN_GRADIENTS.items()
    },
    **BROKEN_VECTORS,
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", BREAKS)
def test_a_broken_text_is_reported(tmp_path: Path, name: str) -> None:
    case, checks, before, after, report = BREAKS[name]
    (found,) = check(tmp_path, [case], checks, (before, after)).values()
    said = [*found.reports, *("wrong" for passed in found.passed if not passed)]
    assert any(report in line for line in said), said[:5]


def main(cases: Sequence[Case], change: tuple[str, str]) -> Iterator[Outcome]:
    """Build, run and compare the cases in the process that `check` starts, on its only device."""
    from ksgen.devices import find_device
    from ksgen.emit.render import Source, render
    from ksgen.launch import planner

    before, after = change
    device: Any = find_device("opencl")
    assert "Oclgrind" in device.name, device.name
    kept, allocate, log = [], device.allocate, Path(os.environ["OCLGRIND_LOG"])

    def allocate_and_keep(nbytes: int) -> Any:  # oclgrind holds a new buffer at a freed one's address for the old one
        kept.append(allocate(nbytes))
        return kept[-1]

    device.allocate, read = allocate_and_keep, 0
    for case in cases:

        def render_changed(*given: Any, case: Case = case, **named: Any) -> Source:
            source = render(*given, **named)
            # a chain's factors are packed by texts of their own
            assert before in source.text or source.kernel != case.kernel
            return replace(source, text=source.text.replace(before, after) if before else source.text)

        planner.render = render_changed
        passed = passes(device, case)
        lines = log.read_text().splitlines() if log.exists() else []
        yield Outcome(passed, [line for line in lines[read:] if re.match(r"\S", line)])
        read = len(lines)


if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    print(json.dumps([asdict(each) for each in main([Case(**case) for case in asked["cases"]], asked["change"])]))
