"""Tests of the constants that batches share: how many sources layers need, and which batches have their own."""

from dataclasses import replace
from itertools import product

import pytest

from benchmarks.model import ALL_BATCHES, PROCESSOR, sources_of
from ksgen.emit.render import render
from ksgen.families import check, family_named
from ksgen.families.vector.defaults import default_by_rule, fitted
from ksgen.families.vector.shape import VectorTiling
from ksgen.families.vector.sources import expected_cycles, shared
from ksgen.pattern import Chain, Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from ksgen.spec.kernel import layer_launch

FAMILY = family_named("vector")
LAYERS = {
    "up": (Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2)),
    "monarch": (Pattern(32, 128, 32, 1), Pattern(1, 32, 32, 128)),
    "low rank": (Pattern(1, 96, 768, 1), Pattern(1, 3072, 96, 1)),
}


@pytest.mark.parametrize(
    ("name", "precision", "layout", "most"),
    [
        ("up", "float32", "bsf", 5),
        ("monarch", "float32", "bsf", 6),
        ("low rank", "float32", "bsf", 6),
        ("up", "bfloat16", "bsf", 5),
        ("monarch", "bfloat16", "bsf", 4),
        ("low rank", "bfloat16", "bsf", 6),
        ("up", "float32", "bsl", 9),
        ("monarch", "float32", "bsl", 11),
        ("low rank", "float32", "bsl", 10),
    ],
)
def test_a_layer_needs_few_sources_for_all_batches(name: str, precision: str, layout: str, most: int) -> None:
    layer = layer_launch((Chain(LAYERS[name]),), precision, layout, Epilogue())
    assert len(sources_of(layer, PROCESSOR)) <= most


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("patterns", [(Pattern(6, 64, 64, 1),), LAYERS["up"]])
def test_sources_with_the_same_tiles_are_the_same(patterns: tuple[Pattern, ...], layout: str) -> None:
    """Blocks, parts and streaming stores are arguments of a launch, so the source of a large batch serves others."""
    kernel = KernelSpec(patterns, layout=layout)
    usual = FAMILY.default(kernel, PROCESSOR, 1 << 15)
    source = render(kernel, usual, family="vector", dialect="opencl")
    for batch in (64, 100):
        other = render(kernel, fitted(kernel, PROCESSOR, usual, batch), family="vector", dialect="opencl")
        assert other.constants != usual
        assert (other.text, other.entry) == (source.text, source.entry)
    longer = render(kernel, replace(usual, block=8 * usual.block), family="vector", dialect="opencl")
    assert longer.text != source.text  # whose private buffers or prefetches are for longer blocks


def test_parts_of_a_plane_have_a_source_of_their_own() -> None:
    kernel = KernelSpec(Pattern(1, 384, 384, 3))
    split = FAMILY.default(kernel, PROCESSOR, 16)
    planes = VectorTiling(kernel, split).planes
    sources = [FAMILY.source_constants(kernel, replace(split, parts=parts)) for parts in (1, planes, 2, split.parts)]
    assert split.parts > planes
    assert sources[0] == sources[1] != sources[2] == sources[3]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("patterns", [(Pattern(1, 192, 48, 2),), (Pattern(1, 48, 48, 12),), LAYERS["up"]])
def test_the_order_of_calls_makes_no_difference(patterns: tuple[Pattern, ...], layout: str) -> None:
    kernel = KernelSpec(patterns, layout=layout)
    batches = (*range(1, 18), *ALL_BATCHES, 100, 1 << 15)
    found = []
    for order in (batches, batches[::-1]):
        shared.cache_clear()
        found.append({batch: FAMILY.default(kernel, PROCESSOR, batch) for batch in order})
    assert found[0] == found[1]


def test_a_source_of_its_own_must_gain_enough() -> None:
    for shape, layout in product(((1, 192, 48, 2), (6, 64, 64, 1), (1, 64, 64, 16), (1, 384, 384, 3)), LAYOUTS):
        kernel = KernelSpec(Pattern(*shape), layout=layout)
        for batch in ALL_BATCHES[2:]:
            own, found = default_by_rule(kernel, PROCESSOR, batch), FAMILY.default(kernel, PROCESSOR, batch)
            check(FAMILY, kernel, found, PROCESSOR)
            assert (found.along, found.streaming) == (own.along, own.streaming)
            cycles = [expected_cycles([VectorTiling(kernel, each)], PROCESSOR, batch) for each in (found, own)]
            assert cycles[0] <= 1.1 * cycles[1]


def test_small_batches_share_higher_tiles_where_copies_of_missing_rows_are_short() -> None:
    def heights(*shape: int, layout: str = "bsf", precision: str = "float32", vector_bytes: int = 64) -> list[int]:
        kernel, limits = KernelSpec(Pattern(*shape), precision, layout), replace(PROCESSOR, vector_bytes=vector_bytes)
        return [FAMILY.default(kernel, limits, batch).height for batch in (1, 2, 4)]

    assert heights(1, 3072, 96, 1) == [4, 4, 4]
    assert heights(1, 64, 64, 16) == [1, 2, 4]  # each of eight parts copies 1024 inputs per row
    assert heights(1, 3072, 96, 1, layout="bsl") == [1, 4, 4]
    assert heights(1, 3072, 96, 1, layout="bsl", precision="bfloat16") == [1, 2, 4]
    assert heights(1, 3072, 96, 1, vector_bytes=32)[0] == 1  # 16 registers hold narrower tiles


def test_batches_fill_their_tiles() -> None:
    kernel = KernelSpec(Pattern(32, 32, 128, 1), "bfloat16", "bsl")
    for batch in (8, 16, 32, 64):
        assert VectorTiling(kernel, FAMILY.default(kernel, PROCESSOR, batch)).tile_rows <= max(16, batch)


@pytest.mark.parametrize("vector_bytes", [64, 32])
def test_blocks_are_no_shorter_than_by_rule(vector_bytes: int) -> None:
    chain, limits = (
        KernelSpec((Pattern(16, 64, 256, 1), Pattern(1, 64, 64, 16))),
        replace(PROCESSOR, vector_bytes=vector_bytes),
    )
    assert FAMILY.default(chain, limits, 128).block >= default_by_rule(chain, limits, 128).block


def test_a_kernel_for_one_batch_keeps_its_own_constants() -> None:
    kernel = KernelSpec(Pattern(1, 768, 192, 2), batch=1)
    assert FAMILY.default(kernel, PROCESSOR, 1) == default_by_rule(kernel, PROCESSOR, 1)
    assert FAMILY.default(kernel, PROCESSOR, 1).height == 1
