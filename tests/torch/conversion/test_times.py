"""Tests of times of chains: their device, their origin, and when they are unknown. No duration is tested."""

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch import nn  # noqa: E402  (after the skip)

from ksgen.devices import find_device  # noqa: E402
from ksgen.errors import DeviceError, KsgenError  # noqa: E402
from ksgen.families import cuda_limits, family_for  # noqa: E402
from ksgen.families.expected import prediction, speed_of  # noqa: E402
from ksgen.measure import trust  # noqa: E402
from ksgen.measure.roofline import Ceilings  # noqa: E402
from ksgen.pattern import Chain, Pattern, dense  # noqa: E402
from ksgen.spec import KernelSpec  # noqa: E402
from ksgen.torch.conversion import times  # noqa: E402
from ksgen.torch.conversion.times import clock_of, measured_us  # noqa: E402

CHAIN = Chain((Pattern(2, 48, 192, 1), Pattern(1, 192, 48, 2)))


def test_of_a_target_the_model_predicts_each_factor_and_all_in_one_launch() -> None:
    clock, limits = clock_of("sm_80", "float32"), cuda_limits("sm_80")

    def expected(kernel: KernelSpec) -> float:
        family = family_for(kernel, limits, 25088)
        speed = speed_of(family, kernel, limits)
        assert speed
        found = prediction(speed, family, kernel, family.default(kernel, limits, 25088), 25088)
        assert found
        return float(found.us)

    apart, whole = sum(expected(KernelSpec(pattern)) for pattern in CHAIN), expected(KernelSpec(CHAIN))
    assert clock.chain_us(CHAIN) == pytest.approx(min(apart, whole))
    back, step = (each.transpose for each in CHAIN), 0.0
    step += sum(expected(KernelSpec(pattern)) for pattern in (*CHAIN, *back))
    step += sum(expected(KernelSpec(pattern, job="gradient")) for pattern in CHAIN)
    assert clock.step_us(CHAIN) == pytest.approx(step)
    whole = dense(384, 384)
    assert clock.dense_step_us(whole) == pytest.approx(3 * (clock.dense_us(whole) or 0))
    assert (clock.where, clock.batch) == (None, 25088)
    assert clock.by == "the cost model, for A100 (sm_80)"
    assert clock.dense_us(dense(384, 384)) == pytest.approx(2e6 * 384 * 384 * 25088 / (2 * 64 * 108 * 1.41e9))


