"""Plans a call that is one launch, and decides whether one launch of several factors is faster than separate ones.

Never launches.
"""

import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from typing import Any

from ksgen.build.background import PendingError, all_of
from ksgen.build.build import AbsentCompiler, compiling_is_forbidden
from ksgen.build.toolchain import Nvcc, Nvrtc, find_compiler, fit_for
from ksgen.devices.base import Device, Stream, refuse_capture
from ksgen.errors import LaunchError, ToolchainError
from ksgen.families import Family, Limits, family_for, meant_for
from ksgen.families.chains import factor_kernels, layer_kernels, transposed_bytes
from ksgen.families.expected import LAUNCH_US, batch_like, default_us
from ksgen.families.gpus import gpu_of
from ksgen.families.vector.shape import LARGE_BYTES
from ksgen.launch.checks import CheckedArguments
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.plan import Plan
from ksgen.launch.planner import PLANNER, as_read
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.values import counted

_UNKNOWN = object()
LEAST_ROWS = 8  # rows of the batch per core: below, each factor's outputs are divided among the cores
LEAST_COLUMNS = 16  # the same in batch-size-last, where vectors run along the batch
SMALL_BYTES = 2**19  # bytes of weights in bsf: one core reads fewer in less time than two cores synchronise (measured)
NO_FAMILY = "no family runs several factors in one launch on such a device"
NO_ROOM = "no family has room for all factors in one launch, in this precision"
CONTIGUOUS_READS = "in batch-size-last each separate factor reads its rows and weights contiguously"
BEFORE_A_CAPTURE = "call it once before the capture, or build(batch) of the launcher or layer"
REMEMBERED = 1024  # cached verdicts: one per layer and batch size


@dataclass(frozen=True)
class Verdict:
    """Whether one launch runs all factors, and the reason."""

    is_one: bool
    why: str


def plan_for(fit: CheckedArguments, device: Device, stream: Stream, aligned: bool, fuse: str = "auto") -> Plan | None:
    """Plan of a call's launch; None if several launches are faster.

    While a graph is recorded on the stream, nothing is built or loaded.
    """
    assert fit.kernel is not None
    key, kernel = (device, PLANNER.generation, aligned), fit.kernel
    once = BEFORE_A_CAPTURE if kernel.job == "gradient" else ""  # `prepare` takes no gradients
    refuse = partial(refuse_capture, device, stream, "builds and loads its kernel", once)

    def plan_of(kernel: KernelSpec) -> Plan | None:
        if kernel.is_chain:
            return fused_plan(device, kernel, fit.batch, fuse, stream)
        return PLANNER.plan(device, kernel, fit.batch, aligned, refuse)

    try:
        plan = plan_of(kernel)
    except LaunchError:
        if not (kernel.tied and device.kind == "cuda" and device.is_capturing(stream)):
            raise
    else:
        fit.plans[key] = weakref.ref(plan) if plan else None
        return plan
    return plan_of(kernel.untied)  # which `build` has loaded; calls after the capture take the tied kernel


def fused_plan(
    device: Device, kernel: KernelSpec, batch: int, fuse: str = "auto", stream: Stream = None
) -> Plan | None:
    """Plan of one launch for a chain, or for several chains on one X.

    None if separate launches are chosen, or one launch is not available.
    """
    generation = PLANNER.generation
    if not verdict(device, kernel, batch, fuse).is_one:
        return None
    if kernel.tied:
        kernel = as_read(kernel, PLANNER.choice(device, kernel, batch))
    key = (device, kernel, batch, fuse)
    found: Plan | None = None
    if (known := PLANNER.derived.get(key, _UNKNOWN)) is not _UNKNOWN:
        found = known
        return found
    if not device.shares_host:
        refuse_capture(device, stream, "builds and loads its kernel", BEFORE_A_CAPTURE)
    try:
        plan = PLANNER.plan(device, kernel, batch)
        found = replace(plan, packers=packings(device, plan))
    except PendingError:
        if _compiles(device):  # otherwise another target's binary may be found, or none
            with suppress(PendingError, ToolchainError):  # its packings are compiled meanwhile
                _packings(device, kernel, batch, PLANNER.choice(device, kernel, batch), device.target)
        raise
    except ToolchainError:  # a bundle holds fused kernels only if they were expected to be faster
        if fuse == "yes" or _compiles(device):
            raise
    PLANNER.derive(generation, key, found)
    return found


