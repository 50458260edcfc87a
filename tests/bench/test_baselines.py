"""What PyTorch can do: each way of multiplying is right, moves what it says, and says what it lacks."""

import numpy as np
import pytest

from ksgen.bench.roster import LIBRARIES, PARTS
from ksgen.pattern import Pattern
from ksgen.reference import multiply
from ksgen.spec import LAYOUTS
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench.baselines import BASELINES, PIECES, UnsupportedError, library_version  # noqa: E402
from tests.support.bench_runs import JOB  # noqa: E402


@pytest.mark.filterwarnings("ignore")  # lazylinop's of what it lacks, PyTorch's of its sparse formats
@pytest.mark.parametrize("name", [name for name in BASELINES if name not in (*PARTS, "compiled")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_baselines_multiply(name: str, layout: str) -> None:
    computed, missing = 0, False
    for shape in ((1, 8, 8, 2), (2, 6, 4, 3), (3, 4, 8, 1), (1, 4, 12, 1)):
        pattern = Pattern(*shape)
        weights = torch.randn(shape)
        x = torch.randn((150, pattern.in_features) if layout == "bsf" else (pattern.in_features, 150))
        try:
            y = BASELINES[name].prepare(pattern, layout, weights)(x).contiguous()
        except UnsupportedError as unsupported:
            missing |= "not installed" in str(unsupported)
            continue
        np.testing.assert_allclose(y.numpy(), multiply(pattern, x.numpy(), weights.numpy(), layout), atol=1e-4)
        computed += 1
    if missing:
        pytest.skip(f"{name} is not installed")
    assert computed or (name, layout) in {
        *((each, "bsl") for each in ("three_passes", "densified", "pieces")),
        ("lazylinop", "bsf"),
    }


def test_pieces_have_the_fastest_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 3, 0, 1, 0, 2])  # seconds of each number of rows: the second is the fastest
    monkeypatch.setattr("ksgen.bench.baselines.perf_counter", lambda: next(ticks))
    rows: list[int] = []
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda x, own: (rows.append(own), split(x, own))[1])
    pattern = Pattern(1, 8, 8, 2)
    product = BASELINES["pieces"].prepare(pattern, "bsf", torch.randn(pattern.shape))
    x = torch.randn(300, pattern.in_features)
    product(x)
    rows.clear()
    product(x)
    assert set(rows) == {PIECES[1]}


def test_libraries_that_are_missing_or_cannot_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = torch.ones(1, 8, 8, 2)
    monkeypatch.setattr(
        "ksgen.bench.baselines.find_spec", lambda name: None if name in ("scipy", "pandas") else "found"
    )
    told = {"scipy": "scipy is not", "lazylinop": "lazylinop needs pandas, which is not"}
    for name, lacking in zip(LIBRARIES, ("scipy", "pandas"), strict=True):
        with pytest.raises(UnsupportedError, match=f"^{told[name]} installed: pip install {lacking}$"):
            BASELINES[name].prepare(JOB.pattern, "bsl", weights)
        with pytest.raises(UnsupportedError, match=f"{name} has no bfloat16"):
            BASELINES[name].prepare(JOB.pattern, "bsl", weights.bfloat16())
    assert library_version("no_such_library") == "no_such_library is missing"


def test_a_copy_in_another_format_needs_memory_too() -> None:
    """A process that takes more than there is would be killed."""
    pattern = Pattern(1, 64, 64, 4)
    assert BASELINES["scipy"].elements(pattern) > BASELINES["sparse"].elements(pattern) > 2 * pattern.weight_count
