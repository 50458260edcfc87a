"""Specs: what a YAML text stands for, and the one line that says what is wrong with it."""

import json
from itertools import product
from typing import Any

import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st

from ksgen import structures
from ksgen.errors import SpecError
from ksgen.paths import resource
from ksgen.pattern import Chain, Pattern, monarch
from ksgen.spec import (
    ACTIVATIONS,
    LAYOUTS,
    PRECISIONS,
    STRIDES,
    Epilogue,
    KernelSpec,
    LayerOptions,
    load,
    paper_patterns,
    parse,
    reader,
)
from ksgen.spec.kernel import activations_of

SMALL = Pattern(6, 64, 64, 1)


# --- YAML that is right


def names(text: str) -> list[str]:
    return [kernel.name.removeprefix("ks_") for kernel in parse(text).kernels]


@pytest.mark.parametrize(
    "entry",
    ["6,64,64,1", "'6, 64, 64, 1'", "[6,64,64,1]", "{pattern: [6,64,64,1]}", "pattern: 6,64,64,1"],
)
def test_a_pattern_can_be_written_in_each_of_these_forms(entry: str) -> None:
    assert parse(f"kernels:\n  - {entry}").kernels == (KernelSpec(SMALL),)


def test_options_multiply_out_in_the_order_of_the_file() -> None:
    text = """
        kernels:
          - pattern: 6,64,64,1
            layout: [bsl, bsf]
            precision: [float16, float32]
            batch: [any, 7]
          - 1,2,3,4
    """
    assert names(text) == [
        "6x64x64x1_float16_bsl",
        "6x64x64x1_float16_bsl_batch7",
        "6x64x64x1_float16_bsf",
        "6x64x64x1_float16_bsf_batch7",
        "6x64x64x1_float32_bsl",
        "6x64x64x1_float32_bsl_batch7",
        "6x64x64x1_float32_bsf",
        "6x64x64x1_float32_bsf_batch7",
        "1x2x3x4_float32_bsf",
    ]


def test_defaults_hold_for_the_whole_file_and_an_entry_overrides_them() -> None:
    text = """
        kernels:
          - 1,2,3,4
          - {pattern: [1,2,3,5], bias: false, layout: bsf}
        defaults: {layout: bsl, bias: true, activation: [none, relu]}
    """
    assert names(text) == [
        "1x2x3x4_float32_bsl_bias",
        "1x2x3x4_float32_bsl_bias_relu",
        "1x2x3x5_float32_bsf",
        "1x2x3x5_float32_bsf_relu",
    ]


def test_the_epilogue_of_a_layer_belongs_to_its_last_factor() -> None:
    text = """
        layers:
          up:
            chain: [[6,64,64,1], [1,768,192,2]]
            bias: [false, true]
            activation: gelu
            residual: true
            batch: 5
    """
    spec = parse(text)
    assert names(text) == [
        "6x64x64x1_float32_bsf_batch5",
        "1x768x192x2_float32_bsf_gelu_residual_batch5",
        "1x768x192x2_float32_bsf_bias_gelu_residual_batch5",
    ]
    assert spec.layers == {"up": Chain((SMALL, Pattern(1, 768, 192, 2)))}
    assert spec.layers["up"].name == "up"


def test_the_activation_between_factors_is_that_of_all_but_a_layers_last() -> None:
    spec = parse(
        """
        layers:
          up: {chain: [[6,64,64,1], [1,768,192,2], [1,4,1536,1]], between: relu, activation: gelu}
          pair: {group: [[[6,64,64,1], [1,768,192,2]], [[6,64,64,1]]], between: silu}
          plain: [[6,64,64,1]]
        """
    )
    first, second, third = spec.layers["up"]
    expected = [(first, "relu"), (second, "relu"), (third, "gelu"), (first, "silu"), (second, "none"), (first, "none")]
    assert [(each.pattern, each.epilogue.activation) for each in spec.kernels] == expected
    assert {name: options.non_defaults for name, options in spec.options.items()} == {
        "up": {"between": "relu"}, "pair": {"between": "silu"}, "plain": {},
    }  # fmt: skip
    assert spec.options_of("none of these") == LayerOptions()


def test_what_gives_another_layout_has_the_kernels_of_both() -> None:
    """Factors before the one that turns have that of x, others that of y."""
    spec = parse(
        "layers: {up: {chain: [[6,64,64,1], [1,768,192,2], [1,4,1536,1]], layout: [bsf, bsl], out_layout: bsl}}"
    )
    first, second, third = spec.layers["up"]
    expected = [(first, "bsf"), (first, "bsl"), (second, "bsl"), (third, "bsl")]
    assert [(each.pattern, each.layout) for each in spec.kernels] == expected
    assert spec.options_of("up").non_defaults == {"out_layout": "bsl"}


def test_layers_kernels_and_pattern_sets_share_kernels() -> None:
    text = """
        layers:
          q: [[2,48,192,1], [1,192,48,2]]
          k: [[2,48,192,1], [1,192,48,2]]
        kernels: ["1,192,48,2", "1,48,48,1"]
        patterns: paper
    """
    spec = parse(text)
    listed = [str(kernel.pattern) for kernel in spec.kernels]
    assert listed[:4] == ["2,48,192,1", "1,192,48,2", "1,48,48,1", "1,48,48,2"]
    assert len(spec.kernels) == 627 + 1  # 2,48,192,1 is no pattern of the paper's benchmark
    assert list(spec.layers) == ["q", "k"]


