"""When all factors of a layer are worth one launch. What that launch gives: `tests/families/test_vector_chain.py`."""

from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.launch import fused
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue

PAIR, ALONE = Chain((Pattern(2, 9, 5, 3), Pattern(1, 4, 18, 3))), Chain((Pattern(2, 9, 5, 3),))
CORES = 4


@pytest.mark.parametrize(
    ("chains", "batch", "shares", "is_worth_it"),
    [
        ((PAIR,), fused.LEAST_ENTRIES * CORES, True, True),
        ((PAIR,), fused.LEAST_ENTRIES * CORES - 1, True, False),
        ((PAIR,), fused.LEAST_ENTRIES * CORES, False, False),
        ((ALONE,), fused.LEAST_ENTRIES * CORES, True, False),
        ((ALONE, ALONE), fused.LEAST_ENTRIES * CORES, True, True),
    ],
)
def test_a_long_batch_of_several_factors_on_shared_memory(
    monkeypatch: pytest.MonkeyPatch, chains: tuple[Chain, ...], batch: int, shares: bool, is_worth_it: bool
) -> None:
    device: Any = SimpleNamespace(shares_host=shares, limits=SimpleNamespace(multiprocessors=CORES))
    monkeypatch.setattr(fused, "_plan", lambda *given: "one launch")
    found = fused.fused_plan(device, chains, "float32", "bsf", Epilogue(), batch)
    assert found == ("one launch" if is_worth_it else None)
