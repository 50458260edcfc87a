"""`ksgen bench energy`: what it says is missing."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.bench.energy import EnergyError, open_nvml
from tests.support.bench_energy import Nvml
from tests.support.libraries import library


def nvml_module(start: Callable[[], None]) -> Any:
    return SimpleNamespace(NVMLError=Nvml.NVMLError, nvmlInit=start)


def test_a_missing_nvml_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(EnergyError, match=r"measuring energy needs NVML's Python module: pip install .*\[bench\]"):
        open_nvml()

    def refuse() -> None:
        raise Nvml.NVMLError("Driver Not Loaded")

    monkeypatch.setitem(sys.modules, "pynvml", nvml_module(refuse))
    with pytest.raises(
        EnergyError, match=r"measuring energy needs an NVIDIA GPU and its driver: NVML says Driver Not Loaded"
    ):
        open_nvml()
    monkeypatch.setitem(sys.modules, "pynvml", module := nvml_module(lambda: None))
    assert open_nvml() is module


@pytest.mark.libraries
def test_joules_join_the_times_of_the_same_contender(tmp_path: Any) -> None:
    """Through the runner, on the processor, with the stand-in's energy."""
    library("torch")
    from ksgen.bench.problem import product_job
    from ksgen.bench.rows import Log, read_rows
    from ksgen.bench.runner import Runner
    from ksgen.bench.timing import Protocol, Times
    from ksgen.devices import Found, find_device, list_devices
    from ksgen.pattern import Pattern

    if not any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices()):
        pytest.skip("no OpenCL device")
    device, job, path = (
        find_device("opencl"),
        product_job(Pattern(1, 8, 8, 2), "float32", "bsl", 40),
        tmp_path / "paper.jsonl",
    )
    quantities: list[Any] = [Times(), FakeEnergies(), FakeEnergies()]
    for quantity in quantities:
        with Log(path) as log:
            protocol = Protocol(("ksgen", "bmm"), measurements=2, runs=2)
            Runner(
                log, device, protocol, quantity, {"device": device.name}, float("inf"), lambda done, total, now: None
            ).run([job])
    for row in read_rows(path):
        assert (row.measurements, row.energy_measurements, row.joule, row.idle_watt) == (2, 2, 0.25, 70.0)


class FakeEnergies:
    column = "joule"

    def measure(self, timed: Any) -> dict[str, Any]:
        timed.run(16)
        return {"joule": 0.25, "idle_watt": 70.0, "energy_runs": 16, "energy_from": "energy counter"}
