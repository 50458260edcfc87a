"""What commands share: specs by name, from any folder."""

import os
from pathlib import Path

import pytest

from ksgen.commands.common import check_memory
from ksgen.errors import SpecError
from ksgen.families import cuda_limits
from ksgen.measure.footprint import footprint
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec
from tests.support.program import ksgen


def test_shipped_specs_are_found_from_any_folder(tmp_path: Path) -> None:
    done = ksgen("emit", "specs/gpt2.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("bundle", "specs/gpt2.yaml", "-o"),
        ("wisdom", "export", "-o"),
        ("bench", "share", "-o"),
        ("bench", "model", "-o"),
        ("show", "1,4,6,4", "--png"),
    ],
)
def test_no_file_is_called_minus(command: tuple[str, ...], tmp_path: Path) -> None:
    done = ksgen(*command, "-", cwd=tmp_path)
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    assert done.stderr.splitlines()[-1] == "ksgen: file -: accepted: the name of a file, such as ./- for one that is called so"


def test_a_check_may_take_all_of_the_memory_and_no_byte_more(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, limits = KernelSpec(Pattern(2, 9, 5, 3)), cuda_limits("sm_90a")
    counts = {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": footprint(kernel, 70, limits).total}
    monkeypatch.setattr(os, "sysconf", counts.__getitem__)
    check_memory(kernel, 70, limits)
    counts["SC_PHYS_PAGES"] -= 1
    with pytest.raises(SpecError, match=r"--batch 70: checking ks_2x9x5x3_float32_bsf takes .* GB .*; take a smaller batch"):
        check_memory(kernel, 70, limits)
