"""Passports on disk: for whom one is valid, and what happens to one that cannot be read, trusted or written."""

import json
import logging
import multiprocessing
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksgen.emit.templates import template_digest
from ksgen.errors import KsgenError
from ksgen.passport import Passport, Proof, load, path_of, record
from ksgen.wisdom import known_devices, load_wisdom
from tests.support.fake_gpu import FakeGpu
from tests.support.mounts import fill, mounted
from tests.support.users import ANOTHER, needs_root


def proof(family: str = "wgmma", reason: str = "") -> Proof:
    return Proof("disabled" if reason else "proven", reason, template_digest(family), 3, 1.5)


def test_proofs_read_back_and_other_families_stay(gpu: FakeGpu) -> None:
    assert load(gpu) is None
    record(gpu, {"wgmma": proof()})
    found = record(gpu, {"mma": proof("mma", "it hung")})
    assert load(gpu) == found == Passport(gpu.name, "sm_90a", "0", {"mma": proof("mma", "it hung"), "wgmma": proof()})
    assert str(found) == "proven: wgmma; mma is disabled: it hung"
    assert path_of(gpu.name).name == "fake-gpu.passport.json"
    assert sorted(path.name for path in path_of(gpu.name).parent.iterdir()) == [
        ".fake-gpu.passport.json.lock",
        "fake-gpu.passport.json",
    ]


@pytest.mark.parametrize(("field", "value"), [("driver_version", "1"), ("target", "sm_100"), ("name", "Fake  GPU")])
def test_it_is_valid_for_this_device_target_and_driver_alone(field: str, value: str, gpu: FakeGpu) -> None:
    record(gpu, {"wgmma": proof()})
    other = replace(gpu, **{field: value})
    assert path_of(other.name) == path_of(gpu.name)
    assert load(other) is None
    assert record(other, {"mma": proof("mma")}).families == {"mma": proof("mma")}  # nothing of the earlier driver
    assert load(gpu) is None


def test_a_proof_of_other_templates_is_stale_by_itself(gpu: FakeGpu) -> None:
    record(gpu, {"wgmma": replace(proof(), template="12345678"), "mma": proof("mma")})
    found = load(gpu)
    assert found is not None
    assert list(found.families) == ["mma"]


def test_it_is_no_wisdom(gpu: FakeGpu) -> None:
    record(gpu, {"wgmma": proof()})
    assert gpu.name not in known_devices()
    assert load_wisdom(gpu.name, strict=True).entries() == []


DAMAGES: dict[str, Any] = {
    "no JSON": "{",
    "a list": "[]",
    "no family": json.dumps({"device": "Fake GPU", "target": "sm_90a", "driver": "0"}),
    "a number": json.dumps({"device": 7, "target": "sm_90a", "driver": "0", "families": {}}),
    "another state": {"state": "perfect"},
    "an endless time": {"seconds": float("inf")},
    "more than a float holds": {"cases": 10**400},
    "a reason of two lines": {"reason": "a\nb"},
    "an unknown field": {"more": 1},
    "a field less": {"cases": None},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_counts_as_none_with_one_warning(
    damage: str, gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    record(gpu, {"wgmma": proof()})
    changed, path = DAMAGES[damage], path_of(gpu.name)
    if isinstance(changed, dict):
        content = json.loads(path.read_text())
        content["families"]["wgmma"] |= changed
        changed = json.dumps(content)
    path.write_text(changed)
    with caplog.at_level(logging.WARNING):
        assert load(gpu) is None
    [message] = [each.getMessage() for each in caplog.records]
    assert message.startswith(f"{path}: this passport is passed over (")
    assert message.endswith("); delete it: it is made again")
    assert "\n" not in message
    assert record(gpu, {"mma": proof("mma")}).families == {"mma": proof("mma")}  # and it is replaced


def test_one_that_others_can_write_is_passed_over_with_the_remedy(
    gpu: FakeGpu, caplog: pytest.LogCaptureFixture
) -> None:
    record(gpu, {"wgmma": proof()})
    path = path_of(gpu.name)
    path.chmod(0o666)
    assert load(gpu) is None
    [message] = [each.getMessage() for each in caplog.records]
    remedy = "take that right away (chmod o-w), or accept it with KSGEN_TRUST=all"
    assert message == f"{path}: this passport is passed over (every user can write to it; {remedy})"


@needs_root
def test_one_of_another_user_is_not_trusted(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    record(gpu, {"wgmma": proof()})
    os.chown(path_of(gpu.name), ANOTHER, ANOTHER)
    assert load(gpu) is None
    assert f"it belongs to user {ANOTHER}; make it yours (chown)" in caplog.text


def test_one_that_others_may_write_is_made_again_for_this_user_alone(gpu: FakeGpu) -> None:
    record(gpu, {"wgmma": proof()})
    path_of(gpu.name).chmod(0o666)
    assert load(gpu) is None
    record(gpu, {"mma": proof("mma")})
    assert path_of(gpu.name).stat().st_mode & 0o777 == 0o644
    found = load(gpu)
    assert found is not None
    assert list(found.families) == ["mma"]


def test_a_pipe_and_an_endless_file_are_not_read(gpu: FakeGpu, caplog: pytest.LogCaptureFixture) -> None:
    path = path_of(gpu.name)
    path.parent.mkdir()
    os.mkfifo(path)
    assert load(gpu) is None
    path.unlink()
    path.symlink_to("/dev/zero")
    assert load(gpu) is None
    assert caplog.text.count("it is not a regular file") == 2


@pytest.mark.parametrize("is_full", [True, False], ids=["full", "read-only"])
def test_a_disk_that_takes_none_keeps_the_earlier_one(
    is_full: bool, gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with mounted(tmp_path / "disk", "size=64k,mode=700") as disk:
        monkeypatch.setenv("KSGEN_WISDOM_DIR", str(disk))
        record(gpu, {"wgmma": proof()})
        if is_full:
            fill(disk)
        else:
            os.system(f"mount -o remount,ro {disk}")
        with pytest.raises(KsgenError, match=r"fake-gpu\.passport\.json: .*(No space left|Read-only file system)"):
            record(gpu, {"mma": proof("mma")})
        found = load(gpu)
        assert found is not None
        assert list(found.families) == ["wgmma"]


def _record_in_child(number: int) -> None:
    families = ("wgmma", "mma", "simt", "gemv", "gradient")
    for _ in range(20):
        record(FakeGpu(), {families[number]: proof(families[number])})


def test_processes_that_write_at_once_lose_nothing(gpu: FakeGpu) -> None:
    with multiprocessing.get_context("fork").Pool(5) as pool:
        pool.map(_record_in_child, range(5))
    found = load(gpu)
    assert found is not None
    assert list(found.families) == ["gemv", "gradient", "mma", "simt", "wgmma"]
