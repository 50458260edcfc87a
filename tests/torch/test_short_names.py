"""Modules by their short names: one object each, and what was pickled under them loads."""

import pickle
import sys
from importlib import import_module

import pytest

import ksgen.torch
from ksgen.errors import KsgenWarning
from ksgen.torch import PLACES

PICKLED = {  # classes of layers and reports, by the names under which they were pickled
    "layer": ("KSLinear",),
    "group": ("KSLinears",),
    "quantized": ("QuantizedKSLinear", "QuantizedReport", "QuantizedLayer"),
    "adapter": ("KSAdapter",),
    "parallel": ("Parallel",),
    "splits": ("Split", "Style"),
    "factorize": ("Factorization",),
    "propose": ("Proposal", "Proposals"),
    "report": ("Report", "Replaced"),
    "rule": ("RuleEntry",),
    "models": ("VisionTransformer", "LanguageModel"),
}


# which needs transformers
@pytest.mark.parametrize("name", [name for name in PLACES if not name.endswith(".pretrained")])
def test_a_short_name_is_the_same_module(name: str) -> None:
    module = import_module(name)
    assert module is sys.modules[PLACES[name]]
    assert module.__name__ == PLACES[name]
    assert module.__spec__ is not None
    assert module.__spec__.name == PLACES[name]


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in PICKLED.items() for name in names])
def test_what_was_pickled_loads(module: str, name: str) -> None:
    found = pickle.loads(f"cksgen.torch.{module}\n{name}\n.".encode())
    assert found.__name__ == name
    assert pickle.loads(pickle.dumps(found)) is found


def test_a_rules_entry_has_an_earlier_name_that_warns() -> None:
    with pytest.warns(KsgenWarning, match="Beside is deprecated and will be removed; use RuleEntry"):
        assert pickle.loads(b"cksgen.torch.rule\nBeside\n.") is ksgen.torch.rule.RuleEntry


def test_functions_keep_their_names() -> None:
    """Though modules have the same ones."""
    for name in ("convert", "factorize", "propose"):
        import_module(f"ksgen.torch.{name}")
        assert callable(getattr(ksgen.torch, name))


def test_other_names_are_unknown() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'ksgen\.torch\.nothing'"):
        import_module("ksgen.torch.nothing")
