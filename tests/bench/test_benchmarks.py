"""What benchmarks launch by themselves, rehearsed on the stand-in device."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from benchmarks import tuning_strategies
from benchmarks.model import hopper_shares
from ksgen.devices import find_device
from ksgen.emit.render import render_probe
from ksgen.families.base import Bar
from ksgen.families.ptx import WgmmaInstruction
from ksgen.launch.choice import limits_of
from ksgen.measure.roofline import WARPGROUP_COLUMNS, Ceilings
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.emulator import TensorMap, is_installed, run_cuda
from tests.ptx import on_gpu
from tests.ptx.cases import Case
from tests.ptx.on_gpu import case_named
from tests.support import sass
from tests.support.fake_gpu import FakeGpu

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="the emulator needs g++")


@pytest.mark.parametrize(("layout", "kinds"), [("bsl", ["wgmma", "mma"]), ("bsf", ["wgmma", "wgmma", "mma"])])
def test_each_family_is_measured_by_its_own_default(layout: str, kinds: list[str]) -> None:
    contenders = pytest.importorskip("ksgen.bench.contenders")
    product_job = pytest.importorskip("ksgen.bench.problem").product_job
    for batch, served in ((40, kinds), (41, kinds if layout == "bsf" else ["mma"])):
        job = product_job(Pattern(2, 16, 8, 2), "float16", layout, batch)
        assert [each.family for each in contenders.ours(job, FakeGpu())] == [*served, "simt"]


def test_families_without_a_proof_are_measured_but_for_disabled_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    contenders = pytest.importorskip("ksgen.bench.contenders")
    product_job = pytest.importorskip("ksgen.bench.problem").product_job
    bars = (Bar("wgmma", "not proven yet"), Bar("mma", "wrong", is_disabled=True))
    monkeypatch.setattr(contenders, "limits_of", lambda device: replace(limits_of(device), bars=bars))
    job = product_job(Pattern(2, 16, 8, 2), "float16", "bsl", 40)
    assert [each.family for each in contenders.ours(job, FakeGpu())] == ["wgmma", "simt"]


@pytest.mark.slow
def test_facts_of_a_device_are_what_the_emulator_assumes() -> None:
    device_facts = pytest.importorskip("benchmarks.device_facts")
    gpu = FakeGpu()

    def launch(case: Case) -> None:
        on_gpu.launch(gpu, case)

    assert set(device_facts.lower_bits(launch).values()) == {"cut off"}
    assert device_facts.kept_bits(launch) == {"e4m3": 13, "e5m2": 13}
    assert device_facts.verdict(case_named("wgmma tf32 A 0 B 0 48"), launch) == "the same"
    wrong = case_named("wgmma tf32 A 0 B 0 48")
    wrong.args[2] ^= np.uint64(3 << 20)  # another stride
    assert device_facts.verdict(wrong, launch).startswith("different: Not equal to tolerance")


@pytest.mark.parametrize("in_registers", [False, True])
def test_rates_are_of_the_products_that_are_made(in_registers: bool) -> None:
    device_facts = pytest.importorskip("benchmarks.device_facts")
    rate = device_facts.Rate("bf16", 32, in_registers)
    y = np.full(256, np.nan, np.float32)
    run_cuda(rate.text, "rate", 1, 256, rate.shared_bytes, [y, 2])
    assert np.isnan(y).all()
    assert rate.flops(blocks=3, rounds=2) == 2 * 3 * 2 * 64 * 32 * 16 * 8 * 2  # two warpgroups


@pytest.mark.exhaustive
@pytest.mark.parametrize("operand", ["f16", "bf16", "tf32", "e4m3", "e5m2"])
def test_the_probe_of_warpgroups(operand: str) -> None:
    wgmma = WgmmaInstruction(operand, WARPGROUP_COLUMNS, a_in_registers=False)
    probe = render_probe("tf32" if operand == "tf32" else "float16", "cuda", 256, operand, wgmma)
    y = np.full(256, np.nan, np.float32)
    run_cuda(probe.text, f"{probe.entry}_multiply_add", 1, 256, 32 * WARPGROUP_COLUMNS, [y, 2])
    assert np.isnan(y).all()
    assert wgmma.multiply_adds * 128 == 64 * 128 * {"tf32": 8, "e4m3": 32, "e5m2": 32}.get(operand, 16)
    built = sass.compiled(probe.text, probe.entry, "sm_90a")
    assert not built.provenance.get("notes")


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.second)])
def test_products_of_rates_are_not_serialised(step: int) -> None:
    device_facts = pytest.importorskip("benchmarks.device_facts")
    for rate in device_facts.RATES[-1::-step]:
        assert not sass.compiled(rate.text, "rate", "sm_90a").provenance.get("notes"), rate.name


@pytest.mark.exhaustive
@pytest.mark.stand_in
@pytest.mark.parametrize("starts_early", [False, True])
def test_a_chain_is_launched_fused_and_per_factor(starts_early: bool) -> None:
    device_facts, device = pytest.importorskip("benchmarks.device_facts"), find_device("driver")
    if device.target != "sm_90a":
        pytest.skip(f"{device.name} has no launches that begin early")
    assert device_facts.measure_chain(device, starts_early, batch=64, rounds=1) > 0


@pytest.mark.parametrize("row_bytes", [16, 128])
def test_boxes_are_fetched_from_all_of_the_array(row_bytes: int) -> None:
    device_facts = pytest.importorskip("benchmarks.device_facts")
    fetch, lines = device_facts.Fetch(row_bytes), 2 * device_facts.ROWS
    x, described = np.zeros((lines, device_facts.LINE_WORDS), np.float32), fetch.map(lines)
    given = TensorMap(x, described.sizes, described.strides, described.box, described.swizzle)
    run_cuda(fetch.text, "fetch", 2, 32, fetch.shared_bytes, [given, 11, fetch.across, 2])
    assert fetch.across * fetch.row_bytes == x.itemsize * device_facts.LINE_WORDS


def test_what_the_cost_model_expects_of_more_freedom_is_no_less() -> None:
    kernel = KernelSpec(Pattern(1, 192, 192, 8), "float16")
    found = hopper_shares(kernel, Ceilings(4e12, 790e12))
    assert 0 < found["alone"] < found["best"] < 1
    assert 0 < found["default"] < 1


def test_recorded_tables_are_of_one_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    engine = SimpleNamespace(facts=SimpleNamespace(name="a GPU"), close=lambda: None)
    monkeypatch.setattr(tuning_strategies, "LocalEngine", lambda device: engine)
    file = tmp_path / "tables.json"
    file.write_text('{"device": "an abacus", "tables": []}')
    done = CliRunner().invoke(tuning_strategies.main, ["record", str(file)])
    assert (done.exit_code, done.output) == (
        1,
        f"Error: {file} holds tables of an abacus, and this is a GPU; name another file\n",
    )
