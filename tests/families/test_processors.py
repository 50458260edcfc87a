"""What the families for processors share, for one factor, for all factors of a layer, and for gradients.

Each case is a kernel with constants, which name the family.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from ksgen import reference
from ksgen.devices.base import Device
from ksgen.families import check, family_of
from ksgen.families.amx.chain import AmxChainConstants
from ksgen.families.amx.shape import AmxConstants
from ksgen.families.cpu_gradient.tiles import AmxGradientConstants
from ksgen.families.cpu_gradient.vectors import VectorGradientConstants
from ksgen.families.vector.shape import VectorConstants
from ksgen.measure.verify import make_problem
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.families import test_amx as tiles
from tests.families import test_amx_chain as chains_of_tiles
from tests.families import test_cpu_gradient_tiles as gradients_of_tiles
from tests.families import test_cpu_gradient_vectors as gradients
from tests.families import test_vector as vectors
from tests.families import test_vector_chain as chains_of_vectors
from tests.support.amx_kernels import CHAINS, PRECISIONS
from tests.support.emulated_tiles import needs_emulation
from tests.support.hasty import compiles_unoptimized
from tests.support.host_launches import agrees, is_right, launch, one_by_one, plans_of
from tests.support.host_memory import placed, processor
from tests.support.native import chosen_native
from tests.support.products import arrays_of, chain_of, truth_of

__all__ = ["compiles_unoptimized"]  # which pytest finds by its name

WAYS = list(product(LAYOUTS, vectors.WAYS))
TWO = CHAINS["d 2 and 3"]
RESIDUAL = Epilogue(True, "relu", True)


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    """OpenCL's processor, or the native one for matrix tiles, which it emulates if it has none."""
    if not is_by_tiles(request.node.callspec.params["constants"]):
        return processor()
    needs_emulation()
    return chosen_native(monkeypatch)


def is_by_tiles(constants: Any) -> bool:
    return isinstance(constants, AmxConstants | AmxChainConstants | AmxGradientConstants)


def roundings_of(kernel: KernelSpec, constants: Any) -> int:
    """Matrix tiles round intermediates of 16 bits."""
    return chains_of_tiles.roundings_of(kernel) if is_by_tiles(constants) else 1


def case(module: Any, kernel: KernelSpec, *how: Any, marks: Sequence[pytest.MarkDecorator] = ()) -> Any:
    """A kernel with the constants of a module's tests."""
    constants = module.constants_of(kernel, *how)
    words = (family_of(constants).name, kernel.factors, kernel.precision, kernel.layout, *how)
    return pytest.param(kernel, constants, id=" ".join(map(str, words)), marks=marks)


def by_vectors(kernel: KernelSpec, along: str, lanes: int = 8, pairs: int = 0) -> Any:
    return case(vectors, kernel, along, lanes, (3, 2), 3, 2, pairs)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        by_vectors(vectors.kernel_of((2, 9, 5, 2), batch=70), "outputs"),
        by_vectors(vectors.kernel_of((2, 9, 5, 2), batch=70), "batch"),
        case(tiles, vectors.kernel_of((2, 9, 5, 2), "bfloat16", batch=70)),
        case(chains_of_tiles, chain_of(TWO, "bfloat16", batch=70), marks=[pytest.mark.slow]),
    ],
)
def test_a_kernel_specialised_to_one_batch(kernel: KernelSpec, constants: Any) -> None:
    agrees(kernel, constants, 70, roundings_of(kernel, constants))


ENDING = Epilogue(True, "gelu", True, True)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(by_vectors(vectors.kernel_of((2, 9, 5, 3), "float32", layout, ENDING), along) for layout, along in WAYS),
        *(case(tiles, vectors.kernel_of((2, 37, 40, 3), "bfloat16", layout, ENDING)) for layout in LAYOUTS),
    ],
)
def test_an_activation_may_follow_the_residual(kernel: KernelSpec, constants: Any) -> None:
    vectors.agrees(kernel, constants, 33)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(
            by_vectors(vectors.kernel_of((2, 9, 5, 2), precision, layout, RESIDUAL), along)
            for precision, (layout, along) in product(("float32", "bfloat16"), WAYS)
        ),
        *(
            case(tiles, vectors.kernel_of((2, 18, 5, 3), precision, layout, RESIDUAL))
            for precision, layout in product(("bfloat16", "bf16x6"), LAYOUTS)
        ),
        *(case(chains_of_tiles, chain_of(TWO, "bfloat16", layout, RESIDUAL)) for layout in LAYOUTS),
    ],
)
def test_the_residual_may_be_the_output(kernel: KernelSpec, constants: Any, device: Device) -> None:
    for batch in (2, 37, 70):
        arrays = arrays_of(kernel, batch)
        places = placed(arrays, kernel.dtype)[1]
        places["y"] = places["residual"]
        launch(device, plans_of(device, kernel, constants, batch), places)
        got = places["y"].reshape(arrays["y"].shape)
        assert is_right(kernel, got, truth_of(kernel, arrays), roundings_of(kernel, constants)), batch


