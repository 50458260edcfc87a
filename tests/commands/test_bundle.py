"""`ksgen bundle` writes one file, for GPUs and for processors, and launchers run what it holds without a compiler."""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ksgen.build.bundle import write_bundle
from ksgen.build.host import compiler_for, find_host_compiler, host_target
from ksgen.build.processors import INSTRUCTION_SETS, instruction_sets_here, processor_features
from ksgen.build.request import Binary, Request
from ksgen.errors import ToolchainError
from tests.support.compilers import hasty
from tests.support.program import ksgen, needs_compiler

ROOT = Path(__file__).parents[2]
# Runs a bundle's kernels in a process that finds no compiler, on a processor that lacks some instructions: prints what
# each was built for.
USER = """
import sys
import numpy as np
import ksgen
from ksgen import reference
from ksgen.build import processors
from ksgen.errors import KsgenError
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.devices import find_device
from ksgen.launch.planner import PLANNER
from ksgen.pattern import Pattern
from ksgen.spec import KernelSpec

bundle, lacks, has, precision = sys.argv[1:]
features = processors._reported_features()
if lacks or has:
    processors._reported_features = lambda: " ".join(
        word for word in (*features.split(), *has.split(",")) if word not in lacks.split(","))
processors.tiles_are_permitted = lambda: True
shape, random = (2, 5, 5, 3), np.random.default_rng(1)
weights = random.standard_normal(shape).astype(np.float32)
try:
    ksgen.use_bundle(bundle)
    if precision == "bfloat16":
        print(PLANNER.plan(find_device(), KernelSpec(Pattern(*shape), precision, batch=5), 5).binary.target)
        sys.exit()
    if precision != "float32":
        x = random.standard_normal((5, 30)).astype(np.float32)
        call = Launcher(*shape, batches=[5]).prepare(x, weights, precision=precision)
        assert np.abs(call() - reference.multiply(Pattern(*shape), x.astype(np.float64), weights, "bsf")).max() < 1e-5
        print(call.plan.binary.target, call.plan.choice.family)
        sys.exit()
    for batch in (1, 5, 300):
        x = random.standard_normal((batch, 30)).astype(np.float32)
        call = Launcher(*shape).prepare(x, weights)
        truth = reference.multiply(Pattern(*shape), x.astype(np.float64), weights, "bsf")
        assert np.abs(call() - truth).max() < 1e-5
        print(call.plan.binary.target)
    truth = reference.multiply(Pattern(*shape), truth, weights, "bsf")
    assert np.abs(ChainLauncher(Launcher(*shape), Launcher(*shape))(x, [weights, weights]) - truth).max() < 1e-4
except KsgenError as error:
    print(error)
"""


@pytest.mark.slow
@needs_compiler
def test_bundle_is_one_file(spec: Path) -> None:
    done = ksgen("bundle", spec.name, "--arch", "sm_90a", cwd=spec.parent)
    assert done.stdout.startswith("14 binaries of small for sm_90a in small.ksb ("), done.stderr
    assert (spec.parent / "small.ksb").stat().st_size > 1000


def unoptimized(folder: Path) -> str:
    """A value of KSGEN_CXX that compiles bundles in less time."""
    return shlex.quote(str(hasty(folder, "-O0")))


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


def run_without_compiler(
    bundle: Path, lacks: str = "", has: str = "", precision: str = "float32", **environment: str
) -> list[str]:
    given = {
        "PATH": "/nowhere",
        "KSGEN_CACHE_DIR": str(bundle.parent / "empty"),
        "KSGEN_DEVICE": "native",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", USER, str(bundle), lacks, has, precision],
        capture_output=True, text=True, check=False, env=given | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_processors_run_a_bundle_without_a_compiler(sets: list[str], tmp_path: Path) -> None:
    """What was built for the very processor, else for the best instruction set that bundle and processor have; else
    a word about each.
    """
    if "ziglang" in find_host_compiler().command:
        pytest.skip("ziglang is found without PATH")
    (tmp_path / "one.yaml").write_text('kernels: ["2,5,5,3", {pattern: "2,5,5,3", precision: bfloat16, batch: 5}]\n')
    best, other = sets[:2]
    done = ksgen("bundle", "one.yaml", "--arch", f"host,{best},{other}", cwd=tmp_path, KSGEN_CXX=unoptimized(tmp_path))
    assert f"of one for host,{best},{other} in one.ksb (" in done.stdout, done.stderr
    bundle = tmp_path / "one.ksb"
    named = {each: INSTRUCTION_SETS[each] for each in sets}
    assert run_without_compiler(bundle) == [host_target()] * 3
    # by all that this processor multiplies
    assert run_without_compiler(bundle, precision="bfloat16") == [host_target()]
    unused = min(processor_features() - named[best].features)
    assert run_without_compiler(bundle, unused) == [named[best].target] * 3
    lacks = min(named[best].features - named[other].features)
    assert run_without_compiler(bundle, lacks) == [named[other].target] * 3
    (refused,) = run_without_compiler(bundle, f"{lacks},{min(named[other].features)}")
    assert refused.startswith("native: no C++ compiler found")
    for each in (best, other):
        assert f"; a bundle holds kernels for {each}, but this processor lacks " in refused
    assert refused.endswith("; a bundle holds kernels for host, but that was another processor")
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "c++").symlink_to(shutil.which(find_host_compiler().command[0]) or "")
    assert run_without_compiler(bundle, unused, PATH=str(folder), KSGEN_NO_COMPILE="1") == [named[best].target] * 3


