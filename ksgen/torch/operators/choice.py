"""Choice between ksgen's kernels and PyTorch products on views for `backend="auto"`, with the reason."""

import os
from collections.abc import Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor

from ksgen.build.background import PendingError, deferred, outcome, pause_compilers, undisturbed
from ksgen.devices import device_for, find_device
from ksgen.errors import DeviceError, ToolchainError, warn
from ksgen.families import family_named
from ksgen.families.expected import default_us, library_us
from ksgen.launch.choice import limits_of
from ksgen.launch.explain import LaunchOptions
from ksgen.launch.fused import Verdict
from ksgen.launch.planner import PLANNER
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.pattern import Gain, Pattern
from ksgen.spec import Activation, Epilogue, Fuse, KernelSpec
from ksgen.spec.kernel import pattern_as_list
from ksgen.spec.storage import SAME
from ksgen.torch.operators import settled
from ksgen.torch.operators.checks import dtype_name
from ksgen.torch.operators.meanwhile import (
    MOST_ADDED_S,
    Method,
    MethodTrial,
    building,
    by_kernels,
    may_defer,
    note_unsettled,
    unless_building,
)

_fusion_errors: dict[Any, str] = {}  # by layer or group: why its fused launch could not be built
KERNEL_DEVICES = {"cuda", "cpu"}  # PyTorch devices that kernels support, if ksgen finds a matching device
REMEMBERED = 4096  # cached choices: one per kernel and batch size

# names of methods in reports: for several factors, for training steps, and for groups
METHODS_OF_LAYERS = {
    "ksgen": "one launch",
    "in turn": "one launch per factor by one call",
    "slices": "the same with the slices of tied weights",
    "apart": "one launch per factor",
    "each": "each factor by its fastest method",
}
METHODS_OF_STEPS = {
    "ksgen": "one call forward and one backward",
    "swapped": "the same calls with the last x packed in place of its weights",
    "bmm": "bmm for every factor",
    "each": "each factor by its fastest method",
}
METHODS_OF_SUMS = {
    "in turn": "all launches by one call",
    "each": "each layer by its fastest method",
}
METHODS_OF_GROUPS = {
    "ksgen": "one launch",
    "in turn": "the launches of each layer by one call",
    "each": "each layer by its fastest method",
}
KINDS = {  # kinds of jobs that are timed: their names in reports, and those of their methods
    "prepared": ("frozen", METHODS_OF_LAYERS),
    "called": ("without gradients", METHODS_OF_LAYERS),
    "step": ("training step", METHODS_OF_STEPS),
    "first step": ("training step, x without a gradient", METHODS_OF_STEPS),
    "chain": ("all factors", METHODS_OF_LAYERS),
    "trained": ("trained", METHODS_OF_LAYERS),
    "trained first": ("trained, x without a gradient", METHODS_OF_LAYERS),
    "group": ("all layers", METHODS_OF_GROUPS),
    "prepared group": ("all layers, frozen", METHODS_OF_GROUPS),
    "prepared sum": ("the sum, frozen", METHODS_OF_SUMS),
}

_measured: dict[Hashable, dict[str, float]] = {}  # seconds per method, by job and threads
_unreliable: dict[Hashable, str] = {}  # for the same keys: why the times are unreliable; empty if they are reliable
_open: set[str] = set()  # values of KSGEN_DEVICE whose devices are open
_trials: dict[Hashable, MethodTrial] = {}  # trials of jobs that are being timed, for the same keys
_unbuilt: dict[KernelSpec, str] = {}  # kernels that no compiler here could build, and why; never retried


@dataclass(frozen=True)
class BackendChoice:
    backend: str  # "ksgen", "strided" or "dense"
    why: str


@cache
def launcher(a: int, b: int, c: int, d: int, store: str = "", load: str = "") -> Launcher:
    return Launcher(Pattern(a, b, c, d, store, load))


def launcher_of(pattern: Pattern) -> Launcher:
    return launcher(*pattern_as_list(pattern))


@lru_cache(REMEMBERED)
def chain_launcher(
    patterns: tuple[tuple[int, int, int, int], ...], between: Activation = "none", fuse: Fuse = "auto"
) -> ChainLauncher:
    return ChainLauncher(
        *(launcher(*pattern) for pattern in patterns), between=between if len(patterns) > 1 else "none", fuse=fuse
    )


@lru_cache(REMEMBERED)
def group_launcher(
    chains: tuple[tuple[tuple[int, int, int, int], ...], ...], between: str = "none", fuse: str = "auto"
) -> GroupLauncher:
    return GroupLauncher(*(chain_launcher(chain, between, fuse) for chain in chains))


