"""Whether memory lies where Linux was asked for huge pages."""

from pathlib import Path

import pytest

needs_huge_pages = pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").exists() or not Path("/proc/self/smaps").exists(),
    reason="this system has no transparent huge pages",
)


def asks_for_huge_pages(address: int) -> bool:
    """Whether the mapping that holds an address is advised to use huge pages."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if first == "VmFlags:" and is_here:
            return "hg" in rest
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_here = begin <= address < end
    raise AssertionError(f"nothing is mapped at {address:x}")
