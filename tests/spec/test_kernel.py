"""One kernel: its name, digest, counts, and what it refuses."""

import copy
import json
import pickle
from dataclasses import fields, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest

from ksgen.errors import SpecError
from ksgen.families.chains import factor_kernels, layer_kernels
from ksgen.pattern import Pattern
from ksgen.quantized import PER, Per
from ksgen.spec import (
    ACTIVATIONS,
    LAYOUTS,
    PRECISIONS,
    STORAGES,
    ByteStorage,
    Epilogue,
    KernelSpec,
    PrecisionName,
    WeightStorage,
)
from ksgen.spec.kernel import Stated, StatedOptions, activations_of
from ksgen.spec.storage import SAME, STORED, Same

SMALL = Pattern(6, 64, 64, 1)


@pytest.mark.parametrize(
    ("words", "accepted"),
    [(PrecisionName, PRECISIONS), (ByteStorage, STORAGES), (WeightStorage, STORED), (Same, (SAME,)), (Per, PER)],
)
def test_the_type_of_an_option_lists_the_words_that_readers_accept(words: Any, accepted: Any) -> None:
    assert get_args(words) == tuple(accepted)


def test_keywords_of_stated_options_have_their_types() -> None:
    assert get_type_hints(Stated) == get_type_hints(StatedOptions)


def test_a_kernel_is_named_by_everything_that_is_set() -> None:
    assert KernelSpec(SMALL).name == "ks_6x64x64x1_float32_bsf"
    full = KernelSpec(SMALL, "bfloat16", "bsl", Epilogue(True, "gelu_tanh", True), 25088)
    assert full.name == "ks_6x64x64x1_bfloat16_bsl_bias_gelu_tanh_residual_batch25088"
    assert full.epilogue.words == ("bias", "gelu_tanh", "residual")


def test_the_layout_of_y_goes_without_saying_where_it_is_that_of_x() -> None:
    chain = KernelSpec((SMALL, SMALL))
    assert replace(chain, out_layout="bsf") == chain
    transposed = replace(chain, out_layout="bsl")
    assert (transposed.name, transposed.y_layout) == ("ks_6x64x64x1_6x64x64x1_float32_bsf_to_bsl", "bsl")
    assert replace(transposed, layout="bsl") == replace(chain, layout="bsl")


def test_a_pickle_has_the_fields_alone() -> None:
    """Searches pickle a kernel while other threads cache its properties, which changes its dictionary."""
    kernel = KernelSpec(Pattern(1, 6, 4, 2), epilogue=Epilogue(bias=True))
    before = pickle.dumps(kernel)
    assert kernel.is_quantized is False
    assert "is_quantized" in vars(kernel)
    assert pickle.dumps(kernel) == before
    assert vars(pickle.loads(before)).keys() == {field.name for field in fields(KernelSpec)}
    assert pickle.loads(before) == copy.copy(kernel) == kernel


def test_different_kernels_have_different_names_and_digests() -> None:
    epilogues = [Epilogue(*values) for values in product([False, True], ACTIVATIONS, [False, True])]
    axes = ([SMALL, SMALL.transpose, Pattern(1, 6, 64, 64)], PRECISIONS, LAYOUTS, epilogues, [None, 1, 25088])
    kernels = {KernelSpec(*values) for values in product(*axes) if values[3].activation in activations_of(values[1])}
    assert len(kernels) == len({kernel.name for kernel in kernels}) == len({kernel.digest for kernel in kernels})


def test_the_digest_stays_what_it_was() -> None:
    assert KernelSpec(SMALL).digest == "d9de890d"
    assert KernelSpec(SMALL, epilogue=Epilogue(True, "gelu", True)).digest == "327f5e47"


def test_an_activation_may_follow_the_residual() -> None:
    last, first = (KernelSpec(SMALL, epilogue=Epilogue(True, "gelu", True, order)) for order in (False, True))
    assert (last.epilogue.words, first.epilogue.words) == (("bias", "gelu", "residual"), ("bias", "residual", "gelu"))
    assert first.name.endswith("_bias_residual_gelu")
    assert first.digest != last.digest
    assert "residual_first" not in last.as_json["epilogue"]
    assert Epilogue(**first.as_json["epilogue"]) == first.epilogue
    for alone in ((True, "gelu", False), (True, "none", True)):  # nothing to put in order
        assert Epilogue(*alone, True) == Epilogue(*alone)
    assert StatedOptions(activation="relu", residual=True, residual_first=True).epilogue == Epilogue(
        False, "relu", True, True
    )
    with pytest.raises(SpecError, match="residual_first='yes'; accepted: True or False"):
        Epilogue(residual_first="yes")  # type: ignore[arg-type]


