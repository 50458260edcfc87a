"""The machine code in a cubin: how often each entry has each instruction. Needs cuobjdump and nvdisasm, and no GPU."""

import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import pytest

from ksgen.build.build import Binary, build
from ksgen.build.toolchain import _packaged_toolkits, find_compiler
from ksgen.errors import ToolchainError
from tests.emulator.build import cache_folder

HINT = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)")  # address, predicate, opcode
_FLOW = re.compile(r"(@\S+\s+)?([A-Z0-9]+)(?:.*?(0x[0-9a-f]+) ;)?")  # predicate, opcode, where a branch goes
_TARGET = re.compile(r"(0x[0-9a-f]+) ;$")  # where a branch goes
INSTRUCTION_BYTES = 16
_WIDTHS = {"8", "U8", "S8", "16", "U16", "S16", "64", "128"}  # how an access of other than 32 bits is marked


# how many an instruction is, of floats or tiles
PRODUCTS = {"FFMA": 1, "FFMA2": 2, "DFMA": 1, "HMMA": 1, "HGMMA": 1, "QGMMA": 1}
KINDS = {  # of instructions, by how their opcodes begin; what none of them names computes addresses and branches
    "products": tuple(PRODUCTS),
    "shared": ("LDS", "STS", "SHFL"),
    "global": ("LDG", "STG", "UTMALDG", "UTMASTG", "UBLKCP", "ATOM", "RED"),
    "rounding": ("F2F", "HADD", "I2F", "F2I"),
    "waiting": (
        "BAR",
        "DEPBAR",
        "LDGDEPBAR",
        "SYNCS",
        "WARP",
        "MEMBAR",
        "ERRBAR",
        "CGAERRBAR",
        "FENCE",
        "CCTL",
        "UCGABAR",
        "B2R",
    ),
}


def find_cuobjdump() -> str | None:
    """Find cuobjdump with nvdisasm next to it, which it runs, in Python packages or else on PATH."""
    folders = [*(str(toolkit / "bin") for toolkit in _packaged_toolkits()), None]
    found = (shutil.which("cuobjdump", path=folder) for folder in folders if shutil.which("nvdisasm", path=folder))
    return next((each for each in found if each), None)


def compiled(text: str, entry: str, target: str) -> Binary:
    """Compile with the CUDA compiler, or reuse the cached binary. Skips the test without a compiler; a refused source
    is an error.
    """
    try:
        compiler = find_compiler()
    except ToolchainError as error:
        pytest.skip(f"no CUDA compiler: {error}")
    return build(text, entry, target, compiler)


def needed_disassembler() -> None:
    """Skips the test if there is none."""
    if find_cuobjdump() is None:
        pytest.skip(f"no cuobjdump with nvdisasm; {HINT}")


def instructions(cubin: bytes) -> dict[str, Counter[str]]:
    """{entry: {opcode with its modifiers, such as LDGSTS.E.BYPASS.128: how often}}."""
    return read(listing_of(cubin))


def listing_of(cubin: bytes) -> str:
    """What cuobjdump says of it: kept, with what tests compile, since it takes a second."""
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError(f"no cuobjdump with nvdisasm; {HINT}")
    kept = cache_folder() / f"listing-{hashlib.sha256(_version(tool) + cubin).hexdigest()[:32]}"
    if not kept.exists():
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            file, listing = Path(folder, "cubin"), Path(folder, "listing")
            file.write_bytes(cubin)
            listing.write_bytes(subprocess.run([tool, "-sass", file], capture_output=True, check=True).stdout)
            listing.rename(kept)
    return kept.read_text(encoding="utf-8")


@functools.cache
def _version(tool: str) -> bytes:
    return subprocess.run([tool, "--version"], capture_output=True, check=True).stdout


def read(listing: str) -> dict[str, Counter[str]]:
    entries: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in listing.splitlines():
        if found := _FUNCTION.match(line):
            counts = entries.setdefault(found[1], Counter())
        elif found := _INSTRUCTION.match(line):
            counts[found[1]] += 1
    return entries


def registers_after(listing: str, entry: str, opcode: str) -> int:
    """Registers, by the highest one named, of everything that a warp of an entry can reach after an instruction."""
    reached = _reached(listing, entry, begin=opcode)
    return 1 + max((int(each) for words in reached for each in re.findall(r"(?<!\w)R(\d+)", words)), default=-1)


def opcodes_before(listing: str, entry: str, opcode: str) -> set[str]:
    """The opcodes of everything that a warp of an entry can reach with no instruction of that opcode before."""
    return {_FLOW.match(words)[2] for words in _reached(listing, entry, end=opcode)}  # type: ignore[index]


def main_loop(listing: str, entry: str) -> Counter[str]:
    """The loop with the most products, the innermost of several; the whole entry if no loop has any."""
    found = _instructions(listing, entry)
    first, last = _main_loop(found)
    return _opcodes(found, first, last)


def outside_main_loop(listing: str, entry: str) -> int:
    """Instructions that a warp executes before and after the main loop, for a whole tile of aligned arrays.

    They are counted on the path that moves the most bytes with the fewest instructions. Other loops count once.
    """
    found = _instructions(listing, entry)
    (begin, _), (end, _) = found[0], found[-1]
    first, last = _main_loop(found)
    left = [target for address, words in found if first <= address <= last and (target := _branch(words)) > last]
    after = last + INSTRUCTION_BYTES if _is_conditional(dict(found)[last]) else min(left)
    return _executed(found, begin, first) + _executed(found, after, end + INSTRUCTION_BYTES)


