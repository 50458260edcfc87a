"""The command line: what a user's mistakes print, and emit, build, bundle, run and demo end to end."""

import os
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from ksgen import cli
from ksgen.build.background import always_waits
from ksgen.errors import warn
from tests.support.program import SMALL, ksgen_program

ROOT = Path(__file__).parents[1]
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
    (
        ["run", "1,2,3,1", "--pattern", "1,2,3,1"],
        "ksgen: 1,2,3,1 gives 2 features, but the next pattern (1,2,3,1) takes 3",
    ),
    (
        ["run", "1,2,3,1", "1,3,2,1", "--job", "gradient"],
        "ksgen: --job gradient of 2 patterns; accepted: one pattern, such as ksgen run",
    ),
    (["x" * 5000], "ksgen: no command 'xxx"),
    (["run", "1,2,3,1", "--device", "x" * 5000], "ksgen: device 'xxx"),
    (["wisdom", "merge"], "ksgen: Missing argument 'FIRST'. (ksgen wisdom merge --help)"),
    (["run", "--pattern", "1,2,3"], "ksgen: '1,2,3' is not a pattern"),
    (["run", "--pattern", "1,0,3,1"], "ksgen: "),
    (["run", "--pattern", "1,2,3,1", "--batch", "0"], "ksgen: --batch 0: accepted: a whole number of at least 1"),
    (
        ["run", "--pattern", "1,2,3,1", "--precision", "float8"],
        "ksgen: Invalid value for '--precision': 'float8'; did you mean float64? accepted: float32, float64",
    ),
    (
        ["show", "1,2,3,1", "--precision", "fp16"],
        "ksgen: Invalid value for '--precision': 'fp16'; did you mean float16? accepted: float32,",
    ),
    (
        ["run", "1,2,3,1", "--activation", "glue"],
        "ksgen: Invalid value for '--activation': 'glue'; did you mean gelu? accepted: none, relu,",
    ),
    (
        ["run", "--pattern", "1,2,3,1", "--device", "opencl", "--family", "cuda"],
        "ksgen: unknown kernel family 'cuda'; known: amx, ve",
    ),
    (
        ["run", "--pattern", "1,2,3,1", "--device", "opencl", "--family", "mma"],
        "ksgen: ks_1x2x3x1_float32_bsf at batch 1568: not supported by mma",
    ),
    (["run", "--pattern", "1,2,3,1", "--device", "abacus"], "ksgen: device 'abacus': none is called that; found: "),
    (
        ["run", "--pattern", "1,2,3,1", "--batch", "1" + "0" * 12],
        "ksgen: --batch 1000000000000: checking ks_1x2x3x1_float32_bsf takes",
    ),
    (
        ["run", "1,2,3,1", "--batch", "9" * 400],
        "ksgen: --batch a number of 1329 bits: accepted: a whole number of at least 1, and below 2^63",
    ),
    (
        ["show", "1,2,3,1", "--batch", "9" * 400],
        "ksgen: Invalid value for '--batch': a number of 1329 bits; accepted: whole numbers below 2^63",
    ),
    (["demo", "none.yaml"], "ksgen: none.yaml: cannot be read"),
    (["emit", "x" * 300], "ksgen: xxx"),
    (["emit", "a\tb.yaml"], "ksgen: a\\tb.yaml: cannot be read"),
    (["emit", "\udcff.yaml"], "ksgen: \\udcff.yaml: cannot be read"),
    (["emit", "small.yaml", "-o", "small.yaml"], "ksgen: small.yaml is not a folder; name another folder with -o"),
    (["emit", "small.yaml", "-o", "x" * 300], "ksgen: [Errno 36] File name too long"),
]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(SMALL)
    (tmp_path / "bad.yaml").write_text('kernel: ["2,9,5,3"]\n')
    done = ksgen_program(*arguments, cwd=tmp_path)
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.startswith(message), done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert len(done.stderr) < 600
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.yaml", "small.yaml"]  # nothing half-written


