"""The file that a user may send back: the device, its passport, and the times of trials next to predicted times.

It holds no host name, user name or path. Paths in error messages are replaced by "...".
"""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ksgen.passport.store import Passport
from ksgen.tuning.job import Facts
from ksgen.tuning.trials import Trial

MOST_LETTERS = 300  # length of a reason
OMITTED = "..."
_OF_TRIAL = (
    "kernel", "batch", "family", "constants", "template", "state", "reason", "median_us", "predicted_us", "floor_us",
    "spread", "bytes_per_s", "flops_per_s", "registers", "shared_bytes", "note", "compiler", "driver",
)  # fmt: skip
# a path in quotes may hold spaces
_PATH = re.compile(r"""(['"])[^'"\n]*/[^'"\n]*\1|[^\s:;,'"(]*/[^\s:;,'")]*""")


def report_of(facts: Facts, passport: Passport | None, trials: Iterable[Trial]) -> dict[str, Any]:
    """Return the content of the report, for JSON."""
    return {
        "ksgen": facts.ksgen,
        "device": {
            "name": facts.name,
            "kind": facts.kind,
            "target": facts.target,
            "driver": facts.driver_version,
            "limits": asdict(facts.limits),
        },
        "passport": passport and {
            name: asdict(proof) | {"reason": without_paths(proof.reason)} for name, proof in passport.families.items()
        },
        "trials": [_trial(each) for each in trials],
    }  # fmt: skip


def without_paths(text: str) -> str:
    """Shorten a text, and replace paths, which may hold a user's name."""
    home = str(Path.home())
    return _PATH.sub(OMITTED, text.replace(home, "~") if len(home) > 1 else text)[:MOST_LETTERS]


def _trial(trial: Trial) -> dict[str, Any]:
    changed = {
        "kernel": trial.kernel.name, "constants": asdict(trial.constants), "reason": without_paths(trial.reason)
    }  # fmt: skip
    return {name: changed.get(name, getattr(trial, name)) for name in _OF_TRIAL}
