"""Products in JAX: equal to the reference, with JAX's gradients, under its transformations, on host and GPU."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.errors import KsgenError, LaunchError, PatternError, SpecError
from ksgen.launch.fused import Verdict
from ksgen.measure.verify import tolerance
from ksgen.pattern import Chain, Pattern
from ksgen.spec import ACTIVATIONS
from tests.support.fake_gpu import FakeArray, FakeGpu
from tests.support.libraries import library
from tests.support.native import chosen_native

pytestmark = pytest.mark.libraries
jax = library("jax")

import jax.numpy as jnp  # noqa: E402  (after the skip)
from jax.test_util import check_grads  # noqa: E402

import ksgen.jax  # noqa: E402
from ksgen.jax import product  # noqa: E402

ONE, TWO = ("2,6,4,3",), ("1,6,4,2", "2,3,6,1")
CHAINS = (ONE, TWO, ("2,3,4,2@i.j.k",), ("1,6,4,2", "2,4,6,1@k1:2.i.k2", "4,3,2,1"))
LAYOUTS = ("bsf", "bsl")
ROOT = Path(__file__).parents[2]
RANDOM = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen_native(monkeypatch)


@pytest.mark.parametrize("option", ["between", "activation"])
def test_each_activation_has_a_function_in_jax(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(ksgen.jax.ACTIVATIONS) == ACTIVATIONS
    monkeypatch.delitem(ksgen.jax.ACTIVATIONS, "silu")
    others = ", ".join(name for name in ACTIVATIONS if name != "silu")
    message = f"^ksgen.jax: {option}='silu' has no function here; accepted: {others}$"
    with pytest.raises(LaunchError, match=message):
        product(TWO, **{option: "silu"})


def draw(*shape: int, dtype: str = "float32") -> Any:
    values = RANDOM.standard_normal(shape)
    return jnp.asarray(values + 1j * RANDOM.standard_normal(shape) if dtype.startswith("complex") else values, dtype)


def problem(chain: tuple[str, ...], layout: str = "bsf", batch: int = 5, dtype: str = "float32") -> Any:
    """x, the weights, a bias and a residual."""
    own = Chain.read(chain)
    x, y = ((batch, n) if layout == "bsf" else (n, batch) for n in (own.in_features, own.out_features))
    return (
        draw(*x, dtype=dtype),
        [draw(*each.shape, dtype=dtype) for each in own],
        draw(own.out_features, dtype=dtype),
        draw(*y, dtype=dtype),
    )


def dense_product(chain: tuple[str, ...], layout: str, between: str, activation: str) -> Callable[..., Any]:
    """The same in JAX alone, by dense matrices."""

    def multiply(x: Any, weights: Any, bias: Any = None, residual: Any = None) -> Any:
        x = x if layout == "bsf" else x.T
        for number, (pattern, own) in enumerate(zip(Chain.read(chain), weights, strict=True), 1):
            numbered = np.arange(1, own.size + 1).reshape(own.shape)
            places = reference.multiply(pattern, np.eye(pattern.in_features), numbered, "bsf").T.astype(int)
            matrix = jnp.where(places > 0, own.reshape(-1)[places - 1], 0)
            x = x @ matrix.T
            if number < len(weights):
                x = ksgen.jax.ACTIVATIONS[between](x) if between != "none" else x
        x = x if bias is None else x + bias
        x = ksgen.jax.ACTIVATIONS[activation](x) if activation != "none" else x
        y = x if layout == "bsf" else x.T
        return y if residual is None else y + residual

    return multiply


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64"])
def test_is_the_product(dtype: str, layout: Any, chain: tuple[str, ...]) -> None:
    x, weights, bias, residual = problem(chain, layout, dtype=dtype)
    y = jax.jit(product(chain, layout=layout))(x, weights, bias, residual)
    wide = "complex128" if dtype.startswith("complex") else "float64"
    truth = np.asarray(x).astype(wide)
    for pattern, own in zip(Chain.read(chain), weights, strict=True):
        truth = reference.multiply(pattern, truth, np.asarray(own).astype(wide), layout)
    truth = truth + np.asarray(bias if layout == "bsf" else bias[:, None]).astype(wide) + np.asarray(residual)
    assert (y.dtype, y.shape) == (x.dtype, truth.shape)
    error = np.linalg.norm(np.asarray(y).astype(wide) - truth) / np.linalg.norm(truth)
    assert error < 4 * len(chain) * tolerance(dtype, 8), error


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "between", "activation"), [("bsf", "relu", "gelu"), ("bsl", "silu", "gelu_tanh")])
@pytest.mark.parametrize(
    ("chain", "fuse"),
    [(chain, fuse) for chain in CHAINS for fuse in ("auto", "no", "yes")[: 3 if len(chain) > 1 else 1]],
)
def test_values_and_gradients_are_those_of_jax(
    chain: tuple[str, ...], layout: Any, between: Any, activation: Any, fuse: Any
) -> None:
    between = between if len(chain) > 1 else "none"
    with jax.enable_x64():
        given = problem(chain, layout, dtype="float64")
        seed = draw(*given[3].shape, dtype="float64")
        ours = product(chain, layout=layout, between=between, activation=activation, fuse=fuse)
        theirs = dense_product(chain, layout, between, activation)
        for arguments in (given, given[:2]):
            for each in (ours, jax.jit(ours)):
                np.testing.assert_allclose(each(*arguments), theirs(*arguments), rtol=1e-9, atol=1e-9)

            def loss(multiply: Any, *arguments: Any) -> Any:
                return (multiply(*arguments) * seed).sum()

            which = tuple(range(len(arguments)))
            found = jax.jit(jax.grad(lambda *given: loss(ours, *given), which))(*arguments)
            wanted = jax.grad(lambda *given: loss(theirs, *given), which)(*arguments)
            assert jax.tree.structure(found) == jax.tree.structure(wanted)
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_complex_gradients_are_those_of_jax() -> None:
    with jax.enable_x64():
        x, weights, *_ = problem(TWO, dtype="complex128")
        seed = draw(5, 6, dtype="complex128")
        grads = [
            jax.grad(lambda x, weights, own=each: (own(x, weights) * seed).sum().real, (0, 1))(x, weights)
            for each in (product(TWO), dense_product(TWO, "bsf", "none", "none"))
        ]
        for one, other in zip(*map(jax.tree.leaves, grads), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_of_gradients(layout: Any) -> None:
    with jax.enable_x64():
        x, weights, *_ = problem(ONE, layout, batch=2, dtype="float64")
        multiply = product(ONE, layout=layout)
        check_grads(lambda x, own: jnp.sin(multiply(x, own)).sum(), (x, weights[0]), order=2, modes=["rev"])


def test_more_dimensions_and_loops() -> None:
    """Features last, in batch-size-first; and `vmap`, `scan` and `checkpoint` around a product."""
    multiply = product(TWO)
    x, weights, bias, residual = problem(TWO, batch=12)
    y = multiply(x, weights, bias, residual)
    wide = multiply(x.reshape(3, 4, -1), weights, bias, residual.reshape(3, 4, -1))
    np.testing.assert_array_equal(wide, y.reshape(3, 4, -1))
    plain = multiply(x, weights)
    each = jax.jit(jax.vmap(multiply, (0, None)))(x.reshape(3, 4, -1), weights)
    np.testing.assert_allclose(each, plain.reshape(3, 4, -1), rtol=1e-5, atol=1e-5)
    _, steps = jax.lax.scan(lambda carry, x: (carry, multiply(x, weights)), 0, x.reshape(3, 4, -1))
    np.testing.assert_allclose(steps, plain.reshape(3, 4, -1), rtol=1e-5, atol=1e-5)
    grad = jax.grad(lambda own: jax.checkpoint(multiply)(x, own).sum())(weights)
    assert [each.shape for each in grad] == [each.shape for each in weights]


@pytest.mark.parametrize(("layout", "shape", "wanted"), [("bsf", (0, 8), (0, 6)), ("bsl", (8, 0), (6, 0))])
def test_no_rows(layout: Any, shape: Any, wanted: Any) -> None:
    _, weights, *_ = problem(TWO)
    multiply = jax.jit(product(TWO, layout=layout))
    assert multiply(jnp.zeros(shape), weights).shape == wanted
    if layout == "bsf":
        assert multiply(jnp.zeros((3, *shape)), weights).shape == (3, *wanted)


def test_calls_outside_of_jit_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """JAX compiles, and keeps, a program per function that it is to call."""
    called: list[Any] = []
    own = ksgen.jax.buffer_callback

    def noted(launch: Any, *given: Any, **options: Any) -> Any:
        called.append(launch)
        return own(launch, *given, **options)

    monkeypatch.setattr(ksgen.jax, "buffer_callback", noted)
    x, weights, *_ = problem(TWO)
    for _ in range(3):
        product(TWO)(x, weights)
        jax.grad(lambda own: product(TWO)(x, own).sum())(weights)
    # the product, and for each factor the product, the transposed one and the gradient
    assert len(set(called)) <= 7 < len(called)


def test_arrays_of_numpy_and_lists_are_converted() -> None:
    x, (weights,), *_ = jax.tree.map(np.asarray, problem(ONE))
    wanted = product(ONE)(jnp.asarray(x), jnp.asarray(weights))
    wide = x.astype("float64"), weights.astype("float64")
    for given in (wide, (jnp.asarray(x), wide[1]), (x.tolist(), weights)):
        np.testing.assert_array_equal(product(ONE)(*given), wanted)
    assert jax.grad(lambda own: product(ONE)(wide[0], own).sum())(wide[1]).shape == weights.shape


def test_gradients_take_a_precision_of_their_range(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, Any]] = []
    for name in ("__call__", "gradient"):
        own = getattr(ksgen.jax.Launcher, name)

        def noted(self: Any, *given: Any, name: str = name, own: Any = own, **options: Any) -> Any:
            asked.append((name, options.pop("precision")))
            return own(self, *given, **options)

        monkeypatch.setattr(ksgen.jax.Launcher, name, noted)
    x, weights, *_ = problem(TWO)
    multiply = product(TWO, precision="fp16x3", fuse="no")
    jax.grad(lambda x, weights: multiply(x, weights).sum(), (0, 1))(x, weights)
    assert {each for name, each in asked if name == "gradient"} == {"tf32x3"}
    assert {each for name, each in asked if name == "__call__"} == {"fp16x3", "tf32x3"}


def test_one_launch_and_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA calls a chain once, or each factor, whose intermediates are its own."""
    called: list[str] = []
    for kind in (ksgen.jax.ChainLauncher, ksgen.jax.Launcher):
        own = kind.__call__
        monkeypatch.setattr(
            kind,
            "__call__",
            lambda self, *given, own=own, **options: (called.append(type(self).__name__), own(self, *given, **options))[
                1
            ],
        )
    x, weights, *_ = problem(TWO)
    for fuse, launchers in (("yes", ["ChainLauncher"]), ("no", ["Launcher", "Launcher"])):
        called.clear()
        product(TWO, fuse=fuse)(x, weights).block_until_ready()
        assert called == launchers


