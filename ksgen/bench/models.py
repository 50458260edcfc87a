"""Dense and Kronecker-sparse ViT-S/16, GPT-2 medium and Llama 1B, in plain PyTorch or from timm and transformers.

Weights are random, never downloaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ksgen.errors import SpecError, ToolchainError
from ksgen.paths import resource
from ksgen.spec import load
from ksgen.spec.kernel import hint, is_word
from ksgen.torch.conversion.convert import Report, convert
from ksgen.torch.conversion.rule import RuleEntry
from ksgen.torch.layer.group import KSLinears
from ksgen.torch.layer.linear import KSLinear
from ksgen.torch.operators.products import ACTIVATIONS
from ksgen.values import excerpt


@dataclass(frozen=True)
class TransformerSize:
    """Size of a transformer's blocks."""

    features: int
    depth: int
    heads: int
    epsilon: float  # added to the variance in normalisations
    activation: str
    is_causal: bool
    is_rotary = False

    def norm(self) -> nn.Module:
        return nn.LayerNorm(self.features, self.epsilon)

    def block(self) -> "TransformerBlock":
        return TransformerBlock(
            self.norm, JointAttention(self), FeedForward(self.features, 4 * self.features, self.activation)
        )

    def blocks(self, positions: int) -> nn.Sequential:
        return nn.Sequential(*(self.block() for _ in range(self.depth)))


