"""Processes of one gloo group on this machine, which run functions of a test together.

They start once and wait for the next function.
"""

import multiprocessing
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

LIMIT_S = 120  # for one function


class Processes:
    """`run` calls a function of a test module in each of them.

    Where one fails, all end, and the next call starts new ones.
    """

    def __init__(self, count: int, folder: Path) -> None:
        self.count, self._folder, self._starts, self._found = count, folder, 0, []  # type: ignore[var-annotated]

    def run(self, function: Callable[..., Any], *given: Any) -> list[Any]:
        """What function(*given) returned in each process."""
        if not self._found:
            self._start()
        for _, line in self._found:
            line.send((function, given))
        answers = []
        for rank, (process, line) in enumerate(self._found):
            is_there = line.poll(LIMIT_S)
            try:
                error, answer = line.recv() if is_there else (f"no answer after {LIMIT_S} s", None)
            except EOFError:
                error, answer = f"ended with {process.exitcode}", None
            if error:
                self.end()
                raise AssertionError(f"process {rank} of {self.count}: {error}")
            answers.append(answer)
        return answers

    def end(self) -> None:
        for process, line in self._found:
            line.close()
            process.kill()
            process.join()
        self._found = []

    def _start(self) -> None:
        self._starts += 1
        context = multiprocessing.get_context("spawn")
        for rank in range(self.count):
            here, there = context.Pipe()
            meet = f"file://{self._folder}/meet{self._starts}"
            process = context.Process(target=_serve, args=(there, meet, rank, self.count), daemon=True)
            process.start()
            there.close()
            self._found.append((process, here))


def _serve(line: Any, meet: str, rank: int, count: int) -> None:
    """One process: joins the group, then calls what it is sent, until the line is closed."""
    os.environ["KSGEN_THREADS"] = "1"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=meet, rank=rank, world_size=count, timeout=timedelta(seconds=LIMIT_S / 2)
    )
    while True:
        try:
            function, given = line.recv()
        except EOFError:
            return
        try:
            answer = None, function(*given)
        except Exception:
            answer = traceback.format_exc(), None
        line.send(answer)