def test_one_launch_that_is_asked_for_but_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ksgen.jax.ChainLauncher, "_verdict", lambda *_: Verdict(False, "no family has room"))
    x, weights, *_ = problem(TWO)
    for each in (product(TWO, fuse="yes"), jax.jit(product(TWO, fuse="yes"))):
        with pytest.raises(LaunchError, match=r"fuse='yes'.*: no family has room; accepted: fuse='auto' or 'no'"):
            each(x, weights)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chain", [ONE, TWO])
def test_a_residual_may_come_before_the_activation(chain: tuple[str, ...]) -> None:
    x, weights, bias, residual = problem(chain)
    multiply, linear = product(chain, activation="gelu", residual_first=True), product(chain)

    def own(x: Any, residual: Any) -> Any:
        return multiply(x, weights, bias, residual)

    def truth(x: Any, residual: Any) -> Any:
        return jax.nn.gelu(linear(x, weights, bias, residual), approximate=False)

    def gradients(function: Callable[..., Any]) -> Any:
        return jax.grad(lambda *given: function(*given).sum(), argnums=(0, 1))(x, residual)

    np.testing.assert_allclose(own(x, residual), truth(x, residual), rtol=1e-4, atol=1e-4)
    for found, wanted in zip(gradients(own), gradients(truth), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: product("2,3,4"), PatternError, "four whole numbers|2,3,4"),
        (lambda: product(TWO, layout="nchw"), SpecError, "layout"),
        (lambda: product(TWO, activation="tanh"), SpecError, "activation"),
        (lambda: product(ONE, between="relu"), LaunchError, "between='relu'; accepted: none, with one factor"),
        (lambda: product(TWO, fuse="maybe"), LaunchError, "fuse='maybe'; accepted: auto, yes, no"),
    ],
)
def test_what_product_refuses(make: Callable[[], Any], kind: type[KsgenError], message: str) -> None:
    with pytest.raises(kind, match=message):
        make()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, weights: (x[:, 1:], weights), r"got x of shape \(5, 7\); layout bsf wants \(batch, 8\)"),
        (lambda x, weights: (x, weights[:1]), "weights=.*; accepted: a list of arrays, one per factor"),
        (lambda x, weights: (x, weights[::-1]), r"got weights.* of shape \(2, 3, 6, 1\); \(1, 6, 4, 2\) is needed"),
        (lambda x, weights: (x.astype("int32"), weights), "x is of int32; give "),
        (lambda x, weights: (x.astype("float16"), weights), "got x of float16 and weights of float32"),
        (lambda x, weights: (x, weights, x), r"got bias of shape \(5, 8\); \(6,\) is needed"),
        (lambda x, weights: (x, weights, None, x), r"got residual of shape \(5, 8\); \(5, 6\) is needed"),
        (
            lambda x, weights: (jnp.ones((3, 4, 8)), weights, None, jnp.ones((4, 3, 6))),
            r"got residual of shape \(4, 3, 6\); \(3, 4, 6\) is needed",
        ),
        (lambda x, weights: (x[:0], weights, None, x[:1, :6]), r"got residual of shape \(1, 6\); \(0, 6\) is needed"),
        (lambda x, weights: (x[:, :0], weights), r"got x of shape \(5, 0\); layout bsf wants \(batch, 8\)"),
        (lambda x, weights: (x[:0, 1:], weights), r"got x of shape \(1, 7\); layout bsf wants \(batch, 8\)"),
        (lambda x, weights: (x[:0], weights[:1]), "weights=.*; accepted: a list of arrays, one per factor"),
        (lambda x, weights: (x[:0].astype("int32"), weights), "x is of int32; give "),
    ],
)
def test_what_does_not_fit_is_refused_while_traced(change: Callable[..., Any], message: str) -> None:
    x, weights, *_ = problem(TWO)
    for each in (product(TWO), jax.jit(product(TWO))):
        with pytest.raises(LaunchError, match=message):
            each(*change(x, weights))


