"""What is counted of kernels by matrix tiles: all their products, each line of the arrays once, and nothing that they do not do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from benchmarks.tiles.__main__ import CHAIN_FAMILY, CPU, FAMILY, MARCH, counted, main
from benchmarks.tiles.counted import taken_apart
from benchmarks.tiles.cycles import SCHEDULER, Counts, Phase
from ksgen.build.host import find_host_compiler, processor_features
from ksgen.errors import ToolchainError
from ksgen.families.amx.cycles import dots
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

ASSEMBLY = """
\t.text
walk:
\tmovq\t8(%rsp), %rax
.L2:
\ttileloadd (%rdi,%rsi,1), %tmm4
\ttdpbf16ps %tmm6, %tmm4, %tmm0
\tvmovups\t64(%rdx), %zmm1
\tvaddps\t(%rcx){1to16}, %zmm1, %zmm1
\tvmovntps\t%zmm1, (%rcx)
\taddq\t$1, (%r8)
\tprefetcht0\t64(%rdx)
\tjne\t.L2
\tret
"""


def needs_counting(folder: Path) -> None:
    if "avx512_bf16" not in processor_features():
        pytest.skip("texts are counted on a processor with AVX-512 BF16")
    if not shutil.which(SCHEDULER):
        pytest.skip(f"needs {SCHEDULER} (apt-get install llvm-19)")
    try:
        compiler = find_host_compiler()
    except ToolchainError as absent:
        pytest.skip(str(absent))
    (folder / "empty.cpp").write_text("")
    if subprocess.run([*compiler.command, *MARCH, "-S", "empty.cpp"], cwd=folder, capture_output=True, check=False).returncode:
        pytest.skip(f"{compiler.version} knows no processor with tiles")


def test_assembly_is_taken_apart() -> None:
    code = taken_apart(ASSEMBLY)
    assert [(len(piece.lines), piece.tiles) for piece in code.pieces] == [(1, []), (6, ["tileloadd", "tdpbf16ps"]), (1, [])]
    told = [(access.kind, access.operand, access.bytes) for access in code.accesses]
    assert told[:2] == [("tile_load", "(%rdi,%rsi,1)", 64), ("load", "64(%rdx)", 64)]
    assert [kind for kind, *_ in told[2:]] == ["load", "past", "modify", "fetch_near"]
    assert "tileloadd" not in code.text
    assert code.text.count("call tiles_entry") == len(code.accesses)
    assert code.text.count("incq tiles_pieces") == len(code.pieces)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "layout"), [("bfloat16", "bsf"), ("bf16x6", "bsl")])
def test_all_products_are_counted_and_each_line_of_the_arrays(precision: str, layout: str, tmp_path: Path) -> None:
    needs_counting(tmp_path)
    kernel, batch = KernelSpec(Pattern(1, 64, 64, 2), precision, layout), 96 * 64
    constants = FAMILY.default(kernel, CPU, batch)
    found, grid = counted(kernel, constants, batch), FAMILY.geometry(kernel, constants, batch).grid
    assert found.total("dots") * grid == dots(FAMILY.shape(kernel, constants), batch)
    arrays = (kernel.bytes(batch) - kernel.pattern.weight_count * kernel.item_bytes) / 64
    assert found.total("memory_lines") * grid == pytest.approx(arrays, rel=0.1)  # X read once and Y written past the caches
    assert found.beside == ("copy", "store")


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "layout"), [("bfloat16", "bsf"), ("bf16x6", "bsl")])
def test_a_chains_launch_is_counted_too(precision: str, layout: str, tmp_path: Path) -> None:
    """All products of both factors; of X and Y each line once, and none of what lies between."""
    needs_counting(tmp_path)
    kernel, batch = KernelSpec((Pattern(2, 64, 64, 1), Pattern(1, 64, 64, 2)), precision, layout), 96 * 64
    constants = CHAIN_FAMILY.default(kernel, CPU, batch)
    found, grid = counted(kernel, constants, batch), CHAIN_FAMILY.geometry(kernel, constants, batch).grid
    assert found.total("dots") * grid == sum(dots(each, batch) for each in CHAIN_FAMILY.shape(kernel, constants).factors)
    arrays = batch * (kernel.in_features + kernel.pattern.out_features) * kernel.item_bytes / 64
    assert found.total("memory_lines") * grid == pytest.approx(arrays, rel=0.1)
    assert found.total("far_lines") == 0


def test_a_layer_that_is_one_launch_is_counted_beside_a_launch_for_each(tmp_path: Path) -> None:
    needs_counting(tmp_path)
    done = CliRunner().invoke(main, ["--layers", "1", "--precision", "bfloat16", "--layout", "bsl", "--batch", "2048"])
    told = re.fullmatch(r"vit attention bfloat16 bsl: [\d.]+; (.*) \| (.*)\n", done.output)
    assert told, done.output
    one, each = (float(re.search(r"memory_lines (\d+)", side)[1]) for side in told.groups())  # type: ignore[index]
    assert one < 0.9 * each


def test_a_phase_takes_what_its_busiest_part_takes() -> None:
    assert Phase(dots=2, vector_cycles=30).cycles == 32
    assert Phase(dots=2, near_lines=10).cycles == 32 + 22
    assert Phase(dots=2, fetched_near_lines=10).cycles == 32
    phases = {
        "copy": Phase(vector_cycles=10),
        "multiply": Phase(dots=1, vector_cycles=10),
        "store": Phase(vector_cycles=20),
        "else": Phase(),
    }
    assert Counts(phases).cycles == 10 + 16 + 20
    assert Counts(phases, beside=("store",)).cycles == 10 + 30
