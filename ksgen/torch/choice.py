"""Who multiplies: ksgen's kernels or PyTorch's products on views. When neither is asked for, "auto", which one, and why."""

from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

from torch import Tensor

from ksgen.devices import device_for
from ksgen.errors import DeviceError
from ksgen.launcher import Launcher
from ksgen.pattern import Gain
from ksgen.plan import PLANNER
from ksgen.spec import Epilogue, KernelSpec
from ksgen.torch.checks import dtype_name

KERNEL_DEVICES = {"cuda"}  # whose tensors kernels multiply; tests add "cpu", to run them through OpenCL
REMEMBERED = 4096  # choices: one for each kernel and batch


@dataclass(frozen=True)
class Choice:
    backend: str  # "ksgen" or "strided"
    why: str


@cache
def launcher(a: int, b: int, c: int, d: int) -> Launcher:
    return Launcher(a, b, c, d)


def has_kernels(device: Any) -> bool:
    """Whether tensors that lie there are multiplied by ksgen's kernels."""
    return device.type in KERNEL_DEVICES


def chosen(own: Launcher, x: Tensor, layout: str, precision: str | None, backend: str, **what: Any) -> str:
    """Who serves a call: "ksgen" or "strided". `what`: the epilogue, or another job than a product."""
    if not has_kernels(x.device):
        return "strided"
    if backend != "auto":
        return backend
    kernel = _kernel(own, precision or dtype_name(x.dtype), layout, **what)
    return choose(kernel, x.shape[0 if layout == "bsf" else 1], x.device).backend


@lru_cache(REMEMBERED)
def _kernel(
    own: Launcher, precision: str, layout: str, epilogue: tuple[bool, str, bool] = (False, "none", False), job: str = "multiply"
) -> KernelSpec:
    return KernelSpec(own.pattern, precision, layout, Epilogue(*epilogue), job=job)


def choose(kernel: KernelSpec, batch: int, device: Any) -> Choice:
    """Ours where the search measured this kernel, else by the heuristic of `Pattern.predicts`. `device` is a tensor's."""
    return _choose(kernel, batch, ("cuda", device.index) if device.type == "cuda" else "host", PLANNER.generation)


@lru_cache(REMEMBERED)
def _choose(kernel: KernelSpec, batch: int, place: Any, generation: int) -> Choice:
    try:
        found = PLANNER.choice(device_for(place), kernel, batch)
    except DeviceError as error:
        return Choice("strided", f"no kernel can be launched: {error}")
    return Choice("ksgen", found.why) if found.is_measured else by_heuristic(kernel)


def by_heuristic(kernel: KernelSpec) -> Choice:
    """The choice for a kernel that was never measured on its device."""
    if kernel.precision != kernel.dtype:
        return Choice("ksgen", f"PyTorch has no {kernel.precision} of its own for a single product")
    pattern, gain = kernel.pattern, kernel.pattern.predicts()
    if kernel.layout == "bsl":
        words = "nothing to permute in bsl"
    else:
        words = f"{gain}; (b + c)/(bc) = {pattern.rewrite_ratio:.3g}"
        if gain in (Gain.MOST, Gain.SOME):
            return Choice("ksgen", words)
    if steps := kernel.epilogue.words:
        return Choice("ksgen", f"{words}, but {', '.join(steps)} inside the kernel")
    return Choice("strided", words)
