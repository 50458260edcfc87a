"""`ksgen bench share`: what it refuses."""

import pytest

from ksgen.errors import SpecError
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import model  # noqa: E402
from tests.support.bench_share import run  # noqa: E402


def test_mistakes() -> None:
    done = run("--models", "ViT-S/15")
    assert isinstance(done.exception, SpecError)
    assert str(done.exception).startswith("model 'ViT-S/15'; did you mean ViT-S/16? accepted: ViT-S/16, ViT-B/16")


def test_a_batch_that_does_not_fit_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_shares(*_: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried\nframe #0")

    monkeypatch.setattr(model, "measure_shares", measure_shares)
    done = run("--batch", "100000000")
    assert isinstance(done.exception, MemoryError)
    assert str(done.exception).startswith("--batch 100000000: [enforce fail]")
    assert "frame" not in str(done.exception)
