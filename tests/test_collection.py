"""The suite is collected without any library that is not always installed: a missing one skips tests and breaks
none.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ABSENT = (
    "torch", "pyopencl", "cuda", "pycuda", "scipy", "matplotlib", "distributed", "transformers", "onnx", "onnxruntime",
    "peft",
)  # fmt: skip
CODE = f"""
import sys
from importlib.machinery import PathFinder
found = PathFinder.find_spec

def find_spec(_, name, *where):
    return None if name.partition(".")[0] in {ABSENT} else found(name, *where)

PathFinder.find_spec = classmethod(find_spec)
import pytest
sys.exit(pytest.main(["--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]))
"""


@pytest.mark.second
def test_the_suite_is_collected_without_optional_libraries() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "tests/spec/test_reader.py: " in done.stdout
    assert "tests/torch/" not in done.stdout
