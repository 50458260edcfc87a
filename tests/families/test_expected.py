"""Defaults by the cost model: what share of the floor it expects of them on each target, and that what it likes is
right.
"""

from dataclasses import replace
from functools import cache
from itertools import product
from math import inf
from statistics import median
from typing import Any

import pytest

from benchmarks.model import Expected, expected
from ksgen.commands.build import _sources
from ksgen.families import FAMILIES, check, cuda_limits, family_for, family_named
from ksgen.families import expected as model
from ksgen.families.gpus import GPUS
from ksgen.families.wgmma.registers import RegistersBlock
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec, parse, stratified
from ksgen.wisdom import Wisdom
from tests.support.kernels import check as check_result
from tests.support.kernels import in_emulator, job_of, source_of

FEW = 16  # patterns, of the 60 that `python -m benchmarks.model defaults` looks at
HOPPER = cuda_limits("sm_90a")


@cache
def found(target: str, precision: str, layout: str, all_families: bool = False) -> list[Expected]:
    kernels = [KernelSpec(pattern, precision, layout) for pattern in stratified(FEW)]
    return [expected(kernel, cuda_limits(target), model.LARGE, all_families) for kernel in kernels]


# ---- shares of the floor


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("precision", "layout", "least"),
    [("float16", "bsf", 0.85), ("tf32x3", "bsf", 0.75), ("float16", "bsl", 0.95), ("tf32x3", "bsl", 0.85)],
)
def test_the_defaults_of_hoppers_families_come_near_the_floor(precision: str, layout: str, least: float) -> None:
    assert median(each.share for each in found("sm_90a", precision, layout, all_families=True)) >= least


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_89"])
@pytest.mark.parametrize("precision", ["float32", "float16", "tf32x3"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_defaults_come_near_the_floor(target: str, precision: str, layout: str) -> None:
    assert median(each.share for each in found(target, precision, layout)) >= 0.84


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "precision", "layout"),
    [
        *product(("sm_75", "sm_80", "sm_89"), ("float32",), ("bsf", "bsl")),
        *product(("sm_80", "sm_89"), ("float16", "tf32", "tf32x3", "fp16x3"), ("bsl",)),
        # docs/kernels/mma.md: what the cache allows others in bsf
        *product(("sm_89",), ("tf32", "tf32x3", "fp16x3"), ("bsf",)),
        ("sm_80", "tf32x3", "bsf"),
    ],
)
def test_no_pattern_is_far_from_the_floor(target: str, precision: str, layout: str) -> None:
    assert min(each.share for each in found(target, precision, layout)) >= 0.75


def test_whole_weights_and_sectors_bring_split_operands_near_the_floor() -> None:
    assert median(each.share for each in found("sm_80", "tf32x3", "bsf")) >= 0.88


@pytest.mark.parametrize(
    ("pattern", "precision", "least"),
    [
        ((6, 768, 192, 4), "float16", 0.94),
        ((2, 384, 96, 64), "float16", 0.94),
        ((1, 512, 128, 32), "float16", 0.75),
        ((1, 512, 128, 12), "tf32x3", 0.82),
    ],
)
def test_resident_x_brings_few_inputs_and_many_outputs_near_the_floor(
    pattern: tuple[int, ...], precision: str, least: float
) -> None:
    kernel, limits = KernelSpec(Pattern(*pattern), precision, "bsf"), cuda_limits("sm_80")
    assert FAMILIES["mma"].default(kernel, limits).resident == 1
    assert expected(kernel, limits, model.LARGE, False).share >= least


@pytest.mark.exhaustive
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90a", "sm_120"])
def test_no_other_family_is_expected_to_be_faster_than_the_chosen_one(target: str) -> None:
    for precision in ("float16", "tf32", "tf32x3", "fp16x3"):
        assert max(each.over_best for each in found(target, precision, "bsf")) <= 1 + model.MIN_SAVING


