"""`ksgen bench energy` with a stand-in for NVML: a GPU whose power is known, a count that changes now and then, a
clock of its own.
"""

from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.bench import energy
from ksgen.bench.energy import Energies, EnergyError, Idle, Meter, Reading, find_handle, integral, joule_per_run
from tests.support.bench_energy import BUSY_WATT, IDLE_WATT, Nvml


def meter(nvml: Nvml) -> Meter:
    return Meter(nvml, "gpu", nvml.clock, nvml.pause)


def test_idle_power_and_how_often_the_count_changes() -> None:
    for update_s in (0.02, 0.1):
        idle = meter(Nvml(update_s)).idle()
        assert idle.watt == pytest.approx(IDLE_WATT, rel=0.02)
        assert idle.update_s == pytest.approx(update_s, rel=0.02)


def test_a_run_s_energy_is_what_it_takes_above_idle() -> None:
    nvml = Nvml()
    metered = meter(nvml)
    idle = metered.idle()
    reading = metered.read(lambda: nvml.work(4.0))
    assert reading.seconds == pytest.approx(4.0)
    assert reading.joule == pytest.approx(4 * BUSY_WATT, rel=0.05)  # the count's resolution
    assert joule_per_run(reading, 100, idle) == pytest.approx(4 * (BUSY_WATT - IDLE_WATT) / 100, rel=0.05)


def test_too_short_is_refused_with_how_long_would_do() -> None:
    with pytest.raises(EnergyError) as refused:
        joule_per_run(Reading(200.0, 0.5, 0), 16, Idle(70.0, 0.1))
    assert str(refused.value) == (
        "16 runs took 0.50 s, and this GPU updates its energy every 100 ms: at least 2.0 s are needed; --seconds 4 "
        "would do"
    )
    with pytest.raises(EnergyError, match=r"at least 0\.2 s are needed; --seconds 1 would do"):
        joule_per_run(Reading(20.0, 0.1, 0), 16, Idle(70.0, 0.01))
    assert joule_per_run(Reading(200.0, 2.0, 0), 10, Idle(70.0, 0.1)) == pytest.approx(6.0)


def test_no_more_than_idle_is_no_result() -> None:
    with pytest.raises(
        EnergyError,
        match=r"took 100.0 J in 4.0 s, no more than the idle GPU's 70 W: another process used the GPU",
    ):
        joule_per_run(Reading(100.0, 4.0, 0), 16, Idle(70.0, 0.1))


def test_a_count_that_never_changes_is_refused() -> None:
    nvml = Nvml()
    nvml.watt = 0.0
    with pytest.raises(EnergyError, match=r"the GPU's energy counter did not change in 3\.\d s"):
        meter(nvml).idle()


def test_power_samples_where_there_is_no_count() -> None:
    assert meter(Nvml()).source == "energy counter"
    assert meter(Nvml(has_counter=False)).source == "power samples"
    real = Meter(Nvml(has_counter=False), "gpu")  # by the machine's clock, in a thread of its own
    done: list[int] = []
    reading = real.read(lambda: done.append(sum(range(10**6))))
    assert done
    assert reading.seconds > 0
    assert real.read(lambda: energy.sleep(0.3)).joule == pytest.approx(0.3 * IDLE_WATT, rel=0.2)


def test_a_reading_that_fails_is_an_error_and_no_smaller_energy() -> None:
    def lost(handle: str) -> int:
        raise Nvml.NVMLError("GPU is lost")

    stand_ins: list[Any] = [Nvml(), Nvml(has_counter=False)]
    for nvml in stand_ins:
        metered = Meter(nvml, "gpu")
        nvml.nvmlDeviceGetTotalEnergyConsumption = nvml.nvmlDeviceGetPowerUsage = lost
        with pytest.raises(EnergyError, match=r"NVML reports no energy of the GPU any more \(GPU is lost\)"):
            metered.read(lambda: energy.sleep(0.05))


def test_samples_add_up_to_joules() -> None:
    assert integral([(0.0, 100.0), (1.0, 300.0), (3.0, 300.0)], 3.0) == 800.0
    assert integral([(1.0, 100.0), (2.0, 100.0)], 4.0) == 400.0  # what lies outside the samples
    assert integral([(1.0, 50.0)], 4.0) == 200.0
    assert integral([], 4.0) == 0.0


class Timed:
    """A contender that takes a hundredth of a second a run."""

    once_s = 0.01

    def __init__(self, nvml: Nvml) -> None:
        self.nvml, self.ran = nvml, 0

    def run(self, runs: int) -> None:
        self.ran += runs
        self.nvml.work(runs * self.once_s)


def test_a_measurement_runs_long_enough_and_often_enough() -> None:
    nvml = Nvml()
    metered = meter(nvml)
    timed: Any = Timed(nvml)
    found = Energies(metered, metered.idle(), seconds=4.0).measure(timed)
    assert timed.ran == found["energy_runs"] == 400
    assert found["joule"] == pytest.approx(0.01 * (BUSY_WATT - IDLE_WATT), rel=0.05)
    assert found["idle_watt"] == pytest.approx(IDLE_WATT, rel=0.02)
    assert found["energy_from"] == "energy counter"
    timed.once_s = 1.0
    assert Energies(metered, Idle(IDLE_WATT, 0.1), seconds=4.0).measure(timed)["energy_runs"] == 16


def test_nvml_s_gpu_is_found_by_its_uuid() -> None:
    def by_uuid(uuid: str) -> str:
        if uuid != "GPU-1":
            raise Nvml.NVMLError("Not Found")
        return "by uuid"

    def by_index(index: int) -> str:
        if index:
            raise Nvml.NVMLError("Invalid Argument")
        return "by index"

    nvml = SimpleNamespace(
        NVMLError=Nvml.NVMLError, nvmlDeviceGetHandleByUUID=by_uuid, nvmlDeviceGetHandleByIndex=by_index
    )
    assert find_handle(nvml, "1", 0) == find_handle(nvml, "GPU-1", 7) == "by uuid"
    assert find_handle(nvml, "2", 0) == find_handle(nvml, None, 0) == "by index"
    with pytest.raises(EnergyError, match=r"NVML does not know GPU 3 \(Invalid Argument\)"):
        find_handle(nvml, None, 3)
