"""The lines of a text's head that say how it is launched are the geometry that launchers use; in PyCUDA, by the
lines of the page.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen.emit.render import Source
from ksgen.families import family_named
from ksgen.measure.verify import tolerance
from ksgen.spec import Epilogue
from tests.driver import NotHereError, environment, run
from tests.support.kernels import JOB_OF, PATTERNS, kernel_of, source_of, supports

ROOT = Path(__file__).parents[2]
LAUNCH = re.compile(r"^//   (\w+)<<<(.+?), (\d+)(?:, (\d+))?>>>\((.*?)\)", re.MULTILINE)
BY_HAND = [
    (family, precision)
    for family in JOB_OF
    for precision in ("float32", "float16", "tf32x3")
    if not family.startswith("wgmma")
]


def unwrapped(source: Source) -> str:
    """Text of a source whose comments on launches each stand on one line."""
    return source.text.replace("\n//     ", " ")


def read(source: Source, batch: int) -> dict[str, tuple[int, int, int, list[str]]]:
    """What a text's head says at a batch, by entry: grid, block, shared memory and arguments."""
    head = unwrapped(source).partition("// ---- ")[0]
    known = {"batch": batch}
    for line in head.splitlines():
        for name, rule in re.findall(
            r"\b(steps|most|part|parts|tiles) = ([^;:]+?)(?:;|$|(?=: ))", line.removeprefix("// ")
        ):
            known[name] = value(rule, known)
    return {
        entry: (value(grid, known), int(block), int(shared or 0), given.split(", "))
        for entry, grid, block, shared, given in LAUNCH.findall(head)
    }


