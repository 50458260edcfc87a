"""Pictures of chains: the cells drawn are the support of each factor, in both colour schemes."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from ksgen.figures.charts import SIDE, chain_svg
from ksgen.figures.svg import DARK
from ksgen.pattern import Chain, Pattern, deformable_butterfly, kaleidoscope, low_rank

SVG = "{http://www.w3.org/2000/svg}"


def support(pattern: Pattern) -> set[tuple[int, int]]:
    a, b, c, d = pattern.shape
    return set(
        zip(*map(np.ndarray.tolist, np.nonzero(np.kron(np.eye(a), np.kron(np.ones((b, c)), np.eye(d))))), strict=True)
    )


@pytest.mark.parametrize(
    "chain", [low_rank(8, 12, 2), kaleidoscope(8), deformable_butterfly(12, [(4, 3), (2, 4)]), Chain(((2, 3, 4, 2),))]
)
def test_the_cells_of_a_picture_are_the_supports(chain: Chain) -> None:
    root = ElementTree.fromstring(chain_svg(chain))
    groups = root.findall(f"{SVG}g")
    assert len(groups) == len(chain)
    for pattern, group in zip(chain, groups, strict=True):
        cells = []
        for path in group.findall(f"{SVG}path"):
            for column, row, run in re.findall(r"M(\d+) (\d+)h(\d+)v1", path.attrib["d"]):
                cells += [(int(row), int(column) + each) for each in range(int(run))]
        assert len(cells) == len(set(cells)) == pattern.weight_count
        assert set(cells) == support(pattern)


def test_a_picture_is_small_and_has_colours_for_dark_pages() -> None:
    text = chain_svg(low_rank(1024, 1024, 64))
    root = ElementTree.fromstring(text)
    assert float(root.attrib["height"]) == SIDE + 2
    assert root.attrib["aria-label"] == "1,64,1024,1 then 1,1024,64,1"
    used = set(re.findall(r'(?:fill|stroke)="(#\w+)"', text.partition("</style>")[2]))
    assert used <= set(DARK)
    assert all(f'[fill="{light}"]{{fill:{dark}}}' in text for light, dark in DARK.items())
