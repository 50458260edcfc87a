"""Determines, on the device itself, which families give correct results there and which kernels are the fastest."""

from ksgen.calibration.trials import Calibrated, calibrate

__all__ = ["Calibrated", "calibrate"]
