"""The JSON of kernels and times: every field of docs/json.md, numbers no longer than they are worth."""

import json

from ksgen.commands.common import choice_figures, entry_figures, kernel_figures, tidy
from ksgen.families import FAMILIES, cuda_limits
from ksgen.pattern import Pattern
from ksgen.spec import Epilogue, KernelSpec
from ksgen.wisdom import Entry

KERNEL = KernelSpec(Pattern(2, 9, 5, 3), "float16", "bsl", Epilogue(bias=True))
CONSTANTS = FAMILIES["simt"].default(KERNEL, cuda_limits("sm_80"))


def test_a_kernel_is_identified_by_all_its_options() -> None:
    assert kernel_figures(KERNEL, None) == {
        "kernel": KERNEL.name,
        "job": "multiply",
        "pattern": [2, 9, 5, 3],
        "precision": "float16",
        "layout": "bsl",
        "epilogue": {"bias": True, "activation": "none", "residual": False},
        "batch": None,
    }
    assert choice_figures("simt", CONSTANTS)["constants"]["tile_batch"] == CONSTANTS.tile_batch


def test_an_entrys_times_stand_by_name_and_the_rest_under_measured() -> None:
    told = entry_figures(Entry(KERNEL, 40, "simt", CONSTANTS, {"median_us": 2.5, "date": "2026-01-02"}))
    assert (told["batch"], told["specialised"], told["median_us"], told["floor_us"]) == (40, False, 2.5, None)
    assert told["measured"] == {"date": "2026-01-02"}
    json.dumps(told)


def test_times_are_rounded_to_a_nanosecond_and_other_numbers_to_six_digits() -> None:
    given = {
        "median_us": 1234.56789,
        "share": 0.123456789,
        "count": 3,
        "runs_us": [1.00049, {"first": 2.00051}],
        "of": (1e-9 / 3,),
    }
    assert tidy(given) == {
        "median_us": 1234.568,
        "share": 0.123457,
        "count": 3,
        "runs_us": [1.0, {"first": 2.001}],
        "of": [3.33333e-10],
    }
