"""The report of a conversion: what every layer cost before and after, and equal layers of several blocks in one row."""

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.pattern import Chain, Pattern  # noqa: E402  (after the skip)
from ksgen.torch.conversion.convert import Replaced, Report  # noqa: E402
from ksgen.torch.conversion.factorize import factorize  # noqa: E402

CHAIN = Chain((Pattern(2, 3, 4, 1), Pattern(1, 4, 3, 2)))


def replaced(name: str, count: int = 1, has_errors: bool = True) -> Replaced:
    found = (factorize(torch.eye(8), CHAIN).relative_error,) if has_errors else ()
    return Replaced(name, CHAIN, count, (64 * count, CHAIN.weight_count * count), found)


def test_operations_are_counted_per_row_before_and_after() -> None:
    assert replaced("a").flops == (2 * 8 * 8, 2 * (24 + 24))
    assert replaced("a", count=3).flops == (3 * 2 * 8 * 8, 3 * 2 * (24 + 24))
    report = Report((replaced("a"), replaced("b", count=3)), (1000, 500))
    assert report.flops == (4 * 128, 4 * 96)
    assert repr(report) == "Report(2 layers replaced, 1,000 parameters before and 500 after; print it for a table)"


def test_layers_that_differ_only_in_a_number_share_a_row() -> None:
    layers = (
        replaced("blocks.0.up"),
        replaced("blocks.1.up"),
        replaced("blocks.0.fc1"),
        replaced("blocks.0.fc2"),
        replaced("head", count=3, has_errors=False),
    )
    rows = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in str(Report(layers, (1000, 500))).splitlines()
        if "│" in line
    ]
    assert [row[:5] for row in rows] == [
        ["blocks.*.up", "x 2", str(CHAIN), "96", "75.0%"],
        ["blocks.0.fc1", "x 1", str(CHAIN), "48", "75.0%"],  # the digit is a part of its name
        ["blocks.0.fc2", "x 1", str(CHAIN), "48", "75.0%"],
        ["head", "x 1", f"{CHAIN} x 3", "144", "75.0%"],
    ]
    error = f"{layers[0].relative_errors[0]:.3f}"
    assert [row[5:] for row in rows] == [[error, error]] * 3 + [["drawn", ""]]
    assert str(Report(layers, (1000, 500))).endswith(
        "5 layers replaced: 1,000 parameters became 500 in the whole model; in these layers, 896 operations "
        "per row became 672."
    )
