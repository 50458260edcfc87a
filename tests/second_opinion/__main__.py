"""A second opinion on what the emulator proves: nvcc's PTX of emitted sources, on an independent simulator.

python -m tests.second_opinion SOURCE

SOURCE is what `git clone` takes: a folder or an address of ClusterSim's repository.

It needs nvcc and ptxas, and to build the simulator git, cmake, make, g++, flex, bison and zlib's headers: a quarter of
an hour, once. Each text's result is held to float64, and to the emulator's bits. Results go to `report.txt` in the
folder.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic

import click

from ksgen.emit.render import Source
from ksgen.families import cuda_limits
from ksgen.families.mma.shape import MmaConstants
from ksgen.measure.verify import compare, make_problem, tolerance
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.second_opinion.simulator import Simulator, SimulatorError, build
from tests.support.kernels import PATTERNS, in_emulator, kernel_of, patterns_of, result, source_of, supports

PRECISIONS = ("float32", "float64", "float16", "bfloat16")
OF_TENSOR_CORES = ("float16", "bfloat16", "tf32", "tf32x3", "fp16x3")
HELD_ACTIVATIONS = ("none", "relu", "silu")  # not gelu: the simulator has no copysign
OLDEST, NEWEST = "sm_75", "sm_90a"  # whose defaults differ in how they copy
RESIDENT = MmaConstants(32, 32, 16, 8, 2, 1, 3, 0, 1, 1, 1)  # X stays for all tiles of outputs
BATCH = 65  # several tiles of most texts, the last one ragged


@dataclass(frozen=True)
class Case:
    source: Source
    batch: int = BATCH


def cases() -> Iterator[Case]:
    """Texts as a GPU without asynchronous copies gets them, those of newer ones where they differ, those with
    epilogues, and those for tensor cores, one whose X stays in shared memory, and two whose X and weights are in eight
    bits."""
    for precision in PRECISIONS:
        for family in ("simt", "gradient"):
            for pattern in PATTERNS.values():
                for layout in LAYOUTS:
                    yield from _of_targets(family, kernel_of(pattern, precision, layout))
    for activation in HELD_ACTIVATIONS:
        for layout in LAYOUTS:
            epilogue = Epilogue(bias=True, residual=True, activation=activation)
            yield Case(
                source_of("simt", kernel_of(PATTERNS["flat"], "float32", layout, epilogue), limits=cuda_limits(OLDEST))
            )
    for precision in OF_TENSOR_CORES:
        for family in ("mma", "gradient_mma"):
            for name in ("tiny", "flat", "wide"):
                kernels = [kernel_of(patterns_of(family, precision)[name], precision, layout) for layout in LAYOUTS]
                yield from (Case(source_of(family, kernel)) for kernel in kernels if supports(family, kernel))
    yield Case(source_of("mma", kernel_of((2, 70, 40, 16), "float16", "bsf"), RESIDENT))
    for storage, layout in (("e4m3", "bsf"), ("e5m2", "bsl")):
        yield Case(source_of("mma", in_bytes(PATTERNS["flat"], layout, storage)))


def in_bytes(pattern: tuple[int, ...], layout: str, storage: str) -> KernelSpec:
    """Return a kernel with X and weights in eight bits. They widen to float16 if no instruction multiplies them."""
    return replace(kernel_of(pattern, "bfloat16", layout), weights=storage, inputs=storage)


def _of_targets(family: str, kernel: KernelSpec) -> Iterator[Case]:
    texts = {}
    for target in (OLDEST, NEWEST):
        source = source_of(family, kernel, limits=cuda_limits(target))
        texts.setdefault(source.text, Case(source))
    yield from texts.values()


def opinion(simulator: Simulator, case: Case) -> tuple[bool, str]:
    """Whether the simulator agrees with float64; by how much, and whether to the emulator's last bit."""
    source = case.source
    problem = make_problem(source.kernel, case.batch)
    got = result(problem, source, simulator.run)
    error, limit = compare(problem, got)[0], tolerance(source.kernel.precision, problem.terms)
    emulated = result(problem, source, in_emulator(accumulation="rounded"))
    same = "the emulator's bits" if got.tobytes() == emulated.tobytes() else "other bits than the emulator"
    return error <= limit, f"{error:.1e} of {limit:.1e}, {same}"


@click.command()
@click.argument("source")
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    default=Path("second-opinion"),
    help="Of the simulator, PTX and the report.",
)
@click.option("--only", default="", help="Those texts alone that have this in their names.")
def main(source: str, folder: Path, only: str) -> None:
    """Run all texts; exit code 1 if one is wrong or does not run."""
    try:
        simulator = build(source, folder.absolute())
    except SimulatorError as error:
        raise click.ClickException(str(error)) from None
    wrong = count = alike = 0
    begin = monotonic()
    with (folder / "report.txt").open("w", encoding="utf-8") as report:

        def say(line: str) -> None:
            click.echo(line)
            report.write(line + "\n")
            report.flush()

        for case in cases():
            name = f"{case.source.entry} {getattr(case.source.constants, 'copy', '')}"
            if only not in name:
                continue
            count += 1
            try:
                is_right, words = opinion(simulator, case)
            except (SimulatorError, AssertionError) as error:
                is_right, words = False, str(error)
            wrong, alike = wrong + (not is_right), alike + words.endswith("the emulator's bits")
            say(f"{'right' if is_right else 'WRONG'}  {name}: {words}")
        say(
            f"{count} texts, {count - wrong} right, {alike} with the emulator's bits, in "
            f"{(monotonic() - begin) / 60:.0f} minutes"
        )
    sys.exit(1 if wrong or not count else 0)


if __name__ == "__main__":
    main()
