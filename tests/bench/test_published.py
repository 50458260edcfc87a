"""Tests that reports show our numbers next to the paper's own."""

from dataclasses import replace

import pytest

from ksgen.bench import tables
from ksgen.bench.roster import OURS
from ksgen.pattern import Pattern
from ksgen.spec import paper_patterns
from tests.support.bench_rows import row

pytest.importorskip("matplotlib", reason="pictures are matplotlib's: pip install -e '.[bench]'")


def test_the_authors_own_times_are_compared_with_ours() -> None:
    some = [row("6,64,64,1", OURS, median_us=61.5, share_of_floor=0.5), row("6,64,64,1", "bmm", median_us=123.0)]
    assert tables.authors(some).rows == (("6,64,64,1", "float32", "bsl", "61.5", "123", "123", "x2.00", "50 %"),)
    assert "another GPU" in tables.authors(some).note
    # at another batch there is nothing to compare
    assert tables.authors([replace(each, batch=1568) for each in some]).rows == ()


def test_what_is_published_is_what_the_shared_page_says() -> None:
    assert len(tables.published_patterns()) == 12
    of_the_chains = {Pattern.parse(text) for text in ("6,64,64,1", "1,768,192,2", "2,48,192,1", "1,192,48,2")}
    assert set(tables.published_patterns()) <= {*paper_patterns(), *of_the_chains}
    assert tables.published_us("1,1024,1024,4", "float16", "bsl") == pytest.approx(7170)
    assert tables.published_us("1,1024,1024,4", "float16", "bsf") is None
    assert tables.published_us("1,2,3,4", "float32", "bsl") is None
    claim = tables.claim("kernel_beats_all_bsf")
    assert (claim.share, claim.factor, claim.where, claim.precision) == (0.2, 1.28, "Table 5", "float32")
    for name in tables.published()["claims"]:
        assert tables.claim(name).where
