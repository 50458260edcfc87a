"""Wisdom and the choice it makes: order of look-up, files that merge, and what happens to a damaged one."""

import errno
import json
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksgen import wisdom as wisdoms
from ksgen.build.bundle import write_bundle
from ksgen.build.request import Binary, Request, Resources
from ksgen.emit.render import render, template_digest
from ksgen.errors import KsgenError, KsgenWarning, ToolchainError
from ksgen.families import FAMILIES, Limits, cuda_limits, family_for, family_named
from ksgen.families.simt.shape import SimtConstants
from ksgen.launch.choice import choose, limits_of
from ksgen.launch.planner import Planner
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec, stratified
from ksgen.wisdom import Entry, Wisdom, better, check_writable, dump, file_name, load_wisdom, parse_export, save
from tests.support.fake_gpu import FakeGpu

KERNEL = KernelSpec(Pattern(1, 64, 48, 2))
GPU = cuda_limits("sm_90a")
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")
PRESENT = template_digest("simt")


def parse(text: str, source: str) -> list[Entry]:
    """The entries of a file of one device."""
    (found,) = parse_export(text, source).values()
    return found


def entry(batch: int, stages: int = 3, kernel: KernelSpec = KERNEL, template: str = PRESENT, **more: object) -> Entry:
    measured = {"median_us": 1.5, "date": "a day", "template": template, **more}
    return Entry(kernel, batch, "simt", replace(CONSTANTS, stages=stages), measured)


def test_a_file_reads_back_as_it_was_written_one_line_an_entry() -> None:
    special = entry(25088, kernel=replace(KERNEL, layout="bsf", epilogue=Epilogue(True, "gelu", False), batch=25088))
    text = dump("NVIDIA H200", Wisdom([entry(512, 4), special, entry(64)]))
    assert dump("NVIDIA H200", Wisdom(parse(text, "file"))) == text
    assert len(text.splitlines()) == 5
    assert json.loads(text)["device"] == "NVIDIA H200"
    assert file_name("NVIDIA H200 (SXM)") == "nvidia-h200-sxm.json"


def test_an_earlier_name_of_a_time_is_read() -> None:
    text = dump("NVIDIA H200", Wisdom([entry(64, turn_us=2.5)]))
    (found,) = parse(text, "file")
    assert (found.measured["transpose_us"], "turn_us" in found.measured) == (2.5, False)
    with pytest.raises(KsgenError, match="transpose_us=-1 is not a time in microseconds"):
        parse(text.replace('"turn_us": 2.5', '"turn_us": -1'), "file")


def test_look_up_is_exact_then_nearest_in_ratio_within_a_class() -> None:
    known = Wisdom([entry(64, 2), entry(1000, 3), entry(25088, 4)])
    found = [known.lookup(KERNEL, batch) for batch in (32, 33, 65, 512, 513, 1024, 1025, 16384, 16385, 10**6)]
    assert [each and each.batch for each in found] == [None, 64, None, None, 1000, 1000, None, None, 25088, 25088]
    both = Wisdom([entry(600, 2), entry(1000, 3)])
    assert [both.lookup(KERNEL, batch).batch for batch in (513, 600, 774, 775, 1024)] == [600, 600, 600, 1000, 1000]
    assert known.lookup(replace(KERNEL, layout="bsl"), 64) is None
    assert known.batches(KERNEL) == [64, 1000, 25088]


