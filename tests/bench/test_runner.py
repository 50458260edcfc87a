"""`ksgen bench paper` on the processor: what it measures, what it writes down, how it goes on, what it refuses."""

import subprocess
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.bench.roster import OURS
from ksgen.bench.rows import OK, Log, ResultRow, read_rows
from ksgen.devices import find_device
from ksgen.errors import DeviceError, KsgenError
from ksgen.measure.roofline import Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
import ksgen  # noqa: E402  (after the skip)
from ksgen.bench import runner  # noqa: E402  (PyTorch may be missing)
from ksgen.bench.baselines import BASELINES, Baseline  # noqa: E402
from ksgen.bench.libraries import UnsupportedError  # noqa: E402
from ksgen.bench.problem import LayerJob, product_job  # noqa: E402
from ksgen.bench.runner import Runner  # noqa: E402
from ksgen.bench.timing import Protocol, Times  # noqa: E402
from ksgen.build.processors import processor_name  # noqa: E402
from ksgen.errors import ToolchainError  # noqa: E402
from tests.support.bench_runs import FACTS, FAST, JOB, lines_of, measure  # noqa: E402


def measure_into(device: Any, path: Path, jobs: list[LayerJob], deadline: float) -> tuple[int, int]:
    """Without rows, of which there may be none."""
    with Log(path) as log:
        runs = Runner(
            log,
            device,
            Protocol(("ksgen",)),
            Times(),
            FACTS | {"device": device.name},
            deadline,
            lambda done, total, now: None,
        )
        return runs.run(jobs), len(log.content.contenders)


def test_a_log_is_of_processors_with_one_instruction_set(tmp_path: Path) -> None:
    native = find_device("native")
    with Log(tmp_path / "paper.jsonl") as log:
        log.append("run", {"device": native.name, "target": "host elsewhere"})
        facts = FACTS | {"device": native.name, "target": "host here"}
        with pytest.raises(KsgenError, match="measurements for host elsewhere, and this is host here; name another"):
            Runner(log, native, Protocol(("bmm",)), Times(), facts, inf, lambda done, total, now: None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rewriting_moves_what_bmm_moves(layout: str) -> None:
    arrays = product_job(Pattern(2, 6, 4, 3), "float32", layout, 10).problem(torch.device("cpu"), 0)
    (y,), (moved,) = (BASELINES[name].prepare(arrays)(arrays.sets[0]) for name in ("bmm", "rewriting"))
    assert (moved.shape, moved.stride()) == (y.shape, y.stride())


def test_contenders_take_turns_and_every_row_is_complete(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "paper.jsonl"
    # a test's short probe may copy within a cache
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: Ceilings(5e10, 2e11))
    monkeypatch.setattr(runner, "BLOCK_SECONDS", 0.0)
    jobs = [JOB, product_job(Pattern(2, 4, 8, 1), "float16", "bsl", 40)]
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
        assert (each.floor_us, each.share_of_floor) == (None, None), "a cache keeps so little data"
        assert (each.device, each.date) == (cpu.name, "2026-01-02")
    assert (ours.family, ours.variant, ours.arithmetic) == ("vector", "default", "float32")
    assert (strided.status, strided.median_us, strided.counts) == ("unsupported", None, False)
    assert "no view of X has a stride of 1" in strided.reason
    assert (part.status, part.error, part.floor_us, part.counts) == (OK, None, None, False)
    assert found["2,4,8,1", "ksgen"].is_accurate
    order = [line["key"].split()[4] for line in lines_of(path, "measurement") if line["key"].startswith("1,8,8,2")]
    one, two, three = "ksgen", "bmm", "rewriting"
    assert order == [one, two, three, two, three, one, three, one, two], "each round begins with the next contender"


def test_short_runs_fill_a_block_on_a_processor(cpu: Any, tmp_path: Path) -> None:
    _, (row,) = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("bmm",))
    assert row.runs > 2, "the protocol's"


