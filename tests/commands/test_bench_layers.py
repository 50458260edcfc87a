"""`ksgen bench layers` end to end, and what it refuses."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench.rows import OK, read_rows
from ksgen.commands import bench
from ksgen.errors import DeviceError, KsgenError
from ksgen.install import install_line
from tests.support import program
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")

SPEC = """
layers:
  up: {chain: ["2,4,8,1", "1,12,4,2"], between: relu, bias: true}
  heads: {group: [["2,4,8,1"], ["1,8,16,1"]]}
"""
FEW = ("--measurements", "2", "--runs", "1", "--most-seconds", "5")


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "small.yaml").write_text(SPEC)
    (tmp_path / "one.yaml").write_text("layers: {up: ['1,4,4,1']}")
    (tmp_path / "none.yaml").write_text("kernels: ['1,4,4,1']")
    (tmp_path / "file").write_text("")
    line = {
        "kind": "contender",
        "key": "k",
        "pattern": "1,4,4,1",
        "arithmetic": "float32",
        "identity": "i",
        "status": "failed",
    }
    (tmp_path / "paper.jsonl").write_text(json.dumps({**line, "batch": 8}) + "\n")
    (tmp_path / "seed.jsonl").write_text(json.dumps({"kind": "run", "seed": 0}) + "\n")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def reliable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every time is reliable, however loaded the machine is."""
    monkeypatch.setattr("ksgen.bench.rows.why_unreliable", lambda *_: "")


def ksgen(*arguments: str) -> str:
    done = CliRunner().invoke(bench.command, list(arguments))
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.mark.usefixtures("small", "reliable", "without_tiles")  # tiles would be further rows
def test_the_command_and_its_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (
        "layers",
        "small.yaml",
        "--batch",
        "3,40",
        "--contenders",
        "one_launch,bmm,dense",
        "--device",
        "native",
        *FEW,
    )
    told = ksgen(*command)
    assert "4 of 4 jobs measured on " in told
    assert "; rows in layers.csv.\n" in told
    assert "ksgen bench report layers.jsonl makes a page of the rows." in told
    rows = read_rows(tmp_path / "layers.csv")
    assert rows == read_rows(tmp_path / "layers.jsonl")
    assert {(row.layer, row.batch, row.layout) for row in rows} == {
        (f"small {name}", batch, "bsf") for name in ("up", "heads") for batch in (3, 40)
    }
    assert all(row.is_accurate for row in rows if row.status == OK)
    told = ksgen(*command, "--json")
    assert {**json.loads(told), "device": "", "in_doubt": 0} == {
        "device": "", "jobs": 4, "complete": 4, "files": ["layers.jsonl", "layers.csv"], "rows": 12, "in_doubt": 0,
    }  # fmt: skip
    shown = ksgen("report", "layers.jsonl", "--markdown", "-")
    assert "## Layers" in shown
    monkeypatch.setattr("ksgen.bench.rows.why_unreliable", lambda *_: "unsteady")
    assert "## Layers" not in ksgen("report", "layers.jsonl", "--markdown", "-")


@pytest.mark.usefixtures("small", "reliable")
def test_a_spec_alone_is_measured_and_shown_on_a_page(tmp_path: Path) -> None:
    told = ksgen("small.yaml", "--batch", "3", "--contenders", "one_launch,bmm,dense", *FEW)
    assert "; rows in small.csv.\n" in told
    assert told.endswith("small.html shows the rows.\n")
    page = (tmp_path / "small.html").read_text()
    rows = read_rows(tmp_path / "small.jsonl")
    assert {row.layer for row in rows} == {"small up", "small heads"}
    assert "<h2>Layers</h2>" in page
    assert "<h2>Charts</h2>" in page
    told = json.loads(
        ksgen("small.yaml", "--batch", "3", "--contenders", "one_launch,bmm,dense", *FEW, "-o", "own.jsonl", "--json")
    )
    assert told["files"] == ["own.jsonl", "own.csv", "own.html"]


