"""The models: sizes, the paper's chains, fused activations; equal to timm's and transformers' where those are
installed.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.bench import models  # noqa: E402
from ksgen.bench.roster import MODELS  # noqa: E402
from ksgen.errors import KsgenError  # noqa: E402  (after the skip)
from ksgen.spec import load  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.layer.group import KSLinears  # noqa: E402

SPECS = Path(__file__).parents[2] / "specs"
SMALL_VIT = models.TransformerSize(features=384, depth=2, heads=6, epsilon=1e-6, activation="gelu", is_causal=False)
SMALL_GPT2 = models.TransformerSize(
    features=1024, depth=1, heads=16, epsilon=1e-5, activation="gelu_tanh", is_causal=True
)
SMALL_LLAMA = replace(models.LLAMA_1B, depth=1)


@pytest.fixture(autouse=True)
def _seed_and_one_thread() -> Iterator[None]:
    """Threads of several tests at once only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def small(name: str) -> tuple[Any, Any]:
    """A model of a block or two, and inputs."""
    if name == "vit-s16":
        model: Any = models.VisionTransformer(SMALL_VIT, models.Vision(pixels=32, classes=10))
        return model.eval(), model.random_inputs(2)
    ends = models.Language(vocabulary=50, positions=16)
    model = models.LanguageModel(SMALL_LLAMA if name.startswith("llama") else SMALL_GPT2, ends)
    return model.eval(), model.random_inputs(2, 7)


@pytest.mark.parametrize(
    ("name", "layers", "dense", "sparse"),
    [
        ("vit-s16", 4, 22_050_664, 8_189_800),
        ("gpt2-medium", 4, 354_823_168, 77_999_104),
        ("llama-1b", 7, 1_235_814_400, 306_251_776),
        ("llama-1b-blast", 7, 1_235_814_400, 500_500_480),
    ],
)
def test_parameters_are_counted(name: str, layers: int, dense: int, sparse: int) -> None:
    with torch.device("meta"):
        model = models.build(name)
    report = models.make_sparse(model, models.rule(name), from_weights=False)
    assert report.parameters == (dense, sparse)
    assert len(report.layers) == layers * len(model.blocks)