def has_kernels(device: Any) -> bool:
    """Whether ksgen's kernels can multiply tensors on that device."""
    return device.type in KERNEL_DEVICES and (
        device.type != "cpu" or _has_processor(os.environ.get("KSGEN_DEVICE", ""))
    )


def is_ready(device: Any) -> bool:
    """Whether the device of a tensor is open. Otherwise the background opens it, while PyTorch multiplies.

    `build` waits for the device. Otherwise only the last products of the call that it builds would request kernels.
    """
    asked = os.environ.get("KSGEN_DEVICE", "")
    if device.type != "cpu" or asked in _open:
        return True
    with suppress(PendingError), deferred(lambda: may_defer() and not building.get()):
        outcome(("the device", asked), "a device", partial(_has_processor, asked), imports=True)
        _open.add(asked)
        return True
    return False


@cache
def _has_processor(asked: str) -> bool:
    """Whether ksgen multiplies host arrays in place, on the processor.

    On a machine with a GPU, it does so only if the user selects the processor by KSGEN_DEVICE.
    """
    try:
        return find_device(asked).shares_host
    except DeviceError:
        return False


def run_chosen(
    factor: Launcher,
    x: Tensor,
    layout: str,
    precision: str | None,
    backend: str,
    methods: Mapping[str, Method],
    **options: Any,
) -> Tensor:
    """Run the method that `backend` names; for "auto", the one chosen for this kernel and batch size.

    "strided" runs on devices without kernels, and while `build` waits for them. `options` hold the epilogue, or a job
    other than a product.
    """
    if backend == "auto" and precision in (None, dtype_name(x.dtype)) and not is_ready(x.device):
        note_unsettled()
        with pause_compilers():
            return methods["strided"]()
    if not has_kernels(x.device):
        return methods["strided"]()
    if backend != "auto":
        return unless_building(methods[backend], methods["strided"])
    kernel = _kernel(factor, precision or dtype_name(x.dtype), layout, **options)
    batch = x.shape[0 if layout == "bsf" else 1]
    if is_measured_here(kernel, x.device):
        return run_fastest((kernel, size_of(batch), *methods), methods, "strided")
    chosen = choose(kernel, batch, x.device).backend
    try:
        if chosen != "ksgen" or kernel.precision != kernel.dtype:
            return unless_building(methods[chosen], methods["strided"])
        if (y := by_kernels(methods["ksgen"])) is not None:
            return y
    except ToolchainError as error:
        if chosen != "ksgen":
            raise
        if not _unbuilt:
            _warn_once(str(error))
        _unbuilt[kernel] = str(error).splitlines()[0]
    with pause_compilers():
        return methods["strided"]()


def is_measured_here(kernel: KernelSpec, device: Any) -> bool:
    """Whether a kernel's methods are timed at its first call: on a processor, if PyTorch has the precision too."""
    return bool(device.type == "cpu" and kernel.precision == kernel.dtype)


def run_fastest(
    job: Hashable, methods: Mapping[str, Method], meanwhile: str, timed: Mapping[str, Method] | None = None
) -> Tensor:
    """Run the fastest method, or the method `meanwhile` until all are compiled and timed.

    `timed` has runs of the same names that are timed in place of the methods.
    """
    key = job, torch.get_num_threads()
    is_timed = _is_timed(key, methods)
    if not is_timed and may_defer():
        trial = _trial(key, timed or methods)
        note_unsettled()
        with pause_compilers(), deferred(may_defer):
            if timed is None:
                y = trial.compute(methods, meanwhile)
            else:
                y = methods[meanwhile]()
                trial.go_on(timed)
        _settle(key, trial)
        return y
    run = partial(by_kernels, lambda: methods[faster(job, timed or methods)]())
    if (y := undisturbed(run) if is_timed else run()) is not None:  # untimed methods may wait for compilers
        return y
    with pause_compilers():
        return methods[meanwhile]()


def faster(job: Hashable, methods: Mapping[str, Method]) -> str:
    """Name of the fastest method on this processor.

    The methods are timed alternately at the first call of a job, unless `calibrate` has timed them. The shortest time
    of each method counts. If calls may defer work, timing is spread over several calls, and `PendingError` is raised
    until the fastest method is known.
    """
    key = job, torch.get_num_threads()
    if not _is_timed(key, methods):
        trial = _trial(key, methods)
        if may_defer():
            with deferred(may_defer):
                trial.go_on(methods)
        else:
            trial.run_all(methods)
        if not _settle(key, trial):
            raise PendingError(str(job))
    return min(_measured[key], key=_measured[key].__getitem__)


