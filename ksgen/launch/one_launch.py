"""One launch for all factors of a layer, or of several layers on one x: verdict, reason and preparation of a call.

A layer is a group of one: its arrays have the plain names of operands, those of several layers are numbered.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ksgen.devices.base import Device
from ksgen.errors import LaunchError
from ksgen.families.signature import numbered, weights_of
from ksgen.launch.arrays import ArrayView, CallOptions, common_device
from ksgen.launch.call import Call
from ksgen.launch.checks import check_memory, type_of_call
from ksgen.launch.fused import STORED_OTHERWISE, WITHIN_AN_ELEMENT, Verdict, copied_to, fused_plan, verdict
from ksgen.launch.launcher import Launcher, bytes_saved
from ksgen.launch.memory import is_whole
from ksgen.launch.places import on_device, on_shared
from ksgen.launch.planner import PLANNER
from ksgen.launch.stated import ADDED
from ksgen.launch.streams import where_to_work
from ksgen.launch.weights import Weights, check_packed, check_stored, inputs_of, packed_in, stored_alike
from ksgen.pattern import Chain
from ksgen.spec import Epilogue, Fuse, KernelSpec
from ksgen.spec.kernel import is_layer
from ksgen.spec.storage import SAME

BETWEEN_DIFFERS = "the activations between their factors differ"
SOME_ADDED = "only some layers have a bias, or a residual"


class OneLaunch:
    """Common base of the launchers of layers and groups."""

    chains: tuple[Chain, ...]
    factors: tuple[Launcher, ...]  # concatenated for all chains
    fuse: Fuse
    between: str | None  # the activation between the factors of each chain; None if they differ
    parts: str  # unit of a separate launch: "factor" or "layer"
    accepted = "fuse='auto' or 'no'"

    @property
    def _title(self) -> str:
        return ", and ".join(map(str, self.chains))

    def _names(self, operand: str) -> tuple[str, ...]:
        """Names of an operand that each chain has separately."""
        return numbered(operand, len(self.chains))

    @property
    def _out_names(self) -> tuple[str, ...]:
        return self._names("y" if len(self.chains) > 1 else "out")

    def _verdict(
        self, device: Device, precision: str, layout: str, epilogue: Epilogue, batch: int, out_layout: str | None = None,
        weights: str = SAME, inputs: str = SAME,
    ) -> Verdict:  # fmt: skip
        """Whether a call is one launch on a device, and why."""
        if not is_layer(self.chains, layout, out_layout):
            return Verdict(False, "there is one")
        if self.fuse == "no":
            return Verdict(False, "fuse='no'")
        if self.between is None:
            return Verdict(False, BETWEEN_DIFFERS)
        return verdict(device, self._kernel(device, precision, layout, epilogue, out_layout, weights, inputs), batch, self.fuse)

    def _kernel(
        self, device: Device, precision: str, layout: str, epilogue: Epilogue, out_layout: str | None, weights: str, inputs: str
    ) -> KernelSpec:
        """Kernel of one launch. Outputs of a group are slices of one array."""
        stride = "any" if len(self.chains) > 1 and (device.shares_host or layout == "bsf") else "dense"
        return KernelSpec(
            self.chains, precision, layout, epilogue, stride=stride, between=self.between or "none", out_layout=out_layout,
            weights=weights, inputs=inputs,
        )  # fmt: skip

    def _explain_one_launch(self, found: Verdict, device: Device, batch: int, *what: Any) -> str:
        """Name the family of the fused launch, with the reason.

        `what` holds the arguments of `_kernel`.
        """
        choice = PLANNER.choice(device, kernel := self._kernel(device, *what), batch)
        return f"one launch, by {choice.family}, {choice.constants}; {found.why}{bytes_saved(kernel, batch)}"

    def _one_launch(
        self, arrays: Mapping[str, Any], views: dict[str, ArrayView], own: Sequence[Sequence[Any]],
        own_views: Sequence[ArrayView | None], out: Any, batch: int, options: CallOptions, out_layout: str | None = None,
    ) -> Call | None:  # fmt: skip
        """Prepare the call of all factors, on GPU arrays or in place on host arrays; None if unavailable.

        `arrays` holds x, the added arrays and the outputs by the names of operands, `views` the same after checks of
        their shapes. `own` holds the weights of each chain.
        """
        flat = [each for weights in own for each in weights]
        given, every = dict(arrays), dict(views)
        for number, (each, lies_in) in enumerate(zip(flat, own_views, strict=True), 1):
            if lies_in:
                given[f"weights of factor {number}"], every[f"weights of factor {number}"] = each, lies_in
        place = common_device(every)
        inputs = inputs_of(own[0])
        dtype = type_of_call(self, views, options.precision, inputs)
        if len(self.chains) == 1:  # a group checked each layer
            for each in flat:
                if isinstance(each, Weights):
                    check_stored(self, each, options.precision or dtype)
            check_memory(self, every)
        added = [{name in views for name in self._names(operand)} for operand in ADDED]
        why_not = SOME_ADDED if any(len(each) > 1 for each in added) else BETWEEN_DIFFERS if self.between is None else ""
        if not why_not and self.fuse != "no" and place == "host" and not all(map(is_whole, every.values())):
            why_not = WITHIN_AN_ELEMENT
        if why_not or self.fuse == "no":
            self._check_asked(why_not)
            return None
        device, stream, every = where_to_work(self, place, given, every, options.stream)
        if place == "host" and not device.shares_host:
            self._check_asked(copied_to(device))
            return None
        found = {name: every[name] for name in views}
        epilogue = Epilogue(True in added[0], options.activation, True in added[1])
        lie_apart = len(self.chains) > 1 and (place == "host" or (out is None and options.layout == "bsf"))  # outputs, in one array
        stride = "any" if lie_apart or any(each.strides is not None for each in found.values()) else "dense"
        what, stored = (options.precision or dtype, options.layout, epilogue), stored_alike(own)
        fused = fused_plan(device, self.chains, *what, batch, stride, stream, self.between or "none", out_layout, self.fuse, stored)
        if fused is None:
            if self.fuse == "yes":  # computed only then: separate launches would compute it at each call
                self._check_asked(STORED_OTHERWISE if stored is None else self._verdict(device, *what, batch, out_layout, *stored).why)
            return None
        packed = []
        for number, (factor, plan, each) in enumerate(zip(self.factors, fused.factors, flat, strict=True), 1):
            if isinstance(each, Weights):
                check_packed(self, each, factor.pattern, device, dtype)
            packed.append(packed_in(plan, each, every.get(f"weights of factor {number}"), factor.buffers, stream))
        launch = on_shared if place == "host" else on_device
        return launch(fused.whole, found, dict(zip(weights_of(fused.whole.kernel), packed, strict=True)), out, stream)

    def _check_asked(self, why: str) -> None:
        """Raise `LaunchError` if one launch was asked for and is unavailable."""
        if why and self.fuse == "yes":
            raise LaunchError(f"{self!r}: {why}; accepted: {self.accepted}")
