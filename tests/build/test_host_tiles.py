"""Tiles as texts' words play them: as exact arithmetic has them, in the manual's order; and what they leave of a
thread's own state.
"""

import ctypes
import platform
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ksgen.build.host import HostCompiler, find_host_compiler, host_target, source_of
from ksgen.devices.native import NativeDevice
from ksgen.emit.render import render
from ksgen.families.amx.chain import AmxChainConstants
from ksgen.families.amx.shape import AmxConstants
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.emulated_tiles import library, needs_emulation, product, rounded

TYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
KINDS = ("ordinary", "near the least normal", "subnormal", "near the largest", "not finite")


@pytest.fixture
def emulated(tmp_path: Path) -> ctypes.CDLL:
    return library(tmp_path)


class State(ctypes.Structure):
    _fields_ = (
        ("palette", ctypes.c_uint8), ("start_row", ctypes.c_uint8), ("reserved", ctypes.c_uint8 * 14),
        ("row_bytes", ctypes.c_uint16 * 16), ("rows", ctypes.c_uint8 * 16),
    )  # fmt: skip


def aligned() -> State:
    """Return a state at a multiple of 64 bytes, as the instructions require."""
    memory = (ctypes.c_uint8 * 128)()
    state = State.from_buffer(memory, -ctypes.addressof(memory) % 64)
    assert ctypes.sizeof(state) == 64
    return state


def drawn(kind: str, operand: str, random: np.random.Generator, *shape: int) -> np.ndarray:
    """Operands whose products, or which themselves, are of a kind; as bits of 16."""
    values = random.standard_normal(shape)
    if kind == "near the least normal":
        values *= (
            2.0 ** random.integers(-67, -63, shape) if operand == "bf16" else 2.0 ** random.integers(-24, -10, shape)
        )
    if kind == "subnormal":
        values *= 2.0**-127 if operand == "bf16" else 2.0**-20
    if kind == "near the largest":
        values *= 2.0**63 if operand == "bf16" else 2.0**14
    with np.errstate(over="ignore"):
        found = values.astype(TYPES[operand])
    if kind == "not finite":
        found[random.random(shape) < 0.01] = np.inf
        found[random.random(shape) < 0.003] = -np.inf
        found[random.random(shape) < 0.003] = np.nan
    return found


