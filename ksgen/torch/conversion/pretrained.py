"""Support for `from_pretrained` of transformers to load converted models: import this module first.

`convert` writes the rule into a model's config.json as a quantization method. Transformers lets such methods replace
layers before it loads weights. Nothing is quantized: a loaded model trains and changes dtype like any other.
"""

from collections.abc import Mapping
from typing import Any

from ksgen.errors import ToolchainError
from ksgen.torch.conversion.convert import convert
from ksgen.torch.conversion.rule import METHOD, RuleEntry, exactly, from_json

try:
    from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ToolchainError(
        f"ksgen.torch.pretrained needs transformers 4.50 or later ({error}); pip install transformers"
    ) from error


@register_quantization_config(METHOD)
class RuleConfig(QuantizationConfigMixin):
    """Rule in the form that config.json stores."""

    def __init__(self, layers: Any = None, **_: Any) -> None:
        self.quant_method = METHOD
        self.layers = layers


@register_quantizer(METHOD)
class RuleQuantizer(HfQuantizer):
    """Quantizer of transformers that replaces the layers named by the rule, before their weights are loaded."""

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


def for_names(rule: Mapping[str, RuleEntry], model: Any) -> dict[str, RuleEntry]:
    """Adapt the rule's names to a model with or without a head. Layers of a missing head are left out."""
    prefix, names = f"{model.base_model_prefix}.", {name for name, _ in model.named_modules()}
    found = {}
    for name, layer in rule.items():
        if match := next((each for each in (name, prefix + name, name.removeprefix(prefix)) if each in names), ""):
            found[match] = layer
    return found
