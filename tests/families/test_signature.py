"""The order of operands that a family states is that of its emitted text's parameters."""

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest

from ksgen.emit.render import Source, render
from ksgen.families import Limits, cuda_limits
from ksgen.families.signature import operands_of, result_of, weights_of
from ksgen.pattern import Pattern
from ksgen.spec import LAYOUTS, Epilogue, KernelSpec
from tests.support.kernels import VARIANTS

HOPPER = cuda_limits("sm_90a")
PROCESSOR = Limits(
    32 * 1024,
    1024,
    registers=0,
    is_cpu=True,
    async_copies=False,
    vector_bytes=32,
    tiles=("bf16", "f16"),
    multiprocessors=4,
)
PATTERN, BEFORE = Pattern(2, 64, 48, 4), (Pattern(4, 24, 16, 4),)
SECOND = ((Pattern(1, 24, 256, 1),),)
SPELLED = {"dy": "grad_y", "dw": "grad", "parts": "workspace"}  # operands whose names texts shorten
BATCH = 64


class Case(NamedTuple):
    family: str
    kernel: KernelSpec
    limits: Limits

    def __str__(self) -> str:
        return f"{self.family}-{self.kernel.name}"

    @property
    def source(self) -> Source:
        """Source with the default constants. Some take half a second to find, which is too long at collection."""
        constants = VARIANTS[self.family].default(self.kernel, self.limits)
        return render(self.kernel, constants, family=self.family, dialect="opencl" if self.limits.is_cpu else "cuda")


def kernels() -> Iterator[KernelSpec]:
    for layout, precision in product(LAYOUTS, ("float32", "float16", "tf32x3")):
        plain = KernelSpec(PATTERN, precision, layout)
        for bias, residual in product((False, True), repeat=2):
            added = replace(plain, epilogue=Epilogue(bias, "relu", residual))
            yield from (added, replace(added, stride="any"), replace(added, chains=(*BEFORE, PATTERN)))
        yield replace(plain, chains=((*BEFORE, PATTERN), *SECOND), epilogue=Epilogue(True, "relu", True))
        yield replace(plain, job="gradient")


def cases() -> Iterator[Case]:
    """Every family, for each layout, precision, and epilogue that it serves."""
    for name, family in VARIANTS.items():
        for kernel, limits in product(kernels(), (HOPPER, PROCESSOR)):
            if family.supports(kernel, limits):
                yield Case(name, kernel, limits)


def parameters(text: str, entry: str) -> list[tuple[str, str]]:
    """The type and name of each parameter; no name where a text has no use for it."""
    found = re.search(rf"void {entry}\((.*?)\)\s*\{{", text, re.DOTALL)
    assert found, entry
    split = [
        re.fullmatch(r"(.*?[*\s])\s*(?:(?:RESTRICT\s+)?(\w+))?", each.strip(), re.DOTALL)
        for each in found[1].split(",")
    ]
    return [(each[1].strip(), each[2] or "") for each in split if each]


def names(text: str, entry: str) -> list[str]:
    """Return the names of the parameters behind the tensor maps."""
    return [name for kind, name in parameters(text, entry) if not kind.endswith("TensorMap")]


CASES = list(cases())


def test_every_family_has_a_case() -> None:
    assert {each.family for each in CASES} == set(VARIANTS)
    assert {each.family for each in CASES if each.kernel.is_strided} >= {"simt", "mma"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_texts_parameters_are_the_familys_operands_in_order(case: Case) -> None:
    source, family = case.source, VARIANTS[case.family]
    wanted = [*family.operands(source.kernel, source.constants), *source.constants.at_launch, "batch_of_call"]
    geometry = family.geometry(source.kernel, source.constants, BATCH)
    for entry in (source.entry, *(source.entry_of(each.name) for each in (*geometry.before, *geometry.after))):
        found = [name if name in wanted else SPELLED.get(name, name) for name in names(source.text, entry)]
        assert len(found) == len(wanted), (entry, found)
        assert [name or own for name, own in zip(found, wanted, strict=True)] == wanted, entry


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", [each for each in CASES if each.family.startswith("wgmma")], ids=str)
def test_tensor_maps_come_first_and_describe_operands(case: Case) -> None:
    source, family = case.source, VARIANTS[case.family]
    described = [each.operand for each in family.maps(source.kernel, source.constants, BATCH)]
    maps = [name for kind, name in parameters(source.text, source.entry) if kind.endswith("TensorMap")]
    assert len(maps) == len(described) > 0
    assert [name for name, _ in zip(maps, described, strict=True)] == ["x", "y_map"][: len(maps)]
    assert set(described) <= set(family.operands(source.kernel, source.constants))


def test_a_kernel_takes_what_its_epilogue_and_job_ask_for() -> None:
    every = ("x", "weights", "y", "workspace", "bias", "residual")
    plain = KernelSpec(PATTERN)
    assert operands_of(every, plain) == ("x", "weights", "y", "workspace")
    assert operands_of(every, replace(plain, epilogue=Epilogue(True, "none", False))) == (
        "x",
        "weights",
        "y",
        "workspace",
        "bias",
    )
    assert operands_of(every, replace(plain, epilogue=Epilogue(False, "none", True)))[4:] == ("residual",)
    chain = replace(plain, chains=(*BEFORE, PATTERN))
    assert operands_of(every, chain) == ("x", "weights_1", "weights_2", "y", "workspace")
    assert weights_of(chain) == ("weights_1", "weights_2")
    assert (weights_of(plain), result_of(plain)) == (("weights",), "y")
    slices = replace(plain, stride="any")
    assert operands_of(every, slices) == ("x", "weights", "y", "workspace", "x_pitch", "y_pitch")
    added = replace(slices, epilogue=Epilogue(True, "none", True))
    assert operands_of(every, added)[4:] == ("bias", "residual", "x_pitch", "y_pitch", "residual_pitch")
    assert not any(each.endswith("_pitch") for each in operands_of(every, plain))
    gradient = replace(plain, job="gradient")
    assert (weights_of(gradient), result_of(gradient)) == ((), "grad")


def test_parameters_without_a_name_are_read() -> None:
    text = (
        "void f(const __grid_constant__ TensorMap x, const stored*, stored* RESTRICT y,\n    const extent "
        "batch_of_call) {"
    )
    assert parameters(text, "f") == [
        ("const __grid_constant__ TensorMap", "x"), ("const stored*", ""), ("stored*", "y"), ("const extent",
            "batch_of_call")
    ]  # fmt: skip
    assert names(text, "f") == ["", "y", "batch_of_call"]