# ---- families


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("target", "precision"),
    # in fp16x3, some of GB10's go to mma
    [*product(("sm_86", "sm_89", "sm_120"), ("tf32x3", "fp16x3")), ("sm_121", "tf32x3")],
)
def test_split_operands_are_left_to_plain_multiply_adds_where_those_are_as_fast(target: str, precision: str) -> None:
    limits = cuda_limits(target)
    for pattern in stratified(FEW):
        assert family_for(KernelSpec(pattern, precision), limits).name == "simt"
    assert family_for(KernelSpec(Pattern(1, 192, 192, 2), "float16"), limits).name == "mma"


@pytest.mark.parametrize("target", ["sm_80", "sm_87", "sm_100", "sm_110"])
def test_split_operands_go_to_tensor_cores_where_those_are_faster(target: str) -> None:
    assert family_for(KernelSpec(Pattern(1, 768, 192, 2), "tf32x3"), cuda_limits(target)).name == "mma"


def test_an_unknown_target_has_the_first_family_and_a_rules_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = KernelSpec(Pattern(1, 768, 192, 2), "tf32x3")
    monkeypatch.setitem(GPUS, 89, replace(GPUS[89], rates=None))
    assert family_for(kernel, cuda_limits("sm_89")).name == "mma"
    assert model.speed_of(FAMILIES["mma"], kernel, cuda_limits("sm_89")) is None


@pytest.mark.parametrize(
    ("target", "precision", "is_so"),
    [
        ("sm_75", "float16", True),
        ("sm_70", "float16", True),
        ("sm_75", "bfloat16", False),
        ("sm_75", "fp16x3", False),
        ("sm_75", "float32", False),
        ("sm_80", "float16", False),
        ("sm_60", "float16", False),
    ],
)
def test_float16_before_sm_80_is_multiplied_faster_by_others(target: str, precision: str, is_so: bool) -> None:
    assert model.is_outpaced(KernelSpec(Pattern(1, 768, 192, 2), precision), cuda_limits(target)) is is_so


@pytest.mark.parametrize(
    ("pattern", "layout", "epilogue", "is_faster"),
    [
        # memory bounds it, and permutations take twice as long as the product
        ((1, 64, 64, 16), "bsf", Epilogue(), False),
        ((1, 192, 192, 4), "bsf", Epilogue(), True),
        ((1, 1024, 1024, 4), "bsf", Epilogue(), True),
        ((6, 64, 64, 1), "bsf", Epilogue(), True),
        ((6, 64, 64, 1), "bsf", Epilogue(True, "gelu", True), False),  # a pass over Y for each step
        ((6, 64, 64, 4), "bsl", Epilogue(), True),
    ],
)
def test_a_library_s_tensor_cores_are_faster_on_a_t4_where_compute_bounds(
    pattern: tuple[int, ...], layout: str, epilogue: Epilogue, is_faster: bool
) -> None:
    kernel, limits = KernelSpec(Pattern(*pattern), "float16", layout, epilogue), cuda_limits("sm_75")
    assert (
        model.library_us(kernel, limits, 25088) < model.default_us(FAMILIES["simt"], kernel, limits, 25088)
    ) is is_faster
    assert model.library_us(kernel, cuda_limits("sm_80"), 25088) == inf
    assert model.library_us(replace(kernel, precision="float32"), limits, 25088) == inf


def test_a_card_with_fewer_multiprocessors_is_slower_by_as_much_and_filled_by_smaller_batches() -> None:
    kernel, few = KernelSpec(Pattern(1, 768, 192, 2), "float16"), replace(HOPPER, multiprocessors=33)
    mma = FAMILIES["mma"]
    whole, part = (model.speed_of(mma, kernel, limits) for limits in (HOPPER, few))
    assert whole is not None
    assert part is not None
    names = ("bytes_per_s", "cache_bytes_per_s", "flops_per_s")
    assert [getattr(whole, name) / getattr(part, name) for name in names] == pytest.approx([4, 4, 4])
    assert whole.shared_bytes_per_s == part.shared_bytes_per_s  # of one multiprocessor
    blocks = [mma.geometry(kernel, mma.default(kernel, limits, 196), 196).grid for limits in (HOPPER, few)]
    assert blocks[1] < blocks[0]