def test_a_chain_can_be_a_structure() -> None:
    spec = parse(
        """
        layers:
          turn: {chain: {structure: oft, features: 64, block: 8}}
          mix: {chain: {structure: btt, in_features: 64, out_features: 32, blocks: [4, 8], rank: 2}}
          even: {chain: {structure: gralora, in_features: 64, out_features: 64, blocks: 4, rank: 8}}
          shuffle: {chain: {structure: gs, in_features: 64, out_features: 32, blocks: 4, orthogonal: false}}
          unlike: {chain: {structure: gs, in_features: 64, out_features: 32, blocks: [4, 8], orthogonal: false}}
        """
    )
    assert list(spec.layers.values()) == [
        structures.oft(64, block=8).chain,
        structures.btt(64, 32, blocks=(4, 8), rank=2).chain,
        structures.gralora(64, 64, blocks=4, rank=8).chain,
        structures.gs(64, 32, blocks=4, orthogonal=False).chain,
        structures.gs(64, 32, blocks=(4, 8), orthogonal=False).chain,
    ]


def test_a_chain_can_be_a_named_family() -> None:
    text = """
        layers:
          mix: {chain: {family: monarch, in_features: 6, out_features: 20, split_in: 3, split_out: 4}, bias: true}
          fly:
            chain: {family: deformable_butterfly, in_features: 12, blocks: [[2,3], [5,2]]}
    """
    assert parse(text).layers["mix"] == monarch(6, 20, 3, 4)
    assert names(text) == [
        "3x5x2x1_float32_bsf",
        "1x4x3x5_float32_bsf_bias",
        "4x2x3x1_float32_bsf",
        "2x5x2x2_float32_bsf",
    ]


def test_a_layer_reads_and_writes_slices_and_has_none_between_its_factors() -> None:
    text = """
        kernels:
          - {pattern: [1,6,4,2], stride: [dense, any], gradients: true}
        layers:
          up: {chain: [[1,6,4,2], [1,5,12,1], [1,3,5,1]], stride: any, bias: true, batch: 7}
        """
    assert names(text) == [
        "1x6x4x2_float32_bsf",
        "1x6x4x2_float32_bsf_strided",
        "1x6x4x2_float32_bsf_gradient",
        "1x4x6x2_float32_bsf",
        "1x6x4x2_float32_bsf_strided_batch7",
        "1x5x12x1_float32_bsf_batch7",
        "1x3x5x1_float32_bsf_bias_strided_batch7",
    ]


def test_a_group_has_the_kernels_of_all_its_chains() -> None:
    text = """
        layers:
          heads: {group: [[[1,6,4,2], [1,5,12,1]], [[2,3,4,1]], [[1,6,4,2], [1,5,12,1]]], bias: true}
          up: [[2,3,4,1]]
        """
    spec = parse(text)
    pair, alone = Chain((Pattern(1, 6, 4, 2), Pattern(1, 5, 12, 1))), Chain((Pattern(2, 3, 4, 1),))
    assert (spec.groups, spec.layers) == ({"heads": (pair, alone, pair)}, {"up": alone})
    assert names(text) == [
        "1x6x4x2_float32_bsf",
        "1x5x12x1_float32_bsf_bias",
        "2x3x4x1_float32_bsf_bias",
        "2x3x4x1_float32_bsf",
    ]


def test_a_sum_has_a_layer_per_chain_each_of_which_adds_the_earlier_ones() -> None:
    text = """
        layers:
          up: {sum: [[[1,6,4,2], [1,6,12,1]], [[2,3,4,1]], [[1,6,4,2], [1,6,12,1]]], bias: true, between: relu}
        """
    spec = parse(text)
    pair, alone = Chain((Pattern(1, 6, 4, 2), Pattern(1, 6, 12, 1))), Chain((Pattern(2, 3, 4, 1),))
    assert (spec.sums, spec.groups, spec.layers) == ({"up": (pair, alone, pair)}, {}, {})
    assert names(text) == [
        "1x6x4x2_float32_bsf_relu",
        "1x6x12x1_float32_bsf_bias",
        "2x3x4x1_float32_bsf_residual",
        "1x6x12x1_float32_bsf_residual",
    ]
    assert {name: [kernel.name.removeprefix("ks_") for kernel in each] for name, each in spec.launches.items()} == {
        "up[0]": ["1x6x4x2_1x6x12x1_float32_bsf_relu_between_bias"],
        "up[1]": [],
        "up[2]": ["1x6x4x2_1x6x12x1_float32_bsf_relu_between_residual"],
    }
    assert (spec.options_of("up").between, spec.options_of("up[1]").between) == ("relu", "none")
    assert spec.stated_of("up").non_defaults == {"bias": True}
    ends = "bias: true, activation: gelu, residual: true, residual_first: true"
    assert names(f"layers: {{up: {{sum: [[[2,3,4,1]], [[1,6,8,1]], [[1,6,8,1]]], {ends}}}}}") == [
        "2x3x4x1_float32_bsf_bias_residual",
        "1x6x8x1_float32_bsf_residual",
        "1x6x8x1_float32_bsf_residual_gelu",
    ]
    ends = "activation: relu, residual: true, residual_first: true"
    chained = parse(f"layers: {{up: {{chain: [[2,9,5,1], [1,5,18,1]], {ends}}}}}")
    first, last = (chained.stated_of(pattern).non_defaults for pattern in chained.chains_of["up"][0].factors)
    assert (first, last) == ({}, {"activation": "relu", "residual": True, "residual_first": True})
    further = parse("layers: {up: {sum: [[[2,3,4,1]], [[2,3,4,1]]], gradients: true, weights: same, layout: bsl}}")
    assert [each.name.removeprefix("ks_") for each in further.kernels] == [
        "2x3x4x1_float32_bsl",
        "2x3x4x1_float32_bsl_gradient",
        "2x4x3x1_float32_bsl",
        "2x3x4x1_float32_bsl_residual",
    ]


