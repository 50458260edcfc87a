"""Launches are timed without their host: behind a kernel that waits, and so many together that events can tell their
time.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ksgen.errors import DeviceError, ToolchainError
from ksgen.measure import queued
from ksgen.measure.queued import MOST_QUEUED, time_launches
from tests.driver import NotHereError, run


class Clocked:
    """A GPU, and its host, whose time is numbers: a launch takes the GPU `gpu_us` and the host `host_us`."""

    name, kind = "a GPU", "cuda"

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpu_us: float, host_us: float) -> None:
        self.gpu_us, self.host_us, self.gpu_s, self.host_s = gpu_us, host_us, 0.0, 0.0
        self.launches, self.waits, self.held_up_s = 0, [], 0.0  # the host, before each first launch behind a wait
        monkeypatch.setattr(queued, "perf_counter", lambda: self.host_s)
        monkeypatch.setattr(queued, "_waiting", lambda device: self.wait)

    def wait(self, seconds: float) -> None:
        self.waits.append(seconds)
        self._queue(0, seconds)
        self.host_s += self.held_up_s

    def launch(self) -> None:
        self.launches += 1
        self._queue(self.host_us * 1e-6, self.gpu_us * 1e-6)

    def _queue(self, host_s: float, gpu_s: float) -> None:
        self.host_s += host_s
        self.gpu_s = max(self.gpu_s, self.host_s) + gpu_s

    def time(self, call: Callable[[], None], stream: Any, runs: int, warmup: int) -> list[float]:
        """Time a call as the runtimes do: an event, the call, another event."""
        assert warmup == 0
        seconds = []
        for _ in range(runs):
            start = self.gpu_s = max(self.gpu_s, self.host_s)
            call()
            seconds.append(max(self.gpu_s, self.host_s) - start)
        self.host_s = max(self.host_s, self.gpu_s)
        return seconds


@pytest.mark.parametrize("gpu_us", [2.0, 2.06, 40.0, 900.0])
@pytest.mark.parametrize("host_us", [3.0, 7.0, 60.0])
def test_a_launch_takes_what_the_gpu_takes(monkeypatch: pytest.MonkeyPatch, gpu_us: float, host_us: float) -> None:
    device = Clocked(monkeypatch, gpu_us, host_us)
    assert time_launches(device, device.launch, 9) == pytest.approx([gpu_us * 1e-6] * 9, rel=1e-6)


def test_without_the_wait_it_takes_what_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait hides the host's time. It needs a compiler, which may be missing."""
    device = Clocked(monkeypatch, 2.0, 7.0)

    def refuse(device: Any) -> None:
        raise ToolchainError("no compiler is there; this helps")

    monkeypatch.setattr(queued, "_waiting", refuse)
    with pytest.warns(UserWarning, match=r"a GPU: times include the host's launch overhead.*\(no compiler is there\)"):
        times = time_launches(device, device.launch, 9)
    assert min(times) > 6.9e-6
    assert not device.waits


def test_a_delayed_host_gets_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Clocked(monkeypatch, 500.0, 7.0)
    device.held_up_s = 1.5e-4
    assert time_launches(device, device.launch, 1, warmup=0) == pytest.approx([5e-4])
    assert device.launches == len(device.waits) == 2
    assert device.waits[1] > 1.5e-4 > device.waits[0]
    device.held_up_s = 10.0  # for good: it is not tried forever
    device.launches = 0
    monkeypatch.setattr(queued, "SPARE", 1.0)
    time_launches(device, device.launch, 1, warmup=0)
    assert device.launches == queued.TRIES


def test_short_launches_are_many_between_two_events_and_long_ones_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for gpu_us, each in ((2.1, 48), (30.0, 4), (101.0, 1), (5000.0, 1)):
        device = Clocked(monkeypatch, gpu_us, 7.0)
        time_launches(device, device.launch, 10, warmup=3)
        assert device.launches == 3 + (10 if each == 1 else 1 + 10 * each)
        most = MOST_QUEUED // each * each
        assert len(device.waits) == 1 + -(-(9 if each == 1 else 10) * each // most)


def test_a_processors_launches_are_timed_one_by_one() -> None:
    class Processor:
        name, kind = "a processor", "opencl"
        seconds = 1.0

        def time(self, call: Any, stream: Any, runs: int, warmup: int) -> list[float]:
            return [self.seconds + warmup] * runs

    device: Any = Processor()
    assert time_launches(device, lambda: None, 3, warmup=4) == [5.0] * 3
    device.seconds = -1.0
    with pytest.raises(DeviceError, match=r"a processor: its clock reported -1.0 s for a run; update its driver"):
        time_launches(device, lambda: None, 3, warmup=0)


TIMED = """
from ksgen.devices import find_device
from ksgen.measure.verify import measure
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.measure import verify

verify.GPU_ROTATED = 2
measured = measure(find_device(), KernelSpec(Pattern(1, 24, 9, 2)), 70, runs=5)
assert measured.passed
print(measured.seconds.median * 1e6)
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize("runtime", ["pycuda", "driver"])
@pytest.mark.parametrize("us", [2.0, 2.06, 300.0])
def test_both_runtimes_tell_how_long_the_gpu_takes(runtime: str, us: float) -> None:
    try:
        done = run(TIMED, runtime, KSGEN_DRIVER_DURATIONS=f"ks_1x24x9x2_*:{us}")
    except NotHereError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == pytest.approx(us, rel=0.01)