@dataclass(frozen=True)
class LlamaSize:
    """Size of a Llama's blocks."""

    features: int
    depth: int
    heads: int
    key_heads: int  # heads of keys and values, each shared by heads / key_heads queries
    hidden: int  # features of the feed-forward layers
    epsilon: float
    base: float  # base of the rotation's angles
    is_rotary = True

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.features, self.epsilon)

    def blocks(self, positions: int) -> nn.Sequential:
        rotary = Rotary(self.features // self.heads, positions, self.base)
        return nn.Sequential(*(self.block(rotary) for _ in range(self.depth)))

    def block(self, rotary: "Rotary") -> "TransformerBlock":
        attention = LlamaAttention(self, rotary)
        return TransformerBlock(self.norm, attention, FeedForward(self.features, self.hidden, "silu", is_gated=True))


@dataclass(frozen=True)
class Vision:
    """Input and output sizes of a vision transformer: square images to classes."""

    pixels: int = 224
    patch: int = 16
    classes: int = 1000


@dataclass(frozen=True)
class Language:
    """Input and output sizes of a language model: tokens to tokens."""

    vocabulary: int = 50257
    positions: int = 1024


VIT_S16 = TransformerSize(features=384, depth=12, heads=6, epsilon=1e-6, activation="gelu", is_causal=False)
GPT2_MEDIUM = TransformerSize(features=1024, depth=24, heads=16, epsilon=1e-5, activation="gelu_tanh", is_causal=True)
LLAMA_1B = LlamaSize(features=2048, depth=16, heads=32, key_heads=8, hidden=8192, epsilon=1e-5, base=5e5)
LLAMA_ENDS = Language(vocabulary=128256, positions=2048)


class KeyValueCache:
    """Keys and values of a causal model's earlier tokens. The first call may have several tokens, later ones have one.

    Callers advance `length`, the number of earlier tokens.
    """

    def __init__(self, batch: int, tokens: int) -> None:
        self.size, self.length = (batch, tokens), 0
        self._kept: dict[nn.Module, Tensor] = {}

    def extend(self, owner: nn.Module, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store an attention layer's keys and values, and return them with all earlier ones.

        `ValueError` for more tokens than the cache's size, or for several tokens after earlier ones.
        """
        batch, tokens = self.size
        if owner not in self._kept:
            self._kept[owner] = k.new_zeros(2, batch, k.shape[1], tokens, k.shape[3])
        kept, end = self._kept[owner], self.length + k.shape[2]
        if end > tokens or (self.length and k.shape[2] > 1):
            raise ValueError(
                f"{k.shape[2]} tokens after {self.length} earlier ones; accepted: one token after earlier ones, and "
                f"{tokens} in all"
            )
        kept[0, :, :, self.length : end], kept[1, :, :, self.length : end] = k, v
        return kept[0, :, :, :end], kept[1, :, :, :end]


class Attention(nn.Module):
    """Attention, added to a residual. Subclasses have the layers of queries, keys and values, and `projection`."""

    projection: nn.Module
    cache: KeyValueCache | None = None

    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        first = self.cache.length if self.cache else 0
        q, k, v = self.heads_of(x, first)
        if self.cache:
            k, v = self.cache.extend(self, k, v)
        mixed = functional.scaled_dot_product_attention(
            q, k, v, is_causal=self.is_causal and not first, enable_gqa=k.shape[1] < q.shape[1]
        )
        return _added(self.projection, mixed.transpose(1, 2).flatten(2), residual)

    def heads_of(self, x: Tensor, first: int) -> Sequence[Tensor]:
        """Queries, keys and values (batch, heads, tokens, features of a head) of tokens from position `first` on."""
        raise NotImplementedError


class JointAttention(Attention):
    """Attention with one layer for queries, keys and values."""

    def __init__(self, shape: TransformerSize) -> None:
        super().__init__(shape.is_causal)
        self.heads = shape.heads
        self.qkv: nn.Module = nn.Linear(shape.features, 3 * shape.features)
        self.projection = nn.Linear(shape.features, shape.features)

    def heads_of(self, x: Tensor, first: int) -> Sequence[Tensor]:
        parts: Sequence[Tensor]
        if isinstance(self.qkv, KSLinears):
            parts = self.qkv.parts(x)
        elif isinstance(self.qkv, nn.ModuleList):
            parts = [layer(x) for layer in self.qkv]
        else:
            parts = self.qkv(x).chunk(3, dim=-1)
        return [part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts]


class Rotary(nn.Module):
    """Rotation of each head's pairs (i, i + width / 2) by angles that grow with the position."""

    def __init__(self, width: int, positions: int, base: float) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(positions), base ** (-torch.arange(0, width, 2) / width)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor, first: int) -> Tensor:
        left, right = x.chunk(2, dim=-1)
        positions = slice(first, first + x.shape[-2])
        if positions.stop > len(self.cos):
            raise ValueError(f"{positions.stop} tokens; accepted: {len(self.cos)}")
        return x * self.cos[positions] + torch.cat([-right, left], dim=-1) * self.sin[positions]


class LlamaAttention(Attention):
    """Causal attention whose queries share keys and values, with rotated queries and keys."""

    def __init__(self, shape: LlamaSize, rotary: Rotary) -> None:
        super().__init__(is_causal=True)
        self.rotary = rotary
        self.width = shape.features // shape.heads
        self.qkv: KSLinears | None = None
        self.q = nn.Linear(shape.features, shape.features, bias=False)
        self.k = nn.Linear(shape.features, shape.key_heads * self.width, bias=False)
        self.v = nn.Linear(shape.features, shape.key_heads * self.width, bias=False)
        self.projection = nn.Linear(shape.features, shape.features, bias=False)

    def heads_of(self, x: Tensor, first: int) -> Sequence[Tensor]:
        parts = self.qkv.parts(x) if isinstance(self.qkv, KSLinears) else [self.q(x), self.k(x), self.v(x)]
        q, k, v = (part.unflatten(-1, (-1, self.width)).transpose(1, 2) for part in parts)
        return self.rotary(q, first), self.rotary(k, first), v

    def fuse(self) -> None:
        """Group sparse layers of queries, keys and values, so that one launch may compute all three."""
        layers = [self.q, self.k, self.v]
        if all(isinstance(layer, KSLinear) for layer in layers):
            self.qkv = KSLinear.group(layers)


class FeedForward(nn.Module):
    """down(activation(up(x))), or with a gate, as in Llama, down(activation(gate(x)) * up(x)) without biases."""

    def __init__(self, features: int, hidden: int, activation: str, is_gated: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate = nn.Linear(features, hidden, bias=False) if is_gated else None
        self.up = nn.Linear(features, hidden, bias=not is_gated)
        self.down = nn.Linear(hidden, features, bias=not is_gated)

    @property
    def activated(self) -> str:
        """Name of the layer before the activation."""
        return "up" if self.gate is None else "gate"

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        inner = ACTIVATIONS[self.activation].apply(self.get_submodule(self.activated)(x))
        return _added(self.down, inner if self.gate is None else inner * self.up(x), residual)

    def fuse(self) -> None:
        """Move the activation into the layer before it, which applies it inside its kernel."""
        if isinstance(layer := self.get_submodule(self.activated), KSLinear):
            layer.activation, self.activation = self.activation, "none"


class TransformerBlock(nn.Module):
    def __init__(self, norm: Callable[[], nn.Module], attention: nn.Module, feed_forward: FeedForward) -> None:
        super().__init__()
        self.attention_norm = norm()
        self.attention = attention
        self.feed_forward_norm = norm()
        self.feed_forward = feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.attention_norm(x), x)
        return self.feed_forward(self.feed_forward_norm(x), x)


class FeatureNorm(nn.Module):
    """Layer normalisation over the first axis, with the parameters of an `nn.LayerNorm`."""

    def __init__(self, norm: nn.LayerNorm) -> None:
        super().__init__()
        self.weight, self.bias, self.epsilon = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        # batch normalisation of columns reads x in its order in memory; layer normalisation would transpose it
        normal = functional.batch_norm(x.flatten(1), None, None, training=True, eps=self.epsilon)
        return (normal * self.weight[:, None]).add_(self.bias[:, None]).view_as(x)


class VisionTransformer(nn.Module):
    """Vision transformer from (batch, 3, pixels, pixels) to (batch, classes)."""

    layout = "bsf"  # of the blocks: (batch, tokens, features), or "bsl", (features, batch, tokens)

    def __init__(self, shape: TransformerSize = VIT_S16, ends: Vision = Vision()) -> None:
        super().__init__()
        self.pixels, patches = ends.pixels, (ends.pixels // ends.patch) ** 2
        self.patches = nn.Conv2d(3, shape.features, ends.patch, ends.patch)
        self.class_token = nn.Parameter(torch.zeros(1, 1, shape.features))
        self.positions = nn.Parameter(0.02 * torch.randn(1, patches + 1, shape.features))
        self.blocks = shape.blocks(patches + 1)
        self.norm = shape.norm()
        self.head = nn.Linear(shape.features, ends.classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1) + self.positions
        is_bsf = self.layout == "bsf"
        x = self.blocks(x) if is_bsf else self.blocks(x.movedim(-1, 0).contiguous()).movedim(0, -1)
        return self.head(self.norm(x[:, 0]))

    def put_features_first(self) -> None:
        """Change the layout of the blocks to "bsl"; all their linear layers must be sparse.

        Attention multiplies in batch-size-first: the layers before and after it transpose.
        """
        self.layout, blocks = "bsl", list[Any](self.blocks)
        for block in blocks:
            block.attention_norm, block.feed_forward_norm = map(
                FeatureNorm, (block.attention_norm, block.feed_forward_norm)
            )
            block.attention.qkv = nn.ModuleList(block.attention.qkv)  # layers that transpose form no group
            for layer in block.attention.qkv:
                layer.layout, layer.out_layout = "bsl", "bsf"
            block.attention.projection.out_layout = "bsl"
            block.feed_forward.up.layout = block.feed_forward.down.layout = "bsl"

    def random_inputs(self, batch: int, tokens: int = 0) -> Tensor:
        """Random images on the model's device, in its dtype; `tokens` is for language models."""
        return torch.randn(batch, 3, self.pixels, self.pixels, dtype=self.positions.dtype, device=self.positions.device)


class LanguageModel(nn.Module):
    """Language model from (batch, tokens) to (batch, tokens, vocabulary); the head shares the embedding's weight."""

    cache: KeyValueCache | None = None

    def __init__(self, shape: TransformerSize | LlamaSize = GPT2_MEDIUM, ends: Language = Language()) -> None:
        super().__init__()
        self.tokens = nn.Embedding(ends.vocabulary, shape.features)
        self.positions = None if shape.is_rotary else nn.Embedding(ends.positions, shape.features)
        self.blocks = shape.blocks(ends.positions)
        self.norm = shape.norm()
        for embedding in filter(None, (self.tokens, self.positions)):
            nn.init.normal_(embedding.weight, std=0.02)

    def begin_decoding(self, batch: int, tokens: int) -> KeyValueCache:
        """Cache the keys and values of all following calls, for at most `tokens` tokens."""
        cache = KeyValueCache(batch, tokens)
        for module in self.modules():
            if isinstance(module, Attention):
                module.cache = cache
        self.cache = cache
        return cache

    def forward(self, tokens: Tensor) -> Tensor:
        x, first = self.tokens(tokens), self.cache.length if self.cache else 0
        if self.positions is not None:
            x = x + self.positions(torch.arange(first, first + tokens.shape[1], device=tokens.device))
        return functional.linear(self.norm(self.blocks(x)), self.tokens.weight)

    def random_inputs(self, batch: int, tokens: int) -> Tensor:
        """Random tokens on the model's device."""
        return torch.randint(self.tokens.num_embeddings, (batch, tokens), device=self.tokens.weight.device)


def _added(layer: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
    """Compute residual + layer(x), inside the layer's kernel if possible."""
    return layer(x, residual) if isinstance(layer, KSLinear) else residual + layer(x)


@dataclass(frozen=True)
class ModelSource:
    """A library's model: its constructor, and its layers.

    `layers` maps names of layers in the model to a layer of the spec and the number of its chains side by side. That is
    3 for queries, keys and values.
    """

    build: Callable[[], nn.Module]
    layers: Mapping[str, tuple[str, int]]
    has_biases: bool = True


def _gpt2_of_transformers() -> nn.Module:
    library = _imported("transformers")
    shape, ends = GPT2_MEDIUM, Language()
    config = library.GPT2Config(
        vocab_size=ends.vocabulary,
        n_positions=ends.positions,
        n_embd=shape.features,
        n_layer=shape.depth,
        n_head=shape.heads,
    )
    return library.GPT2LMHeadModel(config)


def _llama_of_transformers() -> nn.Module:
    library, shape, ends = _imported("transformers"), LLAMA_1B, LLAMA_ENDS
    config = library.LlamaConfig(
        vocab_size=ends.vocabulary,
        max_position_embeddings=ends.positions,
        hidden_size=shape.features,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.depth,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        rms_norm_eps=shape.epsilon,
        rope_theta=shape.base,
        tie_word_embeddings=True,
    )
    return library.LlamaForCausalLM(config)


def _imported(library: str) -> Any:
    try:
        return import_module(library)
    except ImportError as error:
        raise ToolchainError(f"{library} is not installed; pip install {library}, or take library='torch'") from error


def _llama(family: str) -> dict[str, ModelSource]:
    """Sources of a Llama whose layers are chains of a family: monarch or blast."""
    names = {
        "q": "attention", "k": "key_value", "v": "key_value", "projection": "attention", "gate": "up", "up": "up",
        "down": "down",
    }  # fmt: skip
    transformers_names = {"projection": "o_proj"} | {name: f"{name}_proj" for name in names if name != "projection"}
    chains = {name: (f"{family}_1b_{layer}", 1) for name, layer in names.items()}
    return {
        "torch": ModelSource(lambda: LanguageModel(LLAMA_1B, LLAMA_ENDS), chains, has_biases=False),
        "transformers": ModelSource(
            _llama_of_transformers,
            {transformers_names[name]: chain for name, chain in chains.items()},
            has_biases=False,
        ),
    }


_OUR_LAYERS = {"projection": ("projection", 1), "up": ("up", 1), "down": ("down", 1)}
MODELS: dict[str, dict[str, ModelSource]] = {
    "vit-s16": {
        "torch": ModelSource(
            VisionTransformer, {**_OUR_LAYERS, "qkv": ("attention", 3), "projection": ("attention", 1)}
        ),
        "timm": ModelSource(
            lambda: _imported("timm").create_model("vit_small_patch16_224", pretrained=False),
            {"qkv": ("attention", 3), "*.attn.proj": ("attention", 1), "fc1": ("up", 1), "fc2": ("down", 1)},
        ),
    },
    "gpt2-medium": {
        "torch": ModelSource(LanguageModel, {**_OUR_LAYERS, "qkv": ("qkv", 1)}),
        "transformers": ModelSource(
            _gpt2_of_transformers,
            {"c_attn": ("qkv", 1), "*.attn.c_proj": ("projection", 1), "c_fc": ("up", 1), "*.mlp.c_proj": ("down", 1)},
        ),
    },
    "llama-1b": _llama("monarch"),
    "llama-1b-blast": _llama("blast"),
}
SPECS = {"vit-s16": "vit.yaml", "gpt2-medium": "gpt2.yaml", "llama-1b": "llama.yaml", "llama-1b-blast": "llama.yaml"}
ROLES = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}  # words of `roster.LAYERS` for layers with other names


def build(name: str, library: str = "torch") -> nn.Module:
    """Create a dense model with random weights: vit-s16 (torch, timm), or another of `MODELS` (torch, transformers)."""
    return _source(name, library).build()


def rule(name: str, library: str = "torch") -> dict[str, RuleEntry]:
    """Chains of the shipped spec for the model's layers, as a rule for `convert`."""
    source = _source(name, library)
    chains = load(resource("specs") / SPECS[name]).layers
    return {key: RuleEntry(chains[layer], count) for key, (layer, count) in source.layers.items()}


def make_sparse(model: nn.Module, rule: Mapping[str, RuleEntry], **options: Any) -> Report:
    """Convert a model in place.

    Activations move into the kernels of the layers before them, and layers on one x become a group.
    """
    report = convert(model, rule, **options)
    for module in list(model.modules()):
        if isinstance(module, FeedForward | LlamaAttention):
            module.fuse()
    return report


def set_backend(model: nn.Module, backend: str) -> None:
    """Set the backend of all sparse layers of a model."""
    for layer in model.modules():
        if isinstance(layer, KSLinear):
            layer.backend = backend


def _source(name: str, library: str) -> ModelSource:
    if not is_word(name, MODELS):
        raise SpecError(f"model {excerpt(name)}; {hint(name, MODELS)}")
    if not is_word(library, MODELS[name]):
        raise SpecError(f"library {excerpt(library)} for {name}; {hint(library, MODELS[name])}")
    return MODELS[name][library]
