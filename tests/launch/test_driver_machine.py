"""The environment of the stand-in machine's processes, where something that it needs is not installed."""

import json
import sys

import pytest

from tests.driver import NotHereError, environment, items
from tests.emulator.build import is_installed


@pytest.mark.skipif(
    sys.platform != "linux" or not is_installed("none"), reason="the stand-in driver needs Linux and g++"
)
@pytest.mark.parametrize("missing", ["cuda", "cuda.bindings"])
def test_missing_cuda_bindings_are_reported(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KSGEN_DRIVER_REGISTRY", raising=False)
    monkeypatch.delitem(sys.modules, "cuda.bindings", raising=False)  # which another test may have left there
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(NotHereError, match=r"^cuda-bindings is not installed$"):
        environment("driver")


def test_a_skip_is_reported_as_pytest_has_it(request: pytest.FixtureRequest) -> None:
    """pytest's summary of skips takes no list."""
    skipped = pytest.TestReport(
        "test_a", ("test_a.py", 7, "test_a"), {}, "skipped", ("test_a.py", 7, "Skipped: why"), "call"
    )
    told = json.loads(json.dumps(skipped._to_json() | {"$report_type": "TestReport"}))
    assert items.restored(request.config, told).longrepr == ("test_a.py", 7, "Skipped: why")