@pytest.mark.usefixtures("device")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(by_vectors(vectors.kernel_of((2, 20, 7, 2), layout=layout), along, 4) for layout, along in WAYS),
        *(
            case(tiles, vectors.kernel_of((2, 48, 33, 2), precision, layout), 32, 32, 3)
            for precision, layout in product(("bfloat16", "bf16x6"), LAYOUTS)
        ),
    ],
)
def test_any_number_of_work_groups_and_either_store_gives_the_same_bits(kernel: KernelSpec, constants: Any) -> None:
    problem = make_problem(kernel, 131)
    first = vectors.multiplied(problem, constants)
    for groups in (1, 3, 5, 30, 100):
        np.testing.assert_array_equal(vectors.multiplied(problem, constants, groups), first)
    for streaming, boundary in product((0, 1), (64, 1)):
        found = vectors.multiplied(problem, replace(constants, streaming=streaming), boundary=boundary)
        np.testing.assert_array_equal(found, first)


SMALL = Pattern(2, 5, 7, 2)


@pytest.mark.usefixtures("device")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(
            by_vectors(KernelSpec(SMALL, "bfloat16" if pairs else "float32", layout), along, 8, pairs)
            for (layout, along), pairs in product(WAYS, (0, 1))
        ),
        *(
            case(tiles, KernelSpec(pattern, precision, layout))
            for pattern in (SMALL, Pattern(1, 17, 33, 3), Pattern(2, 20, 40, 1), Pattern(2, 5, 7, 2, load="j.l.i"))
            for precision, layout in product(PRECISIONS, LAYOUTS)
        ),
    ],
)
def test_what_is_not_finite_reaches_its_own_outputs_alone(kernel: KernelSpec, constants: Any) -> None:
    """Non-finite values stand in the last row of the batch, next to empty lanes, and in the weights of one output."""
    problem = make_problem(kernel, 37)
    x, weights = problem.x, problem.weights
    for at in (36, 3):
        entry = x[at] if kernel.layout == "bsf" else x[:, at]
        entry[3], entry[10], entry[16] = np.inf, np.nan, np.nan
    weights[-1, 4, 2, -1] = -np.inf
    got = vectors.multiplied(problem, constants).astype(np.float32)
    with np.errstate(invalid="ignore"):
        truth = reference.multiply(kernel.pattern, x, weights, kernel.layout)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(truth))
    np.testing.assert_array_equal(np.sign(got[np.isinf(truth)]), np.sign(truth[np.isinf(truth)]))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(truth))
    assert np.isfinite(got).sum() > got.size // 2


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(case(chains_of_vectors, chain_of(chains_of_vectors.TWO, layout=layout), "ob") for layout in LAYOUTS),
        *(
            case(chains_of_tiles, chain_of(TWO, precision, layout))
            for precision, layout in product(("bfloat16", "bf16x6"), LAYOUTS)
        ),
    ],
)
def test_what_is_not_finite_stays_in_its_batch_entry(kernel: KernelSpec, constants: Any, device: Device) -> None:
    """The last row of the batch, next to empty rows, is not finite. Tiles of float32 grade compute its sums again from
    the intermediate, so one launch per factor gives the expected values.
    """
    arrays = arrays_of(kernel, 69)
    entry = arrays["x"][-1] if kernel.layout == "bsf" else arrays["x"][:, -1]
    entry[3], entry[16] = np.inf, np.nan
    launch(device, plans_of(device, kernel, constants, 69), arrays)
    got = arrays["y"].astype(np.float32)
    y = got if kernel.layout == "bsf" else got.T
    assert np.isfinite(y[:-1]).all()
    assert not np.isfinite(y[-1]).all()
    if is_by_tiles(constants):
        np.testing.assert_array_equal(got, one_by_one(device, kernel, constants.parsed, 69, arrays).astype(np.float32))


# ---- gradients


