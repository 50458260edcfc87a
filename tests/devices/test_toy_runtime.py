"""A runtime from outside: a module with `found` and `open_device`, and its line in the table, and launchers run on
it.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from ksgen import devices, reference
from ksgen.devices import Found, Missing, UnavailableError, find_device, list_devices
from ksgen.devices.base import check_index
from ksgen.errors import DeviceError
from ksgen.launcher import Launcher
from ksgen.measure.verify import tolerance
from tests.emulator import is_installed
from tests.support.fake_gpu import FakeGpu
from tests.support.launching import BATCH, PATTERN, SHAPE, check, inputs, plan_afresh

NAMES = ("Abacus", "Slide Rule")


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, and its line in the table; nothing else of ksgen knows it."""
    module = ModuleType("ksgen.devices.toy")
    opened: dict[int, FakeGpu] = {}

    def open_device(index: int) -> FakeGpu:
        check_index("toy", index, NAMES)
        return opened.setdefault(index, FakeGpu(NAMES[index], index, runtime="toy"))

    module.found = lambda: [Found(f"toy:{index}", "toy", name, "sm_90a") for index, name in enumerate(NAMES)]  # type: ignore[attr-defined]
    module.open_device = open_device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(devices._MODULES, "toy", "toy")
    monkeypatch.setitem(devices._RUNTIMES, "toy", ("toy",))
    devices._find.cache_clear()
    yield module
    devices._find.cache_clear()


def test_it_is_listed_and_found_by_its_word_its_number_and_a_part_of_a_name(toy: ModuleType) -> None:
    assert [line.name for line in list_devices() if isinstance(line, Found) and line.runtime == "toy"] == list(NAMES)
    assert find_device("toy") is find_device("toy:0") is find_device("abac")
    assert find_device("TOY:1").name == "Slide Rule"
    with pytest.raises(DeviceError, match=r"^toy:7: no such device; there is toy:0 \(Abacus\), toy:1 \(Slide Rule\)$"):
        find_device("toy:7")


def test_where_it_cannot_work_it_says_why_and_hides_no_other(toy: ModuleType) -> None:
    others = [line for line in list_devices() if line.runtime != "toy"]

    def absent() -> list[Found]:
        raise UnavailableError("no toys here", "buy one")

    toy.found = absent  # type: ignore[attr-defined]
    assert Missing("toy", "no toys here", "buy one") in list_devices()
    assert [line for line in list_devices() if line.runtime != "toy"] == others


@pytest.mark.parametrize("layout", ["bsf", "bsl"])
def test_launchers_multiply_and_differentiate_on_it(
    toy: ModuleType, layout: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if not is_installed("none"):
        pytest.skip("the emulator needs g++")
    plan_afresh(monkeypatch)
    monkeypatch.setenv("KSGEN_DEVICE", "toy:1")
    monkeypatch.setenv("KSGEN_CACHE_DIR", str(tmp_path))
    (x, weights), ks = inputs(layout=layout), Launcher(*SHAPE)
    y = ks(x, weights, layout=layout)
    check(y, x, weights, layout)
    found, truth = ks.gradient(x, y, layout=layout), reference.gradient(PATTERN, x, y, layout)
    assert np.linalg.norm(found - truth) <= 2 * tolerance("float32", BATCH) * np.linalg.norm(truth)
    entries = [entry for entry, _ in find_device("toy:1").launches]  # type: ignore[attr-defined]
    name = f"ks_2x9x5x3_float32_{layout}"
    own = [re.sub("^_[0-9a-f]{8}", "", entry.removeprefix(name)) for entry in entries]  # without a digest of constants
    assert [entry[:9] for entry in own if not entry.endswith("_sum")] == ["_pack", "", "_gradient"]
