"""Models of transformers: converted, initialised, saved by save_pretrained, and loaded by from_pretrained in a fresh
process.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="pip install -e '.[torch]'")
transformers = pytest.importorskip("transformers", reason="pip install -e '.[interop]'")

import ksgen.torch.pretrained  # noqa: E402  (after the skips; it registers)

from ksgen import structures  # noqa: E402
from ksgen.errors import SpecError  # noqa: E402
from ksgen.torch import KSLinear, KSSum, convert  # noqa: E402

UP, DOWN = [(6, 4, 4, 1), (1, 48, 12, 2)], [(6, 4, 16, 1), (1, 8, 8, 3)]  # 24 -> 96, 96 -> 24
ROOT = Path(__file__).parents[3]
IDS = torch.arange(10)[None]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=24, d_kv=12, d_ff=96, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config).eval()


def bert() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=96,
        initializer_range=0.3,
    )
    return transformers.BertForSequenceClassification(config).eval()


BERT_RULE = {"*.intermediate.dense": UP, "*.layer.0.output.dense": DOWN}


def logits_of(model: Any) -> Any:
    with torch.no_grad():
        return model(input_ids=IDS, **({"decoder_input_ids": IDS} if hasattr(model, "decoder") else {})).logits


def test_t5_reads_the_type_of_its_weight() -> None:
    """T5 in 16 bits keeps wo in float32, and casts its input to wo.weight.dtype."""
    model = t5()
    convert(model, {"wi": UP, "wo": DOWN})
    expected = logits_of(model)
    model.half()
    for stack in (model.encoder, model.decoder):
        stack.block[0].layer[-1].DenseReluDense.wo.float()
    torch.testing.assert_close(logits_of(model).float(), expected, rtol=0.05, atol=0.05)


def test_loaded_weights_in_eight_bits_are_not_drawn_again(tmp_path: Path) -> None:
    model = bert()
    convert(model, BERT_RULE)
    ksgen.torch.quantize(model, "int8", names=["*.intermediate.dense"])
    model.save_pretrained(tmp_path)
    with pytest.raises(
        SpecError, match=r"intermediate.dense had weights in 'int8', which are not read back; save a model before"
    ):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize(("make", "rule"), [(t5, {"wi": UP, "wo": DOWN}), (bert, BERT_RULE)])
def test_weights_are_initialised_again(make: Any, rule: Any) -> None:
    model = make()
    convert(model, rule)
    layers = [module for module in model.modules() if isinstance(module, KSLinear)]
    before = [layer.weights[0].clone() for layer in layers]
    model.apply(model._init_weights)
    between = [layer.weights[0].clone() for layer in layers]
    model.init_weights()
    for layer, first, second in zip(layers, before, between, strict=True):
        assert not first.equal(second)
        assert not second.equal(layer.weights[0])
    assert torch.isfinite(logits_of(model)).all()


FRESH = """
import sys, torch, transformers
import ksgen.torch.conversion.pretrained
for folder, kind in zip(*[iter(sys.argv[1:])] * 2):
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    ids, y = torch.load(folder + "/xy.pt")
    torch.testing.assert_close(model(input_ids=ids, **({"decoder_input_ids": ids} if "T5" in kind else {})).logits, y)
    print(kind, "equal")
