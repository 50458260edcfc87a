"""Runs trials: times a few candidates of each kernel that a device has no wisdom for, and keeps the fastest.

`ksgen.tuning` compiles, checks, times and stores. A search (`ksgen tune`) replaces the results of trials.
"""

import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ksgen.devices.base import default_batch
from ksgen.errors import KsgenError, SpecError
from ksgen.launch.planner import PLANNER
from ksgen.passport import read_bars
from ksgen.pattern import Chain, Patterns
from ksgen.spec import Epilogue, KernelSpec, Layout, PrecisionName, load
from ksgen.spec.kernel import checked_count, layer_launch
from ksgen.tuning.engine import Engine
from ksgen.tuning.job import Job, chains_of, job_of, kernels_of_layer, kernels_of_spec, with_layers
from ksgen.tuning.search import Progress, Tuned
from ksgen.tuning.strategies import TRIAL
from ksgen.tuning.trials import TrialStore
from ksgen.tuning.tuner import SearchOptions, Tuner, open_engine
from ksgen.values import listed
from ksgen.wisdom import Entry

BACKGROUND_NICE = 5  # niceness added to trials that a launcher started, so that the user's own work goes first


@dataclass(frozen=True)
class Calibrated:
    """A kernel at a batch, and the entry of wisdom that launchers take from now on."""

    kernel: KernelSpec
    batch: int
    entry: Entry | None  # None if no candidate could be measured
    is_new: bool = False  # whether this calibration measured it
    why: str = ""  # why there is no entry
    keeps_default: bool = False  # whether the entry is the default's, because the winner's time is unreliable

    @property
    def over_default(self) -> float | None:
        """Speed relative to the default; None if it is unknown or unreliable."""
        return self.entry.over_default if self.entry else None

    @property
    def over_prediction(self) -> float | None:
        """Time that the cost model predicted over the measured one; None if either is unknown or unreliable."""
        if self.entry is None or self.entry.why_unreliable or not self.entry.median_us:
            return None
        predicted_us = self.entry.measured.get("predicted_us")
        return predicted_us / self.entry.median_us if predicted_us else None


class Calibration:
    """Trials on one engine. Kernels that wisdom has an entry for are not tried again, so that a second run resumes.

    With `fresh`, kernels whose entry comes from a trial are tried again. Entries of searches stay.
    """

    def __init__(self, engine: Engine, store: TrialStore, fresh: bool = False) -> None:
        self.facts = engine.facts
        self.tuner = Tuner(engine, store, SearchOptions(strategy=TRIAL, fresh=fresh))
        if engine.facts.kind == "cuda":  # only families that launchers may choose are tried
            self.tuner.limits = replace(self.tuner.limits, bars=read_bars(engine.facts))

    @property
    def is_stopped(self) -> bool:
        """Whether an interrupt ended the trials early."""
        return self.tuner.stop.is_set()

    def missing(self, jobs: Iterable[Job]) -> list[Job]:
        """Jobs that are not settled yet, and that the device has kernels for."""
        return [job for job in jobs if not self._is_settled(job) and not self.tuner.why_not_one(job)]

    def run(self, jobs: Sequence[Job], say: Callable[[Progress], None] | None = None) -> list[Calibrated]:
        """Try the missing jobs, and return the result of every job, in the order of `jobs`."""
        missing = self.missing(jobs)
        tried = dict(zip(missing, self.tuner.run(missing, say) if missing else [], strict=True))
        PLANNER.forget()
        return [self._result(job, tried.get(job)) for job in jobs]

    def run_all(self, jobs: Sequence[Job], progress: Callable[[Progress], None] | None = None) -> list[Calibrated]:
        """Run all jobs; an interrupt saves the results so far, and is then raised as `KeyboardInterrupt`."""
        results = self.run(jobs, progress)
        if self.is_stopped:
            raise KeyboardInterrupt
        return results

    def _is_settled(self, job: Job) -> bool:
        entry = self.tuner.settled(job)
        return entry is not None and not (entry.is_trial and self.tuner.options.fresh)

    def _result(self, job: Job, found: Tuned | KsgenError | None) -> Calibrated:
        if isinstance(found, Tuned):
            entry = self.tuner.kept(job)
            is_default = entry is not None and entry.is_open and (found.default_won or not found.is_kept)
            return Calibrated(job.kernel, job.batch, entry, is_new=True, keeps_default=is_default)
        entry = self.tuner.settled(job)
        why = "" if entry else str(found) if isinstance(found, KsgenError) else self.tuner.why_not_one(job)
        return Calibrated(job.kernel, job.batch, entry, why=why)


