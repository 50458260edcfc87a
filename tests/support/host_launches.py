"""Launches of one factor, of all factors of a layer, or of a group, on arrays in a processor's memory: run and
compared with float64.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ksgen.devices.base import Device
from ksgen.families import check, family_of
from ksgen.families.chains import factor_kernels
from ksgen.families.signature import weights_of
from ksgen.launch.choice import Choice
from ksgen.launch.plan import Plan
from ksgen.launch.planner import PLANNER
from ksgen.measure.verify import tolerance
from ksgen.spec import Epilogue, KernelSpec
from tests.support.host_memory import NOTHING, Array, fenced, nothing, placed, processor, workspace_of
from tests.support.products import arrays_of, truth_of

Plans = tuple[Plan, Sequence[Plan]]  # of a launch, and of what packs each factor's weights


def is_right(kernel: KernelSpec, got: Array, truth: Array, roundings: int = 1) -> bool:
    """Compare with the truth. `roundings` counts roundings to Y's type: several if intermediates are rounded too."""
    error = np.linalg.norm(got.astype(np.float64) - truth)  # a NaN is not
    terms = max((2 if len(chain) > 1 else 1) * sum(each.c for each in chain) for chain in kernel.chains)
    return bool(error <= roundings * tolerance(kernel.precision, terms) * np.linalg.norm(truth))


def planned(device: Device, kernel: KernelSpec, constants: Any, batch: int) -> Plan:
    """Plan the kernel with the family that the constants belong to."""
    family = family_of(constants)
    check(family, kernel, constants)
    return PLANNER.plan_of(device, kernel, batch, Choice(family.name, constants, "a test's"))


def plans_of(device: Device, kernel: KernelSpec, constants: Any, batch: int) -> Plans:
    whole = planned(device, kernel, constants, batch)
    if not kernel.is_chain:
        return whole, [whole] * len(weights_of(kernel))
    factors = [replace(each, epilogue=Epilogue()) for each in factor_kernels(kernel)]
    return whole, [planned(device, each, own, batch) for each, own in zip(factors, constants.parsed, strict=True)]


def launch(device: Device, plans: Plans, places: Mapping[str, Array], pitches: Mapping[str, int] | None = None) -> None:
    """Launch on arrays with the names of `arrays_of`. Packed weights and the workspace hold NaN before, and memory
    behind them must not change. `pitches` belong to kernels of slices.
    """
    whole, factors = plans
    at = {name: device.shared(place.ctypes.data) for name, place in places.items()}
    packed = [nothing(plan.packed_bytes + 256) for plan in factors]
    operands = weights_of(whole.kernel)
    for number, (operand, plan, place) in enumerate(zip(operands, factors, packed, strict=True)):
        at[operand] = plan.pack(at[f"weights {number}"], None, into=device.shared(place.ctypes.data))
    workspace = workspace_of(whole)
    at["workspace"] = device.shared(workspace.ctypes.data)
    whole.launch(whole.arguments(at | (pitches or {})), None)
    device.synchronize(None)
    for each, plan in zip(packed, factors, strict=True):
        assert (each[plan.packed_bytes :] == NOTHING).all()
    assert (workspace[whole.workspace_bytes :] == NOTHING).all()


def one_by_one(
    device: Device, kernel: KernelSpec, constants: Sequence[Any], batch: int, arrays: Mapping[str, Array]
) -> Array:
    """Multiply with one launch per factor, each with its own constants."""
    rows = arrays["x"]
    for number, (factor, own) in enumerate(zip(factor_kernels(kernel), constants, strict=True)):
        features = factor.pattern.out_features
        y = np.zeros((batch, features) if kernel.layout == "bsf" else (features, batch), rows.dtype)
        places = {name: arrays[name] for name in ("bias", "residual") if getattr(factor.epilogue, name)}
        places |= {"x": rows, "weights 0": arrays[f"weights {number}"], "y": y}
        launch(device, plans_of(device, factor, own, batch), places)
        rows = y
    return rows


def agrees(kernel: KernelSpec, constants: Any, batch: int, roundings: int = 1) -> None:
    device, arrays = processor(), arrays_of(kernel, batch)
    memory, places = placed(arrays, kernel.dtype)
    places["y"].view(np.uint8)[:] = NOTHING
    before = memory.copy()
    launch(device, plans_of(device, kernel, constants, batch), places)
    assert is_right(kernel, places["y"].reshape(arrays["y"].shape), truth_of(kernel, arrays), roundings), (
        kernel,
        constants,
        batch,
    )
    places["y"].view(np.uint8)[:] = NOTHING
    np.testing.assert_array_equal(memory, before)


def agrees_between_fences(kernel: KernelSpec, constants: Any, batches: Iterable[int], roundings: int = 1) -> None:
    """Each array begins behind, or ends in front of, a page that nothing may touch."""
    device = processor()
    for batch, at_end in product(batches, (False, True)):
        arrays = arrays_of(kernel, batch)
        places = fenced(arrays, at_end)
        launch(device, plans_of(device, kernel, constants, batch), places)
        got = places["y"].reshape(arrays["y"].shape)
        assert is_right(kernel, got, truth_of(kernel, arrays), roundings), (kernel, constants, batch)
