"""Charts: bars with names, times and a floor; values in ascending order with the names of the extremes."""

import re
from xml.etree import ElementTree

import pytest

from ksgen.figures.charts import MOST_TIMES, WIDTH, Bars, Series, Sorted, inline, picture
from ksgen.figures.svg import DARK

SVG = "{http://www.w3.org/2000/svg}"
BARS = Bars("1,48,48,2, bsf", (("ksgen", 50.0), ("bmm", 100.0), ("sparse", 5000.0)), frozenset({"ksgen"}), floor=40.0)
SPEEDS = Sorted(
    "speeds",
    (Series("bsf: 3", (("1,2,3,4", 2.0), ("5,6,7,8", 0.5), ("9,9,9,9", 8.0))), Series("bsl: 1", (("a", 1.5),))),
    "x",
    1,
)


def texts(drawn: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(drawn).iter(f"{SVG}text")]


def of_class(drawn: str, name: str) -> list[dict[str, str]]:
    return [dict(element.attrib) for element in ElementTree.fromstring(drawn).iter() if element.get("class") == name]


def test_bars_are_as_long_as_times_and_say_whose_they_are() -> None:
    drawn = inline(BARS)
    assert {
        "1,48,48,2, bsf",
        "ksgen",
        "bmm",
        "sparse",
        "50 us",
        "100 us, x2.00",
        "5,000 us, x100.00",
        "floor 40 us",
    } == set(texts(drawn))
    own, bmm, sparse = (float(bar["width"]) for bar in of_class(drawn, "bar"))
    assert bmm == pytest.approx(2 * own, abs=0.2)
    assert sparse == pytest.approx(MOST_TIMES * own, abs=1)
    assert len(of_class(drawn, "cut")) == 1  # the bar that is longer than the picture
    assert [bar["fill"] == of_class(drawn, "bar")[0]["fill"] for bar in of_class(drawn, "bar")] == [True, False, False]


def test_the_floor_is_a_line_across_all_bars() -> None:
    drawn = inline(BARS)
    (line,) = of_class(drawn, "floor")
    x, top, bottom = map(float, re.findall(r"[\d.]+", line["d"]))
    bars = of_class(drawn, "bar")
    assert x - float(bars[0]["x"]) == pytest.approx(0.8 * float(bars[0]["width"]), abs=0.2)
    assert top <= min(float(bar["y"]) for bar in bars)
    assert bottom >= max(float(bar["y"]) + float(bar["height"]) for bar in bars)
    assert not of_class(inline(Bars("a", (("ksgen", 1.0),), frozenset())), "floor")


def test_the_extremes_of_sorted_values_are_named() -> None:
    drawn = inline(SPEEDS)
    assert {"bsf: 3", "x0.50 5,6,7,8 … x8.00 9,9,9,9", "bsl: 1", "x1.50 a … x1.50 a"} <= set(texts(drawn))
    heights = [float(each["cy"]) for each in of_class(drawn, "value")]
    assert heights[:3] == sorted(heights[:3], reverse=True)
    assert len(heights) == 4
    assert len(of_class(drawn, "curve")) == 1  # one value is no curve
    (line,) = of_class(drawn, "line")
    assert heights[0] > float(re.findall(r"[\d.]+", line["d"])[1]) > heights[1]  # x1 lies between x0.50 and x2.00


def test_shares_go_from_0_to_100_per_cent() -> None:
    drawn = inline(Sorted("shares", (Series("bsf", (("a", 30.0), ("b", 90.0))),), "%", 100))
    assert {"0", "25", "50", "75", "100", "30 % a … 90 % b"} <= set(texts(drawn))


@pytest.mark.parametrize("values", [(1.0, 1.01), (1.0, 1.0), (0.02, 0.5), (3.0, 4000.0), (60.0, 90.0)])
def test_every_axis_has_numbers_and_every_value_is_within(values: tuple[float, ...]) -> None:
    panel = Sorted("a", (Series("b", tuple((str(value), value) for value in values)),), "x", 1)
    drawn = inline(panel)
    assert [each for each in texts(drawn) if re.fullmatch(r"x[\d.]+", each)]
    assert all(
        0 < float(each["cy"]) < panel.height and 0 < float(each["cx"]) <= WIDTH for each in of_class(drawn, "value")
    )


def test_long_names_are_cut() -> None:
    long = "a" * 200
    for panel in (Bars(long, (("ksgen", 1.0),), frozenset()), Sorted(long, (Series("b", ((long, 1.0),)),), "x", 1)):
        assert all(len(each) <= 60 for each in texts(inline(panel)))


def test_a_picture_is_a_file_of_panels_in_rows_for_light_and_dark_pages() -> None:
    drawn = picture("three", [BARS, SPEEDS, BARS], columns=2)
    root = ElementTree.fromstring(drawn)
    assert root.attrib["aria-label"] == "three"
    assert [group.attrib["transform"].split()[0] for group in root.iter(f"{SVG}g")] == [
        "translate(0",
        f"translate({WIDTH + 32}",
        "translate(0",
    ]
    assert float(root.attrib["height"]) >= SPEEDS.height + BARS.height
    colours = set(re.findall(r'(?:fill|stroke)="(#\w+)"', drawn))
    assert colours <= set(DARK)
    assert all(f'[fill="{light}"]{{fill:{dark}}}' in drawn for light, dark in DARK.items())
    assert picture("three", [BARS, SPEEDS, BARS], columns=2) == drawn