def _compiles(device: Device) -> bool:
    """Whether a kernel that no cache and no bundle holds is compiled for a device here."""
    if compiling_is_forbidden():
        return False
    try:
        compiler = device.compiler() or find_compiler()  # a GPU may name no compiler, so that `build` finds one
        if isinstance(compiler, Nvcc | Nvrtc):
            fit_for(compiler, device.target)
    except ToolchainError:
        return False
    return not isinstance(compiler, AbsentCompiler)


def verdict(device: Device, kernel: KernelSpec, batch: int, fuse: str = "auto") -> Verdict:
    """Whether a chain's fused kernel is faster at a batch, and why.

    On a processor, batches that are too small for one launch are decided first (`shared_out`). Then the
    times that searches measured decide. Without such times, a rule decides on a processor, and expected times on a GPU.
    With `fuse` "yes", the verdict is whether the kernel is available.
    """
    kernel = kernel.untied
    if fuse == "auto":
        PLANNER.report(device, kernel, batch)
        if device.shares_host and (why := shared_out(kernel, device.limits.multiprocessors, batch)):
            return Verdict(False, why)
        where: Any = device  # devices are hashed by their identity
        if (measured := _measured(where, kernel, batch, PLANNER.generation)) is not None:
            return measured
    return verdict_for(kernel, limits_of(device), "processor" if device.shares_host else device.kind, batch, fuse)


def verdict_for(kernel: KernelSpec, limits: Limits, kind: str, batch: int, fuse: str = "auto") -> Verdict:
    """Verdict without measured times for devices with these limits; `kind` is "processor", "cuda" or another."""
    if fuse == "no":
        return Verdict(False, "fuse='no'")
    if fuse == "yes":
        lacks = _why_unsupported(kernel, limits, kind, batch_like(kernel, batch))
        return Verdict(not lacks, lacks or "fuse='yes'")
    if kind == "processor":
        if has_none := _why_no_chains(kernel, limits, batch):
            return Verdict(False, has_none)
        why_not = _why_apart(kernel, limits)
        return Verdict(not why_not, why_not or "intermediates stay in the cache")
    if kind != "cuda":
        return Verdict(False, NO_FAMILY)
    return _expected(kernel, limits, batch_like(kernel, batch))


def _why_no_chains(kernel: KernelSpec, limits: Limits, batch: int) -> str:
    """Reason why the family of the factors has no fused launch on a processor; empty if it has one."""
    if not (kernel.arithmetic.tiles and limits.tiles):
        return ""
    alone = replace(kernel, chains=(Chain((kernel.pattern,)),), between="none", out_layout=None, stride="dense")
    family = family_for(alone, limits, batch)
    if family.supports(kernel, limits):
        return ""
    return f"{family.name} supports each factor, but not all in one launch; it is for: {family.why}"


@lru_cache(REMEMBERED)
def _why_apart(kernel: KernelSpec, limits: Limits) -> str:
    """Reason why a processor takes a launch per factor by rule; empty if it takes one launch."""
    layouts = {kernel.layout, kernel.y_layout}
    if layouts == {"bsl"}:
        return CONTIGUOUS_READS
    if len(layouts) > 1 or (kernel.arithmetic.tiles and limits.tiles):
        return ""
    weight_bytes = max(each.weight_bytes for each in layer_kernels(kernel))
    if weight_bytes <= LARGE_BYTES:
        return ""
    return f"weights have {weight_bytes / 2**20:.1f} MB, of which a launch per factor keeps a part in the cache"


