"""Pictures for a page: matplotlib figures as SVG with real text, in colours that a dark page can exchange.

The same numbers give the same bytes. Knows nothing of what is drawn.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

import jinja2
from markupsafe import Markup

from ksgen.errors import KsgenError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, RULE, POINT, LINE, ACCENT, GUIDE = "#23282e", "#c4cad1", "#7d8a97", "#1769aa", "#c2410c", "#1f7a45"
# on a dark page
DARK = {INK: "#d9dee4", RULE: "#444c55", POINT: "#8f9ba8", LINE: "#69b1ec", ACCENT: "#f59a5f", GUIDE: "#62c48a"}
_NAMESPACE = "http://www.w3.org/2000/svg"
WIDE_RATIO = 4  # an axis is logarithmic if its largest value exceeds this many times its smallest
LOOK: Any = {  # matplotlib's settings
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],  # comes with matplotlib, which measures texts with it
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
    "path.simplify": False,  # keeps dots, which are lines of no length
}


@dataclass(frozen=True)
class Size:
    """Inches of a figure and its margins, which hold numbers (left), a word, slanted labels (bottom) and the title."""

    width: float
    height: float
    left: float = 0.6
    right: float = 0.2
    bottom: float = 0.75
    top: float = 0.25


@dataclass
class DrawnFigure:
    """A drawing in progress, and its SVG afterwards."""

    axes: "Axes"
    svg: str = ""


def check_matplotlib(extra: str) -> None:
    """Raise `KsgenError` if matplotlib is missing. `extra`: the extra of ksgen that the error names as remedy."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        from ksgen.install import install_line

        raise KsgenError(
            f"pictures need matplotlib, which cannot be imported ({error}); {install_line(extra)}"
        ) from None


@contextmanager
def figure(title: str, size: Size, extra: str, content: object = None) -> Iterator[DrawnFigure]:
    """Axes to draw on.

    Names inside the SVG are derived from the title and the `content`, so no two figures of a page may share both.
    """
    check_matplotlib(extra)
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # independent of the user's settings
        matplotlib.rcParams.update(LOOK | {"svg.hashsalt": f"{title} {content!r}"})
        width, height = size.width, size.height
        drawing = Figure(figsize=(width, height))
        drawing.subplots_adjust(size.left / width, size.bottom / height, 1 - size.right / width, 1 - size.top / height)
        drawn = DrawnFigure(drawing.subplots())
        drawn.axes.set_title(title)
        drawn.axes.tick_params(length=2)
        yield drawn
        written = io.StringIO()
        drawing.savefig(
            written, format="svg", transparent=True, metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    drawn.svg = _inline(written.getvalue(), title)


def make_logarithmic(axes: "Axes", which: str, subs: Sequence[int], ticks: int) -> None:
    """Give the x or y axis a logarithmic scale, with at most `ticks` numbers, at multiples `subs` of powers of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    getattr(axes, f"set_{which}scale")("log")
    axis = getattr(axes, f"{which}axis")
    axis.set_major_locator(LogLocator(subs=subs, numticks=ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def page(folder: Path, template: str, filters: Mapping[str, Callable[..., Markup]], **content: Any) -> str:
    """Render a self-contained HTML page from a template of that folder."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder), undefined=jinja2.StrictUndefined, autoescape=True,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters.update(filters)
    return environment.get_template(template).render(**content)


def dark_style() -> str:
    """CSS that gives figures the colours of a dark page, both matplotlib's and those with attributes."""
    return "\n".join(
        f'svg [style*="{name}: {light}"], svg [{name}="{light}"] {{ {name}: {dark} !important }}'
        for light, dark in DARK.items()
        for name in ("fill", "stroke")
    )


def file_style() -> str:
    """Style element of a stand-alone SVG file, whose colours are attributes."""
    rules = [f'[{name}="{light}"]{{{name}:{dark}}}' for light, dark in DARK.items() for name in ("fill", "stroke")]
    return f"<style>@media screen and (prefers-color-scheme: dark){{{''.join(rules)}}}</style>"


def _inline(text: str, title: str) -> str:
    """The SVG as part of a page, with a label for screen readers. Leaves out parts that the page has once, names that
    figures would share, and invisible digits.
    """
    ElementTree.register_namespace("", _NAMESPACE)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(text)
    root.attrib |= {"role": "img", "aria-label": title}
    for element in root.iter():
        for style in element.findall(f"{{{_NAMESPACE}}}style"):
            element.remove(style)
        if element.tag == f"{{{_NAMESPACE}}}g":
            element.attrib.pop("id", None)
        if "d" in element.attrib:
            element.attrib["d"] = " ".join(map(_rounded, element.attrib["d"].split()))
        element.tail = None
        if not (element.text or "").strip():
            element.text = None
    return ElementTree.tostring(root, encoding="unicode")


def _rounded(word: str) -> str:
    """A letter of a path unchanged, a coordinate rounded to a hundredth of a point."""
    return word if word.isalpha() else f"{round(float(word), 2):g}"
