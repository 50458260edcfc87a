"""Whole models as jobs: each contender computes the same model, its errors are found, and its rows are reported."""

from math import inf, isnan
from pathlib import Path
from typing import Any

import pytest

from ksgen.bench import tables
from ksgen.bench.roster import LAYER, METHODS_OF_MODELS, TRAINING, WHOLE
from ksgen.bench.rows import OK, kinds_of, read_rows, write_csv
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import whole_models  # noqa: E402
from ksgen.bench.whole_models import DENSE, ModelArrays, WholeJob, whole_job  # noqa: E402
from ksgen.devices import find_device  # noqa: E402
from ksgen.devices.native import working_compiler  # noqa: E402
from ksgen.errors import KsgenError  # noqa: E402
from ksgen.torch.layer import KSLinear  # noqa: E402
from tests.support.bench_runs import lines_of, measure  # noqa: E402
from tests.support.small_models import use_small_models  # noqa: E402

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_models(monkeypatch, depth=2)


@pytest.fixture
def native() -> Any:
    try:
        working_compiler()
    except KsgenError:
        pytest.skip("no C++ compiler")
    return find_device("native")


def error_of(arrays: ModelArrays, name: str) -> float:
    with torch.set_grad_enabled(arrays.job.step == TRAINING):
        return arrays.error(arrays.contender(name)(0))


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["vit-s16", "gpt2-medium", "llama-1b"])
@pytest.mark.parametrize("step", ["forward", TRAINING])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_contenders_compute_the_same_model(model: str, step: str, precision: str) -> None:
    job = whole_job(model, precision, 2, 5, step)
    arrays = job.problem(CPU, 0)
    for name in ("einsum", DENSE):
        assert 0 < error_of(arrays, name) < job.tolerance(precision)


@pytest.mark.parametrize("step", ["forward", TRAINING])
def test_a_wrong_layer_is_found(step: str) -> None:
    arrays = whole_job("vit-s16", "float32", 2, 0, step).problem(CPU, 0)
    layer = arrays.dense.get_submodule("blocks.1.feed_forward.down")
    with torch.no_grad():
        layer.weight.mul_(1.01)
    assert error_of(arrays, DENSE) > 2 * arrays.job.tolerance("float32")
    assert error_of(arrays, "einsum") < arrays.job.tolerance("float32")
    with torch.set_grad_enabled(step == TRAINING):
        y, *gradients = arrays.contender("einsum")(0)
    y = y.detach()
    assert isnan(arrays.error([y[:, :-1], *gradients]))
    assert not gradients or isnan(arrays.error([y, gradients[0][1:]]))
    y[1, 0] = inf  # of a sequence that is not compared
    assert isnan(arrays.error([y, *gradients]))


def test_arrays_are_equal_for_equal_jobs_and_leave_the_random_numbers_alone() -> None:
    job = whole_job("gpt2-medium", "float32", 2, 5)
    state = torch.random.get_rng_state()
    first, second = job.problem(CPU, 0), job.problem(CPU, 0)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.sets[0], second.sets[0])
    pairs = zip(first.sparse.parameters(), second.sparse.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert not torch.equal(first.sets[0], job.problem(CPU, 1).sets[0])


def test_jobs_name_their_tokens_and_sizes() -> None:
    vit, gpt2 = (whole_job(model, "bfloat16", 3, 64) for model in ("vit-s16", "gpt2-medium"))
    assert (vit.key, vit.tokens) == (f"vit-s16: {WHOLE} bfloat16 bsf 3", 5)
    assert (gpt2.key, gpt2.tokens) == (f"gpt2-medium, 64 tokens: {WHOLE} bfloat16 bsf 3", 64)
    assert not vit.has_floor
    size = whole_models.size_of("vit-s16")
    assert (len(size.chains), size.multiplications) == (2 * 6, 2 * 12 * 384**2)
    assert vit.bytes == 2 * size.parameters == whole_job("vit-s16", "bfloat16", 1, 0, TRAINING).bytes / 2
    assert vit.multiplications(DENSE) == 5 * size.multiplications
    assert whole_job("vit-s16", "float32", 1, 0, TRAINING).multiplications(DENSE) == 15 * size.multiplications
    assert vit.multiplications(LAYER) == 0


def test_contenders_have_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = whole_job("vit-s16", "float32", 1, 0).problem(CPU, 0)
    used: list[tuple[str, bool]] = []
    forward = KSLinear.forward
    monkeypatch.setattr(
        KSLinear, "forward", lambda self, *x: (used.append((self.backend, self.is_frozen)), forward(self, *x))[1]
    )
    for name, backends in (("bmm", {("bmm", True)}), (LAYER, {("auto", True)}), (DENSE, set())):
        run = arrays.contender(name)
        used.clear()
        run(0)
        assert set(used) <= backends
        assert bool(used) or name != "bmm"


def test_a_log_of_models_goes_on_and_is_reported(native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.jsonl"
    jobs: list[WholeJob] = [whole_job("vit-s16", "float32", 1, 0, step) for step in ("forward", TRAINING)]
    names = (*METHODS_OF_MODELS, "authors")
    complete, rows = measure(native, path, jobs[:1], names=names, most_seconds=60)
    assert complete == 1
    complete, rows = measure(native, path, jobs, names=names, most_seconds=60)
    assert (complete, [row.implementation for row in rows]) == (2, 2 * [*METHODS_OF_MODELS])
    assert all(row.status == OK and row.is_accurate and row.floor_us is None for row in rows)
    assert len(lines_of(path, "measurement")) == 2 * 2 * len(METHODS_OF_MODELS)
    write_csv(rows, tmp_path / "table.csv")
    assert kinds_of(read_rows(tmp_path / "table.csv")).models == rows
    monkeypatch.setattr("ksgen.bench.rows.why_unreliable", lambda *_: "")
    lines = tables.wholes(read_rows(path)).rows
    assert [line[:4] for line in lines] == [
        ("vit-s16", "forward", "float32", "1"),
        ("vit-s16", "training steps", "float32", "1"),
    ]
    assert all(cell.startswith("x") for line in lines for cell in line[5:])
