"""How many cores kernels take."""

import sys
from functools import cache
from types import SimpleNamespace

import pytest

from ksgen.devices import threads
from ksgen.devices.threads import groups_for, threads_of_environment, wanted_threads
from ksgen.errors import DeviceError


@pytest.mark.parametrize(("given", "groups"), [(1, 1), (3, 3), (4, 32), (9, 32)])
def test_fewer_threads_than_cores_are_as_many_groups(given: int, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", lambda: given)
    assert groups_for(32, cores=4) == groups
    assert groups_for(2, cores=4) == min(2, groups)


def test_pytorch_s_number_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", lambda: None)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(get_num_threads=lambda: 1))
    assert wanted_threads() == 1
    assert groups_for(32, cores=2) == 1
    monkeypatch.delitem(sys.modules, "torch")
    assert wanted_threads() is None
    assert groups_for(32, cores=2) == 32


@pytest.mark.parametrize(("given", "number"), [("3", 3), ("", None)])
def test_the_environment_is_asked_once(given: str, number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", cache(threads_of_environment.__wrapped__))
    monkeypatch.setattr(threads.os.environ, "get", {"KSGEN_THREADS": given}.pop)  # which is not there a second time
    assert [threads.threads_of_environment(), threads.threads_of_environment()] == [number, number]


@pytest.mark.parametrize("given", ["0", "-1", "two", "1.5", "²", "9" * 40])
def test_what_is_no_number_is_refused(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "threads_of_environment", threads_of_environment.__wrapped__)
    monkeypatch.setenv("KSGEN_THREADS", given)
    with pytest.raises(DeviceError, match=r"KSGEN_THREADS=.*; accepted: a whole number from 1 up"):
        wanted_threads()
