"""Share of feed-forward linear layers in a vision transformer's forward pass: the paper's Table 6, with dense layers.

The layers are timed alone, on inputs of their size, alternating with the full model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ksgen.bench.clock import Spread, seconds_in_turn
from ksgen.bench.models import VIT_S16, TransformerSize, Vision, VisionTransformer
from ksgen.bench.published import published
from ksgen.measure.trust import Watch, doubt

MODELS = {  # names in the paper
    "ViT-S/16": (VIT_S16, Vision()),
    "ViT-B/16": (replace(VIT_S16, features=768, heads=12), Vision()),
    "ViT-L/16": (replace(VIT_S16, features=1024, heads=16, depth=24), Vision()),
    "ViT-H/14": (replace(VIT_S16, features=1280, heads=16, depth=32), Vision(patch=14)),
}


@dataclass(frozen=True)
class Share:
    """Share of one model in one precision."""

    model: str
    precision: str
    whole_us: float
    layers_us: float  # microseconds of all these layers
    share: float
    paper: float | None
    others_share: float | None = None  # share of processor time that other programs used
    doubt: str = ""  # why the share is unreliable; empty if it is reliable


def measure(
    names: tuple[str, ...], precisions: tuple[str, ...], where: torch.device, batch: int, repeats: int
) -> Iterator[Share]:
    """Measure a share per model and precision. Only one model at a time is in memory."""
    watch = Watch()
    for name in names:
        for precision in precisions:
            shape, ends = MODELS[name]
            with where:
                model = VisionTransformer(shape, ends).to(getattr(torch, precision)).eval()
            with torch.inference_mode():
                seconds = seconds_in_turn(_calls(model, shape, batch), repeats, where)
            whole, up, down = (Spread.of(seconds[each]).median for each in ("whole", "up", "down"))
            layers, others = shape.depth * (up + down), watch.others_share()
            rounds = zip(seconds["up"], seconds["down"], seconds["whole"], strict=True)
            shares = [shape.depth * (first + second) / all_s for first, second, all_s in rounds]
            why, paper = doubt(shares, [others] if where.type == "cpu" else ()), published()["vit_linear_share"][name]
            yield Share(name, precision, 1e6 * whole, 1e6 * layers, layers / whole, paper.get(precision), others, why)


def _calls(model: VisionTransformer, shape: TransformerSize, batch: int) -> dict[str, Callable[[], Tensor]]:
    """Calls of the full model, and of the two linear layers of its first block."""
    images = model.random_inputs(batch)
    layers = model.get_submodule("blocks.0.feed_forward")
    up, down = layers.get_submodule("up"), layers.get_submodule("down")
    narrow = torch.randn(batch, model.positions.shape[1], shape.features, dtype=images.dtype, device=images.device)
    wide = torch.randn(batch, model.positions.shape[1], 4 * shape.features, dtype=images.dtype, device=images.device)
    return {"whole": lambda: model(images), "up": lambda: up(narrow), "down": lambda: down(wide)}
