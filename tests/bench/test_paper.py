"""`ksgen bench paper` on the processor: what it measures, what it writes down, how it goes on, what it refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ksgen.bench.log import Log, read_log
from ksgen.bench.roster import COMPARISONS, LIBRARIES, NAMES, OTHERS, OURS, PARTS
from ksgen.bench.rows import COLUMNS, OK, Row, read_rows, write_csv, write_parquet
from ksgen.commands.bench_common import patterns_named
from ksgen.devices import Found, list_devices
from ksgen.emit.render import template_digest
from ksgen.errors import KsgenError, ToolchainError
from ksgen.families import family_named
from ksgen.install import install_line
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.plan import load, make_plan
from ksgen.measure import pause
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.reference import multiply
from ksgen.spec import LAYOUTS
from ksgen.wisdom.store import Entry, save
from tests.emulator import is_installed
from tests.support.bench_rows import row
from tests.support.fake_gpu import FakeGpu, TextCompiler

torch = pytest.importorskip("torch", reason="the baselines are PyTorch's")

from ksgen.bench import runner  # noqa: E402  (PyTorch may be missing)
from ksgen.bench.baselines import BASELINES, Baseline, UnsupportedError, library_version  # noqa: E402
from ksgen.bench.contenders import Ready, _on_tensors, contenders, tune  # noqa: E402
from ksgen.bench.problem import Job, Problem  # noqa: E402
from ksgen.bench.runner import Runner  # noqa: E402
from ksgen.bench.timing import Protocol, Timed, Times  # noqa: E402

has_opencl = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not has_opencl, reason="no OpenCL device: pip install -e '.[cpu]'")

SMALL = ("--patterns", "1,8,8,2 2,4,8,1", "--batch", "40", "--precision", "float32", "--measurements", "3", "--runs", "2")
FAST = ("ksgen", "bmm", "strided", "rewriting")
JOB = Job(Pattern(1, 8, 8, 2), "float32", "bsf", 40)
FACTS = {"device": "here", "date": "2026-01-02"}


def ksgen(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ksgen", "bench", *arguments]
    return subprocess.run(command, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=240)


def lines_of(path: Path, kind: str) -> list[dict[str, Any]]:
    whole = path.read_bytes().rpartition(b"\n")[0]
    return [line for line in map(json.loads, whole.splitlines()) if line["kind"] == kind]


@pytest.fixture
def cpu() -> Any:
    if not has_opencl:
        pytest.skip("no OpenCL device: pip install -e '.[cpu]'")
    from ksgen.devices import find_device

    return find_device("opencl")


def measure(device: Any, path: Path, jobs: list[Job], deadline: float = float("inf"), **changes: Any) -> tuple[int, list[Row]]:
    protocol = Protocol(**({"names": FAST, "measurements": 2, "runs": 2} | changes))  # type: ignore[arg-type]
    with Log(path) as log:
        facts = FACTS | {"device": device.name}
        complete = Runner(log, device, protocol, Times(), facts, deadline, lambda done, total, now: None).run(jobs)
    return complete, read_rows(path)


def measure_into(device: Any, path: Path, jobs: list[Job], deadline: float) -> tuple[int, int]:
    """Without rows, of which there may be none."""
    with Log(path) as log:
        runs = Runner(log, device, Protocol(("ksgen",)), Times(), FACTS | {"device": device.name}, deadline, lambda done, total, now: None)
        return runs.run(jobs), len(log.content.contenders)


@pytest.mark.filterwarnings("ignore")  # lazylinop's of what it lacks, PyTorch's of its sparse formats
@pytest.mark.parametrize("name", [name for name in BASELINES if name not in (*PARTS, "compiled")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_baselines_multiply(name: str, layout: str) -> None:
    computed, missing = 0, False
    for shape in ((1, 8, 8, 2), (2, 6, 4, 3), (3, 4, 8, 1), (1, 4, 12, 1)):
        pattern = Pattern(*shape)
        weights = torch.randn(shape)
        x = torch.randn((10, pattern.in_features) if layout == "bsf" else (pattern.in_features, 10))
        try:
            y = BASELINES[name].prepare(pattern, layout, weights)(x).contiguous()
        except UnsupportedError as unsupported:
            missing |= "not installed" in str(unsupported)
            continue
        np.testing.assert_allclose(y.numpy(), multiply(pattern, x.numpy(), weights.numpy(), layout), atol=1e-4)
        computed += 1
    if missing:
        pytest.skip(f"{name} is not installed")
    assert computed or (name, layout) in {("three_passes", "bsl"), ("densified", "bsl"), ("lazylinop", "bsf")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewriting_moves_what_bmm_moves(layout: str) -> None:
    pattern = Pattern(2, 6, 4, 3)
    x = torch.randn((10, pattern.in_features) if layout == "bsf" else (pattern.in_features, 10))
    weights = torch.randn(pattern.shape)
    y = BASELINES["bmm"].prepare(pattern, layout, weights)(x)
    moved = BASELINES["rewriting"].prepare(pattern, layout, weights)(x)
    assert (moved.shape, moved.stride()) == (y.shape, y.stride())


def test_everyone_is_in_the_roster() -> None:
    assert set(NAMES) == {OURS, *BASELINES}


def test_a_problem_is_the_same_for_the_same_seed() -> None:
    one, same, other = (Problem(JOB, torch.device("cpu"), seed) for seed in (0, 0, 1))
    assert torch.equal(one.sets[0], same.sets[0])
    assert torch.equal(one.weights, same.weights)
    assert not torch.equal(one.weights, other.weights)
    assert float(one.weights.abs().max()) <= 8**-0.5
    assert len(one.sets) == 64  # small arrays are taken in turn, so that a cache does not hold them


def test_an_error_is_against_float64_and_nan_where_anything_is_not_finite() -> None:
    job = Job(Pattern(2, 4, 8, 1), "float32", "bsl", 200)
    problem = Problem(job, torch.device("cpu"), 0)
    y = torch.from_numpy(multiply(job.pattern, problem.sets[0].numpy(), problem.weights.numpy(), "bsl"))
    assert problem.error(y) < 1e-15
    assert problem.error(1.01 * y) == pytest.approx(0.01)
    y[3, 101] = float("nan")  # an entry that is not among those compared
    assert problem.checked == 44
    assert np.isnan(problem.error(y))
    assert np.isnan(problem.error(y.T.contiguous()))


def test_contenders_take_turns_and_every_row_is_complete(cpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    jobs = [JOB, Job(Pattern(2, 4, 8, 1), "float16", "bsl", 40)]
    complete, rows = measure(cpu, path, jobs, measurements=3, names=("ksgen", "bmm", "strided", "rewriting"))
    assert complete == 2
    found = {(each.pattern, each.implementation): each for each in rows}
    ours, bmm, strided, part = (found["1,8,8,2", name] for name in FAST)
    for each in (ours, bmm):
        assert (each.status, each.measurements, each.runs, each.checked) == (OK, 3, 2, 40)
        assert each.status == OK
        assert each.is_accurate
        assert 0 < each.error < 1e-6  # type: ignore[operator]
        assert each.fastest_us <= each.quartile1_us <= each.median_us <= each.quartile3_us <= each.slowest_us  # type: ignore[operator]
        assert each.share_of_floor == pytest.approx(each.floor_us / each.median_us)  # type: ignore[operator]
        assert (each.device, each.date) == (cpu.name, "2026-01-02")
    assert (ours.family, ours.variant, ours.arithmetic) == ("vector", "default", "float32")
    assert (strided.status, strided.median_us, strided.counts) == ("unsupported", None, False)
    assert "no view of X has a stride of 1" in strided.reason
    assert (part.status, part.error, part.floor_us, part.counts) == (OK, None, None, False)
    assert found["2,4,8,1", "ksgen"].is_accurate
    order = [line["key"].split()[4] for line in lines_of(path, "measurement") if line["key"].startswith("1,8,8,2")]
    assert order == ["ksgen", "bmm", "rewriting"] * 3


def test_a_processors_floor_is_measured_for_every_job(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its speed changes with what else runs on the machine: the better of before and after counts. A GPU's is measured once."""
    rates = iter((1, 2, 4, 3))
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: Ceilings(1e9 * next(rates), 1e11))
    jobs = [JOB, replace(JOB, layout="bsl")]
    path = tmp_path / "log.jsonl"
    measure(cpu, path, jobs)
    found = {row["layout"]: row["ceiling_byte_per_s"] for row in lines_of(path, "contender")}
    assert found == {"bsf": 2e9, "bsl": 4e9}
    floors = {row.layout: row.floor_us for row in read_rows(path) if row.implementation == OURS}
    assert floors["bsf"] == pytest.approx(2 * floors["bsl"])