@pytest.mark.parametrize("variant", ["it", "ot", "dt"])
def test_a_structure_of_several_chains_is_their_sum(variant: Any) -> None:
    dyad = f"{{structure: dyad, in_features: 64, out_features: 32, blocks: 4, variant: {variant}}}"
    chains = tuple(each.chain for each in structures.dyad(64, 32, blocks=4, variant=variant))
    more = f"whole: {{sum: [{dyad}]}}, more: {{sum: [{dyad}, [[1,32,64,1]]]}}"
    spec = parse(f"layers: {{up: {{chain: {dyad}, bias: true}}, {more}}}")
    dense = Chain((Pattern(1, 32, 64, 1),))
    assert (spec.sums, spec.layers) == ({"up": chains, "whole": chains, "more": (*chains, dense)}, {})
    listed = ", ".join(f"['{chain}']" for chain in chains)
    assert spec.launches["up[1]"] == ()
    assert parse(f"layers: {{up: {{chain: {dyad}, bias: true}}}}") == parse(
        f"layers: {{up: {{sum: [{listed}], bias: true}}}}"
    )


def test_a_layer_is_one_launch_too_unless_it_says_no() -> None:
    text = """
        layers:
          heads: {group: [[[1,6,4,2], [1,5,12,1]], [[2,3,4,1]]], between: silu, bias: true, batch: 5}
          transposed: {chain: [[1,6,4,2], [1,5,12,1]], out_layout: bsl, layout: [bsf, bsl], stride: any}
          alone: {chain: [[2,3,4,1]], out_layout: bsl, layout: [bsf, bsl]}
          apart: {chain: [[1,6,4,2], [1,5,12,1]], fuse: no}
          up: [[2,3,4,1]]
        """
    found = {
        name: [kernel.name.removeprefix("ks_") for kernel in launches]
        for name, launches in parse(text).launches.items()
    }
    assert found == {
        "heads": ["1x6x4x2_1x5x12x1_and_2x3x4x1_float32_bsf_silu_between_bias_batch5"],
        "transposed": ["1x6x4x2_1x5x12x1_float32_bsf_to_bsl_strided", "1x6x4x2_1x5x12x1_float32_bsl_strided"],
        "alone": ["2x3x4x1_float32_bsf_to_bsl"],
        "apart": [],
        "up": [],
    }


def test_only_a_layers_first_factor_meets_x_in_eight_bits() -> None:
    text = """
        defaults: {precision: bfloat16, weights: e4m3, inputs: [e4m3]}
        layers: {up: {chain: [[1,6,4,2], [1,5,12,1], [1,3,5,1]]}, alone: [[2,3,4,1]]}
        """
    assert names(text) == [
        "1x6x4x2_bfloat16_e4m3_inputs_bsf", "1x5x12x1_bfloat16_e4m3_bsf", "1x3x5x1_bfloat16_e4m3_bsf",
        "2x3x4x1_bfloat16_e4m3_inputs_bsf",
    ]  # fmt: skip
    [whole] = parse(text).launches["up"]
    assert whole.name == "ks_1x6x4x2_1x5x12x1_1x3x5x1_bfloat16_e4m3_inputs_bsf"
    group = "layers: {up: {group: [[[1,6,4,2]], [[1,3,8,1]]], weights: int8, inputs: int8}}"
    assert parse(group).launches["up"][0].inputs == "int8"
    assert [each.inputs for each in parse(group).kernels] == ["int8", "int8"]


def test_ties_are_those_of_a_kernel_or_of_each_factor() -> None:
    text = """
        kernels:
          - {pattern: [3,5,4,2], tied: ad, layout: [bsf, bsl]}
          - {pattern: [3,5,4,2], tied: none}
          - 1,9,9,1
        layers:
          k: {chain: [[8,8,8,1], [1,8,8,8]], tied: [a, d], bias: true}
          half: {chain: [[8,8,8,1], [1,8,8,8]], tied: [none, d], fuse: no}
          one: {chain: [[3,5,4,2]], tied: [d], out_layout: bsl}
          plain: [[8,8,8,1], [1,8,8,8]]
        """
    assert names(text) == [
        "3x5x4x2_float32_bsf_tied_ad",
        "3x5x4x2_float32_bsl_tied_ad",
        "3x5x4x2_float32_bsf",
        "1x9x9x1_float32_bsf",
        "8x8x8x1_float32_bsf_tied_a",
        "1x8x8x8_float32_bsf_bias_tied_d",
        "8x8x8x1_float32_bsf",
        "1x8x8x8_float32_bsf_tied_d",
        "3x5x4x2_float32_bsl_tied_d",
        "1x8x8x8_float32_bsf",
    ]
    spec = parse(text)
    assert {name: [each.tied for each in launches] for name, launches in spec.launches.items()} == {
        "k": [("a", "d")], "half": [], "one": [("d",)], "plain": [()],
    }  # fmt: skip
    assert {name: [each.tied for each in wanted] for name, wanted in spec.wanted.items()} == {
        "k": [("d",)], "half": [("d",)], "one": [("d",)], "plain": [()],
    }  # fmt: skip
    assert spec.stated_of("k").non_defaults == {"bias": True}


