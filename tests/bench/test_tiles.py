"""What is counted of kernels by matrix tiles: all their products, each line of the arrays once, and nothing that they do not do."""

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from benchmarks.tiles.__main__ import CHAIN_FAMILY, CPU, FAMILY, MARCH, counted, main
from benchmarks.tiles.counted import taken_apart
from benchmarks.tiles.cycles import SCHEDULER, Counts, Phase
from ksgen.bench.rows import Row
from ksgen.build.host import find_host_compiler, processor_features
from ksgen.errors import ToolchainError
from ksgen.families.amx.cycles import dots
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.bench_rows import row

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


def test_what_was_wanted_stands_beside_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Of rows: two patterns, of which memory bounds one; and of models."""
    day = pytest.importorskip("benchmarks.tiles.day")
    small = {"precision": "bfloat16", "arithmetic": "bfloat16"}
    rates = {"ceiling_flop_per_s": 1e12, "ceiling_byte_per_s": 30e9}

    def rows(pattern: str, us: float) -> list[Row]:
        tiles = {"family": "amx", "share_of_floor": 0.5, **rates}
        return [
            row(pattern, median_us=us, **tiles, **small),
            row(pattern, median_us=300.0, family="vector", **small),
            row(pattern, "bmm", median_us=400.0, **small),
            row(pattern, median_us=us, **tiles, arithmetic="bf16x6"),
            row(pattern, median_us=us, family="vector", variant="tuned"),
            row(pattern, "bmm", median_us=2 * us),
        ]

    written = [*rows("1,512,512,2", 100.0), *rows("1,4,4,512", 400.0)]
    found = {line.what: line for line in day.lines_of_products(written)}
    assert str(found["bfloat16, bsl: tiles over the best of PyTorch, geometric mean"]).endswith("| 2.00 or more | 2.00 | yes |")
    assert found["bfloat16, bsl: the same, least"].found == 1.0
    assert not found["bfloat16, bsl: tiles over our vectors, geometric mean"].found < 1.0
    assert found["bf16x6, bsl: over the best float32 way, where compute bounds, geometric mean"].found == 1.0  # our FMA
    assert str(found["bf16x6, bsl: share of the floor, median"]).endswith("| 0.60 or more | 0.50 | no |")
    assert str(found["bfloat16, bsf: the same, least"]).endswith("| not measured | |")
    (tmp_path / "vit-s16-tiles.json").write_text('{"rows": [{"module": "whole", "ratio": {"median": 0.5}}]}')
    assert "| vit-s16 in bfloat16 by tiles, whole: time over dense | 0.55 or less | 0.50 | yes |" in day.table(tmp_path)


def test_layers_in_one_launch_of_tiles_stand_beside_all_others() -> None:
    """In bfloat16 and in float32's grade; vectors' rows and tiles' are of two files."""
    day = pytest.importorskip("benchmarks.tiles.day")

    def rows(pattern: str, one: float, precision: str, arithmetic: str) -> list[Row]:
        own = {"precision": precision, "arithmetic": arithmetic}
        plain = {"precision": precision, "arithmetic": precision}
        return [
            row(pattern, "one_launch", median_us=one, family="amx_chain", **own),
            row(pattern, "each_factor", median_us=150.0, family="amx", **own),
            row(pattern, "one_launch", median_us=300.0, family="vector_chain", **plain),
            row(pattern, "each_factor", median_us=200.0, family="vector", **plain),
            row(pattern, "views", median_us=400.0, **plain),
        ]

    written = [*rows("1,4,4,2 then 1,4,4,2", 100.0, "bfloat16", "bfloat16"), *rows("1,8,8,2 then 1,8,8,2", 400.0, "bfloat16", "bfloat16")]
    written += rows("1,4,4,2 then 1,4,4,2", 100.0, "float32", "bf16x6")
    found = {line.what: line for line in day.lines_of_layers(written)}
    apart = "one launch of tiles over a launch of tiles for each factor, geometric mean"
    assert str(found[f"layers, bf16x6, bsl: {apart}"]).endswith("| 1.00 or more | 1.50 | yes |")
    assert str(found[f"layers, bfloat16, bsl: {apart}"]).endswith("| 1.00 or more | 0.75 | no |")
    vectors = found["layers, bf16x6, bsl: one launch of tiles over our vectors, one launch or several, geometric mean"]
    assert (vectors.found, vectors.is_met) == (2.0, True)
    assert found["layers, bf16x6, bsl: one launch of tiles over the best of PyTorch, geometric mean"].found == 4.0
    assert str(found[f"layers, bfloat16, bsf: {apart}"]).endswith("| not measured | |")


def test_the_day_reads_what_it_measured_of_layers(tmp_path: Path) -> None:
    day = pytest.importorskip("benchmarks.tiles.day")
    assert (
        "| layers, bfloat16, bsf: one launch of tiles over the best of PyTorch, geometric mean | 1.00 or more | not measured | |"
        in day.table(tmp_path)
    )
    assert [day.log_of_layers(way) for way in day.WAYS] == ["layers-vectors.jsonl", "layers-tiles.jsonl"]
    assert day.PYTORCH_LAYERS == ("bmm", "views", "dense")


def test_unmeasured_tiles_are_contenders_beside_what_launchers_take(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = pytest.importorskip("ksgen.bench.contenders")
    monkeypatch.setattr(contenders, "limits_of", lambda device: CPU)
    monkeypatch.setattr(contenders.PLANNER, "choice", lambda *given: SimpleNamespace(from_wisdom=False))

    def found(precision: str) -> list[tuple[str, str]]:
        job = contenders.Job(Pattern(1, 64, 64, 2), precision, "bsf", 512)
        return [(each.arithmetic, each.family) for each in contenders.ours(job, SimpleNamespace(kind="native", shares_host=True))]

    assert found("bfloat16") == [("bfloat16", "amx"), ("bfloat16", "vector")]
    assert found("float32") == [("float32", "vector"), ("bf16x6", "amx")]


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
