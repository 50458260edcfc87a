"""Children of searches as forks: importing ksgen takes longer than most of their steps. `tests/tuning/test_worker.py`
and `tests/tuning/test_process.py` start children as users' searches do."""

from functools import cache
from typing import IO, Any

from ksgen.build.children import python_child
from ksgen.tuning.process import CODE, Worker
from tests.driver import scripts


class ForkedWorker(Worker):
    """A worker whose child is a fork, unless it has other variables that libraries read at their import."""

    def _start(self, number: int, errors: IO[bytes]) -> Any:
        _, options = python_child(CODE)
        variables, folder = options["env"], options["cwd"]
        forks = _forks()
        if (scripts.read_early(variables), folder) != (forks.variables, forks.folder):
            return super()._start(number, errors)
        script = f"import sys; sys.argv[1:] = {['3', *self._arguments]}; {CODE}"
        return Fork(forks, forks.start(script, variables, [errors.fileno(), errors.fileno(), number]))


class Fork:
    """What a worker asks of its child."""

    def __init__(self, forks: scripts.Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self._status: int | None = None

    def wait(self) -> int:
        if self._status is None:
            self._status = self._forks.wait(self.pid)
        return self._status


@cache
def _forks() -> scripts.Forks:
    _, options = python_child(CODE)
    return scripts.Forks(scripts.read_early(options["env"]), options["cwd"])