def _is_timed(key: Hashable, methods: Iterable[str]) -> bool:
    """Whether the times of a job's methods are known, from this process or from a calibration of this machine."""
    if key in _measured:
        return True
    if building.get() or not (stored := settled.times_of(key, methods)):
        return False
    _measured[key], _unreliable[key] = stored, ""
    return True


def forget_times() -> None:
    """Forget the times that this process measured or read."""
    for cache_of_times in (_measured, _unreliable, _trials):
        cache_of_times.clear()


def save_times() -> None:
    """Store the reliable times of this process for later processes."""
    settled.save({key: seconds for key, seconds in _measured.items() if not _unreliable[key]})


def _trial(key: Hashable, methods: Iterable[str]) -> MethodTrial:
    if len(_measured) >= REMEMBERED or len(_trials) >= REMEMBERED:
        forget_times()
    return _trials.setdefault(key, MethodTrial(methods))


def _settle(key: Hashable, trial: MethodTrial) -> bool:
    """Store the times of a trial if it is complete, and return whether it is."""
    for error in trial.failed.values():
        _warn_once(error)
    if not trial.is_settled(MOST_ADDED_S):
        return False
    _measured[key], _unreliable[key] = trial.seconds, trial.why_unreliable
    _trials.pop(key, None)
    return True


@cache
def _warn_once(error: str) -> None:
    warn(f"PyTorch multiplies, because no kernel is available: {error}")


def measured(job: Hashable) -> Mapping[str, float]:
    """Seconds per method; empty if the job was not timed yet."""
    return _measured.get((job, torch.get_num_threads()), {})


def _unreliable_note(key: Hashable) -> str:
    """Remark after the times of a key: why they are unreliable; empty if they are reliable."""
    return f"; these times are unreliable: {why}" if (why := _unreliable.get(key, "")) else ""


def job_of(
    kind: str, patterns: Iterable[Iterable[Any]], dtype: torch.dtype, layout: str, activation: str, bias: bool,
    residual: bool, between: str = "none",
) -> Hashable:  # fmt: skip
    """Key under which the methods for one or several factors are timed.

    `kind` is one of `KINDS`. For a group, `patterns` has one sequence of patterns per layer.
    """
    return (kind, *map(tuple, patterns), dtype, layout, activation, bias, residual, between)


def describe_times(
    patterns: Iterable[Iterable[Any]],
    dtype: torch.dtype,
    layout: str,
    activation: str,
    bias: bool,
    batch: int,
    between: str = "none",
) -> list[str]:
    """Lines with the measured times of a layer's methods, the fastest first.

    There is one line per kind of job that was timed, such as a training step, with or without a residual.
    """
    patterns, threads = list(patterns), torch.get_num_threads()
    measured, found = cast("dict[Any, dict[str, float]]", _measured), []
    for (kind, (name, words)), residual in product(KINDS.items(), (False, True)):
        job = job_of(kind, patterns, dtype, layout, activation, bias, residual, between), size_of(batch)
        if words is METHODS_OF_LAYERS and len(patterns) == 1:
            words = {}
        for key, seconds in list(measured.items()):
            # a key ends with the names of the methods, in another order than stored times
            if key[0][: len(job)] == job and key[1] == threads:
                times = ", ".join(_times(seconds, words))
                found.append(f"{name}{', with a residual' if residual else ''}: {times}{_unreliable_note(key)}")
    return found


def _times(seconds: Mapping[str, float], words: Mapping[str, str]) -> list[str]:
    """Times of methods in words, the fastest first. `words` has other names for some methods."""
    return [
        f"{words.get(name, name)} {seconds[name] * 1e6:.0f} us" for name in sorted(seconds, key=seconds.__getitem__)
    ]


def size_of(batch: int) -> int:
    """Class of batch sizes that share a choice: small ones individually, others by their length in bits."""
    return batch if batch <= 16 else 1 << batch.bit_length()


@lru_cache(REMEMBERED)
def _kernel(
    factor: Launcher, precision: str, layout: str, epilogue: tuple[Any, ...] = (), job: str = "multiply"
) -> KernelSpec:
    return KernelSpec(factor.pattern, precision, layout, Epilogue(*epilogue), job=job)


