"""Choice of family and constants for a kernel on a device. Never builds or loads.

The sources are wisdom for the batch, wisdom for the nearest batch, and the family's default.
"""

import shlex
from dataclasses import dataclass, replace
from typing import Any

from ksgen.build.processors import instruction_sets_here
from ksgen.devices.base import Device, DeviceLimits
from ksgen.errors import ConstantsError, DeviceError
from ksgen.families import (
    Bar,
    Limits,
    check,
    cuda_limits,
    family_for,
    family_named,
    faster_family,
    requested_family,
    takes_job,
)
from ksgen.families.gpus import begins_early
from ksgen.passport import FORCE, bars
from ksgen.spec import Epilogue, KernelSpec
from ksgen.spec.kernel import CHAIN
from ksgen.wisdom import Entry, Wisdom

LARGEST_CPU_BATCH = 1 << 15  # largest batch size with a choice of its own on a processor without wisdom


@dataclass(frozen=True)
class Choice:
    """A family with constants for a kernel, and the source of the choice."""

    family: str
    constants: Any
    why: str
    misfit: bool = False  # wisdom had constants that this device cannot run
    from_wisdom: bool = False  # from a search or trial, at any batch and with any version of the template
    is_measured: bool = False  # reliably on this device, with the current template, at a batch that `are_alike` accepts
    is_open: bool = False  # from wisdom that the next trial measures again
    is_fallback: bool = False  # replaces a choice that the device has refused, so that no measurement changes it


def limits_of(device: Device) -> Limits:
    """Limits of a device in the form that families read, with the families that its passport bars."""
    found = limits_from(device.kind, device.target, device.limits)
    barred = bars(device)
    return replace(found, bars=barred) if barred else found


def built_beforehand(device: Device) -> list[tuple[str, Limits]]:
    """Targets of prebuilt kernels that run on this device, each with the limits for its choice of constants."""
    device_limits = limits_of(device)
    if device.kind == "native":
        from ksgen.devices.native import limits_for  # loads the native runtime

        sets = [(each.target, limits_from("native", each.target, limits_for(each))) for each in instruction_sets_here()]
        # a compiler here may support all product instructions, or none
        return [(device.target, device_limits), (device.target, replace(device_limits, tiles=(), dots=())), *sets]
    if device.kind != "cuda":
        return []
    # kernels that are built without a device are chosen for the target's usual card
    usual = replace(device_limits, multiprocessors=cuda_limits(device.target).multiprocessors)
    return [(device.target, usual)] if usual != device_limits else []


def choose_for_many(kernel: KernelSpec, batch: int, limits: Limits, wisdom: Wisdom, aligned: bool = True) -> Choice:
    """Choose like `choose`. Without wisdom, a processor takes the choice of the next power of two as the batch.

    So batches share sources.
    """
    choice = choose(kernel, batch, limits, wisdom, aligned)
    if choice.from_wisdom or kernel.batch or not limits.is_cpu:
        return choice
    return choose(kernel, min(LARGEST_CPU_BATCH, 1 << (batch - 1).bit_length()), limits, wisdom, aligned)


def limits_from(kind: str, target: str, device: DeviceLimits) -> Limits:
    """Limits of a device: for CUDA, those of the target's table, reduced to those of the device."""
    if kind == "cuda":
        table = cuda_limits(target)
        shared = min(table.shared_bytes, device.shared_bytes_per_block)
        threads = min(table.threads, device.threads_per_block)
        return replace(table, shared_bytes=shared, threads=threads, multiprocessors=device.multiprocessors)
    return Limits(
        device.shared_bytes_per_block, device.threads_per_block, registers=0, is_cpu=device.is_cpu, async_copies=False,
        vector_bytes=device.vector_bytes, has_arm_vectors=device.has_arm_vectors, tiles=device.tiles, dots=device.dots,
        multiprocessors=device.multiprocessors,
    )  # fmt: skip


def choose(kernel: KernelSpec, batch: int, limits: Limits, wisdom: Wisdom, aligned: bool = True) -> Choice:
    """Family and constants for a kernel at a batch, as if no weights were tied.

    `aligned` says whether arrays begin at a multiple of 16 bytes.
    """
    kernel = kernel.untied
    found = wisdom.lookup(kernel, batch, aligned)
    why = "the family's default: no search has been run for this kernel on this device"
    if found is None and (batches := wisdom.batches(kernel)):
        why = f"the family's default: searches at batch {', '.join(map(str, batches))} do not apply to batch {batch}"
    if found and (bar := limits.bar_of(found.family)):
        why = f"the family's default: wisdom has {found.family}, which is {bar.reason}"
        found = None
    if found:
        try:
            check_fit(found.family, found.constants, kernel, limits)
        except ConstantsError as error:
            why = f"the family's default: the constants in wisdom do not fit this device ({error})"
        else:
            where = f"batch {found.batch}"
            if found.batch != batch:
                where += f", the nearest to {batch}{_passed_over(wisdom.of(kernel, batch))}"
            who = "wisdom of a trial," if found.is_trial else "wisdom,"
            who = "wisdom of another template version, a first guess: tune again;" if found.is_stale else who
            unreliable = f"; its time is unreliable: {found.why_unreliable}" if found.why_unreliable else ""
            gain = f"{found.over_default:.2f}" if found.over_default else "1.00"
            known = f"; {gain} times as fast as the default" if gain != "1.00" else ""
            why = f"{who} measured at {where}{unreliable}{known}"
            return Choice(
                found.family, found.constants, why, from_wisdom=True, is_measured=found.is_sound, is_open=found.is_open
            )
    family = family_for(kernel, limits, batch, aligned)
    return Choice(family.name, family.default(kernel, limits, batch), why, misfit=found is not None)