def jobs_of_commands(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The jobs that following commands would measure."""
    asked: list[Any] = []
    for name, stand_in in {
        "bench_layers.find_sharing": lambda named: None,
        "bench_common.measure_by": lambda output, device, quantity, parts, *_: asked.extend(parts[0].jobs),
        "bench_common.print_results": lambda *_: None,
    }.items():
        monkeypatch.setattr(f"ksgen.commands.{name}", stand_in)
    return asked


@pytest.mark.parametrize("option", ["--group-size", "--beside"])  # the second is its earlier name
@pytest.mark.parametrize(
    ("options", "names", "activations"),
    [
        ((), ["up", "transposed", "up, 2 side by side"], {"gelu"}),
        (("--activation", "none"), ["up", "transposed", "up, 2 side by side"], {"none"}),
    ],
)
def test_options_take_the_place_of_what_a_spec_says(
    options: tuple[str, ...],
    names: list[str],
    activations: set[str],
    option: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer that gives y in another layout is not part of a group."""
    spec = tmp_path / "own.yaml"
    chain = "{chain: ['2,4,8,1', '1,12,8,1'], activation: gelu"
    layers = f"up: {chain}}}, transposed: {chain}, out_layout: bsl}}"
    spec.write_text(f"layers: {{{layers}}}")
    asked = jobs_of_commands(monkeypatch)
    ksgen("layers", str(spec), "--batch", "3", option, "2", *options)
    assert list(dict.fromkeys(job.layer.name.removeprefix("own ") for job in asked)) == names
    assert {job.layer.epilogue.activation for job in asked} == activations


@pytest.mark.parametrize(
    ("options", "batches"),
    [((), {"usual": {1, 16, 1568}, "own": {8, 9}}), (("--batch", "3"), {"usual": {3}, "own": {3}})],
)
def test_a_spec_says_at_which_batches_and_whether_its_layers_are_one_launch(
    options: tuple[str, ...], batches: dict[str, set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = tmp_path / "s.yaml"
    chain = "chain: ['2,4,8,1', '1,12,8,1']"
    spec.write_text(f"layers: {{usual: {{{chain}, fuse: 'no'}}, own: {{{chain}, batch: [8, 9]}}}}")
    asked = jobs_of_commands(monkeypatch)
    ksgen("layers", str(spec), *options)
    found = {name: {job.batch for job in asked if job.layer.name == f"s {name}"} for name in ("usual", "own")}
    assert found == batches
    assert {job.layer.name: job.layer.fuse for job in asked} == {"s usual": "no", "s own": "auto"}


def test_steps_are_jobs_of_each_layer_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = jobs_of_commands(monkeypatch)
    ksgen("layers", "named", "--subset", "2", "--batch", "16", "--steps", "training,forward")
    kinds = [(precision, "bsf", step) for precision in ("float32", "bfloat16") for step in ("training", "forward")]
    assert [(job.precision, job.layout, job.step) for job in asked] == 2 * kinds
    asked.clear()
    ksgen("layers", "structures", "--subset", "1", "--batch", "16")
    assert [(job.precision, job.layout, job.step) for job in asked] == [
        ("float32", layout, "forward") for layout in ("bsf", "bsl")
    ]


MISTAKES = [
    (["--batch", "1,0"], "--batch '1,0'; accepted: whole numbers from 1 up, separated by commas, such as 1,16,1568"),
    (["transformer"], "'transformer' names no layers; did you mean transformers? accepted: transformers, structures, "
                      "random, named, or a spec such as"),
    (["--steps", "decode"], "--steps 'decode'; accepted: forward, training"),
    (
        ["none.yaml"],
        "none.yaml has no layers; accepted: a spec with `layers:`, transformers, structures, random, named; "
        "`ksgen bench paper --patterns none.yaml` times its kernels",
    ),
    (["missing.yaml"], "missing.yaml: cannot be read"),
    (["--contenders", "bmn"], "contender 'bmn'; did you mean bmm? accepted: one_launch, each_factor"),
    (["--contenders", "bmm", "--without", "bmm"], "no contender is left: --without excludes all of them"),
    (["--precision", "float64"], "precision 'float64'; did you mean float16? accepted: float32, tf32"),
    (["-o", "rows.csv"], "-o rows.csv: the log is a .jsonl file; its rows go to the .csv next to it"),
    (["-o", "seed.jsonl", "--seed", "1"], "seed.jsonl holds measurements with --seed 0, and this has 1; name another "
                                          "file with -o"),
    (["-o", "paper.jsonl"], "paper.jsonl holds measurements of `ksgen bench paper`; name another file with -o"),
    (["--time-limit", "0s"], "--time-limit ended before the first measurement; give more time"),
    (["one.yaml", "--contenders", "each_factor"], "none of these contenders supports these layers; name "
                                                  "other contenders"),
    (["--device", "abacus"], "device 'abacus': none is called that"),
]  # fmt: skip


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("arguments", "message"), MISTAKES, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str) -> None:
    done = program.ksgen("bench", "layers", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    # a notice about a busy machine may come first
    assert done.stderr.splitlines()[-1].startswith(f"ksgen: {message}"), done.stderr


@pytest.mark.usefixtures("small")
def test_copies_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SimpleNamespace(kind="opencl", shares_host=False, name="Abacus", runtime="opencl")
    monkeypatch.setattr("ksgen.devices.find_device", lambda name: device)
    with pytest.raises(
        DeviceError,
        match=r"PyTorch's own arrays, and Abacus \(opencl\) works on copies; accepted: --device native, cuda",
    ):
        ksgen("layers")


@pytest.mark.usefixtures("small")
def test_a_log_of_layers_is_not_one_of_products(tmp_path: Path) -> None:
    line = {
        "kind": "contender",
        "key": "k",
        "pattern": "2,4,8,1",
        "layer": "up",
        "arithmetic": "float32",
        "identity": "i",
        "status": "failed",
    }
    (tmp_path / "layers.jsonl").write_text(json.dumps({**line, "batch": 8}) + "\n")
    with pytest.raises(KsgenError, match=r"holds measurements of `ksgen bench layers`; name another file with -o"):
        ksgen("paper", "--patterns", "1,4,4,1", "--batch", "8", "-o", "layers.jsonl")


def test_no_pytorch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(KsgenError) as refused:
        ksgen("layers")
    assert str(refused.value) == f"`ksgen bench layers` needs torch: {install_line('bench')}"
