"""Locks: free in a forked child, and made in one place."""

import ast
import os
import threading
from pathlib import Path
from typing import Any

import pytest

import ksgen
from ksgen.locks import new_lock, new_reentrant_lock

RAW = {"Lock", "RLock", "Semaphore", "BoundedSemaphore"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("new", [new_lock, new_reentrant_lock])
def test_a_lock_that_another_thread_holds_is_free_in_a_child(new: Any) -> None:
    lock, held, done = new(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    child = os.fork()
    if not child:
        os._exit(not lock.acquire(timeout=5))
    assert os.waitpid(child, 0)[1] == 0
    assert not lock.acquire(blocking=False)
    done.set()
    holder.join()


def test_every_lock_is_made_there() -> None:
    root = Path(ksgen.__file__).parent
    for path in sorted(root.rglob("*.py")):
        if path == root / "locks.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Condition") and not node.args:
                name = "Lock"  # which it makes itself
            assert name not in RAW, f"{path}:{getattr(node, 'lineno', 0)}: {name}; accepted: new_lock() of ksgen.locks"
