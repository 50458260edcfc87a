"""Assumptions of Hopper's kernels, checked on this GPU: `python -m benchmarks.device_facts`.

The command writes results/<gpu>/facts.json. Later facts rest on earlier ones, in this order:

1. Layouts of descriptors and TMA boxes in shared memory, compared with the emulator.
2. Treatment of a float32's lower bits by tensor cores, and bits that sums of eight-bit products keep.
3. Errors of sums on tensor cores.
4. Rates of memory copies and of plain cores.
5. Rates of tensor cores, with A in shared memory and in registers.
6. Rates of copying TMA boxes from the L2 cache, by the length of their rows.
7. Gain of launches that begin before the previous one ends.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from ksgen.build.build import build
from ksgen.devices import Device, find_device
from ksgen.devices.base import GPU_BATCH, uploaded
from ksgen.errors import DeviceError, KsgenError
from ksgen.families import TensorMap, families_for
from ksgen.families.ptx import WgmmaInstruction
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.planner import PLANNER
from ksgen.measure.roofline import measure_ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import file_name
from tests.ptx import on_gpu, render
from tests.ptx.cases import BYTES, Case, all_cases, mma, normal, wgmma, wgmma_registers, words

Launch = Callable[[Case], None]
LOW_BITS = 0x1FFF  # bits of a float32 that tf32 drops
FACTORS = (Pattern(2, 48, 192, 1), Pattern(1, 192, 48, 2))  # 384 -> 96 -> 384 features, by a family for Hopper
STAGES, ROWS, LINE_WORDS = 8, 128, 128  # box test: boxes in flight, rows per box, and words per row of the array

# Repeated products on fixed operands: two warpgroups, each with one group of instructions in flight.
RATE = """
extern "C" __global__ __launch_bounds__(256, 1) void rate(float* y, long long rounds) {
    for (int i = threadIdx.x; i < BYTES / 4; i += 256) reinterpret_cast<unsigned*>(shared_memory)[i] = 0;
    fence_proxy_async();
    __syncthreads();
    const unsigned long long base = shared_address(shared_memory) >> 4, b = base | 8ull << 16 | 16ull << 32;
    unsigned a[4] = {0, 0, 0, 0};
    float sums[SUMS];
    for (int i = 0; i < SUMS; ++i) sums[i] = 0;
    wgmma_hold(a);
    wgmma_hold(sums);
    for (long long round = 0; round < rounds; ++round) {
        wgmma_fence();
        #pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) CALL(sums, A, b, true);
        wgmma_commit();
        wgmma_hold(sums);
        wgmma_wait<1>();
    }
    wgmma_wait<0>();
    wgmma_hold(a);
    wgmma_hold(sums);
    float total = 0;
    for (int i = 0; i < SUMS; ++i) total += sums[i];
    if (total != 0) y[threadIdx.x] = total;  // never: the operands are zeros
}
"""
AT_ONCE = 8

# Repeated boxes from an array in the cache, several in flight.
FETCH = """
extern "C" __global__ void fetch(const __grid_constant__ TensorMap x, long long boxes, long long across,
    long long along) {
    const unsigned full = shared_address(shared_memory + STAGES * BYTES);
    if (threadIdx.x != 0) return;
    for (int s = 0; s < STAGES; ++s) mbarrier_init(full + 8 * s, 1);
    fence_mbarrier_init();
    for (long long i = 0; i < boxes + STAGES; ++i) {
        const int s = i % STAGES;
        if (i >= STAGES) mbarrier_wait(full + 8 * s, (i / STAGES - 1) % 2);
        if (i >= boxes) continue;
        const long long at = blockIdx.x * boxes + i;
        mbarrier_arrive_expect(full + 8 * s, BYTES);
        load_box(shared_address(shared_memory + s * BYTES), x, full + 8 * s, at % across * WORDS, 0,
            at / across % along * ROWS);
    }
}
"""


@dataclass(frozen=True)
class Rate:
    """Rate of tensor-core products with one instruction shape."""

    operand: str
    columns: int
    a_in_registers: bool

    @property
    def name(self) -> str:
        return f"{self.operand} 64x{self.columns}, A in {'registers' if self.a_in_registers else 'shared memory'}"

    @property
    def wgmma(self) -> WgmmaInstruction:
        return WgmmaInstruction(self.operand, self.columns, self.a_in_registers)

    @property
    def shared_bytes(self) -> int:
        return 32 * max(64, self.columns)

    @property
    def text(self) -> str:
        head = f"\nconstexpr int SUMS = {self.wgmma.sums}, AT_ONCE = {AT_ONCE}, BYTES = {self.shared_bytes};\n"
        kernel = RATE.replace("CALL", self.wgmma.along_inputs).replace(" A,", " a," if self.a_in_registers else " b,")
        return render(head + kernel, wgmma=self.wgmma)

    def flops(self, blocks: int, rounds: int) -> float:
        """Operations of all rounds: a block has two warpgroups."""
        return 2.0 * 2 * 64 * self.columns * self.wgmma.k * AT_ONCE * blocks * rounds


@dataclass(frozen=True)
class Fetch:
    """Rate of copying boxes with rows of `row_bytes` bytes."""

    row_bytes: int

    @property
    def bytes(self) -> int:
        return ROWS * self.row_bytes

    @property
    def shared_bytes(self) -> int:
        return STAGES * (self.bytes + 8)

    @property
    def text(self) -> str:
        head = (
            f"\nconstexpr int STAGES = {STAGES}, ROWS = {ROWS}, BYTES = {self.bytes}, WORDS = {self.row_bytes // 4};\n"
        )
        return render(head + FETCH)

    def map(self, lines: int) -> TensorMap:
        swizzle = self.row_bytes if self.row_bytes > 16 else 0
        sizes, strides = (LINE_WORDS, 1, lines), (4 * LINE_WORDS, 4 * LINE_WORDS)
        return TensorMap("x", 4, sizes, strides, (self.row_bytes // 4, 1, ROWS), swizzle)

    @property
    def across(self) -> int:
        """Boxes side by side in the array."""
        return 4 * LINE_WORDS // self.row_bytes


RATES = [
    *(
        Rate(operand, columns, in_registers)
        for operand in ("bf16", "tf32")
        for columns in (32, 64, 96, 128)
        for in_registers in (False, True)
    ),
    *(Rate(operand, 256, a_in_registers=False) for operand in ("bf16", "tf32", "e4m3")),
]
FETCHES = [Fetch(row_bytes) for row_bytes in (16, 32, 64, 128)]


def reading(launch: Launch) -> dict[str, str]:
    """Compare the GPU with the emulator in every case that has a descriptor, a box or a swizzle."""
    wanted = [case for case in all_cases() if case.name.startswith(("wgmma", "box", "batched", "matrices"))]
    return {case.name: verdict(case, launch) for case in wanted}


def verdict(case: Case, launch: Launch) -> str:
    try:
        launch(case)
        case.check()
    except AssertionError as error:
        return f"different: {' '.join(str(error).split())[:160]}"
    except KsgenError as error:
        return f"failed: {error}"
    return "the same"


def lower_bits(launch: Launch) -> dict[str, str]:
    """Treatment of the bits of operand A that tf32 drops: cut off, rounded or used."""
    found = {}
    for case, depth in ((mma("tf32"), 8), (wgmma_registers("tf32"), 32)):
        a, b = normal((case.args[-1].shape[0], depth)), normal((case.args[-1].shape[1], depth), seed=1)
        random = np.random.default_rng(3).integers(0, LOW_BITS + 1, a.shape, np.uint32)
        case.args[0][...] = words(a).reshape(case.args[0].shape) | random.reshape(case.args[0].shape)
        whole, y = case.args[0].view(np.float32).reshape(a.shape), case.args[-1]
        rounded = ((words(whole) + 0x1000) & ~np.uint32(LOW_BITS)).view(np.float32)
        before = y.copy()
        launch(case)
        grades = {"cut off": a, "rounded": rounded, "used": whole}
        errors = {
            word: float(np.abs(y - before - each.astype(np.float64) @ b.astype(np.float64).T).max())
            for word, each in grades.items()
        }
        found[case.name] = min(errors, key=lambda word: errors[word])
    return found


def kept_bits(launch: Launch) -> dict[str, int]:
    """Number of bits below the largest product that a sum of eight-bit products keeps.

    The test adds 2^-n to 1, for n up to 18.
    """
    found, powers = {}, np.arange(10)
    for operand, kind in BYTES.items():
        x, w = np.zeros((64, 64), kind), np.zeros((48, 64), kind)
        for each in (x, w):
            each[:, 0], each[:10, 1] = 1, 2.0**-powers
        case = wgmma(operand, 0, False, 0, False, 48, (x, w))
        launch(case)
        found[operand] = int(np.add.outer(powers, powers)[case.args[-1][:10, :10] != 1].max())
    return found


def sums(launch: Launch) -> Iterator[tuple[str, str]]:
    """Errors of long sums, and those of the emulator, which adds like an H100."""
    for name, product in on_gpu.PRODUCTS.items():
        case = product.case()
        launch(case)
        yield name, f"{product.error_of(case):.2e}; the emulator's {product.error():.2e}"


def measure_rate(device: Device, rate: Rate, rounds: int = 4096) -> float:
    """Measure a rate in TFLOP/s."""
    blocks = device.limits.multiprocessors
    handle = device.load(build(rate.text, "rate", device.target, device.compiler()), "rate", rate.shared_bytes)
    y = device.allocate(1024)
    taken = device.time(
        lambda: device.launch(handle, blocks, 256, rate.shared_bytes, (y, rounds), None), None, runs=7, warmup=2
    )
    return rate.flops(blocks, rounds) / median(taken) / 1e12


def measure_fetch(device: Device, fetch: Fetch, boxes: int = 2048, lines: int = 64 * ROWS) -> float:
    """Measure a rate of boxes in TB/s."""
    blocks = 2 * device.limits.multiprocessors
    handle = device.load(build(fetch.text, "fetch", device.target, device.compiler()), "fetch", fetch.shared_bytes)
    x = device.allocate(4 * LINE_WORDS * lines)
    arguments = (device.encode_map(fetch.map(lines), int(x)), boxes, fetch.across, lines // ROWS)
    taken = device.time(
        lambda: device.launch(handle, blocks, 32, fetch.shared_bytes, arguments, None), None, runs=7, warmup=2
    )
    return blocks * boxes * fetch.bytes / median(taken) / 1e12


def measure_chain(device: Device, starts_early: bool, batch: int = GPU_BATCH, rounds: int = 200) -> float:
    """Microseconds per launch, in a repeated chain of `FACTORS`."""
    launches = []
    x = uploaded(
        device, np.random.default_rng(0).standard_normal((batch, FACTORS[0].in_features), np.float32).astype(np.float16)
    )
    for pattern in FACTORS:
        kernel = KernelSpec(pattern, "float16")
        family = next(families_for(kernel, limits_of(device), batch))
        plan = PLANNER.plan_of(device, kernel, batch, choice_by_name(family.name, kernel, batch, limits_of(device)))
        handle = device.load(plan.binary, plan.source.entry, plan.shared_bytes, starts_early)
        y = device.allocate(2 * batch * pattern.out_features)
        weights = np.full(pattern.shape, 1 / pattern.c, np.float16)
        operands = {"x": x, "weights": plan.pack(uploaded(device, weights), None), plan.result: y}
        launches.append((replace(plan, multiply=handle), plan.arguments(operands)))
        x = y

    def launch_all() -> None:
        for _ in range(rounds):
            for plan, arguments in launches:
                plan.launch(arguments, None)

    return median(device.time(launch_all, None, runs=7, warmup=2)) / (rounds * len(launches)) * 1e6


def measure_early_launches(device: Device) -> dict[str, str]:
    """Compare sequential with early launches, small batches first: short launches gain more."""
    return {
        f"batch {batch}": f"{measure_chain(device, False, batch):.2f} us per launch; "
        f"{measure_chain(device, True, batch):.2f} early"
        for batch in (GPU_BATCH // 8, GPU_BATCH)
    }


def facts(device: Device) -> Iterator[tuple[str, Any]]:
    def launch(case: Case) -> None:
        on_gpu.launch(device, case)

    yield "device", {"name": device.name, "target": device.target, "driver": device.driver_version}
    yield "layouts in shared memory", reading(launch)
    yield "lower bits of tf32 operands", lower_bits(launch)
    yield "bits that sums of eight-bit products keep", kept_bits(launch)
    yield "errors of sums", dict(sums(launch))
    plain = measure_ceilings(device, "float32")
    copied, multiplied = round(plain.bytes_per_s / 1e12, 2), round(plain.flops_per_s / 1e12, 1)
    yield "plain", {"TB/s copied": copied, "TFLOP/s of float32": multiplied}
    yield "TFLOP/s of wgmma", {rate.name: round(measure_rate(device, rate), 1) for rate in RATES}
    fetched = {f"rows of {each.row_bytes} bytes": round(measure_fetch(device, each), 2) for each in FETCHES}
    yield "TB/s of boxes from the cache", fetched
    yield "launches that begin early", measure_early_launches(device)


@click.command()
@click.option("--results", type=click.Path(file_okay=False, path_type=Path), default=Path(__file__).parent / "results")
def main(results: Path) -> None:
    """Measure the facts of this GPU, print them, and write them to a file."""
    try:
        device = find_device("driver")  # its launches support narrow arguments
    except DeviceError as error:
        raise click.ClickException(f"these are facts of a GPU. {error}") from None
    if device.target != "sm_90a":
        raise click.ClickException(f"{device.name} is {device.target}; these are facts of sm_90a")
    found: dict[str, Any] = {}
    path = results / Path(file_name(device.name)).stem / "facts.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    for topic, measured in facts(device):
        found[topic] = measured
        click.echo(f"{topic}\n" + "".join(f"  {name:48} {value}\n" for name, value in measured.items()))
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")  # a later fact may crash
    click.echo(f"written to {path}")


if __name__ == "__main__":
    main()
