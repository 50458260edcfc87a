"""The data types of a search: a job, a candidate, a device's facts, limits of timing, and a candidate's outcome.

All of them travel between processes. The kernels to search are those of a spec, or one launch of a layer and the
separate launches that it is compared with. Runs nothing.
"""

from dataclasses import dataclass, replace
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from ksgen.devices.base import DeviceLimits
from ksgen.families.chains import factor_kernels, layer_kernels
from ksgen.measure.trust import BLOCK_SECONDS, interval
from ksgen.pattern import Chain
from ksgen.spec import KernelSpec, Spec
from ksgen.spec.kernel import checked_count

if TYPE_CHECKING:
    from ksgen.spec.nodes import SourcePlace


@dataclass(frozen=True)
class Job:
    """Subject of a search: one kernel at one batch."""

    kernel: KernelSpec
    batch: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", checked_count("batch", self.batch))

    def __str__(self) -> str:
        return f"{self.kernel.name}, batch {self.batch}"


@dataclass(frozen=True)
class Candidate:
    """One choice of compile-time constants."""

    family: str
    constants: Any

    def __str__(self) -> str:
        return f"{self.family}: {self.constants}"


@dataclass(frozen=True)
class Facts:
    """Facts about the measuring device that a search needs without opening it."""

    name: str
    target: str
    dialect: Literal["cuda", "opencl"]
    kind: str
    driver_version: str
    limits: DeviceLimits
    ksgen: str  # version
    templates: tuple[str, ...]  # digests of the templates, one per family

    @property
    def processor(self) -> str:
        """Target of a processor, since several kinds may report one name; empty for other devices."""
        return self.target if self.kind == "native" else ""

    @property
    def measured_with(self) -> str:
        """Everything but name and template on which times depend: the driver, and the kind of processor."""
        return ", ".join(filter(None, (self.driver_version, self.processor)))


@dataclass(frozen=True)
class Runs:
    """Limits of timing: candidates take turns, a block of runs each, until medians are known well enough or time is up.

    A candidate whose first blocks are all slower than `give_up_us` needs no more blocks.
    """

    seconds: float  # per candidate, at most
    block_s: float = BLOCK_SECONDS
    give_up_us: float = inf


@dataclass(frozen=True)
class Outcome:
    """The outcome of a candidate: its times, or why there are none."""

    state: str  # one of a trial's states
    reason: str = ""
    microseconds: tuple[float, ...] = ()  # the median of each block
    note: str = ""

    @property
    def median_us(self) -> float:
        return median(self.microseconds)

    @property
    def spread(self) -> float:
        """The width of the interval that holds the median, relative to it."""
        low, high = interval(self.microseconds)
        return (high - low) / self.median_us


def chains_of(layer: object) -> tuple[Chain, ...]:
    """Chains of a layer: one in any form, or those of a group, given as a list of chains."""
    if isinstance(layer, list | tuple) and layer and all(isinstance(each, Chain) for each in layer):
        return tuple(layer)
    return (Chain.read(layer),)


def kernels_of_spec(spec: Spec) -> "dict[KernelSpec, SourcePlace | None]":
    """Kernels of a spec as launchers look them up, for layers, groups and factors.

    Each has the place in the spec's file that states its batch, or None.
    """
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