# ---- small batches


def test_a_small_batch_has_blocks_for_more_multiprocessors() -> None:
    kernel, limits = KernelSpec(Pattern(1, 768, 192, 2), "float16"), HOPPER
    mma = FAMILIES["mma"]
    large, small = (mma.default(kernel, limits, batch) for batch in (25088, 196))
    assert mma.default(kernel, limits, None) == large
    assert mma.geometry(kernel, large, 196).grid < 24
    assert mma.geometry(kernel, small, 196).grid >= 48
    check(mma, kernel, small, limits)


@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_plain_blocks_are_smaller_where_a_batch_is(target: str, layout: str) -> None:
    kernel, limits, simt = KernelSpec(Pattern(1, 768, 192, 2), layout=layout), cuda_limits(target), FAMILIES["simt"]
    large, small = (simt.default(kernel, limits, batch) for batch in (25088, 196))
    assert simt.default(kernel, limits) == simt.default(kernel, replace(limits, target="")) == large  # a rule's
    check(simt, kernel, small, limits)
    speed = model.speed_of(simt, kernel, limits)
    assert speed is not None
    expected_us = [model.gpu_us(speed, simt, kernel, each, 196) for each in (large, small)]
    assert expected_us[1] < 0.7 * expected_us[0]


def test_a_class_has_constants_of_its_own_only_where_they_save_a_microsecond() -> None:
    kernel, simt = KernelSpec(Pattern(2, 9, 5, 3)), FAMILIES["simt"]
    assert simt.default(kernel, HOPPER, 5) == simt.default(kernel, HOPPER, 25088)


@pytest.mark.parametrize(("family", "precision"), [("mma", "float16"), ("simt", "float32")])
def test_batches_of_a_class_share_their_constants(family: str, precision: str) -> None:
    kernel = KernelSpec(Pattern(1, 768, 192, 2), precision)
    for batches in ((1, 100, 256), (257, 2048), (2049, 25088, 10**6)):
        assert len({family_named(family).default(kernel, HOPPER, batch) for batch in batches}) == 1


def test_constants_of_large_batches_are_compared_once_for_all_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    rated, rate = [], model.terms_of

    def counted(*given: Any) -> model.Terms | None:
        rated.append(given[-1])
        return rate(*given)

    monkeypatch.setattr(model, "_found", {})
    monkeypatch.setattr(model, "terms_of", counted)
    kernel = KernelSpec(Pattern(1, 192, 48, 2), "bfloat16")
    chosen = [FAMILIES["mma"].default(kernel, HOPPER, batch) for batch in (200, 2000, None)]
    assert rated.count(256) == rated.count(2048) == rated.count(model.LARGE) > 0
    model._found.clear()
    assert [FAMILIES["mma"].default(kernel, HOPPER, batch) for batch in (None, 2000, 200)] == chosen[::-1]


def test_another_thread_may_clear_the_cache_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cleared(dict[Any, Any]):
        """A cache that loses each entry at once."""

        def __setitem__(self, key: Any, value: Any) -> None: ...

    family, kernel, limits = FAMILIES["simt"], KernelSpec(Pattern(1, 192, 48, 2)), cuda_limits("sm_80")
    wanted = family.default(kernel, limits, 64)
    monkeypatch.setattr(model, "_found", Cleared())
    assert family.default(kernel, limits, 64) == wanted


def test_what_is_built_beforehand_holds_the_constants_of_every_class() -> None:
    spec, target = parse("kernels: [{pattern: [1,768,192,2], precision: float16}]"), "sm_80"
    (kernel,) = spec.kernels
    built = {source.constants for source in _sources(spec, cuda_limits(target), "cuda", Wisdom())}
    chosen = {batch: family_for(kernel, cuda_limits(target), batch) for batch in (1, 2, 3, 7, 16, 31, 196, 2000, 25088)}
    assert [family.name for family in chosen.values()] == ["gemv"] * 5 + ["mma"] * 4
    assert built == {family.default(kernel, cuda_limits(target), batch) for batch, family in chosen.items()}
    assert len({type(constants) for constants in built}) == 2


