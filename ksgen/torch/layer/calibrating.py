"""Finds the fastest kernels and methods for a model's calls on this machine: `ksgen.torch.calibrate`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from ksgen.calibration.trials import Calibrated, opened
from ksgen.devices.base import Device
from ksgen.launch.choice import Choice
from ksgen.launch.planner import PLANNER, WATCHERS
from ksgen.spec import KernelSpec
from ksgen.torch.layer.building import build
from ksgen.torch.operators.choice import forget_times, save_times
from ksgen.tuning.job import Job
from ksgen.tuning.kernels import job_of, kernels_of_layer, with_layers
from ksgen.tuning.search import Progress


def calibrate(
    model: nn.Module, *x: Any, progress: Callable[[Progress], None] | None = None, **options: Any
) -> list[Calibrated]:
    """Try a few candidates of each kernel of a model's call, and time the call's methods, once for this machine.

    The winners go into the user's wisdom, marked as trials: `ksgen tune` replaces them. On a processor, the times of
    ksgen's and PyTorch's methods are stored too, and later processes read them instead of timing their first calls.
    Kernels that wisdom has an entry for are not tried again. The model is called a few times, as by `build`. In
    training mode, the kernels of gradients are included.

    Args:
        model: Module with `KSLinear` layers, or one such layer.
        *x: Arguments of the call, such as a batch of inputs. Their values do not matter, their shapes do.
        progress: Function that is called after each candidate, in a separate thread.
        **options: Arguments of the call by name.

    Returns:
        A `ksgen.calibration.Calibrated` per kernel: the entry of wisdom, and its speed relative to the default. Empty
        if the call uses no kernels.

    Raises:
        DeviceError: No child process can use the device.
        ToolchainError: No compiler is available.
        KsgenError: Wisdom cannot be written.

    Examples:
        >>> import torch
        >>> from ksgen.torch import KSLinear, calibrate
        >>> layer = KSLinear("1,3,2,2").eval()
        >>> found = calibrate(layer, torch.zeros(5, 4))
        >>> [each.kernel.name for each in found]
        ['ks_1x3x2x2_float32_bsf_bias']
    """
    jobs = jobs_of(lambda: build(model, *x, **options))
    found = []
    for device, jobs_of_device in jobs.items():
        with opened(f"{device.runtime}:{device.index}") as calibration:
            found += calibration.run_all(list(jobs_of_device), progress)
    settle(lambda: build(model, *x, **options))
    return found


def jobs_of(call: Callable[[], None]) -> dict[Device, dict[Job, None]]:
    """Collect the jobs of a call per device: its kernels, and the kernels that they are compared with."""
    jobs: dict[Device, dict[Job, None]] = {}

    def note(device: Device, kernel: KernelSpec, batch: int, choice: Choice | None) -> None:
        launches = kernels_of_layer(kernel) if kernel.is_chain else with_layers(kernel)
        jobs.setdefault(device, {}).update(dict.fromkeys(job_of(each, batch) for each in launches))

    with _watched(note):
        forget_times()
        PLANNER.forget()  # so that every kernel is planned again
        call()
    return jobs


def settle(call: Callable[[], None]) -> None:
    """Time the methods of a call with the fastest kernels that were found, and store the times."""
    forget_times()
    call()
    save_times()


@contextmanager
def _watched(watcher: Callable[[Device, KernelSpec, int, Choice | None], None]) -> Iterator[None]:
    """Pass every kernel that launchers ask for to the watcher."""
    WATCHERS.append(watcher)
    try:
        yield
    finally:
        WATCHERS.remove(watcher)