def test_everyone_works_on_the_hosts_memory_and_gives_y_without_gaps(cpu: Any) -> None:
    """Ours where the arrays lie: no copy, and the same call again takes what x holds by then."""
    if not cpu.shares_host:
        pytest.skip(f"{cpu.name} does not share the host's memory")
    for precision, layout in (("float32", "bsf"), ("bfloat16", "bsl")):
        job = Job(JOB.pattern, precision, layout, 40)
        problem = Problem(job, torch.device("cpu"), 0)
        del problem.sets[2:]
        for each in contenders(job, cpu, (OURS, "bmm", "dense", "sparse", "strided")):
            try:
                ready = each.prepare(problem)
                y = ready.y(ready.run(1))
            except (UnsupportedError, NotImplementedError):
                continue
            assert y.is_contiguous()
            assert problem.error(y) <= (1e-6 if precision == "float32" else 4e-3)
            if each.implementation == OURS:
                problem.sets[1].mul_(2)
                again = ready.run(1)
                assert again.data_ptr() == y.data_ptr()
                assert problem.error(again / 2) <= (1e-6 if precision == "float32" else 4e-3)
                problem.sets[1].mul_(0.5)


def test_before_a_time_is_taken_the_threads_of_others_come_to_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    ready = Ready(lambda number: order.append("run"), lambda y: y, lambda call: (order.append("clock"), call(), 1.0)[2], lambda: None,
                  lambda: order.append("rest"))  # fmt: skip
    Timed(ready, 1, Protocol(())).seconds()
    assert order[:3] == ["rest", "clock", "run"]
    assert order.count("rest") == order.count("clock")
    awake = [3, 0]  # looks at which a thread still spins

    def nap(seconds: float) -> None:
        awake[0] -= 1
        awake[1] += 1

    spent = [0.0]

    def process_time() -> float:
        spent[0] += pause.NAP_S if awake[0] > 0 else 0.0
        return spent[0]

    monkeypatch.setattr(pause, "sleep", nap)
    monkeypatch.setattr(pause, "process_time", process_time)
    pause.rest()
    assert awake[1] == 3
    awake[0] = 10**6
    pause.rest()  # others never do
    assert awake[1] == 3 + pause.MOST_NAPS