def test_the_choice_says_who_made_it() -> None:
    known = Wisdom([entry(1000, 4)])
    assert choose(KERNEL, 1000, GPU, known).why == "wisdom, measured at batch 1000"
    assert choose(KERNEL, 900, GPU, known).why == "wisdom, measured at batch 1000, the nearest to 900"
    assert choose(KERNEL, 900, GPU, known).constants.stages == 4
    assert [choose(KERNEL, batch, GPU, known).is_measured for batch in (512, 513, 900, 1024, 1025)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    default = choose(KERNEL, 900, GPU, Wisdom())
    assert default.constants == FAMILIES["simt"].default(KERNEL, GPU, 900)
    assert default.why.startswith("the family's default: no search")


@pytest.mark.parametrize(
    "limits", [GPU, Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, async_copies=False)], ids=["gpu", "cpu"]
)
@pytest.mark.parametrize(
    "batches", [(17, 32), (33, 64), (129, 256), (257, 512), (1025, 2048), (16392, 25088), (16392, 10**6)]
)
def test_all_batches_of_a_class_have_the_default_that_the_winner_beat(limits: Limits, batches: tuple[int, int]) -> None:
    first, last = batches
    # the last has so few outputs that only huge batches leave the cache
    patterns = [*stratified(6), Pattern(1, 2, 8, 1)]
    for kernel in (
        KernelSpec(pattern, precision, "bsl") for pattern in patterns for precision in ("float32", "float16")
    ):
        some = (-(-first // 8) * 8, (first + last) // 16 * 8, last)  # rows that tensor maps take
        assert len({family_for(kernel, limits, batch).default(kernel, limits, batch) for batch in some}) == 1
    assert wisdoms.are_alike(*batches)
    assert not wisdoms.are_alike(first - 1, last) or first > 25088 / 2


def test_a_small_batch_is_a_class_of_its_own() -> None:
    known = Wisdom([entry(1, 2), entry(1000, 3)])
    found = [known.lookup(KERNEL, batch) for batch in (1, 2, 16, 512, 513)]
    assert [each and each.batch for each in found] == [1, None, None, None, 1000]
    few = choose(KERNEL, 16, GPU, known)
    assert few.constants == FAMILIES[few.family].default(KERNEL, GPU, 16)
    assert few.why == "the family's default: searches at batch 1, 1000 do not apply to batch 16"
    of_few = replace(entry(32), family="gemv", constants=FAMILIES["gemv"].default(KERNEL, GPU, 32))
    both = Wisdom([of_few, entry(25088)])
    assert [(found := both.lookup(KERNEL, batch)) and found.batch for batch in (16, 17, 32, 33, 25000)] == [
        None,
        32,
        32,
        None,
        25088,
    ]


def test_a_time_counts_near_the_batch_of_the_present_text_and_where_it_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner()
    known = Wisdom([entry(1000), entry(1000, template="older", kernel=replace(KERNEL, layout="bsl"))])
    monkeypatch.setattr(planner, "_wisdom_of", lambda _device: known)
    monkeypatch.setattr("ksgen.launch.planner.limits_of", lambda device: device)
    device: Any = GPU
    found = [planner.measured(device, KERNEL, batch) for batch in (1000, 513, 512, 1025)]
    assert [each and each.median_us for each in found] == [1.5, 1.5, None, None]
    assert planner.measured(device, replace(KERNEL, layout="bsl"), 1000) is None
    assert planner.measured(device, replace(KERNEL, precision="float64"), 1000) is None
    unreliable = Wisdom([entry(1000, note="clocks moved")])
    monkeypatch.setattr(planner, "_wisdom_of", lambda _device: unreliable)
    assert planner.measured(device, KERNEL, 1000) is None
    monkeypatch.setattr(planner, "_wisdom_of", lambda _device: known)
    device = replace(GPU, shared_bytes=1024)
    assert planner.measured(device, KERNEL, 1000) is None


def test_a_chains_entry_reads_back_as_it_was_written() -> None:
    processor = Limits(2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False)
    chain = replace(KERNEL, chains=(Pattern(6, 16, 16, 1), KERNEL.pattern))
    found = Entry(chain, 1000, "vector", FAMILIES["vector"].default(chain, processor, 1000), {"median_us": 1.5})
    text = dump("EPYC", Wisdom([found]))
    assert json.loads(text)["entries"][0]["before"] == [[6, 16, 16, 1]]
    (again,) = parse(text, "file")
    assert again == found
    assert Wisdom([again]).lookup(chain, 1000) == found
    assert Wisdom([again]).lookup(replace(chain, epilogue=Epilogue(True, "relu"), between="gelu"), 1000) == found
    for more in ({"between": "relu"}, {"out_layout": "bsl"}):
        other = replace(chain, **more)
        entry = Entry(other, 1000, "vector", FAMILIES["vector"].default(other, processor, 1000), {"median_us": 1.5})
        assert Entry.from_json(json.loads(json.dumps(entry.as_json()))) == entry
        assert Wisdom([entry]).lookup(chain, 1000) is None


def test_a_groups_entry_serves_this_group_alone_and_slices_too() -> None:
    processor = Limits(2**18, registers=0, is_cpu=True, vector_bytes=32, multiprocessors=4, async_copies=False)
    group = KernelSpec(((KERNEL.pattern,), (KERNEL.pattern,)), "float32", "bsf", Epilogue())
    found = Entry(group, 1000, "vector", FAMILIES["vector"].default(group, processor, 1000), {"median_us": 1.5})
    (again,) = parse(dump("a device", Wisdom([found])), "file")
    assert again == found
    for asked in (group, replace(group, stride="any"), replace(group, epilogue=Epilogue(True, "relu"))):
        assert Wisdom([again]).lookup(asked, 1000) == found
    for other in (KERNEL, replace(group, chains=group.chains * 2), replace(group, layout="bsl")):
        assert Wisdom([again]).lookup(other, 1000) is None
    assert Wisdom([again]).lookup(KERNEL, 1000) is None


def test_a_stale_entry_is_a_first_guess() -> None:
    stale = Wisdom([entry(1000, 4, template="0a0b0c0d")])
    guess = choose(KERNEL, 900, GPU, stale)
    assert guess.constants.stages == 4
    first_guess = "wisdom of another template version, a first guess: tune again; "
    assert guess.why == f"{first_guess}measured at batch 1000, the nearest to 900"
    assert not guess.is_measured
    unnamed = Wisdom([Entry(KERNEL, 64, "simt", CONSTANTS, {"median_us": 1.5})])
    assert choose(KERNEL, 64, GPU, unnamed).why.startswith(first_guess)


def test_a_stale_entry_wins_over_no_fresh_one() -> None:
    fresh, stale = entry(64, 3), entry(64, 4, template="0a0b0c0d")
    later = entry(64, 2, template="0e0f0001")
    for entries, stages in (([stale, fresh], 3), ([fresh, stale], 3), ([stale, later], 2), ([fresh, entry(64, 2)], 2)):
        assert [each.constants.stages for each in Wisdom(entries).entries()] == [stages]


def test_an_unreliable_time_is_reported_and_never_beats_a_reliable_one() -> None:
    unreliable, sound, stale = entry(64, 4, note="clocks moved"), entry(64, 3), entry(64, 2, template="0a0b0c0d")
    assert (unreliable.why_unreliable, sound.why_unreliable) == ("clocks moved", "")
    for entries, stages in (
        ([unreliable, sound], 3),
        ([sound, unreliable], 3),
        ([stale, unreliable], 4),
        ([unreliable, stale], 4),
    ):
        assert [each.constants.stages for each in Wisdom(entries).entries()] == [stages]
    assert (
        choose(KERNEL, 64, GPU, Wisdom([unreliable])).why
        == "wisdom, measured at batch 64; its time is unreliable: clocks moved"
    )
    text = dump("NVIDIA H200", Wisdom([unreliable]))
    assert [each.why_unreliable for each in parse(text, "file")] == ["clocks moved"]


@pytest.mark.parametrize("note", [{}, {"note": "noisy"}])
def test_any_search_replaces_a_trial_and_no_trial_replaces_a_search(note: dict[str, str]) -> None:
    searched, tried = entry(1000, 4, median_us=9.0, **note), entry(1000, 5, median_us=1.0, trial=True)
    for pair in ((searched, tried), (tried, searched)):
        (kept,) = Wisdom(pair).entries()
        assert kept is searched
        assert better(*pair) is searched
    assert tried.is_sound  # its time decides between one launch and several
    stale = replace(searched, measured={**searched.measured, "template": "of long ago"})
    assert Wisdom([tried, stale]).entries() == [tried]
    again = entry(1000, 6, median_us=2.0, trial=True)
    assert Wisdom([tried, again]).entries() == [again]


def test_an_entry_of_a_trial_is_marked_and_says_how_it_compares() -> None:
    tried = entry(1000, 4, median_us=2.0, default_us=3.0, predicted_us=1.0, trial=True)
    text = dump("NVIDIA H200", Wisdom([tried]))
    (read,) = parse(text, "file")
    assert read == tried
    assert read.is_trial
    assert read.over_default == 1.5
    why = "wisdom of a trial, measured at batch 1000; 1.50 times as fast as the default"
    assert choose(KERNEL, 1000, GPU, Wisdom([read])).why == why
    assert not entry(1000).is_trial
    assert entry(1000).over_default is None
    assert replace(read, measured={**read.measured, "note": "noisy"}).over_default is None
    with pytest.raises(KsgenError, match="entry 1: trial='yes' is not true or false; delete that line"):
        parse(text.replace('"trial": true', '"trial": "yes"'), "file")


def test_an_entry_of_another_processor_of_the_same_name_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    here, elsewhere, anywhere = entry(1000, target="host here"), entry(2000, target="host elsewhere"), entry(4000)
    save("AMD EPYC", [here, elsewhere, anywhere])
    assert load_wisdom("AMD EPYC", target="host here").entries() == [here, anywhere]
    assert load_wisdom("AMD EPYC").entries() == [here, elsewhere, anywhere]
    text = dump("AMD EPYC", Wisdom([here])).replace('"host here"', "1")
    with pytest.raises(KsgenError, match="entry 1: target=1 is not a target of a processor; delete that line"):
        parse(text, "file")


def test_devices_of_one_name_have_wisdom_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor may have one name as a native device and as one of OpenCL."""
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    save("AMD EPYC", [entry(1000, target="sm_80")])
    planner, devices = Planner(), [FakeGpu("AMD EPYC", target=target) for target in ("sm_80", "sm_90a")]
    for given in (devices, devices[::-1]):
        planner.forget()
        assert {each.target: planner.choice(each, KERNEL, 1000).from_wisdom for each in given} == {
            "sm_80": True,
            "sm_90a": False,
        }


def test_processors_of_one_name_keep_entries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    searched, tried = entry(1000, 4, target="host here"), entry(1000, 5, target="host elsewhere", trial=True)
    for each in (searched, tried):
        save("AMD EPYC", [each])
    for each, target in ((searched, "host here"), (tried, "host elsewhere")):
        known = load_wisdom("AMD EPYC", target=target)
        assert known.lookup(KERNEL, 1000) == known.of(KERNEL, 1000) == each
        assert (known.entries(), known.batches(KERNEL)) == ([each], [1000])
    again = entry(1000, 2, target="host here")
    save("AMD EPYC", [again])
    both = load_wisdom("AMD EPYC")
    assert (both.entries(), both.batches(KERNEL)) == ([tried, again], [1000])


def test_an_entry_that_names_its_processor_precedes_one_of_equal_rank_that_does_not() -> None:
    named, unnamed, noisy = entry(1000, 2, target="host"), entry(1000, 3), entry(1000, 4, target="host", note="noisy")
    for entries, first in (([named, unnamed], named), ([unnamed, named], named), ([noisy, unnamed], unnamed)):
        known = Wisdom(entries)
        assert known.lookup(KERNEL, 1000) == known.of(KERNEL, 1000) == first


def test_a_reliable_time_near_by_wins_over_a_nearer_unreliable_one() -> None:
    sound, unreliable, stale = entry(1100, 3), entry(1500, 4, note="clocks moved"), entry(1600, 2, template="0a0b0c0d")
    known = Wisdom([unreliable, stale, sound])
    found = {batch: known.lookup(KERNEL, batch) for batch in (1024, 1025, 1500, 1600, 2048, 2049)}
    assert {batch: each and each.constants.stages for batch, each in found.items()} == {
        1024: None,
        1025: 3,
        1500: 3,
        1600: 3,
        2048: 3,
        2049: None,
    }
    assert Wisdom([unreliable, stale]).lookup(KERNEL, 1500) == unreliable
    told = "wisdom, measured at batch 1100, the nearest to 1500, whose own time is unreliable"
    assert choose(KERNEL, 1500, GPU, known).why == told
    of_another_text = told.replace("1500", "1600").replace(
        "own time is unreliable", "own entry is of another template version"
    )
    assert choose(KERNEL, 1600, GPU, known).why == of_another_text
    assert Wisdom([unreliable, entry(2048, 3)]).lookup(KERNEL, 1500).batch == 2048
    assert Wisdom([unreliable, entry(2049, 3)]).lookup(KERNEL, 1500) == unreliable


def test_entries_of_families_that_do_not_take_a_batch_are_passed_over() -> None:
    kernel = replace(KERNEL, precision="float16", layout="bsl")
    found = {name: family_named(name).default(kernel, GPU) for name in ("wgmma_shared", "mma")}
    hopper = Entry(kernel, 1024, "wgmma", found["wgmma_shared"], {"template": template_digest("wgmma")})
    known = Wisdom([hopper, Entry(kernel, 600, "mma", found["mma"], {"template": template_digest("mma")})])
    assert choose(kernel, 1000, GPU, known).family == "wgmma"
    for batch, aligned in ((1001, True), (1000, False), (1024, False)):  # rows of 2002 bytes; arrays off their 16 bytes
        assert (
            choose(kernel, batch, GPU, known, aligned).why == f"wisdom, measured at batch 600, the nearest to {batch}"
        )
    assert choose(kernel, 1001, GPU, Wisdom([hopper])).why.startswith("the family's default: searches at batch 1024")
    assert "does not run on this device" in choose(kernel, 1024, cuda_limits("sm_100"), Wisdom([hopper])).why


def test_wisdom_that_does_not_fit_the_device_is_skipped_and_reported() -> None:
    small = Limits(16 * 1024)
    chosen = choose(KERNEL, 1000, small, Wisdom([entry(1000, 4)]))
    assert "the constants in wisdom do not fit this device" in chosen.why
    assert FAMILIES["simt"].shared_bytes(KERNEL, chosen.constants) <= small.shared_bytes


def test_the_users_file_wins_over_the_bundles_and_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder, stages in ((shipped, 2), (own, 4)):
        folder.mkdir()
        (folder / "gpu.json").write_text(dump("gpu", Wisdom([entry(64, stages)])))
    monkeypatch.setattr(wisdoms, "resource", lambda name: shipped)
    monkeypatch.setattr(wisdoms, "wisdom_dir", lambda: own)
    packed = dump("gpu", Wisdom([entry(64, 3), entry(128, 3)]))
    known = load_wisdom("GPU", [packed])
    assert known.lookup(KERNEL, 64).constants.stages == 4
    assert known.lookup(KERNEL, 128).constants.stages == 3
    (own / "gpu.json").unlink()
    assert load_wisdom("GPU", [packed]).lookup(KERNEL, 64).constants.stages == 3
    assert load_wisdom("GPU").lookup(KERNEL, 64).constants.stages == 2


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda text: text[:40], "file: not a wisdom file"),
        (lambda text: "[]", "file: not a wisdom file (entries is None, not a list)"),
        (lambda text: "5", "file: not a wisdom file (entries is None, not a list)"),
        (
            lambda text: '{"device": "gpu", "entries": [5]}',
            "file: entry 1: 5 is not an entry; delete that line and tune again",
        ),
        (
            lambda text: text.replace('"simt"', '"magic"'),
            f"file: entry 1: unknown kernel family 'magic'; known: {', '.join(FAMILIES)}; delete",
        ),
        (
            lambda text: text.replace('"stages": 3', '"stages": 1'),
            "file: entry 1: ks_1x64x48x2_float32_bsf: stages=1 must be at least 2; try 2",
        ),
        (lambda text: text.replace('"stages": 3, ', ""), "file: entry 1: simt constants are tile_batch"),
        (lambda text: text.replace("[1, 64, 48, 2]", "[1, 64, 48]"), "file: entry 1: "),
        (lambda text: text.replace('"float32"', '"float8"'), "file: entry 1: "),
        (
            lambda text: text.replace('"batch": 64', '"batch": 1' + "0" * 400),
            "file: entry 1: batch=a number of 1329 bits is not a whole number",
        ),
        (
            lambda text: text.replace('"stages": 3', '"stages": 1' + "0" * 400),
            "file: entry 1: a constant above 2147483647",
        ),
        (lambda text: text.replace('"bias": false', '"a\\nb": 1'), "file: entry 1: "),
        (lambda text: text.replace('"measured": {', '"measured": [], "more": {'), "file: entry 1: {'batch': 64, "),
        (
            lambda text: text.replace("1.5", "-1.5"),
            "file: entry 1: median_us=-1.5 is not a time in microseconds; delete",
        ),
        (
            lambda text: text.replace('"a day"', '"a day", "note": 5'),
            "file: entry 1: note=5 is not text in one line; delete",
        ),
        (
            lambda text: text.replace('"a day"', '"a day", "attempts": -1'),
            "file: entry 1: attempts=-1 is not a number of trials; delete",
        ),
        (
            lambda text: text.replace('"a day"', '"a day", "note": "a\\nb"'),
            "file: entry 1: note='a\\nb' is not text in one line; delete",
        ),
        (lambda text: text.replace("1.5", '"soon"'), "file: entry 1: median_us='soon' is not a time"),
        (
            lambda text: text.replace('"pattern"', '"job": "chain", "pattern"', 1),
            "file: entry 1: job='chain' of a kernel whose job is multiply; delete",
        ),
        (
            lambda text: text.replace('"pattern"', '"before": [[1, 96, 2, 1]], "pattern"', 1),
            "file: entry 1: job='multiply' of a kernel whose job is chain; delete",
        ),
        (lambda text: '{"entries": {"a": 1}}', "file: not a wisdom file (entries is {'a': 1}, not a list)"),
    ],
)
def test_a_damaged_file_is_one_clear_error(damage: object, message: str) -> None:
    text = dump("gpu", Wisdom([entry(64)]))
    with pytest.raises(KsgenError) as caught:
        parse(damage(text), "file")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_an_entry_from_before_a_constant_with_a_default_means_that_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older files without any such constant can still be read and extended."""
    monkeypatch.setattr(wisdoms, "wisdom_dir", lambda: tmp_path)
    kernel = replace(KERNEL, precision="float16")
    constants = family_named("wgmma_registers").default(kernel, GPU)
    text = dump("gpu", Wisdom([Entry(kernel, 64, "wgmma", constants, {"template": "0a0b0c0d"})]))
    (tmp_path / "gpu.json").write_text(text.replace('"cluster_batch": 1, "cluster_out": 1, ', ""))
    assert "cluster" not in (tmp_path / "gpu.json").read_text()
    save("gpu", [entry(64)])
    (found,) = (each for each in load_wisdom("gpu", strict=True).entries() if each.kernel == kernel)
    assert found.constants == constants
    assert "a first guess" in choose(kernel, 64, GPU, Wisdom([found])).why
    with pytest.raises(KsgenError, match=r"wgmma constants are tile_batch, .*, cluster_out, x_from; got"):
        parse(text.replace('"stages"', '"steps"'), "file")


def test_damage_costs_launchers_only_the_damaged_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder in (shipped, own):
        folder.mkdir()
    (shipped / "gpu.json").write_text(dump("gpu", Wisdom([entry(64, 2)])))
    (own / "gpu.json").write_text(
        dump("gpu", Wisdom([entry(1, 3), entry(128, 3), entry(1000, 4)])).replace('"stages": 3', '"stages": 1')
    )
    monkeypatch.setattr(wisdoms, "resource", lambda name: shipped)
    monkeypatch.setattr(wisdoms, "wisdom_dir", lambda: own)
    known = load_wisdom("gpu")
    assert [(each.batch, each.constants.stages) for each in known.entries()] == [(64, 2), (1000, 4)]
    (warning,) = caplog.messages
    assert warning.startswith(f"unreadable wisdom is ignored: {own}/gpu.json: entry 1: ")
    assert warning.endswith(" (and 1 more like it)")
    with pytest.raises(KsgenError, match=r"own/gpu\.json: entry 1: .*; delete that line and tune again"):
        load_wisdom("gpu", strict=True)
    (own / "gpu.json").unlink()
    (own / "gpu.json").mkdir()
    assert [each.batch for each in load_wisdom("gpu", ["no JSON"]).entries()] == [64]
    assert len(caplog.messages) == 3
    assert "the bundle: not a wisdom file" in caplog.messages[1]
    assert "own/gpu.json: cannot be read" in caplog.messages[2]


def test_limits_of_a_gpu_are_those_of_its_target() -> None:
    assert limits_of(FakeGpu()) == cuda_limits("sm_90a")
    assert not limits_of(FakeGpu(target="sm_75")).async_copies
    assert limits_of(FakeGpu(target="sm_75")).shared_bytes == 64 * 1024


def test_a_bundle_serves_a_machine_that_may_not_compile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_NO_COMPILE", "1")
    gpu, planner = FakeGpu(), Planner()
    with pytest.raises(ToolchainError, match=r"ks_1x64x48x2_float32_bsf.*sm_90a"):
        planner.plan(gpu, KERNEL, 100)
    tuned = render(KERNEL, CONSTANTS)
    packed = Binary(
        tuned.text.encode(),
        tuned.entry,
        "sm_90a",
        Resources(),
        {"compiler": "nvcc", "compiler_version": "13.0", "options": "[]"},
    )
    known = Wisdom([entry(100)])
    write_bundle(
        tmp_path / "b.ksb",
        [(Request(tuned.text, tuned.entry, "sm_90a"), packed)],
        {file_name(gpu.name): dump(gpu.name, known).encode()},
    )
    planner.use_bundle(tmp_path / "b.ksb")
    plan = planner.plan(gpu, KERNEL, 100)
    assert plan.choice.why == "wisdom, measured at batch 100"
    assert plan.binary.data == packed.data
    assert planner.plan(gpu, KERNEL, 100) is plan


def _save(folder: Path, first: int) -> None:
    os.environ["KSGEN_WISDOM_DIR"] = str(folder)
    for batch in range(first, 40, 2):
        save("GPU 1", [entry(batch)])


def test_processes_that_save_at_once_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawn = multiprocessing.get_context("spawn")
    savers = [spawn.Process(target=_save, args=(tmp_path, first)) for first in (1, 2)]
    for saver in savers:
        saver.start()
    for saver in savers:
        saver.join()
    assert [each.batch for each in parse((tmp_path / "gpu-1.json").read_text(), "file")] == list(range(1, 40))


def test_saving_replaces_the_same_job_and_keeps_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "new"))
    assert save("gpu", [entry(64, 2), entry(128, 2)]) == tmp_path / "new" / "gpu.json"
    save("gpu", [entry(64, 4)])
    assert [(each.batch, each.constants.stages) for each in load_wisdom("gpu").entries()] == [(64, 4), (128, 2)]


