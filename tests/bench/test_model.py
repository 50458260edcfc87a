"""ksgen bench model: the rows that it prints and writes, on models of a block, and its mistakes.

How long anything takes is not tested.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

from ksgen.bench import models  # noqa: E402
from ksgen.bench.model import (  # noqa: E402  (after the skip)
    MODULES,
    WARMUP_RUNS,
    ModelJob,
    ModelRow,
    Spread,
    _variants,
    measure,
    modules_of,
    seconds_in_turn,
)
from ksgen.build.background import finish_jobs  # noqa: E402
from ksgen.cli import cli  # noqa: E402
from ksgen.torch.layer.linear import KSLinear  # noqa: E402
from ksgen.torch.operators import replay  # noqa: E402
from ksgen.torch.operators.backends import BACKENDS, NAMES  # noqa: E402
from ksgen.torch.operators.meanwhile import times_unsettled  # noqa: E402
from tests.support.small_models import use_small_models  # noqa: E402


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads of several tests at once only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of one block, of the same layers."""
    use_small_models(monkeypatch)


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", "model", *arguments])


@pytest.mark.usefixtures("_small")
def test_a_row_for_every_precision_module_and_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # marks of unreliable times widen the columns
    file = tmp_path / "rows.json"
    done = bench(
        "vit-s16",
        "--precision",
        "float32,bfloat16",
        "--backend",
        "einsum,bmm",
        "--batch",
        "1",
        "--repeats",
        "2",
        "-o",
        str(file),
    )
    assert done.exit_code == 0, done.exception
    found = json.loads(file.read_text())
    told = bench("vit-s16", "--backend", "einsum", "--batch", "1", "--repeats", "1", "--json")
    assert json.loads(told.stdout).keys() == found.keys()
    assert (found["model"], found["batch"], found["repeats"], found["torch"]) == ("vit-s16", 1, 2, torch.__version__)
    rows = found["rows"]
    wanted = [
        (module, precision, backend)
        for precision in ("float32", "bfloat16")
        for module in MODULES
        for backend in ("einsum", "bmm")
    ]
    assert [(row["module"], row["precision"], row["backend"]) for row in rows] == wanted
    for row in rows:
        assert 0 < row["ratio"]["low"] <= row["ratio"]["median"] <= row["ratio"]["high"]
        assert row["dense_us"]["median"] > 0 < row["sparse_us"]["median"]
        assert row["paper_ratio"] == (MODULES[row["module"]].paper_ratio if row["precision"] == "float32" else None)
    for module in MODULES:
        assert sum(line.partition("  ")[0].strip() == module for line in done.stdout.splitlines()) == 2, done.stdout
    assert "batch 1, float32, forward\n" in done.stdout
    assert "sparse over dense, the median of 2 rounds (quartiles)." in " ".join(done.stdout.split())


