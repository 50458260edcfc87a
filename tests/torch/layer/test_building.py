"""`build`: everything that a call needs is compiled before it, in parallel."""

import os
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.errors import SpecError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from tests.support.gated import run_gated  # noqa: E402
from tests.torch.operators.test_meanwhile import passes  # noqa: E402

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes of POSIX")


def test_a_layer_compiles_nothing_after_its_build(tmp_path: Path) -> None:
    """Values, then gradients, then frozen, then weights in eight bits, which PyTorch does not multiply by."""
    passes(
        tmp_path,
        """
        from torch import nn
        from ksgen.torch import build
        open_gate()
        layer = KSLinear(["1,6,4,2", "2,3,6,1"])
        assert layer.eval().build(batch=[5, 40]) is layer
        before = started()
        assert before > 1
        os.environ["KSGEN_COMPILE"] = "wait"  # whatever is missing is compiled at once
        with torch.no_grad():
            for batch in (5, 40):
                layer(torch.randn(batch, 8))
        assert started() == before
        layer.train().build(5)
        between = started()
        assert between > before
        layer(torch.randn(5, 8, requires_grad=True)).sum().backward()
        assert started() == between and layer.weights[0].grad is not None
        layer.eval().freeze().build(5)
        between = started()
        with torch.no_grad():
            for _ in range(3):
                layer(torch.randn(5, 8))
        assert started() == between
        model = nn.Sequential(layer.quantize("int8"), nn.ReLU()).eval()
        x = torch.randn(5, 8)
        build(model, x)
        assert started() > between
        between = started()
        with torch.no_grad():
            assert torch.allclose(model(x), torch.relu(layer(x)), atol=0.05)
        assert started() == between
        """,
    )


def test_a_build_in_training_mode_times_calls_without_gradients_too(tmp_path: Path) -> None:
    passes(
        tmp_path,
        """
        from ksgen.torch.operators.meanwhile import times_unsettled
        open_gate()
        layer = KSLinear(["1,6,4,2", "2,3,6,1"]).build(40)
        before = started(), times_unsettled()
        with torch.no_grad():
            for _ in range(3):
                layer(torch.randn(40, 8))
        assert (started(), times_unsettled()) == before
        """,
    )


def test_a_build_compiles_what_nothing_replaces(tmp_path: Path) -> None:
    """Gradients of kernels that were asked for, a fused group, an operator, complex numbers."""
    passes(
        tmp_path,
        """
        from torch import nn
        from ksgen.torch import build, multiply

        class Operator(nn.Module):
            def __init__(self):
                super().__init__()
                self.weights = nn.Parameter(torch.randn(1, 2, 4, 2))

            def forward(self, x):
                return multiply(x, self.weights, backend="ksgen")

        open_gate()
        models = [
            KSLinear("1,6,4,2", backend="ksgen"),
            KSLinear.group([KSLinear(["1,6,4,2", "2,3,6,1"], fuse="yes") for _ in range(2)]).eval(),
            Operator(),
            KSLinear("1,3,4,2", dtype=torch.complex64),
        ]
        for model in models:
            x = torch.randn(64, 8, dtype=next(model.parameters()).dtype)
            build(model, x)
            before = started()
            os.environ["KSGEN_COMPILE"] = "wait"  # whatever is missing is compiled at once
            with torch.set_grad_enabled(model.training):
                y = model(x)
            if model.training:
                y.backward(torch.ones_like(y))
            assert started() == before > 0
        """,
    )


def test_the_first_training_step_of_a_build_prepares_its_backward_pass(tmp_path: Path) -> None:
    """y has a gradient while its kernels are missing, and one round requests all kernels of a step."""
    passes(
        tmp_path,
        """
        from ksgen.torch.layer.building import build_runs
        chain = ["1,6,4,2", "2,3,6,1"]
        layers = [
            KSLinear(chain, backend="ksgen"),
            KSLinear(chain, precision="tf32x3"),
            KSLinear(chain, fuse="yes"),
            KSLinear(chain, backend="ksgen", intermediates="recompute"),
            KSLinear(chain).quantize("int8"),
            KSLinear(chain[0], dtype=torch.complex64, backend="ksgen"),
        ]
        steps, asked = [], []
        for layer in layers:
            dtype = torch.complex64 if "complex" in str(layer.bias.dtype) else torch.float32
            x = torch.randn(64, layer.in_features, dtype=dtype, requires_grad=True)
            def step(layer=layer, x=x):
                y = layer(x)
                trained = [each for each in (x, *layer.parameters()) if each.requires_grad]
                found = torch.autograd.grad(y, trained, torch.ones_like(y))
                assert [each.shape for each in found] == [each.shape for each in trained]
            steps.append(step)

        def first_round():
            steps[0]()
            asked.append([job.what for job in background.unfinished()])
            open_gate()

        build_runs([first_round])
        wanted = "1x6x4x2", "2x3x6x1", "1x4x6x2", "2x6x3x1", "gradient"
        assert all(any(each in name for name in asked[0]) for each in wanted), asked
        build_runs(steps)
        before = started()
        os.environ["KSGEN_COMPILE"] = "wait"  # whatever is missing is compiled at once
        for step in steps:
            step()
        assert started() == before > 0
        """,
    )


def test_kernels_are_compiled_side_by_side(tmp_path: Path) -> None:
    """Every core has a compiler before the first one ends."""
    passes(
        tmp_path,
        """
        from ksgen.build.build import usable_cores
        layer = KSLinear(["1,6,4,2", "2,3,6,1"])
        thread = threading.Thread(target=lambda: layer.build(5))
        thread.start()
        until(lambda: started() == min(usable_cores(), 4))
        open_gate()
        thread.join()
        """,
    )


def test_a_build_shows_its_progress_on_a_terminal(tmp_path: Path) -> None:
    """Elsewhere it writes nothing, which `passes` checks in the other tests."""
    passes(
        tmp_path,
        """
        import io
        from ksgen.torch import build

        class Terminal(io.StringIO):
            def isatty(self):
                return True

        def opens_at_the_begin():
            until(lambda: " 0%" in screen.getvalue())
            open_gate()

        screen = sys.stderr = Terminal()
        threading.Thread(target=opens_at_the_begin, daemon=True).start()
        build(KSLinear("2,3,4,1").eval(), torch.zeros(4, 8))
        sys.stderr = sys.__stderr__
        assert "compiling" in screen.getvalue() and "100%" in screen.getvalue(), screen.getvalue()
        """,
        TERM="xterm",
        NO_COLOR="1",
    )


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    """PyTorch's products replace kernels, with a warning; where they cannot, it is an error."""
    ended = run_gated(
        tmp_path,
        """
        from ksgen.errors import ToolchainError
        open_gate()
        layer = KSLinear("2,3,4,1", bias=False)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            layer.build(4)
        assert any("PyTorch multiplies, because no kernel is available" in str(each.message) for each in told)
        try:
            layer.quantize("int8").build(4)
        except ToolchainError as error:
            print(str(error).splitlines()[0])
        """,
        action="echo 'error: no such machine'; exit 1",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "refused it" in ended.stdout


def test_a_batch_is_a_whole_number() -> None:
    with pytest.raises(SpecError, match="batch=0; accepted: "):
        KSLinear("2,3,4,1").build(0)
