"""A text's machine code, run with all that it does counted: how often each piece ran, and which lines of the caches each access took.

GCC's assembly for a processor with matrix tiles is taken apart into pieces that run from end to end. Each gets a counter, and each
access to memory a call that says where it goes; instructions of tiles leave nothing but that call. So it runs where there are no
tiles, and what it counts is what would run there. What it computes is nonsense. What it counts must not depend on that.
"""

import ctypes
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

TRACE = Path(__file__).with_name("trace.c")
KINDS = ("load", "store", "modify", "past", "fetch", "fetch_near", "tile_load", "tile_store")
PIECES, ACCESSES, LEVELS, REGIONS = 1 << 14, 1 << 16, 4, 8  # as trace.c has them
_LABEL = re.compile(r"^[\w.$]+:")
_INSTRUCTION = re.compile(r"^\s+([a-z]\w*)\s*(.*?)\s*(?:#.*)?$")
_MEMORY = re.compile(r"[-+\w.@%:]*\((?:[^()]*)\)")
_DECORATION = re.compile(r"\{[^}]*\}")  # a mask, or that one element is repeated
_ENDS = re.compile(r"^(j\w+|ret|call|syscall)$")
_NOT_ACCESSES = ("lea", "nop", "call", "j", "push", "pop", "ldtilecfg", "sttilecfg", "ldmxcsr", "stmxcsr")
_READ_ONLY = ("cmp", "test", "ucomis", "comis", "vucomis", "vcomis", "vptest", "bt", "div", "idiv", "mul", "imul")
_DROPPED = ("ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tdp", "tileload", "tilestore")


@dataclass(frozen=True)
class Access:
    """One instruction's, to memory other than the stack."""

    piece: int
    kind: str
    operand: str
    bytes: int


@dataclass
class Piece:
    """Instructions that run one after the other."""

    function: str
    lines: list[str] = field(default_factory=list)  # without those of tiles
    tiles: list[str] = field(default_factory=list)  # names of those


@dataclass
class Code:
    pieces: list[Piece]
    accesses: list[Access]
    text: str  # with counters and calls


def taken_apart(assembly: str) -> Code:
    pieces: list[Piece] = []
    accesses: list[Access] = []
    written: list[str] = []
    function, begins, in_text = "", True, True
    for line in assembly.splitlines():
        if line.strip().startswith((".text", ".section")):
            in_text = ".text" in line
        if _LABEL.match(line):
            begins = True
            function = function if line.startswith(".L") else line.split(":")[0]
        found = None if line.lstrip().startswith((".", "#")) or _LABEL.match(line) else _INSTRUCTION.match(line)
        if not (found and in_text):
            written.append(line)
            continue
        name, operands = found[1], found[2]
        if begins:
            written.append(f"\tpushfq\n\tincq tiles_pieces+{8 * len(pieces)}(%rip)\n\tpopfq")
            pieces.append(Piece(function))
        begins = bool(_ENDS.match(name))
        piece = pieces[-1]
        if name.startswith(_DROPPED):
            piece.tiles.append(name)
        else:
            piece.lines.append(line)
        access = _access(len(pieces) - 1, name, operands)
        if access:
            written.append(_called(access, len(accesses)))
            accesses.append(access)
        if not name.startswith(_DROPPED):
            written.append(line)
    if len(pieces) > PIECES or len(accesses) > ACCESSES:
        raise ValueError(f"{len(pieces)} pieces and {len(accesses)} accesses; at most {PIECES} and {ACCESSES}")
    return Code(pieces, accesses, "\n".join(written) + "\n")


def _access(piece: int, name: str, operands: str) -> Access | None:
    found = _MEMORY.search(operands)
    if not found or name.startswith(_NOT_ACCESSES) or "(%rsp" in found[0] or "%fs:" in found[0]:
        return None
    if name.startswith("tile"):
        return Access(piece, "tile_load" if "load" in name else "tile_store", found[0], 64)
    if name.startswith("prefetch"):
        return Access(piece, "fetch_near" if name == "prefetcht0" else "fetch", found[0], 1)
    is_last = _DECORATION.sub("", operands).endswith(found[0])
    kind = "load"
    if is_last and "," in operands.replace(found[0], "") and not name.startswith(_READ_ONLY):
        kind = "past" if "movnt" in name else "store" if "mov" in name or "extract" in name or "cvtps2ph" in name else "modify"
    return Access(piece, kind, found[0], _bytes(operands))


