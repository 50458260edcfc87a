"""One self-contained HTML page about a search: for each job its winner, figures, and every candidate with its outcome.

Evaluates and measures nothing: it shows trials. The same trials give the same bytes.
"""

from collections.abc import Collection, Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

from ksgen import __version__
from ksgen.errors import KsgenError
from ksgen.families import family_named
from ksgen.figures import svg
from ksgen.files import check_writable, write
from ksgen.measure.roofline import share_of_floor
from ksgen.tuning import figures
from ksgen.tuning.model import rank_correlation
from ksgen.tuning.sections import Section, reasons, sections_of, table_of, time_us
from ksgen.tuning.trials import Trial
from ksgen.values import counted

SHOWN_ROWS = 12  # rows of a table, until the reader asks for all
LEAST_PREDICTED = 3  # candidates, for a picture of the cost model


class Drawn(NamedTuple):
    """A figure and the sentence under it."""

    svg: Markup
    caption: str = ""


def write_report(trials: Sequence[Trial], path: Path, winners: Collection[Trial] = ()) -> None:
    """Write the page, completely or not at all.

    `winners` are the trials that a search chose; without them, the shortest time wins. `KsgenError` without trials, or
    without matplotlib.
    """
    if not trials:
        raise KsgenError(f"{path}: there is nothing to report, as no candidate was tried; ksgen tune tries some")
    write(path, page(trials, winners))


def check_report(path: Path) -> None:
    """Raise `KsgenError` before a search if its report could not be written afterwards."""
    svg.check_matplotlib(figures.EXTRA)
    check_writable(path)


def page(trials: Sequence[Trial], winners: Collection[Trial] = ()) -> str:
    """The page's text."""
    sections = sections_of(trials, winners)
    devices = _once(trial.device for trial in trials)
    return svg.page(
        Path(__file__).parent,
        "report.html.j2",
        {"wrapped": lambda name: escape(name).replace("_", Markup("_<wbr>"))},
        devices=", ".join(devices),
        facts=[
            counted(len(sections), "job"),
            counted(len(trials), "candidate"),
            *_once(trial.compiler for trial in trials),
            *(f"driver {each}" for each in _once(trial.driver for trial in trials)),
            f"ksgen {__version__}",
        ],
        sections=[_shown(section, number, len(devices) > 1) for number, section in enumerate(sections, start=1)],
        palette=svg.DARK,
        point=svg.POINT,
        best=figures.BEST,
        winner=figures.WINNER,
        floor=figures.FLOOR,
        shown_rows=SHOWN_ROWS,
    )


def _shown(section: Section, number: int, name_device: bool) -> dict[str, Any]:
    return {
        "anchor": f"job-{number}",
        "title": f"{section.title} on {section.device}" if name_device else section.title,
        "name": section.kernel.name,
        "winner": section.winner,
        "summary": section.summary,
        "sentences": section.sentences,
        "reasons": reasons(section.trials),
        "overview": _overview(section),
        "families": [
            {
                "name": name,
                "why": family_named(name).why,
                "figures": _constants(trials, section.winner),
                "table": table_of(trials, section.winner),
            }
            for name, trials in section.by_family.items()
        ],
    }


def _once(words: Iterable[str]) -> list[str]:
    return [word for word in dict.fromkeys(words) if word]


def _overview(section: Section) -> list[Drawn]:
    """Figures of the course of the search, the quality of the cost model, and the roofline; none without a winner."""
    if not (winner := section.winner):
        return []
    times, place = [time_us(trial) for trial in section.measured], section.measured.index(winner)
    floor_us = winner.floor_us if share_of_floor(winner.floor_us, winner.median_us) else None
    curve = Markup(figures.best_so_far(times, place, floor_us))
    drawn = [Drawn(curve, f"The winner was candidate {place + 1} of {len(times)}.")]
    predicted = [trial for trial in section.measured if trial.predicted_us and isfinite(trial.predicted_us)]
    if len(predicted) >= LEAST_PREDICTED:
        drawn.append(_cost_model(predicted, winner))
    if floor_us and winner.bytes_per_s and winner.flops_per_s:
        drawn.append(_roofline(winner, winner.bytes_per_s, winner.flops_per_s))
    return drawn


def _cost_model(trials: list[Trial], winner: Trial) -> Drawn:
    predicted_us, times_us = [trial.predicted_us or 0.0 for trial in trials], [time_us(trial) for trial in trials]
    caption = f"Rank correlation {rank_correlation(predicted_us, times_us):.2f}."
    place = _place(winner, trials)
    if place is not None:
        first = sum(each <= predicted_us[place] for each in predicted_us)
        caption += f" The winner was among the model's first {first} of {len(trials)}."
    return Drawn(Markup(figures.predictions(predicted_us, times_us, place)), caption)


def _place(winner: Trial | None, trials: list[Trial]) -> int | None:
    return trials.index(winner) if winner and winner in trials else None


def _roofline(winner: Trial, most_bytes_per_s: float, most_flops_per_s: float) -> Drawn:
    flops = winner.kernel.flops(winner.batch)
    flop_per_byte = flops / winner.kernel.bytes(winner.batch)
    reached = flops / time_us(winner) * 1e6
    bound = "copying" if flop_per_byte * most_bytes_per_s < most_flops_per_s else "multiply-adds"
    share = reached / min(most_flops_per_s, flop_per_byte * most_bytes_per_s)
    limits = (
        f"The device was measured to copy {_rate(most_bytes_per_s, 'B/s')} and to compute "
        f"{_rate(most_flops_per_s, 'FLOP/s')}."
    )
    caption = f"{_rate(reached, 'FLOP/s')}, {share:.0%} of what {bound} would allow. {limits}"
    return Drawn(Markup(figures.roofline(flop_per_byte, reached, most_bytes_per_s, most_flops_per_s)), caption)


def _rate(per_second: float, unit: str) -> str:
    return f"{per_second / 1e12:.3g} T{unit}" if per_second >= 1e12 else f"{per_second / 1e9:.3g} G{unit}"


def _constants(trials: Sequence[Trial], winner: Trial | None) -> list[Drawn]:
    """A figure per constant of a family."""
    measured = [trial for trial in trials if trial.state == "measured"]
    times, place = [time_us(trial) for trial in measured], _place(winner, measured)
    names = vars(measured[0].constants) if measured else ()
    return [
        Drawn(Markup(figures.constant(name, [getattr(trial.constants, name) for trial in measured], times, place)))
        for name in names
    ]
