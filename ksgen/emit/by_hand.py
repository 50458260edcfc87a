"""Writes the comment at the head of an emitted CUDA source that says how to launch it. The family provides numbers."""

from textwrap import fill
from typing import Any

from ksgen.families import Family, Geometry
from ksgen.families.signature import pitches_of
from ksgen.spec import KernelSpec

_BY_HAND = (
    "To launch by hand: grid and block have one dimension. Pass arrays as pointers, and the batch as a 64-bit integer.",
    "For more than 49152 bytes of shared memory, first set cudaFuncAttributeMaxDynamicSharedMemorySize of the kernel.",
)


def launch_lines(family: Family[Any], kernel: KernelSpec, constants: Any, entry: str) -> str:
    """Lines with grid, block, shared memory and arguments per entry, in launch order, for a fixed batch or any."""
    if family.maps(kernel, constants, kernel.batch or 1):
        return _comment(["Launched by ksgen's launchers, which describe X to it by a tensor map."])
    if kernel.is_chain:
        return _comment(
            [
                f"Launched by ksgen's launchers, which pack the weights of each factor as {family.name} does for it "
                "alone."
            ]
        )
    launches = (_gradient if kernel.job == "gradient" else _product)(family, kernel, constants, entry)
    return _comment([*_BY_HAND, *launches])


def _product(family: Family[Any], kernel: KernelSpec, constants: Any, entry: str) -> list[str]:
    packing, packed = family.pack_geometry(kernel, constants), family.packed_bytes(kernel, constants)
    given = ", ".join("packed" if name == "weights" else name for name in family.operands(kernel, constants))
    geometry, rest = _geometry(family, kernel, constants), ""
    if kernel.batch is None:
        grid, rest = f"{geometry.grid} * tiles", f": tiles = batch / {constants.tile_batch}, rounded up"
    else:
        grid = str(geometry.grid)
    first = _launch(f"{entry}_pack", str(packing.grid), packing, "w, packed")
    shape = ", ".join("1" if axis in kernel.tie else axis.upper() for axis in "abcd")
    return [
        f"  {first}: w is ({shape}) of {kernel.dtype}, packed has {packed} bytes",
        f"  {_launch(entry, grid, geometry, f'{given}, batch')}{rest}",
        *_pitches(kernel),
    ]


def _pitches(kernel: KernelSpec) -> list[str]:
    """Comment lines about the pitches that a kernel of slices takes for its arrays."""
    pitches, rows = ", ".join(pitches_of(kernel).values()), {"bsf": "row of the batch", "bsl": "feature"}
    row = " or ".join(rows[each] for each in dict.fromkeys((kernel.layout, kernel.y_layout)))
    return (
        [f"  {pitches}: elements from a {row} to the next, in 64 bits; rows of Y must not overlap"] if pitches else []
    )


def _gradient(family: Family[Any], kernel: KernelSpec, constants: Any, entry: str) -> list[str]:
    """Launch lines of a gradient. Its kernel computes the number of parts by the rules in these lines."""
    given = f"{', '.join(family.operands(kernel, constants))}, batch"
    geometry, adding = _geometry(family, kernel, constants), family.pack_geometry(kernel, constants)
    second = f"  {_launch(f'{entry}_sum', str(adding.grid), adding, given)}"
    if kernel.batch is not None:
        first = (
            f"  {_launch(entry, str(geometry.grid), geometry, given)}: workspace has {geometry.workspace_bytes} bytes"
        )
        return [first, second] if geometry.after else [first]
    least = next(each.value for each in family.constexprs(kernel, constants) if each.name == "LEAST_STEPS")
    part_bytes = family.packed_bytes(kernel, constants) // constants.parts
    return [
        f"  steps = batch / {constants.tile_batch}, rounded up; most = min({constants.parts}, steps / {least}), but "
        "at least 1;",
        "  part = steps / most, rounded up; parts = steps / part, rounded up",
        f"  {_launch(entry, f'{geometry.grid} * parts', geometry, given)}: workspace has {part_bytes} * parts bytes; "
        "null for one part",
        f"{second}: only after several parts",
    ]


def _geometry(family: Family[Any], kernel: KernelSpec, constants: Any) -> Geometry:
    return family.geometry(kernel, constants, kernel.batch or 1)


def _launch(entry: str, grid: str, geometry: Geometry, given: str) -> str:
    shared = f", {geometry.shared_bytes}" if geometry.shared_bytes else ""
    return f"{entry}<<<{grid}, {geometry.block}{shared}>>>({given})"


def _comment(lines: list[str]) -> str:
    wrapped = (fill(line, 120, initial_indent="// ", subsequent_indent="//     ") for line in lines)
    return "".join(f"{line}\n" for line in wrapped) + "\n"