def value(rule: str, known: dict[str, int]) -> int:
    """Compute the value of a rule as a reader would."""
    rule, _, how = rule.partition(", ") if not rule.startswith("min(") else (rule, "", "")
    if how == "rounded up":
        one, other = rule.split(" / ")
        return -(-value(one, known) // value(other, known))
    if found := re.match(r"min\((\d+), steps / (\d+)\), but at least 1", rule):
        return max(1, min(int(found[1]), known["steps"] // int(found[2])))
    product = 1
    for each in rule.split(" * "):
        product *= known[each] if each in known else int(each)
    return product


@pytest.mark.exhaustive
@pytest.mark.parametrize("batch", [None, 300])
@pytest.mark.parametrize(("family", "precision"), BY_HAND)
def test_a_head_says_what_launchers_do(family: str, precision: str, batch: int | None) -> None:
    kernels = [
        kernel_of(pattern, precision, layout, batch=batch) for pattern in PATTERNS.values() for layout in ("bsf", "bsl")
    ]
    kernels = [kernel for kernel in kernels if supports(family, kernel)]
    if not kernels:
        pytest.skip(f"{family} serves no {precision}")
    for source in (source_of(family, kernel) for kernel in kernels):
        for entries in (batch,) if batch else (1, 7, 64, 129, 300, 5000):
            check_head(source, entries)


def check_head(source: Source, batch: int) -> None:
    family, kernel, constants = family_named(source.family), source.kernel, source.constants
    told, geometry = read(source, batch), family.geometry(kernel, constants, batch)
    *launched, given = told[source.entry]
    assert launched == [geometry.grid, geometry.block, geometry.shared_bytes], source.entry
    other, second = told.get(source.second_entry), family.pack_geometry(kernel, constants)
    if kernel.job == "gradient":
        assert given == ["x", "grad_y", "grad", "workspace", "batch"]
        assert (other is not None) >= bool(geometry.after)
        sizes = re.findall(r"workspace has (\d+)(?: \* parts)? bytes", unwrapped(source))
        parts = 1 if kernel.batch else geometry.grid // family.geometry(kernel, constants, 1).grid
        assert int(sizes[0]) * parts == geometry.workspace_bytes or not geometry.workspace_bytes
    else:
        assert given == ["x", "packed", "y", "batch"]
        assert f"packed has {family.packed_bytes(kernel, constants)} bytes" in unwrapped(source)
    if other:
        assert other[:3] == (second.grid, second.block, second.shared_bytes)


def test_extras_stand_where_the_kernel_takes_them_and_maps_are_mentioned() -> None:
    source = source_of("simt", kernel_of((2, 37, 13, 5), "float32", "bsf", Epilogue(bias=True, residual=True)))
    assert read(source, 1)[source.entry][3] == ["x", "packed", "y", "bias", "residual", "batch"]
    hopper = source_of("wgmma_registers", kernel_of((2, 64, 64, 8), "float16", "bsf"))
    assert "// Launched by ksgen's launchers, which describe X to it by a tensor map.\n" in hopper.text
    assert "<<<" not in hopper.text.partition("// ---- ")[0]


def test_a_head_says_where_the_scales_of_weights_lie() -> None:
    source = source_of("simt", replace(kernel_of((2, 37, 13, 5), "float32", "bsf"), weights="int8"))
    told = "w is (A, B, C, D) of int8 and, from byte 4816 on, a float32 scale per output, packed has"
    assert told in unwrapped(source)
    bytes_in = source_of("simt", replace(source.kernel, inputs="int8"))
    assert told.replace(", packed", " times the scale of X, packed") in unwrapped(bytes_in)


@pytest.mark.parametrize("batch", [None, 300])
@pytest.mark.parametrize(("layout", "row"), [("bsf", "row of the batch"), ("bsl", "feature")])
@pytest.mark.parametrize("family", ["simt", "mma"])
def test_pitches_of_slices_stand_before_the_batch_and_are_explained(
    family: str, layout: str, row: str, batch: int | None
) -> None:
    kernel = replace(kernel_of((2, 37, 16, 5), "float16", layout, batch=batch), stride="any")
    plain, added = (
        source_of(family, kernel),
        source_of(family, replace(kernel, epilogue=Epilogue(bias=True, residual=True))),
    )
    assert read(plain, 300)[plain.entry][3] == ["x", "packed", "y", "x_pitch", "y_pitch", "batch"]
    pitches = ["x_pitch", "y_pitch", "residual_pitch"]
    *launched, given = read(added, 300)[added.entry]
    geometry = family_named(family).geometry(added.kernel, added.constants, 300)
    assert launched == [geometry.grid, geometry.block, geometry.shared_bytes]
    assert given == ["x", "packed", "y", "bias", "residual", *pitches, "batch"]
    assert (
        f"//   {', '.join(pitches)}: elements from a {row} to the next, in 64 bits; rows of Y must not overlap\n"
        in unwrapped(added)
    )
    assert "_pitch: elements" not in source_of(family, replace(kernel, stride="dense")).text
    assert added.text.splitlines()[1].endswith(", bias, residual, strided.")


def page() -> str:
    """The lines of docs/python.md."""
    text = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (found,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "SourceModule" in block]
    return found


CHECK = """
truth = np.einsum("ikl,sil->sik", weights.get()[..., 0].astype("f8"), x.get().astype("f8").reshape(1000, 6, 64))
truth = truth.reshape(1000, 384)
print(np.linalg.norm(y.get() - truth) / np.linalg.norm(truth))
"""


def test_the_lines_of_the_page_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    try:
        surroundings = environment("pycuda")
        done = run(
            page() + CHECK, "pycuda", PATH=f"{Path(surroundings['KSGEN_NVCC']).parent}{os.pathsep}{os.environ['PATH']}"
        )
    except NotHereError as error:
        pytest.skip(str(error))
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < tolerance("float32", 64)


def test_the_lines_of_the_page_are_those_of_the_head() -> None:
    head = (ROOT / "generated/vit/ks_6x64x64x1_float32_bsf.cu").read_text(encoding="utf-8").partition("// ---- ")[0]
    (pack, product), lines = LAUNCH.findall(head), page()
    assert f"grid=({pack[1]}, 1), block=({pack[2]}, 1, 1))" in lines
    assert f"grid=({product[1].replace('tiles', '8')}, 1), block=({product[2]}, 1, 1), shared={product[3]})" in lines
    (packed,) = re.findall(r"packed has (\d+) bytes", head)
    assert f"mem_alloc({packed})" in lines
