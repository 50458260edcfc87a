"""What PyTorch can do: each way of multiplying is right, moves what it says, and says what it lacks."""

import re
from dataclasses import replace
from importlib import metadata
from itertools import product
from typing import Any

import numpy as np
import pytest

from ksgen import structures
from ksgen.bench.chains import MeasuredLayer, structured
from ksgen.bench.roster import PARTS
from ksgen.pattern import Chain, Pattern
from ksgen.reference import multiply
from ksgen.spec import LAYOUTS, Epilogue
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench.authors import FORMS  # noqa: E402
from ksgen.bench.baselines import BASELINES, PIECES  # noqa: E402
from ksgen.bench.libraries import UnsupportedError, library_version  # noqa: E402
from ksgen.bench.problem import LayerArrays, LayerJob, product_job  # noqa: E402


def arrays_of(job: Any) -> LayerArrays:
    return LayerArrays(job, torch.device("cpu"), seed=0)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore")  # lazylinop's of what it lacks, PyTorch's of its sparse formats
@pytest.mark.parametrize("name", [name for name in BASELINES if name not in (*PARTS, "compiled")])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_baselines_multiply(name: str, layout: str) -> None:
    computed, missing = 0, False
    for shape in ((1, 8, 8, 2), (2, 6, 4, 3), (3, 4, 8, 1), (1, 4, 12, 1)):
        pattern = Pattern(*shape)
        arrays = arrays_of(product_job(pattern, "float32", layout, 152))
        ((weights,),), x = arrays.weights, arrays.sets[0]
        try:
            (y,) = BASELINES[name].prepare(arrays)(x)
        except UnsupportedError as unsupported:
            missing |= "not installed" in str(unsupported)
            continue
        np.testing.assert_allclose(y.numpy(), multiply(pattern, x.numpy(), weights.numpy(), layout), atol=1e-4)
        computed += 1
    if missing:
        pytest.skip(f"{name} is not installed")
    assert computed or (name, layout) in {
        *((each, "bsl") for each in ("three_passes", "densified", "pieces", "onednn", "torch_structured")),
        *product(("authors", "semi_structured", "nvmath", "blr"), LAYOUTS),
        ("lazylinop", "bsf"),
    }


CHAIN = Chain(("2,6,4,1@k1:2.i.k2:3", "2,5,6,1"))
LAYERS = {
    "exchanged": MeasuredLayer("exchanged", (CHAIN,)),
    "finished": MeasuredLayer("finished", (CHAIN,), "relu", None, Epilogue(bias=True, activation="silu")),
    "group": MeasuredLayer("group", (CHAIN, Chain(("1,4,8,1",)))),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", ["bmm", "views", "einsum", "pieces", "compiled", "layer", "dense", "onednn"])
def test_baselines_multiply_by_layers(layer: str, name: str) -> None:
    arrays = arrays_of(LayerJob(LAYERS[layer], "float32", "bsf", 150))
    if layer == "finished" and name in ("dense", "onednn"):
        with pytest.raises(UnsupportedError, match="relu between its factors has no dense matrix"):
            BASELINES[name].prepare(arrays)
        return
    assert arrays.error(BASELINES[name].prepare(arrays)(arrays.sets[0])) < 1e-6


STRUCTURES = [
    structures.btt(12, 8, (2, 3), 2), structures.gralora(12, 8, 2, 4), structures.blast(12, 8, (2, 3), 5),
    structures.monarch(12, 8, 4), structures.kronecker(12, 8, (4, 6)), structures.low_rank(12, 8, 3),
    structures.oft(12, 3), structures.boft(48, 4, 3), structures.gs(12, 12, (4, 3), orthogonal=False),
    structures.block_dense(12, 8, 3, 6), structures.butterfly(16), structures.butterfly(24, 3),
]  # fmt: skip
# as docs/structures.md lists them
ORDER = (
    "blast", "monarch", "butterfly", "btt", "gralora", "oft", "boft", "gs", "kronecker", "dyad", "low_rank",
    "block_dense",
)  # fmt: skip
DYAD = structures.dyad(12, 8, 2)
SUM = MeasuredLayer("dyad", tuple(each.chain for each in DYAD), structure=DYAD, is_sum=True)


def test_every_published_form_is_tested() -> None:
    assert sorted({each.chain.name for each in (*STRUCTURES, DYAD[0])}) == sorted(FORMS)
    every = [each for each in structures.__all__ if each != "Structure"]
    assert [each.name.partition("(")[0] for each in structured()[: len(every)]] == list(ORDER)
    assert sorted(FORMS) == sorted(ORDER) == sorted(every)


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda each: each.chain.name)
def test_the_authors_forms_equal_the_chains(structure: structures.Structure) -> None:
    layer = MeasuredLayer("one", (structure.chain,), epilogue=Epilogue(bias=True), structure=structure)
    for each in (layer, layer.group_of(2)):
        arrays = arrays_of(LayerJob(each, "float32", "bsf", 20))
        assert arrays.error(BASELINES["authors"].prepare(arrays)(arrays.sets[0])) < 1e-6


