"""Tests of splits of known layers, by hand: where a chain splits, what each process holds, and what is sent."""

import re

import pytest

pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen import structures
from ksgen.errors import PatternError, SpecError
from ksgen.pattern import Chain, Pattern
from ksgen.torch import KSLinear
from ksgen.torch.layer.splits import FEATURES, ROWS, SUMS, WHOLE, split


def chain(*shapes: tuple[int, int, int, int]) -> Chain:
    return Chain(tuple(Pattern(*shape) for shape in shapes))


UP = chain((6, 64, 64, 1), (1, 768, 192, 2))  # of ViT-S/16: 384 features to 1536
THREE = chain((4, 3, 2, 2), (1, 5, 8, 3), (1, 4, 5, 3), (4, 5, 3, 1))


@pytest.mark.parametrize(
    ("name", "given", "processes", "axes", "own"),
    [
        ("KSBlockwise", chain((4, 3, 2, 5), (12, 4, 5, 1)), 4, (0, 0), chain((1, 3, 2, 5), (3, 4, 5, 1))),
        ("KSColwise", UP, 2, (None, 1), chain((6, 64, 64, 1), (1, 384, 192, 2))),
        ("KSColwise", UP.transpose, 2, (1, 0), chain((1, 96, 768, 2), (3, 64, 64, 1))),
        ("KSRowwise", UP, 2, (0, 2), chain((3, 64, 64, 1), (1, 768, 96, 2))),
        ("KSRowwise", UP.transpose, 2, (2, None), chain((1, 192, 384, 2), (6, 64, 64, 1))),
        ("KSColwise", THREE, 4, (None, None, 1, 0), chain((4, 3, 2, 2), (1, 5, 8, 3), (1, 1, 5, 3), (1, 5, 3, 1))),
        ("KSRowwise", THREE, 4, (0, 2, None, None), chain((1, 3, 2, 2), (1, 5, 2, 3), (1, 4, 5, 3), (4, 5, 3, 1))),
    ],
)
def test_the_axes_and_what_each_process_has(
    name: str, given: Chain, processes: int, axes: tuple[int | None, ...], own: Chain
) -> None:
    found = split(name, given, processes)
    assert (found.axes, found.own) == (axes, own)
    if name != "KSRowwise":
        assert found.own.out_features * processes == given.out_features
    if name != "KSColwise":
        assert found.own.in_features * processes == given.in_features


@pytest.mark.parametrize(
    ("name", "given", "processes", "message"),
    [
        (
            "KSBlockwise",
            UP,
            2,
            "factor 2, 1,768,192,2, along a, and 2 does not divide a=1; no number of processes divides all split axes",
        ),
        (
            "KSBlockwise",
            chain((8, 3, 2, 5), (12, 4, 10, 1)),
            3,
            "factor 1, 8,3,2,5, along a, and 3 does not divide a=8; accepted: 2, 4 processes",
        ),
        (
            "KSColwise",
            UP,
            5,
            "factor 2, 1,768,192,2, along k, and 5 does not divide b=768; accepted: 2, 3, 4, 6, 8, 12, 16, 24 "
            "processes",
        ),
        (
            "KSRowwise",
            UP.transpose,
            5,
            "factor 1, 1,192,768,2, along l, and 5 does not divide c=768; accepted: 2, 3, 4,",
        ),
        ("KSRowwise", UP, 4, "factor 1, 6,64,64,1, along a, and 4 does not divide a=6; accepted: 2, 3, 6 processes"),
        (
            "KSColwise",
            chain((2, 3, 4, 5)),
            2,
            "2,3,4,5 has no factor with a = 1, to be split along k; accepted: KSBlockwise, which splits along a",
        ),
        ("KSRowwise", chain((2, 3, 4, 5)), 2, "has no factor with a = 1, to be split along l"),
    ],
)
def test_what_does_not_divide_is_refused(name: str, given: Chain, processes: int, message: str) -> None:
    with pytest.raises(PatternError, match=re.escape(message)):
        split(name, given, processes)


