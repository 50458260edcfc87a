"""The cases and the numerics on a GPU, compared with the emulator."""

import re
from typing import Any

import numpy as np

from ksgen.devices import Device
from ksgen.families import Geometry
from tests.ptx import numerics
from tests.ptx.cases import Case, all_cases
from tests.support import kernels

PRODUCTS = {
    product.case().name: product for product in (numerics.Product(c=192, **options) for options in numerics.products())
}
NAMES = [*(case.name for case in all_cases()), *PRODUCTS]


def case_named(name: str) -> Case:
    """A fresh one: a launch writes to its arguments."""
    return PRODUCTS[name].case() if name in PRODUCTS else next(case for case in all_cases() if case.name == name)


def why_not(case: Case, target: str) -> str:
    """Why a GPU of this target cannot launch the case through `Device`; empty where it can."""
    own = case.target.endswith("a")  # Hopper's own instructions are no other generation's
    if target != case.target if own else _generation(target) < _generation(case.target):
        return f"{case.target} instructions; the device is {target}"
    return ""


def _generation(target: str) -> int:
    return int(re.sub(r"\D", "", target))


def launch(device: Device, case: Case) -> None:
    geometry = Geometry(case.grid, case.block, case.shared_bytes, starts_early=case.early)
    kernels.launch(device, case.text, case.entry, case.entry, geometry, case.args)


def compare_with_emulator(done: Case, target: str) -> int:
    """The most floats between an entry of a launched case and the emulator's, as that target. Without tensor cores,
    whose sums are a model there, every byte must be the same."""
    emulated = case_named(done.name)
    emulated.emulate(target=target)
    pairs = list(zip(done.arrays, emulated.arrays, strict=True))
    if "mma_" not in done.text:
        for mine, emulated in pairs:
            np.testing.assert_array_equal(mine.view(np.uint8), emulated.view(np.uint8))
        return 0
    # 16-bit arrays of maps: `check` alone
    return max((kernels.ulps(*pair) for pair in pairs if _is_float(pair[0])), default=0)


def _is_float(array: Any) -> bool:
    return bool(np.issubdtype(array.dtype, np.floating))
