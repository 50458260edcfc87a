"""Runs slow work, such as compilation, in background threads while its callers continue.

All work is requested by `outcome`. Inside `deferred`, `outcome` queues the work and raises `PendingError` until the
result is known. Elsewhere, the calling thread does the work itself. If the background is doing the same work at that
time, locks inside the work make the caller wait for it.
"""

import atexit
import os
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, TypeVar

from ksgen.build.build import usable_cores
from ksgen.build.children import Crew
from ksgen.errors import ToolchainError, cause, warn
from ksgen.values import excerpt

MOST_WORKERS = 16
# seconds that a fork waits for jobs that import modules: in the child, their import locks would never be released
FORK_WAIT_S = 5.0
NOTICE_S = 2.0  # seconds after which a waiting caller gets a warning with the reason
Result = TypeVar("Result")


class PendingError(Exception):
    """The background has not finished some work. Callers that defer work catch this error, so users never see it."""


@dataclass(eq=False)
class BackgroundJob:
    """One piece of work. `done` is set after `result` or `error`."""

    what: str
    work: Callable[[], Any]
    imports: bool
    must_end: bool
    is_needed: bool
    done: threading.Event = field(default_factory=threading.Event)
    result: Any = None
    error: BaseException | None = None
    traceback: TracebackType | None = None  # of the error


class _Background(Crew):
    """Jobs and worker threads of this process."""

    def __init__(self) -> None:
        super().__init__(is_background=True, is_urgent=lambda: bool(self.unfinished()))
        # unfinished jobs, those whose result is not fetched yet, and failed ones, whose error every caller gets
        self.jobs: dict[Hashable, BackgroundJob] = {}
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
        try:
            job.result = job.work()
        except BaseException as error:  # raised again in the thread that asks for the result
            job.error, job.traceback = error, error.__traceback__
        job.done.set()
        self.progress = object()

    def unfinished(self) -> list[BackgroundJob]:
        """Needed jobs that are not finished."""
        with self.guard:
            return [job for job in self.jobs.values() if job.is_needed and not job.done.is_set()]

    def drop(self, key: Hashable) -> None:
        with self.guard:
            self.jobs.pop(key, None)

    def forget_errors(self, *keys: Hashable) -> None:
        """Let failed work be done again: that of all keys if none is given."""
        with self.guard:
            for key in keys or [*self.jobs]:
                if (job := self.jobs.get(key)) and job.error:
                    del self.jobs[key]


_background = _Background()
# function that says whether missing work is deferred; None: it is not
_policy: ContextVar[Callable[[], bool] | None] = ContextVar("_policy", default=None)
_notice: ContextVar["_Notice | None"] = ContextVar("_notice", default=None)


@contextmanager
def deferred(policy: Callable[[], bool]) -> Iterator[None]:
    """Defer missing work to the background if `policy()` returns True. It is called for each missing piece of work."""
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def pause_compilers() -> AbstractContextManager[None]:
    """Context of a computation, such as a call of a layer: suspends background compilers for most of its time."""
    return _background.children.calls


def undisturbed(run: Callable[..., Result], *arguments: Any) -> Result:
    """Result of a prepared call. Background compilers, if there are any, are suspended for most of its time."""
    if not _background.children.are_running:
        return run(*arguments)
    with pause_compilers():
        return run(*arguments)


@contextmanager
def awaited(caller: str, remedy: str) -> Iterator[None]:
    """Do missing work at once, even inside `deferred`.

    After `NOTICE_S` seconds, a warning says which caller waits for which work, and the remedy.
    """
    notice = _Notice(caller, remedy)
    tokens = _policy.set(None), _notice.set(notice)
    try:
        yield
    finally:
        _policy.reset(tokens[0])
        _notice.reset(tokens[1])
        notice.end()


class _Notice:
    """Warns if a caller waits longer than `NOTICE_S` seconds, counted from the first missing piece of work."""

    def __init__(self, caller: str, remedy: str) -> None:
        self._caller, self._remedy, self._what, self._cause = caller, remedy, "", ("", 0)
        self._timer: threading.Timer | None = None

    def begin(self, what: str) -> None:
        self._what = what
        if self._timer is None:
            self._cause = cause()  # determined here, because the timer warns from another thread
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
    is_needed: bool = True,
) -> Any:
    """Return the result of some work, or raise its error.

    Raises `PendingError` while the background does the work for a caller that defers it. The background returns a
    result only once, so the caller must keep it. Its error is raised again, until `finished` or `build` forgets it: the
    work is not repeated. Equal keys are for the same work. `what` names the work in warnings.
    `at_once` says that the work takes no time, because its slow part is already done. `imports` says that the work may
    import modules. `must_end` says that the process waits for the work before it exits, for at most `MOST_WAIT_S`
    seconds. Work that is not `is_needed` only makes later calls faster. Nothing waits for it, and times are measured
    while it runs. Its compilers run only in long pauses between calls.
    """
    if at_once:
        _background.drop(key)
        return work()
    policy = _policy.get()
    if policy is None or not policy():
        if notice := _notice.get():
            notice.begin(what)
        _background.forget_errors(key)
        return work()
    job = _background.job(key, lambda: BackgroundJob(what, work, imports, must_end, is_needed))
    if not job.done.is_set():
        raise PendingError(what)
    if job.error:
        raise job.error.with_traceback(job.traceback)  # which each raise would lengthen
    _background.drop(key)
    return job.result


def all_of(works: Iterable[Callable[[], Result]]) -> tuple[Result, ...]:
    """Results of several pieces of work. All missing pieces are requested before `PendingError` is raised."""
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
    """Whether the background has unfinished work that is needed, and disturbs measured times."""
    return bool(unfinished())


def progress() -> object:
    """Object that stands for the background's progress: each finished job replaces it by a new one."""
    return _background.progress


def is_pending(since: object) -> bool:
    """Whether work that was pending when `progress` returned `since` is certainly still pending."""
    return since is _background.progress and is_busy()


def unfinished() -> list[BackgroundJob]:
    """Needed jobs that the background has not finished."""
    return _background.unfinished()


@contextmanager
def progress_bar(is_wanted: bool, title: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar if it is wanted and stderr is a terminal. The function provided is called after each step."""
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


def forget_errors() -> None:
    """Let work that failed be done again, because its caller asks for it explicitly."""
    _background.forget_errors()


def finished(works: Sequence[Callable[[], Result]]) -> tuple[Result, ...]:
    """Results of several pieces of work. Waits until the background has done all missing pieces, in parallel."""
    forget_errors()
    with deferred(lambda: True):
        while True:
            try:
                return all_of(works)
            except PendingError:
                finish_jobs()


def always_waits() -> bool:
    """Whether `KSGEN_COMPILE=wait` asks every call to wait for its kernels."""
    asked = os.environ.get("KSGEN_COMPILE", "")
    if asked not in ("", "background", "wait"):
        raise ToolchainError(f"KSGEN_COMPILE={excerpt(asked)}; accepted: background (the default) or wait")
    return asked == "wait"


def _before_fork() -> None:
    for job in unfinished():
        if job.imports:
            job.done.wait(FORK_WAIT_S)


def _in_child() -> None:
    """Give a forked child its own background, because it inherits neither the parent's threads nor its compilers."""
    global _background
    _background = _Background()


atexit.register(lambda: _background.stop(any(job.must_end for job in unfinished())))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_in_child)