@lru_cache(REMEMBERED)
def _why_unsupported(kernel: KernelSpec, limits: Limits, kind: str, batch: int) -> str:
    """Reason why no family supports all factors in one launch; empty if one does."""
    if limits.is_cpu:
        is_served = not kernel.arithmetic.families and any(meant_for(kernel, limits, batch))
        return "" if is_served else _why_no_chains(kernel, limits, batch)
    if kind != "cuda":
        return NO_FAMILY
    return "" if family_of_chain(kernel, limits, batch) else _why_too_large(kernel)


def _why_too_large(kernel: KernelSpec) -> str:
    return (
        f"no family for such a batch takes x in {kernel.inputs} through all factors" if kernel.has_bytes_in else NO_ROOM
    )


@lru_cache(REMEMBERED)
def _measured(device: Any, kernel: KernelSpec, batch: int, generation: int) -> Verdict | None:
    """The verdict by measured times, if searches timed one launch and its alternatives at one batch size; else None.

    Times of the chain without epilogue and activations count if no times of this kernel were measured.
    """
    dense = replace(kernel, stride="dense")
    for fused in dict.fromkeys((dense, replace(dense, epilogue=Epilogue(), between="none"))):
        one = PLANNER.measured(device, fused, batch)
        if one is None or (apart := _measured_apart(device, fused, batch, one.batch)) is None:
            continue
        description = (
            f"searches measured {one.median_us:.3g} us for one launch at batch {one.batch}, and {apart:.3g} us"
        )
        copy = ", with the copy that transposes an intermediate" if kernel.out_layout else ""
        others = "for the layers one by one" if kernel.is_group else f"for one launch per factor{copy}"
        return Verdict((one.median_us or 0.0) < apart, f"{description} {others}")
    return None


def _measured_apart(device: Device, kernel: KernelSpec, batch: int, measured_at: int) -> float | None:
    """Measured microseconds of separate launches at batch `measured_at`; None if a time is missing.

    `batch` is that of the call.
    """

    def us_of(each: KernelSpec) -> float | None:
        found = PLANNER.measured(device, each, batch)
        return (found.median_us or 0.0) if found and found.batch == measured_at else None

    def transpose_us(each: KernelSpec) -> float:
        found = PLANNER.measured(device, each, batch)
        return found.measured.get("transpose_us") or 0.0 if found else 0.0

    return _apart(kernel, us_of, transpose_us)


def least_rows(cores: int, layout: str) -> int:
    """Least batch size at which a processor with so many cores takes one launch, whatever the size of the weights."""
    return (LEAST_ROWS if layout == "bsf" else LEAST_COLUMNS) * cores


def shared_out(kernel: KernelSpec, cores: int, batch: int) -> str:
    """Reason why a processor with so many cores divides each factor's outputs among them at this batch size.

    Empty if it does not, so that one launch may run all factors.
    """
    least = least_rows(cores, kernel.layout)
    if batch >= least or (kernel.layout == "bsf" and kernel.weight_bytes <= SMALL_BYTES):
        return ""
    large = f", as all weights together have more than {SMALL_BYTES // 1024} KB" if kernel.layout == "bsf" else ""
    return f"below {counted(least, 'row')} of the batch each factor's outputs are divided among cores{large}"


def family_of_chain(kernel: KernelSpec, limits: Limits, batch: int) -> Family[Any] | None:
    """Family that supports a kernel, such as one launch of all factors; None if none does."""
    return family_for(kernel, limits, batch) if any(meant_for(kernel, limits, batch)) else None


def apart_us(kernel: KernelSpec, limits: Limits, batch: int) -> float:
    """Expected microseconds of separate launches; infinite if no family runs one of them."""

    def us_of(each: KernelSpec) -> float | None:
        family = family_of_chain(each, limits, batch)
        return default_us(family, each, limits, batch) if family else None

    def transpose_us(each: KernelSpec) -> float:
        rates = gpu_of(limits.target).rates
        return LAUNCH_US + transposed_bytes(each, batch) / (rates.memory_gb_s * 1e3) if rates else 0.0

    found = _apart(kernel, us_of, transpose_us)
    return inf if found is None else found


