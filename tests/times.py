"""Prints what a run of tests spent processor time on: `python -m tests.times REPORT`, from its JUnit report
(`--junitxml=REPORT`).

Each test carries its seconds into the report as properties: seconds of compilers and emulated launches, with all that
they start, and the rest of its process: Python, NumPy, and kernels on the host.
"""

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import click
import pytest

from ksgen.build.children import Children
from ksgen.build.toolchain import Nvrtc
from ksgen.devices.opencl import OpenCLCompiler
from tests.support import booked

PREFIX = "cpu of "  # before a cause, in the name of a property
START = "start of workers, imports, collection"


class Books:
    """A plugin of pytest that books the product's compilers, and gives each test its properties."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._is_new = True
        patch.setattr(Children, "run", _books_programs(Children.run))
        patch.setattr(Nvrtc, "compile", _books_itself(Nvrtc.compile, "NVRTC"))
        patch.setattr(OpenCLCompiler, "compile", _books_itself(OpenCLCompiler.compile, "OpenCL drivers' compilers"))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._is_new:
            booked.flush(own=START)
        self._is_new = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            booked.flush()
            item.user_properties += [
                (PREFIX + cause, f"{each:.4f} {booked.calls[cause]}") for cause, each in booked.seconds.items() if each
            ]
            booked.seconds.clear()
            booked.calls.clear()


def _books_programs(run: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(run)
    def books(self: Children, command: Iterable[str], folder: str | None = None) -> Any:
        command = tuple(command)
        with booked.booked(_cause(command)):
            return run(self, command, folder)

    return books


def _cause(command: tuple[str, ...]) -> str:
    if any("nvcc" in word for word in command[:4]):  # by itself, or by what stands before it
        return "nvcc"
    return "g++ of native kernels" if "-shared" in command else "questions to compilers"


def _books_itself(compile_: Callable[..., Any], cause: str) -> Callable[..., Any]:
    @functools.wraps(compile_)
    def books(*arguments: Any) -> Any:
        with booked.booked(cause, own=True):
            return compile_(*arguments)

    return books


@dataclass(frozen=True)
class Spent:
    """Processor seconds by cause and by file, with the number of calls, and the seconds that a file's tests took."""

    causes: Counter[str]
    calls: Counter[str]
    files: dict[str, Counter[str]]
    wall: Counter[str]


def read(report: str) -> Spent:
    causes, calls, wall = Counter[str](), Counter[str](), Counter[str]()
    files: dict[str, Counter[str]] = defaultdict(Counter)
    for case in ElementTree.fromstring(report).iter("testcase"):
        file = case.attrib["classname"].replace(".", "/") + ".py"
        wall[file] += float(case.attrib["time"])
        for each in case.iter("property"):
            if each.attrib["name"].startswith(PREFIX):
                cause, (seconds, times) = each.attrib["name"].removeprefix(PREFIX), each.attrib["value"].split()
                causes[cause] += float(seconds)
                files[file][cause] += float(seconds)
                calls[cause] += int(times)
    return Spent(causes, calls, files, wall)


def lines(spent: Spent, most_files: int) -> Iterator[str]:
    total = spent.causes.total()
    yield f"{'CPU s':>8} {'share':>6} {'calls':>6}  cause"
    for cause, seconds in spent.causes.most_common():
        yield f"{seconds:8.1f} {seconds / total:6.1%} {spent.calls[cause] or '':>6}  {cause}"
    yield f"{total:8.1f} of {spent.wall.total():.1f} seconds that the tests of all workers took; the rest is waiting"
    yield ""
    yield f"{'CPU s':>8} {'wall s':>8}  file, and its largest causes"
    by_file = Counter({file: causes.total() for file, causes in spent.files.items()})
    for file, seconds in by_file.most_common(most_files):
        largest = ", ".join(f"{cause} {each:.1f}" for cause, each in spent.files[file].most_common(3))
        yield f"{seconds:8.1f} {spent.wall[file]:8.1f}  {file}: {largest}"


@click.command()
@click.argument("report", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--files", default=30, help="how many files to list")
def main(report: Path, files: int) -> None:
    """Print processor seconds per cause and per file."""
    spent = read(report.read_text(encoding="utf-8"))
    if not spent.causes:
        raise click.ClickException(
            f"{report} holds no processor seconds; write it with: python -m pytest --junitxml={report}"
        )
    click.echo("\n".join(lines(spent, files)))


if __name__ == "__main__":
    main()
