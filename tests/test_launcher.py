"""The calls that users make and emitted modules import: their names stay where they are."""

from pathlib import Path

import pytest

import ksgen
from ksgen import launcher
from ksgen.emit.render import emit
from ksgen.launch.planner import PLANNER
from ksgen.spec import parse


def test_the_package_offers_the_same_objects() -> None:
    assert ksgen.Launcher is launcher.Launcher
    assert ksgen.ChainLauncher is launcher.ChainLauncher
    assert ksgen.GroupLauncher is launcher.GroupLauncher
    assert ksgen.use_bundle is launcher.use_bundle


def test_what_emitted_modules_import_is_here(tmp_path: Path) -> None:
    emit(parse("layers: {square: [[2,8,8,2], [1,4,8,4]]}"), tmp_path / "made")
    line = next(
        line for line in (tmp_path / "made" / "launchers.py").read_text().splitlines() if line.startswith("from ")
    )
    names = line.removeprefix("from ksgen.launcher import ").split(", ")
    assert names == ["ChainLauncher", "Launcher"]
    assert set(names) <= set(launcher.__all__)


def test_a_bundle_serves_every_launcher_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[str] = []
    monkeypatch.setattr(PLANNER, "use_bundle", given.append)
    ksgen.use_bundle("vit.ksb")
    assert given == ["vit.ksb"]
