"""Creates locks that are free in a forked child, where the threads that held them do not exist.

ksgen creates all its locks here.
"""

import os
import threading
from typing import Any
from weakref import WeakSet

_locks: WeakSet[Any] = WeakSet()


def new_lock() -> threading.Lock:
    lock: threading.Lock = _registered(threading.Lock())
    return lock


def new_reentrant_lock() -> Any:
    """Create a reentrant lock: the thread that holds it may take it again."""
    return _registered(threading.RLock())


def _registered(lock: Any) -> Any:
    _locks.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()  # as the standard library does with its locks


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
