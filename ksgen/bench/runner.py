"""Runner of jobs: checks every contender of a job, then measures them alternately.

Each measurement is written at once. A run continues an existing log. A contender that cannot run gets a line with the
reason. Does not interpret the numbers.
"""

import re
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import count, cycle, islice
from math import inf
from pathlib import Path
from time import monotonic

import torch

import ksgen
from ksgen.bench.contenders import Contender, contenders, torch_device, tune
from ksgen.bench.libraries import UnsupportedError
from ksgen.bench.problem import MOST_SETS, LayerArrays, LayerJob
from ksgen.bench.roster import COMPILED, FORWARD, OUR_METHODS, OURS, TRAINING, Comparison
from ksgen.bench.rows import OK, Facts, Log
from ksgen.bench.timing import Protocol, Quantity, Timed, Times
from ksgen.build.build import Request, build_many
from ksgen.build.processors import processor_name
from ksgen.build.toolchain import find_compiler
from ksgen.devices.base import Device
from ksgen.errors import DeviceError, KsgenError, ToolchainError
from ksgen.families import family_for, operand_of
from ksgen.launch.choice import limits_of
from ksgen.measure.roofline import Ceilings, best_of, measure_ceilings
from ksgen.measure.trust import BLOCK_SECONDS, LEAST_BLOCKS, keep_freed_memory, return_freed_memory, why_unreliable
from ksgen.values import counted

ACCEPTED = 2.0  # accepted multiple of the tolerance, because baselines round at other points than our kernels
HOPELESS = 3.0  # a contender is skipped if it is expected to take this many times the fastest one's time
BETTER_PACE = 10  # margin of that expectation: this many times the contender's best pace so far
MORE = 3  # most measurements for an uncertain median, as a multiple of the protocol's
DISTURBED = 5  # factor on the time limit for a first run: a second run decides whether it is too slow
MATRIX_UNITS = 16  # a processor's rate in 16 bits is at most this multiple of float32's
_LOST = {"status": "failed"}  # of the contender that loses the GPU, whatever it raises
_BUILT_AHEAD, _FEW_AHEAD = 32, 4  # jobs whose kernels are compiled together, on a GPU and on a processor


class _TimeIsUpError(Exception):
    """Stop compiling."""


class _TooSlowError(Exception):
    """A single run takes longer than all runs of a contender may."""


Report = Callable[[int, int, str], None]  # jobs done, jobs in all, current step


