"""Our contenders: by family, by wisdom, by a search, on PyTorch's memory."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.bench.roster import COMPARISONS, OURS
from ksgen.emit.render import template_digest
from ksgen.errors import KsgenError, ToolchainError
from ksgen.families import Limits, family_named
from ksgen.launch.choice import Choice, limits_of
from ksgen.launch.plan import load, make_plan
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS
from ksgen.wisdom import Entry, save
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeGpu, TextCompiler
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import contenders as module  # noqa: E402
from ksgen.bench.contenders import contenders, in_place, tune  # noqa: E402
from ksgen.bench.problem import LayerArrays, product_job  # noqa: E402
from tests.support.bench_runs import JOB, has_opencl, measure  # noqa: E402

WITH_TILES = Limits(
    2**18, registers=0, is_cpu=True, vector_bytes=64, tiles=("bf16",), multiprocessors=2, async_copies=False
)

needs_opencl = pytest.mark.skipif(not has_opencl, reason="no OpenCL device: pip install -e '.[cpu]'")


def test_our_contenders_by_family_and_wisdom(monkeypatch: pytest.MonkeyPatch) -> None:
    from ksgen.launch.planner import PLANNER

    gpu: Any = FakeGpu()
    job = product_job(Pattern(1, 8, 24, 2), "float32", "bsf", 40)
    names = [(each.arithmetic, each.family, each.variant) for each in contenders(job, gpu, (OURS,))]
    assert names == [("float32", "simt", "default"), ("tf32x3", "wgmma", "default"), ("tf32x3", "mma", "default")]
    sixteen = product_job(JOB.pattern, "float16", "bsf", 40)
    assert [each.family for each in contenders(sixteen, gpu, (OURS,))] == ["wgmma", "wgmma", "mma", "simt"]
    found = next(family_named("simt").space(JOB.kernel("float32"), limits_of(gpu)))
    monkeypatch.setattr(
        PLANNER,
        "choice",
        lambda device, kernel, batch: Choice("simt", found, "wisdom, measured at batch 40", from_wisdom=True),
    )
    tuned = next(each for each in contenders(JOB, gpu, (OURS,)) if each.variant == "tuned")
    assert (tuned.family, tuned.constants, tuned.why) == ("simt", str(found), "wisdom, measured at batch 40")


@needs_opencl
@pytest.mark.parametrize("precision", list(COMPARISONS))
def test_nothing_is_called_tuned_that_no_search_found(precision: str, cpu: Any) -> None:
    for layout in LAYOUTS:
        ours = contenders(product_job(JOB.pattern, precision, layout, 40), cpu, (OURS,))
        assert [(each.family, each.variant, each.why) for each in ours] == [
            ("vector", "default", "the family's default")
        ]


@pytest.mark.exhaustive
@pytest.mark.skipif(not is_installed("none"), reason="the fake GPU is the emulator, which needs g++")
@pytest.mark.parametrize(("precision", "layout"), [("float32", "bsf"), ("float16", "bsl"), ("float16", "bsf")])
def test_our_kernels_on_pytorchs_memory(precision: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our kernels take pointers of tensors and the default stream, as on CUDA. The device is the emulator."""
    gpu: Any = FakeGpu()
    job = product_job(Pattern(1, 16, 8, 2), precision, layout, 24)
    problem = LayerArrays(job, torch.device("cpu"), 0)
    del problem.sets[2:]
    owned = []

    def own(tensor: Any) -> Any:
        owned.append(tensor.view(torch.uint8).numpy())
        gpu.own(owned[-1].reshape(-1))
        return tensor

    for tensor in (*problem.weights[0], *problem.sets):
        own(tensor)
    new_full = torch.Tensor.new_full
    monkeypatch.setattr(torch.Tensor, "new_full", lambda self, *shape: own(new_full(self, *shape)))
    for each in contenders(job, gpu, (OURS,)):
        assert each.sources is not None
        (text,) = each.sources()
        loaded = load(gpu, text, TextCompiler().compile(text.text, text.entry, gpu.target))
        plan = make_plan(gpu, text.kernel, 24, Choice(each.family, text.constants, ""), loaded)
        ready = in_place([plan], problem)
        for number in (1, 0):
            y = ready.run(number)
            gpu.synchronize()
            assert problem.error(ready.y(y)) <= (1e-6 if precision == "float32" else 1e-3)  # the sets are copies
        assert {stream for _, stream in gpu.launches} == {None}


def test_tuning_searches_for_what_wisdom_does_not_know(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def search(pattern: Pattern, **options: Any) -> None:
        asked.append(
            (pattern, options["precision"], options["layout"], options["batch"], options["budget"], options["device"])
        )

    monkeypatch.setattr("ksgen.tuning.tune", search)
    measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3")
    assert asked == [(JOB.pattern, "float32", "bsf", 40, "3", f"opencl:{cpu.index}")]
    measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3", names=("bmm",))
    assert len(asked) == 1


def test_tuning_knows_what_was_measured_at_the_batch_by_this_template(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    kernel, family = JOB.kernel("float32"), family_named("simt")
    constants = family.default(kernel, limits_of(cpu))
    asked: list[int] = []
    monkeypatch.setattr("ksgen.tuning.tune", lambda pattern, **options: asked.append(options["batch"]))
    for batch, template, searches in (
        (7, template_digest("simt"), 1),
        (40, "stale", 2),
        (40, template_digest("simt"), 2),
    ):
        save(cpu.name, [Entry(kernel, batch, "simt", constants, {"median_us": 1.0, "template": template})])
        tune(JOB, cpu, "3")
        assert len(asked) == searches


def test_a_search_ends_with_the_time(cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KSGEN_WISDOM_DIR", str(tmp_path))
    budgets: list[str] = []
    monkeypatch.setattr("ksgen.tuning.tune", lambda pattern, **options: budgets.append(options["budget"]))
    monkeypatch.setattr("ksgen.bench.contenders.monotonic", lambda: 100.0)
    for budget, deadline in (("60s", 200.0), ("60s", 112.0), ("1m", 160.0), ("200", 101.0), ("60s", 99.0)):
        tune(JOB, cpu, budget, deadline)
    assert budgets == ["60s", "12.0s", "1m", "200"]


def test_a_search_that_finds_nothing_costs_only_itself(
    cpu: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(pattern: Pattern, **options: Any) -> None:
        raise error

    monkeypatch.setattr("ksgen.tuning.tune", search)
    error: KsgenError = KsgenError("no candidate could be measured")
    with pytest.warns(UserWarning, match="the search for float32 found nothing \\(no candidate could be measured\\)"):
        complete, _ = measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3")
    assert complete == 1
    error = ToolchainError("no compiler")
    with pytest.raises(ToolchainError, match="no compiler"):
        measure(cpu, tmp_path / "paper.jsonl", [JOB], tune="3")


def test_tiles_that_are_no_default_are_contenders_in_addition_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "limits_of", lambda device: WITH_TILES)
    monkeypatch.setattr(module.PLANNER, "choice", lambda *given: SimpleNamespace(from_wisdom=False))

    def found(precision: str, batch: int = 512) -> list[tuple[str, str]]:
        job = product_job(Pattern(1, 64, 64, 2), precision, "bsf", batch)
        return [
            (each.arithmetic, each.family)
            for each in module.ours(job, SimpleNamespace(kind="native", shares_host=True))
        ]

    assert found("bfloat16") == [("bfloat16", "amx")]
    assert found("bfloat16", 4) == [("bfloat16", "amx"), ("bfloat16", "vector")]
    assert found("float32") == [("float32", "vector"), ("bf16x6", "amx")]