def calibrate(
    *what: Patterns | Path | Sequence[Chain], precision: PrecisionName = "float32", layout: Layout = "bsf",
    batches: int | Sequence[int] | None = None, device: str | None = None, fresh: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> list[Calibrated]:  # fmt: skip
    """Try a few candidates of each kernel on this machine's device, and save the fastest in the user's wisdom.

    At most four candidates are tried: defaults of the families that suit the kernel and the device, and the best of the
    cost model. Each is compiled, checked against float64 and timed in a child process. Kernels that wisdom has an entry
    for are not tried again. Launchers of this process use the winners at once. An interrupt saves the results so far,
    and is then raised as `KeyboardInterrupt`.

    Args:
        *what: Patterns in any form, chains, lists of chains for groups, and paths of specs, such as "specs/vit.yaml". A
            chain is tried in one launch and factor by factor. A spec may ask for gradients.
        precision: Arithmetic of the patterns, such as "float16".
        layout: Layout of the patterns' x: "bsf" or "bsl".
        batches: Batch size, or a list of them. None: 25088 on a GPU and 1568 on a processor.
        device: Device, such as "cuda:1" or "native". None: `KSGEN_DEVICE`, else the best device.
        fresh: Whether kernels whose wisdom is from a trial are tried again. Results of `ksgen tune` stay.
        progress: Function that is called after each candidate, by a separate thread.

    Returns:
        A `Calibrated` per kernel and batch: the entry of wisdom, and its speed relative to the default.

    Raises:
        SpecError: Nothing was named, or an option is unknown.
        PatternError: A pattern or a chain is invalid.
        DeviceError: The device does not exist.
        ToolchainError: No compiler is available.
        KsgenError: Wisdom cannot be written.

    Examples:
        >>> import ksgen
        >>> (found,) = ksgen.calibrate("1,3,2,2", batches=[4])
        >>> found.entry.family, found.entry.is_trial
        ('vector', True)
    """
    kernels = [kernel for item in what for kernel in _kernels_of(item, precision, layout)]
    if not kernels:
        raise SpecError("nothing to calibrate; accepted: patterns such as '1,192,48,2', chains, or paths of specs")
    asked = [] if batches is None else [checked_count("batch", each) for each in listed(batches) or [batches]]
    with opened(device, fresh) as calibration:
        sizes = asked or [default_batch(calibration.facts.limits)]
        jobs = dict.fromkeys(job_of(kernel, batch) for kernel in kernels for batch in sizes)
        return calibration.run_all(list(jobs), progress)


def main(path: str) -> None:
    """Try the kernels that a launcher listed in the file. It runs in the child process of `ksgen.launch.behind`.

    On failure, the last line of stderr is the reason.
    """
    os.environ["KSGEN_TRIAL"] = "off"
    os.nice(BACKGROUND_NICE)
    device, asked = pickle.loads(Path(path).read_bytes())
    try:
        with opened(device) as calibration:
            calibration.run([job_of(each, batch) for kernel, batch in asked for each in with_layers(kernel)])
    except KsgenError as error:
        sys.exit(str(error).splitlines()[0])


@contextmanager
def opened(device: str | None, fresh: bool = False) -> Iterator["Calibration"]:
    """Open a calibration of a device; its child processes end with the `with` block."""
    with closing(open_engine(device)) as engine, closing(TrialStore()) as store:
        yield Calibration(engine, store, fresh)


def _kernels_of(item: Any, precision: PrecisionName, layout: Layout) -> list[KernelSpec]:
    """Kernels of one pattern, chain, group or spec."""
    if isinstance(item, Path) or (isinstance(item, str) and item.endswith((".yaml", ".yml"))):
        return list(kernels_of_spec(load(Path(item))))
    chains = chains_of(item)
    return kernels_of_layer(layer_launch(chains, precision, layout, Epilogue()))
