"""Wisdom and the choice it makes: order of look-up, files that merge, and what happens to a damaged one."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ksgen import wisdom as wisdoms
from ksgen.bundle import write_bundle
from ksgen.emit import render
from ksgen.errors import KsgenError, ToolchainError
from ksgen.families import FAMILIES, Limits, cuda_limits
from ksgen.families.simt import SimtConstants
from ksgen.pattern import Pattern
from ksgen.plan import Planner, choose, limits_of
from ksgen.resources import Binary, Request, Resources
from ksgen.spec import Epilogue, KernelSpec
from ksgen.wisdom import Entry, Wisdom, dump, file_name, load_wisdom, parse
from tests.fake_gpu import FakeGpu

KERNEL = KernelSpec(Pattern(1, 64, 48, 2))
GPU = cuda_limits("sm_90a")
CONSTANTS = SimtConstants(64, 32, 8, 2, 8, 8, 3, 1, "async")


def entry(batch: int, stages: int = 3, kernel: KernelSpec = KERNEL) -> Entry:
    return Entry(kernel, batch, "simt", replace(CONSTANTS, stages=stages), {"median_us": 1.5, "date": "a day"})


def test_a_file_reads_back_as_it_was_written_one_line_an_entry() -> None:
    special = entry(25088, kernel=replace(KERNEL, layout="bsf", epilogue=Epilogue(True, "gelu", False), batch=25088))
    text = dump("NVIDIA H200", Wisdom([entry(512, 4), special, entry(64)]))
    assert dump("NVIDIA H200", Wisdom(parse(text, "file"))) == text
    assert len(text.splitlines()) == 5
    assert json.loads(text)["device"] == "NVIDIA H200"
    assert file_name("NVIDIA H200 (SXM)") == "nvidia-h200-sxm.json"


def test_look_up_is_exact_then_nearest_in_ratio() -> None:
    known = Wisdom([entry(64, 2), entry(1000, 3), entry(25088, 4)])
    assert [known.lookup(KERNEL, batch).batch for batch in (1, 64, 250, 260, 1000, 5500, 10**6)] == [64, 64, 64, 1000, 1000, 25088, 25088]
    assert known.lookup(replace(KERNEL, layout="bsl"), 64) is None
    assert known.batches(KERNEL) == [64, 1000, 25088]


def test_the_choice_says_who_made_it() -> None:
    known = Wisdom([entry(1000, 4)])
    assert choose(KERNEL, 1000, GPU, known).why == "wisdom, measured at batch 1000"
    assert choose(KERNEL, 900, GPU, known).why == "wisdom, measured at batch 1000, the nearest to 900"
    assert choose(KERNEL, 900, GPU, known).constants.stages == 4
    default = choose(KERNEL, 900, GPU, Wisdom())
    assert default.constants == FAMILIES["simt"].default(KERNEL, GPU)
    assert default.why.startswith("the family's default: no search")


def test_wisdom_that_does_not_fit_the_device_is_passed_over_and_said() -> None:
    small = Limits(16 * 1024)
    chosen = choose(KERNEL, 1000, small, Wisdom([entry(1000, 4)]))
    assert "what wisdom has does not fit this device" in chosen.why
    assert FAMILIES["simt"].shared_bytes(KERNEL, chosen.constants) <= small.shared_bytes


def test_the_users_file_wins_over_the_bundles_and_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        (lambda text: "[]", "file: not a wisdom file"),
        (
            lambda text: text.replace('"simt"', '"magic"'),
            "file: entry 1: unknown kernel family 'magic'; known: mma, simt, gradient_mma, gradient; delete",
        ),
        (lambda text: text.replace('"stages": 3', '"stages": 1'), "file: entry 1: ks_1x64x48x2_float32_bsf: stages is at least 2"),
        (lambda text: text.replace('"stages": 3, ', ""), "file: entry 1: simt constants are tile_batch"),
        (lambda text: text.replace("[1, 64, 48, 2]", "[1, 64, 48]"), "file: entry 1: "),
        (lambda text: text.replace('"float32"', '"float8"'), "file: entry 1: "),
        (
            lambda text: text.replace('"batch": 64', '"batch": 1' + "0" * 400),
            "file: entry 1: batch=a number of 1329 bits is no whole number",
        ),
        (lambda text: text.replace('"stages": 3', '"stages": 1' + "0" * 400), "file: entry 1: a constant above 2147483647"),
        (lambda text: text.replace('"bias": false', '"a\\nb": 1'), "file: entry 1: "),
        (lambda text: text.replace('"measured": {', '"measured": [], "more": {'), "file: entry 1: 'list' object is not a mapping"),
        (lambda text: '{"entries": {"a": 1}}', "file: not a wisdom file (entries is {'a': 1}, not a list)"),
    ],
)
def test_a_damaged_file_is_one_clear_error(damage: object, message: str) -> None:
    text = dump("gpu", Wisdom([entry(64)]))
    with pytest.raises(KsgenError) as caught:
        parse(damage(text), "file")
    assert str(caught.value).startswith(message)
    assert len(str(caught.value).splitlines()) == 1


def test_damage_costs_launchers_only_the_damaged_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shipped, own = tmp_path / "shipped", tmp_path / "own"
    for folder in (shipped, own):
        folder.mkdir()
    (shipped / "gpu.json").write_text(dump("gpu", Wisdom([entry(64, 2)])))
    (own / "gpu.json").write_text(dump("gpu", Wisdom([entry(1, 3), entry(128, 3), entry(1000, 4)])).replace('"stages": 3', '"stages": 1'))
    monkeypatch.setattr(wisdoms, "resource", lambda name: shipped)
    monkeypatch.setattr(wisdoms, "wisdom_dir", lambda: own)
    known = load_wisdom("gpu")
    assert [(each.batch, each.constants.stages) for each in known.entries()] == [(64, 2), (1000, 4)]
    (warning,) = caplog.messages
    assert warning.startswith(f"wisdom that cannot be read is passed over: {own}/gpu.json: entry 1: ")
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
        tuned.text.encode(), tuned.entry, "sm_90a", Resources(), {"compiler": "nvcc", "compiler_version": "13.0", "options": "[]"}
    )
    known = Wisdom([Entry(KERNEL, 100, "simt", CONSTANTS, {})])
    write_bundle(
        tmp_path / "b.ksb", [(Request(tuned.text, tuned.entry, "sm_90a"), packed)], {file_name(gpu.name): dump(gpu.name, known).encode()}
    )
    planner.use_bundle(tmp_path / "b.ksb")
    plan = planner.plan(gpu, KERNEL, 100)
    assert plan.choice.why == "wisdom, measured at batch 100"
    assert plan.binary.data == packed.data
    assert planner.plan(gpu, KERNEL, 100) is plan
