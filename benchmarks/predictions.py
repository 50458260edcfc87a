"""What the cost model predicts of our kernels on an A100, beside the times that the paper's authors published of theirs:
`python -m benchmarks.predictions`. Measures nothing.

A prediction comes with the band in which nine of ten of the published times lie around the same model (`benchmarks/ksmm.py`). Ours are the
defaults, before any search.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import click

from benchmarks.ksmm import BATCH, LIMITS, Published, published
from ksgen.commands.common import PATTERN
from ksgen.families import family_for
from ksgen.families.expected import Prediction, prediction, speed_of
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS

PRECISIONS = {"float32": "float32", "tf32x3": "float32", "float16": "float16"}  # ours, and whose published times stand beside it


@dataclass(frozen=True)
class Beside:
    """Our prediction beside one published time."""

    precision: str
    known: Published
    family: str
    predicted: Prediction

    @property
    def gains(self) -> tuple[float, float, float]:
        """The published time over ours: at the slow end of the band, as predicted, at the fast end."""
        own = self.predicted
        return self.known.us / own.high, self.known.us / own.us, self.known.us / own.low


def beside(known: Published, precision: str) -> Beside:
    """Of the family and the constants that a launcher would take for that batch."""
    kernel = replace(known.kernel, precision=precision)
    family = family_for(kernel, LIMITS, BATCH)
    speed = speed_of(family, kernel, LIMITS)
    assert speed is not None
    predicted = prediction(speed, family, kernel, family.default(kernel, LIMITS, BATCH), BATCH)
    assert predicted is not None
    return Beside(precision, known, family.name, predicted)


def medians(rows: Iterable[Beside]) -> tuple[float, float, float]:
    """Of the gains."""
    low, middle, high = (median(each) for each in zip(*(row.gains for row in rows), strict=True))
    return low, middle, high


@click.command()
@click.option("--pattern", "patterns", type=PATTERN, multiple=True, help="Only this one, such as 1,192,48,2; may be given again.")
@click.option("--brief", is_flag=True, help="Print the medians alone.")
def main(patterns: tuple[Pattern, ...], brief: bool) -> None:
    """Print, for each published time, what ours is predicted to take and how many times as long theirs took; then the medians of each
    precision and layout. A minute or two for all patterns."""
    if not brief:
        click.echo(f"{'pattern':<18} {'precision':<9} layout {'family':<6} {'predicted us':>30} {'published us':>13}  gain")
    for precision, theirs in PRECISIONS.items():
        for layout in LAYOUTS:
            known = [each for each in published() if (each.kernel.precision, each.kernel.layout) == (theirs, layout)]
            rows = [beside(each, precision) for each in known if not patterns or each.kernel.pattern in patterns]
            for row in [] if brief else rows:
                click.echo(
                    f"{row.known.kernel.pattern!s:<18} {precision:<9} {layout:<6} {row.family:<6} {row.predicted!s:>30}"
                    f" {row.known.us:13.4g} {row.gains[1]:5.2f}"
                )
            if rows:
                low, middle, high = medians(rows)
                click.echo(f"median of {len(rows):<8} {precision:<9} {layout:<6} gain {middle:.2f} ({low:.2f} to {high:.2f}), a prediction")


if __name__ == "__main__":
    main()
