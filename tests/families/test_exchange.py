"""Outputs that are stored in another order of their digits: every family that supports them, alone and in chains."""

import copy
import pickle
from typing import Any

import numpy as np
import pytest

from ksgen import quantize
from ksgen.emit.render import render
from ksgen.errors import LaunchError, SpecError
from ksgen.families import FAMILIES, check, cuda_limits, family_named
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.measure.verify import tolerance
from ksgen.pattern import Chain, Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.families.test_vector_chain import arrays_of, truth_of
from tests.support.gpu_chains import chain_of, check_against_factors
from tests.support.hasty import compiles_hastily
from tests.support.kernels import check as check_result
from tests.support.kernels import in_emulator, source_of

__all__ = ["compiles_hastily"]

EVERY = Epilogue(bias=True, activation="relu", residual=True)
# a divided k, whose blocks on the diagonal have whole vectors of neighbours together, or have not; whole vectors of
# neighbours; sizes that are multiples of nothing; a divided j
PATTERNS = ("4,32,16,1@k1:4.i.k2", "8,16,4,1@k1:4.i.k2", "4,16,8,16@i.j.k", "2,20,7,3@j.i.k", "3,8,5,4@j1:2.i.k.j2")
CHAINS = (
    ("4,24,16,1@k1:6.i.k2", "6,16,16,1"),
    ("2,8,16,2@i.j.k", "8,12,4,1@k.i"),
    ("4,32,16,1@k1:8.i.k2", "1,16,8,16@j.k", "16,8,16,1"),
)


def patterns_of(chain: tuple[str, ...]) -> tuple[Pattern, ...]:
    return tuple(map(Pattern.parse, chain))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize(("precision", "dtype"), [("float32", np.float64), ("bfloat16", np.float32)])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", [pytest.param(PATTERNS[0], marks=pytest.mark.optimized), *PATTERNS[1:]])
def test_vectors_of_a_processor(text: str, layout: str, precision: str, dtype: type) -> None:
    """One row, few rows, and whole blocks with a rest take different paths."""
    pattern = Pattern.parse(text)
    for batch in (1, 3, 37, 2048):  # the last outputs are streamed
        kernel = KernelSpec(pattern, precision, layout, EVERY)
        arrays = arrays_of(kernel, batch)
        y = Launcher(pattern)(
            arrays["x"], arrays["weights 0"], layout=layout, bias=arrays["bias"], activation="relu",
            residual=arrays["residual"],
        )  # fmt: skip
        difference = y.astype(dtype) - truth_of(kernel, arrays)
        assert np.linalg.norm(difference) <= tolerance(precision, pattern.c) * np.linalg.norm(y.astype(dtype))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_tiles")
@pytest.mark.parametrize("fuse", ["yes", "no"])
@pytest.mark.parametrize(("layout", "out_layout"), [("bsf", None), ("bsl", None), ("bsf", "bsl"), ("bsl", "bsf")])
@pytest.mark.parametrize("chain", [*CHAINS[:2], pytest.param(CHAINS[2], marks=pytest.mark.optimized)])
def test_chains_on_a_processor(chain: tuple[str, ...], layout: str, out_layout: str | None, fuse: Any) -> None:
    patterns = patterns_of(chain)
    launcher = ChainLauncher(*patterns, between="relu", fuse=fuse)
    for batch in (1, 40):
        kernel = KernelSpec(patterns, "float32", layout, Epilogue(True), between="relu", out_layout=out_layout)
        arrays = arrays_of(kernel, batch)
        weights = [arrays[f"weights {number}"] for number in range(len(patterns))]
        y = launcher(arrays["x"], weights, layout=layout, out_layout=out_layout, bias=arrays["bias"])
        truth = truth_of(kernel, arrays)
        assert np.linalg.norm(y - truth) <= 1e-5 * np.linalg.norm(truth)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("text", PATTERNS)
@pytest.mark.parametrize(("family", "precision"), [("simt", "float32"), ("mma", "bfloat16"), ("gemv", "float16")])
def test_kernels_of_gpus_in_the_emulator(family: str, precision: str, text: str, layout: str) -> None:
    source = source_of(family, KernelSpec(Pattern.parse(text), precision, layout, EVERY))
    for batch in (1, 37) if family != "gemv" else (3,):
        check_result(source, batch, in_emulator())


