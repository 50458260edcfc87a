"""What tests of launchers share: a pattern, its arrays, and the check of a product."""

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ksgen import reference
from ksgen.devices import Found, list_devices
from ksgen.launch import base, behind, explain, fused, planner
from ksgen.launch.planner import Planner
from ksgen.measure.verify import tolerance
from ksgen.pattern import Pattern
from tests.support.fake_gpu import FakeArray, FakeGpu, FakeTensor

HAS_OPENCL = any(isinstance(line, Found) and line.runtime == "opencl" for line in list_devices())
needs_opencl = pytest.mark.skipif(not HAS_OPENCL, reason="no OpenCL device")
SHAPE = (2, 9, 5, 3)
PATTERN = Pattern(*SHAPE)
BATCH = 37
RANDOM = np.random.default_rng(7)


def dtype_of(precision: str) -> Any:
    return np.dtype(ml_dtypes.bfloat16 if precision == "bfloat16" else precision)


def draw(*shape: int, precision: str = "float32") -> Any:
    dtype = dtype_of(precision)
    drawn = RANDOM.standard_normal(shape, np.float32).astype(dtype)
    return drawn + 1j * RANDOM.standard_normal(shape, np.float32).astype(dtype) if dtype.kind == "c" else drawn


def inputs(precision: str = "float32", layout: str = "bsf", batch: int = BATCH) -> tuple[Any, Any]:
    x = (batch, PATTERN.in_features) if layout == "bsf" else (PATTERN.in_features, batch)
    return draw(*x, precision=precision), draw(*SHAPE, precision=precision)


def check(y: Any, x: Any, weights: Any, layout: str = "bsf", precision: str = "float32", **epilogue: Any) -> None:
    truth = reference.multiply(Pattern(*weights.shape), x, weights, layout, **epilogue)
    assert y.shape == truth.shape
    error = np.linalg.norm(np.asarray(y).astype(truth.dtype) - truth) / np.linalg.norm(truth)
    assert error <= 2 * tolerance(precision, weights.shape[2]), error


def plan_afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Planner()
    for module in (base, behind, explain, fused, planner):
        monkeypatch.setattr(module, "PLANNER", own)


def zeros(gpu: FakeGpu, layout: str = "bsf") -> FakeArray:
    shape = (BATCH, PATTERN.out_features)
    return FakeArray(gpu, np.zeros(shape if layout == "bsf" else shape[::-1], np.float32))


def packs(gpu: FakeGpu) -> int:
    return sum(entry.endswith("_pack") for entry, _ in gpu.launches)


def written(tensor: FakeTensor, content: Any) -> None:
    """Write without a write counter, as a fused optimizer, a collective or `.data` does."""
    tensor.data.content[...] = content


def in_16_bits() -> tuple[Any, Any]:
    return draw(BATCH, 16, precision="float16"), draw(1, 16, 8, 2, precision="float16")


def launched(gpu: FakeGpu) -> list[str]:
    """Ends of the entries' names: none of the one that multiplies."""
    return [re.sub(r"^ks_1x16x8x2_float16_bsf_[0-9a-f]{8}_?", "", entry) for entry, _ in gpu.launches]
