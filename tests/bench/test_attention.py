"""Products by attention matrices: one Monarch matrix per sample and head, in one chain."""

from math import isqrt
from typing import Any

import pytest

from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from benchmarks.structures import HEADS, WIDTH, attended  # noqa: E402  (PyTorch may be missing)


@pytest.mark.parametrize("sequence", [9, 16])
def test_every_sample_and_head_has_its_own_matrix(sequence: int) -> None:
    """The chain's product is that of each head's factors, and all contenders agree."""
    torch.manual_seed(0)
    with torch.no_grad():
        jobs: Any = attended(sequence, torch.float32, samples=2)
        layer, values = jobs["einsum"].func, jobs["einsum"].args[0]
        (first, second), side, count = layer.weights, isqrt(sequence), 2 * HEADS
        blocks = values.view(count, side, side, WIDTH)
        inner = torch.einsum("nkij,nijw->nkjw", first, blocks)
        wanted = torch.einsum("nrkj,nrjw->nrkw", second.view(count, side, side, side), inner)
        for name in ("auto", "ksgen", "packed", "strided", "bmm", "einsum"):
            torch.testing.assert_close(jobs[name](), wanted.reshape(count * sequence, WIDTH), rtol=1e-4, atol=1e-4)
        assert jobs["sdpa"]().shape == (2, HEADS, sequence, WIDTH)
        torch.testing.assert_close(jobs["dense"](), jobs["sdpa"](), rtol=1e-4, atol=1e-4)
