"""The models: sizes, the paper's chains, fused activations; equal to timm's and transformers' where those are
installed.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")

from ksgen.bench import models  # noqa: E402
from ksgen.errors import KsgenError  # noqa: E402  (after the skip)
from ksgen.spec import load  # noqa: E402

SPECS = Path(__file__).parents[2] / "specs"
SMALL_VIT = models.TransformerSize(features=384, depth=2, heads=6, epsilon=1e-6, activation="gelu", is_causal=False)
SMALL_GPT2 = models.TransformerSize(
    features=1024, depth=1, heads=16, epsilon=1e-5, activation="gelu_tanh", is_causal=True
)


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
    model = models.LanguageModel(SMALL_GPT2, models.Language(vocabulary=50, positions=16))
    return model.eval(), model.random_inputs(2, 7)


@pytest.mark.parametrize(
    ("name", "dense", "sparse"), [("vit-s16", 22_050_664, 8_189_800), ("gpt2-medium", 354_823_168, 77_999_104)]
)
def test_parameters_are_counted(name: str, dense: int, sparse: int) -> None:
    with torch.device("meta"):
        model = models.build(name)
    report = models.make_sparse(model, models.rule(name), from_weights=False)
    assert report.parameters == (dense, sparse)
    assert len(report.layers) == 4 * len(model.blocks)


def test_chains_are_those_of_the_specs_and_of_the_paper() -> None:
    vit = {key: [pattern.shape for pattern in each.chain] for key, each in models.rule("vit-s16").items()}
    square = [(2, 48, 192, 1), (1, 192, 48, 2)]
    down = [(6, 64, 256, 1), (1, 128, 128, 3)]
    assert vit == {"qkv": square, "projection": square, "up": [(6, 64, 64, 1), (1, 768, 192, 2)], "down": down}
    assert models.rule("vit-s16")["qkv"].count == 3
    gpt2 = {key: each.chain for key, each in models.rule("gpt2-medium").items()}
    assert gpt2 == load(SPECS / "gpt2.yaml").layers


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", models.MODELS)
def test_a_sparse_model_computes_what_its_layers_say(name: str) -> None:
    """The activation in the layer before it, the residual in the layer after it, q, k and v apart: against the same
    model without.
    """
    model, inputs = small(name)
    dense = model(inputs)
    models.make_sparse(model, models.rule(name), from_weights=False)
    block = model.blocks[0]
    assert (block.feed_forward.activation, block.feed_forward.up.activation != "none") == ("none", True)
    fused = model(inputs)
    assert fused.shape == dense.shape
    for each in model.blocks:
        each.feed_forward.activation, each.feed_forward.up.activation = each.feed_forward.up.activation, "none"
        each.feed_forward.down = torch.nn.Sequential(each.feed_forward.down)  # which takes no residual
        each.attention.qkv = torch.nn.Sequential(each.attention.qkv)
    torch.testing.assert_close(model(inputs), fused, rtol=1e-3, atol=1e-4)


def test_causal_attention_does_not_see_what_comes() -> None:
    model, tokens = small("gpt2-medium")
    changed = tokens.clone()
    changed[:, -1] = (changed[:, -1] + 1) % 50
    torch.testing.assert_close(model(changed)[:, :-1], model(tokens)[:, :-1])


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


@pytest.mark.parametrize(("name", "library"), [("vit-s16", "timm"), ("gpt2-medium", "transformers")])
def test_models_of_other_libraries_are_the_same_size(name: str, library: str) -> None:
    pytest.importorskip(library, reason=f"pip install {library}")
    with torch.device("meta"):
        ours, theirs = models.build(name), models.build(name, library)
    assert len(models.make_sparse(theirs, models.rule(name, library), from_weights=False).layers) == 4 * len(
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
        (("vit-b16",), "model 'vit-b16'; did you mean vit-s16? accepted: vit-s16, gpt2-medium"),
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
