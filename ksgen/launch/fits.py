"""What a launcher found of the arguments of its calls: checked once for each combination of shapes, precisions and places,
and the plans that serve them.
"""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from functools import partial

from ksgen.devices.base import Device, Stream
from ksgen.devices.capture import refuse_capture
from ksgen.families import MAP_ALIGNMENT
from ksgen.launch.arrays import Place, common_device
from ksgen.launch.checks import check_arrays, check_precision, check_words
from ksgen.launch.plan import Plan
from ksgen.launch.planner import PLANNER
from ksgen.launch.views import Views
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec

MOST_FITS = 4096  # that are remembered: one per batch, and cheap to find again


@dataclass(eq=False, slots=True)
class Fit:
    """Arguments whose shapes, precisions and places were checked, and the plans that serve them."""

    batch: int
    place: Place
    precision: str
    layout: str
    epilogue: tuple[bool, str, bool]
    plans: dict[tuple[Device, int, bool], Plan] = field(default_factory=dict)


class Fits:
    """Those of one launcher and job."""

    def __init__(self, pattern: Pattern, batches: Collection[int | None], job: str = "multiply") -> None:
        self._pattern, self._batches, self._job = pattern, batches, job
        self._found: dict[Hashable, Fit] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(self, caller: object, layout: str, activation: str, views: Views, precision: str | None) -> Fit:
        """What was found when arguments like these were checked first: shapes, precisions, strides and places."""
        key = (layout, activation, precision, *[(name, found[2:6]) for name, found in views.items()])
        try:
            return self._found[key]
        except (KeyError, TypeError):  # what cannot be looked up is refused below
            check_words(caller, layout, activation)
            precision = check_precision(caller, precision, views["x"].dtype)
        batch = check_arrays(caller, self._pattern, layout, views, self._job)
        epilogue = ("bias" in views, activation, "residual" in views)
        if len(self._found) >= MOST_FITS:
            self._found.clear()
        fit = self._found[key] = Fit(batch, common_device(views), precision, layout, epilogue)
        return fit

    def kernel(self, precision: str, layout: str, epilogue: Epilogue, batch: int) -> KernelSpec:
        return KernelSpec(self._pattern, precision, layout, epilogue, batch if batch in self._batches else None, self._job)

    def plan(self, fit: Fit, device: Device, stream: Stream, aligned: bool = True) -> Plan:
        key = (device, PLANNER.generation, aligned)
        plan = fit.plans.get(key)
        if plan is None:
            kernel = self.kernel(fit.precision, fit.layout, Epilogue(*fit.epilogue), fit.batch)
            once = "call it once before the capture" if self._job == "gradient" else ""  # there is no prepare for it
            refuse = partial(refuse_capture, device, stream, "builds and loads its kernel", once)
            plan = fit.plans[key] = PLANNER.plan(device, kernel, fit.batch, aligned, refuse)
        return plan


def are_aligned(views: Views) -> bool:
    """Whether tensor maps can describe x and the output, which may not be there yet, and wide reads what is added to it."""
    pointers = (views[name].pointer for name in ("x", "bias", "residual", "out") if name in views)
    return all(not isinstance(pointer, int) or pointer % MAP_ALIGNMENT == 0 for pointer in pointers)
