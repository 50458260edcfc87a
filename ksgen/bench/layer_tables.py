"""The report's tables of whole layers: everyone's time over that of one launch. Only text, as in `tables`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

from ksgen.bench.roster import BESIDE, ONE_LAUNCH, WAYS
from ksgen.bench.rows import Row
from ksgen.bench.tables import LAYOUT_WORDS, Table, number, percent

OTHER_WAYS = tuple(name for name in WAYS if name != ONE_LAUNCH)
_NOTE = (
    f"{', '.join(OTHER_WAYS)}: times as long as one launch takes; above 1 it is faster. Only times that can be trusted, of right results."
)


@dataclass(frozen=True)
class Kind:
    """Layers that are measured alike."""

    precision: str
    layout: str
    batch: int
    is_group: bool

    @property
    def words(self) -> str:
        groups = ", groups" if self.is_group else ""
        return f"{self.precision}, {LAYOUT_WORDS[self.layout]}, batch {self.batch}{groups}"


@dataclass(frozen=True)
class LayerTimes:
    """One layer's best rows that can be trusted, by contender."""

    name: str
    best: Mapping[str, Row]

    def us(self, name: str) -> float | None:
        return self.best[name].median_us if name in self.best else None

    def ratio(self, name: str) -> float | None:
        one, other = self.us(ONE_LAUNCH), self.us(name)
        return other / one if one and other else None


def layers_by_kind(rows: Sequence[Row]) -> dict[Kind, list[LayerTimes]]:
    """All layers of the rows, those without a time that counts too."""
    found: dict[Kind, dict[str, dict[str, Row]]] = {}
    for row in rows:
        kind = Kind(row.precision, row.layout, row.batch, BESIDE in row.pattern)
        best = found.setdefault(kind, {}).setdefault(f"{row.layer}: {row.pattern}", {})
        if row.counts:
            known = best.get(row.implementation)
            if known is None or (row.median_us or 0) < (known.median_us or 0):
                best[row.implementation] = row
    return {kind: [LayerTimes(name, best) for name, best in layers.items()] for kind, layers in found.items()}


def in_short(rows: Sequence[Row]) -> Table:
    """A few lines for each precision, layout and batch: everyone beside one launch, over all layers."""
    lines = []
    for kind, layers in layers_by_kind(rows).items():
        title = " ".join((kind.precision, kind.layout, str(kind.batch), *(("groups",) if kind.is_group else ())))
        for name in OTHER_WAYS:
            if ratios := _ratios(layers, name):
                spread = map(_times, (geometric_mean(ratios), min(ratios), max(ratios)))
                lines.append((title, name, f"{len(ratios)} of {len(layers)}", *spread))
                title = ""
    note = "Times as long as one launch takes: the geometric mean over the layers where both times can be trusted, the least and the most."
    return Table("Layers: everyone beside one launch", ("", "", "layers", "mean", "least", "most"), tuple(lines), note)


def each_layer(rows: Sequence[Row]) -> Iterator[Table]:
    """Layer by layer."""
    for kind, layers in layers_by_kind(rows).items():
        lines = [_line(layer) for layer in layers]
        for title, of in (("geometric mean", geometric_mean), ("median", median), ("least", min), ("most", max)):
            found = [_ratios(layers, name) for name in OTHER_WAYS]
            lines.append((title, "", "", "", *(_times(of(each)) if each else "-" for each in found)))
        columns = ("layer", "one launch, us", "of the floor", "by", *OTHER_WAYS)
        yield Table(f"Layers, {kind.words}", columns, tuple(lines), _NOTE)


def _ratios(layers: Sequence[LayerTimes], name: str) -> list[float]:
    return [ratio for layer in layers if (ratio := layer.ratio(name)) is not None]


def _line(layer: LayerTimes) -> tuple[str, ...]:
    one = layer.best.get(ONE_LAUNCH)
    by = ("-", "-", "-") if one is None else (number(one.median_us), percent(one.share_of_floor), f"{one.family}, {one.arithmetic}")
    return (layer.name, *by, *(_times(layer.ratio(name)) for name in OTHER_WAYS))


def _times(ratio: float | None) -> str:
    return "-" if ratio is None else f"x{ratio:.2f}"