def test_a_warning_is_one_line_without_its_place_in_the_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Warnings of ksgen are shortened, wherever they point to. Warnings of other libraries are not."""

    def warns(**_: object) -> None:
        warn("another is\nused instead")
        warnings.warn("no place of ksgen's", UserWarning, stacklevel=1)

    monkeypatch.setattr(warnings, "showwarning", lambda *warning: print(f"theirs: {warning[0]}", file=sys.stderr))
    monkeypatch.setattr(cli.cli, "main", warns)
    cli.main()
    own, *others = capsys.readouterr().err.splitlines()
    assert own == "ksgen: another is used instead"
    assert others == ["theirs: no place of ksgen's"]


def commands(group: click.Group, name: str) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, with all its words."""
    for word in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), word)
        assert found
        yield f"{name} {word}", found
        if isinstance(found, click.Group):
            yield from commands(found, f"{name} {word}")


@pytest.mark.parametrize("asked", ["", "background"])
def test_commands_wait_for_kernels_whatever_the_environment_asks(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They would measure what serves meanwhile."""
    monkeypatch.setenv("KSGEN_COMPILE", asked)
    seen: list[bool] = []
    monkeypatch.setattr(cli.cli, "main", lambda **_: seen.append(always_waits()))
    cli.main()
    assert seen == [True]


def test_every_help_has_examples_and_whole_summaries() -> None:
    found = dict(commands(cli.cli, "ksgen"))
    assert len(found) > 20
    for name, command in found.items():
        shown = CliRunner().invoke(command, ["--help"], env={"COLUMNS": "80"}, terminal_width=80).output
        assert f"  {name}" in shown.split("Examples:")[1], name
        assert isinstance(command, click.Group) is ("\nCommands:\n" in shown)
        assert "..." not in shown.partition("\nCommands:\n")[2], name


def test_no_name_is_empty() -> None:
    """An unset variable of a shell leaves `--device ""`, which must not choose the default device."""
    named = {"--device", "--device-name", "--family", "--layer", "--scheduler"}
    seen = set()
    for name, command in commands(cli.cli, "ksgen"):
        for option in command.params:
            if named & set(option.opts):
                seen |= set(option.opts)
                with pytest.raises(click.BadParameter, match=r"^''; accepted: a name, or no such option$"):
                    option.type.convert("", option, None)
                assert option.type.convert("H200", option, None) == "H200", name
    assert seen == named


def test_the_script_at_the_top_is_the_same_command() -> None:
    done = subprocess.run([sys.executable, ROOT / "cli.py", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == ksgen_program("--version").stdout


@pytest.mark.parametrize("start", ["the script", "-m ksgen", "cli.py"])
def test_ctrl_c_while_python_imports_ends_quietly(start: str, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    module, _, name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["ksgen"].partition(":")
    command = {"the script": ["-c", f"from {module} import {name}; {name}()"], "cli.py": [str(ROOT / "cli.py")]}
    done = subprocess.run(
        [sys.executable, *command.get(start, start.split())], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [("spec", "schema"), ("show", "1,4,6,4")])  # printed by click, and by rich
def test_a_command_whose_output_is_not_read_ends_like_others_in_a_pipe(
    arguments: tuple[str, ...], unbuffered: str
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command, environment = [sys.executable, ROOT / "cli.py", *arguments], {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")


def test_completion_offers_the_commands() -> None:
    done = ksgen_program("--version", _KSGEN_COMPLETE="bash_source")
    assert "_ksgen_completion" in done.stdout


@pytest.mark.parametrize("arguments", [(), ("bench",), ("wisdom",), ("cache",), ("spec",)])
def test_a_command_without_its_words_shows_its_help(arguments: tuple[str, ...]) -> None:
    done = ksgen_program(*arguments)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Usage: {' '.join(('ksgen', *arguments))} ")
    assert "\nCommands:\n" in done.stderr


def test_output_that_a_terminal_cannot_show_is_escaped(tmp_path: Path) -> None:
    plain = ksgen_program("show", "2,2,2,2", PYTHONIOENCODING="ascii")
    assert plain.returncode == 0, plain.stderr
    assert "b = 2 | . ##. ##" in plain.stdout
    assert "\\u" not in plain.stdout
    assert (
        ksgen_program("cache", "path", "--folder", "\udcff", cwd=tmp_path, PYTHONIOENCODING="utf-8").stdout
        == "\\udcff\n"
    )