class Runner:
    """Measurements of one quantity on one device in one process."""

    def __init__(
        self,
        log: Log,
        device: Device,
        protocol: Protocol,
        quantity: Quantity,
        facts: Facts,
        deadline: float,
        report: Report,
    ) -> None:
        self.log, self.device, self.protocol, self.quantity = log, device, protocol, quantity
        self.deadline, self.report = deadline, report
        self.where = torch_device(device)
        self._longest: dict[str, float] = {}  # longest check in seconds, by implementation
        self._paces: dict[tuple[str, str, str], float] = {}  # least seconds per multiplication, by `_pace_key`
        if self.where.type == "cuda":
            torch.cuda.set_device(self.where)  # for events, and the busy work
        else:
            keep_freed_memory()
        for name, words, here in (
            ("device", "of {}, and this is {}", device.name),
            # processors of one name may have different instruction sets
            ("target", "for {}, and this is {}", facts.get("target") if device.kind == "native" else None),
            ("baselines_on", "on {}, and this is {}", facts.get("baselines_on")),
            ("seed", "with --seed {}, and this has {}", protocol.seed),
        ):
            known = log.content.run.get(name)
            if None not in (known, here) and known != here:
                differs = words.format(known, here)
                raise KsgenError(f"{log.path} holds measurements {differs}; name another file with -o")
        log.append("run", {**facts, "seed": protocol.seed})

    def run(self, jobs: Sequence[LayerJob], takes_all: bool = False) -> int:
        """Measure jobs; returns the number of complete ones: all, or those that fit the time limit.

        A log holds either products or layers, unless it `takes_all`.
        """
        if not takes_all:
            self._check_kind(jobs)
        waiting = iter(jobs)
        ahead = _FEW_AHEAD if self.device.limits.is_cpu else _BUILT_AHEAD
        done = 0
        while chunk := list(islice(waiting, 1 if self.protocol.tune else ahead)):
            if self.protocol.tune and OURS in self.protocol.names and self._in_time():
                self.report(done, len(jobs), f"searching for {chunk[0].key}")
                tune(chunk[0], self.device, self.protocol.tune, self.deadline)
            todo = {job: [each for each in self._contenders(job) if self._missing(each)] for job in chunk}
            self._build([each for some in todo.values() for each in some], done, len(jobs))
            for job in chunk:
                self.report(done, len(jobs), job.key)
                if todo[job] and not (self._in_time() and self._measure(job, todo[job])):
                    return done
                done += 1
        return done

    def _check_kind(self, jobs: Sequence[LayerJob]) -> None:
        """Refuse a log of the other kind: layers and products have separate files."""
        are_layers = any(job.layer.name for job in jobs)
        if any(("layer" in each.facts) != are_layers for each in self.log.content.contenders.values()):
            other = "paper" if are_layers else "layers"
            raise KsgenError(f"{self.log.path} holds measurements of `ksgen bench {other}`; name another file with -o")

    def _in_time(self) -> bool:
        return monotonic() < self.deadline

    def _contenders(self, job: LayerJob) -> list[Contender]:
        return contenders(job, self.device, self.protocol.names)

    def _missing(self, contender: Contender) -> int:
        """Number of missing measurements: up to the protocol's, then one more while the median is uncertain."""
        known = self.log.content.contenders.get(contender.key)
        if known is None or known.facts["identity"] != contender.identity:
            return self.protocol.measurements
        if known.facts["status"] != OK:
            return 0
        asked, most = self.protocol.measurements, int(known.facts["most_measurements"])
        done = [each[self.quantity.column] for each in known.measurements if self.quantity.column in each]
        are_times = self.quantity.column == Times.column
        if are_times and len(done) >= asked >= LEAST_BLOCKS and why_unreliable(done):
            return int(len(done) < min(MORE * asked, most))
        return max(0, min(asked, most) - len(done))

    def _build(self, wanted: list[Contender], done: int, total: int) -> None:
        """Build all kernels of a few jobs at once, on all cores.

        Failures are reported when the kernel is prepared.
        """
        sources = [source for each in wanted if each.sources and self._in_time() for source in each.sources()]

        def check_time(*_: object) -> None:
            if not self._in_time():
                raise _TimeIsUpError

        if sources:
            self.report(done, total, f"compiling {counted(len(sources), 'kernel')}")
            requests = dict.fromkeys(Request(source.text, source.entry, self.device.target) for source in sources)
            with suppress(_TimeIsUpError):  # ends running compilers
                build_many(requests, self.device.compiler(), on_done=check_time)

    def _measure(self, job: LayerJob, todo: list[Contender]) -> bool:
        """Measure a job. Returns whether it was finished."""
        if self.where.type == "cuda":
            torch.cuda.empty_cache()  # memory of the previous job
        else:
            return_freed_memory()
        ceilings = {name: self._ceilings(name, job) for name in dict.fromkeys(each.arithmetic for each in todo)}
        with _allowing(job.comparison), torch.set_grad_enabled(job.step == TRAINING):
            try:
                if why := self._too_large(2 * job.bytes):
                    raise MemoryError(why)
                problem = job.problem(self.where, self.protocol.seed)
            except (torch.OutOfMemoryError, MemoryError) as refused:
                for each in todo:
                    self._log_contender(each, ceilings[each.arithmetic], _refusal("out of memory", _one_line(refused)))
                return True
            ready: list[tuple[Contender, Timed, Facts]] = []
            turns = cycle(range(len(problem.sets)))
            for each in todo:
                begin = monotonic()
                # its check may take as long as the longest one so far, which is seconds if something compiles
                if begin + self._longest.get(each.implementation, 0.0) >= self.deadline:
                    return False
                fastest_s = min((timed.once_s for known, timed, _ in ready if not known.is_part), default=inf)
                timed, facts = self._attempt(each, problem, turns, ceilings[each.arithmetic], fastest_s)
                self._log_contender(each, ceilings[each.arithmetic], facts)
                if timed:
                    ready.append((each, timed, facts))
                self._longest[each.implementation] = max(
                    monotonic() - begin, self._longest.get(each.implementation, 0.0)
                )
            is_done = self._in_turn([(each, timed) for each, timed, _ in ready], ceilings)
        if self.device.limits.is_cpu and job.step == FORWARD:
            self._log_again(job, ready, ceilings)
        return is_done

    def _log_again(
        self, job: LayerJob, ready: list[tuple[Contender, Timed, Facts]], before: dict[str, Ceilings]
    ) -> None:
        """Log contenders again with the better of the ceilings before and after them.

        On a processor, the speed may have risen since the first ceilings, and times would lie below their floors.
        """
        after = {
            name: best_of(before[name], self._ceilings(name, job))
            for name in dict.fromkeys(each.arithmetic for each, _, _ in ready)
        }
        for each, _, facts in ready:
            if self.log.content.contenders[each.key].facts["status"] == OK:  # it may have failed since
                self._log_contender(each, after[each.arithmetic], facts | self._floor(each, after[each.arithmetic]))

    def _in_turn(self, ready: list[tuple[Contender, Timed]], ceilings: dict[str, Ceilings]) -> bool:
        """Measure each contender once, then again, until none is missing a measurement.

        Each round begins with the next contender, so that none always follows the same one.
        """
        begins = count()
        while left := [each for each in ready if self._missing(each[0])]:
            first = next(begins) % len(left)
            for contender, timed in (*left[first:], *left[:first]):
                if monotonic() + timed.runs * timed.once_s > self.deadline:
                    return False
                try:
                    facts = self.quantity.measure(timed)
                except (UnsupportedError, RuntimeError) as refused:  # such as memory that others took since
                    self._log_contender(contender, ceilings[contender.arithmetic], self._refused(refused))
                else:
                    self.log.append("measurement", {"key": contender.key, **facts})
        return True

    def _attempt(
        self, contender: Contender, problem: LayerArrays, turns: Iterator[int], ceilings: Ceilings, fastest_s: float
    ) -> tuple[Timed | None, Facts]:
        """Check and warm up a contender, and set its number of runs.

        Without `Timed`, the facts hold the reason why the contender is not measured.
        """
        job = contender.job
        if why := self._too_large(contender.extra_bytes):
            return None, _refusal("out of memory", why)
        units = MATRIX_UNITS if self.device.limits.is_cpu and job.kernel(contender.arithmetic).item_bytes == 2 else 1
        least_s = 2 * contender.multiplications * job.batch / (ceilings.flops_per_s * units)
        if least_s > self.protocol.most_seconds:
            return None, _refusal("too slow", f"its multiplications alone take {least_s:.1f} s per run")
        if why := self._hopeless(contender, fastest_s):
            return None, _refusal("too slow", why)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)  # PyTorch warns that its sparse formats are beta
                begin = monotonic()
                ready = contender.prepare(problem)
                prepared_s, begin = monotonic() - begin, monotonic()
                result = ready.run(0)
                ready.wait()
                if contender.implementation not in COMPILED:
                    self._check_seconds(contender, monotonic() - begin, DISTURBED)
                error = None if contender.is_part else problem.error(ready.y(result), ready.gradients(result))
                # on a processor, single disturbances and waking threads would decide shorter measurements
                timed = Timed(ready, turns, self.protocol, BLOCK_SECONDS if self.device.limits.is_cpu else 0.0)
                self._check_seconds(contender, timed.once_s)
            conversion_us = self._conversion_us(contender, timed, prepared_s)
        except _TooSlowError as refused:
            return None, _refusal("too slow", str(refused))
        except (KsgenError, RuntimeError, MemoryError) as refused:
            return None, self._refused(refused)
        facts: Facts = {"status": OK, "reason": "", "most_measurements": timed.most_measurements}
        facts["conversion_us"] = conversion_us
        if not contender.is_part:
            tolerance = ACCEPTED * job.tolerance(contender.arithmetic)
            facts |= {"error": error, "tolerance": tolerance, "checked": problem.checked}
        return timed, facts | self._floor(contender, ceilings)

    def _conversion_us(self, contender: Contender, timed: Timed, prepared_s: float) -> float | None:
        """Microseconds to convert the weights, from the log, or timed now if the contender's time is.

        None if the conversion fails, or if the time is up or the preparation took longer than a contender may. The
        error of a conversion that loses the GPU is raised.
        """
        known = self.log.content.contenders.get(contender.key)
        if known and known.facts["identity"] == contender.identity and known.facts.get("conversion_us"):
            return float(known.facts["conversion_us"])
        is_short = prepared_s <= self.protocol.most_seconds and self._in_time()
        if not is_short or self.quantity.column != Times.column:
            return None
        try:
            return timed.conversion_us(self.protocol)
        except (KsgenError, RuntimeError, MemoryError) as refused:
            if self._has_lost_gpu():
                raise
            self._refused(refused)  # frees memory
            return None

    def _check_seconds(self, contender: Contender, once_s: float, at_most: float = 1.0) -> None:
        """Raise `_TooSlowError` if a run takes more than `at_most` times a contender's time limit."""
        self._note_pace(contender, once_s)
        if once_s > at_most * self.protocol.most_seconds:
            raise _TooSlowError(
                f"a run takes {once_s:.1f} s, and a contender may take {self.protocol.most_seconds:g} s in all"
            )

    def _floor(self, contender: Contender, ceilings: Ceilings) -> Facts:
        job = contender.job
        if contender.is_part or not job.has_floor:
            return {}
        return {"floor_us": ceilings.floor_us(job.kernel(contender.arithmetic), job.batch, MOST_SETS)}

    def _hopeless(self, contender: Contender, fastest_s: float) -> str:
        """Reason to skip a contender on a processor, where a run may take minutes; empty to try it.

        A run is expected to take its time at `BETTER_PACE` times the contender's best pace so far. A baseline is
        skipped if that exceeds the time limit and `HOPELESS` times the fastest contender's time.
        """
        pace = self._paces.get(_pace_key(contender), 0.0) if self.device.limits.is_cpu else 0.0
        expected_s = pace / BETTER_PACE * contender.multiplications * contender.job.batch
        if contender.implementation in (OURS, *OUR_METHODS) or expected_s <= max(
            self.protocol.most_seconds, HOPELESS * fastest_s
        ):
            return ""
        return (
            f"{expected_s:.1f} s per run at {BETTER_PACE} times its pace in other patterns, and the fastest takes "
            f"{fastest_s:.2f} s"
        )

    def _note_pace(self, contender: Contender, once_s: float) -> None:
        if multiplications := contender.multiplications * contender.job.batch:
            key, pace = _pace_key(contender), once_s / multiplications
            self._paces[key] = min(pace, self._paces.get(key, pace))

    def _log_contender(self, contender: Contender, ceilings: Ceilings, facts: Facts) -> None:
        """Log a contender. `DeviceError` after that if it has lost the GPU, so that the next run passes over it."""
        measured = {"ceiling_byte_per_s": ceilings.bytes_per_s, "ceiling_flop_per_s": ceilings.flops_per_s}
        is_lost = facts["status"] != OK and self._has_lost_gpu()
        self.log.append("contender", {**contender.facts, **measured, **facts, **(_LOST if is_lost else {})})
        if is_lost:
            raise DeviceError(
                f"the GPU context is lost ({facts['reason']}); the same command continues after this measurement"
            )

    def _has_lost_gpu(self) -> bool:
        """Whether the GPU's context is lost, so that all later work of this process would fail."""
        if self.where.type != "cuda":
            return False
        try:
            torch.cuda.synchronize(self.where)
        except RuntimeError:
            return True
        return False

    def _refused(self, error: Exception) -> Facts:
        """Convert a library's error to a reason."""
        if isinstance(error, UnsupportedError):
            return _refusal("unsupported", str(error))
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            if self.where.type == "cuda":
                torch.cuda.empty_cache()
            return _refusal("out of memory", _one_line(error))
        return _refusal("failed", f"{type(error).__name__}: {_one_line(error)}")

    def _too_large(self, need: int) -> str:
        """Reason why `need` more bytes are unavailable; empty if they are free.

        This is checked beforehand, because exhausting a processor's memory raises no error to catch.
        """
        free = _free_on_gpu(self.where) if self.where.type == "cuda" else _free_memory()
        return f"needs {need / 1e9:.1f} GB more, and {free / 1e9:.1f} GB are free" if need > free else ""

    def _ceilings(self, arithmetic: str, job: LayerJob) -> Ceilings:
        """The device's ceilings for the instructions of the launchers' default family, measured at first use.

        On a processor they are measured before and after every job, because its speed depends on other programs.
        Training steps have no floor, so that any ceilings of the log suffice.
        """
        known = self.log.content.ceilings.get(arithmetic)
        if known and (job.step == TRAINING or not self.device.limits.is_cpu):
            return Ceilings(
                known["bytes_per_s"], known["flops_per_s"], cache_bytes_per_s=known.get("cache_bytes_per_s", 0.0)
            )
        kernel, limits = job.factor(arithmetic), limits_of(self.device)
        found = measure_ceilings(
            self.device, arithmetic, operand_of(kernel, family_for(kernel, limits).default(kernel, limits))
        )
        if known is None:
            rates = {name: getattr(found, name) for name in ("bytes_per_s", "flops_per_s", "cache_bytes_per_s")}
            self.log.append("ceilings", {"arithmetic": arithmetic, **rates})
        return found