# ---- what it likes is right


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "target", "precision", "layout", "pattern", "batch"),
    [
        ("mma", "sm_80", "float16", "bsf", (1, 200, 72, 5), 300),
        ("mma", "sm_90a", "tf32x3", "bsf", (1, 130, 52, 5), 270),
        ("mma", "sm_80", "tf32x3", "bsl", (1, 260, 72, 2), 272),
        ("mma", "sm_80", "tf32x3", "bsf", (1, 100, 44, 14), 100),
        ("mma", "sm_90a", "fp16x3", "bsf", (1, 100, 40, 20), 150),
        ("wgmma_registers", "sm_90a", "float16", "bsf", (1, 200, 72, 4), 300),
        ("wgmma_registers", "sm_90a", "tf32x3", "bsf", (1, 130, 52, 2), 270),
        ("wgmma_registers", "sm_90a", "float16", "bsf", (1, 100, 40, 24), 150),
        ("wgmma_registers", "sm_90a", "tf32x3", "bsf", (1, 200, 52, 8), 150),
        ("wgmma_shared", "sm_90a", "float16", "bsf", (1, 300, 200, 1), 300),
    ],
)
def test_what_the_model_likes_is_right(
    family: str, target: str, precision: str, layout: str, pattern: tuple[int, ...], batch: int
) -> None:
    limits, kernel = cuda_limits(target), job_of(family, KernelSpec(Pattern(*pattern), precision, layout))
    constants = family_named(family).default(kernel, limits)
    unknown = replace(limits, target="")
    assert constants != family_named(family).default(kernel, unknown), (
        "the case says nothing: the rule's constants are the fastest"
    )
    check_result(source_of(family, kernel, constants, limits), batch, in_emulator())


# ---- predictions


@pytest.mark.parametrize(("precision", "family"), [("float32", "simt"), ("float16", "mma"), ("tf32x3", "mma")])
def test_a_prediction_lies_above_the_longest_term_and_below_all_terms_together(precision: str, family: str) -> None:
    limits = cuda_limits("sm_80")
    for pattern in stratified(FEW):
        kernel = KernelSpec(pattern, precision)
        speed, own = model.speed_of(family_named(family), kernel, limits), family_named(family)
        assert speed is not None
        constants = own.default(kernel, limits, model.LARGE)
        found, terms = (each(speed, own, kernel, constants, model.LARGE) for each in (model.prediction, model.terms_of))
        assert found is not None
        assert terms is not None
        told = zip((found.low, found.us, found.high), model.TAKEN, strict=True)
        low, middle, high = ((1e-6 * us - terms.apart) / share for us, share in told)
        assert low == pytest.approx(middle) == pytest.approx(high)
        longest = max(terms.moving, terms.inside)
        assert longest < middle
        whole = terms.moving + terms.inside + terms.ends
        assert middle < whole * model.unevenness(terms.waves) * model.unevenness(terms.blocks_each)


def test_the_last_wave_counts_once() -> None:
    """Blocks that fit a multiprocessor together share its last wave: where that of single blocks is longer, the
    inside has it.
    """
    kernel, limits = KernelSpec(Pattern(1, 64, 64, 1)), cuda_limits("sm_80")
    simt = FAMILIES["simt"]
    speed, constants = model.speed_of(simt, kernel, limits), simt.default(kernel, limits)
    assert speed is not None

    def taken(batch: int) -> float:
        terms = model.terms_of(speed, simt, kernel, constants, batch)
        found = model.prediction(speed, simt, kernel, constants, batch)
        assert terms is not None
        assert found is not None
        return (found.us * 1e-6 - terms.apart) / model.TAKEN[1] / (max(terms.moving, terms.inside) + terms.ends)

    tile = constants.tile_batch
    terms = model.terms_of(speed, simt, kernel, constants, 108 * tile)
    assert terms is not None
    assert (terms.blocks_each, terms.waves) == (1, 1)
    assert taken(108 * tile) == pytest.approx(1)
    assert taken(109 * tile) > 1.3  # a second wave for one block, where the multiprocessors are the longest
    terms = model.terms_of(speed, simt, kernel, constants, 9 * 108 * tile)
    assert terms is not None
    assert (terms.blocks_each, terms.waves) == (9, 2.25)  # four blocks fit
    assert taken(9 * 108 * tile) == pytest.approx(3 / 2.25)


