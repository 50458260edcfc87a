"""Training steps of layers: all gradients are right, wrong ones are found, and contenders without gradients say so."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ksgen import structures
from ksgen.bench.chains import MeasuredLayer
from ksgen.bench.roster import FORWARD, LAYER, METHODS, OTHER_METHODS, OUR_METHODS, TRAINING
from ksgen.bench.rows import OK, Log, ResultRow, read_rows
from ksgen.devices import find_device
from ksgen.errors import DeviceError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402  (PyTorch may be missing)

from ksgen.bench import baselines, problem  # noqa: E402
from ksgen.bench.baselines import UnsupportedError  # noqa: E402
from ksgen.bench.contenders import contenders  # noqa: E402
from ksgen.bench.problem import Gradients, LayerArrays, LayerJob  # noqa: E402
from ksgen.bench.runner import ACCEPTED, Runner  # noqa: E402
from ksgen.bench.timing import Protocol, Times  # noqa: E402
from ksgen.torch.operators import products  # noqa: E402
from tests.support.torch_cases import operands_of_products  # noqa: E402

PAIR = Chain((Pattern(2, 4, 8, 1), Pattern(1, 12, 4, 2)))  # 16 -> 24
WIDE = Chain((Pattern(2, 16, 8, 1), Pattern(1, 8, 32, 1)))
BIAS = Epilogue(bias=True)
BTT, KRONECKER, BLAST = (
    structures.btt(12, 8, (2, 3), 2),  # exchanges the outputs of its first factor
    structures.kronecker(12, 8, (4, 6)),  # ties weights
    structures.blast(12, 8, (2, 3), 5),
)
DYAD = structures.dyad(12, 8, 2)


def of_structure(structure: structures.Structure) -> MeasuredLayer:
    return MeasuredLayer(structure.chain.name, (structure.chain,), epilogue=BIAS, structure=structure)


LAYERS = {
    "plain": (MeasuredLayer("plain", (PAIR,), epilogue=BIAS), "bsf"),
    "last": (MeasuredLayer("last", (PAIR,), epilogue=BIAS), "bsl"),
    "transposed": (MeasuredLayer("transposed", (PAIR,), "silu", "bsl", Epilogue(True, "gelu", True)), "bsf"),
    "residual first": (MeasuredLayer("first", (PAIR,), epilogue=Epilogue(True, "gelu", True, True)), "bsf"),
    "group": (MeasuredLayer("group", (PAIR, WIDE), epilogue=BIAS), "bsf"),
    "btt": (of_structure(BTT), "bsf"),
    "kronecker": (of_structure(KRONECKER), "bsf"),
    "two blast": (of_structure(BLAST).group_of(2), "bsf"),
    "sum": (
        MeasuredLayer(
            "dyad",
            tuple(each.chain for each in DYAD),
            epilogue=Epilogue(True, "gelu", True, True),
            structure=DYAD,
            is_sum=True,
        ),
        "bsf",
    ),
    "tied": (MeasuredLayer("tied", (PAIR,), epilogue=BIAS, tied=("a", "d")), "bsf"),
    "tied twice": (
        MeasuredLayer("twice", (Chain(("2,4,4,2", "1,12,16,1")),), epilogue=BIAS, fuse="no", tied=("ad", "")),
        "bsf",
    ),
}
WITHOUT_AUTHORS = ("plain", "last", "transposed", "residual first", "group", "tied", "tied twice")
UNFIT = {("transposed", "dense"), ("residual first", LAYER), *((name, "authors") for name in WITHOUT_AUTHORS)}


def job_of(name: str, precision: str = "float32", batch: int = 70) -> LayerJob:
    layer, layout = LAYERS[name]
    return LayerJob(layer, precision, layout, batch, TRAINING)


def arrays_of(job: LayerJob) -> LayerArrays:
    arrays = LayerArrays(job, torch.device("cpu"), seed=0)
    del arrays.sets[2:]
    return arrays


def result_of(name: str, arrays: LayerArrays, runs: Sequence[int] = (0,)) -> tuple[Any, Gradients]:
    """Outputs and gradients of the last of these steps."""
    step, gradients = baselines.training_step(name, arrays)
    *_, result = map(step, runs)
    return result.ys, gradients(result)


def test_every_contender_for_layers_trains_except_launch_variants_and_libraries() -> None:
    assert {*baselines.TRAINED} == {LAYER, *OTHER_METHODS} - {"pieces", "grouped", "onednn"}
    with pytest.raises(UnsupportedError, match="pieces has no training step"):
        baselines.training_step("pieces", arrays_of(job_of("plain")))


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", [name for name in baselines.TRAINED if name != "compiled"])
def test_gradients_are_right(name: str, layer: str) -> None:
    arrays = arrays_of(job_of(layer))
    if (layer, name) in UNFIT:
        with pytest.raises(UnsupportedError):
            result_of(name, arrays)
        return
    ys, gradients = result_of(name, arrays, (0, 1, 0))  # a step can be repeated
    assert arrays.compares_all
    assert arrays.error(ys, gradients) < 1e-6
    assert (len(gradients.weights) > 0) == (name != "dense")  # which has no gradient of factors
    assert torch.cat([*gradients.biases]).shape == (sum(arrays.features),)


def test_compiled_gradients_are_right() -> None:
    arrays = arrays_of(job_of("plain"))
    assert arrays.error(*result_of("compiled", arrays, (0, 1))) < 1e-6


@pytest.mark.parametrize("name", ["bmm", LAYER])
def test_16_bits_are_within_the_tolerance(name: str) -> None:
    job = job_of("group", "bfloat16")
    arrays = arrays_of(job)
    error = arrays.error(*result_of(name, arrays))
    assert 1e-4 < error < ACCEPTED * job.tolerance("bfloat16")
    assert job.tolerance("bfloat16") > replace(job, step=FORWARD).tolerance("bfloat16")


@pytest.mark.parametrize("step", [FORWARD, TRAINING])
def test_pytorch_computes_in_float32_where_it_has_no_products(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    job = replace(job_of("btt", "bfloat16"), step=step)
    arrays = arrays_of(job)
    for without, expected in (((), torch.bfloat16), ((torch.bfloat16,), torch.float32)):
        monkeypatch.setattr(products, "_WITHOUT_PRODUCTS", without)
        found = contenders(job, find_device("native"), ("bmm", "einsum", "views", "pieces", "dense", "authors"))
        for each in found:
            if step == TRAINING and each.implementation == "pieces":
                continue
            ready = each.prepare(arrays)
            with operands_of_products() as operands:
                result = ready.run(0)
            if each.implementation not in ("views", "pieces"):  # whose products an operator hides
                assert operands == {expected}, each.implementation
            assert each.why.endswith(", in float32") == bool(without)
            ys = ready.y(result)
            assert {y.dtype for y in ys} == {torch.bfloat16}
            assert arrays.error(ys, ready.gradients(result)) < ACCEPTED * job.tolerance("bfloat16")


@pytest.mark.parametrize("part", ["x", "weights", "biases"])
def test_a_wrong_gradient_is_found(part: str) -> None:
    arrays = arrays_of(job_of("kronecker"))
    ys, right = result_of("bmm", arrays)
    given = getattr(right, part)
    wrong = 1.001 * given if part == "x" else [1.001 * each for each in given]
    assert arrays.error(ys, replace(right, **{part: wrong})) == pytest.approx(1e-3, rel=0.01)
    cut = given[:, 1:] if part == "x" else [each[1:] for each in given]
    assert arrays.error(ys, replace(right, **{part: cut})) != arrays.error(ys, replace(right, **{part: cut}))  # NaN
    lost = given / 0 if part == "x" else [each / 0 for each in given]
    assert arrays.error(ys, replace(right, **{part: lost})) != arrays.error(ys, replace(right, **{part: lost}))


def test_of_a_large_product_the_gradient_of_some_rows_of_x_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(problem, "MOST_REFERENCE_FLOPS", 1.0)
    arrays = arrays_of(job_of("plain", batch=100))
    ys, gradients = result_of("bmm", arrays)
    assert (arrays.checked, arrays.compares_all, gradients.weights) == (42, False, ())
    assert arrays.error(ys, gradients) < 1e-6
    gradients.x[99] *= 2
    assert arrays.error(ys, gradients) > 0.01


def test_parameters_have_the_format_in_which_a_contender_multiplies() -> None:
    arrays = arrays_of(job_of("kronecker"))  # 1,4,6,2 then 4,2,2,1, of which d of one and a of the other are tied
    shapes = {
        name: [tuple(each.shape) for each in train(arrays).parameters] for name, train in baselines.TRAINED.items()
    }
    (a, b, c, d), (e, f, g, h) = KRONECKER.chain[0].shape, KRONECKER.chain[1].shape
    assert shapes["bmm"] == [(a * d, b, c), (e * h, f, g)]
    assert shapes["einsum"] == shapes["compiled"] == [(a, b, c, d), (e, f, g, h)]
    assert shapes["dense"] == [(8, 12)]
    assert shapes["authors"] == [KRONECKER.shapes[name] for name in KRONECKER.shapes]
    assert sorted(len(torch.empty(shape).flatten()) for shape in shapes[LAYER]) == sorted(
        len(torch.empty(shape).flatten()) for shape in shapes["authors"]
    )


class Copies(TorchDispatchMode):
    """Sizes of the tensors that are copied meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: set[int] = set()

    def __torch_dispatch__(self, operator: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        if operator in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default):
            self.sizes.add(given[0].numel())
        return operator(*given, **(named or {}))


