"""`ksgen bundle` writes one file, for GPUs and for processors, and launchers run what it holds without a compiler."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ksgen.build.bundle import open_bundle
from ksgen.build.host import compiler_for, find_host_compiler
from ksgen.build.processors import INSTRUCTION_SETS, instruction_sets_here
from ksgen.errors import ToolchainError
from tests.support.program import ksgen, needs_compiler

ROOT = Path(__file__).parents[2]
# Runs a bundle's kernels in a process that finds no compiler, on a processor that lacks some instructions: prints where each came from.
USER = """
import sys
import numpy as np
import ksgen
from ksgen import reference
from ksgen.build import processors
from ksgen.errors import KsgenError
from ksgen.launcher import Launcher
from ksgen.pattern import Pattern

bundle, lacks = sys.argv[1:]
known = processors.processor_features()
processors.processor_features = lambda: known - set(lacks.split(","))
try:
    ksgen.use_bundle(bundle)
    for batch in (1, 5, 300):
        x = np.random.default_rng(1).standard_normal((batch, 30)).astype(np.float32)
        weights = np.random.default_rng(2).standard_normal((2, 9, 5, 3)).astype(np.float32)
        call = Launcher(2, 9, 5, 3).prepare(x, weights)
        truth = reference.multiply(Pattern(2, 9, 5, 3), x.astype(np.float64), weights, "bsf")
        assert np.abs(call() - truth).max() < 1e-5
        print(call.plan.binary.target)
except KsgenError as error:
    print(error)
"""


@needs_compiler
def test_bundle_is_one_file(spec: Path) -> None:
    done = ksgen("bundle", spec.name, "--arch", "sm_90a", cwd=spec.parent)
    assert done.stdout.startswith("2 binaries of small for sm_90a in small.ksb ("), done.stderr
    assert (spec.parent / "small.ksb").stat().st_size > 1000


@pytest.fixture
def sets() -> list[str]:
    """This processor's, the best first."""
    try:
        find_host_compiler()
    except ToolchainError as absent:
        pytest.skip(str(absent))
    if len(found := [each.name for each in instruction_sets_here()]) < 2:
        pytest.skip("this processor has no two instruction sets")
    return found


def run_without_compiler(bundle: Path, lacks: str = "", **environment: str) -> list[str]:
    given = {"PATH": "/nowhere", "KSGEN_CACHE_DIR": str(bundle.parent / "empty"), "KSGEN_DEVICE": "native", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", USER, str(bundle), lacks], capture_output=True, text=True, check=False, env=given | environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_processors_run_a_bundle_without_a_compiler(sets: list[str], tmp_path: Path) -> None:
    """The best instruction set that bundle and processor have; another where an instruction is missing; else a word about each."""
    if "ziglang" in find_host_compiler().command:
        pytest.skip("ziglang is found without PATH")
    (tmp_path / "one.yaml").write_text('kernels: ["2,9,5,3"]\n')
    best, other = sets[:2]
    done = ksgen("bundle", "one.yaml", "--arch", f"{best},{other}", cwd=tmp_path)
    assert f"of one for {best},{other} in one.ksb (" in done.stdout, done.stderr
    bundle = tmp_path / "one.ksb"
    assert {each.entry for each in open_bundle(bundle).entries()} >= {"ksgen_launch"}
    named = {each: INSTRUCTION_SETS[each] for each in sets}
    assert run_without_compiler(bundle) == [named[best].target] * 3
    lacks = sorted(named[best].features - named[other].features)[0]
    assert run_without_compiler(bundle, lacks) == [named[other].target] * 3
    both = f"{lacks},{sorted(named[other].features)[0]}"
    (refused,) = run_without_compiler(bundle, both)
    assert refused.startswith("native: no C++ compiler found")
    for each in (best, other):
        assert f"; a bundle holds kernels for {each}, but this processor lacks " in refused
    path = f"{tmp_path / 'bin'}"
    Path(path).mkdir()
    for word in find_host_compiler().command[:1]:
        Path(path, "c++").symlink_to(shutil.which(word) or word)
    assert run_without_compiler(bundle, PATH=path, KSGEN_NO_COMPILE="1") == [named[best].target] * 3


def test_this_very_processor_is_a_target(sets: list[str], tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text('kernels: [{pattern: "2,9,5,3", batch: 5}]\n')
    done = ksgen("build", "one.yaml", "--arch", "host", cwd=tmp_path)
    assert "1 binary of one for host in the cache" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        ("x86-64-v9", "ksgen: 'x86-64-v9' is no instruction set; accepted: host, x86-64-v4, x86-64-v3, x86-64-v2, aarch64\n"),
        ("native", "ksgen: 'native' is no instruction set; accepted: host, "),
    ],
)
def test_what_is_no_instruction_set_is_refused(arch: str, says: str, spec: Path) -> None:
    done = ksgen("bundle", spec.name, "--arch", arch, cwd=spec.parent)
    assert (done.returncode, done.stderr.startswith(says)) == (2, True), done.stderr


def test_bundles_for_another_kind_of_processor(tmp_path: Path) -> None:
    """Where a compiler builds for it; what it holds is not run here."""
    other = next(each for each in INSTRUCTION_SETS.values() if each not in instruction_sets_here() and each.machine == "aarch64")
    try:
        compiler_for(other.target)
    except ToolchainError as absent:
        pytest.skip(str(absent))
    (tmp_path / "one.yaml").write_text('kernels: [{pattern: "2,9,5,3", batch: 5}]\n')
    done = ksgen("bundle", "one.yaml", "--arch", other.name, cwd=tmp_path)
    assert "1 binary of one for aarch64 in one.ksb (" in done.stdout, done.stderr
    (refused,) = run_without_compiler(tmp_path / "one.ksb")
    assert "; a bundle holds kernels for aarch64, but this processor is of x86_64" in refused
