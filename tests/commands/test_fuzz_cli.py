"""Command lines at random: exit code 0, 1 or 2, never a traceback, and nothing written but what was asked for.

The console script's own `main` runs in this process. Stand-ins replace what takes time: `build_many` compiles
nothing, and `measure` measures nothing. The code that chooses, renders, writes and prints is the real one.
"""

import io
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ksgen import cli
from ksgen.build import build
from ksgen.build.request import Binary, Request, Resources
from ksgen.commands import build as build_command
from ksgen.commands import demo
from ksgen.emit.render import render
from ksgen.families.simt.shape import SimtConstants
from ksgen.launch.choice import Choice
from ksgen.measure import roofline, trust, verify
from ksgen.pattern import Pattern
from ksgen.spec import ACTIVATIONS, LAYOUTS, PRECISIONS, KernelSpec
from ksgen.wisdom import Entry, Wisdom, dump, dump_export
from tests.support.damage import fuzzing

pytestmark = pytest.mark.slow

SMALL = (
    'kernels: ["2,9,5,3", {pattern: [1,4,4,1], precision: float16, batch: 70}]\nlayers: {both: [[2,3,4,1], '
    "[1,5,6,1]]}\n"
)
SAID = ("--device-name ", "compiling ")  # on stderr, for an unknown name and for each target
FOUND = Entry(
    KernelSpec(Pattern(6, 64, 64, 1)), 64, "simt", SimtConstants(64, 32, 8, 1, 8, 8, 3, 1, "async"), {"median_us": 1.5}
)
KNOWN = {
    "one.json": dump("gpu", Wisdom([FOUND])),
    "two.json": dump_export({name: Wisdom([FOUND]) for name in ("gpu", "other")}),
}
FILES = KNOWN | {
    "wisdom/gpu.json": KNOWN["one.json"],
    "small.yaml": SMALL,
    "bad.yaml": "kernel: 1\n",
    "text": "dear",
    "folder/text": "dear",
    "generated/other/text": "dear",
}


def fake_build_many(jobs: list[Request], *_: Any, on_done: Any = None, **__: Any) -> list[Binary]:
    provenance = {"compiler": "none", "compiler_version": "1", "options": "[]"}
    binaries = [
        Binary(b"code", job.entry, job.target, Resources(spill_bytes=number % 2), provenance)
        for number, job in enumerate(jobs)
    ]
    for job, binary in zip(jobs, binaries, strict=True):
        on_done(job, binary)
    return binaries