@pytest.mark.parametrize("name", ["bmm", "views"])
def test_no_step_in_batch_size_last_converts_weights(name: str) -> None:
    step, _ = baselines.training_step(name, arrays_of(job_of("last")))
    with Copies() as copies:
        step(0)
    assert not copies.sizes & {pattern.weight_count for pattern in PAIR}


def test_contenders_that_cannot_train_are_never_too_slow() -> None:
    names = (*OUR_METHODS[:2], "pieces", "bmm")
    found = contenders(job_of("plain"), find_device("native"), names)
    counts = {each.implementation: each.multiplications for each in found}
    assert counts == {**dict.fromkeys(names, 0), "bmm": 3 * PAIR.weight_count}


def measure(path: Path, jobs: list[LayerJob], names: tuple[str, ...]) -> list[ResultRow]:
    try:
        device = find_device("native")
    except DeviceError as absent:
        pytest.skip(str(absent))
    with Log(path) as log:
        facts = {"device": device.name, "date": "2026-01-02"}
        protocol = Protocol(names, measurements=2, runs=1, most_seconds=5.0)
        Runner(log, device, protocol, Times(), facts, float("inf"), lambda done, total, now: None).run(jobs)
    return read_rows(path)


def test_steps_are_rows_of_one_log_which_goes_on(tmp_path: Path) -> None:
    path, names = tmp_path / "layers.jsonl", tuple(name for name in METHODS if name != "compiled")
    forward = replace(job_of("plain"), step=FORWARD)
    before = measure(path, [forward], names)
    text = path.read_text()
    rows = measure(path, [forward, job_of("plain")], names)
    assert path.read_text().startswith(text)
    assert [each for each in rows if each.step == FORWARD] == before
    trained = {each.implementation: each for each in rows if each.step == TRAINING}
    assert {name for name, each in trained.items() if each.status == OK} == {LAYER, "bmm", "views", "einsum", "dense"}
    assert {each.status for each in trained.values()} == {OK, "unsupported"}
    assert {each.reason for name, each in trained.items() if name in OUR_METHODS} == {
        "launches record no gradients; `layer` trains with the same kernels"
    }
    for each in trained.values():
        assert each.status != OK or (each.measurements, each.checked, each.is_accurate) == (2, 70, True)
        assert each.floor_us is None
    key = '"key":"plain: 2,4,8,1 then 1,12,4,2, bias float32 bsf 70'
    assert f'{key} layer float32"' in path.read_text()  # as in older logs
    assert f'{key} training layer float32"' in path.read_text()


def test_a_row_with_a_wrong_gradient_is_not_accurate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = baselines._gradients
    monkeypatch.setattr(baselines, "_gradients", lambda *given: replace(found := right(*given), x=2 * found.x))
    (row,) = measure(tmp_path / "layers.jsonl", [job_of("plain")], ("bmm",))
    assert (row.status, row.error, row.is_accurate) == (OK, pytest.approx(1.0), False)
