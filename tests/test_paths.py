"""Where ksgen finds what it ships, and keeps what it makes."""

from pathlib import Path

import pytest

from ksgen import paths


def test_a_checkout_ships_what_lies_at_its_top_and_a_wheel_what_lies_inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert paths.resource("templates") == Path(__file__).parents[1] / "templates"
    monkeypatch.setattr(paths, "_PACKAGE", tmp_path / "ksgen")
    assert paths.resource("specs") == tmp_path / "specs"
    (tmp_path / "ksgen" / "_resources" / "specs").mkdir(parents=True)
    assert paths.resource("specs") == tmp_path / "ksgen" / "_resources" / "specs"


@pytest.mark.parametrize(("find", "variable"), [(paths.cache_dir, "KSGEN_CACHE_DIR"), (paths.wisdom_dir, "KSGEN_WISDOM_DIR")])
def test_a_users_own_folder_comes_first_and_none_is_made(
    find: object, variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert callable(find)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, str(tmp_path / "own"))
    assert find() == tmp_path / "own"
    monkeypatch.setenv(variable, "~/own")
    assert find() == tmp_path / "own"
    monkeypatch.setenv(variable, "~nobody-of-that-name/own")
    assert find() == Path("~nobody-of-that-name/own")
    monkeypatch.setenv(variable, "")
    assert find().name == "ksgen"
    assert list(tmp_path.iterdir()) == []


def test_cache_and_wisdom_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("KSGEN_CACHE_DIR", "KSGEN_WISDOM_DIR"):
        monkeypatch.delenv(variable)
    assert paths.cache_dir() != paths.wisdom_dir()
