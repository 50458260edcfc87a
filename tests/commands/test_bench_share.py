"""`ksgen bench share`: what it refuses."""

import pytest

from ksgen.errors import SpecError
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from tests.support.bench_share import run  # noqa: E402


def test_mistakes() -> None:
    done = run("--models", "ViT-S/15")
    assert isinstance(done.exception, SpecError)
    assert str(done.exception).startswith("model 'ViT-S/15'; did you mean ViT-S/16? accepted: ViT-S/16, ViT-B/16")
