"""The least time that a kernel can take on a device with the instructions it is made of: what it must move and compute,
over what the device was seen to do.

Ceilings are measured, by a copy and by the fastest multiply-adds that the device has for the kernel's operands: plain ones, or
those of tensor cores, by warpgroups where there are such instructions and by warps elsewhere; a processor's by its vector registers,
on all cores.
"""

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ksgen.families import cuda_limits
from ksgen.families.ptx import Wgmma
from ksgen.families.tiles import WARP
from ksgen.spec import PRECISIONS, KernelSpec
from ksgen.spec.precision import K_BYTES, OPERANDS

if TYPE_CHECKING:
    from ksgen.devices.base import Device, KernelHandle
    from ksgen.emit.render import Probe

THREADS = 256
PLAIN_A_ROUND, TENSOR_CHAINS = 128, 16  # of a thread's multiply-adds, and of a warp's products of 16 x 8 sums, in a round of a probe
WARPGROUP_COLUMNS = 128  # of the product that a warpgroup makes
COPIED_BYTES, PROCESSOR_COPIED_BYTES = 512 * 2**20, 256 * 2**20  # more than a last-level cache holds
GROUPS_A_CORE, PROCESSOR_ROUNDS = 8, 1 << 15  # work groups, and rounds of each: milliseconds


@dataclass(frozen=True)
class Ceilings:
    """What a device does at most, in one precision."""

    bytes_per_s: float  # copied: read plus written
    flops_per_s: float  # a multiply-add is two
    products: int = 1  # of the device's own that stand for one of these

    def floor_s(self, kernel: KernelSpec, batch: int) -> float:
        """X, weights and Y moved once, all multiply-adds done: the larger of the two times."""
        return max(kernel.bytes(batch) / self.bytes_per_s, kernel.flops(batch) / self.flops_per_s)


def measure_ceilings(device: "Device", precision: str, operand: str | None = None) -> Ceilings:
    """Run the two probes of a text made for the device; about a second. `operand`: what tensor cores multiply, where they do."""
    if device.limits.is_cpu:
        return _of_processor(device, precision)
    from ksgen.emit.render import PROBE_AT_ONCE, render_probe

    wgmma = Wgmma(operand, WARPGROUP_COLUMNS, a_in_registers=False) if operand and cuda_limits(device.target).warpgroups else None
    copy, multiply = load_probe(device, render_probe(precision, device.dialect, THREADS, operand, wgmma))
    x, y = device.allocate(COPIED_BYTES), device.allocate(COPIED_BYTES)
    groups = COPIED_BYTES // 16
    copy_s = device.time(lambda: device.launch(copy, groups // THREADS, THREADS, 0, (x, y, groups), None), None, runs=7, warmup=2)
    blocks, rounds = device.limits.multiprocessors * 64, 2048
    a_round = PLAIN_A_ROUND
    if operand:
        a_round = wgmma.multiply_adds * PROBE_AT_ONCE if wgmma else TENSOR_CHAINS * 16 * 8 * OPERANDS[operand].k_step // WARP
    shared_bytes = 0 if wgmma is None else K_BYTES * WARPGROUP_COLUMNS
    multiply_s = device.time(lambda: device.launch(multiply, blocks, THREADS, shared_bytes, (y, rounds), None), None, runs=7, warmup=2)
    products = PRECISIONS[precision].products if operand else 1
    flops = 2.0 * blocks * THREADS * rounds * a_round / products
    return Ceilings(2 * COPIED_BYTES / median(copy_s), flops / median(multiply_s), products)


def _of_processor(device: "Device", precision: str) -> Ceilings:
    """By vectors on all cores; 16-bit types are multiplied in float32."""
    from ksgen.emit.render import render_processor_probe

    probe = render_processor_probe(precision, device.limits.vector_bytes)
    copy, multiply = load_probe(device, probe)
    x, y = device.allocate(PROCESSOR_COPIED_BYTES), device.allocate(PROCESSOR_COPIED_BYTES)
    groups, vectors = device.limits.multiprocessors * GROUPS_A_CORE, PROCESSOR_COPIED_BYTES // device.limits.vector_bytes
    device.launch(copy, groups, 1, 0, (y, x, vectors), None)  # memory that was never written is one page of zeros in a cache
    copy_s = device.time(lambda: device.launch(copy, groups, 1, 0, (x, y, vectors), None), None, runs=7, warmup=1)
    multiply_s = device.time(lambda: device.launch(multiply, groups, 1, 0, (y, PROCESSOR_ROUNDS), None), None, runs=15, warmup=2)
    flops = 2.0 * groups * PROCESSOR_ROUNDS * probe.multiply_adds
    return Ceilings(2 * PROCESSOR_COPIED_BYTES / median(copy_s), flops / median(multiply_s))


def load_probe(device: "Device", probe: "Probe") -> "tuple[KernelHandle, KernelHandle]":
    """What copies, and what multiplies."""
    from ksgen.build.build import build

    binary = build(probe.text, probe.entry, device.target, device.compiler() if device.kind == "opencl" else None)
    return device.load(binary, probe.entry, 0), device.load(binary, f"{probe.entry}_multiply_add", 0)
