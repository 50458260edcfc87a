"""Pictures for a page: matplotlib figures as SVG with real text, in colours that a page can exchange when it is dark.

The same numbers give the same bytes. Knows nothing of what is drawn.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ksgen.errors import KsgenError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, RULE, POINT, LINE, ACCENT, GUIDE = "#23282e", "#c4cad1", "#7d8a97", "#1769aa", "#c2410c", "#1f7a45"
DARK = {INK: "#d9dee4", RULE: "#444c55", POINT: "#8f9ba8", LINE: "#69b1ec", ACCENT: "#f59a5f", GUIDE: "#62c48a"}  # on a dark page
LEFT, RIGHT, BOTTOM, TOP = 0.6, 0.2, 0.75, 0.25  # inches around what is drawn: a number, a word, slanted labels, the title
_NAMESPACE = "http://www.w3.org/2000/svg"
_LOOK: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, which measures texts by it
    "font.size": 8,
    "text.parse_math": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": RULE,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.4,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass
class Drawn:
    """What is drawn on, and the SVG afterwards."""

    axes: "Axes"
    svg: str = ""


@contextmanager
def figure(title: str, width: float, height: float, extra: str) -> Iterator[Drawn]:
    """Axes of so many inches. `extra`: what to install where there is no matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KsgenError(f"pictures need matplotlib, which cannot be imported ({error}); pip install 'ksgen[{extra}]'") from None
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # whatever the user's own are
        matplotlib.rcParams.update(_LOOK | {"svg.hashsalt": title})
        drawing = Figure(figsize=(width, height))
        drawing.subplots_adjust(LEFT / width, BOTTOM / height, 1 - RIGHT / width, 1 - TOP / height)
        drawn = Drawn(drawing.subplots())
        drawn.axes.set_title(title)
        drawn.axes.tick_params(length=2)
        yield drawn
        written = io.StringIO()
        drawing.savefig(written, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    drawn.svg = _inline(written.getvalue(), title)


def dark_style() -> str:
    """CSS that gives figures the colours of a dark page."""
    rules = (
        f'svg [style*="{name}: {light}"] {{ {name}: {dark} !important }}' for light, dark in DARK.items() for name in ("fill", "stroke")
    )
    return "\n".join(rules)


def _inline(text: str, title: str) -> str:
    """The SVG as a part of a page, named for those who hear it, with names of its own for what it uses inside."""
    ElementTree.register_namespace("", _NAMESPACE)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(text)
    root.attrib |= {"role": "img", "aria-label": title}
    for element in root.iter():
        for style in element.findall(f"{{{_NAMESPACE}}}style"):
            element.remove(style)
        if element.tag == f"{{{_NAMESPACE}}}g":
            element.attrib.pop("id", None)  # figures of one page would share them
    return ElementTree.tostring(root, encoding="unicode")
