"""python -m tests.measured_sums FOLDER: the emulator's tensor-core sums against measurements of GPUs, to the last bit.

A set of measurements is a file `GPU_FORMAT.csv.gz`, such as `A100_fp16.csv.gz`. A row has the columns a, b, c and d:
the bits of float32 values as hexadecimal words. a and b are one row of operands each, c is the sum so far, and d = c +
a . b as the GPU gave it. The exit status is 0 if every set of a known GPU agrees in every row.
"""

import csv
import gzip
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.emulator import run_cuda
from tests.ptx import render

Array = np.ndarray[Any, Any]

TARGETS = {
    "V100": "sm_70", "A100": "sm_80", "A2": "sm_86", "Ada": "sm_89", "L40S": "sm_89", "H100": "sm_90a",
    "H200": "sm_90a", "B200": "sm_100",
}  # fmt: skip
FORMATS: dict[str, tuple[str, Any]] = {  # the operand in PTX's words, and NumPy's type
    "fp16": ("f16", np.float16), "bf16": ("bf16", ml_dtypes.bfloat16), "tf32": ("tf32", np.float32),
    "E4M3": ("e4m3", ml_dtypes.float8_e4m3fn), "E5M2": ("e5m2", ml_dtypes.float8_e5m2),
}  # fmt: skip
# d = a . b there, as published: c was not given
FROM_ZERO = {(gpu, kind) for gpu in ("H100", "H200") for kind in ("E4M3", "E5M2")}
# of operands that an instruction takes, and measurements of a warp: one per row of A and column of B
ROW_BYTES, PER_WARP = 32, 8

# Row g of A and column g of B are measurement g; sum (g, g) is lane 4 g + g / 2's.
PRODUCTS = """
extern "C" __global__ void products(const unsigned* a, const unsigned* b, const float* c, float* d) {
    const int g = threadIdx.x / 4, t = threadIdx.x % 4, own = blockIdx.x * 8 + g;
    const unsigned words[4] = {a[own * 8 + t], 0, a[own * 8 + t + 4], 0};
    float sums[4] = {0, 0, 0, 0};
    if (t == g / 2) sums[g % 2] = c[own];
    mma_OPERAND(sums, words, b[own * 8 + t], b[own * 8 + t + 4]);
    if (t == g / 2) d[own] = sums[g % 2];
}
"""


@dataclass(frozen=True)
class Sums:
    """Measurements of one GPU and format. Operands are in the type that the instruction takes."""

    gpu: str
    kind: str
    a: Array
    b: Array
    c: Array
    d: Array

    def emulated(self, target: str) -> Array:
        """What tensor cores of the target give in the emulator."""
        operand, _ = FORMATS[self.kind]
        blocks = -(-len(self.c) // PER_WARP)

        def padded(values: Array, columns: int) -> Array:
            whole = np.zeros((blocks * PER_WARP, columns), values.dtype)
            whole[: len(values), : values.shape[1]] = values
            return whole

        a, b = (padded(each, ROW_BYTES // each.itemsize).view(np.uint32) for each in (self.a, self.b))
        c, d = padded(self.c[:, None], 1), np.zeros(blocks * PER_WARP, np.float32)
        run_cuda(render(PRODUCTS.replace("OPERAND", operand)), "products", blocks, 32, 0, [a, b, c, d], target=target)
        return d[: len(self.c)]

    def agreeing(self, target: str) -> int:
        """Rows in which the emulator gives the measured bits."""
        return int((self.emulated(target).view(np.uint32) == self.d.view(np.uint32)).sum())


def read_sums(path: Path) -> Sums:
    gpu, _, kind = path.name.removesuffix(".csv.gz").rpartition("_")
    with gzip.open(path, "rt", encoding="ascii", newline="") as file:
        rows = list(csv.DictReader(file))
    a, b, c, d = (
        np.array([[int(word, 16) for word in row[name].split()] for row in rows], np.uint32).view(np.float32)
        for name in "abcd"
    )
    if (gpu, kind) in FROM_ZERO:
        c = np.zeros_like(c)
    dtype = FORMATS[kind][1]
    operands = [each.astype(dtype) for each in (a, b)]
    assert all((narrow.astype(np.float32) == wide).all() for narrow, wide in zip(operands, (a, b), strict=True)), (
        f"{path}: not in {kind}"
    )
    return Sums(gpu, kind, *operands, c[:, 0], d[:, 0])


def compare(folder: Path) -> Iterator[tuple[str, str, int, int]]:
    """Each set's name, target, and how many rows agree, of how many.

    The target of an unknown GPU or format is empty.
    """
    for path in sorted(folder.glob("*.csv.gz")):
        name = path.name.removesuffix(".csv.gz")
        gpu, _, kind = name.rpartition("_")
        if gpu not in TARGETS or kind not in FORMATS:
            yield name, "", 0, 0
            continue
        sums = read_sums(path)
        yield name, TARGETS[gpu], sums.agreeing(TARGETS[gpu]), len(sums.d)


def main(folder: str) -> int:
    found = list(compare(Path(folder)))
    for name, target, agreeing, rows in found:
        print(
            f"{name:<12} {target:<7} {agreeing} of {rows} rows agree" if target else f"{name:<12} no rule is known",
            flush=True,
        )
    known = [each for each in found if each[1]]
    whole = [each for each in known if each[2] == each[3]]
    print(f"{len(whole)} of {len(known)} sets agree in every row; {len(found) - len(known)} of unknown GPUs or formats")
    return 0 if known and len(whole) == len(known) else 1


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
