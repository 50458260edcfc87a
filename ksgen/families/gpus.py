"""All that is known of each CUDA target, one row each: what a block and a multiprocessor have. A new target is one row here."""

import re
from dataclasses import dataclass, replace

REGISTERS = 65536  # of a multiprocessor, on every GPU in the table


@dataclass(frozen=True)
class Gpu:
    """What a target offers."""

    shared_bytes: int  # dynamic shared memory that one block may ask for
    threads: int = 2048  # of a multiprocessor
    blocks: int = 32  # of a multiprocessor
    async_copies: bool = True  # cp.async
    tensor_cores: bool = True  # for 16-bit and tf32 operands with float32 sums
    warpgroups: bool = False  # wgmma, tensor maps, registers that warps hand over: with the suffix alone
    suffix: str = ""  # of the target that has all of the GPU's instructions


GPUS = {  # by compute capability, as targets write it
    70: Gpu(96 * 1024, async_copies=False, tensor_cores=False),
    75: Gpu(64 * 1024, threads=1024, blocks=16, async_copies=False, tensor_cores=False),
    80: Gpu(163 * 1024),
    86: Gpu(99 * 1024, threads=1536, blocks=16),
    87: Gpu(163 * 1024, threads=1536, blocks=16),
    89: Gpu(99 * 1024, threads=1536, blocks=24),
    90: Gpu(227 * 1024, warpgroups=True, suffix="a"),
    100: Gpu(227 * 1024),
    103: Gpu(227 * 1024),
    120: Gpu(99 * 1024, threads=1536, blocks=24),
}
PORTABLE = Gpu(99 * 1024, threads=1536, blocks=16)  # what every GPU since sm_80 has: the answer for those that are not in the table
OLDER = Gpu(48 * 1024, async_copies=False, tensor_cores=False)  # the same for older ones, and for what is no CUDA target
LEAST = "sm_86"  # of those since sm_80, a target of which all have as much
FULLEST = "sm_90a"  # a target for which every family of GPUs has kernels
TYPICAL = ("sm_75", "sm_80", "sm_86", "sm_90a")  # one of each kind, where a page shows which family serves where


def gpu_of(target: str) -> Gpu:
    """The row of a target, such as `sm_90a`: without its suffix it lacks what needs that."""
    found = re.fullmatch(r"sm_(\d+)([a-z]?)", target)
    if not found:
        return OLDER
    number, suffix = int(found[1]), found[2]
    gpu = GPUS.get(number, PORTABLE if number >= 80 else OLDER)
    return gpu if suffix == gpu.suffix else replace(gpu, warpgroups=False)


def target_of(major: int, minor: int) -> str:
    """The target of a compute capability, with all of the GPU's instructions."""
    number = 10 * major + minor
    return f"sm_{number}{GPUS[number].suffix if number in GPUS else ''}"