def test_a_processors_floor_is_measured_for_every_job(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor's speed varies with other work: the better of two times counts. A GPU's is measured once."""
    rates = iter((1, 2, 4, 3))
    monkeypatch.setattr(runner, "measure_ceilings", lambda *_: Ceilings((rate := next(rates)) * 1e9, rate * 1e6))
    jobs = [JOB, replace(JOB, layout="bsl")]
    path = tmp_path / "log.jsonl"
    measure(cpu, path, jobs)
    found = {row["layout"]: row["ceiling_byte_per_s"] for row in lines_of(path, "contender")}
    assert found == {"bsf": 2e9, "bsl": 4e9}
    floors = {row.layout: row.floor_us for row in read_rows(path) if row.implementation == OURS}
    assert floors["bsf"] == pytest.approx(2 * floors["bsl"])


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
    complete, rows = measure(cpu, path, [JOB, product_job(Pattern(2, 4, 8, 1), "float32", "bsf", 40)], deadline=0.0)
    assert complete == 1  # what was there already
    assert {each.pattern for each in rows} == {"1,8,8,2"}


def test_the_time_limit_is_kept_within_a_job(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances 10 s per check and 3 s per measurement."""
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
    other = product_job(Pattern(2, 4, 8, 1), "float32", "bsf", 40)
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
    jobs = [product_job(Pattern(2, 4, 8, d), "float32", "bsf", 40) for d in (1, 2, 3, 4)]
    complete, _ = measure_into(cpu, tmp_path / "a.jsonl", jobs, 60.0)
    assert (complete, len(built)) == (0, 2)


def test_what_cannot_be_measured_is_a_row_with_its_reason(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(arrays: Any) -> Any:
        raise RuntimeError("CUBLAS_STATUS_ALLOC_FAILED\nwhen calling")

    def full(arrays: Any) -> Any:
        raise torch.OutOfMemoryError("tried to allocate 9 TiB")

    def wrong(arrays: Any) -> Any:
        return lambda x: [x.new_zeros(shape) for shape in arrays.y_shapes]

    for name, prepare in (("bmm", broken), ("einsum", full), ("dense", wrong)):
        monkeypatch.setitem(BASELINES, name, Baseline(name, "", prepare))
    huge = Baseline("sparse", "", broken, multiplications=lambda chain: 1, stored=10**15)
    slow = Baseline("bsr", "", broken, multiplications=lambda chain: 10**15, stored=0)
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


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (torch.OutOfMemoryError("no more"), "out of memory", "no more"),
        (RuntimeError("a bug"), "failed", "RuntimeError: a bug"),
    ],
)
def test_what_fails_later_is_a_row_too(
    error: Exception, status: str, reason: str, cpu: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    calls = []

    def greedy(arrays: Any) -> Any:
        def product(x: Any) -> Any:
            calls.append(1)
            if len(calls) > 8:
                raise error
            return [x @ torch.zeros(JOB.pattern.in_features, JOB.pattern.out_features)]

        return product

    monkeypatch.setitem(BASELINES, "dense", Baseline("dense", "", greedy))
    complete, rows = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("dense", "bmm"), measurements=9)
    # whatever the load
    said = {each.implementation: (each.status, each.reason, each.status == OK and each.is_accurate) for each in rows}
    assert said == {"dense": (status, reason, False), "bmm": (OK, "", True)}
    assert complete == 1