def choose(kernel: KernelSpec, batch: int, device: Any) -> BackendChoice:
    """Choose ksgen's kernels if a search measured this kernel, else by expected times and `Pattern.predicts`.

    `device` is a tensor's. On a processor, the fastest method is chosen once all are timed.
    """
    if is_measured_here(kernel, device):
        jobs = [(kernel, size_of(batch), *methods) for methods in (("ksgen", "strided", "dense"), ("ksgen", "strided"))]
        threads = torch.get_num_threads()
        if (job := next((each for each in jobs if _is_timed((each, threads), each[2:])), None)) is None:
            return BackendChoice("ksgen", "its first call times it and PyTorch's products, and the fastest is taken")
        seconds = measured(job)
        first, slower = min(seconds, key=seconds.__getitem__), ", ".join(_times(seconds, {})[1:])
        return BackendChoice(first, f"{seconds[first] * 1e6:.0f} us here, {slower}{_unreliable_note((job, threads))}")
    if kernel in _unbuilt:
        return BackendChoice("strided", f"no kernel can be built: {_unbuilt[kernel]}")
    return _choose(kernel, batch, ("cuda", device.index) if device.type == "cuda" else "host", PLANNER.generation)


@lru_cache(REMEMBERED)
def _choose(kernel: KernelSpec, batch: int, place: Any, generation: int) -> BackendChoice:
    try:
        device = device_for(place)
        planned = PLANNER.choice(device, kernel, batch)
    except DeviceError as error:
        return BackendChoice("strided", f"no kernel can be launched: {error}")
    if planned.is_measured:
        return BackendChoice("ksgen", planned.why)
    limits = limits_of(device)
    if library_us(kernel, limits, batch) < default_us(family_named(planned.family), kernel, limits, batch):
        why = f"no family uses the tensor cores of {device.name}"
        return BackendChoice("strided", f"{why}, and PyTorch's products on them are expected to be faster")
    return by_heuristic(kernel)


def is_one_launch(
    fused: ChainLauncher | GroupLauncher, device: Any, precision: Any, layout: Any, epilogue: Epilogue, batch: int, *,
    out_layout: str | None = None, weights: Any = SAME, inputs: Any = SAME,
) -> Verdict:  # fmt: skip
    """Whether one launch runs a layer's factors, or several layers, on a tensor's device, and why.

    The answer is always no after the build of that launch has failed.
    """
    if fused in _fusion_errors:
        return Verdict(False, f"one launch for all is not available: {_fusion_errors[fused]}")
    options = LaunchOptions(precision, layout, epilogue, weights, inputs)
    try:
        where: Any = device_for(("cuda", device.index) if device.type == "cuda" else "host")  # hashed by identity
        return _verdict(fused, where, options, batch, out_layout, PLANNER.generation)
    except DeviceError as error:  # the separate launches will report it
        return Verdict(False, str(error))


@lru_cache(REMEMBERED)
def _verdict(fused: Any, device: Any, options: LaunchOptions, batch: int, out_layout: Any, generation: int) -> Verdict:
    verdict: Verdict = fused._verdict(device, options, batch, out_layout)
    return verdict


def versus_dense(
    fused: ChainLauncher, device: Any, precision: Any, layout: Any, epilogue: Epilogue, batch: int, is_one: bool, *,
    out_layout: Any = None,
) -> list[str]:  # fmt: skip
    """Line that compares expected times on a tensor's GPU with that of the dense product; none if they are unknown."""
    try:
        where = device_for(("cuda", device.index))
    except DeviceError:
        return []
    return fused._versus_dense(where, LaunchOptions(precision, layout, epilogue), batch, is_one, out_layout)


def disable_fusion(fused: ChainLauncher | GroupLauncher, error: ToolchainError) -> None:
    """Disable the fused launch for this layer or group from now on; warns once."""
    _fusion_errors[fused] = str(error)
    warn(f"{fused._title} takes one launch per {fused.parts}, because one launch for all is not available: {error}")


def is_fusion_disabled(fused: ChainLauncher | GroupLauncher) -> bool:
    """Whether the fused launch of this layer or group could not be built."""
    return fused in _fusion_errors


def by_heuristic(kernel: KernelSpec) -> BackendChoice:
    """Choose for a kernel that was never measured on its device."""
    if kernel.precision != kernel.dtype:
        return BackendChoice("ksgen", f"PyTorch has no {kernel.precision} of its own for a single product")
    pattern, gain = kernel.pattern, kernel.pattern.predicts()
    if order := pattern.exchanged:
        return BackendChoice("ksgen", f"PyTorch would copy {order.features}, whose digits are exchanged")
    if kernel.layout == "bsl":
        words = "nothing to permute in bsl"
    else:
        words = f"{gain}; (b + c)/(bc) = {pattern.rewrite_ratio:.3g}"
        if gain in (Gain.MOST, Gain.SOME):
            return BackendChoice("ksgen", words)
    if steps := kernel.epilogue.words:
        return BackendChoice("ksgen", f"{words}, but {', '.join(steps)} inside the kernel")
    return BackendChoice("strided", words)