@pytest.mark.usefixtures("_small")
def test_both_layouts_of_a_vit_are_columns_of_one_run() -> None:
    done = bench(
        "vit-s16", "--layout", "bsf,bsl", "--backend", "einsum", "--steps", "forward,training", "--batch", "1",
        "--repeats", "1", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.exception
    rows = json.loads(done.stdout)["rows"]
    assert [(row["step"], row["module"], row["backend"]) for row in rows] == [
        (step, module, backend)
        for step in ("forward", "training")
        for module in MODULES
        for backend in ("einsum", "einsum bsl")
    ]


@pytest.mark.usefixtures("_small")
def test_sparse_layers_are_measured_with_prepared_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    made, prepare = [], BACKENDS["bmm"].prepare
    monkeypatch.setitem(
        BACKENDS, "bmm", replace(BACKENDS["bmm"], prepare=lambda weights: made.append(weights) or prepare(weights))
    )

    def run(calls: Mapping[str, Callable[[], object]], repeats: int, device: object) -> dict[str, list[float]]:
        for call in calls.values():
            call()
        warm = len(made)
        for call in calls.values():
            call()
        assert len(made) == warm
        return {name: [1.0] for name in calls}

    monkeypatch.setattr("ksgen.bench.model.seconds_in_turn", run)
    list(measure(ModelJob("vit-s16", ("float32",), ("bmm",), torch.device("cpu"), 1, 0, 1)))
    assert made


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("step", ["forward", "training"])
def test_kernels_are_compiled_and_calls_prepared_before_they_are_timed(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While calls do not wait for kernels, too: none is missing when the first time is taken."""
    monkeypatch.setenv("KSGEN_COMPILE", "background")
    missing: list[bool] = []
    in_python: list[KSLinear] = []
    multiply = KSLinear._multiply

    def timed(calls: Mapping[str, Callable[[], object]], repeats: int, device: object) -> dict[str, list[float]]:
        before = times_unsettled()
        with monkeypatch.context() as patch:
            patch.setattr(KSLinear, "_multiply", lambda self, *x: (in_python.append(self), multiply(self, *x))[1])
            for call in calls.values():
                call()
        missing.append(times_unsettled() > before or finish_jobs())
        return {name: [1.0] for name in calls}

    monkeypatch.setattr("ksgen.bench.model.seconds_in_turn", timed)
    list(measure(ModelJob("vit-s16", ("float32",), ("ksgen",), torch.device("cpu"), 1, 0, 1, steps=(step,))))
    assert missing == [False] * len(MODULES)
    assert step == "training" or not replay.load_now() or not in_python


@pytest.mark.usefixtures("_small")
def test_decoding_is_a_token_per_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frozen layers decode one token per sequence, whatever the token count of a forward pass. It attends to all."""
    batches: list[int] = []
    attended: set[tuple[int, int]] = set()
    attend = models.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        models.functional,
        "scaled_dot_product_attention",
        lambda q, k, v, **options: (attended.add((q.shape[2], k.shape[2])), attend(q, k, v, **options))[1],
    )
    multiply = KSLinear.forward
    monkeypatch.setattr(
        KSLinear, "forward", lambda self, x, *_: (batches.append(x[..., 0].numel()), multiply(self, x))[1]
    )
    job = ModelJob(
        "gpt2-medium",
        ("float32",),
        ("einsum",),
        torch.device("cpu"),
        batch=3,
        tokens=5,
        repeats=1,
        steps=("decode", "forward"),
    )
    seen = {}
    for row in measure(job):
        seen[row.step] = seen.get(row.step, set()) | set(batches)
        batches.clear()
    assert seen == {"decode": {3}, "forward": {15}}
    assert attended == {(1, 5), (5, 5)}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("model", "backends"),
    [("vit-s16", ("auto", "einsum")), pytest.param("gpt2-medium", ("einsum",), marks=pytest.mark.slow)],
)
def test_training_steps_move_every_weight(
    model: str, backends: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step moves dense and sparse weights alike, and freezes none. It also computes what inner layers return."""
    seen: list[tuple[bool, bool, bool]] = []
    before: dict[int, object] = {}
    make = torch.optim.SGD

    def watched(parameters: object, lr: float) -> object:
        own = make(parameters, lr=1.0)
        before[id(own)] = [each.clone() for each in own.param_groups[0]["params"]]
        took = own.step

        def step() -> None:
            took()
            pairs = zip(before[id(own)], own.param_groups[0]["params"], strict=True)
            moved = [bool((old != new).any()) for old, new in pairs]
            seen.append((sum(moved) >= len(moved) - 1, torch.is_grad_enabled(), not moved))

        own.step = step
        return own

    monkeypatch.setattr(torch.optim, "SGD", watched)
    job = ModelJob(
        model, ("float32",), backends, torch.device("cpu"), batch=1, tokens=5, repeats=1, steps=("forward", "training")
    )
    monkeypatch.setattr("ksgen.bench.model.warm_up", lambda call: None)
    rows = list(measure(job))
    assert [(row.step, row.module) for row in rows] == [
        (step, each) for step in job.steps for each in MODULES for _ in job.backends
    ]
    assert set(seen) == {(True, True, False)}
    assert len(seen) == len(MODULES) * (1 + len(backends)) * (1 + WARMUP_RUNS)
    assert {row.paper_ratio for row in rows if row.step == "training"} == {None}
    told = bench(model, "--backend", "einsum", "--batch", "1", "--repeats", "1", "--steps", "training")
    assert "float32, training steps" in told.stdout


@pytest.mark.usefixtures("_small")
def test_gpt2_has_the_same_rows_and_no_paper() -> None:
    job = ModelJob("gpt2-medium", ("float32",), ("einsum",), torch.device("cpu"), batch=1, tokens=5, repeats=1)
    rows = list(measure(job))
    assert [row.module for row in rows] == list(MODULES)
    assert {row.paper_ratio for row in rows} == {None}


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", ["llama-1b", pytest.param("llama-1b-blast", marks=pytest.mark.slow)])
def test_llama_prefills_and_decodes_by_sparse_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no rows of biases; its seven layers take the rows of all sequences, and the gate has the activation."""
    called: set[tuple[int, int, int, str]] = set()
    multiply = KSLinear.forward

    def watched(self: KSLinear, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        called.add((x[..., 0].numel(), self.in_features, self.out_features, self.activation))
        return multiply(self, x, *rest)

    monkeypatch.setattr(KSLinear, "forward", watched)
    job = ModelJob(
        name, ("float32", "bfloat16"), ("einsum",), torch.device("cpu"), 2, 5, 1, steps=("forward", "decode")
    )
    rows = list(measure(job))
    modules = [each for each in MODULES if "bias" not in each]
    assert [(row.precision, row.step, row.module) for row in rows] == [
        (precision, step, module) for precision in job.precisions for step in job.steps for module in modules
    ]
    assert {row.paper_ratio for row in rows} == {None}
    layers = [(2048, 2048), (2048, 512), (2048, 8192), (8192, 2048)]
    assert called == {(count, *each, "none") for count in (2, 10) for each in layers} | {
        (2, 2048, 8192, "silu"),
        (10, 2048, 8192, "silu"),
    }
    down = list(modules_of(replace(job, layers=("down",))))
    assert down == ["linear N x 4N", "feed-forward", "block", "whole"]


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(("word", "sparse"), [("qkv", {"q", "k", "v"}), ("up", {"gate", "up"}), ("down", {"down"})])
def test_layers_of_llama_are_named_by_their_roles(word: str, sparse: set[str]) -> None:
    job = ModelJob("llama-1b", ("float32",), ("einsum",), torch.device("cpu"), 1, 5, 1, layers=(word,))
    _, model = _variants(job, torch.float32, "forward").values()
    found = {name.split(".")[-1] for name, layer in model.named_modules() if isinstance(layer, KSLinear)}
    assert found == sparse


@pytest.mark.usefixtures("_small")
def test_weights_are_in_memory_once_unless_they_are_trained() -> None:
    job = ModelJob("gpt2-medium", ("float32",), ("einsum", "bmm"), torch.device("cpu"), 1, 5, 1)
    for step, is_shared in (("forward", True), ("training", False)):
        dense, *sparse = _variants(job, torch.float32, step).values()
        assert [each.tokens.weight is dense.tokens.weight for each in sparse] == [is_shared] * 2
        first, second = (each.blocks[0].feed_forward.up.weights[0] for each in sparse)
        assert torch.equal(first, second)
        assert first is not second


@pytest.mark.usefixtures("_small")
def test_the_papers_down_projection_alone(tmp_path: Path) -> None:
    """The other layers stay dense, and rows without a sparse layer are left out."""
    file = tmp_path / "down.json"
    done = bench(
        "gpt2-medium", "--layers", "down", "--backend", "einsum", "--batch", "1", "--repeats", "1", "-o", str(file)
    )
    assert done.exit_code == 0, done.exception
    assert "gpt2-medium with sparse down alone on " in done.stdout
    found = json.loads(file.read_text())
    assert found["layers"] == ["down"]
    assert [row["module"] for row in found["rows"]] == [
        "linear N x 4N",
        "linear N x 4N + bias",
        "feed-forward",
        "block",
        "whole",
    ]
    job = ModelJob("vit-s16", ("float32",), ("einsum",), torch.device("cpu"), 1, 0, 1, layers=("down",))
    assert {row.paper_ratio for row in measure(job)} == {None}  # the paper's have all layers sparse
    assert list(modules_of(replace(job, layers=("qkv",)))) == ["attention", "block", "whole"]


@pytest.mark.usefixtures("_small")
def test_dense_and_sparse_get_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both kinds of layers are called on the same shapes, with the same bias and activation."""
    called = []
    forward = KSLinear.forward

    def watched(self: KSLinear, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        called.append(
            (tuple(x.shape), self.out_features, self.bias is not None, self.activation, torch.is_grad_enabled())
        )
        return forward(self, x, *rest)

    monkeypatch.setattr(KSLinear, "forward", watched)
    monkeypatch.setattr("ksgen.bench.model.warm_up", lambda call: None)
    list(measure(ModelJob("vit-s16", ("float32",), ("einsum",), torch.device("cpu"), batch=3, tokens=0, repeats=1)))
    runs = 1 + WARMUP_RUNS
    for in_features, out_features in ((384, 384), (384, 1536), (1536, 384)):
        for has_bias in (False, True):
            assert called.count(((3, 5, in_features), out_features, has_bias, "none", False)) >= runs
    assert called.count(((3, 5, 384), 1536, True, "gelu", False)) == 3 * runs  # feed-forward, block and whole


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("backend", NAMES)
def test_every_backend_has_its_rows(backend: str) -> None:
    rows = list(
        measure(ModelJob("vit-s16", ("float32",), (backend,), torch.device("cpu"), batch=1, tokens=0, repeats=1))
    )
    assert [(row.module, row.backend) for row in rows] == [(module, backend) for module in MODULES]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no NVIDIA GPU")
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", models.MODELS)
def test_rows_of_a_gpu(name: str) -> None:
    job = ModelJob(name, ("float32", "float16"), ("ksgen", "bmm"), torch.device("cuda"), batch=2, tokens=16, repeats=3)
    rows = list(measure(job))
    assert len(rows) == 2 * 2 * len(modules_of(job))
    assert all(row.sparse_us.low > 0 for row in rows)


def test_calls_take_turns() -> None:
    order: list[str] = []
    seconds = seconds_in_turn({name: lambda name=name: order.append(name) for name in "abc"}, 3, torch.device("cpu"))
    assert "".join(order) == "abc" * WARMUP_RUNS + "abc" + "bca" + "cab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 3, "b": 3, "c": 3}


def test_a_gpu_is_timed_by_its_own_stream_although_another_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    second, current, recorded = torch.device("cuda:1"), list[Any](), list[Any]()

    @contextmanager
    def device(where: Any) -> Iterator[None]:
        current.append(where)
        yield
        current.pop()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record, self.synchronize = (lambda: recorded.append(current[-1:])), lambda: None

        def elapsed_time(self, end: "Event") -> float:
            return 2e3

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert seconds_in_turn({"a": lambda: None}, 1, second) == {"a": [2.0]}
    assert recorded == [[second]] * 2


def test_spread_is_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 2.0, 4.0, 3.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0)


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["vit"], "model 'vit'; did you mean vit-s16? accepted: vit-s16, gpt2-medium, llama-1b"),
        (
            ["vit-s16", "--precision", "float32,fp16"],
            "--precision 'fp16'; did you mean float16? accepted: float32, float16",
        ),
        (["vit-s16", "--backend", "bmn"], "--backend 'bmn'; did you mean bmm? accepted: auto, ksgen"),
        (["vit-s16", "--layers", "attention"], "--layers 'attention'; accepted: qkv, projection, up, down"),
        (
            ["vit-s16", "--steps", "train"],
            "--steps 'train'; did you mean training? accepted: forward, training, decode",
        ),
        (
            ["vit-s16", "--steps", "decode"],
            "--steps decode of vit-s16, which processes whole images; accepted: forward, training",
        ),
        (["vit-s16", "--layout", "bls"], "--layout 'bls'; did you mean bsl? accepted: bsf, bsl"),
        (["gpt2-medium", "--layout", "bsl"], "--layout bsl; accepted: bsl only with vit-s16 and without --layers"),
        (["vit-s16", "--layout", "bsf,bsl", "--layers", "down"], "--layout bsl; accepted: bsl only with vit-s16"),
        (["vit-s16", "--device", "tpu9"], "--device 'tpu9'; accepted: cpu, cuda, cuda:1"),
        (["vit-s16", "--device", "meta"], "--device meta: PyTorch sees"),
        (["vit-s16", "--device", "cuda:99"], "--device cuda:99: PyTorch sees"),
        (
            ["vit-s16", "--device", "cpu", "--backend", "sparse", "--precision", "float16"],
            "PyTorch has no product with torch.sparse_csr of float16 on cpu",
        ),
        (["vit-s16", "--batch", "1000000000"], "--batch 1000000000: "),
    ],
)
def test_mistakes(arguments: list[str], message: str) -> None:
    assert str(bench(*arguments).exception).startswith(message)


def test_rows_are_saved_while_others_are_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that is killed leaves what it has measured."""
    output, spread = tmp_path / "model.json", Spread(1.0, 2.0, 3.0)

    def measured(job: ModelJob) -> Iterator[ModelRow]:
        for number, name in enumerate(("whole", "attention")):
            assert not number or [row["module"] for row in json.loads(output.read_text())["rows"]] == ["whole"]
            yield ModelRow(name, "forward", "float32", "ksgen", spread, spread, spread, None)
        raise KeyboardInterrupt

    monkeypatch.setattr("ksgen.bench.model.measure", measured)
    bench("vit-s16", "--device", "cpu", "-o", str(output))
    assert [row["module"] for row in json.loads(output.read_text())["rows"]] == ["whole", "attention"]
