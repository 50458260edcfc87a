"""A spec as a file: its name, its encoding, its size, and what importing the specs costs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ksgen.errors import SpecError
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec, load, parse, schema

SMALL = Pattern(6, 64, 64, 1)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("specs/vit.yaml", "vit"),
        ("my-model v2.yaml", "my_model_v2"),
        ("2nd.yaml", "spec_2nd"),
        ("class.yaml", "spec_class"),
        ("été.yaml", "t"),
        ("---.yaml", "spec"),
        ("<text>", "text"),
    ],
)
def test_the_name_of_a_spec_is_an_identifier(file: str, name: str) -> None:
    assert parse("kernels: [[1,2,3,4]]", file).name == name
    assert name.isidentifier()


def test_a_file_is_read_with_or_without_a_byte_order_mark(tmp_path: Path) -> None:
    for number, start in enumerate([b"", b"\xef\xbb\xbf"]):
        path = tmp_path / f"small{number}.yaml"
        path.write_bytes(start + b"kernels: ['6,64,64,1']\r\n")
        assert load(path).kernels == load(str(path)).kernels == (KernelSpec(SMALL),)
        assert load(path).name == f"small{number}"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "missing.yaml"
    with pytest.raises(SpecError, match=r"missing\.yaml: cannot be read \(No such file or directory\); accepted"):
        load(missing)
    with pytest.raises(SpecError, match=r": cannot be read \(Is a directory\); accepted: the path of a YAML spec"):
        load(tmp_path)
    with pytest.raises(SpecError, match=r"cannot be read \(embedded null byte\)"):
        load("a\0b")


def test_a_file_of_any_name_is_named_in_one_line_of_text(tmp_path: Path) -> None:
    for name, shown in (("a\nb.yaml", "a\\nb.yaml"), ("\udcff.yaml", "\\udcff.yaml"), ("größe.yaml", "größe.yaml")):
        with pytest.raises(SpecError) as caught:
            load(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path}/{shown}: cannot be read")
    (tmp_path / "a\nb.yaml").write_text("kernels: [[1,2,3]]")
    with pytest.raises(SpecError, match=r"a\\nb\.yaml:1: kernels\[0\]: got a list"):
        load(tmp_path / "a\nb.yaml")


def test_a_file_that_is_not_utf_8_is_named_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"kernels:\n  - 6,64,64,1  # \xe9\n")
    with pytest.raises(SpecError, match=r"latin\.yaml:2: byte 0xe9; accepted: text in UTF-8"):
        load(path)


def test_a_file_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(2**23)
    with pytest.raises(
        SpecError, match=r"huge\.yaml: cannot be read \(more than 4194304 bytes\); accepted: the path of a YAML spec"
    ):
        load(path)


def test_importing_the_specs_imports_neither_yaml_nor_numpy() -> None:
    code = "import sys, ksgen.spec; print(sorted({'yaml', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_schema_describes_families_without_the_sections_of_their_docstrings() -> None:
    text = json.dumps(schema())
    assert '"description": "Create a chain of two dense factors: down to `rank` features, then up."' in text
    assert "Args:" not in text
