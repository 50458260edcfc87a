"""`make gpu-check` runs on this machine's NVIDIA GPU what the emulator runs, without the kinds that a passport proves.

Benchmarks, compute-sanitizer and a page of results follow.

python -m tests.gpu_check [FOLDER]        results and logs go to the folder, benchmarks/results/<gpu> unless given

`make gpu-check` makes the passport first, by `ksgen calibrate`. The check fails without one, and where it disables a
family.

Under eight minutes: each part has its time, and what does not fit is left out and named. Whenever it is killed, the
folder holds each test's verdict (`tests.jsonl`), all measurements, and the page of the parts that have ended.
"""

import json
import os
import re
import shutil
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf
from pathlib import Path
from time import monotonic, time

import click

from ksgen import paths
from ksgen.build.build import usable_cores
from ksgen.build.toolchain import find_compiler
from ksgen.devices import Device, find_device
from ksgen.errors import DeviceError
from ksgen.families import FAMILIES
from ksgen.files import write
from ksgen.launch.choice import limits_of
from ksgen.passport import load, needs_proof
from ksgen.spec import KernelSpec
from ksgen.wisdom import file_name
from tests import gpu_benchmarks, gpu_children, gpu_report
from tests.gpu_benchmarks import Outcome

TESTS = (
    "tests/test_gpu.py",
    "tests/devices/test_devices.py",
    "tests/launch/test_runtimes.py",
    "tests/launch/test_driver.py",
)
TOOLS = ("memcheck", "racecheck")
CLEAN = "clean"
EMULATOR = "KSGEN_GPU_COMPARE_EMULATOR"  # 1: the matrix and the PTX cases also run in the emulator, and are compared
_MATRIX, _PTX = "test_the_emulators_matrix", "test_ptx_does_what_the_emulator_says"
_FOUND = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")
_ALL_SECONDS = 450.0
_TEST_SECONDS, _SANITIZER_SECONDS, _LEAST_SECONDS = 150.0, 45.0, 5.0
_ONE_TEST_SECONDS = 60  # a kernel that hangs ends its worker
_GRACE_SECONDS = 20.0  # for tests that began in time
_MOST_WORKERS = 16  # each has a context on the GPU


@dataclass
class Outcomes:
    """What the tests' report says."""

    passed: int = 0
    failed: list[str] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)  # by reason
    missing: int = 0  # that had no verdict when the report ended
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
    """What a report says, finished or not."""
    found, verdicts, names = Outcomes(), dict[str, dict[str, object]](), set[str]()
    for line in path.read_text(encoding="utf-8").splitlines():
        told = json.loads(line)
        names |= set(told.get("tests", ())) | {told.get(key) for key in ("test", "began") if key in told}
        if "test" in told:
            verdicts[told["test"]] = told
    found.missing = len(names) - len(verdicts)
    for test, told in verdicts.items():
        name, _, words = test.rpartition("::")[2].partition("[")
        words, properties = words.removesuffix("]"), told.get("properties") or {}
        if told["verdict"] == "failed":
            found.failed.append(test.rpartition("::")[2])
        elif told["verdict"] == "skipped":
            found.skipped[str(told["why"])] += 1
        else:
            found.passed += 1
        label = " ".join(words.split("-")[:3]) if name == _MATRIX else words
        if name in (_MATRIX, _PTX) and isinstance(ulps := properties.get("ulps"), int):
            found.ulps[label] = max(found.ulps.get(label, 0), ulps)
        if "error" in properties:
            found.errors[label] = properties["error"]
    return found


def find_sanitizer() -> str | None:
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(str(Path(home, "bin")) for home in [*homes, "/usr/local/cuda"])
    )