def fake_measure(
    device: Any, kernel: KernelSpec, batch: int, runs: int = 10, seed: int = 0, family: str | None = None
) -> verify.Measured:
    source = render(kernel, family=family)

    class Plan:
        choice = Choice("simt", source.constants, "a fuzzed command")

    Plan.source = source  # type: ignore[attr-defined]
    return verify.Measured(Plan, 1e-7, 1e-6 * (seed % 2), batch, (1e-5,) * runs)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Provide the folder in which commands run. They must not change HOME or the surrounding folder."""
    around = tmp_path_factory.mktemp("around")
    home = Path.cwd()
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in (("HOME", "home"), ("KSGEN_CACHE_DIR", "in/cache"), ("KSGEN_WISDOM_DIR", "in/wisdom")):
            patch.setenv(name, str(around / folder))
        # that driver keeps a cache at home of its own accord
        patch.setenv("POCL_CACHE_DIR", str(tmp_path_factory.mktemp("pocl")))
        for module in (build_command, build):
            patch.setattr(module, "build_many", fake_build_many)
        patch.setattr(verify, "measure", fake_measure)
        patch.setattr(trust, "look", lambda: "")  # whatever else this machine does
        patch.setattr(verify, "make_problem", lambda *_: None)
        patch.setattr(demo, "_in_turns_with_numpy", lambda *_: [trust.Blocks((1e-5,))] * 2)
        patch.setattr(roofline, "measure_ceilings", lambda *_: roofline.Ceilings(1e9, 1e9))
        (around / "home").mkdir()
        yield around
    os.chdir(home)


def ksgen(place: Path, arguments: list[str], typed: str = "") -> tuple[int, str, str]:
    """Exit code, output and errors of the console script in a folder with FILES."""
    folder = place / "in"
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    os.chdir(folder)
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict")
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace")
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", ["ksgen", *arguments])
        patch.setattr(sys, "stdin", io.StringIO(typed))
        code: Any = 0
        try:
            cli.main()
        except SystemExit as finished:
            code = finished.code
    said, complained = (stream.detach().getvalue().decode() for stream in (out, err))  # type: ignore[attr-defined]
    return code, said, complained


any_text = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=12)
not_text = st.binary(min_size=1, max_size=4).filter(lambda name: b"\0" not in name).map(os.fsdecode)
words = (
    any_text
    | not_text
    | st.sampled_from(
        [
            "",
            " ",
            "-",
            "--",
            "-1",
            "0",
            "9" * 30,
            "9" * 5000,
            "1e9",
            "nan",
            "x" * 300,
            "x" * 5000,
            "a\nb",
            "\udcff",
            "[bold]",
            "%s",
            "{batch}",
            "é",
            "💥",
        ]
    )
)
paths = words | st.sampled_from(
    [
        "small.yaml",
        "bad.yaml",
        "text",
        "folder",
        "no/such",
        "text/x",
        "/dev/null/x",
        ".",
        "..",
        "/",
        "out",
        "specs/vit.yaml",
    ]
)
counts = words | st.sampled_from(["1", "2", "7", "25088", str(2**62), str(10**12)])
patterns = words | st.sampled_from(
    [
        "2,9,5,3",
        "1,192,48,2",
        "[6,64,64,1]",
        "1,2,3",
        "1,0,3,1",
        "1,2147483647,1,1",
        "1,1,2147483647,1",
        "1,46340,46340,1",
    ]
)


def one_of(*accepted: str) -> st.SearchStrategy[str]:
    return st.sampled_from(accepted) | words


files = paths | st.sampled_from([*KNOWN] * 3)
specs = paths | st.sampled_from(["small.yaml"] * 3)
outputs = {"-o": paths, "--json": None}
devices = one_of("opencl", "cuda", "pycuda:0", "driver:1", "opencl:7", "opencl:x", "abacus")
kernel = {"--precision": one_of(*PRECISIONS), "--layout": one_of(*LAYOUTS), "--batch": counts, "--json": None}
compiled = {
    "--arch": one_of("sm_90a", "sm_80,sm_90a", "sm_42", ",", "sm_90a,sm_90a"),
    "--device-name": words | st.just("NVIDIA H200"),
}
epilogue = {"--bias": None, "--residual": None, "--activation": one_of(*ACTIVATIONS)}
COMMANDS: dict[str, tuple[st.SearchStrategy[list[str]], dict[str, Any]]] = {
    "emit": (st.lists(specs, min_size=1, max_size=2), outputs | {"--dialect": one_of("cuda", "opencl")}),
    "build": (st.lists(specs, min_size=1, max_size=1), compiled | {"--jobs": counts, "--json": None}),
    "bundle": (st.lists(specs, min_size=1, max_size=1), compiled | outputs),
    "run": (
        st.lists(words, max_size=1),
        kernel | epilogue | {"--pattern": patterns, "--device": devices, "--runs": counts, "--seed": counts},
    ),
    "demo": (st.lists(specs, max_size=1), outputs | {"--batch": counts, "--device": devices}),
    "show": (
        st.lists(patterns, max_size=3),
        kernel | {"--pattern": patterns, "--spec": specs, "--png": paths, "--device": devices},
    ),
    "wisdom": (
        st.tuples(one_of("show", "merge", "diff", "export", "import"), files, files).map(list)
        | st.tuples(st.sampled_from(["show", "export"])).map(list)
        | st.tuples(st.just("import"), files).map(list),
        outputs | {"--device": words | st.sampled_from(["gpu", "o"]), "--pattern": patterns},
    ),
    "doctor": (st.lists(words, max_size=1), {"--json": None}),
    "cache": (
        st.tuples(one_of("path", "ls", "verify", "gc", "clear")).map(list),
        {"--folder": paths, "--max-bytes": counts, "--yes": None, "--json": None},
    ),
}


@st.composite
def lines(draw: st.DrawFn, command: str) -> list[str]:
    required, optional = COMMANDS[command]
    line = draw(required)
    for name in draw(st.lists(st.sampled_from(sorted(optional)), max_size=4)):
        line += [name] if optional[name] is None else [name, draw(optional[name])]
    return [command, *line]


def check(place: Path, line: list[str], typed: str = "") -> None:
    code, said, complained = ksgen(place, line, typed)
    assert code in (0, 1, 2), (code, complained)
    assert "Traceback" not in said + complained
    complaints = [each for each in complained.splitlines() if code or not each.startswith(SAID)]
    assert len(complaints) == (code == 2) or "\n" in "".join(line), complained
    assert sorted(os.listdir(place)) == ["home", "in"]
    assert os.listdir(place / "home") == []
    for name in ("text", "bad.yaml", "folder/text", "generated/other/text", *KNOWN):
        if name not in line:  # else it was named as an output
            assert Path(name).read_text() == FILES[name], line


@pytest.mark.exhaustive
@pytest.mark.parametrize("command", COMMANDS)
def test_a_random_command_line(place: Path, command: str) -> None:
    @fuzzing(60 if command != "doctor" else 5)
    @given(lines(command), st.sampled_from(["", "y\n", "n\n"]))
    def one(line: list[str], typed: str) -> None:
        check(place, line, typed)

    one()
