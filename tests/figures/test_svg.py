"""Pictures for a page: the same bytes for the same numbers, real text, no names that two figures share."""

import builtins
from typing import Any
from xml.etree import ElementTree

import pytest

from ksgen.errors import KsgenError
from ksgen.figures import svg
from ksgen.install import install_line

SIZE = svg.Size(3, 2)


def drawn(title: str = "Times < floors", content: object = None) -> str:
    with svg.figure(title, SIZE, "tune", content) as picture:
        picture.axes.plot([1, 2], [3, 4], clip_on=True)
    return picture.svg


def test_the_same_numbers_give_the_same_bytes_whatever_the_user_prefers() -> None:
    matplotlib = pytest.importorskip("matplotlib")
    before = drawn()
    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "axes.grid": False}):
        assert drawn() == before


def test_a_picture_is_part_of_a_page() -> None:
    pytest.importorskip("matplotlib")
    root = ElementTree.fromstring(drawn())
    assert (root.attrib["role"], root.attrib["aria-label"]) == ("img", "Times < floors")
    texts = ["".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Times < floors" in texts
    assert not list(root.iter("{http://www.w3.org/2000/svg}style"))
    assert not [each for each in root.iter("{http://www.w3.org/2000/svg}g") if "id" in each.attrib]


def test_figures_of_one_page_share_no_names() -> None:
    pytest.importorskip("matplotlib")

    def names(text: str) -> set[str]:
        return {element.attrib["id"] for element in ElementTree.fromstring(text).iter() if "id" in element.attrib}

    assert names(drawn("a"))
    assert not names(drawn("a")) & names(drawn("b"))
    assert not names(drawn("a", 1)) & names(drawn("a", 2))


def test_coordinates_lose_invisible_digits() -> None:
    assert [svg._rounded(word) for word in ("M", "12.3456", "7.0", "-0.004")] == ["M", "12.35", "7", "-0"]


def test_a_dark_page_exchanges_every_colour() -> None:
    style = svg.dark_style()
    assert all(light in style and dark in style for light, dark in svg.DARK.items())
    assert style.count("\n") + 1 == 2 * len(svg.DARK)


def test_a_missing_library_is_reported_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    own = builtins.__import__

    def without(name: str, *more: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("none here")
        return own(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(KsgenError) as caught:
        drawn()
    assert (
        str(caught.value) == f"pictures need matplotlib, which cannot be imported (none here); {install_line('tune')}"
    )
