"""`ksgen build` fills the cache, and says what it made."""

import json
from pathlib import Path

import pytest

from tests.support.program import ksgen, needs_compiler


@pytest.mark.slow
@needs_compiler
def test_build_fills_the_cache_and_says_what_it_made(spec: Path) -> None:
    spec.write_text('kernels: ["2,9,5,3"]\n')
    done = ksgen(
        "build",
        spec.name,
        "--arch",
        "sm_80,sm_90a",
        "--json",
        cwd=spec.parent,
        KSGEN_CACHE_DIR=str(spec.parent / "cache"),
    )
    rows = json.loads(done.stdout)
    kernels = {(row["kernel"], row["target"]) for row in rows}
    assert kernels == {("ks_2x9x5x3_float32_bsf", target) for target in ("sm_80", "sm_90a")}
    again = ksgen("build", spec.name, cwd=spec.parent, KSGEN_CACHE_DIR=str(spec.parent / "cache"), KSGEN_NO_COMPILE="1")
    assert again.stdout.startswith("1 kernel of small for sm_80,sm_90a: 14 binaries in the cache, 0 with spilled")
    assert again.stdout.splitlines()[1].startswith("Each kernel has one binary per target")
