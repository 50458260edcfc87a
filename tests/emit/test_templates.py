"""What a template asks for and is not there is named with the family, the kernel and the chain of includes; texts are linked."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ksgen.emit import templates
from ksgen.emit.render import render
from ksgen.errors import RenderError
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

ROOT = Path(__file__).parents[2]
KERNEL = KernelSpec(Pattern(2, 64, 48, 4))


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Templates of this test's own, that it may break."""
    shutil.copytree(ROOT / "templates", tmp_path / "templates")
    monkeypatch.setattr(templates, "resource", lambda name: tmp_path / name)
    templates.environment.cache_clear()
    yield tmp_path / "templates"
    templates.environment.cache_clear()


def append(path: Path, more: str) -> int:
    """The line where it stands then."""
    text = path.read_text() + more
    path.write_text(text)
    return text.count("\n")


def test_an_unknown_word_is_named_with_where_it_stands_and_what_is_there(copied: Path) -> None:
    line = append(copied / "include/simt/place_bsf.j2", "{{ nonsense }}\n")
    with pytest.raises(RenderError) as caught:
        render(KERNEL)
    said = str(caught.value)
    assert said.startswith("simt, ks_2x64x48x4_float32_bsf: simt.cu.j2:")
    assert f" > include/simt/place_bsf.j2:{line}: 'nonsense' is undefined; the words there are " in said
    assert ", constexprs, " in said


def test_so_is_one_of_a_dictionary(copied: Path) -> None:
    words = copied / "include/words/numbers.j2"
    words.write_text(words.read_text().replace("typedef float real;", "typedef {{ nonsense }} real;"))
    with pytest.raises(RenderError, match=r"^simt, ks_\S+: include/words/numbers\.j2:\d+: 'nonsense' is undefined; the words there are "):
        render(KERNEL)


def test_and_an_include_that_is_not_there(copied: Path) -> None:
    (copied / "include/simt/place_bsf.j2").unlink()
    with pytest.raises(RenderError, match=r"^simt, ks_\S+: simt\.cu\.j2:\d+.*: 'include/simt/place_bsf\.j2' not found in search path"):
        render(KERNEL)


def test_and_one_that_cannot_be_read(copied: Path) -> None:
    line = append(copied / "include/simt/place_bsf.j2", "{% for %}\n")
    with pytest.raises(RenderError, match=rf"^simt, ks_\S+: .*include/simt/place_bsf\.j2:{line}: "):
        render(KERNEL)


def test_a_text_takes_a_word_and_what_that_one_uses_and_no_more(copied: Path) -> None:
    (copied / "include/words/small.j2").write_text(
        "{% block first %}\nint first;\n{% endblock %}\n{% block spare %}\nint spare;\n{% endblock %}\n"
        "{% block second %}\nint second = first;\n{% endblock %}\n{% block second__long %}\nlong second;\n{% endblock %}\n"
    )
    (copied / "small.j2").write_text('{{ word_lines }}// spare\nf("spare", second);\n')
    assert templates.fill("small.j2", {}, ["small"]) == 'int first;\nint second = first;\n// spare\nf("spare", second);\n'
    assert templates.fill("small.j2", {}, ["small"], ["long"]) == 'long second;\n// spare\nf("spare", second);\n'