def kernel_for(device: Device, family: str) -> tuple[KernelSpec, int] | None:
    """A small kernel that the family serves on this device, and a batch that it takes."""
    from tests.support.kernels import (  # a second, which each of many tests would wait for
        BATCHES,
        SERVED,
        VARIANTS,
        job_of,
        kernel_of,
        ragged_of,
    )

    chosen, limits = VARIANTS[family], limits_of(device)
    kernels = [job_of(family, kernel_of(ragged_of(*served), *served[1:])) for served in SERVED if served[0] == family]
    able = next((kernel for kernel in kernels if chosen.supports(kernel, limits)), None)
    return able and (able, next(each for each in count(BATCHES[able.job][-1]) if chosen.takes(able, each, True)))


def sanitize(sanitizer: str, device: Device, folder: Path, end: float = inf) -> Iterator[Sanitized]:
    """Each tool on each family, until the time is up."""
    from tests.support.kernels import VARIANTS

    for family in VARIANTS:
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
            run = [
                "run",
                "--pattern",
                ",".join(map(str, kernel.pattern.shape)),
                "--batch",
                str(batch),
                "--runs",
                "1",
                "--device",
                "cuda",
            ]
            run += ["--precision", kernel.precision, "--layout", kernel.layout, "--job", kernel.job, "--family", family]
            command = [
                sanitizer,
                "--tool",
                tool,
                "--target-processes",
                "all",
                "--error-exitcode",
                "9",
                sys.executable,
                "-m",
                "ksgen",
                *run,
            ]
            yield judge(tool, family, command, folder / f"{tool}-{family}.txt", seconds)


def judge(tool: str, family: str, command: list[str], log: Path, seconds: float = _SANITIZER_SECONDS) -> Sanitized:
    """Run it; a tool that never comes to its summary does not work here, which is no failure of the kernel."""
    status = gpu_children.run(command, seconds, log)
    said = log.read_text(encoding="utf-8", errors="replace")
    if status is None:
        return Sanitized(tool, family, f"did not end in {seconds:.0f} s")
    last = next((line for line in reversed(said.splitlines()) if line.strip(" =")), "no output")
    found = [int(count) for count in _FOUND.findall(said)]
    if not found:
        return Sanitized(tool, family, f"does not work here: {last}")
    if sum(found):
        return Sanitized(tool, family, f"{sum(found)} found; see {log}", is_failure=True)
    if status:
        return Sanitized(tool, family, f"nothing found, but the run failed; see {log}", is_failure=True)
    return Sanitized(tool, family, CLEAN)


def page(
    device: Device, tests: Outcomes, sanitized: list[Sanitized], measured: Sequence[Outcome], folder: Path
) -> Iterator[str]:
    """The summary, in lines."""
    yield f"{device.name} ({device.target}), {device.runtime}, driver {device.driver_version}, {_compiler(device)}"
    yield (
        f"tests: {tests.passed} passed, {len(tests.failed)} failed, {tests.skipped.total()} skipped, "
        f"{tests.missing} without a verdict"
    )
    yield from (f"  FAILED {name}" for name in tests.failed)
    yield from (f"  skipped {count}: {reason}" for reason, count in tests.skipped.items())
    if tests.ulps:
        same = sum(not most for most in tests.ulps.values())
        yield (
            f"compared with the emulator: {same} of {len(tests.ulps)} the same to the last bit; of the others, the "
            "most floats between"
        )
    else:
        yield f"compared with the emulator: not asked for; {EMULATOR}=1 make gpu-check"
    yield from (f"  {most:>8}  {label}" for label, most in tests.ulps.items() if most)
    if tests.errors:
        yield "relative errors of tf32 products, c = 192"
        yield from (f"  {error}  {label}" for label, error in tests.errors.items())
    yield "compute-sanitizer: not on PATH, nor in CUDA_HOME/bin" if not sanitized else "compute-sanitizer"
    yield from (f"  {each.tool:10} {each.family:8} {each.verdict}" for each in sanitized)
    yield from gpu_benchmarks.page(folder, measured)
    yield "gpu-check passed" if is_good(tests, sanitized, measured) else "gpu-check FAILED"


