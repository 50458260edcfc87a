"""Scripts in forks: each is a process of its own, with its own variables, output and end."""

import os
import subprocess
import sys

import pytest

from tests.driver import scripts
from tests.support import booked

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in driver needs Linux")


def run(script: str, seconds: float = 60, **variables: str) -> subprocess.CompletedProcess[str]:
    return scripts.run(script, os.environ | variables, seconds)


def test_a_script_begins_without_a_device_and_has_its_own_variables() -> None:
    """Variables that others than ksgen read at their import are there before it."""
    opened = "sorted({'pyopencl', 'pycuda', 'cuda.bindings'} & set(sys.modules))"
    script = f"import os, sys; print({opened}, __name__, os.environ['KSGEN_DEVICE'], os.getpid())"
    first, second = run(script, KSGEN_DEVICE="one").stdout.split(), run(script, KSGEN_DEVICE="two").stdout.split()
    assert (first[:3], second[:3]) == (["[]", "__main__", "one"], ["[]", "__main__", "two"])
    assert first[3] != second[3] != str(os.getpid())
    parent = "import os; print(os.getppid())"
    assert run(parent).stdout == run(parent, KSGEN_DEVICE="one").stdout != run(parent, OMP_NUM_THREADS="3").stdout


@pytest.mark.parametrize(
    ("script", "status", "out", "err"),
    [
        ("import sys; print('a'); print('b', file=sys.stderr)", 0, "a\n", "b\n"),
        ("raise SystemExit(7)", 7, "", ""),
        ("import os; os.kill(os.getpid(), 9)", -9, "", ""),
        ("import atexit; atexit.register(print, 'at the end'); 1 / 0", 1, "at the end\n", "division by zero\n"),
        ("import os; os.fork() and os.wait(); print('twice')", 0, "twice\ntwice\n", ""),
    ],
)
def test_output_and_end(script: str, status: int, out: str, err: str) -> None:
    done = run(script)
    assert (done.returncode, done.stdout) == (status, out)
    assert done.stderr.endswith(err)


def test_its_processor_seconds_are_booked() -> None:
    before = booked.seconds[booked.PROGRAMS]
    run("import time\nwhile time.process_time() < 0.3: pass")
    assert 0.25 < booked.seconds[booked.PROGRAMS] - before < 3


def test_one_that_does_not_end_is_ended_and_the_next_one_runs() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run("import time; time.sleep(100)", seconds=0.5)
    assert run("print(1)").stdout == "1\n"