"""


def test_a_fresh_process_gives_the_same_logits(tmp_path: Path) -> None:
    words, kinds = [], ["T5ForConditionalGeneration", "AutoModelForSequenceClassification"]
    for kind, model, rule in zip(kinds, (t5(), bert()), ({"wi": UP, "wo": DOWN}, BERT_RULE), strict=True):
        convert(model, rule, backend="einsum")
        model.save_pretrained(tmp_path / kind)
        torch.save((IDS, logits_of(model)), tmp_path / kind / "xy.pt")
        words += [str(tmp_path / kind), kind]
    done = subprocess.run([sys.executable, "-c", FRESH, *words], capture_output=True, text=True, cwd=ROOT)
    assert (done.stdout.splitlines(), done.returncode) == ([f"{kind} equal" for kind in kinds], 0), done.stderr


def test_a_loaded_model_is_like_any_other(tmp_path: Path) -> None:
    model = bert()
    convert(model, BERT_RULE, activation="none", backend="bmm")
    model.save_pretrained(tmp_path / "first")
    again = type(model).from_pretrained(tmp_path / "first")
    layer = again.bert.encoder.layer[0].intermediate.dense
    assert (type(layer), layer.backend, layer.weights[0].device.type) == (KSLinear, "bmm", "cpu")
    assert not getattr(again, "is_quantized", False)
    assert copy.deepcopy(again).half().float().dtype == torch.float32
    again.save_pretrained(tmp_path / "second")
    rules = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"] for name in ("first", "second")
    ]
    assert rules[0] == rules[1]
    assert rules[0]["layers"]["bert.encoder.layer.0.intermediate.dense"] == {
        "chain": ["6,4,4,1", "1,48,12,2"],
        "backend": "bmm",
    }
    torch.testing.assert_close(logits_of(type(model).from_pretrained(tmp_path / "second").eval()), logits_of(model))


def test_a_sum_of_longer_chains_is_loaded_again(tmp_path: Path) -> None:
    model = bert()
    parts = structures.monarch(24, 96, blocks=4), structures.low_rank(24, 96, rank=2)
    convert(model, {"*.intermediate.dense": parts})
    model.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["layers"]
    assert written == {
        "bert.encoder.layer.0.intermediate.dense": {"sum": [["4,6,6,1", "1,24,6,4"], ["1,2,24,1", "1,96,2,1"]]}
    }
    again = type(model).from_pretrained(tmp_path).eval()
    assert type(again.bert.encoder.layer[0].intermediate.dense) is KSSum
    torch.testing.assert_close(logits_of(again), logits_of(model))


def test_with_a_head_or_without(tmp_path: Path) -> None:
    model = bert()
    convert(model, BERT_RULE)
    model.save_pretrained(tmp_path / "head")
    body = transformers.BertModel.from_pretrained(tmp_path / "head").eval()
    expected = model.bert(IDS).last_hidden_state
    torch.testing.assert_close(body(IDS).last_hidden_state, expected)
    body.save_pretrained(tmp_path / "body")
    torch.testing.assert_close(
        type(model).from_pretrained(tmp_path / "body").eval().bert(IDS).last_hidden_state, expected
    )


def test_a_quantized_model_has_no_place_for_the_rule() -> None:
    model = bert()
    model.config.quantization_config = {"quant_method": "gptq"}
    with pytest.raises(
        SpecError, match=r"the model is quantized by gptq, and its config\.json has no place for the rule"
    ):
        convert(model, BERT_RULE)
    assert not any(isinstance(module, KSLinear) for module in model.modules())


def test_a_layer_that_no_rule_describes_is_refused_before_the_model_changes() -> None:
    model = bert()
    model.extra = KSSum([KSLinear("1,24,24,1"), KSLinear("1,24,24,1")])
    with pytest.raises(SpecError, match=r"^a later layer of a sum has a bias \(1,24,24,1 plus 1,24,24,1\)"):
        convert(model, BERT_RULE)
    assert not any(isinstance(module, KSLinear) for module in model.bert.modules())


def test_it_trains_in_the_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="pip install -e '.[interop]'")
    model = bert()
    convert(model, BERT_RULE)
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path)
    rows = [{"input_ids": IDS[0], "labels": torch.tensor(1)} for _ in range(4)]
    options = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=2, report_to=[], save_strategy="no", use_cpu=True
    )
    before = again.bert.encoder.layer[0].intermediate.dense.weights[0].clone()
    transformers.Trainer(model=again, args=options, train_dataset=rows).train()
    assert not again.bert.encoder.layer[0].intermediate.dense.weights[0].equal(before)
