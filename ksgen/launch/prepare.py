"""The walk from a call's arrays to a launch, a step after the other: views, checks, device and stream, plan, memory.

Products and gradients take the same one. What each step decides, its own module knows.
"""

from collections.abc import Mapping
from typing import Any

from ksgen.launch.call import Call
from ksgen.launch.checks import are_aligned, check_memory
from ksgen.launch.fits import Fits
from ksgen.launch.memory import is_whole
from ksgen.launch.places import on_device, on_host, on_shared
from ksgen.launch.planner import plan_for
from ksgen.launch.streams import where_to_work
from ksgen.launch.views import CallOptions, views_of
from ksgen.launch.weights import Rooms, Weights, check_packed, check_stored, packed_in
from ksgen.spec.storage import BYTE_TYPES


def prepared(
    caller: object, fits: Fits, rooms: Rooms, arrays: Mapping[str, Any], options: CallOptions, packed: Weights | None = None
) -> Call:
    """Everything but the launch. `arrays`: x and all else that was given, by name; `packed` in the place of weights."""
    views = views_of(arrays, options.stream)
    if packed:
        dtype = views["x"].dtype
        check_stored(caller, packed, options.precision or ("float32" if dtype in BYTE_TYPES else dtype))
    fit = fits.find(caller, options, views, packed.stored, packed.inputs) if packed else fits.find(caller, options, views)
    check_memory(caller, views)
    device, stream, views = where_to_work(caller, fit.place, arrays, views, options.stream, packed.device if packed else None)
    if packed:
        check_packed(caller, packed, fits.pattern, device, views["x"].dtype)
    is_host, out = fit.place == "host", arrays.get("out")
    if is_host and not (device.shares_host and all(is_whole(found) for found in views.values())):
        return on_host(caller, plan_for(fit.of_copies, device, stream, True), views, packed, out, stream)
    plan = plan_for(fit, device, stream, is_host or are_aligned(views))
    own = packed or arrays.get("weights")  # a gradient has none
    weights = {} if own is None else {"weights": packed_in(plan, own, views.get("weights"), rooms, stream)}
    return (on_shared if is_host else on_device)(plan, views, weights, out, stream)
