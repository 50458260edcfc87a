"""How long a candidate will take, before anything is compiled: a family's work over what the device was seen to do.

Good for an order, not for a figure: there are no terms for barriers or what a compiler makes of a text. A processor's cycles are
`families/vector/cycles.py`. Measures nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil, inf, sqrt
from typing import Any

from ksgen.build.request import Resources
from ksgen.families import Family, Limits
from ksgen.families.gpus import gpu_of
from ksgen.families.tiles import WARP
from ksgen.launch.plan import MOST_BLOCKS as MOST_GRID
from ksgen.measure.roofline import Ceilings
from ksgen.spec import KernelSpec

SHARE_OF_PEAK = 0.9  # of the multiply-adds that a probe does, in a kernel that also loads and stores
CACHE_RATE = 2.0  # of a GPU's second-level cache, over its memory's
SHARED_BYTES_PER_S = 128 * 1.7e9  # of one multiprocessor: 128 bytes a clock
ENOUGH_WARPS = 8  # of a multiprocessor, for one to multiply while another waits
MANY_WAVES = 8  # beyond, blocks that end late hardly count
WAIT_S = 1e-6  # from asking for a stage until it is there, on a busy GPU
LAUNCH_US = 1.2
FLOPS_A_CYCLE = 4  # of a lane of a processor's vector units: two multiply-adds
EXPOSED = 0.3  # of the shorter of memory's and the cores' time, which the longer one does not hide
CPU_REGISTERS = 160  # by a family's estimate: what more a thread wants is kept in memory, and takes long to compile
PARTITIONS = 4  # of a multiprocessor, each with its own registers


@dataclass(frozen=True)
class Machine:
    """A device as the model sees it."""

    target: str
    limits: Limits
    multiprocessors: int
    ceilings: Mapping[str, Ceilings]  # by family


def resident_blocks(target: str, limits: Limits, threads: int, registers: int, shared_bytes: int) -> int:
    """Blocks that share one multiprocessor; 0: not even one fits."""
    warps = -(-threads // WARP)
    gpu = gpu_of(target)
    blocks = min(gpu.blocks, gpu.threads // threads)
    if registers:
        of_a_warp = -(-registers * WARP // 256) * 256  # allocated in units
        blocks = min(blocks, limits.registers // PARTITIONS // of_a_warp * PARTITIONS // warps)
    while blocks > 0 and shared_bytes > limits.shared_bytes_for(blocks):
        blocks -= 1
    return blocks


def predict_us(machine: Machine, family: Family[Any], kernel: KernelSpec, constants: Any, batch: int) -> float:
    """The longest of the times that memory, cache, shared memory, multiply-adds and waits take; infinite where it cannot be launched."""
    geometry, ceilings = family.geometry(kernel, constants, batch), machine.ceilings[family.name]
    if geometry.grid > MOST_GRID:
        return inf
    work = family.work(kernel, constants, batch)
    memory_s = work.memory_bytes / ceilings.bytes_per_s
    flops = 2 * work.multiply_adds
    if work.cycles:
        lanes = machine.limits.vector_bytes // kernel.real_bytes
        busy_s = work.cycles * lanes * FLOPS_A_CYCLE / ceilings.flops_per_s * _unevenness(work.blocks / machine.multiprocessors)
        memory_s += work.passed_bytes / ceilings.bytes_per_s
        return (max(memory_s, busy_s) + EXPOSED * min(memory_s, busy_s)) * 1e6
    if machine.limits.is_cpu:  # its shared memory is its cache, which the same instructions read
        crowded = max(1.0, family.registers(kernel, constants) / CPU_REGISTERS)
        return max(memory_s, (flops + work.shared_bytes) / ceilings.flops_per_s * crowded) * 1e6
    registers = min(255, family.registers(kernel, constants))
    resident = resident_blocks(machine.target, machine.limits, geometry.block, registers, geometry.shared_bytes)
    if not resident:
        return inf
    multiply_s = flops / (ceilings.flops_per_s * ceilings.products * SHARE_OF_PEAK)
    inside_s = max(multiply_s, work.shared_bytes / (machine.multiprocessors * SHARED_BYTES_PER_S))
    warps = resident * -(-geometry.block // WARP)
    idle = sqrt(max(1.0, ENOUGH_WARPS / warps))
    cache_s = work.cache_bytes / (ceilings.bytes_per_s * CACHE_RATE)
    waiting_s = work.waits * WAIT_S / resident
    busiest_s = max(inside_s * idle, waiting_s / machine.multiprocessors) * _unevenness(work.blocks / machine.multiprocessors)
    launches = 1 + len(geometry.before) + len(geometry.after)
    return (max(memory_s, cache_s, busiest_s) + work.passed_bytes / ceilings.bytes_per_s) * 1e6 + launches * LAUNCH_US


def _unevenness(waves: float) -> float:
    """How much longer the busiest multiprocessor works than the average one."""
    return 1 + 0.5 / waves if waves > MANY_WAVES else ceil(waves) / waves


def misfit(machine: Machine, family: Family[Any], kernel: KernelSpec, constants: Any, found: Resources) -> str:
    """Why a compiled candidate is not worth measuring; empty where it is."""
    if found.spill_bytes:
        return f"spills {found.spill_bytes} bytes per thread"
    if machine.limits.is_cpu or found.registers is None:
        return ""
    threads = family.geometry(kernel, constants, 1).block
    shared_bytes = family.shared_bytes(kernel, constants) + (found.shared_bytes or 0)
    if not resident_blocks(machine.target, machine.limits, threads, found.registers, shared_bytes):
        return f"no block fits a multiprocessor: {threads} threads of {found.registers} registers, {shared_bytes} bytes of shared memory"
    return ""
