"""Figures from the paper and its authors' files, for comparison with measurements. The data is in `published.yaml`."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ksgen.pattern import Pattern


@dataclass(frozen=True)
class Claim:
    """A share of patterns, a median factor, or both, with the place in the paper."""

    precision: str
    where: str
    layout: str = ""
    share: float | None = None
    factor: float | None = None


@cache
def published() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text(encoding="utf-8"))
    return content


def claim(name: str) -> Claim:
    return Claim(**published()["claims"][name])


def published_patterns() -> list[Pattern]:
    """Patterns whose times the authors published."""
    return [Pattern.parse(text) for text in published()["times"]]


def published_us(pattern: str, precision: str, layout: str) -> float | None:
    """Microseconds that the authors published for their kernel; None if they published none."""
    milliseconds = published()["times"].get(pattern, {}).get(f"{precision} {layout}")
    return None if milliseconds is None else milliseconds * 1e3