@contextmanager
def _allowing(comparison: Comparison) -> Iterator[None]:
    """Set PyTorch's products to the comparison's rules: with or without TF32, and 16-bit sums always in float32."""
    matmul = torch.backends.cuda.matmul
    names = {
        "allow_tf32": comparison.allows_tf32,
        "allow_fp16_reduced_precision_reduction": False,
        "allow_bf16_reduced_precision_reduction": False,
    }
    before = {name: getattr(matmul, name) for name in names}
    try:
        for name, value in names.items():
            setattr(matmul, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(matmul, name, value)


def _free_on_gpu(where: torch.device) -> int:
    """Free bytes on the GPU, including memory that PyTorch holds but does not use."""
    free: int = torch.cuda.mem_get_info(where)[0]
    kept: int = torch.cuda.memory_reserved(where) - torch.cuda.memory_allocated(where)
    return free + kept


def _free_memory() -> int:
    """Available bytes on Linux; unlimited elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    except OSError:
        found = None
    return int(found[1]) * 1024 if found else 2**63


def _pace_key(contender: Contender) -> tuple[str, str, str]:
    return contender.implementation, contender.arithmetic, contender.job.layout


def _refusal(status: str, reason: str) -> Facts:
    return {"status": status, "reason": reason}


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


# ---- facts of a run, which every row carries


def run_facts(device: Device) -> dict[str, str]:
    """Facts about a process that measures on a device."""
    where = torch_device(device)
    on_cuda = where.type == "cuda"
    return {
        "device": device.name,
        "target": device.target,
        "runtime": device.runtime,
        "driver": device.driver_version,
        "compiler": _compiler(device),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}" if on_cuda else torch.__version__,
        "baselines_on": torch.cuda.get_device_name(where)
        if on_cuda
        else f"{processor_name()}, {torch.get_num_threads()} threads",
        "ksgen": ksgen.__version__,
        "commit": commit(Path(ksgen.__file__).parent),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _compiler(device: Device) -> str:
    """Name and version of the compiler; empty if there is none, because binaries then come from a cache."""
    try:
        compiler = device.compiler() or find_compiler()
    except ToolchainError:
        return ""
    return f"{compiler.name} {compiler.version}"


def commit(folder: Path) -> str:
    """Commit of the checkout that contains a folder, with a + if its files were changed; empty outside a checkout."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        is_ours = git("ls-files", "--error-unmatch", "__init__.py")
        return (git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--", ".") else "")) if is_ours else ""
    except (OSError, subprocess.TimeoutExpired):
        return ""
