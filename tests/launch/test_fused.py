"""Tests of when a layer's factors are fused. `tests/families/test_vector_chain.py` tests the fused launch."""

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ksgen.build import toolchain
from ksgen.build.toolchain import Nvcc, UnfitError
from ksgen.devices.base import DeviceLimits
from ksgen.emit.templates import template_digest
from ksgen.errors import ToolchainError
from ksgen.families import Limits as FamilyLimits
from ksgen.families import cuda_limits, family_for, family_named
from ksgen.families.chains import factor_kernels
from ksgen.families.expected import default_us
from ksgen.launch import fused
from ksgen.launch.checks import CheckedArguments
from ksgen.launch.planner import Planner
from ksgen.pattern import Chain, Pattern, monarch
from ksgen.spec import Epilogue, KernelSpec
from ksgen.wisdom import Entry, Wisdom

PAIR, ALONE = Chain((Pattern(2, 9, 5, 3), Pattern(1, 4, 18, 3))), Chain((Pattern(2, 9, 5, 3),))
LARGE = Chain((Pattern(1, 512, 256, 1), Pattern(1, 256, 512, 1)))  # 1 MB of float32
CORES = 4
CPU = DeviceLimits(2**18, 1024, CORES, is_cpu=True, vector_bytes=32)


class Imagined(SimpleNamespace):
    """A device, hashed by its identity as devices are."""

    __hash__ = object.__hash__


@pytest.mark.parametrize(
    ("chain", "layout", "batch", "is_one"),
    [
        (PAIR, "bsf", 1, True),  # all its weights are in a core's cache
        (PAIR, "bsl", fused.LEAST_COLUMNS * CORES - 1, False),
        (PAIR, "bsl", fused.LEAST_COLUMNS * CORES, False),
        (PAIR, "bsl", 10_000, False),
        (LARGE, "bsf", fused.LEAST_ROWS * CORES - 1, False),
        (LARGE, "bsf", fused.LEAST_ROWS * CORES, True),
    ],
)
def test_a_processor_takes_one_launch_of_small_weights_or_large_batches(
    chain: Chain, layout: str, batch: int, is_one: bool
) -> None:
    device: Any = Imagined(shares_host=True, kind="native", target="", name="unnamed", limits=CPU)
    found = fused.verdict(device, KernelSpec((chain.factors,), "float32", layout, Epilogue()), batch)
    assert found.is_one == is_one
    least = {
        "bsf": "32 rows of the batch each factor's outputs are divided among cores, as all weights together "
        "have more than 512 KB",
        "bsl": "64 rows of the batch each factor's outputs are divided among cores",
    }
    if layout == "bsl" and batch >= 64:
        assert found.why == "in batch-size-last each separate factor reads its rows and weights contiguously"
    else:
        assert is_one or found.why == f"below {least[layout]}"


@pytest.mark.parametrize(
    ("features", "precision", "layouts", "tiles", "is_one"),
    [
        (768, "float32", ("bsf", None), (), True),  # 1.5 MB of weights
        (769, "float32", ("bsf", None), (), False),
        (769, "float32", ("bsf", "bsl"), (), True),
        (769, "bfloat16", ("bsf", None), (), True),
        (1537, "bfloat16", ("bsf", None), (), False),
        (1537, "bfloat16", ("bsf", None), ("bf16",), True),
        (769, "float32", ("bsf", None), ("bf16",), False),
    ],
)
def test_a_processor_takes_a_launch_per_factor_if_a_core_cannot_hold_their_weights(
    features: int, precision: Any, layouts: Any, tiles: Any, is_one: bool
) -> None:
    chain, (layout, other) = Chain((Pattern(1, 256, features, 1), Pattern(1, features, 256, 1))), layouts
    limits = replace(CPU, tiles=tiles)
    device: Any = Imagined(shares_host=True, kind="native", target="", name="unnamed", limits=limits)
    kernel = KernelSpec((chain.factors,), precision, layout, Epilogue(), out_layout=other)
    for batch in (fused.LEAST_ROWS * CORES, 10_000):
        found = fused.verdict(device, kernel, batch)
        assert found.is_one == is_one
        assert is_one or found.why == ("weights have 1.5 MB, of which a launch per factor keeps a part in the cache")


