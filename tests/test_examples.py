"""The programs in examples/ run in their shortest form, and print what they promise."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.hasty import compiles_hastily
from tests.support.libraries import needs
from tests.support.program import needs_device

__all__ = ["compiles_hastily"]  # which pytest finds by its name
EXAMPLES = Path(__file__).parents[1] / "examples"
ROOT = EXAMPLES.parent
needs_torch, needs_transformers = needs("torch"), needs("transformers")


def run(program: str, *arguments: str, cwd: Path, launcher: tuple[str, ...] = (), **environment: str) -> str:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *launcher, EXAMPLES / program, *arguments], cwd=cwd, env={**os.environ, "PYTHONPATH": path,
            **environment},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def emulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a program in this process, which has imported PyTorch, and maybe transformers: that takes longer than
    most programs.
    """

    def run(program: str, *arguments: str) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_program_is_run_here() -> None:
    tests = Path(__file__).read_text(encoding="utf-8")
    programs = sorted(path.name for path in EXAMPLES.glob("*.py"))
    assert programs == [
        "convert_llama.py",
        "decode_8bit.py",
        "digits.py",
        "fine_tune.py",
        "fine_tune_boft.py",
        "learn_fft.py",
        "propose_vit.py",
        "serve.py",
        "several_processes.py",
        "shufflenet.py",
    ]
    assert [name for name in programs if len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) > 80] == []
    assert [
        name
        for name in programs
        if f"(../examples/{name})" not in (ROOT / "docs" / "torch.md").read_text(encoding="utf-8")
    ] == []
    assert [name for name in programs if not re.search(rf'(run|emulated)\("{name}"', tests)] == []


@pytest.mark.libraries
@needs_torch
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("serve.py", "say what to do with which file: python examples/serve.py pack up.ksb\n"),
        ("several_processes.py", "torchrun --nproc-per-node 2 examples/several_processes.py starts it\n"),
    ],
)
def test_a_program_that_needs_more_reports_it_in_one_line(
    program: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [program])
    with pytest.raises(SystemExit, match="2"):
        runpy.run_path(str(EXAMPLES / program), run_name="__main__")
    assert capsys.readouterr() == ("", told)


@pytest.mark.exhaustive
@pytest.mark.libraries
@needs_torch
@needs_transformers
@pytest.mark.parametrize(
    ("structure", "chain"), [("monarch", "8,16,16,1 then 1,8,8,16"), ("blast", "4,16,32,1 then 1")]
)
def test_convert_llama(structure: str, chain: str, emulated: Callable[..., str]) -> None:
    out = emulated("convert_llama.py", "--short", "--structure", structure)
    assert chain in out
    assert "7 layers replaced: 254,336 parameters became " in out
    found = re.findall(r"(\w+): loss ([\d.]+) to ([\d.]+), \d+% of the next numbers right, [\d.]+ ms each", out)
    assert [name for name, *_ in found] == ["dense", structure]
    assert all(float(last) < float(first) for _, first, last in found)


@pytest.mark.libraries
@needs_torch
def test_decode_8bit(emulated: Callable[..., str]) -> None:
    out = emulated("decode_8bit.py", "--short", "--storage", "e4m3")
    assert "4 layers in e4m3, a scale per output: 65,536 bytes became 19,712." in out
    sizes = [float(each) for each in re.findall(r"ms a token(?:\? \([^)]*\))?, ([\d.]+) MB of blocks", out)]
    assert sizes[1] < 0.4 * sizes[0]
    assert int(re.findall(r"(\d+)% of the next ones are equal", out)[0]) > 50


@pytest.mark.libraries
@needs_torch
def test_digits(emulated: Callable[..., str]) -> None:
    lines = emulated("digits.py", "--short").splitlines()
    found = [re.match(r" *(\w+): accuracy ([\d.]+)%, ([\d.]+) MB", line).groups() for line in lines]  # type: ignore[union-attr]
    assert [name for name, *_ in found] == ["dense", "masked", "KSLinear"]
    assert all(float(accuracy) > 20 for _, accuracy, _ in found)  # a guess is right in 10
    dense, masked, sparse = (float(memory) for *_, memory in found)
    assert sparse < dense < masked