def test_gradients_add_what_training_needs_once() -> None:
    text = """
        defaults: {layout: bsl, gradients: true}
        kernels:
          - {pattern: [1,6,4,2], precision: [float32, float16]}
          - 1,4,6,2
          - {pattern: [1,9,9,1], gradients: false}
        layers:
          up: {chain: [[1,6,4,2]], bias: true, batch: 5}
        """
    assert names(text) == [
        "1x6x4x2_float32_bsl",
        "1x6x4x2_float16_bsl",
        "1x6x4x2_float32_bsl_gradient",
        "1x4x6x2_float32_bsl",
        "1x6x4x2_float16_bsl_gradient",
        "1x4x6x2_float16_bsl",
        "1x4x6x2_float32_bsl_gradient",
        "1x9x9x1_float32_bsl",
        "1x6x4x2_float32_bsl_bias_batch5",
        "1x6x4x2_float32_bsl_batch5_gradient",
        "1x4x6x2_float32_bsl_batch5",
    ]


def test_gradients_are_listed_in_the_precision_in_which_layers_train() -> None:
    spec = parse("kernels: [{pattern: [1,6,4,2], precision: fp16x3, gradients: true}]")
    assert [kernel.name.removeprefix("ks_") for kernel in spec.kernels] == [
        "1x6x4x2_fp16x3_bsf", "1x6x4x2_fp16x3_bsf_gradient", "1x6x4x2_tf32x3_bsf_gradient", "1x4x6x2_tf32x3_bsf",
    ]  # fmt: skip
    stated = [spec.stated_of(pattern).precision for pattern in (Pattern(1, 6, 4, 2), Pattern(1, 4, 6, 2))]
    assert stated == ["fp16x3", "tf32x3"]


option_values = {
    "precision": st.sampled_from(list(PRECISIONS)),
    "layout": st.sampled_from(LAYOUTS),
    "batch": st.none() | st.integers(1, 2**20),
    "bias": st.booleans(),
    "activation": st.sampled_from(ACTIVATIONS),
    "residual": st.booleans(),
    "stride": st.sampled_from(STRIDES),
}
option_lists = {key: st.lists(value, min_size=1, max_size=3, unique=True) for key, value in option_values.items()}
options = st.fixed_dictionaries({}, optional=option_lists)
NO_OPTIONS: dict[str, list[Any]] = {
    "precision": ["float32"],
    "layout": ["bsf"],
    "batch": [None],
    "bias": [False],
    "activation": ["none"],
    "residual": [False],
    "residual_first": [False],
    "stride": ["dense"],
}
patterns = st.builds(Pattern, *[st.integers(1, 1000)] * 4)


def written(values: dict[str, list[Any]]) -> dict[str, Any]:
    """Options as a user writes them: a list of one as its item, no batch as `any`."""
    shown = {key: ["any" if value is None else value for value in listed] for key, listed in values.items()}
    return {key: listed[0] if len(listed) == 1 else listed for key, listed in shown.items()}


entries_of_kernels = st.lists(st.tuples(patterns, options), min_size=1, max_size=4, unique_by=lambda entry: entry[0])


@given(entries_of_kernels, options, st.booleans())
def test_what_is_written_is_what_is_read(
    entries: list[tuple[Pattern, dict[str, Any]]],
    defaults: dict[str, Any],
    flow: bool,
) -> None:
    chosen = [NO_OPTIONS | defaults | values for _, values in entries]
    assume(all(set(each["activation"]) <= set(activations_of(name)) for each in chosen for name in each["precision"]))
    document = {
        "defaults": written(defaults) or {"layout": "bsf"},
        "kernels": [{"pattern": list(pattern.shape)} | written(values) for pattern, values in entries],
    }
    expected = [
        KernelSpec(pattern, precision, layout, Epilogue(*epilogue), batch, stride=stride)
        for pattern, values in entries
        for precision, layout, batch, *epilogue, stride in product(*(NO_OPTIONS | defaults | values).values())
    ]
    text = yaml.safe_dump(document, default_flow_style=flow)
    assert parse(text).kernels == tuple(expected)
    assert parse(json.dumps(document)).kernels == tuple(expected)  # JSON is YAML


# --- the paper, and the specs that ksgen ships


def test_the_patterns_of_the_paper() -> None:
    listed = paper_patterns()
    assert len(listed) == len(set(listed)) == 627
    assert [pattern.shape for pattern in listed[:2]] == [(1, 48, 48, 1), (1, 48, 48, 2)]
    assert listed[-1].a > 1
    assert sum(pattern.a == 1 for pattern in listed) == 627 - 328
    assert [sum(pattern.d == d for pattern in listed) for d in (1, 4, 16, 64, 96, 128)] == [22, 191, 133, 70, 19, 16]
    assert {pattern.d for pattern in listed if pattern.a > 1} == {4, 16, 64}
    assert Pattern(1, 64, 256, 4) in listed
    assert Pattern(2, 64, 256, 4) not in listed


def test_a_smaller_batch_leaves_memory_for_more_patterns() -> None:
    assert len(paper_patterns(batch=1)) > 627
    assert paper_patterns(batch=2**31) == []


def test_the_spec_of_the_paper() -> None:
    spec = load(resource("specs") / "paper.yaml")
    assert (spec.name, len(spec.kernels), len(spec.layers)) == ("paper", 2508, 0)
    assert [kernel.pattern for kernel in spec.kernels[::4]] == paper_patterns()
    variants = list(product(["float32", "float16"], LAYOUTS))
    assert [(kernel.precision, kernel.layout) for kernel in spec.kernels] == 627 * variants


