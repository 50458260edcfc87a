"""An operand of an epilogue from outside, a scale: in a family's signature and its template, and launched by its
name.
"""

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from ksgen import reference
from ksgen.emit import templates
from ksgen.emit.render import render
from ksgen.families import FAMILIES, Limits, cuda_limits
from ksgen.families.signature import PRODUCT
from ksgen.families.simt.family import Simt
from ksgen.families.simt.shape import SimtConstants, SimtTiling
from ksgen.launch.choice import choice_by_name, limits_of
from ksgen.launch.planner import Planner
from ksgen.measure.verify import tolerance
from ksgen.paths import resource
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeGpu

BATCH, PATTERN = 37, Pattern(2, 9, 5, 3)
SCALE = np.full(1, 2.5, np.float32)


@dataclass(frozen=True)
class ScaledConstants(SimtConstants):
    """Constants of SIMT under a type of their own, which identifies the family."""


class Scaled(Simt):
    """SIMT with one operand more."""

    name = "scaled"
    tilings: ClassVar[dict[Any, Any]] = {**Simt.tilings, ScaledConstants: SimtTiling}
    rules: ClassVar[dict[Any, Any]] = {**Simt.rules, ScaledConstants: Simt.rules[SimtConstants]}
    kinds = (ScaledConstants,)
    signature = (*PRODUCT, "scale")

    def constants(self, values: Mapping[str, Any]) -> ScaledConstants:
        return ScaledConstants(**values)

    def default(self, kernel: KernelSpec, limits: Limits, batch: int | None = None) -> ScaledConstants:
        return ScaledConstants(**asdict(super().default(kernel, limits, batch)))


@pytest.fixture
def scaled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The family, and its template: SIMT's with a parameter and a line more."""
    shutil.copytree(resource("templates"), tmp_path / "templates")
    text = (tmp_path / "templates" / "simt.cu.j2").read_text()
    for line, more in (
        (
            "{% endfor %},\n    {{ pitch_parameters() }}",
            "{% endfor %}, GLOBAL const stored* scale,\n    {{ pitch_parameters() }}",
        ),
        (
            "    store_tile(y, sums,",
            "    UNROLL for (int n = 0; n < THREAD_OUT; ++n)\n"
            "        UNROLL for (int m = 0; m < THREAD_BATCH; ++m) sums[n][m] *= widen(*scale);\n    store_tile(y, "
            "sums,",
        ),
    ):
        assert line in text
        text = text.replace(line, more, 1)
    (tmp_path / "templates" / "scaled.cu.j2").write_text(text)
    monkeypatch.setitem(FAMILIES, "scaled", Scaled())
    monkeypatch.setattr(templates, "resource", lambda name: tmp_path / name)
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path / "cache"))
    cached = (templates.environment, templates.template_digest, templates._chosen)
    for each in cached:
        each.cache_clear()
    yield "scaled"
    for each in cached:
        each.cache_clear()


def test_its_text_takes_it_last_and_says_no_more_than_the_others_but_that(scaled: str) -> None:
    kernel = KernelSpec(PATTERN, epilogue=Epilogue(bias=True))
    text = render(kernel, FAMILIES[scaled].default(kernel, cuda_limits("sm_80"))).text
    other = render(kernel, FAMILIES["simt"].default(kernel, cuda_limits("sm_80"))).text
    assert "GLOBAL const stored* bias, GLOBAL const stored* scale," in text
    assert "scale" not in other


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_launch_takes_it_by_its_name(scaled: str, layout: str) -> None:
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    gpu, random = FakeGpu(), np.random.default_rng(0)
    kernel = KernelSpec(PATTERN, layout=layout, epilogue=Epilogue(bias=True))
    x, weights, bias = (
        random.standard_normal(shape).astype(np.float32) for shape in ((BATCH, 30), PATTERN.shape, (54,))
    )
    x, y = (
        (x, np.zeros((BATCH, 54), np.float32))
        if layout == "bsf"
        else (np.ascontiguousarray(x.T), np.zeros((54, BATCH), np.float32))
    )
    plan = Planner().plan_of(gpu, kernel, BATCH, choice_by_name(scaled, kernel, BATCH, limits_of(gpu)))
    assert plan.operands == ("x", "weights", "y", "bias", "scale")

    def on_gpu(array: Any) -> Any:
        buffer = gpu.allocate(array.nbytes)
        gpu.upload(buffer, array)
        return buffer

    buffers = {"scale": SCALE, "y": y, "bias": bias, "x": x}
    operands = {name: on_gpu(array) for name, array in buffers.items()} | {"weights": plan.pack(on_gpu(weights), None)}
    plan.launch(plan.arguments(operands), None)
    gpu.download(y, operands["y"])
    truth = reference.multiply(PATTERN, x, weights * SCALE, layout, bias=bias)
    assert np.linalg.norm(y - truth) <= 2 * tolerance("float32", 5) * np.linalg.norm(truth)
