"""`ksgen demo` checks every kernel of a spec."""

from pathlib import Path

import pytest

from ksgen.commands import demo
from tests.support.program import ksgen, needs_device


@needs_device
def test_demo_checks_every_kernel_of_a_spec(spec: Path) -> None:
    done = ksgen("demo", spec.name, "--batch", "33", cwd=spec.parent)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 kernels agree with float64" in done.stdout
    assert (spec.parent / "generated" / "small" / "manifest.json").is_file()


def test_times_in_doubt_are_marked_numpys_too(capsys: pytest.CaptureFixture[str]) -> None:
    row = {
        "pattern": (2, 9, 5, 3), "job": "multiply", "precision": "float32", "layout": "bsf", "error": 1e-7, "tolerance": 1e-6,
        "passed": True, "median_us": 12.0, "doubt": "", "numpy_us": 34.0, "numpy_doubt": "others took 50% of the processors",
    }  # fmt: skip
    demo._print([row, {**row, "doubt": "the median is 2 times the fastest", "numpy_doubt": ""}])
    first, second = [line for line in capsys.readouterr().out.splitlines() if "2,9,5,3" in line]
    assert ("12 " in first, "34?" in first, "12?" in second, "34 " in second) == (True, True, True, True)
    demo._print([row])
    assert "? 1 of 2 times cannot be trusted; the first: others took 50% of the processors." in capsys.readouterr().out
