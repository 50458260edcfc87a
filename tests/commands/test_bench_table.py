"""`ksgen bench table`: its parts and their order, how it shares time, continues and reports, and what it refuses."""

import json
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ksgen.bench.chains import named_layers
from ksgen.bench.roster import METHODS, METHODS_OF_MODELS, NAMES, WHOLE
from ksgen.bench.rows import OK, kinds_of, read_rows
from ksgen.commands import bench, bench_table
from ksgen.commands.bench_common import Done, Part, measure_by
from ksgen.install import install_line
from ksgen.spec import stratified
from tests.support import program
from tests.support.bench_rows import row
from tests.support.libraries import library

pytestmark = pytest.mark.libraries
torch = library("torch")
from tests.support.bench_runs import lines_of  # noqa: E402
from tests.support.small_models import use_small_models  # noqa: E402

TINY = ("--subset", "1", "--batch", "16", "--precision", "float32", "--measurements", "1", "--runs", "1")


def ksgen(*arguments: str) -> str:
    done = CliRunner().invoke(bench.command, list(arguments))
    if done.exception:
        raise done.exception
    return done.stdout


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Parts that the command would measure, on a processor."""
    found: list[Any] = []

    def note(output: Path, device: Any, quantity: Any, parts: list[Part], *_: Any, **options: Any) -> Done:
        found.extend(parts)
        found.append(options)
        return Done("Abacus", 0, 0, (output,))

    device = SimpleNamespace(limits=SimpleNamespace(is_cpu=True))
    monkeypatch.setattr("ksgen.commands.bench_common.measure_by", note)
    monkeypatch.setattr("ksgen.commands.bench_table.find_sharing", lambda named: device)
    monkeypatch.setattr("ksgen.commands.bench_common.print_results", lambda *_: None)
    return found


def test_the_work_of_all_parts(parts: list[Any]) -> None:
    ksgen("table")
    *measured, options = parts
    assert options == {"takes_all": True}
    patterns, layers, models, *trained = measured
    count = 60 * 2 * 2
    assert [part.protocol.names for part in measured] == 2 * [NAMES, METHODS, tuple(METHODS_OF_MODELS)]
    assert [part.protocol.most_seconds for part in measured] == [1, 1, 20, 3, 3, 60]
    assert [job.batch for job in patterns.jobs] == [1568] * count + [16] * count + [1] * count + [25088] * count
    kinds = [(layout, precision) for precision in ("float32", "bfloat16") for layout in ("bsf", "bsl")]
    assert [(job.pattern, (job.layout, job.precision)) for job in patterns.jobs[:count]] == [
        (pattern, kind) for pattern in stratified(60) for kind in kinds
    ]
    assert [(job.layer.name, job.precision) for job in layers.jobs[:58]] == [
        (layer.name, precision) for layer in named_layers() for precision in ("float32", "bfloat16")
    ]
    assert [(job.layer.name, job.batch, job.precision) for job in models.jobs] == [
        (name, batch, precision)
        for batch in (8, 1)
        for name in ("vit-s16", "gpt2-medium, 64 tokens")
        for precision in ("float32", "bfloat16")
    ]
    assert [{job.step for job in part.jobs} for part in trained] == 3 * [{"training"}]
    assert [[job.key for job in part.jobs] for part in trained] == [
        [f"{job.key} training" for job in part.jobs] for part in (patterns, layers, models)
    ]


def test_options_select_parts_and_contenders(parts: list[Any]) -> None:
    ksgen("table", "--parts", "layers,models", "--steps", "training", "--contenders", "ksgen,bmm,authors", "--subset",
          "2", "--batch", "1,3136")  # fmt: skip
    layers, models, _ = parts
    assert (layers.protocol.names, models.protocol.names) == (("bmm", "authors"), ("bmm",))
    assert [(job.layer.name, job.batch) for job in layers.jobs[::2]] == [
        (layer.name, batch) for batch in (1, 3136) for layer in named_layers()[:2]
    ]
    assert list(dict.fromkeys(job.batch for job in models.jobs)) == [1, 8]
    parts.clear()
    ksgen("table", "--steps", "forward", "--contenders", "one_launch", "--without", "layer")
    assert [part.protocol.names for part in parts[:-1]] == [("one_launch",)]


def test_parts_share_the_time_and_incomplete_ones_get_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, asked = [100.0], list[tuple[int, float]]()
    completes = {0: [1, 2], 1: [3], 2: [0, 4]}  # jobs that are complete after each run of a part
    takes = {0: 10.0, 1: 5.0, 2: 20.0}

    class Watched:
        def __init__(
            self, log: Any, device: Any, protocol: int, quantity: Any, facts: Any, ends: float, _: Any
        ) -> None:
            self.part = protocol
            asked.append((protocol, ends - now[0]))
            log.content.contenders["any"] = None

        def run(self, jobs: Any, takes_all: bool) -> int:
            assert takes_all
            now[0] += takes[self.part]
            return completes[self.part].pop(0)

    monkeypatch.setattr("ksgen.commands.bench_common.monotonic", lambda: now[0])
    monkeypatch.setattr("ksgen.bench.runner.Runner", Watched)
    monkeypatch.setattr("ksgen.bench.runner.run_facts", lambda device: {})
    monkeypatch.setattr("ksgen.commands.bench_common.write_rows", lambda output: ())
    monkeypatch.setattr("ksgen.commands.common.warn_if_busy", lambda: None)
    work: list[Any] = [Part(0, [0] * 2), Part(1, [0] * 3), Part(2, [0] * 4)]  # type: ignore[arg-type]
    device: Any = SimpleNamespace(name="Abacus")
    done = measure_by(tmp_path / "log.jsonl", device, None, work, 160.0, "", takes_all=True)  # type: ignore[arg-type]
    assert asked == [(0, 20.0), (1, 25.0), (2, 45.0), (0, 25.0), (2, 15.0)]
    assert (done.jobs, done.complete) == (9, 9)
    asked.clear()
    completes[1] = [3]
    measure_by(tmp_path / "log.jsonl", device, None, work[1:2], inf, "", takes_all=True)  # type: ignore[arg-type]
    assert asked == [(1, inf)]


def test_a_run_is_reported_and_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One file holds products, layers and models, in both steps. A second run repeats nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ksgen.bench.rows.why_unreliable", lambda *_: "")
    monkeypatch.setattr("ksgen.bench.baselines.warm_up", lambda call: call())
    monkeypatch.setattr("ksgen.bench.whole_models.warm_up", lambda call: call())
    use_small_models(monkeypatch)
    command = ("table", *TINY, "--contenders", "layer,bmm,dense", "--device", "native")
    ksgen(*command, "--parts", "layers", "--steps", "forward")
    before = lines_of(tmp_path / "table.jsonl", "measurement")
    told = ksgen(*command)
    assert "8 of 8 jobs measured on " in told
    assert "ksgen bench report table.jsonl makes a page of the rows." in told
    assert "Whole models" in told
    log = tmp_path / "table.jsonl"
    measured = lines_of(log, "measurement")
    assert measured[: len(before)] == before
    assert len({line["key"] for line in measured}) == len(measured) == 3 * 8
    told = json.loads(ksgen(*command, "--json", "--time-limit", "1h"))
    assert (told["jobs"], told["complete"], told["files"][:2]) == (8, 8, ["table.jsonl", "table.csv"])
    assert lines_of(log, "measurement") == measured
    rows = read_rows(tmp_path / "table.csv")
    assert rows == read_rows(log)
    assert all(row.status == OK and row.is_accurate and row.identity for row in rows)
    assert [len(each) for each in kinds_of(rows)] == [6, 6, 6, 6]
    assert {row.pattern for row in kinds_of(rows).models} == {WHOLE}
    page = ksgen("report", "table.jsonl", "--markdown", "-")
    for title in (
        "### KSLinear compared with the best of all others", "### Whole models", "### Contenders and their versions",
        "## Patterns, training steps", "## Layers, training steps",
    ):  # fmt: skip
        assert title in page
    assert "| training steps, patterns | float32 | bsf | 16 |" in page
    ksgen("report", "table.csv")
    assert "Whole models" in (tmp_path / "table.html").read_text()


def test_a_run_ends_with_what_a_layer_gains_in_patterns_and_layers() -> None:
    rows = [row("1,8,8,2", name, layer=layer) for name in ("layer", "bmm") for layer in ("", "up")]
    _, gains, _ = bench_table._summaries(rows)
    assert [line[0] for line in gains.rows] == ["forward, patterns", "forward"]


def test_layers_and_products_refuse_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = {"kind": "contender", "key": "k", "arithmetic": "float32", "identity": "i", "status": "failed", "batch": 8}
    products = json.dumps({**line, "pattern": "1,4,4,1"})
    layers = json.dumps({**line, "key": "l", "pattern": "1,4,4,1", "layer": "up"})
    Path("table.jsonl").write_text(f"{products}\n{layers}\n")
    for other, command in (("layers", ("paper",)), ("paper", ("layers", "named"))):
        with pytest.raises(Exception, match=f"holds measurements of `ksgen bench {other}`"):
            ksgen(*command, "--subset", "1", "--batch", "8", "-o", "table.jsonl", "--time-limit", "1s")


MISTAKES = [
    (["--parts", "model"], "--parts 'model'; did you mean models? accepted: patterns, layers, models"),
    (["--steps", "decode"], "--steps 'decode'; accepted: forward, training"),
    (["--contenders", "bmn"], "contender 'bmn'; did you mean bmm? accepted: ksgen, layer, bmm"),
    (["--contenders", "bmm", "--without", "bmm"], "no contender is left: --without excludes all of them"),
    (["--batch", "0"], "--batch '0'; accepted: whole numbers from 1 up"),
    (["-o", "rows.csv"], "-o rows.csv: the log is a .jsonl file; its rows go to the .csv next to it"),
    (["--time-limit", "0s", "--subset", "1"], "--time-limit ended before the first measurement; give more time"),
    (["--time-limit", "soon"], "time 'soon'; accepted: 90s, 8m, 1h30m"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES, ids=lambda each: " ".join(each) * isinstance(each, list))
def test_a_mistake_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path) -> None:
    done = program.ksgen("bench", "table", *arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[-1].startswith(f"ksgen: {message}"), done.stderr


def test_no_pytorch_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(Exception, match="needs torch") as refused:
        ksgen("table")
    assert str(refused.value) == f"`ksgen bench table` needs torch: {install_line('bench')}"