def expectation(choice: Choice, kernel: KernelSpec, batch: int, limits: Limits) -> str:
    """Remark on a family that the cost model expects to be faster than a chosen default; empty if there is none.

    Slow, so launches never call it.
    """
    if choice.from_wisdom or not (found := faster_family(choice.family, kernel, limits, batch, True, choice.constants)):
        return ""
    family, factor = found
    bar = limits.bar_of(family.name)
    by_name = "" if family.is_default(kernel, batch) else ", which launchers take only by wisdom or by name,"
    taken = f", which is {bar.reason}," if bar else by_name
    return f"; the cost model expects {family.name}{taken} to be {factor:.2f} times as fast"


def described(choice: Choice, kernel: KernelSpec, batch: int, limits: Limits, device: str | None = None) -> str:
    """Source of a choice on a device; for a default, also a faster family, and the command that finds the fastest.

    `device` is the name by which the user asked for the device; None if it was not named.
    """
    if choice.is_fallback:
        return choice.why
    is_settled = choice.from_wisdom and not choice.is_open
    settles = "" if is_settled else f"; to find the fastest: {settling_command(kernel, batch, device)}"
    return f"{choice.why}{expectation(choice, kernel, batch, limits)}{settles}"


def settling_command(kernel: KernelSpec, batch: int, device: str | None = None) -> str:
    """Command that measures which candidate of a kernel is the fastest on this machine, or on the named device."""
    first, *others = (" ".join(map(str, chain)) for chain in kernel.chains)
    names = ("precision", "layout", "job", "weights", "inputs", "between", "out_layout")
    usual = {name: (getattr(KernelSpec, name), CHAIN) for name in names}  # no option names the job of a chain
    given = {name: value for name in names if (value := getattr(kernel, name)) not in usual[name]}
    if kernel.epilogue.activation != Epilogue.activation:
        given["activation"] = kernel.epilogue.activation
    words = [f"--{name.replace('_', '-')} {value}" for name, value in given.items()]
    words += ["--chain"] * (kernel.is_chain and not others and len(kernel.factors) > 1)
    words += [f'--group-with "{each}"' for each in others]
    flags = ("bias", "residual", "residual_first")
    words += [f"--{name.replace('_', '-')}" for name in flags if getattr(kernel.epilogue, name)]
    words += [f"--batch {batch}", *([f"--device {shlex.quote(device)}"] if device else [])]
    return " ".join(["ksgen calibrate", first, *words])


def _passed_over(entry: Entry | None) -> str:
    """Reason why another batch's entry precedes this batch's own; empty if this batch has no entry, or a sound one."""
    if entry is None or entry.is_sound:
        return ""
    why = "time is unreliable" if entry.why_unreliable else "entry is of another template version"
    return f", whose own {why}"


def choice_by_name(name: str, kernel: KernelSpec, batch: int, limits: Limits) -> Choice:
    """Default constants of a family for a kernel at a batch, even if launchers do not choose it by themselves.

    `ConstantsError` if it is disabled there, or does not support the kernel.
    """
    family = requested_family(name)
    if (bar := limits.bar_of(family.name)) and bar.is_disabled:
        raise ConstantsError(f"{kernel.name}: {family.name} is {bar.reason}; {FORCE}={family.name} forces it")
    if not takes_job(family, kernel, limits, batch):
        raise ConstantsError(
            f"{kernel.name} at batch {batch}: not supported by {name} on this device; {name} is for: {family.why}"
        )
    return Choice(
        family.name, family.default(kernel.untied, limits, batch), "the family's default: it was asked for by name"
    )


def fallback_choice(
    choice: Choice, kernel: KernelSpec, batch: int, limits: Limits, aligned: bool, why: str
) -> tuple[Choice, Limits]:
    """Choice after a device has refused one: the same without clusters, else the default of another family.

    The returned limits bar the refused family, unless it is tried without clusters. `DeviceError` if none is left.
    """
    if getattr(choice.constants, "cluster_batch", 1) * getattr(choice.constants, "cluster_out", 1) > 1:
        plain = replace(choice.constants, cluster_batch=1, cluster_out=1)
        return Choice(choice.family, plain, "the device refuses its clusters", is_fallback=True), limits
    others = replace(limits, bars=(*limits.bars, Bar(choice.family, f"refused by the device: {why}")))
    try:
        family = family_for(kernel, others, batch, aligned)
    except ConstantsError as error:
        none_is_left = str(error)
    else:
        why = f"the device refuses {choice.family}"
        return Choice(family.name, family.default(kernel, others, batch), why, is_fallback=True), others
    raise DeviceError(none_is_left)


def check_fit(family_name: str, constants: Any, kernel: KernelSpec, limits: Limits) -> None:
    """Raise `ConstantsError` if a device cannot run a kernel under these constants."""
    family = family_named(family_name)
    check(family, kernel, constants, limits)
    if not family.runs(kernel, constants, limits):
        raise ConstantsError(f"{kernel.name}: {family.name} does not run on this device ({family.why}): {constants}")
    if not limits.async_copies and getattr(constants, "copy", None) == "async":
        raise ConstantsError(
            f"{kernel.name}: {constants}: the device has no asynchronous copies; accepted: copy=registers"
        )
    if getattr(constants, "early", 0) and not begins_early(limits.target):
        raise ConstantsError(f"{kernel.name}: {constants}: launches begin early only from sm_90 on; accepted: early=0")
