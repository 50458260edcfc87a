"""Predicts a candidate's time before anything is compiled: the family's work divided by the device's measured rates.

The predictions rank candidates; they are not accurate times. The terms for GPUs are in `families/expected.py`, the
cycles of a processor in `families/vector/cycles.py`. Measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ksgen.build.request import Resources
from ksgen.families import Family, Limits, expected, operand_of
from ksgen.families.gpus import gpu_of
from ksgen.families.vector.cycles import EXPOSED
from ksgen.measure.roofline import Ceilings
from ksgen.spec import KernelSpec

FLOPS_PER_CYCLE = 4  # of a lane of a processor's vector units: two multiply-adds
CPU_REGISTERS = 160  # per thread, by a family's estimate; kernels with more spill to memory, and compile slowly


@dataclass(frozen=True)
class Machine:
    """The properties of a device that the model uses."""

    target: str
    limits: Limits
    multiprocessors: int
    ceilings: Mapping[str, Ceilings]  # by family
    # ceilings of plain multiply-adds, for families that also use tensor cores
    plain: Mapping[str, Ceilings] = field(default_factory=dict)

    def ceilings_of(self, family: str, kernel: KernelSpec, constants: Any) -> Ceilings:
        """Ceilings for the instructions that a kernel uses under such constants."""
        is_plain = family in self.plain and operand_of(kernel, constants) is None
        return self.plain[family] if is_plain else self.ceilings[family]

    def speed(self, ceilings: Ceilings) -> expected.Speed:
        """Speed of a GPU by its measured ceilings. The rate of shared memory comes from the table of GPUs."""
        rates = gpu_of(self.target).rates
        cache_bytes_per_s = ceilings.cache_bytes_per_s or ceilings.bytes_per_s * expected.cache_rate(rates)
        flops_per_s = ceilings.flops_per_s * ceilings.products
        bytes_per_s = ceilings.bytes_per_s, cache_bytes_per_s, expected.shared_rate(rates)
        return expected.Speed(self.target, self.limits, self.multiprocessors, *bytes_per_s, flops_per_s)


def predict_us(machine: Machine, family: Family[Any], kernel: KernelSpec, constants: Any, batch: int) -> float:
    """Predicted microseconds; infinite if the kernel cannot run.

    `families/expected.py` predicts them on a GPU, the kernel's cycles or operations on a processor.
    """
    ceilings = machine.ceilings_of(family.name, kernel, constants)
    if not machine.limits.is_cpu:
        found = expected.prediction(machine.speed(ceilings), family, kernel, constants, batch)
        return found.us if found else inf
    work = family.work(kernel, constants, batch)
    if work.blocks > expected.MOST_GRID:
        return inf
    memory_s = work.memory_bytes / ceilings.bytes_per_s
    if work.cycles:
        lanes = machine.limits.vector_bytes // (kernel.real_bytes // kernel.arithmetic.reals_per_number)
        busy_s = work.cycles * lanes * FLOPS_PER_CYCLE / ceilings.flops_per_s
        busy_s *= expected.unevenness(work.blocks / machine.multiprocessors)
        memory_s += work.passed_bytes / ceilings.bytes_per_s
        return (max(memory_s, busy_s) + EXPOSED * min(memory_s, busy_s)) * 1e6
    # shared memory is ordinary memory in its cache, read by the same instructions
    flops = 2 * kernel.arithmetic.multiply_adds * work.multiply_adds
    crowded = max(1.0, family.registers(kernel, constants) / CPU_REGISTERS)
    return max(memory_s, (flops + work.shared_bytes) / ceilings.flops_per_s * crowded) * 1e6


def misfit(machine: Machine, family: Family[Any], kernel: KernelSpec, constants: Any, resources: Resources) -> str:
    """Reason why a compiled candidate is not worth measuring; empty if it is."""
    if resources.spill_bytes:
        return f"spills {resources.spill_bytes} bytes per thread"
    if machine.limits.is_cpu or resources.registers is None:
        return ""
    threads = family.geometry(kernel, constants, 1).block
    shared_bytes = family.shared_bytes(kernel, constants) + (resources.shared_bytes or 0)
    if not expected.resident_blocks(machine.target, machine.limits, threads, resources.registers, shared_bytes):
        return (
            f"no block fits a multiprocessor: {threads} threads of {resources.registers} registers, {shared_bytes} "
            "bytes of shared memory"
        )
    return ""


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rank correlation, from -1 to 1; equal values share a rank, NaN if a list has only equal values."""
    deviations = [ranks - ranks.mean() for ranks in (_ranks(first), _ranks(second))]
    scale = float(np.sqrt((deviations[0] ** 2).sum() * (deviations[1] ** 2).sum()))
    return float((deviations[0] * deviations[1]).sum()) / scale if scale else float("nan")


def _ranks(values: ArrayLike) -> Any:
    _, at, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[at]
