"""Along which axis a transform works, and what none takes."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from ksgen import transforms
from ksgen.errors import LaunchError, PatternError, SpecError
from tests.support.program import needs_device
from tests.transforms.arrays import agree, drawn


@needs_device
def test_any_axes_of_a_batch_and_either_layout() -> None:
    x = drawn(3, 2, 24, dtype="float64")
    agree(transforms.dft(24)(x), np.fft.fft(x), "float64")
    agree(transforms.dft(24)(x.transpose(2, 0, 1), layout="bsl"), np.fft.fft(x).transpose(2, 0, 1), "float64")
    agree(transforms.rdft(24)(x[0, 0]), np.fft.rfft(x[0, 0]), "float64")
    assert transforms.dft(24)(np.zeros((0, 24))).shape == (0, 24)
    agree(transforms.dft(8)(np.arange(8)), np.fft.fft(np.arange(8)), "float64")


@pytest.mark.parametrize(
    ("x", "options", "error", "told"),
    [
        ([1.0] * 8, {}, LaunchError, r"rdft\(8\): x=\[1.0, .*; accepted: a NumPy or CuPy array, or a PyTorch tensor"),
        (np.zeros((2, 7)), {}, LaunchError, r"rdft\(8\): got x of shape \(2, 7\); layout bsf wants \(..., 8\)"),
        (
            np.zeros((2, 8)),
            {"layout": "bsl"},
            LaunchError,
            r"rdft\(8\): got x of shape \(2, 8\); layout bsl wants \(8, ...\)",
        ),
        (np.float64(1), {}, LaunchError, "accepted: a NumPy or CuPy array"),
        (np.zeros((2, 8), complex), {}, LaunchError, r"rdft\(8\): got x of complex128; accepted: real numbers"),
        (np.full((2, 8), "a"), {}, LaunchError, r"rdft\(8\): x is of <U1; accepted: numbers"),
        (np.ma.zeros((2, 8)), {}, LaunchError, r"rdft\(8\): x=masked_array\(.*; accepted: a NumPy or CuPy array"),
        (np.full((2, 8), None), {}, LaunchError, r"rdft\(8\): x is of object; accepted: numbers"),
        (np.zeros((2, 8)), {"layout": "any"}, SpecError, "layout='any'; accepted: bsf, bsl"),
    ],
)
def test_what_no_transform_takes(x: Any, options: dict[str, str], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        transforms.rdft(8)(x, **options)


@pytest.mark.parametrize("make", [transforms.dft, transforms.daubechies])
def test_the_direction_of_a_transform_is_no_word(make: Any) -> None:
    with pytest.raises(PatternError, match="inverse='no'; accepted: True or False"):
        make(8, inverse="no")


@needs_device
@pytest.mark.parametrize(
    "make",
    [
        transforms.dft,
        transforms.rdft,
        transforms.irdft,
        transforms.dct,
        transforms.hartley,
        transforms.haar,
        transforms.daubechies,
    ],
)
@pytest.mark.parametrize(
    "again", [lambda transform: pickle.loads(pickle.dumps(transform)), copy.deepcopy], ids=["pickled", "copied"]
)
def test_a_transform_goes_to_another_process_as_the_call_that_made_it(make: Any, again: Any) -> None:
    transform = make(16 if make is transforms.haar else 12)
    found = again(transform)
    x = np.random.default_rng(0).standard_normal((3, transform.size or transform.chain.in_features))
    assert found is not transform
    assert (found(x) == transform(x)).all()
    assert len(pickle.dumps(transform)) < 200  # not its weights