def test_the_spec_of_vit() -> None:
    spec = load(resource("specs") / "vit.yaml")
    assert {name: (chain.in_features, chain.out_features) for name, chain in spec.layers.items()} == {
        "attention": (384, 384),
        "up": (384, 1536),
        "down": (1536, 384),
    }
    assert [name for name, chain in spec.layers.items() if chain.is_chainable] == ["attention", "up"]
    assert len(spec.kernels) == 6 * 3 * 2


def test_the_spec_of_gpt2() -> None:
    spec = load(resource("specs") / "gpt2.yaml")
    assert {name: (chain.in_features, chain.out_features) for name, chain in spec.layers.items()} == {
        "qkv": (1024, 3072),
        "projection": (1024, 1024),
        "up": (1024, 4096),
        "down": (4096, 1024),
    }
    assert all(chain.is_chainable for chain in spec.layers.values())


@pytest.mark.parametrize(("size", "features", "hidden"), [("1b", 2048, 8192), ("7b", 4096, 11008)])
@pytest.mark.parametrize(("family", "factors", "shares"), [("monarch", 2, (0.02, 0.05)), ("blast", 3, (0.23, 0.27))])
def test_the_spec_of_llama(
    size: str, features: int, hidden: int, family: str, factors: int, shares: tuple[float, float]
) -> None:
    spec = load(resource("specs") / "llama.yaml")
    prefix = f"{family}_{size}_"
    chains = {name.removeprefix(prefix): chain for name, chain in spec.layers.items() if name.startswith(prefix)}
    sizes = {"attention": (features, features), "up": (features, hidden), "down": (hidden, features)}
    sizes |= {"key_value": (2048, 512)} if size == "1b" else {}
    assert {name: (chain.in_features, chain.out_features) for name, chain in chains.items()} == sizes
    for chain in chains.values():
        assert len(chain) == factors
        assert shares[0] < chain.weight_count / (chain.in_features * chain.out_features) < shares[1]
    assert {(kernel.precision, kernel.layout) for kernel in spec.kernels} == {("float32", "bsf"), ("bfloat16", "bsf")}


# --- YAML that is wrong


