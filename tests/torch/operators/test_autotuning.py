"""Inductor times ksgen's operator next to PyTorch's products, and takes the fastest one."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.libraries import library, needs_inductor

torch = library("torch")
pytest.importorskip("torch._inductor.kernel.custom_op", reason="PyTorch 2.13 has it")

from ksgen.torch.autotuning import AUTOTUNING  # noqa: E402
from ksgen.torch.fusing import FUSING  # noqa: E402
from torch._inductor import config, select_algorithm  # noqa: E402  (after the skip)
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code  # noqa: E402

from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators import products  # noqa: E402

pytestmark = needs_inductor
OPERATOR = "torch.ops.ksgen.timed_multiply"


@pytest.fixture
def timings() -> Iterator[list[dict[str, float]]]:
    """Times of each product's candidates, by name."""
    found = list[dict[str, float]]()

    def save(times: Any, name: str, *_: Any) -> None:
        if name == "ksgen_multiply":
            found.append({each.name: seconds for each, seconds in times.items()})

    torch._dynamo.reset()
    select_algorithm.add_feedback_saver(save)
    with fresh_inductor_cache():
        yield found
    select_algorithm.clear_feedback_savers()


def compiled(layer: Any, x: Any, *more: Any, options: Any = AUTOTUNING) -> tuple[Any, str]:
    """The output, and the source that inductor wrote."""
    y, sources = run_and_get_code(torch.compile(layer, options=options), x, *more)
    return y, "".join(sources)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_inductor_takes_the_fastest_product(layout: Any, timings: list[dict[str, float]]) -> None:
    layer = KSLinear("2,8,4,3", layout=layout, activation="relu").requires_grad_(False)
    x = torch.randn((16, 24) if layout == "bsf" else (24, 16))
    y, source = compiled(layer, x)
    torch.testing.assert_close(y, layer(x))
    (times,) = timings
    kinds = {name: next(kind for kind in ("by_blocks", "whole_matrix", "fallback") if kind in name) for name in times}
    assert sorted(kinds.values()) == ["by_blocks", "fallback", "whole_matrix"]
    assert (OPERATOR in source) == (kinds[min(times, key=times.__getitem__)] == "fallback")


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_operator", [True, False])
def test_each_outcome_multiplies(is_operator: bool, timings: list[Any]) -> None:
    layer, x, residual = KSLinear("2,8,4,3"), torch.randn(16, 24, requires_grad=True), torch.randn(16, 48)
    with config.patch({"test_configs.force_custom_op_decomposition": not is_operator}):
        y, source = compiled(layer, x, residual)
    assert (OPERATOR in source) == is_operator
    torch.testing.assert_close(y, expected := layer(x, residual))
    wanted = [x, *layer.parameters()]
    found, right = (torch.autograd.grad((each**2).sum(), wanted) for each in (y, expected))
    torch.testing.assert_close(found, right)
    assert len(timings) == 2  # of y, and of the gradient of x


def test_large_matrices_do_not_compete(timings: list[dict[str, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "DENSE_ELEMENTS", 24 * 48 - 1)
    compiled(KSLinear("2,8,4,3").requires_grad_(False), torch.randn(16, 24))
    (times,) = timings
    assert len(times) == 2


def test_it_works_with_fusion(timings: list[Any]) -> None:
    model = torch.nn.Sequential(KSLinear("2,8,4,3"), torch.nn.GELU()).requires_grad_(False)
    x = torch.randn(16, 24)
    y, _ = compiled(model, x, options=AUTOTUNING | FUSING)
    torch.testing.assert_close(y, model(x))
    assert all("activation_gelu" in name for name in timings[0] if "fallback" not in name)


@pytest.mark.parametrize(
    ("pattern", "options"),
    [
        ("2,8,4,3", {"backend": "ksgen"}),
        ("2,8,4,3", {"backend": "strided"}),
        ("2,8,4,3", {"bias": False}),
        ("2,8,4,3@k.i.j", {}),
        ("l.i.j@2,8,4,3", {}),
    ],
)
def test_other_products_stay(pattern: str, options: Any, timings: list[Any]) -> None:
    layer = KSLinear(pattern, **options).requires_grad_(False)
    x, residual = torch.randn(16, 24), torch.randn(16, 48)
    y, source = compiled(layer, x, residual)
    torch.testing.assert_close(y, layer(x, residual))
    assert not timings
    assert OPERATOR not in source
    assert "torch.ops.ksgen.multiply" in source
