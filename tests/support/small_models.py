"""Models of `ksgen bench` with one block each, of the same layers."""

from dataclasses import replace

import pytest

from ksgen.bench import models, whole_models


def use_small_models(monkeypatch: pytest.MonkeyPatch, depth: int = 1) -> None:
    """Build models with `depth` blocks until the test ends."""
    vit, gpt2 = replace(models.VIT_S16, depth=depth), replace(models.GPT2_MEDIUM, depth=depth)
    llama = replace(models.LLAMA_1B, depth=depth)
    small = {
        "vit-s16": lambda: models.VisionTransformer(vit, models.Vision(pixels=32, classes=10)),
        "gpt2-medium": lambda: models.LanguageModel(gpt2, models.Language(vocabulary=50, positions=64)),
        "llama-1b": lambda: models.LanguageModel(llama, models.Language(vocabulary=50, positions=64)),
        "llama-1b-blast": lambda: models.LanguageModel(llama, models.Language(vocabulary=50, positions=64)),
    }
    for name, build in small.items():
        monkeypatch.setitem(models.MODELS, name, {"torch": replace(models.MODELS[name]["torch"], build=build)})
    monkeypatch.setattr(whole_models, "size_of", whole_models.size_of.__wrapped__)
