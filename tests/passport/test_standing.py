"""Tests of the families that launchers may choose by a passport, and of the child that makes one."""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen import passport
from ksgen.devices import libcuda
from ksgen.devices.native import open_device
from ksgen.emit.templates import template_digest
from ksgen.errors import ConstantsError, DeviceError, KsgenWarning
from ksgen.families import FAMILIES
from ksgen.launch.choice import choice_by_name, choose, expectation, limits_of
from ksgen.launch.planner import Planner
from ksgen.passport import record
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import Entry, Wisdom
from tests.passport.test_store import proof
from tests.support.fake_gpu import FakeGpu

KERNEL, BATCH = KernelSpec(Pattern(1, 1024, 1024, 1), "bfloat16"), 25088
WGMMA = FAMILIES["wgmma"]


def permitted(device: Any) -> set[str]:
    """Families that launchers may choose on a device."""
    return set(FAMILIES) - {bar.family for bar in passport.bars(device)}


def chosen(gpu: Any, wisdom: Wisdom | None = None) -> Any:
    return choose(KERNEL, BATCH, limits_of(gpu), wisdom or Wisdom())


def test_without_a_passport_no_family_that_needs_one_is_chosen(gpu: FakeGpu) -> None:
    assert set(FAMILIES) - permitted(gpu) == {"wgmma"}
    found = chosen(gpu)
    assert found.family == "mma"
    said = expectation(found, KERNEL, BATCH, limits_of(gpu))
    why = r"which is not proven yet on Fake GPU \(ksgen calibrate proves it\)"
    assert re.fullmatch(rf"; the cost model expects wgmma, {why}, to be \d\.\d\d times as fast", said)


def test_a_proven_family_is_chosen(gpu: FakeGpu) -> None:
    record(gpu, {"wgmma": proof()})
    assert permitted(gpu) == set(FAMILIES)
    assert limits_of(gpu).bars == ()
    assert chosen(gpu).family == "wgmma"