@pytest.mark.exhaustive
@pytest.mark.parametrize("layouts", [("bsf", None), ("bsl", None), ("bsf", "bsl")])
@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize(("family", "precision"), [("simt", "float32"), ("mma", "bfloat16")])
def test_chains_of_gpus_in_the_emulator(
    family: str, precision: str, chain: tuple[str, ...], layouts: tuple[str, str | None]
) -> None:
    """One launch gives the bits of one launch per factor."""
    kernel = chain_of(patterns_of(chain), precision, layouts[0], Epilogue(True), out_layout=layouts[1])
    own, limits = family_named(family), cuda_limits("sm_80")
    constants = own.default(kernel, limits)
    check(own, kernel, constants, limits)
    arrays = arrays_of(kernel, 37)
    check_against_factors(render(kernel, constants, family=family), arrays, in_emulator(), truth_of(kernel, arrays))


def test_copies_of_launchers_exchange_too() -> None:
    for launcher in (Launcher("1,4,3,2@j.k", activation="relu"), ChainLauncher("1,4,3,2@j.k", "8,2,1,1@k.i")):
        for copied in (copy.deepcopy(launcher), pickle.loads(pickle.dumps(launcher))):
            assert copied.chain == launcher.chain
    assert repr(Launcher("1,4,3,2@j.k")) == "Launcher('1,4,3,2@j.k')"


def test_other_families_leave_them_to_these() -> None:
    limits = cuda_limits("sm_90a")
    single = KernelSpec(Pattern(4, 64, 64, 2, store="i.j.k"), "bfloat16", "bsf")
    assert {name for name, family in FAMILIES.items() if family.supports(single, limits)} == {"simt", "mma", "gemv"}
    chain = KernelSpec(patterns_of(CHAINS[0]), "bfloat16", "bsf")
    assert {name for name, family in FAMILIES.items() if family.supports(chain, limits)} <= {"simt", "mma"}


def test_what_reads_exchanged_outputs_is_refused() -> None:
    pattern = Pattern(4, 64, 64, 2, store="i.j.k")
    with pytest.raises(
        SpecError, match=r"job=gradient of 4,64,64,2@i.j.k, whose outputs are exchanged; accepted: outp"
    ):
        KernelSpec(pattern, job="gradient")
    with pytest.raises(SpecError, match=r"weights=int8 of 4,64,64,2@i.j.k, whose outputs are exchanged"):
        KernelSpec((pattern, Pattern(1, 8, 512, 1)), weights="int8")
    with pytest.raises(LaunchError, match=r"got Quantized\(.*another order than i\.k\.j: an array"):
        Launcher("1,4,3,2@j.k")(np.ones((1, 6), np.float32), quantize(np.ones((1, 4, 3, 2), np.float32), "int8"))


def test_a_kernel_says_in_its_name_how_outputs_are_stored() -> None:
    pattern = Pattern.parse("4,32,16,1@k1:4.i.k2")
    natural, exchanged = KernelSpec(pattern.natural), KernelSpec(pattern)
    assert natural.name == "ks_4x32x16x1_float32_bsf"
    assert exchanged.name == "ks_4x32x16x1_k1x4ik2x8_float32_bsf"
    assert natural.digest != exchanged.digest
    assert KernelSpec(Chain((pattern, Pattern(4, 8, 32, 1)))).name.startswith("ks_4x32x16x1_k1x4ik2x8_4x8x32x1_")


def test_many_factors_have_a_name_that_a_file_can_have() -> None:
    divided = Pattern(8, 8, 8, 8, "k1:2.i1:2.j1:2.k2:2.i2:2.j2:2.k3:2.i3:2.j3:2")
    names = {KernelSpec((divided,) * count + (each,)).name for count in (5, 6) for each in (divided, divided.natural)}
    assert len(names) == 4
    assert max(map(len, names)) < 100
    assert all(name.startswith(("ks_6_factors_", "ks_7_factors_")) for name in names)