@pytest.mark.parametrize(
    "name", ["bmm", "views", "einsum", "pieces", "compiled", "layer", "dense", "onednn", "authors"]
)
@pytest.mark.parametrize(
    "epilogue", [Epilogue(), Epilogue(bias=True, activation="gelu", residual=True, residual_first=True)]
)
def test_baselines_multiply_by_sums(name: str, epilogue: Epilogue) -> None:
    arrays = arrays_of(LayerJob(replace(SUM, epilogue=epilogue), "float32", "bsf", 150))
    if name == "pieces" and epilogue.residual:
        return
    multiply = BASELINES[name].prepare(arrays)
    assert arrays.error(multiply(arrays.sets[0])) < 1e-6
    first, _ = arrays.weights
    first[0][0, 0, 0, 0] += 1
    assert arrays_of(arrays.job).error(BASELINES["dense"].prepare(arrays)(arrays.sets[0])) > 1e-3


def test_layers_without_a_published_form_say_so() -> None:
    plain, structure = LAYERS["exchanged"], STRUCTURES[0]
    jobs = {
        "is not a structure with a published form: btt, ": LayerJob(plain, "float32", "bsf", 4),
        "take batch-size-first alone": LayerJob(
            MeasuredLayer("last", (structure.chain,), structure=structure), "float32", "bsl", 4
        ),
        "have no activation between factors": LayerJob(
            MeasuredLayer("relu", (structure.chain,), "relu", structure=structure), "float32", "bsf", 4
        ),
    }
    for says, job in jobs.items():
        with pytest.raises(UnsupportedError, match=says):
            BASELINES["authors"].prepare(arrays_of(job))


def test_pieces_say_what_they_do_not_serve() -> None:
    residual = MeasuredLayer("residual", (CHAIN,), epilogue=Epilogue(residual=True))
    for says, layer, layout in (("pieces add no residual", residual, "bsf"), ("contiguous", LAYERS["group"], "bsl")):
        with pytest.raises(UnsupportedError, match=says):
            BASELINES["pieces"].prepare(arrays_of(LayerJob(layer, "float32", layout, 4)))


def test_onednn_multiplies_by_a_matrix_that_it_has_reordered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It multiplies in each of its types. Its rows name its version, and its refusals have their reasons."""
    job = LayerJob(LAYERS["group"], "float32", "bsf", 40)
    reorder = torch.ops.mkldnn._reorder_linear_weight
    made: list[tuple[Any, int]] = []

    def watched(matrix: Any, batch: int) -> Any:
        made.append((reorder(matrix, batch), batch))
        return made[-1][0]

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", watched)
    # this operator has no bfloat16 on processors without AVX-512
    precisions = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    for precision in precisions:
        arrays = arrays_of(replace(job, precision=precision))
        multiply = BASELINES["onednn"].prepare(arrays)
        assert arrays.error(multiply(arrays.sets[0])) < arrays.job.tolerance(precision)
    wanted = [(torch._mkldnn, getattr(torch, precision), 40) for precision in precisions]
    assert [(each.layout, each.dtype, batch) for each, batch in made] == wanted
    version = library_version(BASELINES["onednn"].library)
    assert re.fullmatch(rf"torch {re.escape(metadata.version('torch'))}, oneDNN [0-9]+\.[0-9]+\.[0-9]+", version)
    with pytest.raises(UnsupportedError, match="takes features last"):
        BASELINES["onednn"].prepare(arrays_of(replace(job, layout="bsl")))

    def refuse(*_: Any) -> None:
        raise RuntimeError("needs the\ncpu support")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    with pytest.raises(UnsupportedError, match=r"oneDNN fails: needs the cpu support"):
        BASELINES["onednn"].prepare(arrays_of(job))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    with pytest.raises(UnsupportedError, match="was built without oneDNN"):
        BASELINES["onednn"].prepare(arrays_of(job))


def test_pieces_have_the_fastest_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0, 3, 0, 1, 0, 2])  # seconds of each number of rows: the second is the fastest
    monkeypatch.setattr("ksgen.measure.trust.perf_counter", lambda: next(ticks))
    rows: list[int] = []
    split = torch.Tensor.split
    monkeypatch.setattr(torch.Tensor, "split", lambda x, own: (rows.append(own), split(x, own))[1])
    pattern = Pattern(1, 8, 8, 2)
    arrays = arrays_of(product_job(pattern, "float32", "bsf", 300))
    product, x = BASELINES["pieces"].prepare(arrays), arrays.sets[0]
    product(x)
    rows.clear()
    product(x)
    assert set(rows) == {PIECES[1]}


def test_a_copy_in_another_format_needs_memory_too() -> None:
    """A process that takes more than there is would be killed."""
    assert BASELINES["scipy"].stored > BASELINES["sparse"].stored > 2
