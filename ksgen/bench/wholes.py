"""Tables 4, 6 and 7 from what `ksgen bench model` and `ksgen bench share` wrote: whole models beside the paper's. Measures nothing."""

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ksgen.bench.log import MOST_BYTES_OF_FILE
from ksgen.bench.roster import LAYERS
from ksgen.bench.tables import Table, percent
from ksgen.errors import KsgenError
from ksgen.files import read
from ksgen.measure.trust import MARK, marked

ACCEPTED = "accepted: the JSON of `ksgen bench model` or `ksgen bench share`"


def tables_of(path: Path) -> list[Table]:
    """The tables of one file."""
    try:
        content = json.loads(read(path, MOST_BYTES_OF_FILE))
        return [shares(content)] if "shares" in content else models(content)
    except OSError as error:
        raise KsgenError(f"{path}: cannot be read ({error.strerror}); {ACCEPTED}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise KsgenError(f"{path}: not such a file ({type(error).__name__}: {error}); {ACCEPTED}") from error


def models(content: Mapping[str, Any]) -> list[Table]:
    """One table per precision and step, sparse over dense."""
    found = []
    for (precision, step), alike in groupby(content["rows"], lambda row: (row["precision"], row["step"])):
        rows = list(alike)
        backends = list(dict.fromkeys(row["backend"] for row in rows))
        lines = [_module_line(module, list(some)) for module, some in groupby(rows, lambda row: row["module"])]
        only = "" if len(layers := content.get("layers", LAYERS)) == len(LAYERS) else f" with sparse {', '.join(layers)} alone"
        title = f"{content['model']}{only} on {content['device']}, batch {content['batch']}, {precision}, {step}"
        columns = ("module", "dense, ms", *backends, "the paper")
        note = f"Tables 4 and 7: sparse over dense, the median of {content['repeats']} rounds (quartiles)."
        note += " The paper: its own kernel, ViT-S/16 in float32 on an A100." if any(row["paper_ratio"] for row in rows) else ""
        found.append(Table(title, columns, tuple(lines), note + _doubted(rows)))
    return found


def shares(content: Mapping[str, Any]) -> Table:
    """Table 6."""
    rows = content["shares"]
    lines = [
        (
            row["model"],
            row["precision"],
            f"{row['whole_us'] / 1e3:.3g}",
            marked(percent(row["share"]), row["doubt"]),
            percent(row["paper"]),
        )
        for row in rows
    ]
    columns = ("model", "precision", "forward pass, ms", "feed-forward linear layers", "the paper")
    title = f"Table 6: the share of a forward pass, batch {content['batch']} on {content['device']}"
    return Table(title, columns, tuple(lines), f"Dense layers, timed alone and with the whole model in turn.{_doubted(rows)}")


def _module_line(module: str, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    ratios = ((marked("{median:.2f}", row["doubt"]) + " ({low:.2f}-{high:.2f})").format(**row["ratio"]) for row in rows)
    paper = rows[0]["paper_ratio"]
    return module, f"{rows[0]['dense_us']['median'] / 1e3:.3f}", *ratios, f"{paper:.2f}" if paper else ""


def _doubted(rows: Sequence[Mapping[str, Any]]) -> str:
    first = next((row["doubt"] for row in rows if row["doubt"]), "")
    return f" {MARK}: it cannot be trusted ({first})." if first else ""