@pytest.fixture
def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The processor of a machine whose cache is empty."""
    try:
        found = find_device("native")
    except DeviceError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("KSGEN_DEVICE", "native")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    return found


def test_of_a_processor_by_its_measured_rates(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[object, str]] = []

    def ceilings(device: object, precision: str) -> Ceilings:
        asked.append((device, precision))
        return Ceilings(1e10, 1e11 / len(asked))

    shares = [0.1, 0.5]
    monkeypatch.setattr(times, "Watch", lambda: SimpleNamespace(others_share=lambda: shares.pop(0)))
    monkeypatch.setattr(times, "measure_ceilings", ceilings)
    times._ceilings.cache_clear()
    fast, again, slow = (clock_of("cpu", precision) for precision in ("float32", "float32", "float64"))
    times._ceilings.cache_clear()
    assert asked == [(device, "float32"), (device, "float64")]
    assert fast.batch == 1568
    assert fast.by == "the cost model, at rates measured on this processor"
    assert slow.by == f"{fast.by}, which are unreliable (other processes took 50% of the CPU time)"
    us = fast.chain_us(CHAIN)
    apart = sum(fast.kernel_us(KernelSpec(pattern)) or 0 for pattern in CHAIN)
    whole = fast.kernel_us(KernelSpec(CHAIN))
    assert whole
    assert us == min(apart, whole) == again.chain_us(CHAIN)
    assert slow.chain_us(CHAIN) > us
    assert fast.dense_us(dense(384, 384)) == pytest.approx(1e6 * 2 * 384 * 384 * 1568 / 1e11)


def test_a_later_process_reads_reliable_rates(device: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Ceilings] = []
    share = [0.5]

    def ceilings(device: object, precision: str) -> Ceilings:
        measured.append(Ceilings(1e10 + len(measured), 1e11, 6))
        return measured[-1]

    def asked(precision: str = "float32") -> Any:
        """What another process finds."""
        times._ceilings.cache_clear()
        try:
            return times._ceilings(device, precision)[0]
        finally:
            times._ceilings.cache_clear()

    monkeypatch.setattr(times, "Watch", lambda: SimpleNamespace(others_share=lambda: share[0]))
    monkeypatch.setattr(times, "measure_ceilings", ceilings)
    assert [asked(), asked()] == measured
    assert len(measured) == 2, "unreliable rates are not stored"
    share[0] = 0.0
    assert asked() == asked() == asked() == measured[2]
    assert len(measured) == 3
    asked("float64")
    assert len(measured) == 4
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    assert asked() == measured[4]
    torch.set_num_threads(threads)
    assert asked() == measured[2]
    (path,) = tmp_path.glob("rates-*.json")
    path.write_text(path.read_text().replace(f'"torch": "{torch.__version__}"', '"torch": "0.1"'))
    assert asked() == measured[5]
    path.unlink()
    (tmp_path / "file").touch()
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "file"))
    assert [asked(), asked()] == measured[6:]


def test_a_training_step_writes_and_reads_wide_intermediates() -> None:
    """A Monarch product of 384 by 1536 features passes 9,216 on, two factors as in the paper 384."""
    clock = clock_of("sm_80", "float32")
    wide, narrow = (
        Chain((Pattern(48, 192, 8, 1), Pattern(1, 8, 48, 192))),
        Chain((Pattern(2, 192, 192, 1), Pattern(1, 192, 48, 8))),
    )
    assert wide[0].out_features == 24 * narrow[0].out_features
    assert clock.step_us(narrow) < clock.dense_step_us(dense(384, 1536))
    assert clock.step_us(wide) > 2 * clock.step_us(narrow)


def test_unknown_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "no such device")
    clock = clock_of("cpu", "float32")
    assert clock.by.startswith("no model: device 'no such device'")
    assert (clock.chain_us(CHAIN), clock.dense_us(CHAIN)) == (None, None)
    assert (clock.step_us(CHAIN), clock.dense_step_us(CHAIN)) == (None, None)
    with pytest.raises(KsgenError, match="device='sm_61': its speed is unknown; known: sm_70, sm_75, sm_80"):
        clock_of("sm_61", "float32")
    with pytest.raises(KsgenError, match="device='gpu': no tensors there"):
        clock_of("gpu", "float32")


def test_layers_take_turns_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            order.append(self.name)
            return x

    monkeypatch.setattr(trust, "Watch", lambda: SimpleNamespace(look=lambda: None, has_looked=True, shares=[0.5]))
    monkeypatch.setattr(trust, "MOST_RUNS", 1)
    monkeypatch.setattr(trust, "MOST_SECONDS", 2.0)
    # the first runs warm up
    seconds = {"a": iter([1000.0] * 3 + [1.0] * 10**4), "b": iter([1000.0] * 3 + [2.0] * 10**4)}
    monkeypatch.setattr(times, "host_clock", lambda call: (call(), next(seconds[order[-1]]))[1])
    clock = count()  # a second per look
    monkeypatch.setattr(trust, "monotonic", lambda: float(next(clock)))
    found = measured_us([Named("a"), Named("b")], torch.ones(1))
    assert found == [
        (1e6, "other processes took 50% of the CPU time"),
        (2e6, "other processes took 50% of the CPU time"),
    ]
    assert "".join(order) == "aaaabbbb" + "bbaa" + "aabb" + "bbaa"
