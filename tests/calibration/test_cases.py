"""The cases of a proof: each precision, layout and job that a family serves, clusters on and off, each source once."""

from typing import Any

import pytest

from ksgen.calibration.proof import Case, cases_of
from ksgen.families import FAMILIES, check, cuda_limits, family_named
from ksgen.families.wgmma.permuted import PermutedConstants
from ksgen.families.wgmma.registers import RegistersConstants
from ksgen.families.wgmma.shared import SharedConstants
from ksgen.spec import LAYOUTS, PRECISIONS
from ksgen.spec.storage import SAME
from tests.support.kernels import SERVED

TARGET = "sm_90a"
NAMES = ["wgmma", "mma", "simt", "gemv", "gradient"]


def has_clusters(case: Case) -> bool:
    constants: Any = case.candidate.constants
    return bool(constants.cluster_batch * constants.cluster_out > 1)


def test_families_of_processors_have_none() -> None:
    assert {name for name, family in FAMILIES.items() if cases_of(family, TARGET)} == set(NAMES)
    assert {family_named(own).name for own, *_ in SERVED} == set(NAMES)
    assert cases_of(FAMILIES["wgmma"], "sm_80") == []


@pytest.mark.parametrize("name", NAMES)
def test_they_cover_what_the_family_serves(name: str) -> None:
    """Every precision and layout for which the tests' matrix has a kernel of the family."""
    cases, family = cases_of(FAMILIES[name], TARGET), FAMILIES[name]
    served = {(precision, layout) for own, precision, layout in SERVED if family_named(own).name == name}
    found = {(case.kernel.precision, case.kernel.layout) for case in cases}
    assert served <= found
    for case in cases:
        check(family, case.kernel, case.candidate.constants, cuda_limits(TARGET))
        assert case.batches
        assert all(family.takes(case.kernel, batch, aligned=True) for batch in case.batches)
    texts = [source.text for case in cases for source in case.sources[:1]]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize("name", ["simt", "mma", "gemv"])
def test_chains_groups_and_other_storages_are_among_them(name: str) -> None:
    kernels = [case.kernel for case in cases_of(FAMILIES[name], TARGET)]
    assert any(kernel.is_group for kernel in kernels)
    assert any(len(kernel.chains[0]) > 1 for kernel in kernels)
    assert any(kernel.is_quantized for kernel in kernels)
    assert any(kernel.inputs != SAME for kernel in kernels)
    assert {kernel.layout for kernel in kernels} == set(LAYOUTS)


def test_each_kind_of_warpgroup_kernels_is_launched_with_and_without_clusters() -> None:
    cases = cases_of(FAMILIES["wgmma"], TARGET)
    found = {(type(case.candidate.constants), case.kernel.layout, has_clusters(case)) for case in cases}
    kinds = [(RegistersConstants, LAYOUTS), (SharedConstants, LAYOUTS), (PermutedConstants, ("bsf",))]
    assert found == {(kind, layout, on) for kind, layouts in kinds for layout in layouts for on in (True, False)}
    assert any(case.kernel.inputs == "e4m3" for case in cases)
    assert {case.kernel.precision for case in cases} < set(PRECISIONS)