@pytest.mark.parametrize(
    ("name", "lies", "forward", "backward"),
    [  # x of 10 rows: 10 * 384 * 4 = 15360 bytes; y: 61440; the first factor: 6 * 64 * 64 * 4 = 98304; the bias: 6144
        ("KSColwise", {}, "", "all-reduce of x's gradient, 15.4 kB; all-reduce of the gradient of factor 1, 98.3 kB"),
        (
            "KSColwise",
            {"given": FEATURES, "asked": WHOLE},
            "all-gather of x, 7.68 kB; all-gather of y, 30.7 kB",
            "reduce-scatter of x's gradient, 7.68 kB; all-reduce of the gradient of factor 1, 98.3 kB",
        ),
        (
            "KSColwise",
            {"asked": ROWS},
            "all-to-all of y, 15.4 kB",
            "all-to-all of y's gradient, 15.4 kB; all-reduce of x's gradient, 15.4 kB; all-reduce of the gradient of "
            "factor 1, 98.3 kB",
        ),
        ("KSRowwise", {}, "all-reduce of y, 61.4 kB", ""),
        ("KSRowwise", {"given": WHOLE}, "all-reduce of y, 61.4 kB", "all-gather of x's gradient, 7.68 kB"),
        (
            "KSRowwise",
            {"asked": ROWS},
            "reduce-scatter of y, 30.7 kB",
            "all-gather of y's gradient, 30.7 kB; all-reduce of the bias's gradient, 6.14 kB",
        ),
        ("KSRowwise", {"asked": FEATURES}, "reduce-scatter of y, 30.7 kB", "all-gather of y's gradient, 30.7 kB"),
    ],
)
def test_what_is_sent(name: str, lies: dict[str, str], forward: str, backward: str) -> None:
    told = split(name, UP, 2, **lies).explain(10, 4, has_bias=True)
    sent = ["; ".join(each.removesuffix(" from each").split(" from each and ")) for each in told.split("; ")[-2:]]
    assert sent == [f"forward {forward or 'sends nothing'}", f"backward {backward or 'sends nothing'}"]


def test_bias_and_residual_come_after_a_sum() -> None:
    assert [split("KSRowwise", UP, 2, asked=each).finished for each in (WHOLE, ROWS, FEATURES)] == [
        WHOLE,
        ROWS,
        FEATURES,
    ]
    assert [split("KSColwise", UP, 2, asked=each).finished for each in (WHOLE, ROWS)] == [FEATURES, FEATURES]
    assert split("KSRowwise", UP, 2).style.gives == SUMS


def test_a_layer_explains_how_it_could_be_split() -> None:
    layer = KSLinear(UP, bias=False)
    *_, blocks, columns, rows = layer.explain(10, processes=2).splitlines()
    assert blocks.startswith("not KSBlockwise over 2 processes splits factor 2, 1,768,192,2, along a")
    assert columns.startswith(
        "KSColwise over 2 processes: factor 1 whole, factor 2 along k; each multiplies by 6,64,64,1 then 1,384,192,2, "
        "54%"
    )
    assert rows.startswith(
        "KSRowwise over 2 processes: factor 1 along a, factor 2 along l; each multiplies by 3,64,64,1 then "
        "1,768,96,2, 50%"
    )
    assert "over" not in layer.explain(10)
    three = layer.explain(7, processes=3)
    assert "each multiplies by 2,64,64,1 then 1,768,64,2, 33% of" in three
    for count in (0, 1.5, "2"):
        with pytest.raises(SpecError, match="accepted: a whole number from 1 up"):
            layer.explain(processes=count)  # type: ignore[arg-type]


def test_a_layer_explains_that_a_style_refuses_it() -> None:
    tied = KSLinear.from_structure(structures.kronecker(64, 32, blocks=(4, 8)))
    *_, blocks, columns, rows = tied.explain(10, processes=2).splitlines()
    for name, line in (("KSBlockwise", blocks), ("KSColwise", columns), ("KSRowwise", rows)):
        assert line.startswith(f"not {name}: KSLinear(")
        assert "has parametrized weights, such as tied ones" in line
    *_, columns, rows = KSLinear(UP, out_layout="bsl").explain(10, processes=2).splitlines()
    assert "out_layout='bsl' of a layer that KSColwise splits" in columns
    assert "out_layout='bsl' of a layer that KSRowwise splits" in rows
    *_, columns, rows = KSLinear(UP.transpose, between="relu").explain(10, processes=2).splitlines()
    assert columns.startswith("KSColwise over 2 processes")
    assert rows.startswith("not KSRowwise")
    assert "between='relu' comes before the sum over processes" in rows