@pytest.mark.libraries
@needs("torch", "peft", "transformers")
def test_fine_tune_boft(emulated: Callable[..., str]) -> None:
    first, *lines = emulated("fine_tune_boft.py", "--short").splitlines()
    assert first == "7 layers accelerated"
    (begin, end), ours = (
        [float(each) for each in re.findall(r"loss ([\d.]+) to ([\d.]+), [\d.]+ ms a step", line)[0]] for line in lines
    )
    assert end < begin
    assert ours == pytest.approx([begin, end], abs=2e-4)


@pytest.mark.libraries
@needs_torch
@needs_transformers
def test_fine_tune(emulated: Callable[..., str]) -> None:
    out = emulated("fine_tune.py", "--short")
    losses = [float(each) for each in re.findall(r"loss ([\d.]+), [\d,]+ parameters", out)]
    sizes = [int(each.replace(",", "")) for each in re.findall(r"loss [\d.]+, ([\d,]+) parameters", out)]
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]
    assert sizes[0] == sizes[1] > sizes[2] == sizes[3]
    assert "2 layers replaced" in out


@pytest.mark.libraries
@needs_torch
def test_learn_fft(emulated: Callable[..., str]) -> None:
    out = emulated("learn_fft.py", "--short", "--size", "16")
    assert "1,4,4,4 then 4,4,4,1: 128 weights, where the matrix has 256" in out
    losses = [float(each) for each in re.findall(r"loss ([\d.e+-]+)", out)]
    assert losses[-1] < 0.9 * losses[0]
    learned, exact = (float(each) for each in re.findall(r"error ([\d.e+-]+)", out))
    assert exact < 1e-6 < learned < 1


@needs_device
def test_serve(tmp_path: Path) -> None:
    packed = run("serve.py", "pack", "up.ksb", cwd=tmp_path)
    assert "up.ksb: 2 kernels for " in packed
    out = run("serve.py", "serve", "up.ksb", "--short", cwd=tmp_path, KSGEN_CACHE_DIR=str(tmp_path / "empty"))
    assert out.count("an answer of 16 x 1536 numbers\n") == 5


@pytest.mark.libraries
@needs_torch
def test_propose_vit(emulated: Callable[..., str]) -> None:
    out = emulated("propose_vit.py", "--short", "--device", "sm_80", "--most", "1")
    assert "12 layers of 384 to 1152 features, such as blocks.0.attention.qkv" in out
    before, after = (
        int(each.replace(",", "")) for each in reversed(re.findall(r"([\d,]+) of ([\d,]+) parameters", out)[0])
    )
    assert after < before == 22_050_664


@pytest.mark.libraries
@needs_torch
def test_several_processes(tmp_path: Path) -> None:
    """The launcher is what `torchrun` starts."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    *ways, columns, rows, saved = run("several_processes.py", "--short", cwd=tmp_path, launcher=launcher).splitlines()
    found = [
        re.fullmatch(r"(.+): loss ([\d.]+), then ([\d.]+); ([\d,]+) parameters on each of 2", line).groups()
        for line in ways
    ]  # type: ignore[union-attr]
    assert [name for name, *_ in found] == ["DDP", "FSDP2", "tensor parallel"]
    first, last = ([float(each) for each in losses] for losses in list(zip(*found, strict=True))[1:3])
    assert max(first) - min(first) < 2e-5
    assert max(last) - min(last) < 2e-5
    assert last[0] < first[0] / 2
    whole, sharded, split = (int(each.replace(",", "")) for *_, each in found)
    assert (2 * sharded, 2 * split - 64) == (whole, whole)  # each has the bias of `down`, which has 64 entries
    assert columns.startswith("KSColwise over 2 processes: factor 1 along k, factor 2 along a;")
    assert rows.startswith("KSRowwise over 2 processes: factor 1 along a, factor 2 along l;")
    assert float(saved.removeprefix("saved from 2 and loaded whole: outputs differ by ")) < 1e-5


@pytest.mark.libraries
@needs_torch
def test_shufflenet(emulated: Callable[..., str]) -> None:
    out = emulated("shufflenet.py", "--short")
    theirs, ours = (
        [float(each) for each in found]
        for found in re.findall(r"loss ([\d.]+) to ([\d.]+), \d+% of others right, [\d.]+ ms a step", out)
    )
    assert theirs[1] < theirs[0]
    assert ours == pytest.approx(theirs, abs=2e-3)