def terms_of(family: str, kernel: KernelSpec, target: str, batch: int = model.LARGE, **changes: Any) -> model.Terms:
    own, limits = family_named(family), cuda_limits(target)
    speed, constants = model.speed_of(own, kernel, limits), own.default(kernel, limits)
    assert speed is not None
    found = model.terms_of(speed, own, kernel, replace(constants, **changes), batch)
    assert found is not None
    return found


def test_copies_through_registers_expose_a_part_and_asynchronous_ones_none() -> None:
    kernel = KernelSpec(Pattern(1, 768, 192, 2))
    assert terms_of("simt", kernel, "sm_75").exposed == model.SYNCHRONOUS
    assert terms_of("simt", replace(kernel, precision="float16"), "sm_80").exposed == model.SYNCHRONOUS
    assert terms_of("simt", kernel, "sm_80").exposed == 0
    assert terms_of("mma", replace(kernel, precision="float16"), "sm_80").exposed == 0


def test_each_wave_waits_for_its_first_stage() -> None:
    """More blocks per multiprocessor make fewer waves; a block that walks over tiles waits once."""
    kernel = KernelSpec(Pattern(1, 768, 192, 2))
    one, two = (terms_of("simt", kernel, "sm_80", batch) for batch in (model.LARGE, 2 * model.LARGE))
    assert one.ends == pytest.approx(model.WAIT_S * one.waves)
    assert two.ends == pytest.approx(2 * one.ends)
    assert terms_of("wgmma_registers", replace(kernel, precision="tf32x3"), "sm_90a").ends == model.WAIT_S


def test_constants_with_equal_longest_terms_are_ranked_by_the_prediction() -> None:
    limits, decided = cuda_limits("sm_90a"), 0
    for pattern, (family, precision) in product(stratified(4), (("mma", "bfloat16"), ("wgmma_registers", "tf32x3"))):
        own: Any = family_named(family)
        kernel = KernelSpec(pattern, precision)
        speed = model.speed_of(own, kernel, limits)
        assert speed is not None
        listed = own._candidates(kernel, limits) if family == "mma" else RegistersBlock.options(own, kernel, limits)
        options, chosen = list(listed), own.default(kernel, limits)
        longest = {each: model.gpu_us(speed, own, kernel, each, model.LARGE) for each in options}
        tied = [each for each in options if longest[each] <= (1 + model.MIN_SAVING) * min(longest.values())]
        us = {each: found.us for each in tied if (found := model.prediction(speed, own, kernel, each, model.LARGE))}
        assert us[chosen] * (1 - model.MIN_SAVING) <= min(us.values())
        decided += us[chosen] < us[min(tied, key=longest.__getitem__)]
    assert decided >= 3


def test_what_cannot_be_launched_has_no_prediction() -> None:
    kernel, limits = KernelSpec(Pattern(1, 768, 192, 2), "float16"), cuda_limits("sm_80")
    mma = FAMILIES["mma"]
    speed = model.speed_of(mma, kernel, limits)
    assert speed is not None
    constants = mma.default(kernel, limits)
    assert model.prediction(replace(speed, flops_per_s=0.0), mma, kernel, constants, 1000) is None
    assert model.gpu_us(replace(speed, flops_per_s=0.0), mma, kernel, constants, 1000) == float("inf")


@pytest.mark.parametrize(
    ("us", "words"),
    [((1.234, 2.345, 3.456), "2.35 us (1.23 to 3.46)"), ((70.51, 90.04, 141.2), "90.0 us (70.5 to 141)")],
)
def test_a_prediction_is_reported_with_its_band(us: tuple[float, float, float], words: str) -> None:
    assert str(model.Prediction(*us)) == words
