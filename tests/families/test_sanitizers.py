"""The C++ that processors' texts become, and the threads that run it, under the compiler's sanitizers: no access
outside of arrays, no undefined behaviour, no data race. Results too.
"""

import functools
import subprocess
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from ksgen.build.host import find_host_compiler
from ksgen.devices.base import DeviceLimits
from ksgen.errors import ToolchainError
from tests.support.emulated_tiles import needs_emulation
from tests.support.processor_cases import AMX, CHAIN, VECTOR, VECTOR_GRADIENT, Case, of_vectors, passes, tiles
from tests.support.program_device import ProgramCompiler, ProgramDevice, ProgramError

LIMITS = DeviceLimits(2**18, 1024, 2, is_cpu=True, vector_bytes=32)
OPTIONS = ("-O1", "-march=native", "-fno-sanitize-recover=all", "-DEMULATED_TILES")
SANITIZERS = {"address": "-fsanitize=address,undefined", "thread": "-fsanitize=thread"}
CASES = [
    VECTOR[0],
    replace(VECTOR[2], constants=tiles("outputs", 4, 2, 1, 4, 3, 1)),
    VECTOR[4],
    *VECTOR[8:],  # pairs, and slices
    of_vectors((1, 50_000, 1, 1), 5, tiles("batch", 8, 1, 1, 8, 1, 1)),  # features times columns exceed 32 bits
    *CHAIN[1:],
    *VECTOR_GRADIENT,
    *AMX,
]
# What the first ring takes, with one case of test_amx.py: each family once, and what shares its work out to threads.
ONE_OF_EACH = [
    ("address", VECTOR[0]),
    ("address", CHAIN[1]),
    ("address", VECTOR_GRADIENT[0]),
    ("thread", VECTOR_GRADIENT[0]),
]


@functools.cache
def why_not(sanitizer: str, folder: Path) -> str:
    """Why programs under a sanitizer do not run here."""
    try:
        command = find_host_compiler().command
    except ToolchainError as absent:
        return str(absent)
    (folder / "t.cpp").write_text("int main() { return 0; }\n")
    for step in ([*command, *OPTIONS, SANITIZERS[sanitizer], "t.cpp", "-o", "t"], ["./t"]):
        done = subprocess.run(step, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"no sanitizer of the kind {sanitizer}: {' '.join(done.stderr.split())[:200]}"
    return ""


def device(sanitizer: str, folder: Path) -> ProgramDevice:
    if why := why_not(sanitizer, folder):
        pytest.skip(why)
    return ProgramDevice(
        ProgramCompiler(find_host_compiler().command, (*OPTIONS, SANITIZERS[sanitizer])), folder, LIMITS
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sanitizer", "case"),
    [
        pytest.param(
            sanitizer,
            case,
            id=f"{case}-{sanitizer}",
            marks=() if (sanitizer, case) in ONE_OF_EACH else pytest.mark.second,
        )
        for sanitizer, case in product(SANITIZERS, CASES)
    ],
)
def test_nothing_is_reported(sanitizer: str, case: Case, tmp_path: Path) -> None:
    if case in AMX:
        needs_emulation()
    assert all(passes(device(sanitizer, tmp_path), case))


BROKEN = """
ENTRY(1, 1)
void broken(int* values) {{ {statement} }}
"""


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("sanitizer", "statement", "says"),
    [
        ("address", "values[4] = 1;", "heap-buffer-overflow"),
        (
            "address",
            "values[0] = 0x7fffffff; values[1] = values[0] + 1 + (int)get_group_id(0);",
            "signed integer overflow",
        ),
        (
            "thread",
            "if (get_group_id(0)) values[0] = 1; else while (*(volatile int*)values == -1) {}",
            "data race",
        ),
    ],
)
def test_what_is_wrong_is_reported(sanitizer: str, statement: str, says: str, tmp_path: Path) -> None:
    """The sources access beyond an array, overflow, or let two work groups race for one address."""
    programs = device(sanitizer, tmp_path)
    text = "#define ENTRY(X, Y) __kernel\n" + BROKEN.format(statement=statement)
    handle = programs.load(programs.compiler().compile(text, "broken", programs.target), "broken", 0)
    with pytest.raises(ProgramError, match=says):
        programs.launch(handle, 8, 1, 0, (programs.allocate(16),), None)
