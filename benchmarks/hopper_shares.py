"""What the cost model expects of Hopper's kernels, as shares of the floor: `python -m benchmarks.hopper_shares`. Measures nothing.

For the stratified patterns: each kind's default, and the best of the search space with X streaming through blocks of their own,
then with all that clusters and resident tiles allow. Where a GPU has been measured, its rates go in by `--copy` and `--multiply`.
"""

from collections.abc import Iterator
from statistics import median
from typing import Any

import click

from ksgen.families import FAMILIES, cuda_limits
from ksgen.families.expected import gpu_us
from ksgen.measure.roofline import Ceilings
from ksgen.spec import PRECISIONS, KernelSpec, stratified
from ksgen.tuning.model import Machine

LIMITS, MULTIPROCESSORS, BATCH = cuda_limits("sm_90a"), 132, 25088
KINDS = ("wgmma_shared", "wgmma_registers", "wgmma_permuted")
JOBS = (("float16", "bsl"), ("tf32x3", "bsl"), ("float16", "bsf"), ("tf32x3", "bsf"))


def shares(kernel: KernelSpec, ceilings: Ceilings) -> dict[str, float]:
    """The largest share of each sort of constants, over the families that serve the kernel."""
    found: dict[str, float] = {}
    for name in KINDS:
        family = FAMILIES[name]
        if family.serves(kernel, LIMITS):
            machine = Machine("sm_90a", LIMITS, MULTIPROCESSORS, {name: ceilings})
            for sort, constants in _sorts(family, kernel):
                share = ceilings.floor_s(kernel, BATCH) * 1e6 / gpu_us(machine.speed(name), family, kernel, constants, BATCH)
                found[sort] = max(found.get(sort, 0.0), share)
    return found


def _sorts(family: Any, kernel: KernelSpec) -> Iterator[tuple[str, Any]]:
    yield "default", family.default(kernel, LIMITS)
    for constants in family.space(kernel, LIMITS):
        yield "best", constants
        if constants.cluster_batch == constants.cluster_out == 1 and not getattr(constants, "resident", 0):
            yield "alone", constants


@click.command()
@click.option("--patterns", type=click.IntRange(min=1), default=60, show_default=True, help="How many of the stratified ones.")
@click.option("--copy", default=4.0, show_default=True, help="TB/s, read plus written.")
@click.option("--multiply", default=790.0, show_default=True, help="TFLOP/s of 16-bit products; tf32 has half of it.")
def main(patterns: int, copy: float, multiply: float) -> None:
    """Print the medians and minima of the shares: of the defaults, of blocks that work alone, and with clusters and resident X. A
    minute or more for 60 patterns."""
    click.echo("precision layout   default: median min   alone: median min   best: median min")
    for precision, layout in JOBS:
        products = PRECISIONS[precision].products
        flops = multiply * 1e12 / (1 if precision == "float16" else 2 * products)
        ceilings = Ceilings(copy * 1e12, flops, products)
        found = [shares(KernelSpec(pattern, precision, layout), ceilings) for pattern in stratified(patterns)]
        columns = [[each[sort] for each in found] for sort in ("default", "alone", "best")]
        click.echo(f"{precision:<9} {layout:<8}" + "".join(f"{median(column):16.2f} {min(column):.2f}" for column in columns))


if __name__ == "__main__":
    main()