def test_what_is_hopeless_by_its_pace_is_not_run(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours is, whatever its pace; and what is not much slower than another."""
    monkeypatch.setattr(Runner, "_note_pace", lambda self, contender, once_s: None)
    with Log(tmp_path / "a.jsonl") as log:
        protocol = Protocol((OURS, "bmm"), measurements=1, runs=1, most_seconds=1.0)
        measuring = Runner(log, cpu, protocol, Times(), FACTS | {"device": cpu.name}, float("inf"), lambda done, total, now: None)
        ours, bmm = contenders(JOB, cpu, (OURS, "bmm"))
        work = JOB.pattern.weight_count * JOB.batch
        for pace, fastest_s, verdict in ((10.1, 0.1, True), (9.9, 0.1, False), (10.1, 0.4, False), (12.1, 0.4, True)):
            measuring._paces = {(each.implementation, "float32", "bsf"): pace / work for each in (ours, bmm)}
            assert bool(measuring._hopeless(bmm, fastest_s)) == verdict
            assert measuring._hopeless(ours, fastest_s) == ""
        assert measuring._hopeless(bmm, 0.1) == "1.2 s per run at 10 times its pace in other patterns, and the fastest takes 0.10 s"
        measuring.run([JOB])
        assert {each.implementation: each.status for each in read_rows(log.path)} == {OURS: OK, "bmm": "too slow"}


def test_libraries_that_are_missing_or_cannot_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.ones(1, 8, 8, 2)
    monkeypatch.setattr("ksgen.bench.baselines.find_spec", lambda name: None)
    for name in LIBRARIES:
        with pytest.raises(UnsupportedError, match=f"{name} is not installed: pip install {name}"):
            BASELINES[name].prepare(JOB.pattern, "bsl", weights)
        with pytest.raises(UnsupportedError, match=f"{name} has no bfloat16"):
            BASELINES[name].prepare(JOB.pattern, "bsl", weights.bfloat16())
    assert library_version("no_such_library") == "no_such_library is missing"


def test_a_log_is_of_one_batch(cpu: Any, tmp_path: Path) -> None:
    measure(cpu, tmp_path / "a.jsonl", [JOB], names=("bmm",))
    with pytest.raises(KsgenError, match="holds measurements of batch 40, and this is 41; name another file with -o"):
        measure(cpu, tmp_path / "a.jsonl", [Job(JOB.pattern, "float32", "bsf", 41)])


def test_large_patterns_can_be_left_out() -> None:
    few = patterns_named(None, 5, most_weights=9000)
    assert len(few) == 5
    assert all(pattern.weight_count <= 9000 for pattern in few)
    assert patterns_named("1,8,8,2 2,4,8,1", None, most_weights=100) == [Pattern(2, 4, 8, 1)]


def test_it_goes_on_where_it_was(cpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    measure(cpu, path, [JOB], measurements=2)
    before = path.read_bytes()
    measure(cpu, path, [JOB], measurements=2)
    assert path.read_bytes().startswith(before)
    assert len(lines_of(path, "measurement")) == 2 * 3  # strided has no form
    _, rows = measure(cpu, path, [JOB], measurements=5)
    assert {each.measurements for each in rows if each.status == OK} == {5}
    assert len(lines_of(path, "measurement")) == 5 * 3


def test_measurements_of_another_kernel_text_count_no_more(cpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    measure(cpu, path, [JOB])
    path.write_text(path.read_text().replace('"identity":"ksgen ', '"identity":"another '))
    measure(cpu, path, [JOB])
    counted = [line["key"].split()[4] for line in lines_of(path, "measurement")]
    assert counted.count("ksgen") == 4
    assert counted.count("bmm") == 2
    assert {each.measurements for each in read_rows(path) if each.status == OK} == {2}


def test_the_time_limit_leaves_whole_measurements(cpu: Any, tmp_path: Path) -> None:
    path = tmp_path / "paper.jsonl"
    measure(cpu, path, [JOB])
    complete, rows = measure(cpu, path, [JOB, Job(Pattern(2, 4, 8, 1), "float32", "bsf", 40)], deadline=0.0)
    assert complete == 1  # what was there already
    assert {each.pattern for each in rows} == {"1,8,8,2"}


def test_the_time_limit_is_held_within_a_job(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that goes on with what is done: 10 s a check, 3 s a measurement."""
    now, did = [0.0], []
    attempt = Runner._attempt

    def check(self: Any, contender: Any, *rest: Any) -> Any:
        found = attempt(self, contender, *rest)
        now[0] += 10
        did.append(contender.implementation)
        return found

    def measured(self: Any, timed: Any) -> Any:
        now[0] += 3
        did.append("us")
        return {"us": 1.0, "runs": 1}

    monkeypatch.setattr(runner, "monotonic", lambda: now[0])
    monkeypatch.setattr(Runner, "_attempt", check)
    monkeypatch.setattr(Times, "measure", measured)
    other = Job(Pattern(2, 4, 8, 1), "float32", "bsf", 40)
    complete, _ = measure(cpu, tmp_path / "a.jsonl", [JOB, other], deadline=45.0, names=("ksgen", "bmm"))
    assert (complete, did, now[0]) == (1, ["ksgen", "bmm", *["us"] * 4, "ksgen"], 42)  # 10 s more for bmm would not fit
    did.clear()
    complete, _ = measure(cpu, tmp_path / "b.jsonl", [JOB], deadline=now[0] + 25.0, names=("ksgen", "bmm"))
    assert (complete, did) == (0, ["ksgen", "bmm", "us", "us"])


def test_compilers_end_with_the_time(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, built = [0.0], []

    def build_many(requests: Any, compiler: Any, on_done: Any) -> None:
        for request in requests:
            built.append(request)
            now[0] += 40
            on_done(request, None)

    monkeypatch.setattr(runner, "monotonic", lambda: now[0])
    monkeypatch.setattr(runner, "build_many", build_many)
    jobs = [Job(Pattern(2, 4, 8, d), "float32", "bsf", 40) for d in (1, 2, 3, 4)]
    complete, _ = measure_into(cpu, tmp_path / "a.jsonl", jobs, 60.0)
    assert (complete, len(built)) == (0, 2)


def test_what_cannot_be_measured_is_a_row_with_its_reason(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pattern: Pattern, layout: str, weights: Any) -> Any:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED\nwhen calling")

    def full(pattern: Pattern, layout: str, weights: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 9 TiB")

    def wrong(pattern: Pattern, layout: str, weights: Any) -> Any:
        return lambda x: x.new_zeros(len(x), pattern.out_features)

    for name, prepare in (("bmm", broken), ("einsum", full), ("dense", wrong)):
        monkeypatch.setitem(BASELINES, name, Baseline(name, "", prepare))
    huge = Baseline("sparse", "", broken, elements=lambda pattern: 10**15)
    slow = Baseline("bsr", "", broken, multiplications=lambda pattern: 10**15)
    monkeypatch.setitem(BASELINES, "sparse", huge)
    monkeypatch.setitem(BASELINES, "bsr", slow)
    _, rows = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("bmm", "einsum", "dense", "sparse", "bsr"))
    said = {each.implementation: (each.status, each.reason) for each in rows}
    assert said["bmm"] == ("failed", "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling")
    assert said["einsum"] == ("out of memory", "tried to allocate 9 TiB")
    assert said["sparse"][0] == "out of memory"
    assert said["sparse"][1].startswith("needs 4000000.0 GB more, and ")
    assert said["bsr"][0] == "too slow"
    assert said["bsr"][1].startswith("its multiplications alone take ")
    assert said["dense"] == (OK, "")
    dense = next(each for each in rows if each.implementation == "dense")
    assert dense.error == pytest.approx(1.0)  # timed, but it counts nowhere
    assert not dense.counts
    told = lines_of(tmp_path / "paper.jsonl", "contender")
    measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("bmm",))  # what failed is not tried again
    assert lines_of(tmp_path / "paper.jsonl", "contender") == told


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [(torch.OutOfMemoryError("no more"), "out of memory", "no more"), (RuntimeError("a bug"), "failed", "RuntimeError: a bug")],
)
def test_what_fails_later_is_a_row_too(error: Exception, status: str, reason: str, cpu: Any, tmp_path: Path, monkeypatch: Any) -> None:
    calls = []

    def greedy(pattern: Pattern, layout: str, weights: Any) -> Any:
        def product(x: Any) -> Any:
            calls.append(1)
            if len(calls) > 8:
                raise error
            return x @ torch.zeros(pattern.in_features, pattern.out_features)

        return product

    monkeypatch.setitem(BASELINES, "dense", Baseline("dense", "", greedy))
    complete, rows = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("dense", "bmm"), measurements=9)
    said = {each.implementation: (each.status, each.reason, each.status == OK and each.is_accurate) for each in rows}  # whatever the load
    assert said == {"dense": (status, reason, False), "bmm": (OK, "", True)}
    assert complete == 1


