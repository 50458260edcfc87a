"""Locks that are free in a forked child, where the threads that held them do not exist.

Every lock of the process comes from here.
"""

import os
import threading
from typing import Any
from weakref import WeakSet

_made: WeakSet[Any] = WeakSet()


def new_lock() -> threading.Lock:
    made: threading.Lock = _kept(threading.Lock())
    return made


def new_reentrant_lock() -> Any:
    """Create a reentrant lock: the thread that holds it may take it again."""
    return _kept(threading.RLock())


def _kept(lock: Any) -> Any:
    _made.add(lock)
    return lock


def _free_all() -> None:
    for lock in list(_made):
        lock._at_fork_reinit()  # the standard library frees its own like this


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_free_all)
