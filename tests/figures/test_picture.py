"""Pictures: every entry of a small K, the structure of any, at any width, in any encoding, and as a PNG that others
can read.
"""

import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from ksgen.cli import cli
from ksgen.errors import PatternError
from ksgen.figures import picture
from ksgen.pattern import MOST_FEATURES, Pattern
from ksgen.reference import to_dense

SMALL = Pattern(2, 3, 4, 5)
PATTERNS = [
    "1,192,48,2",
    "6,64,64,1",
    "2,48,192,1",
    "1,768,192,2",
    "4,64,64,16",
    "1,64,64,64",
    "128,2,2,128",
    "1,2,2,1000",
    "1,1,1,1",
]


def cells(pattern: Pattern, width: int) -> list[str]:
    """The picture without its labels and legend, a character a cell."""
    lines = picture.text(pattern, width).partition("\n\n")[0].splitlines()[1:]
    return [line[len(f"b = {pattern.b}   ") :: 2] for line in lines]


def pixels(pattern: Pattern) -> Any:
    data = picture.png(pattern)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", data[16:24])
    length = struct.unpack(">I", data[33:37])[0]
    lines = np.frombuffer(zlib.decompress(data[41 : 41 + length]), np.uint8).reshape(height, 1 + 3 * width)
    return lines[:, 1:].reshape(height, width, 3)


def test_a_small_picture_is_the_support_itself() -> None:
    support = to_dense(SMALL, np.ones(SMALL.shape)) != 0
    drawn = [[cell == picture.FREE for cell in line.ljust(SMALL.in_features)] for line in cells(SMALL, 120)]
    np.testing.assert_array_equal(np.array(drawn), support)


def test_a_small_png_is_the_support_itself() -> None:
    support = to_dense(SMALL, np.ones(SMALL.shape)) != 0
    colours, size = pixels(SMALL), picture.PIXELS // SMALL.in_features
    is_coloured = np.ptp(colours.astype(int), axis=2) > 40  # not a grey
    rows, columns = np.flatnonzero(is_coloured.any(1)), np.flatnonzero(is_coloured.any(0))
    middles = [
        np.arange(start - 1, end + 2 - size // 2, size) + size // 2
        for start, end in ((rows[0], rows[-1]), (columns[0], columns[-1]))
    ]
    np.testing.assert_array_equal(is_coloured[np.ix_(*middles)], support)


def test_a_large_picture_shows_the_first_and_the_last_of_each_kind_and_dots_between() -> None:
    assert cells(Pattern(1, 192, 48, 2), 40)[-5:] == ["█·⋯█·", "·█⋯·█", "⋮⋮⋱⋮⋮", "█·⋯█·", "·█⋯·█"]
    assert cells(Pattern(2, 48, 192, 1), 80) == [
        "█████⋯█",
        "⋮⋮⋮⋮⋮⋱⋮",
        "█████⋯█",
        "       █████⋯█",
        "       ⋮⋮⋮⋮⋮⋱⋮",
        "       █████⋯█",
    ]
    assert cells(Pattern(1, 1, 1, 1000), 80)[-3:] == ["····█··", "·····⋱·", "······█"]
    assert cells(Pattern(100, 1, 1, 1), 80)[-3:] == ["    █", "     ⋱", "      █"]


@given(st.lists(st.integers(1, 1290), min_size=4, max_size=4), st.integers(40, 200), st.booleans())
def test_any_picture_fits_and_shows_each_kind_in_its_order(shape: list[int], width: int, plain: bool) -> None:
    pattern = Pattern(*shape) if shape[0] * max(shape[1:3]) * shape[3] <= MOST_FEATURES else Pattern(*shape[:3], 1)
    lines = picture.text(pattern, width, plain).partition("\n\n")[0].splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= picture.LINES + 1
    assert (not plain) or "".join(lines).isascii()
    rows, columns = picture.sketch(pattern, picture.LINES, width // 2)
    for side, middle in ((rows, pattern.b), (columns, pattern.c)):
        for place, count in enumerate((pattern.a, middle, pattern.d)):
            shown = {row[place] for row in side}
            assert {0, count - 1} <= shown
            assert (None in shown) or place or len(shown) == count


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_legend_says_the_numbers(pattern: str) -> None:
    a, b, c, d = Pattern.parse(pattern).shape
    words = picture.text(Pattern.parse(pattern), 80)
    for label in (
        f"\na = {a}: blocks",
        f"\nb x c = {b} x {c}: tiles",
        f"\nd = {d}: free entries",
        f"c = {c}",
        f"b = {b} ",
    ):
        assert label in words


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "pattern", [*PATTERNS, "1,1000,1000,1000", "1,1,5000,1", "5000,1,1,1", "16,9,33,64", "1,1,2147483647,1"]
)
def test_any_png_is_small(pattern: str) -> None:
    height, width, _ = pixels(Pattern.parse(pattern)).shape
    assert max(height, width) < 1500


@pytest.mark.parametrize(("pattern", "lines"), [("i.j.l@2,8,4,3@i.j.k", 2), ("4,32,16,1@k1:4.i.k2", 1)])
def test_a_png_names_the_orders_of_exchanged_features(pattern: str, lines: int) -> None:
    exchanged = Pattern.parse(pattern)
    added = len(pixels(exchanged)) - len(pixels(exchanged.natural))
    assert added == 2 * picture.HEIGHT * lines


def test_show_draws_and_writes(tmp_path: Path) -> None:
    done = CliRunner().invoke(cli, ["show", "2,3,4,5", "--png", str(tmp_path / "p.png")])
    assert done.exit_code == 0, done.exception
    assert picture.text(SMALL, 80) in "\n".join(line.rstrip() for line in done.stdout.splitlines())
    assert (tmp_path / "p.png").read_bytes() == picture.png(SMALL)
    assert isinstance(CliRunner().invoke(cli, ["show", "1,2,3,1", "1,2,2,1", "--png", "x.png"]).exception, PatternError)


def test_the_readmes_picture_is_todays() -> None:
    assert (Path(__file__).parents[2] / "docs" / "pattern.png").read_bytes() == picture.png(SMALL)
