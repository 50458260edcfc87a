"""What was found of a call's arguments: checked once for each combination of shapes, precisions and places."""

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import ReferenceType

from ksgen.devices.base import Device
from ksgen.launch.arrays import FORM, Place, common_device
from ksgen.launch.checks import check_arrays, check_precision, check_words, type_of_call
from ksgen.launch.plan import Plan
from ksgen.launch.views import CallOptions, Views
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.storage import SAME

MOST_FITS = 4096  # that are remembered: one per batch, and cheap to find again


@dataclass(eq=False)
class Fit:
    """Arguments whose shapes, precisions and places were checked, the kernel that they ask for, and the plans that serve them."""

    batch: int
    place: Place
    kernel: KernelSpec
    # By device, the planner's generation and alignment. The planner alone keeps them.
    plans: dict[tuple[Device, int, bool], ReferenceType[Plan]] = field(default_factory=dict)

    @cached_property
    def of_copies(self) -> "Fit":
        """The same of arrays that are copied to a device, where their rows follow each other."""
        return Fit(self.batch, self.place, replace(self.kernel, stride="dense")) if self.kernel.is_strided else self


class Fits:
    """Those of one launcher and job."""

    def __init__(self, pattern: Pattern, batches: Collection[int | None], job: str = "multiply") -> None:
        self.pattern, self._batches, self._job = pattern, batches, job
        self._found: dict[Hashable, Fit] = {}

    def __len__(self) -> int:
        return len(self._found)

    def find(self, caller: object, options: CallOptions, views: Views, weights: str = SAME, inputs: str = SAME) -> Fit:
        """What was found when arguments like these were checked first: shapes, precisions, strides and places. `weights`: how those are
        stored that were packed before; `inputs`: how the x that they multiply is."""
        layout, activation, _, precision = options
        key = (layout, activation, precision, weights, inputs, *[(name, found[FORM]) for name, found in views.items()])
        try:
            return self._found[key]
        except (KeyError, TypeError):  # what cannot be looked up is refused below
            check_words(caller, layout, activation)
            dtype = type_of_call(caller, views, precision, inputs)
            precision = check_precision(caller, precision, dtype)
        batch = check_arrays(caller, self.pattern, layout, views, self._job, None if inputs == SAME else dtype)
        place = common_device(views)
        kernel = self.kernel(precision, layout, Epilogue("bias" in views, activation, "residual" in views), batch, weights, inputs)
        if any(found.strides is not None for found in views.values()):
            kernel = replace(kernel, stride="any")
        if len(self._found) >= MOST_FITS:
            self._found.clear()
        fit = self._found[key] = Fit(batch, place, kernel)
        return fit

    def kernel(
        self, precision: str, layout: str, epilogue: Epilogue, batch: int, weights: str = SAME, inputs: str = SAME
    ) -> KernelSpec:  # fmt: skip
        own = batch if batch in self._batches else None
        return KernelSpec(self.pattern, precision, layout, epilogue, own, self._job, weights=weights, inputs=inputs)
