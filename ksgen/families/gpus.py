"""Known figures of each CUDA target, one row each: resources of a block and a multiprocessor, and rates of its usual
card. A new target is one row here."""

import re
from dataclasses import dataclass, replace
from functools import cache

REGISTERS = 65536  # per multiprocessor, on every GPU in the table


@dataclass(frozen=True)
class Rates:
    """Rates of a target's usual card: published, or derived from published ones.

    Defaults of a cost model, never a measurement.
    """

    card: str
    multiprocessors: int
    ghz: float  # clock of the multiprocessors
    memory_gb_s: float  # of a copy, read plus written: nine tenths of the published bandwidth
    cache_gb_s: float  # rate of the L2 cache
    plain: int = 128  # float32 multiply-adds per multiprocessor and cycle
    double: int = 2  # the same in float64
    # the same by mma.sync on dense 16-bit operands with float32 sums. Before sm_80 it is for float16 only, and no
    # family uses it
    half: int = 0
    tf32: int = 0  # the same by mma.sync on tf32 operands
    warpgroup_gain: float = 1.0  # speed of wgmma over mma.sync


@dataclass(frozen=True)
class Gpu:
    """Resources and instructions of a target."""

    shared_bytes: int  # dynamic shared memory that one block may ask for
    threads: int = 2048  # per multiprocessor
    blocks: int = 32  # per multiprocessor
    async_copies: bool = True  # cp.async
    tensor_cores: bool = True  # for 16-bit and tf32 operands with float32 sums
    # tensor cores add 16 products of 16 bits (8 of tf32) at a time, and keep two bits below float32's last. False: they
    # add half as many, and keep one bit
    fine_sums: bool = False
    warpgroups: bool = False  # wgmma, tensor maps, setmaxnreg: only with the suffix
    suffix: str = ""  # suffix of the target that has all of the GPU's instructions
    more_registers: int = 0  # per thread, that ptxas takes for float32 multiply-adds beyond those on other targets
    rates: Rates | None = None  # None: unknown


GPUS = {  # by compute capability, as targets write it. From sm_100 on there is no wgmma: `mma` is used, as on sm_80
    70: Gpu(
        96 * 1024, async_copies=False, tensor_cores=False,
        rates=Rates("V100", 80, 1.53, 800, 2200, plain=64, double=32, half=512),
    ),
    75: Gpu(
        64 * 1024, threads=1024, blocks=16, async_copies=False, tensor_cores=False,
        rates=Rates("T4", 40, 1.59, 280, 1100, plain=64, half=512),
    ),
    80: Gpu(163 * 1024, rates=Rates("A100", 108, 1.41, 1400, 4500, plain=64, double=32, half=1024, tf32=512)),
    86: Gpu(99 * 1024, threads=1536, blocks=16, rates=Rates("RTX 3090", 82, 1.695, 840, 2300, half=256, tf32=128)),
    87: Gpu(163 * 1024, threads=1536, blocks=16, rates=Rates("AGX Orin", 16, 1.3, 184, 500, half=1024, tf32=512)),
    89: Gpu(99 * 1024, threads=1536, blocks=24, rates=Rates("RTX 4090", 128, 2.52, 910, 4500, half=256, tf32=128)),
    90: Gpu(
        227 * 1024, fine_sums=True, warpgroups=True, suffix="a",
        rates=Rates("H100", 132, 1.755, 3000, 7900, double=64, half=1270, tf32=635, warpgroup_gain=1.6),
    ),
    100: Gpu(227 * 1024, fine_sums=True, more_registers=24, rates=Rates("B200", 148, 1.85, 7200, 12000, double=64,
        half=1024, tf32=512)),
    103: Gpu(227 * 1024, fine_sums=True, more_registers=24, rates=Rates("B300", 148, 1.92, 7200, 12000, half=1024,
        tf32=512)),
    110: Gpu(
        227 * 1024, threads=1536, blocks=24, fine_sums=True, more_registers=24,
        rates=Rates("Thor", 20, 1.57, 245, 700, half=1024, tf32=512),
    ),
    120: Gpu(
        99 * 1024, threads=1536, blocks=24, fine_sums=True, more_registers=24,
        rates=Rates("RTX 5090", 170, 2.41, 1610, 6000, half=256, tf32=128),
    ),
    121: Gpu(
        99 * 1024, threads=1536, blocks=24, fine_sums=True, more_registers=24,
        rates=Rates("GB10", 48, 2.42, 245, 1500, half=256, tf32=128),
    ),
}  # fmt: skip
# limits of every GPU since sm_80, for those that are not in the table
PORTABLE = Gpu(99 * 1024, threads=1536, blocks=16)
# limits of every older GPU, also used for a name that is not a CUDA target
OLDER = Gpu(48 * 1024, async_copies=False, tensor_cores=False)
FIRST_EARLY = 90  # first compute capability on which launches may begin early
LEAST = "every GPU since sm_80"  # not a target: the limits that all of these GPUs have
FULLEST = "sm_90a"  # a target for which every family of GPUs has kernels
TYPICAL = ("sm_75", "sm_80", "sm_86", "sm_90a")  # one of each kind, for pages that show which family is used where


def gpu_of(target: str) -> Gpu:
    """The row of a target, such as `sm_90a`.

    Without its suffix a target lacks the instructions that need the suffix.
    """
    if target == LEAST:
        return PORTABLE
    if not (parsed := _parsed(target)):
        return OLDER
    number, suffix = parsed
    gpu = GPUS.get(number, PORTABLE if number >= 80 else OLDER)
    return gpu if suffix == gpu.suffix else replace(gpu, warpgroups=False)


@cache
def _parsed(target: str) -> tuple[int, str] | None:
    """Number and suffix of a CUDA target; None for any other text."""
    found = re.fullmatch(r"sm_(\d+)([a-z]?)", target)
    return (int(found[1]), found[2]) if found else None


def begins_early(target: str) -> bool:
    """Whether the target's kernels can wait for the previous grid themselves, so that they may start early."""
    parsed = _parsed(target)
    return parsed is not None and parsed[0] >= FIRST_EARLY


def target_of(major: int, minor: int) -> str:
    """Target of a compute capability, with the suffix that enables all of the GPU's instructions: `sm_90a` for 9.0."""
    number = 10 * major + minor
    return f"sm_{number}{GPUS[number].suffix if number in GPUS else ''}"


def asked_for(target: str) -> str:
    """Target that launchers build for on a GPU of that target's capability: `sm_90a` for `sm_90`."""
    found = re.match(r"sm_(\d+)(\d)", target)
    return target_of(int(found[1]), int(found[2])) if found else target