def test_a_lost_gpu_ends_the_run_and_says_so(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(where: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with Log(tmp_path / "paper.jsonl") as log:
        measuring = Runner(log, cpu, Protocol(FAST), Times(), {"device": cpu.name}, 0.0, lambda done, total, now: None)
        measuring.where = torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        with pytest.raises(KsgenError, match=r"the GPU context is lost \(a bug\); start again: it goes on after this"):
            measuring._refused(RuntimeError("a bug"))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
        assert measuring._refused(RuntimeError("a bug"))["status"] == "failed"


def test_arrays_that_do_not_fit_are_rows_too(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_free_memory", lambda: 1000)
    _, rows = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("ksgen", "bmm"))
    assert {each.status for each in rows} == {"out of memory"}


@pytest.mark.parametrize(
    ("once_s", "runs", "most_measurements"),
    [(0.001, 10, 200), (0.04, 5, 10), (0.15, 1, 13), (0.9, 1, 2), (7.0, 1, 1)],
)
def test_a_slow_contender_is_measured_less_often(once_s: float, runs: int, most_measurements: int) -> None:
    ran: list[int] = []

    def clock(call: Any) -> float:
        before = len(ran)
        call()
        return (len(ran) - before) * once_s

    timed = Timed(Ready(ran.append, lambda y: y, clock, lambda: None), 3, Protocol((), most_seconds=2.0))
    assert (timed.runs, timed.most_measurements) == (runs, most_measurements)
    assert timed.seconds() == pytest.approx(once_s)
    assert ran == [number % 3 for number in range(len(ran))]  # sets of arrays take turns


def test_tf32_is_allowed_where_the_comparison_allows_it() -> None:
    seen = []
    for precision in ("float32", "tf32", "float16"):
        with runner._allowing(Job(JOB.pattern, precision, "bsf", 1).comparison):
            matmul = torch.backends.cuda.matmul
            seen.append((matmul.allow_tf32, matmul.allow_fp16_reduced_precision_reduction))
    assert seen == [(False, False), (True, False), (False, False)]
    assert torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction  # PyTorch's own default is back


def test_our_contenders_by_family_and_wisdom(monkeypatch: pytest.MonkeyPatch) -> None:
    from ksgen.launch.planner import PLANNER

    gpu: Any = FakeGpu()
    job = Job(Pattern(1, 8, 24, 2), "float32", "bsf", 40)
    names = [(each.arithmetic, each.family, each.variant) for each in contenders(job, gpu, (OURS,))]
    assert names == [("float32", "simt", "default"), ("tf32x3", "wgmma_registers", "default"), ("tf32x3", "mma", "default")]
    sixteen = Job(JOB.pattern, "float16", "bsf", 40)
    assert [each.family for each in contenders(sixteen, gpu, (OURS,))] == ["wgmma_registers", "mma", "wgmma_permuted", "simt"]
    found = next(family_named("simt").space(JOB.kernel("float32"), limits_of(gpu)))
    monkeypatch.setattr(
        PLANNER, "choice", lambda device, kernel, batch: Choice("simt", found, "wisdom, measured at batch 40", from_wisdom=True)
    )
    tuned = next(each for each in contenders(JOB, gpu, (OURS,)) if each.variant == "tuned")
    assert (tuned.family, tuned.constants, tuned.why) == ("simt", str(found), "wisdom, measured at batch 40")


@needs_opencl
@pytest.mark.parametrize("precision", list(COMPARISONS))
def test_nothing_is_called_tuned_that_no_search_found(precision: str, cpu: Any) -> None:
    for layout in LAYOUTS:
        ours = contenders(Job(JOB.pattern, precision, layout, 40), cpu, (OURS,))
        assert [(each.family, each.variant, each.why) for each in ours] == [("vector", "default", "the family's default")]


@pytest.mark.skipif(not is_installed("none"), reason="the fake GPU is the emulator, which needs g++")
@pytest.mark.parametrize(("precision", "layout"), [("float32", "bsf"), ("float16", "bsl"), ("float16", "bsf")])
def test_our_kernels_on_pytorchs_memory(precision: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: pointers of tensors, the default stream; the device is the emulator."""
    gpu: Any = FakeGpu()
    job = Job(Pattern(1, 16, 8, 2), precision, layout, 24)
    problem = Problem(job, torch.device("cpu"), 0)
    del problem.sets[2:]
    owned = []

    def own(tensor: Any) -> Any:
        owned.append(tensor.view(torch.uint8).numpy())
        gpu.own(owned[-1].reshape(-1))
        return tensor

    for tensor in (problem.weights, *problem.sets):
        own(tensor)
    new_full = torch.Tensor.new_full
    monkeypatch.setattr(torch.Tensor, "new_full", lambda self, *shape: own(new_full(self, *shape)))
    for each in contenders(job, gpu, (OURS,)):
        assert each.source is not None
        text = each.source()
        loaded = load(gpu, text, TextCompiler().compile(text.text, text.entry, gpu.target))
        ready = _on_tensors(make_plan(gpu, text.kernel, 24, Choice(each.family, text.constants, ""), loaded), problem)
        for number in (1, 0):
            y = ready.run(number)
            gpu.synchronize()
            assert problem.error(ready.y(y)) <= (1e-6 if precision == "float32" else 1e-3)  # the sets are copies
        assert {stream for _, stream in gpu.launches} == {None}


def test_tuning_searches_for_what_wisdom_does_not_know(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def search(pattern: Pattern, **options: Any) -> None:
        asked.append((pattern, options["precision"], options["layout"], options["batch"], options["budget"], options["device"]))

    monkeypatch.setattr("ksgen.tuning.tune", search)
    measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3")
    assert asked == [(JOB.pattern, "float32", "bsf", 40, "3", f"opencl:{cpu.index}")]
    measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3", names=("bmm",))
    assert len(asked) == 1


def test_tuning_knows_what_was_measured_at_the_batch_by_this_template(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    kernel, family = JOB.kernel("float32"), family_named("simt")
    constants = family.default(kernel, limits_of(cpu))
    asked: list[int] = []
    monkeypatch.setattr("ksgen.tuning.tune", lambda pattern, **options: asked.append(options["batch"]))
    for batch, template, searches in ((7, template_digest("simt"), 1), (40, "stale", 2), (40, template_digest("simt"), 2)):
        save(cpu.name, [Entry(kernel, batch, "simt", constants, {"median_us": 1.0, "template": template})])
        tune(JOB, cpu, "3")
        assert len(asked) == searches


def test_a_search_ends_with_the_time(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    budgets: list[str] = []
    monkeypatch.setattr("ksgen.tuning.tune", lambda pattern, **options: budgets.append(options["budget"]))
    monkeypatch.setattr("ksgen.bench.contenders.monotonic", lambda: 100.0)
    for budget, deadline in (("60s", 200.0), ("60s", 112.0), ("1m", 160.0), ("200", 101.0), ("60s", 99.0)):
        tune(JOB, cpu, budget, deadline)
    assert budgets == ["60s", "12.0s", "1m", "200"]


def test_a_search_that_finds_nothing_costs_only_itself(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def search(pattern: Pattern, **options: Any) -> None:
        raise error

    monkeypatch.setattr("ksgen.tuning.tune", search)
    error: KsgenError = KsgenError("no candidate could be measured")
    with pytest.warns(UserWarning, match="the search for float32 found nothing \\(no candidate could be measured\\)"):
        complete, _ = measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3")
    assert complete == 1
    error = ToolchainError("no compiler")
    with pytest.raises(ToolchainError, match="no compiler"):
        measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3")


# The log, and the files that rows go to.


@pytest.fixture
def log_text(cpu: Any, tmp_path: Path) -> str:
    measure(cpu, tmp_path / "whole.jsonl", [JOB])
    return (tmp_path / "whole.jsonl").read_text()


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
    "damage", ["{", "[]", "null", '{"kind": "measurement", "key": "nobody"}', '{"kind": "song"}', "\xff", '{"kind": "contender"}']
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
        with pytest.raises(KsgenError, match=r"another `ksgen bench` writes to it; wait for it, or name another file with -o"):
            Log(path)
        log.append("run", {"device": "Abacus"})
    with pytest.raises(KsgenError, match=r"holds measurements of Abacus, and this is .*; name another file with -o"):
        measure(cpu, path, [JOB])


def test_rows_are_the_same_from_a_log_and_from_csv(log_text: str, tmp_path: Path) -> None:
    rows = read_rows(tmp_path / "whole.jsonl")
    write_csv(rows, tmp_path / "rows.csv")
    assert read_rows(tmp_path / "rows.csv") == rows


def test_parquet_where_pyarrow_is_there(tmp_path: Path) -> None:
    rows = [row(), row("2,48,192,1", "bmm", median_us=None, status="failed")]
    if write_parquet(rows, tmp_path / "rows.parquet"):
        assert read_rows(tmp_path / "rows.parquet") == rows
    else:
        (tmp_path / "rows.parquet").write_bytes(b"PAR1")
        with pytest.raises(KsgenError, match=r"reading Parquet needs pyarrow: pip install pyarrow; or take the CSV beside it"):
            read_rows(tmp_path / "rows.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace("median_us", "median", 1), r"rows\.csv: the column median_us is missing; a table of .* has pattern"),
        (lambda text: text.replace("100.0", "fast", 1), r"rows\.csv:2: median_us='fast'; accepted: a number"),
        (lambda text: text.replace("1,48,48,2", "1,48,48", 1), r"rows\.csv:2: '1,48,48' is not a pattern"),
        (lambda text: text.replace(",25088,", ",,", 1), r"rows\.csv:2: batch is empty; accepted: a number"),
        (lambda text: text.splitlines(keepends=True)[0], r"rows\.csv: holds no results yet; `ksgen bench paper -o .*` adds some"),
        (lambda text: "", r"rows\.csv: the column pattern is missing"),
    ],
)  # fmt: skip
def test_a_damaged_table_is_named(change: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    write_csv([row()], path)
    path.write_text(change(path.read_text()))
    with pytest.raises(KsgenError, match=message):
        read_rows(path)


# The command.


@needs_opencl
def test_the_command_end_to_end(tmp_path: Path) -> None:
    done = ksgen("paper", *SMALL, "--without", "compiled", "--json", cwd=tmp_path, KSGEN_DEVICE="opencl")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["jobs"], told["complete"], told["files"][:2]) == (4, 4, ["paper.jsonl", "paper.csv"])
    rows = read_rows(tmp_path / "paper.csv")
    assert rows == read_rows(tmp_path / "paper.jsonl")
    assert {each.implementation for each in rows} == {OURS, *OTHERS, *PARTS} - {"compiled"}
    assert all(each.is_accurate for each in rows if each.status == OK and each.implementation not in PARTS)
    assert {each.status for each in rows} == {OK, "unsupported"}
    assert all(getattr(rows[0], name) for name in ("device", "driver", "compiler", "torch", "baselines_on", "ksgen", "date"))
    assert tuple((tmp_path / "paper.csv").read_text().splitlines()[0].split(",")) == COLUMNS


@needs_opencl
def test_a_kill_loses_at_most_one_measurement(tmp_path: Path) -> None:
    """A real SIGKILL while it measures; then the same command."""
    path = tmp_path / "paper.jsonl"
    command = ["paper", *SMALL[:6], "--contenders", "ksgen,bmm", "--layout", "bsf", "--runs", "20", "--measurements"]
    begun = subprocess.Popen(
        [sys.executable, "-m", "ksgen", "bench", *command, "2000"], cwd=tmp_path, env=os.environ | {"KSGEN_DEVICE": "opencl"}
    )  # fmt: skip
    end = time.monotonic() + 120
    while time.monotonic() < end and not (path.exists() and path.read_bytes().count(b'"measurement"') >= 25):
        assert begun.poll() is None, "it ended before it was killed"
        time.sleep(0.01)
    os.kill(begun.pid, signal.SIGKILL)
    assert begun.wait() == -signal.SIGKILL
    left = path.read_bytes()
    kept = lines_of(path, "measurement")  # every whole line can be read: at most the one being written is lost
    assert len(kept) >= 25
    counts = [sum(each["key"] == key for each in kept) for key in {each["key"] for each in kept}]
    assert max(counts) - min(counts) <= 1  # they take turns
    wanted = max(counts) + 2
    done = ksgen(*command, str(wanted), cwd=tmp_path, KSGEN_DEVICE="opencl")
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(left.rpartition(b"\n")[0])
    assert {each.measurements for each in read_rows(path)} == {wanted}


MISTAKES = [
    (["paper", "--tune", "soon"], "ksgen: budget 'soon': accepted: a time such as 60s, 5m or 1h, or"),
    (["paper", "--precision", "float31"], "ksgen: precision 'float31'; did you mean float32? accepted: float32, tf32"),
    (["paper", "--precision", "fp16"], "ksgen: precision 'fp16'; did you mean float16?"),
    (["paper", "--layout", "bsm"], "ksgen: layout 'bsm'; did you mean bsl? accepted: bsf, bsl"),
    (["paper", "--contenders", "ksgen,bmn"], "ksgen: contender 'bmn'; did you mean bmm? accepted: ksgen, bmm, einsum"),
    (["paper", "--contenders", "bmm", "--without", "bmm"], "ksgen: no contender is left; --contenders names some, and"),
    (["paper", "--patterns", "1,2,3"], "ksgen: '1,2,3' is not a pattern"),
    (["paper", "--patterns", " "], "ksgen: --patterns ' '; accepted: paper, published, a spec, or patterns such as"),
    (["paper", "--patterns", "none.yaml"], "ksgen: none.yaml: cannot be read"),
    (["paper", "--time-limit", "8x"], "ksgen: time '8x'; accepted: 90s, 8m, 1h30m"),
    (["paper", "--time-limit", "0.001s"], "ksgen: --time-limit was up before the first measurement; give it more"),
    (["paper", "--batch", "0"], "ksgen: Invalid value for '--batch'"),
    (["paper", "-o", "rows.csv"], "ksgen: -o rows.csv: the log is a .jsonl file; its rows go to the .csv beside it"),
    (["paper", "-o", "file/rows.jsonl"], "ksgen: file/rows.jsonl: cannot be written ("),
    (["paper", "-o", "damaged.jsonl"], "ksgen: damaged.jsonl:1: not a line of `ksgen bench`"),
    (["paper", "--device", "abacus"], "ksgen: device 'abacus': none is called that"),
    (["report", "none.csv"], "ksgen: none.csv: cannot be read (No such file or directory)"),
    (["report", "file"], "ksgen: file: not a results file; accepted: .jsonl, .csv, .parquet"),
    (["report", "damaged.jsonl"], "ksgen: damaged.jsonl:1: not a line of `ksgen bench`"),
    (["energy", "--device", "opencl"], "ksgen: energy is measured on NVIDIA GPUs, by NVML; "),
    (["papr"], "ksgen: No such command 'papr'"),
]  # fmt: skip


@needs_opencl
@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from ksgen import cli

    (tmp_path / "file").write_text("")
    (tmp_path / "damaged.jsonl").write_text("{]\n")
    monkeypatch.chdir(tmp_path)
    small = ["--patterns", "1,4,4,1", "--batch", "8"] if arguments[0] in ("paper", "energy") and "--patterns" not in arguments else []
    monkeypatch.setattr(sys, "argv", ["ksgen", "bench", *arguments, *([] if "--batch" in arguments else small)])
    monkeypatch.setenv("KSGEN_DEVICE", "opencl")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    told = capsys.readouterr()
    assert (ended.value.code, told.out) == (2, "")
    assert told.err.startswith(message), told.err


@pytest.mark.parametrize("command", ["paper", "energy"])
def test_no_pytorch_is_one_line(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from click.testing import CliRunner

    from ksgen.commands import bench

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(bench.command, [command])
    assert isinstance(done.exception, KsgenError)
    assert str(done.exception) == f"`ksgen bench {command}` needs torch: {install_line('bench')}"


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("8m", 480), ("1.5h", 5400), ("1h30m", 5400), (".5s", 0.5)])
def test_durations(text: str, seconds: float) -> None:
    from ksgen.commands.bench_common import duration

    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "m", "8 m", "8m9", "-1s", "1d", "nan"])
def test_what_is_no_duration(text: str) -> None:
    from ksgen.commands.bench_common import duration

    with pytest.raises(KsgenError, match=r"time '.*'; accepted: 90s, 8m, 1h30m"):
        duration(text)


def test_which_patterns() -> None:
    from ksgen.commands.bench_common import patterns_named
    from ksgen.spec import paper_patterns, stratified

    assert patterns_named(None, 7) == stratified(7)
    assert patterns_named(None, 60) == stratified(60)
    assert max(pattern.d for pattern in patterns_named(None, None, most_d=64)) == 64
    assert set(patterns_named("paper", None)) == set(paper_patterns())
    assert patterns_named("published", None)[0] == Pattern(1, 48, 48, 16)
    assert len(patterns_named("specs/vit.yaml", None)) == 6
    assert patterns_named("1,2,3,4  4,3,2,1", 1) == [Pattern(1, 2, 3, 4)]
