"""Weights in eight bits: a kernel's own field, which goes without saying where it is usual, and what is refused."""

from dataclasses import replace

import numpy as np
import pytest

from ksgen import reference
from ksgen.errors import SpecError
from ksgen.pattern import Pattern
from ksgen.quantized import numpy_type
from ksgen.spec import PRECISIONS, STORAGES, WEIGHTS, KernelSpec, parse
from ksgen.spec.storage import scales_begin, x_precisions
from ksgen.wisdom import Entry

KERNEL = KernelSpec(Pattern(6, 64, 64, 1), "bfloat16", weights="int8")


def test_a_kernel_says_how_its_weights_are_stored() -> None:
    assert KERNEL.name == "ks_6x64x64x1_bfloat16_int8_bsf"
    assert KERNEL.as_json["weights"] == "int8"
    plain = replace(KERNEL, weights="same")
    assert plain.name == "ks_6x64x64x1_bfloat16_bsf"
    assert "weights" not in plain.as_json
    assert len({KERNEL.digest, plain.digest, replace(KERNEL, weights="e5m2").digest}) == 3
    assert (plain.weight_bytes, KERNEL.weight_bytes) == (2 * 6 * 64 * 64, 6 * 64 * 64 + 4 * 6 * 64)
    assert plain.bytes(3) - KERNEL.bytes(3) == plain.weight_bytes - KERNEL.weight_bytes
    chain = KernelSpec((Pattern(6, 64, 64, 1), Pattern(1, 64, 64, 6)), weights="e4m3")
    assert chain.weight_bytes == 2 * (6 * 64 * 64 + 4 * 6 * 64)
    assert [scales_begin(count) for count in (1, 16, 17)] == [16, 16, 32]


def test_what_is_refused() -> None:
    with pytest.raises(SpecError, match=r"weights='int4'; did you mean int8\? accepted: same, int8, e4m3, e5m2"):
        replace(KERNEL, weights="int4")
    for precision in set(PRECISIONS) - {"float32", "float16", "bfloat16"}:
        words = f"precision={precision} with weights=int8; accepted: precision=float32, float16, bfloat16"
        with pytest.raises(SpecError, match=words):
            replace(KERNEL, precision=precision)
    with pytest.raises(
        SpecError, match="job=gradient with weights=int8; accepted: weights=same, because others are not trained"
    ):
        replace(KERNEL, job="gradient")
    assert x_precisions() == ("float32", "float16", "bfloat16")


def test_a_spec_asks_for_it() -> None:
    spec = parse("kernels:\n  - {pattern: [6,64,64,1], weights: [same, e4m3], precision: float16}\n", "a.yaml")
    assert [kernel.name for kernel in spec.kernels] == ["ks_6x64x64x1_float16_bsf", "ks_6x64x64x1_float16_e4m3_bsf"]
    layers = parse(
        "defaults: {weights: int8}\nlayers:\n  up: {chain: [[6,64,64,1], [1,64,64,6]], bias: true}\n", "a.yaml"
    )
    assert {kernel.weights for kernel in layers.kernels} == {"int8"}
    assert set(WEIGHTS) == {"same", *STORAGES, "bfloat16"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "kernels:\n  - {pattern: [6,64,64,1], weights: int4}\n",
            r"a.yaml:2: kernels\[0\].weights: got 'int4'; did you mean int8\? accepted: same, int8",
        ),
        (
            "kernels:\n  - {pattern: [6,64,64,1], weights: int8, precision: tf32}\n",
            "a.yaml:2: .*precision=tf32 with weights=int8; accepted",
        ),
        (
            "defaults: {gradients: true}\nkernels:\n  - {pattern: [6,64,64,1], weights: int8}\n",
            "a.yaml:3: .*gradients=true with weights=int8",
        ),
        (
            "kernels:\n  - {pattern: [6,64,64,1], weights: [same, int8], inputs: e4m3}\n",
            "a.yaml:2: .*inputs=e4m3 with weights=same, int8; accepted: inputs=same, or the weights' storage",
        ),
        (
            "kernels:\n  - {pattern: [6,64,64,1], weights: [same, int8], inputs: int8}\n",
            "a.yaml:2: .*weights=same with inputs=int8; accepted: inputs=same, or the weights' storage",
        ),
        (
            "layers:\n  up: {chain: [[6,64,64,1], [1,8,384,1]], weights: [int8, e4m3], inputs: [int8]}\n",
            "a.yaml:2: .*weights=e4m3 with inputs=int8; accepted: inputs=same, or the weights' storage",
        ),
    ],
)
def test_errors_name_file_line_and_key(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        parse(text, "a.yaml")


@pytest.mark.parametrize("storage", STORAGES)
def test_the_record_says_what_ml_dtypes_does(storage: str) -> None:
    """The definition of the format gives the value of each of the 256 bit patterns."""
    how = STORAGES[storage]
    theirs = np.arange(256, dtype=np.uint8).view(numpy_type(how)).astype(np.float64)
    theirs[np.isinf(theirs)] = np.nan
    np.testing.assert_array_equal(reference.values_of(how), theirs)
    assert how.largest == np.nanmax(theirs)


def test_wisdom_keeps_it() -> None:
    from ksgen.families import FAMILIES
    from tests.families.test_vector import CPU

    constants = FAMILIES["vector"].default(KERNEL, CPU, 1)
    entry = Entry(KERNEL, 1, "vector", constants, {"median_us": 1.0})
    assert Entry.from_json(entry.as_json()) == entry
    assert entry.as_json()["weights"] == "int8"
    plain = replace(entry, kernel=replace(KERNEL, weights="same"))
    assert "weights" not in plain.as_json()
    assert Entry.from_json(plain.as_json()).kernel.weights == "same"
    of_bytes = replace(entry, kernel=replace(KERNEL, inputs="int8"))
    assert Entry.from_json(of_bytes.as_json()) == of_bytes


def test_specs_say_how_x_is_stored() -> None:
    found = parse(
        "kernels:\n  - {pattern: [6,64,64,1], weights: [same, e4m3], inputs: [same, e4m3], precision: bfloat16}\n",
        "a.yaml",
    ).kernels
    assert [(each.weights, each.inputs) for each in found] == [("same", "same"), ("e4m3", "same"), ("e4m3", "e4m3")]
    assert found[2].name == "ks_6x64x64x1_bfloat16_e4m3_inputs_bsf"