DEEP = "[" * 20 + "]" * 20
WRONG = [
    ("", "1: spec: got nothing; accepted: a mapping with defaults, kernels, layers, patterns"),
    ("# only a comment", "1: spec: got nothing; accepted: a mapping with"),
    ("- 6,64,64,1", "1: spec: got a list; accepted: a mapping with"),
    ("\n\n6,64,64,1", "3: spec: got '6,64,64,1'; accepted: a mapping with"),
    ("{}", "1: spec: got an empty mapping; accepted: a mapping with"),
    ("defaults: {bias: true}", "1: spec: asks for no kernel; accepted: kernels, layers, patterns"),
    (
        "\nkernel:\n  - 1,2,3,4",
        "2: spec: unknown key 'kernel'; did you mean kernels? accepted: defaults, kernels, layers, patterns",
    ),
    ("kernels:", "1: kernels: got nothing; accepted: a list of patterns"),
    ("kernels: []", "1: kernels: got an empty list; accepted: a list of patterns"),
    ("kernels: {a: b}", "1: kernels: got a mapping; accepted: a list of patterns"),
    ("kernels: 6,64,64,1", "1: kernels: got '6,64,64,1'; accepted: a list of patterns"),
    (
        "kernels:\n- 1,2,3,4\n- 1,2,3",
        "3: kernels[1]: '1,2,3' is not a pattern; accepted: whole numbers a,b,c,d such as 1,192,48,2",
    ),
    ("kernels:\n- 1:2:3:4", "2: kernels[0]: '1:2:3:4' is not a pattern; accepted"),
    ("kernels:\n- [1,2,3]", "2: kernels[0]: got a list; accepted: a pattern a,b,c,d or [a,b,c,d]"),
    ("kernels:\n- [1,2,3,x]", "2: kernels[0][3]: got 'x'; accepted: a whole number"),
    ("kernels:\n- [1,2,3,'4']", "2: kernels[0][3]: got '4'; accepted: a whole number"),
    ("kernels:\n- [1,2,3,0x4]", "2: kernels[0][3]: got '0x4'; accepted: a whole number"),
    ("kernels:\n- [1,2,\n   0,4]", "2: kernels[0]: c=0; accepted: a whole number from 1 to 2147483647"),
    ("kernels:\n- [1,2,3,[4]]", "2: kernels[0][3]: got a list; accepted: a whole number"),
    ("kernels:\n-", "2: kernels[0]: '' is not a pattern; accepted"),
    (
        "kernels:\n- {layout: bsf}",
        "2: kernels[0]: needs pattern; accepted: pattern, precision, layout, batch, bias, activation, residual, "
        "residual_first, gradients, stride",
    ),
    ("kernels:\n- {pattern: {a: 1}}", "2: kernels[0].pattern: got a mapping; accepted: a pattern"),
    (
        "kernels:\n- {pattern: 6,64,64,1}",
        "2: kernels[0]: the number '64' as a key; accepted: a word, and patterns inside braces as [a,b,c,d]",
    ),
    (
        "kernels:\n- pattern: 1,2,3,4\n  presicion: float32",
        "3: kernels[0]: unknown key 'presicion'; did you mean precision? accepted",
    ),
    (
        "kernels:\n- pattern: 1,2,3,4\n  precision:\n  - float32\n  - 16",
        "5: kernels[0].precision[1]: got '16'; accepted: float32",
    ),
    (
        "kernels:\n- pattern: 1,2,3,4\n  precision:\n  - bfloat16\n  - bfloat16",
        "5: kernels[0].precision[1]: lists 'bfloat16' again; accepted: each value once",
    ),
    (
        "kernels:\n- pattern: 1,2,3,4\n  batch: 999999999999999999",
        "2: kernels[0]: float32 x (batch 999999999999999999) of 1,2,3,4 is too large",
    ),
    (
        "kernels:\n- 1,2,3,4\n- 1,2,3,5\n- [1,2,3,4]",
        "4: kernels[2]: asks for ks_1x2x3x4_float32_bsf again, after line 2; accepted: once",
    ),
    (
        "kernels:\n- 1,2,3,4\n- {pattern: [1,2,3,4], layout: [bsl, bsf]}",
        "3: kernels[1]: asks for ks_1x2x3x4_float32_bsf again, after line 2",
    ),
    (
        "kernels: [[1,2,3,4]]\nkernels: [[1,2,3,5]]",
        "2: spec: key 'kernels' again, after line 1; accepted: each key once",
    ),
    (
        "layers:\n  q: [[1,2,3,4]]\n  q: [[1,2,3,5]]",
        "3: layers: key 'q' again, after line 2; accepted: each key once",
    ),
    ("defaults: 3\nkernels: [[1,2,3,4]]", "1: defaults: got '3'; accepted: a mapping with precision, layout"),
    ("defaults: {pattern: [1,2,3,4]}", "1: defaults: unknown key 'pattern'; accepted: precision, layout, batch"),
    ("layers: [[1,2,3,4]]", "1: layers: got a list; accepted: a mapping of layer names to chains"),
    ("layers: {}", "1: layers: got an empty mapping; accepted: a mapping of layer names to chains"),
    (
        "layers:\n  q:",
        "2: layers.q: got nothing; accepted: a list of patterns, or a mapping with a family or a structure",
    ),
    ("layers:\n  q: []", "2: layers.q: got an empty list; accepted: a list of patterns"),
    ("layers:\n  q: [1,64,64,1]", "2: layers.q[0]: '1' is not a pattern; accepted: within a list, [a,b,c,d] or a,b"),
    (
        "kernels:\n- [4,8,16,1@k.i]",
        '2: kernels[0]: got a list; accepted: a pattern with an order in quotes, "4,8,16,1@k.i"',
    ),
    (
        "layers:\n  q-k: [[1,2,3,4]]",
        "2: layers.'q-k': is not a layer name; accepted: letters, digits and _, a letter first",
    ),
    (
        "layers:\n  q: {chain: [[1,2,3,4], [1,3,8,1]], between: relu, precision: [float32, complex64]}",
        "2: layers.q.between: got relu of complex numbers, complex64; accepted: none",
    ),
    ("layers:\n  q: {group: [], bias: true}", "2: layers.q.group: got an empty list; accepted: a list of chains"),
    (
        "layers:\n  q: {group: [[[1,2,3,4]]], chain: [[1,2,3,4]]}",
        "2: layers.q: unknown key 'chain'; accepted: group, between, out_layout, fuse, precision",
    ),
    (
        "layers:\n  q:\n    group:\n    - [[1,2,3,4]]\n    - [[1,2,4,4]]",
        "5: layers.q.group[1]: takes 16 features, and the first chain 12; accepted: chains that take the same x",
    ),
    ("layers:\n  q: {bias: true}", "2: layers.q: needs chain; accepted: chain, between, out_layout, fuse, precision"),
    ("layers:\n  q: {chain: [[1,2,3,4]], fuse: never}", "2: layers.q.fuse: got 'never'; accepted: auto, yes, no"),
    (
        "layers:\n  q: {group: [[[1,2,3,4]]], out_layout: bsl}",
        "2: layers.q.out_layout: got bsl for a group; accepted: out_layout for a chain",
    ),
    ("layers:\n  q: {sum: [[[1,2,3,4]]]}", "2: layers.q.sum: got one chain, 1,2,3,4; accepted: two or more"),
    (
        "layers:\n  q:\n    sum:\n    - [[1,2,3,4]]\n    - [[1,3,3,4]]",
        "5: layers.q.sum[1]: gives 12 features, and the first chain 8; accepted: chains of equal out_features",
    ),
    (
        "layers:\n  q:\n    sum:\n    - [[1,2,3,4]]\n    - [[1,2,4,4]]",
        "5: layers.q.sum[1]: takes 16 features, and the first chain 12; accepted: chains that take the same x",
    ),
    (
        "layers:\n  q: {sum: [[[1,2,3,4]], [[1,2,3,4]]], out_layout: bsl}",
        "2: layers.q.out_layout: got bsl for a sum; accepted: out_layout for a chain",
    ),
    (
        "layers:\n  q:\n    sum: [[[1,2,3,4]], [[1,2,3,4]]]\n    activation: [none, gelu]\n    residual: [true, false]",
        "5: layers.q.residual: got a residual after activation gelu of a sum; accepted: residual_first: true, because",
    ),
    (
        "defaults: {activation: relu, residual: true}\nlayers:\n  q: {sum: [[[1,2,3,4]], [[1,2,3,4]]]}",
        "3: layers.q: got a residual after activation relu of a sum; accepted: residual_first: true",
    ),
    ("layers:\n  q: {chain: [[1,2,3,4]], out_layout: same}", "2: layers.q.out_layout: got 'same'; accepted: bsf, bsl"),
    (
        "layers:\n  q: {chain: [[1,2,3,4]], between: relu}",
        "2: layers.q.between: got relu with one factor; accepted: none",
    ),
    (
        "layers:\n  q: {chain: [[1,2,3,4], [1,2,2,4]], between: rely}",
        "2: layers.q.between: got 'rely'; did you mean relu? accepted: none, relu, gelu, gelu_tanh, silu",
    ),
    (
        "layers:\n  q:\n    chain:\n    - 1,192,48,2\n    - 2,48,192,2",
        "3: layers.q.chain: 1,192,48,2 gives 384 features, but the next pattern (2,48,192,2) takes 768",
    ),
    (
        "layers:\n  q: {chain: {in_features: 3}}",
        "2: layers.q.chain: needs family or structure; accepted: family: dense, low_rank",
    ),
    (
        "layers:\n  q: {group: [{structure: dyad, in_features: 4, out_features: 4, blocks: 2}]}",
        "2: layers.q.group[0].structure: got 'dyad'; accepted: blast, block_dense",
    ),
    (
        "layers:\n  q: {chain: {structure: dyad, in_features: 4, out_features: 4, blocks: 2, variant: ti}}",
        "2: layers.q.chain.variant: got 'ti'; accepted: it, ot, dt",
    ),
    (
        "layers:\n  q: {chain: {structure: dyad, in_features: 4, out_features: 4, blocks: 3}}",
        "2: layers.q.chain: blocks=3; accepted: a divisor of in_features=4",
    ),
    (
        "layers:\n  q: {chain: {structure: dyad, in_features: 4, out_features: 4, blocks: 2}, out_layout: bsl}",
        "2: layers.q.out_layout: got bsl for a sum; accepted: out_layout for a chain",
    ),
    (
        "layers:\n  q: {sum: [{structure: dyad, in_features: 4, out_features: 4, blocks: 2}, [[1,5,4,1]]]}",
        "2: layers.q.sum[1]: gives 5 features, and the first chain 4; accepted: chains of equal out_features",
    ),
    (
        "layers:\n  q: {chain: {structure: dyad, in_features: 4, out_features: 4, blocks: 2}, tied: [a, d]}",
        "2: layers.q.tied: got a, d of a sum; accepted: one of none, a, d, ad per factor of a chain",
    ),
    (
        "layers:\n  q: {chain: {structure: oft, features: 64}}",
        "2: layers.q.chain: needs block; accepted: structure, features, block",
    ),
    (
        "layers:\n  q: {chain: {structure: oft, features: 64, block: 7}}",
        "2: layers.q.chain: block=7; accepted: a divisor of features=64",
    ),
    (
        "layers:\n  q: {chain: {structure: gs, in_features: 8, out_features: 8, blocks: 2, orthogonal: maybe}}",
        "2: layers.q.chain.orthogonal: got 'maybe'; accepted: true, false",
    ),
    (
        "layers:\n  q: {chain: {family: monarc}}",
        "2: layers.q.chain.family: got 'monarc'; did you mean monarch? accepted: dense",
    ),
    (
        "layers:\n  q: {chain: {family: dense, in_features: 3}}",
        "2: layers.q.chain: needs out_features; accepted: family, in_features, out_features",
    ),
    (
        "layers:\n  q: {chain: {family: dense, infeatures: 3}}",
        "2: layers.q.chain: unknown key 'infeatures'; did you mean in_features?",
    ),
    (
        "layers:\n  q: {chain: {family: square_dyadic, features: 12}}",
        "2: layers.q.chain: features=12; accepted: a power of two from 2 up",
    ),
    (
        "layers:\n  q: {chain: {family: square_dyadic, features: [8]}}",
        "2: layers.q.chain: features=[8]; accepted: a whole number",
    ),
    (
        "layers:\n  q: {chain: {family: deformable_butterfly, in_features: 4, blocks: 4}}",
        "2: layers.q.chain: blocks=4; accepted: a list",
    ),
    ("kernels: [{pattern: [3,5,4,2], tied: b}]", "1: kernels[0].tied: got 'b'; accepted: none, a, d, ad"),
    ("kernels: [{pattern: [3,5,4,2], tied: [a, d]}]", "1: kernels[0].tied: got a list; accepted: none, a, d, ad"),
    (
        "defaults: {tied: a}\nkernels: [[3,5,4,2]]",
        "1: defaults: unknown key 'tied'; did you mean stride? accepted: precision",
    ),
    (
        "kernels:\n- {pattern: [3,5,4,1], tied: ad}",
        "2: kernels[0]: tied=ad of 3,5,4,1, whose d is 1; accepted: tied=a",
    ),
    (
        "layers:\n  k: {chain: [[1,5,4,1], [1,3,5,1]], tied: [none, ad]}",
        "2: layers.k: tied=ad of 1,3,5,1, whose a and d is 1; accepted: tied=none",
    ),
    (
        "kernels:\n- {pattern: [3,5,4,2], tied: d, gradients: true}",
        "2: kernels[0]: gradients=true with tied=d; accepted: tied: none, since all weights get gradients",
    ),
    (
        "kernels:\n- {pattern: [3,5,4,2], tied: d, weights: int8}",
        "2: kernels[0]: tied=d with weights=int8; accepted: one of none, a, d, ad per factor, of a product",
    ),
    (
        "layers:\n  k: {chain: [[8,8,8,1], [1,8,8,8]], tied: a}",
        "2: layers.k.tied: got 'a'; accepted: a list with one of none, a, d, ad per factor",
    ),
    (
        "layers:\n  k: {chain: [[8,8,8,1], [1,8,8,8]], tied: [a]}",
        "2: layers.k.tied: got a of 2 factors; accepted: one of none, a, d, ad per factor of a chain",
    ),
    (
        "layers:\n  k: {group: [[[8,8,8,1], [1,8,8,8]]], tied: [a, d]}",
        "2: layers.k.tied: got a, d of a group; accepted: one of none, a, d, ad per factor of a chain",
    ),
    (
        "layers:\n  k: {sum: [[[3,8,8,1]], [[3,8,8,1]]], tied: [a, a]}",
        "2: layers.k.tied: got a, a of a sum; accepted: one of none, a, d, ad per factor of a chain",
    ),
    ("patterns: papre", "1: patterns: got 'papre'; did you mean paper? accepted: paper"),
    ("patterns:\n- paper", "1: patterns: got a list; accepted: paper"),
    ("kernels: [", "1: YAML: "),
    (
        "kernels:\n\t- 1,2,3,4",
        "2: YAML: found character '\\t' that cannot start any token; accepted: well-formed YAML",
    ),
    ("kernels:\n- 'open", "2: YAML: found unexpected end of stream"),
    ("a: b: c", "1: YAML: mapping values are not allowed here"),
    (
        "kernels:\n- &x [1,2,3,4]\n- *x",
        "2: kernels[0]: YAML anchors and aliases are not read; accepted: shared options under defaults",
    ),
    ("kernels:\n- *x", "2: kernels[0]: YAML anchors and aliases are not read"),
    (
        "kernels:\n- !!python/object/apply:os.system [ls]",
        "2: kernels[0]: the YAML tag 'tag:yaml.org,2002:python/object/apply:os.system'; accepted: values without a tag",
    ),
    ("kernels: [[1,2,3,4]]\n---\nkernels: [[1,2,3,4]]", "2: spec: another YAML document starts; accepted: one"),
    ("? [a, b]\n: c", "1: spec: a list as a key; accepted: a word"),
    (f"kernels: {DEEP}", "1: kernels[0][0][0][0][0][0][0]: nested more than 8 deep; accepted: the keys of a spec"),
    ('kernels:\n- "\x07"', "2: YAML: character '\\x07'; accepted: printable ones"),
    ('kernels: ["\\UFFFFFFFF"]', "1: YAML: an escape or a directive out of range; accepted: Unicode"),
]
WRONG_OPTIONS = [
    ("precision: flaot16", "precision: got 'flaot16'; did you mean float16? accepted: float32"),
    ("layout: {bsf: true}", "layout: got a mapping; accepted: bsf, bsl"),
    ("layout: [[bsf]]", "layout[0]: got a list; accepted: bsf, bsl"),
    ("layout: []", "layout: got an empty list; accepted: a value, or a list of them"),
    ("batch: 0", "batch: got 0; accepted: any, or a whole number from 1 up"),
    (f"batch: {2**63}", f"batch: got '{2**63}'; accepted: any, or a whole number from 1 up, and below 2^63"),
    (f"batch: {'9' * 5000}", f"batch: got '{'9' * 56}...; accepted: any, or a whole number from 1 up, and below 2^63"),
    ("batch: 1e3", "batch: got '1e3'; accepted: any, or a whole number from 1 up"),
    ("batch: all", "batch: got 'all'; accepted: any, or a whole number"),
    ("bias: yes", "bias: got 'yes'; accepted: true, false"),
    ("bias: 'true'", "bias: got 'true'; accepted: true, false"),
    ("residual:", "residual: got nothing; accepted: true, false"),
    ("gradients: 1", "gradients: got '1'; accepted: true, false"),
    ("stride: 384", "stride: got '384'; accepted: dense, any"),
    ("activation: gelu_than", "activation: got 'gelu_than'; did you mean gelu_tanh? accepted"),
]