def test_chains_are_those_of_the_specs_and_of_the_paper() -> None:
    vit = {key: [pattern.shape for pattern in each.chain] for key, each in models.rule("vit-s16").items()}
    square = [(2, 48, 192, 1), (1, 192, 48, 2)]
    down = [(6, 64, 256, 1), (1, 128, 128, 3)]
    assert vit == {"qkv": square, "projection": square, "up": [(6, 64, 64, 1), (1, 768, 192, 2)], "down": down}
    assert models.rule("vit-s16")["qkv"].count == 3
    gpt2 = {key: each.chain for key, each in models.rule("gpt2-medium").items()}
    assert gpt2 == load(SPECS / "gpt2.yaml").layers
    llama = load(SPECS / "llama.yaml").layers
    assert [each.chain for each in models.rule("llama-1b").values()] == [
        llama[f"monarch_1b_{layer}"]
        for layer in ("attention", "key_value", "key_value", "attention", "up", "up", "down")
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", models.MODELS)
def test_a_sparse_model_computes_what_its_layers_say(name: str) -> None:
    """The activation in the layer before it, the residual in the layer after it, q, k and v apart: against the same
    model without.
    """
    model, inputs = small(name)
    dense = model(inputs)
    models.make_sparse(model, models.rule(name), from_weights=False)
    feed_forward = model.blocks[0].feed_forward
    activated = feed_forward.get_submodule(feed_forward.activated)
    assert (feed_forward.activation, activated.activation != "none") == ("none", True)
    fused = model(inputs)
    assert fused.shape == dense.shape
    for each in model.blocks:
        activated = each.feed_forward.get_submodule(each.feed_forward.activated)
        each.feed_forward.activation, activated.activation = activated.activation, "none"
        each.feed_forward.down = torch.nn.Sequential(each.feed_forward.down)  # which takes no residual
        for layer in set(dict(each.attention.named_children())) & {"qkv", "q", "k", "v"}:
            setattr(each.attention, layer, torch.nn.Sequential(each.attention.get_submodule(layer)))
    torch.testing.assert_close(model(inputs), fused, rtol=1e-3, atol=1e-4)


def test_vit_with_features_first_computes_the_same() -> None:
    """Feed-forward layers take features first; the layers around attention transpose."""
    model, images = small("vit-s16")
    models.make_sparse(model, models.rule("vit-s16"), from_weights=False)
    for block in model.blocks:
        for norm in (block.attention_norm, block.feed_forward_norm):
            torch.nn.init.normal_(norm.weight)
            torch.nn.init.normal_(norm.bias)
    wanted = model(images)
    model.put_features_first()
    seen = []
    for layer in model.modules():
        if isinstance(layer, KSLinear):
            layer.register_forward_pre_hook(lambda layer, given: seen.append((layer, given[0].shape)))
    torch.testing.assert_close(model(images), wanted, rtol=1e-3, atol=1e-4)
    shapes = {(layer.layout, layer.y_layout, tuple(shape)) for layer, shape in seen}
    assert shapes == {
        ("bsl", "bsf", (384, 2, 5)),  # q, k and v
        ("bsf", "bsl", (2, 5, 384)),  # the projection
        ("bsl", "bsl", (384, 2, 5)),  # up
        ("bsl", "bsl", (1536, 2, 5)),  # down
    }


@pytest.mark.parametrize("name", ["gpt2-medium", "llama-1b"])
def test_causal_attention_does_not_see_what_comes(name: str) -> None:
    model, tokens = small(name)
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    torch.testing.assert_close(model(changed)[:, :-1], model(tokens)[:, :-1])


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("name", ["gpt2-medium", "llama-1b"])
def test_tokens_are_decoded_one_by_one(name: str, is_sparse: bool) -> None:
    """A prompt, then single tokens, which attend to the cache of all before them."""
    model, tokens = small(name)
    if is_sparse:
        models.make_sparse(model, models.rule(name), from_weights=False)
    whole, length = model(tokens), tokens.shape[1]
    cache = model.begin_decoding(*tokens.shape)
    decoded = [model(tokens[:, : length - 3])]
    for at in range(length - 3, length):
        cache.length = at
        decoded.append(model(tokens[:, at : at + 1]))
    torch.testing.assert_close(torch.cat(decoded, dim=1), whole, rtol=1e-4, atol=1e-4)


def test_more_than_a_cache_can_hold_is_refused() -> None:
    model, tokens = small("llama-1b")
    cache = model.begin_decoding(2, 5)
    with pytest.raises(ValueError, match=r"7 tokens after 0 earlier ones; accepted: one token .*, and 5 in all"):
        model(tokens)
    model(tokens[:, :4])
    cache.length = 4
    with pytest.raises(ValueError, match="2 tokens after 4 earlier ones"):
        model(tokens[:, 4:6])
    model(tokens[:, 4:5])
    cache = model.begin_decoding(2, 20)
    cache.length = 16
    with pytest.raises(ValueError, match="17 tokens; accepted: 16"):
        model(tokens[:, :1])


def test_layers_of_queries_keys_and_values_are_a_group() -> None:
    model, _ = small("llama-1b")
    models.make_sparse(model, models.rule("llama-1b"), from_weights=False)
    for block in model.blocks:
        assert list(block.attention.qkv) == [block.attention.q, block.attention.k, block.attention.v]


def test_queries_keys_and_values_of_vit_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, images = small("vit-s16")
    models.make_sparse(model, models.rule("vit-s16"), from_weights=False)
    called: list[Any] = []
    parts = KSLinears.parts
    monkeypatch.setattr(KSLinears, "parts", lambda self, x: (called.append(self), parts(self, x))[1])
    model(images)
    assert called == [block.attention.qkv for block in model.blocks]


def test_vit_is_timms() -> None:
    timm = pytest.importorskip("timm", reason="pip install timm")
    theirs = timm.create_model("vit_small_patch16_224", pretrained=False, img_size=32, depth=2, num_classes=10).eval()
    ours, images = small("vit-s16")
    names = {
        "cls_token": "class_token", "pos_embed": "positions", "patch_embed.proj": "patches",
        ".norm1": ".attention_norm",
        ".norm2": ".feed_forward_norm", ".attn.proj": ".attention.projection", ".attn": ".attention",
        ".mlp.fc1": ".feed_forward.up",
        ".mlp.fc2": ".feed_forward.down",
    }  # fmt: skip
    ours.load_state_dict({_renamed(name, names): value for name, value in theirs.state_dict().items()})
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


def test_gpt2_is_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=1024, n_layer=1, n_head=16)
    theirs = transformers.GPT2LMHeadModel(config).eval()
    ours, tokens = small("gpt2-medium")
    names = {
        "transformer.": "", "wte": "tokens", "wpe": "positions", "h.0": "blocks.0", "ln_1": "attention_norm",
        "ln_2": "feed_forward_norm",
        "ln_f": "norm", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.projection",
        "mlp.c_fc": "feed_forward.up",
        "mlp.c_proj": "feed_forward.down",
    }  # fmt: skip
    state = {_renamed(name, names): value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    for name, value in state.items():
        if name.endswith(("qkv.weight", "projection.weight", "up.weight", "down.weight")):
            state[name] = value.T
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


def llama_of_transformers(**sizes: int) -> Any:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, vocab_size=50, rms_norm_eps=1e-5, rope_theta=5e5, tie_word_embeddings=True, **sizes
    )
    return transformers.LlamaForCausalLM(config).eval()


