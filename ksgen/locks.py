"""Creates locks that are free in a forked child, where the threads that held them do not exist.

ksgen creates all its locks here. Long Python code calls `yield_to_calls`, so that background threads which run it do
not compete with a user's call for the interpreter's lock.
"""

import os
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakSet

AnyLock = TypeVar("AnyLock")
_locks: WeakSet[Any] = WeakSet()
waits_for_calls: ContextVar[Callable[[], None]] = ContextVar("waits_for_calls", default=lambda: None)  # of a thread


def new_lock() -> threading.Lock:
    return _registered(threading.Lock())


def new_reentrant_lock() -> Any:
    """Create a reentrant lock: the thread that holds it may take it again."""
    return _registered(threading.RLock())


def yield_to_calls() -> None:
    """Wait, in a background thread, until no call computes."""
    waits_for_calls.get()()


def _registered(lock: AnyLock) -> AnyLock:
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its locks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