@pytest.mark.exhaustive
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(case(gradients, gradients.kernel_of((2, 20, 7, 2)), along, 4) for along in vectors.WAYS),
        *(
            case(gradients_of_tiles, gradients.kernel_of((2, 40, 33, 2), precision, layout))
            for precision, layout in product(("bfloat16", "bf16x6"), LAYOUTS)
        ),
    ],
)
def test_bits_of_a_gradient_do_not_depend_on_the_number_of_groups(kernel: KernelSpec, constants: Any) -> None:
    x, grad_y = gradients.arrays_of(kernel, 131)
    first = gradients.gradient(kernel, constants, x, grad_y)
    assert np.isfinite(first.astype(np.float32)).all()
    for groups in (1, 2, 3, None):
        np.testing.assert_array_equal(gradients.gradient(kernel, constants, x, grad_y, groups), first)


FEW = Pattern(2, 20, 7, 2)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    ("kernel", "constants"),
    [
        *(
            case(gradients, KernelSpec(FEW, layout=layout, job="gradient"), along, 8)
            for layout, along in (("bsf", "outputs"), ("bsf", "batch"), ("bsl", "batch"))
        ),
        *(
            case(gradients_of_tiles, KernelSpec(pattern, precision, layout, job="gradient"))
            for pattern in (FEW, Pattern(1, 17, 33, 3), Pattern(2, 20, 7, 2, load="j.l.i"))
            for precision, layout in product(PRECISIONS, LAYOUTS)
        ),
    ],
)
def test_what_is_not_finite_reaches_its_own_weights_alone(kernel: KernelSpec, constants: Any) -> None:
    """Non-finite values stand in the last row of the batch, next to empty lanes or tiles."""
    x, grad_y = gradients.arrays_of(kernel, 37)
    entry_x, entry_y = (x[-1], grad_y[-1]) if kernel.layout == "bsf" else (x[:, -1], grad_y[:, -1])
    entry_x[5], entry_x[16], entry_y[41] = np.inf, np.nan, -np.inf
    got = gradients.gradient(kernel, constants, x, grad_y).astype(np.float32)
    with np.errstate(invalid="ignore"):
        truth = reference.gradient(kernel.pattern, x, grad_y, kernel.layout)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(truth))
    np.testing.assert_array_equal(np.sign(got[np.isinf(truth)]), np.sign(truth[np.isinf(truth)]))
    assert np.isfinite(got).sum() == np.isfinite(truth).sum() > got.size // 2


# ---- constants

BY_VECTORS = pytest.mark.parametrize("module", [vectors, gradients], ids=["vector", "cpu_gradient"])


@BY_VECTORS
def test_batches_between_two_powers_of_two_share_a_text(module: Any) -> None:
    family, most = module.FAMILY, {vectors: 22, gradients: 11}[module]
    for shape, layout in product(module.PATTERNS.values(), LAYOUTS):
        kernel = module.kernel_of(shape, layout=layout)
        assert len({family.default(kernel, vectors.CPU, batch) for batch in range(513, 1025, 37)}) == 1
        assert len({family.default(kernel, vectors.CPU, batch) for batch in range(1, 1025)}) <= most
    large, small = (family.default(module.kernel_of((6, 64, 64, 1)), vectors.CPU, batch) for batch in (1568, 10))
    assert large != small


@BY_VECTORS
def test_the_space_keeps_the_rules(module: Any) -> None:
    for shape, layout in product(((2, 20, 7, 2), (1, 1, 1, 1), (2, 4, 5, 3)), LAYOUTS):
        kernel = module.kernel_of(shape, layout=layout)
        found = list(module.FAMILY.space(kernel, vectors.CPU))
        assert len(set(found)) == len(found) > 3
        for constants in found:
            check(module.FAMILY, kernel, constants, vectors.CPU)


@pytest.mark.parametrize(
    ("module", "whole", "block"),
    [
        pytest.param(vectors, VectorConstants("batch", 8, 3, 4, 64, 2, 1, 0), 63, id="vector"),
        pytest.param(gradients, VectorGradientConstants("batch", 8, 3, 4, 64, 2, 2), 64, id="cpu_gradient"),
    ],
)
def test_work_counts_tiles_and_padding(module: Any, whole: Any, block: int) -> None:
    kernel, family = module.kernel_of((2, 24, 6, 2), layout="bsl"), module.FAMILY
    assert 2 * family.work(kernel, whole, 128).multiply_adds == kernel.flops(128)
    assert family.work(kernel, whole, 129).multiply_adds == family.work(kernel, whole, 136).multiply_adds
    along = replace(whole, along="outputs", block=block)
    assert 2 * family.work(kernel, along, 129).multiply_adds == kernel.flops(129) * 64 // 48  # 48 lanes of tiles of 32
    assert family.work(kernel, whole, 128).blocks == family.geometry(kernel, whole, 128).grid == 4
