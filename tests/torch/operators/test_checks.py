"""What does not fit is refused with its numbers."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from torch._subclasses import FakeTensorMode  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

from ksgen.errors import LaunchError, SpecError  # noqa: E402
from ksgen.torch import multiply  # noqa: E402
from ksgen.torch.operators.checks import is_eager  # noqa: E402

BATCH = 7


def mistakes() -> list[tuple[str, dict[str, Any], type[Exception], str]]:
    x, y = torch.randn(BATCH, 30), torch.randn(BATCH, 54)
    return [
        (
            "features",
            {"x": x[:, :29]},
            LaunchError,
            r"multiply by 2,9,5,3: got x of shape \(7, 29\); layout bsf wants \(batch, 30\)",
        ),
        ("axes", {"x": x[0]}, LaunchError, r"got x of shape \(30,\)"),
        ("layout of x", {"layout": "bsl"}, LaunchError, r"got x of shape \(7, 30\); layout bsl wants \(30, batch\)"),
        ("weights", {"weights": x}, LaunchError, r"got weights of shape \(7, 30\); \(a, b, c, d\) is needed"),
        ("bias", {"bias": y[0, :5]}, LaunchError, r"got bias of shape \(5,\); \(54,\) is needed"),
        ("residual", {"residual": y[:3]}, LaunchError, r"got residual of shape \(3, 54\); \(7, 54\) is needed"),
        (
            "dtypes",
            {"x": x.double()},
            LaunchError,
            "got x of float64 and weights of float32; give both in one precision",
        ),
        (
            "dtype",
            {"x": x.int(), "weights": torch.ones(2, 9, 5, 3, dtype=torch.int32)},
            LaunchError,
            "tensors of int32; accepted: float32",
        ),
        (
            "devices",
            {"bias": torch.empty(54, device="meta")},
            LaunchError,
            "x lies on cpu and bias on meta; give both in one place",
        ),
        (
            "precision",
            {"precision": "float16"},
            LaunchError,
            "precision='float16' for x of float32; accepted: float32",
        ),
        (
            "strided",
            {"precision": "tf32x3", "backend": "strided"},
            SpecError,
            "precision='tf32x3' with backend='strided'; only",
        ),
        ("layout", {"layout": "bsk"}, SpecError, "layout='bsk'; did you mean bsl"),
        ("activation", {"activation": "gelu_tan"}, SpecError, "activation='gelu_tan'; did you mean gelu_tanh"),
        ("backend", {"backend": "stride"}, SpecError, "backend='stride'; did you mean strided"),
    ]


@pytest.mark.parametrize(
    ("changes", "kind", "message"), [case[1:] for case in mistakes()], ids=[case[0] for case in mistakes()]
)
def test_what_does_not_fit_is_refused(changes: dict[str, Any], kind: type[Exception], message: str) -> None:
    given = {"x": torch.randn(BATCH, 30), "weights": torch.randn(2, 9, 5, 3), **changes}
    with pytest.raises(kind, match=message):
        multiply(given.pop("x"), given.pop("weights"), **given)


def test_operators_run_at_once_unless_something_has_to_see_them() -> None:
    found: list[bool] = []

    def asked(x: torch.Tensor) -> torch.Tensor:
        found.append(is_eager())
        return x + 1

    x = torch.ones(2)
    asked(x)
    with torch.no_grad():
        asked(x)
    assert found == [True, True]
    torch.func.vmap(asked)(x)
    torch.jit.trace(asked, (x,), check_trace=False)
    with FakeTensorMode(allow_non_fake_inputs=True):
        asked(x)
    make_fx(asked, pre_dispatch=True)(x)
    assert found[2:] == [False] * 4
    assert not torch.compile(lambda x: x + is_eager(), backend="eager")(x).eq(2).any()
