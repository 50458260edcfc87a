"""Lets `from_pretrained` of transformers load converted models: import this before.

`convert` puts the rule into a model's config.json as a method of quantization, which is where transformers lets others replace layers
before weights are loaded. Nothing is quantized: a loaded model trains, and moves to other types, like any.
"""

from collections.abc import Mapping
from typing import Any

from ksgen.errors import ToolchainError
from ksgen.torch.conversion.convert import convert
from ksgen.torch.conversion.rule import METHOD, Beside, exactly, from_json

try:
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ToolchainError(f"ksgen.torch.pretrained needs transformers 4.50 or later ({error}); pip install transformers") from error


@register_quantization_config(METHOD)
class RuleConfig(QuantizationConfigMixin):
    """The rule as it stands in config.json."""

    def __init__(self, layers: Any = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.layers = layers


@register_quantizer(METHOD)
class RuleQuantizer(HfQuantizer):
    """Replaces the layers that the rule names, by layers that wait for their weights."""

    requires_calibration = False
    is_trainable = True

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        if rule := for_names(from_json(self.quantization_config.layers, "config.json"), model):
            convert(model, exactly(rule), from_weights=False)

    def postprocess_model(self, model: Any, **_: Any) -> None:
        self.remove_quantization_config(model)
        model.config.quantization_config = self.quantization_config.to_dict()

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return True


def for_names(rule: Mapping[str, Beside], model: Any) -> dict[str, Beside]:
    """The rule for a model with a head or without, whichever it was written for. It leaves out layers of a head that is not there."""
    prefix, names = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules()}
    found = {}
    for name, layer in rule.items():
        if there := next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in names), ""):
            found[there] = layer
    return found
