"""PEFT's layers with ksgen's forward passes give PEFT's results, step by step."""

import copy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.libraries import library

torch, peft, transformers = library("torch"), library("peft"), library("transformers")

from peft.tuners.boft import layer as boft  # noqa: E402  (after the skip)
from torch import Tensor, nn  # noqa: E402

from ksgen.errors import SpecError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.peft import BOFTLinear, GraLoRALinear, OFTRotation, accelerate, combine, replace_extension, rotate  # noqa: E402

CONFIGURATIONS: dict[str, Callable[..., Any]] = {
    "oft": lambda **more: peft.OFTConfig(oft_block_size=8, **more),
    "oft of blocks": lambda **more: peft.OFTConfig(r=2, oft_block_size=0, num_cayley_neumann_terms=7, **more),
    "oft constrained": lambda **more: peft.OFTConfig(oft_block_size=8, coft=True, eps=1e-2, **more),
    "oft shared": lambda **more: peft.OFTConfig(oft_block_size=8, block_share=True, module_dropout=0.5, **more),
    "oft solved": lambda **more: peft.OFTConfig(oft_block_size=8, use_cayley_neumann=False, **more),
    "oft 3 terms": lambda **more: peft.OFTConfig(oft_block_size=8, num_cayley_neumann_terms=3, **more),
    "boft": lambda **more: peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=1, **more),
    "boft of 2 factors": lambda **more: peft.BOFTConfig(boft_block_size=4, boft_n_butterfly_factor=2, **more),
    "boft with dropout": lambda **more: peft.BOFTConfig(
        boft_block_num=4, boft_block_size=0, boft_n_butterfly_factor=3, boft_dropout=0.5, bias="boft_only", **more
    ),
    "gralora": lambda **more: peft.GraloraConfig(r=8, gralora_k=2, **more),
    "gralora with dropout": lambda **more: peft.GraloraConfig(r=8, gralora_k=4, gralora_dropout=0.3, **more),
    "gralora hybrid": lambda **more: peft.GraloraConfig(r=4, gralora_k=2, hybrid_r=3, gralora_dropout=0.3, **more),
}
ONE_OF_EACH = ["oft", "boft of 2 factors", "gralora hybrid"]
TARGETS = ["q_proj", "v_proj", "down_proj"]


@pytest.fixture(autouse=True)
def all_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boft, "_FBD_CUDA", None)
    replace_extension()


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama(dtype: Any = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=48, attention_bias=True)).to(dtype)


def adapted(name: str, dtype: Any = torch.float32, **more: Any) -> tuple[Any, Any]:
    """A model with PEFT's layers, and an accelerated copy of it."""
    model = llama(dtype)
    torch.manual_seed(1)
    options: dict[str, Any] = {"target_modules": TARGETS, "init_weights": False} | more
    ours = peft.get_peft_model(model, CONFIGURATIONS[name](**options))
    theirs = copy.deepcopy(ours)
    assert len(accelerate(ours)) == 6
    return theirs, ours


def losses(model: Any, steps: int = 4) -> list[float]:
    optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
    model.train()
    found, tokens = [], torch.arange(30).view(3, 10) % 7
    for step in range(steps):
        torch.manual_seed(step)  # of dropout
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


def logits(model: Any) -> Tensor:
    model.eval()
    with torch.no_grad():
        found: Tensor = model(input_ids=torch.arange(20).view(2, 10)).logits
    return found


def assert_same(theirs: Any, ours: Any, **tolerance: float) -> None:
    expected, found = theirs.state_dict(), ours.state_dict()
    assert list(found) == list(expected)
    for name, each in expected.items():
        torch.testing.assert_close(found[name], each, msg=lambda text, name=name: f"{name}: {text}", **tolerance)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_that_of_peft(name: str) -> None:
    theirs, ours = adapted(name)
    before = losses(theirs)
    assert before[-1] < before[0]
    assert losses(ours) == pytest.approx(before, rel=1e-5)
    assert_same(theirs, ours, rtol=1e-3, atol=1e-4)  # Adam divides by the root of gradients near zero
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_training_in_bfloat16(name: str, casts: bool) -> None:
    """With adapters in float32, as PEFT casts them, and in bfloat16."""
    model = llama(torch.bfloat16)
    torch.manual_seed(1)
    configuration = CONFIGURATIONS[name](target_modules=TARGETS, init_weights=False)
    ours = peft.get_peft_model(model, configuration, autocast_adapter_dtype=casts)
    theirs = copy.deepcopy(ours)
    accelerate(ours)
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-2)
    assert_same(theirs, ours, rtol=0, atol=6e-2)