def test_a_disabled_family_is_refused_by_default_by_wisdom_and_by_name(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    record(gpu, {"wgmma": proof(reason="it hung")})
    limits = limits_of(gpu)
    known = Wisdom([Entry(KERNEL, BATCH, "wgmma", WGMMA.default(KERNEL, limits, BATCH), {})])
    assert chosen(gpu).family == "mma"
    found = chosen(gpu, known)
    assert (found.family, found.misfit) == ("mma", False)
    assert found.why == "the family's default: wisdom has wgmma, which is disabled on Fake GPU: it hung"
    with pytest.raises(ConstantsError) as told:
        choice_by_name("wgmma_shared", KERNEL, BATCH, limits)
    assert str(told.value) == f"{KERNEL.name}: wgmma is disabled on Fake GPU: it hung; KSGEN_PERMIT=wgmma forces it"
    monkeypatch.setenv("KSGEN_PERMIT", "mma, wgmma_shared")
    passport.forget()
    assert chosen(gpu, known).family == "wgmma"
    assert choice_by_name("wgmma", KERNEL, BATCH, limits_of(gpu)).family == "wgmma"


def test_an_unproven_family_is_taken_by_name_but_not_by_wisdom(gpu: FakeGpu) -> None:
    known = Wisdom([Entry(KERNEL, BATCH, "wgmma", WGMMA.default(KERNEL, limits_of(gpu), BATCH), {})])
    assert chosen(gpu, known).family == "mma"
    assert choice_by_name("wgmma", KERNEL, BATCH, limits_of(gpu)).family == "wgmma"


def test_a_measured_time_of_a_family_that_may_not_be_chosen_decides_nothing(gpu: FakeGpu) -> None:
    measured = {"median_us": 1.0, "template": template_digest("wgmma")}
    planner: Any = Planner()
    own = Entry(KERNEL, BATCH, "wgmma", WGMMA.default(KERNEL, limits_of(gpu), BATCH), measured)
    planner._wisdom[gpu.name, gpu.target] = Wisdom([own])
    assert planner.measured(gpu, KERNEL, BATCH) is None
    record(gpu, {"wgmma": proof()})
    passport.forget()
    assert planner.measured(gpu, KERNEL, BATCH) == own


def test_simple_families_can_be_disabled_too_and_the_reason_is_reported_if_none_is_left(gpu: FakeGpu) -> None:
    kernel = KernelSpec(Pattern(1, 64, 64, 1), "float64")
    record(gpu, {"simt": proof("simt", "it lies")})
    with pytest.raises(ConstantsError, match=r"no family .* on this device; simt is disabled on Fake GPU: it lies"):
        choose(kernel, BATCH, limits_of(gpu), Wisdom())


def test_processors_and_other_targets_need_no_proof(gpu: FakeGpu) -> None:
    assert permitted(open_device(0)) == set(FAMILIES)
    gpu.target = "sm_80"
    assert permitted(gpu) == set(FAMILIES)


class ReadOnce:
    """Attributes that another thread resets after their first read."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return self.values.pop(name, None)


def test_another_thread_may_take_the_child_and_forget_the_bars_at_any_time(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, running = passport.bars(gpu), SimpleNamespace(poll=lambda: None)
    monkeypatch.setitem(passport._known, gpu, ReadOnce(bars=wanted, child=running))
    assert passport.bars(gpu) == wanted != ()


def test_the_file_is_read_once(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr(passport, "load", lambda device: reads.append(device))
    for _ in range(3):
        limits_of(gpu)
    assert reads == [gpu]


# ---- the background child


@pytest.fixture
def child(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The commands of the children that are started: each ends at once, as `_CHILD` says."""
    started: list[list[str]] = []
    popen = subprocess.Popen

    def start(command: list[str], **options: Any) -> Any:
        assert options["env"]["KSGEN_TRIAL"] == "off"  # it starts none itself
        assert options["start_new_session"]
        started.append(command)
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(libcuda, "compute_mode", lambda index: 0)
    monkeypatch.setattr(passport, "_CHILD", "")
    return started


def ended(gpu: FakeGpu) -> None:
    running: Any = passport._known[gpu].child  # type: ignore[index]
    running.wait()


def test_one_child_is_started_and_later_choices_take_what_it_proves(gpu: FakeGpu, child: list[list[str]]) -> None:
    passport.begin(gpu)
    assert child == []  # no launcher has chosen yet
    assert chosen(gpu).family == "mma"
    passport.begin(gpu)
    passport.begin(gpu)
    assert child == [[sys.executable, "-P", "-c", "", "driver:0"]]
    record(gpu, {"wgmma": proof()})  # as the child does
    ended(gpu)
    assert chosen(gpu).family == "wgmma"
    passport.begin(gpu)
    assert len(child) == 1


def running_child(gpu: FakeGpu, folder: Path, monkeypatch: pytest.MonkeyPatch, end: str = "") -> Path:
    """Begin a child that runs until the returned file is removed, and then runs `end`."""
    running = folder / "running"
    running.touch()
    waits = f"import os, sys, time\nwhile os.path.exists({str(running)!r}): time.sleep(0.01)\n{end}"
    monkeypatch.setattr(passport, "_CHILD", waits)
    limits_of(gpu)
    passport.begin(gpu)
    return running


def test_reading_again_starts_no_second_child_while_one_runs(
    gpu: FakeGpu, child: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = running_child(gpu, tmp_path, monkeypatch)
    passport.forget()
    limits_of(gpu)
    passport.begin(gpu)
    assert len(child) == 1
    running.unlink()
    passport.wait(gpu)
    passport.wait(gpu)
    limits_of(gpu)  # takes note of its end
    passport.forget()
    limits_of(gpu)
    passport.begin(gpu)
    assert len(child) == 2
    ended(gpu)


def test_a_forked_process_leaves_the_child_and_its_words_to_its_parent(
    gpu: FakeGpu, child: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = running_child(gpu, tmp_path, monkeypatch, "sys.exit('no GPU')")
    if not (forked := os.fork()):
        is_left = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                reads = list[Any]()
                passport.load = reads.append  # type: ignore[assignment,attr-defined]  (of this process alone)
                passport.wait(gpu)
                passport.begin(gpu)
                is_left = "wgmma" not in permitted(gpu) and len(child) == 1 and not reads
        finally:
            os._exit(not is_left)
    assert os.waitpid(forked, 0)[1] == 0
    running.unlink()
    ended(gpu)
    with pytest.warns(KsgenWarning, match="must be proven first: no GPU; ksgen calibrate tries again"):
        limits_of(gpu)


def test_the_reason_of_a_child_that_fails_is_reported_once(
    gpu: FakeGpu, child: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        passport, "_CHILD", "import sys; print('noise', file=sys.stderr); sys.exit('the server is full')"
    )
    limits_of(gpu)
    passport.begin(gpu)
    ended(gpu)
    with pytest.warns(KsgenWarning) as told:
        assert chosen(gpu).family == "mma"
    assert [str(each.message) for each in told] == [
        "Fake GPU: no passport, so that launchers choose no family that must be proven first: the server is full; "
        "ksgen calibrate tries again, KSGEN_TRIAL=off keeps launchers from trying"
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        chosen(gpu)
        passport.begin(gpu)
    assert len(child) == 1


@pytest.mark.parametrize(("mode", "word"), [(3, "exclusive-process"), (2, "prohibited")])
def test_a_gpu_for_one_process_alone_gets_no_child(
    mode: int, word: str, gpu: FakeGpu, child: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libcuda, "compute_mode", lambda index: mode)
    limits_of(gpu)
    with pytest.warns(KsgenWarning, match=f"the GPU is in {word} mode, so that no child can use it next to this"):
        passport.begin(gpu)
    assert child == []


def test_a_driver_that_does_not_answer_and_a_system_without_processes_are_reported(
    gpu: FakeGpu, child: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise DeviceError("the driver is gone")

    monkeypatch.setattr(libcuda, "compute_mode", fail)
    limits_of(gpu)
    with pytest.warns(KsgenWarning, match="the driver is gone"):
        passport.begin(gpu)
    monkeypatch.setattr(libcuda, "compute_mode", lambda index: 0)
    for executable, why in (
        ("/nonexistent/python", "No such file or directory: '/nonexistent/python'"),
        ("/opt/editor", "/opt/editor is no Python that a child could run"),
        ("", " is no Python that a child could run"),
    ):
        monkeypatch.setattr(sys, "executable", executable)
        passport.forget()  # so that it may be started again
        limits_of(gpu)
        with pytest.warns(KsgenWarning, match=why):
            passport.begin(gpu)


@pytest.mark.parametrize("setting", ["off", "passport", "background"])
def test_ksgen_trial_off_starts_none(
    setting: str, gpu: FakeGpu, child: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_TRIAL", setting)
    limits_of(gpu)
    passport.begin(gpu)
    assert len(child) == (setting != "off")


def test_another_word_is_refused(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_TRIAL", "never")
    with pytest.raises(ConstantsError, match=r"^KSGEN_TRIAL='never'; accepted: passport, off, background$"):
        passport.trial()
    monkeypatch.setenv("KSGEN_PERMIT", "wgmm")
    with pytest.raises(ConstantsError, match=r"^KSGEN_PERMIT='wgmm': unknown kernel family 'wgmm'; known: .*, or all$"):
        permitted(gpu)
