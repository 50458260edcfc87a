"""Falls back to PyTorch's products while kernels are missing or methods are not timed yet, and limits the time that
timing adds to calls.

Kernels run only in the methods that callers pass. If `may_defer()` is False, calls compile and time at once instead.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from math import inf
from time import monotonic, perf_counter
from typing import TypeVar

import torch
from torch import Tensor, distributed

from ksgen.build.background import PendingError, always_waits, deferred, is_busy, is_pending, progress
from ksgen.errors import DeviceError, ToolchainError
from ksgen.measure.trust import LEAST_BLOCKS, Watch, why_unreliable

Method = Callable[[], Tensor]
Result = TypeVar("Result")
ROUNDS = 1 + LEAST_BLOCKS  # rounds of timing; the first also builds
LONG_ROUNDS = 2  # rounds of timing if one round takes longer than the ration
MOST_ROUNDS, LONG_S = 100, 1e-2  # timing ends after so many rounds, or after ROUNDS that took so many seconds together
WARM_S = 2e-3  # seconds: a method whose last run was shorter runs once more before it is timed
MOST_ADDED_S = 0.025  # most seconds that timing adds at once, to one call or to calls in quick succession
SHARE = 0.2  # largest share of the time that timing takes on average

# True while `build` runs: calls request their missing kernels, and methods are timed without the ration
building: ContextVar[bool] = ContextVar("building", default=False)
_waits: ContextVar[bool] = ContextVar("_waits", default=False)  # calls wait for their kernels


def may_defer() -> bool:
    """Whether PyTorch's products may replace kernels while these are compiled.

    While `building`, they always may. Otherwise they may if `may_change()`, because results then change in their last
    bits during the first calls.
    """
    return building.get() or may_change()


def may_change() -> bool:
    """Whether results may change in their last bits during the first calls.

    They may not under deterministic algorithms, in compiled programs, in one of several processes, or with
    KSGEN_COMPILE=wait, except during `build`, whose results are discarded.
    """
    if (always_waits() and not building.get()) or _waits.get() or torch.are_deterministic_algorithms_enabled():
        return False
    return not (distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1)


@contextmanager
def waiting() -> Iterator[None]:
    """Make calls wait for missing kernels: in compiled programs, and while layers are timed."""
    token = _waits.set(True)
    try:
        yield
    finally:
        _waits.reset(token)


def by_kernels(run: Callable[[], Result]) -> Result | None:
    """Result of a run by kernels; None while kernels are compiled in the background, so that PyTorch multiplies."""
    with suppress(PendingError), deferred(may_defer):
        return run()
    note_unsettled()
    return None


def unless_building(run: Callable[[], Result], replacement: Callable[[], Result]) -> Result:
    """Result of a run by kernels that nothing may replace, except during `build`, whose results are discarded.

    During `build`, the replacement computes a result of the same kind while kernels are missing, so that autograd
    records it.
    """
    if not building.get():
        return run()
    result = by_kernels(run)
    return replacement() if result is None else result


class _Ration:
    """Token bucket of seconds for timing and preparation: `MOST_ADDED_S` at once, and `SHARE` of the time on average.

    If one expense contains another, its seconds count once.
    """

    def __init__(self) -> None:
        self._left, self._at, self._spent = MOST_ADDED_S, monotonic(), 0.0

    def left(self) -> float:
        if building.get():
            return float("inf")
        now = monotonic()
        self._left, self._at = min(MOST_ADDED_S, self._left + SHARE * (now - self._at)), now
        return self._left

    @contextmanager
    def spending(self) -> Iterator[None]:
        begin, before = perf_counter(), self._spent
        try:
            yield
        finally:
            seconds = perf_counter() - begin - (self._spent - before)
            self._spent += seconds
            self._left = max(-MOST_ADDED_S, self._left - seconds)


_ration = _Ration()
_unsettled = 0  # products that PyTorch computed in place of kernels: a run that contains one is not timed


def may_prepare() -> bool:
    """Whether a call may prepare later ones: only with a full ration, unless it waits for its kernels anyway.

    Preparing includes timing. Without time left for it, each call would prepare in vain.
    """
    return _ration.left() >= MOST_ADDED_S or not may_defer()


def preparing() -> AbstractContextManager[None]:
    """Count the time as added to a call."""
    return _ration.spending()


class MethodTrial:
    """Times of a job's methods, measured in one call or over several calls."""

    def __init__(self, names: Iterable[str]) -> None:
        self.taken_us: dict[str, list[float]] = {name: [] for name in names}
        self.failed: dict[str, str] = {}  # methods that cannot run, and why
        self._pending: dict[str, object] = {}  # what `progress` returned before a method's kernels were found missing
        self._last: dict[str, float] = {}  # seconds of each method's last run, disturbed or not
        self._ran = ""  # the method that ran last
        self._shares: list[float | None] = []
        self._takes_calls = False  # whether a timed method may compute the result of a call

    @property
    def seconds(self) -> dict[str, float]:
        return {
            name: min(each) / 1e6 if each and name not in self.failed else float("inf")
            for name, each in self.taken_us.items()
        }

    @property
    def why_unreliable(self) -> str:
        # the first round also builds
        return next(filter(None, (why_unreliable(each[1:], self._shares) for each in self.taken_us.values())), "")

    def is_settled(self, most_s: float = float("inf")) -> bool:
        """Whether every method was timed often enough: twice, if one round takes longer than `most_s`."""
        if not (runnable := self._runnable()):
            return True
        rounds = min(len(self.taken_us[name]) for name in runnable)
        once = sum(min(self.taken_us[name], default=0.0) for name in runnable) / 1e6
        if rounds >= LONG_ROUNDS and once > most_s:  # one round is not enough: its runs may have been disturbed
            return True
        return rounds >= MOST_ROUNDS or (rounds >= ROUNDS and rounds * once > LONG_S)

    def run_all(self, methods: Mapping[str, Method]) -> None:
        """Time all methods now, alternately."""
        watch = Watch()
        while not self.is_settled():
            with suppress(DeviceError, ToolchainError):
                self._run(name := self._next(), methods[name])
        self._shares.append(watch.others_share())

    def compute(self, methods: Mapping[str, Method], meanwhile: str) -> Tensor:
        """Compute a call by the method `meanwhile`, and time others within the ration.

        If `meanwhile` takes longer than `MOST_ADDED_S`, a method with fewer than `LONG_ROUNDS` times computes the
        call instead.
        """
        self._takes_calls = True
        if self._last.get(meanwhile, 0.0) > MOST_ADDED_S:
            for name in (each for each in self._runnable() if each != meanwhile and self._can_be_timed(each)):
                with suppress(PendingError, DeviceError, ToolchainError):
                    return self._run(name, methods[name], computes=True)
        y = self._run(meanwhile, methods[meanwhile], computes=True)
        self.go_on(methods)
        return y

    def go_on(self, methods: Mapping[str, Method]) -> None:
        """Time methods within the ration. Kernels that are missing are compiled in the background first."""
        never_run = [name for name in self._runnable() if name not in self._last]
        pending = [name for name in never_run if not self._run_if_allowed(name, methods)]
        if pending or is_busy():
            return
        watch = Watch()
        while not self.is_settled(MOST_ADDED_S) and self._run_if_allowed(self._next(), methods):
            pass
        self._shares.append(watch.others_share())

    def _runnable(self) -> list[str]:
        return [name for name in self.taken_us if name not in self.failed]

    def _can_be_timed(self, name: str) -> bool:
        return name not in self._last or (len(self.taken_us[name]) < LONG_ROUNDS and not is_busy())

    def _next(self) -> str:
        """The method with the fewest times."""
        return min(self._runnable(), key=lambda name: len(self.taken_us[name]))

    def _run_if_allowed(self, name: str, methods: Mapping[str, Method]) -> bool:
        """Run a method; False if the ration does not allow that, or if kernels are missing."""
        expected, left = self._last.get(name, max(self._last.values(), default=0.0)), _ration.left()
        if is_pending(self._pending.get(name)):
            return False
        now = progress()
        may_compute = self._takes_calls and name not in self._last
        # a full ration allows every run, since the expected time may be that of a disturbed run
        if expected > left and (may_compute or left < MOST_ADDED_S):
            return False
        before = _unsettled
        try:
            with _ration.spending():
                self._run(name, methods[name])
        except PendingError:
            self._pending[name] = now
            return False
        except (DeviceError, ToolchainError):
            pass
        return before == _unsettled

    def _run(self, name: str, method: Method, computes: bool = False) -> Tensor:
        """Run and time a method. `computes` says that it computes the result of a call, which must not wait."""
        before, was_busy = _unsettled, is_busy()
        try:
            if not was_busy and not computes and name != self._ran and self._last.get(name, inf) < WARM_S:
                method()  # another method's run left its own data in the caches, and threads that spin
            start, self._ran = perf_counter(), name
            y = method()
        except (DeviceError, ToolchainError) as error:
            self.failed[name] = str(error)
            raise
        self._last[name] = perf_counter() - start
        if before == _unsettled and not was_busy:
            self.taken_us[name].append(self._last[name] * 1e6)
        return y


def note_unsettled() -> None:
    """Count a product that PyTorch computed while kernels were missing."""
    global _unsettled
    _unsettled += 1


def times_unsettled() -> int:
    """Number of products that PyTorch computed while kernels were missing."""
    return _unsettled
