"""Launchers: the products they give on the arrays of each library, what they say of themselves, and what production
needs.
"""

import copy
import os
import pickle
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import ksgen
from ksgen import reference
from ksgen.errors import KsgenError, LaunchError, SpecError
from ksgen.families import FAMILIES
from ksgen.launcher import ChainLauncher, Launcher
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor
from tests.support.launching import BATCH, PATTERN, SHAPE, check, draw, inputs, needs_opencl, zeros


@needs_opencl
def test_epilogue_and_out(ks: Launcher) -> None:
    x, weights = inputs()
    bias, residual = draw(PATTERN.out_features), draw(BATCH, PATTERN.out_features)
    out = np.full_like(residual, np.nan)
    y = ks(x, weights, bias=bias, activation="gelu", residual=residual, out=out)
    assert y is out
    check(y, x, weights, bias=bias, activation="gelu", residual=residual)
    expected = y.copy()
    ks(x, weights, bias=bias, activation="gelu", residual=residual, out=residual)  # in place
    np.testing.assert_array_equal(residual, expected)


@needs_opencl
def test_arrays_that_changed_are_seen(ks: Launcher) -> None:
    x, weights = inputs()
    ks(x, weights)
    weights *= 3
    check(ks(x, weights), x, weights)
    call = ks.prepare(x, weights)
    x += 1
    check(call(), x, weights)


@needs_opencl
def test_many_threads_may_call_one_launcher(ks: Launcher) -> None:
    failures = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        x, weights = (
            random.standard_normal((seed, PATTERN.in_features), np.float32),
            random.standard_normal(SHAPE, np.float32),
        )
        for _ in range(10):
            try:
                check(ks(x, weights), x, weights)
            except BaseException as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@needs_opencl
def test_a_batch_with_a_kernel_of_its_own_takes_it() -> None:
    ks = Launcher(*SHAPE, batches=[BATCH])
    x, weights = inputs()
    assert ks.prepare(x, weights).plan.kernel.batch == BATCH
    assert ks.prepare(x[:5], weights).plan.kernel.batch is None
    check(ks(x, weights), x, weights)


@needs_opencl
def test_explain_names_family_constants_and_reason(ks: Launcher) -> None:
    told = ks.explain(100)
    assert told.startswith("ks_2x9x5x3_float32_bsf at batch 100 on ")
    assert "vector (vector registers full of sums" in told
    assert ", block=" in told
    assert told.endswith(
        "no search has been run for this kernel on this device; to find the fastest: "
        "ksgen calibrate 2,9,5,3 --batch 100"
    )
    with pytest.raises(SpecError, match="batch=0; accepted: a whole number from 1 up"):
        ks.explain(0)
    with pytest.raises(SpecError, match="batch=0"):
        Launcher(*SHAPE, batches=[0])


def test_explain_names_a_family_that_is_expected_to_be_faster(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ksgen.launch.explain.find_device", lambda _: gpu)
    monkeypatch.setattr(FAMILIES["wgmma"], "by_default", False)
    told = Launcher(2, 192, 768, 16).explain(25088, precision="bfloat16")
    assert "mma (" in told
    assert re.search(
        r"; the cost model expects wgmma, which launchers take only by wisdom or by name, to be \d\.\d\d times as fast",
        told,
    )


def test_the_epilogue_of_cuda_arrays(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    bias, residual = draw(PATTERN.out_features), draw(BATCH, PATTERN.out_features)
    out = FakeArray(gpu, np.zeros_like(residual))
    given = {"bias": FakeArray(gpu, bias), "residual": FakeArray(gpu, residual)}
    ks(FakeArray(gpu, x), FakeArray(gpu, weights), activation="silu", out=out, **given)
    gpu.synchronize()
    check(out.content, x, weights, bias=bias, activation="silu", residual=residual)


def test_float32_arrays_may_ask_for_tensor_cores(gpu: FakeGpu, ks: Launcher) -> None:
    x, weights = inputs()
    out = zeros(gpu)
    for precision, error in (("tf32x3", 1e-6), ("tf32", 1e-3), (None, 1e-6)):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=out, precision=precision)
        gpu.synchronize()
        truth = reference.multiply(PATTERN, x, weights, "bsf")
        assert 0 < np.linalg.norm(out.content - truth) / np.linalg.norm(truth) < error
    with pytest.raises(
        LaunchError,
        match="precision='float16' for x of float32; accepted: float32, tf32, tf32x3, fp16x3",
    ):
        ks(FakeArray(gpu, x), FakeArray(gpu, weights), out=out, precision="float16")
    with pytest.raises(LaunchError, match="precision='half' for x of float32"):
        ChainLauncher(ks)(FakeArray(gpu, x), [FakeArray(gpu, weights)], out=out, precision="half")


def test_launchers_can_be_copied_and_sent_to_other_processes(gpu: FakeGpu) -> None:
    ks = Launcher(*SHAPE, batches=[BATCH])
    x, weights = inputs()
    ks(FakeArray(gpu, x), FakeTensor(gpu, weights), out=zeros(gpu))
    for copied in (copy.deepcopy(ks), pickle.loads(pickle.dumps(ks))):
        assert (copied.pattern, copied.batches) == (ks.pattern, ks.batches)
    assert repr(copy.deepcopy(ChainLauncher(ks))) == "ChainLauncher(Launcher(2, 9, 5, 3))"


PRODUCTION = """
import sys
import numpy as np, ksgen
if len(sys.argv) > 1:
    ksgen.use_bundle(sys.argv[1])
x, w = np.ones((4, 30), np.float32), np.ones((2, 9, 5, 3), np.float32)
print(float(ksgen.Launcher(2, 9, 5, 3)(x, w)[3, 7]))
"""


@needs_opencl
def test_production_compiles_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "KSGEN_CACHE_DIR": str(tmp_path / "cache")}
    forbidden = {**environment, "KSGEN_NO_COMPILE": "1"}

    def run(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", PRODUCTION], env=env, capture_output=True, text=True)

    cold = run(forbidden)
    assert cold.returncode == 1
    assert "ToolchainError: ks_2x9x5x3_float32_bsf" in cold.stderr
    assert run(environment).stdout == "5.0\n"
    assert run(forbidden).stdout == "5.0\n"


def test_the_package_offers_the_launcher() -> None:
    assert repr(ksgen.Launcher(1, 2, 3, 4)) == "Launcher(1, 2, 3, 4)"
    with pytest.raises(KsgenError, match="accepted"):
        ksgen.Launcher(1, 0, 3, 4)