def complaint(text: str) -> str:
    with pytest.raises(SpecError) as caught:
        parse(text, "models/my.yaml")
    message = str(caught.value)
    assert message.startswith("models/my.yaml:")
    assert "; " in message  # what is wrong; what is accepted
    assert "\n" not in message
    return message.removeprefix("models/my.yaml:")


@pytest.mark.parametrize(("text", "message"), WRONG, ids=range(len(WRONG)))
def test_a_mistake_is_named_in_one_line_with_its_place(text: str, message: str) -> None:
    assert complaint(text).startswith(message)


@pytest.mark.parametrize(("option", "message"), WRONG_OPTIONS, ids=range(len(WRONG_OPTIONS)))
def test_a_wrong_option_is_named_with_its_key(option: str, message: str) -> None:
    assert complaint(f"kernels:\n- pattern: 1,2,3,4\n  {option}").startswith(f"3: kernels[0].{message}")
    assert complaint(f"defaults:\n\n  {option}").startswith(f"3: defaults.{message}")


def test_a_spec_that_multiplies_out_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MOST_KERNELS", 3)
    parse("kernels: [{pattern: [1,2,3,4], batch: [1,2,3]}]")
    with pytest.raises(
        SpecError, match=r"3: kernels\[1\]: its lists of values ask for too many kernels; accepted: 3 in"
    ):
        parse("kernels:\n- {pattern: [1,2,3,4], batch: [1,2,3]}\n- 1,2,3,5")
