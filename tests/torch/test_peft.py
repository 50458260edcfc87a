"""PEFT's layers with ksgen's forward passes give PEFT's results, step by step."""

import copy
import doctest
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.libraries import library

torch, peft, transformers = library("torch"), library("peft"), library("transformers")

from peft.tuners.boft import layer as boft  # noqa: E402  (after the skip)
from torch import Tensor, nn  # noqa: E402

import ksgen.torch.peft  # noqa: E402
from ksgen import structures  # noqa: E402
from ksgen.errors import LaunchError, SpecError  # noqa: E402
from ksgen.torch import KSLinear  # noqa: E402
from ksgen.torch.operators import trained  # noqa: E402
from ksgen.torch.operators.choice import has_kernels  # noqa: E402
from ksgen.torch.operators.products import chain_to_dense  # noqa: E402
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


def llama(dtype: Any = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    configuration = transformers.LlamaConfig(**sizes, vocab_size=48, attention_bias=True)
    model = transformers.LlamaForCausalLM(configuration)
    for name, each in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(each)
    return model.to(dtype)


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


STATES: dict[str, tuple[Any, Any]] = {
    "oft": (peft.OFTConfig(oft_block_size=6), structures.oft(24, block=6)),
    "oft of 7 terms": (
        peft.OFTConfig(oft_block_size=6, num_cayley_neumann_terms=7), structures.oft(24, block=6, terms=7)
    ),
    "oft solved": (
        peft.OFTConfig(oft_block_size=6, use_cayley_neumann=False), structures.oft(24, block=6, terms=None)
    ),
    "boft": (peft.BOFTConfig(boft_block_size=6, boft_n_butterfly_factor=3), structures.boft(24, block=6, factors=3)),
    "boft of one factor": (
        peft.BOFTConfig(boft_block_size=6, boft_n_butterfly_factor=1), structures.boft(24, block=6, factors=1)
    ),
    "gralora": (peft.GraloraConfig(r=6, gralora_k=3), structures.gralora(24, 18, blocks=3, rank=6)),
    "lora": (peft.LoraConfig(r=4, lora_alpha=12), structures.low_rank(24, 18, rank=4)),
    "lokr": (peft.LoKrConfig(r=32, alpha=16), structures.kronecker(24, 18, blocks=(3, 4))),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_state_dicts_become_layers_and_come_back(name: str) -> None:
    """The layer computes what PEFT's module does with the same parameters: a rotation, or an unscaled update."""
    torch.manual_seed(0)
    configuration, structure = STATES[name]
    configuration.target_modules, configuration.init_lora_weights = ["0"], False
    configuration.init_weights = False
    base = nn.Linear(24, 18)
    model = peft.get_peft_model(nn.Sequential(copy.deepcopy(base)), configuration)
    prefix, module = "base_model.model.0.", model.base_model.model[0]
    state = {key.removeprefix(prefix): value for key, value in peft.get_peft_model_state_dict(model).items()}
    if "boft_s" in state:
        with pytest.raises(LaunchError, match="boft: got boft_s that is not 1"):
            KSLinear.from_structure(structure, state)
        module.boft_s["default"].data.fill_(1)
    layer, x = KSLinear.from_structure(structure, state), torch.randn(5, 24)
    assert layer.bias is None
    rotates = layer.out_features == 24
    ours = base(layer(x)) if rotates else base(x) + module.scaling["default"] * layer(x)
    torch.testing.assert_close(ours, module(x), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(ours, base(x), atol=1e-2)
    back = structure.to_state([each.detach() for each in layer.weights], names=state)
    assert back.keys() == state.keys() - {"boft_s"}
    again = structure.from_state(back)
    for weights, each in zip(again, layer.weights, strict=True):
        torch.testing.assert_close(weights, each.detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_training_is_that_of_peft(name: str) -> None:
    theirs, ours = adapted(name)
    before = losses(theirs)
    assert before[-1] < before[0]
    assert losses(ours) == pytest.approx(before, rel=1e-5)
    assert_same(theirs, ours, rtol=1e-3, atol=1e-4)  # Adam divides by the root of gradients near zero
    torch.testing.assert_close(logits(ours), logits(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not has_kernels(torch.device("cpu")), reason="prepared steps are for kernels on the processor")
@pytest.mark.parametrize("fastest", ["ksgen", "bmm", "each"])
@pytest.mark.parametrize("name", ["oft", "boft of 2 factors"])
def test_prepared_steps_train_like_peft(name: str, fastest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call at a shape takes the usual path, and later ones take the fastest method."""
    asked: list[list[str]] = []

    def faster(job: Any, methods: Any) -> str:
        asked.append(list(methods))
        return fastest

    monkeypatch.setattr(trained, "faster", faster)
    monkeypatch.setattr(trained, "_steps", {})
    theirs, ours = adapted(name)
    assert losses(ours) == pytest.approx(losses(theirs), rel=1e-5)
    assert_same(theirs, ours, rtol=1e-3, atol=1e-4)
    assert asked
    assert all(fastest in methods for methods in asked)


@pytest.mark.exhaustive
@pytest.mark.parametrize("casts", [True, False])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_training_in_bfloat16(name: str, casts: bool) -> None:
    """PEFT casts adapters to float32, or leaves them in bfloat16."""
    model = llama(torch.bfloat16)
    torch.manual_seed(1)
    configuration = CONFIGURATIONS[name](target_modules=TARGETS, init_weights=False)
    ours = peft.get_peft_model(model, configuration, autocast_adapter_dtype=casts)
    theirs = copy.deepcopy(ours)
    accelerate(ours)
    assert losses(ours) == pytest.approx(losses(theirs), rel=2e-2)
    assert_same(theirs, ours, rtol=0, atol=2 * 4e-2)  # a gradient near zero may have another sign in each of 4 steps


@pytest.mark.parametrize("name", ["oft shared", "boft with dropout", "gralora hybrid"])
def test_merging_and_unmerging_are_those_of_peft(name: str) -> None:
    theirs, ours = adapted(name)
    apart = logits(theirs)
    for each in (theirs, ours):
        each.merge_adapter()
    assert_same(theirs, ours)
    torch.testing.assert_close(logits(ours), apart, rtol=1e-3, atol=1e-4)
    for each in (theirs, ours):
        each.unmerge_adapter()
    torch.testing.assert_close(logits(ours), apart, rtol=1e-3, atol=1e-4)
    merged = ours.merge_and_unload(safe_merge=True)
    assert type(merged.model.layers[0].self_attn.q_proj) is nn.Linear
    torch.testing.assert_close(logits(merged), logits(theirs), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_checkpoints_are_those_of_peft(name: str, tmp_path: Path) -> None:
    theirs, ours = adapted(name)
    losses(ours)
    ours.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(llama(), tmp_path)
    torch.testing.assert_close(logits(loaded), logits(ours), rtol=1e-3, atol=1e-4)
    accelerate(loaded)
    assert_same(loaded, ours, rtol=0, atol=0)
    theirs.load_state_dict(ours.state_dict())
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-3, atol=1e-4)
    torch.save(ours, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    torch.testing.assert_close(logits(again), logits(ours), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_several_adapters_and_none(name: str) -> None:
    theirs, ours = adapted(name)
    for each in (theirs, ours):
        torch.manual_seed(2)
        each.add_adapter("other", CONFIGURATIONS[name](target_modules=["q_proj"], init_weights=False))
    accelerate(ours)
    assert not [key for key, _ in ours.named_buffers() if "boft_P" in key]
    for active in (["default"], ["other"], ["default", "other"], ["other", "default"]):
        for each in (theirs, ours):
            each.base_model.set_adapter(active)
        x = torch.randn(5, 32)
        found, expected = (each.base_model.model.model.layers[0].self_attn.q_proj.eval()(x) for each in (ours, theirs))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
        assert losses(ours, 2) == pytest.approx(losses(theirs, 2), rel=1e-5)
        ours.load_state_dict(theirs.state_dict())  # Adam's first steps have the size of its rate, whatever the gradient
    with ours.disable_adapter():
        torch.testing.assert_close(logits(ours), logits(llama()), rtol=0, atol=0)
    for each in (theirs, ours):
        each.merge_adapter()
    assert_same(theirs, ours)
    with ours.disable_adapter():  # unmerges
        torch.testing.assert_close(logits(ours), logits(llama()), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_adapters_on_chains(name: str) -> None:
    """On KSLinear with a bias, in the place of nn.Linear."""
    torch.manual_seed(0)
    model = nn.Sequential(KSLinear([(4, 8, 8, 1), (1, 4, 4, 8)]), nn.GELU(), nn.Linear(32, 32))
    configuration = CONFIGURATIONS[name](target_modules=["0", "2"], init_weights=False)
    ours = peft.get_peft_model(model, configuration).train()
    theirs, x = copy.deepcopy(ours), torch.randn(5, 32)
    assert accelerate(ours) == ["base_model.model.0", "base_model.model.2"]
    for each in (theirs, ours):
        torch.manual_seed(3)
        each(x).square().sum().backward()
    torch.manual_seed(4)
    found = ours(x)
    torch.manual_seed(4)
    torch.testing.assert_close(found, theirs(x))
    gradients = {key: each.grad for key, each in ours.named_parameters() if each.requires_grad}
    for key, each in theirs.named_parameters():
        if each.requires_grad:
            torch.testing.assert_close(gradients[key], each.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(32,), (0, 32), (5, 32), (2, 3, 32)], ids=str)
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_shapes_of_x(name: str, shape: tuple[int, ...]) -> None:
    theirs = peft.get_peft_model(nn.Sequential(nn.Linear(32, 16)), CONFIGURATIONS[name](target_modules=["0"])).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x = torch.randn(shape).requires_grad_()
    if name == "gralora hybrid" and shape == (0, 32):
        with pytest.raises(RuntimeError, match="0 elements"):  # PEFT's error
            ours(x)
        return
    expected = theirs(x[None])[0] if len(shape) == 1 else theirs(x)  # GraLoRA of PEFT refuses one dimension
    torch.testing.assert_close(ours(x), expected)
    (gradient,) = torch.autograd.grad(ours(x).sum(), x)
    assert gradient.shape == shape


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_transforms_and_autocast(name: str) -> None:
    theirs = peft.get_peft_model(
        nn.Sequential(nn.Linear(32, 32)), CONFIGURATIONS[name](target_modules=["0"], init_weights=False)
    ).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x = torch.randn(5, 32)
    expected = torch.autograd.functional.jacobian(lambda x: theirs(x).sum(0), x)
    torch.testing.assert_close(torch.func.jacrev(lambda x: ours(x).sum(0))(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(ours(x), theirs(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_compiled_layers(name: str) -> None:
    base = nn.Sequential(nn.Linear(32, 32))
    theirs = peft.get_peft_model(base, CONFIGURATIONS[name](target_modules=["0"], init_weights=False)).eval()
    ours, x = copy.deepcopy(theirs), torch.randn(5, 32)
    accelerate(ours)
    y, expected = torch.compile(ours, backend="aot_eager", fullgraph=True)(x), theirs(x)
    torch.testing.assert_close(y, expected)
    for model, each in ((ours, y), (theirs, expected)):
        wanted = [each for each in model.parameters() if each.requires_grad]
        model.found = torch.autograd.grad(each.square().sum(), wanted)
    torch.testing.assert_close(ours.found, theirs.found, rtol=1e-4, atol=1e-4)


def single(name: str) -> tuple[Any, Any]:
    """One layer of PEFT, and an accelerated copy."""
    base = nn.Sequential(nn.Linear(32, 32))
    theirs = peft.get_peft_model(base, CONFIGURATIONS[name](target_modules=["0"], init_weights=False)).eval()
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    return theirs, ours


@pytest.mark.parametrize("name", ["oft", "boft of 2 factors", "gralora", "gralora hybrid"])
def test_second_derivatives_and_several_gradients_at_once(name: str) -> None:
    models, x = single(name), torch.randn(5, 32, requires_grad=True)
    found: list[list[Tensor]] = []
    for model in models:
        given = [x, *(each for each in model.parameters() if each.requires_grad)]
        torch.manual_seed(3)
        seeds, several = [torch.randn_like(each) for each in given], torch.randn(4, 5, 32)
        for _ in range(3):  # steps are prepared at the second call
            y = model(x)
            gradients = torch.autograd.grad(y.pow(3).sum(), given, create_graph=True)
            second = torch.autograd.grad(gradients, given, seeds)
            batched = torch.autograd.grad(model(x), given, several, is_grads_batched=True)
        found.append([*gradients, *second, *batched])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_subclasses_of_others_stay_unchanged() -> None:
    class Own(boft.Linear):  # type: ignore[misc]
        """Such as FSDP2 makes."""

    theirs, _ = single("boft")
    theirs.base_model.model[0].__class__ = Own
    with pytest.raises(SpecError, match=r"no layer to accelerate; PEFT's layers in this model: .*Own"):
        accelerate(theirs)


@pytest.mark.parametrize("of", ["embedding", "convolution"])
def test_embeddings_and_convolutions_of_oft(of: str) -> None:
    """Embeddings are accelerated, convolutions take PEFT's path."""
    layers = {"embedding": nn.Embedding(9, 32), "convolution": nn.Conv2d(4, 3, 3)}
    x = {"embedding": torch.arange(9), "convolution": torch.randn(2, 4, 5, 5)}[of]
    model = nn.Sequential(layers[of], nn.Flatten(), nn.LazyLinear(4))
    model(x)
    configuration = peft.OFTConfig(oft_block_size=4, target_modules=["0", "2"], init_weights=False)
    ours = peft.get_peft_model(model, configuration).eval()
    theirs = copy.deepcopy(ours)
    assert len(accelerate(ours)) == (2 if of == "embedding" else 1)
    torch.testing.assert_close(ours(x), theirs(x))


@pytest.mark.parametrize(("size", "levels"), [(2, 4), (2, 7), (4, 1), (4, 4), (6, 3), (8, 2), (32, 3), (64, 3)])
def test_factors_of_boft_are_block_diagonal_in_groups(size: int, levels: int) -> None:
    """The product of PEFT's P D P^T is that of patterns (n / s, s, s, 1), after an exchange of digits."""
    count = 3 * 2 ** (levels - 1)
    features = count * size
    torch.manual_seed(0)
    factors = torch.randn(levels, count, size, size, dtype=torch.float64)
    layer = boft.Linear.__new__(boft.Linear)
    whole = torch.eye(features, dtype=torch.float64)
    for level, blocks in enumerate(factors):
        order = layer.block_butterfly_perm(features, count // 2**level, size // 2, levels - 1)
        matrix = layer.perm2mat(order).double()
        whole = matrix @ torch.block_diag(*blocks) @ matrix.T @ whole
    rows = torch.randn(7, features, dtype=torch.float64)
    torch.testing.assert_close(rotate(rows, factors), rows @ whole)
    structure = structures.boft(features, size, levels)
    weights = structure.from_state({f"R{level}": blocks for level, blocks in enumerate(factors)})
    torch.testing.assert_close(chain_to_dense(structure.chain, weights), whole.T)
    if size * 2 ** (levels - 1) <= 64:
        torch.testing.assert_close(torch.block_diag(*combine(factors, 0, levels)), whole)


def test_boft_stores_no_dense_matrix() -> None:
    """Neither between calls nor for the backward pass, here of 256 x 256."""
    features, rows = 256, 3
    configuration = peft.BOFTConfig(boft_block_size=8, boft_n_butterfly_factor=2, target_modules=["0"])
    theirs = peft.get_peft_model(nn.Sequential(nn.Linear(features, 8, bias=False)), configuration)
    ours = copy.deepcopy(theirs)
    accelerate(ours)
    x = torch.randn(rows, features, requires_grad=True)

    def largest(model: Any) -> int:
        found = [each.numel() for each in model.buffers()]

        def pack(tensor: Tensor) -> Tensor:
            found.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda each: each):
            model(x)
        return max(found)

    assert largest(theirs) >= features**2
    assert largest(ours) <= 2 * 2 * 8 * features


@pytest.mark.parametrize(
    ("configuration", "kinds"),
    [
        (None, "none"),
        (peft.LoraConfig(target_modules=["0"]), "peft.tuners.lora.layer.Linear"),
        (peft.BOFTConfig(boft_block_size=3, target_modules=["1"]), "peft.tuners.boft.layer.Conv2d"),
    ],
    ids=["plain", "lora", "convolution"],
)
def test_a_model_without_such_layers_is_refused(configuration: Any, kinds: str) -> None:
    model: Any = nn.Sequential(nn.Linear(32, 32), nn.Conv2d(3, 3, 1))
    if configuration is not None:
        model = peft.get_peft_model(model, configuration)
    message = f"no layer to accelerate; PEFT's layers in this model: {kinds}; accepted: linear layers with adapters of"
    with pytest.raises(SpecError, match=message):
        accelerate(model)


def test_modules_keep_their_place_in_pefts_classes() -> None:
    for name, kind in (("oft", OFTRotation), ("boft", BOFTLinear), ("gralora", GraLoRALinear)):
        _, ours = adapted(name)
        assert sum(isinstance(each, kind) for each in ours.modules()) == 6


def test_without_the_extension_peft_builds_one_factor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boft, "_FBD_CUDA", None)
    with pytest.warns(UserWarning, match="boft_n_butterfly_factor to 1"):
        theirs = peft.get_peft_model(llama(), CONFIGURATIONS["boft of 2 factors"](target_modules=["q_proj"]))
    ours = copy.deepcopy(theirs)
    assert accelerate(ours)
    assert {len(each) for name, each in ours.named_parameters() if "boft_R" in name} == {1}
    assert losses(ours, 2) == pytest.approx(losses(theirs, 2), rel=1e-5)


def test_examples_of_docstrings_and_of_the_page_run() -> None:
    found = doctest.testmod(ksgen.torch.peft)
    assert (found.failed, found.attempted) == (0, 8)
    page = (Path(__file__).parents[2] / "docs" / "peft.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert isinstance(names["adapted"].base_model.model[0].oft_R.default, OFTRotation)


def test_a_missing_or_old_peft_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft.tuners.gralora", None)
    monkeypatch.delitem(sys.modules, "ksgen.torch.peft")
    with pytest.raises(ImportError, match=r"ksgen.torch.peft needs PEFT 0.19 or later: pip install .*\[peft\]"):
        importlib.import_module("ksgen.torch.peft")
