"""Tests on an NVIDIA GPU: the families' matrix, the emulator's PTX cases, and PyTorch's streams and graphs.

The emulator and the device agree in all bits where nothing is rounded, and elsewhere within each check.
The test's property `ulps` records the largest difference. The emulator takes minutes: only
KSGEN_GPU_COMPARE_EMULATOR=1 runs it. Otherwise the matrix lacks the kinds of patterns that a passport proves.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.build.build import Request, build_many
from ksgen.devices import Found, find_device, list_devices
from ksgen.devices.base import PROCESSOR_RUNTIMES
from ksgen.emit.render import Source
from ksgen.errors import LaunchError
from ksgen.families import families_for
from ksgen.launch.choice import limits_of
from ksgen.launcher import Launcher
from ksgen.measure.verify import measure
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, PRECISIONS, Epilogue, KernelSpec
from tests.emulator import is_installed
from tests.families import test_quantized_inputs, test_wgmma_bytes
from tests.families import test_slices as slices
from tests.ptx import on_gpu as ptx
from tests.support import gpu_chains, kernels, wgmma_clusters
from tests.support.exchange import EXCHANGING, TEXTS
from tests.support.kernels import (
    MATRIX,
    PATTERNS,
    SERVED,
    batches_for,
    is_proven,
    kernel_of,
    on_device,
    patterns_of,
    source_of,
    supports,
)
from tests.support.libraries import library

RUNTIMES = sorted(
    {line.runtime for line in list_devices() if isinstance(line, Found) and line.runtime not in PROCESSOR_RUNTIMES}
)
Record = Callable[[str, object], None]
IN_BYTES = [
    *test_quantized_inputs.CASES,
    *(
        ("wgmma_shared", shape, precision, storage, "bsf", batch)
        for shape, precision, storage, _, batch in test_wgmma_bytes.CASES
    ),
]
CHAINS = [gpu_chains.EVEN, gpu_chains.RAGGED, gpu_chains.PLANES, gpu_chains.NARROW]
COMPARE_EMULATOR = os.environ.get("KSGEN_GPU_COMPARE_EMULATOR") == "1" and is_installed("none")
CHECKED = [each for each in MATRIX if COMPARE_EMULATOR or not is_proven(each[0], each[-1])]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not RUNTIMES, reason="no NVIDIA GPU, or neither PyCUDA nor cuda-bindings"),
]


@pytest.fixture(scope="module")
def gpu() -> Any:
    """The device of the first runtime: `driver` where cuda-bindings is there."""
    device = find_device(RUNTIMES[0])
    limits = limits_of(device)
    if "PYTEST_XDIST_WORKER" in os.environ:  # each compiles what it tests, all at once
        return device
    matrix = [
        (family, kernel_of(patterns_of(family, precision)[name], precision, layout))
        for family, precision, layout, name in CHECKED
    ]
    texts = [source_of(*each, limits=limits) for each in matrix if supports(*each, limits)]
    # all cores at once
    build_many((Request(source.text, source.entry, device.target) for source in texts), device.compiler())
    return device


def source_for(device: Any, family: str, kernel: KernelSpec) -> Source:
    return source_of(family, kernel, limits=limits_of(device))


@pytest.mark.parametrize(("family", "precision", "layout", "name"), CHECKED)
def test_the_emulators_matrix(
    family: str, precision: str, layout: str, name: str, gpu: Any, record_property: Record
) -> None:
    source, run, most = (
        source_for(gpu, family, kernel_of(patterns_of(family, precision)[name], precision, layout)),
        on_device(gpu),
        0,
    )
    batches = batches_for(source)
    for batch in batches:
        y = kernels.check(source, batch, run)
        if COMPARE_EMULATOR:
            most = max(most, kernels.ulps(y, kernels.check(source, batch, kernels.in_emulator())))
    for batch in (7, batches[-1]):
        kernels.check_exact(source, batch, run)
    record_property("ulps", most if COMPARE_EMULATOR else "not compared with the emulator")


@pytest.mark.parametrize(("family", "precision", "layout"), SERVED)
def test_runs_are_bit_identical(family: str, precision: str, layout: str, gpu: Any) -> None:
    source = source_for(gpu, family, kernel_of((2, 64, 80, 4), precision, layout))
    first, *others = (kernels.check(source, 5000, on_device(gpu)) for _ in range(4))
    for y in others:
        np.testing.assert_array_equal(y, first)


@pytest.mark.parametrize(("family", "precision", "layout"), SERVED)
def test_inf_and_nan_do_not_leak(family: str, precision: str, layout: str, gpu: Any) -> None:
    for name in ("flat", "rest", "blocks"):
        kernels.check_leaks(
            source_for(gpu, family, kernel_of(patterns_of(family, precision)[name], precision, layout)),
            65,
            on_device(gpu),
        )


@pytest.mark.parametrize(("family", "precision", "layout"), slices.SLICED)
def test_slices(family: str, precision: str, layout: str, gpu: Any) -> None:
    for name in ("flat", "aligned"):
        source = source_for(gpu, family, slices.sliced(patterns_of(family, precision)[name], precision, layout))
        for batch, rows in product((72, 129), slices.ROWS):
            slices.check(source, batch, on_device(gpu), rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("family", EXCHANGING)
def test_exchanged_features(family: str, text: str, layout: str, gpu: Any) -> None:
    kernel = KernelSpec(Pattern.parse(text), EXCHANGING[family], layout, Epilogue(True, "relu", True))
    source = source_for(gpu, family, kernel)
    for batch in dict.fromkeys(kernels.batch_for(source, each) for each in (1, 8, 65)):
        kernels.check(source, batch, on_device(gpu))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tie", ["a", "d", "ad"])
def test_tied_weights(tie: str, layout: str, gpu: Any) -> None:
    source = source_for(gpu, "simt", KernelSpec(Pattern(3, 70, 50, 4), layout=layout, tied=(tie,)))
    for batch in (1, 65, 1000):
        kernels.check(source, batch, on_device(gpu))


@pytest.mark.parametrize("kind", wgmma_clusters.KINDS)
@pytest.mark.parametrize("cluster", [(2, 1), (1, 2), (2, 2), (4, 2)])
def test_clusters(kind: str, cluster: tuple[int, int], gpu: Any) -> None:
    """Fewer batch tiles than a cluster has blocks, as many, and several rounds of whole clusters with a rest."""
    plain, run = wgmma_clusters.source_of(kind, cluster), on_device(gpu)
    whole = plain.constants.tile_batch * cluster[0]
    for batch in (7, whole, whole + 1, 20000):
        kernels.check_exact(plain, batch, run)
    source = wgmma_clusters.source_of(kind, cluster, Epilogue(True, "gelu", True))
    first, *others = (kernels.check(source, 5 * whole + 9, run) for _ in range(3))
    for y in others:
        np.testing.assert_array_equal(y, first)


@pytest.mark.parametrize("precision", ["float32", "tf32x3", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("chains", [(each,) for each in CHAINS] + [(CHAINS[0], CHAINS[0][:1])])
def test_layers_and_groups(chains: tuple[tuple[Pattern, ...], ...], layout: str, precision: str, gpu: Any) -> None:
    """One launch for all factors, by every family that has one."""
    kernel, limits, served = KernelSpec(chains, precision, layout), limits_of(gpu), 0
    for batch in (1, 7, 65, 1000):
        for family in families_for(kernel, limits, batch):
            measured = measure(gpu, kernel, batch, runs=0, family=family.name)
            assert measured.passed, (family.name, batch, measured.error)
            served += 1
    if not served:
        pytest.skip(f"{kernel.name} has no launch of all its factors")


@pytest.mark.parametrize(
    ("family", "shape", "precision", "storage", "layout", "batch"), dict.fromkeys(each[:6] for each in IN_BYTES)
)
def test_x_in_eight_bits(
    family: str, shape: tuple[int, ...], precision: str, storage: str, layout: str, batch: int, gpu: Any
) -> None:  # fmt: skip
    kernel = KernelSpec(
        Pattern(*shape), precision, layout, Epilogue(True, "gelu", True), weights=storage, inputs=storage
    )
    first, *others = (kernels.check(source_for(gpu, family, kernel), batch, on_device(gpu)) for _ in range(3))
    for y in others:
        np.testing.assert_array_equal(y, first)


@pytest.mark.skipif(
    "driver" not in RUNTIMES, reason="narrow arguments need the driver's launch: pip install cuda-bindings"
)
@pytest.mark.parametrize("name", ptx.NAMES)
def test_ptx_does_what_the_emulator_says(name: str, record_property: Record) -> None:
    device = find_device("driver")
    case = ptx.case_named(name)
    if why := ptx.why_not(case, device.target):
        pytest.skip(why)
    ptx.launch(device, case)
    case.check()
    if name in ptx.PRODUCTS:
        record_property("error", f"{ptx.PRODUCTS[name].error_of(case):.2e}")
    if COMPARE_EMULATOR:
        record_property("ulps", ptx.compare_with_emulator(case, device.target))


@pytest.mark.parametrize("runtime", RUNTIMES or ["none"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_what_the_planner_chooses_agrees_with_float64(precision: str, layout: str, runtime: str) -> None:
    device = find_device(runtime)
    for shape in (PATTERNS["flat"], (1, 192, 48, 2), (1, 128, 128, 3), (2, 64, 64, 16)):
        for batch in (1, 65, 1000):
            for epilogue, job in (
                (Epilogue(), "multiply"),
                (Epilogue(True, "gelu", True), "multiply"),
                (Epilogue(), "gradient"),
            ):
                kernel = replace(kernel_of(shape, precision, layout, epilogue), job=job)
                measured = measure(device, kernel, batch, runs=0)
                assert measured.passed, (shape, batch, epilogue, job, measured.error)


def on_gpu(*shape: int) -> Any:
    torch = library("torch")
    return torch.randn(*shape, device="cuda")


def check(y: Any, x: Any, weights: Any) -> None:
    pattern = Pattern(*weights.shape)
    truth = reference.multiply(pattern, x.cpu().numpy(), weights.cpu().numpy(), "bsf")
    assert np.linalg.norm(y.cpu().numpy() - truth) <= 1e-6 * np.linalg.norm(truth)


@pytest.mark.libraries
def test_pytorch_on_its_current_stream() -> None:
    torch = library("torch")
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
    weights.data.mul_(-2)  # which PyTorch does not count
    check(ks(x, weights), x, weights)


@pytest.mark.libraries
def test_a_cuda_graph_replays_on_new_data() -> None:
    torch = library("torch")
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
    weights.data.mul_(-2)
    graph.replay()
    torch.cuda.synchronize()
    check(y, x, weights)
