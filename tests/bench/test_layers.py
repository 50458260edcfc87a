"""Layers as jobs of the benchmark: everyone's results are right, a log goes on, and it holds several batches."""

from pathlib import Path
from typing import Any

import pytest

from ksgen import structures
from ksgen.bench.chains import MeasuredLayer
from ksgen.bench.roster import EACH_FACTOR, EACH_LAYER, LIBRARY_METHODS, METHODS, ONE_LAUNCH
from ksgen.bench.rows import OK, Log, ResultRow, read_rows
from ksgen.devices import find_device
from ksgen.errors import DeviceError
from ksgen.launch.plan import Plan
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue
from tests.support.libraries import library
from tests.support.native import saying_it_has_tiles

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import baselines  # noqa: E402  (PyTorch may be missing)
from ksgen.bench.contenders import contenders  # noqa: E402
from ksgen.bench.problem import LayerArrays, LayerJob  # noqa: E402
from ksgen.bench.runner import Runner  # noqa: E402
from ksgen.bench.timing import Protocol, Times  # noqa: E402
from tests.support.fake_gpu import FakeGpu  # noqa: E402

PAIR = Chain((Pattern(2, 4, 8, 1), Pattern(1, 12, 4, 2)))  # 16 -> 24
WIDE = Chain((Pattern(2, 16, 8, 1), Pattern(1, 8, 32, 1)))
BTT = structures.btt(12, 8, (2, 3), 2)  # exchanges the outputs of its first factor
WHOLE = Epilogue(bias=True, activation="gelu", residual=True)
JOBS = [
    LayerJob(MeasuredLayer("plain", (PAIR,)), "float32", "bsf", 5),
    LayerJob(MeasuredLayer("transposed", (PAIR,), "relu", "bsl", WHOLE), "float32", "bsf", 70),
    LayerJob(MeasuredLayer("group", (PAIR, WIDE), "silu", None, WHOLE), "bfloat16", "bsl", 70),
    LayerJob(MeasuredLayer("two", (PAIR, Chain((Pattern(1, 8, 16, 1),)))), "float32", "bsf", 70),
    LayerJob(MeasuredLayer("lone", (Chain((Pattern(1, 8, 16, 1),)),)), "float32", "bsf", 5),
    LayerJob(MeasuredLayer("btt", (BTT.chain,), structure=BTT), "float32", "bsf", 5),
]  # fmt: skip


@pytest.fixture(scope="module")
def native() -> Any:
    try:
        return find_device("native")
    except DeviceError as absent:
        pytest.skip(str(absent))


def measure(
    device: Any, path: Path, jobs: list[LayerJob], names: tuple[str, ...] = METHODS
) -> tuple[int, list[ResultRow]]:
    protocol = Protocol(names, measurements=2, runs=1, most_seconds=5.0)
    with Log(path) as log:
        facts = {"device": device.name, "date": "2026-01-02"}
        complete = Runner(log, device, protocol, Times(), facts, float("inf"), lambda done, total, now: None).run(jobs)
    return complete, read_rows(path)


@pytest.mark.usefixtures("without_tiles")  # they serve no group in one launch
def test_everyone_is_right_and_a_log_goes_on(native: Any, tmp_path: Path) -> None:
    path = tmp_path / "layers.jsonl"
    complete, rows = measure(native, path, JOBS)
    assert complete == len(JOBS)
    assert all(row.is_accurate and row.measurements == 2 for row in rows if row.status == OK)
    found = {(row.layer, row.implementation): row.status for row in rows if row.arithmetic != "bf16x6"}
    missing = {("transposed", "dense"), ("group", "dense"), ("group", "layer"), ("transposed", "pieces")}
    missing |= {("group", "pieces"), ("group", "onednn"), ("transposed", "onednn")}  # more chains, and another layout
    missing |= {(job.layer.name, "authors") for job in JOBS if job.layer.structure is None}
    missing |= {(name, "grouped") for name in ("btt", "group", "transposed")}  # rows of no multiple of 16 bytes
    assert {each for each, status in found.items() if status != OK and each[1] not in LIBRARY_METHODS} == missing
    methods = {job.layer.name: {way for layer, way in found if layer == job.layer.name} for job in JOBS}
    assert methods["plain"] == methods["transposed"] == methods["btt"] == set(METHODS) - {EACH_LAYER}
    assert methods["group"] == methods["two"] == set(METHODS)
    assert methods["lone"] == set(METHODS) - {EACH_LAYER, EACH_FACTOR}
    (transposed,) = {row.pattern for row in rows if row.layer == "transposed"}
    assert transposed == "2,4,8,1 then 1,12,4,2, relu between, bias, gelu, residual, to bsl"
    before = path.read_bytes()
    measure(native, path, JOBS)
    after = path.read_bytes()
    assert after.startswith(before)
    assert b'"measurement"' not in after[len(before) :]


def test_conversions_are_in_the_rows(native: Any, tmp_path: Path) -> None:
    _, rows = measure(native, tmp_path / "layers.jsonl", JOBS[:1], (ONE_LAUNCH, EACH_FACTOR, "layer", "bmm", "einsum"))
    assert {row.implementation: row.conversion_us is not None for row in rows if row.status == OK} == {
        ONE_LAUNCH: True, EACH_FACTOR: True, "layer": False, "bmm": True, "einsum": True,
    }  # fmt: skip
    assert all(row.conversion_us > 0 for row in rows if row.conversion_us is not None)


