"""Processor seconds are booked for what causes them, reach the report, and are printed."""

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ksgen.build.children import Children
from tests import times
from tests.support import booked

ROOT = Path(__file__).parents[1]
BURN = "sum(range(3_000_000))"
CASE = '<testcase classname="tests.emit.test_a" name="test_b[x]" time="9.5"><properties>{}</properties></testcase>'
PROPERTY = '<property name="cpu of {}" value="{}"/>'


def test_programs_and_this_process_are_booked_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    booked.flush()
    for name in ("seconds", "calls"):
        monkeypatch.setattr(booked, name, type(booked.calls)())
    with booked.booked("program"):
        subprocess.run([sys.executable, "-c", BURN], check=True)
    with booked.booked("itself", own=True):
        exec(BURN)
    assert set(booked.seconds) == {"program", "itself", booked.OWN, booked.PROGRAMS}
    assert min(booked.seconds["program"], booked.seconds["itself"]) > max(
        booked.seconds[booked.OWN], booked.seconds[booked.PROGRAMS]
    )
    assert booked.calls == {"program": 1, "itself": 1}


@pytest.mark.parametrize(
    ("words", "cause"),
    [("-shared", "g++ of native kernels"), ("nvcc", "nvcc"), ("--version", "questions to compilers")],
)
def test_the_products_compilers_are_booked(words: str, cause: str) -> None:
    before = booked.calls[cause]
    assert Children().run((sys.executable, "-c", "", words)).returncode == 0
    assert booked.calls[cause] == before + 1


def test_tests_carry_their_seconds_into_the_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "tests/test_paths.py",
        f"--junitxml={report}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    spent = times.read(report.read_text(encoding="utf-8"))
    assert spent.causes[times.START] > 0
    assert spent.files["tests/test_paths.py"][booked.OWN] > 0


def test_seconds_are_summed_by_cause_and_by_file(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    some, more = (
        PROPERTY.format("nvcc", "1.5000 2"),
        PROPERTY.format("nvcc", "2.0000 1") + PROPERTY.format("emulation", "0.5000 7"),
    )
    report.write_text(f"<suites>{CASE.format(some)}{CASE.format(more)}</suites>", encoding="utf-8")
    done = CliRunner().invoke(times.main, [str(report)])
    assert "     3.5  87.5%      3  nvcc\n     0.5  12.5%      7  emulation\n     4.0 of 19.0 seconds" in done.output
    assert "     4.0     19.0  tests/emit/test_a.py: nvcc 3.5, emulation 0.5\n" in done.output


def test_a_report_of_another_run_is_refused(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<suites>{CASE.format('')}</suites>", encoding="utf-8")
    done = CliRunner().invoke(times.main, [str(report)])
    assert done.exit_code == 1
    assert (
        done.output
        == f"Error: {report} holds no processor seconds; write it with: python -m pytest --junitxml={report}\n"
    )
