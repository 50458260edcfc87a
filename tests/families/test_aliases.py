"""Earlier names of families: wherever a caller or a file may give one, the present family is meant."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest

from ksgen.bench.rows import read_rows, write_csv
from ksgen.emit.render import render
from ksgen.errors import ConstantsError
from ksgen.families import ALIASES, FAMILIES, cuda_limits, family_named, present_names
from ksgen.families.simt import SimtConstants
from ksgen.families.tiles import read_constants
from ksgen.launch.choice import choice_by_name
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.tuning.trials import Trial, TrialStore
from ksgen.wisdom.store import Entry, Wisdom, dump, parse
from tests.support.bench_rows import row

KERNEL, GPU = KernelSpec(Pattern(1, 64, 48, 2)), cuda_limits("sm_80")
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALIASES, "plain", FAMILIES["simt"])


def test_no_alias_is_the_name_of_a_family_and_each_means_one() -> None:
    assert not set(ALIASES) & set(FAMILIES)
    assert all(family_named(name).name in FAMILIES for name in ALIASES)
    assert present_names("plain, mma, simt, other") == "simt, mma, other"
    with pytest.raises(ConstantsError, match=r"unknown kernel family 'plainer'; known: amx, "):
        family_named("plainer")


def test_a_family_asked_for_by_an_earlier_name_is_chosen_by_its_present_one() -> None:
    assert choice_by_name("plain", KERNEL, 40, GPU) == choice_by_name("simt", KERNEL, 40, GPU)
    assert render(KERNEL, family="plain").text == render(KERNEL, family="simt").text


def test_wisdom_of_an_earlier_name_is_read_and_written_by_the_present_one() -> None:
    entry = Entry(KERNEL, 40, "simt", CONSTANTS, {"median_us": 1.5})
    text = dump("a device", Wisdom([entry]))
    assert parse(text.replace('"family": "simt"', '"family": "plain"'), "a file") == [entry]
    assert json.loads(text)["entries"][0]["family"] == "simt"


def test_trials_of_an_earlier_name_are_read(tmp_path: Path) -> None:
    trial = Trial(KERNEL, 40, "a device", "plain", CONSTANTS, "01234567", "measured", median_us=1.5)
    store = TrialStore(tmp_path / "trials.sqlite")
    store.add(trial)
    assert TrialStore(tmp_path / "trials.sqlite").trials() == [replace(trial, family="simt")]


def test_results_of_an_earlier_name_are_read(tmp_path: Path) -> None:
    write_csv([row(family="plain"), row(family="plain, mma, simt")], tmp_path / "rows.csv")
    assert [each.family for each in read_rows(tmp_path / "rows.csv")] == ["simt", "simt, mma"]


@dataclass(frozen=True)
class RenamedConstants(SimtConstants):
    entry_family: ClassVar[str] = "plain"
    more: int = 0


def test_a_family_reads_the_constants_that_have_the_names_given() -> None:
    values = {name: getattr(CONSTANTS, name) for name in vars(CONSTANTS)}
    kinds = (SimtConstants, RenamedConstants)
    assert read_constants("simt", kinds, values) == CONSTANTS
    assert read_constants("simt", kinds, values | {"more": 1}) == RenamedConstants(*values.values(), more=1)
    with pytest.raises(ConstantsError, match=r"simt constants are tile_batch, .*, copy; or tile_batch, .*, copy, more; got less"):
        read_constants("simt", kinds, {"less": 1})


def test_entries_keep_the_name_that_they_had_under_an_earlier_family(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = render(KERNEL, CONSTANTS).entry
    monkeypatch.setattr(SimtConstants, "entry_family", "simt")
    assert render(KERNEL, CONSTANTS).entry == usual
    monkeypatch.setattr(SimtConstants, "entry_family", "plain")
    assert render(KERNEL, CONSTANTS).entry != usual