def test_llama_is_transformers() -> None:
    theirs = llama_of_transformers(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16
    )
    size = models.LlamaSize(features=64, depth=1, heads=4, key_heads=2, hidden=96, epsilon=1e-5, base=5e5)
    ours = models.LanguageModel(size, models.Language(vocabulary=50, positions=16)).eval()
    names = {
        "model.": "", "embed_tokens": "tokens", "layers.0": "blocks.0", "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm", "self_attn": "attention", "mlp": "feed_forward",
        "o_proj": "projection", "_proj": "",
    }  # fmt: skip
    ours.load_state_dict(
        {_renamed(name, names): value for name, value in theirs.state_dict().items() if name != "lm_head.weight"}
    )
    tokens = ours.random_inputs(2, 16)
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=1e-4, atol=1e-5)


def test_converted_llama_of_transformers_decodes_with_its_cache() -> None:
    """Prefill and decoding, token by token, agree."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 16}
    theirs = llama_of_transformers(hidden_size=2048, intermediate_size=8192, head_dim=512, **sizes)
    report = models.make_sparse(theirs, models.rule("llama-1b-blast", "transformers"), from_weights=False)
    assert [each.name.rpartition(".")[2] for each in report.layers] == [
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    ]  # fmt: skip
    with torch.no_grad():
        for layer in theirs.modules():
            if isinstance(layer, KSLinear):
                layer.backend = "einsum"
        tokens = torch.randint(50, (2, 7))
        prefilled = theirs(tokens, use_cache=True)
        first = theirs(tokens[:, :4], use_cache=True)
        logits = [first.logits]
        for place in range(4, 7):
            step = theirs(tokens[:, place : place + 1], past_key_values=first.past_key_values, use_cache=True)
            logits.append(step.logits)
        torch.testing.assert_close(torch.cat(logits, dim=1), prefilled.logits, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "library", "layers"),
    [
        ("vit-s16", "timm", 4),
        ("gpt2-medium", "transformers", 4),
        ("llama-1b", "transformers", 7),
        ("llama-1b-blast", "transformers", 7),
    ],
)
def test_models_of_other_libraries_are_the_same_size(name: str, library: str, layers: int) -> None:
    pytest.importorskip(library, reason=f"pip install {library}")
    with torch.device("meta"):
        ours, theirs = models.build(name), models.build(name, library)
    assert len(models.make_sparse(theirs, models.rule(name, library), from_weights=False).layers) == layers * len(
        ours.blocks
    )
    report = models.make_sparse(ours, models.rule(name), from_weights=False)
    assert sum(each.numel() for each in theirs.parameters()) == report.parameters[1]


def _renamed(name: str, names: dict[str, str]) -> str:
    for theirs, ours in names.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("vit-b16",), f"model 'vit-b16'; did you mean vit-s16? accepted: {', '.join(MODELS)}"),
        (("vit-s16", "transformers"), "library 'transformers' for vit-s16; accepted: torch, timm"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], message: str) -> None:
    for ask in (models.build, models.rule):
        with pytest.raises(KsgenError) as caught:
            ask(*arguments)
        assert str(caught.value) == message


def test_a_library_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "timm", None)
    with pytest.raises(KsgenError, match="timm is not installed; pip install timm, or take library='torch'"):
        models.build("vit-s16", "timm")