LAYERS = """
layers:
  heads: {group: [[[2,5,5,3], [1,4,10,3]], [[2,4,5,3]]], bias: true, between: silu, batch: 64}
  up: {chain: [[2,5,5,3], [1,4,10,3]], between: relu, out_layout: bsl, fuse: yes, batch: 64}
"""
# Runs the one launch of each: nothing else serves them, as the bundle's kernels of single factors are for a batch of 64
# alone.
LAYERS_USER = """
import sys
import numpy as np
import ksgen
from ksgen import reference
from ksgen.launcher import ChainLauncher, GroupLauncher, Launcher
from ksgen.pattern import Pattern

ksgen.use_bundle(sys.argv[1])
first, second, alone = (2, 5, 5, 3), (1, 4, 10, 3), (2, 4, 5, 3)
random = np.random.default_rng(1)
x, *weights = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 30), first, second, alone))
bias = [random.standard_normal(count).astype(np.float32) for count in (12, 24)]

def pair_of(between, **more):
    y = reference.multiply(Pattern(*first), x, weights[0], "bsf", activation=between)
    return reference.multiply(Pattern(*second), y, weights[1], "bsf", **more)

chain = [Launcher(*first), Launcher(*second)]
y = ChainLauncher(*chain, between="relu", fuse="yes")(x, weights[:2], out_layout="bsl")
assert np.abs(y.T - pair_of("relu")).max() < 1e-4
group = GroupLauncher(ChainLauncher(*chain, between="silu"), Launcher(*alone))
ys = group(x, [weights[:2], weights[2]], bias=bias)
assert np.abs(ys[0] - pair_of("silu", bias=bias[0])).max() < 1e-4
assert np.abs(ys[1] - reference.multiply(Pattern(*alone), x, weights[2], "bsf", bias=bias[1])).max() < 1e-4
print("right")
"""


@pytest.mark.slow
def test_a_bundle_serves_layers_and_groups_in_one_launch(sets: list[str], tmp_path: Path) -> None:
    (tmp_path / "layers.yaml").write_text(LAYERS)
    done = ksgen("bundle", "layers.yaml", "--arch", sets[0], cwd=tmp_path, KSGEN_CXX=unoptimized(tmp_path))
    assert f"of layers for {sets[0]} in layers.ksb (" in done.stdout, done.stderr
    command = [sys.executable, "-c", LAYERS_USER, str(tmp_path / "layers.ksb")]
    given = {
        "KSGEN_NO_COMPILE": "1",
        "KSGEN_CACHE_DIR": str(tmp_path / "empty"),
        "KSGEN_DEVICE": "native",
        "PYTHONPATH": str(ROOT),
    }
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | given)
    assert ran.stdout == "right\n", ran.stderr


@pytest.mark.slow
def test_processors_with_tiles_run_a_bundle_for_them(sets: list[str], tmp_path: Path) -> None:
    """Emulated tiles run binaries for tiles on a processor that only reports to have tiles."""
    if "x86-64-v4-bf16" not in sets:
        pytest.skip("this processor lacks the vectors that such a kernel uses next to tiles")
    (tmp_path / "one.yaml").write_text('kernels: [{pattern: "2,5,5,3", precision: bf16x6, batch: 5}]\n')
    playing = f"{unoptimized(tmp_path)} -DEMULATED_TILES"
    done = ksgen("bundle", "one.yaml", "--arch", "x86-64-v4-amx,x86-64-v4", cwd=tmp_path, KSGEN_CXX=playing)
    assert done.stdout.startswith("2 binaries of one for x86-64-v4-amx,x86-64-v4 in one.ksb ("), done.stderr
    amx, plain = (
        f"{INSTRUCTION_SETS[name].target} {family}"
        for name, family in (("x86-64-v4-amx", "amx"), ("x86-64-v4", "vector"))
    )
    bundle = tmp_path / "one.ksb"
    assert run_without_compiler(bundle, has="amx_tile,amx_bf16", precision="bf16x6") == [amx]
    assert run_without_compiler(bundle, "amx_bf16", has="amx_tile", precision="bf16x6") == [plain]