@pytest.mark.parametrize("name", [ONE_LAUNCH, EACH_FACTOR])
def test_our_conversion_packs_and_neither_plans_nor_compiles(
    name: str, native: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (own, *_) = contenders(JOBS[0], native, (name,))
    ready = own.prepare(LayerArrays(JOBS[0], torch.device("cpu"), seed=0))
    packed: list[Plan] = []
    pack = Plan.pack
    monkeypatch.setattr(Plan, "pack", lambda self, *rest: (packed.append(self), pack(self, *rest))[1])
    monkeypatch.setattr(PLANNER, "plan_of", lambda *_: pytest.fail("planned"))
    assert ready.convert is not None
    ready.convert()
    assert [plan.kernel.pattern for plan in packed] == list(PAIR)


@pytest.mark.parametrize("fuse", ["auto", "yes", "no"])
def test_ksgens_layer_is_fused_as_a_spec_says(fuse: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    of_weights = baselines.KSLinear.from_weights
    monkeypatch.setattr(
        baselines.KSLinear,
        "from_weights",
        lambda *given, **options: made.append(of_weights(*given, **options)) or made[-1],
    )
    job = LayerJob(MeasuredLayer("own", (PAIR,), fuse=fuse), "float32", "bsf", 5)
    (own,) = contenders(job, find_device("native"), ("layer",))
    own.prepare(LayerArrays(job, torch.device("cpu"), seed=0))
    assert [each.fuse for each in made] == [fuse]


def test_options_that_only_ksgens_layer_follows_are_part_of_a_jobs_key() -> None:
    options: list[dict[str, Any]] = [{}, {"fuse": "no"}, {"tied": ("a", "d")}, {"tied": ("", "d")}]
    jobs = [LayerJob(MeasuredLayer("own", (PAIR,), **each), "float32", "bsf", 5) for each in options]
    words = [job.facts["pattern"].removeprefix(str(PAIR)) for job in jobs]
    assert words == ["", ", fuse no", ", tied a d", ", tied none d"]
    assert len({job.key for job in jobs}) == len(jobs)


def test_wrong_results_are_distinguished_from_right_ones() -> None:
    arrays = LayerArrays(JOBS[3], torch.device("cpu"), seed=0)
    methods = {each.implementation: each for each in contenders(JOBS[3], find_device("native"), ("dense",))}
    ys = methods["dense"].prepare(arrays).run(0)
    assert arrays.error(ys) < 1e-6
    assert arrays.error([ys[1], ys[0]]) != arrays.error([ys[1], ys[0]])  # NaN: shapes differ
    ys[1][3, 2] += 1
    assert arrays.error(ys) > 1e-3


def test_on_a_gpu_everything_is_chosen_and_rendered_beforehand() -> None:
    job = LayerJob(
        MeasuredLayer("up", (Chain((Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))),)), "bfloat16", "bsf", 25088
    )
    one, each = contenders(job, FakeGpu(), (ONE_LAUNCH, EACH_FACTOR))
    assert (one.family, each.family.split(", ")[-1][:2]) == ("mma", "wg")
    assert one.sources
    assert each.sources
    entries = [source.entry for source in one.sources()]
    assert entries[0].startswith("ks_6x64x64x1_1x768x192x2_bfloat16_bsf")
    assert len(entries) == 3  # and what packs each factor's weights
    assert [source.entry.split("_")[1] for source in each.sources()] == ["6x64x64x1", "1x768x192x2"]


def test_a_group_of_small_batches_on_a_gpu_is_one_launch_or_one_per_layer() -> None:
    layer = MeasuredLayer("qkv", (Chain((Pattern(16, 64, 64, 1), Pattern(1, 192, 64, 16))),)).group_of(3)
    found = contenders(LayerJob(layer, "bfloat16", "bsf", 3), FakeGpu(), (ONE_LAUNCH, EACH_LAYER, EACH_FACTOR))
    methods = {each.implementation: each for each in found}
    assert {name: each.family for name, each in methods.items()} == {
        ONE_LAUNCH: "gemv",
        EACH_LAYER: "gemv",
        EACH_FACTOR: "gemv",
    }
    sources = methods[ONE_LAUNCH].sources()
    assert [source.family for source in sources] == ["gemv"] * 7  # each factor packed as for it alone


def test_a_lack_of_space_is_reported() -> None:
    job = LayerJob(
        MeasuredLayer("wide", (Chain((Pattern(1, 4096, 4096, 1), Pattern(1, 4096, 4096, 1))),)), "float32", "bsf", 1000
    )
    (one, *_) = contenders(job, FakeGpu(), (ONE_LAUNCH,))
    assert one.family == ""
    assert "room" in one.why


@pytest.mark.parametrize(("batch", "taken"), [(1568, ["amx"]), (4, ["vector", "amx"])])
def test_tiles_are_contenders_where_launchers_take_vectors_too(
    batch: int, taken: list[str], native: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = MeasuredLayer("up", (Chain((Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2))),))
    with saying_it_has_tiles(native, tmp_path / "wisdom", monkeypatch):
        found = list(contenders(LayerJob(layer, "bfloat16", "bsf", batch), native, (ONE_LAUNCH, EACH_FACTOR)))
        families = [(name, family) for name in (ONE_LAUNCH, EACH_FACTOR) for family in taken]
        assert [(each.implementation, each.family) for each in found] == families
        assert len({each.key for each in found}) == len(families)
        by_tiles = next(each for each in found if each.family == "amx")
        assert [source.family for source in by_tiles.sources()] == ["amx", "amx", "amx"]  # and what packs for it
