"""Preparation of a model's calls: compiles their kernels in parallel, and finds the fastest ones.

The model is called a few times, to find out which kernels its calls need.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ksgen.build.background import PendingError, deferred, finish_jobs, forget_errors
from ksgen.calibration.trials import Calibrated, opened
from ksgen.devices.base import Device
from ksgen.errors import LaunchError
from ksgen.launch.choice import Choice
from ksgen.launch.planner import PLANNER, WATCHERS
from ksgen.spec import KernelSpec
from ksgen.torch.operators.choice import forget_times, save_times
from ksgen.torch.operators.meanwhile import building, note_unsettled, times_unsettled
from ksgen.tuning.job import Job, job_of, kernels_of_layer, with_layers
from ksgen.tuning.search import Progress

# preparation ends after so many consecutive calls without a missing kernel; a frozen layer prepares at its second call
LAST_CALLS = 2


def build(model: nn.Module, *x: Any, **options: Any) -> None:
    """Compile all kernels of a call of a model now, in parallel, and time them for `backend="auto"`.

    Later calls with such shapes use the fastest methods at once. The model is called a few times: random numbers and
    the running statistics of batch norms advance, as in any call. In training mode, gradients are computed too, but not
    stored. Of `DistributedDataParallel`, the module inside is called. A terminal shows a progress bar.

    Args:
        model: Module with `KSLinear` layers, or one such layer.
        *x: Arguments of the call, such as a batch of inputs. Their values do not matter, their shapes do.
        **options: Arguments by name.

    Raises:
        LaunchError: A parameter is distributed over several processes.
        ToolchainError: A kernel that PyTorch's products cannot replace cannot be compiled.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> from ksgen.torch import KSLinear, build
        >>> model = nn.Sequential(KSLinear("1,3,2,2"), nn.ReLU()).eval()
        >>> build(model, torch.zeros(5, 4))
    """
    build_calls(model, [(x, options)])


def build_calls(model: nn.Module, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> None:
    """Build like `build`, for several calls together, each with positional arguments and arguments by name."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module  # DDP sends buffers at each call, but processes may need different numbers of calls
    for name, parameter in model.named_parameters():
        mesh: Any = getattr(parameter, "device_mesh", None)  # of a DTensor
        if mesh is not None and mesh.size() > 1:
            raise LaunchError(
                f"build: {name} is distributed over {mesh.size()} processes, which may need different numbers of calls"
                "; accepted: plain parameters; first calls of split or sharded layers wait for their kernels"
            )
    build_runs([partial(_call, model, x, options) for x, options in calls])


def build_runs(runs: Sequence[Callable[[], object]]) -> None:
    """Compile and time all that some runs need, by repeating them until nothing is missing. Their results are lost."""
    rounds_left = LAST_CALLS
    forget_errors()
    token = building.set(True)
    try:
        with deferred(lambda: True):
            while rounds_left:
                before = times_unsettled()
                for run in runs:
                    try:
                        run()
                    except PendingError:  # PyTorch's products cannot replace the missing kernel
                        note_unsettled()
                rounds_left = LAST_CALLS if finish_jobs() or before != times_unsettled() else rounds_left - 1
    finally:
        building.reset(token)


def _call(model: nn.Module, x: Sequence[Any], options: Mapping[str, Any]) -> None:
    """Call the model without gradients. In training mode, also compute those of its parameters and of x, and drop them.

    Training has calls without gradients too, for validation and in gradient checkpointing.
    """
    with torch.no_grad():
        model(*x, **options)
    if not model.training:
        return
    with torch.enable_grad():
        y = [each for each in tree_leaves(model(*x, **options)) if isinstance(each, Tensor) and each.requires_grad]
        given = [each for each in tree_leaves((x, options)) if isinstance(each, Tensor)]
        trained = [each for each in (*given, *model.parameters()) if each.requires_grad]
        if y and trained:
            torch.autograd.grad(y, trained, [torch.ones_like(each) for each in y], allow_unused=True)


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

    WATCHERS.append(note)
    try:
        forget_times()
        PLANNER.forget()  # so that every kernel is planned again
        call()
    finally:
        WATCHERS.remove(note)
    return jobs


def settle(call: Callable[[], None]) -> None:
    """Time the methods of a call with the fastest kernels that were found, and store the times."""
    forget_times()
    call()
    save_times()