def _bytes(operands: str) -> int:
    if "{1to" in operands:
        return 4
    return next((size for register, size in (("%zmm", 64), ("%ymm", 32), ("%xmm", 4)) if register in operands), 1)


def _called(access: Access, number: int) -> str:
    operand, stride = access.operand, "%rax"
    if access.kind.startswith("tile"):
        base, stride = (each.strip() for each in operand.strip("()").split(",")[:2])
        operand = f"({base})"
    return (
        f"\tpushq %rax\n\tpushq {stride}\n\tleaq {operand}, %rax\n\tpushq ${number}\n\tcall tiles_entry\n\tleaq 16(%rsp), %rsp\n\tpopq %rax"
    )


class Counted:
    """The library that such a text became, loaded. `names`: of the arrays that it watches."""

    def __init__(self, command: tuple[str, ...], options: tuple[str, ...], source: Path) -> None:
        folder = source.parent
        assembly = source.with_suffix(".s")
        options = tuple(each for each in options if each != "-shared")
        subprocess.run([*command, *options, "-mno-red-zone", "-S", str(source), "-o", str(assembly)], check=True)
        self.code = taken_apart(assembly.read_text())
        (folder / "counted.s").write_text(self.code.text)
        library = folder / "counted.so"
        made = [
            *command,
            "-shared",
            "-fPIC",
            "-O2",
            str(folder / "counted.s"),
            "-Wl,-Bsymbolic",
            str(_trace(command, folder)),
            "-o",
            str(library),
        ]
        subprocess.run(made, check=True)
        self.library = ctypes.CDLL(str(library))
        kinds = (ctypes.c_int32 * ACCESSES).in_dll(self.library, "tiles_kinds")
        sizes = (ctypes.c_int32 * ACCESSES).in_dll(self.library, "tiles_bytes")
        for number, access in enumerate(self.code.accesses):
            kinds[number], sizes[number] = KINDS.index(access.kind), access.bytes

    def watch(self, arrays: dict[str, tuple[int, int]]) -> None:
        """Arrays by name, with where each begins and ends."""
        self.names = tuple(arrays)
        bounds = (ctypes.c_uint64 * (2 * REGIONS)).in_dll(self.library, "tiles_bounds")
        for number, (begin, end) in enumerate(arrays.values()):
            bounds[2 * number], bounds[2 * number + 1] = begin, end

    def forget(self) -> None:
        self.library.tiles_forget()

    def executions(self) -> list[int]:
        return list((ctypes.c_uint64 * PIECES).in_dll(self.library, "tiles_pieces")[: len(self.code.pieces)])

    def lines(self) -> list[tuple[int, ...]]:
        """Of each access: from the first level, the second, memory; and driven out."""
        return self._table("tiles_lines", LEVELS)

    def regions(self) -> list[tuple[int, ...]]:
        """Of each access: how often it went to each array."""
        return self._table("tiles_regions", REGIONS)

    def divide(self, phases: Sequence[int]) -> None:
        """Which phase each access belongs to, so that visits are counted."""
        given = (ctypes.c_int32 * ACCESSES).in_dll(self.library, "tiles_phases")
        for number, phase in enumerate(phases):
            given[number] = phase

    def visits(self) -> list[int]:
        return list((ctypes.c_uint64 * REGIONS).in_dll(self.library, "tiles_visits"))

    def _table(self, name: str, width: int) -> list[tuple[int, ...]]:
        flat = (ctypes.c_uint64 * (ACCESSES * width)).in_dll(self.library, name)[: len(self.code.accesses) * width]
        return [tuple(flat[at : at + width]) for at in range(0, len(flat), width)]


def _trace(command: tuple[str, ...], folder: Path) -> Path:
    """What is called, compiled without vector registers."""
    made = folder / "trace.o"
    subprocess.run([*command, "-x", "c", "-O2", "-fPIC", "-mgeneral-regs-only", "-c", str(TRACE), "-o", str(made)], check=True)
    return made
