"""Wisdom between machines: which of two entries is better, how two files merge, and how they differ."""

from pathlib import Path
from typing import Any

import pytest

from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError
from ksgen.families import FAMILIES, cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import (
    Entry,
    Wisdom,
    better,
    differences,
    folders,
    improvements,
    known_devices,
    merge,
    merge_devices,
    only_device,
)

KERNEL = KernelSpec(Pattern(2, 9, 5, 3))
CONSTANTS = FAMILIES["simt"].default(KERNEL, cuda_limits("sm_80"))


def entry(median_us: float | None = 5.0, batch: int = 40, template: str = "", **measured: Any) -> Entry:
    return Entry(
        KERNEL,
        batch,
        "simt",
        CONSTANTS,
        {"median_us": median_us, "template": template or template_digest("simt"), **measured},
    )


def test_fresh_comes_before_stale_and_then_the_faster_one() -> None:
    slow, fast, stale = entry(9.0), entry(5.0), entry(1.0, template="old")
    assert better(slow, fast) is better(fast, slow) is fast
    assert better(stale, slow) is better(slow, stale) is slow
    assert better(entry(None), slow) == slow
    assert better(stale, faster := entry(0.5, template="old")) is faster


def test_reliable_times_come_before_unreliable_ones_however_fast() -> None:
    sound, unreliable, stale = entry(9.0), entry(1.0, note="clocks moved"), entry(0.5, template="old")
    assert better(sound, unreliable) is better(unreliable, sound) is sound
    assert better(unreliable, stale) is better(stale, unreliable) is unreliable
    (found,) = differences({"A": Wisdom([sound])}, {"A": Wisdom([unreliable])})
    assert found.ratio is None


def test_times_of_two_old_templates_compare_with_nothing_so_the_later_one_stays() -> None:
    early, late = entry(1.0, template="old", date="2026-01-01"), entry(9.0, template="older", date="2026-01-02")
    assert better(early, late) is better(late, early) is late


def test_merging_keeps_every_job_once_and_the_first_where_neither_is_better() -> None:
    same, other = entry(5.0, date="first"), entry(5.0, date="second")
    assert merge([same], [other, entry(7.0, batch=50)]) == [same, entry(7.0, batch=50)]
    merged = merge_devices({"A": Wisdom([entry(9.0)])}, {"B": Wisdom([entry()]), "A": Wisdom([entry(5.0)])})
    assert {name: [each.median_us for each in wisdom.entries()] for name, wisdom in merged.items()} == {
        "A": [5.0],
        "B": [5.0],
    }


def test_what_an_offer_brings_is_new_or_better() -> None:
    known, offered = (
        Wisdom([entry(5.0), entry(5.0, batch=50)]),
        Wisdom([entry(6.0), entry(4.0, batch=50), entry(3.0, batch=60)]),
    )
    new, improved = improvements(known, offered)
    assert ([each.batch for each in new], [each.batch for each in improved]) == ([60], [50])


def test_every_job_on_which_two_files_differ_is_reported() -> None:
    first, second = (
        {"A": Wisdom([entry(4.0), entry(5.0, batch=50)])},
        {"A": Wisdom([entry(6.0)]), "B": Wisdom([entry()])},
    )
    found = differences(first, second)
    assert [(each.device, each.batch, each.what, each.ratio) for each in found] == [
        ("A", 40, "measured", 1.5), ("A", 50, "only in the first", None), ("B", 40, "only in the second", None),
    ]  # fmt: skip
    assert differences(first, first) == []


def test_entries_of_two_processors_of_one_name_are_never_compared() -> None:
    here, elsewhere, slower = entry(5.0, target="here"), entry(4.0, target="elsewhere"), entry(6.0, target="here")
    assert merge([here], [elsewhere, slower]) == [here, elsewhere]
    assert improvements(Wisdom([here]), Wisdom([elsewhere, slower])) == ([elsewhere], [])
    found = differences({"A": Wisdom([here])}, {"A": Wisdom([elsewhere, slower])})
    assert [(each.what, each.ratio) for each in found] == [("measured", 1.2), ("only in the second", None)]


def test_a_device_is_found_by_a_part_of_its_name() -> None:
    devices = {"NVIDIA H200": Wisdom(), "NVIDIA A100": Wisdom()}
    assert list(only_device(devices, "h2", "file")) == ["NVIDIA H200"]
    assert only_device(devices, None, "file") == devices
    with pytest.raises(KsgenError, match=r"--device 'V100': file has NVIDIA H200, NVIDIA A100"):
        only_device(devices, "V100", "file")


def test_a_file_under_another_devices_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    assert folders()[1] == tmp_path
    (tmp_path / "wrong.json").write_text('{"device": "Abacus", "entries": []}')
    with pytest.raises(
        KsgenError, match=r"wrong\.json is for Abacus, which launchers read from abacus\.json; rename it"
    ):
        known_devices()
