"""`make gpu-check`: what the emulator proves, again on this machine's NVIDIA GPU; benchmarks; compute-sanitizer; then a page.

python -m tests.gpu_check [FOLDER]        results and logs go to the folder, benchmarks/results/<gpu> unless given

Under nine minutes: each part has its time, and what does not fit is left out and named.
"""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic
from xml.etree import ElementTree

import click

from ksgen.devices import Device, find_device
from ksgen.errors import DeviceError
from ksgen.families import FAMILIES
from ksgen.launch.choice import limits_of
from ksgen.spec import KernelSpec
from ksgen.wisdom.store import file_name
from tests import gpu_benchmarks
from tests.gpu_benchmarks import Outcome
from tests.support.kernels import BATCHES, SERVED, job_of, kernel_of, ragged_of

TESTS = ("tests/test_gpu.py", "tests/devices/test_devices.py", "tests/launch/test_runtimes.py", "tests/launch/test_driver.py")
TOOLS = ("memcheck", "racecheck")
CLEAN = "clean"
_MATRIX, _PTX = "test_the_emulators_matrix", "test_ptx_does_what_the_emulator_says"
_FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_ALL_SECONDS = 510.0
_TEST_SECONDS, _SANITIZER_SECONDS, _LEAST_SECONDS = 150.0, 45.0, 5.0


