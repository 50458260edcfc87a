"""The command line: what a user's mistakes print, and emit, build, bundle, run and demo end to end."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ksgen.build.toolchain import find_compiler
from ksgen.devices import Found, list_devices
from ksgen.errors import ToolchainError

ROOT = Path(__file__).parents[2]
SMALL = 'defaults: {precision: [float32, float16]}\nkernels: ["2,9,5,3"]\n'


def ksgen(*arguments: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "ksgen", *arguments], cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )


def has_device() -> bool:
    return any(isinstance(line, Found) for line in list_devices())


def has_compiler() -> bool:
    try:
        find_compiler()
    except ToolchainError:
        return False
    return True


needs_device = pytest.mark.skipif(not has_device(), reason="no GPU and no OpenCL device")
needs_compiler = pytest.mark.skipif(not has_compiler(), reason="neither nvcc nor NVRTC")


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(SMALL)
    return path


MISTAKES = [
    (["frobnicate"], "ksgen: no command 'frobnicate'; commands: emit, build,"),
    (["emti"], "ksgen: no command 'emti'; did you mean emit?"),
    (["emit"], "ksgen: Missing argument 'SPEC'. (ksgen emit --help)"),
    (["emit", "none.yaml"], "ksgen: none.yaml: cannot be read"),
    (["emit", "bad.yaml"], "ksgen: bad.yaml:1: spec: unknown key 'kernel'; did you mean kernels?"),
    (["build", "small.yaml", "--arch", "sm_42"], "ksgen: "),
    (["build", "bad.yaml"], "ksgen: bad.yaml:1"),
    (["bundle", "none.yaml"], "ksgen: none.yaml: cannot be read"),
    (["run"], "ksgen: got 0 patterns; accepted: one, such as ksgen run 1,192,48,2"),
    (["run", "1,2,3,1", "--pattern", "1,2,3,1"], "ksgen: got 2 patterns; accepted: one, such as"),
    (["x" * 5000], "ksgen: no command 'xxx"),
    (["run", "1,2,3,1", "--device", "x" * 5000], "ksgen: device 'xxx"),
    (["wisdom", "merge"], "ksgen: Missing argument 'FIRST'. (ksgen wisdom merge --help)"),
    (["run", "--pattern", "1,2,3"], "ksgen: '1,2,3' is not a pattern"),
    (["run", "--pattern", "1,0,3,1"], "ksgen: "),
    (["run", "--pattern", "1,2,3,1", "--batch", "0"], "ksgen: --batch 0: a batch is a whole number of at least 1"),
    (["run", "--pattern", "1,2,3,1", "--precision", "float8"], "ksgen: Invalid value for '--precision': 'float8' is not one of"),
    (
        ["run", "--pattern", "1,2,3,1", "--device", "opencl", "--family", "cuda"],
        "ksgen: unknown kernel family 'cuda'; known: vector, vec",
    ),
    (
        ["run", "--pattern", "1,2,3,1", "--device", "opencl", "--family", "mma"],
        "ksgen: ks_1x2x3x1_float32_bsf at batch 1568: mma does",
    ),
    (["run", "--pattern", "1,2,3,1", "--device", "abacus"], "ksgen: device 'abacus': none is called that; found: "),
    (["run", "--pattern", "1,2,3,1", "--batch", "1" + "0" * 12], "ksgen: --batch 1000000000000: checking ks_1x2x3x1_float32_bsf takes"),
    (["demo", "none.yaml"], "ksgen: none.yaml: cannot be read"),
    (["emit", "x" * 300], "ksgen: xxx"),
    (["emit", "a\tb.yaml"], "ksgen: a\\tb.yaml: cannot be read"),
    (["emit", "\udcff.yaml"], "ksgen: \\udcff.yaml: cannot be read"),
    (["emit", "small.yaml", "-o", "small.yaml"], "ksgen: small.yaml is no folder; name another folder with -o"),
    (["emit", "small.yaml", "-o", "x" * 300], "ksgen: [Errno 36] File name too long"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "bad.yaml").write_text('kernel: ["2,9,5,3"]\n')
    done = ksgen(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "small.yaml"]  # nothing half-written


@pytest.mark.parametrize("command", ["emit", "build", "bundle", "run", "demo"])
def test_help_has_examples(command: str) -> None:
    done = ksgen(command, "--help")
    assert done.returncode == 0
    assert f"ksgen {command}" in done.stdout.split("Examples:")[1]


def test_the_script_at_the_top_is_the_same_command(spec: Path) -> None:
    done = subprocess.run([sys.executable, ROOT / "cli.py", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == ksgen("--version").stdout


def test_completion_offers_the_commands() -> None:
    done = ksgen("--version", _KSGEN_COMPLETE="bash_source")
    assert "_ksgen_completion" in done.stdout


def test_emit_goes_to_generated_here_unless_told(spec: Path) -> None:
    done = ksgen("emit", spec.name, cwd=spec.parent)
    assert done.stdout == "2 kernels of small in generated/small\n"
    assert (spec.parent / "generated" / "small" / "ks_2x9x5x3_float32_bsf.cu").is_file()
    told = ksgen("emit", spec.name, "--dialect", "opencl", "-o", "elsewhere", "--json", cwd=spec.parent)
    assert json.loads(told.stdout)["folder"] == "elsewhere"
    assert (spec.parent / "elsewhere" / "ks_2x9x5x3_float32_bsf.cl").is_file()


def test_emit_writes_the_texts_of_a_family_asked_for(spec: Path, tmp_path: Path) -> None:
    done = ksgen("emit", str(spec), "--family", "simt", "-o", str(tmp_path / "plain"))
    assert done.returncode == 0, done.stderr
    assert all("simt.cu.j2" in path.read_text() for path in (tmp_path / "plain").glob("*.cu"))
    assert done.stderr == ""
    cores = ksgen("emit", str(spec), "--family", "mma", "-o", str(tmp_path / "cores"), "--json")
    assert cores.stderr == "left out, as mma does not serve them: 1 of 2 kernels (ks_2x9x5x3_float32_bsf)\n"
    assert json.loads(cores.stdout)["left_out"] == ["ks_2x9x5x3_float32_bsf"]
    refused = ksgen("emit", str(spec), "--family", "gradient", "-o", str(tmp_path / "none"))
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert "gradient serves none of its kernels (the weights' gradient" in refused.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("arguments", [(), ("bench",), ("wisdom",), ("cache",)])
def test_a_command_without_its_words_shows_its_help(arguments: tuple[str, ...]) -> None:
    done = ksgen(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: {' '.join(('ksgen', *arguments))} ")
    assert "\nCommands:\n" in done.stderr


def test_output_that_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    plain = ksgen("show", "2,2,2,2", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0, plain.stderr
    assert "b = 2 | . ##. ##" in plain.stdout
    assert "\\u" not in plain.stdout
    assert ksgen("cache", "path", "--folder", "\udcff", cwd=tmp_path, PYTHONIOENCODING="utf-8").stdout == "\\udcff\n"


def test_shipped_specs_are_found_from_any_folder(tmp_path: Path) -> None:
    done = ksgen("emit", "specs/gpt2.yaml", "-o", "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@needs_compiler
def test_build_fills_the_cache_and_says_what_it_made(spec: Path) -> None:
    done = ksgen("build", spec.name, "--arch", "sm_80,sm_90a", "--json", cwd=spec.parent, KSGEN_CACHE_DIR=str(spec.parent / "cache"))
    rows = json.loads(done.stdout)
    kernels = {(row["kernel"], row["target"]) for row in rows}
    assert kernels == {(f"ks_2x9x5x3_{precision}_bsf", target) for precision in ("float32", "float16") for target in ("sm_80", "sm_90a")}
    again = ksgen("build", spec.name, cwd=spec.parent, KSGEN_CACHE_DIR=str(spec.parent / "cache"), KSGEN_NO_COMPILE="1")
    assert again.stdout.startswith("4 binaries of small for sm_80,sm_90a in the cache, 0 with spilled registers")


@needs_compiler
@pytest.mark.parametrize("command", ["build", "bundle"])
def test_a_device_that_nobody_knows_is_named(command: str, spec: Path, tmp_path: Path) -> None:
    wisdom = tmp_path / "wisdom"
    wisdom.mkdir()
    (wisdom / "abacus.json").write_text('{"device": "Abacus", "entries": []}')
    arguments = (command, spec.name, "--arch", "sm_80", "--device-name")
    done = ksgen(*arguments, "Abakus", cwd=spec.parent, KSGEN_WISDOM_DIR=str(wisdom))
    assert done.returncode == 0
    assert done.stderr == "--device-name 'Abakus': no wisdom of that name, so constants are the defaults; known: Abacus\n"


@needs_compiler
def test_bundle_is_one_file(spec: Path) -> None:
    done = ksgen("bundle", spec.name, "--arch", "sm_90a", cwd=spec.parent)
    assert done.stdout.startswith("2 binaries of small for sm_90a in small.ksb ("), done.stderr
    assert (spec.parent / "small.ksb").stat().st_size > 1000


@needs_device
def test_run_checks_and_times_one_kernel() -> None:
    done = ksgen("run", "2,9,5,3", "--batch", "70", "--layout", "bsl", "--bias", "--activation", "silu", "--runs", "2", "--json")
    figures = json.loads(done.stdout)
    assert figures["passed"]
    assert figures["checked_batch_entries"] == 70
    assert 0 < figures["error"] <= figures["tolerance"]
    assert figures["median_us"] > 0
    share = None if figures["doubt"] else pytest.approx(figures["floor_us"] / figures["median_us"], rel=1e-2)
    assert figures["share_of_floor"] == share
    table = ksgen("run", "--pattern", "2,9,5,3", "--batch", "70", "--runs", "2")
    assert "of the floor" in table.stdout or "cannot be trusted" in table.stdout
    assert "passed" in table.stdout


@needs_device
def test_demo_checks_every_kernel_of_a_spec(spec: Path) -> None:
    done = ksgen("demo", spec.name, "--batch", "33", cwd=spec.parent)
    assert done.returncode == 0, done.stderr
    assert "2 of 2 kernels agree with float64" in done.stdout
    assert (spec.parent / "generated" / "small" / "manifest.json").is_file()