def test_tied_weights_are_a_part_of_the_kernel() -> None:
    tied = KernelSpec((SMALL, SMALL), tied=("a", ""))
    assert tied.name.endswith("_float32_bsf_tied_a_none")
    assert tied.untied == KernelSpec((SMALL, SMALL)) == KernelSpec((SMALL, SMALL), tied=("", ""))
    assert tied.digest != tied.untied.digest
    assert "tied" not in tied.untied.as_json
    assert replace(tied.untied, tied=json.loads(json.dumps(tied.as_json))["tied"]) == tied
    assert [each.tie for each in factor_kernels(tied)] == ["a", ""]
    assert (tied.weight_bytes, tied.untied.weight_bytes) == (4 * 7 * 64 * 64, 4 * 12 * 64 * 64)
    assert [each.tied for each in layer_kernels(KernelSpec(((SMALL,), (SMALL, SMALL)), tied=("", "d", "ad")))] == [
        (),
        ("d", "ad"),
    ]
    for wrong in ({"tied": ("a",)}, {"tied": ("b", "")}, {"tied": ("a", "d"), "weights": "int8"}):
        with pytest.raises(SpecError, match=r"tied=.* accepted: one of none, a, d, ad per factor"):
            KernelSpec((SMALL, SMALL), **wrong)  # type: ignore[arg-type]


def test_a_long_name_is_that_of_a_file_too(tmp_path: Path) -> None:
    """An entry adds a hash of its constants to it, and the file of a refused source adds one of its text."""
    tied = [KernelSpec((SMALL,) * 60, tied=("",) * 59 + (last,)) for last in ("a", "d")]
    chain = (SMALL,) * 15  # few enough for a name with all patterns
    full = Epilogue(True, "gelu_tanh", True)
    options: dict[str, Any] = {"weights": "e4m3", "inputs": "e4m3", "stride": "any", "between": "gelu_tanh"}
    long = [KernelSpec(chain, "bfloat16", "bsf", full, batch, out_layout="bsl", **options) for batch in (25088, 25089)]
    names = {each.name for each in (*tied, *long)}
    assert len(names) == 4
    for name in names:
        (tmp_path / f"{name}_01234567-89abcdef.cpp").touch()
    assert tied[0].name.startswith("ks_60_factors_")
    assert KernelSpec(chain).name == f"ks_{'_'.join(['6x64x64x1'] * 15)}_float32_bsf"


def test_flops_and_bytes() -> None:
    kernel = KernelSpec(Pattern(1, 768, 192, 2), "float16")
    assert kernel.flops(10) == 2 * 10 * 768 * 192 * 2
    assert kernel.bytes(10) == 2 * (10 * (384 + 1536) + 768 * 192 * 2)
    with_residual = KernelSpec(kernel.pattern, "float16", epilogue=Epilogue(residual=True))
    assert with_residual.bytes(10) - kernel.bytes(10) == 2 * 10 * 1536


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chains": (6, 64, 64, 1)}, "chains=(6, 64, 64, 1); accepted: a Pattern, or chains of Patterns"),
        ({"chains": ()}, "chains=(); accepted: a Pattern, or chains of Patterns"),
        ({"precision": "flot32"}, "precision='flot32'; did you mean float32? accepted: float32, float64, float16"),
        ({"precision": 32}, "precision=32; did you mean tf32? accepted: float32"),
        ({"layout": "nhwc"}, "layout='nhwc'; accepted: bsf, bsl"),
        (
            {"precision": "complex64", "epilogue": Epilogue(activation="relu")},
            "activation=relu of complex numbers, complex64; accepted: none",
        ),
        ({"epilogue": "gelu"}, "epilogue='gelu'; accepted: an Epilogue"),
        ({"batch": 0}, "batch=0; accepted: a whole number from 1 up, or None for any"),
        ({"chains": (SMALL, SMALL), "between": "reul"}, "between='reul'; did you mean relu?"),
        ({"between": "relu"}, "between=relu with one factor; accepted: none, or two factors or more"),
        (
            {"chains": (SMALL, SMALL), "between": "relu", "precision": "complex64"},
            "between=relu of complex numbers, complex64; accepted: none",
        ),
        ({"out_layout": "nhwc"}, "out_layout='nhwc'; accepted: bsf, bsl"),
        ({"out_layout": "bsl", "job": "gradient"}, "job='gradient'; accepted: chain"),
        ({"batch": True}, "batch=True; accepted: a whole number from 1 up"),
        ({"batch": 2**64}, "batch=a number of 65 bits; accepted: a whole number from 1 up"),
    ],
)
def test_a_kernel_refuses_what_it_does_not_know(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        KernelSpec(**({"chains": SMALL} | arguments))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"bias": 1}, "bias=1; accepted: True or False"),
        ({"residual": None}, "residual=None; accepted: True or False"),
        ({"activation": "gelo"}, "activation='gelo'; did you mean gelu? accepted: none, relu, gelu, gelu_tanh, silu"),
        ({"activation": []}, "activation=[]; accepted: none"),
    ],
)
def test_an_epilogue_refuses_what_it_does_not_know(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError) as caught:
        Epilogue(**arguments)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("pattern", "batch", "what"),
    [
        (Pattern(1, 1, 2, 1), 2**60, "x (batch 1152921504606846976)"),
        (Pattern(1, 2, 1, 1), 2**60, "y (batch 1152921504606846976)"),
        (Pattern(1, 2**31 - 1, 2**31 - 1, 1), None, "weights"),
    ],
)
def test_arrays_stay_under_2_to_the_63_bytes(pattern: Pattern, batch: int | None, what: str) -> None:
    with pytest.raises(SpecError) as caught:
        KernelSpec(pattern, batch=batch)
    assert str(caught.value) == f"float32 {what} of {pattern} is too large; accepted: under 2^63 bytes"
    KernelSpec(pattern, "float16", batch=batch and batch - 1)