def arguments(kind: str, operand: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng([KINDS.index(kind), len(operand)])
    a, b = drawn(kind, operand, random, 16, 32), drawn(kind, operand, random, 16, 16, 2)
    c = random.standard_normal((16, 16)).astype(np.float32)
    if kind in ("near the least normal", "subnormal"):
        c *= np.float32(2.0**-126)
        b = drawn("ordinary", operand, random, 16, 16, 2) if kind == "subnormal" else b
    if kind == "near the largest":
        c *= np.float32(1e38)
    return a, b, c


def multiplied(emulated: Any, operand: str, a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    before, result = aligned(), c.copy()
    emulated.begin(ctypes.byref(before))
    getattr(emulated, f"multiply_{operand}")(a.ctypes, b.ctypes, result.ctypes)
    emulated.end(ctypes.byref(before))
    return result


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operand", TYPES)
def test_products_are_those_of_exact_arithmetic_bit_by_bit(operand: str, kind: str, emulated: ctypes.CDLL) -> None:
    """Rounded after each multiply-add of two chains, then their sum, then the sum with what was there; subnormals
    are zeros.
    """
    a, b, c = arguments(kind, operand)
    got = multiplied(emulated, operand, a, b, c)
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = product(a.astype(np.float32), b.astype(np.float32), c)
        np.testing.assert_array_equal(got, wanted)
        plain = c + np.einsum("mke,kne->mn", a.astype(np.float64).reshape(16, 16, 2), b.astype(np.float64)).astype(
            np.float32
        )
    if kind == "ordinary":
        assert (got != plain).any()  # the order is seen
    if kind == "near the least normal":
        assert ((got == 0) != (plain == 0)).any() or operand == "f16"  # whose subnormals are none of float32
    if kind == "not finite":
        assert np.isnan(got).any()
        assert np.isinf(got).any()


def test_what_is_rounded_up_to_the_least_normal_is_no_zero_and_what_is_not_is() -> None:
    """The model decides by rounding with an unbounded exponent."""
    from fractions import Fraction

    least = Fraction(2) ** -126
    assert rounded(least) == 2.0**-126
    assert rounded(least * (1 - Fraction(2) ** -25)) == 2.0**-126  # a tie, to even
    assert rounded(least * (1 - Fraction(2) ** -25) * (1 - Fraction(2) ** -60)) == 0


def test_the_least_normal_is_decided_as_the_model_decides_it(emulated: ctypes.CDLL) -> None:
    """The sums lie one place below the least normal number, at a tie, and next to the tie."""
    a, b, c = np.zeros((16, 32), TYPES["bf16"]), np.zeros((16, 16, 2), TYPES["bf16"]), np.zeros((16, 16), np.float32)
    a[:, 0], a[:, 2] = 2.0**-63, -(2.0**-75)
    b[0, :, 0] = 2.0**-63
    b[1, :, 0] = [2.0 ** -(75 + n) for n in range(16)]
    got = multiplied(emulated, "bf16", a, b, c)
    np.testing.assert_array_equal(got, product(a.astype(np.float32), b.astype(np.float32), c))
    assert {float(each) for each in got.flat} == {0.0, 2.0**-126}


def test_a_thread_keeps_its_modes_of_rounding_and_its_flags(emulated: ctypes.CDLL) -> None:
    before = emulated.modes()
    try:
        emulated.set_modes(0x5F80)  # upwards
        a, b, c = arguments("not finite", "bf16")
        with np.errstate(all="ignore"):
            wanted = product(a.astype(np.float32), b.astype(np.float32), c)
        emulated.set_modes(0x5F80)
        got = multiplied(emulated, "bf16", a, b, c)
        assert emulated.modes() == 0x5F80
    finally:
        emulated.set_modes(before)
    np.testing.assert_array_equal(got, wanted)


def test_tiles_are_loaded_and_stored_by_rows(emulated: ctypes.CDLL) -> None:
    memory, before = np.arange(40 * 16, dtype=np.uint8).reshape(16, 40).repeat(4, 1), aligned()
    into = np.full((16, 100), 7, np.uint8)
    emulated.begin(ctypes.byref(before))
    emulated.load_and_store(memory.ctypes, ctypes.c_long(160), into.ctypes, ctypes.c_long(100), 0)
    np.testing.assert_array_equal(into[:, :64], memory[:, :64])
    assert (into[:, 64:] == 7).all()
    emulated.load_and_store(memory.ctypes, ctypes.c_long(160), into.ctypes, ctypes.c_long(100), 1)
    assert (into[:, :64] == 0).all()
    emulated.end(ctypes.byref(before))


# ---- a thread's tiles are as they were found


def state_of(emulated: Any) -> bytes:
    state = aligned()
    emulated.read_state(ctypes.byref(state))
    return bytes(state)


@pytest.mark.parametrize("found", ["none", "another library's", "the same"])
def test_tiles_are_left_as_they_were_found(found: str, emulated: ctypes.CDLL) -> None:
    other, before = aligned(), aligned()
    if found != "none":
        other.palette = 1
        for tile in range(8):
            other.row_bytes[tile], other.rows[tile] = (64, 16) if found == "the same" else (32, 8)
        emulated.configure(ctypes.byref(other))
    was = state_of(emulated)
    assert (was == bytes(64)) == (found == "none")
    emulated.begin(ctypes.byref(before))
    assert state_of(emulated)[:1] == b"\x01"
    assert state_of(emulated)[16:32] == (64).to_bytes(2, "little") * 8
    assert state_of(emulated)[48:56] == b"\x10" * 8
    emulated.end(ctypes.byref(before))
    assert state_of(emulated) == was


def test_tiles_without_configuration_are_an_illegal_instruction(tmp_path: Path) -> None:
    needs_emulation()
    code = f"""
import numpy as np, pathlib
from tests.support.emulated_tiles import library
found = library(pathlib.Path({str(tmp_path)!r}))
found.multiply_bf16(*(np.zeros(1024, np.uint8).ctypes for _ in range(3)))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, check=False)
    assert done.returncode == -signal.SIGILL, done.stderr


@pytest.mark.parametrize("operand", TYPES)
def test_where_there_are_tiles_they_do_the_same_bit_by_bit(operand: str, emulated: ctypes.CDLL, tmp_path: Path) -> None:
    if operand not in NativeDevice(find_host_compiler()).limits.tiles:
        pytest.skip(f"this processor has no tiles of {operand}, or they may not be used")
    (tmp_path / "own").mkdir()
    own = library(tmp_path / "own", "")
    for kind in KINDS:
        a, b, c = arguments(kind, operand)
        np.testing.assert_array_equal(
            multiplied(own, operand, a, b, c), multiplied(emulated, operand, a, b, c), err_msg=kind
        )


# ---- a text's instructions

FOR_TILES = ("-march=x86-64-v4", "-mavx512bf16", "-mamx-tile", "-mamx-bf16")
ROUNDED = re.compile(r"\b(tileloadd|tdpbf16ps|tilezero|tilestored|ldtilecfg|sttilecfg|tilerelease)\b(.*)")


def disassembled(kernel: KernelSpec, panel: int, folder: Path, more: tuple[str, ...] = ()) -> list[str]:
    """The instructions of a text for tiles, and the jumps among them; at each an address."""
    if not shutil.which("objdump") or platform.machine() != "x86_64":
        pytest.skip("needs objdump (apt-get install binutils), on x86-64")
    needs_emulation()
    compiler: HostCompiler = find_host_compiler()
    constants = AmxConstants(64, 32, 1, panel, 0, (kernel.pattern.c + 31) // 32)
    of_chain = AmxChainConstants(64, f"32 {panel} {constants.depth}, 32 1 2", 0)
    source = render(kernel, of_chain if kernel.job == "chain" else constants, dialect="opencl")
    (folder / "k.cpp").write_text(source_of(source.text, source.entries))
    options = [each for each in compiler.options(host_target()) if not each.startswith("-m")]
    made = subprocess.run(
        [*compiler.command, *options, *FOR_TILES, *more, "k.cpp", "-o", "k.so"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    if made.returncode and "unrecognized command-line option" in made.stderr:
        pytest.skip(f"{compiler.version} has no tiles")
    assert made.returncode == 0, made.stderr
    listed = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", folder / "k.so"], capture_output=True, text=True, check=True
    ).stdout
    return listed.splitlines()


def loops(lines: list[str]) -> list[list[str]]:
    """Return the innermost loops with products, in order: each from a jump's target to the jump back."""
    at = {found[1]: number for number, line in enumerate(lines) if (found := re.match(r"\s+([0-9a-f]+):", line))}
    spans = []
    for number, line in enumerate(lines):
        found = re.search(r"\bj\w+\s+([0-9a-f]+)", line)
        if found and at.get(found[1], number + 1) <= number:
            spans.append((at[found[1]], number))
    spans = [(begin, end) for begin, end in spans if "tdpbf16ps" in tile_words(lines[begin : end + 1])]
    inner = [
        each
        for each in spans
        if not any(each != other and each[0] <= other[0] and other[1] <= each[1] for other in spans)
    ]
    return [lines[begin : end + 1] for begin, end in inner]


def tile_words(lines: list[str]) -> list[str]:
    return [found[1] for line in lines if (found := ROUNDED.search(line))]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "layout", "panel", "loads", "products"),
    [
        ("bfloat16", "bsf", 0, 4, 4),
        ("bfloat16", "bsf", 1, 4, 4),
        ("bfloat16", "bsl", 2, 4, 4),
        ("bf16x6", "bsf", 2, 14, 24),
        ("tf32x3", "bsl", 1, 14, 24),
    ],
)
def test_each_tile_that_is_loaded_is_multiplied_twice(
    precision: str, layout: str, panel: int, loads: int, products: int, tmp_path: Path
) -> None:
    """The innermost loop: four products for four loads; of operands in three parts, six times as many for at most as
    many.
    """
    # more than compilers unroll
    lines = disassembled(KernelSpec(Pattern(2, 64, 2048, 1), precision, layout), panel, tmp_path)
    found = [tile_words(loop) for loop in loops(lines)]
    whole = [words for words in found if words.count("tdpbf16ps") == products]
    assert whole, [words for words in found if words]
    assert {words.count("tileloadd") for words in whole} == {loads}
    every = tile_words(lines)
    assert {"sttilecfg", "ldtilecfg", "tilerelease", "tilezero", "tilestored"} <= set(every)
    assert any(re.search(r"vcvtne2?ps2bf16\s+%zmm\d+,%[yz]mm\d+", line) for line in lines)  # by the instruction for it
    assert not any("EMULATED" in line or "multiply_emulated" in line for line in lines)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "layout", "loads", "products"), [("bfloat16", "bsf", 4, 4), ("bf16x6", "bsl", 14, 24)]
)
def test_so_it_is_in_a_chain(precision: str, layout: str, loads: int, products: int, tmp_path: Path) -> None:
    """Compilers do not unroll the loop of such a factor. Neither factor becomes a function call."""
    kernel = KernelSpec((Pattern(2, 64, 2048, 1), Pattern(1, 64, 64, 2)), precision, layout)
    lines = disassembled(kernel, int(layout == "bsl"), tmp_path)
    whole = [words for loop in loops(lines) if (words := tile_words(loop)).count("tdpbf16ps") == products]
    assert whole
    assert {words.count("tileloadd") for words in whole} == {loads}
    assert {"sttilecfg", "ldtilecfg", "tilerelease"} <= set(tile_words(lines))


def test_the_order_of_operands_is_the_manuals(tmp_path: Path) -> None:
    """Rows are the first source: T, A, B as Intel writes them are tmm0, tmm4, tmm6."""
    lines = disassembled(KernelSpec(Pattern(1, 16, 32, 1), "bfloat16"), 1, tmp_path)
    assert any(re.search(r"tdpbf16ps\s+%tmm6,%tmm4,%tmm0", line) for line in lines)


def test_the_text_says_which_words_it_needs() -> None:
    source = render(
        KernelSpec(Pattern(1, 16, 32, 1), "bfloat16"), AmxConstants(32, 32, 1, 1, 0, 1), family="amx", dialect="opencl"
    )
    assert "struct tiles_bf16" in source_of(source.text, source.entries)
    plain = render(KernelSpec(Pattern(1, 16, 32, 1)), family="simt", dialect="opencl")
    assert "struct tiles_bf16" not in source_of(plain.text, plain.entries)
