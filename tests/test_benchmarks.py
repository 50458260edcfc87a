"""What benchmarks launch by themselves, rehearsed on the stand-in device."""

from pathlib import Path

import numpy as np
import pytest

from ksgen import reference
from ksgen.pattern import Pattern
from ksgen.plan import Planner
from ksgen.spec import KernelSpec
from tests.fake_gpu import FakeGpu, TextCompiler
from tests.simt import is_installed

pytestmark = pytest.mark.skipif(not is_installed("none"), reason="the emulator needs g++")


@pytest.mark.parametrize(("layout", "kinds"), [("bsl", ["wgmma_shared", "mma"]), ("bsf", ["wgmma_registers", "mma"])])
def test_each_family_is_measured_by_its_own_default(layout: str, kinds: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    tensor_cores = pytest.importorskip("benchmarks.tensor_cores")
    monkeypatch.setattr(tensor_cores, "PLANNER", Planner())
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("ksgen.build.find_compiler", TextCompiler)
    gpu, kernel, batch = FakeGpu(), KernelSpec(Pattern(2, 16, 8, 2), "float16", layout), 40
    shapes = [(batch, size) if layout == "bsf" else (size, batch) for size in (32, 64)]
    x, y, weights = torch.randn(shapes[0]).half(), torch.empty(shapes[1]).half(), torch.randn(2, 16, 8, 2).half()
    for tensor in (x, y, weights):
        gpu.own(tensor.numpy())
    truth = reference.multiply(kernel.pattern, x.numpy(), weights.numpy(), layout)
    assert tensor_cores.families_of(gpu, kernel, batch) == kinds
    assert tensor_cores.families_of(gpu, kernel, 41) == (kinds if layout == "bsf" else ["mma"])
    for name in kinds:
        y.fill_(float("nan"))
        product = tensor_cores.by_family(name, gpu, kernel, batch, weights)(x, y)
        assert product() is y
        gpu.synchronize()
        np.testing.assert_allclose(y.numpy(), truth, rtol=1e-3, atol=2e-3)
