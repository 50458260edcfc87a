"""On an NVIDIA GPU: the emulator's cases on the device, by both runtimes, and PyTorch's streams and graphs."""

from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices import Found, find_device, list_devices
from ksgen.errors import LaunchError
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from ksgen.verify import measure
from tests.test_simt import PATTERNS

RUNTIMES = sorted({line.runtime for line in list_devices() if isinstance(line, Found) and line.runtime != "opencl"})

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not RUNTIMES, reason="no NVIDIA GPU, or neither PyCUDA nor cuda-bindings")]


@pytest.mark.parametrize("runtime", RUNTIMES or ["none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_agrees_with_float64(precision: str, layout: str, runtime: str) -> None:
    device = find_device(runtime)
    for shape in [*PATTERNS.values(), (1, 192, 48, 2), (1, 128, 128, 3), (2, 64, 64, 16)]:
        for batch in (1, 7, 63, 64, 65, 1000):
            for epilogue in (Epilogue(), Epilogue(True, "gelu", True)):
                measured = measure(device, KernelSpec(Pattern(*shape), precision, layout, epilogue), batch, runs=0)
                assert measured.passed, (shape, batch, epilogue, measured.error)


def on_gpu(*shape: int) -> Any:
    torch = pytest.importorskip("torch")
    return torch.randn(*shape, device="cuda")


def check(y: Any, x: Any, weights: Any) -> None:
    pattern = Pattern(*weights.shape)
    truth = reference.multiply(pattern, x.cpu().numpy(), weights.cpu().numpy(), "bsf")
    assert np.linalg.norm(y.cpu().numpy() - truth) <= 1e-6 * np.linalg.norm(truth)


def test_pytorch_on_its_current_stream() -> None:
    torch = pytest.importorskip("torch")
    ks = Launcher(1, 192, 48, 2)
    x, weights = on_gpu(1000, 96), on_gpu(1, 192, 48, 2)
    check(ks(x, weights), x, weights)
    with torch.cuda.stream(torch.cuda.Stream()):
        changed = x * 2
        y = ks(changed, weights)
        torch.cuda.current_stream().synchronize()
    check(y, changed, weights)
    weights.mul_(3)
    check(ks(x, weights), x, weights)


def test_a_cuda_graph_replays_on_new_data() -> None:
    torch = pytest.importorskip("torch")
    ks = Launcher(1, 192, 48, 2)
    x, weights, y = on_gpu(500, 96), on_gpu(1, 192, 48, 2), on_gpu(500, 384)
    fresh, arguments = Launcher(1, 190, 46, 2), (on_gpu(500, 92), on_gpu(1, 190, 46, 2))
    with pytest.raises(LaunchError, match="before the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        fresh(*arguments)
    ks(x, weights, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ks(x, weights, out=y)
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    check(y, x, weights)
