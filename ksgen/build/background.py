"""Runs slow work, such as compilation, in the background while its callers continue. Callers decide what runs and when.

All work is requested by `outcome`. Inside `deferred`, `outcome` raises `PendingError` until the background has the
result. Elsewhere it does the work at once. If the background is doing the same work, the locks inside that work make
the caller wait for it.
"""

import atexit
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any, TypeVar

from ksgen.build.build import usable_cores
from ksgen.build.children import Crew
from ksgen.errors import ToolchainError, cause, warn
from ksgen.values import excerpt

MOST_WORKERS = 16
# seconds that a fork waits for jobs that import modules: in the child, their import locks would stay taken for ever
FORK_WAIT_S = 5.0
NOTICE_S = 2.0  # seconds of waiting after which a caller gets a warning with the reason
Result = TypeVar("Result")


class PendingError(Exception):
    """The background has not finished the work. Callers that defer work catch this error, so users never see it."""


class BackgroundJob:
    """One piece of work. `done` is set once the work has set `result` or `error`."""

    def __init__(self, what: str, work: Callable[[], Any], imports: bool, must_end: bool) -> None:
        self.what, self._work, self.imports, self.must_end = what, work, imports, must_end
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result = self._work()
        except BaseException as error:  # raised again in the thread that asks for the result
            self.error = error
        self.done.set()


class _Background(Crew):
    """Jobs and worker threads of this process."""

    def __init__(self) -> None:
        super().__init__(is_background=True)
        self.jobs: dict[Hashable, BackgroundJob] = {}  # unfinished, or finished and not asked for since
        self.progress = object()  # replaced by a new object after each job

    def job(self, key: Hashable, make: Callable[[], BackgroundJob]) -> BackgroundJob:
        """Return the job of a key. The first call creates the job and queues it."""
        with self.guard:
            if known := self.jobs.get(key):
                return known
            job = self.jobs[key] = make()
        self.add(lambda: self._run(job), min(usable_cores(), MOST_WORKERS))
        return job

    def _run(self, job: BackgroundJob) -> None:
        job.run()
        self.progress = object()

    def drop(self, key: Hashable) -> None:
        with self.guard:
            self.jobs.pop(key, None)

    def unfinished(self) -> list[BackgroundJob]:
        with self.guard:
            return [job for job in self.jobs.values() if not job.done.is_set()]


_background = _Background()
_policy: ContextVar[Callable[[], bool] | None] = ContextVar("_policy", default=None)  # whether missing work is deferred
_notice: ContextVar["_Notice | None"] = ContextVar("_notice", default=None)


@contextmanager
def deferred(policy: Callable[[], bool]) -> Iterator[None]:
    """Defer missing work to the background if `policy()`, called when some is missing, returns True."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def pause_compilers() -> AbstractContextManager[None]:
    """Suspend background compilers for most of the enclosed computation, if it is long or one of many."""
    return _background.children.calls


@contextmanager
def awaited(caller: str, remedy: str) -> Iterator[None]:
    """Wait for missing work. After `NOTICE_S` seconds, a warning says who waits for what, and the remedy."""
    notice = _Notice(caller, remedy)
    tokens = _policy.set(None), _notice.set(notice)
    try:
        yield
    finally:
        _policy.reset(tokens[0])
        _notice.reset(tokens[1])
        notice.end()


class _Notice:
    """Warns if a caller waits longer than `NOTICE_S` seconds, counted from its first missing work."""

    def __init__(self, caller: str, remedy: str) -> None:
        self._caller, self._remedy, self._what, self._cause = caller, remedy, "", ("", 0)
        self._timer: threading.Timer | None = None

    def begin(self, what: str) -> None:
        self._what = what
        if self._timer is None:
            self._cause = cause()  # read here, because the timer warns from another thread
            self._timer = threading.Timer(NOTICE_S, self._warn)
            self._timer.daemon = True
            with suppress(RuntimeError):  # no thread can be started: no warning
                self._timer.start()

    def _warn(self) -> None:
        message = f"{self._caller} has waited {NOTICE_S:g} s for {self._what} to compile; {self._remedy}"
        warn(message, self._cause)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()


def outcome(
    key: Hashable,
    what: str,
    work: Callable[[], Any],
    *,
    at_once: bool = False,
    imports: bool = False,
    must_end: bool = False,
) -> Any:
    """Return the result of some work, or raise its error.

    Raises `PendingError` while the background does the work for a caller that defers it. `what` names the work in
    warnings. `at_once` says that the work takes no time, because its slow part is already done. `imports` says that the
    work may import modules. `must_end` says that the exit of the process waits up to `MOST_WAIT_S` seconds for it. The
    caller must keep the result: a result of the background is handed out once.
    """
    if at_once:
        _background.drop(key)
        return work()
    policy = _policy.get()
    if policy is None or not policy():
        if notice := _notice.get():
            notice.begin(what)
        return work()
    job = _background.job(key, lambda: BackgroundJob(what, work, imports, must_end))
    if not job.done.is_set():
        raise PendingError(what)
    _background.drop(key)
    if job.error:
        raise job.error
    return job.result


def all_of(works: Iterable[Callable[[], Result]]) -> tuple[Result, ...]:
    """Results of several pieces of work. All missing pieces begin before `PendingError` is raised."""
    results, pending = [], None
    for work in works:
        try:
            results.append(work())
        except PendingError as error:
            pending = error
    if pending:
        raise pending
    return tuple(results)


def is_busy() -> bool:
    """Whether the background has work, which disturbs measured times."""
    return bool(_background.unfinished())


def progress() -> object:
    """Return the same object until the background finishes a job."""
    return _background.progress


def is_pending(since: object) -> bool:
    """Whether work that was pending when `progress` returned `since` must still be pending."""
    return since is _background.progress and is_busy()


def unfinished() -> list[BackgroundJob]:
    """Jobs that the background has not finished."""
    return _background.unfinished()


@contextmanager
def progress_bar(is_wanted: bool, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Provide a function to call after each step.

    The bar shows if it is wanted and stderr is a terminal.
    """
    if not is_wanted:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    screen = Console(stderr=True)
    with Progress(console=screen, transient=True, disable=not screen.is_terminal) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def finish_jobs() -> int:
    """Wait for all unfinished jobs, with a progress bar on a terminal, and return their number."""
    jobs = unfinished()
    with progress_bar(bool(jobs), "compiling", len(jobs)) as advance:
        for job in jobs:
            job.done.wait()
            advance()
    return len(jobs)


def finished(works: Sequence[Callable[[], Result]]) -> tuple[Result, ...]:
    """Results of several pieces of work. Waits until the background has done all missing pieces, in parallel."""
    with deferred(lambda: True):
        while True:
            try:
                return all_of(works)
            except PendingError:
                finish_jobs()


def always_waits() -> bool:
    """Whether `KSGEN_COMPILE` asks every call to wait for its kernels."""
    asked = os.environ.get("KSGEN_COMPILE", "")
    if asked not in ("", "background", "wait"):
        raise ToolchainError(f"KSGEN_COMPILE={excerpt(asked)}; accepted: background (the default) or wait")
    return asked == "wait"


def _before_fork() -> None:
    for job in _background.unfinished():
        if job.imports:
            job.done.wait(FORK_WAIT_S)


def _in_child() -> None:
    """Give a forked child its own background. The parent's threads and compilers are not the child's."""
    global _background
    _background = _Background()


atexit.register(lambda: _background.stop(any(job.must_end for job in unfinished())))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
