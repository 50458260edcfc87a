"""A GPU whose energy is known."""

from typing import Any

IDLE_WATT, BUSY_WATT = 70.0, 400.0


class Nvml:
    """Stand-in for NVML. Its counter in mJ advances every `update_s`; a reading without a counter fails."""

    class NVMLError(Exception):
        pass

    def __init__(self, update_s: float = 0.1, has_counter: bool = True) -> None:
        self.now, self.joule, self.watt = 0.0, 5000.0, IDLE_WATT
        self.update_s, self.has_counter, self._shown, self._updates = update_s, has_counter, 5000.0, 0

    def clock(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        """Time passes, and energy with it."""
        end = self.now + seconds
        while (self._updates + 1) * self.update_s <= end:
            self._updates += 1
            self._pass(self._updates * self.update_s)
            self._shown = self.joule
        self._pass(end)

    def _pass(self, until: float) -> None:
        self.joule += self.watt * (until - self.now)
        self.now = until

    def work(self, seconds: float) -> None:
        self.watt = BUSY_WATT
        self.pause(seconds)
        self.watt = IDLE_WATT

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any) -> int:  # noqa: N802  (NVML's name)
        assert handle == "gpu"
        if not self.has_counter:
            raise self.NVMLError("Not Supported")
        return round(self._shown * 1000)

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> int:  # noqa: N802
        return round(self.watt * 1000)
