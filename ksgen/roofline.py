"""The least time that a kernel can take on a device with the instructions it is made of: what it must move and compute,
over what the device was seen to do.

Ceilings are measured, by a copy and by the fastest multiply-adds that the device has for the kernel's operands: plain ones, or
those of tensor cores, by warpgroups where there are such instructions and by warps elsewhere.
"""

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ksgen.families import cuda_limits
from ksgen.instructions import K_BYTES, Wgmma
from ksgen.spec import KernelSpec

if TYPE_CHECKING:
    from ksgen.devices.base import Device

THREADS = 256
MULTIPLY_ADDS_A_ROUND = {"multiply_add": 128, "f16": 1024, "bf16": 1024, "tf32": 512}  # of a thread
WARPGROUP_COLUMNS = 128  # of the product that a warpgroup makes
PRODUCTS = {"tf32x3": 3, "fp16x3": 3}  # of tensor cores, that stand for one


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
    """Run the two probes of `probe.cu.j2`; well under a second. `operand`: what tensor cores multiply, where they do."""
    from ksgen.build import build
    from ksgen.emit import PROBE_AT_ONCE, render_probe

    wgmma = Wgmma(operand, WARPGROUP_COLUMNS, a_in_registers=False) if operand and cuda_limits(device.target).warpgroups else None
    source = render_probe(precision, device.dialect, THREADS, operand, wgmma)
    binary = build(source.text, source.entry, device.target, device.compiler() if device.kind == "opencl" else None)
    copy = device.load(binary, source.entry, 0)
    multiply = device.load(binary, f"{source.entry}_multiply_add", 0)
    copied_bytes = (64 if device.limits.is_cpu else 512) * 2**20
    x, y = device.allocate(copied_bytes), device.allocate(copied_bytes)
    groups = copied_bytes // 16
    copy_s = device.time(lambda: device.launch(copy, groups // THREADS, THREADS, 0, (x, y, groups), None), None, runs=7, warmup=2)
    blocks, rounds = device.limits.multiprocessors * (16 if device.limits.is_cpu else 64), 2048
    a_round = MULTIPLY_ADDS_A_ROUND[operand or "multiply_add"] if wgmma is None else wgmma.multiply_adds * PROBE_AT_ONCE
    shared_bytes = 0 if wgmma is None else K_BYTES * WARPGROUP_COLUMNS
    multiply_s = device.time(lambda: device.launch(multiply, blocks, THREADS, shared_bytes, (y, rounds), None), None, runs=7, warmup=2)
    products = PRODUCTS.get(precision, 1) if operand else 1
    flops = 2.0 * blocks * THREADS * rounds * a_round / products
    return Ceilings(2 * copied_bytes / median(copy_s), flops / median(multiply_s), products)