def test_only_the_weights_of_each_chain_count_for_one_launch_of_a_group() -> None:
    small = Chain((Pattern(1, 64, 768, 1), Pattern(1, 768, 64, 1)))
    large = Chain((Pattern(1, 256, 768, 1), Pattern(1, 1024, 256, 1)))
    device: Any = Imagined(shares_host=True, kind="native", target="", name="unnamed", limits=CPU)
    assert fused.verdict(device, KernelSpec((small,) * 5), 10_000).is_one
    assert not fused.verdict(device, KernelSpec((small, large)), 10_000).is_one


@pytest.mark.parametrize(
    ("layout", "other", "is_one"), [("bsf", "bsl", True), ("bsl", "bsf", True), ("bsl", None, False)]
)
def test_one_launch_that_transposes_y_saves_a_copy_in_batch_size_last_too(
    layout: str, other: str | None, is_one: bool
) -> None:
    kernel = KernelSpec((PAIR.factors,), "float32", layout, Epilogue(), out_layout=other)
    device: Any = Imagined(shares_host=True, kind="native", target="", name="unnamed", limits=CPU)
    assert fused.verdict(device, kernel, 10_000).is_one == is_one
    assert fused.verdict(device, kernel, 10_000, "yes").is_one


@pytest.mark.parametrize("compiler", ["fit", "unfit", "none"])
def test_a_gpu_without_a_compiler_launches_factors_whose_fused_kernel_no_bundle_holds(
    compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a compiler refuses is an error."""

    def fail(*_: Any) -> Any:
        raise ToolchainError("no CUDA compiler found")

    gpu: Any = Imagined(
        shares_host=False,
        kind="cuda",
        name="unnamed",
        target="sm_90a",
        compiler=lambda: None,
        is_capturing=lambda stream: False,
    )
    monkeypatch.delenv("KSGEN_NO_COMPILE", raising=False)
    monkeypatch.setattr(fused, "PLANNER", Planner())
    monkeypatch.setattr(fused.PLANNER, "plan", fail)
    monkeypatch.setattr(fused, "verdict", lambda *_: fused.Verdict(True, "it is faster"))
    nvcc = Nvcc("nvcc", is_found=True)
    unfit = {(nvcc, "sm_90a"): UnfitError(nvcc, "sm_90a", "too old")} if compiler == "unfit" else {}
    monkeypatch.setattr(toolchain, "_unfit", unfit)
    monkeypatch.setattr(toolchain, "compilers", lambda: [nvcc])
    monkeypatch.setattr(fused, "find_compiler", fail if compiler == "none" else lambda: nvcc)
    if compiler == "fit":
        with pytest.raises(ToolchainError, match="no CUDA compiler found"):
            fused.fused_plan(gpu, KernelSpec((PAIR,)), 64)
    else:
        assert fused.fused_plan(gpu, KernelSpec((PAIR,)), 64) is None


def test_one_factor_is_no_layer_but_a_group_of_two_is(monkeypatch: pytest.MonkeyPatch) -> None:
    device: Any = Imagined(shares_host=True, name="unnamed", limits=CPU)
    alone, fused_one = Imagined(), Imagined()
    monkeypatch.setattr(fused.PLANNER, "plan", lambda *given: alone)
    monkeypatch.setattr(fused, "fused_plan", lambda *given: fused_one)
    for chains, expected in (((ALONE,), alone), ((ALONE, ALONE), fused_one)):
        fit = CheckedArguments(64, "host", "float32", KernelSpec(chains))
        assert fused.plan_for(fit, device, None, True) is expected
        ((known,),) = [fit.plans.values()]
        assert known
        assert known() is expected


@pytest.mark.parametrize(("times", "is_one"), [((5.0, 3.0, 2.5), True), ((6.0, 3.0, 2.5), False)])
def test_what_searches_measured_decides(
    monkeypatch: pytest.MonkeyPatch, times: tuple[float, ...], is_one: bool
) -> None:
    """Times of the chain and of each factor near this batch decide. The rule decides if one of them is missing."""
    device: Any = Imagined(shares_host=True, limits=SimpleNamespace(multiprocessors=CORES), kind="native", target="")
    kernel = KernelSpec((PAIR.factors,), "float32", "bsf", Epilogue(True, "relu"))
    chains = (PAIR.factors, *((each,) for each in PAIR))
    found: dict[Any, Any] = {
        chain: SimpleNamespace(batch=5000, median_us=us, measured={"transpose_us": 2.0})
        for chain, us in zip(chains, times, strict=True)
    }

    def measured(_device: Any, own: KernelSpec, _batch: int) -> Any:
        return None if own.epilogue.words else found.get(own.factors.factors)

    monkeypatch.setattr(fused.PLANNER, "measured", measured)
    verdict = fused.verdict(device, kernel, 6272)
    assert verdict.is_one == is_one
    assert (
        verdict.why
        == f"searches measured {times[0]:.3g} us for one launch at batch 5000, and 5.5 us for one launch per factor"
    )
    transposed = fused.verdict(device, replace(kernel, out_layout="bsl"), 6272)
    assert transposed.is_one
    assert transposed.why.endswith(
        "and 7.5 us for one launch per factor, with the copy that transposes an intermediate"
    )
    group = KernelSpec((PAIR.factors, PAIR.factors), "float32", "bsf", Epilogue())
    apart_us = 2 * min(times[0], 5.5)  # the faster way for each layer
    assert fused.verdict(device, group, 6272).why.endswith(
        f"at batch 5000, and {apart_us:.3g} us for the layers one by one"
    )
    monkeypatch.setattr(fused, "limits_of", lambda _device: None)
    found[PAIR.factors].batch = 6000  # at another batch than its factors
    assert fused.verdict(device, kernel, 6273).why == "intermediates stay in the cache"


@pytest.mark.parametrize("noisy", [(), (0,), (1,), (2,), (0, 1, 2)])
def test_unreliable_times_decide_nothing(monkeypatch: pytest.MonkeyPatch, noisy: tuple[int, ...]) -> None:
    """The rule decides, against these times, if a time of the launch or of a factor is unreliable."""
    device: Any = Imagined(shares_host=True, limits=CPU, kind="native", target="", name="unnamed")
    kernel = KernelSpec((PAIR.factors,), "float32", "bsf", Epilogue())
    limits, entries = fused.limits_of(device), []
    for at, (own, us) in enumerate(zip((kernel, *factor_kernels(kernel)), (6.0, 3.0, 2.5), strict=True)):
        family = family_for(own, limits, 5000)
        measured = {"median_us": us, "template": template_digest(family.name)} | (
            {"note": "clocks moved"} if at in noisy else {}
        )
        entries.append(Entry(own, 5000, family.name, family.default(own, limits, 5000), measured))
    monkeypatch.setattr(fused.PLANNER, "_wisdom_of", lambda _device: Wisdom(entries))
    found = fused.verdict(device, kernel, 5000)
    assert found.is_one == bool(noisy)
    says = "searches measured 6 us for one launch at batch 5000, and 5.5 us for one launch per factor"
    assert found.why == ("intermediates stay in the cache" if noisy else says)


WITH_TILES = FamilyLimits(
    2**18, registers=0, is_cpu=True, vector_bytes=64, multiprocessors=2, async_copies=False, tiles=("bf16",)
)


@pytest.fixture
def of_tiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A processor with matrix tiles."""
    monkeypatch.setattr(fused, "limits_of", lambda _device: WITH_TILES)
    return Imagined(
        shares_host=True, limits=SimpleNamespace(multiprocessors=CORES), kind="native", target="", name="unnamed"
    )


@pytest.mark.parametrize("precision", ["bfloat16", "bf16x6"])
def test_tiles_follow_the_rule_of_processors(precision: str, of_tiles: Any) -> None:
    kernel = KernelSpec((PAIR.factors,), precision, "bsf", Epilogue())
    assert fused.verdict(of_tiles, kernel, 6272) == fused.Verdict(True, "intermediates stay in the cache")
    along = replace(kernel, layout="bsl")
    assert fused.verdict(of_tiles, along, 6272) == fused.Verdict(False, fused.CONTIGUOUS_READS)
    assert fused.verdict(of_tiles, along, 6272, "yes") == fused.Verdict(True, "fuse='yes'")
    assert fused.verdict(of_tiles, kernel, 6272, "no") == fused.Verdict(False, "fuse='no'")


def test_what_tiles_have_no_launch_for_is_one_launch_per_factor(of_tiles: Any) -> None:
    """An explicit request changes nothing for a precision that asks for tiles."""
    kernel = KernelSpec((PAIR.factors,), "bf16x6", "bsf", Epilogue())
    group = KernelSpec((PAIR.factors, PAIR.factors), "bf16x6", "bsf", Epilogue())
    says = (
        "amx supports each factor, but not all in one launch; it is for: matrix tiles, of one layer of dense arrays "
        "in one layout: processors"
    )
    for other in (group, replace(kernel, stride="any"), replace(kernel, out_layout="bsl")):
        for fuse in ("auto", "yes"):
            found = fused.verdict(of_tiles, other, 6272, fuse)
            assert (found.is_one, found.why) == (False, f"{says} that have them")
    by_vectors = replace(group, precision="bfloat16")
    assert fused.verdict(of_tiles, by_vectors, 6272, "yes") == fused.Verdict(True, "fuse='yes'")
    large = KernelSpec((LARGE.factors, LARGE.factors), "bfloat16", "bsf", Epilogue())
    assert not fused.verdict(of_tiles, large, 6272).is_one  # tiles for each factor are expected to be faster
    assert fused.verdict(of_tiles, by_vectors, 4).is_one


# ---- on a GPU


LAYER = Chain((Pattern(2, 48, 64, 1), Pattern(1, 64, 48, 2)))
GPU: Any = Imagined(
    shares_host=False,
    name="a card of unnamed",
    kind="cuda",
    target="sm_80",
    limits=DeviceLimits(shared_bytes_per_block=163 * 1024, threads_per_block=1024, multiprocessors=108),
)


@pytest.mark.parametrize(
    ("chain", "precision", "target", "says"),
    [
        (
            LAYER,
            "float16",
            "sm_80",
            r"expects [\d.]+ us for one launch at batch 25088, and [\d.]+ us for one launch per factor",
        ),
        (LAYER, "float16", "sm_75", "no family has room for all factors in one launch, in this precision"),
        (Chain((Pattern(1, 8192, 8192, 1),) * 2), "float16", "sm_80", "no family has room"),
    ],
)
def test_the_cost_model_says_whether_a_layer_is_one_launch(
    chain: Chain, precision: str, target: str, says: str
) -> None:
    device: Any = Imagined(**vars(GPU) | {"target": target})
    kernel = KernelSpec((chain.factors,), precision, "bsf", Epilogue())
    found = fused.verdict(device, kernel, 25088)
    assert re.search(says, found.why)
    assert found.is_one == ("expects" in says)


def test_what_is_expected_to_be_slower_is_one_launch_per_factor() -> None:
    """Few tiles of the batch leave most multiprocessors without work, and each reads all weights."""
    kernel = KernelSpec(((Pattern(2, 512, 512, 1), Pattern(1, 512, 512, 2)),), "float16", "bsf", Epilogue())
    found = fused.verdict(GPU, kernel, 64)
    one_us, each_us = map(float, re.findall(r"([\d.]+) us", found.why))
    assert one_us > each_us
    assert not found.is_one


def test_other_devices_have_no_chains() -> None:
    limits = DeviceLimits(shared_bytes_per_block=2**15, threads_per_block=256, multiprocessors=CORES)
    device: Any = Imagined(shares_host=False, name="unnamed", kind="opencl", target="", limits=limits)
    found = fused.verdict(device, KernelSpec((PAIR.factors,), "float32", "bsf", Epilogue()), 4096)
    assert found == fused.Verdict(False, "no family runs several factors in one launch on such a device")


@pytest.mark.parametrize(
    ("features", "layers", "one_launch", "slower"),
    [
        (768, 1, True, ""),
        (768, 1, False, "; so they are not expected to be faster"),
        (768, 3, True, ""),
        (256, 3, True, "; so they are not expected to be faster"),
    ],
)
def test_a_layer_is_compared_with_the_dense_product_of_its_size(
    features: int, layers: int, one_launch: bool, slower: str
) -> None:
    kernel = KernelSpec((monarch(features, features, 16, 16),) * layers, "bfloat16", "bsf", Epilogue(bias=True))
    limits = cuda_limits("sm_90a")
    outputs = layers * features
    product = KernelSpec(Pattern(1, outputs, features, 1), "bfloat16", "bsf", Epilogue(bias=True))
    dense_us = default_us(family_named("wgmma"), product, limits, 25088)
    own_us = (
        default_us(family_named("mma"), kernel, limits, 25088) if one_launch else fused.apart_us(kernel, limits, 25088)
    )
    assert fused.versus_dense(kernel, limits, 20000, one_launch) == (
        f"dense product of {features} to {outputs} features at batch 25088: the cost model expects {dense_us:.3g} us, "
        f"{dense_us / own_us:.2f} times the {own_us:.3g} us of these factors{slower}"
    )
    assert (dense_us <= own_us) == bool(slower)


@pytest.mark.parametrize("limits", [WITH_TILES, cuda_limits("sm_99")])
def test_nothing_is_compared_where_the_speed_is_unknown(limits: FamilyLimits) -> None:
    assert fused.versus_dense(KernelSpec(PAIR, "float32"), limits, 25088, True) == ""
