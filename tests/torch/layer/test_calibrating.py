"""`ksgen.torch.calibrate`: which kernels of a model's call are tried, and what later calls take."""

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.launch.planner import PLANNER, WATCHERS  # noqa: E402
from ksgen.torch import KSLinear, calibrate  # noqa: E402
from ksgen.torch.layer.building import build, jobs_of  # noqa: E402
from ksgen.torch.operators import choice, settled  # noqa: E402
from ksgen.wisdom import load_wisdom  # noqa: E402
from tests.support.tuning_search import time_shortly  # noqa: E402

CHAIN = ["1,6,4,2", "2,3,6,1"]


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path / "wisdom"))
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    time_shortly(monkeypatch)
    PLANNER.forget()
    yield tmp_path
    PLANNER.forget()
    choice.forget_times()
    settled.forget()


def names_of(layer: KSLinear, x: torch.Tensor) -> set[str]:
    return {job.kernel.name for own in jobs_of(lambda: build(layer, x)).values() for job in own}


@pytest.mark.slow
def test_the_kernels_of_a_call_are_those_of_its_values_and_in_training_of_its_gradients() -> None:
    layer = KSLinear(CHAIN)
    x = torch.zeros(5, 8)
    watchers = list(WATCHERS)
    values = names_of(layer.eval(), x)
    assert {"ks_1x6x4x2_float32_bsf", "ks_2x3x6x1_float32_bsf_bias"} <= values
    assert not any("gradient" in name for name in values)
    trained = names_of(layer.train(), x.requires_grad_())
    assert {"ks_1x6x4x2_float32_bsf_gradient", "ks_2x3x6x1_float32_bsf_gradient"} <= trained
    assert "ks_1x4x6x2_float32_bsf" in trained  # the gradient of x
    assert watchers == WATCHERS


@pytest.mark.slow
def test_the_winners_are_wisdom_and_a_second_calibration_tries_nothing_that_is_settled() -> None:
    layer = KSLinear("1,6,4,2").eval()
    x = torch.randn(5, 8)
    wanted = layer(x)
    told: list[object] = []
    found = calibrate(layer, x, progress=told.append)
    assert [each.kernel.name for each in found] == ["ks_1x6x4x2_float32_bsf_bias"]
    assert told
    assert all(each.is_new and each.entry and each.entry.is_trial for each in found)
    kept = load_wisdom(next(iter(jobs_of(lambda: build(layer, x)))).name).entries()
    again = calibrate(layer, x)
    assert [each.is_new for each in again] == [not kept]  # unreliable times are taken again
    assert torch.allclose(layer(x), wanted, atol=1e-5)


def test_a_model_without_kernels_has_nothing_to_try() -> None:
    assert calibrate(torch.nn.Linear(4, 3), torch.zeros(5, 4)) == []
