"""What all runtimes share: targets by compute capability, and an array's own bytes."""

import mmap

import ml_dtypes
import numpy as np
import pytest

from ksgen.devices import base
from ksgen.errors import DeviceError
from ksgen.families.gpus import target_of
from tests.support.huge_pages import asks_for_huge_pages, needs_huge_pages


def test_targets_name_hoppers_own_instructions():
    assert [target_of(*capability) for capability in ((8, 0), (9, 0), (12, 0))] == ["sm_80", "sm_90a", "sm_120"]


def test_bytes_of_an_array_are_its_own_memory():
    x = np.zeros((2, 2), ml_dtypes.bfloat16)
    base.as_bytes(x)[:] = 255
    assert np.isnan(x.astype(np.float32)).all()
    with pytest.raises(DeviceError, match="only row-major arrays are copied"):
        base.as_bytes(np.zeros((2, 2)).T)


def test_the_address_of_an_array_is_that_of_its_first_element() -> None:
    read_only = np.ones(3)
    read_only.flags.writeable = False
    arrays = [
        np.ones((2, 3), np.float32),
        np.ones((4, 4))[1:, 2:],
        np.asfortranarray(np.ones((2, 3))),
        read_only,
        np.empty((0, 3)),
    ]
    for array in [
        *arrays,
        np.ones(3, ml_dtypes.bfloat16),
        np.ones(3, np.complex128),
        np.ones(3, ">f4"),
        np.array(1.5, np.float16),
    ]:
        assert base.address_of(array) == array.ctypes.data


@needs_huge_pages
def test_large_arrays_lie_in_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    with mmap.mmap(-1, 2 * base.HUGE_BYTES) as memory:
        array = np.frombuffer(memory, np.uint8)
        address, middle = base.address_of(array) + 100, base.address_of(array) + base.HUGE_BYTES // 2
        base.use_huge_pages(address, base.HUGE_BYTES - 1)
        monkeypatch.setattr(base, "_madvise", lambda: None)  # as on other systems
        base.use_huge_pages(address, base.HUGE_BYTES)
        assert not asks_for_huge_pages(middle)
        monkeypatch.undo()
        base.use_huge_pages(address, base.HUGE_BYTES)
        assert asks_for_huge_pages(middle)
        assert not asks_for_huge_pages(address)  # the array begins within a page, which others may use
        del array
