"""`ksgen build` fills the cache, and says what it made."""

import json
from pathlib import Path

import pytest

from tests.support.native import chosen_native
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


@pytest.mark.parametrize("refused", ["the folder", "the size"])
def test_build_refuses_a_cache_that_does_not_keep_the_binaries(
    refused: str, spec: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen_native(monkeypatch)
    spec.write_text('kernels: [{pattern: "2,9,5,3", batch: 64}]\n')
    folder = spec.parent / "cache"
    folder.mkdir()
    folder.chmod(0o777 if refused == "the folder" else 0o700)
    most_bytes = "1000000" if refused == "the folder" else "1"
    environment = {"KSGEN_CACHE_DIR": str(folder), "KSGEN_CACHE_MAX_BYTES": most_bytes}
    done = ksgen("build", spec.name, "--arch", "host", cwd=spec.parent, **environment)
    assert (done.returncode, done.stdout) == (2, "")
    told = done.stderr.splitlines()
    assert told[-1].startswith(f"ksgen: 1 of 1 binary not in the cache {folder}; accepted: a folder that only you can")
    assert any("every user can write to it" in line for line in told[:-1]) is (refused == "the folder")