def is_good(tests: Outcomes, sanitized: list[Sanitized], measured: Sequence[Outcome] = ()) -> bool:
    return (
        bool(tests.passed)
        and not tests.failed
        and not tests.missing
        and not any(each.is_failure for each in (*sanitized, *measured))
    )


def faults_of_passport(device: Device) -> list[str]:
    """Families that are not proven on the device, each with the reason."""
    passport = load(device)
    proofs = passport.families if passport else {}
    missing = [name for name in FAMILIES if name not in proofs and needs_proof(name, device.target)]
    disabled = [f"passport: {name} is disabled: {proof.reason}" for name, proof in proofs.items() if proof.reason]
    lacking = [f"passport: {name} is not proven; ksgen calibrate proves it" for name in missing]
    return disabled + (lacking if proofs else ["passport: there is none; ksgen calibrate makes it"])


def _compiler(device: Device) -> str:
    compiler = device.compiler() or find_compiler()
    return f"{compiler.name} {compiler.version}"


def run_tests(folder: Path, seconds: float = _TEST_SECONDS, only: str = "") -> Outcomes:
    """Run tests on all cores, because compilers take most of the time. Tests that cannot begin in time are skipped."""
    report = (folder / "tests.jsonl").absolute()
    report.unlink(missing_ok=True)
    workers = min(usable_cores(), _MOST_WORKERS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        *TESTS,
        "-vv",
        "-p",
        gpu_report.__name__,
        "-n",
        str(workers),
    ]
    command += [f"--timeout={_ONE_TEST_SECONDS}", "--timeout-method=thread", *(("-k", only) if only else ())]
    cache = os.environ.get("KSGEN_CACHE_DIR") or str(paths.cache_dir())
    variables = {gpu_report.FILE: str(report), gpu_report.END: str(time() + seconds), gpu_report.CACHE: cache}
    status = gpu_children.run(command, seconds + _GRACE_SECONDS, folder / "tests.txt", variables)
    if not report.exists():
        return Outcomes(failed=[f"pytest wrote no report; see {folder / 'tests.txt'}"])
    found = read_report(report)
    if status is None:
        found.failed.append(f"the tests did not end in {seconds + _GRACE_SECONDS:.0f} s")
    return found


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path), required=False)
@click.option("--only", default="", help="Only tests of such names, as pytest's -k.")
@click.option("--tests-alone", is_flag=True, help="Neither benchmarks nor compute-sanitizer.")
def main(folder: Path | None, only: str, tests_alone: bool) -> None:
    """Check and measure this machine's NVIDIA GPU; exit with 1 where something is wrong, or where there is none."""
    end = monotonic() + _ALL_SECONDS
    try:
        device = find_device("cuda")
    except DeviceError as error:
        raise click.ClickException(f"gpu-check needs an NVIDIA GPU. {error}") from None
    folder = folder or Path("benchmarks/results", file_name(device.name).removesuffix(".json"))
    folder.mkdir(parents=True, exist_ok=True)
    sanitized: list[Sanitized] = []
    measured: list[Outcome] = []

    def keep(*last: str) -> str:
        lines = "\n".join([*page(device, tests, sanitized, measured, folder), *last])
        write(folder / "summary.txt", f"{lines}\n")
        return lines

    write(folder / "summary.txt", f"{device.name}: unfinished; the tests' verdicts so far are in tests.jsonl\n")
    tests = run_tests(folder, only=only)
    tests.failed += faults_of_passport(device)  # the tests omit what it proves
    unfinished = "unfinished: more was to follow"
    keep(unfinished)
    for outcome in () if tests_alone else gpu_benchmarks.run(folder, end):
        measured.append(outcome)
        keep(unfinished)
    sanitizer = None if tests_alone else find_sanitizer()
    for found in sanitize(sanitizer, device, folder, end) if sanitizer else ():
        sanitized.append(found)
        keep(unfinished)
    click.echo(f"\n{keep()}")
    raise SystemExit(not is_good(tests, sanitized, measured))


if __name__ == "__main__":
    main()
