"""Kernels to search: those of a spec, or one launch of a layer and the separate launches that it is compared with.

Measures nothing.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from ksgen.families.chains import factor_kernels, layer_kernels
from ksgen.launch.fused import verdict_for
from ksgen.pattern import Chain
from ksgen.spec import KernelSpec, Spec
from ksgen.tuning.job import Job
from ksgen.tuning.tuner import Tuner

if TYPE_CHECKING:
    from ksgen.spec.nodes import SourcePlace


def chains_of(layer: object) -> tuple[Chain, ...]:
    """Chains of a layer: one in any form, or those of a group, given as a list of chains."""
    if isinstance(layer, list | tuple) and layer and all(isinstance(each, Chain) for each in layer):
        return tuple(layer)
    return (Chain.read(layer),)


def kernels_of_spec(spec: Spec) -> "dict[KernelSpec, SourcePlace | None]":
    """Kernels of a spec as launchers look them up, for layers, groups and factors, each with the place of its batch."""
    found: dict[KernelSpec, SourcePlace | None] = {}
    for kernel in (kernel for launches in spec.launches.values() for kernel in launches):
        found |= dict.fromkeys(with_layers(kernel.untied), spec.batch_places.get(kernel))
    # slices and tied weights use the wisdom of dense arrays
    return found | {replace(each.untied, stride="dense"): spec.batch_places.get(each) for each in spec.kernels}


def kernels_of_layer(whole: KernelSpec) -> list[KernelSpec]:
    """One launch of a layer or a group, and the launches that it is compared with."""
    return list(dict.fromkeys([*with_layers(whole), *factor_kernels(whole)]))


def with_layers(kernel: KernelSpec) -> list[KernelSpec]:
    """The kernel as launchers look it up, and for a group its layers, whose separate launches it is compared with."""
    if not kernel.is_group:
        return [replace(kernel, stride="dense")]
    return [
        replace(kernel, stride="any"),
        *(replace(each, stride="dense") for each in layer_kernels(kernel) if each.is_chain),
    ]


def job_of(kernel: KernelSpec, batch: int) -> Job:
    """Job of a kernel at the batch that it is specialised for, else at `batch`.

    A launch of all factors is never specialised for a batch.
    """
    return Job(replace(kernel, batch=None) if kernel.is_chain else kernel, kernel.batch or batch)


def why_not_one(tuner: Tuner, job: Job) -> str:
    """Reason why a layer cannot be one launch on the tuner's device; empty if it can, or if the job is no layer."""
    if not job.kernel.is_chain:
        return ""
    kind = "processor" if tuner.limits.is_cpu else tuner.engine.facts.kind
    found = verdict_for(job.kernel, tuner.limits, kind, job.batch, "yes")
    return "" if found.is_one else found.why
