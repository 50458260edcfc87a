"""Tests of the layers that the benchmark measures: the named sets, and the layers of a spec."""

from pathlib import Path

import pytest

from ksgen.bench.chains import COUNT, MeasuredLayer, drawn, named_layers, of_spec, transformers
from ksgen.errors import SpecError
from ksgen.pattern import Chain, Pattern
from ksgen.spec import Epilogue, paper_patterns

PAIR = Chain((Pattern(2, 4, 8, 1), Pattern(1, 8, 8, 1)))


def test_two_sets_of_24() -> None:
    assert len(transformers()) == len(drawn()) == COUNT == 24
    assert transformers()["vit up"] == Chain((Pattern(6, 64, 64, 1), Pattern(1, 768, 192, 2)))


def test_named_layers_are_structures_of_published_sizes() -> None:
    found = {each.name: each for each in named_layers()}
    assert len(found) == 29
    assert found["ViT-S up, monarch"].chains == (Chain((Pattern(4, 96, 96, 1), Pattern(1, 384, 96, 4)), "monarch"),)
    sizes = {(each.in_features, each.out_features) for layer in found.values() for each in layer.chains}
    ends = {(384, 384), (3072, 768), (1024, 3072), (2048, 512), (8192, 2048), (4096, 11008), (11008, 4096)}
    assert ends < sizes
    ranks = {name: layer.chains[0][0].b for name, layer in found.items() if name.startswith("Llama 7B")}
    assert ranks == {
        "Llama 7B attention, btt": 1024,
        "Llama 7B attention, blast": 1024,
        "Llama 7B up, blast": 1488,
        "Llama 7B down, blast": 1488,
    }
    assert all(layer.structure and layer.structure.chain == layer.chains[0] for layer in found.values())
    assert {name.startswith("Llama") for name, layer in found.items() if not layer.epilogue.bias} == {True}


def test_random_chains_are_the_papers_of_every_class_and_the_same_for_the_same_seed() -> None:
    found = list(drawn(3).values())
    assert found == list(drawn(3).values())
    assert found != list(drawn(4).values())
    assert len(set(found)) == len(found)
    assert {pattern for chain in found for pattern in chain} <= set(paper_patterns())
    assert {(each.in_features > each.out_features) - (each.in_features < each.out_features) for each in found} == {
        -1,
        0,
        1,
    }
    sizes = [max(each.in_features, each.out_features) for each in found]
    assert all(any(low < size <= high for size in sizes) for low, high in ((0, 512), (512, 2048), (2048, 8192)))


def test_a_specs_layers_are_as_it_says(tmp_path: Path) -> None:
    text = """
defaults: {precision: [float32, bfloat16], layout: bsl}
layers:
  up: {chain: ["2,4,8,1", "1,8,8,1"], bias: [false, true], between: gelu, out_layout: bsf, fuse: "no"}
  heads: {group: [["2,4,8,1", "1,8,8,1"], ["1,3,16,1"]], activation: relu, precision: float16}
  total: {sum: [["2,4,8,1"], ["1,8,16,1"]], bias: true, activation: gelu, layout: bsf}
  product: {chain: ["2,4,8,1", "1,8,4,2"], tied: [a, d], layout: bsf}
  both: {chain: ["2,4,8,2", "1,3,16,1"], tied: [ad, none], layout: bsf, precision: float32, fuse: "no"}
"""
    (tmp_path / "some.yaml").write_text(text)
    kinds = (("float32", "bfloat16"), ("bsl",))
    assert of_spec(tmp_path / "some.yaml") == [
        MeasuredLayer("some up", (PAIR,), "gelu", "bsf", Epilogue(), *kinds, fuse="no"),
        MeasuredLayer("some up bias", (PAIR,), "gelu", "bsf", Epilogue(bias=True), *kinds, fuse="no"),
        MeasuredLayer(
            "some product",
            (Chain((Pattern(2, 4, 8, 1), Pattern(1, 8, 4, 2))),),
            precisions=kinds[0],
            layouts=("bsf",),
            tied=("a", "d"),
        ),
        MeasuredLayer(
            "some both",
            (Chain((Pattern(2, 4, 8, 2), Pattern(1, 3, 16, 1))),),
            precisions=("float32",),
            layouts=("bsf",),
            fuse="no",
            tied=("ad", ""),
        ),
        MeasuredLayer(
            "some heads",
            (PAIR, Chain((Pattern(1, 3, 16, 1),))),
            "none",
            None,
            Epilogue(activation="relu"),
            ("float16",),
            ("bsl",),
        ),
        MeasuredLayer(
            "some total",
            (Chain((Pattern(2, 4, 8, 1),)), Chain((Pattern(1, 8, 16, 1),))),
            epilogue=Epilogue(bias=True, activation="gelu"),
            precisions=kinds[0],
            layouts=("bsf",),
            is_sum=True,
        ),
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("weights: int8", r"layer up has weights=int8; accepted: weights: same, which PyTorch's products use"),
        ("precision: float64", r"layer up has precision=float64; accepted: float32, tf32, float16, bfloat16, fp16x3"),
    ],
)
def test_jobs_without_other_contenders_are_refused(options: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text(f"layers: {{up: {{chain: ['2,4,8,1', '1,8,8,1'], {options}}}}}")
    with pytest.raises(SpecError, match=message):
        of_spec(tmp_path / "some.yaml")