def test_saving_into_a_damaged_file_or_folder_is_refused_and_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    (tmp_path / "gpu.json").write_text("my own notes")
    with pytest.raises(KsgenError, match=r"gpu\.json: not a wisdom file"):
        save("gpu", [entry(64)])
    assert (tmp_path / "gpu.json").read_text() == "my own notes"
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "gpu.json"))
    with pytest.raises(KsgenError, match=r"gpu\.json/gpu\.json: cannot be written"):
        save("gpu", [entry(64)])


def test_winners_are_saved_without_locks_and_a_warning_precedes_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: object, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    check_writable()
    assert list((tmp_path / "wisdom").iterdir()) == []
    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(
        KsgenWarning,
        match=r"wisdom: its file system has no locks, so searches that save at once can lose results",
    ):
        check_writable()
    save("gpu", [entry(64)])
    save("gpu", [entry(128)])
    assert [each.batch for each in load_wisdom("gpu").entries()] == [64, 128]
    assert sorted(os.listdir(tmp_path / "wisdom")) == [".gpu.json.lock", "gpu.json"]


def test_other_errors_of_a_lock_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    (tmp_path / "victim").write_text("dear")
    (tmp_path / ".gpu.json.lock").symlink_to("victim")
    with pytest.raises(KsgenError, match=r"gpu\.json: cannot be written \(Too many levels of symbolic links\)"):
        save("gpu", [entry(64)])
    assert (tmp_path / "victim").read_text() == "dear"


def test_a_pipe_in_the_place_of_wisdom_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    os.mkfifo(tmp_path / "gpu.json")
    assert load_wisdom("gpu").entries() == []
    assert "gpu.json: cannot be read (it is not a regular file)" in caplog.text
    with pytest.raises(KsgenError, match=r"gpu\.json: cannot be read \(it is not a regular file\)"):
        save("gpu", [entry(64)])


@pytest.mark.parametrize("name", ["", "gpu.json"])
def test_wisdom_that_others_can_write_is_passed_over_and_not_added_to(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "wisdom"
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(folder))
    save("gpu", [entry(64)])
    (folder / name).chmod(0o777)
    assert load_wisdom("gpu").entries() == []
    assert (
        "every user can write to it; take that right away (chmod o-w), or accept it with KSGEN_TRUST=all" in caplog.text
    )
    with pytest.raises(KsgenError, match=r"every user can write to it; take that right away"):
        save("gpu", [entry(128)])
    monkeypatch.setenv("KSGEN_TRUST", "all")
    save("gpu", [entry(128)])
    assert [each.batch for each in load_wisdom("gpu").entries()] == [64, 128]
