"""Who multiplies when nobody is asked for, "auto": ksgen's kernels or PyTorch's products on views; and why."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ksgen.devices import device_for
from ksgen.errors import DeviceError
from ksgen.pattern import Gain
from ksgen.plan import PLANNER
from ksgen.spec import KernelSpec

REMEMBERED = 4096  # choices: one for each kernel and batch


@dataclass(frozen=True)
class Choice:
    backend: str  # "ksgen" or "strided"
    why: str


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
