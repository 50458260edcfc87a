"""What machine code a cubin holds: how often each entry has each instruction. Needs cuobjdump and nvdisasm, and no GPU."""

import re
import shutil
import subprocess
import tempfile
from collections import Counter

from ksgen.toolchain import _packaged_toolkits

HINT = "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm"

_FUNCTION = re.compile(r"\s*Function : (\S+)")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@\S+\s+)?([A-Z][\w.]*)")  # address, predicate, opcode
_WIDTHS = {"8", "U8", "S8", "16", "U16", "S16", "64", "128"}  # how an access of other than 32 bits is marked


def find_cuobjdump() -> str | None:
    """cuobjdump with nvdisasm beside it, which it runs: from Python packages, else from PATH."""
    folders = [*(str(toolkit / "bin") for toolkit in _packaged_toolkits()), None]
    found = (shutil.which("cuobjdump", path=folder) for folder in folders if shutil.which("nvdisasm", path=folder))
    return next((each for each in found if each), None)


def instructions(cubin: bytes) -> dict[str, Counter[str]]:
    """{entry: {opcode with its modifiers, such as LDGSTS.E.BYPASS.128: how often}}."""
    tool = find_cuobjdump()
    if tool is None:
        raise FileNotFoundError(f"no cuobjdump with nvdisasm; {HINT}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True)
    return read(done.stdout)


def read(listing: str) -> dict[str, Counter[str]]:
    entries: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in listing.splitlines():
        if found := _FUNCTION.match(line):
            counts = entries.setdefault(found[1], Counter())
        elif found := _INSTRUCTION.match(line):
            counts[found[1]] += 1
    return entries


def count(counts: Counter[str], wanted: str) -> int:
    """How many are `wanted`: an opcode and those modifiers that matter. A 32 stands for an access without a width."""
    opcode, *modifiers = wanted.split(".")
    is_word = "32" in modifiers

    def matches(name: str) -> bool:
        first, *others = name.split(".")
        if first != opcode or (is_word and not _WIDTHS.isdisjoint(others)):
            return False
        return set(modifiers) - {"32"} <= set(others)

    return sum(number for name, number in counts.items() if matches(name))


def local_accesses(counts: Counter[str]) -> int:
    """Loads and stores of memory that stands in for registers."""
    return count(counts, "LDL") + count(counts, "STL")
