"""Compiled templates are kept: the next process loads them, unless they are damaged, others', or of another text."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from ksgen.emit import templates
from ksgen.emit.render import render
from ksgen.emit.templates import FOLDER, CompiledTemplates
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

KERNEL = KernelSpec(Pattern(2, 64, 48, 4))
TRUE, FALSE = "{{ 6 * 7 }}", "{{ 6 * 9 }}"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    templates.environment.cache_clear()
    yield tmp_path / "cache"
    templates.environment.cache_clear()


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the templates that were compiled since."""
    names: list[str] = []
    compile_ = jinja2.Environment.compile

    def noted(self: jinja2.Environment, source: Any, name: Any = None, *others: Any, **options: Any) -> Any:
        names.append(name)
        return compile_(self, source, name, *others, **options)

    monkeypatch.setattr(jinja2.Environment, "compile", noted)
    return names


def text_of(source: str, *settings: object, root: str = "one") -> str:
    """What a new process renders of a template with this source."""
    own = jinja2.Environment(
        loader=jinja2.DictLoader({"include/it.j2": source}), bytecode_cache=CompiledTemplates(root, *settings)
    )
    return own.get_template("include/it.j2").render()


def file_of(cache: Path) -> Path:
    (file,) = (cache / FOLDER).iterdir()
    return file


def test_the_next_process_compiles_no_template_and_renders_the_same_bytes(cache: Path, compiled: list[str]) -> None:
    first = render(KERNEL).text
    assert "simt.cu.j2" in compiled
    assert len(compiled) == len(set(compiled)) == len(list((cache / FOLDER).iterdir()))
    compiled.clear()
    templates.environment.cache_clear()
    assert render(KERNEL).text == first
    assert compiled == []


def test_another_text_place_or_setting_is_compiled_and_takes_the_files_place(cache: Path, compiled: list[str]) -> None:
    ways: list[Callable[[], str]] = [
        lambda: text_of(TRUE),
        lambda: text_of(TRUE, root="two"),
        lambda: text_of(TRUE, {"trim_blocks": True}),
        lambda: text_of(TRUE + " "),
    ]
    for count, way in enumerate(ways, 1):
        assert [way().strip(), way().strip()] == ["42", "42"]
        assert len(compiled) == count
    file_of(cache)


def test_so_are_those_of_another_version_of_jinja(
    cache: Path, compiled: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert text_of(TRUE) == "42"
    monkeypatch.setattr(jinja2, "__version__", "0.1")
    assert text_of(TRUE) == "42"
    assert len(compiled) == 2


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "noise", "folder"])
def test_a_damaged_file_is_not_loaded(cache: Path, compiled: list[str], damage: str) -> None:
    text_of(TRUE)
    file = file_of(cache)
    whole = file.read_bytes()
    if damage == "folder":
        file.unlink()
        file.mkdir()
    else:
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        file.write_bytes({"empty": b"", "short": whole[:-1], "flipped": flipped, "noise": b"\xff" * 4096}[damage])
    assert text_of(TRUE) == "42"
    assert len(compiled) == 2
    if damage != "folder":
        assert file.read_bytes() == whole  # written again


@pytest.mark.parametrize("opened", ["cache", "folder", "file"])
def test_what_others_can_write_is_not_loaded(cache: Path, monkeypatch: pytest.MonkeyPatch, opened: str) -> None:
    with monkeypatch.context() as patch:  # a file that promises one template and holds another
        patch.setattr(CompiledTemplates, "get_source_checksum", lambda self, source: "the same")
        text_of(FALSE)
        assert text_of(TRUE) == "54"
        file = file_of(cache)
        place = {"cache": cache, "folder": file.parent, "file": file}[opened]
        place.chmod(place.stat().st_mode | stat.S_IWOTH)
        assert text_of(TRUE) == "42"


def test_a_cache_that_takes_nothing_is_no_obstacle(cache: Path) -> None:
    cache.write_text("a file in the folder's place")
    assert text_of(TRUE) == "42"
    assert cache.read_text() == "a file in the folder's place"


def test_other_users_cannot_write_cached_files_whatever_the_umask(cache: Path) -> None:
    before = os.umask(0)
    try:
        text_of(TRUE)
    finally:
        os.umask(before)
    for each in (file_of(cache), file_of(cache).parent):
        assert not each.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