def dense_us(kernel: KernelSpec, limits: Limits, batch: int) -> float:
    """Expected microseconds of a dense product with the inputs and outputs of a layer or group; 0 if unknown."""
    whole = Pattern(1, kernel.out_features, kernel.in_features, 1)
    product = KernelSpec(whole, kernel.precision, kernel.layout, kernel.epilogue)
    return default_us(family_for(product, limits, batch), product, limits, batch)


def versus_dense(kernel: KernelSpec, limits: Limits, batch: int, is_one: bool) -> str:
    """Expected time of the dense product, and its ratio to that of a layer or group; empty if one is unknown.

    `is_one`: whether the layer is one launch.
    """
    like = batch_like(kernel, batch)
    family = family_of_chain(kernel, limits, like) if is_one else None
    own_us = default_us(family, kernel, limits, like) if family else apart_us(kernel, limits, like)
    if not 0 < own_us < inf:
        return ""
    product_us = dense_us(kernel, limits, like)
    slower = "" if own_us < product_us else "; so they are not expected to be faster"
    return (
        f"dense product of {kernel.in_features} to {kernel.out_features} features at batch {like}: the cost model "
        f"expects {product_us:.3g} us, {product_us / own_us:.2f} times the {own_us:.3g} us of these factors{slower}"
    )


def _apart(
    kernel: KernelSpec, us_of: Callable[[KernelSpec], float | None], transpose_us: Callable[[KernelSpec], float]
) -> float | None:
    """Microseconds of separate launches: of a layer's factors, or of a group's layers, each in its fastest form.

    `us_of` gives the time of one launch, `transpose_us` that of the copy that transposes a layer's intermediate.
    Returns None if a time is missing.
    """
    if kernel.is_group:
        forms = [
            (_apart(layer, us_of, transpose_us), us_of(layer) if layer.is_chain else None)
            for layer in layer_kernels(kernel)
        ]
        each = [min((us for us in both if us is not None), default=None) for both in forms]
    else:
        each = [*map(us_of, factor_kernels(kernel)), transpose_us(kernel) if kernel.out_layout else 0.0]
    found = [us for us in each if us is not None]
    return sum(found) if len(found) == len(each) else None


@lru_cache(REMEMBERED)
def _expected(kernel: KernelSpec, limits: Limits, batch: int) -> Verdict:
    family = family_of_chain(kernel, limits, batch)
    if family is None:
        return Verdict(False, _why_too_large(kernel))
    one_us, others_us = default_us(family, kernel, limits, batch), apart_us(kernel, limits, batch)
    if not one_us:
        return Verdict(False, f"the speed of {limits.target} is unknown")
    if others_us == inf:
        return Verdict(True, "no family runs the factors one by one")
    others = "for the layers one by one" if kernel.is_group else "for one launch per factor"
    description = (
        f"the cost model expects {one_us:.3g} us for one launch at batch {batch}, and {others_us:.3g} us {others}"
    )
    return Verdict(one_us < others_us, description)


def packings(device: Device, plan: Plan) -> tuple[Plan, ...]:
    """Plans that pack each factor's weights for a chain's launch, for the target of its binary."""
    return _packings(device, plan.kernel, plan.batch, plan.choice, plan.binary.target)


def _packings(device: Device, kernel: KernelSpec, batch: int, choice: Choice, target: str) -> tuple[Plan, ...]:
    choices = packing_choices(kernel, choice.family, choice.constants)
    return all_of(partial(PLANNER.plan_of, device, each, batch, of_factor, target) for each, of_factor in choices)


def packing_choices(kernel: KernelSpec, family: str, constants: Any) -> list[tuple[KernelSpec, Choice]]:
    """Kernels and choices whose sources pack each factor's weights for a chain's launch with such constants."""
    factors = [replace(each, epilogue=Epilogue()) for each in factor_kernels(kernel)]
    pairs = zip(factors, constants.parsed, strict=True)
    return [(factor, Choice(family, of_factor, "part of a chain")) for factor, of_factor in pairs]