# Runs a layer in one launch on a processor that says it has tiles, as compiled for them elsewhere: prints by what.
TILES_USER = """
import sys
import numpy as np
import ksgen
from ksgen import reference
from ksgen.build import processors
from ksgen.launcher import ChainLauncher, Launcher
from ksgen.pattern import Pattern

features = processors._reported_features()
processors._reported_features = lambda: " ".join((*features.split(), "amx_tile", "amx_bf16"))
processors.tiles_are_permitted = lambda: True
ksgen.use_bundle(sys.argv[1])
shapes, random = ((2, 5, 5, 3), (1, 4, 10, 3)), np.random.default_rng(1)
x, *weights = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 30), *shapes))
call = ChainLauncher(*(Launcher(*shape) for shape in shapes), fuse="yes").prepare(x, weights, precision="bf16x6")
y = x
for shape, each in zip(shapes, weights):
    y = reference.multiply(Pattern(*shape), y, each, "bsf")
assert np.abs(call() - y).max() < 1e-4
print(call.plan.binary.target, call.plan.choice.family)
"""


@pytest.mark.slow
def test_and_a_layer_in_one_launch(sets: list[str], tmp_path: Path) -> None:
    if "x86-64-v4-bf16" not in sets:
        pytest.skip("this processor lacks the vectors that such a kernel uses next to tiles")
    layers = "layers: {up: {chain: [[2,5,5,3], [1,4,10,3]], precision: bf16x6, fuse: yes, batch: 64}}\n"
    (tmp_path / "up.yaml").write_text(layers)
    playing = f"{unoptimized(tmp_path)} -DEMULATED_TILES"
    done = ksgen("bundle", "up.yaml", "--arch", "x86-64-v4-amx", cwd=tmp_path, KSGEN_CXX=playing)
    assert "of up for x86-64-v4-amx in up.ksb (" in done.stdout, done.stderr
    given = {
        "PATH": "/nowhere",
        "KSGEN_CACHE_DIR": str(tmp_path / "empty"),
        "KSGEN_DEVICE": "native",
        "PYTHONPATH": str(ROOT),
    }
    command = [sys.executable, "-c", TILES_USER, str(tmp_path / "up.ksb")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=given)
    assert ran.stdout == f"{INSTRUCTION_SETS['x86-64-v4-amx'].target} amx\n", ran.stderr


def test_a_compiler_that_makes_no_such_code_is_named(tmp_path: Path, spec: Path) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'old 9.1'\n")
    old.chmod(0o755)
    done = ksgen("bundle", spec.name, "--arch", "x86-64-v4-amx-fp16", cwd=spec.parent, KSGEN_CXX=str(old))
    says = (
        f"{old} (old 9.1) cannot compile for x86-64-v4-amx-fp16, which needs GCC from 13 on or Clang from 16 on; "
        "KSGEN_CXX names another"
    )
    assert (done.returncode, says in done.stderr) == (2, True), done.stderr


def test_a_bundle_of_another_version_is_reported(sets: list[str], tmp_path: Path) -> None:
    """The bundle's kernels fit this processor, but the code that runs them has changed since."""
    target = INSTRUCTION_SETS[sets[0]].target
    binary = Binary(
        b"old", "ksgen_launch", target, provenance={"compiler": "c++", "compiler_version": "1", "options": ""}
    )
    write_bundle(tmp_path / "old.ksb", [(Request("of old", "ksgen_launch", target), binary)])
    (refused,) = run_without_compiler(tmp_path / "old.ksb")
    assert refused.endswith(f"; a bundle holds kernels for {sets[0]}, but another version of ksgen wrote it")


@pytest.mark.parametrize(
    ("arch", "says"),
    [
        (
            "x86-64-v9",
            f"ksgen: 'x86-64-v9' is not a target; accepted: host, {', '.join(INSTRUCTION_SETS)}, and targets of "
            "GPUs, such as sm_90a\n",
        ),
        ("sm_90a,native", "ksgen: 'native' is not a target; accepted: host, "),
    ],
)
def test_what_is_no_target_is_refused(arch: str, says: str, spec: Path) -> None:
    done = ksgen("bundle", spec.name, "--arch", arch, cwd=spec.parent)
    assert (done.returncode, done.stderr.startswith(says)) == (2, True), done.stderr


def test_bundles_for_another_kind_of_processor(tmp_path: Path) -> None:
    """A cross-compiler builds the bundle. Its binary does not run here."""
    other = next(
        each for each in INSTRUCTION_SETS.values() if each not in instruction_sets_here() and each.machine == "aarch64"
    )
    try:
        compiler_for(other.target)
    except ToolchainError as absent:
        pytest.skip(str(absent))
    (tmp_path / "one.yaml").write_text('kernels: [{pattern: "2,9,5,3", batch: 5}]\n')
    done = ksgen("bundle", "one.yaml", "--arch", other.name, cwd=tmp_path)
    assert "1 binary of one for aarch64 in one.ksb (" in done.stdout, done.stderr
    (refused,) = run_without_compiler(tmp_path / "one.ksb")
    assert "; a bundle holds kernels for aarch64, but this processor is x86_64" in refused