# ---- a GPU


class OnGpu(FakeArray):
    """A buffer as XLA hands it out on a GPU."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, 0


@pytest.mark.parametrize("job", ["product", "gradient"])
def test_buffers_of_a_gpu_are_used_in_place_on_their_stream(
    job: str, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = []

    def kept(launch: Any, shape: Any, **options: Any) -> Callable[..., Any]:
        found.append((launch, shape))
        return lambda *given: given[0]

    monkeypatch.setattr(ksgen.jax, "buffer_callback", kept)
    pattern, (x, (weights,), *_) = Pattern.read(ONE[0]), problem(ONE)
    grad_y = draw(5, pattern.out_features)
    if job == "product":
        ksgen.jax._factor(pattern, "bsf", None, x, weights)
        given, truth = (x, weights), reference.multiply(pattern, np.asarray(x), np.asarray(weights), "bsf")
    else:
        ksgen.jax._gradient(pattern, "bsf", None, x, grad_y)
        given, truth = (x, grad_y), reference.gradient(pattern, np.asarray(x), np.asarray(grad_y), "bsf")
    launch, shape = found[0]
    out = OnGpu(gpu, np.zeros(shape.shape, np.float32))
    launch(SimpleNamespace(stream=7), out, *(OnGpu(gpu, np.asarray(each)) for each in given))
    assert {stream for _, stream in gpu.launches} == {7}
    gpu.synchronize(7)
    np.testing.assert_allclose(out.content, truth, rtol=1e-4, atol=1e-4)


# ---- packaging


def test_the_example_of_the_page_runs() -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")
    (block,) = [each for each in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "ksgen.jax" in each]
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["y"].shape == (1568, 4096)
    assert [each.shape for each in names["gradients"]] == [(16, 64, 64, 1), (1, 256, 64, 16)]


def test_without_jax_it_says_what_to_install() -> None:
    program = "import sys; sys.modules['jax'] = None; import ksgen; print(hasattr(ksgen, 'jax')); import ksgen.jax"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout == "False\n"
    assert "ModuleNotFoundError: ksgen.jax needs JAX 0.6 or later: " in done.stderr
