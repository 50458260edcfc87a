"""`ksgen bench share`: the paper's Table 6 on a model of two blocks, and the models' own sizes."""

import json
from dataclasses import replace
from typing import Any

import pytest

from ksgen.bench.tables import published
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from ksgen.bench import model  # noqa: E402  (PyTorch may be missing)
from ksgen.bench.models import VIT_S16, VisionTransformer  # noqa: E402
from ksgen.commands import bench_models  # noqa: E402
from tests.support.bench_share import run  # noqa: E402

PARAMETERS = {"ViT-S/16": 22.05, "ViT-B/16": 86.57, "ViT-L/16": 304.33, "ViT-H/14": 632.05}  # millions, as published


@pytest.mark.parametrize("name", PARAMETERS)
def test_models_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        made = VisionTransformer(*model.VISION_MODELS[name])
    assert sum(each.numel() for each in made.parameters()) / 1e6 == pytest.approx(PARAMETERS[name], abs=0.01)
    assert tuple(model.VISION_MODELS) == bench_models.SHARE_MODELS == tuple(published()["vit_linear_share"])


def test_a_share_is_a_part_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    small = replace(VIT_S16, depth=2)
    monkeypatch.setitem(model.VISION_MODELS, "ViT-S/16", (small, model.VISION_MODELS["ViT-S/16"][1]))
    taken = {"whole": [10.0, 20.0, 30.0], "up": [1.0, 2.0, 3.0], "down": [3.0, 3.0, 3.0]}

    def in_turn(calls: Any, repeats: int, device: Any) -> Any:
        assert [tuple(call().shape) for call in calls.values()] == [(1, 1000), (1, 197, 1536), (1, 197, 384)]
        return taken

    monkeypatch.setattr(model, "seconds_in_turn", in_turn)
    found = json.loads(run("--batch", "1", "--json").stdout)["shares"]
    for each in found:
        each.pop("others_share"), each.pop("doubt")  # this machine's
    assert found == [
        {"model": "ViT-S/16", "precision": "float32", "whole_us": 2e7, "layers_us": 1e7, "share": 0.5, "paper": 0.46},
    ]
    shown = run("--batch", "1", "--precision", "float32").stdout
    assert "50 %" in shown
    assert "46 %" in shown
