"""Describes this machine's processor, and the named instruction sets for which binaries are built. Runs no compiler.

A binary for an instruction set runs on every processor that supports it. A binary for the host may use all instructions
of this processor.
"""

import ctypes
import functools
import hashlib
import platform
import re
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}  # names of other systems -> Linux's names
# macOS settings that list an x86's features
_MACOS = ("machdep.cpu.features", "machdep.cpu.extfeatures", "machdep.cpu.leaf7_features")
_LINUX_NAMES = {"avx1.0": "avx", "sse3": "pni", "lahf": "lahf_lm", "lzcnt": "abm"}  # macOS's names -> Linux's names

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16"}
_AMX = _BF16 | {"amx_bf16", "amx_tile"}
_AMX_FP16 = _AMX | {"amx_fp16"}
ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA = 158, 0x1023, 18  # x86-64 system call, its operation and its state component


@dataclass(frozen=True)
class InstructionSet:
    """Instructions that a group of processors has in common. `name` is what `--arch` accepts."""

    name: str
    machine: str
    features: frozenset[str]  # features that a processor must have, by Linux's names
    vector_bytes: int
    march: str  # value of -march for GCC and Clang, without the instructions in `added`
    added: tuple[str, ...] = ()  # instructions beyond `march`, as compilers name them
    built_by: str = ""  # compilers that support `added`
    dots: tuple[str, ...] = ()  # operands that vector instructions multiply in pairs, by `Operand.name`
    tiles: tuple[str, ...] = ()  # operands that matrix tiles multiply, by `Operand.name`

    @property
    def has_arm_vectors(self) -> bool:
        return self.machine == "aarch64"

    @property
    def target(self) -> str:
        """Target of its libraries on this operating system."""
        return f"{self.name} {platform.system()}"


INSTRUCTION_SETS = {  # per architecture, the best first
    each.name: each
    for each in (
        InstructionSet(
            "x86-64-v4-amx-fp16", "x86_64", _AMX_FP16, 64, "x86-64-v4", ("avx512bf16", "amx-tile", "amx-bf16",
                "amx-fp16"),
            "GCC from 13 on or Clang from 16 on", ("bf16",), ("bf16", "f16"),
        ),
        InstructionSet(
            "x86-64-v4-amx", "x86_64", _AMX, 64, "x86-64-v4", ("avx512bf16", "amx-tile", "amx-bf16"),
            "GCC from 11 on or Clang from 12 on", ("bf16",), ("bf16",),
        ),
        InstructionSet(
            "x86-64-v4-bf16", "x86_64", _BF16, 64, "x86-64-v4", ("avx512bf16",), "GCC from 10 on or Clang from 9 on",
            ("bf16",)
        ),
        InstructionSet("x86-64-v4", "x86_64", _V4, 64, "x86-64-v4"),
        InstructionSet("x86-64-v3", "x86_64", _V3, 32, "x86-64-v3"),
        InstructionSet("x86-64-v2", "x86_64", _V2, 16, "x86-64-v2"),
        InstructionSet("aarch64", "aarch64", frozenset({"asimd"}), 16, "armv8-a"),
    )
}  # fmt: skip


def machine() -> str:
    """This processor's architecture, by Linux's name."""
    return _MACHINES.get(platform.machine(), platform.machine())


def instruction_sets_here() -> tuple[InstructionSet, ...]:
    """Instruction sets that this processor has, the best first."""
    return tuple(each for each in INSTRUCTION_SETS.values() if not why_not_here(each))


def why_not_here(instruction_set: InstructionSet) -> str:
    """Reason why this processor does not run the instruction set; empty if it does."""
    if instruction_set.machine != machine():
        return f"this processor is {machine()}"
    if lacking := sorted(instruction_set.features - processor_features()):
        return f"this processor lacks {', '.join(lacking)}"
    return "the system does not permit matrix tiles" if instruction_set.tiles and not tiles_are_permitted() else ""


@functools.cache
def tiles_are_permitted() -> bool:
    """Whether Linux permits this process to use matrix tiles. The first call requests the permission.

    When a thread first uses tiles, the state that Linux saves for it grows by eight kilobytes.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return False
    status: int = ctypes.CDLL(None, use_errno=True).syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA)
    return status == 0


def set_of(target: str) -> InstructionSet | None:
    """Instruction set with this target on this operating system; None for any other target."""
    return next((each for each in INSTRUCTION_SETS.values() if each.target == target), None)


@functools.cache
def digest_of_processor() -> str:
    """Digest of this processor's instructions. Processors with the same instructions have equal digests."""
    return hashlib.sha256((_reported_features() or platform.processor()).encode()).hexdigest()[:8]


@functools.cache
def processor_features() -> frozenset[str]:
    """Instruction set extensions of this processor by Linux's names: avx2, avx512f, asimd."""
    return frozenset(_reported_features().split())


@functools.cache
def processor_name() -> str:
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(.+)$", CPUINFO.read_text(), re.MULTILINE):
            return found[1].strip()
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _reported_features() -> str:
    """Features as the system reports them, separated by spaces."""
    with suppress(OSError):
        if found := re.search(r"^(?:flags|Features)\s*:(.*)$", CPUINFO.read_text(), re.MULTILINE):
            return found[1]
    if platform.system() != "Darwin":
        return ""
    if machine() == "aarch64":
        # all of Apple's ARM processors have asimd; the name identifies the other features
        return f"asimd {_sysctl('machdep.cpu.brand_string')}"
    words = " ".join(_sysctl(name) for name in _MACOS).lower().split()
    return " ".join(_LINUX_NAMES.get(word, word.replace(".", "_")) for word in words)


def _sysctl(name: str) -> str:
    """Value of a macOS system setting; empty elsewhere."""
    with suppress(OSError, subprocess.SubprocessError):
        if platform.system() == "Darwin":
            return subprocess.run(
                ["sysctl", "-n", name], capture_output=True, text=True, check=True, timeout=10
            ).stdout.strip()
    return ""
