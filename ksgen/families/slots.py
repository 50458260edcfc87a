"""Instructions that a GPU's warps issue for a kernel: a table, counted in the machine code of the families' kernels.

`TABLE` was fitted to the main loops of 300 kernels for sm_80 and sm_90a: defaults of stratified patterns, and constants
drawn from the options. The rows of `simt` were fitted to all instructions that 60 kernels with default constants
for sm_90a execute in whole tiles of aligned arrays. The two targets share rows, though counts of `mma` in tf32x3 differ
by a seventh. All instructions of a loop count. A loop contains the copies of aligned rows and those of unaligned rows;
`simt` has a loop for each. `python -m tests.compile_matrix` compares the table with the machine code. The issue slots
of a family or precision without a row are not counted.
"""

from dataclasses import dataclass, replace

from ksgen.families.base import Work
from ksgen.families.tiles import WARP
from ksgen.spec import KernelSpec


@dataclass(frozen=True)
class Issued:
    """Instructions of a warp."""

    per_product: float  # the product itself; reads and conversions of its operands, too, if `per_read` is 0
    per_stage: float  # to copy a stage, to wait for it and to find the next one
    per_output: float  # of a lane, to place and to store an output
    per_read: float = 0  # to read 16 bytes of operands per lane, and to convert them


TABLE = {  # by family, precision and layout
    ("simt", "float32", "bsf"): Issued(1.07, 30, 7.1),
    ("simt", "float32", "bsl"): Issued(1.07, 23, 5.8),
    ("mma", "bfloat16", "bsf"): Issued(1.44, 64, 4.6, 2.1),
    ("mma", "bfloat16", "bsl"): Issued(1.66, 91, 6.1),
    ("mma", "tf32x3", "bsf"): Issued(1.43, 62, 6.8, 10.7),
    ("mma", "tf32x3", "bsl"): Issued(1.21, 71, 9.1, 12.2),
    ("wgmma_registers", "bfloat16", "bsf"): Issued(11.9, 35, 3.8),
    ("wgmma_registers", "tf32x3", "bsf"): Issued(8.9, 111, 7.8),
    ("wgmma_registers", "tf32x3", "bsl"): Issued(12.4, 33, 9.0),
    ("wgmma_shared", "bfloat16", "bsl"): Issued(10.8, 37, 4.0),
}
# per output, by step of an epilogue of `simt` in float32
OF_STEP = {"bias": 1.5, "residual": 2.4, "relu": 2.0, "gelu": 27.0, "gelu_tanh": 23.0, "silu": 21.0}
PERMUTATIONS = 0.5  # of bytes, per product, that `mma` executes in 16 bits and bsf unless d = 1
ALIKE = {"float16": "bfloat16"}  # precisions that share a row, because their instructions differ only in type
PAIRS = ("sm_100", "sm_103")  # targets on which one instruction multiplies and adds two float32


def issued_by(family: str, kernel: KernelSpec, target: str) -> Issued | None:
    """Row of the table for a kernel; None if the machine code of such kernels was not counted."""
    if kernel.is_chain:
        return None
    precision = kernel.dtype if family == "simt" else kernel.precision  # plain multiply-adds split no operands
    found = TABLE.get((family, ALIKE.get(precision, precision), kernel.layout))
    if found and family == "simt":
        steps, saved = sum(OF_STEP[word] for word in kernel.epilogue.words), 0.5 if target in PAIRS else 0.0
        return replace(found, per_output=found.per_output + steps, per_product=found.per_product - saved)
    if found and family == "mma" and kernel.layout == "bsf" and kernel.x_item_bytes == 2 and kernel.pattern.d == 1:
        return replace(found, per_product=found.per_product - PERMUTATIONS)
    return found


def in_loop(issued: Issued, work: Work, warps: int) -> float:
    """Instructions of all blocks in their main loops, for blocks with `warps` warps that multiply."""
    of_reads = issued.per_read * work.reads
    return issued.per_product * work.products + of_reads + issued.per_stage * work.stages * warps


def instructions(family: str, kernel: KernelSpec, target: str, work: Work, warps: int, batch: int) -> float:
    """Instructions of all blocks; 0 if the table has no row for the kernel."""
    issued = issued_by(family, kernel, target)
    outputs = batch * kernel.pattern.out_features / WARP
    return in_loop(issued, work, warps) + issued.per_output * outputs if issued else 0.0