@dataclass
class Outcomes:
    """What pytest's report says."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    ulps: dict[str, int] = field(default_factory=dict)  # by family, precision and layout, or by PTX case: the largest
    errors: dict[str, str] = field(default_factory=dict)  # of the products in tests/ptx/numerics.py


@dataclass(frozen=True)
class Sanitized:
    """One run under compute-sanitizer."""

    tool: str
    family: str
    verdict: str  # CLEAN, what was found, or why the tool did not work
    is_failure: bool = False


def read_report(path: Path) -> Outcomes:
    found = Outcomes()
    for case in ElementTree.parse(path).iter("testcase"):
        name, _, words = (case.get("name") or "").partition("[")
        words = words.removesuffix("]")
        skip = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            found.failed.append(case.get("name") or "")
        elif skip is not None:
            found.skipped[skip.get("message") or ""] += 1
        else:
            found.passed += 1
        told = {each.get("name"): each.get("value") or "" for each in case.iter("property")}
        label = " ".join(words.split("-")[:3]) if name == _MATRIX else words
        if name in (_MATRIX, _PTX) and told.get("ulps", "").isdecimal():
            found.ulps[label] = max(found.ulps.get(label, 0), int(told["ulps"]))
        if "error" in told:
            found.errors[label] = told["error"]
    return found


def find_sanitizer() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(str(Path(home, "bin")) for home in [*homes, "/usr/local/cuda"])
    )


def kernel_for(device: Device, family: str) -> tuple[KernelSpec, int] | None:
    """A small kernel that the family serves on this device, and a batch that it takes."""
    chosen, limits = FAMILIES[family], limits_of(device)
    kernels = [job_of(family, kernel_of(ragged_of(*served), *served[1:])) for served in SERVED if served[0] == family]
    able = next((kernel for kernel in kernels if chosen.serves(kernel, limits)), None)
    return able and (able, next(each for each in count(BATCHES[able.job][-1]) if chosen.takes(able, each, True)))


def sanitize(sanitizer: str, device: Device, folder: Path, end: float = inf) -> Iterator[Sanitized]:
    """Each tool on each family, until the time is up."""
    for family in FAMILIES:
        found = kernel_for(device, family)
        for tool in TOOLS:
            if found is None:
                yield Sanitized(tool, family, f"not run: it serves nothing on {device.name}")
                continue
            seconds = min(_SANITIZER_SECONDS, end - monotonic())
            if seconds < _LEAST_SECONDS:
                yield Sanitized(tool, family, "not run: the time was up")
                continue
            kernel, batch = found
            run = ["run", "--pattern", ",".join(map(str, kernel.pattern.shape)), "--batch", str(batch), "--runs", "1", "--device", "cuda"]
            run += ["--precision", kernel.precision, "--layout", kernel.layout, "--job", kernel.job, "--family", family]
            command = [sanitizer, "--tool", tool, "--target-processes", "all", "--error-exitcode", "9", sys.executable, "-m", "ksgen", *run]
            yield judge(tool, family, command, folder / f"{tool}-{family}.txt", seconds)


def judge(tool: str, family: str, command: list[str], log: Path, seconds: float = _SANITIZER_SECONDS) -> Sanitized:
    """Run it; a tool that never comes to its summary does not work here, which is no failure of the kernel."""
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", timeout=seconds)
    except subprocess.TimeoutExpired:
        return Sanitized(tool, family, f"did not end in {seconds:.0f} s")
    log.write_text(done.stdout, encoding="utf-8")
    last = next((line for line in reversed(done.stdout.splitlines()) if line.strip(" =")), "no output")
    found = [int(count) for count in _FOUND.findall(done.stdout)]
    if not found:
        return Sanitized(tool, family, f"does not work here: {last}")
    if sum(found):
        return Sanitized(tool, family, f"{sum(found)} found; see {log}", is_failure=True)
    if done.returncode:
        return Sanitized(tool, family, f"nothing found, but the run failed; see {log}", is_failure=True)
    return Sanitized(tool, family, CLEAN)


def page(device: Device, tests: Outcomes, sanitized: list[Sanitized], measured: Sequence[Outcome], folder: Path) -> Iterator[str]:
    """The summary, in lines."""
    yield f"{device.name} ({device.target}), {device.runtime}, driver {device.driver_version}, {_compiler(device)}"
    yield f"tests: {tests.passed} passed, {len(tests.failed)} failed, {tests.skipped.total()} skipped"
    yield from (f"  FAILED {name}" for name in tests.failed)
    yield from (f"  skipped {count}: {reason}" for reason, count in tests.skipped.items())
    same = sum(not most for most in tests.ulps.values())
    yield f"beside the emulator: {same} of {len(tests.ulps)} the same to the last bit; of the others, the most floats between"
    yield from (f"  {most:>8}  {label}" for label, most in tests.ulps.items() if most)
    if tests.errors:
        yield "relative errors of tf32 products, c = 192"
        yield from (f"  {error}  {label}" for label, error in tests.errors.items())
    yield "compute-sanitizer: not on PATH, nor in CUDA_HOME/bin" if not sanitized else "compute-sanitizer"
    yield from (f"  {each.tool:10} {each.family:8} {each.verdict}" for each in sanitized)
    yield from gpu_benchmarks.page(folder, measured)
    yield "gpu-check passed" if is_good(tests, sanitized, measured) else "gpu-check FAILED"


def is_good(tests: Outcomes, sanitized: list[Sanitized], measured: Sequence[Outcome] = ()) -> bool:
    return bool(tests.passed) and not tests.failed and not any(each.is_failure for each in (*sanitized, *measured))


def _compiler(device: Device) -> str:
    compiler = device.compiler()
    return f"{compiler.name} {compiler.version}"


def run_tests(folder: Path) -> Outcomes:
    """What pytest's report says; a run that never ends is one failure."""
    report = folder / "tests.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "-m", "gpu", *TESTS, "-rs", f"--junitxml={report}"]
    try:
        subprocess.run(command, check=False, timeout=_TEST_SECONDS)
    except subprocess.TimeoutExpired:
        return Outcomes(failed=[f"the tests did not end in {_TEST_SECONDS:.0f} s"])
    return read_report(report) if report.exists() else Outcomes(failed=["pytest wrote no report"])


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
def main(folder: Path | None) -> None:
    """Check and measure this machine's NVIDIA GPU; exit with 1 where something is wrong, or where there is none."""
    end = monotonic() + _ALL_SECONDS
    try:
        device = find_device("cuda")
    except DeviceError as error:
        raise click.ClickException(f"gpu-check needs an NVIDIA GPU. {error}") from None
    folder = folder or Path("benchmarks/results", file_name(device.name).removesuffix(".json"))
    folder.mkdir(parents=True, exist_ok=True)
    tests = run_tests(folder)
    measured = list(gpu_benchmarks.run(folder, end))
    sanitizer = find_sanitizer()
    sanitized = list(sanitize(sanitizer, device, folder, end)) if sanitizer else []
    lines = "\n".join(page(device, tests, sanitized, measured, folder))
    (folder / "summary.txt").write_text(f"{lines}\n", encoding="utf-8")
    click.echo(f"\n{lines}")
    raise SystemExit(not is_good(tests, sanitized, measured))


if __name__ == "__main__":
    main()
