"""Tests of constants for kernels about which nothing or too much is known. `tests/wisdom` tests choices by wisdom."""

import re
from dataclasses import replace

import pytest

from ksgen.devices.base import DeviceLimits
from ksgen.errors import ConstantsError
from ksgen.families import FAMILIES, cuda_limits
from ksgen.families.expected import LARGE, default_us
from ksgen.launch.choice import check_fit, choice_by_name, choose, described, expectation, limits_from
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from ksgen.wisdom import Entry, Wisdom

KERNEL = KernelSpec(Pattern(2, 64, 48, 4))
HOPPER, TURING = cuda_limits("sm_90a"), cuda_limits("sm_75")


def test_without_wisdom_it_is_a_familys_default() -> None:
    found = choose(KERNEL, 40, HOPPER, Wisdom())
    assert (found.family, found.constants) == ("simt", FAMILIES["simt"].default(KERNEL, HOPPER, 40))
    assert found.why == "the family's default: no search has been run for this kernel on this device"
    assert (found.misfit, found.from_wisdom, found.is_measured) == (False, False, False)


def test_what_a_search_found_for_small_batches_is_not_taken_for_larger_ones() -> None:
    """Wisdom serves the class of batch sizes that it was found for."""
    constants = FAMILIES["gemv"].default(KERNEL, HOPPER, 8)
    for searched, asked, is_found in (
        (8, 8, True),
        (8, 17, False),
        (8, 32, False),
        (40, 50, True),
        (40, 70, False),
        (40, 4096, False),
    ):
        found = choose(KERNEL, asked, HOPPER, Wisdom([Entry(KERNEL, searched, "gemv", constants, {})]))
        assert found.from_wisdom is is_found, (searched, asked)
        assert found.family == ("gemv" if is_found or asked <= 32 else "simt")


def test_ties_decide_neither_family_nor_constants() -> None:
    constants, tied = FAMILIES["simt"].default(KERNEL, HOPPER, 4096), replace(KERNEL, tied=("ad",))
    wisdom = Wisdom([Entry(KERNEL, 40, "simt", constants, {})])
    found = choose(tied, 40, HOPPER, wisdom)
    assert found.from_wisdom
    assert found == choose(KERNEL, 40, HOPPER, wisdom)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(FAMILIES["simt"]), "default", lambda _family, kernel, _limits, _batch: kernel.tied)
        assert choice_by_name("simt", tied, 40, HOPPER).constants == ()


@pytest.mark.parametrize(
    ("measured", "is_open"),
    [
        ({"trial": True}, False),
        ({"trial": True, "note": "noisy", "attempts": 1}, True),
        ({"trial": True, "note": "noisy", "attempts": 3}, False),
        ({"note": "noisy"}, False),
    ],
)
def test_a_kernel_that_is_to_be_tried_again_comes_with_the_command(measured: dict[str, object], is_open: bool) -> None:
    constants = FAMILIES["simt"].default(KERNEL, HOPPER, 40)
    found = choose(KERNEL, 40, HOPPER, Wisdom([Entry(KERNEL, 40, "simt", constants, measured)]))
    command = "; to find the fastest: ksgen calibrate 2,64,48,4 --batch 40"
    assert described(found, KERNEL, 40, HOPPER) == f"{found.why}{command if is_open else ''}"


def test_a_family_asked_for_by_name_need_not_be_a_default_but_must_serve() -> None:
    kernel = KernelSpec(KERNEL.pattern, "tf32")
    found = choice_by_name("wgmma_registers", kernel, 40, HOPPER)
    assert (found.family, found.why) == ("wgmma", "the family's default: it was asked for by name")
    with pytest.raises(ConstantsError, match="at batch 40: not supported by wgmma_registers on this device"):
        choice_by_name("wgmma_registers", kernel, 40, TURING)


def test_a_default_that_the_model_expects_to_be_slower_is_named_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FAMILIES["wgmma"], "by_default", False)
    kernel = KernelSpec(Pattern(1, 1024, 1024, 3), "bfloat16")
    found = choose(kernel, LARGE, HOPPER, Wisdom())
    family, factor = "wgmma", default_us(FAMILIES["mma"], kernel, HOPPER, LARGE)
    factor /= default_us(FAMILIES[family], kernel, HOPPER, LARGE)
    assert found.family == "mma"
    assert factor > 1.5
    said = (
        f"; the cost model expects {family}, which launchers take only by wisdom or by name, to be {factor:.2f} times "
        "as fast"
    )
    assert expectation(found, kernel, LARGE, HOPPER) == said
    assert expectation(replace(found, from_wisdom=True), kernel, LARGE, HOPPER) == ""  # its time was measured
    assert expectation(choice_by_name(family, kernel, LARGE, HOPPER), kernel, LARGE, HOPPER) == ""
    # a default of the same family that is not the fastest
    slow = choice_by_name("wgmma_permuted", kernel, LARGE, HOPPER)
    assert re.match(
        r"; the cost model expects wgmma, which launchers take .*, to be \d\.\d\d times as fast",
        expectation(slow, kernel, LARGE, HOPPER),
    )
    plain = choice_by_name("simt", kernel, LARGE, cuda_limits("sm_80"))
    assert expectation(plain, kernel, LARGE, cuda_limits("sm_80")).endswith(" times as fast")  # mma, which is a default


def test_constants_that_a_device_cannot_run_do_not_fit() -> None:
    constants = FAMILIES["simt"].default(KERNEL, HOPPER)
    check_fit("simt", constants, KERNEL, HOPPER)
    with pytest.raises(ConstantsError, match="the device has no asynchronous copies"):
        check_fit("simt", constants, KERNEL, replace(HOPPER, async_copies=False))
    early = FAMILIES["gemv"].default(KERNEL, HOPPER, 1)
    check_fit("gemv", early, KERNEL, HOPPER)
    with pytest.raises(ConstantsError, match="early=1: launches begin early only from sm_90 on; accepted: early=0"):
        check_fit("gemv", early, KERNEL, cuda_limits("sm_80"))
    tensor = KernelSpec(KERNEL.pattern, "tf32")
    with pytest.raises(ConstantsError, match="mma does not run on this device"):
        check_fit("mma", FAMILIES["mma"].default(tensor, HOPPER), tensor, replace(HOPPER, tensor_cores=False))
    gradient = KernelSpec(KERNEL.pattern, job="gradient")
    of_processor = FAMILIES["cpu_gradient"].default(gradient, replace(HOPPER, is_cpu=True))
    with pytest.raises(ConstantsError, match="cpu_gradient does not run on this device"):
        check_fit("cpu_gradient", of_processor, gradient, HOPPER)


def test_limits_are_the_tables_where_the_device_does_not_say_less() -> None:
    told = DeviceLimits(
        shared_bytes_per_block=48 * 1024, threads_per_block=512, multiprocessors=4, is_cpu=True, vector_bytes=32
    )
    assert (limits_from("cuda", "sm_90a", told).shared_bytes, limits_from("cuda", "sm_90a", told).threads) == (
        48 * 1024,
        512,
    )
    assert limits_from("cuda", "sm_90a", DeviceLimits(2**20, 2048, 114)) == replace(HOPPER, multiprocessors=114)
    other = limits_from("opencl", "any", told)
    assert (other.is_cpu, other.vector_bytes, other.multiprocessors, other.registers) == (True, 32, 4, 0)
    assert not other.tensor_cores
