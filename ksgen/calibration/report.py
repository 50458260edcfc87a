"""The file that a user may send back: the device, its passport, and trials next to predictions. Nothing personal.

No host name, user name or path is in it. Error messages may hold paths, which are left out.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ksgen.passport.store import Passport
from ksgen.tuning.job import Facts
from ksgen.tuning.trials import Trial

MOST_LETTERS = 300  # of a reason
OMITTED = "..."
# in quotes it may hold spaces
_PATH = re.compile(r"""(['"])[^'"\n]*/[^'"\n]*\1|[^\s:;,'"(]*/[^\s:;,'")]*""")


def report_of(facts: Facts, passport: Passport | None, trials: Iterable[Trial]) -> dict[str, Any]:
    """Content of the report as JSON has it."""
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
    """The text without file names, which may hold a user's name, and shortened."""
    home = str(Path.home())
    return _PATH.sub(OMITTED, text.replace(home, "~") if len(home) > 1 else text)[:MOST_LETTERS]


def _trial(trial: Trial) -> dict[str, Any]:
    times = {name: getattr(trial, name) for name in ("median_us", "predicted_us", "floor_us")}
    return {
        "kernel": trial.kernel.name,
        "batch": trial.batch,
        "family": trial.family,
        "constants": asdict(trial.constants),
        "template": trial.template,
        "state": trial.state,
        "reason": without_paths(trial.reason),
        **times,
        "spread": trial.spread,
        "bytes_per_s": trial.bytes_per_s,
        "flops_per_s": trial.flops_per_s,
        "registers": trial.registers,
        "shared_bytes": trial.shared_bytes,
        "note": trial.note,
        "compiler": trial.compiler,
        "driver": trial.driver,
    }
