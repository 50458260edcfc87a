"""The report of `convert`, as figures and as a table."""

import re
from dataclasses import dataclass, field
from io import StringIO
from statistics import median

from ksgen.pattern import Chain
from ksgen.torch.factorize import Factorization
from ksgen.words import counted


@dataclass(frozen=True)
class Replaced:
    """One layer before and after. Operations are multiplications and additions, per row of x."""

    name: str
    chain: Chain
    count: int  # of chains side by side
    parameters: tuple[int, int]  # before and after
    factorizations: tuple[Factorization, ...] = field(repr=False)  # empty where the new weights are drawn

    @property
    def flops(self) -> tuple[int, int]:
        return 2 * self.chain.in_features * self.chain.out_features * self.count, 2 * self.chain.weight_count * self.count

    @property
    def relative_errors(self) -> tuple[float, ...]:
        return tuple(each.relative_error for each in self.factorizations)


@dataclass(frozen=True)
class Report:
    """The result of `convert`. `print(report)` shows a table, with equal layers of several blocks in one row."""

    layers: tuple[Replaced, ...]
    parameters: tuple[int, int]  # of the whole model, before and after

    def __repr__(self) -> str:
        before, after = self.parameters
        replaced = counted(len(self.layers), "layer")
        return f"Report({replaced} replaced, {before:,} parameters before and {after:,} after; print it for a table)"

    @property
    def flops(self) -> tuple[int, int]:
        """Of the replaced layers, per row of x."""
        return sum(layer.flops[0] for layer in self.layers), sum(layer.flops[1] for layer in self.layers)

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table()
        for title in ("layers", "", "chain", "parameters", "share", "error, median", "worst"):
            table.add_column(title, justify="left" if title in ("layers", "chain") else "right", no_wrap=True)
        for name, alike in _alike(self.layers):
            before, after = (sum(layer.parameters[side] for layer in alike) for side in (0, 1))
            errors = [error for layer in alike for error in layer.relative_errors]
            shown = (f"{median(errors):.3f}", f"{max(errors):.3f}") if errors else ("drawn", "")
            times = f" x {alike[0].count}" if alike[0].count > 1 else ""
            table.add_row(name, f"x {len(alike)}", f"{alike[0].chain}{times}", f"{after:,}", f"{after / before:.1%}", *shown)
        text = StringIO()
        Console(file=text, width=200, highlight=False).print(table)
        (before, after), (flops_before, flops_after) = self.parameters, self.flops
        replaced = counted(len(self.layers), "layer")
        return (
            f"{text.getvalue()}{replaced} replaced: {before:,} parameters became {after:,} in the whole model, and "
            f"{flops_before:,} operations a row {flops_after:,} in these layers."
        )


def _alike(layers: tuple[Replaced, ...]) -> list[tuple[str, list[Replaced]]]:
    """Groups layers of one chain whose names differ only in numbers, under one name with * for the numbers."""
    groups: dict[tuple[str, Chain, int], list[Replaced]] = {}
    for layer in layers:
        groups.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", layer.name), layer.chain, layer.count), []).append(layer)
    return [(name if len(alike) > 1 else alike[0].name, alike) for (name, _, _), alike in groups.items()]