def _executed(found: list[tuple[int, str]], begin: int, end: int) -> int:
    """Instructions of the path from one address to another, or to the exit if the end is beyond all of them."""
    beyond = found[-1][0] + INSTRUCTION_BYTES
    best = {end: (0, 0)}  # by address: bytes moved from it on, and the number of instructions, negative
    for address, words in reversed(found):
        (name, *modifiers), target = _opcode(words).split("."), _branch(words)
        ahead = [beyond] if name == "EXIT" else [target] if target > address else []
        if _is_conditional(words) or name not in ("EXIT", "BRA", "RET"):
            ahead.append(address + INSTRUCTION_BYTES)
        paths = [best[each] for each in ahead if each in best]
        if paths and address < end:
            moved, instructions = max(paths)
            width = {"128": 16, "64": 8}.get(modifiers[-1] if modifiers else "", 4) if name in ("LDGSTS", "STG") else 0
            best[address] = moved + width, instructions - 1
    return -best[begin][1]


def _main_loop(found: list[tuple[int, str]]) -> tuple[int, int]:
    """Addresses of its first and last instruction."""
    whole = found[0][0], found[-1][0]
    loops = [(target, address) for address, words in found if 0 <= (target := _branch(words)) < address]
    counted = [(products(each), -each.total(), ends) for ends in loops if products(each := _opcodes(found, *ends))]
    return max(counted, key=lambda loop: loop[:2])[2] if counted else whole


def _opcode(words: str) -> str:
    return _INSTRUCTION.match(f" /*0000*/ {words}")[1]  # type: ignore[index]


def _opcodes(found: list[tuple[int, str]], first: int, last: int) -> Counter[str]:
    return Counter(_opcode(words) for address, words in found if first <= address <= last)


def _is_conditional(words: str) -> bool:
    """Whether a predicate decides, in front of the instruction or as the first operand of a uniform branch."""
    return words.startswith("@") or re.match(r"BRA\.U !?UP", words) is not None


def _branch(words: str) -> int:
    """Address to which the instruction branches; -1 if it is no branch."""
    target = _TARGET.search(words) if _opcode(words).partition(".")[0] == "BRA" else None
    return int(target[1], 16) if target else -1


def products(counts: Counter[str]) -> int:
    return sum(number * count(counts, each) for each, number in PRODUCTS.items())


def by_kind(counts: Counter[str]) -> dict[str, int]:
    """How many instructions of each of KINDS there are, and `addresses`, the rest."""
    found = dict.fromkeys([*KINDS, "addresses"], 0)
    for name, number in counts.items():
        found[next((kind for kind, begins in KINDS.items() if name.startswith(begins)), "addresses")] += number
    return found


def software_rounding(listing: str, entry: str) -> int:
    """Additions of what bfloat16 is rounded by where no instruction does it."""
    return sum("0x7fff" in re.split(r"[\s,;]+", words) and "ADD" in words for _, words in _instructions(listing, entry))


def _instructions(listing: str, entry: str) -> list[tuple[int, str]]:
    """Address and words of each instruction of an entry."""
    (text,) = [
        part for part in re.split(r"^\s*Function : ", listing, flags=re.MULTILINE)[1:] if part.split()[0] == entry
    ]
    return [(int(address, 16), words) for address, words in re.findall(r"/\*([0-9a-f]{4,})\*/\s+(.*?;)", text)]


def _reached(listing: str, entry: str, begin: str = "", end: str = "nothing") -> list[str]:
    """Every instruction of an entry that a warp can reach from the first with `begin` in it, not going past any with
    `end`.
    """
    found = _instructions(listing, entry)
    places = {address: number for number, (address, _) in enumerate(found)}
    start = next(number for number, (_, words) in enumerate(found) if begin in words)
    waiting, seen = [start], set()
    while waiting:
        number = waiting.pop()
        if number in seen or number >= len(found) or end in found[number][1]:
            continue
        seen.add(number)
        predicate, name, target = _FLOW.match(found[number][1]).groups()  # type: ignore[union-attr]
        if name in ("BRA", "CALL") and target:
            waiting.append(places[int(target, 16)])
        if predicate or name not in ("BRA", "EXIT", "RET"):
            waiting.append(number + 1)
    return [found[number][1] for number in seen]


def count(counts: Counter[str], wanted: str) -> int:
    """How many are `wanted`: an opcode with the modifiers that matter. A 32 stands for an access without a width."""
    opcode, *modifiers = wanted.split(".")
    is_word = "32" in modifiers

    def matches(name: str) -> bool:
        first, *others = name.split(".")
        if first != opcode or (is_word and not _WIDTHS.isdisjoint(others)):
            return False
        return set(modifiers) - {"32"} <= set(others)

    return sum(number for name, number in counts.items() if matches(name))


def wide_fences(counts: Counter[str]) -> list[str]:
    """Fences that wait until the whole GPU, or the system, sees what was written, and what comes with them."""
    waits = {"ERRBAR", "CGAERRBAR"}
    return [
        name
        for name in counts
        if name in waits or (name.startswith("MEMBAR") and not {"GPU", "SYS"}.isdisjoint(name.split(".")))
    ]


def local_accesses(counts: Counter[str]) -> int:
    """Loads and stores of spilled registers."""
    return count(counts, "LDL") + count(counts, "STL")