def test_a_conversion_that_fails_loses_no_row(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    prepare = BASELINES["bmm"].prepare

    def once(arrays: Any) -> Any:
        made.append(1)
        if len(made) > 1:
            raise torch.OutOfMemoryError("no more")
        return prepare(arrays)

    monkeypatch.setitem(BASELINES, "bmm", Baseline("bmm", "", once))
    _, (row,) = measure(cpu, tmp_path / "a.jsonl", [JOB], names=("bmm",))
    assert (row.status, row.measurements, row.conversion_us, len(made)) == (OK, 2, None, 2)


def test_a_conversion_that_loses_the_gpu_is_its_contenders_row(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a row of the next contender."""
    made: list[int] = []
    prepare = BASELINES["bmm"].prepare

    def once(arrays: Any) -> Any:
        made.append(1)
        if len(made) > 1:
            raise RuntimeError("an illegal access")
        return prepare(arrays)

    monkeypatch.setitem(BASELINES, "bmm", Baseline("bmm", "", once))
    monkeypatch.setattr(Runner, "_has_lost_gpu", lambda self: len(made) > 1)
    path = tmp_path / "a.jsonl"
    with pytest.raises(DeviceError, match=r"the GPU context is lost \(RuntimeError: an illegal access\)"):
        measure(cpu, path, [JOB], names=("bmm",))
    (line,) = lines_of(path, "contender")
    assert (line["status"], line["reason"]) == ("failed", "RuntimeError: an illegal access")


@pytest.mark.parametrize(
    ("prepare_s", "deadline", "is_timed"), [(1.9, 100.0, True), (2.1, 100.0, False), (1.9, 1.0, False)]
)
def test_a_conversion_is_timed_if_there_is_time(
    prepare_s: float, deadline: float, is_timed: bool, cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, made = [0.0], []
    prepare = BASELINES["bmm"].prepare

    def slow(arrays: Any) -> Any:
        now[0] += prepare_s
        made.append(1)
        return prepare(arrays)

    monkeypatch.setattr(runner, "monotonic", lambda: now[0])
    monkeypatch.setitem(BASELINES, "bmm", Baseline("bmm", "", slow))
    measure(cpu, tmp_path / "a.jsonl", [JOB], deadline, names=("bmm",), most_seconds=2.0)
    assert (len(made) > 1) == is_timed


def test_another_quantity_times_no_conversion_and_keeps_the_logs(cpu: Any, tmp_path: Path) -> None:
    class Joules(Times):
        column = "joule"

        def measure(self, timed: Any) -> Any:
            return {"joule": 1.0, "idle_watt": 1.0}

    def row_of(path: Path) -> ResultRow:
        with Log(path) as log:
            facts = FACTS | {"device": cpu.name}
            protocol = Protocol(("bmm",), measurements=2, runs=2)
            Runner(log, cpu, protocol, Joules(), facts, float("inf"), lambda done, total, now: None).run([JOB])
        (row,) = read_rows(path)
        return row

    assert row_of(tmp_path / "alone.jsonl").conversion_us is None
    _, (timed,) = measure(cpu, tmp_path / "both.jsonl", [JOB], names=("bmm",))
    assert timed.conversion_us
    both = row_of(tmp_path / "both.jsonl")
    assert (both.joule, both.median_us, both.conversion_us) == (1.0, timed.median_us, timed.conversion_us)


def test_a_library_that_fails_in_a_measurement_is_a_row(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: Any, timed: Any) -> Any:
        raise UnsupportedError("a library fails")

    monkeypatch.setattr(Times, "measure", fails)
    complete, (row,) = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("bmm",))
    assert (complete, row.status, row.reason) == (1, "unsupported", "a library fails")


@pytest.mark.parametrize("status", ["failed", "unsupported"])
def test_a_lost_gpu_ends_the_run_after_a_row(
    status: str, cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(where: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    path = tmp_path / "paper.jsonl"
    with Log(path) as log:
        measuring = Runner(log, cpu, Protocol(FAST), Times(), FACTS, 0.0, lambda done, total, now: None)
        bmm, strided = (each for each in measuring._contenders(JOB) if each.implementation in ("bmm", "strided"))
        refused, rates = {"status": status, "reason": "a bug"}, Ceilings(1e9, 1e9)
        measuring.where = torch.device("cuda")
        monkeypatch.setattr(torch.cuda, "synchronize", lambda where: None)
        measuring._log_contender(bmm, rates, refused)
        monkeypatch.setattr(torch.cuda, "synchronize", lost)
        with pytest.raises(
            DeviceError, match=r"^the GPU context is lost \(a bug\); the same command continues after this measurement$"
        ):
            measuring._log_contender(strided, rates, refused)
        assert measuring._missing(strided) == 0, "the same command would lose the GPU again"
    assert [line["status"] for line in lines_of(path, "contender")] == [status, "failed"]


def test_arrays_that_do_not_fit_are_rows_too(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "_free_memory", lambda: 1000)
    _, rows = measure(cpu, tmp_path / "paper.jsonl", [JOB], names=("ksgen", "bmm"))
    assert {each.status for each in rows} == {"out of memory"}


@pytest.mark.parametrize(
    ("us", "asked", "made"),
    [
        ([100.0] * 30, 6, 6),
        ([100.0, 140.0, *[100.0] * 30], 6, 9),  # an interval of nine leaves out one at each end
        ([100.0, 140.0] * 15, 6, 18),
        ([100.0, 140.0] * 15, 5, 5),  # too few for an interval
    ],
)
def test_more_is_measured_while_a_median_is_uncertain(
    us: list[float], asked: int, made: int, cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(us)
    monkeypatch.setattr(
        runner.Times, "measure", lambda self, timed: {"us": next(times), "runs": 2, "others_share": None}
    )
    _, (row,) = measure(cpu, tmp_path / "a.jsonl", [JOB], names=("bmm",), measurements=asked)
    assert row.measurements == made
    assert bool(row.doubt) == (us[2:4] == us[:2] and us[0] != us[1])


def git(folder: Path, *words: str) -> None:
    own = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")
    subprocess.run(["git", *own, *words], cwd=folder, check=True, capture_output=True)


def test_a_commit_is_the_checkouts_own_and_says_if_files_differ(tmp_path: Path) -> None:
    assert runner.commit(tmp_path) == ""
    git(tmp_path, "init")
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert runner.commit(package) == ""  # lies in a checkout, and is none of its files
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "first")
    clean = runner.commit(package)
    assert len(clean) == 40
    (package / "__init__.py").write_text("more = 1\n")
    assert runner.commit(package) == f"{clean}+"


def test_a_machine_without_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert runner.commit(Path(ksgen.__file__).parent) == ""


def refuse() -> Any:
    raise ToolchainError("no compiler")


@pytest.mark.parametrize(
    ("compiler", "told"),
    [(lambda: SimpleNamespace(name="nvcc", version="13.0"), "nvcc 13.0"), (refuse, "")],
    ids=["nvcc", "none"],
)
def test_every_row_says_what_measured_it(compiler: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "torch_device", lambda device: torch.device("cpu"))
    device = SimpleNamespace(name="Here", target="cpu", runtime="opencl", driver_version="1.2", compiler=compiler)
    found = runner.run_facts(device)
    assert (found["device"], found["driver"], found["compiler"]) == ("Here", "1.2", told)
    assert (found["torch"], found["ksgen"]) == (torch.__version__, ksgen.__version__)
    assert found["baselines_on"] == f"{processor_name()}, {torch.get_num_threads()} threads"
    assert all(isinstance(each, str) for each in found.values())
