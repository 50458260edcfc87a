"""What the cost model expects of defaults, as shares of the floor: `python -m benchmarks.defaults`. Measures nothing.

For the stratified patterns, on each target's usual card (`ksgen/families/gpus.py`): what launchers take before any search; on sm_90a
also what they would take if Hopper's families were chosen by default.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import click

from ksgen.families import Family, Limits, cuda_limits, families_for, family_for
from ksgen.families.expected import LARGE, default_us, speed_of
from ksgen.spec import LAYOUTS, KernelSpec, stratified

TARGETS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
PRECISIONS = ("float32", "float16", "tf32", "tf32x3", "fp16x3")


@dataclass(frozen=True)
class Expected:
    """Of one kernel's default."""

    family: str
    share: float  # of the floor, of the fastest instructions that any of the families has
    over_best: float  # times as long as the fastest of the families' defaults


def floor_us(families: list[Family[Any]], kernel: KernelSpec, limits: Limits, batch: int) -> float:
    """X, weights and Y moved once, all multiply-adds done by the family whose instructions are the fastest."""
    found = []
    for family in families:
        speed = speed_of(family, kernel, limits)
        assert speed is not None
        products = kernel.arithmetic.products if family.on_tensor_cores else 1
        found.append(max(kernel.bytes(batch) / speed.bytes_per_s, products * kernel.flops(batch) / speed.flops_per_s) * 1e6)
    return min(found)


def expected(kernel: KernelSpec, limits: Limits, batch: int, all_families: bool) -> Expected:
    able = [family for family in families_for(kernel, limits, batch) if all_families or family.by_default]
    chosen = family_for(kernel, limits, batch, all_families=all_families)
    us = {family.name: default_us(family, kernel, limits, batch) for family in able}
    return Expected(chosen.name, floor_us(able, kernel, limits, batch) / us[chosen.name], us[chosen.name] / min(us.values()))


def rows(target: str, patterns: int, batch: int) -> Iterator[tuple[str, str, str, list[Expected]]]:
    limits = cuda_limits(target)
    for all_families in (False, True) if limits.warpgroups else (False,):
        for precision in PRECISIONS:
            for layout in LAYOUTS:
                kernels = [KernelSpec(pattern, precision, layout) for pattern in stratified(patterns)]
                found = [expected(kernel, limits, batch, all_families) for kernel in kernels]
                yield f"{target}{' with wgmma' if all_families else ''}", precision, layout, found


@click.command()
@click.option("--patterns", type=click.IntRange(min=1), default=60, show_default=True, help="How many of the stratified ones.")
@click.option("--target", "targets", type=click.Choice(TARGETS), multiple=True, help="Only this target; may be given again.")
@click.option("--batch", type=click.IntRange(min=1), default=LARGE, show_default=True)
def main(patterns: int, targets: tuple[str, ...], batch: int) -> None:
    """Print the medians and minima of the shares, how much longer than the fastest family's default the chosen one takes at most, and
    which families are chosen how often."""
    click.echo(f"{'target':<18} {'precision':<9} layout  median  min  over best  families")
    for target in targets or TARGETS:
        for name, precision, layout, found in rows(target, patterns, batch):
            shares, families = [each.share for each in found], Counter(each.family for each in found)
            over = max(each.over_best for each in found)
            named = ", ".join(f"{family} {count}" for family, count in families.most_common())
            click.echo(f"{name:<18} {precision:<9} {layout:<6} {median(shares):7.2f} {min(shares):5.2f} {over:9.2f}  {named}")


if __name__ == "__main__":
    main()
