"""The texts for processors under a second compiler: PoCL, which has other built-in functions and shares no memory with
the host.

Debian has it: apt-get install pocl-opencl-icd.
"""

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices import Found, find_device, list_devices
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.spec import LAYOUTS
from tests.support.processor_cases import CHAIN, SLICES, VECTOR, VECTOR_GRADIENT, Case, passes

HAS_POCL = any(isinstance(line, Found) and "Portable Computing Language" in line.target for line in list_devices())
pytestmark = [
    pytest.mark.skipif(not HAS_POCL, reason="PoCL is not installed: apt-get install pocl-opencl-icd"),
    pytest.mark.slow,
    pytest.mark.libraries,
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [*SLICES, *VECTOR, *CHAIN, *VECTOR_GRADIENT], ids=str)
def test_the_texts_are_right_under_another_compiler(case: Case) -> None:
    assert passes(find_device("portable"), case) == [True]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("precision", "layout"), list(zip(("float32", "float16"), LAYOUTS, strict=True)))
def test_launchers_copy_arrays_of_the_host(precision: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_DEVICE", "portable")
    first, last = Launcher(3, 5, 4, 2), Launcher(3, 7, 10, 1)
    random = np.random.default_rng(0)
    x, v, w = (
        random.standard_normal(shape).astype(precision)
        for shape in ((100, 24), first.pattern.shape, last.pattern.shape)
    )
    x = x if layout == "bsf" else np.ascontiguousarray(x.T)
    truth = reference.multiply(last.pattern, reference.multiply(first.pattern, x, v, layout), w, layout)
    y = ChainLauncher(first, last)(x, [v, w], layout=layout)
    assert np.linalg.norm(y - truth) <= (2e-3 if precision == "float16" else 1e-6) * np.linalg.norm(truth)
    truth = reference.gradient(first.pattern, x, (grad := first(x, v, layout=layout)), layout)
    assert np.linalg.norm(first.gradient(x, grad, layout=layout) - truth) <= (
        2e-3 if precision == "float16" else 1e-6
    ) * np.linalg.norm(truth)
